//! Stretches of real conversations: a window, and what really came next.

use crate::recall::Conversation;
use halo_core::change::{Append, Change};
use halo_core::replay::Rules;
use halo_core::seams::Piece;
use halo_core::timeline::Timeline;
use halo_core::token::{Role, TurnId, Voice};
use halo_engine::frame::{self, Frame};
use halo_llama::ffi::Token;
use std::collections::BTreeMap;

/// How long the parts of a stretch are, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// What is read first, as a conversation so far.
    pub history: usize,
    /// What is said next, while the model's attention is watched.
    pub watched: usize,
    /// What really came next: the guesses at it are compared.
    pub next: usize,
    /// What is read and watched together, at most: both end with a whole message, and those can be long.
    pub most: usize,
}

/// A stretch of a conversation.
pub(crate) struct Sample {
    /// What stands before the timeline.
    pub(crate) prefix: Vec<Token>,
    /// What has been said so far.
    pub(crate) history: Timeline,
    /// What is said then, while the model is watched.
    pub(crate) watched: Vec<Append>,
    /// What really came next.
    pub(crate) next: Vec<Token>,
    /// By question: the turns of the window that it needs.
    pub(crate) evidence: Vec<Vec<TurnId>>,
}

impl Sample {
    /// The tokens of the window before anything is watched.
    #[must_use]
    pub(crate) fn read(&self) -> Vec<Token> {
        let ids = self.history.chunks().flat_map(|chunk| chunk.ids(chunk.run()));
        self.prefix.iter().copied().chain(ids.map(|id| id.0.cast_signed())).collect()
    }

    /// The tokens that are watched.
    #[must_use]
    pub(crate) fn said(&self) -> Vec<Token> {
        self.watched.iter().flat_map(|turn| &turn.tokens).map(|token| token.id.0.cast_signed()).collect()
    }
}

/// Cuts text into tokens, special ones where that is asked for.
pub(crate) type Tokenize<'a> = dyn Fn(&str, bool) -> Vec<Piece> + 'a;

/// Up to `count` stretches of a conversation, evenly spread and none overlapping another.
pub(crate) fn cut(
    conversation: &Conversation,
    count: usize,
    lengths: Lengths,
    frame: &Frame,
    rules: &Rules,
    tokenize: &Tokenize<'_>,
) -> Vec<Sample> {
    let turns = turns(conversation);
    let written: Vec<Vec<(Piece, Voice)>> = (turns.iter().enumerate())
        .map(|(n, turn)| written(frame, turn, n.checked_sub(1).map(|n| turns[n].role), tokenize))
        .collect();
    let need = lengths.history + lengths.watched + lengths.next;
    let mut samples = Vec::new();
    let mut free = 0;
    for number in 0..count {
        let from = (turns.len() * number / count).max(free);
        let mut so_far = 0;
        let rest = written[from.min(written.len())..].iter();
        let ends = rest.map(|turn| {
            so_far += turn.len();
            so_far
        });
        let ends: Vec<usize> = ends.collect();
        let Some(last) = ends.iter().position(|&end| end >= need + 256) else { break };
        free = from + last + 1;
        let turn_at = |length: usize| ends.iter().position(|&end| end >= length).unwrap_or(last) + 1;
        let (watched, next) = (turn_at(lengths.history), turn_at(lengths.history + lengths.watched));
        if ends[next - 1] > lengths.most {
            continue;
        }
        let (mut timeline, mut history, mut appends) = (Timeline::new(), None, Vec::new());
        for (n, (turn, written)) in turns[from..from + next].iter().zip(&written[from..]).enumerate() {
            if n == watched {
                history = Some(timeline.clone());
            }
            let append = frame::append(&timeline, turn.role, written.clone(), rules);
            appends.extend(history.is_some().then(|| append.clone()));
            timeline.apply(&Change::Append(append)).expect("it follows what is there");
        }
        let following = written[from + next..].iter().flatten();
        let next_tokens = following.take(lengths.next).map(|(piece, _)| piece.id.0.cast_signed());
        let of_message: BTreeMap<usize, TurnId> = (turns[from..from + next].iter().enumerate())
            .flat_map(|(n, turn)| turn.messages.iter().map(move |&m| (m, TurnId(n as u32))))
            .collect();
        let evidence = conversation.questions.iter().map(|question| {
            let places = question.evidence.iter().filter_map(|id| conversation.turn(id));
            places.filter_map(|place| of_message.get(&(place.0 as usize)).copied()).collect::<Vec<_>>()
        });
        samples.push(Sample {
            prefix: tokenize(&frame.before_all(), true).iter().map(|p| p.id.0.cast_signed()).collect(),
            history: history.unwrap_or(timeline),
            watched: appends,
            next: next_tokens.collect(),
            evidence: evidence.filter(|turns| !turns.is_empty()).collect(),
        });
    }
    samples
}

/// What one of them said before the other spoke again.
struct Turn {
    role: Role,
    text: String,
    messages: Vec<usize>,
}

fn turns(conversation: &Conversation) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::new();
    for (n, (_, user, text)) in conversation.said().enumerate() {
        let role = if user { Role::User } else { Role::Assistant };
        match turns.last_mut().filter(|turn| turn.role == role) {
            Some(turn) => {
                turn.text.push('\n');
                turn.text.push_str(text);
                turn.messages.push(n);
            }
            None => turns.push(Turn { role, text: text.to_owned(), messages: vec![n] }),
        }
    }
    turns
}

fn written(frame: &Frame, turn: &Turn, before: Option<Role>, tokenize: &Tokenize<'_>) -> Vec<(Piece, Voice)> {
    let opening = tokenize(&frame.opening(turn.role, before, None), true);
    let said = tokenize(&turn.text, false);
    let frame = opening.into_iter().map(|piece| (piece, Voice::Frame));
    frame.chain(said.into_iter().map(|piece| (piece, Voice::Speaker))).collect()
}
