//! Comparison of pruning policies: each shrinks a window, and the cost is measured with the model.
//!
//! A stretch of a real conversation is prefilled; attention is captured over the next part, token by token as it was
//! written; the window is pruned to a share of its size; and the model's predictions of the continuation are compared
//! with those with the full window, and with the actual tokens. All policies choose among the same chunks, keep the
//! same sinks and recent tokens, and have the same budget.

mod ablation;
pub mod compare;
mod policies;
pub(crate) mod sample;

pub use policies::ComparedPolicy;
pub use sample::SampleLengths;

use crate::decode_attention::spaced_layers;
use crate::recall::DatasetConversation;
use ablation::AblationRun;
use halo_core::model::ModelToken;
use halo_core::prune::RankBy;
use halo_core::rules::ContextRules;
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, TurnId};
use halo_engine::chat_format::ChatFormatter;
use halo_llama::attention::{LayerHeads, TapConfig, TapRows};
use halo_llama::ffi::{LlamaContext, LlamaError};
use policies::ObservedAttention;
use sample::ConversationSample;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

pub struct PruneBenchSetup<'a> {
    pub context: &'a mut LlamaContext,
    /// How messages are formatted for the model.
    pub frame: ChatFormatter,
    /// The scoring rules; window and recent tokens follow from the budget.
    pub rules: ContextRules,
    pub want: TapConfig,
    /// Lengths of the parts of a stretch.
    pub lengths: SampleLengths,
    pub samples: usize,
    /// The share of the window that is kept.
    pub budget: f64,
    /// The share of the budget that is reserved for recent tokens.
    pub recent: f64,
    /// Whether every chunk is removed once, to compare its brightness with the damage.
    pub ablate_each_chunk: bool,
    /// Fewer rows that are compared with all of them.
    pub row_subsets: Vec<RowSubset>,
}

/// Some of the attention rows of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowSubset {
    /// Only every Nth token has a row.
    pub stride: usize,
    /// A row is the mean of so many layers at equal distances; None: of all.
    pub layers: Option<usize>,
}

/// What pruning by brightness costs with some of the rows.
#[derive(Clone, Debug, Default)]
pub struct RowSubsetResult {
    pub subset: RowSubset,
    pub kl: MeanAccumulator,
    pub evidence_kept: MeanAccumulator,
    /// Share of the chunks that are kept with all rows and with these rows.
    pub same_chunks: MeanAccumulator,
    /// Rank correlation of the chunks with their ranking by all rows.
    pub rank_correlation: MeanAccumulator,
}

#[derive(Clone, Debug, Default)]
pub struct PruneBenchReport {
    pub samples: usize,
    pub window: MeanAccumulator,
    /// Questions with evidence in the window.
    pub questions: usize,
    /// Loss on the continuation with the full window, in nats.
    pub nll: MeanAccumulator,
    pub by_policy: Vec<PrunePolicyResult>,
    pub by_row_subset: Vec<RowSubsetResult>,
    /// By ranking: rank correlation with the damage that removing each chunk does.
    pub rank_agreement: Vec<(RankBy, MeanAccumulator)>,
    /// Reliability of that damage, measured on every second token: no ranking can correlate more than its root.
    pub agreement_ceiling: MeanAccumulator,
}

/// Results of one policy.
#[derive(Clone, Debug)]
pub struct PrunePolicyResult {
    pub policy: ComparedPolicy,
    pub tokens: MeanAccumulator,
    /// KL divergence from the full window, in nats.
    pub kl: MeanAccumulator,
    /// Loss on the continuation, in nats.
    pub nll: MeanAccumulator,
    /// The share of a question's evidence that was kept.
    pub evidence_kept: MeanAccumulator,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MeanAccumulator {
    sum: f64,
    count: usize,
}

impl MeanAccumulator {
    pub(crate) fn add(&mut self, number: f64) {
        if number.is_finite() {
            self.sum += number;
            self.count += 1;
        }
    }

