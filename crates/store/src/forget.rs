//! Forgetting for good. Everything else in this crate keeps; this takes words out of everything that holds them: the bodies,
//! the log, vectors, memories. Positions stay, so that nothing else moves: where something was said it is still known that
//! something was, how long it was, and that it was forgotten.

use crate::database::Database;
use crate::rows;
use crate::sql::{Cell, Sql, SqlError};
use halo_core::change::{Change, DeleteReason, Extent, NewToken, Part, Run};
use halo_core::seams::{Access, Durability, Kind, SeamError, Store};
use halo_core::token::{ChunkId, TokenId};
use serde_json::Value;

/// What has been forgotten of one chunk: the last that anybody sees of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gone {
    /// Which.
    pub chunk: ChunkId,
    /// What it said.
    pub text: String,
    /// How many tokens it had.
    pub tokens: usize,
}

impl Database {
    /// What chunks say, and whether each is forgotten already.
    ///
    /// # Errors
    /// When the store cannot be read, or there is no such chunk.
    pub fn words(&mut self, conversation: &str, chunks: &[ChunkId]) -> Result<Vec<Gone>, SeamError> {
        let mut timeline = self.load(conversation, Access::Read)?;
        let known = |id: &ChunkId| timeline.chunk(*id).is_some();
        if let Some(id) = chunks.iter().find(|id| !known(id)) {
            return Err(SeamError::asked(
                "forgetting",
                format!("there is no chunk {id} in '{conversation}'"),
            ));
        }
        let away: Vec<ChunkId> =
            chunks.iter().copied().filter(|&id| !timeline.chunk(id).is_some_and(|c| c.is_here())).collect();
        self.bring(conversation, &mut timeline, &away)?;
        let gone = |&chunk: &ChunkId| {
            let found = timeline.chunk(chunk)?;
            Some(Gone { chunk, text: found.text().into_owned(), tokens: found.len() })
        };
        Ok(chunks.iter().filter_map(gone).collect())
    }

    /// Forgets what chunks say, for good, and memories, by their keys: all of them, or on an error none.
    ///
    /// # Errors
    /// When there is no such chunk, somebody else is writing, or the store fails.
    pub fn forget(
        &mut self,
        conversation: &str,
        chunks: &[ChunkId],
        memories: &[String],
    ) -> Result<Vec<Gone>, SeamError> {
        let what = || format!("forgetting in '{conversation}'");
        let gone = self.words(conversation, chunks)?;
        let mut timeline = self.load(conversation, Access::Write)?;
        // Out of the window and out of search first, by the usual way: what is left of them stays so.
        let parts = chunks.iter().filter(|&&id| timeline.chunk(id).is_some_and(|c| !c.is_withdrawn()));
        let parts: Vec<Part> = parts.map(|&chunk| Part { chunk, extent: Extent::Whole }).collect();
        if !parts.is_empty() {
            let withdraw = Change::Withdraw { parts, reason: DeleteReason::Forget };
            self.transact(conversation, &mut timeline, &withdraw, Durability::Now)?;
        }
        let runs: Vec<Run> = chunks.iter().filter_map(|&id| timeline.chunk(id)).map(|c| c.run()).collect();
        self.forget_open(conversation);
        self.sql.shred(true).map_err(|e| e.doing(what()))?;
        let done = self.within(Some(Durability::Now), |sql| {
            let id = rows::find(sql, conversation)?.ok_or_else(|| rows::no_conversation(conversation))?;
            blank_log(sql, id, &runs)?;
            let timeline = rows::replay(sql, id)?;
            let mut seq = 0;
            sql.query("SELECT seq FROM conversation WHERE id = $1", &[Cell::Int(id)], &mut |row| {
                seq = row.count(0)?;
                Ok(())
            })?;
            rows::write_all(sql, id, seq, &timeline)?;
            drop_around(sql, id, chunks)?;
            for memory in memories {
                rows::put_record(sql, id, Kind::Memory, memory, None, rows::now())?;
            }
            drop_premises(sql, id, chunks)
        });
        // Whatever came of it, what was freed is overwritten, and the usual way is quick again.
        let shredded = self.sql.scrub().and_then(|()| self.sql.shred(false));
        done.and(shredded).map_err(|e| e.doing(what()))?;
        Ok(gone)
    }

