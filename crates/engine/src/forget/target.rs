//! What a request forgets: chunks and memories, by name, by turn or by their words.

use super::pending::PendingForget;
use super::record_text::{RecordText, list_record_texts};
use super::text_match::WholeWordMatcher;
use crate::conversation::unloaded_chunks;
use crate::memory::record::{Memory, load_all_memories};
use crate::title::is_wordless_name;
use halo_core::Error;
use halo_core::store::{Access, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, TurnId};
use std::collections::BTreeSet;

/// Chunks and turns of one conversation that the user names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForgetSelection {
    pub chunks: Vec<ChunkId>,
    /// Turns that must exist.
    pub turns: Vec<u32>,
    /// The first and the last turn of a range.
    pub turn_range: Option<(u32, u32)>,
}

impl ForgetSelection {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.turns.is_empty() && self.turn_range.is_none()
    }

    /// The chunks that are selected; none where nothing is named.
    pub(super) fn resolve(&self, name: &str, timeline: &Timeline) -> Result<Option<Vec<ChunkId>>, Error> {
        if self.is_empty() {
            return Ok(None);
        }
        let exists = |n: u32| timeline.turns().iter().any(|turn| turn.id.0 == n);
        if let Some(missing) = self.turns.iter().find(|&&n| !exists(n)) {
            return Err(Error::not_found(format!("reading '{name}'"), format!("there is no turn {missing}")));
        }
        if let Some(missing) = self.chunks.iter().find(|&&id| timeline.chunk(id).is_none()) {
            return Err(Error::not_found(
                format!("reading '{name}'"),
                format!("there is no chunk {missing}"),
            ));
        }
        let (from, to) = self.turn_range.unwrap_or((1, 0));
        let is_selected = |turn: TurnId| self.turns.contains(&turn.0) || (from..=to).contains(&turn.0);
        let turns = timeline.turns().iter().map(|turn| turn.id).filter(|&turn| is_selected(turn));
        let mut chunks = self.chunks.clone();
        chunks.extend(turns.flat_map(|turn| timeline.turn_chunks(turn)).map(|chunk| chunk.id()));
        chunks.sort();
        chunks.dedup();
        Ok(Some(chunks))
    }
}

/// What the user wants to forget in one conversation.
#[derive(Clone, Debug)]
pub enum ForgetQuery {
    /// The whole conversation, including its name.
    All,
    /// Chunks and turns; with words, only those that contain them. Words alone match every chunk and memory.
    Part { selection: ForgetSelection, matching: Option<WholeWordMatcher> },
}

/// What is forgotten in one conversation.
#[derive(Clone, Debug)]
pub struct ForgetTarget {
    pub conversation: String,
    pub scope: ForgetScope,
}

#[derive(Clone, Debug)]
pub enum ForgetScope {
    Selected(ForgetItems),
    WholeConversation,
}

/// Chunks and memories that are forgotten together.
#[derive(Clone, Debug, Default)]
pub struct ForgetItems {
    pub chunks: Vec<ChunkId>,
    /// Memories that may mention the chunks.
    pub derived_memories: Vec<Memory>,
    /// Memories that are forgotten for their own text.
    pub matched_memories: Vec<Memory>,
    /// Texts beside the timeline.
    pub records: Vec<RecordText>,
    /// Whether the name of the conversation is forgotten: it gets another one.
    pub name: bool,
}

impl ForgetItems {
    pub(super) fn is_empty(&self) -> bool {
        let no_memories = self.derived_memories.is_empty() && self.matched_memories.is_empty();
        self.chunks.is_empty() && no_memories && self.records.is_empty() && !self.name
    }
}

impl ForgetTarget {
    /// The chunks and memories as they are now.
    pub(super) fn resolve(&self, store: &mut dyn Store, timeline: &Timeline) -> Result<ForgetItems, Error> {
        Ok(match &self.scope {
            ForgetScope::Selected(items) => items.clone(),
            ForgetScope::WholeConversation => ForgetItems {
                chunks: timeline.chunks().map(|chunk| chunk.id()).collect(),
                derived_memories: load_all_memories(store, &self.conversation)?,
                ..ForgetItems::default()
            },
        })
    }

