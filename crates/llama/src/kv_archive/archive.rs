//! The index of the KV archive: which entries exist, in RAM or on disk, and which are evicted.

use super::disk_space::{DiskSpace, disk_space};
use super::entry::{KvArchiveEntry, KvArchiveHeader, KvEntryDiskState, MAX_ENTRY_TOKENS};
use super::file;
use super::folder::{self, ConversationHash, KvArchiveKey, ScannedFile, states_name};
use super::share::{ArchiveShare, ShareView};
use super::writer::{KvArchiveJob, KvArchiveWriter};
use crate::ffi::{LlamaPos, LlamaToken};
use crate::token_key::TokenKey;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::SystemTime;

/// The longest chain of branches whose parents are searched.
const MAX_BRANCH_DEPTH: usize = 32;

/// The limits of a [`KvArchive`], in bytes, and its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvArchiveLimits {
    pub ram: u64,
    pub disk: u64,
    /// Without a folder nothing is written to disk.
    pub folder: Option<PathBuf>,
}

impl KvArchiveLimits {
    #[must_use]
    pub fn disabled() -> Self {
        Self { ram: 0, disk: 0, folder: None }
    }
}

struct KvArchiveIndexEntry {
    len: usize,
    bytes: u64,
    /// The value of the LRU clock at the last use.
    last_used: u64,
    /// None until the file of an entry from an earlier run is read.
    header: Option<Arc<KvArchiveHeader>>,
    /// The tokens were decoded again since, so the next save replaces the entry.
    stale: bool,
    loaded: Option<Arc<KvArchiveEntry>>,
    disk: Arc<KvEntryDiskState>,
}

/// The KV cells of all conversations with one model.
pub struct KvArchive {
    limits: KvArchiveLimits,
    /// Identifies the model file and the format of its cells.
    model_fingerprint: u128,
    entries: BTreeMap<KvArchiveKey, KvArchiveIndexEntry>,
    /// For each branch its parent, whose entries below the position serve the branch too.
    parents: BTreeMap<ConversationHash, (ConversationHash, i64)>,
    /// Its part of the limits.
    share: ArchiveShare,
    /// The models whose archives were open in this folder at the last look: their files are theirs.
    open_models: Vec<u128>,
    /// Files of models that are not open, duplicates, and files that are not entries. They are evicted first.
    orphan_files: Vec<(PathBuf, u64)>,
    ram_used: u64,
    /// Bytes on disk or queued. Too high after failed writes; [`evict`](Self::evict) corrects it.
    disk_used: u64,
    lru_clock: u64,
    writer: Option<KvArchiveWriter>,
    /// Measures the disk of a folder; tests replace it.
    disk_space: fn(&Path) -> Option<DiskSpace>,
}

impl KvArchive {
    /// Opens the archive of a model and indexes the entries that earlier runs left in the folder. If the folder cannot be
    /// used, the archive works in RAM only.
    #[must_use]
    pub fn open(limits: KvArchiveLimits, model_fingerprint: u128) -> Self {
        Self::open_on_disk(limits, model_fingerprint, disk_space)
    }

    pub(super) fn open_on_disk(
        limits: KvArchiveLimits,
        model_fingerprint: u128,
        disk_space: fn(&Path) -> Option<DiskSpace>,
    ) -> Self {
        let share = ArchiveShare::join(limits.folder.as_deref(), model_fingerprint);
        let mut archive = Self {
            share,
            open_models: Vec::new(),
            limits,
            model_fingerprint,
            entries: BTreeMap::new(),
            parents: BTreeMap::new(),
            orphan_files: Vec::new(),
            ram_used: 0,
            disk_used: 0,
            lru_clock: 0,
            writer: None,
            disk_space,
        };
        if let Some(folder) = archive.limits.folder.clone().filter(|_| archive.limits.disk > 0) {
            let writer = file::create_private_dir(&folder).and_then(|()| KvArchiveWriter::spawn(disk_space));
            match writer {
                Ok(writer) => {
                    archive.open_models = archive.share_view().others;
                    archive.index_folder(&folder);
                    archive.writer = Some(writer);
                    archive.evict();
                }
                Err(error) => {
                    let folder = folder.display();
                    tracing::warn!("the KV archive works in RAM only: cannot use {folder}: {error}");
                }
            }
        }
        archive
    }

