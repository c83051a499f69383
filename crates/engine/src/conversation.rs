//! An open conversation: its timeline and the store that persists it.
//!
//! This is the only place in the engine that commits a [`Change`]: the timeline and the store apply it together, or neither
//! does. No model is needed here, so commands that edit a conversation without one use the same type.

use halo_core::change::Change;
use halo_core::store::{Access, ConversationSummary, Durability, Record, RecordKind, StagedRecords, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Role, TurnId};
use halo_core::{Error, ErrorKind};

/// Setting: the fingerprint of the chat template that the conversation was tokenized with.
pub const TEMPLATE_KEY: &str = "template";

/// Setting: the system prompt of this conversation, where it has one of its own.
pub const SYSTEM_PROMPT_KEY: &str = "system";

/// Setting: the client's id of the last message.
pub const MESSAGE_ID_KEY: &str = "message.id";

/// Setting: the fingerprint of the functions that its KV cells were computed behind.
pub(crate) const TOOLS_KEY: &str = "tools";

/// Setting: the turn that is being answered, while it is.
pub(crate) const RUNNING_TURN_KEY: &str = "running";

/// Setting: how often text of this conversation was forgotten permanently.
pub const FORGET_COUNT_KEY: &str = "lethe.times";

/// An open conversation: its timeline and the store that persists it.
pub struct Conversation {
    name: String,
    /// See [`ConversationSummary::id`]; empty until the first message is stored.
    id: String,
    /// Identifies the conversation's KV cells in a model; empty until the first message is stored.
    kv_key: String,
    store: Box<dyn Store + Send>,
    timeline: Timeline,
    lease: Lease,
    /// The model and the fingerprint of its chat template, which the first commit records.
    origin: Option<(String, String)>,
    /// What the next commit writes beside its change.
    staged: StagedRecords,
    /// A commit has failed: the stored state may differ from the timeline in either direction.
    needs_reload: bool,
    /// The last turn whose message key is stored.
    last_keyed_turn: Option<TurnId>,
}

/// Whether this process may change the conversation.
enum Lease {
    Held,
    /// Given up while nothing happens here, so that another process can take it.
    Released,
    /// The last attempt to take it failed for this reason.
    Denied(Error),
}

impl Conversation {
    /// Opens a conversation. One that the store does not have starts empty and is created by its first commit.
    pub fn open(store: Box<dyn Store + Send>, name: &str, access: Access) -> Result<Self, Error> {
        let mut conversation = Self {
            name: name.to_owned(),
            id: String::new(),
            kv_key: String::new(),
            store,
            timeline: Timeline::default(),
            lease: Lease::Held,
            origin: None,
            staged: StagedRecords::default(),
            needs_reload: false,
            last_keyed_turn: None,
        };
        conversation.reload(access)?;
        Ok(conversation)
    }

    /// Loads everything again, after the store has replaced the conversation.
    pub(crate) fn reload(&mut self, access: Access) -> Result<(), Error> {
        self.timeline = self.store.load(&self.name, access)?;
        self.load_identity()?;
        self.last_keyed_turn = self.store.message_keys(&self.name, 1)?.last().map(|key| key.turn);
        Ok(())
    }

    fn load_identity(&mut self) -> Result<(), Error> {
        let summary = self.store.find_conversation(&self.name)?;
        self.kv_key = match &summary {
            Some(summary) => kv_cache_key(&mut *self.store, summary)?,
            None => String::new(),
        };
        self.id = summary.map(|summary| summary.id).unwrap_or_default();
        Ok(())
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// See [`ConversationSummary::id`]; empty until the first message is stored.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    #[must_use]
    pub fn kv_key(&self) -> &str {
        &self.kv_key
    }

    /// Whether nothing was ever stored: the conversation begins with its first message.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.kv_key.is_empty()
    }

    /// The store, for records and queries. Changes of the timeline go through [`Conversation::commit`].
    pub fn store(&mut self) -> &mut dyn Store {
        &mut *self.store
    }

    pub(crate) fn store_and_timeline(&mut self) -> (&mut dyn Store, &Timeline) {
        (&mut *self.store, &self.timeline)
    }

    /// The store, the name and the timeline, for functions that load chunk bodies. They do not change the timeline otherwise.
    pub(crate) fn body_loader(&mut self) -> (&mut dyn Store, &str, &mut Timeline) {
        (&mut *self.store, &self.name, &mut self.timeline)
    }

    /// Applies a change to the timeline and commits it to the store, or does neither. Returns the change that undoes it.
    pub fn commit(&mut self, change: &Change, durability: Durability) -> Result<Change, Error> {
        self.check_lease()?;
        self.stage_records();
        let committed = self.store.transact(&self.name, &mut self.timeline, change, durability);
        self.finish_commit(committed)
    }

    /// The same for several changes in one transaction, each with its own log entry.
    pub(crate) fn commit_all(&mut self, changes: &[Change]) -> Result<(), Error> {
        self.check_lease()?;
        self.stage_records();
        let committed = self.store.transact_all(&self.name, &mut self.timeline, changes);
        self.finish_commit(committed)
    }

