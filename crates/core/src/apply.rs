//! How a timeline changes: `apply` takes a [`Change`], checks all of it, does all of it, and returns what
//! would undo it. An error leaves the timeline as it was.

use crate::change::{
    Append, Change, Extent, Leave, Part, Return, Run, Score, Scored, Tally, TallyChange, WhyLeft, WhyReturned,
};
use crate::timeline::{Chunk, Timeline, Turn};
use crate::token::{ChunkId, Flags, Position, Role, TurnId};
use std::collections::BTreeSet;

/// Why a change does not fit a timeline.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// The tokens do not stand at the end.
    #[error("tokens for position {} cannot be appended: the next position is {}", .got.0, .next.0)]
    NotNext {
        /// Where they wanted to stand.
        got: Position,
        /// Where the timeline ends.
        next: Position,
    },
    /// The turn is neither the last nor a new one.
    #[error("turn {} ({}) cannot be continued: the last turn is {last}", .turn.0, .role.name())]
    NotLastTurn {
        /// The turn asked for.
        turn: TurnId,
        /// Its role.
        role: Role,
        /// The last turn and its role.
        last: String,
    },
    /// The chunk is neither the turn's last nor a new one.
    #[error("{chunk} cannot be continued: a later chunk of its turn exists already")]
    NotLastChunk {
        /// The chunk asked for.
        chunk: ChunkId,
    },
    /// No such chunk.
    #[error("there is no chunk {0}")]
    NoChunk(ChunkId),
    /// The runs leave the chunk, overlap or are out of order.
    #[error("the tokens named for {0} are not tokens of it, in order")]
    BadRuns(ChunkId),
    /// One change names a chunk once.
    #[error("{0} is named twice in one change")]
    Twice(ChunkId),
    /// A token is not in the state that the change starts from.
    #[error("{chunk} cannot be {verb}: the token at {} is {state}", .at.0)]
    WrongState {
        /// The chunk.
        chunk: ChunkId,
        /// What was to be done.
        verb: &'static str,
        /// The first token that does not fit.
        at: Position,
        /// What it is.
        state: &'static str,
    },
    /// The chunk is pinned already, or is not.
    #[error("{0} is {state} already", state = if *.1 { "pinned" } else { "not pinned" })]
    PinnedAlready(ChunkId, bool),
    /// Nothing earlier in its turn to merge with.
    #[error("{0} cannot be merged: no earlier chunk in its turn is {state} like it", state = if *.1 { "pinned" } else { "not pinned" })]
    NothingToMerge(ChunkId, bool),
    /// A split needs a token inside the chunk, a free name behind it and a tally that it can give.
    #[error("{chunk} cannot be split at {}: {why}", .at.0)]
    BadSplit {
        /// The chunk.
        chunk: ChunkId,
        /// Where.
        at: Position,
        /// What is wrong.
        why: &'static str,
    },
    /// A brightness that is no number, or for a token that does not exist.
    #[error("the score for position {} is no number, or no token stands there", .0.0)]
    BadScore(Position),
    /// A tally would fall below zero.
    #[error("the tally of {0} cannot be changed like that")]
    BadTally(ChunkId),
    /// More than 4 GiB of text, or more chunks in a turn than a number holds.
    #[error("one timeline holds at most 4 GiB of text and 2³² chunks a turn")]
    Full,
}

impl Timeline {
    /// Does `change`, all of it, and returns what undoes it.
    ///
    /// # Errors
    /// When the change does not fit this timeline, which is then as it was before.
    pub fn apply(&mut self, change: &Change) -> Result<Change, ApplyError> {
        match change {
            Change::Append(append) => self.append(append),
            Change::Score(score) => self.score(score),
            Change::Prune(leaves) => self.prune(leaves),
            Change::Resurrect(returns) => self.resurrect(returns),
            Change::Pin { chunk, pinned } => self.pin(*chunk, *pinned),
            Change::Withdraw(parts) => self.withdraw(parts, true),
            Change::Restore(parts) => self.withdraw(parts, false),
            Change::Merge { chunk } => self.merge(*chunk),
            Change::Split { chunk, at, sentence, tally } => self.split(*chunk, *at, *sentence, *tally),
            Change::Batch(changes) => self.batch(changes),
        }
    }

