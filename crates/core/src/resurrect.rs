//! Which dead chunks come back, with what, and why.
//!
//! A chunk is embedded together with the opening of its turn and the opening of the turn that it is paired
//! with, and it comes back with exactly those. Hits are taken greedily by score; one that does not fit is
//! passed over. Each chunk is charged once, however many hits need it.

use crate::change::{Change, Extent, Return, WhyReturned};
use crate::timeline::{ChunkRef, Timeline};
use crate::token::{Brightness, ChunkId, Role};
use std::collections::BTreeSet;

/// Something that search found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hit {
    /// The chunk.
    pub chunk: ChunkId,
    /// How well it matches; larger is better.
    pub score: f64,
}

impl Hit {
    /// The same, raised by `user_boost` if they are the user's own words.
    #[must_use]
    pub fn raised(self, user_boost: f64) -> Self {
        // What is no number matches nothing, and a boost must never push a poor match further down.
        let score = if self.score.is_nan() { f64::NEG_INFINITY } else { self.score };
        let raises = self.chunk.role == Role::User && score > 0.0;
        Self { score: if raises { score * user_boost } else { score }, ..self }
    }
}

/// What a chunk that search brings back shines with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReturnsWith {
    /// What it left with: no gifts.
    Earned,
    /// This much: the mean of what is live, or all there is.
    Fixed(Brightness),
}

/// What comes back, and what does not.
#[derive(Clone, Debug, PartialEq)]
pub struct ReturnPlan {
    /// In the order in which they were chosen, each behind what it brings along.
    pub returns: Vec<Return>,
    /// Hits that stay where they are.
    pub skipped: Vec<(ChunkId, Skipped)>,
    /// Tokens that come back.
    pub tokens: usize,
}

/// Why a hit does not come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skipped {
    /// It is live, or comes back already as part of another hit.
    Live,
    /// The user has taken it back.
    Withdrawn,
    /// No such chunk.
    Unknown,
    /// It and what comes with it need more than is left.
    TooLarge {
        /// Tokens needed.
        cost: usize,
        /// Tokens left.
        left: usize,
    },
}

impl ReturnPlan {
    /// The plan as a change; none where nothing comes back.
    #[must_use]
    pub fn change(&self) -> Option<Change> {
        (!self.returns.is_empty()).then(|| Change::Resurrect(self.returns.clone()))
    }
}

/// The chunks that a chunk is embedded and comes back with: first the opening of the turn that it is paired
/// with, then the opening of its own turn unless it is that itself.
#[must_use]
pub fn companions(timeline: &Timeline, chunk: ChunkId) -> Vec<(ChunkRef<'_>, WhyReturned)> {
    if chunk.role == Role::System {
        return Vec::new();
    }
    let pair = timeline.partner(chunk).map(|c| (c, WhyReturned::PairOf(chunk)));
    let own = (!chunk.is_anchor()).then(|| timeline.chunk(ChunkId { sentence: 0, ..chunk })).flatten();
    pair.into_iter().chain(own.map(|c| (c, WhyReturned::OpensTurnOf(chunk)))).collect()
}

/// The chunks whose text is embedded for `chunk`, in the order in which they are read, within `limit` tokens:
/// the target first of all, then the other turn's opening, then its own. The target is always there; if it
/// alone exceeds the limit the embedder cuts it.
#[must_use]
pub fn embedding_context(timeline: &Timeline, chunk: ChunkId, limit: usize) -> Vec<ChunkId> {
    let Some(target) = timeline.chunk(chunk) else { return Vec::new() };
    let mut used = target.len();
    let mut chosen = vec![target];
    for (companion, _) in companions(timeline, chunk) {
        if !companion.is_withdrawn() && used + companion.len() <= limit {
            used += companion.len();
            chosen.push(companion);
        }
    }
    chosen.sort_by_key(|c| c.start());
    chosen.into_iter().map(ChunkRef::id).collect()
}

/// Chooses among hits, the best first, what comes back within `budget` tokens.
#[must_use]
pub fn plan_returns(timeline: &Timeline, hits: &[Hit], budget: usize, with: ReturnsWith) -> ReturnPlan {
    let mut plan = ReturnPlan { returns: Vec::new(), skipped: Vec::new(), tokens: 0 };
    let mut chosen = BTreeSet::new();
    let brightness = match with {
        ReturnsWith::Earned => None,
        ReturnsWith::Fixed(brightness) => Some(brightness),
    };
    for (rank, hit) in hits.iter().enumerate() {
        let target = match timeline.chunk(hit.chunk) {
            None => Err(Skipped::Unknown),
            Some(c) if c.is_withdrawn() => Err(Skipped::Withdrawn),
            Some(c) if c.dead_len() == 0 || chosen.contains(&c.id()) => Err(Skipped::Live),
            Some(c) => Ok(c),
        };
        let target = match target {
            Ok(target) => target,
            Err(why) => {
                plan.skipped.push((hit.chunk, why));
                continue;
            }
        };
        let why = WhyReturned::Found { rank: rank as u32, score: hit.score };
        let group = returning(timeline, target, why, &chosen);
        let cost: usize = group.iter().map(|(c, _)| c.dead_len()).sum();
        let left = budget - plan.tokens;
        if cost > left {
            plan.skipped.push((hit.chunk, Skipped::TooLarge { cost, left }));
            continue;
        }
        plan.tokens += cost;
        for (chunk, why) in group {
            chosen.insert(chunk.id());
            plan.returns.push(Return { chunk: chunk.id(), extent: Extent::Whole, brightness, why });
        }
    }
    plan
}

/// What comes back when `target` does: its companions that are dead, then itself.
pub(crate) fn returning<'a>(
    timeline: &'a Timeline,
    target: ChunkRef<'a>,
    why: WhyReturned,
    already: &BTreeSet<ChunkId>,
) -> Vec<(ChunkRef<'a>, WhyReturned)> {
    let mut group = companions(timeline, target.id());
    group.push((target, why));
    group.retain(|(c, _)| c.dead_len() > 0 && !already.contains(&c.id()));
    group
}
