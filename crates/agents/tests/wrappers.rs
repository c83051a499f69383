//! Wrappers: what an agent within them sees, and what it never does.

use halo_agents::agent::{Agent, Compose, function};
use halo_agents::constraint::{Pressed, SummaryConstraint};
use halo_agents::content::{Said, Whose};
use halo_agents::cooled::{Cooling, THRESHOLD, with_context_management};
use halo_agents::count::{Count, Quarter};
use halo_agents::windowed::Windowing;
use halo_core::salience::Salience;
use halo_core::seams::SeamError;
use halo_core::window::WindowSize;
use pollster::block_on;
use proptest::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// An agent that answers with what it was asked.
fn echo<I: Send>() -> impl Agent<I, Out = I> {
    function(|input: I| async { Ok(input) })
}

/// Words are tokens.
fn words(text: &str) -> usize {
    text.split_whitespace().count()
}

#[test]
fn a_cool_agent_is_asked_as_it_is() {
    assert_eq!(THRESHOLD, 4096);
    let agent = echo().with(Cooling::default());
    let short = "x".repeat(4096 * 4 + 3);
    assert_eq!(block_on(agent.invoke(short.clone())), Ok(short), "16387 characters are 4096 tokens");
    let long = "é".repeat(4097 * 4);
    let heard = block_on(agent.invoke(long)).expect("it echoes");
    assert_eq!(heard.chars().count(), 4096 * 4, "cut to so many characters");
}

#[test]
fn a_radiator_shortens_and_the_inner_agent_never_knows() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    let inner = function(move |input: Vec<Said>| {
        seen.lock().expect("nobody panics").push(input.clone());
        async move { Ok(input.len()) }
    });
    let radiator =
        function(|text: String| async move { Ok(format!("made shorter from {}", text.len())) }).boxed();
    let agent = inner.with(Cooling { threshold: 11, radiator: Some(radiator), count: Arc::new(words) });
    let user = "one two three four five";
    let input = vec![Said::user(user), Said::agent("word ".repeat(40)), Said::agent("kept as is")];
    assert_eq!(block_on(agent.invoke(input)), Ok(3), "the same type, rebuilt");
    let seen = asked.lock().expect("nobody panics")[0].clone();
    assert_eq!(seen[0], Said::user(user));
    assert_eq!(seen[1].text, "made shorter from ", "what the radiator left too long is cut: {seen:?}");
    assert_eq!(seen[2].text, "kept as is");
}

#[test]
fn a_failing_radiator_fails_the_question() {
    let radiator = function(|_: String| async { Err(SeamError::new("shortening", "it is away")) }).boxed();
    let agent = with_context_management(echo::<String>(), 2, Some(radiator));
    let why = block_on(agent.invoke("a rather long text".into())).expect_err("it is too long");
    assert_eq!(why.to_string(), "shortening: it is away");
}

#[test]
fn under_pressure_agents_say_it_shorter() {
    let constraint = SummaryConstraint::default();
    assert_eq!((constraint.pressure_threshold, constraint.compression_ratio), (0.8, 0.2));
    let message = "0123456789".to_owned();
    assert_eq!(block_on(constraint.maybe_compress(message.clone(), 0.79)), Ok(message.clone()));
    assert_eq!(block_on(constraint.maybe_compress(message.clone(), 0.8)), Ok("01...".into()));
    let heard = function(|text: String| async move { Ok(text) }).boxed();
    let constraint = SummaryConstraint { summarizer: Some(heard), ..constraint };
    let told = block_on(constraint.maybe_compress(message, 0.9));
    assert_eq!(told, Ok("Summarize in 2 characters: 0123456789".into()));
}

#[test]
fn a_window_is_a_context_for_any_agent() {
    let size = WindowSize { window: 12, sink: 2, recent: 4 };
    let count: Arc<dyn Count> = Arc::new(words);
    let join = |said: Vec<Said>| async move {
        let all: Vec<String> = said.iter().map(|said| said.text.clone()).collect();
        Ok(format!("{} heard", all.join("|").split('|').count()))
    };
    let agent = function(join).with(Windowing { size, scorer: Some(Salience::default()), count });
    assert_eq!(block_on(agent.invoke(Said::user("the very first"))), Ok("1 heard".into()));
    for n in 0..6 {
        block_on(agent.invoke(Said::user(format!("message number {n}")))).expect("it answers");
        assert!(agent.context().iter().map(|said| words(&said.text)).sum::<usize>() <= 12);
    }
    let context = agent.context();
    assert_eq!(context[0], Said::user("the very first"), "the first stays");
    assert_eq!(context.last().map(|said| said.whose), Some(Whose::Agent), "and the last");
    assert!(context.iter().any(|said| said.text == "message number 5"), "{context:?}");
    assert!((0.0..=1.0).contains(&agent.pressure()));
}

