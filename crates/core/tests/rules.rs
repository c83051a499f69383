//! The rules that are not about a timeline: v0, the budget, salience, the sliding window, reasons, and the
//! doubles of the seams.

use halo_core::attention::{AttentionStats, is_traced};
use halo_core::brightness::Strategy;
use halo_core::budget::{Room, pressure};
use halo_core::change::{Append, Change, NewToken};
use halo_core::chunk::{ChunkSize, Chunker};
use halo_core::notation;
use halo_core::salience::{Salience, UNKNOWN_RECENCY, Weights, recency};
use halo_core::scorer::Scorer;
use halo_core::seams::{
    Durability, Embedder, Finish, Flow, Model, ModelStep, Sampling, SeamError, Seen, Store,
};
use halo_core::testing::doubles::{
    Attention, FailingStore, HashEmbedder, MemoryStore, ScriptedAnswer, ScriptedModel,
};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, Flags, Position, Role, Source, TokenId, TurnId};
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

// --- the doubles of the seams ---

fn sampling(max_tokens: usize) -> Sampling {
    Sampling { max_tokens, temperature: 0.0, top_p: 1.0, seed: 1, stop: vec!["</tool>".into()] }
}

#[test]
fn the_scripted_model_speaks() {
    let say = |text: &str, attention| ScriptedAnswer { text: text.into(), attention, fails_after: None };
    let answers = vec![
        say("the gun fires", Attention::On("gun".into())),
        say("one two three four", Attention::Missing),
        say("<tool>x</tool> and more", Attention::Even),
        ScriptedAnswer { fails_after: Some(1), ..say("half an answer", Attention::Even) },
    ];
    let mut model = ScriptedModel::new(64, answers);
    let pieces = model.tokenize("a gun hangs\non the wall", false).expect("words");
    assert_eq!(pieces.iter().map(|p| p.text.as_str()).collect::<String>(), "a gun hangs\non the wall");
    let window: Vec<Seen> = pieces.iter().map(|p| Seen { position: None, id: p.id }).collect();
    let mut rows = Vec::new();
    let finish = model.generate(&window, Position(6), &sampling(9), &mut |step| {
        let ModelStep::Token(piece, row) = step else { panic!("no prompt rows are scripted") };
        rows.push((piece.text.clone(), row.expect("attention").to_vec()));
        Flow::Continue
    });
    assert_eq!((finish, rows.len()), (Ok(Finish::End), 3));
    assert!(
        rows.iter().all(|(_, row)| (row.iter().sum::<f32>() - 1.0).abs() < 1e-5 && row[1] > 0.3),
        "{rows:?}"
    );
    assert_eq!((rows[0].1.len(), rows[2].1.len()), (6, 8), "each row covers what was there before its token");
    let go = |model: &mut ScriptedModel, max, stop_after: usize| {
        let mut said = 0;
        let finish = model.generate(&window, Position(6), &sampling(max), &mut |_| {
            said += 1;
            if said == stop_after { Flow::Stop } else { Flow::Continue }
        });
        (finish.map_err(|e| e.to_string()), said)
    };
    assert_eq!(go(&mut model, 3, 9), (Ok(Finish::Length), 3));
    assert_eq!(go(&mut model, 9, 9), (Ok(Finish::Stop), 1));
    assert_eq!(go(&mut model, 9, 9), (Err("generating: the script breaks down here".into()), 1));
    assert_eq!(go(&mut model, 9, 9), (Err("generating: the script is at its end".into()), 0));
    assert_eq!(go(&mut model, 60, 9), (Err("generating: 6 tokens and an answer do not fit 64".into()), 0));
}

#[test]
fn the_hash_embedder_finds_shared_words_near() {
    let mut embedder = HashEmbedder;
    let v = embedder.embed(&["the red gun", "a gun, red", "blue sky above", ""]).expect("always");
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
    assert!(v.iter().all(|v| v.len() == embedder.dimensions()) && embedder.max_tokens() == 256);
    assert!((dot(&v[0], &v[0]) - 1.0).abs() < 1e-5 && dot(&v[0], &v[1]) > dot(&v[0], &v[2]));
}

fn word(timeline: &Timeline) -> Change {
    let token =
        NewToken { id: TokenId(1), text: "w".into(), sentence: 0, brightness: Brightness(9.0), tool: true };
    let at = timeline.next_position();
    Change::Append(Append { at, turn: TurnId(0), role: Role::User, tokens: vec![token] })
}

