//! docs/REQUIREMENTS.md keeps its word: every requirement stands there once, and what is called done names a
//! file that exists and a test that exists in it. Prints how many of each there are.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// How many requirements each founding document has.
const REQUIREMENT_COUNTS: [(&str, u32); 5] = [("S0", 20), ("S1", 177), ("S2", 46), ("S3", 67), ("S4", 23)];

fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The cells of a table's row; a bar that is part of the text is escaped.
fn table_cells(line: &str) -> Vec<String> {
    let hidden = line.trim().trim_matches('|').replace("\\|", "\u{1}");
    hidden.split('|').map(|c| c.trim().trim_matches('`').replace('\u{1}', "|")).collect()
}

/// What is wrong with a line that is done or names a place, if anything is.
fn row_error(root: &Path, state: &str, place: &str, test: &str) -> Option<String> {
    let done = state == "done";
    if done && (place.is_empty() || test.is_empty()) {
        return Some("is done but does not say where, and which test shows it".into());
    }
    if !place.is_empty() && !root.join(place).exists() {
        return Some(format!("names {place}, which does not exist"));
    }
    if test.is_empty() {
        return None;
    }
    let Some((file, name)) = test.split_once("::") else {
        return Some(format!("names the test {test}, which is not FILE::NAME"));
    };
    let Ok(source) = std::fs::read_to_string(root.join(file)) else {
        return Some(format!("names a test in {file}, which does not exist"));
    };
    // A story is a test on every database that its list is run on.
    let stories = source
        .split("test_on_every_database!(")
        .nth(1)
        .and_then(|list| list.split(");").next())
        .unwrap_or_default();
    let story = stories.split(',').any(|story| story.trim() == name);
    // Those of the page and of other programs' clients are in Python.
    let python = file.ends_with(".py") && source.contains(&format!("\ndef {name}("));
    let declared = story
        || python
        || source.match_indices(&format!("fn {name}(")).any(|(at, _)| {
            let before = &source[..at];
            before.trim_end().ends_with("#[test]")
                || before.rsplit("\n\n").next().is_some_and(|b| b.contains("#[test]"))
        });
    (!declared).then(|| format!("names the test {name}, which is not in {file}"))
}

#[test]
fn requirements_ledger_names_existing_files_and_tests() {
    let root = repository_root();
    let text = std::fs::read_to_string(root.join("docs/REQUIREMENTS.md")).expect("the ledger");
    let mut states: BTreeMap<String, u32> = BTreeMap::new();
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    let mut faults = Vec::new();
    for line in text.lines().filter(|l| l.starts_with("| S")) {
        let row = table_cells(line);
        let [id, _, state, place, test] = row.as_slice() else {
            faults.push(format!("{line} has {} cells, not 5", row.len()));
            continue;
        };
        *seen.entry(id.clone()).or_default() += 1;
        let kind = state.split(':').next().unwrap_or_default();
        let explained = state.split_once(": ").is_some_and(|(_, why)| !why.is_empty());
        match kind {
            "done" | "not yet" => {}
            "partly" | "will not" if explained => {}
            _ => faults.push(format!(
                "{id} is '{state}': done, not yet, 'partly: why' and 'will not: why' are known"
            )),
        }
        *states.entry(kind.to_owned()).or_default() += 1;
        faults.extend(row_error(&root, state, place, test).map(|f| format!("{id} {f}")));
    }
    for (document, count) in REQUIREMENT_COUNTS {
        for n in 1..=count {
            let id = format!("{document}.{n}");
            let times = seen.remove(&id).unwrap_or(0);
            if times != 1 {
                faults.push(format!("{id} stands there {times} times"));
            }
        }
    }
    faults.extend(seen.keys().map(|id| format!("{id} is no requirement")));
    let counts: Vec<_> = states.iter().map(|(state, n)| format!("{n} {state}")).collect();
    println!("requirements: {}", counts.join(", "));
    assert!(faults.is_empty(), "{} faults in docs/REQUIREMENTS.md\n{}", faults.len(), faults.join("\n"));
}

/// The check itself can fail.
#[test]
fn requirements_check_reports_wrong_rows() {
    let root = repository_root();
    let here = "crates/cli/tests/it/requirements.rs";
    let found = |state, place, test: &str| row_error(&root, state, place, test);
    assert_eq!(
        found("done", here, &format!("{here}::requirements_ledger_names_existing_files_and_tests")),
        None
    );
    assert_eq!(found("not yet", "", ""), None);
    assert!(found("done", "", "").is_some());
    assert!(
        found(
            "done",
            "crates/none.rs",
            &format!("{here}::requirements_ledger_names_existing_files_and_tests")
        )
        .is_some()
    );
    assert!(found("done", here, &format!("{here}::no_such_test")).is_some());
    assert!(found("done", here, &format!("{here}::row_error")).is_some(), "a function that is no test");
    assert!(found("partly: a bit", here, "crates/none.rs::x").is_some());
    assert_eq!(
        table_cells("| S1.1 | a \\| b | done | `x` | `y::z` |"),
        ["S1.1", "a | b", "done", "x", "y::z"]
    );
}
