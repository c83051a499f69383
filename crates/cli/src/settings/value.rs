//! The kinds of values that settings have: what is allowed, how each is read and how it is written.

use std::fmt;

/// What the user wrote, before anything is known of what it should be.
pub type Raw = toml::Value;

/// A value of a setting.
pub trait Value: Sized + Clone + PartialEq + fmt::Display {
    /// What may be written, in words.
    fn allowed() -> String;

    /// Reads what the user wrote; nothing where it is not allowed.
    fn read(raw: &Raw) -> Option<Self>;

    /// The words that may be written, for suggestions; empty where there are no fixed words.
    fn words() -> Vec<&'static str> {
        Vec::new()
    }

    /// For `--json`.
    fn json(&self) -> serde_json::Value {
        serde_json::Value::String(self.to_string())
    }
}

/// A whole number between two others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int<const MIN: i64, const MAX: i64>(pub i64);

impl<const MIN: i64, const MAX: i64> Int<MIN, MAX> {
    /// As a count; settings that count are never negative.
    pub fn count(self) -> usize {
        usize::try_from(self.0).unwrap_or(0)
    }
}

impl<const MIN: i64, const MAX: i64> Value for Int<MIN, MAX> {
    fn allowed() -> String {
        format!("a whole number from {MIN} to {MAX}")
    }

    fn read(raw: &Raw) -> Option<Self> {
        raw.as_integer().filter(|n| (MIN..=MAX).contains(n)).map(Int)
    }

    fn json(&self) -> serde_json::Value {
        self.0.into()
    }
}

impl<const MIN: i64, const MAX: i64> fmt::Display for Int<MIN, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A number between two others, which are whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Real<const MIN: i64, const MAX: i64>(pub f64);

impl<const MIN: i64, const MAX: i64> Value for Real<MIN, MAX> {
    fn allowed() -> String {
        format!("a number from {MIN} to {MAX}")
    }

    fn read(raw: &Raw) -> Option<Self> {
        let number = raw.as_float().or(raw.as_integer().map(|n| n as f64))?;
        (MIN as f64..=MAX as f64).contains(&number).then_some(Real(number))
    }

    fn json(&self) -> serde_json::Value {
        self.0.into()
    }
}

impl<const MIN: i64, const MAX: i64> fmt::Display for Real<MIN, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 != 0.0 && self.0.abs() < 1e-6 { write!(f, "{:e}", self.0) } else { self.0.fmt(f) }
    }
}

impl Value for bool {
    fn allowed() -> String {
        "true or false".into()
    }

    fn read(raw: &Raw) -> Option<Self> {
        raw.as_bool()
    }

    fn words() -> Vec<&'static str> {
        vec!["true", "false"]
    }

    fn json(&self) -> serde_json::Value {
        (*self).into()
    }
}

/// A name, or a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text(pub String);

impl Value for Text {
    fn allowed() -> String {
        "a name or a path".into()
    }

    fn read(raw: &Raw) -> Option<Self> {
        raw.as_str().filter(|text| !text.trim().is_empty()).map(|text| Self(text.to_owned()))
    }
}

impl Auto<Text> {
    /// What it is set to, if it is.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Auto::Auto => None,
            Auto::Set(text) => Some(&text.0),
        }
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Something that is told to nobody.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl Value for Secret {
    fn allowed() -> String {
        "at least 8 characters".into()
    }

    fn read(raw: &Raw) -> Option<Self> {
        raw.as_str().filter(|text| text.trim().len() >= 8).map(|text| Self(text.trim().to_owned()))
    }

    fn json(&self) -> serde_json::Value {
        self.to_string().into()
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("set, and not shown")
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret")
    }
}

/// Words, each of which means something: `a, b, c`, or a list of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List(pub Vec<String>);

impl Value for List {
    fn allowed() -> String {
        "words with commas between them, or a list of them".into()
    }

    fn read(raw: &Raw) -> Option<Self> {
        let words: Vec<String> = match raw {
            Raw::String(text) => text.split(',').map(|word| word.trim().to_owned()).collect(),
            Raw::Array(all) => {
                all.iter().map(|word| word.as_str().map(str::to_owned)).collect::<Option<_>>()?
            }
            _ => return None,
        };
        Some(Self(words.into_iter().filter(|word| !word.is_empty()).collect()))
    }

    fn json(&self) -> serde_json::Value {
        self.0.clone().into()
    }
}

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

/// A number of bytes, written with or without a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl Value for Bytes {
    fn allowed() -> String {
        "a size such as 512 MiB or 8 GiB (KiB, MiB, GiB, TiB, or bytes without a unit)".into()
    }

    fn read(raw: &Raw) -> Option<Self> {
        if let Some(bytes) = raw.as_integer() {
            return u64::try_from(bytes).ok().map(Bytes);
        }
        let text = raw.as_str()?.trim();
        let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
        let (_, unit) = UNITS.iter().find(|(name, _)| *name == unit.trim())?;
        number.parse::<u64>().ok()?.checked_mul(*unit).map(Bytes)
    }

    fn json(&self) -> serde_json::Value {
        self.0.into()
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, size)| self.0 >= *size && self.0.is_multiple_of(*size)) {
            Some((unit, size)) => write!(f, "{} {unit}", self.0 / size),
            None => self.0.fmt(f),
        }
    }
}

/// A value that may be left to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auto<T> {
    /// Left to the program.
    Auto,
    /// Set.
    Set(T),
}

impl<T: Value> Value for Auto<T> {
    fn allowed() -> String {
        format!("auto, or {}", T::allowed())
    }

