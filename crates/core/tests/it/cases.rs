//! Runs the cases in `cases/`: a timeline in its notation, commands on it, and the expected results, one per
//! line.

use halo_core::brightness::{AttentionSink, MagnitudeRules, ScoringStrategy};
use halo_core::change::Change;
use halo_core::chunker::{ChunkSize, chunk_indices};
use halo_core::prune::{PrunePolicy, PruneRules, RankBy, TieBreak, plan_prune};
use halo_core::resurrect::{
    Hit, ResurrectSkipReason, ResurrectedBrightness, embedding_context, plan_resurrection,
};
use halo_core::scorer::Scorer;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, TurnId};
use halo_core::{manual_edit, notation};
use std::collections::BTreeMap;

/// The arguments of a command: positional ones, and named ones of the form `key=value`.
struct CaseArgs<'a> {
    positional: Vec<&'a str>,
    named: BTreeMap<&'a str, &'a str>,
}

impl<'a> CaseArgs<'a> {
    fn parse(text: &'a str) -> Self {
        let mut args = CaseArgs { positional: Vec::new(), named: BTreeMap::new() };
        for word in text.split_whitespace() {
            match word.split_once('=') {
                Some((key, value)) if !key.contains('.') => {
                    args.named.insert(key, value);
                }
                _ => args.positional.push(word),
            }
        }
        args
    }

    fn number(&self, key: &str) -> usize {
        self.named.get(key).map_or(0, |n| n.parse().expect("a number"))
    }

    fn current(&self) -> Option<TurnId> {
        self.named.contains_key("current").then(|| TurnId(self.number("current") as u32))
    }
}

struct CaseRunner {
    timeline: Timeline,
    undo: Vec<Change>,
}

impl CaseRunner {
    fn run_command(&mut self, command: &str) -> String {
        let (command_name, rest) = command.split_once(' ').unwrap_or((command, ""));
        let args = CaseArgs::parse(rest);
        let chunk = || args.positional[0].parse::<ChunkId>().expect("a chunk id");
        let full = Brightness(10_000.0);
        match command_name {
            "prune" => self.prune(&args),
            "resurrect" => self.resurrect(&args),
            "pin" => self.apply_edit(manual_edit::pin(&self.timeline, chunk(), full)),
            "unpin" => self.apply_edit(manual_edit::unpin(&self.timeline, chunk())),
            "resurrect-chunk" => self.apply_edit(manual_edit::resurrect(&self.timeline, chunk(), full)),
            "prune-chunk" => self.apply_edit(manual_edit::prune(&self.timeline, chunk(), args.current())),
            "delete" => self.apply_edit(manual_edit::delete(&self.timeline, chunk())),
            "undelete" => self.apply_edit(manual_edit::undelete(&self.timeline, chunk())),
            "merge" => self.apply_edit(manual_edit::merge(&self.timeline, chunk())),
            "undo" => {
                let undo = self.undo.pop().expect("a change to undo");
                self.timeline.apply(&undo).expect("the inverse applies");
                notation::write(&self.timeline)
            }
            "score" => self.score(&args),
            "embed" => {
                let limit = args.positional[1].parse().expect("a limit");
                join_words(embedding_context(&self.timeline, chunk(), limit))
            }
            "slots" => {
                let positions = self.timeline.context_window(args.number("prefix")).positions();
                join_words(positions.iter().map(|p| p.0))
            }
            other => panic!("no such command: {other}"),
        }
    }

    fn apply(&mut self, change: Option<Change>) {
        if let Some(change) = change {
            self.undo.push(self.timeline.apply(&change).expect("planned on this timeline"));
            self.timeline.check_invariants().expect("the invariants hold");
        }
    }

    fn apply_edit(&mut self, plan: Result<Change, manual_edit::ManualEditError>) -> String {
        match plan {
            Err(error) => format!("! {error}"),
            Ok(change) => {
                self.apply(Some(change));
                notation::write(&self.timeline)
            }
        }
    }

