//! `halo show` and `halo why`: the chunks of a conversation, and what happened to each.

use super::conversations::{ConversationArgs, open_existing};
use crate::env::Env;
use crate::error::not_found;
use crate::output::{format_day, format_time, pluralize, print_json, print_stdout, sanitize_terminal_text};
use anyhow::Result;
use halo_core::change::AttentionTally;
use halo_core::store::{Access, LogEntry, Store};
use halo_core::timeline::{ChunkRef, Timeline};
use halo_core::token::ChunkId;
use halo_engine::forget::pending as pending_forget;
use halo_engine::history::{self, ChunkHistoryEntry};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

#[derive(clap::Args)]
pub struct ShowArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Include pruned and deleted chunks
    #[arg(long)]
    all: bool,
}

#[derive(clap::Args)]
pub struct WhyArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Chunk: role, turn and paragraph, such as u4.0
    #[arg(value_name = "CHUNK")]
    chunk: ChunkId,
}

pub fn run(options: &ShowArgs, env: &Env) -> Result<()> {
    let name = &options.conversation.name;
    let (mut store, mut timeline) = open_existing(env, name, Access::Read)?;
    let mut last: BTreeMap<ChunkId, LogEntry> = store.last_mentions(name)?;
    let pending = pending_forget::pending_chunks(&mut store, name)?;
    let shown: Vec<ChunkId> =
        timeline.chunks().filter(|c| options.all || c.is_live()).map(|c| c.id()).collect();
    let mut values = Vec::new();
    let mut out = String::new();
    for part in shown.chunks(256) {
        let unloaded: Vec<_> =
            part.iter().copied().filter(|&c| timeline.chunk(c).is_some_and(|c| !c.is_loaded())).collect();
        store.load_bodies(name, &mut timeline, &unloaded)?;
        for chunk in part.iter().filter_map(|&c| timeline.chunk(c)) {
            let why = last.remove(&chunk.id()).and_then(|e| history::entries_for_chunk(&e, chunk.id()).pop());
            if env.json {
                values.push(chunk_json(chunk, why.as_ref(), pending.get(&chunk.id()).copied()));
            } else {
                write_chunk(&mut out, chunk, why.as_ref(), pending.get(&chunk.id()).copied());
            }
        }
        timeline.unload_pruned();
        if !env.json {
            print_stdout(&std::mem::take(&mut out))?;
        }
    }
    if env.json {
        return print_json(&values.into());
    }
    let (live, all) = (timeline.live_len(), timeline.len());
    let more = if options.all || live == all { "" } else { "; --all includes the rest" };
    print_stdout(&format!("{live} of {} live{more}\n", pluralize(all as u64, "token")))
}

fn chunk_json(chunk: ChunkRef<'_>, why: Option<&ChunkHistoryEntry>, forgotten_at: Option<i64>) -> Value {
    let forgotten_at = forgotten_at.filter(|_| chunk.is_deleted());
    json!({
        "chunk": chunk.id().to_string(),
        "turn": chunk.id().turn.0,
        "paragraph": chunk.id().index,
        "role": chunk.id().role.name(),
        "position": chunk.start().0,
        "tokens": chunk.len(),
        "live": chunk.is_live(),
        "live_tokens": chunk.live_len(),
        "pinned": chunk.is_pinned(),
        "deleted": chunk.is_deleted(),
        "forgotten": chunk.is_forgotten(),
        "peak": chunk.peak().0,
        "text": if forgotten_at.is_some() { "".into() } else { chunk.text() },
        "to_be_forgotten": forgotten_at,
        "why": why.map(ChunkHistoryEntry::describe),
    })
}

