//! Random data folders with a word in every kind of place that can hold text. After the word is forgotten, no byte of any file
//! and no file name has it, and everything else is still there.
//!
//! `HALO_FORGET_CASES` sets the number of cases, `HALO_FORGET_SEED` replays one.

use crate::common::{HaloOutput, files_with, run_halo};
use crate::postgres_server::PostgresTestServer;
use halo_core::store::{Access, MessageKey, RecordKind, Store};
use halo_core::token::{Role, TurnId};
use halo_engine::branch::{BranchPoint, create_branch};
use halo_store::database::{Database, StoreLocation};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Random numbers from a seed (SplitMix64), so that a case can be replayed.
struct CaseRng(u64);

impl CaseRng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Where a case is stored: a data folder, and with PostgreSQL a database.
#[derive(Clone, Copy)]
struct CasePlace<'a> {
    data: &'a Path,
    postgres: Option<(&'a PostgresTestServer, &'a str)>,
}

impl CasePlace<'_> {
    fn run(&self, args: &[&str]) -> HaloOutput {
        match self.postgres {
            None => run_halo(self.data, args),
            Some((_, url)) => run_halo(self.data, &[args, &["--store", url]].concat()),
        }
    }

    fn run_ok(&self, args: &[&str]) -> String {
        let run = self.run(args);
        assert_eq!(run.status, 0, "{args:?}: {}", run.err);
        run.out
    }

    fn open(&self) -> Database {
        let location = match self.postgres {
            None => StoreLocation::Sqlite(self.data.join("halo.db")),
            Some((_, url)) => url.parse().expect("an address"),
        };
        Database::open(&location).expect("the store opens")
    }

    /// The lines of a dump of the database that have a text, in lower case; columns of bytes are hexadecimal digits there.
    fn rows_with(&self, text: &str) -> Vec<PathBuf> {
        let Some((server, url)) = self.postgres else { return Vec::new() };
        let hex = |text: &str| text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
        let (lower, upper) = (text.to_lowercase(), text.to_uppercase());
        let parts = [lower.clone(), hex(text), hex(&lower), hex(&upper)];
        let dump = server.dump(url).to_lowercase();
        let found = dump.lines().filter(|line| parts.iter().any(|part| line.contains(part)));
        found.map(|line| PathBuf::from(line.chars().take(200).collect::<String>())).collect()
    }

    /// The files whose bytes or whose name have a word, in any case, and the rows of the database.
    fn traces_of(&self, word: &str) -> Vec<PathBuf> {
        [traces_of(self.data, word), self.rows_with(word)].concat()
    }

    fn holds(&self, text: &str) -> bool {
        let files =
            files_with(self.data, |_, bytes| bytes.windows(text.len()).any(|part| part == text.as_bytes()));
        !files.is_empty() || !self.rows_with(text).is_empty()
    }
}

/// A data folder under construction.
struct CaseFolder<'a> {
    place: CasePlace<'a>,
    data: &'a Path,
    rng: CaseRng,
    word: String,
    /// Texts that must survive.
    kept: Vec<String>,
    /// How many places have the word.
    places: usize,
    last_text: usize,
}