/// A store that fails leaves what was there; one that fails after the fact has written. A crash takes what
/// was written behind, and nothing that was acknowledged as safe.
#[test]
fn the_failing_store_fails_on_demand() {
    let mut store = FailingStore::new(MemoryStore::default(), 3);
    let mut timeline = store.load("c").expect("first call");
    let mut say = |store: &mut FailingStore<MemoryStore>, durability| {
        let change = word(&timeline);
        timeline.transact(&change, |after| store.commit("c", &change, after, durability))?;
        Ok::<_, SeamError>(timeline.len())
    };
    assert_eq!(say(&mut store, Durability::Now), Ok(1));
    assert_eq!(say(&mut store, Durability::Behind), Ok(2));
    let failed = say(&mut store, Durability::Now).map_err(|e| e.to_string());
    assert_eq!(failed, Err("using the store: it was told to fail".into()), "no call is left");
    store.calls_left = 1;
    assert_eq!(
        say(&mut store, Durability::Behind),
        Ok(3),
        "what the store refused has left no trace here either"
    );
    store.after_the_fact = true;
    assert!(say(&mut store, Durability::Behind).is_err());
    assert_eq!(store.inner().load("c").expect("underneath").len(), 4, "it had written before it failed");
    store.inner().crash();
    let loaded = store.inner().load("c").expect("underneath");
    assert_eq!(loaded.len(), 1, "only what was safe is left");
    assert!(loaded.token(Position(0)).is_some_and(|t| t.flags.has(Flags::TOOL) && t.flags.is_live()));
    let wrong = store.inner().commit("c", &word(&Timeline::new()), &loaded, Durability::Now);
    assert!(wrong.expect_err("not at the end").to_string().contains("next position is 1"));
}

// --- changes that do not fit ---

#[test]
fn a_change_that_does_not_fit_changes_nothing() {
    use halo_core::change::{Extent, Leave, Run, Score, Scored, Tally, TallyChange, WhyLeft};
    let mut timeline = notation::read("u0.0:3*5 ~a1.0:3*5 a1.1:3*5!").expect("a timeline");
    let before = timeline.state_hash();
    let id = |name: &str| name.parse::<ChunkId>().expect("a chunk");
    let leave = |name: &str, extent| Leave { chunk: id(name), extent, why: WhyLeft::Manual };
    let run = |start, len| Extent::Runs(vec![Run { start: Position(start), len }]);
    let append = |at, turn, role, sentence| {
        let token =
            NewToken { id: TokenId(1), text: "w".into(), sentence, brightness: Brightness(1.0), tool: false };
        Change::Append(Append { at: Position(at), turn: TurnId(turn), role, tokens: vec![token] })
    };
    let score = |start, b| Scored { start: Position(start), brightness: vec![Brightness(b)] };
    let tally = |name: &str, votes| (id(name), TallyChange { votes, mass: 0, steps: 0 });
    let cases: Vec<(Change, &str)> = vec![
        (append(8, 2, Role::User, 0), "tokens for position 8 cannot be appended: the next position is 9"),
        (append(9, 0, Role::User, 0), "turn 0 (user) cannot be continued: the last turn is 1 (assistant)"),
        (append(9, 1, Role::User, 2), "turn 1 (user) cannot be continued: the last turn is 1 (assistant)"),
        (
            append(9, 1, Role::Assistant, 0),
            "a1.0 cannot be continued: a later chunk of its turn exists already",
        ),
        (Change::Prune(vec![leave("u9.0", Extent::Whole)]), "there is no chunk u9.0"),
        (Change::Prune(vec![leave("a1.0", Extent::Whole)]), "a1.0 cannot be pruned: the token at 3 is dead"),
        (
            Change::Prune(vec![leave("u0.0", run(2, 2))]),
            "the tokens named for u0.0 are not tokens of it, in order",
        ),
        (
            Change::Prune(vec![leave("u0.0", Extent::Whole), leave("u0.0", Extent::Whole)]),
            "u0.0 is named twice in one change",
        ),
        (
            Change::Prune(vec![leave("u0.0", Extent::Whole), leave("a1.1", run(u64::MAX, 1))]),
            "the tokens named for a1.1 are not tokens of it, in order",
        ),
        (
            Change::Score(Score {
                runs: vec![],
                tallies: vec![tally("u0.0", 3), tally("u0.0", -2), tally("a1.0", -5)],
            }),
            "the tally of a1.0 cannot be changed like that",
        ),
        (
            Change::Score(Score { runs: vec![], tallies: vec![tally("u0.0", 1), tally("a1.0", i64::MIN)] }),
            "the tally of a1.0 cannot be changed like that",
        ),
        (
            Change::Batch(vec![
                append(9, 1, Role::Assistant, 7),
                append(10, 2, Role::User, 0),
                append(9, 3, Role::User, 0),
            ]),
            "tokens for position 9 cannot be appended: the next position is 11",
        ),
        (Change::Pin { chunk: id("a1.1"), pinned: true }, "a1.1 is pinned already"),
        (
            Change::Merge { chunk: id("a1.1"), frees_name: false },
            "a1.1 cannot be merged: no earlier chunk in its turn is pinned like it",
        ),
        (
            Change::Split { chunk: id("u0.0"), at: Position(0), sentence: 1, tally: Tally::default() },
            "u0.0 cannot be split at 0: no token inside the chunk stands there",
        ),
        (
            Change::Split { chunk: id("u0.0"), at: Position(1), sentence: 1, tally: Tally::default() },
            "u0.0 cannot be split at 1: the new chunk's number must be a free one behind it",
        ),
        (
            Change::Split { chunk: id("a1.0"), at: Position(4), sentence: 1, tally: Tally::default() },
            "a1.0 cannot be split at 4: that number is taken",
        ),
        (
            Change::Split { chunk: id("a1.0"), at: Position(4), sentence: 2, tally: Tally::default() },
            "a1.0 cannot be split at 4: another chunk stands between",
        ),
        (
            Change::Split {
                chunk: id("a1.1"),
                at: Position(7),
                sentence: 2,
                tally: Tally { votes: 1, ..Tally::default() },
            },
            "a1.1 cannot be split at 7: it has gathered less than the tail is to take",
        ),
        (
            Change::Score(Score { runs: vec![score(9, 1.0)], tallies: vec![] }),
            "the score for position 9 is no number, or no token stands there",
        ),
        (
            Change::Score(Score { runs: vec![score(0, f32::NAN)], tallies: vec![] }),
            "the score for position 0 is no number, or no token stands there",
        ),
        (
            Change::Score(Score {
                runs: vec![score(0, 7.0)],
                tallies: vec![tally("u0.0", 3), tally("u0.0", -4)],
            }),
            "the tally of u0.0 cannot be changed like that",
        ),
        (
            Change::Batch(vec![
                Change::Prune(vec![leave("u0.0", Extent::Whole)]),
                append(0, 0, Role::User, 0),
            ]),
            "tokens for position 0 cannot be appended: the next position is 9",
        ),
    ];
    for (change, expected) in cases {
        let error = timeline.apply(&change).expect_err(expected);
        assert_eq!(error.to_string(), expected);
        assert_eq!(timeline.state_hash(), before, "{expected}");
    }
}

