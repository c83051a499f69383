//! `halo memories`: lists, searches, forms and edits memories.

use super::conversations::{ConversationArgs, open_existing};
use crate::env::Env;
use crate::error::not_found;
use crate::output::{pluralize, print_json, print_notice, print_stdout};
use crate::wiring;
use anyhow::{Result, bail};
use halo_core::store::{Access, Store};
use halo_engine::event::Event;
use halo_engine::memory::{self, Memory, MemoryEdit};
use serde_json::{Value, json};

#[derive(clap::Args)]
pub struct MemoriesArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// List memories of all conversations
    #[arg(long)]
    all: bool,
    /// Search memories, best match first
    #[arg(long, short = 'f', value_name = "WORDS")]
    find: Option<String>,
    #[command(subcommand)]
    command: Option<MemoriesCommand>,
}

#[derive(clap::Subcommand)]
enum MemoriesCommand {
    /// Create the memories that are due now, without waiting for idle time
    Form,
    /// Change the text of a memory
    Edit {
        /// Id of the memory
        id: u64,
        /// New text of the memory
        text: String,
    },
    /// Pin a memory: place it before others
    Pin {
        /// Id of the memory
        id: u64,
    },
    /// Unpin a memory: place it like others
    Unpin {
        /// Id of the memory
        id: u64,
    },
    /// Disable a memory: keep it, but do not place it in the context
    Disable {
        /// Id of the memory
        id: u64,
    },
    /// Enable a memory that is disabled
    Enable {
        /// Id of the memory
        id: u64,
    },
    /// Delete a memory; the text it covers stays, and it is not created again
    Delete {
        /// Id of the memory
        id: u64,
    },
}

pub fn run(options: &MemoriesArgs, env: &Env) -> Result<()> {
    let name = &options.conversation.name;
    if options.command.is_some() && (options.all || options.find.is_some()) {
        bail!("--all and --find list memories; to change one, name its conversation (-c NAME) and its id");
    }
    let (id, order) = match &options.command {
        None => return list_memories(options, env),
        Some(MemoriesCommand::Form) => return form_due_memories(name, env),
        Some(MemoriesCommand::Edit { id, text }) => (*id, MemoryEdit::SetText(text.clone())),
        Some(MemoriesCommand::Pin { id }) => (*id, MemoryEdit::Pin(true)),
        Some(MemoriesCommand::Unpin { id }) => (*id, MemoryEdit::Pin(false)),
        Some(MemoriesCommand::Disable { id }) => (*id, MemoryEdit::Disable(true)),
        Some(MemoriesCommand::Enable { id }) => (*id, MemoryEdit::Disable(false)),
        Some(MemoriesCommand::Delete { id }) => (*id, MemoryEdit::Delete),
    };
    let (mut store, _timeline) = open_existing(env, name, Access::Write)?;
    let mut memories = memory::load_memories(&mut store, name)?;
    let deleted = order == MemoryEdit::Delete;
    memory::apply_memory_edit(&mut store, name, &mut memories, id, order)?;
    match memories.iter().find(|memory| memory.id == id) {
        Some(memory) if env.json => print_json(&memory_json(name, memory)),
        Some(memory) => print_stdout(&memory_text(memory)),
        None if env.json => print_json(&json!({ "deleted": deleted, "id": id })),
        None => print_stdout(&format!("memory {id} was deleted; the text it covers stays\n")),
    }
}

fn list_memories(options: &MemoriesArgs, env: &Env) -> Result<()> {
    let names: Vec<String> = if options.all {
        let store = env.open_store_read_only()?.map(|mut store| store.list_conversations()).transpose()?;
        store.unwrap_or_default().into_iter().map(|known| known.name).collect()
    } else {
        vec![options.conversation.name.clone()]
    };
    let mut found: Vec<(String, f64, Memory)> = Vec::new();
    for name in names {
        let (mut store, _timeline) = open_existing(env, &name, Access::Read)?;
        let memories = memory::load_memories(&mut store, &name)?;
        let ranked = match &options.find {
            Some(words) => memory::rank_memories(&memories, words, &[]),
            None => memories.into_iter().map(|memory| (0.0, memory)).collect(),
        };
        found.extend(ranked.into_iter().map(|(score, memory)| (name.clone(), score, memory)));
    }
    found.sort_by(|a, b| b.1.total_cmp(&a.1));
    if env.json {
        return print_json(&Value::Array(
            found.iter().map(|(name, _, memory)| memory_json(name, memory)).collect(),
        ));
    }
    if found.is_empty() {
        print_notice(if options.find.is_some() {
            "no memory matches"
        } else {
            "there are no memories; they are formed when memory.enabled is true, and by \
             `halo memories form`"
        });
    }
    let mut last = None;
    for (name, _, memory) in &found {
        if options.all && last != Some(name) {
            print_stdout(&format!("{name}\n"))?;
            last = Some(name);
        }
        print_stdout(&memory_text(memory))?;
    }
    Ok(())
}

/// Forms all memories that are due.
fn form_due_memories(name: &str, env: &Env) -> Result<()> {
    let mut settings = env.load_settings()?.settings;
    settings.memory_enabled = true;
    let mut session = wiring::open_session(env, &settings, name)?;
    if session.timeline().is_empty() {
        return Err(not_found(format!("there is no conversation '{name}'")));
    }
    let mut formed = Vec::new();
    while let Some(span) = session.next_memory_range() {
        session.form_memory(span, &|| false, &mut |event| {
            if let Event::MemoryChanged { id, .. } = event {
                formed.push(id);
            }
        })?;
    }
    let new: Vec<&Memory> = session.memories().iter().filter(|memory| formed.contains(&memory.id)).collect();
    if env.json {
        return print_json(&Value::Array(new.iter().map(|memory| memory_json(name, memory)).collect()));
    }
    if new.is_empty() {
        print_notice(&format!("none formed: {}", session.explain_no_memory_due()));
    } else {
        print_notice(&format!(
            "{} formed",
            pluralize(new.len() as u64, "memory").replace("memorys", "memories")
        ));
    }
    new.iter().try_for_each(|memory| print_stdout(&memory_text(memory)))
}

pub fn memory_text(memory: &Memory) -> String {
    let mut marks = Vec::new();
    marks.extend(memory.reflection.then(|| "reflection".to_owned()));
    marks.extend(memory.pinned.then(|| "pinned".to_owned()));
    marks.extend(memory.disabled.then(|| "disabled".to_owned()));
    marks.extend(memory.edited.then(|| "edited".to_owned()));
    marks.extend((!memory.conflicts.is_empty()).then(|| {
        let others: Vec<String> = memory.conflicts.iter().map(ToString::to_string).collect();
        format!("contradicts {}", others.join(", "))
    }));
    let marks = if marks.is_empty() { String::new() } else { format!(" ({})", marks.join(", ")) };
    let (from, to) = (memory.range.from.0, memory.range.to.0);
    format!("{}  turns {from} to {to}{marks}\n    {}\n", memory.id, memory.text.replace('\n', "\n    "))
}

fn memory_json(conversation: &str, memory: &Memory) -> Value {
    json!({
        "conversation": conversation, "id": memory.id, "from": memory.range.from.0, "to": memory.range.to.0,
        "text": memory.text, "model": memory.model, "at": memory.formed_at, "reflection": memory.reflection,
        "pinned": memory.pinned, "disabled": memory.disabled, "edited": memory.edited,
        "conflicts": memory.conflicts, "operations": memory.operations,
    })
}
