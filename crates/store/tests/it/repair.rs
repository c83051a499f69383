//! Files that are not what was written: cut short, with bits flipped, of a newer program, of no program of ours,
//! in a folder that cannot be written. Each gets a clear word, and nothing that can be saved is lost.

use crate::common::TestDatabase;
use halo_core::row_store::{Row, RowKind, RowStore};
use halo_core::store::{Access, Durability, RecordKind, Store};
use halo_core::testing::timeline_fuzz::{FuzzOp, TimelineFuzz};
use halo_core::timeline::StateHash;
use halo_store::database::{Database, StoreLocation};
use std::fs;
use std::path::{Path, PathBuf};

const CONVERSATIONS: [&str; 2] = ["first", "second"];

fn random_history(seed: u32, len: u32) -> TimelineFuzz {
    let op = |i: u32| {
        (i.wrapping_mul(0x9E37_79B9) ^ seed.wrapping_mul(0x85EB_CA6B)).rotate_left(i % 31).to_le_bytes()
    };
    TimelineFuzz::run(&(0..len).map(op).collect::<Vec<FuzzOp>>())
}

fn database_path(place: &TestDatabase) -> PathBuf {
    match &place.location {
        StoreLocation::Sqlite(path) => path.clone(),
        StoreLocation::Postgres(_) => unreachable!("these are about files"),
    }
}

/// A store of two conversations, closed, all in one file; and their states.
fn two_conversations() -> (TestDatabase, Vec<StateHash>) {
    let place = crate::common::sqlite();
    let mut store = place.open();
    let hashes = CONVERSATIONS.iter().zip([3, 5]).map(|(name, seed)| {
        let mut timeline = store.load(name, Access::Write).expect("new");
        for change in &random_history(seed, 70).changes {
            store.transact(name, &mut timeline, change, Durability::Deferred).expect("it is written");
        }
        timeline.state_hash()
    });
    let hashes = hashes.collect();
    drop(store);
    (place, hashes)
}

/// What came of a damaged file.
#[derive(Debug, Default)]
struct RepairTally {
    unharmed: usize,
    fully_repaired: usize,
    partly_recovered: usize,
    unrepairable: usize,
}

/// Opens, examines and mends a copy of the file that was harmed, and counts what came of it.
fn repair_and_count(harmed: &[u8], hashes: &[StateHash], tally: &mut RepairTally) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("halo.db");
    fs::write(&file, harmed).expect("written");
    let location = StoreLocation::Sqlite(file.clone());
    if let Err(error) = Database::open(&location) {
        assert!(error.to_string().contains("damaged") || error.to_string().contains("not a"), "{error}");
        if Database::rebuild_first_page(&file).is_err() {
            assert_eq!(
                fs::read(&file).expect("still there"),
                harmed,
                "what cannot be mended is left as it was"
            );
            tally.unrepairable += 1;
            return;
        }
    }
    let mut store = Database::open(&location).expect("it opens now");
    let Ok(findings) = store.check_integrity(&mut |_, _| {}) else {
        tally.unrepairable += 1;
        return;
    };
    let mut said = Vec::new();
    if !findings.is_empty() {
        let Ok((_, done)) = store.repair(&findings).inspect_err(|e| println!("MEND {e} {findings:?}")) else {
            tally.unrepairable += 1;
            return;
        };
        said = done;
        drop(store);
        store = Database::open(&location).expect("it opens again");
        let left = store.check_integrity(&mut |_, _| {}).expect("it can be examined");
        if !left.is_empty() {
            println!("LEFT {left:?}\n   FOUND {findings:?}\n  SAID {said:?}");
            tally.unrepairable += 1;
            return;
        }
    }
    let mut named =
        |n: usize| store.list_conversations().is_ok_and(|all| all.iter().any(|s| s.name == CONVERSATIONS[n]));
    let named =
        [0, 1].map(|n| if named(n) { CONVERSATIONS[n].to_owned() } else { format!("recovered {}", n + 1) });
    let states = named.map(|n| store.load(&n, Access::Read).expect("it opens").state_hash());
    let whole = states.iter().zip(hashes).all(|(a, b)| a == b);
    match (findings.is_empty(), whole) {
        (true, true) => tally.unharmed += 1,
        (false, true) => tally.fully_repaired += 1,
        (false, false) => {
            let told = said.iter().any(|s| s.contains("put together again"));
            assert!(told || store.list_conversations().is_ok_and(|c| c.len() < 2), "{findings:?} {said:?}");
            tally.partly_recovered += 1;
        }
        (true, false) => panic!("the harm was not seen"),
    }
}

