//! PostgreSQL servers that crash, freeze, and run out of connections.

use crate::common::postgres_server::{PostgresTestServer, execute_sql};
use halo_core::ErrorKind;
use halo_core::change::{Append, Change, NewToken};
use halo_core::store::{Access, Durability, RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ContentKind, Role, TokenId, TurnId};
use halo_store::database::{Database, StoreLocation};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn location(url: &str, parameters: &str) -> StoreLocation {
    format!("{url}?{parameters}").parse().expect("a valid address")
}

/// The next token of an answer.
fn next_token(timeline: &Timeline, n: usize) -> Change {
    let token = NewToken {
        id: TokenId(n as u32),
        text: format!(" word{n}"),
        chunk_index: 0,
        brightness: Brightness::default(),
        kind: ContentKind::Message,
    };
    let at = timeline.next_position();
    Change::Append(Append { at, turn: TurnId(0), role: Role::Assistant, tokens: vec![token] })
}

/// The server crashes again and again while tokens are streamed: every commit that returned is stored exactly once, and
/// the stream goes on by itself.
#[test]
fn commit_survives_postgres_crashes_in_a_stream() {
    let server = PostgresTestServer::start(&["max_connections=20"]);
    let url = server.new_database();
    let location = location(&url, "pool_timeout=30");
    let crashed = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let (location, crashed) = (location.clone(), Arc::clone(&crashed));
        move || {
            let mut store = Database::open(&location).expect("the store opens");
            let mut timeline = store.load("c", Access::Write).expect("a new conversation");
            let mut n = 0;
            while !crashed.load(Ordering::SeqCst) {
                let change = next_token(&timeline, n);
                store
                    .transact("c", &mut timeline, &change, Durability::Deferred)
                    .unwrap_or_else(|error| panic!("token {n}: {error}"));
                n += 1;
            }
            (n, timeline.state_hash())
        }
    });
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(400));
        server.crash_and_restart();
    }
    crashed.store(true, Ordering::SeqCst);
    let (committed, hash) = writer.join().expect("the writer does not fail");
    assert!(committed > 20, "{committed} tokens");
    let mut store = Database::open(&location).expect("the store opens");
    let stored = store.load("c", Access::Read).expect("the conversation loads");
    assert_eq!((stored.len(), stored.state_hash()), (committed, hash));
    let replayed = store.replay_log("c").expect("the log is replayed");
    assert_eq!(replayed.len(), committed);
    assert!(store.check_integrity(&mut |_, _| {}).expect("the check runs").is_empty());
}

/// A server that accepts connections and does not answer: every call fails within its limit, and succeeds when the server
/// answers again.
#[test]
fn postgres_that_does_not_answer_is_an_error_within_the_limit() {
    let server = PostgresTestServer::start(&["max_connections=20"]);
    let url = server.new_database();
    let location = location(&url, "pool_timeout=2&statement_timeout=2");
    let mut store = Database::open(&location).expect("the store opens");
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    let first = next_token(&timeline, 0);
    store.transact("c", &mut timeline, &first, Durability::Immediate).expect("the change is committed");
    server.freeze();
    let change = next_token(&timeline, 1);
    type Call<'a> = (&'a str, Box<dyn FnOnce() -> Option<ErrorKind> + 'a>);
    let mut reader = Database::open(&location);
    let calls: Vec<Call<'_>> = vec![
        ("open", Box::new(|| reader.as_mut().err().map(|error| error.kind))),
        (
            "commit",
            Box::new(|| {
                let result = store.transact("c", &mut timeline, &change, Durability::Immediate);
                result.err().map(|error| error.kind)
            }),
        ),
    ];
    for (name, call) in calls {
        let started = Instant::now();
        assert_eq!(call(), Some(ErrorKind::Unavailable), "{name}");
        assert!(started.elapsed() < Duration::from_secs(20), "{name}: {:?}", started.elapsed());
    }
    let started = Instant::now();
    assert_eq!(store.list_conversations().expect_err("no answer").kind, ErrorKind::Unavailable);
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    server.thaw();
    // The commit may have been received before the limit; the conversation tells when it is loaded again.
    drop(store);
    let mut store = Database::open(&location).expect("the store opens");
    let timeline = store.load("c", Access::Write).expect("the conversation loads");
    assert!([1, 2].contains(&timeline.len()), "{}", timeline.len());
    assert!(store.check_integrity(&mut |_, _| {}).expect("the check runs").is_empty());
}

