//! How far a log is replayed to restore a conversation as it was at the end of a turn.

use crate::change::Change;
use crate::token::TurnId;

/// Finds the end of a turn in a log.
#[derive(Debug)]
pub struct TurnEndFinder {
    turn: TurnId,
    found: bool,
    ended: bool,
}

impl TurnEndFinder {
    /// A finder for the end of `turn`.
    #[must_use]
    pub fn new(turn: TurnId) -> Self {
        Self { turn, found: false, ended: false }
    }

    /// Whether the turn ended before `change`, the next change of the log. Call it for every change in order.
    pub fn turn_ended_before(&mut self, change: &Change) -> bool {
        let appends_to_turn =
            |change: &&Change| matches!(change, Change::Append(append) if append.turn == self.turn);
        let appends_later =
            |change: &&Change| matches!(change, Change::Append(append) if append.turn > self.turn);
        let changes = change.flatten();
        if !self.ended && changes.iter().any(appends_to_turn) {
            self.found = true;
        } else {
            self.ended |= self.found || changes.iter().any(appends_later);
        }
        self.ended
    }

    /// Whether the log appends to the turn.
    #[must_use]
    pub fn is_found(&self) -> bool {
        self.found
    }
}
