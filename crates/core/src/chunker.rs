//! Where a message is cut into chunks: whole paragraphs and code blocks of a useful size.
//!
//! A boundary is the token that completes an empty line, a `}` at the start of a line, or the closing fence of
//! a code block. The token belongs to the chunk that it closes, and counts as a boundary only if that chunk has
//! the minimum size. Inside a fenced block, only the closing fence is a boundary. A chunk that exceeds the
//! maximum size is cut at its last line end or sentence end. A tool result stays in one chunk with its call.
//!
//! The rules read characters, not tokens, so that the same text is cut alike for every tokenizer, as far as
//! tokens allow. They decide token by token and never look ahead, because tokens stream in.

/// The size of chunks, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSize {
    /// A boundary in a smaller chunk is ignored.
    pub min: u32,
    /// A larger chunk is split.
    pub max: u32,
}

impl Default for ChunkSize {
    fn default() -> Self {
        Self { min: 64, max: 512 }
    }
}

/// The chunk that a token goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkAssignment {
    /// The index of the chunk in its turn.
    pub chunk_index: u32,
    /// The chunk before exceeded its maximum size and is split: its last `n` tokens, this one included, now
    /// belong to the chunk `chunk_index`.
    pub moved_tokens: Option<u32>,
}

/// Cuts one turn into chunks, token by token.
#[derive(Clone, Debug)]
pub struct Chunker {
    size: ChunkSize,
    chunk_index: u32,
    /// The index of the next new chunk.
    next_index: u32,
    /// Tokens in the open chunk.
    token_count: u32,
    /// The last token closed the open chunk: the next token opens another.
    closed: bool,
    line: LineState,
    /// The fence of the code block that the text is in.
    fence: Option<CodeFence>,
    /// Tokens of the open chunk up to the last line end or sentence end.
    last_end: u32,
    /// The tool calls of the open chunk that have no result yet.
    open_calls: Vec<OpenCall>,
    /// How many characters of `<tool>` the text ends with.
    call_matched: usize,
    /// Tokens of the open chunk before the token in which that match begins.
    call_start: u32,
    /// The last token was part of a tool result.
    in_result: bool,
}

/// A tool call without a result, by the tag that opens it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OpenCall {
    /// Tokens of the open chunk before the tag; 0 if the tag begins in an earlier chunk.
    start: u32,
    /// Tokens of the open chunk before the token that completes the tag.
    end: u32,
}

/// The fence of a code block: its character and how many of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CodeFence {
    mark: char,
    len: u32,
}

/// The state of the line that is being read.
#[derive(Clone, Copy, Debug, Default)]
struct LineState {
    /// A line break precedes the line, so it is not the first line of the text.
    after_break: bool,
    /// Characters read.
    len: u32,
    /// The fence characters read, while the line consists of up to three spaces and these.
    marks: Option<CodeFence>,
    spaces: u32,
    /// The tokens of the open chunk up to the last character, where that character ends a sentence if white
    /// space follows.
    sentence_stop: Option<u32>,
}

const TOOL_CALL_TAG: &str = "<tool>";

impl Chunker {
    /// The state at the beginning of a turn.
    #[must_use]
    pub fn new(size: ChunkSize) -> Self {
        Self {
            size,
            chunk_index: 0,
            next_index: 1,
            token_count: 0,
            closed: false,
            line: LineState::default(),
            fence: None,
            last_end: 0,
            open_calls: Vec::new(),
            call_matched: 0,
            call_start: 0,
            in_result: false,
        }
    }

    /// The state after `tokens`, each with its chunk index, its text and whether it is part of a tool result.
    /// `next_index` is the index of the next new chunk; it skips indices of merged chunks.
    #[must_use]
    pub fn resume<'a>(
        size: ChunkSize,
        tokens: impl IntoIterator<Item = (u32, &'a str, bool)>,
        next_index: u32,
    ) -> Self {
        let mut chunker = Self::new(size);
        for (chunk_index, text, is_result) in tokens {
            if chunk_index != chunker.chunk_index {
                (chunker.closed, chunker.next_index) = (true, chunk_index);
                chunker.open_next_chunk();
            }
            if !is_result {
                chunker.end_result();
            }
            chunker.in_result = is_result;
            let boundary = if is_result { chunker.skip_result() } else { chunker.read_token(text) };
            chunker.token_count += 1;
            chunker.closed = boundary && chunker.token_count >= size.min;
        }
        if next_index > chunker.next_index {
            // The last chunk was merged into another, so the next token begins a new one.
            (chunker.closed, chunker.next_index) = (true, next_index);
            chunker.open_next_chunk();
        }
        chunker
    }

