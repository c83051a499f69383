//! [`Store`] on a [`Database`]: each method finds the conversation, reads or writes rows, and names the operation in its
//! errors.

use crate::database::{Database, find_or_create_id};
use crate::message_keys;
use crate::names;
use crate::rows::{self, row_key};
use crate::sql::{SqlConnection, SqlError, SqlRow, SqlValue};
use halo_core::Error;
use halo_core::change::Change;
use halo_core::chunk_body::ChunkBody;
use halo_core::conversation_copy::TurnCopy;
use halo_core::store::{
    Access, ConversationSummary, Durability, Embedding, LogEntry, MessageKey, MessageLookup, Record,
    RecordChange, RecordKind, StagedRecords, Store, conversation_id,
};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, TurnId};

/// Reads the columns name, model, created, used, seq, turns, tokens, live, id.
fn read_summary(row: &SqlRow<'_>) -> Result<ConversationSummary, SqlError> {
    Ok(ConversationSummary {
        name: row.text(0)?.to_owned(),
        model: row.text(1)?.to_owned(),
        created: row.int(2)?,
        updated: row.int(3)?,
        changes: row.count(4)?,
        turns: row.count(5)?,
        tokens: row.count(6)?,
        live: row.count(7)?,
        id: conversation_id(row.count(8)?, row.int(2)?),
    })
}

fn read_body(sql: &mut dyn SqlConnection, id: i64, chunk: ChunkId) -> Result<ChunkBody, SqlError> {
    let [turn, sentence, role] = rows::chunk_id_values(chunk);
    let select =
        "SELECT sum, body FROM chunk WHERE conversation = $1 AND turn = $2 AND sentence = $3 AND role = $4";
    let mut body = None;
    sql.query(select, &[SqlValue::Int(id), turn, sentence, role], &mut |row| {
        body = Some(rows::decode_body(&chunk, row.int(0)?, row.blob(1)?)?);
        Ok(())
    })?;
    body.ok_or_else(|| SqlError::damaged(format!("the tokens of {chunk} are missing")))
}

fn read_chunk_history(
    sql: &mut dyn SqlConnection,
    id: i64,
    chunk: ChunkId,
) -> Result<Vec<LogEntry>, SqlError> {
    let mut entries = Vec::new();
    let [turn, sentence, role] = rows::chunk_id_values(chunk);
    let select = "SELECT l.key, l.at, l.sum, l.change FROM mention m JOIN log l ON l.key = $1 + m.seq \
                  WHERE m.conversation = $2 AND m.turn = $3 AND m.sentence = $4 AND m.role = $5 ORDER BY m.seq";
    let cells = [SqlValue::Int(row_key(id, 0)), SqlValue::Int(id), turn, sentence, role];
    sql.query(select, &cells, &mut |row| {
        entries.push(rows::read_log_entry(&row)?);
        Ok(())
    })?;
    Ok(entries)
}

impl Store for Database {
    fn list_conversations(&mut self) -> Result<Vec<ConversationSummary>, Error> {
        let mut summaries: Vec<ConversationSummary> = Vec::new();
        let select = "SELECT name, model, created, used, seq, turns, tokens, live, id FROM conversation";
        let listed = self.sql.query(select, &[], &mut |row| {
            summaries.push(read_summary(&row)?);
            Ok(())
        });
        listed.map_err(|e| e.with_context("listing the conversations"))?;
        summaries.retain(|summary| !names::is_namespace(&summary.name));
        // SQLite and PostgreSQL sort text differently.
        summaries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(summaries)
    }

    fn find_conversation(&mut self, conversation: &str) -> Result<Option<ConversationSummary>, Error> {
        let mut summary = None;
        let select = "SELECT name, model, created, used, seq, turns, tokens, live, id FROM conversation \
                      WHERE name = $1";
        let read = self.sql.query(select, &[SqlValue::Text(conversation)], &mut |row| {
            summary = Some(read_summary(&row)?);
            Ok(())
        });
        read.map_err(|e| e.with_context(format!("looking up '{conversation}'")))?;
        Ok(summary.filter(|summary| !names::is_namespace(&summary.name)))
    }

