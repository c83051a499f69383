//! Times that a query names: "in May 2023", "last week", "three days ago".
//!
//! A time that is certain is a span of days; "in May" may be of any year. What was said within it fits, and what was
//! said soon after: people tell of what has been. Dates inside texts are words like others, and found as such.

use jiff::civil::{Date, Weekday};
use jiff::{Span, ToSpan};

/// The times that a query names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct When {
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
const SMALL: [&str; 13] = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
];

impl When {
    /// What a query names; `now` is the day on which it is asked.
    #[must_use]
    pub fn of(text: &str, now: Date) -> Self {
        let words: Vec<&str> = text
            .split(|c: char| c.is_whitespace() || matches!(c, ',' | '?' | '!' | ';' | '(' | ')' | '"'))
            .collect();
        let words: Vec<&str> =
            words.iter().map(|w| w.trim_matches(['.', ':', '\'', '’'])).filter(|w| !w.is_empty()).collect();
        let mut when = Self::default();
        for at in 0..words.len() {
            when.read(&words, at, now);
        }
        when
    }

    fn read(&mut self, words: &[&str], at: usize, now: Date) {
        let word = words[at].to_lowercase();
        let before = at.checked_sub(1).map_or(String::new(), |i| words[i].to_lowercase());
        let behind = |n: usize| words.get(at + n).map_or(String::new(), |w| w.to_lowercase());
        let back = |span: Span| now.checked_sub(span).unwrap_or(now);
        if let Ok(date) = word.parse::<Date>() {
            return self.spans.push((date, date));
        }
        if let Some(month) = month(words[at], at) {
            let day = day(&before).or_else(|| day(&behind(1)));
            let year = [behind(1), behind(2), behind(3)].iter().find_map(|w| year(w));
            let told = year.zip(day).and_then(|(year, day)| Date::new(year, month, day).ok());
            return match told {
                Some(date) => self.spans.push((date, date)),
                None if before == "last" => self.spans.push(last_month(month, now)),
                None => self.months.push(month),
            };
        }
        if let Some(year) = year(&word) {
            return self.years.push(year);
        }
        let last = before == "last" || before == "past" || before == "previous";
        let span = match word.as_str() {
            "today" | "tonight" => (now, now),
            "yesterday" => (back(1.day()), back(1.day())),
            "night" if last => (back(1.day()), now),
            "week" if last => (back(14.days()), back(1.day())),
            "week" if before == "this" => (back(7.days()), now),
            "weekend" if last || before == "this" => (back(9.days()), now),
            "month" if last => (back(2.months()), back(1.day())),
            "month" if before == "this" => (now.first_of_month(), now),
            "year" if last => return self.years.push(now.year() - 1),
            "year" if before == "this" => return self.years.push(now.year()),
            "ago" => match ago(words, at) {
                Some((n, unit)) => {
                    let (middle, slack) = unit.span(n);
                    let middle = back(middle);
                    let ends = (middle.checked_sub(slack), middle.checked_add(slack));
                    (ends.0.unwrap_or(middle), ends.1.unwrap_or(middle))
                }
                None => return,
            },
            day if last => match WEEKDAYS.iter().position(|w| *w == day) {
                Some(n) => last_weekday(n, now),
                None => return,
            },
            _ => return,
        };
        self.spans.push(span);
    }

    /// Whether it names any.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// How well something said on a day fits, from −2 to 2.
    #[must_use]
    pub fn fit(&self, said: Date) -> f32 {
        let span = |&(from, to): &(Date, Date)| {
            let late = (said - to).get_days();
            match () {
                () if said < from => -2.0,
                () if said <= to => 2.0,
                () if late <= 31 => 1.3,
                () => -2.0,
            }
        };
        if let Some(best) = self.spans.iter().map(span).reduce(f32::max) {
            return best;
        }
        let month = |&month: &i8| match () {
            () if month == said.month() => 1.0,
            () if month % 12 + 1 == said.month() => 0.3,
            () => -1.0,
        };
        let year = |&year: &i16| if year == said.year() { 1.0 } else { -1.0 };
        let months = self.months.iter().map(month).reduce(f32::max);
        let years = self.years.iter().map(year).reduce(f32::max);
        months.unwrap_or(0.0) + years.unwrap_or(0.0)
    }
}

/// A month by its name or the first letters of it. `may` and `mar` are words too; with a capital, and not in front of
/// everything, they are months.
fn month(word: &str, at: usize) -> Option<i8> {
    let lower = word.to_lowercase();
    let short = lower == "sept" || (lower.len() == 3 && !matches!(lower.as_str(), "mar" | "may"));
    let found = MONTHS.iter().position(|m| *m == lower || (short && m.starts_with(&lower)))?;
    let certain = !matches!(lower.as_str(), "may" | "march") || (word.starts_with('M') && at > 0);
    certain.then_some(found as i8 + 1)
}

