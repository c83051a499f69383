//! The real binary on a real store: conversations come in, are looked at, worked on by hand, and go out again.

mod common;

use common::{folder, halo};
use halo_core::seams::{Access, Store};
use halo_store::database::{Database, Location};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A data folder, and files beside it.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Self(folder())
    }

    fn data(&self) -> PathBuf {
        self.0.path().join("data")
    }

    /// The arguments, with the names of files in this folder made whole.
    fn halo(&self, args: &[&str]) -> common::Run {
        let here = |arg: &&str| {
            let file = [".json", ".jsonl", ".bin"].iter().any(|end| arg.ends_with(end));
            if file { self.0.path().join(arg).display().to_string() } else { (*arg).to_owned() }
        };
        let args: Vec<String> = args.iter().map(here).collect();
        halo(&self.data(), &args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// What it prints when all goes well.
    fn ok(&self, args: &[&str]) -> String {
        let run = self.halo(args);
        assert_eq!(run.status, 0, "{args:?}: {}", run.err);
        run.out
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[args, &["--json"]].concat())).expect("JSON alone")
    }

    /// What it says when it fails.
    fn err(&self, args: &[&str]) -> String {
        let run = self.halo(args);
        assert_eq!((run.status, run.out.as_str()), (1, ""), "{args:?}");
        run.err
    }

    fn file(&self, name: &str, text: &str) {
        std::fs::write(self.0.path().join(name), text).expect("written");
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.path().join(name)).expect("readable")
    }
}

/// A small Halo Weave export: three turns, one chunk dead, one pinned.
const WEAVE: &str = r#"{"conversation":{"version":1,"tokens":[
{"token_id":1,"text":"Who","position":0,"brightness":9990,"turn_id":0,"role":"user","sentence_id":0},
{"token_id":2,"text":" fires?","position":1,"brightness":10000,"turn_id":0,"role":"user","sentence_id":0},
{"token_id":3,"text":"The gun.","position":2,"brightness":40,"turn_id":1,"role":"assistant","sentence_id":0},
{"token_id":4,"text":"It hung there.","position":3,"brightness":9000,"turn_id":1,"role":"assistant","sentence_id":1,"deleted":true,"brightness_at_deletion":77},
{"token_id":5,"text":"Since act one.","position":4,"brightness":9500,"turn_id":1,"role":"assistant","sentence_id":2,"pinned":true},
{"token_id":6,"text":"Thanks","position":5,"brightness":10000,"turn_id":2,"role":"user","sentence_id":0}
],"currentTurnId":2},"semanticIndex":{"version":1,"entries":[]},"notes":{"topics":{"guns":1}}}"#;

