//! The model's memory as a mirror of the window.
//!
//! It is shown a window and makes its cells equal to it: what is gone is saved and freed, what is back is put where it
//! stood, what is lost is computed again in a fork over its own prefix, and what is new at the end is left to be read.
//! One conversation is in memory at a time; the others are in the graveyard.

use crate::attention::{Row, Rows, Want};
use crate::cells::{Cached, Line, pieces, runs};
use crate::ffi::{Context, Item, LlamaError, Pos, Seq, Token};
use crate::graveyard::{Graveyard, Piece};
use crate::key::{Key, keys};
use crate::layout::{Place, Run, arrange};
use halo_core::seams::{Seen, Upkeep};
use std::ops::Range;
use std::sync::Arc;

/// The conversation.
const MAIN: Seq = Seq(0);
/// Where saved cells come in and go out.
const SPARE: Seq = Seq(1);
/// A copy that is used and thrown away.
const FORK: Seq = Seq(2);

/// How many sequences a context must have.
pub const SEQUENCES: u32 = 3;

/// The most tokens that are saved as one piece.
const LONGEST: usize = 512;

/// What happens when the window changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Cells are saved and put back.
    Keep,
    /// Everything from the first difference on is read again.
    Reread,
}

/// Why a window cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// llama.cpp cannot go on.
    #[error(transparent)]
    Llama(#[from] LlamaError),
    /// It is not in order.
    #[error("the window is not in order of position")]
    Disorder,
    /// It is too large.
    #[error(
        "a window of {window} tokens leaves no room for an answer in a context of {cells}: let more of it leave, or set model.context higher"
    )]
    TooLarge {
        /// Tokens of the window.
        window: usize,
        /// Tokens that fit.
        cells: usize,
    },
}

/// The model's memory, following a window.
pub struct Mirror {
    context: Context,
    yard: Graveyard,
    mode: Mode,
    conversation: Option<String>,
    main: Line,
    /// A fork, while it lives.
    fork: Option<Line>,
    /// The first position that is not used.
    limit: Pos,
    /// Whether cells have been moved that llama.cpp has not turned yet: it does so when it next reads. What is saved
    /// before that is wrong.
    turning: bool,
}

/// A part of the window, compared with what is in memory.
enum Part {
    /// There: these tokens of the line.
    Stays(Range<usize>),
    /// Saved: tokens of the window, and the piece that holds them.
    Returns(Range<usize>, Arc<Piece>),
    /// Nowhere: tokens of the window.
    Lost(Range<usize>),
}

/// What is still to be done once the cells equal the window as far as they can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The first token of the window that is to be read; all behind it are too.
    pub from: usize,
    /// How many tokens an answer may have.
    pub room: usize,
    /// What was done.
    pub upkeep: Upkeep,
}

impl Mirror {
    /// An empty memory. The mode falls back to reading again where the model's cells cannot be taken out.
    #[must_use]
    pub fn new(context: Context, yard: Graveyard, mode: Mode) -> Self {
        let mode = if context.can_move() { mode } else { Mode::Reread };
        let limit = Pos::try_from(context.weights().trained_context()).unwrap_or(Pos::MAX);
        let main = Line::new(MAIN);
        Self { context, yard, mode, conversation: None, main, fork: None, limit, turning: false }
    }

    /// Uses no more positions than these, though the model knows more: all holes are closed before.
    #[must_use]
    pub fn with_limit(mut self, limit: Pos) -> Self {
        self.limit = limit.min(self.limit);
        self
    }

    /// How the window is followed.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The model's memory itself.
    pub fn context(&mut self) -> &mut Context {
        &mut self.context
    }

    /// What is kept of the dead.
    pub fn graveyard(&mut self) -> &mut Graveyard {
        &mut self.yard
    }

    /// The tokens that are in memory now, of the fork if there is one.
    #[must_use]
    pub fn line(&self) -> &Line {
        self.fork.as_ref().unwrap_or(&self.main)
    }

    /// How many tokens fit.
    #[must_use]
    pub fn cells(&self) -> usize {
        self.context.shape().tokens as usize
    }