impl CaseFolder<'_> {
    /// A text with the word, or one that must survive.
    fn text(&mut self) -> String {
        self.last_text += 1;
        let n = self.last_text;
        if self.rng.chance(40) {
            self.places += 1;
            let word = if self.rng.chance(30) { self.word.to_uppercase() } else { self.word.clone() };
            return format!("Text {n} tells of {word}, and nobody knows.");
        }
        let text = format!("Text {n} is kept for good.");
        self.kept.push(text.clone());
        text
    }

    /// A text of which it does not matter whether it survives, such as a memory of erased turns.
    fn loose_text(&mut self) -> String {
        let before = self.kept.len();
        let text = self.text();
        self.kept.truncate(before);
        text
    }

    /// Imports a conversation. Its name is made of its first message, or chosen, or has the word.
    fn add_conversation(&mut self, n: usize) -> String {
        let turns = 2 + self.rng.below(6) as usize;
        let mut texts: Vec<String> = (0..turns).map(|_| self.text()).collect();
        // A recording and saved KV cells have only text of their conversation, so the conversation has the word.
        let at = self.rng.below(turns as u64) as usize;
        self.kept.retain(|text| *text != texts[at]);
        texts[at] = format!("Message {n} tells of {}, and nobody knows.", self.word);
        let name = match self.rng.below(4) {
            0 => texts[0].chars().take(48).collect::<String>().trim().to_owned(),
            1 => {
                self.places += 1;
                format!("All about {} {n}", self.word)
            }
            _ => format!("chosen {n}"),
        };
        let messages = texts.iter().enumerate().map(|(n, text)| {
            let role = if n.is_multiple_of(2) { "user" } else { "assistant" };
            json!({ "role": role, "content": text })
        });
        let file = self.data.join("import.json");
        let content = json!({ "messages": messages.collect::<Vec<Value>>() }).to_string();
        std::fs::write(&file, content).expect("the file is written");
        self.place.run_ok(&["import", file.to_str().expect("UTF-8"), "-c", &name]);
        std::fs::remove_file(&file).expect("the file is removed");
        let mut store = self.place.open();
        store.load(&name, Access::Write).expect("the conversation is writable");
        self.add_records(&mut store, &name, turns as u32);
        if self.rng.chance(50) {
            let at = BranchPoint::after(TurnId(turns as u32 - 1));
            create_branch(&mut store, &name, &format!("{name} · branch 2"), &at).expect("a branch");
        }
        name
    }

    fn add_records(&mut self, store: &mut Database, name: &str, turns: u32) {
        let mut put = |kind: RecordKind, key: &str, value: &str| {
            store.put_record(name, kind, key, Some(value)).expect("the record is stored");
        };
        if self.rng.chance(60) {
            let (topic, reminder) = (self.text(), self.text());
            let key = if self.rng.chance(30) { format!("on {}", self.word) } else { "on tea".to_owned() };
            let notes =
                json!({ "topics": { key: 3, "other": topic }, "reminders": [reminder], "scratch": {} });
            put(RecordKind::Note, "notes.json", &notes.to_string());
        }
        if self.rng.chance(20) {
            put(RecordKind::Note, &format!("{}.json", self.word), "{}");
        }
        for n in 0..self.rng.below(3) {
            let value = json!({ "role": "user", "text": self.text() });
            put(RecordKind::ClientSummary, &format!("{n:016x}"), &value.to_string());
        }
        if self.rng.chance(40) {
            let prompt = self.text();
            put(RecordKind::SystemPrompt, "0000000000", &prompt);
            put(RecordKind::Setting, "system", &prompt);
        }
        for n in 0..self.rng.below(3) {
            let to = self.rng.below(u64::from(turns));
            let memory = json!({
                "from": [0, 0], "to": [to, 0], "text": self.loose_text(), "model": "m", "formed": to, "at": 5,
                "operations": [self.loose_text()],
            });
            put(RecordKind::Memory, &format!("{:08}", n + 1), &memory.to_string());
        }
        if self.rng.chance(40) {
            // The error of a failed turn names the conversation.
            let why = format!("saving '{name}': the disk is full");
            let record = json!({ "finish": "failed", "why": why, "premise": self.loose_text() });
            put(RecordKind::Turn, "1", &record.to_string());
        }
        if self.rng.chance(40) {
            put(RecordKind::Variant, "0000000001", &json!({ "after": 0, "turns": [1] }).to_string());
        }
        // As earlier versions wrote it.
        if self.rng.chance(30) {
            let parent = json!({ "key": format!("5\0{name}"), "tokens": 3 });
            put(RecordKind::Setting, "branch.parent", &parent.to_string());
        }
        if self.rng.chance(50) {
            self.add_captures(store, name, turns);
        }
        if self.rng.chance(50) {
            let key = MessageKey {
                turn: TurnId(0),
                role: Role::User,
                exact_hash: self.rng.next(),
                loose_hash: self.rng.next(),
                name_hash: 0,
                length: 9,
                prefix_hash: self.rng.next(),
            };
            store.put_message_keys(name, &[key]).expect("the key is stored");
        }
    }

    /// Recordings: noted with a relative path, with an absolute one, with that of the folder it was copied from; and one that
    /// was interrupted, which has no note.
    fn add_captures(&mut self, store: &mut Database, name: &str, turns: u32) {
        let summary = store.find_conversation(name).expect("the store is read").expect("the conversation");
        for n in 0..4 {
            let turn = self.rng.below(u64::from(turns));
            let relative = format!("captures/{}/turn-{turn}.{n}", summary.id);
            let folder = self.data.join(&relative);
            std::fs::create_dir_all(&folder).expect("the folder is created");
            std::fs::write(folder.join("steps.jsonl"), self.loose_text()).expect("the file is written");
            let note = match n {
                0 => relative,
                1 => folder.display().to_string(),
                2 => format!("/gone/elsewhere/{relative}"),
                _ => continue,
            };
            std::fs::write(folder.join("capture.json"), self.loose_text()).expect("the file is written");
            // Without the turn it may have any text of the conversation.
            let value = json!({ "steps": 3, "model": "m" }).to_string();
            store.put_record(name, RecordKind::Capture, &note, Some(&value)).expect("the record is stored");
        }
    }

    fn add_files(&mut self) {
        let typed: Vec<String> = (0..4).map(|_| self.text()).collect();
        let lines = format!("#V2\n{}\\n{}\n{}\n/search {}\n", typed[0], typed[1], typed[2], typed[3]);
        // A line of two typed texts goes with either.
        if [0, 1].iter().any(|&n| typed[n].to_lowercase().contains(&self.word.to_lowercase())) {
            self.kept.retain(|text| ![&typed[0], &typed[1]].contains(&text));
        }
        std::fs::write(self.data.join("chat_history.txt"), lines).expect("the file is written");
        let kv = self.data.join("kv").join("0".repeat(32)).join("1".repeat(32));
        std::fs::create_dir_all(&kv).expect("the folder is created");
        std::fs::write(kv.join("0000000000000000.0-1.kv"), &self.word).expect("the file is written");
        self.places += 1;
    }
}

