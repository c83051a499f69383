//! `halo export` and `halo import`.

use super::conversations::ConversationArgs;
use super::search;
use crate::env::Env;
use crate::error::{error_text, not_found};
use crate::output::{
    StdoutClosed, pluralize, print_json, print_notice, print_stdout, sanitize_terminal_text,
};
use crate::progress::Progress;
use crate::settings::Settings;
use anyhow::{Context, Result, bail};
use halo_core::Error;
use halo_core::chunker::ChunkSize;
use halo_core::row_store::{Row, RowStore};
use halo_core::store::Store;
use halo_core::token::Brightness;
use halo_engine::lookup::write_message_keys;
use halo_store::database::Database;
use halo_store::exchange::{ImportReport, ImportRequest};
use halo_worlds::{import, world_store};
use serde_json::json;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, IsTerminal, Read, Seek, Write};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct ExportArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Export all conversations and worlds, one file each, into the folder given by -o
    #[arg(long, conflicts_with = "name", requires = "output")]
    all: bool,
    /// Output file, or folder with --all; existing files are not overwritten [default: stdout]
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(clap::Args)]
pub struct ImportArgs {
    /// Files to import, or - for stdin; each is imported completely or not at all
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Name of the imported conversation or world [default: the name in the file]
    #[arg(short = 'c', long = "conversation", value_name = "NAME")]
    name: Option<String>,
    /// Do not create embeddings now; `halo index` does it later
    #[arg(long)]
    no_index: bool,
    /// File format: auto, halo, halo_weave, sillytavern, chatgpt, claude, openai or markdown
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    format: String,
}

#[derive(Clone, Copy)]
enum ExportItem<'a> {
    Conversation(&'a str),
    World(&'a str),
}

impl ExportItem<'_> {
    fn export_to_writer(
        self,
        store: &mut Database,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<()> {
        match self {
            Self::Conversation(name) => store.export(name, out, progress)?,
            Self::World(name) => {
                world_store::check_world_exists(store, name)?;
                store.export_namespace(name, &world_store::ROW_KINDS, out)?;
            }
        }
        Ok(())
    }

    fn kind_and_name(self) -> (&'static str, String) {
        match self {
            Self::Conversation(name) => ("conversation", name.to_owned()),
            Self::World(name) => ("world", name.to_owned()),
        }
    }
}

pub fn export(options: &ExportArgs, env: &Env) -> Result<()> {
    let name = &options.conversation.name;
    let Some(mut store) = env.open_store_read_only()? else {
        return Err(not_found(format!("there is no conversation '{name}': the store is empty")));
    };
    if !options.all {
        let world = name.strip_prefix("world:").unwrap_or(name);
        let exists = store.list_conversations()?.iter().any(|entry| entry.name == *name);
        if !exists && store.list_namespaces()?.iter().any(|entry| entry.name == world) {
            bail!("'{world}' is a world: use `halo rooms export`");
        }
        return export_one(&mut store, ExportItem::Conversation(name), options.output.as_deref(), env);
    }
    let folder = options.output.as_deref().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    let (conversations, worlds) = (store.list_conversations()?, store.list_namespaces()?);
    let conversations = conversations.iter().map(|entry| ExportItem::Conversation(&entry.name));
    let all = conversations.chain(worlds.iter().map(|entry| ExportItem::World(&entry.name)));
    let (mut written, mut failed) = (Vec::new(), 0);
    // A name may contain anything, so files are numbered; the first line of each has the name.
    for (n, item) in all.enumerate() {
        let file = folder.join(format!("{:05}.jsonl", n + 1));
        match export_to_file(&mut store, item, &file) {
            Ok(bytes) => written.push((item, file, bytes)),
            Err(why) => {
                print_notice(&error_text(&why));
                failed += 1;
            }
        }
    }
    if env.json {
        print_json(&written.iter().map(exported_json).collect())?;
    } else {
        written.iter().try_for_each(print_exported)?;
    }
    if failed > 0 {
        bail!(
            "{} could not be exported; the others are complete",
            pluralize(failed, "conversation or world")
        );
    }
    Ok(())
}

pub fn export_world(name: &str, output: Option<&Path>, env: &Env) -> Result<()> {
    let Some(mut store) = env.open_store_read_only()? else {
        return Err(not_found(format!("there is no world '{name}': the store is empty")));
    };
    export_one(&mut store, ExportItem::World(name), output, env)
}

/// Writes an export to a new file or to standard output.
fn export_one(store: &mut Database, item: ExportItem<'_>, output: Option<&Path>, env: &Env) -> Result<()> {
    let Some(path) = output.filter(|path| path.as_os_str() != "-") else {
        let out = std::io::stdout();
        if out.is_terminal() {
            bail!("an export is not for reading on a terminal: name a file with -o, or use a pipe");
        }
        let mut pipe = StdoutPipe { out: BufWriter::new(out.lock()), closed: false };
        let result = item.export_to_writer(store, &mut pipe, &mut |_, _| {});
        return if pipe.closed { Err(StdoutClosed.into()) } else { result };
    };
    let bytes = export_to_file(store, item, path)?;
    let written = (item, path.to_owned(), bytes);
    if env.json { print_json(&exported_json(&written)) } else { print_exported(&written) }
}

fn exported_json((item, file, bytes): &(ExportItem<'_>, PathBuf, u64)) -> serde_json::Value {
    let (kind, name) = item.kind_and_name();
    json!({ kind: name, "file": file, "bytes": bytes })
}

fn print_exported((item, file, bytes): &(ExportItem<'_>, PathBuf, u64)) -> Result<()> {
    let (kind, name) = item.kind_and_name();
    let what = if kind == "world" { "the world " } else { "" };
    let (name, bytes) = (sanitize_terminal_text(&name), pluralize(*bytes, "byte"));
    print_stdout(&format!("exported {what}'{name}' to {} ({bytes})\n", file.display()))
}

/// Standard output, and whether its reader is still there.
struct StdoutPipe<W> {
    out: W,
    closed: bool,
}

impl<W: Write> StdoutPipe<W> {
    fn note_broken_pipe<T>(&mut self, result: std::io::Result<T>) -> std::io::Result<T> {
        self.closed |= result.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe);
        result
    }
}

impl<W: Write> Write for StdoutPipe<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let result = self.out.write(bytes);
        self.note_broken_pipe(result)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        let result = self.out.flush();
        self.note_broken_pipe(result)
    }
}