    /// Hands what the next commit writes beside its change to the store. The first commit records where its tokens are from.
    fn stage_records(&mut self) {
        let mut staged = std::mem::take(&mut self.staged);
        if self.timeline.is_empty()
            && let Some((model, fingerprint)) = self.origin.clone()
        {
            staged.model = Some(model);
            staged.records.push((RecordKind::Setting, TEMPLATE_KEY.to_owned(), fingerprint));
        }
        if !staged.is_empty() {
            self.store.stage_records(&self.name, staged);
        }
    }

    /// A change that does not fit the timeline leaves both as they were. After any other failure, the store may have
    /// committed the change, or may have lost earlier ones in a crash of its server.
    fn finish_commit<T>(&mut self, committed: Result<T, Error>) -> Result<T, Error> {
        let rejected = [ErrorKind::InvalidInput, ErrorKind::Conflict, ErrorKind::NotFound];
        let finished = committed.and_then(|value| {
            if self.is_new() {
                self.load_identity()?;
            }
            Ok(value)
        });
        if let Err(error) = &finished {
            self.store.stage_records(&self.name, StagedRecords::default());
            self.needs_reload |= !rejected.contains(&error.kind);
        }
        finished
    }

    /// The model and the fingerprint of its chat template: the first commit records them.
    pub(crate) fn set_origin(&mut self, model: &str, template_fingerprint: &str) {
        self.origin = Some((model.to_owned(), template_fingerprint.to_owned()));
    }

    /// The system prompt of this conversation from the next turn on; earlier versions stay on record.
    pub(crate) fn store_system_prompt(&mut self, system_prompt: &str) -> Result<(), Error> {
        let turn = format!("{:010}", self.timeline.next_turn().0);
        self.put_record(RecordKind::SystemPrompt, &turn, Some(system_prompt))?;
        self.put_setting(SYSTEM_PROMPT_KEY, Some(system_prompt))
    }

    /// The same, written with the next commit.
    pub(crate) fn stage_system_prompt(&mut self, system_prompt: String) {
        let turn = format!("{:010}", self.timeline.next_turn().0);
        self.staged.records.push((RecordKind::SystemPrompt, turn, system_prompt.clone()));
        self.stage_setting(SYSTEM_PROMPT_KEY, system_prompt);
    }

    /// A record that the next commit writes in its own transaction.
    pub(crate) fn stage_record(&mut self, kind: RecordKind, key: String, value: String) {
        self.staged.records.push((kind, key, value));
    }

    /// A setting that the next commit writes in its own transaction.
    pub(crate) fn stage_setting(&mut self, key: &str, value: String) {
        self.staged.records.push((RecordKind::Setting, key.to_owned(), value));
    }

    pub(crate) fn records(&mut self, kind: RecordKind) -> Result<Vec<Record>, Error> {
        self.store.records(&self.name, kind)
    }

    pub(crate) fn put_record(
        &mut self,
        kind: RecordKind,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), Error> {
        let written = self.store.put_record(&self.name, kind, key, value);
        self.needs_reload |= written.as_ref().is_err_and(Error::is_lease_lost);
        written
    }

    pub(crate) fn setting(&mut self, key: &str) -> Result<Option<String>, Error> {
        load_setting(&mut *self.store, &self.name, key)
    }

    pub(crate) fn put_setting(&mut self, key: &str, value: Option<&str>) -> Result<(), Error> {
        self.put_record(RecordKind::Setting, key, value)
    }

    pub(crate) fn load_bodies(&mut self, chunks: &[ChunkId]) -> Result<(), Error> {
        self.store.load_bodies(&self.name, &mut self.timeline, chunks)
    }

    /// Drops the bodies of pruned chunks from memory; the store has them.
    pub(crate) fn unload_pruned(&mut self) {
        self.timeline.unload_pruned();
    }

    /// The text of a turn, live or not.
    pub(crate) fn turn_text(&mut self, turn: TurnId) -> Result<String, Error> {
        turn_text(&mut *self.store, &self.name, &mut self.timeline, turn)
    }

