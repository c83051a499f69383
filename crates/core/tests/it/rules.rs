//! Rules that are not about a timeline: time-to-live scoring, budget, salience, sliding window, tool results.

use halo_core::attention::{AttentionHistogram, AttentionStats, is_traced};
use halo_core::brightness::{MagnitudeRules, ScoringStrategy};
use halo_core::budget::{TurnBudget, pressure};
use halo_core::change::{Append, Change, NewToken};
use halo_core::chunker::{ChunkSize, Chunker};
use halo_core::notation;
use halo_core::prune::{PrunePolicy, PruneRules, plan_prune};
use halo_core::salience::{SalienceScorer, SalienceWeights, UNKNOWN_RECENCY, recency};
use halo_core::scorer::Scorer;
use halo_core::sliding_window::{HIGH_PRESSURE, SlidingWindow, WindowSize};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Position, Role, TokenId, TokenSource, TurnId};
use halo_core::ttl::TtlRules;

#[test]
fn chunk_id_round_trips_through_text() {
    for name in ["u4.0", "a5.2", "s0.0", "u4294967295.7"] {
        assert_eq!(name.parse::<ChunkId>().map(|c| c.to_string()).as_deref(), Ok(name));
    }
    for name in [
        "",
        "u",
        "4.0",
        "u4",
        "u4.",
        "u.0",
        "x4.0",
        "u4.0.1",
        "u-1.0",
        "u+1.0",
        "U4.0",
        "ü4.0",
        "u99999999999.0",
    ] {
        let error = name.parse::<ChunkId>().expect_err(name).to_string();
        assert!(error.contains(&format!("'{name}'")) && error.contains("u4.0"), "{error}");
    }
}

// --- time to live ---

#[test]
fn ttl_initial_brightness_by_source() {
    let strategy = ScoringStrategy::Ttl(TtlRules::default());
    let initial =
        [TokenSource::User, TokenSource::System, TokenSource::Tool, TokenSource::Llm, TokenSource::Other]
            .map(|s| strategy.initial_brightness(s).0);
    assert_eq!(initial, [255.0, 255.0, 255.0, 200.0, 200.0]);
    assert_eq!(TokenSource::from_role(Role::Assistant, true), TokenSource::Tool);
    assert_eq!(TokenSource::from_role(Role::Assistant, false), TokenSource::Llm);
}

/// Decay, gain, both, the limits, and truncated and fractional gain.
#[test]
fn ttl_update_decays_and_gains() {
    type TtlUpdateCase<'a> = (TtlRules, &'a [f32], &'a [f32], &'a [f32]);
    let cases: &[TtlUpdateCase<'_>] = &[
        (TtlRules { decay: 5.0, ..TtlRules::default() }, &[100.0, 50.0], &[0.0, 0.0], &[95.0, 45.0]),
        (TtlRules { decay: 0.0, ..TtlRules::default() }, &[100.0, 50.0], &[0.5, 0.2], &[105.0, 52.0]),
        (TtlRules { decay: 3.0, ..TtlRules::default() }, &[100.0, 50.0], &[0.5, 0.2], &[102.0, 49.0]),
        (TtlRules { decay: 5.0, ..TtlRules::default() }, &[2.0], &[0.0], &[0.0]),
        (TtlRules { decay: 0.0, gain: 20.0, ..TtlRules::default() }, &[250.0], &[1.0], &[255.0]),
        (TtlRules::default(), &[100.0], &[0.15], &[99.0]),
        (TtlRules { whole_gain: false, ..TtlRules::default() }, &[100.0], &[0.15], &[99.5]),
        (TtlRules::default(), &[100.0, 100.0], &[0.09, 0.1], &[98.0, 99.0]),
        (
            TtlRules { whole_gain: false, decay: 0.01, ..TtlRules::default() },
            &[100.0; 4],
            &[0.15, 0.6, 0.05, 0.5],
            &[101.49, 105.99, 100.49, 104.99],
        ),
    ];
    for (ttl, before, attention, after) in cases {
        let mut brightness = before.to_vec();
        ttl.update(&mut brightness, attention);
        let near = brightness.iter().zip(*after).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(near, "{brightness:?} is not {after:?}");
    }
}

