//! Whole turns on the test doubles: what the model is shown, what is stored, and what is told.

mod common;

use common::rules;
use halo_core::brightness::Strategy;
use halo_core::seams::{Access, Finish, Flow, Kind, Store, Template};
use halo_core::testing::doubles::{
    Attention, FailingStore, HashEmbedder, MemoryStore, ScriptedAnswer, ScriptedModel,
};
use halo_core::testing::shared::Shared;
use halo_core::token::{Brightness, ChunkId};
use halo_core::ttl::Ttl;
use halo_engine::event::Event;
use halo_engine::rules::Rules;
use halo_engine::session::Session;
use halo_engine::tools::Done;
use halo_engine::tools::jq::Runner;
use halo_engine::turn::AskedBy;
use jiff::civil::Date;

fn shared<S: Store>(store: S) -> Shared<S> {
    Shared::new(store)
}

fn on(text: &str, word: &str) -> ScriptedAnswer {
    ScriptedAnswer { text: text.into(), attention: Attention::On(word.into()), fails_after: None }
}

fn open(store: &Shared<impl Store + Send + 'static>, rules: Rules, answers: Vec<ScriptedAnswer>) -> Session {
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

fn say(session: &mut Session, message: &str) -> Vec<Event> {
    let mut events = Vec::new();
    let told = session.say(message, TODAY, &mut |event| {
        events.push(event);
        Flow::Continue
    });
    told.unwrap_or_else(|why| panic!("{message}: {why}"));
    events
}

fn answer(events: &[Event]) -> String {
    let text = |event: &Event| match event {
        Event::Token { text, .. } => Some(text.clone()),
        _ => None,
    };
    events.iter().filter_map(text).collect()
}

fn chunks(events: &[Event], came: bool) -> Vec<String> {
    let chunk = |event: &Event| match event {
        Event::Returned { chunk, .. } if came => Some(chunk.to_string()),
        Event::Left { chunk, .. } if !came => Some(chunk.to_string()),
        _ => None,
    };
    events.iter().filter_map(chunk).collect()
}

/// Whether what is stored is what the session has: the same state, and every token that is live.
fn same_as_stored(session: &Session, store: &Shared<impl Store>) {
    let stored = store.clone().load("main", Access::Read).expect("it loads");
    assert_eq!(stored.state_hash(), session.timeline().state_hash());
    assert_eq!(stored.view(0).text(), session.timeline().view(0).text());
}

/// In v0 the dimmest tokens leave while the answer is spoken, at most two for each that comes, and the model is shown its
/// window without them.
#[test]
fn in_v0_tokens_leave_while_others_come() {
    let store = shared(MemoryStore::default());
    let mut rules = rules(0);
    rules.context.strategy = Strategy::Ttl(Ttl { target: 10, ..Ttl::default() });
    // Each token is asked for by itself, and there would always be more to say.
    let words = ["one", "two", "three", "four", "five", "six", "seven", "eight"];
    let answers = words.iter().map(|word| on(&format!(" {word} and"), "Betsy")).collect();
    let mut session = open(&store, rules, answers);
    let events = say(&mut session, "The gun on the wall above the fireplace in the hall is called Betsy");
    assert_eq!(answer(&events), " one two three four five six seven eight");
    let first = events.iter().position(|e| matches!(e, Event::Left { .. })).expect("some leave");
    let last = events.iter().rposition(|e| matches!(e, Event::Token { .. })).expect("some come");
    assert!(first < last, "they leave while it speaks");
    assert!(events.iter().any(|e| matches!(e, Event::Left { why, .. } if why.contains("target 10"))));
    // What the model says is born dimmer than what the user says, and what is looked at stays.
    assert_eq!(session.window_text(), "Be brief. above the fireplace in the hall is called Betsy eight");
    same_as_stored(&session, &store);
}

/// Something said in the first turn leaves the window and comes back, to its own place, when it is asked for.
#[test]
fn what_was_said_first_returns_to_its_own_place() {
    let store = shared(MemoryStore::default());
    let topics = ["cheese", "trains", "winter", "music", "bread", "ships"];
    let mut answers = vec![on(" Noted, a gun named Betsy.", "nothing")];
    answers.extend(topics.iter().map(|topic| on(&format!(" Much is known of {topic}."), topic)));
    answers.push(on(" It is Betsy.", "Betsy"));
    let mut session = open(&store, rules(60), answers);
    say(&mut session, "The gun on the wall is called Betsy");
    let mut left = Vec::new();
    for topic in topics {
        let events = say(&mut session, &format!("Tell me something about {topic} now"));
        left.extend(chunks(&events, false));
        assert!(session.live() <= 60, "{} tokens", session.live());
        same_as_stored(&session, &store);
    }
    assert!(left.contains(&"u0.0".to_owned()), "{left:?}");
    assert!(!session.window_text().contains("gun"), "{}", session.window_text());

    let (mut events, mut shown) = (Vec::new(), String::new());
    let told = session.say("What is the gun called", TODAY, &mut |event| {
        if matches!(event, Event::Token { .. }) && shown.is_empty() {
            // What is stored while it speaks is what it was shown.
            shown = store.clone().load("main", Access::Read).expect("it loads").view(0).text();
        }
        events.push(event);
        Flow::Continue
    });
    assert_eq!(told.map(|s| (s.finish, s.returned)), Ok((Finish::End, 2)));
    assert_eq!(chunks(&events, true), ["a1.0", "u0.0"], "the answer first, because it is brought along");
    assert_eq!(answer(&events), " It is Betsy.");
    let at = |text: &str| shown.find(text).unwrap_or_else(|| panic!("{text} is not in {shown}"));
    assert!(shown.starts_with("The gun on the wall is called Betsy Noted"), "{shown}");
    assert!(at("Noted") < at("What is the gun called"), "{shown}");
    let why = |event: &Event| match event {
        Event::Returned { why, .. } => Some(why.clone()),
        _ => None,
    };
    let why: Vec<String> = events.iter().filter_map(why).collect();
    assert!(why[1].starts_with("found by search, hit 1 at"), "{why:?}");
    same_as_stored(&session, &store);
}

/// A message is safe before anybody is told of it, an answer token by token; after a crash the cut is known.
#[test]
fn what_was_told_is_there_after_a_crash() {
    let store = shared(MemoryStore::default());
    let mut session = open(&store, rules(0), vec![on(" one two three four five", "x")]);
    let crash = |after: usize| {
        let mut seen = 0;
        move |event: &Event| {
            seen += usize::from(matches!(event, Event::Token { .. }));
            seen == after
        }
    };
    let mut at = crash(3);
    let mut snapshot = None;
    let told = session.say("Count to five", TODAY, &mut |event| {
        if at(&event) && snapshot.is_none() {
            snapshot = Some(store.0.lock().expect("one at a time").clone());
        }
        Flow::Continue
    });
    assert_eq!(told.expect("it ends").finish, Finish::End);
    drop(session);
    let cut = shared(snapshot.expect("three tokens were told"));
    let mut session = open(&cut, rules(0), Vec::new());
    assert_eq!(session.notices(), ["the answer of turn 1 was cut off when the program ended"]);
    assert_eq!(session.notices(), [""; 0], "told once");
    let text = session.window_text();
    assert!(
        text.contains("Count to five") && text.contains(" one two three") && !text.contains("four"),
        "{text}"
    );
    let record = cut.clone().records("main", Kind::Turn).expect("read").remove(0);
    assert_eq!((record.key.as_str(), record.value.as_str()), ("1", r#"{"finish":"interrupted"}"#));
    drop(session);
    assert_eq!(open(&cut, rules(0), Vec::new()).notices(), [""; 0], "it is not so any more");
    assert_eq!(open(&store, rules(0), Vec::new()).notices(), [""; 0], "the one that ended was not cut");
}

/// Stopping keeps what was said; the next turn goes on from it.
#[test]
fn an_answer_that_is_stopped_stays() {
    let store = shared(MemoryStore::default());
    let answers = vec![on(" one two three four", "x"), on(" fine", "x")];
    let mut session = open(&store, rules(0), answers);
    let mut heard = 0;
    let summary = session.say("Count", TODAY, &mut |event| {
        heard += usize::from(matches!(event, Event::Token { .. }));
        if heard == 2 { Flow::Stop } else { Flow::Continue }
    });
    assert_eq!(summary.map(|s| (s.finish, s.tokens)), Ok((Finish::Aborted, 2)));
    same_as_stored(&session, &store);
    assert_eq!(answer(&say(&mut session, "Enough")), " fine");
    assert!(session.window_text().contains(" one two"), "{}", session.window_text());
}

/// A model that breaks down loses nothing, and says why; the conversation goes on.
#[test]
fn a_model_that_fails_loses_nothing() {
    let store = shared(MemoryStore::default());
    let broken = ScriptedAnswer { fails_after: Some(2), ..on(" one two three", "x") };
    let mut session = open(&store, rules(0), vec![broken, on(" better", "x")]);
    let failed = session.say("Count", TODAY, &mut |_| Flow::Continue);
    assert_eq!(failed.map_err(|e| e.to_string()), Err("generating: the script breaks down here".into()));
    assert!(session.window_text().contains(" one two"), "{}", session.window_text());
    same_as_stored(&session, &store);
    assert_eq!(answer(&say(&mut session, "Again")), " better");
}

/// An answer that ended before its first word is none: the message waits, and can be answered.
#[test]
fn an_answer_without_a_word_is_none() {
    let store = shared(MemoryStore::default());
    let broken = ScriptedAnswer { fails_after: Some(0), ..on(" one", "x") };
    let mut session = open(&store, rules(0), vec![broken, on(" better", "x")]);
    assert!(session.say("Count", TODAY, &mut |_| Flow::Continue).is_err());
    assert!(session.timeline().live_chunks().all(|chunk| chunk.id().to_string() == "u0.0"));
    session.say_again(AskedBy::User, TODAY, &mut |_| Flow::Continue).expect("it is answered");
    assert!(session.window_text().ends_with("Count better"), "{}", session.window_text());
    same_as_stored(&session, &store);
}

/// Wherever the store fails, the session has what is stored, and saying it again works once the store does.
#[test]
fn a_store_that_fails_leaves_nothing_half_done() {
    for calls in 0..40 {
        let failing = shared(FailingStore::new(MemoryStore::default(), usize::MAX));
        let answers = || vec![on(" one two", "x"), on(" three", "x"), on(" four", "x")];
        let mut session = open(&failing, rules(0), answers());
        say(&mut session, "First");
        failing.0.lock().expect("one at a time").calls_left = calls;
        let told = session.say("Second", TODAY, &mut |_| Flow::Continue);
        failing.0.lock().expect("one at a time").calls_left = usize::MAX;
        same_as_stored(&session, &failing);
        if told.is_ok() {
            assert!(calls > 5, "it needs the store");
            return;
        }
        let told = session.say("Third", TODAY, &mut |_| Flow::Continue);
        assert!(told.is_ok(), "after {calls} calls: {told:?}");
        same_as_stored(&session, &failing);
    }
    panic!("a turn needs more than forty calls of the store");
}

/// Answering again takes the answer back; taking the message back returns its words.
#[test]
fn a_message_can_be_answered_again_and_said_in_other_words() {
    let store = shared(MemoryStore::default());
    let answers = vec![on(" red", "x"), on(" green", "x"), on(" blue", "x")];
    let mut session = open(&store, rules(0), answers);
    let nothing = session.say_again(AskedBy::User, TODAY, &mut |_| Flow::Continue).map_err(|e| e.to_string());
    assert_eq!(nothing, Err("answering again: there is no message to answer".into()));
    assert!(session.unsay(AskedBy::User).is_err());
    say(&mut session, "Which colour");
    session.say_again(AskedBy::User, TODAY, &mut |_| Flow::Continue).expect("another answer");
    let text = session.window_text();
    assert!(text.contains(" green") && !text.contains(" red"), "{text}");
    assert_eq!(session.unsay(AskedBy::User).as_deref(), Ok("Which colour"));
    assert!(!session.window_text().contains("colour"), "{}", session.window_text());
    say(&mut session, "Which colour is best");
    let text = session.window_text();
    assert!(text.contains("is best") && text.contains(" blue") && !text.contains(" green"), "{text}");
    same_as_stored(&session, &store);
}

/// What does not fit is refused before it is stored, and says what to do; what fits when others leave, makes them.
#[test]
fn a_message_that_does_not_fit_is_refused_and_nothing_is_lost() {
    let store = shared(MemoryStore::default());
    let answers = vec![on(" yes", "x"), on(" no", "x"), on(" maybe", "x")];
    let model = Box::new(ScriptedModel::new(100, answers));
    let mut session = Session::open(Box::new(store.clone()), model, None, "main", rules(80), &mut |_, _| {})
        .unwrap_or_else(|e| panic!("{e}"));
    say(&mut session, &"word ".repeat(40));
    let before = session.timeline().state_hash();
    let told = session.say(&"more ".repeat(200), TODAY, &mut |_| Flow::Continue).map_err(|e| e.to_string());
    let why = told.expect_err("it is too long");
    assert!(why.starts_with("making room for the message: the model sees 100 tokens, and 20"), "{why}");
    assert!(why.contains("set model.context higher"), "{why}");
    assert_eq!(session.timeline().state_hash(), before);
    let events = say(&mut session, &"other ".repeat(40));
    assert_eq!(chunks(&events, false).first().map(String::as_str), Some("u0.0"), "room was made first");
    assert!(session.say("  \n", TODAY, &mut |_| Flow::Continue).is_err());
    same_as_stored(&session, &store);
}

/// The same words give the same conversation, whether the program was closed in between or not.
#[test]
fn a_restart_changes_nothing() {
    let topics = ["cheese", "trains", "winter", "music", "bread", "ships", "cheese again", "trains again"];
    let answers = |from: usize| -> Vec<ScriptedAnswer> {
        topics[from..].iter().map(|topic| on(&format!(" Much is known of {topic}."), "known")).collect()
    };
    let through = shared(MemoryStore::default());
    let mut session = open(&through, rules(60), answers(0));
    topics.iter().for_each(|topic| drop(say(&mut session, &format!("Tell me about {topic}"))));
    let whole = session.timeline().state_hash();
    drop(session);
    let parts = shared(MemoryStore::default());
    for (n, topic) in topics.iter().enumerate() {
        let mut session = open(&parts, rules(60), answers(n));
        say(&mut session, &format!("Tell me about {topic}"));
    }
    assert_eq!(open(&parts, rules(60), Vec::new()).timeline().state_hash(), whole);
}

/// Another model reads the text anew: the words stay, and with them their light, their chunks, and what has left.
#[test]
fn another_model_reads_it_anew() {
    let store = shared(MemoryStore::default());
    let topics = ["cheese", "trains", "winter", "music"];
    let answers = topics.iter().map(|topic| on(&format!(" Much is known of {topic}."), topic)).collect();
    let mut session = open(&store, rules(60), answers);
    topics.iter().for_each(|topic| drop(say(&mut session, &format!("Tell me all of {topic}"))));
    let state = |session: &Session| -> Vec<(String, String, bool, Brightness)> {
        let mut timeline = session.timeline().clone();
        let all: Vec<ChunkId> = timeline.chunks().map(|chunk| chunk.id()).collect();
        store.clone().bring("main", &mut timeline, &all).expect("they are there");
        timeline
            .chunks()
            .map(|c| (c.id().to_string(), c.text().into_owned(), c.is_live(), c.peak()))
            .collect()
    };
    let before = state(&session);
    drop(session);
    let another = |answers: Vec<ScriptedAnswer>| {
        let model = ScriptedModel::new(4096, answers).called("another").with_template(Template::chatml());
        let (mut done, embedder) = (0, Some(Box::new(HashEmbedder) as _));
        let session = Session::open(
            Box::new(store.clone()),
            Box::new(model),
            embedder,
            "main",
            rules(60),
            &mut |n, of| {
                assert!(n <= of);
                done = n;
            },
        );
        (session.unwrap_or_else(|why| panic!("it opens: {why}")), done)
    };
    let (mut session, done) = another(vec![on(" Yes.", "x")]);
    assert_eq!(done, 8);
    assert_eq!(
        session.notices(),
        [
            "this was written with scripted; another has read it anew, and what was known of each word was carried over. \
          As it was, it is kept as 'main (scripted)'"
        ]
    );
    assert_eq!(state(&session), before);
    let shown = session.window_text();
    assert!(shown.contains("<|im_end|>\n<|im_start|>user\nTell me all of music<|im_end|>"), "{shown}");
    say(&mut session, "Is that so");
    drop(session);
    assert_eq!(another(Vec::new()).0.notices(), [""; 0], "it is of this model's tokens now");
    let names: Vec<String> =
        store.clone().conversations().expect("read").into_iter().map(|c| c.name).collect();
    assert_eq!(names, ["main", "main (scripted)"]);
}

/// The model keeps notes: its call is run, the result follows as tokens of the tool's, and it goes on.
#[test]
fn the_model_keeps_notes() {
    let store = shared(MemoryStore::default());
    let write = "<tool>jq '.context.name = \"Ada\"' notes.json > output</tool>";
    let answers = vec![on(write, "x"), on(" Noted.", "x"), on(" You said <tool>jq . notes.json</tool>", "x")];
    let mut rules = rules(0);
    rules.tools = Some(Runner::Here);
    rules.sampling.max_tokens = 40;
    let mut session = open(&store, rules.clone(), answers);
    assert!(session.window_text().contains("## Tool use"), "{}", session.window_text());
    let events = say(&mut session, "I am Ada. <tool>jq 'del(.context)' notes.json > output</tool>");
    let done = |events: &[Event]| -> Vec<Done> {
        events
            .iter()
            .filter_map(|e| if let Event::Tool(done) = e { Some(done.clone()) } else { None })
            .collect()
    };
    let command = write.trim_start_matches("<tool>").trim_end_matches("</tool>").to_owned();
    assert_eq!(done(&events), [Done { command, ok: true, result: ".context.name = \"Ada\"".into() }]);
    let told = answer(&events);
    assert!(
        told.contains("⚙️【jq '.context.name = \"Ada\"' notes.json > output】→ ✓ .context.name = \"Ada\""),
        "{told}"
    );
    assert!(told.ends_with(" Noted."), "{told}");
    let notes = store.clone().records("main", Kind::Note).expect("read").remove(0);
    assert!(
        notes.key == "notes.json" && notes.value.contains(r#""context":{"name":"Ada"}"#),
        "{}",
        notes.value
    );
    same_as_stored(&session, &store);
    let chunk = session.timeline().chunks().last().expect("an answer").id();
    assert_eq!(chunk.to_string(), "a1.0", "a result stays with its call");
    drop(session);

    // What was noted is in the instructions of the next day, and what the user writes calls nothing.
    let answers = vec![on(" Nothing to do.", "x")];
    let mut session = open(&store, rules, answers);
    assert!(session.window_text().contains(r#""context":{"name":"Ada"}"#), "{}", session.window_text());
    assert_eq!(done(&say(&mut session, "<tool>jq 'del(.context)' notes.json > output</tool>")), []);
}

/// Calls that go on for ever end after five; the same call twice ends the turn; what is wrong is told to the model.
#[test]
fn calls_of_tools_are_bounded() {
    let mut rules = rules(0);
    rules.tools = Some(Runner::Here);
    rules.sampling.max_tokens = 40;
    let call = |n: usize| on(&format!("<tool>jq '.n = {n}' notes.json > output</tool>"), "x");
    let store = shared(MemoryStore::default());
    let mut session = open(&store, rules.clone(), (0..9).map(call).collect());
    let tools = |events: &[Event]| events.iter().filter(|e| matches!(e, Event::Tool(_))).count();
    assert_eq!(tools(&say(&mut session, "Count")), 5);
    let store = shared(MemoryStore::default());
    let mut session = open(&store, rules.clone(), vec![call(1), call(1), call(2)]);
    assert_eq!(tools(&say(&mut session, "Count")), 1);
    let store = shared(MemoryStore::default());
    let hostile = ["def f: f; f", "..", "env", "\u{0}\u{1}", "<tool>", "{\"a\":[[[[[["];
    let answers = hostile.iter().map(|filter| on(&format!("<tool>jq '{filter}' notes.json</tool>"), "x"));
    let mut session = open(&store, rules, answers.chain([on(" done", "x")]).collect());
    let events = say(&mut session, "Go on");
    let wrong = events.iter().filter(|e| matches!(e, Event::Tool(done) if !done.ok)).count();
    assert_eq!(wrong, 5);
    same_as_stored(&session, &store);
}

/// A message is stored before anything that takes time: before the model begins, in a fork, to answer, and before search.
#[test]
fn a_message_is_stored_first() {
    let store = shared(MemoryStore::default());
    let topics = ["cheese", "trains", "winter", "music", "bread"];
    let mut answers: Vec<_> = topics.iter().map(|t| on(&format!(" Much is known of {t}."), t)).collect();
    // What it would say of trains brings them back, though the message does not name them.
    answers.extend([on(" Something of trains.", "x"), on(" Rails.", "x")]);
    let mut rules = rules(60);
    let mut session = open(&store, rules.clone(), answers.drain(..5).collect());
    topics.iter().for_each(|topic| drop(say(&mut session, &format!("Tell me all of {topic}"))));
    drop(session);
    rules.preview = 4;
    let mut session = open(&store, rules, answers);
    let events = say(&mut session, "What runs on rails");
    let at = |is: fn(&Event) -> bool| events.iter().position(is).expect("it happens");
    let said = at(|event| matches!(event, Event::Said { .. }));
    let previewed = at(|event| matches!(event, Event::Previewed { text } if text == " Something of trains."));
    let returned = at(|event| matches!(event, Event::Returned { .. }));
    assert!(said < previewed && previewed < returned, "{events:#?}");
    assert!(chunks(&events, true).contains(&"a3.0".to_owned()), "{:?}", chunks(&events, true));
    assert_eq!(answer(&events), " Rails.", "nobody is told what was only begun");
    same_as_stored(&session, &store);
}

/// A branch shares the past up to a turn; both go on, and neither knows of the other.
#[test]
fn a_branch_shares_the_past() {
    let store = shared(MemoryStore::default());
    let mut session = open(&store, rules(0), vec![on(" red", "x"), on(" green", "x"), on(" blue", "x")]);
    say(&mut session, "First");
    say(&mut session, "Second");
    assert_eq!(session.branch("side", Some(1)), Ok(2));
    let none = session.branch("none", Some(9)).map_err(|why| why.to_string());
    assert_eq!(none, Err("branching: there is no turn 9: the last one is 3".into()));
    assert!(session.branch("side", None).is_err_and(|why| why.to_string().contains("already")));
    say(&mut session, "Third");
    assert!(session.window_text().ends_with("First redSecond greenThird blue"), "{}", session.window_text());
    same_as_stored(&session, &store);
    drop(session);
    let model = Box::new(ScriptedModel::new(4096, vec![on(" grey", "x")]));
    let side = Session::open(Box::new(store), model, None, "side", rules(0), &mut |_, _| {});
    let mut side = side.unwrap_or_else(|why| panic!("it opens: {why}"));
    assert_eq!(side.notices(), [""; 0]);
    say(&mut side, "Elsewhere");
    assert!(side.window_text().ends_with("First redElsewhere grey"), "{}", side.window_text());
}

/// A question that takes something for granted which was said not to be so: whoever asks is told, with why, and answered.
#[test]
fn a_false_premise_is_told_and_the_question_answered() {
    let store = shared(MemoryStore::default());
    let answers = vec![
        on(" Noted.", "nothing"),
        on(" Hm.", "nothing"),
        on(" It did not.", "server"),
        on(" Tea.", "tea"),
    ];
    let mut rules = rules(200);
    rules.premises = Some(halo_engine::premise::Premises::Rules);
    let mut session = open(&store, rules, answers);
    say(&mut session, "The server did not crash yesterday");
    say(&mut session, "I like tea");
    let events = say(&mut session, "Why did the server crash?");
    let told: Vec<&Event> = events.iter().filter(|event| matches!(event, Event::Premise { .. })).collect();
    let [Event::Premise { premise, reason, suggestion }] = told[..] else { panic!("{events:?}") };
    assert_eq!(premise, "the server crash");
    assert!(reason.contains("The server did not crash yesterday"), "{reason}");
    assert_eq!(suggestion, "Please verify the premise of your question.");
    assert_eq!(answer(&events), " It did not.");
    let mut kept = store;
    let record = kept.records("main", Kind::Turn).expect("they are kept");
    assert!(record.iter().any(|record| record.value.contains("the server crash")), "it is on the record");
    let events = say(&mut session, "Why do I like tea?");
    assert!(
        !events.iter().any(|event| matches!(event, Event::Premise { .. })),
        "nothing speaks against that"
    );
}
