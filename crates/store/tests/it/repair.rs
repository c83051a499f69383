//! Damaged and unusual files: truncated, with flipped bits, of an older or newer version, of another program, in a
//! write-protected folder. Each gives a clear error, and a repair loses nothing that can be read.

use crate::common::TestDatabase;
use halo_core::ErrorKind;
use halo_core::row_store::{Row, RowKind, RowStore};
use halo_core::store::{Access, Durability, RecordKind, Store};
use halo_core::testing::timeline_fuzz::{FuzzOp, TimelineFuzz};
use halo_core::timeline::StateHash;
use halo_store::database::{Database, StoreLocation};
use halo_store::wal_check::{find_wal_damage, keep_wal};
use std::fs;
use std::path::{Path, PathBuf};

const CONVERSATIONS: [&str; 2] = ["first", "second"];

/// A history without results of tools: the figures below are of these files.
fn random_history(seed: u32, len: u32) -> TimelineFuzz {
    let op = |i: u32| {
        let bytes = (i.wrapping_mul(0x9E37_79B9) ^ seed.wrapping_mul(0x85EB_CA6B)).rotate_left(i % 31);
        let [operation, target, amount, variation] = bytes.to_le_bytes();
        [operation % 240, target, amount, variation]
    };
    TimelineFuzz::run(&(0..len).map(op).collect::<Vec<FuzzOp>>())
}

fn database_path(database: &TestDatabase) -> PathBuf {
    match &database.location {
        StoreLocation::Sqlite(path) => path.clone(),
        StoreLocation::Postgres(_) => unreachable!("these tests are about files"),
    }
}

/// A closed store with two conversations, and the hashes of their states.
fn two_conversations() -> (TestDatabase, Vec<StateHash>) {
    let database = crate::common::sqlite();
    let mut store = database.open();
    let hashes = CONVERSATIONS.iter().zip([3, 5]).map(|(name, seed)| {
        let mut timeline = store.load(name, Access::Write).expect("a new conversation");
        for change in &random_history(seed, 70).changes {
            store
                .transact(name, &mut timeline, change, Durability::Deferred)
                .expect("the change is committed");
        }
        timeline.state_hash()
    });
    let hashes = hashes.collect();
    drop(store);
    (database, hashes)
}

/// How many damaged files had which outcome.
#[derive(Debug, Default)]
struct RepairTally {
    unharmed: usize,
    fully_repaired: usize,
    partly_recovered: usize,
    unrepairable: usize,
}

/// Opens, checks and repairs a damaged file, and counts the outcome.
fn repair_and_count(damaged: &[u8], hashes: &[StateHash], tally: &mut RepairTally) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("halo.db");
    fs::write(&file, damaged).expect("the file is written");
    let location = StoreLocation::Sqlite(file.clone());
    if let Err(error) = Database::open(&location) {
        assert!(error.to_string().contains("damaged") || error.to_string().contains("not a"), "{error}");
        if Database::rebuild_first_page(&file).is_err() {
            assert_eq!(
                fs::read(&file).expect("the file still exists"),
                damaged,
                "a file that cannot be repaired does not change"
            );
            tally.unrepairable += 1;
            return;
        }
    }
    let mut store = Database::open(&location).expect("the rebuilt file opens");
    let Ok(findings) = store.check_integrity(&mut |_, _| {}) else {
        tally.unrepairable += 1;
        return;
    };
    let mut reported = Vec::new();
    if !findings.is_empty() {
        let Ok((_, report)) =
            store.repair(&findings).inspect_err(|e| println!("repair failed: {e} {findings:?}"))
        else {
            tally.unrepairable += 1;
            return;
        };
        reported = report;
        drop(store);
        store = Database::open(&location).expect("the repaired file opens");
        let remaining = store.check_integrity(&mut |_, _| {}).expect("the check runs");
        if !remaining.is_empty() {
            println!("remaining: {remaining:?}\n  found: {findings:?}\n  repaired: {reported:?}");
            tally.unrepairable += 1;
            return;
        }
    }
    let mut is_named =
        |n: usize| store.list_conversations().is_ok_and(|all| all.iter().any(|s| s.name == CONVERSATIONS[n]));
    let names = [0, 1]
        .map(|n| if is_named(n) { CONVERSATIONS[n].to_owned() } else { format!("recovered {}", n + 1) });
    let states = names.map(|n| store.load(&n, Access::Read).expect("the conversation loads").state_hash());
    let unchanged = states.iter().zip(hashes).all(|(a, b)| a == b);
    match (findings.is_empty(), unchanged) {
        (true, true) => tally.unharmed += 1,
        (false, true) => tally.fully_repaired += 1,
        (false, false) => {
            let has_losses = reported.iter().any(|line| line.contains("recovered: "));
            let lost_one = store.list_conversations().is_ok_and(|c| c.len() < 2);
            assert!(has_losses || lost_one, "{findings:?} {reported:?}");
            tally.partly_recovered += 1;
        }
        (true, false) => panic!("the damage was not noticed"),
    }
}

