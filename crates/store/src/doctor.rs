//! The integrity check: what is wrong with a store, and which repair helps ([`Database::repair`] runs it).
//!
//! A conversation is stored twice: as its state, and as the log of all changes. Each can be rebuilt from the other, so
//! damage to one of them loses nothing but, where the log is damaged, the reasons for earlier changes. Where both are
//! damaged, everything readable is put together.

use crate::database::{Database, StoreLocation};
use crate::names;
use crate::row_store::SELECT_NAMESPACES;
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlValue};
use halo_core::Error;
use halo_core::timeline::Timeline;
use halo_core::token::ChunkId;
use std::collections::{BTreeMap, BTreeSet};

/// A problem that the integrity check has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The conversation that has the problem; none: the store as a whole.
    pub conversation: Option<String>,
    pub problem: String,
    /// What a repair will do about it.
    pub repair: &'static str,
    pub(crate) action: RepairAction,
}

impl Finding {
    fn new(conversation: Option<&str>, problem: impl Into<String>, action: RepairAction) -> Self {
        let (conversation, repair) = (conversation.map(str::to_owned), action.description());
        Self { conversation, problem: problem.into(), repair, action }
    }
}

/// What a repair does. The order is that in which repairs of one conversation run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RepairAction {
    DeleteOrphanRows,
    RecoverNameless,
    RebuildLogIndexes,
    DropDamagedEmbeddings,
    RebuildState,
    RewriteLog,
    RecoverConversation,
    AcceptRecords,
    RecoverToNewFile,
    /// The other problems of the file are only visible after this.
    RebuildFirstPage,
    Unrepairable,
}

impl RepairAction {
    fn description(self) -> &'static str {
        match self {
            RepairAction::DeleteOrphanRows => "deletes the rows that belong to no conversation",
            RepairAction::RecoverNameless => {
                "gives the conversation another name and rebuilds it from its log"
            }
            RepairAction::RebuildLogIndexes => "rebuilds the indexes of the log: nothing is lost",
            RepairAction::DropDamagedEmbeddings => {
                "deletes the damaged embeddings; they are computed again when they are needed"
            }
            RepairAction::RebuildState => "rebuilds the state from the log: nothing is lost",
            RepairAction::RewriteLog => {
                "rewrites the log from the state: no text is lost, but the reasons for earlier changes are"
            }
            RepairAction::RecoverConversation => {
                "recovers everything readable from state and log, and reports what is lost"
            }
            RepairAction::AcceptRecords => "keeps the value as it is now",
            RepairAction::RecoverToNewFile => {
                "copies everything readable to a new file, and keeps the old file"
            }
            RepairAction::RebuildFirstPage => "rebuilds the first page, and keeps the old file",
            RepairAction::Unrepairable => {
                "cannot be repaired here: restore a backup of the store, if there is one"
            }
        }
    }
}

impl Database {
    /// Checks the file, every checksum, every reference, and that log and state agree. `progress` is called with the
    /// numbers of checked and of all conversations.
    pub fn check_integrity(&mut self, progress: &mut dyn FnMut(usize, usize)) -> Result<Vec<Finding>, Error> {
        if let Some(finding) = self.check_schema().map_err(|e| e.with_context("checking the store"))? {
            return Ok(vec![finding]);
        }
        let mut findings = self.check_file().map_err(|e| e.with_context("checking the store"))?;
        let (conversations, damage) =
            list_readable_conversations(&mut *self.sql).map_err(|e| e.with_context("checking the store"))?;
        if let Some(why) = damage {
            let problem = format!("the list of conversations: {why}");
            findings.push(Finding::new(None, problem, RepairAction::RecoverToNewFile));
            return Ok(findings);
        }
        for (checked, (id, name)) in conversations.iter().enumerate() {
            progress(checked, conversations.len());
            match self.in_transaction(None, |sql| check_conversation(sql, *id, name)) {
                Ok(problems) => findings.extend(problems),
                Err(error) if error.kind == SqlErrorKind::Damaged => {
                    findings.push(Finding::new(Some(name), error.message, RepairAction::RecoverToNewFile));
                }
                Err(error) => return Err(error.with_context(format!("checking '{name}'"))),
            }
        }
        progress(conversations.len(), conversations.len());
        let ids = conversations.iter().map(|(id, _)| *id).collect();
        let orphans =
            check_orphan_rows(&mut *self.sql, &ids).map_err(|e| e.with_context("checking the store"))?;
        findings.extend(orphans);
        Ok(findings)
    }

