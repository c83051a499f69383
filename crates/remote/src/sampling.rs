//! Sampling parameters in the requests of remote APIs. Parameters with neutral values are left out, so that an older server that
//! does not know them is not asked for them.

use halo_core::model::{MirostatVersion, Sampling, SamplingParameter, WHOLE_WINDOW};
use serde_json::{Map, Value, json};

/// Whether KoboldCPP's API has a parameter. Its streams have no log-probabilities, and its sampler order cannot leave samplers
/// out.
pub(crate) fn kobold_supports(parameter: SamplingParameter) -> bool {
    !matches!(
        parameter,
        SamplingParameter::FrequencyPenalty | SamplingParameter::Order | SamplingParameter::Logprobs
    )
}

/// Whether OpenAI's chat API has a parameter. OpenAI refuses requests with parameters that it does not know.
pub(crate) fn openai_supports(parameter: SamplingParameter) -> bool {
    matches!(
        parameter,
        SamplingParameter::FrequencyPenalty
            | SamplingParameter::PresencePenalty
            | SamplingParameter::LogitBias
    )
}

/// The parameters of KoboldCPP that are not neutral, beside those of every request.
pub(crate) fn kobold_parameters(sampling: &Sampling, context: usize) -> Map<String, Value> {
    let mut body = Map::new();
    let mut add = |name: &str, value: Value, has_effect: bool| {
        if has_effect {
            body.insert(name.to_owned(), value);
        }
    };
    // The whole window is the whole context there.
    let range = |range: usize| if range == WHOLE_WINDOW { json!(context) } else { json!(range) };
    let penalized = sampling.has_penalties();
    add("rep_pen_range", range(sampling.penalty_range), penalized);
    add("rep_pen_slope", json!(sampling.penalty_slope), penalized && sampling.penalty_slope != 1.0);
    add("presence_penalty", json!(sampling.presence_penalty), sampling.presence_penalty != 0.0);
    add("top_a", json!(sampling.top_a), sampling.top_a > 0.0);
    add("tfs", json!(sampling.tail_free), sampling.tail_free < 1.0);
    add("typical", json!(sampling.typical_p), sampling.typical_p < 1.0);
    add("nsigma", json!(sampling.top_n_sigma), sampling.top_n_sigma > 0.0);
    let dynamic = sampling.dynamic_temperature;
    add("dynatemp_range", json!(dynamic.range), dynamic.range > 0.0);
    add("dynatemp_exponent", json!(dynamic.exponent), dynamic.range > 0.0);
    let smoothing = sampling.smoothing;
    add("smoothing_factor", json!(smoothing.factor), smoothing.factor > 0.0);
    add("smoothing_curve", json!(smoothing.curve), smoothing.factor > 0.0 && smoothing.curve != 1.0);
    let xtc = sampling.xtc;
    add("xtc_probability", json!(xtc.probability), xtc.probability > 0.0);
    add("xtc_threshold", json!(xtc.threshold), xtc.probability > 0.0);
    let dry = &sampling.dry;
    let is_dry = dry.multiplier > 0.0;
    add("dry_multiplier", json!(dry.multiplier), is_dry);
    add("dry_base", json!(dry.base), is_dry);
    add("dry_allowed_length", json!(dry.allowed_length), is_dry);
    add("dry_penalty_last_n", range(dry.range), is_dry);
    add("dry_sequence_breakers", json!(dry.sequence_breakers), is_dry);
    if let Some(mirostat) = sampling.mirostat {
        let version = match mirostat.version {
            MirostatVersion::One => 1,
            MirostatVersion::Two => 2,
        };
        add("mirostat", json!(version), true);
        add("mirostat_tau", json!(mirostat.tau), true);
        add("mirostat_eta", json!(mirostat.eta), true);
    }
    add("logit_bias", logit_bias(sampling), !sampling.logit_bias.is_empty());
    add("banned_tokens", json!(sampling.banned_texts), !sampling.banned_texts.is_empty());
    add("ban_eos_token", json!(true), sampling.ignore_end);
    body
}

/// The parameters of OpenAI's chat API that are not neutral, beside those of every request.
pub(crate) fn openai_parameters(sampling: &Sampling) -> Map<String, Value> {
    let mut body = Map::new();
    if sampling.frequency_penalty != 0.0 {
        body.insert("frequency_penalty".into(), json!(sampling.frequency_penalty));
    }
    if sampling.presence_penalty != 0.0 {
        body.insert("presence_penalty".into(), json!(sampling.presence_penalty));
    }
    if !sampling.logit_bias.is_empty() {
        body.insert("logit_bias".into(), logit_bias(sampling));
    }
    body
}

/// Biases by token id. Both APIs take -100 for a ban.
fn logit_bias(sampling: &Sampling) -> Value {
    let bias = |bias: f32| json!(bias.max(-100.0));
    sampling.logit_bias.iter().map(|(token, value)| (token.0.to_string(), bias(*value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::model::{DrySampling, XtcSampling};
    use halo_core::token::TokenId;

    #[test]
    fn neutral_parameters_are_not_sent() {
        assert_eq!(kobold_parameters(&Sampling::default(), 512), Map::new());
        assert_eq!(openai_parameters(&Sampling::default()), Map::new());
    }

    #[test]
    fn effective_parameters_are_sent_where_the_api_has_them() {
        let sampling = Sampling {
            repetition_penalty: 1.5,
            penalty_range: WHOLE_WINDOW,
            presence_penalty: 0.5,
            tail_free: 0.5,
            xtc: XtcSampling { probability: 0.5, threshold: 0.25 },
            dry: DrySampling {
                multiplier: 0.5,
                range: 64,
                sequence_breakers: vec!["x".into()],
                ..DrySampling::default()
            },
            logit_bias: vec![(TokenId(7), f32::NEG_INFINITY), (TokenId(8), 2.0)],
            banned_texts: vec!["bad".into()],
            ignore_end: true,
            ..Sampling::default()
        };
        let expected = json!({
            "rep_pen_range": 512, "presence_penalty": 0.5, "tfs": 0.5, "xtc_probability": 0.5, "xtc_threshold": 0.25,
            "dry_multiplier": 0.5, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 64,
            "dry_sequence_breakers": ["x"], "logit_bias": { "7": -100.0, "8": 2.0 }, "banned_tokens": ["bad"],
            "ban_eos_token": true,
        });
        assert_eq!(Value::Object(kobold_parameters(&sampling, 512)), expected);
        let expected = json!({ "presence_penalty": 0.5, "logit_bias": { "7": -100.0, "8": 2.0 } });
        assert_eq!(Value::Object(openai_parameters(&sampling)), expected);
    }

    #[test]
    fn parameters_that_an_api_does_not_have_are_unsupported() {
        for parameter in [SamplingParameter::TopK, SamplingParameter::Grammar, SamplingParameter::Logprobs] {
            assert!(!openai_supports(parameter), "{parameter:?}");
        }
        assert!(openai_supports(SamplingParameter::LogitBias));
        assert!(kobold_supports(SamplingParameter::Dry) && !kobold_supports(SamplingParameter::Logprobs));
    }
}
