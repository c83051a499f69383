//! The state of a conversation: a row with the tokens of each chunk, and blocks with everything else about the chunks.

use super::columns::{bool_value, checksum_value, chunk_id_values, row_index, row_key, row_key_range};
use crate::block;
use crate::sql::{SqlConnection, SqlError, SqlRow, SqlValue};
use halo_core::chunk_body::{ChunkBody, checksum_bytes};
use halo_core::timeline::{ChunkHeader, Timeline};
use halo_core::timeline_builder::TimelineBuilder;
use std::collections::BTreeSet;
use std::fmt;

/// The most turns or chunks that memory is reserved for: a damaged count must not allocate without bound.
const MAX_RESERVED: usize = 1 << 20;
/// Bodies that are written at a time, so that their bytes are not all in memory at once.
const BODIES_PER_WRITE: usize = 1024;

pub(crate) fn decode_body(
    chunk: &dyn fmt::Display,
    checksum: i64,
    bytes: &[u8],
) -> Result<ChunkBody, SqlError> {
    if checksum_bytes(bytes) != checksum.cast_unsigned() {
        return Err(SqlError::damaged(format!("the checksum of the tokens of {chunk} does not match")));
    }
    ChunkBody::decode(bytes)
        .map_err(|e| SqlError::damaged(format!("the tokens of {chunk} cannot be decoded: {e}")))
}

/// Reads the timeline from blocks and the bodies of live chunks. The expected numbers of turns and chunks only reserve
/// memory.
pub(crate) fn read_state(
    sql: &mut dyn SqlConnection,
    id: i64,
    (turns, chunks): (usize, usize),
) -> Result<Timeline, SqlError> {
    let mut builder = TimelineBuilder::with_capacity(turns.min(MAX_RESERVED), chunks.min(MAX_RESERVED));
    let mut next = 0;
    let select = "SELECT key, sum, heads FROM block WHERE key BETWEEN $1 AND $2 ORDER BY key";
    sql.query(select, &row_key_range(id), &mut |row| {
        let (number, bytes) = (row_index(row.int(0)?), row.blob(2)?);
        let intact = number == next && checksum_bytes(bytes) == row.int(1)?.cast_unsigned();
        next += 1;
        let decoded = intact.then(|| block::decode(bytes, &mut builder)).flatten();
        decoded.ok_or_else(|| SqlError::damaged(format!("block {number} of the chunk headers is damaged")))
    })?;
    let set_body = |builder: &mut TimelineBuilder, row: &SqlRow<'_>| {
        let index = row_index(row.int(0)?);
        let name = builder.chunk_id(index).map_or_else(|| format!("chunk {index}"), |id| id.to_string());
        let body = decode_body(&name, row.int(1)?, row.blob(2)?)?;
        builder.set_body(index, body).map_err(SqlError::damaged)
    };
    let live = "SELECT key, sum, body FROM chunk WHERE conversation = $1 AND live = 1 ORDER BY key";
    sql.query(live, &[SqlValue::Int(id)], &mut |row| set_body(&mut builder, &row))?;
    if builder.last_is_pruned() {
        let last = [SqlValue::Int(row_key(id, builder.row_count() - 1))];
        sql.query("SELECT key, sum, body FROM chunk WHERE key = $1", &last, &mut |row| {
            set_body(&mut builder, &row)
        })?;
    }
    builder.finish().map_err(SqlError::damaged)
}

/// A chunk row before it is written.
struct EncodedBody {
    row: usize,
    header: ChunkHeader,
    bytes: Vec<u8>,
}

fn encode_bodies(rows: &BTreeSet<usize>, timeline: &Timeline) -> Result<Vec<EncodedBody>, SqlError> {
    let encode = |&row: &usize| {
        let header = timeline.chunk_headers(row..row + 1).next().expect("dirty rows exist in the timeline");
        let mut bytes = Vec::with_capacity(1024);
        match timeline.body_at_row(row) {
            Some(body) => body.encode(&mut bytes),
            None if header.len == 0 => ChunkBody::default().encode(&mut bytes),
            None => {
                return Err(SqlError::invalid_input(format!("the tokens of {} are not loaded", header.id)));
            }
        }
        Ok(EncodedBody { row, header, bytes })
    };
    rows.iter().map(encode).collect()
}

