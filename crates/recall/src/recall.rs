//! Search in one conversation: its index, its embedder, and the vectors in the store.
//!
//! Opening loads texts and stored vectors; it embeds nothing. A chunk without vector is found by its words.
//! [`Recall::embed_pending`] computes missing vectors in steps and stores them, so that the caller can show progress,
//! stop at any time, and continue later.

use crate::index::{EmbedJob, EmbeddingView, FetchBodies, RecallIndex, TurnMeta};
use crate::rank::{RankedChunk, SearchMode, SearchQuery};
use crate::vector_index::VectorError;
use half::f16;
use halo_core::Error;
use halo_core::embedder::{Embedder, EmbedderInfo};
use halo_core::model::StepFlow;
use halo_core::store::{Embedding, RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::TurnId;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An index that other threads can search while [`Recall`] updates it.
pub type SharedIndex = Arc<RwLock<RecallIndex>>;

/// Search in one conversation.
pub struct Recall {
    conversation: String,
    index: SharedIndex,
    /// Whether the index has the chunks of the timeline.
    is_indexed: bool,
    embedder: Option<(Box<dyn Embedder + Send>, EmbedderInfo)>,
    speakers: BTreeMap<TurnId, String>,
    turn_dates: BTreeMap<TurnId, Date>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SearchOptions {
    pub mode: SearchMode,
    /// The factor on scores of the user's chunks; 1 changes nothing.
    pub user_boost: f64,
    /// The weight of similarity to better hits (MMR), from 0 to 1.
    pub diversity: f64,
    /// The largest number of hits.
    pub limit: usize,
    /// Hits with a lower relevance are found but not resurrected; 0: every hit with a score above 0 may be.
    pub floor: f64,
}

impl SearchOptions {
    /// Whether a hit is related enough to be resurrected.
    #[must_use]
    pub fn is_relevant(&self, found: &RankedChunk) -> bool {
        // The lexical and the vector search always return something; a score of 0 means that it does not match.
        found.hit.score > 0.0 && found.relevance >= self.floor
    }
}

/// The progress of [`Recall::embed_pending`], in vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbedProgress {
    /// Computed by this call.
    pub embedded: usize,
    /// Still missing in the whole conversation.
    pub missing: usize,
}

impl Recall {
    /// Opens the index of a conversation. The embedder is loaded now, so that an error shows here. Without embedder, search
    /// is lexical.
    pub fn open(
        store: &mut dyn Store,
        conversation: &str,
        timeline: &Timeline,
        embedder: Option<Box<dyn Embedder + Send>>,
    ) -> Result<Self, Error> {
        let embedder = match embedder {
            Some(mut embedder) => {
                let info = embedder.info()?;
                Some((embedder, info))
            }
            None => None,
        };
        let index = Arc::new(RwLock::new(RecallIndex::new(embedder.as_ref().map(|(_, info)| info.clone()))));
        let (speakers, turn_dates) = (BTreeMap::new(), BTreeMap::new());
        let conversation_name = conversation.to_owned();
        let mut recall =
            Self { conversation: conversation_name, index, is_indexed: true, embedder, speakers, turn_dates };
        recall.sync(store, timeline)?;
        if let Some((_, info)) = &recall.embedder {
            for view in EmbeddingView::ALL {
                let stored = store.embeddings(conversation, &view.storage_name(&info.name))?;
                // Any other vector is not of this embedder, or damaged, or forged; it is computed again.
                let stored: Vec<Embedding> =
                    stored.into_iter().filter(|e| is_unit_vector(&e.vector, info.dimensions)).collect();
                recall.index_mut().insert_embeddings(view, &stored, timeline).map_err(stored_vector_error)?;
            }
        }
        Ok(recall)
    }

    /// For a conversation that is only read and not searched: building the index would read all of its text.
    #[must_use]
    pub fn without_index(conversation: &str) -> Self {
        Self {
            conversation: conversation.to_owned(),
            index: Arc::new(RwLock::new(RecallIndex::new(None))),
            is_indexed: false,
            embedder: None,
            speakers: BTreeMap::new(),
            turn_dates: BTreeMap::new(),
        }
    }

    /// Makes the index equal to the timeline; returns how many chunks changed.
    pub fn sync(&mut self, store: &mut dyn Store, timeline: &Timeline) -> Result<usize, Error> {
        let newest = timeline.turns().last().map(|turn| turn.id);
        if newest.is_some_and(|turn| !self.turn_dates.contains_key(&turn)) {
            let last_dated = self.turn_dates.last_key_value().map(|(&turn, _)| turn);
            match last_dated {
                // Turns that were added since the index was opened are of today.
                Some(last_dated) => {
                    let today = Timestamp::now().to_zoned(TimeZone::system()).date();
                    let turns = timeline.turns().iter().rev().map(|turn| turn.id);
                    let new_turns = turns.take_while(|&turn| turn > last_dated);
                    self.turn_dates.extend(new_turns.map(|turn| (turn, today)));
                }
                None => {
                    let zone = TimeZone::system();
                    let day =
                        |at| Timestamp::from_millisecond(at).ok().map(|at| at.to_zoned(zone.clone()).date());
                    let times = store.turn_times(&self.conversation)?;
                    self.turn_dates =
                        times.into_iter().filter_map(|(turn, at)| Some((turn, day(at)?))).collect();
                    self.speakers = load_speakers(store, &self.conversation)?;
                }
            }
        }
        let turn_meta = |turn: TurnId| TurnMeta {
            speaker: self.speakers.get(&turn).cloned(),
            day: self.turn_dates.get(&turn).copied(),
        };
        let conversation = self.conversation.clone();
        let fetch: &mut FetchBodies<'_> = &mut |chunks| store.fetch_bodies(&conversation, chunks);
        self.index_mut().sync(timeline, &turn_meta, fetch)
    }

    /// The day on which a turn began, if the store has it.
    #[must_use]
    pub fn turn_date(&self, turn: TurnId) -> Option<Date> {
        self.turn_dates.get(&turn).copied()
    }

    pub fn index(&self) -> RwLockReadGuard<'_, RecallIndex> {
        self.index.read()
    }

    fn index_mut(&self) -> RwLockWriteGuard<'_, RecallIndex> {
        self.index.write()
    }

    /// The index for other threads, see [`search`]; none if it was not built.
    #[must_use]
    pub fn shared_index(&self) -> Option<SharedIndex> {
        self.is_indexed.then(|| Arc::clone(&self.index))
    }

    #[must_use]
    pub fn has_embedder(&self) -> bool {
        self.embedder.is_some()
    }

    /// Computes and stores the missing vectors of up to `max_chunks` chunks. `listener` is called for each text with the
    /// number of vectors that it gives, and can stop; vectors computed until then are stored.
    pub fn embed_pending(
        &mut self,
        store: &mut dyn Store,
        timeline: &Timeline,
        max_chunks: usize,
        listener: &mut dyn FnMut(usize) -> StepFlow,
    ) -> Result<EmbedProgress, Error> {
        let Some((embedder, info)) = &mut self.embedder else {
            return Ok(EmbedProgress { embedded: 0, missing: 0 });
        };
        let index = || self.index.write();
        let jobs = index().pending_embed_jobs(timeline, max_chunks);
        let texts = jobs.iter().map(|job| format!("{}{}", info.passage_prefix, job.text)).collect();
        let mut embeddings: [Vec<Embedding>; 2] = [Vec::new(), Vec::new()];
        let result = embedder.embed_in_background(texts, &mut |n, vector| {
            let EmbedJob { checksum, targets, .. } = &jobs[n];
            let vector = round_to_half_precision(vector);
            for &(view, chunk) in targets {
                embeddings[view as usize].push(Embedding {
                    chunk,
                    text_hash: *checksum,
                    vector: vector.clone(),
                });
            }
            listener(targets.len())
        });
        let mut embedded = 0;
        for (view, vectors) in EmbeddingView::ALL.into_iter().zip(&embeddings) {
            store.put_embeddings(&self.conversation, &view.storage_name(&info.name), vectors)?;
            embedded += index().insert_embeddings(view, vectors, timeline).map_err(embedder_error)?;
        }
        result?;
        Ok(EmbedProgress { embedded, missing: self.index().missing_vectors() })
    }

    /// The best hits of a query, the best first.
    pub fn search(
        &mut self,
        text: &str,
        today: Option<Date>,
        options: SearchOptions,
    ) -> Result<Vec<RankedChunk>, Error> {
        let embedder = self.embedder.as_mut().map(|(embedder, _)| &mut **embedder as &mut dyn Embedder);
        search(&self.index, embedder, text, today, options)
    }
}

