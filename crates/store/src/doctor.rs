//! What is wrong with a store, and what will mend it (`mend.rs` does).
//!
//! A conversation is kept twice over: as it stands, and as the log of how it came to be. Each can be made from
//! the other, so damage to one loses nothing but, where the log is hit, the reasons of what happened. Where
//! both are hit, the log is played as far as it goes: the last good state. Nothing is mended without a copy of
//! how it was.

use crate::database::{Database, StoreLocation};
use crate::row_store::{self, SELECT_NAMESPACES};
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlValue};
use halo_core::Error;
use halo_core::timeline::Timeline;
use halo_core::token::ChunkId;
use std::collections::{BTreeMap, BTreeSet};

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The conversation that it concerns; none: the store as a whole.
    pub conversation: Option<String>,
    pub problem: String,
    /// What mending it will do.
    pub repair: &'static str,
    pub(crate) action: RepairAction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RepairAction {
    /// Rows that belong to nothing are taken out.
    DeleteOrphanRows,
    /// Conversations that have lost their name get another.
    RecoverNameless,
    /// Which entries of the log name which chunk is noted anew.
    RebuildMentions,
    /// What cannot be read, and can be made again, is dropped.
    DropDamagedEmbeddings,
    /// The state is made again from the log.
    RebuildState,
    /// The log is told anew from the state.
    RewriteLog,
    /// Both are put together from what can be read of either.
    RecoverConversation,
    /// Values are kept as they stand.
    AcceptRecords,
    /// All that can be read moves to a new file.
    RecoverToNewFile,
    /// The first page is made anew; then one looks again.
    RebuildFirstPage,
    Unrepairable,
}

impl RepairAction {
    fn description(self) -> &'static str {
        match self {
            RepairAction::DeleteOrphanRows => "takes the rows that belong to nothing out",
            RepairAction::RecoverNameless => {
                "gives the conversation another name, and makes it again from its log"
            }
            RepairAction::RebuildMentions => "notes anew which entries name which chunk",
            RepairAction::DropDamagedEmbeddings => {
                "drops what cannot be read; it is made again when it is needed"
            }
            RepairAction::RebuildState => "makes the state again from the log: nothing is lost",
            RepairAction::RewriteLog => {
                "tells the log anew from the state: no word is lost, only the reasons of what happened"
            }
            RepairAction::RecoverConversation => {
                "puts it together from what can be read of state and log, and says what is lost"
            }
            RepairAction::AcceptRecords => "keeps the value as it stands now",
            RepairAction::RecoverToNewFile => {
                "moves all that can be read to a new file, and keeps the old one"
            }
            RepairAction::RebuildFirstPage => "makes the first page anew, and keeps the old file",
            RepairAction::Unrepairable => {
                "cannot be mended here: bring back a copy of the store, if there is one"
            }
        }
    }
}

fn finding(conversation: Option<&str>, what: impl Into<String>, cure: RepairAction) -> Finding {
    Finding {
        conversation: conversation.map(str::to_owned),
        problem: what.into(),
        repair: cure.description(),
        action: cure,
    }
}

impl Database {
    /// Looks at everything: the file, every sum, every name, and whether log and state tell the same. `progress`
    /// hears how many conversations are done, and of how many.
    pub fn check_integrity(&mut self, progress: &mut dyn FnMut(usize, usize)) -> Result<Vec<Finding>, Error> {
        let mut found = Vec::new();
        match self.sql.has_current_schema() {
            Ok(true) => {}
            Ok(false) if matches!(self.location(), StoreLocation::Postgres(_)) => {
                let what = "a table of the schema `halo` is missing on the server";
                return Ok(vec![finding(None, what, RepairAction::Unrepairable)]);
            }
            Ok(false) => {
                let what = "the schema in its first page is not what was written";
                return Ok(vec![finding(None, what, RepairAction::RebuildFirstPage)]);
            }
            Err(error) => return Err(error.with_context("examining the store")),
        }
        match self.sql.integrity_check() {
            Ok(lines) => {
                let lines = lines.iter().flat_map(|l| l.lines()).filter(|l| !l.starts_with("***"));
                let first = lines
                    .take(3)
                    .map(|l| finding(None, format!("its file: {l}"), RepairAction::RecoverToNewFile));
                found.extend(first);
            }
            Err(error) if error.kind == SqlErrorKind::Damaged => {
                found.push(finding(None, error.message, RepairAction::RecoverToNewFile));
            }
            Err(error) => return Err(error.with_context("examining the store")),
        }
        let (conversations, damage) =
            list_readable_conversations(&mut *self.sql).map_err(|e| e.with_context("examining the store"))?;
        if let Some(why) = damage {
            found.push(finding(
                None,
                format!("the list of conversations: {why}"),
                RepairAction::RecoverToNewFile,
            ));
            return Ok(found);
        }
        for (done, (id, name)) in conversations.iter().enumerate() {
            progress(done, conversations.len());
            match self.in_transaction(None, |sql| check_conversation(sql, *id, name)) {
                Ok(all) => found.extend(all),
                Err(error) if error.kind == SqlErrorKind::Damaged => {
                    found.push(finding(Some(name), error.message, RepairAction::RecoverToNewFile));
                }
                Err(error) => return Err(error.with_context(format!("examining '{name}'"))),
            }
        }
        progress(conversations.len(), conversations.len());
        let known: BTreeSet<i64> = conversations.iter().map(|(id, ..)| *id).collect();
        let nameless = find_nameless(&mut *self.sql, &known).unwrap_or_default();
        if !nameless.is_empty() {
            let what = format!("{} of the conversations lost their name", nameless.len());
            found.push(finding(None, what, RepairAction::RecoverNameless));
            return Ok(found);
        }
        match count_orphan_rows(&mut *self.sql, &known) {
            Ok(count) if count > 0 => {
                let what = format!("{count} rows belong to no conversation");
                found.push(finding(None, what, RepairAction::DeleteOrphanRows));
            }
            Err(error) if error.kind != SqlErrorKind::Damaged => {
                return Err(error.with_context("examining the store"));
            }
            _ => {}
        }
        Ok(found)
    }
}

