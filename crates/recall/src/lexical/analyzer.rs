//! Splits text into terms for BM25, without knowing its language.
//!
//! Case, width and accents are folded. Words are stemmed by script: English for Latin, Russian for Cyrillic, Greek,
//! Arabic. Scripts without spaces become bigrams of characters. An identifier from code gives its full name and its
//! parts. A number is one term, however its thousands are grouped. Query and text are analyzed in the same way, so a
//! word that is stemmed wrongly in both is still found.

use rust_stemmers::{Algorithm, Stemmer};
use std::borrow::Cow;
use unicode_normalization::UnicodeNormalization;
use unicode_normalization::char::is_combining_mark;

/// Longer terms are truncated: a line of base64 is one word.
const MAX_TERM_CHARS: usize = 60;

/// English stop words, sorted. They are indexed but do not count for the length of a text. A query ignores them unless it
/// has no other words.
const STOP_WORDS: &[&str] = &[
    "a", "about", "after", "again", "ah", "all", "also", "am", "an", "and", "any", "are", "arent", "as",
    "at", "be", "because", "been", "before", "being", "but", "by", "can", "cant", "could", "couldnt", "did",
    "didnt", "do", "does", "doesnt", "doing", "dont", "down", "during", "each", "few", "for", "from",
    "further", "had", "has", "hasnt", "have", "havent", "he", "hed", "her", "here", "hers", "hes", "him",
    "his", "how", "i", "id", "if", "ill", "im", "in", "into", "is", "isnt", "it", "its", "ive", "just",
    "lets", "me", "more", "most", "my", "no", "not", "now", "of", "oh", "ok", "okay", "on", "once", "only",
    "or", "other", "our", "out", "over", "own", "please", "s", "same", "she", "shed", "shes", "should",
    "shouldnt", "so", "some", "such", "t", "tell", "than", "that", "thats", "the", "their", "theirs", "them",
    "then", "there", "theres", "these", "they", "theyd", "theyre", "theyve", "this", "those", "to", "too",
    "under", "up", "us", "very", "was", "wasnt", "we", "wed", "were", "werent", "weve", "what", "whats",
    "when", "where", "which", "who", "whom", "whos", "why", "will", "with", "wont", "would", "wouldnt",
    "you", "youd", "youll", "your", "youre", "yours", "youve",
];

/// Splits text into terms.
pub struct TermAnalyzer {
    latin: Stemmer,
    cyrillic: Stemmer,
    greek: Stemmer,
    arabic: Stemmer,
}

impl Default for TermAnalyzer {
    fn default() -> Self {
        Self {
            latin: Stemmer::create(Algorithm::English),
            cyrillic: Stemmer::create(Algorithm::Russian),
            greek: Stemmer::create(Algorithm::Greek),
            arabic: Stemmer::create(Algorithm::Arabic),
        }
    }
}

impl TermAnalyzer {
    /// Calls `emit` with the terms of a text, in order, and whether each is a content word.
    pub fn terms(&self, text: &str, emit: &mut dyn FnMut(&str, bool)) {
        for word in words(text) {
            let is_content = !is_stop_word(word);
            self.word_terms(word, &mut |term, is_word| emit(term, is_content && is_word));
        }
    }

    /// The terms of a query, without stop words unless it has no others.
    #[must_use]
    pub fn query_terms(&self, text: &str) -> Vec<String> {
        let mut all = Vec::new();
        let mut content = Vec::new();
        self.terms(text, &mut |term, is_content| {
            all.push(term.to_owned());
            if is_content {
                content.push(term.to_owned());
            }
        });
        if content.is_empty() { all } else { content }
    }

    /// Calls `emit` with the terms of a word, and whether each is more than a single character of a bigram.
    fn word_terms(&self, word: &str, emit: &mut dyn FnMut(&str, bool)) {
        let parts = split_identifier(word);
        if parts.len() > 1 {
            // An identifier, first as a whole.
            emit(truncate_term(&self.stem_latin(&fold(word).replace('_', ""))), true);
        }
        for part in parts {
            let part = fold(part);
            for run in split_by_script(&part) {
                match run_script(run) {
                    ScriptKind::Unspaced => emit_bigrams(run, emit),
                    ScriptKind::Latin => emit(truncate_term(&self.stem_latin(run)), true),
                    ScriptKind::Cyrillic => emit(truncate_term(&self.cyrillic.stem(run)), true),
                    ScriptKind::Greek => emit(truncate_term(&self.greek.stem(run)), true),
                    ScriptKind::Arabic => emit(truncate_term(&self.arabic.stem(run)), true),
                    ScriptKind::Other => emit(truncate_term(run), true),
                }
            }
        }
    }

    fn stem_latin<'a>(&self, word: &'a str) -> Cow<'a, str> {
        // The English stemmer handles ASCII only; a word with other letters is not English.
        if word.bytes().all(|b| b.is_ascii_lowercase()) { self.latin.stem(word) } else { word.into() }
    }
}

