//! What the words of the latest answers looked at, for those who want to see it. Kept in memory, one answer a conversation, of
//! the conversations that were answered last.

use halo_core::live::LiveView;
use halo_core::seams::{Piece, SeamError};
use halo_core::token::{ChunkId, Position, TurnId};
use halo_engine::record::Recorder;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The latest answers, by conversation.
#[derive(Clone, Default)]
pub(crate) struct Looks(Arc<Mutex<BTreeMap<String, Answer>>>);

/// One answer.
#[derive(Default)]
struct Answer {
    /// Which of all answers it is.
    number: u64,
    turn: u32,
    /// Tokens of the standing instructions.
    prefix: usize,
    /// The chunks of the window, and in which slot each begins.
    chunks: Vec<(ChunkId, usize)>,
    /// Where the tokens of each slot were born, behind the instructions.
    born: Vec<Position>,
    next: Position,
    words: Vec<Look>,
}

/// What one word looked at.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Look {
    /// The answer's turn.
    pub turn: u32,
    /// The word.
    pub text: String,
    /// The share that went to the standing instructions.
    pub instructions: f32,
    /// The share that went to what had been said of the answer already.
    pub itself: f32,
    /// The share of each chunk, the largest first.
    pub chunks: Vec<(ChunkId, f32)>,
    /// The tokens that it looked at most, the first of the window aside.
    pub tokens: Vec<(Position, f32)>,
}

/// How many answers are kept.
const ANSWERS: usize = 64;

/// How many chunks and tokens are kept of a look.
const MOST: usize = 16;

/// Writes down what one conversation's answers look at.
pub(crate) struct Watcher {
    looks: Looks,
    name: String,
}

impl Looks {
    /// Somebody who writes down what the answers of that conversation look at.
    pub fn watcher(&self, name: &str) -> Box<Watcher> {
        Box::new(Watcher { looks: self.clone(), name: name.to_owned() })
    }

    /// What the token that was born there looked at, if it is of the latest answer.
    pub fn of(&self, name: &str, position: Position) -> Option<Look> {
        let all = self.lock();
        let answer = all.get(name)?;
        let nth = position.0.checked_sub(answer.next.0)?;
        answer.words.get(usize::try_from(nth).ok()?).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Answer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recorder for Watcher {
    fn begin(&mut self, turn: TurnId, prefix: &[Piece], view: LiveView<'_>) -> Result<(), SeamError> {
        let (mut chunks, mut born) = (Vec::new(), Vec::new());
        for chunk in view.chunks() {
            chunks.push((chunk.id(), prefix.len() + born.len()));
            born.extend(chunk.live_runs().flat_map(|run| run.positions()));
        }
        let next = view.timeline().next_position();
        let mut all = self.looks.lock();
        let number = all.values().map(|answer| answer.number).max().unwrap_or(0) + 1;
        let answer =
            Answer { number, turn: turn.0, prefix: prefix.len(), chunks, born, next, words: Vec::new() };
        all.insert(self.name.clone(), answer);
        if all.len() > ANSWERS {
            let oldest = all.iter().min_by_key(|(_, answer)| answer.number).map(|(name, _)| name.clone());
            oldest.and_then(|name| all.remove(&name));
        }
        Ok(())
    }

    fn step(&mut self, piece: &Piece, row: Option<&[f32]>) -> Result<(), SeamError> {
        if let Some(answer) = self.looks.lock().get_mut(&self.name) {
            let look = answer.look(piece, row.unwrap_or_default());
            answer.words.push(look);
        }
        Ok(())
    }

    fn end(&mut self) -> Result<Option<(String, String)>, SeamError> {
        Ok(None)
    }
}

impl Answer {
    fn look(&self, piece: &Piece, row: &[f32]) -> Look {
        let sum =
            |from: usize, to: usize| row.get(from..to.min(row.len())).map_or(0.0, |part| part.iter().sum());
        let window = self.prefix + self.born.len();
        let ends = self.chunks.iter().skip(1).map(|(_, start)| *start).chain([window]);
        let mut chunks: Vec<(ChunkId, f32)> =
            (self.chunks.iter().zip(ends)).map(|((id, start), end)| (*id, sum(*start, end))).collect();
        chunks.sort_by(|a, b| b.1.total_cmp(&a.1));
        chunks.truncate(MOST);
        // The first slot takes what is looked at nowhere else.
        let mut slots: Vec<usize> = (self.prefix.max(1)..row.len()).collect();
        slots.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        let born = |slot: usize| match slot.checked_sub(self.prefix)? {
            n if n < self.born.len() => Some(self.born[n]),
            n => Some(self.next.plus(n - self.born.len())),
        };
        let tokens = slots.into_iter().take(MOST).filter_map(|slot| Some((born(slot)?, row[slot]))).collect();
        Look {
            turn: self.turn,
            text: piece.text.clone(),
            instructions: sum(0, self.prefix),
            itself: sum(window, row.len()),
            chunks,
            tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::notation;
    use halo_core::token::TokenId;

    #[test]
    fn a_look_is_told_by_chunk_and_by_token() {
        let timeline = notation::read("u0.0:3*900 a1.0:2*7").expect("a timeline");
        let looks = Looks::default();
        let mut watcher = looks.watcher("main");
        let piece = |text: &str| Piece { id: TokenId(1), text: text.into() };
        watcher.begin(TurnId(1), &[piece("sys")], timeline.view(1)).expect("it begins");
        watcher.step(&piece(" one"), Some(&[0.5, 0.1, 0.0, 0.1, 0.25, 0.05])).expect("a step");
        watcher.step(&piece(" two"), Some(&[0.4, 0.0, 0.0, 0.0, 0.2, 0.0, 0.4])).expect("a step");
        let first = looks.of("main", Position(5)).expect("it is kept");
        let near = |a: f32, b: f32| (a - b).abs() < 1e-6;
        assert_eq!((first.turn, first.text.as_str()), (1, " one"));
        assert!(near(first.instructions, 0.5) && near(first.itself, 0.0));
        let named: Vec<(String, f32)> =
            first.chunks.iter().map(|(id, share)| (id.to_string(), *share)).collect();
        assert!(named[0].0 == "a1.0" && near(named[0].1, 0.3) && near(named[1].1, 0.2), "{named:?}");
        assert_eq!(first.tokens[0].0, Position(3));
        let second = looks.of("main", Position(6)).expect("it is kept");
        assert!(near(second.itself, 0.4));
        assert_eq!(second.tokens[0].0, Position(5), "it looked at the word before");
        assert_eq!(looks.of("main", Position(4)), None, "not of the answer");
        assert_eq!(looks.of("other", Position(5)), None);
    }
}
