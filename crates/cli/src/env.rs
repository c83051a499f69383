//! What every command works with: the settings, the store, the models and the data folder, as flags and environment
//! variables name them. Nothing is opened before a command asks for it.

use crate::file::{MAX_SETTINGS_BYTES, read_regular_text};
use crate::models::ModelLibrary;
use crate::output::{pluralize, print_notice};
use crate::settings::load::{self, LoadedSettings, SettingsSources};
use anyhow::{Context, Result};
use clap::Args;
use halo_llama::kv_archive;
use halo_store::database::{Database, StoreLocation};
use halo_store::wal_check::{self, WalDamage};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// How much of the KV archive is deleted at once when the disk of the store is full.
const DISK_SPACE_TO_FREE: u64 = 32 << 20;

/// Flags that every command has.
#[derive(Args)]
#[command(next_help_heading = "Global options")]
pub struct GlobalArgs {
    /// Data folder [default: $HALO_DATA, or the platform's, such as ~/.local/share/halo]
    #[arg(long, global = true, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Settings file [default: config.toml in the data folder]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Override a setting; 'halo config reference' lists all
    #[arg(long, global = true, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Random seed, overrides generation.seed
    #[arg(long, global = true, value_name = "N")]
    seed: Option<String>,
    /// Database: sqlite:PATH or postgres://… [default: $HALO_STORE, or halo.db in the data folder]
    #[arg(long, global = true, value_name = "URL")]
    store: Option<String>,
    /// Model: a name from `halo models`, the path of a GGUF file, the URL of a server, or scripted:FILE for the answers in
    /// a text file [default: the default chat model]
    #[arg(long, global = true, value_name = "MODEL")]
    model: Option<String>,
    /// Number of CPU threads for the model [default: number of CPUs]
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Print JSON only, to stdout
    #[arg(long, global = true)]
    json: bool,
    /// Print errors only, no warnings
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Verbose logging on stderr; -vv includes llama.cpp
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

impl GlobalArgs {
    /// The environment that these flags and the variables of the process describe.
    pub fn env(&self) -> Env {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let data_dir = self.data.clone().or_else(|| variable("HALO_DATA").map(PathBuf::from));
        let store = || variable("HALO_STORE").and_then(|url| url.into_string().ok());
        Env {
            data_dir: data_dir.or_else(platform_data_dir),
            settings: SettingsArgs {
                config: self.config.clone(),
                set: self.set.clone(),
                seed: self.seed.clone(),
            },
            installed_data_dir: variable("HALO_DATA").map(PathBuf::from).or_else(platform_data_dir),
            store: self.store.clone().or_else(store),
            store_location: Arc::default(),
            wal_damage: Arc::default(),
            models: ModelArgs { name: self.model.clone(), threads: self.threads, chosen_by_client: false },
            json: self.json,
        }
    }
}

/// The data folder of a program that is started without --data and HALO_DATA.
fn platform_data_dir() -> Option<PathBuf> {
    dirs::data_dir().map(|dir| dir.join("halo"))
}

#[derive(Clone)]
pub struct Env {
    data_dir: Option<PathBuf>,
    /// The data folder without --data: models that were pulled into it are found whatever --data names.
    installed_data_dir: Option<PathBuf>,
    pub settings: SettingsArgs,
    store: Option<String>,
    /// The address of the store, once it is parsed: stores on a server share its connections.
    store_location: Arc<OnceLock<StoreLocation>>,
    /// What was wrong with the write-ahead log before this process opened the store, and where the log is kept.
    wal_damage: Arc<OnceLock<Option<(WalDamage, PathBuf)>>>,
    pub models: ModelArgs,
    /// Whether to print JSON to stdout, and nothing else.
    pub json: bool,
}

/// Where settings come from, besides the environment.
#[derive(Clone)]
pub struct SettingsArgs {
    config: Option<PathBuf>,
    pub set: Vec<String>,
    pub seed: Option<String>,
}

/// Which model runs, and on how many threads.
#[derive(Clone)]
pub struct ModelArgs {
    pub name: Option<String>,
    pub threads: Option<u32>,
    /// Whether a client of the server chose it. An address that a client chose does not get the API key of the environment.
    pub chosen_by_client: bool,
}

impl ModelArgs {
    /// The number of threads, by default as many as there are CPUs.
    pub fn thread_count(&self) -> u32 {
        let cpus = || std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        self.threads.unwrap_or_else(cpus)
    }
}

impl Env {
    /// An environment with a data folder and nothing else.
    #[cfg(test)]
    pub fn for_tests(data_dir: &Path) -> Self {
        Self {
            data_dir: Some(data_dir.to_owned()),
            installed_data_dir: None,
            settings: SettingsArgs { config: None, set: Vec::new(), seed: None },
            store: None,
            store_location: Arc::default(),
            wal_damage: Arc::default(),
            models: ModelArgs { name: None, threads: None, chosen_by_client: false },
            json: false,
        }
    }