/// Searches a shared index with the embedder that it was built with; the best hit is first. The index is locked during
/// the search only, not while the query is embedded.
pub fn search(
    index: &RwLock<RecallIndex>,
    embedder: Option<&mut dyn Embedder>,
    text: &str,
    today: Option<Date>,
    options: SearchOptions,
) -> Result<Vec<RankedChunk>, Error> {
    let SearchOptions { mode, user_boost, diversity, limit, floor: _ } = options;
    let vector = match embedder.filter(|_| mode != SearchMode::Lexical) {
        Some(embedder) => {
            let prefix = embedder.info()?.query_prefix;
            embedder.embed(&[&format!("{prefix}{text}")])?.pop()
        }
        None => None,
    };
    let query = SearchQuery { text, vector: vector.as_deref(), today, mode, user_boost, diversity, limit };
    index.read().search(&query).map_err(embedder_error)
}

/// The names of speakers by turn, from a record that imports write.
fn load_speakers(store: &mut dyn Store, conversation: &str) -> Result<BTreeMap<TurnId, String>, Error> {
    let records = store.records(conversation, RecordKind::Setting)?;
    let Some(record) = records.into_iter().find(|record| record.key == "speakers") else {
        return Ok(BTreeMap::new());
    };
    // A malformed record must not prevent searching.
    let names: BTreeMap<String, String> = serde_json::from_str(&record.value).unwrap_or_default();
    Ok(names.into_iter().filter_map(|(turn, name)| Some((TurnId(turn.parse().ok()?), name))).collect())
}

/// A vector with values that the store keeps in two bytes. It is rounded before it is used, so that a conversation finds the
/// same chunks before and after it is opened again.
fn round_to_half_precision(mut vector: Vec<f32>) -> Vec<f32> {
    vector.iter_mut().for_each(|value| *value = f16::from_f32(*value).to_f32());
    vector
}

/// Whether a vector has these dimensions and the length 1, as those of every embedder have (or 0, for a text without words).
fn is_unit_vector(vector: &[f32], dimensions: usize) -> bool {
    let length = vector.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    vector.len() == dimensions && (length == 0.0 || (length - 1.0).abs() < MAX_LENGTH_ERROR)
}

/// How far the length of a stored vector may be from 1: rounding stays far below this.
const MAX_LENGTH_ERROR: f64 = 0.01;

fn stored_vector_error(error: VectorError) -> Error {
    Error::damaged("loading embeddings", format!("{error}; embed the conversation again")).with_source(error)
}

fn embedder_error(error: VectorError) -> Error {
    Error::internal("running the embedder", format!("it returned an invalid vector: {error}"))
        .with_source(error)
}
