//! Decides how a request continues a conversation.

use super::keys::{SentMessage, is_same_message, normalize_text, split_speaker_name};
use super::matching::{mark_speaker_names, match_messages};
use super::verdict::{AlignCandidate, AlignScore, AlignVerdict, Alignment};
use halo_core::store::MessageKey;
use halo_core::token::{Role, TurnId};

/// A text of this many characters identifies a conversation by itself; a shorter one may be in any.
const MIN_DISTINCTIVE_CHARS: u32 = 40;

/// A text of fewer characters identifies nothing, even where only one conversation has it.
const MIN_UNIQUE_CHARS: u32 = 24;

/// The most messages of a summary.
const MAX_SUMMARY_MESSAGES: usize = 2;

/// How a request continues a conversation; none where it belongs to another one. `text` returns the text of a stored turn: it
/// is called only where an answer differs, because clients cut off incomplete sentences.
pub fn align(
    candidate: &AlignCandidate<'_>,
    sent: &[SentMessage],
    text: &mut dyn FnMut(TurnId) -> Option<String>,
) -> Option<Alignment> {
    Aligner::new(candidate, sent)?.decide(text)
}

/// Whether the model answers messages of a role: those of the user, and results of functions.
fn is_answered(role: &Role) -> bool {
    matches!(role, Role::User | Role::Tool)
}

struct Aligner<'a> {
    candidate: &'a AlignCandidate<'a>,
    /// The messages of the conversation without system messages.
    path: Vec<&'a MessageKey>,
    /// Indexes in the request of the messages before the last one, without system messages.
    history: Vec<usize>,
    sent: &'a [SentMessage],
    last: &'a SentMessage,
    /// For each message of the history, its index in the path.
    matches: Vec<Option<usize>>,
    /// The first user message of the path: a greeting may come before it.
    first_user: usize,
}

impl<'a> Aligner<'a> {
    fn new(candidate: &'a AlignCandidate<'a>, sent: &'a [SentMessage]) -> Option<Self> {
        let (last, before) = sent.split_last()?;
        let path: Vec<&MessageKey> = (candidate.messages.iter())
            .filter(|known| known.on_path && known.key.role != Role::System)
            .map(|known| &known.key)
            .collect();
        let history: Vec<usize> = (0..before.len()).filter(|&n| before[n].role != Role::System).collect();
        let keys: Vec<&MessageKey> = history.iter().map(|&n| &sent[n].key).collect();
        let matches = match_messages(&mark_speaker_names(&keys), &path);
        let first_user = match candidate.from_start {
            true => path.iter().position(|key| key.role == Role::User).unwrap_or(path.len()),
            false => 0,
        };
        Some(Self { candidate, path, history, sent, last, matches, first_user })
    }

    fn decide(mut self, text: &mut dyn FnMut(TurnId) -> Option<String>) -> Option<Alignment> {
        self.match_truncated_answers(text);
        let (summaries, differs_at) = self.find_gaps();
        if let Some(at) = differs_at {
            return self.align_branch(at, summaries);
        }
        let Some(end) = self.matches.iter().rposition(Option::is_some) else {
            return self.align_first_message();
        };
        let at = self.matches[end]?;
        let rest: Vec<TurnId> = self.path[at + 1..].iter().map(|key| key.turn).collect();
        let roles: Vec<Role> = self.path[at + 1..].iter().map(|key| key.role).collect();
        // Messages of the history after the last one that matches.
        let new = &self.history[end + 1..];
        let from = self.history[end] + 1;
        let answers_only = !roles.iter().any(is_answered);
        let exchange = roles.first().is_some_and(is_answered) && !roles[1..].iter().any(is_answered);
        if !new.is_empty()
            && let Some((chosen, next)) = self.variant_after(self.path[at].turn, new)
        {
            let replaced = answers_only || exchange;
            let verdict = match replaced {
                true => AlignVerdict::ChooseVariant { chosen_turns: chosen, replaces: rest, first_new: next },
                false => AlignVerdict::Branch {
                    last_shared_turn: self.path[at].turn,
                    chosen_turns: chosen,
                    first_new: next,
                },
            };
            return self.weigh_evidence(verdict, end, 0, summaries);
        }
        if rest.is_empty() || (answers_only && new.first().is_none_or(|&n| is_answered(&self.sent[n].role))) {
            // The same messages in another order are another conversation.
            let is_repeated = |n: &usize| {
                self.sent[*n].key.length >= MIN_DISTINCTIVE_CHARS && self.is_on_path(&self.sent[*n].key)
            };
            if !new.is_empty() && new.iter().all(is_repeated) {
                return None;
            }
            // An answer that the client has dropped stays in the conversation.
            return self.weigh_evidence(AlignVerdict::Continue { first_new: from }, end, 0, summaries);
        }
        if new.is_empty() && exchange && is_answered(&self.last.role) {
            let again = self.last.key.exact_hash == self.path[at + 1].exact_hash;
            let verdict = match again {
                true => AlignVerdict::Regenerate { replaces: rest[1..].to_vec() },
                false => AlignVerdict::EditLast { replaces: rest },
            };
            let last_length = if again { self.last.key.length.max(1) } else { 0 };
            return self.weigh_evidence(verdict, end, last_length, summaries);
        }
        self.align_branch(end, summaries)
    }

