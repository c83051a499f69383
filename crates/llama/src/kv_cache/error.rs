//! The error of syncing the KV cache with a window.

use crate::ffi::LlamaError;
use halo_core::ErrorKind;

#[derive(Debug, thiserror::Error)]
pub enum KvCacheError {
    #[error(transparent)]
    Llama(#[from] LlamaError),
    #[error("the context window is empty; it needs at least one token")]
    EmptyWindow,
    #[error("the tokens of the context window are not in ascending order of position")]
    UnorderedWindow,
    /// Answers are generated in all lanes. The caller starts no more of them than there are lanes.
    #[error("the model generates as many answers as it can at once; try again later")]
    AllLanesBusy,
    /// The tokens that a fork needs beside those of the conversation.
    #[error(
        "context length exceeded: {} tokens of a fork do not fit in the {} free of {} cells; shorten the message or raise model.context",
        group_digits(.tokens), group_digits(.free), group_digits(.cells)
    )]
    ForkTooLarge { tokens: usize, free: usize, cells: usize },
    /// The tokens of the window and those that the answer needs at least.
    #[error(
        "context length exceeded: {} tokens do not fit in {}; shorten the message or raise model.context",
        group_digits(.tokens), group_digits(.limit)
    )]
    WindowTooLarge { tokens: usize, limit: usize },
}

impl KvCacheError {
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Llama(error) => error.kind(),
            Self::EmptyWindow => ErrorKind::InvalidInput,
            Self::AllLanesBusy => ErrorKind::Busy,
            Self::UnorderedWindow => ErrorKind::Internal,
            Self::ForkTooLarge { .. } | Self::WindowTooLarge { .. } => ErrorKind::ContextLengthExceeded,
        }
    }
}

/// Writes `9012` as `9,012`, as users read token counts elsewhere.
fn group_digits(n: &usize) -> String {
    let digits = n.to_string();
    let mut grouped = String::new();
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_length_error_says_what_to_do() {
        let error = KvCacheError::WindowTooLarge { tokens: 9012, limit: 8192 };
        assert_eq!(
            error.to_string(),
            "context length exceeded: 9,012 tokens do not fit in 8,192; shorten the message or raise model.context"
        );
        assert_eq!(error.kind(), ErrorKind::ContextLengthExceeded);
        assert_eq!([0, 999, 1000, 1_234_567].map(|n| group_digits(&n)), ["0", "999", "1,000", "1,234,567"]);
    }
}
