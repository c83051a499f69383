//! `halo replay`: a recorded conversation through scoring and pruning, under any settings.

use super::{count, print, print_json, shorten};
use crate::Common;
use crate::capture::{Capture, Reduction, check_free};
use crate::settings::load::{Loaded, Origin, Sources, load};
use crate::settings::{KEYS, Key, Settings};
use crate::{printable, say};
use anyhow::{Context, Result};
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
    if let Some(folder) = &options.save {
        check_free(folder)?;
    }
    let mut capture = Capture::open(&options.capture)?;
    let mut loaded = common.load(capture.recorded_settings())?;
    for note in capture.notes.iter().chain(&loaded.notes) {
        say(note);
    }
    if capture.is_reduced() {
        let named = |key| !matches!(loaded.origin(key), Origin::Default | Origin::Capture);
        if named("brightness.layers") || named("brightness.heads") {
            say(
                "this capture holds one row a step: brightness.layers and brightness.heads stay as it recorded them",
            );
        }
        let recorded =
            load(&Sources { recorded: capture.recorded_settings(), ..Sources::default() })?.settings;
        (loaded.settings.layers, loaded.settings.heads) = (recorded.layers, recorded.heads);
    }
    let reduction = Reduction::of(&loaded.settings);
    capture.reduce_by(reduction.clone());
    let rules = loaded.settings.rules();
    let in_capture = || options.capture.display().to_string();
    let mut replay = Replay::begin(capture.prefix.len(), &capture.prompt, &rules).with_context(in_capture)?;
    while let Some(step) = capture.next_step()? {
        replay.step(&step).with_context(in_capture)?;
    }
    let outcome = replay.finish().with_context(in_capture)?;
    if let Some(folder) = &options.save {
        let mut again = Capture::open(&options.capture)?;
        let reduced =
            if again.is_reduced() { "" } else { ", attention reduced to one row each as the settings say" };
        again.reduce_by(reduction);
        let steps = again.save(folder)?;
        say(&format!("wrote {steps} steps to {}{reduced}", folder.display()));
    }
    let set = changed(&loaded);
    if common.json {
        print_json(&as_value(&capture.model, &set, &outcome))
    } else {
        print(&as_table(&capture.model, &set, &outcome))
    }
}

/// The settings that are not at their defaults: key, value and where it came from.
fn changed(loaded: &Loaded) -> Vec<(&'static str, (String, Value), String)> {
    let defaults = Settings::default();
    let row = |key: &Key| {
        let value = loaded.settings.get(key.name)?;
        (defaults.get(key.name)? != value).then(|| (key.name, value, loaded.origin(key.name).to_string()))
    };
    KEYS.iter().filter_map(row).collect()
}

/// Whole numbers without a point, as they are counted.
fn number(n: f64) -> Value {
    if n.fract() == 0.0 && n.abs() < 1e15 { json!(n as i64) } else { json!(n) }
}

/// The birth index that a token was recorded with.
fn recorded(outcome: &Outcome, position: Position) -> u64 {
    usize::try_from(position.0).ok().and_then(|i| outcome.positions.get(i)).copied().unwrap_or(position.0)
}

