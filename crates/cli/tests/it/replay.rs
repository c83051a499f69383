//! `halo replay`, with the real binary, on captures of both formats.

use crate::common::{HaloOutput, run_halo, temp_dir};
use base64::Engine;
use serde_json::{Value, json};
use std::path::Path;

fn captures_dir() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures")
}

fn run_replay(capture: &Path, more: &[&str]) -> HaloOutput {
    let mut args = vec!["replay", capture.to_str().expect("UTF-8")];
    args.extend(more);
    run_halo(temp_dir().path(), &args)
}

fn replay_json(capture: &Path, more: &[&str]) -> Value {
    let run = run_replay(capture, &[more, &["--json"]].concat());
    assert_eq!((run.status, run.err.as_str()), (0, ""));
    serde_json::from_str(&run.out).expect("JSON alone")
}

fn brightness(outcome: &Value) -> Vec<i64> {
    let tokens = outcome["tokens"].as_array().expect("tokens");
    tokens.iter().map(|t| t["brightness"].as_i64().expect("a whole number")).collect()
}

/// The same capture and settings print the same, to the letter; what is expected is kept beside the capture.
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
        let kept = gun.join(format!("expected_{name}.txt"));
        if std::env::var_os("UPDATE_EXPECTED").is_some() {
            std::fs::write(&kept, &run.out).expect("written");
        }
        let expected = std::fs::read_to_string(&kept).expect("what is expected");
        assert_eq!(
            run.out, expected,
            "{name}: if this is meant, run the test with UPDATE_EXPECTED=1 and review"
        );
        assert_eq!(
            run_replay(&gun, &[&settings[..], &["--json"]].concat()).out,
            run_replay(&gun, &[&settings[..], &["--json"]].concat()).out
        );
    }
}

/// The gun that the model looks at stays; the weather leaves, in a pair.
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
    std::fs::write(folder.join("capture.json"), head.to_string()).expect("written");
    let lines: String = steps.iter().map(|s| format!("{s}\n")).collect();
    std::fs::write(folder.join("steps.jsonl"), lines).expect("written");
}

fn prompt_tokens(count: u64, light: f64) -> Value {
    let token = |i| json!({"id": i, "text": "w", "position": i, "turn": 0, "sentence": 0, "role": "user", "brightness": light});
    (0..count).map(token).collect()
}

const ORIGINAL_SETTINGS: [&str; 4] =
    ["--set", "brightness.sink=max", "--set", "brightness.score_current_turn=true"];

/// Golden vectors B1 and B2 from end to end, with attention as numbers and as base64.
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

/// A capture of two turns: pruning after each; positions with gaps keep their own numbers.
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
    assert_eq!(outcome["rounds"][1]["errors"], json!([]), "rows over what is live now fit as they are");
}

fn write_weave_capture(folder: &Path, shape: &Value, values: &[f32]) {
    let token = |i: u64| json!({"token_id": i, "text": "w", "position": i, "turn_id": 0, "message_role": "user", "sentence_id": 0});
    let head = json!({"timestamp": 1, "model": "Qwen", "description": "", "generation_config": {"temperature": 0.7},
        "prompt_tokens": (0..3).map(token).collect::<Vec<_>>()});
    std::fs::write(folder.join("metadata.json"), head.to_string()).expect("written");
    let meta = json!({"file_index": 0, "generation_step": 0, "token_id": 7, "text": "x", "position": 3, "timestamp": 1,
        "attention_shape": shape, "attention_context_length": 3});
    std::fs::write(folder.join("token_00000_meta.json"), meta.to_string()).expect("written");
    let bytes: Vec<u8> = values.iter().flat_map(|a| a.to_le_bytes()).collect();
    std::fs::write(folder.join("token_00000_attn.bin"), bytes).expect("written");
    std::fs::write(folder.join("conversation_state.json"), "{}").expect("written");
}

/// Halo Weave's folders: attention of all layers is reduced as the settings say.
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

