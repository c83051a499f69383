//! `halo config`: the settings in force; `halo config reference`: all there are.

use super::{print, print_json};
use crate::settings::load::Loaded;
use crate::settings::{KEYS, ReadBy, Settings, reference};
use anyhow::Result;
use serde_json::json;
use std::fmt::Write;

/// Prints the settings in force and where each came from.
pub fn show(loaded: &Loaded, as_json: bool) -> Result<()> {
    let rows = KEYS.iter().filter_map(|key| {
        let (text, value) = loaded.settings.get(key.name)?;
        Some((key.name, text, value, loaded.origin(key.name).to_string()))
    });
    if as_json {
        let all =
            rows.map(|(key, _, value, origin)| (key.to_owned(), json!({"value": value, "origin": origin})));
        return print_json(&serde_json::Value::Object(all.collect()));
    }
    let mut out = String::new();
    for (key, mut text, _, origin) in rows {
        if key == "context.recent_tokens" && text == "auto" {
            let _ = write!(text, " ({})", loaded.settings.recent());
        }
        let _ = writeln!(out, "{key:<30} {text:<14} {origin}");
    }
    print(&out)
}

/// Prints all settings with type, default and range.
pub fn reference(as_json: bool) -> Result<()> {
    if !as_json {
        return print(&reference::page());
    }
    let defaults = Settings::default();
    let row = |key: &crate::settings::Key| {
        json!({
            "key": key.name,
            "default": defaults.get(key.name).map(|(_, value)| value),
            "allowed": (key.allowed)(),
            "about": key.doc.split_whitespace().collect::<Vec<_>>().join(" "),
            "read": key.read_by == ReadBy::Now,
        })
    };
    print_json(&KEYS.iter().map(row).collect())
}
