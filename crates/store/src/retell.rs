//! A conversation told anew under another name. What it was told from stays as it is.

use crate::database::Database;
use crate::messages;
use crate::rows;
use crate::sql::{Cell, Sql, SqlError};
use crate::worlds;
use halo_core::seams::{Access, Durability, Embedding, Kind, Record, SeamError, Store};
use halo_core::timeline::Timeline;
use halo_core::told::{self, Told};

impl Database {
    /// [`Store::retell`].
    pub(crate) fn retell_as(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        tell: &mut dyn FnMut(Told) -> Result<Option<Told>, SeamError>,
    ) -> Result<(), SeamError> {
        let told = told::all(self, from, Access::Read, tell)?;
        let records: Vec<(Kind, Vec<Record>)> = Kind::ALL
            .into_iter()
            .map(|kind| Ok((kind, self.records(from, kind)?)))
            .collect::<Result<_, SeamError>>()?;
        let done = rows::check_name(to).and_then(|()| worlds::check(to)).and_then(|()| {
            self.claim(to)?;
            let id = self.id(from)?;
            self.within(Some(Durability::Now), |sql| write(sql, id, to, model, &told, &records))
        });
        // It is claimed again when it is opened.
        self.release_claim(to);
        done.map_err(|e| e.doing(format!("telling '{from}' anew as '{to}'")))
    }
}

fn write(
    sql: &mut dyn Sql,
    from: i64,
    to: &str,
    model: &str,
    told: &[Told],
    records: &[(Kind, Vec<Record>)],
) -> Result<(), SqlError> {
    if rows::find(sql, to)?.is_some() {
        return Err(SqlError::refused(format!("there is a conversation '{to}' already")));
    }
    let now = rows::now();
    let id = rows::create(sql, to, now)?;
    let (mut timeline, mut seq) = (Timeline::new(), 0u64);
    for one in told {
        for change in one.changes(&timeline) {
            timeline.apply(&change).map_err(|e| SqlError::refused(format!("turn {}: {e}", one.turn.0)))?;
            seq += 1;
            rows::insert_entry(sql, rows::key(id, seq as usize), one.at, &change)?;
            rows::insert_mentions(sql, id, seq.cast_signed(), &change)?;
        }
    }
    let last = told.last().map_or(0, |one| one.turn.0);
    for (kind, records) in records {
        for record in records {
            let of_later = *kind == Kind::Turn && record.key.parse().is_ok_and(|turn: u32| turn > last);
            if !of_later {
                rows::put_record(sql, id, *kind, &record.key, Some(&record.value), record.at)?;
            }
        }
    }
    // The path to each message is the same as before.
    messages::copy(sql, from, id, last)?;
    // A vector says what it was made of: one that no longer fits is made again.
    for embedder in rows::embedders(sql, from)? {
        let mut kept: Vec<Embedding> = Vec::new();
        rows::embeddings(sql, from, &embedder, &mut |embedding, _| {
            kept.extend(timeline.chunk(embedding.chunk).is_some().then_some(embedding));
            Ok(())
        })?;
        for embedding in &kept {
            rows::put_embedding(sql, id, &embedder, embedding, now)?;
        }
    }
    rows::write_all(sql, id, seq, &timeline)?;
    rows::set_model(sql, id, model)?;
    sql.run("UPDATE conversation SET used = $1 WHERE id = $2", &[Cell::Int(now), Cell::Int(id)]).map(drop)
}
