//! Checks docs/clients.md: every test and every file that its tables name exists.

use crate::requirements::{repository_root, row_error};

/// A table of docs/clients.md: how its first line begins, the folder of files without one, the file of tests without one, and the
/// first column that names tests.
struct ClientTable {
    header: &'static str,
    folder: &'static str,
    file: &'static str,
    first_column: usize,
}

const TABLES: [ClientTable; 3] = [
    ClientTable {
        header: "| client | chat | stream | tools | structured output | embeddings | abort |",
        folder: "tests",
        file: "tests/test_clients.py",
        first_column: 1,
    },
    ClientTable {
        header: "| client | chat | stream | tools | structured output | embeddings | other |",
        folder: "tests",
        file: "tests/soak_clients.py",
        first_column: 1,
    },
    ClientTable {
        header: "| finding | now | seen in |",
        folder: "crates/server/tests/it",
        file: "",
        first_column: 2,
    },
];

/// The rows of a table, without its header.
fn rows<'a>(text: &'a str, table: &ClientTable) -> Vec<&'a str> {
    let lines = text.lines().skip_while(|line| !line.starts_with(table.header));
    lines.skip(2).take_while(|line| line.starts_with('|')).collect()
}

/// The tests that a cell names, as FILE::NAME, and its files, as FILE. A name without a file is in the file before it.
fn named(cell: &str, table: &ClientTable) -> Vec<String> {
    let mut file = table.file.to_owned();
    let mut found = Vec::new();
    // Every second piece is code.
    for code in cell.split('`').skip(1).step_by(2) {
        let word = code.split(' ').next().unwrap_or_default();
        let (path, test) = word.split_once("::").unwrap_or((word, ""));
        let is_file = path.ends_with(".rs") || path.ends_with(".py") || path.starts_with("scripts/");
        let is_name =
            |name: &str| name.contains('_') && name.chars().all(|c| c == '_' || c.is_ascii_lowercase());
        if is_file {
            file = if path.contains('/') { path.to_owned() } else { format!("{}/{path}", table.folder) };
            found.push(if test.is_empty() { file.clone() } else { format!("{file}::{test}") });
        } else if test.is_empty() && is_name(word) && (word.starts_with("test_") || table.file.is_empty()) {
            found.push(format!("{file}::{word}"));
        }
    }
    found
}

#[test]
fn client_tables_name_existing_tests() {
    let root = repository_root();
    let text = std::fs::read_to_string(root.join("docs/clients.md")).expect("docs/clients.md");
    let (mut errors, mut count) = (Vec::new(), 0);
    for table in &TABLES {
        let rows = rows(&text, table);
        assert!(rows.len() > 5, "{} has {} rows", table.header, rows.len());
        for row in rows {
            for cell in row.trim().trim_matches('|').split('|').skip(table.first_column) {
                for name in named(cell, table) {
                    count += 1;
                    let (path, test) = if name.contains("::") { ("", name.as_str()) } else { (&*name, "") };
                    errors.extend(row_error(&root, "", path, test).map(|error| format!("{error}: {row}")));
                }
            }
        }
    }
    assert!(errors.is_empty(), "{} errors in docs/clients.md\n{}", errors.len(), errors.join("\n"));
    assert!(count > 90, "only {count} names were found");
}

#[test]
fn client_tables_are_read_with_their_files() {
    let [first, _, last] = &TABLES;
    let cell = " `test_a`, `x.py::test_b`, `test_c` (`runTools`), `store: false`, `crates/a/b.rs::d_e` and `scripts/s text` ";
    assert_eq!(
        named(cell, first),
        [
            "tests/test_clients.py::test_a",
            "tests/x.py::test_b",
            "tests/x.py::test_c",
            "crates/a/b.rs::d_e",
            "scripts/s"
        ]
    );
    assert_eq!(
        named("`tools.rs`, `a_b`", last),
        ["crates/server/tests/it/tools.rs", "crates/server/tests/it/tools.rs::a_b"]
    );
    let root = repository_root();
    assert!(row_error(&root, "", "", "tests/test_clients.py::test_nothing").is_some());
    assert!(row_error(&root, "", "tests/nothing.py", "").is_some());
}
