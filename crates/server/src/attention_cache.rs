//! The attention of the tokens of the latest answers. Kept in memory: one answer per open conversation, of the latest
//! conversations.

use halo_core::Error;
use halo_core::context_window::ContextWindow;
use halo_core::model::ModelToken;
use halo_core::token::{ChunkId, Position, TurnId};
use halo_engine::recorder::AnswerRecorder;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The attention of the latest answer of each open conversation.
#[derive(Clone, Default)]
pub(crate) struct AttentionCache(Arc<Mutex<CachedAnswers>>);

#[derive(Default)]
struct CachedAnswers {
    by_name: BTreeMap<String, CachedAnswerAttention>,
    last_recorder: u64,
}

#[derive(Default)]
struct CachedAnswerAttention {
    /// The recorder that has recorded it.
    recorder: u64,
    /// Counts all answers; the smallest is the oldest.
    sequence: u64,
    turn: u32,
    system_prompt_len: usize,
    /// The chunks of the context window with their first slots.
    chunks: Vec<(ChunkId, usize)>,
    /// The position of each slot after the system prompt.
    positions: Vec<Position>,
    first_position: Position,
    tokens: Vec<CachedTokenAttention>,
}

/// The attention of one token: shares of all attention, over all layers and heads.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedTokenAttention {
    pub turn: u32,
    pub text: String,
    pub system_prompt: f32,
    /// The share of the earlier tokens of the answer.
    pub answer: f32,
    /// The largest shares, in descending order.
    pub chunks: Vec<(ChunkId, f32)>,
    /// The tokens with the largest shares, without the first slot.
    pub tokens: Vec<(Position, f32)>,
}

const MAX_ANSWERS: usize = 64;

/// Tokens of one answer, and of all answers. A token takes about half a kilobyte.
const MAX_ANSWER_TOKENS: usize = 16_384;
const MAX_TOKENS: usize = 4 * MAX_ANSWER_TOKENS;

/// Chunks and tokens that are kept per token of an answer.
const TOP_ENTRIES: usize = 16;

/// Records the answers of one open conversation. They leave the cache with it, when the conversation is closed.
pub(crate) struct AttentionCacheRecorder {
    cache: AttentionCache,
    name: String,
    id: u64,
}

impl Drop for AttentionCacheRecorder {
    fn drop(&mut self) {
        let mut all = self.cache.0.lock();
        // The conversation may be open again, with another recorder.
        if all.by_name.get(&self.name).is_some_and(|answer| answer.recorder == self.id) {
            all.by_name.remove(&self.name);
        }
    }
}

impl CachedAnswers {
    fn remove_oldest(&mut self) {
        let oldest = self.by_name.iter().min_by_key(|(_, answer)| answer.sequence);
        let oldest = oldest.map(|(name, _)| name.clone());
        oldest.and_then(|name| self.by_name.remove(&name));
    }

    fn token_count(&self) -> usize {
        self.by_name.values().map(|answer| answer.tokens.len()).sum()
    }
}

impl AttentionCache {
    pub fn recorder(&self, name: &str) -> Box<AttentionCacheRecorder> {
        let mut all = self.0.lock();
        all.last_recorder += 1;
        Box::new(AttentionCacheRecorder { cache: self.clone(), name: name.to_owned(), id: all.last_recorder })
    }

    /// The attention of the token at a position, if it belongs to the latest answer.
    pub fn get(&self, name: &str, position: Position) -> Option<CachedTokenAttention> {
        let all = self.0.lock();
        let answer = all.by_name.get(name)?;
        let nth = position.0.checked_sub(answer.first_position.0)?;
        answer.tokens.get(usize::try_from(nth).ok()?).cloned()
    }

    pub fn token_count(&self) -> usize {
        self.0.lock().token_count()
    }

    /// Drops what is cached of a conversation.
    pub fn remove(&self, name: &str) {
        self.0.lock().by_name.remove(name);
    }
}

impl AnswerRecorder for AttentionCacheRecorder {
    fn begin_answer(
        &mut self,
        turn: TurnId,
        prefix: &[ModelToken],
        view: ContextWindow<'_>,
    ) -> Result<(), Error> {
        let (mut chunks, mut positions) = (Vec::new(), Vec::new());
        for chunk in view.chunks() {
            chunks.push((chunk.id(), prefix.len() + positions.len()));
            positions.extend(chunk.live_runs().flat_map(|run| run.positions()));
        }
        let first_position = view.timeline().next_position();
        let mut all = self.cache.0.lock();
        let sequence = all.by_name.values().map(|answer| answer.sequence).max().unwrap_or(0) + 1;
        let answer = CachedAnswerAttention {
            recorder: self.id,
            sequence,
            turn: turn.0,
            system_prompt_len: prefix.len(),
            chunks,
            positions,
            first_position,
            tokens: Vec::new(),
        };
        all.by_name.insert(self.name.clone(), answer);
        while all.by_name.len() > MAX_ANSWERS || (all.by_name.len() > 1 && all.token_count() > MAX_TOKENS) {
            all.remove_oldest();
        }
        Ok(())
    }

