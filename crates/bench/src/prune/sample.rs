//! Stretches of real conversations: a window, and its actual continuation.

use crate::recall::DatasetConversation;
use halo_core::change::{Append, Change};
use halo_core::model::ModelToken;
use halo_core::rules::ContextRules;
use halo_core::timeline::Timeline;
use halo_core::token::{ContentKind, Role, TurnId};
use halo_engine::chat_format::{self, ChatFormatter};
use halo_llama::ffi::LlamaToken;
use std::collections::BTreeMap;

/// Lengths of the parts of a stretch, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleLengths {
    /// The conversation so far, which is prefilled first.
    pub history: usize,
    /// The next part, over which attention is captured.
    pub observed: usize,
    /// The continuation, whose predictions are compared.
    pub next: usize,
    /// The maximum of both first parts together: each ends with a whole message, which can be long.
    pub max_window: usize,
}

pub(crate) struct ConversationSample {
    /// Tokens before the timeline.
    pub(crate) prefix: Vec<LlamaToken>,
    /// The conversation so far.
    pub(crate) history: Timeline,
    /// The next part, over which attention is captured.
    pub(crate) observed: Vec<Append>,
    pub(crate) next: Vec<LlamaToken>,
    /// By question: the turns of the window that it needs.
    pub(crate) evidence: Vec<Vec<TurnId>>,
}

impl ConversationSample {
    /// Tokens of the window before the watched part.
    #[must_use]
    pub(crate) fn prefill_tokens(&self) -> Vec<LlamaToken> {
        let ids = self.history.chunks().flat_map(|chunk| chunk.ids(chunk.run()));
        self.prefix.iter().copied().chain(ids.map(|id| id.0.cast_signed())).collect()
    }

    #[must_use]
    pub(crate) fn observed_tokens(&self) -> Vec<LlamaToken> {
        self.observed.iter().flat_map(|turn| &turn.tokens).map(|token| token.id.0.cast_signed()).collect()
    }
}

/// Tokenizes a text, with special tokens where requested.
pub(crate) type TokenizeFn<'a> = dyn Fn(&str, bool) -> Vec<ModelToken> + 'a;

/// Up to `count` stretches of a conversation, evenly spread without overlap.
pub(crate) fn cut_samples(
    conversation: &DatasetConversation,
    count: usize,
    lengths: SampleLengths,
    frame: &ChatFormatter,
    rules: &ContextRules,
    tokenize: &TokenizeFn<'_>,
) -> Vec<ConversationSample> {
    let turns = merge_turns(conversation);
    let written: Vec<Vec<(ModelToken, ContentKind)>> = (turns.iter().enumerate())
        .map(|(n, turn)| tokenize_turn(frame, turn, n.checked_sub(1).map(|n| turns[n].role), tokenize))
        .collect();
    let need = lengths.history + lengths.observed + lengths.next;
    let mut samples = Vec::new();
    let mut free = 0;
    for number in 0..count {
        let from = (turns.len() * number / count).max(free);
        let mut so_far = 0;
        let remaining = written[from.min(written.len())..].iter();
        let ends = remaining.map(|turn| {
            so_far += turn.len();
            so_far
        });
        let ends: Vec<usize> = ends.collect();
        let Some(last) = ends.iter().position(|&end| end >= need + 256) else { break };
        free = from + last + 1;
        let turn_at = |length: usize| ends.iter().position(|&end| end >= length).unwrap_or(last) + 1;
        let (watched, next) = (turn_at(lengths.history), turn_at(lengths.history + lengths.observed));
        if ends[next - 1] > lengths.max_window {
            continue;
        }
        let (mut timeline, mut history, mut appends) = (Timeline::new(), None, Vec::new());
        for (n, (turn, written)) in turns[from..from + next].iter().zip(&written[from..]).enumerate() {
            if n == watched {
                history = Some(timeline.clone());
            }
            let append = chat_format::plan_append(&timeline, turn.role, written.clone(), rules);
            appends.extend(history.is_some().then(|| append.clone()));
            timeline.apply(&Change::Append(append)).expect("it follows what is there");
        }
        let following = written[from + next..].iter().flatten();
        let next_tokens = following.take(lengths.next).map(|(piece, _)| piece.id.0.cast_signed());
        let of_message: BTreeMap<usize, TurnId> = (turns[from..from + next].iter().enumerate())
            .flat_map(|(n, turn)| turn.messages.iter().map(move |&m| (m, TurnId(n as u32))))
            .collect();
        let evidence = conversation.questions.iter().map(|question| {
            let places = question.evidence.iter().filter_map(|id| conversation.turn_of(id));
            places.filter_map(|place| of_message.get(&(place.0 as usize)).copied()).collect::<Vec<_>>()
        });
        samples.push(ConversationSample {
            prefix: tokenize(&frame.preamble().text(), true).iter().map(|p| p.id.0.cast_signed()).collect(),
            history: history.unwrap_or(timeline),
            observed: appends,
            next: next_tokens.collect(),
            evidence: evidence.filter(|turns| !turns.is_empty()).collect(),
        });
    }
    samples
}

/// Consecutive messages of one speaker as one.
pub(super) struct MergedTurn {
    pub(super) role: Role,
    pub(super) text: String,
    messages: Vec<usize>,
}

pub(super) fn merge_turns(conversation: &DatasetConversation) -> Vec<MergedTurn> {
    let mut turns: Vec<MergedTurn> = Vec::new();
    for (n, (_, user, text)) in conversation.messages().enumerate() {
        let role = if user { Role::User } else { Role::Assistant };
        match turns.last_mut().filter(|turn| turn.role == role) {
            Some(turn) => {
                turn.text.push('\n');
                turn.text.push_str(text);
                turn.messages.push(n);
            }
            None => turns.push(MergedTurn { role, text: text.to_owned(), messages: vec![n] }),
        }
    }
    turns
}

fn tokenize_turn(
    frame: &ChatFormatter,
    turn: &MergedTurn,
    before: Option<Role>,
    tokenize: &TokenizeFn<'_>,
) -> Vec<(ModelToken, ContentKind)> {
    let opening = tokenize(&frame.turn_header(turn.role, before, None).text(), true);
    let tokens = tokenize(&turn.text, false);
    let frame = opening.into_iter().map(|piece| (piece, ContentKind::Template));
    frame.chain(tokens.into_iter().map(|piece| (piece, ContentKind::Message))).collect()
}
