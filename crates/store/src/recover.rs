//! What can be put together of a conversation whose state and log are both damaged: each chunk from its own row,
//! and where that is damaged from the words in the log. One row that cannot be read costs that row, not the rest.

use crate::block;
use crate::rows::{decode_body, read_chunk_id, read_log_entry, row_index, row_key, row_key_range};
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlValue};
use halo_core::change::{Change, NewToken};
use halo_core::chunk_body::{ChunkBody, checksum_bytes};
use halo_core::timeline::{Timeline, Turn};
use halo_core::timeline_builder::{PackedChunkHeader, TimelineBuilder};
use halo_core::token::{Brightness, ChunkId, ContentKind, TokenId};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RecoveryReport {
    chunks: usize,
    chunks_from_log: usize,
    lost_chunks: usize,
    lost_tokens: usize,
}

impl RecoveryReport {
    /// Whether every word is there.
    pub(crate) fn is_lossless(&self) -> bool {
        (self.lost_chunks, self.lost_tokens) == (0, 0)
    }
}

impl fmt::Display for RecoveryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} chunks, {} of them from the words in the log", self.chunks, self.chunks_from_log)?;
        if self.is_lossless() {
            f.write_str("; no word is lost, the reasons of what happened are")
        } else {
            write!(f, "; LOST: {} chunks, and {} tokens of others", self.lost_chunks, self.lost_tokens)
        }
    }
}

/// What the log says, entry by entry, as far as it can be read.
#[derive(Default)]
struct LogContents {
    /// Every token by its position.
    tokens: BTreeMap<u64, NewToken>,
    /// The positions that were first said in a chunk.
    chunk_positions: BTreeMap<ChunkId, Vec<u64>>,
    pinned: BTreeMap<ChunkId, bool>,
    /// Chunks that were taken back.
    deleted: BTreeSet<ChunkId>,
}

impl LogContents {
    /// A chunk's positions go to the nearest before it in its turn.
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

    /// A chunk's positions from `at` on become another's.
    fn split(&mut self, chunk: ChunkId, at: u64, sentence: u32) {
        let positions = self.chunk_positions.entry(chunk).or_default();
        let tail = positions.split_off(positions.partition_point(|&p| p < at));
        self.chunk_positions.entry(ChunkId { index: sentence, ..chunk }).or_default().extend(tail);
    }
}

