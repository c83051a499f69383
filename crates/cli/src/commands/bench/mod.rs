//! `halo bench`: the figures that Halo claims, measured here and now.

pub mod align;
pub mod embed;
pub mod hud;
pub mod keep;
pub mod memory;
pub mod model;
pub mod recall;
pub mod rooms;
pub mod search;
pub mod server;
pub mod turn;

use super::progress::Progress;
use super::{print, print_json};
use anyhow::{Context, Result};
use halo_bench::core::Figure;
use halo_bench::crash;
use halo_bench::store::{self, Report};
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How long to measure.
#[derive(clap::Args)]
pub struct Options {
    /// The least time that each figure is measured for, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    time: Duration,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "write a number of seconds, such as 1 or 0.2".to_owned())?;
    if !(0.0..=3600.0).contains(&seconds) {
        return Err("write a number of seconds from 0 to 3600".into());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Measures the core.
pub fn core(options: &Options, as_json: bool) -> Result<()> {
    let figures = halo_bench::core::run(options.time);
    if as_json {
        return print_json(&json!({ "figures": figures.iter().map(row).collect::<Vec<_>>() }));
    }
    let mut out = format!(
        "{:<84}{:>10}  {:<6}{:>10}{:>9}{:>8}\n",
        "figure", "measured", "unit", "baseline", "ratio", "budget"
    );
    let number = |n: Option<f64>| {
        n.map_or_else(|| "–".into(), |n| if n < 10.0 { format!("{n:.3}") } else { format!("{n:.1}") })
    };
    for figure in &figures {
        let _ = writeln!(
            out,
            "{:<84}{:>10}  {:<6}{:>10}{:>9}{:>8}{}",
            figure.name,
            number(Some(figure.value)),
            figure.unit,
            number(figure.baseline),
            number(figure.speedup()),
            number(figure.budget),
            if figure.within() { "" } else { "  OVER" },
        );
    }
    out.push_str("\nratio = baseline ÷ measured, both of this run: larger is better.\n");
    print(&out)
}

fn row(figure: &Figure) -> serde_json::Value {
    json!({
        "name": figure.name,
        "unit": figure.unit,
        "value": figure.value,
        "baseline": figure.baseline,
        "ratio": figure.speedup(),
        "budget": figure.budget,
        "within_budget": figure.budget.map(|_| figure.within()),
    })
}

/// How often to crash.
#[derive(clap::Args)]
pub struct CrashOptions {
    /// How many processes to kill
    #[arg(long, value_name = "N", default_value_t = 1000)]
    kills: u64,
    /// How many disks to cut the power of [default: as many as are killed]
    #[arg(long, value_name = "N")]
    power_cuts: Option<u64>,
    /// Changes in the life on a disk that fills up
    #[arg(long, value_name = "N", default_value_t = 24)]
    full_changes: u64,
    /// The process that is killed: a life on this file
    #[arg(long, value_name = "FILE", hide = true)]
    child: Option<PathBuf>,
    /// Whose life it is
    #[arg(long, value_name = "N", default_value_t = 1)]
    life: u64,
}

/// Kills processes, cuts power and fills disks, and counts what was lost.
pub fn crash(options: &CrashOptions, as_json: bool) -> Result<()> {
    if let Some(path) = &options.child {
        return Ok(crash::child(path, options.life)?);
    }
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let halo = std::env::current_exe().context("cannot find this program")?;
    let start = |path: &Path, life: u64| {
        let mut command = Command::new(&halo);
        command.args(["bench", "crash", "--life", &life.to_string(), "--child"]).arg(path);
        command
    };
    let mut report = crash::Report::default();
    let bar = Progress::new("killing", options.kills);
    let done =
        crash::kill(options.kills, folder.path(), options.life, &start, &mut |n| bar.at(n), &mut report);
    done.context("cannot start a process to kill")?;
    let lives = options.power_cuts.unwrap_or(options.kills).div_ceil(3);
    let bar = Progress::new("cutting power", lives);
    crash::cut_power(lives, options.life, &mut |n| bar.at(n), &mut report);
    let bar = Progress::new("filling disks", 0);
    crash::fill_disk(options.full_changes, options.life, &mut |n| bar.at(n), &mut report);
    drop(bar);
    if as_json {
        print_json(&json!({
            "kills": report.kills,
            "acknowledged": report.acknowledged,
            "lost": report.lost,
            "hash_mismatches": report.hash_mismatches,
            "open_ms_p99": report.open_ms_p99,
            "power_cuts": report.power_cuts,
            "power_lost": report.power_lost,
            "power_mismatches": report.power_mismatches,
            "full_disks": report.full_disks,
            "full_faults": report.full_faults,
        }))?;
    } else {
        print(&format!(
            "killed           {:>8} processes, {} changes acknowledged: {} lost, {} states differ\n\
             opened again     {:>8.1} ms at most, in 99 of 100 cases\n\
             power cut        {:>8} times: {} safe changes lost, {} states differ\n\
             disk full        {:>8} times: {} faults\n",
            report.kills,
            report.acknowledged,
            report.lost,
            report.hash_mismatches,
            report.open_ms_p99,
            report.power_cuts,
            report.power_lost,
            report.power_mismatches,
            report.full_disks,
            report.full_faults,
        ))?;
    }
    anyhow::ensure!(report.clean(), "something was lost: the figures above say what");
    Ok(())
}

/// How large a conversation to keep.
#[derive(clap::Args)]
pub struct StoreOptions {
    /// Tokens ever spoken; several sizes are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1000000")]
    tokens: Vec<usize>,
    /// Tokens in the window
    #[arg(long, value_name = "N", default_value_t = 30_000)]
    live: usize,
    /// The least time that each figure is measured for, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    time: Duration,
    /// Measures the store in this file and nothing else: so memory is that of one process
    #[arg(long, value_name = "FILE", hide = true)]
    file: Option<PathBuf>,
}

/// Measures the store.
pub fn store(options: &StoreOptions, as_json: bool) -> Result<()> {
    if let Some(path) = &options.file {
        return print_json(&store_json(&store::measure(path, options.time)?));
    }
    let halo = std::env::current_exe().context("cannot find this program")?;
    let mut reports = Vec::new();
    for &tokens in &options.tokens {
        anyhow::ensure!(tokens >= 64 * 64, "--tokens {tokens}: measure at least 4096 tokens");
        anyhow::ensure!(
            (64..=tokens).contains(&options.live),
            "--live: a window of 64 tokens up to all of them"
        );
        let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
        let path = folder.path().join("halo.db");
        let bar = Progress::new("filling the store", tokens as u64);
        store::build(&path, tokens, options.live, &mut |n| bar.at(n))?;
        drop(bar);
        let bar = Progress::new("measuring", 0);
        let mut measuring = Command::new(&halo);
        measuring
            .args(["bench", "store", "--time", &options.time.as_secs_f64().to_string(), "--file"])
            .arg(&path);
        let measured = measuring.output().context("cannot start a process to measure")?;
        drop(bar);
        anyhow::ensure!(measured.status.success(), "{}", String::from_utf8_lossy(&measured.stderr));
        reports.push(serde_json::from_slice::<serde_json::Value>(&measured.stdout)?);
    }
    if as_json {
        let one = reports.len() == 1;
        return print_json(&if one { reports.remove(0) } else { json!(reports) });
    }
    let mut out = format!("{:<46}", "");
    for report in &reports {
        let _ = write!(out, "{:>17}", format!("{} tokens", report["tokens"]));
    }
    let _ = writeln!(out, "{:>10}{:>14}{:>20}", "budget", "row a token", "the documents");
    for (name, key, budget, rows, documents) in STORE_FIGURES {
        let _ = write!(out, "{name:<46}");
        let number = |v: &serde_json::Value| v.as_f64().map_or_else(|| "–".into(), |n| format!("{n:.3}"));
        for report in &reports {
            let _ = write!(out, "{:>17}", number(&report[key]));
        }
        let naive = if rows.is_empty() { "–".into() } else { number(&reports[0]["rows"][rows]) };
        let _ = writeln!(out, "{budget:>10}{naive:>14}{documents:>20}");
    }
    for report in &reports {
        let _ = writeln!(out, "{} tokens: {} bytes on disk", report["tokens"], report["bytes"]);
    }
    out.push_str("\nOne call in ten is faster. Writes are without the sync, but for those that say so.\n");
    print(&out)
}

/// Name, key, budget, key of the baseline, and what the founding documents claim at a million tokens.
const STORE_FIGURES: [(&str, &str, &str, &str, &str); 11] = [
    ("open the file and the conversation, ms", "open_ms", "100", "", "–"),
    ("live context (ids, slots, text), ms", "live_ms", "1", "live_ms", "10–50 ms"),
    ("append 16 tokens, ms", "append_ms", "–", "", "–"),
    ("prune a chunk, ms", "prune_ms", "0.1", "prune_ms", "20 ms"),
    ("return it, read from the store, ms", "resurrect_ms", "0.1", "prune_ms", "30 ms"),
    ("save the brightness of all that is live, ms", "brightness_ms", "5", "brightness_ms", "–"),
    ("one sync of this disk, ms", "sync_ms", "–", "", "–"),
    ("prune a chunk, synced, ms", "durable_prune_ms", "–", "", "20 ms"),
    ("save all brightness, synced, ms", "durable_brightness_ms", "–", "", "–"),
    ("bytes a token on disk", "bytes_per_token", "–", "", "–"),
    ("peak memory of the process, MiB", "memory_mib", "300", "", "–"),
];

fn store_json(report: &Report) -> serde_json::Value {
    json!({
        "tokens": report.tokens,
        "live": report.live,
        "open_ms": report.open_ms,
        "live_ms": report.live_ms,
        "append_ms": report.append_ms,
        "prune_ms": report.prune_ms,
        "resurrect_ms": report.resurrect_ms,
        "brightness_ms": report.brightness_ms,
        "sync_ms": report.sync_ms,
        "durable_prune_ms": report.durable_prune_ms,
        "durable_brightness_ms": report.durable_brightness_ms,
        "bytes": report.bytes,
        "bytes_per_token": report.bytes as f64 / report.tokens as f64,
        "memory_mib": report.memory_mib,
        "rows": {
            "tokens": report.rows.tokens,
            "live_ms": report.rows.live_ms,
            "prune_ms": report.rows.prune_ms,
            "brightness_ms": report.rows.brightness_ms,
        },
    })
}
