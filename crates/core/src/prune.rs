//! Which chunks leave the window, and why.
//!
//! Planned once, at the end of a turn: the lowest chunk goes first, until what is live fits the budget. The
//! openings of a question and of its answer are anchors. An anchor stays while anything else of the pair's
//! turns is live, and then the two leave together: so whatever survives keeps the opening of its turn and the
//! question that it answers. Some chunks never leave: the system prompt, the first tokens of the context, the
//! recent window, the running turn and its question, and what is pinned. If they alone exceed the budget, the
//! plan says so.

use crate::change::{Change, Extent, Leave, Tally, WhyLeft};
use crate::live::LiveView;
use crate::timeline::{ChunkRef, Timeline};
use crate::token::{ChunkId, Role, TurnId};
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// How the chunks that leave are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// By what the model has looked at.
    Brightness {
        /// What makes a chunk bright.
        rank: Rank,
        /// Who goes first among equals.
        ties: Ties,
    },
    /// The oldest first.
    Fifo,
    /// The first tokens and the latest that fit, as StreamingLLM does: the oldest first, anchors or not.
    Window,
    /// By lot, the same for the same seed.
    Random {
        /// The seed.
        seed: u64,
    },
}

/// What makes a chunk bright.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rank {
    /// Its brightest token.
    Peak,
    /// The mean of its tokens.
    Mean,
    /// The mean of its four brightest tokens.
    Top4,
    /// How often its tokens were attended to above the threshold.
    Votes,
    /// The attention that its tokens received, summed.
    Sum,
}

/// Who goes first among chunks that rank alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ties {
    /// The one whose four brightest tokens are dimmer, then whose mean is, then the older.
    Dimmer,
    /// The older.
    Older,
}

/// The rules of one pruning.
#[derive(Clone, Debug, PartialEq)]
pub struct PruneRules {
    /// How chunks are chosen.
    pub policy: Policy,
    /// How many tokens the window may hold, the prefix included.
    pub budget: usize,
    /// How many of the first tokens of the context never leave, the prefix included.
    pub sinks: usize,
    /// How many of the latest tokens never leave.
    pub recent: usize,
    /// The running turn.
    pub current: Option<TurnId>,
}

/// What leaves, and whether that is enough.
#[derive(Clone, Debug, PartialEq)]
pub struct PrunePlan {
    /// The chunks that leave, in the order in which they were chosen.
    pub leaves: Vec<Leave>,
    /// Tokens in the window before.
    pub before: usize,
    /// Tokens in the window after.
    pub after: usize,
    /// The budget cannot be kept: nothing more may leave.
    pub exceeded: Option<Exceeded>,
}

/// The window stays over its budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// By how many tokens.
    pub by: usize,
    /// Tokens of the prefix.
    pub prefix: usize,
    /// Chunks that are left, none of which may leave.
    pub protected: usize,
}

impl PrunePlan {
    /// The plan as a change; none where nothing leaves.
    #[must_use]
    pub fn change(&self) -> Option<Change> {
        (!self.leaves.is_empty()).then(|| Change::Prune(self.leaves.clone()))
    }
}

/// Chooses what leaves the window so that it fits the budget.
#[must_use]
pub fn plan_prune(view: LiveView<'_>, rules: &PruneRules) -> PrunePlan {
    let before = view.len();
    let mut planner = Planner::new(view, rules);
    let mut leaves: Vec<Leave> = Vec::new();
    while planner.live > rules.budget {
        let Some((chunk, value)) = planner.next() else { break };
        let pair = planner.pair_of(chunk);
        for (chunk, with) in [Some((chunk, pair)), pair.map(|p| (p, Some(chunk)))].into_iter().flatten() {
            let why = WhyLeft::Ranked {
                order: leaves.len() as u32,
                value,
                peak: chunk.peak(),
                live: planner.live,
                budget: rules.budget,
                with: with.map(ChunkRef::id),
            };
            leaves.push(Leave { chunk: chunk.id(), extent: Extent::Whole, why });
            planner.remove(chunk);
        }
    }
    let after = planner.live;
    let exceeded = (after > rules.budget).then(|| Exceeded {
        by: after - rules.budget,
        prefix: view.prefix(),
        protected: planner.live_by_turn.iter().map(|&n| n as usize).sum(),
    });
    PrunePlan { leaves, before, after, exceeded }
}