    fn index_folder(&mut self, folder: &Path) {
        let mut entries = Vec::new();
        for ScannedFile { path, bytes, modified, entry } in folder::scan(folder, self.model_fingerprint) {
            if folder::model_of(folder, &path).is_some_and(|model| self.open_models.contains(&model)) {
                continue;
            }
            self.disk_used += bytes;
            match entry {
                Some((key, len)) => entries.push((modified, key, len, bytes)),
                None => self.orphan_files.push((path, bytes)),
            }
        }
        // The time of the last modification is the time of the last use.
        entries.sort_by_key(|(modified, key, ..)| (*modified, *key));
        for (_, key, len, bytes) in entries {
            self.lru_clock += 1;
            let entry = KvArchiveIndexEntry {
                len,
                bytes,
                last_used: self.lru_clock,
                header: None,
                stale: false,
                loaded: None,
                disk: KvEntryDiskState::written(),
            };
            // Of two files with the same first token the newer one is used.
            if let Some(old) = self.entries.insert(key, entry)
                && let Some(path) = self.entry_path(key, old.len)
            {
                self.orphan_files.push((path, old.bytes));
            }
        }
    }

    /// Whether the cells of these tokens, computed at this position, are archived.
    #[must_use]
    pub fn contains(
        &self,
        conversation: &str,
        start: TokenKey,
        tokens: &[LlamaToken],
        position: LlamaPos,
    ) -> bool {
        let end = start.plus(tokens.len().saturating_sub(1));
        self.with_ancestors(ConversationHash::new(conversation), end).any(|conversation| {
            let entry = self.entries.get(&KvArchiveKey { conversation, start }).filter(|entry| !entry.stale);
            entry
                .and_then(|entry| entry.header.as_ref())
                .is_some_and(|header| header.position == position && header.tokens.starts_with(tokens))
        })
    }

    /// Lets a branch use the entries of its parent for the first `positions` positions, which both share.
    pub fn link_branch(&mut self, conversation: &str, parent: &str, positions: u64) {
        let end = i64::try_from(positions).unwrap_or(i64::MAX);
        if conversation != parent {
            let mut link = |branch: &str, parent: &str| {
                self.parents.insert(ConversationHash::new(branch), (ConversationHash::new(parent), end));
            };
            link(conversation, parent);
            link(&states_name(conversation), &states_name(parent));
        }
    }

