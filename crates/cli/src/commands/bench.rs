//! `halo bench`: the figures that Halo claims, measured here and now.

use super::{print, print_json};
use anyhow::Result;
use halo_bench::core::Figure;
use serde_json::json;
use std::fmt::Write;
use std::time::Duration;

/// How long to measure.
#[derive(clap::Args)]
pub struct Options {
    /// The least time that each figure is measured for, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    time: Duration,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "write a number of seconds, such as 1 or 0.2".to_owned())?;
    if !(0.0..=3600.0).contains(&seconds) {
        return Err("write a number of seconds from 0 to 3600".into());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Measures the core.
pub fn core(options: &Options, as_json: bool) -> Result<()> {
    let figures = halo_bench::core::run(options.time);
    if as_json {
        return print_json(&json!({ "figures": figures.iter().map(row).collect::<Vec<_>>() }));
    }
    let mut out = format!(
        "{:<84}{:>10}  {:<6}{:>10}{:>9}{:>8}\n",
        "figure", "measured", "unit", "baseline", "ratio", "budget"
    );
    let number = |n: Option<f64>| {
        n.map_or_else(|| "–".into(), |n| if n < 10.0 { format!("{n:.3}") } else { format!("{n:.1}") })
    };
    for figure in &figures {
        let _ = writeln!(
            out,
            "{:<84}{:>10}  {:<6}{:>10}{:>9}{:>8}{}",
            figure.name,
            number(Some(figure.value)),
            figure.unit,
            number(figure.baseline),
            number(figure.speedup()),
            number(figure.budget),
            if figure.within() { "" } else { "  OVER" },
        );
    }
    out.push_str("\nratio = baseline ÷ measured, both of this run: larger is better.\n");
    print(&out)
}

fn row(figure: &Figure) -> serde_json::Value {
    json!({
        "name": figure.name,
        "unit": figure.unit,
        "value": figure.value,
        "baseline": figure.baseline,
        "ratio": figure.speedup(),
        "budget": figure.budget,
        "within_budget": figure.budget.map(|_| figure.within()),
    })
}
