//! The origin of every byte of a memory: quotes of the user, text that the model wrote, and markup.

use super::record::Memory;
use super::segment::{Facet, PlacedMemory, memory_segment};
use halo_core::timeline::Timeline;
use halo_core::token::ChunkId;
use std::collections::BTreeSet;
use std::ops::Range;

/// A memory as text, with the origin of each part of it. The parts cover the whole text.
#[derive(Clone, Debug, PartialEq)]
pub struct TracedMemory {
    pub text: String,
    pub spans: Vec<TracedSpan>,
}

/// A part of a memory.
#[derive(Clone, Debug, PartialEq)]
pub struct TracedSpan {
    pub bytes: Range<usize>,
    pub kind: SpanKind,
    /// The chunk that it quotes or, for what the model wrote, the chunk that it shares the most words with.
    pub chunk: Option<ChunkId>,
    /// The share of its words that this chunk has; 1 for a quote.
    pub overlap: f64,
}

/// Who wrote a part of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "snake_case")]
pub enum SpanKind {
    /// The model, when the memory was formed.
    Model,
    /// The user, who edited the memory.
    User,
    /// The user, quoted word for word.
    Quote,
    /// The markup around the memory.
    Markup,
}

/// A sentence shares too little with a chunk below this share of its words.
const MIN_OVERLAP: f64 = 0.3;

/// Traces a memory: as it is placed in the window or, if it is not, its own text. The bodies of its range must be loaded.
#[must_use]
pub fn trace_memory(memory: &Memory, placed: Option<&PlacedMemory>, timeline: &Timeline) -> TracedMemory {
    let sources: Vec<(ChunkId, BTreeSet<String>)> = (memory.range.chunks(timeline))
        .filter(|chunk| chunk.is_loaded())
        .map(|chunk| (chunk.id(), content_words(&chunk.text())))
        .collect();
    let author = if memory.edited { SpanKind::User } else { SpanKind::Model };
    let mut traced = TracedMemory { text: String::new(), spans: Vec::new() };
    match placed {
        None => traced.push_written(&memory.text, author, &sources),
        Some(placed) => {
            let segment = memory_segment(placed);
            for (range, facet) in &segment.facets {
                let text = &segment.content[range.clone()];
                match facet {
                    Facet::Quote(_, chunk) => traced.push(text, SpanKind::Quote, Some(*chunk), 1.0),
                    Facet::Memory(_) => traced.push_written(text, author, &sources),
                    _ => traced.push(text, SpanKind::Markup, None, 0.0),
                }
            }
        }
    }
    traced
}

impl TracedMemory {
    fn push(&mut self, text: &str, kind: SpanKind, chunk: Option<ChunkId>, overlap: f64) {
        let start = self.text.len();
        self.text.push_str(text);
        if !text.is_empty() {
            self.spans.push(TracedSpan { bytes: start..self.text.len(), kind, chunk, overlap });
        }
    }

    /// Appends written text, sentence by sentence.
    fn push_written(&mut self, text: &str, kind: SpanKind, sources: &[(ChunkId, BTreeSet<String>)]) {
        for sentence in text.split_inclusive(['.', '!', '?', '\n', ';']) {
            let words = content_words(sentence);
            let overlap = |source: &BTreeSet<String>| {
                source.intersection(&words).count() as f64 / words.len().max(1) as f64
            };
            let best = sources.iter().map(|(chunk, source)| (*chunk, overlap(source)));
            let best = best.filter(|(_, overlap)| *overlap >= MIN_OVERLAP);
            let best = best.reduce(|best, other| if other.1 > best.1 { other } else { best });
            self.push(sentence, kind, best.map(|(chunk, _)| chunk), best.map_or(0.0, |(_, overlap)| overlap));
        }
    }
}

fn content_words(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|word| word.chars().count() > 3);
    words.map(str::to_lowercase).collect()
}
