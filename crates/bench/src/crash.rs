//! What a crash costs: nothing. A child lives a random life and is killed at any moment; a disk loses what was
//! not synced, torn and out of order; a disk is full at every write there is. Each time the store opens, all that
//! was acknowledged is there, and the state is that of a life that never crashed.

use crate::faulty_vfs;
use crate::random_changes::{self, BenchRng};
use halo_core::store::{Access, Durability, Store};
use halo_core::timeline::{StateHash, Timeline};
use halo_core::{Error, ErrorKind};
use halo_store::database::{Database, StoreLocation};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct CrashBenchReport {
    pub kills: u64,
    /// Changes that were acknowledged before the kills.
    pub acknowledged: u64,
    /// Acknowledged changes that were gone afterwards.
    pub lost: u64,
    /// States that differed from those of the life that never crashed, or did not open.
    pub hash_mismatches: u64,
    /// What ninety-nine openings in a hundred took at most, in milliseconds.
    pub open_ms_p99: f64,
    /// Disks that lost power.
    pub power_cuts: u64,
    /// Of what was acknowledged as safe, lost.
    pub power_lost: u64,
    /// States that no life ever had.
    pub power_mismatches: u64,
    /// Writes at which the disk was full.
    pub full_disks: u64,
    /// Times that a full disk lost or changed anything, or was not told of.
    pub full_disk_errors: u64,
}

impl CrashBenchReport {
    /// Whether nothing was lost.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        [self.lost, self.hash_mismatches, self.power_lost, self.power_mismatches, self.full_disk_errors]
            == [0; 5]
    }
}

const CONVERSATION: &str = "a life";

/// A life that never crashes, lived as far as it is asked for.
struct ReferenceTimeline {
    seed: u64,
    count: u64,
    timeline: Timeline,
}

impl ReferenceTimeline {
    fn new(seed: u64) -> Self {
        Self { seed, count: 0, timeline: Timeline::new() }
    }

    /// The state after so many changes.
    fn hash_after(&mut self, count: u64) -> StateHash {
        while self.count < count {
            let (change, _) = random_changes::next_change(self.seed, self.count, &self.timeline);
            self.timeline.apply(&change).expect("it follows from the state");
            self.count += 1;
        }
        assert_eq!(self.count, count, "a life is not lived backwards");
        self.timeline.state_hash()
    }
}

/// How many changes the store has of the conversation.
fn change_count(store: &mut Database) -> Result<u64, Error> {
    Ok(store.list_conversations()?.first().map_or(0, |s| s.changes))
}

/// What the child does: lives on from where the store is, and says each time that a change was acknowledged.
pub fn run_child(path: &Path, seed: u64) -> Result<(), Error> {
    let mut store = Database::open(&StoreLocation::Sqlite(path.to_owned()))?;
    let mut timeline = store.load(CONVERSATION, Access::Write)?;
    let mut count = change_count(&mut store)?;
    let mut out = io::stdout().lock();
    loop {
        let (change, durability) = random_changes::next_change(seed, count, &timeline);
        store.transact(CONVERSATION, &mut timeline, &change, durability)?;
        count += 1;
        // Nobody listens any more: the parent has gone.
        if writeln!(out, "{count}").and_then(|()| out.flush()).is_err() {
            return Ok(());
        }
        if count.is_multiple_of(7) {
            timeline.unload_pruned();
        }
    }
}

