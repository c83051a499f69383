//! Complete turns on the test doubles: the context window, the stored state and the events.

use crate::common::test_rules;
use halo_core::ErrorKind;
use halo_core::brightness::ScoringStrategy;
use halo_core::model::{ChatTemplate, FinishReason, StepFlow};
use halo_core::store::{Access, RecordKind, Store};
use halo_core::testing::doubles::{
    FailingStore, HashEmbedder, InMemoryStore, ScriptedAnswer, ScriptedAttention, ScriptedModel,
};
use halo_core::testing::shared_store::SharedStore;
use halo_core::token::{Brightness, ChunkId};
use halo_core::ttl::TtlRules;
use halo_engine::event::{ATTENTION_INTERVAL, Event};
use halo_engine::rules::{ConversationRules, ResurrectBrightness};
use halo_engine::session::Session;
use halo_engine::tools::jq::JqRunner;
use halo_engine::tools::{ToolCallResult, run_command};
use halo_engine::turn::EditAuthor;
use jiff::civil::Date;

pub fn shared_store<S: Store>(store: S) -> SharedStore<S> {
    SharedStore::new(store)
}

pub fn answer_attending_to(text: &str, word: &str) -> ScriptedAnswer {
    ScriptedAnswer { text: text.into(), attention: ScriptedAttention::OnWord(word.into()), fails_after: None }
}

pub fn open_session(
    store: &SharedStore<impl Store + Send + 'static>,
    rules: ConversationRules,
    answers: Vec<ScriptedAnswer>,
) -> Session {
    open_named_session(store, "main", rules, answers)
}

pub fn open_named_session(
    store: &SharedStore<impl Store + Send + 'static>,
    name: &str,
    rules: ConversationRules,
    answers: Vec<ScriptedAnswer>,
) -> Session {
    let model = Box::new(ScriptedModel::new(4096, answers));
    let session = Session::open(
        Box::new(store.clone()),
        model,
        Some(Box::new(HashEmbedder)),
        name,
        rules,
        &mut |_, _| {},
    );
    session.unwrap_or_else(|error| panic!("the session does not open: {error}"))
}

pub const TODAY: Date = jiff::civil::date(2026, 11, 15);

pub fn send(session: &mut Session, message: &str) -> Vec<Event> {
    let mut events = Vec::new();
    let result = session.send_message(message, TODAY, &mut |event| {
        events.push(event);
        StepFlow::Continue
    });
    result.unwrap_or_else(|error| panic!("{message}: {error}"));
    events
}

pub fn answer_text(events: &[Event]) -> String {
    let text = |event: &Event| match event {
        Event::Token { text, .. } => Some(text.clone()),
        _ => None,
    };
    events.iter().filter_map(text).collect()
}

pub fn pruned_chunks(events: &[Event]) -> Vec<String> {
    let chunk = |event: &Event| match event {
        Event::Pruned { chunk, .. } => Some(chunk.to_string()),
        _ => None,
    };
    events.iter().filter_map(chunk).collect()
}

pub fn resurrected_chunks(events: &[Event]) -> Vec<String> {
    let chunk = |event: &Event| match event {
        Event::Resurrected { chunk, .. } => Some(chunk.to_string()),
        _ => None,
    };
    events.iter().filter_map(chunk).collect()
}

/// Asserts that the stored conversation has the state hash and the live text of the session.
pub fn assert_same_as_stored(session: &Session, store: &SharedStore<impl Store>) {
    let stored = store.clone().load("main", Access::Read).expect("the conversation loads");
    assert_eq!(stored.state_hash(), session.timeline().state_hash());
    assert_eq!(stored.context_window(0).text(), session.timeline().context_window(0).text());
}

/// The store fails at each call of the first turn, one after the other, before or after it has written. A conversation with
/// a message always knows the model and the template that its tokens are of, so opening it again makes no copy of it.
#[test]
fn first_message_is_stored_with_its_model() {
    for calls in 0..40 {
        for fails_after_write in [false, true] {
            let mut failing = FailingStore::new(InMemoryStore::default(), usize::MAX);
            failing.fails_after_write = fails_after_write;
            let store = shared_store(failing);
            let mut session = open_session(&store, test_rules(0), vec![answer_attending_to("Hi.", "Hello")]);
            let set_calls_left = |calls| store.0.lock().expect("the lock is not poisoned").calls_left = calls;
            set_calls_left(calls);
            let result = session.send_message("Hello", TODAY, &mut |_| StepFlow::Continue);
            set_calls_left(usize::MAX);
            drop(session);
            open_session(&store, test_rules(0), Vec::new());
            let conversations = store.clone().list_conversations().expect("the conversations are listed");
            assert!(conversations.len() <= 1, "after {calls} calls: {conversations:?}");
            for conversation in conversations.iter().filter(|conversation| conversation.tokens > 0) {
                assert_eq!(conversation.model, "scripted", "after {calls} calls");
            }
            if calls == 39 {
                assert!(result.is_ok(), "the first turn has fewer calls");
            }
        }
    }
}