    fn check_schema(&mut self) -> Result<Option<Finding>, SqlError> {
        if self.sql.has_current_schema()? {
            return Ok(None);
        }
        Ok(Some(match self.location() {
            StoreLocation::Postgres(_) => {
                let problem = "a table of the schema `halo` is missing on the server";
                Finding::new(None, problem, RepairAction::Unrepairable)
            }
            StoreLocation::Sqlite(_) => {
                Finding::new(None, "the schema on the first page is damaged", RepairAction::RebuildFirstPage)
            }
        }))
    }

    /// What the database itself finds wrong with its file: the first lines are enough to know that it needs a new one.
    fn check_file(&mut self) -> Result<Vec<Finding>, SqlError> {
        let problems = match self.sql.integrity_check() {
            Ok(lines) => {
                let lines = lines.iter().flat_map(|l| l.lines()).filter(|l| !l.starts_with("***"));
                lines.take(3).map(|l| format!("the file: {l}")).collect()
            }
            Err(error) if error.kind == SqlErrorKind::Damaged => vec![error.message],
            Err(error) => return Err(error),
        };
        let finding = |problem| Finding::new(None, problem, RepairAction::RecoverToNewFile);
        Ok(problems.into_iter().map(finding).collect())
    }
}

/// Rows of conversations that have no row of their own.
fn check_orphan_rows(sql: &mut dyn SqlConnection, ids: &BTreeSet<i64>) -> Result<Option<Finding>, SqlError> {
    let nameless = find_nameless(sql, ids).unwrap_or_default();
    if !nameless.is_empty() {
        let problem = format!("conversations without a name: {}", nameless.len());
        return Ok(Some(Finding::new(None, problem, RepairAction::RecoverNameless)));
    }
    match count_orphan_rows(sql, ids) {
        Ok(0) => Ok(None),
        Ok(count) => {
            let problem = format!("rows without a conversation: {count}");
            Ok(Some(Finding::new(None, problem, RepairAction::DeleteOrphanRows)))
        }
        // The check of the file has reported the damage.
        Err(error) if error.kind == SqlErrorKind::Damaged => Ok(None),
        Err(error) => Err(error),
    }
}

/// Ids and stored names of conversations and namespaces.
pub(crate) type ConversationNames = Vec<(i64, String)>;

/// Every conversation whose row can be read, and the error of the first that cannot.
pub(crate) fn list_readable_conversations(
    sql: &mut dyn SqlConnection,
) -> Result<(ConversationNames, Option<String>), SqlError> {
    let (mut ids, mut conversations, mut damage) = (Vec::new(), Vec::new(), None);
    let mut tolerate = |result: Result<(), SqlError>| match result {
        Err(error) if error.kind == SqlErrorKind::Damaged => {
            damage.get_or_insert(error.message);
            Ok(())
        }
        other => other,
    };
    tolerate(sql.query("SELECT id FROM conversation ORDER BY id", &[], &mut |row| {
        ids.push(row.int(0)?);
        Ok(())
    }))?;
    for id in ids {
        let select = "SELECT name, model, created, used, seq, turns, places, tokens, live FROM conversation WHERE id = $1";
        let mut name = None;
        tolerate(sql.query(select, &[SqlValue::Int(id)], &mut |row| {
            name = Some(row.text(0)?.to_owned());
            row.text(1)?;
            (2..9).try_for_each(|column| row.int(column).map(drop))
        }))?;
        conversations.extend(name.map(|name| (id, name)));
    }
    Ok((conversations, damage))
}

