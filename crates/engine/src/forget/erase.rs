//! Erases text permanently: from the store and its log, from the KV archive, from memories, recordings and the input
//! history.

use super::backend::ForgetBackend;
use super::pending::{PendingForget, load_pending, remove_from_pending, save_pending};
use super::proof_log::ForgetProofLog;
use super::target::{
    ChunkText, ForgetItems, ForgetRequest, ForgetTarget, chunk_texts, chunks_matching, load_existing,
};
use super::warning::ForgetWarning;
use crate::conversation::{FORGET_COUNT_KEY, load_setting, unloaded_chunks};
use crate::memory::record::{Memory, lower_formed_until};
use halo_core::Error;
use halo_core::store::{Access, EraseStore, RecordKind, Store};
use halo_core::token::ChunkId;
use serde_json::Value;
use std::path::Path;

pub(super) struct ErasedText {
    pub chunks: usize,
    pub warnings: Vec<ForgetWarning>,
}

/// Texts of fewer characters occur by chance: they are not searched for elsewhere.
const MIN_MATCH_CHARS: usize = 12;

/// Erases a target. The request is recorded first and removed last: if it fails halfway, the next start finishes it.
pub(super) fn erase_now(
    backend: &dyn ForgetBackend,
    target: &ForgetTarget,
    request: &ForgetRequest,
) -> Result<ErasedText, Error> {
    let proofs = ForgetProofLog::open(&backend.data_dir()?)?;
    let name = &target.conversation;
    let mut store = backend.open_writer()?;
    let store: &mut (dyn EraseStore + Send) = &mut *store;
    let mut timeline = load_existing(store, name, Access::Write)?;
    let whole_conversation = target.is_whole_conversation();
    let ForgetItems { chunks, derived_memories, matched_memories } = target.resolve(store, &timeline)?;
    if let Some(missing) = chunks.iter().find(|&&id| timeline.chunk(id).is_none()) {
        return Err(Error::not_found(
            format!("forgetting in '{name}'"),
            format!("there is no chunk {missing}"),
        ));
    }
    // Memories of the remaining text of their ranges may be formed again: their writer will not see the erased text.
    let first_uncovered =
        derived_memories.iter().filter(|memory| !memory.reflection).map(|memory| memory.range.from).min();
    let memories = [derived_memories, matched_memories].concat();
    let memory_ids: Vec<u64> = memories.iter().map(|memory| memory.id).collect();
    let others = remove_from_pending(load_pending(store, name)?, &chunks, &memory_ids);
    let started = PendingForget {
        due_at: request.now,
        chunks: chunks.clone(),
        memories: memory_ids,
        whole_conversation,
        started: true,
        ..PendingForget::default()
    };
    save_pending(store, name, &[others.as_slice(), &[started]].concat())?;

    // Caches and recordings come first: they are found by records that are erased below.
    increment_forget_count(store, name)?;
    backend.delete_saved_kv(name)?;
    let turns = chunks.iter().map(|id| id.turn.0).chain(memories.iter().map(|memory| memory.range.from.0));
    delete_captures_since(backend, store, name, turns.min().unwrap_or(0))?;

    let missing = unloaded_chunks(&timeline, &chunks);
    store.load_bodies(name, &mut timeline, &missing)?;
    let is_erased = |id: &ChunkId| timeline.chunk(*id).is_some_and(|chunk| chunk.is_forgotten());
    let remaining: Vec<ChunkId> = chunks.iter().copied().filter(|id| !is_erased(id)).collect();
    let texts = chunk_texts(store, name, &mut timeline, &remaining)?;
    if let Some(history) = backend.input_history() {
        scrub_input_history(&history, &texts)?;
    }
    // The name of a conversation that is forgotten whole is not in its proofs either.
    let subject = if whole_conversation { "a conversation" } else { name };
    append_proofs(&proofs, subject, &texts, &memories, request)?;
    let warnings = find_notes(store, name, &texts)?;
    if whole_conversation {
        store.erase_conversation(name)?;
    } else {
        if let Some(first) = first_uncovered.filter(|_| !chunks.is_empty()) {
            lower_formed_until(store, name, first)?;
        }
        let keys: Vec<String> = memories.iter().map(Memory::record_key).collect();
        store.erase_chunks(name, &chunks, &keys)?;
        store.load(name, Access::Write)?;
        save_pending(store, name, &others)?;
    }
    Ok(ErasedText { chunks: texts.len(), warnings })
}

