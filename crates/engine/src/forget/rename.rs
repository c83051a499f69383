//! Names of conversations that are made of forgotten words. The conversation gets another name, and the old one is removed
//! wherever it was written.

use super::proof_log::{ForgetProofLog, proof_subject};
use super::target::ChunkText;
use super::text_match::MIN_MATCH_CHARS;
use crate::branch::delete_parent_links;
use crate::conversation::turn_text;
use crate::title::{MAX_TITLE_CHARS, collapse_whitespace, is_title_of, wordless_name};
use crate::turn_record::TurnRecord;
use halo_core::Error;
use halo_core::store::{ConversationSummary, RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::TurnId;
use std::collections::BTreeSet;

/// Whether the name of a conversation was made of text that is erased.
pub(super) fn is_named_after(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    erased: &[ChunkText],
) -> Result<bool, Error> {
    let lower = |text: &str| collapse_whitespace(text).to_lowercase();
    let contains_name = |text: &ChunkText| lower(&text.text).contains(&lower(name));
    if name.chars().count() >= MIN_MATCH_CHARS && erased.iter().any(contains_name) {
        return Ok(true);
    }
    let turns: BTreeSet<TurnId> = erased.iter().map(|text| text.id.turn).collect();
    for turn in turns {
        if !is_title_of(name, &turn_text(store, name, timeline, turn)?) {
            continue;
        }
        // A later paragraph of the message is not part of the name.
        let mut before = String::new();
        for chunk in timeline.turn_chunks(turn) {
            let is_in_title = collapse_whitespace(&before).chars().count() < MAX_TITLE_CHARS;
            if is_in_title && erased.iter().any(|text| text.id == chunk.id()) {
                return Ok(true);
            }
            before.push_str(&chunk.text());
        }
    }
    Ok(false)
}

/// A name without words that no conversation has.
pub(super) fn unused_name(store: &mut dyn Store, summary: &ConversationSummary) -> Result<String, Error> {
    let base = wordless_name(summary.created);
    let taken: BTreeSet<String> = store.list_conversations()?.into_iter().map(|other| other.name).collect();
    let mut names = std::iter::once(base.clone()).chain((2..).map(|n| format!("{base} {n}")));
    Ok(names.find(|name| !taken.contains(name)).unwrap_or(base))
}

/// Removes the name of a conversation from the records of turns, from the proofs, and from the branches of the conversation;
/// then renames it, unless it is erased anyway.
pub(super) fn remove_name(
    store: &mut dyn Store,
    proofs: &ForgetProofLog,
    summary: &ConversationSummary,
    new_name: Option<&str>,
) -> Result<(), Error> {
    let name = &summary.name;
    proofs.replace_name(name, &proof_subject(summary))?;
    delete_parent_links(store, name)?;
    let Some(new_name) = new_name else { return Ok(()) };
    for record in store.records(name, RecordKind::Turn)? {
        let Some(mut turn) = TurnRecord::from_json(&record.value) else { continue };
        // The error of a failed turn names the conversation.
        if turn.error.as_ref().is_some_and(|error| error.contains(name.as_str())) {
            turn.error = None;
            store.put_record(name, RecordKind::Turn, &record.key, Some(&turn.to_json()))?;
        }
    }
    store.rename(name, new_name)
}
