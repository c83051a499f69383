//! What the words of the latest answers looked at, for those who want to see it. Kept in memory, one answer a conversation, of
//! the conversations that were answered last.

use halo_core::Error;
use halo_core::context_window::ContextWindow;
use halo_core::model::ModelToken;
use halo_core::token::{ChunkId, Position, TurnId};
use halo_engine::recorder::AnswerRecorder;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The latest answers, by conversation.
#[derive(Clone, Default)]
pub(crate) struct AttentionCache(Arc<Mutex<BTreeMap<String, CachedAnswerAttention>>>);

#[derive(Default)]
struct CachedAnswerAttention {
    /// Which of all answers it is.
    sequence: u64,
    turn: u32,
    /// Tokens of the standing instructions.
    system_prompt_len: usize,
    /// The chunks of the window, and in which slot each begins.
    chunks: Vec<(ChunkId, usize)>,
    /// Where the tokens of each slot were born, behind the instructions.
    positions: Vec<Position>,
    first_position: Position,
    tokens: Vec<CachedTokenAttention>,
}

/// What one word looked at.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedTokenAttention {
    pub turn: u32,
    pub text: String,
    /// The share that went to the standing instructions.
    pub system_prompt: f32,
    /// The share that went to what had been said of the answer already.
    pub answer: f32,
    /// The share of each chunk, the largest first.
    pub chunks: Vec<(ChunkId, f32)>,
    /// The tokens that it looked at most, the first of the window aside.
    pub tokens: Vec<(Position, f32)>,
}

/// How many answers are kept.
const MAX_ANSWERS: usize = 64;

/// How many chunks and tokens are kept of a look.
const TOP_ENTRIES: usize = 16;

/// Writes down what one conversation's answers look at.
pub(crate) struct AttentionCacheRecorder {
    cache: AttentionCache,
    name: String,
}

impl AttentionCache {
    /// Somebody who writes down what the answers of that conversation look at.
    pub fn recorder(&self, name: &str) -> Box<AttentionCacheRecorder> {
        Box::new(AttentionCacheRecorder { cache: self.clone(), name: name.to_owned() })
    }

    /// What the token that was born there looked at, if it is of the latest answer.
    pub fn get(&self, name: &str, position: Position) -> Option<CachedTokenAttention> {
        let all = self.lock();
        let answer = all.get(name)?;
        let nth = position.0.checked_sub(answer.first_position.0)?;
        answer.tokens.get(usize::try_from(nth).ok()?).cloned()
    }

    /// Drops what is cached of a conversation.
    pub fn remove(&self, name: &str) {
        self.lock().remove(name);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, CachedAnswerAttention>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AnswerRecorder for AttentionCacheRecorder {
    fn begin_answer(
        &mut self,
        turn: TurnId,
        prefix: &[ModelToken],
        view: ContextWindow<'_>,
    ) -> Result<(), Error> {
        let (mut chunks, mut born) = (Vec::new(), Vec::new());
        for chunk in view.chunks() {
            chunks.push((chunk.id(), prefix.len() + born.len()));
            born.extend(chunk.live_runs().flat_map(|run| run.positions()));
        }
        let next = view.timeline().next_position();
        let mut all = self.cache.lock();
        let number = all.values().map(|answer| answer.sequence).max().unwrap_or(0) + 1;
        let answer = CachedAnswerAttention {
            sequence: number,
            turn: turn.0,
            system_prompt_len: prefix.len(),
            chunks,
            positions: born,
            first_position: next,
            tokens: Vec::new(),
        };
        all.insert(self.name.clone(), answer);
        if all.len() > MAX_ANSWERS {
            let oldest = all.iter().min_by_key(|(_, answer)| answer.sequence).map(|(name, _)| name.clone());
            oldest.and_then(|name| all.remove(&name));
        }
        Ok(())
    }

    fn record_token(&mut self, piece: &ModelToken, row: Option<&[f32]>) -> Result<(), Error> {
        if let Some(answer) = self.cache.lock().get_mut(&self.name) {
            let look = answer.token_attention(piece, row.unwrap_or_default());
            answer.tokens.push(look);
        }
        Ok(())
    }

    fn end_answer(&mut self) -> Result<Option<(String, String)>, Error> {
        Ok(None)
    }
}

impl CachedAnswerAttention {
    fn token_attention(&self, piece: &ModelToken, row: &[f32]) -> CachedTokenAttention {
        let sum =
            |from: usize, to: usize| row.get(from..to.min(row.len())).map_or(0.0, |part| part.iter().sum());
        let window = self.system_prompt_len + self.positions.len();
        let ends = self.chunks.iter().skip(1).map(|(_, start)| *start).chain([window]);
        let mut chunks: Vec<(ChunkId, f32)> =
            (self.chunks.iter().zip(ends)).map(|((id, start), end)| (*id, sum(*start, end))).collect();
        chunks.sort_by(|a, b| b.1.total_cmp(&a.1));
        chunks.truncate(TOP_ENTRIES);
        // The first slot takes what is looked at nowhere else.
        let mut slots: Vec<usize> = (self.system_prompt_len.max(1)..row.len()).collect();
        slots.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        let born = |slot: usize| match slot.checked_sub(self.system_prompt_len)? {
            n if n < self.positions.len() => Some(self.positions[n]),
            n => Some(self.first_position.plus(n - self.positions.len())),
        };
        let tokens =
            slots.into_iter().take(TOP_ENTRIES).filter_map(|slot| Some((born(slot)?, row[slot]))).collect();
        CachedTokenAttention {
            turn: self.turn,
            text: piece.text.clone(),
            system_prompt: sum(0, self.system_prompt_len),
            answer: sum(window, row.len()),
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
    fn attention_cache_reports_shares_by_chunk_and_token() {
        let timeline = notation::read("u0.0:3*900 a1.0:2*7").expect("a timeline");
        let looks = AttentionCache::default();
        let mut watcher = looks.recorder("main");
        let piece = |text: &str| ModelToken { id: TokenId(1), text: text.into() };
        watcher.begin_answer(TurnId(1), &[piece("sys")], timeline.context_window(1)).expect("it begins");
        watcher.record_token(&piece(" one"), Some(&[0.5, 0.1, 0.0, 0.1, 0.25, 0.05])).expect("a step");
        watcher.record_token(&piece(" two"), Some(&[0.4, 0.0, 0.0, 0.0, 0.2, 0.0, 0.4])).expect("a step");
        let first = looks.get("main", Position(5)).expect("it is kept");
        let near = |a: f32, b: f32| (a - b).abs() < 1e-6;
        assert_eq!((first.turn, first.text.as_str()), (1, " one"));
        assert!(near(first.system_prompt, 0.5) && near(first.answer, 0.0));
        let named: Vec<(String, f32)> =
            first.chunks.iter().map(|(id, share)| (id.to_string(), *share)).collect();
        assert!(named[0].0 == "a1.0" && near(named[0].1, 0.3) && near(named[1].1, 0.2), "{named:?}");
        assert_eq!(first.tokens[0].0, Position(3));
        let second = looks.get("main", Position(6)).expect("it is kept");
        assert!(near(second.answer, 0.4));
        assert_eq!(second.tokens[0].0, Position(5), "it looked at the word before");
        assert_eq!(looks.get("main", Position(4)), None, "not of the answer");
        assert_eq!(looks.get("other", Position(5)), None);
    }
}
