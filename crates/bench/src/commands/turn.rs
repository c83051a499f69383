//! `halo-bench turn` and `halo-bench needle`: the stages of a turn, and resurrecting a fact from the beginning.

use anyhow::{Context, Result, ensure};
use halo_bench::needle::{self, NeedleBenchReport, NeedlePolicy, PromptForm};
use halo_bench::turn::{self, ScriptedAttentionModel, TurnBenchReport};
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use halo_cli::settings::Settings;
use halo_cli::settings::value::AutoOr;
use halo_cli::wiring;
use halo_core::model::Model;
use halo_core::prune::{PrunePolicy, RankBy, TieBreak};
use halo_engine::event::TurnStage;
use halo_engine::rules::{AutoSizes, ConversationRules};
use halo_llama::kv_archive::KvArchiveLimits;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::Path;

#[derive(clap::Args)]
pub struct TurnBenchOptions {
    /// Tokens of the history; several lengths are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1000, 100_000, 1_000_000])]
    history: Vec<usize>,
    /// Tokens in the context window of the turns in which only the time outside the model is measured
    #[arg(long, value_name = "N", default_value_t = 30_000)]
    live: usize,
}

pub fn turn(options: &TurnBenchOptions, env: &Env) -> Result<()> {
    ensure!(
        options.history.iter().all(|n| (500..=20_000_000).contains(n)),
        "--history must be 500 to 20000000"
    );
    ensure!((100..=1_000_000).contains(&options.live), "--live must be 100 to 1000000");
    let settings = env.load_settings()?.settings;
    let rules = deterministic_rules(&settings);
    let embedder = wiring::open_embedder(env, &settings)?;
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let model =
        wiring::open_llama(env, &wiring::one_answer_at_a_time(&settings), kv_archive_limits(folder.path()))?;
    let mut reports = Vec::new();
    for &history in &options.history {
        let bar = Progress::new("measuring", 0);
        let progress = &mut |done, all| bar.set_progress(done, all);
        reports.push(turn::measure(&model, embedder.as_ref(), &rules, history, progress)?);
    }
    let bar = Progress::new("measuring", 0);
    let rote = ScriptedAttentionModel::new(2 * options.live + 10_000);
    let (own_rules, past) = (with_window(&rules, options.live), options.live + options.live / 4);
    let own =
        turn::measure(&rote, embedder.as_ref(), &own_rules, past, &mut |n, of| bar.set_progress(n, of))?;
    drop(bar);
    // The model's time per token in a larger window would be higher.
    let slowest = reports.iter().map(TurnBenchReport::model_ms_per_token).fold(0.0, f64::max);
    let share = own.overhead_ms() / (own.overhead_ms() + slowest * own.tokens);
    if env.json {
        return print_json(&json!({
            "model": model.info().name,
            "turns": reports.iter().map(report_json).collect::<Vec<_>>(),
            "own": {
                "live": own.live,
                "per_token_ms": own.overhead_ms_per_token(),
                "per_turn_ms": own.overhead_ms(),
                "stages_ms": stages_json(&own),
                "model_ms_per_token": slowest,
                "share": share,
            },
        }));
    }
    let mut out = format!("{:>10}{:>8}{:>14}", "history", "window", "first token");
    let shown: Vec<TurnStage> =
        TurnStage::ALL.into_iter().filter(|s| reports.iter().any(|r| r.stage_ms(*s) > 0.0)).collect();
    for stage in &shown {
        let _ = write!(out, "{:>10}", stage.name());
    }
    let _ = writeln!(out, "{:>10}{:>10}", "own/tok", "own share");
    for report in reports.iter().chain([&own]) {
        let _ = write!(out, "{:>10}{:>8}{:>11.1} ms", report.history, report.live, report.first_token_ms);
        for &stage in &shown {
            let _ = write!(out, "{:>10.1}", report.stage_ms(stage));
        }
        let share = if std::ptr::eq(report, &own) { share } else { report.overhead_ms() / report.turn_ms() };
        let _ = writeln!(out, "{:>10.3}{:>9.1} %", report.overhead_ms_per_token(), share * 100.0);
    }
    let _ = write!(
        out,
        "\nMilliseconds; median of ten turns each, with answers of up to {} tokens. The last line uses a model that takes no time,\n\
         in a window of {} tokens: all of its time is Halo's own. Its share is relative to the {slowest:.1} ms that {} took per\n\
         token in the windows above. Own is the time outside prefill and generation: storing, searching, scoring, pruning,\n\
         indexing (with the embedder), and saving KV cells.\n",
        rules.sampling.max_tokens,
        own.live,
        model.info().name,
    );
    print_stdout(&out)
}

fn stages_json(report: &TurnBenchReport) -> Value {
    let all = report.stages.iter().map(|(stage, ms)| (stage.name().to_owned(), json!(ms)));
    Value::Object(all.collect::<Map<_, _>>())
}

fn report_json(report: &TurnBenchReport) -> Value {
    json!({
        "history": report.history,
        "live": report.live,
        "first_token_ms": report.first_token_ms,
        "turn_ms": report.turn_ms(),
        "stages_ms": stages_json(report),
        "tokens": report.tokens,
        "returned": report.resurrected,
        "own_ms": report.overhead_ms(),
        "own_share": report.overhead_ms() / report.turn_ms(),
        "own_ms_per_token": report.overhead_ms_per_token(),
        "model_ms_per_token": report.model_ms_per_token(),
    })
}

#[derive(clap::Args)]
pub struct NeedleBenchOptions {
    /// Tokens of the history before the questions; several lengths are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [8000, 100_000])]
    history: Vec<usize>,
    /// Tokens in the context window
    #[arg(long, value_name = "N", default_value_t = 1024)]
    window: usize,
    /// Only policies whose names begin with one of these
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    policies: Vec<String>,
    /// Write questions and answers as plain text, for a model that was not trained to chat
    #[arg(long)]
    base: bool,
}