    /// A request whose history matches nothing: its message may be the first one, sent again.
    fn align_first_message(&self) -> Option<Alignment> {
        let unknown = self.history.iter().any(|&n| !self.is_on_path(&self.sent[n].key));
        let first = self.path.get(self.first_user)?;
        let only = self.path[self.first_user + 1..].iter().all(|key| key.role != Role::User);
        let again = self.candidate.from_start && !unknown && only && self.last.role == Role::User;
        let is_distinctive = self.last.key.length >= MIN_DISTINCTIVE_CHARS || self.candidate.named;
        if !again || first.exact_hash != self.last.key.exact_hash || !is_distinctive {
            return None;
        }
        let replaces = self.path[self.first_user + 1..].iter().map(|key| key.turn).collect();
        let score = AlignScore { rank: 3, matched: 1, same_system: self.candidate.same_system };
        let verdict = AlignVerdict::Regenerate { replaces };
        Some(Alignment { verdict, score, summaries: Vec::new(), last_shared_turn: None, first_unmatched: 0 })
    }

    /// A branch after message `end` of the history, or after the last one before it that matches.
    fn align_branch(&self, end: usize, mut summaries: Vec<usize>) -> Option<Alignment> {
        let end =
            (0..=end.min(self.matches.len().checked_sub(1)?)).rev().find(|&n| self.matches[n].is_some())?;
        let at = self.matches[end]?;
        let from = self.history[end] + 1;
        let last_shared_turn = self.path[at].turn;
        summaries.retain(|&summary| summary < from);
        self.weigh_evidence(
            AlignVerdict::Branch { last_shared_turn, chosen_turns: Vec::new(), first_new: from },
            end,
            0,
            summaries,
        )
    }

    /// The verdict, if the matches identify the conversation. `last_length` is the length of the last message where it
    /// matches too.
    fn weigh_evidence(
        &self,
        verdict: AlignVerdict,
        end: usize,
        last_length: u32,
        summaries: Vec<usize>,
    ) -> Option<Alignment> {
        // Matches after the place where the history differs are evidence too.
        let evidence = self.matches.iter().flatten().filter(|&&at| at >= self.first_user);
        let (mut count, mut length) = (usize::from(last_length > 0), u64::from(last_length));
        for &at in evidence {
            count += 1;
            length += u64::from(self.path[at].length);
        }
        let (AlignVerdict::ChooseVariant { chosen_turns: chosen, .. }
        | AlignVerdict::Branch { chosen_turns: chosen, .. }) = &verdict
        else {
            return self.accept_if_sufficient(verdict, end, (count, length), summaries);
        };
        for message in self.candidate.messages.iter().filter(|m| chosen.contains(&m.key.turn)) {
            count += 1;
            length += u64::from(message.key.length);
        }
        self.accept_if_sufficient(verdict, end, (count, length), summaries)
    }

    /// The verdict, if this many messages with this total length identify a conversation.
    fn accept_if_sufficient(
        &self,
        verdict: AlignVerdict,
        end: usize,
        (count, length): (usize, u64),
        summaries: Vec<usize>,
    ) -> Option<Alignment> {
        let from_first = self.candidate.from_start && self.matches.first() == Some(&Some(0));
        let is_sufficient = match count {
            _ if self.candidate.named => true,
            0 => false,
            1 => {
                length >= u64::from(MIN_DISTINCTIVE_CHARS)
                    || (length >= u64::from(MIN_UNIQUE_CHARS) && self.is_unique(end))
            }
            _ => length >= u64::from(MIN_DISTINCTIVE_CHARS) || (from_first && self.candidate.same_system),
        };
        let rank = match verdict {
            AlignVerdict::Continue { .. } => 4,
            AlignVerdict::Regenerate { .. } | AlignVerdict::ChooseVariant { .. } => 3,
            AlignVerdict::EditLast { .. } => 2,
            AlignVerdict::Branch { .. } => 1,
        };
        let matched = self.matches[..=end].iter().flatten().count();
        let score = AlignScore { rank, matched, same_system: self.candidate.same_system };
        let last_shared_turn = self.matches[end].map(|at| self.path[at].turn);
        is_sufficient.then_some(Alignment {
            verdict,
            score,
            summaries,
            last_shared_turn,
            first_unmatched: self.history[end] + 1,
        })
    }

