//! The simulator finds nothing in the engine, and every bug that is planted in its doubles.

use halo_bench::simulator::{PlantedBug, SimulatedCounts, run_seed, run_seed_with_trace};
use std::time::{Duration, Instant};

/// Steps of one seed.
const STEPS: u64 = 30;

/// How long the simulator runs; `HALO_SIMULATOR_SECONDS` sets another time.
fn time_limit() -> Duration {
    let seconds = std::env::var("HALO_SIMULATOR_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(60))
}

#[test]
fn simulator_finds_no_violation() {
    let first: u64 =
        std::env::var("HALO_SIMULATOR_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let (started, mut counts, mut seeds) = (Instant::now(), SimulatedCounts::default(), 0);
    while started.elapsed() < time_limit() {
        match run_seed(first + seeds, STEPS, None) {
            Ok(seed) => counts.add(&seed),
            Err(violation) => panic!("{violation}\nrun it again with HALO_SIMULATOR_SEED={}", violation.seed),
        }
        seeds += 1;
    }
    println!("{seeds} seeds: {counts:?}");
    assert!(seeds >= 20, "{seeds} seeds");
    let SimulatedCounts {
        messages,
        tokens,
        store_faults,
        crashes,
        power_cuts,
        stale_writes,
        duplicates,
        sqlite_seeds,
        undone,
        searches,
        idle_work,
        ..
    } = counts;
    let happened = [
        messages,
        tokens,
        store_faults,
        crashes,
        power_cuts,
        stale_writes,
        duplicates,
        sqlite_seeds,
        undone,
        searches,
        idle_work,
    ];
    assert!(happened.iter().all(|count| *count > 0), "{counts:?}");
}

/// The same seed does the same again, to the last step.
#[test]
fn simulator_repeats_a_seed() {
    for seed in 0..10 {
        let (result, trace) = run_seed_with_trace(seed, STEPS, None);
        let (again, trace_again) = run_seed_with_trace(seed, STEPS, None);
        assert_eq!((result, trace), (again, trace_again), "seed {seed}");
    }
}

#[test]
fn simulator_finds_planted_bugs() {
    for bug in [
        PlantedBug::SkipSync,
        PlantedBug::IgnoreEpoch,
        PlantedBug::AckBeforeCommit,
        PlantedBug::RecordsAfterCommit,
        PlantedBug::AnnounceBeforeCommit,
    ] {
        let found = (0..2000).find_map(|seed| run_seed(seed, STEPS, Some(bug)).err());
        let violation = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
        assert_eq!(
            run_seed(violation.seed, STEPS, Some(bug)),
            Err(violation.clone()),
            "{bug:?} is found again"
        );
        println!("{bug:?}: {violation}");
    }
}
