//! A conversation that is open for writing: what a commit must know of the stored rows, and how a commit writes them.

use crate::block::{self, CHUNKS_PER_BLOCK};
use crate::log_compaction;
use crate::rows::{self, row_key};
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlValue};
use halo_core::change::{Append, Change};
use halo_core::dirty_rows::DirtyRows;
use halo_core::timeline::Timeline;
use std::collections::BTreeSet;

/// The stored rows of a conversation as its last commit left them.
#[derive(Clone, Debug)]
pub(crate) struct OpenConversation {
    /// The id of its row; 0 where nothing is stored yet.
    id: i64,
    seq: i64,
    tokens: u64,
    chunk_count: usize,
    block_count: usize,
    /// The entries at the end of the log that append to one message, token by token.
    streamed_tail: Option<StreamedTail>,
    /// The last entry that scores, if this writer has read or written it.
    last_score: Option<(i64, Change)>,
    /// Whether tokens may have moved between chunks since the last score.
    tokens_moved: bool,
}

/// Log entries that each append to the message before them. The next other change replaces them by one entry.
#[derive(Clone, Debug)]
struct StreamedTail {
    first_seq: i64,
    last_seq: i64,
    /// What all of them append.
    append: Append,
}

/// The log entry that a commit has written.
#[derive(Clone, Debug)]
pub(crate) struct WrittenLogEntry {
    id: i64,
    seq: i64,
    /// The change as it is in the log, if it scores.
    score_entry: Option<Change>,
}

impl WrittenLogEntry {
    pub(crate) fn conversation_id(&self) -> i64 {
        self.id
    }
}

