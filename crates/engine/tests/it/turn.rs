//! Whole turns on the test doubles: what the model is shown, what is stored, and what is told.

use crate::common::test_rules;
use halo_core::brightness::ScoringStrategy;
use halo_core::model::{ChatTemplate, FinishReason, StepFlow};
use halo_core::store::{Access, RecordKind, Store};
use halo_core::testing::doubles::{
    FailingStore, HashEmbedder, InMemoryStore, ScriptedAnswer, ScriptedAttention, ScriptedModel,
};
use halo_core::testing::shared_store::SharedStore;
use halo_core::token::{Brightness, ChunkId};
use halo_core::ttl::TtlRules;
use halo_engine::event::Event;
use halo_engine::rules::ConversationRules;
use halo_engine::session::Session;
use halo_engine::tools::ToolCallResult;
use halo_engine::tools::jq::JqRunner;
use halo_engine::turn::EditAuthor;
use jiff::civil::Date;

fn shared_store<S: Store>(store: S) -> SharedStore<S> {
    SharedStore::new(store)
}

fn answer_attending_to(text: &str, word: &str) -> ScriptedAnswer {
    ScriptedAnswer { text: text.into(), attention: ScriptedAttention::OnWord(word.into()), fails_after: None }
}

fn open_session(
    store: &SharedStore<impl Store + Send + 'static>,
    rules: ConversationRules,
    answers: Vec<ScriptedAnswer>,
) -> Session {
    let model = Box::new(ScriptedModel::new(4096, answers));
    let session = Session::open(
        Box::new(store.clone()),
        model,
        Some(Box::new(HashEmbedder)),
        "main",
        rules,
        &mut |_, _| {},
    );
    session.unwrap_or_else(|why| panic!("it opens: {why}"))
}

const TODAY: Date = jiff::civil::date(2026, 11, 15);

fn send(session: &mut Session, message: &str) -> Vec<Event> {
    let mut events = Vec::new();
    let told = session.send_message(message, TODAY, &mut |event| {
        events.push(event);
        StepFlow::Continue
    });
    told.unwrap_or_else(|why| panic!("{message}: {why}"));
    events
}

fn answer_text(events: &[Event]) -> String {
    let text = |event: &Event| match event {
        Event::Token { text, .. } => Some(text.clone()),
        _ => None,
    };
    events.iter().filter_map(text).collect()
}

fn moved_chunks(events: &[Event], came: bool) -> Vec<String> {
    let chunk = |event: &Event| match event {
        Event::Resurrected { chunk, .. } if came => Some(chunk.to_string()),
        Event::Pruned { chunk, .. } if !came => Some(chunk.to_string()),
        _ => None,
    };
    events.iter().filter_map(chunk).collect()
}

/// Whether what is stored is what the session has: the same state, and every token that is live.
fn assert_same_as_stored(session: &Session, store: &SharedStore<impl Store>) {
    let stored = store.clone().load("main", Access::Read).expect("it loads");
    assert_eq!(stored.state_hash(), session.timeline().state_hash());
    assert_eq!(stored.context_window(0).text(), session.timeline().context_window(0).text());
}

/// In v0 the dimmest tokens leave while the answer is spoken, at most two for each that comes, and the model is shown its
/// window without them.
#[test]
fn ttl_strategy_prunes_tokens_during_generation() {
    let store = shared_store(InMemoryStore::default());
    let mut rules = test_rules(0);
    rules.context.strategy = ScoringStrategy::Ttl(TtlRules { target: 10, ..TtlRules::default() });
    // Each token is asked for by itself, and there would always be more to say.
    let words = ["one", "two", "three", "four", "five", "six", "seven", "eight"];
    let answers = words.iter().map(|word| answer_attending_to(&format!(" {word} and"), "Betsy")).collect();
    let mut session = open_session(&store, rules, answers);
    let events = send(&mut session, "The gun on the wall above the fireplace in the hall is called Betsy");
    assert_eq!(answer_text(&events), " one two three four five six seven eight");
    let first = events.iter().position(|e| matches!(e, Event::Pruned { .. })).expect("some leave");
    let last = events.iter().rposition(|e| matches!(e, Event::Token { .. })).expect("some come");
    assert!(first < last, "they leave while it speaks");
    assert!(events.iter().any(|e| matches!(e, Event::Pruned { reason, .. } if reason.contains("target 10"))));
    // What the model says is born dimmer than what the user says, and what is looked at stays.
    assert_eq!(
        session.context_window_text(),
        "Be brief. above the fireplace in the hall is called Betsy eight"
    );
    assert_same_as_stored(&session, &store);
}

