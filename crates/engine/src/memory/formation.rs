//! Asks the model for a memory, in a fork of its state at the end of the range. The fork is thrown away afterwards.
//!
//! The request holds the context at the end of the range as segments with their origin; the window and the messages of the
//! fork are made of these segments and of nothing else. Chunks of the range that were pruned since are part of it: the model
//! restores their KV cells from its archive.
//!
//! The instruction comes at the end of the range and names where the range begins. A mark before the range would change
//! every token after it, so the state would not be the one in which the range was generated. A model behind a chat API keeps
//! no state, so there the marks are messages at both ends.

use super::range::MemoryRange;
use super::segment::{ContextBlock, PlacedMemory, Segment, WindowItem, render_items, window_items};
use super::source::{MemorySource, SourceSegment};
use crate::chat_model::ChatModel;
use crate::conversation::Conversation;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{FinishReason, ModelStep, Prompt, PromptMessage, Sampling, StepFlow, WindowToken};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Position, Role, TokenFlags, TurnId};
use std::collections::{BTreeMap, BTreeSet};

/// The input of a memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryRequest {
    /// The context at the end of the range as segments.
    pub segments: Vec<Segment>,
    /// The model's last answer.
    pub agent_response: String,
    /// The tool calls in the range and their results.
    pub agent_operations: Vec<String>,
    /// The first turn of the range.
    pub compress_from: TurnId,
    pub compress_to: TurnId,
    /// The position of the first token after the context.
    next_position: Position,
    /// Tokens whose KV cells came from the archive, once the model was asked.
    restored_tokens: usize,
}

impl MemoryRequest {
    /// The request for a range or, without one, for the whole window as it is now.
    pub(super) fn build(
        range: Option<MemoryRange>,
        placed: &[PlacedMemory],
        conversation: &mut Conversation,
        model: &ChatModel,
    ) -> Result<Self, Error> {
        let agent_operations = range.map_or(Ok(Vec::new()), |range| tool_operations(range, conversation))?;
        let last_answer = conversation.turns_latest_first().find(|(_, role)| *role == Role::Assistant);
        let agent_response =
            last_answer.map(|(turn, _)| conversation.turn_text(turn)).transpose()?.unwrap_or_default();
        let chunks: Vec<ChunkId> =
            range.iter().flat_map(|range| range.chunks(conversation.timeline())).map(|c| c.id()).collect();
        conversation.load_bodies(&chunks)?;
        let timeline = conversation.timeline();
        let items = match range {
            Some(_) => items_at_range_end(&chunks, timeline, placed),
            None => window_items(timeline, placed).collect(),
        };
        let segments = render_items(&model.system_tokens, timeline, items.into_iter()).segments;
        let end = chunks.last().and_then(|&last| timeline.chunk(last));
        let last_turn = timeline.turns().last().map_or(TurnId(0), |turn| turn.id);
        let request = Self {
            segments,
            agent_response,
            agent_operations,
            compress_from: range.map_or(TurnId(0), |range| TurnId(range.from.0)),
            compress_to: range.map_or(last_turn, |range| TurnId(range.to.0)),
            restored_tokens: 0,
            next_position: end.map_or(timeline.next_position(), |chunk| chunk.start().plus(chunk.len())),
        };
        conversation.unload_pruned();
        Ok(request)
    }

    #[must_use]
    pub fn tokens(&self) -> usize {
        self.segments.iter().map(|segment| segment.tokens).sum()
    }

    /// Leaves out what is not of the range, where the context of the model is too small for all.
    fn fit(&mut self, max_tokens: usize) {
        if self.tokens() > max_tokens {
            let range = self.compress_from..=self.compress_to;
            self.segments.retain(|segment| match segment.block_ids.first() {
                Some(ContextBlock::Message(turn)) => range.contains(turn),
                Some(ContextBlock::SystemPrompt) => true,
                _ => false,
            });
        }
    }

    /// The context as the model reads it.
    #[must_use]
    pub fn window(&self) -> Vec<WindowToken> {
        self.segments.iter().flat_map(|segment| segment.window.iter().copied()).collect()
    }

    /// The context as messages, with the start mark before the range and the instruction after it.
    fn messages(&self, system_prompt: &str, instruction: &str) -> Vec<PromptMessage> {
        let mut messages = Vec::new();
        let mut started = false;
        for segment in &self.segments {
            let text = match segment.block_ids.first() {
                Some(ContextBlock::SystemPrompt) if system_prompt.trim().is_empty() => continue,
                Some(ContextBlock::SystemPrompt) => system_prompt.trim().to_owned(),
                Some(ContextBlock::Message(turn)) => {
                    if *turn >= self.compress_from && !std::mem::replace(&mut started, true) {
                        let text = format!("<memory_formation_start sequence=\"{}\"/>", self.compress_from.0);
                        messages.push(PromptMessage { role: Role::System, text });
                    }
                    segment.message_text()
                }
                _ => segment.message_text(),
            };
            messages.push(PromptMessage { role: segment.role, text });
        }
        messages.push(PromptMessage { role: Role::User, text: instruction.to_owned() });
        messages
    }

