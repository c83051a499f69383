//! Cuts text into the pieces that a BERT knows by number, as the library does that such models come with.
//!
//! Only that one way is understood (a BERT's normaliser, words, WordPiece): it fits on a page, and the library itself
//! would add sixty crates. The tables of categories are the library's, of Unicode 8 for ever: a model knows no newer
//! ones. A text is read only as far as the model will: the rest of a long one costs nothing.

use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::iter::once;
use unicode_categories::UnicodeCategories;
use unicode_normalization::UnicodeNormalization;

/// The most tokens that are read of a text, the first and the last that every text has among them.
pub const MAX_TOKENS: usize = 256;

/// A vocabulary, and how text is cut into it.
pub(super) struct Tokenizer {
    /// Pieces that a word begins with, whole words among them.
    begins: HashMap<String, i32>,
    /// Pieces that a word goes on with.
    goes_on: HashMap<String, i32>,
    /// The bytes of the longest piece: nothing longer need be looked for.
    longest: usize,
    /// Names that stand for a token wherever they occur, the longest first.
    names: Vec<(String, i32)>,
    /// What every text begins and ends with, and what stands for a word that cannot be put together.
    first: i32,
    last: i32,
    unknown: i32,
    /// The longest word, in characters, that is put together.
    longest_word: usize,
    normal: Normal,
}

/// How text is made plain before it is cut.
#[derive(Clone, Copy, Deserialize)]
struct Normal {
    clean_text: bool,
    handle_chinese_chars: bool,
    strip_accents: Option<bool>,
    lowercase: bool,
}

#[derive(Deserialize)]
struct WordPiece {
    vocab: HashMap<String, i32>,
    unk_token: String,
    continuing_subword_prefix: String,
    max_input_chars_per_word: usize,
}

#[derive(Deserialize)]
struct Added {
    id: i32,
    content: String,
    normalized: bool,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. What it says of truncation and padding belongs to whoever wrote it, and is not heeded.
    ///
    /// # Errors
    /// When it is none, or cuts text in another way.
    pub(super) fn parse(json: &[u8]) -> Result<Self, String> {
        let mut file: Value = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        for (part, understood) in
            [("normalizer", "BertNormalizer"), ("pre_tokenizer", "BertPreTokenizer"), ("model", "WordPiece")]
        {
            let kind = file[part]["type"].as_str().unwrap_or("none");
            if kind != understood {
                return Err(format!(
                    "its {part} is {kind}, and only {understood} is understood: take a model of the BERT family"
                ));
            }
        }
        fn take<T: serde::de::DeserializeOwned>(file: &mut Value, part: &str) -> Result<T, String> {
            serde_json::from_value(file[part].take()).map_err(|e| format!("{part}: {e}"))
        }
        let normal = take(&mut file, "normalizer")?;
        let added: Option<Vec<Added>> = take(&mut file, "added_tokens")?;
        let model: WordPiece = take(&mut file, "model")?;
        let number = |name: &str| {
            model.vocab.get(name).copied().ok_or_else(|| format!("its vocabulary has no {name}"))
        };
        let (first, last, unknown) = (number("[CLS]")?, number("[SEP]")?, number(&model.unk_token)?);
        let mut names: Vec<_> = added
            .into_iter()
            .flatten()
            .filter(|name| !name.normalized && !name.content.is_empty())
            .map(|name| (name.content, name.id))
            .collect();
        names.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        let longest = model.vocab.keys().map(String::len).max().unwrap_or(0);
        let goes_on = model
            .vocab
            .iter()
            .filter_map(|(piece, &id)| {
                Some((piece.strip_prefix(&model.continuing_subword_prefix)?.to_owned(), id))
            })
            .collect();
        Ok(Self {
            begins: model.vocab,
            goes_on,
            longest,
            names,
            first,
            last,
            unknown,
            longest_word: model.max_input_chars_per_word,
            normal,
        })
    }

