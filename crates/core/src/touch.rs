//! What a change reaches: the bodies that must be in memory before it, and what a store must write after it.

use crate::change::{Change, Score};
use crate::timeline::Timeline;
use crate::token::{ChunkId, TurnId};
use std::collections::BTreeSet;

/// What a store writes again after a change: places in the timeline's list of chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Where tokens have changed.
    pub bodies: BTreeSet<usize>,
    /// Where names, counts, pins or turns have changed; one behind the list where only a turn began.
    pub heads: BTreeSet<usize>,
}

impl Timeline {
    /// The chunks whose tokens `change` needs in memory and that are away.
    #[must_use]
    pub fn away(&self, change: &Change) -> Vec<ChunkId> {
        let mut needed = BTreeSet::new();
        self.needs(change, &mut needed);
        let away = |&place: &usize| self.chunks[place].len > 0 && self.chunks[place].here().is_none();
        needed.into_iter().filter(away).map(|place| self.chunks[place].id).collect()
    }

    fn needs(&self, change: &Change, out: &mut BTreeSet<usize>) {
        let mut name = |id| out.extend(self.find(id));
        match change {
            Change::Append(_) => out.extend(self.chunks.len().checked_sub(1)),
            Change::Score(score) => out.extend(self.scored(score)),
            Change::Prune(leaves) => leaves.iter().for_each(|l| name(l.chunk)),
            Change::Resurrect(returns) => returns.iter().for_each(|r| name(r.chunk)),
            Change::Withdraw { parts, .. } | Change::Restore(parts) => {
                parts.iter().for_each(|p| name(p.chunk));
            }
            Change::Pin { .. } => {}
            Change::Split { chunk, .. } => name(*chunk),
            Change::Merge { chunk, .. } => {
                let place = self.find(*chunk);
                out.extend(place);
                let before = place.into_iter().flat_map(|p| (0..p).rev());
                out.extend(before.into_iter().find(|&p| self.chunks[p].len > 0));
            }
            Change::Batch(changes) => changes.iter().for_each(|c| self.needs(c, out)),
        }
    }

    /// What a store must write again, given the state that `change` has led to. Rows that a change took off the
    /// end of the list are not in it: who compares the lists' lengths sees them.
    #[must_use]
    pub fn touched(&self, change: &Change) -> Touched {
        let mut touched = Touched::default();
        self.touches(change, &mut touched);
        touched
    }

    fn touches(&self, change: &Change, out: &mut Touched) {
        let both = |out: &mut Touched, id: ChunkId| {
            out.bodies.extend(self.find(id));
            out.heads.extend(self.find(id));
        };
        match change {
            Change::Append(append) => {
                if let Some(turn) = self.turn_index(append.turn) {
                    out.heads.insert(self.turns[turn].first as usize);
                }
                let ids = append.tokens.iter().map(|t| ChunkId::new(append.role, append.turn, t.sentence));
                let names: BTreeSet<_> = ids.collect();
                names.into_iter().for_each(|id| both(out, id));
            }
            Change::Score(score) => {
                for place in self.scored(score) {
                    out.bodies.insert(place);
                    // The sum of a dead chunk stands in its head.
                    if self.chunks[place].live == 0 {
                        out.heads.insert(place);
                    }
                }
            }
            Change::Prune(leaves) => leaves.iter().for_each(|l| both(out, l.chunk)),
            Change::Resurrect(returns) => returns.iter().for_each(|r| both(out, r.chunk)),
            Change::Withdraw { parts, .. } | Change::Restore(parts) => {
                parts.iter().for_each(|p| both(out, p.chunk));
            }
            Change::Pin { chunk, .. } => out.heads.extend(self.find(*chunk)),
            // Which chunk took or gave tokens depends on what came before in a batch: any of the turn.
            Change::Merge { chunk, .. } | Change::Split { chunk, .. } => self.turn_touched(chunk.turn, out),
            Change::Batch(changes) => changes.iter().for_each(|c| self.touches(c, out)),
        }
    }

    fn turn_touched(&self, turn: TurnId, out: &mut Touched) {
        let places = self.turn_index(turn).map_or(0..0, |t| self.places_of_turn(t));
        out.heads.extend(places.clone());
        // What is away has not changed.
        out.bodies.extend(places.filter(|&p| self.chunks[p].len == 0 || self.chunks[p].here().is_some()));
    }

    /// The places of the chunks that a score speaks of.
    fn scored(&self, score: &Score) -> BTreeSet<usize> {
        let mut places: BTreeSet<_> = score.tallies.iter().filter_map(|(id, _)| self.find(*id)).collect();
        for run in &score.runs {
            places.extend(self.stretch(run.start, run.brightness.len()).map(|(place, _)| place));
        }
        places
    }
}
