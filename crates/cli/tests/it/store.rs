//! The real binary on a real store: conversations come in, are looked at, worked on by hand, and go out again.

use crate::common::{run_halo, temp_dir};
use halo_core::store::{Access, Store};
use halo_store::database::{Database, StoreLocation};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A data folder, and files beside it.
struct StoreTestHome(tempfile::TempDir);

impl StoreTestHome {
    fn new() -> Self {
        Self(temp_dir())
    }

    fn data_dir(&self) -> PathBuf {
        self.0.path().join("data")
    }

    /// The arguments, with the names of files in this folder made whole.
    fn run(&self, args: &[&str]) -> crate::common::HaloOutput {
        let here = |arg: &&str| {
            let file = [".json", ".jsonl", ".bin"].iter().any(|end| arg.ends_with(end));
            if file { self.0.path().join(arg).display().to_string() } else { (*arg).to_owned() }
        };
        let args: Vec<String> = args.iter().map(here).collect();
        run_halo(&self.data_dir(), &args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// What it prints when all goes well.
    fn run_ok(&self, args: &[&str]) -> String {
        let run = self.run(args);
        assert_eq!(run.status, 0, "{args:?}: {}", run.err);
        run.out
    }

    fn run_json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.run_ok(&[args, &["--json"]].concat())).expect("JSON alone")
    }

    /// What it says when it fails with this exit status.
    fn run_err(&self, status: i32, args: &[&str]) -> String {
        let run = self.run(args);
        assert_eq!((run.status, run.out.as_str()), (status, ""), "{args:?}");
        run.err
    }

    fn write_file(&self, name: &str, text: &str) {
        std::fs::write(self.0.path().join(name), text).expect("written");
    }

    fn read_file(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.path().join(name)).expect("readable")
    }
}

/// A small Halo Weave export: three turns, one chunk dead, one pinned.
const WEAVE_EXPORT: &str = r#"{"conversation":{"version":1,"tokens":[
{"token_id":1,"text":"Who","position":0,"brightness":9990,"turn_id":0,"role":"user","sentence_id":0},
{"token_id":2,"text":" fires?","position":1,"brightness":10000,"turn_id":0,"role":"user","sentence_id":0},
{"token_id":3,"text":"The gun.","position":2,"brightness":40,"turn_id":1,"role":"assistant","sentence_id":0},
{"token_id":4,"text":"It hung there.","position":3,"brightness":9000,"turn_id":1,"role":"assistant","sentence_id":1,"deleted":true,"brightness_at_deletion":77},
{"token_id":5,"text":"Since act one.","position":4,"brightness":9500,"turn_id":1,"role":"assistant","sentence_id":2,"pinned":true},
{"token_id":6,"text":"Thanks","position":5,"brightness":10000,"turn_id":2,"role":"user","sentence_id":0}
],"currentTurnId":2},"semanticIndex":{"version":1,"entries":[]},"notes":{"topics":{"guns":1}}}"#;

