//! The reasoning before an answer: it is a chunk of its own, and is pruned once the answer is finished.

use crate::event::Event;
use crate::parts::SessionParts;
use crate::turn_progress::TurnProgress;
use halo_core::Error;
use halo_core::change::{Change, Extent, PruneReason, Pruned};
use halo_core::store::Durability;
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Position, TokenFlags, TurnId};
use halo_core::tool_call::ReasoningFormat;

/// What a token means for the reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReasoningStep {
    None,
    /// The reasoning began with the first token of the answer.
    Begin(Position),
    /// This token completes the marker that ends it.
    End,
}

/// Finds the reasoning in an answer while it is generated.
#[derive(Debug)]
pub(crate) struct ReasoningTracker {
    format: ReasoningFormat,
    state: TrackerState,
    /// The answer so far, or its end.
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TrackerState {
    /// The answer may begin with reasoning; the position of its first token, if there is one.
    Undecided(Option<Position>),
    Inside,
    Outside,
}

impl ReasoningTracker {
    /// The state at the end of a turn of which only the header is written, or also the beginning of the reasoning.
    pub fn new(format: ReasoningFormat, timeline: &Timeline, turn: TurnId) -> Self {
        let positions = timeline.turn_chunks(turn).flat_map(|chunk| chunk.run().positions());
        let tokens: Vec<_> = positions.filter_map(|position| timeline.token(position)).collect();
        let has_text = tokens.iter().any(|token| !token.flags.contains(TokenFlags::TEMPLATE));
        let is_open = tokens.last().is_some_and(|token| token.chunk.index > 0);
        let state = match (has_text, is_open) {
            (true, _) => TrackerState::Outside,
            (false, true) => TrackerState::Inside,
            (false, false) => TrackerState::Undecided(None),
        };
        Self { format, state, text: String::new() }
    }

    /// Reads the token at a position.
    pub fn push(&mut self, text: &str, at: Position) -> ReasoningStep {
        match self.state {
            TrackerState::Outside => ReasoningStep::None,
            TrackerState::Undecided(first) => {
                let first = first.unwrap_or(at);
                self.text.push_str(text);
                let trimmed = self.text.trim_start();
                self.state = TrackerState::Undecided(Some(first));
                if trimmed.starts_with(self.format.open.as_str()) {
                    self.state = TrackerState::Inside;
                    return ReasoningStep::Begin(first);
                }
                if !self.format.open.starts_with(trimmed) {
                    self.state = TrackerState::Outside;
                }
                ReasoningStep::None
            }
            TrackerState::Inside => {
                self.text.push_str(text);
                if !self.text.contains(self.format.close.as_str()) {
                    // Only the end of the text can be the beginning of the marker.
                    let mut cut = self.text.len().saturating_sub(self.format.close.len());
                    while !self.text.is_char_boundary(cut) {
                        cut -= 1;
                    }
                    self.text.drain(..cut);
                    return ReasoningStep::None;
                }
                self.state = TrackerState::Outside;
                // A token that also begins the answer stays in the window, and so does the reasoning.
                match self.text.split(self.format.close.as_str()).nth(1) {
                    Some(rest) if !rest.trim().is_empty() => ReasoningStep::None,
                    _ => ReasoningStep::End,
                }
            }
        }
    }
}

/// Prunes the reasoning of a finished answer: the chunks of its turn up to `last`, without the header. Its KV cells are
/// freed, and nothing is prefilled again.
pub(crate) fn prune_reasoning(
    parts: &mut SessionParts,
    progress: &mut TurnProgress<'_>,
    turn: TurnId,
    last: u32,
) -> Result<(), Error> {
    let chunks = parts.timeline().turn_chunks(turn);
    let chunks: Vec<(ChunkId, usize)> = chunks
        .filter(|chunk| (1..=last).contains(&chunk.id().index) && chunk.is_live() && !chunk.is_pinned())
        .map(|chunk| (chunk.id(), chunk.live_len()))
        .collect();
    if chunks.is_empty() {
        return Ok(());
    }
    let pruned = chunks.iter().map(|&(chunk, _)| Pruned {
        chunk,
        extent: Extent::Whole,
        reason: PruneReason::Reasoning,
    });
    parts.commit(&Change::Prune(pruned.collect()), Durability::Immediate)?;
    progress.pruned += chunks.len();
    for (chunk, tokens) in chunks {
        progress.announce(Event::Pruned { chunk, tokens, reason: PruneReason::Reasoning.to_string() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracker() -> ReasoningTracker {
        let format = ReasoningFormat {
            open: "<think>".into(),
            close: "</think>".into(),
            prompt: String::new(),
            skip: None,
        };
        ReasoningTracker::new(format, &Timeline::new(), TurnId(0))
    }

    #[test]
    fn reasoning_tracker_finds_markers_across_tokens() {
        let steps = |tokens: &[&str]| -> Vec<ReasoningStep> {
            let mut tracker = tracker();
            tokens.iter().enumerate().map(|(n, token)| tracker.push(token, Position(n as u64))).collect()
        };
        use ReasoningStep::{Begin, End, None};
        assert_eq!(
            steps(&["\n", "<th", "ink>", "Hm", "</thi", "nk>", "Yes"]),
            [None, None, Begin(Position(0)), None, None, End, None]
        );
        assert_eq!(
            steps(&["<think>", "é é é é é é é é é", "</think>\n\n", "<think>"]),
            [Begin(Position(0)), None, End, None]
        );
        assert_eq!(steps(&["<", "b>", "<think>"]), [None, None, None]);
        assert_eq!(steps(&["<think>", "Hm.</think>Yes."]), [Begin(Position(0)), None]);
    }
}
