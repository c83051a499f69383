//! Every token ever spoken in one conversation, in order. Only a flag says whether the model sees it.
//!
//! A timeline is a list of turns and a list of chunks; the tokens of a chunk are its [body](crate::body). Rows
//! stay in memory for ever. The body of a chunk of which nothing is live may be away, in a store, until a change
//! asks for it: so ten million tokens cost what their chunks cost, and opening them what the window costs. How a
//! timeline changes is in [`apply`](crate::apply).

use crate::body::Body;
use crate::change::{Run, Tally};
use crate::order::LiveIndex;
use crate::token::{Brightness, ChunkId, Flags, Position, Role, TokenId, TurnId};
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

/// Every token of a conversation, and which of them are live.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// How many tokens were ever spoken.
    pub(crate) len: u64,
    pub(crate) turns: Vec<Turn>,
    /// In order of birth, and so by turn and sentence. A chunk that was merged away keeps its place, empty: its
    /// name is spent.
    pub(crate) chunks: Vec<Chunk>,
    pub(crate) live: LiveIndex,
    pub(crate) revision: Revision,
}

/// How many changes a store has of a timeline. Two that are equal may have come there by different ways.
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
    /// Its number; later turns have larger ones.
    pub id: TurnId,
    /// Who speaks.
    pub role: Role,
    /// The place of its first chunk in the timeline's list.
    pub first: u32,
}

/// A chunk's row. Tokens `start .. start + len` are its own.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Chunk {
    pub id: ChunkId,
    pub pinned: bool,
    pub start: Position,
    pub len: u32,
    pub live: u32,
    pub withdrawn: u32,
    pub body: Held,
}

/// Where the tokens of a chunk are.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Held {
    Here(Box<Body>),
    /// In a store; this is the sum that they are known by. So it is for a name without tokens.
    Away(u64),
}

/// What a store keeps of a chunk beside its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Its name.
    pub id: ChunkId,
    /// Whether it is immune to pruning.
    pub pinned: bool,
    /// Its tokens.
    pub len: u32,
    /// How many of them are live.
    pub live: u32,
    /// How many of them the user took back.
    pub withdrawn: u32,
    /// The sum of its body, where nothing of it is live and the body may be away.
    pub sum: Option<u64>,
}

/// What two equal timelines share and, as far as anyone will ever see, two different ones do not.
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

/// One token, as it stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenRef<'a> {
    /// Its birth index.
    pub position: Position,
    /// Its number in the vocabulary.
    pub id: TokenId,
    /// What it adds to the text.
    pub text: &'a str,
    /// How much the model has looked at it; for a dead one, what it left with.
    pub brightness: Brightness,
    /// Dead, withdrawn, part of a tool's result.
    pub flags: Flags,
    /// The chunk that holds it.
    pub chunk: ChunkId,
}

impl Timeline {
    /// A conversation in which nothing has been said.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many tokens were ever spoken.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether nothing was ever spoken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many of the tokens are live.
    #[must_use]
    pub fn live_len(&self) -> usize {
        self.live.total()
    }

