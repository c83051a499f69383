//! `halo export` and `halo import`: conversations that leave and arrive.

use super::progress::Progress;
use super::show::Which;
use super::{Closed, count, print, print_json, search};
use crate::settings::Settings;
use crate::{Common, printable, say};
use anyhow::{Context, Result, bail};
use halo_core::chunk::ChunkSize;
use halo_core::seams::Store;
use halo_core::token::Brightness;
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
    /// Writes every conversation, each to a file of its own in the folder that -o names
    #[arg(long, conflicts_with = "name", requires = "output")]
    all: bool,
    /// The file, or with --all the folder; nothing is ever written over [default: standard output]
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    output: Option<PathBuf>,
}

/// What to take in.
#[derive(clap::Args)]
pub struct ImportOptions {
    /// The files, or - for standard input; each comes in whole or not at all
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// What to call the conversation [default: the name that the file gives it]
    #[arg(short = 'c', long = "conversation", value_name = "NAME")]
    name: Option<String>,
    /// Makes no vectors now; `halo index` does it later
    #[arg(long)]
    no_index: bool,
    /// auto, halo, halo_weave, sillytavern, chatgpt, claude, openai or markdown
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    format: String,
}

/// Writes conversations out.
pub fn export(options: &ExportOptions, common: &Common) -> Result<()> {
    let name = &options.which.name;
    let Some(mut store) = common.look_at_store()? else {
        bail!("there is no conversation '{name}': nothing was kept yet");
    };
    let to_pipe = options.output.as_ref().is_none_or(|path| path.as_os_str() == "-");
    let Some(path) = options.output.as_ref().filter(|_| !to_pipe) else {
        let out = std::io::stdout();
        if out.is_terminal() {
            bail!("an export is long and not for reading: name a file with -o, or send it on with a pipe");
        }
        let mut pipe = Pipe { out: BufWriter::new(out.lock()), closed: false };
        let done = store.export(name, &mut pipe, &mut |_, _| {});
        return if pipe.closed { Err(Closed.into()) } else { Ok(done?) };
    };
    let mut written = Vec::new();
    if options.all {
        std::fs::create_dir_all(path)
            .with_context(|| format!("cannot make the folder {}", path.display()))?;
        // A name may be anything, so files are numbered; each says in its first line whose it is.
        for (n, summary) in store.conversations()?.into_iter().enumerate() {
            let file = path.join(format!("{:05}.jsonl", n + 1));
            let bytes = export_to(&mut store, &summary.name, &file)?;
            written.push((summary.name, file, bytes));
        }
    } else {
        written.push((name.clone(), path.clone(), export_to(&mut store, name, path)?));
    }
    if common.json {
        let all: Vec<_> =
            written.iter().map(|(n, f, b)| json!({ "conversation": n, "file": f, "bytes": b })).collect();
        return print_json(&if options.all { json!(all) } else { all[0].clone() });
    }
    for (name, file, bytes) in written {
        print(&format!(
            "exported '{}' to {} ({})\n",
            printable(&name),
            file.display(),
            count(bytes, "byte")
        ))?;
    }
    Ok(())
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

/// Writes one conversation to a file that is not there yet; returns how long it is.
fn export_to(store: &mut Database, name: &str, path: &Path) -> Result<u64> {
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
    store.export(name, &mut writer, &mut |done, all| bar.of(done, all))?;
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
    for file in &options.files {
        let arrived = import_file(&mut store, file, options, &settings)?;
        foreign |= arrived.format != "an export of Halo";
        all.lost.merge(&arrived.lost);
        all.format = arrived.format;
        if !common.json {
            let mut out = String::new();
            for a in &arrived.conversations {
                let (turns, tokens) = (count(a.turns as u64, "turn"), count(a.tokens as u64, "token"));
                let _ = writeln!(out, "'{}': {turns}, {tokens}, {} live", printable(&a.name), a.live);
            }
            let _ = writeln!(out, "came in from {}", all.format);
            for (what, n) in arrived.lost.iter() {
                let _ = writeln!(out, "not kept: {what} ({n})");
            }
            print(&out)?;
        }
        all.conversations.extend(arrived.conversations);
    }
    if common.json {
        let each = all
            .conversations
            .iter()
            .map(|a| json!({ "name": a.name, "turns": a.turns, "tokens": a.tokens, "live": a.live }));
        let lost: serde_json::Map<_, _> =
            all.lost.iter().map(|(what, n)| (what.to_owned(), json!(n))).collect();
        print_json(
            &json!({ "format": all.format, "conversations": each.collect::<Vec<_>>(), "lost": lost }),
        )?;
    } else if foreign {
        say(
            "no model has read this yet: until one does, text is cut into words, and token ids are as they came",
        );
    }
    if options.no_index {
        return Ok(());
    }
    let names: Vec<String> = all.conversations.into_iter().map(|a| a.name).collect();
    search::embed_arrivals(&mut store, &names, common, &settings)
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
    };
    Ok(store.import(&mut input, import)?)
}
