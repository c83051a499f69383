//! The rows that a conversation is made of: how each is written and read, and nothing about when.

use crate::block;
use crate::log_compaction;
use crate::log_json;
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlRow, SqlValue};
use halo_core::change::Change;
use halo_core::chunk_body::{ChunkBody, checksum_bytes};
use halo_core::store::{Embedding, LogEntry, Record, RecordKind};
use halo_core::timeline::{ChunkHeader, Timeline};
use halo_core::timeline_builder::TimelineBuilder;
use halo_core::token::{ChunkId, Role, TurnId};
use halo_core::turn_end::TurnEndFinder;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// A key is conversation × 2³² + place or number.
pub(crate) fn row_key(conversation: i64, n: usize) -> i64 {
    (conversation << 32) | n as i64
}

/// The keys of a conversation.
pub(crate) fn row_key_range(conversation: i64) -> [SqlValue<'static>; 2] {
    [SqlValue::Int(row_key(conversation, 0)), SqlValue::Int(row_key(conversation, u32::MAX as usize))]
}

pub(crate) fn row_index(key: i64) -> usize {
    (key & i64::from(u32::MAX)) as usize
}

pub(crate) fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

pub(crate) fn role_value(role: Role) -> SqlValue<'static> {
    SqlValue::Text(match role {
        Role::System => "s",
        Role::User => "u",
        Role::Assistant => "a",
    })
}

/// The three columns that name a chunk.
pub(crate) fn chunk_id_values(id: ChunkId) -> [SqlValue<'static>; 3] {
    [SqlValue::Int(i64::from(id.turn.0)), SqlValue::Int(i64::from(id.index)), role_value(id.role)]
}

/// The chunk that three columns, from `column` on, name.
pub(crate) fn read_chunk_id(row: &SqlRow<'_>, column: usize) -> Result<ChunkId, SqlError> {
    let small =
        |i| u32::try_from(row.int(i)?).map_err(|_| SqlError::damaged("the number of a chunk is too large"));
    let role = row.text(column + 2)?.chars().next().and_then(Role::from_letter);
    let role = role.ok_or_else(|| SqlError::damaged("the role of a chunk is none"))?;
    Ok(ChunkId::new(role, TurnId(small(column)?), small(column + 1)?))
}

pub(crate) fn decode_body(name: &dyn fmt::Display, sum: i64, bytes: &[u8]) -> Result<ChunkBody, SqlError> {
    if checksum_bytes(bytes) != sum.cast_unsigned() {
        return Err(SqlError::damaged(format!(
            "the tokens of {name} are not what was written (their sum differs)"
        )));
    }
    ChunkBody::decode(bytes)
        .map_err(|e| SqlError::damaged(format!("the tokens of {name} cannot be read: {e}")))
}

/// A conversation's name is any line of text.
pub(crate) fn check_conversation_name(name: &str) -> Result<(), SqlError> {
    if name.is_empty() || name.len() > 200 || name.chars().any(char::is_control) || name.trim() != name {
        let why = "a conversation's name is 1 to 200 bytes of text on one line, without space at its ends";
        return Err(SqlError::invalid_input(why));
    }
    Ok(())
}

pub(crate) fn no_such_conversation(name: &str) -> SqlError {
    SqlError::not_found(format!("there is no conversation '{name}'"))
}

pub(crate) fn find_conversation_id(
    sql: &mut dyn SqlConnection,
    conversation: &str,
) -> Result<Option<i64>, SqlError> {
    let mut id = None;
    sql.query("SELECT id FROM conversation WHERE name = $1", &[SqlValue::Text(conversation)], &mut |row| {
        id = Some(row.int(0)?);
        Ok(())
    })?;
    Ok(id)
}

/// Makes a conversation in which nothing was said.
pub(crate) fn create_conversation(sql: &mut dyn SqlConnection, name: &str, at: i64) -> Result<i64, SqlError> {
    check_conversation_name(name)?;
    let mut id = None;
    let insert = "INSERT INTO conversation (name, model, created, used, seq, turns, places, tokens, live) \
                  VALUES ($1, '', $2, $3, 0, 0, 0, 0, 0) RETURNING id";
    sql.query(insert, &[SqlValue::Text(name), SqlValue::Int(at), SqlValue::Int(at)], &mut |row| {
        id = Some(row.int(0)?);
        Ok(())
    })?;
    // A key leaves 31 bits for the conversation.
    id.filter(|&id| id < 1 << 31)
        .ok_or_else(|| SqlError::invalid_input("the store holds as many conversations as it can"))
}

