//! Sources of settings: defaults, a preset, a file, the environment, the command line. Later ones override earlier
//! ones.

use super::value::{Preset, TomlValue};
use super::{KEYS, SettingKey, Settings, preset_values};
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingOrigin {
    Default,
    /// Recorded in a capture.
    Capture,
    Preset(Preset),
    File(PathBuf, usize),
    /// Name of the variable.
    Environment(String),
    CommandLine(&'static str),
    /// A value that is about to be written to the settings file.
    NewValue,
}

impl fmt::Display for SettingOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingOrigin::Default => f.write_str("default"),
            SettingOrigin::Capture => f.write_str("recorded in the capture"),
            SettingOrigin::Preset(preset) => write!(f, "preset {preset}"),
            SettingOrigin::File(path, line) => write!(f, "{}:{line}", path.display()),
            SettingOrigin::Environment(name) => write!(f, "environment {name}"),
            SettingOrigin::CommandLine(flag) => f.write_str(flag),
            SettingOrigin::NewValue => f.write_str("new value"),
        }
    }
}

/// One key and value as the user wrote them, before parsing.
#[derive(Clone, Debug)]
struct RawSetting {
    key: String,
    text: String,
    origin: SettingOrigin,
}

/// The effective settings with their sources.
#[derive(Clone, Debug)]
pub struct LoadedSettings {
    pub settings: Settings,
    /// Keys that are missing here have their default.
    origins: BTreeMap<&'static str, SettingOrigin>,
    /// Recorded settings that were ignored, and why.
    pub warnings: Vec<String>,
}

impl LoadedSettings {
    #[must_use]
    pub fn origin(&self, key: &str) -> SettingOrigin {
        self.origins.get(key).cloned().unwrap_or(SettingOrigin::Default)
    }

    /// Why less than half of the context window would be left for the conversation; see [`Settings::window_error`].
    #[must_use]
    pub fn window_error(&self) -> Option<String> {
        let origin = self.origin("generation.max_tokens");
        let is_default =
            matches!(origin, SettingOrigin::Default | SettingOrigin::Preset(_) | SettingOrigin::Capture);
        self.settings.window_error(!is_default)
    }

    /// The same for settings of the command line: a settings file of an older version must not stop the program.
    fn command_line_window_error(&self) -> Option<String> {
        let keys = ["context.max_tokens", "generation.max_tokens", "context.room_tokens"];
        let from_flag = |key: &str| matches!(self.origin(key), SettingOrigin::CommandLine(_));
        self.window_error().filter(|_| keys.into_iter().any(from_flag))
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct SettingProblem {
    /// The source of the wrong value; none if the message names its sources.
    pub origin: Option<SettingOrigin>,
    pub message: String,
}

impl fmt::Display for SettingProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            // The user who sends a new value knows where it came from.
            None | Some(SettingOrigin::NewValue) => f.write_str(&self.message),
            Some(origin) => write!(f, "{origin}: {}", self.message),
        }
    }
}

/// All problems of the settings, one per line.
#[derive(Debug, PartialEq, Eq)]
pub struct SettingsError(pub Vec<SettingProblem>);

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl std::error::Error for SettingsError {}

#[derive(Debug, Default)]
pub struct SettingsSources {
    /// Keys and values that a capture recorded; they replace the defaults.
    pub from_capture: Vec<(String, String)>,
    /// Path and contents of the settings file.
    pub file: Option<(PathBuf, String)>,
    /// Names and values of environment variables.
    pub environment: Vec<(String, String)>,
    /// Values of `--set KEY=VALUE`, in order.
    pub set_flags: Vec<String>,
    /// Other flags that set a key: the flag, the key, the value.
    pub other_flags: Vec<(&'static str, &'static str, String)>,
    /// A key and the value that is about to be written to the settings file.
    pub new_value: Option<(String, String)>,
}