/// Something said in the first turn leaves the window and comes back, to its own place, when it is asked for.
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
    let mut left = Vec::new();
    for topic in topics {
        let events = send(&mut session, &format!("Tell me something about {topic} now"));
        left.extend(moved_chunks(&events, false));
        assert!(session.live_tokens() <= 60, "{} tokens", session.live_tokens());
        assert_same_as_stored(&session, &store);
    }
    assert!(left.contains(&"u0.0".to_owned()), "{left:?}");
    assert!(!session.context_window_text().contains("gun"), "{}", session.context_window_text());

    let (mut events, mut shown) = (Vec::new(), String::new());
    let told = session.send_message("What is the gun called", TODAY, &mut |event| {
        if matches!(event, Event::Token { .. }) && shown.is_empty() {
            // What is stored while it speaks is what it was shown.
            shown = store.clone().load("main", Access::Read).expect("it loads").context_window(0).text();
        }
        events.push(event);
        StepFlow::Continue
    });
    assert_eq!(told.map(|s| (s.finish, s.resurrected)), Ok((FinishReason::EndOfText, 2)));
    assert_eq!(
        moved_chunks(&events, true),
        ["a1.0", "u0.0"],
        "the answer first, because it is brought along"
    );
    assert_eq!(answer_text(&events), " It is Betsy.");
    let at = |text: &str| shown.find(text).unwrap_or_else(|| panic!("{text} is not in {shown}"));
    assert!(shown.starts_with("The gun on the wall is called Betsy Noted"), "{shown}");
    assert!(at("Noted") < at("What is the gun called"), "{shown}");
    let why = |event: &Event| match event {
        Event::Resurrected { reason: why, .. } => Some(why.clone()),
        _ => None,
    };
    let why: Vec<String> = events.iter().filter_map(why).collect();
    assert!(why[1].starts_with("found by search, hit 1 at"), "{why:?}");
    assert_same_as_stored(&session, &store);
}

