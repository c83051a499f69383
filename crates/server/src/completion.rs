//! The model without a conversation, for clients that keep their own. What they send is compared with what they sent before:
//! what is the same keeps its place, so the model's memory of it is kept too, even where something in between has gone or come
//! back.

use crate::app::App;
use crate::error::{ApiResult, ErrorResponse};
use axum::http::StatusCode;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{FinishReason, ModelStep, Prompt, PromptMessage, Sampling, StepFlow, WindowToken};
use halo_core::token::{Position, Role, TokenId};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What clients have sent, the last used first.
pub(crate) struct CompletionHistories {
    histories: Mutex<Vec<CompletionHistory>>,
    next_number: AtomicU64,
    started: i64,
    /// Stops what is being said.
    stop_flag: Mutex<Arc<AtomicBool>>,
    /// What is being said, or was last.
    last_text: Mutex<String>,
    /// The window that was last gone on from, and what was said then.
    last_window: Mutex<Vec<TokenId>>,
}

/// All that one client has ever sent and heard, in order: the index is the place.
#[derive(Default)]
struct CompletionHistory {
    key: String,
    tokens: Vec<TokenId>,
}

/// How many are remembered, and how long each may be.
const MAX_HISTORIES: usize = 8;
const MAX_HISTORY_TOKENS: usize = 1 << 20;

/// So many tokens in a row are the same: it is what was sent before.
const MIN_MATCH_TOKENS: usize = 8;

/// What is asked of the model.
pub(crate) struct CompletionRequest {
    pub ids: Vec<TokenId>,
    /// The same as text, for a model that is spoken to in that.
    pub text: String,
    /// The same as messages; empty: as one of the user's.
    pub messages: Vec<PromptMessage>,
    pub sampling: Sampling,
    pub attention: AttentionRequest,
    pub client: String,
    /// Whether it is forgotten afterwards.
    pub ephemeral: bool,
}

impl Default for CompletionHistories {
    fn default() -> Self {
        Self {
            histories: Mutex::default(),
            next_number: AtomicU64::new(0),
            started: jiff::Timestamp::now().as_microsecond(),
            stop_flag: Mutex::default(),
            last_text: Mutex::default(),
            last_window: Mutex::default(),
        }
    }
}

impl CompletionHistory {
    /// The places of a window: as a part of what was sent before, in its order, as far as it is, and behind all that from
    /// there on. Also how many are as before.
    fn match_positions(&self, window: &[TokenId]) -> (Vec<Position>, usize) {
        let mut places = Vec::with_capacity(window.len());
        let mut at = 0;
        while places.len() < window.len() {
            let rest = &window[places.len()..];
            if self.tokens.get(at) != Some(&rest[0]) {
                let head = &rest[..rest.len().min(MIN_MATCH_TOKENS)];
                match self.tokens[at.min(self.tokens.len())..]
                    .windows(head.len())
                    .position(|there| there == head)
                {
                    Some(gone) => at += gone,
                    None => break,
                }
            }
            places.push(Position(at as u64));
            at += 1;
        }
        let known = places.len();
        let new = window.len() - known;
        places.extend((0..new).map(|n| Position((self.tokens.len() + n) as u64)));
        (places, known)
    }
}

impl CompletionHistories {
    /// Finds the line that a window goes on from, or begins one; it becomes the first. Returns its key and the places. What is
    /// aside leaves no trace.
    fn match_history(&self, window: &[TokenId], aside: bool) -> (String, Vec<Position>, Position) {
        let mut lines = self.histories.lock().unwrap_or_else(PoisonError::into_inner);
        let best = (lines.iter().enumerate())
            .map(|(n, line)| (n, line.match_positions(window)))
            .max_by_key(|(n, (_, known))| (*known, std::cmp::Reverse(*n)));
        let worth = |known: usize| {
            known >= MIN_MATCH_TOKENS.min(window.len()) && known * 2 >= window.len().min(2 * MIN_MATCH_TOKENS)
        };
        let mut line = match &best {
            Some((n, (_, known))) if worth(*known) && lines[*n].tokens.len() < MAX_HISTORY_TOKENS => {
                lines.remove(*n)
            }
            _ => {
                let number = self.next_number.fetch_add(1, Ordering::SeqCst);
                CompletionHistory { key: format!("raw\0{}\0{number}", self.started), tokens: Vec::new() }
            }
        };
        let (places, known) = line.match_positions(window);
        let next = Position((line.tokens.len() + window.len() - known) as u64);
        let key = line.key.clone();
        if !aside {
            line.tokens.extend(&window[known..]);
            *self.last_window.lock().unwrap_or_else(PoisonError::into_inner) = window.to_vec();
        }
        lines.insert(0, line);
        lines.truncate(MAX_HISTORIES);
        (key, places, next)
    }

    /// A token was said: it is where the next one follows.
    fn push_token(&self, key: &str, id: TokenId) {
        let mut lines = self.histories.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = lines.iter_mut().find(|line| line.key == key) {
            line.tokens.push(id);
        }
        self.last_window.lock().unwrap_or_else(PoisonError::into_inner).push(id);
    }

