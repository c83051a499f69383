//! Slash commands of `halo chat`.

use super::style::{TerminalStyle, brightness_range};
use crate::commands::memories;
use crate::commands::show::chunk_history_text;
use crate::output::{pluralize, sanitize_terminal_text, truncate_line};
use crate::settings::{KEYS, Settings};
use anyhow::{Result, bail};
use halo_core::store::RecordKind;
use halo_core::token::ChunkId;
use halo_engine::manual_edit::ManualEdit;
use halo_engine::session::Session;
use halo_engine::turn::EditAuthor;
use std::fmt::Write;

pub enum SlashCommandResult {
    Print(String),
    /// The last message is to be answered again.
    Regenerate,
    /// The last message was removed: its text, for editing.
    EditLast(String),
    Send(String),
    Quit,
}

const SLASH_HELP: &str = "\
/why CHUNK                explain what happened to a chunk
/context                  print the context window, shaded by brightness (attention)
/graveyard                list pruned chunks
/pin, /unpin CHUNK…       never prune a chunk, or allow it again
/prune CHUNK…             remove from the context window
/resurrect CHUNK…         bring back at the original position
/delete, /undelete CHUNK… remove from the context window and search, or undo that
/merge CHUNK…             merge into the preceding chunk
/regenerate               generate the last answer again
/edit [TEXT]              edit the last message and send it again
/branch NAME [TURN]       copy the conversation up to that turn
/notes                    print the model's notes
/memories                 print the model's memories; `halo memories` edits them
/settings                 print the effective settings
/help                     print this help
/quit                     quit (also Ctrl-D)
//…                       send a message that begins with a slash
To erase text permanently, quit and use `halo forget`.
A chunk is a paragraph of a message, such as u4.0 or a5.2: role (u user, a assistant), turn, paragraph.
";

/// Runs a slash command; none if the line is a message.
pub fn run_slash_command(
    line: &str,
    session: &mut Session,
    settings: &Settings,
    paint: TerminalStyle,
) -> Result<Option<SlashCommandResult>> {
    // Two slashes begin a message that starts with a slash.
    let Some(order) = line.trim().strip_prefix('/').filter(|order| !order.starts_with('/')) else {
        return Ok(None);
    };
    let mut words = order.split_whitespace();
    let (word, rest) = (words.next().unwrap_or_default(), words.collect::<Vec<_>>());
    let edit = match word {
        "undelete" => Some(ManualEdit::Undelete),
        _ => ManualEdit::ALL.into_iter().find(|edit| edit.name() == word),
    };
    if let Some(edit) = edit {
        return Ok(Some(SlashCommandResult::Print(apply_manual_edit(edit, &rest, session)?)));
    }
    Ok(Some(match word {
        "help" | "?" => SlashCommandResult::Print(SLASH_HELP.into()),
        "quit" | "exit" | "q" => SlashCommandResult::Quit,
        "regenerate" => SlashCommandResult::Regenerate,
        "edit" if rest.is_empty() => {
            SlashCommandResult::EditLast(session.retract_last_message(EditAuthor::User)?)
        }
        "edit" => {
            session.retract_last_message(EditAuthor::User)?;
            SlashCommandResult::Send(order.trim_start().trim_start_matches("edit").trim().to_owned())
        }
        "why" => SlashCommandResult::Print(chunk_history_page(&rest, session)?),
        "context" => SlashCommandResult::Print(context_window_page(session, paint)),
        "graveyard" => SlashCommandResult::Print(graveyard_page(session)?),
        "branch" => SlashCommandResult::Print(create_branch(&rest, session)?),
        "notes" => SlashCommandResult::Print(notes_page(session)?),
        "memories" => SlashCommandResult::Print(memories_page(session)),
        "settings" => SlashCommandResult::Print(settings_page(settings)),
        _ => bail!("there is no command /{}: /help lists the commands", sanitize_terminal_text(word)),
    }))
}

fn memories_page(session: &Session) -> String {
    let lines: String = session.memories().iter().map(memories::memory_text).collect();
    if lines.is_empty() {
        format!("there are no memories yet: {}\n", session.explain_no_memory_due())
    } else {
        lines
    }
}

