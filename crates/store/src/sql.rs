//! What SQLite and PostgreSQL have in common: statements with numbered parameters over three types of values, and
//! transactions. [`Database`](crate::database::Database) is written once, on top of this.
//!
//! Statements number their parameters `$1`, `$2`, … in the order in which they first appear. SQLite counts them in that
//! order and PostgreSQL reads the numbers, so both take the same text.

use halo_core::store::{Durability, LeaseLost};
use halo_core::{Error, ErrorKind};

/// A value in a row, or a parameter of a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SqlValue<'a> {
    Int(i64),
    Text(&'a str),
    Blob(&'a [u8]),
}

/// One row of a result.
pub(crate) struct SqlRow<'a>(pub &'a [SqlValue<'a>]);

impl<'a> SqlRow<'a> {
    pub(crate) fn int(&self, column: usize) -> Result<i64, SqlError> {
        match self.0.get(column) {
            Some(SqlValue::Int(n)) => Ok(*n),
            other => Err(wrong_type(column, other)),
        }
    }

    /// An integer that is never negative.
    pub(crate) fn count(&self, column: usize) -> Result<u64, SqlError> {
        u64::try_from(self.int(column)?).map_err(|_| SqlError::damaged("a stored count is negative"))
    }

    pub(crate) fn text(&self, column: usize) -> Result<&'a str, SqlError> {
        match self.0.get(column) {
            Some(SqlValue::Text(text)) => Ok(text),
            other => Err(wrong_type(column, other)),
        }
    }

    pub(crate) fn blob(&self, column: usize) -> Result<&'a [u8], SqlError> {
        match self.0.get(column) {
            Some(SqlValue::Blob(blob)) => Ok(blob),
            other => Err(wrong_type(column, other)),
        }
    }
}

fn wrong_type(column: usize, value: Option<&SqlValue<'_>>) -> SqlError {
    let type_name = value.map_or("nothing", |value| match value {
        SqlValue::Int(_) => "an integer",
        SqlValue::Text(_) => "text",
        SqlValue::Blob(_) => "a blob",
    });
    SqlError::damaged(format!("column {column} of a stored row has an unexpected type: {type_name}"))
}

/// What kind of failure it was. Repair and retry decide by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SqlErrorKind {
    /// Another connection is writing.
    Busy,
    /// Another process has taken over the lease: nothing was written.
    LeaseLost,
    /// The transaction cannot be ordered with another one that ran at the same time, and was rolled back: it may succeed when
    /// it runs again.
    Serialization,
    /// The disk has no space left.
    DiskFull,
    /// The database may be read but not written.
    ReadOnly,
    /// Stored data fails its checks.
    Damaged,
    /// An older version of this program has written the database, which is opened for reading only.
    OlderSchema,
    /// A newer version of this program has written the database.
    NewerSchema,
    /// The server or the file cannot be accessed, or the connection to the server is lost.
    Unavailable,
    /// The server has not answered in time. Whether it has done what was asked is unknown.
    Timeout,
    /// The statement names a conversation or world that does not exist.
    NotFound,
    /// The name is taken, or the change contradicts the stored state.
    Conflict,
    /// The request does not make sense for this store.
    InvalidInput,
    Other,
}

/// A failed database operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SqlError {
    pub kind: SqlErrorKind,
    /// Why it failed, and what to do.
    pub message: String,
}

