//! The state of a planning: what is live without the chunks chosen so far, and which chunk is next.

use super::{KeepReason, PrunePolicy, PruneRules, RankBy, TieBreak};
use crate::change::{AttentionTally, PrunePairing, PruneReason, Pruned};
use crate::context_window::ContextWindow;
use crate::salience::{SalienceScorer, recency};
use crate::timeline::{ChunkRef, Exchange, Timeline};
use crate::token::{ChunkId, Role, TurnId};
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};

/// A chunk in the priority queue; the smallest is pruned first.
///
/// The values that break ties cost a pass over the tokens and are needed for few candidates. So they are
/// computed only when a candidate reaches the head of the queue; the candidate is then inserted again, behind
/// all candidates of the same value that have not been there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PruneCandidate {
    pub value: f64,
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
pub(super) struct PrunePlanner<'a> {
    timeline: &'a Timeline,
    rules: &'a PruneRules,
    /// Tokens in the window without the chunks chosen so far.
    pub live: usize,
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
    pub fn new(window: ContextWindow<'a>, rules: &'a PruneRules) -> Self {
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
        let answered = rules.current.map(|turn| answered_turns(timeline, turn)).unwrap_or_default();
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
            } else if Some(id.turn) == rules.current || answered.contains(&id.turn) {
                Some(KeepReason::CurrentTurn)
            } else if end > recent_from {
                Some(KeepReason::Recent)
            } else {
                None
            };
            slot = end;
        }
    }

    pub fn candidate(&self, chunk: ChunkRef<'_>) -> PruneCandidate {
        let (value, breaks_ties) = match self.rules.policy {
            PrunePolicy::Fifo | PrunePolicy::Window => (chunk.row_index() as f64, false),
            PrunePolicy::Random { seed } => (random_rank(seed, chunk.id()), false),
            PrunePolicy::Salience => (self.salience_of_unit(chunk), false),
            PrunePolicy::Brightness { rank, ties } => {
                (self.rank_value(chunk, rank), ties == TieBreak::Dimmer)
            }
        };
        PruneCandidate { value, tie_break: (!breaks_ties).then_some([0.0; 2]), row_index: chunk.row_index() }
    }

    /// The salience of a chunk. Chunks that are pruned together have the highest of their saliences.
    fn salience_of_unit(&self, chunk: ChunkRef<'_>) -> f64 {
        let of = |chunk: ChunkRef<'_>| self.salience.get(&chunk.row_index()).copied().unwrap_or(0.0);
        self.prune_unit(chunk).into_iter().map(of).fold(of(chunk), f64::max)
    }

    /// The value of a chunk. Chunks that are pruned together have the share of their common tally.
    fn rank_value(&self, chunk: ChunkRef<'_>, rank: RankBy) -> f64 {
        if rank != RankBy::Share {
            return rank.value_of(chunk);
        }
        let others = self.prune_unit(chunk).into_iter().filter(|c| c.id() != chunk.id());
        let tally = others.map(ChunkRef::tally).try_fold(chunk.tally(), AttentionTally::checked_add);
        tally.and_then(AttentionTally::share).unwrap_or_else(|| rank.value_of(chunk))
    }

    /// Removes chosen chunks from the plan where the window has room for them, the highest-ranked first. Chunks
    /// that were chosen together stay or go as one, and a chunk does not stay without the first chunk of its turn,
    /// the question that it answers, or the call that it belongs to.
    pub fn refill(&mut self, pruned: &mut Vec<Pruned>) {
        let mut stays = vec![false; pruned.len()];
        let mut end = pruned.len();
        while let Some(last) = end.checked_sub(1) {
            // The chunks of a unit follow each other; the first one took the others.
            let group = unit_start(pruned, last)..end;
            end = group.start;
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

    /// Whether a chunk would have its companions in the window if `group` stayed: the first chunk of its turn, its
    /// question, and the call or the results that belong to it.
    fn has_anchors_with(&self, chunk: ChunkRef<'_>, group: &[ChunkRef<'_>]) -> bool {
        let is_missing = |anchor: ChunkRef<'_>| {
            group.iter().all(|c| c.id() != anchor.id()) && self.pruned[anchor.row_index()]
        };
        let Some(turn) = self.timeline.turn_index(chunk.id().turn) else { return true };
        let exchange = self.timeline.exchange_of(turn);
        let step = exchange.step_of(turn).unwrap_or_default();
        let mut turns = exchange.question.into_iter().chain(step.iter().copied()).chain([turn]);
        !turns.any(|t| self.timeline.anchor_of(t).is_some_and(is_missing))
    }

    /// How many of the remaining tokens each reason keeps, in the order of [`KeepReason`].
    pub fn kept_tokens(&self, window: ContextWindow<'_>) -> Vec<(KeepReason, usize)> {
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
    pub fn pop_candidate(&mut self) -> Option<ChunkRef<'a>> {
        while let Some(Reverse(candidate)) = self.queue.pop() {
            let chunk = self.timeline.chunk_ref(candidate.row_index);
            match candidate.tie_break {
                _ if !self.is_prunable(chunk) => {}
                // What it is pruned with may have changed since it was queued.
                _ if self.ranks_units()
                    && self.candidate(chunk).value.total_cmp(&candidate.value) != Ordering::Equal =>
                {
                    self.queue.push(Reverse(self.candidate(chunk)));
                }
                Some(_) => return Some(chunk),
                None => {
                    let BrightnessStats { top4, mean } = BrightnessStats::of_chunk(chunk);
                    self.queue.push(Reverse(PruneCandidate { tie_break: Some([top4, mean]), ..candidate }));
                }
            }
        }
        None
    }

    /// Whether the value of a chunk depends on the chunks that it is pruned with.
    fn ranks_units(&self) -> bool {
        let by_share = matches!(self.rules.policy, PrunePolicy::Brightness { rank: RankBy::Share, .. });
        by_share || self.rules.policy == PrunePolicy::Salience
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
        let Some(turn) = self.timeline.turn_index(chunk.id().turn) else { return true };
        let exchange = self.timeline.exchange_of(turn);
        let (step, live_steps) = self.steps_of(&exchange, turn);
        let is_question = exchange.question == Some(turn);
        // A question stays as long as more than one of its answers is live.
        (!is_question || live_steps < 2)
            && self.live_by_turn[turn] == 1
            && step.iter().all(|&t| self.live_by_turn[t] <= self.live_anchor(t).map_or(0, |_| 1))
            && self.prune_unit(chunk).into_iter().all(|c| free(c) && self.is_last_of_turn(c.id()))
    }

    /// The step that a turn is pruned with, which for a question is its last live one, and how many steps of the
    /// exchange are live.
    fn steps_of<'e>(&self, exchange: &'e Exchange, turn: usize) -> (&'e [usize], usize) {
        let is_live = |step: &&Vec<usize>| step.iter().any(|&t| self.live_by_turn[t] > 0);
        let mut live = exchange.steps.iter().filter(is_live);
        let (first, count) = (live.next(), live.count());
        let live_steps = count + usize::from(first.is_some());
        let own = exchange.step_of(turn).or_else(|| first.filter(|_| count == 0).map(Vec::as_slice));
        (own.unwrap_or_default(), live_steps)
    }

    /// The live anchors that are pruned together, the chunk itself first. A chunk that is no anchor is pruned alone.
    pub fn prune_unit(&self, chunk: ChunkRef<'a>) -> Vec<ChunkRef<'a>> {
        let mut unit = vec![chunk];
        let turn = self.timeline.turn_index(chunk.id().turn);
        let Some(turn) = turn.filter(|_| self.has_anchors() && chunk.id().is_anchor()) else { return unit };
        let exchange = self.timeline.exchange_of(turn);
        let (step, live_steps) = self.steps_of(&exchange, turn);
        let question = exchange.question.filter(|_| live_steps < 2);
        let others = question.into_iter().chain(step.iter().copied()).filter(|&t| t != turn);
        unit.extend(others.filter_map(|t| self.live_anchor(t)));
        unit
    }

    /// The anchor of a turn, if it is live and not chosen.
    fn live_anchor(&self, turn: usize) -> Option<ChunkRef<'a>> {
        self.timeline.anchor_of(turn).filter(|anchor| anchor.is_live() && !self.pruned[anchor.row_index()])
    }

    /// Whether no other chunk of its turn is live.
    fn is_last_of_turn(&self, chunk: ChunkId) -> bool {
        self.timeline.turn_index(chunk.turn).is_some_and(|t| self.live_by_turn[t] == 1)
    }

    /// Marks a chunk as pruned, and queues the anchors that may be pruned now.
    pub fn mark_pruned(&mut self, chunk: ChunkRef<'a>) {
        self.pruned[chunk.row_index()] = true;
        self.live -= chunk.live_len();
        let Some(turn) = self.timeline.turn_index(chunk.id().turn) else { return };
        self.live_by_turn[turn] -= 1;
        if !self.has_anchors() {
            return;
        }
        let exchange = self.timeline.exchange_of(turn);
        // Other steps than its own are not concerned, unless the chunk is of the question: then the last live step.
        let (step, _) = self.steps_of(&exchange, turn);
        let mut turns: Vec<usize> = exchange.question.into_iter().chain(step.iter().copied()).collect();
        turns.extend((!turns.contains(&turn)).then_some(turn));
        let anchors = turns.into_iter().filter_map(|t| self.live_anchor(t));
        let freed: Vec<_> = anchors.filter(|anchor| self.is_prunable(*anchor)).collect();
        for anchor in freed {
            self.queue.push(Reverse(self.candidate(anchor)));
        }
    }
}

/// The first index of the chunks that were chosen together with the chunk at `last`.
fn unit_start(pruned: &[Pruned], last: usize) -> usize {
    match pruned[last].reason {
        PruneReason::Ranked { pairing: PrunePairing::WithPartner(first), .. } => {
            (0..last).rev().find(|&n| pruned[n].chunk == first).unwrap_or(last)
        }
        _ => last,
    }
}

/// The turns that a turn answers: its question, and the call and results directly before it.
fn answered_turns(timeline: &Timeline, turn: TurnId) -> Vec<TurnId> {
    let Some(index) = timeline.turn_index(turn) else { return Vec::new() };
    let exchange = timeline.exchange_of(index);
    let own = exchange.steps.iter().position(|step| step.contains(&index));
    let before = own.and_then(|own| exchange.steps.get(own.checked_sub(1)?));
    let turns = exchange.question.into_iter().chain(before.into_iter().flatten().copied());
    turns.filter(|&t| t != index).map(|t| timeline.turns()[t].id).collect()
}

/// Two of the values that chunks are ranked by.
pub(super) struct BrightnessStats {
    pub top4: f64,
    pub mean: f64,
}

impl BrightnessStats {
    pub fn of_chunk(chunk: ChunkRef<'_>) -> Self {
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
