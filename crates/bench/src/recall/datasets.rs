//! The three datasets, read into one form.

use halo_core::token::TurnId;
use jiff::civil::{Date, DateTime};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatasetFormat {
    /// LoCoMo: a file with a list of conversations; evidence such as `D3:7`.
    Locomo,
    /// REALTALK: one file per conversation.
    Realtalk,
    /// BEAM: one folder per conversation, with `chat.json` and `probing_questions.json`.
    Beam,
}

/// A conversation and its questions.
#[derive(Clone, Debug, Default)]
pub struct DatasetConversation {
    pub name: String,
    messages: Vec<DatasetMessage>,
    message_indices: BTreeMap<String, usize>,
    pub questions: Vec<DatasetQuestion>,
}

#[derive(Clone, Debug)]
struct DatasetMessage {
    speaker: String,
    user: bool,
    text: String,
    session: usize,
    at: Option<DateTime>,
}

#[derive(Clone, Debug)]
pub struct DatasetQuestion {
    pub text: String,
    pub kind: String,
    /// The messages that are needed to answer it.
    pub evidence: BTreeSet<String>,
}

pub fn read_dataset(data: &Path, format: DatasetFormat) -> Result<Vec<DatasetConversation>, String> {
    let mut files = Vec::new();
    let is_dataset_file = |path: &Path| match format {
        DatasetFormat::Beam => path.file_name().is_some_and(|name| name == "chat.json"),
        _ => path.extension().is_some_and(|e| e == "json"),
    };
    collect_files(data, &is_dataset_file, &mut files)?;
    files.sort();
    let mut all = Vec::new();
    for file in &files {
        let value = parse_json(file)?;
        let read = match format {
            DatasetFormat::Locomo => read_locomo(&value),
            DatasetFormat::Realtalk => read_realtalk(&value).map(|c| vec![c]),
            DatasetFormat::Beam => {
                read_beam(&value, &parse_json(&file.with_file_name("probing_questions.json"))?)
                    .map(|c| vec![c])
            }
        };
        let mut read = read.ok_or_else(|| format!("{} is not of that format", file.display()))?;
        for conversation in &mut read {
            if conversation.name.is_empty() {
                let named = if format == DatasetFormat::Beam { file.parent().unwrap_or(file) } else { file };
                conversation.name = named.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            }
        }
        all.extend(read);
    }
    if all.is_empty() {
        return Err(format!("{} contains nothing of that format", data.display()));
    }
    Ok(all)
}

fn collect_files(
    path: &Path,
    is_dataset_file: &dyn Fn(&Path) -> bool,
    files: &mut Vec<PathBuf>,
) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("cannot read {}: {e}", path.display());
    if path.is_dir() {
        for entry in std::fs::read_dir(path).map_err(failed)? {
            collect_files(&entry.map_err(failed)?.path(), is_dataset_file, files)?;
        }
    } else if is_dataset_file(path) {
        files.push(path.to_owned());
    } else if !path.exists() {
        return Err(format!("there is no {}", path.display()));
    }
    Ok(())
}

fn parse_json(path: &Path) -> Result<Value, String> {
    let bytes = std::fs::read(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    serde_json::from_slice(&bytes).map_err(|e| format!("{} is not JSON: {e}", path.display()))
}

fn text_field<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default().trim()
}

fn read_locomo(value: &Value) -> Option<Vec<DatasetConversation>> {
    let read = |one: &Value| {
        let chat = &one["conversation"];
        let mut conversation = DatasetConversation {
            name: text_field(one, "sample_id").to_owned(),
            ..DatasetConversation::default()
        };
        for (number, session) in sorted_sessions(chat)? {
            // "1:56 pm on 8 May, 2023"
            let at = DateTime::strptime(
                "%I:%M %p on %d %B, %Y",
                text_field(chat, &format!("session_{number}_date_time")),
            )
            .ok();
            for message in session.as_array()? {
                let text = with_caption(text_field(message, "text"), text_field(message, "blip_caption"));
                conversation.push_message(
                    text_field(message, "dia_id"),
                    text_field(message, "speaker"),
                    None,
                    text,
                    number,
                    at,
                );
            }
        }
        conversation.push_questions(&one["qa"])?;
        Some(conversation)
    };
    value.as_array()?.iter().map(read).collect()
}

fn read_realtalk(value: &Value) -> Option<DatasetConversation> {
    let mut conversation = DatasetConversation::default();
    for (number, session) in sorted_sessions(value)? {
        for message in session.as_array()? {
            let at = DateTime::strptime("%d.%m.%Y, %H:%M:%S", text_field(message, "date_time")).ok();
            let caption = match &message["blip_caption"] {
                Value::Array(all) => all.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" "),
                one => one.as_str().unwrap_or_default().to_owned(),
            };
            let text = with_caption(text_field(message, "clean_text"), caption.trim());
            conversation.push_message(
                text_field(message, "dia_id"),
                text_field(message, "speaker"),
                None,
                text,
                number,
                at,
            );
        }
    }
    conversation.push_questions(&value["qa"])?;
    Some(conversation)
}

