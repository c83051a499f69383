//! `halo-bench keep`: what each pruning policy keeps, and the cost of pruning the rest.

use super::recall::DatasetFormatArg;
use anyhow::{Result, ensure};
use halo_bench::prune::{
    self, ComparedPolicy, MeanAccumulator, PruneBenchReport, PruneBenchSetup, RowSubset, SampleLengths,
};
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use halo_cli::wiring;
use halo_core::model::Model;
use halo_core::prune::RankBy;
use halo_engine::chat_format::{ChatFormatter, SpeakerNames};
use halo_llama::attention::{TapConfig, TapRows};
use halo_llama::ffi::{AttentionSource, ContextParams, KvKeyType, LlamaContext};
use halo_llama::model::{Llama, LlamaOptions as Running};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct PruneBenchOptions {
    /// Dataset: a file or a folder
    #[arg(long, value_name = "FILE_OR_DIR")]
    data: PathBuf,
    /// Format of the dataset files
    #[arg(long, value_name = "FORMAT", default_value = "realtalk")]
    format: DatasetFormatArg,
    /// Share of the window that is kept
    #[arg(long, value_name = "SHARE", default_value_t = 0.25)]
    budget: f64,
    /// Share of the budget that is reserved for recent tokens
    #[arg(long, value_name = "SHARE", default_value_t = 0.25)]
    recent: f64,
    /// Stretches per conversation of the dataset
    #[arg(long, value_name = "N", default_value_t = 1)]
    samples: usize,
    /// Tokens of a stretch that are prefilled first
    #[arg(long, value_name = "N", default_value_t = 2000)]
    context: usize,
    /// Tokens of the next part, over which attention is captured
    #[arg(long, value_name = "N", default_value_t = 400)]
    watch: usize,
    /// Tokens of the continuation, on which the cost is measured
    #[arg(long, value_name = "N", default_value_t = 192)]
    next: usize,
    /// Skip removing every chunk once, which takes most of the time; no agreement is reported
    #[arg(long)]
    policies_only: bool,
    /// Compare brightness from the attention rows of every Nth token only
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    stride: Vec<usize>,
    /// Compare brightness from rows that are the mean of so many layers, evenly spaced; 0: all. With --stride, each with each
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    layers: Vec<usize>,
}

impl PruneBenchOptions {
    /// Each stride with each number of layers.
    fn row_subsets(&self) -> Vec<RowSubset> {
        if self.stride.is_empty() && self.layers.is_empty() {
            return Vec::new();
        }
        let or = |list: &[usize], one: usize| if list.is_empty() { vec![one] } else { list.to_vec() };
        let strides = or(&self.stride, 1);
        let subset =
            |layers: usize, stride: usize| RowSubset { stride, layers: (layers > 0).then_some(layers) };
        or(&self.layers, 0)
            .iter()
            .flat_map(|&layers| strides.iter().map(move |&n| subset(layers, n)))
            .collect()
    }
}

pub fn run(options: &PruneBenchOptions, env: &Env) -> Result<()> {
    for (name, share) in [("--budget", options.budget), ("--recent", options.recent)] {
        ensure!((0.01..=0.99).contains(&share), "{name} must be a share from 0.01 to 0.99");
    }
    ensure!((1..=1000).contains(&options.samples), "--samples must be 1 to 1000");
    ensure!((2..=4096).contains(&options.next), "--next must be 2 to 4096");
    ensure!(options.layers.iter().all(|&layers| layers <= 1024), "--layers must be 0 to 1024");
    ensure!(options.stride.iter().all(|stride| (1..=1024).contains(stride)), "--stride must be 1 to 1024");
    let settings = env.load_settings()?.settings;
    let conversations = options.format.read(&options.data)?;
    let path = env.model_file()?;
    let model = Llama::open(&path, &Running { context: Some(64), ..Running::default() })?;
    let (needed, trained) = (options.context + options.watch, model.weights().trained_context() as usize);
    // The continuation is decoded beside the window.
    let limit = (2 * needed).min(trained.saturating_sub(options.next + 64));
    ensure!(needed <= limit, "--context {}: the model's context length is {trained} tokens", options.context);
    let lengths = SampleLengths {
        history: options.context,
        observed: options.watch,
        next: options.next,
        max_window: limit,
    };
    let shape = ContextParams {
        tokens: u32::try_from((limit + options.next + 64).min(trained))?,
        batch: 256,
        threads: env.models.thread_count().cast_signed(),
        sequences: 2,
        key_type: KvKeyType::F16,
        attention: AttentionSource::Softmax,
    };
    let mut context = LlamaContext::new(model.weights(), shape)?;
    let watch = wiring::attention_config(&settings);
    let rules = wiring::conversation_rules(&settings);
    let mut setup = PruneBenchSetup {
        context: &mut context,
        frame: ChatFormatter {
            template: model.info().template.clone(),
            system_prompt: rules.system_prompt.clone(),
            show_dates: false,
            names: SpeakerNames::default(),
        },
        rules: rules.context,
        want: TapConfig { rows: TapRows::All, layers: watch.layers, max: watch.max, ..TapConfig::off() },
        lengths,
        samples: options.samples,
        budget: options.budget,
        recent: options.recent,
        ablate_each_chunk: !options.policies_only,
        row_subsets: options.row_subsets(),
    };
    let mut report = PruneBenchReport::default();
    let bar = Progress::new("stretches", (conversations.len() * options.samples) as u64);
    for conversation in &conversations {
        prune::measure(conversation, &mut setup, &mut report, &mut |n| bar.set_position(n))?;
    }
    drop(bar);
    ensure!(report.samples > 0, "no conversation is long enough: use less with --context");
    if env.json {
        return print_json(&report_json(&report, options));
    }
    print_stdout(&report_table(&report, options))
}

