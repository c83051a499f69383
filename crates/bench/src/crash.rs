//! Durability: a child process applies random changes and is killed at any moment; a disk loses writes that were not
//! synced, torn and out of order; a disk is full at every possible write. Each time the store must open, contain
//! every acknowledged change, and be in the state of a history that never crashed.

use crate::faulty_vfs::{self, FaultyVolume};
use crate::random_changes::{self, BenchRng};
use halo_core::store::{Access, Durability, RecordKind, Store};
use halo_core::timeline::{StateHash, Timeline};
use halo_core::{Error, ErrorKind};
use halo_store::database::{Database, StoreLocation};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct CrashBenchReport {
    pub kills: u64,
    /// Changes that were acknowledged before the kills.
    pub acknowledged: u64,
    /// Acknowledged changes that were missing afterwards.
    pub lost: u64,
    /// States that differed from the history without a crash, or did not open.
    pub hash_mismatches: u64,
    /// 99th percentile of opening the store, in milliseconds.
    pub open_ms_p99: f64,
    pub power_cuts: u64,
    /// Lost changes that were acknowledged as synced.
    pub power_lost: u64,
    /// States that no history has had.
    pub power_mismatches: u64,
    /// Writes at which the disk was full.
    pub full_disks: u64,
    /// Times that a full disk lost or changed data, or was not reported.
    pub full_disk_errors: u64,
}

impl CrashBenchReport {
    #[must_use]
    pub fn is_clean(&self) -> bool {
        [self.lost, self.hash_mismatches, self.power_lost, self.power_mismatches, self.full_disk_errors]
            == [0; 5]
    }
}

const CONVERSATION: &str = "a life";

/// The expected history, which never crashes, computed as far as it is needed.
struct ReferenceTimeline {
    seed: u64,
    count: u64,
    timeline: Timeline,
}

impl ReferenceTimeline {
    fn new(seed: u64) -> Self {
        Self { seed, count: 0, timeline: Timeline::new() }
    }

    /// The expected state after `count` changes.
    fn hash_after(&mut self, count: u64) -> StateHash {
        while self.count < count {
            let (change, _) = random_changes::next_change(self.seed, self.count, &self.timeline);
            self.timeline.apply(&change).expect("it follows from the state");
            self.count += 1;
        }
        assert_eq!(self.count, count, "the history only goes forward");
        self.timeline.state_hash()
    }
}

/// The number of changes that the store has of the conversation.
fn change_count(store: &mut Database) -> Result<u64, Error> {
    Ok(store.list_conversations()?.first().map_or(0, |s| s.changes))
}

/// The child: continues the history from the state of the store, and prints a line for each acknowledged change.
pub fn run_child(path: &Path, seed: u64) -> Result<(), Error> {
    let mut store = Database::open(&StoreLocation::Sqlite(path.to_owned()))?;
    let mut timeline = store.load(CONVERSATION, Access::Write)?;
    let mut count = change_count(&mut store)?;
    let mut out = io::stdout().lock();
    loop {
        let (change, durability) = random_changes::next_change(seed, count, &timeline);
        store.transact(CONVERSATION, &mut timeline, &change, durability)?;
        count += 1;
        // The parent is gone.
        if writeln!(out, "{count}").and_then(|()| out.flush()).is_err() {
            return Ok(());
        }
        if count.is_multiple_of(7) {
            timeline.unload_pruned();
        }
    }
}

/// The most changes that a child is left to acknowledge before it is killed.
const MAX_CHANGES_BEFORE_KILL: u64 = 20;

