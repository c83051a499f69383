//! What each command does. A command returns an error for `main` to print; it never exits by itself.

pub mod bench;
pub mod config;
pub mod doctor;
pub mod exchange;
pub mod progress;
pub mod replay;
pub mod show;
pub mod signal;

use crate::printable;
use anyhow::Result;
use std::io::Write;

/// Prints a page. A reader that has seen enough (`halo … | head`) is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// `1 step`, `2 steps`.
fn count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// The beginning of a text, on one line.
fn shorten(text: &str, most: usize) -> String {
    let words = printable(text).split_whitespace().collect::<Vec<_>>().join(" ");
    match words.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &words[..end]),
        None => words,
    }
}

/// A time in milliseconds since 1970, as people here write it.
fn time(at: i64) -> String {
    match jiff::Timestamp::from_millisecond(at) {
        Ok(time) => time.to_zoned(jiff::tz::TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S").to_string(),
        Err(_) => "at an unknown time".into(),
    }
}

/// Prints JSON, and a line break behind it.
fn print_json(value: &serde_json::Value) -> Result<()> {
    print(&format!("{}\n", serde_json::to_string_pretty(value)?))
}
