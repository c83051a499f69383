//! Branches: a new conversation that shares the first messages of another. Both can be continued.
//!
//! The shared messages keep their positions, so their KV cells serve both: the branch records its parent's key, and nothing
//! is prefilled again.

use crate::conversation::kv_cache_key;
use crate::forget::pending;
use crate::memory::record::memories_of_branch;
use halo_core::Error;
use halo_core::conversation_copy::TurnCopy;
use halo_core::store::{RecordChange, RecordKind, Store};
use halo_core::token::TurnId;
use serde_json::{Value, json};
use std::cell::Cell;

/// Where a branch begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchPoint {
    /// The last turn of both conversations.
    pub last_shared_turn: TurnId,
    /// Later turns that are a variant in the parent and part of the branch.
    pub chosen_turns: Vec<TurnId>,
    /// Later turns that are a variant in both.
    pub variant_turns: Vec<TurnId>,
}

impl BranchPoint {
    /// A branch that ends with this turn.
    #[must_use]
    pub fn after(last_shared_turn: TurnId) -> Self {
        Self { last_shared_turn, chosen_turns: Vec::new(), variant_turns: Vec::new() }
    }

    /// The last turn that the branch has, as text or as a variant.
    fn last_copied_turn(&self) -> TurnId {
        let later = self.chosen_turns.iter().chain(&self.variant_turns).copied();
        later.chain([self.last_shared_turn]).max().unwrap_or(self.last_shared_turn)
    }
}

/// The conversation whose KV cells a branch shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BranchParent {
    pub kv_key: String,
    /// The number of shared positions.
    pub shared_tokens: u64,
}

/// Setting: the parent of a branch.
const PARENT_KEY: &str = "branch.parent";

/// Creates a branch of a conversation. Returns how many messages they share. The parent is only read, so another process may
/// hold its lease. The branch is written in one transaction.
pub fn create_branch(store: &mut dyn Store, from: &str, to: &str, at: &BranchPoint) -> Result<usize, Error> {
    let missing = || Error::not_found("branching", format!("there is no conversation '{from}'"));
    let parent = store.find_conversation(from)?.ok_or_else(missing)?;
    let last = at.last_copied_turn();
    let mut changes = record_changes(store, from, last)?;
    let kv_key = kv_cache_key(store, &parent)?;
    let (shared, tokens) = (Cell::new(0), Cell::new(0));
    let mut convert = |mut copy: TurnCopy| {
        if copy.turn > last {
            return Ok(None);
        }
        tokens.set(tokens.get() + copy.tokens.len() as u64);
        if copy.turn > at.last_shared_turn {
            // The parent's turns after the branch point are a variant in the branch.
            let chosen = at.chosen_turns.contains(&copy.turn);
            copy.tokens.iter_mut().for_each(|token| token.deleted = !chosen);
        }
        shared.set(shared.get() + usize::from(copy.tokens.iter().any(|token| !token.deleted)));
        Ok(Some(copy))
    };
    store.copy_with_records(from, to, &parent.model, &mut convert, &mut || {
        let value = Some(json!({ "key": kv_key, "tokens": tokens.get() }).to_string());
        changes.push(RecordChange { kind: RecordKind::Setting, key: PARENT_KEY.to_owned(), value });
        std::mem::take(&mut changes)
    })?;
    Ok(shared.get())
}

/// How the records of a branch differ from those of its parent.
fn record_changes(store: &mut dyn Store, parent: &str, last: TurnId) -> Result<Vec<RecordChange>, Error> {
    let (mut changes, deleted_memories) = memories_of_branch(store, parent, last.0)?;
    changes.extend(pending::pending_of_branch(store, parent, last.0, &deleted_memories)?);
    for record in store.records(parent, RecordKind::Variant)? {
        // The branch uses the numbers of later turns again, so its variants must not name them.
        let mut value: Value = serde_json::from_str(&record.value).unwrap_or_default();
        let turns = value["turns"].as_array().cloned().unwrap_or_default();
        let shared: Vec<Value> = turns
            .into_iter()
            .filter(|turn| turn.as_u64().is_some_and(|turn| turn <= u64::from(last.0)))
            .collect();
        let value = (!shared.is_empty()).then(|| {
            value["turns"] = json!(shared);
            value.to_string()
        });
        changes.push(RecordChange { kind: RecordKind::Variant, key: record.key, value });
    }
    // A response is a turn of the parent: in the branch, another turn may have its number.
    for record in store.records(parent, RecordKind::Response)? {
        changes.push(RecordChange { kind: RecordKind::Response, key: record.key, value: None });
    }
    Ok(changes)
}

/// Deletes the links of branches that name a conversation as their parent. Links of earlier versions contain its name; those of
/// today its id, and the KV cells that they share are deleted with forgotten text.
pub(crate) fn delete_parent_links(store: &mut dyn Store, parent: &str) -> Result<(), Error> {
    let named_key = format!("\0{parent}");
    for summary in store.list_conversations()? {
        let link = load_branch_parent(store, &summary.name)?;
        if link.is_some_and(|link| link.kv_key.contains(&named_key)) {
            store.put_record(&summary.name, RecordKind::Setting, PARENT_KEY, None)?;
        }
    }
    Ok(())
}

/// The parent of a branch; none where the conversation is none.
pub(crate) fn load_branch_parent(
    store: &mut dyn Store,
    conversation: &str,
) -> Result<Option<BranchParent>, Error> {
    let records = store.records(conversation, RecordKind::Setting)?;
    let Some(record) = records.iter().find(|record| record.key == PARENT_KEY) else { return Ok(None) };
    let value: Value = serde_json::from_str(&record.value).unwrap_or_default();
    let parent = || {
        Some(BranchParent {
            kv_key: value["key"].as_str()?.to_owned(),
            shared_tokens: value["tokens"].as_u64()?,
        })
    };
    Ok(parent())
}
