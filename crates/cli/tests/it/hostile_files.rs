//! Exports and chats from elsewhere that are made to do harm. Each is refused in words, or does nothing.

use crate::common::{
    HaloOutput, chat_model, chat_once, embedder_setting, halo_command, run_halo, temp_dir, test_model_path,
};
use halo_core::store::{Embedding, RecordKind, Store};
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

/// An import names no recordings and schedules no forgetting, and says what it left out.
#[test]
fn hostile_export_deletes_no_files_and_schedules_no_forgetting() {
    let home = temp_dir();
    let (folder, data) = (home.path(), home.path().join("data"));
    import_chat(folder, &data, &["--no-index"]);
    let elsewhere = folder.join("elsewhere");
    std::fs::create_dir(&elsewhere).expect("created");
    for file in ["diary.txt", "meta.json", "steps.jsonl"] {
        std::fs::write(elsewhere.join(file), "dear diary").expect("written");
    }
    let mut store = open_store(&data);
    let paths = [elsewhere.to_str().expect("UTF-8"), "../elsewhere", "/"];
    for path in paths {
        store.put_record("main", RecordKind::Capture, path, Some("{\"turn\":0}")).expect("stored");
    }
    let pending = json!([{ "due": 1, "chunks": ["u0.0"], "hidden": ["u0.0"], "memories": [1], "named": [], "all": true, "begun": true }]);
    store
        .put_record("main", RecordKind::Setting, "lethe.pending", Some(&pending.to_string()))
        .expect("stored");
    let memory = json!({ "from": [0, 0], "to": [0, 0], "text": "A gun.", "formed": 0, "leaving": true });
    store.put_record("main", RecordKind::Memory, "1", Some(&memory.to_string())).expect("stored");
    drop(store);
    let file = folder.join("main.jsonl");
    run_ok(&data, &["export", "-c", "main", "-o", file.to_str().expect("UTF-8")]);

    let data = folder.join("other");
    let import = run_ok(&data, &["import", file.to_str().expect("UTF-8"), "--no-index"]);
    for part in ["not imported: recordings of attention", "(3)", "not imported: requests to forget", "(1)"] {
        assert!(import.out.contains(part), "{part}: {}", import.out);
    }
    run_ok(&data, &["forget", "--due"]);
    let mut store = open_store(&data);
    assert_eq!(store.records("main", RecordKind::Capture).expect("read"), []);
    assert_eq!(
        store
            .records("main", RecordKind::Setting)
            .expect("read")
            .iter()
            .filter(|r| r.key == "lethe.pending")
            .count(),
        0
    );
    drop(store);
    let shown = run_ok(&data, &["show", "--all"]).out;
    assert!(shown.contains("The old gun hangs above the fireplace"), "{shown}");
    let memories = run_ok(&data, &["memories"]).out;
    assert!(memories.contains("A gun."), "the memory is listed again: {memories}");
    run_ok(&data, &["forget", "--matching", "fireplace", "--now", "--yes"]);
    assert_eq!(std::fs::read_dir(&elsewhere).expect("the folder is there").count(), 3);
}

/// One message of 60 MB would take gigabytes as tokens: it is refused in bounded memory, and nothing is imported.
#[cfg(target_os = "linux")]
#[test]
fn import_refuses_message_of_many_megabytes() {
    let home = temp_dir();
    let (folder, data) = (home.path(), home.path().join("data"));
    let files = [
        ("chat.json", json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "x ".repeat(30 << 20) }]).to_string()),
        ("chat.jsonl", json!({ "user_name": "A", "character_name": "B" }).to_string() + "\n" + &json!({ "name": "A", "is_user": true, "mes": "x ".repeat(30 << 20) }).to_string()),
        ("chat.md", format!("## User\n\n{}\n", "x ".repeat(30 << 20))),
    ];
    for (name, content) in files {
        let file = folder.join(name);
        std::fs::write(&file, content).expect("written");
        let halo = halo_command(&data, &["import", file.to_str().expect("UTF-8"), "--no-index"]);
        let mut limited = std::process::Command::new("sh");
        limited
            .args(["-c", "ulimit -v 1500000 && exec \"$@\"", "sh"])
            .arg(halo.get_program())
            .args(halo.get_args());
        let output = limited.env("GOMP_SPINCOUNT", "1000").output().expect("it runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code().is_some_and(|code| code > 0)
                && error.contains("has 60 MiB, and a message may have 4 MiB"),
            "{name}: {:?} {error}",
            output.status
        );
        assert!(error.contains("message 2 of '") || error.contains("message 1 of '"), "{error}");
    }
    assert_eq!(run_ok(&data, &["conversations", "--json"]).out.trim(), "[]");
}

