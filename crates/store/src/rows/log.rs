//! The log: every change in order, from which the state can be rebuilt, and what finds its entries by chunk and by turn.

use super::columns::{
    bool_value, checksum_value, chunk_id_values, now_ms, read_chunk_id, row_index, row_key, row_key_range,
};
use crate::log_compaction;
use crate::log_json;
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlRow, SqlValue};
use halo_core::change::Change;
use halo_core::chunk_body::checksum_bytes;
use halo_core::store::LogEntry;
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, TurnId};
use halo_core::turn_end::TurnEndFinder;
use std::collections::BTreeMap;

/// The `turn` column of an entry that appends to no turn, or continues one. The index of turns leaves such entries out.
const NO_TURN: i64 = -1;
/// The `turn` column of an entry that appends to more than one turn: they are read from its change.
const SEVERAL_TURNS: i64 = -2;

/// The `turn` column of an entry with this change.
fn turn_value(change: &Change) -> i64 {
    let mut turns = appended_turns(change).map(|turn| i64::from(turn.0));
    let Some(first) = turns.next() else { return NO_TURN };
    if turns.all(|turn| turn == first) { first } else { SEVERAL_TURNS }
}

/// The turns that a change appends tokens to, in order.
fn appended_turns(change: &Change) -> impl Iterator<Item = TurnId> {
    change.flatten().into_iter().filter_map(|part| match part {
        Change::Append(append) => Some(append.turn),
        _ => None,
    })
}

/// Reads a log entry from the columns key, at, sum, change.
pub(crate) fn read_log_entry(row: &SqlRow<'_>) -> Result<LogEntry, SqlError> {
    let (seq, text) = (row_index(row.int(0)?) as u64, row.text(3)?);
    if checksum_bytes(text.as_bytes()) != row.int(2)?.cast_unsigned() {
        return Err(SqlError::damaged(format!("the checksum of log entry {seq} does not match")));
    }
    let change = log_json::from_json(text)
        .map_err(|e| SqlError::damaged(format!("log entry {seq} cannot be decoded: {e}")))?;
    Ok(LogEntry { seq, committed_at: row.int(1)?, change })
}

/// Calls `each` with every entry of a conversation's log, in order.
pub(crate) fn for_each_log_entry(
    sql: &mut dyn SqlConnection,
    id: i64,
    each: &mut dyn FnMut(LogEntry) -> Result<(), SqlError>,
) -> Result<(), SqlError> {
    let select = "SELECT key, at, sum, change FROM log WHERE key BETWEEN $1 AND $2 ORDER BY key";
    let mut last = 0;
    sql.query(select, &row_key_range(id), &mut |row| {
        let entry = read_log_entry(&row)?;
        if entry.seq <= last {
            return Err(SqlError::damaged(format!("log entry {} follows log entry {last}", entry.seq)));
        }
        last = entry.seq;
        each(entry)
    })
}

/// The timeline that the whole log leads to.
pub(crate) fn replay_log(sql: &mut dyn SqlConnection, id: i64) -> Result<Timeline, SqlError> {
    replay_log_until(sql, id, &mut |_| false)
}

/// The timeline that the log leads to before the first change for which `ends_before` is true.
fn replay_log_until(
    sql: &mut dyn SqlConnection,
    id: i64,
    ends_before: &mut dyn FnMut(&Change) -> bool,
) -> Result<Timeline, SqlError> {
    let mut timeline = Timeline::new();
    for_each_log_entry(sql, id, &mut |entry| {
        if ends_before(&entry.change) {
            return Ok(());
        }
        let misfit =
            |e| SqlError::damaged(format!("log entry {} does not fit the entries before it: {e}", entry.seq));
        timeline.apply(&entry.change).map(drop).map_err(misfit)
    })?;
    Ok(timeline)
}

/// The timeline as it was at the end of a turn.
pub(crate) fn replay_log_through_turn(
    sql: &mut dyn SqlConnection,
    id: i64,
    turn: TurnId,
) -> Result<Timeline, SqlError> {
    let mut finder = TurnEndFinder::new(turn);
    let timeline = replay_log_until(sql, id, &mut |change| finder.turn_ended_before(change))?;
    if finder.is_found() {
        Ok(timeline)
    } else {
        Err(SqlError::not_found(format!("the conversation has no turn {}", turn.0)))
    }
}

/// The key and the change of the last entry that scores.
pub(crate) fn last_score_entry(
    sql: &mut dyn SqlConnection,
    id: i64,
) -> Result<Option<(i64, Change)>, SqlError> {
    let mut last = None;
    let select = "SELECT key, at, sum, change FROM log WHERE key BETWEEN $1 AND $2 AND scores = 1 ORDER BY key DESC LIMIT 1";
    sql.query(select, &row_key_range(id), &mut |row| {
        last = Some((row.int(0)?, read_log_entry(&row)?.change));
        Ok(())
    })?;
    Ok(last)
}

