//! The memories of one conversation: when the next one is formed, and which are placed in the context window.

use super::carry::{CarryMode, MemoryReference, carry_memories, next_memory_id, prepare_carried};
use super::conflict::{ConflictDecision, resolve_conflict, update_conflicts};
use super::edit::{MemoryEdit, apply_memory_edit, rank_memories};
use super::formation::{
    ForkRequest, MemoryRequest, REFLECTION_INSTRUCTION, first_words, formation_instruction,
};
use super::placement::{is_placeable, plan_placement};
use super::range::{MemoryRange, next_range, overlap_start, uncovered_chunks};
use super::record::{self, Memory};
use super::segment::{PlacedMemory, build_window, window_messages};
use super::source::MemorySource;
use crate::chat_model::ChatModel;
use crate::conversation::Conversation;
use crate::event::{Event, MemoryAction};
use crate::rules::ConversationRules;
use halo_core::Error;
use halo_core::model::{FinishReason, Prompt, StepFlow};
use halo_core::store::RecordKind;
use halo_core::token::{ChunkId, TurnId};
use std::collections::BTreeSet;

/// The memories of one conversation.
#[derive(Default)]
pub(crate) struct MemoryManager {
    memories: Vec<Memory>,
    /// The first chunk that no memory covers yet, as turn and index.
    formed_until: (u32, u32),
    placed: Vec<PlacedMemory>,
    /// The turns that were answered here: the model has read them and their questions.
    answered: BTreeSet<TurnId>,
    notices: Vec<String>,
}

/// What a new memory is made of.
struct NewMemory {
    range: MemoryRange,
    overlap_from: Option<(u32, u32)>,
    reflection: bool,
    text: String,
    operations: Vec<String>,
    source: MemorySource,
}

/// The result of a step of idle work.
#[derive(Default)]
pub(crate) struct MemoryStep {
    /// Whether something was done, or begun and preempted: there may be more to do.
    pub worked: bool,
    /// To be announced once the new state is published.
    pub events: Vec<Event>,
}

impl MemoryManager {
    pub fn load(conversation: &mut Conversation) -> Result<Self, Error> {
        let turns = conversation.records(RecordKind::Turn)?;
        let (store, name, _) = conversation.body_loader();
        Ok(Self {
            answered: turns.iter().filter_map(|turn| turn.key.parse().ok().map(TurnId)).collect(),
            memories: record::load_memories(store, name)?,
            formed_until: record::load_formed_until(store, name)?,
            ..Self::default()
        })
    }

    pub fn memories(&self) -> &[Memory] {
        &self.memories
    }

    pub fn placed(&self) -> &[PlacedMemory] {
        &self.placed
    }

    pub fn placed_tokens(&self) -> usize {
        self.placed.iter().map(PlacedMemory::len).sum()
    }

    /// A turn was answered: its messages may become part of a memory.
    pub fn mark_answered(&mut self, turn: TurnId) {
        self.answered.insert(turn);
    }

    /// What the user should know; each notice is returned once.
    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    /// Loads the memories again, after records were changed elsewhere.
    pub fn reload(&mut self, conversation: &mut Conversation) -> Result<(), Error> {
        let (store, name, _) = conversation.body_loader();
        self.memories = record::load_memories(store, name)?;
        Ok(())
    }

    pub fn edit(
        &mut self,
        id: u64,
        edit: MemoryEdit,
        conversation: &mut Conversation,
        rules: &ConversationRules,
    ) -> Result<(), Error> {
        let (store, name, _) = conversation.body_loader();
        apply_memory_edit(store, name, &mut self.memories, id, edit)?;
        // Its text may have changed, and whether it may be placed.
        self.placed.retain(|placed| placed.id != id);
        self.refresh_placement(conversation, rules);
        Ok(())
    }

    /// Applies the user's decision about two memories that contradict each other.
    pub fn resolve_conflict(
        &mut self,
        pair: (u64, u64),
        decision: ConflictDecision,
        conversation: &mut Conversation,
        rules: &ConversationRules,
    ) -> Result<(), Error> {
        let (store, name, _) = conversation.body_loader();
        resolve_conflict(store, name, &mut self.memories, pair, decision)?;
        self.placed.retain(|placed| placed.id != pair.0 && placed.id != pair.1);
        self.refresh_placement(conversation, rules);
        Ok(())
    }