/// Conversations and namespaces that have rows but no name, with the names that a repair gives them.
pub(crate) fn find_nameless(
    sql: &mut dyn SqlConnection,
    named: &BTreeSet<i64>,
) -> Result<BTreeMap<i64, String>, SqlError> {
    let mut nameless = BTreeMap::new();
    type StoredName = fn(String) -> String;
    let selects: [(&str, StoredName); 3] = [
        ("SELECT DISTINCT key / 4294967296 FROM log", |name| name),
        ("SELECT DISTINCT key / 4294967296 FROM block", |name| name),
        (SELECT_NAMESPACES, |name| names::stored_name(&name)),
    ];
    for (select, stored_name) in selects {
        let read = sql.query(select, &[], &mut |row| {
            let id = row.int(0)?;
            nameless.entry(id).or_insert_with(|| stored_name(format!("recovered {id}")));
            Ok(())
        });
        // A damaged table may still have readable rows.
        if let Err(error) = read
            && error.kind != SqlErrorKind::Damaged
        {
            return Err(error);
        }
    }
    nameless.retain(|id, _| *id > 0 && !named.contains(id));
    Ok(nameless)
}

/// The state with all bodies, each of them checked against its header.
pub(crate) fn read_verified_state(sql: &mut dyn SqlConnection, id: i64) -> Result<Timeline, SqlError> {
    let mut timeline = rows::read_state(sql, id, (0, 0))?;
    let headers: Vec<(ChunkId, bool)> =
        timeline.chunk_headers(0..timeline.row_count()).map(|h| (h.id, h.live > 0)).collect();
    let mut rows_read = 0;
    let select = "SELECT key, sum, body, turn, sentence, role, live, conversation FROM chunk WHERE key BETWEEN $1 AND $2 ORDER BY key";
    sql.query(select, &rows::row_key_range(id), &mut |row| {
        let header = headers.get(rows::row_index(row.int(0)?));
        let &(chunk, live) = header.ok_or_else(|| SqlError::damaged("a chunk row has no header"))?;
        let body = rows::decode_body(&chunk, row.int(1)?, row.blob(2)?)?;
        if rows::read_chunk_id(&row, 3)? != chunk || (row.int(6)? == 1) != live || row.int(7)? != id {
            return Err(SqlError::damaged(format!("the row of {chunk} does not match its header")));
        }
        rows_read += 1;
        timeline.insert_body(chunk, body).map_err(SqlError::damaged)
    })?;
    if rows_read != headers.len() {
        return Err(SqlError::damaged(format!("chunk rows are missing: {}", headers.len() - rows_read)));
    }
    timeline.check_invariants().map_err(SqlError::damaged)?;
    Ok(timeline)
}

fn check_conversation(sql: &mut dyn SqlConnection, id: i64, name: &str) -> Result<Vec<Finding>, SqlError> {
    let or_damage = |result: Result<Timeline, SqlError>| match result {
        Ok(timeline) => Ok(Ok(timeline)),
        Err(error) if error.kind == SqlErrorKind::Damaged => Ok(Err(error.message)),
        Err(error) => Err(error),
    };
    let state = or_damage(read_verified_state(sql, id))?;
    let mut replayed = or_damage(rows::replay_log(sql, id))?;
    // The row of the conversation has the number of the last entry.
    if replayed.is_ok() && rows::last_log_seq(sql, id)? < rows::conversation_seq(sql, id)? {
        replayed = Err("the end of its log is missing".into());
    }
    let mut findings = Vec::new();
    let mut add = |problem: String, action| findings.push(Finding::new(Some(name), problem, action));
    match (state, replayed) {
        (Ok(state), Ok(replayed)) if state.state_hash() == replayed.state_hash() => {
            if !counts_match(sql, id, &state)? {
                add("its counts do not match its chunks".into(), RepairAction::RebuildState);
            }
        }
        // Either may be right. The state is kept because it is what the user has seen last.
        (Ok(_), Ok(_)) => {
            let problem = "its log leads to a state that differs from the stored one";
            add(problem.into(), RepairAction::RewriteLog);
        }
        (Ok(_), Err(why)) => add(why, RepairAction::RewriteLog),
        (Err(why), Ok(_)) => add(why, RepairAction::RebuildState),
        (Err(state), Err(log)) => {
            add(state, RepairAction::RecoverConversation);
            add(log, RepairAction::RecoverConversation);
        }
    }
    if findings.is_empty() {
        findings.extend(check_side_tables(sql, id, name)?);
    }
    Ok(findings)
}