    pub fn data_dir(&self) -> Option<PathBuf> {
        self.data_dir.clone()
    }

    /// The option that names the data folder, as a part of a command line; empty for the default folder.
    pub fn data_flag(&self) -> String {
        let Some(folder) = self.data_dir.as_ref().filter(|_| self.data_dir != self.installed_data_dir) else {
            return String::new();
        };
        let text = folder.display().to_string();
        let is_plain = |c: char| c.is_alphanumeric() || "/._-+@:".contains(c);
        if text.chars().all(is_plain) {
            format!(" --data {text}")
        } else {
            format!(" --data '{}'", text.replace('\'', r"'\''"))
        }
    }

    /// The data folder, or an error that says how to name one.
    pub fn require_data_dir(&self) -> Result<&Path> {
        self.data_dir.as_deref().context("this system has no data folder: name one with --data")
    }

    /// The file with the lines that were typed in the terminal, whether or not it exists.
    pub fn input_history_file(&self) -> Option<PathBuf> {
        self.data_dir.as_ref().map(|dir| dir.join("chat_history.txt"))
    }

    /// The settings file, whether or not it exists.
    pub fn settings_path(&self) -> Option<PathBuf> {
        let default = || self.data_dir.as_ref().map(|dir| dir.join("config.toml"));
        self.settings.config.clone().or_else(default)
    }

    pub fn load_settings(&self) -> Result<LoadedSettings> {
        self.load_from(SettingsSources::default())
    }

    /// The settings with those that a capture recorded in place of the defaults.
    pub fn load_recorded_settings(&self, recorded: Vec<(String, String)>) -> Result<LoadedSettings> {
        self.load_from(SettingsSources { from_capture: recorded, ..SettingsSources::default() })
    }

    /// The settings as they would be with a new value in the settings file.
    pub fn load_settings_with(&self, new_value: Option<(String, String)>) -> Result<LoadedSettings> {
        self.load_from(SettingsSources { new_value, ..SettingsSources::default() })
    }

