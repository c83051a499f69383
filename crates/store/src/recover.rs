//! Recovery of a conversation whose state and log are both damaged: each chunk comes from its own row or, where that is
//! damaged, from the log. Rows are read one by one: an unreadable row does not affect the others.

use crate::block;
use crate::rows::{decode_body, read_chunk_id, read_log_entry, row_index, row_key, row_key_range};
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlRow, SqlValue};
use halo_core::change::{Change, NewToken};
use halo_core::chunk_body::{ChunkBody, checksum_bytes};
use halo_core::timeline::{ChunkHeader, Timeline, TimelineError, Turn};
use halo_core::timeline_builder::{PackedChunkHeader, TimelineBuilder};
use halo_core::token::{Brightness, ChunkId, ContentKind, TokenId};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What a recovery has found and lost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RecoveryReport {
    chunks: usize,
    chunks_from_log: usize,
    lost_chunks: usize,
    lost_tokens: usize,
}

impl RecoveryReport {
    /// Whether all text was recovered.
    pub(crate) fn is_lossless(&self) -> bool {
        (self.lost_chunks, self.lost_tokens) == (0, 0)
    }
}

impl fmt::Display for RecoveryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} chunks, {} of them from the log", self.chunks, self.chunks_from_log)?;
        if self.is_lossless() {
            f.write_str("; no text was lost, but the reasons for earlier changes were")
        } else {
            write!(f, "; lost: {} chunks, and {} tokens of other chunks", self.lost_chunks, self.lost_tokens)
        }
    }
}

/// What the readable entries of the log say.
#[derive(Default)]
struct LogContents {
    /// Every token by its position.
    tokens: BTreeMap<u64, NewToken>,
    /// The positions of the tokens of each chunk.
    chunk_positions: BTreeMap<ChunkId, Vec<u64>>,
    pinned: BTreeMap<ChunkId, bool>,
    /// Chunks that the user has deleted.
    deleted: BTreeSet<ChunkId>,
}

impl LogContents {
    /// The positions of a chunk go to the nearest chunk before it in its turn.
    fn merge(&mut self, chunk: ChunkId) {
        let moved = self.chunk_positions.remove(&chunk).unwrap_or_default();
        let before = self
            .chunk_positions
            .range_mut(..chunk)
            .rev()
            .find(|(c, p)| c.turn == chunk.turn && !p.is_empty());
        match before {
            Some((_, positions)) => positions.extend(moved),
            None => drop(self.chunk_positions.insert(chunk, moved)),
        }
    }

    /// The positions of a chunk from `at` on go to a new chunk.
    fn split(&mut self, chunk: ChunkId, at: u64, index: u32) {
        let positions = self.chunk_positions.entry(chunk).or_default();
        let tail = positions.split_off(positions.partition_point(|&p| p < at));
        self.chunk_positions.entry(ChunkId { index, ..chunk }).or_default().extend(tail);
    }
}

