//! `halo-bench simulate`: runs seeds of the simulator.

use anyhow::{Result, bail};
use halo_bench::simulator::{SimulatedCounts, run_seed};
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use parking_lot::Mutex;
use serde_json::json;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct SimulateOptions {
    /// How many seeds to run
    #[arg(long, value_name = "N", default_value = "1000", value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Run seeds for so many minutes instead
    #[arg(long, value_name = "N", conflicts_with = "seeds", value_parser = clap::value_parser!(u64).range(1..))]
    minutes: Option<u64>,
    /// The seed to start with
    #[arg(long, value_name = "SEED", default_value = "0")]
    first: u64,
    /// Steps to simulate for each seed
    #[arg(long, value_name = "N", default_value = "30")]
    steps: u64,
}

pub fn run(options: &SimulateOptions, as_json: bool) -> Result<()> {
    let (started, bar) = (Instant::now(), Progress::new("simulating", options.seeds));
    let time_limit = options.minutes.map(|minutes| Duration::from_secs(60 * minutes));
    let is_next = |n: u64| time_limit.map_or(n < options.seeds, |limit| started.elapsed() < limit);
    let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let results = Mutex::new((SimulatedCounts::default(), Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(n) = Some(next.fetch_add(1, Ordering::SeqCst)).filter(|n| is_next(*n)) {
                    let result = run_seed(options.first + n, options.steps, None);
                    let mut results = results.lock();
                    match result {
                        Ok(counts) => results.0.add(&counts),
                        Err(violation) => results.1.push(violation),
                    }
                    let ran = done.fetch_add(1, Ordering::SeqCst) + 1;
                    bar.set_progress(ran, options.seeds.max(ran));
                }
            });
        }
    });
    drop(bar);
    let (seeds, (counts, violations)) = (done.into_inner(), results.into_inner());
    let failed: Vec<u64> = violations.iter().map(|violation| violation.seed).collect();
    if as_json {
        print_json(&json!({
            "seeds": seeds,
            "seconds": started.elapsed().as_secs_f64(),
            "steps": counts.steps,
            "messages": counts.messages,
            "tokens": counts.tokens,
            "store_faults": counts.store_faults,
            "crashes": counts.crashes,
            "power_cuts": counts.power_cuts,
            "stale_writes": counts.stale_writes,
            "duplicates": counts.duplicates,
            "sqlite_seeds": counts.sqlite_seeds,
            "undone": counts.undone,
            "searches": counts.searches,
            "idle_work": counts.idle_work,
            "failed_seeds": failed,
        }))?;
    } else {
        print_stdout(&format!("{seeds} seeds in {:.0} s\n{counts:#?}\n", started.elapsed().as_secs_f64()))?;
        for violation in violations.iter().take(3) {
            print_stdout(&violation.to_string())?;
        }
    }
    if !failed.is_empty() {
        bail!("{} seeds failed; the first is {}", failed.len(), failed.iter().min().unwrap_or(&0));
    }
    Ok(())
}