fn next_random(n: &mut u64) -> usize {
    *n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*n >> 33) as usize
}

#[test]
fn repair_recovers_from_flipped_bits() {
    let (database, hashes) = two_conversations();
    let good = fs::read(database_path(&database)).expect("the file is read");
    let (mut tally, mut state) = (RepairTally::default(), 1);
    for _ in 0..200 {
        let mut bytes = good.clone();
        for _ in 0..=next_random(&mut state) % 3 {
            let at = next_random(&mut state) % bytes.len();
            bytes[at] ^= 1 << (next_random(&mut state) % 8);
        }
        repair_and_count(&bytes, &hashes, &mut tally);
    }
    assert!(tally.fully_repaired > 20 && tally.unharmed > 20, "{tally:?}");
    assert!(tally.fully_repaired + tally.unharmed >= 185 && tally.unrepairable == 0, "{tally:?}");
}

#[test]
fn repair_rebuilds_damaged_first_page() {
    let (database, hashes) = two_conversations();
    let good = fs::read(database_path(&database)).expect("the file is read");
    for noise in [0x00, 0xff, b'x'] {
        let mut tally = RepairTally::default();
        let mut bytes = good.clone();
        bytes[..4096].fill(noise);
        repair_and_count(&bytes, &hashes, &mut tally);
        assert_eq!((tally.fully_repaired + tally.unharmed, tally.unrepairable), (1, 0), "{noise}: {tally:?}");
    }
}

#[test]
fn repair_recovers_truncated_file() {
    let (database, hashes) = two_conversations();
    let good = fs::read(database_path(&database)).expect("the file is read");
    let (mut tally, mut state) = (RepairTally::default(), 9);
    for _ in 0..60 {
        let len = next_random(&mut state) % good.len();
        repair_and_count(&good[..len], &hashes, &mut tally);
    }
    assert!(tally.partly_recovered + tally.fully_repaired >= 50 && tally.unrepairable <= 5, "{tally:?}");
}

#[test]
fn open_and_repair_leave_unknown_files_untouched() {
    let others = tempfile::tempdir().expect("a temporary folder");
    for (n, bytes) in
        [vec![0; 9000], b"[{\"role\":\"user\"}]".repeat(900), vec![7; 20_000]].iter().enumerate()
    {
        let file = others.path().join(format!("{n}.json"));
        fs::write(&file, bytes).expect("the file is written");
        let refused =
            Database::rebuild_first_page(&file).expect_err("the file has no conversation").to_string();
        assert!(
            refused.contains("no conversation of Halo can be read in it; the file was not changed"),
            "{refused}"
        );
        assert_eq!(fs::read(&file).expect("the file is read"), *bytes);
    }
    assert_eq!(fs::read_dir(others.path()).expect("the folder exists").count(), 3, "nothing is left behind");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("halo.db");
    let location = StoreLocation::Sqlite(file.clone());
    let refusal = || Database::open(&location).map(drop).expect_err("the file is not a store").to_string();
    rusqlite::Connection::open(&file)
        .expect("the file is created")
        .execute_batch("CREATE TABLE cats (name)")
        .expect("the statement runs");
    let before = fs::read(&file).expect("the file is read");
    assert!(
        refusal().ends_with("is a database of another program; the file was not changed"),
        "{}",
        refusal()
    );
    assert_eq!(fs::read(&file).expect("the file is read"), before);
    fs::write(&file, "Dear diary, today nothing happened. ".repeat(300)).expect("the file is written");
    assert!(refusal().contains("is not a database, or its first page is damaged"), "{}", refusal());
}

