//! Access control: host names (against DNS rebinding), origins, the API key, and rate limits per address and per key.

use crate::api_name::ApiName;
use crate::app::App;
use crate::client_address::{ClientNetwork, client_address, client_network};
use crate::error::ErrorResponse;
use crate::llama_server;
use crate::openai::CONVERSATION_HEADER;
use crate::request_log::RequestLabel;
use crate::sse::JSON_LINES;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, HOST, HeaderName, HeaderValue, ORIGIN, REFERRER_POLICY, RETRY_AFTER,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap, Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tower_http::CompressionLevel;
use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::{DefaultPredicate, NotForContentType, Predicate};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};
use tower_http::set_header::SetResponseHeaderLayer;

/// The longest `Retry-After`, in seconds.
const MAX_RETRY_SECONDS: u64 = 120;

/// The address of the connection, an extension of the request.
#[derive(Clone, Copy)]
pub(crate) struct PeerIp(pub IpAddr);

/// An extension of requests that have the key, or need none because no key is set.
#[derive(Clone, Copy)]
pub(crate) struct KeyAccess;

/// What a rate limit counts.
#[derive(PartialEq, Eq, Hash)]
enum RateSubject {
    Client(IpAddr),
    Key,
}

/// A token bucket for each subject: tokens left, and when they were counted.
#[derive(Default)]
struct RateLimiter(Mutex<HashMap<RateSubject, (f64, Instant)>>);

/// Slows down clients that send wrong keys. After a few of them, every key of that client is checked only after a while,
/// and only some of them at the same time: right keys from the same address (behind a proxy, or on this machine) wait, but
/// are not locked out.
struct KeyGuessLimiter {
    /// How long a key waits for its check after too many wrong ones.
    delay: Duration,
    clients: Mutex<HashMap<IpAddr, KeyGuesses>>,
}

struct KeyGuesses {
    /// Wrong keys that the client may send without being slowed down.
    left: f64,
    counted_at: Instant,
    /// Keys that wait for their check.
    waiting: usize,
}

/// Wrong keys that are answered at once.
const FREE_GUESSES: f64 = 20.0;

/// Free guesses that a client gets back each second.
const GUESSES_PER_SECOND: f64 = 0.5;

const GUESS_DELAY: Duration = Duration::from_secs(1);

/// How many keys of a client wait at once.
const MAX_WAITING_GUESSES: usize = 8;

/// How much more than one client all users of a key together may send.
const KEY_RATE_FACTOR: f64 = 4.0;

#[derive(Clone)]
struct AccessGuard {
    app: Arc<App>,
    rate_limiter: Arc<RateLimiter>,
    guess_limiter: Arc<KeyGuessLimiter>,
}