fn next_random(n: &mut u64) -> usize {
    *n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*n >> 33) as usize
}

#[test]
fn repair_recovers_from_flipped_bits() {
    let (place, hashes) = two_conversations();
    let good = fs::read(database_path(&place)).expect("there");
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
    let (place, hashes) = two_conversations();
    let good = fs::read(database_path(&place)).expect("there");
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
    let (place, hashes) = two_conversations();
    let good = fs::read(database_path(&place)).expect("there");
    let (mut tally, mut state) = (RepairTally::default(), 9);
    for _ in 0..60 {
        let len = next_random(&mut state) % good.len();
        repair_and_count(&good[..len], &hashes, &mut tally);
    }
    // Whatever it was, it was said; and what could be read is there.
    assert!(tally.partly_recovered + tally.fully_repaired >= 50 && tally.unrepairable <= 5, "{tally:?}");
}

#[test]
fn open_and_repair_leave_unknown_files_untouched() {
    let strange = tempfile::tempdir().expect("a folder");
    for (n, bytes) in
        [vec![0; 9000], b"[{\"role\":\"user\"}]".repeat(900), vec![7; 20_000]].iter().enumerate()
    {
        let file = strange.path().join(format!("{n}.json"));
        fs::write(&file, bytes).expect("written");
        let refused = Database::rebuild_first_page(&file).expect_err("it is not ours").to_string();
        assert!(refused.contains("nothing of Halo's can be read in it; it was left as it was"), "{refused}");
        assert_eq!(fs::read(&file).expect("there"), *bytes);
    }
    assert_eq!(fs::read_dir(strange.path()).expect("there").count(), 3, "nothing is left behind");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("halo.db");
    let location = StoreLocation::Sqlite(file.clone());
    let refusal = || Database::open(&location).map(drop).expect_err("it is not ours").to_string();
    rusqlite::Connection::open(&file)
        .expect("made")
        .execute_batch("CREATE TABLE cats (name)")
        .expect("it runs");
    let before = fs::read(&file).expect("there");
    assert!(
        refusal().ends_with("is a database, but not one of Halo's; it was left untouched"),
        "{}",
        refusal()
    );
    assert_eq!(fs::read(&file).expect("there"), before);
    fs::write(&file, "Dear diary, today nothing happened. ".repeat(300)).expect("written");
    assert!(refusal().contains("is not a database, or its first page is damaged"), "{}", refusal());
}

/// What users do to their own file is no damage.
#[test]
fn doctor_accepts_vacuumed_file() {
    let (place, hashes) = two_conversations();
    let db = rusqlite::Connection::open(database_path(&place)).expect("it opens");
    db.execute_batch("VACUUM; ANALYZE; CREATE INDEX mine ON log (at)").expect("it runs");
    drop(db);
    let mut store = place.open();
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("it can be examined"), []);
    assert_eq!(store.load(CONVERSATIONS[0], Access::Read).expect("it opens").state_hash(), hashes[0]);
}

/// Records come along to the new file, and a damaged one costs no other; the file stays its owner's alone.
#[test]
fn repair_keeps_records_and_embeddings() {
    let (place, _) = two_conversations();
    let mut store = place.open();
    for n in 0..3 {
        store.put_record(CONVERSATIONS[0], RecordKind::Note, &n.to_string(), Some("said")).expect("kept");
    }
    let vector = halo_core::store::Embedding {
        chunk: "u0.0".parse().expect("a name"),
        text_hash: 7,
        vector: vec![1.0],
    };
    store.put_embeddings(CONVERSATIONS[0], "e", &[vector]).expect("kept");
    drop(store);
    let file = database_path(&place);
    let db = rusqlite::Connection::open(&file).expect("it opens");
    db.execute_batch(
        "UPDATE record SET sum = sum + 1 WHERE key = '1'; UPDATE conversation SET created = 'x' WHERE id = 2",
    )
    .expect("it runs");
    drop(db);
    let mut store = place.open();
    let findings = store.check_integrity(&mut |_, _| {}).expect("it can be examined");
    store.repair(&findings).expect("it can be mended");
    drop(store);
    let mut store = place.open();
    assert_eq!(store.records(CONVERSATIONS[0], RecordKind::Note).expect("there").len(), 3);
    assert_eq!(store.embeddings(CONVERSATIONS[0], "e").expect("there").len(), 1);
    assert_eq!(store.list_conversations().expect("listed").len(), 2);
    drop(store);
    let mut bytes = fs::read(&file).expect("there");
    bytes[..100].fill(1);
    fs::write(&file, &bytes).expect("written");
    Database::rebuild_first_page(&file).expect("it can be revived");
    #[cfg(unix)]
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&file).expect("there").permissions()) & 0o777,
        0o600
    );
    assert_eq!(place.open().records(CONVERSATIONS[0], RecordKind::Note).expect("there").len(), 3);
}

