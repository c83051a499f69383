//! Writing to the terminal: text, JSON, notices, and formats that several commands share.

use anyhow::Result;
use halo_engine::window_size;
use std::io::Write;

/// Standard output was closed by its reader (`halo … | head`): the command ends, and that is no failure.
#[derive(Debug)]
pub struct StdoutClosed;

impl std::fmt::Display for StdoutClosed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for StdoutClosed {}

pub fn print_stdout(text: &str) -> Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(StdoutClosed.into()),
        other => Ok(other?),
    }
}

pub fn print_json(value: &serde_json::Value) -> Result<()> {
    print_stdout(&format!("{}\n", serde_json::to_string_pretty(value)?))
}

/// Prints a line to standard error. A failed write is ignored: there is nowhere else to report it.
pub fn print_notice(text: &str) {
    let _ = writeln!(std::io::stderr(), "halo: {}", sanitize_terminal_text(text));
}

/// The text without control characters and marks that change the writing direction: text of a model or a file must not
/// control the terminal. Line breaks stay.
pub fn sanitize_terminal_text(text: &str) -> String {
    // Joiners stay: scripts and emoji need them.
    let direction_mark = |c: char| matches!(c, '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
    let safe = |c: char| if c == '\n' || !(c.is_control() || direction_mark(c)) { c } else { ' ' };
    text.chars().map(safe).collect()
}

/// `1 step`, `2 steps`.
pub fn pluralize(n: u64, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// A number with separators, such as `1,412`.
pub fn group_digits(n: usize) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().filter_map(|group| str::from_utf8(group).ok()).collect();
    groups.join(",")
}

/// The size of an automatic context window, and why it is that.
pub fn explain_window(tokens: usize, tokens_per_second: Option<f64>) -> String {
    let [window, min, max] = [tokens, window_size::MIN_TOKENS, window_size::MAX_TOKENS].map(group_digits);
    match tokens_per_second {
        None => format!("{window} tokens (auto, until the speed of the model is measured)"),
        Some(speed) => format!(
            "{window} tokens (auto: {speed:.0} tokens/s prefill them in {:.0} s; at most {:.0} s, {min} to {max} tokens)",
            tokens as f64 / speed,
            window_size::MAX_PREFILL_SECONDS
        ),
    }
}

/// The beginning of a text, on one line.
pub fn truncate_line(text: &str, max_chars: usize) -> String {
    let line = sanitize_terminal_text(text).split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(max_chars) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// A time in milliseconds since 1970, in the time zone of the system.
pub fn format_time(at: i64) -> String {
    match jiff::Timestamp::from_millisecond(at) {
        Ok(time) => time.to_zoned(jiff::tz::TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S %Z").to_string(),
        Err(_) => "at an unknown time".into(),
    }
}

/// The day of a time in milliseconds since 1970, such as `5 November 2026`.
pub fn format_day(at: i64) -> String {
    jiff::Timestamp::from_millisecond(at).map(|at| at.strftime("%-d %B %Y").to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn automatic_window_is_explained_with_its_speed() {
        assert_eq!(
            explain_window(2048, None),
            "2,048 tokens (auto, until the speed of the model is measured)"
        );
        assert_eq!(
            explain_window(4096, Some(160.0)),
            "4,096 tokens (auto: 160 tokens/s prefill them in 26 s; at most 30 s, 2,048 to 8,192 tokens)"
        );
        assert_eq!([0, 999, 1000, 1_234_567].map(group_digits), ["0", "999", "1,000", "1,234,567"]);
    }
}
