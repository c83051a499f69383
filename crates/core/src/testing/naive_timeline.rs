//! A conversation as a plain list of tokens, with every rule implemented in the slow and obvious way. It shares no
//! code with the planners, so that a mistake in one shows as a difference from the other.

use super::naive_token::NaiveToken;
use crate::brightness::{AttentionSink, MagnitudeRules};
use crate::prune::{PrunePolicy, PruneRules, RankBy};
use crate::token::{ChunkId, Role, TurnId};

/// All tokens, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NaiveTimeline(pub Vec<NaiveToken>);

impl NaiveTimeline {
    /// The indices of the live tokens.
    #[must_use]
    pub fn live_indices(&self) -> Vec<usize> {
        (0..self.0.len()).filter(|&i| !self.0[i].pruned && !self.0[i].deleted).collect()
    }

    /// The chunks, in order.
    #[must_use]
    pub fn chunks(&self) -> Vec<ChunkId> {
        self.0.chunk_by(|a, b| a.chunk == b.chunk).map(|tokens| tokens[0].chunk).collect()
    }

    /// The first chunk of the turn that the turn of `chunk` is paired with.
    fn partner(&self, chunk: ChunkId) -> Option<ChunkId> {
        let counts = |t: &&NaiveToken| !t.deleted || t.chunk.turn == chunk.turn;
        let mut turns: Vec<_> = self.0.iter().filter(counts).map(|t| (t.chunk.turn, t.chunk.role)).collect();
        turns.dedup();
        let is_pair = |w: &&[(TurnId, Role)]| w[0].1 == Role::User && w[1].1 == Role::Assistant;
        let pair = turns.windows(2).filter(is_pair).find(|w| w.iter().any(|t| t.0 == chunk.turn))?;
        let is_partner = |other: &ChunkId| {
            other.index == 0 && other.turn != chunk.turn && pair.contains(&(other.turn, other.role))
        };
        self.chunks().into_iter().find(is_partner)
    }

    /// Scores one attention row by magnitude voting.
    pub fn score(&mut self, row: &[f32], current: TurnId, rules: &MagnitudeRules) {
        let (live, sink_is_first) = (self.live_indices(), rules.sink == AttentionSink::First);
        let sink = if sink_is_first { row[0] } else { row.iter().copied().fold(0.0, f32::max) };
        let slots = if sink_is_first { row.len() } else { live.len() };
        let threshold = (1.0 - f64::from(sink)) / (slots as f64 - 1.0);
        let is_scored = |&slot: &usize| rules.score_current_turn || self.0[live[slot]].chunk.turn != current;
        for slot in (usize::from(sink_is_first)..row.len()).filter(is_scored).collect::<Vec<_>>() {
            let (token, attention) = (&mut self.0[live[slot]], f64::from(row[slot]));
            let gain = if attention > threshold { (attention / threshold).trunc() as f32 } else { -1.0 };
            token.brightness = (token.brightness + gain).min(10_000.0);
            token.mass += attention;
            token.votes += u64::from(attention > threshold);
            token.exposures += 1;
        }
    }

    /// The value that a chunk is ranked by, and the two that break ties.
    fn rank_values(&self, chunk: ChunkId, policy: PrunePolicy) -> [f64; 3] {
        let PrunePolicy::Brightness { rank, .. } = policy else { return [0.0; 3] };
        let live = self.live_indices().into_iter().filter(|&i| self.0[i].chunk == chunk);
        let (message, template): (Vec<usize>, _) = live.partition(|&i| !self.0[i].template);
        let counted = if message.is_empty() { template } else { message };
        let mut brightness: Vec<f64> = counted.iter().map(|&i| f64::from(self.0[i].brightness)).collect();
        brightness.sort_by(|a, b| b.total_cmp(a));
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let (top4, mean_of_all) = (mean(&brightness[..brightness.len().min(4)]), mean(&brightness));
        let sum = |value: fn(&NaiveToken) -> f64| self.0.iter().filter(|t| t.chunk == chunk).map(value).sum();
        let value = match rank {
            RankBy::Peak => brightness[0],
            RankBy::Mean => mean_of_all,
            RankBy::Top4 => top4,
            RankBy::Votes => sum(|t| t.votes as f64),
            RankBy::Sum => sum(|t| t.mass),
            RankBy::Share if sum(|t| t.exposures as f64) == 0.0 => f64::INFINITY,
            RankBy::Share => sum(|t| t.mass) / sum(|t| t.exposures as f64),
        };
        [value, top4, mean_of_all]
    }