/// Kills `kills` children, one after the other; `command` starts one on a file, with a seed.
pub fn kill_children(
    kills: u64,
    folder: &Path,
    seed: u64,
    command: &dyn Fn(&Path, u64) -> Command,
    progress: &mut dyn FnMut(u64),
    report: &mut CrashBenchReport,
) -> io::Result<()> {
    let mut random = BenchRng(seed);
    let mut opened = Vec::new();
    let (mut history_seed, mut reference) = (seed, ReferenceTimeline::new(seed));
    let mut path = folder.join("life-0.db");
    for n in 0..kills {
        // A new history now and then keeps them short.
        if n > 0 && n % 40 == 0 {
            history_seed = random.next_u64();
            (reference, path) = (ReferenceTimeline::new(history_seed), folder.join(format!("life-{n}.db")));
        }
        let mut child = command(&path, history_seed).stdout(Stdio::piped()).spawn()?;
        let out = child.stdout.take().expect("it was piped");
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                // A truncated last line reports fewer acknowledged changes, never more.
                let _ = line.parse::<u64>().map(|count| sender.send(count));
            }
        });
        let mut acknowledged = 0;
        // Half of them are killed while they open the store, half after some changes, however slow the machine is.
        if random.below(2) == 0 {
            std::thread::sleep(Duration::from_micros(random.below(8_000)));
        } else {
            let changes = 1 + random.below(MAX_CHANGES_BEFORE_KILL) as usize;
            acknowledged = receiver.iter().take(changes).fold(0, u64::max);
            std::thread::sleep(Duration::from_micros(random.below(2_000)));
        }
        child.kill()?;
        let status = child.wait()?;
        // The channel ends with the output of the child.
        acknowledged = receiver.iter().fold(acknowledged, u64::max);
        report.kills += 1;
        if status.code().is_some() {
            // The child ended by itself before it was killed: it could not continue from the state of the store.
            report.hash_mismatches += 1;
        }
        report.acknowledged += acknowledged.saturating_sub(reference.count);
        let asked = Instant::now();
        let state = reopen(&StoreLocation::Sqlite(path.clone()));
        opened.push(asked.elapsed().as_secs_f64() * 1e3);
        match state {
            Ok((count, hash)) if count >= acknowledged.max(reference.count) => {
                report.hash_mismatches += u64::from(reference.hash_after(count) != hash);
            }
            Ok((count, _)) => report.lost += acknowledged.max(reference.count) - count,
            Err(_) => report.hash_mismatches += 1,
        }
        progress(n + 1);
    }
    opened.sort_by(f64::total_cmp);
    report.open_ms_p99 = opened.get(opened.len() * 99 / 100).copied().unwrap_or_default();
    Ok(())
}

fn reopen(location: &StoreLocation) -> Result<(u64, StateHash), Error> {
    let mut store = Database::open(location)?;
    stored_state(&mut store)
}

/// The number of changes in the store and its state hash; replaying its log must give the same.
fn stored_state(store: &mut Database) -> Result<(u64, StateHash), Error> {
    let count = change_count(store)?;
    if count == 0 {
        return Ok((0, Timeline::new().state_hash()));
    }
    let hash = store.load(CONVERSATION, Access::Read)?.state_hash();
    let replayed_hash = store.replay_log(CONVERSATION)?.state_hash();
    if replayed_hash != hash {
        return Err(Error::internal("reading back", "log and state differ"));
    }
    Ok((count, hash))
}

fn open_faulty(path: &Path) -> Result<Database, Error> {
    Database::open_with_vfs(path, faulty_vfs::VFS_NAME)
}

/// Applies changes on a disk that loses power again and again: synced changes must be there, and every state must be
/// one that the history has had.
pub fn cut_power(cuts: u64, seed: u64, progress: &mut dyn FnMut(u64), report: &mut CrashBenchReport) {
    let mut random = BenchRng(seed);
    for n in 0..cuts {
        let history_seed = random.next_u64();
        let volume = FaultyVolume::new();
        let path = &volume.database_path();
        let (mut safe, mut count) = (0, 0);
        let mut hashes = vec![Timeline::new().state_hash()];
        for _ in 0..3 {
            let lived = (|| -> Result<(), Error> {
                let mut store = open_faulty(path)?;
                let mut timeline = store.load(CONVERSATION, Access::Write)?;
                for _ in 0..random.below(60) {
                    let (change, durability) = random_changes::next_change(history_seed, count, &timeline);
                    store.transact(CONVERSATION, &mut timeline, &change, durability)?;
                    count += 1;
                    hashes.push(timeline.state_hash());
                    safe = if durability == Durability::Immediate { count } else { safe };
                }
                // The program gets no chance to close anything.
                std::mem::forget(store);
                Ok(())
            })();
            report.power_mismatches += u64::from(lived.is_err());
            volume.lose_power(&mut random);
            report.power_cuts += 1;
            match open_faulty(path).and_then(|mut store| stored_state(&mut store)) {
                Ok((there, hash)) => {
                    report.power_lost += safe.saturating_sub(there);
                    report.power_mismatches += u64::from(hashes.get(there as usize) != Some(&hash));
                    count = there;
                    safe = safe.min(there);
                    hashes.truncate(there as usize + 1);
                }
                Err(_) => report.power_mismatches += 1,
            }
        }
        progress(n + 1);
    }
}

