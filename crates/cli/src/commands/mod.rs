//! What each command does. A command returns an error for `main` to print; it never exits by itself.

pub mod ask;
pub mod bench;
pub mod chat;
pub mod config;
pub mod doctor;
pub mod exchange;
pub mod forget;
pub mod memories;
pub mod models;
pub mod pip;
pub mod progress;
pub mod pull;
pub mod replay;
pub mod rooms;
pub mod search;
pub mod serve;
pub mod show;
pub mod signal;
pub mod stats;

use crate::printable;
use anyhow::Result;
use std::io::Write;

/// Nobody reads any more: no error, and no reason to go on.
#[derive(Debug)]
pub struct Closed;

impl std::fmt::Display for Closed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for Closed {}

/// Prints a page.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(Closed.into()),
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
        Ok(time) => time.to_zoned(jiff::tz::TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S %Z").to_string(),
        Err(_) => "at an unknown time".into(),
    }
}

/// Prints JSON, and a line break behind it.
fn print_json(value: &serde_json::Value) -> Result<()> {
    print(&format!("{}\n", serde_json::to_string_pretty(value)?))
}
