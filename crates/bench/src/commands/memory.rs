//! `halo-bench memory`: the value of memories, and the delay that forming one causes.

use super::recall::DatasetFormatArg;
use anyhow::{Result, ensure};
use halo_bench::memory::{self, MemoryBenchReport, MemoryBenchSetup};
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use halo_cli::wiring;
use halo_core::model::Model;
use halo_engine::chat_format::{ChatFormatter, SpeakerNames};
use halo_llama::ffi::{AttentionSource, ContextParams, KvKeyType, LlamaContext};
use halo_llama::model::{Llama, LlamaOptions as Running};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

#[derive(clap::Args)]
pub struct MemoryBenchOptions {
    /// Dataset: a file or a folder
    #[arg(long, value_name = "FILE_OR_DIR")]
    data: PathBuf,
    /// Format of the dataset files
    #[arg(long, value_name = "FORMAT", default_value = "realtalk")]
    format: DatasetFormatArg,
    /// Stretches per conversation of the dataset
    #[arg(long, value_name = "N", default_value_t = 1)]
    samples: usize,
    /// Tokens before the range
    #[arg(long, value_name = "N", default_value_t = 500)]
    before: usize,
    /// Tokens of the range
    #[arg(long, value_name = "N", default_value_t = 600)]
    range: usize,
    /// Tokens between the range and the continuation
    #[arg(long, value_name = "N", default_value_t = 250)]
    between: usize,
    /// Tokens of the continuation
    #[arg(long, value_name = "N", default_value_t = 160)]
    next: usize,
    /// Number of messages that are sent while a memory is formed
    #[arg(long, value_name = "N", default_value_t = 12)]
    rounds: usize,
    /// Print the memories, too
    #[arg(long)]
    texts: bool,
}

pub fn run(options: &MemoryBenchOptions, env: &Env) -> Result<()> {
    ensure!((1..=1000).contains(&options.samples), "--samples must be 1 to 1000");
    ensure!((2..=4096).contains(&options.next), "--next must be 2 to 4096");
    let settings = env.load_settings()?.settings;
    let conversations = options.format.read(&options.data)?;
    let path = env.model_file()?;
    let running = Running { context: Some(4096), threads: env.models.thread_count(), ..Running::default() };
    let mut model = Llama::open(&path, &running)?;
    let rules = wiring::conversation_rules(&settings);
    let words = rules.system_prompt.clone();
    let shape = ContextParams {
        tokens: 6144,
        batch: 256,
        threads: env.models.thread_count().cast_signed(),
        sequences: 1,
        key_type: KvKeyType::F16,
        attention: AttentionSource::Softmax,
    };
    let mut context = LlamaContext::new(model.weights(), shape)?;
    let mut setup = MemoryBenchSetup {
        context: &mut context,
        frame: ChatFormatter {
            template: model.info().template.clone(),
            system_prompt: words,
            show_dates: false,
            names: SpeakerNames::default(),
        },
        rules: rules.context,
        lengths: [options.before, options.range, options.between, options.next],
        samples: options.samples,
        max_memory_tokens: settings.memory_tokens.as_usize(),
    };
    let mut report = MemoryBenchReport::default();
    let bar = Progress::new("stretches", (conversations.len() * options.samples) as u64);
    for conversation in &conversations {
        memory::measure(conversation, &mut setup, &mut report, &mut |n| bar.set_position(n))?;
    }
    drop(bar);
    ensure!(
        report.samples > 0,
        "no conversation is long enough: use less with --before, --range or --between"
    );
    drop(context);
    let text = "The gun on the wall is called Betsy, and nobody has fired it since the war. ".repeat(50);
    let first = memory::measure_first_token(&mut model, &text, options.rounds.max(2))?;
    let median = |took: &[Duration]| {
        let mut ms: Vec<f64> = took.iter().map(|took| took.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        ms[ms.len() / 2]
    };
    let (alone, forming) = (median(&first.alone), median(&first.while_forming));
    if env.json {
        let by = report.by_replacement.iter().map(|(what, nll, tokens)| {
            (what.name().to_owned(), json!({ "nll": nll.mean(), "tokens": tokens.mean() }))
        });
        let texts: Vec<Value> = (report.texts.iter().filter(|_| options.texts))
            .map(|(lived, fresh)| json!({ "lived": lived, "fresh": fresh }))
            .collect();
        return print_json(&json!({
            "samples": report.samples,
            "by": by.collect::<Map<_, _>>(),
            "lived_wins": report.in_context_wins,
            "instruction_last_wins": report.instruction_last_wins,
            "first_token_ms": { "alone": alone, "forming": forming, "ratio": forming / alone, "broken_off": median(&first.preempt_wait) },
            "texts": texts,
        }));
    }
    let mut out = format!("{:<20}{:>10}{:>10}\n", "replacement", "tokens", "NLL");
    for (what, nll, tokens) in &report.by_replacement {
        let (nll, tokens) = (nll.mean().unwrap_or(f64::NAN), tokens.mean().unwrap_or(f64::NAN));
        let _ = writeln!(out, "{:<20}{tokens:>10.0}{nll:>10.4}", what.name());
    }
    let _ = writeln!(
        out,
        "\n{} stretches. NLL: loss on the continuation, in nats per token. The memory from the fork was better than\n\
         the fresh one in {}, and than the one whose instruction comes first in {}.\n\
         First token of the next answer: {alone:.0} ms alone, {forming:.0} ms while a memory is formed ({:.2}).",
        report.samples,
        report.in_context_wins,
        report.instruction_last_wins,
        forming / alone
    );
    for (lived, fresh) in report.texts.iter().filter(|_| options.texts) {
        let _ = writeln!(out, "\nlived: {lived}\nfresh: {fresh}");
    }
    print_stdout(&out)
}
