//! Every parameter under each of its names.

use super::{ApiDialect, RequestFields, RequestedSampling, parse_choice_count, parse_sampling};
use crate::error::ErrorResponse;
use halo_core::model::{
    Mirostat, MirostatVersion, OutputConstraint, SamplerKind, Sampling, UNLIMITED_TOKENS, WHOLE_WINDOW,
};
use halo_core::token::TokenId;
use serde_json::{Value, json};

const DIALECTS: [ApiDialect; 4] =
    [ApiDialect::OpenAi, ApiDialect::Kobold, ApiDialect::Ollama, ApiDialect::LlamaServer];

fn fields(json: Value) -> RequestFields {
    serde_json::from_value(json).expect("an object")
}

fn parse(dialect: ApiDialect, json: &Value) -> Result<RequestedSampling, ErrorResponse> {
    parse_sampling(&fields(json.clone()), &Sampling::default(), dialect)
}

fn sampling(dialect: ApiDialect, json: &Value) -> Sampling {
    parse(dialect, json).unwrap_or_else(|e| panic!("{json}: {}", e.message())).sampling
}

/// Checks that each of the names sets the same value, and that it does so in every dialect.
fn check(names: &[&str], value: &Value, expected: impl Fn(&mut Sampling)) {
    for dialect in DIALECTS {
        for name in names {
            let json = json!({ *name: value, "seed": 1, "max_tokens": 5 });
            let mut wanted = sampling(dialect, &json!({ "seed": 1, "max_tokens": 5 }));
            expected(&mut wanted);
            assert_eq!(sampling(dialect, &json), wanted, "{name} in {dialect:?}");
        }
    }
}

