//! How much of what a question needs is found, on conversations whose questions name their evidence.
//!
//! Every conversation comes in as a user's would (the importer, the store, the chunks, the index), so what is measured
//! is what a conversation gets. Evidence is named by message: a message is as good as its best chunk. Three public
//! collections can be read: LoCoMo, REALTALK and BEAM. Questions that name no evidence are left out and counted.

mod read;

pub use read::{Conversation, Format, Question, read};

use halo_core::change::{Change, Extent, Leave, WhyLeft};
use halo_core::chunk::ChunkSize;
use halo_core::resurrect::{Hit, ReturnsWith, plan_returns};
use halo_core::seams::{Access, Embedder, Flow, Model, SeamError, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, TurnId};
use halo_recall::embed::Embeddings;
use halo_recall::rank::Found;
use halo_recall::recall::{Manner, Recall};
use halo_store::database::{Database, Location};
use halo_store::exchange::Import;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;

/// How many messages are looked at.
pub const AT: [usize; 4] = [5, 10, 25, 50];
/// How many sessions are looked at.
pub const SESSIONS_AT: [usize; 2] = [5, 10];
/// How many tokens come back.
pub const TOKENS_AT: [usize; 3] = [1024, 2048, 4096];
/// As many chunks are asked for: enough for fifty messages of several chunks each.
const MOST: usize = 1000;

/// Shares of evidence found, summed over questions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sums {
    /// Questions.
    pub questions: usize,
    /// Among so many messages ([`AT`]).
    pub at: [f64; AT.len()],
    /// Of the sessions that hold evidence, among so many ([`SESSIONS_AT`]).
    pub sessions: [f64; SESSIONS_AT.len()],
    /// Questions whose evidence lies in a session.
    pub with_session: usize,
    /// Among what comes back into so many tokens ([`TOKENS_AT`]).
    pub tokens: [f64; TOKENS_AT.len()],
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// All questions.
    pub all: Sums,
    /// By kind of question.
    pub by_kind: BTreeMap<String, Sums>,
    /// Questions that name no evidence.
    pub without_evidence: usize,
    /// Pieces of evidence that no message bears the name of; they count as not found.
    pub unknown_evidence: usize,
    /// What each search took, in milliseconds, the query's embedding among it.
    pub search_ms: Vec<f64>,
    /// Chunks, messages and tokens.
    pub chunks: usize,
    /// Messages.
    pub messages: usize,
    /// Tokens.
    pub tokens: usize,
    /// Whether vectors were there.
    pub meaning: bool,
}

/// What to measure with.
pub struct Setup<'a> {
    /// The embedder; none: words alone.
    pub embedder: Option<Embeddings>,
    /// Whose tokens are counted; none: words.
    pub model: Option<&'a mut dyn Model>,
    /// How chunks are cut.
    pub size: ChunkSize,
    /// How it is searched; how many are found is this bench's affair.
    pub manner: Manner,
}

