//! `halo-bench rooms`: agents on a real model, in a process that is killed now and then. With several numbers after
//! `--parallel`, the world runs once with each: agents whose heartbeats fall together think at the same time.

use super::halo_program;
use anyhow::{Context, Result, bail, ensure};
use halo_bench::rooms::{RoomsBenchReport, rule_violations};
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use halo_store::database::{Database, StoreLocation};
use halo_worlds::world::{RoomMessage, World};
use halo_worlds::world_store;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

#[derive(clap::Args)]
pub struct RoomsBenchOptions {
    /// Heartbeats of each agent
    #[arg(long, value_name = "N", default_value_t = 20)]
    beats: u64,
    /// How often the process is killed
    #[arg(long, value_name = "N", default_value_t = 3)]
    kills: u64,
    /// Answers that are generated at once (`model.parallel`); the world runs once with each number
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    parallel: Vec<u32>,
    /// Speed of the world's clock: at a high speed all heartbeats fall together
    #[arg(long, value_name = "SPEED", default_value_t = 1.0)]
    speed: f64,
    /// World file [default: the example, five agents at a harbour]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

const WORLD_NAME: &str = "bench";

/// Runs the world with each number of answers at once, and compares the times.
pub fn run(options: &RoomsBenchOptions, env: &Env) -> Result<()> {
    ensure!((1..=100_000).contains(&options.beats), "--beats must be 1 to 100000");
    let mut reports: Vec<Value> = Vec::new();
    let mut first = None;
    let limits = options.parallel.iter().map(|limit| vec![format!("model.parallel={limit}")]);
    let runs = if options.parallel.is_empty() { vec![Vec::new()] } else { limits.collect() };
    for settings in runs {
        let (report, agents) = run_beats(options, env, &settings)?;
        let seconds = report.seconds_per_beat();
        let speedup = *first.get_or_insert(seconds) / seconds;
        if env.json {
            reports.push(report_json(&report, agents, &settings, speedup));
        } else {
            print_report(&report, agents, &settings, speedup)?;
        }
    }
    match reports.as_slice() {
        [] => Ok(()),
        [report] => print_json(report),
        _ => print_json(&Value::from(reports)),
    }
}

/// Runs the world, kills the process, checks the store, and continues. Returns the report and the number of agents.
fn run_beats(options: &RoomsBenchOptions, env: &Env, settings: &[String]) -> Result<(RoomsBenchReport, u64)> {
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let halo = halo_program()?;
    let start = |arguments: &[&str]| {
        let mut command = Command::new(&halo);
        command.args(["rooms"]).args(arguments).arg("--data").arg(folder.path());
        for set in env.settings.set.iter().chain(settings) {
            command.args(["--set", set]);
        }
        command
    };
    let mut new = start(&["new", WORLD_NAME]);
    new.args(options.file.iter().flat_map(|file| ["--file".as_ref(), file.as_os_str()]));
    ensure!(new.stdout(Stdio::null()).status()?.success(), "the world cannot be created");
    let agents = load_world(folder.path())?.agents().count() as u64;
    let total_beats = agents * options.beats;
    let bar = Progress::new("heartbeats", total_beats);
    let mut report = RoomsBenchReport::default();
    let begin = Instant::now();
    while report.beats < total_beats {
        // Each process is killed at another point.
        let remaining = total_beats - report.beats;
        let kills = options.kills.saturating_sub(report.kills);
        let process_beats = if kills == 0 { remaining } else { (remaining / (kills + 1)).max(1) };
        let is_killed = kills > 0 && process_beats < remaining;
        let printed = run_process(
            start(&["run", WORLD_NAME, "--json", "--speed", &options.speed.to_string()]),
            env,
            process_beats,
            is_killed,
            &mut report,
            &mut |n| bar.set_position(n),
        )?;
        report.kills += u64::from(is_killed);
        let world = load_world(folder.path())?;
        report.lost += printed.iter().filter(|message| !is_stored(&world, message)).count() as u64;
        report.rule_violations.extend(rule_violations(&world));
    }
    drop(bar);
    report.seconds = begin.elapsed().as_secs_f64();
    let world = load_world(folder.path())?;
    let beats: u64 = world.agents().map(|agent| agent.heartbeat_count).sum();
    if beats + report.kills < report.beats {
        report.lost += report.beats - beats;
    }
    Ok((report, agents))
}

fn load_world(folder: &Path) -> Result<World> {
    let mut store = Database::open_read_only(&StoreLocation::Sqlite(folder.join("halo.db")))?;
    Ok(world_store::load_world(&mut store, WORLD_NAME)?)
}

fn is_stored(world: &World, message: &RoomMessage) -> bool {
    let stored = world.any_room(message.room).and_then(|room| room.message(message.id));
    stored.is_some_and(|stored| stored.content == message.content && stored.sender == message.sender)
}

/// One process: runs so many heartbeats, then is killed or ends. Returns the messages that it printed.
fn run_process(
    mut command: Command,
    env: &Env,
    process_beats: u64,
    is_killed: bool,
    report: &mut RoomsBenchReport,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<RoomMessage>> {
    if let Some(model) = &env.models.name {
        command.args(["--model", model]);
    }
    if let Some(threads) = env.models.threads {
        command.args(["--threads", &threads.to_string()]);
    }
    if !is_killed {
        command.args(["--beats", &process_beats.to_string()]);
    }
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start a process to kill")?;
    let out = child.stdout.take().context("it has no standard output")?;
    let (mut printed, mut beats) = (Vec::new(), 0);
    for line in BufReader::new(out).lines() {
        let Ok(line) = line else { break };
        let Ok(value) = serde_json::from_str::<Value>(&line) else { continue };
        let messages = value.get("messages").cloned().unwrap_or_default();
        printed.extend(serde_json::from_value::<Vec<RoomMessage>>(messages).unwrap_or_default());
        if let Some(beat) = value.get("beat").filter(|beat| !beat.is_null()) {
            report.record_beat(beat);
            beats += 1;
            progress(report.beats);
        }
        if is_killed && beats >= process_beats {
            break;
        }
    }
    if is_killed {
        child.kill().context("cannot kill the process")?;
    }
    let ended = child.wait()?;
    if !is_killed && !ended.success() {
        bail!("the process ended by itself: {ended}");
    }
    Ok(printed)
}

fn report_json(report: &RoomsBenchReport, agents: u64, settings: &[String], speedup: f64) -> Value {
    json!({
        "settings": settings,
        "agents": agents,
        "beats": report.beats,
        "parsed": report.parsed,
        "repaired": report.repaired,
        "failed": report.failed,
        "failures": report.failures,
        "said": report.messages,
        "done": report.actions,
        "refused": report.refused,
        "tokens": { "shown": report.prompt_tokens, "read": report.prefilled_tokens, "share": report.prefill_share(), "answered": report.answer_tokens },
        "seconds_per_beat": report.seconds_per_beat(),
        "faster_than_first": speedup,
        "answered_per_second": report.answer_tokens as f64 / report.seconds,
        "kills": report.kills,
        "lost": report.lost,
        "faults": report.rule_violations,
    })
}

fn print_report(report: &RoomsBenchReport, agents: u64, settings: &[String], speedup: f64) -> Result<()> {
    print_stdout(&format!(
        "{agents} agents, {} heartbeats{}: {} answers were parsed, {} of them after a repair, {} could not be.\n\
         {} messages, {} actions, {} refused; rule violations: {}.\n\
         Tokens: {} of prompts, {} prefilled ({:.1} %), {} of answers; {:.2} s per heartbeat, × {speedup:.2} of the first run.\n\
         Killed {} times, lost {}.\n",
        report.beats,
        settings.iter().map(|setting| format!(" ({setting})")).collect::<String>(),
        report.parsed,
        report.repaired,
        report.failed,
        report.messages,
        report.actions,
        report.refused,
        report.rule_violations.len(),
        report.prompt_tokens,
        report.prefilled_tokens,
        100.0 * report.prefill_share(),
        report.answer_tokens,
        report.seconds_per_beat(),
        report.kills,
        report.lost,
    ))
}
