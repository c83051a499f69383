//! How a timeline changes: `apply` takes a [`Change`], checks all of it, does all of it, and returns what
//! would undo it. An error leaves the timeline exactly as it was.

use crate::body::Body;
use crate::change::{
    Append, Change, DeleteReason, Extent, Leave, Part, Return, Run, Score, Scored, Tally, TallyChange,
    WhyLeft, WhyReturned,
};
use crate::timeline::{Chunk, Held, Timeline, Turn};
use crate::token::{Brightness, ChunkId, Flags, Position, Role, TurnId};
use std::collections::BTreeSet;
use std::ops::Range;

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
    /// Its tokens are in the store only.
    #[error("the tokens of {0} are not in memory: they must be read from the store first")]
    Away(ChunkId),
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
    /// More than 4 GiB of text in a chunk, more tokens in the window or more chunks in a turn than a number holds.
    #[error("a chunk holds at most 4 GiB of text, and chunks and slots are numbered up to 4294967294")]
    Full,
}

impl Timeline {
    /// Does `change`, all of it, and returns what undoes it.
    ///
    /// # Errors
    /// When the change does not fit this timeline, which is then as it was before.
    pub fn apply(&mut self, change: &Change) -> Result<Change, ApplyError> {
        if !matches!(change, Change::Batch(_)) {
            return self.apply_one(change);
        }
        let mut done = Vec::new();
        match self.apply_each(change, &mut done) {
            Ok(()) => Ok(inverse_of(done)),
            Err(error) => {
                self.roll_back(&mut done);
                Err(error)
            }
        }
    }

    /// Does `change`, then `commit`; if that fails, it is as if nothing had happened. `commit` sees the state
    /// that the change leads to, so that a store can write what it needs of it.
    ///
    /// # Errors
    /// When the change does not fit, or whatever `commit` gives.
    pub fn transact<E: From<ApplyError>>(
        &mut self,
        change: &Change,
        commit: impl FnOnce(&Timeline) -> Result<(), E>,
    ) -> Result<Change, E> {
        let mut done = Vec::new();
        let result = self.apply_each(change, &mut done).map_err(E::from).and_then(|()| commit(self));
        self.revision.0 += u64::from(result.is_ok());
        match (result, change) {
            (Err(error), _) => {
                self.roll_back(&mut done);
                Err(error)
            }
            (Ok(()), Change::Batch(_)) => Ok(inverse_of(done)),
            (Ok(()), _) => Ok(done.pop().map(|(_, inverse)| inverse).expect("one change has one inverse")),
        }
    }

    /// Does one change that is no batch.
    fn apply_one(&mut self, change: &Change) -> Result<Change, ApplyError> {
        match change {
            Change::Append(append) => self.append(append),
            Change::Score(score) => self.score(score),
            Change::Prune(leaves) => self.prune(leaves),
            Change::Resurrect(returns) => self.resurrect(returns),
            Change::Pin { chunk, pinned } => self.pin(*chunk, *pinned),
            Change::Withdraw { parts, .. } => self.withdraw(parts, true),
            Change::Restore(parts) => self.withdraw(parts, false),
            Change::Merge { chunk, frees_name } => self.merge(*chunk, *frees_name),
            Change::Split { chunk, at, sentence, tally } => self.split(*chunk, *at, *sentence, *tally),
            Change::Batch(_) => unreachable!("batches are taken apart before"),
        }
    }

    /// Does a change, batches within batches one by one, and notes for each where the timeline ended before and
    /// what undoes it. On an error, what was done before it stays and is in `done`.
    fn apply_each(&mut self, change: &Change, done: &mut Vec<(End, Change)>) -> Result<(), ApplyError> {
        if let Change::Batch(changes) = change {
            return changes.iter().try_for_each(|change| self.apply_each(change, done));
        }
        let before = self.extent();
        let inverse = self.apply_one(change)?;
        done.push((before, inverse));
        Ok(())
    }

    /// Where the timeline ends now.
    fn extent(&self) -> End {
        let last_chunk = self.chunks.last().map_or(0, |c| c.len);
        End { tokens: self.len, turns: self.turns.len(), chunks: self.chunks.len(), last_chunk }
    }

    /// Undoes changes that nobody has been told of, the last first, exactly: unlike the inverse alone, it also
    /// unmakes what was appended, since those positions were never given away.
    fn roll_back(&mut self, done: &mut Vec<(End, Change)>) {
        while let Some((before, inverse)) = done.pop() {
            self.apply(&inverse).expect("what was just done can be undone");
            self.truncate(before);
        }
    }

