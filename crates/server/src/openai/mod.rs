//! OpenAI's API: chat, completions, embeddings and models, streamed and not. Behind chat there is a conversation of Halo's: what
//! a client has dropped of its history stays remembered, and comes back when it matters.

mod chat;
mod place;

pub(crate) use place::Placing;

use crate::answer::{Body, Refusal, aside};
use crate::app::App;
use crate::kobold::{seed, whole};
use crate::raw::{self, Ask};
use crate::stops::Held;
use crate::stream::streamed;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use halo_core::attention::Watch;
use halo_core::seams::{Finish, Form, ModelStep, Sampling};
use halo_core::token::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{model}", get(model))
        .route("/v1/chat/completions", post(chat::completions))
        .route("/v1/completions", post(completions))
        .route("/v1/embeddings", post(embeddings))
}

/// What went wrong, as OpenAI's clients expect it.
struct Wrong(Refusal);

type Told<T> = Result<T, Wrong>;

impl<E: Into<Refusal>> From<E> for Wrong {
    fn from(refusal: E) -> Self {
        Self(refusal.into())
    }
}

/// An answer that broke off, as the last event of its stream.
fn error_event(why: &Refusal) -> (Option<&'static str>, Value) {
    (None, Wrong(why.clone()).body())
}

impl Wrong {
    fn body(&self) -> Value {
        let status = self.0.status();
        let too_long = self.0.what().contains("the model sees");
        let (kind, code) = match status {
            _ if too_long => ("invalid_request_error", Some("context_length_exceeded")),
            StatusCode::NOT_FOUND => ("invalid_request_error", Some("not_found")),
            StatusCode::SERVICE_UNAVAILABLE => ("server_error", Some("overloaded")),
            _ if status.is_client_error() => ("invalid_request_error", None),
            _ => ("server_error", None),
        };
        json!({ "error": { "message": self.0.what(), "type": kind, "param": null, "code": code } })
    }
}

impl IntoResponse for Wrong {
    fn into_response(self) -> Response {
        let status = match self.0.status() {
            StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
            status => status,
        };
        (status, Json(self.body())).into_response()
    }
}

/// A body of JSON; what is wrong with it is told as OpenAI's clients expect it.
struct Asked<T>(T);

impl<T: serde::de::DeserializeOwned, S: Send + Sync> axum::extract::FromRequest<S> for Asked<T> {
    type Rejection = Wrong;

    async fn from_request(request: axum::extract::Request, state: &S) -> Result<Self, Wrong> {
        Ok(Self(Body::from_request(request, state).await?.0))
    }
}

/// A name for an answer that no other has.
fn unique(kind: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (now, n) = (jiff::Timestamp::now().as_microsecond(), NEXT.fetch_add(1, Ordering::Relaxed));
    format!("{kind}-{now:x}{n:04x}")
}

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [about(&app.parts.info().name)] }))
}

fn about(name: &str) -> Value {
    json!({ "id": name, "object": "model", "created": 0, "owned_by": "halo" })
}

async fn model(
    State(app): State<Arc<App>>,
    axum::extract::Path(name): axum::extract::Path<String>,
) -> Told<Json<Value>> {
    let known = app.parts.info().name;
    if name != known {
        return Err(Refusal::missing(format!("there is no model '{name}': there is {known}")).into());
    }
    Ok(Json(about(&known)))
}

/// One, or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    fn many(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

/// How an answer is to be drawn, as all of OpenAI's requests say it. What is not here is left alone.
#[derive(Deserialize)]
struct Drawn {
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    seed: Option<i64>,
    stop: Option<OneOrMany<String>>,
    n: Option<u32>,
    #[serde(default)]
    stream: bool,
    stream_options: Option<StreamOptions>,
    response_format: Option<Format>,
    logprobs: Option<Value>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Deserialize)]
struct Format {
    r#type: String,
    json_schema: Option<Schema>,
}

