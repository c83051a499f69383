//! Erasing text for good: from the bodies, the log, embeddings, memories and message keys. Positions are kept, so that no
//! other token moves: an erased chunk still has its length, and a log entry that says when it was deleted.

use crate::database::Database;
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlValue};
use halo_core::Error;
use halo_core::change::{Change, ChunkSelection, DeleteReason, Extent, NewToken, TokenRun};
use halo_core::store::{Access, Durability, EraseStore, RecordKind, Store};
use halo_core::token::{ChunkId, TokenId};
use serde_json::Value;

/// The text of a chunk that is erased, or is about to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForgottenChunk {
    pub chunk: ChunkId,
    pub text: String,
    /// How many tokens the chunk has.
    pub tokens: usize,
}

impl Database {
    /// The text of chunks; empty where it is erased already.
    pub fn chunk_texts(
        &mut self,
        conversation: &str,
        chunks: &[ChunkId],
    ) -> Result<Vec<ForgottenChunk>, Error> {
        let mut timeline = self.load(conversation, Access::Read)?;
        if let Some(id) = chunks.iter().find(|id| timeline.chunk(**id).is_none()) {
            let why = format!("there is no chunk {id} in '{conversation}'");
            return Err(Error::not_found("forgetting", why));
        }
        let unloaded: Vec<ChunkId> =
            chunks.iter().copied().filter(|&id| !timeline.chunk(id).is_some_and(|c| c.is_loaded())).collect();
        self.load_bodies(conversation, &mut timeline, &unloaded)?;
        let text = |&id: &ChunkId| {
            let chunk = timeline.chunk(id)?;
            Some(ForgottenChunk { chunk: id, text: chunk.text().into_owned(), tokens: chunk.len() })
        };
        Ok(chunks.iter().filter_map(text).collect())
    }

    /// Erases the text of chunks, and memories by their keys: all of them, or on an error none.
    pub fn forget(
        &mut self,
        conversation: &str,
        chunks: &[ChunkId],
        memories: &[String],
    ) -> Result<Vec<ForgottenChunk>, Error> {
        let operation = || format!("forgetting in '{conversation}'");
        let forgotten = self.chunk_texts(conversation, chunks)?;
        let mut timeline = self.load(conversation, Access::Write)?;
        // A deletion in the log first: the empty tokens must stay out of the context window and out of search.
        let undeleted = chunks.iter().filter(|&&id| timeline.chunk(id).is_some_and(|c| !c.is_deleted()));
        let undeleted: Vec<ChunkSelection> =
            undeleted.map(|&chunk| ChunkSelection { chunk, extent: Extent::Whole }).collect();
        if !undeleted.is_empty() {
            let delete = Change::Delete { chunks: undeleted, reason: DeleteReason::Forget };
            self.transact(conversation, &mut timeline, &delete, Durability::Immediate)?;
        }
        let runs: Vec<TokenRun> =
            chunks.iter().filter_map(|&id| timeline.chunk(id)).map(|c| c.run()).collect();
        self.drop_open_state(conversation);
        let erased = self.erase(conversation, |sql, id| {
            erase_from_log(sql, id, &runs)?;
            let timeline = rows::replay_log(sql, id)?;
            let seq = rows::conversation_seq(sql, id)?;
            rows::write_whole_state(sql, id, seq, &timeline)?;
            delete_derived_rows(sql, id, chunks)?;
            for memory in memories {
                rows::put_record(sql, id, RecordKind::Memory.name(), memory, None, rows::now_ms())?;
            }
            clear_premises(sql, id, chunks)
        });
        erased.map_err(|e| e.with_context(operation()))?;
        Ok(forgotten)
    }

    /// Erases a whole conversation with its name.
    pub fn forget_conversation(&mut self, conversation: &str) -> Result<(), Error> {
        let operation = || format!("forgetting '{conversation}'");
        self.take_lease(conversation).map_err(|e| e.with_context(operation()))?;
        self.drop_open_state(conversation);
        let erased = self.erase(conversation, |sql, id| {
            for delete in [
                "DELETE FROM chunk WHERE key BETWEEN $1 AND $2",
                "DELETE FROM block WHERE key BETWEEN $1 AND $2",
                "DELETE FROM log WHERE key BETWEEN $1 AND $2",
            ] {
                sql.execute(delete, &rows::row_key_range(id))?;
            }
            for delete in [
                "DELETE FROM mention WHERE conversation = $1",
                "DELETE FROM record WHERE conversation = $1",
                "DELETE FROM embedding WHERE conversation = $1",
                "DELETE FROM message WHERE conversation = $1",
                "DELETE FROM conversation WHERE id = $1",
            ] {
                sql.execute(delete, &[SqlValue::Int(id)])?;
            }
            Ok(())
        });
        erased.map_err(|e| e.with_context(operation()))
    }

