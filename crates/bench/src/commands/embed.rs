//! `halo-bench embed`: embedding speed and accuracy.

use anyhow::{Result, bail};
use halo_bench::embed;
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use halo_recall::embed::OnnxEncoder;
use serde_json::json;
use std::time::{Duration, Instant};

/// The claim of the founding documents for a chunk, in milliseconds.
const DOCUMENTS_MS: [u32; 2] = [40, 60];

/// Measures the embedder that --model names, or the default one.
pub fn run(env: &Env) -> Result<()> {
    let Some(folder) = env.model_library()?.find_embedder(env.models.name.as_deref())? else {
        bail!("no embedder is installed: `halo models pull` downloads one");
    };
    let begin = Instant::now();
    let mut encoder = OnnxEncoder::open(&folder, env.models.thread_count())?;
    let opened = begin.elapsed().as_secs_f64() * 1e3;
    let report = embed::measure(&mut encoder, Duration::from_secs(3))?;
    let load_ms = opened + report.load_ms;
    // A chunk has at least 64 tokens, some 48 words; embedders read up to 256.
    let typical = report.ms_per_chunk.first().map_or(0.0, |&(_, ms)| ms);
    if env.json {
        return print_json(&json!({
            "embedder": report.name,
            "chunks_per_s": 1e3 / typical,
            "min_cosine": report.min_cosine,
            "references": report.references,
            "ms_per_chunk": report.ms_per_chunk.iter().map(|(words, ms)| json!({ "words": words, "ms": ms })).collect::<Vec<_>>(),
            "documents_ms": DOCUMENTS_MS,
            "load_ms": load_ms,
            "threads": env.models.thread_count(),
        }));
    }
    let mut out =
        format!("{}: loaded in {load_ms:.0} ms, {} threads\n", report.name, env.models.thread_count());
    for (words, ms) in &report.ms_per_chunk {
        out += &format!(
            "  a chunk of {words:>3} words {ms:>7.1} ms, {:>6.1} a second (founding documents: {} to {} ms)\n",
            1e3 / ms,
            DOCUMENTS_MS[0],
            DOCUMENTS_MS[1]
        );
    }
    out += &match report.min_cosine {
        Some(least) => {
            format!("  cosine similarity of at least {least:.5} to {} reference vectors\n", report.references)
        }
        None => "  there are no reference vectors for this model\n".into(),
    };
    print_stdout(&out)
}
