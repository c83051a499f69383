//! What keeping a conversation costs: opening it, the live context, appending, pruning, returning, saving
//! brightness, bytes and memory; at a million tokens and at ten.
//!
//! The baseline is the way of the founding documents in SQLite: a row for each token, live and dead. Times of
//! writes are without the sync, which is measured beside them: it belongs to the disk.

use crate::core::{CHUNK, CHUNKS_PER_TURN};
use crate::lives::Dice;
use crate::measure::call_ns;
use halo_core::change::{
    Append, Change, Extent, Leave, NewToken, Return, Score, Scored, TallyChange, WhyLeft, WhyReturned,
};
use halo_core::seams::{Access, Durability, SeamError, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, Role, TokenId, TurnId, Voice};
use halo_store::database::{Database, Location};
use rusqlite::Connection;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Tokens ever spoken.
    pub tokens: usize,
    /// Tokens in the window.
    pub live: usize,
    /// Opening the file and the conversation.
    pub open_ms: f64,
    /// The live context: ids, slots and text.
    pub live_ms: f64,
    /// Appending sixteen tokens, written behind.
    pub append_ms: f64,
    /// Pruning a chunk of 64, written behind.
    pub prune_ms: f64,
    /// Returning it; its tokens are read from the store.
    pub resurrect_ms: f64,
    /// Saving the brightness of all that is live.
    pub brightness_ms: f64,
    /// One sync of this disk.
    pub sync_ms: f64,
    /// Pruning a chunk, safe at once.
    pub durable_prune_ms: f64,
    /// Saving all brightness, safe at once.
    pub durable_brightness_ms: f64,
    /// Bytes on disk.
    pub bytes: u64,
    /// The most memory that this process ever held, in MiB; none where the system does not say.
    pub memory_mib: Option<f64>,
    /// The same with a row for each token, of at most a million tokens.
    pub rows: Rows,
}

/// A row for each token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// Tokens in its table.
    pub tokens: usize,
    /// Reading what is live.
    pub live_ms: f64,
    /// Pruning a chunk.
    pub prune_ms: f64,
    /// Saving all brightness.
    pub brightness_ms: f64,
}

const NAME: &str = "main";

/// Fills a store with a conversation of `tokens` tokens, of which about `live` are live, spread over all of it.
///
/// # Errors
/// When the store fails.
pub fn build(
    path: &Path,
    tokens: usize,
    live: usize,
    progress: &mut dyn FnMut(u64),
) -> Result<(), SeamError> {
    let mut store = Database::open(&Location::Sqlite(path.to_owned()))?;
    let mut timeline = store.load(NAME, Access::Write)?;
    let (chunks, keep) = (tokens / CHUNK, live / CHUNK);
    let mut dice = Dice(7);
    for turn in 0..chunks / CHUNKS_PER_TURN {
        let role = if turn % 2 == 0 { Role::User } else { Role::Assistant };
        let tokens = (0..CHUNK * CHUNKS_PER_TURN).map(|n| token(&mut dice, (n / CHUNK) as u32)).collect();
        let id = TurnId(turn as u32);
        let mut changes =
            vec![Change::Append(Append { at: timeline.next_position(), turn: id, role, tokens })];
        let dead = (0..CHUNKS_PER_TURN).filter(|s| {
            let i = turn * CHUNKS_PER_TURN + s;
            (i + 1) * keep / chunks == i * keep / chunks
        });
        let dead: Vec<Leave> = dead.map(|s| leave(ChunkId::new(role, id, s as u32))).collect();
        if !dead.is_empty() {
            changes.push(Change::Prune(dead));
        }
        store.transact(NAME, &mut timeline, &Change::Batch(changes), Durability::Behind)?;
        if turn % 256 == 0 {
            timeline.release_dead();
            progress(timeline.len() as u64);
        }
    }
    Ok(())
}

