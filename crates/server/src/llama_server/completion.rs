//! `/completion`: a prompt as text or tokens, and its continuation.

use super::info::sampling_json;
use super::protocol::{LlamaServerJson, LlamaServerResult, error_event};
use crate::answer_source::AnswerSource;
use crate::app::App;
use crate::completion::{CompletedAnswer, CompletionRequest, seed_or_random};
use crate::error::{ApiResult, ErrorResponse, parse_json_value, spawn_blocking};
use crate::openai::timings;
use crate::sse::sse_channel;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use halo_core::ErrorKind;
use halo_core::attention::AttentionRequest;
use halo_core::model::{FinishReason, OutputConstraint, Sampling};
use halo_core::token::TokenId;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The parameters that are used.
#[derive(Deserialize)]
struct LlamaCompletionRequest {
    #[serde(default)]
    prompt: Value,
    stream: Option<bool>,
    #[serde(alias = "max_tokens")]
    n_predict: Option<i64>,
    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
    seed: Option<i64>,
    stop: Option<Vec<String>>,
    json_schema: Option<Value>,
    /// With `false` the KV cache forgets the prompt afterwards.
    cache_prompt: Option<bool>,
}

/// Parameters that would change the text. A value without effect is accepted; any other is refused.
const NOT_SUPPORTED: [(&str, f64); 12] = [
    ("n_probs", 0.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("mirostat", 0.0),
    ("typical_p", 1.0),
    ("tfs_z", 1.0),
    ("dry_multiplier", 0.0),
    ("xtc_probability", 0.0),
    ("dynatemp_range", 0.0),
    ("top_n_sigma", -1.0),
    ("n_indent", 0.0),
    ("t_max_predict_ms", 0.0),
];

pub(super) async fn completion(
    State(app): State<Arc<App>>,
    LlamaServerJson(body): LlamaServerJson<Map<String, Value>>,
) -> LlamaServerResult<Response> {
    let request = parse_request(body)?;
    let sampling = request.sampling(&app.backend.rules().sampling, app.backend.model_info().context)?;
    let (stream, ephemeral) = (request.stream.unwrap_or(false), request.cache_prompt == Some(false));
    let tokenizer = Arc::clone(&app);
    let prompt = request.prompt;
    let completion =
        spawn_blocking(move || completion_request(&tokenizer, &prompt, sampling, ephemeral)).await?;
    let format = LlamaAnswerFormat::new(&app, &completion);
    let source = AnswerSource::Completion(completion);
    if !stream {
        let (answer, _) = source.complete(app).await?;
        return Ok(Json(format.last_object(&answer.text, &answer)).into_response());
    }
    let streamed = source.stream(
        app,
        sse_channel(error_event),
        |out, text| {
            let event = json!({ "index": 0, "content": text, "tokens": [], "stop": false, "id_slot": 0 });
            out.send_json(None, &event)
        },
        move |out, answer| {
            out.send_json(None, &format.last_object(&answer.withheld, &answer));
        },
    );
    Ok(streamed.await?)
}

/// Takes null for a parameter that is not set, and refuses what would change the text and is not supported.
fn parse_request(mut body: Map<String, Value>) -> ApiResult<LlamaCompletionRequest> {
    body.retain(|_, value| !value.is_null());
    let refuse = |name: &str, message: String| Err(ErrorResponse::bad_request(message).with_param(name));
    for (name, neutral) in NOT_SUPPORTED {
        if body.get(name).is_some_and(|value| value.as_f64() != Some(neutral)) {
            return refuse(name, format!("{name} is not supported by this server; leave it out"));
        }
    }
    for name in ["image_data", "logit_bias", "lora"] {
        if body.get(name).is_some_and(|value| !matches!(value, Value::Array(items) if items.is_empty())) {
            return refuse(name, format!("{name} is not supported by this server; leave it out"));
        }
    }
    if body.get("grammar").is_some_and(|grammar| grammar != "") {
        return refuse("grammar", "grammar is not supported by this server; use json_schema".into());
    }
    if body.get("ignore_eos") == Some(&Value::Bool(true)) {
        return refuse("ignore_eos", "ignore_eos is not supported by this server; leave it out".into());
    }
    parse_json_value(Value::Object(body))
}

impl LlamaCompletionRequest {
    fn sampling(&self, defaults: &Sampling, context: usize) -> ApiResult<Sampling> {
        let in_range = |name: &str, value: Option<f32>, max: f32, default: f32| match value {
            Some(value) if !(0.0..=max).contains(&value) => {
                let message = format!("{name} is {value}; it must be from 0 to {max}");
                Err(ErrorResponse::bad_request(message).with_param(name))
            }
            value => Ok(value.unwrap_or(default)),
        };
        let max_tokens = match self.n_predict {
            None | Some(-1 | -2) => context,
            Some(n) => usize::try_from(n).ok().filter(|&n| n > 0).ok_or_else(|| {
                let message = format!("n_predict is {n}; it must be at least 1, or -1 for no limit");
                ErrorResponse::bad_request(message).with_param("n_predict")
            })?,
        };
        let constraint = match &self.json_schema {
            None => None,
            Some(Value::Object(schema)) if schema.is_empty() => None,
            Some(schema) => Some(OutputConstraint::JsonSchema(schema.to_string())),
        };
        // Assigned one by one: parameters that this API does not have keep their defaults.
        let mut sampling = defaults.clone();
        sampling.max_tokens = max_tokens;
        sampling.temperature = in_range("temperature", self.temperature, 100.0, defaults.temperature)?;
        sampling.top_k = self.top_k.map_or(defaults.top_k, |k| usize::try_from(k).unwrap_or(0));
        sampling.top_p = in_range("top_p", self.top_p, 1.0, defaults.top_p)?;
        sampling.min_p = in_range("min_p", self.min_p, 1.0, defaults.min_p)?;
        sampling.repetition_penalty =
            in_range("repeat_penalty", self.repeat_penalty, 10.0, defaults.repetition_penalty)?;
        sampling.seed = if self.seed.is_some() { seed_or_random(self.seed) } else { defaults.seed };
        sampling.stop = self.stop.iter().flatten().filter(|stop| !stop.is_empty()).cloned().collect();
        sampling.constraint = constraint;
        Ok(sampling)
    }
}

/// A part of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PromptPart {
    Text(String),
    Token(u32),
}