#[test]
fn ttl_cull_picks_dimmest_tokens() {
    let ttl = |target| TtlRules { target, ..TtlRules::default() };
    let cases: &[(usize, &[f32], &[usize])] = &[
        (5, &[100.0; 3], &[]),
        (5, &[100.0, 90.0, 50.0, 80.0, 70.0], &[2]),
        (5, &[90.0, 30.0, 80.0, 20.0, 70.0, 60.0, 85.0], &[1, 3]),
        (4, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[0, 1]),
        (5, &[9.0, 8.0, 7.0, 6.0, 5.0, 4.0], &[5]),
        (3, &[7.0, 7.0, 7.0], &[0]),
        (0, &[], &[]),
    ];
    for (target, brightness, culled) in cases {
        assert_eq!(ttl(*target).cull(brightness, |_| true), *culled, "{brightness:?}");
    }
    assert_eq!(ttl(3).cull(&[1.0, 2.0, 3.0], |i| i != 0), [1], "the predicate protects slot 0");
    assert_eq!(ttl(3).cull(&[1.0, 2.0, 3.0], |_| false), Vec::<usize>::new());
}

/// Culling keeps the window at its target; culled tokens stay on the timeline.
#[test]
fn ttl_cull_keeps_window_at_target() {
    let mut timeline = notation::read("u0.0[255,40,255,30] a1.0:2*200").expect("a valid timeline");
    let ttl = TtlRules { target: 5, ..TtlRules::default() };
    let mut scorer = Scorer::new(ScoringStrategy::Ttl(ttl), timeline.context_window(0), Some(TurnId(1)));
    scorer.observe(Some(&[0.5, 0.1, 0.1, 0.1, 0.1, 0.1])).expect("valid attention");
    let culled = scorer.cull(|p| p != Position(0)).expect("the window exceeds its target");
    timeline.apply(&culled).expect("the change applies");
    assert_eq!(scorer.len(), 5);
    scorer.observe(Some(&[0.5, 0.1, 0.1, 0.1, 0.2])).expect("valid attention");
    let culled = scorer.cull(|p| p != Position(0)).expect("the window is full");
    timeline.apply(&culled).expect("the change applies");
    timeline.apply(&scorer.finish()).expect("the change applies");
    assert_eq!(notation::write(&timeline), "u0.0[255,~38,253,~29] a1.0[198,199]");
    timeline.check_invariants().expect("the invariants hold");
}

/// Shares are those of the earlier messages: neither the prefix nor the running turn has one.
#[test]
fn focus_names_the_strongest_tokens_and_the_shares_of_chunks() {
    let timeline = notation::read("u0.0:2*900 u0.1:3*900 a1.0:1*900").expect("a valid timeline");
    let scorer = |prefix| {
        let strategy = ScoringStrategy::Magnitude(MagnitudeRules::default());
        Scorer::new(strategy, timeline.context_window(prefix), Some(TurnId(1)))
    };
    let shares = |prefix, row: &[f32], max_tokens| {
        let focus = scorer(prefix).focus(row, max_tokens)?;
        let hundredths = |share: f32| (share * 100.0).round() as u32;
        let tokens = focus.tokens.iter();
        let tokens: Vec<_> =
            tokens.map(|t| (t.chunk.to_string(), t.position.0, hundredths(t.share))).collect();
        let chunks = focus.chunks.iter().map(|(chunk, share)| (chunk.to_string(), hundredths(*share)));
        Some((tokens, chunks.collect::<Vec<_>>()))
    };
    let token = |chunk: &str, position, share| (chunk.to_owned(), position, share);
    let chunk = |chunk: &str, share| (chunk.to_owned(), share);
    let row = [0.3, 0.0, 0.1, 0.05, 0.2, 0.05, 0.3];
    assert_eq!(
        shares(1, &row, 2),
        Some((vec![token("u0.1", 3, 50), token("u0.0", 1, 25)], vec![chunk("u0.0", 25), chunk("u0.1", 75)])),
        "the slot of the system prompt and the token of the running turn are left out"
    );
    let without_prefix = shares(0, &row[1..], 9).expect("the row has attention");
    let ties = vec![token("u0.1", 3, 50), token("u0.0", 1, 25), token("u0.1", 2, 13), token("u0.1", 4, 13)];
    assert_eq!(
        without_prefix.0, ties,
        "of equal tokens the earlier one is first, and a token without attention is left out"
    );
    let sink = shares(0, &[0.6, 0.1, 0.1, 0.1, 0.1, 0.0], 1).expect("the row has attention");
    assert_eq!(sink.0, [token("u0.0", 1, 25)], "the first token is the attention sink");
    assert_eq!(shares(1, &[0.5, 0.5], 2), None, "the row is too short");
    assert_eq!(
        shares(1, &[0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5], 2),
        None,
        "the earlier messages have no attention"
    );
}

