//! `halo memories`: lists, searches, forms and edits memories.

use super::conversations::{ConversationArgs, open_existing};
use crate::env::Env;
use crate::error::not_found;
use crate::output::{pluralize, print_json, print_notice, print_stdout, sanitize_terminal_text};
use crate::wiring;
use anyhow::{Result, bail};
use halo_core::store::{Access, Store};
use halo_core::token::ChunkId;
use halo_engine::event::Event;
use halo_engine::memory::trace::trace_memory;
use halo_engine::memory::{
    self, CarryMode, ConflictDecision, Memory, MemoryConflict, MemoryEdit, MemoryReference,
};
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
    /// Carry memories of another conversation into this one; `halo chat --carry` carries them into a new one
    Carry {
        /// Conversation that the memories are from
        #[arg(long, value_name = "NAME")]
        from: String,
        /// Ids of the memories [default: all]
        ids: Vec<u64>,
        /// Make one memory of all of them
        #[arg(long)]
        join: bool,
    },
    /// List the contradictions between memories that wait for a decision
    Conflicts,
    /// Decide which of two memories is right; what the other says against it is left out
    Resolve {
        /// Id of a memory
        first: u64,
        /// Id of the memory that contradicts it
        second: u64,
        /// Which memory is right
        #[arg(long, value_name = "WHICH")]
        keep: KeptMemory,
    },
    /// Show where every part of a memory comes from
    Origins {
        /// Id of the memory
        id: u64,
    },
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum KeptMemory {
    First,
    Second,
    Both,
}

