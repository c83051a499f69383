//! Where a message is cut into chunks: paragraphs and code blocks, whole, and of a useful size.
//!
//! A boundary is the token that completes an empty line, a `}` at the start of a line, or the closing fence
//! of a code block; it stays in the chunk that it closes, and it counts only when that chunk is large enough.
//! Inside a fenced block nothing but its closing fence is a boundary. A chunk that outgrows the limit is cut
//! at its last line or sentence end. A tool's result stays with its call.
//!
//! The rule reads characters, not tokens, so the same text is cut alike however a model tokenizes it, as far
//! as tokens allow. It decides as tokens stream in and never looks ahead.

/// How large chunks are, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSize {
    /// A boundary before this is forgotten.
    pub min: u32,
    /// A chunk never grows past this.
    pub max: u32,
}

impl Default for ChunkSize {
    fn default() -> Self {
        Self { min: 64, max: 512 }
    }
}

/// Where a token goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The chunk of its turn that it belongs to.
    pub sentence: u32,
    /// The chunk before was too long and is cut: its last `n` tokens, this one included, are `sentence` now.
    pub moved: Option<u32>,
}

/// Cuts one turn into chunks, token by token.
#[derive(Clone, Debug)]
pub struct Chunker {
    size: ChunkSize,
    sentence: u32,
    /// The number of the next chunk.
    next: u32,
    /// Tokens in the open chunk.
    count: u32,
    /// The last token closed the chunk, so the next one opens another.
    closed: bool,
    line: Line,
    /// The fence that the text is inside of.
    fence: Option<Fence>,
    /// Tokens of the open chunk up to the end of the last line or sentence.
    last_end: u32,
    /// Tokens of the open chunk before each tool call that has not been answered yet.
    calls: Vec<u32>,
    /// How much of `<tool>` has been read, and the tokens of the open chunk before the one that begins it.
    call_read: usize,
    call_start: u32,
    /// The last token was part of a tool's result.
    in_result: bool,
}

/// A fence of a code block: what it is made of and how long it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fence {
    mark: char,
    len: u32,
}

/// What is known of the line that is being read.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    /// Something of the text stands before this line: only then can it begin after a line break.
    after_break: bool,
    /// Characters read.
    len: u32,
    /// All so far are marks of one fence, behind at most three spaces.
    marks: Option<Fence>,
    spaces: u32,
    /// Tokens of the open chunk up to the last character, if that ends a sentence should white space follow.
    stop: Option<u32>,
}

const CALL: &str = "<tool>";

impl Chunker {
    /// A turn that begins.
    #[must_use]
    pub fn new(size: ChunkSize) -> Self {
        Self {
            size,
            sentence: 0,
            next: 1,
            count: 0,
            closed: false,
            line: Line::default(),
            fence: None,
            last_end: 0,
            calls: Vec::new(),
            call_read: 0,
            call_start: 0,
            in_result: false,
        }
    }

    /// A turn that goes on behind these tokens, each with the chunk that it went to and whether it is part of a
    /// tool's result. `next` is the number of the next new chunk, which is further on where the last one was
    /// merged away.
    #[must_use]
    pub fn resume<'a>(
        size: ChunkSize,
        tokens: impl IntoIterator<Item = (u32, &'a str, bool)>,
        next: u32,
    ) -> Self {
        let mut chunker = Self::new(size);
        for (sentence, text, result) in tokens {
            if sentence != chunker.sentence {
                (chunker.closed, chunker.next) = (true, sentence);
                chunker.open();
            }
            if !result {
                chunker.end_result();
            }
            chunker.in_result = result;
            let boundary = if result { chunker.pass_result() } else { chunker.read(text) };
            chunker.count += 1;
            chunker.closed = boundary && chunker.count >= size.min;
        }
        if next > chunker.next {
            // The last chunk was merged away: whatever comes begins another.
            (chunker.closed, chunker.next) = (true, next);
            chunker.open();
        }
        chunker
    }

    /// The next token of the turn.
    pub fn push(&mut self, text: &str) -> Placed {
        self.open();
        self.end_result();
        let ended = self.last_end;
        let boundary = self.read(text);
        self.count += 1;
        let moved = if self.count > self.size.max { self.cut(ended) } else { None };
        self.closed = boundary && self.count >= self.size.min;
        Placed { sentence: self.sentence, moved }
    }

    /// The next token, which is part of a tool's result: it stays with the call whatever it says.
    pub fn push_result(&mut self) -> Placed {
        // The call may have closed its chunk; its result still belongs there.
        self.closed = false;
        self.in_result = true;
        self.count += 1;
        // A call and its result are never parted; where nothing before the call is large enough to be a chunk of
        // its own, the whole outgrows the limit.
        let whole = !self.calls.is_empty() && self.calls.iter().all(|&call| call < self.size.min.max(1));
        let moved = if self.count > self.size.max && !whole { self.cut(self.last_end) } else { None };
        self.pass_result();
        Placed { sentence: self.sentence, moved }
    }

    /// Results are not read, so a line that follows one begins anew. They end nothing.
    fn pass_result(&mut self) -> bool {
        self.line = Line { after_break: true, ..Line::default() };
        false
    }

    /// The chunk of the turn that the last token went to.
    #[must_use]
    pub fn sentence(&self) -> u32 {
        self.sentence
    }

