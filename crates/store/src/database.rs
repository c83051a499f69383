//! Conversations in a database: what is written when, and how it comes back. The same for SQLite and PostgreSQL.
//!
//! A commit is one transaction: the change goes into the log, and the bodies and blocks that it touched are
//! written anew. Opening reads the blocks and the bodies of what is live, nothing else. Whoever commits must
//! have seen the last entry of the log: a second writer is refused, whatever the locks say.

use crate::block::{self, CHUNKS_PER_BLOCK};
use crate::log_compaction;
use crate::message_keys;
use crate::postgres::Postgres;
use crate::row_store;
use crate::rows::{self, row_key};
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlRow, SqlValue};
use crate::sqlite::{OpenMode, Sqlite};
use halo_core::Error;
use halo_core::change::{Append, Change};
use halo_core::chunk_body::ChunkBody;
use halo_core::conversation_copy::TurnCopy;
use halo_core::dirty_rows::DirtyRows;
use halo_core::store::{
    Access, ConversationSummary, Durability, Embedding, LogEntry, MessageKey, MessageLookup, Record,
    RecordKind, Store,
};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, TurnId};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where a store is: `sqlite:PATH` or `postgres://…`.
#[derive(Clone, PartialEq, Eq)]
pub enum StoreLocation {
    Sqlite(PathBuf),
    /// A server; the address may hold a password.
    Postgres(String),
}

impl FromStr for StoreLocation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if let Some(path) = text.strip_prefix("sqlite:").filter(|p| !p.is_empty()) {
            if path.starts_with('~') {
                let why = format!(
                    "'{text}': the shell writes ~ out only at the start of a word; write $HOME instead"
                );
                return Err(Error::invalid_input("opening the store", why));
            }
            // SQLite takes some names for more than names (:memory:, file:…); a whole path is only a path.
            let path = std::path::absolute(path)
                .map_err(|e| Error::unavailable("opening the store", e.to_string()))?;
            return Ok(StoreLocation::Sqlite(path));
        }
        if text.starts_with("postgres://") || text.starts_with("postgresql://") {
            return Ok(StoreLocation::Postgres(text.to_owned()));
        }
        // It may hold a password.
        let scheme = text.split_once(':').map_or(text, |(scheme, _)| scheme);
        let why = format!(
            "'{scheme}:…' is not the address of a store: write sqlite:PATH or postgres://USER@HOST/DATABASE"
        );
        Err(Error::invalid_input("opening the store", why))
    }
}

impl fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreLocation::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            StoreLocation::Postgres(url) => {
                let (scheme, rest) = url.split_once("://").unwrap_or(("postgres", ""));
                let rest = rest.split('?').next().unwrap_or_default();
                let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
                write!(f, "{scheme}://{host}")
            }
        }
    }
}

impl fmt::Debug for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Conversations in a database.
pub struct Database {
    pub(crate) sql: Box<dyn SqlConnection + Send>,
    location: StoreLocation,
    open_conversations: BTreeMap<String, OpenConversation>,
}

/// What is remembered of a conversation that is being written.
#[derive(Clone, Debug)]
struct OpenConversation {
    id: i64,
    seq: i64,
    tokens: u64,
    chunk_count: usize,
    block_count: usize,
    /// What streamed in last: the first and the last entry of it, and all of it.
    streamed_tail: Option<(i64, i64, Append)>,
    /// The last entry that scored, if it was seen.
    last_score: Option<(i64, Change)>,
    /// Whether tokens have moved from chunk to chunk since, as far as is known.
    tokens_moved: bool,
}

impl Database {
    /// Opens a store to read and write, and makes it where there is none.
    pub fn open(location: &StoreLocation) -> Result<Self, Error> {
        Self::open_with_mode(location, OpenMode::Write)
    }

    /// Opens a store to read. A file that cannot be written is fine.
    pub fn open_read_only(location: &StoreLocation) -> Result<Self, Error> {
        Self::open_with_mode(location, OpenMode::Read)
    }