/// Sixty conversations that are open for writing at once share the connections of their process.
#[test]
fn postgres_connections_are_shared_by_all_conversations() {
    let server = PostgresTestServer::start(&["max_connections=15"]);
    let url = server.new_database();
    let location = location(&url, "connection_limit=4");
    let mut stores: Vec<(Database, Timeline)> = (0..60)
        .map(|n| {
            let mut store = Database::open(&location).expect("the store opens");
            let timeline = store.load(&format!("c{n}"), Access::Write).expect("a new conversation");
            (store, timeline)
        })
        .collect();
    std::thread::scope(|scope| {
        for (n, (store, timeline)) in stores.iter_mut().enumerate() {
            scope.spawn(move || {
                for token in 0..5 {
                    let change = next_token(timeline, token);
                    let name = format!("c{n}");
                    store
                        .transact(&name, timeline, &change, Durability::Deferred)
                        .unwrap_or_else(|error| panic!("{name}: {error}"));
                }
            });
        }
    });
    // Their leases exclude other stores of this process and of others.
    let other: StoreLocation = url.parse().expect("a valid address");
    for location in [&location, &other] {
        let mut store = Database::open(location).expect("the store opens");
        assert_eq!(store.load("c7", Access::Write).expect_err("it is open").kind, ErrorKind::Busy);
    }
    stores.remove(7);
    let mut store = Database::open(&other).expect("the store opens");
    assert_eq!(store.load("c7", Access::Write).expect("it was closed").len(), 5);
}

/// A crash of the server ends no lease: the owner goes on, and nobody else gets in.
#[test]
fn lease_is_kept_through_postgres_crashes() {
    let server = PostgresTestServer::start(&["max_connections=20"]);
    let url = server.new_database();
    let [here, there] = ["pool_timeout=30", "pool_timeout=31"].map(|limit| location(&url, limit));
    let mut store = Database::open(&here).expect("the store opens");
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    let mut other = Database::open(&there).expect("the store opens");
    for n in 0..3 {
        let change = next_token(&timeline, n);
        store.transact("c", &mut timeline, &change, Durability::Immediate).expect("the change is committed");
        server.crash_and_restart();
        assert_eq!(other.load("c", Access::Write).expect_err("it is leased").kind, ErrorKind::Busy);
    }
    drop(store);
    assert_eq!(other.load("c", Access::Write).expect("the lease was given up").len(), 3);
}

/// An address of a server: what comes to a port goes to the server, until it is closed.
struct ServerAddress {
    port: u16,
    closed: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl ServerAddress {
    fn open(server: &str) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        listener.set_nonblocking(true).expect("it does not block");
        let port = listener.local_addr().expect("an address").port();
        let (closed, streams) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<TcpStream>>>::default());
        let (is_closed, kept, server) = (Arc::clone(&closed), Arc::clone(&streams), server.to_owned());
        std::thread::spawn(move || {
            while !is_closed.load(Ordering::SeqCst) {
                let Ok((client, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(5));
                    continue;
                };
                client.set_nonblocking(false).expect("it blocks");
                let upstream = TcpStream::connect(&server).expect("the server runs");
                for (from, to) in [(&client, &upstream), (&upstream, &client)] {
                    let (mut from, mut to) =
                        (from.try_clone().expect("cloned"), to.try_clone().expect("cloned"));
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                kept.lock().expect("the lock is not poisoned").extend([client, upstream]);
            }
        });
        Self { port, closed, streams }
    }

    /// Every connection through it breaks, and there are no new ones.
    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(50));
        for stream in self.streams.lock().expect("the lock is not poisoned").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// The address that serves the conversation is gone in the middle of a stream, and the next one of the list takes over: every
/// token is there once, and the lease is kept.
#[test]
fn commits_go_on_at_another_address_of_the_server() {
    let server = PostgresTestServer::start(&["max_connections=20"]);
    let url = server.new_database();
    let (host, database) =
        url.split_once('@').and_then(|(_, rest)| rest.split_once('/')).expect("a host and a database");
    let [first, second] = [host, host].map(ServerAddress::open);
    let both = format!(
        "postgres://halo@127.0.0.1:{},127.0.0.1:{}/{database}?pool_timeout=20&target_session_attrs=read-write",
        first.port, second.port
    );
    let mut store = Database::open(&both.parse().expect("an address")).expect("the store opens");
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    for n in 0..60 {
        if n == 30 {
            first.close();
        }
        let durability = if n % 7 == 0 { Durability::Immediate } else { Durability::Deferred };
        let change = next_token(&timeline, n);
        store.transact("c", &mut timeline, &change, durability).expect("the change is committed");
    }
    assert!(
        !second.streams.lock().expect("the lock is not poisoned").is_empty(),
        "the second address is used"
    );
    let mut other = Database::open(&location(&url, "pool_timeout=21")).expect("the store opens");
    assert_eq!(other.load("c", Access::Write).expect_err("the lease is kept").kind, ErrorKind::Busy);
    let stored = other.load("c", Access::Read).expect("the conversation loads");
    assert_eq!((stored.len(), stored.state_hash()), (60, timeline.state_hash()));
}

