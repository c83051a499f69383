//! Copies of a conversation under another name: a branch up to some turn, or the same text in the tokens of another
//! model.

use crate::database::Database;
use crate::message_keys;
use crate::names;
use crate::rows;
use crate::sql::{SqlConnection, SqlError};
use halo_core::Error;
use halo_core::conversation_copy::{self, TurnCopy};
use halo_core::store::{
    Access, Durability, Embedding, ORIGINAL_OF_KEY, Record, RecordChange, RecordKind, Store, conversation_id,
};
use halo_core::timeline::Timeline;

impl Database {
    pub(crate) fn copy_inner(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
        changes: &mut dyn FnMut() -> Vec<RecordChange>,
    ) -> Result<(), Error> {
        let turns = conversation_copy::copy_turns(self, from, Access::Read, convert)?;
        let (records, changes) = (self.all_records(from)?, changes());
        let written = names::check_conversation_name(to).and_then(|()| {
            let id = self.conversation_id(from)?;
            self.write(&[to], Durability::Immediate, |sql| {
                let copy = write_copy(sql, id, to, model, &turns, &records)?;
                let now = rows::now_ms();
                changes.iter().try_for_each(|RecordChange { kind, key, value }| {
                    names::check_record_text(key, value.as_deref())?;
                    rows::put_record(sql, copy, kind.name(), key, value.as_deref(), now)
                })
            })
        });
        written.map_err(|e| e.with_context(format!("copying '{from}' to '{to}'")))
    }

    pub(crate) fn replace_inner(
        &mut self,
        conversation: &str,
        kept_as: &str,
        model: &str,
        settings: &[(&str, &str)],
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
    ) -> Result<(), Error> {
        let turns = conversation_copy::copy_turns(self, conversation, Access::Read, convert)?;
        let mut records = self.all_records(conversation)?;
        // Other tokens have other positions.
        records.retain(|(kind, _)| *kind != RecordKind::Attention);
        let written = names::check_conversation_name(kept_as).and_then(|()| {
            self.take_lease(conversation)?;
            self.take_lease(kept_as)?;
            self.drop_open_state(conversation);
            self.write(&[conversation, kept_as], Durability::Immediate, |sql| {
                let original = rows::find_conversation_id(sql, conversation)?
                    .ok_or_else(|| rows::no_such_conversation(conversation))?;
                rows::rename_conversation(sql, original, kept_as)?;
                let copy = write_copy(sql, original, conversation, model, &turns, &records)?;
                let now = rows::now_ms();
                let copy_id = conversation_id(copy.cast_unsigned(), rows::creation_time(sql, copy)?);
                let setting = RecordKind::Setting.name();
                rows::put_record(sql, original, setting, ORIGINAL_OF_KEY, Some(&copy_id), now)?;
                settings.iter().try_for_each(|(key, value)| {
                    rows::put_record(sql, copy, RecordKind::Setting.name(), key, Some(value), now)
                })
            })
        });
        self.drop_lease(kept_as);
        written.map_err(|e| e.with_context(format!("replacing '{conversation}'")))
    }

    fn all_records(&mut self, conversation: &str) -> Result<Vec<(RecordKind, Vec<Record>)>, Error> {
        RecordKind::ALL.into_iter().map(|kind| Ok((kind, self.records(conversation, kind)?))).collect()
    }
}

/// Writes a copy, and returns its id.
fn write_copy(
    sql: &mut dyn SqlConnection,
    from: i64,
    to: &str,
    model: &str,
    turns: &[TurnCopy],
    records: &[(RecordKind, Vec<Record>)],
) -> Result<i64, SqlError> {
    if rows::find_conversation_id(sql, to)?.is_some() {
        return Err(names::name_taken(to));
    }
    let now = rows::now_ms();
    let id = rows::create_conversation(sql, to, now)?;
    let (mut timeline, mut seq) = (Timeline::new(), 0u64);
    for turn in turns {
        for change in turn.to_changes(&timeline) {
            timeline
                .apply(&change)
                .map_err(|e| SqlError::invalid_input(format!("turn {}: {e}", turn.turn.0)))?;
            seq += 1;
            rows::insert_log_entry(sql, rows::row_key(id, seq as usize), turn.started_at, &change)?;
            rows::insert_mentions(sql, id, seq.cast_signed(), &change)?;
        }
    }
    let last = turns.last().map_or(0, |turn| turn.turn.0);
    for (kind, records) in records {
        for record in records {
            let is_by_turn = [RecordKind::Turn, RecordKind::Attention].contains(kind);
            let later = is_by_turn && record.key.parse().is_ok_and(|turn: u32| turn > last);
            let is_own = *kind == RecordKind::Setting && record.key == ORIGINAL_OF_KEY;
            if !later && !is_own {
                rows::put_record(sql, id, kind.name(), &record.key, Some(&record.value), record.updated_at)?;
            }
        }
    }
    // The copy has the same messages before each message, so the keys stay valid.
    message_keys::copy_keys(sql, from, id, last)?;
    // A vector has the hash of its text: one whose chunk has other text in the copy is computed again.
    for embedder in rows::embedders(sql, from)? {
        let mut embeddings: Vec<Embedding> = Vec::new();
        rows::for_each_embedding(sql, from, &embedder, &mut |embedding, _| {
            embeddings.extend(timeline.chunk(embedding.chunk).is_some().then_some(embedding));
            Ok(())
        })?;
        for embedding in &embeddings {
            rows::put_embedding(sql, id, &embedder, embedding, now)?;
        }
    }
    rows::write_whole_state(sql, id, seq, &timeline)?;
    rows::set_model(sql, id, model)?;
    rows::set_last_used(sql, id, now)?;
    Ok(id)
}