    /// Carries memories of other conversations into this one; a new conversation stores them with its first message. Returns
    /// the new ids.
    pub fn carry(
        &mut self,
        references: &[MemoryReference],
        mode: CarryMode,
        conversation: &mut Conversation,
    ) -> Result<Vec<u64>, Error> {
        let is_new = conversation.is_new();
        let (store, name, _) = conversation.body_loader();
        let carried = match is_new {
            true => {
                let first_id = self.memories.iter().map(|memory| memory.id).max().unwrap_or(0) + 1;
                prepare_carried(store, references, mode, first_id)?
            }
            false => carry_memories(store, name, references, mode)?,
        };
        let ids = carried.iter().map(|memory| memory.id).collect();
        if is_new {
            for memory in &carried {
                conversation.stage_record(RecordKind::Memory, memory.record_key(), memory.to_record());
            }
            self.memories.extend(carried);
        } else {
            // Conflicts may have changed the others.
            self.memories = record::load_memories(store, name)?;
        }
        Ok(ids)
    }

    /// The memories by relevance to a query, the best first.
    pub fn search(&self, query: &str, hits: &[(ChunkId, f64)]) -> Vec<(f64, Memory)> {
        rank_memories(&self.memories, query, hits)
    }

    /// Follows a change of the timeline: records which chunks were pruned since memories were formed, and hides memories
    /// that may no longer be placed.
    pub fn refresh_placement(&mut self, conversation: &mut Conversation, rules: &ConversationRules) {
        let Some(rules) = rules.active_memory_rules() else {
            self.placed.clear();
            return;
        };
        for memory in self.memories.iter_mut().filter(|memory| !memory.is_carried()) {
            let (store, name, timeline) = conversation.body_loader();
            let newly_pruned = memory.range.chunks(timeline).filter(|chunk| !chunk.is_live());
            let newly_pruned: Vec<ChunkId> = newly_pruned
                .map(|chunk| chunk.id())
                .filter(|id| !memory.pruned_chunks.contains(id))
                .collect();
            if newly_pruned.is_empty() {
                continue;
            }
            memory.pruned_chunks.extend(newly_pruned);
            // The next prune writes the record again, so a failure here is no reason to fail.
            if let Err(error) = record::store_memory(store, name, memory) {
                self.notices
                    .push(format!("memory {}: its pruned chunks were not recorded: {error}", memory.id));
            }
        }
        let (memories, timeline) = (&self.memories, conversation.timeline());
        self.placed.retain(|placed| {
            let memory = memories.iter().find(|memory| memory.id == placed.id);
            // A deleted chunk is not quoted.
            let is_quotable = |id: &ChunkId| timeline.chunk(*id).is_some_and(|chunk| !chunk.is_deleted());
            placed.pruned_chunks.iter().all(is_quotable)
                && memory.is_some_and(|memory| is_placeable(memory, timeline, &rules))
        });
    }

    /// The memories that should be in a window of `token_limit` tokens.
    pub fn plan_placement(
        &self,
        token_limit: usize,
        conversation: &mut Conversation,
        model: &mut ChatModel,
        rules: &ConversationRules,
    ) -> Result<Vec<PlacedMemory>, Error> {
        let Some(rules) = rules.active_memory_rules() else { return Ok(Vec::new()) };
        let budget = (token_limit as f64 * rules.window_share) as usize;
        plan_placement(&self.memories, &self.placed, &rules, budget, conversation, model)
    }

    /// Places memories without prefilling them: for a conversation that is being opened.
    pub fn set_placed(&mut self, placed: Vec<PlacedMemory>) {
        self.placed = placed;
    }

