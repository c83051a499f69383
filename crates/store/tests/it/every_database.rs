//! One story, every database: what is committed comes back, whatever happened in between.

use crate::common::TestDatabase;
use halo_core::Error;
use halo_core::change::{Append, Change};
use halo_core::conversation_copy::TurnCopy;
use halo_core::row_store::{Row, RowKind, RowStore};
use halo_core::store::{Access, Durability, Embedding, MessageKey, MessageLookup, RecordKind, Store};
use halo_core::testing::doubles::ScriptedModel;
use halo_core::testing::timeline_fuzz::{FuzzOp, TimelineFuzz};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, Position, Role, TurnId};
use halo_store::database::{Database, StoreLocation};
use halo_store::exchange::ImportRequest;
use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;

/// Runs each story on each database.
macro_rules! test_on_every_database {
    ($($story:ident),* $(,)?) => {
        mod sqlite { $(#[test] fn $story() { super::$story(&crate::common::sqlite()); })* }
        mod postgres { $(#[test] fn $story() { super::$story(&crate::common::postgres()); })* }
    };
}

test_on_every_database!(
    reload_restores_random_histories,
    conversations_are_isolated,
    records_and_embeddings_are_stored,
    history_lists_all_changes_of_a_chunk,
    lease_allows_one_writer_at_a_time,
    commit_rejects_writer_that_missed_a_log_entry,
    commit_of_invalid_change_leaves_no_trace,
    conversation_names_are_validated,
    export_import_round_trip_is_byte_identical,
    import_rejects_damaged_export,
    copy_conversation_keeps_tokens_and_can_branch,
    turn_times_are_those_of_the_first_token,
    import_reads_foreign_formats,
    doctor_finds_and_repairs_damaged_rows,
    commit_rejects_stale_timeline,
    records_can_precede_first_message,
    repair_recovers_chunks_from_truncated_log,
    repair_recovers_conversation_without_log,
    forget_erases_chunks_and_keeps_the_rest,
    world_rows_are_stored_beside_conversations,
    message_keys_find_conversations,
    transaction_commits_all_changes_or_none,
    lease_release_lets_another_writer_take_over,
);

fn chunk_id(name: &str) -> ChunkId {
    name.parse().expect("a name")
}

/// Chunks of random lives are forgotten: nothing else moves, the log tells the same as what stands, the doctor finds nothing
/// wrong, and what was forgotten says nothing any more.
fn forget_erases_chunks_and_keeps_the_rest(place: &TestDatabase) {
    let mut dice = StoreTestRng(17);
    let mut forgotten = 0;
    for life in 0..12 {
        let name = format!("life {life}");
        let world = dice.random_history(40);
        let mut store = place.open();
        let mut timeline = store.load(&name, Access::Write).expect("new");
        for change in &world.changes {
            store.transact(&name, &mut timeline, change, Durability::Deferred).expect("it is written");
        }
        let all: Vec<ChunkId> = timeline.chunks().map(|chunk| chunk.id()).collect();
        let goes: Vec<ChunkId> = all.iter().copied().filter(|_| dice.next_u64().is_multiple_of(3)).collect();
        let texts = |store: &mut Database| -> Vec<(ChunkId, String, usize)> {
            let said = store.chunk_texts(&name, &all).expect("they are read");
            said.into_iter().map(|gone| (gone.chunk, gone.text, gone.tokens)).collect()
        };
        let before = texts(&mut store);
        let told = store.forget(&name, &goes, &[]).expect("it forgets");
        assert_eq!(told.len(), goes.len());
        forgotten += goes.len();
        let mut store = place.reopen(store);
        for (old, new) in before.iter().zip(texts(&mut store)) {
            let gone = goes.contains(&old.0);
            assert_eq!((old.0, old.2), (new.0, new.2), "nothing moves");
            assert_eq!(new.1, if gone { "" } else { old.1.as_str() }, "{name}, {}", old.0);
        }
        let findings = store.check_integrity(&mut |_, _| {}).expect("it looks");
        assert!(findings.is_empty(), "{name}: {findings:?}");
        let after = store.load(&name, Access::Read).expect("it opens");
        assert!(goes.iter().all(|&id| after.chunk(id).is_some_and(|chunk| chunk.is_deleted())));
        assert_eq!(after.len(), timeline.len());
        let missing = store.forget(&name, &[ChunkId::new(Role::User, TurnId(9999), 0)], &[]);
        assert!(missing.is_err_and(|why| why.to_string().contains("there is no chunk u9999.0")));
        store.forget_conversation(&name).expect("all of it");
        assert!(store.list_conversations().expect("a list").iter().all(|known| known.name != name));
    }
    assert!(forgotten > 20);
}

/// Namespaces have names that no conversation can have, and one process at a time leases one.
fn world_rows_are_stored_beside_conversations(place: &TestDatabase) {
    let mut store = place.open();
    const HEADER: RowKind = RowKind::from_static("world");
    const MESSAGE: RowKind = RowKind::from_static("said");
    const COMMAND: RowKind = RowKind::from_static("post");
    let row = |kind, key: &str, value: &str| Row { kind, key: key.into(), value: value.into() };
    store.load("lamp", Access::Write).expect("a conversation of the same name");
    let rows = [
        row(HEADER, "0", "head"),
        row(MESSAGE, "000100000001", "one, \u{1F642}"),
        row(MESSAGE, "000100000002", "two"),
        row(MESSAGE, "000200000003", "elsewhere"),
        row(COMMAND, "1", "asked"),
    ];
    store.put_rows("lamp", &rows, &[]).expect("written");
    store.put_rows("lamp", &[row(HEADER, "0", "newer")], &[(COMMAND, "1".into())]).expect("written");
    let names = |store: &mut Database| -> Vec<String> {
        store.list_namespaces().expect("listed").into_iter().map(|summary| summary.name).collect()
    };
    let mut store = place.reopen(store);
    assert_eq!(names(&mut store), ["lamp"]);
    assert!(store.list_conversations().expect("a list").iter().all(|known| !known.name.contains("world:")));
    let values = |store: &mut Database, kind, keys: std::ops::Range<&str>, last| -> Vec<String> {
        store.load_rows("lamp", &kind, keys, last).expect("read").into_iter().map(|row| row.value).collect()
    };
    assert_eq!(values(&mut store, HEADER, "0".."9", 10), ["newer"]);
    assert_eq!(values(&mut store, MESSAGE, "0001".."0002", 10), ["one, \u{1F642}", "two"]);
    assert_eq!(values(&mut store, MESSAGE, "0001".."0002", 1), ["two"], "the last of them");
    assert_eq!(values(&mut store, MESSAGE, "0".."9", 10).len(), 3);
    assert_eq!(values(&mut store, COMMAND, "0".."9", 10), Vec::<String>::new());
    let why = store.load("world:lamp", Access::Write).expect_err("it is no conversation");
    assert!(why.to_string().contains("belong to worlds of rooms"), "{why}");
    store.lease_namespace("lamp").expect("no other lease");
    let why = place.open().lease_namespace("lamp").expect_err("leased");
    assert!(why.to_string().contains("another Halo"), "{why}");
    assert!(store.check_integrity(&mut |_, _| {}).expect("it looks").is_empty());
    store.delete_namespace("lamp").expect("deleted");
    assert_eq!((names(&mut store), values(&mut store, MESSAGE, "0".."9", 10)), (Vec::new(), Vec::new()));
    assert!(store.delete_namespace("lamp").is_err());
}

/// Dice that fall the same way every time.
struct StoreTestRng(u64);

impl StoreTestRng {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn random_history(&mut self, len: usize) -> TimelineFuzz {
        let ops: Vec<FuzzOp> = (0..len).map(|_| (self.next_u64() as u32).to_le_bytes()).collect();
        TimelineFuzz::run(&ops)
    }
}

/// Every change of a random life is committed; now and then what is dead goes out of memory, now and then the
/// store is closed and opened again. The state is the one that never saw a store, and the log tells it too.
fn reload_restores_random_histories(place: &TestDatabase) {
    let mut dice = StoreTestRng(3);
    for life in 0..if cfg!(debug_assertions) { 60 } else { 400 } {
        let name = format!("life {life}");
        let world = dice.random_history(30);
        let mut store = place.open();
        let mut timeline = store.load(&name, Access::Write).expect("new");
        for change in &world.changes {
            let durability =
                if dice.next_u64().is_multiple_of(2) { Durability::Immediate } else { Durability::Deferred };
            store.transact(&name, &mut timeline, change, durability).expect("it is written");
            match dice.next_u64() % 12 {
                0 | 1 => drop(timeline.unload_pruned()),
                2 => {
                    drop(store);
                    store = place.open();
                    let hash = timeline.state_hash();
                    timeline = store.load(&name, Access::Write).expect("it opens again");
                    assert_eq!(timeline.state_hash(), hash, "{name} after {change:?}");
                    timeline.check_invariants().expect("sound");
                }
                _ => {}
            }
        }
        let hash = world.timeline.state_hash();
        assert_eq!(timeline.state_hash(), hash);
        assert_eq!(store.load(&name, Access::Read).expect("it opens").state_hash(), hash);
        assert_eq!(
            store.replay_log(&name).expect("the log is whole").state_hash(),
            hash,
            "{name} by its log"
        );
        load_all_bodies(&mut store, &name, &mut timeline);
        assert_eq!(timeline, world.timeline);
    }
}

fn load_all_bodies(store: &mut Database, name: &str, timeline: &mut Timeline) {
    let away: Vec<_> = timeline.chunks().filter(|c| !c.is_loaded()).map(|c| c.id()).collect();
    store.load_bodies(name, timeline, &away).expect("they are there");
}

fn conversations_are_isolated(place: &TestDatabase) {
    let mut dice = StoreTestRng(5);
    let worlds: Vec<_> = (0..3).map(|_| dice.random_history(25)).collect();
    let names = ["ärger", "b", "B"];
    let mut store = place.open();
    assert_eq!(store.list_conversations().expect("an empty list"), []);
    let mut open: Vec<_> = names.map(|n| store.load(n, Access::Write).expect("new")).into();
    let longest = worlds.iter().map(|w| w.changes.len()).max().unwrap_or(0);
    for step in 0..longest {
        for (i, world) in worlds.iter().enumerate() {
            if let Some(change) = world.changes.get(step) {
                store.transact(names[i], &mut open[i], change, Durability::Deferred).expect("it is written");
            }
        }
    }
    let mut store = place.reopen(store);
    let listed = store.list_conversations().expect("a list");
    assert_eq!(listed.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["B", "b", "ärger"]);
    for (name, world) in names.iter().zip(&worlds) {
        let timeline = store.load(name, Access::Read).expect("it opens");
        assert_eq!(timeline.state_hash(), world.timeline.state_hash(), "{name}");
        let summary = listed.iter().find(|s| s.name == *name).expect("listed");
        let counts = [world.timeline.turns().len(), world.timeline.len(), world.timeline.live_len()];
        assert_eq!([summary.turns, summary.tokens, summary.live], counts.map(|n| n as u64));
        assert!(summary.created > 0 && summary.updated >= summary.created);
    }
}

impl TestDatabase {
    fn reopen(&self, store: Database) -> Database {
        drop(store);
        self.open()
    }
}

fn records_and_embeddings_are_stored(place: &TestDatabase) {
    let mut store = place.open();
    assert_eq!(store.records("c", RecordKind::Note).expect("none"), []);
    store.put_record("c", RecordKind::Note, "notes.json", Some("{\"topics\":{}}")).expect("kept");
    store.put_record("c", RecordKind::Note, "notes.json", Some("{\"topics\":{\"go\":1}}")).expect("kept");
    store.put_record("c", RecordKind::Note, "a", Some("")).expect("kept");
    store.put_record("c", RecordKind::Setting, "notes.json", Some("other kind")).expect("kept");
    store.put_record("d", RecordKind::Note, "notes.json", Some("other conversation 🌱")).expect("kept");
    let vector = |x: f32| Embedding {
        chunk: chunk_id("a1.0"),
        text_hash: 7,
        vector: vec![x, -0.0, f32::MIN_POSITIVE],
    };
    let other = Embedding { chunk: chunk_id("u0.0"), text_hash: 7, vector: vec![1.0] };
    store.put_embeddings("c", "minilm", &[vector(1.0), other.clone()]).expect("kept");
    store.put_embeddings("c", "minilm", &[vector(2.0)]).expect("kept");
    store.put_embeddings("c", "granite", &[vector(9.0)]).expect("kept");
    store.set_model("c", "SmolLM2").expect("noted");
    let mut store = place.reopen(store);
    let notes = store.records("c", RecordKind::Note).expect("some");
    let pairs: Vec<_> = notes.iter().map(|r| (r.key.as_str(), r.value.as_str())).collect();
    assert_eq!(pairs, [("a", ""), ("notes.json", "{\"topics\":{\"go\":1}}")]);
    assert!(notes.iter().all(|r| r.updated_at > 0));
    assert_eq!(store.records("d", RecordKind::Note).expect("some")[0].value, "other conversation 🌱");
    assert_eq!(store.records("d", RecordKind::Memory).expect("none"), []);
    assert_eq!(store.embeddings("c", "minilm").expect("two"), [other.clone(), vector(2.0)]);
    store.put_record("c", RecordKind::Note, "a", None).expect("gone");
    store.put_embeddings("c", "minilm", &[Embedding { vector: vec![], ..vector(0.0) }]).expect("gone");
    assert_eq!(store.records("c", RecordKind::Note).expect("one").len(), 1);
    assert_eq!(store.embeddings("c", "minilm").expect("one"), [other]);
    assert_eq!(store.list_conversations().expect("two")[0].model, "SmolLM2");
}

fn history_lists_all_changes_of_a_chunk(place: &TestDatabase) {
    let mut store = place.open();
    let mut dice = StoreTestRng(11);
    let world = dice.random_history(60);
    let mut timeline = store.load("c", Access::Write).expect("new");
    for change in &world.changes {
        store.transact("c", &mut timeline, change, Durability::Deferred).expect("it is written");
    }
    let mut told = 0;
    for chunk in world.timeline.chunks().map(|c| c.id()) {
        let history = store.chunk_history("c", chunk).expect("it can be read");
        let named: Vec<_> = world.changes.iter().filter(|c| c.named_chunks().contains(&chunk)).collect();
        let without_scores = |change: &Change| -> Vec<Change> {
            change.flatten().into_iter().filter(|c| !matches!(c, Change::Score(_))).cloned().collect()
        };
        let got: Vec<_> = history.iter().map(|e| without_scores(&e.change)).collect();
        assert_eq!(got, named.iter().map(|c| without_scores(c)).collect::<Vec<_>>(), "{chunk}");
        assert!(history.is_sorted_by_key(|e| e.seq) && history.iter().all(|e| e.committed_at > 0));
        told += got.len();
    }
    assert!(told > 20, "the life was long enough to tell of: {told}");
    assert_eq!(store.chunk_history("c", chunk_id("u999.0")).expect("none"), []);
}

fn lease_allows_one_writer_at_a_time(place: &TestDatabase) {
    let mut first = place.open();
    let mut timeline = first.load("c", Access::Write).expect("new");
    let world = StoreTestRng(1).random_history(3);
    first.transact("c", &mut timeline, &world.changes[0], Durability::Immediate).expect("it is written");
    let mut second = place.open();
    let refused = second.load("c", Access::Write).expect_err("it is taken").to_string();
    assert!(refused.starts_with("opening 'c': another Halo"), "{refused}");
    assert!(refused.ends_with("is using it: close that one, or wait until it is done"), "{refused}");
    let mut seen = second.load("c", Access::Read).expect("looking is free");
    assert_eq!(seen.state_hash(), timeline.state_hash());
    let change = &world.changes[1];
    let refused = seen.transact(change, |after| second.commit("c", change, after, Durability::Immediate));
    assert!(refused.expect_err("only seen").to_string().contains("was not opened to be written"));
    second.load("d", Access::Write).expect("another conversation is free");
    drop(first);
    second.load("c", Access::Write).expect("now it is free");
}

/// Even without the locks: who has not seen the last entry of the log may not write.
fn commit_rejects_writer_that_missed_a_log_entry(place: &TestDatabase) {
    let mut dice = StoreTestRng(2);
    let world = dice.random_history(6);
    let mut store = place.open();
    let mut timeline = store.load("c", Access::Write).expect("new");
    for change in &world.changes[..3] {
        store.transact("c", &mut timeline, change, Durability::Immediate).expect("it is written");
    }
    execute_sql_directly(place, "UPDATE conversation SET seq = seq + 1");
    let hash = timeline.state_hash();
    let refused = store.transact("c", &mut timeline, &world.changes[3], Durability::Immediate);
    let refused = refused.expect_err("it has missed an entry").to_string();
    assert_eq!(refused, "saving 'c': somebody else has changed it since it was opened: open it again");
    assert_eq!(timeline.state_hash(), hash);
    execute_sql_directly(place, "UPDATE conversation SET seq = seq - 1");
    store.transact("c", &mut timeline, &world.changes[3], Durability::Immediate).expect("nothing is broken");
}

/// Does something to the database that the store does not know of.
fn execute_sql_directly(place: &TestDatabase, sql: &str) {
    match &place.location {
        StoreLocation::Sqlite(path) => {
            rusqlite::Connection::open(path).expect("it opens").execute_batch(sql).expect("it runs");
        }
        StoreLocation::Postgres(url) => {
            crate::common::execute_sql(url, &format!("SET search_path TO halo; {sql}")).expect("it runs");
        }
    }
}

fn commit_of_invalid_change_leaves_no_trace(place: &TestDatabase) {
    let world = StoreTestRng(8).random_history(12);
    let mut store = place.open();
    let mut timeline = store.load("c", Access::Write).expect("new");
    for change in &world.changes {
        store.transact("c", &mut timeline, change, Durability::Deferred).expect("it is written");
        let nonsense =
            Change::Batch(vec![change.clone(), Change::Pin { chunk: chunk_id("u4000.0"), pinned: true }]);
        let hash = timeline.state_hash();
        assert!(store.transact("c", &mut timeline, &nonsense, Durability::Immediate).is_err());
        assert_eq!(timeline.state_hash(), hash);
    }
    let mut store = place.reopen(store);
    assert_eq!(store.load("c", Access::Read).expect("it opens").state_hash(), timeline.state_hash());
    assert_eq!(store.replay_log("c").expect("the log is whole").state_hash(), timeline.state_hash());
}

fn conversation_names_are_validated(place: &TestDatabase) {
    let mut store = place.open();
    for name in ["", " x", "x\n", "a\0b", &"x".repeat(201)] {
        assert!(store.load(name, Access::Read).is_err(), "{name:?}");
        assert!(store.set_model(name, "m").is_err(), "{name:?}");
    }
    for name in ["'; DROP TABLE log; --", "../../etc/passwd", "$1", "%s", "🌱 años"] {
        store.set_model(name, "m").expect("any line of text is a name");
    }
    assert_eq!(store.list_conversations().expect("a list").len(), 5);
    let missing =
        store.chunk_history("nobody", chunk_id("u0.0")).expect_err("no such conversation").to_string();
    assert!(missing.contains("there is no conversation 'nobody'"), "{missing}");
}

/// A conversation with everything that one can have.
fn create_full_conversation(store: &mut Database, name: &str, seed: u64) -> Timeline {
    let world = StoreTestRng(seed).random_history(40);
    let mut timeline = store.load(name, Access::Write).expect("new");
    for change in &world.changes {
        store.transact(name, &mut timeline, change, Durability::Deferred).expect("it is written");
    }
    store.put_record(name, RecordKind::Note, "notes.json", Some("{\"a\": \"\\u0000 🌱\"}")).expect("kept");
    store.put_record(name, RecordKind::Memory, "1", Some("line\nline")).expect("kept");
    let vector =
        |x| Embedding { chunk: chunk_id("u0.0"), text_hash: 7, vector: vec![x, 0.1, f32::MIN_POSITIVE] };
    store.put_embeddings(name, "b", &[vector(0.3)]).expect("kept");
    store.put_embeddings(name, "B", &[vector(-7.25)]).expect("kept");
    store.set_model(name, "SmolLM2").expect("noted");
    timeline
}

/// A turn began when its first token was said, whatever happened to it since, and however it came in.
fn turn_times_are_those_of_the_first_token(place: &TestDatabase) {
    let mut store = place.open();
    for seed in 0..6 {
        let name = format!("life {seed}");
        let timeline = create_full_conversation(&mut store, &name, seed);
        let log = String::from_utf8(export_bytes(&mut store, &name)).expect("text");
        let mut first = std::collections::BTreeMap::new();
        for line in log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            let (line, at) = (&line["entry"], line["entry"]["at"].as_i64());
            for append in line["changes"].as_array().into_iter().flatten().filter_map(|c| c.get("append")) {
                first.entry(append["turn"].as_u64()).or_insert(at);
            }
        }
        let times = store.turn_times(&name).expect("read");
        let told: Vec<_> = times.iter().map(|(turn, at)| (Some(u64::from(turn.0)), Some(*at))).collect();
        assert!(!told.is_empty() && told.len() == timeline.turns().len());
        assert_eq!(told, first.into_iter().collect::<Vec<_>>(), "life {seed}");
    }
}

/// Told anew, a conversation is the same but for names that were merged away; up to a turn, it is a branch. What it was
/// told from stays.
fn copy_conversation_keeps_tokens_and_can_branch(place: &TestDatabase) {
    let mut store = place.open();
    for seed in 0..8 {
        let (from, to, branch) = (format!("from {seed}"), format!("to {seed}"), format!("branch {seed}"));
        create_full_conversation(&mut store, &from, seed);
        let before = export_bytes(&mut store, &from);
        store.copy_conversation(&from, &to, "SmolLM2", &mut |told| Ok(Some(told))).expect("told");
        let tokens = |store: &mut Database, name: &str| {
            let mut timeline = store.load(name, Access::Read).expect("it loads");
            let all: Vec<ChunkId> = timeline.chunks().map(|chunk| chunk.id()).collect();
            store.load_bodies(name, &mut timeline, &all).expect("they are there");
            let token = |t: halo_core::timeline::TokenRef<'_>| {
                (t.position, t.id, t.text.to_owned(), t.brightness.0.to_bits(), t.flags, t.chunk)
            };
            let tokens = (0..timeline.len() as u64).map(|p| timeline.token(Position(p)).map(token));
            let chunks = timeline.chunks().map(|c| (c.id(), c.is_pinned(), c.tally()));
            (tokens.collect::<Vec<_>>(), chunks.collect::<Vec<_>>())
        };
        let whole = tokens(&mut store, &from);
        assert_eq!(tokens(&mut store, &to), whole, "life {seed}");
        let kept = |store: &mut Database, name: &str| {
            (store.records(name, RecordKind::Note).expect("read"), store.embeddings(name, "b").expect("read"))
        };
        assert_eq!(kept(&mut store, &to).0[0].value, kept(&mut store, &from).0[0].value);
        let mut vectors = kept(&mut store, &from).1;
        vectors.retain(|vector| whole.1.iter().any(|(id, ..)| *id == vector.chunk));
        assert_eq!(kept(&mut store, &to).1, vectors);
        let mut left = 3;
        let mut some = |told: TurnCopy| {
            left -= 1;
            Ok((left > 0).then_some(told))
        };
        store.copy_conversation(&from, &branch, "SmolLM2", &mut some).expect("told");
        let part = tokens(&mut store, &branch);
        assert_eq!(part.0[..], whole.0[..part.0.len()], "life {seed}");
        let turns = store.load(&branch, Access::Read).expect("it loads").turns().len();
        assert!(turns <= 2 && store.replay_log(&branch).expect("it can be").len() == part.0.len());
        let taken = store.copy_conversation(&from, &to, "SmolLM2", &mut |told| Ok(Some(told)));
        assert!(taken.is_err_and(|e| e.to_string().contains("already")));
        let stopped =
            store.copy_conversation(&from, "never", "m", &mut |_| Err(Error::internal("telling", "no")));
        assert_eq!(stopped, Err(Error::internal("telling", "no")));
        assert_eq!(export_bytes(&mut store, &from), before, "life {seed}");
    }
    assert!(store.list_conversations().expect("read").iter().all(|known| known.name != "never"));
}

fn export_bytes(store: &mut Database, name: &str) -> Vec<u8> {
    let mut out = Vec::new();
    store.export(name, &mut out, &mut |done, all| assert!(done <= all)).expect("it can be written out");
    out
}

fn import_bytes(store: &mut Database, bytes: &[u8], name: Option<&str>) -> Result<String, String> {
    let import = ImportRequest {
        file_name: "export.jsonl",
        format: None,
        name,
        chunk_size: halo_core::chunker::ChunkSize::default(),
        initial_brightness: Brightness(10_000.0),
        model: None,
        validate_rows: None,
    };
    let arrived = store.import(&mut &*bytes, import).map_err(|e| e.to_string())?;
    Ok(arrived.conversations[0].name.clone())
}

fn export_import_round_trip_is_byte_identical(place: &TestDatabase) {
    let mut store = place.open();
    for seed in 0..5 {
        let name = format!("life {seed}");
        let timeline = create_full_conversation(&mut store, &name, seed);
        let first = export_bytes(&mut store, &name);
        // Into another store, of the other kind or the same, and out again.
        let elsewhere = crate::common::sqlite();
        let mut other = elsewhere.open();
        assert_eq!(import_bytes(&mut other, &first, None).as_deref(), Ok(name.as_str()));
        assert_eq!(export_bytes(&mut other, &name), first);
        assert_eq!(other.load(&name, Access::Write).expect("it opens").state_hash(), timeline.state_hash());
        let there = other.list_conversations().expect("listed");
        assert!(store.list_conversations().expect("listed").contains(&there[0]) && there.len() == 1);
        for chunk in timeline.chunks().map(|c| c.id()) {
            assert_eq!(other.chunk_history(&name, chunk), store.chunk_history(&name, chunk));
        }
        assert_eq!(other.check_integrity(&mut |_, _| {}).expect("it can be examined"), []);
        let taken = import_bytes(&mut store, &first, None).expect_err("the name is taken");
        assert!(taken.ends_with(&format!(
            "there is a conversation '{name}' already: give this one another name with -c"
        )));
        assert_eq!(
            import_bytes(&mut store, &first, Some(&format!("z{seed}"))).as_deref(),
            Ok(format!("z{seed}").as_str())
        );
        let renamed = String::from_utf8(export_bytes(&mut store, &format!("z{seed}"))).expect("text");
        let (_, body) = renamed.split_once('\n').expect("lines");
        assert!(String::from_utf8_lossy(&first).contains(body.rsplit_once("{\"end\"").expect("an end").0));
    }
}

fn import_rejects_damaged_export(place: &TestDatabase) {
    let mut store = place.open();
    create_full_conversation(&mut store, "c", 9);
    let good = export_bytes(&mut store, "c");
    let before = store.list_conversations().expect("listed");
    let mut dice = StoreTestRng(77);
    for _ in 0..if cfg!(debug_assertions) { 300 } else { 3000 } {
        let mut bytes = good.clone();
        let at = dice.next_u64() as usize % bytes.len();
        match dice.next_u64() % 4 {
            0 => bytes[at] ^= 1 << (dice.next_u64() % 8),
            1 => bytes.truncate(at),
            2 => drop(bytes.drain(at..(at + 1 + dice.next_u64() as usize % 99).min(good.len()))),
            _ => bytes.insert(at, dice.next_u64() as u8),
        }
        let refused = import_bytes(&mut store, &bytes, Some("copy"));
        assert!(refused.is_err(), "damage at {at} was not seen");
    }
    assert_eq!(store.list_conversations().expect("listed"), before);
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("it can be examined"), []);
    let newer = String::from_utf8(good).expect("text").replacen("\"version\":1", "\"version\":2", 1);
    let refused = import_bytes(&mut store, newer.as_bytes(), Some("copy")).expect_err("too new");
    assert!(refused.contains("written by a newer Halo (version 2, this program reads 1)"), "{refused}");
}

fn read_sample(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exchange").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The files of other programs, and what is in the store afterwards: with words, and with a model's tokens.
fn import_reads_foreign_formats(place: &TestDatabase) {
    let mut store = place.open();
    let mut shown = String::new();
    for (file, with_model) in [
        ("weave-export.json", false),
        ("weave-export.json", true),
        ("weave-backup.json", false),
        ("sillytavern.jsonl", false),
        ("chatgpt.json", false),
        ("claude.json", true),
        ("openai-request.json", false),
        ("markdown-headings.md", false),
    ] {
        let mut model = ScriptedModel::new(4096, Vec::new());
        let import = ImportRequest {
            file_name: file,
            format: Some("auto"),
            name: with_model.then_some("with a model"),
            chunk_size: halo_core::chunker::ChunkSize { min: 8, max: 32 },
            initial_brightness: Brightness(10_000.0),
            model: with_model.then_some(&mut model as _),
            validate_rows: None,
        };
        let bytes = read_sample(file);
        let before: Vec<_> =
            store.list_conversations().expect("listed").into_iter().map(|s| s.name).collect();
        let arrived = store.import(&mut bytes.as_slice(), import).expect("it is readable");
        let _ = writeln!(shown, "== {file}: {}", arrived.format);
        for (what, n) in arrived.losses.iter() {
            let _ = writeln!(shown, "lost {what}: {n}");
        }
        for arrival in arrived.conversations {
            assert!(!before.contains(&arrival.name));
            render_conversation(&mut store, &arrival.name, &mut shown);
            store.set_model(&arrival.name, "").expect("noted");
        }
        // Names of one file do not meet those of the next.
        if with_model {
            rename_directly(place, "with a model", &format!("with a model {file}"));
        }
    }
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("it can be examined"), []);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/arrivals.expected");
    if std::env::var_os("UPDATE_EXPECTED").is_some() {
        std::fs::write(&path, &shown).expect("written");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(shown == expected, "tests/arrivals.expected differs; UPDATE_EXPECTED=1 writes it anew:\n{shown}");
}

fn rename_directly(place: &TestDatabase, from: &str, to: &str) {
    execute_sql_directly(place, &format!("UPDATE conversation SET name = '{to}' WHERE name = '{from}'"));
}

fn render_conversation(store: &mut Database, name: &str, out: &mut String) {
    let mut timeline = store.load(name, Access::Read).expect("it opens");
    load_all_bodies(store, name, &mut timeline);
    let summary =
        store.list_conversations().expect("listed").into_iter().find(|s| s.name == name).expect("there");
    let _ = writeln!(
        out,
        "'{name}' model '{}' turns {} tokens {} live {}",
        summary.model, summary.turns, summary.tokens, summary.live
    );
    for chunk in timeline.chunks() {
        let state = if chunk.is_live() { "" } else { " dead" };
        let pin = if chunk.is_pinned() { " pinned" } else { "" };
        let ids: Vec<_> = chunk
            .ids(chunk.run())
            .iter()
            .take(3)
            .map(|t| if t.0 == u32::MAX { -1 } else { i64::from(t.0) })
            .collect();
        let _ = writeln!(
            out,
            "  {}{state}{pin} {} tokens {ids:?} peak {} {:?}",
            chunk.id(),
            chunk.len(),
            chunk.peak(),
            chunk.text()
        );
    }
    for kind in RecordKind::ALL {
        for record in store.records(name, kind).expect("readable") {
            let _ = writeln!(out, "  {} {}: {}", kind.name(), record.key, record.value);
        }
    }
    for embedding in store.embeddings(name, "halo_weave").expect("readable") {
        let _ = writeln!(out, "  embedding of {}: {} numbers", embedding.chunk, embedding.vector.len());
    }
}

/// What can be wrong with rows, how it is found, and that mending brings back all that can be.
fn doctor_finds_and_repairs_damaged_rows(place: &TestDatabase) {
    let mut store = place.open();
    let timeline = create_full_conversation(&mut store, "c", 21);
    let hash = timeline.state_hash();
    drop(store);
    let last = "(SELECT max(key) - 2 FROM log)";
    let cases: [(&str, String, &str, bool); 11] = [
        (
            "UPDATE chunk SET sum = sum + 1 WHERE key % 4294967296 = 2",
            "not what was written (their sum differs)".into(),
            "made again from its log",
            true,
        ),
        ("DELETE FROM chunk WHERE key % 4294967296 = 1", "missing".into(), "made again from its log", true),
        (
            "UPDATE block SET sum = sum + 1",
            "block 0 of its chunks is not what was written".into(),
            "made again from its log",
            true,
        ),
        (
            "UPDATE chunk SET live = 1 - live WHERE key % 4294967296 = 0",
            "".into(),
            "made again from its log",
            true,
        ),
        (
            "UPDATE conversation SET tokens = tokens + 1",
            "its counts are not those of its chunks".into(),
            "made again from its log",
            true,
        ),
        ("DELETE FROM mention", "the index of its reasons does not fit its log".into(), "noted anew", true),
        (
            "UPDATE embedding SET sum = sum + 1",
            "the embedding of u0.0 is not what was written".into(),
            "dropped embeddings",
            true,
        ),
        (
            "DELETE FROM log WHERE key = (SELECT min(key) FROM log)",
            "does not fit what came before".into(),
            "its log was told anew",
            true,
        ),
        (
            "UPDATE record SET value = 'changed' WHERE kind = 'memory'",
            "the memory '1' is not what was written".into(),
            "its records are kept as they stand",
            true,
        ),
        (
            "UPDATE chunk SET sum = sum + 1 WHERE key % 4294967296 = 3; UPDATE log SET sum = sum + 1 WHERE key = LAST",
            "not what was written (their sum differs)".into(),
            "1 of them from the words in the log; no word is lost",
            false,
        ),
        (
            "UPDATE log SET sum = sum + 1 WHERE key >= LAST; UPDATE block SET sum = sum + 1",
            "block 0".into(),
            "no word is lost, the reasons of what happened are",
            false,
        ),
    ];
    for (harm, found, done, whole) in cases {
        execute_sql_directly(place, &harm.replace("LAST", last));
        let mut store = place.open();
        let findings = store.check_integrity(&mut |_, _| {}).expect("it can be examined");
        let words: Vec<_> = findings.iter().map(|f| f.problem.clone()).collect();
        assert!(words.iter().any(|w| w.contains(&found)), "{harm}: {words:?}");
        let (copy, mended) = store.repair(&findings).expect("it can be mended");
        let copy = copy.expect("a copy comes first");
        assert!(Path::new(&copy).exists() || copy.starts_with("schema halo_backup_"), "{copy}");
        assert!(mended.iter().any(|m| m.contains(done)), "{harm}: {mended:?}");
        assert_eq!(store.check_integrity(&mut |_, _| {}).expect("it can be examined"), [], "{harm}");
        let mut loaded = store.load("c", Access::Write).expect("it opens");
        assert!(loaded.state_hash() == hash || !whole, "{harm}");
        load_all_bodies(&mut store, "c", &mut loaded);
        let texts = |t: &Timeline| {
            t.chunks().map(|c| (c.id(), c.text().into_owned(), c.is_live())).collect::<Vec<_>>()
        };
        assert_eq!(texts(&loaded), texts(&timeline), "{harm}");
        if !whole {
            let (at, turn) = (loaded.next_position(), loaded.next_turn());
            let append = Append { at, turn, role: Role::User, tokens: Vec::new() };
            store
                .transact("c", &mut loaded, &Change::Append(append), Durability::Immediate)
                .expect("it goes on");
        }
    }
    // A conversation that has lost its name is found again by its log; its rows are not swept away.
    let whole = place.open().load("c", Access::Read).expect("it opens").state_hash();
    execute_sql_directly(place, "DELETE FROM conversation");
    let mut store = place.open();
    let findings = store.check_integrity(&mut |_, _| {}).expect("it can be examined");
    assert_eq!(findings[0].problem, "1 of the conversations lost their name");
    store.repair(&findings).expect("it can be mended");
    assert_eq!(store.load("recovered 1", Access::Read).expect("it is back").state_hash(), whole);
    drop(store);
    execute_sql_directly(place, "INSERT INTO record VALUES (999, 'note', 'k', 'v', 0, 0)");
    let mut store = place.open();
    let findings = store.check_integrity(&mut |_, _| {}).expect("it can be examined");
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(findings[0].problem, "1 rows belong to no conversation");
    store.repair(&findings).expect("it can be mended");
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("it can be examined"), []);
}

/// Two that were loaded from one store: who has missed a change may not write over it.
fn commit_rejects_stale_timeline(place: &TestDatabase) {
    let world = StoreTestRng(6).random_history(12);
    let mut store = place.open();
    let mut first = store.load("c", Access::Write).expect("new");
    for change in &world.changes[..4] {
        store.transact("c", &mut first, change, Durability::Immediate).expect("it is written");
    }
    let mut second = store.load("c", Access::Write).expect("the same store may");
    store.transact("c", &mut second, &world.changes[4], Durability::Immediate).expect("it is written");
    let refused = store.transact("c", &mut first, &world.changes[4], Durability::Immediate);
    let refused = refused.expect_err("it has missed one").to_string();
    assert_eq!(refused, "saving 'c': it has changed since this was loaded: open it again");
    store.transact("c", &mut second, &world.changes[5], Durability::Immediate).expect("it goes on");
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("it can be examined"), []);
}