    /// What the writer of the memory saw, without its text.
    #[must_use]
    pub fn source(&self) -> MemorySource {
        let segment = |segment: &Segment| SourceSegment {
            block: segment.block_ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
            turns: segment.source_frames.iter().map(|turn| turn.0).collect(),
            facets: segment.facet_ids().iter().map(ToString::to_string).collect(),
            tokens: segment.tokens,
        };
        MemorySource {
            segments: self.segments.iter().map(segment).collect(),
            restored_tokens: self.restored_tokens,
        }
    }
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
    pub request: &'a mut MemoryRequest,
    pub instruction: &'a str,
    pub max_tokens: usize,
    pub sampling: &'a Sampling,
}

impl ForkRequest<'_> {
    /// The model's answer; none if `is_preempted` stopped it.
    pub fn generate(
        &mut self,
        conversation: &Conversation,
        model: &mut ChatModel,
        is_preempted: &dyn Fn() -> bool,
    ) -> Result<Option<String>, Error> {
        let (window, next_position) = self.window(model)?;
        let sampling = Sampling {
            max_tokens: self.max_tokens,
            temperature: 0.0,
            repetition_penalty: 1.1,
            stop: STOP_SEQUENCES.map(str::to_owned).to_vec(),
            constraint: None,
            ..self.sampling.clone()
        };
        let (request, system_prompt) = (&*self.request, &model.format.system_prompt);
        let messages = || request.messages(system_prompt, self.instruction);
        let prompt = Prompt {
            conversation: conversation.kv_key(),
            window: &window,
            messages: &messages,
            next_position,
            ephemeral: true,
        };
        let (mut text, mut restored) = (String::new(), 0);
        let finish = model.model.generate(&prompt, &sampling, &AttentionRequest::none(), &mut |step| {
            match step {
                ModelStep::Token(token, _) => text.push_str(&token.text),
                ModelStep::PrefillDone(stats) => restored = stats.restored,
                _ => {}
            }
            if is_preempted() { StepFlow::Stop } else { StepFlow::Continue }
        })?;
        self.request.restored_tokens = restored;
        Ok((finish != FinishReason::Cancelled).then(|| clean_text(&text, finish)))
    }

    /// The window of the fork with the instruction at its end, and the position of the next token.
    fn window(&mut self, model: &mut ChatModel) -> Result<(Vec<WindowToken>, Position), Error> {
        let is_message = |segment: &&Segment| segment.block_ids != [ContextBlock::SystemPrompt];
        let last_role = self.request.segments.iter().rfind(is_message).map(|segment| segment.role);
        let turn = [
            model.format.turn_header(Role::User, last_role, None).tokenize(&mut *model.model)?,
            model.model.tokenize(self.instruction, false)?,
            model.answer_header_tokens()?,
        ];
        let instruction: usize = turn.iter().map(Vec::len).sum();
        self.request.fit(model.info().context.saturating_sub(instruction + self.max_tokens));
        let mut window = self.request.window();
        let mut next = self.request.next_position;
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

/// The items of the context at the end of a range: the live chunks up to there, and all chunks of the range.
fn items_at_range_end<'a>(
    range: &[ChunkId],
    timeline: &'a Timeline,
    placed: &'a [PlacedMemory],
) -> Vec<WindowItem<'a>> {
    let end = range.last().and_then(|&last| timeline.chunk(last)).map(|chunk| chunk.start());
    let range: BTreeSet<ChunkId> = range.iter().copied().collect();
    let mut items = Vec::new();
    let pruned = range.iter().filter_map(|&id| timeline.chunk(id)).filter(|chunk| !chunk.is_live());
    let mut pruned: Vec<_> = pruned.collect();
    pruned.sort_by_key(|chunk| chunk.start());
    let mut pruned = pruned.into_iter().peekable();
    for item in window_items(timeline, placed) {
        let position = match item {
            WindowItem::Chunk(chunk) | WindowItem::PrunedChunk(chunk) => chunk.start(),
            WindowItem::Memory(memory) => memory.position,
        };
        while let Some(chunk) = pruned.next_if(|chunk| chunk.start() < position) {
            items.push(WindowItem::PrunedChunk(chunk));
        }
        let is_before_end = end.is_none_or(|end| position <= end);
        match item {
            // The range itself is in the window, so a memory of it is not.
            WindowItem::Memory(memory) if range.iter().any(|id| memory.turns.contains(&id.turn)) => {}
            item if is_before_end => items.push(item),
            _ => {}
        }
    }
    items.extend(pruned.map(WindowItem::PrunedChunk));
    items
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
