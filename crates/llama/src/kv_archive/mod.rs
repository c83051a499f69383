//! The KV archive: KV cells of pruned chunks and of conversations that are not in the KV cache, in RAM and on disk.
//!
//! An *entry* is a run of consecutive tokens: their cells in llama.cpp's state format, the token ids, and the position
//! that they were computed at. The key and value of a token never change, so an entry stays valid: a chunk that is
//! pruned a second time is not saved again. A thread writes entries to disk. RAM and disk each have a limit; the least
//! recently used entries are evicted first.
//!
//! The archive is a cache, not a store: an entry that is lost, damaged or of another model is recomputed from the tokens,
//! which are in the store. It knows nothing of the context window; [`kv_cache`](crate::kv_cache) decides what is saved
//! and restored.
//!
//! - `archive`: the index in RAM, lookup and eviction.
//! - `disk_space`: the reserve that the archive leaves to the store.
//! - `file`: the format of one entry on disk, with checksums.
//! - `folder`: where the files are, and what to do with a whole folder.
//! - `share`: the limits that the archives of several models share.
//! - `states`: the recurrent states of hybrid models.
//! - `writer`: the thread that writes.

mod archive;
mod disk_space;
mod entry;
mod file;
mod folder;
mod share;
mod states;
#[cfg(test)]
mod tests;
mod writer;

pub use archive::{KvArchive, KvArchiveLimits};
pub use disk_space::free_disk_space;
pub use entry::{KvArchiveEntry, KvArchiveHeader, MAX_ENTRY_TOKENS};
pub use folder::{KvArchiveReport, retain_conversations, verify_folder};