    /// Makes the cells equal to a window, all but the tokens at its end that are to be read; an answer of up to `answer`
    /// tokens is to fit behind it.
    ///
    /// # Errors
    /// When it does not fit, or llama.cpp fails. What is in memory is known then too.
    pub fn follow(
        &mut self,
        conversation: &str,
        window: &[Seen],
        answer: usize,
    ) -> Result<Ready, MirrorError> {
        let keys = keys(window).ok_or(MirrorError::Disorder)?;
        let room = self.cells().saturating_sub(window.len()).min(answer);
        if window.is_empty() || room < answer.min(1) {
            return Err(MirrorError::TooLarge { window: window.len(), cells: self.cells() });
        }
        self.drop_fork();
        self.attend(conversation);
        loop {
            match self.try_follow(window, &keys, room) {
                // What cannot be put back was thrown away, and is computed in the next round.
                Err(MirrorError::Llama(LlamaError::State(why))) => {
                    tracing::warn!("saved cells are not used: {why}");
                }
                followed => return followed,
            }
        }
    }

    fn try_follow(&mut self, window: &[Seen], keys: &[Key], room: usize) -> Result<Ready, MirrorError> {
        let mut upkeep = Upkeep::default();
        self.free(window, keys, &mut upkeep)?;
        let mut parts = self.compare(window, keys);
        let from = self.split_end(&mut parts, window);
        upkeep.kept = parts.iter().map(|p| if let Part::Stays(r) = p { r.len() } else { 0 }).sum();
        upkeep.read = window.len() - from;
        self.place(&parts, window, keys, upkeep.read + room, true, &mut upkeep)?;
        if let (Some(conversation), Some(key)) = (&self.conversation, keys.get(from)) {
            self.yard.outdate(conversation, *key);
        }
        Ok(Ready { from, room, upkeep })
    }

    /// Makes the cells equal to a window as far as that can be done without reading. Does nothing for a conversation
    /// that is not in memory: its cells are saved.
    ///
    /// # Errors
    /// As [`Mirror::follow`].
    pub fn adapt(&mut self, conversation: &str, window: &[Seen]) -> Result<Upkeep, MirrorError> {
        let mut upkeep = Upkeep::default();
        if self.mode == Mode::Reread || self.conversation.as_deref() != Some(conversation) {
            return Ok(upkeep);
        }
        let keys = keys(window).ok_or(MirrorError::Disorder)?;
        self.drop_fork();
        self.free(window, &keys, &mut upkeep)?;
        let parts = self.compare(window, &keys);
        self.place(&parts, window, &keys, 0, false, &mut upkeep)?;
        Ok(upkeep)
    }

    /// The same, and saves what is not saved yet.
    ///
    /// # Errors
    /// As [`Mirror::follow`].
    pub fn settle(&mut self, conversation: &str, window: &[Seen]) -> Result<Upkeep, MirrorError> {
        let upkeep = self.adapt(conversation, window)?;
        if self.mode == Mode::Keep && self.conversation.as_deref() == Some(conversation) {
            let all = 0..self.main.tokens.len();
            self.bury(&all.collect::<Vec<_>>())?;
        }
        Ok(upkeep)
    }

    /// A copy of the memory that is thrown away again: as much of `window` as is in memory or can be had without moving
    /// anything; the rest is to be read.
    ///
    /// # Errors
    /// As [`Mirror::follow`].
    pub fn fork(&mut self, conversation: &str, window: &[Seen], answer: usize) -> Result<Ready, MirrorError> {
        let keys = keys(window).ok_or(MirrorError::Disorder)?;
        if self.mode == Mode::Reread {
            return self.follow(conversation, window, answer);
        }
        self.drop_fork();
        if self.conversation.as_deref() != Some(conversation) {
            self.attend(conversation);
            let parts = self.compare(window, &keys);
            self.place(&parts, window, &keys, 0, false, &mut Upkeep::default())?;
        }
        let free = self.cells().saturating_sub(self.main.tokens.len());
        let mut ready = self.share(window, &keys, free, answer)?;
        if ready.room < answer.min(free.saturating_sub(ready.upkeep.read)) {
            // Positions run out, not cells.
            self.compact()?;
            ready = self.share(window, &keys, free, answer)?;
        }
        if ready.room < answer.min(1) {
            self.drop_fork();
            let window = window.len() + self.main.tokens.len();
            return Err(MirrorError::TooLarge { window, cells: self.cells() });
        }
        Ok(ready)
    }

