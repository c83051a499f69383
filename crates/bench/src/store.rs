//! The store: opening a conversation, the live context, appending, pruning, resurrecting, saving brightness, bytes
//! and memory; at a million tokens and at ten.
//!
//! The baseline is the schema of the founding documents in SQLite: one row per token, live and pruned. Times of
//! writes exclude the sync, which is measured separately: it depends on the disk.

use crate::core::{CHUNK_TOKENS, CHUNKS_PER_TURN};
use crate::random_changes::BenchRng;
use crate::timing::p10_call_ns;
use halo_core::Error;
use halo_core::change::{
    Append, BrightnessRun, Change, Extent, NewToken, PruneReason, Pruned, ResurrectReason, Resurrected,
    Score, TallyDelta,
};
use halo_core::store::{Access, Durability, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Role, TokenId, TurnId};
use halo_store::database::{Database, StoreLocation};
use rusqlite::Connection;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoreBenchReport {
    pub tokens: usize,
    /// Tokens in the context window.
    pub live: usize,
    /// Tokens whose text is in memory when the conversation is open.
    pub loaded: usize,
    /// Opening the file and the conversation.
    pub open_ms: f64,
    /// The live context: ids, slots and text.
    pub live_ms: f64,
    /// Appending sixteen tokens, without a sync.
    pub append_ms: f64,
    /// Pruning a chunk of 64 tokens, without a sync.
    pub prune_ms: f64,
    /// Resurrecting it; its tokens are read from the store.
    pub resurrect_ms: f64,
    /// Saving the brightness of all live tokens.
    pub brightness_ms: f64,
    /// One sync of this disk.
    pub sync_ms: f64,
    /// Pruning a chunk, synced.
    pub durable_prune_ms: f64,
    /// Saving all brightness, synced.
    pub durable_brightness_ms: f64,
    pub bytes: u64,
    /// Peak memory of this process in MiB; none if the system does not report it.
    pub memory_mib: Option<f64>,
    /// The baseline, with at most a million tokens.
    pub token_rows: TokenRowBaseline,
}

/// The baseline: one row per token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenRowBaseline {
    pub tokens: usize,
    pub live_ms: f64,
    /// The live context without an index of the live rows.
    pub scan_ms: f64,
    pub prune_ms: f64,
    pub brightness_ms: f64,
}

const CONVERSATION: &str = "main";

/// Fills a store with a conversation of `tokens` tokens, of which about `live` are live, spread over all of it.
pub fn build_store(
    path: &Path,
    tokens: usize,
    live: usize,
    progress: &mut dyn FnMut(u64),
) -> Result<(), Error> {
    let mut store = Database::open(&StoreLocation::Sqlite(path.to_owned()))?;
    let mut timeline = store.load(CONVERSATION, Access::Write)?;
    let (chunks, keep) = (tokens / CHUNK_TOKENS, live / CHUNK_TOKENS);
    let mut dice = BenchRng(7);
    for turn in 0..chunks / CHUNKS_PER_TURN {
        let role = if turn % 2 == 0 { Role::User } else { Role::Assistant };
        let tokens = (0..CHUNK_TOKENS * CHUNKS_PER_TURN)
            .map(|n| random_token(&mut dice, (n / CHUNK_TOKENS) as u32))
            .collect();
        let id = TurnId(turn as u32);
        let mut changes =
            vec![Change::Append(Append { at: timeline.next_position(), turn: id, role, tokens })];
        let pruned = (0..CHUNKS_PER_TURN).filter(|s| {
            let i = turn * CHUNKS_PER_TURN + s;
            (i + 1) * keep / chunks == i * keep / chunks
        });
        let pruned: Vec<Pruned> = pruned.map(|s| manual_prune(ChunkId::new(role, id, s as u32))).collect();
        if !pruned.is_empty() {
            changes.push(Change::Prune(pruned));
        }
        store.transact(CONVERSATION, &mut timeline, &Change::Batch(changes), Durability::Deferred)?;
        if turn % 256 == 0 {
            timeline.unload_pruned();
            progress(timeline.len() as u64);
        }
    }
    Ok(())
}

