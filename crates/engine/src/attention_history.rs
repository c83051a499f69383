//! The attention of the tokens of answers: what each token attended to. It is stored beside the timeline, one record for
//! each answer, within a limit for each conversation.
//!
//! A record has positions and shares, no text. A token takes about 50 bytes: only its largest shares are kept, and a share
//! is one byte.

use crate::conversation::Conversation;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use halo_core::Error;
use halo_core::change::TokenRun;
use halo_core::context_window::ContextWindow;
use halo_core::store::{RecordKind, Store};
use halo_core::token::{ChunkId, Position, TurnId};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Tokens of the context that are kept for each token of an answer.
const MAX_TOKENS: usize = 10;

/// Chunks of the context that are kept for each token of an answer.
const MAX_CHUNKS: usize = 5;

/// The attention of one token: shares of all attention, over all layers and heads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenAttention {
    pub system_prompt: f32,
    /// The share of the earlier tokens of the answer.
    pub answer: f32,
    /// The largest shares, in descending order.
    pub chunks: Vec<(ChunkId, f32)>,
    /// The tokens with the largest shares, in descending order, without the first slot.
    pub tokens: Vec<(Position, f32)>,
}

/// The attention of an answer, as it is stored: one part for each call of the model, which tool calls separate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AnswerAttention {
    rounds: Vec<RoundAttention>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct RoundAttention {
    /// The position of its first token. The others follow without a gap.
    first: u64,
    /// The chunks that its tokens name by their index.
    chunks: Vec<String>,
    /// The tokens, encoded by [`encode_token`], as Base64.
    tokens: String,
}

impl AnswerAttention {
    /// None if the record cannot be read.
    #[must_use]
    pub fn from_json(stored: &str) -> Option<Self> {
        serde_json::from_str(stored).ok()
    }

    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_value(self).unwrap_or_default().to_string()
    }

    /// The attention of the token at a position; none if the model has not reported it.
    #[must_use]
    pub fn get(&self, position: Position) -> Option<TokenAttention> {
        let round = self.rounds.iter().rev().find(|round| round.first <= position.0)?;
        let tokens = round.decode()?;
        let nth = usize::try_from(position.0 - round.first).ok()?;
        tokens.into_iter().nth(nth).filter(|token| *token != TokenAttention::default())
    }

    /// Removes what tokens attended to at these positions and in these chunks. Returns whether there was any.
    #[must_use]
    pub fn remove(&mut self, chunks: &[ChunkId], runs: &[TokenRun]) -> bool {
        let is_removed = |position: Position| {
            runs.iter().any(|run| (run.start.0..run.start.0 + u64::from(run.len)).contains(&position.0))
        };
        let mut any = false;
        for round in &mut self.rounds {
            let Some(mut tokens) = round.decode() else { continue };
            let count = |tokens: &[TokenAttention]| -> usize {
                tokens.iter().map(|token| token.chunks.len() + token.tokens.len()).sum()
            };
            let before = count(&tokens);
            for token in &mut tokens {
                token.chunks.retain(|(id, _)| !chunks.contains(id));
                token.tokens.retain(|(position, _)| !is_removed(*position));
            }
            if count(&tokens) < before {
                any = true;
                *round = RoundAttention::encode(round.first, &tokens);
            }
        }
        any
    }
}

impl RoundAttention {
    fn encode(first: u64, tokens: &[TokenAttention]) -> Self {
        let (mut chunks, mut bytes) = (Vec::new(), Vec::new());
        for token in tokens {
            encode_token(token, &mut chunks, &mut bytes);
        }
        let chunks = chunks.iter().map(ToString::to_string).collect();
        Self { first, chunks, tokens: STANDARD_NO_PAD.encode(bytes) }
    }

    fn decode(&self) -> Option<Vec<TokenAttention>> {
        let chunks: Option<Vec<ChunkId>> = self.chunks.iter().map(|id| id.parse().ok()).collect();
        let (chunks, bytes) = (chunks?, STANDARD_NO_PAD.decode(&self.tokens).ok()?);
        let (mut rest, mut tokens) = (bytes.as_slice(), Vec::new());
        while !rest.is_empty() {
            tokens.push(decode_token(&mut rest, &chunks)?);
        }
        Some(tokens)
    }
}

