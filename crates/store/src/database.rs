//! Conversations in a database: what is written when, and how it comes back. The same for SQLite and PostgreSQL.
//!
//! A commit is one transaction: the change goes into the log, and the bodies and blocks that it touched are
//! written anew. Opening reads the blocks and the bodies of what is live, nothing else. Whoever commits must
//! have seen the last entry of the log: a second writer is refused, whatever the locks say.

use crate::block::{self, BLOCK};
use crate::compact;
use crate::messages;
use crate::postgres::Postgres;
use crate::rows::{self, key};
use crate::sql::{Cell, Row, Sql, SqlError, Trouble};
use crate::sqlite::{Mode, Sqlite};
use crate::worlds;
use halo_core::body::Body;
use halo_core::change::{Append, Change};
use halo_core::seams::{
    Access, Durability, Embedding, Entry, Kind, MessageKey, MessageLookup, Record, SeamError, Store, Summary,
};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, TurnId};
use halo_core::told::Told;
use halo_core::touch::Touched;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where a store is: `sqlite:PATH` or `postgres://…`.
#[derive(Clone, PartialEq, Eq)]
pub enum Location {
    /// A file.
    Sqlite(PathBuf),
    /// A server; the address may hold a password.
    Postgres(String),
}

impl FromStr for Location {
    type Err = SeamError;

    fn from_str(text: &str) -> Result<Self, SeamError> {
        if let Some(path) = text.strip_prefix("sqlite:").filter(|p| !p.is_empty()) {
            if path.starts_with('~') {
                let why = format!(
                    "'{text}': the shell writes ~ out only at the start of a word; write $HOME instead"
                );
                return Err(SeamError::new("opening the store", why));
            }
            // SQLite takes some names for more than names (:memory:, file:…); a whole path is only a path.
            let path =
                std::path::absolute(path).map_err(|e| SeamError::new("opening the store", e.to_string()))?;
            return Ok(Location::Sqlite(path));
        }
        if text.starts_with("postgres://") || text.starts_with("postgresql://") {
            return Ok(Location::Postgres(text.to_owned()));
        }
        // It may hold a password.
        let scheme = text.split_once(':').map_or(text, |(scheme, _)| scheme);
        let why = format!(
            "'{scheme}:…' is not the address of a store: write sqlite:PATH or postgres://USER@HOST/DATABASE"
        );
        Err(SeamError::new("opening the store", why))
    }
}

impl fmt::Display for Location {
    /// Without a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Location::Postgres(url) => {
                let (scheme, rest) = url.split_once("://").unwrap_or(("postgres", ""));
                let rest = rest.split('?').next().unwrap_or_default();
                let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
                write!(f, "{scheme}://{host}")
            }
        }
    }
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Conversations in a database.
pub struct Database {
    pub(crate) sql: Box<dyn Sql + Send>,
    location: Location,
    open: BTreeMap<String, Open>,
}

/// What is remembered of a conversation that is being written.
#[derive(Clone, Debug)]
struct Open {
    id: i64,
    seq: i64,
    tokens: u64,
    places: usize,
    blocks: usize,
    /// What streamed in last: the first and the last entry of it, and all of it.
    tail: Option<(i64, i64, Append)>,
    /// The last entry that scored, if it was seen.
    scored: Option<(i64, Change)>,
    /// Whether tokens have moved from chunk to chunk since, as far as is known.
    restructured: bool,
}

impl Database {
    /// Opens a store to read and write, and makes it where there is none.
    ///
    /// # Errors
    /// When it cannot be reached or written, is damaged, or is newer than this program.
    pub fn open(location: &Location) -> Result<Self, SeamError> {
        Self::open_as(location, Mode::Write)
    }

    /// Opens a store to read. A file that cannot be written is fine.
    ///
    /// # Errors
    /// When it cannot be reached, is damaged, or is newer than this program.
    pub fn open_to_read(location: &Location) -> Result<Self, SeamError> {
        Self::open_as(location, Mode::Read)
    }

