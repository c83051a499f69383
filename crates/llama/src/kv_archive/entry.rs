//! One entry of the KV archive.

use crate::cells::PrefixHash;
use crate::ffi::{LlamaPos, LlamaToken};
use crate::token_key::TokenKey;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// The most tokens of an entry. Longer runs are saved as several.
pub const MAX_ENTRY_TOKENS: usize = 512;

/// The KV cells of a run of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvArchiveEntry {
    /// The key of the first token; the keys of the others follow without a gap.
    pub start: TokenKey,
    pub tokens: Vec<LlamaToken>,
    /// The RoPE position of the first token; the positions of the others follow without a gap.
    pub position: LlamaPos,
    /// The cells in llama.cpp's state format.
    pub cells: Vec<u8>,
    /// What the first token was computed from, if each other one was computed from the tokens before it. Not on disk.
    pub prefix: Option<PrefixHash>,
}

impl KvArchiveEntry {
    pub(super) fn header(&self) -> KvArchiveHeader {
        let Self { start, position, prefix, .. } = *self;
        KvArchiveHeader { start, tokens: self.tokens.clone(), position, prefix }
    }
}

/// An entry without its cells: enough to decide whether it can be restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvArchiveHeader {
    /// The key of the first token.
    pub start: TokenKey,
    pub tokens: Vec<LlamaToken>,
    /// The RoPE position of the first token.
    pub position: LlamaPos,
    /// What the first token was computed from, as in the entry.
    pub prefix: Option<PrefixHash>,
}

/// Whether an entry is on disk. Shared with the writer thread.
pub(super) struct KvEntryDiskState(AtomicU8);

const WRITE_PENDING: u8 = 0;
const WRITTEN: u8 = 1;
const NOT_STORED: u8 = 2;

impl KvEntryDiskState {
    fn new(state: u8) -> Arc<Self> {
        Arc::new(Self(AtomicU8::new(state)))
    }

    pub(super) fn not_stored() -> Arc<Self> {
        Self::new(NOT_STORED)
    }

    pub(super) fn written() -> Arc<Self> {
        Self::new(WRITTEN)
    }

    pub(super) fn is_written(&self) -> bool {
        self.0.load(Ordering::Acquire) == WRITTEN
    }

    /// Neither on disk nor queued to be written.
    pub(super) fn is_not_stored(&self) -> bool {
        self.0.load(Ordering::Acquire) == NOT_STORED
    }

    pub(super) fn set_pending(&self) {
        self.0.store(WRITE_PENDING, Ordering::Release);
    }

    /// Marks the entry as not on disk; a queued write is cancelled by this.
    pub(super) fn set_not_stored(&self) {
        self.0.store(NOT_STORED, Ordering::Release);
    }

    /// Marks a pending entry as written; false if it was cancelled meanwhile.
    pub(super) fn finish_write(&self) -> bool {
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        self.0.compare_exchange(WRITE_PENDING, WRITTEN, success, failure).is_ok()
    }
}
