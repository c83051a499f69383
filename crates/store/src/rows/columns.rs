//! Values that several tables share: keys, chunk ids, roles, checksums and times.

use crate::sql::{SqlError, SqlRow, SqlValue};
use halo_core::chunk_body::checksum_bytes;
use halo_core::token::{ChunkId, Role, TurnId};
use std::time::{SystemTime, UNIX_EPOCH};

/// A key is conversation × 2³² + row (of a chunk or a block) or + sequence number (of a log entry).
pub(crate) fn row_key(conversation: i64, row: usize) -> i64 {
    (conversation << 32) | row as i64
}

/// The first and the last key that a conversation can have.
pub(crate) fn row_key_range(conversation: i64) -> [SqlValue<'static>; 2] {
    [SqlValue::Int(row_key(conversation, 0)), SqlValue::Int(row_key(conversation, u32::MAX as usize))]
}

pub(crate) fn row_index(key: i64) -> usize {
    (key & i64::from(u32::MAX)) as usize
}

/// The current time in milliseconds since 1970.
pub(crate) fn now_ms() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_millis()).unwrap_or(i64::MAX)
}

pub(crate) fn role_value(role: Role) -> SqlValue<'static> {
    SqlValue::Text(match role {
        Role::System => "s",
        Role::User => "u",
        Role::Assistant => "a",
        Role::Tool => "t",
    })
}

/// The three columns that name a chunk: turn, sentence, role.
pub(crate) fn chunk_id_values(id: ChunkId) -> [SqlValue<'static>; 3] {
    [SqlValue::Int(i64::from(id.turn.0)), SqlValue::Int(i64::from(id.index)), role_value(id.role)]
}

/// The chunk that the three columns from `column` on name.
pub(crate) fn read_chunk_id(row: &SqlRow<'_>, column: usize) -> Result<ChunkId, SqlError> {
    let small =
        |i| u32::try_from(row.int(i)?).map_err(|_| SqlError::damaged("a chunk number is out of range"));
    let role = row.text(column + 2)?.chars().next().and_then(Role::from_letter);
    let role = role.ok_or_else(|| SqlError::damaged("a chunk has an unknown role"))?;
    Ok(ChunkId::new(role, TurnId(small(column)?), small(column + 1)?))
}

pub(super) fn bool_value(on: bool) -> SqlValue<'static> {
    SqlValue::Int(i64::from(on))
}

pub(super) fn checksum_value(bytes: &[u8]) -> SqlValue<'static> {
    SqlValue::Int(checksum_bytes(bytes).cast_signed())
}
