//! Cases that read as one line each: a timeline in its notation, what is done to it, and what comes of it.
//! The files in `cases/` hold them; this file only reads and runs them.

use halo_core::brightness::{Magnitude, Sink, Strategy};
use halo_core::change::Change;
use halo_core::chunk::{ChunkSize, sentences};
use halo_core::prune::{Policy, PruneRules, Rank, Ties, plan_prune};
use halo_core::resurrect::{Hit, ReturnsWith, Skipped, embedding_context, plan_returns};
use halo_core::scorer::Scorer;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, TurnId};
use halo_core::{notation, signals};
use std::collections::BTreeMap;

/// The words of a command: plain ones in order, and those of the form `key=value`.
struct Words<'a> {
    plain: Vec<&'a str>,
    named: BTreeMap<&'a str, &'a str>,
}

impl<'a> Words<'a> {
    fn of(text: &'a str) -> Self {
        let mut words = Words { plain: Vec::new(), named: BTreeMap::new() };
        for word in text.split_whitespace() {
            match word.split_once('=') {
                Some((key, value)) if !key.contains('.') => {
                    words.named.insert(key, value);
                }
                _ => words.plain.push(word),
            }
        }
        words
    }

    fn number(&self, key: &str) -> usize {
        self.named.get(key).map_or(0, |n| n.parse().expect("a number"))
    }

    fn current(&self) -> Option<TurnId> {
        self.named.contains_key("current").then(|| TurnId(self.number("current") as u32))
    }
}

struct Stage {
    timeline: Timeline,
    undo: Vec<Change>,
}

impl Stage {
    fn run(&mut self, command: &str) -> String {
        let (verb, rest) = command.split_once(' ').unwrap_or((command, ""));
        let words = Words::of(rest);
        let chunk = || words.plain[0].parse::<ChunkId>().expect("a chunk");
        let full = Brightness(10_000.0);
        match verb {
            "prune" => self.prune(&words),
            "return" => self.bring_back(&words),
            "pin" => self.signal(signals::pin(&self.timeline, chunk(), full)),
            "unpin" => self.signal(signals::unpin(&self.timeline, chunk())),
            "call" => self.signal(signals::resurrect(&self.timeline, chunk(), full)),
            "send" => self.signal(signals::prune(&self.timeline, chunk(), words.current())),
            "delete" => self.signal(signals::delete(&self.timeline, chunk())),
            "restore" => self.signal(signals::restore(&self.timeline, chunk())),
            "merge" => self.signal(signals::merge(&self.timeline, chunk())),
            "undo" => {
                let undo = self.undo.pop().expect("something to undo");
                self.timeline.apply(&undo).expect("it can be undone");
                notation::write(&self.timeline)
            }
            "score" => self.score(&words),
            "embed" => {
                let limit = words.plain[1].parse().expect("a limit");
                join(embedding_context(&self.timeline, chunk(), limit))
            }
            "slots" => {
                let positions = self.timeline.view(words.number("prefix")).positions();
                join(positions.iter().map(|p| p.0))
            }
            other => panic!("no such command: {other}"),
        }
    }

    fn apply(&mut self, change: Option<Change>) {
        if let Some(change) = change {
            self.undo.push(self.timeline.apply(&change).expect("planned on this timeline"));
            self.timeline.check().expect("sound");
        }
    }

    fn signal(&mut self, plan: Result<Change, signals::SignalError>) -> String {
        match plan {
            Err(error) => format!("! {error}"),
            Ok(change) => {
                self.apply(Some(change));
                notation::write(&self.timeline)
            }
        }
    }

