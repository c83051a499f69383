//! A store in memory.

use crate::Error;
use crate::change::Change;
use crate::chunk_body::{ChunkBody, checksum_bytes};
use crate::conversation_copy::{self, TurnCopy};
use crate::store::{
    Access, ConversationSummary, Durability, Embedding, LogEntry, MessageKey, MessageLookup, Record,
    RecordChange, RecordKind, StagedRecords, Store, conversation_id,
};
use crate::testing::stored_timeline::StoredTimeline;
use crate::timeline::Timeline;
use crate::token::{ChunkId, TurnId};
use crate::turn_end::TurnEndFinder;
use std::collections::BTreeMap;

/// A store in memory. At a [crash](Self::simulate_crash) it behaves like a real one: [`Durability::Deferred`]
/// commits are lost unless a [`Durability::Immediate`] one has followed. Its clock counts commits.
#[derive(Clone, Debug, Default)]
pub struct InMemoryStore {
    durable: BTreeMap<String, InMemoryConversation>,
    pending: BTreeMap<String, InMemoryConversation>,
    staged: BTreeMap<String, StagedRecords>,
}

#[derive(Clone, Debug, Default)]
struct InMemoryConversation {
    model: String,
    timeline: StoredTimeline,
    log: Vec<LogEntry>,
    records: BTreeMap<(RecordKind, String), Record>,
    embeddings: BTreeMap<(String, ChunkId), Embedding>,
    message_keys: BTreeMap<TurnId, MessageKey>,
}

impl InMemoryStore {
    /// Loses what is not durable.
    pub fn simulate_crash(&mut self) {
        self.pending = self.durable.clone();
        self.staged.clear();
    }

    fn conversation(&mut self, conversation: &str) -> &mut InMemoryConversation {
        self.pending.entry(conversation.to_owned()).or_default()
    }

    /// Writes something other than a timeline. Such a write is durable at once, with all commits before it.
    fn write_durable(
        &mut self,
        conversation: &str,
        write: impl FnOnce(&mut InMemoryConversation),
    ) -> Result<(), Error> {
        write(self.conversation(conversation));
        self.durable = self.pending.clone();
        Ok(())
    }
}

impl Store for InMemoryStore {
    fn list_conversations(&mut self) -> Result<Vec<ConversationSummary>, Error> {
        let summary = |(name, stored): (&String, &InMemoryConversation)| {
            let timeline = stored.timeline.load()?;
            Ok(ConversationSummary {
                id: conversation_id(checksum_bytes(name.as_bytes()), 0),
                name: name.clone(),
                model: stored.model.clone(),
                created: 0,
                updated: stored.log.len() as i64,
                changes: stored.log.len() as u64,
                turns: timeline.turns().len() as u64,
                tokens: timeline.len() as u64,
                live: timeline.live_len() as u64,
            })
        };
        self.pending.iter().map(summary).collect()
    }

    fn load(&mut self, conversation: &str, _access: Access) -> Result<Timeline, Error> {
        let Some(stored) = self.pending.get(conversation) else { return Ok(Timeline::new()) };
        let mut timeline = stored.timeline.load()?;
        timeline.set_revision(stored.log.len() as u64);
        Ok(timeline)
    }

    fn fetch_bodies(&mut self, conversation: &str, chunks: &[ChunkId]) -> Result<Vec<ChunkBody>, Error> {
        let stored = self.conversation(conversation);
        chunks.iter().map(|&chunk| stored.timeline.fetch(chunk)).collect()
    }

