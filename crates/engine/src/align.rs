//! Which stored conversation a client goes on with that keeps its own history and sends it with every request.
//!
//! Clients trim white space, put names in front, drop the middle, put a summary in the place of old turns, edit, fork and
//! regenerate. So a request is aligned with a conversation message by message, by hashes, and the verdict says what the
//! request means there. A deletion is inferred in two cases only, [`Verdict::Regenerate`] and [`Verdict::EditLast`]; in both
//! the old text is kept as a variant. What a client leaves out stays in the conversation.
//!
//! Everything here is pure. The caller looks candidates up in the store's index and carries the verdict out.

use halo_core::seams::MessageKey;
use halo_core::token::{Role, TurnId};
use std::collections::{BTreeMap, BTreeSet};
use unicode_normalization::UnicodeNormalization;
use xxhash_rust::xxh3::Xxh3;

/// A message that a client sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentMessage {
    /// Who says it.
    pub role: Role,
    /// What it says.
    pub text: String,
    /// Its hashes. The turn is not known yet, and 0.
    pub key: MessageKey,
}

impl SentMessage {
    /// A message of a request.
    #[must_use]
    pub fn new(role: Role, text: String) -> Self {
        let key = message_key(TurnId(0), role, &text, 0);
        Self { role, text, key }
    }
}

/// A message of a stored conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownMessage {
    /// Its hashes, and the turn that says it.
    pub key: MessageKey,
    /// Whether it is on the conversation's path; if not, it was deleted, by hand or as a variant.
    pub stands: bool,
}

/// Messages that were set aside for others that stand in their place: an answer for another one, or an exchange for an
/// edited one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variant {
    /// The turn that they follow; none where they open the conversation.
    pub after: Option<TurnId>,
    /// Their turns, in order.
    pub turns: Vec<TurnId>,
}

/// A stored conversation, as far as it is compared.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Its messages, by turn. A long conversation is known by its latest.
    pub messages: &'a [KnownMessage],
    /// What was set aside.
    pub variants: &'a [Variant],
    /// Whether its first message is among them.
    pub from_start: bool,
    /// Whether its system prompt is the one that was sent, or much like it.
    pub same_system: bool,
    /// Hashes ([`MessageKey::loose`]) of messages that no other conversation has.
    pub unique: &'a BTreeSet<u64>,
    /// Whether the client has named it: then it need not be known by what was said.
    pub named: bool,
}

/// What a request means in a conversation. `from` counts the messages of the request that are there already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes on at the end: messages from `from` on are new.
    Continue {
        /// The first message that is new.
        from: usize,
    },
    /// The last message is asked again: its answer is set aside. There is none where an earlier try failed.
    Regenerate {
        /// The answer.
        replaces: Vec<TurnId>,
    },
    /// The last user message was edited: it is set aside with its answer.
    EditLast {
        /// The message and its answer.
        replaces: Vec<TurnId>,
    },
    /// The client goes on from a variant: it takes the place of what stands there.
    ChooseVariant {
        /// The variant.
        chosen: Vec<TurnId>,
        /// What stands in its place.
        replaces: Vec<TurnId>,
        /// The first message that is new.
        from: usize,
    },
    /// The history departs earlier: a new conversation shares everything up to a turn, and the variant that the client has
    /// behind it.
    Branch {
        /// The last turn that both share.
        through: TurnId,
        /// The variant behind it that the client goes on from.
        chosen: Vec<TurnId>,
        /// The first message that is new.
        from: usize,
    },
}

/// How well a request fits a conversation: the larger, the better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fit {
    rank: u8,
    matched: usize,
    same_system: bool,
}

/// What a request means in a conversation, and how well it fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// What it means.
    pub verdict: Verdict,
    /// How well it fits.
    pub fit: Fit,
    /// Messages of the request that stand in the place of text that the conversation has: summaries, mostly.
    pub asides: Vec<usize>,
    /// The last turn that the history has in common with the conversation; none where only the last message is known.
    pub through: Option<TurnId>,
    /// The first message of the request behind that.
    pub behind: usize,
}

/// A text of so many characters is told apart from all others by itself; a shorter one may be said in any conversation.
const TELLING: u32 = 40;

/// A text of fewer characters tells nothing by itself, even where nobody else has said it.
const SHORT: u32 = 24;

/// The most messages that stand for more of them: a summary is one or two.
const SUMMARY: usize = 2;

