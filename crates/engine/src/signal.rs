//! The user's own hand: pin, unpin, prune, resurrect, delete, restore, merge.

use crate::grace;
use halo_core::change::Change;
use halo_core::seams::{Durability, SeamError, Store};
use halo_core::signals::{self, SignalError};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId};

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

/// What was done.
#[derive(Clone, Debug, PartialEq)]
pub struct Sent {
    /// The change.
    pub done: Change,
    /// What takes it back, as long as nothing else has happened to the same chunks.
    pub undo: Change,
}

impl Signal {
    /// All of them.
    pub const ALL: [Signal; 7] = [
        Signal::Pin,
        Signal::Unpin,
        Signal::Prune,
        Signal::Resurrect,
        Signal::Delete,
        Signal::Restore,
        Signal::Merge,
    ];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Signal::Pin => "pin",
            Signal::Unpin => "unpin",
            Signal::Prune => "prune",
            Signal::Resurrect => "resurrect",
            Signal::Delete => "delete",
            Signal::Restore => "restore",
            Signal::Merge => "merge",
        }
    }

    /// What is true when it is done.
    #[must_use]
    pub fn done(self) -> &'static str {
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

    /// Does it to all chunks that are named, as one change; on an error, to none.
    ///
    /// # Errors
    /// When it cannot be done to one of them, or the store fails.
    pub fn send(
        self,
        chunks: &[ChunkId],
        full: Brightness,
        name: &str,
        timeline: &mut Timeline,
        store: &mut dyn Store,
    ) -> Result<Sent, SeamError> {
        let refused =
            |why: SignalError| SeamError::asked(format!("doing '{}'", self.name()), why.to_string());
        // Each is planned on what those before it lead to; then all are done at once.
        let mut draft = timeline.clone();
        let mut changes: Vec<Change> = Vec::new();
        for &chunk in chunks {
            // What went along with one that was named before it may be where it was to be already.
            let along = changes.iter().any(|c| c.names().contains(&chunk)) && self != Signal::Merge;
            let change = match self.plan(&draft, chunk, full) {
                Err(SignalError::Live(_)) if along => signals::pin(&draft, chunk, full).map_err(refused)?,
                Err(_) if along => continue,
                planned => planned.map_err(refused)?,
            };
            let away = draft.away(&change);
            store.bring(name, &mut draft, &away)?;
            if let Some(gone) = change
                .names()
                .into_iter()
                .find(|&id| draft.chunk(id).is_some_and(|chunk| chunk.is_forgotten()))
            {
                let why = format!("{gone} was forgotten for good: nothing is left of it");
                return Err(SeamError::asked(format!("doing '{}'", self.name()), why));
            }
            draft.apply(&change)?;
            changes.push(change);
        }
        let change = Change::Batch(changes);
        let undo = store.transact(name, timeline, &change, Durability::Now)?;
        if self == Signal::Restore {
            // Whoever takes back that it was deleted does not want it forgotten either.
            let names: Vec<ChunkId> = change.names().into_iter().collect();
            grace::strike(store, name, Some(&names))?;
        }
        Ok(Sent { done: change, undo })
    }
}