fn write_chunk(
    out: &mut String,
    chunk: ChunkRef<'_>,
    why: Option<&ChunkHistoryEntry>,
    forgotten_at: Option<i64>,
) {
    let state = match (chunk.is_deleted(), chunk.is_live()) {
        (true, _) if chunk.is_forgotten() => "  forgotten",
        (true, _) => "  deleted",
        (_, false) => "  pruned",
        _ => "",
    };
    // The reason in the log is from the time when the text was only hidden.
    let why = why.filter(|_| !chunk.is_forgotten());
    let pinned = if chunk.is_pinned() { "  pinned" } else { "" };
    let why = why.map(|e| format!("  ({})", sanitize_terminal_text(&e.describe()))).unwrap_or_default();
    let tokens = pluralize(chunk.len() as u64, "token");
    let _ = writeln!(out, "{}  {tokens}  peak {}{state}{pinned}{why}", chunk.id(), chunk.peak());
    let text = match forgotten_at.filter(|_| chunk.is_deleted()) {
        Some(due) => format!("[erased on {}; `halo forget --cancel` keeps it]", format_day(due)),
        None => sanitize_terminal_text(&chunk.text()),
    };
    for line in text.trim_end().lines() {
        let _ = writeln!(out, "    {line}");
    }
}

pub fn explain_chunk(options: &WhyArgs, env: &Env) -> Result<()> {
    let (name, id) = (&options.conversation.name, options.chunk);
    let (mut store, mut timeline) = open_existing(env, name, Access::Read)?;
    if !env.json {
        return print_stdout(&chunk_history_text(&mut store, name, &mut timeline, id)?);
    }
    let events = chunk_history(&mut store, name, &mut timeline, id)?;
    let chunk = timeline.chunk(id);
    let entries = events
        .iter()
        .map(|e| json!({ "at": e.at, "seq": e.seq, "what": e.action.as_str(), "why": e.reason }));
    let tally = chunk.map(ChunkRef::tally).unwrap_or_default();
    print_json(&json!({
        "chunk": id.to_string(),
        "tokens": chunk.map_or(0, ChunkRef::len),
        "live": chunk.is_some_and(ChunkRef::is_live),
        "pinned": chunk.is_some_and(ChunkRef::is_pinned),
        "deleted": chunk.is_some_and(ChunkRef::is_deleted),
        "peak": chunk.map(|c| c.peak().0),
        "votes": tally.votes,
        "attention": tally.mass as f64 / AttentionTally::MASS_UNIT,
        "exposures": tally.exposures,
        "events": entries.collect::<Vec<_>>(),
    }))
}

/// The history of a chunk, oldest first. Its body is loaded.
fn chunk_history(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    id: ChunkId,
) -> Result<Vec<ChunkHistoryEntry>> {
    let events = history::chunk_history(store, name, id)?;
    if timeline.chunk(id).is_some_and(|c| !c.is_loaded()) {
        store.load_bodies(name, timeline, &[id])?;
    }
    if timeline.chunk(id).is_none() && events.is_empty() {
        return Err(not_found(format!(
            "there is no chunk {id} in '{name}': `halo show --all` lists them all"
        )));
    }
    Ok(events)
}

/// The history of a chunk as text.
pub fn chunk_history_text(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    id: ChunkId,
) -> Result<String> {
    let events = chunk_history(store, name, timeline, id)?;
    let forgotten_at = pending_forget::pending_chunks(store, name)?.get(&id).copied();
    let mut out = String::new();
    match timeline.chunk(id) {
        None => {
            let _ = writeln!(out, "{id} does not exist any more: it was merged");
        }
        Some(chunk) => {
            write_chunk(&mut out, chunk, None, forgotten_at);
            let AttentionTally { votes, mass, .. } = chunk.tally();
            let scored = match chunk.tally().share() {
                None => "never scored".into(),
                Some(share) => format!(
                    "{}, total attention {:.3}, {:.3} ‰ per token and step",
                    pluralize(votes, "vote"),
                    mass as f64 / AttentionTally::MASS_UNIT,
                    share * 1000.0
                ),
            };
            let _ = writeln!(out, "\n{scored}");
        }
    }
    for event in &events {
        let _ = writeln!(out, "{}  {}", format_time(event.at), sanitize_terminal_text(&event.describe()));
    }
    if events.is_empty() {
        out.push_str("it has been in the context window since it was added\n");
    }
    Ok(out)
}