/// An answer that took a while: votes of one chunk may be added and taken off in any order that stays sound.
#[test]
fn tallies_are_undone_in_reverse() {
    use halo_core::change::{Score, TallyChange};
    let mut timeline = notation::read("u0.0:3").expect("a timeline");
    let before = timeline.state_hash();
    let chunk = "u0.0".parse().expect("a chunk");
    let tally = |votes| (chunk, TallyChange { votes, mass: 0, steps: 0 });
    let undo = timeline.apply(&Change::Score(Score { runs: vec![], tallies: vec![tally(3), tally(-2)] }));
    timeline.apply(&undo.expect("it fits")).expect("it can be undone");
    assert_eq!(timeline.state_hash(), before);
}

/// A name that was merged away is spent; the next chunk takes the next one, and a turn goes on there.
#[test]
fn a_merged_name_is_not_used_again() {
    let mut timeline = notation::read("u0.0:3 u0.1:3").expect("a timeline");
    let merge = halo_core::signals::merge(&timeline, "u0.1".parse().expect("a chunk")).expect("two chunks");
    timeline.apply(&merge).expect("it fits");
    assert_eq!(timeline.next_sentence(TurnId(0)), 2);
    let append = |sentence| {
        let token =
            NewToken { id: TokenId(1), text: "w".into(), sentence, brightness: Brightness(1.0), tool: false };
        Change::Append(Append { at: Position(6), turn: TurnId(0), role: Role::User, tokens: vec![token] })
    };
    for spent in [0, 1] {
        let error = timeline.apply(&append(spent)).expect_err("spent").to_string();
        assert!(error.contains("cannot be continued"), "{error}");
    }
    let tokens: Vec<_> =
        timeline.chunks().flat_map(|c| c.run().positions()).filter_map(|p| timeline.token(p)).collect();
    let tokens = tokens.iter().map(|t| (t.chunk.sentence, t.text, false));
    let mut chunker = Chunker::resume(ChunkSize::default(), tokens, timeline.next_sentence(TurnId(0)));
    assert_eq!(chunker.push("w").sentence, 2);
    timeline.apply(&append(2)).expect("the next one");
    assert_eq!(notation::write(&timeline), "u0.0:6 u0.2*1");
}