    fn prune(&mut self, args: &CaseArgs<'_>) -> String {
        let rank = match args.named.get("rank") {
            None | Some(&"peak") => RankBy::Peak,
            Some(&"mean") => RankBy::Mean,
            Some(&"top4") => RankBy::Top4,
            Some(&"votes") => RankBy::Votes,
            Some(&"sum") => RankBy::Sum,
            Some(&"share") => RankBy::Share,
            Some(other) => panic!("no such rank: {other}"),
        };
        let ties = if args.named.get("ties") == Some(&"older") { TieBreak::Older } else { TieBreak::Dimmer };
        let policy = match args.named.get("policy") {
            None => PrunePolicy::Brightness { rank, ties },
            Some(&"fifo") => PrunePolicy::Fifo,
            Some(&"window") => PrunePolicy::Window,
            Some(&"random") => PrunePolicy::Random { seed: args.number("seed") as u64 },
            Some(&"salience") => PrunePolicy::Salience,
            Some(other) => panic!("no such policy: {other}"),
        };
        let rules = PruneRules {
            policy,
            budget: args.positional[0].parse().expect("a budget"),
            sinks: args.number("sinks"),
            recent: args.number("recent"),
            fill: args.positional.contains(&"fill"),
            current: args.current(),
        };
        let plan = plan_prune(self.timeline.context_window(args.number("prefix")), &rules);
        self.apply(plan.change());
        let mut out = join_words(plan.pruned.iter().map(|p| p.chunk));
        if let Some(exceeded) = &plan.exceeded {
            out = format!("{out} exceeded {}", exceeded.by).trim_start().to_owned();
        }
        if args.positional.contains(&"reason") {
            out = plan.exceeded.as_ref().map(|e| format!("! {e}")).unwrap_or_default();
        }
        if args.positional.contains(&"reason") && !plan.pruned.is_empty() {
            out = plan
                .pruned
                .iter()
                .map(|p| format!("{}: {}", p.chunk, p.reason))
                .collect::<Vec<_>>()
                .join(" | ");
        }
        out
    }

    fn resurrect(&mut self, args: &CaseArgs<'_>) -> String {
        let hit = |word: &&str| {
            let (chunk, score) = word.split_once('=').expect("chunk=score");
            Hit { chunk: chunk.parse().expect("a chunk id"), score: score.parse().expect("a score") }
        };
        let boost = args.named.get("boost").map_or(1.0, |b| b.parse().expect("a factor"));
        let hits =
            args.positional[1..].iter().filter(|w| **w != "reason").map(|word| hit(word).boosted(boost));
        let mut hits: Vec<Hit> = hits.collect();
        hits.sort_by(|a, b| b.score.total_cmp(&a.score));
        let brightness = match args.named.get("brightness") {
            None | Some(&"earned") => ResurrectedBrightness::Earned,
            Some(&"mean") => {
                let mean = self.timeline.context_window(0).mean_brightness(args.current());
                ResurrectedBrightness::Fixed(mean.expect("the window is not empty"))
            }
            Some(b) => ResurrectedBrightness::Fixed(Brightness(b.parse().expect("a brightness"))),
        };
        let budget = args.positional[0].parse().expect("a budget");
        let plan = plan_resurrection(&self.timeline, &hits, budget, brightness);
        self.apply(plan.change());
        if args.positional.contains(&"reason") {
            return plan
                .resurrected
                .iter()
                .map(|r| format!("{}: {}", r.chunk, r.reason))
                .collect::<Vec<_>>()
                .join(" | ");
        }
        let mut out = vec![join_words(plan.resurrected.iter().map(|r| r.chunk))];
        out.extend(plan.skipped.iter().map(|(chunk, reason)| match reason {
            ResurrectSkipReason::AlreadyLive => format!("{chunk} is live"),
            ResurrectSkipReason::Deleted => format!("{chunk} is deleted"),
            ResurrectSkipReason::UnknownChunk => format!("{chunk} is unknown"),
            ResurrectSkipReason::TooLarge { cost, left } => format!("{chunk} needs {cost} of {left}"),
        }));
        out.retain(|s| !s.is_empty());
        if args.named.contains_key("brightness") {
            out.push(notation::write(&self.timeline));
        }
        out.join(", ")
    }