    /// Reads the next token of the turn.
    pub fn push(&mut self, text: &str) -> ChunkAssignment {
        self.open_next_chunk();
        self.end_result();
        let last_end = self.last_end;
        let boundary = self.read_token(text);
        self.token_count += 1;
        let overlong = self.token_count > self.size.max;
        let moved_tokens = overlong.then(|| self.split_overlong(last_end));
        self.closed = boundary && self.token_count >= self.size.min;
        ChunkAssignment { chunk_index: self.chunk_index, moved_tokens }
    }

    /// Reads the next token of a tool result. Its text is not examined: it stays in the chunk of the call.
    pub fn push_result(&mut self) -> ChunkAssignment {
        // The call may have closed its chunk; the result belongs there nevertheless.
        self.closed = false;
        self.in_result = true;
        self.token_count += 1;
        // A call and its result are never split. Where the text before the call is too short for a chunk of its
        // own, the chunk exceeds the maximum size.
        let unsplittable = !self.open_calls.is_empty()
            && self.open_calls.iter().all(|call| call.start < self.size.min.max(1));
        let overlong = self.token_count > self.size.max && !unsplittable;
        let moved_tokens = overlong.then(|| self.split_overlong(self.last_end));
        self.skip_result();
        ChunkAssignment { chunk_index: self.chunk_index, moved_tokens }
    }

    /// The text of a tool result is not read, so the line state is reset. A result is never a boundary.
    fn skip_result(&mut self) -> bool {
        self.line = LineState { after_break: true, ..LineState::default() };
        false
    }

    /// Ends the open chunk, whatever its size: the next token opens another.
    pub fn close_chunk(&mut self) {
        self.closed = self.token_count > 0;
    }

    /// Gives the open chunk another index, because its tokens move to a chunk of their own. Returns the index.
    pub fn move_open_chunk(&mut self) -> u32 {
        self.chunk_index = self.next_index;
        self.next_index = self.next_index.saturating_add(1);
        self.chunk_index
    }

    /// The index of the chunk that the last token went to.
    #[must_use]
    pub fn chunk_index(&self) -> u32 {
        self.chunk_index
    }

    /// A token of the message ends the tool result before it: its call is no longer open.
    fn end_result(&mut self) {
        if std::mem::take(&mut self.in_result) {
            self.open_calls.clear();
        }
    }

    /// Whether the text so far ends inside a fenced code block.
    #[must_use]
    pub fn in_fence(&self) -> bool {
        self.fence.or(self.opening_fence()).is_some()
    }

    fn open_next_chunk(&mut self) {
        if self.closed {
            self.chunk_index = self.next_index;
            self.next_index = self.next_index.saturating_add(1);
            self.token_count = 0;
            self.call_start = 0;
            self.last_end = 0;
            self.line.sentence_stop = None;
            self.open_calls.clear();
            self.closed = false;
        }
    }

    /// Splits the open chunk, which exceeds the maximum size: before a tool call that has no result yet, else
    /// behind the last line end or sentence end, else before the newest token; never so that the head is below
    /// the minimum size. `last_end` is the last line end or sentence end before the newest token. Returns how
    /// many tokens move.
    fn split_overlong(&mut self, last_end: u32) -> u32 {
        let full = self.token_count - 1;
        let fits = |&at: &u32| at >= self.size.min.max(1) && at <= full;
        let call = self.open_calls.iter().map(|call| call.start).find(fits);
        let at = call.or(Some(last_end).filter(fits)).unwrap_or(full);
        self.chunk_index = self.next_index;
        self.next_index = self.next_index.saturating_add(1);
        self.token_count -= at;
        self.call_start = self.call_start.saturating_sub(at);
        self.last_end = self.last_end.saturating_sub(at);
        self.line.sentence_stop =
            self.line.sentence_stop.and_then(|stop| stop.checked_sub(at)).filter(|&stop| stop > 0);
        // A tag that the split cuts in two belongs to the chunk that completes it.
        let moved = |call: &OpenCall| {
            Some(OpenCall { start: call.start.saturating_sub(at), end: call.end.checked_sub(at)? })
        };
        self.open_calls = self.open_calls.iter().filter_map(moved).collect();
        self.token_count
    }

