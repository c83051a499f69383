//! The context window as tokens, as messages and as segments with their origin.
//!
//! A *frame* is a turn. Its *facets* are chunks, tool results and the text of the chat template. A *block* is a message, the
//! system prompt, or a memory that replaces messages. Blocks are rendered as *segments*, and the segments in order are the
//! context. Every byte of it can be traced to its segment, block, frame and facet, and each of those to its bytes.

use halo_core::change::TokenRun;
use halo_core::model::{ModelToken, PromptMessage, WindowToken};
use halo_core::timeline::{ChunkRef, Timeline};
use halo_core::token::{ChunkId, Position, Role, TokenFlags, TurnId};
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

/// A unit of the rendered context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ContextBlock {
    SystemPrompt,
    Message(TurnId),
    Memory(u64),
}

/// The origin of some text of the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Facet {
    SystemPrompt,
    /// Text of the chat template around a message.
    Template(ChunkId),
    Chunk(ChunkId),
    /// A tool result in a chunk.
    ToolResult(ChunkId),
    /// The markup around a memory.
    Boundary(u64),
    /// The text of a memory.
    Memory(u64),
    /// A user's chunk, quoted in a memory.
    Quote(u64, ChunkId),
}

impl fmt::Display for ContextBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ContextBlock::SystemPrompt => f.write_str("instructions"),
            ContextBlock::Message(turn) => write!(f, "turn-{}", turn.0),
            ContextBlock::Memory(id) => write!(f, "memory-{id}"),
        }
    }
}

impl fmt::Display for Facet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Facet::SystemPrompt => f.write_str("instructions"),
            Facet::Template(chunk) => write!(f, "{chunk}/frame"),
            Facet::Chunk(chunk) => write!(f, "{chunk}"),
            Facet::ToolResult(chunk) => write!(f, "{chunk}/result"),
            Facet::Boundary(id) => write!(f, "memory-{id}/boundary"),
            Facet::Memory(id) => write!(f, "memory-{id}"),
            Facet::Quote(id, chunk) => write!(f, "memory-{id}/{chunk}"),
        }
    }
}

/// A block as text, with the origin of each part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub content: String,
    /// The turns that it contains or, as a memory, replaces.
    pub source_frames: Vec<TurnId>,
    pub block_ids: Vec<ContextBlock>,
    /// The byte ranges of its content and their origin.
    pub facets: Vec<(Range<usize>, Facet)>,
    pub tokens: usize,
    pub role: Role,
    /// Its tokens, as the model reads them.
    pub window: Vec<WindowToken>,
}

impl Segment {
    /// Its facets, each once, in order.
    #[must_use]
    pub fn facet_ids(&self) -> Vec<Facet> {
        let mut facets: Vec<Facet> = Vec::new();
        for (_, facet) in &self.facets {
            if !facets.contains(facet) {
                facets.push(*facet);
            }
        }
        facets
    }

    /// Its text without that of the chat template.
    #[must_use]
    pub fn message_text(&self) -> String {
        let said = self.facets.iter().filter(|(_, facet)| !matches!(facet, Facet::Template(_)));
        said.map(|(range, _)| &self.content[range.clone()]).collect()
    }

    fn new(block: ContextBlock, frames: Vec<TurnId>, role: Role) -> Self {
        Self {
            content: String::new(),
            source_frames: frames,
            block_ids: vec![block],
            facets: Vec::new(),
            tokens: 0,
            role,
            window: Vec::new(),
        }
    }

    fn push(&mut self, text: &str, facet: Facet, token: WindowToken) {
        let start = self.content.len();
        self.content.push_str(text);
        self.tokens += 1;
        self.window.push(token);
        match self.facets.last_mut() {
            Some((range, last)) if *last == facet => range.end = self.content.len(),
            _ => self.facets.push((start..self.content.len(), facet)),
        }
    }
}

/// The context window as segments in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedContext {
    pub segments: Vec<Segment>,
}

/// The origin of one byte of the context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByteOrigin {
    /// Index of the segment.
    pub segment: usize,
    pub block: ContextBlock,
    pub turns: Vec<TurnId>,
    pub facet: Facet,
}

impl RenderedContext {
    #[must_use]
    pub fn text(&self) -> String {
        self.segments.iter().map(|segment| segment.content.as_str()).collect()
    }

    #[must_use]
    pub fn tokens(&self) -> usize {
        self.segments.iter().map(|segment| segment.tokens).sum()
    }

