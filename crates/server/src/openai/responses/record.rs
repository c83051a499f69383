//! Which turn of which conversation a response is. A record has no text: that is on the timeline alone, so that it can be
//! forgotten there.

use super::format::ResponseUsage;
use crate::app::App;
use crate::error::{ApiResult, ErrorResponse};
use halo_core::Error;
use halo_core::store::RecordKind;
use halo_core::token::TurnId;
use serde_json::{Value, json};

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
}

impl ResponseRecord {
    pub fn to_json(&self) -> String {
        let ResponseUsage { input, cached, output, reasoning } = self.usage;
        json!({
            "first": self.first.0,
            "turn": self.turn.0,
            "created": self.created,
            "status": self.status,
            "usage": [input, cached, output, reasoning],
            "previous": self.previous,
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
        })
    }
}

/// The conversation of a response, and its record.
pub(super) fn find_response(app: &App, id: &str) -> ApiResult<(String, ResponseRecord)> {
    let found = app.with_reader(|store| {
        let mut conversations = store.list_conversations()?;
        // Mostly a response is asked for in the conversation that has just changed.
        conversations.sort_by_key(|summary| std::cmp::Reverse(summary.updated));
        for summary in conversations {
            let records = store.records(&summary.name, RecordKind::Response)?;
            if let Some(record) = records.iter().find(|record| record.key == id) {
                return Ok::<_, Error>(Some((summary.name, record.value.clone())));
            }
        }
        Ok(None)
    })?;
    let missing = || {
        let message = format!("there is no response '{id}'; one with store false is not kept");
        ErrorResponse::not_found(message)
    };
    let (name, value) = found.ok_or_else(missing)?;
    Ok((name, ResponseRecord::from_json(&value).ok_or_else(missing)?))
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
        };
        assert_eq!(ResponseRecord::from_json(&record.to_json()), Some(record));
        assert_eq!(ResponseRecord::from_json("{}"), None);
    }
}
