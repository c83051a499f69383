//! The arithmetic of time in rooms: heartbeat intervals, word budgets and typing times. Time comes in as milliseconds
//! since 1970; nothing here reads a clock.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use serde::{Deserialize, Serialize};

/// A time in milliseconds since 1970, or a duration in milliseconds.
pub type Millis = i64;

/// The time from one heartbeat of an agent to the next, between one and ten seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HeartbeatInterval(u32);

impl Default for HeartbeatInterval {
    /// The slowest: reactions of others make an agent faster.
    fn default() -> Self {
        Self(Self::MAX_MILLIS)
    }
}

impl HeartbeatInterval {
    const MIN_MILLIS: u32 = 1_000;
    const MAX_MILLIS: u32 = 10_000;
    const REACTION_STEP: u32 = 500;
    const DECAY_STEP: u32 = 100;

    /// Clamps to the allowed range.
    #[must_use]
    pub fn new(millis: u32) -> Self {
        Self(millis.clamp(Self::MIN_MILLIS, Self::MAX_MILLIS))
    }

    #[must_use]
    pub fn millis(self) -> Millis {
        Millis::from(self.0)
    }

    #[must_use]
    pub fn seconds(self) -> f64 {
        f64::from(self.0) / 1000.0
    }

    /// The interval after a thumbs-up.
    #[must_use]
    pub fn faster(self) -> Self {
        Self::new(self.0.saturating_sub(Self::REACTION_STEP))
    }

    /// The interval after a thumbs-down.
    #[must_use]
    pub fn slower(self) -> Self {
        Self::new(self.0 + Self::REACTION_STEP)
    }

    /// The interval after a heartbeat: without reactions, an agent slows down.
    #[must_use]
    pub fn decayed(self) -> Self {
        Self::new(self.0 + Self::DECAY_STEP)
    }
}

/// A random deviation of heartbeats from their interval, so that agents with the same interval do not think in lockstep.
/// The same seed, agent and heartbeat give the same deviation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeartbeatJitter {
    /// The largest deviation as a part of the interval: 0.2 is ±20 %. Zero: none.
    pub share: f64,
    pub seed: u64,
}

impl HeartbeatJitter {
    /// Every heartbeat after exactly its interval.
    pub const NONE: Self = Self { share: 0.0, seed: 0 };

    /// The time to the next heartbeat of an agent that has had `count`, between one and ten seconds like every interval.
    #[must_use]
    pub fn spread(self, interval: HeartbeatInterval, agent: u32, count: u64) -> Millis {
        let hash = xxhash_rust::xxh3::xxh3_64_with_seed(format!("{agent}:{count}").as_bytes(), self.seed);
        // The upper 53 bits as a number from 0 to 1.
        let random = (hash >> 11) as f64 / (1u64 << 53) as f64;
        let factor = 1.0 + self.share * (2.0 * random - 1.0);
        HeartbeatInterval::new((f64::from(interval.0) * factor).round() as u32).millis()
    }
}

/// Words per minute of a room whose owner has not set another value.
pub const DEFAULT_WPM: u32 = 80;

pub const WPM_RANGE: std::ops::RangeInclusive<u32> = 10..=200;

/// The word budget of a message is never outside this range.
pub const MESSAGE_WORDS_RANGE: std::ops::RangeInclusive<usize> = 10..=200;

/// Counts words. Text without spaces counts one word per ten characters.
#[must_use]
pub fn count_words(text: &str) -> usize {
    text.split_whitespace().count().max(text.chars().count() / 10)
}

/// How many words a member may send now, given when it last spoke in the room. The first message has the full budget.
#[must_use]
pub fn word_budget(last: Option<Millis>, now: Millis, wpm: u32) -> usize {
    let Some(last) = last else { return *MESSAGE_WORDS_RANGE.end() };
    let elapsed = now.saturating_sub(last).max(0);
    let words = elapsed.saturating_mul(Millis::from(wpm)) / 60_000;
    usize::try_from(words)
        .unwrap_or(usize::MAX)
        .clamp(*MESSAGE_WORDS_RANGE.start(), *MESSAGE_WORDS_RANGE.end())
}

/// When a message of so many words is delivered: now if the word budget allows it, else when somebody who types at the
/// room's speed would have finished it.
#[must_use]
pub fn earliest_send_time(words: usize, last: Option<Millis>, now: Millis, wpm: u32) -> Millis {
    if words <= word_budget(last, now, wpm) {
        return now;
    }
    typing_done_at(words, last.unwrap_or(now), wpm).max(now)
}

