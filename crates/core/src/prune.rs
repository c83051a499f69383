//! Which chunks are pruned, and why.
//!
//! Planned before a message that does not fit, and at the end of a turn: the lowest-ranked chunk is pruned first,
//! until the window fits its budget. The first chunk of a question and the first chunk of its answer are anchors. An anchor is pruned
//! only when it and its partner are all that is live of their two turns, and then both are pruned. So a chunk
//! in the window always has the beginning of its turn and the question that it answers with it.
//!
//! The system prompt, the attention sinks, the recent window, the running turn and its question, and pinned
//! chunks are never pruned. If they alone exceed the budget, the plan reports it.

use crate::change::{AttentionTally, Change, Extent, Measure, PrunePairing, PruneReason, Pruned};
use crate::context_window::ContextWindow;
use crate::salience::{SalienceScorer, recency};
use crate::timeline::{ChunkRef, Timeline};
use crate::token::{ChunkId, Role, TurnId};
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;

/// How the chunks to prune are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::EnumDiscriminants)]
#[strum_discriminants(
    name(PrunePolicyKind),
    derive(strum::Display, strum::EnumString, strum::VariantNames),
    strum(serialize_all = "snake_case"),
    doc = "A [`PrunePolicy`] without its parameters."
)]
pub enum PrunePolicy {
    /// By the attention that they have received.
    Brightness {
        /// The value that chunks are ranked by.
        rank: RankBy,
        /// The order of chunks with the same value.
        ties: TieBreak,
    },
    /// The oldest first.
    Fifo,
    /// The oldest first, without regard to anchors: a sliding window with sinks, as StreamingLLM has.
    Window,
    /// At random; the same seed gives the same choice.
    Random {
        /// The seed.
        seed: u64,
    },
    /// By their text: recency, names of the user's messages, references to the user, structure. For models that
    /// report no attention.
    Salience,
}

/// The value that chunks are ranked by; the lowest is pruned first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum RankBy {
    /// Brightness of the brightest token.
    Peak,
    /// Mean brightness of the tokens.
    Mean,
    /// Mean brightness of the four brightest tokens.
    Top4,
    /// How often its tokens received attention above the threshold.
    Votes,
    /// Sum of the attention that its tokens received.
    Sum,
    /// Mean attention per token and step. A chunk without exposures ranks highest.
    Share,
}

impl PrunePolicy {
    /// The value that shows how bright chunks are; for a policy that does not rank by brightness, the peak.
    #[must_use]
    pub fn rank(self) -> RankBy {
        match self {
            PrunePolicy::Brightness { rank, .. } => rank,
            PrunePolicy::Fifo | PrunePolicy::Window | PrunePolicy::Random { .. } | PrunePolicy::Salience => {
                RankBy::Peak
            }
        }
    }

    /// The value that chunks are ranked by, as [`PruneReason`] records it.
    #[must_use]
    pub fn measure(self) -> Measure {
        match self {
            PrunePolicy::Fifo | PrunePolicy::Window => Measure::Age,
            PrunePolicy::Random { .. } => Measure::Random,
            PrunePolicy::Salience => Measure::Salience,
            PrunePolicy::Brightness { rank: RankBy::Peak, .. } => Measure::Peak,
            PrunePolicy::Brightness { rank: RankBy::Mean, .. } => Measure::Mean,
            PrunePolicy::Brightness { rank: RankBy::Top4, .. } => Measure::Top4,
            PrunePolicy::Brightness { rank: RankBy::Votes, .. } => Measure::Votes,
            PrunePolicy::Brightness { rank: RankBy::Sum, .. } => Measure::Attention,
            PrunePolicy::Brightness { rank: RankBy::Share, .. } => Measure::Share,
        }
    }
}

/// The order of chunks with the same value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum TieBreak {
    /// The one with the lower mean of its four brightest tokens first, then with the lower mean of all tokens,
    /// then the older.
    Dimmer,
    /// The older first.
    Older,
}

impl RankBy {
    /// The value of a chunk.
    #[must_use]
    pub fn value_of(self, chunk: ChunkRef<'_>) -> f64 {
        match self {
            RankBy::Peak => f64::from(chunk.peak().0),
            RankBy::Mean => BrightnessStats::of_chunk(chunk).mean,
            RankBy::Top4 => BrightnessStats::of_chunk(chunk).top4,
            RankBy::Votes => chunk.tally().votes as f64,
            RankBy::Sum => chunk.tally().mass as f64 / AttentionTally::MASS_UNIT,
            RankBy::Share => chunk.tally().share().unwrap_or(f64::INFINITY),
        }
    }
}