pub fn needle(options: &NeedleBenchOptions, env: &Env) -> Result<()> {
    ensure!(
        options.history.iter().all(|n| (500..=20_000_000).contains(n)),
        "--history must be 500 to 20000000"
    );
    ensure!(options.window >= 400, "--window must be at least 400 tokens");
    let settings = env.load_settings()?.settings;
    let embedder = wiring::open_embedder(env, &settings)?.context(
        "no embedder is installed: download one with `halo models pull e5-small`, or name one with --set recall.embedder=NAME",
    )?;
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let model =
        wiring::open_llama(env, &wiring::one_answer_at_a_time(&settings), kv_archive_limits(folder.path()))?;
    let mut rules = deterministic_rules(&settings);
    rules.context.max_tokens = options.window;
    rules.context.recent = options.window / 4;
    rules.reserved_tokens = options.window / 4;
    rules.sampling.temperature = 0.0;
    rules.sampling.max_tokens = rules.sampling.max_tokens.min(24);
    let policies = needle_policies(rules.context.policy);
    let is_selected = |policy: &&NeedlePolicy| {
        options.policies.is_empty()
            || options.policies.iter().any(|name| policy.name.starts_with(name.as_str()))
    };
    let policies: Vec<&NeedlePolicy> = policies.iter().filter(is_selected).collect();
    ensure!(!policies.is_empty(), "--policies: use brightness, fifo, window or random");
    let form = if options.base { PromptForm::BaseModel } else { PromptForm::ChatTemplate };
    let mut rows = Vec::new();
    let mut out = format!(
        "{:>9}  {:<30}{:>7}{:>10}{:>10}{:>11}{:>10}{:>14}\n",
        "history", "policy", "asked", "pruned", "back", "position", "answered", "fact alone"
    );
    for &history in &options.history {
        for &policy in &policies {
            let bar = Progress::new(policy.name, 0);
            let report = needle::measure(&model, &embedder, &rules, policy, form, history, &mut |n, of| {
                bar.set_progress(n, of);
            })?;
            drop(bar);
            rows.push(needle_json(history, options.window, policy, &report));
            let _ = writeln!(
                out,
                "{history:>9}  {:<30}{:>7}{:>10}{:>10}{:>11}{:>10}{:>14}",
                policy.name,
                report.questions,
                report.pruned,
                report.resurrected,
                report.own_position,
                report.answered,
                report.answered_oracle
            );
        }
    }
    if env.json {
        return print_json(&json!(rows));
    }
    let _ = write!(
        out,
        "\nA window of {} tokens. Up to {} tokens the model generates all answers; longer histories are synthetic. \"fact alone\" is the\n\
         same question with only the fact before it.\n",
        options.window,
        needle::MAX_GENERATED_HISTORY
    );
    print_stdout(&out)
}

/// The policies that are compared: each with recall, and two without.
fn needle_policies(configured: PrunePolicy) -> [NeedlePolicy; 6] {
    let brightness = match configured {
        PrunePolicy::Brightness { .. } => configured,
        _ => PrunePolicy::Brightness { rank: RankBy::Top4, ties: TieBreak::Dimmer },
    };
    let policy = |name, policy, recall| NeedlePolicy { name, policy, recall };
    [
        policy("brightness", brightness, true),
        policy("fifo", PrunePolicy::Fifo, true),
        policy("window", PrunePolicy::Window, true),
        policy("random", PrunePolicy::Random { seed: 1 }, true),
        policy("brightness, nothing returns", brightness, false),
        policy("fifo, nothing returns", PrunePolicy::Fifo, false),
    ]
}

fn needle_json(history: usize, window: usize, policy: &NeedlePolicy, report: &NeedleBenchReport) -> Value {
    json!({
        "history": history,
        "window": window,
        "policy": policy.name,
        "lived": history <= needle::MAX_GENERATED_HISTORY,
        "asked": report.questions,
        "had_left": report.pruned,
        "returned": report.resurrected,
        "own_position": report.own_position,
        "answered": report.answered,
        "answered_oracle": report.answered_oracle,
    })
}

/// The window of turns that are measured, where the settings leave it to the program.
const MEASURED_WINDOW: usize = 2000;

/// The longest answer of turns that are measured.
const MEASURED_ANSWER: usize = 50;

/// Rules of the settings, with a fixed seed and fixed sizes.
fn deterministic_rules(settings: &Settings) -> ConversationRules {
    let mut rules = wiring::conversation_rules(settings);
    if settings.generation_seed == AutoOr::Auto {
        rules.sampling.seed = 0;
    }
    rules.tools = None;
    // Measurements compare with each other: the window does not follow the speed, and an answer stays short.
    rules.set_auto_sizes(MEASURED_WINDOW);
    rules.auto_sizes = AutoSizes::default();
    rules.sampling.max_tokens = rules.sampling.max_tokens.min(MEASURED_ANSWER);
    rules
}

/// The same rules with a window of so many tokens after each turn.
fn with_window(rules: &ConversationRules, live: usize) -> ConversationRules {
    let mut rules = rules.clone();
    rules.reserved_tokens = live / 4;
    rules.context.max_tokens = live + rules.reserved_tokens + rules.sampling.max_tokens;
    rules.context.recent = live / 4;
    rules
}

/// Limits of the KV archive for the benchmark.
fn kv_archive_limits(folder: &Path) -> KvArchiveLimits {
    KvArchiveLimits { ram: 256 << 20, disk: 4 << 30, folder: Some(folder.to_owned()) }
}
