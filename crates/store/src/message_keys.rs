//! Message keys: hashes by which the history that a client sends is matched to a conversation. They are derived data: a
//! conversation without keys gets them when it is opened.

use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlRow, SqlValue};
use halo_core::store::{MessageKey, MessageLookup};
use halo_core::token::{Role, TurnId};

fn read_key(row: &SqlRow<'_>) -> Result<MessageKey, SqlError> {
    let damaged = || SqlError::damaged("a message key is damaged");
    let number = |column| u32::try_from(row.int(column)?).map_err(|_| damaged());
    Ok(MessageKey {
        turn: TurnId(number(0)?),
        role: row.text(1)?.chars().next().and_then(Role::from_letter).ok_or_else(damaged)?,
        exact_hash: row.int(2)?.cast_unsigned(),
        loose_hash: row.int(3)?.cast_unsigned(),
        name_hash: row.int(4)?.cast_unsigned(),
        length: number(5)?,
        prefix_hash: row.int(6)?.cast_unsigned(),
    })
}

/// The keys of the last messages of a conversation, at most `limit`, in order.
pub(crate) fn last_keys(
    sql: &mut dyn SqlConnection,
    id: i64,
    limit: usize,
) -> Result<Vec<MessageKey>, SqlError> {
    let mut keys = Vec::new();
    let select = "SELECT turn, role, exact, loose, name, length, prefix FROM message WHERE conversation = $1 \
                  ORDER BY turn DESC LIMIT $2";
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    sql.query(select, &[SqlValue::Int(id), SqlValue::Int(limit)], &mut |row| {
        keys.push(read_key(&row)?);
        Ok(())
    })?;
    keys.reverse();
    Ok(keys)
}

pub(crate) fn put_keys(sql: &mut dyn SqlConnection, id: i64, keys: &[MessageKey]) -> Result<(), SqlError> {
    let row = |key: &MessageKey| {
        let hash = |hash: u64| SqlValue::Int(hash.cast_signed());
        vec![
            SqlValue::Int(id),
            SqlValue::Int(i64::from(key.turn.0)),
            rows::role_value(key.role),
            hash(key.exact_hash),
            hash(key.loose_hash),
            hash(key.name_hash),
            SqlValue::Int(i64::from(key.length)),
            hash(key.prefix_hash),
        ]
    };
    let rows: Vec<_> = keys.iter().map(row).collect();
    let upsert = "INSERT INTO message (conversation, turn, role, exact, loose, name, length, prefix) \
                  VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (conversation, turn) DO UPDATE SET \
                  role = excluded.role, exact = excluded.exact, loose = excluded.loose, name = excluded.name, \
                  length = excluded.length, prefix = excluded.prefix";
    sql.execute_many(upsert, &rows)
}

/// Conversations with a message that has the hash, and its turn; the newest conversations first.
pub(crate) fn find_conversations(
    sql: &mut dyn SqlConnection,
    lookup: MessageLookup,
    limit: usize,
) -> Result<Vec<(String, TurnId)>, SqlError> {
    let (select, hash) = match lookup {
        MessageLookup::Prefix(hash) => (
            "SELECT c.name, m.turn FROM message m JOIN conversation c ON c.id = m.conversation \
             WHERE m.prefix = $1 ORDER BY m.conversation DESC, m.turn DESC LIMIT $2",
            hash,
        ),
        MessageLookup::Loose(hash) => (
            "SELECT c.name, m.turn FROM message m JOIN conversation c ON c.id = m.conversation \
             WHERE m.loose = $1 ORDER BY m.conversation DESC, m.turn DESC LIMIT $2",
            hash,
        ),
    };
    let mut matches = Vec::new();
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    sql.query(select, &[SqlValue::Int(hash.cast_signed()), SqlValue::Int(limit)], &mut |row| {
        let turn = u32::try_from(row.int(1)?).map_err(|_| SqlError::damaged("a message key is damaged"))?;
        matches.push((row.text(0)?.to_owned(), TurnId(turn)));
        Ok(())
    })?;
    Ok(matches)
}

/// Copies the keys of one conversation to another, up to a turn.
pub(crate) fn copy_keys(sql: &mut dyn SqlConnection, from: i64, to: i64, last: u32) -> Result<(), SqlError> {
    let copy = "INSERT INTO message (conversation, turn, role, exact, loose, name, length, prefix) \
                SELECT CAST($1 AS BIGINT), turn, role, exact, loose, name, length, prefix FROM message \
                WHERE conversation = $2 AND turn <= $3";
    sql.execute(copy, &[SqlValue::Int(to), SqlValue::Int(from), SqlValue::Int(i64::from(last))]).map(drop)
}
