//! The core's hot paths: scoring a step, the live view, planning a prune, applying a change, and the memory of a
//! pruned token.
//!
//! The baseline is the record-per-token list of the founding documents: every query scans all tokens.

use crate::timing::p10_call_ns;
use halo_core::brightness::{MagnitudeRules, ScoringStrategy};
use halo_core::change::{
    Append, Change, Extent, NewToken, PruneReason, Pruned, ResurrectReason, Resurrected,
};
use halo_core::prune::{PrunePolicy, PruneRules, RankBy, TieBreak, plan_prune};
use halo_core::scorer::Scorer;
use halo_core::testing::naive_timeline::NaiveTimeline;
use halo_core::testing::naive_token::NaiveToken;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Role, TokenId, TurnId};
use std::time::Duration;

pub const CHUNK_TOKENS: usize = 64;
pub const CHUNKS_PER_TURN: usize = 4;

/// One figure: the measured value, the baseline and the budget.
#[derive(Clone, Debug)]
pub struct CoreBenchFigure {
    pub name: &'static str,
    pub unit: &'static str,
    pub value: f64,
    /// The same work by scanning a list of all tokens, in the same run; none if there is nothing to compare.
    pub baseline: Option<f64>,
    /// The maximum allowed value.
    pub budget: Option<f64>,
}

impl CoreBenchFigure {
    #[must_use]
    pub fn speedup(&self) -> Option<f64> {
        self.baseline.map(|b| b / self.value)
    }

    #[must_use]
    pub fn within_budget(&self) -> bool {
        self.budget.is_none_or(|b| self.value <= b)
    }
}

/// A conversation of `tokens` tokens, of which about `live` are live, spread over all of it.
#[must_use]
pub fn synthetic_timeline(tokens: usize, live: usize) -> Timeline {
    let mut timeline = Timeline::new();
    let mut dice = CoreBenchRng(7);
    let chunks = tokens / CHUNK_TOKENS;
    for turn in 0..chunks / CHUNKS_PER_TURN {
        let role = if turn % 2 == 0 { Role::User } else { Role::Assistant };
        let token = |n: usize| NewToken {
            id: TokenId(n as u32 * 31 % 49_152),
            text: " word".into(),
            chunk_index: (n / CHUNK_TOKENS) as u32,
            brightness: Brightness(10_000.0 - (dice.next_f32() * 200.0).floor()),
            kind: ContentKind::Message,
        };
        let tokens = (0..CHUNK_TOKENS * CHUNKS_PER_TURN).map(token).collect();
        let append = Append { at: timeline.next_position(), turn: TurnId(turn as u32), role, tokens };
        timeline.apply(&Change::Append(append)).expect("at the end");
    }
    let pruned = timeline.chunks().map(|c| c.id()).enumerate();
    let keep = live / CHUNK_TOKENS;
    let pruned: Vec<Pruned> = pruned
        .filter(|(i, _)| (i + 1) * keep / chunks == i * keep / chunks)
        .map(|(_, chunk)| Pruned { chunk, extent: Extent::Whole, reason: PruneReason::Manual })
        .collect();
    if !pruned.is_empty() {
        timeline.apply(&Change::Prune(pruned)).expect("all are live");
    }
    timeline
}

/// The same conversation as a list of token records.
#[must_use]
pub fn to_token_list(timeline: &Timeline) -> NaiveTimeline {
    let tokens = timeline.chunks().flat_map(|c| c.run().positions());
    let record = |p| {
        let token = timeline.token(p).expect("it exists");
        NaiveToken {
            chunk: token.chunk,
            brightness: token.brightness.0,
            votes: 0,
            mass: 0.0,
            exposures: 0,
            pruned: !token.flags.is_live(),
            deleted: false,
            pinned: false,
            template: false,
        }
    };
    NaiveTimeline(tokens.map(record).collect())
}

/// A row of attention over `n` slots: a sink, a few bright tokens, and a long tail. The steeper, the fewer tokens are
/// above the mean: at 40 about 8 %, at 6 about 28 %.
#[must_use]
pub fn synthetic_attention(n: usize, steep: i32) -> Vec<f32> {
    let mut dice = CoreBenchRng(42);
    let mut row: Vec<f32> = (0..n).map(|_| dice.next_f32().powi(steep)).collect();
    let sum: f32 = row.iter().skip(1).sum();
    row.iter_mut().for_each(|a| *a *= 0.75 / sum);
    row[0] = 0.25;
    row
}

