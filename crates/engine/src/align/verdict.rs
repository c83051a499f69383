//! What a request is compared with, and how it continues a conversation.

use halo_core::store::MessageKey;
use halo_core::token::TurnId;
use std::collections::BTreeSet;

/// A message of a stored conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownMessage {
    /// Its hashes and its turn.
    pub key: MessageKey,
    /// Whether it is part of the conversation; if not, it was deleted, by hand or as a variant.
    pub on_path: bool,
}

/// Turns that others have replaced: an answer that was regenerated, or an exchange that was edited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnVariant {
    /// The turn before them; none where they begin the conversation.
    pub after: Option<TurnId>,
    /// Their turns, in order.
    pub turns: Vec<TurnId>,
}

/// A stored conversation that a request is compared with.
#[derive(Clone, Copy, Debug)]
pub struct AlignCandidate<'a> {
    /// Its messages by turn; of a long conversation only the latest.
    pub messages: &'a [KnownMessage],
    pub variants: &'a [TurnVariant],
    /// Whether its first message is among `messages`.
    pub from_start: bool,
    /// Whether its system prompt is similar to that of the request.
    pub same_system: bool,
    /// Hashes ([`MessageKey::loose_hash`]) of messages that no other conversation has.
    pub unique_hashes: &'a BTreeSet<u64>,
    /// Whether the client has named it: then its messages need not identify it.
    pub named: bool,
}

/// How a request continues a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AlignVerdict {
    /// It continues at the end.
    Continue {
        /// Index of the first new message of the request.
        first_new: usize,
    },
    /// The last message is answered again.
    Regenerate {
        /// The answer that is replaced; empty where an earlier attempt failed.
        replaces: Vec<TurnId>,
    },
    /// The last user message was edited.
    EditLast {
        /// The old message and its answer.
        replaces: Vec<TurnId>,
    },
    /// The client continues a variant, which replaces the current turns.
    ChooseVariant {
        chosen_turns: Vec<TurnId>,
        replaces: Vec<TurnId>,
        /// Index of the first new message of the request.
        first_new: usize,
    },
    /// The history differs earlier: a new conversation shares everything up to a turn, and a variant after it.
    Branch {
        /// The last turn of both.
        last_shared_turn: TurnId,
        /// The variant that the client continues after it.
        chosen_turns: Vec<TurnId>,
        /// Index of the first new message of the request.
        first_new: usize,
    },
}

/// How well a request fits a conversation: the larger, the better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AlignScore {
    pub(super) rank: u8,
    pub(super) matched: usize,
    pub(super) same_system: bool,
}

/// How a request continues a conversation, and how well it fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alignment {
    pub verdict: AlignVerdict,
    pub score: AlignScore,
    /// Indexes of messages that replace text of the conversation, mostly summaries.
    pub summaries: Vec<usize>,
    /// The last turn that the history shares with the conversation; none where only the last message matches.
    pub last_shared_turn: Option<TurnId>,
    /// Index of the first message of the request after that turn.
    pub first_unmatched: usize,
}
