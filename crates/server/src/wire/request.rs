//! The bodies of commands, and their results.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Deserialize, ToSchema)]
#[schema(as = NewMessage)]
pub(crate) struct ApiNewMessage {
    pub text: String,
    /// An id that the client chooses: a message that is sent again with the same id is stored once.
    #[serde(default)]
    pub id: Option<String>,
}

/// A turn that was started or queued.
#[derive(Serialize, ToSchema)]
#[schema(as = TurnAccepted)]
pub(crate) struct ApiTurnAccepted {
    /// How many requests are ahead of it in the queue.
    pub ahead: usize,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = EditRequest)]
pub(crate) struct ApiEditRequest {
    /// pin, unpin, prune, resurrect, delete, undelete or merge.
    pub edit: String,
    /// Chunk ids, such as `u4.0`.
    pub chunks: Vec<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = EditResult)]
pub(crate) struct ApiEditResult {
    /// pinned, unpinned, pruned, resurrected, deleted, undeleted or merged.
    pub action: &'static str,
    /// The chunks that changed, with the dependents of those in the request.
    pub chunks: Vec<String>,
    /// The id for `POST …/undo`.
    pub undo: u64,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = UndoRequest)]
pub(crate) struct ApiUndoRequest {
    /// The id from the result of the edit.
    pub undo: u64,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = BranchRequest)]
pub(crate) struct ApiBranchRequest {
    /// The name of the new conversation.
    pub name: String,
    /// The last shared turn; none: all turns.
    pub turn: Option<u32>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = RenameRequest)]
pub(crate) struct ApiRenameRequest {
    pub name: String,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = SettingValue)]
pub(crate) struct ApiSettingValue {
    /// As in the settings file; null removes it from there.
    pub value: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = VariantChoice)]
#[serde(deny_unknown_fields)]
pub(crate) struct ApiVariantChoice {
    /// The first turn of the variant.
    pub turn: u32,
}
