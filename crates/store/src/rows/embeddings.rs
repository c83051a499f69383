//! Embedding vectors of chunks, by the embedder that made them.

use super::columns::{checksum_value, chunk_id_values, read_chunk_id};
use super::vector_bytes::{decode_vector, encode_vector};
use crate::sql::{SqlConnection, SqlError, SqlValue};
use halo_core::chunk_body::checksum_bytes;
use halo_core::store::Embedding;
use halo_core::token::ChunkId;
use std::collections::BTreeSet;

/// Writes a vector in place of the one that its chunk has; an empty vector deletes it.
pub(crate) fn put_embedding(
    sql: &mut dyn SqlConnection,
    id: i64,
    embedder: &str,
    embedding: &Embedding,
    at: i64,
) -> Result<(), SqlError> {
    let [turn, sentence, role] = chunk_id_values(embedding.chunk);
    let primary_key = [SqlValue::Int(id), SqlValue::Text(embedder), turn, sentence, role];
    if embedding.vector.is_empty() {
        let delete = "DELETE FROM embedding WHERE conversation = $1 AND embedder = $2 AND turn = $3 AND sentence = $4 \
                      AND role = $5";
        return sql.execute(delete, &primary_key).map(drop);
    }
    let bytes = encode_vector(&embedding.vector);
    let [id, embedder, turn, sentence, role] = primary_key;
    let upsert = "INSERT INTO embedding (conversation, embedder, turn, sentence, role, at, sum, vector, source) \
                  VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (conversation, embedder, turn, sentence, role) \
                  DO UPDATE SET at = excluded.at, sum = excluded.sum, vector = excluded.vector, source = excluded.source";
    let (at, source) = (SqlValue::Int(at), SqlValue::Int(embedding.text_hash.cast_signed()));
    let cells =
        [id, embedder, turn, sentence, role, at, checksum_value(&bytes), SqlValue::Blob(&bytes), source];
    sql.execute(upsert, &cells).map(drop)
}

fn read_vector(chunk: ChunkId, checksum: i64, bytes: &[u8]) -> Result<Vec<f32>, SqlError> {
    let vector = decode_vector(bytes).filter(|_| checksum_bytes(bytes) == checksum.cast_unsigned());
    vector
        .ok_or_else(|| SqlError::damaged(format!("the checksum of the embedding of {chunk} does not match")))
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

/// Calls `each` with every vector of one embedder, in the order of the chunks, and with the time it was made.
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
        let vector = read_vector(chunk, row.int(4)?, row.blob(5)?)?;
        each(Embedding { chunk, text_hash: row.int(6)?.cast_unsigned(), vector }, row.int(3)?)
    })
}
