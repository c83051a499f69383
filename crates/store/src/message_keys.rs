//! Message keys: by which the history that a client sends is found again. They are derived data. A conversation that has
//! none yet gets them when it is next opened.

use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlRow, SqlValue};
use halo_core::store::{MessageKey, MessageLookup};
use halo_core::token::{Role, TurnId};

fn read_key(row: &SqlRow<'_>) -> Result<MessageKey, SqlError> {
    let damaged = || SqlError::damaged("a message key cannot be read");
    let small = |column| u32::try_from(row.int(column)?).map_err(|_| damaged());
    Ok(MessageKey {
        turn: TurnId(small(0)?),
        role: row.text(1)?.chars().next().and_then(Role::from_letter).ok_or_else(damaged)?,
        exact_hash: row.int(2)?.cast_unsigned(),
        loose_hash: row.int(3)?.cast_unsigned(),
        name_hash: row.int(4)?.cast_unsigned(),
        length: small(5)?,
        prefix_hash: row.int(6)?.cast_unsigned(),
    })
}

/// The last so many keys of a conversation, by turn.
pub(crate) fn last_keys(
    sql: &mut dyn SqlConnection,
    id: i64,
    most: usize,
) -> Result<Vec<MessageKey>, SqlError> {
    let mut keys = Vec::new();
    let select = "SELECT turn, role, exact, loose, name, length, prefix FROM message WHERE conversation = $1 \
                  ORDER BY turn DESC LIMIT $2";
    let most = i64::try_from(most).unwrap_or(i64::MAX);
    sql.query(select, &[SqlValue::Int(id), SqlValue::Int(most)], &mut |row| {
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

/// Conversations that hold a message, the newest first.
pub(crate) fn find_conversations(
    sql: &mut dyn SqlConnection,
    lookup: MessageLookup,
    most: usize,
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
    let mut found = Vec::new();
    let most = i64::try_from(most).unwrap_or(i64::MAX);
    sql.query(select, &[SqlValue::Int(hash.cast_signed()), SqlValue::Int(most)], &mut |row| {
        let turn =
            u32::try_from(row.int(1)?).map_err(|_| SqlError::damaged("a message key cannot be read"))?;
        found.push((row.text(0)?.to_owned(), TurnId(turn)));
        Ok(())
    })?;
    Ok(found)
}

/// Gives one conversation the keys of another, up to a turn.
pub(crate) fn copy_keys(sql: &mut dyn SqlConnection, from: i64, to: i64, last: u32) -> Result<(), SqlError> {
    let copy = "INSERT INTO message (conversation, turn, role, exact, loose, name, length, prefix) \
                SELECT CAST($1 AS BIGINT), turn, role, exact, loose, name, length, prefix FROM message \
                WHERE conversation = $2 AND turn <= $3";
    sql.execute(copy, &[SqlValue::Int(to), SqlValue::Int(from), SqlValue::Int(i64::from(last))]).map(drop)
}
