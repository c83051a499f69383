//! A change as one line of JSON: what the log and the exports are made of. The private twin of
//! [`Change`], and the only place that knows this form.
//!
//! Batches are taken apart: an entry is the list of what happened, in order.

use halo_core::change::{
    Append, Change, DeleteReason, Extent, Leave, Measure, NewToken, Pair, Part, Return, Run, Score, Scored,
    Tally, TallyChange, WhyLeft, WhyReturned,
};
use halo_core::token::{Brightness, ChunkId, Position, Role, TokenId, TurnId, Voice};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A change, written down.
pub(crate) fn write(change: &Change) -> String {
    serde_json::to_string(&lines(change)).expect("it has only text keys and finite numbers")
}

/// A change, as part of a larger line.
pub(crate) fn lines(change: &Change) -> Vec<Line> {
    change.parts().into_iter().map(Line::from).collect()
}

/// The change that was written down.
pub(crate) fn read(text: &str) -> Result<Change, serde_json::Error> {
    serde_json::from_str::<Vec<Line>>(text).map(change_of)
}

/// The change that these lines speak of.
pub(crate) fn change_of(lines: Vec<Line>) -> Change {
    let mut changes: Vec<Change> = lines.into_iter().map(Change::from).collect();
    if changes.len() == 1 { changes.remove(0) } else { Change::Batch(changes) }
}

/// One thing that happened.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Line {
    Append { at: u64, turn: u32, role: RoleName, parts: Vec<Said> },
    Score { runs: Vec<(u64, Vec<Light>)>, tallies: Vec<(Name, i64, i64, i64)> },
    Prune(Vec<Left>),
    Resurrect(Vec<Back>),
    Pin { chunk: Name, pinned: bool },
    Withdraw(Deleted),
    Restore(Vec<Piece>),
    Merge { chunk: Name, frees_name: bool },
    Split { chunk: Name, at: u64, sentence: u32, tally: (u64, u64, u64) },
}

