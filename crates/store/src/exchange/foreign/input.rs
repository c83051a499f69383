//! The bytes of a foreign file: checked for UTF-8, bounded, and cut into JSON records.
//!
//! A record is what a reader needs in memory at once. Whether the file is one big array, one object, or one
//! object a line, [`records`] hands over the same thing, so no reader has to care.

use super::ReadError;
use serde::Deserializer as _;
use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::fmt;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};

/// How long a record may be.
pub(super) const RECORD_LIMIT: u64 = 256 << 20;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
const BUFFER: usize = 64 << 10;

/// What the file itself can do wrong; travels inside an [`io::Error`].
#[derive(Clone, Copy, Debug, thiserror::Error)]
enum Fault {
    #[error("not UTF-8")]
    NotUtf8 { line: u64, byte: u64 },
    #[error("too long")]
    TooLong { limit: u64 },
}

/// How much more may be read before the record is too long.
#[derive(Debug)]
pub(super) struct Allowance {
    left: Cell<u64>,
    limit: u64,
}

impl Allowance {
    pub(super) fn new(limit: u64) -> Self {
        Self { left: Cell::new(limit), limit }
    }

    /// Begins the next record.
    fn renew(&self) {
        self.left.set(self.limit);
    }

    fn take(&self, n: usize) -> Result<(), Fault> {
        let left = self.left.get().checked_sub(n as u64).ok_or(Fault::TooLong { limit: self.limit })?;
        self.left.set(left);
        Ok(())
    }
}

/// A foreign file without its byte order mark, of which every byte that comes out is part of UTF-8 text.
pub(super) struct Input<'a> {
    inner: Chain<Cursor<Vec<u8>>, &'a mut dyn BufRead>,
    allowance: &'a Allowance,
    line: u64,
    byte: u64,
    /// The beginning of a character whose end has not been read yet.
    partial: Vec<u8>,
}

impl<'a> Input<'a> {
    /// Opens a file, buffered, because `serde_json` asks for single bytes.
    pub(super) fn open(
        inner: &'a mut dyn BufRead,
        allowance: &'a Allowance,
    ) -> Result<BufReader<Self>, ReadError> {
        let mut head = Vec::with_capacity(BYTE_ORDER_MARK.len());
        let read = (&mut *inner).take(BYTE_ORDER_MARK.len() as u64).read_to_end(&mut head);
        read.map_err(ReadError::Io)?;
        let mut byte = 0;
        if head == BYTE_ORDER_MARK {
            byte = head.len() as u64;
            head.clear();
        }
        let inner = Cursor::new(head).chain(inner);
        let input = Self { inner, allowance, line: 1, byte, partial: Vec::with_capacity(4) };
        Ok(BufReader::with_capacity(BUFFER, input))
    }

    fn check(&mut self, mut bytes: &[u8]) -> Result<(), Fault> {
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

    fn not_utf8(&self) -> Fault {
        Fault::NotUtf8 { line: self.line, byte: self.byte }
    }
}

impl Read for Input<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        if n == 0 && !out.is_empty() && !self.partial.is_empty() {
            return Err(io::Error::other(self.not_utf8()));
        }
        self.check(&out[..n]).and_then(|()| self.allowance.take(n)).map_err(io::Error::other)?;
        Ok(n)
    }
}

/// Says which record a failed read belongs to.
pub(super) fn read_error(error: io::Error, record: u64) -> ReadError {
    match error.get_ref().and_then(|e| e.downcast_ref::<Fault>()) {
        Some(&Fault::NotUtf8 { line, byte }) => ReadError::NotUtf8 { line, byte },
        Some(&Fault::TooLong { limit }) => ReadError::TooLong { record, limit },
        None => ReadError::Io(error),
    }
}

/// Says which record a failed parse belongs to.
pub(super) fn json_error(error: serde_json::Error, record: u64) -> ReadError {
    if error.is_io() { read_error(error.into(), record) } else { ReadError::Json { record, source: error } }
}

/// Hands over the records of a file with their numbers, counted from 1: each element of an array, or of the
/// `conversations` of an object, and any other object as it is, however many stand one after the other.
pub(super) fn records(
    input: &mut dyn BufRead,
    limit: u64,
    each: &mut dyn FnMut(u64, Value) -> Result<(), ReadError>,
) -> Result<(), ReadError> {
    let allowance = Allowance::new(limit);
    let mut json = serde_json::Deserializer::from_reader(Input::open(input, &allowance)?);
    let mut records = Records { each, allowance: &allowance, done: 0, stopped: None };
    loop {
        // `end` reads over white space and consumes nothing else; that more follows is its other answer.
        match json.end() {
            Ok(()) => return Ok(()),
            Err(e) if e.is_io() => return Err(json_error(e, records.done + 1)),
            Err(_) => {}
        }
        if let Err(e) = json.deserialize_any(&mut records) {
            let record = records.done + 1;
            return Err(records.stopped.take().unwrap_or_else(|| json_error(e, record)));
        }
    }
}

struct Records<'a> {
    each: &'a mut dyn FnMut(u64, Value) -> Result<(), ReadError>,
    allowance: &'a Allowance,
    done: u64,
    /// What `each` has said; serde could only carry its text.
    stopped: Option<ReadError>,
}

impl Records<'_> {
    fn hand_over<E: de::Error>(&mut self, record: Value) -> Result<(), E> {
        let outcome = (self.each)(self.done + 1, record);
        self.done += 1;
        self.allowance.renew();
        outcome.map_err(|e| {
            self.stopped = Some(e);
            E::custom("stopped")
        })
    }
}

impl<'de> Visitor<'de> for &mut Records<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while let Some(record) = elements.next_element()? {
            self.hand_over(record)?;
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
        if wraps_records { Ok(()) } else { self.hand_over(Value::Object(record)) }
    }
}

impl<'de> DeserializeSeed<'de> for &mut Records<'_> {
    type Value = ();

    fn deserialize<D: de::Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_seq(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_for_a_record_not_for_the_file() {
        let record = |len: usize| format!("{{\"a\":\"{}\"}}\n", "x".repeat(len));
        let small = record(60 << 10).repeat(20);
        let mut count = 0;
        let mut count_up = |_: u64, _: Value| {
            count += 1;
            Ok(())
        };
        records(&mut small.as_bytes(), 200 << 10, &mut count_up).unwrap();
        records(
            &mut format!("[{}]", small.trim_end().replace('\n', ",")).as_bytes(),
            200 << 10,
            &mut count_up,
        )
        .unwrap();
        let big = small + &record(300 << 10);
        let error = records(&mut big.as_bytes(), 200 << 10, &mut count_up).unwrap_err().to_string();
        assert_eq!(count, 60);
        assert!(error.starts_with("record 21 is longer than 204800 bytes"), "{error}");
    }
}