    fn open_with_mode(location: &StoreLocation, mode: OpenMode) -> Result<Self, Error> {
        let what = || format!("opening the store {location}");
        let sql: Box<dyn SqlConnection + Send> = match location {
            StoreLocation::Sqlite(path) => {
                Box::new(Sqlite::open(path, mode, None).map_err(|e| e.with_context(what()))?)
            }
            StoreLocation::Postgres(url) => {
                Box::new(Postgres::connect(url, mode == OpenMode::Write).map_err(|e| e.with_context(what()))?)
            }
        };
        Ok(Self { sql, location: location.clone(), open_conversations: BTreeMap::new() })
    }

    /// Opens a file through a layer that SQLite knows by that name: for tests that break disks.
    pub fn open_with_vfs(path: &Path, vfs: &str) -> Result<Self, Error> {
        let sql = Sqlite::open(path, OpenMode::Write, Some(vfs))
            .map_err(|e| e.with_context("opening the store"))?;
        Ok(Self {
            sql: Box::new(sql),
            location: StoreLocation::Sqlite(path.to_owned()),
            open_conversations: BTreeMap::new(),
        })
    }

    #[must_use]
    pub fn location(&self) -> &StoreLocation {
        &self.location
    }

    pub fn size_on_disk(&mut self) -> Result<u64, Error> {
        self.sql.size_on_disk().map_err(|e| e.with_context("measuring the store"))
    }

    /// Does `work` in one transaction.
    pub(crate) fn in_transaction<T>(
        &mut self,
        writes: Option<Durability>,
        work: impl FnOnce(&mut dyn SqlConnection) -> Result<T, SqlError>,
    ) -> Result<T, SqlError> {
        self.sql.begin(writes)?;
        let done = work(&mut *self.sql).and_then(|value| self.sql.commit().map(|()| value));
        if done.is_err() {
            self.sql.rollback();
        }
        done
    }

    pub(crate) fn lock_conversation(&mut self, conversation: &str) -> Result<(), SqlError> {
        self.sql.lock(xxhash_rust::xxh3::xxh3_64(conversation.as_bytes()))
    }

    pub(crate) fn is_locked_elsewhere(&mut self, conversation: &str) -> Result<bool, SqlError> {
        self.sql.is_locked_elsewhere(xxhash_rust::xxh3::xxh3_64(conversation.as_bytes()))
    }

    pub(crate) fn unlock_conversation(&mut self, conversation: &str) {
        self.sql.unlock(xxhash_rust::xxh3::xxh3_64(conversation.as_bytes()));
    }

    /// Forgets what is remembered of a conversation that something else has rewritten.
    pub(crate) fn drop_open_state(&mut self, conversation: &str) {
        self.open_conversations.remove(conversation);
    }

    fn load_inner(&mut self, conversation: &str, access: Access) -> Result<Timeline, SqlError> {
        rows::check_conversation_name(conversation)?;
        row_store::check_conversation_name(conversation)?;
        if access == Access::Write {
            self.lock_conversation(conversation)?;
        }
        let (open, mut timeline) = self.in_transaction(None, |sql| load_conversation(sql, conversation))?;
        timeline.set_revision(open.seq.cast_unsigned());
        if access == Access::Write {
            self.open_conversations.insert(conversation.to_owned(), open);
        }
        Ok(timeline)
    }

    fn commit_inner(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), SqlError> {
        let refused = || SqlError::invalid_input("it was not opened to be written");
        let mut open = self.open_conversations.remove(conversation).ok_or_else(refused)?;
        let done =
            self.in_transaction(Some(durability), |sql| open.write_change(sql, conversation, change, after));
        match &done {
            Ok(written) => open.advance_to(written.clone(), change, after),
            // What was only in memory is only as good as the commit.
            Err(_) => (open.streamed_tail, open.last_score, open.tokens_moved) = (None, None, true),
        }
        self.open_conversations.insert(conversation.to_owned(), open);
        done.map(drop)
    }