/// A capture that is written again in Halo's own format replays the same, and nothing is overwritten.
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
        // How layers and heads were reduced is recorded: nothing has to be said again.
        assert_eq!(run_replay(&saved, &["--json"]).out, run.out);
        let again = run_replay(source, &save);
        assert_eq!((again.status, again.out.as_str()), (1, ""));
        assert!(
            again.err.contains("holds a capture already (capture.json): name another folder"),
            "{}",
            again.err
        );
    }
    let half = dir.path().join("half");
    std::fs::create_dir(&half).expect("created");
    std::fs::write(half.join("steps.jsonl"), "precious").expect("written");
    for taken in [half.as_path(), weave.path()] {
        let run = run_replay(weave.path(), &["--save", taken.to_str().expect("UTF-8")]);
        assert_eq!(run.status, 1);
        assert!(run.err.contains("holds a capture already"), "{}", run.err);
    }
    assert_eq!(std::fs::read_to_string(half.join("steps.jsonl")).expect("read"), "precious");
}

/// One damaged row does not stop a replay: it is reported, and changes nothing.
#[test]
fn replay_reports_damaged_attention() {
    let dir = temp_dir();
    let step = |attention: &str| json!({"token": {"id": 1, "text": "x"}, "attention_b64": attention});
    write_capture(dir.path(), &prompt_tokens(3, 7.0), &[step("AAA="), step("!")]);
    let own = replay_json(dir.path(), &[]);
    assert_eq!(brightness(&own)[..3], [7, 7, 7]);
    let why = |o: &Value| -> Vec<String> {
        let faults = o["rounds"][0]["errors"].as_array().expect("faults");
        faults.iter().map(|f| format!("{}: {}", f["step"], f["why"].as_str().expect("text"))).collect()
    };
    assert_eq!(why(&own)[0], "1: 2 bytes of attention are not a whole number of 32-bit floats");
    assert!(why(&own)[1].starts_with("2: attention_b64 is not base64"), "{:?}", why(&own));
    // What is no probability is found whatever the reduction would make of it.
    for (values, word) in
        [([0.5, f32::NAN, 0.25, 0.5, 0.25, 0.25], "NaN"), ([0.5, 0.25, 0.25, 0.5, -3.0, 0.25], "-3")]
    {
        for heads in ["brightness.heads=max", "brightness.layers=max", "brightness.heads=mean"] {
            let dir = temp_dir();
            write_weave_capture(dir.path(), &json!([1, 2, 3]), &values);
            let found = why(&replay_json(dir.path(), &["--set", heads]));
            assert!(
                found.len() == 1 && found[0].contains(&format!("is {word}, which is no probability")),
                "{found:?}"
            );
        }
    }
    let dir = temp_dir();
    write_weave_capture(dir.path(), &json!([2, 2, 3]), &[0.5, 0.25]);
    assert_eq!(why(&replay_json(dir.path(), &[])), ["1: 2 values do not fill the shape 2 × 2 × 3"]);
}

/// Two answers; before the second, the first question and answer have left. Rows over the live window and over
/// all that was ever recorded are told apart, padded or not, and what is damaged in them is found.
#[test]
fn replay_rows_match_live_window_or_all_recorded() {
    let turn = |turn: u64, role: &'static str| (0..3).map(move |k| (3 * turn + k, turn, role.to_owned()));
    let prompt: Vec<Value> = turn(0, "user")
        .chain(turn(1, "assistant"))
        .chain(turn(2, "user"))
        .map(|(i, turn, role)| json!({"id": 1, "text": "w", "position": i, "turn": turn, "sentence": 0, "role": role}))
        .collect();
    let said = |turn: u64, role: &str, row: Option<&[f32]>| {
        let mut step = json!({"token": {"id": 1, "text": "w", "turn": turn, "role": role}});
        if let Some(row) = row {
            step["attention"] = json!(row);
        }
        step
    };
    let run = |row: &[f32], heads: &str| {
        let dir = temp_dir();
        let steps = [
            said(3, "assistant", None),
            said(4, "user", None),
            said(4, "user", None),
            said(5, "assistant", Some(row)),
        ];
        write_capture(dir.path(), &Value::Array(prompt.clone()), &steps);
        let head = std::fs::read_to_string(dir.path().join("capture.json")).expect("read");
        let head =
            head.replace("\"settings\":{}", &format!("\"settings\":{{\"brightness.heads\":\"{heads}\"}}"));
        std::fs::write(dir.path().join("capture.json"), head).expect("written");
        let sizes = [
            "--set",
            "context.max_tokens=8",
            "--set",
            "context.sink_tokens=0",
            "--set",
            "context.recent_tokens=0",
        ];
        let round = replay_json(dir.path(), &sizes)["rounds"][1].clone();
        let why = round["errors"]
            .as_array()
            .and_then(|f| f.first())
            .map(|f| f["why"].as_str().expect("text").to_owned());
        (round["votes"].as_u64().expect("a number"), why)
    };
    let live = [0.1, 0.1, 0.6, 0.1, 0.05, 0.05];
    assert_eq!(run(&live, "mean"), (1, None));
    let mut padded = live.to_vec();
    padded.resize(16, 0.0);
    assert_eq!(run(&padded, "mean"), (1, None), "padding has no effect");
    let mut all = vec![0.05f32; 12];
    all[8] = 0.45;
    assert_eq!(run(&all, "mean"), (1, None), "a row over all that was recorded");
    all[1] = -0.5;
    assert_eq!(run(&all, "mean").1.as_deref(), Some("attention at slot 1 is -0.5, which is no probability"));
    let mut max = vec![0.05f32; 12];
    max[..6].fill(0.9);
    max[11] = 0.9;
    assert_eq!(run(&max, "max"), (1, None), "rows of maxima are not shares of one whole");
}