/// Conversations by number and name.
pub(crate) type ConversationNames = Vec<(i64, String)>;

/// Number and name of every conversation that can be read; the error of the first that cannot.
pub(crate) fn list_readable_conversations(
    sql: &mut dyn SqlConnection,
) -> Result<(ConversationNames, Option<String>), SqlError> {
    let (mut ids, mut all, mut damage) = (Vec::new(), Vec::new(), None);
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
        all.extend(name.map(|name| (id, name)));
    }
    Ok((all, damage))
}

/// Conversations and namespaces that have data and no row in `conversation`, with the names to give them.
pub(crate) fn find_nameless(
    sql: &mut dyn SqlConnection,
    known: &BTreeSet<i64>,
) -> Result<BTreeMap<i64, String>, SqlError> {
    let mut found = BTreeMap::new();
    let recovered = |id: i64| format!("recovered {id}");
    type Wording = fn(String) -> String;
    let selects: [(&str, Wording); 3] = [
        ("SELECT DISTINCT key / 4294967296 FROM log", |name| name),
        ("SELECT DISTINCT key / 4294967296 FROM block", |name| name),
        (SELECT_NAMESPACES, |name| row_store::stored_name(&name)),
    ];
    for (select, named) in selects {
        let read = sql.query(select, &[], &mut |row| {
            let id = row.int(0)?;
            found.entry(id).or_insert_with(|| named(recovered(id)));
            Ok(())
        });
        // Of a table that is damaged, what can be read.
        if let Err(error) = read
            && error.kind != SqlErrorKind::Damaged
        {
            return Err(error);
        }
    }
    found.retain(|id, _| *id > 0 && !known.contains(id));
    Ok(found)
}

/// The state with all its bodies, every one of them looked at.
pub(crate) fn read_verified_state(sql: &mut dyn SqlConnection, id: i64) -> Result<Timeline, SqlError> {
    let mut timeline = rows::read_state(sql, id, (0, 0))?;
    let names: Vec<ChunkId> = timeline.chunk_headers(0..timeline.row_count()).map(|h| h.id).collect();
    let live: Vec<bool> = timeline.chunk_headers(0..timeline.row_count()).map(|h| h.live > 0).collect();
    let mut seen = 0;
    let select = "SELECT key, sum, body, turn, sentence, role, live, conversation FROM chunk WHERE key BETWEEN $1 AND $2 ORDER BY key";
    sql.query(select, &rows::row_key_range(id), &mut |row| {
        let place = rows::row_index(row.int(0)?);
        let name = *names.get(place).ok_or_else(|| SqlError::damaged("a chunk too many"))?;
        let body = rows::decode_body(&name, row.int(1)?, row.blob(2)?)?;
        if rows::read_chunk_id(&row, 3)? != name || (row.int(6)? == 1) != live[place] || row.int(7)? != id {
            return Err(SqlError::damaged(format!("the row of {name} says something else than its block")));
        }
        seen += 1;
        timeline.insert_body(name, body).map_err(SqlError::damaged)
    })?;
    if seen != names.len() {
        return Err(SqlError::damaged(format!("{} chunks are missing", names.len() - seen)));
    }
    timeline.check_invariants().map_err(SqlError::damaged)?;
    Ok(timeline)
}