    fn commit_batch(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), Error> {
        let all = Change::Batch(changes.to_vec());
        let away = timeline.missing_bodies(&all);
        self.load_bodies(conversation, timeline, &away)?;
        let mut draft = timeline.clone();
        for change in changes {
            draft.apply(change)?;
        }
        let refused = || SqlError::invalid_input("it was not opened to be written");
        let done = self.open_conversations.remove(conversation).ok_or_else(refused).and_then(|mut open| {
            let mut next = open.clone();
            let done = self.in_transaction(Some(Durability::Immediate), |sql| {
                next.write_changes(sql, conversation, changes, &all, &draft)
            });
            match &done {
                Ok(()) => open = next,
                Err(_) => (open.streamed_tail, open.last_score, open.tokens_moved) = (None, None, true),
            }
            let seq = open.seq;
            self.open_conversations.insert(conversation.to_owned(), open);
            done.map(|()| seq)
        });
        let seq = done.map_err(|e| e.with_context(format!("saving '{conversation}'")))?;
        draft.set_revision(seq.cast_unsigned());
        *timeline = draft;
        Ok(())
    }

    fn relock_if_unchanged(&mut self, conversation: &str, revision: u64) -> Result<bool, SqlError> {
        self.lock_conversation(conversation)?;
        let mut seq = 0;
        let select = "SELECT seq FROM conversation WHERE name = $1";
        self.sql.query(select, &[SqlValue::Text(conversation)], &mut |row| {
            seq = row.count(0)?;
            Ok(())
        })?;
        let same = seq == revision && self.open_conversations.contains_key(conversation);
        if !same {
            self.unlock_conversation(conversation);
        }
        Ok(same)
    }

    fn rename_inner(&mut self, from: &str, to: &str) -> Result<(), Error> {
        let named = rows::check_conversation_name(to).and_then(|()| row_store::check_conversation_name(to));
        let done = named.and_then(|()| self.conversation_id(from)).and_then(|id| {
            self.lock_conversation(from)?;
            self.lock_conversation(to)?;
            self.open_conversations.remove(from);
            self.in_transaction(Some(Durability::Immediate), |sql| {
                if rows::find_conversation_id(sql, to)?.is_some() {
                    return Err(SqlError::conflict(format!("there is a conversation '{to}' already")));
                }
                let rename = "UPDATE conversation SET name = $1 WHERE id = $2";
                sql.execute(rename, &[SqlValue::Text(to), SqlValue::Int(id)]).map(drop)
            })
        });
        done.map_err(|e| e.with_context(format!("renaming '{from}'")))
    }

    /// The last entry of the log that names each chunk: why it stands as it does.
    pub fn last_mentions(&mut self, conversation: &str) -> Result<BTreeMap<ChunkId, LogEntry>, Error> {
        let found = self
            .conversation_id(conversation)
            .and_then(|id| self.in_transaction(None, |sql| rows::last_mentions(sql, id)));
        found.map_err(|e| e.with_context(format!("reading the history of '{conversation}'")))
    }

    /// The conversation as its log alone tells it: what it should be, whatever else is damaged.
    pub fn replay_log(&mut self, conversation: &str) -> Result<Timeline, Error> {
        let replayed = self
            .conversation_id(conversation)
            .and_then(|id| self.in_transaction(None, |sql| rows::replay_log(sql, id)));
        replayed.map_err(|e| e.with_context(format!("replaying the log of '{conversation}'")))
    }

    /// The number of a conversation that exists.
    pub(crate) fn conversation_id(&mut self, conversation: &str) -> Result<i64, SqlError> {
        rows::find_conversation_id(&mut *self.sql, conversation)?
            .ok_or_else(|| rows::no_such_conversation(conversation))
    }

