//! Text of tokens: decodes UTF-8 across token boundaries and finds stop sequences.

use crate::ffi::{LlamaToken, ModelWeights};
use halo_core::model::{ChatTemplate, ModelToken};
use halo_core::token::TokenId;

/// Decodes UTF-8 from tokens, which may end in the middle of a character. Invalid bytes become U+FFFD.
#[derive(Debug, Default)]
pub struct Utf8Decoder {
    pending: Vec<u8>,
}

impl Utf8Decoder {
    /// The text that these bytes complete; empty while a character is incomplete.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match str::from_utf8(&self.pending) {
                Ok(valid) => {
                    text.push_str(valid);
                    self.pending.clear();
                    return text;
                }
                Err(error) => {
                    let (valid, rest) = self.pending.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        // The next token may complete the character.
                        None => {
                            self.pending = rest.to_vec();
                            return text;
                        }
                        Some(invalid) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            self.pending = rest[invalid..].to_vec();
                        }
                    }
                }
            }
        }
    }

    /// The incomplete character at the end, as U+FFFD.
    pub fn finish(&mut self) -> String {
        let rest = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&rest).into_owned()
    }
}

/// Tokenizes a text so that the texts of the tokens, concatenated, are the text.
#[must_use]
pub fn tokenize_with_text(weights: &ModelWeights, text: &str, special: bool) -> Vec<ModelToken> {
    let mut decoder = Utf8Decoder::default();
    let tokens = weights.tokenize(text, special);
    let with_text = |&token: &LlamaToken| ModelToken {
        id: TokenId(token.cast_unsigned()),
        text: decoder.push(&weights.token_bytes(token, true)),
    };
    let mut tokens: Vec<ModelToken> = tokens.iter().map(with_text).collect();
    let rest = decoder.finish();
    if let Some(last) = tokens.last_mut() {
        last.text.push_str(&rest);
    }
    let joined: String = tokens.iter().map(|t| t.text.as_str()).collect();
    if joined == text {
        return tokens;
    }
    // SentencePiece vocabularies add a space before the text.
    if joined.strip_prefix(' ') == Some(text)
        && let Some(first) = tokens.iter_mut().find(|t| t.text.starts_with(' '))
    {
        first.text.remove(0);
        return tokens;
    }
    // Other tokenizers normalize the text. The user's text stays as it was written: the first token gets all of it.
    for (n, token) in tokens.iter_mut().enumerate() {
        token.text = if n == 0 { text.to_owned() } else { String::new() };
    }
    tokens
}

/// The names of tokens that the chat template uses and that llama.cpp finds in every text, because they are not control
/// tokens but user-defined ones: `<|start|>` of gpt-oss. In content they must stay text.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct MarkerNames {
    names: Vec<String>,
}

impl MarkerNames {
    #[must_use]
    pub fn of_template(weights: &ModelWeights, template: &ChatTemplate) -> Self {
        let ChatTemplate { start, system, user, assistant, tools, reasoning } = template;
        let wraps = [system, user, assistant, &tools.result].map(|wrap| [&wrap.prefix, &wrap.suffix]);
        let calls = [&tools.call.open, &tools.call.separator, &tools.call.close];
        let section = tools.section.iter().flat_map(|section| [&section.head, &section.gap, &section.tail]);
        let reasoning = reasoning.iter().flat_map(|reasoning| [&reasoning.open, &reasoning.close]);
        let tokens = std::iter::once(start)
            .chain(wraps.into_iter().flatten())
            .chain(calls)
            .chain(section)
            .chain(reasoning)
            .flat_map(|text| weights.tokenize(text, true))
            .filter(|&token| weights.is_user_defined(token));
        let names =
            tokens.map(|token| String::from_utf8_lossy(&weights.token_bytes(token, true)).into_owned());
        // Some vocabularies have runs of spaces and line breaks as user-defined tokens.
        let mut names: Vec<String> = names.filter(|name| name.trim().chars().nth(1).is_some()).collect();
        names.sort();
        names.dedup();
        Self { names }
    }

