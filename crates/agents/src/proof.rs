//! That something was forgotten, and when: a statement that nobody without the key could have made, and that says nothing
//! of what it was to anybody who does not have the words already.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// What a proof is made with. Who has it can make proofs; who looks after it can trust them.
pub type Key = [u8; 32];

/// That something was forgotten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// What it was called: a conversation and a chunk of it.
    pub subject: String,
    /// At whose wish: the user's, or that of a policy.
    pub by: String,
    /// When, in milliseconds since 1970.
    pub at: i64,
    /// How many tokens it had.
    pub tokens: u64,
    /// What is mixed with the words before they are summed, as hexadecimal: without it, the sum of a short text could be
    /// looked up.
    pub salt: String,
    /// The sum of the words (SHA-256), as hexadecimal.
    pub content: String,
    /// The seal over all of this (HMAC-SHA-256), as hexadecimal.
    pub seal: String,
}

/// What is about to be forgotten.
#[derive(Clone, Copy, Debug)]
pub struct Gone<'a> {
    /// What it is called.
    pub subject: &'a str,
    /// At whose wish.
    pub by: &'a str,
    /// What it says.
    pub text: &'a str,
    /// How many tokens it has.
    pub tokens: u64,
}

impl Proof {
    /// A proof that something is forgotten at that time.
    #[must_use]
    pub fn seal(key: &Key, salt: [u8; 16], gone: Gone<'_>, at: i64) -> Self {
        let salt = hex(&salt);
        let mut proof = Self {
            subject: gone.subject.to_owned(),
            by: gone.by.to_owned(),
            at,
            tokens: gone.tokens,
            content: sum(&salt, gone.text),
            salt,
            seal: String::new(),
        };
        proof.seal = hex(&proof.mac(key).finalize().into_bytes());
        proof
    }

    /// Whether it was made with that key, and nothing of it was changed since.
    #[must_use]
    pub fn verify(&self, key: &Key) -> bool {
        unhex(&self.seal).is_some_and(|seal| self.mac(key).verify_slice(&seal).is_ok())
    }

    /// Whether it is of these words.
    #[must_use]
    pub fn is_of(&self, text: &str) -> bool {
        sum(&self.salt, text) == self.content
    }

    fn mac(&self, key: &Key) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("a key of any length will do");
        let Self { subject, by, at, tokens, salt, content, seal: _ } = self;
        // Each field with its length: no two statements are the same bytes.
        for field in [subject, by, &at.to_string(), &tokens.to_string(), salt, content] {
            mac.update(&(field.len() as u64).to_le_bytes());
            mac.update(field.as_bytes());
        }
        mac
    }
}

fn sum(salt: &str, text: &str) -> String {
    let mut sum = Sha256::new();
    sum.update(salt.as_bytes());
    sum.update(text.as_bytes());
    hex(&sum.finalize())
}

/// Bytes as hexadecimal.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|half| char::from_digit(half.into(), 16).unwrap_or('0'))
        .collect()
}

/// Hexadecimal as bytes; none if it is not that.
#[must_use]
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}
