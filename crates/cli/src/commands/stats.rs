//! `halo stats`: how each turn of a conversation went.

use super::show::{Which, existing};
use super::{print, print_json};
use crate::Common;
use anyhow::Result;
use halo_core::seams::{Access, Kind, Store};
use serde_json::{Value, json};
use std::fmt::Write;

/// Which conversation.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
    /// How many of the latest turns to show; 0: all
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20)]
    most: usize,
}

/// Shows them.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let (mut store, _) = existing(common, &options.which.name, Access::Read)?;
    let mut turns: Vec<(u64, Value)> = Vec::new();
    for record in store.records(&options.which.name, Kind::Turn)? {
        // What somebody else has written there must not keep anyone from seeing the rest.
        if let (Ok(turn), Ok(Value::Object(mut told))) =
            (record.key.parse(), serde_json::from_str(&record.value))
        {
            told.insert("turn".into(), json!(turn));
            told.insert("at".into(), json!(record.at));
            turns.push((turn, Value::Object(told)));
        }
    }
    turns.sort_by_key(|(turn, _)| *turn);
    let skipped = if options.most == 0 { 0 } else { turns.len().saturating_sub(options.most) };
    let shown: Vec<&Value> = turns[skipped..].iter().map(|(_, told)| told).collect();
    if common.json {
        return print_json(&json!(shown));
    }
    if turns.is_empty() {
        return print("no turn has been answered yet: `halo chat` begins one\n");
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
    print(&out)
}
