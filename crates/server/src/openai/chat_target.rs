//! What the routes for chats do with every request before its turn: a place in the queue, the conversation, and the checks of the
//! model.

use super::chat::{NOT_STORED, conversation_name};
use super::chat_request::ParsedChatRequest;
use crate::app::App;
use crate::error::ApiResult;
use crate::sampling::check_supported;
use axum::http::HeaderMap;
use halo_engine::scheduler::QueuePlace;
use std::sync::Arc;

/// Where the answer to a chat request goes.
pub(super) enum ChatTarget {
    /// Nothing is stored. The completion takes a place in the queue of its own.
    Unstored,
    Conversation {
        /// The name that the client has chosen.
        name: Option<String>,
        place: QueuePlace,
    },
}

impl ChatTarget {
    /// `store` is OpenAI's parameter; with `false` nothing is stored.
    pub async fn of_request(
        app: &Arc<App>,
        headers: &HeaderMap,
        store: Option<bool>,
        request: &ParsedChatRequest,
    ) -> ApiResult<Self> {
        let place = app.reserve_queue_place()?;
        let name = conversation_name(headers)?;
        check_supported(app, &request.parameters, request.sampling.constraint.as_ref()).await?;
        match store == Some(false) || name.as_deref() == Some(NOT_STORED) {
            true => Ok(Self::Unstored),
            false => Ok(Self::Conversation { name, place }),
        }
    }
}
