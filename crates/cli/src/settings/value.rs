//! The types of settings: allowed values, parsing and formatting.

use halo_core::attention::{LayerReduction, PromptRows};
use halo_core::brightness::{AttentionSink, ScoringKind};
use halo_core::prune::{PrunePolicyKind, RankBy, TieBreak};
use halo_engine::premise::PremiseMethod;
use halo_engine::rules::{ResurrectBrightness, ResurrectLimit};
use halo_llama::ffi::{AttentionSource, KvKeyType};
use halo_llama::kv_cache::KvCacheMode;
use halo_recall::rank::SearchMode;
use halo_worlds::agent_wrappers::SummaryMethod;
use std::fmt;
use strum::VariantNames;

/// A value as the user wrote it, before its type is checked.
pub type TomlValue = toml::Value;

pub trait SettingValue: Sized + Clone + PartialEq + fmt::Display {
    /// Allowed values, as a phrase.
    fn allowed() -> String;

    /// Parses a value; none if it is not allowed.
    fn from_toml(raw: &TomlValue) -> Option<Self>;

    /// Allowed words, for suggestions; empty if they are not fixed.
    fn choices() -> Vec<&'static str> {
        Vec::new()
    }

    /// The smallest and the largest number, where numbers are allowed.
    fn range() -> Option<NumberRange> {
        None
    }

    /// Whether the value must not be printed, not even in an error.
    fn is_secret() -> bool {
        false
    }

    /// The value for `--json` output.
    fn to_json(&self) -> serde_json::Value {
        serde_json::Value::String(self.to_string())
    }
}

/// The smallest and the largest number that a setting can have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NumberRange {
    pub min: f64,
    pub max: f64,
    /// Whether only whole numbers are allowed.
    pub whole: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntInRange<const MIN: i64, const MAX: i64>(pub i64);

impl<const MIN: i64, const MAX: i64> IntInRange<MIN, MAX> {
    /// The value as a count; such settings are never negative.
    pub fn as_usize(self) -> usize {
        usize::try_from(self.0).unwrap_or(0)
    }
}

impl<const MIN: i64, const MAX: i64> SettingValue for IntInRange<MIN, MAX> {
    fn allowed() -> String {
        format!("a whole number from {MIN} to {MAX}")
    }

    fn from_toml(raw: &TomlValue) -> Option<Self> {
        raw.as_integer().filter(|n| (MIN..=MAX).contains(n)).map(IntInRange)
    }

    fn range() -> Option<NumberRange> {
        Some(NumberRange { min: MIN as f64, max: MAX as f64, whole: true })
    }

    fn to_json(&self) -> serde_json::Value {
        self.0.into()
    }
}

impl<const MIN: i64, const MAX: i64> fmt::Display for IntInRange<MIN, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A number between two integers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FloatInRange<const MIN: i64, const MAX: i64>(pub f64);

impl<const MIN: i64, const MAX: i64> SettingValue for FloatInRange<MIN, MAX> {
    fn allowed() -> String {
        format!("a number from {MIN} to {MAX}")
    }

    fn from_toml(raw: &TomlValue) -> Option<Self> {
        let number = raw.as_float().or(raw.as_integer().map(|n| n as f64))?;
        (MIN as f64..=MAX as f64).contains(&number).then_some(FloatInRange(number))
    }

    fn range() -> Option<NumberRange> {
        Some(NumberRange { min: MIN as f64, max: MAX as f64, whole: false })
    }

    fn to_json(&self) -> serde_json::Value {
        self.0.into()
    }
}

impl<const MIN: i64, const MAX: i64> fmt::Display for FloatInRange<MIN, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 != 0.0 && self.0.abs() < 1e-6 { write!(f, "{:e}", self.0) } else { self.0.fmt(f) }
    }
}

impl SettingValue for bool {
    fn allowed() -> String {
        "true or false".into()
    }

    fn from_toml(raw: &TomlValue) -> Option<Self> {
        raw.as_bool()
    }

    fn choices() -> Vec<&'static str> {
        vec!["true", "false"]
    }

    fn to_json(&self) -> serde_json::Value {
        (*self).into()
    }
}

/// A name or a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextSetting(pub String);

impl SettingValue for TextSetting {
    fn allowed() -> String {
        "a name or a path".into()
    }