fn random_token(dice: &mut BenchRng, sentence: u32) -> NewToken {
    let id = TokenId(dice.below(49_152) as u32);
    NewToken {
        id,
        text: " word".into(),
        chunk_index: sentence,
        brightness: Brightness(10_000.0),
        kind: ContentKind::Message,
    }
}

fn manual_prune(chunk: ChunkId) -> Pruned {
    Pruned { chunk, extent: Extent::Whole, reason: PruneReason::Manual }
}

/// Measures an existing store, in a process of its own; `time` is the minimum measuring time of each figure.
pub fn measure(path: &Path, time: Duration) -> Result<StoreBenchReport, Error> {
    let location = StoreLocation::Sqlite(path.to_owned());
    let open = || -> Result<(Database, Timeline), Error> {
        let mut store = Database::open(&location)?;
        let timeline = store.load(CONVERSATION, Access::Write)?;
        Ok((store, timeline))
    };
    drop(open()?);
    let open_ns = p10_call_ns(time, || (), |()| open());
    let (mut store, mut timeline) = open()?;
    let mut report = StoreBenchReport {
        tokens: timeline.len(),
        live: timeline.live_len(),
        loaded: timeline.chunks().filter(|chunk| chunk.is_loaded()).map(|chunk| chunk.len()).sum(),
        open_ms: open_ns / 1e6,
        ..StoreBenchReport::default()
    };
    let live = p10_call_ns(
        time,
        || (),
        |()| {
            let view = timeline.context_window(0);
            (view.ids(), view.positions(), view.text())
        },
    );
    report.live_ms = live / 1e6;
    report.bytes = store.size_on_disk()?;
    let middle: Vec<ChunkId> = timeline.live_chunks().map(|c| c.id()).collect();
    let middle = middle[middle.len() / 2];
    (report.prune_ms, report.resurrect_ms) =
        measure_prune_and_resurrect(&mut store, &mut timeline, middle, Durability::Deferred, time)?;
    (report.durable_prune_ms, _) =
        measure_prune_and_resurrect(&mut store, &mut timeline, middle, Durability::Immediate, time)?;
    report.brightness_ms = measure_brightness(&mut store, &mut timeline, Durability::Deferred, time)?;
    report.durable_brightness_ms =
        measure_brightness(&mut store, &mut timeline, Durability::Immediate, time)?;
    report.append_ms = measure_append(&mut store, &mut timeline, time)?;
    report.sync_ms = measure_sync(path.parent().unwrap_or(Path::new(".")), time);
    report.memory_mib = peak_memory_mib();
    drop((store, timeline));
    report.token_rows = measure_token_rows(path.with_extension("rows").as_path(), &report, time);
    Ok(report)
}

/// The 10th percentile of a hundred calls that must be undone between repetitions.
fn p10_ms(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 10].as_secs_f64() * 1e3
}

fn measure_prune_and_resurrect(
    store: &mut Database,
    timeline: &mut Timeline,
    chunk: ChunkId,
    durability: Durability,
    least: Duration,
) -> Result<(f64, f64), Error> {
    let prune = Change::Prune(vec![manual_prune(chunk)]);
    let back =
        Resurrected { chunk, extent: Extent::Whole, brightness: None, reason: ResurrectReason::Manual };
    let back = Change::Resurrect(vec![back]);
    let (mut away, mut again) = (Vec::new(), Vec::new());
    let begin = Instant::now();
    while away.len() < 15 || begin.elapsed() < least {
        let start = Instant::now();
        store.transact(CONVERSATION, timeline, &prune, durability)?;
        away.push(start.elapsed());
        timeline.unload_pruned();
        let start = Instant::now();
        store.transact(CONVERSATION, timeline, &back, durability)?;
        again.push(start.elapsed());
    }
    Ok((p10_ms(away), p10_ms(again)))
}

