//! KoboldCPP. The fork that streams attention gets and sends token ids; all other versions get and send text.

use crate::address::BaseUrl;
use crate::attention::{DecodedAttention, decode_attention};
use crate::error_text::sanitize;
use crate::http::{RemoteClient, RemoteEventStream, RemoteRequest, ignore_steps};
use crate::kobold_tokenizer::{KoboldTokenizer, UNKNOWN_TOKEN, parse_token_id};
use crate::options::RemoteOptions;
use crate::sampling::kobold_parameters;
use crate::schema::parse_schema;
use crate::stream_listener::{StreamEnd, StreamListener};
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    ChatTemplate, FinishReason, KvEditing, ModelInfo, ModelStep, ModelToken, OutputConstraint, Prompt,
    Sampling, StepFlow,
};
use halo_core::token::TokenId;
use reqwest::header::{self, HeaderValue};
use serde_json::{Value, json};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_128;

const STREAM_PATH: &str = "/api/extra/generate/stream";
/// The limit for the few tokens that show what a server streams.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct KoboldModel {
    client: RemoteClient,
    base: BaseUrl,
    info: ModelInfo,
    tokenizer: KoboldTokenizer,
    /// Whether the server gets token ids. Otherwise it gets text and parses the names of special tokens in it.
    sends_ids: bool,
    /// The tokens that end an answer. They are not part of it.
    end_tokens: Vec<u32>,
    timeout: Duration,
    request_count: u64,
}

/// What the server streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KoboldProbe {
    Attention,
    Ids,
    Text,
    /// The probe failed, or produced too few tokens.
    Inconclusive,
}

impl KoboldModel {
    pub fn connect(base: BaseUrl, options: &RemoteOptions) -> Result<Self, Error> {
        let client = RemoteClient::new(&base, options)?;
        let mut listen = ignore_steps;
        Self::handshake(client, base, options, &mut StreamListener::without_listener(&mut listen))
            .map_err(StreamEnd::into_error)
    }

    fn handshake(
        client: RemoteClient,
        base: BaseUrl,
        options: &RemoteOptions,
        listener: &mut StreamListener<'_>,
    ) -> Result<Self, StreamEnd> {
        let request = RemoteRequest::get("requesting the model's name", &base, "/api/v1/model")
            .with_timeout(options.request_timeout);
        let model = client.require_json(&request, listener)?;
        let name_field = |field: &str| model[field].as_str().filter(|name| !name.is_empty());
        let reported = model["max_context_length"].as_u64().filter(|n| *n > 0);
        let extended = name_field("model_name").is_some() && reported.is_some();
        let Some(name) = name_field("model_name").or(name_field("result")) else {
            let why = "its response has no model name; check that the server is KoboldCPP";
            return Err(Error::unavailable(format!("requesting the model's name at {base}"), why).into());
        };
        let name = sanitize(name);
        let end_tokens =
            ["eos_token_id", "eot_token_id"].iter().filter_map(|end| parse_token_id(&model[end])).collect();
        let tokenizer = KoboldTokenizer::probe(&client, &base, options.request_timeout, extended, listener)?;
        let template = ChatTemplate::chatml();
        let kv_editing = KvEditing::Unknown;
        let info = ModelInfo { name, context: 0, attention: false, kv_editing, template };
        let mut kobold = Self {
            client,
            base,
            info,
            tokenizer,
            sends_ids: false,
            end_tokens,
            timeout: options.request_timeout,
            request_count: 0,
        };
        let context = match reported.and_then(|n| usize::try_from(n).ok()) {
            Some(context) => context,
            None => kobold.fetch_context_length(listener)?,
        };
        kobold.info.context = options.context.map_or(context, |limit| limit.min(context));
        if extended && kobold.tokenizer.has_token_texts() {
            let probe = kobold.probe_stream(listener)?;
            if probe == KoboldProbe::Inconclusive {
                tracing::warn!(
                    "the probe for attention failed; the server has the fork's endpoints, so attention is assumed"
                );
            }
            kobold.sends_ids = probe != KoboldProbe::Text;
            kobold.info.attention = matches!(probe, KoboldProbe::Attention | KoboldProbe::Inconclusive);
        }
        Ok(kobold)
    }

