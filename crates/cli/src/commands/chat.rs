//! `halo chat`: the conversation in a terminal. Lines from a pipe are messages, and answers go to standard output.

use super::show::Which;
use crate::{Common, wiring};
use anyhow::Result;
use halo_core::seams::Flow;
use halo_engine::event::Event;
use std::io::{BufRead, Write};

/// Whom to talk with.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
}

/// Talks.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let mut session = wiring::session(common, &settings, &options.which.name)?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let mut out = std::io::stdout().lock();
        let summary = session.say(&line, jiff::Zoned::now().date(), &mut |event| {
            match event {
                Event::Token { text, .. } => {
                    let _ = write!(out, "{text}");
                    let _ = out.flush();
                }
                Event::Left { chunk, tokens, why } => tracing::debug!("{chunk} left ({tokens}): {why}"),
                Event::Returned { chunk, tokens, why } => tracing::debug!("{chunk} back ({tokens}): {why}"),
                other => tracing::debug!("{other:?}"),
            }
            Flow::Continue
        })?;
        writeln!(out)?;
        tracing::debug!("{summary:?}");
    }
    Ok(())
}