/// A prompt is a text, or a list of tokens and texts. A list of one prompt is that prompt; several prompts are refused.
fn parse_prompt(prompt: &Value) -> ApiResult<Vec<PromptPart>> {
    let refuse = |message: &str| Err(ErrorResponse::bad_request(message).with_param("prompt"));
    let items = match prompt {
        Value::String(text) => return Ok(vec![PromptPart::Text(text.clone())]),
        Value::Array(items) => items,
        Value::Null => return refuse("prompt is missing"),
        _ => return refuse("prompt must be a text, or a list of token ids and texts"),
    };
    let is_prompt = |item: &Value| item.is_array() || item.is_string();
    if let [only] = items.as_slice()
        && is_prompt(only)
    {
        return parse_prompt(only);
    }
    if items.iter().any(Value::is_array) || (items.len() > 1 && items.iter().all(Value::is_string)) {
        return refuse("several prompts in one request are not supported; send one prompt per request");
    }
    let part = |item: &Value| match item {
        Value::String(text) => Some(PromptPart::Text(text.clone())),
        item => item.as_u64().and_then(|id| u32::try_from(id).ok()).map(PromptPart::Token),
    };
    match items.iter().map(part).collect::<Option<Vec<_>>>() {
        Some(parts) => Ok(parts),
        None => refuse("prompt must be a text, or a list of token ids and texts"),
    }
}

