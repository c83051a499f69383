//! Which chunks leave the window, and why.
//!
//! Planned once, at the end of a turn: the lowest chunk goes first, until what is live fits the budget. The
//! openings of a question and of its answer are anchors. An anchor stays while anything else of the pair's
//! turns is live, and then the two leave together: so whatever survives keeps the opening of its turn and the
//! question that it answers. Some chunks never leave: the system prompt, the first tokens of the context, the
//! recent window, the running turn and its question, and what is pinned. If they alone exceed the budget, the
//! plan says so.

use crate::change::{Change, Extent, Leave, Measure, Pair, Tally, WhyLeft};
use crate::live::LiveView;
use crate::timeline::{ChunkRef, Timeline};
use crate::token::{ChunkId, Role, TurnId};
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;

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
    /// The attention that a token of it received at a step, on average. What nothing has looked at yet is brightest.
    Share,
}

impl Policy {
    /// How bright chunks are, as this policy sees it; where it does not look at that, by their brightest token.
    #[must_use]
    pub fn rank(self) -> Rank {
        match self {
            Policy::Brightness { rank, .. } => rank,
            Policy::Fifo | Policy::Window | Policy::Random { .. } => Rank::Peak,
        }
    }

    /// What chunks are ranked by.
    #[must_use]
    pub fn measure(self) -> Measure {
        match self {
            Policy::Fifo | Policy::Window => Measure::Age,
            Policy::Random { .. } => Measure::Lot,
            Policy::Brightness { rank: Rank::Peak, .. } => Measure::Peak,
            Policy::Brightness { rank: Rank::Mean, .. } => Measure::Mean,
            Policy::Brightness { rank: Rank::Top4, .. } => Measure::Top4,
            Policy::Brightness { rank: Rank::Votes, .. } => Measure::Votes,
            Policy::Brightness { rank: Rank::Sum, .. } => Measure::Attention,
            Policy::Brightness { rank: Rank::Share, .. } => Measure::Share,
        }
    }
}

/// Who goes first among chunks that rank alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ties {
    /// The one whose four brightest tokens are dimmer, then whose mean is, then the older.
    Dimmer,
    /// The older.
    Older,
}

impl Rank {
    /// How bright a chunk is.
    #[must_use]
    pub fn of(self, chunk: ChunkRef<'_>) -> f64 {
        match self {
            Rank::Peak => f64::from(chunk.peak().0),
            Rank::Mean => Shape::of(chunk).mean,
            Rank::Top4 => Shape::of(chunk).top4,
            Rank::Votes => chunk.tally().votes as f64,
            Rank::Sum => chunk.tally().mass as f64 / Tally::UNIT,
            Rank::Share => chunk.tally().share().unwrap_or(f64::INFINITY),
        }
    }
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
    /// Whether the brightest of what was to leave stays where there is room for it after all: the last to leave may have
    /// been long. What goes by age leaves no holes.
    pub fill: bool,
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

/// The window stays over its budget: nothing that is left may leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// By how many tokens.
    pub by: usize,
    /// What holds the window's tokens there, and how many each holds. The first reason counts.
    pub held: Vec<(Held, usize)>,
}