/// After the last step of a turn all that exceeds the target is culled, the dimmest first; protected tokens stay.
#[test]
fn ttl_cull_to_target_after_a_long_message() {
    let cases: &[(usize, &str, &[u64], &str)] = &[
        (3, "u0.0[255,40,255,30] a1.0:2*200", &[], "u0.0[255,~40,255,~30] a1.0[~200,200]"),
        (3, "u0.0[255,40,255,30] a1.0:2*200", &[3], "u0.0[255,~40,255,30] a1.0[~200,~200]"),
        (6, "u0.0[255,40,255,30] a1.0:2*200", &[], "u0.0[255,40,255,30] a1.0[200,200]"),
        (1, "u0.0[9,9,9]", &[0, 1, 2], "u0.0[9,9,9]"),
    ];
    for (target, before, protected, after) in cases {
        let mut timeline = notation::read(before).expect("a valid timeline");
        let ttl = TtlRules { target: *target, ..TtlRules::default() };
        let mut scorer = Scorer::new(ScoringStrategy::Ttl(ttl), timeline.context_window(0), None);
        if let Some(culled) = scorer.cull_to_target(|p| !protected.contains(&p.0)) {
            timeline.apply(&culled).expect("the change applies");
        }
        assert_eq!(scorer.len(), timeline.live_len());
        assert_eq!(notation::write(&timeline), notation::write(&notation::read(after).expect("valid")));
        timeline.check_invariants().expect("the invariants hold");
    }
}

/// The bins of the histogram are powers of two, and each value is counted once.
#[test]
fn attention_histogram_counts_by_powers_of_two() {
    type HistogramCase<'a> = (&'a [f32], &'a [(usize, u32)]);
    let cases: &[HistogramCase<'_>] = &[
        (&[], &[]),
        (&[0.0, 1e-9, 0.000_03], &[(0, 3)]),
        (&[1.0, 0.5, 0.499], &[(15, 2), (14, 1)]),
        (&[0.25, 0.125, 0.062_5], &[(14, 1), (13, 1), (12, 1)]),
        (&[0.000_030_517_578], &[(1, 1)]),
    ];
    for (row, expected) in cases {
        let mut counts = [0; AttentionHistogram::BINS];
        expected.iter().for_each(|&(bin, count)| counts[bin] = count);
        assert_eq!(AttentionHistogram::from_row(row).0, counts, "{row:?}");
    }
    let edges = [0, 1, 15].map(AttentionHistogram::lower_edge);
    assert_eq!(edges, [0.0, 1.0 / 32_768.0, 0.5]);
}

#[test]
fn attention_stats_describe_a_row() {
    let stats = AttentionStats::from_row(&[0.1, 0.4, 0.2, 0.3]).expect("the row has numbers");
    let near = |a: f64, b: f64| (a - b).abs() < 1e-7;
    assert!(
        near(stats.mean, 0.25) && near(stats.median, 0.25) && near(stats.max, 0.4) && near(stats.min, 0.1)
    );
    assert!(near(stats.std, 0.0125f64.sqrt()), "{stats:?}");
    assert_eq!(stats.histogram, AttentionHistogram::from_row(&[0.1, 0.4, 0.2, 0.3]));
    assert_eq!(AttentionStats::from_row(&[0.5, 0.2, 0.3]).map(|s| s.median as f32), Some(0.3));
    assert_eq!((AttentionStats::from_row(&[]), AttentionStats::from_row(&[f32::NAN])), (None, None));
    let traced: Vec<u64> = (0..160).filter(|&step| is_traced(step, 50)).collect();
    assert_eq!(traced, [0, 50, 100, 150]);
    assert!(!is_traced(0, 0));
}

// --- budget ---

#[test]
fn budget_for_resurrection_is_what_the_turn_leaves() {
    let budget = |live, max_context| TurnBudget {
        model_context: 32_000,
        max_context,
        live,
        message: 200,
        answer: 200,
    };
    assert_eq!(budget(0, 0).for_resurrection(), 31_600);
    assert_eq!(budget(25_000, 0).for_resurrection(), 6_600);
    assert_eq!(budget(1_000, 2_000).for_resurrection(), 600, "the limit that the user has set applies too");
    assert_eq!(budget(1_000, 64_000).for_resurrection(), 30_600, "the context length of the model limits it");
    assert_eq!(budget(31_900, 0).for_resurrection(), 0, "never below 0");
}

// --- salience and sliding window ---

