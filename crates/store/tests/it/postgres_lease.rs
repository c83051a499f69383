//! Leases on PostgreSQL: owners that are paused, killed or cut off, and the time by which a lease ends.

use crate::common::postgres_server::{PostgresTestServer, execute_sql, query_texts};
use halo_core::change::{Append, Change, NewToken};
use halo_core::store::{Access, Durability, RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ContentKind, Role, TokenId, TurnId};
use halo_core::{Error, ErrorKind};
use halo_store::database::{Database, StoreLocation};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

static SERVER: LazyLock<PostgresTestServer> =
    LazyLock::new(|| PostgresTestServer::start(&["max_connections=60"]));

fn location(url: &str, parameters: &str) -> StoreLocation {
    format!("{url}?{parameters}").parse().expect("a valid address")
}

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

fn commit_token(store: &mut Database, timeline: &mut Timeline) -> Result<(), Error> {
    let change = next_token(timeline);
    store.transact("c", timeline, &change, Durability::Immediate).map(drop)
}

/// What the child process writes to, with the address of the database.
const CHILD_ADDRESS: &str = "HALO_LEASE_TEST_ADDRESS";

/// A real process that has the conversation open. Not a test of its own.
#[test]
#[ignore = "the process that other tests pause and kill"]
fn lease_child_process() {
    let Ok(address) = std::env::var(CHILD_ADDRESS) else { return };
    let mut store = Database::open(&address.parse().expect("an address")).expect("the store opens");
    let mut timeline = store.load("c", Access::Write).expect("the lease is free");
    let reply = |text: &str| println!("\nchild {text}");
    let describe = |result: Result<(), Error>| match result {
        Ok(()) => "stored".to_owned(),
        Err(error) if error.is_lease_lost() => "lost".to_owned(),
        Err(error) => format!("failed: {error}"),
    };
    reply(&format!("open {}", std::process::id()));
    for line in std::io::stdin().lines() {
        match line.expect("a line").as_str() {
            "commit" => reply(&describe(commit_token(&mut store, &mut timeline))),
            "record" => {
                let stored = store.put_record("c", RecordKind::Note, "n", Some("stale"));
                reply(&describe(stored));
            }
            "stream" => loop {
                match commit_token(&mut store, &mut timeline) {
                    Ok(()) => reply(&format!("has {}", timeline.len())),
                    Err(error) => break reply(&describe(Err(error))),
                }
            },
            "close" => break,
            other => panic!("{other}"),
        }
    }
    drop(store);
    reply("closed");
}

