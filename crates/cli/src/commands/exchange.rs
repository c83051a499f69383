//! `halo export` and `halo import`: conversations that leave and arrive.

use super::progress::Progress;
use super::show::Which;
use super::{Closed, count, print, print_json, search};
use crate::settings::Settings;
use crate::{Common, printable, say};
use anyhow::{Context, Result, bail};
use halo_core::chunk::ChunkSize;
use halo_core::seams::{SeamError, Store, WorldRow, Worlds};
use halo_core::token::Brightness;
use halo_engine::find::write_message_keys;
use halo_engine::world::{admit, realm};
use halo_store::database::Database;
use halo_store::exchange::{Arrivals, Import};
use serde_json::json;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufReader, BufWriter, IsTerminal, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// What to write, and where to.
#[derive(clap::Args)]
pub struct ExportOptions {
    #[command(flatten)]
    which: Which,
    /// Writes every conversation and every world, each to a file of its own in the folder that -o names
    #[arg(long, conflicts_with = "name", requires = "output")]
    all: bool,
    /// The file, or with --all the folder; nothing is ever written over [default: standard output]
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    output: Option<PathBuf>,
}

/// What to take in.
#[derive(clap::Args)]
pub struct ImportOptions {
    /// The files, of conversations or worlds, or - for standard input; each comes in whole or not at all
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// What to call the conversation, or the world [default: the name that the file gives it]
    #[arg(short = 'c', long = "conversation", value_name = "NAME")]
    name: Option<String>,
    /// Makes no vectors now; `halo index` does it later
    #[arg(long)]
    no_index: bool,
    /// auto, halo, halo_weave, sillytavern, chatgpt, claude, openai or markdown
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    format: String,
}

/// What leaves.
#[derive(Clone, Copy)]
enum Leaving<'a> {
    Conversation(&'a str),
    World(&'a str),
}

impl Leaving<'_> {
    fn write(
        self,
        store: &mut Database,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<()> {
        match self {
            Self::Conversation(name) => store.export(name, out, progress)?,
            Self::World(name) => store.export_world(name, out)?,
        }
        Ok(())
    }

    fn kind(self) -> (&'static str, String) {
        match self {
            Self::Conversation(name) => ("conversation", name.to_owned()),
            Self::World(name) => ("world", name.to_owned()),
        }
    }
}

/// Writes conversations out.
pub fn export(options: &ExportOptions, common: &Common) -> Result<()> {
    let name = &options.which.name;
    let Some(mut store) = common.look_at_store()? else {
        bail!("there is no conversation '{name}': nothing was kept yet");
    };
    if !options.all {
        let world = name.strip_prefix("world:").unwrap_or(name);
        let is_there = store.conversations()?.iter().any(|known| known.name == *name);
        if !is_there && store.worlds()?.iter().any(|known| known.name == world) {
            bail!("'{world}' is a world: `halo rooms export` writes it");
        }
        return export_one(&mut store, Leaving::Conversation(name), options.output.as_deref(), common);
    }
    let folder = options.output.as_deref().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let (conversations, worlds) = (store.conversations()?, store.worlds()?);
    let conversations = conversations.iter().map(|known| Leaving::Conversation(&known.name));
    let all = conversations.chain(worlds.iter().map(|known| Leaving::World(&known.name)));
    let (mut written, mut failed) = (Vec::new(), 0);
    // A name may be anything, so files are numbered; each says in its first line whose it is.
    for (n, leaving) in all.enumerate() {
        let file = folder.join(format!("{:05}.jsonl", n + 1));
        match export_to(&mut store, leaving, &file) {
            Ok(bytes) => written.push((leaving, file, bytes)),
            Err(why) => {
                say(&format!("{why:#}"));
                failed += 1;
            }
        }
    }
    if common.json {
        print_json(&written.iter().map(left).collect())?;
    } else {
        written.iter().try_for_each(tell_left)?;
    }
    if failed > 0 {
        bail!("{} could not be exported; the others are whole", count(failed, "conversation or world"));
    }
    Ok(())
}

/// Writes a world out.
pub fn export_world(name: &str, output: Option<&Path>, common: &Common) -> Result<()> {
    let Some(mut store) = common.look_at_store()? else {
        bail!("there is no world '{name}': nothing was kept yet");
    };
    export_one(&mut store, Leaving::World(name), output, common)
}

/// Writes one thing to a file that is not there yet, or to whoever reads.
fn export_one(
    store: &mut Database,
    leaving: Leaving<'_>,
    output: Option<&Path>,
    common: &Common,
) -> Result<()> {
    let Some(path) = output.filter(|path| path.as_os_str() != "-") else {
        let out = std::io::stdout();
        if out.is_terminal() {
            bail!("an export is long and not for reading: name a file with -o, or send it on with a pipe");
        }
        let mut pipe = Pipe { out: BufWriter::new(out.lock()), closed: false };
        let done = leaving.write(store, &mut pipe, &mut |_, _| {});
        return if pipe.closed { Err(Closed.into()) } else { done };
    };
    let bytes = export_to(store, leaving, path)?;
    let written = (leaving, path.to_owned(), bytes);
    if common.json { print_json(&left(&written)) } else { tell_left(&written) }
}

fn left((leaving, file, bytes): &(Leaving<'_>, PathBuf, u64)) -> serde_json::Value {
    let (kind, name) = leaving.kind();
    json!({ kind: name, "file": file, "bytes": bytes })
}

fn tell_left((leaving, file, bytes): &(Leaving<'_>, PathBuf, u64)) -> Result<()> {
    let (kind, name) = leaving.kind();
    let what = if kind == "world" { "the world " } else { "" };
    let (name, bytes) = (printable(&name), count(*bytes, "byte"));
    print(&format!("exported {what}'{name}' to {} ({bytes})\n", file.display()))
}

/// Standard output, and whether anyone reads it.
struct Pipe<W> {
    out: W,
    closed: bool,
}

impl<W: Write> Pipe<W> {
    fn noted<T>(&mut self, done: std::io::Result<T>) -> std::io::Result<T> {
        self.closed |= done.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe);
        done
    }
}

impl<W: Write> Write for Pipe<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let done = self.out.write(bytes);
        self.noted(done)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        let done = self.out.flush();
        self.noted(done)
    }
}