#[test]
fn salience_is_a_weighted_sum() {
    let mut salience = SalienceScorer::new(SalienceWeights::default());
    salience.register_entity("Ada");
    salience.register_entity(" ");
    let cases = [
        ("a plain sentence", 0.21),
        ("# a heading", 0.35),
        ("```rust", 0.35),
        ("", 0.15),
        (" --- ", 0.15),
        ("***", 0.15),
        ("then ADA spoke", 0.51),
        ("You asked about it", 0.41),
        ("this is your answer to ada", 0.71),
        ("User: hello", 0.41),
        ("# Your notes on Ada", 0.85),
    ];
    for (text, score) in cases {
        let actual = salience.score(text, UNKNOWN_RECENCY);
        assert!((actual - score).abs() < 1e-9, "{text:?}: {actual}, not {score}");
    }
    assert!((salience.score("a plain sentence", 1.0) - 0.36).abs() < 1e-9, "recency comes from the position");
    assert_eq!([recency(0, 5), recency(2, 5), recency(4, 5), recency(0, 1)], [0.0, 0.5, 1.0, 1.0]);
}

fn sliding_window(
    window: usize,
    sink: usize,
    recent: usize,
    scorer: Option<SalienceScorer>,
) -> SlidingWindow {
    SlidingWindow::new(WindowSize { window, sink, recent }, scorer)
}

#[test]
fn sliding_window_keeps_first_and_last() {
    assert_eq!(WindowSize::default().middle(), 3068);
    let mut w = sliding_window(6, 2, 2, None);
    let pruned: Vec<String> =
        "a b c d e f g h".split(' ').flat_map(|t| w.push(t, 1)).map(|p| p.text).collect();
    assert_eq!(
        (w.context().as_str(), pruned),
        ("a b e f g h", vec!["c".into(), "d".into()]),
        "first in, first out"
    );
}

/// Equal texts are different items: only as many are pruned as needed.
#[test]
fn sliding_window_prunes_by_salience() {
    let mut w = sliding_window(24, 2, 2, Some(SalienceScorer::new(SalienceWeights::default())));
    let mut pruned = Vec::new();
    for i in 0..27 {
        let text = if i == 5 { "# heading" } else { "same" };
        pruned.extend(w.push(text, 1).into_iter().map(|p| p.id));
    }
    assert_eq!(
        pruned,
        [2, 3, 4, 6],
        "a tenth of 21 items, twice, the oldest first; the heading (item 5) stays"
    );
}

#[test]
fn sliding_window_reports_pressure() {
    let mut w = sliding_window(10, 1, 3, Some(SalienceScorer::new(SalienceWeights::default())));
    for word in ["one", "two", "three", "four", "five", "six", "seven", "eight"] {
        assert_eq!(w.push(word, 1), []);
    }
    assert_eq!(
        (w.pressure(), w.relieve_pressure(HIGH_PRESSURE)),
        (0.8, None),
        "at the threshold is not above it"
    );
    w.push("nine", 1);
    let relief = w.relieve_pressure(HIGH_PRESSURE).expect("the pressure is above the threshold");
    assert_eq!((relief.initial_pressure, relief.final_pressure), (0.9, 0.8));
    assert_eq!(relief.pruned.iter().map(|p| p.text.as_str()).collect::<Vec<_>>(), ["two"]);
    assert_eq!([pressure(0, 0), pressure(1, 0), pressure(1, 2)], [0.0, 1.0, 0.5]);
}

/// Sizes are in tokens, not in items.
#[test]
fn sliding_window_counts_tokens() {
    let mut w = sliding_window(100, 10, 30, None);
    for i in 0..20 {
        w.push(format!("paragraph {i}"), 10);
        assert!(w.tokens() <= 100);
    }
    assert_eq!(w.items().count(), 10);
    assert_eq!(w.items().next().map(|p| p.id), Some(0));
    let mut w = sliding_window(100, 10, 30, None);
    w.push("a first piece that is larger than the sinks", 50);
    (0..9).for_each(|_| drop(w.push("piece", 10)));
    assert_eq!(w.tokens(), 100, "the middle shrinks");
    w.push("one that is larger than the recent window", 70);
    assert_eq!((w.tokens(), w.pressure()), (120, 1.2), "with nothing left to prune, the pressure exceeds 1");
}

// --- tool results ---