/// Records of every kind with values that no version of Halo wrote: the conversation is opened, shown and answered.
#[test]
fn hostile_records_do_not_stop_a_conversation() {
    let home = temp_dir();
    let (folder, data) = (home.path(), home.path().join("data"));
    import_chat(folder, &data, &["--no-index"]);
    let most = u64::MAX;
    let memory = json!({ "from": [0, 0], "to": [u32::MAX, u32::MAX], "text": "x".repeat(100_000), "formed": u32::MAX,
        "conflicts": [1, most], "left": ["u0.0", "a999.9", ""], "operations": ["x"], "pinned": true, "at": i64::MIN });
    let parent = json!({ "kv_key": "1\u{0}main", "shared_tokens": most, "name": "main", "turns": most });
    let mut values =
        ["", "x", "[", "null", "-1", "{}", "[[[]]]", "99999999999999999999", "\"u0.0\"", "[1, \"a\", {}]"]
            .map(str::to_owned)
            .to_vec();
    values.extend([
        memory.to_string(),
        parent.to_string(),
        json!([most, most]).to_string(),
        json!({ "temperature": -1e300, "top_p": 7, "max_tokens": 0, "repetition_penalty": 0 }).to_string(),
        json!({ "temperature": 1e300, "top_k": most, "min_p": 2, "max_tokens": most }).to_string(),
        "[".repeat(100_000),
    ]);
    let settings = [
        "template",
        "system",
        "running",
        "message.id",
        "lethe.times",
        "lethe.compost",
        "branch.parent",
        "memory.formed",
        "speakers",
        "imported.index",
        "imported.model",
        "sampling",
        "chosen_model",
        "forgetting.cycle",
        "prefill_speed",
        "lethe.pending",
        "",
    ];
    let keys = ["0", "1", "99999999999", "-1", "x", "notes.json", "u0.0"];
    let model = test_model_path("HALO_TEST_TINY_MODEL", "tiny-llama.gguf");
    let flags = [
        "--model",
        model.to_str().expect("UTF-8"),
        "--set",
        "tools.enabled=true",
        "--set",
        "memory.enabled=true",
        "--set",
        "context.max_tokens=2000",
    ];
    for value in &values {
        let mut store = open_store(&data);
        // A system prompt that fills the context is an error that says so.
        for key in settings.into_iter().filter(|key| *key != "system" || value.len() < 1000) {
            store.put_record("main", RecordKind::Setting, key, Some(value)).expect("stored");
        }
        for kind in RecordKind::ALL.into_iter().filter(|kind| *kind != RecordKind::Setting) {
            for key in keys {
                store.put_record("main", kind, key, Some(value)).expect("stored");
            }
        }
        drop(store);
        let copy = temp_dir();
        let file = copy.path().join("main.jsonl");
        run_ok(&data, &["export", "-c", "main", "-o", file.to_str().expect("UTF-8")]);
        let copied = copy.path().join("data");
        run_ok(&copied, &["import", file.to_str().expect("UTF-8"), "--no-index"]);
        chat_once(&copied, &flags, "Hello.");
        for command in [&["show", "--all"][..], &["stats"], &["memories"], &["search", "gun"], &["doctor"]] {
            run_ok(&copied, command);
        }
        let shown = run_ok(&copied, &["show", "--all", "--json"]).out;
        assert!(shown.contains("The old gun hangs above the fireplace"), "{value:.50}: {shown}");
    }
}