/// The entries of a conversation's log, in order.
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
            return Err(SqlError::damaged(format!(
                "entry {} of its log stands behind entry {last}",
                entry.seq
            )));
        }
        last = entry.seq;
        each(entry)
    })
}

/// The timeline that the log makes.
pub(crate) fn replay_log(sql: &mut dyn SqlConnection, id: i64) -> Result<Timeline, SqlError> {
    replay_log_until(sql, id, &mut |_| false)
}

/// The timeline that the log makes up to the first change that it is to end before.
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
        let misfit = |e| {
            SqlError::damaged(format!("entry {} of its log does not fit what came before: {e}", entry.seq))
        };
        timeline.apply(&entry.change).map(drop).map_err(misfit)
    })?;
    Ok(timeline)
}

/// The timeline that the log makes up to what was said in a turn.
pub(crate) fn replay_log_through_turn(
    sql: &mut dyn SqlConnection,
    id: i64,
    turn: TurnId,
) -> Result<Timeline, SqlError> {
    let mut past = TurnEndFinder::new(turn);
    let timeline = replay_log_until(sql, id, &mut |change| past.turn_ended_before(change))?;
    if past.is_found() {
        Ok(timeline)
    } else {
        Err(SqlError::damaged(format!("there is no turn {} in it", turn.0)))
    }
}

/// The timeline that the blocks and bodies make, of about so many turns and chunks.
pub(crate) fn read_state(
    sql: &mut dyn SqlConnection,
    id: i64,
    size: (usize, usize),
) -> Result<Timeline, SqlError> {
    // A count that was damaged is not believed.
    let mut parts = TimelineBuilder::with_capacity(size.0.min(1 << 20), size.1.min(1 << 20));
    let mut next = 0;
    let select = "SELECT key, sum, heads FROM block WHERE key BETWEEN $1 AND $2 ORDER BY key";
    sql.query(select, &row_key_range(id), &mut |row| {
        let (place, bytes) = (row_index(row.int(0)?), row.blob(2)?);
        let whole = place == next && checksum_bytes(bytes) == row.int(1)?.cast_unsigned();
        next += 1;
        let read = whole.then(|| block::decode(bytes, &mut parts)).flatten();
        read.ok_or_else(|| SqlError::damaged(format!("block {place} of its chunks is not what was written")))
    })?;
    let take = |parts: &mut TimelineBuilder, row: &SqlRow<'_>| {
        let place = row_index(row.int(0)?);
        let name = parts.chunk_id(place).map_or_else(|| format!("chunk {place}"), |name| name.to_string());
        let body = decode_body(&name, row.int(1)?, row.blob(2)?)?;
        parts.set_body(place, body).map_err(SqlError::damaged)
    };
    let live = "SELECT key, sum, body FROM chunk WHERE conversation = $1 AND live = 1 ORDER BY key";
    sql.query(live, &[SqlValue::Int(id)], &mut |row| take(&mut parts, &row))?;
    if parts.last_is_pruned() {
        let last = [SqlValue::Int(row_key(id, parts.row_count() - 1))];
        sql.query("SELECT key, sum, body FROM chunk WHERE key = $1", &last, &mut |row| {
            take(&mut parts, &row)
        })?;
    }
    parts.finish().map_err(SqlError::damaged)
}

pub(crate) fn last_score_entry(
    sql: &mut dyn SqlConnection,
    id: i64,
) -> Result<Option<(i64, Change)>, SqlError> {
    let mut last = None;
    let [from, to] = row_key_range(id);
    let select = "SELECT key, at, sum, change FROM log WHERE key BETWEEN $1 AND $2 AND scores = 1 ORDER BY key DESC LIMIT 1";
    sql.query(select, &[from, to], &mut |row| {
        last = Some((row.int(0)?, read_log_entry(&row)?.change));
        Ok(())
    })?;
    Ok(last)
}