/// Names of special tokens in the texts are special tokens: clients write the chat template as text.
fn completion_request(
    app: &App,
    prompt: &Value,
    sampling: Sampling,
    ephemeral: bool,
) -> ApiResult<CompletionRequest> {
    let mut model = app.backend.model()?;
    let (mut ids, mut text) = (Vec::new(), String::new());
    for part in parse_prompt(prompt)? {
        match part {
            PromptPart::Text(part) => {
                ids.extend(model.tokenize(&part, true)?.iter().map(|token| token.id));
                text.push_str(&part);
            }
            PromptPart::Token(id) => {
                let unknown =
                    |e: halo_core::Error| ErrorResponse::bad_request(e.to_string()).with_param("prompt");
                text.push_str(&model.detokenize(&[TokenId(id)]).map_err(unknown)?);
                ids.push(TokenId(id));
            }
        }
    }
    if let Some(constraint) = &sampling.constraint {
        model.check_constraint(constraint).map_err(|e| match e.kind {
            ErrorKind::InvalidInput => {
                ErrorResponse::bad_request(format!("json_schema: {}", e.message)).with_param("json_schema")
            }
            _ => ErrorResponse::from(e),
        })?;
    }
    Ok(CompletionRequest {
        ids,
        text,
        messages: Vec::new(),
        sampling,
        attention: AttentionRequest::none(),
        client: "llama-server".into(),
        generation_key: None,
        ephemeral,
    })
}

/// What the last object repeats of the request.
struct LlamaAnswerFormat {
    model: String,
    prompt: String,
    sampling: Sampling,
}

impl LlamaAnswerFormat {
    fn new(app: &App, request: &CompletionRequest) -> Self {
        Self {
            model: app.backend.model_info().name,
            prompt: request.text.clone(),
            sampling: request.sampling.clone(),
        }
    }

    fn last_object(&self, content: &str, answer: &CompletedAnswer) -> Value {
        let usage = &answer.usage;
        let stop_type = match answer.finish {
            FinishReason::EndOfText => "eos",
            FinishReason::StopSequence => "word",
            FinishReason::Length => "limit",
            FinishReason::Cancelled => "none",
        };
        // With several stop sequences, the model does not report which one ended the text.
        let stopping_word = match self.sampling.stop.as_slice() {
            [only] if answer.finish == FinishReason::StopSequence => only.as_str(),
            _ => "",
        };
        json!({
            "index": 0,
            "content": content,
            "tokens": [],
            "id_slot": 0,
            "stop": true,
            "model": self.model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": sampling_json(&self.sampling),
            "prompt": self.prompt,
            "has_new_line": answer.text.contains('\n'),
            "truncated": false,
            "stop_type": stop_type,
            "stopping_word": stopping_word,
            "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
            "timings": timings(usage),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_is_text_or_tokens_or_both() {
        let text = |text: &str| PromptPart::Text(text.to_owned());
        for (json, parts) in [
            (json!("a"), vec![text("a")]),
            (json!(["a"]), vec![text("a")]),
            (json!([1, 2]), vec![PromptPart::Token(1), PromptPart::Token(2)]),
            (json!([[1, 2]]), vec![PromptPart::Token(1), PromptPart::Token(2)]),
            (json!([1, "a", 2]), vec![PromptPart::Token(1), text("a"), PromptPart::Token(2)]),
            (json!([["a", 7]]), vec![text("a"), PromptPart::Token(7)]),
            (json!([]), vec![]),
        ] {
            assert_eq!(parse_prompt(&json).ok(), Some(parts), "{json}");
        }
        for invalid in [
            json!(null),
            json!(7),
            json!({}),
            json!([-1]),
            json!([1.5]),
            json!(["a", "b"]),
            json!([[1], [2]]),
            json!([true]),
        ] {
            assert_eq!(parse_prompt(&invalid).expect_err("refused").param(), Some("prompt"), "{invalid}");
        }
    }
}