/// Applies changes on a disk that is full at every few writes, and whose owner frees some space each time. Returns how often
/// that was needed, and whether every commit succeeded and is stored.
#[must_use]
pub fn fill_disk_that_can_be_freed(changes: u64, seed: u64) -> (u64, bool) {
    let volume = Arc::new(FaultyVolume::new());
    let path = &volume.database_path();
    let freed = Arc::new(AtomicU64::new(0));
    let lived = (|| -> Result<StateHash, Error> {
        let mut store = open_faulty(path)?;
        let (count, full) = (Arc::clone(&freed), Arc::clone(&volume));
        store.set_disk_full_handler(Arc::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
            full.set_writes_left(Some(40));
            true
        }));
        let mut timeline = store.load(CONVERSATION, Access::Write)?;
        volume.set_writes_left(Some(10));
        for count in 0..changes {
            let (change, _) = random_changes::next_change(seed, count, &timeline);
            store.transact(CONVERSATION, &mut timeline, &change, Durability::Immediate)?;
            store.put_record(CONVERSATION, RecordKind::Setting, "count", Some(&count.to_string()))?;
        }
        volume.set_writes_left(None);
        drop(store);
        stored_state(&mut open_faulty(path)?).map(|(_, hash)| hash)
    })();
    let expected = ReferenceTimeline::new(seed).hash_after(changes);
    (freed.load(Ordering::SeqCst), lived == Ok(expected))
}

/// Applies the same changes on a disk that is full at the first write, at the second, and so on until it is not. Each
/// time an error must be returned, nothing may be lost, and with free space the history must continue unchanged.
pub fn fill_disk(changes_each: u64, seed: u64, progress: &mut dyn FnMut(u64), report: &mut CrashBenchReport) {
    let mut expected = ReferenceTimeline::new(seed);
    let expected = expected.hash_after(changes_each);
    for room in 0.. {
        let volume = FaultyVolume::new();
        let path = &volume.database_path();
        let mut disk_full_reported = false;
        // The file exists before the disk is full: creating it fails with another error.
        let lived = (|| -> Result<StateHash, Error> {
            let mut store = open_faulty(path)?;
            let mut timeline = store.load(CONVERSATION, Access::Write)?;
            let _ = volume.take_write_count();
            volume.set_writes_left(Some(room));
            let mut count = 0;
            while count < changes_each {
                let (change, _) = random_changes::next_change(seed, count, &timeline);
                let before = timeline.state_hash();
                match store.transact(CONVERSATION, &mut timeline, &change, Durability::Immediate) {
                    Ok(_) => count += 1,
                    Err(error) if disk_full_reported => return Err(error),
                    Err(error) => {
                        let full = error.kind == ErrorKind::Unavailable;
                        if !full || timeline.state_hash() != before {
                            return Err(error);
                        }
                        (disk_full_reported, _) = (true, volume.set_writes_left(None));
                    }
                }
            }
            volume.set_writes_left(None);
            drop(store);
            let mut store = open_faulty(path)?;
            stored_state(&mut store).map(|(_, hash)| hash)
        })();
        let enough = volume.take_write_count() <= room;
        report.full_disk_errors += u64::from(lived.as_ref().ok() != Some(&expected));
        report.full_disks += u64::from(!enough);
        progress(room);
        if enough && !disk_full_reported {
            return;
        }
    }
}
