//! The bodies of commands, and their results.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Deserialize, ToSchema)]
#[schema(as = NewMessage)]
pub(crate) struct ApiNewMessage {
    /// Markdown. A text file that is attached is a fenced code block of it, whose info string is the language and
    /// `file=NAME`: "```markdown file=notes.md". Pages draw such a block folded, and the model reads it.
    pub text: String,
    /// An id that the client chooses: a message that is sent again with the same id is stored once.
    #[serde(default)]
    pub id: Option<String>,
}

/// A conversation that is to be created.
#[derive(Deserialize, ToSchema)]
#[schema(as = NewConversation)]
#[serde(deny_unknown_fields)]
pub(crate) struct ApiNewConversation {
    /// Its name; without one, the beginning of its first message.
    #[serde(default)]
    pub name: Option<String>,
    /// A system prompt of its own.
    #[serde(default)]
    pub system_prompt: Option<String>,
    /// Its first messages, which are not answered.
    #[serde(default)]
    pub messages: Vec<ApiFirstMessage>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = FirstMessage)]
#[serde(deny_unknown_fields)]
pub(crate) struct ApiFirstMessage {
    pub role: ApiFirstRole,
    /// Markdown, as in `NewMessage`.
    pub text: String,
}

#[derive(Clone, Copy, Deserialize, ToSchema)]
#[schema(as = FirstRole)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ApiFirstRole {
    System,
    User,
    Assistant,
}

/// A conversation that was created.
#[derive(Serialize, ToSchema)]
#[schema(as = CreatedConversation)]
pub(crate) struct ApiCreatedConversation {
    pub name: String,
    /// How many messages were stored. Without one, the conversation is stored with its first message.
    pub messages: usize,
}

/// An answer that the user has written.
#[derive(Deserialize, ToSchema)]
#[schema(as = NewAnswer)]
pub(crate) struct ApiNewAnswer {
    pub text: String,
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
