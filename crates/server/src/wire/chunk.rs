//! Chunks and tokens.

use halo_core::attention::FocusedToken;
use halo_core::prune::RankBy;
use halo_core::timeline::{ChunkRef, Timeline};
use halo_core::token::{ContentKind, Position, Role};
use halo_engine::history::ChunkHistoryEntry;
use serde::Serialize;
use utoipa::ToSchema;

#[derive(Clone, Serialize, ToSchema)]
#[schema(as = Chunk)]
pub(crate) struct ApiChunk {
    /// Role, turn and index, such as `u4.0`.
    pub id: String,
    pub turn: u32,
    /// The index of the chunk in its turn.
    pub index: u32,
    /// user, assistant or system.
    pub role: &'static str,
    /// The position of its first token on the timeline.
    pub position: u64,
    /// Number of tokens, with those of the chat template.
    pub tokens: usize,
    /// Whether it is in the context window.
    pub live: bool,
    /// A pinned chunk is never pruned.
    pub pinned: bool,
    /// The brightness of its brightest token.
    pub peak: f32,
    /// Its rank for pruning relative to the other chunks of the context window, from 0 (pruned first) to 1; null if it is not in
    /// the context window.
    pub relative_brightness: Option<f32>,
    /// The mean attention that a token of it received from a generated token, in ‰; null if none was measured.
    pub attention: Option<f32>,
    pub text: String,
    /// The ranges of the text that are results of tools, in UTF-16 code units.
    pub tool_ranges: Vec<(usize, usize)>,
    /// How many pruned chunks are between it and the chunk before it in the context window.
    pub pruned_before: usize,
    /// The reason of the latest change to it, if it was requested.
    pub reason: Option<String>,
    /// The kind of that reason, as in the history of a chunk.
    pub reason_kind: Option<&'static str>,
}

impl ApiChunk {
    /// The body of the chunk must be loaded.
    pub fn from_chunk(chunk: ChunkRef<'_>, timeline: &Timeline, pruned_before: usize) -> Self {
        let (text, tool_ranges) = chunk_text(chunk, timeline);
        Self {
            id: chunk.id().to_string(),
            turn: chunk.id().turn.0,
            index: chunk.id().index,
            role: chunk.id().role.name(),
            position: chunk.start().0,
            tokens: chunk.len(),
            live: chunk.is_live(),
            pinned: chunk.is_pinned(),
            peak: chunk.peak().0,
            relative_brightness: None,
            attention: attention_permille(chunk),
            text,
            tool_ranges,
            pruned_before,
            reason: None,
            reason_kind: None,
        }
    }
}

/// The mean attention that a token of a chunk received from a generated token, in ‰.
pub(super) fn attention_permille(chunk: ChunkRef<'_>) -> Option<f32> {
    chunk.tally().share().map(|share| (share * 1e3) as f32)
}

/// The text of a chunk without its template tokens, and the ranges that are results of tools. Ranges count UTF-16 code units, as
/// JavaScript does.
fn chunk_text(chunk: ChunkRef<'_>, timeline: &Timeline) -> (String, Vec<(usize, usize)>) {
    let (mut text, mut tool_ranges, mut length): (String, Vec<(usize, usize)>, usize) = Default::default();
    for token in chunk.run().positions().filter_map(|position| timeline.token(position)) {
        let kind = token.flags.kind();
        if kind == ContentKind::Template {
            continue;
        }
        text.push_str(token.text);
        let end = length + utf16_len(token.text);
        if kind == ContentKind::ToolResult {
            match tool_ranges.last_mut() {
                Some(last) if last.1 == length => last.1 = end,
                _ => tool_ranges.push((length, end)),
            }
        }
        length = end;
    }
    (text, tool_ranges)
}

/// The chunks of the context window, in order.
pub(crate) fn context_window(timeline: &Timeline, rank: RankBy) -> Vec<ApiChunk> {
    let rows = with_pruned_before(timeline).zip(relative_brightness(timeline, rank));
    rows.map(|((chunk, pruned_before), brightness)| ApiChunk {
        relative_brightness: Some(brightness),
        ..ApiChunk::from_chunk(chunk, timeline, pruned_before)
    })
    .collect()
}