/// What is wrong with one conversation.
fn check_conversation(sql: &mut dyn SqlConnection, id: i64, name: &str) -> Result<Vec<Finding>, SqlError> {
    let damage = |result: Result<Timeline, SqlError>| match result {
        Ok(timeline) => Ok(Ok(timeline)),
        Err(error) if error.kind == SqlErrorKind::Damaged => Ok(Err(error.message)),
        Err(error) => Err(error),
    };
    let state = damage(read_verified_state(sql, id))?;
    let mut told = damage(rows::replay_log(sql, id))?;
    // The last entry bears the conversation's own number: a log that ends before has lost its end.
    if told.is_ok() && last_log_seq(sql, id)? < conversation_seq(sql, id)? {
        told = Err("its log has lost its end".into());
    }
    let mut found = Vec::new();
    let mut add = |what: String, cure| found.push(finding(Some(name), what, cure));
    match (state, told) {
        (Ok(state), Ok(told)) if state.state_hash() == told.state_hash() => {
            if !counts_match(sql, id, &state)? {
                add("its counts are not those of its chunks".into(), RepairAction::RebuildState);
            }
        }
        // Which of the two is right cannot be known; the state is what was last seen on the screen.
        (Ok(_), Ok(_)) => {
            add(
                "its log leads to another state than the one that is stored".into(),
                RepairAction::RewriteLog,
            );
        }
        (Ok(_), Err(why)) => add(why, RepairAction::RewriteLog),
        (Err(why), Ok(_)) => add(why, RepairAction::RebuildState),
        (Err(state), Err(log)) => {
            add(state, RepairAction::RecoverConversation);
            add(log, RepairAction::RecoverConversation);
        }
    }
    if found.is_empty() {
        found.extend(check_side_tables(sql, id, name)?);
    }
    Ok(found)
}

/// Mentions, records and embeddings.
fn check_side_tables(sql: &mut dyn SqlConnection, id: i64, name: &str) -> Result<Vec<Finding>, SqlError> {
    let mut found = Vec::new();
    let seq = conversation_seq(sql, id)?;
    let (mut named, mut last) = (BTreeSet::new(), 0);
    rows::for_each_log_entry(sql, id, &mut |entry| {
        last = entry.seq;
        named.extend(entry.change.named_chunks().into_iter().map(|chunk| (chunk, entry.seq)));
        Ok(())
    })?;
    if last > seq {
        found.push(finding(Some(name), "its log goes on behind its last entry", RepairAction::RebuildState));
    }
    let mut noted = BTreeSet::new();
    let select = "SELECT turn, sentence, role, seq FROM mention WHERE conversation = $1";
    sql.query(select, &[SqlValue::Int(id)], &mut |row| {
        noted.insert((rows::read_chunk_id(&row, 0)?, row.count(3)?));
        Ok(())
    })?;
    if named != noted {
        found.push(finding(
            Some(name),
            "the index of its reasons does not fit its log",
            RepairAction::RebuildMentions,
        ));
    }
    for kind in rows::record_kinds(sql, id)? {
        if let Err(error) = rows::records(sql, id, &kind) {
            found.push(finding(Some(name), error.message, RepairAction::AcceptRecords));
        }
    }
    for embedder in rows::embedders(sql, id)? {
        if let Err(error) = rows::for_each_embedding(sql, id, &embedder, &mut |_, _| Ok(())) {
            found.push(finding(Some(name), error.message, RepairAction::DropDamagedEmbeddings));
        }
    }
    Ok(found)
}

pub(crate) fn conversation_seq(sql: &mut dyn SqlConnection, id: i64) -> Result<u64, SqlError> {
    let mut seq = 0;
    sql.query("SELECT seq FROM conversation WHERE id = $1", &[SqlValue::Int(id)], &mut |row| {
        seq = row.count(0)?;
        Ok(())
    })?;
    Ok(seq)
}

fn counts_match(sql: &mut dyn SqlConnection, id: i64, timeline: &Timeline) -> Result<bool, SqlError> {
    let mut fits = false;
    let select = "SELECT turns, places, tokens, live FROM conversation WHERE id = $1";
    sql.query(select, &[SqlValue::Int(id)], &mut |row| {
        let counts = [timeline.turns().len(), timeline.row_count(), timeline.len(), timeline.live_len()];
        let kept = [row.count(0)?, row.count(1)?, row.count(2)?, row.count(3)?];
        fits = kept == counts.map(|n| n as u64);
        Ok(())
    })?;
    Ok(fits)
}

/// How many rows belong to no conversation.
fn count_orphan_rows(sql: &mut dyn SqlConnection, known: &BTreeSet<i64>) -> Result<u64, SqlError> {
    let mut count = 0;
    for [ids, _] in ORPHAN_ROW_STATEMENTS {
        sql.query(ids, &[], &mut |row| {
            count += if known.contains(&row.int(0)?) { 0 } else { row.count(1)? };
            Ok(())
        })?;
    }
    Ok(count)
}

/// For each table: its rows by conversation, and how those of none are taken out.
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

pub(crate) fn last_log_seq(sql: &mut dyn SqlConnection, id: i64) -> Result<u64, SqlError> {
    let mut last = 0;
    let select = "SELECT key FROM log WHERE key BETWEEN $1 AND $2 ORDER BY key DESC LIMIT 1";
    sql.query(select, &rows::row_key_range(id), &mut |row| {
        last = rows::row_index(row.int(0)?) as u64;
        Ok(())
    })?;
    Ok(last)
}