    fn open_as(location: &Location, mode: Mode) -> Result<Self, SeamError> {
        let what = || format!("opening the store {location}");
        let sql: Box<dyn Sql + Send> = match location {
            Location::Sqlite(path) => Box::new(Sqlite::open(path, mode, None).map_err(|e| e.doing(what()))?),
            Location::Postgres(url) => {
                Box::new(Postgres::connect(url, mode == Mode::Write).map_err(|e| e.doing(what()))?)
            }
        };
        Ok(Self { sql, location: location.clone(), open: BTreeMap::new() })
    }

    /// Opens a file through a layer that SQLite knows by that name: for tests that break disks.
    ///
    /// # Errors
    /// As [`Database::open`].
    pub fn open_through(path: &Path, vfs: &str) -> Result<Self, SeamError> {
        let sql = Sqlite::open(path, Mode::Write, Some(vfs)).map_err(|e| e.doing("opening the store"))?;
        Ok(Self { sql: Box::new(sql), location: Location::Sqlite(path.to_owned()), open: BTreeMap::new() })
    }

    /// Where it is.
    #[must_use]
    pub fn location(&self) -> &Location {
        &self.location
    }

    /// Bytes on disk.
    ///
    /// # Errors
    /// When it cannot be asked.
    pub fn bytes(&mut self) -> Result<u64, SeamError> {
        self.sql.bytes().map_err(|e| e.doing("measuring the store"))
    }

    /// Does `work` in one transaction.
    pub(crate) fn within<T>(
        &mut self,
        writes: Option<Durability>,
        work: impl FnOnce(&mut dyn Sql) -> Result<T, SqlError>,
    ) -> Result<T, SqlError> {
        self.sql.begin(writes)?;
        let done = work(&mut *self.sql).and_then(|value| self.sql.commit().map(|()| value));
        if done.is_err() {
            self.sql.rollback();
        }
        done
    }

    pub(crate) fn claim(&mut self, conversation: &str) -> Result<(), SqlError> {
        self.sql.claim(xxhash_rust::xxh3::xxh3_64(conversation.as_bytes()))
    }

    pub(crate) fn is_claimed(&mut self, conversation: &str) -> Result<bool, SqlError> {
        self.sql.is_claimed(xxhash_rust::xxh3::xxh3_64(conversation.as_bytes()))
    }

    pub(crate) fn release_claim(&mut self, conversation: &str) {
        self.sql.release_one(xxhash_rust::xxh3::xxh3_64(conversation.as_bytes()));
    }

    /// Forgets what is remembered of a conversation that something else has rewritten.
    pub(crate) fn forget_open(&mut self, conversation: &str) {
        self.open.remove(conversation);
    }