    /// What was last sent and heard, for who wants to go on from there.
    pub fn last_window(&self) -> Option<Vec<TokenId>> {
        Some(self.last_window.lock().unwrap_or_else(PoisonError::into_inner).clone())
            .filter(|last| !last.is_empty())
    }

    /// What is being said, or was last.
    pub fn last_text(&self) -> String {
        self.last_text.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops what is being said.
    pub fn stop(&self) {
        self.stop_flag.lock().unwrap_or_else(PoisonError::into_inner).store(true, Ordering::SeqCst);
    }
}

/// Asks the model, when it is free; blocks until it has spoken. `still` is asked while it waits.
pub(crate) fn complete(
    app: &App,
    ask: &CompletionRequest,
    still: &mut dyn FnMut(usize) -> StepFlow,
    listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
) -> ApiResult<FinishReason> {
    app.check_queue_capacity()?;
    let mut model = app.backend.model()?;
    let context = model.info().context;
    if ask.ids.is_empty() {
        return Err(ErrorResponse::bad_request("the prompt is empty: send something to go on from"));
    }
    if ask.ids.len() + 1 > context {
        let tokens = ask.ids.len();
        return Err(ErrorResponse::context_length_exceeded(format!(
            "context length exceeded: {tokens} tokens do not fit in {context}; shorten the prompt or raise model.context"
        )));
    }
    let sampling =
        Sampling { max_tokens: ask.sampling.max_tokens.min(context - ask.ids.len()), ..ask.sampling.clone() };
    let Some(_pass) = app.host.scheduler().acquire(&ask.client, still) else {
        return Err(ErrorResponse::new(StatusCode::CONFLICT, "stopped before its turn came"));
    };
    let halt = Arc::new(AtomicBool::new(false));
    *app.completion_histories.stop_flag.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&halt);
    let (key, places, next) = app.completion_histories.match_history(&ask.ids, ask.ephemeral);
    let window: Vec<WindowToken> = (ask.ids.iter().zip(&places).enumerate())
        .map(|(n, (&id, &place))| WindowToken {
            position: Some(place),
            offset: 0,
            id,
            chunk_start: n % 64 == 0,
        })
        .collect();
    let messages = || match ask.messages.is_empty() {
        true => vec![PromptMessage { role: Role::User, text: ask.text.clone() }],
        false => ask.messages.clone(),
    };
    let prompt = Prompt {
        conversation: &key,
        window: &window,
        messages: &messages,
        next_position: next,
        ephemeral: ask.ephemeral,
    };
    app.completion_histories.last_text.lock().unwrap_or_else(PoisonError::into_inner).clear();
    let mut tokens = 0;
    let done = model.generate(&prompt, &sampling, &ask.attention, &mut |step| {
        if let ModelStep::Token(piece, _) = step {
            tokens += 1;
            if !ask.ephemeral {
                app.completion_histories.push_token(&key, piece.id);
            }
            app.completion_histories
                .last_text
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push_str(&piece.text);
        }
        let flow = listen(step);
        if halt.load(Ordering::SeqCst) { StepFlow::Stop } else { flow }
    });
    app.metrics.record_generated_tokens(tokens);
    done.map_err(|why: Error| ErrorResponse::new(StatusCode::INTERNAL_SERVER_ERROR, why.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(range: std::ops::Range<u32>) -> Vec<TokenId> {
        range.map(TokenId).collect()
    }

    fn position_indices(positions: &[Position]) -> Vec<u64> {
        positions.iter().map(|p| p.0).collect()
    }

    /// What a client takes out and puts back keeps its place; what is new comes behind everything.
    #[test]
    fn completion_reuses_positions_of_resent_tokens() {
        let threads = CompletionHistories::default();
        let (key, first, next) = threads.match_history(&ids(0..100), false);
        assert_eq!((position_indices(&first), next.0), ((0..100).collect(), 100));
        for id in 100..110 {
            threads.push_token(&key, TokenId(id));
        }
        // A piece has left, and something new is said.
        let sent = [ids(0..20), ids(40..110), ids(500..520)].concat();
        let (same, second, next) = threads.match_history(&sent, false);
        let expected: Vec<u64> = (0..20).chain(40..110).chain(110..130).collect();
        assert_eq!((same == key, position_indices(&second), next.0), (true, expected, 130));
        // It is back, and another has left.
        let sent = [ids(0..60), ids(500..520)].concat();
        let (same, third, _) = threads.match_history(&sent, false);
        assert_eq!((same == key, position_indices(&third)), (true, (0..60).chain(110..130).collect()));
        // Somebody else.
        let (other, fourth, _) = threads.match_history(&ids(1000..1100), false);
        assert_eq!((other == key, position_indices(&fourth)), (false, (0..100).collect()));
        // Both go on as they were.
        assert_eq!(threads.match_history(&ids(1000..1101), false).0, other);
        assert_eq!(threads.match_history(&ids(0..60), false).0, key);
    }

    #[test]
    fn completion_with_changed_prefix_starts_new_history() {
        let threads = CompletionHistories::default();
        let (key, ..) = threads.match_history(&ids(0..100), false);
        assert_ne!(threads.match_history(&[ids(900..990), ids(0..5)].concat(), false).0, key);
        assert_ne!(threads.match_history(&ids(7..8), false).0, "", "one token is enough to ask");
    }
}