    /// The turns of which some chunk is not deleted, the latest first.
    pub(crate) fn turns_latest_first(&self) -> impl Iterator<Item = (TurnId, Role)> + '_ {
        let has_text = |turn: TurnId| self.timeline.turn_chunks(turn).any(|chunk| !chunk.is_deleted());
        self.timeline
            .turns()
            .iter()
            .rev()
            .filter(move |turn| has_text(turn.id))
            .map(|turn| (turn.id, turn.role))
    }

    pub(crate) fn last_keyed_turn(&self) -> Option<TurnId> {
        self.last_keyed_turn
    }

    pub(crate) fn set_last_keyed_turn(&mut self, turn: TurnId) {
        self.last_keyed_turn = Some(turn);
    }

    /// An error if one of the chunks that a change names was forgotten: its text cannot be restored.
    pub(crate) fn check_not_forgotten(&mut self, operation: &str, change: &Change) -> Result<(), Error> {
        let missing = self.timeline.missing_bodies(change);
        self.load_bodies(&missing)?;
        check_not_forgotten(operation, change, &self.timeline)
    }

    /// Gives up the lease until [`Conversation::acquire_lease`], so that another process can change the conversation.
    pub(crate) fn release_lease(&mut self) {
        self.store.release_lease(&self.name);
        self.lease = Lease::Released;
    }

    pub(crate) fn holds_lease(&self) -> bool {
        matches!(self.lease, Lease::Held) && !self.needs_reload
    }

    /// Takes the lease again. Returns false where the conversation must be opened again: another process has changed it
    /// meanwhile, or a commit has failed. Where another process holds the lease, every change fails with that reason until
    /// the next attempt.
    pub(crate) fn acquire_lease(&mut self) -> bool {
        if self.needs_reload {
            self.release_lease();
            return false;
        }
        match self.store.reacquire_lease(&self.name, self.timeline.revision()) {
            Ok(unchanged) => {
                if unchanged {
                    self.lease = Lease::Held;
                }
                unchanged
            }
            Err(error) => {
                self.lease = Lease::Denied(error);
                true
            }
        }
    }

    /// Every change fails with this reason until the next [`Conversation::acquire_lease`].
    pub(crate) fn deny_lease(&mut self, reason: Error) {
        self.lease = Lease::Denied(reason);
    }

    pub(crate) fn check_lease(&self) -> Result<(), Error> {
        match &self.lease {
            Lease::Held => Ok(()),
            Lease::Denied(reason) => Err(reason.clone()),
            Lease::Released => Err(Error::internal(
                format!("changing '{}'", self.name),
                "internal error: the lease was released; please report it",
            )),
        }
    }
}

/// An error if one of the chunks that a change names was forgotten. Their bodies must be loaded.
pub(crate) fn check_not_forgotten(
    operation: &str,
    change: &Change,
    timeline: &Timeline,
) -> Result<(), Error> {
    let is_forgotten = |id: &ChunkId| timeline.chunk(*id).is_some_and(|chunk| chunk.is_forgotten());
    match change.named_chunks().into_iter().find(is_forgotten) {
        None => Ok(()),
        Some(chunk) => Err(Error::invalid_input(
            operation,
            format!("{chunk} was forgotten for good: its text no longer exists"),
        )),
    }
}

/// The text of a turn, live or not.
pub(crate) fn turn_text(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    turn: TurnId,
) -> Result<String, Error> {
    let unloaded = timeline.turn_chunks(turn).filter(|chunk| !chunk.is_loaded());
    let unloaded: Vec<ChunkId> = unloaded.map(|chunk| chunk.id()).collect();
    store.load_bodies(name, timeline, &unloaded)?;
    Ok(timeline.turn_chunks(turn).map(|chunk| chunk.text().into_owned()).collect())
}

/// The messages of a conversation from one turn to another, deleted ones left out.
pub fn load_messages(
    store: &mut dyn Store,
    name: &str,
    turns: std::ops::RangeInclusive<TurnId>,
) -> Result<Vec<(TurnId, Role, String)>, Error> {
    let mut timeline = store.load(name, Access::Read)?;
    let listed = timeline.turns().iter().filter(|turn| turns.contains(&turn.id));
    let listed: Vec<(TurnId, Role)> = listed.map(|turn| (turn.id, turn.role)).collect();
    let mut messages = Vec::with_capacity(listed.len());
    for (turn, role) in listed {
        if timeline.turn_chunks(turn).any(|chunk| !chunk.is_deleted()) {
            messages.push((turn, role, turn_text(store, name, &mut timeline, turn)?));
        }
    }
    Ok(messages)
}

/// The chunks of a list whose bodies are only in the store.
pub(crate) fn unloaded_chunks(timeline: &Timeline, chunks: &[ChunkId]) -> Vec<ChunkId> {
    let is_unloaded = |id: &ChunkId| timeline.chunk(*id).is_some_and(|chunk| !chunk.is_loaded());
    chunks.iter().copied().filter(is_unloaded).collect()
}

pub(crate) fn load_setting(store: &mut dyn Store, name: &str, key: &str) -> Result<Option<String>, Error> {
    let records = store.records(name, RecordKind::Setting)?;
    Ok(records.into_iter().find(|record| record.key == key).map(|record| record.value))
}

/// Identifies a conversation's KV cells in a model. The number of times that text was forgotten is part of it, because cells
/// from before still hold that text. The name is not: a branch records the key of its parent.
pub fn kv_cache_key(store: &mut dyn Store, summary: &ConversationSummary) -> Result<String, Error> {
    let forget_count = load_setting(store, &summary.name, FORGET_COUNT_KEY)?;
    let suffix = forget_count.map_or(String::new(), |count| format!("\0{count}"));
    Ok(format!("{}{suffix}", summary.id))
}
