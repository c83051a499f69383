//! HTTP requests. Each one has its own connection, which is closed as soon as the response is dropped: a server that is
//! still generating stops when its client disconnects. So idle connections are not pooled.

use crate::address::{BaseUrl, redact_password};
use crate::error_text::{error_code_kind, error_message, not_json_message, redact_key, sanitize};
use crate::options::RemoteOptions;
use crate::sse::SseParser;
use crate::stream_listener::{StreamEnd, StreamListener};
use halo_core::model::{ModelStep, StepFlow};
use halo_core::{Error, ErrorKind};
use reqwest::header::{self, HeaderMap, HeaderName, HeaderValue};
use reqwest::redirect::Policy;
use reqwest::{Client, Method, StatusCode};
use serde_json::Value;
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::ops::Deref;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

/// The wait before each retry of a request that has no response yet. The waits are fixed, so that tests can count them.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(250), Duration::from_millis(500)];
/// The longest `Retry-After` that is waited for.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(10);
const MAX_BODY_BYTES: usize = 64 << 20;
const MAX_ERROR_BYTES: usize = 64 << 10;

pub(crate) struct RemoteRequest<'a> {
    /// The operation that error messages name.
    pub operation: &'a str,
    method: Method,
    base: &'a BaseUrl,
    path: &'a str,
    headers: HeaderMap,
    body: Vec<u8>,
    /// The limit for the whole exchange; `None` where only the listener may end it.
    timeout: Option<Duration>,
}

impl<'a> RemoteRequest<'a> {
    pub fn get(operation: &'a str, base: &'a BaseUrl, path: &'a str) -> Self {
        let (headers, body) = (HeaderMap::new(), Vec::new());
        Self { operation, method: Method::GET, base, path, headers, body, timeout: None }
    }

    pub fn post(operation: &'a str, base: &'a BaseUrl, path: &'a str, body: &Value) -> Self {
        let request = Self::get(operation, base, path)
            .header(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Self { method: Method::POST, body: body.to_string().into_bytes(), ..request }
    }

    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.insert(name, value);
        self
    }

    pub fn with_timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    pub fn error(&self, why: impl std::fmt::Display) -> Error {
        Error::unavailable(format!("{} at {}", self.operation, self.base), why.to_string())
    }
}

/// Sends requests, and calls the listener while it waits for responses.
pub(crate) struct RemoteClient {
    /// `None` only while this is dropped.
    runtime: Option<Runtime>,
    http: Client,
    connect_timeout: Duration,
    idle_timeout: Duration,
}

impl Drop for RemoteClient {
    fn drop(&mut self) {
        // A name lookup cannot be interrupted; the caller does not wait for it.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl std::fmt::Debug for RemoteClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteClient").finish_non_exhaustive()
    }
}

impl RemoteClient {
    /// A client for one server. It follows no redirects, so a key is never sent to another host.
    pub fn new(base: &BaseUrl, options: &RemoteOptions) -> Result<Self, Error> {
        Self::build(base, options, Policy::none(), base.is_https())
    }

    /// A client that follows redirects by a policy. A redirect may lead to https.
    pub fn for_downloads(base: &BaseUrl, options: &RemoteOptions, redirects: Policy) -> Result<Self, Error> {
        Self::build(base, options, redirects, true)
    }

