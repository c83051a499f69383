//! `halo-bench hud --json` with the real tokenizer: its keys, and HUDs that stay within their budget.

use serde_json::Value;
use std::path::Path;
use std::process::Command;

#[test]
fn bench_hud_reports_times_overruns_and_round_trips() {
    let model = std::env::var_os("HALO_TEST_MODEL").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        Into::into,
    );
    let data = tempfile::tempdir().expect("a temporary folder");
    let output = Command::new(env!("CARGO_BIN_EXE_halo-bench"))
        .args(["hud", "--agents", "12", "--rooms", "3", "--rounds", "2", "--random", "300", "--json"])
        .arg("--data")
        .arg(data.path())
        .arg("--model")
        .arg(&model)
        .output()
        .expect("the benchmark runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("stdout is JSON only");
    let number = |pointer: &str| {
        report.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer}: {report}"))
    };
    assert!(number("/p50_ms") > 0.0 && number("/p99_ms") >= number("/p50_ms"), "{report}");
    assert_eq!((number("/overruns"), number("/round_trip_failures")), (0.0, 0.0), "{report}");
    assert_eq!(number("/random/overruns"), 0.0);
    assert!(number("/random/huds") >= 300.0);
    for format in ["json", "compact_json", "toon", "toon_positional"] {
        assert_eq!(number(&format!("/formats/{format}/huds")), 6.0, "three agents, two HUDs each");
        assert!(number(&format!("/formats/{format}/p50_ms")) > 0.0);
        assert!(number(&format!("/formats/{format}/tokens")) > 500.0);
    }
    // A HUD of 10,000 tokens in TOON holds what takes so many tokens more in JSON: thousands, not 15,000 to 20,000.
    let freed = 10_000.0 * (number("/formats/json/tokens") / number("/formats/toon/tokens") - 1.0);
    assert!((1_000.0..8_000.0).contains(&freed), "{freed} tokens: {report}");
}
