//! How far a log is gone through to see a conversation as it was when a turn had been said.

use crate::change::Change;
use crate::token::TurnId;

/// Looks for the end of a turn in a log.
#[derive(Debug)]
pub struct Past {
    turn: TurnId,
    found: bool,
    over: bool,
}

impl Past {
    /// The end of that turn.
    #[must_use]
    pub fn new(turn: TurnId) -> Self {
        Self { turn, found: false, over: false }
    }

    /// Whether the turn had been said before this, the next change of the log, happened.
    pub fn ends_before(&mut self, change: &Change) -> bool {
        let said = |change: &&Change| matches!(change, Change::Append(append) if append.turn == self.turn);
        let later = |change: &&Change| matches!(change, Change::Append(append) if append.turn > self.turn);
        let parts = change.parts();
        if !self.over && parts.iter().any(said) {
            self.found = true;
        } else {
            self.over |= self.found || parts.iter().any(later);
        }
        self.over
    }

    /// Whether there was such a turn.
    #[must_use]
    pub fn is_found(&self) -> bool {
        self.found
    }
}