/// Kills `kills` children, one after the other; `command` starts one on a file, with a seed.
pub fn kill_children(
    kills: u64,
    folder: &Path,
    seed: u64,
    command: &dyn Fn(&Path, u64) -> Command,
    progress: &mut dyn FnMut(u64),
    report: &mut CrashBenchReport,
) -> io::Result<()> {
    let mut dice = BenchRng(seed);
    let mut opened = Vec::new();
    let (mut life, mut shadow) = (seed, ReferenceTimeline::new(seed));
    let mut path = folder.join("life-0.db");
    for n in 0..kills {
        // A new life now and then, or they grow long.
        if n > 0 && n % 40 == 0 {
            life = dice.next_u64();
            (shadow, path) = (ReferenceTimeline::new(life), folder.join(format!("life-{n}.db")));
        }
        let mut child = command(&path, life).stdout(Stdio::piped()).spawn()?;
        let out = child.stdout.take().expect("it was piped");
        // Half are killed while they open, half later.
        let longest = if dice.below(2) == 0 { 8_000 } else { 40_000 };
        let wait = Duration::from_micros(dice.below(longest));
        let reader = std::thread::spawn(move || {
            let mut last = 0;
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                // A last line that is cut off says less than was acknowledged: never more.
                last = line.parse().unwrap_or(last).max(last);
            }
            last
        });
        std::thread::sleep(wait);
        child.kill()?;
        let status = child.wait()?;
        let acknowledged: u64 = reader.join().expect("it only reads");
        report.kills += 1;
        if status.code().is_some() {
            // It ended by itself, before it was killed: it found the store in a state that it could not go on from.
            report.hash_mismatches += 1;
        }
        report.acknowledged += acknowledged.saturating_sub(shadow.count);
        let asked = Instant::now();
        let state = reopen(&StoreLocation::Sqlite(path.clone()));
        opened.push(asked.elapsed().as_secs_f64() * 1e3);
        match state {
            Ok((count, hash)) if count >= acknowledged.max(shadow.count) => {
                report.hash_mismatches += u64::from(shadow.hash_after(count) != hash);
            }
            Ok((count, _)) => report.lost += acknowledged.max(shadow.count) - count,
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

/// How far the store's life has come, and its state; its log must tell the same.
fn stored_state(store: &mut Database) -> Result<(u64, StateHash), Error> {
    let count = change_count(store)?;
    if count == 0 {
        return Ok((0, Timeline::new().state_hash()));
    }
    let hash = store.load(CONVERSATION, Access::Read)?.state_hash();
    let told = store.replay_log(CONVERSATION)?.state_hash();
    if told != hash {
        return Err(Error::internal("reading back", "log and state differ"));
    }
    Ok((count, hash))
}

fn open_faulty(path: &Path) -> Result<Database, Error> {
    Database::open_with_vfs(path, faulty_vfs::VFS_NAME)
}

/// Lives on a disk whose power is cut, again and again: what was to be safe at once is there, and what is there
/// is a state that was.
pub fn cut_power(cuts: u64, seed: u64, progress: &mut dyn FnMut(u64), report: &mut CrashBenchReport) {
    let mut dice = BenchRng(seed);
    let path = Path::new("/halo.db");
    for n in 0..cuts {
        let life = dice.next_u64();
        faulty_vfs::reset_disk();
        let (mut safe, mut count) = (0, 0);
        let mut hashes = vec![Timeline::new().state_hash()];
        for _ in 0..3 {
            let lived = (|| -> Result<(), Error> {
                let mut store = open_faulty(path)?;
                let mut timeline = store.load(CONVERSATION, Access::Write)?;
                for _ in 0..dice.below(60) {
                    let (change, durability) = random_changes::next_change(life, count, &timeline);
                    store.transact(CONVERSATION, &mut timeline, &change, durability)?;
                    count += 1;
                    hashes.push(timeline.state_hash());
                    safe = if durability == Durability::Immediate { count } else { safe };
                }
                // The program does not get to close anything.
                std::mem::forget(store);
                Ok(())
            })();
            report.power_mismatches += u64::from(lived.is_err());
            faulty_vfs::lose_power(&mut dice);
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

/// Lives the same life on a disk that is full at the first write, at the second, and so on until it no longer is.
/// Each time an error says so, nothing is lost, and with room again life goes on as if nothing had been.
pub fn fill_disk(changes_each: u64, seed: u64, progress: &mut dyn FnMut(u64), report: &mut CrashBenchReport) {
    let path = Path::new("/halo.db");
    let mut wanted = ReferenceTimeline::new(seed);
    let wanted = wanted.hash_after(changes_each);
    for room in 0.. {
        faulty_vfs::reset_disk();
        let mut told = false;
        // The file is there before the disk fills up: making one is another matter, and told of at once.
        let lived = (|| -> Result<StateHash, Error> {
            let mut store = open_faulty(path)?;
            let mut timeline = store.load(CONVERSATION, Access::Write)?;
            let _ = faulty_vfs::take_write_count();
            faulty_vfs::set_writes_left(Some(room));
            let mut count = 0;
            while count < changes_each {
                let (change, _) = random_changes::next_change(seed, count, &timeline);
                let before = timeline.state_hash();
                match store.transact(CONVERSATION, &mut timeline, &change, Durability::Immediate) {
                    Ok(_) => count += 1,
                    Err(error) if told => return Err(error),
                    Err(error) => {
                        let full = error.kind == ErrorKind::Unavailable;
                        if !full || timeline.state_hash() != before {
                            return Err(error);
                        }
                        (told, _) = (true, faulty_vfs::set_writes_left(None));
                    }
                }
            }
            faulty_vfs::set_writes_left(None);
            drop(store);
            let mut store = open_faulty(path)?;
            stored_state(&mut store).map(|(_, hash)| hash)
        })();
        let enough = faulty_vfs::take_write_count() <= room;
        report.full_disk_errors += u64::from(lived.as_ref().ok() != Some(&wanted));
        report.full_disks += u64::from(!enough);
        progress(room);
        if enough && !told {
            return;
        }
    }
}
