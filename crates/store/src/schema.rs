//! Versions of the schema. A database is brought from its version to the newest when it is opened; a migration, once
//! released, never changes.

use crate::rows;
use crate::sql::{SqlConnection, SqlError};

pub(crate) const NEWEST_VERSION: i64 = 5;

/// The statements that lead from each version of an SQLite schema to the next.
pub(crate) const SQLITE_MIGRATIONS: [&str; NEWEST_VERSION as usize] = [
    include_str!("../schema/sqlite-1.sql"),
    include_str!("../schema/sqlite-2.sql"),
    include_str!("../schema/sqlite-3.sql"),
    include_str!("../schema/sqlite-4.sql"),
    include_str!("../schema/sqlite-5.sql"),
];

/// The statements that lead from each version of a PostgreSQL schema to the next.
pub(crate) const POSTGRES_MIGRATIONS: [&str; NEWEST_VERSION as usize] = [
    include_str!("../schema/postgres-1.sql"),
    include_str!("../schema/postgres-2.sql"),
    include_str!("../schema/postgres-3.sql"),
    include_str!("../schema/postgres-4.sql"),
    include_str!("../schema/postgres-5.sql"),
];

/// Fills what SQL alone cannot, after the statements have run on a database of an older version.
pub(crate) fn fill_new_columns(sql: &mut dyn SqlConnection, old_version: i64) -> Result<(), SqlError> {
    // Version 4: the turn of a log entry is inside its change, which is JSON.
    if (1..4).contains(&old_version) { rows::fill_log_turns(sql) } else { Ok(()) }
}
