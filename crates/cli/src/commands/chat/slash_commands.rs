//! Slash commands of `halo chat`.

use super::style::{TerminalStyle, brightness_range};
use crate::commands::show::chunk_history_text;
use crate::commands::{memories, search};
use crate::env::Env;
use crate::error::not_found;
use crate::models::catalogue::ModelKind;
use crate::output::{pluralize, sanitize_terminal_text, truncate_line};
use crate::script_model::script_file;
use crate::settings::load::closest_match;
use crate::settings::{KEYS, Settings};
use crate::wiring;
use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use halo_core::store::{RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Role, TurnId};
use halo_engine::manual_edit::ManualEdit;
use halo_engine::session::Session;
use halo_engine::turn::{EditAuthor, TurnInput};
use std::fmt::Write;

/// What a slash command works with, besides the conversation.
pub struct SlashContext<'a> {
    pub env: &'a Env,
    pub settings: &'a Settings,
    pub style: TerminalStyle,
    /// Whether answers are recorded.
    pub recording: bool,
}

pub enum SlashCommandResult {
    Print(String),
    Answer(TurnInput),
    /// The next line begins with this.
    EditLine(String),
    Change(Box<ChatChange>),
    Quit,
}

/// The chat goes on with these.
pub struct ChatChange {
    pub env: Env,
    pub conversation: String,
    /// Whether the model that is loaded can be used.
    pub keeps_model: bool,
}

/// What follows the name of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlashArgument {
    None,
    Text,
    Chunks,
    Conversation,
    Model,
    Setting,
}

pub struct SlashCommand {
    pub name: &'static str,
    pub argument: SlashArgument,
    /// How the argument is written.
    usage: &'static str,
    about: &'static str,
}

const fn command(
    name: &'static str,
    argument: SlashArgument,
    usage: &'static str,
    about: &'static str,
) -> SlashCommand {
    SlashCommand { name, argument, usage, about }
}

pub const SLASH_COMMANDS: &[SlashCommand] = &[
    command("search", SlashArgument::Text, "TEXT", "search this conversation, pruned text too"),
    command("why", SlashArgument::Chunks, "CHUNK…", "explain what happened to a chunk"),
    command("context", SlashArgument::None, "", "print the context window: what got most attention is bold"),
    command("graveyard", SlashArgument::None, "", "list pruned chunks"),
    command("pin", SlashArgument::Chunks, "CHUNK…", "never prune a chunk"),
    command("unpin", SlashArgument::Chunks, "CHUNK…", "allow pruning it again"),
    command("prune", SlashArgument::Chunks, "CHUNK…", "remove from the context window"),
    command("resurrect", SlashArgument::Chunks, "CHUNK…", "bring back at the original position"),
    command("delete", SlashArgument::Chunks, "CHUNK…", "remove from the context window and search"),
    command("undelete", SlashArgument::Chunks, "CHUNK…", "undo that"),
    command("merge", SlashArgument::Chunks, "CHUNK…", "merge into the preceding chunk"),
    command("regenerate", SlashArgument::None, "", "generate the last answer again"),
    command("continue", SlashArgument::None, "", "generate more of the last answer"),
    command("edit", SlashArgument::Text, "[TEXT]", "edit the last message and send it again"),
    command("copy", SlashArgument::None, "", "copy the last answer to the clipboard"),
    command("branch", SlashArgument::Text, "NAME [TURN]", "copy the conversation up to that turn"),
    command("new", SlashArgument::Text, "[NAME]", "begin a conversation"),
    command("switch", SlashArgument::Conversation, "[NAME]", "go on with another conversation, or list all"),
    command("model", SlashArgument::Model, "[NAME]", "use another model, or list the installed ones"),
    command("set", SlashArgument::Setting, "KEY=VALUE", "change a setting until you quit"),
    command("settings", SlashArgument::None, "", "print the effective settings"),
    command("notes", SlashArgument::None, "", "print the model's notes"),
    command("memories", SlashArgument::None, "", "print the model's memories; `halo memories` edits them"),
    command("help", SlashArgument::None, "", "print this help"),
    command("quit", SlashArgument::None, "", "quit (also Ctrl-D)"),
];

const HELP_END: &str = "\
//…                       send a message that begins with a slash
Tab completes commands, chunks, names and settings. Alt+Enter begins another line of a message.
To erase text permanently, quit and use `halo forget`.
A chunk is a paragraph of a message, such as u4.0 or a5.2: role (u user, a assistant), turn, paragraph.
";