#[test]
fn sampling_parameters_have_the_names_of_all_programs() {
    check(&["temperature", "temp"], &json!(1.5), |s| s.temperature = 1.5);
    check(&["dynatemp_range"], &json!(0.5), |s| s.dynamic_temperature.range = 0.5);
    check(&["dynatemp_exponent"], &json!(2), |s| s.dynamic_temperature.exponent = 2.0);
    check(&["smoothing_factor"], &json!(0.3), |s| s.smoothing.factor = 0.3);
    check(&["smoothing_curve"], &json!(2), |s| s.smoothing.curve = 2.0);
    check(&["top_k"], &json!(7.0), |s| s.top_k = 7);
    check(&["top_k"], &json!(-1), |s| s.top_k = 0);
    check(&["top_p"], &json!(0.25), |s| s.top_p = 0.25);
    check(&["top_p"], &json!(-1), |_| {});
    check(&["min_p"], &json!(0.1), |s| s.min_p = 0.1);
    check(&["top_a"], &json!(0.2), |s| s.top_a = 0.2);
    check(&["tfs", "tfs_z"], &json!(0.9), |s| s.tail_free = 0.9);
    check(&["typical_p", "typical"], &json!(0.8), |s| s.typical_p = 0.8);
    check(&["top_n_sigma", "nsigma"], &json!(1.5), |s| s.top_n_sigma = 1.5);
    check(&["top_n_sigma", "nsigma"], &json!(-1), |_| {});
    check(&["xtc_probability"], &json!(0.5), |s| s.xtc.probability = 0.5);
    check(&["xtc_threshold"], &json!(0.2), |s| s.xtc.threshold = 0.2);
    let penalty = ["repetition_penalty", "repeat_penalty", "rep_pen"];
    check(&penalty, &json!(1.2), |s| s.repetition_penalty = 1.2);
    check(&penalty, &json!(0), |_| {});
    let range = ["repeat_last_n", "rep_pen_range", "repetition_penalty_range"];
    check(&range, &json!(64), |s| s.penalty_range = 64);
    check(&range, &json!(-1), |s| s.penalty_range = WHOLE_WINDOW);
    check(&["rep_pen_slope"], &json!(0.7), |s| s.penalty_slope = 0.7);
    check(&["rep_pen_slope"], &json!(0), |_| {});
    check(&["frequency_penalty"], &json!(-0.5), |s| s.frequency_penalty = -0.5);
    check(&["presence_penalty"], &json!(0.5), |s| s.presence_penalty = 0.5);
    check(&["dry_multiplier"], &json!(0.8), |s| s.dry.multiplier = 0.8);
    check(&["dry_base"], &json!(2), |s| s.dry.base = 2.0);
    check(&["dry_allowed_length"], &json!(3), |s| s.dry.allowed_length = 3);
    check(&["dry_penalty_last_n", "dry_range"], &json!(99), |s| s.dry.range = 99);
    for breakers in [json!(["\n", "x"]), json!("[\"\\n\", \"x\"]")] {
        check(&["dry_sequence_breakers"], &breakers, |s| {
            s.dry.sequence_breakers = vec!["\n".into(), "x".into()];
        });
    }
    check(&["mirostat", "mirostat_mode"], &json!(2), |s| {
        s.mirostat = Some(Mirostat { version: MirostatVersion::Two, tau: 5.0, eta: 0.1 });
    });
    check(&["mirostat", "mirostat_mode"], &json!(0), |_| {});
    check(&["logit_bias"], &json!({ "7": -100, "8": 1.5 }), |s| {
        s.logit_bias = vec![(TokenId(7), -100.0), (TokenId(8), 1.5)];
    });
    check(&["logit_bias"], &json!([[7, false], [8, 1]]), |s| {
        s.logit_bias = vec![(TokenId(7), f32::NEG_INFINITY), (TokenId(8), 1.0)];
    });
    check(&["banned_tokens"], &json!(["bad", ""]), |s| s.banned_texts = vec!["bad".into()]);
    check(&["banned_tokens", "custom_token_bans"], &json!("5, 6"), |s| {
        s.logit_bias = vec![(TokenId(5), f32::NEG_INFINITY), (TokenId(6), f32::NEG_INFINITY)];
    });
    check(&["ignore_eos", "ban_eos_token", "use_default_badwordsids"], &json!(true), |s| s.ignore_end = true);
    check(&["seed", "sampler_seed"], &json!(1.0), |_| {});
    for stops in [json!("END"), json!(["END", "", null])] {
        check(&["stop", "stop_sequence", "stop_sequences", "stopping_strings"], &stops, |s| {
            s.stop = vec!["END".into()];
        });
    }
    check(&["grammar", "grammar_string"], &json!("root ::= \"x\""), |s| {
        s.constraint = Some(OutputConstraint::GbnfGrammar("root ::= \"x\"".into()));
    });
    check(&["json_schema"], &json!({ "type": "array" }), |s| {
        s.constraint = Some(OutputConstraint::JsonSchema("{\"type\":\"array\"}".into()));
    });
    let format = json!({ "type": "json_object", "schema": { "type": "array" } });
    check(&["response_format"], &format, |s| {
        s.constraint = Some(OutputConstraint::JsonSchema("{\"type\":\"array\"}".into()));
    });
}

#[test]
fn sampling_logprobs_have_three_spellings() {
    for (json, expected) in [
        (json!({ "logprobs": true }), Some(0)),
        (json!({ "logprobs": true, "top_logprobs": 3 }), Some(3)),
        (json!({ "logprobs": 5 }), Some(5)),
        (json!({ "n_probs": 4 }), Some(4)),
        (json!({ "n_probs": 0 }), None),
        (json!({ "logprobs": false, "top_logprobs": 0 }), None),
        (json!({ "logprobs": null }), None),
    ] {
        assert_eq!(sampling(ApiDialect::OpenAi, &json).logprobs, expected, "{json}");
    }
}

#[test]
fn sampler_order_has_numbers_names_and_letters() {
    use SamplerKind::*;
    let kobold =
        vec![Dry, TopNSigma, Penalties, TopK, TopA, TailFree, TypicalP, TopP, MinP, Temperature, Xtc];
    for (json, expected) in [
        (json!({ "sampler_order": [6, 0, 1, 3, 4, 2, 5] }), kobold),
        (json!({ "sampler_order": [0, 5.0] }), vec![Penalties, Dry, TopNSigma, TopK, Temperature, Xtc]),
        (json!({ "sampler_order": [] }), vec![]),
        (json!({ "samplers": ["top_k", "typ_p", "temperature"] }), vec![TopK, TypicalP, Temperature]),
        (json!({ "samplers": "kt" }), vec![TopK, Temperature]),
        (json!({ "sampler_priority": ["mirostat", "min_p", "quadratic_sampling"] }), vec![MinP, Temperature]),
    ] {
        assert_eq!(sampling(ApiDialect::Kobold, &json).order, expected, "{json}");
    }
}

