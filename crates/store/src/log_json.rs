//! A change as one line of JSON: what the log and the exports are made of. The private twin of
//! [`Change`], and the only place that knows this form.
//!
//! Batches are taken apart: an entry is the list of what happened, in order.

use halo_core::change::{
    Append, AttentionTally, BrightnessRun, Change, ChunkSelection, DeleteReason, Extent, Measure, NewToken,
    PrunePairing, PruneReason, Pruned, ResurrectReason, Resurrected, Score, TallyDelta, TokenRun,
};
use halo_core::token::{Brightness, ChunkId, ContentKind, Position, Role, TokenId, TurnId};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A change, written down.
pub(crate) fn to_json(change: &Change) -> String {
    serde_json::to_string(&to_log_changes(change)).expect("it has only text keys and finite numbers")
}

/// A change, as part of a larger line.
pub(crate) fn to_log_changes(change: &Change) -> Vec<LogChange> {
    change.flatten().into_iter().map(LogChange::from).collect()
}

/// The change that was written down.
pub(crate) fn from_json(text: &str) -> Result<Change, serde_json::Error> {
    serde_json::from_str::<Vec<LogChange>>(text).map(from_log_changes)
}

/// The change that these lines speak of.
pub(crate) fn from_log_changes(lines: Vec<LogChange>) -> Change {
    let mut changes: Vec<Change> = lines.into_iter().map(Change::from).collect();
    if changes.len() == 1 { changes.remove(0) } else { Change::Batch(changes) }
}

/// One thing that happened.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LogChange {
    Append {
        at: u64,
        turn: u32,
        role: LogRole,
        parts: Vec<LogTokenRun>,
    },
    Score {
        runs: Vec<(u64, Vec<LogBrightness>)>,
        tallies: Vec<(LogChunkId, i64, i64, i64)>,
    },
    Prune(Vec<LogPruned>),
    Resurrect(Vec<LogResurrected>),
    Pin {
        chunk: LogChunkId,
        pinned: bool,
    },
    #[serde(rename = "withdraw")]
    Delete(LogDeletion),
    #[serde(rename = "restore")]
    Undelete(Vec<LogChunkExtent>),
    Merge {
        chunk: LogChunkId,
        frees_name: bool,
    },
    Split {
        chunk: LogChunkId,
        at: u64,
        #[serde(rename = "sentence")]
        chunk_index: u32,
        tally: (u64, u64, u64),
    },
}

/// Neighbouring tokens that share all but id and text.
#[derive(Serialize, Deserialize)]
pub(crate) struct LogTokenRun {
    #[serde(rename = "sentence")]
    chunk_index: u32,
    brightness: LogBrightness,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    tool: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    frame: bool,
    tokens: Vec<(u32, String)>,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct LogChunkExtent {
    chunk: LogChunkId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    runs: Option<Vec<(u64, u32)>>,
}

/// What was deleted. Logs of before say which chunks and nothing else; so does one that the user deleted.
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
    Forget,
    Undo,
}

const DELETE_REASONS: [(LogDeleteReason, DeleteReason); 9] = [
    (LogDeleteReason::User, DeleteReason::User),
    (LogDeleteReason::UserRegenerated, DeleteReason::UserRegenerated),
    (LogDeleteReason::UserEdited, DeleteReason::UserEdited),
    (LogDeleteReason::ClientRegenerated, DeleteReason::ClientRegenerated),
    (LogDeleteReason::ClientEdited, DeleteReason::ClientEdited),
    (LogDeleteReason::VariantChosen, DeleteReason::VariantChosen),
    (LogDeleteReason::NoAnswer, DeleteReason::NoAnswer),
    (LogDeleteReason::Forget, DeleteReason::Forget),
    (LogDeleteReason::Undo, DeleteReason::Undo),
];

fn log_deletion(parts: &[ChunkSelection], reason: DeleteReason) -> LogDeletion {
    let chunks = parts.iter().map(|p| to_log_extent(p.chunk, &p.extent)).collect();
    let name = DELETE_REASONS.iter().find(|(_, known)| *known == reason).map(|(name, _)| *name);
    match name {
        Some(reason) if !matches!(reason, LogDeleteReason::User) => {
            LogDeletion::WithReason { chunks, reason }
        }
        _ => LogDeletion::ByUser(chunks),
    }
}

