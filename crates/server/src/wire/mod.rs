//! The types of Halo's own API, with their conversions from the types of the engine.

mod chunk;
mod conversation;
mod event;
mod request;
mod telemetry;
mod world;

pub(crate) use chunk::{
    ApiAttendedToken, ApiChunk, ApiChunkDetail, ApiChunkPage, ApiSearchHit, ApiToken, ApiTokenAttention,
    ApiWindowBrightness, context_window, is_pruned, relative_brightness, token_range,
};
pub(crate) use conversation::{
    ApiContextAtTurn, ApiConversation, ApiConversationSummary, ApiNote, ApiPlacedMemory, ApiRunningAnswer,
    ApiSnapshot, ApiTurn, ApiVariant,
};
pub(crate) use event::{
    ApiEvent, ApiEventKind, ApiHeartbeatUsage, ApiImportProgress, ApiModelDownload, ApiWorldEvent, api_event,
};
pub(crate) use request::{
    ApiBranchRequest, ApiCreatedConversation, ApiEditRequest, ApiEditResult, ApiFirstRole, ApiNewAnswer,
    ApiNewConversation, ApiNewMessage, ApiRenameRequest, ApiSettingValue, ApiTurnAccepted, ApiUndoRequest,
    ApiVariantChoice,
};
pub(crate) use telemetry::ApiHeartbeatTelemetry;
pub(crate) use world::{
    ApiAgentMind, ApiClockUpdate, ApiNewWorld, ApiRenderedHud, ApiRoomMessage, ApiUserCommand, ApiWorld,
    ApiWorldSummary,
};
