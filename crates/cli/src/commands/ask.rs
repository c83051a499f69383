//! `halo ask`: one question, one answer, in a conversation that goes on.

use super::show::Which;
use super::{print, print_json};
use crate::{Common, printable, say, wiring};
use anyhow::Result;
use halo_agents::mu;
use halo_core::seams::Flow;
use halo_engine::event::Event;
use halo_engine::premise::Premises;
use serde_json::json;
use std::io::Write;

/// What to ask.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
    /// The question
    #[arg(value_name = "QUESTION")]
    question: String,
    /// Tells where the question takes something for granted that was said not to be so; it is answered all the same
    #[arg(long)]
    check_premise: bool,
    /// The same, as the model sees it, and not by rules that go by words
    #[arg(long, requires = "check_premise")]
    by_model: bool,
}

/// Asks, and prints the answer.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let mut session = wiring::session(common, &settings, &options.which.name)?;
    session.notices().iter().for_each(|notice| say(notice));
    let by = if options.by_model { Premises::Model } else { Premises::Rules };
    let checked = options.check_premise.then(|| session.check_premise(&options.question, by)).transpose()?;
    let premise = checked.filter(|checked| !checked.valid);
    if let Some(refused) = premise.as_ref().filter(|_| !common.json) {
        let words = [&refused.invalid_premise, &refused.reason, &refused.suggestion]
            .map(|w| w.clone().unwrap_or_default());
        say(&printable(&mu::told(&words[0], &words[1], &words[2])));
    }
    let mut text = String::new();
    let mut out = std::io::stdout().lock();
    let today = jiff::Zoned::now().date();
    let summary = session.say(&options.question, today, &mut |event| {
        if let Event::Token { text: more, .. } = event {
            text.push_str(&more);
            if !common.json {
                let _ = out.write_all(more.as_bytes()).and_then(|()| out.flush());
            }
        }
        Flow::Continue
    })?;
    drop(out);
    if !common.json {
        return print("\n");
    }
    print_json(&json!({
        "question": options.question,
        "answer": text,
        "turn": summary.turn.0,
        "returned": summary.returned,
        "valid": premise.is_none(),
        "invalid_premise": premise.as_ref().and_then(|p| p.invalid_premise.clone()),
        "reason": premise.as_ref().and_then(|p| p.reason.clone()),
        "suggestion": premise.as_ref().and_then(|p| p.suggestion.clone()),
    }))
}
