//! `halo pin`, `unpin`, `prune`, `resurrect`, `delete`, `restore`, `merge`: the user's own hand.

use super::show::{Which, existing};
use super::{count, print, print_json};
use crate::Common;
use anyhow::Result;
use halo_core::seams::Access;
use halo_core::token::{Brightness, ChunkId};
use halo_engine::signal::Signal;
use serde_json::json;

/// Which chunks.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
    /// The chunks: role, turn and sentence, such as u4.0; all of them, or on an error none
    #[arg(value_name = "CHUNK", required = true)]
    chunks: Vec<ChunkId>,
}

/// Does it to all chunks that are named, as one change.
pub fn run(signal: Signal, options: &Options, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let full = Brightness(settings.cap.0 as f32);
    let name = &options.which.name;
    let (mut store, mut timeline) = existing(common, name, Access::Write)?;
    let sent = signal.send(&options.chunks, full, name, &mut timeline, &mut store)?;
    let names: Vec<String> = sent.done.names().iter().map(ToString::to_string).collect();
    if common.json {
        return print_json(&json!({
            "done": signal.done(),
            "chunks": names,
            "live": timeline.live_len(),
            "tokens": timeline.len(),
        }));
    }
    let live = count(timeline.live_len() as u64, "token");
    print(&format!("{}: {} ({live} of {} live now)\n", signal.done(), names.join(" "), timeline.len()))
}