    pub(super) fn is_whole_conversation(&self) -> bool {
        matches!(self.scope, ForgetScope::WholeConversation)
    }
}

/// Who requested it, and when: part of the proof.
#[derive(Clone, Copy, Debug)]
pub(super) struct ForgetRequest {
    pub requested_by: &'static str,
    /// In milliseconds since 1970.
    pub now: i64,
}

impl ForgetRequest {
    pub fn by_user(now: i64) -> Self {
        Self { requested_by: "the user's wish", now }
    }

    pub fn by_age(now: i64) -> Self {
        Self { requested_by: "its age", now }
    }
}

/// Something that a request would forget.
#[derive(Clone, Debug)]
pub struct ForgetPreviewRow {
    pub conversation: String,
    pub subject: ForgetSubject,
    pub text: String,
    pub tokens: usize,
}

#[derive(Clone, Debug)]
pub enum ForgetSubject {
    Chunk(ChunkId),
    Memory(Box<Memory>),
    /// A text beside the timeline: a note, a client's summary, a system prompt.
    Record(RecordText),
    /// The name of the conversation.
    Name,
}

impl ForgetSubject {
    #[must_use]
    pub fn is_chunk(&self) -> bool {
        matches!(self, ForgetSubject::Chunk(_))
    }

    #[must_use]
    pub fn is_memory(&self) -> bool {
        matches!(self, ForgetSubject::Memory(_))
    }
}

/// What a request would forget in one conversation.
#[derive(Clone, Debug)]
pub struct ForgetPlan {
    pub target: ForgetTarget,
    pub rows: Vec<ForgetPreviewRow>,
    /// Longer words that contain the words of the request: they do not match.
    pub longer_words: BTreeSet<String>,
    /// The words that are forgotten wherever they are in the conversation.
    pub(super) words: Option<WholeWordMatcher>,
}

/// A conversation that must exist.
pub(super) fn load_existing(store: &mut dyn Store, name: &str, access: Access) -> Result<Timeline, Error> {
    if store.find_conversation(name)?.is_none() {
        return Err(no_such_conversation(name));
    }
    store.load(name, access)
}

pub(super) fn no_such_conversation(name: &str) -> Error {
    Error::not_found("forgetting", format!("there is no conversation '{name}'"))
}

/// What a request would forget in a conversation. Chunks that are forgotten already are left out.
pub(super) fn plan_forget(
    store: &mut dyn Store,
    name: &str,
    query: &ForgetQuery,
) -> Result<ForgetPlan, Error> {
    let mut timeline = load_existing(store, name, Access::Read)?;
    let mut longer_words = BTreeSet::new();
    let scope = match query {
        ForgetQuery::All => ForgetScope::WholeConversation,
        ForgetQuery::Part { selection, matching } => {
            let selected = selection.resolve(name, &timeline)?;
            let memories = load_all_memories(store, name)?;
            let mut items =
                ForgetItems { chunks: selected.clone().unwrap_or_default(), ..Default::default() };
            if let Some(matcher) = matching {
                items.chunks = chunks_matching(store, name, &mut timeline, selected.as_deref(), |text| {
                    longer_words.extend(matcher.longer_words(text));
                    matcher.find(text).is_some()
                })?;
                // A memory that was edited may contain words that no chunk has; so may notes and the name.
                if selected.is_none() {
                    let is_match = |text: &str| matcher.find(text).is_some();
                    let matches = |memory: &&Memory| {
                        is_match(&memory.text) || memory.operations.iter().any(|text| is_match(text))
                    };
                    items.matched_memories.extend(memories.iter().filter(matches).cloned());
                    let texts = list_record_texts(store, name)?.into_iter();
                    items.records =
                        texts.filter(|(_, text)| is_match(text)).map(|(record, _)| record).collect();
                    let created = store.find_conversation(name)?.map_or(0, |summary| summary.created);
                    items.name = is_match(name) && !is_wordless_name(name, created);
                }
            }
            let missing = unloaded_chunks(&timeline, &items.chunks);
            store.load_bodies(name, &mut timeline, &missing)?;
            items.chunks.retain(|&id| timeline.chunk(id).is_none_or(|chunk| !chunk.is_forgotten()));
            let is_matched =
                |memory: &Memory| items.matched_memories.iter().any(|matched| matched.id == memory.id);
            let derived = memories.iter().filter(|m| m.may_mention(&items.chunks) && !is_matched(m));
            items.derived_memories = derived.cloned().collect();
            ForgetScope::Selected(items)
        }
    };
    let words = match query {
        ForgetQuery::Part { selection, matching } => matching.clone().filter(|_| selection.is_empty()),
        ForgetQuery::All => None,
    };
    let target = ForgetTarget { conversation: name.to_owned(), scope };
    let rows = preview(store, &target, &mut timeline)?;
    Ok(ForgetPlan { target, rows, longer_words, words })
}