    /// The number of a conversation, which is made where there is none.
    pub(crate) fn find_or_create_id(&mut self, conversation: &str) -> Result<i64, SqlError> {
        rows::check_conversation_name(conversation)?;
        row_store::check_conversation_name(conversation)?;
        match rows::find_conversation_id(&mut *self.sql, conversation)? {
            Some(id) => Ok(id),
            None => self.in_transaction(Some(Durability::Immediate), |sql| {
                rows::create_conversation(sql, conversation, rows::now_ms())
            }),
        }
    }
}

/// A conversation as it stands, and what is worth remembering of it.
fn load_conversation(
    sql: &mut dyn SqlConnection,
    conversation: &str,
) -> Result<(OpenConversation, Timeline), SqlError> {
    let mut found = None;
    let select = "SELECT id, seq, tokens, places, live, turns FROM conversation WHERE name = $1";
    sql.query(select, &[SqlValue::Text(conversation)], &mut |row| {
        let counts = [row.count(2)?, row.count(3)?, row.count(4)?, row.count(5)?];
        found = Some((row.int(0)?, row.int(1)?, counts));
        Ok(())
    })?;
    let Some((id, seq, counts)) = found else {
        return Ok((OpenConversation::new(0, 0, &Timeline::new()), Timeline::new()));
    };
    let timeline = rows::read_state(sql, id, (counts[3] as usize, counts[1] as usize))?;
    let state = [timeline.len(), timeline.row_count(), timeline.live_len(), timeline.turns().len()];
    if state.map(|n| n as u64) != counts {
        return Err(SqlError::damaged("its counts are not those of its chunks"));
    }
    Ok((OpenConversation::new(id, seq, &timeline), timeline))
}

/// What a commit has put into the log.
#[derive(Clone, Debug)]
struct WrittenLogEntry {
    id: i64,
    seq: i64,
    /// The entry as it stands in the log, if it scores.
    score_entry: Option<Change>,
}

impl OpenConversation {
    fn new(id: i64, seq: i64, timeline: &Timeline) -> Self {
        Self {
            id,
            seq,
            tokens: timeline.len() as u64,
            chunk_count: timeline.row_count(),
            block_count: block::block_count(timeline),
            streamed_tail: None,
            last_score: None,
            tokens_moved: true,
        }
    }

    /// Writes a change and what it touched.
    fn write_change(
        &self,
        sql: &mut dyn SqlConnection,
        conversation: &str,
        change: &Change,
        after: &Timeline,
    ) -> Result<WrittenLogEntry, SqlError> {
        self.check_revision(after.revision(), after)?;
        let at = rows::now_ms();
        let id = self.find_or_create_id(sql, conversation, at)?;
        let seq = self.seq + 1;
        self.update_conversation_row(sql, id, seq, at, after)?;
        let scored = self.append_log_entry(sql, id, seq, at, change)?;
        self.write_touched_rows(sql, id, &after.dirty_rows(change), after)?;
        Ok(WrittenLogEntry { id, seq, score_entry: scored })
    }

    /// Writes changes, each with an entry of its own, and what all of them touched. `after` is the state that they lead to.
    fn write_changes(
        &mut self,
        sql: &mut dyn SqlConnection,
        conversation: &str,
        changes: &[Change],
        all: &Change,
        after: &Timeline,
    ) -> Result<(), SqlError> {
        self.check_revision(after.revision(), after)?;
        let at = rows::now_ms();
        let id = self.find_or_create_id(sql, conversation, at)?;
        self.update_conversation_row(sql, id, self.seq + changes.len() as i64, at, after)?;
        let before = self.clone();
        for change in changes {
            let seq = self.seq + 1;
            let scored = self.append_log_entry(sql, id, seq, at, change)?;
            self.advance_to(WrittenLogEntry { id, seq, score_entry: scored }, change, after);
        }
        // What was there before all of them tells which rows are gone.
        before.write_touched_rows(sql, id, &after.dirty_rows(all), after)
    }

