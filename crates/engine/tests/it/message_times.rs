//! User messages carry their time, and the first one of a day the date.

use crate::common::test_rules;
use halo_core::model::{ChatTemplate, StepFlow};
use halo_core::testing::doubles::{InMemoryStore, ScriptedAnswer, ScriptedModel};
use halo_core::testing::shared_store::SharedStore;
use halo_engine::chat_format::SpeakerNames;
use halo_engine::rules::ConversationRules;
use halo_engine::session::Session;
use halo_engine::turn::{EditAuthor, TurnInput};
use jiff::civil::{DateTime, date};

fn open_session(store: &SharedStore<InMemoryStore>, show_dates: bool) -> Session {
    let answers = vec![ScriptedAnswer { text: "Yes.".into(), ..ScriptedAnswer::default() }; 4];
    let rules = ConversationRules { show_dates, ..test_rules(0) };
    let model = Box::new(ScriptedModel::new(4096, answers));
    Session::open(Box::new(store.clone()), model, None, "main", rules, &mut |_, _| {}).expect("it opens")
}

fn window_after(show_dates: bool, messages: &[(DateTime, &str)]) -> String {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = open_session(&store, show_dates);
    for (at, message) in messages {
        session.send_message(message, *at, &mut |_| StepFlow::Continue).expect("it is answered");
    }
    session.timeline().context_window(0).text()
}

#[test]
fn user_messages_carry_their_time() {
    let day = date(2026, 11, 5);
    let messages = [
        (day.at(9, 5, 59, 0), "Good morning."),
        (day.at(23, 59, 0, 0), "Good night."),
        (day.tomorrow().expect("a day").at(0, 0, 0, 0), "Still here."),
    ];
    let window = window_after(true, &messages);
    let at = |part: &str| window.find(part).unwrap_or_else(|| panic!("no {part} in {window}"));
    let first = at("[Thursday, 5 November 2026, 09:05] Good morning.");
    let second = at("[23:59] Good night.");
    let third = at("[Friday, 6 November 2026, 00:00] Still here.");
    assert!(first < second && second < third, "{window}");
    assert_eq!(window.matches('[').count(), 3, "answers carry no time: {window}");
    assert!(!window_after(false, &messages).contains('['));
}

/// A client sees its own history: a date that it did not send would be in an answer, or in its next request.
#[test]
fn client_messages_carry_no_time() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = open_session(&store, true);
    let now = date(2026, 11, 5).at(9, 5, 0, 0);
    let inputs = [
        TurnInput::ClientMessage("What is new?".into()),
        TurnInput::EditLast("What is old?".into(), EditAuthor::Client),
        TurnInput::Message("And here?".into()),
        TurnInput::EditLast("And there?".into(), EditAuthor::User),
    ];
    let mut windows = Vec::new();
    for input in inputs {
        session.run_turn(input, now, &mut |_| StepFlow::Continue).expect("it is answered");
        windows.push(session.timeline().context_window(0).text());
    }
    assert!(windows[..2].iter().all(|window| !window.contains('[')), "{windows:?}");
    assert!(windows[2].contains("[Thursday, 5 November 2026, 09:05] And here?"), "{windows:?}");
    assert!(windows[3].contains("09:05] And there?"), "{windows:?}");
    assert_eq!(windows[3].matches('[').count(), 1, "{windows:?}");
}

/// Another model opens a conversation of a client and the user: only the messages that had a time have one afterwards.
#[test]
fn client_messages_carry_no_time_after_another_model_opens_them() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = open_session(&store, true);
    let now = date(2026, 11, 5).at(9, 5, 0, 0);
    let inputs = [
        TurnInput::ClientMessage("See [10:30] in the plan.".into()),
        TurnInput::Message("And here?".into()),
        TurnInput::ClientMessage("What is old?".into()),
        TurnInput::Message("And there?".into()),
    ];
    for input in inputs {
        session.run_turn(input, now, &mut |_| StepFlow::Continue).expect("it is answered");
    }
    drop(session);
    for names in [SpeakerNames::default(), SpeakerNames { user: "Otto".into(), assistant: "Halo".into() }] {
        let rules = ConversationRules { show_dates: true, speaker_names: names.clone(), ..test_rules(0) };
        let model = ScriptedModel::new(4096, Vec::new()).with_template(ChatTemplate::chatml());
        let model = Box::new(model.with_name(if names.user.is_empty() { "second" } else { "third" }));
        let session = Session::open(Box::new(store.clone()), model, None, "main", rules, &mut |_, _| {});
        let window = session.expect("it opens").timeline().context_window(0).text();
        let name = if names.user.is_empty() { String::new() } else { format!("{}: ", names.user) };
        for client in ["See [10:30] in the plan.", "What is old?"] {
            assert!(window.contains(&format!("<|im_start|>user\n{name}{client}")), "{client}: {window}");
        }
        for user in ["And here?", "And there?"] {
            assert!(window.contains(&format!("] {name}{user}")), "{user}: {window}");
        }
        assert_eq!(window.matches('[').count(), 3, "{window}");
    }
}
