//! What an agent answers on a heartbeat: what it says and what it does. Models answer in JSON, in JSON within a fence, in TOON, or
//! in something that ends too early; what can be understood is, and what cannot is told.

pub mod form;
mod read;

use crate::action::{Action, Bounds, KINDS, as_text};
use crate::format::Output;
use crate::world::{AgentId, RoomId, World};
use read::Read;
use serde_json::{Value, json};

/// What an agent answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// What it says, room by room.
    pub responses: Vec<Response>,
    /// What it does, or why that is nothing that can be done: the word for it, and the reason.
    pub actions: Vec<Result<Action, (String, String)>>,
    /// Whether something had to be put right before it could be read.
    pub repaired: bool,
}

/// Something that an agent says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// Where.
    pub room: RoomId,
    /// What.
    pub message: String,
}

/// What agents write when they say nothing.
pub const SILENCE: &str = "[no response]";

/// The most that is read of an answer, in bytes.
const LONGEST: usize = 1 << 20;

/// What came of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Messages that were sent, or are being written.
    pub said: usize,
    /// Actions that were done.
    pub done: usize,
    /// What was not, and why.
    pub refused: Vec<String>,
}

impl Answer {
    /// Understands what a model wrote, as far as it came: where it was cut off, what it was about to do is not done.
    ///
    /// # Errors
    /// In words, when nothing of it can be.
    pub fn read(text: &str, output: Output, cut: bool) -> Result<Self, String> {
        if text.len() > LONGEST {
            return Err("the answer is too long to be read".to_owned());
        }
        let read = read::read(text, output, cut)
            .ok_or("the answer is neither JSON nor TOON with 'responses' and 'actions'")?;
        Ok(Self::of(read))
    }

    fn of(Read { value, repaired, open }: Read) -> Self {
        let mut answer = Self { repaired, ..Self::default() };
        let Value::Object(mut fields) = value else { return answer };
        let open = fields.keys().next_back().filter(|_| open).cloned();
        let is_open = |name: &str| open.as_deref() == Some(name);
        let mut responses = match fields.shift_remove("responses") {
            Some(Value::Array(responses)) => responses,
            Some(one @ Value::Object(_)) if MESSAGE.iter().any(|name| one.get(name).is_some()) => vec![one],
            // Some models name the room and then what they say there.
            Some(Value::Object(by_room)) => {
                let said = |(room, message)| json!({"room_id": room, "message": message});
                by_room.into_iter().map(said).collect()
            }
            other => {
                answer.none(other, "response", "responses are a list, each with a room_id and a message");
                Vec::new()
            }
        };
        // Half a message is said; one that was not about to be said yet is not.
        let begun = |response: &Value| {
            let last = response.as_object().and_then(|response| response.keys().next_back());
            last.is_some_and(|name| MESSAGE.contains(&name.as_str()))
        };
        if is_open("responses") && responses.last().is_some_and(|last| !begun(last)) {
            responses.pop();
        }
        responses.iter().for_each(|response| answer.say(response));
        let mut actions = match fields.shift_remove("actions") {
            Some(Value::Array(actions)) => actions,
            Some(action @ Value::Object(_)) => vec![action],
            other => {
                answer.none(other, "action", "actions are a list, each with a type");
                Vec::new()
            }
        };
        let unfinished = if is_open("actions") { actions.pop() } else { None };
        for action in actions {
            if action.get("type").and_then(Value::as_str) == Some("send_message") {
                answer.say(&action);
            } else {
                answer.actions.push(act(action));
            }
        }
        if let Some(action) = unfinished {
            let kind = action.get("type").and_then(Value::as_str).filter(|kind| KINDS.contains(kind));
            answer.wrong(
                kind.unwrap_or("action"),
                "your answer was cut off before this was finished, so it was not done: answer shorter",
            );
        }
        answer
    }

    /// Notes what should be a list and is none, unless it is nothing.
    fn none(&mut self, value: Option<Value>, kind: &str, why: &str) {
        let nothing =
            |value: &Value| value.is_null() || value.as_str().is_some_and(|text| text.trim().is_empty());
        if value.is_some_and(|value| !nothing(&value)) {
            self.wrong(kind, why);
        }
    }

    /// Notes something that cannot be done.
    fn wrong(&mut self, kind: &str, why: &str) {
        self.actions.push(Err((kind.to_owned(), why.to_owned())));
    }

