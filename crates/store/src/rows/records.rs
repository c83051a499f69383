//! Records of a conversation: notes, settings, captures, memories and whatever else has a kind and a key.

use super::columns::checksum_value;
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlRow, SqlValue};
use halo_core::chunk_body::checksum_bytes;
use halo_core::store::{Record, RecordKind};

/// Writes a record in place of the one that has the key; without a value, deletes it.
pub(crate) fn put_record(
    sql: &mut dyn SqlConnection,
    id: i64,
    kind: &str,
    key: &str,
    value: Option<&str>,
    at: i64,
) -> Result<(), SqlError> {
    let primary_key = [SqlValue::Int(id), SqlValue::Text(kind), SqlValue::Text(key)];
    let Some(value) = value else {
        let delete = "DELETE FROM record WHERE conversation = $1 AND kind = $2 AND key = $3";
        return sql.execute(delete, &primary_key).map(drop);
    };
    let [id, kind, key] = primary_key;
    let upsert = "INSERT INTO record (conversation, kind, key, value, sum, at) VALUES ($1, $2, $3, $4, $5, $6) \
                  ON CONFLICT (conversation, kind, key) DO UPDATE SET value = excluded.value, sum = excluded.sum, at = excluded.at";
    let checksum = checksum_value(value.as_bytes());
    sql.execute(upsert, &[id, kind, key, SqlValue::Text(value), checksum, SqlValue::Int(at)]).map(drop)
}

/// Writes a record unless there is one with the key.
pub(crate) fn insert_record(
    sql: &mut dyn SqlConnection,
    id: i64,
    kind: &str,
    key: &str,
    value: &str,
    at: i64,
) -> Result<(), SqlError> {
    let insert = "INSERT INTO record (conversation, kind, key, value, sum, at) VALUES ($1, $2, $3, $4, $5, $6) \
                  ON CONFLICT (conversation, kind, key) DO NOTHING";
    let (id, at, checksum) = (SqlValue::Int(id), SqlValue::Int(at), checksum_value(value.as_bytes()));
    let cells = [id, SqlValue::Text(kind), SqlValue::Text(key), SqlValue::Text(value), checksum, at];
    sql.execute(insert, &cells).map(drop)
}

/// Reads a record from the columns key, value, sum, at.
pub(crate) fn read_record(row: &SqlRow<'_>, kind: &str) -> Result<Record, SqlError> {
    let (key, value) = (row.text(0)?.to_owned(), row.text(1)?.to_owned());
    if checksum_bytes(value.as_bytes()) != row.int(2)?.cast_unsigned() {
        return Err(SqlError::damaged(format!("the checksum of the {kind} '{key}' does not match")));
    }
    Ok(Record { key, value, updated_at: row.int(3)? })
}

/// The record of a kind with a key.
pub(crate) fn record(
    sql: &mut dyn SqlConnection,
    id: i64,
    kind: &str,
    key: &str,
) -> Result<Option<Record>, SqlError> {
    let mut found = None;
    let select = "SELECT key, value, sum, at FROM record WHERE conversation = $1 AND kind = $2 AND key = $3";
    let primary_key = [SqlValue::Int(id), SqlValue::Text(kind), SqlValue::Text(key)];
    sql.query(select, &primary_key, &mut |row| {
        found = Some(read_record(&row, kind)?);
        Ok(())
    })?;
    Ok(found)
}

/// The record with a key in the conversation that was used last, with its name. One lookup by the primary key for each
/// conversation, in one query.
pub(crate) fn find_record(
    sql: &mut dyn SqlConnection,
    kind: &str,
    key: &str,
) -> Result<Option<(String, Record)>, SqlError> {
    let mut found = None;
    let select = "SELECT r.key, r.value, r.sum, r.at, c.name FROM conversation c JOIN record r \
                  ON r.conversation = c.id AND r.kind = $1 AND r.key = $2 ORDER BY c.used DESC LIMIT 1";
    sql.query(select, &[SqlValue::Text(kind), SqlValue::Text(key)], &mut |row| {
        found = Some((row.text(4)?.to_owned(), read_record(&row, kind)?));
        Ok(())
    })?;
    Ok(found)
}

/// The records with a key, with the names of their conversations.
pub(crate) fn records_with_key(
    sql: &mut dyn SqlConnection,
    kind: &str,
    key: &str,
) -> Result<Vec<(String, Record)>, SqlError> {
    let mut found = Vec::new();
    let select = "SELECT r.key, r.value, r.sum, r.at, c.name FROM conversation c JOIN record r \
                  ON r.conversation = c.id AND r.kind = $1 AND r.key = $2";
    sql.query(select, &[SqlValue::Text(kind), SqlValue::Text(key)], &mut |row| {
        found.push((row.text(4)?.to_owned(), read_record(&row, kind)?));
        Ok(())
    })?;
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// The records of one kind, sorted by key.
pub(crate) fn records(sql: &mut dyn SqlConnection, id: i64, kind: &str) -> Result<Vec<Record>, SqlError> {
    let mut records = Vec::new();
    let select = "SELECT key, value, sum, at FROM record WHERE conversation = $1 AND kind = $2";
    sql.query(select, &[SqlValue::Int(id), SqlValue::Text(kind)], &mut |row| {
        records.push(read_record(&row, kind)?);
        Ok(())
    })?;
    // SQLite and PostgreSQL sort text differently.
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
