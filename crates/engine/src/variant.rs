//! Variants: answers and exchanges that were set aside for others, and can be chosen again as long as they belong to the last
//! exchange.

use crate::align::Variant;
use crate::find::text_of;
use crate::session::Session;
use halo_core::change::{Change, DeleteReason, Extent, Part};
use halo_core::seams::{Durability, Kind, SeamError, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Role, TurnId};
use serde_json::{Value, json};

/// A variant that can be chosen now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Its turns, in order.
    pub turns: Vec<TurnId>,
    /// What it says, message by message.
    pub messages: Vec<(Role, String)>,
    /// Whether it is what stands.
    pub stands: bool,
}

/// What was set aside in a conversation and not restored since.
///
/// # Errors
/// When the store fails.
pub fn variants(
    store: &mut dyn Store,
    conversation: &str,
    timeline: &Timeline,
) -> Result<Vec<Variant>, SeamError> {
    let records = store.records(conversation, Kind::Variant)?;
    let read = |record: &halo_core::seams::Record| {
        let value: Value = serde_json::from_str(&record.value).ok()?;
        let turn = |value: &Value| u32::try_from(value.as_u64()?).ok().map(TurnId);
        let mut turns: Vec<TurnId> = value["turns"].as_array()?.iter().filter_map(turn).collect();
        let mut after = turn(&value["after"]);
        // Where the beginning of it was chosen again, the rest is a variant behind that.
        let stands = turns.iter().take_while(|turn| !is_deleted(timeline, **turn)).count();
        after = turns.drain(..stands).next_back().or(after);
        Some(Variant { after, turns })
    };
    let aside = |variant: &Variant| {
        !variant.turns.is_empty() && variant.turns.iter().all(|&turn| is_deleted(timeline, turn))
    };
    let mut variants: Vec<Variant> = records.iter().filter_map(read).filter(aside).collect();
    // An answer set aside with its message, chosen again with it and set aside alone, is in two records and one variant.
    variants.sort_by(|one, other| (one.after, &one.turns).cmp(&(other.after, &other.turns)));
    variants.dedup();
    Ok(variants)
}

fn is_deleted(timeline: &Timeline, turn: TurnId) -> bool {
    let mut chunks = timeline.turn_chunks(turn).peekable();
    chunks.peek().is_some() && chunks.all(|chunk| chunk.is_withdrawn() && !chunk.is_forgotten())
}

impl Session {
    /// Sets messages at the end aside: out of the window and out of search, and kept as a variant.
    ///
    /// # Errors
    /// When the store fails.
    pub fn set_aside(&mut self, turns: &[TurnId], reason: DeleteReason) -> Result<(), SeamError> {
        self.check_held()?;
        self.keep_variant(turns)?;
        self.delete_turns(turns, reason)
    }

    /// Notes messages at the end as a variant, before they are deleted: if the program ends between the two, they still stand.
    fn keep_variant(&mut self, turns: &[TurnId]) -> Result<(), SeamError> {
        let mut turns: Vec<u32> = turns.iter().map(|turn| turn.0).collect();
        turns.sort_unstable();
        let Some(&first) = turns.first() else { return Ok(()) };
        let after = self.said().map(|(turn, _)| turn.0).find(|&turn| turn < first);
        let value = json!({ "after": after, "turns": turns }).to_string();
        self.store.put_record(&self.name, Kind::Variant, &format!("{first:010}"), Some(&value))
    }

    /// Whether these turns, in any order, are all that stands behind the turn before the first of them.
    pub fn ends_with(&self, turns: &[TurnId]) -> bool {
        let standing: Vec<TurnId> = self.said().take(turns.len()).map(|(turn, _)| turn).collect();
        standing.len() == turns.len() && turns.iter().all(|turn| standing.contains(turn))
    }

    /// The variants that can be chosen now.
    ///
    /// # Errors
    /// When the store fails.
    pub fn choices(&mut self) -> Result<Vec<Choice>, SeamError> {
        choices(&mut *self.store, &self.name, &mut self.timeline)
    }

    /// Puts a variant in the place of what stands there; that becomes a variant itself.
    ///
    /// # Errors
    /// When one of them is not what it was taken for any more, or the store fails.
    pub fn choose_variant(&mut self, chosen: &[TurnId], replaces: &[TurnId]) -> Result<(), SeamError> {
        self.check_held()?;
        let gone = |&turn: &TurnId| is_deleted(&self.timeline, turn);
        if !self.ends_with(replaces) || chosen.is_empty() || !chosen.iter().all(gone) {
            let why = "the conversation has changed since: look at its variants again";
            return Err(SeamError::asked("choosing a variant", why));
        }
        self.keep_variant(replaces)?;
        let parts = |turns: &[TurnId]| -> Vec<Part> {
            let chunks = turns.iter().flat_map(|&turn| self.timeline.turn_chunks(turn));
            chunks.map(|chunk| Part { chunk: chunk.id(), extent: Extent::Whole }).collect()
        };
        let mut changes = vec![Change::Restore(parts(chosen))];
        if !replaces.is_empty() {
            changes
                .insert(0, Change::Withdraw { parts: parts(replaces), reason: DeleteReason::VariantChosen });
        }
        self.change(&Change::Batch(changes), Durability::Now)?;
        self.recall.follow(&mut *self.store, &self.timeline)?;
        self.show();
        Ok(())
    }
}

/// The variants that can be chosen now, with what stands in their place, in the order in which they were said. Empty where
/// there is nothing to choose from.
///
/// # Errors
/// When the store fails.
pub fn choices(
    store: &mut dyn Store,
    conversation: &str,
    timeline: &mut Timeline,
) -> Result<Vec<Choice>, SeamError> {
    let all = variants(store, conversation, timeline)?;
    let stands = |turn: TurnId| timeline.turn_chunks(turn).any(|chunk| !chunk.is_withdrawn());
    let tail: Vec<(TurnId, Role)> = (timeline.turns().iter().rev())
        .filter(|turn| stands(turn.id))
        .map(|turn| (turn.id, turn.role))
        .take(MOST_OF_AN_EXCHANGE)
        .collect();
    // The answer of the last exchange, or all of it.
    let answers = tail.iter().take_while(|(_, role)| *role != Role::User).count();
    let exchange = (answers + 1).min(tail.len());
    for standing in [answers, exchange] {
        let after = tail.get(standing).map(|(turn, _)| *turn);
        let others = all.iter().filter(|variant| variant.after == after).map(|v| (v.turns.clone(), false));
        let mut groups: Vec<(Vec<TurnId>, bool)> = others.collect();
        if groups.is_empty() {
            continue;
        }
        let mut stands: Vec<TurnId> = tail[..standing].iter().map(|(turn, _)| *turn).collect();
        stands.sort_unstable();
        groups.extend((!stands.is_empty()).then_some((stands, true)));
        groups.sort();
        let mut choices = Vec::with_capacity(groups.len());
        for (turns, stands) in groups {
            let mut messages = Vec::with_capacity(turns.len());
            for &turn in &turns {
                let role = timeline.turns().iter().find(|t| t.id == turn).map(|t| t.role);
                messages
                    .push((role.unwrap_or(Role::Assistant), text_of(store, conversation, timeline, turn)?));
            }
            choices.push(Choice { turns, messages, stands });
        }
        return Ok(choices);
    }
    Ok(Vec::new())
}

/// Turns of one exchange that are looked at: a message, and what answers it.
const MOST_OF_AN_EXCHANGE: usize = 16;
