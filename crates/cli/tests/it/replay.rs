//! `halo replay` with the real binary, on captures of both formats.

use crate::common::{HaloOutput, run_halo, temp_dir};
use base64::Engine;
use serde_json::{Value, json};
use std::path::Path;

fn captures_dir() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures")
}

fn run_replay(capture: &Path, flags: &[&str]) -> HaloOutput {
    let mut args = vec!["replay", capture.to_str().expect("UTF-8")];
    args.extend(flags);
    run_halo(temp_dir().path(), &args)
}

fn replay_json(capture: &Path, flags: &[&str]) -> Value {
    let run = run_replay(capture, &[flags, &["--json"]].concat());
    assert_eq!((run.status, run.err.as_str()), (0, ""));
    serde_json::from_str(&run.out).expect("stdout is JSON only")
}

fn brightness(outcome: &Value) -> Vec<i64> {
    let tokens = outcome["tokens"].as_array().expect("tokens");
    tokens.iter().map(|t| t["brightness"].as_i64().expect("a whole number")).collect()
}

/// The same capture and settings print the same bytes. The expected output is stored beside the capture.
#[test]
fn replay_is_deterministic() {
    let gun = captures_dir().join("gun");
    for (name, settings) in [
        ("halo", vec!["--set", "context.max_tokens=80"]),
        ("halo_weave", vec!["--set", "context.max_tokens=80", "--set", "preset=halo_weave"]),
        ("halo_v0", vec!["--set", "preset=halo_v0", "--set", "ttl.target=90"]),
        ("fifo", vec!["--set", "context.max_tokens=80", "--set", "prune.policy=fifo"]),
    ] {
        let run = run_replay(&gun, &settings);
        assert_eq!((run.status, run.err.as_str()), (0, ""));
        let expected_file = gun.join(format!("expected_{name}.txt"));
        if std::env::var_os("UPDATE_EXPECTED").is_some() {
            std::fs::write(&expected_file, &run.out).expect("the file is written");
        }
        let expected = std::fs::read_to_string(&expected_file).expect("the expected output");
        assert_eq!(
            run.out, expected,
            "{name}: if the change is intended, run the test with UPDATE_EXPECTED=1 and review the diff"
        );
        assert_eq!(
            run_replay(&gun, &[&settings[..], &["--json"]].concat()).out,
            run_replay(&gun, &[&settings[..], &["--json"]].concat()).out
        );
    }
}

/// The message about the gun, which gets attention, stays; the question about the weather and its answer are pruned.
#[test]
fn replay_keeps_attended_chunks() {
    let outcome = replay_json(&captures_dir().join("gun"), &["--set", "context.max_tokens=80"]);
    assert_eq!(outcome["pruned"], json!([["a4.0", "u3.0"]]));
    let live: usize =
        outcome["tokens"].as_array().expect("tokens").iter().filter(|t| t["live"] == true).count();
    assert_eq!(live, 76);
    assert_eq!(
        outcome["rounds"][0]["errors"][0]["why"],
        "attention for 10 slots, but at least 116 were in the window"
    );
    assert_eq!(outcome["rounds"][0]["pruned"][1]["chunk"], "u3.0");
}

fn write_capture(folder: &Path, prompt: &Value, steps: &[Value]) {
    let head = json!({"version": 1, "model": "vector", "settings": {}, "prompt": prompt});
    std::fs::write(folder.join("capture.json"), head.to_string()).expect("the file is written");
    let lines: String = steps.iter().map(|s| format!("{s}\n")).collect();
    std::fs::write(folder.join("steps.jsonl"), lines).expect("the file is written");
}

fn prompt_tokens(count: u64, brightness: f64) -> Value {
    let token = |i| json!({"id": i, "text": "w", "position": i, "turn": 0, "sentence": 0, "role": "user", "brightness": brightness});
    (0..count).map(token).collect()
}

const ORIGINAL_SETTINGS: [&str; 4] =
    ["--set", "brightness.sink=max", "--set", "brightness.score_current_turn=true"];

