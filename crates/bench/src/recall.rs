//! Search recall on conversations whose questions name their evidence.
//!
//! Every conversation is imported like a user's (importer, store, chunks, index), so the result is that of the
//! product. Evidence is named by message: a message ranks as its best chunk. Three public datasets can be read:
//! LoCoMo, REALTALK and BEAM. Questions without evidence are skipped and counted.

mod datasets;

pub use datasets::{DatasetConversation, DatasetFormat, DatasetQuestion, read_dataset};

use halo_core::Error;
use halo_core::change::{Change, Extent, PruneReason, Pruned};
use halo_core::chunker::ChunkSize;
use halo_core::embedder::Embedder;
use halo_core::model::{Model, StepFlow};
use halo_core::resurrect::{Hit, ResurrectedBrightness, plan_resurrection};
use halo_core::store::{Access, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, TurnId};
use halo_recall::embed::EmbedderHandle;
use halo_recall::rank::RankedChunk;
use halo_recall::recall::{Recall, SearchOptions};
use halo_store::database::{Database, StoreLocation};
use halo_store::exchange::ImportRequest;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;

/// Recall is measured at these numbers of messages.
pub const RECALL_AT: [usize; 4] = [5, 10, 25, 50];
/// Recall is measured at these numbers of sessions.
pub const SESSIONS_AT: [usize; 2] = [5, 10];
/// Recall is measured at these numbers of resurrected tokens.
pub const TOKENS_AT: [usize; 3] = [1024, 2048, 4096];
/// What a relevance floor keeps is measured at these probabilities.
pub const FLOORS_AT: [f64; 9] = [0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3];
/// The tokens that may be resurrected where a floor is measured.
const FLOOR_TOKENS: usize = 2048;
/// Of each question, the features of so many hits are listed.
const LISTED_HITS: usize = 60;
/// Search limit: enough for fifty messages of several chunks each.
const SEARCH_LIMIT: usize = 1000;

/// Sums of recall over questions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecallSums {
    pub questions: usize,
    /// Within so many messages ([`AT`]).
    pub recall: [f64; RECALL_AT.len()],
    /// Of the sessions with evidence, within so many ([`SESSIONS_AT`]).
    pub session_recall: [f64; SESSIONS_AT.len()],
    /// Questions whose evidence is in a session.
    pub with_session: usize,
    /// Within so many resurrected tokens ([`TOKENS_AT`]).
    pub token_recall: [f64; TOKENS_AT.len()],
}

/// What a relevance floor keeps: sums over questions, by [`FLOORS_AT`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FloorSums {
    /// Recall of evidence among what is resurrected for a question of the conversation.
    pub recall: [f64; FLOORS_AT.len()],
    /// Chunks that are resurrected for a question of the conversation.
    pub own_chunks: [usize; FLOORS_AT.len()],
    /// Chunks that are resurrected for a question of another conversation: nothing is related to it.
    pub foreign_chunks: [usize; FLOORS_AT.len()],
    pub foreign_questions: usize,
}

#[derive(Clone, Debug, Default)]
pub struct RecallBenchReport {
    pub floors: FloorSums,
    pub all: RecallSums,
    /// By kind of question.
    pub by_kind: BTreeMap<String, RecallSums>,
    pub without_evidence: usize,
    /// Evidence that names no existing message; it counts as not found.
    pub unknown_evidence: usize,
    /// Milliseconds of each search, including the embedding of the query.
    pub search_ms: Vec<f64>,
    /// Numbers of chunks, messages and tokens.
    pub chunks: usize,
    pub messages: usize,
    pub tokens: usize,
    /// Whether there were embeddings.
    pub has_vectors: bool,
    /// The best hits of every question, if the setup asks for them.
    pub listed_hits: Vec<ListedHits>,
}

/// The best hits of a question with the features that relevance is computed from.
#[derive(Clone, Debug)]
pub struct ListedHits {
    pub conversation: String,
    /// Chunks of the conversation.
    pub chunks: usize,
    /// Whether the question is one of another conversation.
    pub foreign: bool,
    /// Each hit, and whether it is of a message with evidence.
    pub hits: Vec<(RankedChunk, bool)>,
}

