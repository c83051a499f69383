//! `halo bench hud`: what agents see, for many of them.

use crate::commands::progress::Progress;
use crate::commands::{print, print_json};
use crate::{Common, wiring};
use anyhow::{Result, ensure};
use halo_agents::count::Count;
use halo_bench::hud;
use halo_engine::world::mind::ModelCount;
use halo_llama::graveyard::Room;
use serde_json::{Map, json};
use std::fmt::Write as _;
use std::sync::Arc;

/// How many.
#[derive(clap::Args)]
pub struct Options {
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
    from: u64,
}

/// Measures.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    ensure!((1..=4_000).contains(&options.agents), "--agents takes 1 up to 4000");
    ensure!((1..=1_000).contains(&options.rounds), "--rounds takes 1 up to 1000");
    let settings = common.load(Vec::new())?.settings;
    let llama = wiring::llama(common, &settings, Room::none())?;
    let count: Arc<dyn Count> = Arc::new(ModelCount::new(Box::new(llama)));
    let mut world = hud::crowd(options.agents, options.rooms);
    let hud::Everybody { huds: figures, said } = hud::everybody(&mut world, &count, options.rounds);
    let (minified, by) = hud::tokens(&world, &count, 20);
    let bar = Progress::new("by lot", options.random);
    let lot = hud::by_lot(options.random, options.from, &mut |n| bar.at(n));
    drop(bar);
    let overruns: usize = figures.values().map(|figures| figures.overruns).sum();
    if common.json {
        let formats: Map<_, _> = figures
            .iter()
            .map(|(format, figures)| {
                let tokens = by.get(format).copied().unwrap_or(0.0);
                let row = json!({
                    "huds": figures.took.len(),
                    "ms_p50": hud::percentile(&figures.took, 50),
                    "ms_p99": hud::percentile(&figures.took, 99),
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
                "ms_p50": hud::percentile(&said, 50),
                "ms_p99": hud::percentile(&said, 99),
            },
            "minified_json_tokens": minified,
            "overruns": overruns,
            "by_lot": { "huds": lot.huds, "overruns": lot.overruns, "changed": lot.changed, "refused": lot.refused },
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
            figures.took.len(),
            hud::percentile(&figures.took, 50),
            hud::percentile(&figures.took, 99),
            tokens / minified
        );
    }
    let _ = writeln!(
        out,
        "\nA message that is said is written and counted at once for all who will see it: p50 {:.3} ms, p99 {:.3} ms.\n\
         {overruns} were too long. By lot: {} HUDs, {} too long, {} other when read back; {} more did not fit and said so.\n\
         Tokens are of the same HUDs in each format; minified JSON has {minified:.0}.",
        hud::percentile(&said, 50),
        hud::percentile(&said, 99),
        lot.huds,
        lot.overruns,
        lot.changed,
        lot.refused
    );
    print(&out)
}
