//! Dates in the formats that other programs write.
//!
//! A date without a time zone was local time on a machine that the file does not name; it is read as UTC.

use super::losses::{ImportLosses, loss_kind};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use serde_json::Value;

/// The last millisecond of the year 9999.
const MAX_TIMESTAMP_MS: f64 = 253_402_300_799_999.0;

/// Smaller numbers are seconds (up to the year 5138), larger ones milliseconds (from 1973).
const MILLISECONDS_FROM: f64 = 1e11;

/// Parses a date to milliseconds since 1970. One that cannot be parsed is counted as a loss; a missing one is not.
pub(super) fn parse_date(value: Option<&Value>, losses: &mut ImportLosses) -> Option<i64> {
    let date = match value? {
        Value::Null => return None,
        Value::String(text) if text.trim().is_empty() => return None,
        Value::String(text) => parse_date_text(text),
        Value::Number(number) => number.as_f64().and_then(parse_epoch_number),
        _ => None,
    };
    losses.add(loss_kind::UNREADABLE_DATES, usize::from(date.is_none()));
    date
}

pub(super) fn parse_date_text(text: &str) -> Option<i64> {
    let text = text.trim();
    if text.bytes().all(|b| b.is_ascii_digit()) {
        return parse_epoch_number(text.parse().ok()?);
    }
    if let Ok(instant) = text.parse::<Timestamp>() {
        return Some(instant.as_millisecond());
    }
    let local = text.parse::<DateTime>().ok().or_else(|| parse_date_with_units(text));
    let local = local.or_else(|| DateTime::strptime("%B %d, %Y %I:%M%p", text).ok())?;
    Some(local.to_zoned(TimeZone::UTC).ok()?.timestamp().as_millisecond())
}

fn parse_epoch_number(number: f64) -> Option<i64> {
    let ms = if number.abs() < MILLISECONDS_FROM { number * 1000.0 } else { number };
    (ms.abs() <= MAX_TIMESTAMP_MS).then_some(ms.round() as i64)
}

/// `2023-6-19 @14h 20m 32s 123ms`, with or without the spaces and the milliseconds.
fn parse_date_with_units(text: &str) -> Option<DateTime> {
    let (day, time) = text.split_once('@')?;
    let mut units = String::new();
    let mut numbers: Vec<i16> = day.trim_end().split('-').map(str::parse).collect::<Result<_, _>>().ok()?;
    for part in time.split_inclusive(|c: char| !c.is_ascii_digit()).filter(|part| !part.trim().is_empty()) {
        let unit = part.trim_start_matches(|c: char| c.is_ascii_digit());
        if unit.len() < part.len() {
            numbers.push(part[..part.len() - unit.len()].parse().ok()?);
        }
        units.push_str(unit.trim());
    }
    let small = |n: i16| i8::try_from(n).ok();
    let (date, ms) = match (numbers.as_slice(), units.as_str()) {
        ([y, m, d, h, min, s], "hms") => ([*y, *m, *d, *h, *min, *s], 0),
        ([y, m, d, h, min, s, ms], "hmsms") => ([*y, *m, *d, *h, *min, *s], *ms),
        _ => return None,
    };
    let [y, m, d, h, min, s] = date;
    let ns = i32::from(ms).checked_mul(1_000_000)?;
    DateTime::new(y, small(m)?, small(d)?, small(h)?, small(min)?, small(s)?, ns).ok()
}
