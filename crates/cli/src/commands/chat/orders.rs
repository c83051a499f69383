//! What can be asked for in the middle of a conversation, with a slash before it.

use super::paint::{Paint, range};
use crate::commands::memories;
use crate::commands::show::story;
use crate::commands::{count, shorten};
use crate::printable;
use crate::settings::{KEYS, Settings};
use anyhow::{Result, bail};
use halo_core::seams::Kind;
use halo_core::token::ChunkId;
use halo_engine::session::Session;
use halo_engine::signal::Signal;
use halo_engine::turn::AskedBy;
use std::fmt::Write;

/// What an order comes to.
pub enum Outcome {
    /// Something to read.
    Page(String),
    /// The last message is to be answered again.
    Again,
    /// The last message was taken back: this is what it said, to be said in other words.
    Edit(String),
    /// This is to be said.
    Say(String),
    /// The user leaves.
    Leave,
}

const HELP: &str = "\
/why CHUNK              what happened to it, and why
/window                 what the model sees now; the dimmer, the less it was looked at
/graveyard              what has left the window
/pin, /unpin CHUNK…     immune to pruning, or no longer
/prune CHUNK…           out of the window
/resurrect CHUNK…       back to its own place
/delete, /restore CHUNK…  out of search too, and back again
/merge CHUNK…           joined to the chunk before it
/again                  answers the last message again
/edit [TEXT]            takes the last message back, to be said in other words
/branch NAME [TURN]     a conversation of that name that shares the past up to that turn
/notes                  what the model has noted
/memories               what it remembers of what was said; `halo memories` changes them
/settings               what is in force
/help                   this
/quit                   leaves; so does Ctrl-D
//…                     a message that begins with a slash
`halo forget` forgets something for good, once you have left.
A chunk is a paragraph of a message, written u4.0 or a5.2: whose, which message, which part of it.
";

/// Does what a line asks for; none, if it is no order.
pub fn obey(line: &str, session: &mut Session, settings: &Settings, paint: Paint) -> Result<Option<Outcome>> {
    // Two slashes begin a message that begins with one.
    let Some(order) = line.trim().strip_prefix('/').filter(|order| !order.starts_with('/')) else {
        return Ok(None);
    };
    let mut words = order.split_whitespace();
    let (word, rest) = (words.next().unwrap_or_default(), words.collect::<Vec<_>>());
    if let Some(signal) = Signal::ALL.into_iter().find(|signal| signal.name() == word) {
        return Ok(Some(Outcome::Page(send(signal, &rest, session)?)));
    }
    Ok(Some(match word {
        "help" | "?" => Outcome::Page(HELP.into()),
        "quit" | "exit" | "q" => Outcome::Leave,
        "again" => Outcome::Again,
        "edit" if rest.is_empty() => Outcome::Edit(session.unsay(AskedBy::User)?),
        "edit" => {
            session.unsay(AskedBy::User)?;
            Outcome::Say(order.trim_start().trim_start_matches("edit").trim().to_owned())
        }
        "why" => Outcome::Page(why(&rest, session)?),
        "window" => Outcome::Page(window(session, paint)),
        "graveyard" => Outcome::Page(graveyard(session)?),
        "branch" => Outcome::Page(branch(&rest, session)?),
        "notes" => Outcome::Page(notes(session)?),
        "memories" => Outcome::Page(remembered(session)),
        "settings" => Outcome::Page(in_force(settings)),
        _ => bail!("there is no /{}: /help lists what there is", printable(word)),
    }))
}

fn remembered(session: &Session) -> String {
    let lines: String = session.memories().iter().map(memories::line).collect();
    if lines.is_empty() { format!("nothing is remembered yet: {}\n", session.why_none_due()) } else { lines }
}

fn chunks(words: &[&str]) -> Result<Vec<ChunkId>> {
    if words.is_empty() {
        bail!("name a chunk, such as u4.0: /window and /graveyard list them");
    }
    Ok(words.iter().map(|word| word.parse()).collect::<Result<_, _>>()?)
}

fn send(signal: Signal, words: &[&str], session: &mut Session) -> Result<String> {
    let sent = session.signal(signal, &chunks(words)?)?;
    let names: Vec<String> = sent.done.names().iter().map(ToString::to_string).collect();
    Ok(format!("{}: {}\n", signal.done(), names.join(" ")))
}

fn why(words: &[&str], session: &mut Session) -> Result<String> {
    let mut out = String::new();
    for chunk in chunks(words)? {
        let (name, mut timeline) = (session.name().to_owned(), session.timeline().clone());
        out += &story(session.store(), &name, &mut timeline, chunk)?;
    }
    Ok(out)
}

fn window(session: &Session, paint: Paint) -> String {
    let timeline = session.timeline();
    let range = range(timeline);
    let mut out = String::new();
    for chunk in timeline.live_chunks() {
        let text = paint.shaded(timeline, chunk, range);
        let pinned = if chunk.is_pinned() { " pinned" } else { "" };
        let about = paint.dim(&format!(
            "{:<7} {}{pinned}",
            chunk.id().to_string(),
            count(chunk.live_len() as u64, "token")
        ));
        let _ = writeln!(out, "{about}\n{}", text.trim());
    }
    if out.is_empty() { "nothing was said yet\n".into() } else { out }
}

fn graveyard(session: &mut Session) -> Result<String> {
    let (name, mut timeline) = (session.name().to_owned(), session.timeline().clone());
    let dead: Vec<ChunkId> =
        timeline.chunks().filter(|c| c.dead_len() > 0 && !c.is_withdrawn()).map(|c| c.id()).collect();
    let shown = &dead[dead.len().saturating_sub(MOST)..];
    session.store().bring(&name, &mut timeline, shown)?;
    let mut out = String::new();
    if shown.len() < dead.len() {
        let _ = writeln!(out, "the latest {MOST} of {}; `halo show --dead` lists all", dead.len());
    }
    for chunk in shown.iter().filter_map(|&id| timeline.chunk(id)) {
        let _ = writeln!(
            out,
            "{:<7} {:>5}  {}",
            chunk.id().to_string(),
            chunk.dead_len(),
            shorten(&chunk.text(), 90)
        );
    }
    Ok(if dead.is_empty() { "nothing has left the window yet\n".into() } else { out })
}

/// How much of the graveyard is listed.
const MOST: usize = 100;

fn branch(words: &[&str], session: &mut Session) -> Result<String> {
    let (name, turn) = match words {
        [name] => (*name, None),
        [name, turn] => {
            (*name, Some(turn.parse().map_err(|_| anyhow::anyhow!("{turn} is no turn: /branch NAME 12"))?))
        }
        _ => bail!("write /branch NAME, or /branch NAME TURN"),
    };
    let turns = session.branch(name, turn)?;
    Ok(format!(
        "'{name}' shares {} with this one: `halo chat -c {name}` goes on there\n",
        count(turns as u64, "message")
    ))
}

fn notes(session: &mut Session) -> Result<String> {
    let name = session.name().to_owned();
    let notes = session.store().records(&name, Kind::Note)?;
    let page: String = notes.iter().map(|note| format!("{}\n{}\n", note.key, note.value)).collect();
    Ok(if page.is_empty() { "the model has noted nothing yet\n".into() } else { printable(&page) })
}

fn in_force(settings: &Settings) -> String {
    let mut out = String::new();
    for key in KEYS {
        if let Some((value, _)) = settings.get(key.name) {
            let _ = writeln!(out, "{:<30} {value}", key.name);
        }
    }
    printable(&out)
}