/// A row that does not sum to 1 is scored, and said to be doubtful.
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
    assert!(!run.out.contains("mean"), "no step, no mean: {}", run.out);
    assert_eq!(replay_json(dir.path(), &[])["mean"], Value::Null);
}

/// What a file says cannot steer a terminal, and chunk numbers cost nothing by being large.
#[test]
fn replay_sanitizes_hostile_captures() {
    let dir = temp_dir();
    let mut tokens = prompt_tokens(2, 7.0);
    tokens[0]["text"] = json!("\u{1b}[2J\u{202e}evil");
    tokens[1]["sentence"] = json!(4_000_000_000u32);
    write_capture(dir.path(), &tokens, &[json!({"token": {"id": 1, "text": "x"}})]);
    let mut head: Value =
        serde_json::from_str(&std::fs::read_to_string(dir.path().join("capture.json")).expect("read"))
            .expect("JSON");
    head["model"] = json!("m\u{1b}[2J\nsecond");
    std::fs::write(dir.path().join("capture.json"), format!("\u{feff}{head}")).expect("written");
    let run = run_replay(dir.path(), &[]);
    assert_eq!(run.status, 0, "{}", run.err);
    assert!(
        !run.out.contains(['\u{1b}', '\u{202e}']) && run.out.starts_with("m [2J second: 3 tokens"),
        "{}",
        run.out
    );
    assert!(run.out.contains("u0.4000000000"), "{}", run.out);
    tokens[0]["role"] = json!("tool");
    write_capture(dir.path(), &tokens, &[]);
    assert!(
        run_replay(dir.path(), &[]).err.contains("a tool's result is the assistant's, with \"tool\": true")
    );
}

/// Long answers under v0, where chunks are cut while their tokens leave, and recorded chunks beside cut ones.
#[test]
fn replay_v0_cuts_chunks_while_tokens_are_pruned() {
    let dir = temp_dir();
    let say = |text: &str| json!({"token": {"id": 1, "text": text}});
    let steps: Vec<Value> =
        ["x\n", "y", "y", "y", "y", "y", "y\n", "y", "y", "y", "y", "y"].map(say).to_vec();
    write_capture(dir.path(), &json!([]), &steps);
    let sizes = ["--set", "chunk.min_tokens=1", "--set", "chunk.max_tokens=5"];
    let v0 = [&sizes[..], &["--set", "preset=halo_v0", "--set", "ttl.target=1"]].concat();
    let names = |o: &Value| -> Vec<String> {
        o["chunks"]
            .as_array()
            .expect("chunks")
            .iter()
            .map(|c| c["chunk"].as_str().expect("a name").to_owned())
            .collect()
    };
    assert_eq!(names(&replay_json(dir.path(), &v0)), ["a0.0", "a0.1", "a0.2", "a0.3"]);
    assert_eq!(names(&replay_json(dir.path(), &sizes)), ["a0.0", "a0.1", "a0.2", "a0.3"]);
    let placed = |text: &str| json!({"token": {"id": 1, "text": text, "sentence": 1}});
    let mut steps: Vec<Value> = ["y", "\n", "y", "y", "y"].map(placed).to_vec();
    steps.push(say("y"));
    write_capture(dir.path(), &json!([]), &steps);
    assert_eq!(names(&replay_json(dir.path(), &sizes)), ["a0.1", "a0.2"]);
}