/// Writes one thing to a file that is not there yet; returns how long it is.
fn export_to(store: &mut Database, leaving: Leaving<'_>, path: &Path) -> Result<u64> {
    // Beside its place first: what bears the name is always whole.
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.exists() {
        bail!("{} is there already: name another file, or remove it", path.display());
    }
    let failed = || format!("cannot write {}", path.display());
    let mut file = tempfile::Builder::new()
        .prefix(".halo-export-")
        .tempfile_in(folder)
        .map_err(|e| std::io::Error::from(e.kind()))
        .with_context(failed)?;
    let bar = Progress::new("exporting", 1);
    let mut writer = BufWriter::new(file.as_file_mut());
    leaving.write(store, &mut writer, &mut |done, all| bar.of(done, all))?;
    writer.flush().with_context(failed)?;
    drop((writer, bar));
    file.as_file().sync_all().with_context(failed)?;
    let bytes = file.as_file().metadata().map_or(0, |m| m.len());
    file.persist_noclobber(path).with_context(failed)?;
    Ok(bytes)
}

/// Takes conversations in.
pub fn import(options: &ImportOptions, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    if options.name.is_some() && options.files.len() > 1 {
        bail!("-c names one conversation: import the files one by one, or let each have its own name");
    }
    let mut store = common.open_store()?;
    let (mut all, mut foreign) = (Arrivals::default(), false);
    let (mut worlds, mut failed) = (Vec::new(), Vec::new());
    for file in &options.files {
        let arrived = match import_file(&mut store, file, options, &settings) {
            Ok(arrived) => arrived,
            Err(why) if options.files.len() == 1 => return Err(why),
            // The others come in.
            Err(why) => {
                say(&format!("{why:#}"));
                failed.push(json!({ "file": file, "why": format!("{why:#}") }));
                continue;
            }
        };
        foreign |= arrived.format != "an export of Halo";
        all.lost.merge(&arrived.lost);
        all.format = arrived.format;
        let mut out = String::new();
        for a in &arrived.conversations {
            let name = printable(&a.name);
            if a.is_world {
                let (agents, messages) = realm::size(&mut store, &a.name)?;
                worlds.push(json!({ "name": a.name, "agents": agents, "messages": messages }));
                let (agents, messages) = (count(agents as u64, "agent"), count(messages, "message"));
                let _ = writeln!(out, "the world '{name}': {agents}, {messages}");
            } else {
                let (turns, tokens) = (count(a.turns as u64, "turn"), count(a.tokens as u64, "token"));
                let _ = writeln!(out, "'{name}': {turns}, {tokens}, {} live", a.live);
            }
        }
        let _ = writeln!(out, "came in from {}", all.format);
        for (what, n) in arrived.lost.iter() {
            let _ = writeln!(out, "not kept: {what} ({n})");
        }
        if !common.json {
            print(&out)?;
        }
        all.conversations.extend(arrived.conversations.into_iter().filter(|a| !a.is_world));
    }
    if common.json {
        let each = all
            .conversations
            .iter()
            .map(|a| json!({ "name": a.name, "turns": a.turns, "tokens": a.tokens, "live": a.live }));
        let lost: serde_json::Map<_, _> =
            all.lost.iter().map(|(what, n)| (what.to_owned(), json!(n))).collect();
        print_json(&json!({
            "format": all.format,
            "conversations": each.collect::<Vec<_>>(),
            "worlds": worlds,
            "lost": lost,
            "failed": failed,
        }))?;
    } else if foreign {
        say(
            "no model has read this yet: until one does, text is cut into words, and token ids are as they came",
        );
    }
    let names: Vec<String> = all.conversations.into_iter().map(|a| a.name).collect();
    if !options.no_index && !names.is_empty() {
        search::embed_arrivals(&mut store, &names, common, &settings)?;
    }
    if !failed.is_empty() {
        let files = count(failed.len() as u64, "file");
        bail!("{files} did not come in, and nothing of what is in them; all others did");
    }
    Ok(())
}