/// The rules of one pruning.
#[derive(Clone, Debug, PartialEq)]
pub struct PruneRules {
    /// How the chunks are chosen.
    pub policy: PrunePolicy,
    /// How many tokens the window may hold, including the prefix.
    pub budget: usize,
    /// How many tokens at the beginning of the window, including the prefix, are never pruned: attention sinks.
    pub sinks: usize,
    /// How many of the latest tokens are never pruned.
    pub recent: usize,
    /// Whether chosen chunks stay after all, the highest-ranked first, where the window has room for them: the
    /// last chunk chosen may have been long. Has no effect on policies by age, which would leave gaps.
    pub fill: bool,
    /// The running turn.
    pub current: Option<TurnId>,
}

/// The chunks to prune, and whether the window then fits its budget.
#[derive(Clone, Debug, PartialEq)]
pub struct PrunePlan {
    /// The chunks, in the order in which they were chosen.
    pub pruned: Vec<Pruned>,
    /// Tokens in the window before.
    pub before: usize,
    /// Tokens in the window after.
    pub after: usize,
    /// Set where the window exceeds its budget and no more chunk may be pruned.
    pub exceeded: Option<BudgetExceeded>,
}

/// The window exceeds its budget, and no more chunk may be pruned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetExceeded {
    /// By how many tokens.
    pub by: usize,
    /// Why the tokens of the window are not pruned, and how many for each reason. A chunk with several reasons
    /// counts for the first.
    pub kept_by: Vec<(KeepReason, usize)>,
}

/// Why a chunk is not pruned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeepReason {
    /// It is part of the system prompt, on the timeline or before it.
    SystemPrompt,
    /// It is at the beginning of the window, where the attention sinks are.
    Sink,
    /// It is pinned.
    Pinned,
    /// It is part of the running turn or of its question.
    CurrentTurn,
    /// It is among the latest tokens.
    Recent,
    /// It is the anchor of a chunk that is not pruned.
    Anchor,
}

impl fmt::Display for KeepReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeepReason::SystemPrompt => "system prompt",
            KeepReason::Sink => "first tokens",
            KeepReason::Pinned => "pinned",
            KeepReason::CurrentTurn => "running turn and its question",
            KeepReason::Recent => "recent window",
            KeepReason::Anchor => "anchors of these",
        })
    }
}

impl fmt::Display for BudgetExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept: Vec<_> = self.kept_by.iter().map(|(reason, tokens)| format!("{reason} {tokens}")).collect();
        write!(f, "over budget by {} tokens, and no more may be pruned: {}", self.by, kept.join(", "))
    }
}

impl PrunePlan {
    /// The plan as a change; none where no chunk is pruned.
    #[must_use]
    pub fn change(&self) -> Option<Change> {
        (!self.pruned.is_empty()).then(|| Change::Prune(self.pruned.clone()))
    }
}

/// Plans which chunks to prune so that the window fits its budget.
#[must_use]
pub fn plan_prune(window: ContextWindow<'_>, rules: &PruneRules) -> PrunePlan {
    let before = window.len();
    let mut planner = PrunePlanner::new(window, rules);
    let mut pruned: Vec<Pruned> = Vec::new();
    while planner.live > rules.budget {
        let Some(chunk) = planner.pop_candidate() else { break };
        let partner = planner.live_partner(chunk);
        let live = planner.live;
        let second = partner.map(|p| (p, PrunePairing::WithPartner(chunk.id())));
        let pairing = partner.map_or(PrunePairing::Alone, |p| PrunePairing::TookPartner(p.id()));
        for (chunk, pairing) in [Some((chunk, pairing)), second].into_iter().flatten() {
            let reason = PruneReason::Ranked {
                order: pruned.len() as u32,
                measure: rules.policy.measure(),
                value: planner.candidate(chunk).value,
                peak: chunk.peak(),
                live,
                budget: rules.budget,
                pairing,
            };
            pruned.push(Pruned { chunk: chunk.id(), extent: Extent::Whole, reason });
            planner.mark_pruned(chunk);
        }
    }
    if rules.fill && !matches!(rules.policy, PrunePolicy::Fifo | PrunePolicy::Window) {
        planner.refill(&mut pruned);
    }
    let after = planner.live;
    let exceeded = (after > rules.budget)
        .then(|| BudgetExceeded { by: after - rules.budget, kept_by: planner.kept_tokens(window) });
    PrunePlan { pruned, before, after, exceeded }
}