    fn batch(&mut self, changes: &[Change]) -> Result<Change, ApplyError> {
        let mut undo = Vec::with_capacity(changes.len());
        for change in changes {
            match self.apply(change) {
                Ok(inverse) => undo.push(inverse),
                Err(error) => {
                    for inverse in undo.iter().rev() {
                        self.apply(inverse).expect("what was just done can be undone");
                    }
                    return Err(error);
                }
            }
        }
        undo.reverse();
        Ok(Change::Batch(undo))
    }

    fn append(&mut self, append: &Append) -> Result<Change, ApplyError> {
        self.check_append(append)?;
        if self.turns.last().is_none_or(|t| t.id < append.turn) {
            self.turns.push(Turn { id: append.turn, role: append.role, first: self.chunks.len() });
        }
        let first = self.turns.last().expect("a turn is open").first;
        let mut touched: Vec<Run> = Vec::new();
        for token in &append.tokens {
            let place = first + token.sentence as usize;
            let fresh = self.chunks.len() <= place;
            while self.chunks.len() <= place {
                self.open_chunk(append.turn, append.role, (self.chunks.len() - first) as u32);
            }
            match touched.last_mut() {
                Some(run) if !fresh => run.len += 1,
                _ => touched.push(Run { start: self.next_position(), len: 1 }),
            }
            self.push_token(token);
            self.chunks[place].len += 1;
            self.chunks[place].live += 1;
        }
        let mut parts = Vec::with_capacity(touched.len());
        for run in touched {
            let chunk = self.chunk_of(run.start).expect("just appended");
            let (place, chunk) = (chunk.index(), chunk.id());
            self.live.add(place, i64::from(run.len));
            parts.push(Part { chunk, extent: Extent::Runs(vec![run]) });
        }
        Ok(Change::Withdraw(parts))
    }

    fn check_append(&self, append: &Append) -> Result<(), ApplyError> {
        if append.at != self.next_position() {
            return Err(ApplyError::NotNext { got: append.at, next: self.next_position() });
        }
        let mut sentence = 0;
        if let Some(last) = self.turns.last() {
            if append.turn < last.id || (append.turn == last.id && append.role != last.role) {
                let last = format!("{} ({})", last.id.0, last.role.name());
                return Err(ApplyError::NotLastTurn { turn: append.turn, role: append.role, last });
            }
            if append.turn == last.id {
                sentence = (self.chunks.len() - last.first).saturating_sub(1) as u32;
                // A chunk that was merged away is not reopened: its name is spent.
                if self.chunks.len() > last.first && self.chunks[self.chunks.len() - 1].len == 0 {
                    sentence += 1;
                }
            }
        }
        for token in &append.tokens {
            if token.sentence < sentence {
                let chunk = ChunkId::new(append.role, append.turn, token.sentence);
                return Err(ApplyError::NotLastChunk { chunk });
            }
            sentence = token.sentence;
            if !token.brightness.0.is_finite() {
                return Err(ApplyError::BadScore(append.at));
            }
        }
        let bytes: usize = append.tokens.iter().map(|t| t.text.len()).sum();
        let opened = append.tokens.last().map_or(0, |t| t.sentence as usize);
        if u32::try_from(self.text.len() + bytes).is_err() || opened > MAX_CHUNKS_PER_TURN {
            return Err(ApplyError::Full);
        }
        Ok(())
    }

    fn open_chunk(&mut self, turn: TurnId, role: Role, sentence: u32) {
        let id = ChunkId::new(role, turn, sentence);
        let start = self.next_position();
        grow(&mut self.chunks, 1);
        self.chunks.push(Chunk {
            id,
            pinned: false,
            start,
            len: 0,
            live: 0,
            withdrawn: 0,
            tally: Tally::default(),
        });
        self.live.push();
    }

