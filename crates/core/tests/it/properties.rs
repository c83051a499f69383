//! Property tests: random conversations compared with the naive timeline, and random texts for the chunker.

use halo_core::chunker::ChunkSize;
use halo_core::notation;
use halo_core::testing::chunker_checks;
use halo_core::testing::timeline_fuzz::TimelineFuzz;
use proptest::prelude::*;

/// A failure prints the smallest input that causes it; nothing is written into the tree.
/// A quarter of the cases in `make test`, all of them in `make soak`.
fn cases(cases: u32) -> ProptestConfig {
    let cases = if option_env!("HALO_TEST_THOROUGH").is_some() { cases } else { cases / 4 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Found by the property test: `prune.fill` kept an answer whose first chunk had been pruned earlier, and pruned its
/// question.
#[test]
fn prune_keeps_question_of_kept_answer() {
    TimelineFuzz::run(&[
        [63, 0, 57, 220],
        [36, 0, 61, 0],
        [156, 0, 123, 16],
        [12, 0, 127, 34],
        [183, 0, 39, 238],
        [219, 0, 30, 103],
        [37, 0, 54, 192],
        [99, 0, 82, 94],
        [195, 0, 5, 195],
        [166, 233, 0, 41],
        [15, 0, 1, 198],
        [180, 0, 112, 0],
        [78, 58, 127, 34],
    ]);
}

/// The current turn belongs to its exchange even when all of it is deleted.
#[test]
fn prune_keeps_call_before_deleted_current_turn() {
    TimelineFuzz::run(&[
        [243, 0, 178, 41],
        [220, 0, 6, 30],
        [15, 0, 133, 48],
        [30, 0, 0, 0],
        [243, 0, 0, 161],
        [166, 12, 0, 156],
        [162, 0, 40, 0],
    ]);
}

proptest! {
    #![proptest_config(cases(10_000))]

    /// Messages, attention, pruning, resurrection, pins, merges and deletions: after each, both timelines
    /// agree, every invariant holds, and every change can be undone and applied again.
    #[test]
    fn timeline_matches_naive_timeline(ops in prop::collection::vec(any::<[u8; 4]>(), 1..40)) {
        TimelineFuzz::run(&ops);
    }

    /// The same operations lead to the same hash; one more token leads to another.
    #[test]
    fn state_hash_differs_for_different_timelines(ops in prop::collection::vec(any::<[u8; 4]>(), 1..12)) {
        let (one, mut two) = (TimelineFuzz::run(&ops), TimelineFuzz::run(&ops));
        prop_assert_eq!(one.timeline.state_hash(), two.timeline.state_hash());
        two.step([0, 0, 1, 1]);
        prop_assert_ne!(one.timeline.state_hash(), two.timeline.state_hash());
    }
}

proptest! {
    #![proptest_config(cases(2_000))]

    /// The notation of a timeline can be read, and gives the same notation.
    #[test]
    fn notation_round_trips(ops in prop::collection::vec(any::<[u8; 4]>(), 1..20)) {
        let fuzz = TimelineFuzz::run(&ops);
        let text = notation::write(&fuzz.timeline);
        let read = notation::read(&text).expect("the notation can be read");
        prop_assert_eq!(notation::write(&read), text);
        prop_assert_eq!(read.context_window(0).positions(), fuzz.timeline.context_window(0).positions());
    }

    /// For every tokenization of a text, no chunk exceeds the maximum size, and all but the last have the minimum
    /// size.
    #[test]
    fn chunker_keeps_chunk_sizes(
        tokens in prop::collection::vec(prop::sample::select(TOKEN_TEXTS), 0..300),
        min in 1u32..12,
        more in 1u32..20,
    ) {
        chunker_checks::assert_chunk_sizes(ChunkSize { min, max: min + more }, &tokens);
    }

    /// A chunker that is resumed decides like one that reads the whole turn.
    #[test]
    fn chunker_resumes(
        tokens in prop::collection::vec((prop::sample::select(TOKEN_TEXTS), prop::bool::weighted(0.1)), 1..120),
        min in 1u32..9,
        more in 1u32..12,
    ) {
        chunker_checks::assert_chunker_resumes(ChunkSize { min, max: min + more }, &tokens);
    }
}

/// A tool result stands inside of the tag that opens a call, and a split cuts that tag in two: the resumed chunker took the
/// call for open, the other one did not.
#[test]
fn chunker_resumes_after_a_split_inside_a_tool_tag() {
    let word = ("w ", false);
    let mut tokens = vec![word; 7];
    tokens.extend([("<", false), ("tool", false), ("w ", true), (">", false)]);
    tokens.extend([word; 9]);
    tokens.push(("w ", true));
    chunker_checks::assert_chunker_resumes(ChunkSize { min: 8, max: 10 }, &tokens);
}

const TOKEN_TEXTS: &[&str] = &[
    "w ", "\n", "\n\n", "}", "\n}", "```", "\n```", "```\n", "~~~", "`", " ", ". ", "end.", "é", "。",
    "<tool>", "</tool>", "<", "tool", ">", "x\n\ny",
];