/// Leases are renewed while other threads take and give up some: nobody waits for ever.
#[test]
fn lease_renewals_do_not_block_the_connections() {
    let server = PostgresTestServer::start(&["max_connections=20"]);
    let url = server.new_database();
    // A renewal every third of a second.
    let location = location(&url, "lease_timeout=1");
    drop(Database::open(&location).expect("the schema is created"));
    let until = Instant::now() + Duration::from_secs(4);
    let threads: Vec<_> = (0..4)
        .map(|n| {
            let location = location.clone();
            std::thread::spawn(move || {
                let mut taken = 0;
                while Instant::now() < until {
                    let mut store = Database::open(&location).expect("the store opens");
                    store.load(&format!("c{n}"), Access::Write).expect("the lease is taken");
                    taken += 1;
                }
                taken
            })
        })
        .collect();
    let limit = until + Duration::from_secs(20);
    for thread in threads {
        while !thread.is_finished() {
            assert!(Instant::now() < limit, "a thread waits for ever");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(thread.join().expect("the thread does not panic") > 3);
    }
}

/// Many writers of a server that does not answer wait together, not one after the other.
#[test]
fn leases_of_a_frozen_postgres_fail_together() {
    let server = PostgresTestServer::start(&["max_connections=20"]);
    let url = server.new_database();
    let location = location(&url, "pool_timeout=2&statement_timeout=2");
    let mut stores: Vec<_> = (0..10)
        .map(|n| {
            let mut store = Database::open(&location).expect("the store opens");
            store.load(&format!("c{n}"), Access::Write).expect("a new conversation");
            store
        })
        .collect();
    server.freeze();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for (n, store) in stores.iter_mut().enumerate() {
            scope.spawn(move || store.load(&format!("other{n}"), Access::Write).expect_err("it is frozen"));
        }
    });
    let took = started.elapsed();
    server.thaw();
    assert!(took < Duration::from_secs(12), "{took:?}");
}

/// What happens to the next COMMIT on its way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CommitLoss {
    /// The server commits, and the reply is lost.
    Reply,
    /// The server does not get it.
    Request,
}

/// An address of a server that loses commits when it is asked to, with their connections.
struct LossyAddress {
    port: u16,
    next: Arc<Mutex<Option<CommitLoss>>>,
}

impl LossyAddress {
    fn open(server: &str) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let next = Arc::<Mutex<Option<CommitLoss>>>::default();
        let (losses, server) = (Arc::clone(&next), server.to_owned());
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let upstream = TcpStream::connect(&server).expect("the server runs");
                let is_mute = Arc::new(AtomicBool::new(false));
                let streams = || (client.try_clone().expect("cloned"), upstream.try_clone().expect("cloned"));
                let ((from, to), (back, reply)) = (streams(), streams());
                let (losses, mute) = (Arc::clone(&losses), Arc::clone(&is_mute));
                std::thread::spawn(move || forward_commits(from, to, &losses, &mute));
                std::thread::spawn(move || forward_replies(reply, back, &is_mute));
            }
        });
        Self { port, next }
    }

    fn lose_next_commit(&self, loss: CommitLoss) {
        *self.next.lock().expect("the lock is not poisoned") = Some(loss);
    }

    fn has_lost_it(&self) -> bool {
        self.next.lock().expect("the lock is not poisoned").is_none()
    }
}

fn forward_commits(
    mut client: TcpStream,
    mut server: TcpStream,
    next: &Mutex<Option<CommitLoss>>,
    is_mute: &AtomicBool,
) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = client.read(&mut buffer) {
        let bytes = &buffer[..count];
        // Transactions that only read end with a COMMIT, too.
        let has = |text: &[u8]| bytes.windows(text.len()).any(|part| part == text);
        let is_commit = has(b"UPDATE halo.lease SET written") && has(b"COMMIT\0");
        let loss = if is_commit { next.lock().expect("the lock is not poisoned").take() } else { None };
        if loss == Some(CommitLoss::Request) {
            break;
        }
        is_mute.store(loss.is_some(), Ordering::SeqCst);
        if server.write_all(bytes).is_err() {
            break;
        }
        if loss.is_some() {
            std::thread::sleep(Duration::from_millis(30));
            break;
        }
    }
    let _ = (client.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
}

