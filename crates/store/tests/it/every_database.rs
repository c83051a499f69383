//! Tests that run on SQLite and on PostgreSQL: committed changes are loaded again, also after damage and repair.

use crate::common::TestDatabase;
use halo_core::change::{Append, Change, NewToken};
use halo_core::conversation_copy::TurnCopy;
use halo_core::row_store::{Row, RowKind, RowStore};
use halo_core::store::{
    Access, ConversationSummary, Durability, Embedding, MessageKey, MessageLookup, ORIGINAL_OF_KEY,
    RecordKind, StagedRecords, Store,
};
use halo_core::testing::doubles::ScriptedModel;
use halo_core::testing::timeline_fuzz::{FuzzOp, TimelineFuzz};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Position, Role, TokenId, TurnId};
use halo_core::{Error, ErrorKind};
use halo_store::database::{Database, StoreLocation};
use halo_store::exchange::ImportRequest;
use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;

/// Defines a test of each function for each database.
macro_rules! test_on_every_database {
    ($($test:ident),* $(,)?) => {
        mod sqlite { $(#[test] fn $test() { super::$test(&crate::common::sqlite()); })* }
        mod postgres { $(#[test] fn $test() { super::$test(&crate::common::postgres()); })* }
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
    replace_by_copy_keeps_the_original_or_changes_nothing,
    staged_records_are_written_with_the_next_commit,
    turn_times_are_those_of_the_first_token,
    turn_times_include_every_turn_of_a_batch,
    migration_fills_turns_of_old_log_entries,
    import_reads_foreign_formats,
    doctor_finds_and_repairs_damaged_rows,
    commit_rejects_stale_timeline,
    records_can_precede_first_message,
    repair_recovers_chunks_from_truncated_log,
    repair_recovers_conversation_without_log,
    repair_recovers_nameless_conversation,
    forget_erases_chunks_and_keeps_the_rest,
    forget_leaves_no_word_in_any_table,
    world_rows_are_stored_beside_conversations,
    message_keys_find_conversations,
    transaction_commits_all_changes_or_none,
    lease_release_lets_another_writer_take_over,
    lease_that_was_lost_refuses_every_write,
    lease_that_was_lost_is_taken_again_by_opening,
    lease_epoch_rises_with_every_owner,
    lease_race_has_one_winner,
    lease_of_a_world_refuses_a_stale_owner,
    lease_of_another_process_refuses_writes_without_one,
);

fn chunk_id(name: &str) -> ChunkId {
    name.parse().expect("a chunk id")
}

/// Chunks of random histories are forgotten: no other token moves, log and state agree, the integrity check finds nothing,
/// and the forgotten chunks have no text.
fn forget_erases_chunks_and_keeps_the_rest(database: &TestDatabase) {
    let mut rng = fastrand::Rng::with_seed(17);
    let mut forgotten = 0;
    for n in 0..12 {
        let name = format!("history {n}");
        let history = random_history(&mut rng, 40);
        let mut store = database.open();
        let mut timeline = store.load(&name, Access::Write).expect("a new conversation");
        for change in &history.changes {
            store
                .transact(&name, &mut timeline, change, Durability::Deferred)
                .expect("the change is committed");
        }
        let all: Vec<ChunkId> = timeline.chunks().map(|chunk| chunk.id()).collect();
        let forget: Vec<ChunkId> = all.iter().copied().filter(|_| rng.u64(..).is_multiple_of(3)).collect();
        let texts = |store: &mut Database| -> Vec<(ChunkId, String, usize)> {
            let texts = store.chunk_texts(&name, &all).expect("the texts are read");
            texts.into_iter().map(|chunk| (chunk.chunk, chunk.text, chunk.tokens)).collect()
        };
        let before = texts(&mut store);
        let texts_forgotten = store.forget(&name, &forget, &[]).expect("the chunks are forgotten");
        assert_eq!(texts_forgotten.len(), forget.len());
        forgotten += forget.len();
        let mut store = database.reopen(store);
        for (old, new) in before.iter().zip(texts(&mut store)) {
            let is_forgotten = forget.contains(&old.0);
            assert_eq!((old.0, old.2), (new.0, new.2), "no token moves");
            assert_eq!(new.1, if is_forgotten { "" } else { old.1.as_str() }, "{name}, {}", old.0);
        }
        let findings = store.check_integrity(&mut |_, _| {}).expect("the check runs");
        assert!(findings.is_empty(), "{name}: {findings:?}");
        let after = store.load(&name, Access::Read).expect("the conversation loads");
        assert!(forget.iter().all(|&id| after.chunk(id).is_some_and(|chunk| chunk.is_deleted())));
        assert_eq!(after.len(), timeline.len());
        let missing = store.forget(&name, &[ChunkId::new(Role::User, TurnId(9999), 0)], &[]);
        let missing = missing.expect_err("there is no such chunk");
        assert_eq!(missing.kind, ErrorKind::NotFound);
        assert!(missing.to_string().contains("there is no chunk u9999.0"), "{missing}");
        store.forget_conversation(&name).expect("the conversation is forgotten");
        assert!(
            store
                .list_conversations()
                .expect("the conversations are listed")
                .iter()
                .all(|summary| summary.name != name)
        );
    }
    assert!(forgotten > 20);
}

/// A word in messages, records and the name is in no table and no file after all of them were forgotten.
fn forget_leaves_no_word_in_any_table(database: &TestDatabase) {
    const WORD: &str = "Quokkatown";
    let name = format!("All about {WORD}");
    let mut store = database.open();
    let mut timeline = store.load(&name, Access::Write).expect("a new conversation");
    for text in [format!("I live in {WORD}."), "Tea is green.".to_owned()] {
        let token = NewToken {
            id: TokenId(7),
            text,
            chunk_index: 0,
            brightness: Brightness(1.0),
            kind: ContentKind::Message,
        };
        let (at, turn) = (timeline.next_position(), timeline.next_turn());
        let append = Change::Append(Append { at, turn, role: Role::User, tokens: vec![token] });
        store
            .transact(&name, &mut timeline, &append, Durability::Immediate)
            .expect("the change is committed");
    }
    for kind in RecordKind::ALL {
        store.put_record(&name, kind, WORD, Some(&format!("of {WORD}"))).expect("the record is stored");
    }
    let id = store.find_conversation(&name).expect("the store is read").expect("the conversation").id;
    assert!(is_stored(database, WORD) && is_stored(database, "Tea"));
    // The statistics of a PostgreSQL server contain values too. They are computed again unless the table is empty.
    store.put_record(&name, RecordKind::Note, "tea", Some("green")).expect("the record is stored");
    if matches!(database.location, StoreLocation::Postgres(_)) {
        execute_sql_directly(database, "ANALYZE");
    }
    for kind in RecordKind::ALL {
        store.put_record(&name, kind, WORD, None).expect("the record is deleted");
    }
    store.rename(&name, "chat").expect("the conversation is renamed");
    store.forget("chat", &[chunk_id("u0.0")], &[]).expect("the chunk is forgotten");
    let mut store = database.reopen(store);
    assert!(!is_stored(database, WORD), "the word is gone");
    assert!(is_stored(database, "Tea"), "the rest is kept");
    let renamed = store.find_conversation("chat").expect("the store is read").expect("the conversation");
    assert_eq!(renamed.id, id, "the id stays when the conversation is renamed");
}

/// Whether a file of the database, or a table or a statistic of a server, contains a text.
fn is_stored(database: &TestDatabase, text: &str) -> bool {
    match &database.location {
        StoreLocation::Sqlite(_) => {
            let files = std::fs::read_dir(database.folder()).expect("a folder").filter_map(Result::ok);
            let mut files = files.map(|file| file.path()).filter(|path| path.is_file());
            let has_text = |path: std::path::PathBuf| {
                let bytes = std::fs::read(path).expect("the file is readable");
                bytes.windows(text.len()).any(|part| part == text.as_bytes())
            };
            files.any(has_text)
        }
        StoreLocation::Postgres(_) => {
            let hex = text.bytes().fold(String::new(), |mut hex, byte| {
                let _ = write!(hex, "{byte:02x}");
                hex
            });
            let search = format!(
                "DO $$ DECLARE t text; found bigint; BEGIN \
                 FOR t IN SELECT tablename FROM pg_tables WHERE schemaname = 'halo' LOOP \
                   EXECUTE format('SELECT count(*) FROM halo.%I r WHERE strpos(r::text, %L) > 0 OR \
                     strpos(r::text, %L) > 0', t, '{text}', '{hex}') INTO found; \
                   IF found > 0 THEN RAISE EXCEPTION 'found in %', t; END IF; \
                 END LOOP; \
                 SELECT count(*) INTO found FROM pg_stats WHERE schemaname = 'halo' AND \
                   (strpos(most_common_vals::text, '{text}') > 0 OR strpos(histogram_bounds::text, '{text}') > 0); \
                 IF found > 0 THEN RAISE EXCEPTION 'found in the statistics'; END IF; END $$"
            );
            match crate::common::postgres_server::execute_sql(&database.url, &search) {
                Ok(()) => false,
                Err(error) => {
                    let message = error.as_db_error().map(|error| error.message().to_owned());
                    assert!(message.is_some_and(|message| message.starts_with("found in")), "{error}");
                    true
                }
            }
        }
    }
}

/// Namespaces have names that no conversation can have, and one process at a time leases one.
fn world_rows_are_stored_beside_conversations(database: &TestDatabase) {
    let mut store = database.open();
    const HEADER: RowKind = RowKind::from_static("world");
    const MESSAGE: RowKind = RowKind::from_static("said");
    const COMMAND: RowKind = RowKind::from_static("post");
    let row = |kind, key: &str, value: &str| Row { kind, key: key.into(), value: value.into() };
    store.load("lamp", Access::Write).expect("a conversation may have the same name");
    let rows = [
        row(HEADER, "0", "head"),
        row(MESSAGE, "000100000001", "one, \u{1F642}"),
        row(MESSAGE, "000100000002", "two"),
        row(MESSAGE, "000200000003", "elsewhere"),
        row(COMMAND, "1", "asked"),
    ];
    store.put_rows("lamp", &rows, &[]).expect("the rows are stored");
    store
        .put_rows("lamp", &[row(HEADER, "0", "newer")], &[(COMMAND, "1".into())])
        .expect("the rows are stored");
    let names = |store: &mut Database| -> Vec<String> {
        store
            .list_namespaces()
            .expect("the worlds are listed")
            .into_iter()
            .map(|summary| summary.name)
            .collect()
    };
    let mut store = database.reopen(store);
    assert_eq!(names(&mut store), ["lamp"]);
    assert!(
        store
            .list_conversations()
            .expect("the conversations are listed")
            .iter()
            .all(|summary| !summary.name.contains("world:"))
    );
    let values = |store: &mut Database, kind, keys: std::ops::Range<&str>, last| -> Vec<String> {
        store
            .load_rows("lamp", &kind, keys, last)
            .expect("the rows are read")
            .into_iter()
            .map(|row| row.value)
            .collect()
    };
    assert_eq!(values(&mut store, HEADER, "0".."9", 10), ["newer"]);
    assert_eq!(values(&mut store, MESSAGE, "0001".."0002", 10), ["one, \u{1F642}", "two"]);
    assert_eq!(values(&mut store, MESSAGE, "0001".."0002", 1), ["two"], "the limit selects the last rows");
    assert_eq!(values(&mut store, MESSAGE, "0".."9", 10).len(), 3);
    assert_eq!(values(&mut store, COMMAND, "0".."9", 10), Vec::<String>::new());
    let error = store.load("world:lamp", Access::Write).expect_err("the name belongs to a world");
    assert_eq!(error.kind, ErrorKind::InvalidInput);
    assert!(error.to_string().contains("belong to worlds of rooms"), "{error}");
    store.lease_namespace("lamp").expect("no other store has the lease");
    let error = database.open().lease_namespace("lamp").expect_err("another store has the lease");
    assert_eq!(error.kind, ErrorKind::Busy);
    assert!(error.to_string().contains("another Halo"), "{error}");
    assert!(store.check_integrity(&mut |_, _| {}).expect("the check runs").is_empty());
    store.delete_namespace("lamp").expect("the namespace is deleted");
    assert_eq!((names(&mut store), values(&mut store, MESSAGE, "0".."9", 10)), (Vec::new(), Vec::new()));
    assert!(store.delete_namespace("lamp").is_err_and(|error| error.kind == ErrorKind::NotFound));
}

/// A random number generator with a fixed seed.
fn random_history(rng: &mut fastrand::Rng, len: usize) -> TimelineFuzz {
    let ops: Vec<FuzzOp> = (0..len).map(|_| rng.u32(..).to_le_bytes()).collect();
    TimelineFuzz::run(&ops)
}

fn seeded_history(seed: u64, len: usize) -> TimelineFuzz {
    random_history(&mut fastrand::Rng::with_seed(seed), len)
}

/// Every change of a random history is committed; sometimes pruned chunks are unloaded, or the store is closed and
/// opened again. The loaded state, and the state that the log leads to, are those of the history.
fn reload_restores_random_histories(database: &TestDatabase) {
    let mut rng = fastrand::Rng::with_seed(3);
    for n in 0..if cfg!(debug_assertions) { 60 } else { 400 } {
        let name = format!("history {n}");
        let history = random_history(&mut rng, 30);
        let mut store = database.open();
        let mut timeline = store.load(&name, Access::Write).expect("a new conversation");
        for change in &history.changes {
            let durability =
                if rng.u64(..).is_multiple_of(2) { Durability::Immediate } else { Durability::Deferred };
            store.transact(&name, &mut timeline, change, durability).expect("the change is committed");
            match rng.u64(..) % 12 {
                0 | 1 => drop(timeline.unload_pruned()),
                2 => {
                    drop(store);
                    store = database.open();
                    let hash = timeline.state_hash();
                    timeline = store.load(&name, Access::Write).expect("the conversation loads again");
                    assert_eq!(timeline.state_hash(), hash, "{name} after {change:?}");
                    timeline.check_invariants().expect("the invariants hold");
                }
                _ => {}
            }
        }
        let hash = history.timeline.state_hash();
        assert_eq!(timeline.state_hash(), hash);
        assert_eq!(store.load(&name, Access::Read).expect("the conversation loads").state_hash(), hash);
        assert_eq!(
            store.replay_log(&name).expect("the log is complete").state_hash(),
            hash,
            "{name} by its log"
        );
        load_all_bodies(&mut store, &name, &mut timeline);
        assert_eq!(timeline, history.timeline);
    }
}

fn load_all_bodies(store: &mut Database, name: &str, timeline: &mut Timeline) {
    let unloaded: Vec<_> = timeline.chunks().filter(|c| !c.is_loaded()).map(|c| c.id()).collect();
    store.load_bodies(name, timeline, &unloaded).expect("the bodies are stored");
}

fn conversations_are_isolated(database: &TestDatabase) {
    let mut rng = fastrand::Rng::with_seed(5);
    let histories: Vec<_> = (0..3).map(|_| random_history(&mut rng, 25)).collect();
    let names = ["ärger", "b", "B"];
    let mut store = database.open();
    assert_eq!(store.list_conversations().expect("the conversations are listed"), []);
    let mut open: Vec<_> = names.map(|n| store.load(n, Access::Write).expect("a new conversation")).into();
    let longest = histories.iter().map(|h| h.changes.len()).max().unwrap_or(0);
    for step in 0..longest {
        for (i, history) in histories.iter().enumerate() {
            if let Some(change) = history.changes.get(step) {
                store
                    .transact(names[i], &mut open[i], change, Durability::Deferred)
                    .expect("the change is committed");
            }
        }
    }
    let mut store = database.reopen(store);
    let listed = store.list_conversations().expect("the conversations are listed");
    assert_eq!(listed.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["B", "b", "ärger"]);
    for (name, history) in names.iter().zip(&histories) {
        let timeline = store.load(name, Access::Read).expect("the conversation loads");
        assert_eq!(timeline.state_hash(), history.timeline.state_hash(), "{name}");
        let summary = listed.iter().find(|s| s.name == *name).expect("the conversation is listed");
        let counts = [history.timeline.turns().len(), history.timeline.len(), history.timeline.live_len()];
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

fn records_and_embeddings_are_stored(database: &TestDatabase) {
    let mut store = database.open();
    assert_eq!(store.records("c", RecordKind::Note).expect("the records are read"), []);
    store
        .put_record("c", RecordKind::Note, "notes.json", Some("{\"topics\":{}}"))
        .expect("the record is stored");
    store
        .put_record("c", RecordKind::Note, "notes.json", Some("{\"topics\":{\"go\":1}}"))
        .expect("the record is stored");
    store.put_record("c", RecordKind::Note, "a", Some("")).expect("the record is stored");
    store
        .put_record("c", RecordKind::Setting, "notes.json", Some("other kind"))
        .expect("the record is stored");
    store
        .put_record("d", RecordKind::Note, "notes.json", Some("other conversation 🌱"))
        .expect("the record is stored");
    let vector = |x: f32| Embedding {
        chunk: chunk_id("a1.0"),
        text_hash: 7,
        vector: vec![x, -0.0, f32::MIN_POSITIVE],
    };
    let other = Embedding { chunk: chunk_id("u0.0"), text_hash: 7, vector: vec![1.0] };
    store.put_embeddings("c", "minilm", &[vector(1.0), other.clone()]).expect("the embeddings are stored");
    store.put_embeddings("c", "minilm", &[vector(2.0)]).expect("the embeddings are stored");
    store.put_embeddings("c", "granite", &[vector(9.0)]).expect("the embeddings are stored");
    store.set_model("c", "SmolLM2").expect("the model is stored");
    let mut store = database.reopen(store);
    for (conversation, kind, key) in [
        ("c", RecordKind::Note, "notes.json"),
        ("c", RecordKind::Setting, "notes.json"),
        ("d", RecordKind::Note, "notes.json"),
        ("d", RecordKind::Note, "a"),
        ("nobody", RecordKind::Note, "a"),
    ] {
        let records = store.records(conversation, kind).expect("the records are read");
        let expected = records.into_iter().find(|record| record.key == key);
        let found = store.record(conversation, kind, key).expect("the record is read");
        assert_eq!(found, expected, "{conversation} {kind:?} {key}");
    }
    let mut find = |kind, key: &str| {
        let found = store.find_record(kind, key).expect("the records are searched");
        found.map(|(conversation, record)| (conversation, record.key))
    };
    assert_eq!(find(RecordKind::Note, "a"), Some(("c".into(), "a".into())));
    assert_eq!(find(RecordKind::Setting, "notes.json"), Some(("c".into(), "notes.json".into())));
    assert!(find(RecordKind::Note, "notes.json").is_some(), "it is in two conversations");
    assert_eq!(find(RecordKind::Setting, "a"), None);
    let notes = store.records("c", RecordKind::Note).expect("the records are read");
    let pairs: Vec<_> = notes.iter().map(|r| (r.key.as_str(), r.value.as_str())).collect();
    assert_eq!(pairs, [("a", ""), ("notes.json", "{\"topics\":{\"go\":1}}")]);
    assert!(notes.iter().all(|r| r.updated_at > 0));
    assert_eq!(
        store.records("d", RecordKind::Note).expect("the records are read")[0].value,
        "other conversation 🌱"
    );
    assert_eq!(store.records("d", RecordKind::Memory).expect("the records are read"), []);
    assert_eq!(
        store.embeddings("c", "minilm").expect("the embeddings are read"),
        [other.clone(), vector(2.0)]
    );
    store.put_record("c", RecordKind::Note, "a", None).expect("the record is deleted");
    store
        .put_embeddings("c", "minilm", &[Embedding { vector: vec![], ..vector(0.0) }])
        .expect("the embedding is deleted");
    assert_eq!(store.records("c", RecordKind::Note).expect("the records are read").len(), 1);
    assert_eq!(store.embeddings("c", "minilm").expect("the embeddings are read"), [other]);
    assert_eq!(store.list_conversations().expect("the conversations are listed")[0].model, "SmolLM2");
}

fn history_lists_all_changes_of_a_chunk(database: &TestDatabase) {
    let mut store = database.open();
    let mut rng = fastrand::Rng::with_seed(11);
    let history = random_history(&mut rng, 60);
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    for change in &history.changes {
        store.transact("c", &mut timeline, change, Durability::Deferred).expect("the change is committed");
    }
    let mut compared = 0;
    for chunk in history.timeline.chunks().map(|c| c.id()) {
        let entries = store.chunk_history("c", chunk).expect("the history is read");
        let named: Vec<_> = history.changes.iter().filter(|c| c.named_chunks().contains(&chunk)).collect();
        let without_scores = |change: &Change| -> Vec<Change> {
            change.flatten().into_iter().filter(|c| !matches!(c, Change::Score(_))).cloned().collect()
        };
        let stored: Vec<_> = entries.iter().map(|e| without_scores(&e.change)).collect();
        assert_eq!(stored, named.iter().map(|c| without_scores(c)).collect::<Vec<_>>(), "{chunk}");
        assert!(entries.is_sorted_by_key(|e| e.seq) && entries.iter().all(|e| e.committed_at > 0));
        compared += stored.len();
    }
    assert!(compared > 20, "the history is too short: {compared}");
    assert_eq!(store.chunk_history("c", chunk_id("u999.0")).expect("the history is read"), []);
}

fn lease_allows_one_writer_at_a_time(database: &TestDatabase) {
    let mut first = database.open();
    let mut timeline = first.load("c", Access::Write).expect("a new conversation");
    let history = seeded_history(1, 3);
    first
        .transact("c", &mut timeline, &history.changes[0], Durability::Immediate)
        .expect("the change is committed");
    let mut second = database.open();
    let refused = second.load("c", Access::Write).expect_err("another store has the lease");
    assert_eq!(refused.kind, ErrorKind::Busy);
    let refused = refused.to_string();
    assert!(refused.starts_with("opening 'c': another Halo"), "{refused}");
    assert!(refused.ends_with("is using it: close that one, or wait until it is done"), "{refused}");
    let mut read_only = second.load("c", Access::Read).expect("reading needs no lock");
    assert_eq!(read_only.state_hash(), timeline.state_hash());
    let change = &history.changes[1];
    let refused =
        read_only.transact(change, |after| second.commit("c", change, after, Durability::Immediate));
    assert!(
        refused
            .expect_err("the conversation was loaded for reading")
            .to_string()
            .contains("was not opened for writing")
    );
    second.load("d", Access::Write).expect("another conversation is free");
    drop(first);
    second.load("c", Access::Write).expect("the lease is free");
}

/// Even without the locks, a writer that has not seen the last entry of the log may not commit.
fn commit_rejects_writer_that_missed_a_log_entry(database: &TestDatabase) {
    let mut rng = fastrand::Rng::with_seed(2);
    let history = random_history(&mut rng, 6);
    let mut store = database.open();
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    for change in &history.changes[..3] {
        store.transact("c", &mut timeline, change, Durability::Immediate).expect("the change is committed");
    }
    execute_sql_directly(database, "UPDATE conversation SET seq = seq + 1");
    let hash = timeline.state_hash();
    let refused = store.transact("c", &mut timeline, &history.changes[3], Durability::Immediate);
    let refused = refused.expect_err("the timeline has missed a log entry");
    assert_eq!(refused.kind, ErrorKind::Busy);
    assert_eq!(
        refused.to_string(),
        "saving 'c': another writer has changed the conversation since it was opened: open it again"
    );
    assert_eq!(timeline.state_hash(), hash);
    execute_sql_directly(database, "UPDATE conversation SET seq = seq - 1");
    store
        .transact("c", &mut timeline, &history.changes[3], Durability::Immediate)
        .expect("the change is committed");
}

/// Runs SQL on the database, bypassing the store.
pub fn execute_sql_directly(database: &TestDatabase, sql: &str) {
    match &database.location {
        StoreLocation::Sqlite(path) => {
            rusqlite::Connection::open(path)
                .expect("the file opens")
                .execute_batch(sql)
                .expect("the statement runs");
        }
        StoreLocation::Postgres(_) => {
            crate::common::postgres_server::execute_sql(
                &database.url,
                &format!("SET search_path TO halo; {sql}"),
            )
            .expect("the statement runs");
        }
    }
}

fn commit_of_invalid_change_leaves_no_trace(database: &TestDatabase) {
    let history = seeded_history(8, 12);
    let mut store = database.open();
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    for change in &history.changes {
        store.transact("c", &mut timeline, change, Durability::Deferred).expect("the change is committed");
        let invalid =
            Change::Batch(vec![change.clone(), Change::Pin { chunk: chunk_id("u4000.0"), pinned: true }]);
        let hash = timeline.state_hash();
        assert!(store.transact("c", &mut timeline, &invalid, Durability::Immediate).is_err());
        assert_eq!(timeline.state_hash(), hash);
    }
    let mut store = database.reopen(store);
    assert_eq!(
        store.load("c", Access::Read).expect("the conversation loads").state_hash(),
        timeline.state_hash()
    );
    assert_eq!(store.replay_log("c").expect("the log is complete").state_hash(), timeline.state_hash());
}

fn conversation_names_are_validated(database: &TestDatabase) {
    let mut store = database.open();
    for name in ["", " x", "x\n", "a\0b", &"x".repeat(201)] {
        let invalid = |e: Error| e.kind == ErrorKind::InvalidInput;
        assert!(store.load(name, Access::Read).is_err_and(invalid), "{name:?}");
        assert!(store.set_model(name, "m").is_err_and(invalid), "{name:?}");
    }
    for name in ["'; DROP TABLE log; --", "../../etc/passwd", "$1", "%s", "🌱 años"] {
        store.set_model(name, "m").expect("any line of text is a name");
    }
    assert_eq!(store.list_conversations().expect("the conversations are listed").len(), 5);
    let missing = store.chunk_history("nobody", chunk_id("u0.0")).expect_err("no such conversation");
    assert_eq!(missing.kind, ErrorKind::NotFound);
    assert!(missing.to_string().ends_with("there is no conversation 'nobody'"), "{missing}");
}

/// A conversation with records, embeddings and a model.
fn create_full_conversation(store: &mut Database, name: &str, seed: u64) -> Timeline {
    let history = seeded_history(seed, 40);
    let mut timeline = store.load(name, Access::Write).expect("a new conversation");
    for change in &history.changes {
        store.transact(name, &mut timeline, change, Durability::Deferred).expect("the change is committed");
    }
    store
        .put_record(name, RecordKind::Note, "notes.json", Some("{\"a\": \"\\u0000 🌱\"}"))
        .expect("the record is stored");
    store.put_record(name, RecordKind::Memory, "1", Some("line\nline")).expect("the record is stored");
    let vector =
        |x| Embedding { chunk: chunk_id("u0.0"), text_hash: 7, vector: vec![x, 0.1, f32::MIN_POSITIVE] };
    store.put_embeddings(name, "b", &[vector(0.3)]).expect("the embeddings are stored");
    store.put_embeddings(name, "B", &[vector(-7.25)]).expect("the embeddings are stored");
    store.set_model(name, "SmolLM2").expect("the model is stored");
    timeline
}

/// The time of a turn is that of its first append, also after later changes and in an imported conversation.
fn turn_times_are_those_of_the_first_token(database: &TestDatabase) {
    let mut store = database.open();
    for seed in 0..6 {
        let name = format!("history {seed}");
        let timeline = create_full_conversation(&mut store, &name, seed);
        let log = String::from_utf8(export_bytes(&mut store, &name)).expect("the export is UTF-8");
        let mut first = std::collections::BTreeMap::new();
        for line in log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            let (line, at) = (&line["entry"], line["entry"]["at"].as_i64());
            for append in line["changes"].as_array().into_iter().flatten().filter_map(|c| c.get("append")) {
                first.entry(append["turn"].as_u64()).or_insert(at);
            }
        }
        let times = store.turn_times(&name).expect("the times are read");
        let times: Vec<_> = times.iter().map(|(turn, at)| (Some(u64::from(turn.0)), Some(*at))).collect();
        assert!(!times.is_empty() && times.len() == timeline.turns().len());
        assert_eq!(times, first.into_iter().collect::<Vec<_>>(), "history {seed}");
    }
}

/// One log entry may append to several turns.
fn turn_times_include_every_turn_of_a_batch(database: &TestDatabase) {
    let mut store = database.open();
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    let append = |turn: u32, role| {
        Change::Append(Append { at: Position(0), turn: TurnId(turn), role, tokens: Vec::new() })
    };
    let changes = [
        Change::Batch(vec![append(0, Role::User), append(3, Role::Assistant), append(4, Role::User)]),
        Change::Batch(vec![append(4, Role::User), append(4, Role::User)]),
        append(5, Role::Assistant),
    ];
    for change in &changes {
        store.transact("c", &mut timeline, change, Durability::Immediate).expect("the change is committed");
    }
    let turns = |store: &mut Database| -> Vec<u32> {
        store.turn_times("c").expect("the times are read").iter().map(|(turn, _)| turn.0).collect()
    };
    assert_eq!(turns(&mut store), [0, 3, 4, 5]);
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
}

/// A database of version 3 has no column `turn`: the migration fills it from the changes.
fn migration_fills_turns_of_old_log_entries(database: &TestDatabase) {
    let mut store = database.open();
    let mut times = Vec::new();
    for seed in 0..4 {
        let name = format!("history {seed}");
        create_full_conversation(&mut store, &name, seed);
        times.push(store.turn_times(&name).expect("the times are read"));
    }
    drop(store);
    let set_version = match &database.location {
        StoreLocation::Sqlite(_) => "PRAGMA user_version = 3",
        StoreLocation::Postgres(_) => "UPDATE version SET version = 3",
    };
    let to_version_3 =
        format!("DROP TABLE lease; DROP INDEX log_turn; ALTER TABLE log DROP COLUMN turn; {set_version}");
    execute_sql_directly(database, &to_version_3);
    let mut store = database.open();
    for (seed, times) in times.iter().enumerate() {
        assert_eq!(store.turn_times(&format!("history {seed}")).as_ref(), Ok(times));
    }
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
    drop(store);
    // An entry that cannot be parsed does not prevent the store from opening.
    execute_sql_directly(
        database,
        &format!("UPDATE log SET change = 'x' WHERE key = (SELECT max(key) FROM log); {to_version_3}"),
    );
    let mut store = database.open();
    assert_eq!(store.turn_times("history 0").as_ref(), Ok(&times[0]));
    let findings = store.check_integrity(&mut |_, _| {}).expect("the check runs");
    store.repair(&findings).expect("the repair runs");
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
}

/// The copy takes the name, and the original is kept under another one. A failure leaves both as they were.
fn replace_by_copy_keeps_the_original_or_changes_nothing(database: &TestDatabase) {
    let mut store = database.open();
    create_full_conversation(&mut store, "main", 3);
    create_full_conversation(&mut store, "taken", 4);
    let before = export_bytes(&mut store, "main");
    let names = |store: &mut Database| -> Vec<String> {
        let all = store.list_conversations().expect("the conversations are listed");
        all.into_iter().map(|summary| summary.name).collect()
    };
    let settings = [("template", "t2")];
    let failed = store
        .replace_by_copy("main", "old", "m", &settings, &mut |_| Err(Error::internal("converting", "no")));
    assert_eq!(failed, Err(Error::internal("converting", "no")));
    let taken = store.replace_by_copy("main", "taken", "m", &settings, &mut |turn| Ok(Some(turn)));
    assert_eq!(taken.expect_err("the name is taken").kind, ErrorKind::Conflict);
    assert_eq!(
        (names(&mut store), export_bytes(&mut store, "main")),
        (vec!["main".into(), "taken".into()], before)
    );
    let texts = chunk_texts(&mut store, "main");
    store.put_record("main", RecordKind::Attention, "0000000001", Some("{}")).expect("the record is stored");
    store
        .replace_by_copy("main", "main (old)", "m", &settings, &mut |turn| Ok(Some(turn)))
        .expect("the conversation is replaced");
    assert_eq!(names(&mut store), ["main", "main (old)", "taken"]);
    assert_eq!(
        (chunk_texts(&mut store, "main"), chunk_texts(&mut store, "main (old)")),
        (texts.clone(), texts)
    );
    let attention = |store: &mut Database, name: &str| {
        store.records(name, RecordKind::Attention).expect("the records are read").len()
    };
    let kept = (attention(&mut store, "main"), attention(&mut store, "main (old)"));
    assert_eq!(kept, (0, 1), "other tokens have other positions");
    let model = |store: &mut Database, name: &str| {
        store.find_conversation(name).expect("it is read").map(|summary| summary.model)
    };
    assert_eq!(model(&mut store, "main").as_deref(), Some("m"));
    assert_eq!(model(&mut store, "main (old)").as_deref(), Some("SmolLM2"));
    let template = |store: &mut Database, name: &str| {
        let settings = store.records(name, RecordKind::Setting).expect("the records are read");
        settings.into_iter().find(|record| record.key == "template").map(|record| record.value)
    };
    assert_eq!(template(&mut store, "main").as_deref(), Some("t2"));
    assert_eq!(template(&mut store, "main (old)"), None);
    store
        .replace_by_copy("main", "main (older)", "m2", &[], &mut |turn| Ok(Some(turn)))
        .expect("the conversation is replaced again");
    let of = |store: &mut Database, name: &str| {
        let records =
            store.records_with_key(RecordKind::Setting, ORIGINAL_OF_KEY).expect("the records are read");
        records.into_iter().find(|(conversation, _)| conversation == name).map(|(_, record)| record.value)
    };
    let ids = ["main", "main (older)"]
        .map(|name| store.find_conversation(name).expect("it is read").map(|summary| summary.id));
    let originals = ["main", "main (older)", "main (old)"].map(|name| of(&mut store, name));
    assert_eq!(originals, [None, ids[0].clone(), ids[1].clone()], "each names what took its place");
    store.load("main", Access::Write).expect("the copy can be written");
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
}

/// Records that belong to a message are committed with it. A commit that fails discards them.
fn staged_records_are_written_with_the_next_commit(database: &TestDatabase) {
    let mut store = database.open();
    let staged = |value: &str| StagedRecords {
        model: Some(format!("model {value}")),
        records: vec![(RecordKind::Setting, "message.id".into(), value.into())],
    };
    let stored = |store: &mut Database| {
        let model = store.find_conversation("c").expect("it is read").map(|summary| summary.model);
        let records = store.records("c", RecordKind::Setting).expect("the records are read");
        (model, records.into_iter().map(|record| record.value).collect::<Vec<_>>())
    };
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    let history = seeded_history(5, 12);
    let (first, rest) = history.changes.split_first().expect("a history has changes");
    store.stage_records("c", staged("lost"));
    let stale = Timeline::new();
    assert!(store.commit("d", first, &stale, Durability::Immediate).is_err(), "it was not opened");
    assert_eq!(stored(&mut store), (None, vec![]), "nothing is written before the commit");
    store.stage_records("c", staged("1"));
    store.transact("c", &mut timeline, first, Durability::Immediate).expect("the change is committed");
    assert_eq!(stored(&mut store), (Some("model 1".into()), vec!["1".into()]));
    store.stage_records("c", staged("2"));
    store.transact_all("c", &mut timeline, rest).expect("the changes are committed");
    assert_eq!(stored(&mut store), (Some("model 2".into()), vec!["2".into()]));
    // Another writer has changed the row: the commit fails, and so do the records.
    execute_sql_directly(database, "UPDATE conversation SET seq = seq + 1");
    store.stage_records("c", staged("3"));
    let refused = store.transact("c", &mut timeline, &Change::Batch(vec![]), Durability::Immediate);
    assert_eq!(refused.expect_err("the row has changed").kind, ErrorKind::Busy);
    assert_eq!(stored(&mut store), (Some("model 2".into()), vec!["2".into()]));
    execute_sql_directly(database, "UPDATE conversation SET seq = seq - 1");
    store
        .transact("c", &mut timeline, &Change::Batch(vec![]), Durability::Immediate)
        .expect("the change is committed");
    assert_eq!(stored(&mut store).1, ["2"], "what was staged for a failed commit is discarded");
}

/// A copy has the same tokens and chunks, except for ids that were merged away; a copy up to a turn is a branch. The
/// original does not change.
fn copy_conversation_keeps_tokens_and_can_branch(database: &TestDatabase) {
    let mut store = database.open();
    for seed in 0..8 {
        let (from, to, branch) = (format!("from {seed}"), format!("to {seed}"), format!("branch {seed}"));
        create_full_conversation(&mut store, &from, seed);
        for turn in [0, 99] {
            let key = format!("{turn:010}");
            store.put_record(&from, RecordKind::Attention, &key, Some("{}")).expect("the record is stored");
        }
        let before = export_bytes(&mut store, &from);
        store
            .copy_conversation(&from, &to, "SmolLM2", &mut |turn| Ok(Some(turn)))
            .expect("the conversation is copied");
        let tokens = |store: &mut Database, name: &str| {
            let mut timeline = store.load(name, Access::Read).expect("the conversation loads");
            let all: Vec<ChunkId> = timeline.chunks().map(|chunk| chunk.id()).collect();
            store.load_bodies(name, &mut timeline, &all).expect("the bodies are stored");
            let token = |t: halo_core::timeline::TokenRef<'_>| {
                (t.position, t.id, t.text.to_owned(), t.brightness.0.to_bits(), t.flags, t.chunk)
            };
            let tokens = (0..timeline.len() as u64).map(|p| timeline.token(Position(p)).map(token));
            let chunks = timeline.chunks().map(|c| (c.id(), c.is_pinned(), c.tally()));
            (tokens.collect::<Vec<_>>(), chunks.collect::<Vec<_>>())
        };
        let original = tokens(&mut store, &from);
        assert_eq!(tokens(&mut store, &to), original, "history {seed}");
        let notes_and_embeddings = |store: &mut Database, name: &str| {
            (
                store.records(name, RecordKind::Note).expect("the records are read"),
                store.embeddings(name, "b").expect("the embeddings are read"),
            )
        };
        assert_eq!(
            notes_and_embeddings(&mut store, &to).0[0].value,
            notes_and_embeddings(&mut store, &from).0[0].value
        );
        let mut vectors = notes_and_embeddings(&mut store, &from).1;
        vectors.retain(|vector| original.1.iter().any(|(id, ..)| *id == vector.chunk));
        assert_eq!(notes_and_embeddings(&mut store, &to).1, vectors);
        let mut turns_left = 3;
        let mut two_turns = |turn: TurnCopy| {
            turns_left -= 1;
            Ok((turns_left > 0).then_some(turn))
        };
        store
            .copy_conversation(&from, &branch, "SmolLM2", &mut two_turns)
            .expect("the conversation is copied");
        let branch_tokens = tokens(&mut store, &branch);
        assert_eq!(branch_tokens.0[..], original.0[..branch_tokens.0.len()], "history {seed}");
        let turns = store.load(&branch, Access::Read).expect("the conversation loads").turns().len();
        assert!(
            turns <= 2
                && store.replay_log(&branch).expect("the log is complete").len() == branch_tokens.0.len()
        );
        let attention = store.records(&branch, RecordKind::Attention).expect("the records are read");
        let attention: Vec<&str> = attention.iter().map(|record| record.key.as_str()).collect();
        assert_eq!(attention, ["0000000000"], "the branch uses the numbers of later turns again");
        let second_copy = store.copy_conversation(&from, &to, "SmolLM2", &mut |turn| Ok(Some(turn)));
        assert!(
            second_copy.is_err_and(|e| e.kind == ErrorKind::Conflict && e.to_string().contains("already"))
        );
        let failed_copy =
            store.copy_conversation(&from, "never", "m", &mut |_| Err(Error::internal("copying", "no")));
        assert_eq!(failed_copy, Err(Error::internal("copying", "no")));
        assert_eq!(export_bytes(&mut store, &from), before, "history {seed}");
    }
    assert!(
        store
            .list_conversations()
            .expect("the conversations are listed")
            .iter()
            .all(|summary| summary.name != "never")
    );
}

fn export_bytes(store: &mut Database, name: &str) -> Vec<u8> {
    let mut out = Vec::new();
    store
        .export(name, &mut out, &mut |written, total| assert!(written <= total))
        .expect("the conversation is exported");
    out
}

fn import_bytes(store: &mut Database, bytes: &[u8], name: Option<&str>) -> Result<String, Error> {
    let import = ImportRequest {
        file_name: "export.jsonl",
        format: None,
        name,
        chunk_size: halo_core::chunker::ChunkSize::default(),
        initial_brightness: Brightness(10_000.0),
        model: None,
        validate_rows: None,
    };
    let report = store.import(&mut &*bytes, import)?;
    Ok(report.conversations[0].name.clone())
}

fn export_import_round_trip_is_byte_identical(database: &TestDatabase) {
    let mut store = database.open();
    for seed in 0..5 {
        let name = format!("history {seed}");
        let timeline = create_full_conversation(&mut store, &name, seed);
        let first = export_bytes(&mut store, &name);
        // Imported into another store and exported from it.
        let other_database = crate::common::sqlite();
        let mut other = other_database.open();
        assert_eq!(import_bytes(&mut other, &first, None).as_ref(), Ok(&name));
        assert_eq!(export_bytes(&mut other, &name), first);
        assert_eq!(
            other.load(&name, Access::Write).expect("the conversation loads").state_hash(),
            timeline.state_hash()
        );
        let imported = other.list_conversations().expect("the conversations are listed");
        assert_eq!(imported.len(), 1);
        let exported = store.find_conversation(&name).expect("the store is read").expect("the conversation");
        let same_id = ConversationSummary { id: exported.id.clone(), ..imported[0].clone() };
        assert_eq!(same_id, exported, "only the id belongs to the store");
        for chunk in timeline.chunks().map(|c| c.id()) {
            assert_eq!(other.chunk_history(&name, chunk), store.chunk_history(&name, chunk));
        }
        assert_eq!(other.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
        let error = import_bytes(&mut store, &first, None).expect_err("the name is taken");
        assert_eq!(error.kind, ErrorKind::Conflict);
        let expected = format!("there is a conversation '{name}' already: choose another name");
        assert!(error.to_string().ends_with(&expected), "{error}");
        let renamed = format!("z{seed}");
        assert_eq!(import_bytes(&mut store, &first, Some(&renamed)).as_ref(), Ok(&renamed));
        let renamed =
            String::from_utf8(export_bytes(&mut store, &format!("z{seed}"))).expect("the export is UTF-8");
        let (_, body) = renamed.split_once('\n').expect("the export has several lines");
        assert!(
            String::from_utf8_lossy(&first)
                .contains(body.rsplit_once("{\"end\"").expect("the export has an end line").0)
        );
    }
}

fn import_rejects_damaged_export(database: &TestDatabase) {
    let mut store = database.open();
    create_full_conversation(&mut store, "c", 9);
    let export = export_bytes(&mut store, "c");
    let before = store.list_conversations().expect("the conversations are listed");
    let mut rng = fastrand::Rng::with_seed(77);
    for _ in 0..if cfg!(debug_assertions) { 300 } else { 3000 } {
        let mut bytes = export.clone();
        let at = rng.u64(..) as usize % bytes.len();
        match rng.u64(..) % 4 {
            0 => bytes[at] ^= 1 << (rng.u64(..) % 8),
            1 => bytes.truncate(at),
            2 => drop(bytes.drain(at..(at + 1 + rng.u64(..) as usize % 99).min(export.len()))),
            _ => bytes.insert(at, rng.u64(..) as u8),
        }
        let refused = import_bytes(&mut store, &bytes, Some("copy"));
        assert!(refused.is_err(), "damage at {at} was not noticed");
    }
    assert_eq!(store.list_conversations().expect("the conversations are listed"), before);
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
    let newer =
        String::from_utf8(export).expect("the export is UTF-8").replacen("\"version\":1", "\"version\":2", 1);
    let refused =
        import_bytes(&mut store, newer.as_bytes(), Some("copy")).expect_err("the export is too new");
    assert_eq!(refused.kind, ErrorKind::InvalidInput);
    let refused = refused.to_string();
    assert!(refused.contains("written by a newer Halo (version 2, this program reads 1)"), "{refused}");
}

fn read_sample(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exchange").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Files of other programs, and what the store has after the import, with and without a model.
fn import_reads_foreign_formats(database: &TestDatabase) {
    let mut store = database.open();
    let mut rendered = String::new();
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
        let before: Vec<_> = store
            .list_conversations()
            .expect("the conversations are listed")
            .into_iter()
            .map(|s| s.name)
            .collect();
        let report = store.import(&mut bytes.as_slice(), import).expect("the file is imported");
        let _ = writeln!(rendered, "== {file}: {}", report.format);
        for (kind, n) in report.losses.iter() {
            let _ = writeln!(rendered, "lost {kind}: {n}");
        }
        for imported in report.conversations {
            assert!(!before.contains(&imported.name));
            render_conversation(&mut store, &imported.name, &mut rendered);
            store.set_model(&imported.name, "").expect("the model is stored");
        }
        // The next file with a model has the same name.
        if with_model {
            rename_directly(database, "with a model", &format!("with a model {file}"));
        }
    }
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/arrivals.expected");
    if std::env::var_os("UPDATE_EXPECTED").is_some() {
        std::fs::write(&path, &rendered).expect("the file is written");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        rendered == expected,
        "tests/arrivals.expected differs; UPDATE_EXPECTED=1 writes it:\n{rendered}"
    );
}

fn rename_directly(database: &TestDatabase, from: &str, to: &str) {
    execute_sql_directly(database, &format!("UPDATE conversation SET name = '{to}' WHERE name = '{from}'"));
}

fn render_conversation(store: &mut Database, name: &str, out: &mut String) {
    let mut timeline = store.load(name, Access::Read).expect("the conversation loads");
    load_all_bodies(store, name, &mut timeline);
    let summary = store
        .list_conversations()
        .expect("the conversations are listed")
        .into_iter()
        .find(|s| s.name == name)
        .expect("the conversation is listed");
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
        for record in store.records(name, kind).expect("the records are read") {
            let _ = writeln!(out, "  {} {}: {}", kind.name(), record.key, record.value);
        }
    }
    for embedding in store.embeddings(name, "halo_weave").expect("the embeddings are read") {
        let _ = writeln!(out, "  embedding of {}: {} numbers", embedding.chunk, embedding.vector.len());
    }
}

/// Damage to rows of the conversation "c".
struct DamageCase {
    /// The statement that damages the rows; `LAST` is the key of an entry near the end of the log.
    sql: &'static str,
    problem: &'static str,
    repaired: &'static str,
    /// Whether the repair restores the exact state, not only the text.
    lossless: bool,
}

const DAMAGE_CASES: [DamageCase; 12] = [
    DamageCase {
        sql: "UPDATE chunk SET sum = sum + 1 WHERE key % 4294967296 = 2",
        problem: "the checksum of the tokens of",
        repaired: "rebuilt from its log",
        lossless: true,
    },
    DamageCase {
        sql: "DELETE FROM chunk WHERE key % 4294967296 = 1",
        problem: "missing",
        repaired: "rebuilt from its log",
        lossless: true,
    },
    DamageCase {
        sql: "UPDATE block SET sum = sum + 1",
        problem: "block 0 of the chunk headers is damaged",
        repaired: "rebuilt from its log",
        lossless: true,
    },
    DamageCase {
        sql: "UPDATE chunk SET live = 1 - live WHERE key % 4294967296 = 0",
        problem: "",
        repaired: "rebuilt from its log",
        lossless: true,
    },
    DamageCase {
        sql: "UPDATE conversation SET tokens = tokens + 1",
        problem: "its counts do not match its chunks",
        repaired: "rebuilt from its log",
        lossless: true,
    },
    DamageCase {
        sql: "DELETE FROM mention",
        problem: "the indexes of its log do not match its entries",
        repaired: "the indexes of its log were rebuilt",
        lossless: true,
    },
    DamageCase {
        sql: "UPDATE log SET turn = turn + 1 WHERE turn <> -1",
        problem: "the indexes of its log do not match its entries",
        repaired: "the indexes of its log were rebuilt",
        lossless: true,
    },
    DamageCase {
        sql: "UPDATE embedding SET sum = sum + 1",
        problem: "the checksum of the embedding of u0.0 does not match",
        repaired: "its damaged embeddings were deleted",
        lossless: true,
    },
    DamageCase {
        sql: "DELETE FROM log WHERE key = (SELECT min(key) FROM log)",
        problem: "does not fit the entries before it",
        repaired: "its log was rewritten",
        lossless: true,
    },
    DamageCase {
        sql: "UPDATE record SET value = 'changed' WHERE kind = 'memory'",
        problem: "the checksum of the memory '1' does not match",
        repaired: "its records are kept as they are",
        lossless: true,
    },
    DamageCase {
        sql: "UPDATE chunk SET sum = sum + 1 WHERE key % 4294967296 = 3; UPDATE log SET sum = sum + 1 WHERE key = LAST",
        problem: "the checksum of the tokens of",
        repaired: "1 of them from the log; no text was lost",
        lossless: false,
    },
    DamageCase {
        sql: "UPDATE log SET sum = sum + 1 WHERE key >= LAST; UPDATE block SET sum = sum + 1",
        problem: "block 0",
        repaired: "no text was lost, but the reasons for earlier changes were",
        lossless: false,
    },
];

/// For every kind of damage, the integrity check reports it and a repair restores all text.
fn doctor_finds_and_repairs_damaged_rows(database: &TestDatabase) {
    let mut store = database.open();
    let timeline = create_full_conversation(&mut store, "c", 21);
    let hash = timeline.state_hash();
    drop(store);
    for DamageCase { sql, problem, repaired, lossless } in DAMAGE_CASES {
        execute_sql_directly(database, &sql.replace("LAST", "(SELECT max(key) - 2 FROM log)"));
        let mut store = database.open();
        let findings = store.check_integrity(&mut |_, _| {}).expect("the check runs");
        assert!(findings.iter().any(|f| f.problem.contains(problem)), "{sql}: {findings:?}");
        let (backup, report) = store.repair(&findings).expect("the repair runs");
        let backup = backup.expect("the repair makes a backup");
        assert!(Path::new(&backup).exists() || backup.starts_with("schema halo_backup_"), "{backup}");
        assert!(report.iter().any(|d| d.contains(repaired)), "{sql}: {report:?}");
        assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), [], "{sql}");
        let mut loaded = store.load("c", Access::Write).expect("the conversation loads");
        assert!(loaded.state_hash() == hash || !lossless, "{sql}");
        load_all_bodies(&mut store, "c", &mut loaded);
        let texts = |t: &Timeline| {
            t.chunks().map(|c| (c.id(), c.text().into_owned(), c.is_live())).collect::<Vec<_>>()
        };
        assert_eq!(texts(&loaded), texts(&timeline), "{sql}");
        if !lossless {
            let (at, turn) = (loaded.next_position(), loaded.next_turn());
            let append = Append { at, turn, role: Role::User, tokens: Vec::new() };
            store
                .transact("c", &mut loaded, &Change::Append(append), Durability::Immediate)
                .expect("the conversation can continue");
        }
    }
}

/// A conversation that has lost its row is recovered, and other orphan rows are deleted.
fn repair_recovers_nameless_conversation(database: &TestDatabase) {
    create_full_conversation(&mut database.open(), "c", 21);
    let hash = database.open().load("c", Access::Read).expect("the conversation loads").state_hash();
    execute_sql_directly(database, "DELETE FROM conversation");
    let mut store = database.open();
    let findings = store.check_integrity(&mut |_, _| {}).expect("the check runs");
    assert_eq!(findings[0].problem, "conversations without a name: 1");
    store.repair(&findings).expect("the repair runs");
    assert_eq!(
        store.load("recovered 1", Access::Read).expect("the conversation is recovered").state_hash(),
        hash
    );
    drop(store);
    execute_sql_directly(database, "INSERT INTO record VALUES (999, 'note', 'k', 'v', 0, 0)");
    let mut store = database.open();
    let findings = store.check_integrity(&mut |_, _| {}).expect("the check runs");
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(findings[0].problem, "rows without a conversation: 1");
    store.repair(&findings).expect("the repair runs");
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
}

/// Of two timelines loaded from one store, the one that has missed a change may not be committed.
fn commit_rejects_stale_timeline(database: &TestDatabase) {
    let history = seeded_history(6, 12);
    let mut store = database.open();
    let mut first = store.load("c", Access::Write).expect("a new conversation");
    for change in &history.changes[..4] {
        store.transact("c", &mut first, change, Durability::Immediate).expect("the change is committed");
    }
    let mut second = store.load("c", Access::Write).expect("the same store may load it twice");
    store
        .transact("c", &mut second, &history.changes[4], Durability::Immediate)
        .expect("the change is committed");
    let refused = store.transact("c", &mut first, &history.changes[4], Durability::Immediate);
    let refused = refused.expect_err("the timeline has missed a change");
    assert_eq!(refused.kind, ErrorKind::Busy);
    assert_eq!(
        refused.to_string(),
        "saving 'c': the conversation has changed since this timeline was loaded: open it again"
    );
    store
        .transact("c", &mut second, &history.changes[5], Durability::Immediate)
        .expect("the conversation can continue");
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
}

fn records_can_precede_first_message(database: &TestDatabase) {
    let mut store = database.open();
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    store.set_model("c", "SmolLM2").expect("the model is stored");
    store.put_record("c", RecordKind::Note, "notes.json", Some("{}")).expect("the record is stored");
    assert!(
        store.put_record("c", RecordKind::Note, "n", Some("a\0b")).is_err(),
        "the same on every database"
    );
    for change in &seeded_history(6, 5).changes {
        store.transact("c", &mut timeline, change, Durability::Immediate).expect("the change is committed");
    }
    assert_eq!(
        store.load("c", Access::Read).expect("the conversation loads").state_hash(),
        timeline.state_hash()
    );
    assert_eq!(store.records("c", RecordKind::Note).expect("the records are read").len(), 1);
}

fn chunk_texts(store: &mut Database, name: &str) -> Vec<(ChunkId, String)> {
    let mut timeline = store.load(name, Access::Read).expect("the conversation loads");
    load_all_bodies(store, name, &mut timeline);
    timeline.chunks().map(|c| (c.id(), c.text().into_owned())).collect()
}

fn repair_recovers_chunks_from_truncated_log(database: &TestDatabase) {
    let mut store = database.open();
    create_full_conversation(&mut store, "c", 31);
    let texts = chunk_texts(&mut store, "c");
    drop(store);
    execute_sql_directly(database, "DELETE FROM log WHERE key >= (SELECT max(key) - 20 FROM log)");
    execute_sql_directly(database, "UPDATE block SET sum = sum + 1");
    let mut store = database.open();
    let findings = store.check_integrity(&mut |_, _| {}).expect("the check runs");
    assert!(findings.iter().any(|f| f.problem == "the end of its log is missing"), "{findings:?}");
    store.repair(&findings).expect("the repair runs");
    assert_eq!(chunk_texts(&mut store, "c"), texts);
}

fn repair_recovers_conversation_without_log(database: &TestDatabase) {
    let mut store = database.open();
    create_full_conversation(&mut store, "c", 33);
    let texts = chunk_texts(&mut store, "c");
    drop(store);
    execute_sql_directly(database, "DELETE FROM log; DELETE FROM conversation");
    let mut store = database.open();
    let findings = store.check_integrity(&mut |_, _| {}).expect("the check runs");
    store.repair(&findings).expect("the repair runs");
    assert_eq!(chunk_texts(&mut store, "recovered 1"), texts);
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
}

/// Message keys are found by path and by text, are copied to a branch up to its turn, and are deleted with forgotten text.
fn message_keys_find_conversations(database: &TestDatabase) {
    let mut store = database.open();
    let key = |turn: u32, loose: u64| MessageKey {
        turn: TurnId(turn),
        role: if turn.is_multiple_of(2) { Role::User } else { Role::Assistant },
        exact_hash: loose + 1,
        loose_hash: loose,
        name_hash: 0,
        length: 40,
        prefix_hash: loose ^ 0xabcd,
    };
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    for change in &seeded_history(5, 30).changes {
        store.transact("c", &mut timeline, change, Durability::Immediate).expect("the change is committed");
    }
    let turns: Vec<u32> = timeline.turns().iter().map(|turn| turn.id.0).collect();
    let keys: Vec<MessageKey> = turns.iter().map(|&turn| key(turn, u64::MAX / 3 + u64::from(turn))).collect();
    store.put_message_keys("c", &keys).expect("the keys are stored");
    store.put_message_keys("d", &[keys[0]]).expect("keys may precede the first message");
    assert_eq!(store.message_keys("c", 1000).expect("the keys are read"), keys);
    assert_eq!(store.message_keys("c", 1).expect("the keys are read"), keys[keys.len() - 1..]);
    let matches = store.find_messages(MessageLookup::Loose(keys[0].loose_hash), 8).expect("the lookup runs");
    assert_eq!(matches, [("d".to_owned(), keys[0].turn), ("c".to_owned(), keys[0].turn)], "the newest first");
    let last = keys[keys.len() - 1];
    let matches = store.find_messages(MessageLookup::Prefix(last.prefix_hash), 8).expect("the lookup runs");
    assert_eq!(matches, [("c".to_owned(), last.turn)]);
    assert_eq!(store.find_messages(MessageLookup::Prefix(7), 8).expect("the lookup runs"), []);
    let middle = turns[turns.len() / 2];
    store
        .copy_conversation("c", "branch", "m", &mut |turn| Ok((turn.turn.0 <= middle).then_some(turn)))
        .expect("the conversation is copied");
    let shared: Vec<MessageKey> = keys.iter().copied().filter(|key| key.turn.0 <= middle).collect();
    assert_eq!(store.message_keys("branch", 1000).expect("the keys are read"), shared);
    database.open().load("branch", Access::Write).expect("the copy is not locked");
    // Keys from the first forgotten turn on contain a hash of its text.
    let forgotten = timeline
        .chunks()
        .map(|chunk| chunk.id())
        .find(|id| id.turn.0 >= middle)
        .expect("a chunk in the second half");
    store.forget("c", &[forgotten], &[]).expect("the chunk is forgotten");
    assert!(
        store.message_keys("c", 1000).expect("the keys are read").iter().all(|key| key.turn < forgotten.turn)
    );
    assert_eq!(
        store.find_conversation("c").expect("the lookup runs").map(|summary| summary.name).as_deref(),
        Some("c")
    );
    assert_eq!(store.find_conversation("nobody").expect("the lookup runs"), None);
}

/// Many changes in one transaction lead to the same state and to a log that replays to it. If one of them is invalid, none
/// is committed.
fn transaction_commits_all_changes_or_none(database: &TestDatabase) {
    let mut rng = fastrand::Rng::with_seed(8);
    for n in 0..6 {
        let history = random_history(&mut rng, 40);
        let name = format!("history {n}");
        let mut store = database.open();
        let mut timeline = store.load(&name, Access::Write).expect("a new conversation");
        let (first, rest) = history.changes.split_at(history.changes.len() / 3);
        for change in first {
            store
                .transact(&name, &mut timeline, change, Durability::Deferred)
                .expect("the change is committed");
        }
        let (hash, mut invalid) = (timeline.state_hash(), rest.to_vec());
        invalid.push(Change::Pin { chunk: chunk_id("u999.0"), pinned: true });
        store.transact_all(&name, &mut timeline, &invalid).expect_err("the last change is invalid");
        assert_eq!(timeline.state_hash(), hash);
        assert_eq!(
            database.open().load(&name, Access::Read).expect("the conversation loads").state_hash(),
            hash
        );
        store.transact_all(&name, &mut timeline, rest).expect("all changes are committed");
        // The next commit continues from the last of these changes.
        store
            .transact(&name, &mut timeline, &Change::Batch(vec![]), Durability::Immediate)
            .expect("the change is committed");
        let stored = database.open().load(&name, Access::Read).expect("the conversation loads");
        assert_eq!(stored.state_hash(), timeline.state_hash());
        assert_eq!(store.replay_log(&name).expect("the log is complete").state_hash(), timeline.state_hash());
        assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
    }
}

/// Another writer can take a released lease. The first writer reacquires it only if the conversation is unchanged.
fn lease_release_lets_another_writer_take_over(database: &TestDatabase) {
    let history = seeded_history(1, 8);
    let mut first = database.open();
    let mut timeline = first.load("c", Access::Write).expect("a new conversation");
    first
        .transact("c", &mut timeline, &history.changes[0], Durability::Immediate)
        .expect("the change is committed");
    first.release_lease("c");
    assert!(
        first.reacquire_lease("c", timeline.revision()).expect("the lease is free"),
        "nothing has changed"
    );
    first
        .transact("c", &mut timeline, &history.changes[1], Durability::Immediate)
        .expect("the conversation can continue");
    first.release_lease("c");
    let mut second = database.open();
    let mut second_timeline = second.load("c", Access::Write).expect("the lease was released");
    assert!(first.reacquire_lease("c", timeline.revision()).is_err(), "the second has the lease");
    second
        .transact("c", &mut second_timeline, &history.changes[2], Durability::Immediate)
        .expect("the change is committed");
    second.release_lease("c");
    assert!(!first.reacquire_lease("c", timeline.revision()).expect("the lease is free"), "it has changed");
    second.load("c", Access::Write).expect("the lease is free");
    second.release_lease("c");
    let mut timeline = first.load("c", Access::Write).expect("the conversation loads again");
    first
        .transact("c", &mut timeline, &history.changes[3], Durability::Immediate)
        .expect("the conversation can continue");
}

/// All rows of all tables, without the ends of leases: their owners renew them.
fn dump_tables(database: &TestDatabase) -> Vec<String> {
    const TABLES: [(&str, &str); 9] = [
        ("conversation", "*"),
        ("chunk", "*"),
        ("block", "*"),
        ("log", "*"),
        ("mention", "*"),
        ("record", "*"),
        ("embedding", "*"),
        ("message", "*"),
        ("lease", "key, owner, epoch, written"),
    ];
    let mut lines = Vec::new();
    for (table, columns) in TABLES {
        match &database.location {
            StoreLocation::Sqlite(path) => {
                let connection = rusqlite::Connection::open(path).expect("the file opens");
                let select = format!("SELECT {columns} FROM {table}");
                let mut statement = connection.prepare(&select).expect("the table exists");
                let count = statement.column_count();
                let mut rows = statement.query([]).expect("the table is read");
                while let Some(row) = rows.next().expect("a row") {
                    let cells: Vec<rusqlite::types::Value> =
                        (0..count).map(|column| row.get(column).expect("a cell")).collect();
                    lines.push(format!("{table} {cells:?}"));
                }
            }
            StoreLocation::Postgres(_) => {
                let select = format!("SELECT r::text FROM (SELECT {columns} FROM halo.{table}) r");
                let rows = crate::common::postgres_server::query_texts(&database.url, &select);
                lines.extend(rows.into_iter().map(|row| format!("{table} {row}")));
            }
        }
    }
    lines.sort();
    lines
}

/// Another store takes over a conversation whose owner does not answer.
fn take_over(database: &TestDatabase, name: &str) -> (Database, Timeline) {
    let mut other = database.open_elsewhere();
    // The owner may renew its lease just between these two.
    for _ in 0..5 {
        database.end_lease(name);
        if let Ok(timeline) = other.load(name, Access::Write) {
            return (other, timeline);
        }
    }
    panic!("the lease has ended, but cannot be taken");
}

/// An owner that was paused for longer than its lease changes no row, whatever it writes, and is told why.
fn lease_that_was_lost_refuses_every_write(database: &TestDatabase) {
    let mut paused = database.open();
    let mut timeline = create_full_conversation(&mut paused, "c", 5);
    let chunk = timeline.chunks().next().expect("a chunk").id();
    let (mut owner, mut current) = take_over(database, "c");
    let pin = |pinned| Change::Pin { chunk, pinned };
    owner.transact("c", &mut current, &pin(true), Durability::Immediate).expect("the new owner writes");
    let key = MessageKey {
        turn: TurnId(0),
        role: Role::User,
        exact_hash: 1,
        loose_hash: 2,
        name_hash: 0,
        length: 3,
        prefix_hash: 4,
    };
    let embedding = Embedding { chunk, text_hash: 1, vector: vec![1.0] };
    let staged = StagedRecords {
        model: Some("other".into()),
        records: vec![(RecordKind::Setting, "staged".into(), "stale".into())],
    };
    type StaleWrite<'a> = (&'a str, Box<dyn FnMut(&mut Database, &mut Timeline) -> Result<(), Error> + 'a>);
    let mut writes: Vec<StaleWrite<'_>> = vec![
        ("commit", Box::new(|s, t| s.transact("c", t, &pin(true), Durability::Deferred).map(drop))),
        (
            "commit with records",
            Box::new(|s, t| {
                s.stage_records("c", staged.clone());
                s.transact("c", t, &pin(true), Durability::Immediate).map(drop)
            }),
        ),
        ("commit of several", Box::new(|s, t| s.transact_all("c", t, &[pin(true), pin(false)]))),
        ("record", Box::new(|s, _| s.put_record("c", RecordKind::Note, "n", Some("stale")))),
        ("deleted record", Box::new(|s, _| s.put_record("c", RecordKind::Memory, "1", None))),
        ("embedding", Box::new(|s, _| s.put_embeddings("c", "b", std::slice::from_ref(&embedding)))),
        ("model", Box::new(|s, _| s.set_model("c", "stale"))),
        ("message key", Box::new(|s, _| s.put_message_keys("c", &[key]))),
    ];
    let before = dump_tables(database);
    for (what, write) in &mut writes {
        for attempt in 0..2 {
            let refused = write(&mut paused, &mut timeline).expect_err(what);
            assert!(
                refused.is_lease_lost() && refused.kind == ErrorKind::Busy,
                "{what}, {attempt}: {refused}"
            );
        }
        assert_eq!(dump_tables(database), before, "{what}");
    }
    // What takes leases itself finds that of the new owner.
    writes = vec![
        ("rename", Box::new(|s, _| s.rename("c", "d"))),
        ("erase", Box::new(|s, _| s.forget_conversation("c"))),
        ("replace", Box::new(|s, _| s.replace_by_copy("c", "old", "m", &[], &mut |turn| Ok(Some(turn))))),
        ("record", Box::new(|s, _| s.put_record("c", RecordKind::Note, "n", Some("stale")))),
    ];
    for (what, write) in &mut writes {
        let refused = write(&mut paused, &mut timeline).expect_err(what);
        assert_eq!(refused.kind, ErrorKind::Busy, "{what}: {refused}");
        let without_leases = |dump: Vec<String>| -> Vec<String> {
            dump.into_iter().filter(|line| !line.starts_with("lease ")).collect()
        };
        assert_eq!(without_leases(dump_tables(database)), without_leases(before.clone()), "{what}");
    }
    drop(writes);
    owner
        .transact("c", &mut current, &pin(false), Durability::Immediate)
        .expect("the new owner is not disturbed");
    assert_eq!(owner.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
}

/// The former owner opens the conversation again and goes on behind what the other one has written.
fn lease_that_was_lost_is_taken_again_by_opening(database: &TestDatabase) {
    let history = seeded_history(3, 8);
    let mut paused = database.open();
    let mut timeline = paused.load("c", Access::Write).expect("a new conversation");
    let commit = |store: &mut Database, timeline: &mut Timeline, n: usize| {
        store.transact("c", timeline, &history.changes[n], Durability::Immediate)
    };
    commit(&mut paused, &mut timeline, 0).expect("the change is committed");
    let (mut owner, mut current) = take_over(database, "c");
    commit(&mut owner, &mut current, 1).expect("the new owner writes");
    assert!(commit(&mut paused, &mut timeline, 1).expect_err("it has lost the lease").is_lease_lost());
    drop(owner);
    // It stays lost, although the lease is free now.
    assert!(commit(&mut paused, &mut timeline, 1).expect_err("it has lost the lease").is_lease_lost());
    assert!(!paused.reacquire_lease("c", timeline.revision()).expect("the lease is free"), "it has changed");
    let mut timeline = paused.load("c", Access::Write).expect("the lease is free");
    assert_eq!(timeline.state_hash(), current.state_hash());
    commit(&mut paused, &mut timeline, 2).expect("it goes on");
    let stored = database.open().load("c", Access::Read).expect("the conversation loads");
    assert_eq!(stored.state_hash(), timeline.state_hash());
}

fn lease_epoch_rises_with_every_owner(database: &TestDatabase) {
    let epoch = || database.stored_lease("c").map_or(0, |(_, epoch)| epoch);
    drop(database.open());
    let mut epochs = vec![epoch()];
    for n in 0..4 {
        let mut store = database.open();
        let mut timeline = store.load("c", Access::Write).expect("the lease is free");
        let name = format!("note {n}");
        store.put_record("c", RecordKind::Note, &name, Some("x")).expect("the record is stored");
        let change = Change::Append(Append {
            at: timeline.next_position(),
            turn: timeline.next_turn(),
            role: Role::User,
            tokens: vec![NewToken {
                id: TokenId(n),
                text: "word".into(),
                chunk_index: 0,
                brightness: Brightness(1.0),
                kind: ContentKind::Message,
            }],
        });
        store.transact("c", &mut timeline, &change, Durability::Immediate).expect("the change is committed");
        epochs.push(epoch());
    }
    assert_eq!(epochs, [0, 1, 2, 3, 4], "every owner has an epoch of its own");
    let mut store = database.open();
    store.forget_conversation("c").expect("the conversation is erased");
    store.load("c", Access::Write).expect("a new conversation of that name");
    store.set_model("c", "m").expect("the model is stored");
    assert!(epoch() > 4, "an epoch never occurs twice, not even after an erasure");
}

/// Many stores open a conversation at once: one has it, all others are told so; again when it is free.
fn lease_race_has_one_winner(database: &TestDatabase) {
    drop(database.open());
    for round in 0..3 {
        let start = std::sync::Barrier::new(8);
        let opened: Vec<Result<(Database, Timeline), Error>> = std::thread::scope(|scope| {
            let open = || {
                let mut store = database.open();
                start.wait();
                store.load("c", Access::Write).map(|timeline| (store, timeline))
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().expect("the thread does not panic")).collect()
        });
        let (winners, losers): (Vec<_>, Vec<_>) = opened.into_iter().partition(Result::is_ok);
        assert_eq!((winners.len(), losers.len()), (1, 7), "round {round}");
        assert!(losers.iter().all(|lost| lost.as_ref().is_err_and(|error| error.kind == ErrorKind::Busy)));
        for (mut store, mut timeline) in winners.into_iter().flatten() {
            let change = Change::Batch(Vec::new());
            store.transact("c", &mut timeline, &change, Durability::Immediate).expect("the winner writes");
            assert_eq!(timeline.revision(), round + 1);
        }
    }
}

/// A world whose runner was paused changes nothing after another process has taken it over; messages to its owner need no
/// lease.
fn lease_of_a_world_refuses_a_stale_owner(database: &TestDatabase) {
    const HEADER: RowKind = RowKind::from_static("world");
    const COMMAND: RowKind = RowKind::from_static("post");
    let row = |kind, key: &str, value: &str| Row { kind, key: key.into(), value: value.into() };
    let mut paused = database.open();
    paused.lease_namespace("lamp").expect("the lease is free");
    paused.put_rows("lamp", &[row(HEADER, "0", "first")], &[]).expect("the rows are stored");
    let mut owner = database.open_elsewhere();
    let mut taken = false;
    for _ in 0..5 {
        database.end_lease("world:lamp");
        taken = owner.lease_namespace("lamp").is_ok();
        if taken {
            break;
        }
    }
    assert!(taken, "the lease has ended, but cannot be taken");
    owner.put_rows("lamp", &[row(HEADER, "0", "second")], &[]).expect("the new owner writes");
    let before = dump_tables(database);
    let refused = paused.put_rows("lamp", &[row(HEADER, "0", "stale")], &[(COMMAND, "1".into())]);
    assert!(refused.expect_err("it has lost the lease").is_lease_lost());
    assert_eq!(dump_tables(database), before);
    let mut visitor = database.open();
    visitor.post_row("lamp", &row(COMMAND, "1", "asked")).expect("a message needs no lease");
    visitor.post_row("lamp", &row(COMMAND, "1", "asked again")).expect("it changes no row");
    let posted = owner.load_rows("lamp", &COMMAND, "0".."9", 10).expect("the rows are read");
    assert_eq!(posted.iter().map(|row| row.value.as_str()).collect::<Vec<_>>(), ["asked"]);
    let missing = visitor.post_row("nowhere", &row(COMMAND, "1", "asked")).expect_err("no such world");
    assert_eq!(missing.kind, ErrorKind::NotFound);
}

/// A record of a conversation that another process has open is not written; one that is free needs no opening.
fn lease_of_another_process_refuses_writes_without_one(database: &TestDatabase) {
    let mut owner = database.open();
    create_full_conversation(&mut owner, "c", 4);
    // The owner is made one of another process.
    match &database.location {
        StoreLocation::Sqlite(path) => {
            let locks = format!("{}-locks", path.display());
            for file in std::fs::read_dir(locks).expect("the folder of the locks").flatten() {
                if file.file_name() != "in-use" {
                    std::fs::write(file.path(), "1").expect("the number of a process is written");
                }
            }
        }
        StoreLocation::Postgres(_) => {}
    }
    let mut visitor = database.open_elsewhere();
    let before = dump_tables(database);
    let refused =
        visitor.put_record("c", RecordKind::Setting, "k", Some("v")).expect_err("it is open elsewhere");
    assert_eq!(refused.kind, ErrorKind::Busy, "{refused}");
    assert!(!refused.is_lease_lost());
    assert_eq!(dump_tables(database), before);
    drop(owner);
    visitor.put_record("c", RecordKind::Setting, "k", Some("v")).expect("it is free");
    database.open().load("c", Access::Write).expect("the visitor has given the lease back");
}
