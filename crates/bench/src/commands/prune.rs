//! `halo-bench keep`: what each policy keeps, and what it costs the model that the rest is gone.

use super::recall::DatasetFormatArg;
use anyhow::{Result, ensure};
use halo_bench::prune::{
    self, ComparedPolicy, MeanAccumulator, PruneBenchReport, PruneBenchSetup, SampleLengths,
};
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use halo_cli::wiring;
use halo_core::model::Model;
use halo_core::prune::RankBy;
use halo_engine::chat_format::{ChatFormatter, SpeakerNames};
use halo_llama::attention::{TapConfig, TapRows};
use halo_llama::ffi::{ContextParams, LlamaContext};
use halo_llama::model::{Llama, LlamaOptions as Running};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::PathBuf;

/// What to shrink.
#[derive(clap::Args)]
pub struct PruneBenchOptions {
    /// The conversations: a file, or a folder
    #[arg(long, value_name = "FILE_OR_DIR")]
    data: PathBuf,
    /// How they are written
    #[arg(long, value_name = "FORMAT", default_value = "realtalk")]
    format: DatasetFormatArg,
    /// The share of the window that stays
    #[arg(long, value_name = "SHARE", default_value_t = 0.25)]
    budget: f64,
    /// The share of what stays that is kept for being recent
    #[arg(long, value_name = "SHARE", default_value_t = 0.25)]
    recent: f64,
    /// Stretches that are taken of each conversation
    #[arg(long, value_name = "N", default_value_t = 1)]
    samples: usize,
    /// Tokens of a stretch that are read first
    #[arg(long, value_name = "N", default_value_t = 2000)]
    context: usize,
    /// Tokens that are said next, while the model is watched
    #[arg(long, value_name = "N", default_value_t = 400)]
    watch: usize,
    /// Tokens that come then, by which the damage is told
    #[arg(long, value_name = "N", default_value_t = 192)]
    next: usize,
    /// Does not leave every chunk out once, which takes most of the time: no agreement is told
    #[arg(long)]
    policies_only: bool,
}

/// Shrinks windows.
pub fn run(options: &PruneBenchOptions, env: &Env) -> Result<()> {
    for (name, share) in [("--budget", options.budget), ("--recent", options.recent)] {
        ensure!((0.01..=0.99).contains(&share), "{name} takes a share from 0.01 to 0.99");
    }
    ensure!((1..=1000).contains(&options.samples), "--samples takes 1 up to 1000");
    ensure!((2..=4096).contains(&options.next), "--next takes 2 up to 4096");
    let settings = env.load_settings()?.settings;
    let conversations = options.format.read(&options.data)?;
    let path = env.model_file()?;
    let model = Llama::open(&path, &Running { context: Some(64), ..Running::default() })?;
    let (wanted, trained) = (options.context + options.watch, model.weights().trained_context() as usize);
    // What came next is read beside what is in memory.
    let most = (2 * wanted).min(trained.saturating_sub(options.next + 64));
    ensure!(wanted <= most, "--context {}: the model sees no more than {trained} tokens", options.context);
    let lengths = SampleLengths {
        history: options.context,
        observed: options.watch,
        next: options.next,
        max_window: most,
    };
    let shape = ContextParams {
        tokens: u32::try_from((most + options.next + 64).min(trained))?,
        batch: 256,
        threads: env.models.thread_count().cast_signed(),
        sequences: 2,
    };
    let mut context = LlamaContext::new(model.weights(), shape)?;
    let watch = wiring::attention_config(&settings);
    let rules = wiring::engine_config(&settings);
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
    };
    let mut report = PruneBenchReport::default();
    let bar = Progress::new("stretches", (conversations.len() * options.samples) as u64);
    for conversation in &conversations {
        prune::measure(conversation, &mut setup, &mut report, &mut |n| bar.set_position(n))?;
    }
    drop(bar);
    ensure!(report.samples > 0, "no conversation is long enough: ask for less with --context");
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
    let policies = report.by_policy.iter().map(|kept| {
        let row = json!({
            "kl": kept.kl.mean(),
            "nll": kept.nll.mean(),
            "evidence_kept": kept.evidence_kept.mean(),
            "tokens": kept.tokens.mean(),
        });
        (kept.policy.name().to_owned(), row)
    });
    let agreement =
        report.rank_agreement.iter().map(|(rank, sum)| (rank_name(*rank).to_owned(), json!(sum.mean())));
    json!({
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
        .find(|kept| kept.policy == ComparedPolicy::Fifo)
        .and_then(|kept| kept.kl.mean());
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
    for kept in &report.by_policy {
        let ratio =
            kept.kl.mean().zip(fifo).map_or_else(String::new, |(kl, fifo)| format!("{:.2}", kl / fifo));
        let _ = writeln!(
            out,
            "{:<12}{:>8}{:>10}{ratio:>11}{:>9}{:>16}",
            kept.policy.name(),
            number(&kept.tokens, 0),
            number(&kept.kl, 4),
            number(&kept.nll, 4),
            number(&kept.evidence_kept, 2),
        );
    }
    if !report.rank_agreement.is_empty() {
        out.push_str("\nhow the ranking of chunks agrees with the damage of leaving each out (Spearman)\n");
        for (rank, sum) in &report.rank_agreement {
            let _ = writeln!(out, "  {:<10}{:>8}", rank_name(*rank), number(sum, 3));
        }
        let ceiling = report.agreement_ceiling.mean().map_or(f64::NAN, f64::sqrt);
        let _ = writeln!(
            out,
            "  at most   {ceiling:>8.3}  (the damage, measured on these {} tokens, agrees with itself no better)",
            options.next
        );
    }
    let _ = write!(
        out,
        "\n{} stretches, {} questions. KL: how far the model's guesses at the {} tokens that really came next are from those with the\n\
         whole window, in nats; NLL: how unlikely they find them. All policies keep the same first tokens and the same latest, {:.0} % of\n\
         what stays. H2O, SnapKV and TOVA rank the same whole chunks here; in their papers they choose single tokens.\n",
        report.samples,
        report.questions,
        options.next,
        options.recent * 100.0
    );
    out
}
