//! Which memories stand in the window, where, and what they say there.
//!
//! A memory stands where its range was, once the range has begun to leave: at first beside what is left of it, then alone.
//! If anything of the range comes back, the memory steps aside at once. That it takes its place waits for a quiet moment:
//! what it says is read then, so that nobody waits for it.

use super::segment::{Facet, window};
use super::{Memory, MemoryRules};
use crate::event::Event;
use crate::session::{Session, messages};
use halo_core::seams::{Finish, Flow, Piece, Prompt, SeamError, Seen};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Position, Role, TurnId};
use std::collections::BTreeSet;

/// A memory in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stand {
    /// Which.
    pub id: u64,
    /// Behind which position.
    pub at: Position,
    /// The turn in whose place it stands.
    pub turn: TurnId,
    /// The turns that it stands for.
    pub frames: Vec<TurnId>,
    /// What has left of its range: what it says is made of that.
    pub of: BTreeSet<ChunkId>,
    /// What it says, token by token, and where that comes from.
    pub pieces: Vec<(Piece, Facet)>,
}

impl Stand {
    /// How many tokens it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether it says nothing; never so for one that stands.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Its tokens, as a model is shown them.
    pub(crate) fn seen(&self) -> impl Iterator<Item = Seen> + '_ {
        let seen = |(n, (piece, _)): (usize, &(Piece, Facet))| Seen {
            position: Some(self.at),
            behind: n as u16 + 1,
            id: piece.id,
            begins: n == 0,
        };
        self.pieces.iter().enumerate().map(seen)
    }

    /// What it says, without what the model's template puts before it.
    #[must_use]
    pub fn text(&self) -> String {
        let said = self.pieces.iter().filter(|(_, facet)| !matches!(facet, Facet::Framing(_)));
        said.map(|(piece, _)| piece.text.as_str()).collect()
    }
}

/// The longest message of a person's that is quoted in a memory, in tokens: what is longer is in the graveyard, whole, and
/// search finds it.
const QUOTED: usize = 200;

/// Memories may be of no more tokens in their place than there are names behind a position.
const MOST: usize = 4000;

/// Which memories may stand now, by their own condition: what may stand for what has left, and since when.
fn may_stand(memory: &Memory, timeline: &Timeline, rules: &MemoryRules) -> bool {
    if memory.resting || memory.reflection {
        return false;
    }
    let since = timeline.turns().iter().rev().take_while(|turn| turn.id > memory.formed);
    let answers = since.filter(|turn| turn.role == Role::Assistant).count();
    let back = memory.left.iter().any(|&id| timeline.chunk(id).is_some_and(|chunk| chunk.is_live()));
    answers >= rules.delay && !back && place_of(memory, timeline).is_some()
}

/// Where a memory would stand: at the first turn of its range that has left whole. (A turn that is cut in two has an end in
/// one memory and a beginning in the next; then its first chunk decides.)
fn place_of(memory: &Memory, timeline: &Timeline) -> Option<(ChunkId, Position)> {
    let mut turns: Vec<(ChunkId, Position, bool)> = Vec::new();
    for chunk in memory.span.chunks(timeline) {
        match turns.last_mut() {
            Some((id, _, gone)) if id.turn == chunk.id().turn => *gone &= !chunk.is_live(),
            _ => turns.push((chunk.id(), chunk.start(), !chunk.is_live())),
        }
    }
    turns.into_iter().find(|(_, _, gone)| *gone).map(|(id, at, _)| (id, at))
}

impl Session {
    /// Notes what has left since memories were formed, and lets those step aside that may not stand any more.
    pub(crate) fn follow_memories(&mut self) {
        let Some(rules) = self.memory_rules() else {
            self.stands.clear();
            return;
        };
        for at in 0..self.memories.len() {
            let memory = &self.memories[at];
            let chunks = memory.span.chunks(&self.timeline);
            let gone: Vec<ChunkId> =
                chunks.filter(|c| !c.is_live() && !memory.left.contains(&c.id())).map(|c| c.id()).collect();
            if !gone.is_empty() {
                self.memories[at].left.extend(gone);
                // Known again as soon as anything else leaves: worth no failure.
                if let Err(why) = self.keep_memory(at) {
                    self.notices.push(format!("what a memory stands for was not noted: {why}"));
                }
            }
        }
        let Self { stands, memories, timeline, .. } = self;
        stands.retain(|stand| {
            let memory = memories.iter().find(|memory| memory.id == stand.id);
            // Nothing that was taken back is quoted.
            let whole = |id: &ChunkId| timeline.chunk(*id).is_some_and(|chunk| !chunk.is_withdrawn());
            stand.of.iter().all(whole) && memory.is_some_and(|memory| may_stand(memory, timeline, &rules))
        });
    }

    /// The memories that are to stand, in order of place: as many as their share of the window holds, those that are pinned
    /// first, then the latest.
    pub(crate) fn wanted_stands(&mut self) -> Result<Vec<Stand>, SeamError> {
        let Some(rules) = self.memory_rules() else { return Ok(Vec::new()) };
        let mut order: Vec<Memory> =
            self.memories.iter().filter(|m| may_stand(m, &self.timeline, &rules)).cloned().collect();
        order.sort_by_key(|memory| (!memory.pinned, std::cmp::Reverse(memory.id)));
        let mut room = (self.limit() as f64 * rules.share) as usize;
        let mut stands: Vec<Stand> = Vec::new();
        for memory in order {
            // It is made anew where more of its range has left.
            let known = self.stands.iter().find(|stand| stand.id == memory.id);
            let known = known.filter(|stand| stand.of == gone(&memory, &self.timeline)).cloned();
            let stand = match known {
                Some(stand) => stand,
                None => match self.stand(&memory)? {
                    Some(stand) => stand,
                    None => continue,
                },
            };
            if stand.len() <= room.min(MOST) {
                room -= stand.len();
                stands.push(stand);
            }
        }
        stands.sort_by_key(|stand| stand.at);
        Ok(stands)
    }