#[derive(Deserialize)]
struct Schema {
    schema: Option<Value>,
}

impl Drawn {
    fn sampling(&self, usual: &Sampling) -> Result<Sampling, Refusal> {
        if self.n.is_some_and(|n| n != 1) {
            return Err(Refusal::bad("n must be 1: there is one answer at a time"));
        }
        if self.logprobs.as_ref().is_some_and(|wanted| !matches!(wanted, Value::Null | Value::Bool(false))) {
            return Err(Refusal::bad("logprobs are not told here: leave them out"));
        }
        let within = |name: &str, value: Option<f32>, most: f32, usual: f32| match value {
            Some(value) if !(0.0..=most).contains(&value) => {
                Err(Refusal::bad(format!("{name} cannot be {value}: it is from 0 to {most}")))
            }
            value => Ok(value.unwrap_or(usual)),
        };
        let most = self.max_completion_tokens.or(self.max_tokens);
        let max_tokens = match most {
            None => usual.max_tokens,
            Some(most) => usize::try_from(most)
                .ok()
                .filter(|&n| n > 0)
                .ok_or_else(|| Refusal::bad(format!("max_tokens cannot be {most}: it is at least 1")))?,
        };
        let stop = match &self.stop {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop.clone()],
            Some(OneOrMany::Many(stops)) => stops.clone(),
        };
        Ok(Sampling {
            max_tokens,
            temperature: within("temperature", self.temperature, 5.0, usual.temperature)?,
            top_p: within("top_p", self.top_p, 1.0, usual.top_p)?,
            seed: if self.seed.is_some() { seed(self.seed) } else { usual.seed },
            stop: stop.into_iter().filter(|stop| !stop.is_empty()).collect(),
            form: self.schema()?.map(Form::Schema),
            ..usual.clone()
        })
    }

    fn schema(&self) -> Result<Option<String>, Refusal> {
        let Some(format) = &self.response_format else { return Ok(None) };
        match format.r#type.as_str() {
            "text" => Ok(None),
            "json_object" => Ok(Some(json!({ "type": "object" }).to_string())),
            "json_schema" => {
                let schema = format.json_schema.as_ref().and_then(|schema| schema.schema.as_ref());
                let schema =
                    schema.ok_or_else(|| Refusal::bad("response_format.json_schema.schema is missing"))?;
                Ok(Some(schema.to_string()))
            }
            other => Err(Refusal::bad(format!(
                "response_format cannot be '{other}': text, json_object or json_schema"
            ))),
        }
    }
}

fn reason(finish: Finish) -> &'static str {
    if finish == Finish::Length { "length" } else { "stop" }
}

