//! An agent that is kept cool: `cargo run -p halo-agents --example wrapped`.
//!
//! The innermost is a plain function; a model behind HTTP or in this process goes in its place unchanged. Around it, from the
//! inside out: no more than 64 tokens at once, a window over what was said, and a question whose premise is false is told so.

#![allow(clippy::disallowed_macros, reason = "an example shows what comes of it")]

use halo_agents::agent::{Agent, AgentExt, agent_fn};
use halo_agents::content::{AuthoredMessage, TextAuthor};
use halo_agents::cooled::CoolingLayer;
use halo_agents::judge::{RuleContradictionDetector, RuleJudge};
use halo_agents::mu::check_premise;
use halo_agents::windowed::WindowLayer;
use halo_core::Error;

fn main() -> Result<(), Error> {
    let counts = agent_fn(|heard: Vec<AuthoredMessage>| async move {
        let words: usize = heard.iter().map(|said| said.text.split_whitespace().count()).sum();
        Ok(format!("I was shown {words} words in {} messages.", heard.len()))
    });
    let agent = counts
        .with_layer(CoolingLayer { threshold: 64, ..CoolingLayer::default() })
        .with_layer(WindowLayer::default());

    pollster::block_on(async {
        for said in [
            "The server did not crash; we restarted it.",
            "What did we do at noon?",
            "Why did the server crash?",
        ] {
            // What people have said is what is known.
            let known: Vec<String> = agent
                .context()
                .into_iter()
                .filter(|s| s.author == TextAuthor::User)
                .map(|s| s.text)
                .collect();
            let premise = check_premise(said, &known, &RuleContradictionDetector, &RuleJudge).await?;
            println!("> {said}");
            if let (Some(reason), Some(suggestion)) = (premise.reason, premise.suggestion) {
                println!("  無 {reason}. {suggestion}");
            }
            println!("  {}", agent.invoke(AuthoredMessage::user(said)).await?);
        }
        Ok(())
    })
}
