//! The form in which a conversation, or a world, leaves and loses nothing: its log, what lies beside it, and sums.
//!
//! JSON Lines, one thing a line: `halo` (version, name, times), then every `entry` of the log, every `record`,
//! every `embedding`, and `end` with the number of lines, the sum of all bytes before it and the hash of the
//! state. It is written and read line by line, so that it may be as long as it likes. Arriving, it is played
//! again from the start, and must come to the same state.

use super::{ImportRequest, ImportedConversation, name_taken};
use crate::database::Database;
use crate::log_json::{self, LogChange, LogChunkId};
use crate::row_store;
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlValue};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use halo_core::Error;
use halo_core::row_store::{Row, RowKind};
use halo_core::store::{Embedding, RecordKind};
use halo_core::timeline::Timeline;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Read as _, Write};
use xxhash_rust::xxh3::Xxh3;

/// What this program writes and the newest that it reads.
const EXPORT_VERSION: u32 = 1;
/// The first bytes of such a file.
const EXPORT_MAGIC: &[u8] = b"{\"halo\":{";
/// One line holds at most this much: far more than a line ever has, and less than all memory.
const MAX_LINE_BYTES: u64 = 1 << 30;

/// One line of an export.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ExportLine {
    #[serde(rename = "halo")]
    Header {
        version: u32,
        name: String,
        model: String,
        created: i64,
        used: i64,
    },
    Entry {
        seq: u64,
        at: i64,
        changes: Vec<LogChange>,
    },
    Record {
        kind: String,
        key: String,
        value: String,
        at: i64,
    },
    Embedding {
        embedder: String,
        chunk: LogChunkId,
        at: i64,
        /// A sum; as hex, because JSON's numbers are not everywhere whole.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        #[serde(rename = "of")]
        source_checksum: String,
        vector: String,
    },
    End {
        lines: u64,
        #[serde(rename = "sum")]
        checksum: String,
        #[serde(rename = "state")]
        state_hash: String,
    },
}

/// Whether a file begins as an export does.
pub(super) fn is_halo_export(head: &[u8]) -> bool {
    head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).starts_with(EXPORT_MAGIC)
}

/// Writes lines, counts and sums them.
struct ExportWriter<'a> {
    out: &'a mut dyn Write,
    line_count: u64,
    checksum: Xxh3,
}

impl ExportWriter<'_> {
    fn write_line(&mut self, line: &ExportLine) -> Result<(), SqlError> {
        let mut bytes = serde_json::to_vec(line).map_err(|e| SqlError::invalid_input(e.to_string()))?;
        bytes.push(b'\n');
        self.checksum.update(&bytes);
        self.line_count += 1;
        self.out
            .write_all(&bytes)
            .map_err(|e| SqlError::unavailable(format!("the file cannot be written: {e}")))
    }
}

fn checksum_hex(sum: &Xxh3) -> String {
    format!("{:032x}", sum.digest128())
}

impl Database {
    /// Writes a conversation out, all of it. `progress` hears how many entries are done, and of how many.
    pub fn export(
        &mut self,
        conversation: &str,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        let kinds = RecordKind::ALL.map(|kind| kind.name().to_owned());
        let done = row_store::check_conversation_name(conversation).and_then(|()| {
            self.in_transaction(None, |sql| write_export(sql, conversation, &kinds, out, progress))
        });
        done.map_err(|e| e.with_context(format!("exporting '{conversation}'")))
    }

    /// Exports the rows of a namespace: those of `kinds` in this order, then the others by kind. Another process may have
    /// the lease; the export is a consistent snapshot.
    pub fn export_namespace(
        &mut self,
        namespace: &str,
        kinds: &[RowKind],
        out: &mut dyn Write,
    ) -> Result<(), Error> {
        let name = row_store::stored_name(namespace);
        let done = self.in_transaction(None, |sql| match rows::find_conversation_id(sql, &name)? {
            Some(id) => {
                let mut kinds: Vec<String> = kinds.iter().map(|kind| kind.name().to_owned()).collect();
                let others = rows::record_kinds(sql, id)?.into_iter().filter(|kind| !kinds.contains(kind));
                let others: Vec<String> = others.collect();
                kinds.extend(others);
                write_export(sql, &name, &kinds, out, &mut |_, _| {})
            }
            None => Err(SqlError::not_found("there is no world of that name")),
        });
        done.map_err(|e| e.with_context(format!("exporting '{name}'")))
    }
}