/// The brightness of each chunk relative to the others, from 0 to 1. Peaks are scaled linearly. The other measures are scaled by
/// rank: a few chunks receive most of the attention, and on a linear scale all others would look equally dark.
pub(crate) fn relative_brightness(timeline: &Timeline, rank: RankBy) -> Vec<f32> {
    let values: Vec<f64> = timeline.live_chunks().map(|chunk| rank.value_of(chunk)).collect();
    let mut sorted = values.clone();
    sorted.sort_by(f64::total_cmp);
    let (Some(&least), Some(&most)) = (sorted.first(), sorted.last()) else { return Vec::new() };
    let scale = |&value: &f64| {
        if least == most {
            0.5
        } else if rank == RankBy::Peak {
            (value - least) / (most - least)
        } else {
            // Equal values share the middle of their ranks.
            let below = sorted.partition_point(|v| *v < value);
            let up_to = sorted.partition_point(|v| *v <= value);
            (below + up_to - 1) as f64 / 2.0 / (sorted.len() - 1) as f64
        }
    };
    values.iter().map(|value| scale(value) as f32).collect()
}

/// The chunks of the context window, each with the number of pruned chunks before it.
pub(super) fn with_pruned_before(timeline: &Timeline) -> impl Iterator<Item = (ChunkRef<'_>, usize)> {
    let mut next = 0;
    timeline.live_chunks().map(move |chunk| {
        let between = (next..chunk.row_index()).filter_map(|row| timeline.chunk_at_row(row));
        next = chunk.row_index() + 1;
        (chunk, between.filter(|c| is_pruned(*c)).count())
    })
}

/// Whether a chunk is out of the context window and can be resurrected.
pub(crate) fn is_pruned(chunk: ChunkRef<'_>) -> bool {
    !chunk.is_live() && chunk.pruned_len() > 0
}

#[derive(Serialize, ToSchema)]
#[schema(as = ChunkHistoryEntry)]
pub(crate) struct ApiChunkHistoryEntry {
    /// In milliseconds since 1970.
    pub at: i64,
    /// pruned, resurrected, pinned, unpinned, deleted, undeleted, merged or split.
    pub action: &'static str,
    /// Empty where the log has none.
    pub reason: String,
    /// The kind of the reason. Of a pruning: full_dimmest, full_oldest, full_random, full_pair, user, user_dependent, client,
    /// import or undo. Of a resurrection: search, opens_turn, pair, user, merged or undo. Empty for other actions.
    pub reason_kind: &'static str,
}

impl From<ChunkHistoryEntry> for ApiChunkHistoryEntry {
    fn from(entry: ChunkHistoryEntry) -> Self {
        let ChunkHistoryEntry { at, action, reason, reason_kind, .. } = entry;
        Self { at, action: action.as_str(), reason, reason_kind }
    }
}

/// A chunk with its tokens, its attention and its history.
#[derive(Serialize, ToSchema)]
#[schema(as = ChunkDetail)]
pub(crate) struct ApiChunkDetail {
    pub chunk: ApiChunk,
    pub tokens: Vec<ApiToken>,
    /// How many votes its tokens received in scoring.
    pub votes: u64,
    /// The sum of the attention that it received.
    pub attention: f64,
    /// The mean share of attention that one of its tokens received per step; null if it was never in the context while attention
    /// was measured.
    pub share: Option<f64>,
    /// The oldest entry first.
    pub history: Vec<ApiChunkHistoryEntry>,
    /// The chunk that is pruned and resurrected together with it.
    pub pair: Option<String>,
    /// The chunks that are deleted together with it.
    pub dependents: Vec<ApiChunk>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Token)]