pub fn load_settings(sources: &SettingsSources) -> Result<LoadedSettings, SettingsError> {
    let mut errors = Vec::new();
    let mut values = Vec::new();
    if let Some((path, text)) = &sources.file {
        match settings_from_toml(path, text) {
            Ok(all) => values.extend(all),
            Err(message) => errors.push(SettingProblem { origin: None, message }),
        }
    }
    values.extend(settings_from_environment(&sources.environment));
    for set in &sources.set_flags {
        match set.split_once('=') {
            Some((key, text)) => values.push(RawSetting {
                key: key.trim().to_owned(),
                text: text.trim().to_owned(),
                origin: SettingOrigin::CommandLine("--set"),
            }),
            None => {
                let message = format!("--set {set}: write KEY=VALUE, such as --set context.max_tokens=4000");
                errors.push(SettingProblem { origin: None, message });
            }
        }
    }
    for (flag, key, text) in &sources.other_flags {
        values.push(RawSetting {
            key: (*key).to_owned(),
            text: text.clone(),
            origin: SettingOrigin::CommandLine(flag),
        });
    }
    values.extend(sources.new_value.iter().map(|(key, text)| RawSetting {
        key: key.clone(),
        text: text.trim().to_owned(),
        origin: SettingOrigin::NewValue,
    }));
    let mut loaded =
        LoadedSettings { settings: Settings::default(), origins: BTreeMap::new(), warnings: Vec::new() };
    let recorded = sources.from_capture.iter().map(|(key, text)| RawSetting {
        key: key.clone(),
        text: text.clone(),
        origin: SettingOrigin::Capture,
    });
    let mut ignored = Vec::new();
    apply_all(&mut loaded, recorded.collect(), &mut ignored);
    // Another version may have recorded settings that this one does not have: a warning, no error.
    loaded.warnings = ignored.into_iter().map(|why| format!("{why}; it is ignored")).collect();
    apply_all(&mut loaded, values, &mut errors);
    if errors.is_empty() {
        let of = |key: &str| {
            let (value, _) = loaded.settings.get(key).unwrap_or_default();
            format!("{key} ({value}, {})", loaded.origin(key))
        };
        let conflict = loaded.settings.conflict_error(of).or_else(|| loaded.command_line_window_error());
        errors.extend(conflict.map(|message| SettingProblem { origin: None, message }));
    }
    if errors.is_empty() { Ok(loaded) } else { Err(SettingsError(errors)) }
}

/// Applies a group of values, the preset first: the others override it.
fn apply_all(loaded: &mut LoadedSettings, values: Vec<RawSetting>, errors: &mut Vec<SettingProblem>) {
    let (presets, others): (Vec<_>, Vec<_>) = values.into_iter().partition(|w| w.key == "preset");
    for set in &presets {
        apply_setting(loaded, set, errors);
    }
    if !presets.is_empty() {
        let chosen = loaded.settings.preset;
        for (key, text) in preset_values(chosen) {
            apply_setting(
                loaded,
                &RawSetting { key: key.into(), text, origin: SettingOrigin::Preset(chosen) },
                errors,
            );
        }
    }
    for set in &others {
        apply_setting(loaded, set, errors);
    }
}

/// Applies one value, or adds a problem.
fn apply_setting(loaded: &mut LoadedSettings, value: &RawSetting, errors: &mut Vec<SettingProblem>) {
    let RawSetting { key, text, origin } = value;
    let mut report = |message| errors.push(SettingProblem { origin: Some(origin.clone()), message });
    let Some(setting) = KEYS.iter().find(|k| k.name == key) else {
        report(format!("there is no setting '{}'{}", truncate_for_message(key), suggest_key(key)));
        return;
    };
    if loaded.settings.set(setting.name, &parse_toml_or_string(text)) {
        loaded.origins.insert(setting.name, origin.clone());
    } else {
        let shown = match (setting.is_secret)() {
            true => "the given value".to_owned(),
            false => format!("'{}'", truncate_for_message(text)),
        };
        report(format!("{key} cannot be {shown}: {}", explain_allowed(setting, text)));
    }
}