    fn load_inner(&mut self, conversation: &str, access: Access) -> Result<Timeline, SqlError> {
        rows::check_name(conversation)?;
        worlds::check(conversation)?;
        if access == Access::Write {
            self.claim(conversation)?;
        }
        let (open, mut timeline) = self.within(None, |sql| load(sql, conversation))?;
        timeline.set_revision(open.seq.cast_unsigned());
        if access == Access::Write {
            self.open.insert(conversation.to_owned(), open);
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
        let refused = || SqlError::refused("it was not opened to be written");
        let mut open = self.open.remove(conversation).ok_or_else(refused)?;
        let done = self.within(Some(durability), |sql| open.write(sql, conversation, change, after));
        match &done {
            Ok(written) => open.remember(written.clone(), change, after),
            // What was only in memory is only as good as the commit.
            Err(_) => (open.tail, open.scored, open.restructured) = (None, None, true),
        }
        self.open.insert(conversation.to_owned(), open);
        done.map(drop)
    }

    /// [`Store::transact_all`].
    fn commit_all(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), SeamError> {
        let all = Change::Batch(changes.to_vec());
        let away = timeline.away(&all);
        self.bring(conversation, timeline, &away)?;
        let mut draft = timeline.clone();
        for change in changes {
            draft.apply(change)?;
        }
        let refused = || SqlError::refused("it was not opened to be written");
        let done = self.open.remove(conversation).ok_or_else(refused).and_then(|mut open| {
            let mut next = open.clone();
            let done = self.within(Some(Durability::Now), |sql| {
                next.write_all(sql, conversation, changes, &all, &draft)
            });
            match &done {
                Ok(()) => open = next,
                Err(_) => (open.tail, open.scored, open.restructured) = (None, None, true),
            }
            let seq = open.seq;
            self.open.insert(conversation.to_owned(), open);
            done.map(|()| seq)
        });
        let seq = done.map_err(|e| e.doing(format!("saving '{conversation}'")))?;
        draft.set_revision(seq.cast_unsigned());
        *timeline = draft;
        Ok(())
    }

    /// [`Store::hold`].
    fn hold_again(&mut self, conversation: &str, revision: u64) -> Result<bool, SqlError> {
        self.claim(conversation)?;
        let mut seq = 0;
        let select = "SELECT seq FROM conversation WHERE name = $1";
        self.sql.query(select, &[Cell::Text(conversation)], &mut |row| {
            seq = row.count(0)?;
            Ok(())
        })?;
        let same = seq == revision && self.open.contains_key(conversation);
        if !same {
            self.release_claim(conversation);
        }
        Ok(same)
    }

    /// [`Store::rename`].
    fn rename_to(&mut self, from: &str, to: &str) -> Result<(), SeamError> {
        let named = rows::check_name(to).and_then(|()| worlds::check(to));
        let done = named.and_then(|()| self.id(from)).and_then(|id| {
            self.claim(from)?;
            self.claim(to)?;
            self.open.remove(from);
            self.within(Some(Durability::Now), |sql| {
                if rows::find(sql, to)?.is_some() {
                    return Err(SqlError::refused(format!("there is a conversation '{to}' already")));
                }
                let rename = "UPDATE conversation SET name = $1 WHERE id = $2";
                sql.run(rename, &[Cell::Text(to), Cell::Int(id)]).map(drop)
            })
        });
        done.map_err(|e| e.doing(format!("renaming '{from}'")))
    }

    /// The last entry of the log that names each chunk: why it stands as it does.
    ///
    /// # Errors
    /// When there is no such conversation, or its log is damaged.
    pub fn last_mentions(&mut self, conversation: &str) -> Result<BTreeMap<ChunkId, Entry>, SeamError> {
        let found =
            self.id(conversation).and_then(|id| self.within(None, |sql| rows::last_mentions(sql, id)));
        found.map_err(|e| e.doing(format!("reading the history of '{conversation}'")))
    }

    /// The conversation as its log alone tells it: what it should be, whatever else is damaged.
    ///
    /// # Errors
    /// When the log cannot be read or does not fit itself.
    pub fn replay(&mut self, conversation: &str) -> Result<Timeline, SeamError> {
        let replayed = self.id(conversation).and_then(|id| self.within(None, |sql| rows::replay(sql, id)));
        replayed.map_err(|e| e.doing(format!("replaying the log of '{conversation}'")))
    }

    /// The number of a conversation that exists.
    pub(crate) fn id(&mut self, conversation: &str) -> Result<i64, SqlError> {
        rows::find(&mut *self.sql, conversation)?.ok_or_else(|| rows::no_conversation(conversation))
    }

    /// The number of a conversation, which is made where there is none.
    pub(crate) fn id_or_new(&mut self, conversation: &str) -> Result<i64, SqlError> {
        rows::check_name(conversation)?;
        worlds::check(conversation)?;
        match rows::find(&mut *self.sql, conversation)? {
            Some(id) => Ok(id),
            None => self.within(Some(Durability::Now), |sql| rows::create(sql, conversation, rows::now())),
        }
    }
}

/// A conversation as it stands, and what is worth remembering of it.
fn load(sql: &mut dyn Sql, conversation: &str) -> Result<(Open, Timeline), SqlError> {
    let mut found = None;
    let select = "SELECT id, seq, tokens, places, live, turns FROM conversation WHERE name = $1";
    sql.query(select, &[Cell::Text(conversation)], &mut |row| {
        let counts = [row.count(2)?, row.count(3)?, row.count(4)?, row.count(5)?];
        found = Some((row.int(0)?, row.int(1)?, counts));
        Ok(())
    })?;
    let Some((id, seq, counts)) = found else {
        return Ok((Open::new(0, 0, &Timeline::new()), Timeline::new()));
    };
    let timeline = rows::read_state(sql, id, (counts[3] as usize, counts[1] as usize))?;
    let state = [timeline.len(), timeline.places(), timeline.live_len(), timeline.turns().len()];
    if state.map(|n| n as u64) != counts {
        return Err(SqlError::damaged("its counts are not those of its chunks"));
    }
    Ok((Open::new(id, seq, &timeline), timeline))
}

/// What a commit has put into the log.
#[derive(Clone, Debug)]
struct Written {
    id: i64,
    seq: i64,
    /// The entry as it stands in the log, if it scores.
    scored: Option<Change>,
}

impl Open {
    fn new(id: i64, seq: i64, timeline: &Timeline) -> Self {
        Self {
            id,
            seq,
            tokens: timeline.len() as u64,
            places: timeline.places(),
            blocks: block::blocks(timeline),
            tail: None,
            scored: None,
            restructured: true,
        }
    }

