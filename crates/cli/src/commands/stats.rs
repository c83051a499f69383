//! `halo stats`: how each turn of a conversation went.

use super::conversations::{ConversationArgs, open_existing};
use crate::env::Env;
use crate::output::{print_json, print_stdout};
use anyhow::Result;
use halo_core::store::{Access, RecordKind, Store};
use serde_json::{Value, json};
use std::fmt::Write;

/// Which conversation.
#[derive(clap::Args)]
pub struct StatsArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Number of latest turns to print; 0: all
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20)]
    limit: usize,
}

/// Shows them.
pub fn run(options: &StatsArgs, env: &Env) -> Result<()> {
    let (mut store, _) = open_existing(env, &options.conversation.name, Access::Read)?;
    let mut turns: Vec<(u64, Value)> = Vec::new();
    for record in store.records(&options.conversation.name, RecordKind::Turn)? {
        // What somebody else has written there must not keep anyone from seeing the rest.
        if let (Ok(turn), Ok(Value::Object(mut told))) =
            (record.key.parse(), serde_json::from_str(&record.value))
        {
            told.insert("turn".into(), json!(turn));
            told.insert("at".into(), json!(record.updated_at));
            turns.push((turn, Value::Object(told)));
        }
    }
    turns.sort_by_key(|(turn, _)| *turn);
    let skipped = if options.limit == 0 { 0 } else { turns.len().saturating_sub(options.limit) };
    let shown: Vec<&Value> = turns[skipped..].iter().map(|(_, told)| told).collect();
    if env.json {
        return print_json(&json!(shown));
    }
    if turns.is_empty() {
        return print_stdout("no turn has been answered yet: `halo chat` begins one\n");
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
    for told in shown {
        let ms = |stage: &str| told["ms"][stage].as_f64().unwrap_or(0.0);
        let all: f64 = told["ms"].as_object().map_or(0.0, |ms| ms.values().filter_map(Value::as_f64).sum());
        let own = all - ms("read") - ms("speak") - ms("preview");
        let number = |key: &str| told[key].as_u64().map_or_else(|| "–".into(), |n| n.to_string());
        let spoke = ms("speak") + ms("attend");
        let pace = told["tokens"].as_f64().filter(|_| spoke > 0.0).map_or(0.0, |tokens| tokens * 1e3 / spoke);
        let _ = writeln!(
            out,
            "{:>6}  {:<12}{:>7}{:>7}{:>9}{:>6}{:>10.0}{pace:>9.1}{all:>10.0}{own:>9.1}{:>9.1}",
            number("turn"),
            told["finish"].as_str().unwrap_or("?"),
            number("tokens"),
            number("live"),
            number("returned"),
            number("left"),
            ms("store") + ms("preview") + ms("recall") + ms("read"),
            if all > 0.0 { own / all * 100.0 } else { 0.0 },
        );
    }
    if skipped > 0 {
        let _ = writeln!(out, "\n{skipped} earlier turns are not shown: -n 0 shows all");
    }
    out.push_str("\nown: all that is not the model's reading and speaking. --json tells every part, and the shape of the attention.\n");
    print_stdout(&out)
}