fn rank_name(rank: RankBy) -> &'static str {
    match rank {
        RankBy::Peak => "peak",
        RankBy::Mean => "mean",
        RankBy::Top4 => "top4",
        RankBy::Votes => "votes",
        RankBy::Sum => "sum",
        RankBy::Share => "share",
    }
}

fn report_json(report: &PruneBenchReport, options: &PruneBenchOptions) -> Value {
    let policies = report.by_policy.iter().map(|result| {
        let row = json!({
            "kl": result.kl.mean(),
            "nll": result.nll.mean(),
            "evidence_kept": result.evidence_kept.mean(),
            "tokens": result.tokens.mean(),
        });
        (result.policy.name().to_owned(), row)
    });
    let agreement =
        report.rank_agreement.iter().map(|(rank, sum)| (rank_name(*rank).to_owned(), json!(sum.mean())));
    let row_subsets = report.by_row_subset.iter().map(|result| {
        json!({
            "stride": result.subset.stride,
            "layers": result.subset.layers,
            "rank_correlation": result.rank_correlation.mean(),
            "kl": result.kl.mean(),
            "evidence_kept": result.evidence_kept.mean(),
            "same_chunks": result.same_chunks.mean(),
        })
    });
    json!({
        "row_subsets": row_subsets.collect::<Vec<_>>(),
        "samples": report.samples,
        "window": report.window.mean(),
        "budget": options.budget,
        "recent": options.recent,
        "questions": report.questions,
        "nll_full": report.nll.mean(),
        "policies": policies.collect::<Map<_, _>>(),
        "rank_correlation": agreement.collect::<Map<_, _>>(),
        "rank_correlation_ceiling": report.agreement_ceiling.mean().map(f64::sqrt),
    })
}

fn report_table(report: &PruneBenchReport, options: &PruneBenchOptions) -> String {
    let number = |sum: &MeanAccumulator, digits: usize| {
        sum.mean().map_or_else(|| "–".into(), |n| format!("{n:.digits$}"))
    };
    let fifo = report
        .by_policy
        .iter()
        .find(|result| result.policy == ComparedPolicy::Fifo)
        .and_then(|result| result.kl.mean());
    let mut out = format!(
        "{:<12}{:>8}{:>10}{:>11}{:>9}{:>16}\n",
        "policy", "tokens", "KL", "of fifo's", "NLL", "evidence kept"
    );
    let _ = writeln!(
        out,
        "{:<12}{:>8}{:>10}{:>11}{:>9}{:>16}",
        "all",
        number(&report.window, 0),
        "0",
        "",
        number(&report.nll, 4),
        "1.00"
    );
    for result in &report.by_policy {
        let ratio =
            result.kl.mean().zip(fifo).map_or_else(String::new, |(kl, fifo)| format!("{:.2}", kl / fifo));
        let _ = writeln!(
            out,
            "{:<12}{:>8}{:>10}{ratio:>11}{:>9}{:>16}",
            result.policy.name(),
            number(&result.tokens, 0),
            number(&result.kl, 4),
            number(&result.nll, 4),
            number(&result.evidence_kept, 2),
        );
    }
    for result in &report.by_row_subset {
        let layers = result.subset.layers.map_or("all".to_owned(), |count| count.to_string());
        let _ = writeln!(
            out,
            "brightness, a row for every {}. token, {layers} layers: rank correlation {}, KL {}, evidence kept {}, the same \
             chunks {}",
            result.subset.stride,
            number(&result.rank_correlation, 3),
            number(&result.kl, 4),
            number(&result.evidence_kept, 2),
            number(&result.same_chunks, 2),
        );
    }
    if !report.rank_agreement.is_empty() {
        out.push_str(
            "\nrank correlation of chunk rankings with the damage of removing each chunk (Spearman)\n",
        );
        for (rank, sum) in &report.rank_agreement {
            let _ = writeln!(out, "  {:<10}{:>8}", rank_name(*rank), number(sum, 3));
        }
        let ceiling = report.agreement_ceiling.mean().map_or(f64::NAN, f64::sqrt);
        let _ = writeln!(
            out,
            "  ceiling   {ceiling:>8.3}  (reliability of the damage, measured on these {} tokens)",
            options.next
        );
    }
    let _ = write!(
        out,
        "\n{} stretches, {} questions. KL: divergence from the predictions with the full window on the {} tokens of the\n\
         continuation, in nats; NLL: loss on them. All policies keep the same sinks and the same recent tokens, {:.0} % of\n\
         the budget. H2O, SnapKV and TOVA rank the same whole chunks here; in their papers they choose single tokens.\n",
        report.samples,
        report.questions,
        options.next,
        options.recent * 100.0
    );
    out
}
