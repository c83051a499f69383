//! How what the [doctor](crate::doctor) found is mended. Nothing is, without a copy of how it was.

use crate::database::{Database, StoreLocation};
use crate::doctor::{
    Finding, ORPHAN_ROW_STATEMENTS, RepairAction, conversation_seq, find_nameless, last_log_seq,
    list_readable_conversations, read_verified_state,
};
use crate::files::{create_private, lock_exclusive, remove_database_files, unused_sibling_path};
use crate::recover::recover_conversation;
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlValue};
use halo_core::Error;
use halo_core::change::Change;
use halo_core::chunk_body::checksum_bytes;
use halo_core::store::{Durability, Embedding, LogEntry};
use halo_core::timeline::Timeline;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

impl Database {
    /// Mends what was found, after a copy of how it was (a file beside it, on a server another schema); returns where
    /// that is, and what was done, in words.
    pub fn repair(&mut self, findings: &[Finding]) -> Result<(Option<String>, Vec<String>), Error> {
        let what = "mending the store";
        for name in findings.iter().filter_map(|f| f.conversation.as_deref()) {
            self.lock_conversation(name).map_err(|e| e.with_context(what))?;
            self.drop_open_state(name);
        }
        if let StoreLocation::Sqlite(path) = self.location().clone()
            && findings.iter().any(|f| f.action == RepairAction::RebuildFirstPage)
        {
            self.sql.close();
            let kept = rebuild_first_page(&path).map_err(|e| e.with_context(what))?;
            let mut revived = Database::open(self.location())?;
            let more = revived.check_integrity(&mut |_, _| {})?;
            let mut done = vec!["the first page of the file was made anew".to_owned()];
            if !more.is_empty() {
                done.extend(revived.repair(&more)?.1);
            }
            return Ok((Some(kept.display().to_string()), done));
        }
        if findings.iter().any(|f| f.action == RepairAction::RecoverToNewFile) {
            return self.recover_to_new_file().map_err(|e| e.with_context(what));
        }
        if findings.iter().all(|f| f.action == RepairAction::Unrepairable) {
            return Ok((None, Vec::new()));
        }
        let backup = Some(self.sql.backup().map_err(|e| e.with_context("copying the store before mending"))?);
        let cures: BTreeSet<(Option<&str>, RepairAction)> =
            findings.iter().map(|f| (f.conversation.as_deref(), f.action)).collect();
        let mut done = Vec::new();
        for (name, cure) in cures {
            let mended =
                self.in_transaction(Some(Durability::Immediate), |sql| apply_repair(sql, name, cure));
            done.extend(mended.map_err(|e| e.with_context(what))?);
        }
        Ok((backup, done))
    }

    /// Moves all that can be read to a new file, which takes the place of this one.
    fn recover_to_new_file(&mut self) -> Result<(Option<String>, Vec<String>), SqlError> {
        let StoreLocation::Sqlite(path) = self.location().clone() else {
            return Err(SqlError::invalid_input("a server looks after its own files"));
        };
        let fresh_path = unused_sibling_path(&path, "mended");
        self.sql.unlock_all();
        let _out = lock_exclusive(&path)?;
        let done = self.copy_readable_to(&path, &fresh_path);
        if done.is_err() {
            remove_database_files(&fresh_path);
        }
        done
    }

