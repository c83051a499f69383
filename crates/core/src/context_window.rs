//! What the model sees now: the live tokens in order. The only place that converts between slots and positions.

use crate::change::TokenRun;
use crate::timeline::{ChunkRef, Timeline};
use crate::token::{Brightness, Position, Slot, TokenId, TurnId};

/// Neighbouring live tokens and their slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveSpan {
    /// The tokens.
    pub run: TokenRun,
    /// The slot of the first token.
    pub slot: Slot,
}

/// What the model sees: a system prompt of `prefix` tokens that are not on the timeline, then the live tokens
/// in order of position.
#[derive(Clone, Copy, Debug)]
pub struct ContextWindow<'a> {
    timeline: &'a Timeline,
    prefix: usize,
}

impl Timeline {
    /// The context window behind a system prompt of `prefix` tokens.
    #[must_use]
    pub fn context_window(&self, prefix: usize) -> ContextWindow<'_> {
        ContextWindow { timeline: self, prefix }
    }
}

impl<'a> ContextWindow<'a> {
    /// The timeline that the live tokens are of.
    #[must_use]
    pub fn timeline(&self) -> &'a Timeline {
        self.timeline
    }

    /// How many tokens precede the live tokens.
    #[must_use]
    pub fn prefix(&self) -> usize {
        self.prefix
    }

    /// How many tokens the model sees, including the prefix.
    #[must_use]
    pub fn len(&self) -> usize {
        self.prefix + self.timeline.live_len()
    }

    /// Whether the model sees no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The position of the token at `slot`; none in the prefix and behind the end.
    #[must_use]
    pub fn position(&self, slot: Slot) -> Option<Position> {
        let n = slot.index().checked_sub(self.prefix)?;
        let (row, before) = self.timeline.live_index().find_nth(n)?;
        self.timeline.chunk_ref(row).live_position(n - before)
    }

    /// The slot of the token at `position`; none where it is not live.
    #[must_use]
    pub fn slot(&self, position: Position) -> Option<Slot> {
        let chunk = self.timeline.chunk_of(position)?;
        let inside = chunk.live_rank(position)?;
        Some(self.chunk_slot(chunk).plus(inside))
    }

    /// The slot of a chunk's first live token; of a chunk without live tokens, where the first would be.
    #[must_use]
    pub fn chunk_slot(&self, chunk: ChunkRef<'_>) -> Slot {
        Slot::from_index(self.prefix + self.timeline.live_index().live_before(chunk.row_index()))
    }

    /// The chunks with live tokens, in order.
    pub fn chunks(&self) -> impl Iterator<Item = ChunkRef<'a>> + use<'a> {
        self.timeline.live_chunks()
    }

    /// The live tokens as runs of neighbours, each within one chunk, in order.
    pub fn spans(&self) -> impl Iterator<Item = LiveSpan> + use<'a> {
        let mut slot = self.prefix;
        self.chunks().flat_map(ChunkRef::live_runs).map(move |run| {
            let span = LiveSpan { run, slot: Slot::from_index(slot) };
            slot += run.len as usize;
            span
        })
    }

    /// The vocabulary ids of the live tokens, in order, without the prefix.
    #[must_use]
    pub fn ids(&self) -> Vec<TokenId> {
        let mut ids = Vec::with_capacity(self.timeline.live_len());
        for chunk in self.chunks() {
            chunk.live_runs().for_each(|run| ids.extend_from_slice(chunk.ids(run)));
        }
        ids
    }

    /// The positions of the live tokens, in order, without the prefix.
    #[must_use]
    pub fn positions(&self) -> Vec<Position> {
        let mut positions = Vec::with_capacity(self.timeline.live_len());
        for LiveSpan { run, .. } in self.spans() {
            positions.extend((run.start.0..run.start.0 + u64::from(run.len)).map(Position));
        }
        positions
    }

    /// The mean brightness of the live tokens of all turns but `except`, rounded down; none without any. Chunks
    /// that search finds may be resurrected with this brightness.
    #[must_use]
    pub fn mean_brightness(&self, except: Option<TurnId>) -> Option<Brightness> {
        let chunks = self.chunks().filter(|c| Some(c.id().turn) != except);
        let brightness = chunks.flat_map(ChunkRef::brightness_runs).flatten();
        let (sum, count) = brightness.fold((0.0, 0u32), |(sum, n), b| (sum + f64::from(b.0), n + 1));
        (count > 0).then(|| Brightness((sum / f64::from(count)).floor() as f32))
    }

    /// The text of the live tokens, in order, without the prefix.
    #[must_use]
    pub fn text(&self) -> String {
        self.chunks().flat_map(|c| c.live_runs().map(move |run| c.text_of(run))).collect()
    }
}

impl Slot {
    /// The slot with this index. A window of 2³² tokens or more is refused when tokens are appended.
    pub(crate) fn from_index(index: usize) -> Self {
        Slot(u32::try_from(index).expect("a window holds fewer than 2³² tokens"))
    }

    fn plus(self, n: usize) -> Self {
        Slot::from_index(self.index() + n)
    }
}
