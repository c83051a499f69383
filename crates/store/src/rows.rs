//! The rows that a conversation is made of: how each is written and read, and nothing about when.

use crate::block;
use crate::compact;
use crate::log;
use crate::sql::{Cell, Row, Sql, SqlError};
use halo_core::body::{Body, sum_of};
use halo_core::change::Change;
use halo_core::parts::Parts;
use halo_core::past::Past;
use halo_core::seams::{Embedding, Entry, Kind, Record};
use halo_core::timeline::{Head, Timeline};
use halo_core::token::{ChunkId, Role, TurnId};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// A key is conversation × 2³² + place or number.
pub(crate) fn key(conversation: i64, n: usize) -> i64 {
    (conversation << 32) | n as i64
}

/// The keys of a conversation.
pub(crate) fn keys(conversation: i64) -> [Cell<'static>; 2] {
    [Cell::Int(key(conversation, 0)), Cell::Int(key(conversation, u32::MAX as usize))]
}

pub(crate) fn place_of(key: i64) -> usize {
    (key & i64::from(u32::MAX)) as usize
}

pub(crate) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

pub(crate) fn role(role: Role) -> Cell<'static> {
    Cell::Text(match role {
        Role::System => "s",
        Role::User => "u",
        Role::Assistant => "a",
    })
}

/// The three columns that name a chunk.
pub(crate) fn name_cells(id: ChunkId) -> [Cell<'static>; 3] {
    [Cell::Int(i64::from(id.turn.0)), Cell::Int(i64::from(id.sentence)), role(id.role)]
}

/// The chunk that three columns, from `column` on, name.
pub(crate) fn chunk_id(row: &Row<'_>, column: usize) -> Result<ChunkId, SqlError> {
    let small =
        |i| u32::try_from(row.int(i)?).map_err(|_| SqlError::damaged("the number of a chunk is too large"));
    let role = row.text(column + 2)?.chars().next().and_then(Role::from_letter);
    let role = role.ok_or_else(|| SqlError::damaged("the role of a chunk is none"))?;
    Ok(ChunkId::new(role, TurnId(small(column)?), small(column + 1)?))
}

pub(crate) fn body_of(name: &dyn fmt::Display, sum: i64, bytes: &[u8]) -> Result<Body, SqlError> {
    if sum_of(bytes) != sum.cast_unsigned() {
        return Err(SqlError::damaged(format!(
            "the tokens of {name} are not what was written (their sum differs)"
        )));
    }
    Body::read(bytes).map_err(|e| SqlError::damaged(format!("the tokens of {name} cannot be read: {e}")))
}

/// A conversation's name is any line of text.
pub(crate) fn check_name(name: &str) -> Result<(), SqlError> {
    if name.is_empty() || name.len() > 200 || name.chars().any(char::is_control) || name.trim() != name {
        let why = "a conversation's name is 1 to 200 bytes of text on one line, without space at its ends";
        return Err(SqlError::refused(why));
    }
    Ok(())
}

pub(crate) fn no_conversation(name: &str) -> SqlError {
    SqlError::refused(format!(
        "there is no conversation '{name}'; `halo conversations` lists those that there are"
    ))
}

pub(crate) fn find(sql: &mut dyn Sql, conversation: &str) -> Result<Option<i64>, SqlError> {
    let mut id = None;
    sql.query("SELECT id FROM conversation WHERE name = $1", &[Cell::Text(conversation)], &mut |row| {
        id = Some(row.int(0)?);
        Ok(())
    })?;
    Ok(id)
}

