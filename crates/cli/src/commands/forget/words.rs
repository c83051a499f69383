//! Words that are looked for in what was said, and what is shown of it.

use crate::printable;
use anyhow::{Result, bail};

/// Some words of a text: those around what was looked for, or the first.
pub fn excerpt(text: &str, matcher: Option<&Matcher>) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let at = matcher.and_then(|matcher| matcher.find(&line)).unwrap_or(0);
    let from = at.saturating_sub(25);
    let some: String = line.chars().skip(from).take(70).collect();
    let (before, after) = (from > 0, line.chars().count() > from + 70);
    printable(&format!("{}{some}{}", if before { "…" } else { "" }, if after { "…" } else { "" }))
}

/// Words that are looked for, as whole words and in any case.
pub struct Matcher(Vec<char>);

impl Matcher {
    /// Words to look for.
    pub fn new(words: &str) -> Result<Self> {
        let wanted = Self::lower(words.trim());
        if wanted.is_empty() {
            bail!("--matching needs words");
        }
        Ok(Self(wanted))
    }

    /// Where a text has them: at which character, each run of white space being one.
    pub fn find(&self, text: &str) -> Option<usize> {
        let text = Self::lower(text);
        self.places(&text).find(|&at| self.is_whole(&text, at))
    }

    /// The longer words of a text that have them within.
    pub fn longer(&self, text: &str) -> Vec<String> {
        let text = Self::lower(text);
        let within = self.places(&text).filter(|&at| !self.is_whole(&text, at));
        let word = |at: usize| {
            let from = text[..at].iter().rposition(|c| !in_word(*c)).map_or(0, |n| n + 1);
            let end = at + self.0.len();
            let to = text[end..].iter().position(|c| !in_word(*c)).map_or(text.len(), |n| end + n);
            printable(&text[from..to].iter().take(60).collect::<String>())
        };
        within.map(word).collect()
    }

    /// One character for each, so that places stay what they are; a sigma is a sigma at the end of a word too.
    fn lower(text: &str) -> Vec<char> {
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let lower = |c: char| c.to_lowercase().next().unwrap_or(c);
        line.chars().map(lower).map(|c| if c == 'ς' { 'σ' } else { c }).collect()
    }

    fn places<'a>(&'a self, text: &'a [char]) -> impl Iterator<Item = usize> + 'a {
        text.windows(self.0.len()).enumerate().filter(|(_, some)| *some == self.0).map(|(at, _)| at)
    }

    fn is_whole(&self, text: &[char], at: usize) -> bool {
        let joined = |one: Option<&char>, other: Option<&char>| {
            one.zip(other).is_some_and(|(a, b)| in_word(*a) && in_word(*b))
        };
        let end = at + self.0.len();
        !joined(at.checked_sub(1).and_then(|before| text.get(before)), self.0.first())
            && !joined(self.0.last(), text.get(end))
    }
}

/// Whether a character stands in a word that has an end: some scripts write words without one, or grow them at both ends.
fn in_word(c: char) -> bool {
    let unspaced = matches!(c, '\u{0e00}'..='\u{0eff}' | '\u{1000}'..='\u{109f}' | '\u{1100}'..='\u{11ff}'
        | '\u{1780}'..='\u{17ff}' | '\u{2e80}'..='\u{d7ff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}');
    c.is_alphanumeric() && !unspaced
}
