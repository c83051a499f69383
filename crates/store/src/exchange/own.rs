//! The form in which a conversation, or a world, leaves and loses nothing: its log, what lies beside it, and sums.
//!
//! JSON Lines, one thing a line: `halo` (version, name, times), then every `entry` of the log, every `record`,
//! every `embedding`, and `end` with the number of lines, the sum of all bytes before it and the hash of the
//! state. It is written and read line by line, so that it may be as long as it likes. Arriving, it is played
//! again from the start, and must come to the same state.

use super::{Arrival, Import, taken};
use crate::database::Database;
use crate::log::{self, Line, Name};
use crate::rows;
use crate::sql::{Cell, Sql, SqlError};
use crate::worlds;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use halo_core::seams::{Embedding, Kind, SeamError, WorldRow};
use halo_core::timeline::Timeline;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Read as _, Write};
use xxhash_rust::xxh3::Xxh3;

/// What this program writes and the newest that it reads.
const VERSION: u32 = 1;
/// The first bytes of such a file.
const HEAD: &[u8] = b"{\"halo\":{";
/// One line holds at most this much: far more than a line ever has, and less than all memory.
const LINE: u64 = 1 << 30;

/// One line of an export.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ExportLine {
    Halo {
        version: u32,
        name: String,
        model: String,
        created: i64,
        used: i64,
    },
    Entry {
        seq: u64,
        at: i64,
        changes: Vec<Line>,
    },
    Record {
        kind: String,
        key: String,
        value: String,
        at: i64,
    },
    Embedding {
        embedder: String,
        chunk: Name,
        at: i64,
        /// A sum; as hex, because JSON's numbers are not everywhere whole.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        of: String,
        vector: String,
    },
    End {
        lines: u64,
        sum: String,
        state: String,
    },
}

/// Whether a file begins as an export does.
pub(super) fn is_own(head: &[u8]) -> bool {
    head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).starts_with(HEAD)
}

/// Writes lines, counts and sums them.
struct Writer<'a> {
    out: &'a mut dyn Write,
    lines: u64,
    sum: Xxh3,
}

impl Writer<'_> {
    fn line(&mut self, line: &ExportLine) -> Result<(), SqlError> {
        let mut bytes = serde_json::to_vec(line).map_err(|e| SqlError::refused(e.to_string()))?;
        bytes.push(b'\n');
        self.sum.update(&bytes);
        self.lines += 1;
        self.out.write_all(&bytes).map_err(|e| SqlError::refused(format!("the file cannot be written: {e}")))
    }
}

fn sum_text(sum: &Xxh3) -> String {
    format!("{:032x}", sum.digest128())
}

impl Database {
    /// Writes a conversation out, all of it. `progress` hears how many entries are done, and of how many.
    ///
    /// # Errors
    /// When there is none of that name, its log is damaged, or the output fails.
    pub fn export(
        &mut self,
        conversation: &str,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), SeamError> {
        let done = worlds::check(conversation)
            .and_then(|()| self.within(None, |sql| export(sql, conversation, out, progress)));
        done.map_err(|e| e.doing(format!("exporting '{conversation}'")))
    }

    /// Writes a world out, as it is at this moment; somebody may be running it.
    ///
    /// # Errors
    /// When there is none of that name, or the output fails.
    pub fn export_world(&mut self, world: &str, out: &mut dyn Write) -> Result<(), SeamError> {
        let done = self.within(None, |sql| match rows::find(sql, &worlds::named(world))? {
            Some(_) => export(sql, &worlds::named(world), out, &mut |_, _| {}),
            None => Err(SqlError::refused("there is none of that name; `halo rooms list` shows all")),
        });
        done.map_err(|e| e.doing(format!("exporting the world '{world}'")))
    }
}