    fn copy_readable_to(
        &mut self,
        path: &Path,
        fresh_path: &Path,
    ) -> Result<(Option<String>, Vec<String>), SqlError> {
        let mut fresh = Database::open(&StoreLocation::Sqlite(fresh_path.to_owned()))
            .map_err(|e| SqlError::invalid_input(e.to_string()))?;
        let mut done = Vec::new();
        let (mut all, _) = list_readable_conversations(&mut *self.sql)?;
        let known = all.iter().map(|(id, ..)| *id).collect();
        let nameless = find_nameless(&mut *self.sql, &known)?;
        all.extend(nameless);
        for (id, name) in all {
            let (timeline, how) = match read_verified_state(&mut *self.sql, id) {
                Ok(timeline) => (timeline, None),
                Err(_) => match replay_complete_log(&mut *self.sql, id) {
                    Ok(timeline) => (timeline, Some(None)),
                    Err(_) => recover_conversation(&mut *self.sql, id)
                        .map(|(t, rescued)| (t, Some(Some(rescued))))?,
                },
            };
            let log = read_matching_log(&mut *self.sql, id, &timeline);
            done.push(match (&how, &log) {
                (None, Some(_)) => format!("'{name}': all of it could be read"),
                (None, None) => format!("'{name}': no word is lost, the reasons of what happened are"),
                (Some(None), _) => format!("'{name}': made again from its log, nothing is lost"),
                (Some(Some(rescued)), _) => format!("'{name}': put together again: {rescued}"),
            });
            let old = &mut *self.sql;
            fresh.in_transaction(Some(Durability::Immediate), |new| {
                copy_to_database(old, new, id, &name, &timeline, log)
            })?;
        }
        let kept = unused_sibling_path(path, "damaged");
        drop(fresh);
        self.sql.close();
        let swap = || -> std::io::Result<()> {
            std::fs::rename(path, &kept)?;
            for end in ["-wal", "-shm"] {
                let with = |p: &Path| PathBuf::from(format!("{}{end}", p.display()));
                if with(path).exists() {
                    std::fs::rename(with(path), with(&kept))?;
                }
            }
            std::fs::rename(fresh_path, path)
        };
        swap().map_err(|e| SqlError::unavailable(format!("the mended file cannot take its place: {e}")))?;
        Ok((Some(kept.display().to_string()), done))
    }

    /// Makes the first page of a file anew, where that alone keeps it from opening; the file as it was is kept
    /// beside it, and named.
    pub fn rebuild_first_page(path: &Path) -> Result<PathBuf, Error> {
        rebuild_first_page(path).map_err(|e| e.with_context("mending the store"))
    }
}

/// Mends one conversation, or the store; says what was done.
fn apply_repair(
    sql: &mut dyn SqlConnection,
    name: Option<&str>,
    cure: RepairAction,
) -> Result<Option<String>, SqlError> {
    let Some(name) = name else {
        if cure == RepairAction::RecoverNameless {
            return recover_nameless(sql).map(Some);
        }
        for [_, delete] in ORPHAN_ROW_STATEMENTS {
            sql.execute(delete, &[])?;
        }
        return Ok(Some("took the rows that belong to nothing out".into()));
    };
    let id = rows::find_conversation_id(sql, name)?.ok_or_else(|| rows::no_such_conversation(name))?;
    let seq = conversation_seq(sql, id)?;
    let done = match cure {
        RepairAction::RebuildState => {
            let timeline = rows::replay_log(sql, id)?;
            let last = last_log_seq(sql, id)?;
            rows::write_whole_state(sql, id, seq.max(last), &timeline)?;
            rebuild_mentions(sql, id)?;
            "made again from its log"
        }
        RepairAction::RewriteLog => {
            let timeline = read_verified_state(sql, id)?;
            rewrite_log(sql, id, seq, &timeline)?;
            "its log was told anew; the reasons of what happened are lost"
        }
        RepairAction::RecoverConversation => {
            let (timeline, rescued) = recover_conversation(sql, id)?;
            rewrite_log(sql, id, seq, &timeline)?;
            return Ok(Some(format!("'{name}': put together again: {rescued}")));
        }
        RepairAction::AcceptRecords => {
            recompute_record_checksums(sql, id)?;
            "its records are kept as they stand"
        }
        RepairAction::RebuildMentions => {
            rebuild_mentions(sql, id)?;
            "noted anew which entries name which chunk"
        }
        RepairAction::DropDamagedEmbeddings => {
            drop_damaged_embeddings(sql, id)?;
            "dropped embeddings that cannot be read"
        }
        RepairAction::DeleteOrphanRows
        | RepairAction::RecoverNameless
        | RepairAction::RecoverToNewFile
        | RepairAction::RebuildFirstPage
        | RepairAction::Unrepairable => return Ok(None),
    };
    Ok(Some(format!("'{name}': {done}")))
}

