//! The search index of one conversation: texts, terms and vectors of all chunks.
//!
//! [`RecallIndex::sync`] takes the timeline, not changes: it compares each chunk with the index and updates those that
//! differ. So the index equals one built from scratch, whatever changed the timeline meanwhile. All chunks with tokens
//! that are not deleted are indexed, live or pruned.
//!
//! A chunk has two vectors. One is of its own text. The other is of its text *in context*: with the opening of its turn
//! and of the turn that it is paired with, which are resurrected with it. A checksum states which text a vector is of; a
//! vector of an older text counts as missing until it is computed again.

use crate::lexical::LexicalIndex;
use crate::row_order::RowOrder;
use crate::text_features::TextFeatures;
use crate::vector_index::{VectorError, VectorIndex};
use halo_core::Error;
use halo_core::chunk_body::ChunkBody;
use halo_core::embedder::EmbedderInfo;
use halo_core::resurrect::embedding_context;
use halo_core::store::Embedding;
use halo_core::timeline::{ChunkRef, Timeline};
use halo_core::token::{ChunkId, Position, Role, TurnId};
use jiff::civil::Date;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use xxhash_rust::xxh3::xxh3_64;

/// Chunks whose bodies are fetched from the store at once.
const FETCH_BATCH: usize = 1024;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TurnMeta {
    /// The name of the speaker.
    pub speaker: Option<String>,
    pub day: Option<Date>,
}

/// Which of the two vectors of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EmbeddingView {
    ChunkOnly,
    /// With the chunks that it is resurrected with.
    InContext,
}

impl EmbeddingView {
    pub const ALL: [EmbeddingView; 2] = [EmbeddingView::ChunkOnly, EmbeddingView::InContext];

    /// The name under which the store has these vectors.
    #[must_use]
    pub fn storage_name(self, embedder: &str) -> String {
        match self {
            EmbeddingView::ChunkOnly => embedder.to_owned(),
            EmbeddingView::InContext => format!("{embedder}/in-place"),
        }
    }
}

/// A text to embed, and the vectors that it gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbedJob {
    /// Without the passage prefix of the embedder.
    pub text: String,
    pub checksum: u64,
    /// The vectors that it is for. A question and its answer share their text in context, so there may be several.
    pub targets: Vec<(EmbeddingView, ChunkId)>,
}

/// The search index of one conversation. Row numbers are those of the timeline.
pub struct RecallIndex {
    pub(crate) entries: Vec<IndexedChunk>,
    pub(crate) lexical: LexicalIndex,
    pub(crate) order: RowOrder,
    pub(crate) speakers: BTreeSet<String>,
    pub(crate) dense: Option<DenseIndex>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct IndexedChunk {
    pub(crate) id: ChunkId,
    start: Position,
    len: usize,
    deleted: usize,
    /// Empty for a deleted chunk.
    pub(crate) text: Box<str>,
    pub(crate) turn_meta: TurnMeta,
    pub(crate) features: TextFeatures,
    checksum: u64,
}

/// The vectors of all chunks, by row.
pub(crate) struct DenseIndex {
    embedder: EmbedderInfo,
    pub(crate) chunk_only: VectorIndex,
    pub(crate) in_context: VectorIndex,
    /// By row and view.
    checksums: Vec<[VectorChecksums; 2]>,
}

impl DenseIndex {
    pub(crate) fn embedder_name(&self) -> &str {
        &self.embedder.name
    }
}

/// Checksums of texts; 0 stands for no text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct VectorChecksums {
    /// The text that the vector should be of.
    expected: u64,
    /// The text that the vector is of.
    stored: u64,
}

/// Fetches the bodies of unloaded chunks from the store.
pub type FetchBodies<'a> = dyn FnMut(&[ChunkId]) -> Result<Vec<ChunkBody>, Error> + 'a;

impl RecallIndex {
    /// An empty index. Without an embedder it has no vectors.
    #[must_use]
    pub fn new(embedder: Option<EmbedderInfo>) -> Self {
        let dense = embedder.and_then(|embedder| {
            let dimensions = NonZero::new(u16::try_from(embedder.dimensions).ok()?)?;
            let vectors = || VectorIndex::new(dimensions);
            Some(DenseIndex { embedder, chunk_only: vectors(), in_context: vectors(), checksums: Vec::new() })
        });
        let (lexical, order, speakers) = (LexicalIndex::default(), RowOrder::default(), BTreeSet::new());
        Self { entries: Vec::new(), lexical, order, speakers, dense }
    }

    /// The number of chunks that can be found.
    #[must_use]
    pub fn len(&self) -> usize {
        self.order.rows().len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The indexed text of a chunk; empty for a deleted chunk.
    #[must_use]
    pub fn text(&self, timeline: &Timeline, id: ChunkId) -> &str {
        timeline.chunk(id).and_then(|c| self.entries.get(c.row_index())).map_or("", |entry| &entry.text)
    }

    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let texts: usize = self.entries.iter().map(|e| e.text.len() + size_of::<IndexedChunk>()).sum();
        let dense = self.dense.as_ref().map_or(0, |d| {
            d.chunk_only.memory_bytes() + d.in_context.memory_bytes() + d.checksums.len() * 32
        });
        texts + self.lexical.memory_bytes() + dense
    }