    fn load(&mut self, conversation: &str, access: Access) -> Result<Timeline, Error> {
        self.load_inner(conversation, access).map_err(|e| e.with_context(format!("opening '{conversation}'")))
    }

    fn fetch_bodies(&mut self, conversation: &str, chunks: &[ChunkId]) -> Result<Vec<ChunkBody>, Error> {
        let bodies = self
            .conversation_id(conversation)
            .and_then(|id| chunks.iter().map(|&chunk| read_body(&mut *self.sql, id, chunk)).collect());
        bodies.map_err(|e| e.with_context(format!("reading '{conversation}'")))
    }

    fn commit(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), Error> {
        self.commit_inner(conversation, change, after, durability)
            .map_err(|e| e.with_context(format!("saving '{conversation}'")))
    }

    fn transact_all(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), Error> {
        self.commit_all(conversation, timeline, changes)
    }

    fn chunk_history(&mut self, conversation: &str, chunk: ChunkId) -> Result<Vec<LogEntry>, Error> {
        self.conversation_id(conversation)
            .and_then(|id| read_chunk_history(&mut *self.sql, id, chunk))
            .map_err(|e| e.with_context(format!("reading the history of {chunk} in '{conversation}'")))
    }

    fn load_as_of(&mut self, conversation: &str, turn: TurnId) -> Result<Timeline, Error> {
        self.conversation_id(conversation)
            .and_then(|id| self.in_transaction(None, |sql| rows::replay_log_through_turn(sql, id, turn)))
            .map_err(|e| e.with_context(format!("reading '{conversation}' as of turn {}", turn.0)))
    }

    fn turn_times(&mut self, conversation: &str) -> Result<Vec<(TurnId, i64)>, Error> {
        self.conversation_id(conversation)
            .and_then(|id| rows::turn_starts(&mut *self.sql, id))
            .map(|starts| starts.into_iter().map(|start| (start.turn, start.at)).collect())
            .map_err(|e| e.with_context(format!("reading the times of the turns of '{conversation}'")))
    }

    fn records(&mut self, conversation: &str, kind: RecordKind) -> Result<Vec<Record>, Error> {
        rows::find_conversation_id(&mut *self.sql, conversation)
            .and_then(|id| id.map_or(Ok(vec![]), |id| rows::records(&mut *self.sql, id, kind.name())))
            .map_err(|e| e.with_context(format!("reading a {} of '{conversation}'", kind.name())))
    }

    fn record(&mut self, conversation: &str, kind: RecordKind, key: &str) -> Result<Option<Record>, Error> {
        rows::find_conversation_id(&mut *self.sql, conversation)
            .and_then(|id| id.map_or(Ok(None), |id| rows::record(&mut *self.sql, id, kind.name(), key)))
            .map_err(|e| e.with_context(format!("reading a {} of '{conversation}'", kind.name())))
    }

    fn find_record(&mut self, kind: RecordKind, key: &str) -> Result<Option<(String, Record)>, Error> {
        rows::find_record(&mut *self.sql, kind.name(), key)
            .map_err(|e| e.with_context(format!("searching a {}", kind.name())))
    }

    fn records_with_key(&mut self, kind: RecordKind, key: &str) -> Result<Vec<(String, Record)>, Error> {
        rows::records_with_key(&mut *self.sql, kind.name(), key)
            .map_err(|e| e.with_context(format!("searching a {}", kind.name())))
    }

    fn put_record(
        &mut self,
        conversation: &str,
        kind: RecordKind,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), Error> {
        let written = names::check_record_text(key, value).and_then(|()| {
            self.write(&[conversation], Durability::Immediate, |sql| {
                let id = find_or_create_id(sql, conversation)?;
                rows::put_record(sql, id, kind.name(), key, value, rows::now_ms())
            })
        });
        written.map_err(|e| e.with_context(format!("saving a {} of '{conversation}'", kind.name())))
    }