    /// Writes a change and what it touched.
    fn write(
        &self,
        sql: &mut dyn Sql,
        conversation: &str,
        change: &Change,
        after: &Timeline,
    ) -> Result<Written, SqlError> {
        self.check(after.revision(), after)?;
        let at = rows::now();
        let id = self.id_or_new(sql, conversation, at)?;
        let seq = self.seq + 1;
        self.write_head(sql, id, seq, at, after)?;
        let scored = self.write_log(sql, id, seq, at, change)?;
        self.write_state(sql, id, &after.touched(change), after)?;
        Ok(Written { id, seq, scored })
    }

    /// Writes changes, each with an entry of its own, and what all of them touched. `after` is the state that they lead to.
    fn write_all(
        &mut self,
        sql: &mut dyn Sql,
        conversation: &str,
        changes: &[Change],
        all: &Change,
        after: &Timeline,
    ) -> Result<(), SqlError> {
        self.check(after.revision(), after)?;
        let at = rows::now();
        let id = self.id_or_new(sql, conversation, at)?;
        self.write_head(sql, id, self.seq + changes.len() as i64, at, after)?;
        let before = self.clone();
        for change in changes {
            let seq = self.seq + 1;
            let scored = self.write_log(sql, id, seq, at, change)?;
            self.remember(Written { id, seq, scored }, change, after);
        }
        // What was there before all of them tells which rows are gone.
        before.write_state(sql, id, &after.touched(all), after)
    }

    /// Whether a change may be written that was planned on the state of that revision.
    fn check(&self, revision: u64, after: &Timeline) -> Result<(), SqlError> {
        if revision != self.seq.cast_unsigned() {
            let why = "it has changed since this was loaded: open it again";
            return Err(SqlError::new(Trouble::Busy, why));
        }
        if self.seq >= i64::from(u32::MAX) - 1 {
            return Err(SqlError::refused("its log is full: export it, and import it under another name"));
        }
        if (after.len() as u64) < self.tokens {
            return Err(SqlError::refused("a position that was given away cannot be taken back"));
        }
        Ok(())
    }

    /// The number of the conversation. Something may have been kept beside it before a word was said.
    fn id_or_new(&self, sql: &mut dyn Sql, conversation: &str, at: i64) -> Result<i64, SqlError> {
        match self.id {
            0 => match rows::find(sql, conversation)? {
                Some(id) => Ok(id),
                None => rows::create(sql, conversation, at),
            },
            id => Ok(id),
        }
    }

    /// Writes the row of the conversation, if nobody else has since it was opened.
    fn write_head(
        &self,
        sql: &mut dyn Sql,
        id: i64,
        seq: i64,
        at: i64,
        after: &Timeline,
    ) -> Result<(), SqlError> {
        let counts =
            [after.turns().len(), after.places(), after.len(), after.live_len()].map(|n| Cell::Int(n as i64));
        let [turns, places, tokens, live] = counts;
        let update = "UPDATE conversation SET used = $1, seq = $2, turns = $3, places = $4, tokens = $5, live = $6 \
                      WHERE id = $7 AND seq = $8";
        let args =
            [Cell::Int(at), Cell::Int(seq), turns, places, tokens, live, Cell::Int(id), Cell::Int(self.seq)];
        if sql.run(update, &args)? != 1 {
            let why = "somebody else has changed it since it was opened: open it again";
            return Err(SqlError::new(Trouble::Busy, why));
        }
        Ok(())
    }

