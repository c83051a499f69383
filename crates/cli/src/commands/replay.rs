//! `halo replay`: replays an attention recording through scoring and pruning, under any settings.

use crate::capture::{AttentionReduction, Capture, ensure_no_capture};
use crate::env::Env;
use crate::output::{
    pluralize, print_json, print_notice, print_stdout, sanitize_terminal_text, truncate_line,
};
use crate::settings::load::{LoadedSettings, SettingOrigin, SettingsSources, load_settings};
use crate::settings::{KEYS, SettingKey, Settings};
use anyhow::{Context, Result};
use halo_core::replay::{Replay, ReplayOutcome, ReplayRound};
use halo_core::timeline::ChunkRef;
use halo_core::token::Position;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct ReplayArgs {
    /// Folder of an attention recording, by Halo or Halo Weave
    capture: PathBuf,
    /// Also save the recording to this folder in Halo's format
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
}

pub fn run(options: &ReplayArgs, env: &Env) -> Result<()> {
    if let Some(folder) = &options.save {
        ensure_no_capture(folder)?;
    }
    let mut capture = Capture::open(&options.capture)?;
    let mut loaded = env.load_recorded_settings(capture.recorded_settings())?;
    for note in capture.warnings.iter().chain(&loaded.warnings) {
        print_notice(note);
    }
    if capture.is_reduced() {
        let named = |key| !matches!(loaded.origin(key), SettingOrigin::Default | SettingOrigin::Capture);
        if named("brightness.layers") || named("brightness.heads") {
            print_notice(
                "this capture has one row per step: brightness.layers and brightness.heads stay as recorded",
            );
        }
        let recorded = load_settings(&SettingsSources {
            from_capture: capture.recorded_settings(),
            ..SettingsSources::default()
        })?
        .settings;
        (loaded.settings.brightness_layers, loaded.settings.brightness_heads) =
            (recorded.brightness_layers, recorded.brightness_heads);
    }
    let reduction = AttentionReduction::from_settings(&loaded.settings);
    capture.set_reduction(reduction.clone());
    let rules = loaded.settings.context_rules();
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
        again.set_reduction(reduction);
        let steps = again.save(folder)?;
        print_notice(&format!("wrote {steps} steps to {}{reduced}", folder.display()));
    }
    let set = non_default_settings(&loaded);
    if env.json {
        print_json(&outcome_json(&capture.model, &set, &outcome))
    } else {
        print_stdout(&outcome_table(&capture.model, &set, &outcome))
    }
}

/// Settings that are not at their defaults: key, value and source.
fn non_default_settings(loaded: &LoadedSettings) -> Vec<(&'static str, (String, Value), String)> {
    let defaults = Settings::default();
    let row = |key: &SettingKey| {
        let value = loaded.settings.get(key.name)?;
        (defaults.get(key.name)? != value).then(|| (key.name, value, loaded.origin(key.name).to_string()))
    };
    KEYS.iter().filter_map(row).collect()
}

/// Formats integers without a decimal point.
fn json_number(n: f64) -> Value {
    if n.fract() == 0.0 && n.abs() < 1e15 { json!(n as i64) } else { json!(n) }
}

/// The position that a token was recorded with.
fn recorded_position(outcome: &ReplayOutcome, position: Position) -> u64 {
    usize::try_from(position.0).ok().and_then(|i| outcome.positions.get(i)).copied().unwrap_or(position.0)
}

