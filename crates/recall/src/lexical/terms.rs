//! Text as terms: what two wordings of the same thing have in common.
//!
//! No language is asked for. Letters lose case, width and accents; words of a script that one stemmer serves are
//! stemmed; scripts that do not part words are taken in pairs of characters; a name from code is there as a whole and
//! in its parts; a number is one term, however its thousands are grouped. Query and text go the same way, so a stemmer
//! that is wrong about a word is wrong about it twice, and the word is still found.

use rust_stemmers::{Algorithm, Stemmer};
use std::borrow::Cow;
use unicode_normalization::UnicodeNormalization;
use unicode_normalization::char::is_combining_mark;

/// Longer words are cut: nobody searches for the last of sixty characters, and a line of base64 is one word.
const LONGEST: usize = 60;

/// Words that hold an English sentence together and say nothing of what it is about. They make no text longer, and
/// queries leave them out; but whoever searches for nothing else finds them. Sorted.
const EMPTY: &[&str] = &[
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

/// Turns text into terms. Making one costs nothing worth mentioning; using one again saves the stemmers' tables.
pub struct Analyser {
    latin: Stemmer,
    cyrillic: Stemmer,
    greek: Stemmer,
    arabic: Stemmer,
}

impl Default for Analyser {
    fn default() -> Self {
        Self {
            latin: Stemmer::create(Algorithm::English),
            cyrillic: Stemmer::create(Algorithm::Russian),
            greek: Stemmer::create(Algorithm::Greek),
            arabic: Stemmer::create(Algorithm::Arabic),
        }
    }
}

impl Analyser {
    /// The terms of a text, in its order, and whether each tells what the text is about.
    pub fn terms(&self, text: &str, found: &mut dyn FnMut(&str, bool)) {
        for word in words(text) {
            let telling = !is_empty(word);
            self.word(word, &mut |term, whole| found(term, telling && whole));
        }
    }

    /// The terms of a query: without the words that say nothing, unless it has no others.
    #[must_use]
    pub fn query(&self, text: &str) -> Vec<String> {
        let mut all = Vec::new();
        let mut telling = Vec::new();
        self.terms(text, &mut |term, tells| {
            all.push(term.to_owned());
            if tells {
                telling.push(term.to_owned());
            }
        });
        if telling.is_empty() { all } else { telling }
    }

    /// The terms of a word, and whether each is more than a character of it.
    fn word(&self, word: &str, found: &mut dyn FnMut(&str, bool)) {
        let parts = parts(word);
        if parts.len() > 1 {
            // A name from code, first as it is written.
            found(cut(&self.latin(&folded(word).replace('_', ""))), true);
        }
        for part in parts {
            let part = folded(part);
            for run in runs(&part) {
                match script(run) {
                    Script::Unspaced => pairs(run, found),
                    Script::Latin => found(cut(&self.latin(run)), true),
                    Script::Cyrillic => found(cut(&self.cyrillic.stem(run)), true),
                    Script::Greek => found(cut(&self.greek.stem(run)), true),
                    Script::Arabic => found(cut(&self.arabic.stem(run)), true),
                    Script::Other => found(cut(run), true),
                }
            }
        }
    }

    fn latin<'a>(&self, word: &'a str) -> Cow<'a, str> {
        // The stemmer knows plain letters only; anything else in a word means that it is not English.
        if word.bytes().all(|b| b.is_ascii_lowercase()) { self.latin.stem(word) } else { word.into() }
    }
}

/// Whether a word says nothing of what is said.
fn is_empty(word: &str) -> bool {
    word.len() < 12 && EMPTY.binary_search(&folded(word).as_str()).is_ok()
}