    fn from_toml(raw: &TomlValue) -> Option<Self> {
        raw.as_str().filter(|text| !text.trim().is_empty()).map(|text| Self(text.to_owned()))
    }
}

impl AutoOr<TextSetting> {
    #[must_use]
    pub fn as_text(&self) -> Option<&str> {
        match self {
            AutoOr::Auto => None,
            AutoOr::Value(text) => Some(&text.0),
        }
    }
}

impl AutoOr<ByteSize> {
    #[must_use]
    pub fn as_bytes(&self) -> Option<u64> {
        match self {
            AutoOr::Auto => None,
            AutoOr::Value(size) => Some(size.0),
        }
    }
}

impl fmt::Display for TextSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

const MIN_SECRET_LEN: usize = 16;

/// A value that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretSetting(pub String);

impl SettingValue for SecretSetting {
    fn allowed() -> String {
        format!("at least {MIN_SECRET_LEN} ASCII characters; `halo key` prints a random key")
    }

    fn from_toml(raw: &TomlValue) -> Option<Self> {
        // A header can hold no other characters.
        let is_usable = |text: &&str| {
            text.len() >= MIN_SECRET_LEN && text.chars().all(|c| c == ' ' || c.is_ascii_graphic())
        };
        raw.as_str().map(str::trim).filter(is_usable).map(|text| Self(text.to_owned()))
    }

    fn is_secret() -> bool {
        true
    }

    fn to_json(&self) -> serde_json::Value {
        self.to_string().into()
    }
}

impl fmt::Display for SecretSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("set (hidden)")
    }
}

impl fmt::Debug for SecretSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret")
    }
}

/// A list of words: `a, b, c`, or a TOML array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListSetting(pub Vec<String>);

impl SettingValue for ListSetting {
    fn allowed() -> String {
        "comma-separated words, or a list".into()
    }

    fn from_toml(raw: &TomlValue) -> Option<Self> {
        let words: Vec<String> = match raw {
            TomlValue::String(text) => text.split(',').map(|word| word.trim().to_owned()).collect(),
            TomlValue::Array(all) => {
                all.iter().map(|word| word.as_str().map(str::to_owned)).collect::<Option<_>>()?
            }
            _ => return None,
        };
        Some(Self(words.into_iter().filter(|word| !word.is_empty()).collect()))
    }

    fn to_json(&self) -> serde_json::Value {
        self.0.clone().into()
    }
}

impl fmt::Display for ListSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

const BYTE_UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl SettingValue for ByteSize {
    fn allowed() -> String {
        "a size such as 512 MiB or 8 GiB (KiB, MiB, GiB, TiB, or bytes without a unit)".into()
    }

    fn from_toml(raw: &TomlValue) -> Option<Self> {
        if let Some(bytes) = raw.as_integer() {
            return u64::try_from(bytes).ok().map(ByteSize);
        }
        let text = raw.as_str()?.trim();
        let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
        let (_, unit) = BYTE_UNITS.iter().find(|(name, _)| *name == unit.trim())?;
        number.parse::<u64>().ok()?.checked_mul(*unit).map(ByteSize)
    }

    fn to_json(&self) -> serde_json::Value {
        self.0.into()
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match BYTE_UNITS.iter().find(|(_, size)| self.0 >= *size && self.0.is_multiple_of(*size)) {
            Some((unit, size)) => write!(f, "{} {unit}", self.0 / size),
            None => self.0.fmt(f),
        }
    }
}

/// A value, or `auto`: the program chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoOr<T> {
    Auto,
    Value(T),
}

impl<T: SettingValue> SettingValue for AutoOr<T> {
    fn allowed() -> String {
        format!("auto, or {}", T::allowed())
    }

    fn from_toml(raw: &TomlValue) -> Option<Self> {
        if raw.as_str() == Some("auto") { Some(AutoOr::Auto) } else { T::from_toml(raw).map(AutoOr::Value) }
    }

    fn choices() -> Vec<&'static str> {
        [vec!["auto"], T::choices()].concat()
    }

    fn range() -> Option<NumberRange> {
        T::range()
    }

    fn is_secret() -> bool {
        T::is_secret()
    }

    fn to_json(&self) -> serde_json::Value {
        match self {
            AutoOr::Auto => "auto".into(),
            AutoOr::Value(value) => value.to_json(),
        }
    }
}