fn records_can_precede_first_message(place: &TestDatabase) {
    let mut store = place.open();
    let mut timeline = store.load("c", Access::Write).expect("new");
    store.set_model("c", "SmolLM2").expect("noted");
    store.put_record("c", RecordKind::Note, "notes.json", Some("{}")).expect("kept");
    assert!(
        store.put_record("c", RecordKind::Note, "n", Some("a\0b")).is_err(),
        "the same on every database"
    );
    for change in &StoreTestRng(6).random_history(5).changes {
        store.transact("c", &mut timeline, change, Durability::Immediate).expect("it is written");
    }
    assert_eq!(store.load("c", Access::Read).expect("it opens").state_hash(), timeline.state_hash());
    assert_eq!(store.records("c", RecordKind::Note).expect("kept").len(), 1);
}

fn chunk_texts(store: &mut Database, name: &str) -> Vec<(ChunkId, String)> {
    let mut timeline = store.load(name, Access::Read).expect("it opens");
    load_all_bodies(store, name, &mut timeline);
    timeline.chunks().map(|c| (c.id(), c.text().into_owned())).collect()
}

fn repair_recovers_chunks_from_truncated_log(place: &TestDatabase) {
    let mut store = place.open();
    create_full_conversation(&mut store, "c", 31);
    let said = chunk_texts(&mut store, "c");
    drop(store);
    execute_sql_directly(place, "DELETE FROM log WHERE key >= (SELECT max(key) - 20 FROM log)");
    execute_sql_directly(place, "UPDATE block SET sum = sum + 1");
    let mut store = place.open();
    let findings = store.check_integrity(&mut |_, _| {}).expect("it can be examined");
    assert!(findings.iter().any(|f| f.problem == "its log has lost its end"), "{findings:?}");
    store.repair(&findings).expect("it can be mended");
    assert_eq!(chunk_texts(&mut store, "c"), said);
}

