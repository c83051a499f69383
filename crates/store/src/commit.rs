//! Loading a conversation and committing changes to it. A commit is one transaction: the change goes into the log, and
//! the bodies and blocks that it touched are written. Only a writer that has seen the last entry of the log may commit,
//! whatever the leases say.

use crate::database::Database;
use crate::names;
use crate::open_conversation::OpenConversation;
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlValue};
use halo_core::Error;
use halo_core::change::Change;
use halo_core::store::{Access, Durability, StagedRecords, Store};
use halo_core::timeline::Timeline;

impl Database {
    pub(crate) fn load_inner(&mut self, conversation: &str, access: Access) -> Result<Timeline, SqlError> {
        names::check_conversation_name(conversation)?;
        if access == Access::Write {
            self.take_lease(conversation)?;
        }
        let (open, mut timeline) = self.in_transaction(None, |sql| load_conversation(sql, conversation))?;
        timeline.set_revision(open.revision());
        if access == Access::Write {
            self.open_conversations.insert(conversation.to_owned(), open);
        }
        Ok(timeline)
    }

    pub(crate) fn commit_inner(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), SqlError> {
        let staged = self.staged.remove(conversation).unwrap_or_default();
        let mut open = self.take_open_conversation(conversation)?;
        let written = self.write(&[conversation], durability, |sql| {
            let entry = open.write_change(sql, conversation, change, after)?;
            write_staged(sql, entry.conversation_id(), &staged)?;
            Ok(entry)
        });
        let result = match written {
            Ok(entry) => {
                open.advance_to(entry, change, after);
                Ok(())
            }
            Err(error) => {
                open.forget_log_tail();
                Err(error)
            }
        };
        self.open_conversations.insert(conversation.to_owned(), open);
        result
    }

    /// Applies changes to the timeline and commits them in one transaction, each with its own log entry.
    pub(crate) fn commit_all(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), Error> {
        let all = Change::Batch(changes.to_vec());
        let missing = timeline.missing_bodies(&all);
        self.load_bodies(conversation, timeline, &missing)?;
        let mut after = timeline.clone();
        for change in changes {
            after.apply(change)?;
        }
        let revision = self.commit_all_inner(conversation, changes, &all, &after);
        let revision = revision.map_err(|e| e.with_context(format!("saving '{conversation}'")))?;
        after.set_revision(revision);
        *timeline = after;
        Ok(())
    }

    fn commit_all_inner(
        &mut self,
        conversation: &str,
        changes: &[Change],
        all: &Change,
        after: &Timeline,
    ) -> Result<u64, SqlError> {
        if changes.is_empty() {
            return Ok(after.revision());
        }
        let staged = self.staged.remove(conversation).unwrap_or_default();
        let mut open = self.take_open_conversation(conversation)?;
        let mut next = open.clone();
        let written = self.write(&[conversation], Durability::Immediate, |sql| {
            next = open.clone();
            let entry = next.write_changes(sql, conversation, changes, all, after)?;
            entry.iter().try_for_each(|entry| write_staged(sql, entry.conversation_id(), &staged))?;
            Ok(entry)
        });
        match written {
            Ok(_) => open = next,
            Err(_) => open.forget_log_tail(),
        }
        let revision = open.revision();
        self.open_conversations.insert(conversation.to_owned(), open);
        written.map(|_| revision)
    }

    fn take_open_conversation(&mut self, conversation: &str) -> Result<OpenConversation, SqlError> {
        self.open_conversations
            .remove(conversation)
            .ok_or_else(|| SqlError::invalid_input("the conversation was not opened for writing"))
    }

    /// Takes the lease of a conversation again if nobody has changed it since that revision.
    pub(crate) fn take_lease_if_unchanged(
        &mut self,
        conversation: &str,
        revision: u64,
    ) -> Result<bool, SqlError> {
        self.take_lease(conversation)?;
        let mut stored_revision = 0;
        let select = "SELECT seq FROM conversation WHERE name = $1";
        self.sql.query(select, &[SqlValue::Text(conversation)], &mut |row| {
            stored_revision = row.count(0)?;
            Ok(())
        })?;
        let unchanged = stored_revision == revision && self.open_conversations.contains_key(conversation);
        if !unchanged {
            self.drop_lease(conversation);
        }
        Ok(unchanged)
    }

    pub(crate) fn rename_inner(&mut self, from: &str, to: &str) -> Result<(), SqlError> {
        names::check_conversation_name(to)?;
        let id = self.conversation_id(from)?;
        self.take_lease(from)?;
        self.take_lease(to)?;
        self.open_conversations.remove(from);
        self.write(&[from, to], Durability::Immediate, |sql| rows::rename_conversation(sql, id, to))
    }
}

fn write_staged(sql: &mut dyn SqlConnection, id: i64, staged: &StagedRecords) -> Result<(), SqlError> {
    if let Some(model) = &staged.model {
        rows::set_model(sql, id, model)?;
    }
    staged.records.iter().try_for_each(|(kind, key, value)| {
        names::check_record_text(key, Some(value))?;
        rows::put_record(sql, id, kind.name(), key, Some(value), rows::now_ms())
    })
}

/// Reads a conversation and the state that its next commit starts from; an empty one where there is none of that name.
fn load_conversation(
    sql: &mut dyn SqlConnection,
    conversation: &str,
) -> Result<(OpenConversation, Timeline), SqlError> {
    let mut row_values = None;
    let select = "SELECT id, seq, tokens, places, live, turns FROM conversation WHERE name = $1";
    sql.query(select, &[SqlValue::Text(conversation)], &mut |row| {
        let counts = [row.count(2)?, row.count(3)?, row.count(4)?, row.count(5)?];
        row_values = Some((row.int(0)?, row.int(1)?, counts));
        Ok(())
    })?;
    let Some((id, seq, counts)) = row_values else {
        return Ok((OpenConversation::new(0, 0, &Timeline::new()), Timeline::new()));
    };
    let [_, rows, _, turns] = counts.map(|n| n as usize);
    let timeline = rows::read_state(sql, id, (turns, rows))?;
    let state = [timeline.len(), timeline.row_count(), timeline.live_len(), timeline.turns().len()];
    if state.map(|n| n as u64) != counts {
        return Err(SqlError::damaged("the stored counts do not match the chunks"));
    }
    Ok((OpenConversation::new(id, seq, &timeline), timeline))
}