/// Golden vectors B1 and B2 end to end, with attention as numbers and as base64.
#[test]
fn replay_matches_golden_vectors() {
    let row = [0.4f32, 0.3, 0.1, 0.2];
    let mut padded = row.to_vec();
    padded.resize(256, 0.0);
    let bytes: Vec<u8> = padded.iter().flat_map(|a| a.to_le_bytes()).collect();
    let b64 = base64::engine::general_purpose::STANDARD.encode(bytes);
    for (attention, last) in [(json!({"attention": row}), 10_000), (json!({"attention_b64": b64}), 9_999)] {
        let dir = temp_dir();
        let mut step = json!({"token": {"id": 9, "text": "x"}});
        step.as_object_mut().expect("an object").extend(attention.as_object().expect("an object").clone());
        write_capture(dir.path(), &prompt_tokens(4, 500.0), &[step]);
        let outcome = replay_json(dir.path(), &ORIGINAL_SETTINGS);
        assert_eq!(brightness(&outcome), [502, 502, 499, 501, last]);
        assert_eq!(outcome["mean"], 2400);
    }
}

/// A capture with two answers is pruned after each; gaps between positions remain.
#[test]
fn replay_prunes_after_each_turn_and_keeps_position_gaps() {
    let dir = temp_dir();
    let mut tokens = Vec::new();
    for (i, (role, turn)) in [("user", 0), ("assistant", 1)].iter().enumerate() {
        for k in 0..4u64 {
            tokens.push(json!({"id": 1, "text": "w", "position": 100 * i as u64 + k, "turn": turn, "sentence": 0, "role": role}));
        }
    }
    let user = |n: u64| json!({"token": {"id": 2, "text": "w", "turn": 2 * n, "role": "user"}});
    let answer = |n: u64, slots: usize| {
        let mut row = vec![0.5 / slots as f32; slots];
        row[0] += 0.5;
        json!({"token": {"id": 3, "text": "w", "turn": 2 * n + 1, "role": "assistant"}, "attention": row})
    };
    let steps =
        [user(1), user(1), answer(1, 10), answer(1, 11), user(2), user(2), answer(2, 6), answer(2, 7)];
    write_capture(dir.path(), &Value::Array(tokens), &steps);
    let settings = ["--set", "context.max_tokens=4", "--set", "preset=halo_weave"];
    let outcome = replay_json(dir.path(), &settings);
    assert_eq!(outcome["pruned"], json!([["u0.0", "a1.0"], ["u2.0", "a3.0"]]));
    let positions: Vec<_> =
        outcome["tokens"].as_array().expect("tokens").iter().map(|t| t["position"].clone()).collect();
    assert_eq!(positions[3..9], [json!(3), json!(100), json!(101), json!(102), json!(103), json!(104)]);
    assert_eq!(outcome["rounds"][1]["errors"], json!([]), "rows over the live window match");
}

fn write_weave_capture(folder: &Path, shape: &Value, values: &[f32]) {
    let token = |i: u64| json!({"token_id": i, "text": "w", "position": i, "turn_id": 0, "message_role": "user", "sentence_id": 0});
    let head = json!({"timestamp": 1, "model": "Qwen", "description": "", "generation_config": {"temperature": 0.7},
        "prompt_tokens": (0..3).map(token).collect::<Vec<_>>()});
    std::fs::write(folder.join("metadata.json"), head.to_string()).expect("the file is written");
    let meta = json!({"file_index": 0, "generation_step": 0, "token_id": 7, "text": "x", "position": 3, "timestamp": 1,
        "attention_shape": shape, "attention_context_length": 3});
    std::fs::write(folder.join("token_00000_meta.json"), meta.to_string()).expect("the file is written");
    let bytes: Vec<u8> = values.iter().flat_map(|a| a.to_le_bytes()).collect();
    std::fs::write(folder.join("token_00000_attn.bin"), bytes).expect("the file is written");
    std::fs::write(folder.join("conversation_state.json"), "{}").expect("the file is written");
}