/// A message is safe before anybody is told of it, an answer token by token; after a crash the cut is known.
#[test]
fn crash_keeps_announced_tokens_and_marks_turn_interrupted() {
    let store = shared_store(InMemoryStore::default());
    let mut session =
        open_session(&store, test_rules(0), vec![answer_attending_to(" one two three four five", "x")]);
    let crash = |after: usize| {
        let mut seen = 0;
        move |event: &Event| {
            seen += usize::from(matches!(event, Event::Token { .. }));
            seen == after
        }
    };
    let mut at = crash(3);
    let mut snapshot = None;
    let told = session.send_message("Count to five", TODAY, &mut |event| {
        if at(&event) && snapshot.is_none() {
            snapshot = Some(store.0.lock().expect("one at a time").clone());
        }
        StepFlow::Continue
    });
    assert_eq!(told.expect("it ends").finish, FinishReason::EndOfText);
    drop(session);
    let cut = shared_store(snapshot.expect("three tokens were told"));
    let mut session = open_session(&cut, test_rules(0), Vec::new());
    assert_eq!(session.take_notices(), ["the answer of turn 1 was cut off when the program ended"]);
    assert_eq!(session.take_notices(), [""; 0], "told once");
    let text = session.context_window_text();
    assert!(
        text.contains("Count to five") && text.contains(" one two three") && !text.contains("four"),
        "{text}"
    );
    let record = cut.clone().records("main", RecordKind::Turn).expect("read").remove(0);
    assert_eq!((record.key.as_str(), record.value.as_str()), ("1", r#"{"finish":"interrupted"}"#));
    drop(session);
    assert_eq!(
        open_session(&cut, test_rules(0), Vec::new()).take_notices(),
        [""; 0],
        "it is not so any more"
    );
    assert_eq!(
        open_session(&store, test_rules(0), Vec::new()).take_notices(),
        [""; 0],
        "the one that ended was not cut"
    );
}

/// Stopping keeps what was said; the next turn goes on from it.
#[test]
fn stop_keeps_partial_answer() {
    let store = shared_store(InMemoryStore::default());
    let answers = vec![answer_attending_to(" one two three four", "x"), answer_attending_to(" fine", "x")];
    let mut session = open_session(&store, test_rules(0), answers);
    let mut heard = 0;
    let summary = session.send_message("Count", TODAY, &mut |event| {
        heard += usize::from(matches!(event, Event::Token { .. }));
        if heard == 2 { StepFlow::Stop } else { StepFlow::Continue }
    });
    assert_eq!(summary.map(|s| (s.finish, s.tokens)), Ok((FinishReason::Cancelled, 2)));
    assert_same_as_stored(&session, &store);
    assert_eq!(answer_text(&send(&mut session, "Enough")), " fine");
    assert!(session.context_window_text().contains(" one two"), "{}", session.context_window_text());
}

/// A model that breaks down loses nothing, and says why; the conversation goes on.
#[test]
fn model_failure_keeps_partial_answer() {
    let store = shared_store(InMemoryStore::default());
    let broken = ScriptedAnswer { fails_after: Some(2), ..answer_attending_to(" one two three", "x") };
    let mut session = open_session(&store, test_rules(0), vec![broken, answer_attending_to(" better", "x")]);
    let failed = session.send_message("Count", TODAY, &mut |_| StepFlow::Continue);
    assert_eq!(failed.map_err(|e| e.to_string()), Err("generating: the script breaks down here".into()));
    assert!(session.context_window_text().contains(" one two"), "{}", session.context_window_text());
    assert_same_as_stored(&session, &store);
    assert_eq!(answer_text(&send(&mut session, "Again")), " better");
}

/// An answer that ended before its first word is none: the message waits, and can be answered.
#[test]
fn model_failure_before_first_token_leaves_no_answer() {
    let store = shared_store(InMemoryStore::default());
    let broken = ScriptedAnswer { fails_after: Some(0), ..answer_attending_to(" one", "x") };
    let mut session = open_session(&store, test_rules(0), vec![broken, answer_attending_to(" better", "x")]);
    assert!(session.send_message("Count", TODAY, &mut |_| StepFlow::Continue).is_err());
    assert!(session.timeline().live_chunks().all(|chunk| chunk.id().to_string() == "u0.0"));
    session.regenerate(EditAuthor::User, TODAY, &mut |_| StepFlow::Continue).expect("it is answered");
    assert!(session.context_window_text().ends_with("Count better"), "{}", session.context_window_text());
    assert_same_as_stored(&session, &store);
}

/// Wherever the store fails, the session has what is stored, and saying it again works once the store does.
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
        failing.0.lock().expect("one at a time").calls_left = calls;
        let told = session.send_message("Second", TODAY, &mut |_| StepFlow::Continue);
        failing.0.lock().expect("one at a time").calls_left = usize::MAX;
        assert_same_as_stored(&session, &failing);
        if told.is_ok() {
            assert!(calls > 5, "it needs the store");
            return;
        }
        let told = session.send_message("Third", TODAY, &mut |_| StepFlow::Continue);
        assert!(told.is_ok(), "after {calls} calls: {told:?}");
        assert_same_as_stored(&session, &failing);
    }
    panic!("a turn needs more than forty calls of the store");
}