/// A file that the user has vacuumed or indexed is not damaged.
#[test]
fn doctor_accepts_vacuumed_file() {
    let (database, hashes) = two_conversations();
    let db = rusqlite::Connection::open(database_path(&database)).expect("the file opens");
    db.execute_batch("VACUUM; ANALYZE; CREATE INDEX mine ON log (at)").expect("the statement runs");
    drop(db);
    let mut store = database.open();
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
    assert_eq!(
        store.load(CONVERSATIONS[0], Access::Read).expect("the conversation loads").state_hash(),
        hashes[0]
    );
}

/// Records are copied to the new file, a damaged record does not affect the others, and only the owner may read the
/// file.
#[test]
fn repair_keeps_records_and_embeddings() {
    let (database, _) = two_conversations();
    let mut store = database.open();
    for n in 0..3 {
        store
            .put_record(CONVERSATIONS[0], RecordKind::Note, &n.to_string(), Some("said"))
            .expect("the record is stored");
    }
    let vector = halo_core::store::Embedding {
        chunk: "u0.0".parse().expect("a chunk id"),
        text_hash: 7,
        vector: vec![1.0],
    };
    store.put_embeddings(CONVERSATIONS[0], "e", &[vector]).expect("the embeddings are stored");
    drop(store);
    let file = database_path(&database);
    let db = rusqlite::Connection::open(&file).expect("the file opens");
    db.execute_batch(
        "UPDATE record SET sum = sum + 1 WHERE key = '1'; UPDATE conversation SET created = 'x' WHERE id = 2",
    )
    .expect("the statement runs");
    drop(db);
    let mut store = database.open();
    let findings = store.check_integrity(&mut |_, _| {}).expect("the check runs");
    store.repair(&findings).expect("the repair runs");
    drop(store);
    let mut store = database.open();
    assert_eq!(store.records(CONVERSATIONS[0], RecordKind::Note).expect("the records are read").len(), 3);
    assert_eq!(store.embeddings(CONVERSATIONS[0], "e").expect("the embeddings are read").len(), 1);
    assert_eq!(store.list_conversations().expect("the conversations are listed").len(), 2);
    drop(store);
    let mut bytes = fs::read(&file).expect("the file is read");
    bytes[..100].fill(1);
    fs::write(&file, &bytes).expect("the file is written");
    Database::rebuild_first_page(&file).expect("the first page is rebuilt");
    #[cfg(unix)]
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&file).expect("the file exists").permissions())
            & 0o777,
        0o600
    );
    assert_eq!(
        database.open().records(CONVERSATIONS[0], RecordKind::Note).expect("the records are read").len(),
        3
    );
}

/// Several programs may create the same store at once.
#[test]
fn open_creates_store_once_when_concurrent() {
    for _ in 0..20 {
        let database = crate::common::sqlite();
        let location = &database.location;
        std::thread::scope(|threads| {
            let open =
                || threads.spawn(move || Database::open(location).map(drop).map_err(|e| e.to_string()));
            let handles: Vec<_> = (0..4).map(|_| open()).collect();
            handles
                .into_iter()
                .for_each(|thread| assert_eq!(thread.join().expect("the thread does not panic"), Ok(())));
        });
    }
}

#[test]
fn open_rejects_newer_sqlite_schema() {
    let (database, _) = two_conversations();
    let file = database_path(&database);
    let db = rusqlite::Connection::open(&file).expect("the file opens");
    db.execute_batch("PRAGMA user_version = 6; CREATE TABLE tomorrow (x)").expect("the statement runs");
    drop(db);
    let before = fs::read(&file).expect("the file is read");
    for opened in [Database::open(&database.location), Database::open_read_only(&database.location)] {
        let refused = opened.map(drop).expect_err("the schema is too new").to_string();
        assert!(
            refused.contains("was written by a newer Halo (schema version 6, this program supports 5)"),
            "{refused}"
        );
        assert!(refused.contains("the file was not changed: use the newer Halo"), "{refused}");
    }
    assert_eq!(fs::read(&file).expect("the file is read"), before);
}

