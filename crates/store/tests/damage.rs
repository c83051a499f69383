//! Files that are not what was written: cut short, with bits flipped, of a newer program, of no program of ours,
//! in a folder that cannot be written. Each gets a clear word, and nothing that can be saved is lost.

mod common;

use common::Place;
use halo_core::seams::{Access, Durability, Kind, Store, WorldRow, Worlds};
use halo_core::testing::ops::{Op, World};
use halo_core::timeline::StateHash;
use halo_store::database::{Database, Location};
use std::fs;
use std::path::{Path, PathBuf};

const NAMES: [&str; 2] = ["first", "second"];

fn life(seed: u32, len: u32) -> World {
    let op = |i: u32| {
        (i.wrapping_mul(0x9E37_79B9) ^ seed.wrapping_mul(0x85EB_CA6B)).rotate_left(i % 31).to_le_bytes()
    };
    World::live(&(0..len).map(op).collect::<Vec<Op>>())
}

fn path(place: &Place) -> PathBuf {
    match &place.location {
        Location::Sqlite(path) => path.clone(),
        Location::Postgres(_) => unreachable!("these are about files"),
    }
}

/// A store of two conversations, closed, all in one file; and their states.
fn store() -> (Place, Vec<StateHash>) {
    let place = common::sqlite();
    let mut store = place.open();
    let hashes = NAMES.iter().zip([3, 5]).map(|(name, seed)| {
        let mut timeline = store.load(name, Access::Write).expect("new");
        for change in &life(seed, 70).changes {
            store.transact(name, &mut timeline, change, Durability::Behind).expect("it is written");
        }
        timeline.state_hash()
    });
    let hashes = hashes.collect();
    drop(store);
    (place, hashes)
}

/// What came of a damaged file.
#[derive(Debug, Default)]
struct Tally {
    unharmed: usize,
    whole: usize,
    last_good: usize,
    beyond_help: usize,
}

/// Opens, examines and mends a copy of the file that was harmed, and counts what came of it.
fn mend(harmed: &[u8], hashes: &[StateHash], tally: &mut Tally) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("halo.db");
    fs::write(&file, harmed).expect("written");
    let location = Location::Sqlite(file.clone());
    if let Err(error) = Database::open(&location) {
        assert!(error.to_string().contains("damaged") || error.to_string().contains("not a"), "{error}");
        if Database::revive(&file).is_err() {
            assert_eq!(
                fs::read(&file).expect("still there"),
                harmed,
                "what cannot be mended is left as it was"
            );
            tally.beyond_help += 1;
            return;
        }
    }
    let mut store = Database::open(&location).expect("it opens now");
    let Ok(findings) = store.examine(&mut |_, _| {}) else {
        tally.beyond_help += 1;
        return;
    };
    let mut said = Vec::new();
    if !findings.is_empty() {
        let Ok((_, done)) = store.mend(&findings).inspect_err(|e| println!("MEND {e} {findings:?}")) else {
            tally.beyond_help += 1;
            return;
        };
        said = done;
        drop(store);
        store = Database::open(&location).expect("it opens again");
        let left = store.examine(&mut |_, _| {}).expect("it can be examined");
        if !left.is_empty() {
            println!("LEFT {left:?}\n   FOUND {findings:?}\n  SAID {said:?}");
            tally.beyond_help += 1;
            return;
        }
    }
    let mut named = |n: usize| store.conversations().is_ok_and(|all| all.iter().any(|s| s.name == NAMES[n]));
    let named = [0, 1].map(|n| if named(n) { NAMES[n].to_owned() } else { format!("recovered {}", n + 1) });
    let states = named.map(|n| store.load(&n, Access::Read).expect("it opens").state_hash());
    let whole = states.iter().zip(hashes).all(|(a, b)| a == b);
    match (findings.is_empty(), whole) {
        (true, true) => tally.unharmed += 1,
        (false, true) => tally.whole += 1,
        (false, false) => {
            let told = said.iter().any(|s| s.contains("put together again"));
            assert!(told || store.conversations().is_ok_and(|c| c.len() < 2), "{findings:?} {said:?}");
            tally.last_good += 1;
        }
        (true, false) => panic!("the harm was not seen"),
    }
}

