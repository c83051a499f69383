//! Reasons of changes, as the log writes them. The words are stored for ever: they stay when a variant in the core is
//! renamed.

use super::values::{LogBrightness, LogChunkExtent, LogChunkId, finite_or_none};
use halo_core::change::{
    Change, ChunkSelection, DeleteReason, Measure, PrunePairing, PruneReason, ResurrectReason,
};
use serde::{Deserialize, Serialize};

/// A deletion. The first releases wrote no reason, and a deletion by the user is still written without one.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum LogDeletion {
    ByUser(Vec<LogChunkExtent>),
    WithReason { chunks: Vec<LogChunkExtent>, reason: LogDeleteReason },
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LogDeleteReason {
    User,
    UserRegenerated,
    UserEdited,
    ClientRegenerated,
    ClientEdited,
    VariantChosen,
    NoAnswer,
    CallsRewritten,
    Forget,
    Undo,
}

impl LogDeletion {
    pub(super) fn new(chunks: &[ChunkSelection], reason: DeleteReason) -> Self {
        let chunks = LogChunkExtent::from_selections(chunks);
        match LogDeleteReason::from(reason) {
            LogDeleteReason::User => LogDeletion::ByUser(chunks),
            reason => LogDeletion::WithReason { chunks, reason },
        }
    }
}

impl From<LogDeletion> for Change {
    fn from(deletion: LogDeletion) -> Self {
        let (chunks, reason) = match deletion {
            LogDeletion::ByUser(chunks) => (chunks, DeleteReason::User),
            LogDeletion::WithReason { chunks, reason } => (chunks, reason.into()),
        };
        Change::Delete { chunks: chunks.into_iter().map(LogChunkExtent::into_selection).collect(), reason }
    }
}

impl From<DeleteReason> for LogDeleteReason {
    fn from(reason: DeleteReason) -> Self {
        match reason {
            DeleteReason::User => LogDeleteReason::User,
            DeleteReason::UserRegenerated => LogDeleteReason::UserRegenerated,
            DeleteReason::UserEdited => LogDeleteReason::UserEdited,
            DeleteReason::ClientRegenerated => LogDeleteReason::ClientRegenerated,
            DeleteReason::ClientEdited => LogDeleteReason::ClientEdited,
            DeleteReason::VariantChosen => LogDeleteReason::VariantChosen,
            DeleteReason::NoAnswer => LogDeleteReason::NoAnswer,
            DeleteReason::CallsRewritten => LogDeleteReason::CallsRewritten,
            DeleteReason::Forget => LogDeleteReason::Forget,
            DeleteReason::Undo => LogDeleteReason::Undo,
        }
    }
}