    /// Forgets a whole conversation, its name included.
    ///
    /// # Errors
    /// When there is none, somebody else is writing, or the store fails.
    pub fn forget_all(&mut self, conversation: &str) -> Result<(), SeamError> {
        let what = || format!("forgetting '{conversation}'");
        self.claim(conversation).map_err(|e| e.doing(what()))?;
        self.forget_open(conversation);
        self.sql.shred(true).map_err(|e| e.doing(what()))?;
        let done = self.within(Some(Durability::Now), |sql| {
            let id = rows::find(sql, conversation)?.ok_or_else(|| rows::no_conversation(conversation))?;
            for delete in [
                "DELETE FROM chunk WHERE key BETWEEN $1 AND $2",
                "DELETE FROM block WHERE key BETWEEN $1 AND $2",
                "DELETE FROM log WHERE key BETWEEN $1 AND $2",
            ] {
                sql.run(delete, &rows::keys(id))?;
            }
            for delete in [
                "DELETE FROM mention WHERE conversation = $1",
                "DELETE FROM record WHERE conversation = $1",
                "DELETE FROM embedding WHERE conversation = $1",
                "DELETE FROM message WHERE conversation = $1",
                "DELETE FROM conversation WHERE id = $1",
            ] {
                sql.run(delete, &[Cell::Int(id)])?;
            }
            Ok(())
        });
        let shredded = self.sql.scrub().and_then(|()| self.sql.shred(false));
        done.and(shredded).map_err(|e| e.doing(what()))
    }
}

/// Takes the words of some positions out of every entry of the log that says them.
fn blank_log(sql: &mut dyn Sql, id: i64, runs: &[Run]) -> Result<(), SqlError> {
    let mut changed = Vec::new();
    rows::entries(sql, id, &mut |mut entry| {
        if blank(&mut entry.change, runs) {
            changed.push((rows::key(id, entry.seq as usize), entry.change));
        }
        Ok(())
    })?;
    changed.iter().try_for_each(|(key, change)| rows::rewrite_entry(sql, *key, Some(change)))
}

/// Takes the words of some positions out of a change; returns whether there were any.
fn blank(change: &mut Change, runs: &[Run]) -> bool {
    match change {
        Change::Batch(changes) => changes.iter_mut().fold(false, |any, change| blank(change, runs) | any),
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
fn drop_around(sql: &mut dyn Sql, id: i64, chunks: &[ChunkId]) -> Result<(), SqlError> {
    for chunk in chunks {
        let turn = i64::from(chunk.turn.0);
        let args = [Cell::Int(id), Cell::Int(turn - 1), Cell::Int(turn + 1)];
        sql.run("DELETE FROM embedding WHERE conversation = $1 AND turn BETWEEN $2 AND $3", &args)?;
    }
    // Each key says something of all messages before it.
    if let Some(first) = chunks.iter().map(|chunk| i64::from(chunk.turn.0)).min() {
        let args = [Cell::Int(id), Cell::Int(first)];
        sql.run("DELETE FROM message WHERE conversation = $1 AND turn >= $2", &args)?;
    }
    Ok(())
}

/// What was said of premises since: it quotes what spoke against them.
fn drop_premises(sql: &mut dyn Sql, id: i64, chunks: &[ChunkId]) -> Result<(), SqlError> {
    let first = chunks.iter().map(|chunk| chunk.turn.0).min().unwrap_or(0);
    for record in rows::records(sql, id, Kind::Turn)? {
        let mut told: Value = serde_json::from_str(&record.value).unwrap_or_default();
        let later = record.key.parse::<u32>().is_ok_and(|turn| turn >= first);
        if later && told.get("premise").is_some_and(Value::is_string) {
            told["premise"] = Value::Null;
            rows::put_record(sql, id, Kind::Turn, &record.key, Some(&told.to_string()), record.at)?;
        }
    }
    Ok(())
}
