//! `halo ask`: one question and its answer, in a conversation.

use super::conversations::ConversationArgs;
use super::forget::relieve_pressure;
use crate::env::Env;
use crate::output::{print_json, print_notice, print_stdout, sanitize_terminal_text};
use crate::wiring;
use anyhow::{Context, Result, bail};
use halo_agents::mu;
use halo_agents::principle::JudgePrinciple;
use halo_core::model::StepFlow;
use halo_engine::event::Event;
use halo_engine::premise::PremiseMethod;
use serde_json::json;
use std::io::{IsTerminal, Read, Write};

#[derive(clap::Args)]
pub struct AskArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Question to ask the model; without it, standard input is read to its end
    #[arg(value_name = "QUESTION")]
    question: Option<String>,
    /// Warn if the question assumes something that was contradicted earlier; it is answered either way
    #[arg(long)]
    check_premise: bool,
    /// Check the premise with the model instead of word-based rules
    #[arg(long, requires = "check_premise")]
    by_model: bool,
}

/// The question of the command line, or what a pipe or a file has.
fn read_question(options: &AskArgs) -> Result<String> {
    if let Some(question) = &options.question {
        return Ok(question.clone());
    }
    let mut stdin = std::io::stdin();
    if stdin.is_terminal() {
        bail!("there is no question: write `halo ask 'QUESTION'`, or `halo chat` to talk");
    }
    let mut question = String::new();
    stdin.read_to_string(&mut question).context("cannot read the question from standard input")?;
    Ok(question.trim_end().to_owned())
}

pub fn run(options: &AskArgs, env: &Env) -> Result<()> {
    let question = read_question(options)?;
    let settings = env.load_settings()?.settings;
    let mut session = wiring::open_session(env, &settings, &options.conversation.name)?;
    session.take_notices().iter().for_each(|notice| print_notice(notice));
    let by = if options.by_model { PremiseMethod::Model } else { PremiseMethod::Rules };
    let checked = options.check_premise.then(|| session.check_premise(&question, by)).transpose()?;
    let premise = checked.filter(|checked| !checked.valid);
    if let Some(refused) = premise.as_ref().filter(|_| !env.json) {
        let words = [&refused.invalid_premise, &refused.reason, &refused.suggestion]
            .map(|w| w.clone().unwrap_or_default());
        print_notice(&sanitize_terminal_text(&mu::premise_notice(
            &words[0],
            &words[1],
            refused.principle,
            &words[2],
        )));
    }
    let mut text = String::new();
    let mut out = std::io::stdout().lock();
    let now = jiff::Zoned::now().datetime();
    let summary = session.send_message(&question, now, &mut |event| {
        if let Event::Token { text: more, .. } = event {
            text.push_str(&more);
            if !env.json {
                let _ = out.write_all(more.as_bytes()).and_then(|()| out.flush());
            }
        }
        StepFlow::Continue
    })?;
    drop(out);
    relieve_pressure(&mut session, env, &settings);
    if !env.json {
        return print_stdout("\n");
    }
    print_json(&json!({
        "question": question,
        "answer": text,
        "finish": summary.finish.name(),
        "turn": summary.turn.0,
        "resurrected": summary.resurrected,
        "valid": premise.is_none(),
        "invalid_premise": premise.as_ref().and_then(|p| p.invalid_premise.clone()),
        "reason": premise.as_ref().and_then(|p| p.reason.clone()),
        "principle": premise.as_ref().and_then(|p| p.principle).map(JudgePrinciple::name),
        "suggestion": premise.as_ref().and_then(|p| p.suggestion.clone()),
    }))
}