/// The share of the system prompt, that of the answer, then the chunks and the tokens: their number, then each with its
/// share. A chunk is an index in `chunks`, a token the distance of its position from that of the token before it.
fn encode_token(token: &TokenAttention, chunks: &mut Vec<ChunkId>, bytes: &mut Vec<u8>) {
    bytes.extend([encode_share(token.system_prompt), encode_share(token.answer)]);
    encode_number(token.chunks.len() as u64, bytes);
    for (id, share) in &token.chunks {
        let index = chunks.iter().position(|known| known == id).unwrap_or_else(|| {
            chunks.push(*id);
            chunks.len() - 1
        });
        encode_number(index as u64, bytes);
        bytes.push(encode_share(*share));
    }
    let mut tokens = token.tokens.clone();
    tokens.sort_by_key(|(position, _)| *position);
    encode_number(tokens.len() as u64, bytes);
    let mut last = 0;
    for (position, share) in tokens {
        encode_number(position.0 - last, bytes);
        bytes.push(encode_share(share));
        last = position.0;
    }
}

fn decode_token(bytes: &mut &[u8], chunk_ids: &[ChunkId]) -> Option<TokenAttention> {
    let system_prompt = decode_share(bytes)?;
    let answer = decode_share(bytes)?;
    let mut chunks = Vec::new();
    for _ in 0..decode_number(bytes)? {
        let index = usize::try_from(decode_number(bytes)?).ok()?;
        chunks.push((*chunk_ids.get(index)?, decode_share(bytes)?));
    }
    let (mut tokens, mut last) = (Vec::new(), 0u64);
    for _ in 0..decode_number(bytes)? {
        last = last.checked_add(decode_number(bytes)?)?;
        tokens.push((Position(last), decode_share(bytes)?));
    }
    tokens.sort_by(|a, b| b.1.total_cmp(&a.1));
    Some(TokenAttention { system_prompt, answer, chunks, tokens })
}

/// The root of a share in 255 steps, so that small shares keep their order.
fn encode_share(share: f32) -> u8 {
    (share.clamp(0.0, 1.0).sqrt() * 255.0).round() as u8
}

fn decode_share(bytes: &mut &[u8]) -> Option<f32> {
    let (first, rest) = bytes.split_first()?;
    *bytes = rest;
    Some((f32::from(*first) / 255.0).powi(2))
}

/// Seven bits a byte, the lowest first.
fn encode_number(mut number: u64, bytes: &mut Vec<u8>) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn decode_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// The key of the record of an answer. Keys have the order of the turns.
fn record_key(turn: TurnId) -> String {
    format!("{:010}", turn.0)
}

/// Loads the stored attention of an answer.
pub fn load_answer_attention(
    store: &mut dyn Store,
    conversation: &str,
    turn: TurnId,
) -> Result<Option<AnswerAttention>, Error> {
    let record = store.record(conversation, RecordKind::Attention, &record_key(turn))?;
    Ok(record.and_then(|record| AnswerAttention::from_json(&record.value)))
}

/// Removes what is erased from the stored attention: answers whose text is erased, and what others attended to there.
pub(crate) fn erase_attention(
    store: &mut dyn Store,
    conversation: &str,
    chunks: &[ChunkId],
    runs: &[TokenRun],
) -> Result<(), Error> {
    for record in store.records(conversation, RecordKind::Attention)? {
        let is_erased = chunks.iter().any(|id| record_key(id.turn) == record.key);
        let mut attention = AnswerAttention::from_json(&record.value).filter(|_| !is_erased);
        if attention.as_mut().is_some_and(|attention| !attention.remove(chunks, runs)) {
            continue;
        }
        let value = attention.map(|attention| attention.to_json());
        store.put_record(conversation, RecordKind::Attention, &record.key, value.as_deref())?;
    }
    Ok(())
}

/// Records the attention of the running answer, and keeps the records of a conversation within their limit.
#[derive(Default)]
pub(crate) struct AttentionHistory {
    running: Option<RunningAnswer>,
    /// The keys of the records with their sizes, oldest first; none before the first answer of the session.
    stored: Option<VecDeque<(String, usize)>>,
}

struct RunningAnswer {
    turn: TurnId,
    finished: AnswerAttention,
    first_position: Position,
    system_prompt_len: usize,
    /// The chunks of the context window with their first slots.
    chunks: Vec<(ChunkId, usize)>,
    /// The position of each slot after the system prompt.
    positions: Vec<Position>,
    tokens: Vec<TokenAttention>,
}