    /// Throws a fork away.
    pub fn drop_fork(&mut self) {
        if self.fork.take().is_some() {
            let _ = self.context.remove(FORK, -1, -1);
        }
    }

    /// Reads tokens behind what is there, no more than a batch; returns what those that are wanted looked at, by slot.
    ///
    /// # Errors
    /// When llama.cpp fails or was stopped; none of them is in memory then.
    pub fn read(&mut self, tokens: &[(Key, Token, bool)], want: Want) -> Result<Vec<Row>, MirrorError> {
        let line = self.fork.as_mut().unwrap_or(&mut self.main);
        let (first, before) = (line.end(), line.tokens.len());
        let items: Vec<Item> = (tokens.iter().zip(first..))
            .enumerate()
            .map(|(n, (&(_, token, _), position))| Item { token, position, logits: n + 1 == tokens.len() })
            .collect();
        let watching = want.rows != Rows::None;
        let movable = self.context.can_move();
        let learn = watching && (cfg!(debug_assertions) || !line.is_known()) && movable;
        // Where cells cannot be learned later, they are noted from the start.
        self.context.tap().want(Want { seen: learn, cells: watching || !movable, ..want });
        self.context.decode(line.seq, &items)?;
        self.turning = false;
        let cells = self.context.tap().cells().to_vec();
        let cell = |n: usize| cells.get(n).and_then(|&c| u32::try_from(c).ok());
        let new = items.iter().zip(tokens).enumerate();
        line.tokens.extend(new.map(|(n, (item, &(key, token, begins)))| Cached {
            key,
            token,
            begins,
            position: item.position,
            cell: cell(n),
        }));
        if learn {
            let visible = self.context.tap().visible().to_vec();
            let positions = self.context.positions(line.seq, line.tokens.len()).unwrap_or_default();
            if let Err(why) = line.learn(&visible, &positions) {
                debug_assert!(false, "the table of cells is wrong: {why}");
                tracing::error!("the table of cells is wrong, so attention is not used: {why}");
                return Ok(Vec::new());
            }
        }
        let rows = self.context.tap().looks();
        debug_assert!(
            !movable || rows.iter().all(|row| line.is_blind_to_others(&row.mean)),
            "a dead cell was looked at"
        );
        let skipped = tokens.len() - rows.len().min(tokens.len());
        let by_slot = |(n, row): (usize, Row)| {
            let slot = before + skipped + n;
            let mean = line.by_slot(&row.mean, slot)?;
            let max = if row.max.is_empty() { Vec::new() } else { line.by_slot(&row.max, slot)? };
            Some(Row { mean, max })
        };
        Ok(rows.into_iter().enumerate().map_while(by_slot).collect())
    }

    /// Every head of every layer of the last token that was read, by slot: layers × heads rows.
    #[must_use]
    pub fn full(&mut self) -> Vec<f32> {
        let heads = self.context.tap().full();
        let line = self.fork.as_ref().unwrap_or(&self.main);
        let Some(last) = line.tokens.len().checked_sub(1) else { return Vec::new() };
        let token = heads.iter().map(|h| h.token).max().unwrap_or(0);
        let mut out = Vec::new();
        for layer in heads.iter().filter(|h| h.token == token) {
            for row in layer.values.chunks(layer.cells.max(1)) {
                out.extend(line.by_slot(row, last).unwrap_or_default());
            }
        }
        out
    }

    /// Lets go of all cells; what has no copy is saved first.
    pub fn clear(&mut self) {
        self.drop_fork();
        if self.mode == Mode::Keep {
            let all: Vec<usize> = (0..self.main.tokens.len()).collect();
            if let Err(why) = self.bury(&all) {
                tracing::warn!("the cells of a conversation are not saved: {why}");
            }
        }
        let _ = self.context.remove(MAIN, -1, -1);
        self.main.tokens.clear();
        self.turning = false;
        self.conversation = None;
    }

