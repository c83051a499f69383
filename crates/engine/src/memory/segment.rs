//! What the model sees, in parts that know where they come from.
//!
//! A *frame* is a turn. What was said in it are *facets*: paragraphs, results of tools, what the model's template puts
//! around them. What is shown of it is a *block*: a message, the standing instructions, or a memory that stands for messages.
//! Blocks are rendered as *segments*, and segments in a row are the context. Every byte of that can be traced to its
//! segment, block, frame and facet, and each of those to its bytes.

use super::stand::Stand;
use halo_core::change::Run;
use halo_core::seams::{Piece, Seen};
use halo_core::timeline::{ChunkRef, Timeline};
use halo_core::token::{ChunkId, Flags, Position, TurnId};
use std::fmt;
use std::ops::Range;

/// What is shown together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Block {
    /// The standing instructions.
    Instructions,
    /// A message.
    Message(TurnId),
    /// A memory of messages.
    Memory(u64),
}

/// The smallest thing that something shown comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Facet {
    /// The standing instructions.
    Instructions,
    /// What the model's template puts around a message: nobody said it.
    Framing(ChunkId),
    /// A paragraph.
    Said(ChunkId),
    /// What a tool answered in it.
    Result(ChunkId),
    /// What marks the ends of a memory.
    Boundary(u64),
    /// What the model wrote down.
    Memory(u64),
    /// A paragraph of a person's, quoted in a memory.
    Quote(u64, ChunkId),
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Block::Instructions => f.write_str("instructions"),
            Block::Message(turn) => write!(f, "turn-{}", turn.0),
            Block::Memory(id) => write!(f, "memory-{id}"),
        }
    }
}

impl fmt::Display for Facet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Facet::Instructions => f.write_str("instructions"),
            Facet::Framing(chunk) => write!(f, "{chunk}/frame"),
            Facet::Said(chunk) => write!(f, "{chunk}"),
            Facet::Result(chunk) => write!(f, "{chunk}/result"),
            Facet::Boundary(id) => write!(f, "memory-{id}/boundary"),
            Facet::Memory(id) => write!(f, "memory-{id}"),
            Facet::Quote(id, chunk) => write!(f, "memory-{id}/{chunk}"),
        }
    }
}

/// A block as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// What it says.
    pub content: String,
    /// The turns that it shows, or stands for.
    pub source_frames: Vec<TurnId>,
    /// The block.
    pub block_ids: Vec<Block>,
    /// Where each part of its content comes from.
    pub facets: Vec<(Range<usize>, Facet)>,
    /// How long it is.
    pub tokens: usize,
}

impl Segment {
    /// The facets that it shows, each once, in order.
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

    fn new(block: Block, frames: Vec<TurnId>) -> Self {
        Self {
            content: String::new(),
            source_frames: frames,
            block_ids: vec![block],
            facets: Vec::new(),
            tokens: 0,
        }
    }

    fn push(&mut self, text: &str, facet: Facet, tokens: usize) {
        let start = self.content.len();
        self.content.push_str(text);
        self.tokens += tokens;
        match self.facets.last_mut() {
            Some((range, last)) if *last == facet => range.end = self.content.len(),
            _ => self.facets.push((start..self.content.len(), facet)),
        }
    }
}

/// What the model sees, as segments in a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The segments.
    pub segments: Vec<Segment>,
}

/// Where a byte of the context comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The segment, by its place.
    pub segment: usize,
    /// The block.
    pub block: Block,
    /// The turns.
    pub frames: Vec<TurnId>,
    /// The facet.
    pub facet: Facet,
}

impl Rendered {
    /// All of it.
    #[must_use]
    pub fn text(&self) -> String {
        self.segments.iter().map(|segment| segment.content.as_str()).collect()
    }

    /// How long it is.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.segments.iter().map(|segment| segment.tokens).sum()
    }

    /// Where a byte of the text comes from.
    #[must_use]
    pub fn origin(&self, at: usize) -> Option<Origin> {
        let mut start = 0;
        for (n, segment) in self.segments.iter().enumerate() {
            if at < start + segment.content.len() {
                let (_, facet) = segment.facets.iter().find(|(range, _)| range.contains(&(at - start)))?;
                let (block, frames) = (*segment.block_ids.first()?, segment.source_frames.clone());
                return Some(Origin { segment: n, block, frames, facet: *facet });
            }
            start += segment.content.len();
        }
        None
    }

    /// The segments that show a turn, or stand for it.
    #[must_use]
    pub fn of_frame(&self, turn: TurnId) -> Vec<usize> {
        self.which(|segment| segment.source_frames.contains(&turn))
    }

    /// The segments of a block.
    #[must_use]
    pub fn of_block(&self, block: Block) -> Vec<usize> {
        self.which(|segment| segment.block_ids.contains(&block))
    }

    /// The bytes of the text that come from a facet.
    #[must_use]
    pub fn of_facet(&self, facet: Facet) -> Vec<Range<usize>> {
        let mut start = 0;
        let mut found = Vec::new();
        for segment in &self.segments {
            let here = segment.facets.iter().filter(|(_, of)| *of == facet);
            found.extend(here.map(|(range, _)| start + range.start..start + range.end));
            start += segment.content.len();
        }
        found
    }

    fn which(&self, wanted: impl Fn(&Segment) -> bool) -> Vec<usize> {
        self.segments.iter().enumerate().filter(|(_, s)| wanted(s)).map(|(n, _)| n).collect()
    }
}

