//! `halo-bench search`: time and recall of approximate vector search.

use anyhow::{Context, Result, ensure};
use halo_bench::search::{self, SearchBenchPlan, VectorDistribution};
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use serde_json::json;
use std::fmt::Write;
use std::num::NonZero;

#[derive(clap::Args)]
pub struct SearchBenchOptions {
    /// Number of vectors; several sizes are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [100_000, 1_000_000])]
    entries: Vec<usize>,
    /// Dimensions of a vector
    #[arg(long, value_name = "N", default_value = "384")]
    dimensions: NonZero<u16>,
    /// Number of queries to measure
    #[arg(long, value_name = "N", default_value_t = 300)]
    queries: usize,
    /// Distribution of the vectors
    #[arg(long, value_name = "KIND", default_value = "sentences")]
    rows: RowDistribution,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum RowDistribution {
    /// Distributed as embeddings of sentences
    Sentences,
    /// Uniformly random, the hardest case
    Random,
}

impl RowDistribution {
    fn name(self) -> &'static str {
        match self {
            Self::Sentences => "sentences",
            Self::Random => "chance",
        }
    }
}

pub fn run(options: &SearchBenchOptions, env: &Env) -> Result<()> {
    ensure!(options.queries > 0, "--queries must be at least 1");
    let seed = env.settings.seed.as_deref().unwrap_or("1");
    let seed = seed.parse().with_context(|| format!("--seed {seed} is not a whole number"))?;
    let threads = NonZero::new(env.models.threads.unwrap_or(1) as usize).unwrap_or(NonZero::<usize>::MIN);
    let data = match options.rows {
        RowDistribution::Sentences => VectorDistribution::Sentences,
        RowDistribution::Random => VectorDistribution::Random,
    };
    let mut rows = Vec::new();
    let mut out = format!(
        "{:>9}{:>10}{:>10}{:>12}{:>15}{:>9}{:>15}{:>11}{:>11}\n",
        "entries",
        "p50 ms",
        "p99 ms",
        "recall@10",
        "exact, ms",
        "ratio",
        "documents, ms",
        "bytes",
        "build ms"
    );
    for &entries in &options.entries {
        ensure!(entries >= 10, "--entries {entries} must be at least 10");
        let bar = Progress::new("creating vectors", entries as u64);
        let (dimensions, queries) = (options.dimensions, options.queries);
        let plan = SearchBenchPlan { entries, dimensions, data, queries, threads, seed };
        let report = search::measure(&plan, &mut |n| bar.set_position(n as u64))?;
        drop(bar);
        let documents_ms = search::documents_ms(entries);
        rows.push(json!({
            "entries": entries,
            "data": options.rows.name(),
            "dimensions": dimensions,
            "queries": queries,
            "threads": threads,
            "p50_ms": report.p50_ms,
            "p99_ms": report.p99_ms,
            "recall10": report.recall10,
            "brute_force_ms": report.brute_force_ms,
            "ratio": report.speedup(),
            "documents_ms": documents_ms,
            "bytes_per_entry": report.bytes_per_entry,
            "build_ms": report.build_ms,
        }));
        let _ = writeln!(
            out,
            "{entries:>9}{:>10.2}{:>10.2}{:>12.4}{:>15.1}{:>9.1}{documents_ms:>15.0}{:>11.0}{:>11.0}",
            report.p50_ms,
            report.p99_ms,
            report.recall10,
            report.brute_force_ms,
            report.speedup(),
            report.bytes_per_entry,
            report.build_ms,
        );
    }
    if env.json {
        return print_json(&json!(rows));
    }
    out.push_str(
        "\nExact: scoring every unquantized vector in plain code; recall is measured against it.\n\
         Ratio = exact ÷ p50: larger is better.\n",
    );
    print_stdout(&out)
}
