//! Questions over HTTP/1.1: one connection each, which is closed as soon as the answer is dropped. That is what stops
//! a server that is still at work, so no connection is kept for later, and none outlives its answer.

use crate::Options;
use crate::address::Base;
use crate::sse::Sse;
use crate::stream::{Halt, Teller};
use crate::wire::{Answer, Trouble, exchange};
use halo_core::seams::{Flow, SeamError};
use http_body_util::Full;
use hyper::Method;
use hyper::body::Bytes;
use hyper::header::{self, HeaderName, HeaderValue};
use serde_json::Value;
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// How often a question is asked that nobody has begun to answer, and how long to wait before each new attempt: the
/// same every time, so that what happens can be told beforehand.
const DELAYS: [Duration; 2] = [Duration::from_millis(250), Duration::from_millis(500)];
/// The longest that a server may ask us to wait before we ask again.
const LONGEST_DELAY: Duration = Duration::from_secs(10);
/// How much of an answer that is no stream is read, and how much of an error.
const MOST: usize = 64 << 20;
const MOST_ERROR: usize = 64 << 10;
/// How many characters of an error are shown.
const SHOWN: usize = 300;

/// What is asked.
pub(crate) struct Request<'a> {
    /// What that is for, as errors say it.
    pub what: &'a str,
    pub method: Method,
    pub base: &'a Base,
    /// What stands behind the base's own path.
    pub path: &'a str,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub body: Vec<u8>,
    /// How long all of it may take; none: as long as the listener likes.
    pub limit: Option<Duration>,
}

impl<'a> Request<'a> {
    pub fn get(what: &'a str, base: &'a Base, path: &'a str) -> Self {
        let (headers, body) = (Vec::new(), Vec::new());
        Self { what, method: Method::GET, base, path, headers, body, limit: None }
    }

    pub fn post(what: &'a str, base: &'a Base, path: &'a str, body: &Value) -> Self {
        let body = body.to_string().into_bytes();
        let headers = vec![(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        Self { what, method: Method::POST, base, path, headers, body, limit: None }
    }

    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.retain(|(n, _)| *n != name);
        self.headers.push((name, value));
        self
    }

    pub fn within(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }

    fn error(&self, why: impl std::fmt::Display) -> SeamError {
        SeamError::new(format!("{} at {}", self.what, self.base), why.to_string())
    }

    fn build(&self) -> Result<hyper::Request<Full<Bytes>>, SeamError> {
        let mut request = hyper::Request::builder()
            .method(self.method.clone())
            .uri(format!("{}{}", self.base.path, self.path))
            .header(header::HOST, self.base.authority())
            .header(header::USER_AGENT, concat!("halo/", env!("CARGO_PKG_VERSION")))
            .header(header::CONNECTION, "close");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        request.body(Full::new(Bytes::from(self.body.clone()))).map_err(|e| self.error(e))
    }
}

/// Asks, and waits for answers while it keeps the listener informed.
pub(crate) struct Client {
    /// Always there until this is dropped.
    runtime: Option<Runtime>,
    tls: OnceLock<TlsConnector>,
    connect: Duration,
    idle: Duration,
}

impl Drop for Client {
    fn drop(&mut self) {
        // Looking up a name cannot be interrupted; nobody should have to wait for it.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

impl Client {
    pub fn new(options: &Options) -> Result<Self, SeamError> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| SeamError::new("preparing to use the network", e.to_string()))?;
        let (connect, idle) = (options.connect, options.idle);
        Ok(Self { runtime: Some(runtime), tls: OnceLock::new(), connect, idle })
    }

    /// Waits for something, and tells the listener so now and then. The runtime runs only within `block_on`: the
    /// listener is outside of it, and may have one of its own.
    fn wait<T>(
        &self,
        mut future: Pin<&mut dyn Future<Output = T>>,
        teller: &mut Teller<'_>,
    ) -> Result<T, Halt> {
        let runtime = self.runtime.as_ref().expect("it is only taken when this is dropped");
        loop {
            if teller.rest().is_zero() {
                teller.waiting()?;
            }
            let rest = teller.rest();
            if let Ok(value) = runtime.block_on(async { timeout(rest, future.as_mut()).await }) {
                return Ok(value);
            }
        }
    }

    /// Asks, as often as is worth it, until an answer begins. Its status may be anything.
    pub fn open(&self, request: &Request<'_>, teller: &mut Teller<'_>) -> Result<Answer, Halt> {
        let mut delays = DELAYS.iter();
        loop {
            let delay = delays.next();
            let wait = match self.attempt(request, teller)? {
                Ok(answer) => match delay.filter(|_| answer.asks_for_patience()) {
                    None => return Ok(answer),
                    Some(&usual) => match answer.retry_after() {
                        // Asking sooner than that would be rude, and waiting that long of no use to anyone.
                        Some(long) if long > LONGEST_DELAY => return Ok(answer),
                        asked => asked.unwrap_or(usual),
                    },
                },
                Err(Trouble::Unreachable(why)) => match delay {
                    Some(&usual) => {
                        tracing::debug!(why, "no connection; trying again");
                        usual
                    }
                    None => return Err(request.error(why).into()),
                },
                Err(Trouble::Hopeless(why)) => return Err(request.error(why).into()),
            };
            // The sleep is made within the runtime, whose clock it needs.
            self.wait(pin!(async { tokio::time::sleep(wait).await }), teller)?;
        }
    }