    /// Something that is to be said.
    fn say(&mut self, item: &Value) {
        let field = |names: &[&str]| names.iter().find_map(|name| item.get(*name));
        let room = field(&["room_id", "room", "id"]).and_then(number);
        match (room, field(&MESSAGE).and_then(as_text)) {
            (Some(room), Some(message)) => {
                let silent = message.trim().is_empty() || message.trim().eq_ignore_ascii_case(SILENCE);
                if !silent {
                    self.responses.push(Response { room, message });
                }
            }
            _ => self.wrong("response", "a response has a room_id and a message"),
        }
    }
}

/// What a response may call what it says.
const MESSAGE: [&str; 3] = ["message", "content", "text"];

fn number(value: &Value) -> Option<RoomId> {
    let number = value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())?;
    u32::try_from(number).ok().map(AgentId)
}

fn act(action: Value) -> Result<Action, (String, String)> {
    let kind = action.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    if !KINDS.contains(&kind.as_str()) {
        let why = if kind.is_empty() {
            "an action has a type".to_owned()
        } else {
            format!("there is no action '{kind}'")
        };
        return Err((if kind.is_empty() { "action".to_owned() } else { kind }, why));
    }
    serde_json::from_value(action).map_err(|why| (kind, why.to_string()))
}

impl World {
    /// Does what an agent answered: first what it writes down, then what it says, then the rest. Whatever is refused, it is told
    /// why.
    pub fn answer(&mut self, who: AgentId, answer: Answer, bounds: Bounds<'_>) -> Outcome {
        let mut outcome = Outcome::default();
        let learns = |action: &Result<Action, _>| {
            matches!(action, Ok(Action::Set { .. } | Action::Delete { .. } | Action::Append { .. }))
        };
        let (first, rest): (Vec<_>, Vec<_>) = answer.actions.into_iter().partition(learns);
        self.act_all(who, first, bounds, &mut outcome);
        for Response { room, message } in answer.responses {
            match self.speak(room, who, &message, None, bounds.now) {
                Ok(()) => outcome.said += 1,
                Err(why) => {
                    self.refuse(who, "response", &why, bounds.now);
                    outcome.refused.push(why);
                }
            }
        }
        self.act_all(who, rest, bounds, &mut outcome);
        outcome
    }