pub(crate) fn upsert_bodies(
    sql: &mut dyn SqlConnection,
    id: i64,
    rows: &BTreeSet<usize>,
    timeline: &Timeline,
) -> Result<(), SqlError> {
    let bodies = encode_bodies(rows, timeline)?;
    let mut cells = Vec::with_capacity(bodies.len());
    for EncodedBody { row, header, bytes } in &bodies {
        let [turn, sentence, role] = chunk_id_values(header.id);
        let (key, live) = (SqlValue::Int(row_key(id, *row)), bool_value(header.live > 0));
        let (checksum, body) = (checksum_value(bytes), SqlValue::Blob(bytes));
        cells.push(vec![key, SqlValue::Int(id), turn, sentence, role, live, checksum, body]);
    }
    let upsert = "INSERT INTO chunk (key, conversation, turn, sentence, role, live, sum, body) \
                  VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (key) DO UPDATE SET turn = excluded.turn, \
                  sentence = excluded.sentence, role = excluded.role, live = excluded.live, sum = excluded.sum, \
                  body = excluded.body";
    sql.execute_many(upsert, &cells)
}

/// Writes bodies of chunks whose rows exist and whose id and `live` column do not change.
pub(crate) fn update_bodies(
    sql: &mut dyn SqlConnection,
    id: i64,
    rows: &BTreeSet<usize>,
    timeline: &Timeline,
) -> Result<(), SqlError> {
    let bodies = encode_bodies(rows, timeline)?;
    let mut cells = Vec::with_capacity(bodies.len());
    for EncodedBody { row, bytes, .. } in &bodies {
        cells.push(vec![checksum_value(bytes), SqlValue::Blob(bytes), SqlValue::Int(row_key(id, *row))]);
    }
    sql.execute_many("UPDATE chunk SET sum = $1, body = $2 WHERE key = $3", &cells)
}

pub(crate) fn upsert_blocks(
    sql: &mut dyn SqlConnection,
    id: i64,
    blocks: impl Iterator<Item = usize>,
    timeline: &Timeline,
) -> Result<(), SqlError> {
    let blocks: Vec<_> = blocks.map(|number| (number, block::encode(timeline, number))).collect();
    let mut rows = Vec::with_capacity(blocks.len());
    for (number, bytes) in &blocks {
        rows.push(vec![SqlValue::Int(row_key(id, *number)), checksum_value(bytes), SqlValue::Blob(bytes)]);
    }
    let upsert = "INSERT INTO block (key, sum, heads) VALUES ($1, $2, $3) \
                  ON CONFLICT (key) DO UPDATE SET sum = excluded.sum, heads = excluded.heads";
    sql.execute_many(upsert, &rows)
}

/// Replaces the stored state by a timeline whose bodies are all loaded.
pub(crate) fn write_whole_state(
    sql: &mut dyn SqlConnection,
    id: i64,
    seq: u64,
    timeline: &Timeline,
) -> Result<(), SqlError> {
    sql.execute("DELETE FROM chunk WHERE key BETWEEN $1 AND $2", &row_key_range(id))?;
    sql.execute("DELETE FROM block WHERE key BETWEEN $1 AND $2", &row_key_range(id))?;
    let rows: Vec<usize> = (0..timeline.row_count()).collect();
    for some in rows.chunks(BODIES_PER_WRITE) {
        upsert_bodies(sql, id, &some.iter().copied().collect(), timeline)?;
    }
    upsert_blocks(sql, id, 0..block::block_count(timeline), timeline)?;
    let counts = [timeline.turns().len(), timeline.row_count(), timeline.len(), timeline.live_len()];
    let [turns, rows, tokens, live] = counts.map(|n| SqlValue::Int(n as i64));
    let update =
        "UPDATE conversation SET seq = $1, turns = $2, places = $3, tokens = $4, live = $5 WHERE id = $6";
    let cells = [SqlValue::Int(seq.cast_signed()), turns, rows, tokens, live, SqlValue::Int(id)];
    sql.execute(update, &cells).map(drop)
}
