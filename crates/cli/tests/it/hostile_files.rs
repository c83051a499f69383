//! Exports and chats from elsewhere that are made to do harm. Each is refused in words, or does nothing.

use crate::common::{HaloOutput, chat_model, chat_once, embedder_setting, run_halo, temp_dir};
use halo_core::store::{Embedding, Store};
use halo_store::database::{Database, StoreLocation};
use serde_json::{Value, json};
use std::path::Path;

fn run_ok(data: &Path, args: &[&str]) -> HaloOutput {
    let run = run_halo(data, args);
    assert_eq!(run.status, 0, "{args:?}: {}{}", run.out, run.err);
    run
}

fn open_store(data: &Path) -> Database {
    Database::open(&StoreLocation::Sqlite(data.join("halo.db"))).expect("the store opens")
}

/// Imports a chat of two messages as `main`.
fn import_chat(folder: &Path, data: &Path, flags: &[&str]) {
    let messages = json!([
        { "role": "user", "content": "The old gun hangs above the fireplace in the hall." },
        { "role": "assistant", "content": "Then it will be fired in the last act of the play." },
    ]);
    let file = folder.join("chat.json");
    std::fs::write(&file, messages.to_string()).expect("written");
    run_ok(data, &[&["import", file.to_str().expect("UTF-8"), "-c", "main"], flags].concat());
}

/// A vector of another length than 1 counts as missing: it neither stops a command nor wins every search.
#[test]
fn hostile_embedding_vectors_count_as_missing() {
    let home = temp_dir();
    let (folder, data) = (home.path(), home.path().join("data"));
    let embedder = ["--set", &embedder_setting()];
    import_chat(folder, &data, &embedder);
    let file = folder.join("main.jsonl");
    run_ok(&data, &["export", "-c", "main", "-o", file.to_str().expect("UTF-8")]);
    let export = std::fs::read_to_string(&file).expect("the export");
    let lines = export.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let names = lines.filter_map(|line| Some(line["embedding"]["embedder"].as_str()?.to_owned()));
    let names: std::collections::BTreeSet<String> = names.collect();
    assert_eq!(names.len(), 2, "the vectors of chunks alone, and of chunks in context");
    let model = chat_model();
    let model = model.to_str().expect("UTF-8");
    for number in [3e38, 1e-40, 1e14] {
        let mut store = open_store(&data);
        for name in &names {
            let stored = store.embeddings("main", name).expect("the vectors");
            let forge = |e: Embedding| Embedding { vector: vec![number; e.vector.len()], ..e };
            let forged: Vec<Embedding> = stored.into_iter().map(forge).collect();
            assert!(!forged.is_empty());
            store.put_embeddings("main", name, &forged).expect("stored");
        }
        drop(store);
        let search = run_ok(&data, &[&["search", "weapon on the wall", "--json"], &embedder[..]].concat());
        let found: Value = serde_json::from_str(&search.out).expect("JSON");
        assert!(found["found"].is_array(), "{found}");
        run_ok(&data, &[&["doctor"], &embedder[..]].concat());
        run_ok(&data, &[&["doctor", "--fix"], &embedder[..]].concat());
        chat_once(&data, &[&["--model", model], &embedder[..]].concat(), "What is the weather like?");
        run_ok(&data, &[&["index"], &embedder[..]].concat());
        let search = run_ok(&data, &[&["search", "weapon on the wall", "--json"], &embedder[..]].concat());
        let found: Value = serde_json::from_str(&search.out).expect("JSON");
        assert_eq!(found["missing"], 0, "{number}: the vectors were computed again: {found}");
        let hits = found["found"].as_array().expect("a list");
        let near = |hit: &Value| hit["near"].as_f64().is_some_and(|near| near.abs() <= 1.001);
        assert!(hits.iter().any(|hit| hit["chunk"] == "u0.0") && hits.iter().all(near), "{number}: {found}");
    }
}