    /// Lets go of all that is kept of a conversation, saved or not.
    pub fn forget(&mut self, conversation: &str) {
        if self.conversation.as_deref() == Some(conversation) {
            self.drop_fork();
            let _ = self.context.remove(MAIN, -1, -1);
            self.main.tokens.clear();
            self.turning = false;
            self.conversation = None;
        }
        self.yard.forget(conversation);
    }

    /// Makes room for a conversation.
    fn attend(&mut self, conversation: &str) {
        if self.conversation.as_deref() != Some(conversation) {
            self.clear();
            self.conversation = Some(conversation.to_owned());
        }
    }

    /// Saves and frees what is in memory and not in the window.
    fn free(&mut self, window: &[Seen], keys: &[Key], upkeep: &mut Upkeep) -> Result<(), MirrorError> {
        let stays =
            |t: &Cached| keys.binary_search(&t.key).is_ok_and(|n| window[n].id.0 == t.token.cast_unsigned());
        let gone: Vec<usize> = match self.mode {
            Mode::Keep => (0..self.main.tokens.len()).filter(|&n| !stays(&self.main.tokens[n])).collect(),
            Mode::Reread => {
                // From the first difference on.
                let same = |(t, (k, s)): &(&Cached, (&Key, &Seen))| {
                    t.key == **k && s.id.0 == t.token.cast_unsigned()
                };
                let same = self.main.tokens.iter().zip(keys.iter().zip(window)).take_while(same).count();
                let movable = self.context.can_move();
                // What cannot be taken apart is thrown away as a whole.
                let same = if same < self.main.tokens.len() && !movable { 0 } else { same };
                (same..self.main.tokens.len()).collect()
            }
        };
        if gone.is_empty() {
            return Ok(());
        }
        if self.mode == Mode::Keep {
            // What was replaced by another token at its place will not return.
            let dead: Vec<usize> = gone
                .iter()
                .copied()
                .filter(|&n| keys.binary_search(&self.main.tokens[n].key).is_err())
                .collect();
            self.bury(&dead)?;
        }
        upkeep.left = gone.len();
        let leaving: Vec<Cached> = gone.iter().map(|&n| self.main.tokens[n]).collect();
        if leaving.len() == self.main.tokens.len() {
            let _ = self.context.remove(MAIN, -1, -1);
            self.main.tokens.clear();
            self.turning = false;
            return Ok(());
        }
        for run in runs(&leaving) {
            let (start, end) = (leaving[run.start].position, leaving[run.end - 1].position + 1);
            if !self.context.remove(MAIN, start, end) {
                return Err(LlamaError::Decode("cells cannot be taken out of its memory".into()).into());
            }
        }
        let mut gone = gone.into_iter().peekable();
        let mut n = 0;
        self.main.tokens.retain(|_| {
            let leaves = gone.next_if_eq(&n).is_some();
            n += 1;
            !leaves
        });
        Ok(())
    }

    /// Saves tokens of the line that are not saved as they stand.
    fn bury(&mut self, which: &[usize]) -> Result<(), MirrorError> {
        let Some(conversation) = self.conversation.clone() else { return Ok(()) };
        let tokens: Vec<Cached> = which.iter().map(|&n| self.main.tokens[n]).collect();
        for piece in pieces(&tokens, LONGEST) {
            let tokens = &tokens[piece];
            let (first, end) = (tokens[0], tokens[tokens.len() - 1].position + 1);
            if self.yard.has(&conversation, first.key, tokens.len(), first.position) {
                continue;
            }
            self.turn()?;
            self.context.share(MAIN, SPARE, first.position, end);
            let cells = self.context.save(SPARE);
            let _ = self.context.remove(SPARE, -1, -1);
            if cells.is_empty() {
                continue;
            }
            let tokens = tokens.iter().map(|t| t.token).collect();
            self.yard.put(&conversation, Piece { start: first.key, tokens, position: first.position, cells });
        }
        Ok(())
    }

    /// Has llama.cpp turn what was moved: it does so when it reads, so it reads a token that nobody needs.
    fn turn(&mut self) -> Result<(), MirrorError> {
        if self.turning {
            self.context.tap().want(Want::nothing());
            self.context.decode(SPARE, &[Item { token: 0, position: 0, logits: false }])?;
            let _ = self.context.remove(SPARE, -1, -1);
            self.turning = false;
        }
        Ok(())
    }