#[test]
fn a_conversation_comes_in_is_worked_on_and_goes_out() {
    let home = Home::new();
    assert_eq!(home.ok(&["conversations"]), "no conversations yet: `halo import FILE` brings one in\n");
    assert_eq!(home.json(&["conversations"]), Value::Array(vec![]));
    assert!(!home.data().exists(), "looking makes nothing");
    home.file("weave.json", WEAVE);
    let arrived = home.json(&["import", "weave.json", "-c", "main"]);
    assert_eq!(arrived["conversations"][0]["tokens"], 6);
    assert_eq!(
        (&arrived["format"], &arrived["lost"]),
        (&"a Halo Weave export".into(), &serde_json::json!({}))
    );

    let live = home.json(&["show"]);
    let names = |v: &Value| {
        v.as_array()
            .expect("a list")
            .iter()
            .map(|c| c["chunk"].as_str().expect("a name").to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&live), ["u0.0", "a1.0", "a1.2", "u2.0"]);
    let all = home.json(&["show", "--dead"]);
    let dead = &all[2];
    let expected = serde_json::json!({
        "chunk": "a1.1", "turn": 1, "sentence": 1, "role": "assistant", "position": 3, "tokens": 1,
        "live": false, "live_tokens": 0, "pinned": false, "deleted": false, "peak": 77.0,
        "text": "It hung there.", "to_be_forgotten": null, "why": "left: had left before it came here",
    });
    assert_eq!(dead, &expected);
    assert_eq!((&all[3]["pinned"], &all[3]["peak"]), (&true.into(), &9500.0.into()));

    // The user's own hand.
    assert_eq!(home.ok(&["resurrect", "a1.1"]), "back at their place: a1.1 (6 tokens of 6 live now)\n");
    assert_eq!(home.ok(&["unpin", "a1.1", "a1.2"]), "unpinned: a1.1 a1.2 (6 tokens of 6 live now)\n");
    assert_eq!(home.ok(&["merge", "a1.1", "a1.2"]), "merged: a1.1 a1.2 (6 tokens of 6 live now)\n");
    assert_eq!(home.json(&["show"])[1]["text"], "The gun.It hung there.Since act one.");
    assert_eq!(home.ok(&["prune", "u0.0"]), "left the window: u0.0 a1.0 (1 token of 6 live now)\n");
    assert_eq!(home.ok(&["pin", "u0.0", "a1.0"]), "pinned: u0.0 a1.0 (6 tokens of 6 live now)\n");
    assert_eq!(
        home.json(&["show"])[1]["pinned"],
        true,
        "what came along is pinned too, because it was named"
    );
    home.ok(&["unpin", "a1.0"]);
    assert_eq!(home.ok(&["delete", "u2.0"]), "deleted: u2.0 (5 tokens of 6 live now)\n");
    assert!(home.err(&["pin", "u2.0"]).contains("u2.0 was deleted: restore it first"));
    assert_eq!(home.ok(&["restore", "u2.0"]), "restored: u2.0 (6 tokens of 6 live now)\n");

    let why = home.json(&["why", "a1.0"]);
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
            "left: hangs on u0.0, which the user sent away",
            "returned: question or answer to u0.0, which came back",
            "pinned: ",
            "unpinned: "
        ]
    );
    let page = home.ok(&["why", "a1.1"]);
    assert!(
        page.starts_with("a1.1 is no more: it was merged\n")
            && page.contains("left: had left before it came here"),
        "{page}"
    );

    // Out, in again under another name, and out: the same but for the name.
    home.ok(&["export", "-o", "main.jsonl"]);
    assert!(
        home.err(&["export", "-o", "main.jsonl"]).contains("main.jsonl is there already: name another file")
    );
    home.ok(&["import", "main.jsonl", "-c", "copy"]);
    home.ok(&["export", "-c", "copy", "-o", "copy.jsonl"]);
    let lines = |text: &str| text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    let (main, copy) = (home.read("main.jsonl"), home.read("copy.jsonl"));
    assert_eq!(lines(&main)[..lines(&main).len() - 1], lines(&copy)[..lines(&copy).len() - 1]);
    assert_eq!(home.ok(&["export"]), main, "standard output gets the same bytes");
    assert!(
        home.err(&["import", "main.jsonl"])
            .contains("there is a conversation 'main' already: give this one another name with -c")
    );
    let listed = home.ok(&["conversations"]);
    assert!(
        listed.contains("main                3         6         6") && listed.contains("none yet"),
        "{listed}"
    );
    assert!(home.ok(&["doctor"]).contains("all is well: every sum, every name"));
}