    fn build(
        base: &BaseUrl,
        options: &RemoteOptions,
        redirects: Policy,
        load_roots: bool,
    ) -> Result<Self, Error> {
        let operation = "preparing the HTTP client";
        // The worker thread closes connections while no call waits.
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|e| Error::internal(operation, e.to_string()))?;
        let mut http = Client::builder()
            .user_agent(concat!("halo/", env!("CARGO_PKG_VERSION")))
            .use_preconfigured_tls(tls_config(load_roots, base.is_https())?)
            .redirect(redirects)
            .referer(false)
            .connect_timeout(options.connect_timeout)
            .pool_max_idle_per_host(0);
        if base.is_loopback() {
            // A proxy cannot reach this machine's own servers, and must not see their keys.
            http = http.no_proxy();
        }
        let http = http.build().map_err(|e| Error::internal(operation, error_chain(&e)))?;
        let (connect_timeout, idle_timeout) = (options.connect_timeout, options.idle_timeout);
        Ok(Self { runtime: Some(runtime), http, connect_timeout, idle_timeout })
    }

    /// Waits for a future and calls the listener in between. The listener runs outside of `block_on`, so it may use a
    /// runtime of its own.
    fn wait_with_listener<T>(
        &self,
        mut future: Pin<&mut dyn Future<Output = T>>,
        listener: &mut StreamListener<'_>,
    ) -> Result<T, StreamEnd> {
        let runtime = self.runtime.as_ref().expect("the runtime is only taken by drop");
        loop {
            if listener.until_next_call().is_zero() {
                listener.report_waiting()?;
            }
            let rest = listener.until_next_call();
            if let Ok(value) = runtime.block_on(async { timeout(rest, future.as_mut()).await }) {
                return Ok(value);
            }
        }
    }

    /// Sends a request, with retries, until a response begins. The response may have any status.
    pub fn send(
        &self,
        request: &RemoteRequest<'_>,
        listener: &mut StreamListener<'_>,
    ) -> Result<RemoteResponse, StreamEnd> {
        let mut delays = RETRY_DELAYS.iter();
        loop {
            let delay = delays.next();
            let wait = match self.attempt(request, listener)? {
                Ok(response) => match delay.filter(|_| response.is_retryable()) {
                    None => return Ok(response),
                    Some(&usual) => match response.retry_after() {
                        Some(long) if long > MAX_RETRY_DELAY => return Ok(response),
                        requested => requested.unwrap_or(usual),
                    },
                },
                Err(error) => {
                    let (why, retryable) = self.attempt_error(request, &error);
                    match delay.filter(|_| retryable) {
                        Some(&usual) => {
                            tracing::debug!(why, "no connection; trying again");
                            usual
                        }
                        None => return Err(request.error(why).into()),
                    }
                }
            };
            // The sleep is created within the runtime, whose timer it needs.
            self.wait_with_listener(pin!(async { tokio::time::sleep(wait).await }), listener)?;
        }
    }

    fn attempt(
        &self,
        request: &RemoteRequest<'_>,
        listener: &mut StreamListener<'_>,
    ) -> Result<Result<RemoteResponse, reqwest::Error>, StreamEnd> {
        let mut builder = self
            .http
            .request(request.method.clone(), request.base.join(request.path))
            .headers(request.headers.clone())
            .body(request.body.clone());
        if let Some(limit) = request.timeout {
            builder = builder.timeout(limit);
        }
        let response = self.wait_with_listener(pin!(async { builder.send().await }), listener)?;
        Ok(response.map(|response| RemoteResponse { response, body_started: false }))
    }

    /// Why an attempt failed, and whether another one may succeed.
    fn attempt_error(&self, request: &RemoteRequest<'_>, error: &reqwest::Error) -> (String, bool) {
        let reason = error_chain(error);
        if error.is_redirect() {
            return (reason, false);
        }
        if error.is_connect() {
            let hint = "check the address, and that the server runs";
            if is_tls_error(error) {
                let hint = "check that the server speaks https, and its certificate";
                return (format!("no secure connection ({reason}); {hint}"), false);
            }
            if error.is_timeout() {
                let seconds = self.connect_timeout.as_secs_f32();
                return (format!("no connection within {seconds} s; {hint}"), true);
            }
            return (format!("no connection ({reason}); {hint}"), true);
        }
        match request.timeout.filter(|_| error.is_timeout()) {
            Some(limit) => (timeout_message(limit), false),
            None => (format!("the connection broke ({reason})"), true),
        }
    }

    /// The next bytes of a body; `None` at its end.
    pub fn next_bytes(
        &self,
        request: &RemoteRequest<'_>,
        response: &mut RemoteResponse,
        listener: &mut StreamListener<'_>,
    ) -> Result<Option<impl Deref<Target = [u8]> + use<>>, StreamEnd> {
        // A long prompt takes as long as it takes: the idle timeout starts with the first bytes.
        let idle = response.body_started.then_some(self.idle_timeout);
        let next = async {
            match idle {
                None => Ok(response.response.chunk().await),
                Some(limit) => timeout(limit, response.response.chunk()).await.map_err(|_| limit),
            }
        };
        match self.wait_with_listener(pin!(next), listener)? {
            Err(limit) => {
                let seconds = limit.as_secs_f32();
                Err(request
                    .error(format!("no data for {seconds} s; check that the server still runs"))
                    .into())
            }
            Ok(Err(error)) => Err(request
                .error(match request.timeout.filter(|_| error.is_timeout()) {
                    Some(limit) => timeout_message(limit),
                    None => {
                        let reason = error_chain(&error);
                        format!("the connection broke before the response was complete ({reason}); try again")
                    }
                })
                .into()),
            Ok(Ok(bytes)) => {
                response.body_started |= bytes.is_some();
                Ok(bytes)
            }
        }
    }

    fn read_body(
        &self,
        request: &RemoteRequest<'_>,
        response: &mut RemoteResponse,
        max_bytes: usize,
        listener: &mut StreamListener<'_>,
    ) -> Result<Vec<u8>, StreamEnd> {
        let mut body = Vec::new();
        while let Some(bytes) = self.next_bytes(request, response, listener)? {
            if body.len() + bytes.len() > max_bytes {
                let why = format!("the response is longer than {max_bytes} bytes; check the address");
                return Err(request.error(why).into());
            }
            body.extend_from_slice(&bytes);
        }
        Ok(body)
    }

    /// A response that must be JSON; `None` where the server does not have the path (404, 405, 501).
    pub fn fetch_json(
        &self,
        request: &RemoteRequest<'_>,
        listener: &mut StreamListener<'_>,
    ) -> Result<Option<Value>, StreamEnd> {
        let mut response = self.send(request, listener)?;
        if matches!(response.status().as_u16(), 404 | 405 | 501) {
            return Ok(None);
        }
        if !response.status().is_success() {
            return Err(self.status_error(request, response, listener));
        }
        let body = self.read_body(request, &mut response, MAX_BODY_BYTES, listener)?;
        let value = serde_json::from_slice(&body).map_err(|_| request.error(not_json_message(&body)))?;
        Ok(Some(value))
    }

    /// Like [`Self::fetch_json`], for a path that every server of the kind has.
    pub fn require_json(
        &self,
        request: &RemoteRequest<'_>,
        listener: &mut StreamListener<'_>,
    ) -> Result<Value, StreamEnd> {
        self.fetch_json(request, listener)?.ok_or_else(|| {
            let path = request.base.join(request.path).path().to_owned();
            request.error(format!("the server does not know {path}; check the address")).into()
        })
    }

    /// A response that must be a stream of server-sent events.
    pub fn open_events<'a>(
        &'a self,
        request: &'a RemoteRequest<'a>,
        listener: &mut StreamListener<'_>,
    ) -> Result<RemoteEventStream<'a>, StreamEnd> {
        let mut response = self.send(request, listener)?;
        if !response.status().is_success() {
            return Err(self.status_error(request, response, listener));
        }
        let content_type = response.header(&header::CONTENT_TYPE).to_ascii_lowercase();
        if !content_type.is_empty() && !content_type.starts_with("text/event-stream") {
            let body = self.read_body(request, &mut response, MAX_ERROR_BYTES, listener).unwrap_or_default();
            let (content_type, message) = (sanitize(&content_type), error_message(&body));
            let why = format!("an event stream was expected, but {content_type} came: {message}");
            return Err(request.error(redact_key(why, &request.headers)).into());
        }
        Ok(RemoteEventStream {
            client: self,
            request,
            response,
            sse: SseParser::default(),
            queued: VecDeque::new(),
            ended: false,
        })
    }

    /// The error for a response whose status is not a success.
    pub fn status_error(
        &self,
        request: &RemoteRequest<'_>,
        mut response: RemoteResponse,
        listener: &mut StreamListener<'_>,
    ) -> StreamEnd {
        let (status, location) =
            (response.status().as_u16(), sanitize(&redact_password(response.header(&header::LOCATION))));
        let retry_after = response.retry_after();
        let body = match self.read_body(request, &mut response, MAX_ERROR_BYTES, listener) {
            Err(StreamEnd::Finished(finish)) => return StreamEnd::Finished(finish),
            body => body.unwrap_or_default(),
        };
        let message = error_message(&body);
        let separator = if message.is_empty() { "" } else { ": " };
        let hint = match status {
            300..=399 => format!("it redirects to {location}: use that address if you trust it"),
            401 | 403 => "check the key".into(),
            404 | 405 => "check the address, and the model's name".into(),
            429 => match retry_after {
                Some(wait) => format!("wait {} s, as the server asks", wait.as_secs()),
                None => "wait a while and try again".into(),
            },
            500.. => "read the server's log, and try again".into(),
            _ => "check the address and the request".into(),
        };
        let why = format!("the server answered {status}{separator}{message}; {hint}");
        let kind = match status {
            429 | 503 => ErrorKind::Busy,
            _ => error_code_kind(&body),
        };
        request.error(redact_key(why, &request.headers)).with_kind(kind).into()
    }
}

