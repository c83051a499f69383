//! Ollama's `options` and `format` as sampling parameters.

use crate::error::{ApiResult, ErrorResponse};
use crate::sampling::{ApiDialect, LogprobBuffer, RequestFields, RequestedSampling, parse_sampling};
use halo_core::model::{Sampling, SamplingParameter};
use serde_json::{Map, Value};

/// The field beside the options that is read with them.
const FORMAT: &str = "format";

/// The sampling of a request. Options that say how Ollama runs a model, such as `num_ctx`, have no effect; errors name an option as
/// `options.NAME`.
pub(super) fn parse_options(
    options: Option<Map<String, Value>>,
    format: Option<Value>,
    defaults: &Sampling,
) -> ApiResult<RequestedSampling> {
    let mut fields = options.unwrap_or_default();
    fields.remove(FORMAT);
    fields.extend(format.map(|format| (FORMAT.to_owned(), format)));
    let in_options = |e: ErrorResponse| match e.param() {
        None | Some(FORMAT) => e,
        Some(param) => {
            let (message, param) = (format!("options.{}", e.message()), format!("options.{param}"));
            ErrorResponse::invalid_parameter(&param, message)
        }
    };
    parse_sampling(&RequestFields::from(fields), defaults, ApiDialect::Ollama).map_err(in_options)
}

/// The most log-probabilities of a token.
const MAX_LOGPROBS: u64 = 20;

/// Adds the log-probabilities, which are beside the options of a request. `top` is their number for each token.
pub(super) fn add_logprobs(
    requested: &mut RequestedSampling,
    logprobs: Option<bool>,
    top: Option<u64>,
) -> ApiResult<LogprobBuffer> {
    let top = top.unwrap_or(0);
    let refuse = |message: String| Err(ErrorResponse::invalid_parameter("top_logprobs", message));
    if top > MAX_LOGPROBS {
        return refuse(format!("top_logprobs is {top}; it must be from 0 to {MAX_LOGPROBS}"));
    }
    if logprobs != Some(true) {
        return match top {
            0 => Ok(LogprobBuffer::default()),
            _ => refuse("top_logprobs needs logprobs; set it to true".into()),
        };
    }
    requested.sampling.logprobs = usize::try_from(top).ok();
    requested.parameters.add(SamplingParameter::Logprobs, "logprobs");
    Ok(LogprobBuffer::new(true))
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::model::OutputConstraint;
    use serde_json::json;

    fn parse(options: &Value, format: &Value) -> ApiResult<Sampling> {
        let options = options.as_object().cloned();
        parse_options(options, Some(format.clone()), &Sampling::default()).map(|parsed| parsed.sampling)
    }

    #[test]
    fn ollama_format_is_json_or_a_schema() {
        let schema = json!({ "type": "array" });
        let object = json!({ "type": "object" });
        for (format, expected) in [
            (json!(null), None),
            (json!(""), None),
            (json!("json"), Some(&object)),
            (schema.clone(), Some(&schema)),
        ] {
            let expected = expected.map(|schema| OutputConstraint::JsonSchema(schema.to_string()));
            assert_eq!(parse(&json!({}), &format).expect("parsed").constraint, expected, "{format}");
            // An option of this name is none of Ollama's.
            assert_eq!(parse(&json!({ "format": "yaml" }), &format).expect("parsed").constraint, expected);
        }
        for format in [json!("yaml"), json!(7), json!([])] {
            assert_eq!(parse(&json!({}), &format).expect_err("refused").param(), Some("format"), "{format}");
        }
    }

    #[test]
    fn ollama_options_that_cannot_be_followed_are_refused() {
        for (options, param) in [
            (json!({ "temperature": -1 }), "options.temperature"),
            (json!({ "temperature": "hot" }), "options.temperature"),
            (json!({ "top_p": 1.5 }), "options.top_p"),
            (json!({ "num_predict": 0 }), "options.num_predict"),
            (json!({ "num_predict": -3 }), "options.num_predict"),
            (json!({ "mirostat": 3 }), "options.mirostat"),
            (json!({ "stop": 5 }), "options.stop"),
            (json!({ "logprobs": true }), "options.logprobs"),
            (json!({ "banned_strings": ["a"] }), "options.banned_strings"),
        ] {
            let error = parse(&options, &Value::Null).expect_err("refused");
            assert_eq!(error.param(), Some(param), "{options}: {}", error.message());
            assert!(error.message().starts_with(param), "{options}: {}", error.message());
        }
    }
}
