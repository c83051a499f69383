//! What the routes for chats do with every request before its turn: a place in the queue, the name of its conversation, and the
//! check of the default model.

use super::chat::{NOT_STORED, conversation_name};
use super::chat_request::ParsedChatRequest;
use super::model_check::ModelCheck;
use crate::app::App;
use crate::error::ApiResult;
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
        /// For its model, once it is found.
        check: ModelCheck,
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
        let check = ModelCheck::new(app, request).await;
        match store == Some(false) || name.as_deref() == Some(NOT_STORED) {
            true => check.of_default_model().map(|()| Self::Unstored),
            false => Ok(Self::Conversation { name, place, check }),
        }
    }
}
