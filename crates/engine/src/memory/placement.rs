//! Which memories are placed in the context window, where, and with which text.
//!
//! A memory is placed when chunks of its range were pruned, at the position of the first turn that was pruned whole. If a
//! chunk of the range is resurrected, the memory is hidden at once. Placing waits for idle time: its tokens are prefilled
//! then, so that no answer waits for them.

use super::record::Memory;
use super::rules::MemoryRules;
use super::segment::Facet;
pub use super::segment::PlacedMemory;
use crate::chat_model::ChatModel;
use crate::conversation::Conversation;
use halo_core::Error;
use halo_core::model::ModelToken;
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Position, Role, TurnId};
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// The longest user message in tokens that a memory quotes. Search finds longer ones on the timeline.
const MAX_QUOTE_TOKENS: usize = 200;

/// The most tokens of a placed memory: a [`WindowToken`](halo_core::model::WindowToken) has a 16-bit offset behind its
/// position.
const MAX_PLACED_TOKENS: usize = 4000;

/// Whether a memory may be in the window now.
pub(super) fn is_placeable(memory: &Memory, timeline: &Timeline, rules: &MemoryRules) -> bool {
    if memory.disabled || memory.reflection || memory.is_carried() {
        return false;
    }
    let turns_since = timeline.turns().iter().rev().take_while(|turn| turn.id > memory.formed_after);
    let answers = turns_since.filter(|turn| turn.role == Role::Assistant).count();
    let is_live = |&id: &ChunkId| timeline.chunk(id).is_some_and(|chunk| chunk.is_live());
    let resurrected = memory.pruned_chunks.iter().any(is_live);
    answers >= rules.delay_answers && !resurrected && placement_of(memory, timeline).is_some()
}

/// Where a memory is placed: at the first turn of its range that was pruned whole. (The end of a turn that was split belongs
/// to one memory and its beginning to another; then the first chunk within the range decides.)
fn placement_of(memory: &Memory, timeline: &Timeline) -> Option<(ChunkId, Position)> {
    let mut turns: Vec<(ChunkId, Position, bool)> = Vec::new();
    for chunk in memory.range.chunks(timeline) {
        match turns.last_mut() {
            Some((id, _, pruned)) if id.turn == chunk.id().turn => *pruned &= !chunk.is_live(),
            _ => turns.push((chunk.id(), chunk.start(), !chunk.is_live())),
        }
    }
    turns.into_iter().find(|(_, _, pruned)| *pruned).map(|(id, position, _)| (id, position))
}

/// The memories to place, by position: those that are pinned first, then the latest, as many as fit into `budget` tokens.
/// Memories in `placed` whose range has not changed keep their tokens.
pub(super) fn plan_placement(
    memories: &[Memory],
    placed: &[PlacedMemory],
    rules: &MemoryRules,
    mut budget: usize,
    conversation: &mut Conversation,
    model: &mut ChatModel,
) -> Result<Vec<PlacedMemory>, Error> {
    let mut candidates: Vec<&Memory> =
        (memories.iter()).filter(|memory| is_placeable(memory, conversation.timeline(), rules)).collect();
    candidates.sort_by_key(|memory| (!memory.pinned, Reverse(memory.id)));
    let mut planned: Vec<PlacedMemory> = Vec::new();
    for memory in candidates {
        let pruned = pruned_chunks_of(memory, conversation.timeline());
        let unchanged = placed.iter().find(|placed| placed.id == memory.id && placed.pruned_chunks == pruned);
        let next = match unchanged {
            Some(placed) => Some(placed.clone()),
            None => render_memory(memory, conversation, model)?,
        };
        if let Some(next) = next.filter(|next| next.len() <= budget.min(MAX_PLACED_TOKENS)) {
            budget -= next.len();
            planned.push(next);
        }
    }
    planned.sort_by_key(|placed| placed.position);
    Ok(planned)
}

/// The tokens of a memory at its place; none where they are not fewer than those that it replaces.
fn render_memory(
    memory: &Memory,
    conversation: &mut Conversation,
    model: &mut ChatModel,
) -> Result<Option<PlacedMemory>, Error> {
    let Some((first, position)) = placement_of(memory, conversation.timeline()) else { return Ok(None) };
    let pruned_chunks = pruned_chunks_of(memory, conversation.timeline());
    let pruned: Vec<ChunkId> = pruned_chunks.iter().copied().collect();
    conversation.load_bodies(&pruned)?;
    let timeline = conversation.timeline();
    let replaced_tokens: usize =
        pruned.iter().filter_map(|&id| timeline.chunk(id)).map(|chunk| chunk.len()).sum();
    let turn_len = |turn: TurnId| timeline.turn_chunks(turn).map(|chunk| chunk.len()).sum::<usize>();
    let is_quoted = |id: &&ChunkId| id.role == Role::User && turn_len(id.turn) <= MAX_QUOTE_TOKENS;
    let quotes: Vec<(ChunkId, String)> = (pruned.iter().filter(is_quoted))
        .filter_map(|&id| timeline.chunk(id))
        .map(|chunk| (chunk.id(), chunk.text().into_owned()))
        .collect();
    let before = timeline.turns().iter().rev().find(|turn| turn.id < first.turn).map(|turn| turn.role);
    let turns = turns_of(memory, timeline);
    conversation.unload_pruned();

    let (id, range) = (memory.id, memory.range);
    let header = model.format.turn_header(Role::System, before, None);
    let header = header.tokenize(&mut *model.model)?;
    let mut tokens: Vec<(ModelToken, Facet)> =
        header.into_iter().map(|token| (token, Facet::Template(first))).collect();
    let mut push = |text: &str, facet: Facet| -> Result<(), Error> {
        tokens.extend(model.model.tokenize(text, false)?.into_iter().map(|token| (token, facet)));
        Ok(())
    };
    push(&format!("<memory from=\"{}\" to=\"{}\">\n", range.from.0, range.to.0), Facet::Boundary(id))?;
    for (chunk, text) in &quotes {
        push("The user said: ", Facet::Boundary(id))?;
        push(text, Facet::Quote(id, *chunk))?;
        push("\n", Facet::Boundary(id))?;
    }
    push(&memory.current_text(), Facet::Memory(id))?;
    for operation in &memory.operations {
        push(&format!("\nStill so: {operation}"), Facet::Memory(id))?;
    }
    push("\n</memory>", Facet::Boundary(id))?;
    let placed = PlacedMemory { id, position, turn: first.turn, turns, pruned_chunks, tokens };
    Ok((placed.len() < replaced_tokens).then_some(placed))
}

/// The chunks of a memory's range that were pruned and not deleted.
fn pruned_chunks_of(memory: &Memory, timeline: &Timeline) -> BTreeSet<ChunkId> {
    memory.range.chunks(timeline).filter(|chunk| !chunk.is_live()).map(|chunk| chunk.id()).collect()
}

fn turns_of(memory: &Memory, timeline: &Timeline) -> Vec<TurnId> {
    let mut turns: Vec<TurnId> = memory.range.chunks(timeline).map(|chunk| chunk.id().turn).collect();
    turns.dedup();
    turns
}
