//! Dates in an English query: "in May 2023", "last week", "three days ago".
//!
//! A definite date is a span of days; "in May" is a month of any year. A chunk matches if its turn began within the span,
//! and less so if it began shortly after: people talk about past events. Dates inside chunks are not parsed; they match as
//! words.

use jiff::civil::{Date, Weekday};
use jiff::{Span, ToSpan};

/// The dates that a query names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueryDates {
    spans: Vec<(Date, Date)>,
    months: Vec<i8>,
    years: Vec<i16>,
}

const MONTHS: [&str; 12] = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
];
const WEEKDAYS: [&str; 7] = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"];
const NUMBER_WORDS: [&str; 13] = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
];

impl QueryDates {
    /// Parses a query that is asked on the day `today`.
    #[must_use]
    pub fn parse(text: &str, today: Date) -> Self {
        let words: Vec<&str> = text
            .split(|c: char| c.is_whitespace() || matches!(c, ',' | '?' | '!' | ';' | '(' | ')' | '"'))
            .collect();
        let words: Vec<&str> =
            words.iter().map(|w| w.trim_matches(['.', ':', '\'', '’'])).filter(|w| !w.is_empty()).collect();
        let mut dates = Self::default();
        for at in 0..words.len() {
            dates.parse_word(&words, at, today);
        }
        dates
    }

