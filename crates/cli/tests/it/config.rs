//! `halo config`, with the real binary.

use crate::common::{run_halo, run_halo_with_env, temp_dir};
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
    assert_eq!(settings["context.max_tokens"], serde_json::json!({"value": "auto", "origin": "default"}));
    assert_eq!(settings["context.recent_tokens"].get("resolved"), None, "it depends on the model");
    assert_eq!(settings["generation.max_tokens"]["value"], 1024);
    let args = ["config", "--json", "--set", "context.max_tokens=2000"];
    let fixed: serde_json::Value =
        serde_json::from_str(&run_halo(temp_dir().path(), &args).out).expect("JSON");
    assert_eq!(fixed["settings"]["context.recent_tokens"]["resolved"], 500);
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

/// Every setting, by who may change it: a new setting is for clients of the server only if it is added here.
#[test]
fn settings_that_clients_may_change_are_listed() {
    use halo_cli::settings::{KEYS, SettingAccess};
    let http = "preset context.max_tokens context.sink_tokens context.recent_tokens context.room_tokens \
        model.context model.cooling_tokens model.gpu_layers model.attention model.parallel model.unload_after model.memory generation.max_tokens generation.temperature generation.top_k \
        generation.top_p generation.min_p generation.repetition generation.seed chat.system chat.dates \
        chat.user_name chat.assistant_name tools.enabled reasoning.keep chunk.min_tokens chunk.max_tokens \
        brightness.strategy brightness.initial brightness.cap brightness.decay brightness.sink \
        brightness.score_current_turn brightness.min_confidence brightness.layers brightness.stride brightness.heads \
        brightness.observe_prompt \
        brightness.rank brightness.ties ttl.seed.user ttl.seed.system ttl.seed.tool ttl.seed.llm \
        ttl.seed.default ttl.max ttl.decay ttl.gain ttl.whole_gain ttl.target trace.interval trace.attention \
        prune.policy prune.fill prune.seed resurrect.brightness resurrect.limit resurrect.user_boost \
        resurrect.floor resurrect.candidates resurrect.preview_tokens recall.mode recall.diversity premise.check \
        premise.principles memory.enabled memory.range_tokens memory.most_tokens memory.tokens memory.delay memory.share \
        memory.overlap_tokens memory.reflect memory.quiet_minutes memory.quiet_messages lethe.enabled lethe.cycle lethe.pressure \
        lethe.interval_minutes lethe.hot_days \
        lethe.warm_days lethe.compost_days lethe.grace_days rooms.max_tokens rooms.repetition rooms.jitter \
        rooms.split_paragraphs rooms.telemetry rooms.cooling_tokens rooms.summaries kv.mode kv.type kv.ram kv.disk";
    let by_hand = "model.path model.fetch model.servers recall.embedder rooms.models rooms.prompts kv.check server.listen server.key server.cert \
        server.cert_key server.hosts server.origins server.max_body server.max_import server.rate server.connections \
        server.connections_per_address server.trusted_proxies server.queue server.idle server.open \
        server.otlp";
    let with_access = |access| KEYS.iter().filter(move |key| key.access == access).map(|key| key.name);
    assert_eq!(
        with_access(SettingAccess::Http).collect::<Vec<_>>(),
        http.split_whitespace().collect::<Vec<_>>()
    );
    assert_eq!(
        with_access(SettingAccess::ByHand).collect::<Vec<_>>(),
        by_hand.split_whitespace().collect::<Vec<_>>()
    );
}

#[test]
fn key_prints_a_new_key_that_the_server_accepts() {
    let data = temp_dir();
    let key = || {
        let run = run_halo(data.path(), &["key"]);
        assert_eq!((run.status, run.err.as_str()), (0, ""));
        run.out.trim().to_owned()
    };
    let (one, other) = (key(), key());
    assert!(one != other && one.len() == 43 && !one.contains(char::is_whitespace), "{one}");
    let accepted = run_halo_with_env(data.path(), &["config"], &[("HALO_SERVER_KEY", one.as_ref())]);
    assert_eq!(accepted.status, 0, "{}", accepted.err);
    assert!(!accepted.out.contains(&one), "the key is not printed");
    let short =
        run_halo_with_env(data.path(), &["serve"], &[("HALO_SERVER_KEY", "short and secret".as_ref())]);
    assert!(!short.err.contains("at least"), "sixteen characters are enough: {}", short.err);
    let short = run_halo_with_env(data.path(), &["serve"], &[("HALO_SERVER_KEY", "short & secret".as_ref())]);
    assert_eq!(short.status, 2, "{}", short.err);
    assert!(
        short.err.contains("at least 16 ASCII characters") && short.err.contains("`halo key`"),
        "{}",
        short.err
    );
    assert!(!short.err.contains("short & secret"), "{}", short.err);
}

#[test]
fn trusted_proxies_must_be_addresses() {
    for invalid in ["proxy.lan", "10.0.0.0/33", "10.0.0.1 10.0.0.2"] {
        let run = run_halo(temp_dir().path(), &["serve", &format!("--set=server.trusted_proxies={invalid}")]);
        assert_eq!(run.status, 2, "{}", run.err);
        assert!(run.err.contains("server.trusted_proxies") && run.err.contains(invalid), "{}", run.err);
    }
}

/// Reading a pipe would block for ever, and reading a device never end.
#[cfg(unix)]
#[test]
fn files_named_by_settings_must_be_regular() {
    let data = temp_dir();
    let pipe = data.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    let folder = data.path().join("folder");
    std::fs::create_dir(&folder).expect("a folder");
    assert_eq!(run_halo(data.path(), &["rooms", "new", "example"]).status, 0);
    let script = data.path().join("answers.txt");
    std::fs::write(&script, "So it is.").expect("written");
    let model = format!("scripted:{}", script.display());
    for path in [&pipe, &folder, Path::new("/dev/zero")] {
        let path = path.display().to_string();
        let set = |key: &str| format!("{key}={path}");
        let (cert, key, prompts) = (set("server.cert"), set("server.cert_key"), set("rooms.prompts"));
        let scripted = format!("scripted:{path}");
        let cases: [&[&str]; 6] = [
            &["serve", "--set", &cert, "--set", &key],
            &["ask", "x", "--model", &path],
            &["ask", "x", "--model", &scripted],
            &["rooms", "new", "w", "--file", &path],
            &["rooms", "run", "example", "--beats", "1", "--model", &model, "--set", &prompts],
            &["config", "--config", &path],
        ];
        for args in cases {
            let run = run_halo(data.path(), args);
            assert!(run.status != 0 && run.err.contains(&path), "{args:?}: {}", run.err);
        }
        let catalogue = [("HALO_MODELS_CATALOGUE", path.as_ref())];
        let run = run_halo_with_env(data.path(), &["models"], &catalogue);
        assert!(run.status != 0 && run.err.contains(&path), "{}", run.err);
    }
}
