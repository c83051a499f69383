//! The brightest sentences of a conversation, word for word: a summary that says nothing that was not said.
//!
//! A sentence is as bright as its chunk (the mean attention per token and step, which does not favour old or new
//! text), times how bright its four brightest tokens are among those of the chunk. Text that no step has attended
//! to yet has no brightness and is left out.

use crate::timeline::{ChunkRef, Timeline};
use crate::token::{ChunkId, Position, TokenFlags};
use std::ops::Range;

/// A sentence of an extract.
#[derive(Clone, Debug, PartialEq)]
pub struct ExtractedSentence {
    /// The chunk that it is a part of.
    pub chunk: ChunkId,
    /// The position of its first token.
    pub position: Position,
    /// Its text as it was written, without white space around it.
    pub text: String,
    /// The larger, the more attention it received.
    pub brightness: f64,
}

/// The tokens of a sentence that count for its brightness.
const COUNTED_TOKENS: usize = 4;

/// The `limit` brightest sentences, in order of the timeline. Chunks for which `include` is false and those whose
/// body is not loaded are left out, and so are deleted and forgotten text and the chat template.
#[must_use]
pub fn brightest_sentences(
    timeline: &Timeline,
    limit: usize,
    include: impl Fn(ChunkRef<'_>) -> bool,
) -> Vec<ExtractedSentence> {
    let usable = |chunk: &ChunkRef<'_>| chunk.is_loaded() && !chunk.is_deleted() && !chunk.is_forgotten();
    let mut sentences: Vec<ExtractedSentence> =
        timeline.chunks().filter(usable).filter(|chunk| include(*chunk)).flat_map(chunk_sentences).collect();
    sentences.sort_by(|a, b| b.brightness.total_cmp(&a.brightness).then(a.position.cmp(&b.position)));
    sentences.truncate(limit);
    sentences.sort_by_key(|sentence| sentence.position);
    sentences
}

fn chunk_sentences(chunk: ChunkRef<'_>) -> Vec<ExtractedSentence> {
    let Some(share) = chunk.tally().share() else { return Vec::new() };
    let shown = |flags: TokenFlags| {
        !flags.contains(TokenFlags::TEMPLATE)
            && !flags.contains(TokenFlags::DELETED)
            && !flags.contains(TokenFlags::TOOL_RESULT)
    };
    let (mut text, mut tokens) = (String::new(), Vec::new());
    for run in chunk.runs_where(shown) {
        for position in run.positions() {
            let run = crate::change::TokenRun { start: position, len: 1 };
            tokens.push((text.len(), position, chunk.brightness(run)[0].0));
            text.push_str(chunk.text_of(run));
        }
    }
    let brightest = tokens.iter().map(|token| token.2).fold(f32::NEG_INFINITY, f32::max);
    let dimmest = tokens.iter().map(|token| token.2).fold(f32::INFINITY, f32::min);
    let relative = |brightness: f64| {
        let range = f64::from(brightest - dimmest);
        if range > 0.0 { (brightness - f64::from(dimmest)) / range } else { 1.0 }
    };
    let sentence = |range: Range<usize>| {
        // A token that reaches into two sentences belongs to the one in which it begins.
        let own = tokens.iter().filter(|(at, ..)| range.contains(at));
        let mut lights: Vec<f32> = own.clone().map(|token| token.2).collect();
        lights.sort_unstable_by(|a, b| b.total_cmp(a));
        lights.truncate(COUNTED_TOKENS);
        let mean = lights.iter().map(|&light| f64::from(light)).sum::<f64>() / lights.len() as f64;
        let position = own.map(|token| token.1).next()?;
        let text = text[range].trim().to_owned();
        Some(ExtractedSentence { chunk: chunk.id(), position, text, brightness: share * relative(mean) })
    };
    sentence_ranges(&text).into_iter().filter_map(sentence).collect()
}

/// The sentences of a text, with the white space behind each. A sentence ends at the end of a line, behind a full
/// stop, an exclamation mark or a question mark before white space, or behind such a mark of the CJK scripts.
/// Lines without a letter or a digit are left out.
fn sentence_ranges(text: &str) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let (mut start, mut chars) = (0, text.char_indices().peekable());
    while let Some((at, c)) = chars.next() {
        let next = chars.peek().map(|(_, next)| *next);
        let ends = match c {
            '\n' | '。' | '！' | '？' => true,
            '.' | '!' | '?' => next.is_none_or(char::is_whitespace),
            _ => next.is_none(),
        };
        if ends {
            let end = at + c.len_utf8();
            if text[start..end].contains(char::is_alphanumeric) {
                ranges.push(start..end);
            }
            start = end;
        }
    }
    ranges
}