    fn fetch_context_length(&self, listener: &mut StreamListener<'_>) -> Result<usize, StreamEnd> {
        for path in ["/api/extra/true_max_context_length", "/api/v1/config/max_context_length"] {
            let request = RemoteRequest::get("requesting the context length", &self.base, path)
                .with_timeout(self.timeout);
            let value = self.client.fetch_json(&request, listener)?.unwrap_or_default();
            if let Some(context) =
                value["value"].as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0)
            {
                return Ok(context);
            }
        }
        let why = "its response has no context length; check that the server is KoboldCPP";
        Err(Error::unavailable(format!("requesting the context length at {}", self.base), why).into())
    }

    /// Generates a few tokens to see what the server streams with them.
    fn probe_stream(&mut self, listener: &mut StreamListener<'_>) -> Result<KoboldProbe, StreamEnd> {
        let prompt = self.tokenizer.tokenize(&self.client, &self.base, "Once upon a time", true, listener)?;
        let body = json!({
            "input_ids": prompt.iter().map(|token| token.id.0).collect::<Vec<_>>(),
            "max_length": 3,
            "temperature": 0.1,
            "ban_eos_token": true,
            "output_attentions": true,
            "request_id": self.request_id("", 0),
            "sampler_seed": 1,
        });
        let request = stream_request(&self.base, "probing the model", &body)
            .with_timeout(PROBE_TIMEOUT.min(self.timeout * 2));
        let probe = |listener: &mut StreamListener<'_>| {
            let mut events = self.client.open_events(&request, listener)?;
            let mut result = KoboldProbe::Inconclusive;
            let mut token_count = 0;
            while let Some(event) = events.next(listener)? {
                let event = events.parse_json(&event)?;
                if event["attention"].is_object() {
                    return Ok(KoboldProbe::Attention);
                }
                if event["token"].is_object() {
                    token_count += 1;
                    // The first token comes out of the prefill, which usually has no attention.
                    if token_count > 1 {
                        result = KoboldProbe::Ids;
                    }
                } else if event["token"].as_str().is_some_and(|text| !text.is_empty()) {
                    return Ok(KoboldProbe::Text);
                }
            }
            Ok(result)
        };
        match probe(listener) {
            Err(StreamEnd::Failed(error)) => {
                tracing::debug!(%error, "the probe failed");
                Ok(KoboldProbe::Inconclusive)
            }
            other => other,
        }
    }

    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    pub fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        let mut listen = ignore_steps;
        let mut listener = StreamListener::without_listener(&mut listen);
        self.tokenizer
            .tokenize(&self.client, &self.base, text, special, &mut listener)
            .map_err(StreamEnd::into_error)
    }

    pub fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        let (window, max_tokens) = (prompt.window.len(), sampling.max_tokens);
        if window + max_tokens > self.info.context {
            // The server would silently cut off the beginning.
            let why = format!(
                "{window} tokens and an answer of {max_tokens} do not fit in {}; shorten the prompt or the answer",
                self.info.context
            );
            return Err(Error::context_length_exceeded(format!("generating at {}", self.base), why));
        }
        if max_tokens == 0 {
            return Ok(FinishReason::Length);
        }
        let mut listener = StreamListener::new(listen, &sampling.stop, max_tokens);
        match self.stream_answer(prompt, sampling, watch, &mut listener) {
            Ok(finish) | Err(StreamEnd::Finished(finish)) => Ok(finish),
            Err(StreamEnd::Failed(error)) => Err(error),
        }
    }

    fn stream_answer(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &AttentionRequest,
        listener: &mut StreamListener<'_>,
    ) -> Result<FinishReason, StreamEnd> {
        let attention = watch.answer && self.info.attention;
        let mut body = json!({
            "max_length": sampling.max_tokens,
            "max_context_length": self.info.context,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "rep_pen": sampling.repetition_penalty,
            // KoboldCPP takes a seed below 1 as a request for a random one.
            "sampler_seed": sampling.seed % 0x7fff_ffff + 1,
            "stop_sequence": sampling.stop,
            "trim_stop": false,
            "request_id": self.request_id(prompt.conversation, prompt.next_position.0),
        });
        if let Some(fields) = body.as_object_mut() {
            fields.extend(kobold_parameters(sampling, self.info.context));
        }
        if self.sends_ids {
            body["input_ids"] = prompt.window.iter().map(|token| token.id.0).collect();
            body["output_attentions"] = attention.into();
        } else {
            let texts: Vec<String> = (prompt.messages)().into_iter().map(|m| m.text).collect();
            body["prompt"] = texts.concat().into();
        }
        match &sampling.constraint {
            Some(OutputConstraint::GbnfGrammar(grammar)) => body["grammar"] = grammar.clone().into(),
            Some(constraint) => {
                if let Some(schema) = parse_schema(constraint)? {
                    body["grammar"] = self.schema_to_grammar(&schema, listener)?.into();
                }
            }
            None => {}
        }
        let request = stream_request(&self.base, "generating", &body);
        let events = self.client.open_events(&request, listener)?;
        let mut answer = KoboldAnswerStream {
            client: &self.client,
            base: &self.base,
            tokenizer: &mut self.tokenizer,
            end_tokens: &self.end_tokens,
            events,
            window_slots: attention.then_some(prompt.window.len()),
            watch,
            warnings: AttentionWarnings::default(),
            hidden_tokens: 0,
            tokenizer_available: true,
        };
        answer.run(listener)
    }

    /// A JSON schema as a GBNF grammar, which is what KoboldCPP accepts; the server translates it.
    fn schema_to_grammar(
        &self,
        schema: &Value,
        listener: &mut StreamListener<'_>,
    ) -> Result<String, StreamEnd> {
        let operation = "translating the schema";
        let body = json!({"schema": schema});
        let request = RemoteRequest::post(operation, &self.base, "/api/extra/json_to_grammar", &body)
            .with_timeout(self.timeout);
        let value = self.client.fetch_json(&request, listener)?.unwrap_or_default();
        match value["result"].as_str().filter(|grammar| !grammar.is_empty()) {
            Some(grammar) if value["success"] != json!(false) => Ok(grammar.to_owned()),
            _ => {
                let why = "this server does not support schemas; install a newer version of KoboldCPP";
                Err(Error::unavailable(format!("{operation} at {}", self.base), why).into())
            }
        }
    }

    /// A request id in the form of a UUID, derived from the request so that it needs no random numbers.
    fn request_id(&mut self, conversation: &str, next: u64) -> String {
        self.request_count += 1;
        let seed = format!("{conversation}\0{next}\0{}\0{}", self.request_count, std::process::id());
        let hex = format!("{:032x}", xxh3_128(seed.as_bytes()));
        format!("{}-{}-4{}-8{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..])
    }
}

