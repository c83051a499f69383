//! Signed proofs that a text was deleted. Only the owner of the key can make one, and it reveals nothing about the text
//! to anybody who does not have the text already.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// The key that signs proofs. A proof is only as trustworthy as the key is secret.
pub type ProofKey = [u8; 32];

/// A proof that a text was deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForgetProof {
    /// The conversation and the chunk.
    pub subject: String,
    /// The user or a retention policy.
    pub requested_by: String,
    /// Milliseconds since 1970.
    pub forgotten_at: i64,
    /// The tokens of the text.
    pub tokens: u64,
    /// Hashed before the text, as hexadecimal: without it, the hash of a short text could be looked up.
    pub salt: String,
    /// SHA-256 of salt and text, as hexadecimal.
    pub content_hash: String,
    /// HMAC-SHA-256 over all other fields, as hexadecimal.
    pub signature: String,
}

/// A text that is about to be deleted.
#[derive(Clone, Copy, Debug)]
pub struct ForgottenContent<'a> {
    /// The conversation and the chunk.
    pub subject: &'a str,
    /// The user or a retention policy.
    pub requested_by: &'a str,
    /// The text.
    pub text: &'a str,
    /// The tokens of the text.
    pub tokens: u64,
}

impl ForgetProof {
    /// Makes a proof that a text is deleted at a time.
    #[must_use]
    pub fn sign(key: &ProofKey, salt: [u8; 16], content: ForgottenContent<'_>, at: i64) -> Self {
        let salt = to_hex(&salt);
        let mut proof = Self {
            subject: content.subject.to_owned(),
            requested_by: content.requested_by.to_owned(),
            forgotten_at: at,
            tokens: content.tokens,
            content_hash: hash_content(&salt, content.text),
            salt,
            signature: String::new(),
        };
        proof.sign_again(key);
        proof
    }

    /// Signs the fields as they are now.
    pub fn sign_again(&mut self, key: &ProofKey) {
        self.signature = to_hex(&self.signature_mac(key).finalize().into_bytes());
    }

    /// Whether the proof was signed with a key and not changed since.
    #[must_use]
    pub fn verify(&self, key: &ProofKey) -> bool {
        from_hex(&self.signature)
            .is_some_and(|signature| self.signature_mac(key).verify_slice(&signature).is_ok())
    }

    /// Whether the proof is about a text.
    #[must_use]
    pub fn matches_text(&self, text: &str) -> bool {
        hash_content(&self.salt, text) == self.content_hash
    }

    fn signature_mac(&self, key: &ProofKey) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
        let Self { subject, requested_by, forgotten_at, tokens, salt, content_hash, signature: _ } = self;
        // Each field is preceded by its length, so that no two proofs sign the same bytes.
        for field in
            [subject, requested_by, &forgotten_at.to_string(), &tokens.to_string(), salt, content_hash]
        {
            mac.update(&(field.len() as u64).to_le_bytes());
            mac.update(field.as_bytes());
        }
        mac
    }
}

fn hash_content(salt: &str, text: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(salt.as_bytes());
    hash.update(text.as_bytes());
    to_hex(&hash.finalize())
}

/// Encodes bytes as hexadecimal.
#[must_use]
pub fn to_hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|half| char::from_digit(half.into(), 16).unwrap_or('0'))
        .collect()
}

/// Decodes hexadecimal; none if it is invalid.
#[must_use]
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}
