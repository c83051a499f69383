//! Surface features of English texts and queries for ranking: person, question, time, number, name.
//!
//! Queries about a conversation mostly ask for what a person said about themselves: first person rather than second, a
//! statement rather than a question. "When", "how many" and "who" ask for a time, a number or a name. In other languages
//! all features are false, and ranking uses meaning and words alone.

use crate::lexical::words;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextFeatures {
    /// It ends with a question mark.
    pub is_question: bool,
    pub first_person: bool,
    pub second_person: bool,
    pub mentions_time: bool,
    pub mentions_number: bool,
    /// It has a capitalized word in the middle of a sentence.
    pub mentions_name: bool,
}

/// What kind of answer a query asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueryIntent {
    pub wants_time: bool,
    pub wants_number: bool,
    /// The name of a person, a place or a thing.
    pub wants_name: bool,
    pub first_person: bool,
    pub second_person: bool,
}

// All lists are sorted for binary search.
const FIRST_PERSON: [&str; 9] = ["i", "i'm", "i've", "me", "mine", "my", "myself", "our", "we"];
const SECOND_PERSON: [&str; 6] = ["you", "you'll", "you're", "you've", "your", "yours"];
const TIME_WORDS: [&str; 58] = [
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
const NUMBER_WORDS: [&str; 18] = [
    "couple", "dozen", "eight", "first", "five", "four", "nine", "once", "one", "second", "seven", "several",
    "six", "ten", "third", "three", "twice", "two",
];

impl TextFeatures {
    #[must_use]
    pub fn extract(text: &str) -> Self {
        let mut features =
            Self { is_question: text.trim_end().ends_with(['?', '？', '؟']), ..Self::default() };
        for word in lowercase_words(text) {
            let word = word.as_str();
            features.first_person |= FIRST_PERSON.binary_search(&word).is_ok();
            features.second_person |= SECOND_PERSON.binary_search(&word).is_ok();
            features.mentions_time |=
                TIME_WORDS.binary_search(&word).is_ok() || is_year(word) || is_ordinal(word);
            features.mentions_number |=
                word.starts_with(|c: char| c.is_ascii_digit()) || NUMBER_WORDS.binary_search(&word).is_ok();
        }
        features.mentions_name = has_name(text);
        features
    }
}

impl QueryIntent {
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let words: Vec<String> = lowercase_words(text).collect();
        let pair = |first: &str, second: &[&str]| {
            words.windows(2).any(|w| w[0] == first && second.contains(&w[1].as_str()))
        };
        let any = |some: &[&str]| words.iter().any(|w| some.contains(&w.as_str()));
        let spans = ["days", "weeks", "months", "years"];
        let asks_duration =
            words.windows(3).any(|w| w[0] == "how" && w[1] == "many" && spans.contains(&w[2].as_str()));
        Self {
            wants_time: any(&["when"])
                || pair("what", &["date", "day", "year", "month", "time"])
                || pair("which", &["date", "day", "year", "month"])
                || pair("how", &["long"])
                || asks_duration,
            wants_number: pair("how", &["many", "much", "old", "often"]),
            wants_name: any(&["who", "whom", "whose", "where", "which"])
                || pair(
                    "what",
                    &["city", "country", "place", "book", "movie", "band", "song", "game", "name"],
                ),
            first_person: words.iter().any(|w| FIRST_PERSON.binary_search(&w.as_str()).is_ok()),
            second_person: words.iter().any(|w| SECOND_PERSON.binary_search(&w.as_str()).is_ok()),
        }
    }
}

fn lowercase_words(text: &str) -> impl Iterator<Item = String> {
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

/// Whether a capitalized word follows a lower-case word, a comma, a semicolon or a colon.
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
    fn text_features_of_statements_and_questions() {
        let none = TextFeatures::default();
        for (text, features) in [
            ("", none),
            ("Hello there", none),
            ("How are you?", TextFeatures { is_question: true, second_person: true, ..none }),
            (
                "I’ve moved to Paris last week.",
                TextFeatures { first_person: true, mentions_time: true, mentions_name: true, ..none },
            ),
            ("It cost 20 dollars", TextFeatures { mentions_number: true, ..none }),
            (
                "She came on the 21st of June 2023",
                TextFeatures { mentions_time: true, mentions_number: true, mentions_name: true, ..none },
            ),
            ("Well, Anna knows.", TextFeatures { mentions_name: true, ..none }),
            ("Paris. London. Rome.", none),
        ] {
            assert_eq!(TextFeatures::extract(text), features, "{text}");
        }
    }

    #[test]
    fn query_intent_finds_time_number_and_name() {
        let none = QueryIntent::default();
        for (text, intent) in [
            ("When did I move?", QueryIntent { wants_time: true, first_person: true, ..none }),
            (
                "How many years did it take you?",
                QueryIntent { wants_time: true, wants_number: true, second_person: true, ..none },
            ),
            ("Who is Anna?", QueryIntent { wants_name: true, ..none }),
            ("What book is it?", QueryIntent { wants_name: true, ..none }),
            ("what happened then", none),
        ] {
            assert_eq!(QueryIntent::parse(text), intent, "{text}");
        }
    }

    #[test]
    fn text_features_word_lists_are_sorted() {
        assert!(
            FIRST_PERSON.is_sorted()
                && SECOND_PERSON.is_sorted()
                && TIME_WORDS.is_sorted()
                && NUMBER_WORDS.is_sorted()
        );
    }
}