/// One thing that is shown, in its place.
pub(crate) enum Shown<'a> {
    /// A chunk that is live.
    Chunk(ChunkRef<'a>),
    /// A memory.
    Memory(&'a Stand),
}

/// What is shown, in order: all that the model sees is made from this.
pub(crate) fn shown<'a>(timeline: &'a Timeline, stands: &'a [Stand]) -> impl Iterator<Item = Shown<'a>> {
    let mut stands = stands.iter().peekable();
    let mut chunks = timeline.live_chunks().peekable();
    std::iter::from_fn(move || {
        let before = |stand: &&Stand| chunks.peek().is_none_or(|chunk| stand.at < chunk.start());
        match stands.next_if(before) {
            Some(stand) => Some(Shown::Memory(stand)),
            None => chunks.next().map(Shown::Chunk),
        }
    })
}

/// What the model sees, as tokens.
pub(crate) fn window(prefix: &[Piece], timeline: &Timeline, stands: &[Stand]) -> Vec<Seen> {
    let view = timeline.view(prefix.len());
    let mut window = Vec::with_capacity(view.len() + stands.iter().map(Stand::len).sum::<usize>());
    let before = |piece: &Piece| Seen { position: None, behind: 0, id: piece.id, begins: false };
    window.extend(prefix.iter().map(before));
    for shown in shown(timeline, stands) {
        match shown {
            Shown::Chunk(chunk) => push_chunk(&mut window, chunk, chunk.live_runs()),
            Shown::Memory(stand) => window.extend(stand.seen()),
        }
    }
    window
}

/// Some tokens of a chunk.
pub(crate) fn push_chunk(window: &mut Vec<Seen>, chunk: ChunkRef<'_>, runs: impl Iterator<Item = Run>) {
    let mut begins = true;
    for run in runs {
        for (n, &id) in chunk.ids(run).iter().enumerate() {
            let position = Position(run.start.0 + n as u64);
            window.push(Seen {
                position: Some(position),
                behind: 0,
                id,
                begins: std::mem::take(&mut begins),
            });
        }
    }
}

/// What the model sees, as segments.
pub(crate) fn render(prefix: &[Piece], timeline: &Timeline, stands: &[Stand]) -> Rendered {
    let mut segments: Vec<Segment> = Vec::new();
    if !prefix.is_empty() {
        let mut segment = Segment::new(Block::Instructions, Vec::new());
        prefix.iter().for_each(|piece| segment.push(&piece.text, Facet::Instructions, 1));
        segments.push(segment);
    }
    for shown in shown(timeline, stands) {
        match shown {
            Shown::Memory(stand) => {
                let mut segment = Segment::new(Block::Memory(stand.id), stand.frames.clone());
                stand.pieces.iter().for_each(|(piece, facet)| segment.push(&piece.text, *facet, 1));
                segments.push(segment);
            }
            Shown::Chunk(chunk) => {
                let (id, block) = (chunk.id(), Block::Message(chunk.id().turn));
                if segments.last().is_none_or(|last| last.block_ids != [block]) {
                    segments.push(Segment::new(block, vec![id.turn]));
                }
                let Some(segment) = segments.last_mut() else { continue };
                for position in chunk.live_runs().flat_map(Run::positions) {
                    let Some(token) = timeline.token(position) else { continue };
                    let facet = match token.flags {
                        flags if flags.has(Flags::FRAME) => Facet::Framing(id),
                        flags if flags.has(Flags::TOOL) => Facet::Result(id),
                        _ => Facet::Said(id),
                    };
                    segment.push(token.text, facet, 1);
                }
            }
        }
    }
    Rendered { segments }
}

/// Rows of attention over a window in which memories stand, as rows over what was said: a memory is looked at, and has no
/// brightness of its own.
pub(crate) struct Holes(Vec<Range<usize>>);

impl Holes {
    /// Where memories stand in a window.
    pub(crate) fn of(window: &[Seen]) -> Self {
        let mut holes: Vec<Range<usize>> = Vec::new();
        for (n, _) in window.iter().enumerate().filter(|(_, seen)| seen.behind > 0) {
            match holes.last_mut() {
                Some(last) if last.end == n => last.end += 1,
                _ => holes.push(n..n + 1),
            }
        }
        Self(holes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A row without them.
    pub(crate) fn close(&self, row: &[f32]) -> Vec<f32> {
        let mut out = Vec::with_capacity(row.len());
        let mut at = 0;
        for hole in &self.0 {
            out.extend_from_slice(&row[at.min(row.len())..hole.start.min(row.len())]);
            at = hole.end;
        }
        out.extend_from_slice(&row[at.min(row.len())..]);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::token::TokenId;

    /// What looks at memories is left out of every row, also of one that ends before or within them.
    #[test]
    fn rows_pass_memories_by() {
        let seen = |behind| Seen { position: Some(Position(3)), behind, id: TokenId(1), begins: false };
        let window = [0, 1, 2, 0, 0, 1, 0].map(seen);
        let holes = Holes::of(&window);
        assert!(!holes.is_empty() && Holes::of(&window[..1]).is_empty());
        let row = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7];
        assert_eq!(holes.close(&row), [0.1, 0.4, 0.5, 0.7]);
        assert_eq!(holes.close(&row[..5]), [0.1, 0.4, 0.5]);
        assert_eq!(holes.close(&row[..2]), [0.1]);
        assert_eq!(holes.close(&[]), [0.0; 0]);
    }
}