/// `session_1`, `session_2`, … in order.
fn sorted_sessions(value: &Value) -> Option<Vec<(usize, &Value)>> {
    let number = |key: &str| key.strip_prefix("session_")?.parse::<usize>().ok();
    let mut all: Vec<_> = value.as_object()?.iter().filter_map(|(k, v)| Some((number(k)?, v))).collect();
    all.sort_by_key(|&(n, _)| n);
    (!all.is_empty()).then_some(all)
}

fn with_caption(text: &str, caption: &str) -> String {
    match (text, caption) {
        ("", "") => "[a picture]".into(),
        (text, "") => text.into(),
        (text, caption) => format!("{text} [shares {caption}]").trim().into(),
    }
}

fn read_beam(chat: &Value, questions: &Value) -> Option<DatasetConversation> {
    let mut conversation = DatasetConversation::default();
    let mut at = None;
    for (session, batch) in chat.as_array()?.iter().enumerate() {
        for turn in batch["turns"].as_array()? {
            let messages = turn.as_array().map_or(std::slice::from_ref(turn), Vec::as_slice);
            for message in messages {
                let anchor = [message, batch]
                    .into_iter()
                    .find_map(|m| parse_time_anchor(text_field(m, "time_anchor")));
                at = anchor.or(at);
                let text = text_field(message, "content");
                // Annotations of the dataset behind a message are not part of it.
                let text = text.rsplit_once("->->").map_or(text, |(text, _)| text.trim_end());
                let user = text_field(message, "role") == "user";
                conversation.push_message(
                    &message["id"].to_string(),
                    "",
                    Some(user),
                    text.to_owned(),
                    session,
                    at,
                );
            }
        }
    }
    for (kind, list) in questions.as_object()? {
        for question in list.as_array()? {
            let mut evidence = BTreeSet::new();
            collect_ids(&question["source_chat_ids"], &mut evidence);
            conversation.questions.push(DatasetQuestion {
                text: text_field(question, "question").to_owned(),
                kind: kind.clone(),
                evidence,
            });
        }
    }
    Some(conversation)
}

fn parse_time_anchor(anchor: &str) -> Option<DateTime> {
    Some(Date::strptime("%B-%d-%Y", anchor).ok()?.at(12, 0, 0, 0))
}

fn collect_ids(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Array(all) => all.iter().for_each(|v| collect_ids(v, into)),
        Value::Object(all) => all.values().for_each(|v| collect_ids(v, into)),
        Value::Null => {}
        Value::String(id) => drop(into.insert(id.clone())),
        id => drop(into.insert(id.to_string())),
    }
}

/// All references such as `D1:3` or `D:1:3` in a text, as `D1:3`.
fn parse_evidence_ids(text: &str) -> Vec<String> {
    let mut all = Vec::new();
    for piece in text.split('D').skip(1) {
        let piece = piece.strip_prefix(':').unwrap_or(piece);
        let Some((session, rest)) = piece.split_once(':') else { continue };
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        if !number.is_empty() && !session.is_empty() && session.bytes().all(|b| b.is_ascii_digit()) {
            all.push(format!("D{session}:{number}"));
        }
    }
    all
}

impl DatasetConversation {
    fn push_message(
        &mut self,
        id: &str,
        speaker: &str,
        user: Option<bool>,
        text: String,
        session: usize,
        at: Option<DateTime>,
    ) {
        // Of two people, the first is the user.
        let first = self.messages.first().map_or(speaker, |m| m.speaker.as_str());
        let user = user.unwrap_or(first == speaker);
        let id = parse_evidence_ids(id).pop().unwrap_or_else(|| id.to_owned());
        self.message_indices.entry(id).or_insert(self.messages.len());
        let text = if text.is_empty() { "…".into() } else { text };
        self.messages.push(DatasetMessage { speaker: speaker.to_owned(), user, text, session, at });
    }

    fn push_questions(&mut self, questions: &Value) -> Option<()> {
        const CATEGORIES: [&str; 5] = ["multi_hop", "temporal", "open_domain", "single_hop", "adversarial"];
        for question in questions.as_array()? {
            let kind = question["category"].as_u64().unwrap_or(0) as usize;
            let evidence = match &question["evidence"] {
                Value::Array(all) => {
                    all.iter().filter_map(Value::as_str).flat_map(parse_evidence_ids).collect()
                }
                one => {
                    one.as_str().map_or(BTreeSet::new(), |one| parse_evidence_ids(one).into_iter().collect())
                }
            };
            self.questions.push(DatasetQuestion {
                text: text_field(question, "question").to_owned(),
                kind: CATEGORIES
                    .get(kind.wrapping_sub(1))
                    .map_or_else(|| kind.to_string(), |k| (*k).to_owned()),
                evidence,
            });
        }
        Some(())
    }

    /// The turn of the message of that name.
    #[must_use]
    pub fn turn_of(&self, id: &str) -> Option<TurnId> {
        self.message_indices.get(id).map(|&place| TurnId(place as u32))
    }

