//! KoboldCPP. The fork that streams attention is sent ids and tells ids; any other is sent and tells text.

use crate::Options;
use crate::address::Base;
use crate::attention::{Rows, decode};
use crate::http::{Client, Events, Request, nobody, printable};
use crate::stream::{Halt, Teller};
use crate::tokens::{Tokens, UNKNOWN, id};
use halo_core::attention::Watch;
use halo_core::seams::{Finish, Flow, ModelInfo, ModelStep, Piece, Prompt, Sampling, SeamError, Template};
use halo_core::token::TokenId;
use hyper::header::{self, HeaderValue};
use serde_json::{Value, json};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_128;

const STREAM: &str = "/api/extra/generate/stream";
/// How long the first few tokens may take that show what a server can do.
const TRIAL: Duration = Duration::from_secs(10);

/// A KoboldCPP server.
#[derive(Debug)]
pub(crate) struct Kobold {
    client: Client,
    base: Base,
    info: ModelInfo,
    tokens: Tokens,
    /// Whether it is sent ids. Otherwise it is sent text, in which it takes special names for special tokens.
    by_ids: bool,
    /// The tokens that end an answer, which are no part of it.
    ends: Vec<u32>,
    limit: Duration,
    asked: u64,
}

/// What the trial showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trial {
    Attention,
    Ids,
    Text,
    /// It could not be made.
    Nothing,
}

impl Kobold {
    pub fn connect(base: Base, options: &Options) -> Result<Self, SeamError> {
        let client = Client::new(options)?;
        let mut listen = nobody;
        Self::meet(client, base, options, &mut Teller::nobody(&mut listen)).map_err(Halt::error)
    }

    fn meet(client: Client, base: Base, options: &Options, teller: &mut Teller<'_>) -> Result<Self, Halt> {
        let request = Request::get("asking about the model", &base, "/api/v1/model").within(options.quick);
        let model = client.must(&request, teller)?;
        let named = |field: &str| model[field].as_str().filter(|name| !name.is_empty());
        let told = model["max_context_length"].as_u64().filter(|n| *n > 0);
        let extended = named("model_name").is_some() && told.is_some();
        let Some(name) = named("model_name").or(named("result")) else {
            let why = "it does not say which model it has; is that KoboldCPP?";
            return Err(SeamError::new(format!("asking about the model at {base}"), why).into());
        };
        let name = printable(name);
        let ends = ["eos_token_id", "eot_token_id"].iter().filter_map(|end| id(&model[end])).collect();
        let tokens = Tokens::find(&client, &base, options.quick, extended, teller)?;
        let template = Template::chatml();
        let info = ModelInfo { name, context: 0, attention: false, template };
        let (limit, told) = (options.quick, told.and_then(|n| usize::try_from(n).ok()));
        let mut kobold = Self { client, base, info, tokens, by_ids: false, ends, limit, asked: 0 };
        let context = match told {
            Some(told) => told,
            None => kobold.ask_context(teller)?,
        };
        kobold.info.context = options.context.map_or(context, |wanted| wanted.min(context));
        if extended && kobold.tokens.are_told() {
            let trial = kobold.try_out(teller)?;
            if trial == Trial::Nothing {
                tracing::warn!(
                    "the server could not show whether it streams attention; it says what one says that does"
                );
            }
            kobold.by_ids = trial != Trial::Text;
            kobold.info.attention = matches!(trial, Trial::Attention | Trial::Nothing);
        }
        Ok(kobold)
    }