#[test]
fn open_rejects_newer_postgres_schema() {
    let database = crate::common::postgres();
    drop(database.open());
    let url = &database.url;
    crate::common::postgres_server::execute_sql(url, "UPDATE halo.version SET version = 7")
        .expect("the statement runs");
    let refused =
        Database::open(&database.location).map(drop).expect_err("the schema is too new").to_string();
    assert!(
        refused.contains("written by a newer Halo (schema version 7, this program supports 5)"),
        "{refused}"
    );
}

/// A connection that is lost between two transactions is replaced, and the lease with it is kept. If another program has taken
/// it over meanwhile, the commit fails.
#[test]
fn postgres_reconnects_after_connection_loss() {
    let database = crate::common::postgres();
    let url = &database.url;
    let disconnect = || {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
        crate::common::postgres_server::execute_sql(url, sql).expect("the statement runs");
    };
    let mut store = database.open();
    let history = random_history(4, 30);
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    for change in &history.changes {
        disconnect();
        store
            .transact("c", &mut timeline, change, Durability::Immediate)
            .expect("the change is committed on a new connection");
    }
    disconnect();
    assert_eq!(
        store.list_conversations().expect("the conversations are listed")[0].changes,
        history.changes.len() as u64
    );
    assert_eq!(store.replay_log("c").expect("the log is complete").state_hash(), timeline.state_hash());
    // Another program takes the conversation while the connection is lost.
    disconnect();
    let mut other = database.open_elsewhere();
    assert!(other.load("c", Access::Write).is_err(), "a lease does not end with a connection");
    database.end_lease("c");
    other.load("c", Access::Write).expect("the lease has ended");
    let nothing = halo_core::change::Change::Batch(vec![]);
    for attempt in 0..2 {
        let refused = store.transact("c", &mut timeline, &nothing, Durability::Immediate);
        assert!(refused.expect_err("the other store has the lease").is_lease_lost(), "attempt {attempt}");
    }
}

