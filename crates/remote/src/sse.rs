//! Server-sent events. The events do not depend on how the network splits the bytes.

/// The limit for one line and for the data of one event: the attention of a large model fits with room to spare.
const MAX_LINE_BYTES: usize = 64 << 20;

/// A parser of server-sent events. It returns the `data` of each event and ignores the other fields.
#[derive(Clone, Debug, Default)]
pub struct SseParser {
    line: Vec<u8>,
    data: Vec<u8>,
    /// Whether the event has a `data` field, which may be empty.
    has_data: bool,
    /// Whether the last byte was a carriage return, which has ended the line: a newline after it belongs to it.
    after_cr: bool,
    /// Whether the first line has ended; it may start with a byte order mark.
    started: bool,
    limit: Option<usize>,
}

/// A line or an event that is longer than the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SseTooLong(
    /// The limit in bytes.
    pub usize,
);

impl SseParser {
    /// A parser with another limit than 64 MiB.
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        Self { limit: Some(limit), ..Self::default() }
    }

    /// Parses bytes; `emit` gets the data of each event that they complete.
    pub fn push(&mut self, mut bytes: &[u8], emit: &mut dyn FnMut(Vec<u8>)) -> Result<(), SseTooLong> {
        let limit = self.limit.unwrap_or(MAX_LINE_BYTES);
        while let Some(first) = bytes.first() {
            if std::mem::take(&mut self.after_cr) && *first == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let end = bytes.iter().position(|b| matches!(b, b'\n' | b'\r'));
            let part = &bytes[..end.unwrap_or(bytes.len())];
            if self.line.len() + part.len() > limit {
                return Err(SseTooLong(limit));
            }
            self.line.extend_from_slice(part);
            let Some(end) = end else { break };
            self.after_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            self.end_line(limit, emit)?;
        }
        Ok(())
    }

    /// Ends the stream. A last event of complete lines counts, even without the empty line after it.
    pub fn finish(&mut self, emit: &mut dyn FnMut(Vec<u8>)) {
        if self.line.is_empty() {
            self.end_event(emit);
        }
    }

    fn end_line(&mut self, limit: usize, emit: &mut dyn FnMut(Vec<u8>)) -> Result<(), SseTooLong> {
        let mut line = std::mem::take(&mut self.line);
        if !std::mem::replace(&mut self.started, true) && line.starts_with(b"\xef\xbb\xbf") {
            line.drain(..3);
        }
        if line.is_empty() {
            self.end_event(emit);
        } else if let Some(value) = data_field(&line) {
            if self.data.len() + value.len() >= limit {
                return Err(SseTooLong(limit));
            }
            if self.has_data {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value);
            self.has_data = true;
        }
        // The buffer is reused for the next line.
        line.clear();
        self.line = line;
        Ok(())
    }

    fn end_event(&mut self, emit: &mut dyn FnMut(Vec<u8>)) {
        if std::mem::take(&mut self.has_data) {
            emit(std::mem::take(&mut self.data));
        }
    }
}

/// The value of a `data` line; `None` for comments and other fields.
fn data_field(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"data")?;
    match rest.split_first() {
        None => Some(rest),
        Some((b':', value)) => Some(value.strip_prefix(b" ").unwrap_or(value)),
        Some(_) => None,
    }
}