    /// Takes off what lies behind an end; it has been withdrawn before.
    fn truncate(&mut self, end: End) {
        self.len = end.tokens;
        self.turns.truncate(end.turns);
        self.chunks.truncate(end.chunks);
        self.live.truncate(end.chunks);
        if let Some(last) = self.chunks.last_mut().filter(|c| c.len > end.last_chunk) {
            last.len = end.last_chunk;
            self.body_mut(end.chunks - 1).truncate(end.last_chunk as usize);
            self.recount(end.chunks - 1);
        }
    }

    fn append(&mut self, append: &Append) -> Result<Change, ApplyError> {
        self.check_append(append)?;
        if self.turns.last().is_none_or(|t| t.id < append.turn) {
            let first = self.chunks.len() as u32;
            self.turns.push(Turn { id: append.turn, role: append.role, first });
        }
        let mut touched: Vec<(usize, Run)> = Vec::new();
        for token in &append.tokens {
            let id = ChunkId::new(append.role, append.turn, token.sentence);
            if self.chunks.last().is_none_or(|c| c.id != id) {
                self.open_chunk(id);
            }
            let place = self.chunks.len() - 1;
            match touched.last_mut() {
                Some((last, run)) if *last == place => run.len += 1,
                _ => touched.push((place, Run { start: self.next_position(), len: 1 })),
            }
            self.body_mut(place).push(token);
            self.len += 1;
            self.chunks[place].len += 1;
            self.chunks[place].live += 1;
        }
        let mut parts = Vec::with_capacity(touched.len());
        for (place, run) in touched {
            self.live.add(place, run.len as i32);
            parts.push(Part { chunk: self.chunks[place].id, extent: Extent::Runs(vec![run]) });
        }
        Ok(Change::Withdraw { parts, reason: DeleteReason::Undo })
    }

    fn check_append(&self, append: &Append) -> Result<(), ApplyError> {
        if append.at != self.next_position() {
            return Err(ApplyError::NotNext { got: append.at, next: self.next_position() });
        }
        // The first number that a token may name: the last chunk's while that is open, or one behind it.
        let mut free = 0;
        if let Some(last) = self.turns.last() {
            if append.turn < last.id || (append.turn == last.id && append.role != last.role) {
                let last = format!("{} ({})", last.id.0, last.role.name());
                return Err(ApplyError::NotLastTurn { turn: append.turn, role: append.role, last });
            }
            let open = self.chunks.last().filter(|c| c.id.turn == append.turn);
            if let Some(open) = open.filter(|c| c.len > 0 && c.here().is_none()) {
                return Err(ApplyError::Away(open.id));
            }
            free = open.map_or(0, |c| c.id.sentence + u32::from(c.len == 0));
        }
        for token in &append.tokens {
            if token.sentence < free {
                let chunk = ChunkId::new(append.role, append.turn, token.sentence);
                return Err(ApplyError::NotLastChunk { chunk });
            }
            free = token.sentence;
        }
        if let Some(bad) = append.tokens.iter().position(|t| !t.brightness.0.is_finite()) {
            return Err(ApplyError::BadScore(append.at.plus(bad)));
        }
        let last = self.chunks.last().and_then(Chunk::here).map_or(0, |body| body.text.len());
        let bytes = append.tokens.iter().fold(last, |sum, t| sum + t.text.len());
        let numbered = append.tokens.last().is_none_or(|t| t.sentence < u32::MAX);
        let slots = u32::try_from(self.live_len() + append.tokens.len());
        let places = i32::try_from(self.chunks.len() + append.tokens.len());
        if u32::try_from(bytes).is_err() || !numbered || slots.is_err() || places.is_err() {
            return Err(ApplyError::Full);
        }
        Ok(())
    }

    fn open_chunk(&mut self, id: ChunkId) {
        let start = self.next_position();
        grow(&mut self.chunks, 1);
        self.chunks.push(Chunk {
            id,
            pinned: false,
            start,
            len: 0,
            live: 0,
            withdrawn: 0,
            body: Held::Here(Box::default()),
        });
        self.live.push();
    }

    /// The body of a chunk that is known to be here.
    fn body_mut(&mut self, place: usize) -> &mut Body {
        match &mut self.chunks[place].body {
            Held::Here(body) => body,
            Held::Away(_) => unreachable!("what changes has been found here before"),
        }
    }

    /// The places and the parts of the bodies that a stretch of tokens covers, in order.
    pub(crate) fn stretch(
        &self,
        start: Position,
        len: usize,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let first = self.chunks.partition_point(|c| c.start <= start).saturating_sub(1);
        let end = start.0.saturating_add(len as u64);
        let rows = self.chunks[first.min(self.chunks.len())..].iter().zip(first..);
        let parts: Vec<_> = rows
            .take_while(|(c, _)| c.start.0 < end)
            .filter(|(c, _)| start.0 < c.start.0 + u64::from(c.len))
            .map(|(c, place)| {
                let from = start.0.saturating_sub(c.start.0) as usize;
                (place, from..(end - c.start.0).min(u64::from(c.len)) as usize)
            })
            .collect();
        parts.into_iter()
    }

