//! A change as one line of JSON: the content of the log and of exports. Only this module knows the format, and its words
//! never change, whatever the types of the core are called.
//!
//! Batches are flattened: an entry is the list of changes in order.

mod reasons;
mod values;

pub(crate) use values::LogChunkId;

use halo_core::change::{
    Append, AttentionTally, BrightnessRun, Change, NewToken, Pruned, Resurrected, Score, TallyDelta,
};
use halo_core::token::{ContentKind, Position, TokenId, TurnId};
use reasons::{LogDeletion, LogPruneReason, LogResurrectReason};
use serde::{Deserialize, Serialize};
use values::{LogBrightness, LogChunkExtent, LogRole};

pub(crate) fn to_json(change: &Change) -> String {
    serde_json::to_string(&to_log_changes(change))
        .expect("log changes have only text keys and finite numbers")
}

pub(crate) fn from_json(text: &str) -> Result<Change, serde_json::Error> {
    serde_json::from_str::<Vec<LogChange>>(text).map(from_log_changes)
}

pub(crate) fn to_log_changes(change: &Change) -> Vec<LogChange> {
    change.flatten().into_iter().map(LogChange::from).collect()
}

pub(crate) fn from_log_changes(log_changes: Vec<LogChange>) -> Change {
    let mut changes: Vec<Change> = log_changes.into_iter().map(Change::from).collect();
    if changes.len() == 1 { changes.remove(0) } else { Change::Batch(changes) }
}

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
        tail_index: u32,
        tally: (u64, u64, u64),
    },
}

/// Neighbouring tokens that differ only in id and text.
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

impl From<&Change> for LogChange {
    fn from(change: &Change) -> Self {
        match change {
            Change::Append(append) => LogChange::Append {
                at: append.at.0,
                turn: append.turn.0,
                role: LogRole(append.role),
                parts: append.tokens.chunk_by(same_run).map(LogTokenRun::new).collect(),
            },
            Change::Score(score) => score.into(),
            Change::Prune(pruned) => LogChange::Prune(pruned.iter().map(LogPruned::from).collect()),
            Change::Resurrect(resurrected) => {
                LogChange::Resurrect(resurrected.iter().map(LogResurrected::from).collect())
            }
            Change::Pin { chunk, pinned } => LogChange::Pin { chunk: LogChunkId(*chunk), pinned: *pinned },
            Change::Delete { chunks, reason } => LogChange::Delete(LogDeletion::new(chunks, *reason)),
            Change::Undelete(chunks) => LogChange::Undelete(LogChunkExtent::from_selections(chunks)),
            Change::Merge { chunk, frees_id } => {
                LogChange::Merge { chunk: LogChunkId(*chunk), frees_name: *frees_id }
            }
            Change::Split { chunk, at, tail_index, tally } => LogChange::Split {
                chunk: LogChunkId(*chunk),
                at: at.0,
                tail_index: *tail_index,
                tally: (tally.votes, tally.mass, tally.exposures),
            },
            Change::Batch(_) => unreachable!("batches are flattened before"),
        }
    }
}

