//! What is to be remembered: ranges of whole turns that have enough tokens to be worth it, never more than one memory can
//! hold. All thresholds are in tokens: nothing here knows what time it is.

use super::MemoryRules;
use halo_core::timeline::Timeline;
use halo_core::token::ChunkId;

/// From one chunk to another, both included: turn and sentence of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first.
    pub from: (u32, u32),
    /// The last.
    pub to: (u32, u32),
}

/// Where a chunk stands.
fn place(chunk: ChunkId) -> (u32, u32) {
    (chunk.turn.0, chunk.sentence)
}

impl Span {
    /// Whether a chunk is in it.
    #[must_use]
    pub fn contains(&self, chunk: ChunkId) -> bool {
        (self.from..=self.to).contains(&place(chunk))
    }

    /// Its chunks that were not taken back, in order.
    pub fn chunks<'a>(
        &self,
        timeline: &'a Timeline,
    ) -> impl Iterator<Item = halo_core::timeline::ChunkRef<'a>> + use<'a> {
        let span = *self;
        let turns = timeline.turns();
        let first = turns.partition_point(|turn| turn.id.0 < span.from.0);
        let turns = turns[first..].iter().take_while(move |turn| turn.id.0 <= span.to.0);
        let chunks = turns.flat_map(|turn| timeline.turn_chunks(turn.id));
        chunks.filter(move |chunk| span.contains(chunk.id()) && !chunk.is_withdrawn())
    }
}

/// The next range that is to be remembered, from the first chunk on of which there is no memory; none while there is too
/// little. What the model has never seen in this window, because it came from elsewhere and is dead, it cannot remember.
#[must_use]
pub fn due(timeline: &Timeline, formed: (u32, u32), rules: &MemoryRules) -> Option<Span> {
    first_range(&unremembered(timeline, formed), rules)
}

/// The chunks of which there is no memory and could be, each with its place and tokens.
pub(super) fn unremembered(timeline: &Timeline, formed: (u32, u32)) -> Vec<((u32, u32), usize)> {
    let mut sizes = Vec::new();
    let mut lived = false;
    let turns = timeline.turns();
    let first = turns.partition_point(|turn| turn.id.0 < formed.0);
    for turn in &turns[first..] {
        for chunk in timeline.turn_chunks(turn.id) {
            lived |= chunk.is_live();
            if place(chunk.id()) >= formed && lived && !chunk.is_withdrawn() {
                sizes.push((place(chunk.id()), chunk.len()));
            }
        }
    }
    sizes
}

/// The first range of chunks, each with its place and tokens. Whole turns, as many as fit; where one turn alone is too much,
/// its chunks.
fn first_range(sizes: &[((u32, u32), usize)], rules: &MemoryRules) -> Option<Span> {
    let total: usize = sizes.iter().map(|(_, tokens)| tokens).sum();
    if total < rules.range.max(1) {
        return None;
    }
    let from = sizes.first()?.0;
    let (mut to, mut whole, mut tokens) = (from, None, 0);
    for (n, (place, size)) in sizes.iter().enumerate() {
        if tokens + size > rules.most && tokens > 0 {
            // A turn is cut only where it does not fit whole.
            return Some(Span { from, to: whole.unwrap_or(to) });
        }
        tokens += size;
        to = *place;
        if sizes.get(n + 1).is_none_or(|(next, _)| next.0 != place.0) && tokens >= rules.range {
            whole = Some(to);
        }
    }
    Some(Span { from, to })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_whole_turns_and_no_more_than_a_memory_holds() {
        let rules = MemoryRules { range: 500, most: 2000, ..MemoryRules::default() };
        type Case<'a> = (&'a str, &'a [(u32, u32, usize)], Option<((u32, u32), (u32, u32))>);
        let cases: &[Case<'_>] = &[
            ("nothing", &[], None),
            ("too little", &[(0, 0, 200), (1, 0, 299)], None),
            ("just enough", &[(0, 0, 200), (1, 0, 300)], Some(((0, 0), (1, 0)))),
            ("all that fits", &[(0, 0, 900), (1, 0, 900), (1, 1, 200)], Some(((0, 0), (1, 1)))),
            ("whole turns", &[(0, 0, 900), (1, 0, 900), (1, 1, 300)], Some(((0, 0), (0, 0)))),
            ("a long turn is cut", &[(4, 0, 900), (4, 1, 900), (4, 2, 900)], Some(((4, 0), (4, 1)))),
            (
                "a short turn before a long one goes with its beginning",
                &[(0, 0, 100), (1, 0, 1000), (1, 1, 1000)],
                Some(((0, 0), (1, 0))),
            ),
            ("one chunk is never cut", &[(0, 0, 5000), (1, 0, 100)], Some(((0, 0), (0, 0)))),
        ];
        for (name, sizes, expected) in cases {
            let sizes: Vec<_> = sizes.iter().map(|&(turn, sentence, n)| ((turn, sentence), n)).collect();
            let span = first_range(&sizes, &rules).map(|span| (span.from, span.to));
            assert_eq!(span, *expected, "{name}");
        }
    }

    #[test]
    fn a_large_injection_becomes_several_memories() {
        let rules = MemoryRules::default();
        let mut sizes: Vec<_> = (0..40).map(|n| ((7, n), 256)).collect();
        let mut parts = Vec::new();
        while let Some(span) = first_range(&sizes, &rules) {
            let tokens: usize = sizes.iter().filter(|(p, _)| *p <= span.to).map(|(_, n)| n).sum();
            assert!(tokens <= rules.most);
            parts.push(tokens);
            sizes.retain(|(p, _)| *p > span.to);
        }
        assert_eq!(parts, [1792, 1792, 1792, 1792, 1792, 1280]);
    }
}