#[test]
fn replay_reports_invalid_captures() {
    let good = prompt_tokens(2, 1.0);
    let step = json!({"token": {"id": 1, "text": "x"}});
    let mut other = good.clone();
    other[1]["position"] = json!(0);
    let mut role = good.clone();
    role[1]["role"] = json!("narrator");
    let mut speaker = good.clone();
    speaker[1]["role"] = json!("assistant");
    let cases: Vec<(Value, Value, &str)> = vec![
        (
            other,
            step.clone(),
            "token 2 of the prompt does not fit what was recorded before it: its position 0 does not follow 0",
        ),
        (
            role,
            step.clone(),
            "token 2 of the prompt: 'narrator' is not a role: use system, user or assistant",
        ),
        (speaker, step, "cannot append to turn 0 (assistant): the last turn is 0 (user)"),
        (good.clone(), json!({"token": {"id": 1}}), "steps.jsonl:1: missing field `text`"),
        (good.clone(), json!({"token": {"id": -1, "text": ""}}), "steps.jsonl:1: invalid value"),
        (good.clone(), json!({"token": {"id": 1, "text": "x", "turn": 1}}), "turn and role go together"),
    ];
    for (prompt, step, words) in cases {
        let dir = temp_dir();
        write_capture(dir.path(), &prompt, &[step]);
        let run = run_replay(dir.path(), &[]);
        assert_eq!((run.status, run.out.as_str()), (1, ""), "{words}");
        assert!(run.err.contains(words), "{words}: {}", run.err);
    }
    let dir = temp_dir();
    assert!(run_replay(dir.path(), &[]).err.contains("holds neither capture.json nor metadata.json"));
    write_capture(dir.path(), &good, &[]);
    std::fs::write(dir.path().join("capture.json"), json!({"version": 9, "prompt": []}).to_string())
        .expect("written");
    assert!(
        run_replay(dir.path(), &[])
            .err
            .contains("has version 9, and this program reads versions up to 1: use a newer halo")
    );
    std::fs::remove_file(dir.path().join("steps.jsonl")).expect("removed");
    std::fs::write(dir.path().join("capture.json"), json!({"prompt": []}).to_string()).expect("written");
    assert!(run_replay(dir.path(), &[]).err.contains("cannot open"));
}

/// A capture's own settings stand in for the defaults; what is not known any more is said.
#[test]
fn replay_uses_recorded_settings() {
    let dir = temp_dir();
    write_capture(
        dir.path(),
        &prompt_tokens(4, 500.0),
        &[json!({"token": {"id": 9, "text": "x"}, "attention": [0.4, 0.3, 0.1, 0.2]})],
    );
    let mut head: Value =
        serde_json::from_str(&std::fs::read_to_string(dir.path().join("capture.json")).expect("read"))
            .expect("JSON");
    head["settings"] = json!({"brightness": {"sink": "max"}, "brightness.score_current_turn": true, "gone": 1, "none": null});
    std::fs::write(dir.path().join("capture.json"), head.to_string()).expect("written");
    let run = run_replay(dir.path(), &["--json"]);
    let note = "halo: recorded in the capture: there is no setting 'gone': 'halo config reference' lists all; it is ignored\n";
    assert_eq!(run.err, note);
    let recorded: Value = serde_json::from_str(&run.out).expect("JSON alone");
    assert_eq!(brightness(&recorded), [502, 502, 499, 501, 10_000]);
    let other: Value =
        serde_json::from_str(&run_replay(dir.path(), &["--json", "--set", "brightness.sink=first"]).out)
            .expect("JSON");
    assert_eq!(brightness(&other)[0], 500);
}

/// Null, for what is no number, is reported and changes nothing.
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
    let why: Vec<_> =
        outcome["rounds"][0]["errors"].as_array().expect("faults").iter().map(|f| f["why"].clone()).collect();
    assert_eq!(
        why,
        ["attention at slot 1 is NaN, which is no probability", "the step came without attention"]
    );
}
