//! How a timeline is put together from what a store kept of it, checked as it comes.

use crate::body::Body;
use crate::timeline::{Chunk, Head, Held, Timeline, Turn};
use crate::token::{ChunkId, Position};

/// A timeline in the making, from what a store kept of it: turns and heads in order, then bodies.
#[derive(Debug, Default)]
pub struct Parts {
    timeline: Timeline,
    /// The turn that the next chunk belongs to.
    turn: usize,
}

impl Parts {
    /// Room for so many turns and chunks.
    #[must_use]
    pub fn with_capacity(turns: usize, chunks: usize) -> Self {
        let (turns, chunks) = (Vec::with_capacity(turns), Vec::with_capacity(chunks));
        Self { timeline: Timeline { turns, chunks, ..Timeline::default() }, turn: 0 }
    }

    /// How many chunks there are so far, names without tokens included.
    #[must_use]
    pub fn places(&self) -> usize {
        self.timeline.chunks.len()
    }

    /// The next turn, before any chunk of it.
    ///
    /// # Errors
    /// When it does not come after the others.
    pub fn turn(&mut self, turn: Turn) -> Result<(), String> {
        let last = self.timeline.turns.last();
        let after = last.is_none_or(|l| l.id < turn.id && l.first <= turn.first);
        // The first turn begins where everything does.
        if !after || (turn.first as usize) < self.places() || (last.is_none() && turn.first > 0) {
            return Err(format!("turn {} does not come after the one before it", turn.id.0));
        }
        self.timeline.turns.push(turn);
        Ok(())
    }

    /// The next chunk; whose turn it is follows from its place.
    ///
    /// # Errors
    /// When it contradicts itself or what came before.
    pub fn chunk(&mut self, head: &BareHead) -> Result<(), String> {
        let timeline = &mut self.timeline;
        let place = timeline.chunks.len();
        while timeline.turns.get(self.turn + 1).is_some_and(|t| t.first as usize <= place) {
            self.turn += 1;
        }
        let turn = timeline.turns.get(self.turn).ok_or("a chunk stands before the first turn")?;
        let id = ChunkId::new(turn.role, turn.id, head.sentence);
        let counted = u64::from(head.live) + u64::from(head.withdrawn);
        let before = timeline.chunks.last().filter(|c| c.id.turn == id.turn);
        if counted > u64::from(head.len)
            || (head.len == 0 && head.pinned)
            || head.sentence == u32::MAX
            || before.is_some_and(|c| c.id.sentence >= head.sentence)
        {
            return Err(format!("what is known of {id} contradicts itself"));
        }
        timeline.chunks.push(Chunk {
            id,
            pinned: head.pinned,
            start: Position(timeline.len),
            len: head.len,
            live: head.live,
            withdrawn: head.withdrawn,
            body: Held::Away(head.sum),
        });
        timeline.len += u64::from(head.len);
        timeline.live.grow(head.live).ok_or_else(|| "more is live than fits a window".to_owned())
    }

    /// The name of a chunk.
    #[must_use]
    pub fn name(&self, place: usize) -> Option<ChunkId> {
        self.timeline.chunks.get(place).map(|c| c.id)
    }

    /// What is known of a chunk.
    #[must_use]
    pub fn head(&self, place: usize) -> Option<Head> {
        (place < self.places()).then(|| self.timeline.heads(place..place + 1).next()).flatten()
    }

    /// Whether the last chunk has tokens and none of them is live: it may go on, so its body is wanted too.
    #[must_use]
    pub fn last_is_dead(&self) -> bool {
        self.timeline.chunks.last().is_some_and(|c| c.live == 0 && c.len > 0)
    }

    /// The body of a chunk. Where something of it is live, nothing was known of it but its counts.
    ///
    /// # Errors
    /// When it is not that chunk's.
    pub fn body(&mut self, place: usize, body: Body) -> Result<(), String> {
        let chunk = self.timeline.chunks.get_mut(place).ok_or("a body without a chunk")?;
        let known = match chunk.body {
            Held::Away(sum) => (chunk.live == 0).then_some(sum),
            Held::Here(_) => None,
        };
        chunk.fits(&body, known)?;
        chunk.body = Held::Here(Box::new(body));
        Ok(())
    }

    /// The timeline.
    ///
    /// # Errors
    /// When the tokens of a chunk that is live are missing.
    pub fn finish(self) -> Result<Timeline, String> {
        if self.timeline.turns.last().is_some_and(|t| t.first as usize > self.places()) {
            return Err("a turn begins behind the last chunk".into());
        }
        let missing = self.timeline.live_chunks().find(|c| !c.is_here()).map(|c| c.id());
        match missing {
            Some(chunk) => Err(format!("the tokens of {chunk} are missing")),
            None => Ok(self.timeline),
        }
    }
}

/// What a store keeps of a chunk beside its body, where its place tells its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BareHead {
    /// Its number in the turn.
    pub sentence: u32,
    /// Whether it is immune to pruning.
    pub pinned: bool,
    /// Its tokens.
    pub len: u32,
    /// How many of them are live.
    pub live: u32,
    /// How many of them the user took back.
    pub withdrawn: u32,
    /// The sum of its body; of no account where something of it is live.
    pub sum: u64,
}
