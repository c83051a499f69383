//! Asks the model for a memory, in a fork of its state at the end of the range. The fork is thrown away afterwards.
//!
//! The instruction comes at the end of the range and names where the range begins. A mark before the range would change
//! every token after it, so the state would not be the one in which the range was generated. A model behind a chat API keeps
//! no state, so there the marks are messages at both ends.

use super::range::MemoryRange;
use super::segment::{
    PlacedMemory, Segment, WindowItem, build_window, push_chunk, system_window_token, window_items,
    window_messages,
};
use crate::chat_model::ChatModel;
use crate::conversation::Conversation;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{FinishReason, ModelStep, Prompt, PromptMessage, Sampling, StepFlow, WindowToken};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Role, TokenFlags, TurnId};
use std::collections::{BTreeMap, BTreeSet};

/// The input of a memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryRequest {
    /// The context window as segments.
    pub segments: Vec<Segment>,
    /// The model's last answer.
    pub agent_response: String,
    /// The tool calls in the range and their results.
    pub agent_operations: Vec<String>,
    /// The first turn of the range.
    pub compress_from: TurnId,
    pub compress_to: TurnId,
}

/// The instruction at the end of a range; `first_words` tell the model where the range begins.
#[must_use]
pub fn formation_instruction(range: MemoryRange, first_words: &str, max_tokens: usize) -> String {
    let (from, to) = (range.from.0, range.to.0);
    let words = max_tokens * 2 / 3;
    // Short, and as a user message: small models ignore anything else.
    format!(
        "<memory_formation_end sequence=\"{to}\"/> Summarize what we have said since \
         <memory_formation_start sequence=\"{from}\"/> (“{first_words}”): names, numbers, what was decided, what is still \
         open, in at most {words} words."
    )
}

/// The instruction for a reflection on the whole conversation.
pub(super) const REFLECTION_INSTRUCTION: &str = "Look back over our whole conversation: what have you learned about me and what I want, what is \
                          still open, and what would you do differently? Answer in at most 100 words.";

/// Markup that ends the model's text: a memory contains none.
const STOP_SEQUENCES: [&str; 3] = ["<memory", "</memory", "<|im_start|>"];

/// A question to the model in a fork of its state.
pub(super) struct ForkRequest<'a> {
    /// The fork is of the state at the end of this range; none: of the current state.
    pub range: Option<MemoryRange>,
    pub instruction: &'a str,
    pub max_tokens: usize,
    pub sampling: &'a Sampling,
    pub placed: &'a [PlacedMemory],
}

impl ForkRequest<'_> {
    /// The model's answer; none if `is_preempted` stopped it.
    pub fn generate(
        &self,
        conversation: &mut Conversation,
        model: &mut ChatModel,
        is_preempted: &dyn Fn() -> bool,
    ) -> Result<Option<String>, Error> {
        // Chunks of the range may have been pruned since: the window at its end had them.
        let range: Vec<ChunkId> = match self.range {
            Some(range) => range.chunks(conversation.timeline()).map(|chunk| chunk.id()).collect(),
            None => Vec::new(),
        };
        conversation.load_bodies(&range)?;
        let (window, next_position) = self.window(&range, conversation.timeline(), model)?;
        let sampling = Sampling {
            max_tokens: self.max_tokens,
            temperature: 0.0,
            repetition_penalty: 1.1,
            stop: STOP_SEQUENCES.map(str::to_owned).to_vec(),
            constraint: None,
            ..self.sampling.clone()
        };
        let timeline = conversation.timeline();
        let whole = MemoryRange { from: (0, 0), to: (u32::MAX, u32::MAX) };
        let marked = self.range.unwrap_or(whole);
        let (format, placed) = (&model.format, self.placed);
        let messages = || {
            let messages = window_messages(&format.system_prompt, timeline, placed);
            mark_range(messages, timeline, placed, marked, self.instruction)
        };
        let prompt = Prompt {
            conversation: conversation.kv_key(),
            window: &window,
            messages: &messages,
            next_position,
            ephemeral: true,
        };
        let mut text = String::new();
        let finish = model.model.generate(&prompt, &sampling, &AttentionRequest::none(), &mut |step| {
            if let ModelStep::Token(token, _) = step {
                text.push_str(&token.text);
            }
            if is_preempted() { StepFlow::Stop } else { StepFlow::Continue }
        })?;
        conversation.unload_pruned();
        Ok((finish != FinishReason::Cancelled).then(|| clean_text(&text, finish)))
    }

    /// The window of the fork with the instruction at its end, and the position of the next token.
    fn window(
        &self,
        range: &[ChunkId],
        timeline: &Timeline,
        model: &mut ChatModel,
    ) -> Result<(Vec<WindowToken>, halo_core::token::Position), Error> {
        let mut window = match range {
            [] => build_window(&model.system_tokens, timeline, self.placed),
            range => window_at_range_end(range, timeline, model, self.placed),
        };
        let last = range.last().copied();
        let last_role =
            last.or_else(|| timeline.live_chunks().last().map(|chunk| chunk.id())).map(|id| id.role);
        let end = last.and_then(|last| timeline.chunk(last)).map(|chunk| chunk.start().plus(chunk.len()));
        let mut next = end.unwrap_or_else(|| timeline.next_position());
        let turn = [
            model.format.turn_header(Role::User, last_role, None).tokenize(&mut *model.model)?,
            model.model.tokenize(self.instruction, false)?,
            model.answer_header_tokens()?,
        ];
        for token in turn.into_iter().flatten() {
            // These positions are on no timeline: they are dropped with the fork.
            window.push(WindowToken { position: Some(next), offset: 0, id: token.id, chunk_start: false });
            next = next.plus(1);
        }
        Ok((window, next))
    }
}