/// A chunk in the priority queue; the smallest is pruned first.
///
/// The values that break ties cost a pass over the tokens and are needed for few candidates. So they are
/// computed only when a candidate reaches the head of the queue; the candidate is then inserted again, behind
/// all candidates of the same value that have not been there.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PruneCandidate {
    value: f64,
    /// Mean of the four brightest tokens, then mean of all.
    tie_break: Option<[f64; 2]>,
    row_index: usize,
}

impl Eq for PruneCandidate {}

impl Ord for PruneCandidate {
    fn cmp(&self, other: &Self) -> Ordering {
        let ties = match (self.tie_break, other.tie_break) {
            (Some(a), Some(b)) => a[0].total_cmp(&b[0]).then_with(|| a[1].total_cmp(&b[1])),
            (a, b) => a.is_some().cmp(&b.is_some()),
        };
        self.value.total_cmp(&other.value).then(ties).then_with(|| self.row_index.cmp(&other.row_index))
    }
}

impl PartialOrd for PruneCandidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The state of the planning: the window as it is without the chunks chosen so far.
struct PrunePlanner<'a> {
    timeline: &'a Timeline,
    rules: &'a PruneRules,
    live: usize,
    /// Live chunks by turn index.
    live_by_turn: Vec<u32>,
    /// By row: the chunk has been chosen.
    pruned: Vec<bool>,
    /// By row: why the chunk is not pruned, anchors aside.
    kept_by: Vec<Option<KeepReason>>,
    /// By row: the salience of the live chunks, where the policy ranks by it.
    salience: BTreeMap<usize, f64>,
    queue: BinaryHeap<Reverse<PruneCandidate>>,
}

impl<'a> PrunePlanner<'a> {
    fn new(window: ContextWindow<'a>, rules: &'a PruneRules) -> Self {
        let timeline = window.timeline();
        let mut planner = Self {
            timeline,
            rules,
            live: window.len(),
            live_by_turn: vec![0; timeline.turns().len()],
            pruned: vec![false; timeline.chunks.len()],
            kept_by: vec![None; timeline.chunks.len()],
            salience: BTreeMap::new(),
            queue: BinaryHeap::new(),
        };
        if planner.live <= rules.budget {
            return planner;
        }
        let chunks: Vec<_> = window.chunks().collect();
        planner.collect_kept(window, &chunks);
        if rules.policy == PrunePolicy::Salience {
            planner.salience = chunk_salience(&chunks);
        }
        let candidates =
            chunks.iter().filter(|c| planner.is_prunable(**c)).map(|&c| Reverse(planner.candidate(c)));
        planner.queue = candidates.collect();
        planner
    }