#[test]
fn store_import_edit_and_export_round_trip() {
    let home = StoreTestHome::new();
    assert_eq!(
        home.run_ok(&["conversations"]),
        "no conversations yet: `halo chat` starts one, `halo import FILE` imports one\n"
    );
    assert_eq!(home.run_json(&["conversations"]), Value::Array(vec![]));
    assert!(!home.data_dir().exists(), "looking makes nothing");
    home.write_file("weave.json", WEAVE_EXPORT);
    let arrived = home.run_json(&["import", "weave.json", "-c", "main"]);
    assert_eq!(arrived["conversations"][0]["tokens"], 6);
    assert_eq!(
        (&arrived["format"], &arrived["lost"]),
        (&"a Halo Weave export".into(), &serde_json::json!({}))
    );

    let live = home.run_json(&["show"]);
    let names = |v: &Value| {
        v.as_array()
            .expect("a list")
            .iter()
            .map(|c| c["chunk"].as_str().expect("a name").to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&live), ["u0.0", "a1.0", "a1.2", "u2.0"]);
    let all = home.run_json(&["show", "--all"]);
    let dead = &all[2];
    let expected = serde_json::json!({
        "chunk": "a1.1", "turn": 1, "paragraph": 1, "role": "assistant", "position": 3, "tokens": 1,
        "live": false, "live_tokens": 0, "pinned": false, "deleted": false, "peak": 77.0,
        "text": "It hung there.", "to_be_forgotten": null, "why": "pruned: before this log begins",
    });
    assert_eq!(dead, &expected);
    assert_eq!((&all[3]["pinned"], &all[3]["peak"]), (&true.into(), &9500.0.into()));

    // The user's own hand.
    assert_eq!(home.run_ok(&["resurrect", "a1.1"]), "resurrected: a1.1 (6 tokens of 6 live now)\n");
    assert_eq!(home.run_ok(&["unpin", "a1.1", "a1.2"]), "unpinned: a1.1 a1.2 (6 tokens of 6 live now)\n");
    assert_eq!(home.run_ok(&["merge", "a1.1", "a1.2"]), "merged: a1.1 a1.2 (6 tokens of 6 live now)\n");
    assert_eq!(home.run_json(&["show"])[1]["text"], "The gun.It hung there.Since act one.");
    assert_eq!(home.run_ok(&["prune", "u0.0"]), "pruned: u0.0 a1.0 (1 token of 6 live now)\n");
    assert_eq!(home.run_ok(&["pin", "u0.0", "a1.0"]), "pinned: u0.0 a1.0 (6 tokens of 6 live now)\n");
    assert_eq!(
        home.run_json(&["show"])[1]["pinned"],
        true,
        "what came along is pinned too, because it was named"
    );
    home.run_ok(&["unpin", "a1.0"]);
    assert_eq!(home.run_ok(&["delete", "u2.0"]), "deleted: u2.0 (5 tokens of 6 live now)\n");
    assert!(home.run_err(2, &["pin", "u2.0"]).contains("u2.0 is deleted; undelete it first"));
    assert_eq!(home.run_ok(&["undelete", "u2.0"]), "undeleted: u2.0 (6 tokens of 6 live now)\n");

    let why = home.run_json(&["why", "a1.0"]);
    let told: Vec<_> = why["events"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|e| {
            format!("{}: {}", e["what"].as_str().unwrap_or_default(), e["why"].as_str().unwrap_or_default())
        })
        .collect();
    assert_eq!(
        told,
        [
            "pruned: depends on u0.0, which the user pruned",
            "resurrected: question or answer to u0.0, which was resurrected",
            "pinned: ",
            "unpinned: "
        ]
    );
    let page = home.run_ok(&["why", "a1.1"]);
    assert!(
        page.starts_with("a1.1 does not exist any more: it was merged\n")
            && page.contains("pruned: before this log begins"),
        "{page}"
    );

    // Out, in again under another name, and out: the same but for the name.
    home.run_ok(&["export", "-o", "main.jsonl"]);
    assert!(
        home.run_err(1, &["export", "-o", "main.jsonl"])
            .contains("main.jsonl exists already: name another file")
    );
    home.run_ok(&["import", "main.jsonl", "-c", "copy"]);
    home.run_ok(&["export", "-c", "copy", "-o", "copy.jsonl"]);
    let lines = |text: &str| text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    let (main, copy) = (home.read_file("main.jsonl"), home.read_file("copy.jsonl"));
    assert_eq!(lines(&main)[..lines(&main).len() - 1], lines(&copy)[..lines(&copy).len() - 1]);
    assert_eq!(home.run_ok(&["export"]), main, "standard output gets the same bytes");
    assert!(home.run_err(4, &["import", "main.jsonl"]).contains(
        "there is a conversation 'main' already: choose another name\nhalo: hint: `halo import FILE -c NAME`"
    ));
    let listed = home.run_ok(&["conversations"]);
    assert!(
        listed.contains("main                3         6         6") && listed.contains("none yet"),
        "{listed}"
    );
    assert!(home.run_ok(&["doctor"]).contains("ok     checksums, names and logs of all conversations"));
}