    fn score(&mut self, args: &CaseArgs<'_>) -> String {
        let mut magnitude = MagnitudeRules::default();
        if args.named.get("sink") == Some(&"max") {
            magnitude.sink = AttentionSink::Max;
        }
        magnitude.score_current_turn = args.named.contains_key("all");
        let row: Vec<f32> = args.positional.iter().map(|a| a.parse().expect("attention")).collect();
        let prefix = args.number("prefix");
        let strategy = ScoringStrategy::Magnitude(magnitude);
        let mut scorer = Scorer::new(strategy, self.timeline.context_window(prefix), args.current());
        let observed = match args.named.contains_key("prompt") {
            true => scorer.observe_prompt(&row),
            false => scorer.observe((!row.is_empty()).then_some(&row)),
        };
        let change = scorer.finish();
        self.apply(Some(change));
        let state = notation::write(&self.timeline);
        match observed {
            Ok(_) => state,
            Err(error) => format!("! {error} | {state}"),
        }
    }
}

fn join_words<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|i| i.to_string()).collect::<Vec<_>>().join(" ")
}

/// Runs a file of cases: a line at the margin is a timeline, an indented line is a command and its expected
/// result. Returns how many commands it has run.
fn run_case_file(name: &str, text: &str) -> usize {
    let mut runner = CaseRunner { timeline: Timeline::new(), undo: Vec::new() };
    let (mut count, mut failures) = (0, Vec::new());
    for (number, line) in text.lines().enumerate().map(|(n, l)| (n + 1, l)) {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        if !line.starts_with(' ') {
            let timeline = notation::read(line).unwrap_or_else(|e| panic!("{name}:{number}: {e}"));
            assert_eq!(notation::write(&timeline), line, "{name}:{number}: not the shortest way to write it");
            runner = CaseRunner { timeline, undo: Vec::new() };
            continue;
        }
        let (command, expected) =
            line.trim().split_once("=>").unwrap_or_else(|| panic!("{name}:{number}: no =>"));
        let actual = runner.run_command(command.trim());
        count += 1;
        if actual != expected.trim() {
            failures.push(format!(
                "{name}:{number}: {}\n  expected {}\n  actual   {actual}",
                command.trim(),
                expected.trim()
            ));
        }
    }
    assert!(failures.is_empty(), "{} of {count} have failed\n{}", failures.len(), failures.join("\n"));
    count
}

#[test]
fn prune_cases() {
    assert!(run_case_file("prune.txt", include_str!("../cases/prune.txt")) >= 40);
}

#[test]
fn resurrect_cases() {
    assert!(run_case_file("resurrect.txt", include_str!("../cases/resurrect.txt")) >= 25);
}

#[test]
fn manual_edit_cases() {
    assert!(run_case_file("manual_edit.txt", include_str!("../cases/manual_edit.txt")) >= 30);
}

#[test]
fn score_cases() {
    assert!(run_case_file("score.txt", include_str!("../cases/score.txt")) >= 15);
}

/// Messages cut into chunks: sizes, then tokens between bars, with a double bar where a chunk ends.
#[test]
fn chunker_cases() {
    let text = include_str!("../cases/chunk.txt");
    let (mut count, mut failures) = (0, Vec::new());
    for (number, line) in text.lines().enumerate().filter(|(_, l)| !l.is_empty() && !l.starts_with('#')) {
        let (sizes, expected) = line.split_once(": ").expect("sizes before a colon");
        let (min, max) = sizes.split_once('-').expect("min-max");
        let size = ChunkSize { min: min.parse().expect("a number"), max: max.parse().expect("a number") };
        let escaped: Vec<&str> = expected.split('|').filter(|t| !t.is_empty()).collect();
        let tokens: Vec<String> =
            escaped.iter().map(|t| t.replace("\\n", "\n").replace("\\r", "\r")).collect();
        let indices = chunk_indices(size, tokens.iter().map(String::as_str));
        let mut actual = String::new();
        for (i, token) in escaped.iter().enumerate() {
            let starts_chunk = i > 0 && indices[i] != indices[i - 1];
            actual += if i == 0 {
                ""
            } else if starts_chunk {
                "||"
            } else {
                "|"
            };
            actual += token;
        }
        count += 1;
        if actual != expected {
            failures.push(format!("chunk.txt:{}\n  expected {expected}\n  actual   {actual}", number + 1));
        }
    }
    assert!(failures.is_empty(), "{} of {count} have failed\n{}", failures.len(), failures.join("\n"));
    assert!(count >= 25);
}
