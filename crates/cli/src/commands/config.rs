//! `halo config` and `halo config reference`.

use crate::env::Env;
use crate::output::{print_json, print_stdout, sanitize_terminal_text};
use crate::settings::{KEYS, SettingKey, Settings, reference};
use anyhow::Result;
use serde_json::json;
use std::fmt::Write;
use std::path::PathBuf;

/// Prints the effective settings with their sources.
pub fn print_settings(env: &Env) -> Result<()> {
    let loaded = env.load_settings()?;
    let path = |path: Option<PathBuf>| path.map_or_else(|| "none".into(), |p| p.display().to_string());
    let (data, file) = (path(env.data_dir()), path(env.settings_path()));
    if env.json {
        let row = |key: &SettingKey| {
            let (_, value) = loaded.settings.get(key.name)?;
            let mut row = json!({"value": value, "origin": loaded.origin(key.name).to_string()});
            // A quarter of an automatic window depends on the model.
            if key.name == "context.recent_tokens" && !loaded.settings.auto_sizes().window {
                row["resolved"] = loaded.settings.recent_window_tokens().into();
            }
            Some((key.name.to_owned(), row))
        };
        let settings: serde_json::Map<_, _> = KEYS.iter().filter_map(row).collect();
        return print_json(&json!({"data": data, "file": file, "settings": settings}));
    }
    let there = env.settings_path().is_some_and(|f| f.exists());
    let mut out =
        format!("data folder    {data}\nsettings file  {file}{}\n\n", if there { "" } else { " (missing)" });
    for key in KEYS {
        let Some((mut text, _)) = loaded.settings.get(key.name) else { continue };
        let auto = match key.name {
            "context.recent_tokens" => Some(loaded.settings.recent_window_tokens()),
            "context.room_tokens" => Some(loaded.settings.reserved_tokens()),
            _ => None,
        };
        let is_known = !loaded.settings.auto_sizes().window;
        if let Some(tokens) = auto.filter(|_| text == "auto" && is_known) {
            let _ = write!(text, " ({tokens})");
        }
        let _ = writeln!(out, "{:<30} {text:<14} {}", key.name, loaded.origin(key.name));
    }
    print_stdout(&sanitize_terminal_text(&out))
}

pub fn print_reference(as_json: bool) -> Result<()> {
    if !as_json {
        return print_stdout(&reference::reference_markdown());
    }
    let defaults = Settings::default();
    let row = |key: &SettingKey| {
        json!({
            "key": key.name,
            "default": defaults.get(key.name).map(|(_, value)| value),
            "allowed": (key.allowed)(),
            "about": key.doc.split_whitespace().collect::<Vec<_>>().join(" "),
        })
    };
    print_json(&KEYS.iter().map(row).collect())
}
