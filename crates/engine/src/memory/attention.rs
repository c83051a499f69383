//! Attention rows without the slots of placed memories: a memory is attended to, but has no brightness of its own.

use halo_core::model::{AttentionRow, ModelStep, WindowToken};
use std::ops::Range;

/// The slots of a context window that placed memories occupy.
pub(crate) struct MemorySlots(Vec<Range<usize>>);

impl MemorySlots {
    pub fn in_window(window: &[WindowToken]) -> Self {
        let mut slots: Vec<Range<usize>> = Vec::new();
        for (n, _) in window.iter().enumerate().filter(|(_, token)| token.offset > 0) {
            match slots.last_mut() {
                Some(last) if last.end == n => last.end += 1,
                _ => slots.push(n..n + 1),
            }
        }
        Self(slots)
    }

    /// The attention of a step without these slots; none where there is nothing to remove.
    pub fn strip(&self, step: &ModelStep<'_>) -> Option<MemoryFreeAttention> {
        let (ModelStep::PromptAttention(row) | ModelStep::Token(_, Some(row))) = step else { return None };
        if self.0.is_empty() {
            return None;
        }
        let heads = row.per_head.chunks(row.mean.len().max(1));
        Some(MemoryFreeAttention {
            mean: self.remove_from(row.mean),
            max: self.remove_from(row.max),
            per_head: heads.flat_map(|head| self.remove_from(head)).collect(),
        })
    }

    fn remove_from(&self, row: &[f32]) -> Vec<f32> {
        let mut out = Vec::with_capacity(row.len());
        let mut at = 0;
        for slots in &self.0 {
            out.extend_from_slice(&row[at.min(row.len())..slots.start.min(row.len())]);
            at = slots.end;
        }
        out.extend_from_slice(&row[at.min(row.len())..]);
        out
    }
}

/// An attention row without the slots of memories.
pub(crate) struct MemoryFreeAttention {
    mean: Vec<f32>,
    max: Vec<f32>,
    per_head: Vec<f32>,
}

impl MemoryFreeAttention {
    pub fn replace_rows<'a>(&'a self, step: ModelStep<'a>) -> ModelStep<'a> {
        let row = |probability| AttentionRow {
            mean: &self.mean,
            max: &self.max,
            per_head: &self.per_head,
            probability,
        };
        match step {
            ModelStep::PromptAttention(_) => ModelStep::PromptAttention(row(None)),
            ModelStep::Token(token, Some(whole)) => ModelStep::Token(token, Some(row(whole.probability))),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::token::{Position, TokenId};

    #[test]
    fn attention_rows_skip_memory_slots() {
        let token =
            |offset| WindowToken { position: Some(Position(3)), offset, id: TokenId(1), chunk_start: false };
        let window = [0, 1, 2, 0, 0, 1, 0].map(token);
        let slots = MemorySlots::in_window(&window);
        assert!(!slots.0.is_empty() && MemorySlots::in_window(&window[..1]).0.is_empty());
        let row = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7];
        assert_eq!(slots.remove_from(&row), [0.1, 0.4, 0.5, 0.7]);
        // A row may end before the memories or within them.
        assert_eq!(slots.remove_from(&row[..5]), [0.1, 0.4, 0.5]);
        assert_eq!(slots.remove_from(&row[..2]), [0.1]);
        assert_eq!(slots.remove_from(&[]), [0.0; 0]);
    }
}