/// The files below a folder whose bytes or whose name have a word, in any case.
fn traces_of(folder: &Path, word: &str) -> Vec<PathBuf> {
    let lower = word.to_lowercase();
    files_with(folder, |path, bytes| {
        let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
        let has_word =
            |bytes: &[u8]| bytes.windows(word.len()).any(|part| part.eq_ignore_ascii_case(lower.as_bytes()));
        has_word(bytes) || name.contains(&lower)
    })
}

/// Sets the due times of all pending requests to the past.
fn expire_grace_periods(place: CasePlace<'_>) {
    let mut store = place.open();
    for summary in store.list_conversations().expect("the conversations are listed") {
        let records = store.records(&summary.name, RecordKind::Setting).expect("the settings are read");
        let Some(record) = records.iter().find(|record| record.key == "lethe.pending") else { continue };
        let mut pending: Value = serde_json::from_str(&record.value).expect("JSON");
        pending.as_array_mut().expect("a list").iter_mut().for_each(|request| request["due"] = 1.into());
        let value = pending.to_string();
        store.put_record(&summary.name, RecordKind::Setting, "lethe.pending", Some(&value)).expect("stored");
    }
}

fn check_case(seed: u64, server: Option<&PostgresTestServer>) {
    let home = crate::common::temp_dir();
    let url = server.map(PostgresTestServer::new_database);
    let postgres = server.zip(url.as_deref());
    let place = CasePlace { data: home.path(), postgres };
    let mut case = CaseFolder {
        place,
        data: home.path(),
        rng: CaseRng(seed),
        word: format!("Quok{:x}ville", seed & 0xfff_ffff),
        kept: Vec::new(),
        places: 0,
        last_text: 0,
    };
    for n in 0..1 + case.rng.below(3) as usize {
        case.add_conversation(n);
    }
    case.add_files();
    assert!(!place.traces_of(&case.word).is_empty(), "seed {seed}: the word is stored");
    let everywhere = ["forget", "--everywhere", "--matching", case.word.as_str(), "--yes"];
    let forget = |args: &[&str]| place.run(&[&everywhere, args].concat());
    let is_everywhere_gone = |run: &HaloOutput| run.status == 0 || run.err.contains("nothing matches");
    match case.rng.below(3) {
        // The grace period ends by itself.
        0 => {
            let run = forget(&[]);
            assert!(is_everywhere_gone(&run), "seed {seed}: {}", run.err);
            expire_grace_periods(place);
            place.run_ok(&["forget", "--due"]);
        }
        // It is cut short.
        1 => {
            forget(&[]);
            let run = forget(&["--now"]);
            assert!(is_everywhere_gone(&run), "seed {seed}: {}", run.err);
            expire_grace_periods(place);
            place.run_ok(&["forget", "--due"]);
        }
        _ => {
            let run = forget(&["--now"]);
            assert!(is_everywhere_gone(&run), "seed {seed}: {}", run.err);
        }
    }
    assert_eq!(place.traces_of(&case.word), Vec::<PathBuf>::new(), "seed {seed}: {} places", case.places);
    let again = forget(&["--now"]);
    assert!(again.status == 1 && again.err.contains("nothing matches"), "seed {seed}: {}", again.err);
    for text in &case.kept {
        assert!(place.holds(text), "seed {seed}: {text:?} is lost");
    }
    place.run_ok(&["doctor"]);
    let proofs: Value = serde_json::from_str(&place.run_ok(&["forget", "--proofs", "--json"])).expect("JSON");
    assert!(proofs.as_array().expect("a list").iter().all(|proof| proof["sound"] == true), "seed {seed}");
}