/// Asks for one row; nothing where it cannot be read.
fn query_readable_row<T>(
    sql: &mut dyn SqlConnection,
    select: &'static str,
    key: i64,
    read: impl Fn(&crate::sql::SqlRow<'_>) -> Result<T, SqlError>,
) -> Result<Option<T>, SqlError> {
    let mut found = None;
    let asked = sql.query(select, &[SqlValue::Int(key)], &mut |row| {
        found = Some(read(&row)?);
        Ok(())
    });
    match asked {
        Err(error) if error.kind != SqlErrorKind::Damaged => Err(error),
        Err(_) => Ok(None),
        Ok(()) => Ok(found),
    }
}

/// The largest key of a table that can be found, as a place or number.
fn last_row_index(sql: &mut dyn SqlConnection, select: &'static str, id: i64) -> usize {
    let mut last = 0;
    let _ = sql.query(select, &row_key_range(id), &mut |row| {
        last = row_index(row.int(0)?);
        Ok(())
    });
    last
}

/// How far to look: as far as rows are found, or a count says, unless that is beyond belief.
fn plausible_count(found: usize, counted: Option<u64>) -> usize {
    let counted = counted.map_or(0, |n| usize::try_from(n).unwrap_or(usize::MAX));
    if counted > found.saturating_mul(2) + 4096 { found } else { found.max(counted) }
}

fn read_log_contents(sql: &mut dyn SqlConnection, id: i64) -> Result<LogContents, SqlError> {
    let mut told = LogContents::default();
    let select = "SELECT key, at, sum, change FROM log WHERE key = $1";
    let end =
        last_row_index(sql, "SELECT key FROM log WHERE key BETWEEN $1 AND $2 ORDER BY key DESC LIMIT 1", id);
    let said = query_readable_row(sql, "SELECT seq FROM conversation WHERE id = $1", id, |row| row.count(0))?;
    for seq in 1..=plausible_count(end, said) {
        let Some(entry) = query_readable_row(sql, select, row_key(id, seq), read_log_entry)? else {
            continue;
        };
        for change in entry.change.flatten() {
            match change {
                Change::Append(append) => {
                    for (token, at) in append.tokens.iter().zip(append.at.0..) {
                        let chunk = ChunkId::new(append.role, append.turn, token.chunk_index);
                        told.chunk_positions.entry(chunk).or_default().push(at);
                        told.tokens.insert(at, token.clone());
                    }
                }
                Change::Pin { chunk, pinned } => drop(told.pinned.insert(*chunk, *pinned)),
                Change::Delete { chunks: parts, .. } => told.deleted.extend(parts.iter().map(|p| p.chunk)),
                Change::Undelete(parts) => told.deleted.retain(|gone| parts.iter().all(|p| p.chunk != *gone)),
                Change::Merge { chunk, .. } => told.merge(*chunk),
                Change::Split { chunk, at, tail_index: sentence, .. } => told.split(*chunk, at.0, *sentence),
                _ => {}
            }
        }
    }
    Ok(told)
}

/// What the blocks say, up to the first that cannot be read.
fn read_readable_blocks(sql: &mut dyn SqlConnection, id: i64) -> Result<TimelineBuilder, SqlError> {
    let mut parts = TimelineBuilder::default();
    for n in 0.. {
        let select = "SELECT sum, heads FROM block WHERE key = $1";
        let bytes = query_readable_row(sql, select, row_key(id, n), |row| {
            let bytes = row.blob(1)?;
            Ok((checksum_bytes(bytes) == row.int(0)?.cast_unsigned()).then(|| bytes.to_vec()))
        })?;
        let Some(bytes) = bytes.flatten() else { break };
        if block::decode(&bytes, &mut parts).is_none() {
            break;
        }
    }
    Ok(parts)
}

/// A chunk that was found.
struct RecoveredChunk {
    id: ChunkId,
    pinned: bool,
    body: ChunkBody,
}

/// Puts a conversation together from all that can be read of it.
pub(crate) fn recover_conversation(
    sql: &mut dyn SqlConnection,
    id: i64,
) -> Result<(Timeline, RecoveryReport), SqlError> {
    let (told, known) = (read_log_contents(sql, id)?, read_readable_blocks(sql, id)?);
    let rows =
        last_row_index(sql, "SELECT max(key) FROM chunk WHERE key BETWEEN $1 AND $2 HAVING count(*) > 0", id)
            + 1;
    let mut rescued = RecoveryReport::default();
    let mut found: Vec<RecoveredChunk> = Vec::new();
    let mut at = 0u64;
    for place in 0..rows.max(known.row_count()) {
        let head = known.header(place);
        let name = query_readable_row(
            sql,
            "SELECT turn, sentence, role FROM chunk WHERE key = $1",
            row_key(id, place),
            |r| read_chunk_id(r, 0),
        )?;
        let Some(name) = name.or(head.map(|h| h.id)) else {
            rescued.lost_chunks += 1;
            continue;
        };
        let pinned = head.map_or_else(|| told.pinned.get(&name).copied().unwrap_or_default(), |h| h.pinned);
        let select = "SELECT sum, body FROM chunk WHERE key = $1";
        let body = query_readable_row(sql, select, row_key(id, place), |row| {
            decode_body(&name, row.int(0)?, row.blob(1)?)
        })?;
        let body = match body.filter(|b| head.is_none_or(|h| h.len as usize == b.len())) {
            Some(body) => body,
            None => {
                let positions: Vec<u64> = match head {
                    Some(head) => (at..at + u64::from(head.len)).collect(),
                    None => told.chunk_positions.get(&name).cloned().unwrap_or_default(),
                };
                let live = query_readable_row(
                    sql,
                    "SELECT live FROM chunk WHERE key = $1",
                    row_key(id, place),
                    |row| row.int(0),
                )?;
                let dead = head.map_or(live != Some(1), |h| h.live == 0);
                let gone = head.map_or(told.deleted.contains(&name), |h| h.deleted > 0 && h.deleted == h.len);
                rescued.chunks_from_log += 1;
                body_from_log(&positions, &told, (dead, gone), &mut rescued)
            }
        };
        at += body.len() as u64;
        rescued.chunks += usize::from(!body.is_empty());
        found.push(RecoveredChunk { id: name, pinned: pinned && !body.is_empty(), body });
    }
    let timeline = assemble_timeline(found, &mut rescued).map_err(SqlError::damaged)?;
    // Tokens that were counted and that no chunk claims.
    let counted =
        query_readable_row(sql, "SELECT tokens FROM conversation WHERE id = $1", id, |row| row.count(0))?;
    let said = told.tokens.len().max(plausible_count(timeline.len(), counted));
    rescued.lost_tokens += said.saturating_sub(timeline.len());
    Ok((timeline, rescued))
}

/// A chunk's tokens as the log has them; where it has none, nothing is said there.
fn body_from_log(
    positions: &[u64],
    told: &LogContents,
    (dead, gone): (bool, bool),
    rescued: &mut RecoveryReport,
) -> ChunkBody {
    let token = |at: &u64| told.tokens.get(at).cloned();
    let silent = NewToken {
        id: TokenId(u32::MAX),
        text: String::new(),
        chunk_index: 0,
        brightness: Brightness(0.0),
        kind: ContentKind::Message,
    };
    let tokens: Vec<Option<NewToken>> = positions.iter().map(token).collect();
    rescued.lost_tokens += tokens.iter().filter(|t| t.is_none()).count();
    ChunkBody::from_tokens(tokens.into_iter().map(|t| t.unwrap_or_else(|| silent.clone())), dead, gone)
}

/// The timeline that these chunks make; one whose name does not come after those before it is lost.
fn assemble_timeline(found: Vec<RecoveredChunk>, rescued: &mut RecoveryReport) -> Result<Timeline, String> {
    let mut parts = TimelineBuilder::default();
    let mut last: Option<ChunkId> = None;
    for RecoveredChunk { id: name, pinned, body } in found {
        let same_turn = last.is_some_and(|l| (l.turn, l.role) == (name.turn, name.role));
        let after = match last {
            Some(last) if same_turn => last.index < name.index,
            Some(last) => last.turn < name.turn,
            None => true,
        };
        if !after {
            rescued.lost_chunks += 1;
            continue;
        }
        if !same_turn {
            parts.push_turn(Turn { id: name.turn, role: name.role, first_row: parts.row_count() as u32 })?;
        }
        let ((live, withdrawn), sum) = (body.live_and_deleted(), body.checksum());
        let (sentence, len, place) = (name.index, body.len() as u32, parts.row_count());
        parts.push_chunk(&PackedChunkHeader {
            index: sentence,
            pinned,
            len,
            live,
            deleted: withdrawn,
            checksum: sum,
        })?;
        if len > 0 {
            parts.set_body(place, body)?;
        }
        last = Some(name);
    }
    parts.finish().map_err(|error| error.to_string())
}
