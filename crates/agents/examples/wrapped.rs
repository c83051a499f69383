//! A wrapped agent: `cargo run -p halo-agents --example wrapped`.
//!
//! The innermost agent is a plain function; a local or remote model can take its place. Its input is limited to 64
//! tokens, it sees earlier messages in a window, and each question's premises are checked.

#![allow(clippy::disallowed_macros, reason = "an example prints its results")]

use halo_agents::agent::{Agent, AgentExt, agent_fn};
use halo_agents::content::{AuthoredMessage, TextAuthor};
use halo_agents::cooled::CoolingLayer;
use halo_agents::judge::{RuleContradictionDetector, RuleJudge};
use halo_agents::mu::check_premise;
use halo_agents::windowed::WindowLayer;
use halo_core::Error;

fn main() -> Result<(), Error> {
    let counter = agent_fn(|messages: Vec<AuthoredMessage>| async move {
        let words: usize = messages.iter().map(|message| message.text.split_whitespace().count()).sum();
        Ok(format!("I was shown {words} words in {} messages.", messages.len()))
    });
    let agent = counter
        .with_layer(CoolingLayer { threshold: 64, ..CoolingLayer::default() })
        .with_layer(WindowLayer::default());

    pollster::block_on(async {
        for question in [
            "The server did not crash; we restarted it.",
            "What did we do at noon?",
            "Why did the server crash?",
        ] {
            // The earlier messages of the user are the known facts.
            let facts: Vec<String> = agent
                .context()
                .into_iter()
                .filter(|message| message.author == TextAuthor::User)
                .map(|message| message.text)
                .collect();
            let premise = check_premise(question, &facts, &RuleContradictionDetector, &RuleJudge).await?;
            println!("> {question}");
            if let (Some(reason), Some(suggestion)) = (premise.reason, premise.suggestion) {
                println!("  無 {reason}. {suggestion}");
            }
            println!("  {}", agent.invoke(AuthoredMessage::user(question)).await?);
        }
        Ok(())
    })
}
