//! The answer of a model on a heartbeat: messages and actions. A model may write JSON, JSON in a code fence, TOON, or text
//! that is cut off; the parser takes what it can and reports the rest to the agent.

mod parse;
pub mod schema;

use crate::action::{ACTION_TYPES, Action, ActionContext, InvalidAction, value_as_text};
use crate::error::Error;
use crate::hud_format::AnswerFormat;
use crate::world::{AgentId, RoomId, World};
use parse::ParsedAnswer;
use serde_json::{Value, json};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentAnswer {
    pub responses: Vec<RoomResponse>,
    pub actions: Vec<Result<Action, InvalidAction>>,
    /// Whether the text had to be repaired before it could be parsed.
    pub repaired: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomResponse {
    pub room: RoomId,
    pub message: String,
}

/// What agents write for silence in a room.
pub const NO_RESPONSE: &str = "[no response]";

const MAX_ANSWER_BYTES: usize = 1 << 20;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerOutcome {
    /// Messages that were sent or are being typed.
    pub sent: usize,
    pub performed: usize,
    /// The reasons of refused messages and actions.
    pub refused: Vec<String>,
}

/// The types of actions that are responses.
const MESSAGE_ACTIONS: [&str; 2] = ["send_message", "message"];

/// The names that models use for the text of a response.
const MESSAGE_FIELDS: [&str; 3] = ["message", "content", "text"];

impl AgentAnswer {
    /// Parses the text of a model. If it was truncated, its last action is reported and not performed.
    pub fn parse(text: &str, format: AnswerFormat, truncated: bool) -> Result<Self, Error> {
        if text.len() > MAX_ANSWER_BYTES {
            return Err(Error::invalid_input("the answer is too long to be read"));
        }
        let parsed = parse::parse_answer(text, format, truncated).ok_or_else(|| {
            Error::invalid_input("the answer is neither JSON nor TOON with 'responses' and 'actions'")
        })?;
        Ok(Self::from_parsed(parsed))
    }

    fn from_parsed(ParsedAnswer { value, repaired, last_item_open }: ParsedAnswer) -> Self {
        let mut answer = Self { repaired, ..Self::default() };
        let Value::Object(mut fields) = value else { return answer };
        let open_list = fields.keys().next_back().filter(|_| last_item_open).cloned();
        let is_open = |name: &str| open_list.as_deref() == Some(name);
        // Some models write `messages`; an answer with both is read by `responses`, unless that list is empty.
        let is_empty = |list: &Value| list.is_null() || list.as_array().is_some_and(Vec::is_empty);
        let list = match fields.get("responses").is_none_or(is_empty) && fields.contains_key("messages") {
            true => "messages",
            false => "responses",
        };
        answer.take_responses(fields.shift_remove(list), is_open(list));
        answer.take_actions(fields.shift_remove("actions"), is_open("actions"));
        answer
    }

    fn take_responses(&mut self, responses: Option<Value>, is_open: bool) {
        let mut responses = match responses {
            Some(Value::Array(responses)) => responses,
            Some(one @ Value::Object(_)) if MESSAGE_FIELDS.iter().any(|name| one.get(name).is_some()) => {
                vec![one]
            }
            // Some models write an object with rooms as names and messages as values.
            Some(Value::Object(by_room)) => {
                let response = |(room, message)| json!({"room_id": room, "message": message});
                by_room.into_iter().map(response).collect()
            }
            other => {
                let reason = "responses are a list, each with a room_id and a message";
                self.reject_non_list(other.as_ref(), "response", reason);
                Vec::new()
            }
        };
        // A message that is cut off is sent as far as it goes. An entry that is cut off before or after its message is
        // dropped: its room may be wrong.
        let ends_in_message = |response: &Value| {
            let last = response.as_object().and_then(|response| response.keys().next_back());
            last.is_some_and(|name| MESSAGE_FIELDS.contains(&name.as_str()))
        };
        if is_open && responses.last().is_some_and(|last| !ends_in_message(last)) {
            responses.pop();
        }
        responses.iter().for_each(|response| self.push_response(response));
    }

    fn take_actions(&mut self, actions: Option<Value>, is_open: bool) {
        let mut actions = match actions {
            Some(Value::Array(actions)) => actions,
            Some(action @ Value::Object(_)) => vec![action],
            other => {
                self.reject_non_list(other.as_ref(), "action", "actions are a list, each with a type");
                Vec::new()
            }
        };
        let unfinished = if is_open { actions.pop() } else { None };
        for action in actions {
            let kind = action.get("type").and_then(Value::as_str);
            if kind.is_some_and(|kind| MESSAGE_ACTIONS.contains(&kind)) {
                self.push_response(&action);
            } else {
                self.actions.push(parse_action(action));
            }
        }
        if let Some(action) = unfinished {
            let kind = action.get("type").and_then(Value::as_str).filter(|kind| ACTION_TYPES.contains(kind));
            self.push_invalid(
                kind.unwrap_or("action"),
                "your answer was cut off before this was finished, so it was not done: answer shorter",
            );
        }
    }

    /// Reports a field that is not a list, unless it is empty.
    fn reject_non_list(&mut self, value: Option<&Value>, kind: &str, reason: &str) {
        let is_empty =
            |value: &Value| value.is_null() || value.as_str().is_some_and(|text| text.trim().is_empty());
        if value.is_some_and(|value| !is_empty(value)) {
            self.push_invalid(kind, reason);
        }
    }

    fn push_invalid(&mut self, kind: &str, reason: &str) {
        self.actions.push(Err(InvalidAction { kind: kind.to_owned(), reason: reason.to_owned() }));
    }

    fn push_response(&mut self, item: &Value) {
        let field = |names: &[&str]| names.iter().find_map(|name| item.get(*name));
        let room = field(&["room_id", "room", "id"]).and_then(parse_room_id);
        match (room, field(&MESSAGE_FIELDS).and_then(value_as_text)) {
            (Some(room), Some(message)) => {
                let is_silent = message.trim().is_empty() || message.trim().eq_ignore_ascii_case(NO_RESPONSE);
                if !is_silent {
                    self.responses.push(RoomResponse { room, message });
                }
            }
            _ => self.push_invalid("response", "a response has a room_id and a message"),
        }
    }
}

fn parse_room_id(value: &Value) -> Option<RoomId> {
    let number = value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())?;
    u32::try_from(number).ok().map(AgentId)
}

