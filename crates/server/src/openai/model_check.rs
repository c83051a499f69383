//! Checks a chat request against the model that answers it: that of its conversation, which may have chosen another one than the
//! program was started with.

use super::chat_request::ParsedChatRequest;
use crate::app::App;
use crate::error::ApiResult;
use crate::sampling::{check_model, check_supported};
use std::sync::Arc;

/// What is known of the default model: its check may take a moment, so it is made once and before a conversation is searched.
pub(super) struct ModelCheck {
    default: ApiResult<()>,
}

impl ModelCheck {
    pub async fn new(app: &Arc<App>, request: &ParsedChatRequest) -> Self {
        let constraint = request.sampling.constraint.as_ref();
        Self { default: check_supported(app, &request.parameters, constraint).await }
    }

    /// The check for a request that belongs to no conversation.
    pub fn of_default_model(self) -> ApiResult<()> {
        self.default
    }

    /// Writes calls as the model of the conversation does, and checks that it supports the parameters. Blocks: a chosen model is
    /// loaded for it.
    pub fn apply(
        &self,
        app: &App,
        conversation: Option<&str>,
        request: &mut ParsedChatRequest,
    ) -> ApiResult<()> {
        let chosen = conversation.map(|name| app.backend.chosen_model(name)).transpose()?.flatten();
        let Some(mut model) = chosen else {
            request.set_call_format(&app.backend.model_info().template.tools.call);
            return self.default.clone();
        };
        request.set_call_format(&model.info().template.tools.call);
        check_model(&mut *model, &request.parameters, request.sampling.constraint.as_ref())
    }
}