impl AttentionHistory {
    /// A call of the model begins: the first of an answer, or one after a tool call.
    pub fn begin_round(&mut self, turn: TurnId, system_prompt_len: usize, window: ContextWindow<'_>) {
        let (mut chunks, mut positions) = (Vec::new(), Vec::new());
        for chunk in window.chunks() {
            chunks.push((chunk.id(), system_prompt_len + positions.len()));
            positions.extend(chunk.live_runs().flat_map(TokenRun::positions));
        }
        let earlier = self.running.take().filter(|running| running.turn == turn);
        self.running = Some(RunningAnswer {
            turn,
            finished: earlier.map(|running| running.finished).unwrap_or_default(),
            first_position: window.timeline().next_position(),
            system_prompt_len,
            chunks,
            positions,
            tokens: Vec::new(),
        });
    }

    /// Nothing is recorded of the next round.
    pub fn skip_round(&mut self) {
        self.running = None;
    }

    pub fn is_recording(&self) -> bool {
        self.running.is_some()
    }

    /// Adds a token with the attention of its step by slot, if the model has reported it.
    pub fn record_token(&mut self, row: Option<&[f32]>) {
        if let Some(running) = &mut self.running {
            let attention = row.map(|row| running.token_attention(row)).unwrap_or_default();
            running.tokens.push(attention);
        }
    }

    /// The round has ended: its record is written with the next commit. The oldest records go where there are more bytes than
    /// `limit`; an answer that exceeds it alone is not stored.
    pub fn end_round(&mut self, conversation: &mut Conversation, limit: usize) -> Result<(), Error> {
        let Some(running) = &mut self.running else { return Ok(()) };
        let tokens = std::mem::take(&mut running.tokens);
        if tokens.iter().all(|token| *token == TokenAttention::default()) {
            return Ok(());
        }
        running.finished.rounds.push(RoundAttention::encode(running.first_position.0, &tokens));
        let (key, value) = (record_key(running.turn), running.finished.to_json());
        if value.len() > limit {
            return Ok(());
        }
        let stored = match &mut self.stored {
            Some(stored) => stored,
            none => {
                let records = conversation.records(RecordKind::Attention)?;
                none.insert(records.into_iter().map(|record| (record.key, record.value.len())).collect())
            }
        };
        stored.retain(|(other, _)| *other != key);
        stored.push_back((key.clone(), value.len()));
        let mut bytes: usize = stored.iter().map(|(_, bytes)| bytes).sum();
        while bytes > limit
            && let Some((oldest, size)) = stored.pop_front()
        {
            bytes -= size;
            conversation.put_record(RecordKind::Attention, &oldest, None)?;
        }
        conversation.stage_record(RecordKind::Attention, key, value);
        Ok(())
    }
}

impl RunningAnswer {
    fn token_attention(&self, row: &[f32]) -> TokenAttention {
        let sum =
            |from: usize, to: usize| row.get(from..to.min(row.len())).map_or(0.0, |part| part.iter().sum());
        let window = self.system_prompt_len + self.positions.len();
        let ends = self.chunks.iter().skip(1).map(|(_, start)| *start).chain([window]);
        let mut chunks: Vec<(ChunkId, f32)> =
            (self.chunks.iter().zip(ends)).map(|((id, start), end)| (*id, sum(*start, end))).collect();
        keep_largest(&mut chunks, MAX_CHUNKS);
        let position_of = |slot: usize| match slot - self.system_prompt_len {
            n if n < self.positions.len() => self.positions[n],
            n => self.first_position.plus(n - self.positions.len()),
        };
        // The first slot is the attention sink: it receives the attention that no other token needs.
        let first = self.system_prompt_len.max(1);
        let mut tokens: Vec<(Position, f32)> =
            (row.iter().enumerate().skip(first)).map(|(slot, share)| (position_of(slot), *share)).collect();
        keep_largest(&mut tokens, MAX_TOKENS);
        TokenAttention {
            system_prompt: sum(0, self.system_prompt_len),
            answer: sum(window, row.len()),
            chunks,
            tokens,
        }
    }
}