/// The beginning of the user's text, for a message.
fn truncate_for_message(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn explain_allowed(key: &SettingKey, text: &str) -> String {
    let mut out = format!("it must be {}", (key.allowed)());
    let near = closest_match(text.trim_matches('"'), (key.choices)().into_iter());
    if let Some(word) = near {
        let _ = write!(out, "; did you mean {word}?");
    }
    out
}

fn suggest_key(key: &str) -> String {
    let lower: String = key.chars().take(80).collect::<String>().to_lowercase().replace('-', "_");
    let section = format!("{lower}.");
    let inside: Vec<_> = KEYS.iter().map(|k| k.name).filter(|name| name.starts_with(&section)).collect();
    if !inside.is_empty() {
        return format!(": it is a section, with {}", inside.join(", "));
    }
    match closest_match(&lower, KEYS.iter().map(|k| k.name)) {
        Some(name) => format!("; did you mean {name}?"),
        None => ": 'halo config reference' lists all".into(),
    }
}

/// The most similar word, if one is similar enough.
pub fn closest_match<'a>(text: &str, words: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // The last part of a dotted name counts too: people remember `top_p`, not its section.
    let likeness = |word: &str| {
        let last = word.rsplit('.').next().unwrap_or(word);
        let text_last = text.rsplit('.').next().unwrap_or(text);
        let whole = strsim::normalized_damerau_levenshtein(text, word);
        whole.max(0.8 * strsim::normalized_damerau_levenshtein(text_last, last))
    };
    // The first of equals, in the order of the reference page.
    let first = |best: Option<(f64, &'a str)>, word| match (best, likeness(word)) {
        (Some(best), similarity) if best.0 >= similarity => Some(best),
        (_, similarity) => Some((similarity, word)),
    };
    words.fold(None, first).filter(|best| best.0 >= 0.5).map(|best| best.1)
}

/// A text as a TOML value, or as a string if it is none.
pub(super) fn parse_toml_or_string(text: &str) -> TomlValue {
    let table: Result<toml::Table, _> = toml::from_str(&format!("x = {text}"));
    let alone = |mut table: toml::Table| if table.len() == 1 { table.remove("x") } else { None };
    table.ok().and_then(alone).unwrap_or_else(|| TomlValue::String(text.to_owned()))
}

/// The values of a file with their lines.
fn settings_from_toml(path: &Path, text: &str) -> Result<Vec<RawSetting>, String> {
    let table = toml::de::DeTable::parse(text).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut values = Vec::new();
    flatten_toml_table(path, text, "", table.get_ref(), &mut values);
    Ok(values)
}

fn flatten_toml_table(
    path: &Path,
    text: &str,
    prefix: &str,
    table: &toml::de::DeTable<'_>,
    values: &mut Vec<RawSetting>,
) {
    for (name, value) in table {
        let key = if prefix.is_empty() {
            name.get_ref().to_string()
        } else {
            format!("{prefix}.{}", name.get_ref())
        };
        if let toml::de::DeValue::Table(table) = value.get_ref()
            && !table.is_empty()
        {
            flatten_toml_table(path, text, &key, table, values);
        } else if KEYS.iter().any(|k| k.name.strip_prefix(&key).is_some_and(|rest| rest.starts_with('.')))
            && matches!(value.get_ref(), toml::de::DeValue::Table(_))
        {
            // An empty section.
        } else {
            let line = text[..value.span().start].lines().count().max(1);
            let line = if text[..value.span().start].ends_with('\n') { line + 1 } else { line };
            let origin = SettingOrigin::File(path.to_owned(), line);
            values.push(RawSetting { key, text: text[value.span()].to_owned(), origin });
        }
    }
}

/// The environment variable of a key, such as `HALO_CONTEXT_MAX_TOKENS`.
#[must_use]
pub fn env_var_name(key: &str) -> String {
    format!("HALO_{}", key.replace('.', "_").to_uppercase())
}

/// Settings from environment variables. A variable with the prefix of a section that names no key is an error; other
/// variables are ignored.
fn settings_from_environment(environment: &[(String, String)]) -> Vec<RawSetting> {
    let sections: Vec<String> = KEYS
        .iter()
        .filter_map(|k| k.name.split_once('.'))
        .map(|(section, _)| format!("HALO_{}_", section.to_uppercase()))
        .collect();
    let mut values = Vec::new();
    for (name, text) in environment.iter().filter(|(_, text)| !text.is_empty()) {
        let key = match KEYS.iter().find(|k| env_var_name(k.name) == *name) {
            Some(key) => key.name.to_owned(),
            None if sections.iter().any(|s| name.starts_with(s.as_str()))
                || resembles_setting_variable(name) =>
            {
                let rest = name["HALO_".len()..].to_lowercase();
                rest.replacen('_', ".", 1)
            }
            None => continue,
        };
        values.push(RawSetting { key, text: text.clone(), origin: SettingOrigin::Environment(name.clone()) });
    }
    values
}