/// Trusts the system's root certificates. A client that only speaks http has none: reading them takes milliseconds.
fn tls_config(load_roots: bool, require_roots: bool) -> Result<ClientConfig, Error> {
    let operation = "preparing TLS";
    let mut roots = RootCertStore::empty();
    if load_roots {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    }
    if require_roots && roots.is_empty() {
        let why = "this system has no root certificates; install its package of them (ca-certificates), or name a \
                   file of them in SSL_CERT_FILE";
        return Err(Error::unavailable(operation, why));
    }
    Ok(ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|e| Error::internal(operation, e.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth())
}

fn timeout_message(limit: Duration) -> String {
    format!("no answer within {} s; the server may be busy, try again later", limit.as_secs_f32())
}

/// The causes of an error. The error itself is left out: its text names the URL, whose query may hold a secret.
fn error_chain(error: &reqwest::Error) -> String {
    let mut causes = Vec::new();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        causes.push(cause.to_string());
        source = cause.source();
    }
    causes.join(": ")
}

/// Whether TLS failed, such as for a certificate that is not valid: then a retry cannot succeed.
fn is_tls_error(error: &reqwest::Error) -> bool {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        // The TLS error is wrapped in I/O errors, whose `source` skips it.
        let mut inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        while let Some(error) = inner {
            if error.is::<rustls::Error>() {
                return true;
            }
            inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        }
        source = cause.source();
    }
    false
}