/// Checks the indexes of the log, the records and the embeddings.
fn check_side_tables(sql: &mut dyn SqlConnection, id: i64, name: &str) -> Result<Vec<Finding>, SqlError> {
    let mut findings = Vec::new();
    let mut add = |problem: String, action| findings.push(Finding::new(Some(name), problem, action));
    let (mut mentions, mut turn_starts, mut last_seq) = (BTreeSet::new(), Vec::new(), 0);
    rows::for_each_log_entry(sql, id, &mut |entry| {
        mentions.extend(entry.change.named_chunks().into_iter().map(|chunk| (chunk, entry.seq)));
        rows::add_turn_starts(&mut turn_starts, &entry);
        last_seq = entry.seq;
        Ok(())
    })?;
    if last_seq > rows::conversation_seq(sql, id)? {
        add("its log continues after its last entry".into(), RepairAction::RebuildState);
    }
    let mut stored_mentions = BTreeSet::new();
    let select = "SELECT turn, sentence, role, seq FROM mention WHERE conversation = $1";
    sql.query(select, &[SqlValue::Int(id)], &mut |row| {
        stored_mentions.insert((rows::read_chunk_id(&row, 0)?, row.count(3)?));
        Ok(())
    })?;
    if mentions != stored_mentions || turn_starts != rows::turn_starts(sql, id)? {
        add("the indexes of its log do not match its entries".into(), RepairAction::RebuildLogIndexes);
    }
    for kind in rows::record_kinds(sql, id)? {
        if let Err(error) = rows::records(sql, id, &kind) {
            add(error.message, RepairAction::AcceptRecords);
        }
    }
    for embedder in rows::embedders(sql, id)? {
        if let Err(error) = rows::for_each_embedding(sql, id, &embedder, &mut |_, _| Ok(())) {
            add(error.message, RepairAction::DropDamagedEmbeddings);
        }
    }
    Ok(findings)
}

fn counts_match(sql: &mut dyn SqlConnection, id: i64, timeline: &Timeline) -> Result<bool, SqlError> {
    let mut matches = false;
    let select = "SELECT turns, places, tokens, live FROM conversation WHERE id = $1";
    sql.query(select, &[SqlValue::Int(id)], &mut |row| {
        let counts = [timeline.turns().len(), timeline.row_count(), timeline.len(), timeline.live_len()];
        let stored = [row.count(0)?, row.count(1)?, row.count(2)?, row.count(3)?];
        matches = stored == counts.map(|n| n as u64);
        Ok(())
    })?;
    Ok(matches)
}

fn count_orphan_rows(sql: &mut dyn SqlConnection, ids: &BTreeSet<i64>) -> Result<u64, SqlError> {
    let mut count = 0;
    for [count_by_conversation, _] in ORPHAN_ROW_STATEMENTS {
        sql.query(count_by_conversation, &[], &mut |row| {
            count += if ids.contains(&row.int(0)?) { 0 } else { row.count(1)? };
            Ok(())
        })?;
    }
    Ok(count)
}

/// For each table: the statement that counts its rows by conversation, and the one that deletes orphan rows.
pub(crate) const ORPHAN_ROW_STATEMENTS: [[&str; 2]; 7] = [
    [
        "SELECT key / 4294967296, count(*) FROM chunk GROUP BY 1",
        "DELETE FROM chunk WHERE key / 4294967296 NOT IN (SELECT id FROM conversation)",
    ],
    [
        "SELECT key / 4294967296, count(*) FROM block GROUP BY 1",
        "DELETE FROM block WHERE key / 4294967296 NOT IN (SELECT id FROM conversation)",
    ],
    [
        "SELECT key / 4294967296, count(*) FROM log GROUP BY 1",
        "DELETE FROM log WHERE key / 4294967296 NOT IN (SELECT id FROM conversation)",
    ],
    [
        "SELECT conversation, count(*) FROM mention GROUP BY 1",
        "DELETE FROM mention WHERE conversation NOT IN (SELECT id FROM conversation)",
    ],
    [
        "SELECT conversation, count(*) FROM record GROUP BY 1",
        "DELETE FROM record WHERE conversation NOT IN (SELECT id FROM conversation)",
    ],
    [
        "SELECT conversation, count(*) FROM embedding GROUP BY 1",
        "DELETE FROM embedding WHERE conversation NOT IN (SELECT id FROM conversation)",
    ],
    [
        "SELECT conversation, count(*) FROM message GROUP BY 1",
        "DELETE FROM message WHERE conversation NOT IN (SELECT id FROM conversation)",
    ],
];