impl From<LogChange> for Change {
    fn from(change: LogChange) -> Self {
        match change {
            LogChange::Append { at, turn, role, parts } => Change::Append(Append {
                at: Position(at),
                turn: TurnId(turn),
                role: role.0,
                tokens: parts.into_iter().flat_map(LogTokenRun::into_tokens).collect(),
            }),
            LogChange::Score { runs, tallies } => {
                let run = |(start, brightness): (u64, Vec<LogBrightness>)| BrightnessRun {
                    start: Position(start),
                    brightness: brightness.into_iter().map(|b| b.0).collect(),
                };
                let tally = |(chunk, votes, mass, exposures): (LogChunkId, _, _, _)| {
                    (chunk.0, TallyDelta { votes, mass, exposures })
                };
                Change::Score(Score {
                    runs: runs.into_iter().map(run).collect(),
                    tallies: tallies.into_iter().map(tally).collect(),
                })
            }
            LogChange::Prune(pruned) => Change::Prune(pruned.into_iter().map(Pruned::from).collect()),
            LogChange::Resurrect(resurrected) => {
                Change::Resurrect(resurrected.into_iter().map(Resurrected::from).collect())
            }
            LogChange::Pin { chunk, pinned } => Change::Pin { chunk: chunk.0, pinned },
            LogChange::Delete(deletion) => deletion.into(),
            LogChange::Undelete(chunks) => {
                Change::Undelete(chunks.into_iter().map(LogChunkExtent::into_selection).collect())
            }
            LogChange::Merge { chunk, frees_name } => Change::Merge { chunk: chunk.0, frees_id: frees_name },
            LogChange::Split { chunk, at, tail_index, tally: (votes, mass, exposures) } => Change::Split {
                chunk: chunk.0,
                at: Position(at),
                tail_index,
                tally: AttentionTally { votes, mass, exposures },
            },
        }
    }
}

impl From<&Score> for LogChange {
    fn from(score: &Score) -> Self {
        let run =
            |run: &BrightnessRun| (run.start.0, run.brightness.iter().map(|&b| LogBrightness(b)).collect());
        LogChange::Score {
            runs: score.runs.iter().map(run).collect(),
            tallies: score
                .tallies
                .iter()
                .map(|&(chunk, tally)| (LogChunkId(chunk), tally.votes, tally.mass, tally.exposures))
                .collect(),
        }
    }
}

impl From<&Pruned> for LogPruned {
    fn from(pruned: &Pruned) -> Self {
        Self { extent: LogChunkExtent::new(pruned.chunk, &pruned.extent), reason: (&pruned.reason).into() }
    }
}

impl From<LogPruned> for Pruned {
    fn from(pruned: LogPruned) -> Self {
        let selection = pruned.extent.into_selection();
        Self { chunk: selection.chunk, extent: selection.extent, reason: pruned.reason.into() }
    }
}

impl From<&Resurrected> for LogResurrected {
    fn from(resurrected: &Resurrected) -> Self {
        Self {
            extent: LogChunkExtent::new(resurrected.chunk, &resurrected.extent),
            brightness: resurrected.brightness.map(LogBrightness),
            reason: (&resurrected.reason).into(),
        }
    }
}

impl From<LogResurrected> for Resurrected {
    fn from(resurrected: LogResurrected) -> Self {
        let selection = resurrected.extent.into_selection();
        Self {
            chunk: selection.chunk,
            extent: selection.extent,
            brightness: resurrected.brightness.map(|b| b.0),
            reason: resurrected.reason.into(),
        }
    }
}

fn same_run(a: &NewToken, b: &NewToken) -> bool {
    (a.chunk_index, a.kind) == (b.chunk_index, b.kind) && a.brightness.0.to_bits() == b.brightness.0.to_bits()
}

impl LogTokenRun {
    /// Tokens of which all are [of the same run](same_run), at least one.
    fn new(tokens: &[NewToken]) -> Self {
        Self {
            chunk_index: tokens[0].chunk_index,
            brightness: LogBrightness(tokens[0].brightness),
            tool: tokens[0].kind == ContentKind::ToolResult,
            frame: tokens[0].kind == ContentKind::Template,
            tokens: tokens.iter().map(|t| (t.id.0, t.text.clone())).collect(),
        }
    }

    fn into_tokens(self) -> impl Iterator<Item = NewToken> {
        let Self { chunk_index, brightness, tool, frame, tokens } = self;
        let kind = match (tool, frame) {
            (true, _) => ContentKind::ToolResult,
            (false, true) => ContentKind::Template,
            (false, false) => ContentKind::Message,
        };
        tokens.into_iter().map(move |(id, text)| NewToken {
            id: TokenId(id),
            text,
            chunk_index,
            brightness: brightness.0,
            kind,
        })
    }
}

#[cfg(test)]
mod tests;
