//! `halo memories`: what the model remembers, and the user's hand on it.

use super::show::{Which, existing};
use super::{count, print, print_json};
use crate::{Common, say, wiring};
use anyhow::{Result, bail};
use halo_core::seams::{Access, Store};
use halo_engine::event::Event;
use halo_engine::memory::{self, Memory, Order};
use serde_json::{Value, json};

/// What to do with memories.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
    /// All conversations, not one
    #[arg(long)]
    all: bool,
    /// Only those that have to do with these words, the best first
    #[arg(long, short = 'f', value_name = "WORDS")]
    find: Option<String>,
    #[command(subcommand)]
    what: Option<What>,
}

/// What is done to a memory.
#[derive(clap::Subcommand)]
enum What {
    /// Forms those that are due now, and does not wait for a quiet moment
    Form,
    /// Has one say something else
    Edit {
        /// Its number
        id: u64,
        /// What it is to say
        text: String,
    },
    /// Has one stand before others
    Pin {
        /// Its number
        id: u64,
    },
    /// Takes the pin off one
    Unpin {
        /// Its number
        id: u64,
    },
    /// Keeps one and does not use it
    Rest {
        /// Its number
        id: u64,
    },
    /// Uses one again
    Wake {
        /// Its number
        id: u64,
    },
    /// Deletes one; what it is of stays, and it is not formed again
    Delete {
        /// Its number
        id: u64,
    },
}

/// Lists, finds, forms or changes memories.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let name = &options.which.name;
    if options.what.is_some() && (options.all || options.find.is_some()) {
        bail!(
            "--all and --find list memories; to change one, name its conversation (-c NAME) and its number"
        );
    }
    let (id, order) = match &options.what {
        None => return list(options, common),
        Some(What::Form) => return form(name, common),
        Some(What::Edit { id, text }) => (*id, Order::Edit(text.clone())),
        Some(What::Pin { id }) => (*id, Order::Pin(true)),
        Some(What::Unpin { id }) => (*id, Order::Pin(false)),
        Some(What::Rest { id }) => (*id, Order::Rest(true)),
        Some(What::Wake { id }) => (*id, Order::Rest(false)),
        Some(What::Delete { id }) => (*id, Order::Delete),
    };
    let (mut store, _timeline) = existing(common, name, Access::Write)?;
    let mut memories = memory::memories(&mut store, name)?;
    let deleted = order == Order::Delete;
    memory::order(&mut store, name, &mut memories, id, order)?;
    match memories.iter().find(|memory| memory.id == id) {
        Some(memory) if common.json => print_json(&told(name, memory)),
        Some(memory) => print(&line(memory)),
        None if common.json => print_json(&json!({ "deleted": deleted, "id": id })),
        None => print(&format!("memory {id} is deleted; what it was of is still there\n")),
    }
}

fn list(options: &Options, common: &Common) -> Result<()> {
    let names: Vec<String> = if options.all {
        let store = common.look_at_store()?.map(|mut store| store.conversations()).transpose()?;
        store.unwrap_or_default().into_iter().map(|known| known.name).collect()
    } else {
        vec![options.which.name.clone()]
    };
    let mut found: Vec<(String, f64, Memory)> = Vec::new();
    for name in names {
        let (mut store, _timeline) = existing(common, &name, Access::Read)?;
        let memories = memory::memories(&mut store, &name)?;
        let ranked = match &options.find {
            Some(words) => memory::rank(&memories, words, &[]),
            None => memories.into_iter().map(|memory| (0.0, memory)).collect(),
        };
        found.extend(ranked.into_iter().map(|(score, memory)| (name.clone(), score, memory)));
    }
    found.sort_by(|a, b| b.1.total_cmp(&a.1));
    if common.json {
        return print_json(&Value::Array(found.iter().map(|(name, _, memory)| told(name, memory)).collect()));
    }
    if found.is_empty() {
        say(if options.find.is_some() {
            "nothing that is remembered has to do with it"
        } else {
            "nothing is remembered; memories are formed where the setting memory.enabled is true, and by \
             `halo memories form`"
        });
    }
    let mut last = None;
    for (name, _, memory) in &found {
        if options.all && last != Some(name) {
            print(&format!("{name}\n"))?;
            last = Some(name);
        }
        print(&line(memory))?;
    }
    Ok(())
}

/// Forms what is due, one after the other.
fn form(name: &str, common: &Common) -> Result<()> {
    let mut settings = common.load(Vec::new())?.settings;
    settings.memory = true;
    let mut session = wiring::session(common, &settings, name)?;
    if session.timeline().is_empty() {
        bail!("there is no conversation '{name}'; `halo conversations` lists those that there are");
    }
    let mut formed = Vec::new();
    while let Some(span) = session.memory_due() {
        session.form(span, &|| false, &mut |event| {
            if let Event::Memory { id, .. } = event {
                formed.push(id);
            }
        })?;
    }
    let new: Vec<&Memory> = session.memories().iter().filter(|memory| formed.contains(&memory.id)).collect();
    if common.json {
        return print_json(&Value::Array(new.iter().map(|memory| told(name, memory)).collect()));
    }
    if new.is_empty() {
        say(&format!("none formed: {}", session.why_none_due()));
    } else {
        say(&format!("{} formed", count(new.len() as u64, "memory").replace("memorys", "memories")));
    }
    new.iter().try_for_each(|memory| print(&line(memory)))
}

/// A memory, for people.
pub fn line(memory: &Memory) -> String {
    let mut marks = Vec::new();
    marks.extend(memory.reflection.then(|| "looks back".to_owned()));
    marks.extend(memory.pinned.then(|| "pinned".to_owned()));
    marks.extend(memory.resting.then(|| "resting".to_owned()));
    marks.extend(memory.edited.then(|| "edited".to_owned()));
    marks.extend((!memory.conflicts.is_empty()).then(|| {
        let others: Vec<String> = memory.conflicts.iter().map(ToString::to_string).collect();
        format!("contradicts {}", others.join(", "))
    }));
    let marks = if marks.is_empty() { String::new() } else { format!(" ({})", marks.join(", ")) };
    let (from, to) = (memory.span.from.0, memory.span.to.0);
    format!("{}  turns {from} to {to}{marks}\n    {}\n", memory.id, memory.text.replace('\n', "\n    "))
}

fn told(conversation: &str, memory: &Memory) -> Value {
    json!({
        "conversation": conversation, "id": memory.id, "from": memory.span.from.0, "to": memory.span.to.0,
        "text": memory.text, "model": memory.model, "at": memory.at, "reflection": memory.reflection,
        "pinned": memory.pinned, "resting": memory.resting, "edited": memory.edited,
        "conflicts": memory.conflicts, "operations": memory.operations,
    })
}