fn export(
    sql: &mut dyn Sql,
    name: &str,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SqlError> {
    let mut writer = Writer { out, lines: 0, sum: Xxh3::new() };
    let mut found = None;
    let select = "SELECT id, model, created, used, seq FROM conversation WHERE name = $1";
    sql.query(select, &[Cell::Text(name)], &mut |row| {
        let (model, created, used) = (row.text(1)?.to_owned(), row.int(2)?, row.int(3)?);
        writer.line(&ExportLine::Halo { version: VERSION, name: name.to_owned(), model, created, used })?;
        found = Some((row.int(0)?, row.count(4)?));
        Ok(())
    })?;
    let (id, last) = found.ok_or_else(|| rows::no_conversation(name))?;
    let mut timeline = Timeline::new();
    rows::entries(sql, id, &mut |entry| {
        let misfit = |e| SqlError::damaged(format!("entry {} of its log does not fit: {e}", entry.seq));
        timeline.apply(&entry.change).map_err(misfit)?;
        progress(entry.seq, last);
        let changes = log::lines(&entry.change);
        writer.line(&ExportLine::Entry { seq: entry.seq, at: entry.at, changes })
    })?;
    for kind in Kind::ALL {
        for record in rows::records(sql, id, kind)? {
            let (key, value, at) = (record.key, record.value, record.at);
            writer.line(&ExportLine::Record { kind: kind.name().to_owned(), key, value, at })?;
        }
    }
    for embedder in rows::embedders(sql, id)? {
        rows::embeddings(sql, id, &embedder, &mut |embedding, at| {
            let bytes: Vec<u8> = embedding.vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            let (chunk, vector) = (Name(embedding.chunk), BASE64.encode(bytes));
            let of = if embedding.of == 0 { String::new() } else { format!("{:016x}", embedding.of) };
            writer.line(&ExportLine::Embedding { embedder: embedder.clone(), chunk, at, of, vector })
        })?;
    }
    let (lines, sum, state) = (writer.lines, sum_text(&writer.sum), timeline.state_hash().to_string());
    writer.line(&ExportLine::End { lines, sum, state })?;
    writer.out.flush().map_err(|e| SqlError::refused(format!("the file cannot be written: {e}")))
}

/// Takes an export in, under its own name or another, within a transaction of the caller's.
pub(super) fn import(
    sql: &mut dyn Sql,
    input: &mut dyn BufRead,
    import: &Import<'_>,
) -> Result<Arrival, SqlError> {
    // Some editors put a mark in front; it is not part of what was summed.
    if input.fill_buf().is_ok_and(|head| head.starts_with(b"\xef\xbb\xbf")) {
        input.consume(3);
    }
    let mut lines = Lines { input, lines: 0, sum: Xxh3::new() };
    let head = lines.next()?;
    let Some(ExportLine::Halo { version, name: own_name, model, created, used }) = head else {
        return Err(SqlError::refused("it does not begin as an export of Halo does"));
    };
    if version > VERSION {
        let why = format!("it was written by a newer Halo (version {version}, this program reads {VERSION})");
        return Err(SqlError::refused(why));
    }
    // A world stays one, whatever it is called here.
    let name = match import.name {
        Some(name) if worlds::is_world(&own_name) => worlds::named(name),
        Some(name) => worlds::check(name).map(|()| name.to_owned())?,
        None => own_name,
    };
    let world = worlds::of(&name);
    let mut rows_of_world = Vec::new();
    if rows::find(sql, &name)?.is_some() {
        return Err(taken(&name));
    }
    let id = rows::create(sql, &name, created)?;
    let mut timeline = Timeline::new();
    let mut last = 0;
    loop {
        let (before, at_line) = ((lines.lines, sum_text(&lines.sum)), lines.lines + 1);
        let wrong = |why: String| SqlError::refused(format!("line {at_line}: {why}"));
        match lines.next()? {
            Some(ExportLine::Entry { .. } | ExportLine::Embedding { .. }) if world.is_some() => {
                return Err(wrong("a world has no such lines".into()));
            }
            Some(ExportLine::Entry { seq, at, changes }) => {
                if seq <= last || seq > 1 << 31 {
                    return Err(wrong(format!("entry {seq} does not come after entry {last}")));
                }
                let change = log::change_of(changes);
                timeline.apply(&change).map_err(|e| wrong(e.to_string()))?;
                rows::insert_entry(sql, rows::key(id, seq as usize), at, &change)?;
                rows::insert_mentions(sql, id, seq.cast_signed(), &change)?;
                last = seq;
            }
            Some(ExportLine::Record { kind, key, value, at }) => {
                let known = Kind::ALL.into_iter().find(|k| k.name() == kind);
                let kind = known.ok_or_else(|| wrong(format!("'{kind}' is no kind of record")))?;
                rows::put_record(sql, id, kind, &key, Some(&value), at)?;
                if world.is_some() {
                    rows_of_world.push(WorldRow { kind, key, value: Some(value) });
                }
            }
            Some(ExportLine::Embedding { embedder, chunk, at, of, vector }) => {
                let bytes = BASE64.decode(vector).map_err(|e| wrong(e.to_string()))?;
                let (quads, rest) = bytes.as_chunks::<4>();
                let vector: Vec<f32> = quads.iter().map(|&b| f32::from_le_bytes(b)).collect();
                if !rest.is_empty() || vector.is_empty() || vector.iter().any(|x| !x.is_finite()) {
                    return Err(wrong("its vector is none".into()));
                }
                // A sum that is none is no sum: the vector will be made again.
                let of = u64::from_str_radix(&of, 16).unwrap_or(0);
                rows::put_embedding(sql, id, &embedder, &Embedding { chunk: chunk.0, of, vector }, at)?;
            }
            Some(ExportLine::End { lines: count, sum, state }) => {
                if (count, sum) != before {
                    let why =
                        "it is not what was written: bytes were changed or lost on the way; export it again";
                    return Err(SqlError::refused(why));
                }
                if state != timeline.state_hash().to_string() {
                    return Err(SqlError::refused("played again, it comes to another state than it had"));
                }
                break;
            }
            Some(ExportLine::Halo { .. }) => return Err(wrong("a second conversation begins here".into())),
            None => {
                return Err(SqlError::refused("it is cut short: its last line is missing; export it again"));
            }
        }
    }
    if lines.input.fill_buf().is_ok_and(|rest| !rest.is_empty()) {
        return Err(SqlError::refused("something stands behind its end"));
    }
    if let Some(world) = world {
        let admit = import.admit.ok_or_else(|| SqlError::refused("it is a world, and no conversation"))?;
        admit(world, &rows_of_world).map_err(|why| SqlError::refused(why.why))?;
    }
    rows::write_all(sql, id, last, &timeline)?;
    rows::set_model(sql, id, &model)?;
    sql.run("UPDATE conversation SET used = $1 WHERE id = $2", &[Cell::Int(used), Cell::Int(id)])?;
    Ok(Arrival::of(&name, &timeline))
}

/// Reads lines, counts and sums them.
struct Lines<'a> {
    input: &'a mut dyn BufRead,
    lines: u64,
    sum: Xxh3,
}

impl Lines<'_> {
    fn next(&mut self) -> Result<Option<ExportLine>, SqlError> {
        let mut line = Vec::new();
        let number = self.lines + 1;
        let read = (&mut *self.input).take(LINE).read_until(b'\n', &mut line);
        read.map_err(|e| SqlError::refused(format!("the file cannot be read: {e}")))?;
        if line.is_empty() {
            return Ok(None);
        }
        if line.last() != Some(&b'\n') {
            return Err(SqlError::refused(format!("line {number} is cut short, or longer than any line is")));
        }
        self.sum.update(&line);
        self.lines = number;
        let wrong = |e| SqlError::refused(format!("line {number} cannot be read: {e}"));
        serde_json::from_slice(&line).map(Some).map_err(wrong)
    }
}
