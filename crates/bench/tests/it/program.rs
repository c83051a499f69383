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
    // As an environment variable: `--data` names the dataset in some benchmarks.
    command.args(args).env("HALO_DATA", data.path()).output().expect("the binary starts")
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

/// Two models compared on one conversation: a model agrees with itself in every chunk, and not with one of random weights. The plot has a point for every chunk.
#[test]
fn compare_bench_correlates_the_chunks_of_two_models() {
    let models = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/models");
    let configured = std::env::var_os("HALO_TEST_MODEL").map(std::path::PathBuf::from);
    let small = configured.unwrap_or_else(|| models.join("SmolLM2-135M-Instruct.Q4_1.gguf"));
    let random = models.join("tiny-llama.gguf");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let topics =
        ["the gun Betsy", "a cello", "the late train", "soup", "tomatoes", "blue boats", "bees", "the clock"];
    let messages: Vec<Value> = (0..24)
        .map(|n| {
            let text = format!(
                "Message {n} is about {}, of which there is much to tell on a long evening by the fire, \
                 as everybody in the house knows.",
                topics[n % topics.len()]
            );
            serde_json::json!({
                "dia_id": format!("D1:{n}"), "speaker": if n % 2 == 0 { "Ann" } else { "Ben" },
                "clean_text": text, "date_time": "01.02.2026, 10:00:00",
            })
        })
        .collect();
    let data = folder.path().join("chat.json");
    let chat = serde_json::json!({ "session_1": messages, "qa": [] });
    std::fs::write(&data, chat.to_string()).expect("the file is written");
    let svg = folder.path().join("plot.svg");
    let text = |path: &std::path::Path| path.display().to_string();
    let report = |with: &std::path::Path| {
        let plan = ["--context", "200", "--watch", "30", "--chunk", "12"];
        let names = [
            "compare",
            "--model",
            &text(&small),
            "--with",
            &text(with),
            "--data",
            &text(&data),
            "--svg",
            &text(&svg),
        ];
        run_json(&[&names[..], &plan[..]].concat())
    };
    let same = report(&small);
    let number =
        |report: &Value, key: &str| report[key].as_f64().unwrap_or_else(|| panic!("{key}: {report}"));
    assert!((number(&same, "rank_correlation") - 1.0).abs() < 1e-9, "{same}");
    assert!((number(&same, "top_quarter_overlap") - 1.0).abs() < 1e-9, "{same}");
    let chunks = same["conversations"][0]["chunks"].as_u64().expect("a number") as usize;
    assert!(chunks >= 6, "{same}");
    let plot = std::fs::read_to_string(&svg).expect("the plot is written");
    assert_eq!(plot.matches("<circle").count(), chunks);
    let other = report(&random);
    assert!((-1.0..0.999).contains(&number(&other, "rank_correlation")), "{other}");
    assert_eq!(other["conversations"][0]["chunks"].as_u64(), Some(chunks as u64), "the same chunks: {other}");
}