/// A candidate's place in the queue: the smallest leaves first.
///
/// Most candidates are never looked at twice, so what breaks ties is worked out only when a candidate comes
/// to the head of the queue; it then goes back behind all of its value that have not had their turn yet.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    value: f64,
    /// Four brightest, then mean.
    ties: Option<[f64; 2]>,
    index: usize,
}

impl Eq for Key {}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        let ties = match (self.ties, other.ties) {
            (Some(a), Some(b)) => a[0].total_cmp(&b[0]).then_with(|| a[1].total_cmp(&b[1])),
            (a, b) => a.is_some().cmp(&b.is_some()),
        };
        self.value.total_cmp(&other.value).then(ties).then_with(|| self.index.cmp(&other.index))
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The state of one planning: what would be live if all that was chosen so far had left.
struct Planner<'a> {
    timeline: &'a Timeline,
    rules: &'a PruneRules,
    live: usize,
    /// Live chunks by turn, by the turn's place.
    live_by_turn: Vec<u32>,
    /// By the chunk's place: it has been chosen.
    gone: Vec<bool>,
    /// By the chunk's place: it stays whatever happens.
    kept: Vec<bool>,
    queue: BinaryHeap<Reverse<Key>>,
}

impl<'a> Planner<'a> {
    fn new(view: LiveView<'a>, rules: &'a PruneRules) -> Self {
        let timeline = view.timeline();
        let mut planner = Self {
            timeline,
            rules,
            live: view.len(),
            live_by_turn: vec![0; timeline.turns().len()],
            gone: vec![false; timeline.chunks.len()],
            kept: vec![false; timeline.chunks.len()],
            queue: BinaryHeap::new(),
        };
        if planner.live <= rules.budget {
            return planner;
        }
        let question = planner.question();
        let recent_from = view.len().saturating_sub(rules.recent);
        let mut slot = view.prefix();
        let mut turn = 0;
        let chunks: Vec<_> = view.chunks().collect();
        for chunk in &chunks {
            while planner.timeline.turns()[turn].id != chunk.id().turn {
                turn += 1;
            }
            planner.live_by_turn[turn] += 1;
            let end = slot + chunk.live_len();
            planner.kept[chunk.index()] = chunk.is_pinned()
                || slot < rules.sinks
                || end > recent_from
                || Some(chunk.id().turn) == rules.current
                || Some(chunk.id().turn) == question
                || timeline.is_system_prompt(chunk.id());
            slot = end;
        }
        let keys = chunks.iter().filter(|c| planner.may_leave(**c)).map(|&c| Reverse(planner.key(c)));
        planner.queue = keys.collect();
        planner
    }

    /// The user's turn that the running turn answers.
    fn question(&self) -> Option<TurnId> {
        let turn = self.timeline.turn_index(self.rules.current?)?;
        let before = self.timeline.turns()[..turn].last()?;
        (before.role == Role::User && self.timeline.turns()[turn].role == Role::Assistant)
            .then_some(before.id)
    }

    fn key(&self, chunk: ChunkRef<'_>) -> Key {
        let (value, dimmer) = match self.rules.policy {
            Policy::Fifo | Policy::Window => (chunk.index() as f64, false),
            Policy::Random { seed } => (lot(seed, chunk.id()), false),
            Policy::Brightness { rank, ties } => {
                let value = match rank {
                    Rank::Peak => f64::from(chunk.peak().0),
                    Rank::Mean => Shape::of(chunk).mean,
                    Rank::Top4 => Shape::of(chunk).top4,
                    Rank::Votes => chunk.tally().votes as f64,
                    Rank::Sum => chunk.tally().mass as f64 / Tally::UNIT,
                };
                (value, ties == Ties::Dimmer)
            }
        };
        Key { value, ties: (!dimmer).then_some([0.0; 2]), index: chunk.index() }
    }

