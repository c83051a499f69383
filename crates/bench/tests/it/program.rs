//! Runs the real `halo-bench` binary.

use crate::alone::run_alone;
use serde_json::Value;
use std::process::{Command, Output};

fn run_bench(args: &[&str]) -> Output {
    let data = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_halo-bench"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("HALO_")) {
        command.env_remove(name);
    }
    command.args(args).arg("--data").arg(data.path()).output().expect("the binary starts")
}

fn run_json(args: &[&str]) -> Value {
    let output = run_bench(&[args, &["--json"]].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("stdout is JSON only")
}

#[test]
fn crash_bench_loses_nothing() {
    let _alone = run_alone();
    let report = run_json(&["crash", "--kills", "40", "--power-cuts", "30", "--full-changes", "8"]);
    for zero in ["lost", "hash_mismatches", "power_lost", "power_mismatches", "full_faults"] {
        assert_eq!(report[zero], 0, "{report}");
    }
    assert_eq!(report["kills"], 40);
    assert!(report["acknowledged"].as_u64().is_some_and(|n| n > 100), "{report}");
    assert!(report["open_ms_p99"].as_f64().is_some_and(|ms| ms > 0.0));
}

#[test]
fn store_bench_reports_all_figures() {
    let report = run_json(&["store", "--tokens", "20000", "--live", "2000", "--time", "0"]);
    for key in ["open_ms", "live_ms", "append_ms", "prune_ms", "resurrect_ms", "brightness_ms", "bytes"] {
        assert!(report[key].as_f64().is_some_and(|n| n > 0.0), "{key}: {report}");
    }
    assert_eq!((&report["tokens"], &report["live"]), (&19_968.into(), &1_984.into()));
}

#[test]
fn bench_rejects_invalid_arguments() {
    let output = run_bench(&["core", "--time", "x"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("write a number of seconds"));
}