    fn commit(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), Error> {
        let staged = self.staged.remove(conversation).unwrap_or_default();
        let stored = self.conversation(conversation);
        if after.revision() != stored.log.len() as u64 {
            let message = "the conversation has changed since this timeline was loaded";
            return Err(Error::busy("committing", message));
        }
        let mut timeline = stored.timeline.clone();
        timeline.write(change, after)?;
        if after.state_hash() != timeline.load()?.state_hash() {
            return Err(Error::internal("committing", "the stored state differs from the caller's"));
        }
        stored.timeline = timeline;
        let seq = stored.log.len() as u64 + 1;
        stored.log.push(LogEntry { seq, committed_at: seq as i64, change: change.clone() });
        for (kind, key, value) in staged.records {
            let record = Record { key: key.clone(), value, updated_at: seq as i64 };
            stored.records.insert((kind, key), record);
        }
        stored.model = staged.model.unwrap_or_else(|| stored.model.clone());
        if durability == Durability::Immediate {
            self.durable = self.pending.clone();
        }
        Ok(())
    }

    fn chunk_history(&mut self, conversation: &str, chunk: ChunkId) -> Result<Vec<LogEntry>, Error> {
        let names = |e: &&LogEntry| e.change.named_chunks().contains(&chunk);
        Ok(self.conversation(conversation).log.iter().filter(names).cloned().collect())
    }

    fn load_as_of(&mut self, conversation: &str, turn: TurnId) -> Result<Timeline, Error> {
        let (mut timeline, mut end) = (Timeline::new(), TurnEndFinder::new(turn));
        for entry in &self.conversation(conversation).log {
            if !end.turn_ended_before(&entry.change) {
                timeline.apply(&entry.change)?;
            }
        }
        let missing = || Error::not_found("loading an earlier state", format!("there is no turn {}", turn.0));
        end.is_found().then_some(timeline).ok_or_else(missing)
    }

    fn turn_times(&mut self, conversation: &str) -> Result<Vec<(TurnId, i64)>, Error> {
        let mut times = BTreeMap::new();
        for entry in &self.conversation(conversation).log {
            for part in entry.change.flatten() {
                if let Change::Append(append) = part {
                    times.entry(append.turn).or_insert(entry.committed_at);
                }
            }
        }
        Ok(times.into_iter().collect())
    }

    fn records(&mut self, conversation: &str, kind: RecordKind) -> Result<Vec<Record>, Error> {
        let of_kind = self.conversation(conversation).records.iter().filter(|((k, _), _)| *k == kind);
        Ok(of_kind.map(|(_, record)| record.clone()).collect())
    }

    fn put_record(
        &mut self,
        conversation: &str,
        kind: RecordKind,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), Error> {
        self.write_durable(conversation, |stored| {
            let (updated_at, map_key) = (stored.log.len() as i64, (kind, key.to_owned()));
            match value {
                None => drop(stored.records.remove(&map_key)),
                Some(value) => {
                    let record = Record { key: key.to_owned(), value: value.to_owned(), updated_at };
                    stored.records.insert(map_key, record);
                }
            }
        })
    }

    fn embeddings(&mut self, conversation: &str, embedder: &str) -> Result<Vec<Embedding>, Error> {
        let all = self.conversation(conversation).embeddings.iter().filter(|((e, _), _)| e == embedder);
        Ok(all.map(|(_, embedding)| embedding.clone()).collect())
    }

    fn put_embeddings(
        &mut self,
        conversation: &str,
        embedder: &str,
        embeddings: &[Embedding],
    ) -> Result<(), Error> {
        self.write_durable(conversation, |stored| {
            for embedding in embeddings {
                let map_key = (embedder.to_owned(), embedding.chunk);
                if embedding.vector.is_empty() {
                    stored.embeddings.remove(&map_key);
                } else {
                    stored.embeddings.insert(map_key, embedding.clone());
                }
            }
        })
    }