    /// The next chunk to leave, and what it was ranked by.
    fn next(&mut self) -> Option<(ChunkRef<'a>, f64)> {
        while let Some(Reverse(key)) = self.queue.pop() {
            let chunk = self.timeline.chunk_at(key.index);
            match key.ties {
                _ if !self.may_leave(chunk) => {}
                Some(_) => return Some((chunk, key.value)),
                None => {
                    let shape = Shape::of(chunk);
                    self.queue.push(Reverse(Key { ties: Some([shape.top4, shape.mean]), ..key }));
                }
            }
        }
        None
    }

    fn has_anchors(&self) -> bool {
        self.rules.policy != Policy::Window
    }

    /// Whether the rules let the chunk leave as things stand.
    fn may_leave(&self, chunk: ChunkRef<'_>) -> bool {
        let free = |c: ChunkRef<'_>| !self.gone[c.index()] && !self.kept[c.index()];
        if !free(chunk) || !self.has_anchors() || !chunk.id().is_anchor() || chunk.id().role == Role::System {
            return free(chunk);
        }
        self.is_alone(chunk.id())
            && match self.pair_of(chunk) {
                Some(partner) => free(partner) && self.is_alone(partner.id()),
                // Without a live partner, an answer may still hang on: its opening can be gone, not its rest.
                None => self.partner_turn_is_empty(chunk.id()),
            }
    }

    /// Whether a chunk is all that is live of its turn.
    fn is_alone(&self, chunk: ChunkId) -> bool {
        self.timeline.turn_index(chunk.turn).is_some_and(|t| self.live_by_turn[t] == 1)
    }

    fn partner_turn_is_empty(&self, chunk: ChunkId) -> bool {
        let Some(turn) = self.timeline.turn_index(chunk.turn) else { return true };
        let answer = self.timeline.turns().get(turn + 1).filter(|t| t.role == Role::Assistant);
        chunk.role != Role::User || answer.is_none() || self.live_by_turn[turn + 1] == 0
    }

    /// The live anchor that leaves together with this one.
    fn pair_of(&self, chunk: ChunkRef<'_>) -> Option<ChunkRef<'a>> {
        if !self.has_anchors() || !chunk.id().is_anchor() {
            return None;
        }
        self.timeline.partner(chunk.id()).filter(|p| p.is_live() && !self.gone[p.index()])
    }

    /// The chunk has left; its turn's anchors may have become free.
    fn remove(&mut self, chunk: ChunkRef<'a>) {
        self.gone[chunk.index()] = true;
        self.live -= chunk.live_len();
        let Some(turn) = self.timeline.turn_index(chunk.id().turn) else { return };
        self.live_by_turn[turn] -= 1;
        if !self.has_anchors() {
            return;
        }
        let own = self.timeline.chunk(ChunkId { sentence: 0, ..chunk.id() });
        let other = self.timeline.partner(chunk.id());
        for anchor in [own, other].into_iter().flatten() {
            if anchor.is_live() && self.may_leave(anchor) {
                self.queue.push(Reverse(self.key(anchor)));
            }
        }
    }
}

/// Two of the figures that chunks are ranked by.
struct Shape {
    top4: f64,
    mean: f64,
}

impl Shape {
    fn of(chunk: ChunkRef<'_>) -> Self {
        let mut top = [f32::NEG_INFINITY; 4];
        let mut sums = [0.0f64; 8];
        let mut n = 0;
        for lights in chunk.lights() {
            n += lights.len();
            for block in lights.chunks(8) {
                sums.iter_mut().zip(block).for_each(|(sum, b)| *sum += f64::from(b.0));
            }
            for light in lights.iter().map(|b| b.0) {
                if light > top[3] {
                    let at = top.iter().position(|&t| light > t).unwrap_or(3);
                    top[at..].rotate_right(1);
                    top[at] = light;
                }
            }
        }
        let best = &top[..n.min(4)];
        let top4 = best.iter().map(|&t| f64::from(t)).sum::<f64>() / best.len() as f64;
        Self { top4, mean: sums.iter().sum::<f64>() / n as f64 }
    }
}

/// A lot drawn for a chunk: the same seed and chunk draw the same.
fn lot(seed: u64, chunk: ChunkId) -> f64 {
    let name = (u64::from(chunk.turn.0) << 32) | u64::from(chunk.sentence);
    let hash = xxhash_rust::xxh3::xxh3_64_with_seed(&name.to_le_bytes(), seed);
    (hash >> 11) as f64 / (1u64 << 53) as f64
}
