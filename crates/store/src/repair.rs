//! Repairs of what the [integrity check](crate::doctor) has found. Every repair makes a copy of the database first.

use crate::database::{Database, StoreLocation};
use crate::doctor::{
    Finding, ORPHAN_ROW_STATEMENTS, RepairAction, find_nameless, list_readable_conversations,
    read_verified_state,
};
use crate::recover::recover_conversation;
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlValue};
use halo_core::Error;
use halo_core::chunk_body::checksum_bytes;
use halo_core::store::{Durability, Embedding};
use halo_core::timeline::Timeline;
use std::collections::BTreeSet;
use std::path::Path;

/// Where a copy of the damaged database is, if one was made, and what each repair has done, in words.
pub(crate) type RepairReport = (Option<String>, Vec<String>);

impl Database {
    /// Repairs findings, after a copy of the database (a file beside it, or another schema on a server). Returns where
    /// the copy is, and what was done, in words.
    pub fn repair(&mut self, findings: &[Finding]) -> Result<(Option<String>, Vec<String>), Error> {
        let operation = "repairing the store";
        for name in findings.iter().filter_map(|f| f.conversation.as_deref()) {
            self.take_lease(name).map_err(|e| e.with_context(operation))?;
            self.drop_open_state(name);
        }
        let needs = |action| findings.iter().any(|f| f.action == action);
        if let StoreLocation::Sqlite(path) = self.location().clone()
            && needs(RepairAction::RebuildFirstPage)
        {
            return self.repair_first_page(&path);
        }
        if needs(RepairAction::RecoverToNewFile) {
            return self.recover_to_new_file().map_err(|e| e.with_context(operation));
        }
        if findings.iter().all(|f| f.action == RepairAction::Unrepairable) {
            return Ok((None, Vec::new()));
        }
        let backup = self.sql.backup().map_err(|e| e.with_context("copying the store before the repair"))?;
        let actions: BTreeSet<(Option<&str>, RepairAction)> =
            findings.iter().map(|f| (f.conversation.as_deref(), f.action)).collect();
        let mut done = Vec::new();
        for (name, action) in actions {
            let repaired = match name {
                Some(name) => self.write_once(&[name], |sql| repair_conversation(sql, name, action)),
                None => self
                    .in_transaction(Some(Durability::Immediate), |sql| repair_store(sql, action).map(Some)),
            };
            done.extend(repaired.map_err(|e| e.with_context(operation))?);
        }
        Ok((Some(backup), done))
    }

    /// Rebuilds the first page, then repairs what has become visible.
    fn repair_first_page(&mut self, path: &Path) -> Result<RepairReport, Error> {
        self.sql.close();
        let old_file = Database::rebuild_first_page(path)?;
        let mut reopened = Database::open(self.location())?;
        let findings = reopened.check_integrity(&mut |_, _| {})?;
        let mut done = vec!["the first page of the file was rebuilt".to_owned()];
        if !findings.is_empty() {
            done.extend(reopened.repair(&findings)?.1);
        }
        Ok((Some(old_file.display().to_string()), done))
    }
}

/// Repairs the store as a whole; returns what was done.
fn repair_store(sql: &mut dyn SqlConnection, action: RepairAction) -> Result<String, SqlError> {
    if action == RepairAction::RecoverNameless {
        return recover_nameless(sql);
    }
    for [_, delete] in ORPHAN_ROW_STATEMENTS {
        sql.execute(delete, &[])?;
    }
    Ok("rows without a conversation were deleted".into())
}

/// Repairs one conversation; returns what was done, if the action is one for conversations.
fn repair_conversation(
    sql: &mut dyn SqlConnection,
    name: &str,
    action: RepairAction,
) -> Result<Option<String>, SqlError> {
    let id = rows::find_conversation_id(sql, name)?.ok_or_else(|| rows::no_such_conversation(name))?;
    let seq = rows::conversation_seq(sql, id)?;
    let done = match action {
        RepairAction::RebuildState => {
            let timeline = rows::replay_log(sql, id)?;
            let last = rows::last_log_seq(sql, id)?;
            rows::write_whole_state(sql, id, seq.max(last), &timeline)?;
            rows::rebuild_log_indexes(sql, id)?;
            "rebuilt from its log"
        }
        RepairAction::RewriteLog => {
            let timeline = read_verified_state(sql, id)?;
            rewrite_log(sql, id, seq, &timeline)?;
            "its log was rewritten; the reasons for earlier changes are lost"
        }
        RepairAction::RecoverConversation => {
            let (timeline, report) = recover_conversation(sql, id)?;
            rewrite_log(sql, id, seq, &timeline)?;
            return Ok(Some(format!("'{name}': recovered: {report}")));
        }
        RepairAction::AcceptRecords => {
            recompute_record_checksums(sql, id)?;
            "its records are kept as they are"
        }
        RepairAction::RebuildLogIndexes => {
            rows::rebuild_log_indexes(sql, id)?;
            "the indexes of its log were rebuilt"
        }
        RepairAction::DropDamagedEmbeddings => {
            drop_damaged_embeddings(sql, id)?;
            "its damaged embeddings were deleted"
        }
        RepairAction::DeleteOrphanRows
        | RepairAction::RecoverNameless
        | RepairAction::RecoverToNewFile
        | RepairAction::RebuildFirstPage
        | RepairAction::Unrepairable => return Ok(None),
    };
    Ok(Some(format!("'{name}': {done}")))
}

