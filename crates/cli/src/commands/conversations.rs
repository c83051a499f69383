//! `halo conversations` and `halo rename`, and opening the conversation that a command names.

use crate::env::Env;
use crate::error::not_found;
use crate::output::{format_time, print_json, print_stdout, sanitize_terminal_text, truncate_line};
use crate::settings::load::closest_match;
use anyhow::Result;
use halo_core::store::{Access, Store};
use halo_core::timeline::Timeline;
use halo_store::database::Database;
use serde_json::json;
use std::fmt::Write;

/// The conversation that is used when none is named.
pub const DEFAULT_CONVERSATION: &str = "main";

#[derive(clap::Args)]
pub struct ConversationArgs {
    /// Name of the conversation
    #[arg(short = 'c', long = "conversation", value_name = "NAME", default_value = DEFAULT_CONVERSATION, global = true)]
    pub name: String,
}

#[derive(clap::Args)]
pub struct RenameArgs {
    /// Current name of the conversation
    #[arg(value_name = "NAME")]
    from: String,
    /// New name of the conversation
    #[arg(value_name = "NEW NAME")]
    to: String,
}

pub fn rename(options: &RenameArgs, env: &Env) -> Result<()> {
    let (mut store, _) = open_existing(env, &options.from, Access::Write)?;
    store.rename(&options.from, &options.to)?;
    if env.json {
        return print_json(&json!({ "from": options.from, "to": options.to }));
    }
    print_stdout(&format!(
        "'{}' was renamed to '{}'\n",
        sanitize_terminal_text(&options.from),
        sanitize_terminal_text(&options.to)
    ))
}

pub fn list_conversations(env: &Env) -> Result<()> {
    let all = match env.open_store_read_only()? {
        Some(mut store) => store.list_conversations()?,
        None => Vec::new(),
    };
    if env.json {
        let list = all.iter().map(|s| {
            json!({
                "id": s.id,
                "name": s.name,
                "model": s.model,
                "turns": s.turns,
                "tokens": s.tokens,
                "live": s.live,
                "changes": s.changes,
                "created": s.created,
                "used": s.updated,
            })
        });
        return print_json(&list.collect());
    }
    if all.is_empty() {
        return print_stdout(
            "no conversations yet: `halo chat` starts one, `halo import FILE` imports one\n",
        );
    }
    let width = all.iter().map(|s| truncate_line(&s.name, 40).chars().count() + 2).max().unwrap_or(0).max(14);
    let mut out = format!(
        "{:<width$}{:>7}{:>10}{:>10}  {:<24} model\n",
        "conversation", "turns", "live", "tokens", "last used"
    );
    for s in &all {
        let model = if s.model.is_empty() { "none yet".into() } else { truncate_line(&s.model, 40) };
        let name = truncate_line(&s.name, 40);
        let _ = writeln!(
            out,
            "{name:<width$}{:>7}{:>10}{:>10}  {:<24} {model}",
            s.turns,
            s.live,
            s.tokens,
            format_time(s.updated)
        );
    }
    print_stdout(&out)
}

/// Opens a conversation that must exist, and its store.
pub fn open_existing(env: &Env, name: &str, access: Access) -> Result<(Database, Timeline)> {
    let store = match access {
        Access::Read => env.open_store_read_only()?,
        Access::Write if env.open_store_read_only()?.is_none() => None,
        Access::Write => Some(env.open_store()?),
    };
    let mut names = Vec::new();
    if let Some(mut store) = store {
        names.extend(store.list_conversations()?.into_iter().map(|s| s.name));
        if names.iter().any(|existing| existing == name) {
            let timeline = store.load(name, access)?;
            return Ok((store, timeline));
        }
    }
    let name = sanitize_terminal_text(name);
    let advice = match (closest_match(&name, names.iter().map(String::as_str)), names.as_slice()) {
        (_, []) => ", and no other yet: `halo chat` starts one".to_owned(),
        (Some(closest), _) => format!(": did you mean -c '{}'?", sanitize_terminal_text(closest)),
        (None, [only]) => format!(": the only one is '{}' (-c NAME)", sanitize_terminal_text(only)),
        (None, _) => ": name one with -c NAME".to_owned(),
    };
    Err(not_found(format!("there is no conversation '{name}'{advice}")))
}
