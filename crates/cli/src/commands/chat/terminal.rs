//! The conversation on a screen: what is said streams in, what leaves and returns is told, and a line says how things
//! stand.

use super::slash_commands::{SlashCommandResult, run_slash_command};
use super::style::TerminalStyle;
use crate::env::Env;
use crate::error::error_text;
use crate::output::{pluralize, sanitize_terminal_text};
use anyhow::Result;
use halo_agents::mu;
use halo_core::Error;
use halo_core::model::{FinishReason, StepFlow};
use halo_engine::event::{Event, TurnStage, TurnSummary};
use halo_engine::session::Session;
use halo_engine::turn::EditAuthor;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};
use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Talks until the user leaves.
pub fn run(session: &mut Session, env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    let paint = TerminalStyle::from_environment();
    let halted = Arc::new(AtomicUsize::new(0));
    let heard = Arc::clone(&halted);
    // The first stops the answer; the second does not wait for that. Whatever was on the screen is stored.
    ctrlc::set_handler(move || {
        if heard.fetch_add(1, Ordering::SeqCst) > 0 {
            println!();
            std::process::exit(130);
        }
    })?;
    let mut editor = DefaultEditor::with_config(Config::builder().auto_add_history(true).build())?;
    let history = env.data_dir().map(|data| data.join(super::HISTORY_FILE));
    if let Some(history) = &history {
        let _ = editor.load_history(history);
    }
    println!("{}", paint.dim(&greeting(session)));
    for notice in session.take_notices() {
        println!("{}", paint.highlight(&sanitize_terminal_text(&notice)));
    }
    let (mut begun, mut leaving, mut ahead) = (String::new(), false, VecDeque::new());
    loop {
        ahead.extend(drain_typed_lines());
        let read = match ahead.pop_front() {
            Some(line) => {
                println!("› {}", sanitize_terminal_text(&line));
                let _ = editor.add_history_entry(&line);
                Ok(line)
            }
            None => form_memories_while_reading(session, || editor.readline_with_initial("› ", (&begun, ""))),
        };
        let line = match read {
            Ok(line) => line,
            Err(ReadlineError::Eof) => break,
            // Once drops the line, twice leaves.
            Err(ReadlineError::Interrupted) if !std::mem::replace(&mut leaving, true) => continue,
            Err(ReadlineError::Interrupted) => break,
            Err(error) => return Err(error.into()),
        };
        begun.clear();
        leaving = false;
        if line.trim().is_empty() {
            continue;
        }
        halted.store(0, Ordering::SeqCst);
        let today = jiff::Zoned::now().date();
        let mut screen = AnswerDisplay { paint, interrupts: &halted, line_open: false };
        let done = match run_slash_command(&line, session, &settings, paint) {
            Ok(None) => {
                let message = line.strip_prefix('/').filter(|rest| rest.starts_with('/')).unwrap_or(&line);
                Some(session.send_message(message, today, &mut |event| screen.handle_event(event)))
            }
            Ok(Some(SlashCommandResult::Regenerate)) => {
                Some(session.regenerate(EditAuthor::User, today, &mut |event| screen.handle_event(event)))
            }
            Ok(Some(SlashCommandResult::Send(text))) => {
                Some(session.send_message(&text, today, &mut |event| screen.handle_event(event)))
            }
            Ok(Some(SlashCommandResult::EditLast(text))) => {
                begun = text;
                None
            }
            Ok(Some(SlashCommandResult::Print(page))) => {
                print!("{page}");
                None
            }
            Ok(Some(SlashCommandResult::Quit)) => break,
            Err(error) => {
                println!("{}", paint.error(&sanitize_terminal_text(&error_text(&error))));
                None
            }
        };
        screen.clear_open_line();
        if done.is_some() {
            println!();
        }
        match done {
            Some(Ok(summary)) => println!("{}", paint.dim(&status_line(session, &summary))),
            Some(Err(error)) => println!("{}", paint.error(&turn_error_message(&error))),
            None => {}
        }
        if let Some(history) = &history {
            let _ = editor.save_history(history);
        }
    }
    Ok(())
}

/// While somebody types, memories are formed; what they send ends that at once.
fn form_memories_while_reading<T>(session: &mut Session, read: impl FnOnce() -> T) -> T {
    if session.rules().memory.is_none() {
        return read();
    }
    let breaker = session.model().cancel_handle();
    let wanted = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // What fails is tried again after the next answer.
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

/// The lines that were typed while an answer came: the editor would take the first of them and drop the rest.
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
    // The terminal gives whole lines as long as nobody edits one.
    while typed.len() < 1 << 20 && waiting() {
        match rustix::io::read(stdin, &mut buffer) {
            Ok(n) if n > 0 => typed.extend_from_slice(&buffer[..n]),
            _ => break,
        }
    }
    String::from_utf8_lossy(&typed).lines().map(str::to_owned).collect()
}

