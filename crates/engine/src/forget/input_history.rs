//! The lines that were typed in the terminal.

use super::private_file::{file_error, replace_file};
use halo_core::Error;
use std::io::ErrorKind;
use std::path::Path;

/// Removes the lines that match, if there is such a file. Returns how many.
pub(super) fn scrub_lines(history: &Path, matches: impl Fn(&str) -> bool) -> Result<usize, Error> {
    let content = match std::fs::read(history) {
        Ok(content) => content,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(file_error("reading", history, error)),
    };
    let is_kept = |line: &&[u8]| !matches(&unescape_line(&String::from_utf8_lossy(line)));
    let lines: Vec<&[u8]> = content.split_inclusive(|&byte| byte == b'\n').collect();
    let rest: Vec<&[u8]> = lines.iter().copied().filter(is_kept).collect();
    if rest.len() < lines.len() {
        replace_file(history, &rest.concat())?;
    }
    Ok(lines.len() - rest.len())
}

/// The line editor writes an entry of several lines in one, with `\n` for the end of a line and `\\` for a backslash.
fn unescape_line(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('n') => text.push('\n'),
                Some('\\') => text.push('\\'),
                other => {
                    text.push('\\');
                    text.extend(other);
                }
            },
            c => text.push(c),
        }
    }
    text
}
