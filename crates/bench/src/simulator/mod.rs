//! A deterministic simulator: the engine on doubles of the store, the disk, the model and the network, all driven by one seed.
//! One seed in eight runs on SQLite, on a disk that loses and tears writes. Processes crash at any call of the store, the power
//! is cut at any event, replies are lost, requests are sent twice, a paused process loses its lease and goes on. After every
//! step the simulator compares the store with what clients were told. A seed that fails prints what happened, and fails again
//! when it is run again.
//!
//! There is no double of the clock. The engine reads it for time stamps, which nothing is decided by, and for how often
//! attention is announced, which the simulator leaves out; a lease expires by a step of the simulator. Forgetting, rooms and
//! repairs are not simulated: `scripts/kills` kills the real program in them.

mod clients;
mod disk;
mod invariants;
mod model;
mod step;
mod store;

use clients::ClientView;
use disk::SimulatedDisk;
pub use disk::{PlantedBug, SimulatedStoreKind};
use halo_core::brightness::{MagnitudeRules, ScoringStrategy};
use halo_core::chunker::ChunkSize;
use halo_core::model::Sampling;
use halo_core::prune::{PrunePolicy, RankBy, TieBreak};
use halo_core::rules::ContextRules;
use halo_engine::chat_format::SpeakerNames;
use halo_engine::chat_options::Persona;
use halo_engine::memory::MemoryRules;
use halo_engine::premise::PremiseMethod;
use halo_engine::rules::{AutoSizes, ConversationRules, ResurrectBrightness, ResurrectLimit};
use halo_engine::session::Session;
use halo_recall::rank::SearchMode;
use halo_recall::recall::SearchOptions;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The conversations of a simulation.
const CONVERSATIONS: [&str; 2] = ["main", "other"];

/// What happened in a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimulatedCounts {
    pub steps: u64,
    /// Messages that a client was told are stored.
    pub messages: u64,
    /// Tokens that a client has seen.
    pub tokens: u64,
    /// Calls of the store that failed, before or after they wrote.
    pub store_faults: u64,
    pub crashes: u64,
    pub power_cuts: u64,
    /// Times that a process wrote to a conversation whose lease another process had taken.
    pub stale_writes: u64,
    /// Messages that a client sent again with the same id.
    pub duplicates: u64,
    pub sqlite_seeds: u64,
    /// Manual edits that were undone, with the state before them.
    pub undone: u64,
    /// Searches that were compared with those of a new index.
    pub searches: u64,
    /// Times that memories were formed or placed.
    pub idle_work: u64,
}

impl SimulatedCounts {
    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.messages += other.messages;
        self.tokens += other.tokens;
        self.store_faults += other.store_faults;
        self.crashes += other.crashes;
        self.power_cuts += other.power_cuts;
        self.stale_writes += other.stale_writes;
        self.duplicates += other.duplicates;
        self.sqlite_seeds += other.sqlite_seeds;
        self.undone += other.undone;
        self.searches += other.searches;
        self.idle_work += other.idle_work;
    }
}

/// A rule that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvariantViolation {
    pub seed: u64,
    pub what: String,
    /// What happened before, the last step last.
    pub trace: Vec<String>,
}

impl fmt::Display for InvariantViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {}", self.seed, self.what)?;
        let shown = self.trace.len().saturating_sub(40);
        self.trace.iter().skip(shown).try_for_each(|line| writeln!(f, "  {line}"))
    }
}

/// A process that serves conversations.
struct SimulatedProcess {
    /// A new number at every start.
    id: u64,
    sessions: BTreeMap<String, Session>,
}

/// Everything that one seed drives.
struct Simulation {
    seed: u64,
    rng: fastrand::Rng,
    disk: SimulatedDisk,
    processes: Vec<SimulatedProcess>,
    clients: BTreeMap<String, ClientView>,
    counts: SimulatedCounts,
    trace: Vec<String>,
    next_message: u64,
    /// Whether turns are interrupted.
    interrupts: bool,
    bug: Option<PlantedBug>,
}

