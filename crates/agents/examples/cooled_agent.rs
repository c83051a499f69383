//! An agent that never gets more than it can take: a wrapper shortens its input, and never the text of the user.
//!
//!     cargo run -p halo-agents --example cooled_agent

#![expect(clippy::disallowed_macros, reason = "an example prints")]

use halo_agents::agent::{Agent, AgentExt, agent_fn};
use halo_agents::cooled::with_context_management;
use halo_agents::mu::extract_premises;
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    // Any function is an agent; a model is one too.
    let model =
        agent_fn(|input: String| async move { Ok(format!("I have read {} characters.", input.len())) });
    let summarizer =
        agent_fn(|text: String| async move { Ok(text.chars().take(40).collect::<String>()) }).boxed();
    let agent = with_context_management(model, 20, Some(summarizer));

    println!("{}", pollster::block_on(agent.invoke("A short text.".to_owned()))?);
    println!("{}", pollster::block_on(agent.invoke("A long text. ".repeat(100)))?);
    println!("{:?}", extract_premises("Why did the king of Switzerland resign?"));
    Ok(())
}
