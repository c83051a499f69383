//! Manual edits: pin, unpin, prune, resurrect, delete, undelete and merge chunks.

use crate::conversation::{Conversation, check_not_forgotten};
use crate::event::ChangeAction;
use crate::forget::pending;
use halo_core::Error;
use halo_core::change::Change;
use halo_core::manual_edit::{self, ManualEditError};
use halo_core::store::Durability;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId};

/// An edit of chunks by the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManualEdit {
    /// Gives a chunk the highest brightness and exempts it from pruning.
    Pin,
    Unpin,
    /// Removes a chunk from the context window.
    Prune,
    Resurrect,
    /// Removes a chunk from the context window and from search.
    Delete,
    Undelete,
    /// Joins a chunk to the one before it in its turn.
    Merge,
}

#[derive(Clone, Debug, PartialEq)]
pub struct EditResult {
    pub change: Change,
    /// The change that undoes it, as long as nothing else has changed the same chunks.
    pub undo: Change,
}

impl ManualEdit {
    pub const ALL: [ManualEdit; 7] = [
        ManualEdit::Pin,
        ManualEdit::Unpin,
        ManualEdit::Prune,
        ManualEdit::Resurrect,
        ManualEdit::Delete,
        ManualEdit::Undelete,
        ManualEdit::Merge,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ManualEdit::Pin => "pin",
            ManualEdit::Unpin => "unpin",
            ManualEdit::Prune => "prune",
            ManualEdit::Resurrect => "resurrect",
            ManualEdit::Delete => "delete",
            ManualEdit::Undelete => "undelete",
            ManualEdit::Merge => "merge",
        }
    }

    /// What the event of this edit says.
    #[must_use]
    pub fn action(self) -> ChangeAction {
        match self {
            ManualEdit::Pin => ChangeAction::Pinned,
            ManualEdit::Unpin => ChangeAction::Unpinned,
            ManualEdit::Prune => ChangeAction::Pruned,
            ManualEdit::Resurrect => ChangeAction::Resurrected,
            ManualEdit::Delete => ChangeAction::Deleted,
            ManualEdit::Undelete => ChangeAction::Undeleted,
            ManualEdit::Merge => ChangeAction::Merged,
        }
    }

    /// The past participle: what people read after the edit.
    #[must_use]
    pub fn result_text(self) -> &'static str {
        self.action().as_str()
    }

    fn plan(self, timeline: &Timeline, chunk: ChunkId, full: Brightness) -> Result<Change, ManualEditError> {
        match self {
            ManualEdit::Pin => manual_edit::pin(timeline, chunk, full),
            ManualEdit::Unpin => manual_edit::unpin(timeline, chunk),
            ManualEdit::Prune => manual_edit::prune(timeline, chunk, None),
            ManualEdit::Resurrect => manual_edit::resurrect(timeline, chunk, full),
            ManualEdit::Delete => manual_edit::delete(timeline, chunk),
            ManualEdit::Undelete => manual_edit::undelete(timeline, chunk),
            ManualEdit::Merge => manual_edit::merge(timeline, chunk),
        }
    }

    /// Applies the edit to all chunks in one commit, or on error to none.
    pub fn apply(
        self,
        chunks: &[ChunkId],
        full: Brightness,
        conversation: &mut Conversation,
    ) -> Result<EditResult, Error> {
        conversation.check_lease()?;
        let operation = format!("edit '{}'", self.name());
        let refused = |error: ManualEditError| Error::invalid_input(operation.as_str(), error.to_string());
        // Each edit is planned on the result of those before it; then all are committed at once.
        let (store, name, timeline) = conversation.body_loader();
        let mut draft = timeline.clone();
        let mut changes: Vec<Change> = Vec::new();
        for &chunk in chunks {
            // An earlier edit of this call may have included this chunk: a pair is pruned and resurrected together.
            let included =
                changes.iter().any(|c| c.named_chunks().contains(&chunk)) && self != ManualEdit::Merge;
            let change = match self.plan(&draft, chunk, full) {
                Err(ManualEditError::AlreadyLive(_)) if included => {
                    manual_edit::pin(&draft, chunk, full).map_err(refused)?
                }
                Err(_) if included => continue,
                planned => planned.map_err(refused)?,
            };
            let missing = draft.missing_bodies(&change);
            store.load_bodies(name, &mut draft, &missing)?;
            check_not_forgotten(&operation, &change, &draft)?;
            draft.apply(&change)?;
            changes.push(change);
        }
        let change = Change::Batch(changes);
        let undo = conversation.commit(&change, Durability::Immediate)?;
        if self == ManualEdit::Undelete {
            // A chunk that the user undeletes is not to be forgotten either.
            let chunks: Vec<ChunkId> = change.named_chunks().into_iter().collect();
            let (store, name, _) = conversation.body_loader();
            pending::cancel_pending(store, name, Some(&chunks))?;
        }
        Ok(EditResult { change, undo })
    }
}