    fn ask_context(&self, teller: &mut Teller<'_>) -> Result<usize, Halt> {
        for path in ["/api/extra/true_max_context_length", "/api/v1/config/max_context_length"] {
            let request = Request::get("asking for the context's size", &self.base, path).within(self.limit);
            let value = self.client.json(&request, teller)?.unwrap_or_default();
            if let Some(context) =
                value["value"].as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0)
            {
                return Ok(context);
            }
        }
        let why = "it does not say how much it can see; is that KoboldCPP?";
        Err(SeamError::new(format!("asking for the context's size at {}", self.base), why).into())
    }

    /// Has a few tokens made, to see what comes with them.
    fn try_out(&mut self, teller: &mut Teller<'_>) -> Result<Trial, Halt> {
        let start = self.tokens.cut(&self.client, &self.base, "Once upon a time", true, teller)?;
        let body = json!({
            "input_ids": start.iter().map(|p| p.id.0).collect::<Vec<_>>(),
            "max_length": 3,
            "temperature": 0.1,
            "ban_eos_token": true,
            "output_attentions": true,
            "request_id": self.request_id("", 0),
            "sampler_seed": 1,
        });
        let request = streaming(&self.base, "trying the model", &body).within(TRIAL.min(self.limit * 2));
        let look = |teller: &mut Teller<'_>| {
            let mut events = self.client.events(&request, teller)?;
            let mut seen = Trial::Nothing;
            let mut made = 0;
            while let Some(event) = events.next(teller)? {
                let event = events.value(&event)?;
                if event["attention"].is_object() {
                    return Ok(Trial::Attention);
                }
                if event["token"].is_object() {
                    made += 1;
                    // The first one comes out of the prompt, and mostly without.
                    seen = if made > 1 { Trial::Ids } else { seen };
                } else if event["token"].as_str().is_some_and(|text| !text.is_empty()) {
                    return Ok(Trial::Text);
                }
            }
            Ok(seen)
        };
        match look(teller) {
            Err(Halt::Failed(error)) => {
                tracing::debug!(%error, "the trial failed");
                Ok(Trial::Nothing)
            }
            other => other,
        }
    }

    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    pub fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<Piece>, SeamError> {
        let mut listen = nobody;
        let mut teller = Teller::nobody(&mut listen);
        self.tokens.cut(&self.client, &self.base, text, special, &mut teller).map_err(Halt::error)
    }

    pub fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &Watch,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        let (window, most) = (prompt.window.len(), sampling.max_tokens);
        if window + most > self.info.context {
            // The server would silently leave out the beginning.
            let why = format!(
                "{window} tokens and an answer of {most} do not fit the {} that the model can see; make one less",
                self.info.context
            );
            return Err(SeamError::new(format!("generating at {}", self.base), why));
        }
        if most == 0 {
            return Ok(Finish::Length);
        }
        let mut teller = Teller::new(listen, &sampling.stop, most);
        match self.answer(prompt, sampling, watch, &mut teller) {
            Ok(finish) | Err(Halt::Ended(finish)) => Ok(finish),
            Err(Halt::Failed(error)) => Err(error),
        }
    }

    fn answer(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &Watch,
        teller: &mut Teller<'_>,
    ) -> Result<Finish, Halt> {
        let attention = watch.answer && self.info.attention;
        let mut body = json!({
            "max_length": sampling.max_tokens,
            "max_context_length": self.info.context,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "rep_pen": sampling.repetition,
            // Nothing below 1 is a seed to KoboldCPP.
            "sampler_seed": sampling.seed % 0x7fff_ffff + 1,
            "stop_sequence": sampling.stop,
            "trim_stop": false,
            "request_id": self.request_id(prompt.conversation, prompt.next.0),
        });
        if self.by_ids {
            body["input_ids"] = prompt.window.iter().map(|seen| seen.id.0).collect();
            body["output_attentions"] = attention.into();
        } else {
            let texts: Vec<String> = (prompt.messages)().into_iter().map(|m| m.text).collect();
            body["prompt"] = texts.concat().into();
        }
        if let Some(form) = &sampling.form {
            body["grammar"] = self.grammar(crate::schema(form)?, teller)?.into();
        }
        let request = streaming(&self.base, "generating", &body);
        let events = self.client.events(&request, teller)?;
        let slots = if attention { Some(prompt.window.len()) } else { None };
        let mut answering = Answering {
            client: &self.client,
            base: &self.base,
            tokens: &mut self.tokens,
            ends: &self.ends,
            events,
            slots,
            watch,
            faults: Faults::default(),
            hidden: 0,
            asks: true,
        };
        answering.run(teller)
    }

    /// A schema in the notation that KoboldCPP keeps to; it translates that itself.
    fn grammar(&self, schema: &str, teller: &mut Teller<'_>) -> Result<String, Halt> {
        let what = "translating the schema";
        let schema: Value = serde_json::from_str(schema)
            .map_err(|e| SeamError::new(what, format!("it is no JSON ({e}); correct it")))?;
        let body = json!({"schema": schema});
        let request = Request::post(what, &self.base, "/api/extra/json_to_grammar", &body).within(self.limit);
        let value = self.client.json(&request, teller)?.unwrap_or_default();
        match value["result"].as_str().filter(|grammar| !grammar.is_empty()) {
            Some(grammar) if value["success"] != json!(false) => Ok(grammar.to_owned()),
            _ => {
                let why = "this server cannot keep to a schema; a newer version of KoboldCPP can";
                Err(SeamError::new(format!("{what} at {}", self.base), why).into())
            }
        }
    }

    /// A name for a request, in the form that servers expect: made of what is asked, not of chance.
    fn request_id(&mut self, conversation: &str, next: u64) -> String {
        self.asked += 1;
        let seed = format!("{conversation}\0{next}\0{}\0{}", self.asked, std::process::id());
        let hex = format!("{:032x}", xxh3_128(seed.as_bytes()));
        format!("{}-{}-4{}-8{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..])
    }
}

fn streaming<'a>(base: &'a Base, what: &'a str, body: &Value) -> Request<'a> {
    let kind = HeaderValue::from_static("text/event-stream");
    Request::post(what, base, STREAM, body).header(header::ACCEPT, kind)
}

/// What was wrong with the attention of an answer: said once when it begins, and counted when it ends.
#[derive(Default)]
struct Faults {
    count: usize,
    of: usize,
}