    fn push_token(&mut self, token: &crate::change::NewToken) {
        grow(&mut self.ids, 1);
        grow(&mut self.brightness, 1);
        grow(&mut self.flags, 1);
        grow(&mut self.ends, 1);
        if self.text.capacity() - self.text.len() < token.text.len() {
            self.text.reserve_exact(self.text.len() / 8 + token.text.len() + 4096);
        }
        self.ids.push(token.id);
        self.brightness.push(token.brightness);
        self.flags.push(Flags::default().with(Flags::TOOL, token.tool));
        self.text.push_str(&token.text);
        self.ends.push(self.text.len() as u32);
    }

    fn score(&mut self, score: &Score) -> Result<Change, ApplyError> {
        for run in &score.runs {
            let end = run.start.0.checked_add(run.brightness.len() as u64);
            if end.is_none_or(|end| end > self.next_position().0) {
                return Err(ApplyError::BadScore(run.start));
            }
            if let Some(bad) = run.brightness.iter().position(|b| !b.0.is_finite()) {
                return Err(ApplyError::BadScore(run.start.plus(bad)));
            }
        }
        for (n, &(chunk, change)) in score.tallies.iter().enumerate() {
            if let Err(error) = self.tally(chunk, change) {
                for &(chunk, change) in &score.tallies[..n] {
                    self.tally(chunk, change.inverse()).expect("what was just done can be undone");
                }
                return Err(error);
            }
        }
        let mut undo = Score { runs: Vec::with_capacity(score.runs.len()), tallies: Vec::new() };
        for run in &score.runs {
            let range = Run { start: run.start, len: run.brightness.len() as u32 }.range();
            undo.runs.push(Scored { start: run.start, brightness: self.brightness[range.clone()].to_vec() });
            self.brightness[range].copy_from_slice(&run.brightness);
        }
        // Runs may overlap; undone in reverse, the oldest value is the last word.
        undo.runs.reverse();
        undo.tallies = score.tallies.iter().map(|&(c, t): &(_, TallyChange)| (c, t.inverse())).collect();
        Ok(Change::Score(undo))
    }

    fn tally(&mut self, chunk: ChunkId, change: TallyChange) -> Result<(), ApplyError> {
        let place = self.place(chunk)?;
        let new = self.chunks[place].tally.plus(change).ok_or(ApplyError::BadTally(chunk))?;
        self.chunks[place].tally = new;
        Ok(())
    }

    fn prune(&mut self, leaves: &[Leave]) -> Result<Change, ApplyError> {
        let parts: Vec<_> = leaves.iter().map(|l| (l.chunk, &l.extent)).collect();
        let runs = self.flag(&parts, Flags::DEAD, true, "pruned")?;
        let undo = leaves.iter().zip(runs).rev().map(|(leave, runs)| Return {
            chunk: leave.chunk,
            extent: Extent::Runs(runs),
            brightness: None,
            why: WhyReturned::Undo,
        });
        Ok(Change::Resurrect(undo.collect()))
    }

    fn resurrect(&mut self, returns: &[Return]) -> Result<Change, ApplyError> {
        if let Some(bad) = returns.iter().find(|r| r.brightness.is_some_and(|b| !b.0.is_finite())) {
            return Err(ApplyError::BadScore(self.chunk(bad.chunk).map_or(Position(0), |c| c.start())));
        }
        let parts: Vec<_> = returns.iter().map(|r| (r.chunk, &r.extent)).collect();
        let runs = self.flag(&parts, Flags::DEAD, false, "resurrected")?;
        let mut old = Score::default();
        for (back, runs) in returns.iter().zip(&runs) {
            let Some(brightness) = back.brightness else { continue };
            for run in runs {
                old.runs.push(Scored { start: run.start, brightness: self.brightness(*run).to_vec() });
                self.brightness[run.range()].fill(brightness);
            }
        }
        let leave = |(back, runs): (&Return, _)| Leave {
            chunk: back.chunk,
            extent: Extent::Runs(runs),
            why: WhyLeft::Undo,
        };
        let prune = Change::Prune(returns.iter().zip(runs).rev().map(leave).collect());
        if old.runs.is_empty() { Ok(prune) } else { Ok(Change::Batch(vec![Change::Score(old), prune])) }
    }

