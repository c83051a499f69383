//! Where settings come from: defaults, a preset, a file, the environment, the command line. Later ones win.

use super::value::{Preset, Raw};
use super::{KEYS, Key, Settings, preset};
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::path::{Path, PathBuf};

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// A capture that recorded it.
    Capture,
    /// The preset of that name.
    Preset(Preset),
    /// A file, and the line in it.
    File(PathBuf, usize),
    /// An environment variable.
    Environment(String),
    /// The command line.
    CommandLine(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::Capture => f.write_str("recorded in the capture"),
            Origin::Preset(preset) => write!(f, "preset {preset}"),
            Origin::File(path, line) => write!(f, "{}:{line}", path.display()),
            Origin::Environment(name) => write!(f, "environment {name}"),
            Origin::CommandLine(flag) => f.write_str(flag),
        }
    }
}

/// What the user wrote for one key, not yet read.
#[derive(Clone, Debug)]
struct Written {
    key: String,
    text: String,
    origin: Origin,
}

/// The settings in force, and where each came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The settings.
    pub settings: Settings,
    /// By key; what is not here is a default.
    origins: BTreeMap<&'static str, Origin>,
    /// Recorded settings that were left out, and why.
    pub notes: Vec<String>,
}

impl Loaded {
    /// Where a key's value came from.
    #[must_use]
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.get(key).cloned().unwrap_or(Origin::Default)
    }
}

/// What is wrong with what the user wrote: all of it, a line each.
#[derive(Debug, PartialEq, Eq)]
pub struct BadSettings(pub Vec<String>);

impl fmt::Display for BadSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for BadSettings {}

/// What settings are made from.
#[derive(Debug, Default)]
pub struct Sources {
    /// What a capture recorded, keys and values: it stands in for the defaults.
    pub recorded: Vec<(String, String)>,
    /// The file, and what stands in it.
    pub file: Option<(PathBuf, String)>,
    /// The environment, names and values.
    pub environment: Vec<(String, String)>,
    /// `--set KEY=VALUE`, in order.
    pub sets: Vec<String>,
    /// Other flags that set a key: the flag, the key, the value.
    pub flags: Vec<(&'static str, &'static str, String)>,
}

/// Reads the settings from all their sources.
///
/// # Errors
/// When a key is unknown, a value not allowed, or two contradict each other.
pub fn load(sources: &Sources) -> Result<Loaded, BadSettings> {
    let mut errors = Vec::new();
    let mut written = Vec::new();
    if let Some((path, text)) = &sources.file {
        match from_file(path, text) {
            Ok(all) => written.extend(all),
            Err(error) => errors.push(error),
        }
    }
    written.extend(from_environment(&sources.environment));
    for set in &sources.sets {
        match set.split_once('=') {
            Some((key, text)) => written.push(Written {
                key: key.trim().to_owned(),
                text: text.trim().to_owned(),
                origin: Origin::CommandLine("--set"),
            }),
            None => {
                errors.push(format!("--set {set}: write KEY=VALUE, such as --set context.max_tokens=4000"));
            }
        }
    }
    for (flag, key, text) in &sources.flags {
        written.push(Written {
            key: (*key).to_owned(),
            text: text.clone(),
            origin: Origin::CommandLine(flag),
        });
    }
    let mut loaded = Loaded { settings: Settings::default(), origins: BTreeMap::new(), notes: Vec::new() };
    let recorded = sources.recorded.iter().map(|(key, text)| Written {
        key: key.clone(),
        text: text.clone(),
        origin: Origin::Capture,
    });
    let mut odd = Vec::new();
    apply_all(&mut loaded, recorded.collect(), &mut odd);
    // Another version may have had other settings: what is not known here is said, and no error.
    loaded.notes = odd.into_iter().map(|why| format!("{why}; it is left out")).collect();
    apply_all(&mut loaded, written, &mut errors);
    if errors.is_empty() {
        let of = |key: &str| {
            let (value, _) = loaded.settings.get(key).unwrap_or_default();
            format!("{key} ({value}, {})", loaded.origin(key))
        };
        errors.extend(loaded.settings.contradiction(of));
    }
    if errors.is_empty() { Ok(loaded) } else { Err(BadSettings(errors)) }
}

