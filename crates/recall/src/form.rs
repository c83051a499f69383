//! The form of what was said, and of what is asked: who speaks, of whom, and what kind of thing is told.
//!
//! People who ask what was said mostly ask for what somebody told of themselves: `I`, not `you`; a statement, not a
//! question; a sentence, not a word. And who asks when, how many or who wants a time, a number or a name. Where a
//! language is not known here, none of this says anything, and the ranking goes by meaning and words alone.

use crate::lexical::words;

/// What a text is like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Form {
    /// It ends in a question.
    pub asks: bool,
    /// Somebody speaks of themselves.
    pub i: bool,
    /// Somebody is spoken to.
    pub you: bool,
    /// It names a time.
    pub time: bool,
    /// It names a number.
    pub number: bool,
    /// It names somebody or something by name.
    pub name: bool,
}

/// What a query asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// A time.
    pub time: bool,
    /// A number.
    pub number: bool,
    /// A person, a place, a thing.
    pub name: bool,
    /// The asker speaks of themselves.
    pub i: bool,
    /// The asker speaks of whom they ask.
    pub you: bool,
}

// Each list sorted.
const I: [&str; 9] = ["i", "i'm", "i've", "me", "mine", "my", "myself", "our", "we"];
const YOU: [&str; 6] = ["you", "you'll", "you're", "you've", "your", "yours"];
const TIMES: [&str; 58] = [
    "ago",
    "apr",
    "april",
    "aug",
    "august",
    "autumn",
    "birthday",
    "day",
    "days",
    "dec",
    "december",
    "evening",
    "fall",
    "feb",
    "february",
    "friday",
    "jan",
    "january",
    "jul",
    "july",
    "jun",
    "june",
    "last",
    "mar",
    "march",
    "may",
    "monday",
    "month",
    "months",
    "morning",
    "next",
    "nov",
    "november",
    "oct",
    "october",
    "recently",
    "saturday",
    "sep",
    "sept",
    "september",
    "since",
    "spring",
    "summer",
    "sunday",
    "thursday",
    "today",
    "tomorrow",
    "tonight",
    "tuesday",
    "wednesday",
    "week",
    "weekend",
    "weekends",
    "weeks",
    "winter",
    "year",
    "years",
    "yesterday",
];
const NUMBERS: [&str; 18] = [
    "couple", "dozen", "eight", "first", "five", "four", "nine", "once", "one", "second", "seven", "several",
    "six", "ten", "third", "three", "twice", "two",
];

impl Form {
    /// The form of a text.
    #[must_use]
    pub fn of(text: &str) -> Self {
        let mut form = Self { asks: text.trim_end().ends_with(['?', '？', '؟']), ..Self::default() };
        for word in lower(text) {
            let word = word.as_str();
            form.i |= I.binary_search(&word).is_ok();
            form.you |= YOU.binary_search(&word).is_ok();
            form.time |= TIMES.binary_search(&word).is_ok() || is_year(word) || is_ordinal(word);
            form.number |=
                word.starts_with(|c: char| c.is_ascii_digit()) || NUMBERS.binary_search(&word).is_ok();
        }
        form.name = has_name(text);
        form
    }
}

impl Asked {
    /// What a query asks for.
    #[must_use]
    pub fn of(text: &str) -> Self {
        let words: Vec<String> = lower(text).collect();
        let pair = |first: &str, second: &[&str]| {
            words.windows(2).any(|w| w[0] == first && second.contains(&w[1].as_str()))
        };
        let any = |some: &[&str]| words.iter().any(|w| some.contains(&w.as_str()));
        let spans = ["days", "weeks", "months", "years"];
        let long =
            words.windows(3).any(|w| w[0] == "how" && w[1] == "many" && spans.contains(&w[2].as_str()));
        Self {
            time: any(&["when"])
                || pair("what", &["date", "day", "year", "month", "time"])
                || pair("which", &["date", "day", "year", "month"])
                || pair("how", &["long"])
                || long,
            number: pair("how", &["many", "much", "old", "often"]),
            name: any(&["who", "whom", "whose", "where", "which"])
                || pair(
                    "what",
                    &["city", "country", "place", "book", "movie", "band", "song", "game", "name"],
                ),
            i: words.iter().any(|w| I.binary_search(&w.as_str()).is_ok()),
            you: words.iter().any(|w| YOU.binary_search(&w.as_str()).is_ok()),
        }
    }
}

fn lower(text: &str) -> impl Iterator<Item = String> {
    words(text).map(|word| word.to_lowercase().replace(['’', 'ʼ'], "'"))
}

fn is_year(word: &str) -> bool {
    word.len() == 4
        && (word.starts_with("19") || word.starts_with("20"))
        && word.bytes().all(|b| b.is_ascii_digit())
}

fn is_ordinal(word: &str) -> bool {
    let digits = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    matches!(digits.len(), 1 | 2) && ["st", "nd", "rd", "th"].contains(&&word[digits.len()..]) && {
        digits.bytes().all(|b| b.is_ascii_digit())
    }
}

/// A word with a capital in the middle of a sentence.
fn has_name(text: &str) -> bool {
    let mut before = ' ';
    let mut gap = false;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let starts = gap && c.is_uppercase() && chars.peek().is_some_and(|next| next.is_lowercase());
        if starts && (before.is_lowercase() || matches!(before, ',' | ';' | ':')) {
            return true;
        }
        if c == ' ' {
            gap = !gap && before != ' ';
        } else {
            (before, gap) = (c, false);
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_have_a_form() {
        let none = Form::default();
        for (text, form) in [
            ("", none),
            ("Hello there", none),
            ("How are you?", Form { asks: true, you: true, ..none }),
            ("I’ve moved to Paris last week.", Form { i: true, time: true, name: true, ..none }),
            ("It cost 20 dollars", Form { number: true, ..none }),
            ("She came on the 21st of June 2023", Form { time: true, number: true, name: true, ..none }),
            ("Well, Anna knows.", Form { name: true, ..none }),
            ("Paris. London. Rome.", none),
        ] {
            assert_eq!(Form::of(text), form, "{text}");
        }
    }

    #[test]
    fn queries_ask_for_something() {
        let none = Asked::default();
        for (text, asked) in [
            ("When did I move?", Asked { time: true, i: true, ..none }),
            ("How many years did it take you?", Asked { time: true, number: true, you: true, ..none }),
            ("Who is Anna?", Asked { name: true, ..none }),
            ("What book is it?", Asked { name: true, ..none }),
            ("what happened then", none),
        ] {
            assert_eq!(Asked::of(text), asked, "{text}");
        }
    }

    #[test]
    fn lists_are_sorted() {
        assert!(I.is_sorted() && YOU.is_sorted() && TIMES.is_sorted() && NUMBERS.is_sorted());
    }
}