#[test]
fn mistakes_are_told_and_change_nothing() {
    let home = Home::new();
    home.file("weave.json", WEAVE);
    home.ok(&["import", "weave.json", "-c", "main"]);
    let before = home.json(&["show", "--dead"]);
    for (args, says) in [
        (
            &["show", "-c", "nobody"][..],
            "there is no conversation 'nobody': the only one is 'main' (-c NAME)",
        ),
        (&["why", "a9.0"], "there is no chunk a9.0 in 'main': `halo show --dead` lists them all"),
        (&["pin", "u0.0", "a9.0"], "there is no chunk a9.0"),
        (&["prune", "a1.1"], "a1.1 has left the window already"),
        (&["prune", "u0.0"], "u0.0 cannot leave the window: a1.2 is pinned and hangs on it; unpin it first"),
        (&["merge", "u0.0"], "u0.0 is the first chunk of its turn"),
        (&["resurrect", "u0.0"], "u0.0 is live already"),
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
        let run = home.halo(args);
        assert!(run.status != 0 && run.out.is_empty() && run.err.contains(says), "{args:?}: {}", run.err);
    }
    for (file, text, says) in [
        (
            "zip.json",
            "PK\u{3}\u{4}",
            "it is a zip archive: unpack it and import the conversations.json inside",
        ),
        ("what.bin", "\u{1}\u{2}", "its format is not known; if it is one of halo, halo_weave, sillytavern"),
        ("empty.json", "", "it is empty"),
        ("cut.json", &WEAVE[..500], "cannot be read: EOF while parsing"),
    ] {
        home.file(file, text);
        let said = home.err(&["import", file]);
        assert!(said.contains(says), "{file}: {said}");
    }
    let wrong = home.halo(&["pin", "chunk4"]);
    assert_eq!(wrong.status, 2);
    assert!(wrong.err.contains("write role, turn and sentence, such as u4.0"));
    assert_eq!(home.json(&["show", "--dead"]), before);
}