/// Answering again takes the answer back; taking the message back returns its words.
#[test]
fn regenerate_and_edit_replace_last_exchange() {
    let store = shared_store(InMemoryStore::default());
    let answers = vec![
        answer_attending_to(" red", "x"),
        answer_attending_to(" green", "x"),
        answer_attending_to(" blue", "x"),
    ];
    let mut session = open_session(&store, test_rules(0), answers);
    let nothing =
        session.regenerate(EditAuthor::User, TODAY, &mut |_| StepFlow::Continue).map_err(|e| e.to_string());
    assert_eq!(nothing, Err("regenerating the answer: there is no message to answer".into()));
    assert!(session.retract_last_message(EditAuthor::User).is_err());
    send(&mut session, "Which colour");
    session.regenerate(EditAuthor::User, TODAY, &mut |_| StepFlow::Continue).expect("another answer");
    let text = session.context_window_text();
    assert!(text.contains(" green") && !text.contains(" red"), "{text}");
    assert_eq!(session.retract_last_message(EditAuthor::User).as_deref(), Ok("Which colour"));
    assert!(!session.context_window_text().contains("colour"), "{}", session.context_window_text());
    send(&mut session, "Which colour is best");
    let text = session.context_window_text();
    assert!(text.contains("is best") && text.contains(" blue") && !text.contains(" green"), "{text}");
    assert_same_as_stored(&session, &store);
}

/// What does not fit is refused before it is stored, and says what to do; what fits when others leave, makes them.
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
            .unwrap_or_else(|e| panic!("{e}"));
    send(&mut session, &"word ".repeat(40));
    let before = session.timeline().state_hash();
    let told = session
        .send_message(&"more ".repeat(200), TODAY, &mut |_| StepFlow::Continue)
        .map_err(|e| e.to_string());
    let why = told.expect_err("it is too long");
    assert!(why.starts_with("making room for the message: context length exceeded: 2"), "{why}");
    assert!(why.contains("do not fit in 100: 201 of the message"), "{why}");
    assert!(why.contains("raise model.context"), "{why}");
    assert_eq!(session.timeline().state_hash(), before);
    let events = send(&mut session, &"other ".repeat(40));
    assert_eq!(moved_chunks(&events, false).first().map(String::as_str), Some("u0.0"), "room was made first");
    assert!(session.send_message("  \n", TODAY, &mut |_| StepFlow::Continue).is_err());
    assert_same_as_stored(&session, &store);
}

/// The same words give the same conversation, whether the program was closed in between or not.
#[test]
fn reopen_between_turns_gives_same_state_hash() {
    let topics = ["cheese", "trains", "winter", "music", "bread", "ships", "cheese again", "trains again"];
    let answers = |from: usize| -> Vec<ScriptedAnswer> {
        topics[from..]
            .iter()
            .map(|topic| answer_attending_to(&format!(" Much is known of {topic}."), "known"))
            .collect()
    };
    let through = shared_store(InMemoryStore::default());
    let mut session = open_session(&through, test_rules(60), answers(0));
    topics.iter().for_each(|topic| drop(send(&mut session, &format!("Tell me about {topic}"))));
    let whole = session.timeline().state_hash();
    drop(session);
    let parts = shared_store(InMemoryStore::default());
    for (n, topic) in topics.iter().enumerate() {
        let mut session = open_session(&parts, test_rules(60), answers(n));
        send(&mut session, &format!("Tell me about {topic}"));
    }
    assert_eq!(open_session(&parts, test_rules(60), Vec::new()).timeline().state_hash(), whole);
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
        store.clone().load_bodies("main", &mut timeline, &all).expect("they are there");
        timeline
            .chunks()
            .map(|c| (c.id().to_string(), c.text().into_owned(), c.is_live(), c.peak()))
            .collect()
    };
    let before = state(&session);
    drop(session);
    let another = |answers: Vec<ScriptedAnswer>| {
        let model =
            ScriptedModel::new(4096, answers).with_name("another").with_template(ChatTemplate::chatml());
        let (mut done, embedder) = (0, Some(Box::new(HashEmbedder) as _));
        let session = Session::open(
            Box::new(store.clone()),
            Box::new(model),
            embedder,
            "main",
            test_rules(60),
            &mut |n, of| {
                assert!(n <= of);
                done = n;
            },
        );
        (session.unwrap_or_else(|why| panic!("it opens: {why}")), done)
    };
    let (mut session, done) = another(vec![answer_attending_to(" Yes.", "x")]);
    assert_eq!(done, 8);
    assert_eq!(
        session.take_notices(),
        [
            "this conversation was written with scripted and was retokenized for another; brightness and pruned chunks \
             were carried over. The original is kept as 'main (scripted)'"
        ]
    );
    assert_eq!(state(&session), before);
    let shown = session.context_window_text();
    assert!(shown.contains("<|im_end|>\n<|im_start|>user\nTell me all of music<|im_end|>"), "{shown}");
    send(&mut session, "Is that so");
    drop(session);
    assert_eq!(another(Vec::new()).0.take_notices(), [""; 0], "it is of this model's tokens now");
    let names: Vec<String> =
        store.clone().list_conversations().expect("read").into_iter().map(|c| c.name).collect();
    assert_eq!(names, ["main", "main (scripted)"]);
}

