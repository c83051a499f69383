//! Every token of one conversation, in order. Flags say which of them the model sees.
//!
//! A timeline is a list of turns and a list of chunks, the *rows*; the tokens of a chunk are its
//! [body](crate::chunk_body::ChunkBody). Rows stay in memory. The body of a chunk without live tokens may be
//! unloaded until a change needs it. So ten million tokens cost the memory of their rows, and loading them costs the
//! time of the window. [`apply`](crate::apply) is the only module that changes a timeline.

mod chunk;
mod chunk_ref;
mod error;
mod exchange;
mod invariants;

pub(crate) use chunk::{BodyState, Chunk};
pub use chunk_ref::{ChunkRef, TokenRef};
pub use error::TimelineError;
pub(crate) use exchange::Exchange;

use crate::chunk_body::ChunkBody;
use crate::live_index::LiveIndex;
use crate::token::{ChunkId, Position, Role, TurnId};
use std::fmt;
use std::ops::Range;

/// Every token of a conversation, and which of them are live.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// How many tokens it has: the next position.
    pub(crate) len: u64,
    pub(crate) turns: Vec<Turn>,
    /// In order of position, and so by turn and index. The row of a merged chunk stays, empty, so that its id is not
    /// used again.
    pub(crate) chunks: Vec<Chunk>,
    pub(crate) live: LiveIndex,
    pub(crate) revision: Revision,
}

/// The number of changes that the store has of a timeline. It takes no part in comparisons: equal timelines can be
/// the result of different changes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Revision(pub u64);

impl PartialEq for Revision {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Its id; ids ascend along the timeline, with gaps where turns were not imported.
    pub id: TurnId,
    /// Who wrote the message.
    pub role: Role,
    /// The row of its first chunk.
    pub first_row: u32,
}

/// The row of a chunk as a store writes it, without the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// The id of the chunk.
    pub id: ChunkId,
    /// Whether it is protected from pruning.
    pub pinned: bool,
    /// How many tokens it has.
    pub len: u32,
    /// How many of them are live.
    pub live: u32,
    /// How many of them are deleted.
    pub deleted: u32,
    /// The checksum of its body, for a chunk without live tokens: only its body may be unloaded.
    pub checksum: Option<u64>,
}

/// A 128-bit hash of the complete state of a timeline.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateHash(pub u128);

impl fmt::Display for StateHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for StateHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Timeline {
    /// The timeline of a new conversation.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many tokens it has: live, pruned and deleted.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether it has no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many of the tokens are live.
    #[must_use]
    pub fn live_len(&self) -> usize {
        self.live.total()
    }

