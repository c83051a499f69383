//! Variants: answers and exchanges that others have replaced. They can be chosen again as long as they belong to the last
//! exchange.

use crate::align::TurnVariant;
use crate::conversation::{Conversation, turn_text};
use crate::parts::SessionParts;
use halo_core::Error;
use halo_core::change::{Change, ChunkSelection, DeleteReason, Extent};
use halo_core::store::{Durability, RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Role, TurnId};
use serde_json::{Value, json};

/// A variant of the last exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariantChoice {
    /// Its turns, in order.
    pub turns: Vec<TurnId>,
    pub messages: Vec<(Role, String)>,
    /// Whether it is the one in the conversation now.
    pub is_current: bool,
}

/// The replaced turns of a conversation that were not chosen again since.
pub fn load_variants(
    store: &mut dyn Store,
    conversation: &str,
    timeline: &Timeline,
) -> Result<Vec<TurnVariant>, Error> {
    let records = store.records(conversation, RecordKind::Variant)?;
    let read = |record: &halo_core::store::Record| {
        let value: Value = serde_json::from_str(&record.value).ok()?;
        let turn = |value: &Value| u32::try_from(value.as_u64()?).ok().map(TurnId);
        let mut turns: Vec<TurnId> = value["turns"].as_array()?.iter().filter_map(turn).collect();
        let mut after = turn(&value["after"]);
        // Where its first turns were chosen again, the rest is a variant after those.
        let chosen = turns.iter().take_while(|turn| !is_turn_deleted(timeline, **turn)).count();
        after = turns.drain(..chosen).next_back().or(after);
        Some(TurnVariant { after, turns })
    };
    let is_replaced = |variant: &TurnVariant| {
        !variant.turns.is_empty() && variant.turns.iter().all(|&turn| is_turn_deleted(timeline, turn))
    };
    let mut variants: Vec<TurnVariant> = records.iter().filter_map(read).filter(is_replaced).collect();
    // An answer that was replaced with its message, chosen again with it and replaced alone, is in two records.
    variants.sort_by(|one, other| (one.after, &one.turns).cmp(&(other.after, &other.turns)));
    variants.dedup();
    Ok(variants)
}

fn is_turn_deleted(timeline: &Timeline, turn: TurnId) -> bool {
    let mut chunks = timeline.turn_chunks(turn).peekable();
    chunks.peek().is_some() && chunks.all(|chunk| chunk.is_deleted() && !chunk.is_forgotten())
}

/// Makes the last turns a variant: they are deleted, and can be chosen again.
pub(crate) fn move_to_variant(
    parts: &mut SessionParts,
    turns: &[TurnId],
    reason: DeleteReason,
) -> Result<(), Error> {
    parts.conversation.check_lease()?;
    store_variant(&mut parts.conversation, turns)?;
    parts.delete_turns(turns, reason)
}

/// Records the last turns as a variant. This comes before they are deleted: if the program ends between the two, they are
/// still in the conversation.
fn store_variant(conversation: &mut Conversation, turns: &[TurnId]) -> Result<(), Error> {
    let mut turns: Vec<u32> = turns.iter().map(|turn| turn.0).collect();
    turns.sort_unstable();
    let Some(&first) = turns.first() else { return Ok(()) };
    let after = conversation.turns_latest_first().map(|(turn, _)| turn.0).find(|&turn| turn < first);
    let value = json!({ "after": after, "turns": turns }).to_string();
    conversation.put_record(RecordKind::Variant, &format!("{first:010}"), Some(&value))
}

/// Whether these turns, in any order, are the last ones of the conversation.
pub(crate) fn ends_with_turns(conversation: &Conversation, turns: &[TurnId]) -> bool {
    let last: Vec<TurnId> =
        conversation.turns_latest_first().take(turns.len()).map(|(turn, _)| turn).collect();
    last.len() == turns.len() && turns.iter().all(|turn| last.contains(turn))
}