    fn withdraw(&mut self, parts: &[Part], on: bool) -> Result<Change, ApplyError> {
        let asked: Vec<_> = parts.iter().map(|p| (p.chunk, &p.extent)).collect();
        let runs = self.flag(&asked, Flags::WITHDRAWN, on, if on { "withdrawn" } else { "restored" })?;
        let undo =
            parts.iter().zip(runs).rev().map(|(p, r)| Part { chunk: p.chunk, extent: Extent::Runs(r) });
        Ok(if on { Change::Restore(undo.collect()) } else { Change::Withdraw(undo.collect()) })
    }

    /// Sets or clears `flag` on tokens that have it not, or have it; returns which tokens those were, by part.
    /// Checks everything before it touches anything.
    fn flag(
        &mut self,
        parts: &[(ChunkId, &Extent)],
        flag: Flags,
        on: bool,
        verb: &'static str,
    ) -> Result<Vec<Vec<Run>>, ApplyError> {
        let fits =
            move |f: Flags| f.has(flag) != on && (flag == Flags::WITHDRAWN || !f.has(Flags::WITHDRAWN));
        let mut all = Vec::with_capacity(parts.len());
        let mut named = BTreeSet::new();
        for &(id, extent) in parts {
            if !named.insert(id) {
                return Err(ApplyError::Twice(id));
            }
            let chunk = self.chunk_at(self.place(id)?);
            let runs = match extent {
                Extent::Whole => chunk.runs(fits).collect(),
                Extent::Runs(runs) => runs.clone(),
            };
            let mut next = chunk.start();
            for run in &runs {
                if run.start < next || run.start.0 + u64::from(run.len) > chunk.start().0 + chunk.len() as u64
                {
                    return Err(ApplyError::BadRuns(id));
                }
                next = run.start.plus(run.len as usize);
                if let Some(at) = run.positions().find(|p| !fits(self.flags[p.index()])) {
                    let state = describe(self.flags[at.index()]);
                    return Err(ApplyError::WrongState { chunk: id, verb, at, state });
                }
            }
            if runs.iter().all(|r| r.len == 0) && *extent == Extent::Whole {
                let state = describe(self.flags[chunk.start().index()]);
                return Err(ApplyError::WrongState { chunk: id, verb, at: chunk.start(), state });
            }
            all.push(runs);
        }
        for (&(id, _), runs) in parts.iter().zip(&all) {
            let place = self.place(id)?;
            for range in runs.iter().map(|r| r.range()) {
                self.flags[range].iter_mut().for_each(|f| *f = f.with(flag, on));
            }
            self.recount(place);
        }
        Ok(all)
    }

    /// Counts a chunk's live and withdrawn tokens anew.
    fn recount(&mut self, place: usize) {
        let range = self.chunk_at(place).run().range();
        let live = self.flags[range.clone()].iter().filter(|f| f.is_live()).count() as u32;
        let withdrawn = self.flags[range].iter().filter(|f| f.has(Flags::WITHDRAWN)).count() as u32;
        let chunk = &mut self.chunks[place];
        let delta = i64::from(live) - i64::from(chunk.live);
        (chunk.live, chunk.withdrawn) = (live, withdrawn);
        if delta != 0 {
            self.live.add(place, delta);
        }
    }

