//! The model reads its notes: a long file page by page, with the calls that each page names.

use halo_core::store::{RecordKind, Store};
use halo_core::testing::doubles::InMemoryStore;
use halo_engine::tools::jq::JqRunner;
use halo_engine::tools::{ToolCallResult, run_command};

fn call(store: &mut InMemoryStore, command: &str) -> ToolCallResult {
    run_command(command, &JqRunner::InProcess, 1_763_195_400_000, "main", store).expect("the store works")
}

/// A model that follows the calls that the results name reads every character of a long file.
#[test]
fn notes_of_any_length_are_read_page_by_page() {
    let mut store = InMemoryStore::default();
    let story: String = (0..900).map(|n| format!("line {n} of the story; ")).collect();
    let write = serde_json::json!([{ "op": "add", "path": "/topics/story", "value": story }]);
    let written = call(&mut store, &format!("patch notes.json {write}"));
    assert!(written.ok, "{}", written.result);
    let stored = store.records("main", RecordKind::Note).expect("the notes are read").remove(0).value;
    assert!(stored.contains(r#""last_modified":"2025-11-15T08:30:00.000Z""#), "{}", &stored[..200]);
    assert!(stored.contains(r#""created":"2025-11-15T08:30:00.000Z""#), "{}", &stored[..200]);

    let mut command = Some("jq '.' notes.json".to_owned());
    let mut read = String::new();
    while let Some(next) = command.take() {
        let page = call(&mut store, &next);
        assert!(page.ok, "{next}: {}", page.result);
        let (text, about) = page.result.rsplit_once(" (characters ").expect("a page of several");
        read.push_str(text);
        command = about.split_once("next: ").map(|(_, call)| call.trim_end_matches(')').to_owned());
    }
    assert_eq!(read, stored);
    assert!(read.contains("line 899 of the story"));

    let short = call(&mut store, "jq '.context' notes.json");
    assert_eq!((short.ok, short.result.as_str()), (true, "{}"));
    let behind = call(&mut store, "jq '.context' notes.json page 2");
    assert_eq!((behind.ok, behind.result.as_str()), (false, "the result has 1 page"));
}