    fn record_token(&mut self, piece: &ModelToken, row: Option<&[f32]>) -> Result<(), Error> {
        let mut all = self.cache.0.lock();
        if let Some(answer) = all.by_name.get_mut(&self.name)
            && answer.tokens.len() < MAX_ANSWER_TOKENS
        {
            let attention = answer.token_attention(piece, row.unwrap_or_default());
            answer.tokens.push(attention);
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
        // The first slot is the attention sink: it receives the attention that no other token needs.
        let mut slots: Vec<usize> = (self.system_prompt_len.max(1)..row.len()).collect();
        slots.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        let position_of = |slot: usize| match slot.checked_sub(self.system_prompt_len)? {
            n if n < self.positions.len() => Some(self.positions[n]),
            n => Some(self.first_position.plus(n - self.positions.len())),
        };
        let tokens = slots
            .into_iter()
            .take(TOP_ENTRIES)
            .filter_map(|slot| Some((position_of(slot)?, row[slot])))
            .collect();
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
    fn attention_cache_is_bounded_and_drops_closed_conversations() {
        let timeline = notation::read("u0.0:3*900").expect("a timeline");
        let cache = AttentionCache::default();
        let token = ModelToken { id: TokenId(1), text: "one".into() };
        let open = |name: &str, tokens: usize| {
            let mut recorder = cache.recorder(name);
            recorder.begin_answer(TurnId(1), &[], timeline.context_window(1)).expect("the answer begins");
            for _ in 0..tokens {
                recorder.record_token(&token, None).expect("the token is recorded");
            }
            recorder
        };
        let is_cached = |name: &str| cache.get(name, Position(3)).is_some();
        let first = open("main", 1);
        // The conversation is opened again before the first recorder is dropped.
        let second = open("main", 1);
        drop(first);
        assert!(is_cached("main"));
        drop(second);
        assert!(!is_cached("main"), "it was closed");
        let many: Vec<_> = (0..MAX_ANSWERS + 5).map(|n| open(&n.to_string(), 1)).collect();
        assert!(!is_cached("4") && is_cached("5"), "the oldest leave");
        drop(many);
        assert_eq!(cache.0.lock().by_name.len(), 0);
        let long: Vec<_> = (0..6).map(|n| open(&n.to_string(), MAX_ANSWER_TOKENS + 10)).collect();
        let kept = cache.0.lock().token_count();
        assert!((MAX_TOKENS..=MAX_TOKENS + MAX_ANSWER_TOKENS).contains(&kept), "{kept}");
        drop(long);
    }

    #[test]
    fn attention_cache_reports_shares_by_chunk_and_token() {
        let timeline = notation::read("u0.0:3*900 a1.0:2*7").expect("a timeline");
        let cache = AttentionCache::default();
        let mut recorder = cache.recorder("main");
        let token = |text: &str| ModelToken { id: TokenId(1), text: text.into() };
        recorder
            .begin_answer(TurnId(1), &[token("sys")], timeline.context_window(1))
            .expect("the answer begins");
        recorder
            .record_token(&token(" one"), Some(&[0.5, 0.1, 0.0, 0.1, 0.25, 0.05]))
            .expect("the token is recorded");
        recorder
            .record_token(&token(" two"), Some(&[0.4, 0.0, 0.0, 0.0, 0.2, 0.0, 0.4]))
            .expect("the token is recorded");
        let first = cache.get("main", Position(5)).expect("the token is cached");
        let close = |a: f32, b: f32| (a - b).abs() < 1e-6;
        assert_eq!((first.turn, first.text.as_str()), (1, " one"));
        assert!(close(first.system_prompt, 0.5) && close(first.answer, 0.0));
        let chunks: Vec<(String, f32)> =
            first.chunks.iter().map(|(id, share)| (id.to_string(), *share)).collect();
        assert!(chunks[0].0 == "a1.0" && close(chunks[0].1, 0.3) && close(chunks[1].1, 0.2), "{chunks:?}");
        assert_eq!(first.tokens[0].0, Position(3));
        let second = cache.get("main", Position(6)).expect("the token is cached");
        assert!(close(second.answer, 0.4));
        assert_eq!(second.tokens[0].0, Position(5), "the token before it");
        assert_eq!(cache.get("main", Position(4)), None, "not a token of the answer");
        assert_eq!(cache.get("other", Position(5)), None);
    }
}