/// Writes an export to a new file; returns its size.
fn export_to_file(store: &mut Database, item: ExportItem<'_>, path: &Path) -> Result<u64> {
    // Written beside the target first: a file of the final name is always complete.
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.exists() {
        bail!("{} exists already: name another file, or remove it", path.display());
    }
    let failed = || format!("cannot write {}", path.display());
    let mut file = tempfile::Builder::new()
        .prefix(".halo-export-")
        .tempfile_in(folder)
        .map_err(|e| std::io::Error::from(e.kind()))
        .with_context(failed)?;
    let bar = Progress::new("exporting", 1);
    let mut writer = BufWriter::new(file.as_file_mut());
    item.export_to_writer(store, &mut writer, &mut |done, all| bar.set_progress(done, all))?;
    writer.flush().with_context(failed)?;
    drop((writer, bar));
    file.as_file().sync_all().with_context(failed)?;
    let bytes = file.as_file().metadata().map_or(0, |m| m.len());
    file.persist_noclobber(path).with_context(failed)?;
    Ok(bytes)
}

pub fn import(options: &ImportArgs, env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    if options.name.is_some() && options.files.len() > 1 {
        bail!("-c names one conversation: import the files one by one, or without -c");
    }
    let mut store = env.open_store()?;
    let (mut all, mut foreign) = (ImportReport::default(), false);
    let (mut worlds, mut failed) = (Vec::new(), Vec::new());
    for file in &options.files {
        let report = match import_file(&mut store, file, options, &settings) {
            Ok(report) => report,
            Err(why) if options.files.len() == 1 => return Err(why),
            // The other files are imported.
            Err(why) => {
                print_notice(&error_text(&why));
                failed.push(json!({ "file": file, "why": error_text(&why) }));
                continue;
            }
        };
        foreign |= report.format != "an export of Halo";
        all.losses.merge(&report.losses);
        all.format = report.format;
        let mut out = String::new();
        for a in &report.conversations {
            let name = sanitize_terminal_text(&a.name);
            if a.is_namespace {
                let (agents, messages) = world_store::world_size(&mut store, &a.name)?;
                worlds.push(json!({ "name": a.name, "agents": agents, "messages": messages }));
                let (agents, messages) = (pluralize(agents as u64, "agent"), pluralize(messages, "message"));
                let _ = writeln!(out, "the world '{name}': {agents}, {messages}");
            } else {
                let (turns, tokens) =
                    (pluralize(a.turns as u64, "turn"), pluralize(a.tokens as u64, "token"));
                let _ = writeln!(out, "'{name}': {turns}, {tokens}, {} live", a.live);
            }
        }
        let _ = writeln!(out, "imported from {}", all.format);
        for (what, n) in report.losses.iter() {
            let _ = writeln!(out, "not imported: {what} ({n})");
        }
        if !env.json {
            print_stdout(&out)?;
        }
        all.conversations.extend(report.conversations.into_iter().filter(|a| !a.is_namespace));
    }
    if env.json {
        let each = all
            .conversations
            .iter()
            .map(|a| json!({ "name": a.name, "turns": a.turns, "tokens": a.tokens, "live": a.live }));
        let lost: serde_json::Map<_, _> =
            all.losses.iter().map(|(what, n)| (what.to_owned(), json!(n))).collect();
        print_json(&json!({
            "format": all.format,
            "conversations": each.collect::<Vec<_>>(),
            "worlds": worlds,
            "lost": lost,
            "failed": failed,
        }))?;
    } else if foreign {
        print_notice(
            "no model has tokenized this yet: until then, tokens are words, and token ids are those of the file",
        );
    }
    let names: Vec<String> = all.conversations.into_iter().map(|a| a.name).collect();
    if !options.no_index && !names.is_empty() {
        search::embed_imported(&mut store, &names, env, &settings)?;
    }
    if !failed.is_empty() {
        let files = pluralize(failed.len() as u64, "file");
        bail!("{files} could not be imported; all others were");
    }
    Ok(())
}

