//! A server that speaks as OpenAI does: it is sent messages, and streams text. It tells neither tokens nor attention,
//! so text is cut here ([`crate::cut`]), and what a model's template would do is the server's business.

use crate::Options;
use crate::address::{Address, Base};
use crate::http::{Client, Request, message, nobody, printable};
use crate::pieces::Cutter;
use crate::stream::{Halt, Teller};
use halo_core::seams::{
    Finish, Flow, Message, ModelInfo, ModelStep, Piece, Prompt, Sampling, SeamError, Template,
};
use halo_core::token::Role;
use hyper::header::{self, HeaderValue};
use serde_json::{Value, json};
use std::fmt;

/// What a server is taken to see if nobody says.
const CONTEXT: usize = 8192;
/// How many stop sequences OpenAI accepts.
const STOPS: usize = 4;

/// A key, which nobody gets to see.
pub struct Key(HeaderValue);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

/// The key for servers that speak as OpenAI does: `HALO_OPENAI_KEY`, or else `OPENAI_API_KEY`. There is no other way to
/// give one, so that it stands in no file and no list of processes. Nothing where it is unset, empty, or cannot be
/// sent.
#[must_use]
pub fn key_from_environment() -> Option<Key> {
    ["HALO_OPENAI_KEY", "OPENAI_API_KEY"].iter().find_map(|name| {
        let key = std::env::var(name).ok()?;
        let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim())).ok()?;
        value.set_sensitive(true);
        (!key.trim().is_empty()).then_some(Key(value))
    })
}

/// A model of such a server.
#[derive(Debug)]
pub(crate) struct OpenAi {
    client: Client,
    base: Base,
    key: Option<Key>,
    info: ModelInfo,
}

impl OpenAi {
    pub fn connect(address: Address, key: Option<Key>, options: &Options) -> Result<Self, SeamError> {
        let Address { base, model, .. } = address;
        if key.is_some() && !base.may_carry_key() {
            let why = "a key is set (HALO_OPENAI_KEY or OPENAI_API_KEY), and anyone on the way could read it; use \
                       https, or unset the key if the server needs none";
            return Err(SeamError::new(format!("connecting to {base}"), why));
        }
        let client = Client::new(options)?;
        let template = Template::default();
        let info = ModelInfo { name: String::new(), context: CONTEXT, attention: false, template };
        let mut openai = Self { client, base, key, info };
        let mut listen = nobody;
        let request = openai.with_key(Request::get("asking for the models", &openai.base, "/models"));
        let models = openai.client.json(&request.within(options.quick), &mut Teller::nobody(&mut listen));
        // Some servers have no list; then the address must say everything.
        let models = models.map_err(Halt::error)?.unwrap_or_default();
        openai.info.name = openai.choose(model, &models)?;
        let known = models["data"]
            .as_array()
            .and_then(|all| all.iter().find(|m| m["id"] == openai.info.name.as_str()));
        let told = known.and_then(|model| {
            let fields = ["context_length", "max_model_len", "context_window"];
            fields.iter().find_map(|field| model[field].as_u64()).filter(|n| *n > 0)
        });
        let told = told.and_then(|n| usize::try_from(n).ok());
        openai.info.context = options.context.or(told).unwrap_or(CONTEXT);
        Ok(openai)
    }

    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn choose(&self, model: Option<String>, models: &Value) -> Result<String, SeamError> {
        if let Some(model) = model {
            return Ok(model);
        }
        let names: Vec<&str> =
            models["data"].as_array().into_iter().flatten().filter_map(|m| m["id"].as_str()).collect();
        match names.as_slice() {
            [only] => Ok((*only).to_owned()),
            names => {
                let names =
                    if names.is_empty() { "no list of them".into() } else { printable(&names.join(", ")) };
                let why = format!("write which model behind a # in the address; the server has {names}");
                Err(SeamError::new(format!("connecting to {}", self.base), why))
            }
        }
    }

