//! A real PgBouncer between the store and PostgreSQL, which gives every transaction another connection.

use crate::common::postgres_server::PostgresTestServer;
use halo_core::ErrorKind;
use halo_core::change::{Append, Change, NewToken};
use halo_core::store::{Access, Durability, RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Role, TokenId, TurnId};
use halo_store::database::{Database, StoreLocation};
use halo_store::exchange::ImportRequest;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn next_token(timeline: &Timeline) -> Change {
    let token = NewToken {
        id: TokenId(7),
        text: format!(" word{}", timeline.len()),
        chunk_index: 0,
        brightness: Brightness::default(),
        kind: ContentKind::Message,
    };
    let at = timeline.next_position();
    Change::Append(Append { at, turn: TurnId(0), role: Role::Assistant, tokens: vec![token] })
}

/// Two processes with four connections each write twelve conversations through two connections to the server. Statements,
/// settings and leases of one never affect the other.
#[test]
fn pooler_in_transaction_mode_serves_many_writers() {
    let server = PostgresTestServer::start(&["max_connections=20"]);
    let url = server.start_pooler(&server.new_database(), 2);
    let processes: Vec<StoreLocation> = ["connection_limit=4", "connection_limit=4&lease_timeout=2"]
        .map(|parameters| format!("{url}?{parameters}").parse().expect("an address"))
        .to_vec();
    drop(Database::open(&processes[0]).expect("the schema is created"));
    let written = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for n in 0..12 {
            let (location, written) = (&processes[n % 2], &written);
            scope.spawn(move || {
                let name = format!("c{n}");
                let mut store = Database::open(location).expect("the store opens");
                let mut timeline = store.load(&name, Access::Write).expect("the lease is free");
                for token in 0..25 {
                    let change = next_token(&timeline);
                    store
                        .transact(&name, &mut timeline, &change, Durability::Deferred)
                        .unwrap_or_else(|error| panic!("{name}, token {token}: {error}"));
                    let note = format!("{name} has {token}");
                    store
                        .put_record(&name, RecordKind::Note, "n", Some(&note))
                        .expect("the record is stored");
                    let stored = store.record(&name, RecordKind::Note, "n").expect("the record is read");
                    assert_eq!(stored.map(|record| record.value), Some(note));
                    written.fetch_add(1, Ordering::Relaxed);
                }
                let mut fresh = Database::open(location).expect("the store opens");
                let stored = fresh.load(&name, Access::Read).expect("the conversation loads");
                assert_eq!(stored.state_hash(), timeline.state_hash());
            });
        }
    });
    assert_eq!(written.load(Ordering::Relaxed), 300);
    let mut store = Database::open(&processes[0]).expect("the store opens");
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
}

/// Leases hold through a pooler, are renewed, and whole conversations are exported, imported and forgotten.
#[test]
fn pooler_in_transaction_mode_keeps_leases() {
    let server = PostgresTestServer::start(&["max_connections=20"]);
    let url = server.start_pooler(&server.new_database(), 3);
    let [here, there]: [StoreLocation; 2] = ["lease_timeout=1", "lease_timeout=1&pool_timeout=9"]
        .map(|parameters| format!("{url}?{parameters}").parse().expect("an address"));
    let mut store = Database::open(&here).expect("the store opens");
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    for _ in 0..40 {
        let change = next_token(&timeline);
        store.transact("c", &mut timeline, &change, Durability::Immediate).expect("the token is stored");
    }
    let mut other = Database::open(&there).expect("the store opens");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(other.load("c", Access::Write).expect_err("it is renewed").kind, ErrorKind::Busy);
    let mut export = Vec::new();
    store.export("c", &mut export, &mut |_, _| {}).expect("the conversation is exported");
    let request = ImportRequest {
        file_name: "c.jsonl",
        format: None,
        name: Some("copy"),
        chunk_size: halo_core::chunker::ChunkSize::default(),
        initial_brightness: Brightness(1.0),
        model: None,
        validate_rows: None,
    };
    other.import(&mut export.as_slice(), request).expect("the conversation is imported");
    let copy = other.load("copy", Access::Write).expect("the copy is free");
    assert_eq!(copy.state_hash(), timeline.state_hash());
    let chunk = ChunkId::new(Role::Assistant, TurnId(0), 0);
    other.forget("copy", &[chunk], &[]).expect("a chunk is forgotten");
    drop(store);
    assert_eq!(other.load("c", Access::Write).expect("the lease was given up").len(), 40);
    assert_eq!(other.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
}
