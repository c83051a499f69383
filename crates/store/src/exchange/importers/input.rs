//! The bytes of an imported file: checked for UTF-8, bounded, and split into JSON records.
//!
//! A record is what an importer needs in memory at once. Whether the file is one array, one object, or one object per
//! line, [`for_each_record`] yields the same records.

use super::error::ImportError;
use serde::Deserializer as _;
use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::fmt;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};

pub(super) const MAX_RECORD_BYTES: u64 = 256 << 20;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
const BUFFER_BYTES: usize = 64 << 10;

/// An invalid file; carried inside an [`io::Error`], the only error that a reader may return.
#[derive(Clone, Copy, Debug, thiserror::Error)]
enum InputFileError {
    #[error("not UTF-8")]
    NotUtf8 { line: u64, byte: u64 },
    #[error("too long")]
    TooLong { limit: u64 },
}

/// How many bytes of the current record may still be read.
#[derive(Debug)]
pub(super) struct RecordByteLimit {
    remaining: Cell<u64>,
    limit: u64,
}

impl RecordByteLimit {
    pub(super) fn new(limit: u64) -> Self {
        Self { remaining: Cell::new(limit), limit }
    }

    fn reset(&self) {
        self.remaining.set(self.limit);
    }

    fn consume(&self, n: usize) -> Result<(), InputFileError> {
        let remaining = self
            .remaining
            .get()
            .checked_sub(n as u64)
            .ok_or(InputFileError::TooLong { limit: self.limit })?;
        self.remaining.set(remaining);
        Ok(())
    }
}

/// A file without its byte order mark. Every byte that this reader returns is part of valid UTF-8 text.
pub(super) struct Utf8Reader<'a> {
    inner: Chain<Cursor<Vec<u8>>, &'a mut dyn BufRead>,
    byte_limit: &'a RecordByteLimit,
    line: u64,
    byte: u64,
    /// The first bytes of a character that is not complete yet.
    partial: Vec<u8>,
}

impl<'a> Utf8Reader<'a> {
    /// Opens a file, buffered because `serde_json` reads single bytes.
    pub(super) fn open(
        inner: &'a mut dyn BufRead,
        byte_limit: &'a RecordByteLimit,
    ) -> Result<BufReader<Self>, ImportError> {
        let mut head = Vec::with_capacity(BYTE_ORDER_MARK.len());
        let read = (&mut *inner).take(BYTE_ORDER_MARK.len() as u64).read_to_end(&mut head);
        read.map_err(ImportError::Io)?;
        let mut byte = 0;
        if head == BYTE_ORDER_MARK {
            byte = head.len() as u64;
            head.clear();
        }
        let inner = Cursor::new(head).chain(inner);
        let input = Self { inner, byte_limit, line: 1, byte, partial: Vec::with_capacity(4) };
        Ok(BufReader::with_capacity(BUFFER_BYTES, input))
    }

    fn validate_utf8(&mut self, mut bytes: &[u8]) -> Result<(), InputFileError> {
        while !self.partial.is_empty() {
            let Some((first, rest)) = bytes.split_first() else { return Ok(()) };
            bytes = rest;
            self.partial.push(*first);
            match std::str::from_utf8(&self.partial) {
                Ok(_) => {
                    self.byte += self.partial.len() as u64;
                    self.partial.clear();
                }
                Err(e) if e.error_len().is_none() => {}
                Err(_) => return Err(self.not_utf8()),
            }
        }
        let (valid, rest, invalid) = match std::str::from_utf8(bytes) {
            Ok(_) => (bytes, &[][..], false),
            Err(e) => {
                let (valid, rest) = bytes.split_at(e.valid_up_to());
                (valid, rest, e.error_len().is_some())
            }
        };
        self.line += valid.iter().filter(|byte| **byte == b'\n').count() as u64;
        self.byte += valid.len() as u64;
        if invalid {
            return Err(self.not_utf8());
        }
        self.partial.extend_from_slice(rest);
        Ok(())
    }

    fn not_utf8(&self) -> InputFileError {
        InputFileError::NotUtf8 { line: self.line, byte: self.byte }
    }
}

