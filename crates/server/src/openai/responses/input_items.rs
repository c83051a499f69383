//! The messages of a request, as the items that its client sent.

use super::parse_stored;
use super::record::ResponseRecord;
use crate::app::App;
use crate::error::ApiResult;
use crate::openai::chat_response::call_id;
use halo_core::token::{Role, TurnId};
use halo_engine::conversation::load_messages;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The items that a response answered, without those of the responses before it.
pub(super) fn input_items(
    app: &App,
    conversation: &str,
    response: &str,
    record: &ResponseRecord,
) -> ApiResult<Vec<Value>> {
    let Some(last) = record.turn.0.checked_sub(1).map(TurnId) else { return Ok(Vec::new()) };
    let messages = app.with_reader(|store| load_messages(store, conversation, record.first..=last))?;
    let mut format = InputItemFormat { app, response, ids: &record.call_ids, calls: (0, 0) };
    Ok(messages.iter().flat_map(|(turn, role, text)| format.items(*turn, *role, text)).collect())
}

/// Writes the messages of a request as items.
struct InputItemFormat<'a> {
    app: &'a App,
    response: &'a str,
    /// The ids of calls that are known, by turn.
    ids: &'a BTreeMap<u32, Vec<String>>,
    /// The turn of the last calls, and how many of them have a result.
    calls: (u32, usize),
}

impl InputItemFormat<'_> {
    /// The id of a call: the one that the client knows, or one that is made of its turn.
    fn call_id(&self, turn: TurnId, caller: u32, index: usize) -> String {
        let place = if turn.0 == caller { index } else { 0 };
        let known = self.ids.get(&turn.0).and_then(|ids| ids.get(place)).cloned();
        known.unwrap_or_else(|| call_id(&format!("turn_{caller}"), index))
    }

    fn items(&mut self, turn: TurnId, role: Role, text: &str) -> Vec<Value> {
        // The items of the answer have numbers, those of the input have the letter of their kind and the turn.
        let number = self.response.trim_start_matches("resp_");
        let id = |kind: &str| format!("{kind}_{number}_i{}", turn.0);
        let message = |role: &str, part: &str, text: &str| {
            let content = json!([{ "type": part, "text": text }]);
            json!({
                "type": "message", "id": id("msg"), "status": "completed", "role": role, "content": content,
            })
        };
        match role {
            Role::System | Role::User => vec![message(role.name(), "input_text", text)],
            Role::Tool => {
                let (caller, answered) = self.calls;
                self.calls.1 += 1;
                let call_id = self.call_id(turn, caller, answered);
                vec![json!({
                    "type": "function_call_output", "id": id("fco"), "status": "completed", "call_id": call_id,
                    "output": text,
                })]
            }
            Role::Assistant => {
                let answer = parse_stored(self.app, text, None);
                self.calls = (turn.0, 0);
                let mut items = Vec::new();
                if !answer.text.is_empty() {
                    items.push(message("assistant", "output_text", &answer.text));
                }
                items.extend(answer.calls.iter().enumerate().map(|(n, call)| {
                    json!({
                        "type": "function_call", "id": format!("{}c{n}", id("fc")), "status": "completed",
                        "call_id": self.call_id(turn, turn.0, n), "name": call.name, "arguments": call.arguments,
                    })
                }));
                items
            }
        }
    }
}
