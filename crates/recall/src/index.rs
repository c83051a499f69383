//! The index of one conversation: a mirror of its timeline that can be searched.
//!
//! It is given the timeline, not changes: what it holds of each chunk is compared with what is there, and only what
//! differs is taken in anew. So whatever happened meanwhile, and whoever did it, it is the index that would be built
//! from nothing. Chunks are found while they have tokens that nobody took back, live or dead.
//!
//! Two vectors stand for a chunk. One is of what it says *alone*. The other is of what it says *in its place*: with the
//! opening of its turn and of the turn that it is paired with, which are what it comes back with. Which text a vector
//! is of is told by a sum; one of what a chunk no longer says counts as missing until it is made again.

use crate::form::Form;
use crate::lexical::Lexical;
use crate::order::Order;
use crate::vectors::{Refused, Vectors};
use halo_core::body::Body;
use halo_core::resurrect::embedding_context;
use halo_core::seams::{EmbedderInfo, Embedding, SeamError};
use halo_core::timeline::{ChunkRef, Timeline};
use halo_core::token::{ChunkId, Position, Role, TurnId};
use jiff::civil::Date;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use xxhash_rust::xxh3::xxh3_64;

/// How many chunks are asked of the store at once.
const FETCH: usize = 1024;

/// What is known of a turn beside its words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Who spoke, by name.
    pub speaker: Option<String>,
    /// On which day.
    pub day: Option<Date>,
}

/// Which of a chunk's two vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum View {
    /// Of what it says.
    Alone,
    /// Of that, and what it belongs to.
    InPlace,
}

impl View {
    /// Both.
    pub const ALL: [View; 2] = [View::Alone, View::InPlace];

    /// The name under which its vectors are kept.
    #[must_use]
    pub fn kept_as(self, embedder: &str) -> String {
        match self {
            View::Alone => embedder.to_owned(),
            View::InPlace => format!("{embedder}/in-place"),
        }
    }
}

/// A text that is to be embedded, and whose vector that will be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The text, as a passage.
    pub text: String,
    /// Its sum.
    pub of: u64,
    /// Which chunks' vector it is; more than one where a question and its answer are all that is said.
    pub targets: Vec<(View, ChunkId)>,
}

/// A conversation that can be searched.
pub struct Index {
    pub(crate) entries: Vec<Entry>,
    pub(crate) lexical: Lexical,
    pub(crate) order: Order,
    /// Who speaks, each once.
    pub(crate) speakers: BTreeSet<String>,
    pub(crate) dense: Option<Dense>,
}

/// What is known of a chunk.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) id: ChunkId,
    start: Position,
    len: usize,
    withdrawn: usize,
    /// What it says; empty where there is nothing to find.
    pub(crate) text: Box<str>,
    pub(crate) told: Told,
    pub(crate) form: Form,
    sum: u64,
}

/// Vectors of all chunks, by row.
pub(crate) struct Dense {
    embedder: EmbedderInfo,
    pub(crate) alone: Vectors,
    pub(crate) in_place: Vectors,
    /// By row and view: what its vector should be of, and what it is of; 0 is nothing.
    sums: Vec<[Sums; 2]>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    wanted: u64,
    kept: u64,
}

/// Where the text of what is not in memory comes from.
pub type Fetch<'a> = dyn FnMut(&[ChunkId]) -> Result<Vec<Body>, SeamError> + 'a;

impl Index {
    /// An index that goes by words, and if there is an embedder, by meaning too.
    #[must_use]
    pub fn new(embedder: Option<EmbedderInfo>) -> Self {
        let dense = embedder.and_then(|embedder| {
            let dimensions = NonZero::new(u16::try_from(embedder.dimensions).ok()?)?;
            let vectors = || Vectors::new(dimensions);
            Some(Dense { embedder, alone: vectors(), in_place: vectors(), sums: Vec::new() })
        });
        let (lexical, order, speakers) = (Lexical::default(), Order::default(), BTreeSet::new());
        Self { entries: Vec::new(), lexical, order, speakers, dense }
    }

    /// How many chunks can be found.
    #[must_use]
    pub fn len(&self) -> usize {
        self.order.rows().len()
    }

    /// Whether there is nothing to find.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What a chunk says; empty where there is nothing to find.
    #[must_use]
    pub fn text(&self, timeline: &Timeline, id: ChunkId) -> &str {
        timeline.chunk(id).and_then(|c| self.entries.get(c.index())).map_or("", |entry| &entry.text)
    }

    /// Bytes in memory.
    #[must_use]
    pub fn memory(&self) -> usize {
        let texts: usize = self.entries.iter().map(|e| e.text.len() + size_of::<Entry>()).sum();
        let dense =
            self.dense.as_ref().map_or(0, |d| d.alone.bytes() + d.in_place.bytes() + d.sums.len() * 32);
        texts + self.lexical.memory() + dense
    }

