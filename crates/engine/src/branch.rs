//! Branches: a new conversation that shares the first messages of another. Both can be continued.
//!
//! The shared messages keep their positions, so their KV cells serve both: the branch records its parent's key, and nothing
//! is prefilled again.

use crate::conversation::kv_cache_key;
use crate::forget::pending;
use crate::memory::record::delete_memories_after;
use halo_core::Error;
use halo_core::store::{RecordKind, Store};
use halo_core::token::TurnId;
use serde_json::{Value, json};

/// Where a branch begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchPoint {
    /// The last turn of both conversations.
    pub last_shared_turn: TurnId,
    /// Later turns that are a variant in the parent and part of the branch.
    pub chosen_turns: Vec<TurnId>,
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
/// hold its lease.
pub fn create_branch(store: &mut dyn Store, from: &str, to: &str, at: &BranchPoint) -> Result<usize, Error> {
    let missing = || Error::not_found("branching", format!("there is no conversation '{from}'"));
    let parent = store.find_conversation(from)?.ok_or_else(missing)?;
    let last =
        at.chosen_turns.iter().copied().chain([at.last_shared_turn]).max().unwrap_or(at.last_shared_turn);
    let (mut shared, mut tokens) = (0, 0);
    store.copy_conversation(from, to, &parent.model, &mut |mut copy| {
        if copy.turn > last {
            return Ok(None);
        }
        tokens += copy.tokens.len() as u64;
        if copy.turn > at.last_shared_turn {
            // The parent's turns after the branch point are a variant in the branch.
            let chosen = at.chosen_turns.contains(&copy.turn);
            copy.tokens.iter_mut().for_each(|token| token.deleted = !chosen);
        }
        shared += usize::from(copy.tokens.iter().any(|token| !token.deleted));
        Ok(Some(copy))
    })?;
    delete_memories_after(store, to, last.0)?;
    pending::truncate_pending(store, to, last.0)?;
    for record in store.records(to, RecordKind::Variant)? {
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
        store.put_record(to, RecordKind::Variant, &record.key, value.as_deref())?;
    }
    // A response is a turn of the parent: in the branch, another turn may have its number.
    for record in store.records(to, RecordKind::Response)? {
        store.put_record(to, RecordKind::Response, &record.key, None)?;
    }
    let parent = json!({ "key": kv_cache_key(store, &parent)?, "tokens": tokens });
    store.put_record(to, RecordKind::Setting, PARENT_KEY, Some(&parent.to_string()))?;
    Ok(shared)
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
