//! A state told anew: changes that lead from nothing to it, for when the log of those that really did is lost.

use crate::change::{
    Append, Change, DeleteReason, Extent, Leave, NewToken, Part, Score, Tally, TallyChange, WhyLeft,
};
use crate::timeline::{Chunk, Timeline};
use crate::token::Flags;

impl Timeline {
    /// Changes that, done to a new timeline, lead to this one: the same state hash, though not the same story.
    ///
    /// # Panics
    /// When the tokens of a chunk are away.
    #[must_use]
    pub fn retell(&self) -> Vec<Change> {
        let mut changes = Vec::new();
        for turn in 0..self.turns.len() {
            self.retell_turn(turn, &mut changes);
        }
        let mut score = Score::default();
        let (mut leaves, mut gone) = (Vec::new(), Vec::new());
        for chunk in self.chunks() {
            let Tally { votes, mass, looks } = chunk.tally();
            if [votes, mass, looks] != [0; 3] {
                let [votes, mass, looks] = [votes, mass, looks].map(|n| i64::try_from(n).unwrap_or(i64::MAX));
                score.tallies.push((chunk.id(), TallyChange { votes, mass, looks }));
            }
            if chunk.is_pinned() {
                changes.push(Change::Pin { chunk: chunk.id(), pinned: true });
            }
            let runs = |flag: Flags| Extent::Runs(chunk.runs(|f| f.has(flag)).collect());
            if chunk.live_len() < chunk.len() {
                // A token can be both; it can be withdrawn when it is dead, not the other way round.
                leaves.push(Leave { chunk: chunk.id(), extent: runs(Flags::DEAD), why: WhyLeft::Before });
                gone.push(Part { chunk: chunk.id(), extent: runs(Flags::WITHDRAWN) });
            }
        }
        leaves.retain(|l| l.extent != Extent::Runs(Vec::new()));
        gone.retain(|p| p.extent != Extent::Runs(Vec::new()));
        changes.extend((!score.tallies.is_empty()).then_some(Change::Score(score)));
        changes.extend((!leaves.is_empty()).then_some(Change::Prune(leaves)));
        if !gone.is_empty() {
            changes.push(Change::Withdraw { parts: gone, reason: DeleteReason::default() });
        }
        changes
    }

    /// A turn as it was spoken. A name that was merged away is made by cutting there and joining again.
    fn retell_turn(&self, turn: usize, changes: &mut Vec<Change>) {
        let rows = &self.chunks[self.places_of_turn(turn)];
        let (id, role) = (self.turns[turn].id, self.turns[turn].role);
        let at = rows.first().map_or(self.next_position(), |c| c.start);
        let at = if rows.is_empty() { self.start_of_next(turn).unwrap_or(at) } else { at };
        // What follows a name without tokens is first said in the chunk before that name, and then cut off.
        let gap = rows.iter().position(|c| c.len == 0).unwrap_or(rows.len());
        let joined = gap.checked_sub(1).map_or(0, |last| rows[last].id.sentence);
        let own = rows[..gap].iter().flat_map(|c| said(c, c.id.sentence));
        let tokens = own.chain(rows[gap..].iter().flat_map(|c| said(c, joined))).collect();
        changes.push(Change::Append(Append { at, turn: id, role, tokens }));
        let tally = Tally::default();
        for (i, row) in rows.iter().enumerate().skip(gap) {
            let Some(before) = rows[..i].iter().rev().find(|c| c.len > 0) else { continue };
            // For a name without tokens any cut will do; behind the first token there always is one.
            let at = if row.len == 0 { before.start.plus(1) } else { row.start };
            changes.push(Change::Split { chunk: before.id, at, sentence: row.id.sentence, tally });
            if row.len == 0 {
                changes.push(Change::Merge { chunk: row.id, frees_name: false });
            }
        }
    }

    /// Where a turn without chunks stands.
    fn start_of_next(&self, turn: usize) -> Option<crate::token::Position> {
        self.chunks.get(self.turns[turn].first as usize).map(|c| c.start)
    }
}

/// The tokens of a chunk as they would be said, in the chunk of that number.
fn said(chunk: &Chunk, sentence: u32) -> impl Iterator<Item = NewToken> {
    let body = chunk.here();
    (0..chunk.len as usize).map(move |i| {
        let body = body.unwrap_or_else(|| panic!("the tokens of {} are away in the store", chunk.id));
        NewToken {
            id: body.ids[i],
            text: body.text(i..i + 1).to_owned(),
            sentence,
            brightness: body.brightness[i],
            voice: body.flags[i].voice(),
        }
    })
}
