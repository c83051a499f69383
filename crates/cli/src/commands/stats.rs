//! `halo stats`: statistics per turn of a conversation.

use super::conversations::{ConversationArgs, open_existing};
use crate::env::Env;
use crate::output::{explain_window, group_digits, pluralize, print_json, print_stdout};
use anyhow::Result;
use halo_core::store::{Access, RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_engine::turn_record::{AttentionSample, TurnRecord};
use halo_engine::window_size;
use halo_recall::recall::Recall;
use halo_store::database::Database;
use serde_json::{Value, json};
use std::fmt::Write;

#[derive(clap::Args)]
pub struct StatsArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Number of latest turns to print; 0: all
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Print totals instead: live and dead tokens, index entries, next position and turn
    #[arg(long)]
    totals: bool,
}

pub fn run(options: &StatsArgs, env: &Env) -> Result<()> {
    let (mut store, timeline) = open_existing(env, &options.conversation.name, Access::Read)?;
    if options.totals {
        return print_store_figures(&mut store, &options.conversation.name, &timeline, env);
    }
    let records = store.records(&options.conversation.name, RecordKind::Turn)?;
    // A record that cannot be parsed is skipped: other turns are still printed.
    let mut turns: Vec<(u64, i64, TurnRecord)> = (records.iter())
        .filter_map(|record| {
            let turn = record.key.parse().ok()?;
            Some((turn, record.updated_at, TurnRecord::from_json(&record.value)?))
        })
        .collect();
    turns.sort_by_key(|(turn, ..)| *turn);
    let skipped = if options.limit == 0 { 0 } else { turns.len().saturating_sub(options.limit) };
    let printed = &turns[skipped..];
    if env.json {
        return print_json(&printed.iter().map(turn_json).collect());
    }
    if turns.is_empty() {
        return print_stdout("no turn has been answered yet: `halo chat` starts a conversation\n");
    }
    let mut out = format!(
        "{:>6}  {:<12}{:>7}{:>7}{:>10}{:>9}{:>7}{:>10}{:>9}{:>10}{:>9}{:>9}\n",
        "turn",
        "ended",
        "tokens",
        "window",
        "pressure",
        "returned",
        "pruned",
        "first ms",
        "tok/s",
        "total ms",
        "own ms",
        "own %"
    );
    for (turn, _, record) in printed {
        let _ = write!(out, "{turn:>6}  {:<12}", record.finish);
        let Some(figures) = &record.figures else {
            out.push('\n');
            continue;
        };
        let (all, own) = (figures.stages.total_ms(), figures.stages.overhead_ms());
        let pressure = figures.pressure().map_or_else(String::new, percent);
        let _ = writeln!(
            out,
            "{:>7}{:>7}{pressure:>10}{:>9}{:>7}{:>10.0}{:>9.1}{all:>10.0}{own:>9.1}{:>9.1}",
            figures.tokens,
            figures.live_tokens,
            figures.resurrected,
            figures.pruned,
            figures.stages.first_token_ms(),
            figures.tokens_per_second(),
            if all > 0.0 { own / all * 100.0 } else { 0.0 },
        );
    }
    let cycles = printed.iter().filter_map(|(turn, _, record)| Some((turn, record.forgetting.as_ref()?)));
    for (turn, cycle) in cycles {
        let _ = writeln!(
            out,
            "\nforgetting cycle {} after turn {turn}: pressure {} to {}, {} pruned, {} erased, {} disabled",
            cycle.runs,
            percent(cycle.initial_pressure),
            percent(cycle.final_pressure),
            pluralize(cycle.pruned as u64, "paragraph"),
            cycle.forgotten,
            match cycle.disabled_memories.len() {
                1 => "1 memory".to_owned(),
                count => format!("{count} memories"),
            },
        );
    }
    let cooled: usize =
        printed.iter().filter_map(|(_, _, record)| Some(record.figures.as_ref()?.cooled_messages)).sum();
    if cooled > 0 {
        let _ = writeln!(out, "\ncooled: {} shortened in prompts", pluralize(cooled as u64, "answer"));
    }
    if skipped > 0 {
        let _ = writeln!(out, "\n{skipped} earlier turns: -n 0 prints all");
    }
    let settings = store.records(&options.conversation.name, RecordKind::Setting)?;
    let is_auto = env.load_settings()?.settings.auto_sizes().window;
    let speed = window_size::speed_in_settings(&settings).filter(|_| is_auto);
    let limit = turns.iter().rev().find_map(|(_, _, record)| record.figures.as_ref()?.token_limit);
    if let Some(limit) = limit {
        let window = match &speed {
            Some(speed) => explain_window(limit, Some(speed.tokens_per_second)),
            None => format!("{} tokens", group_digits(limit)),
        };
        let _ = writeln!(out, "\ncontext window: {window}");
    }
    let traced = printed.iter().rev().find_map(|(turn, _, record)| {
        let samples = &record.figures.as_ref()?.attention;
        (!samples.is_empty()).then_some((turn, samples))
    });
    if let Some((turn, samples)) = traced {
        out.push_str(&attention_table(*turn, samples));
    }
    out.push_str("\npressure: share of the context window in use. own: time outside the model (prefill and generation). --json prints every stage, and the attention of all turns.\n");
    print_stdout(&out)
}

