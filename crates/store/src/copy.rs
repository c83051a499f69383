//! A conversation told anew under another name. What it was told from stays as it is.

use crate::database::Database;
use crate::message_keys;
use crate::row_store;
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlValue};
use halo_core::Error;
use halo_core::conversation_copy::{self, TurnCopy};
use halo_core::store::{Access, Durability, Embedding, Record, RecordKind, Store};
use halo_core::timeline::Timeline;

impl Database {
    pub(crate) fn copy_inner(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        tell: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
    ) -> Result<(), Error> {
        let told = conversation_copy::copy_turns(self, from, Access::Read, tell)?;
        let records: Vec<(RecordKind, Vec<Record>)> = RecordKind::ALL
            .into_iter()
            .map(|kind| Ok((kind, self.records(from, kind)?)))
            .collect::<Result<_, Error>>()?;
        let done = rows::check_conversation_name(to)
            .and_then(|()| row_store::check_conversation_name(to))
            .and_then(|()| {
                self.lock_conversation(to)?;
                let id = self.conversation_id(from)?;
                self.in_transaction(Some(Durability::Immediate), |sql| {
                    write_copy(sql, id, to, model, &told, &records)
                })
            });
        // It is claimed again when it is opened.
        self.unlock_conversation(to);
        done.map_err(|e| e.with_context(format!("telling '{from}' anew as '{to}'")))
    }
}

fn write_copy(
    sql: &mut dyn SqlConnection,
    from: i64,
    to: &str,
    model: &str,
    told: &[TurnCopy],
    records: &[(RecordKind, Vec<Record>)],
) -> Result<(), SqlError> {
    if rows::find_conversation_id(sql, to)?.is_some() {
        return Err(SqlError::conflict(format!("there is a conversation '{to}' already")));
    }
    let now = rows::now_ms();
    let id = rows::create_conversation(sql, to, now)?;
    let (mut timeline, mut seq) = (Timeline::new(), 0u64);
    for one in told {
        for change in one.to_changes(&timeline) {
            timeline
                .apply(&change)
                .map_err(|e| SqlError::invalid_input(format!("turn {}: {e}", one.turn.0)))?;
            seq += 1;
            rows::insert_log_entry(sql, rows::row_key(id, seq as usize), one.started_at, &change)?;
            rows::insert_mentions(sql, id, seq.cast_signed(), &change)?;
        }
    }
    let last = told.last().map_or(0, |one| one.turn.0);
    for (kind, records) in records {
        for record in records {
            let of_later = *kind == RecordKind::Turn && record.key.parse().is_ok_and(|turn: u32| turn > last);
            if !of_later {
                rows::put_record(sql, id, kind.name(), &record.key, Some(&record.value), record.updated_at)?;
            }
        }
    }
    // The path to each message is the same as before.
    message_keys::copy_keys(sql, from, id, last)?;
    // A vector says what it was made of: one that no longer fits is made again.
    for embedder in rows::embedders(sql, from)? {
        let mut kept: Vec<Embedding> = Vec::new();
        rows::for_each_embedding(sql, from, &embedder, &mut |embedding, _| {
            kept.extend(timeline.chunk(embedding.chunk).is_some().then_some(embedding));
            Ok(())
        })?;
        for embedding in &kept {
            rows::put_embedding(sql, id, &embedder, embedding, now)?;
        }
    }
    rows::write_whole_state(sql, id, seq, &timeline)?;
    rows::set_model(sql, id, model)?;
    sql.execute("UPDATE conversation SET used = $1 WHERE id = $2", &[SqlValue::Int(now), SqlValue::Int(id)])
        .map(drop)
}