/// Makes a conversation in which nothing was said.
pub(crate) fn create(sql: &mut dyn Sql, name: &str, at: i64) -> Result<i64, SqlError> {
    check_name(name)?;
    let mut id = None;
    let insert = "INSERT INTO conversation (name, model, created, used, seq, turns, places, tokens, live) \
                  VALUES ($1, '', $2, $3, 0, 0, 0, 0, 0) RETURNING id";
    sql.query(insert, &[Cell::Text(name), Cell::Int(at), Cell::Int(at)], &mut |row| {
        id = Some(row.int(0)?);
        Ok(())
    })?;
    // A key leaves 31 bits for the conversation.
    id.filter(|&id| id < 1 << 31)
        .ok_or_else(|| SqlError::refused("the store holds as many conversations as it can"))
}

/// The entries of a conversation's log, in order.
pub(crate) fn entries(
    sql: &mut dyn Sql,
    id: i64,
    each: &mut dyn FnMut(Entry) -> Result<(), SqlError>,
) -> Result<(), SqlError> {
    let select = "SELECT key, at, sum, change FROM log WHERE key BETWEEN $1 AND $2 ORDER BY key";
    let mut last = 0;
    sql.query(select, &keys(id), &mut |row| {
        let entry = entry_of(&row)?;
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
pub(crate) fn replay(sql: &mut dyn Sql, id: i64) -> Result<Timeline, SqlError> {
    replay_until(sql, id, &mut |_| false)
}

/// The timeline that the log makes up to the first change that it is to end before.
fn replay_until(
    sql: &mut dyn Sql,
    id: i64,
    ends_before: &mut dyn FnMut(&Change) -> bool,
) -> Result<Timeline, SqlError> {
    let mut timeline = Timeline::new();
    entries(sql, id, &mut |entry| {
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
pub(crate) fn replay_through(sql: &mut dyn Sql, id: i64, turn: TurnId) -> Result<Timeline, SqlError> {
    let mut past = Past::new(turn);
    let timeline = replay_until(sql, id, &mut |change| past.ends_before(change))?;
    if past.is_found() {
        Ok(timeline)
    } else {
        Err(SqlError::damaged(format!("there is no turn {} in it", turn.0)))
    }
}

/// The timeline that the blocks and bodies make, of about so many turns and chunks.
pub(crate) fn read_state(sql: &mut dyn Sql, id: i64, size: (usize, usize)) -> Result<Timeline, SqlError> {
    // A count that was damaged is not believed.
    let mut parts = Parts::with_capacity(size.0.min(1 << 20), size.1.min(1 << 20));
    let mut next = 0;
    let select = "SELECT key, sum, heads FROM block WHERE key BETWEEN $1 AND $2 ORDER BY key";
    sql.query(select, &keys(id), &mut |row| {
        let (place, bytes) = (place_of(row.int(0)?), row.blob(2)?);
        let whole = place == next && sum_of(bytes) == row.int(1)?.cast_unsigned();
        next += 1;
        let read = whole.then(|| block::read(bytes, &mut parts)).flatten();
        read.ok_or_else(|| SqlError::damaged(format!("block {place} of its chunks is not what was written")))
    })?;
    let take = |parts: &mut Parts, row: &Row<'_>| {
        let place = place_of(row.int(0)?);
        let name = parts.name(place).map_or_else(|| format!("chunk {place}"), |name| name.to_string());
        let body = body_of(&name, row.int(1)?, row.blob(2)?)?;
        parts.body(place, body).map_err(SqlError::damaged)
    };
    let live = "SELECT key, sum, body FROM chunk WHERE conversation = $1 AND live = 1 ORDER BY key";
    sql.query(live, &[Cell::Int(id)], &mut |row| take(&mut parts, &row))?;
    if parts.last_is_dead() {
        let last = [Cell::Int(key(id, parts.places() - 1))];
        sql.query("SELECT key, sum, body FROM chunk WHERE key = $1", &last, &mut |row| {
            take(&mut parts, &row)
        })?;
    }
    parts.finish().map_err(SqlError::damaged)
}

pub(crate) fn last_scored(sql: &mut dyn Sql, id: i64) -> Result<Option<(i64, Change)>, SqlError> {
    let mut last = None;
    let [from, to] = keys(id);
    let select = "SELECT key, at, sum, change FROM log WHERE key BETWEEN $1 AND $2 AND scores = 1 ORDER BY key DESC LIMIT 1";
    sql.query(select, &[from, to], &mut |row| {
        last = Some((row.int(0)?, entry_of(&row)?.change));
        Ok(())
    })?;
    Ok(last)
}

/// An entry of the log, from key, time, sum and change.
pub(crate) fn entry_of(row: &Row<'_>) -> Result<Entry, SqlError> {
    let (seq, text) = (place_of(row.int(0)?) as u64, row.text(3)?);
    if sum_of(text.as_bytes()) != row.int(2)?.cast_unsigned() {
        return Err(SqlError::damaged(format!("entry {seq} of its log is not what was written")));
    }
    let change = log::read(text);
    let change =
        change.map_err(|e| SqlError::damaged(format!("entry {seq} of its log cannot be read: {e}")))?;
    Ok(Entry { seq, at: row.int(1)?, change })
}

pub(crate) fn flag(on: bool) -> Cell<'static> {
    Cell::Int(i64::from(on))
}

pub(crate) fn sum_cell(bytes: &[u8]) -> Cell<'static> {
    Cell::Int(sum_of(bytes).cast_signed())
}

pub(crate) fn insert_entry(sql: &mut dyn Sql, key: i64, at: i64, change: &Change) -> Result<(), SqlError> {
    let text = log::write(change);
    let args = [
        Cell::Int(key),
        Cell::Int(at),
        flag(compact::scores(change)),
        sum_cell(text.as_bytes()),
        Cell::Text(&text),
    ];
    sql.run("INSERT INTO log (key, at, scores, sum, change) VALUES ($1, $2, $3, $4, $5)", &args).map(drop)
}

/// Puts something shorter, or nothing, in the place of an entry.
pub(crate) fn rewrite_entry(sql: &mut dyn Sql, key: i64, change: Option<&Change>) -> Result<(), SqlError> {
    let Some(change) = change else {
        return sql.run("DELETE FROM log WHERE key = $1", &[Cell::Int(key)]).map(drop);
    };
    let text = log::write(change);
    let args = [flag(compact::scores(change)), sum_cell(text.as_bytes()), Cell::Text(&text), Cell::Int(key)];
    sql.run("UPDATE log SET scores = $1, sum = $2, change = $3 WHERE key = $4", &args).map(drop)
}

/// Who is told of each entry that adds tokens: to which turn, and when.
pub(crate) fn appends(
    sql: &mut dyn Sql,
    id: i64,
    listen: &mut dyn FnMut(TurnId, i64),
) -> Result<(), SqlError> {
    // An entry that begins with its only addition tells the turn at once: the text behind it, which is most of the log,
    // is not taken apart. Quotes within a text are escaped, so nothing that was said looks like this.
    let select = r#"SELECT at, CASE WHEN change LIKE '[{"append":{"at":%' AND change NOT LIKE '%"append":{"at":%"append":{"at":%'
                    THEN substr(change, 1, 64) ELSE change END
                    FROM log WHERE key > $1 AND key < $2 AND change LIKE '%"append":{"at":%' ORDER BY key"#;
    sql.query(select, &keys(id), &mut |row| {
        let (at, text) = (row.int(0)?, row.text(1)?);
        let damaged = || SqlError::damaged("an entry of the log cannot be read");
        if text.len() <= 64 && text.starts_with(r#"[{"append":{"at":"#) {
            let turn = text.split_once(r#""turn":"#).map(|(_, turn)| turn).ok_or_else(damaged)?;
            let digits = turn.find(|c: char| !c.is_ascii_digit()).map_or(turn, |end| &turn[..end]);
            listen(TurnId(digits.parse().map_err(|_| damaged())?), at);
            return Ok(());
        }
        let change = log::read(text).map_err(|_| damaged())?;
        for part in change.parts() {
            if let Change::Append(append) = part {
                listen(append.turn, at);
            }
        }
        Ok(())
    })
}

pub(crate) fn insert_mentions(sql: &mut dyn Sql, id: i64, seq: i64, change: &Change) -> Result<(), SqlError> {
    let row = |chunk| {
        let [turn, sentence, role] = name_cells(chunk);
        vec![Cell::Int(id), turn, sentence, role, Cell::Int(seq)]
    };
    let rows: Vec<_> = change.names().into_iter().map(row).collect();
    let insert = "INSERT INTO mention (conversation, turn, sentence, role, seq) VALUES ($1, $2, $3, $4, $5)";
    sql.run_many(insert, &rows)
}

/// The bodies at these places, as they are written.
fn bodies(places: &BTreeSet<usize>, timeline: &Timeline) -> Result<Vec<(usize, Head, Vec<u8>)>, SqlError> {
    let body = |&place: &usize| {
        let head = timeline.heads(place..place + 1).next().expect("what was touched is there");
        let mut bytes = Vec::with_capacity(1024);
        match timeline.body_at(place) {
            Some(body) => body.write(&mut bytes),
            None if head.len == 0 => Body::default().write(&mut bytes),
            None => return Err(SqlError::refused(format!("the tokens of {} are not in memory", head.id))),
        }
        Ok((place, head, bytes))
    };
    places.iter().map(body).collect()
}

pub(crate) fn upsert_bodies(
    sql: &mut dyn Sql,
    id: i64,
    places: &BTreeSet<usize>,
    timeline: &Timeline,
) -> Result<(), SqlError> {
    let bodies = bodies(places, timeline)?;
    let mut rows = Vec::with_capacity(bodies.len());
    for (place, head, bytes) in &bodies {
        let [turn, sentence, role] = name_cells(head.id);
        let (key, live) = (Cell::Int(key(id, *place)), flag(head.live > 0));
        rows.push(vec![key, Cell::Int(id), turn, sentence, role, live, sum_cell(bytes), Cell::Blob(bytes)]);
    }
    let upsert = "INSERT INTO chunk (key, conversation, turn, sentence, role, live, sum, body) \
                  VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (key) DO UPDATE SET turn = excluded.turn, \
                  sentence = excluded.sentence, role = excluded.role, live = excluded.live, sum = excluded.sum, \
                  body = excluded.body";
    sql.run_many(upsert, &rows)
}

/// Writes bodies whose chunks are there and live as before.
pub(crate) fn update_bodies(
    sql: &mut dyn Sql,
    id: i64,
    places: &BTreeSet<usize>,
    timeline: &Timeline,
) -> Result<(), SqlError> {
    let bodies = bodies(places, timeline)?;
    let mut rows = Vec::with_capacity(bodies.len());
    for (place, _, bytes) in &bodies {
        rows.push(vec![sum_cell(bytes), Cell::Blob(bytes), Cell::Int(key(id, *place))]);
    }
    sql.run_many("UPDATE chunk SET sum = $1, body = $2 WHERE key = $3", &rows)
}

pub(crate) fn upsert_blocks(
    sql: &mut dyn Sql,
    id: i64,
    blocks: impl Iterator<Item = usize>,
    timeline: &Timeline,
) -> Result<(), SqlError> {
    let blocks: Vec<_> = blocks.map(|b| (b, block::write(timeline, b))).collect();
    let mut rows = Vec::with_capacity(blocks.len());
    for (b, bytes) in &blocks {
        rows.push(vec![Cell::Int(key(id, *b)), sum_cell(bytes), Cell::Blob(bytes)]);
    }
    let upsert = "INSERT INTO block (key, sum, heads) VALUES ($1, $2, $3) \
                  ON CONFLICT (key) DO UPDATE SET sum = excluded.sum, heads = excluded.heads";
    sql.run_many(upsert, &rows)
}

pub(crate) fn set_model(sql: &mut dyn Sql, id: i64, model: &str) -> Result<(), SqlError> {
    sql.run("UPDATE conversation SET model = $1 WHERE id = $2", &[Cell::Text(model), Cell::Int(id)]).map(drop)
}

pub(crate) fn put_record(
    sql: &mut dyn Sql,
    id: i64,
    kind: Kind,
    key: &str,
    value: Option<&str>,
    at: i64,
) -> Result<(), SqlError> {
    let place = [Cell::Int(id), Cell::Text(kind.name()), Cell::Text(key)];
    let Some(value) = value else {
        let delete = "DELETE FROM record WHERE conversation = $1 AND kind = $2 AND key = $3";
        return sql.run(delete, &place).map(drop);
    };
    let [id, kind, key] = place;
    let upsert = "INSERT INTO record (conversation, kind, key, value, sum, at) VALUES ($1, $2, $3, $4, $5, $6) \
                  ON CONFLICT (conversation, kind, key) DO UPDATE SET value = excluded.value, sum = excluded.sum, at = excluded.at";
    sql.run(upsert, &[id, kind, key, Cell::Text(value), sum_cell(value.as_bytes()), Cell::Int(at)]).map(drop)
}

pub(crate) fn put_embedding(
    sql: &mut dyn Sql,
    id: i64,
    embedder: &str,
    embedding: &Embedding,
    at: i64,
) -> Result<(), SqlError> {
    let [turn, sentence, role] = name_cells(embedding.chunk);
    let place = [Cell::Int(id), Cell::Text(embedder), turn, sentence, role];
    if embedding.vector.is_empty() {
        let delete = "DELETE FROM embedding WHERE conversation = $1 AND embedder = $2 AND turn = $3 AND sentence = $4 \
                      AND role = $5";
        return sql.run(delete, &place).map(drop);
    }
    let bytes: Vec<u8> = embedding.vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    let [id, embedder, turn, sentence, role] = place;
    let upsert = "INSERT INTO embedding (conversation, embedder, turn, sentence, role, at, sum, vector, source) \
                  VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (conversation, embedder, turn, sentence, role) \
                  DO UPDATE SET at = excluded.at, sum = excluded.sum, vector = excluded.vector, source = excluded.source";
    let (at, source) = (Cell::Int(at), Cell::Int(embedding.of.cast_signed()));
    let cells = [id, embedder, turn, sentence, role, at, sum_cell(&bytes), Cell::Blob(&bytes), source];
    sql.run(upsert, &cells).map(drop)
}

fn vector_of(chunk: ChunkId, sum: i64, bytes: &[u8]) -> Result<Vec<f32>, SqlError> {
    let (quads, rest) = bytes.as_chunks::<4>();
    let vector: Vec<f32> = quads.iter().map(|&b| f32::from_le_bytes(b)).collect();
    if !rest.is_empty() || sum_of(bytes) != sum.cast_unsigned() {
        return Err(SqlError::damaged(format!("the embedding of {chunk} is not what was written")));
    }
    Ok(vector)
}

/// One row of what is kept of a kind: its key, its value, its sum and when.
pub(crate) fn record(row: &Row<'_>, kind: Kind) -> Result<Record, SqlError> {
    let (key, value) = (row.text(0)?.to_owned(), row.text(1)?.to_owned());
    if sum_of(value.as_bytes()) != row.int(2)?.cast_unsigned() {
        return Err(SqlError::damaged(format!("the {} '{key}' is not what was written", kind.name())));
    }
    Ok(Record { key, value, at: row.int(3)? })
}

/// What is kept of one kind, by key.
pub(crate) fn records(sql: &mut dyn Sql, id: i64, kind: Kind) -> Result<Vec<Record>, SqlError> {
    let mut records = Vec::new();
    let select = "SELECT key, value, sum, at FROM record WHERE conversation = $1 AND kind = $2";
    sql.query(select, &[Cell::Int(id), Cell::Text(kind.name())], &mut |row| {
        records.push(record(&row, kind)?);
        Ok(())
    })?;
    // The databases sort text differently.
    records.sort_by(|a, b| a.key.cmp(&b.key));
    Ok(records)
}

/// The names of the embedders that have made vectors for a conversation.
pub(crate) fn embedders(sql: &mut dyn Sql, id: i64) -> Result<BTreeSet<String>, SqlError> {
    let mut names = BTreeSet::new();
    let select = "SELECT DISTINCT embedder FROM embedding WHERE conversation = $1";
    sql.query(select, &[Cell::Int(id)], &mut |row| {
        names.insert(row.text(0)?.to_owned());
        Ok(())
    })?;
    Ok(names)
}

/// The vectors of one embedder, in order of birth, and when each was made.
pub(crate) fn embeddings(
    sql: &mut dyn Sql,
    id: i64,
    embedder: &str,
    each: &mut dyn FnMut(Embedding, i64) -> Result<(), SqlError>,
) -> Result<(), SqlError> {
    let select = "SELECT turn, sentence, role, at, sum, vector, source FROM embedding WHERE conversation = $1 \
                  AND embedder = $2 ORDER BY turn, sentence, role";
    sql.query(select, &[Cell::Int(id), Cell::Text(embedder)], &mut |row| {
        let chunk = chunk_id(&row, 0)?;
        let vector = vector_of(chunk, row.int(4)?, row.blob(5)?)?;
        each(Embedding { chunk, of: row.int(6)?.cast_unsigned(), vector }, row.int(3)?)
    })
}

/// Writes all of a timeline, whose bodies are all in memory, in the place of what was there.
pub(crate) fn write_all(sql: &mut dyn Sql, id: i64, seq: u64, timeline: &Timeline) -> Result<(), SqlError> {
    sql.run("DELETE FROM chunk WHERE key BETWEEN $1 AND $2", &keys(id))?;
    sql.run("DELETE FROM block WHERE key BETWEEN $1 AND $2", &keys(id))?;
    let places: Vec<usize> = (0..timeline.places()).collect();
    for some in places.chunks(1024) {
        upsert_bodies(sql, id, &some.iter().copied().collect(), timeline)?;
    }
    upsert_blocks(sql, id, 0..block::blocks(timeline), timeline)?;
    let counts = [timeline.turns().len(), timeline.places(), timeline.len(), timeline.live_len()];
    let [turns, places, tokens, live] = counts.map(|n| Cell::Int(n as i64));
    let update =
        "UPDATE conversation SET seq = $1, turns = $2, places = $3, tokens = $4, live = $5 WHERE id = $6";
    sql.run(update, &[Cell::Int(seq.cast_signed()), turns, places, tokens, live, Cell::Int(id)]).map(drop)
}

/// The last entry of the log that names each chunk.
pub(crate) fn last_mentions(sql: &mut dyn Sql, id: i64) -> Result<BTreeMap<ChunkId, Entry>, SqlError> {
    let mut last: BTreeMap<u64, Vec<ChunkId>> = BTreeMap::new();
    let select = "SELECT turn, sentence, role, max(seq) FROM mention WHERE conversation = $1 \
                  GROUP BY turn, sentence, role";
    sql.query(select, &[Cell::Int(id)], &mut |row| {
        last.entry(row.count(3)?).or_default().push(chunk_id(&row, 0)?);
        Ok(())
    })?;
    let mut found = BTreeMap::new();
    for (seq, chunks) in last {
        let entry = [Cell::Int(key(id, seq as usize))];
        sql.query("SELECT key, at, sum, change FROM log WHERE key = $1", &entry, &mut |row| {
            let entry = entry_of(&row)?;
            found.extend(chunks.iter().map(|&chunk| (chunk, entry.clone())));
            Ok(())
        })?;
    }
    Ok(found)
}