    /// Gives neighbouring tokens new brightness; returns the old.
    fn relight(&mut self, start: Position, lights: &[Brightness]) -> Vec<Brightness> {
        let mut old = Vec::with_capacity(lights.len());
        for (place, part) in self.stretch(start, lights.len()) {
            let new = &lights[old.len()..old.len() + part.len()];
            let own = &mut self.body_mut(place).brightness[part];
            old.extend_from_slice(own);
            own.copy_from_slice(new);
        }
        old
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
            let mut covered = self.stretch(run.start, run.brightness.len());
            if let Some((away, _)) = covered.find(|&(place, _)| self.chunks[place].here().is_none()) {
                return Err(ApplyError::Away(self.chunks[away].id));
            }
        }
        for (n, &(chunk, change)) in score.tallies.iter().enumerate() {
            if let Err(error) = self.tally(chunk, change) {
                for &(chunk, change) in score.tallies[..n].iter().rev() {
                    self.tally(chunk, change.inverse()).expect("what was just done can be undone");
                }
                return Err(error);
            }
        }
        let mut undo = Score { runs: Vec::with_capacity(score.runs.len()), tallies: Vec::new() };
        for run in &score.runs {
            let brightness = self.relight(run.start, &run.brightness);
            undo.runs.push(Scored { start: run.start, brightness });
        }
        // Runs may overlap; undone in reverse, the oldest value is the last word.
        undo.runs.reverse();
        undo.tallies = score.tallies.iter().rev().map(|&(c, t)| (c, t.inverse())).collect();
        Ok(Change::Score(undo))
    }

    fn tally(&mut self, chunk: ChunkId, change: TallyChange) -> Result<(), ApplyError> {
        let place = self.place_here(chunk)?;
        let body = self.body_mut(place);
        body.tally = body.tally.plus(change).ok_or(ApplyError::BadTally(chunk))?;
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
                let lights = self.relight(run.start, &vec![brightness; run.len as usize]);
                old.runs.push(Scored { start: run.start, brightness: lights });
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
        let parts: Vec<Part> = undo.collect();
        Ok(match on {
            true => Change::Restore(parts),
            false => Change::Withdraw { parts, reason: DeleteReason::Undo },
        })
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
            let chunk = self.chunk_at(self.place_here(id)?);
            let runs = match extent {
                Extent::Whole => chunk.runs(fits).collect(),
                Extent::Runs(runs) => runs.clone(),
            };
            let mut next = chunk.start();
            for run in &runs {
                let end = run.start.0.checked_add(u64::from(run.len));
                if run.start < next || end.is_none_or(|end| end > chunk.start().plus(chunk.len()).0) {
                    return Err(ApplyError::BadRuns(id));
                }
                next = run.start.plus(run.len as usize);
                let flags = &chunk.body().flags[chunk.local(*run)];
                if let Some(bad) = flags.iter().position(|&f| !fits(f)) {
                    let (at, state) = (run.start.plus(bad), describe(flags[bad]));
                    return Err(ApplyError::WrongState { chunk: id, verb, at, state });
                }
            }
            if runs.iter().all(|r| r.len == 0) && *extent == Extent::Whole {
                let state = describe(chunk.body().flags[0]);
                return Err(ApplyError::WrongState { chunk: id, verb, at: chunk.start(), state });
            }
            all.push(runs);
        }
        for (&(id, _), runs) in parts.iter().zip(&all) {
            let place = self.place(id)?;
            for run in runs {
                let part = self.chunk_at(place).local(*run);
                self.body_mut(place).flags[part].iter_mut().for_each(|f| *f = f.with(flag, on));
            }
            self.recount(place);
        }
        Ok(all)
    }

    /// Counts a chunk's live and withdrawn tokens anew.
    fn recount(&mut self, place: usize) {
        let chunk = &mut self.chunks[place];
        let (live, withdrawn) = chunk.here().map_or((0, 0), Body::counts);
        let delta = live.cast_signed() - chunk.live.cast_signed();
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

    fn merge(&mut self, chunk: ChunkId, frees_name: bool) -> Result<Change, ApplyError> {
        let place = self.place_here(chunk)?;
        let Chunk { pinned, start, len, .. } = self.chunks[place];
        let into = (self.first_of_turn(chunk)..place)
            .rev()
            .find(|&i| self.chunks[i].len > 0)
            .filter(|&i| self.chunks[i].pinned == pinned)
            .ok_or(ApplyError::NothingToMerge(chunk, pinned))?;
        let kept = self.chunks[into].id;
        let Some(early) = self.chunks[into].here() else { return Err(ApplyError::Away(kept)) };
        let late = self.chunk_at(place).body();
        let tally = early.tally.join(late.tally).ok_or(ApplyError::BadTally(chunk))?;
        let both = self.chunks[into].len.checked_add(len).ok_or(ApplyError::Full)?;
        if u32::try_from(early.text.len() + late.text.len()).is_err() {
            return Err(ApplyError::Full);
        }
        let empty = &mut self.chunks[place];
        (empty.len, empty.pinned) = (0, false);
        let gone = std::mem::replace(&mut empty.body, Held::Away(Body::default().sum()));
        let Held::Here(gone) = gone else { unreachable!("it was here") };
        self.recount(place);
        self.chunks[into].len = both;
        let body = self.body_mut(into);
        body.join(&gone);
        body.tally = tally;
        self.recount(into);
        // Empty chunks stand where the chunk before them ends.
        let end = start.plus(len as usize);
        self.chunks[into + 1..=place].iter_mut().for_each(|c| c.start = end);
        let last_turn = self.turns.last().is_some_and(|t| t.id == chunk.turn);
        if frees_name && last_turn && place + 1 == self.chunks.len() {
            self.chunks.truncate(place);
            self.live.truncate(place);
        }
        Ok(Change::Split { chunk: kept, at: start, sentence: chunk.sentence, tally: gone.tally })
    }

    fn split(
        &mut self,
        chunk: ChunkId,
        at: Position,
        sentence: u32,
        tally: Tally,
    ) -> Result<Change, ApplyError> {
        let bad = |why| ApplyError::BadSplit { chunk, at, why };
        let place = self.place_here(chunk)?;
        let Chunk { pinned, start, len, .. } = self.chunks[place];
        let kept = at.0.checked_sub(start.0).filter(|&n| n > 0 && n < u64::from(len));
        let kept = kept.ok_or_else(|| bad("no token inside the chunk stands there"))? as u32;
        let rest = self
            .chunk_at(place)
            .tally()
            .without(tally)
            .ok_or_else(|| bad("it has gathered less than the tail is to take"))?;
        if sentence == u32::MAX {
            return Err(ApplyError::Full);
        }
        let tail_id = ChunkId { sentence, ..chunk };
        let behind = || self.chunks[place + 1..].iter().take_while(|c| c.id.turn == chunk.turn);
        let target = match self.find(tail_id) {
            Some(target) if self.chunks[target].len > 0 => return Err(bad("that number is taken")),
            Some(target) if target > place => target,
            None if self.turns.last().is_some_and(|t| t.id == chunk.turn)
                && sentence >= self.next_sentence(chunk.turn) =>
            {
                self.chunks.len()
            }
            _ => return Err(bad("the new chunk's number must be a free one behind it")),
        };
        if behind().take(target - place - 1).any(|c| c.len > 0) {
            return Err(bad("another chunk stands between"));
        }
        let frees_name = target == self.chunks.len();
        if frees_name {
            self.open_chunk(tail_id);
        }
        self.chunks[place].len = kept;
        let head = self.body_mut(place);
        let body = Box::new(Body { tally, ..head.split_off(kept as usize) });
        head.tally = rest;
        let tail = &mut self.chunks[target];
        (tail.start, tail.len, tail.pinned, tail.body) = (at, len - kept, pinned, Held::Here(body));
        // Empty chunks stand where the chunk before them ends.
        self.chunks[place + 1..target].iter_mut().for_each(|c| c.start = at);
        self.recount(place);
        self.recount(target);
        Ok(Change::Merge { chunk: tail_id, frees_name })
    }

    /// Where the chunks of a chunk's turn begin.
    fn first_of_turn(&self, chunk: ChunkId) -> usize {
        self.turn_index(chunk.turn).map_or(0, |t| self.turns[t].first as usize)
    }

    /// The place of a chunk that holds tokens.
    fn place(&self, id: ChunkId) -> Result<usize, ApplyError> {
        self.find(id).filter(|&i| self.chunks[i].len > 0).ok_or(ApplyError::NoChunk(id))
    }

    /// The place of a chunk whose tokens are in memory.
    fn place_here(&self, id: ChunkId) -> Result<usize, ApplyError> {
        let place = self.place(id)?;
        if self.chunks[place].here().is_some() { Ok(place) } else { Err(ApplyError::Away(id)) }
    }
}

/// What undoes a list of changes, as one.
fn inverse_of(done: Vec<(End, Change)>) -> Change {
    Change::Batch(done.into_iter().rev().map(|(_, inverse)| inverse).collect())
}

/// Where a timeline ended before a change.
#[derive(Clone, Copy, Debug)]
struct End {
    tokens: u64,
    turns: usize,
    chunks: usize,
    /// Tokens of the last chunk.
    last_chunk: u32,
}

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