    /// A memory in its place; none where it would take more room than what it stands for.
    fn stand(&mut self, memory: &Memory) -> Result<Option<Stand>, SeamError> {
        let Some((first, at)) = place_of(memory, &self.timeline) else { return Ok(None) };
        let of = gone(memory, &self.timeline);
        let dead: Vec<ChunkId> = of.iter().copied().collect();
        self.store.bring(&self.name, &mut self.timeline, &dead)?;
        let tokens: usize = dead.iter().filter_map(|&id| self.timeline.chunk(id)).map(|c| c.len()).sum();
        let length = |turn: TurnId| self.timeline.turn_chunks(turn).map(|chunk| chunk.len()).sum::<usize>();
        let quoted = |id: &&ChunkId| id.role == Role::User && length(id.turn) <= QUOTED;
        let quotes: Vec<(ChunkId, String)> = (dead.iter().filter(quoted))
            .filter_map(|&id| self.timeline.chunk(id))
            .map(|chunk| (chunk.id(), chunk.text().into_owned()))
            .collect();
        self.timeline.release_dead();
        let before =
            self.timeline.turns().iter().rev().find(|turn| turn.id < first.turn).map(|turn| turn.role);
        let opening = self.frame.opening(Role::System, before, None);
        let (id, span) = (memory.id, memory.span);
        let mut pieces: Vec<(Piece, Facet)> =
            self.model.tokenize(&opening, true)?.into_iter().map(|p| (p, Facet::Framing(first))).collect();
        let mut push = |text: &str, facet: Facet| -> Result<(), SeamError> {
            pieces.extend(self.model.tokenize(text, false)?.into_iter().map(|piece| (piece, facet)));
            Ok(())
        };
        push(&format!("<memory from=\"{}\" to=\"{}\">\n", span.from.0, span.to.0), Facet::Boundary(id))?;
        for (chunk, text) in &quotes {
            push("The user said: ", Facet::Boundary(id))?;
            push(text, Facet::Quote(id, *chunk))?;
            push("\n", Facet::Boundary(id))?;
        }
        push(&memory.text, Facet::Memory(id))?;
        for done in &memory.operations {
            push(&format!("\nStill so: {done}"), Facet::Memory(id))?;
        }
        push("\n</memory>", Facet::Boundary(id))?;
        let frames = frames(memory, &self.timeline);
        let stand = Stand { id, at, turn: first.turn, frames, of, pieces };
        Ok((stand.len() < tokens).then_some(stand))
    }

    /// What is due takes its place: it is read first, and when it has been, it stands. Returns whether anything changed.
    pub(crate) fn hand_over(
        &mut self,
        wanted: &dyn Fn() -> bool,
        listen: &mut dyn FnMut(Event),
    ) -> Result<bool, SeamError> {
        let stands = self.wanted_stands()?;
        if stands == self.stands || self.key.is_empty() {
            return Ok(false);
        }
        let total: usize = stands.iter().map(Stand::len).sum();
        let context = self.model.info().context;
        if self.prefix.len() + self.timeline.live_len() + total + self.rules.sampling.max_tokens > context {
            return Ok(false);
        }
        let Self { model, timeline, frame, key, prefix, .. } = self;
        let shown = window(prefix, timeline, &stands);
        let told = || messages(&frame.system, timeline, &stands);
        let next = timeline.next_position();
        let prompt = Prompt { conversation: key, window: &shown, messages: &told, next, aside: false };
        let read = model.read_in(&prompt, &mut |_| if wanted() { Flow::Stop } else { Flow::Continue })?;
        if read == Finish::Aborted {
            return Ok(true);
        }
        let was: Vec<u64> = self.stands.iter().map(|stand| stand.id).collect();
        self.stands = stands;
        self.warm()?;
        self.show();
        for id in self.stands.iter().map(|stand| stand.id).filter(|id| !was.contains(id)) {
            listen(Event::Memory { id, what: "stands" });
        }
        Ok(true)
    }

    /// How many tokens of memories are in the window.
    pub(crate) fn standing(&self) -> usize {
        self.stands.iter().map(Stand::len).sum()
    }

    /// Those that stand.
    #[must_use]
    pub fn stands(&self) -> &[Stand] {
        &self.stands
    }
}

/// What has left of a memory's range, and was not taken back.
fn gone(memory: &Memory, timeline: &Timeline) -> BTreeSet<ChunkId> {
    memory.span.chunks(timeline).filter(|chunk| !chunk.is_live()).map(|chunk| chunk.id()).collect()
}

fn frames(memory: &Memory, timeline: &Timeline) -> Vec<TurnId> {
    let mut frames: Vec<TurnId> = memory.span.chunks(timeline).map(|chunk| chunk.id().turn).collect();
    frames.dedup();
    frames
}