    /// Text follows: a result that came before it is complete, and its call answered.
    fn end_result(&mut self) {
        if std::mem::take(&mut self.in_result) {
            self.calls.clear();
        }
    }

    /// Whether the text so far ends inside a fenced block.
    #[must_use]
    pub fn in_fence(&self) -> bool {
        self.fence.or(self.opening()).is_some()
    }

    fn open(&mut self) {
        if self.closed {
            self.sentence = self.next;
            self.next = self.next.saturating_add(1);
            self.count = 0;
            self.call_start = 0;
            self.last_end = 0;
            self.line.stop = None;
            self.calls.clear();
            self.closed = false;
        }
    }

    /// The open chunk is too long: its tail becomes the next chunk. Cut before a tool call that may still be
    /// answered, else behind the last line or sentence, but never so early that the head is too small.
    /// `ended` is where the last line or sentence ended before the token that was one too many.
    fn cut(&mut self, ended: u32) -> Option<u32> {
        let full = self.count - 1;
        let fits = |&at: &u32| at >= self.size.min.max(1) && at <= full;
        let call = self.calls.iter().copied().find(|call| fits(call));
        let at = call.or(Some(ended).filter(fits)).unwrap_or(full);
        self.sentence = self.next;
        self.next = self.next.saturating_add(1);
        self.count -= at;
        self.call_start = self.call_start.saturating_sub(at);
        self.last_end = self.last_end.saturating_sub(at);
        self.line.stop = self.line.stop.and_then(|stop| stop.checked_sub(at)).filter(|&stop| stop > 0);
        self.calls = self.calls.iter().filter_map(|call| call.checked_sub(at)).collect();
        Some(self.count)
    }

    /// Reads the characters of a token; returns whether one of them completes a boundary.
    fn read(&mut self, text: &str) -> bool {
        let mut boundary = false;
        for c in text.chars() {
            self.read_call(c);
            if c == '\r' {
                continue;
            }
            if c == '\n' {
                boundary |= self.end_line();
                self.last_end = self.count + 1;
            } else {
                boundary |= self.read_char(c);
            }
        }
        boundary
    }

    /// A line break. An empty line between two is a paragraph's end; a line of marks alone opens a block.
    fn end_line(&mut self) -> bool {
        let empty = self.line.len == 0 && self.line.after_break;
        if let (None, Some(marks)) = (self.fence, self.opening()) {
            self.fence = Some(marks);
        }
        self.line = Line { after_break: true, ..Line::default() };
        empty && self.fence.is_none()
    }

    fn read_char(&mut self, c: char) -> bool {
        self.read_sentence_end(c);
        let first = self.line.len == 0;
        self.line.len += 1;
        let brace = first && c == '}' && self.line.after_break && self.fence.is_none();
        self.read_fence(c) || brace
    }

    /// Notes where a sentence ends: behind a full stop that white space follows.
    fn read_sentence_end(&mut self, c: char) {
        if let Some(end) = self.line.stop.take().filter(|_| c.is_whitespace()) {
            self.last_end = end;
        }
        match c {
            '.' | '!' | '?' => self.line.stop = Some(self.count + 1),
            '。' | '！' | '？' => self.last_end = self.count + 1,
            _ => {}
        }
    }

    /// Follows the marks at the start of a line; returns whether they complete the fence that closes a block.
    fn read_fence(&mut self, c: char) -> bool {
        let Line { len, marks, spaces, .. } = &mut self.line;
        let read = *spaces + marks.map_or(0, |m| m.len) + 1;
        match marks {
            None if c == ' ' && read == *len && *spaces < 3 => *spaces += 1,
            None if matches!(c, '`' | '~') && read == *len => *marks = Some(Fence { mark: c, len: 1 }),
            Some(marks) if marks.mark == c && read == *len => marks.len += 1,
            // A word behind the marks names the language; another mark there means that it is no fence.
            Some(Fence { mark: '`', .. }) if c == '`' => *marks = None,
            _ => return false,
        }
        let closes = self.fence.is_some() && self.fence == self.line.marks;
        if closes {
            (self.fence, self.line.marks) = (None, None);
        }
        closes
    }

    /// The fence that this line opens, if it does.
    fn opening(&self) -> Option<Fence> {
        self.line.marks.filter(|m| m.len >= 3)
    }

    fn read_call(&mut self, c: char) {
        self.call_read = match CALL[self.call_read..].chars().next() {
            Some(next) if next == c => self.call_read + 1,
            _ => usize::from(c == '<'),
        };
        if self.call_read == 1 {
            self.call_start = self.count;
        }
        if self.call_read == CALL.len() {
            self.call_read = 0;
            self.calls.push(self.call_start);
        }
    }
}

/// Cuts a whole message: the chunk of each token.
#[must_use]
pub fn sentences<'a>(size: ChunkSize, tokens: impl IntoIterator<Item = &'a str>) -> Vec<u32> {
    let mut chunker = Chunker::new(size);
    let mut sentences = Vec::new();
    for text in tokens {
        let placed = chunker.push(text);
        sentences.push(placed.sentence);
        let from = sentences.len() - placed.moved.unwrap_or(1) as usize;
        sentences[from..].fill(placed.sentence);
    }
    sentences
}
