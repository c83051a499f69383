//! `halo-bench align`: matching a client's message history to its conversation.

use anyhow::{Context, Result, ensure};
use halo_bench::align;
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use halo_store::database::{Database, StoreLocation};
use serde_json::json;
use std::fmt::Write;

#[derive(clap::Args)]
pub struct AlignBenchOptions {
    /// Number of conversations in the store
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    conversations: usize,
    /// Number of requests of each kind
    #[arg(long, value_name = "N", default_value_t = 1000)]
    requests: usize,
}

pub fn run(options: &AlignBenchOptions, as_json: bool) -> Result<()> {
    ensure!(
        options.conversations > 0 && options.requests > 0,
        "--conversations and --requests must be at least 1"
    );
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut store = Database::open(&StoreLocation::Sqlite(folder.path().join("halo.db")))?;
    let bar = Progress::new("filling the store", options.conversations as u64);
    align::fill_store(&mut store, options.conversations, &mut |n| bar.set_position(n as u64))?;
    drop(bar);
    let report = align::run(&mut store, options.conversations, options.requests)?;
    if as_json {
        let row = |f: &align::AlignBenchFigure| {
            json!({ "name": f.name, "p50_ms": f.p50_ms, "p99_ms": f.p99_ms, "right": f.correct,
                    "ratio": report.read_records_ms / f.p50_ms })
        };
        let figures: Vec<_> = report.figures.iter().map(row).collect();
        return print_json(&json!({ "conversations": options.conversations, "figures": figures,
                                   "records_ms": report.read_records_ms }));
    }
    let mut out = format!("{:<48}{:>9}{:>9}{:>10}{:>7}\n", "request", "p50 ms", "p99 ms", "ratio", "correct");
    for f in &report.figures {
        let (ratio, right) = (report.read_records_ms / f.p50_ms, if f.correct { "yes" } else { "NO" });
        let _ = writeln!(out, "{:<48}{:>9.3}{:>9.3}{ratio:>10.0}{right:>7}", f.name, f.p50_ms, f.p99_ms);
    }
    let _ = writeln!(
        out,
        "\namong {} conversations; ratio: to reading one record of each, {:.0} ms in this run.",
        options.conversations, report.read_records_ms
    );
    print_stdout(&out)
}