/// Reads a group of values, the preset first: what stands beside it still counts.
fn apply_all(loaded: &mut Loaded, written: Vec<Written>, errors: &mut Vec<String>) {
    let (presets, others): (Vec<_>, Vec<_>) = written.into_iter().partition(|w| w.key == "preset");
    for set in &presets {
        apply(loaded, set, errors);
    }
    if !presets.is_empty() {
        let chosen = loaded.settings.preset;
        for (key, text) in preset(chosen) {
            apply(loaded, &Written { key: key.into(), text, origin: Origin::Preset(chosen) }, errors);
        }
    }
    for set in &others {
        apply(loaded, set, errors);
    }
}

/// Reads one value into the settings, or says what is wrong with it.
fn apply(loaded: &mut Loaded, written: &Written, errors: &mut Vec<String>) {
    let Written { key, text, origin } = written;
    let Some(known) = KEYS.iter().find(|k| k.name == key) else {
        errors.push(format!("{origin}: there is no setting '{}'{}", brief(key), nearest_key(key)));
        return;
    };
    if loaded.settings.set(known.name, &raw(text)) {
        loaded.origins.insert(known.name, origin.clone());
    } else {
        errors.push(format!("{origin}: {key} cannot be '{}': {}", brief(text), explain(known, text)));
    }
}

/// The beginning of what the user wrote: enough to find it again.
fn brief(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn explain(key: &Key, text: &str) -> String {
    let mut out = format!("it must be {}", (key.allowed)());
    let near = nearest(text.trim_matches('"'), (key.words)().into_iter());
    if let Some(word) = near {
        let _ = write!(out, "; did you mean {word}?");
    }
    out
}

fn nearest_key(key: &str) -> String {
    let lower: String = key.chars().take(80).collect::<String>().to_lowercase().replace('-', "_");
    let section = format!("{lower}.");
    let inside: Vec<_> = KEYS.iter().map(|k| k.name).filter(|name| name.starts_with(&section)).collect();
    if !inside.is_empty() {
        return format!(": it is a section, with {}", inside.join(", "));
    }
    match nearest(&lower, KEYS.iter().map(|k| k.name)) {
        Some(name) => format!("; did you mean {name}?"),
        None => ": 'halo config reference' lists all".into(),
    }
}

/// The most similar of some words, if it is similar at all.
pub fn nearest<'a>(text: &str, words: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // The last part of a dotted name counts too: people remember `top_p`, not where it lives.
    let likeness = |word: &str| {
        let last = word.rsplit('.').next().unwrap_or(word);
        let text_last = text.rsplit('.').next().unwrap_or(text);
        let whole = strsim::normalized_damerau_levenshtein(text, word);
        whole.max(0.8 * strsim::normalized_damerau_levenshtein(text_last, last))
    };
    // Of equals the first, in the order of the reference page.
    let first = |best: Option<(f64, &'a str)>, word| match (best, likeness(word)) {
        (Some(best), alike) if best.0 >= alike => Some(best),
        (_, alike) => Some((alike, word)),
    };
    words.fold(None, first).filter(|best| best.0 >= 0.5).map(|best| best.1)
}

/// What a text means: a TOML value where it is one, else a string.
pub(super) fn raw(text: &str) -> Raw {
    let table: Result<toml::Table, _> = toml::from_str(&format!("x = {text}"));
    let alone = |mut table: toml::Table| if table.len() == 1 { table.remove("x") } else { None };
    table.ok().and_then(alone).unwrap_or_else(|| Raw::String(text.to_owned()))
}

/// The values of a file, each with its line.
fn from_file(path: &Path, text: &str) -> Result<Vec<Written>, String> {
    let table = toml::de::DeTable::parse(text).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut written = Vec::new();
    flatten(path, text, "", table.get_ref(), &mut written);
    Ok(written)
}

fn flatten(path: &Path, text: &str, prefix: &str, table: &toml::de::DeTable<'_>, written: &mut Vec<Written>) {
    for (name, value) in table {
        let key = if prefix.is_empty() {
            name.get_ref().to_string()
        } else {
            format!("{prefix}.{}", name.get_ref())
        };
        if let toml::de::DeValue::Table(table) = value.get_ref()
            && !table.is_empty()
        {
            flatten(path, text, &key, table, written);
        } else if KEYS.iter().any(|k| k.name.strip_prefix(&key).is_some_and(|rest| rest.starts_with('.')))
            && matches!(value.get_ref(), toml::de::DeValue::Table(_))
        {
            // A section of ours with nothing in it.
        } else {
            let line = text[..value.span().start].lines().count().max(1);
            let line = if text[..value.span().start].ends_with('\n') { line + 1 } else { line };
            let origin = Origin::File(path.to_owned(), line);
            written.push(Written { key, text: text[value.span()].to_owned(), origin });
        }
    }
}

