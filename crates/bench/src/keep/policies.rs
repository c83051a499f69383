//! What stays of a window, by Halo's own rules and by those of others.

use super::sample::Sample;
use halo_core::change::{Change, Score, Scored};
use halo_core::prune::{Policy, PruneRules, Rank, Ties, plan_prune};
use halo_core::replay::Rules;
use halo_core::scorer::Scorer;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, Role, Voice};

/// What is compared. H2O, SnapKV and TOVA choose single tokens of single heads in their papers; here they rank the same
/// whole chunks as the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Halo's own ranking, as the settings have it.
    Brightness,
    /// The documents'.
    HaloWeave,
    /// The oldest first.
    Fifo,
    /// The first tokens and the latest (StreamingLLM).
    Window,
    /// By lot.
    Random,
    /// The attention that tokens have gathered in all.
    H2o,
    /// That of the latest observers, smoothed.
    SnapKv,
    /// That of the last one.
    Tova,
}

impl Way {
    /// All of them.
    pub const ALL: [Way; 8] = [
        Way::Brightness,
        Way::HaloWeave,
        Way::Fifo,
        Way::Window,
        Way::Random,
        Way::H2o,
        Way::SnapKv,
        Way::Tova,
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Way::Brightness => "brightness",
            Way::HaloWeave => "halo_weave",
            Way::Fifo => "fifo",
            Way::Window => "window",
            Way::Random => "random",
            Way::H2o => "h2o",
            Way::SnapKv => "snapkv",
            Way::Tova => "tova",
        }
    }
}

/// Rows of the latest observers that count for SnapKV, and how many neighbours its scores are smoothed over.
const OBSERVERS: usize = 32;
const KERNEL: usize = 7;

/// What the tokens that were watched have looked at.
pub(super) struct Observed {
    /// Slots that were read before.
    read: usize,
    /// By token that was watched: what it looked at, by slot.
    rows: Vec<Vec<f32>>,
    /// By slot: all that looked at it, added up.
    sums: Vec<f32>,
}

impl Observed {
    pub(super) fn new(read: usize, watched: usize) -> Self {
        Self { read, rows: Vec::with_capacity(watched), sums: vec![0.0; read + watched] }
    }

    /// The next token has looked.
    pub(super) fn see(&mut self, row: &[f32]) {
        let seen = self.read + self.rows.len() + 1;
        let row: Vec<f32> = row.iter().copied().take(seen).collect();
        self.sums.iter_mut().zip(&row).for_each(|(sum, a)| *sum += a);
        self.rows.push(row);
    }

    /// What the token in a slot looked at, if it was watched.
    fn row(&self, slot: usize) -> Option<&[f32]> {
        self.rows.get(slot.checked_sub(self.read)?).map(Vec::as_slice)
    }

    /// By slot: what the latest observers looked at, smoothed.
    fn latest(&self) -> Vec<f32> {
        let rows = &self.rows[self.rows.len().saturating_sub(OBSERVERS)..];
        let mut sums = vec![0.0f32; self.sums.len()];
        for row in rows {
            sums.iter_mut().zip(row).for_each(|(sum, a)| *sum += a);
        }
        let around = |n: usize| n.saturating_sub(KERNEL / 2)..(n + KERNEL / 2 + 1).min(sums.len());
        (0..sums.len()).map(|n| sums[around(n)].iter().sum::<f32>() / around(n).len() as f32).collect()
    }
}

/// The conversation after the turns that were watched, scored as if the model had said its part of them itself.
pub(super) fn live_through(sample: &Sample, observed: &Observed, rules: &Rules) -> Timeline {
    let mut timeline = sample.history.clone();
    let prefix = sample.prefix.len();
    let apply = |timeline: &mut Timeline, change: Change| {
        timeline.apply(&change).expect("it follows what is there");
    };
    for turn in &sample.watched {
        if turn.role != Role::Assistant {
            apply(&mut timeline, Change::Append(turn.clone()));
            continue;
        }
        let (mut opening, mut said) = (turn.clone(), turn.clone());
        opening.tokens.retain(|token| token.voice == Voice::Frame);
        said.tokens.retain(|token| token.voice != Voice::Frame);
        said.at = opening.at.plus(opening.tokens.len());
        apply(&mut timeline, Change::Append(opening));
        let mut scorer = Scorer::new(rules.strategy.clone(), timeline.view(prefix), Some(turn.turn));
        for (n, token) in said.tokens.iter().enumerate() {
            let position = said.at.plus(n);
            scorer.push(ChunkId::new(turn.role, turn.turn, token.sentence), position, token.brightness);
            // A token comes about by what the one before it looked at.
            let before = prefix + position.0 as usize - 1;
            scorer.observe(observed.row(before)).expect("the model's own attention can be used");
        }
        let score = scorer.finish();
        apply(&mut timeline, Change::Append(said));
        apply(&mut timeline, score);
    }
    timeline
}

/// The conversation with a window of at most so many tokens.
pub(super) fn shrink(
    way: Way,
    timeline: &Timeline,
    prefix: usize,
    budget: usize,
    rules: &Rules,
    observed: &Observed,
) -> Timeline {
    let mut timeline = timeline.clone();
    let by = |rank| Policy::Brightness { rank, ties: Ties::Dimmer };
    let (policy, lights) = match way {
        Way::Brightness => (rules.policy, None),
        Way::HaloWeave => (by(Rank::Peak), None),
        Way::Fifo => (Policy::Fifo, None),
        Way::Window => (Policy::Window, None),
        Way::Random => (Policy::Random { seed: 1 }, None),
        Way::H2o => (by(Rank::Mean), Some(observed.sums.clone())),
        Way::SnapKv => (by(Rank::Mean), Some(observed.latest())),
        Way::Tova => (by(Rank::Mean), observed.rows.last().cloned()),
    };
    if let Some(lights) = lights {
        // Their scores take the place of brightness.
        let run = |chunk: halo_core::timeline::ChunkRef<'_>| {
            let start = prefix + chunk.start().0 as usize;
            let lights = lights[start..start + chunk.len()].iter().map(|&light| Brightness(light * 1e4));
            Scored { start: chunk.start(), brightness: lights.collect() }
        };
        let runs = timeline.chunks().filter(|chunk| !chunk.is_empty()).map(run).collect();
        let score = Score { runs, tallies: Vec::new() };
        timeline.apply(&Change::Score(score)).expect("every token can be scored");
    }
    let current = timeline.turns().last().map(|turn| turn.id);
    let fill = rules.fill && way != Way::HaloWeave;
    let rules = PruneRules { policy, fill, ..rules.prune(budget, current) };
    let plan = plan_prune(timeline.view(prefix), &rules);
    if let Some(change) = plan.change() {
        timeline.apply(&change).expect("planned on this timeline");
    }
    timeline
}
