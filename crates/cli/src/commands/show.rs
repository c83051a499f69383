//! `halo conversations`, `halo show`, `halo why`: what is kept, and what happened to it.

use super::forget::grace::instead;
use super::{count, print, print_json, shorten, time};
use crate::settings::load::nearest;
use crate::{Common, printable};
use anyhow::{Result, bail};
use halo_core::change::Tally;
use halo_core::seams::{Access, Entry, Store};
use halo_core::timeline::{ChunkRef, Timeline};
use halo_core::token::ChunkId;
use halo_engine::grace;
use halo_engine::history::{self, Happened};
use halo_store::database::Database;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

/// The conversation that is meant where none is named.
pub const MAIN: &str = "main";

/// Which conversation.
#[derive(clap::Args)]
pub struct Which {
    /// The conversation
    #[arg(short = 'c', long = "conversation", value_name = "NAME", default_value = MAIN, global = true)]
    pub name: String,
}

/// What to show.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
    /// Shows what has left the window too, and what was deleted
    #[arg(long)]
    dead: bool,
}

/// Whose history.
#[derive(clap::Args)]
pub struct WhyOptions {
    #[command(flatten)]
    which: Which,
    /// The chunk: role, turn and sentence, such as u4.0
    #[arg(value_name = "CHUNK")]
    chunk: ChunkId,
}

/// Which conversation, and its new name.
#[derive(clap::Args)]
pub struct RenameOptions {
    /// The conversation
    #[arg(value_name = "NAME")]
    from: String,
    /// What it is to be called
    #[arg(value_name = "NEW NAME")]
    to: String,
}

/// Gives a conversation another name.
pub fn rename(options: &RenameOptions, common: &Common) -> Result<()> {
    let (mut store, _) = existing(common, &options.from, Access::Write)?;
    store.rename(&options.from, &options.to)?;
    if common.json {
        return print_json(&json!({ "from": options.from, "to": options.to }));
    }
    print(&format!("'{}' is called '{}' now\n", printable(&options.from), printable(&options.to)))
}

/// Lists the conversations.
pub fn conversations(common: &Common) -> Result<()> {
    let all = match common.look_at_store()? {
        Some(mut store) => store.conversations()?,
        None => Vec::new(),
    };
    if common.json {
        let list = all.iter().map(|s| {
            json!({
                "name": s.name,
                "model": s.model,
                "turns": s.turns,
                "tokens": s.tokens,
                "live": s.live,
                "changes": s.changes,
                "created": s.created,
                "used": s.used,
            })
        });
        return print_json(&list.collect());
    }
    if all.is_empty() {
        return print("no conversations yet: `halo import FILE` brings one in\n");
    }
    let width = all.iter().map(|s| shorten(&s.name, 40).chars().count() + 2).max().unwrap_or(0).max(14);
    let mut out = format!(
        "{:<width$}{:>7}{:>10}{:>10}  {:<24} model\n",
        "conversation", "turns", "live", "tokens", "last used"
    );
    for s in &all {
        let model = if s.model.is_empty() { "none yet".into() } else { shorten(&s.model, 40) };
        let name = shorten(&s.name, 40);
        let _ = writeln!(
            out,
            "{name:<width$}{:>7}{:>10}{:>10}  {:<24} {model}",
            s.turns,
            s.live,
            s.tokens,
            time(s.used)
        );
    }
    print(&out)
}

/// A conversation that must be there, and the store that has it.
pub fn existing(common: &Common, name: &str, access: Access) -> Result<(Database, Timeline)> {
    let store = match access {
        Access::Read => common.look_at_store()?,
        Access::Write if common.look_at_store()?.is_none() => None,
        Access::Write => Some(common.open_store()?),
    };
    let mut names = Vec::new();
    if let Some(mut store) = store {
        names.extend(store.conversations()?.into_iter().map(|s| s.name));
        if names.iter().any(|known| known == name) {
            let timeline = store.load(name, access)?;
            return Ok((store, timeline));
        }
    }
    let lists = "`halo conversations` lists those that there are";
    let name = printable(name);
    match (nearest(&name, names.iter().map(String::as_str)), names.as_slice()) {
        (_, []) => bail!("there is no conversation '{name}', and no other yet: `halo chat` begins one"),
        (Some(near), _) => {
            bail!("there is no conversation '{name}': did you mean -c '{}'? {lists}", printable(near))
        }
        (None, [only]) => {
            bail!("there is no conversation '{name}': the only one is '{}' (-c NAME)", printable(only))
        }
        (None, _) => bail!("there is no conversation '{name}': name one with -c NAME; {lists}"),
    }
}

/// Shows a conversation.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let name = &options.which.name;
    let (mut store, mut timeline) = existing(common, name, Access::Read)?;
    let mut last: BTreeMap<ChunkId, Entry> = store.last_mentions(name)?;
    let hidden = grace::hidden(&mut store, name)?;
    let shown: Vec<ChunkId> =
        timeline.chunks().filter(|c| options.dead || c.is_live()).map(|c| c.id()).collect();
    let mut values = Vec::new();
    let mut out = String::new();
    for part in shown.chunks(256) {
        let away: Vec<_> =
            part.iter().copied().filter(|&c| timeline.chunk(c).is_some_and(|c| !c.is_here())).collect();
        store.bring(name, &mut timeline, &away)?;
        for chunk in part.iter().filter_map(|&c| timeline.chunk(c)) {
            let why = last.remove(&chunk.id()).and_then(|e| history::told(&e, chunk.id()).pop());
            if common.json {
                values.push(value(chunk, why.as_ref(), hidden.get(&chunk.id()).copied()));
            } else {
                lines(&mut out, chunk, why.as_ref(), hidden.get(&chunk.id()).copied());
            }
        }
        timeline.release_dead();
        if !common.json {
            print(&std::mem::take(&mut out))?;
        }
    }
    if common.json {
        return print_json(&values.into());
    }
    let (live, all) = (timeline.live_len(), timeline.len());
    let more = if options.dead || live == all { "" } else { "; --dead shows the rest too" };
    print(&format!("{live} of {} live{more}\n", count(all as u64, "token")))
}