fn append_proofs(
    proofs: &ForgetProofLog,
    subject: &str,
    texts: &[ChunkText],
    memories: &[Memory],
    request: &ForgetRequest,
) -> Result<(), Error> {
    for chunk in texts {
        proofs.append_proof(&format!("{subject} {}", chunk.id), &chunk.text, chunk.tokens, request)?;
    }
    for memory in memories {
        let tokens = memory.text.chars().count().div_ceil(4);
        proofs.append_proof(&format!("{subject} memory {}", memory.id), &memory.text, tokens, request)?;
    }
    Ok(())
}

/// KV cells from before the erasure have another key than those after it.
fn increment_forget_count(store: &mut dyn Store, name: &str) -> Result<(), Error> {
    let count = load_setting(store, name, FORGET_COUNT_KEY)?.and_then(|value| value.parse::<u64>().ok());
    let count = (count.unwrap_or(0) + 1).to_string();
    store.put_record(name, RecordKind::Setting, FORGET_COUNT_KEY, Some(&count))
}

/// Deletes the recordings of answers since a turn: their windows may contain its text.
fn delete_captures_since(
    backend: &dyn ForgetBackend,
    store: &mut dyn Store,
    name: &str,
    first_turn: u32,
) -> Result<(), Error> {
    for record in store.records(name, RecordKind::Capture)? {
        let capture: Value = serde_json::from_str(&record.value).unwrap_or_default();
        if capture["turn"].as_u64().is_none_or(|turn| turn >= u64::from(first_turn)) {
            backend.delete_capture(&record.key)?;
            store.put_record(name, RecordKind::Capture, &record.key, None)?;
        }
    }
    Ok(())
}

/// Removes the lines of the input history that contain an erased text, or are part of one.
fn scrub_input_history(history: &Path, texts: &[ChunkText]) -> Result<(), Error> {
    let Ok(content) = std::fs::read_to_string(history) else { return Ok(()) };
    let is_long = |text: &str| text.chars().count() >= MIN_MATCH_CHARS;
    let matches = |line: &str| {
        let line = line.trim();
        let is_of = |text: &str| {
            line == text || (is_long(text) && line.contains(text)) || (is_long(line) && text.contains(line))
        };
        !line.is_empty()
            && texts.iter().map(|text| text.text.trim()).any(|text| !text.is_empty() && is_of(text))
    };
    let rest: String =
        content.lines().filter(|line| !matches(line)).map(|line| format!("{line}\n")).collect();
    if rest != content {
        std::fs::write(history, rest).map_err(|error| {
            Error::unavailable(format!("writing {}", history.display()), error.to_string()).with_source(error)
        })?;
    }
    Ok(())
}

/// The model's notes are kept; the user is told where they repeat words of the erased text.
fn find_notes(store: &mut dyn Store, name: &str, texts: &[ChunkText]) -> Result<Vec<ForgetWarning>, Error> {
    let mut warnings = Vec::new();
    for note in store.records(name, RecordKind::Note)? {
        let words = texts.iter().flat_map(|text| text.text.split(|c: char| !c.is_alphanumeric()));
        let shared = words.filter(|word| word.chars().count() >= 5 && note.value.contains(*word));
        let mut shared: Vec<String> = shared.map(str::to_owned).collect();
        shared.sort_unstable();
        shared.dedup();
        if !shared.is_empty() {
            warnings.push(ForgetWarning::Notes { conversation: name.to_owned(), words: shared });
        }
    }
    Ok(warnings)
}

/// Where the same texts still are: in branches, in retokenized originals, in backups of the store.
pub(super) fn find_copies(backend: &dyn ForgetBackend, texts: &[&str]) -> Result<Vec<ForgetWarning>, Error> {
    let texts = texts.iter().map(|text| text.trim()).filter(|text| text.chars().count() >= MIN_MATCH_CHARS);
    let texts: Vec<String> = texts.map(str::to_lowercase).collect();
    let Some(mut store) = backend.open_reader()? else { return Ok(Vec::new()) };
    let mut warnings = Vec::new();
    for summary in store.list_conversations()? {
        let conversation = summary.name;
        let mut timeline = store.load(&conversation, Access::Read)?;
        let copies = chunks_matching(&mut *store, &conversation, &mut timeline, None, |text| {
            let text = text.to_lowercase();
            texts.iter().any(|erased| text.contains(erased))
        })?;
        if let Some(&first) = copies.first() {
            warnings.push(ForgetWarning::Copies { conversation, first, count: copies.len() });
        }
    }
    warnings.extend(backend.store_backups()?.into_iter().map(ForgetWarning::StoreBackup));
    Ok(warnings)
}
