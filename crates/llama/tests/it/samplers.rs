//! Every sampler on the real model.

use crate::common::on_gpu;
use crate::generate::{
    GeneratedSteps, NEVER, QUESTION, generate, greedy, open_model, ram_only, tokenize_window,
};
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    DrySampling, DynamicTemperature, FinishReason, LogitSmoothing, Mirostat, MirostatVersion, Model,
    OutputConstraint, SamplerKind, Sampling, WHOLE_WINDOW, WindowToken, XtcSampling,
};
use halo_core::token::TokenId;
use halo_llama::kv_cache::KvCacheMode;
use halo_llama::model::Llama;

fn answer(model: &mut Llama, window: &[WindowToken], sampling: &Sampling) -> (FinishReason, GeneratedSteps) {
    let (finish, steps) = generate(model, window, sampling, &AttentionRequest::none(), false, NEVER);
    (finish.expect("an answer"), steps)
}

/// A high temperature: without a cut, the answer differs from the greedy one.
fn hot(seed: u64) -> Sampling {
    Sampling { seed, temperature: 2.0, top_k: 0, top_p: 1.0, ..greedy(24) }
}

#[test]
fn samplers_that_leave_one_candidate_are_greedy() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let question = tokenize_window(&mut model, &QUESTION);
    let (_, expected) = answer(&mut model, &question, &greedy(24));
    assert_ne!(answer(&mut model, &question, &hot(3)).1.text, expected.text);
    let temperature_last = vec![SamplerKind::TopK, SamplerKind::Temperature];
    for narrow in [
        Sampling { top_a: 100.0, ..hot(3) },
        Sampling { tail_free: 0.0, ..hot(3) },
        Sampling { top_n_sigma: 0.001, ..hot(3) },
        Sampling { smoothing: LogitSmoothing { factor: 100.0, curve: 1.0 }, min_p: 0.9, ..hot(3) },
        Sampling { temperature: 0.0, dynamic_temperature: DynamicTemperature::default(), ..hot(3) },
        Sampling { top_k: 1, order: temperature_last, ..hot(3) },
    ] {
        assert_eq!(answer(&mut model, &question, &narrow).1.text, expected.text, "{narrow:?}");
    }
    // A sampler that is not in the order does nothing.
    let without = Sampling { top_k: 1, order: vec![SamplerKind::Temperature], ..hot(3) };
    assert_ne!(answer(&mut model, &question, &without).1.text, expected.text);
}

#[test]
fn neutral_samplers_change_no_answer() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let question = tokenize_window(&mut model, &QUESTION);
    let random = Sampling { seed: 5, temperature: 1.2, ..greedy(24) };
    let (_, expected) = answer(&mut model, &question, &random);
    let dry = DrySampling { multiplier: 0.0, base: 9.0, ..DrySampling::default() };
    for neutral in [
        Sampling { penalty_range: WHOLE_WINDOW, penalty_slope: 0.5, ..random.clone() },
        Sampling { dry, ..random.clone() },
        Sampling { xtc: XtcSampling { probability: 0.0, threshold: 0.01 }, ..random.clone() },
        Sampling { order: SamplerKind::DEFAULT_ORDER.to_vec(), ..random.clone() },
        Sampling { logprobs: Some(3), ..random.clone() },
        Sampling { logit_bias: vec![(TokenId(1), 0.0)], ..random.clone() },
    ] {
        assert_eq!(answer(&mut model, &question, &neutral).1.ids, expected.ids, "{neutral:?}");
    }
}

#[test]
fn penalties_and_dry_end_a_loop() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let loops = tokenize_window(&mut model, &["la la la la la la la la la la la la la la la la la"]);
    let (_, looping) = answer(&mut model, &loops, &greedy(8));
    let dry = DrySampling {
        multiplier: 5.0,
        allowed_length: 1,
        sequence_breakers: Vec::new(),
        ..DrySampling::default()
    };
    for penalized in [
        Sampling { frequency_penalty: 2.0, ..greedy(8) },
        Sampling { presence_penalty: 100.0, ..greedy(8) },
        Sampling { repetition_penalty: 10.0, penalty_range: WHOLE_WINDOW, ..greedy(8) },
        Sampling { repetition_penalty: 10.0, penalty_slope: 0.9, ..greedy(8) },
        Sampling { dry, ..greedy(8) },
    ] {
        // On a GPU the greedy answer need not be a loop, and DRY has nothing to end then.
        if on_gpu() && penalized.dry.multiplier > 0.0 {
            continue;
        }
        let (_, broken) = answer(&mut model, &loops, &penalized);
        assert_ne!(broken.ids, looping.ids, "{penalized:?}: {}", broken.text);
    }
    // A range of no tokens counts nothing.
    let without = Sampling { repetition_penalty: 10.0, penalty_range: 0, ..greedy(8) };
    assert_eq!(answer(&mut model, &loops, &without).1.ids, looping.ids);
}