    fn pin(&mut self, chunk: ChunkId, pinned: bool) -> Result<Change, ApplyError> {
        let place = self.place(chunk)?;
        if self.chunks[place].pinned == pinned {
            return Err(ApplyError::PinnedAlready(chunk, pinned));
        }
        self.chunks[place].pinned = pinned;
        Ok(Change::Pin { chunk, pinned: !pinned })
    }

    fn merge(&mut self, chunk: ChunkId) -> Result<Change, ApplyError> {
        let place = self.place(chunk)?;
        let gone = self.chunks[place];
        let first = place - chunk.sentence as usize;
        let into = (first..place)
            .rev()
            .find(|&i| self.chunks[i].len > 0)
            .filter(|&i| self.chunks[i].pinned == gone.pinned)
            .ok_or(ApplyError::NothingToMerge(chunk, gone.pinned))?;
        let kept = &mut self.chunks[into];
        kept.len += gone.len;
        kept.tally = kept.tally.join(gone.tally);
        let kept = kept.id;
        let empty = &mut self.chunks[place];
        (empty.len, empty.tally, empty.pinned) = (0, Tally::default(), false);
        self.recount(into);
        self.recount(place);
        Ok(Change::Split { chunk: kept, at: gone.start, sentence: chunk.sentence, tally: gone.tally })
    }

    fn split(
        &mut self,
        chunk: ChunkId,
        at: Position,
        sentence: u32,
        tally: Tally,
    ) -> Result<Change, ApplyError> {
        let bad = |why| ApplyError::BadSplit { chunk, at, why };
        let place = self.place(chunk)?;
        let head = self.chunks[place];
        let kept = at.0.checked_sub(head.start.0).filter(|&n| n > 0 && n < u64::from(head.len));
        let kept = kept.ok_or_else(|| bad("no token inside the chunk stands there"))? as u32;
        let rest =
            head.tally.without(tally).ok_or_else(|| bad("it has gathered less than the tail is to take"))?;
        let first = place - chunk.sentence as usize;
        let target = first + sentence as usize;
        if sentence <= chunk.sentence || target > self.chunks.len() {
            return Err(bad("the new chunk's number must be the next free one behind it"));
        }
        if self.chunks[place + 1..target.min(self.chunks.len())].iter().any(|c| c.len > 0) {
            return Err(bad("another chunk stands between"));
        }
        match self.chunks.get(target) {
            Some(row) if row.len > 0 || row.id.turn != chunk.turn => return Err(bad("that number is taken")),
            Some(_) => {}
            None => self.open_chunk(chunk.turn, chunk.role, sentence),
        }
        (self.chunks[place].len, self.chunks[place].tally) = (kept, rest);
        let tail = &mut self.chunks[target];
        (tail.start, tail.len, tail.tally, tail.pinned) = (at, head.len - kept, tally, head.pinned);
        // Names without tokens between the two keep their order by position.
        self.chunks[place + 1..target].iter_mut().for_each(|c| c.start = at);
        self.recount(place);
        self.recount(target);
        Ok(Change::Merge { chunk: ChunkId { sentence, ..chunk } })
    }

    /// The place of a chunk that holds tokens.
    fn place(&self, id: ChunkId) -> Result<usize, ApplyError> {
        self.find(id).filter(|&i| self.chunks[i].len > 0).ok_or(ApplyError::NoChunk(id))
    }
}

/// More chunks than this in one message are a mistake, not a message.
const MAX_CHUNKS_PER_TURN: usize = 1 << 24;

/// Makes room for `more`, an eighth at a time: a timeline is mostly old tokens, and doubling would waste
/// as much memory as they take.
fn grow<T>(column: &mut Vec<T>, more: usize) {
    if column.capacity() - column.len() < more {
        column.reserve_exact(column.len() / 8 + more + 1024);
    }
}

fn describe(flags: Flags) -> &'static str {
    match (flags.has(Flags::WITHDRAWN), flags.has(Flags::DEAD)) {
        (true, _) => "withdrawn",
        (false, true) => "dead",
        (false, false) => "live",
    }
}
