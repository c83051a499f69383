//! The core's hot paths under criterion: `cargo bench -p halo-bench`. The same work as `halo bench core`.

use criterion::{Criterion, criterion_group, criterion_main};
use halo_bench::core::{CHUNK, attention, conversation, middle, prune_and_return, prune_rules};
use halo_core::brightness::{Magnitude, Strategy};
use halo_core::prune::plan_prune;
use halo_core::scorer::Scorer;

fn core(c: &mut Criterion) {
    let million = conversation(1_000_000, 30_000);
    let mut scorer = Scorer::new(Strategy::Magnitude(Magnitude::default()), million.view(0), None);
    let row = attention(scorer.len(), 40);
    c.bench_function("score a step over 30,000", |b| b.iter(|| scorer.observe(Some(&row))));
    c.bench_function("live view of 30,000 in 1,000,000", |b| b.iter(|| million.view(0).ids()));
    let crowded = conversation(15_000 * CHUNK, 15_000 * CHUNK);
    let rules = prune_rules(crowded.live_len() - 2_000);
    c.bench_function("plan a prune over 15,000 chunks", |b| b.iter(|| plan_prune(crowded.view(0), &rules)));
    for tokens in [10_000, 1_000_000] {
        let mut timeline = conversation(tokens, 5_000);
        let changes = prune_and_return(middle(&timeline));
        c.bench_function(&format!("prune and return in {tokens}"), |b| {
            b.iter(|| changes.iter().map(|change| timeline.apply(change)).collect::<Vec<_>>());
        });
    }
}

criterion_group!(benches, core);
criterion_main!(benches);
