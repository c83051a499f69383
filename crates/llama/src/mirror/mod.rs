//! The model's memory as a mirror of the window.
//!
//! It is shown a window and makes its cells equal to it: what is gone is saved and freed, what is back is put where it
//! stood, what is lost is computed again in a fork over its own prefix, and what is new at the end is left to be read.
//! One conversation is in memory at a time; the others are in the graveyard.

mod fork;
mod surgery;

use crate::attention::{Row, Rows, Want};
use crate::cells::{Cached, Line, runs};
use crate::ffi::{Context, Item, LlamaError, Pos, Seq, Token};
use crate::graveyard::{Graveyard, Head};
use crate::key::{Key, keys};
use crate::layout::{Place, Run, arrange};
use halo_core::seams::{Flow, Seen, Upkeep};
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

/// Positions that are kept free for an answer. What is longer has all holes closed under way.
const RESERVE: usize = 512;

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
    /// It is empty.
    #[error("the window is empty: there is nothing to go on from")]
    Empty,
    /// It is not in order.
    #[error("the window is not in order of position")]
    Disorder,
    /// There is no room for a fork.
    #[error(
        "{read} tokens are to be read aside, and {free} of {cells} fit beside the conversation: let more of it leave, or set model.context higher"
    )]
    NoAside {
        /// Tokens to read.
        read: usize,
        /// Tokens that fit.
        free: usize,
        /// Tokens that fit in all.
        cells: usize,
    },
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
    /// Saved: tokens of the window, and what is known of the piece that holds them.
    Returns(Range<usize>, Arc<Head>),
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
    /// tokens is to fit behind it. Where something has to be read again, `reading` is told how far that has come, and
    /// may stop it.
    ///
    /// # Errors
    /// When it does not fit, or llama.cpp fails or is stopped. What is in memory is known then too.
    pub fn follow(
        &mut self,
        conversation: &str,
        window: &[Seen],
        answer: usize,
        reading: &mut dyn FnMut(usize, usize) -> Flow,
    ) -> Result<Ready, MirrorError> {
        let keys = self.names(window)?;
        let room = self.cells().saturating_sub(window.len()).min(answer);
        if room < answer.min(1) {
            return Err(MirrorError::TooLarge { window: window.len(), cells: self.cells() });
        }
        self.drop_fork();
        self.attend(conversation);
        let (mut upkeep, mut tries) = (Upkeep::default(), window.len());
        loop {
            match self.try_follow(window, &keys, room, reading, &mut upkeep) {
                // What cannot be put back was thrown away, and is computed in the next round.
                Err(MirrorError::Llama(LlamaError::State(why))) if tries > 0 => {
                    tracing::warn!("saved cells are not used: {why}");
                    tries -= 1;
                }
                followed => return followed,
            }
        }
    }

    /// The names of a window's tokens.
    fn names(&self, window: &[Seen]) -> Result<Vec<Key>, MirrorError> {
        if window.is_empty() {
            return Err(MirrorError::Empty);
        }
        if window.len() > self.cells() {
            return Err(MirrorError::TooLarge { window: window.len(), cells: self.cells() });
        }
        keys(window).ok_or(MirrorError::Disorder)
    }

    fn try_follow(
        &mut self,
        window: &[Seen],
        keys: &[Key],
        room: usize,
        reading: &mut dyn FnMut(usize, usize) -> Flow,
        upkeep: &mut Upkeep,
    ) -> Result<Ready, MirrorError> {
        self.free(window, keys, upkeep)?;
        let mut parts = self.compare(window, keys);
        let from = self.split_end(&mut parts, window);
        let here: usize = parts.iter().map(|p| if let Part::Stays(r) = p { r.len() } else { 0 }).sum();
        // What an earlier try has brought back was not there before.
        upkeep.kept = here.saturating_sub(upkeep.returned + upkeep.reread);
        upkeep.read = window.len() - from;
        let ahead = upkeep.read + room.min(RESERVE);
        self.place(&parts, window, keys, ahead, Some(reading), upkeep)?;
        if let (Some(conversation), Some(key)) = (&self.conversation, keys.get(from)) {
            self.yard.outdate(conversation, *key);
        }
        Ok(Ready { from, room, upkeep: *upkeep })
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
        if window.is_empty() {
            self.bury(&(0..self.main.tokens.len()).collect::<Vec<_>>())?;
            return self.free(&[], &[], &mut upkeep).map(|()| upkeep);
        }
        let keys = self.names(window)?;
        self.drop_fork();
        self.free(window, &keys, &mut upkeep)?;
        let parts = self.compare(window, &keys);
        self.place(&parts, window, &keys, 0, None, &mut upkeep)?;
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

    /// What is wrong with what is in memory of a conversation, if it is there: it must be the beginning of the window, token
    /// for token, in order of position.
    #[must_use]
    pub fn disagreement(&self, conversation: &str, window: &[Seen]) -> Option<String> {
        if self.conversation.as_deref() != Some(conversation) || self.mode == Mode::Reread {
            return None;
        }
        let names = keys(window)?;
        let line = &self.main.tokens;
        if line.len() > window.len() {
            return Some(format!("{} tokens are in memory, {} in the window", line.len(), window.len()));
        }
        let same = |n: usize| line[n].key == names[n] && line[n].token == window[n].id.0.cast_signed();
        if let Some(n) = (0..line.len()).find(|&n| !same(n)) {
            return Some(format!("slot {n} holds {:?} in memory, {:?} in the window", line[n].key, names[n]));
        }
        let sorted = line.is_sorted_by(|a, b| a.position < b.position);
        (!sorted).then(|| "positions in memory are not in order".to_owned())
    }

    /// Reads tokens behind what is there, no more than a batch; returns what those that are wanted looked at, by slot.
    ///
    /// # Errors
    /// When llama.cpp fails or was stopped; none of them is in memory then.
    pub fn read(&mut self, tokens: &[(Key, Token, bool)], want: Want) -> Result<Vec<Row>, MirrorError> {
        if self.fork.is_none() && i64::from(self.main.end()) + tokens.len() as i64 > i64::from(self.limit) {
            self.compact()?;
        }
        self.turn()?;
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
        self.abandon();
    }

    /// Lets go of all that is kept of a conversation, saved or not.
    pub fn forget(&mut self, conversation: &str) {
        if self.conversation.as_deref() == Some(conversation) {
            self.abandon();
        }
        self.yard.forget(conversation);
    }

    /// Throws away what is in memory, whatever it is.
    pub fn abandon(&mut self) {
        for seq in [MAIN, SPARE, FORK] {
            let _ = self.context.remove(seq, -1, -1);
        }
        self.fork = None;
        self.main.tokens.clear();
        self.turning = false;
        self.conversation = None;
    }

    /// Makes room for a conversation.
    fn attend(&mut self, conversation: &str) {
        if self.conversation.as_deref() != Some(conversation) {
            self.clear();
            self.conversation = Some(conversation.to_owned());
        }
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
            // Whole pieces come back, of which only a part may be wanted: there must be room for the rest meanwhile.
            let spare = self.cells().saturating_sub(window.len());
            self.look_up(at..next, window, keys, spare, &mut parts);
            at = next;
        }
        parts
    }

    /// What the graveyard has of a part of the window. A piece that has more than `spare` tokens beside those that are
    /// wanted stays where it is.
    fn look_up(
        &mut self,
        range: Range<usize>,
        window: &[Seen],
        keys: &[Key],
        spare: usize,
        parts: &mut Vec<Part>,
    ) {
        let conversation = self.conversation.clone().unwrap_or_default();
        let mut at = range.start;
        while at < range.end {
            let head = if self.mode == Mode::Keep { self.yard.head(&conversation, keys[at]) } else { None };
            let same = head.as_ref().map_or(0, |head| {
                let skipped = keys[at].from(head.start).unwrap_or(head.tokens.len());
                let pairs = head.tokens[skipped..].iter().zip(at..range.end).enumerate();
                let same = |(n, (token, w)): &(usize, (&Token, usize))| {
                    keys[*w] == keys[at].plus(*n) && window[*w].id.0 == token.cast_unsigned()
                };
                let same = pairs.take_while(same).count();
                // What stands beside what was said may have changed: it is the same from its beginning on, or not at all.
                let goes_on = at > 0 && keys[at - 1].plus(1) == keys[at];
                let begun = keys[at].behind <= 1 || goes_on && !matches!(parts.last(), Some(Part::Lost(_)));
                if head.tokens.len() - same > spare || !begun { 0 } else { same }
            });
            match (head, same) {
                (Some(head), same) if same > 0 => {
                    parts.push(Part::Returns(at..at + same, head));
                    at += same;
                }
                _ => {
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
        mut compute: Option<&mut dyn FnMut(usize, usize) -> Flow>,
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
                    let skipped = keys[range.start].from(piece.start).unwrap_or(0) as Pos;
                    wanted.push(Run { len: range.len(), place: Place::Was(piece.position + skipped) });
                    of.push((n, range.clone()));
                }
                Part::Lost(range) if compute.is_some() => {
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
        let lost = wanted.iter().filter(|run| run.place == Place::New).map(|run| run.len).sum::<usize>();
        let mut computed = 0;
        for ((n, range), &start) in of.iter().zip(&starts) {
            match &parts[*n] {
                Part::Stays(_) => {}
                Part::Returns(_, piece) => {
                    self.put_back(MAIN, piece, range.clone(), start, window, keys)?;
                    let own = piece.position + keys[range.start].from(piece.start).unwrap_or(0) as Pos;
                    upkeep.moved += if own == start { 0 } else { range.len() };
                    upkeep.returned += range.len();
                }
                Part::Lost(_) => {
                    let all = lost + upkeep.read;
                    let mut go_on = |done: usize| match &mut compute {
                        Some(reading) => reading(computed + done, all),
                        None => Flow::Stop,
                    };
                    self.compute(range.clone(), start, window, keys, &mut go_on)?;
                    computed += range.len();
                    upkeep.reread += range.len();
                }
            }
        }
        Ok(())
    }
}
