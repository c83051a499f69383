//! `halo replay`: a recorded conversation through scoring and pruning, under any settings.

use super::{print, print_json};
use crate::Common;
use crate::capture::{Capture, Reduction};
use anyhow::Result;
use halo_core::replay::{Outcome, Replay, Round};
use halo_core::timeline::ChunkRef;
use halo_core::token::Position;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;

/// What to replay.
#[derive(clap::Args)]
pub struct Options {
    /// The folder of a capture: Halo's own, or Halo Weave's
    capture: PathBuf,
    /// Also writes the capture to this folder in Halo's own format
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
}

/// Replays a capture and prints what came of it.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let mut capture = Capture::open(&options.capture)?;
    let loaded = common.load(capture.recorded_settings())?;
    for key in &loaded.unknown {
        eprintln!("halo: the capture recorded {key}, which is no setting of this version: it is left out");
    }
    let reduction = Reduction::of(&loaded.settings);
    capture.reduce_by(reduction.clone());
    let rules = loaded.settings.rules();
    let mut replay = Replay::begin(&capture.prompt, &rules)?;
    while let Some(step) = capture.next_step()? {
        replay.step(&step)?;
    }
    let outcome = replay.finish();
    if let Some(folder) = &options.save {
        let mut again = Capture::open(&options.capture)?;
        again.reduce_by(reduction);
        let steps = again.save(folder)?;
        eprintln!("halo: wrote {steps} steps to {}", folder.display());
    }
    if common.json { print_json(&as_value(&outcome)) } else { print(&as_table(&capture.model, &outcome)) }
}

/// Whole numbers without a point, as they are counted.
fn number(n: f64) -> Value {
    if n.fract() == 0.0 && n.abs() < 1e15 { json!(n as i64) } else { json!(n) }
}

/// The birth index that a token was recorded with.
fn recorded(outcome: &Outcome, position: Position) -> u64 {
    usize::try_from(position.0).ok().and_then(|i| outcome.positions.get(i)).copied().unwrap_or(position.0)
}

fn as_value(outcome: &Outcome) -> Value {
    let timeline = &outcome.timeline;
    let tokens: Vec<Value> = timeline
        .chunks()
        .flat_map(|c| c.run().positions())
        .filter_map(|p| timeline.token(p))
        .map(|t| {
            json!({
                "position": recorded(outcome, t.position),
                "brightness": number(f64::from(t.brightness.0)),
                "live": t.flags.is_live(),
            })
        })
        .collect();
    let names = |r: &Round| {
        // In v0 single tokens leave; a chunk that loses several in a row is named once.
        let mut names: Vec<String> = r.left.iter().map(|(c, _)| c.to_string()).collect();
        names.dedup();
        names
    };
    json!({
        "tokens": tokens,
        "pruned": outcome.rounds.iter().map(names).collect::<Vec<_>>(),
        "mean": number(outcome.mean),
        "rounds": outcome.rounds.iter().map(round_value).collect::<Vec<_>>(),
        "chunks": timeline.chunks().map(|c| chunk_value(outcome, c)).collect::<Vec<_>>(),
    })
}

fn round_value(round: &Round) -> Value {
    let why = round.left.iter().map(|(c, why)| json!({"chunk": c.to_string(), "why": why}));
    let traces = round.traces.iter().map(|(step, s)| {
        json!({"step": step, "mean": s.mean, "median": s.median, "max": s.max, "min": s.min, "std": s.std})
    });
    json!({
        "turn": round.turn.0,
        "steps": round.steps,
        "votes": round.votes,
        "live": round.live,
        "left": why.collect::<Vec<_>>(),
        "exceeded_by": round.exceeded.map(|e| e.by),
        "faults": round.faults.iter().map(|(s, f)| json!({"step": s, "why": f.to_string()})).collect::<Vec<_>>(),
        "padded": round.padded,
        "traces": traces.collect::<Vec<_>>(),
    })
}

fn chunk_value(outcome: &Outcome, chunk: ChunkRef<'_>) -> Value {
    json!({
        "chunk": chunk.id().to_string(),
        "position": recorded(outcome, chunk.start()),
        "tokens": chunk.len(),
        "live": chunk.is_live(),
        "pinned": chunk.is_pinned(),
        "peak": number(f64::from(chunk.peak().0)),
        "votes": chunk.tally().votes,
        "text": chunk.text(),
    })
}

fn as_table(model: &str, outcome: &Outcome) -> String {
    let timeline = &outcome.timeline;
    let mut out = String::new();
    let model = if model.is_empty() { "an unnamed model" } else { model };
    let _ = writeln!(out, "{model}: {} tokens, {} live at the end\n", timeline.len(), timeline.live_len());
    let _ = writeln!(out, "{:<9}{:>7}{:>7}{:>10}{:>8}  text", "chunk", "tokens", "live", "peak", "votes");
    for chunk in timeline.chunks() {
        let _ = writeln!(
            out,
            "{:<9}{:>7}{:>7}{:>10}{:>8}  {}{}",
            chunk.id().to_string(),
            chunk.len(),
            chunk.live_len(),
            chunk.peak().to_string(),
            chunk.tally().votes,
            if chunk.is_pinned() { "pinned  " } else { "" },
            shorten(chunk.text(), 60),
        );
    }
    for (i, round) in outcome.rounds.iter().enumerate() {
        let _ = writeln!(
            out,
            "\nround {} (turn {}): {} steps, {} votes, {} tokens live after it",
            i + 1,
            round.turn.0,
            round.steps,
            round.votes,
            round.live
        );
        for departures in round.left.chunk_by(|a, b| a.0 == b.0) {
            let (chunk, why) = &departures[0];
            let often = if departures.len() > 1 {
                format!(" and so on, {} times", departures.len())
            } else {
                String::new()
            };
            let _ = writeln!(out, "  left      {:<9} {why}{often}", chunk.to_string());
        }
        if let Some(exceeded) = round.exceeded {
            let _ = writeln!(
                out,
                "  exceeded  by {} tokens: none of the {} chunks left may leave",
                exceeded.by, exceeded.protected
            );
        }
        for (step, fault) in round.faults.iter().take(FAULTS_SHOWN) {
            let _ = writeln!(out, "  unusable  step {step}: {fault}");
        }
        if round.faults.len() > FAULTS_SHOWN {
            let _ = writeln!(out, "  unusable  and {} more steps", round.faults.len() - FAULTS_SHOWN);
        }
        if round.padded > 0 {
            let _ = writeln!(out, "  padded    {} steps, which has no effect", round.padded);
        }
    }
    let _ = writeln!(out, "\nmean brightness at the last step: {}", number(outcome.mean));
    out
}

const FAULTS_SHOWN: usize = 5;

/// The beginning of a text, on one line, without anything that a terminal would obey.
fn shorten(text: &str, most: usize) -> String {
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let words = line.split_whitespace().collect::<Vec<_>>().join(" ");
    match words.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &words[..end]),
        None => words,
    }
}