/// Keeps the entries with the largest shares that one byte can tell from none, in descending order.
fn keep_largest<T: Ord>(entries: &mut Vec<(T, f32)>, count: usize) {
    let order = |a: &(T, f32), b: &(T, f32)| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0));
    if entries.len() > count {
        entries.select_nth_unstable_by(count, order);
        entries.truncate(count);
    }
    entries.retain(|(_, share)| encode_share(*share) > 0);
    entries.sort_by(order);
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::notation;

    fn chunk(id: &str) -> ChunkId {
        id.parse().expect("an id")
    }

    fn close(a: f32, b: f32) -> bool {
        (a - b).abs() < 0.01
    }

    /// A round of an answer after a timeline, with these rows.
    fn record(timeline: &str, rows: &[Option<&[f32]>]) -> AnswerAttention {
        let timeline = notation::read(timeline).expect("a timeline");
        let mut history = AttentionHistory::default();
        history.begin_round(TurnId(1), 1, timeline.context_window(1));
        rows.iter().for_each(|row| history.record_token(*row));
        let running = history.running.take().expect("a round");
        let round = RoundAttention::encode(running.first_position.0, &running.tokens);
        AnswerAttention { rounds: vec![round] }
    }

    #[test]
    fn answer_attention_keeps_the_largest_shares_by_chunk_and_token() {
        let rows: [Option<&[f32]>; 3] =
            [Some(&[0.5, 0.1, 0.0, 0.1, 0.25, 0.05]), None, Some(&[0.4, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.4])];
        let attention = record("u0.0:3*900 a1.0:2*7", &rows);
        let stored = AnswerAttention::from_json(&attention.to_json()).expect("a record");
        let first = stored.get(Position(5)).expect("a token");
        assert!(close(first.system_prompt, 0.5) && close(first.answer, 0.0), "{first:?}");
        let ids: Vec<ChunkId> = first.chunks.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [chunk("a1.0"), chunk("u0.0")]);
        assert!(close(first.chunks[0].1, 0.3) && close(first.chunks[1].1, 0.2), "{first:?}");
        let positions: Vec<u64> = first.tokens.iter().map(|(position, _)| position.0).collect();
        assert_eq!(positions[0], 3);
        assert_eq!(positions.len(), 4, "a share of 0 is not kept: {positions:?}");
        assert_eq!(stored.get(Position(6)), None, "the model has not reported it");
        let third = stored.get(Position(7)).expect("a token");
        assert!(close(third.answer, 0.4));
        assert_eq!(third.tokens[0].0, Position(6), "a token of the answer");
        assert_eq!((stored.get(Position(4)), stored.get(Position(8))), (None, None), "not of the answer");
    }

    #[test]
    fn answer_attention_keeps_few_entries_in_few_bytes() {
        let row: Vec<f32> = (0..501).map(|n| (n % 97) as f32 / 24_000.0).collect();
        let rows = vec![Some(row.as_slice()); 100];
        let attention = record("u0.0:250*900 a1.0:250*7", &rows);
        let token = attention.get(Position(550)).expect("a token");
        assert_eq!(token.tokens.len(), MAX_TOKENS);
        assert!(token.tokens.iter().all(|(_, share)| close(*share, 96.0 / 24_000.0)), "{token:?}");
        let bytes = attention.to_json().len();
        assert!(bytes < 100 * 60, "{bytes} bytes for 100 tokens");
    }

    #[test]
    fn answer_attention_loses_what_is_erased() {
        let row: &[f32] = &[0.5, 0.1, 0.0, 0.1, 0.25, 0.05];
        let mut attention = record("u0.0:3*900 a1.0:2*7", &[Some(row)]);
        let run = TokenRun { start: Position(0), len: 3 };
        assert!(attention.remove(&[chunk("u0.0")], &[run]));
        let token = attention.get(Position(5)).expect("a token");
        assert_eq!(token.chunks.len(), 1);
        assert_eq!(token.chunks[0].0, chunk("a1.0"));
        assert!(token.tokens.iter().all(|(position, _)| position.0 >= 3), "{token:?}");
        assert!(!attention.remove(&[chunk("u0.0")], &[run]), "nothing is left to erase");
    }

    #[test]
    fn damaged_attention_is_none() {
        assert_eq!(AnswerAttention::from_json("{"), None);
        for tokens in ["!", "/w", "AAAB", "AAAAAf///////////w"] {
            let round = RoundAttention { first: 0, chunks: Vec::new(), tokens: tokens.to_owned() };
            assert_eq!(AnswerAttention { rounds: vec![round] }.get(Position(0)), None, "{tokens}");
        }
    }

    #[test]
    fn numbers_of_any_size_are_read_as_written() {
        for number in [0, 1, 127, 128, 300, 1 << 20, u64::MAX] {
            let mut bytes = Vec::new();
            encode_number(number, &mut bytes);
            assert_eq!(decode_number(&mut bytes.as_slice()), Some(number));
        }
    }
}