/// The number of the last entry; 0 where the log is empty.
pub(crate) fn last_log_seq(sql: &mut dyn SqlConnection, id: i64) -> Result<u64, SqlError> {
    let mut last = 0;
    let select = "SELECT key FROM log WHERE key BETWEEN $1 AND $2 ORDER BY key DESC LIMIT 1";
    sql.query(select, &row_key_range(id), &mut |row| {
        last = row_index(row.int(0)?) as u64;
        Ok(())
    })?;
    Ok(last)
}

pub(crate) fn insert_log_entry(
    sql: &mut dyn SqlConnection,
    key: i64,
    at: i64,
    change: &Change,
) -> Result<(), SqlError> {
    insert_entry(sql, key, at, change, turn_value(change))
}

/// Writes an append that continues the message of the entry before. It begins no turn and is left out of the index:
/// tokens are streamed one by one, and each index row costs time.
pub(crate) fn insert_continuation(
    sql: &mut dyn SqlConnection,
    key: i64,
    at: i64,
    change: &Change,
) -> Result<(), SqlError> {
    insert_entry(sql, key, at, change, NO_TURN)
}

fn insert_entry(
    sql: &mut dyn SqlConnection,
    key: i64,
    at: i64,
    change: &Change,
    turn: i64,
) -> Result<(), SqlError> {
    let text = log_json::to_json(change);
    let cells = [
        SqlValue::Int(key),
        SqlValue::Int(at),
        bool_value(log_compaction::has_score(change)),
        checksum_value(text.as_bytes()),
        SqlValue::Text(&text),
        SqlValue::Int(turn),
    ];
    let insert = "INSERT INTO log (key, at, scores, sum, change, turn) VALUES ($1, $2, $3, $4, $5, $6)";
    sql.execute(insert, &cells).map(drop)
}

/// Replaces the change of an entry by a shorter one; without a change, deletes the entry.
pub(crate) fn rewrite_log_entry(
    sql: &mut dyn SqlConnection,
    key: i64,
    change: Option<&Change>,
) -> Result<(), SqlError> {
    let Some(change) = change else {
        return sql.execute("DELETE FROM log WHERE key = $1", &[SqlValue::Int(key)]).map(drop);
    };
    let text = log_json::to_json(change);
    let cells = [
        bool_value(log_compaction::has_score(change)),
        checksum_value(text.as_bytes()),
        SqlValue::Text(&text),
        SqlValue::Int(turn_value(change)),
        SqlValue::Int(key),
    ];
    let update = "UPDATE log SET scores = $1, sum = $2, change = $3, turn = $4 WHERE key = $5";
    sql.execute(update, &cells).map(drop)
}

/// Writes entries after `seq` that lead to the timeline, and returns the number of the last one.
pub(crate) fn insert_rebuilt_log(
    sql: &mut dyn SqlConnection,
    id: i64,
    mut seq: u64,
    timeline: &Timeline,
) -> Result<u64, SqlError> {
    let mut changes = timeline.rebuild_changes();
    if changes.is_empty() {
        // The row of a conversation has the number of its last entry, so even an empty one has an entry.
        changes.push(Change::Batch(Vec::new()));
    }
    let now = now_ms();
    for change in &changes {
        seq += 1;
        insert_log_entry(sql, row_key(id, seq as usize), now, change)?;
    }
    Ok(seq)
}

/// The first append to a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TurnStart {
    pub turn: TurnId,
    pub seq: u64,
    pub at: i64,
}

/// Adds the turns that a log entry begins.
pub(crate) fn add_turn_starts(starts: &mut Vec<TurnStart>, entry: &LogEntry) {
    for turn in appended_turns(&entry.change) {
        add_turn_start(starts, TurnStart { turn, seq: entry.seq, at: entry.committed_at });
    }
}

fn add_turn_start(starts: &mut Vec<TurnStart>, start: TurnStart) {
    // An append goes to the last turn or begins a later one.
    if starts.last().is_none_or(|last| last.turn < start.turn) {
        starts.push(start);
    }
}

/// The first append to each turn, in order.
pub(crate) fn turn_starts(sql: &mut dyn SqlConnection, id: i64) -> Result<Vec<TurnStart>, SqlError> {
    // The index of turns has all three columns: the query reads nothing else.
    let select = "SELECT key, at, turn FROM log WHERE key BETWEEN $1 AND $2 AND turn <> -1 ORDER BY key";
    let mut entries = Vec::new();
    sql.query(select, &row_key_range(id), &mut |row| {
        entries.push((row.int(0)?, row.int(1)?, row.int(2)?));
        Ok(())
    })?;
    let mut starts = Vec::new();
    for (key, at, turn) in entries {
        if turn == SEVERAL_TURNS {
            let select = "SELECT key, at, sum, change FROM log WHERE key = $1";
            sql.query(select, &[SqlValue::Int(key)], &mut |row| {
                add_turn_starts(&mut starts, &read_log_entry(&row)?);
                Ok(())
            })?;
            continue;
        }
        let seq = row_index(key) as u64;
        let turn = u32::try_from(turn)
            .map_err(|_| SqlError::damaged(format!("log entry {seq} has an invalid turn")))?;
        add_turn_start(&mut starts, TurnStart { turn: TurnId(turn), seq, at });
    }
    Ok(starts)
}

