//! The lossless export of a conversation or a world: its log, its records and embeddings, and checksums.
//!
//! JSON Lines: `halo` (version, name, times), then every `entry` of the log, every `record`, every `embedding`, and `end`
//! with the number of lines, the checksum of all bytes before it and the hash of the state. An export is written and read
//! line by line, so its length is not limited by memory. An import replays the log and must reach the same state.

use super::importers::ImportLosses;
use super::report::ImportedConversation;
use super::request::ImportRequest;
use crate::database::Database;
use crate::log_json::{self, LogChange, LogChunkId};
use crate::names;
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlValue};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use halo_core::Error;
use halo_core::row_store::{Row, RowKind};
use halo_core::store::{Embedding, PENDING_FORGET_KEY, RecordKind};
use halo_core::timeline::Timeline;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Read as _, Write};
use xxhash_rust::xxh3::Xxh3;

/// The version that this program writes, and the newest that it reads.
const EXPORT_VERSION: u32 = 1;
/// The first bytes of an export.
const EXPORT_MAGIC: &[u8] = b"{\"halo\":{";
/// The longest line that is read. No real line comes near it; it only bounds the memory.
const MAX_LINE_BYTES: u64 = 256 << 20;

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
        /// In hexadecimal: many JSON parsers cannot read an integer of 64 bits.
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

/// Writes lines, counts them and adds them to the checksum.
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

fn checksum_hex(checksum: &Xxh3) -> String {
    format!("{:032x}", checksum.digest128())
}

impl Database {
    /// Exports a conversation. `progress` is called with the numbers of written and of all log entries.
    pub fn export(
        &mut self,
        conversation: &str,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        let kinds = RecordKind::ALL.map(|kind| kind.name().to_owned());
        let written = names::check_not_reserved(conversation).and_then(|()| {
            self.in_transaction(None, |sql| write_export(sql, conversation, &kinds, out, progress))
        });
        written.map_err(|e| e.with_context(format!("exporting '{conversation}'")))
    }