fn token(dice: &mut Dice, sentence: u32) -> NewToken {
    let id = TokenId(dice.below(49_152) as u32);
    NewToken { id, text: " word".into(), sentence, brightness: Brightness(10_000.0), voice: Voice::Speaker }
}

fn leave(chunk: ChunkId) -> Leave {
    Leave { chunk, extent: Extent::Whole, why: WhyLeft::Manual }
}

/// Measures a store that was built before, in this process alone; `time` is what each figure may take at least.
///
/// # Errors
/// When the store fails.
pub fn measure(path: &Path, time: Duration) -> Result<Report, SeamError> {
    let location = Location::Sqlite(path.to_owned());
    let open = || -> Result<(Database, Timeline), SeamError> {
        let mut store = Database::open(&location)?;
        let timeline = store.load(NAME, Access::Write)?;
        Ok((store, timeline))
    };
    drop(open()?);
    let open_ns = call_ns(time, || (), |()| open());
    let (mut store, mut timeline) = open()?;
    let mut report = Report {
        tokens: timeline.len(),
        live: timeline.live_len(),
        open_ms: open_ns / 1e6,
        ..Report::default()
    };
    let live = call_ns(
        time,
        || (),
        |()| {
            let view = timeline.view(0);
            (view.ids(), view.positions(), view.text())
        },
    );
    report.live_ms = live / 1e6;
    report.bytes = store.bytes()?;
    let middle: Vec<ChunkId> = timeline.live_chunks().map(|c| c.id()).collect();
    let middle = middle[middle.len() / 2];
    (report.prune_ms, report.resurrect_ms) =
        there_and_back(&mut store, &mut timeline, middle, Durability::Behind, time)?;
    (report.durable_prune_ms, _) = there_and_back(&mut store, &mut timeline, middle, Durability::Now, time)?;
    report.brightness_ms = brightness(&mut store, &mut timeline, Durability::Behind, time)?;
    report.durable_brightness_ms = brightness(&mut store, &mut timeline, Durability::Now, time)?;
    report.append_ms = append(&mut store, &mut timeline, time)?;
    report.sync_ms = sync(path.parent().unwrap_or(Path::new(".")), time);
    report.memory_mib = peak_memory();
    drop((store, timeline));
    report.rows = rows(path.with_extension("rows").as_path(), &report, time);
    Ok(report)
}

/// The tenth fastest of a hundred, of calls that cannot be repeated without their opposite.
fn tenth(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 10].as_secs_f64() * 1e3
}

fn there_and_back(
    store: &mut Database,
    timeline: &mut Timeline,
    chunk: ChunkId,
    durability: Durability,
    least: Duration,
) -> Result<(f64, f64), SeamError> {
    let prune = Change::Prune(vec![leave(chunk)]);
    let back = Return { chunk, extent: Extent::Whole, brightness: None, why: WhyReturned::Manual };
    let back = Change::Resurrect(vec![back]);
    let (mut away, mut again) = (Vec::new(), Vec::new());
    let begin = Instant::now();
    while away.len() < 15 || begin.elapsed() < least {
        let start = Instant::now();
        store.transact(NAME, timeline, &prune, durability)?;
        away.push(start.elapsed());
        timeline.release_dead();
        let start = Instant::now();
        store.transact(NAME, timeline, &back, durability)?;
        again.push(start.elapsed());
    }
    Ok((tenth(away), tenth(again)))
}

fn brightness(
    store: &mut Database,
    timeline: &mut Timeline,
    durability: Durability,
    least: Duration,
) -> Result<f64, SeamError> {
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < 15 || begin.elapsed() < least {
        let mut score = Score::default();
        for chunk in timeline.live_chunks() {
            for run in chunk.live_runs() {
                let brightness = chunk.brightness(run).iter().map(|b| Brightness(b.0 - 1.0)).collect();
                score.runs.push(Scored { start: run.start, brightness });
            }
            score.tallies.push((chunk.id(), TallyChange { votes: 1, mass: 1 << 20, looks: 1 }));
        }
        let score = Change::Score(score);
        let start = Instant::now();
        store.transact(NAME, timeline, &score, durability)?;
        times.push(start.elapsed());
    }
    Ok(tenth(times))
}

