//! Text from tokens: whole characters only, and where a stop sequence ends.

use crate::ffi::{Token, Weights};
use halo_core::seams::Piece;
use halo_core::token::TokenId;

/// Puts bytes together to characters. Bytes that cannot become a character are shown as such.
#[derive(Debug, Default)]
pub struct Letters {
    pending: Vec<u8>,
}

impl Letters {
    /// The text that these bytes complete; empty while a character is incomplete.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match str::from_utf8(&self.pending) {
                Ok(whole) => {
                    text.push_str(whole);
                    self.pending.clear();
                    return text;
                }
                Err(error) => {
                    let (valid, rest) = self.pending.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        // More may come.
                        None => {
                            self.pending = rest.to_vec();
                            return text;
                        }
                        Some(bad) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            self.pending = rest[bad..].to_vec();
                        }
                    }
                }
            }
        }
    }

    /// What is left when nothing more comes.
    pub fn end(&mut self) -> String {
        let rest = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&rest).into_owned()
    }
}

/// Cuts a text into pieces whose texts, in a row, are the text.
#[must_use]
pub fn pieces(weights: &Weights, text: &str, special: bool) -> Vec<Piece> {
    let mut letters = Letters::default();
    let tokens = weights.tokenize(text, special);
    let piece = |&token: &Token| Piece {
        id: TokenId(token.cast_unsigned()),
        text: letters.push(&weights.bytes(token, true)),
    };
    let mut pieces: Vec<Piece> = tokens.iter().map(piece).collect();
    let rest = letters.end();
    if let Some(last) = pieces.last_mut() {
        last.text.push_str(&rest);
    }
    let said: String = pieces.iter().map(|p| p.text.as_str()).collect();
    if said == text {
        return pieces;
    }
    // Some vocabularies begin a text with a space that is not there.
    if said.strip_prefix(' ') == Some(text)
        && let Some(first) = pieces.iter_mut().find(|p| p.text.starts_with(' '))
    {
        first.text.remove(0);
        return pieces;
    }
    // Others change it on the way: what was said stays as it was said, as a whole.
    for (n, piece) in pieces.iter_mut().enumerate() {
        piece.text = if n == 0 { text.to_owned() } else { String::new() };
    }
    pieces
}

/// Watches for stop sequences.
#[derive(Debug)]
pub struct Stops<'a> {
    stops: &'a [String],
    tail: String,
}

impl<'a> Stops<'a> {
    /// Watches for any of these.
    #[must_use]
    pub fn new(stops: &'a [String]) -> Self {
        Self { stops, tail: String::new() }
    }

    /// Whether one of them has been said, now that this was said too.
    pub fn said(&mut self, text: &str) -> bool {
        self.tail.push_str(text);
        let hit = self.stops.iter().any(|stop| !stop.is_empty() && self.tail.contains(stop.as_str()));
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let mut cut = self.tail.len().saturating_sub(longest);
        while !self.tail.is_char_boundary(cut) {
            cut -= 1;
        }
        self.tail.drain(..cut);
        hit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_whole_however_they_come() {
        for text in ["plain", "naïve 谢谢 🌱👩‍👩‍👧", ""] {
            for size in 1..6 {
                let mut letters = Letters::default();
                let parts: Vec<String> = text.as_bytes().chunks(size).map(|c| letters.push(c)).collect();
                assert_eq!(parts.concat() + &letters.end(), text);
            }
        }
        let mut letters = Letters::default();
        assert_eq!(letters.push(b"a\xf0\x9f"), "a");
        assert_eq!(letters.push(b"b"), "\u{fffd}b", "it was never completed");
        assert_eq!((letters.push(b"\xe8\xb0"), letters.end()), (String::new(), "\u{fffd}".into()));
    }

    #[test]
    fn stops_are_found_across_tokens() {
        let stops = ["</tool>".to_owned(), "\n谢".to_owned(), String::new()];
        let said = |parts: &[&str]| {
            let mut watch = Stops::new(&stops);
            parts.iter().position(|p| watch.said(p))
        };
        assert_eq!(said(&["a </", "to", "ol> b", "c"]), Some(2));
        assert_eq!(said(&["谢谢\n", "谢谢"]), Some(1));
        assert_eq!(said(&["</tool", " >", "谢谢谢谢谢谢谢谢谢谢"]), None);
        assert!(!Stops::new(&[]).said("anything"));
    }
}
