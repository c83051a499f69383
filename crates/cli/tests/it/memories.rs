//! Memories with the real binary and the real model: formed from a pipe, traced, carried, forgotten.

use crate::common::{UNRELATED_MESSAGES, files_with, halo_command, model_command, send_lines, temp_dir};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// A window that is too small for the conversation: most of it is pruned before a memory is formed.
const SMALL_WINDOW: [&str; 7] = [
    "memory.enabled=true",
    "memory.range_tokens=150",
    "memory.most_tokens=200",
    "memory.tokens=60",
    "context.max_tokens=420",
    "generation.max_tokens=16",
    "generation.temperature=0",
];

/// Sends the lines with `halo chat`; returns standard error.
fn chat(data: &Path, args: &[&str], lines: &[&str]) -> String {
    send_lines(&mut small_window_chat(data, args), lines).err
}

fn small_window_chat(data: &Path, args: &[&str]) -> Command {
    let mut command = model_command(data, &[&["chat"], args].concat());
    command.args(SMALL_WINDOW.iter().flat_map(|setting| ["--set", setting]));
    command
}

fn memories(data: &Path, args: &[&str]) -> Value {
    let output =
        halo_command(data, &[&["memories"], args, &["--json"]].concat()).output().expect("halo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn rows(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Messages from a pipe form memories at the end, also of turns that were pruned long before. Each byte of a memory has an
/// origin. A memory that is carried into another conversation is forgotten with its source.
#[test]
fn pipe_forms_memories_of_pruned_turns_that_are_traced_carried_and_forgotten() {
    let home = temp_dir();
    let home = home.path();
    let notices = chat(home, &[], &UNRELATED_MESSAGES[..12]);
    assert!(notices.contains(" formed"), "{notices}");
    let formed = memories(home, &[]);
    let formed = rows(&formed);
    assert!(formed.len() >= 2, "{formed:#?}");
    assert_eq!(formed[0]["from"], 0, "the first turn is remembered: {formed:#?}");
    for pair in formed.windows(2) {
        let (end, start) = (pair[0]["to"].as_u64(), pair[1]["from"].as_u64());
        assert!(start == end || start == end.map(|end| end + 1), "no turn is skipped: {formed:#?}");
    }

    let origins = memories(home, &["origins", "1"]);
    let text = origins["text"].as_str().expect("a text");
    let mut at = 0;
    for span in rows(&origins["spans"]) {
        assert_eq!(span["start"], at, "{origins:#}");
        at = span["end"].as_u64().expect("a number") as usize;
        assert_eq!(span["kind"], "model");
    }
    assert_eq!(at, text.len(), "every byte has an origin: {origins:#}");
    let blocks: Vec<&str> = rows(&origins["segments"]).iter().filter_map(|s| s["block"].as_str()).collect();
    assert_eq!(blocks[..3], ["instructions", "turn-0", "turn-1"], "{origins:#}");
    let restored = origins["restored_tokens"].as_u64();
    assert!(restored > Some(0), "the KV cells of pruned turns come from the archive: {origins:#}");
    let table = halo_command(home, &["memories", "origins", "1"]).output().expect("halo runs");
    assert!(String::from_utf8_lossy(&table.stdout).contains("turn-0"), "{table:?}");

    // Into a new conversation, and into one that exists.
    let notices = chat(home, &["-c", "new", "--carry", "main"], &["Hello there"]);
    assert!(notices.contains("carried from 'main'"), "{notices}");
    let carried = memories(home, &["-c", "new"]);
    assert_eq!(rows(&carried).len(), formed.len(), "{carried:#}");
    assert_eq!(rows(&carried)[0]["text"], formed[0]["text"]);
    let shown = small_window_chat(home, &["-c", "new"]).stdin(Stdio::null()).output().expect("halo runs");
    assert!(shown.status.success());
    chat(home, &["-c", "third"], &["Hello again"]);
    let joined = memories(home, &["-c", "third", "carry", "--from", "main", "--join", "1", "2"]);
    assert_eq!(rows(&joined).len(), 1, "{joined:#}");
    assert_eq!(rows(&rows(&joined)[0]["carried_from"]).len(), 2, "one memory of two: {joined:#}");

    let secret = formed[0]["text"].as_str().expect("a text").to_owned();
    let holds = |_: &Path, bytes: &[u8]| String::from_utf8_lossy(bytes).contains(&secret);
    assert!(!files_with(home, holds).is_empty());
    let forgotten = halo_command(home, &["forget", "--all", "--yes", "--now"]).output().expect("halo runs");
    assert!(forgotten.status.success(), "{}", String::from_utf8_lossy(&forgotten.stderr));
    assert_eq!(files_with(home, holds), Vec::<std::path::PathBuf>::new());
    assert_eq!(rows(&memories(home, &["-c", "new"])).len(), 0, "copies are forgotten with their source");
    assert_eq!(rows(&memories(home, &["-c", "third"])).len(), 0);
}

/// Contradictions are listed and decided on the command line.
#[test]
fn memory_conflicts_are_listed_and_resolved() {
    let home = temp_dir();
    let home = home.path();
    chat(home, &[], &UNRELATED_MESSAGES[..12]);
    assert!(rows(&memories(home, &[])).len() >= 2);
    memories(home, &["edit", "1", "The door is open. The gun is old."]);
    memories(home, &["edit", "2", "The cat sleeps. The door is closed."]);
    let conflicts = memories(home, &["conflicts"]);
    let [conflict] = rows(&conflicts) else { panic!("{conflicts:#}") };
    assert_eq!((&conflict["first"], &conflict["second"]), (&Value::from(1), &Value::from(2)));
    assert_eq!(conflict["second_sentence"], "The door is closed.");
    let printed = halo_command(home, &["memories", "conflicts"]).output().expect("halo runs");
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    assert!(printed.contains("halo memories resolve 1 2 --keep first|second|both"), "{printed}");
    let resolved = memories(home, &["resolve", "1", "2", "--keep", "first"]);
    assert_eq!(rows(&resolved)[1]["retracted"], serde_json::json!(["The door is closed."]), "{resolved:#}");
    assert_eq!(rows(&memories(home, &["conflicts"])).len(), 0);
    let again = halo_command(home, &["memories", "resolve", "1", "2", "--keep", "both"]).output();
    assert_eq!(again.expect("halo runs").status.code(), Some(3), "there is no open conflict");
}
