//! `halo bench recall`: how much of what a question needs is found.

use crate::Common;
use crate::commands::progress::Progress;
use crate::commands::{print, print_json, search};
use crate::models;
use anyhow::{Context, Result, anyhow};
use halo_bench::recall::{self, AT, Report, SESSIONS_AT, Setup, Sums, TOKENS_AT};
use halo_core::chunk::ChunkSize;
use halo_core::seams::Model;
use halo_llama::model::{Llama, Options as Running};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// What to ask.
#[derive(clap::Args)]
pub struct Options {
    /// The conversations: a file, or a folder
    #[arg(long, value_name = "FILE_OR_DIR")]
    data: PathBuf,
    /// How they are written
    #[arg(long, value_name = "FORMAT")]
    format: Format,
    /// Where what was embedded is kept for the next time [default: nowhere]
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

/// How conversations are written.
#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Format {
    /// LoCoMo (snap-research/locomo)
    Locomo,
    /// REALTALK (danny911kr/REALTALK)
    Realtalk,
    /// BEAM (mohammadtavakoli78/BEAM)
    Beam,
}

impl Format {
    /// Reads all conversations of a file or a folder.
    pub fn read(self, data: &Path) -> Result<Vec<recall::Conversation>> {
        let format = match self {
            Format::Locomo => recall::Format::Locomo,
            Format::Realtalk => recall::Format::Realtalk,
            Format::Beam => recall::Format::Beam,
        };
        recall::read(data, format).map_err(|why| anyhow!(why))
    }
}

/// Asks all questions.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let conversations = options.format.read(&options.data)?;
    let temporary = tempfile::tempdir().context("cannot make a temporary folder")?;
    let folder = options.keep.as_deref().unwrap_or(temporary.path());
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let embedder = search::embedder(common, &settings)?;
    // A chat model is wanted for its tokens alone; where none is named and none is here, words are counted.
    let model = match &common.model {
        Some(name) => Some(models::find(common, Some(name))?),
        None => models::find(common, None).ok(),
    };
    let mut model = model.map(|path| Llama::open(&path, &Running::default())).transpose()?;
    let mut report = Report::default();
    for conversation in &conversations {
        let bar = Progress::new("embedding", 0);
        let mut setup = Setup {
            embedder: embedder.clone(),
            model: model.as_mut().map(|model| model as &mut dyn Model),
            size: ChunkSize { min: settings.chunk_min.0 as u32, max: settings.chunk_max.0 as u32 },
            manner: search::manner(&settings, 0),
        };
        recall::measure(conversation, folder, &mut setup, &mut report, &mut |done, all| bar.of(done, all))
            .with_context(|| format!("conversation {}", conversation.name))?;
    }
    let tokens = model.as_ref().map_or_else(|| "words".to_owned(), |model| model.info().name.clone());
    let mode = if report.meaning { settings.recall_mode.to_string() } else { "lexical".to_owned() };
    if common.json {
        return print_json(&as_json(&report, &mode, &tokens));
    }
    print(&table(&report, &mode, &tokens))
}

fn as_json(report: &Report, mode: &str, tokens: &str) -> Value {
    let by = |sums: &[f64], at: &[usize], questions| -> Map<String, Value> {
        at.iter().zip(sums).map(|(n, &sum)| (n.to_string(), json!(Sums::percent(sum, questions)))).collect()
    };
    let part = |sums: &Sums| {
        json!({
            "questions": sums.questions,
            "recall": by(&sums.at, &AT, sums.questions),
            "session_recall": by(&sums.sessions, &SESSIONS_AT, sums.with_session),
            "recall_at_tokens": by(&sums.tokens, &TOKENS_AT, sums.questions),
        })
    };
    let mut out = part(&report.all);
    out["by_kind"] = report.by_kind.iter().map(|(kind, sums)| (kind.clone(), part(sums))).collect();
    out["ms_per_query"] = json!(report.search_ms.iter().sum::<f64>() / report.search_ms.len().max(1) as f64);
    out["mode"] = json!(mode);
    out["tokens_of"] = json!(tokens);
    out["without_evidence"] = json!(report.without_evidence);
    out["unknown_evidence"] = json!(report.unknown_evidence);
    out["messages"] = json!(report.messages);
    out["chunks"] = json!(report.chunks);
    out["tokens"] = json!(report.tokens);
    out
}

fn table(report: &Report, mode: &str, tokens: &str) -> String {
    let mut out = format!("{:<26}{:>6}", "share of evidence, %", "asked");
    let heads = AT.map(|n| format!("{:>7}", format!("@{n}"))).concat()
        + &SESSIONS_AT.map(|n| format!("{:>12}", format!("session@{n}"))).concat()
        + &TOKENS_AT.map(|n| format!("{:>11}", format!("{n} tok"))).concat();
    let _ = writeln!(out, "{heads}");
    let all = std::iter::once(("all", &report.all));
    for (kind, sums) in all.chain(report.by_kind.iter().map(|(kind, sums)| (kind.as_str(), sums))) {
        let (asked, with_session) = (sums.questions, sums.with_session);
        let _ = write!(out, "{kind:<26}{asked:>6}");
        let shares = sums.at.map(|s| format!("{:>7.1}", Sums::percent(s, asked))).concat()
            + &sums.sessions.map(|s| format!("{:>12.1}", Sums::percent(s, with_session))).concat()
            + &sums.tokens.map(|s| format!("{:>11.1}", Sums::percent(s, asked))).concat();
        let _ = writeln!(out, "{shares}");
    }
    let ms = report.search_ms.iter().sum::<f64>() / report.search_ms.len().max(1) as f64;
    let _ = writeln!(
        out,
        "\n{mode}; {} messages, {} chunks, {} tokens ({tokens}); {ms:.1} ms a question; {} questions name no evidence \
         and were left out, {} pieces of evidence are not there and count as not found",
        report.messages, report.chunks, report.tokens, report.without_evidence, report.unknown_evidence
    );
    out
}