    /// Compares a window with what is in memory and in the graveyard.
    fn compare(&mut self, window: &[Seen], keys: &[Key]) -> Vec<Part> {
        let mut parts = Vec::new();
        let (mut at, mut here) = (0, 0);
        while at < window.len() {
            let start = (at, here);
            while at < window.len() && self.main.tokens.get(here).is_some_and(|t| t.key == keys[at]) {
                (at, here) = (at + 1, here + 1);
            }
            if here > start.1 {
                parts.push(Part::Stays(start.1..here));
                continue;
            }
            let next =
                self.main.tokens.get(here).map_or(window.len(), |t| keys.partition_point(|k| *k < t.key));
            self.look_up(at..next, window, keys, &mut parts);
            at = next;
        }
        parts
    }

    /// What the graveyard has of a part of the window.
    fn look_up(&mut self, range: Range<usize>, window: &[Seen], keys: &[Key], parts: &mut Vec<Part>) {
        let conversation = self.conversation.clone().unwrap_or_default();
        let mut at = range.start;
        while at < range.end {
            let piece = if self.mode == Mode::Keep { self.yard.get(&conversation, keys[at]) } else { None };
            let same = piece.as_ref().map_or(0, |piece| {
                let skipped = (keys[at].0 - piece.start.0) as usize;
                let pairs = piece.tokens[skipped..].iter().zip(at..range.end).enumerate();
                let same = |(n, (token, w)): &(usize, (&Token, usize))| {
                    keys[*w].0 == keys[at].0 + *n as i64 && window[*w].id.0 == token.cast_unsigned()
                };
                pairs.take_while(same).count()
            });
            match (piece, same) {
                (Some(piece), same) if same > 0 => {
                    parts.push(Part::Returns(at..at + same, piece));
                    at += same;
                }
                (piece, _) => {
                    if let Some(piece) = piece {
                        // It is of another text.
                        self.yard.discard(&conversation, piece.start);
                    }
                    match parts.last_mut() {
                        Some(Part::Lost(lost)) if lost.end == at => lost.end += 1,
                        _ => parts.push(Part::Lost(at..at + 1)),
                    }
                    at += 1;
                }
            }
        }
    }

    /// Takes the end that is to be read off the parts, at least the last token: the model's guess is wanted.
    fn split_end(&mut self, parts: &mut Vec<Part>, window: &[Seen]) -> usize {
        match parts.last_mut() {
            Some(Part::Lost(lost)) => {
                let from = lost.start;
                parts.pop();
                from
            }
            Some(Part::Returns(range, _)) => {
                range.end -= 1;
                if range.start == range.end {
                    parts.pop();
                }
                window.len() - 1
            }
            Some(Part::Stays(range)) => {
                range.end -= 1;
                if range.start == range.end {
                    parts.pop();
                }
                if let Some(last) = self.main.tokens.pop()
                    && !self.context.remove(MAIN, last.position, -1)
                {
                    // It can only be thrown away as a whole.
                    let _ = self.context.remove(MAIN, -1, -1);
                    self.main.tokens.clear();
                    parts.clear();
                    return 0;
                }
                window.len() - 1
            }
            None => 0,
        }
    }

