//! What each command does. A command returns an error for `main` to print; it never exits by itself.

pub mod bench;
pub mod config;
pub mod replay;

use anyhow::Result;
use std::io::Write;

/// Prints a page. A reader that has seen enough (`halo … | head`) is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// Prints JSON, and a line break behind it.
fn print_json(value: &serde_json::Value) -> Result<()> {
    print(&format!("{}\n", serde_json::to_string_pretty(value)?))
}