#[test]
fn sampling_without_a_length_fills_the_window_or_takes_the_default() {
    let default = Sampling::default().max_tokens;
    let all = UNLIMITED_TOKENS;
    // In the order of DIALECTS. None: the length is refused.
    for (json, expected) in [
        (json!({}), [all, default, all, all].map(Some)),
        (json!({ "max_tokens": -1 }), [all, default, all, all].map(Some)),
        (json!({ "max_tokens": null }), [all, default, all, all].map(Some)),
        (json!({ "max_tokens": -2 }), [None, None, Some(all), Some(all)]),
        (json!({ "max_tokens": 2.0 }), [2; 4].map(Some)),
        (json!({ "n_predict": 9 }), [9; 4].map(Some)),
        (json!({ "num_predict": 7 }), [all, default, 7, all].map(Some)),
        (json!({ "num_predict": -2, "max_tokens": 9 }), [9, 9, all, 9].map(Some)),
        (json!({ "max_length": 8, "max_tokens": 9 }), [9, 8, 9, 9].map(Some)),
        (json!({ "max_completion_tokens": 3, "max_tokens": 9 }), [3, 9, 9, 9].map(Some)),
        (json!({ "max_tokens": 0 }), [None; 4]),
    ] {
        for (dialect, expected) in DIALECTS.into_iter().zip(expected) {
            let parsed = parse(dialect, &json).ok().map(|parsed| parsed.sampling.max_tokens);
            assert_eq!(parsed, expected, "{json} in {dialect:?}");
        }
    }
}

/// What a request says nothing about: the settings decide, or the usual value of the program.
#[test]
fn sampling_defaults_depend_on_the_program() {
    let defaults = Sampling { seed: 77, repetition_penalty: 1.3, temperature: 0.4, ..Sampling::default() };
    for dialect in DIALECTS {
        let parse =
            |json: &Value| parse_sampling(&fields(json.clone()), &defaults, dialect).expect("valid").sampling;
        let sampling = parse(&json!({}));
        let is_kobold = dialect == ApiDialect::Kobold;
        assert_eq!(sampling.seed == 77, !is_kobold, "{dialect:?}");
        assert_eq!(sampling.repetition_penalty, if is_kobold { 1.0 } else { 1.3 }, "{dialect:?}");
        assert_eq!(sampling.temperature, 0.4, "{dialect:?}");
        assert_ne!(parse(&json!({ "seed": -1 })).seed, 77, "{dialect:?}");
        let hot = parse_sampling(&fields(json!({ "temperature": 6 })), &defaults, dialect);
        assert_eq!(hot.is_ok(), dialect != ApiDialect::OpenAi, "{dialect:?}");
    }
}

#[test]
fn sampling_errors_name_the_parameter() {
    let many = vec!["x"; 65];
    for (json, param, part) in [
        (json!({ "temperature": 101 }), "temperature", "temperature is 101; it must be from 0 to 100"),
        (json!({ "temperature": "hot" }), "temperature", "it must be a number"),
        (json!({ "top_p": 1.5 }), "top_p", "top_p is 1.5"),
        (json!({ "rep_pen": -1 }), "rep_pen", "rep_pen is -1"),
        (json!({ "max_length": 0 }), "max_length", "max_length is 0; it must be at least 1"),
        (json!({ "max_length": 1.5 }), "max_length", "a whole number"),
        (json!({ "stop": many }), "stop", "65 texts; at most 64"),
        (json!({ "stop": 7 }), "stop", "a text or a list of texts"),
        (json!({ "logit_bias": { "x": 1 } }), "logit_bias", "a token id"),
        (json!({ "logit_bias": { "7": 101 } }), "logit_bias", "from -100 to 100"),
        (json!({ "mirostat": 3 }), "mirostat", "mirostat is 3"),
        (json!({ "sampler_order": [9] }), "sampler_order", "the numbers 0 to 6"),
        (json!({ "samplers": ["magic"] }), "samplers", "there is no sampler \"magic\""),
        (json!({ "logprobs": 21 }), "logprobs", "from 0 to 20"),
        (json!({ "top_logprobs": 2 }), "top_logprobs", "needs logprobs"),
        (json!({ "ignore_eos": 1 }), "ignore_eos", "true or false"),
        (json!({ "grammar": "x", "json_schema": { "type": "array" } }), "grammar", "are both set"),
        (json!({ "response_format": { "type": "xml" } }), "response_format", "response_format 'xml'"),
        (json!({ "response_format": 5 }), "response_format", "an object with the type"),
        (json!({ "dry_sequence_breakers": "[" }), "dry_sequence_breakers", "as JSON in a text"),
    ] {
        let error = parse(ApiDialect::Kobold, &json).expect_err("an invalid value");
        assert_eq!(error.param(), Some(param), "{json}");
        assert!(error.message().contains(part), "{json}: {}", error.message());
    }
    for n in [json!(0), json!(17), json!("two")] {
        let error = parse_choice_count(&fields(json!({ "n": n }))).expect_err("an invalid count");
        assert_eq!(error.param(), Some("n"), "{n}");
    }
}