    /// Gives every part its place: moves what has to move, puts back what was saved, and computes what is lost, if that
    /// is asked for.
    fn place(
        &mut self,
        parts: &[Part],
        window: &[Seen],
        keys: &[Key],
        ahead: usize,
        compute: bool,
        upkeep: &mut Upkeep,
    ) -> Result<(), MirrorError> {
        let (mut wanted, mut of): (Vec<Run>, Vec<(usize, Range<usize>)>) = (Vec::new(), Vec::new());
        for (n, part) in parts.iter().enumerate() {
            match part {
                Part::Stays(range) => {
                    for run in runs(&self.main.tokens[range.clone()]) {
                        let run = range.start + run.start..range.start + run.end;
                        let place = Place::Here(self.main.tokens[run.start].position);
                        wanted.push(Run { len: run.len(), place });
                        of.push((n, run));
                    }
                }
                Part::Returns(range, piece) => {
                    let skipped = (keys[range.start].0 - piece.start.0) as Pos;
                    wanted.push(Run { len: range.len(), place: Place::Was(piece.position + skipped) });
                    of.push((n, range.clone()));
                }
                Part::Lost(range) if compute => {
                    wanted.push(Run { len: range.len(), place: Place::New });
                    of.push((n, range.clone()));
                }
                Part::Lost(_) => {}
            }
        }
        let Some(starts) = arrange(&wanted, ahead, self.limit) else {
            return Err(MirrorError::TooLarge { window: window.len(), cells: self.limit as usize });
        };
        let moves = of.iter().zip(&starts).filter(|((n, _), _)| matches!(parts[*n], Part::Stays(_)));
        let moves: Vec<(Range<usize>, Pos)> = moves.map(|((_, run), &start)| (run.clone(), start)).collect();
        upkeep.moved += self.shift(&moves);
        for ((n, range), &start) in of.iter().zip(&starts) {
            match &parts[*n] {
                Part::Stays(_) => {}
                Part::Returns(_, piece) => {
                    self.put_back(MAIN, piece, range.clone(), start, window, keys)?;
                    let own = piece.position + (keys[range.start].0 - piece.start.0) as Pos;
                    upkeep.moved += if own == start { 0 } else { range.len() };
                    upkeep.returned += range.len();
                }
                Part::Lost(_) => {
                    self.compute(range.clone(), start, window, keys)?;
                    upkeep.reread += range.len();
                }
            }
        }
        Ok(())
    }

    /// Moves runs of the line to other positions; returns how many tokens moved.
    fn shift(&mut self, moves: &[(Range<usize>, Pos)]) -> usize {
        let by = |(run, start): &(Range<usize>, Pos)| *start - self.main.tokens[run.start].position;
        let moves: Vec<(Range<usize>, Pos)> =
            moves.iter().map(|m| (m.0.clone(), by(m))).filter(|(_, by)| *by != 0).collect();
        // Nothing may pass over what has not moved yet: downward from the front, upward from the back.
        let down = moves.iter().filter(|(_, by)| *by < 0);
        let up = moves.iter().rev().filter(|(_, by)| *by > 0);
        let mut moved = 0;
        for (run, by) in down.chain(up) {
            let tokens = &mut self.main.tokens[run.clone()];
            let (start, end) = (tokens[0].position, tokens[tokens.len() - 1].position + 1);
            self.context.shift(MAIN, start, end, *by);
            tokens.iter_mut().for_each(|t| t.position += by);
            moved += tokens.len();
            self.turning = true;
        }
        moved
    }

    /// Puts saved cells into a sequence, at a position.
    fn put_back(
        &mut self,
        seq: Seq,
        piece: &Piece,
        range: Range<usize>,
        start: Pos,
        window: &[Seen],
        keys: &[Key],
    ) -> Result<Vec<Cached>, MirrorError> {
        let own = piece.position + (keys[range.start].0 - piece.start.0) as Pos;
        if let Err(why) = self.context.restore(SPARE, &piece.cells) {
            let _ = self.context.remove(SPARE, -1, -1);
            let conversation = self.conversation.clone().unwrap_or_default();
            self.yard.discard(&conversation, piece.start);
            return Err(why.into());
        }
        let end = own + range.len() as Pos;
        let last = piece.position + piece.tokens.len() as Pos;
        // What is not wanted goes again.
        if piece.position < own {
            let _ = self.context.remove(SPARE, piece.position, own);
        }
        if end < last {
            let _ = self.context.remove(SPARE, end, last);
        }
        if own != start {
            self.context.shift(SPARE, own, end, start - own);
            self.turning = true;
        }
        self.context.share(SPARE, seq, -1, -1);
        let _ = self.context.remove(SPARE, -1, -1);
        let tokens = new_tokens(range, start, window, keys);
        if seq == MAIN {
            self.main.insert(&tokens);
        }
        Ok(tokens)
    }