pub(crate) struct ApiToken {
    /// The position on the timeline.
    pub position: u64,
    /// The id in the vocabulary of the model.
    pub id: u32,
    pub text: String,
    pub brightness: f32,
    /// Whether it is in the context window.
    pub live: bool,
    /// Whether it belongs to the chat template and not to a message.
    pub template: bool,
}

#[derive(Serialize, ToSchema)]
#[schema(as = ChunkPage)]
pub(crate) struct ApiChunkPage {
    /// The number of matching chunks on all pages.
    pub total: usize,
    pub chunks: Vec<ApiChunk>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = SearchHit)]
pub(crate) struct ApiSearchHit {
    pub chunk: ApiChunk,
    pub score: f64,
    /// Why it matches the query.
    pub reason: String,
    /// The probability that it answers the query, from 0 to 1.
    pub relevance: f64,
    /// Whether its relevance is below `resurrect.floor`: a message with this text does not bring it back.
    pub below_floor: bool,
}

/// The attention of a token when it was generated: shares of all attention, over all layers and heads.
#[derive(Serialize, ToSchema)]
#[schema(as = TokenAttention)]
pub(crate) struct ApiTokenAttention {
    pub turn: u32,
    pub text: String,
    /// The share of the system prompt, with the first token, which is the attention sink.
    pub system_prompt: f32,
    /// The share of the earlier tokens of the answer.
    pub answer: f32,
    /// The shares of chunks, the largest first.
    pub chunks: Vec<(String, f32)>,
    /// The tokens with the largest shares.
    pub tokens: Vec<ApiAttendedToken>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = AttendedToken)]
pub(crate) struct ApiAttendedToken {
    /// The position on the timeline.
    pub position: u64,
    pub chunk: String,
    /// Empty if the chunk is unloaded.
    pub text: String,
    /// Where the token starts and ends in the text of the chunk, in UTF-16 code units; null for a token of the chat template,
    /// and if the chunk is unloaded.
    pub range: Option<(usize, usize)>,
    pub share: f32,
}

/// A token with its share of the attention to the earlier messages.
#[derive(Serialize, ToSchema)]
#[schema(as = FocusedToken)]
pub(crate) struct ApiFocusedToken {
    pub chunk: String,
    /// The position on the timeline.
    pub position: u64,
    /// Where the token starts in the text of the chunk, in UTF-16 code units.
    pub start: usize,
    /// Where the token ends in that text.
    pub end: usize,
    pub share: f32,
}

impl ApiFocusedToken {
    /// None for a token of the chat template, and where the chunk is unloaded.
    pub fn new(token: &FocusedToken, timeline: &Timeline) -> Option<Self> {
        let (start, end) = token_range(timeline.chunk(token.chunk)?, timeline, token.position)?;
        let (chunk, position) = (token.chunk.to_string(), token.position.0);
        Some(Self { chunk, position, start, end, share: token.share })
    }
}

/// The range of a token in the text of its chunk, in UTF-16 code units. None for a token of the chat template.
pub(crate) fn token_range(
    chunk: ChunkRef<'_>,
    timeline: &Timeline,
    position: Position,
) -> Option<(usize, usize)> {
    let wanted = timeline.token(position)?;
    if wanted.flags.kind() == ContentKind::Template {
        return None;
    }
    let before = chunk.run().positions().take_while(|other| *other < position);
    let before = before.filter_map(|other| timeline.token(other));
    let before = before.filter(|token| token.flags.kind() != ContentKind::Template);
    let start = before.map(|token| utf16_len(token.text)).sum();
    Some((start, start + utf16_len(wanted.text)))
}

fn utf16_len(text: &str) -> usize {
    text.encode_utf16().count()
}

/// The brightest tokens of the context window.
#[derive(Serialize, ToSchema)]
#[schema(as = WindowBrightness)]
pub(crate) struct ApiWindowBrightness {
    /// The brightness from which on tokens are listed.
    pub floor: f32,
    /// The brightness of the brightest token.
    pub peak: f32,
    pub chunks: Vec<ApiBrightTokens>,
}