/// Reads one row; none where it is missing or damaged.
fn query_readable_row<T>(
    sql: &mut dyn SqlConnection,
    select: &'static str,
    key: i64,
    read: impl Fn(&SqlRow<'_>) -> Result<T, SqlError>,
) -> Result<Option<T>, SqlError> {
    let mut value = None;
    let queried = sql.query(select, &[SqlValue::Int(key)], &mut |row| {
        value = Some(read(&row)?);
        Ok(())
    });
    match queried {
        Err(error) if error.kind != SqlErrorKind::Damaged => Err(error),
        Err(_) => Ok(None),
        Ok(()) => Ok(value),
    }
}

/// The row or sequence number of the largest readable key that `select` finds; 0 where there is none.
fn last_row_index(sql: &mut dyn SqlConnection, select: &'static str, id: i64) -> usize {
    let mut last = 0;
    let _ = sql.query(select, &row_key_range(id), &mut |row| {
        last = row_index(row.int(0)?);
        Ok(())
    });
    last
}

/// How many rows `select` counts; 0 where they cannot be counted.
fn count_rows(sql: &mut dyn SqlConnection, select: &'static str, id: i64) -> usize {
    let mut count = 0;
    let _ = sql.query(select, &row_key_range(id), &mut |row| {
        count = row.count(0)? as usize;
        Ok(())
    });
    count
}

/// How many rows to try: those that exist, or as many as a stored count or the last key says, unless that looks damaged: a
/// flipped bit of a key made billions of rows.
fn plausible_count(existing: usize, counted: Option<u64>) -> usize {
    let counted = counted.map_or(0, |n| usize::try_from(n).unwrap_or(usize::MAX));
    if counted > existing.saturating_mul(2) + 4096 { existing } else { existing.max(counted) }
}

fn read_log_contents(sql: &mut dyn SqlConnection, id: i64) -> Result<LogContents, SqlError> {
    let mut log = LogContents::default();
    let max_key = "SELECT key FROM log WHERE key BETWEEN $1 AND $2 ORDER BY key DESC LIMIT 1";
    let last = last_row_index(sql, max_key, id);
    let counted =
        query_readable_row(sql, "SELECT seq FROM conversation WHERE id = $1", id, |row| row.count(0))?;
    let select = "SELECT key, at, sum, change FROM log WHERE key = $1";
    // Entries are joined, so their number says nothing about the last one.
    let last = match counted.map(|n| n as usize) {
        Some(counted) if counted > 0 => plausible_count(counted, Some(last as u64)),
        _ => last,
    };
    for seq in 1..=plausible_count(last, counted) {
        let Some(entry) = query_readable_row(sql, select, row_key(id, seq), read_log_entry)? else {
            continue;
        };
        for change in entry.change.flatten() {
            match change {
                Change::Append(append) => {
                    for (token, at) in append.tokens.iter().zip(append.at.0..) {
                        let chunk = ChunkId::new(append.role, append.turn, token.chunk_index);
                        log.chunk_positions.entry(chunk).or_default().push(at);
                        log.tokens.insert(at, token.clone());
                    }
                }
                Change::Pin { chunk, pinned } => drop(log.pinned.insert(*chunk, *pinned)),
                Change::Delete { chunks, .. } => log.deleted.extend(chunks.iter().map(|c| c.chunk)),
                Change::Undelete(chunks) => log.deleted.retain(|id| chunks.iter().all(|c| c.chunk != *id)),
                Change::Merge { chunk, .. } => log.merge(*chunk),
                Change::Split { chunk, at, tail_index, .. } => log.split(*chunk, at.0, *tail_index),
                _ => {}
            }
        }
    }
    Ok(log)
}

/// The headers in the blocks up to the first that cannot be read.
fn read_readable_blocks(sql: &mut dyn SqlConnection, id: i64) -> Result<TimelineBuilder, SqlError> {
    let mut builder = TimelineBuilder::default();
    for number in 0.. {
        let select = "SELECT sum, heads FROM block WHERE key = $1";
        let bytes = query_readable_row(sql, select, row_key(id, number), |row| {
            let bytes = row.blob(1)?;
            Ok((checksum_bytes(bytes) == row.int(0)?.cast_unsigned()).then(|| bytes.to_vec()))
        })?;
        let Some(bytes) = bytes.flatten() else { break };
        if block::decode(&bytes, &mut builder).is_none() {
            break;
        }
    }
    Ok(builder)
}

struct RecoveredChunk {
    id: ChunkId,
    pinned: bool,
    body: ChunkBody,
}

/// Reads everything that the rows and the log of a conversation still hold.
pub(crate) fn recover_conversation(
    sql: &mut dyn SqlConnection,
    id: i64,
) -> Result<(Timeline, RecoveryReport), SqlError> {
    let (log, headers) = (read_log_contents(sql, id)?, read_readable_blocks(sql, id)?);
    let max_key = "SELECT max(key) FROM chunk WHERE key BETWEEN $1 AND $2 HAVING count(*) > 0";
    let row_count = last_row_index(sql, max_key, id) + 1;
    let existing = count_rows(sql, "SELECT count(*) FROM chunk WHERE key BETWEEN $1 AND $2", id);
    let existing = existing.max(headers.row_count()).max(log.chunk_positions.len());
    let row_count = plausible_count(existing, Some(row_count as u64));
    let mut report = RecoveryReport::default();
    let mut chunks: Vec<RecoveredChunk> = Vec::new();
    let mut start = 0u64;
    for row in 0..row_count {
        let key = row_key(id, row);
        match recover_chunk(sql, key, headers.header(row), start, &log, &mut report)? {
            Some(chunk) => {
                start += chunk.body.len() as u64;
                report.chunks += usize::from(!chunk.body.is_empty());
                chunks.push(chunk);
            }
            None => report.lost_chunks += 1,
        }
    }
    let timeline = assemble_timeline(chunks, &mut report).map_err(SqlError::damaged)?;
    // Tokens that the log or the row of the conversation counts, but that no chunk has.
    let counted =
        query_readable_row(sql, "SELECT tokens FROM conversation WHERE id = $1", id, |row| row.count(0))?;
    let expected = log.tokens.len().max(plausible_count(timeline.len(), counted));
    report.lost_tokens += expected.saturating_sub(timeline.len());
    Ok((timeline, report))
}

/// Reads one chunk from its row, or from the log where the row is damaged; none if not even its id can be read. `start`
/// is its first position if nothing before it is lost.
fn recover_chunk(
    sql: &mut dyn SqlConnection,
    key: i64,
    header: Option<ChunkHeader>,
    start: u64,
    log: &LogContents,
    report: &mut RecoveryReport,
) -> Result<Option<RecoveredChunk>, SqlError> {
    let select = "SELECT turn, sentence, role FROM chunk WHERE key = $1";
    let id = query_readable_row(sql, select, key, |row| read_chunk_id(row, 0))?;
    let Some(id) = id.or(header.map(|h| h.id)) else { return Ok(None) };
    let pinned = header.map_or_else(|| log.pinned.get(&id).copied().unwrap_or_default(), |h| h.pinned);
    let select = "SELECT sum, body FROM chunk WHERE key = $1";
    let body = query_readable_row(sql, select, key, |row| decode_body(&id, row.int(0)?, row.blob(1)?))?;
    let body = match body.filter(|b| header.is_none_or(|h| h.len as usize == b.len())) {
        Some(body) => body,
        None => {
            let positions: Vec<u64> = match header {
                Some(header) => (start..start + u64::from(header.len)).collect(),
                None => log.chunk_positions.get(&id).cloned().unwrap_or_default(),
            };
            let live =
                query_readable_row(sql, "SELECT live FROM chunk WHERE key = $1", key, |row| row.int(0))?;
            let pruned = header.map_or(live != Some(1), |h| h.live == 0);
            let deleted = header.map_or(log.deleted.contains(&id), |h| h.deleted > 0 && h.deleted == h.len);
            report.chunks_from_log += 1;
            body_from_log(&positions, log, pruned, deleted, report)
        }
    };
    Ok(Some(RecoveredChunk { id, pinned: pinned && !body.is_empty(), body }))
}

/// The tokens at these positions from the log. A token that the log has lost becomes an empty one, so that the positions
/// after it do not move.
fn body_from_log(
    positions: &[u64],
    log: &LogContents,
    pruned: bool,
    deleted: bool,
    report: &mut RecoveryReport,
) -> ChunkBody {
    let empty = NewToken {
        id: TokenId(u32::MAX),
        text: String::new(),
        chunk_index: 0,
        brightness: Brightness(0.0),
        kind: ContentKind::Message,
    };
    let tokens: Vec<Option<NewToken>> = positions.iter().map(|at| log.tokens.get(at).cloned()).collect();
    report.lost_tokens += tokens.iter().filter(|t| t.is_none()).count();
    ChunkBody::from_tokens(tokens.into_iter().map(|t| t.unwrap_or_else(|| empty.clone())), pruned, deleted)
}

/// The timeline of these chunks. A chunk whose id is out of order is dropped and counted as lost.
fn assemble_timeline(
    chunks: Vec<RecoveredChunk>,
    report: &mut RecoveryReport,
) -> Result<Timeline, TimelineError> {
    let mut builder = TimelineBuilder::default();
    let mut last: Option<ChunkId> = None;
    for RecoveredChunk { id, pinned, body } in chunks {
        let same_turn = last.is_some_and(|l| (l.turn, l.role) == (id.turn, id.role));
        let in_order = match last {
            Some(last) if same_turn => last.index < id.index,
            Some(last) => last.turn < id.turn,
            None => true,
        };
        if !in_order {
            report.lost_chunks += 1;
            continue;
        }
        let row = builder.row_count();
        if !same_turn {
            builder.push_turn(Turn { id: id.turn, role: id.role, first_row: row as u32 })?;
        }
        let ((live, deleted), checksum) = (body.live_and_deleted(), body.checksum());
        let (index, len) = (id.index, body.len() as u32);
        builder.push_chunk(&PackedChunkHeader { index, pinned, len, live, deleted, checksum })?;
        if len > 0 {
            builder.set_body(row, body)?;
        }
        last = Some(id);
    }
    builder.finish()
}