    /// The tokens of content. A marker's name is cut after its first character, and the parts are tokenized separately:
    /// their texts still add up to the text.
    #[must_use]
    pub fn tokenize_content(&self, weights: &ModelWeights, content: &str) -> Vec<ModelToken> {
        let parts = self.cut_names(content);
        parts.into_iter().flat_map(|part| tokenize_with_text(weights, part, false)).collect()
    }

    #[must_use]
    pub fn count_content_tokens(&self, weights: &ModelWeights, content: &str) -> usize {
        self.cut_names(content).into_iter().map(|part| weights.tokenize(part, false).len()).sum()
    }

    /// The parts of a text, none of which contains a name.
    fn cut_names<'t>(&self, text: &'t str) -> Vec<&'t str> {
        if self.names.is_empty() {
            return vec![text];
        }
        let (mut parts, mut from) = (Vec::new(), 0);
        for (start, first) in text.char_indices() {
            if self.names.iter().any(|name| text[start..].starts_with(name.as_str())) {
                let cut = start + first.len_utf8();
                parts.push(&text[from..cut]);
                from = cut;
            }
        }
        parts.push(&text[from..]);
        parts
    }
}

/// Finds stop sequences in streamed text, also across tokens.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The end of the text so far, as long as the longest stop sequence.
    tail: String,
}

impl StopMatcher {
    #[must_use]
    pub fn new(stops: &[String]) -> Self {
        Self { stops: stops.to_vec(), tail: String::new() }
    }

    /// Adds text; returns whether it completes a stop sequence.
    pub fn push(&mut self, text: &str) -> bool {
        self.tail.push_str(text);
        let matched = self.stops.iter().any(|stop| !stop.is_empty() && self.tail.contains(stop.as_str()));
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let mut cut = self.tail.len().saturating_sub(longest);
        while !self.tail.is_char_boundary(cut) {
            cut -= 1;
        }
        self.tail.drain(..cut);
        matched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utf8_decoder_yields_whole_characters() {
        for text in ["plain", "naïve 谢谢 🌱👩‍👩‍👧", ""] {
            for size in 1..6 {
                let mut decoder = Utf8Decoder::default();
                let parts: Vec<String> = text.as_bytes().chunks(size).map(|c| decoder.push(c)).collect();
                assert_eq!(parts.concat() + &decoder.finish(), text);
            }
        }
        let mut decoder = Utf8Decoder::default();
        assert_eq!(decoder.push(b"a\xf0\x9f"), "a");
        assert_eq!(decoder.push(b"b"), "\u{fffd}b", "the character was never completed");
        assert_eq!((decoder.push(b"\xe8\xb0"), decoder.finish()), (String::new(), "\u{fffd}".into()));
    }

    #[test]
    fn marker_names_are_cut_in_content() {
        let markers = MarkerNames { names: vec!["<|a|>".into(), "[INST]".into()] };
        for (text, parts) in [
            ("", vec![""]),
            ("no <a> name", vec!["no <a> name"]),
            ("x<|a|><|a|>y", vec!["x<", "|a|><", "|a|>y"]),
            ("[INST", vec!["[INST"]),
            ("谢[INST]", vec!["谢[", "INST]"]),
        ] {
            assert_eq!(markers.cut_names(text), parts, "{text}");
        }
        assert_eq!(MarkerNames::default().cut_names("<|a|>"), ["<|a|>"]);
    }

    #[test]
    fn stop_sequence_found_across_tokens() {
        let stops = ["</tool>".to_owned(), "\n谢".to_owned(), String::new()];
        let matched_at = |parts: &[&str]| {
            let mut matcher = StopMatcher::new(&stops);
            parts.iter().position(|p| matcher.push(p))
        };
        assert_eq!(matched_at(&["a </", "to", "ol> b", "c"]), Some(2));
        assert_eq!(matched_at(&["谢谢\n", "谢谢"]), Some(1));
        assert_eq!(matched_at(&["</tool", " >", "谢谢谢谢谢谢谢谢谢谢"]), None);
        assert!(!StopMatcher::new(&[]).push("anything"));
    }
}