/// The first command on an older database may be one that only reads.
#[test]
fn migration_runs_when_an_older_file_is_opened_for_reading() {
    let versions = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/versions");
    for file in ["1.db", "2.db", "3.db", "4.db", "5.db"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let copy = folder.path().join("halo.db");
        fs::copy(versions.join(file), &copy).unwrap_or_else(|e| panic!("{file}: {e}"));
        let mut store = Database::open_read_only(&StoreLocation::Sqlite(copy)).expect("the database opens");
        let timeline = store.load("main", Access::Read).expect("the conversation exists");
        let hash =
            fs::read_to_string(versions.join(format!("{file}.hash"))).expect("the file of the hash is read");
        assert_eq!(timeline.state_hash().to_string(), hash.trim(), "{file}");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let empty = folder.path().join("empty.db");
    fs::write(&empty, "").expect("an empty file is written");
    assert!(Database::open_read_only(&StoreLocation::Sqlite(empty.clone())).is_err());
    assert_eq!(fs::read(&empty).expect("the file is read"), b"", "a reader creates no database");
}

/// There is one small file for each version of the schema. Each of them must open, also in later versions.
#[test]
fn migration_opens_files_of_every_version() {
    let versions = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/versions");
    // The last number is the hash of the embedded text: 0 before version 2, which added the column.
    let gun = "the gun on the wall";
    let expected = [("1.db", gun, 0), ("2.db", gun, 7), ("3.db", gun, 7), ("4.db", gun, 7), ("5.db", gun, 7)];
    for (file, text, text_hash) in expected {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let copy = folder.path().join("halo.db");
        fs::copy(versions.join(file), &copy).unwrap_or_else(|e| panic!("{file}: {e}"));
        let mut store = Database::open(&StoreLocation::Sqlite(copy)).expect("the database opens");
        let mut timeline = store.load("main", Access::Write).expect("the conversation exists");
        assert!(
            timeline.context_window(0).text().contains(text),
            "{file}: {}",
            timeline.context_window(0).text()
        );
        let hash =
            fs::read_to_string(versions.join(format!("{file}.hash"))).expect("the file of the hash is read");
        assert_eq!(timeline.state_hash().to_string(), hash.trim(), "{file}");
        assert_eq!(
            store.replay_log("main").expect("the log is complete").state_hash(),
            timeline.state_hash()
        );
        let turns: Vec<u32> =
            store.turn_times("main").expect("the times are read").iter().map(|(turn, _)| turn.0).collect();
        assert_eq!(turns, [0, 1, 2, 3], "{file}");
        let pruned: Vec<_> = timeline.chunks().filter(|c| !c.is_live()).map(|c| c.id()).collect();
        assert!(!pruned.is_empty());
        store.load_bodies("main", &mut timeline, &pruned).expect("the bodies of pruned chunks are stored");
        assert!(!store.chunk_history("main", pruned[0]).expect("the history is read").is_empty());
        let embeddings = store.embeddings("main", "kept").expect("the embeddings are read");
        assert_eq!(embeddings.iter().map(|e| e.text_hash).collect::<Vec<_>>(), [text_hash]);
        assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
        // The conversation can be continued.
        let change =
            halo_core::manual_edit::resurrect(&timeline, pruned[0], halo_core::token::Brightness(10_000.0));
        store
            .transact(
                "main",
                &mut timeline,
                &change.expect("the chunk can be resurrected"),
                Durability::Immediate,
            )
            .expect("the change is committed");
    }
}

/// A file of an older version whose log is damaged cannot be migrated. It is still repaired, from the chunks.
#[test]
fn repair_recovers_old_version_with_damaged_log() {
    let versions = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/versions");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("halo.db");
    let mut bytes = fs::read(versions.join("3.db")).expect("the file is read");
    let log_root = 8;
    bytes[(log_root - 1) * 4096..log_root * 4096].fill(0x55);
    fs::write(&file, &bytes).expect("the file is written");
    let location = StoreLocation::Sqlite(file.clone());
    let error = Database::open(&location).map(drop).expect_err("the log cannot be read");
    assert_eq!(error.kind, ErrorKind::Damaged, "{error}");
    Database::rebuild_first_page(&file).expect("the file is rebuilt");
    let mut store = Database::open(&location).expect("the database opens");
    let findings = store.check_integrity(&mut |_, _| {}).expect("the check runs");
    store.repair(&findings).expect("the repair runs");
    drop(store);
    let mut store = Database::open(&location).expect("the database opens");
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
    let timeline = store.load("main", Access::Read).expect("the conversation loads");
    let hash = fs::read_to_string(versions.join("3.db.hash")).expect("the file of the hash is read");
    assert_eq!(timeline.state_hash().to_string(), hash.trim());
}

/// Root may write anywhere, so a file in the place of a folder causes the error.
#[test]
fn open_reports_unwritable_location() {
    let (database, hashes) = two_conversations();
    let file = database_path(&database);
    let refused = Database::open(&StoreLocation::Sqlite(file.join("halo.db")))
        .map(drop)
        .expect_err("the folder does not exist")
        .to_string();
    assert!(refused.contains("Not a directory"), "{refused}");
    let missing = file.with_file_name("nowhere").join("halo.db");
    let refused = Database::open(&StoreLocation::Sqlite(missing))
        .map(drop)
        .expect_err("the folder does not exist")
        .to_string();
    assert!(refused.contains("No such file or directory"), "{refused}");
    let mut permissions = fs::metadata(&file).expect("the file exists").permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&file, permissions).expect("the permissions are changed");
    let mut store = Database::open_read_only(&database.location).expect("reading is allowed");
    assert_eq!(
        store.load(CONVERSATIONS[0], Access::Read).expect("the conversation loads").state_hash(),
        hashes[0]
    );
}