    /// Fills `live_by_turn` and `kept_by` from the live chunks.
    fn collect_kept(&mut self, window: ContextWindow<'a>, chunks: &[ChunkRef<'a>]) {
        let (timeline, rules) = (self.timeline, self.rules);
        let question = rules.current.and_then(|turn| timeline.question_of(turn));
        let recent_from = window.len().saturating_sub(rules.recent);
        let mut slot = window.prefix();
        let mut turn_index = 0;
        for chunk in chunks {
            let id = chunk.id();
            while timeline.turns()[turn_index].id != id.turn {
                turn_index += 1;
            }
            self.live_by_turn[turn_index] += 1;
            let end = slot + chunk.live_len();
            self.kept_by[chunk.row_index()] = if timeline.is_system_prompt(id) {
                Some(KeepReason::SystemPrompt)
            } else if slot < rules.sinks {
                Some(KeepReason::Sink)
            } else if chunk.is_pinned() {
                Some(KeepReason::Pinned)
            } else if Some(id.turn) == rules.current || Some(id.turn) == question {
                Some(KeepReason::CurrentTurn)
            } else if end > recent_from {
                Some(KeepReason::Recent)
            } else {
                None
            };
            slot = end;
        }
    }

    fn candidate(&self, chunk: ChunkRef<'_>) -> PruneCandidate {
        let (value, breaks_ties) = match self.rules.policy {
            PrunePolicy::Fifo | PrunePolicy::Window => (chunk.row_index() as f64, false),
            PrunePolicy::Random { seed } => (random_rank(seed, chunk.id()), false),
            PrunePolicy::Salience => (self.salience_of_pair(chunk), false),
            PrunePolicy::Brightness { rank, ties } => {
                (self.rank_value(chunk, rank), ties == TieBreak::Dimmer)
            }
        };
        PruneCandidate { value, tie_break: (!breaks_ties).then_some([0.0; 2]), row_index: chunk.row_index() }
    }

    /// The salience of a chunk. A pair is pruned together, so both have the higher of the two.
    fn salience_of_pair(&self, chunk: ChunkRef<'_>) -> f64 {
        let of = |chunk: ChunkRef<'_>| self.salience.get(&chunk.row_index()).copied().unwrap_or(0.0);
        self.live_partner(chunk).map_or(of(chunk), |partner| of(chunk).max(of(partner)))
    }

    /// The value of a chunk. A pair is pruned together, so both have the share of their common tally.
    fn rank_value(&self, chunk: ChunkRef<'_>, rank: RankBy) -> f64 {
        let partner = self.live_partner(chunk).filter(|_| rank == RankBy::Share);
        let pair_tally = partner.and_then(|partner| chunk.tally().checked_add(partner.tally()));
        pair_tally.and_then(AttentionTally::share).unwrap_or_else(|| rank.value_of(chunk))
    }

    /// Removes chosen chunks from the plan where the window has room for them, the highest-ranked first. A pair
    /// stays or goes as one, and a chunk does not stay without the first chunk of its turn or the question that
    /// it answers.
    fn refill(&mut self, pruned: &mut Vec<Pruned>) {
        let mut stays = vec![false; pruned.len()];
        for last in (0..pruned.len()).rev() {
            // The two chunks of a pair follow each other; the second handles both.
            let group = match pruned[last].reason {
                PruneReason::Ranked { pairing: PrunePairing::TookPartner(_), .. } => continue,
                PruneReason::Ranked { pairing: PrunePairing::WithPartner(_), .. } => last - 1..last + 1,
                _ => last..last + 1,
            };
            let chunks: Vec<_> =
                pruned[group.clone()].iter().filter_map(|p| self.timeline.chunk(p.chunk)).collect();
            let len: usize = chunks.iter().map(|chunk| chunk.live_len()).sum();
            if self.live + len <= self.rules.budget
                && chunks.iter().all(|c| self.has_anchors_with(*c, &chunks))
            {
                self.live += len;
                chunks.iter().for_each(|chunk| self.pruned[chunk.row_index()] = false);
                stays[group].fill(true);
            }
        }
        let mut stays = stays.into_iter();
        pruned.retain(|_| !stays.next().unwrap_or(false));
        for (index, pruned) in pruned.iter_mut().enumerate() {
            if let PruneReason::Ranked { order, .. } = &mut pruned.reason {
                *order = index as u32;
            }
        }
    }

    /// Whether a chunk would have the first chunk of its turn and its question in the window if `group` stayed.
    fn has_anchors_with(&self, chunk: ChunkRef<'_>, group: &[ChunkRef<'_>]) -> bool {
        let is_pruned =
            |id: ChunkId| self.timeline.chunk(id).is_some_and(|anchor| self.pruned[anchor.row_index()]);
        let is_missing = |id: ChunkId| group.iter().all(|c| c.id() != id) && is_pruned(id);
        let first = ChunkId { index: 0, ..chunk.id() };
        let question = self.timeline.question_of(chunk.id().turn);
        let question = question.map(|turn| ChunkId { turn, index: 0, role: Role::User });
        !is_missing(first) && !question.is_some_and(is_missing)
    }

    /// How many of the remaining tokens each reason keeps, in the order of [`KeepReason`].
    fn kept_tokens(&self, window: ContextWindow<'_>) -> Vec<(KeepReason, usize)> {
        let mut tokens_by_reason = BTreeMap::new();
        if window.prefix() > 0 {
            tokens_by_reason.insert(KeepReason::SystemPrompt, window.prefix());
        }
        for chunk in window.chunks().filter(|c| !self.pruned[c.row_index()]) {
            let reason = self.kept_by[chunk.row_index()].unwrap_or(KeepReason::Anchor);
            *tokens_by_reason.entry(reason).or_default() += chunk.live_len();
        }
        tokens_by_reason.into_iter().collect()
    }

    /// The next chunk to prune.
    fn pop_candidate(&mut self) -> Option<ChunkRef<'a>> {
        while let Some(Reverse(candidate)) = self.queue.pop() {
            let chunk = self.timeline.chunk_ref(candidate.row_index);
            match candidate.tie_break {
                _ if !self.is_prunable(chunk) => {}
                Some(_) => return Some(chunk),
                None => {
                    let BrightnessStats { top4, mean } = BrightnessStats::of_chunk(chunk);
                    self.queue.push(Reverse(PruneCandidate { tie_break: Some([top4, mean]), ..candidate }));
                }
            }
        }
        None
    }

    fn has_anchors(&self) -> bool {
        self.rules.policy != PrunePolicy::Window
    }

    /// Whether the chunk may be pruned in the current state.
    fn is_prunable(&self, chunk: ChunkRef<'_>) -> bool {
        let free = |c: ChunkRef<'_>| !self.pruned[c.row_index()] && self.kept_by[c.row_index()].is_none();
        if !free(chunk) || !self.has_anchors() || !chunk.id().is_anchor() {
            return free(chunk);
        }
        self.is_last_of_turn(chunk.id())
            && match self.live_partner(chunk) {
                Some(partner) => free(partner) && self.is_last_of_turn(partner.id()),
                // The first chunk of the answer can be pruned while later chunks of it are live.
                None => self.is_unanswered(chunk.id()),
            }
    }

    /// Whether no other chunk of its turn is live.
    fn is_last_of_turn(&self, chunk: ChunkId) -> bool {
        self.timeline.turn_index(chunk.turn).is_some_and(|t| self.live_by_turn[t] == 1)
    }

    /// Whether no chunk of the answer to a question is live.
    fn is_unanswered(&self, chunk: ChunkId) -> bool {
        let turn = self.timeline.turn_index(chunk.turn).filter(|_| chunk.role == Role::User);
        let answer = turn.and_then(|t| self.timeline.paired_turn(t));
        answer.is_none_or(|answer| self.live_by_turn[answer] == 0)
    }

    /// The live anchor that is pruned together with this one.
    fn live_partner(&self, chunk: ChunkRef<'_>) -> Option<ChunkRef<'a>> {
        if !self.has_anchors() || !chunk.id().is_anchor() {
            return None;
        }
        self.timeline.partner(chunk.id()).filter(|p| p.is_live() && !self.pruned[p.row_index()])
    }

    /// Marks a chunk as pruned, and queues the anchors that may be pruned now.
    fn mark_pruned(&mut self, chunk: ChunkRef<'a>) {
        self.pruned[chunk.row_index()] = true;
        self.live -= chunk.live_len();
        let Some(turn) = self.timeline.turn_index(chunk.id().turn) else { return };
        self.live_by_turn[turn] -= 1;
        if !self.has_anchors() {
            return;
        }
        let own = self.timeline.chunk(ChunkId { index: 0, ..chunk.id() });
        let other = self.timeline.partner(chunk.id());
        for anchor in [own, other].into_iter().flatten() {
            if anchor.is_live() && self.is_prunable(anchor) {
                self.queue.push(Reverse(self.candidate(anchor)));
            }
        }
    }
}