fn year(word: &str) -> Option<i16> {
    (word.len() == 4).then(|| word.parse().ok()).flatten().filter(|year| (1900..2100).contains(year))
}

fn day(word: &str) -> Option<i8> {
    let digits = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    digits.parse().ok().filter(|day| (1..=31).contains(day))
}

/// The last one of a month that has begun.
fn last_month(month: i8, now: Date) -> (Date, Date) {
    let year = if month < now.month() { now.year() } else { now.year() - 1 };
    let first = Date::new(year, month, 1).unwrap_or(now);
    (first, first.last_of_month())
}

fn last_weekday(n: usize, now: Date) -> (Date, Date) {
    let weekday = Weekday::from_monday_zero_offset(n as i8).unwrap_or(Weekday::Monday);
    let day = now.nth_weekday(-1, weekday).unwrap_or(now);
    (day, day)
}

#[derive(Clone, Copy)]
enum Unit {
    Days,
    Weeks,
    Months,
    Years,
}

impl Unit {
    /// So many of them, and how far off one may be who says so.
    fn span(self, n: i64) -> (Span, Span) {
        match self {
            Self::Days => (n.days(), (n / 3).days()),
            Self::Weeks => (n.weeks(), 4.days()),
            Self::Months => (n.months(), 20.days()),
            Self::Years => (n.years(), 6.months()),
        }
    }
}

/// "three days ago", "a year ago".
fn ago(words: &[&str], at: usize) -> Option<(i64, Unit)> {
    let unit = match words.get(at.checked_sub(1)?)?.to_lowercase().as_str() {
        "day" | "days" => Unit::Days,
        "week" | "weeks" => Unit::Weeks,
        "month" | "months" => Unit::Months,
        "year" | "years" => Unit::Years,
        _ => return None,
    };
    let count = words.get(at.checked_sub(2)?)?.to_lowercase();
    let said = SMALL.iter().position(|w| *w == count).map(|n| n as i64);
    let n = match count.as_str() {
        "a" | "an" => Some(1),
        "couple" | "few" => Some(3),
        digits => said.or_else(|| digits.parse().ok()),
    };
    Some((n.filter(|n| (0..=1000).contains(n))?, unit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::civil::date;

    #[test]
    fn times_are_read() {
        let now = date(2023, 10, 18);
        let when = |spans: &[(Date, Date)], months: &[i8], years: &[i16]| When {
            spans: spans.to_vec(),
            months: months.to_vec(),
            years: years.to_vec(),
        };
        let day = |d: Date| (d, d);
        for (text, expected) in [
            ("what is it about?", When::default()),
            ("May I come in? We may march.", When::default()),
            ("What happened in May 2023?", when(&[], &[5], &[2023])),
            ("on 8 May, 2023", when(&[day(date(2023, 5, 8))], &[], &[2023])),
            ("on May 8th 2023?", when(&[day(date(2023, 5, 8))], &[], &[2023])),
            ("on 2023-05-08", when(&[day(date(2023, 5, 8))], &[], &[])),
            ("around Sept. or in august", when(&[], &[9, 8], &[])),
            ("last May", when(&[(date(2023, 5, 1), date(2023, 5, 31))], &[], &[])),
            ("last December", when(&[(date(2022, 12, 1), date(2022, 12, 31))], &[], &[])),
            ("what did I say yesterday?", when(&[day(date(2023, 10, 17))], &[], &[])),
            ("last friday", when(&[day(date(2023, 10, 13))], &[], &[])),
            ("three days ago", when(&[(date(2023, 10, 14), date(2023, 10, 16))], &[], &[])),
            ("a year ago", when(&[(date(2022, 4, 18), date(2023, 4, 18))], &[], &[])),
            ("last week", when(&[(date(2023, 10, 4), date(2023, 10, 17))], &[], &[])),
            ("last year", when(&[], &[], &[2022])),
            ("99999999999 years ago, ago, 31 February 2023", when(&[], &[2], &[2023])),
        ] {
            assert_eq!(When::of(text, now), expected, "{text}");
        }
    }

    #[test]
    fn what_was_said_then_fits() {
        let now = date(2023, 10, 18);
        for (text, said, fit) in [
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
            assert_eq!(When::of(text, now).fit(said), fit, "{text} {said}");
        }
    }
}
