//! Messages that a client brings with its own history, and the message keys by which the conversation is found again.

use crate::align::{self, SentMessage};
use crate::chat_format;
use crate::conversation::Conversation;
use crate::lookup;
use crate::parts::SessionParts;
use halo_core::Error;
use halo_core::change::{Change, Extent, PruneReason, Pruned};
use halo_core::model::StepFlow;
use halo_core::store::{Durability, RecordKind};
use halo_core::token::{ChunkId, Role, TurnId};

/// The most messages of one commit. A commit locks the store: 60,000 messages at once made other conversations wait for more than
/// a second.
const MAX_MESSAGES_PER_COMMIT: usize = 2_000;

/// Appends messages that are not to be answered; what does not fit the context window is pruned in the same commit. `flow` is
/// asked between messages and can stop it: what was committed before stays, and a client that sends its history again goes on
/// behind it.
pub(crate) fn append_messages(
    parts: &mut SessionParts,
    messages: &[SentMessage],
    flow: &mut dyn FnMut() -> StepFlow,
) -> Result<(), Error> {
    parts.conversation.check_lease()?;
    let mut rest: Vec<&SentMessage> = messages.iter().filter(|message| !message.is_empty()).collect();
    let mut stored = 0;
    while !rest.is_empty() {
        let later = rest.split_off(commit_len(&rest));
        append_commit(parts, &rest, stored, flow)?;
        stored += rest.len();
        rest = later;
    }
    if stored > 0 {
        parts.memories.refresh_placement(&mut parts.conversation, &parts.rules);
        parts.publish();
    }
    Ok(())
}

/// How many messages the next commit has. The results of functions are in the commit of their calls.
fn commit_len(messages: &[&SentMessage]) -> usize {
    let first = messages.len().min(MAX_MESSAGES_PER_COMMIT);
    first + messages[first..].iter().take_while(|message| message.role == Role::Tool).count()
}

/// Appends messages in one commit. `stored` is the number of messages that earlier commits have stored.
fn append_commit(
    parts: &mut SessionParts,
    messages: &[&SentMessage],
    stored: usize,
    flow: &mut dyn FnMut() -> StepFlow,
) -> Result<(), Error> {
    let cancelled = || {
        let message = match stored {
            0 => "cancelled; nothing was stored".to_owned(),
            stored => format!("cancelled; {stored} messages were stored before"),
        };
        Error::cancelled("appending the history", message)
    };
    let mut draft = parts.timeline().clone();
    let mut changes = Vec::with_capacity(messages.len() + 1);
    let mut before = parts.conversation.turns_latest_first().next().map(|(_, role)| role);
    for message in messages {
        if flow() != StepFlow::Continue {
            return Err(cancelled());
        }
        let tokens = parts.model.tokenize_sent(message, before)?;
        let role = message.role;
        let change = Change::Append(chat_format::plan_append(&draft, role, tokens, &parts.rules.context));
        draft.apply(&change)?;
        changes.push(change);
        before = Some(role);
    }
    let budget = parts.token_budget().unwrap_or(usize::MAX).min(parts.token_limit());
    changes.extend(parts.prune_plan(&draft, budget, None).change());
    if flow() != StepFlow::Continue {
        return Err(cancelled());
    }
    parts.stage_system_prompt();
    parts.conversation.commit_all(&changes)?;
    store_message_keys(&mut parts.conversation)?;
    parts.sync_index()?;
    parts.conversation.unload_pruned();
    Ok(())
}

/// Prunes the system messages on the timeline that a client no longer sends: they stay there, and can be resurrected.
pub(crate) fn prune_system_messages(parts: &mut SessionParts, still_sent: &[&str]) -> Result<(), Error> {
    let hash_of = |turn: TurnId, text: &str| align::message_key(turn, Role::System, text, 0).exact_hash;
    let hashes: Vec<u64> = still_sent.iter().map(|text| hash_of(TurnId(0), text)).collect();
    let live = parts.timeline().live_chunks().map(|chunk| chunk.id());
    let mut turns: Vec<TurnId> = live.filter(|id| id.role == Role::System).map(|id| id.turn).collect();
    turns.dedup();
    let mut pruned = Vec::new();
    for turn in turns {
        let text = parts.conversation.turn_text(turn)?;
        if hashes.contains(&hash_of(turn, &text)) {
            continue;
        }
        let chunks = parts.timeline().turn_chunks(turn).filter(|chunk| chunk.is_live() && !chunk.is_pinned());
        pruned.extend(chunks.map(|chunk| Pruned {
            chunk: chunk.id(),
            extent: Extent::Whole,
            reason: PruneReason::Client,
        }));
    }
    if !pruned.is_empty() {
        parts.commit(&Change::Prune(pruned), Durability::Deferred)?;
    }
    Ok(())
}