/// The model keeps notes: its call is run, the result follows as tokens of the tool's, and it goes on.
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
    let done = |events: &[Event]| -> Vec<ToolCallResult> {
        events
            .iter()
            .filter_map(|e| if let Event::ToolCalled(done) = e { Some(done.clone()) } else { None })
            .collect()
    };
    let command = write.trim_start_matches("<tool>").trim_end_matches("</tool>").to_owned();
    assert_eq!(
        done(&events),
        [ToolCallResult { command, ok: true, result: ".context.name = \"Ada\"".into() }]
    );
    let told = answer_text(&events);
    assert!(
        told.contains("⚙️【jq '.context.name = \"Ada\"' notes.json > output】→ ✓ .context.name = \"Ada\""),
        "{told}"
    );
    assert!(told.ends_with(" Noted."), "{told}");
    let notes = store.clone().records("main", RecordKind::Note).expect("read").remove(0);
    assert!(
        notes.key == "notes.json" && notes.value.contains(r#""context":{"name":"Ada"}"#),
        "{}",
        notes.value
    );
    assert_same_as_stored(&session, &store);
    let chunk = session.timeline().chunks().last().expect("an answer").id();
    assert_eq!(chunk.to_string(), "a1.0", "a result stays with its call");
    drop(session);

    // What was noted is in the instructions of the next day, and what the user writes calls nothing.
    let answers = vec![answer_attending_to(" Nothing to do.", "x")];
    let mut session = open_session(&store, rules, answers);
    assert!(
        session.context_window_text().contains(r#""context":{"name":"Ada"}"#),
        "{}",
        session.context_window_text()
    );
    assert_eq!(done(&send(&mut session, "<tool>jq 'del(.context)' notes.json > output</tool>")), []);
}

/// Calls that go on for ever end after five; the same call twice ends the turn; what is wrong is told to the model.
#[test]
fn tool_calls_are_limited_per_turn() {
    let mut rules = test_rules(0);
    rules.tools = Some(JqRunner::InProcess);
    rules.sampling.max_tokens = 40;
    let call =
        |n: usize| answer_attending_to(&format!("<tool>jq '.n = {n}' notes.json > output</tool>"), "x");
    let store = shared_store(InMemoryStore::default());
    let mut session = open_session(&store, rules.clone(), (0..9).map(call).collect());
    let tools = |events: &[Event]| events.iter().filter(|e| matches!(e, Event::ToolCalled(_))).count();
    assert_eq!(tools(&send(&mut session, "Count")), 5);
    let store = shared_store(InMemoryStore::default());
    let mut session = open_session(&store, rules.clone(), vec![call(1), call(1), call(2)]);
    assert_eq!(tools(&send(&mut session, "Count")), 1);
    let store = shared_store(InMemoryStore::default());
    let hostile = ["def f: f; f", "..", "env", "\u{0}\u{1}", "<tool>", "{\"a\":[[[[[["];
    let answers = hostile
        .iter()
        .map(|filter| answer_attending_to(&format!("<tool>jq '{filter}' notes.json</tool>"), "x"));
    let mut session =
        open_session(&store, rules, answers.chain([answer_attending_to(" done", "x")]).collect());
    let events = send(&mut session, "Go on");
    let wrong = events.iter().filter(|e| matches!(e, Event::ToolCalled(done) if !done.ok)).count();
    assert_eq!(wrong, 5);
    assert_same_as_stored(&session, &store);
}

/// A message is stored before anything that takes time: before the model begins, in a fork, to answer, and before search.
#[test]
fn preview_and_recall_run_after_message_is_stored() {
    let store = shared_store(InMemoryStore::default());
    let topics = ["cheese", "trains", "winter", "music", "bread"];
    let mut answers: Vec<_> =
        topics.iter().map(|t| answer_attending_to(&format!(" Much is known of {t}."), t)).collect();
    // What it would say of trains brings them back, though the message does not name them.
    answers.extend([answer_attending_to(" Something of trains.", "x"), answer_attending_to(" Rails.", "x")]);
    let mut rules = test_rules(60);
    let mut session = open_session(&store, rules.clone(), answers.drain(..5).collect());
    topics.iter().for_each(|topic| drop(send(&mut session, &format!("Tell me all of {topic}"))));
    drop(session);
    rules.preview_tokens = 4;
    let mut session = open_session(&store, rules, answers);
    let events = send(&mut session, "What runs on rails");
    let at = |is: fn(&Event) -> bool| events.iter().position(is).expect("it happens");
    let said = at(|event| matches!(event, Event::MessageStored { .. }));
    let previewed = at(|event| matches!(event, Event::Previewed { text } if text == " Something of trains."));
    let returned = at(|event| matches!(event, Event::Resurrected { .. }));
    assert!(said < previewed && previewed < returned, "{events:#?}");
    assert!(moved_chunks(&events, true).contains(&"a3.0".to_owned()), "{:?}", moved_chunks(&events, true));
    assert_eq!(answer_text(&events), " Rails.", "nobody is told what was only begun");
    assert_same_as_stored(&session, &store);
}

/// A branch shares the past up to a turn; both go on, and neither knows of the other.
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
    let none = session.branch("none", Some(9)).map_err(|why| why.to_string());
    assert_eq!(none, Err("branching: there is no turn 9: the last one is 3".into()));
    assert!(session.branch("side", None).is_err_and(|why| why.to_string().contains("already")));
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
    let mut side = side.unwrap_or_else(|why| panic!("it opens: {why}"));
    assert_eq!(side.take_notices(), [""; 0]);
    send(&mut side, "Elsewhere");
    assert!(
        side.context_window_text().ends_with("First redElsewhere grey"),
        "{}",
        side.context_window_text()
    );
}

/// A question with a premise that the conversation contradicts: the user is told why, and gets an answer.
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
    let told: Vec<&Event> =
        events.iter().filter(|event| matches!(event, Event::FalsePremise { .. })).collect();
    let [Event::FalsePremise { premise, reason, suggestion }] = told[..] else { panic!("{events:?}") };
    assert_eq!(premise, "the server crash");
    assert!(reason.contains("The server did not crash yesterday"), "{reason}");
    assert_eq!(suggestion, "Please verify the premise of your question.");
    assert_eq!(answer_text(&events), " It did not.");
    let mut kept = store;
    let record = kept.records("main", RecordKind::Turn).expect("they are kept");
    assert!(record.iter().any(|record| record.value.contains("the server crash")), "it is on the record");
    let events = send(&mut session, "Why do I like tea?");
    assert!(
        !events.iter().any(|event| matches!(event, Event::FalsePremise { .. })),
        "nothing speaks against that"
    );
}
