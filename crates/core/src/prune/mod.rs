//! Which chunks are pruned, and why.
//!
//! Planned before a message that does not fit, and at the end of a turn: the lowest-ranked chunk is pruned first,
//! until the window fits its budget. The first chunk of a turn is its anchor. The anchors of a tool call and of its
//! results are pruned only when they are all that is live of their turns, and then all of them are pruned. The anchor
//! of a question is pruned with that of its last live answer. So a chunk in the window always has the beginning of its
//! turn and the question that it answers with it, and no result is without its call.
//!
//! The system prompt, the attention sinks, the recent window, the running turn and its question, and pinned
//! chunks are never pruned. If they alone exceed the budget, the plan reports it.

mod planner;

use crate::change::{AttentionTally, Change, Extent, Measure, PrunePairing, PruneReason, Pruned};
use crate::context_window::ContextWindow;
use crate::timeline::ChunkRef;
use crate::token::TurnId;
use planner::{BrightnessStats, PrunePlanner};
use std::fmt;

/// How the chunks to prune are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::EnumDiscriminants)]
#[strum_discriminants(
    name(PrunePolicyKind),
    derive(strum::Display, strum::EnumString, strum::VariantNames),
    strum(serialize_all = "snake_case"),
    doc = "A [`PrunePolicy`] without its parameters."
)]
pub enum PrunePolicy {
    /// By the attention that they have received.
    Brightness {
        /// The value that chunks are ranked by.
        rank: RankBy,
        /// The order of chunks with the same value.
        ties: TieBreak,
    },
    /// The oldest first.
    Fifo,
    /// The oldest first, without regard to anchors: a sliding window with sinks, as StreamingLLM has.
    Window,
    /// At random; the same seed gives the same choice.
    Random {
        /// The seed.
        seed: u64,
    },
    /// By their text: recency, names of the user's messages, references to the user, structure. For models that
    /// report no attention.
    Salience,
}

/// The value that chunks are ranked by; the lowest is pruned first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum RankBy {
    /// Brightness of the brightest token.
    Peak,
    /// Mean brightness of the tokens.
    Mean,
    /// Mean brightness of the four brightest tokens.
    Top4,
    /// How often its tokens received attention above the threshold.
    Votes,
    /// Sum of the attention that its tokens received.
    Sum,
    /// Mean attention per token and step. A chunk without exposures ranks highest.
    Share,
}

impl PrunePolicy {
    /// The value that shows how bright chunks are; for a policy that does not rank by brightness, the peak.
    #[must_use]
    pub fn rank(self) -> RankBy {
        match self {
            PrunePolicy::Brightness { rank, .. } => rank,
            PrunePolicy::Fifo | PrunePolicy::Window | PrunePolicy::Random { .. } | PrunePolicy::Salience => {
                RankBy::Peak
            }
        }
    }

    /// The value that chunks are ranked by, as [`PruneReason`] records it.
    #[must_use]
    pub fn measure(self) -> Measure {
        match self {
            PrunePolicy::Fifo | PrunePolicy::Window => Measure::Age,
            PrunePolicy::Random { .. } => Measure::Random,
            PrunePolicy::Salience => Measure::Salience,
            PrunePolicy::Brightness { rank: RankBy::Peak, .. } => Measure::Peak,
            PrunePolicy::Brightness { rank: RankBy::Mean, .. } => Measure::Mean,
            PrunePolicy::Brightness { rank: RankBy::Top4, .. } => Measure::Top4,
            PrunePolicy::Brightness { rank: RankBy::Votes, .. } => Measure::Votes,
            PrunePolicy::Brightness { rank: RankBy::Sum, .. } => Measure::Attention,
            PrunePolicy::Brightness { rank: RankBy::Share, .. } => Measure::Share,
        }
    }
}

/// The order of chunks with the same value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum TieBreak {
    /// The one with the lower mean of its four brightest tokens first, then with the lower mean of all tokens,
    /// then the older.
    Dimmer,
    /// The older first.
    Older,
}

impl RankBy {
    /// The value of a chunk.
    #[must_use]
    pub fn value_of(self, chunk: ChunkRef<'_>) -> f64 {
        match self {
            RankBy::Peak => f64::from(chunk.peak().0),
            RankBy::Mean => BrightnessStats::of_chunk(chunk).mean,
            RankBy::Top4 => BrightnessStats::of_chunk(chunk).top4,
            RankBy::Votes => chunk.tally().votes as f64,
            RankBy::Sum => chunk.tally().mass as f64 / AttentionTally::MASS_UNIT,
            RankBy::Share => chunk.tally().share().unwrap_or(f64::INFINITY),
        }
    }
}

