//! The real binary on a real store: import, show, manual edits, export, locks and repair.

use crate::common::{run_halo, temp_dir};
use halo_core::store::{Access, Store};
use halo_store::database::{Database, StoreLocation};
use serde_json::Value;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// A folder with the data folder and test files.
struct StoreTestHome(tempfile::TempDir);

impl StoreTestHome {
    fn new() -> Self {
        Self(temp_dir())
    }

    fn data_dir(&self) -> PathBuf {
        self.0.path().join("data")
    }

    /// Runs `halo`. File names in the arguments are relative to this folder.
    fn run(&self, args: &[&str]) -> crate::common::HaloOutput {
        let resolve = |arg: &&str| {
            let is_file = [".json", ".jsonl", ".bin"].iter().any(|end| arg.ends_with(end));
            if is_file { self.0.path().join(arg).display().to_string() } else { (*arg).to_owned() }
        };
        let args: Vec<String> = args.iter().map(resolve).collect();
        run_halo(&self.data_dir(), &args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Runs `halo`, which must succeed, and returns stdout.
    fn run_ok(&self, args: &[&str]) -> String {
        let run = self.run(args);
        assert_eq!(run.status, 0, "{args:?}: {}", run.err);
        run.out
    }

    fn run_json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.run_ok(&[args, &["--json"]].concat())).expect("stdout is JSON only")
    }

    /// Runs `halo`, which must fail with this exit status, and returns stderr.
    fn run_err(&self, status: i32, args: &[&str]) -> String {
        let run = self.run(args);
        assert_eq!((run.status, run.out.as_str()), (status, ""), "{args:?}");
        run.err
    }

    fn write_file(&self, name: &str, text: &str) {
        std::fs::write(self.0.path().join(name), text).expect("the file is written");
    }

    fn read_file(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.path().join(name)).expect("the file is readable")
    }
}

