//! `halo stats`: statistics per turn of a conversation.

use super::conversations::{ConversationArgs, open_existing};
use crate::env::Env;
use crate::output::{print_json, print_stdout};
use anyhow::Result;
use halo_core::store::{Access, RecordKind, Store};
use serde_json::{Value, json};
use std::fmt::Write;

#[derive(clap::Args)]
pub struct StatsArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Number of latest turns to print; 0: all
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20)]
    limit: usize,
}

pub fn run(options: &StatsArgs, env: &Env) -> Result<()> {
    let (mut store, _) = open_existing(env, &options.conversation.name, Access::Read)?;
    let mut turns: Vec<(u64, Value)> = Vec::new();
    for record in store.records(&options.conversation.name, RecordKind::Turn)? {
        // A record that cannot be parsed is skipped: other turns are still printed.
        if let (Ok(turn), Ok(Value::Object(mut turn_stats))) =
            (record.key.parse(), serde_json::from_str(&record.value))
        {
            turn_stats.insert("turn".into(), json!(turn));
            turn_stats.insert("at".into(), json!(record.updated_at));
            turns.push((turn, Value::Object(turn_stats)));
        }
    }
    turns.sort_by_key(|(turn, _)| *turn);
    let skipped = if options.limit == 0 { 0 } else { turns.len().saturating_sub(options.limit) };
    let printed: Vec<&Value> = turns[skipped..].iter().map(|(_, turn_stats)| turn_stats).collect();
    if env.json {
        return print_json(&json!(printed));
    }
    if turns.is_empty() {
        return print_stdout("no turn has been answered yet: `halo chat` starts a conversation\n");
    }
    let mut out = format!(
        "{:>6}  {:<12}{:>7}{:>7}{:>9}{:>6}{:>10}{:>9}{:>10}{:>9}{:>9}\n",
        "turn",
        "ended",
        "tokens",
        "window",
        "returned",
        "left",
        "first ms",
        "tok/s",
        "total ms",
        "own ms",
        "own %"
    );
    for turn_stats in printed {
        let ms = |stage: &str| turn_stats["ms"][stage].as_f64().unwrap_or(0.0);
        let all: f64 =
            turn_stats["ms"].as_object().map_or(0.0, |ms| ms.values().filter_map(Value::as_f64).sum());
        let own = all - ms("read") - ms("speak") - ms("preview");
        let number = |key: &str| turn_stats[key].as_u64().map_or_else(|| "–".into(), |n| n.to_string());
        let spoke = ms("speak") + ms("attend");
        let pace =
            turn_stats["tokens"].as_f64().filter(|_| spoke > 0.0).map_or(0.0, |tokens| tokens * 1e3 / spoke);
        let _ = writeln!(
            out,
            "{:>6}  {:<12}{:>7}{:>7}{:>9}{:>6}{:>10.0}{pace:>9.1}{all:>10.0}{own:>9.1}{:>9.1}",
            number("turn"),
            turn_stats["finish"].as_str().unwrap_or("?"),
            number("tokens"),
            number("live"),
            number("returned"),
            number("left"),
            ms("store") + ms("preview") + ms("recall") + ms("read"),
            if all > 0.0 { own / all * 100.0 } else { 0.0 },
        );
    }
    if skipped > 0 {
        let _ = writeln!(out, "\n{skipped} earlier turns: -n 0 prints all");
    }
    out.push_str("\nown: time outside the model (prefill and generation). --json prints every stage and attention statistics.\n");
    print_stdout(&out)
}
