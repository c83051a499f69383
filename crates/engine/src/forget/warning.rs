//! What the user should know after text was forgotten.

use halo_core::Error;
use halo_core::token::ChunkId;
use std::fmt;
use std::path::PathBuf;

/// What the user should know after text was forgotten.
#[derive(Clone, Debug)]
pub enum ForgetWarning {
    /// The model's notes contain words of the forgotten text.
    Notes { conversation: String, words: Vec<String> },
    /// Chunks with the same text are elsewhere.
    Copies { conversation: String, first: ChunkId, count: usize },
    /// A backup of the store from before.
    StoreBackup(PathBuf),
    /// Copies could not be searched for.
    NotSearched(Error),
}

impl fmt::Display for ForgetWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ForgetWarning::Notes { conversation, words } => {
                write!(
                    f,
                    "the model's notes in '{conversation}' contain the same words ({})",
                    words.join(", ")
                )
            }
            ForgetWarning::Copies { conversation, first, count: 1 } => {
                write!(f, "{first} in '{conversation}' has the same text")
            }
            ForgetWarning::Copies { conversation, first, count } => {
                write!(f, "{first} and {} more in '{conversation}' have the same text", count - 1)
            }
            ForgetWarning::StoreBackup(path) => {
                write!(f, "a backup of the store from before still exists: {}", path.display())
            }
            ForgetWarning::NotSearched(error) => {
                write!(f, "copies of the text were not searched for: {error}")
            }
        }
    }
}
