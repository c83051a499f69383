//! What each policy keeps of a window: Halo's own and others.

use super::sample::ConversationSample;
use halo_core::change::{BrightnessRun, Change, Score};
use halo_core::prune::{PrunePolicy, PruneRules, RankBy, TieBreak, plan_prune};
use halo_core::rules::ContextRules;
use halo_core::scorer::Scorer;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Role};

/// The policies. H2O, SnapKV and TOVA choose single tokens per head in their papers; here they rank the same whole
/// chunks as the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComparedPolicy {
    /// Halo's ranking, by the settings.
    Brightness,
    HaloWeave,
    Fifo,
    /// The first and the latest tokens (StreamingLLM).
    Window,
    Random,
    /// By the text alone, as for models without attention.
    Salience,
    /// H2O: the accumulated attention.
    H2o,
    /// SnapKV: attention of the latest observers, smoothed.
    SnapKv,
    /// TOVA: attention of the last observer.
    Tova,
}

impl ComparedPolicy {
    pub const ALL: [ComparedPolicy; 9] = [
        ComparedPolicy::Brightness,
        ComparedPolicy::HaloWeave,
        ComparedPolicy::Fifo,
        ComparedPolicy::Window,
        ComparedPolicy::Random,
        ComparedPolicy::Salience,
        ComparedPolicy::H2o,
        ComparedPolicy::SnapKv,
        ComparedPolicy::Tova,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ComparedPolicy::Brightness => "brightness",
            ComparedPolicy::HaloWeave => "halo_weave",
            ComparedPolicy::Fifo => "fifo",
            ComparedPolicy::Window => "window",
            ComparedPolicy::Random => "random",
            ComparedPolicy::Salience => "salience",
            ComparedPolicy::H2o => "h2o",
            ComparedPolicy::SnapKv => "snapkv",
            ComparedPolicy::Tova => "tova",
        }
    }
}

/// SnapKV: number of latest observers, and the width of the smoothing.
const SNAPKV_OBSERVERS: usize = 32;
const SNAPKV_KERNEL: usize = 7;

/// The attention of the watched tokens.
pub(super) struct ObservedAttention {
    /// Slots that were prefilled before.
    prefilled: usize,
    /// By watched token: its attention by slot.
    rows: Vec<Vec<f32>>,
    /// By watched token: the probability that the model gave to the token after it.
    probabilities: Vec<Option<f32>>,
    /// By slot: accumulated attention.
    sums: Vec<f32>,
}

impl ObservedAttention {
    pub(super) fn new(read: usize, watched: usize) -> Self {
        let rows = Vec::with_capacity(watched);
        Self { prefilled: read, rows, probabilities: Vec::new(), sums: vec![0.0; read + watched] }
    }

    /// Adds the row of the next token, and the probability of the token after it.
    pub(super) fn push_row(&mut self, row: &[f32], probability: Option<f32>) {
        self.probabilities.push(probability);
        let visible = self.prefilled + self.rows.len() + 1;
        let row: Vec<f32> = row.iter().copied().take(visible).collect();
        self.sums.iter_mut().zip(&row).for_each(|(sum, a)| *sum += a);
        self.rows.push(row);
    }

    /// The row of the token in a slot, if it was watched.
    fn row_at(&self, slot: usize) -> Option<&[f32]> {
        self.rows.get(slot.checked_sub(self.prefilled)?).map(Vec::as_slice)
    }

    /// The probability of the token after the one in a slot, if it was watched.
    fn probability_at(&self, slot: usize) -> Option<f32> {
        self.probabilities.get(slot.checked_sub(self.prefilled)?).copied().flatten()
    }

    /// By slot: attention of the latest observers, smoothed.
    fn snapkv_scores(&self) -> Vec<f32> {
        let rows = &self.rows[self.rows.len().saturating_sub(SNAPKV_OBSERVERS)..];
        let mut sums = vec![0.0f32; self.sums.len()];
        for row in rows {
            sums.iter_mut().zip(row).for_each(|(sum, a)| *sum += a);
        }
        let around =
            |n: usize| n.saturating_sub(SNAPKV_KERNEL / 2)..(n + SNAPKV_KERNEL / 2 + 1).min(sums.len());
        (0..sums.len()).map(|n| sums[around(n)].iter().sum::<f32>() / around(n).len() as f32).collect()
    }
}