/// Checks the models of an imported world: a file must not choose which servers this program talks to, with the
/// user's keys.
fn admit_world(name: &str, rows: &[Row], settings: &Settings) -> Result<(), Error> {
    let world = import::world_from_rows(name, rows)?;
    let allowed = &settings.rooms_models.0;
    match world
        .header
        .models
        .iter()
        .filter_map(|model| model.address.as_ref())
        .find(|at| !allowed.contains(at))
    {
        None => Ok(()),
        Some(at) => Err(Error::invalid_input(
            format!("importing the world '{name}'"),
            format!(
                "it uses the model '{}', which would receive your key and everything that its agents see: if you trust it, \
                 name it in the setting rooms.models",
                sanitize_terminal_text(at).replace('\n', " ")
            ),
        )),
    }
}

fn import_file(
    store: &mut Database,
    path: &Path,
    options: &ImportArgs,
    settings: &Settings,
) -> Result<ImportReport> {
    let from_pipe = path.as_os_str() == "-";
    let (input, bytes): (Box<dyn Read>, u64) = if from_pipe {
        // Standard input is read completely before the store is locked: the user may be typing it.
        let mut spool = tempfile::tempfile().context("cannot create a temporary file")?;
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
    let bar = Progress::for_bytes("importing", bytes);
    let mut input = BufReader::with_capacity(1 << 16, bar.wrap_reader(input));
    let file_name = if from_pipe { "standard input".into() } else { path.to_string_lossy() };
    Ok(import_from_reader(store, &mut input, &file_name, &options.format, options.name.as_deref(), settings)?)
}

/// Imports a file of any known format: all of it, or on an error nothing.
pub fn import_from_reader(
    store: &mut Database,
    input: &mut dyn BufRead,
    file_name: &str,
    format: &str,
    name: Option<&str>,
    settings: &Settings,
) -> Result<ImportReport, Error> {
    let import = ImportRequest {
        file_name,
        format: Some(format),
        name,
        chunk_size: ChunkSize {
            min: settings.chunk_min_tokens.0 as u32,
            max: settings.chunk_max_tokens.0 as u32,
        },
        initial_brightness: Brightness(settings.brightness_initial.0 as f32),
        model: None,
        validate_rows: Some(&|name, rows| admit_world(name, rows, settings)),
    };
    let report = store.import(input, import)?;
    for conversation in report.conversations.iter().filter(|one| !one.is_namespace) {
        // Message keys let clients that continue an imported conversation be recognised.
        write_message_keys(store, &conversation.name)?;
    }
    Ok(report)
}
