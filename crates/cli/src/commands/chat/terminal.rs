//! The interactive chat: reads messages and slash commands, prints answers, and prints a status line per turn.

use super::answer_display::{AnswerDisplay, message_for_terminal, terminal_width};
use super::line_reader::LineReader;
use super::markdown::MarkdownStream;
use super::slash_commands::{
    ChatChange, SlashCommandResult, SlashContext, last_turn, message_text, run_slash_command,
};
use super::style::TerminalStyle;
use super::typed_ahead::{HiddenInput, restore_terminal};
use crate::commands::forget::relieve_pressure;
use crate::env::Env;
use crate::error::error_text;
use crate::output::{explain_window, group_digits, pluralize, sanitize_terminal_text};
use crate::wiring;
use anyhow::{Context, Result};
use halo_core::model::FinishReason;
use halo_core::token::Role;
use halo_core::{Error, ErrorKind};
use halo_engine::event::{TurnStage, TurnSummary};
use halo_engine::session::Session;
use halo_engine::turn::TurnInput;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Chats until the user quits. While answers are recorded, the conversation stays the same.
pub fn run(mut session: Session, env: &Env, recording: bool) -> Result<()> {
    let mut env = env.clone();
    let style = TerminalStyle::from_environment();
    let interrupts = handle_interrupts()?;
    let mut reader = LineReader::new(&env)?;
    print_greeting(&mut session, style);
    while let Some(line) = reader.read_line(&mut session)? {
        if line.trim().is_empty() {
            continue;
        }
        interrupts.store(0, Ordering::SeqCst);
        let settings = env.load_settings()?.settings;
        let context = SlashContext { env: &env, settings: &settings, style, recording };
        let hidden = HiddenInput::begin();
        let input = match run_slash_command(&line, &mut session, &context) {
            Ok(Some(SlashCommandResult::Quit)) => break,
            Ok(Some(SlashCommandResult::EditLine(text))) => {
                reader.initial_text = text;
                None
            }
            Ok(Some(SlashCommandResult::Print(page))) => {
                print!("{page}");
                None
            }
            Ok(Some(SlashCommandResult::Change(change))) => {
                let changed = reopen(session, &env, *change, style)?;
                (session, env) = changed;
                None
            }
            Ok(Some(SlashCommandResult::Answer(input))) => Some(input),
            Ok(None) => {
                let escaped = line.strip_prefix('/').filter(|rest| rest.starts_with('/'));
                Some(TurnInput::Message(escaped.unwrap_or(&line).to_owned()))
            }
            Err(error) => {
                println!("{}", style.error(&sanitize_terminal_text(&error_text(&error))));
                None
            }
        };
        if let Some(input) = input {
            // A second Ctrl-C ends the program.
            reader.save_history();
            let mut screen = AnswerDisplay::new(style, &interrupts, &hidden);
            let now = jiff::Zoned::now().datetime();
            let result = session.run_turn(input, now, &mut |event| screen.handle_event(event));
            screen.finish();
            match result {
                Ok(summary) => {
                    println!("\n{}", style.dim(&status_line(&session, &summary)));
                    relieve_pressure(&mut session, &env, &settings);
                }
                Err(error) => println!("\n{}", style.error(&turn_error_message(&error))),
            }
        }
        reader.add_typed(hidden);
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
            restore_terminal();
            println!();
            std::process::exit(130);
        }
    })?;
    Ok(interrupts)
}

/// Opens another conversation, or the same one with another model or other settings. Where that fails, the one before is opened again.
fn reopen(session: Session, env: &Env, change: ChatChange, style: TerminalStyle) -> Result<(Session, Env)> {
    let before = session.name().to_owned();
    let opened = if change.keeps_model {
        open_with_model(session, &change)
    } else {
        drop(session);
        change
            .env
            .load_settings()
            .and_then(|loaded| wiring::open_session(&change.env, &loaded.settings, &change.conversation))
    };
    match opened {
        Ok(mut session) => {
            print_greeting(&mut session, style);
            Ok((session, change.env))
        }
        Err(error) => {
            println!("{}", style.error(&sanitize_terminal_text(&error_text(&error))));
            let settings = env.load_settings()?.settings;
            let session = wiring::open_session(env, &settings, &before);
            Ok((session.with_context(|| format!("cannot return to '{before}'"))?, env.clone()))
        }
    }
}

/// The model stays loaded.
fn open_with_model(session: Session, change: &ChatChange) -> Result<Session> {
    let settings = change.env.load_settings()?.settings;
    wiring::open_session_with(session.into_model(), &change.env, &settings, &change.conversation)
}

fn print_greeting(session: &mut Session, style: TerminalStyle) {
    println!("{}", style.dim(&greeting(session)));
    for notice in session.take_notices() {
        println!("{}", style.highlight(&sanitize_terminal_text(&notice)));
    }
    match last_messages(session, style) {
        Ok(messages) => print!("{messages}"),
        Err(error) => println!("{}", style.error(&sanitize_terminal_text(&error_text(&error)))),
    }
}

/// So many lines of a long answer are shown when its conversation is opened.
const MAX_SHOWN_LINES: usize = 12;

/// The last question and the end of its answer.
fn last_messages(session: &mut Session, style: TerminalStyle) -> Result<String> {
    let of_role = |role| last_turn(session.timeline(), role);
    let (question, answer) = (of_role(Role::User), of_role(Role::Assistant));
    let mut out = String::new();
    if let Some(turn) = question {
        let text = message_for_terminal(message_text(session, turn)?.trim());
        let first = text.lines().next().unwrap_or_default();
        let more = if text.lines().count() > 1 { " …" } else { "" };
        out += &format!("{}\n", style.dim(&format!("› {first}{more}")));
    }
    if let Some(turn) = answer.filter(|answer| question.is_none_or(|question| *answer > question)) {
        let text = message_for_terminal(message_text(session, turn)?.trim());
        let mut stream = MarkdownStream::new(style, terminal_width());
        let shown = stream.push(&text) + &stream.finish();
        let lines: Vec<&str> = shown.lines().collect();
        let skipped = lines.len().saturating_sub(MAX_SHOWN_LINES);
        if skipped > 0 {
            out += &format!("{}\n", style.dim(&format!("… {}", pluralize(skipped as u64, "line"))));
        }
        out += &format!("{}\n\n", lines[skipped..].join("\n"));
    }
    Ok(out)
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
        FinishReason::Length => parts.push("cut at generation.max_tokens: /continue".into()),
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