/// The most comparisons of one alignment.
const COMPARISONS: usize = 4_000_000;

/// The hashes of a message behind a path of that hash.
#[must_use]
pub fn message_key(turn: TurnId, role: Role, text: &str, before: u64) -> MessageKey {
    let (name, rest) = speaker(text.trim());
    let loose = collapse(rest);
    let key = MessageKey {
        turn,
        role,
        exact: hash(role, text.trim()),
        loose: hash(role, &loose),
        name: if name.is_empty() { 0 } else { hash(role, &collapse(name)).max(1) },
        length: u32::try_from(loose.chars().count()).unwrap_or(u32::MAX),
        prefix: 0,
    };
    MessageKey { prefix: extend_prefix(before, &key), ..key }
}

/// The hash of a path that goes on with a message. System messages come and go, and are not counted.
#[must_use]
pub fn extend_prefix(before: u64, key: &MessageKey) -> u64 {
    if key.role == Role::System {
        return before;
    }
    let mut hash = Xxh3::new();
    hash.update(&before.to_le_bytes());
    hash.update(&key.loose.to_le_bytes());
    hash.digest()
}

/// The hashes of the paths to each of the messages.
#[must_use]
pub fn prefixes(sent: &[SentMessage]) -> Vec<u64> {
    let path = sent.iter().scan(0, |path, message| {
        *path = extend_prefix(*path, &message.key);
        Some(*path)
    });
    path.collect()
}

fn hash(role: Role, text: &str) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(role.name().as_bytes());
    hash.update(b"\0");
    hash.update(text.as_bytes());
    hash.digest()
}

/// A text in one normal form, each stretch of white space one blank.
fn collapse(text: &str) -> String {
    let normal: String = text.nfc().filter(|c| !matches!(c, '\u{200b}' | '\u{feff}')).collect();
    normal.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The name that stands in front of a text, as in "Anna: hello", and the rest.
fn speaker(text: &str) -> (&str, &str) {
    let is_name = |name: &str| {
        let known = |c: char| c.is_alphanumeric() || matches!(c, ' ' | '.' | '_' | '-' | '\'');
        let count = name.chars().count();
        (1..=40).contains(&count)
            && name.starts_with(char::is_alphanumeric)
            && name.chars().all(known)
            && name.split(' ').count() <= 4
    };
    match text.split_once(':') {
        Some((name, rest)) if is_name(name) && rest.starts_with([' ', '\n']) && !rest.trim().is_empty() => {
            (name, rest.trim_start())
        }
        _ => ("", text),
    }
}

/// Whether two messages are the same one, as far as clients keep them the same: white space may differ, and a name in front
/// may be there or not. Another name is another message.
fn same(a: &MessageKey, b: &MessageKey) -> bool {
    a.role == b.role
        && (a.exact == b.exact || (a.loose == b.loose && (a.name == b.name || a.name == 0 || b.name == 0)))
}

/// A message of a history, and whether a word with a colon in front of it is a speaker's name: every message has one, or the
/// same name is there more than once. "Price: 5" in the place of "5" is an edit.
#[derive(Clone, Copy)]
struct HistoryMessage<'a> {
    key: &'a MessageKey,
    has_speaker: bool,
}

impl HistoryMessage<'_> {
    fn is(&self, known: &MessageKey) -> bool {
        same(self.key, known) && (self.has_speaker || self.key.name == known.name || known.name != 0)
    }
}

fn with_speakers<'a>(keys: &[&'a MessageKey]) -> Vec<HistoryMessage<'a>> {
    let mut counts: BTreeMap<(u64, &str), usize> = BTreeMap::new();
    keys.iter().for_each(|key| *counts.entry((key.name, key.role.name())).or_default() += 1);
    let all_named = keys.len() > 1 && keys.iter().all(|key| key.name != 0);
    let has_speaker = |key: &MessageKey| all_named || counts[&(key.name, key.role.name())] > 1;
    keys.iter().map(|&key| HistoryMessage { key, has_speaker: key.name != 0 && has_speaker(key) }).collect()
}

/// Whether two system prompts are versions of one: much of it is the same.
#[must_use]
pub fn similar(a: &str, b: &str) -> bool {
    let (a, b) = (collapse(a), collapse(b));
    if a == b {
        return true;
    }
    let longer = a.len().max(b.len());
    let shorter = a.len().min(b.len());
    let head = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    let tail = a.bytes().rev().zip(b.bytes().rev()).take_while(|(a, b)| a == b).count();
    2 * (head + tail).min(shorter) >= longer
}

