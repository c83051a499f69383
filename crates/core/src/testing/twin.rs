//! A conversation as a plain list of tokens, with every rule done the slow and obvious way. It shares no
//! code with the planners, so that the two cannot be wrong together.

use crate::prune::{Policy, PruneRules, Rank};
use crate::token::{ChunkId, Role, TurnId};

/// One token.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the fields are those of the founding documents' token record")]
pub struct Tok {
    pub chunk: ChunkId,
    pub brightness: f32,
    pub votes: u64,
    pub mass: f64,
    pub dead: bool,
    pub gone: bool,
    pub pinned: bool,
}

/// All tokens, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Twin(pub Vec<Tok>);

#[expect(missing_docs, reason = "each does what the planner of that name does")]
impl Twin {
    pub fn live(&self) -> Vec<usize> {
        (0..self.0.len()).filter(|&i| !self.0[i].dead && !self.0[i].gone).collect()
    }

    pub fn chunks(&self) -> Vec<ChunkId> {
        let mut all: Vec<_> = self.0.iter().map(|t| t.chunk).collect();
        all.dedup();
        all
    }

    fn of(&self, chunk: ChunkId, alive: bool) -> Vec<&Tok> {
        self.0.iter().filter(|t| t.chunk == chunk && !(alive && (t.dead || t.gone))).collect()
    }

    pub fn each(&mut self, chunk: ChunkId, change: impl Fn(&mut Tok)) {
        self.0.iter_mut().filter(|t| t.chunk == chunk).for_each(change);
    }

    fn partner(&self, chunk: ChunkId) -> Option<ChunkId> {
        let turn = match chunk.role {
            Role::User => chunk.turn.0 + 1,
            _ => chunk.turn.0.checked_sub(1)?,
        };
        let other = if chunk.role == Role::User { Role::Assistant } else { Role::User };
        let id = ChunkId::new(other, TurnId(turn), 0);
        (chunk.role != Role::System && !self.of(id, false).is_empty()).then_some(id)
    }

    /// Magnitude voting with slot 0 as the sink; the running turn is not scored.
    pub fn score(&mut self, row: &[f32], current: TurnId) {
        let live = self.live();
        let threshold = (1.0 - f64::from(row[0])) / (row.len() as f64 - 1.0);
        for (slot, &a) in row.iter().enumerate().skip(1) {
            let token = &mut self.0[live[slot]];
            if token.chunk.turn == current {
                continue;
            }
            token.mass += f64::from(a);
            if f64::from(a) > threshold {
                token.votes += 1;
                token.brightness =
                    (token.brightness + (f64::from(a) / threshold).trunc() as f32).min(10_000.0);
            } else {
                token.brightness -= 1.0;
            }
        }
    }

    fn value(&self, chunk: ChunkId, rank: Rank) -> f64 {
        let mut lights: Vec<f64> = self.of(chunk, true).iter().map(|t| f64::from(t.brightness)).collect();
        let mean = lights.iter().sum::<f64>() / lights.len() as f64;
        lights.sort_by(|a, b| b.total_cmp(a));
        match rank {
            Rank::Peak => lights[0],
            Rank::Mean => mean,
            Rank::Top4 => lights.iter().take(4).sum::<f64>() / lights.len().min(4) as f64,
            Rank::Votes => self.of(chunk, false).iter().map(|t| t.votes as f64).sum(),
            Rank::Sum => self.of(chunk, false).iter().map(|t| t.mass).sum(),
        }
    }

    /// What leaves, in order.
    pub fn prune(&mut self, rules: &PruneRules) -> Vec<ChunkId> {
        let (live, mut left) = (self.live(), Vec::new());
        let edge = |slot: usize| slot < rules.sinks || slot + rules.recent >= live.len();
        let mut kept: Vec<ChunkId> =
            (0..live.len()).filter(|&s| edge(s)).map(|s| self.0[live[s]].chunk).collect();
        let running = |t: u32| Some(TurnId(t)) == rules.current;
        let asks = |c: ChunkId| c.role == Role::User && self.partner(c).is_some_and(|p| running(p.turn.0));
        kept.extend(
            self.0.iter().filter(|t| t.pinned || running(t.chunk.turn.0) || asks(t.chunk)).map(|t| t.chunk),
        );
        while self.live().len() > rules.budget {
            let alone = |c: ChunkId| {
                self.chunks().iter().filter(|o| o.turn == c.turn && !self.of(**o, true).is_empty()).count()
                    == 1
            };
            let live_partner = |c| self.partner(c).filter(|p| !self.of(*p, true).is_empty());
            let answered = |c: ChunkId| {
                let next = |t: &ChunkId| t.turn.0 == c.turn.0 + 1 && t.role == Role::Assistant;
                c.role == Role::User && self.live().iter().any(|&i| next(&self.0[i].chunk))
            };
            let free = |c: ChunkId| !kept.contains(&c) && !self.of(c, true).is_empty();
            let may = |c: &ChunkId| {
                let anchored = c.sentence == 0 && rules.policy != Policy::Window;
                free(*c)
                    && (!anchored
                        || alone(*c) && live_partner(*c).map_or(!answered(*c), |p| free(p) && alone(p)))
            };
            let rank = |c: &ChunkId| match rules.policy {
                Policy::Brightness { rank, .. } => [rank, Rank::Top4, Rank::Mean].map(|r| self.value(*c, r)),
                _ => [0.0; 3],
            };
            let dimmer = |a: &ChunkId, b: &ChunkId| rank(a).partial_cmp(&rank(b)).expect("numbers");
            let Some(victim) = self.chunks().into_iter().filter(may).min_by(dimmer) else { break };
            let pair =
                live_partner(victim).filter(|_| victim.sentence == 0 && rules.policy != Policy::Window);
            for chunk in [Some(victim), pair].into_iter().flatten() {
                self.0.iter_mut().filter(|t| t.chunk == chunk && !t.gone).for_each(|t| t.dead = true);
                left.push(chunk);
            }
        }
        left
    }

    /// Brings back `hits` with what they are paired with, within the budget.
    pub fn resurrect(&mut self, hits: &[ChunkId], mut budget: usize) {
        for &hit in hits {
            let opens = ChunkId { sentence: 0, ..hit };
            let mut group = vec![hit, opens];
            group.extend(self.partner(hit));
            let waits = |t: &Tok| t.dead && !t.gone;
            if !self.0.iter().any(|t| t.chunk == hit && waits(t)) {
                continue;
            }
            let cost = self.0.iter().filter(|t| group.contains(&t.chunk) && waits(t)).count();
            if cost <= budget {
                budget -= cost;
                self.0
                    .iter_mut()
                    .filter(|t| group.contains(&t.chunk) && waits(t))
                    .for_each(|t| t.dead = false);
            }
        }
    }
}