    fn parse_word(&mut self, words: &[&str], at: usize, today: Date) {
        let word = words[at].to_lowercase();
        let before = at.checked_sub(1).map_or(String::new(), |i| words[i].to_lowercase());
        let after = |n: usize| words.get(at + n).map_or(String::new(), |w| w.to_lowercase());
        let back = |span: Span| today.checked_sub(span).unwrap_or(today);
        if let Ok(date) = word.parse::<Date>() {
            return self.spans.push((date, date));
        }
        if let Some(month) = parse_month(words[at], at) {
            let day = parse_day(&before).or_else(|| parse_day(&after(1)));
            let year = [after(1), after(2), after(3)].iter().find_map(|w| parse_year(w));
            let date = year.zip(day).and_then(|(year, day)| Date::new(year, month, day).ok());
            return match date {
                Some(date) => self.spans.push((date, date)),
                None if before == "last" => self.spans.push(last_month_range(month, today)),
                None => self.months.push(month),
            };
        }
        if let Some(year) = parse_year(&word) {
            return self.years.push(year);
        }
        let last = before == "last" || before == "past" || before == "previous";
        let span = match word.as_str() {
            "today" | "tonight" => (today, today),
            "yesterday" => (back(1.day()), back(1.day())),
            "night" if last => (back(1.day()), today),
            "week" if last => (back(14.days()), back(1.day())),
            "week" if before == "this" => (back(7.days()), today),
            "weekend" if last || before == "this" => (back(9.days()), today),
            "month" if last => (back(2.months()), back(1.day())),
            "month" if before == "this" => (today.first_of_month(), today),
            "year" if last => return self.years.push(today.year() - 1),
            "year" if before == "this" => return self.years.push(today.year()),
            "ago" => match parse_ago(words, at) {
                Some((n, unit)) => {
                    let (span, slack) = unit.span_with_slack(n);
                    let middle = back(span);
                    let (from, to) = (middle.checked_sub(slack), middle.checked_add(slack));
                    (from.unwrap_or(middle), to.unwrap_or(middle))
                }
                None => return,
            },
            day if last => match WEEKDAYS.iter().position(|w| *w == day) {
                Some(n) => last_weekday_range(n, today),
                None => return,
            },
            _ => return,
        };
        self.spans.push(span);
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// How well a turn of this day matches, from −2 to 2.
    #[must_use]
    pub fn match_score(&self, day: Date) -> f32 {
        let span = |&(from, to): &(Date, Date)| {
            let days_after = (day - to).get_days();
            match () {
                () if day < from => -2.0,
                () if day <= to => 2.0,
                () if days_after <= 31 => 1.3,
                () => -2.0,
            }
        };
        if let Some(best) = self.spans.iter().map(span).reduce(f32::max) {
            return best;
        }
        let month = |&month: &i8| match () {
            () if month == day.month() => 1.0,
            () if month % 12 + 1 == day.month() => 0.3,
            () => -1.0,
        };
        let year = |&year: &i16| if year == day.year() { 1.0 } else { -1.0 };
        let months = self.months.iter().map(month).reduce(f32::max);
        let years = self.years.iter().map(year).reduce(f32::max);
        months.unwrap_or(0.0) + years.unwrap_or(0.0)
    }
}

/// A month by its name or abbreviation. "may" and "march" are also other words: they count as months with a capital, and
/// not as the first word.
fn parse_month(word: &str, at: usize) -> Option<i8> {
    let lower = word.to_lowercase();
    let short = lower == "sept" || (lower.len() == 3 && !matches!(lower.as_str(), "mar" | "may"));
    let index = MONTHS.iter().position(|m| *m == lower || (short && m.starts_with(&lower)))?;
    let certain = !matches!(lower.as_str(), "may" | "march") || (word.starts_with('M') && at > 0);
    certain.then_some(index as i8 + 1)
}

fn parse_year(word: &str) -> Option<i16> {
    (word.len() == 4).then(|| word.parse().ok()).flatten().filter(|year| (1900..2100).contains(year))
}

fn parse_day(word: &str) -> Option<i8> {
    let digits = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    digits.parse().ok().filter(|day| (1..=31).contains(day))
}

/// The latest such month that began before this one.
fn last_month_range(month: i8, today: Date) -> (Date, Date) {
    let year = if month < today.month() { today.year() } else { today.year() - 1 };
    let first = Date::new(year, month, 1).unwrap_or(today);
    (first, first.last_of_month())
}

fn last_weekday_range(n: usize, today: Date) -> (Date, Date) {
    let weekday = Weekday::from_monday_zero_offset(n as i8).unwrap_or(Weekday::Monday);
    let day = today.nth_weekday(-1, weekday).unwrap_or(today);
    (day, day)
}

#[derive(Clone, Copy)]
enum DateUnit {
    Days,
    Weeks,
    Months,
    Years,
}

impl DateUnit {
    /// `n` units, and how imprecise "`n` units ago" is.
    fn span_with_slack(self, n: i64) -> (Span, Span) {
        match self {
            Self::Days => (n.days(), (n / 3).days()),
            Self::Weeks => (n.weeks(), 4.days()),
            Self::Months => (n.months(), 20.days()),
            Self::Years => (n.years(), 6.months()),
        }
    }
}

/// The count and unit before "ago": "three days ago", "a year ago".
fn parse_ago(words: &[&str], at: usize) -> Option<(i64, DateUnit)> {
    let unit = match words.get(at.checked_sub(1)?)?.to_lowercase().as_str() {
        "day" | "days" => DateUnit::Days,
        "week" | "weeks" => DateUnit::Weeks,
        "month" | "months" => DateUnit::Months,
        "year" | "years" => DateUnit::Years,
        _ => return None,
    };
    let count = words.get(at.checked_sub(2)?)?.to_lowercase();
    let number = NUMBER_WORDS.iter().position(|w| *w == count).map(|n| n as i64);
    let n = match count.as_str() {
        "a" | "an" => Some(1),
        "couple" | "few" => Some(3),
        digits => number.or_else(|| digits.parse().ok()),
    };
    Some((n.filter(|n| (0..=1000).contains(n))?, unit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::civil::date;

    #[test]
    fn query_dates_parse_english_expressions() {
        let today = date(2023, 10, 18);
        let dates = |spans: &[(Date, Date)], months: &[i8], years: &[i16]| QueryDates {
            spans: spans.to_vec(),
            months: months.to_vec(),
            years: years.to_vec(),
        };
        let day = |d: Date| (d, d);
        for (text, expected) in [
            ("what is it about?", QueryDates::default()),
            ("May I come in? We may march.", QueryDates::default()),
            ("What happened in May 2023?", dates(&[], &[5], &[2023])),
            ("on 8 May, 2023", dates(&[day(date(2023, 5, 8))], &[], &[2023])),
            ("on May 8th 2023?", dates(&[day(date(2023, 5, 8))], &[], &[2023])),
            ("on 2023-05-08", dates(&[day(date(2023, 5, 8))], &[], &[])),
            ("around Sept. or in august", dates(&[], &[9, 8], &[])),
            ("last May", dates(&[(date(2023, 5, 1), date(2023, 5, 31))], &[], &[])),
            ("last December", dates(&[(date(2022, 12, 1), date(2022, 12, 31))], &[], &[])),
            ("what did I say yesterday?", dates(&[day(date(2023, 10, 17))], &[], &[])),
            ("last friday", dates(&[day(date(2023, 10, 13))], &[], &[])),
            ("three days ago", dates(&[(date(2023, 10, 14), date(2023, 10, 16))], &[], &[])),
            ("a year ago", dates(&[(date(2022, 4, 18), date(2023, 4, 18))], &[], &[])),
            ("last week", dates(&[(date(2023, 10, 4), date(2023, 10, 17))], &[], &[])),
            ("last year", dates(&[], &[], &[2022])),
            ("99999999999 years ago, ago, 31 February 2023", dates(&[], &[2], &[2023])),
        ] {
            assert_eq!(QueryDates::parse(text, today), expected, "{text}");
        }
    }

    #[test]
    fn query_dates_score_days_within_and_after() {
        let today = date(2023, 10, 18);
        for (text, day, score) in [
            ("in May 2023", date(2023, 5, 8), 2.0),
            ("in May 2023", date(2023, 6, 1), 1.3),
            ("in May 2023", date(2022, 5, 8), 0.0),
            ("in May", date(2020, 5, 8), 1.0),
            ("in December", date(2020, 1, 8), 0.3),
            ("yesterday", date(2023, 10, 17), 2.0),
            ("yesterday", date(2023, 10, 1), -2.0),
            ("on May 8th 2023", date(2023, 5, 20), 1.3),
            ("whenever", date(2023, 10, 1), 0.0),
        ] {
            assert_eq!(QueryDates::parse(text, today).match_score(day), score, "{text} {day}");
        }
    }
}