fn help_page() -> String {
    let mut out = String::new();
    for command in SLASH_COMMANDS {
        let usage = format!("/{} {}", command.name, command.usage);
        let _ = writeln!(out, "{usage:<25} {}", command.about);
    }
    out + HELP_END
}

/// Runs a slash command; none if the line is a message.
pub fn run_slash_command(
    line: &str,
    session: &mut Session,
    context: &SlashContext<'_>,
) -> Result<Option<SlashCommandResult>> {
    // Two slashes begin a message that starts with a slash.
    let Some(order) = line.trim().strip_prefix('/').filter(|order| !order.starts_with('/')) else {
        return Ok(None);
    };
    let (word, argument) = order.split_once(char::is_whitespace).unwrap_or((order, ""));
    let argument = argument.trim();
    let rest: Vec<&str> = argument.split_whitespace().collect();
    let edit = match word {
        "undelete" => Some(ManualEdit::Undelete),
        _ => ManualEdit::ALL.into_iter().find(|edit| edit.name() == word),
    };
    if let Some(edit) = edit {
        return Ok(Some(SlashCommandResult::Print(apply_manual_edit(edit, &rest, session)?)));
    }
    Ok(Some(match word {
        "help" | "?" => SlashCommandResult::Print(help_page()),
        "quit" | "exit" | "q" => SlashCommandResult::Quit,
        "regenerate" => SlashCommandResult::Answer(TurnInput::Regenerate(EditAuthor::User)),
        "continue" => SlashCommandResult::Answer(TurnInput::ContinueLast),
        "edit" if argument.is_empty() => {
            let last = last_turn(session.timeline(), Role::User).context("there is no message to edit")?;
            SlashCommandResult::EditLine(format!("/edit {}", message_text(session, last)?.trim()))
        }
        "edit" => SlashCommandResult::Answer(TurnInput::EditLast(argument.to_owned(), EditAuthor::User)),
        "why" => SlashCommandResult::Print(chunk_history_page(&rest, session)?),
        "context" => SlashCommandResult::Print(context_window_page(session, context.style)),
        "graveyard" => SlashCommandResult::Print(graveyard_page(session)?),
        "branch" => SlashCommandResult::Print(create_branch(&rest, session)?),
        "notes" => SlashCommandResult::Print(notes_page(session)?),
        "memories" => SlashCommandResult::Print(memories_page(session)),
        "settings" => SlashCommandResult::Print(settings_page(context.settings)),
        "search" => {
            let found = search::search_page(context.env, context.settings, session.name(), argument)?;
            SlashCommandResult::Print(found)
        }
        "copy" => SlashCommandResult::Print(copy_last_answer(session)?),
        "switch" if argument.is_empty() => {
            SlashCommandResult::Print(conversations_page(session, context.env)?)
        }
        "model" if argument.is_empty() => SlashCommandResult::Print(models_page(session, context.env)?),
        "set" if argument.is_empty() => SlashCommandResult::Print(settings_page(context.settings)),
        "new" | "switch" | "model" | "set" => {
            if context.recording {
                bail!("answers are recorded with one model and in one conversation: quit first");
            }
            let change = change_chat(word, argument, session, context.env)?;
            SlashCommandResult::Change(Box::new(change))
        }
        _ => bail!("there is no command /{}: /help lists the commands", sanitize_terminal_text(word)),
    }))
}

fn change_chat(word: &str, argument: &str, session: &Session, env: &Env) -> Result<ChatChange> {
    let mut env = env.clone();
    let mut conversation = session.name().to_owned();
    let mut keeps_model = true;
    match word {
        "model" => {
            env.models.name = Some(argument.to_owned());
            check_model(&env)?;
            keeps_model = false;
        }
        "set" => {
            let (key, _) = argument.split_once('=').context("write /set KEY=VALUE")?;
            keeps_model = !key.trim().starts_with("model.") && !key.trim().starts_with("kv.");
            env.settings.set.push(argument.to_owned());
            if key.trim() == "generation.seed" {
                env.settings.seed = None;
            }
            env.load_settings()?;
            if key.trim() == "model.path" {
                env.models.name = None;
                env.apply_model_setting();
                check_model(&env)?;
            }
        }
        _ => {
            let names = conversation_names(&env)?;
            let exists = |name: &str| names.iter().any(|other| other == name);
            conversation = match (word, argument) {
                ("new", "") => free_name(exists),
                ("new", name) if exists(name) => {
                    bail!("there is a conversation '{name}' already: /switch {name} goes on with it")
                }
                ("switch", name) if !exists(name) => return Err(unknown_conversation(name, &names)),
                (_, name) => name.to_owned(),
            };
        }
    }
    Ok(ChatChange { env, conversation, keeps_model })
}

