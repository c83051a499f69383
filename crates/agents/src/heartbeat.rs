//! The arithmetic of time in rooms: how fast agents think, how much they may say, and how long ago things were. Time comes in as
//! milliseconds since 1970; nothing here looks at a clock.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use serde::{Deserialize, Serialize};

/// Milliseconds since 1970.
pub type Millis = i64;

/// How long an agent waits from one heartbeat to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Interval(u32);

impl Default for Interval {
    /// As slow as can be: it is others who make an agent faster.
    fn default() -> Self {
        Self(Self::SLOWEST)
    }
}

impl Interval {
    const FASTEST: u32 = 1_000;
    const SLOWEST: u32 = 10_000;
    const REACTION: u32 = 500;
    const DECAY: u32 = 100;

    /// So many milliseconds, as far as that is allowed: between one second and ten.
    #[must_use]
    pub fn new(millis: u32) -> Self {
        Self(millis.clamp(Self::FASTEST, Self::SLOWEST))
    }

    /// In milliseconds.
    #[must_use]
    pub fn millis(self) -> Millis {
        Millis::from(self.0)
    }

    /// In seconds.
    #[must_use]
    pub fn seconds(self) -> f64 {
        f64::from(self.0) / 1000.0
    }

    /// Somebody liked what was said.
    #[must_use]
    pub fn faster(self) -> Self {
        Self::new(self.0.saturating_sub(Self::REACTION))
    }

    /// Somebody did not.
    #[must_use]
    pub fn slower(self) -> Self {
        Self::new(self.0 + Self::REACTION)
    }

    /// A heartbeat has passed: everybody calms down.
    #[must_use]
    pub fn decayed(self) -> Self {
        Self::new(self.0 + Self::DECAY)
    }
}

/// Words that can be said in a minute, unless a room's owner says otherwise.
pub const USUAL_WPM: u32 = 80;

/// The slowest and the fastest that a room may be.
pub const WPM: std::ops::RangeInclusive<u32> = 10..=200;

/// The least and the most words of a message.
pub const WORDS: std::ops::RangeInclusive<usize> = 10..=200;

/// The words of a text. Where they are not divided by spaces, ten characters are one.
#[must_use]
pub fn words(text: &str) -> usize {
    text.split_whitespace().count().max(text.chars().count() / 10)
}

/// How many words may be said, so long after the last time; at first, as many as ever.
#[must_use]
pub fn word_budget(last: Option<Millis>, now: Millis, wpm: u32) -> usize {
    let Some(last) = last else { return *WORDS.end() };
    let elapsed = now.saturating_sub(last).max(0);
    let words = elapsed.saturating_mul(Millis::from(wpm)) / 60_000;
    usize::try_from(words).unwrap_or(usize::MAX).clamp(*WORDS.start(), *WORDS.end())
}

/// When so many words may be said: at once where the budget allows them, else as soon as somebody who types at the room's
/// speed would have written them.
#[must_use]
pub fn sayable(words: usize, last: Option<Millis>, now: Millis, wpm: u32) -> Millis {
    if words <= word_budget(last, now, wpm) {
        return now;
    }
    written(words, last.unwrap_or(now), wpm).max(now)
}

/// When so many words are written that were begun then.
#[must_use]
pub fn written(words: usize, begun: Millis, wpm: u32) -> Millis {
    let typing = Millis::try_from(words).unwrap_or(Millis::MAX).saturating_mul(60_000);
    let wpm = Millis::from(wpm.max(1));
    begun.saturating_add(typing.saturating_add(wpm - 1) / wpm)
}

/// How long ago it was that somebody spoke.
#[must_use]
pub fn time_since(last: Option<Millis>, now: Millis) -> String {
    let Some(last) = last else { return "never (just joined)".to_owned() };
    let seconds = now.saturating_sub(last).max(0) / 1000;
    let named = |n: i64, unit: &str| format!("{n} {unit}{}", if n == 1 { "" } else { "s" });
    match seconds {
        0..60 => named(seconds, "second"),
        60..3600 => named(seconds / 60, "minute"),
        3600..172_800 => match (seconds / 3600, seconds % 3600 / 360) {
            (hours, 0) => named(hours, "hour"),
            (hours, tenths) => format!("{hours}.{tenths} hours"),
        },
        _ => named(seconds / 86_400, "day"),
    }
}