struct CoreBenchRng(u64);

impl CoreBenchRng {
    fn next_f32(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }
}

/// Rules of the pruning benchmark: everything but a few hundred tokens may be pruned.
#[must_use]
pub fn prune_rules(budget: usize) -> PruneRules {
    let policy = PrunePolicy::Brightness { rank: RankBy::Peak, ties: TieBreak::Dimmer };
    PruneRules { policy, budget, sinks: 4, recent: 500, fill: true, current: None }
}

/// A live chunk in the middle.
#[must_use]
pub fn middle_live_chunk(timeline: &Timeline) -> ChunkId {
    let chunks: Vec<_> = timeline.live_chunks().collect();
    chunks[chunks.len() / 2].id()
}

/// A change that prunes one chunk, and one that resurrects it.
#[must_use]
pub fn prune_and_resurrect(chunk: ChunkId) -> [Change; 2] {
    let leave = Pruned { chunk, extent: Extent::Whole, reason: PruneReason::Manual };
    let back =
        Resurrected { chunk, extent: Extent::Whole, brightness: None, reason: ResurrectReason::Manual };
    [Change::Prune(vec![leave]), Change::Resurrect(vec![back])]
}

/// All figures of the core; `time` is the minimum measuring time of each.
#[must_use]
pub fn run(time: Duration) -> Vec<CoreBenchFigure> {
    let million = synthetic_timeline(1_000_000, 30_000);
    let mut figures =
        vec![bench_score(&million, SCORE_NAMES[0], 40, time), bench_score(&million, SCORE_NAMES[1], 6, time)];
    figures[0].budget = Some(30.0);
    figures.extend(bench_live_view(&million, time));
    figures.push(bench_plan_prune(time));
    figures.extend(bench_apply(&million, time));
    figures.extend(bench_memory(&million));
    figures
}

const SCORE_NAMES: [&str; 2] = [
    "score one step, 30,000 live of 1,000,000 tokens, 8 % above the threshold",
    "score one step, 30,000 live of 1,000,000 tokens, 28 % above the threshold",
];

fn bench_score(timeline: &Timeline, name: &'static str, steep: i32, time: Duration) -> CoreBenchFigure {
    let strategy = ScoringStrategy::Magnitude(MagnitudeRules::default());
    let mut scorer = Scorer::new(strategy, timeline.context_window(0), None);
    let row = synthetic_attention(scorer.len(), steep);
    let value = p10_call_ns(time, || (), |()| scorer.observe(Some(&row)));
    let mut list = to_token_list(timeline);
    let rules = MagnitudeRules::default();
    let baseline = p10_call_ns(time, || (), |()| list.score(&row, TurnId(u32::MAX), &rules));
    CoreBenchFigure { name, unit: "µs", value: value / 1e3, baseline: Some(baseline / 1e3), budget: None }
}

fn bench_live_view(timeline: &Timeline, time: Duration) -> [CoreBenchFigure; 2] {
    let build = p10_call_ns(
        time,
        || (),
        |()| (timeline.context_window(0).ids(), timeline.context_window(0).positions()),
    );
    let list = to_token_list(timeline);
    let scan = p10_call_ns(time, || (), |()| list.live_indices());
    let mut timeline = timeline.clone();
    let changes = prune_and_resurrect(middle_live_chunk(&timeline));
    let update = p10_call_ns(
        time,
        || (),
        |()| {
            for change in &changes {
                timeline.apply(change).expect("it fits");
            }
            timeline.context_window(0).position(halo_core::token::Slot(20_000))
        },
    );
    [
        CoreBenchFigure {
            name: "live view (ids and slot map), 30,000 live of 1,000,000, built",
            unit: "ms",
            value: build / 1e6,
            baseline: Some(scan / 1e6),
            budget: Some(1.0),
        },
        CoreBenchFigure {
            name: "live view, a chunk out and in again, and a look at slot 20,000",
            unit: "ms",
            value: update / 1e6,
            baseline: Some(scan * 2.0 / 1e6),
            budget: None,
        },
    ]
}