/// Wraps the routes, from the outside in: response headers, compression, host and origin, CORS, rate limit and key, body
/// limit. CORS is inside of the check of the origin, so every origin that it sees is allowed; it is outside of the key, so
/// a page can read why a request was rejected. Every header that a page of an allowed origin asks for is allowed: the
/// libraries of browsers send their own.
pub(crate) fn wrap_router(router: Router, app: &Arc<App>) -> Router {
    let guess_limiter = Arc::new(KeyGuessLimiter { delay: GUESS_DELAY, clients: Mutex::default() });
    let guard = AccessGuard { app: Arc::clone(app), rate_limiter: Arc::default(), guess_limiter };
    let cors = CorsLayer::new()
        .allow_origin(AllowOrigin::mirror_request())
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([HeaderName::from_static(CONVERSATION_HEADER), RETRY_AFTER])
        .max_age(Duration::from_secs(600));
    let header = SetResponseHeaderLayer::overriding;
    // The compressor would hold the lines of a stream back. Events are no matter for it by default.
    let compressible = DefaultPredicate::new().and(NotForContentType::const_new(JSON_LINES));
    router
        .layer(DefaultBodyLimit::max(app.limits.max_body_bytes))
        .layer(middleware::from_fn_with_state(guard.clone(), tell_when_to_retry))
        .layer(middleware::from_fn_with_state(guard.clone(), check_rate_and_key))
        .layer(cors)
        .layer(middleware::from_fn_with_state(guard, check_host_and_origin))
        .layer(CompressionLayer::new().quality(CompressionLevel::Fastest).compress_when(compressible))
        .layer(middleware::from_fn(skip_local_compression))
        .layer(header(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")))
        .layer(header(REFERRER_POLICY, HeaderValue::from_static("no-referrer")))
}

/// A request that finds the queue full is told when to come again.
async fn tell_when_to_retry(State(guard): State<AccessGuard>, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if response.status() == StatusCode::SERVICE_UNAVAILABLE && !response.headers().contains_key(RETRY_AFTER) {
        let wait = guard.app.host.scheduler().expected_wait().unwrap_or_default();
        let seconds = wait.as_secs().clamp(1, MAX_RETRY_SECONDS);
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    response
}

/// On this machine, compression costs more time than it saves. The compressor reads the header, so it comes after this.
async fn skip_local_compression(mut request: Request, next: Next) -> Response {
    if peer_ip(request.extensions()).is_some_and(|peer| peer.is_loopback()) {
        request.headers_mut().remove(ACCEPT_ENCODING);
    }
    next.run(request).await
}

async fn check_host_and_origin(
    State(guard): State<AccessGuard>,
    mut request: Request,
    next: Next,
) -> Response {
    let started = Instant::now();
    let api = ApiName::of_path(request.uri().path());
    let proxies = &guard.app.limits.trusted_proxies;
    let client = peer_ip(request.extensions()).map(|peer| client_address(peer, request.headers(), proxies));
    request.extensions_mut().insert(ClientNetwork(client.map(client_network)));
    let label = RequestLabel::new(request.method(), request.extensions().get::<MatchedPath>(), client);
    request.extensions_mut().insert(label.clone());
    let response = match guard.reject_host_or_origin(&request) {
        Some(rejection) => rejection_response(rejection, request.uri()),
        None => next.run(request).await,
    };
    label.log_response(&response, api == ApiName::Page);
    guard.app.metrics.record_request(api, response.status(), started.elapsed());
    response
}

async fn check_rate_and_key(State(guard): State<AccessGuard>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    match guard.check_rate_and_key(&parts).await {
        Err(rejection) => rejection_response(rejection, &parts.uri),
        Ok(access) => {
            access.map(|access| parts.extensions.insert(access));
            next.run(Request::from_parts(parts, body)).await
        }
    }
}

fn peer_ip(extensions: &Extensions) -> Option<IpAddr> {
    extensions.get::<PeerIp>().map(|peer| peer.0)
}

/// A rejection in the format of the API that the request is for.
fn rejection_response(rejection: ErrorResponse, uri: &Uri) -> Response {
    let limited = rejection.status() == StatusCode::TOO_MANY_REQUESTS;
    let mut response = match ApiName::of_path(uri.path()) {
        ApiName::OpenAi => {
            let kind = match rejection.status() {
                StatusCode::UNAUTHORIZED => "authentication_error",
                StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
                _ => "permission_error",
            };
            let code = match rejection.status() {
                StatusCode::UNAUTHORIZED => Some("invalid_api_key"),
                StatusCode::TOO_MANY_REQUESTS => Some("rate_limit_exceeded"),
                _ => None,
            };
            let error = serde_json::json!({"error": {"message": rejection.message(), "type": kind, "param": null, "code": code}});
            (rejection.status(), Extension(rejection.label()), axum::Json(error)).into_response()
        }
        ApiName::LlamaServer => llama_server::error_response(rejection),
        ApiName::Halo | ApiName::Kobold | ApiName::Ollama | ApiName::Mcp | ApiName::Page => {
            rejection.into_response()
        }
    };
    if limited {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

impl AccessGuard {
    fn reject_host_or_origin(&self, request: &Request) -> Option<ErrorResponse> {
        let (headers, path) = (request.headers(), request.uri().path());
        let limits = &self.app.limits;
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        let host = host.or_else(|| request.uri().authority().map(|a| a.as_str())).unwrap_or_default();
        if !is_known_host(host, &limits.hosts) {
            let message = format!("unknown host '{}': add it to server.hosts", host_name(host));
            return Some(ErrorResponse::new(StatusCode::FORBIDDEN, message));
        }
        if let Some(origin) = headers.get(ORIGIN) {
            let origin = origin.to_str().unwrap_or("?");
            // A path that no route has holds nothing to protect, and its error should be readable.
            let has_route = request.extensions().get::<MatchedPath>().is_some();
            let foreign_api = ApiName::of_path(path).is_foreign() || !has_route;
            if !is_origin_allowed(origin, host, foreign_api, &limits.origins) {
                let message = format!("the origin {origin} is not allowed: add it to server.origins");
                return Some(ErrorResponse::new(StatusCode::FORBIDDEN, message));
            }
        }
        None
    }

    /// Whether the request has the key or needs none; if not, it is for a part of the server that is public.
    async fn check_rate_and_key(&self, request: &Parts) -> Result<Option<KeyAccess>, ErrorResponse> {
        let (headers, path) = (&request.headers, request.uri.path());
        let limits = &self.app.limits;
        let client =
            peer_ip(&request.extensions).map(|peer| client_address(peer, headers, &limits.trusted_proxies));
        let rate = f64::from(limits.requests_per_second);
        // Programs on this machine are not limited.
        let limited = client.filter(|client| rate > 0.0 && !client.is_loopback()).map(client_network);
        if limited.is_some_and(|client| !self.rate_limiter.try_acquire(RateSubject::Client(client), rate)) {
            return Err(too_many("too many requests: wait a second"));
        }
        let Some(key) = limits.api_key.as_deref() else { return Ok(Some(KeyAccess)) };
        let Some(presented) = presented_key(headers) else {
            return if is_public(path) { Ok(None) } else { Err(unauthorized()) };
        };
        if path != HEALTH_PATH && is_public(path) {
            return Ok(None);
        }
        if !self.guess_limiter.check_key(client.map(client_network), presented, key).await? {
            return Err(unauthorized());
        }
        if limited.is_some() && !self.rate_limiter.try_acquire(RateSubject::Key, rate * KEY_RATE_FACTOR) {
            return Err(too_many("too many requests with this API key: wait a second"));
        }
        Ok(Some(KeyAccess))
    }
}

/// Public, but it tells more to clients that have the key.
const HEALTH_PATH: &str = "/health";

/// The page contains no secrets, and asks the user for the key.
fn is_public(path: &str) -> bool {
    ApiName::of_path(path) == ApiName::Page && path != "/metrics"
}

fn unauthorized() -> ErrorResponse {
    let message = "this server needs an API key: send it as `Authorization: Bearer KEY`";
    ErrorResponse::new(StatusCode::UNAUTHORIZED, message)
}

fn too_many(message: &str) -> ErrorResponse {
    ErrorResponse::new(StatusCode::TOO_MANY_REQUESTS, message)
}

fn presented_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer =
        bearer.and_then(|value| value.strip_prefix("Bearer ").or_else(|| value.strip_prefix("bearer ")));
    bearer.or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok())).map(str::trim)
}

/// Compares hashes, so that the time reveals nothing about the key.
fn constant_time_eq(presented: &str, key: &str) -> bool {
    let (presented, key) = (Sha256::digest(presented), Sha256::digest(key));
    presented.iter().zip(key.iter()).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// The name in `name:port`.
fn host_name(host: &str) -> &str {
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split(']').next().unwrap_or_default();
    }
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// An IP address (which DNS cannot redirect), localhost, or a name from the settings.
fn is_known_host(host: &str, hosts: &[String]) -> bool {
    let name = host_name(host);
    name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || hosts.iter().any(|listed| listed.eq_ignore_ascii_case(name))
}

/// Halo's own page, an origin from the settings, and for the APIs of other programs every page of this machine.
fn is_origin_allowed(origin: &str, host: &str, foreign_api: bool, origins: &[String]) -> bool {
    let Some((_, authority)) = origin.split_once("://") else { return origins.iter().any(|o| o == origin) };
    let name = host_name(authority);
    let loopback = name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    authority.eq_ignore_ascii_case(host)
        || (foreign_api && loopback)
        || origins.iter().any(|o| o == origin || o == "*")
}

impl RateLimiter {
    /// Takes a token: `rate` of them per second, bursts of twice as many.
    fn try_acquire(&self, subject: RateSubject, rate: f64) -> bool {
        let now = Instant::now();
        let mut all = self.0.lock();
        if all.len() > MAX_REMEMBERED_CLIENTS {
            // After two seconds without a request, a bucket is full again.
            all.retain(|_, (_, counted_at)| now.duration_since(*counted_at).as_secs() < 2);
        }
        let (left, counted_at) = all.entry(subject).or_insert((rate * 2.0, now));
        *left = (*left + now.duration_since(*counted_at).as_secs_f64() * rate).min(rate * 2.0);
        *counted_at = now;
        let allowed = *left >= 1.0;
        *left -= f64::from(u8::from(allowed));
        allowed
    }
}

/// Above this number of clients, those that are not limited are forgotten.
const MAX_REMEMBERED_CLIENTS: usize = 10_000;

impl KeyGuessLimiter {
    /// Whether the presented key is the right one.
    async fn check_key(
        &self,
        client: Option<IpAddr>,
        presented: &str,
        key: &str,
    ) -> Result<bool, ErrorResponse> {
        let Some(client) = client else { return Ok(constant_time_eq(presented, key)) };
        if let Some(_waiting) = self.begin_check(client)? {
            tokio::time::sleep(self.delay).await;
        }
        let is_right = constant_time_eq(presented, key);
        if !is_right {
            self.record_wrong_key(client);
        }
        Ok(is_right)
    }

    /// A guard for the time that the key has to wait, if it has to.
    fn begin_check(&self, client: IpAddr) -> Result<Option<WaitingGuess<'_>>, ErrorResponse> {
        let mut all = self.clients.lock();
        let Some(guesses) = all.get_mut(&client) else { return Ok(None) };
        guesses.refill();
        if guesses.left >= 1.0 {
            return Ok(None);
        }
        if guesses.waiting >= MAX_WAITING_GUESSES {
            return Err(too_many("too many wrong API keys came from this address: wait a while"));
        }
        guesses.waiting += 1;
        Ok(Some(WaitingGuess { limiter: self, client }))
    }

    fn record_wrong_key(&self, client: IpAddr) {
        let mut all = self.clients.lock();
        if all.len() > MAX_REMEMBERED_CLIENTS {
            all.retain(|_, guesses| {
                guesses.refill();
                guesses.left < FREE_GUESSES || guesses.waiting > 0
            });
        }
        let new = || KeyGuesses { left: FREE_GUESSES, counted_at: Instant::now(), waiting: 0 };
        let guesses = all.entry(client).or_insert_with(new);
        guesses.refill();
        guesses.left = (guesses.left - 1.0).max(0.0);
    }
}

impl KeyGuesses {
    fn refill(&mut self) {
        let now = Instant::now();
        let gained = now.duration_since(self.counted_at).as_secs_f64() * GUESSES_PER_SECOND;
        (self.left, self.counted_at) = ((self.left + gained).min(FREE_GUESSES), now);
    }
}

/// A key that waits for its check; also one whose client has gone meanwhile.
struct WaitingGuess<'a> {
    limiter: &'a KeyGuessLimiter,
    client: IpAddr,
}

impl Drop for WaitingGuess<'_> {
    fn drop(&mut self) {
        if let Some(guesses) = self.limiter.clients.lock().get_mut(&self.client) {
            guesses.waiting -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_rejects_unknown_host_names() {
        let hosts = ["halo.lan".to_owned()];
        for host in
            ["127.0.0.1:5001", "localhost", "LOCALHOST:1", "[::1]:5001", "192.168.0.7:5001", "Halo.lan:80"]
        {
            assert!(is_known_host(host, &hosts), "{host}");
        }
        for unknown in
            ["", "evil.example", "evil.example:5001", "localhost.evil.example", "127.0.0.1.evil.example:1"]
        {
            assert!(!is_known_host(unknown, &hosts), "{unknown}");
        }
    }

    #[test]
    fn access_rejects_foreign_origins() {
        let origins = ["https://chat.example".to_owned()];
        let allowed =
            |origin: &str, foreign_api| is_origin_allowed(origin, "127.0.0.1:5001", foreign_api, &origins);
        assert!(allowed("http://127.0.0.1:5001", false), "Halo's own page");
        assert!(allowed("https://chat.example", false), "an origin from the settings");
        assert!(
            allowed("http://localhost:8080", true),
            "a front end on this machine, for the API of another program"
        );
        assert!(!allowed("http://localhost:8080", false), "but not for Halo's own API");
        for other in [
            "https://evil.example",
            "null",
            "http://127.0.0.1:5001.evil.example",
            "https://chat.example.evil",
        ] {
            assert!(!allowed(other, true), "{other}");
        }
    }

    #[test]
    fn rate_limit_counts_each_address_alone() {
        let limiter = RateLimiter::default();
        let client = |last| RateSubject::Client(IpAddr::from([10, 0, 0, last]));
        let accepted = (0..100).filter(|_| limiter.try_acquire(client(1), 10.0)).count();
        assert!((20..25).contains(&accepted), "a burst of twice the rate: {accepted}");
        assert!(limiter.try_acquire(client(2), 10.0), "other addresses are not limited");
        assert!(limiter.try_acquire(RateSubject::Key, 10.0), "and neither is the key");
    }

    #[tokio::test]
    async fn wrong_keys_are_slowed_down_by_address() {
        let delay = Duration::from_millis(200);
        let limiter = KeyGuessLimiter { delay, clients: Mutex::default() };
        let (attacker, other) = (IpAddr::from([127, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let check = async |client, key: &str| {
            let started = Instant::now();
            let result = limiter.check_key(Some(client), key, "right").await;
            (result.map_err(|e| e.status().as_u16()), started.elapsed() >= delay)
        };
        for _ in 0..20 {
            assert_eq!(check(attacker, "wrong").await, (Ok(false), false));
        }
        assert_eq!(check(attacker, "wrong").await, (Ok(false), true));
        assert_eq!(check(attacker, "right").await, (Ok(true), true), "it waits, but is let in");
        assert_eq!(check(other, "right").await, (Ok(true), false), "other addresses do not wait");
        let many = (0..100).map(|_| check(attacker, "wrong"));
        let results = futures_util::future::join_all(many).await;
        let checked = results.iter().filter(|(result, _)| *result == Ok(false)).count();
        let refused = results.iter().filter(|(result, _)| *result == Err(429)).count();
        assert_eq!((checked, refused), (MAX_WAITING_GUESSES, 100 - MAX_WAITING_GUESSES));
        assert_eq!(limiter.clients.lock()[&attacker].waiting, 0);
    }

    #[test]
    fn api_key_is_compared_in_full() {
        assert!(constant_time_eq("abc", "abc"));
        for other in ["", "ab", "abcd", "Abc"] {
            assert!(!constant_time_eq(other, "abc"), "{other}");
        }
    }
}
