//! The benchmarks, one per subcommand of `halo-bench`.

pub mod align;
pub mod compare;
pub mod embed;
pub mod hud;
pub mod kv_attention;
pub mod memory;
pub mod prune;
pub mod recall;
pub mod rooms;
pub mod search;
pub mod server;
mod server_clients;
pub mod simulate;
pub mod turn;

use anyhow::{Context, Result};
use halo_bench::core::CoreBenchFigure;
use halo_bench::crash;
use halo_bench::store::{self, StoreBenchReport};
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The `halo` program beside this one: some benchmarks start it as a process of its own.
fn halo_program() -> Result<PathBuf> {
    let bench = std::env::current_exe().context("cannot find this program")?;
    let halo = bench.with_file_name(format!("halo{}", std::env::consts::EXE_SUFFIX));
    anyhow::ensure!(
        halo.is_file(),
        "{} is missing: build it with `cargo build --release -p halo`",
        halo.display()
    );
    Ok(halo)
}

#[derive(clap::Args)]
pub struct CoreBenchOptions {
    /// Minimum measuring time of each figure, in seconds
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

pub fn core(options: &CoreBenchOptions, as_json: bool) -> Result<()> {
    let figures = halo_bench::core::run(options.time);
    if as_json {
        return print_json(&json!({ "figures": figures.iter().map(figure_json).collect::<Vec<_>>() }));
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
            if figure.within_budget() { "" } else { "  OVER" },
        );
    }
    out.push_str("\nratio = baseline ÷ measured, both of this run: larger is better.\n");
    print_stdout(&out)
}

fn figure_json(figure: &CoreBenchFigure) -> serde_json::Value {
    json!({
        "name": figure.name,
        "unit": figure.unit,
        "value": figure.value,
        "baseline": figure.baseline,
        "ratio": figure.speedup(),
        "budget": figure.budget,
        "within_budget": figure.budget.map(|_| figure.within_budget()),
    })
}

#[derive(clap::Args)]
pub struct CrashBenchOptions {
    /// Number of processes to kill
    #[arg(long, value_name = "N", default_value_t = 1000)]
    kills: u64,
    /// Number of power cuts [default: as many as kills]
    #[arg(long, value_name = "N")]
    power_cuts: Option<u64>,
    /// Changes in the history on a disk that fills up
    #[arg(long, value_name = "N", default_value_t = 24)]
    full_changes: u64,
    /// Run as the child process, on this file
    #[arg(long, value_name = "FILE", hide = true)]
    child: Option<PathBuf>,
    /// Random seed of the history
    #[arg(long, value_name = "N", default_value_t = 1)]
    history_seed: u64,
}

pub fn crash(options: &CrashBenchOptions, as_json: bool) -> Result<()> {
    if let Some(path) = &options.child {
        return Ok(crash::run_child(path, options.history_seed)?);
    }
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let halo = std::env::current_exe().context("cannot find this program")?;
    let start = |path: &Path, history_seed: u64| {
        let mut command = Command::new(&halo);
        command.args(["crash", "--history-seed", &history_seed.to_string(), "--child"]).arg(path);
        command
    };
    let mut report = crash::CrashBenchReport::default();
    let bar = Progress::new("killing", options.kills);
    let done = crash::kill_children(
        options.kills,
        folder.path(),
        options.history_seed,
        &start,
        &mut |n| bar.set_position(n),
        &mut report,
    );
    done.context("cannot start a process to kill")?;
    let histories = options.power_cuts.unwrap_or(options.kills).div_ceil(3);
    let bar = Progress::new("cutting power", histories);
    crash::cut_power(histories, options.history_seed, &mut |n| bar.set_position(n), &mut report);
    let bar = Progress::new("filling disks", 0);
    crash::fill_disk(options.full_changes, options.history_seed, &mut |n| bar.set_position(n), &mut report);
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
            "full_faults": report.full_disk_errors,
        }))?;
    } else {
        print_stdout(&format!(
            "killed           {:>8} processes, {} changes acknowledged: {} lost, {} states differ\n\
             opened again     {:>8.1} ms (p99)\n\
             power cut        {:>8} times: {} synced changes lost, {} states differ\n\
             disk full        {:>8} times: {} errors\n",
            report.kills,
            report.acknowledged,
            report.lost,
            report.hash_mismatches,
            report.open_ms_p99,
            report.power_cuts,
            report.power_lost,
            report.power_mismatches,
            report.full_disks,
            report.full_disk_errors,
        ))?;
    }
    anyhow::ensure!(report.is_clean(), "data was lost: see the figures above");
    Ok(())
}

#[derive(clap::Args)]
pub struct StoreBenchOptions {
    /// Tokens of the conversation; several sizes are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1000000")]
    tokens: Vec<usize>,
    /// Tokens in the context window
    #[arg(long, value_name = "N", default_value_t = 30_000)]
    live: usize,
    /// Minimum measuring time of each figure, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    time: Duration,
    /// Measure only the store in this file, so that memory is that of one process
    #[arg(long, value_name = "FILE", hide = true)]
    file: Option<PathBuf>,
}

pub fn store(options: &StoreBenchOptions, as_json: bool) -> Result<()> {
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
        let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
        let path = folder.path().join("halo.db");
        let bar = Progress::new("filling the store", tokens as u64);
        store::build_store(&path, tokens, options.live, &mut |n| bar.set_position(n))?;
        drop(bar);
        let bar = Progress::new("measuring", 0);
        let mut measuring = Command::new(&halo);
        measuring.args(["store", "--time", &options.time.as_secs_f64().to_string(), "--file"]).arg(&path);
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
    let _ = writeln!(out, "{:>10}{:>14}{:>20}", "budget", "row per token", "founding docs");
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
    out.push_str("\n10th percentile of calls. Writes exclude the sync, unless noted.\n");
    print_stdout(&out)
}

/// Name, key, budget, key of the baseline, and the claim of the founding documents at a million tokens.
const STORE_FIGURES: [(&str, &str, &str, &str, &str); 11] = [
    ("open the file and the conversation, ms", "open_ms", "100", "", "–"),
    ("live context (ids, slots, text), ms", "live_ms", "1", "live_ms", "10–50 ms"),
    ("append 16 tokens, ms", "append_ms", "–", "", "–"),
    ("prune a chunk, ms", "prune_ms", "0.1", "prune_ms", "20 ms"),
    ("resurrect it, read from the store, ms", "resurrect_ms", "0.1", "prune_ms", "30 ms"),
    ("save the brightness of all live tokens, ms", "brightness_ms", "5", "brightness_ms", "–"),
    ("one sync of this disk, ms", "sync_ms", "–", "", "–"),
    ("prune a chunk, synced, ms", "durable_prune_ms", "–", "", "20 ms"),
    ("save all brightness, synced, ms", "durable_brightness_ms", "–", "", "–"),
    ("bytes per token on disk", "bytes_per_token", "–", "", "–"),
    ("peak memory of the process, MiB", "memory_mib", "300", "", "–"),
];

fn store_json(report: &StoreBenchReport) -> serde_json::Value {
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
            "tokens": report.token_rows.tokens,
            "live_ms": report.token_rows.live_ms,
            "scan_ms": report.token_rows.scan_ms,
            "prune_ms": report.token_rows.prune_ms,
            "brightness_ms": report.token_rows.brightness_ms,
        },
    })
}
