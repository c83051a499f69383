//! `halo bench turn` and `halo bench needle`: what a turn takes, and whether what was said first is there when it is asked
//! for last.

use crate::commands::progress::Progress;
use crate::commands::{print, print_json, search};
use crate::settings::Settings;
use crate::settings::value::Auto;
use crate::{Common, wiring};
use anyhow::{Context, Result, ensure};
use halo_bench::needle::{self, Way};
use halo_bench::turn::{self, Report, Rote};
use halo_core::prune::{Policy, Rank, Ties};
use halo_core::seams::Model;
use halo_engine::event::Stage;
use halo_engine::rules::Rules;
use halo_llama::graveyard::Room;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::Path;

/// At which lengths to measure turns.
#[derive(clap::Args)]
pub struct TurnOptions {
    /// Tokens ever said before; several lengths are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1000, 100_000, 1_000_000])]
    history: Vec<usize>,
    /// Tokens in the window of the turns in which only what is not the model's is measured
    #[arg(long, value_name = "N", default_value_t = 30_000)]
    live: usize,
}

/// Measures turns.
pub fn turn(options: &TurnOptions, common: &Common) -> Result<()> {
    ensure!(
        options.history.iter().all(|n| (500..=20_000_000).contains(n)),
        "--history takes 500 up to 20000000"
    );
    ensure!((100..=1_000_000).contains(&options.live), "--live takes 100 up to 1000000");
    let settings = common.load(Vec::new())?.settings;
    let rules = rules(&settings);
    let embedder = search::embedder(common, &settings)?;
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let model = wiring::llama(common, &settings, room(folder.path()))?;
    let mut reports = Vec::new();
    for &history in &options.history {
        let bar = Progress::new("measuring", 0);
        let progress = &mut |done, all| bar.of(done, all);
        reports.push(turn::measure(&model, embedder.as_ref(), &rules, history, progress)?);
    }
    let bar = Progress::new("measuring", 0);
    let rote = Rote::new(2 * options.live + 10_000);
    let (own_rules, past) = (with_window(&rules, options.live), options.live + options.live / 4);
    let own = turn::measure(&rote, embedder.as_ref(), &own_rules, past, &mut |n, of| bar.of(n, of))?;
    drop(bar);
    // The model's own time for a token of a larger window would be more.
    let slowest = reports.iter().map(Report::model_ms_per_token).fold(0.0, f64::max);
    let share = own.own_ms() / (own.own_ms() + slowest * own.tokens);
    if common.json {
        return print_json(&json!({
            "model": model.info().name,
            "turns": reports.iter().map(as_json).collect::<Vec<_>>(),
            "own": {
                "live": own.live,
                "per_token_ms": own.own_ms_per_token(),
                "per_turn_ms": own.own_ms(),
                "stages_ms": stages(&own),
                "model_ms_per_token": slowest,
                "share": share,
            },
        }));
    }
    let mut out = format!("{:>10}{:>8}{:>14}", "history", "window", "first token");
    let shown: Vec<Stage> =
        Stage::ALL.into_iter().filter(|s| reports.iter().any(|r| r.stage(*s) > 0.0)).collect();
    for stage in &shown {
        let _ = write!(out, "{:>10}", stage.name());
    }
    let _ = writeln!(out, "{:>10}{:>10}", "own/tok", "own share");
    for report in reports.iter().chain([&own]) {
        let _ = write!(out, "{:>10}{:>8}{:>11.1} ms", report.history, report.live, report.first_token_ms);
        for &stage in &shown {
            let _ = write!(out, "{:>10.1}", report.stage(stage));
        }
        let share = if std::ptr::eq(report, &own) { share } else { report.own_ms() / report.turn_ms() };
        let _ = writeln!(out, "{:>10.3}{:>9.1} %", report.own_ms_per_token(), share * 100.0);
    }
    let _ = write!(
        out,
        "\nMilliseconds; the middle of ten turns each, with answers of up to {} tokens. In the last line a model that takes no time\n\
         speaks, in a window of {} tokens: what it takes is all Halo's own. Its share is beside {slowest:.1} ms that {} took for a\n\
         token of the windows above. Own is all but reading and speaking: storing, searching, scoring, pruning, indexing (with the\n\
         embedder), and saving the model's memory.\n",
        rules.sampling.max_tokens,
        own.live,
        model.info().name,
    );
    print(&out)
}

fn stages(report: &Report) -> Value {
    let all = report.stages.iter().map(|(stage, ms)| (stage.name().to_owned(), json!(ms)));
    Value::Object(all.collect::<Map<_, _>>())
}