/// The attention samples of a turn: statistics, and the distribution as a bar per bin.
fn attention_table(turn: u64, samples: &[AttentionSample]) -> String {
    let mut out = format!(
        "\nattention in turn {turn}, every trace.interval steps\n{:>6}{:>10}{:>10}{:>10}{:>10}{:>10}  distribution\n",
        "step", "mean", "median", "max", "min", "std"
    );
    for sample in samples {
        let AttentionSample { step, mean, median, max, min, std, histogram } = sample;
        let bars = sparkline(histogram);
        let _ = writeln!(out, "{step:>6}{mean:>10.6}{median:>10.6}{max:>10.6}{min:>10.6}{std:>10.6}  {bars}");
    }
    out.push_str(
        "distribution: tokens by the attention that they received, from under 1/32768 to over 1/2; each bar doubles it\n",
    );
    out
}

/// A bar per count, the largest one full; a count of 0 is a dot. Heights are logarithmic: most tokens receive little.
fn sparkline(counts: &[u32]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let log = |count: u32| f64::from(count + 1).log2();
    let most = counts.iter().copied().max().map_or(1.0, log);
    let bar = |&count: &u32| match count {
        0 => '·',
        _ => BARS[((log(count) / most * 8.0).ceil() as usize).clamp(1, 8) - 1],
    };
    counts.iter().map(bar).collect()
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// What the store holds of a conversation.
fn print_store_figures(store: &mut Database, name: &str, timeline: &Timeline, env: &Env) -> Result<()> {
    let recall = Recall::open(store, name, timeline, None)?;
    let (live, all) = (timeline.live_len(), timeline.len());
    let entries = recall.index().len();
    let (next_position, next_turn) = (timeline.next_position().0, timeline.next_turn().0);
    if env.json {
        return print_json(&json!({
            "live_tokens": live,
            "dead_tokens": all - live,
            "semantic_entries": entries,
            "next_position": next_position,
            "next_turn": next_turn,
        }));
    }
    print_stdout(&format!(
        "live tokens        {live:>10}\ndead tokens        {:>10}\nindex entries      {entries:>10}\nnext position      \
         {next_position:>10}\nnext turn          {next_turn:>10}\n",
        all - live
    ))
}

fn turn_json((turn, at, record): &(u64, i64, TurnRecord)) -> Value {
    let mut json = json!({
        "turn": turn,
        "at": at,
        "finish": record.finish,
        "error": record.error,
        "premise": record.premise,
        "forgetting": record.forgetting,
    });
    if let Some(figures) = &record.figures {
        json["tokens"] = json!(figures.tokens);
        json["resurrected"] = json!(figures.resurrected);
        json["pruned"] = json!(figures.pruned);
        json["cooled"] = json!(figures.cooled_messages);
        json["live"] = json!(figures.live_tokens);
        json["limit"] = json!(figures.token_limit);
        json["pressure"] = json!(figures.pressure());
        json["ms"] = json!(figures.stages.by_name());
        json["attention"] = json!(figures.attention);
        json["below_floor"] = json!(figures.below_floor);
    }
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_draw_the_distribution_of_attention() {
        assert_eq!(sparkline(&[0, 1, 3, 7, 127, 0]), "·▂▃▄█·");
        assert_eq!(sparkline(&[0, 0]), "··");
        let sample = AttentionSample {
            step: 50,
            mean: 0.25,
            median: 0.25,
            max: 0.4,
            min: 0.1,
            std: 0.125,
            histogram: vec![0, 0, 2, 1],
        };
        let table = attention_table(7, &[sample]);
        let row = table.lines().nth(3).expect("a row");
        assert_eq!(row, "    50  0.250000  0.250000  0.400000  0.100000  0.125000  ··█▆");
        assert!(table.starts_with("\nattention in turn 7, every trace.interval steps\n"), "{table}");
    }
}