/// An entry of the log, from key, time, sum and change.
pub(crate) fn read_log_entry(row: &SqlRow<'_>) -> Result<LogEntry, SqlError> {
    let (seq, text) = (row_index(row.int(0)?) as u64, row.text(3)?);
    if checksum_bytes(text.as_bytes()) != row.int(2)?.cast_unsigned() {
        return Err(SqlError::damaged(format!("entry {seq} of its log is not what was written")));
    }
    let change = log_json::from_json(text);
    let change =
        change.map_err(|e| SqlError::damaged(format!("entry {seq} of its log cannot be read: {e}")))?;
    Ok(LogEntry { seq, committed_at: row.int(1)?, change })
}

pub(crate) fn bool_value(on: bool) -> SqlValue<'static> {
    SqlValue::Int(i64::from(on))
}

pub(crate) fn checksum_value(bytes: &[u8]) -> SqlValue<'static> {
    SqlValue::Int(checksum_bytes(bytes).cast_signed())
}

pub(crate) fn insert_log_entry(
    sql: &mut dyn SqlConnection,
    key: i64,
    at: i64,
    change: &Change,
) -> Result<(), SqlError> {
    let text = log_json::to_json(change);
    let args = [
        SqlValue::Int(key),
        SqlValue::Int(at),
        bool_value(log_compaction::has_score(change)),
        checksum_value(text.as_bytes()),
        SqlValue::Text(&text),
    ];
    sql.execute("INSERT INTO log (key, at, scores, sum, change) VALUES ($1, $2, $3, $4, $5)", &args).map(drop)
}

/// Puts something shorter, or nothing, in the place of an entry.
pub(crate) fn rewrite_log_entry(
    sql: &mut dyn SqlConnection,
    key: i64,
    change: Option<&Change>,
) -> Result<(), SqlError> {
    let Some(change) = change else {
        return sql.execute("DELETE FROM log WHERE key = $1", &[SqlValue::Int(key)]).map(drop);
    };
    let text = log_json::to_json(change);
    let args = [
        bool_value(log_compaction::has_score(change)),
        checksum_value(text.as_bytes()),
        SqlValue::Text(&text),
        SqlValue::Int(key),
    ];
    sql.execute("UPDATE log SET scores = $1, sum = $2, change = $3 WHERE key = $4", &args).map(drop)
}

