//! The size of the context window over many turns, on the test doubles.

use crate::common::test_rules;
use crate::turn::{
    answer_attending_to, answer_text, assert_same_as_stored, open_session, resurrected_chunks, send,
    shared_store,
};
use halo_core::brightness::ScoringStrategy;
use halo_core::testing::doubles::{InMemoryStore, ScriptedAnswer};
use halo_core::ttl::TtlRules;
use halo_engine::event::Event;
use halo_engine::rules::{AutoSizes, ConversationRules, ResurrectLimit};

/// Ten turns with messages longer than their answers: after each the window holds the target beside the system prompt,
/// whatever search finds.
#[test]
fn ttl_window_keeps_its_target_over_ten_turns() {
    const TARGET: usize = 40;
    let store = shared_store(InMemoryStore::default());
    let mut rules = test_rules(400);
    rules.context.strategy = ScoringStrategy::Ttl(TtlRules { target: TARGET, ..TtlRules::default() });
    let words = ["one", "two", "three", "four", "five", "six", "seven", "eight"];
    let answers = (0..80).map(|n| answer_attending_to(&format!(" {} and", words[n % 8]), "gun")).collect();
    let mut session = open_session(&store, rules, answers);
    let system = session.live_tokens();
    for turn in 0..10 {
        let message = format!("The gun number {turn} {}", "on the wall of the long hall ".repeat(5).trim());
        let events = send(&mut session, &message);
        assert_eq!(resurrected_chunks(&events), [""; 0], "turn {turn}: the window is full");
        let live = session.live_tokens() - system;
        let expected = if turn == 0 { 38..=TARGET } else { TARGET - 1..=TARGET };
        assert!(expected.contains(&live), "turn {turn}: {live} tokens");
        assert_eq!(session.token_limit(), system + TARGET);
        assert_same_as_stored(&session, &store);
    }
    assert!(session.timeline().len() > 300, "{} tokens were said", session.timeline().len());
}

/// At least half of the window stays for the conversation, whatever the maximum of the answer.
#[test]
fn answer_reserve_leaves_half_of_the_window() {
    // Window, room for resurrected chunks, maximum of the answer, context of the model; reserve, budget after a turn.
    let cases = [
        (2000, 500, 50, 8192, 50, Some(1450)),
        (2000, 500, 1024, 8192, 500, Some(1000)),
        (400, 100, 1024, 8192, 100, Some(200)),
        (8192, 2048, 1024, 8192, 1024, Some(5120)),
        (8192, 2048, 1024, 2048, 256, Some(768)),
        (10_000, 512, 1024, 2048, 512, Some(1024)),
        (2000, 0, 1024, 8192, 1000, Some(2000)),
        (2000, 1000, 1024, 8192, 250, Some(750)),
        (0, 0, 1024, 8192, 1024, None),
    ];
    for (max_tokens, reserved, answer, context, reserve, budget) in cases {
        let mut rules = test_rules(max_tokens);
        rules.reserved_tokens = reserved;
        rules.sampling.max_tokens = answer;
        let found = (rules.answer_reserve(rules.token_limit(context, 0)), rules.token_budget(context));
        assert_eq!(found, (reserve, budget), "{max_tokens} {reserved} {answer} {context}");
    }
}

/// The maximum of an answer exceeds the window: half of the window stays, and a long answer is not cut before the model's
/// context ends.
#[test]
fn long_answers_leave_the_conversation_in_the_window() {
    let store = shared_store(InMemoryStore::default());
    let mut rules = test_rules(60);
    rules.sampling.max_tokens = 1000;
    let long = " and so on".repeat(30);
    let answers =
        (0..4).map(|n| answer_attending_to(if n == 3 { &long } else { " Noted." }, "gun")).collect();
    let mut session = open_session(&store, rules, answers);
    for message in ["The gun is called Betsy", "The boat is called Ann", "The dog is called Tim"] {
        send(&mut session, message);
    }
    assert!(session.context_window_text().contains("Betsy"), "{}", session.context_window_text());
    let events = send(&mut session, "Tell me all of the gun");
    assert_eq!(answer_text(&events), long, "the window of 60 does not cut an answer of 90 tokens");
    assert_same_as_stored(&session, &store);
}

/// An answer ends where the context of the model ends.
#[test]
fn answer_ends_with_the_context_of_the_model() {
    let store = shared_store(InMemoryStore::default());
    let mut rules = test_rules(0);
    rules.sampling.max_tokens = 100_000;
    let mut session = open_session(&store, rules, vec![answer_attending_to(&" on".repeat(5000), "x")]);
    let events = send(&mut session, "Go on and on");
    assert_eq!(session.live_tokens(), 4096, "the context of the scripted model");
    assert!(events.iter().any(|event| matches!(event, Event::Done(_))));
    assert_same_as_stored(&session, &store);
}

fn auto_rules() -> ConversationRules {
    let mut rules = test_rules(0);
    rules.auto_sizes = AutoSizes { window: true, recent: true, reserved: true };
    rules
}