    /// The tokens of a text between the first and the last that every text has, at most `most` with those two.
    pub(super) fn tokenize(&self, text: &str, most: usize) -> Vec<i32> {
        let mut tokens = vec![self.first];
        let most = most.saturating_sub(1).max(1);
        let mut from = 0;
        let starts = |c: char| self.names.iter().any(|(name, _)| name.starts_with(c));
        for (at, _) in text.match_indices(starts) {
            let name = self.names.iter().find(|(name, _)| text[at..].starts_with(name.as_str()));
            if let Some((name, id)) = name.filter(|_| at >= from) {
                self.words(&text[from..at], most, &mut tokens);
                tokens.push(*id);
                from = at + name.len();
            }
            if tokens.len() >= most {
                break;
            }
        }
        self.words(&text[from..], most, &mut tokens);
        tokens.truncate(most);
        tokens.push(self.last);
        tokens
    }

    /// The pieces of a text without names, until there are `most` or more.
    fn words(&self, text: &str, most: usize, tokens: &mut Vec<i32>) {
        // One more character than a word may have tells that it is too long; the others need not be kept.
        let (mut word, mut length) = (String::new(), 0);
        for c in self.normal.chars(text).chain(once(' ')) {
            let (blank, mark) = (c.is_whitespace(), is_punctuation(c));
            if (blank || mark) && !word.is_empty() {
                self.pieces(&word, tokens);
                (word, length) = (String::new(), 0);
            }
            if tokens.len() >= most {
                return;
            }
            if mark {
                self.pieces(c.encode_utf8(&mut [0; 4]), tokens);
            } else if !blank && length <= self.longest_word {
                word.push(c);
                length += 1;
            }
        }
    }

    /// The longest piece that a word begins with, then the longest that the rest begins with, and so on. A word that
    /// cannot be put together so is one unknown token.
    fn pieces(&self, word: &str, tokens: &mut Vec<i32>) {
        let before = tokens.len();
        let mut rest = if word.chars().count() > self.longest_word { "" } else { word };
        while !rest.is_empty() {
            let known = if rest.len() == word.len() { &self.begins } else { &self.goes_on };
            let ends = (1..=rest.len().min(self.longest)).rev().filter(|&end| rest.is_char_boundary(end));
            let Some((end, &id)) = ends.filter_map(|end| Some((end, known.get(&rest[..end])?))).next() else {
                tokens.truncate(before);
                break;
            };
            tokens.push(id);
            rest = &rest[end..];
        }
        if tokens.len() == before {
            tokens.push(self.unknown);
        }
    }
}

impl Normal {
    /// The characters of a text, made plain: without noise, ideographs apart, accents off, in lower case.
    fn chars(self, text: &str) -> Box<dyn Iterator<Item = char> + '_> {
        let mut chars: Box<dyn Iterator<Item = char> + '_> = Box::new(text.chars());
        if self.clean_text {
            chars = Box::new(chars.filter(|&c| !is_noise(c)));
        }
        if self.handle_chinese_chars {
            let apart =
                |c| if is_ideograph(c) { [Some(' '), Some(c), Some(' ')] } else { [Some(c), None, None] };
            chars = Box::new(chars.flat_map(apart).flatten());
        }
        if self.strip_accents.unwrap_or(self.lowercase) {
            chars = Box::new(chars.nfd().filter(|c| !c.is_mark_nonspacing()));
        }
        if self.lowercase {
            chars = Box::new(chars.flat_map(char::to_lowercase));
        }
        chars
    }
}

/// What is not text: control and format characters, those of private use, and what stands for a broken one.
fn is_noise(c: char) -> bool {
    match c {
        '\t' | '\n' | '\r' => false,
        '\u{fffd}' => true,
        _ => c.is_other(),
    }
}

fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation() || c.is_punctuation()
}