    /// Becomes the index of that timeline. What is known of a turn beside its words is asked when one of its chunks is
    /// taken in. Returns how many chunks were.
    ///
    /// # Errors
    /// When a text cannot be fetched; then it is as if this had not been asked.
    pub fn follow(
        &mut self,
        timeline: &Timeline,
        told: &dyn Fn(TurnId) -> Told,
        fetch: &mut Fetch<'_>,
    ) -> Result<usize, SeamError> {
        let changed: Vec<ChunkRef<'_>> = timeline.chunks().filter(|&chunk| self.differs(chunk)).collect();
        let mut texts: BTreeMap<ChunkId, String> = BTreeMap::new();
        let away: Vec<ChunkId> =
            changed.iter().filter(|c| !c.is_here() && !c.is_withdrawn()).map(|c| c.id()).collect();
        for some in away.chunks(FETCH) {
            let bodies = fetch(some)?;
            texts.extend(some.iter().zip(&bodies).map(|(&id, body)| (id, body.said_text().into_owned())));
        }
        let places = timeline.places();
        let gone = |row: usize| row >= places || timeline.chunk_at_place(row).is_none();
        let emptied: Vec<usize> =
            (0..self.entries.len()).filter(|&row| !self.entries[row].is_empty() && gone(row)).collect();
        if changed.is_empty() && emptied.is_empty() && places >= self.entries.len() {
            return Ok(0);
        }
        for &chunk in &changed {
            let text = match texts.remove(&chunk.id()) {
                Some(text) => text,
                None if chunk.is_withdrawn() => String::new(),
                None => chunk.text().into_owned(),
            };
            self.take_in(chunk, &text, told(chunk.id().turn));
        }
        emptied.iter().for_each(|&row| self.clear(row));
        self.entries.truncate(places);
        let filled = (0..).zip(&self.entries).filter(|(_, e)| !e.is_empty()).map(|(row, _)| row);
        self.order = Order::new(filled);
        self.speakers.clear();
        for name in self.entries.iter().filter_map(|e| e.told.speaker.as_deref()) {
            if !self.speakers.contains(name) {
                self.speakers.insert(name.to_owned());
            }
        }
        self.expect(timeline);
        Ok(changed.len() + emptied.len())
    }

    /// Whether what is known of a chunk may not be what it is. Tokens never change, so where it lies tells what it says,
    /// unless some were taken back.
    fn differs(&self, chunk: ChunkRef<'_>) -> bool {
        let Some(entry) = self.entries.get(chunk.index()) else { return true };
        let same = (entry.id, entry.start, entry.len, entry.withdrawn)
            == (chunk.id(), chunk.start(), chunk.len(), chunk.withdrawn_len());
        let partly = chunk.withdrawn_len() > 0 && !chunk.is_withdrawn();
        !same || partly && !(chunk.is_here() && *entry.text == *chunk.text())
    }

    fn take_in(&mut self, chunk: ChunkRef<'_>, text: &str, told: Told) {
        let row = chunk.index();
        while self.entries.len() <= row {
            self.entries.push(Entry::nothing());
        }
        let (start, len, withdrawn) = (chunk.start(), chunk.len(), chunk.withdrawn_len());
        let form = Form::of(text);
        let mut entry =
            Entry { id: chunk.id(), start, len, withdrawn, text: text.into(), told, form, sum: 0 };
        let spoken = entry.spoken();
        self.lexical.put(row as u32, &spoken);
        entry.sum = xxh3_64(spoken.as_bytes());
        self.entries[row] = entry;
    }

    fn clear(&mut self, row: usize) {
        self.lexical.remove(row as u32);
        self.entries[row] = Entry::nothing();
    }

    /// Notes of what each vector should be, and lets go of those that are of something else.
    fn expect(&mut self, timeline: &Timeline) {
        let Some(dense) = &mut self.dense else { return };
        let sum = |id: ChunkId| {
            let entry = timeline.chunk(id).and_then(|c| self.entries.get(c.index()));
            entry.filter(|e| !e.is_empty()).map_or(0, |e| e.sum)
        };
        dense.sums.resize(self.entries.len().max(dense.alone.pushed()), <[Sums; 2]>::default());
        for (row, sums) in dense.sums.iter_mut().enumerate() {
            let entry = self.entries.get(row).filter(|e| !e.is_empty());
            let [alone, in_place] = entry.map_or([0, 0], |entry| {
                let context = embedding_context(timeline, entry.id, dense.embedder.max_tokens);
                let parts: Vec<u64> = context.into_iter().map(sum).filter(|&sum| sum != 0).collect();
                let bytes: Vec<u8> = parts.iter().flat_map(|sum| sum.to_le_bytes()).collect();
                // What stands alone is one text, and needs one vector only.
                [entry.sum, if parts.len() == 1 { entry.sum } else { xxh3_64(&bytes) }]
            });
            for (sums, wanted) in sums.iter_mut().zip([alone, in_place]) {
                *sums = Sums { wanted, kept: if sums.kept == wanted { sums.kept } else { 0 } };
            }
        }
        for row in 0..dense.alone.pushed() {
            for view in View::ALL {
                if dense.sums[row][view as usize].kept == 0 {
                    // It exists, since it was pushed.
                    let _ = dense.of(view).remove(row as u32);
                }
            }
        }
    }

