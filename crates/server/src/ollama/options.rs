//! Ollama's `options` and `format` as sampling parameters.

use crate::completion::seed_or_random;
use crate::error::{ApiResult, ErrorResponse, parse_json_value};
use halo_core::model::{OutputConstraint, Sampling};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// The options that are used. `num_predict` is −1 for no limit, and −2 to fill the context.
#[derive(Default, Deserialize)]
struct OllamaOptions {
    num_predict: Option<i64>,
    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
    seed: Option<i64>,
    stop: Option<StopTexts>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum StopTexts {
    One(String),
    Many(Vec<String>),
}

/// Options that have no effect here: how Ollama runs a model, and how far back its repetition penalty looks.
const WITHOUT_EFFECT: [&str; 18] = [
    "num_ctx",
    "num_keep",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "numa",
    "low_vram",
    "f16_kv",
    "vocab_only",
    "use_mmap",
    "use_mlock",
    "logits_all",
    "embedding_only",
    "penalize_newline",
    "repeat_last_n",
    "mirostat_tau",
    "mirostat_eta",
];

/// Options that would change the text. A value without effect is accepted; any other is refused.
const NOT_SUPPORTED: [(&str, f64); 5] = [
    ("mirostat", 0.0),
    ("tfs_z", 1.0),
    ("typical_p", 1.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
];

/// The sampling parameters of a request. `context` is the length of the context window, the longest answer.
pub(super) fn parse_sampling(
    options: Option<Map<String, Value>>,
    format: Option<&Value>,
    defaults: &Sampling,
    context: usize,
) -> ApiResult<Sampling> {
    let mut options = options.unwrap_or_default();
    // Clients send null for options that are not set.
    options.retain(|name, value| !value.is_null() && !WITHOUT_EFFECT.contains(&name.as_str()));
    for (name, neutral) in NOT_SUPPORTED {
        if options.remove(name).is_some_and(|value| value.as_f64() != Some(neutral)) {
            return refuse(name, "is not supported by this server; leave it out");
        }
    }
    let options: OllamaOptions = parse_json_value(Value::Object(options)).map_err(|e| {
        let message = format!("options: {}", e.message());
        ErrorResponse::bad_request(message).with_param("options")
    })?;
    let max_tokens = match options.num_predict {
        None | Some(-1 | -2) => context,
        Some(n) => match usize::try_from(n).ok().filter(|&n| n > 0) {
            Some(n) => n,
            None => {
                return refuse("num_predict", &format!("is {n}; it must be at least 1, or -1 for no limit"));
            }
        },
    };
    let stop = match options.stop {
        None => Vec::new(),
        Some(StopTexts::One(stop)) => vec![stop],
        Some(StopTexts::Many(stops)) => stops,
    };
    // Assigned one by one: parameters that this API does not have keep their defaults.
    let mut sampling = defaults.clone();
    sampling.max_tokens = max_tokens;
    sampling.temperature = in_range("temperature", options.temperature, 0.0..=100.0, defaults.temperature)?;
    // Ollama takes 0 and less for no limit.
    sampling.top_k = options.top_k.map_or(defaults.top_k, |k| usize::try_from(k).unwrap_or(0));
    sampling.top_p = in_range("top_p", options.top_p, 0.0..=1.0, defaults.top_p)?;
    sampling.min_p = in_range("min_p", options.min_p, 0.0..=1.0, defaults.min_p)?;
    let (penalty, default) = (options.repeat_penalty, defaults.repetition_penalty);
    sampling.repetition_penalty = in_range("repeat_penalty", penalty, 0.01..=10.0, default)?;
    sampling.seed = if options.seed.is_some() { seed_or_random(options.seed) } else { defaults.seed };
    sampling.stop = stop.into_iter().filter(|stop| !stop.is_empty()).collect();
    sampling.constraint = parse_format(format)?;
    Ok(sampling)
}

fn in_range(
    name: &str,
    value: Option<f32>,
    range: std::ops::RangeInclusive<f32>,
    default: f32,
) -> ApiResult<f32> {
    match value {
        Some(value) if !range.contains(&value) => {
            refuse(name, &format!("is {value}; it must be from {} to {}", range.start(), range.end()))
        }
        value => Ok(value.unwrap_or(default)),
    }
}

/// `format` is empty, `json`, or a JSON schema.
fn parse_format(format: Option<&Value>) -> ApiResult<Option<OutputConstraint>> {
    let schema = match format {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.is_empty() => return Ok(None),
        Some(Value::String(text)) if text == "json" => json!({ "type": "object" }),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(_) => {
            let message = "format must be \"json\" or a JSON schema, an object";
            return Err(ErrorResponse::bad_request(message).with_param("format"));
        }
    };
    Ok(Some(OutputConstraint::JsonSchema(schema.to_string())))
}

fn refuse<T>(name: &str, problem: &str) -> ApiResult<T> {
    let error = ErrorResponse::bad_request(format!("options.{name} {problem}"));
    Err(error.with_param(format!("options.{name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &Value, format: &Value) -> ApiResult<Sampling> {
        let options = options.as_object().cloned();
        parse_sampling(options, Some(format), &Sampling::default(), 8192)
    }

    #[test]
    fn ollama_options_become_sampling_parameters() {
        let options = json!({
            "num_predict": 7, "temperature": 0.25, "top_k": 3, "top_p": 0.5, "min_p": 0.125, "repeat_penalty": 1.5,
            "seed": 11, "stop": ["A", ""], "num_ctx": 2048, "mirostat": 0, "typical_p": 1.0, "num_gpu": null,
        });
        let sampling = parse(&options, &json!("json")).expect("parsed");
        let expected = Sampling {
            max_tokens: 7,
            temperature: 0.25,
            top_k: 3,
            top_p: 0.5,
            min_p: 0.125,
            repetition_penalty: 1.5,
            seed: 11,
            stop: vec!["A".into()],
            constraint: Some(OutputConstraint::JsonSchema("{\"type\":\"object\"}".into())),
            ..Sampling::default()
        };
        assert_eq!(sampling, expected);
        for unlimited in [json!(null), json!({}), json!({ "num_predict": -1 }), json!({ "num_predict": -2 })]
        {
            assert_eq!(parse(&unlimited, &json!("")).expect("parsed").max_tokens, 8192);
        }
        assert_eq!(
            parse(&json!({ "stop": "X", "top_k": -1 }), &Value::Null).map(|s| (s.stop, s.top_k)).ok(),
            Some((vec!["X".into()], 0))
        );
        let schema = json!({ "type": "array" });
        let constraint = Some(OutputConstraint::JsonSchema(schema.to_string()));
        assert_eq!(parse(&json!({}), &schema).expect("parsed").constraint, constraint);
    }

    #[test]
    fn ollama_options_that_cannot_be_followed_are_refused() {
        for (options, param) in [
            (json!({ "temperature": -1 }), "options.temperature"),
            (json!({ "top_p": 1.5 }), "options.top_p"),
            (json!({ "num_predict": 0 }), "options.num_predict"),
            (json!({ "mirostat": 1 }), "options.mirostat"),
            (json!({ "presence_penalty": 0.5 }), "options.presence_penalty"),
            (json!({ "temperature": "hot" }), "options"),
        ] {
            let error = parse(&options, &Value::Null).expect_err("refused");
            assert_eq!(error.param(), Some(param), "{options}: {}", error.message());
        }
        for format in [json!("yaml"), json!(7), json!([])] {
            assert_eq!(parse(&json!({}), &format).expect_err("refused").param(), Some("format"));
        }
    }
}
