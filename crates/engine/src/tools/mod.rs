//! The model's tools: it keeps notes, JSON files of its conversation, and changes them with jq and with patches. Only its
//! own text can call a tool; text of the user, of a file or of a tool result never does.

pub mod call;
pub mod jq;
pub mod notes;
mod patch;

use call::ToolCall;
use halo_core::Error;
use halo_core::store::{RecordKind, Store};
use jq::JqRunner;
use serde_json::Value;

/// The most files of a conversation.
const MAX_FILES: usize = 16;

/// The result of a tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCallResult {
    pub command: String,
    pub ok: bool,
    /// The result, or the error.
    pub result: String,
}

impl ToolCallResult {
    /// As it is written to the timeline: `⚙️【command】→ ✓ result`.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mark = if self.ok { '✓' } else { '❌' };
        // A result must not look like a call: the model would imitate it.
        let escape = |text: &str| text.replace(call::OPEN_TAG, "‹tool›").replace(call::CLOSE_TAG, "‹/tool›");
        format!("\n⚙️【{}】→ {mark} {}\n", escape(&self.command), escape(&self.result))
    }
}

/// Runs a command on the files of a conversation. `now` is in milliseconds since 1970.
pub fn run_command(
    command: &str,
    runner: &JqRunner,
    now: i64,
    conversation: &str,
    store: &mut dyn Store,
) -> Result<ToolCallResult, Error> {
    let files = store.records(conversation, RecordKind::Note)?;
    let file = |name: &str| -> Result<Value, String> {
        match files.iter().find(|record| record.key == name) {
            Some(record) => serde_json::from_str(&record.value).map_err(|_| format!("{name} is damaged")),
            None if name == notes::NOTES_FILE => Ok(notes::empty_notes(now)),
            None if files.len() >= MAX_FILES => Err(format!("there are {MAX_FILES} files already")),
            None => Ok(Value::Null),
        }
    };
    let work = || -> Result<(String, Option<(String, Value)>), String> {
        match call::parse_command(command)? {
            ToolCall::Jq { filter, file: name, write } => {
                let document = file(&name)?;
                let mut results = runner.run(&filter, &document)?;
                if !write {
                    let values: Vec<String> = results.iter().map(notes::format_value).collect();
                    return Ok((if values.is_empty() { "nothing".into() } else { values.join(" ") }, None));
                }
                match results.len() {
                    1 => prepare_write(name, &document, results.remove(0), now),
                    n => Err(format!("a file can keep one result, and there are {n}")),
                }
            }
            ToolCall::Patch { file: name, patch } => {
                let document = file(&name)?;
                let patched = patch::apply_patch(&document, &patch)?;
                prepare_write(name, &document, patched, now)
            }
        }
    };
    let result = |ok, result| ToolCallResult { command: command.to_owned(), ok, result };
    Ok(match work() {
        Err(error) => result(false, error),
        Ok((text, None)) => result(true, text),
        Ok((text, Some((name, value)))) => {
            store.put_record(conversation, RecordKind::Note, &name, Some(&value.to_string()))?;
            result(true, text)
        }
    })
}

/// The new content of a file, and a description of its changes.
fn prepare_write(
    name: String,
    old: &Value,
    mut new: Value,
    now: i64,
) -> Result<(String, Option<(String, Value)>), String> {
    if patch::estimate_bytes(&new) > jq::MAX_DOCUMENT_BYTES {
        return Err(format!("{name} would be larger than {} KiB", jq::MAX_DOCUMENT_BYTES / 1024));
    }
    let changes = notes::describe_changes(old, &new);
    notes::set_modified_time(&mut new, now);
    Ok((changes, Some((name, new))))
}

/// The part of the system prompt about tools, with a preview of the notes.
#[must_use]
pub fn tool_instructions(notes: Option<&Value>) -> String {
    let notes = notes.map_or_else(|| notes::preview(&notes::empty_notes(0)), notes::preview);
    format!(
        "## Tool use\nYou keep notes in notes.json. To read them, write <tool>jq '.topics' notes.json</tool>. To change \
         them, write <tool>jq '.context.name = \"Ada\"' notes.json > output</tool>. The result follows your call; then go \
         on.\nYour notes: {notes}"
    )
}