#[test]
fn store_errors_are_reported_and_change_nothing() {
    let home = StoreTestHome::new();
    home.write_file("weave.json", WEAVE_EXPORT);
    home.run_ok(&["import", "weave.json", "-c", "main"]);
    let before = home.run_json(&["show", "--all"]);
    for (args, says) in [
        (
            &["show", "-c", "nobody"][..],
            "there is no conversation 'nobody': the only one is 'main' (-c NAME)",
        ),
        (&["why", "a9.0"], "there is no chunk a9.0 in 'main': `halo show --all` lists them all"),
        (&["pin", "u0.0", "a9.0"], "there is no chunk a9.0"),
        (&["prune", "a1.1"], "cannot prune a1.1: it is not in the context window"),
        (&["prune", "u0.0"], "cannot prune u0.0: a1.2 is pinned and depends on it; unpin a1.2 first"),
        (&["merge", "u0.0"], "cannot merge u0.0: it is the first chunk of its turn"),
        (&["resurrect", "u0.0"], "cannot resurrect u0.0: it is in the context window already"),
        (&["import", "nothing.json"], "nothing.json: No such file or directory"),
        (&["import", "."], "is a folder: name the file in it"),
        (&["export", "-c", "nobody"], "there is no conversation 'nobody'"),
        (
            &["show", "--store", "mysql://x"],
            "'mysql:…' is not the address of a store: write sqlite:PATH or postgres://",
        ),
        (
            &["conversations", "--store", "postgres://halo@127.0.0.1:1/x"],
            "the PostgreSQL server cannot be reached",
        ),
    ] {
        let run = home.run(args);
        assert!(run.status != 0 && run.out.is_empty() && run.err.contains(says), "{args:?}: {}", run.err);
    }
    for (file, text, says) in [
        (
            "zip.json",
            "PK\u{3}\u{4}",
            "the file is a zip archive: unpack it and import the conversations.json inside",
        ),
        (
            "what.bin",
            "\u{1}\u{2}",
            "the format of the file cannot be detected: choose one of halo, halo_weave, sillytavern",
        ),
        ("empty.json", "", "the file is empty"),
        ("cut.json", &WEAVE_EXPORT[..500], "cannot be read: EOF while parsing"),
    ] {
        home.write_file(file, text);
        let said = home.run_err(2, &["import", file]);
        assert!(said.contains(says), "{file}: {said}");
    }
    let wrong = home.run(&["pin", "chunk4"]);
    assert_eq!(wrong.status, 2);
    assert!(wrong.err.contains("write role, turn and index, such as u4.0"));
    assert_eq!(home.run_json(&["show", "--all"]), before);
}