pub struct RecallBenchSetup<'a> {
    /// Questions of another conversation.
    pub foreign_questions: &'a [DatasetQuestion],
    /// The embedder; none: search by words only.
    pub embedder: Option<EmbedderHandle>,
    /// The tokenizer that counts tokens; none: words are counted.
    pub model: Option<&'a mut dyn Model>,
    pub chunk_size: ChunkSize,
    /// Search options; the limit is set by this benchmark.
    pub search_options: SearchOptions,
    /// Whether to list the hits of every question.
    pub list_hits: bool,
}

/// Imports one conversation, creates its embeddings and asks all its questions. `progress` gets the done and total
/// number of embeddings.
pub fn measure(
    conversation: &DatasetConversation,
    folder: &Path,
    setup: &mut RecallBenchSetup<'_>,
    report: &mut RecallBenchReport,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), Error> {
    let cache_file = folder.join(format!("{:016x}.db", conversation.checksum()));
    let mut store = Database::open(&StoreLocation::Sqlite(cache_file))?;
    if store.list_conversations()?.is_empty() {
        let lines = conversation.to_sillytavern();
        let import = ImportRequest {
            file_name: "conversation.jsonl",
            format: Some("sillytavern"),
            name: Some("main"),
            chunk_size: setup.chunk_size,
            initial_brightness: Brightness(10_000.0),
            model: setup.model.as_mut().map(|model| &mut **model as &mut dyn Model),
            validate_rows: None,
        };
        store.import(&mut lines.as_bytes(), import)?;
    }
    let mut timeline = store.load("main", Access::Write)?;
    let embedder = setup.embedder.clone().map(|e| Box::new(e) as Box<dyn Embedder + Send>);
    let mut recall = Recall::open(&mut store, "main", &timeline, embedder)?;
    let missing = recall.index().missing_vectors() as u64;
    let mut made = 0;
    while recall.index().missing_vectors() > 0 {
        recall.embed_pending(&mut store, &timeline, 64, &mut |n| {
            made += n as u64;
            progress(made, missing);
            StepFlow::Continue
        })?;
    }
    let all: Vec<_> = timeline.chunks().map(|c| c.id()).collect();
    store.load_bodies("main", &mut timeline, &all)?;
    let leave = |chunk| Pruned { chunk, extent: Extent::Whole, reason: PruneReason::Manual };
    timeline.apply(&Change::Prune(all.iter().copied().map(leave).collect()))?;
    report.chunks += all.len();
    report.messages += timeline.turns().len();
    report.tokens += timeline.len();
    report.has_vectors = recall.has_embedder();
    let today = conversation.last_date();
    for question in &conversation.questions {
        if question.evidence.is_empty() {
            report.without_evidence += 1;
            continue;
        }
        let begin = Instant::now();
        let hits = recall.search(
            &question.text,
            today,
            SearchOptions { limit: SEARCH_LIMIT, ..setup.search_options },
        )?;
        report.search_ms.push(begin.elapsed().as_secs_f64() * 1e3);
        let sums = score_question(conversation, question, &hits, &timeline, &mut report.unknown_evidence);
        report.floors.add_own(conversation, question, &hits, &timeline);
        if setup.list_hits {
            report.listed_hits.push(list_hits(conversation, Some(question), hits, all.len()));
        }
        report.all.add(&sums);
        report.by_kind.entry(question.kind.clone()).or_default().add(&sums);
    }
    for question in setup.foreign_questions {
        let options = SearchOptions { limit: SEARCH_LIMIT, ..setup.search_options };
        let hits = recall.search(&question.text, today, options)?;
        report.floors.add_foreign(&hits, &timeline);
        if setup.list_hits {
            report.listed_hits.push(list_hits(conversation, None, hits, all.len()));
        }
    }
    Ok(())
}

fn list_hits(
    conversation: &DatasetConversation,
    own_question: Option<&DatasetQuestion>,
    hits: Vec<RankedChunk>,
    chunks: usize,
) -> ListedHits {
    let evidence: BTreeSet<TurnId> =
        own_question.iter().flat_map(|q| &q.evidence).filter_map(|id| conversation.turn_of(id)).collect();
    let is_evidence = |hit: &RankedChunk| evidence.contains(&hit.hit.chunk.turn);
    let hits = hits.into_iter().take(LISTED_HITS).map(|hit| (hit.clone(), is_evidence(&hit))).collect();
    ListedHits { conversation: conversation.name.clone(), chunks, foreign: own_question.is_none(), hits }
}

