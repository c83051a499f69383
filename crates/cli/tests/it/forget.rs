//! `halo forget` with the real binary: the tests look for the text in every file of the data folder.

use halo_core::store::{Access, RecordKind, Store};
use halo_store::database::{Database, StoreLocation};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// A word that no other text in the data folder contains.
const SECRET: &str = "Quokkatown";

fn run(data: &Path, args: &[&str]) -> crate::common::HaloOutput {
    crate::common::run_halo(data, args)
}

fn run_ok(data: &Path, args: &[&str]) -> String {
    let run = run(data, args);
    assert_eq!(run.status, 0, "{args:?}: {}", run.err);
    run.out
}

fn run_json(data: &Path, args: &[&str]) -> Value {
    serde_json::from_str(&run_ok(data, &[args, &["--json"]].concat())).expect("stdout is JSON only")
}

/// The files below a folder that contain these bytes.
fn files_with(folder: &Path, bytes: &[u8]) -> Vec<PathBuf> {
    crate::common::files_with(folder, |_, content| content.windows(bytes.len()).any(|part| part == bytes))
}

/// The subject of the proofs of a conversation.
fn proof_subject(data: &Path, name: &str) -> String {
    let conversations = run_json(data, &["conversations"]);
    let row = conversations.as_array().expect("rows").iter().find(|row| row["name"] == name).cloned();
    format!("conversation {}", row.expect("the conversation")["id"].as_str().expect("an id"))
}

/// Sends each line to the real model and captures the attention.
fn chat_and_capture(data: &Path, lines: &[&str]) {
    let captures = data.join("records");
    let captures = captures.to_str().expect("UTF-8");
    let mut command = crate::common::model_command(data, &["capture", "-o", captures]);
    crate::common::send_lines(command.args(["--set", "generation.max_tokens=8"]), lines);
}

#[test]
fn forget_removes_text_from_every_file() {
    let home = crate::common::temp_dir();
    let data = home.path();
    let message = format!("I live in {SECRET} and tell nobody.");
    chat_and_capture(data, &["Good morning.", &message, "And now something about tea."]);
    // The line editor stores typed messages in its own history file.
    std::fs::write(data.join("chat_history.txt"), format!("#V2\nGood morning.\n{message}\n"))
        .expect("the file is written");
    assert!(files_with(data, SECRET.as_bytes()).len() > 1, "the message is stored");
    let capture = |n: u32| data.join("records").join(format!("turn-{n}"));
    assert!(capture(1).exists() && capture(3).exists());
    // KV archive files hold no text to search for, so the test counts them.
    let kv_files = || {
        std::fs::read_dir(data.join("kv")).map_or(0, |models| {
            models
                .filter_map(Result::ok)
                .flat_map(|model| std::fs::read_dir(model.path()).into_iter().flatten())
                .count()
        })
    };
    assert!(kv_files() > 0);

    // A dry run and a call without --yes forget nothing.
    let dry_run = run_json(data, &["forget", "--matching", "quokkaTOWN", "--dry-run"]);
    assert!(dry_run.as_array().expect("a list").iter().any(|row| row["chunk"] == "u2.0"), "{dry_run:#}");
    let unconfirmed = run(data, &["forget", "--matching", SECRET, "--now"]);
    assert!(
        unconfirmed.status == 1 && unconfirmed.err.contains("nothing was forgotten"),
        "{}",
        unconfirmed.err
    );
    assert!(!files_with(data, SECRET.as_bytes()).is_empty());

    run_ok(data, &["forget", "--matching", SECRET, "--now", "--yes"]);
    assert_eq!(files_with(data, SECRET.as_bytes()), Vec::<PathBuf>::new());
    let history = std::fs::read_to_string(data.join("chat_history.txt")).expect("the file is readable");
    assert_eq!(history, "#V2\nGood morning.\n");
    assert!(capture(1).exists() && !capture(3).exists(), "captures since turn 3 may contain the message");
    assert_eq!(kv_files(), 0);
    let export = data.join("export.jsonl");
    run_ok(data, &["export", "-o", export.to_str().expect("UTF-8")]);
    assert_eq!(files_with(data, SECRET.as_bytes()), Vec::<PathBuf>::new(), "the export omits the message");

    // Everything else is unchanged: the store passes its checks and the conversation continues.
    run_ok(data, &["doctor"]);
    let rows = run_json(data, &["show", "--all"]);
    let texts: Vec<&str> =
        rows.as_array().expect("rows").iter().filter_map(|row| row["text"].as_str()).collect();
    assert!(texts.contains(&"Good morning."), "{texts:?}");
    let forgotten = rows.as_array().expect("rows").iter().filter(|row| row["forgotten"] == true);
    assert_eq!(forgotten.map(|row| row["chunk"].as_str()).collect::<Vec<_>>(), [Some("u2.0")]);
    let shown = run_ok(data, &["show", "--all"]);
    assert!(shown.contains("  forgotten\n") && !shown.contains("waiting to be forgotten"), "{shown}");
    let restored = run(data, &["undelete", "u2.0"]);
    assert!(restored.status == 2 && restored.err.contains("forgotten for good"), "{}", restored.err);
    chat_and_capture(data, &["Where do I live?"]);
    run_ok(data, &["doctor"]);

    // The proof verifies with its own key and with no other.
    let proofs = run_json(data, &["forget", "--proofs"]);
    let proofs = proofs.as_array().expect("a list");
    let subject = format!("{} u2.0", proof_subject(data, "main"));
    assert!(proofs.iter().any(|p| p["subject"] == subject.as_str()), "{proofs:?}");
    assert!(proofs.iter().all(|p| p["sound"] == true && p["by"] == "the user's wish"));
    std::fs::write(data.join("lethe.key"), "00".repeat(32)).expect("the file is written");
    let forged = run_json(data, &["forget", "--proofs"]);
    assert!(forged.as_array().expect("a list").iter().all(|p| p["sound"] == false));
}

