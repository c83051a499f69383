//! Parameters that are known and not supported. They are refused by name, unless their value does nothing.

use super::dialect::ApiDialect;
use super::fields::RequestFields;
use crate::error::{ApiResult, ErrorResponse};
use serde_json::Value;

/// The names, with the number that does nothing. Empty values do nothing either.
const IN_ALL_DIALECTS: [(&str, f64); 47] = [
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
    ("return_progress", 0.0),
    ("timings_per_token", 0.0),
    ("reasoning_budget", -1.0),
    ("thinking_budget_tokens", -1.0),
    ("thinking_budget", -1.0),
    ("audio", 0.0),
    ("prediction", 0.0),
    ("web_search_options", 0.0),
    ("skew", 0.0),
    ("grammar_retain_state", 0.0),
    ("length_penalty", 1.0),
    ("early_stopping", 0.0),
    ("use_beam_search", 0.0),
    ("stop_token_ids", 0.0),
    ("include_stop_str_in_output", 0.0),
    ("bad_words", 0.0),
    ("allowed_token_ids", 0.0),
    ("prompt_logprobs", 0.0),
    ("truncate_prompt_tokens", -1.0),
    ("structured_outputs", 0.0),
    ("guided_json", 0.0),
    ("guided_regex", 0.0),
    ("guided_choice", 0.0),
    ("guided_grammar", 0.0),
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
            // llama.cpp takes every number below 0 for off, and SillyTavern always sends one.
            Value::Number(number) if *name == "adaptive_target" => {
                number.as_f64().is_some_and(|target| target < 0.0)
            }
            Value::Number(number) => number.as_f64() == Some(*neutral),
            Value::String(text) => text.is_empty(),
            Value::Array(values) => values.is_empty(),
            // Web search is asked for by its options, which may be empty.
            Value::Object(map) => map.is_empty() && *name != "web_search_options",
        };
        if fields.value(name).is_some_and(|value| !has_no_effect(value)) {
            let message = format!("{name} is not supported by this server; leave it out");
            return Err(ErrorResponse::unsupported_parameter(name, message));
        }
    }
    if let Some((_, slot)) = fields.integer(&["id_slot"], i64::MIN..=i64::MAX)?.filter(|(_, slot)| *slot > 0)
    {
        let message = format!(
            "id_slot is {slot}, but a request cannot choose its slot: each conversation has its own KV cache, which is \
             found by its text; leave id_slot out"
        );
        return Err(ErrorResponse::unsupported_parameter("id_slot", message));
    }
    let modalities = fields.texts(&["modalities"], MAX_MODALITIES)?;
    if modalities.is_some_and(|(_, kinds)| kinds.iter().any(|kind| kind != "text")) {
        let message = "modalities: only text is supported by this server";
        return Err(ErrorResponse::invalid_parameter("modalities", message));
    }
    let format = fields.text(&["reasoning_format"])?;
    if format.is_some_and(|(_, format)| !matches!(format, "auto" | "deepseek" | "deepseek-legacy")) {
        let message = "reasoning_format: the reasoning is returned as reasoning_content; leave it out";
        return Err(ErrorResponse::invalid_parameter("reasoning_format", message));
    }
    Ok(())
}

const MAX_MODALITIES: usize = 8;
