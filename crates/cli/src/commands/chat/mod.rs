//! `halo chat` and `halo capture`. From a pipe, each line is a message, and standard output gets the answers only.

mod answer_display;
mod line_reader;
mod markdown;
mod slash_commands;
mod style;
mod terminal;
mod typed_ahead;

use super::conversations::ConversationArgs;
use super::fetch_models::fetch_missing_models;
use super::forget::relieve_pressure;
use super::memories::{count_memories, memory_references};
use crate::capture::CaptureRecorder;
use crate::env::Env;
use crate::error::error_text;
use crate::output::{StdoutClosed, pluralize, print_notice};
use crate::settings::Settings;
use crate::wiring;
use anyhow::{Context, Result, bail};
use halo_core::model::StepFlow;
use halo_engine::event::{Event, MemoryAction};
use halo_engine::memory::CarryMode;
use halo_engine::session::Session;
use serde_json::json;
use std::io::{BufRead, ErrorKind, IsTerminal, Write};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct ChatArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Carry all memories of another conversation into this one
    #[arg(long, value_name = "NAME")]
    carry: Vec<String>,
}

#[derive(clap::Args)]
pub struct CaptureArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Output folder: one recording per answer (`turn-1`, `turn-3`, …), readable by `halo replay`
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
}

pub fn run(options: &ChatArgs, env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    super::forget::run_scheduled_forgetting(env, &settings);
    let env = &fetch_missing_models(env, &settings)?;
    let mut session = wiring::open_session(env, &settings, &options.conversation.name)?;
    for from in &options.carry {
        let references = memory_references(env, from, &[])?;
        let carried = session.carry_memories(&references, CarryMode::Separate)?;
        print_notice(&format!("{} carried from '{from}'", count_memories(carried.len())));
    }
    chat_loop(session, env, &settings, false)
}

/// Chats and records the model's attention.
pub fn run_capture(options: &CaptureArgs, env: &Env) -> Result<()> {
    let loaded = env.load_settings()?;
    std::fs::create_dir_all(&options.output)
        .with_context(|| format!("cannot create the folder {}", options.output.display()))?;
    let mut session = wiring::open_session(env, &loaded.settings, &options.conversation.name)?;
    let info = session.model().info().clone();
    if !info.attention {
        bail!("{} does not return attention, so there is nothing to record: use a local model", info.name);
    }
    let recording = CaptureRecorder::new(&options.output, env.data_dir(), &info.name, &loaded.settings);
    session.set_recorder(Some(Box::new(recording)));
    print_notice(&format!("recording each answer in {}", options.output.display()));
    chat_loop(session, env, &loaded.settings, true)
}

fn chat_loop(mut session: Session, env: &Env, settings: &Settings, recording: bool) -> Result<()> {
    if std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && !env.json {
        return terminal::run(session, env, recording);
    }
    for notice in session.take_notices() {
        print_notice(&notice);
    }
    let result = chat_from_pipe(&mut session, env, settings);
    form_memories_at_end(&mut session);
    result
}

/// Forms the memories of what came from the pipe. All answers are written: nobody waits for the model.
fn form_memories_at_end(session: &mut Session) {
    let mut formed = 0;
    loop {
        let step = session.run_idle_memory_work(&|| false, &mut |event| {
            formed += usize::from(matches!(event, Event::MemoryChanged { action: MemoryAction::Formed, .. }));
        });
        match step {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                print_notice(&format!("no memory was formed: {error}"));
                break;
            }
        }
    }
    if formed > 0 {
        print_notice(&format!("{} formed", count_memories(formed)));
    }
}

/// Sends each line as a message and prints the answers. A line that fails is reported and the next is sent; the
/// command fails at the end.
fn chat_from_pipe(session: &mut Session, env: &Env, settings: &Settings) -> Result<()> {
    let mut failed_lines = 0;
    for (number, line) in (1..).zip(std::io::stdin().lock().split(b'\n')) {
        let line = match String::from_utf8(line?) {
            Ok(line) => line,
            Err(_) => {
                print_notice(&format!("line {number} of standard input is not UTF-8: it was not sent"));
                failed_lines += 1;
                continue;
            }
        };
        if line.trim().is_empty() {
            continue;
        }
        match answer_line(session, &line, env.json) {
            Ok(()) => relieve_pressure(session, env, settings),
            Err(error) if error.downcast_ref::<StdoutClosed>().is_some() => return Err(error),
            Err(error) => {
                print_notice(&format!("line {number}: {}", error_text(&error)));
                failed_lines += 1;
            }
        }
    }
    if failed_lines > 0 { bail!("{} could not be answered", pluralize(failed_lines, "line")) } else { Ok(()) }
}

/// Sends one line and prints the answer.
fn answer_line(session: &mut Session, line: &str, as_json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let (mut failed, mut text, mut exceeded) = (None, String::new(), None);
    let mut write = |text: &str| {
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            failed = Some(error);
        }
    };
    let now = jiff::Zoned::now().datetime();
    let result = session.send_message(line.trim_end_matches('\r'), now, &mut |event| {
        match event {
            Event::Token { text: more, .. } if as_json => text.push_str(&more),
            Event::Token { text, .. } => write(&text),
            Event::BudgetExceeded(why) => exceeded = Some(why),
            // These contain text of the conversation, and a log must not.
            Event::Previewed { .. } | Event::ToolCalled(_) | Event::FalsePremise { .. } => {}
            other => tracing::debug!("{other:?}"),
        }
        StepFlow::Continue
    });
    match &result {
        Ok(summary) if as_json => {
            let answer = json!({
                "message": line,
                "answer": text,
                "turn": summary.turn.0,
                "finish": format!("{:?}", summary.finish).to_lowercase(),
                "resurrected": summary.resurrected,
                "pruned": summary.pruned,
                "live": summary.live_tokens,
            });
            write(&format!("{answer}\n"));
        }
        Ok(_) => write("\n"),
        Err(_) if as_json => {}
        Err(_) => write("\n"),
    }
    match failed {
        Some(error) if error.kind() == ErrorKind::BrokenPipe => return Err(StdoutClosed.into()),
        Some(error) => return Err(error.into()),
        None => {}
    }
    if let Some(why) = exceeded {
        print_notice(&why);
    }
    result?;
    Ok(())
}