    /// Places the memories that are due, after their tokens were prefilled and the KV cache saved.
    pub fn place_due(
        &mut self,
        token_limit: usize,
        conversation: &mut Conversation,
        model: &mut ChatModel,
        rules: &ConversationRules,
        is_preempted: &dyn Fn() -> bool,
    ) -> Result<MemoryStep, Error> {
        let planned = self.plan_placement(token_limit, conversation, model, rules)?;
        if planned == self.placed || conversation.is_new() {
            return Ok(MemoryStep::default());
        }
        let timeline = conversation.timeline();
        let tokens = model.system_tokens.len()
            + timeline.live_len()
            + planned.iter().map(PlacedMemory::len).sum::<usize>();
        if tokens.saturating_add(rules.sampling.max_tokens) > model.info().context {
            return Ok(MemoryStep::default());
        }
        let window = build_window(&model.system_tokens, timeline, &planned);
        let messages = || window_messages(&model.format.system_prompt, timeline, &planned);
        let prompt = Prompt {
            conversation: conversation.kv_key(),
            window: &window,
            messages: &messages,
            next_position: timeline.next_position(),
            ephemeral: false,
        };
        let prefilled = model.model.prefill(&prompt, &mut |_| {
            if is_preempted() { StepFlow::Stop } else { StepFlow::Continue }
        })?;
        if prefilled == FinishReason::Cancelled {
            return Ok(MemoryStep { worked: true, events: Vec::new() });
        }
        if !window.is_empty() {
            model.model.persist_kv(conversation.kv_key(), &window)?;
        }
        let is_new = |id: &u64| !self.placed.iter().any(|placed| placed.id == *id);
        let new: Vec<u64> = planned.iter().map(|placed| placed.id).filter(is_new).collect();
        self.placed = planned;
        let events =
            new.into_iter().map(|id| Event::MemoryChanged { id, action: MemoryAction::Placed }).collect();
        Ok(MemoryStep { worked: true, events })
    }

    /// The next range that a memory is formed of, if there is one.
    pub fn next_range(&self, conversation: &Conversation, rules: &ConversationRules) -> Option<MemoryRange> {
        let rules = rules.active_memory_rules()?;
        let range = next_range(conversation.timeline(), self.formed_until, &self.answered, &rules);
        range.filter(|_| !conversation.is_new())
    }

    /// Why no memory is due, for the user.
    pub fn explain_none_due(&self, conversation: &Conversation, rules: &ConversationRules) -> String {
        let Some(rules) = rules.active_memory_rules() else {
            return "no memories are formed in this conversation: memory.enabled is false, context.max_tokens is 0, or \
                    brightness.strategy prunes token by token"
                .to_owned();
        };
        let uncovered = uncovered_chunks(conversation.timeline(), self.formed_until, &self.answered);
        let tokens: usize = uncovered.iter().flatten().map(|(_, tokens)| tokens).sum();
        let since = match self.formed_until {
            (0, 0) => "so far".to_owned(),
            (turn, _) => format!("since turn {turn}"),
        };
        format!(
            "{tokens} tokens {since} are in no memory yet; a memory is formed of {} or more (memory.range_tokens)",
            rules.range_tokens
        )
    }

    /// The input of a memory of a range.
    pub fn request(
        &self,
        range: MemoryRange,
        conversation: &mut Conversation,
        model: &ChatModel,
    ) -> Result<MemoryRequest, Error> {
        MemoryRequest::build(Some(range), &self.placed, conversation, model)
    }