    /// Runs `work` on a conversation in a transaction that overwrites what it deletes. Even if that fails, the file is
    /// vacuumed: earlier deletions may have left text in it.
    fn erase(
        &mut self,
        conversation: &str,
        work: impl FnOnce(&mut dyn SqlConnection, i64) -> Result<(), SqlError>,
    ) -> Result<(), SqlError> {
        self.sql.set_secure_delete(true)?;
        let erased = self.write_once(&[conversation], |sql| {
            let id = rows::find_conversation_id(sql, conversation)?
                .ok_or_else(|| rows::no_such_conversation(conversation))?;
            work(sql, id)
        });
        let vacuumed = self.sql.vacuum().and_then(|()| self.sql.set_secure_delete(false));
        erased.and(vacuumed)
    }
}

impl EraseStore for Database {
    fn erase_chunks(
        &mut self,
        conversation: &str,
        chunks: &[ChunkId],
        memory_keys: &[String],
    ) -> Result<(), Error> {
        self.forget(conversation, chunks, memory_keys).map(|_| ())
    }

    fn erase_conversation(&mut self, conversation: &str) -> Result<(), Error> {
        self.forget_conversation(conversation)
    }
}

/// Erases the tokens at some positions from every entry of the log.
fn erase_from_log(sql: &mut dyn SqlConnection, id: i64, runs: &[TokenRun]) -> Result<(), SqlError> {
    let mut changed = Vec::new();
    rows::for_each_log_entry(sql, id, &mut |mut entry| {
        if erase_tokens(&mut entry.change, runs) {
            changed.push((rows::row_key(id, entry.seq as usize), entry.change));
        }
        Ok(())
    })?;
    changed.iter().try_for_each(|(key, change)| rows::rewrite_log_entry(sql, *key, Some(change)))
}

/// Erases the tokens at some positions from a change; returns whether there were any.
fn erase_tokens(change: &mut Change, runs: &[TokenRun]) -> bool {
    match change {
        Change::Batch(changes) => {
            changes.iter_mut().fold(false, |any, change| erase_tokens(change, runs) | any)
        }
        Change::Append(append) => {
            let mut any = false;
            for (n, token) in append.tokens.iter_mut().enumerate() {
                let at = append.at.0 + n as u64;
                if runs.iter().any(|run| (run.start.0..run.start.0 + u64::from(run.len)).contains(&at)) {
                    any = true;
                    *token = NewToken { id: TokenId::FORGOTTEN, text: String::new(), ..token.clone() };
                }
            }
            any
        }
        _ => false,
    }
}

/// Deletes what was computed from erased text: embeddings, also of the neighbouring turns, and message keys.
fn delete_derived_rows(sql: &mut dyn SqlConnection, id: i64, chunks: &[ChunkId]) -> Result<(), SqlError> {
    for chunk in chunks {
        let turn = i64::from(chunk.turn.0);
        let args = [SqlValue::Int(id), SqlValue::Int(turn - 1), SqlValue::Int(turn + 1)];
        sql.execute("DELETE FROM embedding WHERE conversation = $1 AND turn BETWEEN $2 AND $3", &args)?;
    }
    // A key contains a hash of all messages before it.
    if let Some(first) = chunks.iter().map(|chunk| i64::from(chunk.turn.0)).min() {
        let args = [SqlValue::Int(id), SqlValue::Int(first)];
        sql.execute("DELETE FROM message WHERE conversation = $1 AND turn >= $2", &args)?;
    }
    Ok(())
}

/// Deletes the premise notes of the turns from the first erased chunk on: they may quote its text.
fn clear_premises(sql: &mut dyn SqlConnection, id: i64, chunks: &[ChunkId]) -> Result<(), SqlError> {
    let first = chunks.iter().map(|chunk| chunk.turn.0).min().unwrap_or(0);
    for record in rows::records(sql, id, RecordKind::Turn.name())? {
        let mut turn_record: Value = serde_json::from_str(&record.value).unwrap_or_default();
        let later = record.key.parse::<u32>().is_ok_and(|turn| turn >= first);
        if later && turn_record.get("premise").is_some_and(Value::is_string) {
            turn_record["premise"] = Value::Null;
            let value = turn_record.to_string();
            rows::put_record(sql, id, RecordKind::Turn.name(), &record.key, Some(&value), record.updated_at)?;
        }
    }
    Ok(())
}
