//! A checker of histories: several processes open, write, lose and take over conversations in an order that a seed decides, on a
//! real database. After each operation the store is compared with what the history allows. The checker finds bugs that are
//! planted: writes whose epoch is not checked, and leases that are ignored.

use crate::common::{TestDatabase, postgres, sqlite};
use crate::every_database::execute_sql_directly;
use halo_core::ErrorKind;
use halo_core::change::{Append, Change, NewToken};
use halo_core::store::{Access, Durability, RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ContentKind, Role, TokenId, TurnId};
use halo_store::database::{Database, StoreLocation};
use std::collections::BTreeMap;

const NODES: usize = 4;
const CONVERSATIONS: [&str; 3] = ["a", "b", "c"];

/// A promise of the store that is broken, to see that the checker notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlantedLeaseBug {
    /// The epoch of a write is not compared with that of the lease.
    FencingOff,
    /// A lease that another process holds is taken.
    LeaseIgnored,
}

/// What all processes together have written to a conversation.
#[derive(Clone, Default)]
struct Expected {
    owner: Option<usize>,
    /// Whether the owner was paused for longer than its lease.
    has_ended: bool,
    text: String,
    record: Option<String>,
}

/// A conversation as a process has it open.
struct OpenedTimeline {
    timeline: Timeline,
    /// The owner and the epoch of its lease, as they are stored.
    claim: Option<(String, i64)>,
}

struct Node {
    store: Database,
    open: BTreeMap<&'static str, OpenedTimeline>,
}

struct History<'a> {
    database: &'a TestDatabase,
    nodes: Vec<Node>,
    expected: BTreeMap<&'static str, Expected>,
    rng: fastrand::Rng,
    bug: Option<PlantedLeaseBug>,
    next: u32,
    /// Writes of a process that another one had taken the conversation from.
    stale_writes: usize,
    takeovers: usize,
}

impl<'a> History<'a> {
    fn new(database: &'a TestDatabase, seed: u64, bug: Option<PlantedLeaseBug>) -> Self {
        let nodes = (0..NODES).map(|n| Self::start(database, n)).collect();
        Self {
            database,
            nodes,
            expected: CONVERSATIONS.map(|name| (name, Expected::default())).into(),
            rng: fastrand::Rng::with_seed(seed),
            bug,
            next: 0,
            stale_writes: 0,
            takeovers: 0,
        }
    }

    /// Each process has connections of its own.
    fn start(database: &TestDatabase, n: usize) -> Node {
        let location: StoreLocation = match &database.location {
            StoreLocation::Sqlite(_) => database.location.clone(),
            StoreLocation::Postgres(_) => {
                let address = format!("{}?connection_limit=2&pool_timeout={}", database.url, 20 + n);
                address.parse().expect("an address")
            }
        };
        Node { store: Database::open(&location).expect("the store opens"), open: BTreeMap::new() }
    }

    fn run(&mut self, operations: usize) -> Result<(), String> {
        for n in 0..operations {
            let (node, name) =
                (self.rng.usize(..NODES), CONVERSATIONS[self.rng.usize(..CONVERSATIONS.len())]);
            let done = match self.rng.u32(..20) {
                0 | 1 => self.open(node, name),
                2 => self.release(node, name),
                3 => self.pause_owner(name),
                4 if self.rng.u32(..4) == 0 => self.restart(node),
                4..=7 => self.write_record(node, name),
                8 => self.read(node, name),
                _ => self.append(node, name),
            };
            done.map_err(|what| format!("operation {n}, node {node}, conversation {name}: {what}"))?;
        }
        (0..NODES).try_for_each(|node| CONVERSATIONS.iter().try_for_each(|name| self.read(node, name)))
    }