/// An empty turn behind it does not let a chunk be cut into the wrong turn.
#[test]
fn only_the_last_turn_gets_new_chunks() {
    use halo_core::change::Tally;
    let mut timeline = notation::read("u0.0:10").expect("a timeline");
    let empty = Append { at: Position(10), turn: TurnId(1), role: Role::Assistant, tokens: vec![] };
    timeline.apply(&Change::Append(empty)).expect("an empty turn");
    let chunk = "u0.0".parse().expect("a chunk");
    let split = Change::Split { chunk, at: Position(5), sentence: 1, tally: Tally::default() };
    assert!(timeline.apply(&split).is_err());
    timeline.check().expect("sound");
}

/// A freed name may be taken by another part of the chunk, out of the order in which names were freed.
#[test]
fn a_freed_name_can_be_split_anew() {
    use halo_core::change::Tally;
    let mut timeline = notation::read("u0.0:5 u0.1:3 u0.2:2 a1.0").expect("a timeline");
    for name in ["u0.1", "u0.2"] {
        let merge = Change::Merge { chunk: name.parse().expect("a chunk"), frees_name: false };
        timeline.apply(&merge).expect("it fits");
    }
    let chunk = "u0.0".parse().expect("a chunk");
    timeline
        .apply(&Change::Split { chunk, at: Position(9), sentence: 1, tally: Tally::default() })
        .expect("free");
    timeline.check().expect("sound");
    assert_eq!(notation::write(&timeline), "u0.0:9 u0.1 a1.0");
    assert_eq!(timeline.token(Position(8)).map(|t| t.chunk), Some(chunk));
}

/// What was taken back of a chunk is not part of what search reads of it.
#[test]
fn text_is_without_what_was_taken_back() {
    let timeline = notation::read("u0.0[1,x2,3] xu2.0:2").expect("a timeline");
    let texts: Vec<_> = timeline.chunks().map(|c| c.text().into_owned()).collect();
    assert_eq!(texts, ["w w ", "w w "]);
}

#[test]
fn notation_refuses_what_it_cannot_read() {
    for (text, why) in [
        ("u0.0!é", "use : * [ ] ^ $ and ! only"),
        ("u0.0[1]é", "use : * [ ] ^ $ and ! only"),
        ("u0.0:0:5", ": takes a number of tokens, from 1 to 10000000"),
        ("u0.0:99999999999999999", ": takes a number of tokens, from 1 to 10000000"),
        ("u0.0[1,2", "a list of brightness ends with ]"),
        ("u0.0*x", "* takes a brightness"),
        ("u0", "write role, turn and sentence, such as u4.0"),
        ("u0.0*inf", "the score for position 0 is no number, or no token stands there"),
        ("u1.0 u0.0", "turn 0 (user) cannot be continued: the last turn is 1 (user)"),
    ] {
        let error = notation::read(text).expect_err(text).to_string();
        assert!(error.contains(why), "{text}: {error}");
    }
}

/// Undone in the order in which it was done, last first, with an empty turn in between.
#[test]
fn a_split_behind_an_empty_turn_is_undone_soundly() {
    use halo_core::change::Tally;
    let mut timeline = notation::read("u0.0:10").expect("a timeline");
    let chunk = "u0.0".parse().expect("a chunk");
    let split = Change::Split { chunk, at: Position(5), sentence: 1, tally: Tally::default() };
    let empty = Append { at: Position(10), turn: TurnId(1), role: Role::Assistant, tokens: vec![] };
    let undo = timeline.apply(&Change::Batch(vec![split, Change::Append(empty)])).expect("it fits");
    let redo = timeline.apply(&undo).expect("it can be undone");
    timeline.check().expect("sound");
    assert_eq!(notation::write(&timeline), "u0.0:10");
    timeline.apply(&redo).expect("it can be done again");
    timeline.check().expect("sound");
    assert_eq!(notation::write(&timeline), "u0.0:5 u0.1:5");
    assert_eq!((timeline.next_sentence(TurnId(1)), timeline.question_of(TurnId(1))), (0, Some(TurnId(0))));
}

/// What a store refuses leaves no trace, whatever is in the batch.
#[test]
fn a_refused_change_leaves_no_trace() {
    let mut timeline = notation::read("u0.0:5 u0.1:5").expect("a timeline");
    let before = timeline.clone();
    let token =
        NewToken { id: TokenId(1), text: "w".into(), sentence: 0, brightness: Brightness(1.0), tool: false };
    let merge = Change::Merge { chunk: "u0.1".parse().expect("a chunk"), frees_name: true };
    let append = Append { at: Position(10), turn: TurnId(1), role: Role::Assistant, tokens: vec![token] };
    let batch = Change::Batch(vec![merge, Change::Batch(vec![Change::Append(append)])]);
    let refused = timeline.transact(&batch, |after| {
        assert_eq!(notation::write(after), "u0.0:10 a1.0*1");
        Err(SeamError::new("writing", "the disk is full"))
    });
    assert_eq!(refused, Err(SeamError::new("writing", "the disk is full")));
    assert_eq!(timeline, before);
}