    /// Forms the memory of a range. If it is preempted, the same range is due again.
    pub fn form(
        &mut self,
        range: MemoryRange,
        conversation: &mut Conversation,
        model: &mut ChatModel,
        rules: &ConversationRules,
        is_preempted: &dyn Fn() -> bool,
    ) -> Result<MemoryStep, Error> {
        let Some(memory_rules) = rules.active_memory_rules() else { return Ok(MemoryStep::default()) };
        // The text before the range is summarized too, so that the memory does not begin in the middle.
        let overlap_from = overlap_start(conversation.timeline(), range, memory_rules.overlap_tokens);
        let shown = MemoryRange { from: overlap_from.unwrap_or(range.from), ..range };
        let first_words = first_words(shown, conversation)?;
        let mut request = self.request(shown, conversation, model)?;
        let mut fork = ForkRequest {
            request: &mut request,
            instruction: &formation_instruction(shown, &first_words, memory_rules.max_tokens),
            max_tokens: memory_rules.max_tokens,
            sampling: &rules.sampling,
        };
        let Some(text) = fork.generate(conversation, model, is_preempted)? else {
            return Ok(MemoryStep { worked: true, events: Vec::new() });
        };
        // The range counts as covered even where the model wrote nothing: it would write nothing the next time too.
        self.formed_until = (range.to.0, range.to.1 + 1);
        let (store, name, _) = conversation.body_loader();
        record::store_formed_until(store, name, self.formed_until)?;
        let mut events = Vec::new();
        if !text.is_empty() {
            let source = request.source();
            let operations = request.agent_operations;
            let new = NewMemory { range, overlap_from, reflection: false, text, operations, source };
            let id = self.add(new, conversation, model)?;
            events.push(Event::MemoryChanged { id, action: MemoryAction::Formed });
        }
        Ok(MemoryStep { worked: true, events })
    }

    /// Asks the model to reflect on the whole conversation. Returns the new memory; none if it was preempted or wrote nothing.
    pub fn reflect(
        &mut self,
        conversation: &mut Conversation,
        model: &mut ChatModel,
        rules: &ConversationRules,
        is_preempted: &dyn Fn() -> bool,
    ) -> Result<Option<u64>, Error> {
        let Some(memory_rules) = rules.active_memory_rules() else { return Ok(None) };
        let last = conversation.timeline().chunks().next_back().map(|chunk| chunk.id());
        let Some(last) = last else { return Ok(None) };
        let from = self.last_reflection().map_or((0, 0), |memory| (memory.range.to.0 + 1, 0));
        let range = MemoryRange { from, to: (last.turn.0, last.index) };
        let mut request = MemoryRequest::build(None, &self.placed, conversation, model)?;
        let mut fork = ForkRequest {
            request: &mut request,
            instruction: REFLECTION_INSTRUCTION,
            max_tokens: memory_rules.max_tokens,
            sampling: &rules.sampling,
        };
        match fork.generate(conversation, model, is_preempted)? {
            Some(text) if !text.is_empty() => {
                let (source, operations) = (request.source(), Vec::new());
                let new = NewMemory { range, overlap_from: None, reflection: true, text, operations, source };
                self.add(new, conversation, model).map(Some)
            }
            _ => Ok(None),
        }
    }

    pub fn messages_since_reflection(&self, conversation: &Conversation) -> usize {
        let last = self.last_reflection().map(|memory| memory.range.to.0);
        let turns = conversation.timeline().turns().iter().rev();
        turns.take_while(|turn| last.is_none_or(|last| turn.id.0 > last)).count()
    }

    fn last_reflection(&self) -> Option<&Memory> {
        self.memories.iter().rev().find(|memory| memory.reflection)
    }

    fn add(
        &mut self,
        new: NewMemory,
        conversation: &mut Conversation,
        model: &ChatModel,
    ) -> Result<u64, Error> {
        let (store, name, timeline) = conversation.body_loader();
        let known = self.memories.iter().map(|memory| memory.id + 1).max().unwrap_or(1);
        let id = next_memory_id(store, name)?.max(known);
        let pruned = new.range.chunks(timeline).filter(|chunk| !chunk.is_live()).map(|chunk| chunk.id());
        let memory = Memory {
            id,
            range: new.range,
            reflection: new.reflection,
            text: new.text,
            model: model.info().name.clone(),
            formed_after: timeline.turns().last().map_or(TurnId(0), |turn| turn.id),
            formed_at: jiff::Timestamp::now().as_millisecond(),
            pinned: false,
            disabled: false,
            edited: false,
            pending_forget: false,
            conflicts: BTreeSet::new(),
            operations: new.operations,
            pruned_chunks: pruned.collect(),
            source: Some(new.source),
            overlap_from: new.overlap_from,
            carried_from: Vec::new(),
            retracted: BTreeSet::new(),
            settled: BTreeSet::new(),
        };
        record::store_memory(store, name, &memory)?;
        self.memories.push(memory);
        update_conflicts(store, name, &mut self.memories, id)?;
        Ok(id)
    }
}