/// The variable that sets a key: `HALO_CONTEXT_MAX_TOKENS`.
#[must_use]
pub fn variable(key: &str) -> String {
    format!("HALO_{}", key.replace('.', "_").to_uppercase())
}

/// Values of the environment. A variable that begins as one of ours does but names no key is a mistake worth
/// telling; any other is somebody else's.
fn from_environment(environment: &[(String, String)]) -> Vec<Written> {
    let sections: Vec<String> = KEYS
        .iter()
        .filter_map(|k| k.name.split_once('.'))
        .map(|(section, _)| format!("HALO_{}_", section.to_uppercase()))
        .collect();
    let mut written = Vec::new();
    for (name, text) in environment.iter().filter(|(_, text)| !text.is_empty()) {
        let key = match KEYS.iter().find(|k| variable(k.name) == *name) {
            Some(key) => key.name.to_owned(),
            None if sections.iter().any(|s| name.starts_with(s.as_str())) || looks_like_ours(name) => {
                let rest = name["HALO_".len()..].to_lowercase();
                rest.replacen('_', ".", 1)
            }
            None => continue,
        };
        written.push(Written { key, text: text.clone(), origin: Origin::Environment(name.clone()) });
    }
    written
}

/// Whether a variable is so near to one of ours that it is meant to be it.
fn looks_like_ours(name: &str) -> bool {
    let alike = |key: &Key| strsim::normalized_damerau_levenshtein(name, &variable(key.name)) >= 0.85;
    name.starts_with("HALO_") && KEYS.iter().any(alike)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(file: &str, environment: &[(&str, &str)], sets: &[&str]) -> Sources {
        Sources {
            file: (!file.is_empty()).then(|| ("halo.toml".into(), file.into())),
            environment: environment.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
            sets: sets.iter().map(|s| (*s).into()).collect(),
            ..Sources::default()
        }
    }

    #[test]
    fn later_sources_win() {
        let file = "[context]\nmax_tokens = 100\nsink_tokens = 1\n[chunk]\nmin_tokens = 7\n";
        let environment =
            [("HALO_CONTEXT_MAX_TOKENS", "200"), ("HALO_CHUNK_MIN_TOKENS", "8"), ("HALO_HOME", "x")];
        let loaded = load(&sources(file, &environment, &["context.max_tokens=300"])).expect("good settings");
        let all = ["context.max_tokens", "chunk.min_tokens", "context.sink_tokens", "kv.ram"];
        let shown = all.map(|key| {
            let (value, _) = loaded.settings.get(key).expect("a key");
            format!("{value} ({})", loaded.origin(key))
        });
        assert_eq!(
            shown,
            ["300 (--set)", "8 (environment HALO_CHUNK_MIN_TOKENS)", "1 (halo.toml:3)", "512 MiB (default)"]
        );
    }

    #[test]
    fn a_preset_stands_below_what_is_set() {
        let loaded =
            load(&sources("[brightness]\nrank = \"mean\"\n", &[], &["preset=halo_weave"])).expect("good");
        assert_eq!(loaded.settings.rank, super::super::value::Rank::Mean);
        assert_eq!(loaded.settings.sink_tokens.0, 0);
        assert_eq!(loaded.origin("context.sink_tokens"), Origin::Preset(Preset::HaloWeave));
    }

    #[test]
    fn what_a_capture_recorded_stands_in_for_defaults() {
        let recorded = [
            ("context.max_tokens", "60"),
            ("brightness.rank", "mean"),
            ("chunk.min_tokens", "9"),
            ("old", "1"),
            ("kv.mode", "x"),
        ];
        let recorded = recorded.map(|(k, v)| (k.to_owned(), v.to_owned())).to_vec();
        let sources = Sources { recorded, ..sources("", &[], &["chunk.min_tokens=8", "preset=halo_weave"]) };
        let loaded = load(&sources).expect("good settings");
        let shown = ["context.max_tokens", "brightness.rank", "chunk.min_tokens"]
            .map(|key| format!("{} ({})", loaded.settings.get(key).expect("a key").0, loaded.origin(key)));
        assert_eq!(shown, ["60 (recorded in the capture)", "peak (preset halo_weave)", "8 (--set)"]);
        assert_eq!(loaded.notes.len(), 2, "{:?}", loaded.notes);
        assert!(loaded.notes[0].starts_with("recorded in the capture: there is no setting 'old'"));
        let bad = "recorded in the capture: kv.mode cannot be 'x': it must be keep or reread; it is left out";
        assert_eq!(loaded.notes[1], bad);
    }

    /// What is wrong, where, what is allowed, and what was probably meant.
    #[test]
    fn errors_name_key_value_allowed_and_nearest() {
        type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a [&'a str], &'a str);
        let cases: &[Case<'_>] = &[
            (
                "",
                &[],
                &["contxt.max_tokens=1"],
                "--set: there is no setting 'contxt.max_tokens'; did you mean context.max_tokens?",
            ),
            ("", &[], &["top_p=1"], "--set: there is no setting 'top_p'; did you mean generation.top_p?"),
            ("", &[], &["zzz=1"], "--set: there is no setting 'zzz': 'halo config reference' lists all"),
            (
                "",
                &[],
                &["context.max_tokens=-1"],
                "--set: context.max_tokens cannot be '-1': it must be a whole number from 0 to 100000000",
            ),
            (
                "",
                &[],
                &["context.max_tokens=many"],
                "--set: context.max_tokens cannot be 'many': it must be a whole number from 0 to 100000000",
            ),
            (
                "",
                &[],
                &["context.max_tokens="],
                "--set: context.max_tokens cannot be '': it must be a whole number from 0 to 100000000",
            ),
            (
                "",
                &[],
                &["context.max_tokens"],
                "--set context.max_tokens: write KEY=VALUE, such as --set context.max_tokens=4000",
            ),
            (
                "",
                &[],
                &["brightness.rank=peek"],
                "--set: brightness.rank cannot be 'peek': it must be peak, mean, top4, votes, sum or share; did you mean peak?",
            ),
            (
                "",
                &[],
                &["brightness.layers=[1, -2]"],
                "--set: brightness.layers cannot be '[1, -2]': it must be mean, last, max, or a list of layers such as [0, 7, 29]",
            ),
            (
                "",
                &[],
                &["generation.temperature=nan"],
                "--set: generation.temperature cannot be 'nan': it must be a number from 0 to 5",
            ),
            (
                "",
                &[],
                &["kv.ram=512 MB"],
                "--set: kv.ram cannot be '512 MB': it must be a size such as 512 MiB or 8 GiB (KiB, MiB, GiB, TiB, or bytes without a unit)",
            ),
            (
                "a = 1\n[brightness]\n\nsink = \"frist\"\n",
                &[],
                &[],
                "halo.toml:1: there is no setting 'a': 'halo config reference' lists all\nhalo.toml:4: brightness.sink cannot be '\"frist\"': it must be first or max; did you mean first?",
            ),
            (
                "",
                &[("HALO_KV_MOD", "keep")],
                &[],
                "environment HALO_KV_MOD: there is no setting 'kv.mod'; did you mean kv.mode?",
            ),
            (
                "",
                &[],
                &["chunk.min_tokens=600"],
                "chunk.min_tokens (600, --set) is larger than chunk.max_tokens (512, default): no chunk could ever end",
            ),
            (
                "",
                &[],
                &["brightness.initial=20000"],
                "brightness.initial (20000, --set) is above brightness.cap (10000, default): raise the cap or lower the start",
            ),
            (
                "",
                &[],
                &["context.recent_tokens=1999"],
                "context.recent_tokens (1999, --set) and context.sink_tokens (4, default) do not fit context.max_tokens (2000, default): lower them or raise it",
            ),
            (
                "",
                &[],
                &["context.max_tokens=1\ny = 2"],
                "--set: context.max_tokens cannot be '1\ny = 2': it must be a whole number from 0 to 100000000",
            ),
        ];
        for (file, environment, sets, expected) in cases {
            let error = load(&sources(file, environment, sets)).expect_err(expected);
            assert_eq!(error.to_string(), *expected);
        }
        let broken = load(&sources("context = [", &[], &[])).expect_err("no TOML").to_string();
        assert!(broken.starts_with("halo.toml: TOML parse error at line 1"), "{broken}");
    }

    #[test]
    fn every_key_takes_its_default_back() {
        let mut settings = Settings::default();
        for key in KEYS {
            let (text, _) = settings.get(key.name).expect("a key");
            assert!(settings.set(key.name, &raw(&text)), "{} = {text}", key.name);
            assert_eq!(settings, Settings::default(), "{}", key.name);
        }
        for preset_name in [Preset::Halo, Preset::HaloWeave, Preset::HaloV0] {
            load(&sources("", &[], &[&format!("preset={preset_name}")])).expect("presets are good settings");
        }
    }
}
