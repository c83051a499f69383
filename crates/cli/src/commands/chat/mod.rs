//! `halo chat`: the conversation in a terminal. Lines from a pipe are messages, and the answers alone go to standard
//! output.

mod orders;
mod paint;
mod terminal;

use super::Closed;
use super::show::Which;
use crate::{Common, say, wiring};
use anyhow::Result;
use halo_core::seams::Flow;
use halo_engine::event::Event;
use halo_engine::session::Session;
use std::io::{BufRead, ErrorKind, IsTerminal, Write};

/// Which conversation.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
}

/// Talks.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let mut session = wiring::session(common, &settings, &options.which.name)?;
    if std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
        return terminal::run(&mut session, common);
    }
    for notice in session.notices() {
        say(&notice);
    }
    pipe(&mut session)
}

/// Each line is a message; its answer is printed, and a line break behind it.
fn pipe(session: &mut Session) -> Result<()> {
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let mut out = std::io::stdout().lock();
        let mut failed = None;
        let mut write = |text: &str| {
            if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
                failed = Some(error);
            }
        };
        let today = jiff::Zoned::now().date();
        let said = session.say(&line, today, &mut |event| {
            match event {
                Event::Token { text, .. } => write(&text),
                Event::Exceeded(why) => tracing::warn!("{why}"),
                other => tracing::debug!("{other:?}"),
            }
            Flow::Continue
        });
        write("\n");
        match failed {
            Some(error) if error.kind() == ErrorKind::BrokenPipe => return Err(Closed.into()),
            Some(error) => return Err(error.into()),
            None => said?,
        };
    }
    Ok(())
}
