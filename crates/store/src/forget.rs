//! Forgetting for good. Everything else in this crate keeps; this takes words out of everything that holds them: the bodies,
//! the log, vectors, memories. Positions stay, so that nothing else moves: where something was said it is still known that
//! something was, how long it was, and that it was forgotten.

use crate::database::Database;
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlValue};
use halo_core::Error;
use halo_core::change::{Change, ChunkSelection, DeleteReason, Extent, NewToken, TokenRun};
use halo_core::store::{Access, Durability, EraseStore, RecordKind, Store};
use halo_core::token::{ChunkId, TokenId};
use serde_json::Value;

/// What has been forgotten of one chunk: the last that anybody sees of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForgottenChunk {
    pub chunk: ChunkId,
    pub text: String,
    /// How many tokens it had.
    pub tokens: usize,
}

impl Database {
    /// What chunks say, and whether each is forgotten already.
    pub fn chunk_texts(
        &mut self,
        conversation: &str,
        chunks: &[ChunkId],
    ) -> Result<Vec<ForgottenChunk>, Error> {
        let mut timeline = self.load(conversation, Access::Read)?;
        let known = |id: &ChunkId| timeline.chunk(*id).is_some();
        if let Some(id) = chunks.iter().find(|id| !known(id)) {
            return Err(Error::invalid_input(
                "forgetting",
                format!("there is no chunk {id} in '{conversation}'"),
            ));
        }
        let away: Vec<ChunkId> =
            chunks.iter().copied().filter(|&id| !timeline.chunk(id).is_some_and(|c| c.is_loaded())).collect();
        self.load_bodies(conversation, &mut timeline, &away)?;
        let gone = |&chunk: &ChunkId| {
            let found = timeline.chunk(chunk)?;
            Some(ForgottenChunk { chunk, text: found.text().into_owned(), tokens: found.len() })
        };
        Ok(chunks.iter().filter_map(gone).collect())
    }

    /// Forgets what chunks say, for good, and memories, by their keys: all of them, or on an error none.
    pub fn forget(
        &mut self,
        conversation: &str,
        chunks: &[ChunkId],
        memories: &[String],
    ) -> Result<Vec<ForgottenChunk>, Error> {
        let what = || format!("forgetting in '{conversation}'");
        let gone = self.chunk_texts(conversation, chunks)?;
        let mut timeline = self.load(conversation, Access::Write)?;
        // Out of the window and out of search first, by the usual way: what is left of them stays so.
        let parts = chunks.iter().filter(|&&id| timeline.chunk(id).is_some_and(|c| !c.is_deleted()));
        let parts: Vec<ChunkSelection> =
            parts.map(|&chunk| ChunkSelection { chunk, extent: Extent::Whole }).collect();
        if !parts.is_empty() {
            let withdraw = Change::Delete { chunks: parts, reason: DeleteReason::Forget };
            self.transact(conversation, &mut timeline, &withdraw, Durability::Immediate)?;
        }
        let runs: Vec<TokenRun> =
            chunks.iter().filter_map(|&id| timeline.chunk(id)).map(|c| c.run()).collect();
        self.drop_open_state(conversation);
        self.sql.set_secure_delete(true).map_err(|e| e.with_context(what()))?;
        let done = self.in_transaction(Some(Durability::Immediate), |sql| {
            let id = rows::find_conversation_id(sql, conversation)?
                .ok_or_else(|| rows::no_such_conversation(conversation))?;
            erase_from_log(sql, id, &runs)?;
            let timeline = rows::replay_log(sql, id)?;
            let mut seq = 0;
            sql.query("SELECT seq FROM conversation WHERE id = $1", &[SqlValue::Int(id)], &mut |row| {
                seq = row.count(0)?;
                Ok(())
            })?;
            rows::write_whole_state(sql, id, seq, &timeline)?;
            drop_derived_rows(sql, id, chunks)?;
            for memory in memories {
                rows::put_record(sql, id, RecordKind::Memory.name(), memory, None, rows::now_ms())?;
            }
            clear_premises(sql, id, chunks)
        });
        // Whatever came of it, what was freed is overwritten, and the usual way is quick again.
        let shredded = self.sql.vacuum().and_then(|()| self.sql.set_secure_delete(false));
        done.and(shredded).map_err(|e| e.with_context(what()))?;
        Ok(gone)
    }

    /// Forgets a whole conversation, its name included.
    pub fn forget_conversation(&mut self, conversation: &str) -> Result<(), Error> {
        let what = || format!("forgetting '{conversation}'");
        self.lock_conversation(conversation).map_err(|e| e.with_context(what()))?;
        self.drop_open_state(conversation);
        self.sql.set_secure_delete(true).map_err(|e| e.with_context(what()))?;
        let done = self.in_transaction(Some(Durability::Immediate), |sql| {
            let id = rows::find_conversation_id(sql, conversation)?
                .ok_or_else(|| rows::no_such_conversation(conversation))?;
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
        let shredded = self.sql.vacuum().and_then(|()| self.sql.set_secure_delete(false));
        done.and(shredded).map_err(|e| e.with_context(what()))
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

/// Takes the words of some positions out of every entry of the log that says them.
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

/// Takes the words of some positions out of a change; returns whether there were any.
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

/// Vectors of what was forgotten, and of what stands beside it: those were made with its words.
fn drop_derived_rows(sql: &mut dyn SqlConnection, id: i64, chunks: &[ChunkId]) -> Result<(), SqlError> {
    for chunk in chunks {
        let turn = i64::from(chunk.turn.0);
        let args = [SqlValue::Int(id), SqlValue::Int(turn - 1), SqlValue::Int(turn + 1)];
        sql.execute("DELETE FROM embedding WHERE conversation = $1 AND turn BETWEEN $2 AND $3", &args)?;
    }
    // Each key says something of all messages before it.
    if let Some(first) = chunks.iter().map(|chunk| i64::from(chunk.turn.0)).min() {
        let args = [SqlValue::Int(id), SqlValue::Int(first)];
        sql.execute("DELETE FROM message WHERE conversation = $1 AND turn >= $2", &args)?;
    }
    Ok(())
}

/// What was said of premises since: it quotes what spoke against them.
fn clear_premises(sql: &mut dyn SqlConnection, id: i64, chunks: &[ChunkId]) -> Result<(), SqlError> {
    let first = chunks.iter().map(|chunk| chunk.turn.0).min().unwrap_or(0);
    for record in rows::records(sql, id, RecordKind::Turn.name())? {
        let mut told: Value = serde_json::from_str(&record.value).unwrap_or_default();
        let later = record.key.parse::<u32>().is_ok_and(|turn| turn >= first);
        if later && told.get("premise").is_some_and(Value::is_string) {
            told["premise"] = Value::Null;
            rows::put_record(
                sql,
                id,
                RecordKind::Turn.name(),
                &record.key,
                Some(&told.to_string()),
                record.updated_at,
            )?;
        }
    }
    Ok(())
}