fn is_stop_word(word: &str) -> bool {
    word.len() < 12 && STOP_WORDS.binary_search(&fold(word).as_str()).is_ok()
}

/// The words of a text: runs of letters, digits and combining marks, with apostrophes and underscores inside, and points
/// and commas between digits. A final `'s` is dropped.
pub(crate) fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let start = rest.find(is_word_char)?;
        rest = &rest[start..];
        let mut end = rest.len();
        let mut chars = rest.char_indices().peekable();
        let mut last = ' ';
        while let Some((at, c)) = chars.next() {
            let next = chars.peek().map_or(' ', |&(_, next)| next);
            let joins = match c {
                '\'' | '’' | 'ʼ' => last.is_alphabetic() && next.is_alphabetic(),
                '.' | ',' => last.is_ascii_digit() && next.is_ascii_digit(),
                _ => c == '_' || is_word_char(c),
            };
            if !joins {
                end = at;
                break;
            }
            last = c;
        }
        let word = &rest[..end];
        rest = &rest[end..];
        Some(["'s", "’s", "ʼs", "'S", "’S"].iter().find_map(|s| word.strip_suffix(s)).unwrap_or(word))
    })
    .filter(|word| word.chars().any(char::is_alphanumeric))
}

fn is_word_char(c: char) -> bool {
    c.is_alphanumeric() || is_combining_mark(c)
}

/// Removes case, width, accents, apostrophes and commas: `Café` is `cafe`, `don't` is `dont`, `１,０００` is `1000`. A point
/// between digits stays: 3.5 is not 35.
fn fold(word: &str) -> String {
    if word.is_ascii() {
        return word.chars().filter(|c| !matches!(c, '\'' | ',')).map(|c| c.to_ascii_lowercase()).collect();
    }
    // Marks that are letters (as in Devanagari) stay; accents are removed. The breve of й makes another letter than и.
    let mut base = ' ';
    let stays = |c: &char| {
        let is_letter = *c == '\u{306}' && matches!(base, '\u{400}'..='\u{4ff}');
        base = if is_combining_mark(*c) { base } else { *c };
        (is_letter || !is_accent(*c)) && !matches!(c, '\'' | '’' | 'ʼ' | ',')
    };
    word.nfkd().flat_map(char::to_lowercase).nfkd().filter(stays).nfc().collect()
}

/// Optional marks of Latin, Greek, Cyrillic, Hebrew and Arabic letters.
fn is_accent(c: char) -> bool {
    matches!(c, '\u{300}'..='\u{36f}' | '\u{591}'..='\u{5c7}' | '\u{610}'..='\u{61a}' | '\u{64b}'..='\u{65f}' | '\u{670}')
}

