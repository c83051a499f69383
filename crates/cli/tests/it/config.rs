//! `halo config`, with the real binary.

use crate::common::{run_halo, temp_dir};
use std::path::Path;

#[test]
fn config_merges_file_environment_and_command_line() {
    let data = temp_dir();
    std::fs::write(
        data.path().join("config.toml"),
        "preset = \"halo_weave\"\n\n[context]\nmax_tokens = 900\n",
    )
    .expect("the file is written");
    let run = run_halo(data.path(), &["config", "--set", "chunk.min_tokens=32", "--seed", "7"]);
    assert_eq!((run.status, run.err.as_str()), (0, ""));
    let line = |key: &str| {
        let line = run.out.lines().find(|l| l.starts_with(key)).expect("the setting is listed");
        line.split_whitespace().map(|w| w.rsplit('/').next().unwrap_or(w)).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("preset"), "preset halo_weave config.toml:1");
    assert_eq!(line("context.max_tokens"), "context.max_tokens 900 config.toml:4");
    assert_eq!(line("brightness.rank"), "brightness.rank peak preset halo_weave");
    assert_eq!(line("chunk.min_tokens"), "chunk.min_tokens 32 --set");
    assert_eq!(line("generation.seed"), "generation.seed 7 --seed");
    assert_eq!(line("kv.disk"), "kv.disk 8 GiB default");
    assert_eq!(line("settings file"), "settings file config.toml");
}

#[test]
fn config_json_is_alone_on_stdout() {
    let run = run_halo(temp_dir().path(), &["config", "--json", "--set", "brightness.layers=[1, 2]"]);
    let output: serde_json::Value = serde_json::from_str(&run.out).expect("stdout is JSON only");
    let settings = &output["settings"];
    assert_eq!(settings["context.max_tokens"], serde_json::json!({"value": 2000, "origin": "default"}));
    assert_eq!(settings["context.recent_tokens"]["resolved"], 500);
    assert_eq!(settings["brightness.layers"], serde_json::json!({"value": [1, 2], "origin": "--set"}));
    assert_eq!(settings["kv.ram"]["value"], 536_870_912);
    let reference = run_halo(temp_dir().path(), &["config", "reference", "--json"]);
    let rows: serde_json::Value = serde_json::from_str(&reference.out).expect("stdout is JSON only");
    assert_eq!(rows.as_array().map(Vec::len), settings.as_object().map(serde_json::Map::len));
}

#[test]
fn usage_errors_say_what_to_do() {
    let cases: &[(&[&str], i32, &str)] = &[
        (&["config", "--set", "brightness.rnk=peak"], 2, "did you mean brightness.rank?"),
        (
            &["config", "--set", "brightness.rank=peek"],
            2,
            "it must be peak, mean, top4, votes, sum or share; did you mean peak?",
        ),
        (&["config", "--seed", "x"], 2, "--seed: generation.seed cannot be 'x'"),
        (&["config", "--config", "no/such.toml"], 1, "cannot read the settings file no/such.toml"),
        (&["config", "--set", "max_tokens=5"], 2, "did you mean context.max_tokens?"),
        (
            &["config", "--set", "context=5"],
            2,
            "it is a section, with context.max_tokens, context.sink_tokens",
        ),
        (&["config", "--set", "\u{1b}[31mred=5"], 2, "there is no setting ' [31mred'"),
        (&["confg"], 2, "similar subcommand"),
        (&[], 2, "Usage: halo"),
        (&["replay"], 2, "<CAPTURE>"),
    ];
    for (args, status, message) in cases {
        let run = run_halo(temp_dir().path(), args);
        assert_eq!((run.status, run.out.as_str()), (*status, ""), "{args:?}: {}", run.err);
        assert!(run.err.contains(message), "{args:?}: {}", run.err);
    }
}

/// `--set` applies before and after the command; a later one overrides an earlier one.
#[test]
fn set_flags_count_before_and_after_the_command() {
    let run = run_halo(
        temp_dir().path(),
        &[
            "--set",
            "context.max_tokens=80",
            "--set=chunk.min_tokens=9",
            "config",
            "--set",
            "context.sink_tokens=1",
            "--set",
            "chunk.min_tokens=8",
        ],
    );
    let value = |key: &str| {
        run.out
            .lines()
            .find(|l| l.starts_with(key))
            .and_then(|l| l.split_whitespace().nth(1))
            .map(str::to_owned)
    };
    let values = ["context.max_tokens", "context.sink_tokens", "chunk.min_tokens"]
        .map(|key| value(key).expect("the setting is listed"));
    assert_eq!(values, ["80", "1", "8"]);
}

#[test]
fn config_rejects_invalid_toml() {
    let data = temp_dir();
    std::fs::write(data.path().join("config.toml"), "[context\n").expect("the file is written");
    let run = run_halo(data.path(), &["config"]);
    assert_eq!(run.status, 2);
    assert!(run.err.contains("config.toml: TOML parse error at line 1"), "{}", run.err);
}

#[test]
fn config_reference_matches_docs_settings_md() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/settings.md");
    let documented = std::fs::read_to_string(&path).expect("docs/settings.md");
    let printed = run_halo(temp_dir().path(), &["config", "reference"]).out;
    assert!(
        documented == printed,
        "docs/settings.md is out of date: run 'halo config reference > docs/settings.md'"
    );
}

/// An empty variable counts as unset. A misspelt `HALO_` setting is an error; other `HALO_` variables are ignored.
#[test]
fn config_environment_reports_misspelt_variables() {
    let run = |name: &str, value: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_halo"));
        let output =
            command.args(["config"]).env("HALO_DATA", "").env(name, value).output().expect("halo runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(run("HALO_HOME", "x"), (Some(0), String::new()));
    assert_eq!(run("HALO_KV_RAM", "1 GiB"), (Some(0), String::new()));
    assert_eq!(run("HALO_KV_RAM", ""), (Some(0), String::new()));
    for name in ["HALO_CONTEX_MAX_TOKENS", "HALO_KVRAM", "HALO_CONTEXT_MAXTOKENS"] {
        let (status, error) = run(name, "5");
        assert!(
            status == Some(2) && error.contains(name) && error.contains("did you mean"),
            "{name}: {error}"
        );
    }
}
