//! Values that changes are made of, as the log writes them: chunk ids, roles, brightness, extents.

use halo_core::change::{ChunkSelection, Extent, TokenRun};
use halo_core::token::{Brightness, ChunkId, Position, Role};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

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
        Role::from_name(&text).map(LogRole).ok_or_else(|| D::Error::custom(format!("'{text}' is not a role")))
    }
}

/// A brightness. Most are whole numbers, and written without a fraction.
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

/// A chunk, and runs of its tokens unless all are meant.
#[derive(Serialize, Deserialize)]
pub(crate) struct LogChunkExtent {
    chunk: LogChunkId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    runs: Option<Vec<(u64, u32)>>,
}

impl LogChunkExtent {
    pub(super) fn new(chunk: ChunkId, extent: &Extent) -> Self {
        let runs = match extent {
            Extent::Whole => None,
            Extent::Runs(runs) => Some(runs.iter().map(|r| (r.start.0, r.len)).collect()),
        };
        Self { chunk: LogChunkId(chunk), runs }
    }

    pub(super) fn from_selections(selections: &[ChunkSelection]) -> Vec<Self> {
        selections.iter().map(|s| Self::new(s.chunk, &s.extent)).collect()
    }

    pub(super) fn into_selection(self) -> ChunkSelection {
        let run = |(start, len)| TokenRun { start: Position(start), len };
        let extent = match self.runs {
            None => Extent::Whole,
            Some(runs) => Extent::Runs(runs.into_iter().map(run).collect()),
        };
        ChunkSelection { chunk: self.chunk.0, extent }
    }
}

/// A number, or none where it is infinite or not a number: JSON cannot write those.
pub(super) fn finite_or_none(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}