/// Replaces the last turns with a variant; they become a variant themselves.
pub(crate) fn choose_variant(
    parts: &mut SessionParts,
    chosen: &[TurnId],
    replaces: &[TurnId],
) -> Result<(), Error> {
    parts.conversation.check_lease()?;
    let is_deleted = |&turn: &TurnId| is_turn_deleted(parts.timeline(), turn);
    if !ends_with_turns(&parts.conversation, replaces) || chosen.is_empty() || !chosen.iter().all(is_deleted)
    {
        let message = "the conversation has changed since: load its variants again";
        return Err(Error::conflict("choosing a variant", message));
    }
    store_variant(&mut parts.conversation, replaces)?;
    let select = |turns: &[TurnId]| -> Vec<ChunkSelection> {
        let chunks = turns.iter().flat_map(|&turn| parts.timeline().turn_chunks(turn));
        chunks.map(|chunk| ChunkSelection { chunk: chunk.id(), extent: Extent::Whole }).collect()
    };
    let mut changes = vec![Change::Undelete(select(chosen))];
    if !replaces.is_empty() {
        changes.insert(0, Change::Delete { chunks: select(replaces), reason: DeleteReason::VariantChosen });
    }
    parts.commit(&Change::Batch(changes), Durability::Immediate)?;
    parts.sync_index()?;
    parts.publish();
    Ok(())
}

/// The turns of an answer or exchange that others have replaced, or that have replaced others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VariantGroup {
    pub turns: Vec<TurnId>,
    /// Whether they are the ones in the conversation now.
    pub is_current: bool,
}

/// The variants of the exchange that ends a list of turns, the latest first, and the current one, in the order in which they
/// were generated. Empty where there is nothing to choose from.
#[must_use]
pub fn group_variants(all: &[TurnVariant], latest_first: &[(TurnId, Role)]) -> Vec<VariantGroup> {
    let tail = &latest_first[..latest_first.len().min(MAX_EXCHANGE_TURNS)];
    // Variants of the answer alone, or else of the whole exchange.
    let answers = tail.iter().take_while(|(_, role)| *role != Role::User).count();
    let exchange = (answers + 1).min(tail.len());
    for current_len in [answers, exchange] {
        let after = latest_first.get(current_len).map(|(turn, _)| *turn);
        let others = all.iter().filter(|variant| variant.after == after);
        let mut groups: Vec<VariantGroup> =
            others.map(|other| VariantGroup { turns: other.turns.clone(), is_current: false }).collect();
        if groups.is_empty() {
            continue;
        }
        let mut turns: Vec<TurnId> = tail[..current_len].iter().map(|(turn, _)| *turn).collect();
        turns.sort_unstable();
        groups.extend((!turns.is_empty()).then_some(VariantGroup { turns, is_current: true }));
        groups.sort();
        return groups;
    }
    Vec::new()
}

/// The turns that have text, from this one on, the latest first: enough for [`group_variants`].
pub(crate) fn turns_with_text(timeline: &Timeline, from: TurnId) -> Vec<(TurnId, Role)> {
    let has_text = |turn: TurnId| timeline.turn_chunks(turn).any(|chunk| !chunk.is_deleted());
    (timeline.turns().iter().rev())
        .filter(|turn| turn.id <= from && has_text(turn.id))
        .map(|turn| (turn.id, turn.role))
        .take(MAX_EXCHANGE_TURNS + 1)
        .collect()
}

/// The variants of the last exchange and the current one, with their texts.
pub fn load_variant_choices(
    store: &mut dyn Store,
    conversation: &str,
    timeline: &mut Timeline,
) -> Result<Vec<VariantChoice>, Error> {
    let all = load_variants(store, conversation, timeline)?;
    let latest_first = turns_with_text(timeline, TurnId(u32::MAX));
    let mut choices = Vec::new();
    for VariantGroup { turns, is_current } in group_variants(&all, &latest_first) {
        let mut messages = Vec::with_capacity(turns.len());
        for &turn in &turns {
            let role = timeline.turns().iter().find(|t| t.id == turn).map(|t| t.role);
            let text = turn_text(store, conversation, timeline, turn)?;
            messages.push((role.unwrap_or(Role::Assistant), text));
        }
        choices.push(VariantChoice { turns, messages, is_current });
    }
    Ok(choices)
}

/// The most turns of an exchange: a message and its answers.
pub const MAX_EXCHANGE_TURNS: usize = 16;