    /// Takes vectors in that were made before. Those of something else than what is said now are passed over.
    ///
    /// # Errors
    /// When a vector is of other dimensions than the embedder's, or no vector at all.
    pub fn admit(
        &mut self,
        view: View,
        embeddings: &[Embedding],
        timeline: &Timeline,
    ) -> Result<usize, Refused> {
        let Some(dense) = &mut self.dense else { return Ok(0) };
        let mut taken = 0;
        for embedding in embeddings {
            let Some(row) = timeline.chunk(embedding.chunk).map(ChunkRef::index) else { continue };
            let Some(sums) = dense.sums.get(row).map(|sums| sums[view as usize]) else { continue };
            if sums.wanted != 0 && sums.wanted == embedding.of {
                dense.put(row, view, &embedding.vector)?;
                dense.sums[row][view as usize].kept = embedding.of;
                taken += 1;
            }
        }
        Ok(taken)
    }

    /// How many vectors are missing.
    #[must_use]
    pub fn missing(&self) -> usize {
        let missing = |sums: &[Sums; 2]| sums.iter().filter(|s| s.wanted != s.kept).count();
        self.dense.as_ref().map_or(0, |dense| dense.sums.iter().map(missing).sum())
    }

    /// What is to be embedded next: the texts of up to `most` chunks whose vectors are missing, in order.
    #[must_use]
    pub fn wanted(&self, timeline: &Timeline, most: usize) -> Vec<Wanted> {
        let Some(dense) = &self.dense else { return Vec::new() };
        let mut wanted: Vec<Wanted> = Vec::new();
        let mut places: BTreeMap<u64, usize> = BTreeMap::new();
        let lacks = |row: &usize| dense.sums[*row].iter().any(|s| s.wanted != s.kept);
        for row in (0..dense.sums.len()).filter(lacks).take(most) {
            for view in View::ALL {
                let Sums { wanted: of, kept } = dense.sums[row][view as usize];
                if of == kept {
                    continue;
                }
                let id = self.entries[row].id;
                let place = *places.entry(of).or_insert_with(|| {
                    let text = self.passage(timeline, id, view, dense.embedder.max_tokens);
                    wanted.push(Wanted { text, of, targets: Vec::new() });
                    wanted.len() - 1
                });
                wanted[place].targets.push((view, id));
            }
        }
        wanted
    }

    fn passage(&self, timeline: &Timeline, id: ChunkId, view: View, limit: usize) -> String {
        let context = match view {
            View::Alone => vec![id],
            View::InPlace => embedding_context(timeline, id, limit),
        };
        let entries = context.into_iter().filter_map(|id| self.entries.get(timeline.chunk(id)?.index()));
        let texts: Vec<String> = entries.filter(|e| !e.is_empty()).map(Entry::spoken).collect();
        texts.join("\n")
    }
}

impl Dense {
    fn of(&mut self, view: View) -> &mut Vectors {
        match view {
            View::Alone => &mut self.alone,
            View::InPlace => &mut self.in_place,
        }
    }

    fn put(&mut self, row: usize, view: View, vector: &[f32]) -> Result<(), Refused> {
        let dimensions = self.embedder.dimensions;
        for vectors in [&mut self.alone, &mut self.in_place] {
            while vectors.pushed() <= row {
                let made = vectors.push(&vec![0.0; dimensions])?;
                vectors.remove(made)?;
            }
        }
        self.of(view).replace(row as u32, vector)
    }
}

impl Entry {
    fn nothing() -> Self {
        Self {
            id: ChunkId { turn: TurnId(0), sentence: 0, role: Role::System },
            start: Position(0),
            len: 0,
            withdrawn: 0,
            text: "".into(),
            told: Told::default(),
            form: Form::default(),
            sum: 0,
        }
    }

    /// Whether there is nothing to find.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.trim().is_empty()
    }

    /// What it says, and who.
    fn spoken(&self) -> String {
        match &self.told.speaker {
            Some(name) if !self.is_empty() => format!("{name}: {}", self.text),
            _ => self.text.clone().into(),
        }
    }
}