/// Captures of Halo Weave: the attention of all layers is reduced by the settings.
#[test]
fn replay_reads_halo_weave_captures() {
    let (shape, values) = (json!([2, 1, 3]), [0.625f32, 0.25, 0.125, 0.25, 0.25, 0.5]);
    let cases: &[(&[&str], [i64; 3])] = &[
        (&[], [2, 1, 1]),
        (&["--set", "brightness.layers=last"], [1, 1, 3]),
        (&["--set", "brightness.layers=[0]"], [5, 2, -1]),
        (&["--set", "brightness.layers=max"], [2, -1, 2]),
        (&["--set", "brightness.heads=max"], [2, 1, 1]),
    ];
    for (settings, expected) in cases {
        let dir = temp_dir();
        write_weave_capture(dir.path(), &shape, &values);
        let settings = [&ORIGINAL_SETTINGS[..], &["--set", "brightness.initial=0"], settings].concat();
        assert_eq!(brightness(&replay_json(dir.path(), &settings))[..3], *expected, "{settings:?}");
    }
    let dir = temp_dir();
    write_weave_capture(dir.path(), &json!([3]), &[0.5, 0.25, 0.25]);
    assert_eq!(brightness(&replay_json(dir.path(), &[]))[..3], [10_000, 9_999, 9_999]);
}

/// A capture saved in Halo's own format replays to the same output. `--save` overwrites no capture.
#[test]
fn replay_save_round_trips() {
    let (dir, weave) = (temp_dir(), temp_dir());
    write_weave_capture(weave.path(), &json!([2, 1, 3]), &[0.625, 0.25, 0.125, 0.25, 0.25, 0.5]);
    let heads = ["--set", "brightness.layers=max", "--json"];
    let sources = [(captures_dir().join("gun"), &heads[2..]), (weave.path().to_owned(), &heads[..])];
    for (i, (source, settings)) in sources.iter().enumerate() {
        let saved = dir.path().join(i.to_string());
        let save = [&["--save", saved.to_str().expect("UTF-8")], *settings].concat();
        let run = run_replay(source, &save);
        assert_eq!(run.status, 0, "{}", run.err);
        assert!(run.err.starts_with("halo: wrote "), "{}", run.err);
        // The saved capture records how layers and heads were reduced, so that no flag is needed.
        assert_eq!(run_replay(&saved, &["--json"]).out, run.out);
        let second = run_replay(source, &save);
        assert_eq!((second.status, second.out.as_str()), (1, ""));
        assert!(
            second.err.contains("holds a capture already (capture.json): name another folder"),
            "{}",
            second.err
        );
    }
    let incomplete = dir.path().join("half");
    std::fs::create_dir(&incomplete).expect("the folder is created");
    std::fs::write(incomplete.join("steps.jsonl"), "precious").expect("the file is written");
    for target in [incomplete.as_path(), weave.path()] {
        let run = run_replay(weave.path(), &["--save", target.to_str().expect("UTF-8")]);
        assert_eq!(run.status, 1);
        assert!(run.err.contains("holds a capture already"), "{}", run.err);
    }
    assert_eq!(
        std::fs::read_to_string(incomplete.join("steps.jsonl")).expect("the file is readable"),
        "precious"
    );
}

/// A damaged row does not stop a replay: it is reported and not scored.
#[test]
fn replay_reports_damaged_attention() {
    let dir = temp_dir();
    let step = |attention: &str| json!({"token": {"id": 1, "text": "x"}, "attention_b64": attention});
    write_capture(dir.path(), &prompt_tokens(3, 7.0), &[step("AAA="), step("!")]);
    let outcome = replay_json(dir.path(), &[]);
    assert_eq!(brightness(&outcome)[..3], [7, 7, 7]);
    let row_errors = |outcome: &Value| -> Vec<String> {
        let errors = outcome["rounds"][0]["errors"].as_array().expect("a list");
        errors.iter().map(|e| format!("{}: {}", e["step"], e["why"].as_str().expect("text"))).collect()
    };
    assert_eq!(row_errors(&outcome)[0], "1: 2 bytes of attention are not a whole number of 32-bit floats");
    assert!(
        row_errors(&outcome)[1].starts_with("2: attention_b64 is not base64"),
        "{:?}",
        row_errors(&outcome)
    );
    // Values that are not probabilities are found before the rows are reduced.
    for (values, printed) in
        [([0.5, f32::NAN, 0.25, 0.5, 0.25, 0.25], "NaN"), ([0.5, 0.25, 0.25, 0.5, -3.0, 0.25], "-3")]
    {
        for setting in ["brightness.heads=max", "brightness.layers=max", "brightness.heads=mean"] {
            let dir = temp_dir();
            write_weave_capture(dir.path(), &json!([1, 2, 3]), &values);
            let errors = row_errors(&replay_json(dir.path(), &["--set", setting]));
            assert!(
                errors.len() == 1 && errors[0].contains(&format!("is {printed}, which is no probability")),
                "{errors:?}"
            );
        }
    }
    let dir = temp_dir();
    write_weave_capture(dir.path(), &json!([2, 2, 3]), &[0.5, 0.25]);
    assert_eq!(row_errors(&replay_json(dir.path(), &[])), ["1: 2 values do not fill the shape 2 × 2 × 3"]);
}