    /// The origin of a byte of the text.
    #[must_use]
    pub fn origin_at(&self, at: usize) -> Option<ByteOrigin> {
        let mut start = 0;
        for (n, segment) in self.segments.iter().enumerate() {
            if at < start + segment.content.len() {
                let (_, facet) = segment.facets.iter().find(|(range, _)| range.contains(&(at - start)))?;
                let (block, frames) = (*segment.block_ids.first()?, segment.source_frames.clone());
                return Some(ByteOrigin { segment: n, block, turns: frames, facet: *facet });
            }
            start += segment.content.len();
        }
        None
    }

    /// The segments that contain a turn or replace it.
    #[must_use]
    pub fn segments_of_turn(&self, turn: TurnId) -> Vec<usize> {
        self.find_segments(|segment| segment.source_frames.contains(&turn))
    }

    /// The segments of a block.
    #[must_use]
    pub fn segments_of_block(&self, block: ContextBlock) -> Vec<usize> {
        self.find_segments(|segment| segment.block_ids.contains(&block))
    }

    /// The bytes of the text that come from a facet.
    #[must_use]
    pub fn ranges_of_facet(&self, facet: Facet) -> Vec<Range<usize>> {
        let mut start = 0;
        let mut ranges = Vec::new();
        for segment in &self.segments {
            let matching = segment.facets.iter().filter(|(_, other)| *other == facet);
            ranges.extend(matching.map(|(range, _)| start + range.start..start + range.end));
            start += segment.content.len();
        }
        ranges
    }

    fn find_segments(&self, matches: impl Fn(&Segment) -> bool) -> Vec<usize> {
        self.segments.iter().enumerate().filter(|(_, segment)| matches(segment)).map(|(n, _)| n).collect()
    }
}

/// A memory that is placed in the context window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedMemory {
    pub id: u64,
    pub position: Position,
    /// The first turn that it replaces.
    pub turn: TurnId,
    /// All turns of its range.
    pub turns: Vec<TurnId>,
    /// The pruned chunks of its range, from which its text was made.
    pub pruned_chunks: BTreeSet<ChunkId>,
    /// Its tokens with their origin.
    pub tokens: Vec<(ModelToken, Facet)>,
}

impl PlacedMemory {
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Never true for a memory that is placed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub(crate) fn window_tokens(&self) -> impl Iterator<Item = WindowToken> + '_ {
        let window_token = |(n, (token, _)): (usize, &(ModelToken, Facet))| WindowToken {
            position: Some(self.position),
            offset: n as u16 + 1,
            id: token.id,
            chunk_start: n == 0,
        };
        self.tokens.iter().enumerate().map(window_token)
    }

    /// Its text without the header of the chat template.
    #[must_use]
    pub fn text(&self) -> String {
        let text = self.tokens.iter().filter(|(_, facet)| !matches!(facet, Facet::Template(_)));
        text.map(|(token, _)| token.text.as_str()).collect()
    }
}

/// An item of the context window, in order.
#[derive(Clone, Copy)]
pub(crate) enum WindowItem<'a> {
    Chunk(ChunkRef<'a>),
    /// A chunk that is not live, with all of its tokens: only in the window of a fork.
    PrunedChunk(ChunkRef<'a>),
    Memory(&'a PlacedMemory),
}

/// The items of the context window in order. Tokens, messages and segments are all made from this, so they agree.
pub(crate) fn window_items<'a>(
    timeline: &'a Timeline,
    placed: &'a [PlacedMemory],
) -> impl Iterator<Item = WindowItem<'a>> {
    let mut placed = placed.iter().peekable();
    let mut chunks = timeline.live_chunks().peekable();
    std::iter::from_fn(move || {
        let is_next =
            |memory: &&PlacedMemory| chunks.peek().is_none_or(|chunk| memory.position < chunk.start());
        match placed.next_if(is_next) {
            Some(memory) => Some(WindowItem::Memory(memory)),
            None => chunks.next().map(WindowItem::Chunk),
        }
    })
}

/// The context window as tokens.
pub(crate) fn build_window(
    system_tokens: &[ModelToken],
    timeline: &Timeline,
    placed: &[PlacedMemory],
) -> Vec<WindowToken> {
    let view = timeline.context_window(system_tokens.len());
    let mut window = Vec::with_capacity(view.len() + placed.iter().map(PlacedMemory::len).sum::<usize>());
    window.extend(system_tokens.iter().map(system_window_token));
    for item in window_items(timeline, placed) {
        match item {
            WindowItem::Chunk(chunk) => push_chunk(&mut window, chunk, chunk.live_runs()),
            WindowItem::PrunedChunk(chunk) => push_chunk(&mut window, chunk, std::iter::once(chunk.run())),
            WindowItem::Memory(memory) => window.extend(memory.window_tokens()),
        }
    }
    window
}

