//! Which turn of which conversation a response is. A record has no message: those are on the timeline alone, so that they can be
//! forgotten there. What a client chose beside them (metadata, instructions, functions) is deleted with any text of the conversation.

use super::format::ResponseUsage;
use crate::app::App;
use crate::error::{ApiResult, ErrorResponse};
use halo_core::Error;
use halo_core::store::RecordKind;
use halo_core::token::TurnId;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A response that can be read and continued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ResponseRecord {
    /// The first turn of its input.
    pub first: TurnId,
    /// The turn of its answer.
    pub turn: TurnId,
    /// In seconds since 1970.
    pub created: i64,
    pub status: String,
    pub usage: ResponseUsage,
    pub previous: Option<String>,
    /// The ids of calls in its input, by turn: those of an answer's calls, or that of the call whose result the turn is.
    pub call_ids: BTreeMap<u32, Vec<String>>,
    /// The parameters of the request, as the response repeats them; null where they were deleted.
    pub parameters: Value,
}

/// The key of the ids of calls. A client chooses them, so they are deleted when text of the conversation is forgotten.
const CALL_IDS: &str = halo_engine::forget::RESPONSE_CALL_IDS;

const PARAMETERS: &str = halo_engine::forget::RESPONSE_PARAMETERS;

/// Longer ids, and such with other characters, are not kept.
const MAX_ID_CHARS: usize = 64;

/// The ids that are kept of a message.
pub(super) fn kept_ids(ids: &[String]) -> Vec<String> {
    let is_id = |id: &String| {
        let is_id_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        (1..=MAX_ID_CHARS).contains(&id.len()) && id.chars().all(is_id_char)
    };
    if ids.iter().all(is_id) { ids.to_vec() } else { Vec::new() }
}

impl ResponseRecord {
    /// The names of the functions that the answer could call; none where they were deleted.
    pub fn offered_functions(&self) -> Option<Vec<String>> {
        let names = |tools: &Vec<Value>| {
            tools.iter().filter_map(|tool| tool["name"].as_str()).map(str::to_owned).collect()
        };
        self.parameters["tools"].as_array().map(names)
    }

    pub fn to_json(&self) -> String {
        let ResponseUsage { input, cached, output, reasoning } = self.usage;
        json!({
            "first": self.first.0,
            "turn": self.turn.0,
            "created": self.created,
            "status": self.status,
            "usage": [input, cached, output, reasoning],
            "previous": self.previous,
            CALL_IDS: self.call_ids,
            PARAMETERS: self.parameters,
        })
        .to_string()
    }

    fn from_json(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text).ok()?;
        let turn = |key: &str| value[key].as_u64().and_then(|turn| u32::try_from(turn).ok()).map(TurnId);
        let count = |n: usize| value["usage"][n].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
        Some(Self {
            first: turn("first")?,
            turn: turn("turn")?,
            created: value["created"].as_i64()?,
            status: value["status"].as_str()?.to_owned(),
            usage: ResponseUsage { input: count(0), cached: count(1), output: count(2), reasoning: count(3) },
            previous: value["previous"].as_str().map(str::to_owned),
            // Records of earlier versions have none.
            call_ids: serde_json::from_value(value[CALL_IDS].clone()).unwrap_or_default(),
            parameters: value[PARAMETERS].clone(),
        })
    }
}

/// The conversation of a response, and its record.
pub(super) fn find_response(app: &App, id: &str) -> ApiResult<(String, ResponseRecord)> {
    let known = app.response_index.conversation(id);
    let found = app.with_reader(|store| {
        if let Some(name) = known
            && let Some(record) = store.record(&name, RecordKind::Response, id)?
        {
            return Ok::<_, Error>(Some((name, record)));
        }
        store.find_record(RecordKind::Response, id)
    })?;
    let missing = || {
        let message = format!("there is no response '{id}'; one with store false is not kept");
        ErrorResponse::not_found(message)
    };
    let (name, record) = found.ok_or_else(missing)?;
    app.response_index.insert(id, &name);
    Ok((name, ResponseRecord::from_json(&record.value).ok_or_else(missing)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_record_round_trips() {
        let record = ResponseRecord {
            first: TurnId(3),
            turn: TurnId(5),
            created: 1_700_000_000,
            status: "completed".into(),
            usage: ResponseUsage { input: 7, cached: 3, output: 2, reasoning: 1 },
            previous: Some("resp_1".into()),
            call_ids: BTreeMap::from([(4, vec!["call_1".into(), "call_2".into()])]),
            parameters: json!({ "metadata": { "a": "b" } }),
        };
        let json = record.to_json();
        assert_eq!(ResponseRecord::from_json(&json), Some(record.clone()));
        let mut older: Value = serde_json::from_str(&json).expect("JSON");
        older.as_object_mut().and_then(|fields| fields.remove(CALL_IDS)).expect("the ids");
        older.as_object_mut().and_then(|fields| fields.remove(PARAMETERS)).expect("the parameters");
        let without_ids = ResponseRecord { call_ids: BTreeMap::new(), parameters: Value::Null, ..record };
        assert_eq!(ResponseRecord::from_json(&older.to_string()), Some(without_ids));
        assert_eq!(ResponseRecord::from_json("{}"), None);
    }

    #[test]
    fn response_keeps_ids_without_words_between_spaces() {
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<String>>();
        let good = ids(&["call_1", "toolu-A7"]);
        assert_eq!(kept_ids(&good), good);
        for bad in ["", "two words", "ü", "<|im_end|>", &"x".repeat(65)] {
            assert!(kept_ids(&ids(&["call_1", bad])).is_empty(), "{bad}");
        }
    }
}