    fn load_from(&self, sources: SettingsSources) -> Result<LoadedSettings> {
        let file = match self.settings_path() {
            None => None,
            Some(path) => match read_regular_text(&path, MAX_SETTINGS_BYTES) {
                Ok(text) => Some((path, text)),
                // Most users have no settings file. A file that --config names must exist.
                Err(error)
                    if error.kind() == std::io::ErrorKind::NotFound && self.settings.config.is_none() =>
                {
                    None
                }
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot read the settings file {}", path.display()));
                }
            },
        };
        let seed = self.settings.seed.iter().map(|seed| ("--seed", "generation.seed", seed.clone()));
        let environment = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        });
        Ok(load::load_settings(&SettingsSources {
            file,
            environment: environment.collect(),
            set_flags: self.settings.set.clone(),
            other_flags: seed.collect(),
            ..sources
        })?)
    }

    pub fn store_location(&self) -> Result<StoreLocation> {
        if let Some(location) = self.store_location.get() {
            return Ok(location.clone());
        }
        let location = match &self.store {
            Some(url) => url.parse()?,
            None => StoreLocation::Sqlite(self.require_data_dir()?.join("halo.db")),
        };
        Ok(self.store_location.get_or_init(|| location).clone())
    }

    /// Opens the store for writing and creates it if it does not exist.
    pub fn open_store(&self) -> Result<Database> {
        let location = self.store_location()?;
        if let StoreLocation::Sqlite(path) = &location {
            // An empty store beside the files of another one would hide that one.
            store_exists(path)?;
        }
        if let StoreLocation::Sqlite(path) = &location
            && let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty())
        {
            create_private_dir(folder)
                .with_context(|| format!("cannot create the folder {}", folder.display()))?;
        }
        self.check_wal(&location)?;
        let mut store = Database::open(&location)?;
        if let Some(kv) = self.data_dir.as_ref().map(|data| data.join("kv")) {
            store.set_disk_full_handler(Arc::new(move || {
                kv_archive::free_disk_space(&kv, DISK_SPACE_TO_FREE) > 0
            }));
        }
        Ok(store)
    }

    /// Looks for damage in the write-ahead log, once and before the store is opened: opening the store overwrites it.
    /// Returns the damage and where the log is kept.
    pub fn check_wal(&self, location: &StoreLocation) -> Result<Option<(WalDamage, PathBuf)>> {
        if let Some(damage) = self.wal_damage.get() {
            return Ok(damage.clone());
        }
        let damage = match location {
            StoreLocation::Postgres(_) => None,
            StoreLocation::Sqlite(path) => match wal_check::find_wal_damage(path)? {
                None => None,
                Some(damage) => {
                    let kept = wal_check::keep_wal(path)?;
                    print_notice(&format!(
                        "the write-ahead log of {} is damaged: {} after the damage cannot be read, so the last words may \
                         be missing; the log is kept as {}",
                        path.display(),
                        pluralize(damage.lost_commits as u64, "commit"),
                        kept.display()
                    ));
                    Some((damage, kept))
                }
            },
        };
        Ok(self.wal_damage.get_or_init(|| damage).clone())
    }

    /// Opens the store for reading; none if it does not exist.
    pub fn open_store_read_only(&self) -> Result<Option<Database>> {
        let location = self.store_location()?;
        if let StoreLocation::Sqlite(path) = &location
            && !store_exists(path)?
        {
            return Ok(None);
        }
        self.check_wal(&location)?;
        Ok(Some(Database::open_read_only(&location)?))
    }

    pub fn model_library(&self) -> Result<ModelLibrary> {
        ModelLibrary::open(self.require_data_dir()?, self.installed_data_dir.as_deref())
    }

    /// Uses the model of `model.path` where no flag names one. Settings that cannot be read are an error of the command that
    /// reads them.
    pub fn apply_model_setting(&mut self) {
        if self.models.name.is_none()
            && let Ok(loaded) = self.load_settings()
        {
            self.models.name = loaded.settings.model_path.as_text().map(str::to_owned);
        }
    }

    /// The file of the model that runs.
    pub fn model_file(&self) -> Result<PathBuf> {
        self.model_library()?.find_model_file(self.models.name.as_deref())
    }
}

/// Whether there is a store. A missing file with its write-ahead log still there is an error: opening would create an
/// empty store beside the log.
pub fn store_exists(path: &Path) -> Result<bool> {
    let exists = path.try_exists().with_context(|| format!("cannot access {}", path.display()))?;
    let wal = PathBuf::from(format!("{}-wal", path.display()));
    if !exists && wal.exists() {
        anyhow::bail!(
            "{} is missing, but {} exists: restore the file from a backup",
            path.display(),
            wal.display()
        );
    }
    if !exists && let Some(copy) = find_repaired_copy(path) {
        anyhow::bail!(
            "{} is missing, but {} exists, which an interrupted repair has left: rename it to {} to go on with it, or move \
             it away to start with an empty store",
            path.display(),
            copy.display(),
            path.display()
        );
    }
    // SQLite leaves an empty file when creating a store is interrupted.
    Ok(exists && std::fs::metadata(path).map_or(true, |metadata| metadata.len() > 0 || wal.exists()))
}

/// A copy of the store that a repair of an earlier version has left when it was interrupted.
fn find_repaired_copy(path: &Path) -> Option<PathBuf> {
    let copies = ["repaired", "mended", "trial", "damaged"];
    let copies = copies.iter().flat_map(|kind| (1..10).map(move |n| format!("{kind}-{n}")));
    copies.map(|copy| PathBuf::from(format!("{}.{copy}", path.display()))).find(|copy| copy.exists())
}

/// Creates a folder and its parents; only the user can read it.
pub fn create_private_dir(folder: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}
