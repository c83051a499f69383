//! A conversation as a plain list of tokens, with every rule done the slow and obvious way. It shares no
//! code with the planners, so that the two cannot be wrong together.

use super::record::Tok;
use crate::brightness::{Magnitude, Sink};
use crate::prune::{Policy, PruneRules, Rank};
use crate::token::{ChunkId, Role, TurnId};

/// All tokens, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Twin(pub Vec<Tok>);

#[expect(missing_docs, reason = "each does what the planner of that name does")]
impl Twin {
    pub fn live(&self) -> Vec<usize> {
        (0..self.0.len()).filter(|&i| !self.0[i].dead && !self.0[i].gone).collect()
    }

    pub fn chunks(&self) -> Vec<ChunkId> {
        self.0.chunk_by(|a, b| a.chunk == b.chunk).map(|tokens| tokens[0].chunk).collect()
    }

    fn partner(&self, c: ChunkId) -> Option<ChunkId> {
        let said = |t: &&Tok| !t.gone || t.chunk.turn == c.turn;
        let mut turns: Vec<_> = self.0.iter().filter(said).map(|t| (t.chunk.turn, t.chunk.role)).collect();
        turns.dedup();
        let asks = |w: &&[(TurnId, Role)]| w[0].1 == Role::User && w[1].1 == Role::Assistant;
        let pair = turns.windows(2).filter(asks).find(|w| w.iter().any(|t| t.0 == c.turn))?;
        let opens = |o: &ChunkId| o.sentence == 0 && o.turn != c.turn && pair.contains(&(o.turn, o.role));
        self.chunks().into_iter().find(opens)
    }

    /// Magnitude voting.
    pub fn score(&mut self, row: &[f32], current: TurnId, rules: &Magnitude) {
        let (live, first) = (self.live(), rules.sink == Sink::First);
        let sink = if first { row[0] } else { row.iter().copied().fold(0.0, f32::max) };
        let slots = if first { row.len() } else { live.len() };
        let threshold = (1.0 - f64::from(sink)) / (slots as f64 - 1.0);
        let scored = |&slot: &usize| rules.score_current_turn || self.0[live[slot]].chunk.turn != current;
        for slot in (usize::from(first)..row.len()).filter(scored).collect::<Vec<_>>() {
            let (token, a) = (&mut self.0[live[slot]], f64::from(row[slot]));
            let gain = if a > threshold { (a / threshold).trunc() as f32 } else { -1.0 };
            token.brightness = (token.brightness + gain).min(10_000.0);
            (token.mass, token.votes) = (token.mass + a, token.votes + u64::from(a > threshold));
            token.looks += 1;
        }
    }

    fn rank(&self, chunk: ChunkId, policy: Policy) -> [f64; 3] {
        let Policy::Brightness { rank, .. } = policy else { return [0.0; 3] };
        let live = self.live().into_iter().filter(|&i| self.0[i].chunk == chunk);
        let (said, frame): (Vec<usize>, _) = live.partition(|&i| !self.0[i].frame);
        let counts = if said.is_empty() { frame } else { said };
        let mut lights: Vec<f64> = counts.iter().map(|&i| f64::from(self.0[i].brightness)).collect();
        lights.sort_by(|a, b| b.total_cmp(a));
        let mean = |lights: &[f64]| lights.iter().sum::<f64>() / lights.len() as f64;
        let (top4, all) = (mean(&lights[..lights.len().min(4)]), mean(&lights));
        let sum = |of: fn(&Tok) -> f64| self.0.iter().filter(|t| t.chunk == chunk).map(of).sum();
        let first = match rank {
            Rank::Peak => lights[0],
            Rank::Mean => all,
            Rank::Top4 => top4,
            Rank::Votes => sum(|t| t.votes as f64),
            Rank::Sum => sum(|t| t.mass),
            Rank::Share if sum(|t| t.looks as f64) == 0.0 => f64::INFINITY,
            Rank::Share => sum(|t| t.mass) / sum(|t| t.looks as f64),
        };
        [first, top4, all]
    }