fn write_export(
    sql: &mut dyn SqlConnection,
    name: &str,
    kinds: &[String],
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SqlError> {
    let mut writer = ExportWriter { out, line_count: 0, checksum: Xxh3::new() };
    let mut found = None;
    let select = "SELECT id, model, created, used, seq FROM conversation WHERE name = $1";
    sql.query(select, &[SqlValue::Text(name)], &mut |row| {
        let (model, created, used) = (row.text(1)?.to_owned(), row.int(2)?, row.int(3)?);
        writer.write_line(&ExportLine::Header {
            version: EXPORT_VERSION,
            name: name.to_owned(),
            model,
            created,
            used,
        })?;
        found = Some((row.int(0)?, row.count(4)?));
        Ok(())
    })?;
    let (id, last) = found.ok_or_else(|| rows::no_such_conversation(name))?;
    let mut timeline = Timeline::new();
    rows::for_each_log_entry(sql, id, &mut |entry| {
        let misfit = |e| SqlError::damaged(format!("entry {} of its log does not fit: {e}", entry.seq));
        timeline.apply(&entry.change).map_err(misfit)?;
        progress(entry.seq, last);
        let changes = log_json::to_log_changes(&entry.change);
        writer.write_line(&ExportLine::Entry { seq: entry.seq, at: entry.committed_at, changes })
    })?;
    for kind in kinds {
        for record in rows::records(sql, id, kind)? {
            let (key, value, at) = (record.key, record.value, record.updated_at);
            writer.write_line(&ExportLine::Record { kind: kind.clone(), key, value, at })?;
        }
    }
    for embedder in rows::embedders(sql, id)? {
        rows::for_each_embedding(sql, id, &embedder, &mut |embedding, at| {
            let bytes: Vec<u8> = embedding.vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            let (chunk, vector) = (LogChunkId(embedding.chunk), BASE64.encode(bytes));
            let of = if embedding.text_hash == 0 {
                String::new()
            } else {
                format!("{:016x}", embedding.text_hash)
            };
            writer.write_line(&ExportLine::Embedding {
                embedder: embedder.clone(),
                chunk,
                at,
                source_checksum: of,
                vector,
            })
        })?;
    }
    let (lines, sum, state) =
        (writer.line_count, checksum_hex(&writer.checksum), timeline.state_hash().to_string());
    writer.write_line(&ExportLine::End { lines, checksum: sum, state_hash: state })?;
    writer.out.flush().map_err(|e| SqlError::unavailable(format!("the file cannot be written: {e}")))
}

/// Takes an export in, under its own name or another, within a transaction of the caller's.
pub(super) fn read_export(
    sql: &mut dyn SqlConnection,
    input: &mut dyn BufRead,
    import: &ImportRequest<'_>,
) -> Result<ImportedConversation, SqlError> {
    // Some editors put a mark in front; it is not part of what was summed.
    if input.fill_buf().is_ok_and(|head| head.starts_with(b"\xef\xbb\xbf")) {
        input.consume(3);
    }
    let mut lines = ExportReader { input, line_count: 0, checksum: Xxh3::new() };
    let head = lines.next_line()?;
    let Some(ExportLine::Header { version, name: own_name, model, created, used }) = head else {
        return Err(SqlError::invalid_input("it does not begin as an export of Halo does"));
    };
    if version > EXPORT_VERSION {
        let why = format!(
            "it was written by a newer Halo (version {version}, this program reads {EXPORT_VERSION})"
        );
        return Err(SqlError::invalid_input(why));
    }
    // A namespace stays one under another name.
    let name = match import.name {
        Some(name) if row_store::is_namespace(&own_name) => row_store::stored_name(name),
        Some(name) => row_store::check_conversation_name(name).map(|()| name.to_owned())?,
        None => own_name,
    };
    let namespace = row_store::namespace_of(&name);
    let mut namespace_rows = Vec::new();
    if rows::find_conversation_id(sql, &name)?.is_some() {
        return Err(name_taken(&name));
    }
    let id = rows::create_conversation(sql, &name, created)?;
    let mut timeline = Timeline::new();
    let mut last = 0;
    loop {
        let (before, at_line) = ((lines.line_count, checksum_hex(&lines.checksum)), lines.line_count + 1);
        let wrong = |why: String| SqlError::invalid_input(format!("line {at_line}: {why}"));
        match lines.next_line()? {
            Some(ExportLine::Entry { .. } | ExportLine::Embedding { .. }) if namespace.is_some() => {
                return Err(wrong("a world of rooms has no such lines".into()));
            }
            Some(ExportLine::Entry { seq, at, changes }) => {
                if seq <= last || seq > 1 << 31 {
                    return Err(wrong(format!("entry {seq} does not come after entry {last}")));
                }
                let change = log_json::from_log_changes(changes);
                timeline.apply(&change).map_err(|e| wrong(e.to_string()))?;
                rows::insert_log_entry(sql, rows::row_key(id, seq as usize), at, &change)?;
                rows::insert_mentions(sql, id, seq.cast_signed(), &change)?;
                last = seq;
            }
            Some(ExportLine::Record { kind, key, value, at }) => {
                // The kinds of a namespace are checked by its validator.
                if namespace.is_none() && RecordKind::ALL.iter().all(|known| known.name() != kind) {
                    return Err(wrong(format!("'{kind}' is no kind of record")));
                }
                rows::put_record(sql, id, &kind, &key, Some(&value), at)?;
                if namespace.is_some() {
                    namespace_rows.push(Row { kind: RowKind::from_stored(kind), key, value });
                }
            }
            Some(ExportLine::Embedding { embedder, chunk, at, source_checksum: of, vector }) => {
                let bytes = BASE64.decode(vector).map_err(|e| wrong(e.to_string()))?;
                let (quads, rest) = bytes.as_chunks::<4>();
                let vector: Vec<f32> = quads.iter().map(|&b| f32::from_le_bytes(b)).collect();
                if !rest.is_empty() || vector.is_empty() || vector.iter().any(|x| !x.is_finite()) {
                    return Err(wrong("its vector is none".into()));
                }
                // A sum that is none is no sum: the vector will be made again.
                let of = u64::from_str_radix(&of, 16).unwrap_or(0);
                rows::put_embedding(
                    sql,
                    id,
                    &embedder,
                    &Embedding { chunk: chunk.0, text_hash: of, vector },
                    at,
                )?;
            }
            Some(ExportLine::End { lines: count, checksum: sum, state_hash: state }) => {
                if (count, sum) != before {
                    let why =
                        "it is not what was written: bytes were changed or lost on the way; export it again";
                    return Err(SqlError::invalid_input(why));
                }
                if state != timeline.state_hash().to_string() {
                    return Err(SqlError::invalid_input(
                        "played again, it comes to another state than it had",
                    ));
                }
                break;
            }
            Some(ExportLine::Header { .. }) => return Err(wrong("a second conversation begins here".into())),
            None => {
                return Err(SqlError::invalid_input(
                    "it is cut short: its last line is missing; export it again",
                ));
            }
        }
    }
    if lines.input.fill_buf().is_ok_and(|rest| !rest.is_empty()) {
        return Err(SqlError::invalid_input("something stands behind its end"));
    }
    if let Some(namespace) = namespace {
        let validate = import
            .validate_rows
            .ok_or_else(|| SqlError::invalid_input("it is a world, and no conversation"))?;
        validate(namespace, &namespace_rows).map_err(|error| SqlError::invalid_input(error.message))?;
    }
    rows::write_whole_state(sql, id, last, &timeline)?;
    rows::set_model(sql, id, &model)?;
    sql.execute(
        "UPDATE conversation SET used = $1 WHERE id = $2",
        &[SqlValue::Int(used), SqlValue::Int(id)],
    )?;
    Ok(ImportedConversation::new(&name, &timeline))
}

/// Reads lines, counts and sums them.
struct ExportReader<'a> {
    input: &'a mut dyn BufRead,
    line_count: u64,
    checksum: Xxh3,
}

impl ExportReader<'_> {
    fn next_line(&mut self) -> Result<Option<ExportLine>, SqlError> {
        let mut line = Vec::new();
        let number = self.line_count + 1;
        let read = (&mut *self.input).take(MAX_LINE_BYTES).read_until(b'\n', &mut line);
        read.map_err(|e| SqlError::invalid_input(format!("the file cannot be read: {e}")))?;
        if line.is_empty() {
            return Ok(None);
        }
        if line.last() != Some(&b'\n') {
            return Err(SqlError::invalid_input(format!(
                "line {number} is cut short, or longer than any line is"
            )));
        }
        self.checksum.update(&line);
        self.line_count = number;
        let wrong = |e| SqlError::invalid_input(format!("line {number} cannot be read: {e}"));
        serde_json::from_slice(&line).map(Some).map_err(wrong)
    }
}