fn stream_request<'a>(base: &'a BaseUrl, operation: &'a str, body: &Value) -> RemoteRequest<'a> {
    let accept = HeaderValue::from_static("text/event-stream");
    RemoteRequest::post(operation, base, STREAM_PATH, body).header(header::ACCEPT, accept)
}

/// Warnings about unusable attention in one answer: the first one is logged, and the count at the end.
#[derive(Default)]
struct AttentionWarnings {
    count: usize,
    total: usize,
}

impl AttentionWarnings {
    fn record(&mut self, token: usize, why: &str) {
        self.count += 1;
        if self.count == 1 {
            tracing::warn!(token, why, "attention is not usable; the token is reported without it");
        }
    }
}

impl Drop for AttentionWarnings {
    fn drop(&mut self) {
        if self.count > 0 {
            tracing::warn!(count = self.count, of = self.total, "tokens were reported without attention");
        }
    }
}

struct KoboldAnswerStream<'a> {
    client: &'a RemoteClient,
    base: &'a BaseUrl,
    tokenizer: &'a mut KoboldTokenizer,
    end_tokens: &'a [u32],
    events: RemoteEventStream<'a>,
    /// The number of tokens in the window; `None` where attention is not requested.
    window_slots: Option<usize>,
    watch: &'a AttentionRequest,
    warnings: AttentionWarnings,
    /// How many tokens the server may have generated without reporting them.
    hidden_tokens: usize,
    /// Whether the tokenizer responds during generation.
    tokenizer_available: bool,
}

