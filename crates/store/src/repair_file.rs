//! Repairs of a damaged SQLite file: everything readable is copied to a new file, or the first page is rebuilt. The
//! damaged file is kept beside the new one.

use crate::database::{Database, StoreLocation};
use crate::doctor::{find_nameless, list_readable_conversations, read_verified_state};
use crate::file_swap::{finish_interrupted_replacement, replace_database, replace_file_only};
use crate::files::{
    create_private, io_error, lock_exclusive, open_lock_file, remove_database_files, unused_sibling_path,
};
use crate::recover::recover_conversation;
use crate::repair::RepairReport;
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlValue};
use halo_core::Error;
use halo_core::store::{Durability, LogEntry};
use halo_core::timeline::Timeline;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The page size of every file that this program creates.
const PAGE_BYTES: usize = 4096;

impl Database {
    /// Copies everything readable to a new file, which replaces this one.
    pub(crate) fn recover_to_new_file(&mut self) -> Result<RepairReport, SqlError> {
        let StoreLocation::Sqlite(path) = self.location().clone() else {
            return Err(SqlError::invalid_input("a PostgreSQL server repairs its own files"));
        };
        let new_path = unused_sibling_path(&path, "repaired");
        self.sql.release_all_leases();
        let _lock = lock_exclusive(&path)?;
        let recovered = self.copy_readable_to(&new_path).and_then(|done| {
            self.sql.close();
            let old_path = replace_database(&path, &new_path)?;
            Ok((Some(old_path.display().to_string()), done))
        });
        if recovered.is_err() {
            remove_database_files(&new_path);
        }
        recovered
    }

    /// Copies every conversation of which anything can be read; returns how each was recovered, in words.
    fn copy_readable_to(&mut self, new_path: &Path) -> Result<Vec<String>, SqlError> {
        let mut new_database = open_file(new_path)?;
        let mut done = Vec::new();
        let (mut conversations, _) = list_readable_conversations(&mut *self.sql)?;
        let named = conversations.iter().map(|(id, _)| *id).collect();
        conversations.extend(find_nameless(&mut *self.sql, &named)?);
        for (id, name) in conversations {
            let recovered = RecoveredConversation::read(&mut *self.sql, id)?;
            done.push(format!("'{name}': {}", recovered.description));
            let old = &mut *self.sql;
            new_database.in_transaction(Some(Durability::Immediate), |new| {
                copy_conversation(old, id, new, &name, &recovered)
            })?;
        }
        Ok(done)
    }

    /// Removes the unfinished files of repairs that were killed, and returns those that it removed. Nothing is removed where the
    /// database is missing, so that one of them may be all that is left, or while a repair runs.
    pub fn remove_repair_leftovers(path: &Path) -> Result<Vec<PathBuf>, Error> {
        remove_repair_leftovers(path).map_err(|e| e.with_context("removing what repairs have left"))
    }

    /// Rebuilds the first page of a file that cannot be opened because of it. Returns where the damaged file is kept.
    pub fn rebuild_first_page(path: &Path) -> Result<PathBuf, Error> {
        rebuild_first_page(path).map_err(|e| e.with_context("repairing the store"))
    }
}

fn remove_repair_leftovers(path: &Path) -> Result<Vec<PathBuf>, SqlError> {
    let Some(file) = path.file_name().and_then(|name| name.to_str()) else { return Ok(Vec::new()) };
    if !path.exists() {
        return Ok(Vec::new());
    }
    finish_interrupted_replacement(path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = std::fs::read_dir(folder).map_err(|e| io_error(&e, folder))?;
    let is_leftover = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.strip_prefix(file).and_then(|rest| rest.strip_prefix('.')).is_some_and(is_unfinished_copy)
    };
    let mut leftovers: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(is_leftover).collect();
    if leftovers.is_empty() {
        return Ok(leftovers);
    }
    // A repair holds this lock alone.
    let lock = open_lock_file(path, "in-use")?;
    if lock.try_lock_shared().is_err() {
        return Ok(Vec::new());
    }
    leftovers.sort();
    for leftover in &leftovers {
        let removed = match leftover.is_dir() {
            true => std::fs::remove_dir_all(leftover),
            false => std::fs::remove_file(leftover),
        };
        removed.map_err(|e| io_error(&e, leftover))?;
    }
    Ok(leftovers)
}

/// Whether this follows the name of a database in that of an unfinished copy: `trial-1`, `repaired-2-wal`,
/// `damaged-1.partial`.
fn is_unfinished_copy(end: &str) -> bool {
    let Some((what, rest)) = end.split_once('-') else { return false };
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (number, suffix) = rest.split_at(digits);
    let is_copy = ["repaired", "template", "trial"].contains(&what)
        && ["", "-wal", "-shm", "-journal", "-locks"].contains(&suffix);
    !number.is_empty() && (is_copy || (what == "damaged" && suffix.ends_with(".partial")))
}

