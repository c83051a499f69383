//! A conversation that is open, with the model that answers in it: the facade that the server, the command line and the
//! tests use. It composes the parts and delegates to them.

use crate::align::SentMessage;
use crate::answer_edit;
use crate::branch::{self, BranchPoint};
use crate::chat_model::ChatModel;
use crate::chat_options::{ChatOptions, PERSONA_KEY, SAMPLING_KEY};
use crate::client_history;
use crate::conversation::TOOLS_KEY;
pub use crate::conversation::{
    FORGET_COUNT_KEY, MESSAGE_ID_KEY, SYSTEM_PROMPT_KEY, TEMPLATE_KEY, kv_cache_key,
};
use crate::event::{Event, TurnSummary};
use crate::manual_edit::{EditResult, ManualEdit};
use crate::memory::carry::{CarryMode, MemoryReference};
use crate::memory::conflict::{ConflictDecision, MemoryConflict, open_conflicts};
use crate::memory::edit::MemoryEdit;
use crate::memory::formation::MemoryRequest;
use crate::memory::manager::MemoryStep;
use crate::memory::range::MemoryRange;
use crate::memory::record::Memory;
use crate::memory::segment::{PlacedMemory, RenderedContext, render_segments};
pub use crate::opening::SearchIndexing;
use crate::opening::{OpenRequest, base_system_prompt, build_system_prompt, join_system_prompt, open_parts};
pub use crate::parts::AnswerBegin;
use crate::parts::SessionParts;
use crate::premise::PremiseMethod;
use crate::recorder::AnswerRecorder;
use crate::rules::ConversationRules;
use crate::snapshot::{ConversationState, SnapshotCell};
use crate::turn::{self, EditAuthor, TurnCallback, TurnInput, TurnRunner};
use crate::variant::{self, VariantChoice};
use halo_agents::mu::PremiseResult;
use halo_core::Error;
use halo_core::change::{Change, DeleteReason};
use halo_core::embedder::Embedder;
use halo_core::model::{Model, Sampling, StepFlow, WindowToken};
use halo_core::store::{Access, Durability, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Role, TurnId};
use halo_core::tool_call::ToolDefinition;
use jiff::civil::DateTime;
use std::sync::Arc;

/// A conversation that is open, with the model that answers in it.
pub struct Session {
    parts: SessionParts,
    notices: Vec<String>,
}

impl Session {
    /// Opens a conversation; one that does not exist is created by its first message. A conversation with tokens of another
    /// model is retokenized, and `progress` hears how many messages are done, and of how many.
    pub fn open(
        store: Box<dyn Store + Send>,
        model: Box<dyn Model + Send>,
        embedder: Option<Box<dyn Embedder + Send>>,
        name: &str,
        rules: ConversationRules,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let (access, indexing) = (Access::Write, SearchIndexing::Build);
        let (parts, notices) =
            open_parts(OpenRequest { store, model, embedder, name, rules, access, indexing, progress })?;
        Ok(Self { parts, notices })
    }

    /// Opens a conversation for reading: it takes no lease and writes nothing. A conversation of another model is shown with
    /// the tokens that it has.
    pub fn open_read_only(
        store: Box<dyn Store + Send>,
        model: Box<dyn Model + Send>,
        embedder: Option<Box<dyn Embedder + Send>>,
        name: &str,
        rules: ConversationRules,
        indexing: SearchIndexing,
    ) -> Result<Self, Error> {
        let (access, progress): (_, &mut dyn FnMut(usize, usize)) = (Access::Read, &mut |_, _| {});
        let (parts, notices) =
            open_parts(OpenRequest { store, model, embedder, name, rules, access, indexing, progress })?;
        Ok(Self { parts, notices })
    }

    pub(crate) fn parts_mut(&mut self) -> &mut SessionParts {
        &mut self.parts
    }