impl Faults {
    fn note(&mut self, token: usize, why: &str) {
        self.count += 1;
        if self.count == 1 {
            tracing::warn!(token, why, "attention that cannot be used; the token is told without it");
        }
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        if self.count > 0 {
            tracing::warn!(count = self.count, of = self.of, "tokens were told without attention");
        }
    }
}

/// An answer, while it comes.
struct Answering<'a> {
    client: &'a Client,
    base: &'a Base,
    tokens: &'a mut Tokens,
    ends: &'a [u32],
    events: Events<'a>,
    /// How many tokens the window has, where attention is wanted.
    slots: Option<usize>,
    watch: &'a Watch,
    faults: Faults,
    /// How many tokens the server may have made without naming them.
    hidden: usize,
    /// Whether the tokenizer answers while an answer streams.
    asks: bool,
}

impl Answering<'_> {
    fn run(&mut self, teller: &mut Teller<'_>) -> Result<Finish, Halt> {
        // A server that speaks of the end at all has died if it does not say so. Old ones never do.
        let mut speaks = false;
        while let Some(event) = self.events.next(teller)? {
            if event.trim_ascii() == b"[DONE]" {
                return Ok(Finish::End);
            }
            let mut event = self.events.value(&event)?;
            if let Some(error) = event.get("error").filter(|e| !e.is_null()) {
                let said = printable(error.as_str().unwrap_or(&error.to_string()));
                return Err(self.events.error(&format!("the server broke off: {said}; try again")).into());
            }
            speaks |= event.get("finish_reason").is_some() || event.get("type").is_some();
            self.token(&event["token"].take(), &event["attention"].take(), teller)?;
            if let Some(reason) = event["finish_reason"].as_str() {
                return Ok(Teller::finish(reason));
            }
        }
        if speaks {
            let why = "the connection ended before the answer did; what was said stays, try again";
            return Err(self.events.error(why).into());
        }
        Ok(Finish::End)
    }

    fn token(&mut self, token: &Value, attention: &Value, teller: &mut Teller<'_>) -> Result<(), Halt> {
        let (number, text) = match token {
            Value::String(text) => (None, text.as_str()),
            token => (id(&token["token_id"]), token["text"].as_str().unwrap_or("")),
        };
        let mut pieces = match number {
            None if text.is_empty() => return Ok(()),
            // The end is not part of the answer; whoever goes on writes it.
            Some(number) if text.is_empty() && self.ends.contains(&number) => return Ok(()),
            None => {
                self.ask(text, teller)?.unwrap_or_else(|| vec![Piece { id: UNKNOWN, text: text.to_owned() }])
            }
            Some(number) => self.with_fragments(number, text, teller)?,
        };
        let last = pieces.pop();
        for piece in pieces {
            teller.token(&piece, None)?;
        }
        let rows = self.rows(attention, teller.count());
        match last {
            Some(last) => teller.token(&last, rows.as_ref().map(Rows::look)),
            None => Ok(()),
        }
    }

    /// A token, with the parts of characters that came before it. The fork makes one character of several tokens and
    /// then names only the last of them; without the others the next window would be damaged.
    fn with_fragments(
        &mut self,
        number: u32,
        text: &str,
        teller: &mut Teller<'_>,
    ) -> Result<Vec<Piece>, Halt> {
        let alone = vec![Piece { id: TokenId(number), text: text.to_owned() }];
        if text.is_ascii() {
            return Ok(alone);
        }
        match self.ask(text, teller)? {
            Some(pieces) if pieces.last().is_some_and(|last| last.id.0 == number) => Ok(pieces),
            _ => {
                self.hidden += text.len() - text.chars().count();
                Ok(alone)
            }
        }
    }

    /// The tokens of a streamed text; none where the server does not say. Then it is not asked again in this answer:
    /// some cannot while they generate, and every attempt would hold up the answer.
    fn ask(&mut self, text: &str, teller: &mut Teller<'_>) -> Result<Option<Vec<Piece>>, Halt> {
        if !self.asks {
            return Ok(None);
        }
        match self.tokens.streamed(self.client, self.base, text, teller) {
            Ok(pieces) => Ok(Some(pieces)),
            Err(Halt::Failed(error)) => {
                self.asks = false;
                tracing::warn!(%error, "the ids of streamed tokens are not known from here on");
                Ok(None)
            }
            Err(ended) => Err(ended),
        }
    }

    /// What the pass that made a token looked at: the window, and what was made before.
    fn rows(&mut self, attention: &Value, made: usize) -> Option<Rows> {
        let slots = self.slots? + made;
        self.faults.of = made + 1;
        // The first token comes out of the pass that read the prompt, of which the fork captures nothing.
        if attention.is_null() {
            if made > 0 {
                self.faults.note(made, "there is none");
            }
            return None;
        }
        decode(attention, slots, self.hidden, self.watch).map_err(|why| self.faults.note(made, &why)).ok()
    }
}
