//! Import of a file: its format, the names of its conversations, and one transaction, so that all of the file is imported
//! or nothing.

use super::importers::{ForeignConversation, ImportError, ImportFormat, detect_format, is_zip, read};
use super::native;
use super::report::ImportReport;
use super::request::ImportRequest;
use super::write_foreign::write_conversation;
use crate::database::Database;
use crate::names;
use crate::rows;
use crate::sql::{SqlConnection, SqlError};
use halo_core::Error;
use halo_core::store::Durability;
use std::collections::BTreeSet;
use std::io::BufRead;

/// A long title is cut here, so that a number fits behind it.
const MAX_TITLE_BYTES: usize = 180;

impl Database {
    /// Imports a file of any known format: all of it, or on an error nothing.
    pub fn import(
        &mut self,
        input: &mut dyn BufRead,
        mut import: ImportRequest<'_>,
    ) -> Result<ImportReport, Error> {
        let operation = format!("importing {}", import.file_name);
        let head = input.fill_buf().map_err(|e| Error::unavailable(&operation, e.to_string()))?.to_vec();
        let format = resolve_format(&head, &import).map_err(|e| e.with_context(&operation))?;
        let imported = self.in_transaction(Some(Durability::Immediate), |sql| match format {
            None => {
                let (conversation, losses) = native::read_export(sql, input, &import)?;
                let format = "an export of Halo".to_owned();
                Ok(ImportReport { conversations: vec![conversation], losses, format })
            }
            Some(format) => import_foreign(sql, input, format, &mut import),
        });
        imported.map_err(|e| e.with_context(operation))
    }
}

/// The format of a file; none for an export of Halo.
fn resolve_format(head: &[u8], import: &ImportRequest<'_>) -> Result<Option<ImportFormat>, SqlError> {
    let format_names = || ImportFormat::ALL.map(ImportFormat::name).join(", ");
    match import.format {
        Some("halo") => return Ok(None),
        None | Some("auto") => {}
        Some(name) => {
            let unknown = || {
                let why = format!("'{name}' is not a format; the formats are auto, halo, {}", format_names());
                SqlError::invalid_input(why)
            };
            return ImportFormat::from_name(name).map(Some).ok_or_else(unknown);
        }
    }
    if native::is_halo_export(head) {
        return Ok(None);
    }
    let utf16 = head.starts_with(&[0xff, 0xfe]) || head.starts_with(&[0xfe, 0xff]);
    let sqlite = head.starts_with(b"SQLite format 3");
    let not_importable: [(bool, &str); 5] = [
        (head.is_empty(), "the file is empty"),
        (is_zip(head), "the file is a zip archive: unpack it and import the conversations.json inside"),
        (head.starts_with(&[0x1f, 0x8b]), "the file is compressed with gzip: unpack it first"),
        (utf16, "the file is UTF-16: save it as UTF-8"),
        (sqlite, "the file is a database: a store of Halo is opened by its address, sqlite:PATH"),
    ];
    if let Some((_, why)) = not_importable.iter().find(|(applies, _)| *applies) {
        return Err(SqlError::invalid_input(*why));
    }
    let unknown = || {
        let why = "the format of the file cannot be detected: choose one of halo,";
        SqlError::invalid_input(format!("{why} {}", format_names()))
    };
    detect_format(head, import.file_name).map(Some).ok_or_else(unknown)
}

/// Imports a file of another program, within a transaction of the caller.
fn import_foreign(
    sql: &mut dyn SqlConnection,
    input: &mut dyn BufRead,
    format: ImportFormat,
    import: &mut ImportRequest<'_>,
) -> Result<ImportReport, SqlError> {
    let mut report = ImportReport { format: format.to_string(), ..ImportReport::default() };
    let mut used_names = BTreeSet::new();
    let result = read(format, input, &mut |foreign| {
        report.losses.merge(&foreign.losses);
        if foreign.turns.is_empty() {
            report.losses.add("empty conversations", 1);
            return Ok(());
        }
        let abort = |e: SqlError| ImportError::Aborted(Box::new(e));
        let name = choose_free_name(sql, &foreign, import, &mut used_names).map_err(abort)?;
        let imported = write_conversation(sql, &name, foreign, import, &mut report.losses).map_err(abort)?;
        report.conversations.push(imported);
        Ok(())
    });
    result.map_err(|error| match error {
        ImportError::Aborted(why) => match why.downcast::<SqlError>() {
            Ok(error) => *error,
            Err(why) => SqlError::invalid_input(why.to_string()),
        },
        error => SqlError::invalid_input(error.to_string()),
    })?;
    if report.conversations.is_empty() {
        return Err(SqlError::invalid_input(format!("the file is {format} without any message")));
    }
    Ok(report)
}

/// The requested name, or the one in the file, with a number behind it if it is taken. For the first conversation of a
/// file, a requested name that is taken is an error.
fn choose_free_name(
    sql: &mut dyn SqlConnection,
    foreign: &ForeignConversation,
    import: &ImportRequest<'_>,
    used_names: &mut BTreeSet<String>,
) -> Result<String, SqlError> {
    let stem = import.file_name.rsplit(['/', '\\']).next().unwrap_or_default();
    let stem = stem.rsplit_once('.').map_or(stem, |(stem, _)| stem);
    let title = foreign.name.as_deref().unwrap_or(stem);
    let base = import.name.map_or_else(|| title_to_name(title), str::to_owned);
    let base = match names::check_not_reserved(&base) {
        Ok(()) if base.is_empty() => "imported".to_owned(),
        Ok(()) => base,
        // A title of another program that looks like the name of a world is not one.
        Err(_) if import.name.is_none() => format!("imported {base}"),
        Err(error) => return Err(error),
    };
    for n in 1..10_000 {
        let name = if n == 1 { base.clone() } else { format!("{base} ({n})") };
        let free = !used_names.contains(&name) && rows::find_conversation_id(sql, &name)?.is_none();
        if free {
            used_names.insert(name.clone());
            return Ok(name);
        }
        if import.name.is_some() && used_names.is_empty() {
            return Err(names::name_taken(&name));
        }
    }
    Err(names::name_taken(&base))
}

/// A title as a name: on one line, and with limited length.
fn title_to_name(title: &str) -> String {
    let words: Vec<_> =
        title.split(|c: char| c.is_control() || c.is_whitespace()).filter(|w| !w.is_empty()).collect();
    let mut name = words.join(" ");
    while name.len() > MAX_TITLE_BYTES {
        name.pop();
    }
    name.trim_end().to_owned()
}