/// The bright tokens of one chunk.
#[derive(Serialize, ToSchema)]
#[schema(as = BrightTokens)]
pub(crate) struct ApiBrightTokens {
    pub chunk: String,
    /// For each token: where it starts and ends in the text of the chunk, in UTF-16 code units, and its brightness.
    pub tokens: Vec<(usize, usize, f32)>,
}

impl ApiWindowBrightness {
    /// The message tokens whose brightness is in the top `part` of the range between the dimmest and the brightest one. The latest
    /// answer is left out: no answer has attended to it yet. Where all tokens are equally bright, none is listed.
    pub fn new(timeline: &Timeline, part: f64) -> Self {
        let answer = timeline.turns().last().map(|turn| turn.id);
        let is_scored =
            |chunk: &ChunkRef<'_>| chunk.id().role != Role::Assistant || Some(chunk.id().turn) != answer;
        let mut rows = Vec::new();
        let (mut least, mut peak) = (f32::INFINITY, f32::NEG_INFINITY);
        for chunk in timeline.live_chunks().filter(is_scored) {
            let (mut tokens, mut start) = (Vec::new(), 0);
            for token in chunk.run().positions().filter_map(|position| timeline.token(position)) {
                if token.flags.kind() == ContentKind::Template {
                    continue;
                }
                let end = start + utf16_len(token.text);
                if token.flags.is_live() && !token.text.trim().is_empty() {
                    let brightness = token.brightness.0;
                    (least, peak) = (least.min(brightness), peak.max(brightness));
                    tokens.push((start, end, brightness));
                }
                start = end;
            }
            rows.push(ApiBrightTokens { chunk: chunk.id().to_string(), tokens });
        }
        if least >= peak {
            let level = if least.is_finite() { least } else { 0.0 };
            return Self { floor: level, peak: level, chunks: Vec::new() };
        }
        let floor = peak - (peak - least) * part.clamp(0.0, 1.0) as f32;
        for row in &mut rows {
            row.tokens.retain(|token| token.2 >= floor);
        }
        rows.retain(|row| !row.tokens.is_empty());
        Self { floor, peak, chunks: rows }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::notation;

    #[test]
    fn relative_brightness_follows_prune_rank() {
        let timeline = notation::read("u0.0:3*900 a1.0:2*700 u2.0:4*700 a3.0:2*100").expect("a timeline");
        let brightness = |rank| relative_brightness(&timeline, rank);
        assert_eq!(brightness(RankBy::Peak), [1.0, 0.75, 0.75, 0.0], "peaks are scaled linearly");
        assert_eq!(brightness(RankBy::Mean), [1.0, 0.5, 0.5, 0.0], "other measures are scaled by rank");
        assert_eq!(brightness(RankBy::Share), [0.5; 4], "no chunk has received attention");
        let one = notation::read("u0.0:3*900").expect("a timeline");
        assert_eq!(relative_brightness(&one, RankBy::Mean), [0.5]);
    }

    #[test]
    fn brightest_tokens_of_the_window() {
        let timeline = notation::read("u0.0:3*900 a1.0:2*800 u2.0:4*700 a3.0:1*900").expect("a timeline");
        let bright = |part| {
            let window = ApiWindowBrightness::new(&timeline, part);
            let counts = window.chunks.iter().map(|row| (row.chunk.clone(), row.tokens.len()));
            (counts.collect::<Vec<_>>(), window.floor, window.peak)
        };
        let row = |chunk: &str, tokens| (chunk.to_owned(), tokens);
        assert_eq!(bright(0.2), (vec![row("u0.0", 3)], 860.0, 900.0), "the latest answer is left out");
        assert_eq!(bright(0.5), (vec![row("u0.0", 3), row("a1.0", 2)], 800.0, 900.0));
        assert_eq!(bright(1.0).0, [row("u0.0", 3), row("a1.0", 2), row("u2.0", 4)]);
        let equal = notation::read("u0.0:9*900").expect("a timeline");
        assert!(ApiWindowBrightness::new(&equal, 0.5).chunks.is_empty(), "a window that was never scored");
    }
}
