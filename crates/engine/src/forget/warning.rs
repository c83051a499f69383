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
    /// Messages that clients sent in place of older turns contain words of the forgotten text.
    ClientSummaries { conversation: String, words: Vec<String> },
    /// Chunks with the same text are elsewhere.
    Copies { conversation: String, first: ChunkId, count: usize },
    /// A backup of the store from before.
    StoreBackup(PathBuf),
    /// A recording outside of the data folder.
    CaptureOutside(PathBuf),
    /// The store is on a PostgreSQL server, which has a log and may have backups.
    ServerLog,
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
            ForgetWarning::ClientSummaries { conversation, words } => {
                write!(
                    f,
                    "summaries that clients sent in '{conversation}' contain the same words ({})",
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
            ForgetWarning::CaptureOutside(path) => {
                write!(
                    f,
                    "a recording outside of the data folder may contain the text and was not deleted: {}",
                    path.display()
                )
            }
            ForgetWarning::ServerLog => f.write_str(
                "the tables are vacuumed, but the words stay in the write-ahead log of the PostgreSQL server until its files \
                 are overwritten or removed, and in archived logs and backups until these are deleted: let the server \
                 run checkpoints (CHECKPOINT) and recycle its log, and delete archives, backups and replication slots \
                 from before",
            ),
            ForgetWarning::NotSearched(error) => {
                write!(f, "copies of the text were not searched for: {error}")
            }
        }
    }
}