    fn act_all(
        &mut self,
        who: AgentId,
        actions: Vec<Result<Action, (String, String)>>,
        bounds: Bounds<'_>,
        outcome: &mut Outcome,
    ) {
        for action in actions {
            let done = match action {
                Ok(action) => self.act(who, action, bounds),
                Err((kind, why)) => {
                    self.refuse(who, &kind, &why, bounds.now);
                    Err(why)
                }
            };
            match done {
                Ok(()) => outcome.done += 1,
                Err(why) => outcome.refused.push(why),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, Lot};

    fn read(text: &str) -> Answer {
        Answer::read(text, Output::Json, false).unwrap_or_else(|why| panic!("{text}: {why}"))
    }

    #[test]
    fn answers_come_in_many_shapes() {
        let expected = Answer {
            responses: vec![Response { room: AgentId(8), message: "Hello, you!".into() }],
            actions: vec![Ok(Action::Set {
                path: "character.mood".into(),
                value: json!("curious"),
                w: None,
            })],
            repaired: false,
        };
        let json = r#"{"responses": [{"room_id": 8, "message": "Hello, you!"}, {"room_id": 5, "message": "[no response]"}],
            "actions": [{"type": "set", "path": "character.mood", "value": "curious"}]}"#;
        assert_eq!(read(json), expected);
        assert_eq!(read(&format!("Here is my answer:\n```json\n{json}\n```\nI hope it helps.")), expected);
        assert_eq!(read(&format!("{json} and so on")), expected);
        let toon = "responses[1]{room_id,message}:\n  8,\"Hello, you!\"\nactions[1]{type,path,value}:\n  set,character.mood,curious";
        assert_eq!(read(toon), expected);
        assert_eq!(Answer::read(toon, Output::Toon, false).as_ref(), Ok(&expected));
        assert_eq!(Answer::read(json, Output::Toon, false).as_ref(), Ok(&expected));
        let words = r#"{"responses": {"8": "Hello, you!"}, "actions": {"type": "set", "path": "character.mood", "value": "curious"}}"#;
        assert_eq!(read(words), expected);
        let sent = r#"{"actions": [{"type": "send_message", "room_id": "8", "content": "Hello, you!"}]}"#;
        assert_eq!(read(sent).responses, expected.responses);
    }

    /// In TOON a word that looks like a number is one.
    #[test]
    fn numbers_may_be_words_and_words_numbers() {
        let toon = "responses[1]{room_id,message}:\n  \"8\",42\nactions[3]:\n  - type: create_key\n    key: 1234\n  - type: request_access\n    room_id: \"3\"\n    key: true\n  - type: set_attention\n    room_id: 8\n    value: 30";
        let answer = Answer::read(toon, Output::Toon, false).expect("an answer");
        assert_eq!(answer.responses, [Response { room: AgentId(8), message: "42".into() }]);
        let expected = [
            Action::CreateKey { key: "1234".into() },
            Action::RequestAccess { room_id: AgentId(3), key: "true".into() },
            Action::SetAttention { room_id: AgentId(8), value: "30".into() },
        ];
        assert_eq!(answer.actions, expected.map(Ok));
        // Nothing is taken for something else: of 2.10 only 2.1 is left when it is read.
        for (key, told) in [(r#"["a"]"#, r#"["a"]"#), ("2.10", "2.1"), ("4.0", "4.0")] {
            let answer = read(&format!(r#"{{"actions": [{{"type": "create_key", "key": {key}}}]}}"#));
            let why = format!("{told} is no text: write it in quotes");
            assert_eq!(answer.actions, [Err(("create_key".into(), why))], "{key}");
        }
    }

    #[test]
    fn what_is_broken_is_put_right_as_far_as_it_can_be() {
        let whole = r#"{"responses": [{"room_id": 8, "message": "Hello"}], "actions": [{"type": "delete", "path": "a"}]}"#;
        for end in 15..whole.len() {
            let Ok(answer) = Answer::read(&whole[..end], Output::Json, true) else {
                panic!("{}", &whole[..end])
            };
            assert!(answer.repaired, "{}", &whole[..end]);
            if end > 49 {
                assert_eq!(answer.responses[0].message, "Hello", "{}", &whole[..end]);
            }
        }
        assert_eq!(
            read("{\"responses\": [{\"room_id\": 1, \"message\": \"two\nlines\"},], \"actions\": [],}")
                .responses[0]
                .message,
            "two\nlines"
        );
        assert_eq!(
            read(r#"{"responses": [{"room_id": 1, "message": "cut off in the mid"#).responses[0].message,
            "cut off in the mid"
        );
        for nothing in ["", "I do not know.", "{}", "[1, 2]", "{\"a\": 1}", "```\n```"] {
            assert!(Answer::read(nothing, Output::Json, false).is_err(), "{nothing}");
        }
    }

    #[test]
    fn what_was_cut_off_is_not_done() {
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
            let answer = Answer::read(text, Output::Json, true).unwrap_or_else(|why| panic!("{text}: {why}"));
            let [Err((what, why))] = &answer.actions[..] else { panic!("{text}: {:?}", answer.actions) };
            assert!(what == kind && why.contains(cut), "{text}: {what}: {why}");
        }
        // What came before it is done, and so is what only looks like it.
        let two = r#"{"actions":[{"type":"delete","path":"a"},{"type":"delete","path":"b"#;
        assert_eq!(read(two).actions[0], Ok(Action::Delete { path: "a".into() }));
        for whole in
            ["actions[1]{type,path}:\n  delete,people", r#"{"actions":[{"type":"delete","path":"people"},]}"#]
        {
            assert_eq!(read(whole).actions, [Ok(Action::Delete { path: "people".into() })], "{whole}");
        }
        // Nobody speaks in a room whose number may be longer.
        let none = r#"{"responses":[{"room_id":3,"message":"a"},{"message":"to whom?","room_id":1"#;
        assert_eq!(read(none).responses, [Response { room: AgentId(3), message: "a".into() }]);
    }

    /// What should be a list and is none is told.
    #[test]
    fn what_is_no_list_says_so() {
        for (text, wrong) in [
            (r#"{"responses":"Hello all","actions":[]}"#, Some("responses are a list")),
            (r#"{"responses":[],"actions":"set a to b"}"#, Some("actions are a list")),
            ("responses: Hello\nactions: []", Some("responses are a list")),
            (r#"{"responses":null,"actions":""}"#, None),
        ] {
            let answer = read(text);
            let why =
                answer.actions.first().and_then(|action| action.as_ref().err()).map(|(_, why)| why.as_str());
            assert_eq!(why.is_some(), wrong.is_some(), "{text}: {why:?}");
            assert!(wrong.is_none_or(|part| why.is_some_and(|why| why.starts_with(part))), "{text}: {why:?}");
        }
    }

    /// Wherever it ends: as much of it as was said.
    #[test]
    fn toon_that_is_cut_off_is_put_right() {
        let whole = "responses[1]{room_id,message}:\n  1,\"She said: \\\"no\\\", and left\"\nactions[2]:\n  - type: reply\n    room_id: 1\n    message_id: 101\n    message: \"Is it so?\"\n  - type: delete\n    path: a.b";
        let [said, last] = ["actions", "- type: d"].map(|word| whole.find(word).expect("there"));
        for end in 30..whole.len() {
            let text = &whole[..end];
            let answer = Answer::read(text, Output::Toon, true).unwrap_or_else(|why| panic!("{text}: {why}"));
            if end >= said {
                assert_eq!(answer.responses[0].message, "She said: \"no\", and left", "{text}");
            }
            assert!(answer.repaired || !(said + 1..last).contains(&end), "{text}");
        }
        let cut = Answer::read(&whole[..said + 90], Output::Toon, true).expect("an answer");
        assert_eq!((cut.responses.len(), cut.actions.len(), cut.repaired), (1, 1, true));
        let whole = Answer::read(whole, Output::Toon, false).expect("an answer");
        assert!(!whole.repaired && whole.actions.iter().all(Result::is_ok) && whole.actions.len() == 2);
        // More than it says, and less.
        for count in [0, 1, 3, 9] {
            let text = format!("responses[{count}]{{room_id,message}}:\n  1,one\n  1,two\nactions: []");
            assert_eq!(
                Answer::read(&text, Output::Toon, false).map(|answer| answer.responses.len()),
                Ok(2),
                "{text}"
            );
        }
    }

    /// Whatever is said, in whatever form, wherever it ends: it is understood, and nobody says what was not said.
    #[test]
    fn what_is_cut_off_by_lot_is_understood() {
        for seed in 0..200 {
            let mut lot = Lot::new(seed);
            let said: Vec<String> = (0..=lot.below(2)).map(|_| testing::words(&mut lot, 8)).collect();
            let response = |message: &String| json!({"room_id": 1, "message": message});
            let whole = json!({
                "responses": said.iter().map(response).collect::<Vec<_>>(),
                "actions": [
                    {"type": "reply", "room_id": 1, "message_id": 7, "message": testing::words(&mut lot, 6)},
                    {"type": "set", "path": "a.b", "value": testing::words(&mut lot, 4)},
                    {"type": "retire_agent", "agent_id": 12},
                ],
            });
            let meant: Vec<Action> = read(&whole.to_string()).actions.into_iter().flatten().collect();
            assert_eq!(meant.len(), 3);
            let toon = toon_format::encode(&whole, &toon_format::EncodeOptions::default()).expect("TOON");
            let pretty = serde_json::to_string_pretty(&whole).expect("JSON");
            for (text, output) in
                [(whole.to_string(), Output::Json), (pretty, Output::Json), (toon, Output::Toon)]
            {
                let end = if output == Output::Toon { '\n' } else { '[' };
                let head = text.find(end).expect("a list") + 1;
                for end in (head..=text.len()).filter(|&end| text.is_char_boundary(end)) {
                    let text = &text[..end];
                    let answer = Answer::read(text, output, true)
                        .unwrap_or_else(|why| panic!("seed {seed}: {why}: {text}"));
                    for action in answer.actions.into_iter().flatten() {
                        assert!(meant.contains(&action), "seed {seed}: {action:?}: {text}");
                    }
                    for Response { message, .. } in answer.responses {
                        assert!(
                            said.iter().any(|whole| whole.starts_with(&message)),
                            "seed {seed}: {message:?}: {text}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_fence_within_a_message_is_no_answer() {
        let text = r#"{"responses": [{"room_id": 8, "message": "Try ```ls``` first"}], "actions": []}"#;
        for text in [text.to_owned(), format!("```json\n{text}\n```"), format!("Well:\n{text}\nThat is it.")]
        {
            assert_eq!(
                read(&text).responses,
                [Response { room: AgentId(8), message: "Try ```ls``` first".into() }]
            );
        }
        // However deep it goes, it is soon given up.
        assert!(Answer::read(&"[{".repeat(30_000), Output::Json, true).is_err());
    }

    #[test]
    fn what_is_no_action_says_why() {
        let answer = read(
            r#"{"actions": [{"type": "fly"}, {"type": "react", "message_id": 1, "reaction": "fire"}, {"path": "x"},
            {"type": "react", "message_id": "12", "reaction": "heart"}], "responses": [{"message": "where?"}]}"#,
        );
        let why: Vec<&str> =
            answer.actions.iter().filter_map(|a| a.as_ref().err()).map(|(_, why)| why.as_str()).collect();
        assert_eq!(why[0], "a response has a room_id and a message");
        assert_eq!(why[1], "there is no action 'fly'");
        assert!(why[2].contains("fire"), "{}", why[2]);
        assert_eq!(why[3], "an action has a type");
        assert!(
            answer.actions.iter().any(|action| matches!(action, Ok(Action::React { message_id: 12, .. })))
        );
    }
}