/// A small Halo Weave export: three turns, one chunk pruned, one pinned.
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
    assert!(!home.data_dir().exists(), "listing creates no folder");
    home.write_file("weave.json", WEAVE_EXPORT);
    let imported = home.run_json(&["import", "weave.json", "-c", "main"]);
    assert_eq!(imported["conversations"][0]["tokens"], 6);
    assert_eq!(
        (&imported["format"], &imported["lost"]),
        (&"a Halo Weave export".into(), &serde_json::json!({}))
    );

    let live = home.run_json(&["show"]);
    let names = |chunks: &Value| {
        chunks
            .as_array()
            .expect("a list")
            .iter()
            .map(|c| c["chunk"].as_str().expect("a name").to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&live), ["u0.0", "a1.0", "a1.2", "u2.0"]);
    let all = home.run_json(&["show", "--all"]);
    let pruned = &all[2];
    let expected = serde_json::json!({
        "chunk": "a1.1", "turn": 1, "paragraph": 1, "role": "assistant", "position": 3, "tokens": 1,
        "live": false, "live_tokens": 0, "pinned": false, "deleted": false, "forgotten": false, "peak": 77.0,
        "text": "It hung there.", "to_be_forgotten": null, "why": "pruned: before this log begins",
    });
    assert_eq!(pruned, &expected);
    assert_eq!((&all[3]["pinned"], &all[3]["peak"]), (&true.into(), &9500.0.into()));

    // Manual edits.
    assert_eq!(home.run_ok(&["resurrect", "a1.1"]), "resurrected: a1.1 (6 tokens of 6 live now)\n");
    assert_eq!(home.run_ok(&["unpin", "a1.1", "a1.2"]), "unpinned: a1.1 a1.2 (6 tokens of 6 live now)\n");
    assert_eq!(home.run_ok(&["merge", "a1.1", "a1.2"]), "merged: a1.1 a1.2 (6 tokens of 6 live now)\n");
    assert_eq!(home.run_json(&["show"])[1]["text"], "The gun.It hung there.Since act one.");
    assert_eq!(home.run_ok(&["prune", "u0.0"]), "pruned: u0.0 a1.0 (1 token of 6 live now)\n");
    assert_eq!(home.run_ok(&["pin", "u0.0", "a1.0"]), "pinned: u0.0 a1.0 (6 tokens of 6 live now)\n");
    assert_eq!(
        home.run_json(&["show"])[1]["pinned"],
        true,
        "a1.0 is pinned too, because the command named it"
    );
    home.run_ok(&["unpin", "a1.0"]);
    assert_eq!(home.run_ok(&["delete", "u2.0"]), "deleted: u2.0 (5 tokens of 6 live now)\n");
    assert!(home.run_err(2, &["pin", "u2.0"]).contains("u2.0 is deleted; undelete it first"));
    assert_eq!(home.run_ok(&["undelete", "u2.0"]), "undeleted: u2.0 (6 tokens of 6 live now)\n");

    let history = home.run_json(&["why", "a1.0"]);
    let events: Vec<_> = history["events"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|e| {
            format!("{}: {}", e["what"].as_str().unwrap_or_default(), e["why"].as_str().unwrap_or_default())
        })
        .collect();
    assert_eq!(
        events,
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

    // Export, import under another name and export again: only the name differs.
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
    assert_eq!(home.run_ok(&["export"]), main, "export to stdout gives the same bytes");
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
    for (args, message) in [
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
        assert!(run.status != 0 && run.out.is_empty() && run.err.contains(message), "{args:?}: {}", run.err);
    }
    for (file, text, message) in [
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
        let stderr = home.run_err(2, &["import", file]);
        assert!(stderr.contains(message), "{file}: {stderr}");
    }
    let run = home.run(&["pin", "chunk4"]);
    assert_eq!(run.status, 2);
    assert!(run.err.contains("write role, turn and index, such as u4.0"));
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
    assert!(listed.contains("👨‍👩‍👧 می‌خواهم"), "joiners are printed, so that the name can be copied: {listed}");
    assert!(home.run_ok(&["show", "-c", "👨‍👩‍👧 می‌خواهم"]).contains("می‌خواهم 👨‍👩‍👧"));
    let folder = home.0.path().join("all");
    let written = home.run_json(&["export", "--all", "-o", folder.to_str().expect("UTF-8")]);
    assert_eq!(written.as_array().map(Vec::len), Some(2));
    let files: Vec<String> =
        ["00001.jsonl", "00002.jsonl"].map(|f| folder.join(f).display().to_string()).into();
    other.run_ok(&["import", &files[0], &files[1]]);
    assert_eq!(other.run_json(&["conversations"]), home.run_json(&["conversations"]));
    let second_folder = other.0.path().join("all");
    other.run_ok(&["export", "--all", "-o", second_folder.to_str().expect("UTF-8")]);
    for file in ["00001.jsonl", "00002.jsonl"] {
        assert_eq!(std::fs::read(folder.join(file)).ok(), std::fs::read(second_folder.join(file)).ok());
    }
    // `:memory:` has a special meaning to SQLite; in a path it names a file.
    let memory_path = format!("sqlite:{}/:memory:", home.0.path().display());
    home.run_ok(&["import", "weave.json", "--store", &memory_path]);
    assert_eq!(home.run_json(&["conversations", "--store", &memory_path]).as_array().map(Vec::len), Some(1));
}

#[test]
fn lock_excludes_second_process_per_conversation() {
    let home = StoreTestHome::new();
    home.write_file("weave.json", WEAVE_EXPORT);
    home.run_ok(&["import", "weave.json", "-c", "main"]);
    home.run_ok(&["import", "weave.json", "-c", "other"]);
    let mut store =
        Database::open(&StoreLocation::Sqlite(home.data_dir().join("halo.db"))).expect("the store opens");
    store.load("main", Access::Write).expect("the lock is free");
    let stderr = home.run_err(5, &["pin", "u0.0"]);
    let pid = std::process::id();
    assert!(
        stderr.contains(&format!("opening 'main': another Halo (process {pid}) is using it")),
        "{stderr}"
    );
    assert_eq!(home.run_json(&["show"]).as_array().map(Vec::len), Some(4), "reading needs no lock");
    home.run_ok(&["pin", "-c", "other", "u0.0"]);
    drop(store);
    home.run_ok(&["pin", "u0.0"]);
}

