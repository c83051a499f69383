//! Pairs the messages of a history with those of a conversation.

use super::keys::is_same_message;
use halo_core::store::MessageKey;
use std::collections::BTreeMap;

/// The most comparisons of one alignment.
const MAX_COMPARISONS: usize = 4_000_000;

/// A message of a history, and whether the word before its first colon is a speaker's name: every message has one, or the
/// same name occurs more than once. "Price: 5" instead of "5" is an edit.
#[derive(Clone, Copy)]
pub(super) struct HistoryMessage<'a> {
    key: &'a MessageKey,
    has_speaker: bool,
}

impl HistoryMessage<'_> {
    fn matches_key(&self, known: &MessageKey) -> bool {
        is_same_message(self.key, known)
            && (self.has_speaker || self.key.name_hash == known.name_hash || known.name_hash != 0)
    }
}

pub(super) fn mark_speaker_names<'a>(keys: &[&'a MessageKey]) -> Vec<HistoryMessage<'a>> {
    let mut counts: BTreeMap<(u64, &str), usize> = BTreeMap::new();
    keys.iter().for_each(|key| *counts.entry((key.name_hash, key.role.name())).or_default() += 1);
    let all_named = keys.len() > 1 && keys.iter().all(|key| key.name_hash != 0);
    let has_speaker = |key: &MessageKey| all_named || counts[&(key.name_hash, key.role.name())] > 1;
    keys.iter()
        .map(|&key| HistoryMessage { key, has_speaker: key.name_hash != 0 && has_speaker(key) })
        .collect()
}

/// For each message of a history, its index among the messages of a conversation: the longest common subsequence, with
/// matches as late as possible.
pub(super) fn match_messages(history: &[HistoryMessage<'_>], path: &[&MessageKey]) -> Vec<Option<usize>> {
    let mut matches = vec![None; history.len()];
    let head = history.iter().zip(path).take_while(|(sent, known)| sent.matches_key(known)).count();
    matches[..head].iter_mut().enumerate().for_each(|(n, m)| *m = Some(n));
    let (rest, theirs) = (&history[head..], &path[head..]);
    if rest.is_empty() || theirs.is_empty() {
        return matches;
    }
    // Mostly one of the two is short. Where both are too long, only the latest messages are compared.
    let width = theirs.len().min(MAX_COMPARISONS);
    let height = rest.len().min(MAX_COMPARISONS / width);
    let (skip, offset) = (rest.len() - height, theirs.len() - width);
    let (rest, theirs) = (&rest[skip..], &theirs[offset..]);
    // longest[i][j]: of rest[i..] and theirs[j..].
    let row = width + 1;
    let mut longest = vec![0u32; (height + 1) * row];
    for i in (0..height).rev() {
        for j in (0..width).rev() {
            longest[i * row + j] = match rest[i].matches_key(theirs[j]) {
                true => longest[(i + 1) * row + j + 1] + 1,
                false => longest[(i + 1) * row + j].max(longest[i * row + j + 1]),
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    while i < height && j < width {
        let here = longest[i * row + j];
        if here == 0 {
            break;
        }
        // A match is taken only where skipping it would shorten the subsequence.
        if longest[i * row + j + 1] == here {
            j += 1;
        } else if longest[(i + 1) * row + j] == here {
            i += 1;
        } else {
            matches[head + skip + i] = Some(head + offset + j);
            (i, j) = (i + 1, j + 1);
        }
    }
    matches
}