    fn attempt(
        &self,
        request: &Request<'_>,
        teller: &mut Teller<'_>,
    ) -> Result<Result<Answer, Trouble>, Halt> {
        let message = request.build()?;
        let tls = if request.base.https { Some(self.tls(request)?) } else { None };
        let deadline = request.limit.map(|limit| Instant::now() + limit);
        let exchange = exchange(request.base, tls, self.connect, message, deadline);
        let exchange: Pin<Box<dyn Future<Output = _>>> = match request.limit {
            None => Box::pin(exchange),
            Some(limit) => Box::pin(async move {
                timeout(limit, exchange).await.unwrap_or_else(|_| Err(Trouble::Hopeless(late(limit))))
            }),
        };
        let mut exchange = exchange;
        self.wait(exchange.as_mut(), teller)
    }

    fn tls(&self, request: &Request<'_>) -> Result<TlsConnector, SeamError> {
        if let Some(tls) = self.tls.get() {
            return Ok(tls.clone());
        }
        let mut roots = RootCertStore::empty();
        let native = rustls_native_certs::load_native_certs();
        let (known, _) = roots.add_parsable_certificates(native.certs);
        if known == 0 {
            let why = "this system has no certificates to check the server's with; install its package of them \
                       (ca-certificates), or name a file of them in SSL_CERT_FILE";
            return Err(request.error(why));
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|e| request.error(e))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(self.tls.get_or_init(|| TlsConnector::from(Arc::new(config))).clone())
    }

    /// The next bytes of an answer; none at its end.
    pub fn chunk(
        &self,
        request: &Request<'_>,
        answer: &mut Answer,
        teller: &mut Teller<'_>,
    ) -> Result<Option<Bytes>, Halt> {
        // Until something has come there is no limit but the request's own.
        let idle = answer.begun.then_some(self.idle);
        let left = answer.deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let limit = idle.into_iter().chain(left).min();
        let next = async {
            let next = poll_fn(|cx| answer.poll_chunk(cx));
            match limit {
                None => Ok(next.await),
                Some(limit) => timeout(limit, next).await.map_err(|_| limit),
            }
        };
        let next = self.wait(pin!(next), teller)?;
        match next {
            Err(limit) => {
                let why =
                    format!("nothing came for {} s; look whether the server still runs", limit.as_secs_f32());
                Err(request.error(why).into())
            }
            Ok(Err(why)) => {
                let why = format!("the connection broke before the answer was whole ({why}); try again");
                Err(request.error(why).into())
            }
            Ok(Ok(chunk)) => {
                answer.begun |= chunk.is_some();
                Ok(chunk)
            }
        }
    }

    /// The whole of an answer, as long as it is no longer than that.
    fn whole(
        &self,
        request: &Request<'_>,
        answer: &mut Answer,
        most: usize,
        teller: &mut Teller<'_>,
    ) -> Result<Vec<u8>, Halt> {
        let mut whole = Vec::new();
        while let Some(chunk) = self.chunk(request, answer, teller)? {
            if whole.len() + chunk.len() > most {
                let why = format!("the answer is longer than {most} bytes; is that the right server?");
                return Err(request.error(why).into());
            }
            whole.extend_from_slice(&chunk);
        }
        Ok(whole)
    }

    /// An answer that must be JSON; none where the server has no such thing (404 and its kin).
    pub fn json(&self, request: &Request<'_>, teller: &mut Teller<'_>) -> Result<Option<Value>, Halt> {
        let mut answer = self.open(request, teller)?;
        if matches!(answer.status.as_u16(), 404 | 405 | 501) {
            return Ok(None);
        }
        if !answer.status.is_success() {
            return Err(self.refusal(request, answer, teller));
        }
        let body = self.whole(request, &mut answer, MOST, teller)?;
        let value = serde_json::from_slice(&body).map_err(|_| request.error(no_json(&body)))?;
        Ok(Some(value))
    }

    /// As [`Self::json`], for what every server of the kind has.
    pub fn must(&self, request: &Request<'_>, teller: &mut Teller<'_>) -> Result<Value, Halt> {
        self.json(request, teller)?.ok_or_else(|| {
            let why =
                format!("the server does not know {}{}; check the address", request.base.path, request.path);
            request.error(why).into()
        })
    }