type ChangedSettings<'a> = &'a [(&'static str, (String, Value), String)];

fn outcome_json(model: &str, set: ChangedSettings<'_>, outcome: &ReplayOutcome) -> Value {
    let timeline = &outcome.timeline;
    let tokens: Vec<Value> = timeline
        .chunks()
        .flat_map(|c| c.run().positions())
        .filter_map(|p| timeline.token(p))
        .map(|t| {
            json!({
                "position": recorded_position(outcome, t.position),
                "brightness": json_number(f64::from(t.brightness.0)),
                "live": t.flags.is_live(),
            })
        })
        .collect();
    let names = |r: &ReplayRound| {
        // v0 prunes single tokens; a chunk that loses several in a row is listed once.
        let mut names: Vec<String> = r.pruned.iter().map(|l| l.chunk.to_string()).collect();
        names.dedup();
        names
    };
    let set = set.iter().map(|(key, (_, value), _)| ((*key).to_owned(), value.clone()));
    json!({
        "tokens": tokens,
        "pruned": outcome.rounds.iter().map(names).collect::<Vec<_>>(),
        "mean": outcome.mean.map(json_number),
        "model": model,
        "settings": set.collect::<serde_json::Map<_, _>>(),
        "rounds": outcome.rounds.iter().map(round_json).collect::<Vec<_>>(),
        "chunks": timeline.chunks().map(|c| chunk_json(outcome, c)).collect::<Vec<_>>(),
    })
}

fn round_json(round: &ReplayRound) -> Value {
    let pruned = round
        .pruned
        .iter()
        .map(|l| json!({"chunk": l.chunk.to_string(), "tokens": l.tokens, "why": l.reason}));
    let traces = round.traces.iter().map(|(step, s)| {
        json!({"step": step, "mean": s.mean, "median": s.median, "max": s.max, "min": s.min, "std": s.std})
    });
    json!({
        "turn": round.turn.0,
        "steps": round.steps,
        "votes": round.votes,
        "live": round.live,
        "pruned": pruned.collect::<Vec<_>>(),
        "exceeded": round.exceeded,
        "errors": round.attention_errors.iter().map(|(s, why)| json!({"step": s, "why": why})).collect::<Vec<_>>(),
        "attention_sums": round.off_sums.iter().map(|(s, sum)| json!({"step": s, "sum": sum})).collect::<Vec<_>>(),
        "padded": round.padded_rows,
        "traces": traces.collect::<Vec<_>>(),
    })
}

fn chunk_json(outcome: &ReplayOutcome, chunk: ChunkRef<'_>) -> Value {
    json!({
        "chunk": chunk.id().to_string(),
        "position": recorded_position(outcome, chunk.start()),
        "tokens": chunk.len(),
        "live": chunk.is_live(),
        "live_tokens": chunk.live_len(),
        "pinned": chunk.is_pinned(),
        "peak": json_number(f64::from(chunk.peak().0)),
        "votes": chunk.tally().votes,
        "text": chunk.text(),
    })
}

fn outcome_table(model: &str, set: ChangedSettings<'_>, outcome: &ReplayOutcome) -> String {
    let timeline = &outcome.timeline;
    let mut out = String::new();
    let model = if model.is_empty() { "an unnamed model".into() } else { truncate_line(model, 60) };
    let _ = writeln!(out, "{model}: {} tokens, {} live at the end", timeline.len(), timeline.live_len());
    for (key, (value, _), origin) in set {
        let _ = writeln!(out, "  {key} = {} ({})", truncate_line(value, 40), sanitize_terminal_text(origin));
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
            truncate_line(&chunk.text(), 60),
        );
    }
    for (i, round) in outcome.rounds.iter().enumerate() {
        write_round(&mut out, i + 1, round);
    }
    if let Some(mean) = outcome.mean {
        let _ = writeln!(out, "\nmean brightness before the last step: {}", json_number(mean));
    }
    out
}

fn write_round(out: &mut String, number: usize, round: &ReplayRound) {
    let _ = writeln!(
        out,
        "\nround {number} (turn {}): {}, {}, {} live after it",
        round.turn.0,
        pluralize(round.steps, "step"),
        pluralize(round.votes as u64, "vote"),
        pluralize(round.live as u64, "token"),
    );
    for departures in round.pruned.chunk_by(|a, b| a.chunk == b.chunk) {
        let tokens: usize = departures.iter().map(|l| l.tokens).sum();
        let (first, more) = (&departures[0], departures.len() - 1);
        let more = if more > 0 {
            format!(", and so on in {}", pluralize(more as u64, "later step"))
        } else {
            String::new()
        };
        let tokens = pluralize(tokens as u64, "token");
        let _ = writeln!(out, "  left      {:<9} {tokens}: {}{more}", first.chunk.to_string(), first.reason);
    }
    if let Some(exceeded) = &round.exceeded {
        let _ = writeln!(out, "  exceeded  {exceeded}");
    }
    let shown = |n: usize| n.saturating_sub(MAX_LISTED);
    for (step, why) in round.attention_errors.iter().take(MAX_LISTED) {
        let _ = writeln!(out, "  unusable  step {step}: {why}");
    }
    if shown(round.attention_errors.len()) > 0 {
        let _ = writeln!(
            out,
            "  unusable  and {}",
            pluralize(shown(round.attention_errors.len()) as u64, "more step")
        );
    }
    for (step, sum) in round.off_sums.iter().take(MAX_LISTED) {
        let _ = writeln!(out, "  doubtful  step {step}: its attention sums to {sum:.3}, not to 1");
    }
    if shown(round.off_sums.len()) > 0 {
        let _ =
            writeln!(out, "  doubtful  and {}", pluralize(shown(round.off_sums.len()) as u64, "more step"));
    }
    if round.padded_rows > 0 {
        let _ = writeln!(out, "  padded    {}, which has no effect", pluralize(round.padded_rows, "step"));
    }
}

/// The maximum number of listed errors of a kind.
const MAX_LISTED: usize = 5;
