//! `halo-bench hud`: rendering of agents' HUDs.

use anyhow::{Result, ensure};
use halo_agents::token_counter::TokenCounter;
use halo_bench::hud;
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use halo_cli::wiring;
use halo_llama::kv_archive::KvArchiveLimits;
use halo_worlds::agent_model::ModelTokenCounter;
use serde_json::{Map, json};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

#[derive(clap::Args)]
pub struct HudBenchOptions {
    /// Number of agents in all rooms
    #[arg(long, value_name = "N", default_value_t = 1000)]
    agents: usize,
    /// Rooms in which they meet
    #[arg(long, value_name = "N", default_value_t = 50)]
    rooms: usize,
    /// HUDs of each agent
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Also test N HUDs of random worlds, in every format and back
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    random: u64,
    /// Random seed of these worlds
    #[arg(long, value_name = "N", default_value_t = 0)]
    first_seed: u64,
}

pub fn run(options: &HudBenchOptions, env: &Env) -> Result<()> {
    ensure!((1..=4_000).contains(&options.agents), "--agents must be 1 to 4000");
    ensure!((1..=1_000).contains(&options.rounds), "--rounds must be 1 to 1000");
    let settings = env.load_settings()?.settings;
    let llama =
        wiring::open_llama(env, &wiring::one_answer_at_a_time(&settings), KvArchiveLimits::disabled())?;
    let count: Arc<dyn TokenCounter> = Arc::new(ModelTokenCounter::new(Box::new(llama)));
    let mut world = hud::build_world(options.agents, options.rooms);
    let hud::HudBenchReport { huds: figures, message_times } =
        hud::render_all(&mut world, &count, options.rounds);
    let (minified, by) = hud::tokens_by_format(&world, &count, 20);
    let bar = Progress::new("random worlds", options.random);
    let random_report =
        hud::check_random_huds(options.random, options.first_seed, &mut |n| bar.set_position(n));
    drop(bar);
    let overruns: usize = figures.values().map(|figures| figures.overruns).sum();
    let all_times: Vec<Duration> =
        figures.values().flat_map(|figures| figures.render_times.iter().copied()).collect();
    if env.json {
        let formats: Map<_, _> = figures
            .iter()
            .map(|(format, figures)| {
                let tokens = by.get(format).copied().unwrap_or(0.0);
                let row = json!({
                    "huds": figures.render_times.len(),
                    "p50_ms": hud::percentile_ms(&figures.render_times, 50),
                    "p99_ms": hud::percentile_ms(&figures.render_times, 99),
                    "tokens": tokens,
                    "of_minified_json": tokens / minified,
                });
                (format.name().to_owned(), row)
            })
            .collect();
        return print_json(&json!({
            "agents": options.agents,
            "rooms": options.rooms,
            "p50_ms": hud::percentile_ms(&all_times, 50),
            "p99_ms": hud::percentile_ms(&all_times, 99),
            "round_trip_failures": random_report.roundtrip_errors,
            "formats": formats,
            "said": {
                "messages": message_times.len(),
                "p50_ms": hud::percentile_ms(&message_times, 50),
                "p99_ms": hud::percentile_ms(&message_times, 99),
            },
            "minified_json_tokens": minified,
            "overruns": overruns,
            "random": { "huds": random_report.huds, "overruns": random_report.overruns, "refused": random_report.refused },
        }));
    }
    let mut out = format!(
        "{:<18}{:>8}{:>10}{:>10}{:>10}{:>22}\n",
        "format", "HUDs", "p50 ms", "p99 ms", "tokens", "of minified JSON"
    );
    for (format, figures) in &figures {
        let tokens = by.get(format).copied().unwrap_or(0.0);
        let _ = writeln!(
            out,
            "{:<18}{:>8}{:>10.3}{:>10.3}{tokens:>10.0}{:>22.2}",
            format.name(),
            figures.render_times.len(),
            hud::percentile_ms(&figures.render_times, 50),
            hud::percentile_ms(&figures.render_times, 99),
            tokens / minified
        );
    }
    let _ = writeln!(
        out,
        "\nRendering and counting a new message for all its readers: p50 {:.3} ms, p99 {:.3} ms.\n\
         {overruns} HUDs exceeded their budget. Random worlds: {} HUDs, {} over budget, {} different when parsed back; {} more did not fit (an error).\n\
         Tokens are of the same HUDs in each format; minified JSON has {minified:.0}.",
        hud::percentile_ms(&message_times, 50),
        hud::percentile_ms(&message_times, 99),
        random_report.huds,
        random_report.overruns,
        random_report.roundtrip_errors,
        random_report.refused
    );
    print_stdout(&out)
}
