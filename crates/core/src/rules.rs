//! The rules by which the context of a conversation is scored, cut into chunks and pruned.

use crate::brightness::{RowMass, ScoringStrategy};
use crate::chunker::ChunkSize;
use crate::prune::{PrunePolicy, PruneRules};
use crate::timeline::Timeline;
use crate::token::{Position, TurnId};

/// The rules for the context of a conversation. The engine, replays and benches share them.
#[derive(Clone, Debug, PartialEq)]
pub struct ContextRules {
    /// How attention becomes brightness.
    pub strategy: ScoringStrategy,
    /// The size of chunks.
    pub chunks: ChunkSize,
    /// How the chunks to prune are chosen.
    pub policy: PrunePolicy,
    /// How many tokens the window may hold; 0 for no limit.
    pub max_tokens: usize,
    /// How many tokens at the beginning of the window are never pruned: attention sinks.
    pub sinks: usize,
    /// How many of the latest tokens are never pruned.
    pub recent: usize,
    /// Whether chunks chosen for pruning stay where the window has room for them; see [`PruneRules::fill`].
    pub fill: bool,
    /// The statistics of an attention row are recorded every so many steps; 0 for never.
    pub trace_interval: u64,
}

impl ContextRules {
    /// The rules of one pruning, down to `budget` tokens. `current` is the running turn.
    #[must_use]
    pub fn prune_rules(&self, budget: usize, current: Option<TurnId>) -> PruneRules {
        let Self { policy, sinks, recent, fill, .. } = *self;
        PruneRules { policy, budget, sinks, recent, fill, current }
    }

    /// Whether [`ttl`](crate::ttl) scoring may cull a token during an answer, behind a system prompt of `prefix`
    /// tokens. The running turn is not protected: otherwise an endless answer would exceed the window.
    #[must_use]
    pub fn may_cull(&self, timeline: &Timeline, prefix: usize, position: Position) -> bool {
        let sinks = self.sinks.saturating_sub(prefix) as u64;
        let recent = timeline.len().saturating_sub(self.recent) as u64;
        let chunk = timeline.chunk_of(position);
        let unprotected = chunk.is_some_and(|c| !c.is_pinned() && !timeline.is_system_prompt(c.id()));
        (sinks..recent).contains(&position.0) && unprotected
    }

    /// Whether attention rows must sum to 1 under these rules.
    pub(crate) fn rows_sum_to_one(&self) -> bool {
        !matches!(&self.strategy, ScoringStrategy::Magnitude(m) if m.row_mass == RowMass::Measured)
    }
}