    #[must_use]
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

/// The rankings that are compared.
pub const RANKS: [RankBy; 6] =
    [RankBy::Share, RankBy::Sum, RankBy::Votes, RankBy::Top4, RankBy::Mean, RankBy::Peak];

/// Measures one conversation. `progress` gets the number of finished stretches.
pub fn measure(
    conversation: &DatasetConversation,
    setup: &mut PruneBenchSetup<'_>,
    report: &mut PruneBenchReport,
    progress: &mut dyn FnMut(u64),
) -> Result<(), LlamaError> {
    let weights = std::sync::Arc::clone(setup.context.weights());
    let tokenize = |text: &str, special: bool| -> Vec<ModelToken> {
        halo_llama::token_text::tokenize_with_text(&weights, text, special)
    };
    let samples = sample::cut_samples(
        conversation,
        setup.samples,
        setup.lengths,
        &setup.frame,
        &setup.rules,
        &tokenize,
    );
    for sample in samples {
        measure_sample(&sample, setup, report)?;
        progress(report.samples as u64);
    }
    Ok(())
}

fn measure_sample(
    sample: &ConversationSample,
    setup: &mut PruneBenchSetup<'_>,
    report: &mut PruneBenchReport,
) -> Result<(), LlamaError> {
    let (read, said) = (sample.prefill_tokens(), sample.observed_tokens());
    let mut observed = ObservedAttention::new(read.len(), said.len());
    // Means of some layers come from the heads of every layer.
    let mut layer_counts: Vec<usize> = setup.row_subsets.iter().filter_map(|subset| subset.layers).collect();
    layer_counts.sort_unstable();
    layer_counts.dedup();
    let mut by_layers: BTreeMap<usize, ObservedAttention> =
        layer_counts.iter().map(|&count| (count, ObservedAttention::new(read.len(), said.len()))).collect();
    let want = TapConfig { rows: TapRows::All, full: !layer_counts.is_empty(), ..setup.want.clone() };
    let largest = want.max;
    let window: Vec<_> = read.iter().chain(&said).copied().collect();
    let mut trial =
        AblationRun::start(setup.context, &window, read.len(), &sample.next, &want, &mut |token| {
            let row = if largest { &token.row.max } else { &token.row.mean };
            observed.push_row(row, token.probability);
            for (&count, some_layers) in &mut by_layers {
                some_layers.push_row(&mean_of_layers(&token.heads, count), token.probability);
            }
        })?;
    let timeline = policies::replay_scored(sample, &observed, &setup.rules, 1);
    let prefix = sample.prefix.len();
    report.samples += 1;
    report.questions += sample.evidence.len();
    report.window.add(window.len() as f64);
    report.nll.add(mean(&trial.cost_without(&[])?.nll));

    let budget = (window.len() as f64 * setup.budget) as usize;
    let rules = ContextRules { recent: (budget as f64 * setup.recent) as usize, ..setup.rules.clone() };
    if report.by_policy.is_empty() {
        let fresh = |policy| PrunePolicyResult {
            policy,
            tokens: MeanAccumulator::default(),
            kl: MeanAccumulator::default(),
            nll: MeanAccumulator::default(),
            evidence_kept: MeanAccumulator::default(),
        };
        report.by_policy = ComparedPolicy::ALL.map(fresh).to_vec();
    }
    let evidence_kept = |pruned: &Timeline, sum: &mut MeanAccumulator| {
        for needed in &sample.evidence {
            let stays = |turn: &&TurnId| pruned.turn_chunks(**turn).any(|chunk| chunk.is_live());
            sum.add(needed.iter().filter(stays).count() as f64 / needed.len() as f64);
        }
    };
    for result in &mut report.by_policy {
        let pruned_timeline =
            policies::prune_window(result.policy, &timeline, prefix, budget, &rules, &observed);
        let cost = trial.cost_without(&pruned_slots(&pruned_timeline, prefix))?;
        result.tokens.add((prefix + pruned_timeline.live_len()) as f64);
        result.kl.add(mean(&cost.kl));
        result.nll.add(mean(&cost.nll));
        evidence_kept(&pruned_timeline, &mut result.evidence_kept);
    }
    if report.by_row_subset.is_empty() {
        let fresh = |&subset| RowSubsetResult { subset, ..RowSubsetResult::default() };
        report.by_row_subset = setup.row_subsets.iter().map(fresh).collect();
    }
    let prune = |timeline: &Timeline| {
        policies::prune_window(ComparedPolicy::Brightness, timeline, prefix, budget, &rules, &observed)
    };
    let live_chunks = |timeline: &Timeline| -> BTreeSet<ChunkId> {
        timeline.chunks().filter(|chunk| chunk.is_live()).map(|chunk| chunk.id()).collect()
    };
    let current = timeline.turns().last().map(|turn| turn.id);
    let ranking = |timeline: &Timeline| -> Vec<f64> {
        let ranked = timeline.chunks().filter(|chunk| Some(chunk.id().turn) != current && !chunk.is_empty());
        ranked.map(|chunk| RankBy::Share.value_of(chunk)).collect()
    };
    let full = live_chunks(&prune(&timeline));
    for result in &mut report.by_row_subset {
        let observed = result.subset.layers.and_then(|count| by_layers.get(&count)).unwrap_or(&observed);
        let scored = policies::replay_scored(sample, observed, &setup.rules, result.subset.stride);
        let pruned_timeline = prune(&scored);
        let cost = trial.cost_without(&pruned_slots(&pruned_timeline, prefix))?;
        result.kl.add(mean(&cost.kl));
        evidence_kept(&pruned_timeline, &mut result.evidence_kept);
        let kept = live_chunks(&pruned_timeline);
        result
            .same_chunks
            .add(kept.intersection(&full).count() as f64 / full.union(&kept).count().max(1) as f64);
        result.rank_correlation.add(spearman(&ranking(&timeline), &ranking(&scored)));
    }
    if setup.ablate_each_chunk {
        ablate_chunks(&timeline, prefix, rules.sinks, &mut trial, report)?;
    }
    Ok(())
}

/// The mean row of `count` of the recorded layers.
fn mean_of_layers(layers: &[&LayerHeads], count: usize) -> Vec<f32> {
    let chosen = spaced_layers(layers.len(), count);
    let cells = layers.first().map_or(0, |heads| heads.cells);
    let mut row = vec![0.0; cells];
    for heads in chosen.iter().filter_map(|&n| layers.get(n)) {
        let weight = cells as f32 / (heads.values.len() * chosen.len()) as f32;
        for head in heads.values.chunks(cells.max(1)) {
            row.iter_mut().zip(head).for_each(|(sum, a)| *sum += a * weight);
        }
    }
    row
}

/// Removes every chunk once.
fn ablate_chunks(
    timeline: &Timeline,
    prefix: usize,
    sinks: usize,
    trial: &mut AblationRun<'_>,
    report: &mut PruneBenchReport,
) -> Result<(), LlamaError> {
    let last = timeline.turns().last().map(|turn| turn.id);
    let slot = |n: u64| prefix + n as usize;
    let chunks: Vec<_> = (timeline.chunks())
        .filter(|chunk| Some(chunk.id().turn) != last && slot(chunk.start().0) >= sinks && !chunk.is_empty())
        .collect();
    let mut damage = [Vec::new(), Vec::new(), Vec::new()];
    for chunk in &chunks {
        let start = slot(chunk.start().0);
        let kl = trial.cost_without(std::slice::from_ref(&(start..start + chunk.len())))?.kl;
        let every_second = |from: usize| kl.iter().copied().skip(from).step_by(2).collect::<Vec<_>>();
        for (damage, kl) in damage.iter_mut().zip([&kl, &every_second(0), &every_second(1)]) {
            damage.push(mean(kl));
        }
    }
    if report.rank_agreement.is_empty() {
        report.rank_agreement = RANKS.map(|rank| (rank, MeanAccumulator::default())).to_vec();
    }
    for (rank, agreement) in &mut report.rank_agreement {
        let values: Vec<f64> = chunks.iter().map(|&chunk| rank.value_of(chunk)).collect();
        agreement.add(spearman(&values, &damage[0]));
    }
    // Half of the tokens are less reliable than all (Spearman-Brown).
    let half = spearman(&damage[1], &damage[2]);
    report.agreement_ceiling.add(2.0 * half / (1.0 + half));
    Ok(())
}

/// The slots that are not live.
fn pruned_slots(timeline: &Timeline, prefix: usize) -> Vec<Range<usize>> {
    let pruned = timeline.chunks().filter(|chunk| !chunk.is_live());
    let slots = pruned.map(|chunk| {
        let start = prefix + chunk.start().0 as usize;
        start..start + chunk.len()
    });
    slots.collect()
}

fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len() as f64
}

fn spearman(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (fractional_ranks(a), fractional_ranks(b));
    let (ma, mb) = (mean(&a), mean(&b));
    let of =
        |x: &[f64], m: f64, y: &[f64], n: f64| x.iter().zip(y).map(|(x, y)| (x - m) * (y - n)).sum::<f64>();
    of(&a, ma, &b, mb) / (of(&a, ma, &a, ma) * of(&b, mb, &b, mb)).sqrt()
}

/// The rank of each number; equal numbers share theirs.
fn fractional_ranks(numbers: &[f64]) -> Vec<f64> {
    let below = |n: f64| numbers.iter().filter(|&&m| m < n).count() as f64;
    let equal = |n: f64| numbers.iter().filter(|&&m| m == n).count() as f64;
    numbers.iter().map(|&n| below(n) + (equal(n) - 1.0) / 2.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_of_layers_takes_spaced_layers_and_all_heads() {
        let heads = |layer: usize, values: [f32; 4]| LayerHeads {
            layer,
            token: 0,
            cells: 2,
            values: values.to_vec(),
        };
        let layers = [heads(0, [1.0, 0.0, 1.0, 0.0]), heads(3, [0.0, 1.0, 0.5, 0.5])];
        let layers: Vec<&LayerHeads> = layers.iter().collect();
        assert_eq!(mean_of_layers(&layers, 1), [0.25, 0.75], "the last layer is among them");
        assert_eq!(mean_of_layers(&layers, 2), [0.625, 0.375]);
        assert_eq!(mean_of_layers(&layers, 9), [0.625, 0.375]);
        assert!(mean_of_layers(&[], 1).is_empty());
    }

    #[test]
    fn spearman_detects_agreement_and_reversal() {
        let up = [1.0, 2.0, 3.0, 10.0];
        assert!((spearman(&up, &[0.1, 0.2, 5.0, 6.0]) - 1.0).abs() < 1e-12);
        assert!((spearman(&up, &[4.0, 3.0, 2.0, 1.0]) + 1.0).abs() < 1e-12);
        assert!((spearman(&up, &[1.0, 3.0, 2.0, 4.0]) - 0.8).abs() < 1e-12);
        assert_eq!(fractional_ranks(&[7.0, 7.0, 1.0]), [1.5, 1.5, 0.0]);
        assert!(spearman(&up, &[1.0; 4]).is_nan(), "what is all the same has no order");
    }
}
