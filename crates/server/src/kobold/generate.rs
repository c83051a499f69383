//! Generation from a prompt, whole or as a stream.

use super::attention::{AttentionFormat, attention_json};
use super::tokens::{parse_token_ids, visible_text};
use crate::app::App;
use crate::client_address::ClientNetwork;
use crate::completion::{self, CompletionRequest, TextOptions, complete_text};
use crate::error::{ApiResult, ErrorResponse, JsonBody, spawn_blocking};
use crate::raw_prompt::RawPromptOptions;
use crate::running_completions::GenerationOwner;
use crate::sampling::{
    ApiDialect, RequestFields, chat_logprobs, check_supported, parse_choice_count, parse_sampling,
};
use crate::sse::{SseSender, spawn_sse_stream};
use axum::Json;
use axum::extract::State;
use axum::response::Response;
use halo_core::attention::{AttentionRequest, PromptRows};
use halo_core::model::{FinishReason, ModelStep};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// A request to generate. Its sampling parameters are among the other fields.
#[derive(Deserialize)]
pub(super) struct KoboldGenerateRequest {
    prompt: Option<String>,
    input_ids: Option<Vec<u32>>,
    output_attentions: Option<bool>,
    attention_format: Option<AttentionFormat>,
    #[serde(default)]
    request_id: Value,
    #[serde(flatten)]
    fields: RequestFields,
}

impl KoboldGenerateRequest {
    fn with_attention(&self) -> bool {
        self.output_attentions.unwrap_or(false)
    }
}

/// A prompt that is sent as text is tokenized here.
async fn completion_request(
    app: &Arc<App>,
    client: ClientNetwork,
    body: &KoboldGenerateRequest,
) -> ApiResult<(CompletionRequest, TextOptions)> {
    let requested = parse_sampling(&body.fields, &app.backend.rules().sampling, ApiDialect::Kobold)?;
    let options = RawPromptOptions::parse(&body.fields)?;
    if parse_choice_count(&body.fields)? > 1 {
        let message = "n is more than 1; this API returns one result";
        return Err(ErrorResponse::invalid_parameter("n", message));
    }
    check_supported(app, &requested.parameters, requested.sampling.constraint.as_ref()).await?;
    let mut sampling = requested.sampling;
    options.replace_stop_tags(&app.backend.model_info().template, &mut sampling);
    let owner = GenerationOwner { key: options.generation_key.clone(), client };
    let text_options = options.text;
    let input_ids = body.input_ids.as_deref().unwrap_or_default();
    let prompt = body.prompt.clone().unwrap_or_default();
    let (ids, text) = if input_ids.is_empty() {
        let (tokenizer, limits) = (Arc::clone(app), sampling.clone());
        spawn_blocking(move || {
            let mut model = tokenizer.backend.model()?;
            Ok(options.tokenize(&mut *model, &prompt, &limits)?)
        })
        .await?
    } else {
        (parse_token_ids(app, "input_ids", input_ids.iter().copied())?, prompt)
    };
    let attention = AttentionRequest {
        answer: body.with_attention(),
        prompt: PromptRows::Off,
        per_head: body.attention_format == Some(AttentionFormat::PerLayer),
        ..AttentionRequest::default()
    };
    let request = CompletionRequest {
        ids,
        text,
        messages: Vec::new(),
        sampling,
        attention,
        client: "kobold".into(),
        owner,
        ephemeral: false,
    };
    Ok((request, text_options))
}

pub(super) async fn generate(
    State(app): State<Arc<App>>,
    client: ClientNetwork,
    JsonBody(body): JsonBody<KoboldGenerateRequest>,
) -> ApiResult<Json<Value>> {
    let (request, options) = completion_request(&app, client, &body).await?;
    let prompt_tokens = request.ids.len();
    let result = complete_text(app, request, options).await?;
    Ok(Json(json!({ "results": [{
        "text": result.text,
        "finish_reason": finish_reason(result.finish),
        "logprobs": chat_logprobs(&result.logprobs),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": result.tokens,
    }] })))
}

pub(super) async fn generate_stream(
    State(app): State<Arc<App>>,
    client: ClientNetwork,
    JsonBody(body): JsonBody<KoboldGenerateRequest>,
) -> ApiResult<Response> {
    let (request, options) = completion_request(&app, client, &body).await?;
    spawn_sse_stream(error_event, move |out| {
        if body.with_attention() {
            stream_with_attention(&app, &request, &body, out)
        } else {
            stream_text(&app, &request, options, out)
        }
    })
    .await
}

fn finish_reason(finish: FinishReason) -> &'static str {
    if finish == FinishReason::Length { "length" } else { "stop" }
}

/// The last event of a stream that failed.
fn error_event(error: &ErrorResponse) -> (Option<&'static str>, Value) {
    let json = json!({ "type": "error", "error": error.message(), "token": "", "finish_reason": "error" });
    (Some("error"), json)
}

/// Streams tokens with their attention. Stop sequences are sent too: clients look for them.
fn stream_with_attention(
    app: &App,
    request: &CompletionRequest,
    body: &KoboldGenerateRequest,
    out: &SseSender,
) -> ApiResult<()> {
    let request_id = &body.request_id;
    let format = body.attention_format.unwrap_or_default();
    let layers = app.backend.model_details().layers;
    let mut tokens = 0;
    let finish = completion::complete(app, request, &mut |_| out.flow(), &mut |step| {
        if let ModelStep::Token(token, row) = step {
            tokens += 1;
            let attention = row.map(|row| attention_json(row, format, layers));
            let token = json!({ "token_id": token.id.0, "text": visible_text(app, token) });
            let event =
                json!({ "type": "token", "token": token, "request_id": request_id, "attention": attention });
            return out.send_json(Some("message"), &event);
        }
        out.flow()
    })?;
    let (reason, total) = (finish_reason(finish), request.ids.len() + tokens);
    let done =
        json!({ "type": "done", "finish_reason": reason, "total_tokens": total, "request_id": request_id });
    out.send_json(Some("message"), &done);
    Ok(())
}

/// Streams text in the format of every KoboldCPP.
fn stream_text(
    app: &App,
    request: &CompletionRequest,
    options: TextOptions,
    out: &SseSender,
) -> ApiResult<()> {
    let mut filter = options.filter(request);
    let send = |text: &str, finish: Option<&str>| {
        out.send_json(Some("message"), &json!({ "token": text, "finish_reason": finish }))
    };
    let finish = completion::complete(app, request, &mut |_| out.flow(), &mut |step| {
        if let ModelStep::Token(token, _) = step {
            let text = filter.push(app, token);
            if !text.is_empty() {
                return send(&text, None);
            }
        }
        out.flow()
    })?;
    send(&filter.finish(), Some(finish_reason(finish)));
    Ok(())
}
