//! Conversations that were kept when they were retokenized: they have the same messages as the one in their place, so lists and
//! searches leave them out, and they are deleted and restored with it.

use halo_core::Error;
use halo_core::store::{ConversationSummary, ORIGINAL_OF_KEY, RecordKind, Store};
use std::collections::{BTreeMap, BTreeSet};

/// The names of kept originals, each with the name of the conversation in its place: what lists and searches leave out.
pub(crate) fn load_originals(
    store: &mut dyn Store,
    conversations: &[ConversationSummary],
) -> Result<BTreeMap<String, String>, Error> {
    let mut originals = load_recorded_originals(store, conversations)?;
    // Earlier versions did not note it. A name is a guess: nothing is deleted for it.
    let names: BTreeSet<&str> = conversations.iter().map(|summary| summary.name.as_str()).collect();
    for name in &names {
        if let Some(base) = name_of_successor(name).filter(|base| names.contains(base)) {
            originals.entry((*name).to_owned()).or_insert_with(|| base.to_owned());
        }
    }
    Ok(originals)
}

/// As [`load_originals`], without those that only their names show: what is deleted and restored together.
pub(crate) fn load_recorded_originals(
    store: &mut dyn Store,
    conversations: &[ConversationSummary],
) -> Result<BTreeMap<String, String>, Error> {
    let by_id: BTreeMap<&str, &str> =
        conversations.iter().map(|summary| (summary.id.as_str(), summary.name.as_str())).collect();
    let mut originals: BTreeMap<String, String> = BTreeMap::new();
    for (name, record) in store.records_with_key(RecordKind::Setting, ORIGINAL_OF_KEY)? {
        // An original whose successor was erased, or that was imported elsewhere, is a conversation of its own.
        if let Some(successor) = by_id.get(record.value.as_str()).filter(|successor| **successor != name) {
            originals.insert(name, (*successor).to_owned());
        }
    }
    Ok(originals)
}

/// The originals of a conversation, and theirs.
pub(crate) fn originals_of(originals: &BTreeMap<String, String>, name: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut successors = vec![name.to_owned()];
    while let Some(successor) = successors.pop() {
        let next = originals.iter().filter(|(original, of)| **of == successor && !found.contains(original));
        let next: Vec<String> = next.map(|(original, _)| original.clone()).collect();
        successors.extend(next.iter().cloned());
        found.extend(next);
    }
    found
}

/// `NAME` of `NAME (original)` or `NAME (as it came)`, with a number.
fn name_of_successor(name: &str) -> Option<&str> {
    let (base, rest) = name.rsplit_once(" (")?;
    let rest = rest.strip_suffix(')')?;
    let rest = rest.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end();
    ["original", "as it came"].contains(&rest).then_some(base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn originals_of_originals_belong_to_the_conversation() {
        let pairs =
            [("a (one)", "a (two)"), ("a (two)", "a"), ("b (one)", "b"), ("c", "c (one)"), ("c (one)", "c")];
        let originals = pairs.map(|(name, of)| (name.to_owned(), of.to_owned())).into();
        assert_eq!(originals_of(&originals, "a"), ["a (two)", "a (one)"]);
        assert_eq!(originals_of(&originals, "b"), ["b (one)"]);
        assert_eq!(originals_of(&originals, "c").len(), 2, "a circle ends");
        assert_eq!(originals_of(&originals, "d"), Vec::<String>::new());
    }

    #[test]
    fn originals_of_earlier_versions_are_recognised_by_name() {
        assert_eq!(name_of_successor("a (original)"), Some("a"));
        assert_eq!(name_of_successor("a (as it came 2)"), Some("a"));
        assert_eq!(name_of_successor("a (SmolLM2)"), None);
        assert_eq!(name_of_successor("a original)"), None);
    }
}
