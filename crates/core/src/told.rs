//! A conversation told anew, message by message: up to some turn, as a branch of it; or in other tokens, for another
//! model.

use crate::change::{
    Append, Change, DeleteReason, Extent, Leave, NewToken, Part, Run, Score, Tally, TallyChange, WhyLeft,
};
use crate::seams::{Access, SeamError, Store};
use crate::timeline::Timeline;
use crate::token::{ChunkId, Flags, Position, Role, TurnId};
use std::collections::BTreeMap;

/// One message on its way.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// Which.
    pub turn: TurnId,
    /// Whose.
    pub role: Role,
    /// When it was said, in milliseconds since 1970.
    pub at: i64,
    /// What was said, in order.
    pub tokens: Vec<ToldToken>,
    /// What is known of its chunks, by their number.
    pub chunks: Vec<ToldChunk>,
}

/// One token on its way.
#[derive(Clone, Debug, PartialEq)]
pub struct ToldToken {
    /// The token.
    pub token: NewToken,
    /// Whether it has left the window.
    pub dead: bool,
    /// Whether the user took it back.
    pub withdrawn: bool,
}

/// What is known of a chunk beside its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToldChunk {
    /// Its number in the turn.
    pub sentence: u32,
    /// Whether it is immune to pruning.
    pub pinned: bool,
    /// What it has gathered.
    pub tally: Tally,
}

impl Told {
    /// A message as it stands.
    ///
    /// # Panics
    /// When the tokens of a chunk are away.
    #[must_use]
    pub fn of(timeline: &Timeline, turn: TurnId, role: Role, at: i64) -> Self {
        let (mut tokens, mut chunks) = (Vec::new(), Vec::new());
        for chunk in timeline.turn_chunks(turn).filter(|chunk| !chunk.is_empty()) {
            let (sentence, pinned, tally) = (chunk.id().sentence, chunk.is_pinned(), chunk.tally());
            chunks.push(ToldChunk { sentence, pinned, tally });
            let here = chunk.run().positions().filter_map(|position| timeline.token(position));
            tokens.extend(here.map(|token| ToldToken {
                token: NewToken {
                    id: token.id,
                    text: token.text.to_owned(),
                    sentence,
                    brightness: token.brightness,
                    voice: token.flags.voice(),
                },
                dead: token.flags.has(Flags::DEAD),
                withdrawn: token.flags.has(Flags::WITHDRAWN),
            }));
        }
        Self { turn, role, at, tokens, chunks }
    }

    /// What leads from a timeline to the same with one more message.
    #[must_use]
    pub fn changes(&self, timeline: &Timeline) -> Vec<Change> {
        let at = timeline.next_position();
        let tokens = self.tokens.iter().map(|t| t.token.clone()).collect();
        let mut changes = vec![Change::Append(Append { at, turn: self.turn, role: self.role, tokens })];
        let (mut score, mut leaves, mut gone) = (Score::default(), Vec::new(), Vec::new());
        let mut start = 0;
        for tokens in self.tokens.chunk_by(|a, b| a.token.sentence == b.token.sentence) {
            let sentence = tokens[0].token.sentence;
            let chunk = ChunkId::new(self.role, self.turn, sentence);
            let first = at.plus(start);
            start += tokens.len();
            let known = self.chunks.iter().find(|c| c.sentence == sentence);
            if let Some(Tally { votes, mass, looks }) =
                known.map(|c| c.tally).filter(|t| *t != Tally::default())
            {
                let [votes, mass, looks] = [votes, mass, looks].map(|n| i64::try_from(n).unwrap_or(i64::MAX));
                score.tallies.push((chunk, TallyChange { votes, mass, looks }));
            }
            if known.is_some_and(|c| c.pinned) {
                changes.push(Change::Pin { chunk, pinned: true });
            }
            let runs = |is: &dyn Fn(&ToldToken) -> bool| runs(first, tokens, is);
            let (dead, withdrawn) = (runs(&|t| t.dead), runs(&|t| t.withdrawn));
            if !dead.is_empty() {
                leaves.push(Leave { chunk, extent: Extent::Runs(dead), why: WhyLeft::Before });
            }
            if !withdrawn.is_empty() {
                gone.push(Part { chunk, extent: Extent::Runs(withdrawn) });
            }
        }
        changes.extend((!score.tallies.is_empty()).then_some(Change::Score(score)));
        changes.extend((!leaves.is_empty()).then_some(Change::Prune(leaves)));
        if !gone.is_empty() {
            changes.push(Change::Withdraw { parts: gone, reason: DeleteReason::default() });
        }
        changes
    }
}

/// The messages of a conversation, each as `tell` has it, up to the first that it has nothing for.
///
/// # Errors
/// When the store or `tell` fails.
pub fn all(
    store: &mut impl Store,
    conversation: &str,
    access: Access,
    tell: &mut dyn FnMut(Told) -> Result<Option<Told>, SeamError>,
) -> Result<Vec<Told>, SeamError> {
    let mut timeline = store.load(conversation, access)?;
    let times: BTreeMap<TurnId, i64> = store.times(conversation)?.into_iter().collect();
    let (mut told, mut at) = (Vec::new(), 0);
    for turn in timeline.turns().to_vec() {
        let chunks: Vec<ChunkId> = timeline.turn_chunks(turn.id).map(|chunk| chunk.id()).collect();
        store.bring(conversation, &mut timeline, &chunks)?;
        // A turn of unknown time was said after the one before it.
        at = times.get(&turn.id).copied().unwrap_or(at);
        let Some(one) = tell(Told::of(&timeline, turn.id, turn.role, at))? else { break };
        told.push(one);
        timeline.release_dead();
    }
    Ok(told)
}

/// The runs of neighbours, from a position on, of which something is true.
#[must_use]
pub fn runs<T>(start: Position, tokens: &[T], is: impl Fn(&T) -> bool) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (i, _) in tokens.iter().enumerate().filter(|(_, t)| is(t)) {
        let at = start.plus(i);
        match runs.last_mut() {
            Some(run) if run.start.plus(run.len as usize) == at => run.len += 1,
            _ => runs.push(Run { start: at, len: 1 }),
        }
    }
    runs
}
