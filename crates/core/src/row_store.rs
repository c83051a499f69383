//! A generic store of rows, for data beside conversations. Rows live in a namespace, have an opaque kind and a key, and
//! the caller alone knows what they mean.

use crate::error::Error;
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

/// The kind of a row: a short word, stored as it is. Old databases and exports contain it, so it never changes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowKind(Cow<'static, str>);

impl RowKind {
    /// A kind that the program defines.
    #[must_use]
    pub const fn from_static(name: &'static str) -> Self {
        Self(Cow::Borrowed(name))
    }

    /// A kind that was read from a database or a file.
    #[must_use]
    pub fn from_stored(name: String) -> Self {
        Self(Cow::Owned(name))
    }

    /// The stored word.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RowKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One stored row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The kind.
    pub kind: RowKind,
    /// The key, unique within its kind. The keys of a kind consist of digits and have the same length, so that they
    /// sort as numbers.
    pub key: String,
    /// The value, opaque to the store.
    pub value: String,
}

/// A namespace of rows, as a store lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceSummary {
    /// The name.
    pub name: String,
    /// When it was created, in milliseconds since 1970.
    pub created: i64,
}

/// A store of rows in namespaces.
pub trait RowStore {
    /// All namespaces, by name.
    ///
    /// # Errors
    /// All methods fail when the store cannot be read or written, or when its data is damaged.
    fn list_namespaces(&mut self) -> Result<Vec<NamespaceSummary>, Error>;

    /// Leases a namespace to this process until the store is closed.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`](crate::error::ErrorKind::Busy) when another process has the lease.
    fn lease_namespace(&mut self, namespace: &str) -> Result<(), Error>;

    /// Whether another process has the lease of a namespace.
    ///
    /// # Errors
    /// When the store cannot be read.
    fn is_namespace_leased(&mut self, namespace: &str) -> Result<bool, Error>;

    /// The rows of one kind whose keys are in a range, by key; of these the last `limit`.
    ///
    /// # Errors
    /// When the store cannot be read.
    fn load_rows(
        &mut self,
        namespace: &str,
        kind: &RowKind,
        keys: Range<&str>,
        limit: usize,
    ) -> Result<Vec<Row>, Error>;

    /// Writes rows and deletes others in one transaction, durable when this returns. Creates the namespace if needed.
    ///
    /// # Errors
    /// When the store cannot be written, or another process has the lease or has
    /// [taken it over](crate::store::LeaseLost); then nothing has changed.
    fn put_rows(&mut self, namespace: &str, rows: &[Row], deleted: &[(RowKind, String)])
    -> Result<(), Error>;

    /// Adds a row to a namespace that another process may have leased: a message to that process. The only write that needs
    /// no lease, because it changes no row: one that is there already stays as it is.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::error::ErrorKind::NotFound) when there is no such namespace.
    fn post_row(&mut self, namespace: &str, row: &Row) -> Result<(), Error>;

    /// Deletes a namespace and all its rows.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::error::ErrorKind::NotFound) when there is no such namespace.
    fn delete_namespace(&mut self, namespace: &str) -> Result<(), Error>;
}