/// The first question and answer are pruned before the second answer. Replay distinguishes rows over the live window
/// from rows over all recorded tokens, with and without padding, and finds damaged values.
#[test]
fn replay_rows_match_live_window_or_all_recorded() {
    let turn = |turn: u64, role: &'static str| (0..3).map(move |k| (3 * turn + k, turn, role.to_owned()));
    let prompt: Vec<Value> = turn(0, "user")
        .chain(turn(1, "assistant"))
        .chain(turn(2, "user"))
        .map(|(i, turn, role)| json!({"id": 1, "text": "w", "position": i, "turn": turn, "sentence": 0, "role": role}))
        .collect();
    let step = |turn: u64, role: &str, row: Option<&[f32]>| {
        let mut step = json!({"token": {"id": 1, "text": "w", "turn": turn, "role": role}});
        if let Some(row) = row {
            step["attention"] = json!(row);
        }
        step
    };
    let run = |row: &[f32], heads: &str| {
        let dir = temp_dir();
        let steps = [
            step(3, "assistant", None),
            step(4, "user", None),
            step(4, "user", None),
            step(5, "assistant", Some(row)),
        ];
        write_capture(dir.path(), &Value::Array(prompt.clone()), &steps);
        let head = std::fs::read_to_string(dir.path().join("capture.json")).expect("the file is readable");
        let head =
            head.replace("\"settings\":{}", &format!("\"settings\":{{\"brightness.heads\":\"{heads}\"}}"));
        std::fs::write(dir.path().join("capture.json"), head).expect("the file is written");
        let sizes = [
            "--set",
            "context.max_tokens=8",
            "--set",
            "context.sink_tokens=0",
            "--set",
            "context.recent_tokens=0",
        ];
        let round = replay_json(dir.path(), &sizes)["rounds"][1].clone();
        let error = round["errors"]
            .as_array()
            .and_then(|errors| errors.first())
            .map(|error| error["why"].as_str().expect("text").to_owned());
        (round["votes"].as_u64().expect("a number"), error)
    };
    let live = [0.1, 0.1, 0.6, 0.1, 0.05, 0.05];
    assert_eq!(run(&live, "mean"), (1, None));
    let mut padded = live.to_vec();
    padded.resize(16, 0.0);
    assert_eq!(run(&padded, "mean"), (1, None), "padding has no effect");
    let mut all = vec![0.05f32; 12];
    all[8] = 0.45;
    assert_eq!(run(&all, "mean"), (1, None), "a row over all recorded tokens");
    all[1] = -0.5;
    assert_eq!(run(&all, "mean").1.as_deref(), Some("attention at slot 1 is -0.5, which is no probability"));
    let mut max = vec![0.05f32; 12];
    max[..6].fill(0.9);
    max[11] = 0.9;
    assert_eq!(run(&max, "max"), (1, None), "a row of maxima does not sum to 1");
}