    /// Whether the only match is in no other conversation, and the system prompt is the same.
    fn is_unique(&self, end: usize) -> bool {
        let matched = self.matches[..=end].iter().flatten().find(|&&at| at >= self.first_user);
        let unique =
            matched.is_some_and(|&at| self.candidate.unique_hashes.contains(&self.path[at].loose_hash));
        unique && self.candidate.same_system
    }

    /// Examines the gaps between matches. Returns the messages of the request that are summaries, and the index in the history
    /// where it differs, if it does.
    fn find_gaps(&self) -> (Vec<usize>, Option<usize>) {
        let mut summaries = Vec::new();
        let Some(end) = self.matches.iter().rposition(Option::is_some) else { return (summaries, None) };
        let (mut n, mut next) = (0, 0);
        while n <= end {
            if let Some(at) = self.matches[n] {
                (n, next) = (n + 1, at + 1);
                continue;
            }
            let after = (n..=end).find(|&m| self.matches[m].is_some()).unwrap_or(end);
            let left_out = self.matches[after].unwrap_or(next) - next;
            let unknown: Vec<usize> =
                (n..after).filter(|&m| !self.is_known(&self.sent[self.history[m]].key)).collect();
            let is_summary = unknown.len() <= MAX_SUMMARY_MESSAGES && left_out >= 2 * unknown.len();
            // Messages before the first one change nothing of what follows.
            let is_before_all = n == 0 && left_out == 0;
            if !(unknown.is_empty() || is_summary || is_before_all) {
                return (summaries, Some(n.saturating_sub(1)));
            }
            summaries.extend(unknown.iter().map(|&m| self.history[m]));
            n = after;
        }
        (summaries, None)
    }

    /// Clients cut off incomplete sentences, and continue answers that were cut off: an answer that is the beginning of the
    /// answer at its place is the same.
    fn match_truncated_answers(&mut self, text: &mut dyn FnMut(TurnId) -> Option<String>) {
        for n in 0..self.history.len() {
            let before = match n.checked_sub(1) {
                None => None,
                Some(before) => match self.matches[before] {
                    None => continue,
                    at => at,
                },
            };
            let at = before.map_or(0, |at| at + 1);
            let message = &self.sent[self.history[n]];
            let Some(there) = self.path.get(at) else { continue };
            let next = self.matches.get(n + 1).copied().flatten();
            let alone = self.matches[n].is_none()
                && !self.matches.contains(&Some(at))
                && next.is_none_or(|next| next == at + 1);
            if !alone || message.role != Role::Assistant || there.role != Role::Assistant {
                continue;
            }
            let Some(stored) = text(there.turn) else { continue };
            let (_, stored) = split_speaker_name(stored.trim());
            let (_, sent) = split_speaker_name(message.text.trim());
            let (stored, sent) = (normalize_text(stored), normalize_text(sent));
            let (short, long) = if stored.len() < sent.len() { (stored, sent) } else { (sent, stored) };
            if short.len() >= 16 && 2 * short.len() >= long.len() && long.starts_with(&short) {
                self.matches[n] = Some(at);
            }
        }
    }

    /// The replaced turns after a turn that the history continues with, and the index of the first message after them. A
    /// replaced answer may belong to a replaced message.
    fn variant_after(&self, after: TurnId, new: &[usize]) -> Option<(Vec<TurnId>, usize)> {
        let (mut chosen, mut last) = (Vec::new(), after);
        for &n in new {
            let follows = self.candidate.variants.iter().filter_map(|variant| match variant.after {
                Some(before) if before == last => variant.turns.first(),
                _ => variant.turns.iter().skip_while(|turn| **turn != last).nth(1),
            });
            let is_message = |turn: &&TurnId| {
                let known = self.candidate.messages.iter().find(|known| known.key.turn == **turn);
                known.is_some_and(|known| !known.on_path && is_same_message(&known.key, &self.sent[n].key))
            };
            let Some(&next) = follows.collect::<Vec<_>>().into_iter().find(is_message) else { break };
            chosen.push(next);
            last = next;
        }
        let first_new = new[..chosen.len()].last()? + 1;
        Some((chosen, first_new))
    }

    /// Whether the conversation has a message, deleted or not.
    fn is_known(&self, key: &MessageKey) -> bool {
        self.candidate.messages.iter().any(|known| is_same_message(&known.key, key))
    }

    fn is_on_path(&self, key: &MessageKey) -> bool {
        self.path.iter().any(|known| is_same_message(known, key))
    }
}
