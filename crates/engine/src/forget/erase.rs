//! Erases text permanently: from the store and its log, from the KV archive, from memories, recordings and the input
//! history, and from the name of the conversation.

use super::backend::{CaptureDeletion, ForgetBackend};
use super::input_history::scrub_lines;
use super::pending::{
    PendingForget, load_pending, remove_from_pending, remove_texts_from_pending, save_pending,
};
use super::proof_log::{ForgetProofLog, proof_subject};
use super::record_text::{
    RESPONSE_CALL_IDS, RESPONSE_PARAMETERS, RecordText, delete_record_texts, list_record_texts,
};
use super::rename::{is_named_after, remove_name, unused_name};
use super::target::{
    ChunkText, ForgetItems, ForgetRequest, ForgetTarget, chunk_texts, chunks_matching, no_such_conversation,
};
use super::text_match::MIN_MATCH_CHARS;
use super::warning::ForgetWarning;
use crate::attention_history::erase_attention;
use crate::conversation::{FORGET_COUNT_KEY, load_setting, unloaded_chunks};
use crate::memory::carry::delete_carried_copies;
use crate::memory::record::{Memory, lower_formed_until};
use crate::title::{collapse_whitespace, is_wordless_name};
use halo_core::Error;
use halo_core::change::TokenRun;
use halo_core::store::{Access, ConversationSummary, EraseStore, RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::ChunkId;
use serde_json::Value;

#[derive(Default)]
pub(super) struct ErasedText {
    pub chunks: usize,
    /// The new name of the conversation, where the old one was forgotten too.
    pub new_name: Option<String>,
    pub warnings: Vec<ForgetWarning>,
}

/// What is erased of one conversation.
struct Erasure {
    summary: ConversationSummary,
    whole_conversation: bool,
    items: ForgetItems,
    /// Both kinds of memories.
    memories: Vec<Memory>,
    /// The chunks with their texts, except those that are erased already.
    texts: Vec<ChunkText>,
    /// The tokens of the chunks.
    runs: Vec<TokenRun>,
    /// What else is to be forgotten in the conversation, by other requests.
    other_requests: Vec<PendingForget>,
}

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
    let erasure = Erasure::prepare(store, target)?;
    erasure.record_start(store, request)?;

    // Caches and recordings come first: they are found by records that are erased below.
    increment_forget_count(store, name)?;
    backend.delete_saved_kv(name)?;
    let mut erased = ErasedText { chunks: erasure.texts.len(), ..ErasedText::default() };
    erased.warnings = delete_captures(backend, store, &erasure)?;
    if let Some(history) = backend.input_history() {
        let texts: Vec<&str> = erasure.texts.iter().map(|text| text.text.as_str()).collect();
        scrub_lines(&history, |line| is_line_of(line, &texts))?;
    }
    erasure.append_proofs(&proofs, request)?;
    delete_record_texts(store, name, &erasure.items.records)?;
    delete_response_words(store, name)?;
    erase_attention(store, name, &erasure.items.chunks, &erasure.runs)?;
    let memory_ids: Vec<u64> = erasure.memories.iter().map(|memory| memory.id).collect();
    let copied = (!erasure.whole_conversation).then_some(memory_ids.as_slice());
    delete_carried_copies(store, &erasure.summary.id, copied)?;
    if erasure.whole_conversation {
        remove_name(store, &proofs, &erasure.summary, None)?;
        store.erase_conversation(name)?;
    } else {
        erased.warnings.extend(find_repeated_words(store, name, &erasure.texts)?);
        if erasure.items.name {
            let new_name = unused_name(store, &erasure.summary)?;
            remove_name(store, &proofs, &erasure.summary, Some(&new_name))?;
            erased.new_name = Some(new_name);
        }
        erasure.erase_rows(store, erased.new_name.as_deref().unwrap_or(name))?;
    }
    Ok(erased)
}