/// What can be read of a conversation in a damaged file.
struct RecoveredConversation {
    timeline: Timeline,
    /// The log, if it is complete and leads to the timeline.
    log: Option<Vec<LogEntry>>,
    description: String,
}

impl RecoveredConversation {
    /// Reads the state; if that is damaged, the log; if both are, everything readable.
    fn read(sql: &mut dyn SqlConnection, id: i64) -> Result<Self, SqlError> {
        if let Ok(timeline) = read_verified_state(sql, id) {
            let log = read_matching_log(sql, id, &timeline);
            let description = match &log {
                Some(_) => "copied completely",
                None => "no text was lost, but the reasons for earlier changes were",
            };
            return Ok(Self { timeline, log, description: description.into() });
        }
        if let Ok(timeline) = replay_complete_log(sql, id) {
            let log = read_matching_log(sql, id, &timeline);
            return Ok(Self { timeline, log, description: "rebuilt from its log, nothing is lost".into() });
        }
        let (timeline, report) = recover_conversation(sql, id)?;
        let log = read_matching_log(sql, id, &timeline);
        Ok(Self { timeline, log, description: format!("recovered: {report}") })
    }
}

/// The timeline that the log leads to, unless the end of the log is missing.
fn replay_complete_log(sql: &mut dyn SqlConnection, id: i64) -> Result<Timeline, SqlError> {
    let timeline = rows::replay_log(sql, id)?;
    // Without the row of the conversation, the number of the last entry is unknown.
    let seq = rows::conversation_seq(sql, id).unwrap_or_default();
    if rows::last_log_seq(sql, id)? < seq {
        return Err(SqlError::damaged("the end of the log is missing"));
    }
    Ok(timeline)
}

/// The log, if it can be read and leads to the timeline.
fn read_matching_log(sql: &mut dyn SqlConnection, id: i64, timeline: &Timeline) -> Option<Vec<LogEntry>> {
    let (mut log, mut replayed) = (Vec::new(), Timeline::new());
    let read = rows::for_each_log_entry(sql, id, &mut |entry| {
        replayed.apply(&entry.change).map_err(|e| SqlError::damaged(e.to_string()))?;
        log.push(entry);
        Ok(())
    });
    (read.is_ok() && replayed.state_hash() == timeline.state_hash()).then_some(log)
}

/// Writes a recovered conversation, and the readable records and embeddings of it, to another database.
fn copy_conversation(
    old: &mut dyn SqlConnection,
    old_id: i64,
    new: &mut dyn SqlConnection,
    name: &str,
    recovered: &RecoveredConversation,
) -> Result<(), SqlError> {
    let (mut model, mut created, mut seq) = (String::new(), rows::now_ms(), 0);
    let select = "SELECT seq, created, model FROM conversation WHERE id = $1";
    // Columns that cannot be read keep these defaults.
    let _ = old.query(select, &[SqlValue::Int(old_id)], &mut |row| {
        seq = row.count(0)?;
        created = row.int(1)?;
        model = row.text(2)?.to_owned();
        Ok(())
    });
    let new_id = rows::create_conversation(new, name, created)?;
    let last = write_log(new, new_id, seq, recovered)?;
    rows::write_whole_state(new, new_id, last, &recovered.timeline)?;
    rows::set_model(new, new_id, &model)?;
    rows::rebuild_log_indexes(new, new_id)?;
    copy_records(old, old_id, new, new_id)?;
    copy_embeddings(old, old_id, new, new_id);
    Ok(())
}

/// Writes the recovered log or, if that ends before entry `seq`, one that is rebuilt from the timeline. Returns the number
/// of its last entry.
fn write_log(
    new: &mut dyn SqlConnection,
    new_id: i64,
    seq: u64,
    recovered: &RecoveredConversation,
) -> Result<u64, SqlError> {
    let log = recovered.log.as_deref().unwrap_or_default();
    let Some(last) = log.last().map(|entry| entry.seq).filter(|last| *last >= seq) else {
        return rows::insert_rebuilt_log(new, new_id, seq, &recovered.timeline);
    };
    for entry in log {
        let key = rows::row_key(new_id, entry.seq as usize);
        rows::insert_log_entry(new, key, entry.committed_at, &entry.change)?;
    }
    Ok(last)
}

/// Copies records one by one. A record whose checksum does not match is copied as it is; one that cannot be read ends
/// the copy of its kind.
fn copy_records(
    old: &mut dyn SqlConnection,
    old_id: i64,
    new: &mut dyn SqlConnection,
    new_id: i64,
) -> Result<(), SqlError> {
    for kind in rows::record_kinds(old, old_id)? {
        let mut last_key = String::new();
        while let Some((key, value, at)) = next_record(old, old_id, &kind, &last_key) {
            rows::put_record(new, new_id, &kind, &key, Some(&value), at)?;
            last_key = key;
        }
    }
    Ok(())
}

