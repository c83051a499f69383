//! Chat templates of model files that are made to do harm.

use crate::common::{chat_once, iterations, temp_dir};
use crate::special_tokens::write_renamed_model;
use halo_llama::template_runner::TemplateRunner;
use std::time::{Duration, Instant};

/// Templates that double a text, or loop, again and again.
const TEMPLATE_BOMBS: [&str; 11] = [
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x|replace('x', 'xxxxxxxx') %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x, ns.x]|join(ns.x) %}{% endfor %}{{ ns.x }}",
    "{{ range(9999)|join(range(9999)|join(range(9999)|join(','))) }}",
    "{{ range(100000000)|list|length }}{{ range(99999)|list|string|replace('1', range(99999)|list|string) }}",
    "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}x{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ 'x' * 4000000000 }}{{ ('x' * 100000000)|replace('x', 'x' * 1000) }}",
    "{% set ns = namespace(x=[1, 2]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|tojson }}",
    "{% set ns = namespace(x='x y ') %}{% for i in range(60) %}{% set ns.x = ns.x.split(' ')|join(ns.x) %}{% endfor %}{{ ns.x|upper }}",
];

fn worker() -> TemplateRunner {
    TemplateRunner::Subprocess(env!("CARGO_BIN_EXE_halo").into())
}

/// The worker has 512 MiB and one second of a processor.
#[test]
fn chat_template_bombs_end_within_their_limits() {
    let chatml = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}";
    let end_tokens = ["<|im_end|>".to_owned()];
    let inferred = worker().infer(chatml, "", &end_tokens).expect("the worker runs");
    assert_eq!(inferred, Ok(halo_core::model::ChatTemplate::chatml()));
    for bomb in TEMPLATE_BOMBS {
        let start = Instant::now();
        let inferred = worker().infer(&format!("{chatml}{bomb}"), "", &end_tokens).expect("the worker runs");
        assert!(inferred.is_err(), "{bomb}");
        // One second of processor time takes longer where other tests run beside this one.
        assert!(start.elapsed() < Duration::from_secs(8), "{bomb}: {:?}", start.elapsed());
    }
}

/// Random programs of the parts that bombs are made of.
#[test]
fn chat_template_fuzz_ends_within_its_limits() {
    const STEPS: [&str; 12] = [
        "ns.x + ns.x",
        "ns.x ~ ns.y",
        "ns.x|replace('x', ns.y)",
        "[ns.x, ns.y]|join(ns.x)",
        "(ns.x|list)|join(ns.y)",
        "ns.x * 9999",
        "ns.x|upper|lower|trim",
        "ns.x.split('x')|join(ns.y)",
        "range(99999)|join(ns.x)",
        "ns.x|tojson",
        "ns.x|string|urlencode",
        "(ns.x ~ 'x')[:99999999]",
    ];
    let mut state = 3u64;
    let mut next_below = |limit: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit
    };
    for _ in 0..iterations("HALO_HOSTILE", 12).min(200) {
        let mut source = "{% set ns = namespace(x='x', y='y') %}".to_owned();
        let depth = next_below(3) + 1;
        (0..depth).for_each(|n| source += &format!("{{% for i{n} in range({}) %}}", 1 + next_below(40)));
        for _ in 0..=next_below(4) {
            let variable = ["x", "y"][next_below(2)];
            source += &format!("{{% set ns.{variable} = {} %}}", STEPS[next_below(STEPS.len())]);
        }
        source += &"{% endfor %}".repeat(depth);
        source += "{{ ns.x }}{{ ns.y }}";
        let start = Instant::now();
        let inferred = worker().infer(&source, "", &["</s>".to_owned()]).expect("the worker runs");
        assert!(inferred.is_err(), "{source}");
        assert!(start.elapsed() < Duration::from_secs(8), "{source}: {:?}", start.elapsed());
    }
}

/// A model whose template is a bomb loads with ChatML.
#[test]
fn model_with_template_bomb_still_answers() {
    let home = temp_dir();
    let names = ["<|im_start|>", "<|im_end|>"];
    let model = home.path().join("bomb.gguf");
    write_renamed_model(&model, names, TEMPLATE_BOMBS[0], 3);
    let data = home.path().join("data");
    let error = chat_once(&data, &["--model", model.to_str().expect("UTF-8")], "Hello.");
    assert!(error.contains("cannot be used: it needs too much memory or time"), "{error}");
}