    /// What leaves, in order.
    pub fn prune(&mut self, rules: &PruneRules) -> Vec<ChunkId> {
        let (live, mut left) = (self.live(), Vec::new());
        let was_dead: Vec<bool> = self.0.iter().map(|t| t.dead).collect();
        let edge = |slot: usize| slot < rules.sinks || slot + rules.recent >= live.len();
        let edges = (0..live.len()).filter(|&s| edge(s)).map(|s| self.0[live[s]].chunk);
        let running = self.0.iter().find(|t| Some(t.chunk.turn) == rules.current);
        let answer = running.filter(|t| t.chunk.role == Role::Assistant);
        let question = answer.and_then(|t| self.partner(t.chunk)).map(|q| q.turn);
        let held = |t: &&Tok| t.pinned || [rules.current, question].contains(&Some(t.chunk.turn));
        let prompt = self.0.iter().take_while(|t| t.chunk.role == Role::System);
        let held = self.0.iter().filter(held).chain(prompt).map(|t| t.chunk);
        let kept: Vec<ChunkId> = edges.chain(held).collect();
        let plain = |c: &ChunkId| c.sentence > 0 || rules.policy == Policy::Window;
        while self.live().len() > rules.budget {
            let mut lit: Vec<ChunkId> = self.live().iter().map(|&i| self.0[i].chunk).collect();
            lit.dedup();
            let lit_in = |turn: TurnId| lit.iter().filter(|o| o.turn == turn).count();
            let alone = |c: ChunkId| lit_in(c.turn) == 1;
            let pair = |c: ChunkId| self.partner(c).filter(|p| lit.contains(p));
            let answer = |c: ChunkId| self.partner(c).filter(|_| c.role == Role::User);
            let answered = |c: ChunkId| answer(c).is_some_and(|a| lit_in(a.turn) > 0);
            let free = |c: ChunkId| !kept.contains(&c) && lit.contains(&c);
            let lonely = |c: ChunkId| alone(c) && pair(c).map_or(!answered(c), |p| free(p) && alone(p));
            let may = |c: &&ChunkId| free(**c) && (plain(c) || lonely(**c));
            let rank = |c: &ChunkId| self.rank(*c, rules.policy);
            let order = |a: &&ChunkId, b: &&ChunkId| rank(a).partial_cmp(&rank(b)).expect("numbers");
            let Some(&victim) = lit.iter().filter(may).min_by(order) else { break };
            for chunk in [Some(victim), pair(victim).filter(|_| !plain(&victim))].into_iter().flatten() {
                self.0.iter_mut().filter(|t| t.chunk == chunk).for_each(|t| t.dead |= !t.gone);
                left.push(chunk);
            }
        }
        if rules.fill && !matches!(rules.policy, Policy::Fifo | Policy::Window) {
            self.fill(&mut left, rules.budget, &was_dead);
        }
        left
    }

    /// Lets stay what fits after all, from the last that left to the first, pairs together.
    fn fill(&mut self, left: &mut Vec<ChunkId>, budget: usize, was_dead: &[bool]) {
        for chunk in left.clone().into_iter().rev() {
            let pair = self.partner(chunk).filter(|p| chunk.sentence == 0 && left.contains(p));
            let group: Vec<ChunkId> = [Some(chunk), pair].into_iter().flatten().collect();
            let leaves = |anchor: ChunkId| !group.contains(&anchor) && left.contains(&anchor);
            let question = self.partner(chunk).filter(|_| chunk.role == Role::Assistant);
            let opened = !leaves(ChunkId { sentence: 0, ..chunk }) && !question.is_some_and(leaves);
            let mut back = self.clone();
            let theirs = back.0.iter_mut().zip(was_dead).filter(|(t, _)| group.contains(&t.chunk));
            theirs.for_each(|(t, was)| t.dead = *was);
            if left.contains(&chunk) && opened && back.live().len() <= budget {
                *self = back;
                left.retain(|c| !group.contains(c));
            }
        }
    }

    /// Brings back `hits` with what they are paired with, within the budget.
    pub fn resurrect(&mut self, hits: &[ChunkId], mut budget: usize) {
        for &hit in hits {
            let opening = Some(ChunkId { sentence: 0, ..hit }).filter(|c| c.role != Role::System);
            let group = [Some(hit), opening, self.partner(hit)];
            let waits = |t: &&mut Tok| t.dead && !t.gone && group.contains(&Some(t.chunk));
            let cost = self.0.iter_mut().filter(waits).count();
            if cost <= budget && self.0.iter_mut().filter(waits).any(|t| t.chunk == hit) {
                budget -= cost;
                self.0.iter_mut().filter(waits).for_each(|t| t.dead = false);
            }
        }
    }
}
