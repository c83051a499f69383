//! Edits of the last answer: another text in its place, and its continuation. The answer that was there becomes a variant.

use crate::align::SentMessage;
use crate::client_history::append_messages;
use crate::parts::SessionParts;
use crate::variant::move_to_variant;
use halo_core::Error;
use halo_core::change::DeleteReason;
use halo_core::model::StepFlow;
use halo_core::token::{Role, TurnId};

/// The answers after the last message of the user, the oldest first.
///
/// # Errors
/// When there is no message that they answer.
pub(crate) fn last_answers(parts: &SessionParts, operation: &str) -> Result<Vec<TurnId>, Error> {
    // Checked first: an answer to nothing, such as a greeting, must not be deleted.
    let answered = parts.conversation.turns_latest_first().find(|(_, role)| *role != Role::Assistant);
    if !matches!(answered, Some((_, Role::User | Role::Tool))) {
        return Err(Error::conflict(operation, "there is no message to answer"));
    }
    let turns = parts.conversation.turns_latest_first();
    let mut answers: Vec<TurnId> =
        turns.take_while(|(_, role)| *role == Role::Assistant).map(|(turn, _)| turn).collect();
    answers.reverse();
    Ok(answers)
}

/// Replaces the answer to the last message by a text of the user.
pub(crate) fn replace_last_answer(parts: &mut SessionParts, text: &str) -> Result<(), Error> {
    let operation = "editing the answer";
    if text.trim().is_empty() {
        return Err(Error::invalid_input(operation, "the answer is empty"));
    }
    let answers = last_answers(parts, operation)?;
    if !answers.is_empty() {
        move_to_variant(parts, &answers, DeleteReason::UserEdited)?;
    }
    let answer = SentMessage::new(Role::Assistant, text.to_owned());
    append_messages(parts, &[answer], &mut || StepFlow::Continue)
}

/// The text of the last answer, which is to be continued. The answer becomes a variant: its continuation has its text.
pub(crate) fn take_answer_to_continue(parts: &mut SessionParts) -> Result<String, Error> {
    let operation = "continuing the answer";
    let mut text = String::new();
    let answers = last_answers(parts, operation)?;
    for &turn in &answers {
        // This loads the bodies; deleted paragraphs do not return.
        parts.conversation.turn_text(turn)?;
        let kept = parts.timeline().turn_chunks(turn).filter(|chunk| !chunk.is_deleted());
        text.extend(kept.map(|chunk| chunk.text().into_owned()));
    }
    if text.trim().is_empty() {
        return Err(Error::conflict(operation, "there is no answer to continue"));
    }
    move_to_variant(parts, &answers, DeleteReason::UserRegenerated)?;
    Ok(text)
}