fn parse_chunks(words: &[&str]) -> Result<Vec<ChunkId>> {
    if words.is_empty() {
        bail!("name a chunk, such as u4.0: /context and /graveyard list them");
    }
    Ok(words.iter().map(|word| word.parse()).collect::<Result<_, _>>()?)
}

fn apply_manual_edit(signal: ManualEdit, words: &[&str], session: &mut Session) -> Result<String> {
    let sent = session.apply_edit(signal, &parse_chunks(words)?)?;
    let names: Vec<String> = sent.change.named_chunks().iter().map(ToString::to_string).collect();
    Ok(format!("{}: {}\n", signal.result_text(), names.join(" ")))
}

fn chunk_history_page(words: &[&str], session: &mut Session) -> Result<String> {
    let mut out = String::new();
    for chunk in parse_chunks(words)? {
        let (name, mut timeline) = (session.name().to_owned(), session.timeline().clone());
        out += &chunk_history_text(session.store(), &name, &mut timeline, chunk)?;
    }
    Ok(out)
}

fn context_window_page(session: &Session, paint: TerminalStyle) -> String {
    let timeline = session.timeline();
    let range = brightness_range(timeline);
    let mut out = String::new();
    for chunk in timeline.live_chunks() {
        let text = paint.shade_by_brightness(timeline, chunk, range);
        let pinned = if chunk.is_pinned() { " pinned" } else { "" };
        let about = paint.dim(&format!(
            "{:<7} {}{pinned}",
            chunk.id().to_string(),
            pluralize(chunk.live_len() as u64, "token")
        ));
        let _ = writeln!(out, "{about}\n{}", text.trim());
    }
    if out.is_empty() { "the context window is empty\n".into() } else { out }
}

fn graveyard_page(session: &mut Session) -> Result<String> {
    let (name, mut timeline) = (session.name().to_owned(), session.timeline().clone());
    let dead: Vec<ChunkId> =
        timeline.chunks().filter(|c| c.pruned_len() > 0 && !c.is_deleted()).map(|c| c.id()).collect();
    let shown = &dead[dead.len().saturating_sub(MAX_GRAVEYARD_LISTED)..];
    session.store().load_bodies(&name, &mut timeline, shown)?;
    let mut out = String::new();
    if shown.len() < dead.len() {
        let _ =
            writeln!(out, "the latest {MAX_GRAVEYARD_LISTED} of {}; `halo show --all` lists all", dead.len());
    }
    for chunk in shown.iter().filter_map(|&id| timeline.chunk(id)) {
        let _ = writeln!(
            out,
            "{:<7} {:>5}  {}",
            chunk.id().to_string(),
            chunk.pruned_len(),
            truncate_line(&chunk.text(), 90)
        );
    }
    Ok(if dead.is_empty() { "no chunk is pruned\n".into() } else { out })
}

/// The graveyard lists so many of the latest chunks.
const MAX_GRAVEYARD_LISTED: usize = 100;

fn create_branch(words: &[&str], session: &mut Session) -> Result<String> {
    let (name, turn) = match words {
        [name] => (*name, None),
        [name, turn] => {
            (*name, Some(turn.parse().map_err(|_| anyhow::anyhow!("{turn} is not a turn: /branch NAME 12"))?))
        }
        _ => bail!("write /branch NAME, or /branch NAME TURN"),
    };
    let turns = session.branch(name, turn)?;
    Ok(format!(
        "'{name}' has {} of this conversation: `halo chat -c {name}` continues there\n",
        pluralize(turns as u64, "message")
    ))
}

fn notes_page(session: &mut Session) -> Result<String> {
    let name = session.name().to_owned();
    let notes = session.store().records(&name, RecordKind::Note)?;
    let page: String = notes.iter().map(|note| format!("{}\n{}\n", note.key, note.value)).collect();
    Ok(if page.is_empty() { "the model has no notes yet\n".into() } else { sanitize_terminal_text(&page) })
}

fn settings_page(settings: &Settings) -> String {
    let mut out = String::new();
    for key in KEYS {
        if let Some((value, _)) = settings.get(key.name) {
            let _ = writeln!(out, "{:<30} {value}", key.name);
        }
    }
    sanitize_terminal_text(&out)
}