/// The turns whose chunks are resurrected with a floor, and the number of chunks.
fn resurrected_above(floor: f64, hits: &[RankedChunk], timeline: &Timeline) -> (BTreeSet<TurnId>, usize) {
    let above = hits.iter().filter(|found| found.hit.score > 0.0 && found.relevance >= floor);
    let above: Vec<Hit> = above.map(|found| found.hit).collect();
    let plan = plan_resurrection(timeline, &above, FLOOR_TOKENS, ResurrectedBrightness::Earned);
    (plan.resurrected.iter().map(|chunk| chunk.chunk.turn).collect(), plan.resurrected.len())
}

impl FloorSums {
    fn add_own(
        &mut self,
        conversation: &DatasetConversation,
        question: &DatasetQuestion,
        hits: &[RankedChunk],
        timeline: &Timeline,
    ) {
        let evidence: BTreeSet<TurnId> =
            question.evidence.iter().filter_map(|id| conversation.turn_of(id)).collect();
        for (n, floor) in FLOORS_AT.into_iter().enumerate() {
            let (turns, chunks) = resurrected_above(floor, hits, timeline);
            self.recall[n] += evidence.intersection(&turns).count() as f64 / question.evidence.len() as f64;
            self.own_chunks[n] += chunks;
        }
    }

    fn add_foreign(&mut self, hits: &[RankedChunk], timeline: &Timeline) {
        self.foreign_questions += 1;
        for (n, floor) in FLOORS_AT.into_iter().enumerate() {
            self.foreign_chunks[n] += resurrected_above(floor, hits, timeline).1;
        }
    }
}

fn score_question(
    conversation: &DatasetConversation,
    question: &DatasetQuestion,
    hits: &[RankedChunk],
    timeline: &Timeline,
    unknown: &mut usize,
) -> RecallSums {
    let mut messages: Vec<TurnId> = Vec::new();
    let mut distinct = BTreeSet::new();
    messages.extend(hits.iter().map(|f| f.hit.chunk.turn).filter(|&turn| distinct.insert(turn)));
    let evidence: BTreeSet<TurnId> =
        question.evidence.iter().filter_map(|id| conversation.turn_of(id)).collect();
    let lacking = question.evidence.len() - evidence.len();
    *unknown += lacking;
    let all = question.evidence.len() as f64;
    let share = |some: &BTreeSet<TurnId>| evidence.intersection(some).count() as f64 / all;

    let mut sums = RecallSums { questions: 1, ..RecallSums::default() };
    for (sum, limit) in sums.recall.iter_mut().zip(RECALL_AT) {
        *sum = share(&messages.iter().take(limit).copied().collect());
    }
    let session = |turn: &TurnId| conversation.session_of(*turn);
    let expected: BTreeSet<usize> = evidence.iter().filter_map(session).collect();
    if !expected.is_empty() {
        sums.with_session = 1;
        let mut sessions: Vec<usize> = Vec::new();
        for session in messages.iter().filter_map(session) {
            if !sessions.contains(&session) {
                sessions.push(session);
            }
        }
        for (sum, limit) in sums.session_recall.iter_mut().zip(SESSIONS_AT) {
            let found = sessions.iter().take(limit).filter(|s| expected.contains(s)).count();
            *sum = found as f64 / expected.len() as f64;
        }
    }
    let hits: Vec<Hit> = hits.iter().map(|f| f.hit).collect();
    for (sum, budget) in sums.token_recall.iter_mut().zip(TOKENS_AT) {
        let plan = plan_resurrection(timeline, &hits, budget, ResurrectedBrightness::Earned);
        *sum = share(&plan.resurrected.iter().map(|r| r.chunk.turn).collect());
    }
    sums
}

impl RecallSums {
    fn add(&mut self, other: &Self) {
        self.questions += other.questions;
        self.with_session += other.with_session;
        let add = |sums: &mut [f64], others: &[f64]| sums.iter_mut().zip(others).for_each(|(a, b)| *a += b);
        add(&mut self.recall, &other.recall);
        add(&mut self.session_recall, &other.session_recall);
        add(&mut self.token_recall, &other.token_recall);
    }

    #[must_use]
    pub fn percent(sum: f64, questions: usize) -> f64 {
        100.0 * sum / questions.max(1) as f64
    }
}