    fn read(raw: &Raw) -> Option<Self> {
        if raw.as_str() == Some("auto") { Some(Auto::Auto) } else { T::read(raw).map(Auto::Set) }
    }

    fn words() -> Vec<&'static str> {
        [vec!["auto"], T::words()].concat()
    }

    fn json(&self) -> serde_json::Value {
        match self {
            Auto::Auto => "auto".into(),
            Auto::Set(value) => value.json(),
        }
    }
}

impl<T: fmt::Display> fmt::Display for Auto<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Auto::Auto => f.write_str("auto"),
            Auto::Set(value) => value.fmt(f),
        }
    }
}

/// Declares a setting that is one of several words.
macro_rules! choice {
    ($(#[doc = $doc:literal])* $name:ident { $($(#[doc = $vdoc:literal])* $variant:ident = $word:literal,)+ }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[doc = $vdoc])* $variant,)+ }

        impl Value for $name {
            fn allowed() -> String {
                let words = Self::words();
                let (last, rest) = words.split_last().expect("a choice has words");
                if rest.is_empty() { (*last).to_owned() } else { format!("{} or {last}", rest.join(", ")) }
            }

            fn read(raw: &Raw) -> Option<Self> {
                match raw.as_str()? {
                    $($word => Some(Self::$variant),)+
                    _ => None,
                }
            }

            fn words() -> Vec<&'static str> {
                vec![$($word),+]
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $word,)+ })
            }
        }
    };
}

choice! {
    /// A set of defaults.
    Preset {
        /// What measurement favours.
        Halo = "halo",
        /// The founding documents' values and rules, exactly.
        HaloWeave = "halo_weave",
        /// The first engine.
        HaloV0 = "halo_v0",
    }
}
choice! {
    /// How attention becomes brightness.
    Strategy {
        /// Magnitude voting.
        Magnitude = "magnitude",
        /// Time to live.
        Ttl = "ttl",
    }
}
choice! {
    /// Which slot is the attention sink.
    Sink {
        /// The first; it is not scored.
        First = "first",
        /// The largest, wherever it stands; all are scored.
        Max = "max",
    }
}
choice! {
    /// What makes a chunk bright.
    Rank {
        /// Its brightest token.
        Peak = "peak",
        /// The mean of its tokens.
        Mean = "mean",
        /// The mean of its four brightest tokens.
        Top4 = "top4",
        /// How often its tokens were voted for.
        Votes = "votes",
        /// The attention that it received.
        Sum = "sum",
        /// The attention that a token of it received at a step, on average.
        Share = "share",
    }
}
choice! {
    /// Who goes first among equals.
    Ties {
        /// The dimmer by its four brightest tokens, then by its mean, then the older.
        Dimmer = "dimmer",
        /// The older.
        Older = "older",
    }
}
choice! {
    /// How the heads of a layer are reduced to one row.
    Heads {
        /// Their mean.
        Mean = "mean",
        /// The largest.
        Max = "max",
    }
}
choice! {
    /// Which rows of the prompt's own attention are scored.
    ObservePrompt {
        /// The last of each batch.
        LastRow = "last_row",
        /// All.
        AllRows = "all_rows",
        /// None.
        Off = "off",
    }
}
choice! {
    /// How the chunks that leave are chosen.
    PrunePolicy {
        /// By brightness.
        Brightness = "brightness",
        /// The oldest first.
        Fifo = "fifo",
        /// The first and the latest stay.
        Window = "window",
        /// By lot.
        Random = "random",
    }
}
choice! {
    /// What a chunk that search brings back shines with.
    ReturnBrightness {
        /// What it left with.
        Earned = "earned",
        /// The mean of what is live.
        Mean = "mean",
        /// All there is.
        Full = "full",
    }
}
choice! {
    /// How the past is searched.
    RecallMode {
        /// By meaning and by words.
        Hybrid = "hybrid",
        /// By meaning.
        Dense = "dense",
        /// By words.
        Lexical = "lexical",
    }
}
choice! {
    /// Who holds premises against what was said.
    PremiseCheck {
        /// Nobody.
        Off = "off",
        /// Rules that go by words.
        Rules = "rules",
        /// The model.
        Model = "model",
    }
}
choice! {
    /// What happens to the KV cache when the window changes.
    KvMode {
        /// Cells are saved and put back.
        Keep = "keep",
        /// The window is read again.
        Reread = "reread",
    }
}

/// How the layers of a model are reduced to one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layers {
    /// Their mean.
    Mean,
    /// The last one.
    Last,
    /// The largest.
    Max,
    /// The mean of these.
    List(Vec<u32>),
}

impl Value for Layers {
    fn allowed() -> String {
        "mean, last, max, or a list of layers such as [0, 7, 29]".into()
    }

    fn read(raw: &Raw) -> Option<Self> {
        if let Some(list) = raw.as_array() {
            let number = |v: &Raw| v.as_integer().and_then(|n| u32::try_from(n).ok());
            let list: Option<Vec<u32>> = list.iter().map(number).collect();
            return list.filter(|l| !l.is_empty()).map(Layers::List);
        }
        match raw.as_str()? {
            "mean" => Some(Layers::Mean),
            "last" => Some(Layers::Last),
            "max" => Some(Layers::Max),
            _ => None,
        }
    }

    fn words() -> Vec<&'static str> {
        vec!["mean", "last", "max"]
    }

    fn json(&self) -> serde_json::Value {
        match self {
            Layers::List(list) => list.clone().into(),
            other => other.to_string().into(),
        }
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Layers::Mean => f.write_str("mean"),
            Layers::Last => f.write_str("last"),
            Layers::Max => f.write_str("max"),
            Layers::List(list) => write!(f, "{list:?}"),
        }
    }
}