fn append(store: &mut Database, timeline: &mut Timeline, least: Duration) -> Result<f64, SeamError> {
    let mut times = Vec::new();
    let mut dice = Dice(1);
    let (turn, begin) = (timeline.next_turn(), Instant::now());
    while times.len() < 15 || begin.elapsed() < least {
        let sentence = (times.len() / 4) as u32;
        let tokens = (0..16).map(|_| token(&mut dice, sentence)).collect();
        let append = Append { at: timeline.next_position(), turn, role: Role::User, tokens };
        let start = Instant::now();
        store.transact(NAME, timeline, &Change::Append(append), Durability::Behind)?;
        times.push(start.elapsed());
    }
    Ok(tenth(times))
}

/// One page behind a file, and a sync.
fn sync(folder: &Path, least: Duration) -> f64 {
    let path = folder.join("sync");
    let Ok(mut file) = File::create(&path) else { return f64::NAN };
    let ns = call_ns(least, || (), |()| file.write_all(&[7; 4096]).and_then(|()| file.sync_data()));
    let _ = fs::remove_file(&path);
    ns / 1e6
}

/// The most memory that this process ever held, where the system tells.
fn peak_memory() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<f64>().ok().map(|kib| kib / 1024.0)
}

/// The same work on a table with a row for each token.
fn rows(path: &Path, report: &Report, least: Duration) -> Rows {
    let done = (|| -> rusqlite::Result<Rows> {
        let tokens = report.tokens.min(1_000_000);
        let (chunks, keep) = (tokens / CHUNK, report.live / CHUNK);
        let mut db = Connection::open(path)?;
        db.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
        db.pragma_update(None, "synchronous", "NORMAL")?;
        db.execute_batch(
            "CREATE TABLE token (position INTEGER PRIMARY KEY, chunk INTEGER, id INTEGER, text TEXT, \
             brightness REAL, live INTEGER); CREATE INDEX live ON token (position) WHERE live = 1; \
             CREATE INDEX chunk ON token (chunk);",
        )?;
        let fill = db.transaction()?;
        {
            let mut insert = fill.prepare("INSERT INTO token VALUES (?1, ?2, ?3, ' word', 9990, ?4)")?;
            for position in 0..chunks * CHUNK {
                let chunk = position / CHUNK;
                let live = (chunk + 1) * keep / chunks != chunk * keep / chunks;
                insert.execute((position as i64, chunk as i64, position as i64 % 49_152, live))?;
            }
        }
        fill.commit()?;
        let live_ns = call_ns(
            least,
            || (),
            |()| -> rusqlite::Result<usize> {
                let mut select = db.prepare_cached(
                    "SELECT position, id, text FROM token WHERE live = 1 ORDER BY position",
                )?;
                let read = select.query_map([], |r| {
                    Ok((r.get::<_, i64>(0)?, r.get::<_, i64>(1)?, r.get::<_, String>(2)?))
                })?;
                Ok(read.filter_map(Result::ok).count())
            },
        );
        let middle = db.query_row(
            "SELECT chunk FROM token WHERE live = 1 LIMIT 1 OFFSET ?1",
            [report.live as i64 / 2],
            |r| r.get::<_, i64>(0),
        )?;
        let mut on = false;
        let prune_ns = call_ns(
            least,
            || (),
            |()| {
                on = !on;
                db.execute("UPDATE token SET live = ?1 WHERE chunk = ?2", (!on, middle))
            },
        );
        let brightness_ns = call_ns(
            least,
            || (),
            |()| db.execute("UPDATE token SET brightness = brightness - 1 WHERE live = 1", []),
        );
        Ok(Rows {
            tokens,
            live_ms: live_ns / 1e6,
            prune_ms: prune_ns / 1e6,
            brightness_ms: brightness_ns / 1e6,
        })
    })();
    done.unwrap_or_default()
}
