//! `halo-bench rooms`: agents on the real model, in a process that is killed now and then.

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

/// How long.
#[derive(clap::Args)]
pub struct RoomsBenchOptions {
    /// Heartbeats of each agent
    #[arg(long, value_name = "N", default_value_t = 20)]
    beats: u64,
    /// How often the process is killed
    #[arg(long, value_name = "N", default_value_t = 3)]
    kills: u64,
    /// The world [default: five who live at a harbour]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

const WORLD_NAME: &str = "bench";

/// Runs, kills, looks what is left, and runs on.
pub fn run(options: &RoomsBenchOptions, env: &Env) -> Result<()> {
    ensure!((1..=100_000).contains(&options.beats), "--beats takes 1 up to 100000");
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let halo = halo_program()?;
    let start = |arguments: &[&str]| {
        let mut command = Command::new(&halo);
        command.args(["rooms"]).args(arguments).arg("--data").arg(folder.path());
        for set in &env.settings.set {
            command.args(["--set", set]);
        }
        command
    };
    let mut new = start(&["new", WORLD_NAME]);
    new.args(options.file.iter().flat_map(|file| ["--file".as_ref(), file.as_os_str()]));
    ensure!(new.stdout(Stdio::null()).status()?.success(), "the world cannot be made");
    let agents = load_world(folder.path())?.agents().count() as u64;
    let wanted = agents * options.beats;
    let bar = Progress::new("heartbeats", wanted);
    let mut report = RoomsBenchReport::default();
    let begin = Instant::now();
    while report.beats < wanted {
        // So that each life ends at another place.
        let left = wanted - report.beats;
        let kills = options.kills.saturating_sub(report.kills);
        let life = if kills == 0 { left } else { (left / (kills + 1)).max(1) };
        let dies = kills > 0 && life < left;
        let told =
            run_process(start(&["run", WORLD_NAME, "--json"]), env, life, dies, &mut report, &mut |n| {
                bar.set_position(n);
            })?;
        report.kills += u64::from(dies);
        let world = load_world(folder.path())?;
        report.lost += told.iter().filter(|message| !is_stored(&world, message)).count() as u64;
        report.rule_violations.extend(rule_violations(&world));
    }
    drop(bar);
    report.seconds = begin.elapsed().as_secs_f64();
    let world = load_world(folder.path())?;
    let beats: u64 = world.agents().map(|agent| agent.heartbeat_count).sum();
    if beats + report.kills < report.beats {
        report.lost += report.beats - beats;
    }
    print_report(&report, agents, env)
}

fn load_world(folder: &Path) -> Result<World> {
    let mut store = Database::open_read_only(&StoreLocation::Sqlite(folder.join("halo.db")))?;
    Ok(world_store::load_world(&mut store, WORLD_NAME)?)
}

fn is_stored(world: &World, message: &RoomMessage) -> bool {
    let found = world.any_room(message.room).and_then(|room| room.message(message.id));
    found.is_some_and(|found| found.content == message.content && found.sender == message.sender)
}

/// One life of the process: as many heartbeats as that, then it is killed, or ends. Returns what it said that it said.
fn run_process(
    mut command: Command,
    env: &Env,
    life: u64,
    dies: bool,
    report: &mut RoomsBenchReport,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<RoomMessage>> {
    if let Some(model) = &env.models.name {
        command.args(["--model", model]);
    }
    if let Some(threads) = env.models.threads {
        command.args(["--threads", &threads.to_string()]);
    }
    if !dies {
        command.args(["--beats", &life.to_string()]);
    }
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start a process to kill")?;
    let out = child.stdout.take().context("it says nothing")?;
    let (mut told, mut beats) = (Vec::new(), 0);
    for line in BufReader::new(out).lines() {
        let Ok(line) = line else { break };
        let Ok(value) = serde_json::from_str::<Value>(&line) else { continue };
        let messages = value.get("messages").cloned().unwrap_or_default();
        told.extend(serde_json::from_value::<Vec<RoomMessage>>(messages).unwrap_or_default());
        if let Some(beat) = value.get("beat").filter(|beat| !beat.is_null()) {
            report.record_beat(beat);
            beats += 1;
            progress(report.beats);
        }
        if dies && beats >= life {
            break;
        }
    }
    if dies {
        child.kill().context("it cannot be killed")?;
    }
    let ended = child.wait()?;
    if !dies && !ended.success() {
        bail!("the process ended by itself: {ended}");
    }
    Ok(told)
}

fn print_report(report: &RoomsBenchReport, agents: u64, env: &Env) -> Result<()> {
    if env.json {
        return print_json(&json!({
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
            "seconds_per_beat": report.seconds / report.beats.max(1) as f64,
            "kills": report.kills,
            "lost": report.lost,
            "faults": report.rule_violations,
        }));
    }
    print_stdout(&format!(
        "{agents} agents, {} heartbeats: {} answers were read, {} of them put right first, {} could not be.\n\
         {} messages, {} actions, {} refused with a reason; rules broken: {}.\n\
         Tokens: {} shown, {} read ({:.1} %), {} answered; {:.1} s a heartbeat.\n\
         Killed {} times, lost {}.\n",
        report.beats,
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
        report.seconds / report.beats.max(1) as f64,
        report.kills,
        report.lost,
    ))
}
