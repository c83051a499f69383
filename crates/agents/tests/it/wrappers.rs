//! Wrappers of agents: the input that the inner agent gets.

use halo_agents::agent::{Agent, AgentExt, agent_fn};
use halo_agents::constraint::{SummaryConstraint, SummaryLayer};
use halo_agents::content::{AuthoredMessage, TextAuthor};
use halo_agents::cooled::{CoolingLayer, TOKEN_THRESHOLD, with_context_management};
use halo_agents::token_counter::{ApproxTokenCounter, TokenCounter};
use halo_agents::windowed::WindowLayer;
use halo_core::Error;
use halo_core::salience::SalienceScorer;
use halo_core::sliding_window::WindowSize;
use pollster::block_on;
use proptest::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Answers with its input.
fn echo<I: Send>() -> impl Agent<I, Out = I> {
    agent_fn(|input: I| async { Ok(input) })
}

/// Counts one token per word.
fn count_words(text: &str) -> usize {
    text.split_whitespace().count()
}

#[test]
fn cooled_agent_passes_short_input_and_truncates_long() {
    assert_eq!(TOKEN_THRESHOLD, 4096);
    let agent = echo().with_layer(CoolingLayer::default());
    let short = "x".repeat(4096 * 4 + 3);
    assert_eq!(block_on(agent.invoke(short.clone())), Ok(short), "16387 characters are 4096 tokens");
    let long = "é".repeat(4097 * 4);
    let truncated = block_on(agent.invoke(long)).expect("the agent answers");
    assert_eq!(truncated.chars().count(), 4096 * 4, "truncated to the limit");
}

#[test]
fn cooled_agent_summarizer_shortens_only_agent_text() {
    let inputs = Arc::new(Mutex::new(Vec::new()));
    let recorder = Arc::clone(&inputs);
    let inner = agent_fn(move |input: Vec<AuthoredMessage>| {
        recorder.lock().expect("the lock is not poisoned").push(input.clone());
        async move { Ok(input.len()) }
    });
    let summarizer =
        agent_fn(|text: String| async move { Ok(format!("made shorter from {}", text.len())) }).boxed();
    let agent = inner.with_layer(CoolingLayer {
        threshold: 11,
        summarizer: Some(summarizer),
        counter: Arc::new(count_words),
    });
    let user = "one two three four five";
    let input = vec![
        AuthoredMessage::user(user),
        AuthoredMessage::agent("word ".repeat(40)),
        AuthoredMessage::agent("is short enough"),
    ];
    assert_eq!(block_on(agent.invoke(input)), Ok(3), "the input keeps its type and its length");
    let input = inputs.lock().expect("the lock is not poisoned")[0].clone();
    assert_eq!(input[0], AuthoredMessage::user(user));
    assert_eq!(input[1].text, "made shorter from ", "a summary that is too long is truncated: {input:?}");
    assert_eq!(input[2].text, "is short enough");
}

#[test]
fn cooled_agent_returns_summarizer_error() {
    let summarizer = agent_fn(|_: String| async { Err(Error::internal("summarizing", "no model")) }).boxed();
    let agent = with_context_management(echo::<String>(), 2, Some(summarizer));
    let error = block_on(agent.invoke("a rather long text".into())).expect_err("the summarizer fails");
    assert_eq!(error.to_string(), "summarizing: no model");
}

#[test]
fn summary_constraint_compresses_under_pressure() {
    let constraint = SummaryConstraint::default();
    assert_eq!((constraint.pressure_threshold, constraint.compression_ratio), (0.8, 0.2));
    let message = "0123456789".to_owned();
    assert_eq!(block_on(constraint.maybe_compress(message.clone(), 0.79)), Ok(message.clone()));
    assert_eq!(block_on(constraint.maybe_compress(message.clone(), 0.8)), Ok("01...".into()));
    let echo = agent_fn(|text: String| async move { Ok(text) }).boxed();
    let constraint = SummaryConstraint { summarizer: Some(echo), ..constraint };
    let prompt = block_on(constraint.maybe_compress(message, 0.9));
    assert_eq!(prompt, Ok("Summarize in 2 characters: 0123456789".into()));
}

#[test]
fn windowed_agent_keeps_first_and_latest_messages() {
    let size = WindowSize { window: 12, sink: 2, recent: 4 };
    let count: Arc<dyn TokenCounter> = Arc::new(count_words);
    let count_messages = |messages: Vec<AuthoredMessage>| async move {
        let texts: Vec<String> = messages.iter().map(|message| message.text.clone()).collect();
        Ok(format!("{} messages", texts.join("|").split('|').count()))
    };
    let agent = agent_fn(count_messages).with_layer(WindowLayer {
        size,
        scorer: Some(SalienceScorer::default()),
        counter: count,
    });
    assert_eq!(block_on(agent.invoke(AuthoredMessage::user("the very first"))), Ok("1 messages".into()));
    for n in 0..6 {
        block_on(agent.invoke(AuthoredMessage::user(format!("message number {n}"))))
            .expect("the agents answer");
        assert!(agent.context().iter().map(|message| count_words(&message.text)).sum::<usize>() <= 12);
    }
    let context = agent.context();
    assert_eq!(context[0], AuthoredMessage::user("the very first"), "the first is a sink");
    assert_eq!(context.last().map(|message| message.author), Some(TextAuthor::Agent), "the last is recent");
    assert!(context.iter().any(|message| message.text == "message number 5"), "{context:?}");
    assert!((0.0..=1.0).contains(&agent.pressure()));
}