/// A response whose body is not read yet. Dropping it closes the connection.
pub(crate) struct RemoteResponse {
    response: reqwest::Response,
    body_started: bool,
}

impl RemoteResponse {
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }

    /// A header as text; empty where there is none.
    pub fn header(&self, name: &HeaderName) -> &str {
        self.response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("")
    }

    fn is_retryable(&self) -> bool {
        matches!(self.status().as_u16(), 429 | 502 | 503 | 504)
    }

    fn retry_after(&self) -> Option<Duration> {
        self.header(&header::RETRY_AFTER).trim().parse().ok().map(Duration::from_secs)
    }
}

pub(crate) struct RemoteEventStream<'a> {
    client: &'a RemoteClient,
    request: &'a RemoteRequest<'a>,
    response: RemoteResponse,
    sse: SseParser,
    queued: VecDeque<Vec<u8>>,
    ended: bool,
}

impl RemoteEventStream<'_> {
    /// The data of the next event; `None` at the end.
    pub fn next(&mut self, listener: &mut StreamListener<'_>) -> Result<Option<Vec<u8>>, StreamEnd> {
        while self.queued.is_empty() && !self.ended {
            let queued = &mut self.queued;
            match self.client.next_bytes(self.request, &mut self.response, listener)? {
                Some(bytes) => self.sse.push(&bytes, &mut |event| queued.push_back(event)).map_err(|e| {
                    self.request
                        .error(format!("it sent a line of more than {} bytes; check the address", e.0))
                })?,
                None => {
                    self.sse.finish(&mut |event| queued.push_back(event));
                    self.ended = true;
                }
            }
        }
        Ok(self.queued.pop_front())
    }

    pub fn parse_json(&self, event: &[u8]) -> Result<Value, Error> {
        serde_json::from_slice(event).map_err(|_| self.error(&not_json_message(event)))
    }

    pub fn error(&self, why: &str) -> Error {
        self.request.error(redact_key(why.to_owned(), &self.request.headers))
    }
}

/// The listener of requests that cannot be cancelled.
pub(crate) fn ignore_steps(_: ModelStep<'_>) -> StepFlow {
    StepFlow::Continue
}
