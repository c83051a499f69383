//! The table of conversations: one row each, with its name, its model and its counts.

use crate::names;
use crate::sql::{SqlConnection, SqlError, SqlValue};

/// A key leaves 31 bits for the id of the conversation.
const MAX_CONVERSATION_ID: i64 = (1 << 31) - 1;

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

/// When a conversation was created.
pub(crate) fn creation_time(sql: &mut dyn SqlConnection, id: i64) -> Result<i64, SqlError> {
    let mut created = None;
    sql.query("SELECT created FROM conversation WHERE id = $1", &[SqlValue::Int(id)], &mut |row| {
        created = Some(row.int(0)?);
        Ok(())
    })?;
    created.ok_or_else(|| SqlError::damaged("the conversation has no row"))
}

/// Creates an empty conversation.
pub(crate) fn create_conversation(sql: &mut dyn SqlConnection, name: &str, at: i64) -> Result<i64, SqlError> {
    names::check_name(name)?;
    let mut id = None;
    let insert = "INSERT INTO conversation (name, model, created, used, seq, turns, places, tokens, live) \
                  VALUES ($1, '', $2, $3, 0, 0, 0, 0, 0) RETURNING id";
    sql.query(insert, &[SqlValue::Text(name), SqlValue::Int(at), SqlValue::Int(at)], &mut |row| {
        id = Some(row.int(0)?);
        Ok(())
    })?;
    id.filter(|&id| id <= MAX_CONVERSATION_ID).ok_or_else(|| {
        SqlError::invalid_input("the store has no more ids for conversations: start another store")
    })
}

/// Renames a conversation, unless the name is taken.
pub(crate) fn rename_conversation(sql: &mut dyn SqlConnection, id: i64, to: &str) -> Result<(), SqlError> {
    if find_conversation_id(sql, to)?.is_some() {
        return Err(names::name_taken(to));
    }
    let rename = "UPDATE conversation SET name = $1 WHERE id = $2";
    sql.execute(rename, &[SqlValue::Text(to), SqlValue::Int(id)]).map(drop)
}

pub(crate) fn set_model(sql: &mut dyn SqlConnection, id: i64, model: &str) -> Result<(), SqlError> {
    let update = "UPDATE conversation SET model = $1 WHERE id = $2";
    sql.execute(update, &[SqlValue::Text(model), SqlValue::Int(id)]).map(drop)
}

pub(crate) fn set_last_used(sql: &mut dyn SqlConnection, id: i64, at: i64) -> Result<(), SqlError> {
    let update = "UPDATE conversation SET used = $1 WHERE id = $2";
    sql.execute(update, &[SqlValue::Int(at), SqlValue::Int(id)]).map(drop)
}

/// The number of the conversation's last log entry, as its own row has it; 0 where the row is missing.
pub(crate) fn conversation_seq(sql: &mut dyn SqlConnection, id: i64) -> Result<u64, SqlError> {
    let mut seq = 0;
    sql.query("SELECT seq FROM conversation WHERE id = $1", &[SqlValue::Int(id)], &mut |row| {
        seq = row.count(0)?;
        Ok(())
    })?;
    Ok(seq)
}
