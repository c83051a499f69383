//! The bytes of a foreign file: checked for UTF-8, bounded, and cut into JSON records.
//!
//! A record is what a reader needs in memory at once. Whether the file is one big array, one object, or one
//! object a line, [`records`] hands over the same thing, so no reader has to care.

use super::ImportError;
use serde::Deserializer as _;
use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::fmt;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};

/// How long a record may be.
pub(super) const MAX_RECORD_BYTES: u64 = 256 << 20;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
const BUFFER_BYTES: usize = 64 << 10;

/// What the file itself can do wrong; travels inside an [`io::Error`].
#[derive(Clone, Copy, Debug, thiserror::Error)]
enum InputFileError {
    #[error("not UTF-8")]
    NotUtf8 { line: u64, byte: u64 },
    #[error("too long")]
    TooLong { limit: u64 },
}

/// How much more may be read before the record is too long.
#[derive(Debug)]
pub(super) struct RecordByteLimit {
    remaining: Cell<u64>,
    limit: u64,
}

impl RecordByteLimit {
    pub(super) fn new(limit: u64) -> Self {
        Self { remaining: Cell::new(limit), limit }
    }

    /// Begins the next record.
    fn reset(&self) {
        self.remaining.set(self.limit);
    }

    fn consume(&self, n: usize) -> Result<(), InputFileError> {
        let left = self
            .remaining
            .get()
            .checked_sub(n as u64)
            .ok_or(InputFileError::TooLong { limit: self.limit })?;
        self.remaining.set(left);
        Ok(())
    }
}

/// A foreign file without its byte order mark, of which every byte that comes out is part of UTF-8 text.
pub(super) struct Utf8Reader<'a> {
    inner: Chain<Cursor<Vec<u8>>, &'a mut dyn BufRead>,
    byte_limit: &'a RecordByteLimit,
    line: u64,
    byte: u64,
    /// The beginning of a character whose end has not been read yet.
    partial: Vec<u8>,
}

impl<'a> Utf8Reader<'a> {
    /// Opens a file, buffered, because `serde_json` asks for single bytes.
    pub(super) fn open(
        inner: &'a mut dyn BufRead,
        allowance: &'a RecordByteLimit,
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
        let input = Self { inner, byte_limit: allowance, line: 1, byte, partial: Vec::with_capacity(4) };
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
        let (good, bad, broken) = match std::str::from_utf8(bytes) {
            Ok(_) => (bytes, &[][..], false),
            Err(e) => {
                let (good, bad) = bytes.split_at(e.valid_up_to());
                (good, bad, e.error_len().is_some())
            }
        };
        self.line += good.iter().filter(|byte| **byte == b'\n').count() as u64;
        self.byte += good.len() as u64;
        if broken {
            return Err(self.not_utf8());
        }
        self.partial.extend_from_slice(bad);
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

/// Says which record a failed read belongs to.
pub(super) fn read_error(error: io::Error, record: u64) -> ImportError {
    match error.get_ref().and_then(|e| e.downcast_ref::<InputFileError>()) {
        Some(&InputFileError::NotUtf8 { line, byte }) => ImportError::NotUtf8 { line, byte },
        Some(&InputFileError::TooLong { limit }) => ImportError::TooLong { record, limit },
        None => ImportError::Io(error),
    }
}

/// Says which record a failed parse belongs to.
pub(super) fn json_error(error: serde_json::Error, record: u64) -> ImportError {
    if error.is_io() { read_error(error.into(), record) } else { ImportError::Json { record, source: error } }
}

/// Hands over the records of a file with their numbers, counted from 1: each element of an array, or of the
/// `conversations` of an object, and any other object as it is, however many stand one after the other.
pub(super) fn for_each_record(
    input: &mut dyn BufRead,
    limit: u64,
    each: &mut dyn FnMut(u64, Value) -> Result<(), ImportError>,
) -> Result<(), ImportError> {
    let allowance = RecordByteLimit::new(limit);
    let mut json = serde_json::Deserializer::from_reader(Utf8Reader::open(input, &allowance)?);
    let mut records = RecordVisitor { each, byte_limit: &allowance, emitted: 0, callback_error: None };
    loop {
        // `end` reads over white space and consumes nothing else; that more follows is its other answer.
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
    /// What `each` has said; serde could only carry its text.
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