/// A file that does not exist is an error before the model in use is closed.
fn check_model(env: &Env) -> Result<()> {
    let has_file =
        !wiring::uses_remote_model(env) && env.models.name.as_deref().and_then(script_file).is_none();
    if has_file {
        env.model_file()?;
    }
    Ok(())
}

/// A name by the day, with a number where there is one already.
fn free_name(exists: impl Fn(&str) -> bool) -> String {
    let day = format!("chat {}", jiff::Zoned::now().date());
    let numbered = (2..).map(|n| format!("{day} {n}"));
    std::iter::once(day.clone()).chain(numbered).find(|name| !exists(name)).unwrap_or_default()
}

fn conversation_names(env: &Env) -> Result<Vec<String>> {
    let store = env.open_store_read_only()?;
    let all = store.map(|mut store| store.list_conversations()).transpose()?.unwrap_or_default();
    Ok(all.into_iter().map(|one| one.name).collect())
}

fn unknown_conversation(name: &str, names: &[String]) -> anyhow::Error {
    let meant = closest_match(name, names.iter().map(String::as_str));
    let meant = meant.map_or_else(String::new, |meant| format!("; did you mean '{meant}'?"));
    not_found(format!("there is no conversation '{name}': /new {name} begins one{meant}"))
}

fn conversations_page(session: &Session, env: &Env) -> Result<String> {
    let mut names = conversation_names(env)?;
    // One without messages is not stored.
    if !names.iter().any(|name| name == session.name()) {
        names.push(session.name().to_owned());
    }
    let mark = |name: &String| if name == session.name() { '*' } else { ' ' };
    let lines = names.iter().map(|name| format!("{} {}\n", mark(name), sanitize_terminal_text(name)));
    Ok(lines.collect::<String>() + "/switch NAME goes on with one of them\n")
}

fn models_page(session: &Session, env: &Env) -> Result<String> {
    let current = &session.model().info().name;
    let mut out = format!("{} answers\n", sanitize_terminal_text(current));
    for model in env.model_library()?.installed()?.iter().filter(|model| model.kind == ModelKind::Chat) {
        let _ = writeln!(out, "  {}", sanitize_terminal_text(&model.name));
    }
    Ok(out + "/model NAME uses one of them; a path or the address of a server is a name too\n")
}

/// The last message of a role that is not deleted.
pub fn last_turn(timeline: &Timeline, role: Role) -> Option<TurnId> {
    let is_kept = |turn| timeline.turn_chunks(turn).any(|chunk| !chunk.is_deleted());
    timeline.turns().iter().rev().find(|turn| turn.role == role && is_kept(turn.id)).map(|turn| turn.id)
}

/// The text of a message, pruned paragraphs too, without deleted ones.
pub fn message_text(session: &mut Session, turn: TurnId) -> Result<String> {
    let (name, mut timeline) = (session.name().to_owned(), session.timeline().clone());
    let kept = timeline.turn_chunks(turn).filter(|chunk| !chunk.is_deleted());
    let chunks: Vec<ChunkId> = kept.map(|chunk| chunk.id()).collect();
    session.store().load_bodies(&name, &mut timeline, &chunks)?;
    Ok(chunks.iter().filter_map(|&id| timeline.chunk(id)).map(|chunk| chunk.text().into_owned()).collect())
}

/// Terminals take at most this from a program.
const MAX_CLIPBOARD_BYTES: usize = 74_994;

/// The escape sequence (OSC 52) that asks the terminal to copy a text, which works over a remote shell too.
fn copy_last_answer(session: &mut Session) -> Result<String> {
    let turn = last_turn(session.timeline(), Role::Assistant).context("there is no answer yet")?;
    let text = message_text(session, turn)?;
    let encoded = BASE64_STANDARD.encode(text.trim());
    if encoded.len() > MAX_CLIPBOARD_BYTES {
        bail!("the answer is too long for the clipboard of a terminal: `halo show` prints it");
    }
    let characters = pluralize(text.trim().chars().count() as u64, "character");
    Ok(format!("\x1b]52;c;{encoded}\x07{characters} copied, if the terminal allows it\n"))
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
