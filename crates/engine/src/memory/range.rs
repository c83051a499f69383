//! The ranges that memories are formed of: whole turns with enough tokens, and not more than one memory can summarize. All
//! thresholds are in tokens; nothing here reads a clock.

use super::rules::MemoryRules;
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, TurnId};
use std::collections::BTreeSet;

/// The chunks from one to another, both included, each given as turn and index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    pub from: (u32, u32),
    pub to: (u32, u32),
}

fn chunk_order(chunk: ChunkId) -> (u32, u32) {
    (chunk.turn.0, chunk.index)
}

impl MemoryRange {
    /// The range of a memory that was carried from another conversation: it has no chunk of this one.
    pub const NONE: Self = Self { from: (1, 0), to: (0, 0) };

    #[must_use]
    pub fn contains(&self, chunk: ChunkId) -> bool {
        (self.from..=self.to).contains(&chunk_order(chunk))
    }

    /// Its chunks that are not deleted, in order.
    pub fn chunks<'a>(
        &self,
        timeline: &'a Timeline,
    ) -> impl Iterator<Item = halo_core::timeline::ChunkRef<'a>> + use<'a> {
        let range = *self;
        let turns = timeline.turns();
        let first = turns.partition_point(|turn| turn.id.0 < range.from.0);
        let turns = turns[first..].iter().take_while(move |turn| turn.id.0 <= range.to.0);
        let chunks = turns.flat_map(|turn| timeline.turn_chunks(turn.id));
        chunks.filter(move |chunk| range.contains(chunk.id()) && !chunk.is_deleted())
    }
}

/// The next range that a memory is formed of, from the first chunk that no memory covers; none while it has too few tokens.
/// Turns that were answered here count also where they were pruned since. Imported turns before the first live one do not:
/// the model has not read them.
#[must_use]
pub fn next_range(
    timeline: &Timeline,
    formed: (u32, u32),
    answered: &BTreeSet<TurnId>,
    rules: &MemoryRules,
) -> Option<MemoryRange> {
    uncovered_chunks(timeline, formed, answered).iter().find_map(|run| first_range(run, rules))
}

/// A chunk as turn and index, with its tokens.
type SizedChunk = ((u32, u32), usize);

/// The chunks that no memory covers and one could: runs without a gap, each chunk with its place and tokens.
pub(super) fn uncovered_chunks(
    timeline: &Timeline,
    formed: (u32, u32),
    answered: &BTreeSet<TurnId>,
) -> Vec<Vec<SizedChunk>> {
    let (mut runs, mut seen_live, mut in_run) = (Vec::<Vec<SizedChunk>>::new(), false, false);
    let turns = timeline.turns();
    let first = turns.partition_point(|turn| turn.id.0 < formed.0);
    let questions: BTreeSet<TurnId> =
        answered.iter().filter_map(|&answer| timeline.question_of(answer)).collect();
    for turn in &turns[first..] {
        let was_read = answered.contains(&turn.id) || questions.contains(&turn.id);
        for chunk in timeline.turn_chunks(turn.id) {
            seen_live |= chunk.is_live();
            if chunk_order(chunk.id()) < formed || chunk.is_deleted() {
                continue;
            }
            if !(seen_live || was_read) {
                in_run = false;
                continue;
            }
            if !std::mem::replace(&mut in_run, true) {
                runs.push(Vec::new());
            }
            runs.last_mut().into_iter().for_each(|run| run.push((chunk_order(chunk.id()), chunk.len())));
        }
    }
    runs
}

/// Where the overlap of a range with the text before it begins: whole turns before it, of at most so many tokens.
#[must_use]
pub fn overlap_start(timeline: &Timeline, range: MemoryRange, max_tokens: usize) -> Option<(u32, u32)> {
    let turns = timeline.turns();
    let end = turns.partition_point(|turn| turn.id.0 < range.from.0);
    let mut tokens = 0;
    let mut start = None;
    for turn in turns[..end].iter().rev() {
        let chunks = timeline.turn_chunks(turn.id).filter(|chunk| !chunk.is_deleted());
        let len: usize = chunks.map(|chunk| chunk.len()).sum();
        if len == 0 {
            continue;
        }
        tokens += len;
        if tokens > max_tokens {
            break;
        }
        start = Some((turn.id.0, 0));
    }
    start
}

/// The first range of some chunks, each with its place and tokens: as many whole turns as fit or, where one turn alone does
/// not, chunks of it.
fn first_range(sizes: &[SizedChunk], rules: &MemoryRules) -> Option<MemoryRange> {
    let total: usize = sizes.iter().map(|(_, tokens)| tokens).sum();
    if total < rules.range_tokens.max(1) {
        return None;
    }
    let from = sizes.first()?.0;
    let (mut to, mut turn_end, mut tokens) = (from, None, 0);
    for (n, (place, size)) in sizes.iter().enumerate() {
        if tokens + size > rules.max_range_tokens && tokens > 0 {
            // A turn is split only where it does not fit whole.
            return Some(MemoryRange { from, to: turn_end.unwrap_or(to) });
        }
        tokens += size;
        to = *place;
        if sizes.get(n + 1).is_none_or(|(next, _)| next.0 != place.0) && tokens >= rules.range_tokens {
            turn_end = Some(to);
        }
    }
    Some(MemoryRange { from, to })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_range_covers_whole_turns_up_to_the_limit() {
        let rules = MemoryRules { range_tokens: 500, max_range_tokens: 2000, ..MemoryRules::default() };
        type MemoryRangeCase<'a> = (&'a str, &'a [(u32, u32, usize)], Option<((u32, u32), (u32, u32))>);
        let cases: &[MemoryRangeCase<'_>] = &[
            ("nothing", &[], None),
            ("too little", &[(0, 0, 200), (1, 0, 299)], None),
            ("just enough", &[(0, 0, 200), (1, 0, 300)], Some(((0, 0), (1, 0)))),
            ("all that fits", &[(0, 0, 900), (1, 0, 900), (1, 1, 200)], Some(((0, 0), (1, 1)))),
            ("whole turns", &[(0, 0, 900), (1, 0, 900), (1, 1, 300)], Some(((0, 0), (0, 0)))),
            ("a long turn is split", &[(4, 0, 900), (4, 1, 900), (4, 2, 900)], Some(((4, 0), (4, 1)))),
            (
                "a short turn is joined with the start of the long turn after it",
                &[(0, 0, 100), (1, 0, 1000), (1, 1, 1000)],
                Some(((0, 0), (1, 0))),
            ),
            ("one chunk is never split", &[(0, 0, 5000), (1, 0, 100)], Some(((0, 0), (0, 0)))),
        ];
        for (name, sizes, expected) in cases {
            let sizes: Vec<_> = sizes.iter().map(|&(turn, index, n)| ((turn, index), n)).collect();
            let range = first_range(&sizes, &rules).map(|range| (range.from, range.to));
            assert_eq!(range, *expected, "{name}");
        }
    }

    #[test]
    fn memory_range_splits_a_long_turn() {
        let rules = MemoryRules::default();
        let mut sizes: Vec<_> = (0..40).map(|n| ((7, n), 256)).collect();
        let mut parts = Vec::new();
        while let Some(range) = first_range(&sizes, &rules) {
            let tokens: usize = sizes.iter().filter(|(p, _)| *p <= range.to).map(|(_, n)| n).sum();
            assert!(tokens <= rules.max_range_tokens);
            parts.push(tokens);
            sizes.retain(|(p, _)| *p > range.to);
        }
        assert_eq!(parts, [1792, 1792, 1792, 1792, 1792, 1280]);
    }
}
