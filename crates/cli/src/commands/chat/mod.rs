//! `halo chat`: the conversation in a terminal. Lines from a pipe are messages, and the answers alone go to standard
//! output.

mod slash_commands;
mod style;
mod terminal;

use super::conversations::ConversationArgs;
use crate::capture::CaptureRecorder;
use crate::env::Env;
use crate::error::error_text;
use crate::output::{StdoutClosed, pluralize, print_notice};
use crate::wiring;
use anyhow::{Context, Result, bail};
use halo_core::model::StepFlow;
use halo_engine::event::Event;
use halo_engine::recorder::RecorderPurpose;
use halo_engine::session::Session;
use serde_json::json;
use std::io::{BufRead, ErrorKind, IsTerminal, Write};
use std::path::PathBuf;

/// What was typed, for whoever wants to type it again.
pub const HISTORY_FILE: &str = "chat_history.txt";

/// Which conversation.
#[derive(clap::Args)]
pub struct ChatArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
}

/// Which conversation to record, and where.
#[derive(clap::Args)]
pub struct CaptureArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Output folder: one recording per answer (`turn-1`, `turn-3`, …), readable by `halo replay`
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
}

/// Talks.
pub fn run(options: &ChatArgs, env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    super::forget::run_scheduled_forgetting(env, &settings);
    chat_loop(wiring::open_session(env, &settings, &options.conversation.name)?, env)
}

/// Talks, and records what the model looks at.
pub fn run_capture(options: &CaptureArgs, env: &Env) -> Result<()> {
    let loaded = env.load_settings()?;
    std::fs::create_dir_all(&options.output)
        .with_context(|| format!("cannot make the folder {}", options.output.display()))?;
    let mut session = wiring::open_session(env, &loaded.settings, &options.conversation.name)?;
    let info = session.model().info().clone();
    if !info.attention {
        bail!(
            "{} does not tell what it looks at, so there is nothing to record: use a local model",
            info.name
        );
    }
    let recording = CaptureRecorder::new(&options.output, &info.name, &loaded.settings);
    session.set_recorder(RecorderPurpose::Capture, Some(Box::new(recording)));
    print_notice(&format!("recording each answer in {}", options.output.display()));
    chat_loop(session, env)
}

fn chat_loop(mut session: Session, env: &Env) -> Result<()> {
    if std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && !env.json {
        return terminal::run(&mut session, env);
    }
    for notice in session.take_notices() {
        print_notice(&notice);
    }
    let said = chat_from_pipe(&mut session, env.json);
    // Whoever waits for a pipe to end does not wait for memories too.
    if session.next_memory_range().is_some() {
        print_notice(
            "there is something to remember: `halo memories form` does so now, or the next conversation at a terminal",
        );
    }
    said
}

/// Each line is a message; its answer is printed, and a line break behind it. What goes wrong with one line does not keep
/// the next from being said; it is told, and makes the whole fail in the end.
fn chat_from_pipe(session: &mut Session, as_json: bool) -> Result<()> {
    let mut wrong = 0;
    for (number, line) in (1..).zip(std::io::stdin().lock().split(b'\n')) {
        let line = match String::from_utf8(line?) {
            Ok(line) => line,
            Err(_) => {
                print_notice(&format!("line {number} of standard input is not UTF-8: it was not said"));
                wrong += 1;
                continue;
            }
        };
        if line.trim().is_empty() {
            continue;
        }
        match answer_line(session, &line, as_json) {
            Ok(()) => {}
            Err(error) if error.downcast_ref::<StdoutClosed>().is_some() => return Err(error),
            Err(error) => {
                print_notice(&format!("line {number}: {}", error_text(&error)));
                wrong += 1;
            }
        }
    }
    if wrong > 0 { bail!("{} could not be answered", pluralize(wrong, "line")) } else { Ok(()) }
}

/// Says one line, and prints its answer.
fn answer_line(session: &mut Session, line: &str, as_json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let (mut failed, mut text, mut exceeded) = (None, String::new(), None);
    let mut write = |text: &str| {
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            failed = Some(error);
        }
    };
    let today = jiff::Zoned::now().date();
    let said = session.send_message(line.trim_end_matches('\r'), today, &mut |event| {
        match event {
            Event::Token { text: more, .. } if as_json => text.push_str(&more),
            Event::Token { text, .. } => write(&text),
            Event::BudgetExceeded(why) => exceeded = Some(why),
            other => tracing::debug!("{other:?}"),
        }
        StepFlow::Continue
    });
    match &said {
        Ok(summary) if as_json => {
            let told = json!({
                "message": line,
                "answer": text,
                "turn": summary.turn.0,
                "finish": format!("{:?}", summary.finish).to_lowercase(),
                "returned": summary.resurrected,
                "left": summary.pruned,
                "live": summary.live_tokens,
            });
            write(&format!("{told}\n"));
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
    said?;
    Ok(())
}