/// The automatic window has its smallest size until a prefill was measured, then follows the speed; the speed is stored
/// with the conversation.
#[test]
fn automatic_window_follows_the_measured_speed() {
    let store = shared_store(InMemoryStore::default());
    let answers = |n| -> Vec<ScriptedAnswer> { (0..n).map(|_| answer_attending_to(" Fine.", "x")).collect() };
    let mut session = open_session(&store, auto_rules(), answers(2));
    let sizes =
        |rules: &ConversationRules| (rules.context.max_tokens, rules.context.recent, rules.reserved_tokens);
    assert_eq!(sizes(session.rules()), (2048, 512, 512));
    send(&mut session, "Hello");
    assert_eq!((session.token_limit(), session.prefill_speed()), (2048, None), "too short to measure");
    send(&mut session, &"word ".repeat(200));
    assert!(session.prefill_speed().is_some_and(|speed| speed > 1000.0), "{:?}", session.prefill_speed());
    assert_eq!(sizes(session.rules()), (4096, 1024, 1024), "the context of the scripted model");
    drop(session);
    let session = open_session(&store, auto_rules(), Vec::new());
    assert_eq!(session.token_limit(), 4096, "the stored speed counts");
    let session = open_session(&store, test_rules(300), Vec::new());
    assert_eq!(session.token_limit(), 300, "a size that is set is not automatic");
}

/// As in the founding documents, what is resurrected may fill the model's context; after the turn the window has its size
/// again. Without that rule the same chunks do not fit.
#[test]
fn resurrection_within_the_models_context_exceeds_the_window_for_a_turn() {
    for (limit, fits) in [(ResurrectLimit::Model, true), (ResurrectLimit::Window, false)] {
        let store = shared_store(InMemoryStore::default());
        let mut rules = test_rules(40);
        (rules.resurrect_limit, rules.reserved_tokens) = (limit, 0);
        let facts = ["Betsy", "Ann", "Tim", "Rex", "Joe", "Max"];
        let answers = (0..=facts.len()).map(|_| answer_attending_to(" Noted.", "now")).collect();
        let mut session = open_session(&store, rules, answers);
        for name in facts {
            send(&mut session, &format!("One gun on the wall of the old house is called {name}"));
            assert!(session.live_tokens() <= 40, "{} tokens", session.live_tokens());
        }
        let mut most_live = 0;
        let mut events = Vec::new();
        let result =
            session.send_message("How is the gun on the wall called", crate::turn::TODAY, &mut |event| {
                if matches!(event, Event::Token { .. }) && most_live == 0 {
                    use halo_core::store::{Access, Store};
                    let stored = store.clone().load("main", Access::Read).expect("the conversation loads");
                    most_live = stored.live_len();
                }
                events.push(event);
                halo_core::model::StepFlow::Continue
            });
        result.expect("the turn ends");
        let returned = resurrected_chunks(&events);
        assert_eq!(returned.contains(&"u0.0".to_owned()), fits, "{limit}: {returned:?}");
        assert_eq!(most_live > 60, fits, "{limit}: {most_live} tokens");
        assert!(session.live_tokens() <= 40, "{limit}: {} tokens after the turn", session.live_tokens());
        assert_same_as_stored(&session, &store);
    }
}

/// Hits below the relevance floor stay pruned, and the record of the turn names them with their scores. Relevance is a
/// probability. `crates/cli/tests/it/gun.rs` shows the default floor with the default embedder.
#[test]
fn relevance_floor_names_the_hits_that_stay_pruned() {
    for (floor, returns) in [(0.0, true), (0.02, true), (0.999, false)] {
        let store = shared_store(InMemoryStore::default());
        let mut rules = test_rules(60);
        rules.recall.floor = floor;
        let topics = ["cheese", "trains", "winter", "music", "bread", "ships"];
        let answers = (0..8).map(|_| answer_attending_to(" Noted.", "now")).collect();
        let mut session = open_session(&store, rules, answers);
        send(&mut session, "The gun on the wall is called Betsy");
        for topic in topics {
            send(&mut session, &format!("Tell me something about {topic} now and then some more"));
        }
        assert!(!session.context_window_text().contains("gun"), "{}", session.context_window_text());
        let events = send(&mut session, "What is the gun called");
        assert_eq!(resurrected_chunks(&events).contains(&"u0.0".to_owned()), returns, "floor {floor}");
        let Some(Event::Done(summary)) = events.last() else { panic!("the turn ends: {events:?}") };
        let below: Vec<String> = summary.below_floor.iter().map(|hit| hit.chunk.to_string()).collect();
        assert_eq!(below.contains(&"u0.0".to_owned()), !returns, "floor {floor}: {below:?}");
        assert!(summary.below_floor.iter().all(|hit| hit.score > 0.0), "{summary:?}");
        let topics_returned =
            resurrected_chunks(&events).iter().any(|chunk| !["u0.0", "a1.0"].contains(&chunk.as_str()));
        assert_eq!(topics_returned, floor == 0.0, "floor {floor}: {:?}", resurrected_chunks(&events));
    }
}
