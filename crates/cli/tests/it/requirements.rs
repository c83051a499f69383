//! Checks docs/REQUIREMENTS.md: every requirement has one row, and a row that is done names an existing file and a test
//! that the built test programs list, or pytest collects, and that is not skipped. A test that more than [`MAX_SHARED_ROWS`] rows name needs a reason in each of them.
//! Prints the number of rows by state.

use crate::built_tests::{BuiltTests, TestLookup, may_be_skipped};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// So many rows may name the same test without saying what it shows of each.
const MAX_SHARED_ROWS: usize = 5;

/// The number of requirements in each founding document.
const REQUIREMENT_COUNTS: [(&str, u32); 5] = [("S0", 20), ("S1", 184), ("S2", 49), ("S3", 76), ("S4", 26)];

pub fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The cells of a table row. A `|` inside a cell is escaped as `\|`.
fn table_cells(line: &str) -> Vec<String> {
    let escaped = line.trim().trim_matches('|').replace("\\|", "\u{1}");
    escaped.split('|').map(|c| c.trim().trim_matches('`').replace('\u{1}', "|")).collect()
}

/// `done`, `partly`, `not yet` or `will not`.
fn state_kind(state: &str) -> &str {
    state.split(':').next().unwrap_or_default()
}

/// Whether a state gives its reason, as in `done: REASON`.
fn has_reason(state: &str) -> bool {
    state.split_once(": ").is_some_and(|(_, reason)| !reason.trim().is_empty())
}