/// Two of the values that chunks are ranked by.
struct BrightnessStats {
    top4: f64,
    mean: f64,
}

impl BrightnessStats {
    fn of_chunk(chunk: ChunkRef<'_>) -> Self {
        let mut top = [f32::NEG_INFINITY; 4];
        let mut sums = [0.0f64; 8];
        let mut n = 0;
        for brightness in chunk.brightness_runs() {
            n += brightness.len();
            for block in brightness.chunks(8) {
                sums.iter_mut().zip(block).for_each(|(sum, b)| *sum += f64::from(b.0));
            }
            for value in brightness.iter().map(|b| b.0) {
                if value > top[3] {
                    let at = top.iter().position(|&t| value > t).unwrap_or(3);
                    top[at..].rotate_right(1);
                    top[at] = value;
                }
            }
        }
        let top = &top[..n.min(4)];
        let top4 = top.iter().map(|&t| f64::from(t)).sum::<f64>() / top.len() as f64;
        Self { top4, mean: sums.iter().sum::<f64>() / n as f64 }
    }
}

/// A random number from 0 to 1, the same for the same seed and chunk.
fn random_rank(seed: u64, chunk: ChunkId) -> f64 {
    let key = (u64::from(chunk.turn.0) << 32) | u64::from(chunk.index);
    let hash = xxhash_rust::xxh3::xxh3_64_with_seed(&key.to_le_bytes(), seed);
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

/// The salience of chunks, by row: the names are those of the user's messages among them.
fn chunk_salience(chunks: &[ChunkRef<'_>]) -> BTreeMap<usize, f64> {
    let mut scorer = SalienceScorer::default();
    let texts: Vec<_> = chunks.iter().map(|chunk| chunk.live_text()).collect();
    for (chunk, text) in chunks.iter().zip(&texts) {
        if chunk.id().role == Role::User {
            scorer.register_names_in(text);
        }
    }
    let rows = chunks.iter().zip(&texts).enumerate();
    rows.map(|(n, (chunk, text))| (chunk.row_index(), scorer.score(text, recency(n, chunks.len())))).collect()
}
