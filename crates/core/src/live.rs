//! What the model sees now: the live tokens in order, and the only place where a slot becomes a position.

use crate::change::Run;
use crate::timeline::{ChunkRef, Timeline};
use crate::token::{Brightness, Position, Slot, TokenId, TurnId};

/// Neighbouring live tokens, and the slot of the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The tokens.
    pub run: Run,
    /// Where the first of them stands in the window.
    pub slot: Slot,
}

/// The window: a prefix of `prefix` tokens that are not on the timeline (the system prompt), then the
/// live tokens in order of birth.
#[derive(Clone, Copy, Debug)]
pub struct LiveView<'a> {
    timeline: &'a Timeline,
    prefix: usize,
}

impl Timeline {
    /// What the model sees behind `prefix` tokens of system prompt.
    #[must_use]
    pub fn view(&self, prefix: usize) -> LiveView<'_> {
        LiveView { timeline: self, prefix }
    }
}

impl<'a> LiveView<'a> {
    /// The timeline that this is a view of.
    #[must_use]
    pub fn timeline(&self) -> &'a Timeline {
        self.timeline
    }

    /// How many tokens stand before the timeline's own.
    #[must_use]
    pub fn prefix(&self) -> usize {
        self.prefix
    }

    /// How many tokens the model sees, the prefix included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.prefix + self.timeline.live_len()
    }

    /// Whether the model sees nothing at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The position that stands at `slot`; none for the prefix and beyond the end.
    #[must_use]
    pub fn position(&self, slot: Slot) -> Option<Position> {
        let n = slot.index().checked_sub(self.prefix)?;
        let (leaf, before) = self.timeline.live_index().find(n)?;
        self.timeline.chunk_at(leaf).live_position(n - before)
    }

    /// Where a live token stands; none for a dead or unborn one.
    #[must_use]
    pub fn slot(&self, position: Position) -> Option<Slot> {
        let chunk = self.timeline.chunk_of(position)?;
        let inside = chunk.live_rank(position)?;
        Some(self.slot_of(chunk).plus(inside))
    }

    /// The slot of a chunk's first live token, or where it would stand.
    #[must_use]
    pub fn slot_of(&self, chunk: ChunkRef<'_>) -> Slot {
        Slot::at(self.prefix + self.timeline.live_index().before(chunk.index()))
    }

    /// The chunks of which something is live, in order.
    pub fn chunks(&self) -> impl Iterator<Item = ChunkRef<'a>> + use<'a> {
        self.timeline.live_chunks()
    }

    /// The live tokens as runs of neighbours, each within one chunk, in order.
    pub fn spans(&self) -> impl Iterator<Item = Span> + use<'a> {
        let mut slot = self.prefix;
        self.chunks().flat_map(ChunkRef::live_runs).map(move |run| {
            let span = Span { run, slot: Slot::at(slot) };
            slot += run.len as usize;
            span
        })
    }

    /// The live tokens' ids, in order, without the prefix: what the model is given.
    #[must_use]
    pub fn ids(&self) -> Vec<TokenId> {
        let mut ids = Vec::with_capacity(self.timeline.live_len());
        for chunk in self.chunks() {
            chunk.live_runs().for_each(|run| ids.extend_from_slice(chunk.ids(run)));
        }
        ids
    }

    /// The live tokens' positions, in order, without the prefix: the slot map written out.
    #[must_use]
    pub fn positions(&self) -> Vec<Position> {
        let mut positions = Vec::with_capacity(self.timeline.live_len());
        for Span { run, .. } in self.spans() {
            positions.extend((run.start.0..run.start.0 + u64::from(run.len)).map(Position));
        }
        positions
    }

    /// Mean brightness of the live tokens that are not of the turn `except`; none where there are none. What
    /// search brings back may come back with this.
    #[must_use]
    pub fn mean_brightness(&self, except: Option<TurnId>) -> Option<Brightness> {
        let chunks = self.chunks().filter(|c| Some(c.id().turn) != except);
        let lights = chunks.flat_map(ChunkRef::lights).flatten();
        let (sum, count) = lights.fold((0.0, 0u32), |(sum, n), b| (sum + f64::from(b.0), n + 1));
        (count > 0).then(|| Brightness((sum / f64::from(count)).floor() as f32))
    }

    /// The live text, in order.
    #[must_use]
    pub fn text(&self) -> String {
        self.chunks().flat_map(|c| c.live_runs().map(move |run| c.text_of(run))).collect()
    }
}

impl Slot {
    /// The slot with that index.
    pub(crate) fn at(index: usize) -> Self {
        Slot(u32::try_from(index).expect("a window holds fewer than 2³² tokens"))
    }

    fn plus(self, n: usize) -> Self {
        Slot::at(self.index() + n)
    }
}