struct ChildProcess {
    child: Child,
    /// The number of the process that has the conversation open, which may be a child of `child`.
    id: String,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl ChildProcess {
    fn open(address: &str) -> Self {
        Self::start(Command::new(std::env::current_exe().expect("the test program")), address)
    }

    /// The clock of the process goes wrong by so many minutes.
    fn open_with_clock(address: &str, minutes: &str) -> Self {
        let mut program = Command::new("faketime");
        program.args(["-f", &format!("{minutes}m")]).arg(std::env::current_exe().expect("the test program"));
        program.env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        Self::start(program, address)
    }

    fn start(mut program: Command, address: &str) -> Self {
        let mut child = program
            .args(["--exact", "postgres_lease::lease_child_process", "--ignored", "--nocapture"])
            .env(CHILD_ADDRESS, address)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the child starts: `scripts/setup` installs faketime");
        let input = child.stdin.take().expect("stdin is piped");
        let output = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
        let mut process = Self { child, id: String::new(), input, output };
        let reply = process.reply();
        process.id = reply.strip_prefix("open ").expect("the conversation is open").to_owned();
        process
    }

    fn ask(&mut self, what: &str) {
        writeln!(self.input, "{what}").expect("the child reads");
    }

    fn reply(&mut self) -> String {
        loop {
            let line = self.output.next().expect("the child goes on").expect("text");
            if let Some(reply) = line.strip_prefix("child ") {
                return reply.to_owned();
            }
        }
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(&self.id).status();
        assert!(sent.expect("kill runs").success());
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // It may have ended.
        let _ = Command::new("kill").args(["-KILL", &self.id]).output();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Opens the conversation as soon as its lease has ended.
fn open_when_free(location: &StoreLocation, limit: Duration) -> (Database, Timeline, Duration) {
    let started = Instant::now();
    let mut store = Database::open(location).expect("the store opens");
    loop {
        match store.load("c", Access::Write) {
            Ok(timeline) => return (store, timeline, started.elapsed()),
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::Busy, "{error}");
                assert!(started.elapsed() < limit, "the lease does not end");
            }
        }
    }
}

fn stored_rows(url: &str) -> Vec<String> {
    let tables = ["conversation", "chunk", "block", "log", "mention", "record", "embedding", "message"];
    let mut rows: Vec<String> = tables
        .iter()
        .flat_map(|table| query_texts(url, &format!("SELECT r::text FROM halo.{table} r")))
        .collect();
    rows.extend(query_texts(url, "SELECT concat_ws(' ', key, owner, epoch, written) FROM halo.lease"));
    rows.sort();
    rows
}

/// A process that is stopped for longer than its lease, in the middle of its writes, loses the conversation; when it goes on,
/// each of its writes is refused and no row changes.
#[test]
fn lease_of_a_stopped_process_is_taken_and_its_writes_are_refused() {
    // More in `make soak`.
    let rounds = std::env::var("HALO_LEASE_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(3);
    let mut rng = fastrand::Rng::with_seed(33);
    for round in 0..rounds {
        let url = SERVER.new_database();
        let address = format!("{url}?lease_timeout=1");
        let mut paused = ChildProcess::open(&address);
        paused.ask("stream");
        while paused.reply() != "has 5" {}
        std::thread::sleep(Duration::from_millis(rng.u64(..60)));
        paused.signal("STOP");
        let (mut store, mut timeline, waited) =
            open_when_free(&address.parse().expect("an address"), Duration::from_secs(20));
        assert!(waited < Duration::from_secs(7), "round {round}: {waited:?}");
        let kept = timeline.len();
        for _ in 0..3 {
            commit_token(&mut store, &mut timeline).expect("the new owner writes");
        }
        let before = stored_rows(&url);
        paused.signal("CONT");
        // What it has acknowledged before is stored.
        let mut acknowledged = 5;
        let end = loop {
            let reply = paused.reply();
            match reply.strip_prefix("has ") {
                Some(count) => acknowledged = count.parse().expect("a count"),
                None => break reply,
            }
        };
        // It may have been stopped when it had asked for a commit and the server had given up on it.
        assert!(end == "lost" || end.starts_with("failed"), "round {round}: {end}");
        assert!(acknowledged == kept || acknowledged + 1 == kept, "round {round}: {acknowledged}, {kept}");
        for write in ["commit", "record"] {
            paused.ask(write);
            assert_eq!(paused.reply(), "lost", "round {round}: {write}");
        }
        assert_eq!(stored_rows(&url), before, "round {round}");
        commit_token(&mut store, &mut timeline).expect("the new owner goes on");
        assert_eq!(store.replay_log("c").expect("the log is replayed").len(), timeline.len());
    }
}

/// A process that was killed on this machine has ended for certain: nobody waits for its lease.
#[test]
fn lease_of_a_killed_process_on_this_machine_is_free_at_once() {
    let url = SERVER.new_database();
    let address = format!("{url}?lease_timeout=600");
    let mut killed = ChildProcess::open(&address);
    killed.ask("commit");
    assert_eq!(killed.reply(), "stored");
    killed.signal("KILL");
    let (_, timeline, waited) =
        open_when_free(&address.parse().expect("an address"), Duration::from_secs(20));
    assert!(waited < Duration::from_secs(2), "{waited:?}");
    assert_eq!(timeline.len(), 1);
}

/// The lease of a process on another machine is waited for, and taken when it has ended by the clock of the database.
#[test]
fn lease_of_a_dead_owner_elsewhere_expires() {
    let url = SERVER.new_database();
    let address = location(&url, "lease_timeout=3");
    let mut store = Database::open(&address).expect("the store opens");
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    commit_token(&mut store, &mut timeline).expect("the token is stored");
    drop(store);
    let elsewhere = "UPDATE halo.lease SET owner = '0000000000000007 elsewhere/1 1 1', epoch = epoch + 1, \
                     until = (extract(epoch FROM clock_timestamp()) * 1000)::BIGINT + 2500";
    execute_sql(&url, elsewhere).expect("the statement runs");
    let started = Instant::now();
    let mut store = Database::open(&address).expect("the store opens");
    let timeline = store.load("c", Access::Write).expect("it waits until the lease has ended");
    assert!(started.elapsed() > Duration::from_secs(2), "{:?}", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(timeline.len(), 1);
}

/// A lease is renewed while its owner does nothing, and is free as soon as the owner closes.
#[test]
fn lease_is_renewed_until_the_store_closes() {
    let url = SERVER.new_database();
    let address = location(&url, "lease_timeout=1");
    let mut store = Database::open(&address).expect("the store opens");
    let mut timeline = store.load("c", Access::Write).expect("a new conversation");
    commit_token(&mut store, &mut timeline).expect("the token is stored");
    let mut other =
        Database::open(&location(&url, "lease_timeout=1&pool_timeout=9")).expect("the store opens");
    for _ in 0..2 {
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(other.load("c", Access::Write).expect_err("it is renewed").kind, ErrorKind::Busy);
    }
    commit_token(&mut store, &mut timeline).expect("the owner still has it");
    drop(store);
    let started = Instant::now();
    assert_eq!(other.load("c", Access::Write).expect("it was given up").len(), 2);
    assert!(started.elapsed() < Duration::from_millis(800), "{:?}", started.elapsed());
    // So does a process that is asked to end.
    drop(other);
    let mut child = ChildProcess::open(&format!("{url}?lease_timeout=600"));
    child.ask("close");
    assert_eq!(child.reply(), "closed");
    let until = query_texts(&url, "SELECT until::text FROM halo.lease");
    assert_eq!(until, ["0"]);
}

/// Clocks of nodes go wrong by ten minutes, forwards and backwards: leases begin and end by that of the database.
#[test]
fn lease_ignores_the_clock_of_its_owner() {
    for minutes in ["+10", "-10"] {
        let url = SERVER.new_database();
        let address = format!("{url}?lease_timeout=1");
        let mut skewed = ChildProcess::open_with_clock(&address, minutes);
        skewed.ask("commit");
        assert_eq!(skewed.reply(), "stored");
        // The time of the log entry shows that the clock is wrong.
        let off =
            "SELECT (abs(at - extract(epoch FROM clock_timestamp()) * 1000) > 500000)::text FROM halo.log";
        assert_eq!(query_texts(&url, off), ["true"], "{minutes}");
        let left = "SELECT (until - extract(epoch FROM clock_timestamp()) * 1000 BETWEEN 0 AND 1000)::text FROM halo.lease";
        assert_eq!(query_texts(&url, left), ["true"], "{minutes}");
        let location: StoreLocation = address.parse().expect("an address");
        let mut other = Database::open(&location).expect("the store opens");
        std::thread::sleep(Duration::from_millis(1500));
        assert_eq!(other.load("c", Access::Write).expect_err("it is renewed").kind, ErrorKind::Busy);
        skewed.signal("STOP");
        let (mut store, mut timeline, waited) = open_when_free(&location, Duration::from_secs(20));
        assert!(waited < Duration::from_secs(6), "{minutes}: {waited:?}");
        commit_token(&mut store, &mut timeline).expect("the new owner writes");
        skewed.signal("CONT");
        skewed.ask("commit");
        assert_eq!(skewed.reply(), "lost", "{minutes}");
        // It may open it again when it is free, wrong clock or not.
        drop(store);
        let mut again = ChildProcess::open_with_clock(&address, minutes);
        again.ask("commit");
        assert_eq!(again.reply(), "stored", "{minutes}");
    }
}