    #[must_use]
    pub fn session_of(&self, turn: TurnId) -> Option<usize> {
        self.messages.get(turn.0 as usize).map(|m| m.session)
    }

    /// The messages in order: speaker, whether that is the user, and text.
    pub fn messages(&self) -> impl ExactSizeIterator<Item = (&str, bool, &str)> {
        self.messages.iter().map(|m| (m.speaker.as_str(), m.user, m.text.as_str()))
    }

    /// The time of the last session.
    #[must_use]
    pub fn last_date(&self) -> Option<Date> {
        self.messages.iter().filter_map(|m| m.at).map(DateTime::date).max()
    }

    /// The conversation as a chat that the importer reads.
    pub(super) fn to_sillytavern(&self) -> String {
        let line = |m: &DatasetMessage| {
            let at = m.at.map_or(Value::Null, |at| json!(format!("{at}Z")));
            json!({ "name": m.speaker, "is_user": m.user, "mes": m.text, "send_date": at }).to_string() + "\n"
        };
        self.messages.iter().map(line).collect()
    }

    /// A fingerprint of the conversation and of how it is read, for the cache of embeddings.
    pub(super) fn checksum(&self) -> u64 {
        xxh3_64(self.to_sillytavern().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dataset_evidence_ids_are_parsed_in_all_spellings() {
        for (text, expected) in [
            ("D1:3", vec!["D1:3"]),
            ("D:1:3", vec!["D1:3"]),
            ("D8:6; D9:17", vec!["D8:6", "D9:17"]),
            ("D9:1 D4:4 D4:6", vec!["D9:1", "D4:4", "D4:6"]),
            ("D", vec![]),
            ("Dx:1", vec![]),
        ] {
            assert_eq!(parse_evidence_ids(text), expected, "{text}");
        }
    }

    #[test]
    fn dataset_formats_are_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, value: &Value| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().expect("it has one")).expect("made");
            std::fs::write(path, value.to_string()).expect("written");
        };
        let question = |id: &str| json!([{ "question": "Who?", "evidence": [id], "category": 1 }]);
        write(
            "l/one.json",
            &json!([{ "sample_id": "c", "qa": question("D:2:1"), "conversation": {
            "session_10": [], "session_2_date_time": "1:56 pm on 8 May, 2023",
            "session_2": [{ "speaker": "A", "dia_id": "D2:1", "text": "Hi", "blip_caption": "a cat" },
                          { "speaker": "B", "dia_id": "D2:2", "text": "" }] } }]),
        );
        write(
            "r/Chat.json",
            &json!({ "qa": question("D1:1"), "session_1": [
            { "clean_text": "Hi", "speaker": "A", "date_time": "29.12.2023, 22:42:04", "dia_id": "D1:1" }] }),
        );
        write(
            "b/7/chat.json",
            &json!([{ "turns": [[
            { "role": "user", "id": 0, "time_anchor": "March-15-2024", "content": "Hi ->-> 1,1" },
            { "role": "assistant", "id": 1, "content": "Hello" }]] }]),
        );
        write(
            "b/7/probing_questions.json",
            &json!({ "easy": [{ "question": "Who?", "source_chat_ids": { "a": [1] } }] }),
        );
        let one = |folder_name: &str, format| {
            let mut all = read_dataset(&folder.path().join(folder_name), format).expect("read");
            assert_eq!(all.len(), 1);
            all.pop().expect("one")
        };
        let locomo = one("l", DatasetFormat::Locomo);
        assert_eq!(
            locomo.to_sillytavern(),
            "{\"name\":\"A\",\"is_user\":true,\"mes\":\"Hi [shares a cat]\",\"send_date\":\"2023-05-08T13:56:00Z\"}\n\
             {\"name\":\"B\",\"is_user\":false,\"mes\":\"[a picture]\",\"send_date\":\"2023-05-08T13:56:00Z\"}\n"
        );
        assert_eq!(
            locomo.questions[0].evidence.iter().map(|e| locomo.turn_of(e)).collect::<Vec<_>>(),
            [Some(TurnId(0))]
        );
        assert_eq!((locomo.questions[0].kind.as_str(), locomo.session_of(TurnId(1))), ("multi_hop", Some(2)));
        let realtalk = one("r", DatasetFormat::Realtalk);
        assert_eq!(
            (realtalk.name.as_str(), realtalk.last_date()),
            ("Chat", Some(jiff::civil::date(2023, 12, 29)))
        );
        let beam = one("b", DatasetFormat::Beam);
        assert!(
            beam.to_sillytavern().contains("\"mes\":\"Hi\",\"send_date\":\"2024-03-15T12:00:00Z\""),
            "{}",
            beam.to_sillytavern()
        );
        assert_eq!(beam.turn_of(beam.questions[0].evidence.first().expect("one")), Some(TurnId(1)));
        for (place, format) in
            [("l", DatasetFormat::Realtalk), ("r", DatasetFormat::Locomo), ("l/nowhere", DatasetFormat::Beam)]
        {
            assert!(read_dataset(&folder.path().join(place), format).is_err(), "{place}");
        }
    }
}