#[test]
fn everything_can_move_to_another_machine() {
    let (home, other) = (Home::new(), Home::new());
    home.file("weave.json", WEAVE);
    home.file("names.json", r#"[{"role":"user","content":"می‌خواهم 👨‍👩‍👧"}]"#);
    home.ok(&["import", "weave.json", "names.json"]);
    home.ok(&["rename", "names", "👨‍👩‍👧 می‌خواهم"]);
    let listed = home.ok(&["conversations"]);
    assert!(listed.contains("👨‍👩‍👧 می‌خواهم"), "joiners stay, so that the name can be used: {listed}");
    assert!(home.ok(&["show", "-c", "👨‍👩‍👧 می‌خواهم"]).contains("می‌خواهم 👨‍👩‍👧"));
    let folder = home.0.path().join("all");
    let written = home.json(&["export", "--all", "-o", folder.to_str().expect("text")]);
    assert_eq!(written.as_array().map(Vec::len), Some(2));
    let files: Vec<String> =
        ["00001.jsonl", "00002.jsonl"].map(|f| folder.join(f).display().to_string()).into();
    other.ok(&["import", &files[0], &files[1]]);
    assert_eq!(other.json(&["conversations"]), home.json(&["conversations"]));
    let again = other.0.path().join("all");
    other.ok(&["export", "--all", "-o", again.to_str().expect("text")]);
    for file in ["00001.jsonl", "00002.jsonl"] {
        assert_eq!(std::fs::read(folder.join(file)).ok(), std::fs::read(again.join(file)).ok());
    }
    // A name that only looks like something else to SQLite is a file like any other.
    let odd = format!("sqlite:{}/:memory:", home.0.path().display());
    home.ok(&["import", "weave.json", "--store", &odd]);
    assert_eq!(home.json(&["conversations", "--store", &odd]).as_array().map(Vec::len), Some(1));
}

#[test]
fn two_processes_do_not_meet() {
    let home = Home::new();
    home.file("weave.json", WEAVE);
    home.ok(&["import", "weave.json", "-c", "main"]);
    home.ok(&["import", "weave.json", "-c", "other"]);
    let mut store = Database::open(&Location::Sqlite(home.data().join("halo.db"))).expect("it opens");
    store.load("main", Access::Write).expect("it is ours now");
    let said = home.err(&["pin", "u0.0"]);
    let me = std::process::id();
    assert!(said.contains(&format!("opening 'main': another Halo (process {me}) is using it")), "{said}");
    assert_eq!(home.json(&["show"]).as_array().map(Vec::len), Some(4), "looking is free");
    home.ok(&["pin", "-c", "other", "u0.0"]);
    drop(store);
    home.ok(&["pin", "u0.0"]);
}

#[test]
fn the_doctor_tells_of_a_crowded_window() {
    let home = Home::new();
    let said = |n: usize| {
        let words = "word ".repeat(600);
        serde_json::json!({ "role": if n.is_multiple_of(2) { "user" } else { "assistant" }, "content": words })
    };
    for (file, name, messages) in [("small.json", "small", 10), ("large.json", "large", 100)] {
        let said: Vec<Value> = (0..messages).map(said).collect();
        home.file(file, &serde_json::json!({ "messages": said }).to_string());
        home.ok(&["import", "--no-index", file, "-c", name]);
    }
    let told = home.json(&["doctor"]);
    let crowded = told["crowded"].as_object().expect("by name");
    let names: Vec<&String> = crowded.keys().collect();
    assert_eq!(names, ["large"], "{told}");
    assert!(crowded["large"].as_u64().is_some_and(|live| live > 50_000), "{told}");
    assert!(home.ok(&["doctor"]).contains("a lower context.max_tokens mends that"));
}

#[test]
fn the_doctor_mends_a_damaged_file() {
    let home = Home::new();
    home.file("weave.json", WEAVE);
    home.ok(&["import", "weave.json", "-c", "main"]);
    let before = home.json(&["show", "--dead"]);
    let file = home.data().join("halo.db");
    let mut bytes = std::fs::read(&file).expect("there");
    // The name of a token, in the chunk's body; the log has it too, further on.
    let at = bytes.windows(14).position(|w| w == b"It hung there.").expect("it is there");
    bytes[at] ^= 1;
    std::fs::write(&file, &bytes).expect("written");
    let said = home.halo(&["doctor"]);
    assert_eq!(said.status, 1);
    let (out, err) = (said.out, said.err);
    assert!(
        out.contains("wrong  'main'") && err.contains("`halo doctor --fix` makes a copy and mends"),
        "{out}{err}"
    );
    let mended = home.json(&["doctor", "--fix"]);
    assert_eq!(mended["findings"], serde_json::json!([]));
    assert!(Path::new(mended["backup"].as_str().expect("a copy")).exists());
    assert_eq!(home.json(&["show", "--dead"]), before);
    // The whole first page is noise: even that.
    let mut bytes = std::fs::read(&file).expect("there");
    bytes[..4096].fill(b'?');
    std::fs::write(&file, &bytes).expect("written");
    assert!(
        home.err(&["show"])
            .contains("is not a database, or its first page is damaged; `halo doctor` looks closer")
    );
    home.ok(&["doctor", "--fix"]);
    assert_eq!(home.json(&["show", "--dead"]), before);
}

#[test]
fn killed_processes_lose_nothing() {
    let home = Home::new();
    let report = home.json(&["bench", "crash", "--kills", "40", "--power-cuts", "30", "--full-changes", "8"]);
    for zero in ["lost", "hash_mismatches", "power_lost", "power_mismatches", "full_faults"] {
        assert_eq!(report[zero], 0, "{report}");
    }
    assert_eq!(report["kills"], 40);
    assert!(report["acknowledged"].as_u64().is_some_and(|n| n > 100), "{report}");
    assert!(report["open_ms_p99"].as_f64().is_some_and(|ms| ms > 0.0));
}

#[test]
fn the_store_is_measured() {
    let report = Home::new().json(&["bench", "store", "--tokens", "20000", "--live", "2000", "--time", "0"]);
    for key in ["open_ms", "live_ms", "append_ms", "prune_ms", "resurrect_ms", "brightness_ms", "bytes"] {
        assert!(report[key].as_f64().is_some_and(|n| n > 0.0), "{key}: {report}");
    }
    assert_eq!((&report["tokens"], &report["live"]), (&19_968.into(), &1_984.into()));
}