    /// Exports the rows of a namespace: those of `kinds` in this order, then the others by kind. Another process may have
    /// the lease; the export is a consistent snapshot.
    pub fn export_namespace(
        &mut self,
        namespace: &str,
        kinds: &[RowKind],
        out: &mut dyn Write,
    ) -> Result<(), Error> {
        let name = names::stored_name(namespace);
        let written = self.in_transaction(None, |sql| {
            let id = rows::find_conversation_id(sql, &name)?
                .ok_or_else(|| SqlError::not_found("there is no world of that name"))?;
            let mut kinds: Vec<String> = kinds.iter().map(|kind| kind.name().to_owned()).collect();
            let others = rows::record_kinds(sql, id)?.into_iter().filter(|kind| !kinds.contains(kind));
            let others: Vec<String> = others.collect();
            kinds.extend(others);
            write_export(sql, &name, &kinds, out, &mut |_, _| {})
        });
        written.map_err(|e| e.with_context(format!("exporting '{name}'")))
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
    let mut row_values = None;
    let select = "SELECT id, model, created, used, seq FROM conversation WHERE name = $1";
    sql.query(select, &[SqlValue::Text(name)], &mut |row| {
        let (version, name, model) = (EXPORT_VERSION, name.to_owned(), row.text(1)?.to_owned());
        let (created, used) = (row.int(2)?, row.int(3)?);
        writer.write_line(&ExportLine::Header { version, name, model, created, used })?;
        row_values = Some((row.int(0)?, row.count(4)?));
        Ok(())
    })?;
    let (id, last_seq) = row_values.ok_or_else(|| rows::no_such_conversation(name))?;
    let mut timeline = Timeline::new();
    rows::for_each_log_entry(sql, id, &mut |entry| {
        let misfit =
            |e| SqlError::damaged(format!("log entry {} does not fit the entries before it: {e}", entry.seq));
        timeline.apply(&entry.change).map_err(misfit)?;
        progress(entry.seq, last_seq);
        let changes = log_json::to_log_changes(&entry.change);
        writer.write_line(&ExportLine::Entry { seq: entry.seq, at: entry.committed_at, changes })
    })?;
    write_side_lines(sql, id, kinds, &mut writer)?;
    let (lines, checksum) = (writer.line_count, checksum_hex(&writer.checksum));
    let state_hash = timeline.state_hash().to_string();
    writer.write_line(&ExportLine::End { lines, checksum, state_hash })?;
    writer.out.flush().map_err(|e| SqlError::unavailable(format!("the file cannot be written: {e}")))
}

/// Writes the records and the embeddings.
fn write_side_lines(
    sql: &mut dyn SqlConnection,
    id: i64,
    kinds: &[String],
    writer: &mut ExportWriter<'_>,
) -> Result<(), SqlError> {
    for kind in kinds {
        for record in rows::records(sql, id, kind)? {
            let (key, value, at) = (record.key, record.value, record.updated_at);
            writer.write_line(&ExportLine::Record { kind: kind.clone(), key, value, at })?;
        }
    }
    for embedder in rows::embedders(sql, id)? {
        rows::for_each_embedding(sql, id, &embedder, &mut |embedding, at| {
            let bytes: Vec<u8> = embedding.vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            let source_checksum = match embedding.text_hash {
                0 => String::new(),
                hash => format!("{hash:016x}"),
            };
            let (chunk, vector) = (LogChunkId(embedding.chunk), BASE64.encode(bytes));
            let embedder = embedder.clone();
            writer.write_line(&ExportLine::Embedding { embedder, chunk, at, source_checksum, vector })
        })?;
    }
    Ok(())
}

/// Imports an export under its own name or another, within a transaction of the caller.
pub(super) fn read_export(
    sql: &mut dyn SqlConnection,
    input: &mut dyn BufRead,
    import: &ImportRequest<'_>,
) -> Result<(ImportedConversation, ImportLosses), SqlError> {
    // Some editors add a byte order mark; it is not part of the checksum.
    if input.fill_buf().is_ok_and(|head| head.starts_with(b"\xef\xbb\xbf")) {
        input.consume(3);
    }
    let mut lines = ExportReader { input, line_count: 0, checksum: Xxh3::new() };
    let Some(ExportLine::Header { version, name: own_name, model, created, used }) = lines.next_line()?
    else {
        return Err(SqlError::invalid_input("the file does not begin as an export of Halo does"));
    };
    if version > EXPORT_VERSION {
        let why = format!(
            "the file was written by a newer Halo (version {version}, this program reads {EXPORT_VERSION})"
        );
        return Err(SqlError::invalid_input(why));
    }
    // A namespace stays one under another name.
    let name = match import.name {
        Some(name) if names::is_namespace(&own_name) => names::stored_name(name),
        Some(name) => names::check_not_reserved(name).map(|()| name.to_owned())?,
        None => own_name,
    };
    let namespace = names::namespace_of(&name);
    if rows::find_conversation_id(sql, &name)?.is_some() {
        return Err(names::name_taken(&name));
    }
    let id = rows::create_conversation(sql, &name, created)?;
    let mut body = ExportBody { id, is_namespace: namespace.is_some(), ..ExportBody::default() };
    body.read(sql, &mut lines)?;
    if lines.input.fill_buf().is_ok_and(|rest| !rest.is_empty()) {
        return Err(SqlError::invalid_input("the file has data after its last line"));
    }
    if let Some(namespace) = namespace {
        let validate = import
            .validate_rows
            .ok_or_else(|| SqlError::invalid_input("the file is a world of rooms, not a conversation"))?;
        validate(namespace, &body.namespace_rows).map_err(|error| SqlError::invalid_input(error.message))?;
    }
    rows::write_whole_state(sql, id, body.last_seq, &body.timeline)?;
    rows::set_model(sql, id, &model)?;
    rows::set_last_used(sql, id, used)?;
    Ok((ImportedConversation::new(&name, &body.timeline), body.losses))
}

/// The lines of an export after its header, as far as they are read.
#[derive(Default)]
struct ExportBody {
    id: i64,
    is_namespace: bool,
    timeline: Timeline,
    last_seq: u64,
    namespace_rows: Vec<Row>,
    losses: ImportLosses,
}

/// The value of a record as it is imported; none if it is not. An import deletes nothing, now or later, and names no files:
/// - A recording is a folder, which an export does not contain. The path may be that of another conversation or of anything
///   else, and forgetting deletes recordings.
/// - What was to be forgotten is not forgotten here without a request of the user. It stays hidden: deleted messages as they
///   are, and memories disabled.
fn defuse_record(kind: &str, key: &str, value: String, losses: &mut ImportLosses) -> Option<String> {
    if kind == RecordKind::Capture.name() {
        losses.add("recordings of attention, which an export does not contain", 1);
        return None;
    }
    if kind == RecordKind::Setting.name() && key == PENDING_FORGET_KEY {
        losses.add("requests to forget, which are to be made again here", 1);
        return None;
    }
    if kind == RecordKind::Memory.name()
        && let Ok(serde_json::Value::Object(mut memory)) = serde_json::from_str(&value)
        && memory.get("leaving").is_some_and(|leaving| leaving == true)
    {
        memory.insert("leaving".into(), false.into());
        memory.insert("resting".into(), true.into());
        return Some(serde_json::Value::Object(memory).to_string());
    }
    Some(value)
}

impl ExportBody {
    /// Reads and writes every line up to the end of the export, which is checked.
    fn read(&mut self, sql: &mut dyn SqlConnection, lines: &mut ExportReader<'_>) -> Result<(), SqlError> {
        loop {
            let before = (lines.line_count, checksum_hex(&lines.checksum));
            let Some(line) = lines.next_line()? else {
                let why = "the file is cut short: its last line is missing; export the conversation again";
                return Err(SqlError::invalid_input(why));
            };
            if let ExportLine::End { lines, checksum, state_hash } = line {
                return self.check_end((lines, checksum) == before, &state_hash);
            }
            self.write_line(sql, line).map_err(|error| {
                let message = format!("line {}: {}", lines.line_count, error.message);
                SqlError { message, ..error }
            })?;
        }
    }