    /// Makes the index equal to a timeline; returns how many chunks changed. `turn_meta` is called for the turns of
    /// changed chunks.
    pub fn sync(
        &mut self,
        timeline: &Timeline,
        turn_meta: &dyn Fn(TurnId) -> TurnMeta,
        fetch: &mut FetchBodies<'_>,
    ) -> Result<usize, Error> {
        let changed: Vec<ChunkRef<'_>> = timeline.chunks().filter(|&chunk| self.is_stale(chunk)).collect();
        let mut texts: BTreeMap<ChunkId, String> = BTreeMap::new();
        let unloaded: Vec<ChunkId> =
            changed.iter().filter(|c| !c.is_loaded() && !c.is_deleted()).map(|c| c.id()).collect();
        for batch in unloaded.chunks(FETCH_BATCH) {
            let bodies = fetch(batch)?;
            texts.extend(batch.iter().zip(&bodies).map(|(&id, body)| (id, body.message_text().into_owned())));
        }
        let row_count = timeline.row_count();
        let has_no_chunk = |row: usize| row >= row_count || timeline.chunk_at_row(row).is_none();
        let emptied: Vec<usize> = (0..self.entries.len())
            .filter(|&row| !self.entries[row].is_empty() && has_no_chunk(row))
            .collect();
        if changed.is_empty() && emptied.is_empty() && row_count >= self.entries.len() {
            return Ok(0);
        }
        for &chunk in &changed {
            let text = match texts.remove(&chunk.id()) {
                Some(text) => text,
                None if chunk.is_deleted() => String::new(),
                None => chunk.text().into_owned(),
            };
            self.index_chunk(chunk, &text, turn_meta(chunk.id().turn));
        }
        emptied.iter().for_each(|&row| self.clear_row(row));
        self.entries.truncate(row_count);
        let filled = (0..).zip(&self.entries).filter(|(_, e)| !e.is_empty()).map(|(row, _)| row);
        self.order = RowOrder::new(filled);
        self.speakers.clear();
        for name in self.entries.iter().filter_map(|e| e.turn_meta.speaker.as_deref()) {
            if !self.speakers.contains(name) {
                self.speakers.insert(name.to_owned());
            }
        }
        self.update_checksums(timeline);
        Ok(changed.len() + emptied.len())
    }

    /// Whether the entry of a chunk may differ from it. Tokens never change, so the same range has the same text, unless
    /// some of its tokens are deleted.
    fn is_stale(&self, chunk: ChunkRef<'_>) -> bool {
        let Some(entry) = self.entries.get(chunk.row_index()) else { return true };
        let same = (entry.id, entry.start, entry.len, entry.deleted)
            == (chunk.id(), chunk.start(), chunk.len(), chunk.deleted_len());
        let partly_deleted = chunk.deleted_len() > 0 && !chunk.is_deleted();
        !same || partly_deleted && !(chunk.is_loaded() && *entry.text == *chunk.text())
    }

    fn index_chunk(&mut self, chunk: ChunkRef<'_>, text: &str, turn_meta: TurnMeta) {
        let row = chunk.row_index();
        while self.entries.len() <= row {
            self.entries.push(IndexedChunk::empty());
        }
        let mut entry = IndexedChunk {
            id: chunk.id(),
            start: chunk.start(),
            len: chunk.len(),
            deleted: chunk.deleted_len(),
            text: text.into(),
            turn_meta,
            features: TextFeatures::extract(text),
            checksum: 0,
        };
        let text = entry.text_with_speaker();
        self.lexical.insert(row as u32, &text);
        entry.checksum = xxh3_64(text.as_bytes());
        self.entries[row] = entry;
    }

    fn clear_row(&mut self, row: usize) {
        self.lexical.remove(row as u32);
        self.entries[row] = IndexedChunk::empty();
    }

    /// Computes which text each vector should be of, and removes the vectors of other texts.
    fn update_checksums(&mut self, timeline: &Timeline) {
        let Some(dense) = &mut self.dense else { return };
        let checksum = |id: ChunkId| {
            let entry = timeline.chunk(id).and_then(|c| self.entries.get(c.row_index()));
            entry.filter(|e| !e.is_empty()).map_or(0, |e| e.checksum)
        };
        dense
            .checksums
            .resize(self.entries.len().max(dense.chunk_only.row_count()), <[VectorChecksums; 2]>::default());
        for (row, checksums) in dense.checksums.iter_mut().enumerate() {
            let entry = self.entries.get(row).filter(|e| !e.is_empty());
            let [chunk_only, in_context] = entry.map_or([0, 0], |entry| {
                let context = embedding_context(timeline, entry.id, dense.embedder.max_tokens);
                let parts: Vec<u64> = context.into_iter().map(checksum).filter(|&sum| sum != 0).collect();
                let bytes: Vec<u8> = parts.iter().flat_map(|sum| sum.to_le_bytes()).collect();
                // A chunk without context has one text, which is embedded once.
                [entry.checksum, if parts.len() == 1 { entry.checksum } else { xxh3_64(&bytes) }]
            });
            for (checksums, expected) in checksums.iter_mut().zip([chunk_only, in_context]) {
                let stored = if checksums.stored == expected { checksums.stored } else { 0 };
                *checksums = VectorChecksums { expected, stored };
            }
        }
        for row in 0..dense.chunk_only.row_count() {
            for view in EmbeddingView::ALL {
                if dense.checksums[row][view as usize].stored == 0 {
                    // The row exists: it is below `row_count`.
                    let _ = dense.vectors_mut(view).remove(row as u32);
                }
            }
        }
    }