/// Gives conversations that have lost their name another, and makes them again from their log.
fn recover_nameless(sql: &mut dyn SqlConnection) -> Result<String, SqlError> {
    let known = list_readable_conversations(sql)?.0.into_iter().map(|(id, _)| id).collect();
    let nameless = find_nameless(sql, &known)?;
    for (&id, name) in &nameless {
        let insert = "INSERT INTO conversation (id, name, model, created, used, seq, turns, places, tokens, live) \
                      VALUES ($1, $2, '', $3, $4, 0, 0, 0, 0, 0)";
        let now = SqlValue::Int(rows::now_ms());
        sql.execute(insert, &[SqlValue::Int(id), SqlValue::Text(name), now, now])?;
        let last = last_log_seq(sql, id)?;
        let state = read_verified_state(sql, id);
        match (rows::replay_log(sql, id), state) {
            (Ok(told), Ok(state)) if told.state_hash() == state.state_hash() => {
                rows::write_whole_state(sql, id, last, &state)?;
            }
            // Where the log may have lost its end, the state is what was last seen.
            (_, Ok(state)) => rewrite_log(sql, id, last, &state)?,
            (Ok(told), Err(_)) => rows::write_whole_state(sql, id, last, &told)?,
            (Err(_), Err(_)) => {
                let (timeline, _) = recover_conversation(sql, id)?;
                rewrite_log(sql, id, last, &timeline)?;
            }
        }
        rebuild_mentions(sql, id)?;
    }
    let names: Vec<_> = nameless.values().map(|name| format!("'{name}'")).collect();
    Ok(format!("found again, under other names: {}", names.join(", ")))
}

/// Which entries name which chunk, noted anew.
fn rebuild_mentions(sql: &mut dyn SqlConnection, id: i64) -> Result<(), SqlError> {
    sql.execute("DELETE FROM mention WHERE conversation = $1", &[SqlValue::Int(id)])?;
    let mut named = Vec::new();
    rows::for_each_log_entry(sql, id, &mut |entry| {
        named.push((entry.seq, entry.change));
        Ok(())
    })?;
    named.iter().try_for_each(|(seq, change)| rows::insert_mentions(sql, id, seq.cast_signed(), change))
}

fn drop_damaged_embeddings(sql: &mut dyn SqlConnection, id: i64) -> Result<(), SqlError> {
    let mut bad = Vec::new();
    let select = "SELECT turn, sentence, role, embedder, sum, vector FROM embedding WHERE conversation = $1";
    sql.query(select, &[SqlValue::Int(id)], &mut |row| {
        if checksum_bytes(row.blob(5)?) != row.int(4)?.cast_unsigned() {
            bad.push((row.text(3)?.to_owned(), rows::read_chunk_id(&row, 0)?));
        }
        Ok(())
    })?;
    bad.iter().try_for_each(|(embedder, chunk)| {
        rows::put_embedding(sql, id, embedder, &Embedding { chunk: *chunk, text_hash: 0, vector: vec![] }, 0)
    })
}

/// Sums records anew, as they stand.
fn recompute_record_checksums(sql: &mut dyn SqlConnection, id: i64) -> Result<(), SqlError> {
    let mut all = Vec::new();
    let select = "SELECT kind, key, value, at FROM record WHERE conversation = $1";
    sql.query(select, &[SqlValue::Int(id)], &mut |row| {
        all.push((row.text(0)?.to_owned(), row.text(1)?.to_owned(), row.text(2)?.to_owned(), row.int(3)?));
        Ok(())
    })?;
    for (kind, key, value, at) in all {
        rows::put_record(sql, id, &kind, &key, Some(&value), at)?;
    }
    Ok(())
}

/// Puts a log that leads to the state in the place of the one that is there.
fn rewrite_log(sql: &mut dyn SqlConnection, id: i64, seq: u64, timeline: &Timeline) -> Result<(), SqlError> {
    let after = seq.max(last_log_seq(sql, id).unwrap_or(0));
    sql.execute("DELETE FROM log WHERE key BETWEEN $1 AND $2", &rows::row_key_range(id))?;
    let last = append_log_entries(sql, id, after, &timeline.rebuild_changes())?;
    rows::write_whole_state(sql, id, last, timeline)?;
    rebuild_mentions(sql, id)
}

