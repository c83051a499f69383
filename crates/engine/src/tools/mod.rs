//! The model's tools: it keeps notes, JSON files of its conversation, and changes them with jq and with patches. Only its
//! own text can call a tool; text of the user, of a file or of a tool result never does.

pub mod call;
pub mod jq;
pub mod notes;
pub mod patch;

use call::ToolCall;
use halo_core::Error;
use halo_core::store::{RecordKind, Store};
use jq::JqRunner;
use serde_json::Value;

/// The most files of a conversation.
const MAX_FILES: usize = 16;
/// The most bytes of all files of a conversation together.
const MAX_TOTAL_BYTES: usize = 4 * jq::MAX_DOCUMENT_BYTES;

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
    let other_bytes = |name: &str| -> usize {
        files.iter().filter(|record| record.key != name).map(|record| record.value.len()).sum()
    };
    let work = || -> Result<(String, Option<FileWrite>), String> {
        match call::parse_command(command)? {
            ToolCall::Jq { filter, file: name, write, page } => {
                let document = file(&name)?;
                let mut results = runner.run(&filter, &document)?;
                if !write {
                    return Ok((notes::result_page(&results, call::without_page(command), page)?, None));
                }
                match results.len() {
                    1 => {
                        let others = other_bytes(&name);
                        prepare_write(name, &document, results.remove(0), others, now)
                    }
                    n => Err(format!("a file can keep one result, and there are {n}")),
                }
            }
            ToolCall::Patch { file: name, patch } => {
                let document = file(&name)?;
                let patched = patch::apply_patch(&document, &patch)?;
                let others = other_bytes(&name);
                prepare_write(name, &document, patched, others, now)
            }
        }
    };
    let result = |ok, result| ToolCallResult { command: command.to_owned(), ok, result };
    Ok(match work() {
        Err(error) => result(false, error),
        Ok((text, None)) => result(true, text),
        Ok((text, Some(FileWrite { name, content }))) => {
            store.put_record(conversation, RecordKind::Note, &name, content.as_deref())?;
            result(true, text)
        }
    })
}

/// A file that is written; without content it is removed.
struct FileWrite {
    name: String,
    content: Option<String>,
}

/// The new content of a file, and a description of its changes. `other_bytes` is the size of the other files. Files that are
/// too large already, such as imported ones, may become smaller.
fn prepare_write(
    name: String,
    old: &Value,
    mut new: Value,
    other_bytes: usize,
    now: i64,
) -> Result<(String, Option<FileWrite>), String> {
    if new.is_null() {
        return Ok((format!("{name} is removed"), Some(FileWrite { name, content: None })));
    }
    let bytes = patch::estimate_bytes(&new);
    let grows = bytes >= patch::estimate_bytes(old);
    if grows && bytes > jq::MAX_DOCUMENT_BYTES {
        return Err(format!("{name} would be larger than {} KiB", jq::MAX_DOCUMENT_BYTES / 1024));
    }
    if grows && bytes + other_bytes > MAX_TOTAL_BYTES {
        return Err(format!(
            "all files together would be larger than {} KiB; jq 'null' FILE > output removes one",
            MAX_TOTAL_BYTES / 1024
        ));
    }
    let changes = notes::describe_changes(old, &new);
    notes::set_modified_time(&mut new, now);
    Ok((changes, Some(FileWrite { name, content: Some(new.to_string()) })))
}

/// The part of the system prompt about tools, with a preview of the notes in at most `max_preview_bytes`.
#[must_use]
pub fn tool_instructions(notes: Option<&Value>, max_preview_bytes: usize) -> String {
    let empty = notes::empty_notes(0);
    let notes = notes::preview(notes.unwrap_or(&empty), max_preview_bytes);
    format!(
        "## Tool use\nYou keep notes in notes.json. To read them, write <tool>jq '.topics' notes.json</tool>. To change \
         them, write <tool>jq '.context.name = \"Ada\"' notes.json > output</tool>. The result follows your call; then go \
         on.\nYour notes: {notes}"
    )
}