impl<T: fmt::Display> fmt::Display for AutoOr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AutoOr::Auto => f.write_str("auto"),
            AutoOr::Value(value) => value.fmt(f),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffOr<T> {
    Off,
    Value(T),
}

impl<T: Copy> OffOr<T> {
    pub fn as_option(self) -> Option<T> {
        match self {
            OffOr::Off => None,
            OffOr::Value(value) => Some(value),
        }
    }
}

impl<T: SettingValue> SettingValue for OffOr<T> {
    fn allowed() -> String {
        list_choices(&Self::choices())
    }

    fn from_toml(raw: &TomlValue) -> Option<Self> {
        if raw.as_str() == Some("off") { Some(OffOr::Off) } else { T::from_toml(raw).map(OffOr::Value) }
    }

    fn choices() -> Vec<&'static str> {
        [vec!["off"], T::choices()].concat()
    }
}

impl<T: fmt::Display> fmt::Display for OffOr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OffOr::Off => f.write_str("off"),
            OffOr::Value(value) => value.fmt(f),
        }
    }
}

/// `a, b or c`.
fn list_choices(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [rest @ .., last] => format!("{} or {last}", rest.join(", ")),
    }
}

/// Makes enums settings: the words are those of the enum's own `EnumString`, `Display` and `VariantNames`.
macro_rules! impl_setting_for_enums {
    ($($type:ty),+ $(,)?) => {
        $(impl SettingValue for $type {
            fn allowed() -> String {
                list_choices(<$type as VariantNames>::VARIANTS)
            }

            fn from_toml(raw: &TomlValue) -> Option<Self> {
                raw.as_str()?.parse().ok()
            }

            fn choices() -> Vec<&'static str> {
                <$type as VariantNames>::VARIANTS.to_vec()
            }
        })+
    };
}

impl_setting_for_enums!(
    AttentionChoice,
    AttentionSink,
    FetchModels,
    HeadReduction,
    KvCacheMode,
    KvKeyType,
    PremiseMethod,
    Preset,
    PromptRows,
    PrunePolicyKind,
    RankBy,
    ResurrectBrightness,
    ResurrectLimit,
    SummaryMethod,
    ScoringKind,
    SearchMode,
    TieBreak,
);

/// Where the attention of a local model comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum AttentionChoice {
    Auto,
    Softmax,
    Queries,
}

impl AttentionChoice {
    /// The source; none for `auto`.
    pub fn source(self) -> Option<AttentionSource> {
        match self {
            AttentionChoice::Auto => None,
            AttentionChoice::Softmax => Some(AttentionSource::Softmax),
            AttentionChoice::Queries => Some(AttentionSource::Queries),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Preset {
    /// Defaults tuned by measurement.
    Halo,
    /// The values and rules of the founding documents.
    HaloWeave,
    /// The first engine, v0.
    #[strum(serialize = "halo_v0")]
    HaloV0,
}

/// Whether missing default models are downloaded on first use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum FetchModels {
    /// After a question in a terminal.
    Ask,
    Always,
    Never,
}

/// How attention is reduced over the heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum HeadReduction {
    Mean,
    Max,
}

impl SettingValue for LayerReduction {
    fn allowed() -> String {
        "mean, last, max, or a list of layers such as [0, 7, 29]".into()
    }

    fn from_toml(raw: &TomlValue) -> Option<Self> {
        if let Some(list) = raw.as_array() {
            // A layer number has at most 32 bits.
            let layer =
                |v: &TomlValue| v.as_integer().and_then(|n| u32::try_from(n).ok()).map(|n| n as usize);
            let layers: Option<Vec<usize>> = list.iter().map(layer).collect();
            return layers.filter(|layers| !layers.is_empty()).map(LayerReduction::Selected);
        }
        match raw.as_str()? {
            "mean" => Some(LayerReduction::Mean),
            "last" => Some(LayerReduction::Last),
            "max" => Some(LayerReduction::Max),
            _ => None,
        }
    }

    fn choices() -> Vec<&'static str> {
        vec!["mean", "last", "max"]
    }

    fn to_json(&self) -> serde_json::Value {
        match self {
            LayerReduction::Selected(layers) => layers.clone().into(),
            other => other.to_string().into(),
        }
    }
}