/// What a request means in a conversation; none where it is another one's. `text` tells what a stored turn says: it is asked
/// only where an answer differs, because clients cut incomplete sentences off.
pub fn align(
    candidate: &Candidate<'_>,
    sent: &[SentMessage],
    text: &mut dyn FnMut(TurnId) -> Option<String>,
) -> Option<Alignment> {
    Aligner::new(candidate, sent)?.verdict(text)
}

struct Aligner<'a> {
    candidate: &'a Candidate<'a>,
    /// What stands in the conversation, system messages aside.
    standing: Vec<&'a MessageKey>,
    /// The messages before the last one that are no system messages, by their index in the request.
    history: Vec<usize>,
    sent: &'a [SentMessage],
    last: &'a SentMessage,
    /// Which of the standing messages each message of the history is.
    matches: Vec<Option<usize>>,
    /// The first user message that stands: what comes before it is a greeting.
    greeting: usize,
}

impl<'a> Aligner<'a> {
    fn new(candidate: &'a Candidate<'a>, sent: &'a [SentMessage]) -> Option<Self> {
        let (last, before) = sent.split_last()?;
        let standing: Vec<&MessageKey> = (candidate.messages.iter())
            .filter(|known| known.stands && known.key.role != Role::System)
            .map(|known| &known.key)
            .collect();
        let history: Vec<usize> = (0..before.len()).filter(|&n| before[n].role != Role::System).collect();
        let keys: Vec<&MessageKey> = history.iter().map(|&n| &sent[n].key).collect();
        let matches = match_messages(&with_speakers(&keys), &standing);
        let greeting = match candidate.from_start {
            true => standing.iter().position(|key| key.role == Role::User).unwrap_or(standing.len()),
            false => 0,
        };
        Some(Self { candidate, standing, history, sent, last, matches, greeting })
    }

    fn verdict(mut self, text: &mut dyn FnMut(TurnId) -> Option<String>) -> Option<Alignment> {
        self.match_cut_answers(text);
        let (asides, departs) = self.gaps();
        if let Some(at) = departs {
            return self.branch(at, asides);
        }
        let Some(end) = self.matches.iter().rposition(Option::is_some) else { return self.first_again() };
        let at = self.matches[end]?;
        let rest: Vec<TurnId> = self.standing[at + 1..].iter().map(|key| key.turn).collect();
        let roles: Vec<Role> = self.standing[at + 1..].iter().map(|key| key.role).collect();
        // Messages of the history that are not known where it ends.
        let new = &self.history[end + 1..];
        let from = self.history[end] + 1;
        let answers_only = !roles.contains(&Role::User);
        let exchange = roles.first() == Some(&Role::User) && !roles[1..].contains(&Role::User);
        if !new.is_empty()
            && let Some((chosen, next)) = self.variant_after(self.standing[at].turn, new)
        {
            let replaced = answers_only || exchange;
            let verdict = match replaced {
                true => Verdict::ChooseVariant { chosen, replaces: rest, from: next },
                false => Verdict::Branch { through: self.standing[at].turn, chosen, from: next },
            };
            return self.judged(verdict, end, 0, asides);
        }
        if rest.is_empty() || (answers_only && new.first().is_none_or(|&n| self.sent[n].role == Role::User)) {
            // The same messages in another order are another conversation.
            let told = |n: &usize| self.sent[*n].key.length >= TELLING && self.stands(&self.sent[*n].key);
            if !new.is_empty() && new.iter().all(told) {
                return None;
            }
            // An answer that the client has not kept stays.
            return self.judged(Verdict::Continue { from }, end, 0, asides);
        }
        if new.is_empty() && exchange && self.last.role == Role::User {
            let again = self.last.key.exact == self.standing[at + 1].exact;
            let verdict = match again {
                true => Verdict::Regenerate { replaces: rest[1..].to_vec() },
                false => Verdict::EditLast { replaces: rest },
            };
            let own = if again { self.last.key.length.max(1) } else { 0 };
            return self.judged(verdict, end, own, asides);
        }
        self.branch(end, asides)
    }