/// The text up to the first stop sequence; where the model ran out of tokens, up to the last full sentence.
fn clean_text(text: &str, finish: FinishReason) -> String {
    let end = STOP_SEQUENCES.iter().filter_map(|stop| text.find(stop)).min().unwrap_or(text.len());
    let text = text[..end].trim();
    let sentences = text.rfind(['.', '!', '?']).map_or(text, |end| &text[..=end]);
    if finish == FinishReason::Length { sentences } else { text }.to_owned()
}

/// The context window at the end of a range: the live chunks up to there, and all chunks of the range.
fn window_at_range_end(
    range: &[ChunkId],
    timeline: &Timeline,
    model: &ChatModel,
    placed: &[PlacedMemory],
) -> Vec<WindowToken> {
    let end = range.last().and_then(|&last| timeline.chunk(last)).map(|chunk| chunk.start());
    let range: BTreeSet<ChunkId> = range.iter().copied().collect();
    let mut window: Vec<WindowToken> = model.system_tokens.iter().map(system_window_token).collect();
    let mut pruned =
        range.iter().filter_map(|&id| timeline.chunk(id)).filter(|chunk| !chunk.is_live()).peekable();
    for item in window_items(timeline, placed) {
        let position = match &item {
            WindowItem::Chunk(chunk) => chunk.start(),
            WindowItem::Memory(memory) => memory.position,
        };
        while let Some(chunk) = pruned.next_if(|chunk| chunk.start() < position) {
            push_chunk(&mut window, chunk, std::iter::once(chunk.run()));
        }
        match item {
            WindowItem::Chunk(chunk) if end.is_none_or(|end| chunk.start() <= end) => {
                push_chunk(&mut window, chunk, chunk.live_runs());
            }
            // The range itself is in the window, so a memory of it is not.
            WindowItem::Memory(memory) if range.iter().any(|id| memory.turns.contains(&id.turn)) => {}
            WindowItem::Memory(memory) if end.is_none_or(|end| memory.position <= end) => {
                window.extend(memory.window_tokens());
            }
            _ => {}
        }
    }
    pruned.for_each(|chunk| push_chunk(&mut window, chunk, std::iter::once(chunk.run())));
    window
}

/// The first words of a range, which tell the model where it begins.
pub(super) fn first_words(range: MemoryRange, conversation: &mut Conversation) -> Result<String, Error> {
    let first: Vec<ChunkId> = range.chunks(conversation.timeline()).take(1).map(|chunk| chunk.id()).collect();
    conversation.load_bodies(&first)?;
    let chunk = first.first().and_then(|&id| conversation.timeline().chunk(id));
    let text = chunk.map(|chunk| chunk.text().into_owned()).unwrap_or_default();
    Ok(text.split_whitespace().take(8).collect::<Vec<_>>().join(" "))
}

/// The results of tools in a range. Of several results for the same path, only the last one counts.
pub(super) fn tool_operations(
    range: MemoryRange,
    conversation: &mut Conversation,
) -> Result<Vec<String>, Error> {
    let chunks: Vec<ChunkId> = range.chunks(conversation.timeline()).map(|chunk| chunk.id()).collect();
    conversation.load_bodies(&chunks)?;
    let timeline = conversation.timeline();
    let results = chunks.iter().filter_map(|&id| timeline.chunk(id)).flat_map(|chunk| {
        let tokens = chunk.run().positions().filter_map(|position| timeline.token(position));
        let result: String =
            tokens.filter(|t| t.flags.contains(TokenFlags::TOOL_RESULT)).map(|t| t.text).collect();
        result.lines().map(str::to_owned).collect::<Vec<_>>()
    });
    let mut net: BTreeMap<String, (usize, String)> = BTreeMap::new();
    for (n, line) in results.enumerate() {
        // ⚙️【command】→ ✓ path = value
        let Some((_, result)) = line.split_once("✓") else { continue };
        let result = result.trim();
        if !result.is_empty() {
            let path = result.split_once(" = ").map_or(result, |(path, _)| path);
            net.insert(path.to_owned(), (n, result.to_owned()));
        }
    }
    let mut net: Vec<(usize, String)> = net.into_values().collect();
    net.sort();
    Ok(net.into_iter().map(|(_, result)| result).collect())
}

/// The messages up to the end of a range, with the start mark before it and the instruction after it.
fn mark_range(
    messages: Vec<PromptMessage>,
    timeline: &Timeline,
    placed: &[PlacedMemory],
    range: MemoryRange,
    instruction: &str,
) -> Vec<PromptMessage> {
    // The turn of each message, in the order in which `window_messages` makes them.
    let mut turns: Vec<Option<TurnId>> = Vec::new();
    for item in window_items(timeline, placed) {
        match item {
            WindowItem::Memory(_) => turns.push(None),
            WindowItem::Chunk(chunk) if turns.last() == Some(&Some(chunk.id().turn)) => {}
            WindowItem::Chunk(chunk) => turns.push(Some(chunk.id().turn)),
        }
    }
    let mut marked: Vec<PromptMessage> = Vec::new();
    let system_messages = messages.len() - turns.len().min(messages.len());
    let mut started = false;
    for (n, message) in messages.into_iter().enumerate() {
        let turn = n.checked_sub(system_messages).and_then(|n| turns[n]);
        if turn.is_some_and(|turn| turn.0 > range.to.0) {
            break;
        }
        if !started && turn.is_some_and(|turn| turn.0 >= range.from.0) {
            started = true;
            let text = format!("<memory_formation_start sequence=\"{}\"/>", range.from.0);
            marked.push(PromptMessage { role: Role::System, text });
        }
        marked.push(message);
    }
    marked.push(PromptMessage { role: Role::User, text: instruction.to_owned() });
    marked
}