/// Gives conversations that have lost their row another name, and rebuilds them.
fn recover_nameless(sql: &mut dyn SqlConnection) -> Result<String, SqlError> {
    let named = list_readable_conversations(sql)?.0.into_iter().map(|(id, _)| id).collect();
    let nameless = find_nameless(sql, &named)?;
    for (&id, name) in &nameless {
        let insert = "INSERT INTO conversation (id, name, model, created, used, seq, turns, places, tokens, live) \
                      VALUES ($1, $2, '', $3, $4, 0, 0, 0, 0, 0)";
        let now = SqlValue::Int(rows::now_ms());
        sql.execute(insert, &[SqlValue::Int(id), SqlValue::Text(name), now, now])?;
        let last = rows::last_log_seq(sql, id)?;
        let state = read_verified_state(sql, id);
        match (rows::replay_log(sql, id), state) {
            (Ok(replayed), Ok(state)) if replayed.state_hash() == state.state_hash() => {
                rows::write_whole_state(sql, id, last, &state)?;
            }
            // The end of the log may be missing; the state is what the user has seen last.
            (_, Ok(state)) => rewrite_log(sql, id, last, &state)?,
            (Ok(replayed), Err(_)) => rows::write_whole_state(sql, id, last, &replayed)?,
            (Err(_), Err(_)) => {
                let (timeline, _) = recover_conversation(sql, id)?;
                rewrite_log(sql, id, last, &timeline)?;
            }
        }
        rows::rebuild_log_indexes(sql, id)?;
    }
    let names: Vec<_> = nameless.values().map(|name| format!("'{name}'")).collect();
    Ok(format!("recovered under new names: {}", names.join(", ")))
}

fn drop_damaged_embeddings(sql: &mut dyn SqlConnection, id: i64) -> Result<(), SqlError> {
    let mut damaged = Vec::new();
    let select = "SELECT turn, sentence, role, embedder, sum, vector FROM embedding WHERE conversation = $1";
    sql.query(select, &[SqlValue::Int(id)], &mut |row| {
        if checksum_bytes(row.blob(5)?) != row.int(4)?.cast_unsigned() {
            damaged.push((row.text(3)?.to_owned(), rows::read_chunk_id(&row, 0)?));
        }
        Ok(())
    })?;
    damaged.into_iter().try_for_each(|(embedder, chunk)| {
        let empty = Embedding { chunk, text_hash: 0, vector: vec![] };
        rows::put_embedding(sql, id, &embedder, &empty, 0)
    })
}

/// Accepts the values of records by writing their checksums again.
fn recompute_record_checksums(sql: &mut dyn SqlConnection, id: i64) -> Result<(), SqlError> {
    let mut records = Vec::new();
    let select = "SELECT kind, key, value, at FROM record WHERE conversation = $1";
    sql.query(select, &[SqlValue::Int(id)], &mut |row| {
        records.push((
            row.text(0)?.to_owned(),
            row.text(1)?.to_owned(),
            row.text(2)?.to_owned(),
            row.int(3)?,
        ));
        Ok(())
    })?;
    for (kind, key, value, at) in records {
        rows::put_record(sql, id, &kind, &key, Some(&value), at)?;
    }
    Ok(())
}

/// Replaces the log by one that leads to the timeline. The new entries come after `seq`: a number is never used twice.
fn rewrite_log(sql: &mut dyn SqlConnection, id: i64, seq: u64, timeline: &Timeline) -> Result<(), SqlError> {
    let seq = seq.max(rows::last_log_seq(sql, id).unwrap_or(0));
    sql.execute("DELETE FROM log WHERE key BETWEEN $1 AND $2", &rows::row_key_range(id))?;
    let last = rows::insert_rebuilt_log(sql, id, seq, timeline)?;
    rows::write_whole_state(sql, id, last, timeline)?;
    rows::rebuild_log_indexes(sql, id)
}