    fn write_line(&mut self, sql: &mut dyn SqlConnection, line: ExportLine) -> Result<(), SqlError> {
        match line {
            ExportLine::Entry { .. } | ExportLine::Embedding { .. } if self.is_namespace => {
                Err(SqlError::invalid_input("a world of rooms has no such lines"))
            }
            ExportLine::Entry { seq, at, changes } => self.write_entry(sql, seq, at, changes),
            ExportLine::Record { kind, key, value, at } => {
                // The kinds of a namespace are checked by its validator.
                if !self.is_namespace && RecordKind::ALL.iter().all(|known| known.name() != kind) {
                    return Err(SqlError::invalid_input(format!("'{kind}' is not a kind of record")));
                }
                if self.is_namespace {
                    rows::put_record(sql, self.id, &kind, &key, Some(&value), at)?;
                    self.namespace_rows.push(Row { kind: RowKind::from_stored(kind), key, value });
                    return Ok(());
                }
                match defuse_record(&kind, &key, value, &mut self.losses) {
                    Some(value) => rows::put_record(sql, self.id, &kind, &key, Some(&value), at),
                    None => Ok(()),
                }
            }
            ExportLine::Embedding { embedder, chunk, at, source_checksum, vector } => {
                let vector = decode_vector(&vector)?;
                // Without a valid hash, the vector is computed again when it is needed.
                let text_hash = u64::from_str_radix(&source_checksum, 16).unwrap_or(0);
                let embedding = Embedding { chunk: chunk.0, text_hash, vector };
                rows::put_embedding(sql, self.id, &embedder, &embedding, at)
            }
            ExportLine::Header { .. } => Err(SqlError::invalid_input("a second conversation begins here")),
            ExportLine::End { .. } => unreachable!("the end is checked, not written"),
        }
    }

    fn write_entry(
        &mut self,
        sql: &mut dyn SqlConnection,
        seq: u64,
        at: i64,
        changes: Vec<LogChange>,
    ) -> Result<(), SqlError> {
        if seq <= self.last_seq || seq > 1 << 31 {
            let why = format!("entry {seq} does not come after entry {}", self.last_seq);
            return Err(SqlError::invalid_input(why));
        }
        let change = log_json::from_log_changes(changes);
        self.timeline.apply(&change).map_err(|e| SqlError::invalid_input(e.to_string()))?;
        rows::insert_log_entry(sql, rows::row_key(self.id, seq as usize), at, &change)?;
        rows::insert_mentions(sql, self.id, seq.cast_signed(), &change)?;
        self.last_seq = seq;
        Ok(())
    }

    fn check_end(&self, checksum_matches: bool, state_hash: &str) -> Result<(), SqlError> {
        if !checksum_matches {
            let why = "the checksum does not match: the file was changed after the export; export it again";
            return Err(SqlError::invalid_input(why));
        }
        if state_hash != self.timeline.state_hash().to_string() {
            let why = "replaying the log leads to another state than the conversation had";
            return Err(SqlError::invalid_input(why));
        }
        Ok(())
    }
}

fn decode_vector(base64: &str) -> Result<Vec<f32>, SqlError> {
    let bytes = BASE64.decode(base64).map_err(|e| SqlError::invalid_input(e.to_string()))?;
    let (quads, rest) = bytes.as_chunks::<4>();
    let vector: Vec<f32> = quads.iter().map(|&b| f32::from_le_bytes(b)).collect();
    if !rest.is_empty() || vector.is_empty() || vector.iter().any(|x| !x.is_finite()) {
        return Err(SqlError::invalid_input("the vector of the embedding is invalid"));
    }
    Ok(vector)
}

/// Reads lines, counts them and adds them to the checksum.
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
                "line {number} is cut short, or longer than {MAX_LINE_BYTES} bytes"
            )));
        }
        self.checksum.update(&line);
        self.line_count = number;
        let invalid = |e| SqlError::invalid_input(format!("line {number} cannot be parsed: {e}"));
        serde_json::from_slice(&line).map(Some).map_err(invalid)
    }
}