impl Erasure {
    fn prepare(store: &mut dyn Store, target: &ForgetTarget) -> Result<Self, Error> {
        let name = &target.conversation;
        let summary = store.find_conversation(name)?.ok_or_else(|| no_such_conversation(name))?;
        let mut timeline = store.load(name, Access::Write)?;
        let mut items = target.resolve(store, &timeline)?;
        if let Some(missing) = items.chunks.iter().find(|&&id| timeline.chunk(id).is_none()) {
            let message = format!("there is no chunk {missing}");
            return Err(Error::not_found(format!("forgetting in '{name}'"), message));
        }
        let whole_conversation = target.is_whole_conversation();
        let texts = texts_to_erase(store, name, &mut timeline, &items.chunks)?;
        if !whole_conversation {
            items.name |= is_named_after(store, name, &mut timeline, &texts)?;
            // An erasure that was interrupted after the renaming.
            items.name &= !is_wordless_name(name, summary.created);
            let mut summaries = summaries_with(store, name, &texts)?;
            summaries.retain(|text| !items.records.contains(text));
            items.records.append(&mut summaries);
        }
        let memories = [items.derived_memories.as_slice(), &items.matched_memories].concat();
        let memory_ids: Vec<u64> = memories.iter().map(|memory| memory.id).collect();
        let others = remove_from_pending(load_pending(store, name)?, &items.chunks, &memory_ids);
        let other_requests = remove_texts_from_pending(others, &items.records, items.name);
        let runs =
            items.chunks.iter().filter_map(|&id| timeline.chunk(id)).map(|chunk| chunk.run()).collect();
        Ok(Self { summary, whole_conversation, items, memories, texts, runs, other_requests })
    }

    fn record_start(&self, store: &mut dyn Store, request: &ForgetRequest) -> Result<(), Error> {
        let started = PendingForget {
            due_at: request.now,
            chunks: self.items.chunks.clone(),
            memories: self.memories.iter().map(|memory| memory.id).collect(),
            records: self.items.records.clone(),
            name: self.items.name,
            whole_conversation: self.whole_conversation,
            started: true,
            ..PendingForget::default()
        };
        save_pending(store, &self.summary.name, &[self.other_requests.as_slice(), &[started]].concat())
    }

    /// The first turn whose text is erased. Recordings of answers since then may contain it.
    fn first_turn(&self) -> u32 {
        if !self.items.records.is_empty() {
            return 0;
        }
        let chunks = self.items.chunks.iter().map(|id| id.turn.0);
        chunks.chain(self.memories.iter().map(|memory| memory.range.from.0)).min().unwrap_or(0)
    }

    /// A proof names the conversation by its id: a name can be made of the words that are forgotten.
    fn append_proofs(&self, proofs: &ForgetProofLog, request: &ForgetRequest) -> Result<(), Error> {
        let subject = proof_subject(&self.summary);
        for chunk in &self.texts {
            proofs.append_proof(&format!("{subject} {}", chunk.id), &chunk.text, chunk.tokens, request)?;
        }
        for memory in &self.memories {
            let tokens = memory.text.chars().count().div_ceil(4);
            proofs.append_proof(&format!("{subject} memory {}", memory.id), &memory.text, tokens, request)?;
        }
        Ok(())
    }

    fn erase_rows(&self, store: &mut dyn EraseStore, name: &str) -> Result<(), Error> {
        // Memories of the remaining text of their ranges may be formed again: their writer will not see the erased text.
        let derived = self.items.derived_memories.iter().filter(|memory| !memory.reflection);
        let first_uncovered = derived.map(|memory| memory.range.from).min();
        if let Some(first) = first_uncovered.filter(|_| !self.items.chunks.is_empty()) {
            lower_formed_until(store, name, first)?;
        }
        let keys: Vec<String> = self.memories.iter().map(Memory::record_key).collect();
        store.erase_chunks(name, &self.items.chunks, &keys)?;
        store.load(name, Access::Write)?;
        save_pending(store, name, &self.other_requests)
    }
}

/// The chunks with their texts, except those that are erased already.
fn texts_to_erase(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    chunks: &[ChunkId],
) -> Result<Vec<ChunkText>, Error> {
    let missing = unloaded_chunks(timeline, chunks);
    store.load_bodies(name, timeline, &missing)?;
    let is_erased = |id: &ChunkId| timeline.chunk(*id).is_some_and(|chunk| chunk.is_forgotten());
    let remaining: Vec<ChunkId> = chunks.iter().copied().filter(|id| !is_erased(id)).collect();
    chunk_texts(store, name, timeline, &remaining)
}

/// The clients' summaries that repeat an erased text as it was said.
fn summaries_with(store: &mut dyn Store, name: &str, texts: &[ChunkText]) -> Result<Vec<RecordText>, Error> {
    let normalize = |text: &str| collapse_whitespace(text).to_lowercase();
    let erased = texts.iter().map(|text| normalize(&text.text));
    let erased: Vec<String> = erased.filter(|text| text.chars().count() >= MIN_MATCH_CHARS).collect();
    let repeats = |(record, text): &(RecordText, String)| {
        let text = normalize(text);
        record.kind == RecordKind::ClientSummary && erased.iter().any(|erased| text.contains(erased))
    };
    Ok(list_record_texts(store, name)?.into_iter().filter(repeats).map(|(record, _)| record).collect())
}