/// What keeps a chunk in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Held {
    /// It stands before the timeline, or is the system's first words.
    SystemPrompt,
    /// The first tokens of the context.
    Sink,
    /// The user pinned it.
    Pinned,
    /// The running turn, or its question.
    Running,
    /// The latest tokens.
    Recent,
    /// It opens a turn, or asks the question, of something that is held.
    Anchor,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Held::SystemPrompt => "system prompt",
            Held::Sink => "first tokens",
            Held::Pinned => "pinned",
            Held::Running => "running turn and its question",
            Held::Recent => "recent window",
            Held::Anchor => "anchors of these",
        })
    }
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held: Vec<_> = self.held.iter().map(|(held, tokens)| format!("{held} {tokens}")).collect();
        write!(f, "over budget by {}, and nothing that is left may leave: {}", self.by, held.join(", "))
    }
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
        let Some(chunk) = planner.next() else { break };
        let partner = planner.pair_of(chunk);
        let live = planner.live;
        let taken = partner.map(|p| (p, Pair::With(chunk.id())));
        let pair = partner.map_or(Pair::Alone, |p| Pair::Takes(p.id()));
        for (chunk, pair) in [Some((chunk, pair)), taken].into_iter().flatten() {
            let why = WhyLeft::Ranked {
                order: leaves.len() as u32,
                by: rules.policy.measure(),
                value: planner.key(chunk).value,
                peak: chunk.peak(),
                live,
                budget: rules.budget,
                pair,
            };
            leaves.push(Leave { chunk: chunk.id(), extent: Extent::Whole, why });
            planner.remove(chunk);
        }
    }
    if rules.fill && matches!(rules.policy, Policy::Brightness { .. } | Policy::Random { .. }) {
        planner.fill(&mut leaves);
    }
    let after = planner.live;
    let exceeded =
        (after > rules.budget).then(|| Exceeded { by: after - rules.budget, held: planner.held(view) });
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
    /// By the chunk's place: what holds it, whatever happens.
    kept: Vec<Option<Held>>,
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
            kept: vec![None; timeline.chunks.len()],
            queue: BinaryHeap::new(),
        };
        if planner.live <= rules.budget {
            return planner;
        }
        let question = rules.current.and_then(|turn| timeline.question_of(turn));
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
            let id = chunk.id();
            planner.kept[chunk.index()] = match () {
                () if timeline.is_system_prompt(id) => Some(Held::SystemPrompt),
                () if slot < rules.sinks => Some(Held::Sink),
                () if chunk.is_pinned() => Some(Held::Pinned),
                () if Some(id.turn) == rules.current || Some(id.turn) == question => Some(Held::Running),
                () if end > recent_from => Some(Held::Recent),
                () => None,
            };
            slot = end;
        }
        let keys = chunks.iter().filter(|c| planner.may_leave(**c)).map(|&c| Reverse(planner.key(c)));
        planner.queue = keys.collect();
        planner
    }

    fn key(&self, chunk: ChunkRef<'_>) -> Key {
        let (value, dimmer) = match self.rules.policy {
            Policy::Fifo | Policy::Window => (chunk.index() as f64, false),
            Policy::Random { seed } => (lot(seed, chunk.id()), false),
            Policy::Brightness { rank, ties } => (self.brightness(chunk, rank), ties == Ties::Dimmer),
        };
        Key { value, ties: (!dimmer).then_some([0.0; 2]), index: chunk.index() }
    }

    /// How bright a chunk is. What leaves as a pair shares what both have received, where that can be told.
    fn brightness(&self, chunk: ChunkRef<'_>, rank: Rank) -> f64 {
        let pair = self.pair_of(chunk).filter(|_| rank == Rank::Share);
        let both = pair.and_then(|pair| chunk.tally().join(pair.tally())).and_then(Tally::share);
        both.unwrap_or_else(|| rank.of(chunk))
    }

    /// Lets stay what fits after all, the brightest first: with its pair, and never where what opens its turn or the question
    /// that it answers leaves.
    fn fill(&mut self, leaves: &mut Vec<Leave>) {
        let mut stays = vec![false; leaves.len()];
        for last in (0..leaves.len()).rev() {
            // Of a pair, the first has chosen the second.
            let paired = matches!(leaves[last].why, WhyLeft::Ranked { pair: Pair::With(_), .. });
            if matches!(leaves[last].why, WhyLeft::Ranked { pair: Pair::Takes(_), .. }) {
                continue;
            }
            let group = if paired { last - 1..last + 1 } else { last..last + 1 };
            let chunks: Vec<_> =
                leaves[group.clone()].iter().filter_map(|l| self.timeline.chunk(l.chunk)).collect();
            let len: usize = chunks.iter().map(|chunk| chunk.live_len()).sum();
            let opened = |chunk: &ChunkRef<'_>| {
                let leaves =
                    |id: ChunkId| self.timeline.chunk(id).is_some_and(|anchor| self.gone[anchor.index()]);
                let opening = ChunkId { sentence: 0, ..chunk.id() };
                let question = self.timeline.question_of(chunk.id().turn);
                let question = question.map(|turn| ChunkId { turn, sentence: 0, role: Role::User });
                let without = |id: ChunkId| chunks.iter().all(|c| c.id() != id) && leaves(id);
                !without(opening) && !question.is_some_and(without)
            };
            if self.live + len <= self.rules.budget && chunks.iter().all(opened) {
                self.live += len;
                chunks.iter().for_each(|chunk| self.gone[chunk.index()] = false);
                stays[group].fill(true);
            }
        }
        let mut stays = stays.into_iter();
        leaves.retain(|_| !stays.next().unwrap_or(false));
        for (place, leave) in leaves.iter_mut().enumerate() {
            if let WhyLeft::Ranked { order, .. } = &mut leave.why {
                *order = place as u32;
            }
        }
    }

    /// What holds the tokens that are left, in the order of [`Held`].
    fn held(&self, view: LiveView<'_>) -> Vec<(Held, usize)> {
        let mut held = BTreeMap::new();
        if view.prefix() > 0 {
            held.insert(Held::SystemPrompt, view.prefix());
        }
        for chunk in view.chunks().filter(|c| !self.gone[c.index()]) {
            *held.entry(self.kept[chunk.index()].unwrap_or(Held::Anchor)).or_default() += chunk.live_len();
        }
        held.into_iter().collect()
    }

    /// The next chunk to leave.
    fn next(&mut self) -> Option<ChunkRef<'a>> {
        while let Some(Reverse(key)) = self.queue.pop() {
            let chunk = self.timeline.chunk_at(key.index);
            match key.ties {
                _ if !self.may_leave(chunk) => {}
                Some(_) => return Some(chunk),
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
        let free = |c: ChunkRef<'_>| !self.gone[c.index()] && self.kept[c.index()].is_none();
        if !free(chunk) || !self.has_anchors() || !chunk.id().is_anchor() {
            return free(chunk);
        }
        self.is_alone(chunk.id())
            && match self.pair_of(chunk) {
                Some(partner) => free(partner) && self.is_alone(partner.id()),
                // Without a live partner, an answer may still hang on: its opening can be gone, not its rest.
                None => self.is_unanswered(chunk.id()),
            }
    }

    /// Whether a chunk is all that is live of its turn.
    fn is_alone(&self, chunk: ChunkId) -> bool {
        self.timeline.turn_index(chunk.turn).is_some_and(|t| self.live_by_turn[t] == 1)
    }

    /// Whether nothing is live of the answer to a question.
    fn is_unanswered(&self, chunk: ChunkId) -> bool {
        let turn = self.timeline.turn_index(chunk.turn).filter(|_| chunk.role == Role::User);
        let answer = turn.and_then(|t| self.timeline.paired_turn(t));
        answer.is_none_or(|answer| self.live_by_turn[answer] == 0)
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
