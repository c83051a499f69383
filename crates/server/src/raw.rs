//! The model without a conversation, for clients that keep their own. What they send is compared with what they sent before:
//! what is the same keeps its place, so the model's memory of it is kept too, even where something in between has gone or come
//! back.

use crate::answer::{Answer, Refusal};
use crate::app::App;
use axum::http::StatusCode;
use halo_core::attention::Watch;
use halo_core::seams::{Finish, Flow, Message, ModelStep, Prompt, Sampling, SeamError, Seen};
use halo_core::token::{Position, Role, TokenId};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What clients have sent, the last used first.
pub(crate) struct Threads {
    lines: Mutex<Vec<Line>>,
    next: AtomicU64,
    started: i64,
    /// Stops what is being said.
    halt: Mutex<Arc<AtomicBool>>,
    /// What is being said, or was last.
    said: Mutex<String>,
    /// The window that was last gone on from, and what was said then.
    last: Mutex<Vec<TokenId>>,
}

/// All that one client has ever sent and heard, in order: the index is the place.
#[derive(Default)]
struct Line {
    key: String,
    all: Vec<TokenId>,
}

/// How many are remembered, and how long each may be.
const LINES: usize = 8;
const LONGEST: usize = 1 << 20;

/// So many tokens in a row are the same: it is what was sent before.
const SAME: usize = 8;

/// What is asked of the model.
pub(crate) struct Ask {
    pub ids: Vec<TokenId>,
    /// The same as text, for a model that is spoken to in that.
    pub text: String,
    /// The same as messages; empty: as one of the user's.
    pub messages: Vec<Message>,
    pub sampling: Sampling,
    pub watch: Watch,
    pub who: String,
    /// Whether it is forgotten afterwards.
    pub aside: bool,
}

impl Default for Threads {
    fn default() -> Self {
        Self {
            lines: Mutex::default(),
            next: AtomicU64::new(0),
            started: jiff::Timestamp::now().as_microsecond(),
            halt: Mutex::default(),
            said: Mutex::default(),
            last: Mutex::default(),
        }
    }
}

impl Line {
    /// The places of a window: as a part of what was sent before, in its order, as far as it is, and behind all that from
    /// there on. Also how many are as before.
    fn place(&self, window: &[TokenId]) -> (Vec<Position>, usize) {
        let mut places = Vec::with_capacity(window.len());
        let mut at = 0;
        while places.len() < window.len() {
            let rest = &window[places.len()..];
            if self.all.get(at) != Some(&rest[0]) {
                let head = &rest[..rest.len().min(SAME)];
                match self.all[at.min(self.all.len())..].windows(head.len()).position(|there| there == head) {
                    Some(gone) => at += gone,
                    None => break,
                }
            }
            places.push(Position(at as u64));
            at += 1;
        }
        let known = places.len();
        let new = window.len() - known;
        places.extend((0..new).map(|n| Position((self.all.len() + n) as u64)));
        (places, known)
    }
}

impl Threads {
    /// Finds the line that a window goes on from, or begins one; it becomes the first. Returns its key and the places. What is
    /// aside leaves no trace.
    fn place(&self, window: &[TokenId], aside: bool) -> (String, Vec<Position>, Position) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let best = (lines.iter().enumerate())
            .map(|(n, line)| (n, line.place(window)))
            .max_by_key(|(n, (_, known))| (*known, std::cmp::Reverse(*n)));
        let worth = |known: usize| known >= SAME.min(window.len()) && known * 2 >= window.len().min(2 * SAME);
        let mut line = match &best {
            Some((n, (_, known))) if worth(*known) && lines[*n].all.len() < LONGEST => lines.remove(*n),
            _ => {
                let number = self.next.fetch_add(1, Ordering::SeqCst);
                Line { key: format!("raw\0{}\0{number}", self.started), all: Vec::new() }
            }
        };
        let (places, known) = line.place(window);
        let next = Position((line.all.len() + window.len() - known) as u64);
        let key = line.key.clone();
        if !aside {
            line.all.extend(&window[known..]);
            *self.last.lock().unwrap_or_else(PoisonError::into_inner) = window.to_vec();
        }
        lines.insert(0, line);
        lines.truncate(LINES);
        (key, places, next)
    }

    /// A token was said: it is where the next one follows.
    fn said(&self, key: &str, id: TokenId) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = lines.iter_mut().find(|line| line.key == key) {
            line.all.push(id);
        }
        self.last.lock().unwrap_or_else(PoisonError::into_inner).push(id);
    }

    /// What was last sent and heard, for who wants to go on from there.
    pub fn last(&self) -> Option<Vec<TokenId>> {
        Some(self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()).filter(|last| !last.is_empty())
    }

    /// What is being said, or was last.
    pub fn text(&self) -> String {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops what is being said.
    pub fn stop(&self) {
        self.halt.lock().unwrap_or_else(PoisonError::into_inner).store(true, Ordering::SeqCst);
    }
}