/// KV cells from before the erasure have another key than those after it.
fn increment_forget_count(store: &mut dyn Store, name: &str) -> Result<(), Error> {
    let count = load_setting(store, name, FORGET_COUNT_KEY)?.and_then(|value| value.parse::<u64>().ok());
    let count = (count.unwrap_or(0) + 1).to_string();
    store.put_record(name, RecordKind::Setting, FORGET_COUNT_KEY, Some(&count))
}

/// Deletes the ids of calls and the parameters of requests: a client may have made them of words.
fn delete_response_words(store: &mut dyn Store, name: &str) -> Result<(), Error> {
    for record in store.records(name, RecordKind::Response)? {
        let mut value: Value = serde_json::from_str(&record.value).unwrap_or_default();
        let Some(fields) = value.as_object_mut() else { continue };
        let removed = [RESPONSE_CALL_IDS, RESPONSE_PARAMETERS].map(|key| fields.remove(key));
        if removed.iter().any(Option::is_some) {
            store.put_record(name, RecordKind::Response, &record.key, Some(&value.to_string()))?;
        }
    }
    Ok(())
}

/// Deletes the recordings of answers since the first erased turn: their windows may contain its text. The note of one that was
/// not deleted is kept.
fn delete_captures(
    backend: &dyn ForgetBackend,
    store: &mut dyn Store,
    erasure: &Erasure,
) -> Result<Vec<ForgetWarning>, Error> {
    let (name, first_turn) = (&erasure.summary.name, erasure.first_turn());
    let mut warnings = Vec::new();
    for record in store.records(name, RecordKind::Capture)? {
        let capture: Value = serde_json::from_str(&record.value).unwrap_or_default();
        if capture["turn"].as_u64().is_none_or(|turn| turn >= u64::from(first_turn)) {
            match backend.delete_capture(&record.key)? {
                CaptureDeletion::Deleted => {
                    store.put_record(name, RecordKind::Capture, &record.key, None)?;
                }
                CaptureDeletion::Outside(folder) => warnings.push(ForgetWarning::CaptureOutside(folder)),
            }
        }
    }
    backend.delete_unfinished_captures(&erasure.summary)?;
    Ok(warnings)
}

/// Whether a line of the input history contains an erased text, or is part of one.
fn is_line_of(line: &str, texts: &[&str]) -> bool {
    let is_long = |text: &str| text.chars().count() >= MIN_MATCH_CHARS;
    let line = collapse_whitespace(line);
    let is_of = |text: &str| {
        line == text || (is_long(text) && line.contains(text)) || (is_long(&line) && text.contains(&line))
    };
    let texts = texts.iter().map(|text| collapse_whitespace(text));
    !line.is_empty() && texts.filter(|text| !text.is_empty()).any(|text| is_of(&text))
}

/// The model's notes and clients' summaries are kept unless the request names their words; the user is told where they repeat
/// words of the erased text.
fn find_repeated_words(
    store: &mut dyn Store,
    name: &str,
    texts: &[ChunkText],
) -> Result<Vec<ForgetWarning>, Error> {
    let mut warnings = Vec::new();
    for kind in [RecordKind::Note, RecordKind::ClientSummary] {
        let records = store.records(name, kind)?;
        let words = texts.iter().flat_map(|text| text.text.split(|c: char| !c.is_alphanumeric()));
        let is_repeated = |word: &str| records.iter().any(|record| record.value.contains(word));
        let shared = words.filter(|word| word.chars().count() >= 5 && is_repeated(word));
        let mut shared: Vec<String> = shared.map(str::to_owned).collect();
        shared.sort_unstable();
        shared.dedup();
        if !shared.is_empty() {
            let conversation = name.to_owned();
            warnings.push(match kind {
                RecordKind::Note => ForgetWarning::Notes { conversation, words: shared },
                _ => ForgetWarning::ClientSummaries { conversation, words: shared },
            });
        }
    }
    Ok(warnings)
}

/// Where the same texts still are: in branches, in retokenized originals, in backups of the store, in the log of its server.
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
    warnings.extend(find_leftovers(backend)?);
    Ok(warnings)
}

/// Copies of the whole store that the program does not erase.
pub(super) fn find_leftovers(backend: &dyn ForgetBackend) -> Result<Vec<ForgetWarning>, Error> {
    let backups = backend.store_backups()?.into_iter().map(ForgetWarning::StoreBackup);
    Ok(backups.chain(backend.has_server_log()?.then_some(ForgetWarning::ServerLog)).collect())
}