/// The rules of one pruning.
#[derive(Clone, Debug, PartialEq)]
pub struct PruneRules {
    /// How the chunks are chosen.
    pub policy: PrunePolicy,
    /// How many tokens the window may hold, including the prefix.
    pub budget: usize,
    /// How many tokens at the beginning of the window, including the prefix, are never pruned: attention sinks.
    pub sinks: usize,
    /// How many of the latest tokens are never pruned.
    pub recent: usize,
    /// Whether chosen chunks stay after all, the highest-ranked first, where the window has room for them: the
    /// last chunk chosen may have been long. Has no effect on policies by age, which would leave gaps.
    pub fill: bool,
    /// The running turn.
    pub current: Option<TurnId>,
}

/// The chunks to prune, and whether the window then fits its budget.
#[derive(Clone, Debug, PartialEq)]
pub struct PrunePlan {
    /// The chunks, in the order in which they were chosen.
    pub pruned: Vec<Pruned>,
    /// Tokens in the window before.
    pub before: usize,
    /// Tokens in the window after.
    pub after: usize,
    /// Set where the window exceeds its budget and no more chunk may be pruned.
    pub exceeded: Option<BudgetExceeded>,
}

/// The window exceeds its budget, and no more chunk may be pruned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetExceeded {
    /// By how many tokens.
    pub by: usize,
    /// Why the tokens of the window are not pruned, and how many for each reason. A chunk with several reasons
    /// counts for the first.
    pub kept_by: Vec<(KeepReason, usize)>,
}

/// Why a chunk is not pruned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeepReason {
    /// It is part of the system prompt, on the timeline or before it.
    SystemPrompt,
    /// It is at the beginning of the window, where the attention sinks are.
    Sink,
    /// It is pinned.
    Pinned,
    /// It is part of the running turn or of its question.
    CurrentTurn,
    /// It is among the latest tokens.
    Recent,
    /// It is the anchor of a chunk that is not pruned.
    Anchor,
}

impl fmt::Display for KeepReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeepReason::SystemPrompt => "system prompt",
            KeepReason::Sink => "first tokens",
            KeepReason::Pinned => "pinned",
            KeepReason::CurrentTurn => "running turn and its question",
            KeepReason::Recent => "recent window",
            KeepReason::Anchor => "anchors of these",
        })
    }
}

impl fmt::Display for BudgetExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept: Vec<_> = self.kept_by.iter().map(|(reason, tokens)| format!("{reason} {tokens}")).collect();
        write!(f, "over budget by {} tokens, and no more may be pruned: {}", self.by, kept.join(", "))
    }
}

impl PrunePlan {
    /// The plan as a change; none where no chunk is pruned.
    #[must_use]
    pub fn change(&self) -> Option<Change> {
        (!self.pruned.is_empty()).then(|| Change::Prune(self.pruned.clone()))
    }
}

/// Plans which chunks to prune so that the window fits its budget.
#[must_use]
pub fn plan_prune(window: ContextWindow<'_>, rules: &PruneRules) -> PrunePlan {
    let before = window.len();
    let mut planner = PrunePlanner::new(window, rules);
    let mut pruned: Vec<Pruned> = Vec::new();
    while planner.live > rules.budget {
        let Some(chunk) = planner.pop_candidate() else { break };
        let unit = planner.prune_unit(chunk);
        let live = planner.live;
        let pairing = unit.get(1).map_or(PrunePairing::Alone, |p| PrunePairing::TookPartner(p.id()));
        for (n, member) in unit.into_iter().enumerate() {
            let pairing = if n == 0 { pairing } else { PrunePairing::WithPartner(chunk.id()) };
            let reason = PruneReason::Ranked {
                order: pruned.len() as u32,
                measure: rules.policy.measure(),
                value: planner.candidate(member).value,
                peak: member.peak(),
                live,
                budget: rules.budget,
                pairing,
            };
            pruned.push(Pruned { chunk: member.id(), extent: Extent::Whole, reason });
            planner.mark_pruned(member);
        }
    }
    if rules.fill && !matches!(rules.policy, PrunePolicy::Fifo | PrunePolicy::Window) {
        planner.refill(&mut pruned);
    }
    let after = planner.live;
    let exceeded = (after > rules.budget)
        .then(|| BudgetExceeded { by: after - rules.budget, kept_by: planner.kept_tokens(window) });
    PrunePlan { pruned, before, after, exceeded }
}
