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

    /// The exchange of a turn: the question, if it has one, and then its steps, each a list of first chunks. A
    /// step is an answer, or a call with its results.
    fn exchange(&self, turn: TurnId) -> (Option<ChunkId>, Vec<Vec<ChunkId>>) {
        let counts = |t: &&NaiveToken| !t.deleted || t.chunk.turn == turn;
        let mut turns: Vec<_> = self.0.iter().filter(counts).map(|t| (t.chunk.turn, t.chunk.role)).collect();
        turns.dedup();
        let is_cut = |a: &(TurnId, Role), b: &(TurnId, Role)| match (a.1, b.1) {
            (_, Role::User | Role::System) | (Role::System, _) | (Role::Assistant, Role::Assistant) => true,
            (Role::User | Role::Tool | Role::Assistant, Role::Assistant | Role::Tool) => false,
        };
        let run = turns.chunk_by(|a, b| !is_cut(a, b)).find(|run| run.iter().any(|t| t.0 == turn));
        let (mut question, mut steps) = (None, Vec::<Vec<ChunkId>>::new());
        for &(turn, role) in run.unwrap_or_default() {
            let first = ChunkId::new(role, turn, 0);
            match role {
                Role::User => question = Some(first),
                Role::Tool if !steps.is_empty() => steps.last_mut().expect("not empty").push(first),
                _ => steps.push(vec![first]),
            }
        }
        (question, steps.into_iter().filter(|step| step[0].role != Role::System).collect())
    }

    /// The step of a turn; for a question its first one.
    fn step(&self, turn: TurnId) -> Vec<ChunkId> {
        let (_, steps) = self.exchange(turn);
        let own = steps.iter().find(|step| step.iter().any(|c| c.turn == turn));
        own.or(steps.first()).cloned().unwrap_or_default()
    }

    /// The chunks without which a chunk is not live: the first one of its turn, its question, and the others of
    /// its step.
    pub(super) fn anchors(&self, chunk: ChunkId) -> Vec<ChunkId> {
        let (question, _) = self.exchange(chunk.turn);
        let step = if chunk.role == Role::User { Vec::new() } else { self.step(chunk.turn) };
        let own = ChunkId { index: 0, ..chunk };
        step.into_iter().chain(question).chain([own]).collect()
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
        let answered: Vec<TurnId> = rules.current.map_or_else(Vec::new, |current| {
            let (question, steps) = self.exchange(current);
            let own = steps.iter().position(|step| step.iter().any(|c| c.turn == current));
            let before = own.filter(|&n| n > 0).map(|n| steps[n - 1].clone()).unwrap_or_default();
            question.into_iter().chain(before).map(|c| c.turn).collect()
        });
        let is_protected = |t: &&NaiveToken| {
            t.pinned || Some(t.chunk.turn) == rules.current || answered.contains(&t.chunk.turn)
        };
        let system_prompt = self.0.iter().take_while(|t| t.chunk.role == Role::System);
        let protected = self.0.iter().filter(is_protected).chain(system_prompt).map(|t| t.chunk);
        edges.chain(protected).collect()
    }

    /// Prunes by the rules; returns the pruned chunks in order.
    ///
    /// # Panics
    /// When a value is not a number.
    pub fn prune(&mut self, rules: &PruneRules) -> Vec<ChunkId> {
        let mut pruned: Vec<Vec<ChunkId>> = Vec::new();
        let was_pruned: Vec<bool> = self.0.iter().map(|t| t.pruned).collect();
        let protected = self.protected_chunks(rules);
        let no_anchor = |c: &ChunkId| c.index > 0 || rules.policy == PrunePolicy::Window;
        while self.live_indices().len() > rules.budget {
            let mut live: Vec<ChunkId> = self.live_indices().iter().map(|&i| self.0[i].chunk).collect();
            live.dedup();
            let live_in = |turn: TurnId| live.iter().filter(|c| c.turn == turn).count();
            let free = |c: &ChunkId| !protected.contains(c) && live.contains(c);
            let unit = |c: ChunkId| self.prune_unit(c, &live);
            // A turn whose first chunk is not live, but another one is, keeps the others of its step.
            let is_whole = |c: &ChunkId| live_in(c.turn) == usize::from(live.contains(c));
            let free_anchor = |c: ChunkId| {
                unit(c).is_some_and(|(unit, step)| {
                    unit.iter().all(|c| free(c) && live_in(c.turn) == 1) && step.iter().all(is_whole)
                })
            };
            let prunable = |c: &&ChunkId| free(c) && (no_anchor(c) || free_anchor(**c));
            let rank = |c: &ChunkId| self.rank_values(*c, rules.policy);
            let order = |a: &&ChunkId, b: &&ChunkId| rank(a).partial_cmp(&rank(b)).expect("numbers");
            let Some(&lowest) = live.iter().filter(prunable).min_by(order) else { break };
            let together = unit(lowest).filter(|_| !no_anchor(&lowest)).map(|(unit, _)| unit);
            let together = together.unwrap_or_else(|| vec![lowest]);
            self.0.iter_mut().filter(|t| together.contains(&t.chunk)).for_each(|t| t.pruned |= !t.deleted);
            pruned.push(together);
        }
        if rules.fill && !matches!(rules.policy, PrunePolicy::Fifo | PrunePolicy::Window) {
            self.refill(&mut pruned, rules.budget, &was_pruned);
        }
        pruned.concat()
    }

    /// The live first chunks that are pruned with a first chunk, itself first, and its step. None for a question
    /// with more than one live step.
    fn prune_unit(&self, chunk: ChunkId, live: &[ChunkId]) -> Option<(Vec<ChunkId>, Vec<ChunkId>)> {
        let (question, steps) = self.exchange(chunk.turn);
        let is_live = |step: &&Vec<ChunkId>| step.iter().any(|c| live.iter().any(|l| l.turn == c.turn));
        let live_steps: Vec<Vec<ChunkId>> = steps.iter().filter(is_live).cloned().collect();
        let step = match question == Some(chunk) {
            true if live_steps.len() > 1 => return None,
            true => live_steps.first().cloned().unwrap_or_default(),
            false => steps.iter().find(|step| step.contains(&chunk)).cloned().unwrap_or_default(),
        };
        let question = question.filter(|_| live_steps.len() < 2);
        let others = question.into_iter().chain(step.clone()).filter(|c| *c != chunk && live.contains(c));
        Some((std::iter::once(chunk).chain(others).collect(), step))
    }

    /// Undoes the pruning of chunks that fit the budget, from the last to the first; what was pruned together
    /// stays together.
    fn refill(&mut self, pruned: &mut Vec<Vec<ChunkId>>, budget: usize, was_pruned: &[bool]) {
        for unit in pruned.clone().into_iter().rev() {
            let is_missing = |c: &ChunkId| !unit.contains(c) && pruned.iter().any(|unit| unit.contains(c));
            let has_anchors = unit.iter().all(|&c| !self.anchors(c).iter().any(is_missing));
            let mut refilled = self.clone();
            let tokens = refilled.0.iter_mut().zip(was_pruned).filter(|(t, _)| unit.contains(&t.chunk));
            tokens.for_each(|(t, was_pruned)| t.pruned = *was_pruned);
            if has_anchors && refilled.live_indices().len() <= budget {
                *self = refilled;
                pruned.retain(|other| *other != unit);
            }
        }
    }

    /// Resurrects `hits` with their companions within the budget.
    pub fn resurrect(&mut self, hits: &[ChunkId], mut budget: usize) {
        for &hit in hits {
            let mut group = vec![hit];
            if hit.role != Role::System {
                group.extend(self.anchors(hit));
                group.extend(self.step(hit.turn));
            }
            let is_pruned = |t: &&mut NaiveToken| t.pruned && !t.deleted && group.contains(&t.chunk);
            let cost = self.0.iter_mut().filter(is_pruned).count();
            if cost <= budget && self.0.iter_mut().filter(is_pruned).any(|t| t.chunk == hit) {
                budget -= cost;
                self.0.iter_mut().filter(is_pruned).for_each(|t| t.pruned = false);
            }
        }
    }
}
