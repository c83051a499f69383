//! The interactive chat: streams answers, reports pruned and resurrected chunks, and prints a status line per turn.

use super::slash_commands::{SlashCommandResult, run_slash_command};
use super::style::TerminalStyle;
use crate::commands::forget::relieve_pressure;
use crate::env::Env;
use crate::error::error_text;
use crate::output::{explain_window, group_digits, pluralize, sanitize_terminal_text};
use anyhow::Result;
use halo_agents::mu;
use halo_core::model::{FinishReason, StepFlow};
use halo_core::{Error, ErrorKind};
use halo_engine::event::{Event, TurnStage, TurnSummary};
use halo_engine::session::Session;
use halo_engine::turn::EditAuthor;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};
use std::collections::VecDeque;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub fn run(session: &mut Session, env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    let style = TerminalStyle::from_environment();
    let interrupts = handle_interrupts()?;
    let mut reader = LineReader::new(env.input_history_file())?;
    println!("{}", style.dim(&greeting(session)));
    for notice in session.take_notices() {
        println!("{}", style.highlight(&sanitize_terminal_text(&notice)));
    }
    while let Some(line) = reader.read_line(session)? {
        if line.trim().is_empty() {
            continue;
        }
        interrupts.store(0, Ordering::SeqCst);
        let mut screen = AnswerDisplay { style, interrupts: &interrupts, line_open: false };
        let result = match run_slash_command(&line, session, &settings, style) {
            Ok(Some(SlashCommandResult::Quit)) => break,
            Ok(Some(SlashCommandResult::EditLast(text))) => {
                reader.initial_text = text;
                None
            }
            Ok(Some(SlashCommandResult::Print(page))) => {
                print!("{page}");
                None
            }
            Ok(Some(SlashCommandResult::Regenerate)) => Some(answer(session, &mut screen, None)),
            Ok(Some(SlashCommandResult::Send(text))) => Some(answer(session, &mut screen, Some(&text))),
            Ok(None) => {
                let escaped = line.strip_prefix('/').filter(|rest| rest.starts_with('/'));
                Some(answer(session, &mut screen, Some(escaped.unwrap_or(&line))))
            }
            Err(error) => {
                println!("{}", style.error(&sanitize_terminal_text(&error_text(&error))));
                None
            }
        };
        screen.clear_open_line();
        match result {
            Some(Ok(summary)) => {
                println!("\n{}", style.dim(&status_line(session, &summary)));
                relieve_pressure(session, env, &settings);
            }
            Some(Err(error)) => println!("\n{}", style.error(&turn_error_message(&error))),
            None => {}
        }
        reader.save_history();
    }
    Ok(())
}

/// Counts interrupts. The first Ctrl-C stops the answer; the second exits at once. Every printed token is stored.
fn handle_interrupts() -> Result<Arc<AtomicUsize>> {
    let interrupts = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&interrupts);
    ctrlc::set_handler(move || {
        if counter.fetch_add(1, Ordering::SeqCst) > 0 {
            println!();
            std::process::exit(130);
        }
    })?;
    Ok(interrupts)
}

/// Runs a turn: answers a message, or the last one again.
fn answer(
    session: &mut Session,
    screen: &mut AnswerDisplay<'_>,
    message: Option<&str>,
) -> Result<TurnSummary, Error> {
    let now = jiff::Zoned::now().datetime();
    match message {
        Some(text) => session.send_message(text, now, &mut |event| screen.handle_event(event)),
        None => session.regenerate(EditAuthor::User, now, &mut |event| screen.handle_event(event)),
    }
}

/// Reads lines from the terminal, with editing and a history.
struct LineReader {
    editor: DefaultEditor,
    history: Option<PathBuf>,
    /// The text that the next line begins with.
    initial_text: String,
    /// Lines that were typed while an answer was generated.
    typed_ahead: VecDeque<String>,
}

impl LineReader {
    fn new(history: Option<PathBuf>) -> Result<Self> {
        let mut editor = DefaultEditor::with_config(Config::builder().auto_add_history(true).build())?;
        if let Some(history) = &history {
            let _ = editor.load_history(history);
        }
        Ok(Self { editor, history, initial_text: String::new(), typed_ahead: VecDeque::new() })
    }