#[test]
fn agents_are_put_together() {
    let shout = function(|text: String| async move { Ok(text.to_uppercase()) });
    let count = function(|text: String| async move { Ok(text.len()) });
    let both = shout.with(Cooling { threshold: 2, ..Cooling::default() }).then(count);
    assert_eq!(block_on(both.invoke("a text of more than eight".into())), Ok(8));
    let boxed = both.boxed();
    assert_eq!(block_on(boxed.invoke("ab".into())), Ok(2));
}

fn said() -> impl Strategy<Value = Vec<Said>> {
    let whose = prop_oneof![Just(Whose::User), Just(Whose::Agent)];
    prop::collection::vec((whose, "\\PC{0,80}").prop_map(|(whose, text)| Said { whose, text }), 0..8)
}

/// What an agent in the middle of any wrappers was asked.
fn asked(input: Vec<Said>, cooling: Cooling, twice: bool, pressure: f64) -> (Vec<Said>, Vec<Said>) {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&heard);
    let inner = function(move |input: Vec<Said>| {
        *seen.lock().expect("nobody panics") = input.clone();
        async move { Ok(input) }
    });
    let pressed = Pressed { constraint: SummaryConstraint::default(), pressure: Arc::new(move || pressure) };
    let agent = inner.with(cooling.clone()).with(pressed);
    let out = if twice { block_on(agent.with(cooling).invoke(input)) } else { block_on(agent.invoke(input)) };
    let heard = heard.lock().expect("nobody panics").clone();
    (heard, out.expect("nothing fails"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// The budget holds as counted, and what a person said passes byte for byte, in and out, whatever is around.
    #[test]
    fn budgets_hold_and_people_are_quoted(
        input in said(),
        threshold in 0usize..60,
        by_words in any::<bool>(),
        radiates in any::<bool>(),
        twice in any::<bool>(),
        pressure in 0.0f64..1.0,
    ) {
        let count: Arc<dyn Count> = if by_words { Arc::new(words) } else { Arc::new(Quarter) };
        let calls = Arc::new(AtomicUsize::new(0));
        let called = Arc::clone(&calls);
        // It may make things longer: it is not believed.
        let radiator = radiates.then(|| function(move |text: String| {
            called.fetch_add(1, Ordering::SeqCst);
            async move { Ok(format!("{text} {text}")) }
        }).boxed());
        let cooling = Cooling { threshold, radiator, count: Arc::clone(&count) };
        let (heard, out) = asked(input.clone(), cooling, twice, pressure);
        let tokens = |said: &[Said], user: bool| -> usize {
            said.iter().filter(|s| !user || s.whose == Whose::User).map(|s| count.tokens(&s.text)).sum()
        };
        prop_assert!(tokens(&heard, false) <= threshold.max(tokens(&input, true)));
        let users = |said: &[Said]| -> Vec<String> {
            said.iter().filter(|s| s.whose == Whose::User).map(|s| s.text.clone()).collect()
        };
        prop_assert_eq!(users(&heard), users(&input));
        prop_assert_eq!(users(&out), users(&input));
        if tokens(&input, false) <= threshold {
            prop_assert_eq!(heard, input);
            prop_assert_eq!(calls.load(Ordering::SeqCst), 0);
        }
    }

    /// The first and the latest stay; equal texts are different pieces; what is left and what has left are all there was.
    #[test]
    fn windows_keep_first_and_last_and_lose_instances(
        texts in prop::collection::vec(prop_oneof![Just("same words here".to_owned()), "[a-c ]{1,12}"], 1..60),
        window in 8usize..40, sink in 0usize..6, recent in 1usize..10,
    ) {
        let size = WindowSize { window, sink, recent };
        let count: Arc<dyn Count> = Arc::new(words);
        let agent = echo::<Vec<Said>>().with(Windowing { size, scorer: Some(Salience::default()), count });
        let mut left = Vec::new();
        for text in &texts {
            left.extend(agent.hear(&Said::agent(text.clone())));
            let context = agent.context();
            prop_assert_eq!(&context.last().expect("the latest stays").text, text);
        }
        let mut all: Vec<String> = agent.context().into_iter().map(|said| said.text).collect();
        all.extend(left.iter().map(|piece| piece.text.clone()));
        let mut said = texts;
        all.sort();
        said.sort();
        prop_assert_eq!(all, said, "nothing is lost that did not leave, and nothing leaves twice");
        let mut ids: Vec<u64> = left.iter().map(|piece| piece.id).collect();
        ids.sort_unstable();
        ids.dedup();
        prop_assert_eq!(ids.len(), left.len());
    }

    /// A text is cut where its tokens reach the limit, at a character.
    #[test]
    fn cuts_keep_the_limit(text in "\\PC{0,60}", limit in 0usize..20) {
        prop_assert!(words(words.cut(&text, limit)) <= limit);
        prop_assert!(Quarter.tokens(Quarter.cut(&text, limit)) <= limit);
        prop_assert!(text.starts_with(words.cut(&text, limit)));
    }
}