    /// Computes what is lost, over what stands before it, in a sequence of its own.
    fn compute(
        &mut self,
        range: Range<usize>,
        start: Pos,
        window: &[Seen],
        keys: &[Key],
    ) -> Result<(), MirrorError> {
        let tokens = new_tokens(range, start, window, keys);
        let end = start + tokens.len() as Pos;
        self.context.share(MAIN, FORK, 0, start);
        let batch = self.context.shape().batch as usize;
        let mut read = Ok(());
        for tokens in tokens.chunks(batch) {
            let items: Vec<Item> =
                tokens.iter().map(|t| Item { token: t.token, position: t.position, logits: false }).collect();
            self.context.tap().want(Want::nothing());
            read = self.context.decode(FORK, &items);
            if read.is_err() {
                break;
            }
            self.turning = false;
        }
        if read.is_ok() {
            self.context.share(FORK, MAIN, start, end);
            self.main.insert(&tokens);
        }
        let _ = self.context.remove(FORK, -1, -1);
        Ok(read?)
    }

    /// Closes all holes: everything stands one behind the other.
    ///
    /// # Errors
    /// When llama.cpp fails.
    pub fn compact(&mut self) -> Result<(), MirrorError> {
        self.drop_fork();
        let moves = runs(&self.main.tokens).into_iter().map(|run| (run.clone(), run.start as Pos));
        self.shift(&moves.collect::<Vec<_>>());
        self.turn()
    }

    /// Makes a fork: shares with it what it has in common with the line, and puts back into it what was saved and finds
    /// its own place free. What it reads goes into the cells that are `free`.
    fn share(
        &mut self,
        window: &[Seen],
        keys: &[Key],
        free: usize,
        answer: usize,
    ) -> Result<Ready, MirrorError> {
        let mut upkeep = Upkeep::default();
        let mut fork = Line::new(FORK);
        self.fork = Some(Line::new(FORK));
        let same =
            |t: &Cached| keys.binary_search(&t.key).is_ok_and(|n| window[n].id.0 == t.token.cast_unsigned());
        let shared: Vec<Cached> = self.main.tokens.iter().copied().filter(same).collect();
        let (mut at, mut here) = (0, 0);
        let end = window.len() - 1;
        while at < end {
            let first = shared.get(here).map_or(0, |t| t.position);
            let run = shared[here..].iter().zip(&keys[at..end]).zip(first..);
            let run = run.take_while(|((t, k), position)| t.key == **k && t.position == *position).count();
            if run > 0 {
                let tokens = &shared[here..here + run];
                self.context.share(MAIN, FORK, tokens[0].position, tokens[run - 1].position + 1);
                fork.tokens.extend_from_slice(tokens);
                (at, here) = (at + run, here + run);
                upkeep.kept += run;
                continue;
            }
            let wall = shared.get(here).map_or(self.limit, |t| t.position);
            let next = shared.get(here).map_or(end, |t| keys.partition_point(|k| *k < t.key)).min(end);
            let mut parts = Vec::new();
            self.look_up(at..next, window, keys, &mut parts);
            let Some(Part::Returns(range, piece)) = parts.into_iter().next() else { break };
            let own = piece.position + (keys[range.start].0 - piece.start.0) as Pos;
            if own < fork.end() || own + range.len() as Pos > wall {
                break;
            }
            let tokens = self.put_back(FORK, &piece, range.clone(), own, window, keys)?;
            upkeep.returned += range.len();
            fork.tokens.extend(tokens);
            at = range.end;
        }
        upkeep.read = window.len() - at;
        let known = (self.limit - fork.end()) as usize;
        let room = answer
            .min(free.saturating_sub(upkeep.read + upkeep.returned))
            .min(known.saturating_sub(upkeep.read));
        self.fork = Some(fork);
        Ok(Ready { from: at, room, upkeep })
    }
}

/// Tokens of a window, from a position on.
fn new_tokens(range: Range<usize>, start: Pos, window: &[Seen], keys: &[Key]) -> Vec<Cached> {
    let token = |(n, position): (usize, Pos)| Cached {
        key: keys[n],
        token: window[n].id.0.cast_signed(),
        begins: window[n].begins,
        position,
        cell: None,
    };
    range.zip(start..).map(token).collect()
}
