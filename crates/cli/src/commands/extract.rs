//! `halo extract`: the brightest sentences of a conversation, word for word.

use super::conversations::{ConversationArgs, open_existing};
use crate::env::Env;
use crate::output::{print_json, print_stdout, sanitize_terminal_text};
use anyhow::Result;
use halo_core::extract;
use halo_core::store::{Access, Store};
use halo_core::token::ChunkId;
use halo_engine::forget::pending as pending_forget;
use serde_json::json;

#[derive(clap::Args)]
pub struct ExtractArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Number of sentences to print
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10)]
    limit: usize,
}

pub fn run(options: &ExtractArgs, env: &Env) -> Result<()> {
    let name = &options.conversation.name;
    let (mut store, mut timeline) = open_existing(env, name, Access::Read)?;
    let pending = pending_forget::pending_chunks(&mut store, name)?;
    let unloaded: Vec<ChunkId> = timeline.chunks().filter(|c| !c.is_loaded()).map(|c| c.id()).collect();
    store.load_bodies(name, &mut timeline, &unloaded)?;
    let sentences =
        extract::brightest_sentences(&timeline, options.limit, |chunk| !pending.contains_key(&chunk.id()));
    if env.json {
        let sentence = |s: &extract::ExtractedSentence| json!({ "chunk": s.chunk.to_string(), "position": s.position.0, "text": s.text, "brightness": s.brightness });
        return print_json(&sentences.iter().map(sentence).collect());
    }
    if sentences.is_empty() {
        return print_stdout(
            "no sentence has received attention yet: chat with a model that reports attention\n",
        );
    }
    let line = |s: &extract::ExtractedSentence| {
        format!("{:<8} {}\n", s.chunk.to_string(), sanitize_terminal_text(&s.text))
    };
    print_stdout(&sentences.iter().map(line).collect::<String>())
}
