//! Worlds of rooms: each is kept as rows under a name that no conversation can have.

use crate::database::Database;
use crate::rows;
use crate::sql::{Cell, SqlError};
use halo_core::seams::{Durability, Kind, Record, SeamError, WorldRow, WorldSummary, Worlds};
use std::ops::Range;

/// What the names of worlds begin with.
const PREFIX: &str = "world:";

pub(crate) fn is_world(name: &str) -> bool {
    of(name).is_some()
}

/// Whether a conversation can be called that.
pub(crate) fn check(name: &str) -> Result<(), SqlError> {
    if is_world(name) {
        return Err(SqlError::refused(format!(
            "names that begin with '{PREFIX}' belong to worlds of rooms: choose another, or see `halo rooms`"
        )));
    }
    Ok(())
}

/// What a world is called among the conversations.
pub(crate) fn named(world: &str) -> String {
    format!("{PREFIX}{world}")
}

/// What the world is called that is called so among the conversations, if it is one.
pub(crate) fn of(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)
}

impl Worlds for Database {
    fn worlds(&mut self) -> Result<Vec<WorldSummary>, SeamError> {
        let mut all = Vec::new();
        let listed = self.sql.query("SELECT name, created FROM conversation", &[], &mut |row| {
            let name = of(row.text(0)?).map(str::to_owned);
            let created = row.int(1)?;
            all.extend(name.map(|name| WorldSummary { name, created }));
            Ok(())
        });
        listed.map_err(|e| e.doing("listing the worlds"))?;
        all.sort_by(|a: &WorldSummary, b| a.name.cmp(&b.name));
        Ok(all)
    }

    fn hold_world(&mut self, world: &str) -> Result<(), SeamError> {
        self.claim(&named(world)).map_err(|e| e.doing(format!("opening the world '{world}'")))
    }

    fn is_world_held(&mut self, world: &str) -> Result<bool, SeamError> {
        self.is_claimed(&named(world)).map_err(|e| e.doing(format!("looking who runs the world '{world}'")))
    }

    fn world_rows(
        &mut self,
        world: &str,
        kind: Kind,
        keys: Range<&str>,
        last: usize,
    ) -> Result<Vec<Record>, SeamError> {
        let mut found = Vec::new();
        let select = "SELECT key, value, sum, at FROM record WHERE conversation = $1 AND kind = $2 AND key >= $3 \
                      AND key < $4 ORDER BY key DESC LIMIT $5";
        let read = rows::find(&mut *self.sql, &named(world)).and_then(|id| {
            let Some(id) = id else { return Ok(()) };
            let last = i64::try_from(last).unwrap_or(i64::MAX);
            let cells = [
                Cell::Int(id),
                Cell::Text(kind.name()),
                Cell::Text(keys.start),
                Cell::Text(keys.end),
                Cell::Int(last),
            ];
            self.sql.query(select, &cells, &mut |row| {
                found.push(rows::record(&row, kind)?);
                Ok(())
            })
        });
        read.map_err(|e| e.doing(format!("reading the world '{world}'")))?;
        found.reverse();
        Ok(found)
    }

    fn put_world_rows(&mut self, world: &str, all: &[WorldRow]) -> Result<(), SeamError> {
        let name = named(world);
        // A world is there with its rows or not at all.
        let written = rows::check_name(&name).and_then(|()| {
            self.within(Some(Durability::Now), |sql| {
                let at = rows::now();
                let id = match rows::find(sql, &name)? {
                    Some(id) => id,
                    None => rows::create(sql, &name, at)?,
                };
                all.iter().try_for_each(|row| {
                    rows::put_record(sql, id, row.kind, &row.key, row.value.as_deref(), at)
                })
            })
        });
        written.map_err(|e| e.doing(format!("saving the world '{world}'")))
    }

    fn end_world(&mut self, world: &str) -> Result<(), SeamError> {
        if !self.worlds()?.iter().any(|known| known.name == world) {
            let why = "there is none of that name; `halo rooms list` shows those that there are";
            return Err(SeamError::asked(format!("ending the world '{world}'"), why));
        }
        self.forget_all(&named(world))
    }
}