/// Whether a character is a word by itself: the blocks that BERT's authors took for Chinese. One of them begins where
/// theirs does, a little late.
fn is_ideograph(c: char) -> bool {
    matches!(c,
        '\u{4e00}'..='\u{9fff}' | '\u{3400}'..='\u{4dbf}' | '\u{20000}'..='\u{2a6df}' | '\u{2a700}'..='\u{2b73f}'
        | '\u{2b740}'..='\u{2b81f}' | '\u{2b920}'..='\u{2ceaf}' | '\u{f900}'..='\u{faff}' | '\u{2f800}'..='\u{2fa1f}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary of a dozen pieces, whose number is their place.
    fn small(normalizer: &str) -> Tokenizer {
        let pieces = [
            "[PAD]", "[UNK]", "[CLS]", "[SEP]", "ha", "##lo", "halo", "##s", "!", "é", "e", "世", "##ha",
            "İ", "i",
        ];
        let vocab: HashMap<_, _> = pieces.iter().enumerate().map(|(id, piece)| (*piece, id)).collect();
        let added = serde_json::json!([
            { "id": 3, "content": "[SEP]", "normalized": false },
            { "id": 4, "content": "[SEP]ha", "normalized": false },
            { "id": 5, "content": "loud", "normalized": true },
        ]);
        let file = serde_json::json!({
            "truncation": { "max_length": 3 },
            "padding": { "strategy": { "Fixed": 9 } },
            "added_tokens": added,
            "normalizer": serde_json::from_str::<Value>(normalizer).expect("written right"),
            "pre_tokenizer": { "type": "BertPreTokenizer" },
            "model": {
                "type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 8,
            },
        });
        Tokenizer::parse(file.to_string().as_bytes()).expect("it is sound")
    }

    const UNCASED: &str = r#"{"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
        "strip_accents": null, "lowercase": true}"#;
    const AS_IT_IS: &str = r#"{"type": "BertNormalizer", "clean_text": false, "handle_chinese_chars": false,
        "strip_accents": false, "lowercase": false}"#;

    #[test]
    fn words_are_put_together_from_the_longest_pieces() {
        let uncased = small(UNCASED);
        for (text, pieces) in [
            ("", &[][..]),
            (" \t\r\n\u{a0}\u{3000}", &[]),
            ("Halo", &[6]),
            ("halos haha", &[6, 7, 4, 12]),
            ("halox", &[1]),
            ("ha!halo!", &[4, 8, 6, 8]),
            ("Ha\u{0}\u{200b}\u{fffd}lo\u{e000}", &[6]),
            ("É e\u{301}", &[10, 10]),
            ("ha世halo", &[4, 11, 6]),
            ("halohaha halohahas halohalo", &[6, 12, 12, 1, 6, 12, 5]),
            ("[SEP]", &[3]),
            ("halo[SEP]halo [SEP]s", &[6, 4, 1, 3, 1]),
            ("loud", &[1]),
        ] {
            let tokens = uncased.tokenize(text, 64);
            assert_eq!(&tokens[1..tokens.len() - 1], pieces, "{text:?}");
            assert_eq!((tokens[0], tokens[tokens.len() - 1]), (2, 3), "{text:?}");
        }
    }

    #[test]
    fn what_the_file_turns_off_is_off() {
        let tokens = |text: &str| small(AS_IT_IS).tokenize(text, 64);
        assert_eq!(tokens("é Halo ha\u{200b}lo ha世"), [2, 9, 1, 1, 1, 3]);
    }

    #[test]
    fn long_texts_are_cut_and_not_read_on() {
        let uncased = small(UNCASED);
        assert_eq!(uncased.tokenize("halo ha halo ha", 4), [2, 6, 4, 3]);
        assert_eq!(uncased.tokenize("halohaha halo", 4), [2, 6, 12, 3]);
        assert_eq!(uncased.tokenize("halo halo", 2), [2, 3]);
        assert_eq!(uncased.tokenize("[SEP][SEP][SEP][SEP]", 4), [2, 3, 3, 3]);
        let endless = "halo! ".repeat(1 << 20) + &"x".repeat(1 << 20);
        assert_eq!(uncased.tokenize(&endless, 256).len(), 256);
        assert_eq!(uncased.tokenize(&"x".repeat(1 << 20), 256), [2, 1, 3]);
    }

    #[test]
    fn other_tokenizers_are_told_apart() {
        let error = |json: &str| Tokenizer::parse(json.as_bytes()).err().unwrap_or_default();
        assert!(error("{").contains("EOF"));
        assert!(error("{}").contains("its normalizer is none, and only BertNormalizer is understood"));
        let bpe = r#"{"normalizer": {"type": "BertNormalizer"}, "pre_tokenizer": {"type": "ByteLevel"}}"#;
        assert!(error(bpe).contains("its pre_tokenizer is ByteLevel"));
        let cut = format!(
            r#"{{"normalizer": {UNCASED}, "pre_tokenizer": {{"type": "BertPreTokenizer"}}, "model": {{"type": "WordPiece"}}}}"#
        );
        assert!(error(&cut).contains("model: missing field"), "{}", error(&cut));
    }
}