/// Imports a conversation of four messages that is this many days old.
fn import_conversation(data: &Path, name: &str, days: i64) {
    let at = jiff::Timestamp::now() - jiff::SignedDuration::from_hours(24 * days);
    let message = |n: usize| {
        let sender = if n.is_multiple_of(2) { "human" } else { "assistant" };
        format!(r#"{{"uuid":"{n}","text":"{name} says {n}","sender":"{sender}","created_at":"{at}"}}"#)
    };
    let messages: Vec<String> = (0..4).map(message).collect();
    let text = format!(
        r#"[{{"uuid":"k","name":"{name}","created_at":"{at}","chat_messages":[{}]}}]"#,
        messages.join(",")
    );
    let file = data.join(format!("{name}.json"));
    std::fs::write(&file, text).expect("the file is written");
    run_ok(data, &["import", file.to_str().expect("UTF-8"), "-c", name]);
    std::fs::remove_file(file).expect("the file is removed");
}

#[test]
fn forget_by_age_passes_retention_stages() {
    let home = crate::common::temp_dir();
    let data = home.path();
    for (name, days) in [("hot", 3), ("warm", 100), ("compost", 400), ("ancient", 800)] {
        import_conversation(data, name, days);
    }
    let is_stored = |name: &str| !files_with(data, format!("{name} says").as_bytes()).is_empty();
    let dry_run = run_json(data, &["forget", "--by-age", "--dry-run"]);
    let turns: Vec<(&str, usize)> = (dry_run.as_array().expect("rows").iter())
        .map(|row| {
            (row["conversation"].as_str().expect("a name"), row["turns"].as_array().expect("turns").len())
        })
        .collect();
    assert_eq!(turns, [("ancient", 4), ("compost", 4), ("hot", 0), ("warm", 0)]);
    assert!(is_stored("ancient") && is_stored("compost"));
    let unconfirmed = run(data, &["forget", "--by-age"]);
    assert!(
        unconfirmed.status == 1 && unconfirmed.err.contains("nothing was forgotten") && is_stored("ancient"),
        "{}",
        unconfirmed.err
    );
    let done = run_json(data, &["forget", "--by-age", "--yes"]);
    assert_eq!(done["forgotten"], 8);
    assert_eq!(["hot", "warm", "compost", "ancient"].map(is_stored), [true, true, false, false]);
    // Text older than a year leaves statistics, the compost stage; text older than two years leaves nothing.
    let export = |name: &str| run_ok(data, &["export", "-c", name]);
    assert!(export("compost").contains("lethe.compost"), "{}", export("compost"));
    assert!(!export("ancient").contains("lethe.compost"));
    assert_eq!(
        run_json(data, &["forget", "--by-age", "--yes"])["forgotten"],
        0,
        "nothing is forgotten twice"
    );
    let proofs = run_json(data, &["forget", "--proofs"]);
    assert!(proofs.as_array().expect("a list").iter().all(|p| p["by"] == "its age" && p["sound"] == true));
    run_ok(data, &["doctor"]);
}

#[test]
fn forget_has_grace_period() {
    let home = crate::common::temp_dir();
    let data = home.path();
    import_conversation(data, "main", 1);
    let live = |data: &Path| run_json(data, &["show"]).as_array().expect("rows").len();
    let before = live(data);
    run_ok(data, &["forget", "--turns", "0-1", "--yes"]);
    assert_eq!(live(data), before - 2, "the chunks are hidden at once");
    assert!(!files_with(data, b"main says 0").is_empty(), "the text is still stored");
    assert_eq!(run_json(data, &["forget", "--due"])["forgotten"], 0);
    assert_eq!(run_json(data, &["forget", "--cancel"])["kept"], 2);
    assert_eq!(live(data), before, "restored");
    // An undeleted chunk is not pending any more.
    run_ok(data, &["forget", "u0.0", "--yes"]);
    run_ok(data, &["undelete", "u0.0"]);
    assert_eq!(run_json(data, &["forget", "--cancel"])["kept"], 0, "nothing is pending");
    assert_eq!(live(data), before);
    // A pending chunk can be forgotten at once; then nothing is left to cancel.
    run_ok(data, &["forget", "a1.0", "--yes"]);
    run_ok(data, &["forget", "a1.0", "--yes", "--now"]);
    assert_eq!(run_json(data, &["forget", "--cancel"])["kept"], 0);
    assert!(files_with(data, b"main says 1").is_empty());
    run_ok(data, &["forget", "u0.0", "--yes", "--set", "lethe.grace_days=0"]);
    assert!(files_with(data, b"main says 0").is_empty() && !files_with(data, b"main says 2").is_empty());
    for (status, args, message) in [
        (1, vec!["forget"], "nothing is selected"),
        (3, vec!["forget", "u99.0", "--yes", "--now"], "there is no chunk u99.0"),
        (3, vec!["forget", "--turn", "99", "--yes"], "there is no turn 99"),
        (1, vec!["forget", "--matching", "zebra", "--yes"], "nothing matches"),
        (1, vec!["forget", "--everywhere", "--all", "--yes"], "--everywhere goes with --matching"),
        (3, vec!["forget", "-c", "nowhere", "--all", "--yes"], "there is no conversation"),
    ] {
        let run = run(data, &args);
        assert!(run.status == status && run.err.contains(message), "{args:?}: {}", run.err);
    }
    let subject = proof_subject(data, "main");
    run_ok(data, &["forget", "--all", "--yes", "--now"]);
    assert!(files_with(data, b"main says").is_empty());
    assert_eq!(run_json(data, &["conversations"]).as_array().expect("rows").len(), 0);
    let proofs = run_json(data, &["forget", "--proofs"]);
    let last = proofs.as_array().and_then(|list| list.last()).expect("a proof").clone();
    assert!(last["subject"].as_str().is_some_and(|last| last.starts_with(&subject)), "{last}");
}

/// Stores a memory as if the model had formed it from turns 0 to `to`.
fn write_memory(data: &Path, name: &str, id: u32, text: &str, to: u32) {
    let mut store = Database::open(&StoreLocation::Sqlite(data.join("halo.db"))).expect("the store opens");
    store.load(name, Access::Write).expect("the conversation is writable");
    let value = serde_json::json!({ "from": [0, 0], "to": [to, 0], "text": text, "model": "m", "formed": 3, "at": 5 });
    store
        .put_record(name, RecordKind::Memory, &format!("{id:08}"), Some(&value.to_string()))
        .expect("the memory is stored");
}

/// Pending chunks and the memories formed from them are hidden. Cancelling restores them unchanged.
#[test]
fn forget_pending_text_is_hidden_and_can_be_cancelled() {
    let home = crate::common::temp_dir();
    let data = home.path();
    import_conversation(data, "other", 1);
    write_memory(data, "other", 1, "Of the first message.", 0);
    write_memory(data, "other", 2, "Of all of it, with a Zanzibar that nobody said.", 3);
    let memory_ids = |args: &[&str]| {
        let memories = run_json(data, &[&["memories", "-c", "other"], args].concat());
        memories.as_array().expect("a list").iter().filter_map(|m| m["id"].as_u64()).collect::<Vec<_>>()
    };
    let texts = || {
        let rows = run_json(data, &["show", "-c", "other", "--all"]);
        let rows = rows.as_array().expect("rows").clone();
        rows.iter().filter_map(|row| row["text"].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };

    // A dry run lists chunks and memories.
    let dry_run = run_json(data, &["forget", "-c", "other", "u2.0", "--dry-run"]);
    let names: Vec<(Option<&str>, Option<u64>)> = dry_run
        .as_array()
        .expect("rows")
        .iter()
        .map(|row| (row["chunk"].as_str(), row["memory"].as_u64()))
        .collect();
    assert_eq!(names, [(Some("u2.0"), None), (None, Some(2))]);
    run_ok(data, &["forget", "-c", "other", "u2.0", "--yes"]);
    assert_eq!((memory_ids(&[]), memory_ids(&["--find", "Zanzibar"])), (vec![1], vec![]));
    assert_eq!(texts(), ["other says 0", "other says 1", "", "other says 3"]);
    assert!(!run_ok(data, &["why", "-c", "other", "u2.0"]).contains("other says 2"));
    let pending = run_json(data, &["forget", "--pending"]);
    assert_eq!(
        (pending[0]["chunks"][0].as_str(), pending[0]["memories"][0].as_u64()),
        (Some("u2.0"), Some(2))
    );

    // Only pending chunks can be cancelled. Without -c, --cancel applies to every conversation.
    for (args, message) in [
        (["forget", "-c", "other", "--cancel", "u99.0"], "there is no chunk u99.0"),
        (["forget", "-c", "other", "--cancel", "u0.0"], "nothing of u0.0 is pending"),
    ] {
        let run = run(data, &args);
        assert!(run.status == 3 && run.err.contains(message), "{args:?}: {}", run.err);
    }
    let cancelled = run_json(data, &["forget", "--cancel"]);
    assert_eq!((&cancelled["kept"], &cancelled["memories"]), (&1.into(), &1.into()));
    assert_eq!((memory_ids(&[]), texts()[2].as_str()), (vec![1, 2], "other says 2"));

    // One of two pending chunks is cancelled: a memory that was also formed from the other stays pending.
    run_ok(data, &["forget", "-c", "other", "--turns", "1-2", "--yes"]);
    run_ok(data, &["forget", "-c", "other", "--cancel", "u2.0"]);
    assert_eq!((memory_ids(&[]), texts()[1].as_str(), texts()[2].as_str()), (vec![1], "", "other says 2"));
    run_ok(data, &["forget", "--cancel"]);
    assert_eq!(memory_ids(&[]), [1, 2]);

    // --matching finds whole words, also in memories. For a part of a word the error lists the longer words.
    let dry_run = run_json(data, &["forget", "-c", "other", "--matching", "zanzibar", "--dry-run"]);
    assert_eq!(
        (dry_run.as_array().map(Vec::len), dry_run[0]["memory"].as_u64()),
        (Some(1), Some(2)),
        "{dry_run}"
    );
    let part = run(data, &["forget", "-c", "other", "--matching", "zanzi", "--dry-run"]);
    assert!(part.status == 1 && part.err.contains("nothing matches"), "{}", part.err);
    let part = run(data, &["forget", "-c", "other", "--matching", "oth", "--dry-run"]);
    assert!(part.status == 1 && part.err.contains("longer words contain it: other"), "{}", part.err);
    let both = run_json(data, &["forget", "-c", "other", "--turn", "1", "--matching", "other", "--dry-run"]);
    assert_eq!(both[0]["chunk"].as_str(), Some("a1.0"), "--matching narrows --turn: {both}");
    assert!(both.as_array().expect("rows").iter().all(|row| row["chunk"] != "u0.0"));
    run_ok(data, &["forget", "-c", "other", "--matching", "Zanzibar", "--now", "--yes"]);
    assert!(files_with(data, b"Zanzibar").is_empty() && !files_with(data, b"other says 3").is_empty());
    let proofs = run_json(data, &["forget", "--proofs", "-c", "other"]);
    assert_eq!(proofs[0]["subject"], format!("{} memory 2", proof_subject(data, "other")));
    assert_eq!(run_json(data, &["forget", "--proofs", "-c", "main"]).as_array().map(Vec::len), Some(0));
}

/// Sets the due time of all pending requests to the past, runs `forget --due` and returns how many chunks it forgot.
fn expire_grace_period(data: &Path, name: &str) -> u64 {
    let mut store = Database::open(&StoreLocation::Sqlite(data.join("halo.db"))).expect("the store opens");
    let records = store.records(name, RecordKind::Setting).expect("the settings are readable");
    let record = records.iter().find(|record| record.key == "lethe.pending").expect("a pending request");
    let mut pending: Value = serde_json::from_str(&record.value).expect("JSON");
    pending.as_array_mut().expect("a list").iter_mut().for_each(|request| request["due"] = 1.into());
    store.load(name, Access::Write).expect("the conversation is writable");
    store
        .put_record(name, RecordKind::Setting, "lethe.pending", Some(&pending.to_string()))
        .expect("the setting is stored");
    drop(store);
    run_json(data, &["forget", "--due"])["forgotten"].as_u64().expect("a number")
}

/// After the grace period exactly the requested chunks and memories are forgotten.
#[test]
fn forget_executes_exactly_what_was_requested() {
    let is_stored = |data: &Path, text: &str| !files_with(data, text.as_bytes()).is_empty();
    // --all also deletes a conversation of which a part was forgotten before.
    let home = crate::common::temp_dir();
    let data = home.path();
    import_conversation(data, "main", 1);
    run_ok(data, &["forget", "u0.0", "--yes", "--now"]);
    run_ok(data, &["forget", "--all", "--yes"]);
    expire_grace_period(data, "main");
    assert_eq!(run_json(data, &["conversations"]).as_array().map(Vec::len), Some(0));

    // Undeleting a pending chunk cancels the request for the chunk and for its memories.
    import_conversation(data, "main", 1);
    write_memory(data, "main", 1, "Of all of it.", 3);
    run_ok(data, &["delete", "a3.0"]);
    run_ok(data, &["forget", "a3.0", "--yes"]);
    assert_eq!(run_json(data, &["memories"]).as_array().map(Vec::len), Some(0));
    run_ok(data, &["undelete", "a3.0"]);
    assert_eq!(run_json(data, &["memories"]).as_array().map(Vec::len), Some(1), "the memory is restored too");
    assert!(run_json(data, &["forget", "--pending"]).as_array().is_some_and(Vec::is_empty));

    // A memory formed after the request was not formed from the pending chunk and stays. A memory that contains the
    // matched word is forgotten.
    run_ok(data, &["forget", "u2.0", "--yes"]);
    write_memory(data, "main", 7, "Formed since.", 3);
    write_memory(data, "main", 8, "Mentions a walrus.", 0);
    run_ok(data, &["forget", "--matching", "walrus", "--yes"]);
    run_ok(data, &["forget", "a1.0", "--yes"]);
    let pending = run_json(data, &["forget", "--pending"]);
    assert_eq!(pending.as_array().map(Vec::len), Some(3), "{pending}");
    assert_eq!(pending[2]["memories"], serde_json::json!([7]), "memory 7 may be formed from a1.0");
    run_ok(data, &["forget", "--cancel", "a1.0"]);
    assert_eq!(expire_grace_period(data, "main"), 1);
    let memories = run_json(data, &["memories"]);
    let ids: Vec<u64> =
        memories.as_array().expect("a list").iter().filter_map(|m| m["id"].as_u64()).collect();
    assert_eq!(ids, [7]);
    assert!(!is_stored(data, "walrus") && !is_stored(data, "main says 2") && is_stored(data, "main says 1"));
    run_ok(data, &["doctor"]);

    // A pending memory can be forgotten at once.
    write_memory(data, "main", 9, "Mentions a heron.", 0);
    run_ok(data, &["forget", "--matching", "heron", "--yes"]);
    run_ok(data, &["forget", "--matching", "Heron", "--yes", "--now"]);
    assert!(!is_stored(data, "heron"));
    // Flags that do not go together are rejected.
    for args in [
        vec!["forget", "--by-age", "-c", "main", "--yes"],
        vec!["forget", "--due", "--dry-run"],
        vec!["forget", "--due", "u1.0"],
        vec!["forget", "--pending", "u1.0"],
        vec!["forget", "--cancel", "--matching", "x"],
    ] {
        assert_eq!(run(data, &args).status, 2, "{args:?}");
    }
}

/// `--matching` finds whole words in any script.
#[test]
fn forget_matching_finds_whole_words_in_any_script() {
    let home = crate::common::temp_dir();
    let data = home.path();
    let file = data.join("words.part");
    for (content, words, matches) in [
        ("Wir fahren nach İstanbul.", "istanbul", true),
        ("Wir fahren nach İstanbul.", "İstanbul", true),
        ("Η ΟΔΟΣ είναι κλειστή.", "οδος", true),
        ("We saw New\nYork.", "new york", true),
        ("הם גרים בעדן", "דן", false),
        ("我住在北京市", "北京", true),
        ("the cats", "cat", false),
        ("the cat's bowl", "CAT", true),
        ("C++ is hard", "c++", true),
    ] {
        let conversation = serde_json::json!({ "messages": [{ "role": "user", "content": content }] });
        std::fs::write(&file, conversation.to_string()).expect("the file is written");
        let name = format!("{words}{matches}");
        let path = data.join("words.json");
        std::fs::rename(&file, &path).expect("the file is moved");
        run_ok(data, &["import", path.to_str().expect("UTF-8"), "-c", &name]);
        let run = run(data, &["forget", "-c", &name, "--matching", words, "--dry-run", "--json"]);
        assert_eq!(run.status == 0, matches, "{words} in {content}: {}{}", run.out, run.err);
    }
}

/// `--all` does not forget a turn that was undeleted during the grace period, nor the conversation it belongs to.
#[test]
fn forget_all_keeps_what_was_undeleted_during_grace_period() {
    let home = crate::common::temp_dir();
    let data = home.path();
    import_conversation(data, "main", 1);
    run_ok(data, &["forget", "--all", "--yes"]);
    // Undeleting a message undeletes its answer.
    run_ok(data, &["undelete", "u2.0"]);
    assert_eq!(expire_grace_period(data, "main"), 2);
    let is_stored = |n: u32| !files_with(data, format!("main says {n}").as_bytes()).is_empty();
    assert_eq!([0, 1, 2, 3].map(is_stored), [false, false, true, true]);
    assert_eq!(run_json(data, &["conversations"]).as_array().map(Vec::len), Some(1));
}

/// Memories are searched across conversations and edited without a model.
#[test]
fn memories_are_found_and_edited_across_conversations() {
    let home = crate::common::temp_dir();
    let data = home.path();
    for name in ["one", "two"] {
        import_conversation(data, name, 1);
        let text = if name == "one" {
            "The grandfather carved it. The door is open."
        } else {
            "Tea was made. The door is closed."
        };
        write_memory(data, name, 1, text, 1);
    }
    let found = run_json(data, &["memories", "--all", "--find", "who carved it?"]);
    assert_eq!(
        (found[0]["conversation"].as_str(), found.as_array().map(Vec::len)),
        (Some("one"), Some(1)),
        "{found:#}"
    );
    assert_eq!(run_json(data, &["memories", "--all"]).as_array().map(Vec::len), Some(2));
    let pinned = run_json(data, &["memories", "-c", "one", "pin", "1"]);
    assert_eq!((&pinned["pinned"], &pinned["edited"]), (&Value::Bool(true), &Value::Bool(false)));
    let edited = run_json(data, &["memories", "-c", "one", "edit", "1", "He carved it in 1931."]);
    assert_eq!(
        (edited["text"].as_str(), &edited["edited"]),
        (Some("He carved it in 1931."), &Value::Bool(true))
    );
    assert!(run_ok(data, &["memories", "-c", "one"]).contains("turns 0 to 1 (pinned, edited)"));
    let ambiguous = run(data, &["memories", "--all", "pin", "1"]);
    assert!(ambiguous.status == 1 && ambiguous.err.contains("name its conversation"), "{}", ambiguous.err);
    let missing = run(data, &["memories", "disable", "7", "-c", "one"]);
    assert!(missing.status == 3 && missing.err.contains("there is no memory 7"), "{}", missing.err);
    // Forgetting a chunk forgets the memories formed from it.
    run_ok(data, &["forget", "-c", "one", "u0.0", "--now", "--yes"]);
    assert_eq!(run_json(data, &["memories", "-c", "one"]).as_array().map(Vec::len), Some(0));
    run_ok(data, &["memories", "-c", "two", "delete", "1"]);
    assert_eq!(run_json(data, &["memories", "--all"]).as_array().map(Vec::len), Some(0));
}

/// Imports a conversation of one message and its answer.
fn import_exchange(data: &Path, name: &str, message: &str) {
    let messages = serde_json::json!([
        { "role": "user", "content": message }, { "role": "assistant", "content": "Then good luck." },
    ]);
    let file = data.join("exchange.json");
    std::fs::write(&file, serde_json::json!({ "messages": messages }).to_string())
        .expect("the file is written");
    run_ok(data, &["import", file.to_str().expect("UTF-8"), "-c", name]);
    std::fs::remove_file(file).expect("the file is removed");
}

fn conversation_names(data: &Path) -> Vec<String> {
    let rows = run_json(data, &["conversations"]);
    rows.as_array().expect("rows").iter().filter_map(|row| row["name"].as_str().map(str::to_owned)).collect()
}

/// The name of a conversation is forgotten with the text that it was made of, and with words that it contains; any other name
/// stays.
#[test]
fn forget_renames_conversations_that_are_named_after_the_text() {
    let message = format!("My diagnosis is {SECRET} syndrome, tell nobody at all about it.");
    let title: String = message.chars().take(48).collect();
    for (name, args, is_renamed) in [
        (title.as_str(), vec!["u0.0"], true),
        (title.as_str(), vec!["--matching", SECRET], true),
        (title.as_str(), vec!["a1.0"], false),
        (&format!("{title} · branch 2"), vec!["--turn", "0"], true),
        ("diary", vec!["--turn", "0"], false),
        ("Notes on Quokkatown", vec!["--matching", SECRET], true),
        ("Notes on Quokkatown", vec!["u0.0"], false),
    ] {
        let home = crate::common::temp_dir();
        let data = home.path();
        import_exchange(data, name, &message);
        // The proofs of an earlier version name the conversation.
        run_ok(data, &["forget", "-c", name, "a1.0", "--now", "--yes"]);
        let log = data.join("forgotten.jsonl");
        let proofs = std::fs::read_to_string(&log).expect("proofs");
        std::fs::write(&log, proofs.replace(&proof_subject(data, name), name)).expect("the file is written");
        if args == ["a1.0"] {
            assert_eq!(conversation_names(data), [name]);
            continue;
        }
        let report = run(data, &[&["forget", "-c", name, "--now", "--yes"], args.as_slice()].concat());
        assert_eq!(report.status, 0, "{name} {args:?}: {}", report.err);
        assert_eq!(report.err.contains("named after the erased text"), is_renamed, "{}", report.err);
        let names = conversation_names(data);
        assert_eq!(names.len(), 1);
        assert_eq!(names[0] != name, is_renamed, "{name} {args:?}: {names:?}");
        if is_renamed {
            assert!(names[0].starts_with("chat 20"), "{names:?}");
            assert_eq!(files_with(data, SECRET.as_bytes()), Vec::<PathBuf>::new(), "{name} {args:?}");
            let proofs = std::fs::read_to_string(&log).expect("proofs");
            assert_eq!(proofs.matches(&proof_subject(data, &names[0])).count(), 2, "{proofs}");
        }
        run_ok(data, &["doctor"]);
    }
}

/// A data folder that was copied forgets its own recordings, and leaves those of the folder that it was copied from.
#[test]
fn forget_in_a_copied_folder_deletes_its_own_captures() {
    let home = crate::common::temp_dir();
    let [original, copy, elsewhere] = ["original", "copy", "elsewhere"].map(|name| home.path().join(name));
    std::fs::create_dir(&original).expect("the folder is created");
    import_exchange(&original, "main", &format!("I live in {SECRET}."));
    let write_capture = |folder: &Path| {
        std::fs::create_dir_all(folder).expect("the folder is created");
        for file in ["capture.json", "steps.jsonl"] {
            std::fs::write(folder.join(file), SECRET).expect("the file is written");
        }
        folder.display().to_string()
    };
    let notes = [
        write_capture(&original.join("captures/12ab/turn-1")),
        write_capture(&original.join("records/turn-1")),
        write_capture(&elsewhere.join("turn-1")),
    ];
    let location = StoreLocation::Sqlite(original.join("halo.db"));
    let mut store = Database::open(&location).expect("the store opens");
    for note in &notes {
        store
            .put_record("main", RecordKind::Capture, note, Some(r#"{"turn":1}"#))
            .expect("the note is stored");
    }
    drop(store);
    let status = std::process::Command::new("cp").arg("-a").args([&original, &copy]).status();
    assert!(status.is_ok_and(|status| status.success()), "the folder is copied");

    let report = run(&copy, &["forget", "--matching", SECRET, "--now", "--yes"]);
    assert_eq!(report.status, 0, "{}", report.err);
    assert_eq!(files_with(&copy, SECRET.as_bytes()), Vec::<PathBuf>::new());
    assert_eq!(files_with(&original, SECRET.as_bytes()).len(), 5, "the store and four files of captures");
    // A recording that the user put elsewhere is not deleted, but named, and its note is kept.
    let outside = elsewhere.join("turn-1").display().to_string();
    assert!(
        report.err.contains("outside of the data folder") && report.err.contains(&outside),
        "{}",
        report.err
    );
    assert_eq!(report.err.matches("outside of the data folder").count(), 1, "{}", report.err);
    let mut store = Database::open(&StoreLocation::Sqlite(copy.join("halo.db"))).expect("the store opens");
    let left = store.records("main", RecordKind::Capture).expect("the notes are read");
    assert_eq!(left.iter().map(|record| record.key.as_str()).collect::<Vec<_>>(), [outside.as_str()]);
}

/// Recordings from before the erased turn are kept, by whatever path the data folder is named; unfinished ones are not.
#[cfg(unix)]
#[test]
fn forget_keeps_captures_of_earlier_turns() {
    let home = crate::common::temp_dir();
    let [data, link] = ["data", "link"].map(|name| home.path().join(name));
    std::fs::create_dir(&data).expect("the folder is created");
    std::os::unix::fs::symlink(&data, &link).expect("the link is made");
    import_exchange(&data, "main", "Good morning.");
    let mut store = Database::open(&StoreLocation::Sqlite(data.join("halo.db"))).expect("the store opens");
    let id = store.find_conversation("main").expect("the store is read").expect("the conversation").id;
    let folder = |n: u32| data.join(format!("captures/{id}/turn-{n}"));
    for (turn, note) in [(0, folder(0).display().to_string()), (1, format!("captures/{id}/turn-1"))] {
        let value = serde_json::json!({ "turn": turn }).to_string();
        store.put_record("main", RecordKind::Capture, &note, Some(&value)).expect("the note is stored");
    }
    drop(store);
    for n in 0..3 {
        std::fs::create_dir_all(folder(n)).expect("the folder is created");
        std::fs::write(folder(n).join("steps.jsonl"), "").expect("the file is written");
    }
    run_ok(&link, &["forget", "a1.0", "--now", "--yes"]);
    assert_eq!([0, 1, 2].map(|n| folder(n).exists()), [true, false, false]);
}

/// The unfinished files of repairs that were killed.
const LEFTOVERS: [&str; 7] = [
    "repaired-2",
    "repaired-2-wal",
    "trial-1",
    "trial-1-wal",
    "template-1",
    "template-1-shm",
    "damaged-3.partial",
];

/// Copies of the store that repairs keep are named after a forgetting; those that were never finished are removed.
#[test]
fn forget_warns_of_every_copy_that_a_repair_leaves() {
    let home = crate::common::temp_dir();
    let data = home.path();
    import_exchange(data, "main", &format!("I live in {SECRET}."));
    let copies = ["backup-1", "damaged-1", "mended-1", "trial-notes", "repaired"];
    for copy in copies.iter().chain(&LEFTOVERS) {
        std::fs::write(data.join(format!("halo.db.{copy}")), SECRET).expect("the file is written");
    }
    let copies = &copies[..4];
    let report = run(data, &["forget", "--matching", SECRET, "--now", "--yes"]);
    for copy in copies {
        assert!(
            report.err.contains(&format!("halo.db.{copy}; delete it yourself")),
            "{copy}: {}",
            report.err
        );
    }
    assert_eq!(report.err.matches("a backup of the store").count(), copies.len(), "{}", report.err);
    assert!(data.join("halo.db.repaired").exists(), "it is no file of a repair");
    for leftover in LEFTOVERS {
        assert!(!data.join(format!("halo.db.{leftover}")).exists(), "{leftover}");
    }
}

#[test]
fn doctor_removes_what_killed_repairs_have_left() {
    let home = crate::common::temp_dir();
    let data = home.path();
    import_exchange(data, "main", &format!("I live in {SECRET}."));
    let kept = ["backup-1", "damaged-1"];
    for copy in kept.iter().chain(&LEFTOVERS) {
        std::fs::write(data.join(format!("halo.db.{copy}")), SECRET).expect("the file is written");
    }
    std::fs::create_dir(data.join("halo.db.trial-1-locks")).expect("the folder is created");
    let exists = |copy: &&str| data.join(format!("halo.db.{copy}")).exists();
    // Where the database is missing, an unfinished copy may be all that is left.
    std::fs::rename(data.join("halo.db"), data.join("aside")).expect("it is renamed");
    run(data, &["doctor"]);
    assert!(LEFTOVERS.iter().all(exists) && kept.iter().all(exists));
    std::fs::rename(data.join("aside"), data.join("halo.db")).expect("it is renamed");
    let report = run(data, &["doctor"]);
    assert!(
        report.status == 0 && report.err.contains("8 unfinished files of an interrupted repair removed"),
        "{}",
        report.err
    );
    assert!(!LEFTOVERS.iter().any(exists) && kept.iter().all(exists));
    assert!(!data.join("halo.db.trial-1-locks").exists());
    assert!(!run(data, &["doctor"]).err.contains("unfinished"));
}

/// A kill at any time, the first write of the key included, leaves nothing that keeps the next forgetting from its end.
#[test]
fn forget_ends_after_kills_at_any_time() {
    let home = crate::common::temp_dir();
    let data = home.path();
    let kills = crate::common::iterations("HALO_KILLS", 6) as u64;
    for n in 0..kills {
        let name = format!("kill {n}");
        import_exchange(data, &name, &format!("I live in {SECRET}, number {n}."));
        let _ = std::fs::remove_file(data.join("lethe.key"));
        let _ = std::fs::remove_file(data.join("forgotten.jsonl"));
        let started = std::time::Instant::now();
        let mut child =
            crate::common::halo_command(data, &["forget", "-c", &name, "--turn", "0", "--now", "--yes"])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("halo starts");
        // The first round measures how long it takes; the kills of the others are spread over that time.
        if n == 0 {
            child.wait().expect("halo exits");
            std::fs::write(data.join("duration"), started.elapsed().as_millis().to_string())
                .expect("written");
            continue;
        }
        let whole: u64 =
            std::fs::read_to_string(data.join("duration")).expect("read").parse().expect("a number");
        std::thread::sleep(std::time::Duration::from_millis(whole * n / kills));
        child.kill().expect("halo is killed");
        child.wait().expect("halo exits");
        let run = run(data, &["forget", "--everywhere", "--matching", SECRET, "--now", "--yes"]);
        assert!(run.status == 0 || run.err.contains("nothing matches"), "{}", run.err);
        run_ok(data, &["forget", "--due"]);
        assert_eq!(files_with(data, SECRET.as_bytes()), Vec::<PathBuf>::new(), "kill {n}");
        let proofs = run_json(data, &["forget", "--proofs"]);
        assert!(proofs.as_array().expect("a list").iter().all(|proof| proof["sound"] == true), "{proofs}");
    }
    run_ok(data, &["doctor"]);
}

/// What versions that wrote the key in place left on a full disk, and a proof that was not written to its end.
#[test]
fn forget_works_with_an_empty_key_and_a_torn_proof() {
    let home = crate::common::temp_dir();
    let data = home.path();
    import_exchange(data, "main", &format!("I live in {SECRET}."));
    std::fs::write(data.join("lethe.key"), "").expect("the file is written");
    std::fs::write(data.join("lethe.key.part"), "12ab").expect("the file is written");
    std::fs::write(data.join("forgotten.jsonl"), "{\"subject\":\"ma").expect("the file is written");
    run_ok(data, &["forget", "--matching", SECRET, "--now", "--yes"]);
    let list = run(data, &["forget", "--proofs", "--json"]);
    assert_eq!(list.status, 0, "{}", list.err);
    assert!(
        list.err.contains("line 1 of") && list.err.contains("forgotten.jsonl is no proof"),
        "{}",
        list.err
    );
    let proofs: Value = serde_json::from_str(&list.out).expect("JSON");
    assert_eq!((proofs.as_array().map(Vec::len), &proofs[0]["sound"]), (Some(1), &Value::Bool(true)));
}

/// Notes, clients' summaries and system prompts that contain the words are erased, the rest of them stays.
#[test]
fn forget_matching_erases_notes_summaries_and_prompts() {
    let home = crate::common::temp_dir();
    let data = home.path();
    import_exchange(data, "main", "Good morning.");
    let mut store = Database::open(&StoreLocation::Sqlite(data.join("halo.db"))).expect("the store opens");
    let notes = serde_json::json!({
        "topics": { "home": SECRET, "tea": "green" }, "reminders": ["milk", format!("to {SECRET} by train")],
    });
    let summary = |text: &str| serde_json::json!({ "role": "user", "text": text }).to_string();
    for (kind, key, value) in [
        (RecordKind::Note, "notes.json", notes.to_string()),
        (RecordKind::Note, &format!("{SECRET}.json"), "{}".to_owned()),
        (RecordKind::ClientSummary, "1", summary(&format!("They live in {SECRET}."))),
        (RecordKind::ClientSummary, "2", summary("They like tea.")),
        (RecordKind::SystemPrompt, "0000000000", format!("You know {SECRET}.")),
        (RecordKind::Setting, "system", format!("You know {SECRET}.")),
    ] {
        store.put_record("main", kind, key, Some(&value)).expect("the record is stored");
    }
    drop(store);
    let preview = run_json(data, &["forget", "--matching", SECRET, "--dry-run"]);
    let kinds: Vec<&str> =
        preview.as_array().expect("rows").iter().filter_map(|row| row["record"].as_str()).collect();
    assert_eq!(kinds, ["note", "note", "note", "client's summary", "system prompt", "setting"], "{preview}");
    let done = run_json(data, &["forget", "--matching", SECRET, "--now", "--yes"]);
    assert_eq!((&done["paragraphs"], &done["other_texts"]), (&0.into(), &6.into()), "{done}");
    assert_eq!(files_with(data, SECRET.as_bytes()), Vec::<PathBuf>::new());
    let mut store = Database::open(&StoreLocation::Sqlite(data.join("halo.db"))).expect("the store opens");
    let notes = store.records("main", RecordKind::Note).expect("the notes are read");
    let notes: Value = serde_json::from_str(&notes[0].value).expect("JSON");
    assert_eq!(notes, serde_json::json!({ "topics": { "tea": "green" }, "reminders": ["milk"] }));
    let left = store.records("main", RecordKind::ClientSummary).expect("the summaries are read");
    assert_eq!(left.iter().map(|record| record.key.as_str()).collect::<Vec<_>>(), ["2"]);
    assert_eq!(store.records("main", RecordKind::SystemPrompt).expect("the prompts are read"), []);
    assert_eq!(run_json(data, &["show"]).as_array().map(Vec::len), Some(2), "no message is erased");
}

/// A typed line need not have become a message: a command, or a message that failed.
#[test]
fn forget_everywhere_erases_typed_lines_without_a_message() {
    let home = crate::common::temp_dir();
    let data = home.path();
    import_exchange(data, "main", "Good morning.");
    let history = data.join("chat_history.txt");
    let lines = format!("#V2\nGood morning.\n/find {SECRET}\none\\nof {SECRET}\n");
    std::fs::write(&history, &lines).expect("the file is written");
    let everywhere = ["forget", "--everywhere", "--matching", SECRET];
    assert_eq!(run(data, &[&everywhere[..], &["--dry-run"]].concat()).status, 1);
    assert_eq!(std::fs::read_to_string(&history).expect("the file is readable"), lines);
    assert_eq!(run_json(data, &[&everywhere[..], &["--now", "--yes"]].concat())["typed_lines"], 2);
    assert_eq!(std::fs::read_to_string(&history).expect("the file is readable"), "#V2\nGood morning.\n");
    assert!(!data.join("chat_history.txt.part").exists());
    assert_eq!(run(data, &[&everywhere[..], &["--now", "--yes"]].concat()).status, 1, "nothing matches now");
}

/// Worlds are searched too; what they have is named, and the rest is forgotten.
#[test]
fn forget_everywhere_names_worlds_with_the_words() {
    let home = crate::common::temp_dir();
    let data = home.path();
    let world = data.join("world.toml");
    let text = format!(
        "[[agents]]\nname = \"Mara\"\nseed = \"You live in {SECRET}.\"\n\n[[rooms]]\nowner = \"Mara\"\n\n\
         [[rooms.messages]]\nsender = \"Mara\"\ncontent = \"In {SECRET}, at nine.\"\n"
    );
    std::fs::write(&world, text).expect("the file is written");
    run_ok(data, &["rooms", "new", "harbour", "--file", &world.display().to_string()]);
    run_ok(data, &["rooms", "new", "quiet"]);
    std::fs::remove_file(&world).expect("it is removed");
    let everywhere = ["forget", "--everywhere", "--matching", SECRET, "--now", "--yes"];
    let only_there = run(data, &everywhere);
    let expected = "the world 'harbour' contains that in 2 places, which are not erased: `halo rooms delete harbour --yes`";
    assert!(only_there.status == 1 && only_there.err.contains(expected), "{}", only_there.err);
    import_exchange(data, "main", &format!("I live in {SECRET}."));
    let both = run(data, &everywhere);
    assert!(both.status == 0 && both.err.contains(expected), "{}", both.err);
    assert!(!both.err.contains("quiet"), "{}", both.err);
    run_ok(data, &["rooms", "delete", "harbour", "--yes"]);
    let gone = run(data, &everywhere);
    assert!(gone.err.contains("nothing matches") && !gone.err.contains("world"), "{}", gone.err);
}
