//! The error of the rules of a world. The message is shown to the agent or the user who broke the rule; code decides by
//! the kind.

use halo_core::ErrorKind;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    pub kind: ErrorKind,
    pub message: String,
}

impl Error {
    pub fn invalid_input(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::InvalidInput, message: message.into() }
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::NotFound, message: message.into() }
    }

    /// The request contradicts the state of the world: a name is taken, a limit is reached, a permission is missing.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Conflict, message: message.into() }
    }

    /// Names in front of the message what it is about: "Ada: a persona has a seed".
    #[must_use]
    pub fn with_context(self, subject: impl std::fmt::Display) -> Self {
        Self { message: format!("{subject}: {}", self.message), ..self }
    }

    /// The same failure as an error of an operation, for callers outside the rules.
    pub fn in_operation(self, operation: impl Into<String>) -> halo_core::Error {
        halo_core::Error::new(self.kind, operation, self.message.clone()).with_source(self)
    }
}

impl From<halo_core::Error> for Error {
    fn from(error: halo_core::Error) -> Self {
        Self { kind: error.kind, message: error.to_string() }
    }
}