    /// How many changes had been committed when it was loaded, and since: what a store compares before it writes.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision.0
    }

    /// Set by a store that has loaded it.
    pub fn set_revision(&mut self, revision: u64) {
        self.revision = Revision(revision);
    }

    /// Where the next token will stand.
    #[must_use]
    pub fn next_position(&self) -> Position {
        Position(self.len)
    }

    /// The number of the next turn.
    #[must_use]
    pub fn next_turn(&self) -> TurnId {
        self.turns.last().map_or(TurnId(0), |t| t.id.next())
    }

    /// The number of the next new chunk of a turn: no name is used twice.
    #[must_use]
    pub fn next_sentence(&self, turn: TurnId) -> u32 {
        let places = self.turn_index(turn).map_or(0..0, |t| self.places_of_turn(t));
        self.chunks[places].last().map_or(0, |c| c.id.sentence.saturating_add(1))
    }

    /// The messages, in order.
    #[must_use]
    pub fn turns(&self) -> &[Turn] {
        &self.turns
    }

    /// One token; none where none was spoken yet, or where the body of its chunk is away.
    #[must_use]
    pub fn token(&self, position: Position) -> Option<TokenRef<'_>> {
        let chunk = self.chunk_of(position).filter(|c| c.is_here())?;
        let (body, i) = (chunk.body(), chunk.index_of(position));
        Some(TokenRef {
            position,
            id: body.ids[i],
            text: body.text(i..i + 1),
            brightness: body.brightness[i],
            flags: body.flags[i],
            chunk: chunk.id(),
        })
    }

    /// The chunk of that name, if it holds any token.
    #[must_use]
    pub fn chunk(&self, id: ChunkId) -> Option<ChunkRef<'_>> {
        self.find(id).filter(|&i| self.chunks[i].len > 0).map(|i| self.chunk_at(i))
    }

    /// The chunk at a place among all that ever were, if it holds any token.
    #[must_use]
    pub fn chunk_at_place(&self, place: usize) -> Option<ChunkRef<'_>> {
        self.chunks.get(place).filter(|c| c.len > 0).map(|_| self.chunk_at(place))
    }

    /// The chunk that holds a token.
    #[must_use]
    pub fn chunk_of(&self, position: Position) -> Option<ChunkRef<'_>> {
        if position >= self.next_position() {
            return None;
        }
        // Empty chunks stand where the one before them ends, so none lies between a token and its chunk.
        let after = self.chunks.partition_point(|c| c.start <= position);
        Some(self.chunk_at(after.checked_sub(1)?))
    }

    /// All chunks that hold tokens, live and dead, in order of birth.
    pub fn chunks(&self) -> impl DoubleEndedIterator<Item = ChunkRef<'_>> {
        (0..self.chunks.len()).filter(|&i| self.chunks[i].len > 0).map(|i| self.chunk_at(i))
    }

    /// The chunks of which something is live, in order, at the cost of those alone.
    pub fn live_chunks(&self) -> impl Iterator<Item = ChunkRef<'_>> {
        let (mut seen, mut next) = (0, 0);
        std::iter::from_fn(move || {
            // Mostly the next live chunk is a neighbour; only over a gap is it worth asking the index.
            let leaf = match self.chunks.get(next) {
                Some(row) if row.live > 0 => next,
                _ => self.live.find(seen)?.0,
            };
            let chunk = self.chunk_at(leaf);
            seen += chunk.live_len();
            next = leaf + 1;
            Some(chunk)
        })
    }

    /// The chunks of one turn that hold tokens.
    pub fn turn_chunks(&self, turn: TurnId) -> impl Iterator<Item = ChunkRef<'_>> {
        let places = self.turn_index(turn).map_or(0..0, |t| self.places_of_turn(t));
        places.filter(|&i| self.chunks[i].len > 0).map(|i| self.chunk_at(i))
    }

    /// The opening of the turn that `chunk` is paired with: for the user's turn the answer's, for an
    /// answer the question's.
    #[must_use]
    pub fn partner(&self, chunk: ChunkId) -> Option<ChunkRef<'_>> {
        let turn = self.turn_index(chunk.turn)?;
        let other = self.paired_turn(turn)?;
        self.chunk(ChunkId::new(self.turns[other].role, self.turns[other].id, 0))
    }

    /// The turn that answers a user's turn.
    #[must_use]
    pub fn answer_to(&self, turn: TurnId) -> Option<TurnId> {
        let turn = self.turn_index(turn).filter(|&t| self.turns[t].role == Role::User)?;
        self.paired_turn(turn).map(|answer| self.turns[answer].id)
    }

    /// The user's turn that a turn answers.
    #[must_use]
    pub fn question_of(&self, turn: TurnId) -> Option<TurnId> {
        let turn = self.turn_index(turn).filter(|&t| self.turns[t].role == Role::Assistant)?;
        self.paired_turn(turn).map(|question| self.turns[question].id)
    }

    /// The turn that is the answer to a question, or the question to an answer: its neighbour, where turns
    /// that were taken back, or in which nothing was said, do not count.
    pub(crate) fn paired_turn(&self, turn: usize) -> Option<usize> {
        let said = |&t: &usize| self.chunks[self.places_of_turn(t)].iter().any(|c| c.len > c.withdrawn);
        let (other, wanted) = match self.turns[turn].role {
            Role::System => return None,
            Role::User => ((turn + 1..self.turns.len()).find(said)?, Role::Assistant),
            Role::Assistant => ((0..turn).rev().find(said)?, Role::User),
        };
        (self.turns[other].role == wanted).then_some(other)
    }

    /// Whether the chunk is part of the system prompt: spoken by the system before anyone else spoke.
    #[must_use]
    pub fn is_system_prompt(&self, chunk: ChunkId) -> bool {
        let silent = |t: usize| self.turns[t].role == Role::System || self.places_of_turn(t).is_empty();
        chunk.role == Role::System && self.turn_index(chunk.turn).is_some_and(|turn| (0..turn).all(silent))
    }

    /// A value that two timelines share if and only if they are equal: tokens, flags, brightness, chunks,
    /// pins and tallies, in memory or away. It is the same on every machine and in every later version.
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
            put(&chunk.id.sentence.to_le_bytes());
            put(&chunk.len.to_le_bytes());
            put(&chunk.sum().to_le_bytes());
        }
        StateHash(hash.digest128())
    }

    /// Bytes that the timeline holds, and how many of them are the tokens' ids and text.
    #[must_use]
    pub fn memory(&self) -> Memory {
        let rows = self.turns.capacity() * size_of::<Turn>()
            + self.chunks.capacity() * (size_of::<Chunk>() + size_of::<u32>());
        let bodies = self.chunks.iter().filter_map(Chunk::here).map(Body::memory);
        let (content, columns) = bodies.fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        Memory { content, rest: rows + columns }
    }

    /// What a store keeps of the chunks at these places, beside their bodies: names without tokens too.
    pub fn heads(&self, places: Range<usize>) -> impl Iterator<Item = Head> + '_ {
        self.chunks[places].iter().map(|c| Head {
            id: c.id,
            pinned: c.pinned,
            len: c.len,
            live: c.live,
            withdrawn: c.withdrawn,
            sum: (c.live == 0).then(|| c.sum()),
        })
    }

    /// How many places the list of chunks has, names without tokens included.
    #[must_use]
    pub fn places(&self) -> usize {
        self.chunks.len()
    }

    /// The body of the chunk at a place, if it is in memory.
    #[must_use]
    pub fn body_at(&self, place: usize) -> Option<&Body> {
        self.chunks.get(place)?.here()
    }

    /// Takes the body of a chunk back into memory.
    ///
    /// # Errors
    /// When there is no such chunk, or it is not this one's body.
    pub fn admit(&mut self, chunk: ChunkId, body: Body) -> Result<(), String> {
        let place = self.find(chunk).ok_or_else(|| format!("there is no chunk {chunk}"))?;
        let row = &mut self.chunks[place];
        if let Held::Away(sum) = row.body {
            row.fits(&body, Some(sum))?;
            row.body = Held::Here(Box::new(body));
        }
        Ok(())
    }

    /// Lets go of the bodies of all chunks of which nothing is live, but for the last: it may go on. Only for who
    /// can bring them back: a store has committed them. Returns how many it let go of.
    pub fn release_dead(&mut self) -> usize {
        let last = self.chunks.len().saturating_sub(1);
        let mut released = 0;
        for chunk in self.chunks[..last].iter_mut().filter(|c| c.live == 0) {
            if let Held::Here(body) = &chunk.body {
                chunk.body = Held::Away(body.sum());
                released += 1;
            }
        }
        released
    }

    /// Every invariant that the timeline can know of itself; the error says which is broken and where.
    ///
    /// # Errors
    /// When the timeline contradicts itself, which no sequence of changes can bring about.
    pub fn check(&self) -> Result<(), String> {
        self.check_turns()?;
        for (place, chunk) in self.chunks.iter().enumerate() {
            if self.find(chunk.id) != Some(place) {
                return Err(format!("{} is not found under its name", chunk.id));
            }
            match &chunk.body {
                Held::Here(body) => {
                    chunk.fits(body, None)?;
                    let n = body.len();
                    if [body.brightness.len(), body.flags.len(), body.ends.len()] != [n; 3] {
                        return Err(format!("columns of {} differ in length", chunk.id));
                    }
                    let end = body.ends.last().map_or(0, |&e| e as usize);
                    if !body.ends.is_sorted() || end != body.text.len() {
                        return Err(format!("the ends of the tokens of {} do not fit the text", chunk.id));
                    }
                    if body.brightness.iter().any(|b| !b.0.is_finite()) {
                        return Err(format!("a brightness in {} is not a number", chunk.id));
                    }
                }
                Held::Away(_) if chunk.live > 0 => return Err(format!("{} is live and away", chunk.id)),
                Held::Away(_) => {}
            }
        }
        if LiveIndex::build(self.chunks.iter().map(|c| c.live)).as_ref() != Some(&self.live) {
            return Err("the live index differs from one built anew".into());
        }
        Ok(())
    }

    /// Turns and chunks are in order, and each chunk stands where the one before it ends.
    fn check_turns(&self) -> Result<(), String> {
        if let Some(pair) = self.turns.windows(2).find(|w| w[0].id >= w[1].id || w[0].first > w[1].first) {
            return Err(format!("turn {} does not come after turn {}", pair[1].id.0, pair[0].id.0));
        }
        let mut end = Position(0);
        for chunk in &self.chunks {
            if chunk.start != end {
                return Err(format!("{} does not stand where the chunk before it ends", chunk.id));
            }
            end = chunk.start.plus(chunk.len as usize);
        }
        if end != self.next_position() {
            return Err(format!("chunks end at {}, tokens at {}", end.0, self.len));
        }
        if self.turns.first().map_or(self.chunks.len(), |t| t.first as usize) != 0 {
            return Err("chunks stand before the first turn".into());
        }
        for (turn, at) in self.turns.iter().zip(0..) {
            let own = self.chunks.get(self.places_of_turn(at)).unwrap_or_default();
            if own.iter().any(|c| (c.id.turn, c.id.role) != (turn.id, turn.role))
                || own.windows(2).any(|w| w[0].id.sentence >= w[1].id.sentence)
                || turn.first as usize > self.chunks.len()
            {
                return Err(format!("the chunks of turn {} are not its own, in order", turn.id.0));
            }
        }
        Ok(())
    }

    pub(crate) fn live_index(&self) -> &LiveIndex {
        &self.live
    }

    pub(crate) fn chunk_at(&self, index: usize) -> ChunkRef<'_> {
        ChunkRef { timeline: self, index }
    }

    /// The place of a turn in the list of turns.
    pub(crate) fn turn_index(&self, turn: TurnId) -> Option<usize> {
        // Unless an import left gaps, turns are numbered by their place.
        let place = turn.0 as usize;
        match self.turns.get(place) {
            Some(t) if t.id == turn => Some(place),
            _ => self.turns.binary_search_by_key(&turn, |t| t.id).ok(),
        }
    }

    /// The places of a turn's chunks, names without tokens included.
    pub(crate) fn places_of_turn(&self, turn: usize) -> Range<usize> {
        let end = self.turns.get(turn + 1).map_or(self.chunks.len(), |t| t.first as usize);
        self.turns[turn].first as usize..end
    }

    /// The place of a name, with or without tokens.
    pub(crate) fn find(&self, id: ChunkId) -> Option<usize> {
        let turn = self.turn_index(id.turn).filter(|&t| self.turns[t].role == id.role)?;
        let places = self.places_of_turn(turn);
        // Unless names were left out, chunks are numbered by their place.
        let guess = places.start.checked_add(id.sentence as usize)?;
        if places.contains(&guess) && self.chunks[guess].id == id {
            return Some(guess);
        }
        let found = self.chunks[places.clone()].binary_search_by_key(&id.sentence, |c| c.id.sentence);
        found.ok().map(|i| places.start + i)
    }
}