fn measure_brightness(
    store: &mut Database,
    timeline: &mut Timeline,
    durability: Durability,
    least: Duration,
) -> Result<f64, Error> {
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < 15 || begin.elapsed() < least {
        let mut score = Score::default();
        for chunk in timeline.live_chunks() {
            for run in chunk.live_runs() {
                let brightness = chunk.brightness(run).iter().map(|b| Brightness(b.0 - 1.0)).collect();
                score.runs.push(BrightnessRun { start: run.start, brightness });
            }
            score.tallies.push((chunk.id(), TallyDelta { votes: 1, mass: 1 << 20, exposures: 1 }));
        }
        let score = Change::Score(score);
        let start = Instant::now();
        store.transact(CONVERSATION, timeline, &score, durability)?;
        times.push(start.elapsed());
    }
    Ok(p10_ms(times))
}

fn measure_append(store: &mut Database, timeline: &mut Timeline, least: Duration) -> Result<f64, Error> {
    let mut times = Vec::new();
    let mut dice = BenchRng(1);
    let (turn, begin) = (timeline.next_turn(), Instant::now());
    while times.len() < 15 || begin.elapsed() < least {
        let sentence = (times.len() / 4) as u32;
        let tokens = (0..16).map(|_| random_token(&mut dice, sentence)).collect();
        let append = Append { at: timeline.next_position(), turn, role: Role::User, tokens };
        let start = Instant::now();
        store.transact(CONVERSATION, timeline, &Change::Append(append), Durability::Deferred)?;
        times.push(start.elapsed());
    }
    Ok(p10_ms(times))
}

/// Appends one page to a file and syncs it.
fn measure_sync(folder: &Path, least: Duration) -> f64 {
    let path = folder.join("sync");
    let Ok(mut file) = File::create(&path) else { return f64::NAN };
    let ns = p10_call_ns(least, || (), |()| file.write_all(&[7; 4096]).and_then(|()| file.sync_data()));
    let _ = fs::remove_file(&path);
    ns / 1e6
}

/// Peak memory of this process, if the system reports it.
fn peak_memory_mib() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<f64>().ok().map(|kib| kib / 1024.0)
}

/// The same work on a table with one row per token.
fn measure_token_rows(path: &Path, report: &StoreBenchReport, least: Duration) -> TokenRowBaseline {
    let done = (|| -> rusqlite::Result<TokenRowBaseline> {
        let tokens = report.tokens.min(1_000_000);
        let (chunks, keep) = (tokens / CHUNK_TOKENS, report.live / CHUNK_TOKENS);
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
            for position in 0..chunks * CHUNK_TOKENS {
                let chunk = position / CHUNK_TOKENS;
                let live = (chunk + 1) * keep / chunks != chunk * keep / chunks;
                insert.execute((position as i64, chunk as i64, position as i64 % 49_152, live))?;
            }
        }
        fill.commit()?;
        let read_live = |index: &str| {
            let sql =
                format!("SELECT position, id, text FROM token {index} WHERE live = 1 ORDER BY position");
            let read = |()| -> rusqlite::Result<usize> {
                let mut select = db.prepare_cached(&sql)?;
                let read = select.query_map([], |r| {
                    Ok((r.get::<_, i64>(0)?, r.get::<_, i64>(1)?, r.get::<_, String>(2)?))
                })?;
                Ok(read.filter_map(Result::ok).count())
            };
            p10_call_ns(least, || (), read)
        };
        let (live_ns, scan_ns) = (read_live(""), read_live("NOT INDEXED"));
        let middle = db.query_row(
            "SELECT chunk FROM token WHERE live = 1 LIMIT 1 OFFSET ?1",
            [report.live as i64 / 2],
            |r| r.get::<_, i64>(0),
        )?;
        let mut on = false;
        let prune_ns = p10_call_ns(
            least,
            || (),
            |()| {
                on = !on;
                db.execute("UPDATE token SET live = ?1 WHERE chunk = ?2", (!on, middle))
            },
        );
        let brightness_ns = p10_call_ns(
            least,
            || (),
            |()| db.execute("UPDATE token SET brightness = brightness - 1 WHERE live = 1", []),
        );
        Ok(TokenRowBaseline {
            tokens,
            live_ms: live_ns / 1e6,
            scan_ms: scan_ns / 1e6,
            prune_ms: prune_ns / 1e6,
            brightness_ms: brightness_ns / 1e6,
        })
    })();
    done.unwrap_or_default()
}