fn parse_action(action: Value) -> Result<Action, InvalidAction> {
    let kind = action.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    if kind.is_empty() {
        return Err(InvalidAction { kind: "action".to_owned(), reason: "an action has a type".to_owned() });
    }
    if !ACTION_TYPES.contains(&kind.as_str()) {
        let reason = format!("there is no action '{kind}'");
        return Err(InvalidAction { kind, reason });
    }
    serde_json::from_value(action).map_err(|error| InvalidAction { kind, reason: error.to_string() })
}

impl World {
    /// Applies an answer: knowledge first, then messages, then the other actions, so that an agent that says goodbye and
    /// leaves is heard. Every refusal is recorded among the agent's recent actions.
    pub fn apply_answer(
        &mut self,
        agent: AgentId,
        answer: AgentAnswer,
        context: ActionContext<'_>,
    ) -> AnswerOutcome {
        let mut outcome = AnswerOutcome::default();
        let changes_knowledge = |action: &Result<Action, _>| {
            matches!(action, Ok(Action::Set { .. } | Action::Delete { .. } | Action::Append { .. }))
        };
        let (first, rest): (Vec<_>, Vec<_>) = answer.actions.into_iter().partition(changes_knowledge);
        self.perform_actions(agent, first, context, &mut outcome);
        for RoomResponse { room, message } in answer.responses {
            match self.submit_message(room, agent, (&message, context.split), None, context.now) {
                Ok(()) => outcome.sent += 1,
                Err(error) => {
                    self.record_refusal(agent, "response", &error.message, context.now);
                    outcome.refused.push(error.message);
                }
            }
        }
        self.perform_actions(agent, rest, context, &mut outcome);
        outcome
    }