/// Where a timeline's memory goes, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Ids and text.
    pub content: usize,
    /// Everything else.
    pub rest: usize,
}

impl Chunk {
    pub(crate) fn here(&self) -> Option<&Body> {
        match &self.body {
            Held::Here(body) => Some(body),
            Held::Away(_) => None,
        }
    }

    /// The sum of its body, wherever that is.
    fn sum(&self) -> u64 {
        match &self.body {
            Held::Here(body) => body.sum(),
            Held::Away(sum) => *sum,
        }
    }

    /// Whether a body is the one that this row speaks of.
    pub(crate) fn fits(&self, body: &Body, sum: Option<u64>) -> Result<(), String> {
        if body.len() != self.len as usize || body.counts() != (self.live, self.withdrawn) {
            return Err(format!("the tokens of {} are not as many as it counts", self.id));
        }
        if sum.is_some_and(|sum| sum != body.sum()) {
            return Err(format!("the tokens of {} are not those that were stored", self.id));
        }
        Ok(())
    }
}

impl Run {
    /// The positions of its tokens.
    pub fn positions(self) -> impl Iterator<Item = Position> {
        (self.start.0..self.start.0 + u64::from(self.len)).map(Position)
    }
}

/// A chunk of a timeline, as it stands.
#[derive(Clone, Copy, Debug)]
pub struct ChunkRef<'a> {
    timeline: &'a Timeline,
    index: usize,
}

