//! `halo-bench hud`: what agents see, for many of them.

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

/// How many.
#[derive(clap::Args)]
pub struct HudBenchOptions {
    /// Agents
    #[arg(long, value_name = "N", default_value_t = 1000)]
    agents: usize,
    /// Rooms in which they meet
    #[arg(long, value_name = "N", default_value_t = 50)]
    rooms: usize,
    /// HUDs of each agent
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// HUDs by lot, in every format and back
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    random: u64,
    /// Which lot
    #[arg(long, value_name = "N", default_value_t = 0)]
    first_seed: u64,
}

/// Measures.
pub fn run(options: &HudBenchOptions, env: &Env) -> Result<()> {
    ensure!((1..=4_000).contains(&options.agents), "--agents takes 1 up to 4000");
    ensure!((1..=1_000).contains(&options.rounds), "--rounds takes 1 up to 1000");
    let settings = env.load_settings()?.settings;
    let llama = wiring::open_llama(env, &settings, KvArchiveLimits::disabled())?;
    let count: Arc<dyn TokenCounter> = Arc::new(ModelTokenCounter::new(Box::new(llama)));
    let mut world = hud::build_world(options.agents, options.rooms);
    let hud::HudBenchReport { huds: figures, message_times: said } =
        hud::render_all(&mut world, &count, options.rounds);
    let (minified, by) = hud::tokens_by_format(&world, &count, 20);
    let bar = Progress::new("by lot", options.random);
    let lot = hud::check_random_huds(options.random, options.first_seed, &mut |n| bar.set_position(n));
    drop(bar);
    let overruns: usize = figures.values().map(|figures| figures.overruns).sum();
    if env.json {
        let formats: Map<_, _> = figures
            .iter()
            .map(|(format, figures)| {
                let tokens = by.get(format).copied().unwrap_or(0.0);
                let row = json!({
                    "huds": figures.render_times.len(),
                    "ms_p50": hud::percentile_ms(&figures.render_times, 50),
                    "ms_p99": hud::percentile_ms(&figures.render_times, 99),
                    "tokens": tokens,
                    "of_minified_json": tokens / minified,
                });
                (format.name().to_owned(), row)
            })
            .collect();
        return print_json(&json!({
            "agents": options.agents,
            "rooms": options.rooms,
            "formats": formats,
            "said": {
                "messages": said.len(),
                "ms_p50": hud::percentile_ms(&said, 50),
                "ms_p99": hud::percentile_ms(&said, 99),
            },
            "minified_json_tokens": minified,
            "overruns": overruns,
            "by_lot": { "huds": lot.huds, "overruns": lot.overruns, "changed": lot.roundtrip_errors, "refused": lot.refused },
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
        "\nA message that is said is written and counted at once for all who will see it: p50 {:.3} ms, p99 {:.3} ms.\n\
         {overruns} were too long. By lot: {} HUDs, {} too long, {} other when read back; {} more did not fit and said so.\n\
         Tokens are of the same HUDs in each format; minified JSON has {minified:.0}.",
        hud::percentile_ms(&said, 50),
        hud::percentile_ms(&said, 99),
        lot.huds,
        lot.overruns,
        lot.roundtrip_errors,
        lot.refused
    );
    print_stdout(&out)
}
