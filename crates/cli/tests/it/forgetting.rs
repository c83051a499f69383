//! Context pressure, forgetting cycles and retention with the real binary and the real model.

use crate::common::{UNRELATED_MESSAGES, halo_command, model_command, send_lines, temp_dir};
use serde_json::Value;
use std::path::Path;

/// A window of 300 tokens that is filled completely: its pressure after a turn is near 1.
const FULL_WINDOW: [&str; 4] = [
    "context.max_tokens=300",
    "context.room_tokens=0",
    "context.recent_tokens=60",
    "generation.max_tokens=24",
];

/// Sends the lines with `halo chat`; returns standard error.
fn chat(data: &Path, conversation: &str, settings: &[&str], lines: &[&str]) -> String {
    let mut command = model_command(data, &["chat", "-c", conversation]);
    command.args(FULL_WINDOW.iter().chain(settings).flat_map(|setting| ["--set", setting]));
    send_lines(&mut command, lines).err
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
    let notices = chat(home.path(), "main", &[], &UNRELATED_MESSAGES);
    let turns = stats_json(home.path());
    assert_eq!(turns.len(), UNRELATED_MESSAGES.len());
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
    for line in UNRELATED_MESSAGES {
        assert!(shown.contains(line), "{line} is not in {shown}");
    }
}

#[test]
fn forgetting_cycle_is_off_by_setting() {
    let home = temp_dir();
    let notices = chat(home.path(), "main", &["lethe.cycle=false"], &UNRELATED_MESSAGES);
    let turns = stats_json(home.path());
    assert!(turns.iter().any(|turn| turn["pressure"].as_f64() > Some(0.8)), "{turns:#?}");
    assert!(turns.iter().all(|turn| turn["forgetting"].is_null()), "{turns:#?}");
    assert!(!notices.contains("pressure"), "{notices}");
}

/// Retention erases by age only with `lethe.enabled`; the conversation that is open is left for the next start.
#[test]
fn retention_erases_by_age_only_if_enabled() {
    let home = temp_dir();
    chat(home.path(), "old", &[], &UNRELATED_MESSAGES[..1]);
    let no_days = ["lethe.hot_days=0", "lethe.warm_days=0", "lethe.compost_days=0"];
    let text_of = |conversation: &str| {
        let shown = halo_command(home.path(), &["show", "--all", "-c", conversation]).output();
        String::from_utf8_lossy(&shown.expect("halo runs").stdout).into_owned()
    };
    chat(home.path(), "main", &no_days, &UNRELATED_MESSAGES[1..]);
    assert!(text_of("old").contains("Betsy"), "{}", text_of("old"));
    let enabled = [&no_days[..], &["lethe.enabled=true"]].concat();
    chat(home.path(), "other", &enabled, &UNRELATED_MESSAGES[1..2]);
    assert!(!text_of("old").contains("Betsy"), "{}", text_of("old"));
    assert!(!text_of("main").contains("Lisbon"), "{}", text_of("main"));
    assert!(text_of("other").contains("The cat sleeps"), "{}", text_of("other"));
}