    fn embeddings(&mut self, conversation: &str, embedder: &str) -> Result<Vec<Embedding>, Error> {
        let mut embeddings = Vec::new();
        let read = rows::find_conversation_id(&mut *self.sql, conversation).and_then(|id| match id {
            None => Ok(()),
            Some(id) => rows::for_each_embedding(&mut *self.sql, id, embedder, &mut |embedding, _| {
                embeddings.push(embedding);
                Ok(())
            }),
        });
        read.map_err(|e| e.with_context(format!("reading the embeddings of '{conversation}'")))?;
        Ok(embeddings)
    }

    fn put_embeddings(
        &mut self,
        conversation: &str,
        embedder: &str,
        embeddings: &[Embedding],
    ) -> Result<(), Error> {
        let written = self.write(&[conversation], Durability::Immediate, |sql| {
            let id = find_or_create_id(sql, conversation)?;
            embeddings.iter().try_for_each(|e| rows::put_embedding(sql, id, embedder, e, rows::now_ms()))
        });
        written.map_err(|e| e.with_context(format!("saving embeddings of '{conversation}'")))
    }

    fn set_model(&mut self, conversation: &str, model: &str) -> Result<(), Error> {
        let written = self.write(&[conversation], Durability::Immediate, |sql| {
            let id = find_or_create_id(sql, conversation)?;
            rows::set_model(sql, id, model)
        });
        written.map_err(|e| e.with_context(format!("saving the model of '{conversation}'")))
    }

    fn copy_with_records(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
        records: &mut dyn FnMut() -> Vec<RecordChange>,
    ) -> Result<(), Error> {
        self.copy_inner(from, to, model, convert, records)
    }

    fn replace_by_copy(
        &mut self,
        conversation: &str,
        kept_as: &str,
        model: &str,
        settings: &[(&str, &str)],
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
    ) -> Result<(), Error> {
        self.replace_inner(conversation, kept_as, model, settings, convert)
    }

    fn stage_records(&mut self, conversation: &str, staged: StagedRecords) {
        self.staged.insert(conversation.to_owned(), staged);
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), Error> {
        self.rename_inner(from, to).map_err(|e| e.with_context(format!("renaming '{from}'")))
    }

    fn message_keys(&mut self, conversation: &str, last: usize) -> Result<Vec<MessageKey>, Error> {
        rows::find_conversation_id(&mut *self.sql, conversation)
            .and_then(|id| id.map_or(Ok(vec![]), |id| message_keys::last_keys(&mut *self.sql, id, last)))
            .map_err(|e| e.with_context(format!("reading the message keys of '{conversation}'")))
    }

    fn put_message_keys(&mut self, conversation: &str, keys: &[MessageKey]) -> Result<(), Error> {
        let written = self.write(&[conversation], Durability::Deferred, |sql| {
            let id = find_or_create_id(sql, conversation)?;
            message_keys::put_keys(sql, id, keys)
        });
        written.map_err(|e| e.with_context(format!("saving the message keys of '{conversation}'")))
    }

    fn find_messages(&mut self, lookup: MessageLookup, limit: usize) -> Result<Vec<(String, TurnId)>, Error> {
        message_keys::find_conversations(&mut *self.sql, lookup, limit)
            .map_err(|e| e.with_context("looking up a message"))
    }

    fn release_lease(&mut self, conversation: &str) {
        self.drop_lease(conversation);
    }

    fn lease_holder(&mut self, conversation: &str) -> Result<Option<u32>, Error> {
        self.holder_elsewhere(conversation).map_err(|e| e.with_context(format!("opening '{conversation}'")))
    }

    fn reacquire_lease(&mut self, conversation: &str, revision: u64) -> Result<bool, Error> {
        self.take_lease_if_unchanged(conversation, revision)
            .map_err(|e| e.with_context(format!("opening '{conversation}'")))
    }
}