fn repair_recovers_conversation_without_log(place: &TestDatabase) {
    let mut store = place.open();
    create_full_conversation(&mut store, "c", 33);
    let said = chunk_texts(&mut store, "c");
    drop(store);
    execute_sql_directly(place, "DELETE FROM log; DELETE FROM conversation");
    let mut store = place.open();
    let findings = store.check_integrity(&mut |_, _| {}).expect("it can be examined");
    store.repair(&findings).expect("it can be mended");
    assert_eq!(chunk_texts(&mut store, "recovered 1"), said);
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("it can be examined"), []);
}

/// Message keys are found by path and by text, follow a branch up to its turn, and go with what is forgotten.
fn message_keys_find_conversations(place: &TestDatabase) {
    let mut store = place.open();
    let key = |turn: u32, loose: u64| MessageKey {
        turn: TurnId(turn),
        role: if turn.is_multiple_of(2) { Role::User } else { Role::Assistant },
        exact_hash: loose + 1,
        loose_hash: loose,
        name_hash: 0,
        length: 40,
        prefix_hash: loose ^ 0xabcd,
    };
    let mut timeline = store.load("c", Access::Write).expect("new");
    for change in &StoreTestRng(5).random_history(30).changes {
        store.transact("c", &mut timeline, change, Durability::Immediate).expect("it is written");
    }
    let turns: Vec<u32> = timeline.turns().iter().map(|turn| turn.id.0).collect();
    let keys: Vec<MessageKey> = turns.iter().map(|&turn| key(turn, u64::MAX / 3 + u64::from(turn))).collect();
    store.put_message_keys("c", &keys).expect("kept");
    store.put_message_keys("d", &[keys[0]]).expect("kept, before a word is said there");
    assert_eq!(store.message_keys("c", 1000).expect("told"), keys);
    assert_eq!(store.message_keys("c", 1).expect("told"), keys[keys.len() - 1..]);
    let found = store.find_messages(MessageLookup::Loose(keys[0].loose_hash), 8).expect("found");
    assert_eq!(found, [("d".to_owned(), keys[0].turn), ("c".to_owned(), keys[0].turn)], "the newest first");
    let last = keys[keys.len() - 1];
    let found = store.find_messages(MessageLookup::Prefix(last.prefix_hash), 8).expect("found");
    assert_eq!(found, [("c".to_owned(), last.turn)]);
    assert_eq!(store.find_messages(MessageLookup::Prefix(7), 8).expect("looked for"), []);
    let middle = turns[turns.len() / 2];
    store
        .copy_conversation("c", "branch", "m", &mut |told| Ok((told.turn.0 <= middle).then_some(told)))
        .expect("told");
    let shared: Vec<MessageKey> = keys.iter().copied().filter(|key| key.turn.0 <= middle).collect();
    assert_eq!(store.message_keys("branch", 1000).expect("told"), shared);
    place.open().load("branch", Access::Write).expect("its maker has given it up");
    // Keys from the first turn that was forgotten on would tell of it.
    let gone = timeline.chunks().map(|chunk| chunk.id()).find(|id| id.turn.0 >= middle).expect("a chunk");
    store.forget("c", &[gone], &[]).expect("forgotten");
    assert!(store.message_keys("c", 1000).expect("told").iter().all(|key| key.turn < gone.turn));
    assert_eq!(store.find_conversation("c").expect("found").map(|known| known.name).as_deref(), Some("c"));
    assert_eq!(store.find_conversation("nobody").expect("looked for"), None);
}