impl SqlError {
    pub(crate) fn new(kind: SqlErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    pub(crate) fn damaged(message: impl Into<String>) -> Self {
        Self::new(SqlErrorKind::Damaged, message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(SqlErrorKind::NotFound, message)
    }

    pub(crate) fn conflict(message: impl Into<String>) -> Self {
        Self::new(SqlErrorKind::Conflict, message)
    }

    /// Another process has the lease.
    pub(crate) fn leased(holder: &str) -> Self {
        let why = format!("another Halo{holder} is using it: close that one, or wait until it is done");
        Self::new(SqlErrorKind::Busy, why)
    }

    pub(crate) fn lease_lost() -> Self {
        let why = "another Halo has taken it over while this one did not answer; nothing was written: open it again";
        Self::new(SqlErrorKind::LeaseLost, why)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(SqlErrorKind::Unavailable, message)
    }

    pub(crate) fn invalid_input(message: impl Into<String>) -> Self {
        Self::new(SqlErrorKind::InvalidInput, message)
    }

    /// Whether the connection on which it occurred cannot be used again: after a timeout, the answer to one statement could be
    /// taken for that to the next one.
    pub(crate) fn breaks_connection(&self) -> bool {
        [SqlErrorKind::Unavailable, SqlErrorKind::Timeout].contains(&self.kind)
    }

    /// The error that callers of the store get. `operation` is a gerund: "opening the store".
    pub(crate) fn with_context(self, operation: impl Into<String>) -> Error {
        let advice = match self.kind {
            SqlErrorKind::DiskFull => "; nothing was lost: free some space and try again",
            _ => "",
        };
        let kind = match self.kind {
            SqlErrorKind::Busy | SqlErrorKind::LeaseLost | SqlErrorKind::Serialization => ErrorKind::Busy,
            SqlErrorKind::Damaged => ErrorKind::Damaged,
            SqlErrorKind::NotFound => ErrorKind::NotFound,
            SqlErrorKind::Conflict => ErrorKind::Conflict,
            SqlErrorKind::InvalidInput => ErrorKind::InvalidInput,
            SqlErrorKind::DiskFull
            | SqlErrorKind::ReadOnly
            | SqlErrorKind::OlderSchema
            | SqlErrorKind::NewerSchema
            | SqlErrorKind::Unavailable
            | SqlErrorKind::Timeout => ErrorKind::Unavailable,
            SqlErrorKind::Other => ErrorKind::Internal,
        };
        let error = Error::new(kind, operation, format!("{}{advice}", self.message));
        if self.kind == SqlErrorKind::LeaseLost {
            error.with_source(LeaseLost)
        } else {
            error.with_source(self)
        }
    }
}

/// A connection to an SQL database.
pub(crate) trait SqlConnection {
    /// Runs a statement and returns how many rows it changed.
    fn execute(&mut self, sql: &'static str, args: &[SqlValue<'_>]) -> Result<u64, SqlError>;

    /// Runs a statement once for each row of arguments.
    fn execute_many(&mut self, sql: &'static str, rows: &[Vec<SqlValue<'_>>]) -> Result<(), SqlError>;

    /// Runs a query and calls `each` with every row.
    fn query(
        &mut self,
        sql: &'static str,
        args: &[SqlValue<'_>],
        each: &mut dyn FnMut(SqlRow<'_>) -> Result<(), SqlError>,
    ) -> Result<(), SqlError>;

    /// Begins a transaction that writes, or with `None` one that reads a single snapshot. One that writes under leases fails
    /// with [`SqlErrorKind::LeaseLost`] if another process has taken over one of them; until it ends, none can be taken over.
    fn begin(&mut self, writes: Option<Durability>, leases: &[u64]) -> Result<(), SqlError>;

    /// Commits the transaction. With [`Durability::Immediate`] its writes are synced when this returns.
    fn commit(&mut self) -> Result<(), SqlError>;

    fn rollback(&mut self);

    /// Whether a lost connection is replaced by the next [`begin`](Self::begin).
    fn reconnects(&self) -> bool;

    /// Whether the last transaction was committed: after its connection was lost during the commit. Only for transactions
    /// that write under leases.
    fn was_committed(&mut self) -> Result<bool, SqlError>;

    /// Takes the lease with this key until it is released or the connection is closed. Fails if another connection does not
    /// release it in time. A lease that was lost is taken again.
    fn take_lease(&mut self, key: u64) -> Result<(), SqlError>;

    /// Makes sure that this process may write what a lease protects. Returns true if the lease was taken for that, and is to
    /// be released after the write.
    fn ensure_lease(&mut self, key: u64) -> Result<bool, SqlError>;

    /// Whether another connection has the lease with this key.
    fn is_leased_elsewhere(&mut self, key: u64) -> Result<bool, SqlError>;

    /// The process that has the lease with this key; 0 where its number is unknown.
    fn lease_holder(&mut self, key: u64) -> Result<u32, SqlError>;

    /// Whether all tables of this version's schema exist.
    fn has_current_schema(&mut self) -> Result<bool, SqlError>;

    /// What the database itself finds wrong with its files, one line each.
    fn integrity_check(&mut self) -> Result<Vec<String>, SqlError>;

    /// Copies the database to a place beside it and returns that place.
    fn backup(&mut self) -> Result<String, SqlError>;

    /// Switches overwriting of deleted data on or off.
    fn set_secure_delete(&mut self, on: bool) -> Result<(), SqlError>;

    /// Rewrites the whole database, so that none of its files contains deleted data.
    fn vacuum(&mut self) -> Result<(), SqlError>;

    /// Closes the file; every later query fails.
    fn close(&mut self);

    /// Keeps repairs from replacing the database while this connection is open, whether or not it holds a lease.
    fn keep_in_use(&mut self) -> Result<(), SqlError>;

    fn release_all_leases(&mut self);

    fn release_lease(&mut self, key: u64);

    fn size_on_disk(&mut self) -> Result<u64, SqlError>;
}