/// Elsewhere the editor sees all that is typed.
#[cfg(not(unix))]
fn typed_ahead() -> Vec<String> {
    Vec::new()
}

fn greeting(session: &Session) -> String {
    let (timeline, name) = (session.timeline(), sanitize_terminal_text(session.name()));
    let model = sanitize_terminal_text(&session.model().info().name);
    if timeline.is_empty() {
        return format!("{model} · a new conversation, '{name}' · /help lists what can be asked for");
    }
    let messages = pluralize(timeline.turns().len() as u64, "message");
    let (live, all) = (group_digits(timeline.live_len()), group_digits(timeline.len()));
    format!(
        "{model} · '{name}': {messages}, {live} of {all} tokens in the window · /help lists what can be asked for"
    )
}

fn turn_error_message(error: &Error) -> String {
    let told = sanitize_terminal_text(&error.to_string());
    // What is wrong with an order or a message is no matter of answering once more.
    let ours = ["answering again", "making room for the message", "reading the message"];
    if ours.contains(&error.operation.as_str()) {
        told
    } else {
        format!("{told}\nthe message is kept; /regenerate answers it")
    }
}

/// `window 1,412/2,000 · 3 left · 1 returned · 78 tok/s`.
fn status_line(session: &Session, summary: &TurnSummary) -> String {
    let mut parts =
        vec![format!("window {}/{}", group_digits(summary.live_tokens), group_digits(session.token_limit()))];
    parts.extend((summary.pruned > 0).then(|| format!("{} left", summary.pruned)));
    parts.extend((summary.resurrected > 0).then(|| format!("{} returned", summary.resurrected)));
    parts.push(format!("{:.0} tok/s", summary.tokens_per_second()));
    parts.push(format!("first token after {:.1} s", time_to_first_token(summary)));
    match summary.finish {
        FinishReason::Length => parts.push("cut at generation.max_tokens".into()),
        FinishReason::Cancelled => parts.push("stopped".into()),
        FinishReason::EndOfText | FinishReason::StopSequence => {}
    }
    parts.join(" · ")
}

/// From Enter to the first token, in seconds.
fn time_to_first_token(summary: &TurnSummary) -> f64 {
    let before = [TurnStage::Preview, TurnStage::Recall, TurnStage::Store, TurnStage::Prefill];
    before.iter().map(|&stage| summary.stage_duration(stage).as_secs_f64()).sum()
}

fn group_digits(n: usize) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().filter_map(|group| str::from_utf8(group).ok()).collect();
    groups.join(",")
}

/// What is on the screen while an answer comes.
struct AnswerDisplay<'a> {
    paint: TerminalStyle,
    interrupts: &'a AtomicUsize,
    /// The last line has not ended.
    line_open: bool,
}

impl AnswerDisplay<'_> {
    fn handle_event(&mut self, event: Event) -> StepFlow {
        match event {
            Event::Resurrected { chunk, tokens, reason: why } => {
                self.clear_open_line();
                let told = format!("↩ {chunk} is back ({}): {why}", pluralize(tokens as u64, "token"));
                println!("{}", self.paint.highlight(&sanitize_terminal_text(&told)));
            }
            Event::Prefilling { done, total: of } if of > 64 => {
                print!("\r{}", self.paint.dim(&format!("reading {done}/{of} ")));
                self.line_open = true;
            }
            Event::Token { text, .. } => {
                if self.line_open {
                    // What was read is told no more.
                    print!("\r\x1b[K");
                    self.line_open = false;
                }
                print!("{}", sanitize_terminal_text(&text));
            }
            Event::BudgetExceeded(why) => {
                self.clear_open_line();
                print!("\n{}", self.paint.error(&sanitize_terminal_text(&why)));
            }
            Event::FalsePremise { premise, reason, suggestion } => {
                let told = mu::premise_notice(&premise, &reason, &suggestion);
                println!("{}", self.paint.error(&sanitize_terminal_text(&told)));
            }
            Event::Notice(text) => println!("{}", self.paint.dim(&sanitize_terminal_text(&text))),
            Event::Scored { errors: Some((steps, why)), .. } => {
                let told = format!("{} whose attention could not be used: {why}", pluralize(steps, "step"));
                print!("\n{}", self.paint.error(&told));
            }
            _ => {}
        }
        let _ = std::io::stdout().flush();
        if self.interrupts.load(Ordering::SeqCst) > 0 { StepFlow::Stop } else { StepFlow::Continue }
    }

    /// Ends a line that was begun.
    fn clear_open_line(&mut self) {
        if std::mem::take(&mut self.line_open) {
            print!("\r\x1b[K");
        }
    }
}
