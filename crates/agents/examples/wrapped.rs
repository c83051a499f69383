//! An agent that is kept cool: `cargo run -p halo-agents --example wrapped`.
//!
//! The innermost is a plain function; a model behind HTTP or in this process goes in its place unchanged. Around it, from the
//! inside out: no more than 64 tokens at once, a window over what was said, and a question whose premise is false is told so.

#![allow(clippy::disallowed_macros, reason = "an example shows what comes of it")]

use halo_agents::agent::{Agent, Compose, function};
use halo_agents::content::{Said, Whose};
use halo_agents::cooled::Cooling;
use halo_agents::judge::{RuleContradict, RuleJudge};
use halo_agents::mu::check_premise;
use halo_agents::windowed::Windowing;
use halo_core::seams::SeamError;

fn main() -> Result<(), SeamError> {
    let counts = function(|heard: Vec<Said>| async move {
        let words: usize = heard.iter().map(|said| said.text.split_whitespace().count()).sum();
        Ok(format!("I was shown {words} words in {} messages.", heard.len()))
    });
    let agent = counts.with(Cooling { threshold: 64, ..Cooling::default() }).with(Windowing::default());

    pollster::block_on(async {
        for said in [
            "The server did not crash; we restarted it.",
            "What did we do at noon?",
            "Why did the server crash?",
        ] {
            // What people have said is what is known.
            let known: Vec<String> =
                agent.context().into_iter().filter(|s| s.whose == Whose::User).map(|s| s.text).collect();
            let premise = check_premise(said, &known, &RuleContradict, &RuleJudge).await?;
            println!("> {said}");
            if let (Some(reason), Some(suggestion)) = (premise.reason, premise.suggestion) {
                println!("  無 {reason}. {suggestion}");
            }
            println!("  {}", agent.invoke(Said::user(said)).await?);
        }
        Ok(())
    })
}
