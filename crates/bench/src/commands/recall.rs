//! `halo-bench recall`: search recall on datasets with known answers.

use anyhow::{Context, Result, anyhow};
use halo_bench::recall::{
    self, FLOORS_AT, ListedHits, RECALL_AT, RecallBenchReport, RecallBenchSetup, RecallSums, SESSIONS_AT,
    TOKENS_AT,
};
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use halo_cli::wiring;
use halo_core::chunker::ChunkSize;
use halo_core::model::Model;
use halo_llama::model::{Llama, LlamaOptions as Running};
use halo_recall::rank::RankedChunk;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct RecallBenchOptions {
    /// Dataset: a file or a folder
    #[arg(long, value_name = "FILE_OR_DIR")]
    data: PathBuf,
    /// Format of the dataset files
    #[arg(long, value_name = "FORMAT")]
    format: DatasetFormatArg,
    /// Folder that caches embeddings between runs [default: none]
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// File for the features of each question's best hits, one question per line (JSON) [default: none]
    #[arg(long, value_name = "FILE")]
    hits: Option<PathBuf>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
pub enum DatasetFormatArg {
    /// Format of LoCoMo (snap-research/locomo)
    Locomo,
    /// Format of REALTALK (danny911kr/REALTALK)
    Realtalk,
    /// Format of BEAM (mohammadtavakoli78/BEAM)
    Beam,
}

impl DatasetFormatArg {
    pub fn read(self, data: &Path) -> Result<Vec<recall::DatasetConversation>> {
        let format = match self {
            DatasetFormatArg::Locomo => recall::DatasetFormat::Locomo,
            DatasetFormatArg::Realtalk => recall::DatasetFormat::Realtalk,
            DatasetFormatArg::Beam => recall::DatasetFormat::Beam,
        };
        recall::read_dataset(data, format).map_err(|why| anyhow!(why))
    }
}

pub fn run(options: &RecallBenchOptions, env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    let conversations = options.format.read(&options.data)?;
    let temporary = tempfile::tempdir().context("cannot create a temporary folder")?;
    let folder = options.keep.as_deref().unwrap_or(temporary.path());
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    let embedder = wiring::open_embedder(env, &settings)?;
    // The chat model is needed for its tokenizer only; without one, words are counted.
    let model = match &env.models.name {
        Some(_) => Some(env.model_file()?),
        None => env.model_file().ok(),
    };
    let mut model = model.map(|path| Llama::open(&path, &Running::default())).transpose()?;
    let mut report = RecallBenchReport::default();
    for (n, conversation) in conversations.iter().enumerate() {
        // The questions of the next conversation: with a single one there are none.
        let foreign = if conversations.len() > 1 { Some((n + 1) % conversations.len()) } else { None };
        let bar = Progress::new("embedding", 0);
        let mut setup = RecallBenchSetup {
            foreign_questions: foreign.map_or(&[][..], |other| conversations[other].questions.as_slice()),
            embedder: embedder.clone(),
            model: model.as_mut().map(|model| model as &mut dyn Model),
            chunk_size: ChunkSize {
                min: settings.chunk_min_tokens.0 as u32,
                max: settings.chunk_max_tokens.0 as u32,
            },
            search_options: wiring::search_options(&settings, 0),
            list_hits: options.hits.is_some(),
        };
        recall::measure(conversation, folder, &mut setup, &mut report, &mut |done, all| {
            bar.set_progress(done, all);
        })
        .with_context(|| format!("conversation {}", conversation.name))?;
    }
    if let Some(file) = &options.hits {
        let lines: String =
            report.listed_hits.iter().map(|listed| format!("{}\n", hits_json(listed))).collect();
        std::fs::write(file, lines).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let tokens = model.as_ref().map_or_else(|| "words".to_owned(), |model| model.info().name.clone());
    let mode = if report.has_vectors { settings.recall_mode.to_string() } else { "lexical".to_owned() };
    if env.json {
        return print_json(&report_json(&report, &mode, &tokens));
    }
    print_stdout(&report_table(&report, &mode, &tokens))
}

fn report_json(report: &RecallBenchReport, mode: &str, tokens: &str) -> Value {
    let by = |sums: &[f64], at: &[usize], questions| -> Map<String, Value> {
        at.iter()
            .zip(sums)
            .map(|(n, &sum)| (n.to_string(), json!(RecallSums::percent(sum, questions))))
            .collect()
    };
    let part = |sums: &RecallSums| {
        json!({
            "questions": sums.questions,
            "recall": by(&sums.recall, &RECALL_AT, sums.questions),
            "session_recall": by(&sums.session_recall, &SESSIONS_AT, sums.with_session),
            "recall_at_tokens": by(&sums.token_recall, &TOKENS_AT, sums.questions),
        })
    };
    let mut out = part(&report.all);
    out["by_kind"] = report.by_kind.iter().map(|(kind, sums)| (kind.clone(), part(sums))).collect();
    out["floors"] = floors_json(report);
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

fn hits_json(listed: &ListedHits) -> Value {
    let hit_json = |(hit, is_evidence): &(RankedChunk, bool)| {
        json!({
            "chunk": hit.hit.chunk.to_string(),
            "score": hit.hit.score,
            "similarity": hit.similarity,
            "term_share": hit.term_share,
            "evidence": is_evidence,
        })
    };
    json!({
        "conversation": listed.conversation,
        "chunks": listed.chunks,
        "foreign": listed.foreign,
        "hits": listed.hits.iter().map(hit_json).collect::<Value>(),
    })
}

/// By floor: recall of evidence and resurrected chunks per question, of the conversation and of another one.
fn floors_json(report: &RecallBenchReport) -> Value {
    let (floors, asked) = (&report.floors, report.all.questions);
    let per = |sum: usize, questions: usize| sum as f64 / questions.max(1) as f64;
    let row = |(n, floor): (usize, f64)| {
        json!({
            "floor": floor,
            "recall": RecallSums::percent(floors.recall[n], asked),
            "chunks": per(floors.own_chunks[n], asked),
            "foreign_chunks": per(floors.foreign_chunks[n], floors.foreign_questions),
        })
    };
    FLOORS_AT.into_iter().enumerate().map(row).collect()
}

fn report_table(report: &RecallBenchReport, mode: &str, tokens: &str) -> String {
    let mut out = format!("{:<26}{:>6}", "recall of evidence, %", "asked");
    let heads = RECALL_AT.map(|n| format!("{:>7}", format!("@{n}"))).concat()
        + &SESSIONS_AT.map(|n| format!("{:>12}", format!("session@{n}"))).concat()
        + &TOKENS_AT.map(|n| format!("{:>11}", format!("{n} tok"))).concat();
    let _ = writeln!(out, "{heads}");
    let all = std::iter::once(("all", &report.all));
    for (kind, sums) in all.chain(report.by_kind.iter().map(|(kind, sums)| (kind.as_str(), sums))) {
        let (asked, with_session) = (sums.questions, sums.with_session);
        let _ = write!(out, "{kind:<26}{asked:>6}");
        let shares = sums.recall.map(|s| format!("{:>7.1}", RecallSums::percent(s, asked))).concat()
            + &sums
                .session_recall
                .map(|s| format!("{:>12.1}", RecallSums::percent(s, with_session)))
                .concat()
            + &sums.token_recall.map(|s| format!("{:>11.1}", RecallSums::percent(s, asked))).concat();
        let _ = writeln!(out, "{shares}");
    }
    let _ = writeln!(out, "\n{:<10}{:>8}{:>14}{:>22}", "floor", "recall", "chunks", "for other questions");
    for row in floors_json(report).as_array().into_iter().flatten() {
        let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
        let _ = writeln!(
            out,
            "{:<10}{:>8.1}{:>14.1}{:>22.1}",
            number("floor"),
            number("recall"),
            number("chunks"),
            number("foreign_chunks")
        );
    }
    let ms = report.search_ms.iter().sum::<f64>() / report.search_ms.len().max(1) as f64;
    let _ = writeln!(
        out,
        "\n{mode}; {} messages, {} chunks, {} tokens ({tokens}); {ms:.1} ms per question; {} questions without evidence \
         were skipped, {} references to missing messages count as not found",
        report.messages, report.chunks, report.tokens, report.without_evidence, report.unknown_evidence
    );
    out
}
