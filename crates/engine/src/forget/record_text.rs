//! Text in the records beside a timeline: the model's notes, summaries of clients, parameters of their requests, system
//! prompts, notes on false premises, names of speakers, the id of the last message.

use crate::chat_options::{PERSONA_KEY, SPEAKERS_KEY};
use crate::conversation::{MESSAGE_ID_KEY, SYSTEM_PROMPT_KEY};
use crate::turn_record::TurnRecord;
use halo_core::Error;
use halo_core::chunk_body::checksum_bytes;
use halo_core::store::{Record, RecordKind, Store};
use serde_json::Value;

/// The key of the ids of calls in a record of a response.
pub const RESPONSE_CALL_IDS: &str = "call_ids";

/// The key of the parameters of the request in a record of a response.
pub const RESPONSE_PARAMETERS: &str = "parameters";

const KINDS: [RecordKind; 6] = [
    RecordKind::Note,
    RecordKind::ClientSummary,
    RecordKind::SystemPrompt,
    RecordKind::Setting,
    RecordKind::Turn,
    RecordKind::Response,
];

/// A text in a record: an entry of the model's notes, or the whole record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordText {
    pub kind: RecordKind,
    /// Of its key and itself. It identifies the text while it waits to be forgotten: a list with the text itself, or with the
    /// name of a file of notes, would be another copy of the words.
    hash: u64,
}

impl RecordText {
    fn new(kind: RecordKind, key: &str, text: &str) -> Self {
        Self { kind, hash: checksum_bytes(format!("{key}\0{text}").as_bytes()) }
    }

    /// What it is, in words.
    #[must_use]
    pub fn describe(&self) -> &'static str {
        match self.kind {
            RecordKind::Note => "note",
            RecordKind::ClientSummary => "client's summary",
            RecordKind::SystemPrompt => "system prompt",
            RecordKind::Turn => "note on a turn",
            RecordKind::Response => "parameter of a response",
            _ => "setting",
        }
    }

    pub(super) fn to_value(&self) -> Value {
        serde_json::json!([self.kind.name(), format!("{:016x}", self.hash)])
    }

    pub(super) fn from_value(value: &Value) -> Option<Self> {
        let [kind, hash] = [0, 1].map(|n| value[n].as_str());
        let kind = RecordKind::ALL.into_iter().find(|other| Some(other.name()) == kind)?;
        Some(Self { kind, hash: u64::from_str_radix(hash?, 16).ok()? })
    }
}

/// The texts of a conversation's records, with themselves.
pub(super) fn list_record_texts(
    store: &mut dyn Store,
    conversation: &str,
) -> Result<Vec<(RecordText, String)>, Error> {
    let mut found = Vec::new();
    for kind in KINDS {
        for record in store.records(conversation, kind)? {
            let texts = texts_of(kind, &record);
            found.extend(texts.into_iter().map(|text| (RecordText::new(kind, &record.key, &text), text)));
        }
    }
    Ok(found)
}

fn texts_of(kind: RecordKind, record: &Record) -> Vec<String> {
    match kind {
        RecordKind::Note => {
            let mut texts = vec![record.key.clone()];
            collect_entries(&note_document(&record.value), &mut texts);
            texts
        }
        RecordKind::ClientSummary => vec![summary_text(&record.value)],
        RecordKind::SystemPrompt => vec![record.value.clone()],
        // The id of a message is text of its client, which may have made it of the message.
        RecordKind::Setting
            if [SYSTEM_PROMPT_KEY, SPEAKERS_KEY, PERSONA_KEY, MESSAGE_ID_KEY]
                .contains(&record.key.as_str()) =>
        {
            vec![record.value.clone()]
        }
        RecordKind::Turn => {
            let turn = TurnRecord::from_json(&record.value);
            turn.into_iter().flat_map(|turn| [turn.premise, turn.error]).flatten().collect()
        }
        RecordKind::Response => response_texts(&record.value),
        _ => Vec::new(),
    }
}

/// What a client has written in a request beside its messages: instructions, metadata, names, and what its functions do.
fn response_texts(value: &str) -> Vec<String> {
    let value: Value = serde_json::from_str(value).unwrap_or_default();
    let parameters = &value[RESPONSE_PARAMETERS];
    let mut texts = Vec::new();
    collect_entries(&parameters["metadata"], &mut texts);
    let fields =
        ["instructions", "user", "safety_identifier", "prompt_cache_key"].map(|name| &parameters[name]);
    let functions = parameters["tools"].as_array().into_iter().flatten();
    let functions = functions.flat_map(|tool| [&tool["name"], &tool["description"]]);
    texts.extend(fields.into_iter().chain(functions).filter_map(Value::as_str).map(str::to_owned));
    texts
}

/// A file of notes that is no JSON is one entry.
fn note_document(value: &str) -> Value {
    serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()))
}

fn summary_text(value: &str) -> String {
    let parsed: Value = serde_json::from_str(value).unwrap_or_default();
    parsed["text"].as_str().unwrap_or(value).to_owned()
}

/// The keys, texts and numbers of a document.
fn collect_entries(value: &Value, texts: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| {
            texts.push(key.clone());
            collect_entries(value, texts);
        }),
        Value::Array(all) => all.iter().for_each(|value| collect_entries(value, texts)),
        other => texts.extend(entry_text(other)),
    }
}

fn entry_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Deletes texts from the records of a conversation.
pub(super) fn delete_record_texts(
    store: &mut dyn Store,
    conversation: &str,
    texts: &[RecordText],
) -> Result<(), Error> {
    for kind in KINDS.into_iter().filter(|kind| texts.iter().any(|text| text.kind == *kind)) {
        for record in store.records(conversation, kind)? {
            let key = &record.key;
            let is_deleted = |text: &str| texts.contains(&RecordText::new(kind, key, text));
            if !texts_of(kind, &record).iter().any(|text| is_deleted(text)) {
                continue;
            }
            let rest = match kind {
                // A file whose name is deleted is deleted as a whole.
                RecordKind::Note if is_deleted(key) => None,
                RecordKind::Note => {
                    without_entries(note_document(&record.value), &is_deleted).map(|rest| rest.to_string())
                }
                RecordKind::Turn => TurnRecord::from_json(&record.value).map(|mut turn| {
                    turn.premise.take_if(|text| is_deleted(text));
                    turn.error.take_if(|text| is_deleted(text));
                    turn.to_json()
                }),
                RecordKind::Response => serde_json::from_str(&record.value).ok().map(|mut value: Value| {
                    value.as_object_mut().and_then(|fields| fields.remove(RESPONSE_PARAMETERS));
                    value.to_string()
                }),
                _ => None,
            };
            store.put_record(conversation, kind, key, rest.as_deref())?;
        }
    }
    Ok(())
}

/// A document without some of its entries; none where it is such an entry itself. A key is deleted with its value.
fn without_entries(value: Value, is_deleted: &dyn Fn(&str) -> bool) -> Option<Value> {
    match value {
        Value::Object(map) => {
            let kept = map.into_iter().filter(|(key, _)| !is_deleted(key));
            let kept = kept.filter_map(|(key, value)| Some((key, without_entries(value, is_deleted)?)));
            Some(Value::Object(kept.collect()))
        }
        Value::Array(all) => {
            Some(all.into_iter().filter_map(|value| without_entries(value, is_deleted)).collect())
        }
        other => (!entry_text(&other).is_some_and(|text| is_deleted(&text))).then_some(other),
    }
}