fn as_json(report: &Report) -> Value {
    json!({
        "history": report.history,
        "live": report.live,
        "first_token_ms": report.first_token_ms,
        "turn_ms": report.turn_ms(),
        "stages_ms": stages(report),
        "tokens": report.tokens,
        "returned": report.returned,
        "own_ms": report.own_ms(),
        "own_share": report.own_ms() / report.turn_ms(),
        "own_ms_per_token": report.own_ms_per_token(),
        "model_ms_per_token": report.model_ms_per_token(),
    })
}

/// Where to hide what is asked for.
#[derive(clap::Args)]
pub struct NeedleOptions {
    /// Tokens said before it is asked for; several lengths are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [8000, 100_000])]
    history: Vec<usize>,
    /// Tokens that the window may hold
    #[arg(long, value_name = "N", default_value_t = 1024)]
    window: usize,
    /// Only those policies whose names begin with one of these
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    policies: Vec<String>,
}

/// Asks for what was said first.
pub fn needle(options: &NeedleOptions, common: &Common) -> Result<()> {
    ensure!(
        options.history.iter().all(|n| (500..=20_000_000).contains(n)),
        "--history takes 500 up to 20000000"
    );
    ensure!(options.window >= 400, "--window takes at least 400 tokens");
    let settings = common.load(Vec::new())?.settings;
    let embedder = search::embedder(common, &settings)?.context(
        "there is no embedder: fetch one with `halo models pull e5-small`, or name one with --set recall.embedder=NAME",
    )?;
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let model = wiring::llama(common, &settings, room(folder.path()))?;
    let mut rules = rules(&settings);
    rules.context.max_tokens = options.window;
    rules.context.recent = options.window / 4;
    rules.room = options.window / 4;
    rules.sampling.temperature = 0.0;
    rules.sampling.max_tokens = rules.sampling.max_tokens.min(24);
    let chosen = rules.context.policy;
    let brightness = match chosen {
        Policy::Brightness { .. } => chosen,
        _ => Policy::Brightness { rank: Rank::Top4, ties: Ties::Dimmer },
    };
    let way = |name, policy, recall| Way { name, policy, recall };
    let ways = [
        way("brightness", brightness, true),
        way("fifo", Policy::Fifo, true),
        way("window", Policy::Window, true),
        way("random", Policy::Random { seed: 1 }, true),
        way("brightness, nothing returns", brightness, false),
        way("fifo, nothing returns", Policy::Fifo, false),
    ];
    let wanted = |way: &&Way| {
        options.policies.is_empty() || options.policies.iter().any(|name| way.name.starts_with(name.as_str()))
    };
    let ways: Vec<&Way> = ways.iter().filter(wanted).collect();
    ensure!(!ways.is_empty(), "--policies: there are brightness, fifo, window and random");
    let mut rows = Vec::new();
    let mut out = format!(
        "{:>9}  {:<30}{:>7}{:>10}{:>10}{:>11}{:>10}{:>14}\n",
        "history", "policy", "asked", "had left", "returned", "own place", "answered", "fact alone"
    );
    for &history in &options.history {
        for &way in &ways {
            let bar = Progress::new(way.name, 0);
            let report =
                needle::measure(&model, &embedder, &rules, way, history, &mut |n, of| bar.of(n, of))?;
            drop(bar);
            rows.push(json!({
                "history": history,
                "window": options.window,
                "policy": way.name,
                "lived": history <= needle::LIVED,
                "asked": report.asked,
                "had_left": report.had_left,
                "returned": report.returned,
                "own_position": report.own_position,
                "answered": report.answered,
                "answered_oracle": report.answered_oracle,
            }));
            let _ = writeln!(
                out,
                "{history:>9}  {:<30}{:>7}{:>10}{:>10}{:>11}{:>10}{:>14}",
                way.name,
                report.asked,
                report.had_left,
                report.returned,
                report.own_position,
                report.answered,
                report.answered_oracle
            );
        }
    }
    if common.json {
        return print_json(&json!(rows));
    }
    let _ = write!(
        out,
        "\nA window of {} tokens. Up to {} tokens the model lives all of it; beyond, the past is made by rote. \"fact alone\" is the\n\
         same question behind nothing but what it asks for.\n",
        options.window,
        needle::LIVED
    );
    print(&out)
}

/// As the settings have it, but the same each time.
fn rules(settings: &Settings) -> Rules {
    let mut rules = wiring::rules(settings);
    if settings.seed == Auto::Auto {
        rules.sampling.seed = 0;
    }
    rules.tools = None;
    rules
}

/// The same rules for a window of so many tokens after each turn.
fn with_window(rules: &Rules, live: usize) -> Rules {
    let mut rules = rules.clone();
    rules.room = live / 4;
    rules.context.max_tokens = live + rules.room + rules.sampling.max_tokens;
    rules.context.recent = live / 4;
    rules
}

/// Room for what leaves the model's memory.
fn room(folder: &Path) -> Room {
    Room { ram: 256 << 20, disk: 4 << 30, folder: Some(folder.to_owned()) }
}
