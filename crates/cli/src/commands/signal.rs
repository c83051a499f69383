//! `halo pin`, `unpin`, `prune`, `resurrect`, `delete`, `restore`, `merge`: the user's own hand.

use super::show::{Which, existing};
use super::{count, print, print_json};
use crate::Common;
use anyhow::Result;
use halo_core::change::Change;
use halo_core::seams::{Access, Durability, Store};
use halo_core::signals::{self, SignalError};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId};
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

/// What the user wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// As bright as can be, and immune.
    Pin,
    /// No longer immune.
    Unpin,
    /// Out of the window.
    Prune,
    /// Back into it.
    Resurrect,
    /// Out of the window and out of search.
    Delete,
    /// Not deleted after all.
    Restore,
    /// Joined to the chunk before.
    Merge,
}

impl Signal {
    fn done(self) -> &'static str {
        match self {
            Signal::Pin => "pinned",
            Signal::Unpin => "unpinned",
            Signal::Prune => "left the window",
            Signal::Resurrect => "back at their place",
            Signal::Delete => "deleted",
            Signal::Restore => "restored",
            Signal::Merge => "merged",
        }
    }

    fn plan(self, timeline: &Timeline, chunk: ChunkId, full: Brightness) -> Result<Change, SignalError> {
        match self {
            Signal::Pin => signals::pin(timeline, chunk, full),
            Signal::Unpin => signals::unpin(timeline, chunk),
            Signal::Prune => signals::prune(timeline, chunk, None),
            Signal::Resurrect => signals::resurrect(timeline, chunk, full),
            Signal::Delete => signals::delete(timeline, chunk),
            Signal::Restore => signals::restore(timeline, chunk),
            Signal::Merge => signals::merge(timeline, chunk),
        }
    }

    /// Does it to all chunks that are named, as one change.
    pub fn run(self, options: &Options, common: &Common) -> Result<()> {
        let settings = common.load(Vec::new())?.settings;
        let full = Brightness(settings.cap.0 as f32);
        let name = &options.which.name;
        let (mut store, mut timeline) = existing(common, name, Access::Write)?;
        // Each is planned on what those before it lead to; then all are done at once.
        let mut draft = timeline.clone();
        let mut changes = Vec::new();
        for &chunk in &options.chunks {
            // What went along with one that was named before it may be where it was to be already.
            let along = changes.iter().any(|c: &Change| c.names().contains(&chunk)) && self != Signal::Merge;
            let change = match self.plan(&draft, chunk, full) {
                Err(SignalError::Live(_)) if along => signals::pin(&draft, chunk, full)?,
                Err(_) if along => continue,
                planned => planned?,
            };
            let away = draft.away(&change);
            store.bring(name, &mut draft, &away)?;
            draft.apply(&change)?;
            changes.push(change);
        }
        let change = Change::Batch(changes);
        store.transact(name, &mut timeline, &change, Durability::Now)?;
        let names: Vec<String> = change.names().iter().map(ToString::to_string).collect();
        if common.json {
            return print_json(&json!({
                "done": self.done(),
                "chunks": names,
                "live": timeline.live_len(),
                "tokens": timeline.len(),
            }));
        }
        let live = count(timeline.live_len() as u64, "token");
        print(&format!("{}: {} ({live} of {} live now)\n", self.done(), names.join(" "), timeline.len()))
    }
}