/// Many changes in one transaction leave the same state and a log that makes it again; a change that does not fit leaves nothing.
fn transaction_commits_all_changes_or_none(place: &TestDatabase) {
    let mut dice = StoreTestRng(8);
    for life in 0..6 {
        let world = dice.random_history(40);
        let name = format!("life {life}");
        let mut store = place.open();
        let mut timeline = store.load(&name, Access::Write).expect("new");
        let (first, rest) = world.changes.split_at(world.changes.len() / 3);
        for change in first {
            store.transact(&name, &mut timeline, change, Durability::Deferred).expect("it is written");
        }
        let (hash, mut wrong) = (timeline.state_hash(), rest.to_vec());
        wrong.push(Change::Pin { chunk: chunk_id("u999.0"), pinned: true });
        store.transact_all(&name, &mut timeline, &wrong).expect_err("the last does not fit");
        assert_eq!(timeline.state_hash(), hash);
        assert_eq!(place.open().load(&name, Access::Read).expect("it opens").state_hash(), hash);
        store.transact_all(&name, &mut timeline, rest).expect("all of them");
        // And it goes on from there.
        store
            .transact(&name, &mut timeline, &Change::Batch(vec![]), Durability::Immediate)
            .expect("one more");
        let stored = place.open().load(&name, Access::Read).expect("it opens");
        assert_eq!(stored.state_hash(), timeline.state_hash());
        assert_eq!(store.replay_log(&name).expect("its log is whole").state_hash(), timeline.state_hash());
        assert_eq!(store.check_integrity(&mut |_, _| {}).expect("it can be examined"), []);
    }
}

