//! What forgetting needs from the program around the engine.

use halo_core::Error;
use halo_core::store::{ConversationSummary, EraseStore, Store};
use std::path::PathBuf;
use std::time::Duration;

/// What became of a recording that was to be deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CaptureDeletion {
    /// It is gone, or was before.
    Deleted,
    /// It is in this folder, outside of the data folder: nothing is deleted there.
    Outside(PathBuf),
}

/// Stores, files and settings that hold text of conversations.
pub trait ForgetBackend: Send + Sync {
    /// A store to read from; none where none was created yet.
    fn open_reader(&self) -> Result<Option<Box<dyn Store + Send>>, Error>;

    /// A store to write to.
    fn open_writer(&self) -> Result<Box<dyn EraseStore + Send>, Error>;

    /// The folder of the proofs and their key.
    fn data_dir(&self) -> Result<PathBuf, Error>;

    /// How long text is hidden before it is erased; zero: it is erased at once.
    fn grace_period(&self) -> Result<Duration, Error>;

    /// Deletes what models have saved of a conversation: the entries of the KV archive.
    fn delete_saved_kv(&self, conversation: &str) -> Result<(), Error>;

    /// Deletes a recording of attention, by the folder that its record names.
    fn delete_capture(&self, folder: &str) -> Result<CaptureDeletion, Error>;

    /// Deletes what interrupted recordings of a conversation have left: no record names them.
    fn delete_unfinished_captures(&self, conversation: &ConversationSummary) -> Result<(), Error> {
        let _ = conversation;
        Ok(())
    }

    /// The file with the lines that were typed in the terminal, if there is one.
    fn input_history(&self) -> Option<PathBuf> {
        None
    }

    /// Copies of the store's file that repairs have left.
    fn store_backups(&self) -> Result<Vec<PathBuf>, Error> {
        Ok(Vec::new())
    }

    /// Whether the store is on a database server, whose write-ahead log and backups this program cannot erase.
    fn has_server_log(&self) -> Result<bool, Error> {
        Ok(false)
    }
}