    fn prune(&mut self, words: &Words<'_>) -> String {
        let rank = match words.named.get("rank") {
            None | Some(&"peak") => Rank::Peak,
            Some(&"mean") => Rank::Mean,
            Some(&"top4") => Rank::Top4,
            Some(&"votes") => Rank::Votes,
            Some(&"sum") => Rank::Sum,
            Some(&"share") => Rank::Share,
            Some(other) => panic!("no such rank: {other}"),
        };
        let ties = if words.named.get("ties") == Some(&"older") { Ties::Older } else { Ties::Dimmer };
        let policy = match words.named.get("policy") {
            None => Policy::Brightness { rank, ties },
            Some(&"fifo") => Policy::Fifo,
            Some(&"window") => Policy::Window,
            Some(&"random") => Policy::Random { seed: words.number("seed") as u64 },
            Some(other) => panic!("no such policy: {other}"),
        };
        let rules = PruneRules {
            policy,
            budget: words.plain[0].parse().expect("a budget"),
            sinks: words.number("sinks"),
            recent: words.number("recent"),
            fill: words.plain.contains(&"fill"),
            current: words.current(),
        };
        let plan = plan_prune(self.timeline.view(words.number("prefix")), &rules);
        self.apply(plan.change());
        let mut out = join(plan.leaves.iter().map(|l| l.chunk));
        if let Some(exceeded) = &plan.exceeded {
            out = format!("{out} exceeded {}", exceeded.by).trim_start().to_owned();
        }
        if words.plain.contains(&"why") {
            out = plan.exceeded.as_ref().map(|e| format!("! {e}")).unwrap_or_default();
        }
        if words.plain.contains(&"why") && !plan.leaves.is_empty() {
            out =
                plan.leaves.iter().map(|l| format!("{}: {}", l.chunk, l.why)).collect::<Vec<_>>().join(" | ");
        }
        out
    }

    fn bring_back(&mut self, words: &Words<'_>) -> String {
        let hit = |word: &&str| {
            let (chunk, score) = word.split_once('=').expect("chunk=score");
            Hit { chunk: chunk.parse().expect("a chunk"), score: score.parse().expect("a score") }
        };
        let boost = words.named.get("boost").map_or(1.0, |b| b.parse().expect("a factor"));
        let hits = words.plain[1..].iter().filter(|w| **w != "why").map(|word| hit(word).raised(boost));
        let mut hits: Vec<Hit> = hits.collect();
        hits.sort_by(|a, b| b.score.total_cmp(&a.score));
        let with = match words.named.get("with") {
            None => ReturnsWith::Earned,
            Some(&"mean") => {
                let mean = self.timeline.view(0).mean_brightness(words.current());
                ReturnsWith::Fixed(mean.expect("something is live"))
            }
            Some(b) => ReturnsWith::Fixed(Brightness(b.parse().expect("a brightness"))),
        };
        let budget = words.plain[0].parse().expect("a budget");
        let plan = plan_returns(&self.timeline, &hits, budget, with);
        self.apply(plan.change());
        if words.plain.contains(&"why") {
            return plan
                .returns
                .iter()
                .map(|r| format!("{}: {}", r.chunk, r.why))
                .collect::<Vec<_>>()
                .join(" | ");
        }
        let mut out = vec![join(plan.returns.iter().map(|r| r.chunk))];
        out.extend(plan.skipped.iter().map(|(chunk, why)| match why {
            Skipped::Live => format!("{chunk} is live"),
            Skipped::Withdrawn => format!("{chunk} is deleted"),
            Skipped::Unknown => format!("{chunk} is unknown"),
            Skipped::TooLarge { cost, left } => format!("{chunk} needs {cost} of {left}"),
        }));
        out.retain(|s| !s.is_empty());
        if words.named.contains_key("with") {
            out.push(notation::write(&self.timeline));
        }
        out.join(", ")
    }