    /// The chunks that are never pruned, anchors aside.
    fn protected_chunks(&self, rules: &PruneRules) -> Vec<ChunkId> {
        let live = self.live_indices();
        let at_edge = |slot: usize| slot < rules.sinks || slot + rules.recent >= live.len();
        let edges = (0..live.len()).filter(|&slot| at_edge(slot)).map(|slot| self.0[live[slot]].chunk);
        let current = self.0.iter().find(|t| Some(t.chunk.turn) == rules.current);
        let answer = current.filter(|t| t.chunk.role == Role::Assistant);
        let question = answer.and_then(|t| self.partner(t.chunk)).map(|q| q.turn);
        let is_protected =
            |t: &&NaiveToken| t.pinned || [rules.current, question].contains(&Some(t.chunk.turn));
        let system_prompt = self.0.iter().take_while(|t| t.chunk.role == Role::System);
        let protected = self.0.iter().filter(is_protected).chain(system_prompt).map(|t| t.chunk);
        edges.chain(protected).collect()
    }

    /// Prunes by the rules; returns the pruned chunks in order.
    ///
    /// # Panics
    /// When a value is not a number.
    pub fn prune(&mut self, rules: &PruneRules) -> Vec<ChunkId> {
        let mut pruned = Vec::new();
        let was_pruned: Vec<bool> = self.0.iter().map(|t| t.pruned).collect();
        let protected = self.protected_chunks(rules);
        let no_anchor = |c: &ChunkId| c.index > 0 || rules.policy == PrunePolicy::Window;
        while self.live_indices().len() > rules.budget {
            let mut live: Vec<ChunkId> = self.live_indices().iter().map(|&i| self.0[i].chunk).collect();
            live.dedup();
            let live_in = |turn: TurnId| live.iter().filter(|c| c.turn == turn).count();
            let alone = |c: ChunkId| live_in(c.turn) == 1;
            let pair = |c: ChunkId| self.partner(c).filter(|p| live.contains(p));
            let answer = |c: ChunkId| self.partner(c).filter(|_| c.role == Role::User);
            let answered = |c: ChunkId| answer(c).is_some_and(|a| live_in(a.turn) > 0);
            let free = |c: ChunkId| !protected.contains(&c) && live.contains(&c);
            let free_anchor = |c: ChunkId| alone(c) && pair(c).map_or(!answered(c), |p| free(p) && alone(p));
            let prunable = |c: &&ChunkId| free(**c) && (no_anchor(c) || free_anchor(**c));
            let rank = |c: &ChunkId| self.rank_values(*c, rules.policy);
            let order = |a: &&ChunkId, b: &&ChunkId| rank(a).partial_cmp(&rank(b)).expect("numbers");
            let Some(&lowest) = live.iter().filter(prunable).min_by(order) else { break };
            for chunk in [Some(lowest), pair(lowest).filter(|_| !no_anchor(&lowest))].into_iter().flatten() {
                self.0.iter_mut().filter(|t| t.chunk == chunk).for_each(|t| t.pruned |= !t.deleted);
                pruned.push(chunk);
            }
        }
        if rules.fill && !matches!(rules.policy, PrunePolicy::Fifo | PrunePolicy::Window) {
            self.refill(&mut pruned, rules.budget, &was_pruned);
        }
        pruned
    }

    /// Undoes the pruning of chunks that fit the budget, from the last to the first, pairs together.
    fn refill(&mut self, pruned: &mut Vec<ChunkId>, budget: usize, was_pruned: &[bool]) {
        for chunk in pruned.clone().into_iter().rev() {
            let pair = self.partner(chunk).filter(|p| chunk.index == 0 && pruned.contains(p));
            let group: Vec<ChunkId> = [Some(chunk), pair].into_iter().flatten().collect();
            let is_missing = |anchor: ChunkId| !group.contains(&anchor) && pruned.contains(&anchor);
            let question = self.partner(chunk).filter(|_| chunk.role == Role::Assistant);
            let has_anchors = !is_missing(ChunkId { index: 0, ..chunk }) && !question.is_some_and(is_missing);
            let mut refilled = self.clone();
            let tokens = refilled.0.iter_mut().zip(was_pruned).filter(|(t, _)| group.contains(&t.chunk));
            tokens.for_each(|(t, was_pruned)| t.pruned = *was_pruned);
            if pruned.contains(&chunk) && has_anchors && refilled.live_indices().len() <= budget {
                *self = refilled;
                pruned.retain(|c| !group.contains(c));
            }
        }
    }

    /// Resurrects `hits` with their companions within the budget.
    pub fn resurrect(&mut self, hits: &[ChunkId], mut budget: usize) {
        for &hit in hits {
            let first = Some(ChunkId { index: 0, ..hit }).filter(|c| c.role != Role::System);
            let group = [Some(hit), first, self.partner(hit)];
            let is_pruned = |t: &&mut NaiveToken| t.pruned && !t.deleted && group.contains(&Some(t.chunk));
            let cost = self.0.iter_mut().filter(is_pruned).count();
            if cost <= budget && self.0.iter_mut().filter(is_pruned).any(|t| t.chunk == hit) {
                budget -= cost;
                self.0.iter_mut().filter(is_pruned).for_each(|t| t.pruned = false);
            }
        }
    }
}