/// What is given up can be taken by another, and taken again only by who has seen what the other did.
fn lease_release_lets_another_writer_take_over(place: &TestDatabase) {
    let world = StoreTestRng(1).random_history(8);
    let mut first = place.open();
    let mut timeline = first.load("c", Access::Write).expect("new");
    first.transact("c", &mut timeline, &world.changes[0], Durability::Immediate).expect("it is written");
    first.release_lease("c");
    assert!(first.reacquire_lease("c", timeline.revision()).expect("it is free"), "nothing has changed");
    first.transact("c", &mut timeline, &world.changes[1], Durability::Immediate).expect("it goes on");
    first.release_lease("c");
    let mut second = place.open();
    let mut theirs = second.load("c", Access::Write).expect("it was given up");
    assert!(first.reacquire_lease("c", timeline.revision()).is_err(), "it is theirs now");
    second.transact("c", &mut theirs, &world.changes[2], Durability::Immediate).expect("it is written");
    second.release_lease("c");
    assert!(!first.reacquire_lease("c", timeline.revision()).expect("it is free"), "it has changed");
    second.load("c", Access::Write).expect("nothing was taken");
    second.release_lease("c");
    let mut timeline = first.load("c", Access::Write).expect("read again");
    first.transact("c", &mut timeline, &world.changes[3], Durability::Immediate).expect("it goes on");
}