/// The TTL strategy prunes the dimmest tokens during generation, at most two per generated token; the model sees the
/// window without them.
#[test]
fn ttl_strategy_prunes_tokens_during_generation() {
    let store = shared_store(InMemoryStore::default());
    let mut rules = test_rules(0);
    rules.context.strategy = ScoringStrategy::Ttl(TtlRules { target: 10, ..TtlRules::default() });
    // The TTL strategy generates one token per call of the model, so only the first word of each answer is used.
    let words = ["one", "two", "three", "four", "five", "six", "seven", "eight"];
    let answers = words.iter().map(|word| answer_attending_to(&format!(" {word} and"), "Betsy")).collect();
    let mut session = open_session(&store, rules, answers);
    let events = send(&mut session, "The gun on the wall above the fireplace in the hall is called Betsy");
    assert_eq!(answer_text(&events), " one two three four five six seven eight");
    let first_prune =
        events.iter().position(|e| matches!(e, Event::Pruned { .. })).expect("a token is pruned");
    let last_token =
        events.iter().rposition(|e| matches!(e, Event::Token { .. })).expect("a token is generated");
    assert!(first_prune < last_token, "tokens are pruned during generation");
    assert!(events.iter().any(|e| matches!(e, Event::Pruned { reason, .. } if reason.contains("target 10"))));
    // Answer tokens start dimmer than user tokens, and the token that receives attention stays.
    assert_eq!(
        session.context_window_text(),
        "Be brief. above the fireplace in the hall is called Betsy eight"
    );
    assert_same_as_stored(&session, &store);
}

/// The attention of an answer is announced while it is generated, and not more often than a page draws it.
#[test]
fn attention_is_announced_during_generation() {
    let store = shared_store(InMemoryStore::default());
    let story = " once upon a time there was a gun named Betsy".repeat(20);
    let answers = vec![answer_attending_to(" Noted.", "nothing"), answer_attending_to(&story, "Betsy")];
    let mut rules = test_rules(0);
    rules.sampling.max_tokens = 500;
    let mut session = open_session(&store, rules, answers);
    send(&mut session, "The gun on the wall is called Betsy");
    let start = std::time::Instant::now();
    let events = send(&mut session, "Tell me a story");
    let longest = usize::try_from(start.elapsed().as_millis() / ATTENTION_INTERVAL.as_millis());
    let announced: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::Attention { position, focus } => Some((*position, focus)),
            _ => None,
        })
        .collect();
    let tokens = events.iter().filter(|event| matches!(event, Event::Token { .. })).count();
    assert!(!announced.is_empty() && tokens > 100);
    assert!(announced.len() <= longest.expect("a short test") + 1, "{} in {tokens}", announced.len());
    let first_token = events.iter().position(|event| matches!(event, Event::Token { .. }));
    let first = events.iter().position(|event| matches!(event, Event::Attention { .. }));
    assert_eq!(first, first_token.map(|at| at + 1), "right after its token");
    for (position, focus) in announced {
        let total: f32 = focus.chunks.iter().map(|(_, share)| share).sum();
        assert!((total - 1.0).abs() < 1e-3, "the shares sum to {total}");
        assert_eq!(focus.tokens[0].chunk, "u0.0".parse::<ChunkId>().expect("a chunk id"));
        assert!(focus.tokens.iter().all(|token| token.position < position && token.chunk.turn.0 < 3));
    }
}

/// A chunk of the first turn is pruned and, when a later question needs it, resurrected at its own position.
#[test]
fn resurrect_restores_chunk_at_its_own_position() {
    let store = shared_store(InMemoryStore::default());
    let topics = ["cheese", "trains", "winter", "music", "bread", "ships"];
    let mut answers = vec![answer_attending_to(" Noted, a gun named Betsy.", "nothing")];
    answers.extend(
        topics.iter().map(|topic| answer_attending_to(&format!(" Much is known of {topic}."), topic)),
    );
    answers.push(answer_attending_to(" It is Betsy.", "Betsy"));
    let mut session = open_session(&store, test_rules(60), answers);
    send(&mut session, "The gun on the wall is called Betsy");
    let mut pruned = Vec::new();
    for topic in topics {
        let events = send(&mut session, &format!("Tell me something about {topic} now"));
        pruned.extend(pruned_chunks(&events));
        assert!(session.live_tokens() <= 60, "{} tokens", session.live_tokens());
        assert_same_as_stored(&session, &store);
    }
    assert!(pruned.contains(&"u0.0".to_owned()), "{pruned:?}");
    assert!(!session.context_window_text().contains("gun"), "{}", session.context_window_text());

    let (mut events, mut window_text) = (Vec::new(), String::new());
    let result = session.send_message("What is the gun called", TODAY, &mut |event| {
        if matches!(event, Event::Token { .. }) && window_text.is_empty() {
            // During generation the stored window is the window that the model sees.
            window_text = store
                .clone()
                .load("main", Access::Read)
                .expect("the conversation loads")
                .context_window(0)
                .text();
        }
        events.push(event);
        StepFlow::Continue
    });
    assert_eq!(result.map(|s| (s.finish, s.resurrected)), Ok((FinishReason::EndOfText, 2)));
    assert_eq!(
        resurrected_chunks(&events),
        ["a1.0", "u0.0"],
        "the answer is resurrected together with its question"
    );
    assert_eq!(answer_text(&events), " It is Betsy.");
    let offset_of =
        |text: &str| window_text.find(text).unwrap_or_else(|| panic!("{text} is not in {window_text}"));
    assert!(window_text.starts_with("The gun on the wall is called Betsy Noted"), "{window_text}");
    assert!(offset_of("Noted") < offset_of("What is the gun called"), "{window_text}");
    let reason = |event: &Event| match event {
        Event::Resurrected { reason, .. } => Some(reason.clone()),
        _ => None,
    };
    let reasons: Vec<String> = events.iter().filter_map(reason).collect();
    assert!(reasons[1].starts_with("found by search, hit 1 at"), "{reasons:?}");
    assert_same_as_stored(&session, &store);
}

