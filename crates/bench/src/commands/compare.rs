//! `halo-bench compare`: the same conversations under two models.

use super::recall::DatasetFormatArg;
use anyhow::{Context, Result, ensure};
use halo_bench::prune::compare::{self, ChunkShares, ComparedModel};
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use halo_cli::wiring;
use halo_core::chunker::ChunkSize;
use halo_core::model::Model;
use halo_engine::chat_format::{ChatFormatter, SpeakerNames};
use halo_llama::attention::{TapConfig, TapRows};
use halo_llama::ffi::{AttentionSource, ContextParams, KvKeyType, LlamaContext};
use halo_llama::model::{Llama, LlamaOptions};
use serde_json::json;
use std::fmt::Write;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct CompareBenchOptions {
    /// The second model: a name or a path; --model names the first
    #[arg(long, value_name = "MODEL")]
    with: String,
    /// Dataset: a file or a folder
    #[arg(long, value_name = "FILE_OR_DIR")]
    data: PathBuf,
    /// Format of the dataset files
    #[arg(long, value_name = "FORMAT", default_value = "realtalk")]
    format: DatasetFormatArg,
    /// The most conversations to compare
    #[arg(long, value_name = "N", default_value_t = 10)]
    conversations: usize,
    /// Words of a conversation whose chunks are compared
    #[arg(long, value_name = "N", default_value_t = 1200)]
    context: usize,
    /// Words of the next part, over which attention is captured
    #[arg(long, value_name = "N", default_value_t = 250)]
    watch: usize,
    /// Minimum size of a chunk in words
    #[arg(long, value_name = "N", default_value_t = 24)]
    chunk: u32,
    /// Write a scatter plot of the chunks to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub fn run(options: &CompareBenchOptions, env: &Env) -> Result<()> {
    ensure!((1..=100_000).contains(&options.context), "--context must be 1 to 100000");
    ensure!((1..=100_000).contains(&options.watch), "--watch must be 1 to 100000");
    let settings = env.load_settings()?.settings;
    let conversations = options.format.read(&options.data)?;
    let paths = [env.model_file()?, env.model_library()?.find_model_file(Some(options.with.as_str()))?];
    let open =
        |path: &PathBuf| Llama::open(path, &LlamaOptions { context: Some(64), ..LlamaOptions::default() });
    let models = [open(&paths[0])?, open(&paths[1])?];
    // A word has at most three tokens in the languages of the datasets, names and numbers included.
    let needed = 3 * (options.context + options.watch) + 512;
    let params = |model: &Llama| -> Result<ContextParams> {
        let trained = model.weights().trained_context() as usize;
        Ok(ContextParams {
            tokens: u32::try_from(needed.min(trained))?,
            batch: 256,
            threads: env.models.thread_count().cast_signed(),
            sequences: 2,
            key_type: KvKeyType::F16,
            attention: AttentionSource::Softmax,
        })
    };
    let mut contexts = [
        LlamaContext::new(models[0].weights(), params(&models[0])?)?,
        LlamaContext::new(models[1].weights(), params(&models[1])?)?,
    ];
    let watch = wiring::attention_config(&settings);
    let rules = wiring::conversation_rules(&settings);
    let frame = |model: &Llama| ChatFormatter {
        template: model.info().template.clone(),
        system_prompt: rules.system_prompt.clone(),
        show_dates: false,
        names: SpeakerNames::default(),
    };
    let want =
        || TapConfig { rows: TapRows::All, layers: watch.layers.clone(), max: watch.max, ..TapConfig::off() };
    let [first, second] = &mut contexts;
    let mut compared_models = [
        ComparedModel { context: first, frame: frame(&models[0]), want: want() },
        ComparedModel { context: second, frame: frame(&models[1]), want: want() },
    ];
    let size = ChunkSize { min: options.chunk, max: options.chunk.saturating_mul(8) };
    let cut = |conversation| compare::cut_stretch(conversation, options.context, options.watch, size);
    let stretches: Vec<_> = conversations
        .iter()
        .filter_map(|conversation| Some((conversation, cut(conversation)?)))
        .take(options.conversations)
        .collect();
    ensure!(!stretches.is_empty(), "no conversation is long enough: use less with --context");
    let bar = Progress::new("conversations", stretches.len() as u64);
    let mut compared = Vec::new();
    for (done, (conversation, stretch)) in (1..).zip(&stretches) {
        compared.push(compare::compare(&conversation.name, stretch, &mut compared_models)?);
        bar.set_position(done);
    }
    drop(bar);
    let names = [models[0].info().name.as_str(), models[1].info().name.as_str()];
    if let Some(path) = &options.svg {
        std::fs::write(path, compare::plot(&compared, names))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let mean = |of: fn(&ChunkShares) -> f64| {
        let values: Vec<f64> = compared.iter().map(of).filter(|value| value.is_finite()).collect();
        values.iter().sum::<f64>() / values.len() as f64
    };
    let correlation = mean(ChunkShares::rank_correlation);
    let overlap = mean(ChunkShares::top_quarter_overlap);
    if env.json {
        let row = |shares: &ChunkShares| {
            json!({
                "conversation": shares.conversation,
                "chunks": shares.texts.len(),
                "rank_correlation": shares.rank_correlation(),
                "top_quarter_overlap": shares.top_quarter_overlap(),
            })
        };
        return print_json(&json!({
            "models": names,
            "rank_correlation": correlation,
            "top_quarter_overlap": overlap,
            "conversations": compared.iter().map(row).collect::<Vec<_>>(),
        }));
    }
    let mut out = format!(
        "{:<28}{:>8}{:>18}{:>22}\n",
        "conversation", "chunks", "rank correlation", "brightest quarter"
    );
    for shares in &compared {
        let _ = writeln!(
            out,
            "{:<28}{:>8}{:>18.3}{:>21.0}%",
            shares.conversation,
            shares.texts.len(),
            shares.rank_correlation(),
            shares.top_quarter_overlap() * 100.0
        );
    }
    let _ = write!(
        out,
        "{:<28}{:>8}{correlation:>18.3}{:>21.0}%\n\n{} and {}. The attention of both models to the same chunks, per token and \
         step;\nSpearman's correlation of the two orders, and how much of the brightest quarter they share.\n",
        "mean",
        "",
        overlap * 100.0,
        names[0],
        names[1],
    );
    print_stdout(&out)
}