    /// A request without a history that is known: its message may be the first one, asked again.
    fn first_again(&self) -> Option<Alignment> {
        let unknown = self.history.iter().any(|&n| !self.stands(&self.sent[n].key));
        let first = self.standing.get(self.greeting)?;
        let only = self.standing[self.greeting + 1..].iter().all(|key| key.role != Role::User);
        let again = self.candidate.from_start && !unknown && only && self.last.role == Role::User;
        let telling = self.last.key.length >= TELLING || self.candidate.named;
        if !again || first.exact != self.last.key.exact || !telling {
            return None;
        }
        let replaces = self.standing[self.greeting + 1..].iter().map(|key| key.turn).collect();
        let fit = Fit { rank: 3, matched: 1, same_system: self.candidate.same_system };
        let verdict = Verdict::Regenerate { replaces };
        Some(Alignment { verdict, fit, asides: Vec::new(), through: None, behind: 0 })
    }

    /// A new conversation from the history's message `end` on, or the one before it that is matched.
    fn branch(&self, end: usize, mut asides: Vec<usize>) -> Option<Alignment> {
        let end =
            (0..=end.min(self.matches.len().checked_sub(1)?)).rev().find(|&n| self.matches[n].is_some())?;
        let at = self.matches[end]?;
        let from = self.history[end] + 1;
        let through = self.standing[at].turn;
        asides.retain(|&aside| aside < from);
        self.judged(Verdict::Branch { through, chosen: Vec::new(), from }, end, 0, asides)
    }

    /// The verdict, if there is enough to know the conversation by. `own` is the length of the last message where it is known
    /// too.
    fn judged(&self, verdict: Verdict, end: usize, own: u32, asides: Vec<usize>) -> Option<Alignment> {
        // What is matched behind the place where the history departs tells whose it is, too.
        let telling = self.matches.iter().flatten().filter(|&&at| at >= self.greeting);
        let (mut count, mut length) = (usize::from(own > 0), u64::from(own));
        for &at in telling {
            count += 1;
            length += u64::from(self.standing[at].length);
        }
        let (Verdict::ChooseVariant { chosen, .. } | Verdict::Branch { chosen, .. }) = &verdict else {
            return self.known(verdict, end, (count, length), asides);
        };
        for message in self.candidate.messages.iter().filter(|m| chosen.contains(&m.key.turn)) {
            count += 1;
            length += u64::from(message.key.length);
        }
        self.known(verdict, end, (count, length), asides)
    }

    /// The verdict, if so many messages of that length altogether are enough to know a conversation by.
    fn known(
        &self,
        verdict: Verdict,
        end: usize,
        (count, length): (usize, u64),
        asides: Vec<usize>,
    ) -> Option<Alignment> {
        let whole = self.candidate.from_start && self.matches.first() == Some(&Some(0));
        let known = match count {
            _ if self.candidate.named => true,
            0 => false,
            1 => length >= u64::from(TELLING) || (length >= u64::from(SHORT) && self.is_unique(end)),
            _ => length >= u64::from(TELLING) || (whole && self.candidate.same_system),
        };
        let rank = match verdict {
            Verdict::Continue { .. } => 4,
            Verdict::Regenerate { .. } | Verdict::ChooseVariant { .. } => 3,
            Verdict::EditLast { .. } => 2,
            Verdict::Branch { .. } => 1,
        };
        let matched = self.matches[..=end].iter().flatten().count();
        let fit = Fit { rank, matched, same_system: self.candidate.same_system };
        let through = self.matches[end].map(|at| self.standing[at].turn);
        known.then_some(Alignment { verdict, fit, asides, through, behind: self.history[end] + 1 })
    }

    /// Whether the one message that is matched is in no other conversation, and the system prompt is the same.
    fn is_unique(&self, end: usize) -> bool {
        let matched = self.matches[..=end].iter().flatten().find(|&&at| at >= self.greeting);
        let unique = matched.is_some_and(|&at| self.candidate.unique.contains(&self.standing[at].loose));
        unique && self.candidate.same_system
    }