/// When typing so many words ends that began at `begun`.
#[must_use]
pub fn typing_done_at(words: usize, begun: Millis, wpm: u32) -> Millis {
    let typing = Millis::try_from(words).unwrap_or(Millis::MAX).saturating_mul(60_000);
    let wpm = Millis::from(wpm.max(1));
    begun.saturating_add(typing.saturating_add(wpm - 1) / wpm)
}

/// The time since a member last spoke, as the HUD shows it.
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

/// ISO 8601 in UTC, to the second, as the HUD shows it.
#[must_use]
pub fn format_time(at: Millis) -> String {
    let time = Timestamp::from_millisecond(at).unwrap_or_default();
    TimeZone::UTC.to_datetime(time).strftime("%Y-%m-%dT%H:%M:%S").to_string()
}

/// Parses ISO 8601 as agents write it, with a zone or in UTC.
#[must_use]
pub fn parse_time(text: &str) -> Option<Millis> {
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
    fn heartbeat_interval_stays_within_one_and_ten_seconds() {
        let slow = HeartbeatInterval::default();
        assert_eq!((slow.seconds(), slow.faster().seconds(), slow.slower().seconds()), (10.0, 9.5, 10.0));
        let fast = HeartbeatInterval::new(1_200);
        assert_eq!(
            (fast.faster().seconds(), fast.slower().seconds(), fast.decayed().seconds()),
            (1.0, 1.7, 1.3)
        );
        assert_eq!(HeartbeatInterval::new(9_950).decayed().seconds(), 10.0);
        assert_eq!(
            (HeartbeatInterval::new(0).millis(), HeartbeatInterval::new(60_000).millis()),
            (1_000, 10_000)
        );
    }

    #[test]
    fn heartbeat_jitter_spreads_intervals_by_seed() {
        let interval = HeartbeatInterval::new(5_000);
        let times = |seed: u64, agent: u32| -> Vec<Millis> {
            let jitter = HeartbeatJitter { share: 0.2, seed };
            (1..=1_000).map(|count| jitter.spread(interval, agent, count)).collect()
        };
        let first = times(7, 1);
        assert_eq!(first, times(7, 1), "the same seed gives the same times");
        assert_ne!(first, times(8, 1), "another seed gives others");
        assert_ne!(first, times(7, 2), "two agents do not think in lockstep");
        let (least, most) = (first.iter().min(), first.iter().max());
        assert!(least >= Some(&4_000) && least < Some(&4_020), "{least:?}");
        assert!(most <= Some(&6_000) && most > Some(&5_980), "{most:?}");
        let mean = first.iter().sum::<Millis>() / 1_000;
        assert!((4_950..=5_050).contains(&mean), "{mean}");
        // One and ten seconds are limits for a deviation too.
        for (millis, range) in [(1_000, 1_000..=1_200), (10_000, 8_000..=10_000)] {
            let jitter = HeartbeatJitter { share: 0.2, seed: 7 };
            let times = (0..1_000).map(|count| jitter.spread(HeartbeatInterval::new(millis), 1, count));
            assert!(times.into_iter().all(|time| range.contains(&time)), "{millis}");
        }
        assert_eq!(HeartbeatJitter::NONE.spread(interval, 1, 1), 5_000);
    }

    #[test]
    fn word_budget_grows_with_elapsed_time() {
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
        assert_eq!(earliest_send_time(60, Some(0), 0, 80), 45_000);
        assert_eq!(earliest_send_time(60, Some(0), 45_000, 80), 45_000);
        assert_eq!(earliest_send_time(10, Some(0), 1, 80), 1, "ten words are always allowed");
        assert_eq!(earliest_send_time(200, None, 7, 80), 7, "the first message has the full budget");
        assert_eq!(earliest_send_time(61, Some(0), 0, 70), 52_286, "never a millisecond too early");
    }

    #[test]
    fn time_since_uses_human_units() {
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
        assert_eq!(time_since(Some(10), 0), "0 seconds", "a clock may go back");
    }

    #[test]
    fn time_format_and_parse_roundtrip() {
        let at = parse_time("2024-01-15T10:30:00").expect("a time");
        assert_eq!((at, format_time(at).as_str()), (1_705_314_600_000, "2024-01-15T10:30:00"));
        assert_eq!(parse_time("2024-01-15T10:30:00.123456").expect("a time"), at + 123);
        assert_eq!(parse_time("2024-01-15T12:30:00+02:00"), Some(at));
        assert_eq!(parse_time("tomorrow"), None);
    }
}