impl<'a> ChunkRef<'a> {
    fn row(self) -> &'a Chunk {
        &self.timeline.chunks[self.index]
    }

    /// Its place in the timeline's list of chunks.
    #[must_use]
    pub fn index(self) -> usize {
        self.index
    }

    /// Whether its tokens are in memory. They always are while any of them is live; before anyone asks a dead
    /// chunk for its text or light, a store brings them ([`Timeline::admit`]).
    #[must_use]
    pub fn is_here(self) -> bool {
        self.row().here().is_some()
    }

    /// Its tokens.
    ///
    /// # Panics
    /// Here and below, where text, light or flags of single tokens are asked for: when they are away.
    #[must_use]
    pub fn body(self) -> &'a Body {
        self.row().here().unwrap_or_else(|| panic!("the tokens of {} are away in the store", self.id()))
    }

    /// Where a token stands in the body.
    fn index_of(self, position: Position) -> usize {
        (position.0 - self.start().0) as usize
    }

    /// Where a run of its tokens stands in the body.
    pub(crate) fn local(self, run: Run) -> Range<usize> {
        let start = self.index_of(run.start);
        start..start + run.len as usize
    }

    /// The ids of some of its tokens.
    #[must_use]
    pub fn ids(self, run: Run) -> &'a [TokenId] {
        &self.body().ids[self.local(run)]
    }

    /// The brightness of some of its tokens.
    #[must_use]
    pub fn brightness(self, run: Run) -> &'a [Brightness] {
        &self.body().brightness[self.local(run)]
    }

    /// The text of some of its tokens.
    #[must_use]
    pub fn text_of(self, run: Run) -> &'a str {
        self.body().text(self.local(run))
    }

    /// Its name.
    #[must_use]
    pub fn id(self) -> ChunkId {
        self.row().id
    }

    /// Its first token.
    #[must_use]
    pub fn start(self) -> Position {
        self.row().start
    }

    /// All its tokens.
    #[must_use]
    pub fn run(self) -> Run {
        Run { start: self.row().start, len: self.row().len }
    }

    /// How many tokens it has, live or not.
    #[must_use]
    pub fn len(self) -> usize {
        self.row().len as usize
    }

    /// Whether it has no tokens; never so for a chunk that a timeline hands out.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.row().len == 0
    }

    /// How many of its tokens are live.
    #[must_use]
    pub fn live_len(self) -> usize {
        self.row().live as usize
    }

    /// How many of its tokens were taken back by the user.
    #[must_use]
    pub fn withdrawn_len(self) -> usize {
        self.row().withdrawn as usize
    }

    /// How many tokens would come back if it were resurrected.
    #[must_use]
    pub fn dead_len(self) -> usize {
        self.len() - self.live_len() - self.withdrawn_len()
    }

    /// Whether what it said was forgotten for good; known only while its tokens are in memory.
    #[must_use]
    pub fn is_forgotten(self) -> bool {
        self.is_here() && self.body().ids.contains(&TokenId::FORGOTTEN)
    }

    /// Whether any of its tokens is live.
    #[must_use]
    pub fn is_live(self) -> bool {
        self.row().live > 0
    }

    /// Whether the user has taken it back whole.
    #[must_use]
    pub fn is_withdrawn(self) -> bool {
        self.row().withdrawn == self.row().len
    }

    /// Whether it is immune to pruning.
    #[must_use]
    pub fn is_pinned(self) -> bool {
        self.row().pinned
    }

    /// What it has gathered in its life.
    #[must_use]
    pub fn tally(self) -> Tally {
        self.body().tally
    }

    /// What it says in the window: the text of its live tokens, without what only frames it for the model.
    #[must_use]
    pub fn live_text(self) -> Cow<'a, str> {
        let body = self.body();
        if body.flags.iter().all(|f| f.is_live() && !f.has(Flags::FRAME)) {
            return body.text.as_str().into();
        }
        self.runs(|f| f.is_live() && !f.has(Flags::FRAME)).map(|run| self.text_of(run)).collect()
    }

    /// Its text, live or not, without what the user took back of it (of a chunk that was taken back whole, all of
    /// it), and without what only frames it for the model.
    #[must_use]
    pub fn text(self) -> Cow<'a, str> {
        let body = self.body();
        let whole = self.withdrawn_len() == 0 || self.is_withdrawn();
        if whole && !body.flags.iter().any(|f| f.has(Flags::FRAME)) {
            return body.text.as_str().into();
        }
        let said = |f: Flags| !f.has(Flags::FRAME) && (whole || !f.has(Flags::WITHDRAWN));
        self.runs(said).map(|run| self.text_of(run)).collect()
    }

    /// The brightness of its live tokens, or of all where none is live, in pieces. What only frames it for the model
    /// does not count, where anything else is there.
    pub fn lights(self) -> impl Iterator<Item = &'a [Brightness]> {
        let live = self.is_live();
        let counts = move |f: Flags| f.is_live() || !live;
        let flags = &self.body().flags;
        let framed = flags.iter().any(|f| f.has(Flags::FRAME));
        let said = framed && flags.iter().any(|&f| counts(f) && !f.has(Flags::FRAME));
        let whole = !said && (!live || self.live_len() == self.len());
        let parts = (!whole).then(|| self.runs(move |f| counts(f) && !(said && f.has(Flags::FRAME))));
        let runs = whole.then(|| self.run()).into_iter().chain(parts.into_iter().flatten());
        runs.map(move |run| self.brightness(run))
    }

    /// Its brightest token: among the live ones, or among all where none is live.
    #[must_use]
    pub fn peak(self) -> Brightness {
        let brighter = |a: f32, b: &Brightness| if b.0 > a { b.0 } else { a };
        let mut lanes = [f32::NEG_INFINITY; 16];
        let mut peak = f32::NEG_INFINITY;
        for lights in self.lights() {
            let blocks = lights.chunks_exact(16);
            peak = blocks.remainder().iter().fold(peak, brighter);
            for block in blocks {
                lanes.iter_mut().zip(block).for_each(|(lane, b)| *lane = brighter(*lane, b));
            }
        }
        Brightness(lanes.iter().fold(peak, |a, &b| if b > a { b } else { a }))
    }

    /// The runs of tokens whose flags are as asked.
    pub(crate) fn runs(self, wanted: impl Fn(Flags) -> bool) -> impl Iterator<Item = Run> {
        let start = self.start();
        let flags = &self.body().flags;
        let mut at = 0;
        std::iter::from_fn(move || {
            at += flags[at..].iter().position(|&f| wanted(f))?;
            let len = flags[at..].iter().position(|&f| !wanted(f)).unwrap_or(flags.len() - at);
            let run = Run { start: start.plus(at), len: len as u32 };
            at += len;
            Some(run)
        })
    }

    /// Its live tokens, as runs of neighbours.
    pub fn live_runs(self) -> impl Iterator<Item = Run> + use<'a> {
        let whole = self.live_len() == self.len();
        let parts = (!whole).then(|| self.runs(Flags::is_live));
        whole.then(|| self.run()).into_iter().chain(parts.into_iter().flatten())
    }

    /// The position of its `n`-th live token.
    pub(crate) fn live_position(self, n: usize) -> Option<Position> {
        if self.live_len() == self.len() {
            return (n < self.len()).then(|| self.start().plus(n));
        }
        let flags = &self.body().flags;
        let (i, _) = flags.iter().enumerate().filter(|(_, f)| f.is_live()).nth(n)?;
        Some(self.start().plus(i))
    }

    /// How many live tokens of the chunk stand before `position`, if that one is live.
    pub(crate) fn live_rank(self, position: Position) -> Option<usize> {
        let i = self.index_of(position);
        if self.live_len() == self.len() {
            return Some(i);
        }
        if !self.is_live() {
            return None;
        }
        let flags = &self.body().flags;
        flags[i].is_live().then(|| flags[..i].iter().filter(|f| f.is_live()).count())
    }
}