fn preview(
    store: &mut dyn Store,
    target: &ForgetTarget,
    timeline: &mut Timeline,
) -> Result<Vec<ForgetPreviewRow>, Error> {
    let name = &target.conversation;
    let items = target.resolve(store, timeline)?;
    let row = |subject: ForgetSubject, text: String, tokens: usize| ForgetPreviewRow {
        conversation: name.clone(),
        subject,
        text,
        tokens,
    };
    let mut rows: Vec<ForgetPreviewRow> = chunk_texts(store, name, timeline, &items.chunks)?
        .into_iter()
        .map(|chunk| row(ForgetSubject::Chunk(chunk.id), chunk.text, chunk.tokens))
        .collect();
    let memories = items.derived_memories.into_iter().chain(items.matched_memories);
    rows.extend(memories.map(|memory| {
        let text = memory.text.clone();
        row(ForgetSubject::Memory(Box::new(memory)), text, 0)
    }));
    if !items.records.is_empty() {
        let texts = list_record_texts(store, name)?.into_iter();
        let texts = texts.filter(|(record, _)| items.records.contains(record));
        rows.extend(texts.map(|(record, text)| row(ForgetSubject::Record(record), text, 0)));
    }
    rows.extend(items.name.then(|| row(ForgetSubject::Name, name.clone(), 0)));
    Ok(rows)
}

/// A chunk with its text.
pub(super) struct ChunkText {
    pub id: ChunkId,
    pub text: String,
    pub tokens: usize,
}

pub(super) fn chunk_texts(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    chunks: &[ChunkId],
) -> Result<Vec<ChunkText>, Error> {
    let missing = unloaded_chunks(timeline, chunks);
    store.load_bodies(name, timeline, &missing)?;
    let text = |&id: &ChunkId| {
        let chunk = timeline.chunk(id)?;
        Some(ChunkText { id, text: chunk.text().into_owned(), tokens: chunk.len() })
    };
    Ok(chunks.iter().filter_map(text).collect())
}

/// The chunks, all or some, whose text matches.
pub(super) fn chunks_matching(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    among: Option<&[ChunkId]>,
    mut matches: impl FnMut(&str) -> bool,
) -> Result<Vec<ChunkId>, Error> {
    let all: Vec<ChunkId> = match among {
        Some(some) => some.to_vec(),
        None => timeline.chunks().map(|chunk| chunk.id()).collect(),
    };
    let mut matching = Vec::new();
    // In batches: the text of a long conversation does not fit into memory.
    for batch in all.chunks(512) {
        let missing = unloaded_chunks(timeline, batch);
        store.load_bodies(name, timeline, &missing)?;
        matching.extend(batch.iter().filter(|&&id| timeline.chunk(id).is_some_and(|c| matches(&c.text()))));
        timeline.unload_pruned();
    }
    Ok(matching)
}

/// The chunks of a list that are deleted and not forgotten yet: others were undeleted, or are gone.
pub(super) fn still_hidden(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    chunks: Vec<ChunkId>,
) -> Result<Vec<ChunkId>, Error> {
    let missing = unloaded_chunks(timeline, &chunks);
    store.load_bodies(name, timeline, &missing)?;
    let is_hidden =
        |id: &ChunkId| timeline.chunk(*id).is_some_and(|chunk| chunk.is_deleted() && !chunk.is_forgotten());
    Ok(chunks.into_iter().filter(is_hidden).collect())
}

/// Whether a pending request has one of some chunks.
pub(super) fn has_any_chunk(entry: &PendingForget, chunks: &[ChunkId]) -> bool {
    entry.chunks.iter().any(|chunk| chunks.contains(chunk))
}
