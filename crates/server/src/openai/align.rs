//! Which conversation a client goes on with that names none and sends its history with every request, all of it or the latest
//! part.

use halo_core::token::Role;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

/// What is kept of a conversation, so that it is known again: sums of its messages as the client has them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Heard {
    /// Of the standing instructions.
    pub system: u64,
    /// Of the latest messages, by turn, the oldest first.
    pub messages: Vec<(u32, u64)>,
}

/// What is kept under.
pub(super) const HEARD: &str = "openai";

/// How many messages are compared.
pub(super) const COMPARED: usize = 256;

/// The sum of a message. Clients trim what they show.
pub(super) fn sum(role: Role, text: &str) -> u64 {
    let mut sum = Xxh3::new();
    sum.update(role.name().as_bytes());
    sum.update(b"\0");
    sum.update(text.trim().as_bytes());
    sum.digest()
}

/// How what a client sends lies beside what is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    /// So many of the messages that were sent are known.
    pub known: usize,
    /// How many of them could be compared.
    pub compared: usize,
    /// So many known messages come after those.
    pub after: usize,
}

/// Looks for the history of a request in what is known: as late as can be, and as much of it as can be. The last message is
/// what is said now and no history.
pub(super) fn fit(known: &[u64], sent: &[u64]) -> Option<Fit> {
    let history = sent.len().saturating_sub(1);
    for ends in (1..=history).rev() {
        for at in (1..=known.len()).rev() {
            let same =
                (known[..at].iter().rev()).zip(sent[..ends].iter().rev()).take_while(|(a, b)| a == b).count();
            // Whatever both have is the same: no further message of the one contradicts the other.
            if same > 0 && same == at.min(ends) {
                return Some(Fit { known: ends, compared: same, after: known.len() - at });
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(known: usize, compared: usize, after: usize) -> Option<Fit> {
        Some(Fit { known, compared, after })
    }

    #[test]
    fn a_history_is_known_again() {
        let known = [1, 2, 3, 4, 5, 6];
        assert_eq!(fit(&known, &[1, 2, 3, 4, 5, 6, 7]), of(6, 6, 0), "all of it");
        assert_eq!(fit(&known, &[5, 6, 7]), of(2, 2, 0), "the latest part");
        assert_eq!(fit(&known, &[6, 7]), of(1, 1, 0));
        assert_eq!(fit(&known, &[1, 2, 3, 4, 5]), of(4, 4, 2), "the last message again");
        assert_eq!(fit(&known, &[1, 2, 9]), of(2, 2, 4), "another way from there");
        assert_eq!(fit(&known, &[1, 2, 3, 4, 5, 6, 8, 9, 7]), of(6, 6, 0), "more than one that is new");
        assert_eq!(fit(&known, &[1]), None, "a first message has no history");
        assert_eq!(fit(&known, &[9, 2, 3, 7]), None, "another beginning is another conversation");
        assert_eq!(fit(&known[2..], &[1, 2, 3, 4, 5, 6, 7]), of(6, 4, 0), "only the latest are kept");
        assert_eq!(fit(&[], &[1, 2]), None);
        assert_eq!(fit(&[1, 2, 1, 2], &[1, 2, 3]), of(2, 2, 0), "as late as can be");
    }

    #[test]
    fn clients_may_trim() {
        assert_eq!(sum(Role::User, " a \n"), sum(Role::User, "a"));
        assert_ne!(sum(Role::User, "a"), sum(Role::Assistant, "a"));
    }
}
