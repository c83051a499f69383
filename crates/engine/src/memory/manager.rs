//! The memories of one conversation: when the next one is formed, and which are placed in the context window.

use super::edit::{MemoryEdit, apply_memory_edit, find_conflicts, mark_conflicts, rank_memories};
use super::formation::{
    ForkRequest, MemoryRequest, REFLECTION_INSTRUCTION, first_words, formation_instruction, tool_operations,
};
use super::placement::{is_placeable, plan_placement};
use super::range::{MemoryRange, next_range, uncovered_chunks};
use super::record::{self, Memory};
use super::segment::{PlacedMemory, build_window, render_segments, window_messages};
use crate::chat_model::ChatModel;
use crate::conversation::Conversation;
use crate::event::{Event, MemoryAction};
use crate::rules::ConversationRules;
use halo_core::Error;
use halo_core::model::{FinishReason, Prompt, StepFlow};
use halo_core::store::RecordKind;
use halo_core::token::{ChunkId, Role, TurnId};

/// The memories of one conversation.
#[derive(Default)]
pub(crate) struct MemoryManager {
    memories: Vec<Memory>,
    /// The first chunk that no memory covers yet, as turn and index.
    formed_until: (u32, u32),
    placed: Vec<PlacedMemory>,
    notices: Vec<String>,
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
        let (store, name, _) = conversation.body_loader();
        Ok(Self {
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
        for memory in &mut self.memories {
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
        if tokens + rules.sampling.max_tokens > model.info().context {
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
        next_range(conversation.timeline(), self.formed_until, &rules).filter(|_| !conversation.is_new())
    }

    /// Why no memory is due, for the user.
    pub fn explain_none_due(&self, conversation: &Conversation, rules: &ConversationRules) -> String {
        let Some(rules) = rules.active_memory_rules() else {
            return "no memories are formed in this conversation: memory.enabled is false, context.max_tokens is 0, or \
                    brightness.strategy prunes token by token"
                .to_owned();
        };
        let uncovered = uncovered_chunks(conversation.timeline(), self.formed_until);
        let tokens: usize = uncovered.iter().map(|(_, tokens)| tokens).sum();
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
        let agent_operations = tool_operations(range, conversation)?;
        let last_answer = conversation.turns_latest_first().find(|(_, role)| *role == Role::Assistant);
        let agent_response =
            last_answer.map(|(turn, _)| conversation.turn_text(turn)).transpose()?.unwrap_or_default();
        conversation.unload_pruned();
        Ok(MemoryRequest {
            segments: render_segments(&model.system_tokens, conversation.timeline(), &self.placed).segments,
            agent_response,
            agent_operations,
            compress_from: TurnId(range.from.0),
            compress_to: TurnId(range.to.0),
        })
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
        let first_words = first_words(range, conversation)?;
        let fork = ForkRequest {
            range: Some(range),
            instruction: &formation_instruction(range, &first_words, memory_rules.max_tokens),
            max_tokens: memory_rules.max_tokens,
            sampling: &rules.sampling,
            placed: &self.placed,
        };
        let Some(text) = fork.generate(conversation, model, is_preempted)? else {
            return Ok(MemoryStep { worked: true, events: Vec::new() });
        };
        let operations = tool_operations(range, conversation)?;
        // The range counts as covered even where the model wrote nothing: it would write nothing the next time too.
        self.formed_until = (range.to.0, range.to.1 + 1);
        let (store, name, _) = conversation.body_loader();
        record::store_formed_until(store, name, self.formed_until)?;
        let mut events = Vec::new();
        if !text.is_empty() {
            let id = self.add(range, false, text, operations, conversation, model)?;
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
        let fork = ForkRequest {
            range: None,
            instruction: REFLECTION_INSTRUCTION,
            max_tokens: memory_rules.max_tokens,
            sampling: &rules.sampling,
            placed: &self.placed,
        };
        match fork.generate(conversation, model, is_preempted)? {
            Some(text) if !text.is_empty() => {
                self.add(range, true, text, Vec::new(), conversation, model).map(Some)
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
        range: MemoryRange,
        reflection: bool,
        text: String,
        operations: Vec<String>,
        conversation: &mut Conversation,
        model: &ChatModel,
    ) -> Result<u64, Error> {
        // Ids of memories that are to be forgotten are not used again: they are only in the store.
        let stored = conversation.records(RecordKind::Memory)?;
        let stored = stored.iter().filter_map(|record| record.key.parse::<u64>().ok());
        let id = stored.chain(self.memories.iter().map(|memory| memory.id)).max().unwrap_or(0) + 1;
        let others: Vec<&Memory> = self.memories.iter().collect();
        let conflicts = find_conflicts(&text, &others);
        let (store, name, timeline) = conversation.body_loader();
        let pruned = range.chunks(timeline).filter(|chunk| !chunk.is_live()).map(|chunk| chunk.id());
        let memory = Memory {
            id,
            range,
            reflection,
            text,
            model: model.info().name.clone(),
            formed_after: timeline.turns().last().map_or(TurnId(0), |turn| turn.id),
            formed_at: jiff::Timestamp::now().as_millisecond(),
            pinned: false,
            disabled: false,
            edited: false,
            pending_forget: false,
            conflicts: conflicts.clone(),
            operations,
            pruned_chunks: pruned.collect(),
        };
        record::store_memory(store, name, &memory)?;
        self.memories.push(memory);
        mark_conflicts(store, name, &mut self.memories, id, &conflicts)?;
        Ok(id)
    }
}