#[test]
fn doctor_reports_oversized_context_window() {
    let home = StoreTestHome::new();
    let message = |n: usize| {
        let words = "word ".repeat(600);
        serde_json::json!({ "role": if n.is_multiple_of(2) { "user" } else { "assistant" }, "content": words })
    };
    for (file, name, count) in [("small.json", "small", 10), ("large.json", "large", 100)] {
        let messages: Vec<Value> = (0..count).map(message).collect();
        home.write_file(file, &serde_json::json!({ "messages": messages }).to_string());
        home.run_ok(&["import", "--no-index", file, "-c", name]);
    }
    let report = home.run_json(&["doctor"]);
    let oversized = report["oversized_windows"].as_object().expect("an object");
    let names: Vec<&String> = oversized.keys().collect();
    assert_eq!(names, ["large"], "{report}");
    assert!(oversized["large"].as_u64().is_some_and(|live| live > 50_000), "{report}");
    assert!(home.run_ok(&["doctor"]).contains("lower context.max_tokens"));
}

/// `halo stats --totals` has the figures of the timeline and the index.
#[test]
fn stats_totals_report_live_dead_and_next() {
    let home = StoreTestHome::new();
    home.write_file("weave.json", WEAVE_EXPORT);
    home.run_ok(&["import", "weave.json", "-c", "main"]);
    let shown = home.run_json(&["show", "--all"]);
    let chunks = shown.as_array().expect("chunks");
    let sum = |key: &str| chunks.iter().filter_map(|chunk| chunk[key].as_u64()).sum::<u64>();
    let (all, live) = (sum("tokens"), sum("live_tokens"));
    assert!(live > 0 && live < all, "{shown}");
    let last_turn = chunks.iter().filter_map(|chunk| chunk["turn"].as_u64()).max().expect("a turn");
    let figures = home.run_json(&["stats", "--totals"]);
    assert_eq!(
        figures,
        serde_json::json!({
            "live_tokens": live,
            "dead_tokens": all - live,
            "semantic_entries": chunks.len(),
            "next_position": all,
            "next_turn": last_turn + 1,
        })
    );
    let text = home.run_ok(&["stats", "--totals"]);
    assert!(
        text.lines().any(|line| line.starts_with("dead tokens") && line.ends_with(&(all - live).to_string()))
    );
}

/// Doctor says whether the model reports attention: a local model does, a server with OpenAI's API does not.
#[test]
fn doctor_says_whether_the_model_reports_attention() {
    let home = StoreTestHome::new();
    home.write_file("weave.json", WEAVE_EXPORT);
    home.run_ok(&["import", "weave.json", "-c", "main"]);
    let local = crate::common::chat_model().display().to_string();
    assert_eq!(home.run_json(&["doctor", "--model", &local])["attention"], true);
    assert!(home.run_ok(&["doctor", "--model", &local]).contains("it reports attention"));

    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = format!("openai+http://{}/v1", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().filter_map(Result::ok) {
            let body = r#"{"object":"list","data":[{"id":"plain","object":"model"}]}"#;
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n";
            let _ = std::io::Read::read(&mut stream, &mut [0; 4096]);
            let _ = write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len());
        }
    });
    let report = home.run_json(&["doctor", "--model", &address]);
    assert_eq!(report["attention"], false, "{report}");
    let text = home.run_ok(&["doctor", "--model", &address]);
    assert!(text.contains("the model reports no attention: this server does not send it"), "{text}");
    let missing = home.run_json(&["doctor", "--model", "/no/such/model.gguf"]);
    assert_eq!(missing["attention"], Value::Null, "{missing}");
}

/// While a server has the store open, a repair must not replace the file under it, even if no conversation is open.
#[test]
fn doctor_fix_waits_for_a_running_server() {
    let home = StoreTestHome::new();
    home.write_file("weave.json", WEAVE_EXPORT);
    home.run_ok(&["import", "weave.json", "-c", "main"]);
    let path = home.data_dir().join("halo.db");
    let location = StoreLocation::Sqlite(path.clone());
    let mut served = Database::open(&location).expect("the store opens");
    served.keep_in_use().expect("the store is free");
    served.load("main", Access::Write).expect("the conversation loads");
    served.release_lease("main");
    let mut bytes = std::fs::read(&path).expect("the file is read");
    let before = bytes.clone();
    bytes[..16].fill(b'x');
    std::fs::write(&path, &bytes).expect("the file is written");
    let refused = home.run(&["doctor", "--fix"]);
    assert!(
        refused.status != 0 && refused.err.contains("another Halo is using the store"),
        "{}",
        refused.err
    );
    std::fs::write(&path, &before).expect("the file is written");
    drop(served);
    home.run_ok(&["doctor", "--fix"]);
}

