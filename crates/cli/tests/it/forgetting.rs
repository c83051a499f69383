//! Context pressure, forgetting cycles and retention with the real binary and the real model.

use crate::common::{chat_model, embedder_setting, halo_command, temp_dir};
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// A window of 300 tokens that is filled completely: its pressure after a turn is near 1.
const FULL_WINDOW: [&str; 5] = [
    "context.max_tokens=300",
    "context.room_tokens=0",
    "context.recent_tokens=60",
    "generation.max_tokens=24",
    "chat.dates=false",
];

const LINES: [&str; 14] = [
    "My gun is called Betsy and it hangs on the wall above the fire.",
    "The cat sleeps on the sofa all day long, and at night it hunts.",
    "It rains in Lisbon today, and the trams are full of wet people.",
    "My sister plays the cello in an orchestra in the north of Wales.",
    "The train to Rome is late again, because of snow in the passes.",
    "I had soup for lunch, with bread, and a glass of cold water too.",
    "The garden needs water, and somebody should cut the old hedge.",
    "Our neighbour paints boats, and sells them at the Sunday market.",
    "The bakery closes at six, and on Saturdays it closes at noon.",
    "I read a book about bees, and another one about the stars.",
    "The clock in the hall is slow, and nobody dares to mend it.",
    "A letter came from Anna, who lives in a lighthouse by the sea.",
    "The bridge is closed until May, because the ice has damaged it.",
    "We planted apple trees along the road, and two of them died.",
];

fn model_command(data: &Path, args: &[&str], settings: &[&str]) -> Command {
    let mut command = halo_command(data, args);
    command.arg("--model").arg(chat_model());
    command.args(["--seed", "7", "--threads", "1", "--set", &embedder_setting()]);
    command.args(FULL_WINDOW.iter().chain(settings).flat_map(|setting| ["--set", setting]));
    command
}

/// Sends the lines with `halo chat`; returns standard error.
fn chat(data: &Path, conversation: &str, settings: &[&str], lines: &[&str]) -> String {
    let mut command = model_command(data, &["chat", "-c", conversation], settings);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("halo starts");
    let mut stdin = child.stdin.take().expect("stdin is piped");
    let text = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let output = child.wait_with_output().expect("halo exits");
    writer.join().expect("the writer does not panic").expect("halo reads stdin");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{error}");
    error
}

fn stats(data: &Path, args: &[&str]) -> String {
    let output = halo_command(data, &[&["stats"], args].concat()).output().expect("halo runs");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn stats_json(data: &Path) -> Vec<Value> {
    serde_json::from_str(&stats(data, &["--json", "-n", "0"])).expect("JSON")
}

/// The pressure of every turn is shown. Above 0.8 a cycle prunes at least a tenth of the window; below it nothing runs.
#[test]
fn forgetting_cycle_runs_above_the_pressure_threshold() {
    let home = temp_dir();
    let notices = chat(home.path(), "main", &[], &LINES);
    let turns = stats_json(home.path());
    assert_eq!(turns.len(), LINES.len());
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    for turn in &turns {
        let (pressure, cycle) = (number(&turn["pressure"]), &turn["forgetting"]);
        assert_eq!(turn["limit"], 300, "{turn}");
        assert!((pressure - number(&turn["live"]) / 300.0).abs() < 1e-9, "{turn}");
        assert_eq!(
            cycle.is_null(),
            pressure <= 0.8,
            "a cycle runs if and only if the pressure is high: {turn}"
        );
        if !cycle.is_null() {
            let (before, after) = (number(&cycle["initial_pressure"]), number(&cycle["final_pressure"]));
            assert!(
                (before - pressure).abs() < 1e-9 && after <= 0.8 && after <= before * 0.9 + 1e-9,
                "{turn}"
            );
            assert!(cycle["pruned"].as_u64() >= Some(1), "{turn}");
            assert_eq!(cycle["forgotten"], 0, "nothing is erased by default: {turn}");
        }
    }
    let cycles = turns.iter().filter(|turn| !turn["forgetting"].is_null()).count();
    assert!(cycles >= 2 && cycles < turns.len(), "{cycles} cycles in {turns:#?}");
    let last = turns.iter().rfind(|turn| !turn["forgetting"].is_null()).expect("a cycle");
    assert_eq!(last["forgetting"]["runs"], cycles);
    assert_eq!(notices.matches("context pressure ").count(), cycles, "{notices}");
    let table = stats(home.path(), &[]);
    assert!(table.contains(" pressure "), "{table}");
    assert_eq!(table.matches("forgetting cycle ").count(), cycles, "{table}");
    // Pruned text is still there: a cycle erases nothing.
    let shown = halo_command(home.path(), &["show", "--all"]).output().expect("halo runs");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    for line in LINES {
        assert!(shown.contains(line), "{line} is not in {shown}");
    }
}

#[test]
fn forgetting_cycle_is_off_by_setting() {
    let home = temp_dir();
    let notices = chat(home.path(), "main", &["lethe.cycle=false"], &LINES);
    let turns = stats_json(home.path());
    assert!(turns.iter().any(|turn| turn["pressure"].as_f64() > Some(0.8)), "{turns:#?}");
    assert!(turns.iter().all(|turn| turn["forgetting"].is_null()), "{turns:#?}");
    assert!(!notices.contains("pressure"), "{notices}");
}

/// Retention erases by age only with `lethe.enabled`; the conversation that is open is left for the next start.
#[test]
fn retention_erases_by_age_only_if_enabled() {
    let home = temp_dir();
    chat(home.path(), "old", &[], &LINES[..1]);
    let no_days = ["lethe.hot_days=0", "lethe.warm_days=0", "lethe.compost_days=0"];
    let text_of = |conversation: &str| {
        let shown = halo_command(home.path(), &["show", "--all", "-c", conversation]).output();
        String::from_utf8_lossy(&shown.expect("halo runs").stdout).into_owned()
    };
    chat(home.path(), "main", &no_days, &LINES[1..]);
    assert!(text_of("old").contains("Betsy"), "{}", text_of("old"));
    let enabled = [&no_days[..], &["lethe.enabled=true"]].concat();
    chat(home.path(), "other", &enabled, &LINES[1..2]);
    assert!(!text_of("old").contains("Betsy"), "{}", text_of("old"));
    assert!(!text_of("main").contains("Lisbon"), "{}", text_of("main"));
    assert!(text_of("other").contains("The cat sleeps"), "{}", text_of("other"));
}
