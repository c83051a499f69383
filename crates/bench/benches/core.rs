//! Criterion benches of the hot paths in halo-core: `cargo bench -p halo-bench`. `halo-bench core` measures the same
//! work.

use criterion::{Criterion, criterion_group, criterion_main};
use halo_bench::core::{
    CHUNK_TOKENS, middle_live_chunk, prune_and_resurrect, prune_rules, synthetic_attention,
    synthetic_timeline,
};
use halo_core::brightness::{MagnitudeRules, ScoringStrategy};
use halo_core::prune::plan_prune;
use halo_core::scorer::Scorer;

fn core(c: &mut Criterion) {
    let timeline = synthetic_timeline(1_000_000, 30_000);
    let mut scorer =
        Scorer::new(ScoringStrategy::Magnitude(MagnitudeRules::default()), timeline.context_window(0), None);
    let row = synthetic_attention(scorer.len(), 40);
    c.bench_function("score a step over 30,000", |b| b.iter(|| scorer.observe(Some(&row))));
    c.bench_function("live view of 30,000 in 1,000,000", |b| b.iter(|| timeline.context_window(0).ids()));
    let all_live = synthetic_timeline(15_000 * CHUNK_TOKENS, 15_000 * CHUNK_TOKENS);
    let rules = prune_rules(all_live.live_len() - 2_000);
    c.bench_function("plan a prune over 15,000 chunks", |b| {
        b.iter(|| plan_prune(all_live.context_window(0), &rules));
    });
    for tokens in [10_000, 1_000_000] {
        let mut timeline = synthetic_timeline(tokens, 5_000);
        let changes = prune_and_resurrect(middle_live_chunk(&timeline));
        c.bench_function(&format!("prune and resurrect in {tokens}"), |b| {
            b.iter(|| changes.iter().map(|change| timeline.apply(change)).collect::<Vec<_>>());
        });
    }
}

criterion_group!(benches, core);
criterion_main!(benches);
