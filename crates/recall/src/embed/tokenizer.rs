//! A WordPiece tokenizer, equal to that of Hugging Face `tokenizers` for BERT models.
//!
//! Only this combination is supported (BertNormalizer, BertPreTokenizer, WordPiece): it takes a few hundred lines, and
//! the library would add sixty crates. The character categories are those of Unicode 8, like the library's: newer ones
//! would give other tokens than the model was trained with. A long text is read only up to the token limit.

use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::iter::once;
use unicode_categories::UnicodeCategories;
use unicode_normalization::UnicodeNormalization;

/// The most tokens that an encoder reads at once, including `[CLS]` and `[SEP]`, whatever its configuration says: the time grows
/// with the square of the length.
pub const MAX_TOKENS: usize = 512;

pub(super) struct WordPieceTokenizer {
    /// Pieces at the start of a word, including whole words.
    word_starts: HashMap<String, i32>,
    /// Pieces inside a word, without the `##` prefix.
    continuations: HashMap<String, i32>,
    /// The length of the longest piece limits the search.
    max_piece_bytes: usize,
    /// Special tokens by name, which are matched before the text is split. The longest name is first.
    special_tokens: Vec<(String, i32)>,
    cls: i32,
    sep: i32,
    unk: i32,
    /// A longer word becomes `[UNK]`.
    max_word_chars: usize,
    normalizer: BertNormalizer,
}

#[derive(Clone, Copy, Deserialize)]
struct BertNormalizer {
    clean_text: bool,
    handle_chinese_chars: bool,
    strip_accents: Option<bool>,
    lowercase: bool,
}

#[derive(Deserialize)]
struct WordPieceModel {
    vocab: HashMap<String, i32>,
    unk_token: String,
    continuing_subword_prefix: String,
    max_input_chars_per_word: usize,
}

#[derive(Deserialize)]
struct AddedToken {
    id: i32,
    content: String,
    normalized: bool,
}

impl WordPieceTokenizer {
    /// Parses a `tokenizer.json`. Its truncation and padding are ignored: the encoder has its own limit and never pads.
    pub(super) fn parse(json: &[u8]) -> Result<Self, String> {
        let mut file: Value = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        for (section, supported) in
            [("normalizer", "BertNormalizer"), ("pre_tokenizer", "BertPreTokenizer"), ("model", "WordPiece")]
        {
            let kind = file[section]["type"].as_str().unwrap_or("none");
            if kind != supported {
                return Err(format!(
                    "its {section} is {kind}, and only {supported} is supported (models of the BERT family)"
                ));
            }
        }
        fn take_section<T: serde::de::DeserializeOwned>(
            file: &mut Value,
            section: &str,
        ) -> Result<T, String> {
            serde_json::from_value(file[section].take()).map_err(|e| format!("{section}: {e}"))
        }
        let normalizer = take_section(&mut file, "normalizer")?;
        let added: Option<Vec<AddedToken>> = take_section(&mut file, "added_tokens")?;
        let model: WordPieceModel = take_section(&mut file, "model")?;
        let id = |name: &str| {
            model.vocab.get(name).copied().ok_or_else(|| format!("its vocabulary has no {name}"))
        };
        let (cls, sep, unk) = (id("[CLS]")?, id("[SEP]")?, id(&model.unk_token)?);
        let mut special_tokens: Vec<_> = added
            .into_iter()
            .flatten()
            .filter(|token| !token.normalized && !token.content.is_empty())
            .map(|token| (token.content, token.id))
            .collect();
        special_tokens.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        let max_piece_bytes = model.vocab.keys().map(String::len).max().unwrap_or(0);
        let continuations = model
            .vocab
            .iter()
            .filter_map(|(piece, &id)| {
                Some((piece.strip_prefix(&model.continuing_subword_prefix)?.to_owned(), id))
            })
            .collect();
        Ok(Self {
            word_starts: model.vocab,
            continuations,
            max_piece_bytes,
            special_tokens,
            cls,
            sep,
            unk,
            max_word_chars: model.max_input_chars_per_word,
            normalizer,
        })
    }

    /// `[CLS]`, the tokens of a text, and `[SEP]`: at most `max_tokens` in all.
    pub(super) fn tokenize(&self, text: &str, max_tokens: usize) -> Vec<i32> {
        let mut tokens = vec![self.cls];
        let limit = max_tokens.saturating_sub(1).max(1);
        let mut start = 0;
        let may_start_name = |c: char| self.special_tokens.iter().any(|(name, _)| name.starts_with(c));
        for (at, _) in text.match_indices(may_start_name) {
            let name = self.special_tokens.iter().find(|(name, _)| text[at..].starts_with(name.as_str()));
            if let Some((name, id)) = name.filter(|_| at >= start) {
                self.tokenize_words(&text[start..at], limit, &mut tokens);
                tokens.push(*id);
                start = at + name.len();
            }
            if tokens.len() >= limit {
                break;
            }
        }
        self.tokenize_words(&text[start..], limit, &mut tokens);
        tokens.truncate(limit);
        tokens.push(self.sep);
        tokens
    }

    /// Appends the tokens of a text without special tokens, until there are `limit` or more.
    fn tokenize_words(&self, text: &str, limit: usize, tokens: &mut Vec<i32>) {
        // Of a word that is too long, one character more than allowed is enough to recognise it.
        let (mut word, mut length) = (String::new(), 0);
        for c in self.normalizer.normalize(text).chain(once(' ')) {
            let (space, punctuation) = (c.is_whitespace(), is_punctuation(c));
            if (space || punctuation) && !word.is_empty() {
                self.push_wordpieces(&word, tokens);
                (word, length) = (String::new(), 0);
            }
            if tokens.len() >= limit {
                return;
            }
            if punctuation {
                self.push_wordpieces(c.encode_utf8(&mut [0; 4]), tokens);
            } else if !space && length <= self.max_word_chars {
                word.push(c);
                length += 1;
            }
        }
    }