    fn score(&mut self, words: &Words<'_>) -> String {
        let mut magnitude = Magnitude::default();
        if words.named.get("sink") == Some(&"max") {
            magnitude.sink = Sink::Max;
        }
        magnitude.score_current_turn = words.named.contains_key("all");
        let row: Vec<f32> = words.plain.iter().map(|a| a.parse().expect("attention")).collect();
        let prefix = words.number("prefix");
        let strategy = Strategy::Magnitude(magnitude);
        let mut scorer = Scorer::new(strategy, self.timeline.view(prefix), words.current());
        let observed = match words.named.contains_key("prompt") {
            true => scorer.observe_prompt(&row),
            false => scorer.observe((!row.is_empty()).then_some(&row)),
        };
        let change = scorer.finish();
        self.apply(Some(change));
        let state = notation::write(&self.timeline);
        match observed {
            Ok(_) => state,
            Err(fault) => format!("! {fault} | {state}"),
        }
    }
}

fn join<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|i| i.to_string()).collect::<Vec<_>>().join(" ")
}

/// Runs a file of cases: a line at the margin is a timeline, an indented one a command and what comes of it.
fn run(name: &str, text: &str) -> usize {
    let mut stage = Stage { timeline: Timeline::new(), undo: Vec::new() };
    let (mut count, mut wrong) = (0, Vec::new());
    for (number, line) in text.lines().enumerate().map(|(n, l)| (n + 1, l)) {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        if !line.starts_with(' ') {
            let timeline = notation::read(line).unwrap_or_else(|e| panic!("{name}:{number}: {e}"));
            assert_eq!(notation::write(&timeline), line, "{name}:{number}: not the shortest way to write it");
            stage = Stage { timeline, undo: Vec::new() };
            continue;
        }
        let (command, expected) =
            line.trim().split_once("=>").unwrap_or_else(|| panic!("{name}:{number}: no =>"));
        let actual = stage.run(command.trim());
        count += 1;
        if actual != expected.trim() {
            wrong.push(format!(
                "{name}:{number}: {}\n  expected {}\n  actual   {actual}",
                command.trim(),
                expected.trim()
            ));
        }
    }
    assert!(wrong.is_empty(), "{} of {count} are wrong\n{}", wrong.len(), wrong.join("\n"));
    count
}

#[test]
fn pruning() {
    assert!(run("prune.txt", include_str!("cases/prune.txt")) >= 40);
}

#[test]
fn returning() {
    assert!(run("return.txt", include_str!("cases/return.txt")) >= 25);
}

#[test]
fn manual_signals() {
    assert!(run("signals.txt", include_str!("cases/signals.txt")) >= 30);
}

#[test]
fn scoring() {
    assert!(run("score.txt", include_str!("cases/score.txt")) >= 15);
}

/// Messages cut into chunks: sizes, tokens between bars, and the same with a double bar where a chunk ends.
#[test]
fn chunking() {
    let text = include_str!("cases/chunk.txt");
    let (mut count, mut wrong) = (0, Vec::new());
    for (number, line) in text.lines().enumerate().filter(|(_, l)| !l.is_empty() && !l.starts_with('#')) {
        let (sizes, cut) = line.split_once(": ").expect("sizes");
        let (min, max) = sizes.split_once('-').expect("min-max");
        let size = ChunkSize { min: min.parse().expect("a number"), max: max.parse().expect("a number") };
        let escaped: Vec<&str> = cut.split('|').filter(|t| !t.is_empty()).collect();
        let tokens: Vec<String> =
            escaped.iter().map(|t| t.replace("\\n", "\n").replace("\\r", "\r")).collect();
        let sentences = sentences(size, tokens.iter().map(String::as_str));
        let mut actual = String::new();
        for (i, token) in escaped.iter().enumerate() {
            let next = i > 0 && sentences[i] != sentences[i - 1];
            actual += if i == 0 {
                ""
            } else if next {
                "||"
            } else {
                "|"
            };
            actual += token;
        }
        count += 1;
        if actual != cut {
            wrong.push(format!("chunk.txt:{}\n  expected {cut}\n  actual   {actual}", number + 1));
        }
    }
    assert!(wrong.is_empty(), "{} of {count} are wrong\n{}", wrong.len(), wrong.join("\n"));
    assert!(count >= 25);
}