    /// Puts a change into the log, and shortens what it makes superfluous. Returns the entry if it scores.
    fn write_log(
        &self,
        sql: &mut dyn Sql,
        id: i64,
        seq: i64,
        at: i64,
        change: &Change,
    ) -> Result<Option<Change>, SqlError> {
        if let Some((first, last, tail)) = &self.tail
            && first < last
            && !matches!(change, Change::Append(next) if compact::goes_on(tail, next))
        {
            rows::rewrite_entry(sql, key(id, *first as usize), Some(&Change::Append(tail.clone())))?;
            let streamed = [Cell::Int(key(id, *first as usize + 1)), Cell::Int(key(id, *last as usize))];
            sql.run("DELETE FROM log WHERE key BETWEEN $1 AND $2", &streamed)?;
        }
        let mut scored = None;
        if compact::scores(change) {
            let mut entry = change.clone();
            let read;
            let last = match &self.scored {
                Some((seq, last)) => Some((key(id, *seq as usize), last)),
                None => {
                    read = rows::last_scored(sql, id)?;
                    read.as_ref().map(|(key, last)| (*key, last))
                }
            };
            if let Some((key, last)) = last {
                let carry = !self.restructured && !compact::restructures(change);
                let left = compact::supersede(last, &mut entry, carry);
                if left.as_ref() != Some(last) {
                    rows::rewrite_entry(sql, key, left.as_ref())?;
                }
            }
            scored = Some(entry);
        }
        rows::insert_entry(sql, key(id, seq as usize), at, scored.as_ref().unwrap_or(change))?;
        rows::insert_mentions(sql, id, seq, change)?;
        Ok(scored)
    }

    /// Writes the rows that a change has touched.
    fn write_state(
        &self,
        sql: &mut dyn Sql,
        id: i64,
        touched: &Touched,
        after: &Timeline,
    ) -> Result<(), SqlError> {
        if after.places() < self.places {
            let gone = [Cell::Int(key(id, after.places())), Cell::Int(key(id, self.places))];
            sql.run("DELETE FROM chunk WHERE key BETWEEN $1 AND $2", &gone)?;
        }
        // Where only brightness has changed, no index has.
        let (named, scored): (BTreeSet<usize>, BTreeSet<usize>) =
            touched.bodies.iter().partition(|place| touched.heads.contains(place));
        rows::upsert_bodies(sql, id, &named, after)?;
        rows::update_bodies(sql, id, &scored, after)?;
        let blocks = block::blocks(after);
        let mut changed: BTreeSet<usize> = touched.heads.iter().map(|place| place / BLOCK).collect();
        if after.places() != self.places {
            changed.extend(self.places.min(after.places()) / BLOCK..blocks);
        }
        if blocks < self.blocks {
            let gone = [Cell::Int(key(id, blocks)), Cell::Int(key(id, self.blocks))];
            sql.run("DELETE FROM block WHERE key BETWEEN $1 AND $2", &gone)?;
        }
        rows::upsert_blocks(sql, id, changed.into_iter().filter(|&b| b < blocks), after)
    }