#[test]
fn export_all_moves_everything_to_another_machine() {
    let (home, other) = (StoreTestHome::new(), StoreTestHome::new());
    home.write_file("weave.json", WEAVE_EXPORT);
    home.write_file("names.json", r#"[{"role":"user","content":"می‌خواهم 👨‍👩‍👧"}]"#);
    home.run_ok(&["import", "weave.json", "names.json"]);
    home.run_ok(&["rename", "names", "👨‍👩‍👧 می‌خواهم"]);
    let listed = home.run_ok(&["conversations"]);
    assert!(listed.contains("👨‍👩‍👧 می‌خواهم"), "joiners stay, so that the name can be used: {listed}");
    assert!(home.run_ok(&["show", "-c", "👨‍👩‍👧 می‌خواهم"]).contains("می‌خواهم 👨‍👩‍👧"));
    let folder = home.0.path().join("all");
    let written = home.run_json(&["export", "--all", "-o", folder.to_str().expect("text")]);
    assert_eq!(written.as_array().map(Vec::len), Some(2));
    let files: Vec<String> =
        ["00001.jsonl", "00002.jsonl"].map(|f| folder.join(f).display().to_string()).into();
    other.run_ok(&["import", &files[0], &files[1]]);
    assert_eq!(other.run_json(&["conversations"]), home.run_json(&["conversations"]));
    let again = other.0.path().join("all");
    other.run_ok(&["export", "--all", "-o", again.to_str().expect("text")]);
    for file in ["00001.jsonl", "00002.jsonl"] {
        assert_eq!(std::fs::read(folder.join(file)).ok(), std::fs::read(again.join(file)).ok());
    }
    // A name that only looks like something else to SQLite is a file like any other.
    let odd = format!("sqlite:{}/:memory:", home.0.path().display());
    home.run_ok(&["import", "weave.json", "--store", &odd]);
    assert_eq!(home.run_json(&["conversations", "--store", &odd]).as_array().map(Vec::len), Some(1));
}

#[test]
fn lock_excludes_second_process_per_conversation() {
    let home = StoreTestHome::new();
    home.write_file("weave.json", WEAVE_EXPORT);
    home.run_ok(&["import", "weave.json", "-c", "main"]);
    home.run_ok(&["import", "weave.json", "-c", "other"]);
    let mut store =
        Database::open(&StoreLocation::Sqlite(home.data_dir().join("halo.db"))).expect("it opens");
    store.load("main", Access::Write).expect("it is ours now");
    let said = home.run_err(5, &["pin", "u0.0"]);
    let me = std::process::id();
    assert!(said.contains(&format!("opening 'main': another Halo (process {me}) is using it")), "{said}");
    assert_eq!(home.run_json(&["show"]).as_array().map(Vec::len), Some(4), "looking is free");
    home.run_ok(&["pin", "-c", "other", "u0.0"]);
    drop(store);
    home.run_ok(&["pin", "u0.0"]);
}

#[test]
fn doctor_reports_oversized_context_window() {
    let home = StoreTestHome::new();
    let said = |n: usize| {
        let words = "word ".repeat(600);
        serde_json::json!({ "role": if n.is_multiple_of(2) { "user" } else { "assistant" }, "content": words })
    };
    for (file, name, messages) in [("small.json", "small", 10), ("large.json", "large", 100)] {
        let said: Vec<Value> = (0..messages).map(said).collect();
        home.write_file(file, &serde_json::json!({ "messages": said }).to_string());
        home.run_ok(&["import", "--no-index", file, "-c", name]);
    }
    let told = home.run_json(&["doctor"]);
    let crowded = told["oversized_windows"].as_object().expect("by name");
    let names: Vec<&String> = crowded.keys().collect();
    assert_eq!(names, ["large"], "{told}");
    assert!(crowded["large"].as_u64().is_some_and(|live| live > 50_000), "{told}");
    assert!(home.run_ok(&["doctor"]).contains("lower context.max_tokens"));
}

#[test]
fn doctor_fix_repairs_damaged_store() {
    let home = StoreTestHome::new();
    home.write_file("weave.json", WEAVE_EXPORT);
    home.run_ok(&["import", "weave.json", "-c", "main"]);
    let before = home.run_json(&["show", "--all"]);
    let file = home.data_dir().join("halo.db");
    let mut bytes = std::fs::read(&file).expect("there");
    // The name of a token, in the chunk's body; the log has it too, further on.
    let at = bytes.windows(14).position(|w| w == b"It hung there.").expect("it is there");
    bytes[at] ^= 1;
    std::fs::write(&file, &bytes).expect("written");
    let said = home.run(&["doctor"]);
    assert_eq!(said.status, 1);
    let (out, err) = (said.out, said.err);
    assert!(
        out.contains("error  'main'") && err.contains("`halo doctor --fix` makes a backup and repairs"),
        "{out}{err}"
    );
    let mended = home.run_json(&["doctor", "--fix"]);
    assert_eq!(mended["findings"], serde_json::json!([]));
    assert!(Path::new(mended["backup"].as_str().expect("a copy")).exists());
    assert_eq!(home.run_json(&["show", "--all"]), before);
    // The whole first page is noise: even that.
    let mut bytes = std::fs::read(&file).expect("there");
    bytes[..4096].fill(b'?');
    std::fs::write(&file, &bytes).expect("written");
    assert!(home.run_err(7, &["show"]).contains(
        "is not a database, or its first page is damaged\nhalo: hint: `halo doctor` examines the store"
    ));
    home.run_ok(&["doctor", "--fix"]);
    assert_eq!(home.run_json(&["show", "--all"]), before);
}