/// Who is told of each entry that adds tokens: to which turn, and when.
pub(crate) fn for_each_append(
    sql: &mut dyn SqlConnection,
    id: i64,
    listen: &mut dyn FnMut(TurnId, i64),
) -> Result<(), SqlError> {
    // An entry that begins with its only addition tells the turn at once: the text behind it, which is most of the log,
    // is not taken apart. Quotes within a text are escaped, so nothing that was said looks like this.
    let select = r#"SELECT at, CASE WHEN change LIKE '[{"append":{"at":%' AND change NOT LIKE '%"append":{"at":%"append":{"at":%'
                    THEN substr(change, 1, 64) ELSE change END
                    FROM log WHERE key > $1 AND key < $2 AND change LIKE '%"append":{"at":%' ORDER BY key"#;
    sql.query(select, &row_key_range(id), &mut |row| {
        let (at, text) = (row.int(0)?, row.text(1)?);
        let damaged = || SqlError::damaged("an entry of the log cannot be read");
        if text.len() <= 64 && text.starts_with(r#"[{"append":{"at":"#) {
            let turn = text.split_once(r#""turn":"#).map(|(_, turn)| turn).ok_or_else(damaged)?;
            let digits = turn.find(|c: char| !c.is_ascii_digit()).map_or(turn, |end| &turn[..end]);
            listen(TurnId(digits.parse().map_err(|_| damaged())?), at);
            return Ok(());
        }
        let change = log_json::from_json(text).map_err(|_| damaged())?;
        for part in change.flatten() {
            if let Change::Append(append) = part {
                listen(append.turn, at);
            }
        }
        Ok(())
    })
}

pub(crate) fn insert_mentions(
    sql: &mut dyn SqlConnection,
    id: i64,
    seq: i64,
    change: &Change,
) -> Result<(), SqlError> {
    let row = |chunk| {
        let [turn, sentence, role] = chunk_id_values(chunk);
        vec![SqlValue::Int(id), turn, sentence, role, SqlValue::Int(seq)]
    };
    let rows: Vec<_> = change.named_chunks().into_iter().map(row).collect();
    let insert = "INSERT INTO mention (conversation, turn, sentence, role, seq) VALUES ($1, $2, $3, $4, $5)";
    sql.execute_many(insert, &rows)
}

/// The bodies at these places, as they are written.
fn encode_bodies(
    places: &BTreeSet<usize>,
    timeline: &Timeline,
) -> Result<Vec<(usize, ChunkHeader, Vec<u8>)>, SqlError> {
    let body = |&place: &usize| {
        let head = timeline.chunk_headers(place..place + 1).next().expect("what was touched is there");
        let mut bytes = Vec::with_capacity(1024);
        match timeline.body_at_row(place) {
            Some(body) => body.encode(&mut bytes),
            None if head.len == 0 => ChunkBody::default().encode(&mut bytes),
            None => {
                return Err(SqlError::invalid_input(format!("the tokens of {} are not in memory", head.id)));
            }
        }
        Ok((place, head, bytes))
    };
    places.iter().map(body).collect()
}

pub(crate) fn upsert_bodies(
    sql: &mut dyn SqlConnection,
    id: i64,
    places: &BTreeSet<usize>,
    timeline: &Timeline,
) -> Result<(), SqlError> {
    let bodies = encode_bodies(places, timeline)?;
    let mut rows = Vec::with_capacity(bodies.len());
    for (place, head, bytes) in &bodies {
        let [turn, sentence, role] = chunk_id_values(head.id);
        let (key, live) = (SqlValue::Int(row_key(id, *place)), bool_value(head.live > 0));
        rows.push(vec![
            key,
            SqlValue::Int(id),
            turn,
            sentence,
            role,
            live,
            checksum_value(bytes),
            SqlValue::Blob(bytes),
        ]);
    }
    let upsert = "INSERT INTO chunk (key, conversation, turn, sentence, role, live, sum, body) \
                  VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (key) DO UPDATE SET turn = excluded.turn, \
                  sentence = excluded.sentence, role = excluded.role, live = excluded.live, sum = excluded.sum, \
                  body = excluded.body";
    sql.execute_many(upsert, &rows)
}

/// Writes bodies whose chunks are there and live as before.
pub(crate) fn update_bodies(
    sql: &mut dyn SqlConnection,
    id: i64,
    places: &BTreeSet<usize>,
    timeline: &Timeline,
) -> Result<(), SqlError> {
    let bodies = encode_bodies(places, timeline)?;
    let mut rows = Vec::with_capacity(bodies.len());
    for (place, _, bytes) in &bodies {
        rows.push(vec![checksum_value(bytes), SqlValue::Blob(bytes), SqlValue::Int(row_key(id, *place))]);
    }
    sql.execute_many("UPDATE chunk SET sum = $1, body = $2 WHERE key = $3", &rows)
}

pub(crate) fn upsert_blocks(
    sql: &mut dyn SqlConnection,
    id: i64,
    blocks: impl Iterator<Item = usize>,
    timeline: &Timeline,
) -> Result<(), SqlError> {
    let blocks: Vec<_> = blocks.map(|b| (b, block::encode(timeline, b))).collect();
    let mut rows = Vec::with_capacity(blocks.len());
    for (b, bytes) in &blocks {
        rows.push(vec![SqlValue::Int(row_key(id, *b)), checksum_value(bytes), SqlValue::Blob(bytes)]);
    }
    let upsert = "INSERT INTO block (key, sum, heads) VALUES ($1, $2, $3) \
                  ON CONFLICT (key) DO UPDATE SET sum = excluded.sum, heads = excluded.heads";
    sql.execute_many(upsert, &rows)
}

pub(crate) fn set_model(sql: &mut dyn SqlConnection, id: i64, model: &str) -> Result<(), SqlError> {
    sql.execute(
        "UPDATE conversation SET model = $1 WHERE id = $2",
        &[SqlValue::Text(model), SqlValue::Int(id)],
    )
    .map(drop)
}

pub(crate) fn put_record(
    sql: &mut dyn SqlConnection,
    id: i64,
    kind: &str,
    key: &str,
    value: Option<&str>,
    at: i64,
) -> Result<(), SqlError> {
    let place = [SqlValue::Int(id), SqlValue::Text(kind), SqlValue::Text(key)];
    let Some(value) = value else {
        let delete = "DELETE FROM record WHERE conversation = $1 AND kind = $2 AND key = $3";
        return sql.execute(delete, &place).map(drop);
    };
    let [id, kind, key] = place;
    let upsert = "INSERT INTO record (conversation, kind, key, value, sum, at) VALUES ($1, $2, $3, $4, $5, $6) \
                  ON CONFLICT (conversation, kind, key) DO UPDATE SET value = excluded.value, sum = excluded.sum, at = excluded.at";
    sql.execute(
        upsert,
        &[id, kind, key, SqlValue::Text(value), checksum_value(value.as_bytes()), SqlValue::Int(at)],
    )
    .map(drop)
}

pub(crate) fn put_embedding(
    sql: &mut dyn SqlConnection,
    id: i64,
    embedder: &str,
    embedding: &Embedding,
    at: i64,
) -> Result<(), SqlError> {
    let [turn, sentence, role] = chunk_id_values(embedding.chunk);
    let place = [SqlValue::Int(id), SqlValue::Text(embedder), turn, sentence, role];
    if embedding.vector.is_empty() {
        let delete = "DELETE FROM embedding WHERE conversation = $1 AND embedder = $2 AND turn = $3 AND sentence = $4 \
                      AND role = $5";
        return sql.execute(delete, &place).map(drop);
    }
    let bytes: Vec<u8> = embedding.vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    let [id, embedder, turn, sentence, role] = place;
    let upsert = "INSERT INTO embedding (conversation, embedder, turn, sentence, role, at, sum, vector, source) \
                  VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (conversation, embedder, turn, sentence, role) \
                  DO UPDATE SET at = excluded.at, sum = excluded.sum, vector = excluded.vector, source = excluded.source";
    let (at, source) = (SqlValue::Int(at), SqlValue::Int(embedding.text_hash.cast_signed()));
    let cells =
        [id, embedder, turn, sentence, role, at, checksum_value(&bytes), SqlValue::Blob(&bytes), source];
    sql.execute(upsert, &cells).map(drop)
}

fn decode_vector(chunk: ChunkId, sum: i64, bytes: &[u8]) -> Result<Vec<f32>, SqlError> {
    let (quads, rest) = bytes.as_chunks::<4>();
    let vector: Vec<f32> = quads.iter().map(|&b| f32::from_le_bytes(b)).collect();
    if !rest.is_empty() || checksum_bytes(bytes) != sum.cast_unsigned() {
        return Err(SqlError::damaged(format!("the embedding of {chunk} is not what was written")));
    }
    Ok(vector)
}

/// Reads the columns key, value, sum and at.
pub(crate) fn read_record(row: &SqlRow<'_>, kind: &str) -> Result<Record, SqlError> {
    let (key, value) = (row.text(0)?.to_owned(), row.text(1)?.to_owned());
    if checksum_bytes(value.as_bytes()) != row.int(2)?.cast_unsigned() {
        return Err(SqlError::damaged(format!("the {kind} '{key}' is not what was written")));
    }
    Ok(Record { key, value, updated_at: row.int(3)? })
}

/// The records of one kind, by key.
pub(crate) fn records(sql: &mut dyn SqlConnection, id: i64, kind: &str) -> Result<Vec<Record>, SqlError> {
    let mut records = Vec::new();
    let select = "SELECT key, value, sum, at FROM record WHERE conversation = $1 AND kind = $2";
    sql.query(select, &[SqlValue::Int(id), SqlValue::Text(kind)], &mut |row| {
        records.push(read_record(&row, kind)?);
        Ok(())
    })?;
    // The databases sort text differently.
    records.sort_by(|a, b| a.key.cmp(&b.key));
    Ok(records)
}

/// The kinds of records that a conversation or a namespace has: those of [`RecordKind`] in their order, then others by name.
/// Each kind is looked up on its own, so that damage in one does not hide those before it.
pub(crate) fn record_kinds(sql: &mut dyn SqlConnection, id: i64) -> Result<Vec<String>, SqlError> {
    let mut kinds: Vec<String> = RecordKind::ALL.iter().map(|kind| kind.name().to_owned()).collect();
    let mut last = String::new();
    loop {
        let mut next = None;
        let select = "SELECT kind FROM record WHERE conversation = $1 AND kind > $2 ORDER BY kind LIMIT 1";
        let read = sql.query(select, &[SqlValue::Int(id), SqlValue::Text(&last)], &mut |row| {
            next = Some(row.text(0)?.to_owned());
            Ok(())
        });
        match read {
            Err(error) if error.kind != SqlErrorKind::Damaged => return Err(error),
            _ => {}
        }
        let Some(kind) = next.filter(|kind| *kind > last) else { return Ok(kinds) };
        if !kinds.contains(&kind) {
            kinds.push(kind.clone());
        }
        last = kind;
    }
}

/// The names of the embedders that have made vectors for a conversation.
pub(crate) fn embedders(sql: &mut dyn SqlConnection, id: i64) -> Result<BTreeSet<String>, SqlError> {
    let mut names = BTreeSet::new();
    let select = "SELECT DISTINCT embedder FROM embedding WHERE conversation = $1";
    sql.query(select, &[SqlValue::Int(id)], &mut |row| {
        names.insert(row.text(0)?.to_owned());
        Ok(())
    })?;
    Ok(names)
}

/// The vectors of one embedder, in order of birth, and when each was made.
pub(crate) fn for_each_embedding(
    sql: &mut dyn SqlConnection,
    id: i64,
    embedder: &str,
    each: &mut dyn FnMut(Embedding, i64) -> Result<(), SqlError>,
) -> Result<(), SqlError> {
    let select = "SELECT turn, sentence, role, at, sum, vector, source FROM embedding WHERE conversation = $1 \
                  AND embedder = $2 ORDER BY turn, sentence, role";
    sql.query(select, &[SqlValue::Int(id), SqlValue::Text(embedder)], &mut |row| {
        let chunk = read_chunk_id(&row, 0)?;
        let vector = decode_vector(chunk, row.int(4)?, row.blob(5)?)?;
        each(Embedding { chunk, text_hash: row.int(6)?.cast_unsigned(), vector }, row.int(3)?)
    })
}

/// Writes all of a timeline, whose bodies are all in memory, in the place of what was there.
pub(crate) fn write_whole_state(
    sql: &mut dyn SqlConnection,
    id: i64,
    seq: u64,
    timeline: &Timeline,
) -> Result<(), SqlError> {
    sql.execute("DELETE FROM chunk WHERE key BETWEEN $1 AND $2", &row_key_range(id))?;
    sql.execute("DELETE FROM block WHERE key BETWEEN $1 AND $2", &row_key_range(id))?;
    let places: Vec<usize> = (0..timeline.row_count()).collect();
    for some in places.chunks(1024) {
        upsert_bodies(sql, id, &some.iter().copied().collect(), timeline)?;
    }
    upsert_blocks(sql, id, 0..block::block_count(timeline), timeline)?;
    let counts = [timeline.turns().len(), timeline.row_count(), timeline.len(), timeline.live_len()];
    let [turns, places, tokens, live] = counts.map(|n| SqlValue::Int(n as i64));
    let update =
        "UPDATE conversation SET seq = $1, turns = $2, places = $3, tokens = $4, live = $5 WHERE id = $6";
    sql.execute(update, &[SqlValue::Int(seq.cast_signed()), turns, places, tokens, live, SqlValue::Int(id)])
        .map(drop)
}

/// The last entry of the log that names each chunk.
pub(crate) fn last_mentions(
    sql: &mut dyn SqlConnection,
    id: i64,
) -> Result<BTreeMap<ChunkId, LogEntry>, SqlError> {
    let mut last: BTreeMap<u64, Vec<ChunkId>> = BTreeMap::new();
    let select = "SELECT turn, sentence, role, max(seq) FROM mention WHERE conversation = $1 \
                  GROUP BY turn, sentence, role";
    sql.query(select, &[SqlValue::Int(id)], &mut |row| {
        last.entry(row.count(3)?).or_default().push(read_chunk_id(&row, 0)?);
        Ok(())
    })?;
    let mut found = BTreeMap::new();
    for (seq, chunks) in last {
        let entry = [SqlValue::Int(row_key(id, seq as usize))];
        sql.query("SELECT key, at, sum, change FROM log WHERE key = $1", &entry, &mut |row| {
            let entry = read_log_entry(&row)?;
            found.extend(chunks.iter().map(|&chunk| (chunk, entry.clone())));
            Ok(())
        })?;
    }
    Ok(found)
}
