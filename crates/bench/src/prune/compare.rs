//! The same conversation under two models: do they attend to the same chunks?
//!
//! A stretch of a conversation is cut into chunks by its words, so that both models have the same chunks. Each model
//! prefills the first part; over the second part its attention to every chunk of the first is summed. A chunk's share is
//! its attention per token and step. The two orders are compared by their rank correlation.

use super::ablation::AblationRun;
use super::sample::{MergedTurn, merge_turns};
use super::spearman;
use crate::recall::DatasetConversation;
use halo_core::chunker::{ChunkSize, chunk_indices};
use halo_core::model::ModelToken;
use halo_engine::chat_format::ChatFormatter;
use halo_llama::attention::{TapConfig, TapRows};
use halo_llama::ffi::{LlamaContext, LlamaError, LlamaToken};
use std::fmt::Write;

/// One of the two models.
pub struct ComparedModel<'a> {
    pub context: &'a mut LlamaContext,
    pub frame: ChatFormatter,
    pub want: TapConfig,
}

/// A stretch of a conversation that both models read.
pub struct ComparedStretch {
    turns: Vec<MergedTurn>,
    /// By turn: the byte at which each of its chunks begins.
    chunk_starts: Vec<Vec<usize>>,
    /// The turns from this one on are observed.
    observed_from: usize,
}

/// The shares of the chunks under both models, in order of the conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct ChunkShares {
    pub conversation: String,
    /// The beginning of each chunk's text.
    pub texts: Vec<String>,
    pub shares: [Vec<f64>; 2],
}

impl ChunkShares {
    /// Spearman's rank correlation of the two orders.
    #[must_use]
    pub fn rank_correlation(&self) -> f64 {
        spearman(&self.shares[0], &self.shares[1])
    }

    /// The share of the brightest quarter under the first model that is in the brightest quarter under the second.
    #[must_use]
    pub fn top_quarter_overlap(&self) -> f64 {
        let count = (self.texts.len() / 4).max(1);
        let top = |shares: &[f64]| {
            let mut order: Vec<usize> = (0..shares.len()).collect();
            order.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]));
            order.truncate(count);
            order
        };
        let [first, second] = [&self.shares[0], &self.shares[1]].map(|shares| top(shares));
        first.iter().filter(|chunk| second.contains(chunk)).count() as f64 / count as f64
    }

    /// Each share as the part of the chunks that have a lower one, 0 to 1.
    fn percentiles(&self) -> [Vec<f64>; 2] {
        let percentile = |shares: &Vec<f64>| -> Vec<f64> {
            let below = |share: f64| shares.iter().filter(|&&other| other < share).count() as f64;
            shares.iter().map(|&share| below(share) / (shares.len() - 1).max(1) as f64).collect()
        };
        [percentile(&self.shares[0]), percentile(&self.shares[1])]
    }
}

/// The first stretch of a conversation with so many words before the observed part and in it; none where it is too short.
#[must_use]
pub fn cut_stretch(
    conversation: &DatasetConversation,
    history_words: usize,
    observed_words: usize,
    size: ChunkSize,
) -> Option<ComparedStretch> {
    let mut turns = merge_turns(conversation);
    let word_count = |turn: &MergedTurn| turn.text.split_whitespace().count();
    let mut words = 0;
    let mut ends = turns.iter().map(|turn| {
        words += word_count(turn);
        words
    });
    let observed_from = ends.position(|end| end >= history_words)? + 1;
    let last = ends.position(|end| end >= history_words + observed_words)?;
    turns.truncate(observed_from + last + 1);
    let chunk_starts = turns.iter().map(|turn| chunk_starts(&turn.text, size)).collect();
    Some(ComparedStretch { turns, chunk_starts, observed_from })
}

/// Where the chunks of a text begin, in bytes. A word with the white space behind it counts as a token.
fn chunk_starts(text: &str, size: ChunkSize) -> Vec<usize> {
    let words: Vec<&str> = text.split_inclusive([' ', '\n']).collect();
    let indices = chunk_indices(size, words.iter().copied());
    let (mut starts, mut at, mut last) = (Vec::new(), 0, None);
    for (word, index) in words.iter().zip(indices) {
        if last != Some(index) {
            starts.push(at);
            last = Some(index);
        }
        at += word.len();
    }
    starts
}