#[test]
fn forget_property_leaves_no_word_in_any_file() {
    if let Some(seed) = std::env::var("HALO_FORGET_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return check_case(seed, None);
    }
    for seed in 0..crate::common::iterations("HALO_FORGET_CASES", 8) as u64 {
        check_case(seed, None);
    }
}

/// The same with the texts in tables: a dump of the database has no trace. What stays in the write-ahead log of the server is
/// said (`forget_names_the_log_of_a_postgres_server`).
#[test]
fn forget_property_leaves_no_word_in_any_table() {
    let server = PostgresTestServer::start(&[]);
    if let Some(seed) = std::env::var("HALO_FORGET_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return check_case(seed, Some(&server));
    }
    let cases = crate::common::iterations("HALO_FORGET_CASES", 8).div_ceil(3) as u64;
    for seed in 0..cases {
        check_case(seed, Some(&server));
    }
}

#[test]
fn forget_names_the_log_of_a_postgres_server() {
    let (server, home) = (PostgresTestServer::start(&[]), crate::common::temp_dir());
    let url = server.new_database();
    let place = CasePlace { data: home.path(), postgres: Some((&server, &url)) };
    let file = home.path().join("import.json");
    let content = json!({ "messages": [{ "role": "user", "content": "I live in Quokkatown." }] });
    std::fs::write(&file, content.to_string()).expect("the file is written");
    place.run_ok(&["import", file.to_str().expect("UTF-8"), "-c", "main"]);
    let run = place.run(&["forget", "--matching", "Quokkatown", "--now", "--yes"]);
    assert_eq!(run.status, 0, "{}", run.err);
    for part in ["the words stay in the write-ahead log of the PostgreSQL server", "CHECKPOINT", "archives"] {
        assert!(run.err.contains(part), "{part}: {}", run.err);
    }
}