impl OpenConversation {
    pub(crate) fn new(id: i64, seq: i64, timeline: &Timeline) -> Self {
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

    /// The revision of a timeline that has seen the last entry of the log.
    pub(crate) fn revision(&self) -> u64 {
        self.seq.cast_unsigned()
    }

    /// After a failed commit, the end of the log is read from the store again.
    pub(crate) fn forget_log_tail(&mut self) {
        (self.streamed_tail, self.last_score, self.tokens_moved) = (None, None, true);
    }

    /// Writes a change and the rows that it touched.
    pub(crate) fn write_change(
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
        let score_entry = self.append_log_entry(sql, id, seq, at, change)?;
        self.write_touched_rows(sql, id, &after.dirty_rows(change), after)?;
        Ok(WrittenLogEntry { id, seq, score_entry })
    }

    /// Writes changes, each with a log entry of its own, and the rows that all of them touched. `after` is the state
    /// that they lead to, `all` the same changes as one batch. Returns the last entry.
    pub(crate) fn write_changes(
        &mut self,
        sql: &mut dyn SqlConnection,
        conversation: &str,
        changes: &[Change],
        all: &Change,
        after: &Timeline,
    ) -> Result<Option<WrittenLogEntry>, SqlError> {
        self.check_revision(after.revision(), after)?;
        let at = rows::now_ms();
        let id = self.find_or_create_id(sql, conversation, at)?;
        self.update_conversation_row(sql, id, self.seq + changes.len() as i64, at, after)?;
        let (before, mut last) = (self.clone(), None);
        for change in changes {
            let seq = self.seq + 1;
            let score_entry = self.append_log_entry(sql, id, seq, at, change)?;
            let entry = WrittenLogEntry { id, seq, score_entry };
            last = Some(entry.clone());
            self.advance_to(entry, change, after);
        }
        // Rows that no longer exist are found by the counts of before.
        before.write_touched_rows(sql, id, &after.dirty_rows(all), after)?;
        Ok(last)
    }

    /// Checks that a change was planned on the stored state, and that the log has space for it.
    fn check_revision(&self, revision: u64, after: &Timeline) -> Result<(), SqlError> {
        if revision != self.revision() {
            let why = "the conversation has changed since this timeline was loaded: open it again";
            return Err(SqlError::new(SqlErrorKind::Busy, why));
        }
        if self.seq >= i64::from(u32::MAX) - 1 {
            return Err(SqlError::invalid_input(
                "the log is full: export the conversation and import it under another name",
            ));
        }
        if (after.len() as u64) < self.tokens {
            return Err(SqlError::conflict(
                "the timeline is shorter than the stored one: a position is never reused",
            ));
        }
        Ok(())
    }

    /// The id of the conversation. Its row may exist before its first change, because of a record or an embedding.
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

    /// Writes the row of the conversation, unless another writer has changed it since it was opened.
    fn update_conversation_row(
        &self,
        sql: &mut dyn SqlConnection,
        id: i64,
        seq: i64,
        at: i64,
        after: &Timeline,
    ) -> Result<(), SqlError> {
        let counts = [after.turns().len(), after.row_count(), after.len(), after.live_len()];
        let [turns, rows, tokens, live] = counts.map(|n| SqlValue::Int(n as i64));
        let [at, seq, id, old_seq] = [at, seq, id, self.seq].map(SqlValue::Int);
        let update = "UPDATE conversation SET used = $1, seq = $2, turns = $3, places = $4, tokens = $5, live = $6 \
                      WHERE id = $7 AND seq = $8";
        if sql.execute(update, &[at, seq, turns, rows, tokens, live, id, old_seq])? != 1 {
            let why = "another writer has changed the conversation since it was opened: open it again";
            return Err(SqlError::new(SqlErrorKind::Busy, why));
        }
        Ok(())
    }

    /// Adds a change to the log and shortens the entries that it makes redundant. Returns the entry if it scores.
    fn append_log_entry(
        &self,
        sql: &mut dyn SqlConnection,
        id: i64,
        seq: i64,
        at: i64,
        change: &Change,
    ) -> Result<Option<Change>, SqlError> {
        let key = row_key(id, seq as usize);
        if self.continues_tail(change) {
            rows::insert_continuation(sql, key, at, change)?;
            return Ok(None);
        }
        self.join_streamed_tail(sql, id)?;
        let score_entry = match log_compaction::has_score(change) {
            true => Some(self.supersede_last_score(sql, id, change)?),
            false => None,
        };
        rows::insert_log_entry(sql, key, at, score_entry.as_ref().unwrap_or(change))?;
        rows::insert_mentions(sql, id, seq, change)?;
        Ok(score_entry)
    }

    /// Whether a change appends to the message of the last entry. Such a change scores nothing and names no chunk.
    fn continues_tail(&self, change: &Change) -> bool {
        match (&self.streamed_tail, change) {
            (Some(tail), Change::Append(next)) => log_compaction::continues(&tail.append, next),
            _ => false,
        }
    }

    /// Replaces the streamed entries by one.
    fn join_streamed_tail(&self, sql: &mut dyn SqlConnection, id: i64) -> Result<(), SqlError> {
        let Some(StreamedTail { first_seq, last_seq, append }) = &self.streamed_tail else { return Ok(()) };
        if first_seq == last_seq {
            return Ok(());
        }
        let first_key = row_key(id, *first_seq as usize);
        rows::rewrite_log_entry(sql, first_key, Some(&Change::Append(append.clone())))?;
        let rest = [SqlValue::Int(first_key + 1), SqlValue::Int(row_key(id, *last_seq as usize))];
        sql.execute("DELETE FROM log WHERE key BETWEEN $1 AND $2", &rest).map(drop)
    }

    /// Shortens the last entry that scores by what `change` scores again. Returns `change` with the tallies that it
    /// takes over.
    fn supersede_last_score(
        &self,
        sql: &mut dyn SqlConnection,
        id: i64,
        change: &Change,
    ) -> Result<Change, SqlError> {
        let mut entry = change.clone();
        let stored;
        let last = match &self.last_score {
            Some((seq, last)) => Some((row_key(id, *seq as usize), last)),
            None => {
                stored = rows::last_score_entry(sql, id)?;
                stored.as_ref().map(|(key, last)| (*key, last))
            }
        };
        if let Some((key, last)) = last {
            let carry = !self.tokens_moved && !log_compaction::moves_tokens_between_chunks(change);
            let remainder = log_compaction::supersede(last, &mut entry, carry);
            if remainder.as_ref() != Some(last) {
                rows::rewrite_log_entry(sql, key, remainder.as_ref())?;
            }
        }
        Ok(entry)
    }

    fn write_touched_rows(
        &self,
        sql: &mut dyn SqlConnection,
        id: i64,
        touched: &DirtyRows,
        after: &Timeline,
    ) -> Result<(), SqlError> {
        let (chunks, blocks) = (after.row_count(), block::block_count(after));
        let removed = |from: usize, to: usize| [from, to].map(|row| SqlValue::Int(row_key(id, row)));
        if chunks < self.chunk_count {
            let keys = removed(chunks, self.chunk_count);
            sql.execute("DELETE FROM chunk WHERE key BETWEEN $1 AND $2", &keys)?;
        }
        // A change of brightness alone leaves the columns that are indexed as they are.
        let (new_headers, bodies_only): (BTreeSet<usize>, BTreeSet<usize>) =
            touched.bodies.iter().partition(|row| touched.headers.contains(row));
        rows::upsert_bodies(sql, id, &new_headers, after)?;
        rows::update_bodies(sql, id, &bodies_only, after)?;
        let mut dirty_blocks: BTreeSet<usize> =
            touched.headers.iter().map(|row| row / CHUNKS_PER_BLOCK).collect();
        if chunks != self.chunk_count {
            dirty_blocks.extend(self.chunk_count.min(chunks) / CHUNKS_PER_BLOCK..blocks);
        }
        if blocks < self.block_count {
            let keys = removed(blocks, self.block_count);
            sql.execute("DELETE FROM block WHERE key BETWEEN $1 AND $2", &keys)?;
        }
        rows::upsert_blocks(sql, id, dirty_blocks.into_iter().filter(|&block| block < blocks), after)
    }

    /// Takes over what a successful commit has written.
    pub(crate) fn advance_to(&mut self, written: WrittenLogEntry, change: &Change, after: &Timeline) {
        let WrittenLogEntry { id, seq, score_entry } = written;
        match (change, &mut self.streamed_tail) {
            (Change::Append(next), Some(tail)) if log_compaction::continues(&tail.append, next) => {
                tail.append.tokens.extend_from_slice(&next.tokens);
                tail.last_seq = seq;
            }
            (Change::Append(next), tail) => {
                *tail = Some(StreamedTail { first_seq: seq, last_seq: seq, append: next.clone() });
            }
            (_, tail) => *tail = None,
        }
        let moves_tokens = log_compaction::moves_tokens_between_chunks(change);
        self.tokens_moved |= moves_tokens;
        if let Some(entry) = score_entry {
            (self.last_score, self.tokens_moved) = (Some((seq, entry)), moves_tokens);
        }
        (self.id, self.seq, self.tokens) = (id, seq, after.len() as u64);
        (self.chunk_count, self.block_count) = (after.row_count(), block::block_count(after));
    }
}