/// Whether a variable is a misspelt name of a setting's variable.
fn resembles_setting_variable(name: &str) -> bool {
    let is_similar =
        |key: &SettingKey| strsim::normalized_damerau_levenshtein(name, &env_var_name(key.name)) >= 0.85;
    name.starts_with("HALO_") && KEYS.iter().any(is_similar)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_sources(file: &str, environment: &[(&str, &str)], sets: &[&str]) -> SettingsSources {
        SettingsSources {
            file: (!file.is_empty()).then(|| ("halo.toml".into(), file.into())),
            environment: environment.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
            set_flags: sets.iter().map(|s| (*s).into()).collect(),
            ..SettingsSources::default()
        }
    }

    #[test]
    fn settings_later_source_wins() {
        let file = "[context]\nmax_tokens = 100\nsink_tokens = 1\n[chunk]\nmin_tokens = 7\n";
        let environment =
            [("HALO_CONTEXT_MAX_TOKENS", "200"), ("HALO_CHUNK_MIN_TOKENS", "8"), ("HALO_HOME", "x")];
        let loaded = load_settings(&test_sources(file, &environment, &["context.max_tokens=300"]))
            .expect("good settings");
        let all = ["context.max_tokens", "chunk.min_tokens", "context.sink_tokens", "kv.ram"];
        let printed = all.map(|key| {
            let (value, _) = loaded.settings.get(key).expect("a key");
            format!("{value} ({})", loaded.origin(key))
        });
        assert_eq!(
            printed,
            ["300 (--set)", "8 (environment HALO_CHUNK_MIN_TOKENS)", "1 (halo.toml:3)", "512 MiB (default)"]
        );
    }

    #[test]
    fn settings_override_preset() {
        let loaded =
            load_settings(&test_sources("[brightness]\nrank = \"mean\"\n", &[], &["preset=halo_weave"]))
                .expect("good");
        assert_eq!(loaded.settings.brightness_rank, halo_core::prune::RankBy::Mean);
        assert_eq!(loaded.settings.context_sink_tokens.0, 0);
        assert_eq!(loaded.origin("context.sink_tokens"), SettingOrigin::Preset(Preset::HaloWeave));
    }

    #[test]
    fn settings_recorded_in_capture_replace_defaults() {
        let recorded = [
            ("context.max_tokens", "60"),
            ("ttl.target", "60"),
            ("brightness.rank", "mean"),
            ("chunk.min_tokens", "9"),
            ("old", "1"),
            ("kv.mode", "x"),
        ];
        let recorded = recorded.map(|(k, v)| (k.to_owned(), v.to_owned())).to_vec();
        let sources = SettingsSources {
            from_capture: recorded,
            ..test_sources("", &[], &["chunk.min_tokens=8", "preset=halo_weave"])
        };
        let loaded = load_settings(&sources).expect("good settings");
        let printed = ["ttl.target", "context.max_tokens", "brightness.rank", "chunk.min_tokens"]
            .map(|key| format!("{} ({})", loaded.settings.get(key).expect("a key").0, loaded.origin(key)));
        let expected = [
            "60 (recorded in the capture)",
            "2000 (preset halo_weave)",
            "peak (preset halo_weave)",
            "8 (--set)",
        ];
        assert_eq!(printed, expected);
        assert_eq!(loaded.warnings.len(), 2, "{:?}", loaded.warnings);
        assert!(loaded.warnings[0].starts_with("recorded in the capture: there is no setting 'old'"));
        let bad = "recorded in the capture: kv.mode cannot be 'x': it must be keep or reread; it is ignored";
        assert_eq!(loaded.warnings[1], bad);
    }

    /// What is wrong, where, what is allowed, and what was probably meant.
    #[test]
    fn settings_errors_name_key_value_allowed_and_suggestion() {
        type SettingsErrorCase<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a [&'a str], &'a str);
        let cases: &[SettingsErrorCase<'_>] = &[
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
                "--set: context.max_tokens cannot be '-1': it must be auto, or a whole number from 0 to 100000000",
            ),
            (
                "",
                &[],
                &["context.max_tokens=many"],
                "--set: context.max_tokens cannot be 'many': it must be auto, or a whole number from 0 to 100000000",
            ),
            (
                "",
                &[],
                &["context.max_tokens="],
                "--set: context.max_tokens cannot be '': it must be auto, or a whole number from 0 to 100000000",
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
                &[("HALO_SERVER_KEY", "fifteen letters")],
                &[],
                "environment HALO_SERVER_KEY: server.key cannot be the given value: it must be auto, or at least 16 ASCII characters; `halo key` prints a random key",
            ),
            (
                "",
                &[],
                &["server.key=sixteen letters ä"],
                "--set: server.key cannot be the given value: it must be auto, or at least 16 ASCII characters; `halo key` prints a random key",
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
                "brightness.initial (20000, --set) is above brightness.cap (10000, default): raise the cap or lower the initial brightness",
            ),
            (
                "",
                &[],
                &["context.recent_tokens=1999", "context.max_tokens=2000"],
                "context.recent_tokens (1999, --set) and context.sink_tokens (4, default) do not fit context.max_tokens (2000, --set): lower them or raise it",
            ),
            (
                "",
                &[],
                &["context.max_tokens=1\ny = 2"],
                "--set: context.max_tokens cannot be '1\ny = 2': it must be auto, or a whole number from 0 to 100000000",
            ),
        ];
        for (file, environment, sets, expected) in cases {
            let error = load_settings(&test_sources(file, environment, sets)).expect_err(expected);
            assert_eq!(error.to_string(), *expected);
        }
        let broken = load_settings(&test_sources("context = [", &[], &[])).expect_err("no TOML").to_string();
        assert!(broken.starts_with("halo.toml: TOML parse error at line 1"), "{broken}");
    }

    /// At least half of the window stays for the conversation: what is set by hand is refused with the arithmetic, a
    /// default is clamped, and a settings file is accepted.
    #[test]
    fn settings_that_leave_less_than_half_of_the_window_are_refused() {
        let cases: &[(&str, &[&str], Option<&str>)] = &[
            ("", &[], None),
            ("", &["context.max_tokens=400"], None),
            ("", &["context.max_tokens=2000", "generation.max_tokens=500"], None),
            (
                "",
                &["context.max_tokens=2000", "generation.max_tokens=501"],
                Some(
                    "the context window is too small: of 2000 tokens (context.max_tokens), 501 are reserved for the answer \
                     (generation.max_tokens) and 500 for resurrected chunks (context.room_tokens), which leaves 999 for the \
                     conversation, less than half (1000); set generation.max_tokens to at most 500, or context.max_tokens to \
                     at least 2004",
                ),
            ),
            (
                "",
                &["context.max_tokens=1000", "context.room_tokens=600"],
                Some(
                    "the context window is too small: of 1000 tokens (context.max_tokens), 0 are reserved for the answer \
                     (generation.max_tokens) and 600 for resurrected chunks (context.room_tokens), which leaves 400 for the \
                     conversation, less than half (500); lower context.room_tokens, or set context.max_tokens to at \
                     least 1200",
                ),
            ),
            ("[context]\nmax_tokens = 300\n[generation]\nmax_tokens = 200\n", &[], None),
            ("", &["generation.max_tokens=5000"], None),
            ("", &["context.max_tokens=0", "generation.max_tokens=5000"], None),
            ("", &["preset=halo_v0", "generation.max_tokens=5000"], None),
            ("", &["preset=halo_weave", "context.max_tokens=60"], None),
            ("", &["preset=halo_weave", "context.max_tokens=100", "generation.max_tokens=50"], None),
        ];
        for (file, sets, expected) in cases {
            let loaded = load_settings(&test_sources(file, &[], sets));
            assert_eq!(loaded.err().map(|error| error.to_string()).as_deref(), *expected, "{file} {sets:?}");
        }
        let file = "[context]\nmax_tokens = 300\n[generation]\nmax_tokens = 200\n";
        let loaded = load_settings(&test_sources(file, &[], &[])).expect("a file is accepted");
        assert!(loaded.window_error().is_some(), "a change of it over the API is refused");
    }

    #[test]
    fn settings_defaults_round_trip() {
        let mut settings = Settings::default();
        for key in KEYS {
            let (text, _) = settings.get(key.name).expect("a key");
            assert!(settings.set(key.name, &parse_toml_or_string(&text)), "{} = {text}", key.name);
            assert_eq!(settings, Settings::default(), "{}", key.name);
        }
        for preset_name in [Preset::Halo, Preset::HaloWeave, Preset::HaloV0] {
            load_settings(&test_sources("", &[], &[&format!("preset={preset_name}")]))
                .expect("presets are good settings");
        }
    }
}
