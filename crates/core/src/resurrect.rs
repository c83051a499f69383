//! Which pruned chunks are resurrected, with which brightness, and why.
//!
//! A chunk is embedded together with the first chunk of its turn and the first chunks of the turns that belong to
//! it: the question of an answer, the answer to a question, a tool call and its results. It is resurrected together
//! with these. Hits are taken greedily by score; a hit that does
//! not fit the budget is skipped. A chunk that several hits need is counted once.

use crate::change::{Change, Extent, ResurrectReason, Resurrected};
use crate::timeline::{ChunkRef, Timeline};
use crate::token::{Brightness, ChunkId, Role};
use std::collections::BTreeSet;

/// A search result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hit {
    /// The chunk.
    pub chunk: ChunkId,
    /// How well it matches the query; larger is better.
    pub score: f64,
}

impl Hit {
    /// The hit with its score multiplied by `user_boost` if the chunk is of a user message and the score is
    /// positive.
    #[must_use]
    pub fn boosted(self, user_boost: f64) -> Self {
        // NaN counts as no match. A negative score is not multiplied: that would lower it.
        let score = if self.score.is_nan() { f64::NEG_INFINITY } else { self.score };
        let is_boosted = self.chunk.role == Role::User && score > 0.0;
        Self { score: if is_boosted { score * user_boost } else { score }, ..self }
    }
}

/// The brightness of chunks that search resurrects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ResurrectedBrightness {
    /// The brightness that they were pruned with.
    Earned,
    /// This brightness for each token: the mean of the live tokens, or the maximum.
    Fixed(Brightness),
}

/// The chunks to resurrect, and the hits that are skipped.
#[derive(Clone, Debug, PartialEq)]
pub struct ResurrectPlan {
    /// The chunks, in the order in which they were chosen; each follows its companions.
    pub resurrected: Vec<Resurrected>,
    /// Hits that are not resurrected, with the reason.
    pub skipped: Vec<(ChunkId, ResurrectSkipReason)>,
    /// How many tokens become live.
    pub tokens: usize,
}

/// Why a hit is not resurrected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResurrectSkipReason {
    /// It is live, or is resurrected already as part of another hit.
    AlreadyLive,
    /// It is deleted.
    Deleted,
    /// No chunk with this id holds a token.
    UnknownChunk,
    /// The chunk and its companions exceed the rest of the budget.
    TooLarge {
        /// Tokens that they need.
        cost: usize,
        /// Tokens that are left of the budget.
        left: usize,
    },
}

impl ResurrectPlan {
    /// The plan as a change; none where no chunk is resurrected.
    #[must_use]
    pub fn change(&self) -> Option<Change> {
        (!self.resurrected.is_empty()).then(|| Change::Resurrect(self.resurrected.clone()))
    }
}

/// The chunks that a chunk is embedded and resurrected with: the first chunks of the turns that belong to it, then
/// the first chunk of its own turn unless it is that chunk. To a question belongs its first answer; to an answer,
/// its question; to a tool call, also its results, and to a result, its call.
#[must_use]
pub fn companions(timeline: &Timeline, chunk: ChunkId) -> Vec<(ChunkRef<'_>, ResurrectReason)> {
    let Some(turn) = timeline.turn_index(chunk.turn).filter(|_| chunk.role != Role::System) else {
        return Vec::new();
    };
    let exchange = timeline.exchange_of(turn);
    let step = exchange.step_of(turn).or_else(|| exchange.steps.first().map(Vec::as_slice));
    let others = exchange.question.into_iter().chain(step.into_iter().flatten().copied());
    let others = others.filter(|&other| other != turn).filter_map(|other| timeline.anchor_of(other));
    let first = (!chunk.is_anchor()).then(|| timeline.anchor_of(turn)).flatten();
    let others = others.map(|c| (c, ResurrectReason::PairOf(chunk)));
    others.chain(first.map(|c| (c, ResurrectReason::OpensTurnOf(chunk)))).collect()
}

/// The chunks whose text is embedded for `chunk`, in order of position, within `limit` tokens. The chunk itself
/// is always included, then its companions as far as they fit. If the chunk alone exceeds the limit, the
/// embedder truncates it.
#[must_use]
pub fn embedding_context(timeline: &Timeline, chunk: ChunkId, limit: usize) -> Vec<ChunkId> {
    let Some(target) = timeline.chunk(chunk) else { return Vec::new() };
    let mut used = target.len();
    let mut chosen = vec![target];
    for (companion, _) in companions(timeline, chunk) {
        if !companion.is_deleted() && used + companion.len() <= limit {
            used += companion.len();
            chosen.push(companion);
        }
    }
    chosen.sort_by_key(|c| c.start());
    chosen.into_iter().map(ChunkRef::id).collect()
}

/// Plans which chunks to resurrect within `budget` tokens. `hits` are ordered by score, the best first.
#[must_use]
pub fn plan_resurrection(
    timeline: &Timeline,
    hits: &[Hit],
    budget: usize,
    brightness: ResurrectedBrightness,
) -> ResurrectPlan {
    let mut plan = ResurrectPlan { resurrected: Vec::new(), skipped: Vec::new(), tokens: 0 };
    let mut chosen = BTreeSet::new();
    let brightness = match brightness {
        ResurrectedBrightness::Earned => None,
        ResurrectedBrightness::Fixed(brightness) => Some(brightness),
    };
    for (rank, hit) in hits.iter().enumerate() {
        let target = match find_pruned(timeline, hit.chunk, &chosen) {
            Ok(target) => target,
            Err(reason) => {
                plan.skipped.push((hit.chunk, reason));
                continue;
            }
        };
        let reason = ResurrectReason::SearchHit { rank: rank as u32, score: hit.score };
        let group = resurrection_group(timeline, target, reason, &chosen);
        let cost: usize = group.iter().map(|(c, _)| c.pruned_len()).sum();
        let left = budget - plan.tokens;
        if cost > left {
            plan.skipped.push((hit.chunk, ResurrectSkipReason::TooLarge { cost, left }));
            continue;
        }
        plan.tokens += cost;
        for (chunk, reason) in group {
            chosen.insert(chunk.id());
            let chunk = chunk.id();
            plan.resurrected.push(Resurrected { chunk, extent: Extent::Whole, brightness, reason });
        }
    }
    plan
}

/// The chunk of a hit, if it is pruned and not already `chosen`.
fn find_pruned<'a>(
    timeline: &'a Timeline,
    chunk: ChunkId,
    chosen: &BTreeSet<ChunkId>,
) -> Result<ChunkRef<'a>, ResurrectSkipReason> {
    match timeline.chunk(chunk) {
        None => Err(ResurrectSkipReason::UnknownChunk),
        Some(c) if c.is_deleted() => Err(ResurrectSkipReason::Deleted),
        Some(c) if c.pruned_len() == 0 || chosen.contains(&chunk) => Err(ResurrectSkipReason::AlreadyLive),
        Some(c) => Ok(c),
    }
}

/// The chunks that are resurrected with `target`: its companions, then itself; without those that are not
/// pruned or already `chosen`.
pub(crate) fn resurrection_group<'a>(
    timeline: &'a Timeline,
    target: ChunkRef<'a>,
    reason: ResurrectReason,
    chosen: &BTreeSet<ChunkId>,
) -> Vec<(ChunkRef<'a>, ResurrectReason)> {
    let mut group = companions(timeline, target.id());
    group.push((target, reason));
    group.retain(|(c, _)| c.pruned_len() > 0 && !chosen.contains(&c.id()));
    group
}
