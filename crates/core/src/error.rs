//! The error of the traits that models, embedders and stores implement.

use crate::apply::ApplyError;
use crate::store::LeaseLost;
use std::sync::Arc;

/// The kind of a failure. Callers decide by the kind alone: the HTTP status, the OpenAI code, the exit status
/// and whether to retry follow from it. The message is for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is malformed or makes no sense.
    InvalidInput,
    /// Something that the request names does not exist.
    NotFound,
    /// The request contradicts the current state: a name is taken, or the state has changed since it was read.
    Conflict,
    /// The caller may not do this, whatever the values are.
    Forbidden,
    /// Another user of the resource is active; the same request may succeed later.
    Busy,
    /// The tokens do not fit into the context window.
    ContextLengthExceeded,
    /// The caller cancelled the operation, or the program is shutting down.
    Cancelled,
    /// Stored data fails its checks.
    Damaged,
    /// Something outside the program does not work: the network, a disk, a remote model.
    Unavailable,
    /// Everything else, including defects of the program.
    Internal,
}

impl ErrorKind {
    /// Every kind, for tests of exhaustive mappings.
    pub const ALL: [Self; 10] = [
        Self::InvalidInput,
        Self::NotFound,
        Self::Conflict,
        Self::Forbidden,
        Self::Busy,
        Self::ContextLengthExceeded,
        Self::Cancelled,
        Self::Damaged,
        Self::Unavailable,
        Self::Internal,
    ];

    /// Whether the same request may succeed when it is sent again.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::Busy | Self::Unavailable)
    }
}

/// A failed operation: which one, why it failed and what to do about it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{operation}: {message}")]
pub struct Error {
    /// The kind, which callers decide by.
    pub kind: ErrorKind,
    /// The operation that failed, as a gerund: "opening the store".
    pub operation: String,
    /// Why it failed, and what to do next.
    pub message: String,
    /// The error that caused this one.
    #[source]
    pub source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl PartialEq for Error {
    fn eq(&self, other: &Self) -> bool {
        (self.kind, &self.operation, &self.message) == (other.kind, &other.operation, &other.message)
    }
}

impl Eq for Error {}

/// Declares one constructor per kind.
macro_rules! constructors {
    ($($(#[doc = $doc:literal])+ $name:ident = $kind:ident;)+) => {
        $($(#[doc = $doc])+
        pub fn $name(operation: impl Into<String>, message: impl Into<String>) -> Self {
            Self::new(ErrorKind::$kind, operation, message)
        })+
    };
}

impl Error {
    /// An error of the given kind.
    pub fn new(kind: ErrorKind, operation: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind, operation: operation.into(), message: message.into(), source: None }
    }

    constructors! {
        /// An error of the kind [`ErrorKind::InvalidInput`].
        invalid_input = InvalidInput;
        /// An error of the kind [`ErrorKind::NotFound`].
        not_found = NotFound;
        /// An error of the kind [`ErrorKind::Conflict`].
        conflict = Conflict;
        /// An error of the kind [`ErrorKind::Forbidden`].
        forbidden = Forbidden;
        /// An error of the kind [`ErrorKind::Busy`].
        busy = Busy;
        /// An error of the kind [`ErrorKind::ContextLengthExceeded`].
        context_length_exceeded = ContextLengthExceeded;
        /// An error of the kind [`ErrorKind::Cancelled`].
        cancelled = Cancelled;
        /// An error of the kind [`ErrorKind::Damaged`].
        damaged = Damaged;
        /// An error of the kind [`ErrorKind::Unavailable`].
        unavailable = Unavailable;
        /// An error of the kind [`ErrorKind::Internal`].
        internal = Internal;
    }

    /// Replaces the kind.
    #[must_use]
    pub fn with_kind(self, kind: ErrorKind) -> Self {
        Self { kind, ..self }
    }

    /// Whether a write was refused because another process has taken over the lease. Nothing was written, and nothing will be
    /// until what the lease protects is opened again.
    #[must_use]
    pub fn is_lease_lost(&self) -> bool {
        self.source.as_ref().is_some_and(|source| source.is::<LeaseLost>())
    }

    /// Adds the error that caused this one.
    #[must_use]
    pub fn with_source(self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self { source: Some(Arc::new(source)), ..self }
    }
}

impl From<ApplyError> for Error {
    fn from(error: ApplyError) -> Self {
        Self::conflict("changing the conversation", error.to_string()).with_source(error)
    }
}