/// Whether a world comes in: whoever wrote the file does not say whom this program speaks to, and with whose key.
fn admit(name: &str, rows: &[WorldRow], settings: &Settings) -> Result<(), SeamError> {
    let world = admit::admit(name, rows)?;
    let allowed = &settings.rooms_models.0;
    match world.head.models.iter().filter_map(|model| model.at.as_ref()).find(|at| !allowed.contains(at)) {
        None => Ok(()),
        Some(at) => Err(SeamError::asked(
            format!("taking in the world '{name}'"),
            format!(
                "it thinks with '{}', to which your key would be sent and all that its agents see: if you trust that, \
                 name it in the setting rooms.models",
                printable(at).replace('\n', " ")
            ),
        )),
    }
}

/// Takes in one file.
fn import_file(
    store: &mut Database,
    path: &Path,
    options: &ImportOptions,
    settings: &Settings,
) -> Result<Arrivals> {
    let from_pipe = path.as_os_str() == "-";
    let (input, bytes): (Box<dyn Read>, u64) = if from_pipe {
        // Others may write while somebody types: only then is it taken in.
        let mut spool = tempfile::tempfile().context("cannot make a temporary file")?;
        let bytes =
            std::io::copy(&mut std::io::stdin().lock(), &mut spool).context("cannot read standard input")?;
        spool.rewind().context("cannot read standard input")?;
        (Box::new(spool), bytes)
    } else {
        let (file_path, path) = (path, path.display());
        let file = File::open(file_path).with_context(|| format!("cannot read {path}"))?;
        let about = file.metadata().with_context(|| format!("cannot read {path}"))?;
        if about.is_dir() {
            bail!("{path} is a folder: name the file in it");
        }
        (Box::new(file), about.len())
    };
    let bar = Progress::bytes("importing", bytes);
    let mut input = BufReader::with_capacity(1 << 16, bar.reading(input));
    let file_name = if from_pipe { "standard input".into() } else { path.to_string_lossy() };
    let import = Import {
        file_name: &file_name,
        format: Some(&options.format),
        name: options.name.as_deref(),
        size: ChunkSize { min: settings.chunk_min.0 as u32, max: settings.chunk_max.0 as u32 },
        brightness: Brightness(settings.initial.0 as f32),
        model: None,
        admit: Some(&|name, rows| admit(name, rows, settings)),
    };
    let arrived = store.import(&mut input, import)?;
    for conversation in arrived.conversations.iter().filter(|one| !one.is_world) {
        // A client that goes on with it is recognised by what it sends.
        write_message_keys(store, &conversation.name)?;
    }
    Ok(arrived)
}
