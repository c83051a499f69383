//! `halo export` and `halo import`: conversations that leave and arrive.

use super::progress::Progress;
use super::show::Which;
use super::{count, print, print_json};
use crate::{Common, printable, say};
use anyhow::{Context, Result, bail};
use halo_core::chunk::ChunkSize;
use halo_core::token::Brightness;
use halo_store::exchange::Import;
use serde_json::json;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufReader, BufWriter, IsTerminal, Read, Write};
use std::path::PathBuf;

/// What to write, and where to.
#[derive(clap::Args)]
pub struct ExportOptions {
    #[command(flatten)]
    which: Which,
    /// The file; nothing is ever written over [default: standard output]
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    output: Option<PathBuf>,
}

/// What to take in.
#[derive(clap::Args)]
pub struct ImportOptions {
    /// The file, or - for standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// What to call the conversation [default: the name that the file gives it]
    #[arg(short = 'c', long = "conversation", value_name = "NAME")]
    name: Option<String>,
    /// auto, halo, halo_weave, sillytavern, chatgpt, claude, openai or markdown
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    format: String,
}

/// Writes a conversation out.
pub fn export(options: &ExportOptions, common: &Common) -> Result<()> {
    let name = &options.which.name;
    let Some(mut store) = common.look_at_store()? else {
        bail!("there is no conversation '{name}': nothing was kept yet");
    };
    let Some(path) = &options.output else {
        let out = std::io::stdout();
        if out.is_terminal() {
            bail!("an export is long and not for reading: name a file with -o, or send it on with a pipe");
        }
        return Ok(store.export(name, &mut BufWriter::new(out.lock()), &mut |_, _| {})?);
    };
    // Beside its place first: what bears the name is always whole.
    let folder =
        path.parent().filter(|f| !f.as_os_str().is_empty()).map_or_else(|| ".".into(), PathBuf::from);
    if path.exists() {
        bail!("{} is there already: name another file, or remove it", path.display());
    }
    let mut file = tempfile::Builder::new()
        .prefix(".halo-export-")
        .tempfile_in(&folder)
        .with_context(|| format!("cannot write to {}", folder.display()))?;
    let bar = Progress::new("exporting", 1);
    let mut writer = BufWriter::new(file.as_file_mut());
    store.export(name, &mut writer, &mut |done, all| bar.of(done, all))?;
    writer.flush().with_context(|| format!("cannot write {}", path.display()))?;
    drop((writer, bar));
    file.as_file().sync_all().with_context(|| format!("cannot write {}", path.display()))?;
    let bytes = file.as_file().metadata().map_or(0, |m| m.len());
    file.persist_noclobber(path).with_context(|| format!("cannot write {}", path.display()))?;
    if common.json {
        return print_json(&json!({ "conversation": name, "file": path, "bytes": bytes }));
    }
    print(&format!("exported '{}' to {} ({})\n", printable(name), path.display(), count(bytes, "byte")))
}

/// Takes a conversation in.
pub fn import(options: &ImportOptions, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let from_pipe = options.file.as_os_str() == "-";
    let (input, bytes): (Box<dyn Read>, u64) = if from_pipe {
        (Box::new(std::io::stdin()), 0)
    } else {
        let path = options.file.display();
        let file = File::open(&options.file).with_context(|| format!("cannot read {path}"))?;
        let about = file.metadata().with_context(|| format!("cannot read {path}"))?;
        if about.is_dir() {
            bail!("{path} is a folder: name the file in it");
        }
        (Box::new(file), about.len())
    };
    let bar = Progress::bytes("importing", bytes);
    let mut input = BufReader::with_capacity(1 << 16, bar.reading(input));
    let file_name = if from_pipe { "standard input".into() } else { options.file.to_string_lossy() };
    let import = Import {
        file_name: &file_name,
        format: Some(&options.format),
        name: options.name.as_deref(),
        size: ChunkSize { min: settings.chunk_min.0 as u32, max: settings.chunk_max.0 as u32 },
        brightness: Brightness(settings.initial.0 as f32),
        model: None,
    };
    let mut store = common.open_store()?;
    let arrived = store.import(&mut input, import)?;
    drop(bar);
    if common.json {
        let each = arrived
            .conversations
            .iter()
            .map(|a| json!({ "name": a.name, "turns": a.turns, "tokens": a.tokens, "live": a.live }));
        let lost: serde_json::Map<_, _> =
            arrived.lost.iter().map(|(what, n)| (what.to_owned(), json!(n))).collect();
        return print_json(
            &json!({ "format": arrived.format, "conversations": each.collect::<Vec<_>>(), "lost": lost }),
        );
    }
    let mut out = String::new();
    for a in &arrived.conversations {
        let (turns, tokens) = (count(a.turns as u64, "turn"), count(a.tokens as u64, "token"));
        let _ = writeln!(out, "'{}': {turns}, {tokens}, {} live", printable(&a.name), a.live);
    }
    let _ = writeln!(out, "came in from {}", arrived.format);
    for (what, n) in arrived.lost.iter() {
        let _ = writeln!(out, "not kept: {what} ({n})");
    }
    print(&out)?;
    if arrived.format != "an export of Halo" {
        say(
            "no model has read this yet: until one does, text is cut into words, and token ids are as they came",
        );
    }
    Ok(())
}