    #[must_use]
    pub fn name(&self) -> &str {
        self.parts.conversation.name()
    }

    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        self.parts.timeline()
    }

    #[must_use]
    pub fn rules(&self) -> &ConversationRules {
        &self.parts.rules
    }

    /// The fastest prefill of this model in this conversation so far, in tokens per second.
    #[must_use]
    pub fn prefill_speed(&self) -> Option<f64> {
        self.parts.prefill_speed
    }

    #[must_use]
    pub fn model(&self) -> &dyn Model {
        &*self.parts.model.model
    }

    /// Closes the conversation. Its model can be used for another one.
    #[must_use]
    pub fn into_model(self) -> Box<dyn Model + Send> {
        self.parts.model.model
    }

    /// The store, for records and queries.
    pub fn store(&mut self) -> &mut dyn Store {
        self.parts.conversation.store()
    }

    /// What the user should know; each notice is returned once.
    pub fn take_notices(&mut self) -> Vec<String> {
        let mut notices = std::mem::take(&mut self.notices);
        notices.extend(self.parts.memories.take_notices());
        notices
    }

    /// Gives the conversation a system prompt of its own. The whole context window is prefilled again.
    pub fn set_system_prompt(&mut self, system_prompt: &str) -> Result<(), Error> {
        let parts = &mut self.parts;
        if parts.rules.system_prompt == system_prompt {
            return Ok(());
        }
        system_prompt.clone_into(&mut parts.rules.system_prompt);
        let token_limit = parts.token_limit();
        let prompt = build_system_prompt(&mut parts.conversation, &parts.rules, token_limit)?;
        parts.model.set_system_prompt(prompt)?;
        if parts.conversation.is_new() {
            parts.unsaved_system_prompt = Some(system_prompt.to_owned());
        } else {
            parts.conversation.store_system_prompt(system_prompt)?;
        }
        parts.publish();
        Ok(())
    }

    /// Replaces the options of this conversation. Those of a new conversation are stored with its first message.
    pub fn set_chat_options(&mut self, options: &ChatOptions) -> Result<(), Error> {
        options.check()?;
        let defaults = self.parts.defaults.clone();
        self.set_system_prompt(options.system_prompt.as_deref().unwrap_or(&defaults.system_prompt))?;
        options.persona.clone_into(&mut self.parts.rules.persona);
        self.refresh_system_prompt()?;
        let parts = &mut self.parts;
        parts.rules.sampling = options.sampling.apply_to(&defaults.sampling);
        let sampling = serde_json::to_string(&options.sampling).unwrap_or_default();
        let sampling = (!options.sampling.is_empty()).then_some(sampling);
        let persona = serde_json::to_string(&options.persona).unwrap_or_default();
        let persona = (!options.persona.is_empty()).then_some(persona);
        if parts.conversation.is_new() {
            (parts.unsaved_sampling, parts.unsaved_persona) = (sampling, persona);
        } else {
            parts.conversation.put_setting(SAMPLING_KEY, sampling.as_deref())?;
            parts.conversation.put_setting(PERSONA_KEY, persona.as_deref())?;
        }
        match options.system_prompt {
            Some(_) => {}
            None if parts.conversation.is_new() => parts.unsaved_system_prompt = None,
            None => parts.conversation.put_setting(SYSTEM_PROMPT_KEY, None)?,
        }
        parts.publish();
        Ok(())
    }

    /// The model that was chosen for this conversation. It is stored with the first message of a new one.
    pub fn set_unsaved_model(&mut self, model: Option<String>) {
        if self.parts.conversation.is_new() {
            self.parts.unsaved_model = model;
        }
    }

    /// Sets the sampling of the next turns. Returns the one before.
    pub(crate) fn replace_sampling(&mut self, sampling: Sampling) -> Sampling {
        std::mem::replace(&mut self.parts.rules.sampling, sampling)
    }

    /// The client's id of the next message, by which a message that is sent twice is recognized.
    pub fn set_next_message_id(&mut self, id: Option<String>) {
        self.parts.next_message_id = id;
    }

    /// Sets the recorder of the answers, or removes it.
    pub fn set_recorder(&mut self, recorder: Option<Box<dyn AnswerRecorder>>) {
        self.parts.recorder.set(recorder);
        self.parts.publish();
    }

    // The context window.

    /// The context window as tokens: the system prompt, the live chunks, and the placed memories between them.
    #[must_use]
    pub fn context_window(&self) -> Vec<WindowToken> {
        self.parts.context_window()
    }

    #[must_use]
    pub fn context_window_text(&self) -> String {
        self.render_context().text()
    }

    /// The context window as segments with their origin.
    #[must_use]
    pub fn render_context(&self) -> RenderedContext {
        let parts = &self.parts;
        render_segments(&parts.model.system_tokens, parts.timeline(), parts.memories.placed())
    }

    /// Tokens in the context window.
    #[must_use]
    pub fn live_tokens(&self) -> usize {
        self.parts.live_tokens()
    }

    /// The most tokens in the context window.
    #[must_use]
    pub fn token_limit(&self) -> usize {
        self.parts.token_limit()
    }

    /// Brings the KV cache in line with the context window, so that the next answer does not wait for that.
    pub fn sync_kv_cache(&mut self) -> Result<(), Error> {
        self.parts.sync_kv_cache()
    }

    /// Announces messages before they are stored, to see that tests notice.
    #[cfg(feature = "testing")]
    pub fn plant_announce_before_commit(&mut self) {
        self.parts.announces_before_commit = true;
    }

    /// Where the store, the KV cache or the search index disagree with the timeline. Between turns they never do.
    pub fn find_inconsistencies(&mut self) -> Result<Vec<String>, Error> {
        self.parts.find_inconsistencies()
    }

    // Turns.

    pub fn run_turn(
        &mut self,
        input: TurnInput,
        now: impl Into<DateTime>,
        callback: &mut TurnCallback<'_>,
    ) -> Result<TurnSummary, Error> {
        let result = TurnRunner::new(&mut self.parts, callback).run_turn(input, now.into());
        // A turn that fails before its answer begins leaves nothing for the next one.
        self.parts.next_answer = AnswerBegin::default();
        result
    }

    /// Sends a message and generates its answer.
    pub fn send_message(
        &mut self,
        message: &str,
        now: impl Into<DateTime>,
        callback: &mut TurnCallback<'_>,
    ) -> Result<TurnSummary, Error> {
        self.run_turn(TurnInput::Message(message.to_owned()), now, callback)
    }

    /// Answers the last message again; the answer before becomes a variant.
    pub fn regenerate(
        &mut self,
        author: EditAuthor,
        now: impl Into<DateTime>,
        callback: &mut TurnCallback<'_>,
    ) -> Result<TurnSummary, Error> {
        self.run_turn(TurnInput::Regenerate(author), now, callback)
    }

    /// Replaces the answer to the last message by a text of the user; the answer becomes a variant.
    pub fn replace_answer(&mut self, text: &str) -> Result<(), Error> {
        answer_edit::replace_last_answer(&mut self.parts, text)
    }

    /// The user's last message and its answer become a variant. Returns the text of the message, to be edited.
    pub fn retract_last_message(&mut self, author: EditAuthor) -> Result<String, Error> {
        turn::retract_last_message(&mut self.parts, author)
    }

    /// Computes some of the vectors that are missing. Returns whether more are.
    pub(crate) fn embed_pending(&mut self, max: usize) -> Result<bool, Error> {
        let parts = &mut self.parts;
        if parts.recall.index().missing_vectors() == 0 || !parts.recall.has_embedder() {
            return Ok(false);
        }
        let (store, timeline) = parts.conversation.store_and_timeline();
        let progress = parts.recall.embed_pending(store, timeline, max, &mut |_| StepFlow::Continue)?;
        parts.conversation.unload_pruned();
        Ok(progress.embedded > 0 && progress.missing > 0)
    }

    /// Whether a question presupposes something that the conversation contradicts.
    pub fn check_premise(&mut self, question: &str, method: PremiseMethod) -> Result<PremiseResult, Error> {
        let SessionParts { premises, conversation, recall, model, .. } = &mut self.parts;
        premises.check(question, method, conversation, recall, model)
    }

    // Edits.

    /// Commits a change; memories and readers follow it.
    pub fn commit(&mut self, change: &Change, durability: Durability) -> Result<Change, Error> {
        self.parts.commit(change, durability)
    }

    /// Applies a manual edit to all chunks in one commit, or on error to none.
    pub fn apply_edit(&mut self, edit: ManualEdit, chunks: &[ChunkId]) -> Result<EditResult, Error> {
        let parts = &mut self.parts;
        let max_brightness = parts.rules.context.strategy.max_brightness();
        let result = edit.apply(chunks, max_brightness, &mut parts.conversation)?;
        parts.sync_index()?;
        if edit == ManualEdit::Undelete {
            // Memories that were to be forgotten with the chunks are back.
            parts.memories.reload(&mut parts.conversation)?;
        }
        parts.memories.refresh_placement(&mut parts.conversation, &parts.rules);
        parts.publish();
        Ok(result)
    }

    /// Undoes a manual edit.
    pub fn undo(&mut self, undo: &Change) -> Result<(), Error> {
        self.parts.conversation.check_not_forgotten("undoing", undo)?;
        self.parts.commit(undo, Durability::Immediate)?;
        self.parts.sync_index()?;
        self.parts.publish();
        Ok(())
    }

    /// Creates a conversation that shares the messages of this one up to a turn, or all of them. Returns how many they share.
    pub fn branch(&mut self, name: &str, through: Option<u32>) -> Result<usize, Error> {
        let turns = self.timeline().turns();
        let last = turns.last().map(|turn| turn.id);
        if let Some(turn) = through.filter(|&n| !turns.iter().any(|turn| turn.id.0 == n)) {
            let last = last.map_or(0, |turn| turn.0);
            let message = format!("there is no turn {turn}: the last one is {last}");
            return Err(Error::invalid_input("branching", message));
        }
        let last_shared_turn = through.map(TurnId).or(last);
        let last_shared_turn = last_shared_turn
            .ok_or_else(|| Error::conflict("branching", "the conversation has no messages yet"))?;
        let (store, from, timeline) = self.parts.conversation.body_loader();
        let latest_first = variant::turns_with_text(timeline, last_shared_turn);
        let groups = variant::group_variants(&variant::load_variants(store, from, timeline)?, &latest_first);
        // The variants of the last exchange can be chosen in the branch too.
        let variant_turns = groups.into_iter().flat_map(|group| group.turns).collect();
        let at = BranchPoint { variant_turns, ..BranchPoint::after(last_shared_turn) };
        branch::create_branch(store, from, name, &at)
    }

    /// Makes the last turns a variant: they are deleted, and can be chosen again.
    pub fn move_to_variant(&mut self, turns: &[TurnId], reason: DeleteReason) -> Result<(), Error> {
        variant::move_to_variant(&mut self.parts, turns, reason)
    }

    /// Whether these turns, in any order, are the last ones of the conversation.
    #[must_use]
    pub fn ends_with_turns(&self, turns: &[TurnId]) -> bool {
        variant::ends_with_turns(&self.parts.conversation, turns)
    }

    /// The variants of the last exchange.
    pub fn variant_choices(&mut self) -> Result<Vec<VariantChoice>, Error> {
        let (store, name, timeline) = self.parts.conversation.body_loader();
        variant::load_variant_choices(store, name, timeline)
    }

    /// Replaces the last turns with a variant; they become a variant themselves.
    pub fn choose_variant(&mut self, chosen: &[TurnId], replaces: &[TurnId]) -> Result<(), Error> {
        variant::choose_variant(&mut self.parts, chosen, replaces)
    }

    // A client's own history.

    /// Appends messages that are not to be answered. `flow` is asked between messages and can stop it. A long history is
    /// several commits: what was committed before stays.
    pub fn append_messages(
        &mut self,
        messages: &[(Role, String)],
        flow: &mut dyn FnMut() -> StepFlow,
    ) -> Result<(), Error> {
        let messages = messages.iter().map(|(role, text)| SentMessage::new(*role, text.clone()));
        self.append_sent_messages(&messages.collect::<Vec<_>>(), flow)
    }

    /// The same for messages that may call functions.
    pub fn append_sent_messages(
        &mut self,
        messages: &[SentMessage],
        flow: &mut dyn FnMut() -> StepFlow,
    ) -> Result<(), Error> {
        client_history::append_messages(&mut self.parts, messages, flow)
    }

    /// Sets the functions that a client offers: the model may call them, and only the client runs them. Where they differ from those
    /// before, the context window is prefilled again: cells that were computed behind other functions make the model call those.
    pub fn set_tools(&mut self, tools: &[ToolDefinition]) -> Result<(), Error> {
        let SessionParts { model, conversation, has_set_tools, .. } = &mut self.parts;
        if *has_set_tools && model.tools == tools {
            return Ok(());
        }
        let fingerprint = ChatModel::tools_fingerprint(tools);
        if conversation.is_new() {
            fingerprint.into_iter().for_each(|value| conversation.stage_setting(TOOLS_KEY, value));
        } else if conversation.setting(TOOLS_KEY)? != fingerprint {
            model.model.delete_kv(conversation.kv_key())?;
            conversation.put_setting(TOOLS_KEY, fingerprint.as_deref())?;
        }
        model.set_tools(tools)?;
        *has_set_tools = true;
        self.parts.publish();
        Ok(())
    }

    /// How the next answer begins.
    pub fn set_next_answer(&mut self, begin: AnswerBegin) {
        self.parts.next_answer = begin;
    }

    /// Prunes the system messages that a client no longer sends.
    pub fn prune_system_messages(&mut self, still_sent: &[&str]) -> Result<(), Error> {
        client_history::prune_system_messages(&mut self.parts, still_sent)
    }

    /// Stores messages that a client sent instead of older turns, mostly summaries.
    pub fn store_summaries(&mut self, summaries: &[&SentMessage]) -> Result<(), Error> {
        client_history::store_summaries(&mut self.parts.conversation, summaries)
    }

    /// Stores the key of an answer as the client has it, where that differs from the generated text.
    pub fn store_answer_key(&mut self, turn: TurnId, text: &str) -> Result<(), Error> {
        client_history::store_answer_key(&mut self.parts.conversation, turn, text)
    }

    // Memories.

    /// The memories, the oldest first.
    #[must_use]
    pub fn memories(&self) -> &[Memory] {
        self.parts.memories.memories()
    }

    #[must_use]
    pub fn placed_memories(&self) -> &[PlacedMemory] {
        self.parts.memories.placed()
    }

    pub fn edit_memory(&mut self, id: u64, edit: MemoryEdit) -> Result<(), Error> {
        let SessionParts { memories, conversation, rules, .. } = &mut self.parts;
        let was_carried = memories.memories().iter().any(|memory| memory.id == id && memory.is_carried());
        memories.edit(id, edit, conversation, rules)?;
        if was_carried {
            self.refresh_system_prompt()?;
        }
        self.parts.publish();
        Ok(())
    }

    /// The contradictions between memories that wait for a decision of the user.
    #[must_use]
    pub fn open_memory_conflicts(&self) -> Vec<MemoryConflict> {
        open_conflicts(self.memories())
    }

    /// Applies the user's decision about two memories that contradict each other.
    pub fn resolve_memory_conflict(
        &mut self,
        first: u64,
        second: u64,
        decision: ConflictDecision,
    ) -> Result<(), Error> {
        let SessionParts { memories, conversation, rules, .. } = &mut self.parts;
        memories.resolve_conflict((first, second), decision, conversation, rules)?;
        self.refresh_system_prompt()?;
        self.parts.publish();
        Ok(())
    }

    /// Carries memories of other conversations into this one. Returns their ids here. A new conversation stores them with
    /// its first message.
    pub fn carry_memories(
        &mut self,
        references: &[MemoryReference],
        mode: CarryMode,
    ) -> Result<Vec<u64>, Error> {
        let SessionParts { memories, conversation, .. } = &mut self.parts;
        let ids = memories.carry(references, mode, conversation)?;
        self.refresh_system_prompt()?;
        self.parts.publish();
        Ok(ids)
    }

    /// Carried memories are part of the system prompt: where they changed, the whole context window is prefilled again.
    fn refresh_system_prompt(&mut self) -> Result<(), Error> {
        let parts = &mut self.parts;
        let token_limit = parts.token_limit();
        let prompt = match parts.conversation.is_new() {
            // The store does not have the memories yet.
            true => {
                let base = base_system_prompt(&mut parts.conversation, &parts.rules, token_limit)?;
                join_system_prompt(&base, parts.memories.memories(), token_limit)
            }
            false => build_system_prompt(&mut parts.conversation, &parts.rules, token_limit)?,
        };
        if parts.model.format.system_prompt != prompt {
            parts.model.set_system_prompt(prompt)?;
        }
        Ok(())
    }

    /// The memories by relevance to a query, the best first.
    pub fn search_memories(&mut self, query: &str) -> Result<Vec<(f64, Memory)>, Error> {
        let found = self.parts.recall.search(query, None, self.parts.rules.recall)?;
        let hits: Vec<(ChunkId, f64)> =
            found.iter().map(|found| (found.hit.chunk, found.hit.score)).collect();
        Ok(self.parts.memories.search(query, &hits))
    }

    /// The next range that a memory is formed of, if there is one.
    #[must_use]
    pub fn next_memory_range(&self) -> Option<MemoryRange> {
        self.parts.memories.next_range(&self.parts.conversation, &self.parts.rules)
    }

    /// Why no memory is due, for the user.
    #[must_use]
    pub fn explain_no_memory_due(&self) -> String {
        self.parts.memories.explain_none_due(&self.parts.conversation, &self.parts.rules)
    }

    /// The input of a memory of a range.
    pub fn memory_request(&mut self, range: MemoryRange) -> Result<MemoryRequest, Error> {
        let SessionParts { memories, conversation, model, .. } = &mut self.parts;
        memories.request(range, conversation, model)
    }

    /// Forms the next memory or places those that are due. `is_preempted` stops it: then it begins again another time.
    /// Returns whether there was anything to do.
    pub fn run_idle_memory_work(
        &mut self,
        is_preempted: &dyn Fn() -> bool,
        callback: &mut dyn FnMut(Event),
    ) -> Result<bool, Error> {
        if is_preempted() || self.parts.rules.active_memory_rules().is_none() {
            return Ok(false);
        }
        if let Some(range) = self.next_memory_range() {
            return self.form_memory(range, is_preempted, callback);
        }
        let token_limit = self.token_limit();
        let SessionParts { memories, conversation, model, rules, .. } = &mut self.parts;
        let step = memories.place_due(token_limit, conversation, model, rules, is_preempted)?;
        Ok(self.announce_memory_step(step, callback))
    }

    /// Forms the memory of a range. Returns whether something was done; if it was preempted, the same range is due again.
    pub fn form_memory(
        &mut self,
        range: MemoryRange,
        is_preempted: &dyn Fn() -> bool,
        callback: &mut dyn FnMut(Event),
    ) -> Result<bool, Error> {
        let SessionParts { memories, conversation, model, rules, .. } = &mut self.parts;
        let step = memories.form(range, conversation, model, rules, is_preempted)?;
        Ok(self.announce_memory_step(step, callback))
    }

    /// Publishes the new state before its events: who hears of them finds it.
    fn announce_memory_step(&self, step: MemoryStep, callback: &mut dyn FnMut(Event)) -> bool {
        if step.worked {
            self.parts.publish();
        }
        step.events.into_iter().for_each(callback);
        step.worked
    }

    /// Asks the model to reflect on the whole conversation. Returns the new memory; none if it was preempted or wrote nothing.
    pub fn reflect(&mut self, is_preempted: &dyn Fn() -> bool) -> Result<Option<u64>, Error> {
        let SessionParts { memories, conversation, model, rules, .. } = &mut self.parts;
        let id = memories.reflect(conversation, model, rules, is_preempted)?;
        self.parts.publish();
        Ok(id)
    }

    #[must_use]
    pub fn messages_since_reflection(&self) -> usize {
        self.parts.memories.messages_since_reflection(&self.parts.conversation)
    }

    // Snapshots and the lease, for the host.

    /// The state that readers see.
    #[must_use]
    pub fn state(&self) -> ConversationState {
        self.parts.state()
    }

    /// Publishes every later state to a new cell, whose snapshot contains the events up to `last_event`.
    pub fn attach_snapshot(&mut self, last_event: u64) -> Arc<SnapshotCell> {
        let cell = Arc::new(SnapshotCell::new(self.state(), last_event));
        self.parts.publisher.attach(Arc::clone(&cell));
        cell
    }

    /// Takes over the readers and the recorder of a session of the same conversation.
    pub(crate) fn take_over(&mut self, old: &mut Self, cell: &Arc<SnapshotCell>) {
        self.parts.recorder = std::mem::take(&mut old.parts.recorder);
        self.parts.publisher.attach(Arc::clone(cell));
        self.parts.publish();
    }

    /// Identifies the conversation's KV cells in the model.
    #[must_use]
    pub fn kv_key(&self) -> &str {
        self.parts.conversation.kv_key()
    }

    /// Deletes KV cells from the model and its archive: those that hold forgotten text.
    pub fn delete_kv(&mut self, kv_key: &str) -> Result<(), Error> {
        self.parts.model.model.delete_kv(kv_key)
    }

    pub(crate) fn release_lease(&mut self) {
        self.parts.conversation.release_lease();
    }

    pub(crate) fn holds_lease(&self) -> bool {
        self.parts.conversation.holds_lease()
    }

    /// Takes the lease again. Returns false where the conversation must be opened again, because another process changed it.
    pub(crate) fn acquire_lease(&mut self) -> bool {
        self.parts.conversation.acquire_lease()
    }

    /// Every change fails with this reason until the lease is taken again.
    pub(crate) fn deny_lease(&mut self, reason: Error) {
        self.parts.conversation.deny_lease(reason);
    }
}
