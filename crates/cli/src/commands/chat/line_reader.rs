//! Reads lines from the terminal, with editing, a history and completion by Tab.

use super::slash_commands::{SLASH_COMMANDS, SlashArgument};
use super::typed_ahead::HiddenInput;
use crate::env::Env;
use crate::models::catalogue::ModelKind;
use crate::output::sanitize_terminal_text;
use crate::settings::KEYS;
use anyhow::Result;
use halo_core::store::Store;
use halo_engine::session::Session;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::Validator;
use rustyline::{
    Cmd, CompletionType, ConditionalEventHandler, Config, Context, Editor, Event, EventContext, EventHandler,
    Helper, KeyEvent, Movement, RepeatCount,
};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

pub struct LineReader {
    editor: Editor<SlashCompleter, DefaultHistory>,
    history: Option<PathBuf>,
    /// The text that the next line begins with.
    pub initial_text: String,
    /// Lines that were typed while an answer was generated.
    typed_ahead: VecDeque<String>,
}

impl LineReader {
    pub fn new(env: &Env) -> Result<Self> {
        let config = Config::builder().auto_add_history(true).completion_type(CompletionType::List).build();
        let mut editor = Editor::with_config(config)?;
        editor.set_helper(Some(SlashCompleter { env: env.clone(), chunks: Vec::new() }));
        editor.bind_sequence(KeyEvent::alt('\r'), Cmd::Newline);
        editor.bind_sequence(KeyEvent::ctrl('C'), EventHandler::Conditional(Box::new(ClearLine)));
        let history = env.input_history_file();
        if let Some(history) = &history {
            let _ = editor.load_history(history);
        }
        Ok(Self { editor, history, initial_text: String::new(), typed_ahead: VecDeque::new() })
    }

    /// Takes what was typed while no line was read. It goes on with the line that was begun before.
    pub fn add_typed(&mut self, hidden: HiddenInput) {
        let typed = hidden.end(std::mem::take(&mut self.initial_text));
        self.typed_ahead.extend(typed.lines);
        self.initial_text = typed.rest;
    }

    /// The next line; none at the end of the input. Ctrl-C clears the line; twice on an empty line, it ends the input.
    pub fn read_line(&mut self, session: &mut Session) -> Result<Option<String>> {
        let mut interrupted = false;
        loop {
            // The editor would drop what follows the first line.
            self.add_typed(HiddenInput::begin());
            if let Some(line) = self.typed_ahead.pop_front() {
                println!("› {}", sanitize_terminal_text(&line));
                let _ = self.editor.add_history_entry(&line);
                return Ok(Some(line));
            }
            if let Some(completer) = self.editor.helper_mut() {
                let chunks = session.timeline().chunks().filter(|chunk| !chunk.is_deleted());
                completer.chunks = chunks.map(|chunk| chunk.id().to_string()).collect();
            }
            let (editor, initial) = (&mut self.editor, &self.initial_text);
            let read = || editor.readline_with_initial("› ", (initial, ""));
            match form_memories_while_reading(session, read) {
                Ok(line) => {
                    self.initial_text.clear();
                    return Ok(Some(line));
                }
                Err(ReadlineError::Eof) => return Ok(None),
                Err(ReadlineError::Interrupted) if !std::mem::replace(&mut interrupted, true) => {
                    self.initial_text.clear();
                    println!("Ctrl-C again, Ctrl-D or /quit quits");
                }
                Err(ReadlineError::Interrupted) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub fn save_history(&mut self) {
        if let Some(history) = &self.history {
            let _ = self.editor.save_history(history);
        }
    }
}

/// Forms memories while the user types; sending a message cancels that.
fn form_memories_while_reading<T>(session: &mut Session, read: impl FnOnce() -> T) -> T {
    if session.rules().memory.is_none() {
        return read();
    }
    let breaker = session.model().cancel_handle();
    let wanted = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // A failed memory is tried again after the next answer.
        scope.spawn(|| {
            while session
                .run_idle_memory_work(&|| wanted.load(Ordering::SeqCst), &mut |_| {})
                .unwrap_or(false)
            {}
        });
        let read = read();
        wanted.store(true, Ordering::SeqCst);
        breaker.iter().for_each(|breaks| breaks());
        read
    })
}

/// Ctrl-C in a line that has text.
struct ClearLine;

impl ConditionalEventHandler for ClearLine {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext<'_>) -> Option<Cmd> {
        Some(match context.line().is_empty() {
            true => Cmd::Interrupt,
            false => Cmd::Kill(Movement::WholeBuffer),
        })
    }
}

/// Completes slash commands and what they are about.
struct SlashCompleter {
    env: Env,
    /// The chunks of the conversation.
    chunks: Vec<String>,
}

impl SlashCompleter {
    fn candidates(&self, argument: SlashArgument) -> Vec<String> {
        match argument {
            SlashArgument::None | SlashArgument::Text => Vec::new(),
            SlashArgument::Chunks => self.chunks.clone(),
            SlashArgument::Setting => KEYS.iter().map(|key| format!("{}=", key.name)).collect(),
            SlashArgument::Conversation => {
                let store = self.env.open_store_read_only().ok().flatten();
                let all = store.and_then(|mut store| store.list_conversations().ok());
                all.unwrap_or_default().into_iter().map(|one| one.name).collect()
            }
            SlashArgument::Model => {
                let installed = self.env.model_library().and_then(|library| library.installed());
                let installed = installed.unwrap_or_default().into_iter();
                installed.filter(|model| model.kind == ModelKind::Chat).map(|model| model.name).collect()
            }
        }
    }
}

impl Completer for SlashCompleter {
    type Candidate = String;

    fn complete(&self, line: &str, pos: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        let line = &line[..pos];
        let Some(order) = line.strip_prefix('/').filter(|order| !order.starts_with('/')) else {
            return Ok((pos, Vec::new()));
        };
        let (start, candidates) = match order.split_once(' ') {
            None => (0, SLASH_COMMANDS.iter().map(|command| format!("/{}", command.name)).collect()),
            Some((name, argument)) => {
                let command = SLASH_COMMANDS.iter().find(|command| command.name == name);
                let argument_kind = command.map_or(SlashArgument::None, |command| command.argument);
                // Names of conversations have spaces; chunks are separated by them.
                let word = match argument_kind {
                    SlashArgument::Chunks => argument.rsplit(' ').next().unwrap_or_default(),
                    _ => argument,
                };
                (pos - word.len(), self.candidates(argument_kind))
            }
        };
        let begun = &line[start..];
        Ok((start, candidates.into_iter().filter(|one| one.starts_with(begun)).collect()))
    }
}

impl Hinter for SlashCompleter {
    type Hint = String;
}
impl Highlighter for SlashCompleter {}
impl Validator for SlashCompleter {}
impl Helper for SlashCompleter {}