    /// The next line; none at the end of the input. Ctrl-C clears the line; twice in a row ends the input.
    fn read_line(&mut self, session: &mut Session) -> Result<Option<String>> {
        let mut interrupted = false;
        loop {
            self.typed_ahead.extend(drain_typed_lines());
            if let Some(line) = self.typed_ahead.pop_front() {
                println!("› {}", sanitize_terminal_text(&line));
                let _ = self.editor.add_history_entry(&line);
                self.initial_text.clear();
                return Ok(Some(line));
            }
            let (editor, initial) = (&mut self.editor, &self.initial_text);
            let read = || editor.readline_with_initial("› ", (initial, ""));
            match form_memories_while_reading(session, read) {
                Ok(line) => {
                    self.initial_text.clear();
                    return Ok(Some(line));
                }
                Err(ReadlineError::Eof) => return Ok(None),
                Err(ReadlineError::Interrupted) if !std::mem::replace(&mut interrupted, true) => {}
                Err(ReadlineError::Interrupted) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn save_history(&mut self) {
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

/// The lines that were typed during an answer: the line editor would take the first and drop the rest.
#[cfg(unix)]
fn drain_typed_lines() -> Vec<String> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let stdin = rustix::stdio::stdin();
    let (mut typed, mut buffer) = (Vec::new(), [0; 4096]);
    let waiting = || {
        let mut one = [PollFd::new(&stdin, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut one, Some(&now)).is_ok_and(|n| n > 0)
    };
    // The terminal delivers whole lines while no line is edited.
    while typed.len() < 1 << 20 && waiting() {
        match rustix::io::read(stdin, &mut buffer) {
            Ok(n) if n > 0 => typed.extend_from_slice(&buffer[..n]),
            _ => break,
        }
    }
    String::from_utf8_lossy(&typed).lines().map(str::to_owned).collect()
}

/// On other systems the editor receives everything that is typed.
#[cfg(not(unix))]
fn typed_ahead() -> Vec<String> {
    Vec::new()
}

fn greeting(session: &Session) -> String {
    let (timeline, name) = (session.timeline(), sanitize_terminal_text(session.name()));
    let model = sanitize_terminal_text(&session.model().info().name);
    let window = window_text(session);
    if timeline.is_empty() {
        return format!("{model} · a new conversation, '{name}' · {window} · /help lists the commands");
    }
    let messages = pluralize(timeline.turns().len() as u64, "message");
    let (live, all) = (group_digits(timeline.live_len()), group_digits(timeline.len()));
    format!(
        "{model} · '{name}': {messages}, {live} of {all} tokens in context · {window} · /help lists the commands"
    )
}

fn window_text(session: &Session) -> String {
    let limit = session.token_limit();
    match session.rules().auto_sizes.window && session.rules().context.max_tokens > 0 {
        true => format!("context window {}", explain_window(limit, session.prefill_speed())),
        false => format!("context window {} tokens", group_digits(limit)),
    }
}

fn turn_error_message(error: &Error) -> String {
    let text = sanitize_terminal_text(&error.to_string());
    match error.kind {
        // The message was rejected, so there is nothing to regenerate.
        ErrorKind::InvalidInput | ErrorKind::Conflict | ErrorKind::ContextLengthExceeded => text,
        _ => format!("{text}\nthe message is stored; /regenerate answers it"),
    }
}

/// Status line: `context 1,412/2,000 · 3 pruned · 1 resurrected · 78 tok/s`.
fn status_line(session: &Session, summary: &TurnSummary) -> String {
    let mut parts = vec![format!(
        "context {}/{}",
        group_digits(summary.live_tokens),
        group_digits(session.token_limit())
    )];
    parts.extend((summary.pruned > 0).then(|| format!("{} pruned", summary.pruned)));
    parts.extend((summary.resurrected > 0).then(|| format!("{} resurrected", summary.resurrected)));
    parts.push(format!("{:.0} tok/s", summary.tokens_per_second()));
    parts.push(format!("first token after {:.1} s", time_to_first_token(summary)));
    match summary.finish {
        FinishReason::Length if summary.tokens < session.rules().sampling.max_tokens => {
            parts.push("cut: the model's context is full".into());
        }
        FinishReason::Length => parts.push("cut at generation.max_tokens".into()),
        FinishReason::Cancelled => parts.push("stopped".into()),
        FinishReason::EndOfText | FinishReason::StopSequence => {}
    }
    parts.join(" · ")
}

/// Seconds from Enter to the first token.
fn time_to_first_token(summary: &TurnSummary) -> f64 {
    let before = [TurnStage::Preview, TurnStage::Recall, TurnStage::Store, TurnStage::Prefill];
    before.iter().map(|&stage| summary.stage_duration(stage).as_secs_f64()).sum()
}

/// The state of the screen during an answer.
struct AnswerDisplay<'a> {
    style: TerminalStyle,
    interrupts: &'a AtomicUsize,
    /// Whether the last line is not ended.
    line_open: bool,
}

impl AnswerDisplay<'_> {
    fn handle_event(&mut self, event: Event) -> StepFlow {
        match event {
            Event::Resurrected { chunk, tokens, reason: why } => {
                self.clear_open_line();
                let text = format!("↩ {chunk} resurrected ({}): {why}", pluralize(tokens as u64, "token"));
                println!("{}", self.style.highlight(&sanitize_terminal_text(&text)));
            }
            Event::Prefilling { done, total: of } if of > 64 => {
                print!("\r{}", self.style.dim(&format!("prefill {done}/{of} ")));
                self.line_open = true;
            }
            Event::Token { text, .. } => {
                if self.line_open {
                    // The prefill progress is not shown after prefill.
                    print!("\r\x1b[K");
                    self.line_open = false;
                }
                print!("{}", sanitize_terminal_text(&text));
            }
            Event::BudgetExceeded(why) => {
                self.clear_open_line();
                print!("\n{}", self.style.error(&sanitize_terminal_text(&why)));
            }
            Event::FalsePremise { premise, reason, principle, suggestion } => {
                let text = mu::premise_notice(&premise, &reason, principle, &suggestion);
                println!("{}", self.style.error(&sanitize_terminal_text(&text)));
            }
            Event::Notice(text) => println!("{}", self.style.dim(&sanitize_terminal_text(&text))),
            Event::Scored { errors: Some((steps, why)), .. } => {
                let text = format!("{} whose attention could not be used: {why}", pluralize(steps, "step"));
                print!("\n{}", self.style.error(&text));
            }
            _ => {}
        }
        let _ = std::io::stdout().flush();
        if self.interrupts.load(Ordering::SeqCst) > 0 { StepFlow::Stop } else { StepFlow::Continue }
    }

    /// Ends a line that is not ended.
    fn clear_open_line(&mut self) {
        if std::mem::take(&mut self.line_open) {
            print!("\r\x1b[K");
        }
    }
}