impl From<LogDeletion> for Change {
    fn from(deleted: LogDeletion) -> Self {
        let (chunks, reason) = match deleted {
            LogDeletion::ByUser(chunks) => (chunks, DeleteReason::User),
            LogDeletion::WithReason { chunks, reason } => (chunks, DELETE_REASONS[reason as usize].1),
        };
        Change::Delete { chunks: chunks.into_iter().map(from_log_extent).collect(), reason }
    }
}

#[derive(Serialize, Deserialize)]
pub(crate) struct LogPruned {
    #[serde(flatten)]
    extent: LogChunkExtent,
    #[serde(rename = "why")]
    reason: LogPruneReason,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct LogResurrected {
    #[serde(flatten)]
    extent: LogChunkExtent,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    brightness: Option<LogBrightness>,
    #[serde(rename = "why")]
    reason: LogResurrectReason,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LogPruneReason {
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
    #[serde(rename = "before")]
    BeforeImport,
    Undo,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LogPair {
    Alone,
    Takes(LogChunkId),
    With(LogChunkId),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LogResurrectReason {
    Found { rank: u32, score: Option<f64> },
    OpensTurnOf(LogChunkId),
    PairOf(LogChunkId),
    Manual,
    Merged,
    Undo,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LogMeasure {
    Peak,
    Mean,
    Top4,
    Votes,
    Attention,
    Share,
    Age,
    #[serde(rename = "lot")]
    Random,
}

const MEASURES: [(LogMeasure, Measure); 8] = [
    (LogMeasure::Peak, Measure::Peak),
    (LogMeasure::Mean, Measure::Mean),
    (LogMeasure::Top4, Measure::Top4),
    (LogMeasure::Votes, Measure::Votes),
    (LogMeasure::Attention, Measure::Attention),
    (LogMeasure::Share, Measure::Share),
    (LogMeasure::Age, Measure::Age),
    (LogMeasure::Random, Measure::Random),
];

/// A chunk by its name, `u4.0`.
#[derive(Clone, Copy)]
pub(crate) struct LogChunkId(pub ChunkId);

impl Serialize for LogChunkId {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for LogChunkId {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'_, str>>::deserialize(from)?;
        text.parse().map(LogChunkId).map_err(D::Error::custom)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct LogRole(pub Role);

impl Serialize for LogRole {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.0.name())
    }
}

impl<'de> Deserialize<'de> for LogRole {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'_, str>>::deserialize(from)?;
        Role::from_name(&text).map(LogRole).ok_or_else(|| D::Error::custom(format!("'{text}' is no role")))
    }
}

/// A brightness: mostly a whole number, and then written as one.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct LogBrightness(pub Brightness);

impl Serialize for LogBrightness {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let value = f64::from(self.0.0);
        if value.fract() == 0.0 && value.abs() < 9e15 {
            to.serialize_i64(value as i64)
        } else {
            to.serialize_f64(value)
        }
    }
}

impl<'de> Deserialize<'de> for LogBrightness {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = f64::deserialize(from)? as f32;
        if value.is_finite() {
            Ok(LogBrightness(Brightness(value)))
        } else {
            Err(D::Error::custom("a brightness is too large"))
        }
    }
}

impl From<&Change> for LogChange {
    fn from(change: &Change) -> Self {
        match change {
            Change::Append(append) => LogChange::Append {
                at: append.at.0,
                turn: append.turn.0,
                role: LogRole(append.role),
                parts: append.tokens.chunk_by(same_run).map(to_token_run).collect(),
            },
            Change::Score(score) => LogChange::Score {
                runs: score
                    .runs
                    .iter()
                    .map(|r| (r.start.0, r.brightness.iter().map(|&b| LogBrightness(b)).collect()))
                    .collect(),
                tallies: score
                    .tallies
                    .iter()
                    .map(|&(c, t)| (LogChunkId(c), t.votes, t.mass, t.exposures))
                    .collect(),
            },
            Change::Prune(leaves) => {
                let left = |l: &Pruned| LogPruned {
                    extent: to_log_extent(l.chunk, &l.extent),
                    reason: (&l.reason).into(),
                };
                LogChange::Prune(leaves.iter().map(left).collect())
            }
            Change::Resurrect(returns) => {
                let back = |r: &Resurrected| LogResurrected {
                    extent: to_log_extent(r.chunk, &r.extent),
                    brightness: r.brightness.map(LogBrightness),
                    reason: (&r.reason).into(),
                };
                LogChange::Resurrect(returns.iter().map(back).collect())
            }
            Change::Pin { chunk, pinned } => LogChange::Pin { chunk: LogChunkId(*chunk), pinned: *pinned },
            Change::Delete { chunks: parts, reason } => LogChange::Delete(log_deletion(parts, *reason)),
            Change::Undelete(parts) => {
                LogChange::Undelete(parts.iter().map(|p| to_log_extent(p.chunk, &p.extent)).collect())
            }
            Change::Merge { chunk, frees_id: frees_name } => {
                LogChange::Merge { chunk: LogChunkId(*chunk), frees_name: *frees_name }
            }
            Change::Split { chunk, at, tail_index: sentence, tally } => LogChange::Split {
                chunk: LogChunkId(*chunk),
                at: at.0,
                chunk_index: *sentence,
                tally: (tally.votes, tally.mass, tally.exposures),
            },
            Change::Batch(_) => unreachable!("batches are taken apart before"),
        }
    }
}

impl From<LogChange> for Change {
    fn from(line: LogChange) -> Self {
        match line {
            LogChange::Append { at, turn, role, parts } => Change::Append(Append {
                at: Position(at),
                turn: TurnId(turn),
                role: role.0,
                tokens: parts.into_iter().flat_map(from_token_run).collect(),
            }),
            LogChange::Score { runs, tallies } => {
                let run = |(start, lights): (u64, Vec<LogBrightness>)| BrightnessRun {
                    start: Position(start),
                    brightness: lights.into_iter().map(|l| l.0).collect(),
                };
                let tally = |(c, votes, mass, looks): (LogChunkId, _, _, _)| {
                    (c.0, TallyDelta { votes, mass, exposures: looks })
                };
                Change::Score(Score {
                    runs: runs.into_iter().map(run).collect(),
                    tallies: tallies.into_iter().map(tally).collect(),
                })
            }
            LogChange::Prune(left) => {
                let leave = |l: LogPruned| Pruned {
                    chunk: l.extent.chunk.0,
                    extent: extent_from_runs(l.extent.runs),
                    reason: l.reason.into(),
                };
                Change::Prune(left.into_iter().map(leave).collect())
            }
            LogChange::Resurrect(back) => {
                let come = |b: LogResurrected| Resurrected {
                    chunk: b.extent.chunk.0,
                    extent: extent_from_runs(b.extent.runs),
                    brightness: b.brightness.map(|l| l.0),
                    reason: b.reason.into(),
                };
                Change::Resurrect(back.into_iter().map(come).collect())
            }
            LogChange::Pin { chunk, pinned } => Change::Pin { chunk: chunk.0, pinned },
            LogChange::Delete(deleted) => deleted.into(),
            LogChange::Undelete(pieces) => {
                Change::Undelete(pieces.into_iter().map(from_log_extent).collect())
            }
            LogChange::Merge { chunk, frees_name } => Change::Merge { chunk: chunk.0, frees_id: frees_name },
            LogChange::Split { chunk, at, chunk_index: sentence, tally: (votes, mass, looks) } => {
                Change::Split {
                    chunk: chunk.0,
                    at: Position(at),
                    tail_index: sentence,
                    tally: AttentionTally { votes, mass, exposures: looks },
                }
            }
        }
    }
}

fn same_run(a: &NewToken, b: &NewToken) -> bool {
    (a.chunk_index, a.kind) == (b.chunk_index, b.kind) && a.brightness.0.to_bits() == b.brightness.0.to_bits()
}

fn to_token_run(tokens: &[NewToken]) -> LogTokenRun {
    LogTokenRun {
        chunk_index: tokens[0].chunk_index,
        brightness: LogBrightness(tokens[0].brightness),
        tool: tokens[0].kind == ContentKind::ToolResult,
        frame: tokens[0].kind == ContentKind::Template,
        tokens: tokens.iter().map(|t| (t.id.0, t.text.clone())).collect(),
    }
}

fn from_token_run(said: LogTokenRun) -> impl Iterator<Item = NewToken> {
    let LogTokenRun { chunk_index: sentence, brightness, tool, frame, tokens } = said;
    let voice = match (tool, frame) {
        (true, _) => ContentKind::ToolResult,
        (false, true) => ContentKind::Template,
        (false, false) => ContentKind::Message,
    };
    tokens.into_iter().map(move |(id, text)| NewToken {
        id: TokenId(id),
        text,
        chunk_index: sentence,
        brightness: brightness.0,
        kind: voice,
    })
}

/// JSON knows no other numbers.
fn finite_or_none(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

fn to_log_extent(chunk: ChunkId, extent: &Extent) -> LogChunkExtent {
    let runs = match extent {
        Extent::Whole => None,
        Extent::Runs(runs) => Some(runs.iter().map(|r| (r.start.0, r.len)).collect()),
    };
    LogChunkExtent { chunk: LogChunkId(chunk), runs }
}

fn extent_from_runs(runs: Option<Vec<(u64, u32)>>) -> Extent {
    match runs {
        None => Extent::Whole,
        Some(runs) => Extent::Runs(
            runs.into_iter().map(|(start, len)| TokenRun { start: Position(start), len }).collect(),
        ),
    }
}

fn from_log_extent(piece: LogChunkExtent) -> ChunkSelection {
    ChunkSelection { chunk: piece.chunk.0, extent: extent_from_runs(piece.runs) }
}

impl From<&PruneReason> for LogPruneReason {
    fn from(why: &PruneReason) -> Self {
        match why {
            PruneReason::Ranked { order, measure: by, value, peak, live, budget, pairing: pair } => {
                LogPruneReason::Ranked {
                    order: *order,
                    by: MEASURES
                        .into_iter()
                        .find(|(_, m)| m == by)
                        .map_or(LogMeasure::Peak, |(name, _)| name),
                    value: finite_or_none(*value),
                    peak: LogBrightness(*peak),
                    live: *live as u64,
                    budget: *budget as u64,
                    pair: match pair {
                        PrunePairing::Alone => LogPair::Alone,
                        PrunePairing::TookPartner(chunk) => LogPair::Takes(LogChunkId(*chunk)),
                        PrunePairing::WithPartner(chunk) => LogPair::With(LogChunkId(*chunk)),
                    },
                }
            }
            PruneReason::Culled { live, target } => {
                LogPruneReason::Culled { live: *live as u64, target: *target as u64 }
            }
            PruneReason::Manual => LogPruneReason::Manual,
            PruneReason::ManualDependent(chunk) => LogPruneReason::ManualWith(LogChunkId(*chunk)),
            PruneReason::Client => LogPruneReason::Client,
            PruneReason::BeforeImport => LogPruneReason::BeforeImport,
            PruneReason::Undo => LogPruneReason::Undo,
        }
    }
}

impl From<LogPruneReason> for PruneReason {
    fn from(why: LogPruneReason) -> Self {
        match why {
            LogPruneReason::Ranked { order, by, value, peak, live, budget, pair } => PruneReason::Ranked {
                order,
                measure: MEASURES[by as usize].1,
                value: value.unwrap_or(f64::INFINITY),
                peak: peak.0,
                live: live as usize,
                budget: budget as usize,
                pairing: match pair {
                    LogPair::Alone => PrunePairing::Alone,
                    LogPair::Takes(chunk) => PrunePairing::TookPartner(chunk.0),
                    LogPair::With(chunk) => PrunePairing::WithPartner(chunk.0),
                },
            },
            LogPruneReason::Culled { live, target } => {
                PruneReason::Culled { live: live as usize, target: target as usize }
            }
            LogPruneReason::Manual => PruneReason::Manual,
            LogPruneReason::ManualWith(chunk) => PruneReason::ManualDependent(chunk.0),
            LogPruneReason::Client => PruneReason::Client,
            LogPruneReason::BeforeImport => PruneReason::BeforeImport,
            LogPruneReason::Undo => PruneReason::Undo,
        }
    }
}

impl From<&ResurrectReason> for LogResurrectReason {
    fn from(why: &ResurrectReason) -> Self {
        match why {
            ResurrectReason::SearchHit { rank, score } => {
                LogResurrectReason::Found { rank: *rank, score: finite_or_none(*score) }
            }
            ResurrectReason::OpensTurnOf(chunk) => LogResurrectReason::OpensTurnOf(LogChunkId(*chunk)),
            ResurrectReason::PairOf(chunk) => LogResurrectReason::PairOf(LogChunkId(*chunk)),
            ResurrectReason::Manual => LogResurrectReason::Manual,
            ResurrectReason::Merged => LogResurrectReason::Merged,
            ResurrectReason::Undo => LogResurrectReason::Undo,
        }
    }
}

impl From<LogResurrectReason> for ResurrectReason {
    fn from(why: LogResurrectReason) -> Self {
        match why {
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