fn check_refused(dialect: ApiDialect, name: &str, neutral: &Value, effective: &Value) {
    parse(dialect, &json!({ name: neutral })).unwrap_or_else(|e| panic!("{name}: {}", e.message()));
    let error = parse(dialect, &json!({ name: effective })).expect_err(name);
    assert_eq!(error.param(), Some(name), "{dialect:?}");
    assert!(error.message().contains(&format!("{name} is not supported")), "{}", error.message());
}

#[test]
fn unsupported_parameters_are_refused_unless_they_do_nothing() {
    for (name, neutral, effective) in [
        ("banned_strings", json!([]), json!(["a phrase"])),
        ("bypass_eos", json!(false), json!(true)),
        ("adaptive_target", json!(-1), json!(0.5)),
        ("adaptive_target", json!(-0.01), json!(0)),
        ("best_of", json!(1), json!(3)),
        ("suffix", json!(""), json!("the end")),
        ("images", json!([]), json!(["aGk="])),
        ("guidance_scale", json!(1), json!(1.5)),
        ("min_tokens", json!(0), json!(10)),
        ("num_beams", json!(null), json!(4)),
        ("epsilon_cutoff", json!(0), json!(3)),
        ("no_repeat_ngram_size", json!(0), json!(2)),
        ("image_data", json!([]), json!([{}])),
        ("lora", json!([]), json!([{ "id": 0 }])),
        ("n_indent", json!(0), json!(4)),
        ("t_max_predict_ms", json!(0), json!(100)),
        ("min_keep", json!(0), json!(2)),
        ("post_sampling_probs", json!(false), json!(true)),
        ("return_tokens", json!(false), json!(true)),
        ("grammar_retain_state", json!(false), json!(true)),
        ("length_penalty", json!(1), json!(1.2)),
        ("early_stopping", json!(false), json!(true)),
        ("use_beam_search", json!(false), json!(true)),
        ("stop_token_ids", json!([]), json!([2])),
        ("include_stop_str_in_output", json!(false), json!(true)),
        ("bad_words", json!([]), json!(["word"])),
        ("allowed_token_ids", json!(null), json!([2])),
        ("prompt_logprobs", json!(null), json!(1)),
        ("truncate_prompt_tokens", json!(-1), json!(100)),
        ("structured_outputs", json!(null), json!({ "regex": "a" })),
        ("guided_json", json!(null), json!({ "type": "object" })),
        ("guided_regex", json!(""), json!("a+")),
        ("guided_choice", json!([]), json!(["yes", "no"])),
        ("guided_grammar", json!(""), json!("root ::= \"a\"")),
    ] {
        for dialect in DIALECTS {
            check_refused(dialect, name, &neutral, &effective);
        }
    }
    for name in ["logprobs", "top_logprobs", "n_probs"] {
        check_refused(ApiDialect::Ollama, name, &json!(0), &json!(3));
    }
    sampling(
        ApiDialect::OpenAi,
        &json!({ "unheard_of": { "deep": [1] }, "tfs": 1, "top_a": 0, "typical": 1 }),
    );
}