/// Many programs may start at once on a store that is not there yet.
#[test]
fn open_creates_store_once_when_concurrent() {
    for _ in 0..20 {
        let place = crate::common::sqlite();
        let location = &place.location;
        std::thread::scope(|threads| {
            let open =
                || threads.spawn(move || Database::open(location).map(drop).map_err(|e| e.to_string()));
            let all: Vec<_> = (0..4).map(|_| open()).collect();
            all.into_iter().for_each(|one| assert_eq!(one.join().expect("it ends"), Ok(())));
        });
    }
}

#[test]
fn open_rejects_newer_sqlite_schema() {
    let (place, _) = two_conversations();
    let file = database_path(&place);
    let db = rusqlite::Connection::open(&file).expect("it opens");
    db.execute_batch("PRAGMA user_version = 4; CREATE TABLE tomorrow (x)").expect("it runs");
    drop(db);
    let before = fs::read(&file).expect("there");
    for opened in [Database::open(&place.location), Database::open_read_only(&place.location)] {
        let refused = opened.map(drop).expect_err("too new").to_string();
        assert!(
            refused.contains("was written by a newer Halo (its schema is 4, this program knows 3)"),
            "{refused}"
        );
        assert!(refused.contains("left untouched: use that Halo"), "{refused}");
    }
    assert_eq!(fs::read(&file).expect("there"), before);
}

#[test]
fn open_rejects_newer_postgres_schema() {
    let place = crate::common::postgres();
    drop(place.open());
    let StoreLocation::Postgres(url) = &place.location else { unreachable!() };
    crate::common::execute_sql(url, "UPDATE halo.version SET version = 7").expect("it runs");
    let refused = Database::open(&place.location).map(drop).expect_err("too new").to_string();
    assert!(refused.contains("written by a newer Halo (its schema is 7, this program knows 3)"), "{refused}");
}

/// The server goes and comes back: between two changes nobody notices, within one it is told and nothing is half done.
#[test]
fn postgres_reconnects_after_connection_loss() {
    let place = crate::common::postgres();
    let StoreLocation::Postgres(url) = &place.location else { unreachable!() };
    let hang_up = || {
        let all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
        crate::common::execute_sql(url, all).expect("it runs");
    };
    let mut store = place.open();
    let world = random_history(4, 30);
    let mut timeline = store.load("c", Access::Write).expect("new");
    for change in &world.changes {
        hang_up();
        store
            .transact("c", &mut timeline, change, Durability::Immediate)
            .expect("it is written all the same");
    }
    hang_up();
    assert_eq!(store.list_conversations().expect("listed")[0].changes, world.changes.len() as u64);
    assert_eq!(store.replay_log("c").expect("its log is whole").state_hash(), timeline.state_hash());
    // Meanwhile somebody else took the conversation: then it is theirs.
    hang_up();
    let mut other = place.open();
    other.load("c", Access::Write).expect("it is free");
    let refused =
        store.transact("c", &mut timeline, &halo_core::change::Change::Batch(vec![]), Durability::Immediate);
    assert!(refused.expect_err("it is theirs").to_string().contains("another Halo is using it"));
    let again =
        store.transact("c", &mut timeline, &halo_core::change::Change::Batch(vec![]), Durability::Immediate);
    assert!(again.is_err(), "it is still theirs");
}