/// A row that does not sum to 1 is scored and reported as doubtful.
#[test]
fn replay_flags_attention_that_does_not_sum_to_one() {
    let dir = temp_dir();
    write_capture(
        dir.path(),
        &prompt_tokens(3, 7.0),
        &[json!({"token": {"id": 1, "text": "x"}, "attention": [0.5, 0.9, 0.9]})],
    );
    assert_eq!(replay_json(dir.path(), &[])["rounds"][0]["attention_sums"][0]["step"], 1);
    let run = run_replay(dir.path(), &[]);
    assert!(run.out.contains("doubtful  step 1: its attention sums to 2.300, not to 1"), "{}", run.out);
    write_capture(dir.path(), &prompt_tokens(3, 7.0), &[]);
    let run = run_replay(dir.path(), &[]);
    assert!(!run.out.contains("mean"), "without steps there is no mean: {}", run.out);
    assert_eq!(replay_json(dir.path(), &[])["mean"], Value::Null);
}

/// Control characters of a capture do not reach the terminal, and a large chunk index costs no memory.
#[test]
fn replay_sanitizes_hostile_captures() {
    let dir = temp_dir();
    let mut tokens = prompt_tokens(2, 7.0);
    tokens[0]["text"] = json!("\u{1b}[2J\u{202e}evil");
    tokens[1]["sentence"] = json!(4_000_000_000u32);
    write_capture(dir.path(), &tokens, &[json!({"token": {"id": 1, "text": "x"}})]);
    let mut head: Value = serde_json::from_str(
        &std::fs::read_to_string(dir.path().join("capture.json")).expect("the file is readable"),
    )
    .expect("JSON");
    head["model"] = json!("m\u{1b}[2J\nsecond");
    std::fs::write(dir.path().join("capture.json"), format!("\u{feff}{head}")).expect("the file is written");
    let run = run_replay(dir.path(), &[]);
    assert_eq!(run.status, 0, "{}", run.err);
    assert!(
        !run.out.contains(['\u{1b}', '\u{202e}']) && run.out.starts_with("m [2J second: 3 tokens"),
        "{}",
        run.out
    );
    assert!(run.out.contains("u0.4000000000"), "{}", run.out);
    tokens[0]["role"] = json!("narrator");
    write_capture(dir.path(), &tokens, &[]);
    assert!(run_replay(dir.path(), &[]).err.contains("'narrator' is not a role"));
}

/// With the preset halo_v0 chunks are cut while their tokens are pruned. A step may also record its own chunk index.
#[test]
fn replay_v0_cuts_chunks_while_tokens_are_pruned() {
    let dir = temp_dir();
    let step = |text: &str| json!({"token": {"id": 1, "text": text}});
    let steps: Vec<Value> =
        ["x\n", "y", "y", "y", "y", "y", "y\n", "y", "y", "y", "y", "y"].map(step).to_vec();
    write_capture(dir.path(), &json!([]), &steps);
    let sizes = ["--set", "chunk.min_tokens=1", "--set", "chunk.max_tokens=5"];
    let v0 = [&sizes[..], &["--set", "preset=halo_v0", "--set", "ttl.target=1"]].concat();
    let names = |outcome: &Value| -> Vec<String> {
        outcome["chunks"]
            .as_array()
            .expect("chunks")
            .iter()
            .map(|c| c["chunk"].as_str().expect("a name").to_owned())
            .collect()
    };
    assert_eq!(names(&replay_json(dir.path(), &v0)), ["a0.0", "a0.1", "a0.2", "a0.3"]);
    assert_eq!(names(&replay_json(dir.path(), &sizes)), ["a0.0", "a0.1", "a0.2", "a0.3"]);
    let indexed_step = |text: &str| json!({"token": {"id": 1, "text": text, "sentence": 1}});
    let mut steps: Vec<Value> = ["y", "\n", "y", "y", "y"].map(indexed_step).to_vec();
    steps.push(step("y"));
    write_capture(dir.path(), &json!([]), &steps);
    assert_eq!(names(&replay_json(dir.path(), &sizes)), ["a0.1", "a0.2"]);
}

