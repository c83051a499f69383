//! `halo chat`: the conversation in a terminal. Lines from a pipe are messages, and the answers alone go to standard
//! output.

mod orders;
mod paint;
mod terminal;

use super::show::Which;
use super::{Closed, count};
use crate::capture::Recording;
use crate::{Common, say, wiring};
use anyhow::{Context, Result, bail};
use halo_core::seams::Flow;
use halo_engine::event::Event;
use halo_engine::record::Purpose;
use halo_engine::session::Session;
use serde_json::json;
use std::io::{BufRead, ErrorKind, IsTerminal, Write};
use std::path::PathBuf;

/// What was typed, for whoever wants to type it again.
pub const HISTORY: &str = "chat_history.txt";

/// Which conversation.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
}

/// Which conversation to record, and where.
#[derive(clap::Args)]
pub struct CaptureOptions {
    #[command(flatten)]
    which: Which,
    /// The folder for what is recorded: one within it for each answer, `turn-1`, `turn-3` and so on, which `halo replay` reads
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
}

/// Talks.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    super::forget::tidy(common, &settings);
    talk(wiring::session(common, &settings, &options.which.name)?, common)
}

/// Talks, and records what the model looks at.
pub fn capture(options: &CaptureOptions, common: &Common) -> Result<()> {
    let loaded = common.load(Vec::new())?;
    std::fs::create_dir_all(&options.output)
        .with_context(|| format!("cannot make the folder {}", options.output.display()))?;
    let mut session = wiring::session(common, &loaded.settings, &options.which.name)?;
    let info = session.model().info().clone();
    if !info.attention {
        bail!(
            "{} does not tell what it looks at, so there is nothing to record: use a local model",
            info.name
        );
    }
    let recording = Recording::new(&options.output, &info.name, &loaded.settings);
    session.record(Purpose::Capture, Some(Box::new(recording)));
    say(&format!("recording each answer in {}", options.output.display()));
    talk(session, common)
}

fn talk(mut session: Session, common: &Common) -> Result<()> {
    if std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && !common.json {
        return terminal::run(&mut session, common);
    }
    for notice in session.notices() {
        say(&notice);
    }
    let said = pipe(&mut session, common.json);
    // Whoever waits for a pipe to end does not wait for memories too.
    if session.memory_due().is_some() {
        say(
            "there is something to remember: `halo memories form` does so now, or the next conversation at a terminal",
        );
    }
    said
}

/// Each line is a message; its answer is printed, and a line break behind it. What goes wrong with one line does not keep
/// the next from being said; it is told, and makes the whole fail in the end.
fn pipe(session: &mut Session, as_json: bool) -> Result<()> {
    let mut wrong = 0;
    for (number, line) in (1..).zip(std::io::stdin().lock().split(b'\n')) {
        let line = match String::from_utf8(line?) {
            Ok(line) => line,
            Err(_) => {
                say(&format!("line {number} of standard input is not UTF-8: it was not said"));
                wrong += 1;
                continue;
            }
        };
        if line.trim().is_empty() {
            continue;
        }
        match answer(session, &line, as_json) {
            Ok(()) => {}
            Err(error) if error.downcast_ref::<Closed>().is_some() => return Err(error),
            Err(error) => {
                say(&format!("line {number}: {error:#}"));
                wrong += 1;
            }
        }
    }
    if wrong > 0 { bail!("{} could not be answered", count(wrong, "line")) } else { Ok(()) }
}

/// Says one line, and prints its answer.
fn answer(session: &mut Session, line: &str, as_json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let (mut failed, mut text, mut exceeded) = (None, String::new(), None);
    let mut write = |text: &str| {
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            failed = Some(error);
        }
    };
    let today = jiff::Zoned::now().date();
    let said = session.say(line.trim_end_matches('\r'), today, &mut |event| {
        match event {
            Event::Token { text: more, .. } if as_json => text.push_str(&more),
            Event::Token { text, .. } => write(&text),
            Event::Exceeded(why) => exceeded = Some(why),
            other => tracing::debug!("{other:?}"),
        }
        Flow::Continue
    });
    match &said {
        Ok(summary) if as_json => {
            let told = json!({
                "message": line,
                "answer": text,
                "turn": summary.turn.0,
                "finish": format!("{:?}", summary.finish).to_lowercase(),
                "returned": summary.returned,
                "left": summary.left,
                "live": summary.live,
            });
            write(&format!("{told}\n"));
        }
        Ok(_) => write("\n"),
        Err(_) if as_json => {}
        Err(_) => write("\n"),
    }
    match failed {
        Some(error) if error.kind() == ErrorKind::BrokenPipe => return Err(Closed.into()),
        Some(error) => return Err(error.into()),
        None => {}
    }
    if let Some(why) = exceeded {
        say(&why);
    }
    said?;
    Ok(())
}