type Set<'a> = &'a [(&'static str, (String, Value), String)];

fn as_value(model: &str, set: Set<'_>, outcome: &Outcome) -> Value {
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
        let mut names: Vec<String> = r.left.iter().map(|l| l.chunk.to_string()).collect();
        names.dedup();
        names
    };
    let set = set.iter().map(|(key, (_, value), _)| ((*key).to_owned(), value.clone()));
    json!({
        "tokens": tokens,
        "pruned": outcome.rounds.iter().map(names).collect::<Vec<_>>(),
        "mean": outcome.mean.map(number),
        "model": model,
        "settings": set.collect::<serde_json::Map<_, _>>(),
        "rounds": outcome.rounds.iter().map(round_value).collect::<Vec<_>>(),
        "chunks": timeline.chunks().map(|c| chunk_value(outcome, c)).collect::<Vec<_>>(),
    })
}

fn round_value(round: &Round) -> Value {
    let left =
        round.left.iter().map(|l| json!({"chunk": l.chunk.to_string(), "tokens": l.tokens, "why": l.why}));
    let traces = round.traces.iter().map(|(step, s)| {
        json!({"step": step, "mean": s.mean, "median": s.median, "max": s.max, "min": s.min, "std": s.std})
    });
    json!({
        "turn": round.turn.0,
        "steps": round.steps,
        "votes": round.votes,
        "live": round.live,
        "left": left.collect::<Vec<_>>(),
        "exceeded": round.exceeded,
        "faults": round.faults.iter().map(|(s, why)| json!({"step": s, "why": why})).collect::<Vec<_>>(),
        "sums": round.sums.iter().map(|(s, sum)| json!({"step": s, "sum": sum})).collect::<Vec<_>>(),
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
        "live_tokens": chunk.live_len(),
        "pinned": chunk.is_pinned(),
        "peak": number(f64::from(chunk.peak().0)),
        "votes": chunk.tally().votes,
        "text": chunk.text(),
    })
}

fn as_table(model: &str, set: Set<'_>, outcome: &Outcome) -> String {
    let timeline = &outcome.timeline;
    let mut out = String::new();
    let model = if model.is_empty() { "an unnamed model".into() } else { shorten(model, 60) };
    let _ = writeln!(out, "{model}: {} tokens, {} live at the end", timeline.len(), timeline.live_len());
    for (key, (value, _), origin) in set {
        let _ = writeln!(out, "  {key} = {} ({})", shorten(value, 40), printable(origin));
    }
    let name = |c: ChunkRef<'_>| c.id().to_string();
    let width = timeline.chunks().map(|c| name(c).len() + 2).max().unwrap_or(0).max(9);
    let _ =
        writeln!(out, "\n{:<width$}{:>7}{:>7}{:>10}{:>8}  text", "chunk", "tokens", "live", "peak", "votes");
    for chunk in timeline.chunks() {
        let _ = writeln!(
            out,
            "{:<width$}{:>7}{:>7}{:>10}{:>8}  {}{}",
            name(chunk),
            chunk.len(),
            chunk.live_len(),
            chunk.peak().to_string(),
            chunk.tally().votes,
            if chunk.is_pinned() { "pinned  " } else { "" },
            shorten(&chunk.text(), 60),
        );
    }
    for (i, round) in outcome.rounds.iter().enumerate() {
        round_lines(&mut out, i + 1, round);
    }
    if let Some(mean) = outcome.mean {
        let _ = writeln!(out, "\nmean brightness before the last step: {}", number(mean));
    }
    out
}

fn round_lines(out: &mut String, number: usize, round: &Round) {
    let _ = writeln!(
        out,
        "\nround {number} (turn {}): {}, {}, {} live after it",
        round.turn.0,
        count(round.steps, "step"),
        count(round.votes as u64, "vote"),
        count(round.live as u64, "token"),
    );
    for departures in round.left.chunk_by(|a, b| a.chunk == b.chunk) {
        let tokens: usize = departures.iter().map(|l| l.tokens).sum();
        let (first, more) = (&departures[0], departures.len() - 1);
        let more = if more > 0 {
            format!(", and so on in {}", count(more as u64, "later step"))
        } else {
            String::new()
        };
        let tokens = count(tokens as u64, "token");
        let _ = writeln!(out, "  left      {:<9} {tokens}: {}{more}", first.chunk.to_string(), first.why);
    }
    if let Some(exceeded) = &round.exceeded {
        let _ = writeln!(out, "  exceeded  {exceeded}");
    }
    let shown = |n: usize| n.saturating_sub(SHOWN);
    for (step, why) in round.faults.iter().take(SHOWN) {
        let _ = writeln!(out, "  unusable  step {step}: {why}");
    }
    if shown(round.faults.len()) > 0 {
        let _ = writeln!(out, "  unusable  and {}", count(shown(round.faults.len()) as u64, "more step"));
    }
    for (step, sum) in round.sums.iter().take(SHOWN) {
        let _ = writeln!(out, "  doubtful  step {step}: its attention sums to {sum:.3}, not to 1");
    }
    if shown(round.sums.len()) > 0 {
        let _ = writeln!(out, "  doubtful  and {}", count(shown(round.sums.len()) as u64, "more step"));
    }
    if round.padded > 0 {
        let _ = writeln!(out, "  padded    {}, which has no effect", count(round.padded, "step"));
    }
}

/// How many of a kind of trouble are listed.
const SHOWN: usize = 5;