fn usage(prompt: usize, answer: usize) -> Value {
    json!({ "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer })
}

/// A prompt: text, or tokens.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    ManyIds(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
struct Completion {
    prompt: Written,
    #[serde(default)]
    echo: bool,
    #[serde(flatten)]
    drawn: Drawn,
}

async fn completions(State(app): State<Arc<App>>, Asked(wanted): Asked<Completion>) -> Told<Response> {
    let sampling = wanted.drawn.sampling(&app.parts.rules().sampling)?;
    let cutter = Arc::clone(&app);
    let ask = aside(move || {
        let mut model = cutter.parts.model()?;
        let one = |n: usize| Refusal::bad(format!("one prompt at a time: there are {n}"));
        let (ids, text) = match wanted.prompt {
            Written::Text(text) => (None, text),
            Written::Texts(mut texts) if texts.len() == 1 => (None, texts.remove(0)),
            Written::Texts(texts) => return Err(one(texts.len())),
            Written::Ids(ids) => (Some(ids), String::new()),
            Written::ManyIds(mut ids) if ids.len() == 1 => (Some(ids.remove(0)), String::new()),
            Written::ManyIds(ids) => return Err(one(ids.len())),
        };
        let (ids, text) = match ids {
            Some(ids) => {
                let ids: Vec<TokenId> = ids.into_iter().map(TokenId).collect();
                let text = model.text(&ids).map_err(|why| Refusal::bad(why.to_string()))?;
                (ids, text)
            }
            None => (model.tokenize(&text, true)?.into_iter().map(|piece| piece.id).collect(), text),
        };
        Ok(Ask {
            ids,
            text,
            messages: Vec::new(),
            sampling,
            watch: Watch::nothing(),
            who: "completions".into(),
            aside: false,
        })
    })
    .await?;
    let (id, created, model) = (unique("cmpl"), now(), app.parts.info().name);
    let prompt = ask.ids.len();
    let before = if wanted.echo { ask.text.clone() } else { String::new() };
    let told = move |text: &str, finish: Option<&str>, used: Option<Value>| {
        let choice = json!({ "text": text, "index": 0, "logprobs": null, "finish_reason": finish });
        json!({ "id": id, "object": "text_completion", "created": created, "model": model, "choices": [choice], "usage": used })
    };
    if !wanted.drawn.stream {
        let (text, finish, tokens) = whole(app, ask, true).await?;
        let told = told(&format!("{before}{text}"), Some(reason(finish)), Some(usage(prompt, tokens)));
        return Ok(Json(told).into_response());
    }
    let counted = wanted.drawn.stream_options.is_some_and(|options| options.include_usage);
    let response = streamed(error_event, move |out| {
        let mut held = Held::new(&ask.sampling.stop);
        let mut tokens = 0;
        if !before.is_empty() {
            out.event(None, &told(&before, None, None));
        }
        let finish = raw::ask(&app, &ask, &mut |_| out.flow(), &mut |step| {
            if let ModelStep::Token(piece, _) = step {
                tokens += 1;
                let text = held.push(&piece.text);
                if !text.is_empty() {
                    return out.event(None, &told(&text, None, None));
                }
            }
            out.flow()
        })?;
        let used = counted.then(|| usage(prompt, tokens));
        out.event(None, &told(&held.end(), Some(reason(finish)), used));
        out.line(None, "[DONE]");
        Ok(())
    });
    Ok(response.await?)
}

#[derive(Deserialize)]
struct Embedded {
    input: OneOrMany<String>,
    encoding_format: Option<String>,
}

async fn embeddings(State(app): State<Arc<App>>, Asked(wanted): Asked<Embedded>) -> Told<Json<Value>> {
    let texts = wanted.input.many();
    if texts.is_empty() || texts.len() > 2048 || texts.iter().any(String::is_empty) {
        return Err(Refusal::bad("input must be 1 to 2048 texts, none of them empty").into());
    }
    let packed = match wanted.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            return Err(Refusal::bad(format!("encoding_format cannot be '{other}': float or base64")).into());
        }
    };
    let told = aside(move || {
        let missing = "there is no embedder: fetch one with `halo models pull e5-small` and start again";
        let mut embedder =
            app.parts.embedder().ok_or_else(|| Refusal::new(StatusCode::NOT_IMPLEMENTED, missing))?;
        let info = embedder.info()?;
        let mut model = app.parts.model()?;
        let tokens = texts.iter().try_fold(0, |sum, text| model.count(text).map(|tokens| sum + tokens))?;
        let prepared: Vec<String> = texts.iter().map(|text| format!("{}{text}", info.passage)).collect();
        let vectors = embedder.embed(&prepared.iter().map(String::as_str).collect::<Vec<_>>())?;
        let data: Vec<Value> = (vectors.iter().enumerate())
            .map(|(index, vector)| {
                let embedding = if packed {
                    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                    json!(BASE64_STANDARD.encode(bytes))
                } else {
                    json!(vector)
                };
                json!({ "object": "embedding", "index": index, "embedding": embedding })
            })
            .collect();
        let used = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
        Ok(json!({ "object": "list", "data": data, "model": info.name, "usage": used }))
    });
    Ok(Json(told.await?))
}
