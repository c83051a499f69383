//! `halo-bench`: measures every figure that the project claims. This file reads the command line and calls the benchmark.

mod commands;

use anyhow::Result;
use clap::{Parser, Subcommand};
use halo_cli::env::GlobalArgs;
use halo_cli::error::CommandTopic;
use halo_cli::startup;
use std::ffi::OsString;
use std::process::ExitCode;

/// Measure the figures that Halo claims
#[derive(Parser)]
#[command(name = "halo-bench", version, arg_required_else_help = true, max_term_width = 100)]
struct BenchCli {
    #[command(flatten)]
    global: GlobalArgs,
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Subcommand)]
enum BenchCommand {
    /// Measure matching a client's message history to its conversation
    Align(commands::align::AlignBenchOptions),
    /// Measure generation speed with and without attention capture
    Attention(commands::kv_attention::AttentionBenchOptions),
    /// Compare the chunks that two models attend to in the same conversations, with a plot
    Compare(commands::compare::CompareBenchOptions),
    /// Measure scoring, live view, planning, applying changes, and memory use
    Core(commands::CoreBenchOptions),
    /// Test durability under kill -9, power cuts and full disks
    Crash(commands::CrashBenchOptions),
    /// Simulator: crashes, power cuts, lost replies and lost leases, driven by a seed
    Simulate(commands::simulate::SimulateOptions),
    /// Measure embedding speed and accuracy; --model names the embedder
    Embed,
    /// Measure rendering of agents' HUDs: time, budget, tokens per format
    Hud(commands::hud::HudBenchOptions),
    /// Compare pruning policies: what they keep and what it costs in model quality
    Keep(commands::prune::PruneBenchOptions),
    /// Compare restoring KV cells of a resurrected chunk with prefilling the context again
    Kv(commands::kv_attention::KvBenchOptions),
    /// Measure the value of memories and the delay that forming them causes
    Memory(commands::memory::MemoryBenchOptions),
    /// Needle in a haystack: is a fact from the first turn resurrected at its position, and used
    Needle(commands::turn::NeedleBenchOptions),
    /// Measure search recall on conversations with known answers
    Recall(commands::recall::RecallBenchOptions),
    /// Run five agents on a real model and kill them: prefill, valid answers, losses
    Rooms(commands::rooms::RoomsBenchOptions),
    /// Compare approximate and exact vector search over a million rows
    Search(commands::search::SearchBenchOptions),
    /// Measure answer latency under concurrent readers and searches
    Server(commands::server::ServerBenchOptions),
    /// Measure opening, reading and writing a conversation of millions of tokens
    Store(commands::StoreBenchOptions),
    /// Measure a turn by stage, for growing histories
    Turn(commands::turn::TurnBenchOptions),
}

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    if let Some(status) = startup::prepare_process(&args) {
        return status;
    }
    let mut cli = BenchCli::parse_from(startup::move_set_flags_last(&args));
    if matches!(
        cli.command,
        BenchCommand::Recall(_) | BenchCommand::Keep(_) | BenchCommand::Memory(_) | BenchCommand::Compare(_)
    ) {
        // Their own --data names the dataset; the data folder comes from the environment alone.
        cli.global.data = None;
    }
    startup::init_logging(cli.global.quiet, cli.global.verbose);
    startup::finish(dispatch(&cli), CommandTopic::Other)
}

fn dispatch(cli: &BenchCli) -> Result<()> {
    let env = cli.global.env();
    // A misspelt setting is an error, whether or not the benchmark reads it.
    if !env.settings.set.is_empty() {
        env.load_settings()?;
    }
    match &cli.command {
        BenchCommand::Align(options) => commands::align::run(options, env.json),
        BenchCommand::Attention(options) => commands::kv_attention::attention(options, &env),
        BenchCommand::Compare(options) => commands::compare::run(options, &env),
        BenchCommand::Core(options) => commands::core(options, env.json),
        BenchCommand::Crash(options) => commands::crash(options, env.json),
        BenchCommand::Simulate(options) => commands::simulate::run(options, env.json),
        BenchCommand::Embed => commands::embed::run(&env),
        BenchCommand::Hud(options) => commands::hud::run(options, &env),
        BenchCommand::Keep(options) => commands::prune::run(options, &env),
        BenchCommand::Kv(options) => commands::kv_attention::kv(options, &env),
        BenchCommand::Memory(options) => commands::memory::run(options, &env),
        BenchCommand::Needle(options) => commands::turn::needle(options, &env),
        BenchCommand::Recall(options) => commands::recall::run(options, &env),
        BenchCommand::Rooms(options) => commands::rooms::run(options, &env),
        BenchCommand::Search(options) => commands::search::run(options, &env),
        BenchCommand::Server(options) => commands::server::run(options, &env),
        BenchCommand::Store(options) => commands::store(options, env.json),
        BenchCommand::Turn(options) => commands::turn::turn(options, &env),
    }
}