/// Whether a chunk was pruned because a client no longer sends it, or because it is the reasoning of a finished answer: then
/// search does not resurrect it.
pub(crate) fn is_pruned_for_good(conversation: &mut Conversation, chunk: ChunkId) -> Result<bool, Error> {
    let (store, name, _) = conversation.body_loader();
    let history = store.chunk_history(name, chunk)?;
    let last =
        history.iter().rev().flat_map(|entry| entry.change.flatten()).find_map(|change| match change {
            Change::Prune(pruned) => {
                let pruned = pruned.iter().find(|p| p.chunk == chunk);
                pruned.map(|p| matches!(p.reason, PruneReason::Client | PruneReason::Reasoning))
            }
            Change::Resurrect(resurrected) => resurrected.iter().any(|r| r.chunk == chunk).then_some(false),
            _ => None,
        });
    Ok(last.unwrap_or(false))
}

/// Stores messages that a client sent instead of older turns, mostly summaries. They are not on the timeline, which has the
/// turns themselves.
pub(crate) fn store_summaries(
    conversation: &mut Conversation,
    summaries: &[&SentMessage],
) -> Result<(), Error> {
    for summary in summaries {
        let (key, role) = (format!("{:016x}", summary.key.exact_hash), summary.role.name());
        let value = serde_json::json!({ "role": role, "text": summary.text }).to_string();
        conversation.put_record(RecordKind::ClientSummary, &key, Some(&value))?;
    }
    Ok(())
}

/// Stores the keys of messages without one.
pub(crate) fn store_message_keys(conversation: &mut Conversation) -> Result<(), Error> {
    let last_keyed = conversation.last_keyed_turn();
    let is_new = |turn: TurnId| last_keyed.is_none_or(|last| turn > last);
    let turns = conversation.timeline().turns().iter().rev().map(|turn| turn.id);
    let new: Vec<TurnId> = turns.take_while(|&turn| is_new(turn)).collect();
    let (Some(&newest), Some(&oldest)) = (new.first(), new.last()) else { return Ok(()) };
    let prefix = prefix_hash_before(conversation, oldest)?;
    let (store, name, timeline) = conversation.body_loader();
    let keys = lookup::compute_message_keys(store, name, timeline, last_keyed, prefix)?;
    store.put_message_keys(name, &keys)?;
    conversation.set_last_keyed_turn(newest);
    Ok(())
}

/// Stores the key of an answer as the client has it, where that differs from the generated text: stop sequences are cut off.
pub(crate) fn store_answer_key(
    conversation: &mut Conversation,
    turn: TurnId,
    text: &str,
) -> Result<(), Error> {
    if text.trim().is_empty() {
        return Ok(());
    }
    let prefix = prefix_hash_before(conversation, turn)?;
    let key = align::message_key(turn, Role::Assistant, text, prefix);
    let (store, name, _) = conversation.body_loader();
    store.put_message_keys(name, &[key])
}

/// The prefix hash of the last turn before this one that is not deleted.
fn prefix_hash_before(conversation: &mut Conversation, turn: TurnId) -> Result<u64, Error> {
    let previous = conversation.turns_latest_first().map(|(turn, _)| turn).find(|&t| t < turn);
    let Some(previous) = previous else { return Ok(0) };
    let (store, name, _) = conversation.body_loader();
    let recent = store.message_keys(name, MAX_RECENT_KEYS)?;
    Ok(recent.iter().find(|key| key.turn == previous).map_or(0, |key| key.prefix_hash))
}

/// Message keys that are read to find a prefix hash: more than the turns that were ever replaced in a row.
const MAX_RECENT_KEYS: usize = 256;