    /// After the commit.
    fn remember(&mut self, written: Written, change: &Change, after: &Timeline) {
        let Written { id, seq, scored } = written;
        match (change, &mut self.tail) {
            (Change::Append(next), Some((_, last, tail))) if compact::goes_on(tail, next) => {
                tail.tokens.extend_from_slice(&next.tokens);
                *last = seq;
            }
            (Change::Append(next), tail) => *tail = Some((seq, seq, next.clone())),
            (_, tail) => *tail = None,
        }
        self.restructured |= compact::restructures(change);
        if let Some(entry) = scored {
            (self.scored, self.restructured) = (Some((seq, entry)), compact::restructures(change));
        }
        (self.id, self.seq, self.tokens) = (id, seq, after.len() as u64);
        (self.places, self.blocks) = (after.places(), block::blocks(after));
    }
}

/// A row of the table of conversations.
fn summary(row: &Row<'_>) -> Result<Summary, SqlError> {
    Ok(Summary {
        name: row.text(0)?.to_owned(),
        model: row.text(1)?.to_owned(),
        created: row.int(2)?,
        used: row.int(3)?,
        changes: row.count(4)?,
        turns: row.count(5)?,
        tokens: row.count(6)?,
        live: row.count(7)?,
    })
}

impl Store for Database {
    fn conversations(&mut self) -> Result<Vec<Summary>, SeamError> {
        let mut all = Vec::new();
        let select = "SELECT name, model, created, used, seq, turns, tokens, live FROM conversation";
        let listed = self.sql.query(select, &[], &mut |row| {
            all.push(summary(&row)?);
            Ok(())
        });
        listed.map_err(|e| e.doing("listing the conversations"))?;
        all.retain(|known: &Summary| !worlds::is_world(&known.name));
        // The databases sort text differently.
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    fn load(&mut self, conversation: &str, access: Access) -> Result<Timeline, SeamError> {
        self.load_inner(conversation, access).map_err(|e| e.doing(format!("opening '{conversation}'")))
    }

    fn fetch(&mut self, conversation: &str, chunks: &[ChunkId]) -> Result<Vec<Body>, SeamError> {
        let fetched = self.id(conversation).and_then(|id| {
            let fetch = |&chunk: &ChunkId| {
                let [turn, sentence, role] = rows::name_cells(chunk);
                let select = "SELECT sum, body FROM chunk WHERE conversation = $1 AND turn = $2 AND sentence = $3 AND role = $4";
                let mut body = None;
                self.sql.query(select, &[Cell::Int(id), turn, sentence, role], &mut |row| {
                    body = Some(rows::body_of(&chunk, row.int(0)?, row.blob(1)?)?);
                    Ok(())
                })?;
                body.ok_or_else(|| SqlError::damaged(format!("the tokens of {chunk} are missing")))
            };
            chunks.iter().map(fetch).collect()
        });
        fetched.map_err(|e| e.doing(format!("reading '{conversation}'")))
    }

    fn commit(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), SeamError> {
        let done = self.commit_inner(conversation, change, after, durability);
        done.map_err(|e| e.doing(format!("saving '{conversation}'")))
    }

    fn history(&mut self, conversation: &str, chunk: ChunkId) -> Result<Vec<Entry>, SeamError> {
        let mut entries = Vec::new();
        let done = self.id(conversation).and_then(|id| {
            let [turn, sentence, role] = rows::name_cells(chunk);
            let select = "SELECT l.key, l.at, l.sum, l.change FROM mention m JOIN log l ON l.key = $1 + m.seq \
                          WHERE m.conversation = $2 AND m.turn = $3 AND m.sentence = $4 AND m.role = $5 ORDER BY m.seq";
            let args = [Cell::Int(key(id, 0)), Cell::Int(id), turn, sentence, role];
            self.sql.query(select, &args, &mut |row| {
                entries.push(rows::entry_of(&row)?);
                Ok(())
            })
        });
        done.map_err(|e| e.doing(format!("reading the history of {chunk} in '{conversation}'")))?;
        Ok(entries)
    }

    fn as_of(&mut self, conversation: &str, turn: TurnId) -> Result<Timeline, SeamError> {
        let past =
            self.id(conversation).and_then(|id| self.within(None, |sql| rows::replay_through(sql, id, turn)));
        past.map_err(|e| e.doing(format!("looking at turn {} of '{conversation}'", turn.0)))
    }

    fn times(&mut self, conversation: &str) -> Result<Vec<(TurnId, i64)>, SeamError> {
        let mut times = Vec::new();
        let done = self.id(conversation).and_then(|id| {
            rows::appends(&mut *self.sql, id, &mut |turn, at| {
                if times.last().is_none_or(|(last, _)| *last < turn) {
                    times.push((turn, at));
                }
            })
        });
        done.map_err(|e| e.doing(format!("reading when the turns of '{conversation}' began")))?;
        Ok(times)
    }

    fn records(&mut self, conversation: &str, kind: Kind) -> Result<Vec<Record>, SeamError> {
        let found = rows::find(&mut *self.sql, conversation);
        let records =
            found.and_then(|id| id.map_or(Ok(vec![]), |id| rows::records(&mut *self.sql, id, kind)));
        records.map_err(|e| e.doing(format!("reading a {} of '{conversation}'", kind.name())))
    }

    fn put_record(
        &mut self,
        conversation: &str,
        kind: Kind,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), SeamError> {
        let zero = key.contains('\0') || value.is_some_and(|v| v.contains('\0'));
        let fits =
            if zero { Err(SqlError::refused("a record cannot hold a zero character")) } else { Ok(()) };
        let done = fits.and_then(|()| self.id_or_new(conversation)).and_then(|id| {
            self.within(Some(Durability::Now), |sql| rows::put_record(sql, id, kind, key, value, rows::now()))
        });
        done.map_err(|e| e.doing(format!("saving a {} of '{conversation}'", kind.name())))
    }

    fn embeddings(&mut self, conversation: &str, embedder: &str) -> Result<Vec<Embedding>, SeamError> {
        let mut all = Vec::new();
        let done = rows::find(&mut *self.sql, conversation).and_then(|id| match id {
            None => Ok(()),
            Some(id) => rows::embeddings(&mut *self.sql, id, embedder, &mut |embedding, _| {
                all.push(embedding);
                Ok(())
            }),
        });
        done.map_err(|e| e.doing(format!("reading the embeddings of '{conversation}'")))?;
        Ok(all)
    }

    fn put_embeddings(
        &mut self,
        conversation: &str,
        embedder: &str,
        embeddings: &[Embedding],
    ) -> Result<(), SeamError> {
        let done = self.id_or_new(conversation).and_then(|id| {
            let put = |sql: &mut dyn Sql| {
                embeddings.iter().try_for_each(|e| rows::put_embedding(sql, id, embedder, e, rows::now()))
            };
            self.within(Some(Durability::Now), put)
        });
        done.map_err(|e| e.doing(format!("saving embeddings of '{conversation}'")))
    }

    fn retell(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        tell: &mut dyn FnMut(Told) -> Result<Option<Told>, SeamError>,
    ) -> Result<(), SeamError> {
        self.retell_as(from, to, model, tell)
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), SeamError> {
        self.rename_to(from, to)
    }

    fn find(&mut self, conversation: &str) -> Result<Option<Summary>, SeamError> {
        let mut found = None;
        let select =
            "SELECT name, model, created, used, seq, turns, tokens, live FROM conversation WHERE name = $1";
        let done = self.sql.query(select, &[Cell::Text(conversation)], &mut |row| {
            found = Some(summary(&row)?);
            Ok(())
        });
        done.map_err(|e| e.doing(format!("looking for '{conversation}'")))?;
        Ok(found.filter(|known| !worlds::is_world(&known.name)))
    }

    fn message_keys(&mut self, conversation: &str, last: usize) -> Result<Vec<MessageKey>, SeamError> {
        let found = rows::find(&mut *self.sql, conversation);
        let keys =
            found.and_then(|id| id.map_or(Ok(Vec::new()), |id| messages::last(&mut *self.sql, id, last)));
        keys.map_err(|e| e.doing(format!("reading the messages of '{conversation}'")))
    }

    fn put_message_keys(&mut self, conversation: &str, keys: &[MessageKey]) -> Result<(), SeamError> {
        let done = self
            .id_or_new(conversation)
            .and_then(|id| self.within(Some(Durability::Behind), |sql| messages::put(sql, id, keys)));
        done.map_err(|e| e.doing(format!("saving the messages of '{conversation}'")))
    }

    fn find_messages(
        &mut self,
        lookup: MessageLookup,
        most: usize,
    ) -> Result<Vec<(String, TurnId)>, SeamError> {
        messages::find(&mut *self.sql, lookup, most).map_err(|e| e.doing("looking for a message"))
    }

    fn release(&mut self, conversation: &str) {
        self.release_claim(conversation);
    }

    fn hold(&mut self, conversation: &str, revision: u64) -> Result<bool, SeamError> {
        let held = self.hold_again(conversation, revision);
        held.map_err(|e| e.doing(format!("opening '{conversation}'")))
    }

    fn transact_all(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), SeamError> {
        self.commit_all(conversation, timeline, changes)
    }

    fn set_model(&mut self, conversation: &str, model: &str) -> Result<(), SeamError> {
        let done = self
            .id_or_new(conversation)
            .and_then(|id| self.within(Some(Durability::Now), |sql| rows::set_model(sql, id, model)));
        done.map_err(|e| e.doing(format!("noting the model of '{conversation}'")))
    }
}