/// Writes entries behind `after`; numbers are never used twice.
fn append_log_entries(
    sql: &mut dyn SqlConnection,
    id: i64,
    after: u64,
    changes: &[Change],
) -> Result<u64, SqlError> {
    let (mut seq, now) = (after, rows::now_ms());
    // Even where nothing is left, the log ends with the conversation's own number.
    let nothing = [Change::Batch(Vec::new())];
    for change in if changes.is_empty() { &nothing[..] } else { changes } {
        seq += 1;
        rows::insert_log_entry(sql, rows::row_key(id, seq as usize), now, change)?;
    }
    Ok(seq)
}

/// The state that the log leads to, if the log has its end.
fn replay_complete_log(sql: &mut dyn SqlConnection, id: i64) -> Result<Timeline, SqlError> {
    let timeline = rows::replay_log(sql, id)?;
    // Of a conversation that has lost its row, the end is not known.
    let seq = conversation_seq(sql, id).unwrap_or_default();
    if last_log_seq(sql, id)? < seq {
        return Err(SqlError::damaged("its log has lost its end"));
    }
    Ok(timeline)
}

type LogEntries = Vec<LogEntry>;

/// The log, if it can be read and leads to the state.
fn read_matching_log(sql: &mut dyn SqlConnection, id: i64, timeline: &Timeline) -> Option<LogEntries> {
    let (mut log, mut told) = (Vec::new(), Timeline::new());
    let read = rows::for_each_log_entry(sql, id, &mut |entry| {
        told.apply(&entry.change).map_err(|e| SqlError::damaged(e.to_string()))?;
        log.push(entry);
        Ok(())
    });
    (read.is_ok() && told.state_hash() == timeline.state_hash()).then_some(log)
}

/// Writes a conversation, and what can be read beside it, into another database.
fn copy_to_database(
    old: &mut dyn SqlConnection,
    new: &mut dyn SqlConnection,
    id: i64,
    name: &str,
    timeline: &Timeline,
    log: Option<LogEntries>,
) -> Result<(), SqlError> {
    let (mut model, mut created, mut seq) = (String::new(), rows::now_ms(), 0);
    let select = "SELECT seq, created, model FROM conversation WHERE id = $1";
    // What cannot be read of these is not worth more than a guess.
    let _ = old.query(select, &[SqlValue::Int(id)], &mut |row| {
        seq = row.count(0)?;
        created = row.int(1)?;
        model = row.text(2)?.to_owned();
        Ok(())
    });
    let to = rows::create_conversation(new, name, created)?;
    let last = match log.filter(|log| log.last().is_some_and(|e| e.seq >= seq)) {
        Some(log) => {
            for entry in &log {
                rows::insert_log_entry(
                    new,
                    rows::row_key(to, entry.seq as usize),
                    entry.committed_at,
                    &entry.change,
                )?;
            }
            log.last().map_or(seq, |e| e.seq.max(seq))
        }
        None => append_log_entries(new, to, seq, &timeline.rebuild_changes())?,
    };
    rows::write_whole_state(new, to, last, timeline)?;
    rows::set_model(new, to, &model)?;
    rebuild_mentions(new, to)?;
    copy_records(old, new, id, to)?;
    // Embeddings can be made again: those that cannot be read are left behind.
    let (mut after, select) = (
        String::new(),
        "SELECT embedder FROM embedding WHERE conversation = $1 AND embedder > $2 \
                                               ORDER BY embedder LIMIT 1",
    );
    loop {
        let mut embedder = None;
        let asked = old.query(select, &[SqlValue::Int(id), SqlValue::Text(&after)], &mut |row| {
            embedder = Some(row.text(0)?.to_owned());
            Ok(())
        });
        let (Ok(()), Some(next)) = (asked, embedder) else { break };
        let _ = rows::for_each_embedding(old, id, &next, &mut |e, at| {
            rows::put_embedding(new, to, &next, &e, at)
        });
        after = next;
    }
    Ok(())
}