#[test]
fn chunker_keeps_tool_result_with_its_call() {
    let mut chunker = Chunker::new(ChunkSize { min: 3, max: 8 });
    for text in ["a ", "b ", "c ", "d ", "<tool>", "jq", "</tool>"] {
        assert_eq!(chunker.push(text).chunk_index, 0);
    }
    assert_eq!(chunker.push_result().chunk_index, 0);
    let assigned = chunker.push_result();
    assert_eq!(
        (assigned.chunk_index, assigned.moved_tokens),
        (1, Some(5)),
        "the chunk is too long: the call and its result move together"
    );
    for _ in 0..3 {
        assert_eq!(chunker.push("w").chunk_index, 1);
    }
    assert_eq!(
        chunker.push("w").moved_tokens,
        Some(1),
        "the call has its result: the chunk is split at its maximum size, not before the call"
    );
    // A call may consist of several tokens.
    let mut split_call = Chunker::new(ChunkSize { min: 3, max: 8 });
    ["a", "b", "c", "d", "<", "tool", ">", "x"]
        .iter()
        .for_each(|t| assert_eq!(split_call.push(t).chunk_index, 0));
    assert_eq!(split_call.push_result().moved_tokens, Some(5));
    // Results without a call are split like any other text.
    let mut no_call = Chunker::new(ChunkSize { min: 3, max: 8 });
    let indices: Vec<u32> = (0..20).map(|_| no_call.push_result().chunk_index).collect();
    assert_eq!(indices.last(), Some(&2));
    let mut small = Chunker::new(ChunkSize { min: 3, max: 4 });
    ["a", "<tool>", "x", "</tool>"].iter().for_each(|t| assert_eq!(small.push(t).chunk_index, 0));
    for _ in 0..9 {
        let assigned = small.push_result();
        assert_eq!(
            (assigned.chunk_index, assigned.moved_tokens),
            (0, None),
            "the head would be too small: the chunk is not split"
        );
    }
}

#[test]
fn salience_registers_names_in_text() {
    let mut scorer = SalienceScorer::default();
    scorer.register_names_in(
        "Yesterday Anna met Otto's cat. They went to “Rome”! Then it rained: Nobody cared. I",
    );
    let named = |text: &str| scorer.score(text, 0.0) > 0.3;
    for (text, expected) in [
        ("anna is here", true),
        ("the OTTO", true),
        ("to rome", true),
        ("yesterday was cold", false),
        ("they left", false),
        ("then it rained", false),
        ("nobody cared", false),
        ("it is late", false),
    ] {
        assert_eq!(named(text), expected, "{text}: {}", scorer.score(text, 0.0));
    }
}

/// By salience, a chunk with a name of the user's messages stays where the others are pruned; the sinks and the latest
/// tokens stay in any case. The weights are those of the founding document.
#[test]
fn salience_policy_prunes_what_matters_least() {
    let texts = [
        (Role::User, 0, "Hello there and welcome to this place"),
        (Role::Assistant, 1, "it is a fine day for a walk"),
        (Role::User, 2, "the cat of Betsy sleeps on the sofa"),
        (Role::Assistant, 3, "such a cat needs its rest"),
        (Role::User, 4, "trains are late in winter you see"),
        (Role::Assistant, 5, "that is how it goes with trains"),
        (Role::User, 6, "what do you think of Betsy now"),
        (Role::Assistant, 7, "she is a good one for sure"),
    ];
    let mut timeline = Timeline::default();
    for (role, turn, text) in texts {
        let words = text.split_inclusive(' ');
        let tokens = words.map(|word| NewToken {
            id: TokenId(1),
            text: word.to_owned(),
            kind: ContentKind::Message,
            chunk_index: 0,
            brightness: Brightness(1.0),
        });
        let append =
            Append { turn: TurnId(turn), role, at: timeline.next_position(), tokens: tokens.collect() };
        timeline.apply(&Change::Append(append)).expect("it follows what is there");
    }
    let live = timeline.live_len();
    let plan = |budget: usize| {
        let rules = PruneRules {
            policy: PrunePolicy::Salience,
            budget,
            sinks: 4,
            recent: 8,
            fill: false,
            current: None,
        };
        plan_prune(timeline.context_window(0), &rules)
    };
    let pruned: Vec<String> = plan(live - 1).pruned.iter().map(|pruned| pruned.chunk.to_string()).collect();
    assert_eq!(pruned, ["u4.0", "a5.0"], "no name, and later than the sinks");
    let reason = plan(live - 1).pruned[0].reason.to_string();
    // Recency 4/7 and 5/7 at weight 0.3, structure 0.3 at weight 0.2: the pair has the higher of the two.
    assert!(reason.contains("salience of its text 0.27"), "{reason}");
    let all: Vec<String> = plan(0).pruned.iter().map(|pruned| pruned.chunk.to_string()).collect();
    assert_eq!(all, ["u4.0", "a5.0", "u2.0", "a3.0"], "the first and the last turns are protected");
}
