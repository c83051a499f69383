//! Forgetting for good, by the real binary: what was said is in every file before, and in none after.

use halo_core::store::{Access, RecordKind, Store};
use halo_store::database::{Database, StoreLocation};
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// A word that nothing else says.
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
    serde_json::from_str(&run_ok(data, &[args, &["--json"]].concat())).expect("JSON alone")
}

/// Every file below a folder that has some bytes in it.
fn files_with(folder: &Path, bytes: &[u8]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder").filter_map(Result::ok) {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files_with(&path, bytes));
        } else if std::fs::read(&path).expect("readable").windows(bytes.len()).any(|some| some == bytes) {
            found.push(path);
        }
    }
    found
}

/// Talks with the real model, and records what it looks at.
fn chat_and_capture(data: &Path, lines: &[&str]) {
    let records = data.join("records");
    let records = records.to_str().expect("text");
    let mut command = crate::common::halo_command(data, &["capture", "-o", records]);
    command.arg("--model").arg(crate::common::chat_model());
    command.args(["--seed", "7", "--threads", "1", "--set", &crate::common::embedder_setting()]);
    command.args(["--set", "generation.max_tokens=8", "--set", "chat.dates=false"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut stdin = child.stdin.take().expect("piped");
    lines.iter().for_each(|line| writeln!(stdin, "{line}").expect("written"));
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn forget_removes_text_from_every_file() {
    let home = crate::common::temp_dir();
    let data = home.path();
    let said = format!("I live in {SECRET} and tell nobody.");
    chat_and_capture(data, &["Good morning.", &said, "And now something about tea."]);
    // What was typed in the terminal is kept there too.
    std::fs::write(data.join("chat_history.txt"), format!("#V2\nGood morning.\n{said}\n")).expect("written");
    assert!(files_with(data, SECRET.as_bytes()).len() > 1, "it is stored");
    let recorded = |n: u32| data.join("records").join(format!("turn-{n}"));
    assert!(recorded(1).exists() && recorded(3).exists());
    // The model's saved memory knows words by their numbers: whatever it is, the files are there.
    let saved = || {
        std::fs::read_dir(data.join("kv")).map_or(0, |models| {
            models
                .filter_map(Result::ok)
                .flat_map(|m| std::fs::read_dir(m.path()).into_iter().flatten())
                .count()
        })
    };
    assert!(saved() > 0);

    // Looking forgets nothing, and neither does asking without being sure.
    let shown = run_json(data, &["forget", "--matching", "quokkaTOWN", "--dry-run"]);
    assert!(shown.as_array().expect("a list").iter().any(|row| row["chunk"] == "u2.0"), "{shown:#}");
    let unsure = run(data, &["forget", "--matching", SECRET, "--now"]);
    assert!(unsure.status == 1 && unsure.err.contains("nothing was forgotten"), "{}", unsure.err);
    assert!(!files_with(data, SECRET.as_bytes()).is_empty());

    run_ok(data, &["forget", "--matching", SECRET, "--now", "--yes"]);
    assert_eq!(files_with(data, SECRET.as_bytes()), Vec::<PathBuf>::new());
    let typed = std::fs::read_to_string(data.join("chat_history.txt")).expect("readable");
    assert_eq!(typed, "#V2\nGood morning.\n");
    assert!(recorded(1).exists() && !recorded(3).exists(), "what was recorded since may show it");
    assert_eq!(saved(), 0);
    let export = data.join("export.jsonl");
    run_ok(data, &["export", "-o", export.to_str().expect("text")]);
    assert_eq!(files_with(data, SECRET.as_bytes()), Vec::<PathBuf>::new(), "nor in what is exported later");

    // Everything else is as it was: the store is whole, the rest can be searched, and the conversation goes on.
    run_ok(data, &["doctor"]);
    let rows = run_json(data, &["show", "--all"]);
    let texts: Vec<&str> =
        rows.as_array().expect("rows").iter().filter_map(|row| row["text"].as_str()).collect();
    assert!(texts.contains(&"Good morning."), "{texts:?}");
    let restored = run(data, &["undelete", "u2.0"]);
    assert!(restored.status == 2 && restored.err.contains("forgotten for good"), "{}", restored.err);
    chat_and_capture(data, &["Where do I live?"]);
    run_ok(data, &["doctor"]);

    // A proof remains, sound with the key and with no other.
    let proofs = run_json(data, &["forget", "--proofs"]);
    let proofs = proofs.as_array().expect("a list");
    assert!(proofs.iter().any(|p| p["subject"] == "main u2.0"));
    assert!(proofs.iter().all(|p| p["sound"] == true && p["by"] == "the user's wish"));
    std::fs::write(data.join("lethe.key"), "00".repeat(32)).expect("written");
    let forged = run_json(data, &["forget", "--proofs"]);
    assert!(forged.as_array().expect("a list").iter().all(|p| p["sound"] == false));
}

/// A conversation of so many messages, said so many days ago.
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
    std::fs::write(&file, text).expect("written");
    run_ok(data, &["import", file.to_str().expect("text"), "-c", name]);
    std::fs::remove_file(file).expect("removed");
}

#[test]
fn forget_by_age_passes_retention_stages() {
    let home = crate::common::temp_dir();
    let data = home.path();
    for (name, days) in [("hot", 3), ("warm", 100), ("compost", 400), ("ancient", 800)] {
        import_conversation(data, name, days);
    }
    let says = |word: &str| !files_with(data, format!("{word} says").as_bytes()).is_empty();
    let would = run_json(data, &["forget", "--by-age", "--dry-run"]);
    let turns: Vec<(&str, usize)> = (would.as_array().expect("rows").iter())
        .map(|row| {
            (row["conversation"].as_str().expect("a name"), row["turns"].as_array().expect("turns").len())
        })
        .collect();
    assert_eq!(turns, [("ancient", 4), ("compost", 4), ("hot", 0), ("warm", 0)]);
    assert!(says("ancient") && says("compost"));
    let unsure = run(data, &["forget", "--by-age"]);
    assert!(
        unsure.status == 1 && unsure.err.contains("nothing was forgotten") && says("ancient"),
        "{}",
        unsure.err
    );
    let done = run_json(data, &["forget", "--by-age", "--yes"]);
    assert_eq!(done["forgotten"], 8);
    assert_eq!(["hot", "warm", "compost", "ancient"].map(says), [true, true, false, false]);
    // What is a year old leaves a heap of figures; what is older leaves none.
    let records = |name: &str| run_ok(data, &["export", "-c", name]);
    assert!(records("compost").contains("lethe.compost"), "{}", records("compost"));
    assert!(!records("ancient").contains("lethe.compost"));
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
    assert_eq!(live(data), before - 2, "out of sight at once");
    assert!(!files_with(data, b"main says 0").is_empty(), "and still there");
    assert_eq!(run_json(data, &["forget", "--due"])["forgotten"], 0);
    assert_eq!(run_json(data, &["forget", "--cancel"])["kept"], 2);
    assert_eq!(live(data), before, "restored");
    // What is restored meanwhile is not forgotten when its time has come.
    run_ok(data, &["forget", "u0.0", "--yes"]);
    run_ok(data, &["undelete", "u0.0"]);
    assert_eq!(run_json(data, &["forget", "--cancel"])["kept"], 0, "nothing is pending");
    assert_eq!(live(data), before);
    // What waits and is then forgotten at once cannot be restored any more.
    run_ok(data, &["forget", "a1.0", "--yes"]);
    run_ok(data, &["forget", "a1.0", "--yes", "--now"]);
    assert_eq!(run_json(data, &["forget", "--cancel"])["kept"], 0);
    assert!(files_with(data, b"main says 1").is_empty());
    run_ok(data, &["forget", "u0.0", "--yes", "--set", "lethe.grace_days=0"]);
    assert!(files_with(data, b"main says 0").is_empty() && !files_with(data, b"main says 2").is_empty());
    // What cannot be done says so, and does nothing.
    for (status, args, why) in [
        (1, vec!["forget"], "nothing is selected"),
        (3, vec!["forget", "u99.0", "--yes", "--now"], "there is no chunk u99.0"),
        (3, vec!["forget", "--turn", "99", "--yes"], "there is no turn 99"),
        (1, vec!["forget", "--matching", "zebra", "--yes"], "nothing matches"),
        (1, vec!["forget", "--everywhere", "--all", "--yes"], "--everywhere goes with --matching"),
        (3, vec!["forget", "-c", "nowhere", "--all", "--yes"], "there is no conversation"),
    ] {
        let run = run(data, &args);
        assert!(run.status == status && run.err.contains(why), "{args:?}: {}", run.err);
    }
    run_ok(data, &["forget", "--all", "--yes", "--now"]);
    assert!(files_with(data, b"main says").is_empty());
    assert_eq!(run_json(data, &["conversations"]).as_array().expect("rows").len(), 0);
    let proofs = run_json(data, &["forget", "--proofs"]);
    let last = proofs.as_array().and_then(|all| all.last()).expect("there are some").clone();
    assert!(last["subject"].as_str().is_some_and(|subject| subject.starts_with("a conversation ")), "{last}");
}

/// Writes a memory into a conversation, as if it had been formed.
fn write_memory(data: &Path, name: &str, id: u32, text: &str, to: u32) {
    let mut store = Database::open(&StoreLocation::Sqlite(data.join("halo.db"))).expect("it opens");
    store.load(name, Access::Write).expect("to be written");
    let value = serde_json::json!({ "from": [0, 0], "to": [to, 0], "text": text, "model": "m", "formed": 3, "at": 5 });
    store
        .put_record(name, RecordKind::Memory, &format!("{id:08}"), Some(&value.to_string()))
        .expect("written");
}

/// What waits to be forgotten is out of everybody's sight, with the memories of it, and comes back as it was.
#[test]
fn forget_pending_text_is_hidden_and_can_be_cancelled() {
    let home = crate::common::temp_dir();
    let data = home.path();
    import_conversation(data, "other", 1);
    write_memory(data, "other", 1, "Of the first message.", 0);
    write_memory(data, "other", 2, "Of all of it, with a Zanzibar that nobody said.", 3);
    let memories = |find: &[&str]| {
        let found = run_json(data, &[&["memories", "-c", "other"], find].concat());
        found.as_array().expect("a list").iter().filter_map(|m| m["id"].as_u64()).collect::<Vec<_>>()
    };
    let shown = || {
        let rows = run_json(data, &["show", "-c", "other", "--all"]);
        let rows = rows.as_array().expect("rows").clone();
        rows.iter().filter_map(|row| row["text"].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };

    // What would go is told, memories too.
    let would = run_json(data, &["forget", "-c", "other", "u2.0", "--dry-run"]);
    let names: Vec<(Option<&str>, Option<u64>)> = would
        .as_array()
        .expect("rows")
        .iter()
        .map(|row| (row["chunk"].as_str(), row["memory"].as_u64()))
        .collect();
    assert_eq!(names, [(Some("u2.0"), None), (None, Some(2))]);
    run_ok(data, &["forget", "-c", "other", "u2.0", "--yes"]);
    assert_eq!((memories(&[]), memories(&["--find", "Zanzibar"])), (vec![1], vec![]));
    assert_eq!(shown(), ["other says 0", "other says 1", "", "other says 3"]);
    assert!(!run_ok(data, &["why", "-c", "other", "u2.0"]).contains("other says 2"));
    let waits = run_json(data, &["forget", "--pending"]);
    assert_eq!((waits[0]["chunks"][0].as_str(), waits[0]["memories"][0].as_u64()), (Some("u2.0"), Some(2)));

    // Only what waits can be taken back; without a name it is found wherever it is.
    for (args, why) in [
        (["forget", "-c", "other", "--cancel", "u99.0"], "there is no chunk u99.0"),
        (["forget", "-c", "other", "--cancel", "u0.0"], "nothing of u0.0 is pending"),
    ] {
        let run = run(data, &args);
        assert!(run.status == 3 && run.err.contains(why), "{args:?}: {}", run.err);
    }
    let kept = run_json(data, &["forget", "--cancel"]);
    assert_eq!((&kept["kept"], &kept["memories"]), (&1.into(), &1.into()));
    assert_eq!((memories(&[]), shown()[2].as_str()), (vec![1, 2], "other says 2"));

    // Of two that wait, one is taken back: a memory that may tell of the other still waits.
    run_ok(data, &["forget", "-c", "other", "--turns", "1-2", "--yes"]);
    run_ok(data, &["forget", "-c", "other", "--cancel", "u2.0"]);
    assert_eq!((memories(&[]), shown()[1].as_str(), shown()[2].as_str()), (vec![1], "", "other says 2"));
    run_ok(data, &["forget", "--cancel"]);
    assert_eq!(memories(&[]), [1, 2]);

    // Words that only a memory has are found there; those of longer words are not, and told.
    let would = run_json(data, &["forget", "-c", "other", "--matching", "zanzibar", "--dry-run"]);
    assert_eq!((would.as_array().map(Vec::len), would[0]["memory"].as_u64()), (Some(1), Some(2)), "{would}");
    let part = run(data, &["forget", "-c", "other", "--matching", "zanzi", "--dry-run"]);
    assert!(part.status == 1 && part.err.contains("nothing matches"), "{}", part.err);
    let part = run(data, &["forget", "-c", "other", "--matching", "oth", "--dry-run"]);
    assert!(part.status == 1 && part.err.contains("longer words contain it: other"), "{}", part.err);
    let both = run_json(data, &["forget", "-c", "other", "--turn", "1", "--matching", "other", "--dry-run"]);
    assert_eq!(both[0]["chunk"].as_str(), Some("a1.0"), "turns are narrowed by words: {both}");
    assert!(both.as_array().expect("rows").iter().all(|row| row["chunk"] != "u0.0"));
    run_ok(data, &["forget", "-c", "other", "--matching", "Zanzibar", "--now", "--yes"]);
    assert!(files_with(data, b"Zanzibar").is_empty() && !files_with(data, b"other says 3").is_empty());
    let proofs = run_json(data, &["forget", "--proofs", "-c", "other"]);
    assert_eq!(proofs[0]["subject"].as_str(), Some("other memory 2"));
    assert_eq!(run_json(data, &["forget", "--proofs", "-c", "main"]).as_array().map(Vec::len), Some(0));
}

/// Has what waits in a conversation come to its end.
fn expire_grace_period(data: &Path, name: &str) -> u64 {
    let mut store = Database::open(&StoreLocation::Sqlite(data.join("halo.db"))).expect("it opens");
    let records = store.records(name, RecordKind::Setting).expect("they are read");
    let noted = records.iter().find(|record| record.key == "lethe.pending").expect("it is noted");
    let mut told: Value = serde_json::from_str(&noted.value).expect("JSON");
    told.as_array_mut().expect("a list").iter_mut().for_each(|wait| wait["due"] = 1.into());
    store.load(name, Access::Write).expect("to be written");
    store.put_record(name, RecordKind::Setting, "lethe.pending", Some(&told.to_string())).expect("written");
    drop(store);
    run_json(data, &["forget", "--due"])["forgotten"].as_u64().expect("a number")
}

/// At the end of the time of grace goes what was wished, no more and no less.
#[test]
fn forget_executes_exactly_what_was_requested() {
    let says = |data: &Path, text: &str| !files_with(data, text.as_bytes()).is_empty();
    // Something was forgotten before: all that is left is still the whole conversation.
    let home = crate::common::temp_dir();
    let data = home.path();
    import_conversation(data, "main", 1);
    run_ok(data, &["forget", "u0.0", "--yes", "--now"]);
    run_ok(data, &["forget", "--all", "--yes"]);
    expire_grace_period(data, "main");
    assert_eq!(run_json(data, &["conversations"]).as_array().map(Vec::len), Some(0));

    // Deleted, to be forgotten, and restored: it is not forgotten, and neither are memories of it.
    import_conversation(data, "main", 1);
    write_memory(data, "main", 1, "Of all of it.", 3);
    run_ok(data, &["delete", "a3.0"]);
    run_ok(data, &["forget", "a3.0", "--yes"]);
    assert_eq!(run_json(data, &["memories"]).as_array().map(Vec::len), Some(0));
    run_ok(data, &["undelete", "a3.0"]);
    assert_eq!(run_json(data, &["memories"]).as_array().map(Vec::len), Some(1), "it is back with it");
    assert!(run_json(data, &["forget", "--pending"]).as_array().is_some_and(Vec::is_empty));

    // Formed since, by who never saw it: it stays. One that says it itself goes, whatever it is of.
    run_ok(data, &["forget", "u2.0", "--yes"]);
    write_memory(data, "main", 7, "Formed since.", 3);
    write_memory(data, "main", 8, "Mentions a walrus.", 0);
    run_ok(data, &["forget", "--matching", "walrus", "--yes"]);
    run_ok(data, &["forget", "a1.0", "--yes"]);
    let waits = run_json(data, &["forget", "--pending"]);
    assert_eq!(waits.as_array().map(Vec::len), Some(3), "{waits}");
    assert_eq!(waits[2]["memories"], serde_json::json!([7]), "it tells of a1.0, perhaps");
    run_ok(data, &["forget", "--cancel", "a1.0"]);
    assert_eq!(expire_grace_period(data, "main"), 1);
    let left = run_json(data, &["memories"]);
    let left: Vec<u64> = left.as_array().expect("a list").iter().filter_map(|m| m["id"].as_u64()).collect();
    assert_eq!(left, [7]);
    assert!(!says(data, "walrus") && !says(data, "main says 2") && says(data, "main says 1"));
    run_ok(data, &["doctor"]);

    // What waits already can be gone at once, memories too, and nothing is silently left out.
    write_memory(data, "main", 9, "Mentions a heron.", 0);
    run_ok(data, &["forget", "--matching", "heron", "--yes"]);
    run_ok(data, &["forget", "--matching", "Heron", "--yes", "--now"]);
    assert!(!says(data, "heron"));
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

/// Words are found as whole words, whatever their script.
#[test]
fn forget_matching_finds_whole_words_in_any_script() {
    let home = crate::common::temp_dir();
    let data = home.path();
    let file = data.join("words.part");
    for (said, words, found) in [
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
        let told = serde_json::json!({ "messages": [{ "role": "user", "content": said }] });
        std::fs::write(&file, told.to_string()).expect("written");
        let name = format!("{words}{found}");
        let place = data.join("words.json");
        std::fs::rename(&file, &place).expect("moved");
        run_ok(data, &["import", place.to_str().expect("text"), "-c", &name]);
        let run = run(data, &["forget", "-c", &name, "--matching", words, "--dry-run", "--json"]);
        assert_eq!(run.status == 0, found, "{words} in {said}: {}{}", run.out, run.err);
    }
}

/// A conversation that goes on while all that was said in it waits is not forgotten with it.
#[test]
fn forget_all_keeps_what_was_undeleted_during_grace_period() {
    let home = crate::common::temp_dir();
    let data = home.path();
    import_conversation(data, "main", 1);
    run_ok(data, &["forget", "--all", "--yes"]);
    // A message comes back with its answer.
    run_ok(data, &["undelete", "u2.0"]);
    assert_eq!(expire_grace_period(data, "main"), 2);
    let says = |n: u32| !files_with(data, format!("main says {n}").as_bytes()).is_empty();
    assert_eq!([0, 1, 2, 3].map(says), [false, false, true, true]);
    assert_eq!(run_json(data, &["conversations"]).as_array().map(Vec::len), Some(1));
}

/// Memories of several conversations are found at once, and worked on by hand, without a model.
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
    let wrong = run(data, &["memories", "--all", "pin", "1"]);
    assert!(wrong.status == 1 && wrong.err.contains("name its conversation"), "{}", wrong.err);
    let none = run(data, &["memories", "disable", "7", "-c", "one"]);
    assert!(none.status == 3 && none.err.contains("there is no memory 7"), "{}", none.err);
    // What is forgotten takes the memories of it along.
    run_ok(data, &["forget", "-c", "one", "u0.0", "--now", "--yes"]);
    assert_eq!(run_json(data, &["memories", "-c", "one"]).as_array().map(Vec::len), Some(0));
    run_ok(data, &["memories", "-c", "two", "delete", "1"]);
    assert_eq!(run_json(data, &["memories", "--all"]).as_array().map(Vec::len), Some(0));
}