    /// Whether a change may be written that was planned on the state of that revision.
    fn check_revision(&self, revision: u64, after: &Timeline) -> Result<(), SqlError> {
        if revision != self.seq.cast_unsigned() {
            let why = "it has changed since this was loaded: open it again";
            return Err(SqlError::new(SqlErrorKind::Busy, why));
        }
        if self.seq >= i64::from(u32::MAX) - 1 {
            return Err(SqlError::invalid_input(
                "its log is full: export it, and import it under another name",
            ));
        }
        if (after.len() as u64) < self.tokens {
            return Err(SqlError::conflict("a position that was given away cannot be taken back"));
        }
        Ok(())
    }

    /// The number of the conversation. Something may have been kept beside it before a word was said.
    fn find_or_create_id(
        &self,
        sql: &mut dyn SqlConnection,
        conversation: &str,
        at: i64,
    ) -> Result<i64, SqlError> {
        match self.id {
            0 => match rows::find_conversation_id(sql, conversation)? {
                Some(id) => Ok(id),
                None => rows::create_conversation(sql, conversation, at),
            },
            id => Ok(id),
        }
    }

    /// Writes the row of the conversation, if nobody else has since it was opened.
    fn update_conversation_row(
        &self,
        sql: &mut dyn SqlConnection,
        id: i64,
        seq: i64,
        at: i64,
        after: &Timeline,
    ) -> Result<(), SqlError> {
        let counts = [after.turns().len(), after.row_count(), after.len(), after.live_len()]
            .map(|n| SqlValue::Int(n as i64));
        let [turns, places, tokens, live] = counts;
        let update = "UPDATE conversation SET used = $1, seq = $2, turns = $3, places = $4, tokens = $5, live = $6 \
                      WHERE id = $7 AND seq = $8";
        let args = [
            SqlValue::Int(at),
            SqlValue::Int(seq),
            turns,
            places,
            tokens,
            live,
            SqlValue::Int(id),
            SqlValue::Int(self.seq),
        ];
        if sql.execute(update, &args)? != 1 {
            let why = "somebody else has changed it since it was opened: open it again";
            return Err(SqlError::new(SqlErrorKind::Busy, why));
        }
        Ok(())
    }

    /// Puts a change into the log, and shortens what it makes superfluous. Returns the entry if it scores.
    fn append_log_entry(
        &self,
        sql: &mut dyn SqlConnection,
        id: i64,
        seq: i64,
        at: i64,
        change: &Change,
    ) -> Result<Option<Change>, SqlError> {
        if let Some((first, last, tail)) = &self.streamed_tail
            && first < last
            && !matches!(change, Change::Append(next) if log_compaction::continues(tail, next))
        {
            rows::rewrite_log_entry(sql, row_key(id, *first as usize), Some(&Change::Append(tail.clone())))?;
            let streamed =
                [SqlValue::Int(row_key(id, *first as usize + 1)), SqlValue::Int(row_key(id, *last as usize))];
            sql.execute("DELETE FROM log WHERE key BETWEEN $1 AND $2", &streamed)?;
        }
        let mut scored = None;
        if log_compaction::has_score(change) {
            let mut entry = change.clone();
            let read;
            let last = match &self.last_score {
                Some((seq, last)) => Some((row_key(id, *seq as usize), last)),
                None => {
                    read = rows::last_score_entry(sql, id)?;
                    read.as_ref().map(|(key, last)| (*key, last))
                }
            };
            if let Some((key, last)) = last {
                let carry = !self.tokens_moved && !log_compaction::moves_tokens_between_chunks(change);
                let left = log_compaction::supersede(last, &mut entry, carry);
                if left.as_ref() != Some(last) {
                    rows::rewrite_log_entry(sql, key, left.as_ref())?;
                }
            }
            scored = Some(entry);
        }
        rows::insert_log_entry(sql, row_key(id, seq as usize), at, scored.as_ref().unwrap_or(change))?;
        rows::insert_mentions(sql, id, seq, change)?;
        Ok(scored)
    }

