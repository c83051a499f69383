//! Server-sent events, byte by byte: however the bytes are cut on their way, the same events come out.

/// The longest line, and the most data of one event: what a large model's attention needs, and room.
const LONGEST: usize = 64 << 20;

/// A reader of server-sent events. It knows nothing of what they say.
#[derive(Clone, Debug, Default)]
pub struct Sse {
    line: Vec<u8>,
    data: Vec<u8>,
    /// Whether the event has data, be it empty.
    some: bool,
    /// Whether the last byte was a carriage return, so that a newline now ends nothing.
    returned: bool,
    /// Whether a line has ended; before that a byte order mark may stand.
    begun: bool,
    limit: Option<usize>,
}

/// A line or an event that is too long to be one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLong(
    /// How many bytes one may have.
    pub usize,
);

impl Sse {
    /// A reader that accepts lines of so many bytes, instead of 64 megabytes.
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        Self { limit: Some(limit), ..Self::default() }
    }

    /// Reads bytes; `tell` gets the data of each event that they complete.
    ///
    /// # Errors
    /// When a line or an event is too long. Nothing more should be read then.
    pub fn read(&mut self, mut bytes: &[u8], tell: &mut dyn FnMut(Vec<u8>)) -> Result<(), TooLong> {
        let limit = self.limit.unwrap_or(LONGEST);
        while let Some(first) = bytes.first() {
            if std::mem::take(&mut self.returned) && *first == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let end = bytes.iter().position(|b| matches!(b, b'\n' | b'\r'));
            let part = &bytes[..end.unwrap_or(bytes.len())];
            if self.line.len() + part.len() > limit {
                return Err(TooLong(limit));
            }
            self.line.extend_from_slice(part);
            let Some(end) = end else { break };
            self.returned = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            self.end_line(limit, tell)?;
        }
        Ok(())
    }

    /// The bytes are at their end. Lines that are whole count, even where the empty line behind them is missing.
    pub fn finish(&mut self, tell: &mut dyn FnMut(Vec<u8>)) {
        if self.line.is_empty() {
            self.end_event(tell);
        }
    }

    fn end_line(&mut self, limit: usize, tell: &mut dyn FnMut(Vec<u8>)) -> Result<(), TooLong> {
        let mut line = std::mem::take(&mut self.line);
        if !std::mem::replace(&mut self.begun, true) && line.starts_with(b"\xef\xbb\xbf") {
            line.drain(..3);
        }
        if line.is_empty() {
            self.end_event(tell);
        } else if let Some(value) = data(&line) {
            if self.data.len() + value.len() >= limit {
                return Err(TooLong(limit));
            }
            if self.some {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value);
            self.some = true;
        }
        // The room that a large line took is kept for the next one.
        line.clear();
        self.line = line;
        Ok(())
    }

    fn end_event(&mut self, tell: &mut dyn FnMut(Vec<u8>)) {
        if std::mem::take(&mut self.some) {
            tell(std::mem::take(&mut self.data));
        }
    }
}

/// The value of a line that is called `data`; comments and other fields say nothing to us.
fn data(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"data")?;
    match rest.split_first() {
        None => Some(rest),
        Some((b':', value)) => Some(value.strip_prefix(b" ").unwrap_or(value)),
        Some(_) => None,
    }
}
