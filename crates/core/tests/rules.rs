//! The rules that are not about a timeline: v0, the budget, salience, the sliding window, tools' results.

use halo_core::attention::{AttentionStats, is_traced};
use halo_core::brightness::Strategy;
use halo_core::budget::{Room, pressure};
use halo_core::chunk::{ChunkSize, Chunker};
use halo_core::notation;
use halo_core::salience::{Salience, UNKNOWN_RECENCY, Weights, recency};
use halo_core::scorer::Scorer;
use halo_core::token::{ChunkId, Position, Role, Source, TurnId};
use halo_core::ttl::Ttl;
use halo_core::window::{HIGH_PRESSURE, SlidingWindow, WindowSize};

#[test]
fn chunk_names_read_as_they_are_written() {
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

// --- v0 ---

#[test]
fn v0_seeds_by_source() {
    let strategy = Strategy::Ttl(Ttl::default());
    let seeds =
        [Source::User, Source::System, Source::Tool, Source::Llm, Source::Other].map(|s| strategy.birth(s).0);
    assert_eq!(seeds, [255.0, 255.0, 255.0, 200.0, 200.0]);
    assert_eq!(Source::of(Role::Assistant, true), Source::Tool);
    assert_eq!(Source::of(Role::Assistant, false), Source::Llm);
}

/// Decay, gain, both, the clamps, and the whole-number gain against the float one.
#[test]
fn v0_updates() {
    type Case<'a> = (Ttl, &'a [f32], &'a [f32], &'a [f32]);
    let cases: &[Case<'_>] = &[
        (Ttl { decay: 5.0, ..Ttl::default() }, &[100.0, 50.0], &[0.0, 0.0], &[95.0, 45.0]),
        (Ttl { decay: 0.0, ..Ttl::default() }, &[100.0, 50.0], &[0.5, 0.2], &[105.0, 52.0]),
        (Ttl { decay: 3.0, ..Ttl::default() }, &[100.0, 50.0], &[0.5, 0.2], &[102.0, 49.0]),
        (Ttl { decay: 5.0, ..Ttl::default() }, &[2.0], &[0.0], &[0.0]),
        (Ttl { decay: 0.0, gain: 20.0, ..Ttl::default() }, &[250.0], &[1.0], &[255.0]),
        (Ttl::default(), &[100.0], &[0.15], &[99.0]),
        (Ttl { whole_gain: false, ..Ttl::default() }, &[100.0], &[0.15], &[99.5]),
        (Ttl::default(), &[100.0, 100.0], &[0.09, 0.1], &[98.0, 99.0]),
        (
            Ttl { whole_gain: false, decay: 0.01, ..Ttl::default() },
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
fn v0_culls() {
    let ttl = |target| Ttl { target, ..Ttl::default() };
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
    assert_eq!(ttl(3).cull(&[1.0, 2.0, 3.0], |i| i != 0), [1], "what may not go stays");
    assert_eq!(ttl(3).cull(&[1.0, 2.0, 3.0], |_| false), Vec::<usize>::new());
}

/// A full window is held at its target: step by step, single tokens leave, and nothing is lost.
#[test]
fn v0_lives_on_a_timeline() {
    let mut timeline = notation::read("u0.0[255,40,255,30] a1.0:2*200").expect("a timeline");
    let ttl = Ttl { target: 5, ..Ttl::default() };
    let mut scorer = Scorer::new(Strategy::Ttl(ttl), timeline.view(0), Some(TurnId(1)));
    scorer.observe(Some(&[0.5, 0.1, 0.1, 0.1, 0.1, 0.1])).expect("good attention");
    let culled = scorer.cull(|p| p != Position(0)).expect("six of five");
    timeline.apply(&culled).expect("it fits");
    assert_eq!(scorer.len(), 5);
    scorer.observe(Some(&[0.5, 0.1, 0.1, 0.1, 0.2])).expect("good attention");
    let culled = scorer.cull(|p| p != Position(0)).expect("five of five");
    timeline.apply(&culled).expect("it fits");
    timeline.apply(&scorer.finish()).expect("it fits");
    assert_eq!(notation::write(&timeline), "u0.0[255,~38,253,~29] a1.0[198,199]");
    timeline.check().expect("sound");
}

#[test]
fn attention_has_a_shape() {
    let stats = AttentionStats::of(&[0.1, 0.4, 0.2, 0.3]).expect("numbers");
    let near = |a: f64, b: f64| (a - b).abs() < 1e-7;
    assert!(
        near(stats.mean, 0.25) && near(stats.median, 0.25) && near(stats.max, 0.4) && near(stats.min, 0.1)
    );
    assert!(near(stats.std, 0.0125f64.sqrt()), "{stats:?}");
    assert_eq!(AttentionStats::of(&[0.5, 0.2, 0.3]).map(|s| s.median as f32), Some(0.3));
    assert_eq!((AttentionStats::of(&[]), AttentionStats::of(&[f32::NAN])), (None, None));
    let traced: Vec<u64> = (0..160).filter(|&step| is_traced(step, 50)).collect();
    assert_eq!(traced, [0, 50, 100, 150]);
    assert!(!is_traced(0, 0));
}

// --- the budget ---

#[test]
fn returns_have_one_equation() {
    let room =
        |live, max_context| Room { model_context: 32_000, max_context, live, message: 200, answer: 200 };
    assert_eq!(room(0, 0).for_returns(), 31_600);
    assert_eq!(room(25_000, 0).for_returns(), 6_600);
    assert_eq!(room(1_000, 2_000).for_returns(), 600, "the user's limit counts too");
    assert_eq!(room(1_000, 64_000).for_returns(), 30_600, "but not beyond the model's");
    assert_eq!(room(31_900, 0).for_returns(), 0, "never below nothing");
}

// --- salience and the sliding window ---

#[test]
fn salience_is_a_weighted_sum() {
    let mut salience = Salience::new(Weights::default());
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

fn window(window: usize, sink: usize, recent: usize, scorer: Option<Salience>) -> SlidingWindow {
    SlidingWindow::new(WindowSize { window, sink, recent }, scorer)
}

#[test]
fn the_window_keeps_first_and_last() {
    assert_eq!(WindowSize::default().middle(), 3068);
    let mut w = window(6, 2, 2, None);
    let gone: Vec<String> = "a b c d e f g h".split(' ').flat_map(|t| w.add(t, 1)).map(|p| p.text).collect();
    assert_eq!(
        (w.context().as_str(), gone),
        ("a b e f g h", vec!["c".into(), "d".into()]),
        "first in, first out"
    );
}

/// Equal texts are different pieces: only as many leave as are pruned.
#[test]
fn the_window_prunes_instances_by_salience() {
    let mut w = window(24, 2, 2, Some(Salience::new(Weights::default())));
    let mut gone = Vec::new();
    for i in 0..27 {
        let text = if i == 5 { "# heading" } else { "same" };
        gone.extend(w.add(text, 1).into_iter().map(|p| p.id));
    }
    assert_eq!(gone, [2, 3, 4, 6], "a tenth of 21, twice, the oldest first; the heading, 5, stays");
}

#[test]
fn the_window_knows_its_pressure() {
    let mut w = window(10, 1, 3, Some(Salience::new(Weights::default())));
    for word in ["one", "two", "three", "four", "five", "six", "seven", "eight"] {
        assert_eq!(w.add(word, 1), []);
    }
    assert_eq!((w.pressure(), w.relieve(HIGH_PRESSURE)), (0.8, None), "at the threshold is not above it");
    w.add("nine", 1);
    let relief = w.relieve(HIGH_PRESSURE).expect("nine of ten");
    assert_eq!((relief.initial_pressure, relief.final_pressure), (0.9, 0.8));
    assert_eq!(relief.pruned.iter().map(|p| p.text.as_str()).collect::<Vec<_>>(), ["two"]);
    assert_eq!([pressure(0, 0), pressure(1, 0), pressure(1, 2)], [0.0, 1.0, 0.5]);
}

/// Sizes are in tokens, whatever the pieces are.
#[test]
fn the_window_counts_tokens() {
    let mut w = window(100, 10, 30, None);
    for i in 0..20 {
        w.add(format!("paragraph {i}"), 10);
        assert!(w.tokens() <= 100);
    }
    assert_eq!(w.pieces().count(), 10);
    assert_eq!(w.pieces().next().map(|p| p.id), Some(0));
    let mut w = window(100, 10, 30, None);
    w.add("a first piece that is larger than the sinks", 50);
    (0..9).for_each(|_| drop(w.add("piece", 10)));
    assert_eq!(w.tokens(), 100, "the middle gives way for it");
    w.add("one that is larger than the recent window", 70);
    assert_eq!(
        (w.tokens(), w.pressure()),
        (120, 1.2),
        "and where nothing can give way, the pressure says so"
    );
}

// --- tool results ---

#[test]
fn a_tools_result_stays_with_its_call() {
    let mut chunker = Chunker::new(ChunkSize { min: 3, max: 8 });
    for text in ["a ", "b ", "c ", "d ", "<tool>", "jq", "</tool>"] {
        assert_eq!(chunker.push(text).sentence, 0);
    }
    assert_eq!(chunker.push_result().sentence, 0);
    let placed = chunker.push_result();
    assert_eq!(
        (placed.sentence, placed.moved),
        (1, Some(5)),
        "too long: the call and its result move on together"
    );
    for _ in 0..3 {
        assert_eq!(chunker.push("w").sentence, 1);
    }
    assert_eq!(
        chunker.push("w").moved,
        Some(1),
        "the call is answered: cut where it is full, not before the call"
    );
    // A call that is spread over several tokens is one call.
    let mut spread = Chunker::new(ChunkSize { min: 3, max: 8 });
    ["a", "b", "c", "d", "<", "tool", ">", "x"].iter().for_each(|t| assert_eq!(spread.push(t).sentence, 0));
    assert_eq!(spread.push_result().moved, Some(5));
    // Results without a call are cut like anything else.
    let mut none = Chunker::new(ChunkSize { min: 3, max: 8 });
    let sentences: Vec<u32> = (0..20).map(|_| none.push_result().sentence).collect();
    assert_eq!(sentences.last(), Some(&2));
    let mut small = Chunker::new(ChunkSize { min: 3, max: 4 });
    ["a", "<tool>", "x", "</tool>"].iter().for_each(|t| assert_eq!(small.push(t).sentence, 0));
    for _ in 0..9 {
        let placed = small.push_result();
        assert_eq!((placed.sentence, placed.moved), (0, None), "no head is left to cut off: it stays whole");
    }
}