/// A message is stored before its event is sent, and so is each answer token. After a crash the turn is marked as
/// interrupted.
#[test]
fn crash_keeps_announced_tokens_and_marks_turn_interrupted() {
    let store = shared_store(InMemoryStore::default());
    let mut session =
        open_session(&store, test_rules(0), vec![answer_attending_to(" one two three four five", "x")]);
    // A copy of the store after the third token is the store after a crash.
    let mut tokens = 0;
    let mut snapshot = None;
    let result = session.send_message("Count to five", TODAY, &mut |event| {
        tokens += usize::from(matches!(event, Event::Token { .. }));
        if tokens == 3 && snapshot.is_none() {
            snapshot = Some(store.0.lock().expect("the lock is not poisoned").clone());
        }
        StepFlow::Continue
    });
    assert_eq!(result.expect("the turn ends").finish, FinishReason::EndOfText);
    drop(session);
    let crashed_store = shared_store(snapshot.expect("three tokens were sent"));
    let mut session = open_session(&crashed_store, test_rules(0), Vec::new());
    assert_eq!(session.take_notices(), ["the answer of turn 1 was cut off when the program ended"]);
    assert_eq!(session.take_notices(), [""; 0], "the notice is given once");
    let text = session.context_window_text();
    assert!(
        text.contains("Count to five") && text.contains(" one two three") && !text.contains("four"),
        "{text}"
    );
    let record =
        crashed_store.clone().records("main", RecordKind::Turn).expect("the records are read").remove(0);
    assert_eq!((record.key.as_str(), record.value.as_str()), ("1", r#"{"finish":"interrupted"}"#));
    drop(session);
    assert_eq!(
        open_session(&crashed_store, test_rules(0), Vec::new()).take_notices(),
        [""; 0],
        "the next session gives no notice"
    );
    assert_eq!(
        open_session(&store, test_rules(0), Vec::new()).take_notices(),
        [""; 0],
        "the turn that ended was not interrupted"
    );
}

/// A stopped answer keeps its tokens, and the next turn continues after them.
#[test]
fn stop_keeps_partial_answer() {
    let store = shared_store(InMemoryStore::default());
    let answers = vec![answer_attending_to(" one two three four", "x"), answer_attending_to(" fine", "x")];
    let mut session = open_session(&store, test_rules(0), answers);
    let mut tokens = 0;
    let summary = session.send_message("Count", TODAY, &mut |event| {
        tokens += usize::from(matches!(event, Event::Token { .. }));
        if tokens == 2 { StepFlow::Stop } else { StepFlow::Continue }
    });
    assert_eq!(summary.map(|s| (s.finish, s.tokens)), Ok((FinishReason::Cancelled, 2)));
    assert_same_as_stored(&session, &store);
    assert_eq!(answer_text(&send(&mut session, "Enough")), " fine");
    assert!(session.context_window_text().contains(" one two"), "{}", session.context_window_text());
}

/// When the model fails, the tokens so far stay, the turn returns the error, and the conversation continues.
#[test]
fn model_failure_keeps_partial_answer() {
    let store = shared_store(InMemoryStore::default());
    let failing = ScriptedAnswer { fails_after: Some(2), ..answer_attending_to(" one two three", "x") };
    let mut session = open_session(&store, test_rules(0), vec![failing, answer_attending_to(" better", "x")]);
    let result = session.send_message("Count", TODAY, &mut |_| StepFlow::Continue);
    assert_eq!(result.map_err(|e| e.to_string()), Err("generating: the script breaks down here".into()));
    assert!(session.context_window_text().contains(" one two"), "{}", session.context_window_text());
    assert_same_as_stored(&session, &store);
    assert_eq!(answer_text(&send(&mut session, "Again")), " better");
}

/// When the model fails before its first token, no answer is stored, and the message can be answered later.
#[test]
fn model_failure_before_first_token_leaves_no_answer() {
    let store = shared_store(InMemoryStore::default());
    let failing = ScriptedAnswer { fails_after: Some(0), ..answer_attending_to(" one", "x") };
    let mut session = open_session(&store, test_rules(0), vec![failing, answer_attending_to(" better", "x")]);
    assert!(session.send_message("Count", TODAY, &mut |_| StepFlow::Continue).is_err());
    assert!(session.timeline().live_chunks().all(|chunk| chunk.id().to_string() == "u0.0"));
    session
        .regenerate(EditAuthor::User, TODAY, &mut |_| StepFlow::Continue)
        .expect("the message is answered");
    assert!(session.context_window_text().ends_with("Count better"), "{}", session.context_window_text());
    assert_same_as_stored(&session, &store);
}

/// After a store failure at any call, the session equals the store, and the next message succeeds once the store works.
#[test]
fn store_failure_leaves_session_equal_to_store() {
    for calls in 0..40 {
        let failing = shared_store(FailingStore::new(InMemoryStore::default(), usize::MAX));
        let answers = || {
            vec![
                answer_attending_to(" one two", "x"),
                answer_attending_to(" three", "x"),
                answer_attending_to(" four", "x"),
            ]
        };
        let mut session = open_session(&failing, test_rules(0), answers());
        send(&mut session, "First");
        failing.0.lock().expect("the lock is not poisoned").calls_left = calls;
        let result = session.send_message("Second", TODAY, &mut |_| StepFlow::Continue);
        failing.0.lock().expect("the lock is not poisoned").calls_left = usize::MAX;
        assert_same_as_stored(&session, &failing);
        if result.is_ok() {
            assert!(calls > 5, "a turn calls the store more than five times");
            return;
        }
        let result = session.send_message("Third", TODAY, &mut |_| StepFlow::Continue);
        assert!(result.is_ok(), "after {calls} calls: {result:?}");
        assert_same_as_stored(&session, &failing);
    }
    panic!("a turn calls the store more than forty times");
}

/// Regenerating replaces the answer. Retracting the last message deletes it and returns its text.
#[test]
fn regenerate_and_edit_replace_last_exchange() {
    let store = shared_store(InMemoryStore::default());
    let answers = vec![
        answer_attending_to(" red", "x"),
        answer_attending_to(" green", "x"),
        answer_attending_to(" blue", "x"),
    ];
    let mut session = open_session(&store, test_rules(0), answers);
    let result =
        session.regenerate(EditAuthor::User, TODAY, &mut |_| StepFlow::Continue).map_err(|e| e.to_string());
    assert_eq!(result, Err("regenerating the answer: there is no message to answer".into()));
    assert!(session.retract_last_message(EditAuthor::User).is_err());
    send(&mut session, "Which colour");
    session
        .regenerate(EditAuthor::User, TODAY, &mut |_| StepFlow::Continue)
        .expect("the answer is regenerated");
    let text = session.context_window_text();
    assert!(text.contains(" green") && !text.contains(" red"), "{text}");
    assert_eq!(session.retract_last_message(EditAuthor::User).as_deref(), Ok("Which colour"));
    assert!(!session.context_window_text().contains("colour"), "{}", session.context_window_text());
    send(&mut session, "Which colour is best");
    let text = session.context_window_text();
    assert!(text.contains("is best") && text.contains(" blue") && !text.contains(" green"), "{text}");
    assert_same_as_stored(&session, &store);
}

/// A message that exceeds the context is refused before it is stored, with a hint. A message that fits after pruning
/// prunes other chunks.
#[test]
fn context_length_exceeded_rejects_message_without_change() {
    let store = shared_store(InMemoryStore::default());
    let answers = vec![
        answer_attending_to(" yes", "x"),
        answer_attending_to(" no", "x"),
        answer_attending_to(" maybe", "x"),
    ];
    let model = Box::new(ScriptedModel::new(100, answers));
    let mut session =
        Session::open(Box::new(store.clone()), model, None, "main", test_rules(80), &mut |_, _| {})
            .unwrap_or_else(|error| panic!("the session does not open: {error}"));
    send(&mut session, &"word ".repeat(40));
    let before = session.timeline().state_hash();
    let result = session
        .send_message(&"more ".repeat(200), TODAY, &mut |_| StepFlow::Continue)
        .map_err(|e| e.to_string());
    let error = result.expect_err("the message is too long");
    assert!(error.starts_with("making room for the message: context length exceeded: 2"), "{error}");
    assert!(error.contains("do not fit in 100: 201 of the message"), "{error}");
    assert!(error.contains("raise model.context"), "{error}");
    assert_eq!(session.timeline().state_hash(), before);
    let events = send(&mut session, &"other ".repeat(40));
    assert_eq!(
        pruned_chunks(&events).first().map(String::as_str),
        Some("u0.0"),
        "the older message is pruned first"
    );
    assert!(session.send_message("  \n", TODAY, &mut |_| StepFlow::Continue).is_err());
    assert_same_as_stored(&session, &store);
}

/// The same messages give the same state, with or without a restart after each turn.
#[test]
fn reopen_between_turns_gives_same_state_hash() {
    let topics = ["cheese", "trains", "winter", "music", "bread", "ships", "cheese again", "trains again"];
    let answers = |from: usize| -> Vec<ScriptedAnswer> {
        topics[from..]
            .iter()
            .map(|topic| answer_attending_to(&format!(" Much is known of {topic}."), "known"))
            .collect()
    };
    let unbroken = shared_store(InMemoryStore::default());
    let mut session = open_session(&unbroken, test_rules(60), answers(0));
    topics.iter().for_each(|topic| drop(send(&mut session, &format!("Tell me about {topic}"))));
    let expected = session.timeline().state_hash();
    drop(session);
    let reopened = shared_store(InMemoryStore::default());
    for (n, topic) in topics.iter().enumerate() {
        let mut session = open_session(&reopened, test_rules(60), answers(n));
        send(&mut session, &format!("Tell me about {topic}"));
    }
    assert_eq!(open_session(&reopened, test_rules(60), Vec::new()).timeline().state_hash(), expected);
}

/// For another model the text is retokenized: text, brightness, chunks and pruned state stay.
#[test]
fn retokenize_keeps_text_brightness_and_pruned_chunks() {
    let store = shared_store(InMemoryStore::default());
    let topics = ["cheese", "trains", "winter", "music"];
    let answers = topics
        .iter()
        .map(|topic| answer_attending_to(&format!(" Much is known of {topic}."), topic))
        .collect();
    let mut session = open_session(&store, test_rules(60), answers);
    topics.iter().for_each(|topic| drop(send(&mut session, &format!("Tell me all of {topic}"))));
    let state = |session: &Session| -> Vec<(String, String, bool, Brightness)> {
        let mut timeline = session.timeline().clone();
        let all: Vec<ChunkId> = timeline.chunks().map(|chunk| chunk.id()).collect();
        store.clone().load_bodies("main", &mut timeline, &all).expect("the bodies load");
        timeline
            .chunks()
            .map(|c| (c.id().to_string(), c.text().into_owned(), c.is_live(), c.peak()))
            .collect()
    };
    let before = state(&session);
    drop(session);
    let open_with_other_model = |answers: Vec<ScriptedAnswer>| {
        let model =
            ScriptedModel::new(4096, answers).with_name("another").with_template(ChatTemplate::chatml());
        let (mut done, embedder) = (0, Some(Box::new(HashEmbedder) as _));
        let session = Session::open(
            Box::new(store.clone()),
            Box::new(model),
            embedder,
            "main",
            test_rules(60),
            &mut |n, total| {
                assert!(n <= total);
                done = n;
            },
        );
        (session.unwrap_or_else(|error| panic!("the session does not open: {error}")), done)
    };
    let (mut session, done) = open_with_other_model(vec![answer_attending_to(" Yes.", "x")]);
    assert_eq!(done, 8);
    assert_eq!(
        session.take_notices(),
        [
            "this conversation was written with scripted and was retokenized for another; brightness and pruned chunks \
             were carried over. The original is kept as 'main (scripted)'"
        ]
    );
    assert_eq!(state(&session), before);
    let window_text = session.context_window_text();
    assert!(
        window_text.contains("<|im_end|>\n<|im_start|>user\nTell me all of music<|im_end|>"),
        "{window_text}"
    );
    send(&mut session, "Is that so");
    drop(session);
    assert_eq!(
        open_with_other_model(Vec::new()).0.take_notices(),
        [""; 0],
        "the conversation has the tokens of this model now"
    );
    let names: Vec<String> = store
        .clone()
        .list_conversations()
        .expect("the conversations are listed")
        .into_iter()
        .map(|c| c.name)
        .collect();
    assert_eq!(names, ["main", "main (scripted)"]);
}

/// A tool call of the model is run and writes the notes; its result follows as tool tokens, and the answer continues.
#[test]
fn tool_call_writes_notes_and_result_follows_call() {
    let store = shared_store(InMemoryStore::default());
    let write = "<tool>jq '.context.name = \"Ada\"' notes.json > output</tool>";
    let answers = vec![
        answer_attending_to(write, "x"),
        answer_attending_to(" Noted.", "x"),
        answer_attending_to(" You said <tool>jq . notes.json</tool>", "x"),
    ];
    let mut rules = test_rules(0);
    rules.tools = Some(JqRunner::InProcess);
    rules.sampling.max_tokens = 40;
    let mut session = open_session(&store, rules.clone(), answers);
    assert!(session.context_window_text().contains("## Tool use"), "{}", session.context_window_text());
    let events = send(&mut session, "I am Ada. <tool>jq 'del(.context)' notes.json > output</tool>");
    let tool_results = |events: &[Event]| -> Vec<ToolCallResult> {
        events
            .iter()
            .filter_map(|e| if let Event::ToolCalled(result) = e { Some(result.clone()) } else { None })
            .collect()
    };
    let command = write.trim_start_matches("<tool>").trim_end_matches("</tool>").to_owned();
    assert_eq!(
        tool_results(&events),
        [ToolCallResult { command, ok: true, result: ".context.name = \"Ada\"".into() }]
    );
    let answer = answer_text(&events);
    assert!(
        answer.contains("⚙️【jq '.context.name = \"Ada\"' notes.json > output】→ ✓ .context.name = \"Ada\""),
        "{answer}"
    );
    assert!(answer.ends_with(" Noted."), "{answer}");
    let notes = store.clone().records("main", RecordKind::Note).expect("the notes are read").remove(0);
    assert!(
        notes.key == "notes.json" && notes.value.contains(r#""context":{"name":"Ada"}"#),
        "{}",
        notes.value
    );
    assert_same_as_stored(&session, &store);
    let chunk = session.timeline().chunks().last().expect("an answer").id();
    assert_eq!(chunk.to_string(), "a1.0", "a result stays with its call");
    drop(session);

    // The notes are in the system prompt of the next session, and a tool call in a user message is not run.
    let answers = vec![answer_attending_to(" Nothing to do.", "x")];
    let mut session = open_session(&store, rules, answers);
    assert!(
        session.context_window_text().contains(r#""context":{"name":"Ada"}"#),
        "{}",
        session.context_window_text()
    );
    assert_eq!(tool_results(&send(&mut session, "<tool>jq 'del(.context)' notes.json > output</tool>")), []);
}

/// Notes of an older or an imported conversation may be far too large: it is answered all the same, the preview says that it
/// is shortened, and the model can remove what is too much.
#[test]
fn oversized_notes_are_shortened_and_can_be_made_smaller() {
    let mut store = shared_store(InMemoryStore::default());
    let mut rules = test_rules(0);
    rules.tools = Some(JqRunner::InProcess);
    rules.sampling.max_tokens = 40;
    send(&mut open_session(&store, rules.clone(), vec![answer_attending_to(" Yes.", "x")]), "Hello");
    let keys: serde_json::Map<_, _> = (0..70_000).map(|n| (format!("key {n}"), n.into())).collect();
    let notes = serde_json::json!({ "context": keys, "topics": { "tea": "green" } }).to_string();
    assert!(notes.len() > 1_000_000);
    store.put_record("main", RecordKind::Note, "notes.json", Some(&notes)).expect("stored");
    let answers = vec![
        answer_attending_to(
            "<tool>patch notes.json [{\"op\":\"add\",\"path\":\"/a\",\"value\":1}]</tool>",
            "x",
        ),
        answer_attending_to("<tool>jq 'del(.context)' notes.json > output</tool>", "x"),
        answer_attending_to(" Tidied.", "x"),
        answer_attending_to(" Still here.", "x"),
    ];
    let mut session = open_session(&store, rules.clone(), answers);
    let prompt = session.context_window_text();
    assert!(prompt.contains("(shortened: jq shows the rest") && prompt.len() < 2000, "{prompt}");
    let events = send(&mut session, "What do you know?");
    let results: Vec<(bool, &str)> = (events.iter())
        .filter_map(|event| match event {
            Event::ToolCalled(result) => Some((result.ok, result.result.as_str())),
            _ => None,
        })
        .collect();
    assert_eq!(results, [(false, "the file would be larger than 256 KiB"), (true, ".context is gone")]);
    assert!(answer_text(&events).ends_with(" Tidied."));
    drop(session);
    let mut session = open_session(&store, rules, vec![answer_attending_to(" Still here.", "x")]);
    assert!(session.context_window_text().contains(r#"{"topics":{"tea":"green"}}"#));
    assert!(answer_text(&send(&mut session, "And now?")).ends_with(" Still here."));
}

/// All files together are bounded, and a file to which null is written is removed.
#[test]
fn note_files_are_bounded_together_and_can_be_removed() {
    let mut store = shared_store(InMemoryStore::default());
    send(&mut open_session(&store, test_rules(0), vec![answer_attending_to(" Yes.", "x")]), "Hello");
    let runner = JqRunner::InProcess;
    let mut run = |command: &str| {
        let result = run_command(command, &runner, 7, "main", &mut store).expect("the store works");
        (result.ok, result.result)
    };
    let big = format!("patch FILE [{{\"op\":\"add\",\"path\":\"\",\"value\":\"{}\"}}]", "x".repeat(250_000));
    for n in 0..4 {
        let (ok, text) = run(&big.replace("FILE", &format!("f{n}.json")));
        assert!(ok, "{text}");
    }
    let (ok, text) = run(&big.replace("FILE", "f4.json"));
    assert!(!ok && text.contains("all files together would be larger than 1024 KiB"), "{text}");
    assert_eq!(run("jq 'null' f0.json > output"), (true, "f0.json is removed".to_owned()));
    assert!(run(&big.replace("FILE", "f4.json")).0);
    let names: Vec<String> =
        store.records("main", RecordKind::Note).expect("read").into_iter().map(|r| r.key).collect();
    assert_eq!(names, ["f1.json", "f2.json", "f3.json", "f4.json"]);
}

/// The advice names the system prompt where that fills the context.
#[test]
fn oversized_system_prompt_is_named_in_the_error() {
    let store = shared_store(InMemoryStore::default());
    let mut rules = test_rules(0);
    rules.system_prompt = "word ".repeat(50_000);
    let mut session = open_session(&store, rules, vec![answer_attending_to(" Yes.", "x")]);
    let sent = session.send_message("Hello", TODAY, &mut |_| StepFlow::Continue);
    let error = sent.expect_err("it does not fit");
    assert_eq!(error.kind, ErrorKind::ContextLengthExceeded);
    let text = error.to_string();
    assert!(
        text.contains("of the system prompt") && text.contains("shorten the system prompt or raise"),
        "{text}"
    );
    session.set_system_prompt("Be brief.").expect("set");
    assert!(answer_text(&send(&mut session, "Hello")).ends_with(" Yes."));
}

/// A turn runs at most five tool calls. A repeated call ends the turn. The result of an invalid call is an error.
#[test]
fn tool_calls_are_limited_per_turn() {
    let mut rules = test_rules(0);
    rules.tools = Some(JqRunner::InProcess);
    rules.sampling.max_tokens = 40;
    let call =
        |n: usize| answer_attending_to(&format!("<tool>jq '.n = {n}' notes.json > output</tool>"), "x");
    let store = shared_store(InMemoryStore::default());
    let mut session = open_session(&store, rules.clone(), (0..9).map(call).collect());
    let tool_calls = |events: &[Event]| events.iter().filter(|e| matches!(e, Event::ToolCalled(_))).count();
    assert_eq!(tool_calls(&send(&mut session, "Count")), 5);
    let store = shared_store(InMemoryStore::default());
    let mut session = open_session(&store, rules.clone(), vec![call(1), call(1), call(2)]);
    assert_eq!(tool_calls(&send(&mut session, "Count")), 1);
    let store = shared_store(InMemoryStore::default());
    let hostile = ["def f: f; f", "..", "env", "\u{0}\u{1}", "<tool>", "{\"a\":[[[[[["];
    let answers = hostile
        .iter()
        .map(|filter| answer_attending_to(&format!("<tool>jq '{filter}' notes.json</tool>"), "x"));
    let mut session =
        open_session(&store, rules, answers.chain([answer_attending_to(" done", "x")]).collect());
    let events = send(&mut session, "Go on");
    let failed = events.iter().filter(|e| matches!(e, Event::ToolCalled(result) if !result.ok)).count();
    assert_eq!(failed, 5);
    let text = session.timeline().context_window(0).text();
    assert_eq!(text.matches("→ ❌ ").count(), 5, "{text}");
    assert_same_as_stored(&session, &store);
}

/// What returns with the mean brightness gets the mean of the other turns: the question has the brightness of a new message.
#[test]
fn resurrected_chunks_get_the_mean_of_the_other_turns() {
    let store = shared_store(InMemoryStore::default());
    let topics = ["cheese", "trains", "winter", "music", "bread"];
    let mut answers: Vec<_> =
        topics.iter().map(|t| answer_attending_to(&format!(" Much is known of {t}."), t)).collect();
    // Without attention, the brightness stays as it is.
    let attention = ScriptedAttention::Missing;
    answers.push(ScriptedAnswer { text: " Rails.".into(), attention, fails_after: None });
    let mut rules = test_rules(60);
    rules.resurrect_brightness = ResurrectBrightness::Mean;
    let mut session = open_session(&store, rules, answers);
    topics.iter().for_each(|topic| drop(send(&mut session, &format!("Tell me all of {topic}"))));
    let mean = session.timeline().context_window(0).mean_brightness(None).expect("there are live tokens");
    let events = send(&mut session, "What is known of trains");
    let resurrected = events.iter().find_map(|event| match event {
        Event::Resurrected { chunk, .. } => session.timeline().chunk(*chunk),
        _ => None,
    });
    let chunk = resurrected.expect("something is resurrected");
    assert!(chunk.brightness_runs().flatten().all(|brightness| *brightness == mean), "{mean:?}");
    assert!(mean.0 < 10_000.0, "{mean:?}");
}

/// The message is stored before the slow steps: the preview, which is generated in a fork, and the search.
#[test]
fn preview_and_recall_run_after_message_is_stored() {
    let store = shared_store(InMemoryStore::default());
    let topics = ["cheese", "trains", "winter", "music", "bread"];
    let mut answers: Vec<_> =
        topics.iter().map(|t| answer_attending_to(&format!(" Much is known of {t}."), t)).collect();
    // The preview names trains, so their chunk is resurrected although the message does not name them.
    answers.extend([answer_attending_to(" Something of trains.", "x"), answer_attending_to(" Rails.", "x")]);
    let mut rules = test_rules(60);
    let mut session = open_session(&store, rules.clone(), answers.drain(..5).collect());
    topics.iter().for_each(|topic| drop(send(&mut session, &format!("Tell me all of {topic}"))));
    drop(session);
    rules.preview_tokens = 4;
    let mut session = open_session(&store, rules, answers);
    let events = send(&mut session, "What runs on rails");
    let index_of = |is: fn(&Event) -> bool| events.iter().position(is).expect("the event is sent");
    let stored = index_of(|event| matches!(event, Event::MessageStored { .. }));
    let previewed =
        index_of(|event| matches!(event, Event::Previewed { text } if text == " Something of trains."));
    let resurrected = index_of(|event| matches!(event, Event::Resurrected { .. }));
    assert!(stored < previewed && previewed < resurrected, "{events:#?}");
    assert!(resurrected_chunks(&events).contains(&"a3.0".to_owned()), "{:?}", resurrected_chunks(&events));
    assert_eq!(answer_text(&events), " Rails.", "the preview is not part of the answer");
    assert_same_as_stored(&session, &store);
}

/// A branch shares the messages up to a turn. Both conversations continue independently.
#[test]
fn branch_shares_messages_up_to_a_turn() {
    let store = shared_store(InMemoryStore::default());
    let mut session = open_session(
        &store,
        test_rules(0),
        vec![
            answer_attending_to(" red", "x"),
            answer_attending_to(" green", "x"),
            answer_attending_to(" blue", "x"),
        ],
    );
    send(&mut session, "First");
    send(&mut session, "Second");
    assert_eq!(session.branch("side", Some(1)), Ok(2));
    let no_turn = session.branch("none", Some(9)).map_err(|error| error.to_string());
    assert_eq!(no_turn, Err("branching: there is no turn 9: the last one is 3".into()));
    assert!(session.branch("side", None).is_err_and(|error| error.to_string().contains("already")));
    send(&mut session, "Third");
    assert!(
        session.context_window_text().ends_with("First redSecond greenThird blue"),
        "{}",
        session.context_window_text()
    );
    assert_same_as_stored(&session, &store);
    drop(session);
    let model = Box::new(ScriptedModel::new(4096, vec![answer_attending_to(" grey", "x")]));
    let side = Session::open(Box::new(store), model, None, "side", test_rules(0), &mut |_, _| {});
    let mut side = side.unwrap_or_else(|error| panic!("the session does not open: {error}"));
    assert_eq!(side.take_notices(), [""; 0]);
    send(&mut side, "Elsewhere");
    assert!(
        side.context_window_text().ends_with("First redElsewhere grey"),
        "{}",
        side.context_window_text()
    );
}

/// The store fails at each of its calls: a branch is there with its link to the parent and without the parent's
/// responses, or it is not there.
#[test]
fn branch_is_stored_whole_or_not_at_all() {
    for fails_after_write in [false, true] {
        let (mut calls, mut absent) = (0, 0);
        loop {
            let mut failing = FailingStore::new(InMemoryStore::default(), usize::MAX);
            failing.fails_after_write = fails_after_write;
            let mut store = shared_store(failing);
            let answers = vec![answer_attending_to(" red", "x"), answer_attending_to(" green", "x")];
            let mut session = open_session(&store, test_rules(0), answers);
            send(&mut session, "First");
            send(&mut session, "Second");
            store.put_record("main", RecordKind::Response, "resp_1", Some("{}")).expect("it is written");
            let set_calls_left = |calls| store.0.lock().expect("the lock is not poisoned").calls_left = calls;
            set_calls_left(calls);
            let result = session.branch("side", Some(1));
            set_calls_left(usize::MAX);
            let is_there = store.find_conversation("side").expect("the store works").is_some();
            if is_there {
                let settings = store.records("side", RecordKind::Setting).expect("the store works");
                assert!(settings.iter().any(|record| record.key == "branch.parent"), "after {calls} calls");
                let responses = store.records("side", RecordKind::Response).expect("the store works");
                assert_eq!(responses, [], "after {calls} calls");
            }
            absent += usize::from(!is_there);
            if let Ok(shared) = result {
                assert_eq!((shared, is_there), (2, true));
                break;
            }
            calls += 1;
        }
        assert!(calls >= 3 && absent >= 2, "{calls} calls fail, {absent} without a branch");
    }
}

/// A question whose premise contradicts the conversation gives a `FalsePremise` event and still an answer.
#[test]
fn premise_check_reports_false_premise_and_still_answers() {
    let store = shared_store(InMemoryStore::default());
    let answers = vec![
        answer_attending_to(" Noted.", "nothing"),
        answer_attending_to(" Hm.", "nothing"),
        answer_attending_to(" It did not.", "server"),
        answer_attending_to(" Tea.", "tea"),
    ];
    let mut rules = test_rules(200);
    rules.premise_method = Some(halo_engine::premise::PremiseMethod::Rules);
    let mut session = open_session(&store, rules, answers);
    send(&mut session, "The server did not crash yesterday");
    send(&mut session, "I like tea");
    let events = send(&mut session, "Why did the server crash?");
    let reports: Vec<&Event> =
        events.iter().filter(|event| matches!(event, Event::FalsePremise { .. })).collect();
    let [Event::FalsePremise { premise, reason, principle, suggestion }] = reports[..] else {
        panic!("{events:?}")
    };
    assert_eq!(premise, "the server crash");
    assert_eq!(principle.map(halo_agents::principle::JudgePrinciple::name), Some("accuracy"));
    assert!(reason.contains("The server did not crash yesterday"), "{reason}");
    assert_eq!(suggestion, "Please verify the premise of your question.");
    assert_eq!(answer_text(&events), " It did not.");
    let mut store = store;
    let records = store.records("main", RecordKind::Turn).expect("the records are read");
    assert!(records.iter().any(|record| record.value.contains("the server crash")), "the report is stored");
    let events = send(&mut session, "Why do I like tea?");
    assert!(
        !events.iter().any(|event| matches!(event, Event::FalsePremise { .. })),
        "no message contradicts this premise"
    );
}
