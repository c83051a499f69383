//! What the two databases have in common: statements with numbered parameters over three kinds of values, and
//! transactions. [`Database`](crate::database::Database) says everything else once, for both.
//!
//! Statements number their parameters `$1`, `$2`, … in the order in which they first appear: then both databases
//! read the same text.

use halo_core::store::Durability;
use halo_core::{Error, ErrorKind};

/// One value of a row or of a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SqlValue<'a> {
    Int(i64),
    Text(&'a str),
    Blob(&'a [u8]),
}

/// One row of an answer.
pub(crate) struct SqlRow<'a>(pub &'a [SqlValue<'a>]);

impl<'a> SqlRow<'a> {
    pub(crate) fn int(&self, column: usize) -> Result<i64, SqlError> {
        match self.0.get(column) {
            Some(SqlValue::Int(n)) => Ok(*n),
            other => Err(wrong_type(column, other)),
        }
    }

    /// A number that cannot be negative.
    pub(crate) fn count(&self, column: usize) -> Result<u64, SqlError> {
        u64::try_from(self.int(column)?).map_err(|_| SqlError::damaged("a count is negative"))
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

fn wrong_type(column: usize, got: Option<&SqlValue<'_>>) -> SqlError {
    let got = got.map_or("nothing", |cell| match cell {
        SqlValue::Int(_) => "a number",
        SqlValue::Text(_) => "text",
        SqlValue::Blob(_) => "bytes",
    });
    SqlError::damaged(format!("column {column} of an answer holds {got}"))
}

/// What went wrong, as far as it makes a difference to what can be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SqlErrorKind {
    /// Somebody else is writing.
    Busy,
    /// No space is left.
    DiskFull,
    /// It may be read but not written.
    ReadOnly,
    /// What is there is not what was written.
    Damaged,
    /// It was written by a later version of this program.
    NewerSchema,
    /// The server or the file cannot be reached.
    Unavailable,
    /// The statement names a conversation or world that does not exist.
    NotFound,
    /// The name is taken, or the log has changed since it was read.
    Conflict,
    /// It does not fit what the store holds.
    InvalidInput,
    Other,
}

/// Why a database did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SqlError {
    pub kind: SqlErrorKind,
    /// In words: why, and what to do.
    pub message: String,
}

impl SqlError {
    pub(crate) fn new(trouble: SqlErrorKind, why: impl Into<String>) -> Self {
        Self { kind: trouble, message: why.into() }
    }

    pub(crate) fn damaged(why: impl Into<String>) -> Self {
        Self::new(SqlErrorKind::Damaged, why)
    }

    pub(crate) fn not_found(why: impl Into<String>) -> Self {
        Self::new(SqlErrorKind::NotFound, why)
    }

    pub(crate) fn conflict(why: impl Into<String>) -> Self {
        Self::new(SqlErrorKind::Conflict, why)
    }

    pub(crate) fn unavailable(why: impl Into<String>) -> Self {
        Self::new(SqlErrorKind::Unavailable, why)
    }

    pub(crate) fn invalid_input(why: impl Into<String>) -> Self {
        Self::new(SqlErrorKind::InvalidInput, why)
    }

    /// As the seam tells it, with what can be done.
    pub(crate) fn with_context(self, what: impl Into<String>) -> Error {
        let advice = match self.kind {
            SqlErrorKind::DiskFull => "; nothing was lost: free some space and try again",
            _ => "",
        };
        let kind = match self.kind {
            SqlErrorKind::Busy => ErrorKind::Busy,
            SqlErrorKind::Damaged => ErrorKind::Damaged,
            SqlErrorKind::NotFound => ErrorKind::NotFound,
            SqlErrorKind::Conflict => ErrorKind::Conflict,
            SqlErrorKind::InvalidInput => ErrorKind::InvalidInput,
            SqlErrorKind::DiskFull
            | SqlErrorKind::ReadOnly
            | SqlErrorKind::NewerSchema
            | SqlErrorKind::Unavailable => ErrorKind::Unavailable,
            SqlErrorKind::Other => ErrorKind::Internal,
        };
        Error::new(kind, what, format!("{}{advice}", self.message)).with_source(self)
    }
}

/// A database that speaks SQL.
pub(crate) trait SqlConnection {
    /// Runs a statement; returns how many rows it changed.
    fn execute(&mut self, sql: &'static str, args: &[SqlValue<'_>]) -> Result<u64, SqlError>;

    /// Runs a statement once for each row of arguments.
    fn execute_many(&mut self, sql: &'static str, rows: &[Vec<SqlValue<'_>>]) -> Result<(), SqlError>;

    /// Asks, and gives the rows one by one.
    fn query(
        &mut self,
        sql: &'static str,
        args: &[SqlValue<'_>],
        each: &mut dyn FnMut(SqlRow<'_>) -> Result<(), SqlError>,
    ) -> Result<(), SqlError>;

    /// Begins a transaction that will write, or with `None` one that sees a single state while it reads.
    fn begin(&mut self, writes: Option<Durability>) -> Result<(), SqlError>;

    /// Ends it; what it wrote is there, and safe if it was to be.
    fn commit(&mut self) -> Result<(), SqlError>;

    /// Ends it as if it had not been.
    fn rollback(&mut self);

    /// Takes the right to write under a number, until the database is closed; fails if somebody else has it.
    fn lock(&mut self, key: u64) -> Result<(), SqlError>;

    /// Whether somebody else has that right.
    fn is_locked_elsewhere(&mut self, key: u64) -> Result<bool, SqlError>;

    /// Whether the tables are those of this version.
    fn has_current_schema(&mut self) -> Result<bool, SqlError>;

    /// What the database itself finds wrong with its files, if it can look.
    fn integrity_check(&mut self) -> Result<Vec<String>, SqlError>;

    /// Copies all of it beside itself; returns where to.
    fn backup(&mut self) -> Result<String, SqlError>;

    /// From now on, what is deleted or replaced is overwritten, or no longer.
    fn set_secure_delete(&mut self, on: bool) -> Result<(), SqlError>;

    /// Writes all of it anew, so that nothing is left of what was deleted, in no file of the database's own.
    fn vacuum(&mut self) -> Result<(), SqlError>;

    /// Lets go of the file; nothing can be asked any more.
    fn close(&mut self);

    /// Gives up all that was claimed.
    fn unlock_all(&mut self);

    /// Gives up one claim.
    fn unlock(&mut self, key: u64);

    fn size_on_disk(&mut self) -> Result<u64, SqlError>;
}