/// A token of the system prompt: it has no position on the timeline.
pub(crate) fn system_window_token(token: &ModelToken) -> WindowToken {
    WindowToken { position: None, offset: 0, id: token.id, chunk_start: false }
}

/// Appends some runs of a chunk to a window.
pub(crate) fn push_chunk(
    window: &mut Vec<WindowToken>,
    chunk: ChunkRef<'_>,
    runs: impl Iterator<Item = TokenRun>,
) {
    let mut chunk_start = true;
    for run in runs {
        for (n, &id) in chunk.ids(run).iter().enumerate() {
            let position = Position(run.start.0 + n as u64);
            window.push(WindowToken {
                position: Some(position),
                offset: 0,
                id,
                chunk_start: std::mem::take(&mut chunk_start),
            });
        }
    }
}

/// The context window as messages, for models behind a chat API.
pub(crate) fn window_messages(
    system_prompt: &str,
    timeline: &Timeline,
    placed: &[PlacedMemory],
) -> Vec<PromptMessage> {
    let mut messages: Vec<(Option<TurnId>, PromptMessage)> = Vec::new();
    if !system_prompt.trim().is_empty() {
        messages.push((None, PromptMessage { role: Role::System, text: system_prompt.trim().to_owned() }));
    }
    for item in window_items(timeline, placed) {
        let chunk = match item {
            WindowItem::Chunk(chunk) | WindowItem::PrunedChunk(chunk) => chunk,
            WindowItem::Memory(memory) => {
                messages.push((None, PromptMessage { role: Role::System, text: memory.text() }));
                continue;
            }
        };
        let (turn, role) = (Some(chunk.id().turn), chunk.id().role);
        if messages.last().is_none_or(|(last, _)| *last != turn) {
            messages.push((turn, PromptMessage { role, text: String::new() }));
        }
        if let Some((_, message)) = messages.last_mut() {
            message.text.push_str(&chunk.live_text());
        }
    }
    messages.into_iter().map(|(_, message)| message).collect()
}

/// The context window as segments.
pub(crate) fn render_segments(
    system_tokens: &[ModelToken],
    timeline: &Timeline,
    placed: &[PlacedMemory],
) -> RenderedContext {
    render_items(system_tokens, timeline, window_items(timeline, placed))
}

/// Some items, behind the system prompt, as segments.
pub(crate) fn render_items<'a>(
    system_tokens: &[ModelToken],
    timeline: &Timeline,
    items: impl Iterator<Item = WindowItem<'a>>,
) -> RenderedContext {
    let mut segments: Vec<Segment> = Vec::new();
    if !system_tokens.is_empty() {
        let mut segment = Segment::new(ContextBlock::SystemPrompt, Vec::new(), Role::System);
        for token in system_tokens {
            segment.push(&token.text, Facet::SystemPrompt, system_window_token(token));
        }
        segments.push(segment);
    }
    for item in items {
        let (chunk, runs): (_, Vec<TokenRun>) = match item {
            WindowItem::Memory(memory) => {
                segments.push(memory_segment(memory));
                continue;
            }
            WindowItem::Chunk(chunk) => (chunk, chunk.live_runs().collect()),
            WindowItem::PrunedChunk(chunk) => (chunk, vec![chunk.run()]),
        };
        let (id, block) = (chunk.id(), ContextBlock::Message(chunk.id().turn));
        if segments.last().is_none_or(|last| last.block_ids != [block]) {
            segments.push(Segment::new(block, vec![id.turn], id.role));
        }
        let Some(segment) = segments.last_mut() else { continue };
        let mut window = Vec::with_capacity(chunk.len());
        push_chunk(&mut window, chunk, runs.iter().copied());
        let positions = runs.into_iter().flat_map(TokenRun::positions);
        for (position, window_token) in positions.zip(window) {
            let Some(token) = timeline.token(position) else { continue };
            let facet = match token.flags {
                flags if flags.contains(TokenFlags::TEMPLATE) => Facet::Template(id),
                flags if flags.contains(TokenFlags::TOOL_RESULT) => Facet::ToolResult(id),
                _ => Facet::Chunk(id),
            };
            segment.push(token.text, facet, window_token);
        }
    }
    RenderedContext { segments }
}

/// A placed memory as a segment.
pub(crate) fn memory_segment(memory: &PlacedMemory) -> Segment {
    let block = ContextBlock::Memory(memory.id);
    let mut segment = Segment::new(block, memory.turns.clone(), Role::System);
    for ((token, facet), window_token) in memory.tokens.iter().zip(memory.window_tokens()) {
        segment.push(&token.text, *facet, window_token);
    }
    segment
}