/// A time as agents read it: ISO 8601, in universal time, to the second.
#[must_use]
pub fn shown(at: Millis) -> String {
    let time = Timestamp::from_millisecond(at).unwrap_or_default();
    TimeZone::UTC.to_datetime(time).strftime("%Y-%m-%dT%H:%M:%S").to_string()
}

/// A time as agents write it: ISO 8601, with a zone or in universal time.
#[must_use]
pub fn read(text: &str) -> Option<Millis> {
    let text = text.trim();
    let exact = text.parse::<Timestamp>().ok();
    let time = exact.or_else(|| {
        let civil = text.parse::<DateTime>().ok()?;
        TimeZone::UTC.to_timestamp(civil).ok()
    });
    time.map(Timestamp::as_millisecond)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reactions_and_time_change_the_pulse_within_one_and_ten_seconds() {
        let slow = Interval::default();
        assert_eq!((slow.seconds(), slow.faster().seconds(), slow.slower().seconds()), (10.0, 9.5, 10.0));
        let fast = Interval::new(1_200);
        assert_eq!(
            (fast.faster().seconds(), fast.slower().seconds(), fast.decayed().seconds()),
            (1.0, 1.7, 1.3)
        );
        assert_eq!(Interval::new(9_950).decayed().seconds(), 10.0);
        assert_eq!((Interval::new(0).millis(), Interval::new(60_000).millis()), (1_000, 10_000));
    }

    #[test]
    fn words_grow_with_time() {
        // Eighty words a minute: sixty words take forty-five seconds.
        for (seconds, wpm, words) in [
            (0, 80, 10),
            (7, 80, 10),
            (9, 80, 12),
            (45, 80, 60),
            (150, 80, 200),
            (9_999, 80, 200),
            (135, 20, 45),
            (300, 24, 120),
        ] {
            assert_eq!(word_budget(Some(5_000), 5_000 + seconds * 1000, wpm), words, "{seconds} s at {wpm}");
        }
        assert_eq!(word_budget(None, 5_000, 80), 200);
        assert_eq!(sayable(60, Some(0), 0, 80), 45_000);
        assert_eq!(sayable(60, Some(0), 45_000, 80), 45_000);
        assert_eq!(sayable(10, Some(0), 1, 80), 1, "a few words can always be said");
        assert_eq!(sayable(200, None, 7, 80), 7, "and the first are free");
        assert_eq!(sayable(61, Some(0), 0, 70), 52_286, "never a millisecond too early");
    }

    #[test]
    fn times_are_told_as_people_do() {
        let since = |seconds: i64| time_since(Some(1_000), 1_000 + seconds * 1000);
        for (seconds, words) in [
            (0, "0 seconds"),
            (1, "1 second"),
            (30, "30 seconds"),
            (60, "1 minute"),
            (135, "2 minutes"),
            (300, "5 minutes"),
            (3_600, "1 hour"),
            (9_000, "2.5 hours"),
            (172_799, "47.9 hours"),
            (172_800, "2 days"),
        ] {
            assert_eq!(since(seconds), words);
        }
        assert_eq!(time_since(None, 0), "never (just joined)");
        assert_eq!(time_since(Some(10), 0), "0 seconds", "clocks go back now and then");
    }

    #[test]
    fn times_are_written_and_read() {
        let at = read("2024-01-15T10:30:00").expect("a time");
        assert_eq!((at, shown(at).as_str()), (1_705_314_600_000, "2024-01-15T10:30:00"));
        assert_eq!(read("2024-01-15T10:30:00.123456").expect("a time"), at + 123);
        assert_eq!(read("2024-01-15T12:30:00+02:00"), Some(at));
        assert_eq!(read("tomorrow"), None);
    }
}