fn value(chunk: ChunkRef<'_>, why: Option<&Happened>, forgotten_at: Option<i64>) -> Value {
    let forgotten_at = forgotten_at.filter(|_| chunk.is_withdrawn());
    json!({
        "chunk": chunk.id().to_string(),
        "turn": chunk.id().turn.0,
        "sentence": chunk.id().sentence,
        "role": chunk.id().role.name(),
        "position": chunk.start().0,
        "tokens": chunk.len(),
        "live": chunk.is_live(),
        "live_tokens": chunk.live_len(),
        "pinned": chunk.is_pinned(),
        "deleted": chunk.is_withdrawn(),
        "peak": chunk.peak().0,
        "text": if forgotten_at.is_some() { "".into() } else { chunk.text() },
        "to_be_forgotten": forgotten_at,
        "why": why.map(Happened::text),
    })
}

fn lines(out: &mut String, chunk: ChunkRef<'_>, why: Option<&Happened>, forgotten_at: Option<i64>) {
    let state = match (chunk.is_withdrawn(), chunk.is_live()) {
        (true, _) => "  deleted",
        (_, false) => "  dead",
        _ => "",
    };
    let pinned = if chunk.is_pinned() { "  pinned" } else { "" };
    let why = why.map(|e| format!("  ({})", printable(&e.text()))).unwrap_or_default();
    let tokens = count(chunk.len() as u64, "token");
    let _ = writeln!(out, "{}  {tokens}  peak {}{state}{pinned}{why}", chunk.id(), chunk.peak());
    let text = match forgotten_at.filter(|_| chunk.is_withdrawn()) {
        Some(due) => instead(due),
        None => printable(&chunk.text()),
    };
    for line in text.trim_end().lines() {
        let _ = writeln!(out, "    {line}");
    }
}

/// Tells what happened to a chunk.
pub fn why(options: &WhyOptions, common: &Common) -> Result<()> {
    let (name, id) = (&options.which.name, options.chunk);
    let (mut store, mut timeline) = existing(common, name, Access::Read)?;
    if !common.json {
        return print(&story(&mut store, name, &mut timeline, id)?);
    }
    let events = history(&mut store, name, &mut timeline, id)?;
    let chunk = timeline.chunk(id);
    let told = events.iter().map(|e| json!({ "at": e.at, "seq": e.seq, "what": e.what, "why": e.why }));
    let tally = chunk.map(ChunkRef::tally).unwrap_or_default();
    print_json(&json!({
        "chunk": id.to_string(),
        "tokens": chunk.map_or(0, ChunkRef::len),
        "live": chunk.is_some_and(ChunkRef::is_live),
        "pinned": chunk.is_some_and(ChunkRef::is_pinned),
        "deleted": chunk.is_some_and(ChunkRef::is_withdrawn),
        "peak": chunk.map(|c| c.peak().0),
        "votes": tally.votes,
        "attention": tally.mass as f64 / Tally::UNIT,
        "looks": tally.looks,
        "events": told.collect::<Vec<_>>(),
    }))
}

/// What happened to a chunk, the oldest first; its tokens are brought into memory.
fn history(store: &mut dyn Store, name: &str, timeline: &mut Timeline, id: ChunkId) -> Result<Vec<Happened>> {
    let events = history::of(store, name, id)?;
    if timeline.chunk(id).is_some_and(|c| !c.is_here()) {
        store.bring(name, timeline, &[id])?;
    }
    if timeline.chunk(id).is_none() && events.is_empty() {
        bail!("there is no chunk {id} in '{name}': `halo show --dead` lists them all");
    }
    Ok(events)
}

/// The same, for people.
pub fn story(store: &mut dyn Store, name: &str, timeline: &mut Timeline, id: ChunkId) -> Result<String> {
    let events = history(store, name, timeline, id)?;
    let forgotten_at = grace::hidden(store, name)?.get(&id).copied();
    let mut out = String::new();
    match timeline.chunk(id) {
        None => {
            let _ = writeln!(out, "{id} is no more: it was merged");
        }
        Some(chunk) => {
            lines(&mut out, chunk, None, forgotten_at);
            let Tally { votes, mass, .. } = chunk.tally();
            let scored = match chunk.tally().share() {
                None => "never scored".into(),
                Some(share) => format!(
                    "{}, attention {:.3} in all, {:.3} ‰ of it to a token at a step",
                    count(votes, "vote"),
                    mass as f64 / Tally::UNIT,
                    share * 1000.0
                ),
            };
            let _ = writeln!(out, "\n{scored}");
        }
    }
    for event in &events {
        let _ = writeln!(out, "{}  {}", time(event.at), printable(&event.text()));
    }
    if events.is_empty() {
        out.push_str("it has been in the window since it was said\n");
    }
    Ok(out)
}