pub fn run(options: &MemoriesArgs, env: &Env) -> Result<()> {
    let name = &options.conversation.name;
    if options.command.is_some() && (options.all || options.find.is_some()) {
        bail!("--all and --find list memories; to change one, name its conversation (-c NAME) and its id");
    }
    let (id, order) = match &options.command {
        None => return list_memories(options, env),
        Some(MemoriesCommand::Form) => return form_due_memories(name, env),
        Some(MemoriesCommand::Carry { from, ids, join }) => return carry(name, from, ids, *join, env),
        Some(MemoriesCommand::Conflicts) => return list_conflicts(name, env),
        Some(MemoriesCommand::Resolve { first, second, keep }) => {
            return resolve(name, (*first, *second), *keep, env);
        }
        Some(MemoriesCommand::Origins { id }) => return print_origins(name, *id, env),
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

/// The memories with these ids of a conversation; without ids, all that are not carried.
pub fn memory_references(env: &Env, conversation: &str, ids: &[u64]) -> Result<Vec<MemoryReference>> {
    let (mut store, _) = open_existing(env, conversation, Access::Read)?;
    let ids = match ids {
        [] => {
            let memories = memory::load_memories(&mut store, conversation)?;
            let own = memories.iter().filter(|memory| !memory.is_carried() && !memory.disabled);
            own.map(|memory| memory.id).collect()
        }
        ids => ids.to_vec(),
    };
    if ids.is_empty() {
        return Err(not_found(format!("there are no memories in the conversation '{conversation}'")));
    }
    let reference = |memory| MemoryReference { conversation: conversation.to_owned(), memory };
    Ok(ids.into_iter().map(reference).collect())
}

fn carry(name: &str, from: &str, ids: &[u64], join: bool, env: &Env) -> Result<()> {
    let references = memory_references(env, from, ids)?;
    let (mut store, _timeline) = open_existing(env, name, Access::Write)?;
    let mode = if join { CarryMode::Joined } else { CarryMode::Separate };
    let carried = memory::carry_memories(&mut store, name, &references, mode)?;
    if env.json {
        return print_json(&Value::Array(carried.iter().map(|memory| memory_json(name, memory)).collect()));
    }
    carried.iter().try_for_each(|memory| print_stdout(&memory_text(memory)))
}

fn list_conflicts(name: &str, env: &Env) -> Result<()> {
    let (mut store, _) = open_existing(env, name, Access::Read)?;
    let conflicts = memory::open_conflicts(&memory::load_memories(&mut store, name)?);
    if env.json {
        let rows = conflicts.iter().map(|conflict| {
            json!({
                "first": conflict.first, "second": conflict.second, "first_sentence": conflict.first_sentence,
                "second_sentence": conflict.second_sentence, "reason": conflict.reason.description(),
            })
        });
        return print_json(&Value::Array(rows.collect()));
    }
    if conflicts.is_empty() {
        print_notice("no memories contradict each other");
    }
    for conflict in conflicts {
        let MemoryConflict { first, second, first_sentence, second_sentence, reason } = conflict;
        print_stdout(&sanitize_terminal_text(&format!(
            "{first}: {first_sentence}\n{second}: {second_sentence}\n    {}; decide with `halo memories resolve {first} {second} \
             --keep first|second|both`\n",
            reason.description()
        )))?;
    }
    Ok(())
}

fn resolve(name: &str, pair: (u64, u64), keep: KeptMemory, env: &Env) -> Result<()> {
    let (mut store, _timeline) = open_existing(env, name, Access::Write)?;
    let mut memories = memory::load_memories(&mut store, name)?;
    let decision = match keep {
        KeptMemory::First => ConflictDecision::KeepFirst,
        KeptMemory::Second => ConflictDecision::KeepSecond,
        KeptMemory::Both => ConflictDecision::KeepBoth,
    };
    memory::resolve_conflict(&mut store, name, &mut memories, pair, decision)?;
    let mut resolved = memories.iter().filter(|memory| memory.id == pair.0 || memory.id == pair.1);
    if env.json {
        return print_json(&Value::Array(resolved.map(|memory| memory_json(name, memory)).collect()));
    }
    resolved.try_for_each(|memory| print_stdout(&memory_text(memory)))
}

/// Prints each part of a memory with the chunk that it comes from, and what its writer saw.
fn print_origins(name: &str, id: u64, env: &Env) -> Result<()> {
    let (mut store, mut timeline) = open_existing(env, name, Access::Read)?;
    let memories = memory::load_memories(&mut store, name)?;
    let Some(memory) = memories.iter().find(|memory| memory.id == id) else {
        return Err(not_found(format!("there is no memory {id} in the conversation '{name}'")));
    };
    let chunks: Vec<ChunkId> = memory.range.chunks(&timeline).map(|chunk| chunk.id()).collect();
    store.load_bodies(name, &mut timeline, &chunks)?;
    let traced = trace_memory(memory, None, &timeline);
    let source = memory.source.clone().unwrap_or_default();
    let (segments, restored) = (source.segments, source.restored_tokens);
    if env.json {
        let spans = traced.spans.iter().map(|span| {
            json!({
                "start": span.bytes.start, "end": span.bytes.end, "kind": span.kind.to_string(),
                "chunk": span.chunk.map(|chunk| chunk.to_string()), "overlap": span.overlap,
                "text": &traced.text[span.bytes.clone()],
            })
        });
        return print_json(&json!({
            "id": id, "text": traced.text, "spans": spans.collect::<Vec<_>>(), "segments": segments,
            "restored_tokens": restored,
            "carried_from": memory.carried_from,
        }));
    }
    let mut out = String::new();
    for span in &traced.spans {
        let chunk = span.chunk.map_or_else(|| "–".to_owned(), |chunk| chunk.to_string());
        let text = traced.text[span.bytes.clone()].trim();
        out += &format!("{chunk:>8}  {:>4.0} %  {text}\n", span.overlap * 100.0);
    }
    let tokens: usize = segments.iter().map(|segment| segment.tokens).sum();
    out += &format!("written by {} from {} segments, {tokens} tokens\n", memory.model, segments.len());
    for segment in &segments {
        out +=
            &format!("    {:<14}{:>6} tokens  {}\n", segment.block, segment.tokens, segment.facets.join(" "));
    }
    print_stdout(&sanitize_terminal_text(&out))
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
        print_notice(&format!("{} formed", count_memories(new.len())));
    }
    new.iter().try_for_each(|memory| print_stdout(&memory_text(memory)))
}

/// `1 memory`, `2 memories`.
pub fn count_memories(count: usize) -> String {
    if count == 1 { "1 memory".to_owned() } else { format!("{count} memories") }
}

pub fn memory_text(memory: &Memory) -> String {
    let mut marks = Vec::new();
    marks.extend(memory.reflection.then(|| "reflection".to_owned()));
    marks.extend(memory.pinned.then(|| "pinned".to_owned()));
    marks.extend(memory.disabled.then(|| "disabled".to_owned()));
    marks.extend(memory.edited.then(|| "edited".to_owned()));
    marks.extend(
        (!memory.retracted.is_empty())
            .then(|| format!("{} left out", pluralize(memory.retracted.len() as u64, "sentence"))),
    );
    marks.extend((!memory.conflicts.is_empty()).then(|| {
        let others: Vec<String> = memory.conflicts.iter().map(ToString::to_string).collect();
        format!("contradicts {}", others.join(", "))
    }));
    let marks = if marks.is_empty() { String::new() } else { format!(" ({})", marks.join(", ")) };
    let range = match memory.is_carried() {
        true => "carried from another conversation".to_owned(),
        false => format!("turns {} to {}", memory.range.from.0, memory.range.to.0),
    };
    let text = sanitize_terminal_text(&memory.text).replace('\n', "\n    ");
    format!("{}  {range}{marks}\n    {text}\n", memory.id)
}

fn memory_json(conversation: &str, memory: &Memory) -> Value {
    json!({
        "conversation": conversation, "id": memory.id, "from": memory.range.from.0, "to": memory.range.to.0,
        "text": memory.text, "model": memory.model, "at": memory.formed_at, "reflection": memory.reflection,
        "pinned": memory.pinned, "disabled": memory.disabled, "edited": memory.edited,
        "conflicts": memory.conflicts, "operations": memory.operations, "carried_from": memory.carried_from,
        "retracted": memory.retracted,
    })
}