    /// Appends the longest piece at the start of a word, then the longest at the start of the rest, and so on. A word that
    /// cannot be composed so becomes one `[UNK]`.
    fn push_wordpieces(&self, word: &str, tokens: &mut Vec<i32>) {
        let before = tokens.len();
        let mut rest = if word.chars().count() > self.max_word_chars { "" } else { word };
        while !rest.is_empty() {
            let pieces = if rest.len() == word.len() { &self.word_starts } else { &self.continuations };
            let ends =
                (1..=rest.len().min(self.max_piece_bytes)).rev().filter(|&end| rest.is_char_boundary(end));
            let Some((end, &id)) = ends.filter_map(|end| Some((end, pieces.get(&rest[..end])?))).next()
            else {
                tokens.truncate(before);
                break;
            };
            tokens.push(id);
            rest = &rest[end..];
        }
        if tokens.len() == before {
            tokens.push(self.unk);
        }
    }
}

impl BertNormalizer {
    /// The normalized characters: no control characters, spaces around ideographs, no accents, lower case.
    fn normalize(self, text: &str) -> Box<dyn Iterator<Item = char> + '_> {
        let mut chars: Box<dyn Iterator<Item = char> + '_> = Box::new(text.chars());
        if self.clean_text {
            chars = Box::new(chars.filter(|&c| !is_control_or_private(c)));
        }
        if self.handle_chinese_chars {
            let spaced =
                |c| if is_ideograph(c) { [Some(' '), Some(c), Some(' ')] } else { [Some(c), None, None] };
            chars = Box::new(chars.flat_map(spaced).flatten());
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

/// Control, format and private-use characters, and U+FFFD.
fn is_control_or_private(c: char) -> bool {
    match c {
        '\t' | '\n' | '\r' => false,
        '\u{fffd}' => true,
        _ => c.is_other(),
    }
}

fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation() || c.is_punctuation()
}

/// Whether a character is a word by itself: the blocks that BERT's authors took for Chinese. The library
/// starts one of them at `2b920` instead of `2b820`, so this does too.
fn is_ideograph(c: char) -> bool {
    matches!(c,
        '\u{4e00}'..='\u{9fff}' | '\u{3400}'..='\u{4dbf}' | '\u{20000}'..='\u{2a6df}' | '\u{2a700}'..='\u{2b73f}'
        | '\u{2b740}'..='\u{2b81f}' | '\u{2b920}'..='\u{2ceaf}' | '\u{f900}'..='\u{faff}' | '\u{2f800}'..='\u{2fa1f}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary of fifteen pieces, numbered from 0.
    fn small_tokenizer(normalizer: &str) -> WordPieceTokenizer {
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
            "normalizer": serde_json::from_str::<Value>(normalizer).expect("JSON"),
            "pre_tokenizer": { "type": "BertPreTokenizer" },
            "model": {
                "type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 8,
            },
        });
        WordPieceTokenizer::parse(file.to_string().as_bytes()).expect("parsed")
    }

    const UNCASED: &str = r#"{"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
        "strip_accents": null, "lowercase": true}"#;
    const NO_NORMALIZATION: &str = r#"{"type": "BertNormalizer", "clean_text": false, "handle_chinese_chars": false,
        "strip_accents": false, "lowercase": false}"#;

    #[test]
    fn tokenizer_splits_words_into_longest_pieces() {
        let uncased = small_tokenizer(UNCASED);
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
    fn tokenizer_respects_disabled_normalizers() {
        let tokens = |text: &str| small_tokenizer(NO_NORMALIZATION).tokenize(text, 64);
        assert_eq!(tokens("é Halo ha\u{200b}lo ha世"), [2, 9, 1, 1, 1, 3]);
    }

    #[test]
    fn tokenizer_truncates_long_texts() {
        let uncased = small_tokenizer(UNCASED);
        assert_eq!(uncased.tokenize("halo ha halo ha", 4), [2, 6, 4, 3]);
        assert_eq!(uncased.tokenize("halohaha halo", 4), [2, 6, 12, 3]);
        assert_eq!(uncased.tokenize("halo halo", 2), [2, 3]);
        assert_eq!(uncased.tokenize("[SEP][SEP][SEP][SEP]", 4), [2, 3, 3, 3]);
        let long = "halo! ".repeat(1 << 20) + &"x".repeat(1 << 20);
        assert_eq!(uncased.tokenize(&long, 256).len(), 256);
        assert_eq!(uncased.tokenize(&"x".repeat(1 << 20), 256), [2, 1, 3]);
    }

    #[test]
    fn tokenizer_rejects_unsupported_types() {
        let error = |json: &str| WordPieceTokenizer::parse(json.as_bytes()).err().unwrap_or_default();
        assert!(error("{").contains("EOF"));
        assert!(error("{}").contains("its normalizer is none, and only BertNormalizer is supported"));
        let bpe = r#"{"normalizer": {"type": "BertNormalizer"}, "pre_tokenizer": {"type": "ByteLevel"}}"#;
        assert!(error(bpe).contains("its pre_tokenizer is ByteLevel"));
        let cut = format!(
            r#"{{"normalizer": {UNCASED}, "pre_tokenizer": {{"type": "BertPreTokenizer"}}, "model": {{"type": "WordPiece"}}}}"#
        );
        assert!(error(&cut).contains("model: missing field"), "{}", error(&cut));
    }
}
