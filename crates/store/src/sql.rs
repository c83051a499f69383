//! What the two databases have in common: statements with numbered parameters over three kinds of values, and
//! transactions. [`Database`](crate::database::Database) says everything else once, for both.
//!
//! Statements number their parameters `$1`, `$2`, … in the order in which they first appear: then both databases
//! read the same text.

use halo_core::seams::{Durability, Fault, SeamError};

/// One value of a row or of a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cell<'a> {
    Int(i64),
    Text(&'a str),
    Blob(&'a [u8]),
}

/// One row of an answer.
pub(crate) struct Row<'a>(pub &'a [Cell<'a>]);

impl<'a> Row<'a> {
    pub(crate) fn int(&self, column: usize) -> Result<i64, SqlError> {
        match self.0.get(column) {
            Some(Cell::Int(n)) => Ok(*n),
            other => Err(wrong_type(column, other)),
        }
    }

    /// A number that cannot be negative.
    pub(crate) fn count(&self, column: usize) -> Result<u64, SqlError> {
        u64::try_from(self.int(column)?).map_err(|_| SqlError::damaged("a count is negative"))
    }

    pub(crate) fn text(&self, column: usize) -> Result<&'a str, SqlError> {
        match self.0.get(column) {
            Some(Cell::Text(text)) => Ok(text),
            other => Err(wrong_type(column, other)),
        }
    }

    pub(crate) fn blob(&self, column: usize) -> Result<&'a [u8], SqlError> {
        match self.0.get(column) {
            Some(Cell::Blob(blob)) => Ok(blob),
            other => Err(wrong_type(column, other)),
        }
    }
}

fn wrong_type(column: usize, got: Option<&Cell<'_>>) -> SqlError {
    let got = got.map_or("nothing", |cell| match cell {
        Cell::Int(_) => "a number",
        Cell::Text(_) => "text",
        Cell::Blob(_) => "bytes",
    });
    SqlError::damaged(format!("column {column} of an answer holds {got}"))
}

/// What went wrong, as far as it makes a difference to what can be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Somebody else is writing.
    Busy,
    /// No space is left.
    Full,
    /// It may be read but not written.
    ReadOnly,
    /// What is there is not what was written.
    Damaged,
    /// It was written by a later version of this program.
    Newer,
    /// The server or the file cannot be reached.
    Unreachable,
    /// It does not fit what the store holds.
    Refused,
    /// Anything else.
    Other,
}

/// Why a database did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct SqlError {
    /// What kind.
    pub trouble: Trouble,
    /// In words: why, and what to do.
    pub why: String,
}

impl SqlError {
    pub(crate) fn new(trouble: Trouble, why: impl Into<String>) -> Self {
        Self { trouble, why: why.into() }
    }

    pub(crate) fn damaged(why: impl Into<String>) -> Self {
        Self::new(Trouble::Damaged, why)
    }

    pub(crate) fn refused(why: impl Into<String>) -> Self {
        Self::new(Trouble::Refused, why)
    }

    /// As the seam tells it, with what can be done.
    pub(crate) fn doing(self, what: impl Into<String>) -> SeamError {
        let advice = match self.trouble {
            Trouble::Full => "; nothing was lost: free some space and try again",
            Trouble::Damaged => "; `halo doctor` looks closer and says how to mend it",
            _ => "",
        };
        let told = SeamError::new(what, format!("{}{advice}", self.why));
        if self.trouble == Trouble::Busy { told.by(Fault::Again) } else { told }
    }
}

/// A database that speaks SQL.
pub(crate) trait Sql {
    /// Runs a statement; returns how many rows it changed.
    fn run(&mut self, sql: &'static str, args: &[Cell<'_>]) -> Result<u64, SqlError>;

    /// Runs a statement once for each row of arguments.
    fn run_many(&mut self, sql: &'static str, rows: &[Vec<Cell<'_>>]) -> Result<(), SqlError>;

    /// Asks, and gives the rows one by one.
    fn query(
        &mut self,
        sql: &'static str,
        args: &[Cell<'_>],
        each: &mut dyn FnMut(Row<'_>) -> Result<(), SqlError>,
    ) -> Result<(), SqlError>;

    /// Begins a transaction that will write, or with `None` one that sees a single state while it reads.
    fn begin(&mut self, writes: Option<Durability>) -> Result<(), SqlError>;

    /// Ends it; what it wrote is there, and safe if it was to be.
    fn commit(&mut self) -> Result<(), SqlError>;

    /// Ends it as if it had not been.
    fn rollback(&mut self);

    /// Takes the right to write under a number, until the database is closed; fails if somebody else has it.
    fn claim(&mut self, key: u64) -> Result<(), SqlError>;

    /// Whether somebody else has that right.
    fn is_claimed(&mut self, key: u64) -> Result<bool, SqlError>;

    /// Whether the tables are those of this version.
    fn schema_is_whole(&mut self) -> Result<bool, SqlError>;

    /// What the database itself finds wrong with its files, if it can look.
    fn inspect(&mut self) -> Result<Vec<String>, SqlError>;

    /// Copies all of it beside itself; returns where to.
    fn backup(&mut self) -> Result<String, SqlError>;

    /// From now on, what is deleted or replaced is overwritten, or no longer.
    fn shred(&mut self, on: bool) -> Result<(), SqlError>;

    /// Writes all of it anew, so that nothing is left of what was deleted, in no file of the database's own.
    fn scrub(&mut self) -> Result<(), SqlError>;

    /// Lets go of the file; nothing can be asked any more.
    fn close(&mut self);

    /// Gives up all that was claimed.
    fn release(&mut self);

    /// Gives up one claim.
    fn release_one(&mut self, key: u64);

    /// Bytes on disk.
    fn bytes(&mut self) -> Result<u64, SqlError>;
}