/// The conversation after the watched turns, scored as if the model had generated its part of them, with the row of every
/// `stride`th token.
pub(super) fn replay_scored(
    sample: &ConversationSample,
    observed: &ObservedAttention,
    rules: &ContextRules,
    stride: usize,
) -> Timeline {
    let mut timeline = sample.history.clone();
    let prefix = sample.prefix.len();
    let apply = |timeline: &mut Timeline, change: Change| {
        timeline.apply(&change).expect("it follows what is there");
    };
    for turn in &sample.observed {
        if turn.role != Role::Assistant {
            apply(&mut timeline, Change::Append(turn.clone()));
            continue;
        }
        let (mut opening, mut said) = (turn.clone(), turn.clone());
        opening.tokens.retain(|token| token.kind == ContentKind::Template);
        said.tokens.retain(|token| token.kind != ContentKind::Template);
        said.at = opening.at.plus(opening.tokens.len());
        apply(&mut timeline, Change::Append(opening));
        let mut scorer =
            Scorer::new(rules.strategy.clone(), timeline.context_window(prefix), Some(turn.turn));
        for (n, token) in said.tokens.iter().enumerate() {
            let position = said.at.plus(n);
            scorer.push(ChunkId::new(turn.role, turn.turn, token.chunk_index), position, token.brightness);
            // A token is generated with the attention of the one before it.
            let before = prefix + position.0 as usize - 1;
            if n % stride == 0 && rules.strategy.scores_step(observed.probability_at(before)) {
                scorer.observe(observed.row_at(before)).expect("the model's own attention can be used");
            }
        }
        let score = scorer.finish();
        apply(&mut timeline, Change::Append(said));
        apply(&mut timeline, score);
    }
    timeline
}

/// The conversation pruned to so many tokens.
pub(super) fn prune_window(
    way: ComparedPolicy,
    timeline: &Timeline,
    prefix: usize,
    budget: usize,
    rules: &ContextRules,
    observed: &ObservedAttention,
) -> Timeline {
    let mut timeline = timeline.clone();
    let by = |rank| PrunePolicy::Brightness { rank, ties: TieBreak::Dimmer };
    let (policy, scores) = match way {
        ComparedPolicy::Brightness => (rules.policy, None),
        ComparedPolicy::HaloWeave => (by(RankBy::Peak), None),
        ComparedPolicy::Fifo => (PrunePolicy::Fifo, None),
        ComparedPolicy::Window => (PrunePolicy::Window, None),
        ComparedPolicy::Random => (PrunePolicy::Random { seed: 1 }, None),
        ComparedPolicy::Salience => (PrunePolicy::Salience, None),
        ComparedPolicy::H2o => (by(RankBy::Mean), Some(observed.sums.clone())),
        ComparedPolicy::SnapKv => (by(RankBy::Mean), Some(observed.snapkv_scores())),
        ComparedPolicy::Tova => (by(RankBy::Mean), observed.rows.last().cloned()),
    };
    if let Some(scores) = scores {
        // Their scores replace brightness.
        let run = |chunk: halo_core::timeline::ChunkRef<'_>| {
            let start = prefix + chunk.start().0 as usize;
            let scores = scores[start..start + chunk.len()].iter().map(|&light| Brightness(light * 1e4));
            BrightnessRun { start: chunk.start(), brightness: scores.collect() }
        };
        let runs = timeline.chunks().filter(|chunk| !chunk.is_empty()).map(run).collect();
        let score = Score { runs, tallies: Vec::new() };
        timeline.apply(&Change::Score(score)).expect("every token can be scored");
    }
    let current = timeline.turns().last().map(|turn| turn.id);
    let fill = rules.fill && way != ComparedPolicy::HaloWeave;
    let rules = PruneRules { policy, fill, ..rules.prune_rules(budget, current) };
    let plan = plan_prune(timeline.context_window(prefix), &rules);
    if let Some(change) = plan.change() {
        timeline.apply(&change).expect("planned on this timeline");
    }
    timeline
}