impl From<LogDeleteReason> for DeleteReason {
    fn from(reason: LogDeleteReason) -> Self {
        match reason {
            LogDeleteReason::User => DeleteReason::User,
            LogDeleteReason::UserRegenerated => DeleteReason::UserRegenerated,
            LogDeleteReason::UserEdited => DeleteReason::UserEdited,
            LogDeleteReason::ClientRegenerated => DeleteReason::ClientRegenerated,
            LogDeleteReason::ClientEdited => DeleteReason::ClientEdited,
            LogDeleteReason::VariantChosen => DeleteReason::VariantChosen,
            LogDeleteReason::NoAnswer => DeleteReason::NoAnswer,
            LogDeleteReason::CallsRewritten => DeleteReason::CallsRewritten,
            LogDeleteReason::Forget => DeleteReason::Forget,
            LogDeleteReason::Undo => DeleteReason::Undo,
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LogPruneReason {
    Ranked {
        order: u32,
        by: LogMeasure,
        value: Option<f64>,
        peak: LogBrightness,
        live: u64,
        budget: u64,
        pair: LogPair,
    },
    Culled {
        live: u64,
        target: u64,
    },
    Manual,
    ManualWith(LogChunkId),
    Client,
    Reasoning,
    #[serde(rename = "before")]
    BeforeImport,
    Undo,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LogPair {
    Alone,
    Takes(LogChunkId),
    With(LogChunkId),
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LogMeasure {
    Peak,
    Mean,
    Top4,
    Votes,
    Attention,
    Share,
    Age,
    #[serde(rename = "lot")]
    Random,
    Salience,
}

impl From<Measure> for LogMeasure {
    fn from(measure: Measure) -> Self {
        match measure {
            Measure::Peak => LogMeasure::Peak,
            Measure::Mean => LogMeasure::Mean,
            Measure::Top4 => LogMeasure::Top4,
            Measure::Votes => LogMeasure::Votes,
            Measure::Attention => LogMeasure::Attention,
            Measure::Share => LogMeasure::Share,
            Measure::Age => LogMeasure::Age,
            Measure::Random => LogMeasure::Random,
            Measure::Salience => LogMeasure::Salience,
        }
    }
}

impl From<LogMeasure> for Measure {
    fn from(measure: LogMeasure) -> Self {
        match measure {
            LogMeasure::Peak => Measure::Peak,
            LogMeasure::Mean => Measure::Mean,
            LogMeasure::Top4 => Measure::Top4,
            LogMeasure::Votes => Measure::Votes,
            LogMeasure::Attention => Measure::Attention,
            LogMeasure::Share => Measure::Share,
            LogMeasure::Age => Measure::Age,
            LogMeasure::Random => Measure::Random,
            LogMeasure::Salience => Measure::Salience,
        }
    }
}

impl From<PrunePairing> for LogPair {
    fn from(pairing: PrunePairing) -> Self {
        match pairing {
            PrunePairing::Alone => LogPair::Alone,
            PrunePairing::TookPartner(chunk) => LogPair::Takes(LogChunkId(chunk)),
            PrunePairing::WithPartner(chunk) => LogPair::With(LogChunkId(chunk)),
        }
    }
}

impl From<LogPair> for PrunePairing {
    fn from(pair: LogPair) -> Self {
        match pair {
            LogPair::Alone => PrunePairing::Alone,
            LogPair::Takes(chunk) => PrunePairing::TookPartner(chunk.0),
            LogPair::With(chunk) => PrunePairing::WithPartner(chunk.0),
        }
    }
}

impl From<&PruneReason> for LogPruneReason {
    fn from(reason: &PruneReason) -> Self {
        match *reason {
            PruneReason::Ranked { order, measure, value, peak, live, budget, pairing } => {
                LogPruneReason::Ranked {
                    order,
                    by: measure.into(),
                    value: finite_or_none(value),
                    peak: LogBrightness(peak),
                    live: live as u64,
                    budget: budget as u64,
                    pair: pairing.into(),
                }
            }
            PruneReason::Culled { live, target } => {
                LogPruneReason::Culled { live: live as u64, target: target as u64 }
            }
            PruneReason::Manual => LogPruneReason::Manual,
            PruneReason::ManualDependent(chunk) => LogPruneReason::ManualWith(LogChunkId(chunk)),
            PruneReason::Client => LogPruneReason::Client,
            PruneReason::Reasoning => LogPruneReason::Reasoning,
            PruneReason::BeforeImport => LogPruneReason::BeforeImport,
            PruneReason::Undo => LogPruneReason::Undo,
        }
    }
}

impl From<LogPruneReason> for PruneReason {
    fn from(reason: LogPruneReason) -> Self {
        match reason {
            LogPruneReason::Ranked { order, by, value, peak, live, budget, pair } => PruneReason::Ranked {
                order,
                measure: by.into(),
                value: value.unwrap_or(f64::INFINITY),
                peak: peak.0,
                live: live as usize,
                budget: budget as usize,
                pairing: pair.into(),
            },
            LogPruneReason::Culled { live, target } => {
                PruneReason::Culled { live: live as usize, target: target as usize }
            }
            LogPruneReason::Manual => PruneReason::Manual,
            LogPruneReason::ManualWith(chunk) => PruneReason::ManualDependent(chunk.0),
            LogPruneReason::Client => PruneReason::Client,
            LogPruneReason::Reasoning => PruneReason::Reasoning,
            LogPruneReason::BeforeImport => PruneReason::BeforeImport,
            LogPruneReason::Undo => PruneReason::Undo,
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LogResurrectReason {
    Found { rank: u32, score: Option<f64> },
    OpensTurnOf(LogChunkId),
    PairOf(LogChunkId),
    Manual,
    Merged,
    Undo,
}

impl From<&ResurrectReason> for LogResurrectReason {
    fn from(reason: &ResurrectReason) -> Self {
        match *reason {
            ResurrectReason::SearchHit { rank, score } => {
                LogResurrectReason::Found { rank, score: finite_or_none(score) }
            }
            ResurrectReason::OpensTurnOf(chunk) => LogResurrectReason::OpensTurnOf(LogChunkId(chunk)),
            ResurrectReason::PairOf(chunk) => LogResurrectReason::PairOf(LogChunkId(chunk)),
            ResurrectReason::Manual => LogResurrectReason::Manual,
            ResurrectReason::Merged => LogResurrectReason::Merged,
            ResurrectReason::Undo => LogResurrectReason::Undo,
        }
    }
}

impl From<LogResurrectReason> for ResurrectReason {
    fn from(reason: LogResurrectReason) -> Self {
        match reason {
            LogResurrectReason::Found { rank, score } => {
                ResurrectReason::SearchHit { rank, score: score.unwrap_or_default() }
            }
            LogResurrectReason::OpensTurnOf(chunk) => ResurrectReason::OpensTurnOf(chunk.0),
            LogResurrectReason::PairOf(chunk) => ResurrectReason::PairOf(chunk.0),
            LogResurrectReason::Manual => ResurrectReason::Manual,
            LogResurrectReason::Merged => ResurrectReason::Merged,
            LogResurrectReason::Undo => ResurrectReason::Undo,
        }
    }
}