#[test]
fn agent_layers_compose() {
    let to_uppercase_agent = agent_fn(|text: String| async move { Ok(text.to_uppercase()) });
    let count = agent_fn(|text: String| async move { Ok(text.len()) });
    let chained =
        to_uppercase_agent.with_layer(CoolingLayer { threshold: 2, ..CoolingLayer::default() }).then(count);
    assert_eq!(block_on(chained.invoke("a text of more than eight".into())), Ok(8));
    let boxed = chained.boxed();
    assert_eq!(block_on(boxed.invoke("ab".into())), Ok(2));
}

fn message_strategy() -> impl Strategy<Value = Vec<AuthoredMessage>> {
    let author = prop_oneof![Just(TextAuthor::User), Just(TextAuthor::Agent)];
    prop::collection::vec(
        (author, "\\PC{0,80}").prop_map(|(author, text)| AuthoredMessage { author, text }),
        0..8,
    )
}

/// The input of the inner agent, and the answer of the wrapped one.
fn run_wrapped(
    input: Vec<AuthoredMessage>,
    cooling: CoolingLayer,
    twice: bool,
    pressure: f64,
) -> (Vec<AuthoredMessage>, Vec<AuthoredMessage>) {
    let received = Arc::new(Mutex::new(Vec::new()));
    let recorder = Arc::clone(&received);
    let inner = agent_fn(move |input: Vec<AuthoredMessage>| {
        *recorder.lock().expect("the lock is not poisoned") = input.clone();
        async move { Ok(input) }
    });
    let summary =
        SummaryLayer { constraint: SummaryConstraint::default(), pressure: Arc::new(move || pressure) };
    let agent = inner.with_layer(cooling.clone()).with_layer(summary);
    let out =
        if twice { block_on(agent.with_layer(cooling).invoke(input)) } else { block_on(agent.invoke(input)) };
    let received = received.lock().expect("the lock is not poisoned").clone();
    (received, out.expect("the wrapped agent answers"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// The input stays within the limit, and text of the user passes unchanged in both directions.
    #[test]
    fn cooled_agent_property_budget_holds_and_user_text_is_unchanged(
        input in message_strategy(),
        threshold in 0usize..60,
        by_words in any::<bool>(),
        summarizes in any::<bool>(),
        twice in any::<bool>(),
        pressure in 0.0f64..1.0,
    ) {
        let count: Arc<dyn TokenCounter> = if by_words { Arc::new(count_words) } else { Arc::new(ApproxTokenCounter) };
        let calls = Arc::new(AtomicUsize::new(0));
        let call_counter = Arc::clone(&calls);
        // A summarizer that makes texts longer instead of shorter.
        let summarizer = summarizes.then(|| agent_fn(move |text: String| {
            call_counter.fetch_add(1, Ordering::SeqCst);
            async move { Ok(format!("{text} {text}")) }
        }).boxed());
        let cooling = CoolingLayer { threshold, summarizer, counter: Arc::clone(&count) };
        let (received, answer) = run_wrapped(input.clone(), cooling, twice, pressure);
        let tokens = |messages: &[AuthoredMessage], user: bool| -> usize {
            messages.iter().filter(|s| !user || s.author == TextAuthor::User).map(|s| count.count_tokens(&s.text)).sum()
        };
        prop_assert!(tokens(&received, false) <= threshold.max(tokens(&input, true)));
        let users = |messages: &[AuthoredMessage]| -> Vec<String> {
            messages.iter().filter(|s| s.author == TextAuthor::User).map(|s| s.text.clone()).collect()
        };
        prop_assert_eq!(users(&received), users(&input));
        prop_assert_eq!(users(&answer), users(&input));
        if tokens(&input, false) <= threshold {
            prop_assert_eq!(received, input);
            prop_assert_eq!(calls.load(Ordering::SeqCst), 0);
        }
    }

    /// The newest message stays, and every message is either in the window or was pruned once.
    #[test]
    fn windowed_agent_property_prunes_each_message_once(
        texts in prop::collection::vec(prop_oneof![Just("same words here".to_owned()), "[a-c ]{1,12}"], 1..60),
        window in 8usize..40, sink in 0usize..6, recent in 1usize..10,
    ) {
        let size = WindowSize { window, sink, recent };
        let count: Arc<dyn TokenCounter> = Arc::new(count_words);
        let agent = echo::<Vec<AuthoredMessage>>().with_layer(WindowLayer { size, scorer: Some(SalienceScorer::default()), counter: count });
        let mut pruned = Vec::new();
        for text in &texts {
            pruned.extend(agent.add_message(&AuthoredMessage::agent(text.clone())));
            let context = agent.context();
            prop_assert_eq!(&context.last().expect("the window has the newest message").text, text);
        }
        let mut all: Vec<String> = agent.context().into_iter().map(|message| message.text).collect();
        all.extend(pruned.iter().map(|item| item.text.clone()));
        let mut expected = texts;
        all.sort();
        expected.sort();
        prop_assert_eq!(all, expected, "no message is lost or duplicated");
        let mut ids: Vec<u64> = pruned.iter().map(|item| item.id).collect();
        ids.sort_unstable();
        ids.dedup();
        prop_assert_eq!(ids.len(), pruned.len());
    }

    #[test]
    fn truncate_property_respects_token_limit(text in "\\PC{0,60}", limit in 0usize..20) {
        prop_assert!(count_words(count_words.truncate(&text, limit)) <= limit);
        prop_assert!(ApproxTokenCounter.count_tokens(ApproxTokenCounter.truncate(&text, limit)) <= limit);
        prop_assert!(text.starts_with(count_words.truncate(&text, limit)));
    }
}