    fn open(&mut self, node: usize, name: &'static str) -> Result<(), String> {
        let expected = self.expected.entry(name).or_default();
        let is_free = expected.owner.is_none_or(|owner| owner == node) || expected.has_ended;
        if !is_free {
            // A refusal takes seconds: it is tried rarely.
            if self.rng.u32(..40) != 0 && self.bug != Some(PlantedLeaseBug::LeaseIgnored) {
                return Ok(());
            }
            if self.bug == Some(PlantedLeaseBug::LeaseIgnored) {
                self.database.end_lease(name);
            }
        }
        if expected.has_ended {
            self.database.end_lease(name);
        }
        let loaded = self.nodes[node].store.load(name, Access::Write);
        let timeline = match (loaded, is_free) {
            (Err(error), false) if error.kind == ErrorKind::Busy => return Ok(()),
            (Ok(_), false) => return Err("the lease of another process was taken".into()),
            (loaded, _) => loaded.map_err(|error| format!("it is free, but: {error}"))?,
        };
        self.takeovers +=
            usize::from(expected.has_ended && expected.owner.is_some_and(|owner| owner != node));
        (expected.owner, expected.has_ended) = (Some(node), false);
        // On SQLite, the first write takes the conversation from an owner whose file lock was lost.
        let marker = format!("opened {}", self.next);
        self.next += 1;
        let marked = self.nodes[node].store.put_record(name, RecordKind::Note, "n", Some(&marker));
        marked.map_err(|error| format!("the new owner may not write: {error}"))?;
        self.expected.entry(name).or_default().record = Some(marker);
        let opened = OpenedTimeline { timeline, claim: self.database.stored_lease(name) };
        self.nodes[node].open.insert(name, opened);
        self.read(node, name)
    }

    fn release(&mut self, node: usize, name: &'static str) -> Result<(), String> {
        self.nodes[node].store.release_lease(name);
        self.nodes[node].open.remove(name);
        let expected = self.expected.entry(name).or_default();
        if expected.owner == Some(node) {
            (expected.owner, expected.has_ended) = (None, false);
        }
        Ok(())
    }

    /// The owner does not answer for longer than its lease. It does not know.
    fn pause_owner(&mut self, name: &'static str) -> Result<(), String> {
        self.expected.entry(name).or_default().has_ended = true;
        Ok(())
    }

    /// A process ends, and another one starts.
    fn restart(&mut self, node: usize) -> Result<(), String> {
        self.nodes[node] = Self::start(self.database, node);
        for expected in self.expected.values_mut().filter(|expected| expected.owner == Some(node)) {
            (expected.owner, expected.has_ended) = (None, false);
        }
        Ok(())
    }

    /// Lets a write of a process pass whose lease was taken over, with that bug.
    fn with_bug<T>(&mut self, node: usize, name: &'static str, write: impl FnOnce(&mut Node) -> T) -> T {
        let is_owner = self.expected[name].owner == Some(node);
        if self.bug != Some(PlantedLeaseBug::FencingOff) || is_owner {
            return write(&mut self.nodes[node]);
        }
        let key = TestDatabase::lease_key(name);
        let set = |lease: Option<(String, i64)>| {
            if let Some((owner, epoch)) = lease {
                let sql = format!("UPDATE lease SET owner = '{owner}', epoch = {epoch} WHERE key = {key}");
                execute_sql_directly(self.database, &sql);
            }
        };
        let stored = self.database.stored_lease(name);
        set(self.nodes[node].open.get(name).and_then(|open| open.claim.clone()));
        let result = write(&mut self.nodes[node]);
        set(stored);
        result
    }

    /// Checks the result of a write by a process that has the conversation open: only that of the owner has an effect.
    fn check_write(
        &mut self,
        node: usize,
        name: &str,
        written: &Result<(), halo_core::Error>,
    ) -> Result<bool, String> {
        let is_owner = self.expected[name].owner == Some(node);
        self.stale_writes += usize::from(!is_owner);
        match written {
            Ok(()) if is_owner => Ok(true),
            Ok(()) => Err("a write of a process that has lost its lease was accepted".into()),
            Err(error) if is_owner => Err(format!("a write of the owner was refused: {error}")),
            Err(error) if error.kind == ErrorKind::Busy => Ok(false),
            Err(error) => Err(format!("a stale write failed for another reason: {error}")),
        }
    }