    fn perform_actions(
        &mut self,
        agent: AgentId,
        actions: Vec<Result<Action, InvalidAction>>,
        context: ActionContext<'_>,
        outcome: &mut AnswerOutcome,
    ) {
        for action in actions {
            let refusal = match action {
                Ok(action) => self.perform_action(agent, action, context).err().map(|error| error.message),
                Err(InvalidAction { kind, reason }) => {
                    self.record_refusal(agent, &kind, &reason, context.now);
                    Some(reason)
                }
            };
            match refusal {
                None => outcome.performed += 1,
                Some(reason) => outcome.refused.push(reason),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, WorldRng};

    fn parse_answer(text: &str) -> AgentAnswer {
        AgentAnswer::parse(text, AnswerFormat::Json, false).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn answer_parses_json_toon_and_code_fences() {
        let expected = AgentAnswer {
            responses: vec![RoomResponse { room: AgentId(8), message: "Hello, you!".into() }],
            actions: vec![Ok(Action::Set {
                path: "character.mood".into(),
                value: json!("curious"),
                w: None,
            })],
            repaired: false,
        };
        let json = r#"{"responses": [{"room_id": 8, "message": "Hello, you!"}, {"room_id": 5, "message": "[no response]"}],
            "actions": [{"type": "set", "path": "character.mood", "value": "curious"}]}"#;
        assert_eq!(parse_answer(json), expected);
        assert_eq!(
            parse_answer(&format!("Here is my answer:\n```json\n{json}\n```\nI hope it helps.")),
            expected
        );
        assert_eq!(parse_answer(&format!("{json} and so on")), expected);
        let toon = "responses[1]{room_id,message}:\n  8,\"Hello, you!\"\nactions[1]{type,path,value}:\n  set,character.mood,curious";
        assert_eq!(parse_answer(toon), expected);
        assert_eq!(AgentAnswer::parse(toon, AnswerFormat::Toon, false).as_ref(), Ok(&expected));
        assert_eq!(AgentAnswer::parse(json, AnswerFormat::Toon, false).as_ref(), Ok(&expected));
        let words = r#"{"responses": {"8": "Hello, you!"}, "actions": {"type": "set", "path": "character.mood", "value": "curious"}}"#;
        assert_eq!(parse_answer(words), expected);
        let sent = r#"{"actions": [{"type": "send_message", "room_id": "8", "content": "Hello, you!"}]}"#;
        assert_eq!(parse_answer(sent).responses, expected.responses);
    }

    #[test]
    fn answer_reads_messages_as_responses() {
        let hello = [RoomResponse { room: AgentId(8), message: "Hello".into() }];
        for text in [
            r#"{"messages": [{"room_id": 8, "message": "Hello"}]}"#,
            r#"{"messages": [{"room_id": 8, "content": "Hello"}], "actions": []}"#,
            r#"{"messages": {"8": "Hello"}}"#,
            r#"{"responses": [], "messages": [{"room_id": 8, "message": "Hello"}]}"#,
            r#"{"responses": [{"room_id": 8, "message": "Hello"}], "messages": [{"room_id": 8, "message": "Again"}]}"#,
            r#"{"actions": [{"type": "message", "room_id": 8, "content": "Hello"}]}"#,
            r#"Here: {"messages": [{"room_id": 8, "message": "Hello"}, {"room_id": 8, "message": "[no response]"}"#,
            "messages[1]{room_id,message}:\n  8,Hello",
            "messages[3]{room_id,message}:\n  8,Hello",
        ] {
            let answer = parse_answer(text);
            assert_eq!(answer.responses, hello, "{text}");
            assert!(answer.actions.is_empty(), "{text}: {:?}", answer.actions);
        }
        let cut = r#"{"messages": [{"room_id": 8, "message": "Hello"}, {"room_id": 8"#;
        let answer = AgentAnswer::parse(cut, AnswerFormat::Json, true).expect("an answer");
        assert_eq!((answer.responses.as_slice(), answer.repaired), (&hello[..], true));
    }

    /// TOON does not quote strings that look like numbers.
    #[test]
    fn answer_converts_between_numbers_and_strings() {
        let toon = "responses[1]{room_id,message}:\n  \"8\",42\nactions[3]:\n  - type: create_key\n    key: 1234\n  - type: request_access\n    room_id: \"3\"\n    key: true\n  - type: set_attention\n    room_id: 8\n    value: 30";
        let answer = AgentAnswer::parse(toon, AnswerFormat::Toon, false).expect("an answer");
        assert_eq!(answer.responses, [RoomResponse { room: AgentId(8), message: "42".into() }]);
        let expected = [
            Action::CreateKey { key: "1234".into() },
            Action::RequestAccess { room_id: AgentId(3), key: "true".into() },
            Action::SetAttention { room_id: AgentId(8), value: "30".into() },
        ];
        assert_eq!(answer.actions, expected.map(Ok));
        // A float is refused: 2.10 has become 2.1 when it was parsed.
        for (key, shown) in [(r#"["a"]"#, r#"["a"]"#), ("2.10", "2.1"), ("4.0", "4.0")] {
            let answer = parse_answer(&format!(r#"{{"actions": [{{"type": "create_key", "key": {key}}}]}}"#));
            let reason = format!("{shown} is not a string: write it in quotes");
            assert_eq!(answer.actions, [Err(InvalidAction { kind: "create_key".into(), reason })], "{key}");
        }
    }

    #[test]
    fn answer_repairs_broken_json() {
        let whole = r#"{"responses": [{"room_id": 8, "message": "Hello"}], "actions": [{"type": "delete", "path": "a"}]}"#;
        for end in 15..whole.len() {
            let Ok(answer) = AgentAnswer::parse(&whole[..end], AnswerFormat::Json, true) else {
                panic!("{}", &whole[..end])
            };
            assert!(answer.repaired, "{}", &whole[..end]);
            if end > 49 {
                assert_eq!(answer.responses[0].message, "Hello", "{}", &whole[..end]);
            }
        }
        assert_eq!(
            parse_answer(
                "{\"responses\": [{\"room_id\": 1, \"message\": \"two\nlines\"},], \"actions\": [],}"
            )
            .responses[0]
                .message,
            "two\nlines"
        );
        assert_eq!(
            parse_answer(r#"{"responses": [{"room_id": 1, "message": "cut off in the mid"#).responses[0]
                .message,
            "cut off in the mid"
        );
        for nothing in ["", "I do not know.", "{}", "[1, 2]", "{\"a\": 1}", "```\n```"] {
            assert!(AgentAnswer::parse(nothing, AnswerFormat::Json, false).is_err(), "{nothing}");
        }
    }

    #[test]
    fn answer_truncated_action_is_not_performed() {
        let cut = "cut off before this was finished";
        let cases = [
            (r#"{"responses":[],"actions":[{"type":"delete","path":"people"#, "delete"),
            (r#"{"actions":[{"type":"retire_agent","agent_id":1"#, "retire_agent"),
            (r#"{"actions":[{"type":"set_attention","room_id":2,"value":"3"#, "set_attention"),
            (r#"{"actions":{"type":"retire_agent","agent_id":1"#, "retire_agent"),
            (r#"{"actions":[{"type":"retire_ag"#, "action"),
            ("responses: []\nactions[1]{type,path}:\n  delete,people", "delete"),
            ("actions[1]:\n  - type: retire_agent\n    agent_id: 1", "retire_agent"),
        ];
        for (text, kind) in cases {
            let answer = AgentAnswer::parse(text, AnswerFormat::Json, true)
                .unwrap_or_else(|error| panic!("{text}: {error}"));
            let [Err(invalid)] = &answer.actions[..] else { panic!("{text}: {:?}", answer.actions) };
            assert!(invalid.kind == kind && invalid.reason.contains(cut), "{text}: {invalid:?}");
        }
        // Complete actions before it are performed, and so is a complete action at the end.
        let two = r#"{"actions":[{"type":"delete","path":"a"},{"type":"delete","path":"b"#;
        assert_eq!(parse_answer(two).actions[0], Ok(Action::Delete { path: "a".into() }));
        for whole in
            ["actions[1]{type,path}:\n  delete,people", r#"{"actions":[{"type":"delete","path":"people"},]}"#]
        {
            assert_eq!(
                parse_answer(whole).actions,
                [Ok(Action::Delete { path: "people".into() })],
                "{whole}"
            );
        }
        // The number of the room may be cut off, so the response is dropped.
        let none = r#"{"responses":[{"room_id":3,"message":"a"},{"message":"to whom?","room_id":1"#;
        assert_eq!(parse_answer(none).responses, [RoomResponse { room: AgentId(3), message: "a".into() }]);
    }

    #[test]
    fn answer_reports_fields_that_are_not_lists() {
        for (text, expected) in [
            (r#"{"responses":"Hello all","actions":[]}"#, Some("responses are a list")),
            (r#"{"responses":[],"actions":"set a to b"}"#, Some("actions are a list")),
            ("responses: Hello\nactions: []", Some("responses are a list")),
            (r#"{"responses":null,"actions":""}"#, None),
        ] {
            let answer = parse_answer(text);
            let reason = answer.actions.first().and_then(|action| Some(&action.as_ref().err()?.reason));
            assert_eq!(reason.is_some(), expected.is_some(), "{text}: {reason:?}");
            assert!(
                expected.is_none_or(|part| reason.is_some_and(|reason| reason.starts_with(part))),
                "{text}: {reason:?}"
            );
        }
    }

    #[test]
    fn answer_repairs_truncated_toon() {
        let whole = "responses[1]{room_id,message}:\n  1,\"She said: \\\"no\\\", and left\"\nactions[2]:\n  - type: reply\n    room_id: 1\n    message_id: 101\n    message: \"Is it so?\"\n  - type: delete\n    path: a.b";
        let [actions, last] = ["actions", "- type: d"].map(|word| whole.find(word).expect("in the text"));
        for end in 30..whole.len() {
            let text = &whole[..end];
            let answer = AgentAnswer::parse(text, AnswerFormat::Toon, true)
                .unwrap_or_else(|error| panic!("{text}: {error}"));
            if end >= actions {
                assert_eq!(answer.responses[0].message, "She said: \"no\", and left", "{text}");
            }
            assert!(answer.repaired || !(actions + 1..last).contains(&end), "{text}");
        }
        let cut = AgentAnswer::parse(&whole[..actions + 90], AnswerFormat::Toon, true).expect("an answer");
        assert_eq!((cut.responses.len(), cut.actions.len(), cut.repaired), (1, 1, true));
        let whole = AgentAnswer::parse(whole, AnswerFormat::Toon, false).expect("an answer");
        assert!(!whole.repaired && whole.actions.iter().all(Result::is_ok) && whole.actions.len() == 2);
        // The declared count is wrong.
        for count in [0, 1, 3, 9] {
            let text = format!("responses[{count}]{{room_id,message}}:\n  1,one\n  1,two\nactions: []");
            assert_eq!(
                AgentAnswer::parse(&text, AnswerFormat::Toon, false).map(|answer| answer.responses.len()),
                Ok(2),
                "{text}"
            );
        }
    }

    /// An answer that is cut off anywhere is parsed, and contains no message and no action that was not meant.
    #[test]
    fn answer_fuzz_truncation_invents_nothing() {
        for seed in 0..200 {
            let mut rng = WorldRng::new(seed);
            let messages: Vec<String> =
                (0..=rng.below(2)).map(|_| testing::random_text(&mut rng, 8)).collect();
            let response = |message: &String| json!({"room_id": 1, "message": message});
            let whole = json!({
                "responses": messages.iter().map(response).collect::<Vec<_>>(),
                "actions": [
                    {"type": "reply", "room_id": 1, "message_id": 7, "message": testing::random_text(&mut rng, 6)},
                    {"type": "set", "path": "a.b", "value": testing::random_text(&mut rng, 4)},
                    {"type": "retire_agent", "agent_id": 12},
                ],
            });
            let meant: Vec<Action> = parse_answer(&whole.to_string()).actions.into_iter().flatten().collect();
            assert_eq!(meant.len(), 3);
            let toon = toon_format::encode(&whole, &toon_format::EncodeOptions::default()).expect("TOON");
            let pretty = serde_json::to_string_pretty(&whole).expect("JSON");
            for (text, format) in [
                (whole.to_string(), AnswerFormat::Json),
                (pretty, AnswerFormat::Json),
                (toon, AnswerFormat::Toon),
            ] {
                let end = if format == AnswerFormat::Toon { '\n' } else { '[' };
                let head = text.find(end).expect("a list") + 1;
                for end in (head..=text.len()).filter(|&end| text.is_char_boundary(end)) {
                    let text = &text[..end];
                    let answer = AgentAnswer::parse(text, format, true)
                        .unwrap_or_else(|error| panic!("seed {seed}: {error}: {text}"));
                    for action in answer.actions.into_iter().flatten() {
                        assert!(meant.contains(&action), "seed {seed}: {action:?}: {text}");
                    }
                    for RoomResponse { message, .. } in answer.responses {
                        assert!(
                            messages.iter().any(|whole| whole.starts_with(&message)),
                            "seed {seed}: {message:?}: {text}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn answer_keeps_code_fence_inside_message() {
        let text = r#"{"responses": [{"room_id": 8, "message": "Try ```ls``` first"}], "actions": []}"#;
        for text in [text.to_owned(), format!("```json\n{text}\n```"), format!("Well:\n{text}\nThat is it.")]
        {
            assert_eq!(
                parse_answer(&text).responses,
                [RoomResponse { room: AgentId(8), message: "Try ```ls``` first".into() }]
            );
        }
        // Deep nesting is refused quickly.
        assert!(AgentAnswer::parse(&"[{".repeat(30_000), AnswerFormat::Json, true).is_err());
    }

    #[test]
    fn answer_reports_invalid_actions() {
        let answer = parse_answer(
            r#"{"actions": [{"type": "fly"}, {"type": "react", "message_id": 1, "reaction": "fire"}, {"path": "x"},
            {"type": "react", "message_id": "12", "reaction": "heart"}], "responses": [{"message": "where?"}]}"#,
        );
        let reasons: Vec<&str> =
            answer.actions.iter().filter_map(|a| a.as_ref().err()).map(|e| e.reason.as_str()).collect();
        assert_eq!(reasons[0], "a response has a room_id and a message");
        assert_eq!(reasons[1], "there is no action 'fly'");
        assert!(reasons[2].contains("fire"), "{}", reasons[2]);
        assert_eq!(reasons[3], "an action has a type");
        assert!(
            answer.actions.iter().any(|action| matches!(action, Ok(Action::React { message_id: 12, .. })))
        );
    }
}
