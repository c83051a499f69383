//! Retokenizes a conversation for another model: its text becomes tokens of that model, with headers of its chat template.
//! Each new token takes over the brightness, the chunk and the state of the old token at its first byte.

use crate::chat_format::{ChatFormatter, MessageTime};
use halo_core::Error;
use halo_core::brightness::ScoringStrategy;
use halo_core::change::NewToken;
use halo_core::chunker::{ChunkSize, Chunker};
use halo_core::conversation_copy::{TokenCopy, TurnCopy};
use halo_core::model::{Model, ModelToken};
use halo_core::token::{ContentKind, Role, TokenId, TokenSource};
use jiff::Timestamp;
use jiff::civil::{Date, DateTime};
use jiff::tz::TimeZone;
use std::collections::BTreeMap;

/// Retokenizes a conversation message by message.
pub(crate) struct Retokenizer<'a> {
    pub model: &'a mut dyn Model,
    pub format: &'a ChatFormatter,
    pub strategy: &'a ScoringStrategy,
    /// Whether a model has tokenized the messages before. Their headers then say which of them have a time: those that the user
    /// wrote here. Into messages of a client nothing is written. Imported messages have no headers yet.
    pub has_headers: bool,
    previous_role: Option<Role>,
    last_day: Option<Date>,
}

impl<'a> Retokenizer<'a> {
    pub fn new(model: &'a mut dyn Model, format: &'a ChatFormatter, strategy: &'a ScoringStrategy) -> Self {
        Self { model, format, strategy, has_headers: false, previous_role: None, last_day: None }
    }

    pub fn retokenize_message(&mut self, turn: TurnCopy) -> Result<TurnCopy, Error> {
        let is_header = |t: &TokenCopy| t.token.kind == ContentKind::Template;
        let (old_header, message): (Vec<TokenCopy>, Vec<TokenCopy>) =
            turn.tokens.into_iter().partition(is_header);
        let old_header: String = old_header.iter().map(|t| t.token.text.as_str()).collect();
        let has_time = !self.has_headers || MessageTime::ends_header(&old_header);
        let text: String = message.iter().map(|t| t.token.text.as_str()).collect();
        let at = Timestamp::from_millisecond(turn.started_at)
            .ok()
            .map(|at| at.to_zoned(TimeZone::system()).datetime())
            .filter(|_| turn.role == Role::User && has_time);
        let time = at.map(|at| MessageTime::new(at, self.last_day));
        let header = self.format.turn_header(turn.role, self.previous_role, time);
        // The header belongs to the first chunk of its turn.
        let (pruned, deleted) = message.first().map_or((false, false), |first| (first.pruned, first.deleted));
        let chunk_index = message.first().map_or(0, |first| first.token.chunk_index);
        let brightness = self.strategy.initial_brightness(TokenSource::from_role(turn.role, false));
        let header = header.tokenize(self.model)?.into_iter().map(|ModelToken { id, text }| TokenCopy {
            token: NewToken { id, text, chunk_index, brightness, kind: ContentKind::Template },
            pruned,
            deleted,
        });
        let mut tokens: Vec<TokenCopy> = header.collect();
        if !text.is_empty() {
            tokens.extend(carry_token_state(&message, self.model.tokenize(&text, false)?));
        }
        if tokens.iter().any(|t| !t.deleted) {
            self.previous_role = Some(turn.role);
            self.last_day = at.map(DateTime::date).or(self.last_day);
        }
        Ok(TurnCopy { tokens, ..turn })
    }
}

/// The new tokens, each with the state of the old token at its first byte. A new token that begins with the line breaks of one
/// chunk and goes on with a word of the next belongs to its word. A word that an import put at the end of the chunk before its
/// own takes the state of the token after it ([`late_words`]).
fn carry_token_state(old_tokens: &[TokenCopy], new_tokens: Vec<ModelToken>) -> Vec<TokenCopy> {
    let late = late_words(old_tokens);
    let (mut at, mut old) = (0, 0);
    let mut end = old_tokens[0].token.text.len();
    let carry = |ModelToken { id, text }: ModelToken| {
        while end <= at && old + 1 < old_tokens.len() {
            old += 1;
            end += old_tokens[old].token.text.len();
        }
        let word = at + (text.len() - text.trim_start().len());
        at += text.len();
        let is_late = late.get(&old).is_some_and(|late_bytes| at + late_bytes > end);
        let mut source = old + usize::from(is_late);
        let (mut next, mut next_end) = (old, end);
        while word < at && next_end <= word && next + 1 < old_tokens.len() {
            next += 1;
            next_end += old_tokens[next].token.text.len();
        }
        if old_tokens[next].token.chunk_index > old_tokens[source].token.chunk_index {
            source = next;
        }
        let TokenCopy { token, pruned, deleted } = &old_tokens[source];
        TokenCopy { token: NewToken { id, text, ..token.clone() }, pruned: *pruned, deleted: *deleted }
    };
    new_tokens.into_iter().map(carry).collect()
}

/// The untokenized words that end a chunk with the first word of the next paragraph, by index, each with the bytes of that
/// word. Imports of earlier versions made one word of a line break and the text behind it; the word that completed an empty
/// line closed its chunk. A closing fence and a closing brace do belong to the chunk that they close, and a chunk that has
/// no other word keeps its word.
fn late_words(tokens: &[TokenCopy]) -> BTreeMap<usize, usize> {
    let mut late = BTreeMap::new();
    let mut chunker = Chunker::new(ChunkSize::default());
    for (index, [before, word, after]) in tokens.array_windows().enumerate() {
        chunker.push(&before.token.text);
        let [chunk_before, chunk, chunk_after] = [before, word, after].map(|token| token.token.chunk_index);
        let ends_chunk = chunk_before == chunk && chunk != chunk_after;
        let text = word.token.text.strip_prefix('\n').unwrap_or_default();
        let begins_paragraph = !text.trim().is_empty() && !text.starts_with('}') && !chunker.in_fence();
        if word.token.id == TokenId::UNTOKENIZED && ends_chunk && begins_paragraph {
            late.insert(index + 1, text.len());
        }
    }
    late
}