    fn append(&mut self, node: usize, name: &'static str) -> Result<(), String> {
        if !self.nodes[node].open.contains_key(name) {
            return Ok(());
        }
        let (count, together) = (self.rng.u32(1..4), self.rng.bool());
        let ids: Vec<u32> = (self.next..self.next + count).collect();
        self.next += count;
        let written = self.with_bug(node, name, |node| {
            let open = node.open.get_mut(name).expect("it is open");
            let append = |at: &Timeline, ids: &[u32]| {
                let token = |id: &u32| NewToken {
                    id: TokenId(*id),
                    text: format!(" {id}"),
                    chunk_index: 0,
                    brightness: Brightness::default(),
                    kind: ContentKind::Message,
                };
                let tokens = ids.iter().map(token).collect();
                Change::Append(Append { at: at.next_position(), turn: TurnId(0), role: Role::User, tokens })
            };
            if together {
                let change = append(&open.timeline, &ids);
                return node.store.transact_all(name, &mut open.timeline, &[change]);
            }
            let change = append(&open.timeline, &ids);
            node.store.transact(name, &mut open.timeline, &change, Durability::Deferred).map(drop)
        });
        if self.check_write(node, name, &written)? {
            let text: String = ids.iter().map(|id| format!(" {id}")).collect();
            self.expected.entry(name).or_default().text.push_str(&text);
        }
        self.read(node, name)
    }

    fn write_record(&mut self, node: usize, name: &'static str) -> Result<(), String> {
        if !self.nodes[node].open.contains_key(name) {
            return Ok(());
        }
        let value = format!("record {}", self.next);
        self.next += 1;
        let written = self
            .with_bug(node, name, |node| node.store.put_record(name, RecordKind::Note, "n", Some(&value)));
        if self.check_write(node, name, &written)? {
            self.expected.entry(name).or_default().record = Some(value);
        }
        self.read(node, name)
    }

    /// Every process reads what was written last.
    fn read(&mut self, node: usize, name: &str) -> Result<(), String> {
        let store = &mut self.nodes[node].store;
        let (expected, failed) = (&self.expected[name], |error: halo_core::Error| error.to_string());
        let timeline = store.load(name, Access::Read).map_err(failed)?;
        let text: String = timeline.chunks().map(|chunk| chunk.text()).collect();
        if text != expected.text {
            return Err(format!("it has the text {text:?} instead of {:?}", expected.text));
        }
        let record = store.record(name, RecordKind::Note, "n").map_err(failed)?.map(|record| record.value);
        if record != expected.record {
            return Err(format!("its record is {record:?} instead of {:?}", expected.record));
        }
        Ok(())
    }
}

fn run(
    database: &TestDatabase,
    seed: u64,
    operations: usize,
    bug: Option<PlantedLeaseBug>,
) -> (Result<(), String>, usize, usize) {
    let mut history = History::new(database, seed, bug);
    let result = history.run(operations);
    (result, history.stale_writes, history.takeovers)
}

fn check_histories(new_database: impl Fn() -> TestDatabase) {
    // 10,000 and more in `make soak`.
    let operations =
        std::env::var("HALO_HISTORY_OPERATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(600);
    for seed in 0..2 {
        let (result, stale_writes, takeovers) = run(&new_database(), seed, operations, None);
        result.unwrap_or_else(|what| panic!("seed {seed}: {what}"));
        assert!(
            stale_writes > 5 && takeovers > 5,
            "seed {seed}: {stale_writes} stale, {takeovers} taken over"
        );
    }
    for bug in [PlantedLeaseBug::FencingOff, PlantedLeaseBug::LeaseIgnored] {
        let (result, ..) = run(&new_database(), 1, 600, Some(bug));
        let found = result.expect_err("the planted bug is found");
        let expected = match bug {
            PlantedLeaseBug::FencingOff => "a write of a process that has lost its lease was accepted",
            PlantedLeaseBug::LeaseIgnored => "the lease of another process was taken",
        };
        assert!(found.ends_with(expected), "{bug:?}: {found}");
    }
}

#[test]
fn lease_histories_are_linearizable_on_sqlite() {
    check_histories(sqlite);
}

#[test]
fn lease_histories_are_linearizable_on_postgres() {
    check_histories(postgres);
}