fn dice(n: &mut u64) -> usize {
    *n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*n >> 33) as usize
}

#[test]
fn flipped_bits_are_found_and_mended() {
    let (place, hashes) = store();
    let good = fs::read(path(&place)).expect("there");
    let (mut tally, mut state) = (Tally::default(), 1);
    for _ in 0..200 {
        let mut bytes = good.clone();
        for _ in 0..=dice(&mut state) % 3 {
            let at = dice(&mut state) % bytes.len();
            bytes[at] ^= 1 << (dice(&mut state) % 8);
        }
        mend(&bytes, &hashes, &mut tally);
    }
    assert!(tally.whole > 20 && tally.unharmed > 20, "{tally:?}");
    assert!(tally.whole + tally.unharmed >= 185 && tally.beyond_help == 0, "{tally:?}");
}

#[test]
fn a_first_page_of_noise_is_made_anew() {
    let (place, hashes) = store();
    let good = fs::read(path(&place)).expect("there");
    for noise in [0x00, 0xff, b'x'] {
        let mut tally = Tally::default();
        let mut bytes = good.clone();
        bytes[..4096].fill(noise);
        mend(&bytes, &hashes, &mut tally);
        assert_eq!((tally.whole + tally.unharmed, tally.beyond_help), (1, 0), "{noise}: {tally:?}");
    }
}

#[test]
fn a_file_cut_short_gives_what_is_left() {
    let (place, hashes) = store();
    let good = fs::read(path(&place)).expect("there");
    let (mut tally, mut state) = (Tally::default(), 9);
    for _ in 0..60 {
        let len = dice(&mut state) % good.len();
        mend(&good[..len], &hashes, &mut tally);
    }
    // Whatever it was, it was said; and what could be read is there.
    assert!(tally.last_good + tally.whole >= 50 && tally.beyond_help <= 5, "{tally:?}");
}

#[test]
fn what_is_not_ours_is_left_alone() {
    let strange = tempfile::tempdir().expect("a folder");
    for (n, bytes) in
        [vec![0; 9000], b"[{\"role\":\"user\"}]".repeat(900), vec![7; 20_000]].iter().enumerate()
    {
        let file = strange.path().join(format!("{n}.json"));
        fs::write(&file, bytes).expect("written");
        let refused = Database::revive(&file).expect_err("it is not ours").to_string();
        assert!(refused.contains("nothing of Halo's can be read in it; it was left as it was"), "{refused}");
        assert_eq!(fs::read(&file).expect("there"), *bytes);
    }
    assert_eq!(fs::read_dir(strange.path()).expect("there").count(), 3, "nothing is left behind");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("halo.db");
    let location = Location::Sqlite(file.clone());
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
fn a_file_that_was_vacuumed_is_whole() {
    let (place, hashes) = store();
    let db = rusqlite::Connection::open(path(&place)).expect("it opens");
    db.execute_batch("VACUUM; ANALYZE; CREATE INDEX mine ON log (at)").expect("it runs");
    drop(db);
    let mut store = place.open();
    assert_eq!(store.examine(&mut |_, _| {}).expect("it can be examined"), []);
    assert_eq!(store.load(NAMES[0], Access::Read).expect("it opens").state_hash(), hashes[0]);
}

/// Records come along to the new file, and a damaged one costs no other; the file stays its owner's alone.
#[test]
fn what_lies_beside_is_salvaged_too() {
    let (place, _) = store();
    let mut store = place.open();
    for n in 0..3 {
        store.put_record(NAMES[0], Kind::Note, &n.to_string(), Some("said")).expect("kept");
    }
    let vector =
        halo_core::seams::Embedding { chunk: "u0.0".parse().expect("a name"), of: 7, vector: vec![1.0] };
    store.put_embeddings(NAMES[0], "e", &[vector]).expect("kept");
    drop(store);
    let file = path(&place);
    let db = rusqlite::Connection::open(&file).expect("it opens");
    db.execute_batch(
        "UPDATE record SET sum = sum + 1 WHERE key = '1'; UPDATE conversation SET created = 'x' WHERE id = 2",
    )
    .expect("it runs");
    drop(db);
    let mut store = place.open();
    let findings = store.examine(&mut |_, _| {}).expect("it can be examined");
    store.mend(&findings).expect("it can be mended");
    drop(store);
    let mut store = place.open();
    assert_eq!(store.records(NAMES[0], Kind::Note).expect("there").len(), 3);
    assert_eq!(store.embeddings(NAMES[0], "e").expect("there").len(), 1);
    assert_eq!(store.conversations().expect("listed").len(), 2);
    drop(store);
    let mut bytes = fs::read(&file).expect("there");
    bytes[..100].fill(1);
    fs::write(&file, &bytes).expect("written");
    Database::revive(&file).expect("it can be revived");
    #[cfg(unix)]
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&file).expect("there").permissions()) & 0o777,
        0o600
    );
    assert_eq!(place.open().records(NAMES[0], Kind::Note).expect("there").len(), 3);
}

