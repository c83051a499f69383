//! Message keys: by which the history that a client sends is found again. They are derived data. A conversation that has
//! none yet gets them when it is next opened.

use crate::rows;
use crate::sql::{Cell, Row, Sql, SqlError};
use halo_core::seams::{MessageKey, MessageLookup};
use halo_core::token::{Role, TurnId};

fn key_of(row: &Row<'_>) -> Result<MessageKey, SqlError> {
    let damaged = || SqlError::damaged("a message key cannot be read");
    let small = |column| u32::try_from(row.int(column)?).map_err(|_| damaged());
    Ok(MessageKey {
        turn: TurnId(small(0)?),
        role: row.text(1)?.chars().next().and_then(Role::from_letter).ok_or_else(damaged)?,
        exact: row.int(2)?.cast_unsigned(),
        loose: row.int(3)?.cast_unsigned(),
        name: row.int(4)?.cast_unsigned(),
        length: small(5)?,
        prefix: row.int(6)?.cast_unsigned(),
    })
}

/// The last so many keys of a conversation, by turn.
pub(crate) fn last(sql: &mut dyn Sql, id: i64, most: usize) -> Result<Vec<MessageKey>, SqlError> {
    let mut keys = Vec::new();
    let select = "SELECT turn, role, exact, loose, name, length, prefix FROM message WHERE conversation = $1 \
                  ORDER BY turn DESC LIMIT $2";
    let most = i64::try_from(most).unwrap_or(i64::MAX);
    sql.query(select, &[Cell::Int(id), Cell::Int(most)], &mut |row| {
        keys.push(key_of(&row)?);
        Ok(())
    })?;
    keys.reverse();
    Ok(keys)
}

pub(crate) fn put(sql: &mut dyn Sql, id: i64, keys: &[MessageKey]) -> Result<(), SqlError> {
    let row = |key: &MessageKey| {
        let hash = |hash: u64| Cell::Int(hash.cast_signed());
        vec![
            Cell::Int(id),
            Cell::Int(i64::from(key.turn.0)),
            rows::role(key.role),
            hash(key.exact),
            hash(key.loose),
            hash(key.name),
            Cell::Int(i64::from(key.length)),
            hash(key.prefix),
        ]
    };
    let rows: Vec<_> = keys.iter().map(row).collect();
    let upsert = "INSERT INTO message (conversation, turn, role, exact, loose, name, length, prefix) \
                  VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (conversation, turn) DO UPDATE SET \
                  role = excluded.role, exact = excluded.exact, loose = excluded.loose, name = excluded.name, \
                  length = excluded.length, prefix = excluded.prefix";
    sql.run_many(upsert, &rows)
}

/// Conversations that hold a message, the newest first.
pub(crate) fn find(
    sql: &mut dyn Sql,
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
    sql.query(select, &[Cell::Int(hash.cast_signed()), Cell::Int(most)], &mut |row| {
        let turn =
            u32::try_from(row.int(1)?).map_err(|_| SqlError::damaged("a message key cannot be read"))?;
        found.push((row.text(0)?.to_owned(), TurnId(turn)));
        Ok(())
    })?;
    Ok(found)
}

/// Gives one conversation the keys of another, up to a turn.
pub(crate) fn copy(sql: &mut dyn Sql, from: i64, to: i64, last: u32) -> Result<(), SqlError> {
    let copy = "INSERT INTO message (conversation, turn, role, exact, loose, name, length, prefix) \
                SELECT CAST($1 AS BIGINT), turn, role, exact, loose, name, length, prefix FROM message \
                WHERE conversation = $2 AND turn <= $3";
    sql.run(copy, &[Cell::Int(to), Cell::Int(from), Cell::Int(i64::from(last))]).map(drop)
}