    /// A conversation, and its ancestors that share a token with it.
    pub(super) fn with_ancestors(
        &self,
        conversation: ConversationHash,
        key: TokenKey,
    ) -> impl Iterator<Item = ConversationHash> + '_ {
        let parent = move |branch: &ConversationHash| {
            let shared = self.parents.get(branch).filter(|(_, end)| key.timeline_pos < *end);
            shared.map(|(parent, _)| *parent)
        };
        std::iter::successors(Some(conversation), parent).take(MAX_BRANCH_DEPTH)
    }

    /// Adds an entry; it replaces one with the same first token.
    pub fn insert(&mut self, conversation: &str, entry: KvArchiveEntry) {
        let key = KvArchiveKey { conversation: ConversationHash::new(conversation), start: entry.start };
        let (len, bytes) = (entry.tokens.len(), file::file_bytes(&entry));
        let replaced = self.remove_from_index(key);
        let disk = KvEntryDiskState::not_stored();
        let entry = Arc::new(entry);
        if let (Some(writer), Some(path)) = (&self.writer, self.entry_path(key, len)) {
            // The length is part of the file name, so only an entry of the same length is overwritten.
            if let Some(old) = replaced.filter(|old| old.len != len)
                && let Some(old_path) = self.entry_path(key, old.len)
            {
                writer.send(KvArchiveJob::Remove(old_path));
            }
            disk.set_pending();
            writer.send(KvArchiveJob::Write {
                path,
                entry: Arc::clone(&entry),
                model_fingerprint: self.model_fingerprint,
                disk: Arc::clone(&disk),
            });
            self.disk_used += bytes;
        }
        self.lru_clock += 1;
        self.ram_used += bytes;
        let indexed = KvArchiveIndexEntry {
            len,
            bytes,
            last_used: self.lru_clock,
            header: Some(Arc::new(entry.header())),
            stale: false,
            loaded: Some(entry),
            disk,
        };
        self.entries.insert(key, indexed);
        self.evict();
    }

    /// The header of the entry that holds a token. A damaged file is deleted.
    pub fn header(&mut self, conversation: &str, token: TokenKey) -> Option<Arc<KvArchiveHeader>> {
        let key = self.find_entry(ConversationHash::new(conversation), token)?;
        let entry = self.entries.get(&key)?;
        if let Some(header) = &entry.header {
            return Some(Arc::clone(header));
        }
        let path = self.entry_path(key, entry.len)?;
        match file::read_header(&path, self.model_fingerprint, key.start, entry.len) {
            Ok(header) => {
                let header = Arc::new(header);
                self.entries.get_mut(&key)?.header = Some(Arc::clone(&header));
                Some(header)
            }
            Err(why) => {
                self.drop_damaged(key, &path, &why);
                None
            }
        }
    }

    /// The entry that holds a token, from RAM or from disk. A damaged file is deleted.
    pub fn get(&mut self, conversation: &str, token: TokenKey) -> Option<Arc<KvArchiveEntry>> {
        let key = self.find_entry(ConversationHash::new(conversation), token)?;
        let loaded = self.entries.get(&key)?.loaded.clone();
        let entry = match loaded {
            Some(entry) => entry,
            None => self.load_entry(key)?,
        };
        self.lru_clock += 1;
        let clock = self.lru_clock;
        if let Some(indexed) = self.entries.get_mut(&key) {
            indexed.last_used = clock;
            indexed.header.get_or_insert_with(|| Arc::new(entry.header()));
            if indexed.loaded.replace(Arc::clone(&entry)).is_none() {
                self.ram_used += indexed.bytes;
            }
        }
        self.evict();
        Some(entry)
    }

    fn load_entry(&mut self, key: KvArchiveKey) -> Option<Arc<KvArchiveEntry>> {
        let len = self.entries.get(&key)?.len;
        let path = self.entry_path(key, len)?;
        match file::read_entry(&path, self.model_fingerprint, key.start, len) {
            Ok(entry) => {
                // The next run takes the modification time for the time of the last use.
                let _ = File::open(&path).and_then(|f| f.set_modified(SystemTime::now()));
                Some(Arc::new(entry))
            }
            Err(why) => {
                self.drop_damaged(key, &path, &why);
                None
            }
        }
    }

    /// Marks the entry of a token that is decoded again: it can still be restored, but the next save replaces it.
    pub fn mark_stale(&mut self, conversation: &str, token: TokenKey) {
        if let Some(key) = self.find_own_entry(ConversationHash::new(conversation), token)
            && let Some(entry) = self.entries.get_mut(&key)
        {
            entry.stale = true;
        }
    }

    /// Deletes an entry that could not be restored, of the conversation or of an ancestor.
    pub fn discard(&mut self, conversation: &str, start: TokenKey) {
        let own = ConversationHash::new(conversation);
        let owner = self
            .with_ancestors(own, start)
            .find(|&conversation| self.entries.contains_key(&KvArchiveKey { conversation, start }));
        self.drop_entry(KvArchiveKey { conversation: owner.unwrap_or(own), start });
    }

    /// Deletes all entries of a conversation, also those that belong to no entry of the index any more.
    pub fn forget(&mut self, conversation: &str) {
        self.forget_entries(ConversationHash::new(conversation));
        self.forget_entries(ConversationHash::new(&states_name(conversation)));
    }

    fn forget_entries(&mut self, conversation: ConversationHash) {
        self.parents.remove(&conversation);
        let entries = self.own_entries(conversation);
        entries.into_iter().for_each(|(key, _)| self.drop_entry(key));
        if let (Some(folder), Some(writer)) = (&self.limits.folder, &self.writer) {
            let folder = folder::conversation_folder(folder, self.model_fingerprint, conversation);
            for (path, _) in self.orphan_files.extract_if(.., |(path, _)| path.starts_with(&folder)) {
                writer.send(KvArchiveJob::Remove(path));
            }
        }
    }

    /// The entries of a conversation, and the value of the LRU clock at their last use.
    pub(super) fn own_entries(&self, conversation: ConversationHash) -> Vec<(KvArchiveKey, u64)> {
        let [first, last] =
            [TokenKey::BOUNDS.0, TokenKey::BOUNDS.1].map(|start| KvArchiveKey { conversation, start });
        self.entries.range(first..=last).map(|(key, entry)| (*key, entry.last_used)).collect()
    }

    /// Bytes in RAM, and bytes on disk or queued to be written.
    #[must_use]
    pub fn usage(&self) -> (u64, u64) {
        let stored = self.entries.values().filter(|entry| !entry.disk.is_not_stored());
        let entries = stored.map(|entry| entry.bytes).sum::<u64>();
        (self.ram_used, entries + self.orphan_files.iter().map(|(_, bytes)| bytes).sum::<u64>())
    }

    /// Waits until everything that is queued is on disk.
    pub fn flush(&mut self) {
        if let Some(writer) = &self.writer {
            let (done, flushed) = sync_channel(1);
            writer.send(KvArchiveJob::Flush(done));
            let _ = flushed.recv();
            self.evict();
        }
    }

    /// The entry that holds a token: the conversation's own, or an ancestor's.
    fn find_entry(&self, conversation: ConversationHash, token: TokenKey) -> Option<KvArchiveKey> {
        self.with_ancestors(conversation, token)
            .find_map(|conversation| self.find_own_entry(conversation, token))
    }

    /// The conversation's own entry that holds a token. Entries overlap where chunks were split or merged; the one with
    /// the nearest start is used.
    fn find_own_entry(&self, conversation: ConversationHash, token: TokenKey) -> Option<KvArchiveKey> {
        let lowest = token.timeline_pos.saturating_sub(MAX_ENTRY_TOKENS as i64);
        let starts = KvArchiveKey { conversation, start: TokenKey::at_position(lowest) }..=KvArchiveKey {
            conversation,
            start: token,
        };
        let holds_token = |(key, entry): &(&KvArchiveKey, &KvArchiveIndexEntry)| {
            token.distance_from(key.start).is_some_and(|n| n < entry.len)
        };
        self.entries.range(starts).rev().find(holds_token).map(|(key, _)| *key)
    }

    /// Removes an entry from the index and cancels its write; a written file stays.
    fn remove_from_index(&mut self, key: KvArchiveKey) -> Option<KvArchiveIndexEntry> {
        let entry = self.entries.remove(&key)?;
        if entry.loaded.is_some() {
            self.ram_used -= entry.bytes;
        }
        if !entry.disk.is_not_stored() {
            self.disk_used = self.disk_used.saturating_sub(entry.bytes);
            entry.disk.set_not_stored();
        }
        Some(entry)
    }

    fn drop_damaged(&mut self, key: KvArchiveKey, path: &Path, why: &str) {
        tracing::warn!("the KV archive entry {} is not used: {why}", path.display());
        self.drop_entry(key);
    }

    pub(super) fn drop_entry(&mut self, key: KvArchiveKey) {
        if let Some(entry) = self.remove_from_index(key)
            && let (Some(writer), Some(path)) = (&self.writer, self.entry_path(key, entry.len))
        {
            writer.send(KvArchiveJob::Remove(path));
        }
    }

    /// Evicts the least recently used entries where a limit is passed, down to 90 % of it, so that not every insert
    /// evicts.
    fn evict(&mut self) {
        let view = self.share_view();
        if view.others != self.open_models {
            self.adopt_files(view.others.clone());
        }
        if self.ram_used > view.ram {
            self.evict_ram(view.ram / 10 * 9);
        }
        let mut limit = self.disk_limit(view.disk);
        if self.disk_used > limit && self.writer.is_some() {
            self.disk_used = self.usage().1;
            limit = self.disk_limit(view.disk);
        }
        if self.disk_used > limit {
            self.evict_disk(limit / 10 * 9);
        }
    }

    fn share_view(&self) -> ShareView {
        self.share.update((self.ram_used, self.disk_used), (self.limits.ram, self.limits.disk))
    }

    /// Takes over the files of archives that were closed, and leaves those of archives that were opened to them.
    fn adopt_files(&mut self, open_models: Vec<u128>) {
        if let Some(root) = self.limits.folder.clone().filter(|_| self.writer.is_some()) {
            let is_open =
                |path: &Path| folder::model_of(&root, path).is_some_and(|model| open_models.contains(&model));
            for (_, bytes) in self.orphan_files.extract_if(.., |(path, _)| is_open(path)) {
                self.disk_used = self.disk_used.saturating_sub(bytes);
            }
            for file in folder::scan(&root, self.model_fingerprint) {
                let model = folder::model_of(&root, &file.path);
                let was_open = model.is_some_and(|model| self.open_models.contains(&model));
                if was_open && !is_open(&file.path) {
                    self.disk_used += file.bytes;
                    self.orphan_files.push((file.path, file.bytes));
                }
            }
        }
        self.open_models = open_models;
    }

    /// The limit on disk. It shrinks with the free space of the disk, which the store needs more.
    fn disk_limit(&self, limit: u64) -> u64 {
        let space = self.limits.folder.as_deref().and_then(self.disk_space);
        let available = space.map(|space| (self.disk_used + space.free).saturating_sub(space.reserve()));
        available.map_or(limit, |available| limit.min(available))
    }

    fn evict_ram(&mut self, target: u64) {
        for key in self.least_recently_used(|entry| entry.loaded.is_some()) {
            if self.ram_used <= target {
                break;
            }
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            // An entry whose write is pending stays in RAM; the writer limits how many bytes that can be.
            if entry.disk.is_written() {
                entry.loaded = None;
                self.ram_used -= entry.bytes;
            } else if entry.disk.is_not_stored() {
                self.remove_from_index(key);
            }
        }
    }

    fn evict_disk(&mut self, target: u64) {
        while self.disk_used > target
            && let Some((path, bytes)) = self.orphan_files.pop()
        {
            self.disk_used = self.disk_used.saturating_sub(bytes);
            self.writer.iter().for_each(|writer| writer.send(KvArchiveJob::Remove(path.clone())));
        }
        for key in self.least_recently_used(|entry| !entry.disk.is_not_stored()) {
            if self.disk_used <= target {
                break;
            }
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            self.disk_used = self.disk_used.saturating_sub(entry.bytes);
            entry.disk.set_not_stored();
            let (len, in_ram) = (entry.len, entry.loaded.is_some());
            if !in_ram {
                self.entries.remove(&key);
            }
            if let (Some(writer), Some(path)) = (&self.writer, self.entry_path(key, len)) {
                writer.send(KvArchiveJob::Remove(path));
            }
        }
    }

    /// The entries that match, least recently used first.
    fn least_recently_used(&self, matches: impl Fn(&KvArchiveIndexEntry) -> bool) -> Vec<KvArchiveKey> {
        let matching = self.entries.iter().filter(|(_, entry)| matches(entry));
        let mut order: Vec<(u64, KvArchiveKey)> =
            matching.map(|(key, entry)| (entry.last_used, *key)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, key)| key).collect()
    }

    fn entry_path(&self, key: KvArchiveKey, len: usize) -> Option<PathBuf> {
        let folder = self.limits.folder.as_ref()?;
        Some(folder::entry_path(folder, self.model_fingerprint, key, len))
    }
}
