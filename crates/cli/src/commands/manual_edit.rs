//! `halo pin`, `unpin`, `prune`, `resurrect`, `merge`, `delete`, `undelete`: manual edits of the context window.

use super::conversations::{ConversationArgs, open_existing};
use crate::env::Env;
use crate::output::{pluralize, print_json, print_stdout};
use anyhow::Result;
use halo_core::store::Access;
use halo_core::token::{Brightness, ChunkId};
use halo_engine::conversation::Conversation;
use halo_engine::manual_edit::ManualEdit;
use serde_json::json;

#[derive(clap::Args)]
pub struct ManualEditArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Chunks: role, turn and paragraph, such as u4.0; applied to all of them, or on error to none
    #[arg(value_name = "CHUNK", required = true)]
    chunks: Vec<ChunkId>,
}

/// Applies an edit to all named chunks, as one change.
pub fn run(edit: ManualEdit, options: &ManualEditArgs, env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    let full = Brightness(settings.brightness_cap.0 as f32);
    let name = &options.conversation.name;
    let (store, _) = open_existing(env, name, Access::Write)?;
    let mut conversation = Conversation::open(Box::new(store), name, Access::Write)?;
    let result = edit.apply(&options.chunks, full, &mut conversation)?;
    let timeline = conversation.timeline();
    let names: Vec<String> = result.change.named_chunks().iter().map(ToString::to_string).collect();
    if env.json {
        return print_json(&json!({
            "done": edit.result_text(),
            "chunks": names,
            "live": timeline.live_len(),
            "tokens": timeline.len(),
        }));
    }
    let live = pluralize(timeline.live_len() as u64, "token");
    print_stdout(&format!(
        "{}: {} ({live} of {} live now)\n",
        edit.result_text(),
        names.join(" "),
        timeline.len()
    ))
}
