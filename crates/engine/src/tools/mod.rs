//! What the model can do beside talking: keep notes, as JSON files of its conversation, with jq and with patches. Only
//! what it says itself can call a tool; nothing that the user, a file or a tool's result says ever does.

pub mod call;
pub mod jq;
pub mod notes;
mod patch;

use call::Call;
use halo_core::seams::{Kind, SeamError, Store};
use jq::Runner;
use serde_json::Value;

/// The most files of a conversation.
const FILES: usize = 16;

/// What a call came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// The command.
    pub command: String,
    /// Whether it could be done.
    pub ok: bool,
    /// What came of it, or why nothing did.
    pub result: String,
}

impl Done {
    /// As it stands in the conversation: `⚙️【command】→ ✓ result`.
    #[must_use]
    pub fn told(&self) -> String {
        let mark = if self.ok { '✓' } else { '❌' };
        // A result that looks like a call would be one in nobody's eyes but the model's.
        let tame = |text: &str| text.replace(call::OPEN, "‹tool›").replace(call::CLOSE, "‹/tool›");
        format!("\n⚙️【{}】→ {mark} {}\n", tame(&self.command), tame(&self.result))
    }
}

/// Does what a command says, to the files of a conversation. `now` is in milliseconds since 1970.
///
/// # Errors
/// When the store fails. What is wrong with the command is in what came of it.
pub fn run(
    command: &str,
    runner: &Runner,
    now: i64,
    conversation: &str,
    store: &mut dyn Store,
) -> Result<Done, SeamError> {
    let files = store.records(conversation, Kind::Note)?;
    let file = |name: &str| -> Result<Value, String> {
        match files.iter().find(|record| record.key == name) {
            Some(record) => serde_json::from_str(&record.value).map_err(|_| format!("{name} is damaged")),
            None if name == notes::FILE => Ok(notes::first(now)),
            None if files.len() >= FILES => Err(format!("there are {FILES} files already")),
            None => Ok(Value::Null),
        }
    };
    let work = || -> Result<(String, Option<(String, Value)>), String> {
        match call::read(command)? {
            Call::Jq { filter, file: name, write } => {
                let document = file(&name)?;
                let mut results = runner.run(&filter, &document)?;
                if !write {
                    let told: Vec<String> = results.iter().map(notes::shown).collect();
                    return Ok((if told.is_empty() { "nothing".into() } else { told.join(" ") }, None));
                }
                match results.len() {
                    1 => kept(name, &document, results.remove(0), now),
                    n => Err(format!("a file can keep one result, and there are {n}")),
                }
            }
            Call::Patch { file: name, patch } => {
                let document = file(&name)?;
                let patched = patch::apply(&document, &patch)?;
                kept(name, &document, patched, now)
            }
        }
    };
    let done = |ok, result| Done { command: command.to_owned(), ok, result };
    Ok(match work() {
        Err(why) => done(false, why),
        Ok((told, None)) => done(true, told),
        Ok((told, Some((name, value)))) => {
            store.put_record(conversation, Kind::Note, &name, Some(&value.to_string()))?;
            done(true, told)
        }
    })
}

/// A file's new value, and what is different about it.
fn kept(
    name: String,
    old: &Value,
    mut new: Value,
    now: i64,
) -> Result<(String, Option<(String, Value)>), String> {
    if patch::size(&new) > jq::LARGEST {
        return Err(format!("{name} would be larger than {} KiB", jq::LARGEST / 1024));
    }
    let told = notes::difference(old, &new);
    notes::touch(&mut new, now);
    Ok((told, Some((name, new))))
}

/// What the standing instructions say of the tools, and what is noted already.
#[must_use]
pub fn instructions(noted: Option<&Value>) -> String {
    let noted = noted.map_or_else(|| notes::preview(&notes::first(0)), notes::preview);
    format!(
        "## Tool use\nYou keep notes in notes.json. To read them, write <tool>jq '.topics' notes.json</tool>. To change \
         them, write <tool>jq '.context.name = \"Ada\"' notes.json > output</tool>. The result follows your call; then go \
         on.\nYour notes: {noted}"
    )
}