    /// Reads the characters of a token; returns whether one of them completes a boundary.
    fn read_token(&mut self, text: &str) -> bool {
        let mut boundary = false;
        for c in text.chars() {
            self.read_call(c);
            if c == '\r' {
                continue;
            }
            if c == '\n' {
                boundary |= self.end_line();
                self.last_end = self.token_count + 1;
            } else {
                boundary |= self.read_char(c);
            }
        }
        boundary
    }

    /// Handles a line break. An empty line between two breaks ends a paragraph; a line of fence characters
    /// opens a code block.
    fn end_line(&mut self) -> bool {
        let empty = self.line.len == 0 && self.line.after_break;
        if let (None, Some(marks)) = (self.fence, self.opening_fence()) {
            self.fence = Some(marks);
        }
        self.line = LineState { after_break: true, ..LineState::default() };
        empty && self.fence.is_none()
    }

    fn read_char(&mut self, c: char) -> bool {
        self.read_sentence_end(c);
        let first = self.line.len == 0;
        self.line.len += 1;
        let brace = first && c == '}' && self.line.after_break && self.fence.is_none();
        self.read_fence(c) || brace
    }

    /// Notes the end of a sentence: a full stop followed by white space.
    fn read_sentence_end(&mut self, c: char) {
        if let Some(end) = self.line.sentence_stop.take().filter(|_| c.is_whitespace()) {
            self.last_end = end;
        }
        match c {
            '.' | '!' | '?' => self.line.sentence_stop = Some(self.token_count + 1),
            '。' | '！' | '？' => self.last_end = self.token_count + 1,
            _ => {}
        }
    }

    /// Follows the fence characters at the start of a line; returns whether they close the code block.
    fn read_fence(&mut self, c: char) -> bool {
        let LineState { len, marks, spaces, .. } = &mut self.line;
        let read = *spaces + marks.map_or(0, |m| m.len) + 1;
        match marks {
            None if c == ' ' && read == *len && *spaces < 3 => *spaces += 1,
            None if matches!(c, '`' | '~') && read == *len => *marks = Some(CodeFence { mark: c, len: 1 }),
            Some(marks) if marks.mark == c && read == *len => marks.len += 1,
            // Text behind the marks names the language; with another backtick it is inline code, not a fence.
            Some(CodeFence { mark: '`', .. }) if c == '`' => *marks = None,
            _ => return false,
        }
        let closes = self.fence.is_some() && self.fence == self.line.marks;
        if closes {
            (self.fence, self.line.marks) = (None, None);
        }
        closes
    }

    /// The fence that the current line opens, if it does.
    fn opening_fence(&self) -> Option<CodeFence> {
        self.line.marks.filter(|m| m.len >= 3)
    }

    fn read_call(&mut self, c: char) {
        self.call_matched = match TOOL_CALL_TAG[self.call_matched..].chars().next() {
            Some(next) if next == c => self.call_matched + 1,
            _ => usize::from(c == '<'),
        };
        if self.call_matched == 1 {
            self.call_start = self.token_count;
        }
        if self.call_matched == TOOL_CALL_TAG.len() {
            self.call_matched = 0;
            self.open_calls.push(OpenCall { start: self.call_start, end: self.token_count });
        }
    }
}

/// The chunk index of each token of a complete message.
#[must_use]
pub fn chunk_indices<'a>(size: ChunkSize, tokens: impl IntoIterator<Item = &'a str>) -> Vec<u32> {
    let mut chunker = Chunker::new(size);
    let mut indices = Vec::new();
    for text in tokens {
        let assigned = chunker.push(text);
        indices.push(assigned.chunk_index);
        let from = indices.len() - assigned.moved_tokens.unwrap_or(1) as usize;
        indices[from..].fill(assigned.chunk_index);
    }
    indices
}
