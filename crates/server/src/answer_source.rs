//! Where an answer comes from, for the APIs that have their own formats: a chat in its conversation, or a completion without one.

use crate::app::App;
use crate::completion::{CompletedAnswer, CompletionRequest, OnAnswerEnd, OnAnswerProgress, complete_answer};
use crate::error::{ApiResult, ErrorResponse};
use crate::openai::{ForeignChat, StartedChat, start_foreign_chat};
use crate::sampling::LogprobBuffer;
use crate::sse::{SseSender, StreamResultSender};
use axum::http::HeaderMap;
use axum::response::Response;
use halo_core::answer_parser::AnswerDelta;
use halo_core::model::StepFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::oneshot;

pub(crate) enum AnswerSource {
    /// The headers may name the conversation.
    Chat { chat: ForeignChat, headers: HeaderMap },
    Completion {
        request: CompletionRequest,
        /// The log-probabilities of its tokens.
        logprobs: LogprobBuffer,
    },
}

impl AnswerSource {
    /// Begins to generate. Returns the conversation of a chat.
    async fn start(
        self,
        app: Arc<App>,
        mut on_progress: OnAnswerProgress,
        on_end: OnAnswerEnd,
    ) -> ApiResult<Option<StartedChat>> {
        match self {
            Self::Chat { chat, headers } => {
                start_foreign_chat(app, &headers, chat, on_progress, on_end).await.map(Some)
            }
            Self::Completion { request, logprobs } => {
                tokio::task::spawn_blocking(move || {
                    on_end(complete_answer(&app, &request, &logprobs, &mut on_progress));
                });
                Ok(None)
            }
        }
    }

    /// The whole answer. Stops when the client disconnects, which drops this future.
    pub async fn complete(self, app: Arc<App>) -> ApiResult<(CompletedAnswer, Option<StartedChat>)> {
        let (sender, receiver) = oneshot::channel();
        let guard = ConnectedFlag(Arc::new(AtomicBool::new(true)));
        let connected = Arc::clone(&guard.0);
        let on_progress = Box::new(move |_: Option<&[AnswerDelta]>| match connected.load(Ordering::SeqCst) {
            true => StepFlow::Continue,
            false => StepFlow::Stop,
        });
        let started = self.start(app, on_progress, Box::new(move |result| drop(sender.send(result)))).await?;
        let answer = receiver.await.map_err(|_| ErrorResponse::shutting_down())??;
        Ok((answer, started))
    }

    /// Streams the answer into a channel. `on_deltas` sends what a token adds, `on_end` the last events.
    pub async fn stream(
        self,
        app: Arc<App>,
        channel: (SseSender, StreamResultSender, impl Future<Output = ApiResult<Response>>),
        on_deltas: impl Fn(&SseSender, &[AnswerDelta]) -> StepFlow + Send + 'static,
        on_end: impl FnOnce(&SseSender, CompletedAnswer) + Send + 'static,
    ) -> ApiResult<Response> {
        let (out, ended, response) = channel;
        let out = Arc::new(out);
        let end_out = Arc::clone(&out);
        let on_progress = Box::new(move |deltas: Option<&[AnswerDelta]>| match deltas {
            Some(deltas) => on_deltas(&out, deltas),
            None => out.flow(),
        });
        let on_end = Box::new(move |result: ApiResult<CompletedAnswer>| {
            let _ = ended.send(result.map(|answer| on_end(&end_out, answer)));
        });
        let started = self.start(app, on_progress, on_end).await?;
        let mut response = response.await?;
        if let Some(started) = started {
            started.set_header(&mut response);
        }
        Ok(response)
    }
}

/// Becomes false when the future that holds it is dropped.
struct ConnectedFlag(Arc<AtomicBool>);

impl Drop for ConnectedFlag {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