#[test]
fn replay_reports_invalid_captures() {
    let good = prompt_tokens(2, 1.0);
    let step = json!({"token": {"id": 1, "text": "x"}});
    let mut position = good.clone();
    position[1]["position"] = json!(0);
    let mut role = good.clone();
    role[1]["role"] = json!("narrator");
    let mut speaker = good.clone();
    speaker[1]["role"] = json!("assistant");
    let cases: Vec<(Value, Value, &str)> = vec![
        (
            position,
            step.clone(),
            "token 2 of the prompt does not fit what was recorded before it: its position 0 does not follow 0",
        ),
        (
            role,
            step.clone(),
            "token 2 of the prompt: 'narrator' is not a role: use system, user, assistant or tool",
        ),
        (speaker, step, "cannot append to turn 0 (assistant): the last turn is 0 (user)"),
        (good.clone(), json!({"token": {"id": 1}}), "steps.jsonl:1: missing field `text`"),
        (good.clone(), json!({"token": {"id": -1, "text": ""}}), "steps.jsonl:1: invalid value"),
        (good.clone(), json!({"token": {"id": 1, "text": "x", "turn": 1}}), "turn and role go together"),
    ];
    for (prompt, step, message) in cases {
        let dir = temp_dir();
        write_capture(dir.path(), &prompt, &[step]);
        let run = run_replay(dir.path(), &[]);
        assert_eq!((run.status, run.out.as_str()), (1, ""), "{message}");
        assert!(run.err.contains(message), "{message}: {}", run.err);
    }
    let dir = temp_dir();
    assert!(run_replay(dir.path(), &[]).err.contains("holds neither capture.json nor metadata.json"));
    write_capture(dir.path(), &good, &[]);
    std::fs::write(dir.path().join("capture.json"), json!({"version": 9, "prompt": []}).to_string())
        .expect("the file is written");
    assert!(
        run_replay(dir.path(), &[])
            .err
            .contains("has version 9, and this program reads versions up to 1: use a newer halo")
    );
    std::fs::remove_file(dir.path().join("steps.jsonl")).expect("the file is removed");
    std::fs::write(dir.path().join("capture.json"), json!({"prompt": []}).to_string())
        .expect("the file is written");
    assert!(run_replay(dir.path(), &[]).err.contains("cannot open"));
}

/// The settings in a capture replace the defaults. An unknown setting is reported and ignored.
#[test]
fn replay_uses_recorded_settings() {
    let dir = temp_dir();
    write_capture(
        dir.path(),
        &prompt_tokens(4, 500.0),
        &[json!({"token": {"id": 9, "text": "x"}, "attention": [0.4, 0.3, 0.1, 0.2]})],
    );
    let mut head: Value = serde_json::from_str(
        &std::fs::read_to_string(dir.path().join("capture.json")).expect("the file is readable"),
    )
    .expect("JSON");
    head["settings"] = json!({"brightness": {"sink": "max"}, "brightness.score_current_turn": true, "gone": 1, "none": null});
    std::fs::write(dir.path().join("capture.json"), head.to_string()).expect("the file is written");
    let run = run_replay(dir.path(), &["--json"]);
    let expected = "halo: recorded in the capture: there is no setting 'gone': 'halo config reference' lists all; it is ignored\n";
    assert_eq!(run.err, expected);
    let recorded: Value = serde_json::from_str(&run.out).expect("stdout is JSON only");
    assert_eq!(brightness(&recorded), [502, 502, 499, 501, 10_000]);
    let overridden: Value =
        serde_json::from_str(&run_replay(dir.path(), &["--json", "--set", "brightness.sink=first"]).out)
            .expect("JSON");
    assert_eq!(brightness(&overridden)[0], 500);
}

/// Null in an attention row is reported, and the row is not scored.
#[test]
fn replay_reports_non_numeric_attention() {
    let dir = temp_dir();
    let steps = [
        json!({"token": {"id": 1, "text": "x"}, "attention": [0.5, null, 0.5]}),
        json!({"token": {"id": 1, "text": "x"}}),
    ];
    write_capture(dir.path(), &prompt_tokens(3, 7.0), &steps);
    let outcome = replay_json(dir.path(), &[]);
    assert_eq!(brightness(&outcome), [7, 7, 7, 10_000, 10_000]);
    let errors: Vec<_> =
        outcome["rounds"][0]["errors"].as_array().expect("a list").iter().map(|e| e["why"].clone()).collect();
    assert_eq!(
        errors,
        ["attention at slot 1 is NaN, which is no probability", "the step came without attention"]
    );
}
