//! `halo-bench kv` and `halo-bench attention`: restoring KV cells, and the cost of capturing attention.

use anyhow::{Result, ensure};
use halo_bench::decode_attention::{DecodeBench, DecodeCase};
use halo_bench::kv::{self, KvBenchFigures};
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use halo_cli::progress::Progress;
use halo_llama::ffi::{AttentionSource, KvKeyType, ModelWeights};
use halo_llama::gpu_layers::GpuLayers;
use halo_llama::model::{Llama, LlamaOptions as Running};
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;

#[derive(clap::Args)]
pub struct KvBenchOptions {
    /// Tokens in the context window; several lengths are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [2000, 6000])]
    context: Vec<usize>,
    /// Type of the keys in the KV cache: f16, q8_0 or q4_0
    #[arg(long, value_name = "TYPE", default_value_t = KvKeyType::F16)]
    kv_type: KvKeyType,
    /// Layers of the model on the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu_layers: u32,
    /// Where attention would come from: softmax, or queries with flash attention on; which of them decides the layout of
    /// the cells. Without it as in `halo`: queries with layers on a GPU
    #[arg(long, value_name = "SOURCE")]
    source: Option<AttentionSource>,
}

/// Where attention comes from, if the user did not say it.
fn source_or_default(source: Option<AttentionSource>, gpu_layers: u32) -> AttentionSource {
    let gpu_layers = GpuLayers::Count(gpu_layers);
    Running { gpu_layers, attention: source, ..Running::default() }.attention_source()
}

pub fn kv(options: &KvBenchOptions, env: &Env) -> Result<()> {
    let path = env.model_file()?;
    let weights = Arc::new(ModelWeights::load(&path, options.gpu_layers.cast_signed())?);
    let source = source_or_default(options.source, options.gpu_layers);
    if let Some(why) = weights.kv_edit_unsupported() {
        anyhow::bail!("the KV cells of this model cannot be edited: {why}");
    }
    let trained_context = weights.trained_context() as usize;
    for &context in &options.context {
        ensure!(
            (1000..trained_context).contains(&context),
            "--context {context}: must be 1000 to {} tokens for this model",
            trained_context - 1
        );
    }
    let mut rows = Vec::new();
    let mut out = String::new();
    for &context in &options.context {
        let bar = Progress::new("prefilling", context as u64);
        let mut read = 0;
        let threads = env.models.thread_count();
        let report = kv::measure(&weights, context, threads, options.kv_type, source, &mut |n| {
            read += n;
            bar.set_position(read);
        })?;
        drop(bar);
        let reread = report.prefill_first_token_ms;
        let with_speedup = |figures: &KvBenchFigures| {
            let mut row = figures_json(figures);
            row["speedup"] = json!(figures.speedup(reread));
            row
        };
        let mut row = with_speedup(&report.running);
        row["context"] = json!(context);
        row["kv_type"] = json!(options.kv_type.to_string());
        row["source"] = json!(source.to_string());
        row["reread_first_token_ms"] = json!(reread);
        row["saved_before"] = with_speedup(&report.saved_before);
        row["after_restart"] = with_speedup(&report.after_restart);
        row["after_restart"]["open_ms"] = json!(report.open_ms);
        row["after_restart"]["open_speedup"] = json!(reread / report.open_ms);
        row["after_compaction"] = with_speedup(&report.after_compaction);
        row["noise"] = json!({ "max_logit_diff": report.noise.0, "kl": report.noise.1 });
        row["bytes_per_token"] = json!(report.bytes_per_token);
        rows.push(row);
        let _ = writeln!(out, "{context} tokens: prefill to the next token takes {reread:.0} ms");
        let figures = [
            ("prune and resurrect a chunk", &report.running),
            ("the same, saved before", &report.saved_before),
            ("the same after a restart, from disk", &report.after_restart),
            ("the same after a compaction", &report.after_compaction),
        ];
        for (name, f) in figures {
            let _ = writeln!(
                out,
                "  {name:<36} {:>8.2} + {:>6.2} ms, next token {:>7.1} ms: {:>6.0} times faster; {}",
                f.prune_ms,
                f.resurrect_ms,
                f.first_token_ms,
                f.speedup(reread),
                describe_logits(f),
            );
        }
        let _ = writeln!(
            out,
            "  numerical noise (sixteen tokens in one batch or one by one): KL {:.1e}",
            report.noise.1
        );
        let _ = writeln!(
            out,
            "  opening the conversation after a restart: {:.0} ms to the next token, {:.0} times faster",
            report.open_ms,
            reread / report.open_ms
        );
    }
    if env.json {
        return print_json(&json!(rows));
    }
    out.push_str("\nA chunk is 64 tokens; median of nine.\n");
    print_stdout(&out)
}

/// How near the logits are to those of a window that was never changed.
fn describe_logits(figures: &KvBenchFigures) -> String {
    if figures.is_bit_identical() {
        return "bit-identical".into();
    }
    let top = if figures.top1 { "the same" } else { "another" };
    format!("not bit-identical: KL {:.1e}, {top} top token", figures.kl)
}

fn figures_json(figures: &KvBenchFigures) -> Value {
    json!({
        "prune_ms": figures.prune_ms,
        "resurrect_ms": figures.resurrect_ms,
        "first_token_ms": figures.first_token_ms,
        "max_logit_diff": figures.max_logit_diff,
        "bit_identical": figures.is_bit_identical(),
        "kl": figures.kl,
        "top1": figures.top1,
    })
}