#[test]
fn repair_recovers_nameless_world() {
    let (database, hashes) = two_conversations();
    let message = RowKind::from_static("said");
    let row = |kind, key: &str, value: &str| Row { kind, key: key.into(), value: value.into() };
    let rows = [
        row(RowKind::from_static("world"), "0", "{}"),
        row(message.clone(), "000100000001", r#"{"content":"hello"}"#),
    ];
    database.open().put_rows("harbour", &rows, &[]).expect("the rows are stored");
    let db = rusqlite::Connection::open(database_path(&database)).expect("the file opens");
    db.execute_batch("DELETE FROM conversation WHERE name = 'world:harbour'").expect("the statement runs");
    drop(db);
    let mut store = database.open();
    let findings = store.check_integrity(&mut |_, _| {}).expect("the check runs");
    assert!(findings.iter().any(|finding| finding.problem.contains("without a name")), "{findings:?}");
    store.repair(&findings).expect("the repair runs");
    let mut store = database.open();
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
    let worlds: Vec<String> =
        store.list_namespaces().expect("the worlds are listed").into_iter().map(|world| world.name).collect();
    assert_eq!(worlds, ["recovered 3"]);
    let rows = store.load_rows("recovered 3", &message, "0".."9", 10).expect("the rows are read");
    assert_eq!(rows.iter().map(|row| row.value.as_str()).collect::<Vec<_>>(), [r#"{"content":"hello"}"#]);
    let states = CONVERSATIONS
        .map(|name| store.load(name, Access::Read).expect("the conversation loads").state_hash());
    assert_eq!(states.as_slice(), hashes, "nothing else has changed");
}

/// Bytes of a write-ahead log are flipped at random. SQLite reads the log up to the damage and says nothing; whenever commits
/// are missing that way, the check says so, and it never says so of a whole log.
#[test]
fn doctor_finds_damage_in_the_write_ahead_log() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("halo.db");
    let mut store = Database::open(&StoreLocation::Sqlite(path.clone())).expect("the store opens");
    let history = random_history(9, 60);
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    for change in &history.changes {
        store.transact("c", &mut timeline, change, Durability::Deferred).expect("the change is committed");
    }
    // The log is not checkpointed while the store is open.
    let (file, wal) = (
        fs::read(&path).expect("the file is read"),
        fs::read(path.with_file_name("halo.db-wal")).expect("the log is read"),
    );
    let commits = history.changes.len() as u64;
    let frame_bytes = 24 + 4096;
    let mut rng = fastrand::Rng::with_seed(11);
    let (mut found, mut cases) = (0, 0);
    for n in 0..60 {
        let copy = tempfile::tempdir().expect("a temporary folder");
        let path = copy.path().join("halo.db");
        let mut damaged = wal.clone();
        let at = match n {
            0 => None,
            1..10 => Some(rng.usize(..32)),
            _ => Some(rng.usize(..damaged.len())),
        };
        if let Some(at) = at {
            damaged[at] ^= 1 << rng.u8(..8);
        }
        fs::write(&path, &file).expect("the file is written");
        fs::write(copy.path().join("halo.db-wal"), &damaged).expect("the log is written");
        let damage = find_wal_damage(&path).expect("the log is checked");
        let kept = keep_wal(&path).expect("the log is kept");
        assert_eq!(fs::read(kept).expect("the copy is read"), damaged);
        let mut store = match Database::open(&StoreLocation::Sqlite(path)) {
            Ok(store) => store,
            // Without the log, the file has no tables yet, or not all.
            Err(_) => {
                assert!(damage.is_some(), "byte {at:?}");
                continue;
            }
        };
        let read =
            store.find_conversation("c").expect("the store is read").map_or(0, |summary| summary.changes);
        let in_last_frame = at.is_some_and(|at| at + frame_bytes >= wal.len());
        assert_eq!(
            damage.is_some(),
            read < commits && !in_last_frame,
            "byte {at:?}: {read} of {commits}, {damage:?}"
        );
        found += usize::from(damage.is_some());
        cases += 1;
    }
    assert!(found > cases / 2, "{found} of {cases}");
    // A log that a power cut has torn is whole up to its end.
    for cut in [wal.len() - 1, wal.len() - frame_bytes + 30, wal.len() - 3 * frame_bytes] {
        let copy = tempfile::tempdir().expect("a temporary folder");
        fs::write(copy.path().join("halo.db-wal"), &wal[..cut]).expect("the log is written");
        assert_eq!(find_wal_damage(&copy.path().join("halo.db")), Ok(None), "cut at {cut}");
    }
}