    fn copy_with_records(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
        records: &mut dyn FnMut() -> Vec<RecordChange>,
    ) -> Result<(), Error> {
        if self.pending.contains_key(to) {
            return Err(Error::conflict("copying", format!("there is a conversation '{to}' already")));
        }
        let turns = conversation_copy::copy_turns(self, from, Access::Read, convert)?;
        let original = self.conversation(from).clone();
        let mut copy = InMemoryConversation {
            model: model.to_owned(),
            records: original.records,
            ..InMemoryConversation::default()
        };
        for RecordChange { kind, key, value } in records() {
            match value {
                None => drop(copy.records.remove(&(kind, key))),
                Some(value) => {
                    copy.records.insert((kind, key.clone()), Record { key, value, updated_at: 0 });
                }
            }
        }
        let mut timeline = Timeline::new();
        for turn in &turns {
            for change in turn.to_changes(&timeline) {
                timeline.apply(&change)?;
                copy.timeline.write(&change, &timeline)?;
                let seq = copy.log.len() as u64 + 1;
                copy.log.push(LogEntry { seq, committed_at: turn.started_at, change });
            }
        }
        let is_copied = |e: &Embedding| timeline.chunk(e.chunk).is_some();
        copy.embeddings = original.embeddings.into_iter().filter(|(_, e)| is_copied(e)).collect();
        let last = turns.last().map(|turn| turn.turn);
        copy.message_keys =
            original.message_keys.into_iter().filter(|(turn, _)| Some(*turn) <= last).collect();
        self.write_durable(to, |stored| *stored = copy)
    }

    fn replace_by_copy(
        &mut self,
        conversation: &str,
        kept_as: &str,
        model: &str,
        settings: &[(&str, &str)],
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
    ) -> Result<(), Error> {
        // Works on a copy, so that a failure has no effect.
        let mut store = self.clone();
        store.rename(conversation, kept_as)?;
        store.copy_conversation(kept_as, conversation, model, convert)?;
        // Other tokens have other positions.
        for record in store.records(conversation, RecordKind::Attention)? {
            store.put_record(conversation, RecordKind::Attention, &record.key, None)?;
        }
        for (key, value) in settings {
            store.put_record(conversation, RecordKind::Setting, key, Some(value))?;
        }
        *self = store;
        Ok(())
    }

    fn stage_records(&mut self, conversation: &str, staged: StagedRecords) {
        self.staged.insert(conversation.to_owned(), staged);
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), Error> {
        if self.pending.contains_key(to) {
            return Err(Error::conflict("renaming", format!("there is a conversation '{to}' already")));
        }
        let missing = || Error::not_found("renaming", format!("there is no conversation '{from}'"));
        let renamed = self.pending.remove(from).ok_or_else(missing)?;
        self.write_durable(to, |stored| *stored = renamed)
    }

    fn message_keys(&mut self, conversation: &str, last: usize) -> Result<Vec<MessageKey>, Error> {
        let keys = &self.conversation(conversation).message_keys;
        Ok(keys.values().skip(keys.len().saturating_sub(last)).copied().collect())
    }

    fn put_message_keys(&mut self, conversation: &str, keys: &[MessageKey]) -> Result<(), Error> {
        self.write_durable(conversation, |stored| {
            stored.message_keys.extend(keys.iter().map(|key| (key.turn, *key)));
        })
    }

    fn find_messages(&mut self, lookup: MessageLookup, limit: usize) -> Result<Vec<(String, TurnId)>, Error> {
        let matches = |key: &&MessageKey| match lookup {
            MessageLookup::Prefix(hash) => key.prefix_hash == hash,
            MessageLookup::Loose(hash) => key.loose_hash == hash,
        };
        let keys = self
            .pending
            .iter()
            .flat_map(|(name, stored)| stored.message_keys.values().map(move |key| (name, key)));
        let matching = keys.filter(|(_, key)| matches(key)).map(|(name, key)| (name.clone(), key.turn));
        Ok(matching.take(limit).collect())
    }

    fn transact_all(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), Error> {
        // Works on copies, so that a change that does not fit has no effect.
        let (mut store, mut draft) = (self.clone(), timeline.clone());
        for change in changes {
            store.transact(conversation, &mut draft, change, Durability::Immediate)?;
        }
        (*self, *timeline) = (store, draft);
        Ok(())
    }

    fn set_model(&mut self, conversation: &str, model: &str) -> Result<(), Error> {
        self.write_durable(conversation, |stored| stored.model = model.to_owned())
    }
}