#[derive(clap::Args)]
pub struct AttentionBenchOptions {
    /// Tokens in the context window; several lengths are measured one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [512, 2000, 6000])]
    context: Vec<usize>,
    /// Compare ways of reading attention with llama.cpp itself, with flash attention and without a callback: softmax, queries,
    /// or both
    #[arg(long, value_name = "SOURCE", value_delimiter = ',')]
    source: Vec<AttentionSource>,
    /// With --source: read a row every so many tokens; several are measured; 0: never
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [0, 1, 2, 4, 8], requires = "source")]
    stride: Vec<usize>,
    /// With --source: read so many layers, evenly spaced; several are measured; 0: all
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [0], requires = "source")]
    layers: Vec<usize>,
    /// With --source: type of the keys in the KV cache
    #[arg(long, value_name = "TYPE", default_value_t = KvKeyType::F16, requires = "source")]
    kv_type: KvKeyType,
    /// With --source: rounds of 64 tokens, of which the median counts
    #[arg(long, value_name = "N", default_value_t = 5, requires = "source")]
    rounds: usize,
    /// Layers of the model on the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu_layers: u32,
}

/// `halo-bench attention --source`: ways of reading attention beside llama.cpp itself.
fn decode_attention(options: &AttentionBenchOptions, env: &Env) -> Result<()> {
    let weights = Arc::new(ModelWeights::load(&env.model_file()?, options.gpu_layers.cast_signed())?);
    let mut cases = Vec::new();
    for &source in &options.source {
        ensure!(source != AttentionSource::Nowhere, "--source: softmax or queries");
        for &stride in &options.stride {
            // Without rows the layers make no difference, and the softmax is copied by head and layer in any case.
            let layers = if stride == 0 { &[0] } else { options.layers.as_slice() };
            let layers = layers.iter().map(|&layers| (layers > 0).then_some(layers));
            cases.extend(layers.map(|layers| DecodeCase { source, stride, layers }));
        }
    }
    let mut rows = Vec::new();
    let mut out = String::new();
    for &context in &options.context {
        let bar = Progress::new("prefilling", (context * (1 + options.source.len())) as u64);
        let bench = DecodeBench {
            weights: &weights,
            context,
            threads: env.models.thread_count(),
            key_type: options.kv_type,
            rounds: options.rounds,
            cases: &cases,
        };
        let mut read = 0;
        let figures = bench.measure(&mut |n| {
            read += n;
            bar.set_position(read);
        })?;
        drop(bar);
        for f in figures {
            let layers = f.case.layers.map_or("all".to_owned(), |layers| layers.to_string());
            rows.push(json!({
                "context": context,
                "source": f.case.source.to_string(),
                "stride": f.case.stride,
                "layers": f.case.layers,
                "ms_per_token": f.ms_per_token,
                "share": f.share,
                "row_sum": f.row_sum,
            }));
            let every =
                if f.case.stride == 0 { "no rows".to_owned() } else { format!("every {}", f.case.stride) };
            let _ = writeln!(
                out,
                "{context:>8}  {:<9}{every:<10}{layers:>7}{:>12.3}{:>9.3}{:>9.4}",
                f.case.source, f.ms_per_token, f.share, f.row_sum
            );
        }
    }
    if env.json {
        return print_json(&json!(rows));
    }
    let heading = format!(
        "{:>8}  {:<9}{:<10}{:>7}{:>12}{:>9}{:>9}\n",
        "context", "source", "rows", "layers", "ms/token", "share", "row sum"
    );
    print_stdout(&format!(
        "{heading}{out}\nShare of the speed of llama.cpp with flash attention and no callback; median of {} rounds.\n",
        options.rounds
    ))
}

pub fn attention(options: &AttentionBenchOptions, env: &Env) -> Result<()> {
    if !options.source.is_empty() {
        return decode_attention(options, env);
    }
    let path = env.model_file()?;
    let longest = options.context.iter().copied().max().unwrap_or(0);
    ensure!(options.context.iter().all(|&n| n >= 64), "--context: measure at least 64 tokens");
    let context = Some(u32::try_from(longest + 64)?);
    let (threads, gpu_layers) = (env.models.thread_count(), GpuLayers::Count(options.gpu_layers));
    let mut model = Llama::open(&path, &Running { context, threads, gpu_layers, ..Running::default() })?;
    let mut rows = Vec::new();
    let mut out = format!("{:>8}{:>16}{:>16}{:>9}\n", "context", "tokens/s", "with capture", "ratio");
    for &context in &options.context {
        let bar = Progress::new("prefilling", context as u64);
        let report = halo_bench::attention::measure(&mut model, context, &mut |n| bar.set_position(n))?;
        drop(bar);
        rows.push(json!({
            "context": context,
            "tok_s_plain": report.tok_s_plain,
            "tok_s_capture": report.tok_s_capture,
            "ratio": report.ratio,
        }));
        let _ = writeln!(
            out,
            "{context:>8}{:>16.1}{:>16.1}{:>9.3}",
            report.tok_s_plain, report.tok_s_capture, report.ratio
        );
    }
    if env.json {
        return print_json(&json!(rows));
    }
    out.push_str("\nAll layers, all heads, every token. Answers alternate; median of twelve pairs.\n");
    print_stdout(&out)
}