    /// The number of changes committed to the store, at loading and since. A store compares it with its own number
    /// before it writes, to detect another writer.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision.0
    }

    /// Sets the revision; for a store that has loaded the timeline.
    pub fn set_revision(&mut self, revision: u64) {
        self.revision = Revision(revision);
    }

    /// The position of the next token.
    #[must_use]
    pub fn next_position(&self) -> Position {
        Position(self.len)
    }

    /// The id of the next turn.
    #[must_use]
    pub fn next_turn(&self) -> TurnId {
        self.turns.last().map_or(TurnId(0), |t| t.id.next())
    }

    /// The index of the next new chunk of a turn. The indices of merged chunks are not used again.
    #[must_use]
    pub fn next_chunk_index(&self, turn: TurnId) -> u32 {
        let rows = self.turn_index(turn).map_or(0..0, |t| self.turn_rows(t));
        self.chunks[rows].last().map_or(0, |c| c.id.index.saturating_add(1))
    }

    /// The messages, in order.
    #[must_use]
    pub fn turns(&self) -> &[Turn] {
        &self.turns
    }

    /// The token at a position; none behind the end, and none where the body of its chunk is not loaded.
    #[must_use]
    pub fn token(&self, position: Position) -> Option<TokenRef<'_>> {
        let chunk = self.chunk_of(position).filter(|c| c.is_loaded())?;
        let (body, i) = (chunk.body(), chunk.token_index(position));
        Some(TokenRef {
            position,
            id: body.ids[i],
            text: body.text(i..i + 1),
            brightness: body.brightness[i],
            flags: body.flags[i],
            chunk: chunk.id(),
        })
    }

    /// The chunk with this id; none where it holds no token.
    #[must_use]
    pub fn chunk(&self, id: ChunkId) -> Option<ChunkRef<'_>> {
        self.find_row(id).filter(|&i| self.chunks[i].len > 0).map(|i| self.chunk_ref(i))
    }

    /// The chunk in a row; none where it holds no token.
    #[must_use]
    pub fn chunk_at_row(&self, row: usize) -> Option<ChunkRef<'_>> {
        self.chunks.get(row).filter(|c| c.len > 0).map(|_| self.chunk_ref(row))
    }

    /// The chunk that holds the token at a position.
    #[must_use]
    pub fn chunk_of(&self, position: Position) -> Option<ChunkRef<'_>> {
        if position >= self.next_position() {
            return None;
        }
        // An empty row starts where the chunk before it ends, so none lies between a token and its chunk.
        let after = self.chunks.partition_point(|c| c.start <= position);
        Some(self.chunk_ref(after.checked_sub(1)?))
    }

    /// All chunks that hold tokens, in order.
    pub fn chunks(&self) -> impl DoubleEndedIterator<Item = ChunkRef<'_>> {
        (0..self.chunks.len()).filter(|&i| self.chunks[i].len > 0).map(|i| self.chunk_ref(i))
    }

    /// The chunks with live tokens, in order. The cost grows with their number, not with the length of the timeline.
    pub fn live_chunks(&self) -> impl Iterator<Item = ChunkRef<'_>> {
        let (mut live_before, mut next) = (0, 0);
        std::iter::from_fn(move || {
            // Mostly the next live chunk is a neighbour; the index is needed only to skip pruned ones.
            let row = match self.chunks.get(next) {
                Some(chunk) if chunk.live > 0 => next,
                _ => self.live.find_nth(live_before)?.0,
            };
            let chunk = self.chunk_ref(row);
            live_before += chunk.live_len();
            next = row + 1;
            Some(chunk)
        })
    }

    /// The chunks of one turn that hold tokens, in order.
    pub fn turn_chunks(&self, turn: TurnId) -> impl Iterator<Item = ChunkRef<'_>> {
        let rows = self.turn_index(turn).map_or(0..0, |t| self.turn_rows(t));
        rows.filter(|&i| self.chunks[i].len > 0).map(|i| self.chunk_ref(i))
    }

    /// The first chunk of the turn that `chunk` is paired with: of the first answer for a chunk of a question, and
    /// of the question for a chunk of an answer or of a tool result.
    #[must_use]
    pub fn partner(&self, chunk: ChunkId) -> Option<ChunkRef<'_>> {
        let exchange = self.exchange_of(self.turn_index(chunk.turn)?);
        let other = match chunk.role {
            Role::System => None,
            Role::User => exchange.steps.first().and_then(|step| step.first()).copied(),
            Role::Assistant | Role::Tool => exchange.question,
        };
        self.anchor_of(other?)
    }

    /// The first chunk of a turn, by the index of the turn.
    pub(crate) fn anchor_of(&self, turn: usize) -> Option<ChunkRef<'_>> {
        self.chunk(ChunkId::new(self.turns[turn].role, self.turns[turn].id, 0))
    }

    /// The turn of the user that a turn of the assistant answers, or that a tool was called for.
    #[must_use]
    pub fn question_of(&self, turn: TurnId) -> Option<TurnId> {
        let turn = self.turn_index(turn)?;
        let question = self.exchange_of(turn).question.filter(|&question| question != turn);
        question.map(|question| self.turns[question].id)
    }

    /// The exchange that a turn belongs to. Turns that are deleted or empty are skipped.
    pub(crate) fn exchange_of(&self, turn: usize) -> Exchange {
        let has_text = |t: usize| self.chunks[self.turn_rows(t)].iter().any(|c| c.len > c.deleted);
        Exchange::find(&self.turns, turn, has_text)
    }

    /// Whether the chunk is part of the system prompt: a system message that no message of another role precedes.
    #[must_use]
    pub fn is_system_prompt(&self, chunk: ChunkId) -> bool {
        let is_system = |t: usize| self.turns[t].role == Role::System || self.turn_rows(t).is_empty();
        chunk.role == Role::System && self.turn_index(chunk.turn).is_some_and(|turn| (0..turn).all(is_system))
    }

    /// A hash of tokens, flags, brightness, chunks, pins and tallies; equal for equal timelines, whichever bodies are
    /// loaded. It is the same on every machine and in every later version.
    #[must_use]
    pub fn state_hash(&self) -> StateHash {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        let mut put = |bytes: &[u8]| hash.update(bytes);
        put(b"halo timeline 2");
        for turn in &self.turns {
            put(&turn.id.0.to_le_bytes());
            put(&[turn.role.letter() as u8]);
        }
        for chunk in &self.chunks {
            put(&[chunk.id.role.letter() as u8, u8::from(chunk.pinned)]);
            put(&chunk.id.turn.0.to_le_bytes());
            put(&chunk.id.index.to_le_bytes());
            put(&chunk.len.to_le_bytes());
            put(&chunk.checksum().to_le_bytes());
        }
        StateHash(hash.digest128())
    }

    /// The memory that the timeline takes.
    #[must_use]
    pub fn memory_usage(&self) -> TimelineMemory {
        let rows = self.turns.capacity() * size_of::<Turn>()
            + self.chunks.capacity() * (size_of::<Chunk>() + size_of::<u32>());
        let bodies = self.chunks.iter().filter_map(Chunk::loaded_body).map(ChunkBody::memory_bytes);
        let (content, columns) = bodies.fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        TimelineMemory { content, overhead: rows + columns }
    }

    /// The headers of a range of rows, including the empty rows of merged chunks.
    ///
    /// # Panics
    /// When the range exceeds [`row_count`](Self::row_count).
    pub fn chunk_headers(&self, rows: Range<usize>) -> impl Iterator<Item = ChunkHeader> + '_ {
        self.chunks[rows].iter().map(|c| ChunkHeader {
            id: c.id,
            pinned: c.pinned,
            len: c.len,
            live: c.live,
            deleted: c.deleted,
            checksum: (c.live == 0).then(|| c.checksum()),
        })
    }

    /// The number of rows, including the empty rows of merged chunks.
    #[must_use]
    pub fn row_count(&self) -> usize {
        self.chunks.len()
    }

    /// The body of the chunk in a row, if it is loaded.
    #[must_use]
    pub fn body_at_row(&self, row: usize) -> Option<&ChunkBody> {
        self.chunks.get(row)?.loaded_body()
    }

    /// Loads the body of a chunk; a body that is loaded already stays.
    ///
    /// # Errors
    /// When there is no such chunk, or the counts or the checksum of the body are not those of its row.
    pub fn insert_body(&mut self, chunk: ChunkId, body: ChunkBody) -> Result<(), TimelineError> {
        let row = self.find_row(chunk).ok_or(TimelineError::NoChunk(chunk))?;
        let row = &mut self.chunks[row];
        if let BodyState::Unloaded(checksum) = row.body {
            row.check_body(&body, Some(checksum))?;
            row.body = BodyState::Loaded(Box::new(body));
        }
        Ok(())
    }

    /// Unloads the bodies of all chunks without live tokens, except the last chunk, which may still grow. Only for
    /// callers whose store has committed them and can load them again. Returns how many it has unloaded.
    pub fn unload_pruned(&mut self) -> usize {
        let last = self.chunks.len().saturating_sub(1);
        let mut unloaded = 0;
        for chunk in self.chunks[..last].iter_mut().filter(|c| c.live == 0) {
            if let BodyState::Loaded(body) = &chunk.body {
                chunk.body = BodyState::Unloaded(body.checksum());
                unloaded += 1;
            }
        }
        unloaded
    }

    pub(crate) fn live_index(&self) -> &LiveIndex {
        &self.live
    }

    pub(crate) fn chunk_ref(&self, row: usize) -> ChunkRef<'_> {
        ChunkRef { timeline: self, row_index: row }
    }

    /// The index of a turn in the list of turns.
    pub(crate) fn turn_index(&self, turn: TurnId) -> Option<usize> {
        // Where no turn is missing, the id is the index.
        let guess = turn.0 as usize;
        match self.turns.get(guess) {
            Some(t) if t.id == turn => Some(guess),
            _ => self.turns.binary_search_by_key(&turn, |t| t.id).ok(),
        }
    }

    /// The rows of a turn, including the empty rows of merged chunks.
    pub(crate) fn turn_rows(&self, turn: usize) -> Range<usize> {
        let end = self.turns.get(turn + 1).map_or(self.chunks.len(), |t| t.first_row as usize);
        self.turns[turn].first_row as usize..end
    }

    /// The row of a chunk, which may be the empty row of a merged chunk.
    pub(crate) fn find_row(&self, id: ChunkId) -> Option<usize> {
        let turn = self.turn_index(id.turn).filter(|&t| self.turns[t].role == id.role)?;
        let rows = self.turn_rows(turn);
        // Where no chunk is missing, the index in the turn gives the row.
        let guess = rows.start.checked_add(id.index as usize)?;
        if rows.contains(&guess) && self.chunks[guess].id == id {
            return Some(guess);
        }
        let offset = self.chunks[rows.clone()].binary_search_by_key(&id.index, |c| c.id.index);
        offset.ok().map(|i| rows.start + i)
    }
}

/// The memory of a timeline, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimelineMemory {
    /// Vocabulary ids and text of the loaded tokens.
    pub content: usize,
    /// Rows, brightness, flags and everything else.
    pub overhead: usize,
}
