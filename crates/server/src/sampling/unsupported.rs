//! Parameters that are known and not supported. They are refused by name, unless their value does nothing.

use super::dialect::ApiDialect;
use super::fields::RequestFields;
use crate::error::{ApiResult, ErrorResponse};
use serde_json::Value;

/// The names, with the number that does nothing. Empty values do nothing either.
const IN_ALL_DIALECTS: [(&str, f64); 23] = [
    ("banned_strings", 0.0),
    ("bypass_eos", 0.0),
    ("adaptive_target", -1.0),
    ("best_of", 1.0),
    ("suffix", 0.0),
    ("images", 0.0),
    ("guidance_scale", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("penalty_alpha", 0.0),
    ("num_beams", 1.0),
    ("encoder_repetition_penalty", 1.0),
    ("no_repeat_ngram_size", 0.0),
    ("min_tokens", 0.0),
    ("min_length", 0.0),
    ("min_new_tokens", 0.0),
    ("image_data", 0.0),
    ("lora", 0.0),
    ("n_indent", 0.0),
    ("t_max_predict_ms", 0.0),
    ("min_keep", 0.0),
    ("post_sampling_probs", 0.0),
    ("return_tokens", 0.0),
];

/// Ollama's answers have no place for log-probabilities in the version of its API that is served.
const IN_OLLAMA: [(&str, f64); 3] = [("logprobs", 0.0), ("top_logprobs", 0.0), ("n_probs", 0.0)];

/// Refuses the parameters of a request that cannot have their effect.
pub(super) fn refuse_unsupported(fields: &RequestFields, dialect: ApiDialect) -> ApiResult<()> {
    let of_dialect: &[(&str, f64)] = if dialect == ApiDialect::Ollama { &IN_OLLAMA } else { &[] };
    for (name, neutral) in IN_ALL_DIALECTS.iter().chain(of_dialect) {
        let has_no_effect = |value: &Value| match value {
            Value::Null => true,
            Value::Bool(on) => !on,
            Value::Number(number) => number.as_f64() == Some(*neutral),
            Value::String(text) => text.is_empty(),
            Value::Array(values) => values.is_empty(),
            Value::Object(map) => map.is_empty(),
        };
        if fields.value(name).is_some_and(|value| !has_no_effect(value)) {
            let message = format!("{name} is not supported by this server; leave it out");
            return Err(ErrorResponse::invalid_parameter(name, message));
        }
    }
    Ok(())
}
