//! Finds words in text, as whole words and in any case.

use halo_core::Error;

/// Texts of fewer characters occur by chance: they are not searched for elsewhere.
pub(super) const MIN_MATCH_CHARS: usize = 12;

/// Words to find, as whole words and in any case.
#[derive(Clone, Debug)]
pub struct WholeWordMatcher(Vec<char>);

impl WholeWordMatcher {
    pub fn new(words: &str) -> Result<Self, Error> {
        let words = Self::normalize(words.trim());
        if words.is_empty() {
            return Err(Error::invalid_input("matching text", "the words to match are empty"));
        }
        Ok(Self(words))
    }

    /// The first match in a text, as a character index with each run of white space counted as one.
    #[must_use]
    pub fn find(&self, text: &str) -> Option<usize> {
        let text = Self::normalize(text);
        self.occurrences(&text).find(|&at| self.is_whole_word(&text, at))
    }

    /// The longer words of a text that contain the words.
    #[must_use]
    pub fn longer_words(&self, text: &str) -> Vec<String> {
        let text = Self::normalize(text);
        let partial = self.occurrences(&text).filter(|&at| !self.is_whole_word(&text, at));
        let word_around = |at: usize| {
            let from = text[..at].iter().rposition(|c| !is_word_char(*c)).map_or(0, |n| n + 1);
            let end = at + self.0.len();
            let to = text[end..].iter().position(|c| !is_word_char(*c)).map_or(text.len(), |n| end + n);
            text[from..to].iter().take(60).collect::<String>()
        };
        partial.map(word_around).collect()
    }

    /// One character for each, so that indexes stay the same; a final sigma is a sigma.
    fn normalize(text: &str) -> Vec<char> {
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let lower = |c: char| c.to_lowercase().next().unwrap_or(c);
        line.chars().map(lower).map(|c| if c == 'ς' { 'σ' } else { c }).collect()
    }

    fn occurrences<'a>(&'a self, text: &'a [char]) -> impl Iterator<Item = usize> + 'a {
        text.windows(self.0.len()).enumerate().filter(|(_, some)| *some == self.0).map(|(at, _)| at)
    }

    fn is_whole_word(&self, text: &[char], at: usize) -> bool {
        let joined = |one: Option<&char>, other: Option<&char>| {
            one.zip(other).is_some_and(|(a, b)| is_word_char(*a) && is_word_char(*b))
        };
        let end = at + self.0.len();
        !joined(at.checked_sub(1).and_then(|before| text.get(before)), self.0.first())
            && !joined(self.0.last(), text.get(end))
    }
}

/// Whether a character belongs to a script with spaces between words. In other scripts every match is a whole word.
fn is_word_char(c: char) -> bool {
    let unspaced = matches!(c, '\u{0e00}'..='\u{0eff}' | '\u{1000}'..='\u{109f}' | '\u{1100}'..='\u{11ff}'
        | '\u{1780}'..='\u{17ff}' | '\u{2e80}'..='\u{d7ff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}');
    c.is_alphanumeric() && !unspaced
}