    /// An answer that must be a stream of events.
    pub fn events<'a>(
        &'a self,
        request: &'a Request<'a>,
        teller: &mut Teller<'_>,
    ) -> Result<Events<'a>, Halt> {
        let mut answer = self.open(request, teller)?;
        if !answer.status.is_success() {
            return Err(self.refusal(request, answer, teller));
        }
        let kind = answer.header(&header::CONTENT_TYPE).to_ascii_lowercase();
        if !kind.is_empty() && !kind.starts_with("text/event-stream") {
            let body = self.whole(request, &mut answer, MOST_ERROR, teller).unwrap_or_default();
            let kind = printable(&kind);
            let why = format!("a stream of events was expected, but {kind} came: {}", message(&body));
            return Err(request.error(redacted(why, request)).into());
        }
        Ok(Events { client: self, request, answer, sse: Sse::default(), ready: VecDeque::new(), over: false })
    }

    /// What a server says when it does not do what it is asked, and what to do about it.
    pub fn refusal(&self, request: &Request<'_>, mut answer: Answer, teller: &mut Teller<'_>) -> Halt {
        let (status, location) = (answer.status, answer.header(&header::LOCATION).to_owned());
        let patience = answer.retry_after();
        let body = match self.whole(request, &mut answer, MOST_ERROR, teller) {
            Err(Halt::Ended(finish)) => return Halt::Ended(finish),
            body => body.unwrap_or_default(),
        };
        let mut why = format!("the server answered {}", status.as_u16());
        let said = message(&body);
        if !said.is_empty() {
            why.push_str(": ");
            why.push_str(&said);
        }
        why.push_str("; ");
        match status.as_u16() {
            300..=399 => {
                why.push_str("it points to ");
                why.push_str(&printable(&location));
                why.push_str(": use that address, if you trust it");
            }
            401 | 403 => why.push_str("check the key"),
            404 | 405 => why.push_str("check the address, and the model's name"),
            429 => match patience {
                Some(wait) => why.push_str(&format!("it asks to wait {} s", wait.as_secs())),
                None => why.push_str("wait a while and try again"),
            },
            500.. => why.push_str("look at what the server says, and try again"),
            _ => why.push_str("check the address, and what was asked"),
        }
        Halt::Failed(request.error(redacted(why, request)))
    }
}

/// A key that a server repeats in its errors is not repeated in ours.
fn redacted(mut text: String, request: &Request<'_>) -> String {
    for (name, value) in &request.headers {
        if *name == header::AUTHORIZATION
            && let Ok(value) = value.to_str()
        {
            let key = value.strip_prefix("Bearer ").unwrap_or(value);
            text = text.replace(key, "…");
        }
    }
    text
}

fn late(limit: Duration) -> String {
    format!("no answer within {} s; the server may be busy: try again when it is not", limit.as_secs_f32())
}

/// A stream of events.
pub(crate) struct Events<'a> {
    client: &'a Client,
    request: &'a Request<'a>,
    answer: Answer,
    sse: Sse,
    ready: VecDeque<Vec<u8>>,
    over: bool,
}

impl Events<'_> {
    /// The data of the next event; none at the end.
    pub fn next(&mut self, teller: &mut Teller<'_>) -> Result<Option<Vec<u8>>, Halt> {
        while self.ready.is_empty() && !self.over {
            let ready = &mut self.ready;
            match self.client.chunk(self.request, &mut self.answer, teller)? {
                Some(bytes) => self.sse.read(&bytes, &mut |event| ready.push_back(event)).map_err(|e| {
                    let why = format!("it sent a line of more than {} bytes; is that the right server?", e.0);
                    self.request.error(why)
                })?,
                None => {
                    self.sse.finish(&mut |event| ready.push_back(event));
                    self.over = true;
                }
            }
        }
        Ok(self.ready.pop_front())
    }

    /// As [`Self::next`], read as JSON.
    pub fn value(&self, event: &[u8]) -> Result<Value, SeamError> {
        serde_json::from_slice(event).map_err(|_| self.error(&no_json(event)))
    }

    /// An error of this stream.
    pub fn error(&self, why: &str) -> SeamError {
        self.request.error(redacted(why.to_owned(), self.request))
    }
}

/// The listener of questions that nobody stops.
pub(crate) fn nobody(_: halo_core::seams::ModelStep<'_>) -> Flow {
    Flow::Continue
}

fn no_json(body: &[u8]) -> String {
    let page = body.trim_ascii_start().starts_with(b"<");
    let hint = if page { "that is a web page: check the address" } else { "check the address" };
    format!("JSON was expected, but this came: '{}'; {hint}", printable(&String::from_utf8_lossy(body)))
}

/// What an error says of itself, in whichever of the usual places.
pub(crate) fn message(body: &[u8]) -> String {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let places = ["/error/message", "/error", "/detail/msg", "/detail", "/message", "/msg"];
    let said = places.iter().find_map(|place| value.pointer(place).and_then(Value::as_str));
    said.map_or_else(|| printable(&String::from_utf8_lossy(body)), printable)
}

/// What can be shown of what a server said: a line, not too long, without anything that a terminal would obey.
pub(crate) fn printable(text: &str) -> String {
    let words: Vec<&str> = text.split(|c: char| c.is_whitespace() || c.is_control()).collect();
    let line = words.iter().filter(|w| !w.is_empty()).copied().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}