impl Read for Utf8Reader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        if n == 0 && !out.is_empty() && !self.partial.is_empty() {
            return Err(io::Error::other(self.not_utf8()));
        }
        self.validate_utf8(&out[..n]).and_then(|()| self.byte_limit.consume(n)).map_err(io::Error::other)?;
        Ok(n)
    }
}

/// The error of a failed read, with the number of its record.
pub(super) fn read_error(error: io::Error, record: u64) -> ImportError {
    match error.get_ref().and_then(|e| e.downcast_ref::<InputFileError>()) {
        Some(&InputFileError::NotUtf8 { line, byte }) => ImportError::NotUtf8 { line, byte },
        Some(&InputFileError::TooLong { limit }) => ImportError::TooLong { record, limit },
        None => ImportError::Io(error),
    }
}

/// The error of a failed parse, with the number of its record.
pub(super) fn json_error(error: serde_json::Error, record: u64) -> ImportError {
    if error.is_io() { read_error(error.into(), record) } else { ImportError::Json { record, source: error } }
}

/// Calls `each` with the records of a file and their numbers, counted from 1: each element of an array or of the
/// `conversations` of an object, and every other object by itself.
pub(super) fn for_each_record(
    input: &mut dyn BufRead,
    limit: u64,
    each: &mut dyn FnMut(u64, Value) -> Result<(), ImportError>,
) -> Result<(), ImportError> {
    let byte_limit = RecordByteLimit::new(limit);
    let mut json = serde_json::Deserializer::from_reader(Utf8Reader::open(input, &byte_limit)?);
    let mut records = RecordVisitor { each, byte_limit: &byte_limit, emitted: 0, callback_error: None };
    loop {
        // `end` skips white space, and fails without consuming anything if more follows.
        match json.end() {
            Ok(()) => return Ok(()),
            Err(e) if e.is_io() => return Err(json_error(e, records.emitted + 1)),
            Err(_) => {}
        }
        if let Err(e) = json.deserialize_any(&mut records) {
            let record = records.emitted + 1;
            return Err(records.callback_error.take().unwrap_or_else(|| json_error(e, record)));
        }
    }
}

struct RecordVisitor<'a> {
    each: &'a mut dyn FnMut(u64, Value) -> Result<(), ImportError>,
    byte_limit: &'a RecordByteLimit,
    emitted: u64,
    /// The error of `each`: an error of serde can only carry its text.
    callback_error: Option<ImportError>,
}

impl RecordVisitor<'_> {
    fn emit<E: de::Error>(&mut self, record: Value) -> Result<(), E> {
        let outcome = (self.each)(self.emitted + 1, record);
        self.emitted += 1;
        self.byte_limit.reset();
        outcome.map_err(|e| {
            self.callback_error = Some(e);
            E::custom("stopped")
        })
    }
}

impl<'de> Visitor<'de> for &mut RecordVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while let Some(record) = elements.next_element()? {
            self.emit(record)?;
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let mut record = Map::new();
        let mut wraps_records = false;
        while let Some(key) = entries.next_key::<String>()? {
            if key == "conversations" {
                wraps_records = true;
                entries.next_value_seed(&mut *self)?;
            } else {
                record.insert(key, entries.next_value()?);
            }
        }
        if wraps_records { Ok(()) } else { self.emit(Value::Object(record)) }
    }
}

impl<'de> DeserializeSeed<'de> for &mut RecordVisitor<'_> {
    type Value = ();

    fn deserialize<D: de::Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_seq(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn import_limit_applies_per_record() {
        let record = |len: usize| format!("{{\"a\":\"{}\"}}\n", "x".repeat(len));
        let small = record(60 << 10).repeat(20);
        let mut count = 0;
        let mut count_up = |_: u64, _: Value| {
            count += 1;
            Ok(())
        };
        for_each_record(&mut small.as_bytes(), 200 << 10, &mut count_up).unwrap();
        for_each_record(
            &mut format!("[{}]", small.trim_end().replace('\n', ",")).as_bytes(),
            200 << 10,
            &mut count_up,
        )
        .unwrap();
        let big = small + &record(300 << 10);
        let error = for_each_record(&mut big.as_bytes(), 200 << 10, &mut count_up).unwrap_err().to_string();
        assert_eq!(count, 60);
        assert!(error.starts_with("record 21 is longer than 204800 bytes"), "{error}");
    }
}