fn bench_plan_prune(time: Duration) -> CoreBenchFigure {
    let timeline = synthetic_timeline(15_000 * CHUNK_TOKENS, 15_000 * CHUNK_TOKENS);
    let rules = prune_rules(timeline.live_len() - 2_000);
    let value = p10_call_ns(time, || (), |()| plan_prune(timeline.context_window(0), &rules));
    // The baseline groups all tokens by chunk and searches the dimmest, once per pruned chunk: here once.
    let list = to_token_list(&timeline);
    let dimmest = |list: &NaiveTimeline| {
        let peaks = list.0.chunk_by(|a, b| a.chunk == b.chunk).map(|tokens| {
            let live = tokens.iter().filter(|t| !t.pruned && !t.deleted).map(|t| t.brightness);
            (live.fold(f32::NEG_INFINITY, f32::max), tokens[0].chunk)
        });
        peaks.min_by(|a, b| a.0.total_cmp(&b.0))
    };
    let once = p10_call_ns(Duration::ZERO, || (), |()| dimmest(&list));
    CoreBenchFigure {
        name: "plan a prune of 2,000 tokens over 15,000 chunks (baseline: 32 scans of the list)",
        unit: "ms",
        value: value / 1e6,
        baseline: Some(32.0 * once / 1e6),
        budget: Some(2.0),
    }
}

/// The same changes to a short and a long conversation: they should cost the same.
fn bench_apply(long: &Timeline, time: Duration) -> Vec<CoreBenchFigure> {
    let short = synthetic_timeline(10_000, 5_000);
    let mut figures = Vec::new();
    for (names, timeline) in [(APPLY_NAMES[0], &short), (APPLY_NAMES[1], long)] {
        let mut timeline = timeline.clone();
        let changes = prune_and_resurrect(middle_live_chunk(&timeline));
        let prune =
            p10_call_ns(time, || (), |()| changes.iter().map(|c| timeline.apply(c)).collect::<Vec<_>>());
        let turn = timeline.next_turn();
        let append = p10_call_ns(
            time,
            || (),
            |()| {
                let token = NewToken {
                    id: TokenId(1),
                    text: " word".into(),
                    chunk_index: 0,
                    brightness: Brightness(10_000.0),
                    kind: ContentKind::Message,
                };
                let at = timeline.next_position();
                timeline.apply(&Change::Append(Append { at, turn, role: Role::User, tokens: vec![token] }))
            },
        );
        for (name, value) in names.into_iter().zip([prune, append]) {
            figures.push(CoreBenchFigure {
                name,
                unit: "µs",
                value: value / 1e3,
                baseline: None,
                budget: None,
            });
        }
    }
    let [prune, append] = [figures[0].value, figures[1].value];
    for (figure, short) in figures[2..].iter_mut().zip([prune, append]) {
        figure.baseline = Some(short);
    }
    figures
}

const APPLY_NAMES: [[&str; 2]; 2] = [
    ["prune and return a chunk, 10,000 tokens", "append a token, 10,000 tokens"],
    [
        "prune and return a chunk, 1,000,000 tokens (baseline: 10,000)",
        "append a token, 1,000,000 tokens (baseline: 10,000)",
    ],
];

/// Memory per pruned token once the store holds the bodies: in chunks of the usual size, and in a chat of short
/// messages, where every few tokens have a chunk and a turn of their own.
fn bench_memory(long: &Timeline) -> [CoreBenchFigure; 2] {
    let mut short = Timeline::new();
    for turn in 0..30_000 {
        let token = |n| NewToken {
            id: TokenId(n),
            text: " word".into(),
            chunk_index: 0,
            brightness: Brightness(10_000.0),
            kind: ContentKind::Message,
        };
        let role = if turn % 2 == 0 { Role::User } else { Role::Assistant };
        let append = Append {
            at: short.next_position(),
            turn: TurnId(turn),
            role,
            tokens: (0..10).map(token).collect(),
        };
        short.apply(&Change::Append(append)).expect("at the end");
    }
    let all =
        short.chunks().map(|c| Pruned { chunk: c.id(), extent: Extent::Whole, reason: PruneReason::Manual });
    short.apply(&Change::Prune(all.collect())).expect("all are live");
    let figure = |name, timeline: &Timeline| {
        let mut timeline = timeline.clone();
        timeline.unload_pruned();
        let held = timeline.memory_usage();
        CoreBenchFigure {
            name,
            unit: "bytes",
            value: (held.content + held.overhead) as f64 / timeline.len() as f64,
            baseline: Some(size_of::<NaiveToken>() as f64),
            budget: Some(16.0),
        }
    };
    [
        figure("memory per token, 970,000 dead of 1,000,000 in the store, chunks of 64", long),
        figure("memory per token, all dead in the store, a chat of 10 tokens a message", &short),
    ]
}