/// The write-ahead log has lost commits: the first command says so, and keeps the log. A store that an interrupted repair has
/// moved away is not taken for an empty one.
#[test]
fn doctor_reports_lost_commits_and_missing_files() {
    let home = StoreTestHome::new();
    home.write_file("weave.json", WEAVE_EXPORT);
    home.run_ok(&["import", "weave.json", "-c", "main"]);
    let path = home.data_dir().join("halo.db");
    let wal = home.data_dir().join("halo.db-wal");
    let mut store = Database::open(&StoreLocation::Sqlite(path.clone())).expect("the store opens");
    let mut timeline = store.load("main", Access::Write).expect("the conversation loads");
    for _ in 0..5 {
        let change = halo_core::change::Change::Batch(Vec::new());
        store
            .transact("main", &mut timeline, &change, halo_core::store::Durability::Immediate)
            .expect("the change is committed");
    }
    let (file, mut log) = (std::fs::read(&path).expect("read"), std::fs::read(&wal).expect("read"));
    drop(store);
    let middle = log.len() / 2;
    log[middle] ^= 1;
    std::fs::write(&path, file).expect("the file is written");
    std::fs::write(&wal, log).expect("the log is written");
    let report = home.run_json(&["doctor"]);
    assert!(report["wal_damage"]["lost_commits"].as_u64() > Some(0), "{report}");
    let kept = report["wal_damage"]["kept_as"].as_str().expect("the log is kept");
    assert!(kept.ends_with("halo.db.damaged-1-wal") && Path::new(kept).exists(), "{kept}");
    assert_eq!(home.run_json(&["doctor"])["wal_damage"], Value::Null, "it is reported once");

    std::fs::rename(&path, home.data_dir().join("halo.db.repaired-1")).expect("the file is renamed");
    let _ = std::fs::remove_file(&wal);
    let import = ["import", "weave.json", "-c", "other"];
    for command in [&["doctor"][..], &["conversations"], &["show", "-c", "main"], &import] {
        let refused = home.run(command);
        assert!(
            refused.status != 0 && refused.err.contains("halo.db.repaired-1"),
            "{command:?}: {}",
            refused.err
        );
    }
    assert!(!path.exists(), "no empty store was created");
}

#[test]
fn doctor_fix_repairs_damaged_store() {
    let home = StoreTestHome::new();
    home.write_file("weave.json", WEAVE_EXPORT);
    home.run_ok(&["import", "weave.json", "-c", "main"]);
    let before = home.run_json(&["show", "--all"]);
    let file = home.data_dir().join("halo.db");
    let mut bytes = std::fs::read(&file).expect("the file is readable");
    // The first match is the text in the chunk body; the log contains it too, after that.
    let at = bytes.windows(14).position(|w| w == b"It hung there.").expect("the text is stored");
    bytes[at] ^= 1;
    std::fs::write(&file, &bytes).expect("the file is written");
    let run = home.run(&["doctor"]);
    assert_eq!(run.status, 1);
    let (out, err) = (run.out, run.err);
    assert!(
        out.contains("error  'main'") && err.contains("`halo doctor --fix` makes a backup and repairs"),
        "{out}{err}"
    );
    let fixed = home.run_json(&["doctor", "--fix"]);
    assert_eq!(fixed["findings"], serde_json::json!([]));
    assert!(Path::new(fixed["backup"].as_str().expect("the path of the backup")).exists());
    assert_eq!(home.run_json(&["show", "--all"]), before);
    // A destroyed first page can be repaired too.
    let mut bytes = std::fs::read(&file).expect("the file is readable");
    bytes[..4096].fill(b'?');
    std::fs::write(&file, &bytes).expect("the file is written");
    assert!(home.run_err(7, &["show"]).contains(
        "is not a database, or its first page is damaged\nhalo: hint: `halo doctor` examines the store"
    ));
    home.run_ok(&["doctor", "--fix"]);
    assert_eq!(home.run_json(&["show", "--all"]), before);
}