/// Key, value and time of the first record of a kind after `last_key`; none if it cannot be read.
fn next_record(
    sql: &mut dyn SqlConnection,
    id: i64,
    kind: &str,
    last_key: &str,
) -> Option<(String, String, i64)> {
    let mut record = None;
    let select = "SELECT key, value, at FROM record WHERE conversation = $1 AND kind = $2 AND key > $3 \
                  ORDER BY key LIMIT 1";
    let cells = [SqlValue::Int(id), SqlValue::Text(kind), SqlValue::Text(last_key)];
    let read = sql.query(select, &cells, &mut |row| {
        record = Some((row.text(0)?.to_owned(), row.text(1)?.to_owned(), row.int(2)?));
        Ok(())
    });
    record.filter(|_| read.is_ok())
}

/// Copies the embeddings that can be read. The others are computed again when they are needed.
fn copy_embeddings(old: &mut dyn SqlConnection, old_id: i64, new: &mut dyn SqlConnection, new_id: i64) {
    let mut last_embedder = String::new();
    while let Some(embedder) = next_embedder(old, old_id, &last_embedder) {
        let _ = rows::for_each_embedding(old, old_id, &embedder, &mut |embedding, at| {
            rows::put_embedding(new, new_id, &embedder, &embedding, at)
        });
        last_embedder = embedder;
    }
}

fn next_embedder(sql: &mut dyn SqlConnection, id: i64, last_embedder: &str) -> Option<String> {
    let mut embedder = None;
    let select =
        "SELECT embedder FROM embedding WHERE conversation = $1 AND embedder > $2 ORDER BY embedder LIMIT 1";
    let read = sql.query(select, &[SqlValue::Int(id), SqlValue::Text(last_embedder)], &mut |row| {
        embedder = Some(row.text(0)?.to_owned());
        Ok(())
    });
    embedder.filter(|_| read.is_ok())
}

/// Rebuilds the first page, which holds the header of the file and the schema. Both are the same in every file of a
/// version, except for some counts. The file is only replaced if conversations can be read afterwards.
fn rebuild_first_page(path: &Path) -> Result<PathBuf, SqlError> {
    let lock = lock_exclusive(path)?;
    let trial = unused_sibling_path(path, "trial");
    let rebuilt = create_private(&trial).and_then(|()| write_with_new_first_page(path, &trial));
    let replaced = rebuilt.and_then(|()| replace_file_only(path, &trial));
    remove_database_files(&trial);
    if replaced.is_err() {
        // A file of another program keeps no trace of this; a folder of locks that others use is not empty and stays.
        drop(lock);
        let locks = PathBuf::from(format!("{}-locks", path.display()));
        let _ = std::fs::remove_file(locks.join("in-use")).and_then(|()| std::fs::remove_dir(&locks));
    }
    replaced
}

fn write_with_new_first_page(path: &Path, trial: &Path) -> Result<(), SqlError> {
    let io_failed = |e: std::io::Error| SqlError::unavailable(format!("{}: {e}", path.display()));
    let template = read_empty_database(path)?;
    let mut bytes = std::fs::read(path).map_err(io_failed)?;
    let hopeless = || {
        SqlError::invalid_input(
            "no conversation of Halo can be read in it; the file was not changed: restore a backup, if there is one",
        )
    };
    if bytes.len() < PAGE_BYTES || template.len() < PAGE_BYTES {
        return Err(hopeless());
    }
    // The root pages of all tables are the first pages of the file: SQLite needs them to exist.
    bytes.resize(bytes.len().max(template.len()).next_multiple_of(PAGE_BYTES), 0);
    bytes[..PAGE_BYTES].copy_from_slice(&template[..PAGE_BYTES]);
    let pages = u32::try_from(bytes.len() / PAGE_BYTES)
        .map_err(|_| SqlError::invalid_input("the file is too large for an SQLite database"))?;
    // Offsets in the header of an SQLite file: 24 change counter, 28 size in pages, 32 first page and size of the free
    // list, 92 the change counter for which the size is valid. An empty free list keeps every page in use.
    bytes[28..32].copy_from_slice(&pages.to_be_bytes());
    bytes.copy_within(24..28, 92);
    bytes[32..40].fill(0);
    std::fs::write(trial, &bytes).map_err(io_failed)?;
    let mut database = open_file(trial).map_err(|_| hopeless())?;
    let (named, _) = list_readable_conversations(&mut *database.sql)?;
    let nameless = find_nameless(&mut *database.sql, &BTreeSet::new())?;
    if named.is_empty() && nameless.is_empty() { Err(hopeless()) } else { Ok(()) }
}

/// The bytes of a new database without conversations, made beside `path`.
fn read_empty_database(path: &Path) -> Result<Vec<u8>, SqlError> {
    let template_path = unused_sibling_path(path, "template");
    drop(open_file(&template_path)?);
    let template = std::fs::read(&template_path);
    remove_database_files(&template_path);
    template.map_err(|e| SqlError::unavailable(format!("{}: {e}", template_path.display())))
}

fn open_file(path: &Path) -> Result<Database, SqlError> {
    Database::open(&StoreLocation::Sqlite(path.to_owned()))
        .map_err(|e| SqlError::invalid_input(e.to_string()))
}