/// One seed in so many runs on SQLite, which is slower.
const SQLITE_SHARE: u64 = 8;

/// What a seed stores in.
#[must_use]
pub fn store_kind(seed: u64) -> SimulatedStoreKind {
    match seed % SQLITE_SHARE {
        1 => SimulatedStoreKind::Sqlite,
        _ => SimulatedStoreKind::Memory,
    }
}

/// Runs one seed. With a planted bug, the doubles break a promise that the engine relies on: some seed must find it.
pub fn run_seed(
    seed: u64,
    steps: u64,
    bug: Option<PlantedBug>,
) -> Result<SimulatedCounts, InvariantViolation> {
    run_seed_with_trace(seed, steps, bug).0
}

/// The same, with what happened.
pub fn run_seed_with_trace(
    seed: u64,
    steps: u64,
    bug: Option<PlantedBug>,
) -> (Result<SimulatedCounts, InvariantViolation>, Vec<String>) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let kind = store_kind(seed);
    let disk = SimulatedDisk::new(rng.u64(..), kind, bug);
    let mut simulation = Simulation {
        seed,
        disk,
        rng,
        processes: Vec::new(),
        clients: CONVERSATIONS.iter().map(|name| ((*name).to_owned(), ClientView::default())).collect(),
        counts: SimulatedCounts {
            sqlite_seeds: u64::from(kind == SimulatedStoreKind::Sqlite),
            ..SimulatedCounts::default()
        },
        trace: Vec::new(),
        next_message: 0,
        interrupts: true,
        bug,
    };
    (0..2).for_each(|_| simulation.start_process());
    // The engine checks itself in debug builds: what it finds is a violation, too.
    let result = catch_unwind(AssertUnwindSafe(|| simulation.run(steps))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(text.unwrap_or_else(|| "the engine panicked".to_owned()))
    });
    let trace = simulation.trace;
    let counts = simulation.counts;
    (result.map(|()| counts).map_err(|what| InvariantViolation { seed, what, trace: trace.clone() }), trace)
}

/// Small windows, so that every conversation prunes and resurrects. Some seeds have memories, some check premises.
fn rules(seed: u64) -> ConversationRules {
    ConversationRules {
        context: ContextRules {
            strategy: ScoringStrategy::Magnitude(MagnitudeRules::default()),
            chunks: ChunkSize { min: 2, max: 8 },
            policy: PrunePolicy::Brightness { rank: RankBy::Top4, ties: TieBreak::Dimmer },
            max_tokens: 60,
            sinks: 0,
            recent: 0,
            fill: true,
            trace_interval: 0,
        },
        auto_sizes: AutoSizes::default(),
        reserved_tokens: 10,
        watch: halo_core::attention::AttentionRequest::default(),
        sampling: Sampling { max_tokens: 12, temperature: 0.0, seed, ..Sampling::default() },
        recall: SearchOptions {
            mode: SearchMode::Hybrid,
            user_boost: 1.0,
            diversity: 0.0,
            limit: 8,
            floor: 0.0,
        },
        resurrect_brightness: ResurrectBrightness::Previous,
        resurrect_limit: ResurrectLimit::Window,
        preview_tokens: 0,
        tools: None,
        system_prompt: "Be brief.".into(),
        persona: Persona::default(),
        show_dates: false,
        speaker_names: SpeakerNames::default(),
        memory: seed.is_multiple_of(3).then(|| MemoryRules {
            range_tokens: 24,
            max_range_tokens: 60,
            max_tokens: 12,
            delay_answers: 0,
            overlap_tokens: 0,
            reflection: None,
            ..MemoryRules::default()
        }),
        premise_method: seed.is_multiple_of(4).then_some(PremiseMethod::Rules),
        judge_principles: Vec::new(),
        keep_reasoning: false,
        attention_history_bytes: 1 << 20,
        forgetting: None,
    }
}
