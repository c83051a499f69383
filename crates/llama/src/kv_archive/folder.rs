//! The folder of the KV archive: `<model fingerprint>/<conversation hash>/<first token>-<length>.kv`.

use super::entry::MAX_ENTRY_TOKENS;
use super::file;
use crate::token_key::TokenKey;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use xxhash_rust::xxh3::xxh3_128;

/// A conversation's folder name. It is a hash because conversation names are user input and must not become paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ConversationHash(u128);

impl ConversationHash {
    pub(super) fn new(conversation: &str) -> Self {
        Self(xxh3_128(conversation.as_bytes()))
    }

    fn folder_name(self) -> String {
        format!("{:032x}", self.0)
    }
}

/// The name that the recurrent states of a conversation are filed under. No conversation has it.
pub(super) fn states_name(conversation: &str) -> String {
    format!("{conversation}\0recurrent")
}

/// Identifies an entry: its conversation and the key of its first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct KvArchiveKey {
    pub(super) conversation: ConversationHash,
    pub(super) start: TokenKey,
}

pub(super) fn conversation_folder(
    folder: &Path,
    model_fingerprint: u128,
    conversation: ConversationHash,
) -> PathBuf {
    folder.join(format!("{model_fingerprint:032x}")).join(conversation.folder_name())
}

pub(super) fn entry_path(folder: &Path, model_fingerprint: u128, key: KvArchiveKey, len: usize) -> PathBuf {
    let TokenKey { timeline_pos, offset } = key.start;
    let name = format!("{timeline_pos:016x}.{offset:x}-{len}.kv");
    conversation_folder(folder, model_fingerprint, key.conversation).join(name)
}

/// The key of the first token and the length, from the name of a file.
fn parse_file_name(name: &str) -> Option<(TokenKey, usize)> {
    let (key, len) = name.strip_suffix(".kv")?.split_once('-')?;
    let (timeline_pos, offset) = key.split_once('.')?;
    let timeline_pos = u64::from_str_radix(timeline_pos, 16).ok()?.cast_signed();
    let key = TokenKey { timeline_pos, offset: u16::from_str_radix(offset, 16).ok()? };
    Some((key, len.parse().ok().filter(|&len| (1..=MAX_ENTRY_TOKENS).contains(&len))?))
}

/// A file in the folder.
pub(super) struct ScannedFile {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) modified: SystemTime,
    /// The key and the length that the file name states. None for another model's file or another kind of file.
    pub(super) entry: Option<(KvArchiveKey, usize)>,
}

/// Lists all files by name; no file is opened.
pub(super) fn scan(folder: &Path, model_fingerprint: u128) -> Vec<ScannedFile> {
    let own_name = format!("{model_fingerprint:032x}");
    let mut files = Vec::new();
    for model in list_dir(folder) {
        let is_own = file_name(&model) == Some(own_name.as_str());
        for conversation_path in list_dir(&model) {
            let conversation = file_name(&conversation_path)
                .and_then(|name| u128::from_str_radix(name, 16).ok())
                .map(ConversationHash)
                .filter(|_| is_own);
            for path in list_dir(&conversation_path) {
                let Ok(metadata) = fs::metadata(&path) else { continue };
                let parsed = file_name(&path).and_then(parse_file_name);
                let entry = conversation
                    .zip(parsed)
                    .map(|(conversation, (start, len))| (KvArchiveKey { conversation, start }, len));
                let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                files.push(ScannedFile { path, bytes: metadata.len(), modified, entry });
            }
        }
    }
    files
}

/// The model whose file this is.
pub(super) fn model_of(folder: &Path, file: &Path) -> Option<u128> {
    let name = file.strip_prefix(folder).ok()?.iter().next()?.to_str()?;
    u128::from_str_radix(name, 16).ok()
}

/// The result of [`verify_folder`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvArchiveReport {
    /// The number of intact entries.
    pub entries: usize,
    /// Bytes of the intact entries.
    pub bytes: u64,
    /// Files that are damaged or not entries. They are never used; their cells are recomputed.
    pub damaged: Vec<PathBuf>,
}

/// Reads every file of an archive folder, of all models, and verifies its checksums.
#[must_use]
pub fn verify_folder(folder: &Path) -> KvArchiveReport {
    let mut report = KvArchiveReport::default();
    for model in list_dir(folder) {
        let fingerprint = file_name(&model).and_then(|name| u128::from_str_radix(name, 16).ok());
        for path in list_dir(&model).iter().flat_map(|conversation| list_dir(conversation)) {
            let named = fingerprint.zip(file_name(&path).and_then(parse_file_name));
            match named.map(|(fingerprint, (start, len))| file::read_entry(&path, fingerprint, start, len)) {
                Some(Ok(entry)) => {
                    report.entries += 1;
                    report.bytes += file::file_bytes(&entry);
                }
                _ => report.damaged.push(path),
            }
        }
    }
    report
}

/// Removes the entries of all conversations that are not listed, of all models.
pub fn retain_conversations(folder: &Path, conversations: &[String]) -> std::io::Result<()> {
    let folder_names = |conversation: &String| {
        [ConversationHash::new(conversation), ConversationHash::new(&states_name(conversation))]
            .map(ConversationHash::folder_name)
    };
    let retained: Vec<String> = conversations.iter().flat_map(folder_names).collect();
    for path in list_dir(folder).iter().flat_map(|model| list_dir(model)) {
        let is_retained = file_name(&path).is_some_and(|name| retained.iter().any(|other| other == name));
        if path.is_dir() && !is_retained {
            fs::remove_dir_all(path)?;
        }
    }
    Ok(())
}

pub(super) fn list_dir(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.filter_map(|e| e.ok().map(|e| e.path())).collect();
    paths.sort_unstable();
    paths
}

fn file_name(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}