/// The parts of an identifier: `max_tokens`, `getUserName` and `HTTPServer2` have two, three and three. Any other word has
/// one part.
fn split_identifier(word: &str) -> Vec<&str> {
    let mut cuts = vec![0];
    let chars: Vec<(usize, char)> = word.char_indices().collect();
    for i in 1..chars.len() {
        let ((_, before), (at, here)) = (chars[i - 1], chars[i]);
        let next = chars.get(i + 1).map_or(' ', |&(_, c)| c);
        let camel_case =
            here.is_uppercase() && (before.is_lowercase() || before.is_uppercase() && next.is_lowercase());
        let digits = before.is_ascii_alphabetic() && here.is_ascii_digit();
        if before == '_' || camel_case || digits {
            cuts.push(at);
        }
    }
    cuts.push(word.len());
    let parts = cuts.windows(2).map(|cut| word[cut[0]..cut[1]].trim_matches('_'));
    parts.filter(|part| !part.is_empty()).collect()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ScriptKind {
    Latin,
    Cyrillic,
    Greek,
    Arabic,
    /// Written without spaces, or with long compound words: indexed by bigrams.
    Unspaced,
    Other,
}

fn script_of(c: char) -> ScriptKind {
    match c {
        'a'..='z' | '0'..='9' | '.' | '\u{df}'..='\u{24f}' | '\u{1e00}'..='\u{1eff}' => ScriptKind::Latin,
        '\u{370}'..='\u{3ff}' => ScriptKind::Greek,
        '\u{400}'..='\u{52f}' => ScriptKind::Cyrillic,
        '\u{600}'..='\u{6ff}' => ScriptKind::Arabic,
        // Thai, Lao, Tibetan, Myanmar, Khmer; kana, bopomofo, Hangul; Han.
        '\u{e00}'..='\u{fff}'
        | '\u{1000}'..='\u{109f}'
        | '\u{1780}'..='\u{17ff}'
        | '\u{1100}'..='\u{11ff}'
        | '\u{3005}'..='\u{31ff}'
        | '\u{3400}'..='\u{9fff}'
        | '\u{ac00}'..='\u{d7af}'
        | '\u{f900}'..='\u{faff}'
        | '\u{20000}'..='\u{3ffff}' => ScriptKind::Unspaced,
        _ => ScriptKind::Other,
    }
}

fn run_script(run: &str) -> ScriptKind {
    run.chars().next().map_or(ScriptKind::Other, script_of)
}

/// Splits a word where it changes to or from an unspaced script: `GPUは` is two runs.
fn split_by_script(word: &str) -> impl Iterator<Item = &str> {
    let mut rest = word;
    std::iter::from_fn(move || {
        let unspaced = run_script(rest) == ScriptKind::Unspaced;
        let end = rest.find(|c| (script_of(c) == ScriptKind::Unspaced) != unspaced).unwrap_or(rest.len());
        let run = &rest[..end];
        rest = &rest[end..];
        (!run.is_empty()).then_some(run)
    })
}

/// Emits each pair of characters as a content term, and each single character as a non-content term, so that a query of
/// one character finds it too.
fn emit_bigrams(run: &str, emit: &mut dyn FnMut(&str, bool)) {
    let starts: Vec<usize> = run.char_indices().map(|(at, _)| at).chain([run.len()]).collect();
    if starts.len() == 2 {
        return emit(run, true);
    }
    starts.windows(3).for_each(|w| emit(&run[w[0]..w[2]], true));
    starts.windows(2).for_each(|w| emit(&run[w[0]..w[1]], false));
}

fn truncate_term(word: &str) -> &str {
    word.char_indices().nth(MAX_TERM_CHARS).map_or(word, |(at, _)| &word[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms_of(text: &str) -> String {
        let mut all = Vec::new();
        TermAnalyzer::default().terms(text, &mut |term, _| {
            // Single characters of bigrams have a test of their own.
            all.extend(
                (term.chars().count() != 1 || term.is_ascii() || text == term).then(|| term.to_owned()),
            );
        });
        all.join(" ")
    }

    #[test]
    fn analyzer_emits_single_characters_and_bigrams() {
        let mut all = Vec::new();
        TermAnalyzer::default()
            .terms("桜が咲く", &mut |term, is_content| all.push((term.to_owned(), is_content)));
        let expected = |term: &str, is_content| (term.to_owned(), is_content);
        let pairs = ["桜が", "が咲", "咲く"].map(|term| expected(term, true));
        assert_eq!(all, [&pairs[..], &["桜", "が", "咲", "く"].map(|term| expected(term, false))].concat());
        assert_eq!(TermAnalyzer::default().query_terms("桜"), ["桜"]);
        assert_eq!(TermAnalyzer::default().query_terms("桜が"), ["桜が"]);
    }

    #[test]
    fn analyzer_folds_and_stems_to_common_terms() {
        for (text, expected) in [
            ("", ""),
            ("   \n\t—…!?", ""),
            ("She painted; painting, PAINTS!", "she paint paint paint"),
            ("Caroline's dog, the dogs’ bowl, don't", "carolin dog the dog bowl dont"),
            ("Café, naïve, Ångström, straße", "cafe naiv angstrom straße"),
            ("ｆｕｌｌ ｗｉｄｔｈ", "full width"),
            ("1,000 and 1000 and 3.5 and v1.2.3.", "1000 and 1000 and 3.5 and v1.2.3 v 1.2.3"),
            ("2023-05-08 at 19:00, 21st", "2023 05 08 at 19 00 21st"),
            (
                "max_tokens getUserName HTTPServer __init__",
                "maxtoken max token getusernam get user name httpserver http server init",
            ),
            ("Москва Москве москвой", "москв москв москв"),
            ("ёлка елка", "елк елк"),
            ("ελληνικά", "ελλην"),
            ("東京に行きました", "東京 京に に行 行き きま まし した"),
            ("猫", "猫"),
            ("GPUは速い", "gpu は速 速い"),
            ("한국어 문법", "한국 국어 문법"),
            ("हिन्दी में", "हिन्दी में"),
            ("שָׁלוֹם שלום", "שלום שלום"),
            ("🎉 party 🎉", "parti"),
        ] {
            assert_eq!(terms_of(text), expected, "{text}");
        }
    }

    #[test]
    fn analyzer_drops_stop_words_from_queries() {
        let analyzer = TermAnalyzer::default();
        assert_eq!(analyzer.query_terms("When did Melanie go to the museum?").join(" "), "melani go museum");
        assert_eq!(analyzer.query_terms("to be or not to be").join(" "), "to be or not to be");
        assert_eq!(analyzer.query_terms("Didn’t you?").join(" "), "didnt you");
        assert!(analyzer.query_terms("…").is_empty());
    }

    #[test]
    fn analyzer_truncates_long_words_at_characters() {
        assert_eq!(terms_of(&"é".repeat(1000)).chars().count(), MAX_TERM_CHARS);
        assert_eq!(terms_of(&"0".repeat(1000)).len(), MAX_TERM_CHARS);
    }

    #[test]
    fn analyzer_stop_words_are_sorted_and_folded() {
        assert!(STOP_WORDS.is_sorted());
        for word in STOP_WORDS {
            assert_eq!(fold(word), *word);
        }
    }
}
