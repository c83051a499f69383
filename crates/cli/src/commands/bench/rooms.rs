//! `halo bench rooms`: agents on the real model, in a process that is killed now and then.

use crate::Common;
use crate::commands::progress::Progress;
use crate::commands::{print, print_json};
use anyhow::{Context, Result, bail, ensure};
use halo_agents::world::{Message, World};
use halo_bench::rooms::{Report, faults};
use halo_engine::world::realm;
use halo_store::database::{Database, Location};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// How long.
#[derive(clap::Args)]
pub struct Options {
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

const NAME: &str = "bench";

/// Runs, kills, looks what is left, and runs on.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    ensure!((1..=100_000).contains(&options.beats), "--beats takes 1 up to 100000");
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let halo = std::env::current_exe().context("cannot find this program")?;
    let start = |arguments: &[&str]| {
        let mut command = Command::new(&halo);
        command.args(["rooms"]).args(arguments).arg("--data").arg(folder.path());
        for set in &common.set {
            command.args(["--set", set]);
        }
        command
    };
    let mut new = start(&["new", NAME]);
    new.args(options.file.iter().flat_map(|file| ["--file".as_ref(), file.as_os_str()]));
    ensure!(new.stdout(Stdio::null()).status()?.success(), "the world cannot be made");
    let agents = look(folder.path())?.agents().count() as u64;
    let wanted = agents * options.beats;
    let bar = Progress::new("heartbeats", wanted);
    let mut report = Report::default();
    let begin = Instant::now();
    while report.beats < wanted {
        // So that each life ends at another place.
        let left = wanted - report.beats;
        let kills = options.kills.saturating_sub(report.kills);
        let life = if kills == 0 { left } else { (left / (kills + 1)).max(1) };
        let dies = kills > 0 && life < left;
        let told =
            live(start(&["run", NAME, "--json"]), common, life, dies, &mut report, &mut |n| bar.at(n))?;
        report.kills += u64::from(dies);
        let world = look(folder.path())?;
        report.lost += told.iter().filter(|message| !is_there(&world, message)).count() as u64;
        report.faults.extend(faults(&world));
    }
    drop(bar);
    report.seconds = begin.elapsed().as_secs_f64();
    let world = look(folder.path())?;
    let beats: u64 = world.agents().map(|agent| agent.beats).sum();
    if beats + report.kills < report.beats {
        report.lost += report.beats - beats;
    }
    show(&report, agents, common)
}

fn look(folder: &Path) -> Result<World> {
    let mut store = Database::open_to_read(&Location::Sqlite(folder.join("halo.db")))?;
    Ok(realm::look(&mut store, NAME)?)
}

fn is_there(world: &World, message: &Message) -> bool {
    let found = world.any_room(message.room).and_then(|room| room.message(message.id));
    found.is_some_and(|found| found.content == message.content && found.sender == message.sender)
}

/// One life of the process: as many heartbeats as that, then it is killed, or ends. Returns what it said that it said.
fn live(
    mut command: Command,
    common: &Common,
    life: u64,
    dies: bool,
    report: &mut Report,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<Message>> {
    if let Some(model) = &common.model {
        command.args(["--model", model]);
    }
    if let Some(threads) = common.threads {
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
        told.extend(serde_json::from_value::<Vec<Message>>(messages).unwrap_or_default());
        if let Some(beat) = value.get("beat").filter(|beat| !beat.is_null()) {
            report.note(beat);
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

fn show(report: &Report, agents: u64, common: &Common) -> Result<()> {
    if common.json {
        return print_json(&json!({
            "agents": agents,
            "beats": report.beats,
            "parsed": report.parsed,
            "repaired": report.repaired,
            "failed": report.failed,
            "failures": report.failures,
            "said": report.said,
            "done": report.done,
            "refused": report.refused,
            "tokens": { "shown": report.shown, "read": report.read, "share": report.share(), "answered": report.answered },
            "seconds_per_beat": report.seconds / report.beats.max(1) as f64,
            "kills": report.kills,
            "lost": report.lost,
            "faults": report.faults,
        }));
    }
    print(&format!(
        "{agents} agents, {} heartbeats: {} answers were read, {} of them put right first, {} could not be.\n\
         {} messages, {} actions, {} refused with a reason; rules broken: {}.\n\
         Tokens: {} shown, {} read ({:.1} %), {} answered; {:.1} s a heartbeat.\n\
         Killed {} times, lost {}.\n",
        report.beats,
        report.parsed,
        report.repaired,
        report.failed,
        report.said,
        report.done,
        report.refused,
        report.faults.len(),
        report.shown,
        report.read,
        100.0 * report.share(),
        report.answered,
        report.seconds / report.beats.max(1) as f64,
        report.kills,
        report.lost,
    ))
}