/// Many programs may start at once on a store that is not there yet.
#[test]
fn a_store_is_made_once() {
    for _ in 0..20 {
        let place = common::sqlite();
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
fn a_newer_file_is_left_untouched() {
    let (place, _) = store();
    let file = path(&place);
    let db = rusqlite::Connection::open(&file).expect("it opens");
    db.execute_batch("PRAGMA user_version = 4; CREATE TABLE tomorrow (x)").expect("it runs");
    drop(db);
    let before = fs::read(&file).expect("there");
    for opened in [Database::open(&place.location), Database::open_to_read(&place.location)] {
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
fn a_newer_database_on_a_server_is_left_untouched() {
    let place = common::postgres();
    drop(place.open());
    let Location::Postgres(url) = &place.location else { unreachable!() };
    common::ask(url, "UPDATE halo.version SET version = 7").expect("it runs");
    let refused = Database::open(&place.location).map(drop).expect_err("too new").to_string();
    assert!(refused.contains("written by a newer Halo (its schema is 7, this program knows 3)"), "{refused}");
}

/// The server goes and comes back: between two changes nobody notices, within one it is told and nothing is half done.
#[test]
fn a_server_that_was_away_is_found_again() {
    let place = common::postgres();
    let Location::Postgres(url) = &place.location else { unreachable!() };
    let hang_up = || {
        let all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
        common::ask(url, all).expect("it runs");
    };
    let mut store = place.open();
    let world = life(4, 30);
    let mut timeline = store.load("c", Access::Write).expect("new");
    for change in &world.changes {
        hang_up();
        store.transact("c", &mut timeline, change, Durability::Now).expect("it is written all the same");
    }
    hang_up();
    assert_eq!(store.conversations().expect("listed")[0].changes, world.changes.len() as u64);
    assert_eq!(store.replay("c").expect("its log is whole").state_hash(), timeline.state_hash());
    // Meanwhile somebody else took the conversation: then it is theirs.
    hang_up();
    let mut other = place.open();
    other.load("c", Access::Write).expect("it is free");
    let refused =
        store.transact("c", &mut timeline, &halo_core::change::Change::Batch(vec![]), Durability::Now);
    assert!(refused.expect_err("it is theirs").to_string().contains("another Halo is using it"));
    let again =
        store.transact("c", &mut timeline, &halo_core::change::Change::Batch(vec![]), Durability::Now);
    assert!(again.is_err(), "it is still theirs");
}

/// One small file for each version of the schema; they must open for ever.
#[test]
fn files_of_every_version_open() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/versions");
    // What the vector says it was made of: nothing, before it could say so.
    let gun = "the gun on the wall";
    let expected = [("1.db", gun, 0), ("2.db", gun, 7), ("3.db", gun, 7)];
    for (file, text, of) in expected {
        let folder = tempfile::tempdir().expect("a folder");
        let copy = folder.path().join("halo.db");
        fs::copy(kept.join(file), &copy).unwrap_or_else(|e| panic!("{file}: {e}"));
        let mut store = Database::open(&Location::Sqlite(copy)).expect("it opens");
        let mut timeline = store.load("main", Access::Write).expect("it is there");
        assert!(timeline.view(0).text().contains(text), "{file}: {}", timeline.view(0).text());
        let hash = fs::read_to_string(kept.join(format!("{file}.hash"))).expect("beside it");
        assert_eq!(timeline.state_hash().to_string(), hash.trim(), "{file}");
        assert_eq!(store.replay("main").expect("its log is whole").state_hash(), timeline.state_hash());
        let dead: Vec<_> = timeline.chunks().filter(|c| !c.is_live()).map(|c| c.id()).collect();
        assert!(!dead.is_empty());
        store.bring("main", &mut timeline, &dead).expect("what is dead is there too");
        assert!(!store.history("main", dead[0]).expect("it is told").is_empty());
        let embeddings = store.embeddings("main", "kept").expect("there");
        assert_eq!(embeddings.iter().map(|e| e.of).collect::<Vec<_>>(), [of]);
        assert_eq!(store.examine(&mut |_, _| {}).expect("it can be examined"), []);
        // And it goes on.
        let change =
            halo_core::signals::resurrect(&timeline, dead[0], halo_core::token::Brightness(10_000.0));
        store
            .transact("main", &mut timeline, &change.expect("it can return"), Durability::Now)
            .expect("it is written");
    }
}

/// Root may write anywhere, so this is shown where one is somebody else, and with a file where a folder should be.
#[test]
fn a_place_that_cannot_be_written_says_so() {
    let (place, hashes) = store();
    let file = path(&place);
    let refused =
        Database::open(&Location::Sqlite(file.join("halo.db"))).map(drop).expect_err("no folder").to_string();
    assert!(refused.contains("Not a directory"), "{refused}");
    let missing = file.with_file_name("nowhere").join("halo.db");
    let refused = Database::open(&Location::Sqlite(missing)).map(drop).expect_err("no folder").to_string();
    assert!(refused.contains("No such file or directory"), "{refused}");
    let mut permissions = fs::metadata(&file).expect("there").permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&file, permissions).expect("changed");
    let mut store = Database::open_to_read(&place.location).expect("looking is allowed");
    assert_eq!(store.load(NAMES[0], Access::Read).expect("it opens").state_hash(), hashes[0]);
}

#[test]
fn a_world_that_has_lost_its_name_is_found_again() {
    let (place, hashes) = store();
    let row = |kind, key: &str, value: &str| WorldRow { kind, key: key.into(), value: Some(value.into()) };
    let rows = [row(Kind::World, "0", "{}"), row(Kind::Said, "000100000001", r#"{"content":"hello"}"#)];
    place.open().put_world_rows("harbour", &rows).expect("kept");
    let db = rusqlite::Connection::open(path(&place)).expect("it opens");
    db.execute_batch("DELETE FROM conversation WHERE name = 'world:harbour'").expect("it runs");
    drop(db);
    let mut store = place.open();
    let findings = store.examine(&mut |_, _| {}).expect("it can be examined");
    assert!(findings.iter().any(|found| found.what.contains("lost their name")), "{findings:?}");
    store.mend(&findings).expect("it is mended");
    let mut store = place.open();
    assert_eq!(store.examine(&mut |_, _| {}).expect("it can be examined"), []);
    let worlds: Vec<String> = store.worlds().expect("listed").into_iter().map(|world| world.name).collect();
    assert_eq!(worlds, ["recovered 3"]);
    let said = store.world_rows("recovered 3", Kind::Said, "0".."9", 10).expect("rows");
    assert_eq!(said.iter().map(|said| said.value.as_str()).collect::<Vec<_>>(), [r#"{"content":"hello"}"#]);
    let states = NAMES.map(|name| store.load(name, Access::Read).expect("it opens").state_hash());
    assert_eq!(states.as_slice(), hashes, "and nothing else has changed");
}