/// Fills the `turn` column of every entry of every conversation from its change. An entry that cannot be read appends to
/// no turn: it must not keep the store from opening, and the integrity check finds it.
pub(crate) fn fill_log_turns(sql: &mut dyn SqlConnection) -> Result<(), SqlError> {
    let mut turns = Vec::new();
    let mut read_turn = |row: SqlRow<'_>| {
        let turn = log_json::from_json(row.text(1)?).map_or(NO_TURN, |change| turn_value(&change));
        turns.extend((turn != NO_TURN).then_some((row.int(0)?, turn)));
        Ok(())
    };
    let all = sql.query("SELECT key, change FROM log", &[], &mut read_turn);
    if !ignore_damage(all)? {
        let mut keys = Vec::new();
        let listed = sql.query("SELECT key FROM log", &[], &mut |row| {
            keys.push(row.int(0)?);
            Ok(())
        });
        ignore_damage(listed)?;
        for key in keys {
            let select = "SELECT key, change FROM log WHERE key = $1";
            ignore_damage(sql.query(select, &[SqlValue::Int(key)], &mut read_turn))?;
        }
    }
    set_log_turns(sql, &turns)
}

/// Whether something could be read; an error that is not about damage is passed on.
fn ignore_damage(result: Result<(), SqlError>) -> Result<bool, SqlError> {
    match result {
        Err(error) if error.kind == SqlErrorKind::Damaged => Ok(false),
        other => other.map(|()| true),
    }
}

/// Writes the `turn` column of entries, each given by its key.
fn set_log_turns(sql: &mut dyn SqlConnection, turns: &[(i64, i64)]) -> Result<(), SqlError> {
    let cells: Vec<_> =
        turns.iter().map(|&(key, turn)| vec![SqlValue::Int(turn), SqlValue::Int(key)]).collect();
    sql.execute_many("UPDATE log SET turn = $1 WHERE key = $2", &cells)
}

/// Notes which chunks an entry names, so that the history of a chunk is found without reading the log.
pub(crate) fn insert_mentions(
    sql: &mut dyn SqlConnection,
    id: i64,
    seq: i64,
    change: &Change,
) -> Result<(), SqlError> {
    let cells = |chunk| {
        let [turn, sentence, role] = chunk_id_values(chunk);
        vec![SqlValue::Int(id), turn, sentence, role, SqlValue::Int(seq)]
    };
    let rows: Vec<_> = change.named_chunks().into_iter().map(cells).collect();
    let insert = "INSERT INTO mention (conversation, turn, sentence, role, seq) VALUES ($1, $2, $3, $4, $5)";
    sql.execute_many(insert, &rows)
}

/// Rebuilds what finds the entries of a log: the mentions of chunks and the `turn` column.
pub(crate) fn rebuild_log_indexes(sql: &mut dyn SqlConnection, id: i64) -> Result<(), SqlError> {
    sql.execute("DELETE FROM mention WHERE conversation = $1", &[SqlValue::Int(id)])?;
    let mut entries = Vec::new();
    for_each_log_entry(sql, id, &mut |entry| {
        entries.push((entry.seq, entry.change));
        Ok(())
    })?;
    let turns: Vec<_> =
        entries.iter().map(|(seq, change)| (row_key(id, *seq as usize), turn_value(change))).collect();
    set_log_turns(sql, &turns)?;
    entries.iter().try_for_each(|(seq, change)| insert_mentions(sql, id, seq.cast_signed(), change))
}

/// The last entry that names each chunk.
pub(crate) fn last_mentions(
    sql: &mut dyn SqlConnection,
    id: i64,
) -> Result<BTreeMap<ChunkId, LogEntry>, SqlError> {
    let mut chunks_by_seq: BTreeMap<u64, Vec<ChunkId>> = BTreeMap::new();
    let select = "SELECT turn, sentence, role, max(seq) FROM mention WHERE conversation = $1 \
                  GROUP BY turn, sentence, role";
    sql.query(select, &[SqlValue::Int(id)], &mut |row| {
        chunks_by_seq.entry(row.count(3)?).or_default().push(read_chunk_id(&row, 0)?);
        Ok(())
    })?;
    let mut mentions = BTreeMap::new();
    for (seq, chunks) in chunks_by_seq {
        let key = [SqlValue::Int(row_key(id, seq as usize))];
        sql.query("SELECT key, at, sum, change FROM log WHERE key = $1", &key, &mut |row| {
            let entry = read_log_entry(&row)?;
            mentions.extend(chunks.iter().map(|&chunk| (chunk, entry.clone())));
            Ok(())
        })?;
    }
    Ok(mentions)
}
