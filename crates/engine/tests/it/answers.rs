//! Edits and continuations of the last answer, and options of one conversation.

use crate::common::test_rules;
use crate::turn::{TODAY, answer_attending_to, open_named_session, open_session, shared_store};
use halo_core::model::StepFlow;
use halo_core::testing::doubles::{InMemoryStore, ScriptedAnswer};
use halo_engine::chat_options::{ChatOptions, Persona, SamplingOverrides};
use halo_engine::event::Event;
use halo_engine::session::Session;
use halo_engine::turn::{EditAuthor, TurnInput};

fn run(session: &mut Session, input: TurnInput) -> Vec<Event> {
    let mut events = Vec::new();
    let result = session.run_turn(input, TODAY, &mut |event| {
        events.push(event);
        StepFlow::Continue
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    events
}

fn tokens(events: &[Event]) -> String {
    let text = |event: &Event| match event {
        Event::Token { text, .. } => Some(text.clone()),
        _ => None,
    };
    events.iter().filter_map(text).collect()
}

/// The answer goes on in one message, readers get its whole text, and the cut answer can be chosen again.
#[test]
fn continued_answer_has_the_text_of_the_cut_one() {
    let store = shared_store(InMemoryStore::default());
    let answers = vec![
        answer_attending_to(" one two three", "x"),
        answer_attending_to(" four five", "x"),
        answer_attending_to(" six", "x"),
    ];
    let mut session = open_session(&store, test_rules(0), answers);
    let refused = session.run_turn(TurnInput::ContinueLast, TODAY, &mut |_| StepFlow::Continue);
    assert!(refused.is_err(), "there is no answer");
    run(&mut session, TurnInput::Message("Count".into()));
    let events = run(&mut session, TurnInput::ContinueLast);
    assert_eq!(tokens(&events), " one two three four five");
    let window = session.context_window_text();
    assert_eq!(window.matches(" one two three four five").count(), 1, "{window}");
    assert_eq!(window.matches("one").count(), 1, "the cut answer is not in the window: {window}");
    let choices = session.variant_choices().expect("the variants are read");
    let texts: Vec<&str> = choices.iter().map(|choice| choice.messages[0].1.as_str()).collect();
    assert_eq!(texts, [" one two three", " one two three four five"]);
    assert!(choices[1].is_current && !choices[0].is_current);
    assert_eq!(tokens(&run(&mut session, TurnInput::ContinueLast)), " one two three four five six");
    assert_eq!(session.find_inconsistencies().expect("it is checked"), Vec::<String>::new());
}

/// A continuation that fails before its first token leaves the answer as it was.
#[test]
fn failed_continuation_keeps_the_answer() {
    let store = shared_store(InMemoryStore::default());
    let broken = ScriptedAnswer { fails_after: Some(0), ..answer_attending_to(" never", "x") };
    let answers =
        vec![answer_attending_to(" one two three", "x"), broken, answer_attending_to(" four five", "x")];
    let mut session = open_session(&store, test_rules(0), answers);
    run(&mut session, TurnInput::Message("Count".into()));
    // The model fails before its first token.
    let failed = session.run_turn(TurnInput::ContinueLast, TODAY, &mut |_| StepFlow::Continue);
    assert!(failed.is_err());
    let window = session.context_window_text();
    assert_eq!(window.matches(" one two three").count(), 1, "{window}");
    assert_eq!(tokens(&run(&mut session, TurnInput::ContinueLast)), " one two three four five");
}

/// The text of the user takes the place of the answer, which becomes a variant; nothing is generated.
#[test]
fn replaced_answer_becomes_a_variant() {
    let store = shared_store(InMemoryStore::default());
    let mut session = open_session(&store, test_rules(0), vec![answer_attending_to(" red", "x"); 2]);
    assert!(session.replace_answer("blue").is_err(), "there is no message");
    run(&mut session, TurnInput::Message("Which colour".into()));
    assert!(session.replace_answer("  ").is_err(), "an empty answer is refused");
    session.replace_answer("It is blue.").expect("the answer is replaced");
    let window = session.context_window_text();
    assert!(window.contains("It is blue.") && !window.contains("red"), "{window}");
    let choices = session.variant_choices().expect("the variants are read");
    assert_eq!(choices.len(), 2);
    let replaced =
        choices.iter().find(|choice| !choice.is_current).expect("the answer is kept").turns.clone();
    let current = choices.iter().find(|choice| choice.is_current).expect("there is one").turns.clone();
    session.choose_variant(&replaced, &current).expect("the first answer is chosen again");
    assert!(session.context_window_text().contains("red"));
    assert_eq!(session.find_inconsistencies().expect("it is checked"), Vec::<String>::new());
}

/// Options of a new conversation are stored with its first message, hold after it is opened again, and can be reset.
#[test]
fn chat_options_are_kept_and_reset() {
    let store = shared_store(InMemoryStore::default());
    let open = || open_session(&store, test_rules(0), vec![answer_attending_to(" yes", "x"); 3]);
    let own = ChatOptions {
        system_prompt: Some("You are a pirate.".into()),
        sampling: SamplingOverrides { temperature: Some(1.5), max_tokens: Some(3), ..Default::default() },
        persona: Persona { user_name: "Anna".into(), ..Persona::default() },
        ..ChatOptions::default()
    };
    let mut session = open();
    let wrong = SamplingOverrides { temperature: Some(9.0), ..Default::default() };
    let refused = session.set_chat_options(&ChatOptions { sampling: wrong, ..ChatOptions::default() });
    assert!(refused.is_err(), "a temperature of 9 is refused");
    session.set_chat_options(&own).expect("they are set");
    assert_eq!(ChatOptions::load(&mut store.clone(), "main").expect("read"), ChatOptions::default());
    run(&mut session, TurnInput::Message("Hello".into()));
    drop(session);
    assert_eq!(ChatOptions::load(&mut store.clone(), "main").expect("read"), own);
    let mut session = open();
    assert_eq!((session.rules().sampling.temperature, session.rules().sampling.max_tokens), (1.5, 3));
    let window = session.context_window_text();
    assert!(window.contains("You are a pirate.\n\nYou talk with Anna."), "{window}");
    session.set_chat_options(&ChatOptions::default()).expect("they are reset");
    assert_eq!((session.rules().sampling.temperature, session.rules().sampling.max_tokens), (0.0, 8));
    drop(session);
    assert_eq!(ChatOptions::load(&mut store.clone(), "main").expect("read"), ChatOptions::default());
    let session = open();
    let window = session.context_window_text();
    assert!(window.contains("Be brief.") && !window.contains("pirate"), "{window}");
    assert!(!window.contains("Anna"), "{window}");
}

/// A branch at an older answer has all of its variants, and the one that was in the conversation can be chosen again.
#[test]
fn branch_keeps_the_variants_of_its_last_exchange() {
    let store = shared_store(InMemoryStore::default());
    let answers = [" red", " green", " blue", " next"].map(|text| answer_attending_to(text, "x")).to_vec();
    let mut session = open_session(&store, test_rules(0), answers);
    run(&mut session, TurnInput::Message("Which?".into()));
    for _ in 0..2 {
        run(&mut session, TurnInput::Regenerate(EditAuthor::User));
    }
    let choices = session.variant_choices().expect("the variants are read");
    let (first, last) = (choices[0].turns.clone(), choices[2].turns.clone());
    // The first answer is the current one: the others have later turns.
    session.choose_variant(&first, &last).expect("the first answer is chosen");
    run(&mut session, TurnInput::Message("And then?".into()));
    assert_eq!(session.variant_choices().expect("the variants are read"), [], "those are of an older answer");
    assert_eq!(session.branch("copy", Some(first[0].0)).expect("it is branched"), 2);
    drop(session);
    let mut copy = open_named_session(&store, "copy", test_rules(0), Vec::new());
    let choices = copy.variant_choices().expect("the variants are read");
    let texts: Vec<&str> = choices.iter().map(|choice| choice.messages[0].1.as_str()).collect();
    assert_eq!(texts, [" red", " green", " blue"]);
    assert!(choices[0].is_current && !choices[1].is_current && !choices[2].is_current);
    let window = copy.context_window_text();
    assert!(window.contains(" red") && !window.contains("And then?"), "{window}");
    copy.choose_variant(&choices[2].turns, &choices[0].turns).expect("another one is chosen");
    assert!(copy.context_window_text().contains(" blue"));
    assert_eq!(copy.find_inconsistencies().expect("it is checked"), Vec::<String>::new());
}