/// Takes one conversation in, embeds it and asks all its questions. `progress` hears how far embedding is, and how far
/// it goes.
///
/// # Errors
/// When the conversation cannot be taken in, or the embedder fails.
pub fn measure(
    conversation: &Conversation,
    folder: &Path,
    setup: &mut Setup<'_>,
    report: &mut Report,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SeamError> {
    let kept = folder.join(format!("{:016x}.db", conversation.sum()));
    let mut store = Database::open(&Location::Sqlite(kept))?;
    if store.conversations()?.is_empty() {
        let lines = conversation.as_chat();
        let import = Import {
            file_name: "conversation.jsonl",
            format: Some("sillytavern"),
            name: Some("main"),
            size: setup.size,
            brightness: Brightness(10_000.0),
            model: setup.model.as_mut().map(|model| &mut **model as &mut dyn Model),
            admit: None,
        };
        store.import(&mut lines.as_bytes(), import)?;
    }
    let mut timeline = store.load("main", Access::Write)?;
    let embedder = setup.embedder.clone().map(|e| Box::new(e) as Box<dyn Embedder + Send>);
    let mut recall = Recall::open(&mut store, "main", &timeline, embedder)?;
    let missing = recall.index().missing() as u64;
    let mut made = 0;
    while recall.index().missing() > 0 {
        recall.embed_some(&mut store, &timeline, 64, &mut |n| {
            made += n as u64;
            progress(made, missing);
            Flow::Continue
        })?;
    }
    let all: Vec<_> = timeline.chunks().map(|c| c.id()).collect();
    store.bring("main", &mut timeline, &all)?;
    let leave = |chunk| Leave { chunk, extent: Extent::Whole, why: WhyLeft::Manual };
    timeline.apply(&Change::Prune(all.iter().copied().map(leave).collect()))?;
    report.chunks += all.len();
    report.messages += timeline.turns().len();
    report.tokens += timeline.len();
    report.meaning = recall.has_meaning();
    let today = conversation.last_day();
    for question in &conversation.questions {
        if question.evidence.is_empty() {
            report.without_evidence += 1;
            continue;
        }
        let begin = Instant::now();
        let found = recall.search(&question.text, today, Manner { most: MOST, ..setup.manner })?;
        report.search_ms.push(begin.elapsed().as_secs_f64() * 1e3);
        let sums = score(conversation, question, &found, &timeline, &mut report.unknown_evidence);
        report.all.add(&sums);
        report.by_kind.entry(question.kind.clone()).or_default().add(&sums);
    }
    Ok(())
}

/// What one question finds.
fn score(
    conversation: &Conversation,
    question: &Question,
    found: &[Found],
    timeline: &Timeline,
    unknown: &mut usize,
) -> Sums {
    let mut messages: Vec<TurnId> = Vec::new();
    let mut seen = BTreeSet::new();
    messages.extend(found.iter().map(|f| f.hit.chunk.turn).filter(|&turn| seen.insert(turn)));
    let evidence: BTreeSet<TurnId> =
        question.evidence.iter().filter_map(|id| conversation.turn(id)).collect();
    let lacking = question.evidence.len() - evidence.len();
    *unknown += lacking;
    let all = question.evidence.len() as f64;
    let share = |some: &BTreeSet<TurnId>| evidence.intersection(some).count() as f64 / all;

    let mut sums = Sums { questions: 1, ..Sums::default() };
    for (sum, most) in sums.at.iter_mut().zip(AT) {
        *sum = share(&messages.iter().take(most).copied().collect());
    }
    let session = |turn: &TurnId| conversation.session(*turn);
    let wanted: BTreeSet<usize> = evidence.iter().filter_map(session).collect();
    if !wanted.is_empty() {
        sums.with_session = 1;
        let mut sessions: Vec<usize> = Vec::new();
        for session in messages.iter().filter_map(session) {
            if !sessions.contains(&session) {
                sessions.push(session);
            }
        }
        for (sum, most) in sums.sessions.iter_mut().zip(SESSIONS_AT) {
            let found = sessions.iter().take(most).filter(|s| wanted.contains(s)).count();
            *sum = found as f64 / wanted.len() as f64;
        }
    }
    let hits: Vec<Hit> = found.iter().map(|f| f.hit).collect();
    for (sum, budget) in sums.tokens.iter_mut().zip(TOKENS_AT) {
        let plan = plan_returns(timeline, &hits, budget, ReturnsWith::Earned);
        *sum = share(&plan.returns.iter().map(|r| r.chunk.turn).collect());
    }
    sums
}

impl Sums {
    fn add(&mut self, other: &Self) {
        self.questions += other.questions;
        self.with_session += other.with_session;
        let add = |sums: &mut [f64], others: &[f64]| sums.iter_mut().zip(others).for_each(|(a, b)| *a += b);
        add(&mut self.at, &other.at);
        add(&mut self.sessions, &other.sessions);
        add(&mut self.tokens, &other.tokens);
    }

    /// A share, in percent of so many questions.
    #[must_use]
    pub fn percent(sum: f64, questions: usize) -> f64 {
        100.0 * sum / questions.max(1) as f64
    }
}