#[test]
fn mirostat_xtc_and_dynamic_temperature_follow_the_seed() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let question = tokenize_window(&mut model, &QUESTION);
    let mirostat = |version| Some(Mirostat { version, tau: 5.0, eta: 0.1 });
    for random in [
        Sampling { mirostat: mirostat(MirostatVersion::One), ..hot(7) },
        Sampling { mirostat: mirostat(MirostatVersion::Two), ..hot(7) },
        Sampling { xtc: XtcSampling { probability: 1.0, threshold: 0.05 }, ..hot(7) },
        Sampling { dynamic_temperature: DynamicTemperature { range: 1.0, exponent: 1.0 }, ..hot(7) },
    ] {
        let (_, first) = answer(&mut model, &question, &random);
        assert_eq!(answer(&mut model, &question, &random).1.ids, first.ids, "{random:?}");
        let other = Sampling { seed: 8, ..random.clone() };
        assert_ne!(answer(&mut model, &question, &other).1.ids, first.ids, "{random:?}");
    }
}

#[test]
fn biases_and_bans_choose_other_tokens() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let question = tokenize_window(&mut model, &QUESTION);
    let (_, plain) = answer(&mut model, &question, &greedy(24));
    assert!(plain.text.contains("Paris"), "{}", plain.text);
    let banned = Sampling { banned_texts: vec!["Paris".into()], ..greedy(24) };
    assert!(!answer(&mut model, &question, &banned).1.text.contains("Paris"));
    let first = TokenId(plain.ids[0]);
    let without_first = Sampling { logit_bias: vec![(first, f32::NEG_INFINITY)], ..greedy(8) };
    assert!(!answer(&mut model, &question, &without_first).1.ids.contains(&first.0));
    let only_first = Sampling { logit_bias: vec![(first, 100.0)], ..greedy(4) };
    assert_eq!(answer(&mut model, &question, &only_first).1.ids, [first.0; 4]);
    let (finish, endless) = answer(&mut model, &question, &Sampling { ignore_end: true, ..greedy(40) });
    assert_eq!((finish, endless.ids.len()), (FinishReason::Length, 40));
}

#[test]
fn logprobs_are_those_of_the_model() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let question = tokenize_window(&mut model, &QUESTION);
    let (_, steps) = answer(&mut model, &question, &Sampling { logprobs: Some(4), ..greedy(6) });
    assert_eq!(steps.logprobs.len(), steps.ids.len());
    for (logprobs, id) in steps.logprobs.iter().zip(&steps.ids) {
        assert_eq!((logprobs.token.id.0, logprobs.top.len()), (*id, 4));
        // The most probable token was taken.
        assert_eq!(logprobs.top[0], logprobs.token);
        assert!(logprobs.top.windows(2).all(|pair| pair[0].logprob >= pair[1].logprob));
        let sum: f32 = logprobs.top.iter().map(|token| token.logprob.exp()).sum();
        assert!(sum > 0.0 && sum <= 1.0 + 1e-4, "{sum}");
    }
    let text: String = steps.logprobs.iter().map(|logprobs| logprobs.token.text()).collect();
    assert_eq!(text, steps.text);
}

#[test]
fn gbnf_grammar_constrains_answers() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let question = tokenize_window(&mut model, &QUESTION);
    let gbnf = "root ::= \"The city is \" name \".\"\nname ::= [A-Z] [a-z]{2,8}";
    let constraint = Some(OutputConstraint::GbnfGrammar(gbnf.into()));
    for temperature in [0.0, 1.0] {
        let sampling = Sampling { constraint: constraint.clone(), temperature, ..greedy(40) };
        let (finish, steps) = answer(&mut model, &question, &sampling);
        let name = steps.text.strip_prefix("The city is ").and_then(|rest| rest.strip_suffix('.'));
        let name = name.unwrap_or_else(|| panic!("{}", steps.text));
        assert_eq!(finish, FinishReason::EndOfText);
        assert!(
            (3..=9).contains(&name.len()) && name.starts_with(|c: char| c.is_ascii_uppercase()),
            "{name}"
        );
    }
    let bad = OutputConstraint::GbnfGrammar("root ::= missing".into());
    let error = model.check_constraint(&bad).expect_err("an unknown rule");
    assert!(error.message.contains("there is no rule 'missing'"), "{error:?}");
}