/// One small file for each version of the schema; they must open for ever.
#[test]
fn migration_opens_files_of_every_version() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/versions");
    // What the vector says it was made of: nothing, before it could say so.
    let gun = "the gun on the wall";
    let expected = [("1.db", gun, 0), ("2.db", gun, 7), ("3.db", gun, 7)];
    for (file, text, of) in expected {
        let folder = tempfile::tempdir().expect("a folder");
        let copy = folder.path().join("halo.db");
        fs::copy(kept.join(file), &copy).unwrap_or_else(|e| panic!("{file}: {e}"));
        let mut store = Database::open(&StoreLocation::Sqlite(copy)).expect("it opens");
        let mut timeline = store.load("main", Access::Write).expect("it is there");
        assert!(
            timeline.context_window(0).text().contains(text),
            "{file}: {}",
            timeline.context_window(0).text()
        );
        let hash = fs::read_to_string(kept.join(format!("{file}.hash"))).expect("beside it");
        assert_eq!(timeline.state_hash().to_string(), hash.trim(), "{file}");
        assert_eq!(store.replay_log("main").expect("its log is whole").state_hash(), timeline.state_hash());
        let dead: Vec<_> = timeline.chunks().filter(|c| !c.is_live()).map(|c| c.id()).collect();
        assert!(!dead.is_empty());
        store.load_bodies("main", &mut timeline, &dead).expect("what is dead is there too");
        assert!(!store.chunk_history("main", dead[0]).expect("it is told").is_empty());
        let embeddings = store.embeddings("main", "kept").expect("there");
        assert_eq!(embeddings.iter().map(|e| e.text_hash).collect::<Vec<_>>(), [of]);
        assert_eq!(store.check_integrity(&mut |_, _| {}).expect("it can be examined"), []);
        // And it goes on.
        let change =
            halo_core::manual_edit::resurrect(&timeline, dead[0], halo_core::token::Brightness(10_000.0));
        store
            .transact("main", &mut timeline, &change.expect("it can return"), Durability::Immediate)
            .expect("it is written");
    }
}

/// Root may write anywhere, so this is shown where one is somebody else, and with a file where a folder should be.
#[test]
fn open_reports_unwritable_location() {
    let (place, hashes) = two_conversations();
    let file = database_path(&place);
    let refused = Database::open(&StoreLocation::Sqlite(file.join("halo.db")))
        .map(drop)
        .expect_err("no folder")
        .to_string();
    assert!(refused.contains("Not a directory"), "{refused}");
    let missing = file.with_file_name("nowhere").join("halo.db");
    let refused =
        Database::open(&StoreLocation::Sqlite(missing)).map(drop).expect_err("no folder").to_string();
    assert!(refused.contains("No such file or directory"), "{refused}");
    let mut permissions = fs::metadata(&file).expect("there").permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&file, permissions).expect("changed");
    let mut store = Database::open_read_only(&place.location).expect("looking is allowed");
    assert_eq!(store.load(CONVERSATIONS[0], Access::Read).expect("it opens").state_hash(), hashes[0]);
}

#[test]
fn repair_recovers_nameless_world() {
    let (place, hashes) = two_conversations();
    let message = RowKind::from_static("said");
    let row = |kind, key: &str, value: &str| Row { kind, key: key.into(), value: value.into() };
    let rows = [
        row(RowKind::from_static("world"), "0", "{}"),
        row(message.clone(), "000100000001", r#"{"content":"hello"}"#),
    ];
    place.open().put_rows("harbour", &rows, &[]).expect("written");
    let db = rusqlite::Connection::open(database_path(&place)).expect("it opens");
    db.execute_batch("DELETE FROM conversation WHERE name = 'world:harbour'").expect("it runs");
    drop(db);
    let mut store = place.open();
    let findings = store.check_integrity(&mut |_, _| {}).expect("it can be examined");
    assert!(findings.iter().any(|found| found.problem.contains("lost their name")), "{findings:?}");
    store.repair(&findings).expect("it is mended");
    let mut store = place.open();
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("it can be examined"), []);
    let worlds: Vec<String> =
        store.list_namespaces().expect("listed").into_iter().map(|world| world.name).collect();
    assert_eq!(worlds, ["recovered 3"]);
    let rows = store.load_rows("recovered 3", &message, "0".."9", 10).expect("rows");
    assert_eq!(rows.iter().map(|row| row.value.as_str()).collect::<Vec<_>>(), [r#"{"content":"hello"}"#]);
    let states = CONVERSATIONS.map(|name| store.load(name, Access::Read).expect("it opens").state_hash());
    assert_eq!(states.as_slice(), hashes, "and nothing else has changed");
}
