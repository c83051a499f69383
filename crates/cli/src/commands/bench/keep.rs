//! `halo bench keep`: what each policy keeps, and what it costs the model that the rest is gone.

use super::recall::Format;
use crate::commands::progress::Progress;
use crate::commands::{print, print_json};
use crate::{Common, models, wiring};
use anyhow::{Result, ensure};
use halo_bench::keep::{self, Lengths, Report, Setup, Sum, Way};
use halo_core::prune::Rank;
use halo_core::seams::Model;
use halo_engine::frame::{Frame, Names};
use halo_llama::attention::{Rows, Want};
use halo_llama::ffi::{Context, Shape};
use halo_llama::model::{Llama, Options as Running};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::PathBuf;

/// What to shrink.
#[derive(clap::Args)]
pub struct Options {
    /// The conversations: a file, or a folder
    #[arg(long, value_name = "FILE_OR_DIR")]
    data: PathBuf,
    /// How they are written
    #[arg(long, value_name = "FORMAT", default_value = "realtalk")]
    format: Format,
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
pub fn run(options: &Options, common: &Common) -> Result<()> {
    for (name, share) in [("--budget", options.budget), ("--recent", options.recent)] {
        ensure!((0.01..=0.99).contains(&share), "{name} takes a share from 0.01 to 0.99");
    }
    ensure!((1..=1000).contains(&options.samples), "--samples takes 1 up to 1000");
    ensure!((2..=4096).contains(&options.next), "--next takes 2 up to 4096");
    let settings = common.load(Vec::new())?.settings;
    let conversations = options.format.read(&options.data)?;
    let path = models::find(common, common.model.as_deref())?;
    let model = Llama::open(&path, &Running { context: Some(64), ..Running::default() })?;
    let (wanted, trained) = (options.context + options.watch, model.weights().trained_context() as usize);
    // What came next is read beside what is in memory.
    let most = (2 * wanted).min(trained.saturating_sub(options.next + 64));
    ensure!(wanted <= most, "--context {}: the model sees no more than {trained} tokens", options.context);
    let lengths = Lengths { history: options.context, watched: options.watch, next: options.next, most };
    let shape = Shape {
        tokens: u32::try_from((most + options.next + 64).min(trained))?,
        batch: 256,
        threads: common.threads().cast_signed(),
        sequences: 2,
    };
    let mut context = Context::new(model.weights(), shape)?;
    let watch = wiring::watch(&settings);
    let rules = wiring::rules(&settings);
    let mut setup = Setup {
        context: &mut context,
        frame: Frame {
            template: model.info().template.clone(),
            system: rules.system.clone(),
            dates: false,
            names: Names::default(),
        },
        rules: rules.context,
        want: Want { rows: Rows::All, layers: watch.layers, max: watch.max, ..Want::nothing() },
        lengths,
        samples: options.samples,
        budget: options.budget,
        recent: options.recent,
        one_by_one: !options.policies_only,
    };
    let mut report = Report::default();
    let bar = Progress::new("stretches", (conversations.len() * options.samples) as u64);
    for conversation in &conversations {
        keep::measure(conversation, &mut setup, &mut report, &mut |n| bar.at(n))?;
    }
    drop(bar);
    ensure!(report.samples > 0, "no conversation is long enough: ask for less with --context");
    if common.json {
        return print_json(&as_json(&report, options));
    }
    print(&table(&report, options))
}

fn name(rank: Rank) -> &'static str {
    match rank {
        Rank::Peak => "peak",
        Rank::Mean => "mean",
        Rank::Top4 => "top4",
        Rank::Votes => "votes",
        Rank::Sum => "sum",
        Rank::Share => "share",
    }
}

fn as_json(report: &Report, options: &Options) -> Value {
    let policies = report.kept.iter().map(|kept| {
        let row = json!({
            "kl": kept.kl.mean(),
            "nll": kept.nll.mean(),
            "evidence_kept": kept.evidence.mean(),
            "tokens": kept.tokens.mean(),
        });
        (kept.policy.name().to_owned(), row)
    });
    let agreement = report.agreement.iter().map(|(rank, sum)| (name(*rank).to_owned(), json!(sum.mean())));
    json!({
        "samples": report.samples,
        "window": report.window.mean(),
        "budget": options.budget,
        "recent": options.recent,
        "questions": report.questions,
        "nll_full": report.nll.mean(),
        "policies": policies.collect::<Map<_, _>>(),
        "rank_correlation": agreement.collect::<Map<_, _>>(),
        "rank_correlation_ceiling": report.ceiling.mean().map(f64::sqrt),
    })
}

fn table(report: &Report, options: &Options) -> String {
    let number =
        |sum: &Sum, digits: usize| sum.mean().map_or_else(|| "–".into(), |n| format!("{n:.digits$}"));
    let fifo = report.kept.iter().find(|kept| kept.policy == Way::Fifo).and_then(|kept| kept.kl.mean());
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
    for kept in &report.kept {
        let ratio =
            kept.kl.mean().zip(fifo).map_or_else(String::new, |(kl, fifo)| format!("{:.2}", kl / fifo));
        let _ = writeln!(
            out,
            "{:<12}{:>8}{:>10}{ratio:>11}{:>9}{:>16}",
            kept.policy.name(),
            number(&kept.tokens, 0),
            number(&kept.kl, 4),
            number(&kept.nll, 4),
            number(&kept.evidence, 2),
        );
    }
    if !report.agreement.is_empty() {
        out.push_str("\nhow the ranking of chunks agrees with the damage of leaving each out (Spearman)\n");
        for (rank, sum) in &report.agreement {
            let _ = writeln!(out, "  {:<10}{:>8}", name(*rank), number(sum, 3));
        }
        let ceiling = report.ceiling.mean().map_or(f64::NAN, f64::sqrt);
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
