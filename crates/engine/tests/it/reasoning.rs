//! The reasoning before an answer, and functions of clients, in whole turns on the test doubles.

use crate::common::test_rules;
use crate::turn::{TODAY, answer_attending_to, send, shared_store};
use halo_core::model::{ChatTemplate, StepFlow};
use halo_core::testing::doubles::{InMemoryStore, ScriptedModel};
use halo_core::token::Role;
use halo_core::tool_call::{FunctionCall, ReasoningFormat, ToolDefinition};
use halo_engine::align::SentMessage;
use halo_engine::event::Event;
use halo_engine::rules::ConversationRules;
use halo_engine::session::{AnswerBegin, Session};
use halo_engine::turn::TurnInput;

fn open(rules: ConversationRules, prompt: &str, answers: &[&str]) -> Session {
    let reasoning = ReasoningFormat {
        open: "<think>".into(),
        close: "</think>".into(),
        prompt: prompt.into(),
        skip: Some("<think></think>".into()),
    };
    let template = ChatTemplate { reasoning: Some(reasoning), ..ChatTemplate::chatml() };
    let answers = answers.iter().map(|text| answer_attending_to(text, "nothing")).collect();
    let model = Box::new(ScriptedModel::new(4096, answers).with_template(template));
    let store = Box::new(shared_store(InMemoryStore::default()));
    let opened = Session::open(store, model, None, "main", rules, &mut |_, _| {});
    opened.unwrap_or_else(|error| panic!("the session does not open: {error}"))
}

fn long_rules() -> ConversationRules {
    let mut rules = test_rules(500);
    rules.sampling.max_tokens = 40;
    rules
}

/// The text of the live chunks of the last turn.
fn live_answer(session: &Session) -> String {
    let turn = session.timeline().turns().last().expect("a turn").id;
    let chunks = session.timeline().turn_chunks(turn).filter(|chunk| chunk.is_live());
    chunks.map(|chunk| chunk.text().into_owned()).collect()
}

#[test]
fn reasoning_is_pruned_after_the_answer() {
    for (prompt, answer) in [
        ("", "<think> I wonder about it. </think> It is so."),
        ("<think>", " I wonder about it. </think> It is so."),
    ] {
        let mut session = open(long_rules(), prompt, &[answer, "Yes."]);
        let events = send(&mut session, "Is it so?");
        let pruned: Vec<&String> = (events.iter())
            .filter_map(|event| match event {
                Event::Pruned { reason, .. } => Some(reason),
                _ => None,
            })
            .collect();
        assert!(
            !pruned.is_empty() && pruned.iter().all(|reason| *reason == "reasoning of a finished answer"),
            "{pruned:?}"
        );
        assert_eq!(live_answer(&session).trim(), "It is so.");
        let window = session.context_window_text();
        assert!(!window.contains("wonder") && !window.contains("think"), "{window}");
        let turn = session.timeline().turns().last().expect("a turn").id;
        let pruned = session.timeline().turn_chunks(turn).map(|chunk| chunk.pruned_len()).sum::<usize>();
        assert!(pruned >= 5, "it stays on the timeline: {pruned} tokens");
        send(&mut session, "What do you wonder about?");
        assert!(!session.context_window_text().contains("I wonder"), "search does not resurrect it");
    }
}

#[test]
fn reasoning_stays_with_the_setting_and_when_it_is_cut_off() {
    let rules = ConversationRules { keep_reasoning: true, ..long_rules() };
    let mut session = open(rules, "", &["<think> I wonder. </think> It is so."]);
    send(&mut session, "Is it so?");
    assert!(live_answer(&session).contains("wonder"));
    let mut session = open(long_rules(), "", &["<think> I wonder and wonder"]);
    send(&mut session, "Is it so?");
    assert!(live_answer(&session).contains("wonder"), "there is no answer yet");
}

#[test]
fn reasoning_is_skipped_where_the_client_asks() {
    for (skip, expected) in [(true, true), (false, false)] {
        let mut session = open(long_rules(), "", &["No."]);
        session.set_next_answer(AnswerBegin { skip_reasoning: skip, ..AnswerBegin::default() });
        let input = TurnInput::Message("Is it so?".into());
        session.run_turn(input, TODAY, &mut |_| StepFlow::Continue).expect("it is answered");
        let window = session.context_window_text();
        assert_eq!(window.contains("<think></think>"), expected, "{window}");
    }
}

#[test]
fn answer_begins_with_the_text_of_the_client() {
    let mut session = open(long_rules(), "<think>", &[" blue."]);
    session.set_next_answer(AnswerBegin { text: "The sky is".into(), ..AnswerBegin::default() });
    let input = TurnInput::Message("Which colour?".into());
    session.run_turn(input, TODAY, &mut |_| StepFlow::Continue).expect("it is answered");
    assert_eq!(live_answer(&session), "The sky is blue.");
    assert!(!session.context_window_text().contains("<think>"));
}

#[test]
fn functions_are_part_of_the_system_prompt_and_results_are_turns() {
    let mut session = open(long_rules(), "", &["Noon."]);
    let tool = ToolDefinition {
        name: "clock".into(),
        function: "{\"name\": \"clock\"}".into(),
        parameters: "{}".into(),
    };
    session.set_tools(&[tool]).expect("set");
    let call = FunctionCall { name: "clock".into(), arguments: "{}".into() };
    let messages = [
        SentMessage::new(Role::User, "What time is it?".into()),
        SentMessage::with_calls(String::new(), vec![call]),
        SentMessage::new(Role::Tool, "12:00".into()),
    ];
    session.append_sent_messages(&messages, &mut || StepFlow::Continue).expect("appended");
    session.run_turn(TurnInput::AnswerLast, TODAY, &mut |_| StepFlow::Continue).expect("it is answered");
    let roles: Vec<Role> = session.timeline().turns().iter().map(|turn| turn.role).collect();
    assert_eq!(roles, [Role::User, Role::Assistant, Role::Tool, Role::Assistant]);
    let window = session.context_window_text();
    let expected = [
        "<tools>\n{\"type\": \"function\", \"function\": {\"name\": \"clock\"}}\n</tools>",
        "assistant\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call><|im_end|>",
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n<|im_start|>assistant\nNoon.",
    ];
    for text in expected {
        assert!(window.contains(text), "{text} is missing in {window}");
    }
    session.set_tools(&[]).expect("set");
    assert!(!session.context_window_text().contains("<tools>"));
}
