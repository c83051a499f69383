//! Copies of a conversation, message by message: a branch up to a turn, or the same messages in the tokens of
//! another model.

use crate::Error;
use crate::change::{
    Append, AttentionTally, Change, ChunkSelection, DeleteReason, Extent, NewToken, PruneReason, Pruned,
    Score, TallyDelta, TokenRun,
};
use crate::store::{Access, Store};
use crate::timeline::Timeline;
use crate::token::{ChunkId, Position, Role, TokenFlags, TurnId};
use std::collections::BTreeMap;

/// One message of a copy.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnCopy {
    /// The turn.
    pub turn: TurnId,
    /// Who wrote the message.
    pub role: Role,
    /// When the turn began, in milliseconds since 1970.
    pub started_at: i64,
    /// The tokens, in order.
    pub tokens: Vec<TokenCopy>,
    /// Pin and tally of its chunks, in order of their indices.
    pub chunks: Vec<ChunkCopy>,
}

/// One token of a copy.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenCopy {
    /// The token as it is appended.
    pub token: NewToken,
    /// Whether it is pruned.
    pub pruned: bool,
    /// Whether it is deleted.
    pub deleted: bool,
}

/// Pin and tally of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkCopy {
    /// The index of the chunk in its turn.
    pub index: u32,
    /// Whether it is protected from pruning.
    pub pinned: bool,
    /// The attention that it has received.
    pub tally: AttentionTally,
}

impl TurnCopy {
    /// The message of a turn in its current state.
    ///
    /// # Panics
    /// When the body of one of its chunks is not loaded.
    #[must_use]
    pub fn from_timeline(timeline: &Timeline, turn: TurnId, role: Role, started_at: i64) -> Self {
        let (mut tokens, mut chunks) = (Vec::new(), Vec::new());
        for chunk in timeline.turn_chunks(turn).filter(|chunk| !chunk.is_empty()) {
            let (index, pinned, tally) = (chunk.id().index, chunk.is_pinned(), chunk.tally());
            chunks.push(ChunkCopy { index, pinned, tally });
            let chunk_tokens = chunk.run().positions().filter_map(|position| timeline.token(position));
            tokens.extend(chunk_tokens.map(|token| TokenCopy {
                token: NewToken {
                    id: token.id,
                    text: token.text.to_owned(),
                    chunk_index: index,
                    brightness: token.brightness,
                    kind: token.flags.kind(),
                },
                pruned: token.flags.contains(TokenFlags::PRUNED),
                deleted: token.flags.contains(TokenFlags::DELETED),
            }));
        }
        Self { turn, role, started_at, tokens, chunks }
    }

    /// The changes that append the message to `timeline`, in the same state.
    #[must_use]
    pub fn to_changes(&self, timeline: &Timeline) -> Vec<Change> {
        let at = timeline.next_position();
        let tokens = self.tokens.iter().map(|t| t.token.clone()).collect();
        let mut changes = vec![Change::Append(Append { at, turn: self.turn, role: self.role, tokens })];
        let (mut score, mut pruned, mut deleted) = (Score::default(), Vec::new(), Vec::new());
        let mut start = 0;
        for tokens in self.tokens.chunk_by(|a, b| a.token.chunk_index == b.token.chunk_index) {
            let index = tokens[0].token.chunk_index;
            let chunk = ChunkId::new(self.role, self.turn, index);
            let first = at.plus(start);
            start += tokens.len();
            let copy = self.chunks.iter().find(|c| c.index == index);
            if let Some(tally) = copy.map(|c| c.tally).filter(|t| *t != AttentionTally::default()) {
                score.tallies.push((chunk, TallyDelta::from_zero_to(tally)));
            }
            if copy.is_some_and(|c| c.pinned) {
                changes.push(Change::Pin { chunk, pinned: true });
            }
            let pruned_runs = runs_where(first, tokens, |t| t.pruned);
            if !pruned_runs.is_empty() {
                let extent = Extent::Runs(pruned_runs);
                pruned.push(Pruned { chunk, extent, reason: PruneReason::BeforeImport });
            }
            let deleted_runs = runs_where(first, tokens, |t| t.deleted);
            if !deleted_runs.is_empty() {
                deleted.push(ChunkSelection { chunk, extent: Extent::Runs(deleted_runs) });
            }
        }
        changes.extend((!score.tallies.is_empty()).then_some(Change::Score(score)));
        changes.extend((!pruned.is_empty()).then_some(Change::Prune(pruned)));
        if !deleted.is_empty() {
            changes.push(Change::Delete { chunks: deleted, reason: DeleteReason::default() });
        }
        changes
    }
}

/// Copies the messages of a conversation. `convert` gets each message and returns it as the copy should have
/// it; the copy ends at the first message for which it returns none.
///
/// # Errors
/// When the store or `convert` fails.
pub fn copy_turns(
    store: &mut impl Store,
    conversation: &str,
    access: Access,
    convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
) -> Result<Vec<TurnCopy>, Error> {
    let mut timeline = store.load(conversation, access)?;
    let times: BTreeMap<TurnId, i64> = store.turn_times(conversation)?.into_iter().collect();
    let (mut copies, mut started_at) = (Vec::new(), 0);
    for turn in timeline.turns().to_vec() {
        let chunks: Vec<ChunkId> = timeline.turn_chunks(turn.id).map(|chunk| chunk.id()).collect();
        store.load_bodies(conversation, &mut timeline, &chunks)?;
        // A turn without a recorded time gets the time of the turn before it.
        started_at = times.get(&turn.id).copied().unwrap_or(started_at);
        let original = TurnCopy::from_timeline(&timeline, turn.id, turn.role, started_at);
        let Some(copy) = convert(original)? else { break };
        copies.push(copy);
        timeline.unload_pruned();
    }
    Ok(copies)
}

/// The runs of tokens that satisfy `predicate`; the first token is at the position `start`.
#[must_use]
pub fn runs_where<T>(start: Position, tokens: &[T], predicate: impl Fn(&T) -> bool) -> Vec<TokenRun> {
    let mut runs: Vec<TokenRun> = Vec::new();
    for (i, _) in tokens.iter().enumerate().filter(|(_, t)| predicate(t)) {
        let at = start.plus(i);
        match runs.last_mut() {
            Some(run) if run.start.plus(run.len as usize) == at => run.len += 1,
            _ => runs.push(TokenRun { start: at, len: 1 }),
        }
    }
    runs
}