/// Makes the first page of a file anew. It holds the file's header and the schema; both are the same in every
/// file of a version, but for a few counts, which are set so that nothing is taken for free. Only where this lets
/// conversations be read is the file touched at all.
fn rebuild_first_page(path: &Path) -> Result<PathBuf, SqlError> {
    let out = lock_exclusive(path)?;
    let trial = unused_sibling_path(path, "trial");
    let revived = create_private(&trial).and_then(|()| write_with_new_first_page(path, &trial));
    let done = revived.and_then(|()| {
        let kept = unused_sibling_path(path, "damaged");
        let swap = std::fs::rename(path, &kept).and_then(|()| std::fs::rename(&trial, path));
        swap.map_err(|e| SqlError::unavailable(format!("{}: {e}", path.display())))?;
        Ok(kept)
    });
    remove_database_files(&trial);
    if done.is_err() {
        // What is not ours is left without a trace; a folder that others use stays.
        drop(out);
        let locks = PathBuf::from(format!("{}-locks", path.display()));
        let _ = std::fs::remove_file(locks.join("in-use")).and_then(|()| std::fs::remove_dir(&locks));
    }
    done
}

fn write_with_new_first_page(path: &Path, trial: &Path) -> Result<(), SqlError> {
    const PAGE_SIZE: usize = 4096;
    let failed = |e: std::io::Error| SqlError::unavailable(format!("{}: {e}", path.display()));
    let pattern = unused_sibling_path(path, "pattern");
    drop(
        Database::open(&StoreLocation::Sqlite(pattern.clone()))
            .map_err(|e| SqlError::invalid_input(e.to_string()))?,
    );
    let first = std::fs::read(&pattern).map_err(failed);
    remove_database_files(&pattern);
    let (first, mut bytes) = (first?, std::fs::read(path).map_err(failed)?);
    let hopeless = || {
        let why =
            "nothing of Halo's can be read in it; it was left as it was: bring back a copy, if there is one";
        SqlError::invalid_input(why)
    };
    if bytes.len() < PAGE_SIZE || first.len() < PAGE_SIZE {
        return Err(hopeless());
    }
    // Every table has its root among the first pages, or none of them can be read.
    bytes.resize(bytes.len().max(first.len()).next_multiple_of(PAGE_SIZE), 0);
    bytes[..PAGE_SIZE].copy_from_slice(&first[..PAGE_SIZE]);
    let pages = u32::try_from(bytes.len() / PAGE_SIZE)
        .map_err(|_| SqlError::invalid_input("the file is too large"))?;
    bytes[28..32].copy_from_slice(&pages.to_be_bytes());
    // Where the size is to be believed, the counter of changes must be the one beside it.
    bytes.copy_within(24..28, 92);
    bytes[32..40].fill(0);
    std::fs::write(trial, &bytes).map_err(failed)?;
    let mut store = Database::open(&StoreLocation::Sqlite(trial.to_owned())).map_err(|_| hopeless())?;
    let (named, _) = list_readable_conversations(&mut *store.sql)?;
    let nameless = find_nameless(&mut *store.sql, &BTreeSet::new())?;
    if named.is_empty() && nameless.is_empty() { Err(hopeless()) } else { Ok(()) }
}

/// Moves records over one by one; one that is damaged comes as it stands, one that cannot be read stays behind.
fn copy_records(
    old: &mut dyn SqlConnection,
    new: &mut dyn SqlConnection,
    id: i64,
    to: i64,
) -> Result<(), SqlError> {
    for kind in rows::record_kinds(old, id)? {
        let mut after = String::new();
        loop {
            let mut found = None;
            let select = "SELECT key, value, at FROM record WHERE conversation = $1 AND kind = $2 AND key > $3 \
                          ORDER BY key LIMIT 1";
            let args = [SqlValue::Int(id), SqlValue::Text(&kind), SqlValue::Text(&after)];
            let asked = old.query(select, &args, &mut |row| {
                found = Some((row.text(0)?.to_owned(), row.text(1)?.to_owned(), row.int(2)?));
                Ok(())
            });
            let (Ok(()), Some((key, value, at))) = (asked, found) else { break };
            rows::put_record(new, to, &kind, &key, Some(&value), at)?;
            after = key;
        }
    }
    Ok(())
}
