//! Branches: a new conversation that shares the beginning of another. Both live on.
//!
//! The shared messages keep their positions, so the KV cells behind them serve both: the branch notes whose they are, and
//! nothing is read again.

use crate::memory;
use crate::{grace, session};
use halo_core::seams::{Kind, SeamError, Store};
use halo_core::token::TurnId;
use serde_json::{Value, json};

/// Where a branch departs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchPoint {
    /// The last turn that stands in both.
    pub through: TurnId,
    /// Turns behind it that were set aside in the other, and stand in the branch.
    pub chosen: Vec<TurnId>,
}

/// Whose KV cells a branch shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parent {
    /// What the model keeps them under.
    pub key: String,
    /// Up to which position.
    pub tokens: u64,
}

/// Where that is kept.
const PARENT: &str = "branch.parent";

/// Makes a branch of a conversation. Returns how many messages they share. The other conversation is only read, so somebody
/// may be writing there.
///
/// # Errors
/// When there is a conversation of that name, or the store fails.
pub fn create(store: &mut dyn Store, from: &str, to: &str, at: &BranchPoint) -> Result<usize, SeamError> {
    let missing = || SeamError::asked("branching", format!("there is no conversation '{from}'"));
    let known = store.find(from)?.ok_or_else(missing)?;
    let last = at.chosen.iter().copied().chain([at.through]).max().unwrap_or(at.through);
    let (mut shared, mut tokens) = (0, 0);
    store.retell(from, to, &known.model, &mut |mut told| {
        if told.turn > last {
            return Ok(None);
        }
        tokens += told.tokens.len() as u64;
        if told.turn > at.through {
            // What stands in the other behind that turn is a variant here.
            let chosen = at.chosen.contains(&told.turn);
            told.tokens.iter_mut().for_each(|token| token.withdrawn = !chosen);
        }
        shared += usize::from(told.tokens.iter().any(|token| !token.withdrawn));
        Ok(Some(told))
    })?;
    memory::forget_later(store, to, last.0)?;
    grace::cut(store, to, last.0)?;
    for record in store.records(to, Kind::Variant)? {
        // Turns behind the last one that is shared get their numbers again here.
        let mut value: Value = serde_json::from_str(&record.value).unwrap_or_default();
        let turns = value["turns"].as_array().cloned().unwrap_or_default();
        let shared: Vec<Value> = turns
            .into_iter()
            .filter(|turn| turn.as_u64().is_some_and(|turn| turn <= u64::from(last.0)))
            .collect();
        let kept = (!shared.is_empty()).then(|| {
            value["turns"] = json!(shared);
            value.to_string()
        });
        store.put_record(to, Kind::Variant, &record.key, kept.as_deref())?;
    }
    let parent = json!({ "key": session::key(store, &known)?, "tokens": tokens });
    store.put_record(to, Kind::Setting, PARENT, Some(&parent.to_string()))?;
    Ok(shared)
}

/// Whose KV cells a conversation shares, if it is a branch.
pub(crate) fn parent(store: &mut dyn Store, conversation: &str) -> Result<Option<Parent>, SeamError> {
    let records = store.records(conversation, Kind::Setting)?;
    let Some(record) = records.iter().find(|record| record.key == PARENT) else { return Ok(None) };
    let value: Value = serde_json::from_str(&record.value).unwrap_or_default();
    let parent =
        || Some(Parent { key: value["key"].as_str()?.to_owned(), tokens: value["tokens"].as_u64()? });
    Ok(parent())
}
