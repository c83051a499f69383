//! The text around a message.

/// The text before and after a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MessageWrap {
    /// Before the message.
    pub prefix: String,
    /// After the message.
    pub suffix: String,
}
