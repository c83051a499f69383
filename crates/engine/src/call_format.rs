//! Calls that a model wrote in another way than its chat template writes them: as a code block, or as a bare object.
//!
//! A model that finds such a call in its context, followed by a result, mostly writes the call once more instead of an answer.
//! The calls are therefore written again in the format of the template, in a turn that takes the place of the answer. The answer
//! stays on the timeline as deleted text.

use crate::align::SentMessage;
use crate::chat_format;
use crate::conversation::RUNNING_TURN_KEY;
use crate::parts::SessionParts;
use halo_core::Error;
use halo_core::answer_parser::AnswerMarkers;
use halo_core::change::{Change, ChunkSelection, DeleteReason, Extent};
use halo_core::sampling::OutputConstraint;
use halo_core::store::Durability;
use halo_core::token::{Role, TurnId};
use halo_core::tool_call::{FunctionCall, ToolOptions, space_json};

/// Writes the calls of the last turn, an answer, in the format of the chat template. Returns the turn that takes its place; none
/// where the answer has no call, or has them in this format already.
pub(crate) fn normalize_calls(parts: &mut SessionParts, answer: TurnId) -> Result<Option<TurnId>, Error> {
    let Some(OutputConstraint::ToolCalls(options)) = &parts.rules.sampling.constraint else {
        return Ok(None);
    };
    let text = parts.conversation.turn_text(answer)?;
    let Some(calls) = foreign_calls(options, &text) else { return Ok(None) };
    let before = parts.conversation.turns_latest_first().find(|(turn, _)| *turn < answer);
    let message = SentMessage::with_calls(String::new(), calls);
    let tokens = parts.model.tokenize_sent(&message, before.map(|(_, role)| role))?;
    let append = chat_format::plan_append(parts.timeline(), Role::Assistant, tokens, &parts.rules.context);
    let turn = append.turn;
    let written = parts.timeline().turn_chunks(answer);
    let chunks = written.map(|chunk| ChunkSelection { chunk: chunk.id(), extent: Extent::Whole }).collect();
    let delete = Change::Delete { chunks, reason: DeleteReason::CallsRewritten };
    parts.commit(&Change::Batch(vec![delete, Change::Append(append)]), Durability::Deferred)?;
    parts.conversation.put_setting(RUNNING_TURN_KEY, Some(&turn.0.to_string()))?;
    Ok(Some(turn))
}

/// The calls of an answer that is nothing but calls, none of them in the format of the template.
fn foreign_calls(options: &ToolOptions, text: &str) -> Option<Vec<FunctionCall>> {
    let marker = options.format.marker();
    if marker.is_empty() || text.contains(marker) {
        return None;
    }
    let markers = AnswerMarkers {
        calls: Some(options.format.clone()),
        functions: Some(options.allowed().map(|tool| tool.name.clone()).collect()),
        ..AnswerMarkers::default()
    };
    let answer = markers.parse(text);
    let is_object = |call: &FunctionCall| {
        matches!(serde_json::from_str(&call.arguments), Ok(serde_json::Value::Object(_)))
    };
    if answer.calls.is_empty() || !answer.text.trim().is_empty() || !answer.calls.iter().all(is_object) {
        return None;
    }
    let calls = answer.calls.into_iter();
    Some(calls.map(|call| FunctionCall { arguments: space_json(&call.arguments), ..call }).collect())
}