    /// Writes the rows that a change has touched.
    fn write_touched_rows(
        &self,
        sql: &mut dyn SqlConnection,
        id: i64,
        touched: &DirtyRows,
        after: &Timeline,
    ) -> Result<(), SqlError> {
        if after.row_count() < self.chunk_count {
            let gone =
                [SqlValue::Int(row_key(id, after.row_count())), SqlValue::Int(row_key(id, self.chunk_count))];
            sql.execute("DELETE FROM chunk WHERE key BETWEEN $1 AND $2", &gone)?;
        }
        // Where only brightness has changed, no index has.
        let (named, scored): (BTreeSet<usize>, BTreeSet<usize>) =
            touched.bodies.iter().partition(|place| touched.headers.contains(place));
        rows::upsert_bodies(sql, id, &named, after)?;
        rows::update_bodies(sql, id, &scored, after)?;
        let blocks = block::block_count(after);
        let mut changed: BTreeSet<usize> =
            touched.headers.iter().map(|place| place / CHUNKS_PER_BLOCK).collect();
        if after.row_count() != self.chunk_count {
            changed.extend(self.chunk_count.min(after.row_count()) / CHUNKS_PER_BLOCK..blocks);
        }
        if blocks < self.block_count {
            let gone = [SqlValue::Int(row_key(id, blocks)), SqlValue::Int(row_key(id, self.block_count))];
            sql.execute("DELETE FROM block WHERE key BETWEEN $1 AND $2", &gone)?;
        }
        rows::upsert_blocks(sql, id, changed.into_iter().filter(|&b| b < blocks), after)
    }

    fn advance_to(&mut self, written: WrittenLogEntry, change: &Change, after: &Timeline) {
        let WrittenLogEntry { id, seq, score_entry: scored } = written;
        match (change, &mut self.streamed_tail) {
            (Change::Append(next), Some((_, last, tail))) if log_compaction::continues(tail, next) => {
                tail.tokens.extend_from_slice(&next.tokens);
                *last = seq;
            }
            (Change::Append(next), tail) => *tail = Some((seq, seq, next.clone())),
            (_, tail) => *tail = None,
        }
        self.tokens_moved |= log_compaction::moves_tokens_between_chunks(change);
        if let Some(entry) = scored {
            (self.last_score, self.tokens_moved) =
                (Some((seq, entry)), log_compaction::moves_tokens_between_chunks(change));
        }
        (self.id, self.seq, self.tokens) = (id, seq, after.len() as u64);
        (self.chunk_count, self.block_count) = (after.row_count(), block::block_count(after));
    }
}

/// A row of the table of conversations.
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
    })
}