/// Neighbouring tokens that share all but id and text.
#[derive(Serialize, Deserialize)]
pub(crate) struct Said {
    sentence: u32,
    brightness: Light,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    tool: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    frame: bool,
    tokens: Vec<(u32, String)>,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Piece {
    chunk: Name,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    runs: Option<Vec<(u64, u32)>>,
}

/// What was deleted. Logs of before say which chunks and nothing else; so does one that the user deleted.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Deleted {
    ByUser(Vec<Piece>),
    For { chunks: Vec<Piece>, reason: DeleteReasonName },
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DeleteReasonName {
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

const DELETE_REASONS: [(DeleteReasonName, DeleteReason); 9] = [
    (DeleteReasonName::User, DeleteReason::User),
    (DeleteReasonName::UserRegenerated, DeleteReason::UserRegenerated),
    (DeleteReasonName::UserEdited, DeleteReason::UserEdited),
    (DeleteReasonName::ClientRegenerated, DeleteReason::ClientRegenerated),
    (DeleteReasonName::ClientEdited, DeleteReason::ClientEdited),
    (DeleteReasonName::VariantChosen, DeleteReason::VariantChosen),
    (DeleteReasonName::NoAnswer, DeleteReason::NoAnswer),
    (DeleteReasonName::Forget, DeleteReason::Forget),
    (DeleteReasonName::Undo, DeleteReason::Undo),
];

fn deleted(parts: &[Part], reason: DeleteReason) -> Deleted {
    let chunks = parts.iter().map(|p| piece(p.chunk, &p.extent)).collect();
    let name = DELETE_REASONS.iter().find(|(_, known)| *known == reason).map(|(name, _)| *name);
    match name {
        Some(reason) if !matches!(reason, DeleteReasonName::User) => Deleted::For { chunks, reason },
        _ => Deleted::ByUser(chunks),
    }
}

impl From<Deleted> for Change {
    fn from(deleted: Deleted) -> Self {
        let (chunks, reason) = match deleted {
            Deleted::ByUser(chunks) => (chunks, DeleteReason::User),
            Deleted::For { chunks, reason } => (chunks, DELETE_REASONS[reason as usize].1),
        };
        Change::Withdraw { parts: chunks.into_iter().map(part).collect(), reason }
    }
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Left {
    #[serde(flatten)]
    piece: Piece,
    why: WhyLeftLine,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Back {
    #[serde(flatten)]
    piece: Piece,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    brightness: Option<Light>,
    why: WhyReturnedLine,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WhyLeftLine {
    Ranked {
        order: u32,
        by: MeasureName,
        value: Option<f64>,
        peak: Light,
        live: u64,
        budget: u64,
        pair: PairLine,
    },
    Culled {
        live: u64,
        target: u64,
    },
    Manual,
    ManualWith(Name),
    Client,
    Before,
    Undo,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum PairLine {
    Alone,
    Takes(Name),
    With(Name),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WhyReturnedLine {
    Found { rank: u32, score: Option<f64> },
    OpensTurnOf(Name),
    PairOf(Name),
    Manual,
    Merged,
    Undo,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum MeasureName {
    Peak,
    Mean,
    Top4,
    Votes,
    Attention,
    Share,
    Age,
    Lot,
}

const MEASURES: [(MeasureName, Measure); 8] = [
    (MeasureName::Peak, Measure::Peak),
    (MeasureName::Mean, Measure::Mean),
    (MeasureName::Top4, Measure::Top4),
    (MeasureName::Votes, Measure::Votes),
    (MeasureName::Attention, Measure::Attention),
    (MeasureName::Share, Measure::Share),
    (MeasureName::Age, Measure::Age),
    (MeasureName::Lot, Measure::Lot),
];

/// A chunk by its name, `u4.0`.
#[derive(Clone, Copy)]
pub(crate) struct Name(pub ChunkId);

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'_, str>>::deserialize(from)?;
        text.parse().map(Name).map_err(D::Error::custom)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct RoleName(pub Role);

impl Serialize for RoleName {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.0.name())
    }
}

impl<'de> Deserialize<'de> for RoleName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'_, str>>::deserialize(from)?;
        Role::from_name(&text).map(RoleName).ok_or_else(|| D::Error::custom(format!("'{text}' is no role")))
    }
}

/// A brightness: mostly a whole number, and then written as one.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Light(pub Brightness);

impl Serialize for Light {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let value = f64::from(self.0.0);
        if value.fract() == 0.0 && value.abs() < 9e15 {
            to.serialize_i64(value as i64)
        } else {
            to.serialize_f64(value)
        }
    }
}

impl<'de> Deserialize<'de> for Light {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = f64::deserialize(from)? as f32;
        if value.is_finite() {
            Ok(Light(Brightness(value)))
        } else {
            Err(D::Error::custom("a brightness is too large"))
        }
    }
}

impl From<&Change> for Line {
    fn from(change: &Change) -> Self {
        match change {
            Change::Append(append) => Line::Append {
                at: append.at.0,
                turn: append.turn.0,
                role: RoleName(append.role),
                parts: append.tokens.chunk_by(alike).map(said).collect(),
            },
            Change::Score(score) => Line::Score {
                runs: score
                    .runs
                    .iter()
                    .map(|r| (r.start.0, r.brightness.iter().map(|&b| Light(b)).collect()))
                    .collect(),
                tallies: score.tallies.iter().map(|&(c, t)| (Name(c), t.votes, t.mass, t.looks)).collect(),
            },
            Change::Prune(leaves) => {
                let left = |l: &Leave| Left { piece: piece(l.chunk, &l.extent), why: (&l.why).into() };
                Line::Prune(leaves.iter().map(left).collect())
            }
            Change::Resurrect(returns) => {
                let back = |r: &Return| Back {
                    piece: piece(r.chunk, &r.extent),
                    brightness: r.brightness.map(Light),
                    why: (&r.why).into(),
                };
                Line::Resurrect(returns.iter().map(back).collect())
            }
            Change::Pin { chunk, pinned } => Line::Pin { chunk: Name(*chunk), pinned: *pinned },
            Change::Withdraw { parts, reason } => Line::Withdraw(deleted(parts, *reason)),
            Change::Restore(parts) => {
                Line::Restore(parts.iter().map(|p| piece(p.chunk, &p.extent)).collect())
            }
            Change::Merge { chunk, frees_name } => {
                Line::Merge { chunk: Name(*chunk), frees_name: *frees_name }
            }
            Change::Split { chunk, at, sentence, tally } => Line::Split {
                chunk: Name(*chunk),
                at: at.0,
                sentence: *sentence,
                tally: (tally.votes, tally.mass, tally.looks),
            },
            Change::Batch(_) => unreachable!("batches are taken apart before"),
        }
    }
}

impl From<Line> for Change {
    fn from(line: Line) -> Self {
        match line {
            Line::Append { at, turn, role, parts } => Change::Append(Append {
                at: Position(at),
                turn: TurnId(turn),
                role: role.0,
                tokens: parts.into_iter().flat_map(tokens).collect(),
            }),
            Line::Score { runs, tallies } => {
                let run = |(start, lights): (u64, Vec<Light>)| Scored {
                    start: Position(start),
                    brightness: lights.into_iter().map(|l| l.0).collect(),
                };
                let tally =
                    |(c, votes, mass, looks): (Name, _, _, _)| (c.0, TallyChange { votes, mass, looks });
                Change::Score(Score {
                    runs: runs.into_iter().map(run).collect(),
                    tallies: tallies.into_iter().map(tally).collect(),
                })
            }
            Line::Prune(left) => {
                let leave = |l: Left| Leave {
                    chunk: l.piece.chunk.0,
                    extent: extent(l.piece.runs),
                    why: l.why.into(),
                };
                Change::Prune(left.into_iter().map(leave).collect())
            }
            Line::Resurrect(back) => {
                let come = |b: Back| Return {
                    chunk: b.piece.chunk.0,
                    extent: extent(b.piece.runs),
                    brightness: b.brightness.map(|l| l.0),
                    why: b.why.into(),
                };
                Change::Resurrect(back.into_iter().map(come).collect())
            }
            Line::Pin { chunk, pinned } => Change::Pin { chunk: chunk.0, pinned },
            Line::Withdraw(deleted) => deleted.into(),
            Line::Restore(pieces) => Change::Restore(pieces.into_iter().map(part).collect()),
            Line::Merge { chunk, frees_name } => Change::Merge { chunk: chunk.0, frees_name },
            Line::Split { chunk, at, sentence, tally: (votes, mass, looks) } => Change::Split {
                chunk: chunk.0,
                at: Position(at),
                sentence,
                tally: Tally { votes, mass, looks },
            },
        }
    }
}

fn alike(a: &NewToken, b: &NewToken) -> bool {
    (a.sentence, a.voice) == (b.sentence, b.voice) && a.brightness.0.to_bits() == b.brightness.0.to_bits()
}

fn said(tokens: &[NewToken]) -> Said {
    Said {
        sentence: tokens[0].sentence,
        brightness: Light(tokens[0].brightness),
        tool: tokens[0].voice == Voice::Tool,
        frame: tokens[0].voice == Voice::Frame,
        tokens: tokens.iter().map(|t| (t.id.0, t.text.clone())).collect(),
    }
}

fn tokens(said: Said) -> impl Iterator<Item = NewToken> {
    let Said { sentence, brightness, tool, frame, tokens } = said;
    let voice = match (tool, frame) {
        (true, _) => Voice::Tool,
        (false, true) => Voice::Frame,
        (false, false) => Voice::Speaker,
    };
    tokens.into_iter().map(move |(id, text)| NewToken {
        id: TokenId(id),
        text,
        sentence,
        brightness: brightness.0,
        voice,
    })
}

/// JSON knows no other numbers.
fn finite(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

fn piece(chunk: ChunkId, extent: &Extent) -> Piece {
    let runs = match extent {
        Extent::Whole => None,
        Extent::Runs(runs) => Some(runs.iter().map(|r| (r.start.0, r.len)).collect()),
    };
    Piece { chunk: Name(chunk), runs }
}

fn extent(runs: Option<Vec<(u64, u32)>>) -> Extent {
    match runs {
        None => Extent::Whole,
        Some(runs) => {
            Extent::Runs(runs.into_iter().map(|(start, len)| Run { start: Position(start), len }).collect())
        }
    }
}

fn part(piece: Piece) -> Part {
    Part { chunk: piece.chunk.0, extent: extent(piece.runs) }
}

impl From<&WhyLeft> for WhyLeftLine {
    fn from(why: &WhyLeft) -> Self {
        match why {
            WhyLeft::Ranked { order, by, value, peak, live, budget, pair } => WhyLeftLine::Ranked {
                order: *order,
                by: MEASURES.into_iter().find(|(_, m)| m == by).map_or(MeasureName::Peak, |(name, _)| name),
                value: finite(*value),
                peak: Light(*peak),
                live: *live as u64,
                budget: *budget as u64,
                pair: match pair {
                    Pair::Alone => PairLine::Alone,
                    Pair::Takes(chunk) => PairLine::Takes(Name(*chunk)),
                    Pair::With(chunk) => PairLine::With(Name(*chunk)),
                },
            },
            WhyLeft::Culled { live, target } => {
                WhyLeftLine::Culled { live: *live as u64, target: *target as u64 }
            }
            WhyLeft::Manual => WhyLeftLine::Manual,
            WhyLeft::ManualWith(chunk) => WhyLeftLine::ManualWith(Name(*chunk)),
            WhyLeft::Client => WhyLeftLine::Client,
            WhyLeft::Before => WhyLeftLine::Before,
            WhyLeft::Undo => WhyLeftLine::Undo,
        }
    }
}

impl From<WhyLeftLine> for WhyLeft {
    fn from(why: WhyLeftLine) -> Self {
        match why {
            WhyLeftLine::Ranked { order, by, value, peak, live, budget, pair } => WhyLeft::Ranked {
                order,
                by: MEASURES[by as usize].1,
                value: value.unwrap_or(f64::INFINITY),
                peak: peak.0,
                live: live as usize,
                budget: budget as usize,
                pair: match pair {
                    PairLine::Alone => Pair::Alone,
                    PairLine::Takes(chunk) => Pair::Takes(chunk.0),
                    PairLine::With(chunk) => Pair::With(chunk.0),
                },
            },
            WhyLeftLine::Culled { live, target } => {
                WhyLeft::Culled { live: live as usize, target: target as usize }
            }
            WhyLeftLine::Manual => WhyLeft::Manual,
            WhyLeftLine::ManualWith(chunk) => WhyLeft::ManualWith(chunk.0),
            WhyLeftLine::Client => WhyLeft::Client,
            WhyLeftLine::Before => WhyLeft::Before,
            WhyLeftLine::Undo => WhyLeft::Undo,
        }
    }
}

impl From<&WhyReturned> for WhyReturnedLine {
    fn from(why: &WhyReturned) -> Self {
        match why {
            WhyReturned::Found { rank, score } => {
                WhyReturnedLine::Found { rank: *rank, score: finite(*score) }
            }
            WhyReturned::OpensTurnOf(chunk) => WhyReturnedLine::OpensTurnOf(Name(*chunk)),
            WhyReturned::PairOf(chunk) => WhyReturnedLine::PairOf(Name(*chunk)),
            WhyReturned::Manual => WhyReturnedLine::Manual,
            WhyReturned::Merged => WhyReturnedLine::Merged,
            WhyReturned::Undo => WhyReturnedLine::Undo,
        }
    }
}

impl From<WhyReturnedLine> for WhyReturned {
    fn from(why: WhyReturnedLine) -> Self {
        match why {
            WhyReturnedLine::Found { rank, score } => {
                WhyReturned::Found { rank, score: score.unwrap_or_default() }
            }
            WhyReturnedLine::OpensTurnOf(chunk) => WhyReturned::OpensTurnOf(chunk.0),
            WhyReturnedLine::PairOf(chunk) => WhyReturned::PairOf(chunk.0),
            WhyReturnedLine::Manual => WhyReturned::Manual,
            WhyReturnedLine::Merged => WhyReturned::Merged,
            WhyReturnedLine::Undo => WhyReturned::Undo,
        }
    }
}