/// The words of a text: runs of letters, digits and marks; inside a word an apostrophe, an underscore, and between
/// digits the point and the comma. `'s` at the end of a word is no part of it.
pub(crate) fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let start = rest.find(is_word)?;
        rest = &rest[start..];
        let mut end = rest.len();
        let mut chars = rest.char_indices().peekable();
        let mut last = ' ';
        while let Some((at, c)) = chars.next() {
            let next = chars.peek().map_or(' ', |&(_, next)| next);
            let joins = match c {
                '\'' | '’' | 'ʼ' => last.is_alphabetic() && next.is_alphabetic(),
                '.' | ',' => last.is_ascii_digit() && next.is_ascii_digit(),
                _ => c == '_' || is_word(c),
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

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || is_combining_mark(c)
}

/// Without case, width, accents and what joins the parts of a word: `Café` is `cafe`, `don't` is `dont`, `１,０００` is
/// `1000`. A point between digits stays: 3.5 is not 35.
fn folded(word: &str) -> String {
    if word.is_ascii() {
        return word.chars().filter(|c| !matches!(c, '\'' | ',')).map(|c| c.to_ascii_lowercase()).collect();
    }
    // Marks that are letters (as in Devanagari) stay; those that are accents go.
    let mut base = ' ';
    let plain = |c: &char| {
        let letter = *c == '\u{306}' && matches!(base, '\u{400}'..='\u{4ff}');
        base = if is_combining_mark(*c) { base } else { *c };
        (letter || !is_accent(*c)) && !matches!(c, '\'' | '’' | 'ʼ' | ',')
    };
    word.nfkd().flat_map(char::to_lowercase).nfkd().filter(plain).nfc().collect()
}

/// Marks above and below Latin, Greek, Cyrillic, Hebrew and Arabic letters, which writers leave out at will; but the
/// hook that makes й of и makes another letter.
fn is_accent(c: char) -> bool {
    matches!(c, '\u{300}'..='\u{36f}' | '\u{591}'..='\u{5c7}' | '\u{610}'..='\u{61a}' | '\u{64b}'..='\u{65f}' | '\u{670}')
}

/// A name from code in its parts: `max_tokens`, `getUserName`, `HTTPServer2` are two, three and three. Any other word
/// is one part.
fn parts(word: &str) -> Vec<&str> {
    let mut cuts = vec![0];
    let chars: Vec<(usize, char)> = word.char_indices().collect();
    for i in 1..chars.len() {
        let ((_, before), (at, here)) = (chars[i - 1], chars[i]);
        let next = chars.get(i + 1).map_or(' ', |&(_, c)| c);
        let hump =
            here.is_uppercase() && (before.is_lowercase() || before.is_uppercase() && next.is_lowercase());
        let digits = before.is_ascii_alphabetic() && here.is_ascii_digit();
        if before == '_' || hump || digits {
            cuts.push(at);
        }
    }
    cuts.push(word.len());
    let pieces = cuts.windows(2).map(|cut| word[cut[0]..cut[1]].trim_matches('_'));
    pieces.filter(|piece| !piece.is_empty()).collect()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Script {
    Latin,
    Cyrillic,
    Greek,
    Arabic,
    /// Written without spaces between words, or with words that are long chains: found by pairs of characters.
    Unspaced,
    Other,
}

fn script_of(c: char) -> Script {
    match c {
        'a'..='z' | '0'..='9' | '.' | '\u{df}'..='\u{24f}' | '\u{1e00}'..='\u{1eff}' => Script::Latin,
        '\u{370}'..='\u{3ff}' => Script::Greek,
        '\u{400}'..='\u{52f}' => Script::Cyrillic,
        '\u{600}'..='\u{6ff}' => Script::Arabic,
        // Thai, Lao, Tibetan, Myanmar, Khmer; kana, bopomofo, Hangul; Han.
        '\u{e00}'..='\u{fff}'
        | '\u{1000}'..='\u{109f}'
        | '\u{1780}'..='\u{17ff}'
        | '\u{1100}'..='\u{11ff}'
        | '\u{3005}'..='\u{31ff}'
        | '\u{3400}'..='\u{9fff}'
        | '\u{ac00}'..='\u{d7af}'
        | '\u{f900}'..='\u{faff}'
        | '\u{20000}'..='\u{3ffff}' => Script::Unspaced,
        _ => Script::Other,
    }
}

fn script(run: &str) -> Script {
    run.chars().next().map_or(Script::Other, script_of)
}

/// A word where its script changes: `GPUは` is two.
fn runs(word: &str) -> impl Iterator<Item = &str> {
    let mut rest = word;
    std::iter::from_fn(move || {
        let unspaced = script(rest) == Script::Unspaced;
        let end = rest.find(|c| (script_of(c) == Script::Unspaced) != unspaced).unwrap_or(rest.len());
        let run = &rest[..end];
        rest = &rest[end..];
        (!run.is_empty()).then_some(run)
    })
}

/// Each character with the next; one that stands alone, alone. Those that do not can still be found alone, by whoever
/// searches for nothing else.
fn pairs(run: &str, found: &mut dyn FnMut(&str, bool)) {
    let starts: Vec<usize> = run.char_indices().map(|(at, _)| at).chain([run.len()]).collect();
    if starts.len() == 2 {
        return found(run, true);
    }
    starts.windows(3).for_each(|w| found(&run[w[0]..w[2]], true));
    starts.windows(2).for_each(|w| found(&run[w[0]..w[1]], false));
}

fn cut(word: &str) -> &str {
    word.char_indices().nth(LONGEST).map_or(word, |(at, _)| &word[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(text: &str) -> String {
        let mut all = Vec::new();
        Analyser::default().terms(text, &mut |term, _| {
            // Single characters of what is taken in pairs are tried below.
            all.extend(
                (term.chars().count() != 1 || term.is_ascii() || text == term).then(|| term.to_owned()),
            );
        });
        all.join(" ")
    }

    #[test]
    fn a_character_is_found_within_others() {
        let mut all = Vec::new();
        Analyser::default().terms("桜が咲く", &mut |term, telling| all.push((term.to_owned(), telling)));
        let own = |term: &str, telling| (term.to_owned(), telling);
        let pairs = ["桜が", "が咲", "咲く"].map(|term| own(term, true));
        assert_eq!(all, [&pairs[..], &["桜", "が", "咲", "く"].map(|term| own(term, false))].concat());
        assert_eq!(Analyser::default().query("桜"), ["桜"]);
        assert_eq!(Analyser::default().query("桜が"), ["桜が"]);
    }

    #[test]
    fn two_wordings_meet() {
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
            assert_eq!(terms(text), expected, "{text}");
        }
    }

    #[test]
    fn queries_ask_for_what_they_are_about() {
        let analyser = Analyser::default();
        assert_eq!(analyser.query("When did Melanie go to the museum?").join(" "), "melani go museum");
        assert_eq!(analyser.query("to be or not to be").join(" "), "to be or not to be");
        assert_eq!(analyser.query("Didn’t you?").join(" "), "didnt you");
        assert!(analyser.query("…").is_empty());
    }

    #[test]
    fn long_words_are_cut_between_characters() {
        assert_eq!(terms(&"é".repeat(1000)).chars().count(), LONGEST);
        assert_eq!(terms(&"0".repeat(1000)).len(), LONGEST);
    }

    #[test]
    fn the_list_is_sorted_and_folded() {
        assert!(EMPTY.is_sorted());
        for word in EMPTY {
            assert_eq!(folded(word), *word);
        }
    }
}