fn forward_replies(mut server: TcpStream, mut client: TcpStream, is_mute: &AtomicBool) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = server.read(&mut buffer) {
        if !is_mute.load(Ordering::SeqCst) && client.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
}

/// Connections are lost with a commit, or with its reply: every write has its effect exactly once, whichever it was.
#[test]
fn commit_that_is_lost_on_its_way_has_its_effect_once() {
    let server = PostgresTestServer::start(&["max_connections=30"]);
    let url = server.new_database();
    let (host, database) =
        url.split_once('@').and_then(|(_, rest)| rest.split_once('/')).expect("a host and a database");
    let lossy = LossyAddress::open(host);
    let address = format!("postgres://halo@127.0.0.1:{}/{database}?sslmode=disable", lossy.port);
    let mut store = Database::open(&address.parse().expect("an address")).expect("the store opens");
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    let losses = [CommitLoss::Reply, CommitLoss::Request, CommitLoss::Request, CommitLoss::Reply];
    for (n, loss) in losses.into_iter().cycle().take(12).enumerate() {
        lossy.lose_next_commit(loss);
        let change = next_token(&timeline, n);
        let durability = if n % 2 == 0 { Durability::Immediate } else { Durability::Deferred };
        store.transact("c", &mut timeline, &change, durability).expect("the change is committed");
        assert!(lossy.has_lost_it());
    }
    let changes = [next_token(&timeline, 12)];
    for loss in [CommitLoss::Reply, CommitLoss::Request] {
        lossy.lose_next_commit(loss);
        store.put_record("c", RecordKind::Note, "n", Some("kept")).expect("the record is stored");
        assert!(lossy.has_lost_it());
        // None of these can be repeated after it was done.
        lossy.lose_next_commit(loss);
        let copy = if loss == CommitLoss::Reply { "first copy" } else { "second copy" };
        store
            .copy_conversation("c", copy, "m", &mut |turn| Ok(Some(turn)))
            .expect("the conversation is copied");
        assert!(lossy.has_lost_it());
        lossy.lose_next_commit(loss);
        store.rename(copy, &format!("renamed {copy}")).expect("the copy is renamed");
        assert!(lossy.has_lost_it());
    }
    lossy.lose_next_commit(CommitLoss::Reply);
    store.transact_all("c", &mut timeline, &changes).expect("the changes are committed");
    let mut reader = Database::open(&location(&url, "pool_timeout=7")).expect("the store opens");
    let names: Vec<String> =
        reader.list_conversations().expect("they are listed").into_iter().map(|c| c.name).collect();
    assert_eq!(names, ["c", "renamed first copy", "renamed second copy"]);
    let stored = reader.load("c", Access::Read).expect("the conversation loads");
    assert_eq!((stored.len(), stored.state_hash()), (13, timeline.state_hash()));
    assert_eq!(reader.replay_log("c").expect("the log is replayed").len(), 13);
    assert!(reader.check_integrity(&mut |_, _| {}).expect("the check runs").is_empty());
}

/// A transaction that the server cannot order with another one, or ends because of a deadlock, runs again.
#[test]
fn commit_is_tried_again_after_a_serialization_failure() {
    let server = PostgresTestServer::start(&["max_connections=20"]);
    let url = server.new_database();
    let mut store = Database::open(&location(&url, "pool_timeout=7")).expect("the store opens");
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    // A sequence counts also what is rolled back: two of three writes fail.
    let fail = |code: &str| {
        format!(
            "DROP SEQUENCE IF EXISTS halo.attempts; CREATE SEQUENCE halo.attempts; \
             CREATE OR REPLACE FUNCTION halo.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF nextval('halo.attempts') % 3 <> 0 THEN RAISE EXCEPTION 'again' USING ERRCODE = '{code}'; END IF; \
             RETURN NEW; END $$; \
             CREATE OR REPLACE TRIGGER fail BEFORE INSERT ON halo.log FOR EACH ROW EXECUTE FUNCTION halo.fail()"
        )
    };
    for (n, code) in ["40001", "40P01"].into_iter().enumerate() {
        execute_sql(&url, &fail(code)).expect("the trigger is created");
        let change = next_token(&timeline, n);
        store
            .transact("c", &mut timeline, &change, Durability::Immediate)
            .expect("the third attempt succeeds");
    }
    execute_sql(&url, &fail("22000")).expect("the trigger is created");
    let change = next_token(&timeline, 2);
    let error = store.transact("c", &mut timeline, &change, Durability::Immediate);
    assert_eq!(error.expect_err("another error is not retried").kind, ErrorKind::Internal);
    assert_eq!(store.load("c", Access::Read).expect("the conversation loads").len(), 2);
}