impl KoboldAnswerStream<'_> {
    fn run(&mut self, listener: &mut StreamListener<'_>) -> Result<FinishReason, StreamEnd> {
        // A server that has the field `finish_reason` or `type` also reports the end. Old versions have neither.
        let mut reports_end = false;
        while let Some(event) = self.events.next(listener)? {
            if event.trim_ascii() == b"[DONE]" {
                return Ok(FinishReason::EndOfText);
            }
            let mut event = self.events.parse_json(&event)?;
            if let Some(error) = event.get("error").filter(|e| !e.is_null()) {
                let message = sanitize(error.as_str().unwrap_or(&error.to_string()));
                let why = format!("the server stopped with an error: {message}; try again");
                return Err(self.events.error(&why).into());
            }
            reports_end |= event.get("finish_reason").is_some() || event.get("type").is_some();
            self.handle_token(&event["token"].take(), &event["attention"].take(), listener)?;
            if let Some(reason) = event["finish_reason"].as_str() {
                return Ok(StreamListener::finish_from_reason(reason));
            }
        }
        if reports_end {
            let why = "the connection ended before the answer was complete; try again";
            return Err(self.events.error(why).into());
        }
        Ok(FinishReason::EndOfText)
    }

    fn handle_token(
        &mut self,
        token: &Value,
        attention: &Value,
        listener: &mut StreamListener<'_>,
    ) -> Result<(), StreamEnd> {
        let (id, text) = match token {
            Value::String(text) => (None, text.as_str()),
            token => (parse_token_id(&token["token_id"]), token["text"].as_str().unwrap_or("")),
        };
        let mut tokens = match id {
            None if text.is_empty() => return Ok(()),
            Some(id) if text.is_empty() && self.end_tokens.contains(&id) => return Ok(()),
            None => self
                .tokenize_streamed(text, listener)?
                .unwrap_or_else(|| vec![ModelToken { id: UNKNOWN_TOKEN, text: text.to_owned() }]),
            Some(id) => self.token_with_fragments(id, text, listener)?,
        };
        let last = tokens.pop();
        for token in tokens {
            listener.report_token(&token, None)?;
        }
        let row = self.decode_row(attention, listener.token_count());
        match last {
            Some(last) => listener.report_token(&last, row.as_ref().map(DecodedAttention::as_row)),
            None => Ok(()),
        }
    }

    /// A token, with the tokens of the same character before it. Where a character has several tokens, the fork reports
    /// only the last one; without the others the next prompt would be damaged.
    fn token_with_fragments(
        &mut self,
        id: u32,
        text: &str,
        listener: &mut StreamListener<'_>,
    ) -> Result<Vec<ModelToken>, StreamEnd> {
        let single = vec![ModelToken { id: TokenId(id), text: text.to_owned() }];
        if text.is_ascii() {
            return Ok(single);
        }
        match self.tokenize_streamed(text, listener)? {
            Some(tokens) if tokens.last().is_some_and(|last| last.id.0 == id) => Ok(tokens),
            _ => {
                self.hidden_tokens += text.len() - text.chars().count();
                Ok(single)
            }
        }
    }

    /// The tokens of a streamed text; `None` where the request fails. It is then not sent again for this answer: some
    /// servers cannot tokenize while they generate, and every attempt would delay the answer.
    fn tokenize_streamed(
        &mut self,
        text: &str,
        listener: &mut StreamListener<'_>,
    ) -> Result<Option<Vec<ModelToken>>, StreamEnd> {
        if !self.tokenizer_available {
            return Ok(None);
        }
        match self.tokenizer.tokenize_streamed(self.client, self.base, text, listener) {
            Ok(tokens) => Ok(Some(tokens)),
            Err(StreamEnd::Failed(error)) => {
                self.tokenizer_available = false;
                tracing::warn!(%error, "tokenizing a streamed text failed; the rest of the answer has no token ids");
                Ok(None)
            }
            Err(end) => Err(end),
        }
    }

    /// The attention of the decode step that generated a token: over the window and the tokens generated before.
    fn decode_row(&mut self, attention: &Value, generated: usize) -> Option<DecodedAttention> {
        let slots = self.window_slots? + generated;
        self.warnings.total = generated + 1;
        // The first token comes out of the prefill, whose attention the fork does not capture.
        if attention.is_null() {
            if generated > 0 {
                self.warnings.record(generated, "it is missing");
            }
            return None;
        }
        decode_attention(attention, slots, self.hidden_tokens, self.watch)
            .map_err(|why| self.warnings.record(generated, &why))
            .ok()
    }
}