    /// Looks at what is not matched between what is. Returns the messages of the request that stand for others, and the place
    /// in the history where it departs, if it does.
    fn gaps(&self) -> (Vec<usize>, Option<usize>) {
        let mut asides = Vec::new();
        let Some(end) = self.matches.iter().rposition(Option::is_some) else { return (asides, None) };
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
            let summary = unknown.len() <= SUMMARY && left_out >= 2 * unknown.len();
            // What is put before everything changes nothing of what follows.
            let before_all = n == 0 && left_out == 0;
            if !(unknown.is_empty() || summary || before_all) {
                return (asides, Some(n.saturating_sub(1)));
            }
            asides.extend(unknown.iter().map(|&m| self.history[m]));
            n = after;
        }
        (asides, None)
    }

    /// Clients cut incomplete sentences off an answer, and go on with an answer that was cut: where one answer stands in the
    /// place of one other and is the beginning of it, it is the same.
    fn match_cut_answers(&mut self, text: &mut dyn FnMut(TurnId) -> Option<String>) {
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
            let Some(there) = self.standing.get(at) else { continue };
            let next = self.matches.get(n + 1).copied().flatten();
            let alone = self.matches[n].is_none()
                && !self.matches.contains(&Some(at))
                && next.is_none_or(|next| next == at + 1);
            if !alone || message.role != Role::Assistant || there.role != Role::Assistant {
                continue;
            }
            let Some(stored) = text(there.turn) else { continue };
            let (_, stored) = speaker(stored.trim());
            let (_, sent) = speaker(message.text.trim());
            let (stored, sent) = (collapse(stored), collapse(sent));
            let (short, long) = if stored.len() < sent.len() { (stored, sent) } else { (sent, stored) };
            if short.len() >= 16 && 2 * short.len() >= long.len() && long.starts_with(&short) {
                self.matches[n] = Some(at);
            }
        }
    }

    /// What was set aside behind a turn and the history goes on with, turn by turn, and the first message of the request behind
    /// it. An answer that was set aside may belong to a message that was.
    fn variant_after(&self, after: TurnId, new: &[usize]) -> Option<(Vec<TurnId>, usize)> {
        let (mut chosen, mut last) = (Vec::new(), after);
        for &n in new {
            let follows = self.candidate.variants.iter().filter_map(|variant| match variant.after {
                Some(before) if before == last => variant.turns.first(),
                _ => variant.turns.iter().skip_while(|turn| **turn != last).nth(1),
            });
            let says = |turn: &&TurnId| {
                let known = self.candidate.messages.iter().find(|known| known.key.turn == **turn);
                known.is_some_and(|known| !known.stands && same(&known.key, &self.sent[n].key))
            };
            let Some(&next) = follows.collect::<Vec<_>>().into_iter().find(says) else { break };
            chosen.push(next);
            last = next;
        }
        let behind = new[..chosen.len()].last()? + 1;
        Some((chosen, behind))
    }

    /// Whether the conversation has ever heard a message.
    fn is_known(&self, key: &MessageKey) -> bool {
        self.candidate.messages.iter().any(|known| same(&known.key, key))
    }

    fn stands(&self, key: &MessageKey) -> bool {
        self.standing.iter().any(|known| same(known, key))
    }
}

/// Which of the messages that stand each message of a history is: the longest common subsequence, as late as can be.
fn match_messages(history: &[HistoryMessage<'_>], standing: &[&MessageKey]) -> Vec<Option<usize>> {
    let mut matches = vec![None; history.len()];
    let head = history.iter().zip(standing).take_while(|(sent, known)| sent.is(known)).count();
    matches[..head].iter_mut().enumerate().for_each(|(n, m)| *m = Some(n));
    let (rest, theirs) = (&history[head..], &standing[head..]);
    if rest.is_empty() || theirs.is_empty() {
        return matches;
    }
    // Mostly one of the two is short; of what is longer than can be compared, the latest is.
    let width = theirs.len().min(COMPARISONS);
    let height = rest.len().min(COMPARISONS / width);
    let (skip, offset) = (rest.len() - height, theirs.len() - width);
    let (rest, theirs) = (&rest[skip..], &theirs[offset..]);
    // longest[i][j]: of rest[i..] and theirs[j..].
    let row = width + 1;
    let mut longest = vec![0u32; (height + 1) * row];
    for i in (0..height).rev() {
        for j in (0..width).rev() {
            longest[i * row + j] = match rest[i].is(theirs[j]) {
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
        // As late as can be: a match is taken only where leaving it out would lose one.
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

/// The messages of a history whose hashes are looked up one by one, where the whole of it is not known: the latest, system
/// messages aside, each once.
#[must_use]
pub fn telling(sent: &[SentMessage], most: usize) -> Vec<u64> {
    let mut seen = BTreeSet::new();
    let history = sent.iter().rev().skip(1).filter(|message| message.role != Role::System);
    history.map(|message| message.key.loose).filter(|&hash| seen.insert(hash)).take(most).collect()
}