/// Asks the model, when it is free; blocks until it has spoken. `still` is asked while it waits.
pub(crate) fn ask(
    app: &App,
    ask: &Ask,
    still: &mut dyn FnMut(usize) -> Flow,
    listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
) -> Answer<Finish> {
    app.room_in_line()?;
    let mut model = app.parts.model()?;
    let context = model.info().context;
    if ask.ids.is_empty() {
        return Err(Refusal::bad("the prompt is empty: send something to go on from"));
    }
    if ask.ids.len() + 1 > context {
        let why = format!("the prompt has {} tokens, and the model sees {context}: send less", ask.ids.len());
        return Err(Refusal::bad(why));
    }
    let sampling =
        Sampling { max_tokens: ask.sampling.max_tokens.min(context - ask.ids.len()), ..ask.sampling.clone() };
    let Some(_pass) = app.host.gate().pass(&ask.who, still) else {
        return Err(Refusal::new(StatusCode::CONFLICT, "stopped before its turn came"));
    };
    let halt = Arc::new(AtomicBool::new(false));
    *app.threads.halt.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&halt);
    let (key, places, next) = app.threads.place(&ask.ids, ask.aside);
    let window: Vec<Seen> = (ask.ids.iter().zip(&places).enumerate())
        .map(|(n, (&id, &place))| Seen { position: Some(place), behind: 0, id, begins: n % 64 == 0 })
        .collect();
    let messages = || match ask.messages.is_empty() {
        true => vec![Message { role: Role::User, text: ask.text.clone() }],
        false => ask.messages.clone(),
    };
    let prompt = Prompt { conversation: &key, window: &window, messages: &messages, next, aside: ask.aside };
    app.threads.said.lock().unwrap_or_else(PoisonError::into_inner).clear();
    let mut tokens = 0;
    let done = model.generate(&prompt, &sampling, &ask.watch, &mut |step| {
        if let ModelStep::Token(piece, _) = step {
            tokens += 1;
            if !ask.aside {
                app.threads.said(&key, piece.id);
            }
            app.threads.said.lock().unwrap_or_else(PoisonError::into_inner).push_str(&piece.text);
        }
        let flow = listen(step);
        if halt.load(Ordering::SeqCst) { Flow::Stop } else { flow }
    });
    app.metrics.spoken(tokens);
    done.map_err(|why: SeamError| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, why.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(range: std::ops::Range<u32>) -> Vec<TokenId> {
        range.map(TokenId).collect()
    }

    fn places(positions: &[Position]) -> Vec<u64> {
        positions.iter().map(|p| p.0).collect()
    }

    /// What a client takes out and puts back keeps its place; what is new comes behind everything.
    #[test]
    fn what_is_sent_again_keeps_its_place() {
        let threads = Threads::default();
        let (key, first, next) = threads.place(&ids(0..100), false);
        assert_eq!((places(&first), next.0), ((0..100).collect(), 100));
        for id in 100..110 {
            threads.said(&key, TokenId(id));
        }
        // A piece has left, and something new is said.
        let sent = [ids(0..20), ids(40..110), ids(500..520)].concat();
        let (same, second, next) = threads.place(&sent, false);
        let expected: Vec<u64> = (0..20).chain(40..110).chain(110..130).collect();
        assert_eq!((same == key, places(&second), next.0), (true, expected, 130));
        // It is back, and another has left.
        let sent = [ids(0..60), ids(500..520)].concat();
        let (same, third, _) = threads.place(&sent, false);
        assert_eq!((same == key, places(&third)), (true, (0..60).chain(110..130).collect()));
        // Somebody else.
        let (other, fourth, _) = threads.place(&ids(1000..1100), false);
        assert_eq!((other == key, places(&fourth)), (false, (0..100).collect()));
        // Both go on as they were.
        assert_eq!(threads.place(&ids(1000..1101), false).0, other);
        assert_eq!(threads.place(&ids(0..60), false).0, key);
    }

    #[test]
    fn a_changed_beginning_is_another_line() {
        let threads = Threads::default();
        let (key, ..) = threads.place(&ids(0..100), false);
        assert_ne!(threads.place(&[ids(900..990), ids(0..5)].concat(), false).0, key);
        assert_ne!(threads.place(&ids(7..8), false).0, "", "one token is enough to ask");
    }
}
