//! Namespaces of rows, kept beside conversations. A namespace is stored as a conversation without turns, under a name
//! with a reserved prefix, and its rows as records. Prefix and kinds are part of the stored format.

use crate::database::Database;
use crate::names::{self, namespace_of, stored_name};
use crate::rows;
use crate::sql::{SqlError, SqlValue};
use halo_core::Error;
use halo_core::row_store::{NamespaceSummary, Row, RowKind, RowStore};
use halo_core::store::Durability;
use std::ops::Range;

/// Finds namespaces without their row in `conversation`: every namespace has one record of this kind.
pub(crate) const SELECT_NAMESPACES: &str = "SELECT DISTINCT conversation FROM record WHERE kind = 'world'";

impl RowStore for Database {
    fn list_namespaces(&mut self) -> Result<Vec<NamespaceSummary>, Error> {
        let mut all = Vec::new();
        let listed = self.sql.query("SELECT name, created FROM conversation", &[], &mut |row| {
            let name = namespace_of(row.text(0)?).map(str::to_owned);
            let created = row.int(1)?;
            all.extend(name.map(|name| NamespaceSummary { name, created }));
            Ok(())
        });
        listed.map_err(|e| e.with_context("listing namespaces"))?;
        all.sort_by(|a: &NamespaceSummary, b| a.name.cmp(&b.name));
        Ok(all)
    }

    fn lease_namespace(&mut self, namespace: &str) -> Result<(), Error> {
        self.take_lease(&stored_name(namespace))
            .map_err(|e| e.with_context(format!("leasing '{}'", stored_name(namespace))))
    }

    fn is_namespace_leased(&mut self, namespace: &str) -> Result<bool, Error> {
        self.is_leased_elsewhere(&stored_name(namespace))
            .map_err(|e| e.with_context(format!("reading the lease of '{}'", stored_name(namespace))))
    }

    fn load_rows(
        &mut self,
        namespace: &str,
        kind: &RowKind,
        keys: Range<&str>,
        limit: usize,
    ) -> Result<Vec<Row>, Error> {
        let mut loaded = Vec::new();
        let select = "SELECT key, value, sum, at FROM record WHERE conversation = $1 AND kind = $2 AND key >= $3 \
                      AND key < $4 ORDER BY key DESC LIMIT $5";
        let name = stored_name(namespace);
        let read = rows::find_conversation_id(&mut *self.sql, &name).and_then(|id| {
            let Some(id) = id else { return Ok(()) };
            let cells = [
                SqlValue::Int(id),
                SqlValue::Text(kind.name()),
                SqlValue::Text(keys.start),
                SqlValue::Text(keys.end),
                SqlValue::Int(i64::try_from(limit).unwrap_or(i64::MAX)),
            ];
            self.sql.query(select, &cells, &mut |row| {
                let record = rows::read_record(&row, kind.name())?;
                loaded.push(Row { kind: kind.clone(), key: record.key, value: record.value });
                Ok(())
            })
        });
        read.map_err(|e| e.with_context(format!("reading '{name}'")))?;
        loaded.reverse();
        Ok(loaded)
    }

    fn put_rows(
        &mut self,
        namespace: &str,
        rows: &[Row],
        deleted: &[(RowKind, String)],
    ) -> Result<(), Error> {
        let name = stored_name(namespace);
        // The namespace is created in the same transaction: it never exists without its rows.
        let written = names::check_name(&name).and_then(|()| {
            self.write(&[&name], Durability::Immediate, |sql| {
                let at = rows::now_ms();
                let id = match rows::find_conversation_id(sql, &name)? {
                    Some(id) => id,
                    None => rows::create_conversation(sql, &name, at)?,
                };
                for Row { kind, key, value } in rows {
                    rows::put_record(sql, id, kind.name(), key, Some(value), at)?;
                }
                deleted
                    .iter()
                    .try_for_each(|(kind, key)| rows::put_record(sql, id, kind.name(), key, None, at))
            })
        });
        written.map_err(|e| e.with_context(format!("writing '{name}'")))
    }

    fn post_row(&mut self, namespace: &str, row: &Row) -> Result<(), Error> {
        let name = stored_name(namespace);
        let posted = names::check_record_text(&row.key, Some(&row.value)).and_then(|()| {
            self.in_transaction(Some(Durability::Immediate), |sql| {
                let id = rows::find_conversation_id(sql, &name)?
                    .ok_or_else(|| SqlError::not_found("there is no world of that name"))?;
                rows::insert_record(sql, id, row.kind.name(), &row.key, &row.value, rows::now_ms())
            })
        });
        posted.map_err(|e| e.with_context(format!("writing to '{name}'")))
    }

    fn delete_namespace(&mut self, namespace: &str) -> Result<(), Error> {
        let name = stored_name(namespace);
        if !self.list_namespaces()?.iter().any(|summary| summary.name == namespace) {
            return Err(Error::not_found(format!("deleting '{name}'"), "there is no world of that name"));
        }
        self.forget_conversation(&name)
    }
}