    fn with_key<'a>(&self, request: Request<'a>) -> Request<'a> {
        match &self.key {
            Some(Key(value)) => request.header(header::AUTHORIZATION, value.clone()),
            None => request,
        }
    }

    pub fn generate(
        &self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        if sampling.max_tokens == 0 {
            return Ok(Finish::Length);
        }
        let body = self.body(&(prompt.messages)(), sampling)?;
        let request = self
            .with_key(Request::post("generating", &self.base, "/chat/completions", &body))
            .header(header::ACCEPT, HeaderValue::from_static("text/event-stream"));
        let mut teller = Teller::new(listen, &sampling.stop, sampling.max_tokens);
        match self.stream(&request, sampling, &mut teller) {
            Ok(finish) | Err(Halt::Ended(finish)) => Ok(finish),
            Err(Halt::Failed(error)) => Err(error),
        }
    }

    fn body(&self, messages: &[Message], sampling: &Sampling) -> Result<Value, SeamError> {
        // A last message of the assistant's own is one to go on with: many servers do, and those that do not take it
        // as said and answer anew. One that says nothing yet would only confuse them.
        let begun = messages.len() - usize::from(messages.last().is_some_and(is_unsaid));
        let messages: Vec<Value> =
            messages[..begun].iter().map(|m| json!({"role": role(m.role), "content": m.text})).collect();
        // What OpenAI does not know (top_k, min_p, repetition) it would refuse, so it is not sent.
        let mut body = json!({
            "model": self.info.name,
            "messages": messages,
            "stream": true,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed & (i64::MAX as u64),
        });
        let stops: Vec<&String> = sampling.stop.iter().filter(|s| !s.is_empty()).take(STOPS).collect();
        if !stops.is_empty() {
            body["stop"] = json!(stops);
        }
        if let Some(form) = &sampling.form {
            let schema: Value = serde_json::from_str(crate::schema(form)?).map_err(|e| {
                SeamError::new("generating", format!("the schema is no JSON ({e}); correct it"))
            })?;
            body["response_format"] = json!({
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": true, "schema": schema},
            });
        }
        Ok(body)
    }

    fn stream(
        &self,
        request: &Request<'_>,
        sampling: &Sampling,
        teller: &mut Teller<'_>,
    ) -> Result<Finish, Halt> {
        let mut events = self.client.events(request, teller)?;
        let mut cutter = Cutter::default();
        let mut whole: Vec<Piece> = Vec::new();
        let mut finish = None;
        while let Some(event) = events.next(teller)? {
            if event.trim_ascii() == b"[DONE]" {
                finish = finish.or(Some(Finish::End));
                break;
            }
            let value = events.value(&event)?;
            if !value["error"].is_null() {
                let why = format!("the server broke off: {}; try again", message(&event));
                return Err(events.error(&why).into());
            }
            let choice = &value["choices"][0];
            if let Some(text) = choice["delta"]["content"].as_str() {
                cutter.read(text, &mut |piece| whole.push(piece));
            }
            if let Some(reason) = choice["finish_reason"].as_str() {
                // Some servers say which stop sequence they have cut off; it belongs to the answer.
                if let Some(stop) =
                    choice["stop_reason"].as_str().filter(|s| sampling.stop.iter().any(|t| t == s))
                {
                    cutter.read(stop, &mut |piece| whole.push(piece));
                }
                cutter.finish(&mut |piece| whole.push(piece));
                finish = Some(Teller::finish(reason));
            }
            for piece in whole.drain(..) {
                teller.token(&piece, None)?;
            }
        }
        cutter.finish(&mut |piece| whole.push(piece));
        for piece in whole.drain(..) {
            teller.token(&piece, None)?;
        }
        finish.ok_or_else(|| {
            events.error("the connection ended before the answer did; what was said stays, try again").into()
        })
    }
}

fn is_unsaid(message: &Message) -> bool {
    message.role == Role::Assistant && message.text.is_empty()
}

fn role(role: Role) -> &'static str {
    match role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
    }
}