    /// Inserts stored vectors; returns how many. Vectors of older texts are skipped.
    pub fn insert_embeddings(
        &mut self,
        view: EmbeddingView,
        embeddings: &[Embedding],
        timeline: &Timeline,
    ) -> Result<usize, VectorError> {
        let Some(dense) = &mut self.dense else { return Ok(0) };
        let mut inserted = 0;
        for embedding in embeddings {
            let Some(row) = timeline.chunk(embedding.chunk).map(ChunkRef::row_index) else { continue };
            let Some(checksums) = dense.checksums.get(row).map(|both| both[view as usize]) else { continue };
            if checksums.expected != 0 && checksums.expected == embedding.text_hash {
                dense.set_vector(row, view, &embedding.vector)?;
                dense.checksums[row][view as usize].stored = embedding.text_hash;
                inserted += 1;
            }
        }
        Ok(inserted)
    }

    #[must_use]
    pub fn missing_vectors(&self) -> usize {
        let missing = |both: &[VectorChecksums; 2]| both.iter().filter(|c| c.expected != c.stored).count();
        self.dense.as_ref().map_or(0, |dense| dense.checksums.iter().map(missing).sum())
    }

    /// The texts of up to `max_chunks` chunks whose vectors are missing, in timeline order.
    #[must_use]
    pub fn pending_embed_jobs(&self, timeline: &Timeline, max_chunks: usize) -> Vec<EmbedJob> {
        let Some(dense) = &self.dense else { return Vec::new() };
        let mut jobs: Vec<EmbedJob> = Vec::new();
        let mut job_by_checksum: BTreeMap<u64, usize> = BTreeMap::new();
        let is_missing = |row: &usize| dense.checksums[*row].iter().any(|c| c.expected != c.stored);
        for row in (0..dense.checksums.len()).filter(is_missing).take(max_chunks) {
            for view in EmbeddingView::ALL {
                let VectorChecksums { expected, stored } = dense.checksums[row][view as usize];
                if expected == stored {
                    continue;
                }
                let id = self.entries[row].id;
                let job = *job_by_checksum.entry(expected).or_insert_with(|| {
                    let text = self.passage_text(timeline, id, view, dense.embedder.max_tokens);
                    jobs.push(EmbedJob { text, checksum: expected, targets: Vec::new() });
                    jobs.len() - 1
                });
                jobs[job].targets.push((view, id));
            }
        }
        jobs
    }

    fn passage_text(
        &self,
        timeline: &Timeline,
        id: ChunkId,
        view: EmbeddingView,
        max_tokens: usize,
    ) -> String {
        let context = match view {
            EmbeddingView::ChunkOnly => vec![id],
            EmbeddingView::InContext => embedding_context(timeline, id, max_tokens),
        };
        let entries = context.into_iter().filter_map(|id| self.entries.get(timeline.chunk(id)?.row_index()));
        let texts: Vec<String> =
            entries.filter(|e| !e.is_empty()).map(IndexedChunk::text_with_speaker).collect();
        texts.join("\n")
    }
}

impl DenseIndex {
    fn vectors_mut(&mut self, view: EmbeddingView) -> &mut VectorIndex {
        match view {
            EmbeddingView::ChunkOnly => &mut self.chunk_only,
            EmbeddingView::InContext => &mut self.in_context,
        }
    }

    fn set_vector(&mut self, row: usize, view: EmbeddingView, vector: &[f32]) -> Result<(), VectorError> {
        let dimensions = self.embedder.dimensions;
        for vectors in [&mut self.chunk_only, &mut self.in_context] {
            while vectors.row_count() <= row {
                let empty_row = vectors.push(&vec![0.0; dimensions])?;
                vectors.remove(empty_row)?;
            }
        }
        self.vectors_mut(view).replace(row as u32, vector)
    }
}

impl IndexedChunk {
    fn empty() -> Self {
        Self {
            id: ChunkId { turn: TurnId(0), index: 0, role: Role::System },
            start: Position(0),
            len: 0,
            deleted: 0,
            text: "".into(),
            turn_meta: TurnMeta::default(),
            features: TextFeatures::default(),
            checksum: 0,
        }
    }

    /// Whether the row has no text, because the chunk is deleted or blank.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.trim().is_empty()
    }

    /// The text with the name of the speaker before it, where one is known.
    fn text_with_speaker(&self) -> String {
        match &self.turn_meta.speaker {
            Some(name) if !self.is_empty() => format!("{name}: {}", self.text),
            _ => self.text.clone().into(),
        }
    }
}
