//! Runs work in the session of an open conversation.

use crate::error::{ApiResult, ErrorResponse};
use halo_core::token::ChunkId;
use halo_engine::event::ChangeAction;
use halo_engine::host::ConversationHandle;
use halo_engine::session::Session;
use tokio::sync::oneshot;

/// What a job returns: its result, and the change to announce, if it made one.
pub(crate) type JobOutcome<T> = (T, Option<(ChangeAction, Vec<ChunkId>)>);

/// Runs a job after those that are queued in the conversation, announces its change, and returns its result.
pub(crate) async fn run_in_session<T: Send + 'static>(
    handle: &ConversationHandle,
    work: impl FnOnce(&mut Session) -> ApiResult<JobOutcome<T>> + Send + 'static,
) -> ApiResult<T> {
    let (sender, receiver) = oneshot::channel();
    handle.submit(move |session, context| {
        let result = work(session).map(|(value, change)| {
            if let Some((action, chunks)) = change {
                context.announce_change(action, chunks);
            }
            value
        });
        let _ = sender.send(result);
    })?;
    receiver.await.map_err(|_| ErrorResponse::shutting_down())?
}