impl Store for Database {
    fn list_conversations(&mut self) -> Result<Vec<ConversationSummary>, Error> {
        let mut all = Vec::new();
        let select = "SELECT name, model, created, used, seq, turns, tokens, live FROM conversation";
        let listed = self.sql.query(select, &[], &mut |row| {
            all.push(read_summary(&row)?);
            Ok(())
        });
        listed.map_err(|e| e.with_context("listing the conversations"))?;
        all.retain(|known: &ConversationSummary| !row_store::is_namespace(&known.name));
        // The databases sort text differently.
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    fn load(&mut self, conversation: &str, access: Access) -> Result<Timeline, Error> {
        self.load_inner(conversation, access).map_err(|e| e.with_context(format!("opening '{conversation}'")))
    }

    fn fetch_bodies(&mut self, conversation: &str, chunks: &[ChunkId]) -> Result<Vec<ChunkBody>, Error> {
        let fetched = self.conversation_id(conversation).and_then(|id| {
            let fetch = |&chunk: &ChunkId| {
                let [turn, sentence, role] = rows::chunk_id_values(chunk);
                let select = "SELECT sum, body FROM chunk WHERE conversation = $1 AND turn = $2 AND sentence = $3 AND role = $4";
                let mut body = None;
                self.sql.query(select, &[SqlValue::Int(id), turn, sentence, role], &mut |row| {
                    body = Some(rows::decode_body(&chunk, row.int(0)?, row.blob(1)?)?);
                    Ok(())
                })?;
                body.ok_or_else(|| SqlError::damaged(format!("the tokens of {chunk} are missing")))
            };
            chunks.iter().map(fetch).collect()
        });
        fetched.map_err(|e| e.with_context(format!("reading '{conversation}'")))
    }

    fn commit(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), Error> {
        let done = self.commit_inner(conversation, change, after, durability);
        done.map_err(|e| e.with_context(format!("saving '{conversation}'")))
    }

    fn chunk_history(&mut self, conversation: &str, chunk: ChunkId) -> Result<Vec<LogEntry>, Error> {
        let mut entries = Vec::new();
        let done = self.conversation_id(conversation).and_then(|id| {
            let [turn, sentence, role] = rows::chunk_id_values(chunk);
            let select = "SELECT l.key, l.at, l.sum, l.change FROM mention m JOIN log l ON l.key = $1 + m.seq \
                          WHERE m.conversation = $2 AND m.turn = $3 AND m.sentence = $4 AND m.role = $5 ORDER BY m.seq";
            let args = [SqlValue::Int(row_key(id, 0)), SqlValue::Int(id), turn, sentence, role];
            self.sql.query(select, &args, &mut |row| {
                entries.push(rows::read_log_entry(&row)?);
                Ok(())
            })
        });
        done.map_err(|e| e.with_context(format!("reading the history of {chunk} in '{conversation}'")))?;
        Ok(entries)
    }

    fn load_as_of(&mut self, conversation: &str, turn: TurnId) -> Result<Timeline, Error> {
        let past = self
            .conversation_id(conversation)
            .and_then(|id| self.in_transaction(None, |sql| rows::replay_log_through_turn(sql, id, turn)));
        past.map_err(|e| e.with_context(format!("looking at turn {} of '{conversation}'", turn.0)))
    }

    fn turn_times(&mut self, conversation: &str) -> Result<Vec<(TurnId, i64)>, Error> {
        let mut times = Vec::new();
        let done = self.conversation_id(conversation).and_then(|id| {
            rows::for_each_append(&mut *self.sql, id, &mut |turn, at| {
                if times.last().is_none_or(|(last, _)| *last < turn) {
                    times.push((turn, at));
                }
            })
        });
        done.map_err(|e| e.with_context(format!("reading when the turns of '{conversation}' began")))?;
        Ok(times)
    }

    fn records(&mut self, conversation: &str, kind: RecordKind) -> Result<Vec<Record>, Error> {
        let found = rows::find_conversation_id(&mut *self.sql, conversation);
        let records =
            found.and_then(|id| id.map_or(Ok(vec![]), |id| rows::records(&mut *self.sql, id, kind.name())));
        records.map_err(|e| e.with_context(format!("reading a {} of '{conversation}'", kind.name())))
    }

    fn put_record(
        &mut self,
        conversation: &str,
        kind: RecordKind,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), Error> {
        let zero = key.contains('\0') || value.is_some_and(|v| v.contains('\0'));
        let fits =
            if zero { Err(SqlError::invalid_input("a record cannot hold a zero character")) } else { Ok(()) };
        let done = fits.and_then(|()| self.find_or_create_id(conversation)).and_then(|id| {
            self.in_transaction(Some(Durability::Immediate), |sql| {
                rows::put_record(sql, id, kind.name(), key, value, rows::now_ms())
            })
        });
        done.map_err(|e| e.with_context(format!("saving a {} of '{conversation}'", kind.name())))
    }

    fn embeddings(&mut self, conversation: &str, embedder: &str) -> Result<Vec<Embedding>, Error> {
        let mut all = Vec::new();
        let done = rows::find_conversation_id(&mut *self.sql, conversation).and_then(|id| match id {
            None => Ok(()),
            Some(id) => rows::for_each_embedding(&mut *self.sql, id, embedder, &mut |embedding, _| {
                all.push(embedding);
                Ok(())
            }),
        });
        done.map_err(|e| e.with_context(format!("reading the embeddings of '{conversation}'")))?;
        Ok(all)
    }

    fn put_embeddings(
        &mut self,
        conversation: &str,
        embedder: &str,
        embeddings: &[Embedding],
    ) -> Result<(), Error> {
        let done = self.find_or_create_id(conversation).and_then(|id| {
            let put = |sql: &mut dyn SqlConnection| {
                embeddings.iter().try_for_each(|e| rows::put_embedding(sql, id, embedder, e, rows::now_ms()))
            };
            self.in_transaction(Some(Durability::Immediate), put)
        });
        done.map_err(|e| e.with_context(format!("saving embeddings of '{conversation}'")))
    }

    fn copy_conversation(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        tell: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
    ) -> Result<(), Error> {
        self.copy_inner(from, to, model, tell)
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), Error> {
        self.rename_inner(from, to)
    }

    fn find_conversation(&mut self, conversation: &str) -> Result<Option<ConversationSummary>, Error> {
        let mut found = None;
        let select =
            "SELECT name, model, created, used, seq, turns, tokens, live FROM conversation WHERE name = $1";
        let done = self.sql.query(select, &[SqlValue::Text(conversation)], &mut |row| {
            found = Some(read_summary(&row)?);
            Ok(())
        });
        done.map_err(|e| e.with_context(format!("looking for '{conversation}'")))?;
        Ok(found.filter(|known| !row_store::is_namespace(&known.name)))
    }

    fn message_keys(&mut self, conversation: &str, last: usize) -> Result<Vec<MessageKey>, Error> {
        let found = rows::find_conversation_id(&mut *self.sql, conversation);
        let keys = found
            .and_then(|id| id.map_or(Ok(Vec::new()), |id| message_keys::last_keys(&mut *self.sql, id, last)));
        keys.map_err(|e| e.with_context(format!("reading the messages of '{conversation}'")))
    }

    fn put_message_keys(&mut self, conversation: &str, keys: &[MessageKey]) -> Result<(), Error> {
        let done = self.find_or_create_id(conversation).and_then(|id| {
            self.in_transaction(Some(Durability::Deferred), |sql| message_keys::put_keys(sql, id, keys))
        });
        done.map_err(|e| e.with_context(format!("saving the messages of '{conversation}'")))
    }

    fn find_messages(&mut self, lookup: MessageLookup, most: usize) -> Result<Vec<(String, TurnId)>, Error> {
        message_keys::find_conversations(&mut *self.sql, lookup, most)
            .map_err(|e| e.with_context("looking for a message"))
    }

    fn release_lease(&mut self, conversation: &str) {
        self.unlock_conversation(conversation);
    }

    fn reacquire_lease(&mut self, conversation: &str, revision: u64) -> Result<bool, Error> {
        let held = self.relock_if_unchanged(conversation, revision);
        held.map_err(|e| e.with_context(format!("opening '{conversation}'")))
    }

    fn transact_all(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), Error> {
        self.commit_batch(conversation, timeline, changes)
    }

    fn set_model(&mut self, conversation: &str, model: &str) -> Result<(), Error> {
        let done = self.find_or_create_id(conversation).and_then(|id| {
            self.in_transaction(Some(Durability::Immediate), |sql| rows::set_model(sql, id, model))
        });
        done.map_err(|e| e.with_context(format!("noting the model of '{conversation}'")))
    }
}