/// The first error of a row: it names no file or test, or one that does not exist.
pub fn row_error(root: &Path, state: &str, path: &str, test: &str) -> Option<String> {
    let done = state_kind(state) == "done";
    if done && (path.is_empty() || test.is_empty()) {
        return Some("is done but does not name its file and its test".into());
    }
    if !path.is_empty() && !root.join(path).exists() {
        return Some(format!("names {path}, which does not exist"));
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
    // The macro makes a test for every function in its list, on every database.
    let database_tests = source
        .split("test_on_every_database!(")
        .nth(1)
        .and_then(|list| list.split(");").next())
        .unwrap_or_default();
    let in_database_list = database_tests.split(',').any(|test| test.trim() == name);
    // The tests of the page and of API clients are in Python.
    let in_python = file.ends_with(".py") && source.contains(&format!("\ndef {name}("));
    let declared = in_database_list
        || in_python
        || source.match_indices(&format!("fn {name}(")).any(|(at, _)| {
            let before = &source[..at];
            let attributes = before.rsplit("\n\n").next().unwrap_or_default();
            attributes.contains("#[test]") || attributes.contains("#[tokio::test")
        });
    (!declared).then(|| format!("names the test {name}, which is not in {file}"))
}

/// The rows of a test that too many rows name, by id and state, and that do not say what the test shows of them.
fn sharing_error(test: &str, rows: &[(String, String)]) -> Option<String> {
    let silent: Vec<&str> =
        rows.iter().filter(|(_, state)| !has_reason(state)).map(|(id, _)| id.as_str()).collect();
    (rows.len() > MAX_SHARED_ROWS && !silent.is_empty()).then(|| {
        format!(
            "{} rows name {test}; these give no reason ('done: REASON'): {}",
            rows.len(),
            silent.join(", ")
        )
    })
}

#[test]
fn requirements_ledger_names_existing_files_and_tests() {
    let root = repository_root();
    let text = std::fs::read_to_string(root.join("docs/REQUIREMENTS.md")).expect("docs/REQUIREMENTS.md");
    let mut states: BTreeMap<String, u32> = BTreeMap::new();
    let mut row_counts: BTreeMap<String, u32> = BTreeMap::new();
    let mut rows_by_test: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    let mut errors = Vec::new();
    for line in text.lines().filter(|l| l.starts_with("| S")) {
        let row = table_cells(line);
        let [id, _, state, path, test] = row.as_slice() else {
            errors.push(format!("{line} has {} cells, not 5", row.len()));
            continue;
        };
        *row_counts.entry(id.clone()).or_default() += 1;
        let kind = state_kind(state);
        match kind {
            "done" | "not yet" => {}
            "partly" | "will not" if has_reason(state) => {}
            _ => errors.push(format!(
                "{id} is '{state}': it must be done, not yet, 'partly: REASON' or 'will not: REASON'"
            )),
        }
        *states.entry(kind.to_owned()).or_default() += 1;
        errors.extend(row_error(&root, state, path, test).map(|error| format!("{id} {error}")));
        if !test.is_empty() {
            rows_by_test.entry(test.clone()).or_default().push((id.clone(), state.clone()));
        }
    }
    let mut built = BuiltTests::beside_this_test();
    for (test, rows) in &rows_by_test {
        let ids = rows.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>().join(", ");
        match built.find(test) {
            TestLookup::Listed => {}
            TestLookup::Missing => errors.push(format!("{ids}: no built test program lists {test}")),
            TestLookup::Ignored => errors.push(format!("{ids}: {test} is ignored and does not run")),
            TestLookup::NotBuilt if std::env::var_os("HALO_ALL_TESTS_BUILT").is_some() => {
                errors.push(format!("{ids}: the test program of {test} is not built"));
            }
            TestLookup::NotBuilt => {}
        }
        errors.extend(sharing_error(test, rows));
    }
    for (document, count) in REQUIREMENT_COUNTS {
        for n in 1..=count {
            let id = format!("{document}.{n}");
            let rows = row_counts.remove(&id).unwrap_or(0);
            if rows != 1 {
                errors.push(format!("{id} has {rows} rows"));
            }
        }
    }
    errors.extend(row_counts.keys().map(|id| format!("{id} is not a requirement")));
    let counts: Vec<_> = states.iter().map(|(state, n)| format!("{n} {state}")).collect();
    println!("requirements: {}", counts.join(", "));
    assert!(errors.is_empty(), "{} errors in docs/REQUIREMENTS.md\n{}", errors.len(), errors.join("\n"));
}

/// The check rejects wrong rows.
#[test]
fn requirements_check_reports_wrong_rows() {
    let root = repository_root();
    let here = "crates/cli/tests/it/requirements.rs";
    let error = |state, path, test: &str| row_error(&root, state, path, test);
    assert_eq!(
        error("done", here, &format!("{here}::requirements_ledger_names_existing_files_and_tests")),
        None
    );
    assert_eq!(error("not yet", "", ""), None);
    assert!(error("done: with a reason", here, "").is_some(), "a reason does not replace the test");
    let rows = |count: usize, state: &str| vec![("S1.1".to_owned(), state.to_owned()); count];
    assert_eq!(sharing_error("a.rs::b", &rows(5, "done")), None);
    assert!(sharing_error("a.rs::b", &rows(6, "done")).is_some_and(|error| error.starts_with("6 rows")));
    assert_eq!(sharing_error("a.rs::b", &rows(6, "done: one case of it for each")), None);
    let mut built = BuiltTests::beside_this_test();
    assert_eq!(built.find(&format!("{here}::requirements_check_reports_wrong_rows")), TestLookup::Listed);
    assert_eq!(
        built.find(&format!("{here}::row_error")),
        TestLookup::Missing,
        "a function that is not a test"
    );
    let elsewhere = "crates/cli/tests/it/help.rs::requirements_check_reports_wrong_rows";
    assert_eq!(built.find(elsewhere), TestLookup::Missing, "a test of another file");
    assert_eq!(built.find("crates/none/tests/it/x.rs::y"), TestLookup::NotBuilt);
    let mut python = |name: &str| built.find(&format!("tests/{name}"));
    for (name, found) in [
        ("test_rooms.py::test_rooms_page", TestLookup::Listed),
        ("test_rooms.py::json_lines", TestLookup::Missing),
        ("test_rooms.py::test_mcp", TestLookup::Missing),
        ("test_firefox.py::SKIPPED", TestLookup::Missing),
    ] {
        let looked_up = python(name);
        assert!(looked_up == found || looked_up == TestLookup::NotBuilt, "{name}: {looked_up:?}");
    }
    let marked = "\n\n@pytest.mark.skipif(X, reason='')\ndef test_a(page):\n    pass\n\n\ndef test_b(page):\n    ok()\n";
    assert!(may_be_skipped(marked, "test_a") && !may_be_skipped(marked, "test_b"));
    let called = "\ndef test_a():\n    if x:\n\n        pytest.skip('')\n\n\ndef test_b():\n    ok()\n";
    assert!(may_be_skipped(called, "test_a") && !may_be_skipped(called, "test_b"));
    assert!(may_be_skipped("pytestmark = pytest.mark.skipif(\n", "test_a"));
    assert!(error("done", "", "").is_some());
    assert!(
        error(
            "done",
            "crates/none.rs",
            &format!("{here}::requirements_ledger_names_existing_files_and_tests")
        )
        .is_some()
    );
    assert!(error("done", here, &format!("{here}::no_such_test")).is_some());
    assert!(error("done", here, &format!("{here}::row_error")).is_some(), "a function that is not a test");
    assert!(error("partly: a bit", here, "crates/none.rs::x").is_some());
    assert_eq!(
        table_cells("| S1.1 | a \\| b | done | `x` | `y::z` |"),
        ["S1.1", "a | b", "done", "x", "y::z"]
    );
}