/// The shares of the chunks of a stretch under both models.
pub fn compare(
    name: &str,
    stretch: &ComparedStretch,
    models: &mut [ComparedModel<'_>; 2],
) -> Result<ChunkShares, LlamaError> {
    let [first, second] = models;
    let shares = [measure_shares(stretch, first)?, measure_shares(stretch, second)?];
    let mut texts = Vec::new();
    for (turn, starts) in stretch.turns[..stretch.observed_from].iter().zip(&stretch.chunk_starts) {
        let ends = starts.iter().copied().skip(1).chain([turn.text.len()]);
        let text = |(&start, end): (&usize, usize)| turn.text[start..end].trim().chars().take(60).collect();
        texts.extend(starts.iter().zip(ends).map(text));
    }
    Ok(ChunkShares { conversation: name.to_owned(), texts, shares })
}

/// The tokens of a stretch for one model, and the chunk of each; none for the chat template.
struct TokenizedStretch {
    prefilled: Vec<LlamaToken>,
    observed: Vec<LlamaToken>,
    /// The chunk of each prefilled token.
    chunk_of: Vec<Option<usize>>,
    chunks: usize,
}

fn tokenize_stretch(stretch: &ComparedStretch, model: &ComparedModel<'_>) -> TokenizedStretch {
    let weights = std::sync::Arc::clone(model.context.weights());
    let tokenize = |text: &str, special: bool| -> Vec<ModelToken> {
        halo_llama::token_text::tokenize_with_text(&weights, text, special)
    };
    let id = |token: &ModelToken| token.id.0.cast_signed();
    let mut prefilled: Vec<LlamaToken> =
        tokenize(&model.frame.preamble().text(), true).iter().map(id).collect();
    let mut chunk_of = vec![None; prefilled.len()];
    let (mut observed, mut chunks, mut before) = (Vec::new(), 0, None);
    for (n, (turn, starts)) in stretch.turns.iter().zip(&stretch.chunk_starts).enumerate() {
        let header = tokenize(&model.frame.turn_header(turn.role, before, None).text(), true);
        let message = tokenize(&turn.text, false);
        before = Some(turn.role);
        let ids = header.iter().chain(&message).map(id);
        if n >= stretch.observed_from {
            observed.extend(ids);
            continue;
        }
        prefilled.extend(ids);
        chunk_of.extend(header.iter().map(|_| None));
        let mut at = 0;
        for token in &message {
            chunk_of.push(Some(chunks + starts.partition_point(|&start| start <= at).saturating_sub(1)));
            at += token.text.len();
        }
        chunks += starts.len();
    }
    TokenizedStretch { prefilled, observed, chunk_of, chunks }
}

fn measure_shares(stretch: &ComparedStretch, model: &mut ComparedModel<'_>) -> Result<Vec<f64>, LlamaError> {
    let tokens = tokenize_stretch(stretch, model);
    let (mut sums, mut counts) = (vec![0.0_f64; tokens.chunks], vec![0_usize; tokens.chunks]);
    for chunk in tokens.chunk_of.iter().flatten() {
        counts[*chunk] += 1;
    }
    let window: Vec<LlamaToken> = tokens.prefilled.iter().chain(&tokens.observed).copied().collect();
    let want = TapConfig { rows: TapRows::All, full: false, ..model.want.clone() };
    let largest = want.max;
    let mut steps = 0;
    AblationRun::start(model.context, &window, tokens.prefilled.len(), &[], &want, &mut |token| {
        steps += 1;
        let row = if largest { &token.row.max } else { &token.row.mean };
        for (attention, chunk) in row.iter().zip(&tokens.chunk_of) {
            if let Some(chunk) = chunk {
                sums[*chunk] += f64::from(*attention);
            }
        }
    })?;
    let exposures = |count: usize| (count * steps.max(1)) as f64;
    Ok(sums.iter().zip(counts).map(|(sum, count)| sum / exposures(count.max(1))).collect())
}

/// A scatter plot of the chunks of all conversations: their place in the order of the first model, left to right, and of the
/// second, bottom to top. Chunks on the diagonal have the same place under both.
#[must_use]
pub fn plot(compared: &[ChunkShares], names: [&str; 2]) -> String {
    const SIZE: f64 = 480.0;
    const MARGIN: f64 = 60.0;
    const COLOURS: [&str; 6] = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2"];
    let escape = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let side = SIZE + 2.0 * MARGIN;
    let end = MARGIN + SIZE;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{side}\" height=\"{side}\" viewBox=\"0 0 {side} {side}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"{side}\" height=\"{side}\" fill=\"#ffffff\"/>\n\
         <rect x=\"{MARGIN}\" y=\"{MARGIN}\" width=\"{SIZE}\" height=\"{SIZE}\" fill=\"none\" stroke=\"#999999\"/>\n\
         <line x1=\"{MARGIN}\" y1=\"{end}\" x2=\"{end}\" y2=\"{MARGIN}\" stroke=\"#cccccc\"/>\n"
    );
    for (conversation, colour) in compared.iter().zip(COLOURS.iter().cycle()) {
        let [first, second] = conversation.percentiles();
        for ((x, y), text) in first.iter().zip(second).zip(&conversation.texts) {
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\" fill-opacity=\"0.7\"><title>{}</title></circle>",
                MARGIN + x * SIZE,
                end - y * SIZE,
                escape(text)
            );
        }
    }
    let correlations = compared.iter().map(ChunkShares::rank_correlation).filter(|c| c.is_finite());
    let (sum, count) = correlations.fold((0.0, 0), |(sum, count), c| (sum + c, count + 1));
    let middle = side / 2.0;
    let _ = write!(
        svg,
        "<text x=\"{middle}\" y=\"30\" text-anchor=\"middle\">rank correlation of chunks: {:.2}, mean of {count} \
         conversations</text>\n<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">place under {}</text>\n\
         <text transform=\"translate(24 {middle}) rotate(-90)\" text-anchor=\"middle\">place under {}</text>\n</svg>\n",
        sum / f64::from(count.max(1)),
        side - 20.0,
        escape(names[0]),
        escape(names[1]),
    );
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(first: &[f64], second: &[f64]) -> ChunkShares {
        ChunkShares {
            conversation: "tea & cake".into(),
            texts: first.iter().map(|share| format!("chunk <{share}>")).collect(),
            shares: [first.to_vec(), second.to_vec()],
        }
    }

    #[test]
    fn compare_reports_rank_correlation_and_overlap() {
        let same = shares(&[0.1, 0.4, 0.2, 0.3], &[1.0, 4.0, 2.0, 3.0]);
        assert!((same.rank_correlation() - 1.0).abs() < 1e-12);
        assert_eq!(same.top_quarter_overlap(), 1.0);
        let reversed = shares(&[0.1, 0.4, 0.2, 0.3], &[4.0, 1.0, 3.0, 2.0]);
        assert!((reversed.rank_correlation() + 1.0).abs() < 1e-12);
        assert_eq!(reversed.top_quarter_overlap(), 0.0);
    }

    #[test]
    fn compare_plot_has_a_point_for_every_chunk() {
        let svg = plot(
            &[shares(&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]), shares(&[1.0, 2.0], &[2.0, 1.0])],
            ["a", "b<c"],
        );
        assert_eq!(svg.matches("<circle").count(), 5);
        assert!(svg.contains("mean of 2 conversations") && svg.contains("0.00"), "{svg}");
        assert!(svg.contains("chunk &lt;3&gt;") && svg.contains("b&lt;c") && !svg.contains("<c<"), "{svg}");
        assert!(
            svg.contains("cx=\"60.0\" cy=\"540.0\"") && svg.contains("cx=\"540.0\" cy=\"60.0\""),
            "{svg}"
        );
    }

    #[test]
    fn compare_cuts_the_same_chunks_for_every_model() {
        let text = "one two three\n\nfour five six\n\nseven";
        assert_eq!(chunk_starts(text, ChunkSize { min: 2, max: 9 }), [0, 15, 30]);
        assert_eq!(chunk_starts("short", ChunkSize { min: 2, max: 9 }), [0]);
    }
}
