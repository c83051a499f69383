//! Access control: host names (against DNS rebinding), origins, the API key, and a rate limit per address.

use crate::app::App;
use crate::error::ErrorResponse;
use crate::metrics::ApiName;
use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue, ORIGIN, REFERRER_POLICY,
    RETRY_AFTER, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tower_http::CompressionLevel;
use tower_http::compression::CompressionLayer;
use tower_http::cors::{AllowOrigin, CorsLayer};
use tower_http::set_header::SetResponseHeaderLayer;

/// The address of the client, an extension of the request.
#[derive(Clone, Copy)]
pub(crate) struct PeerIp(pub IpAddr);

/// A token bucket for each address: tokens left, and when they were counted.
#[derive(Default)]
struct RateLimiter(Mutex<HashMap<IpAddr, (f64, Instant)>>);

#[derive(Clone)]
struct AccessGuard {
    app: Arc<App>,
    rate_limiter: Arc<RateLimiter>,
}

/// Wraps the routes, from the outside in: response headers, compression, host and origin, CORS, rate limit and key, body
/// limit. CORS is inside of the check of the origin, so every origin that it sees is allowed; it is outside of the key, so
/// a page can read why a request was rejected.
pub(crate) fn wrap_router(router: Router, app: &Arc<App>) -> Router {
    let guard = AccessGuard { app: Arc::clone(app), rate_limiter: Arc::default() };
    let cors = CorsLayer::new()
        .allow_origin(AllowOrigin::mirror_request())
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::DELETE])
        .allow_headers([
            AUTHORIZATION,
            CONTENT_TYPE,
            HeaderName::from_static("x-api-key"),
            HeaderName::from_static("x-halo-conversation"),
        ])
        .expose_headers([HeaderName::from_static("x-halo-conversation")])
        .max_age(Duration::from_secs(600));
    let header = SetResponseHeaderLayer::overriding;
    router
        .layer(DefaultBodyLimit::max(app.limits.max_body_bytes))
        .layer(middleware::from_fn_with_state(guard.clone(), check_rate_and_key))
        .layer(cors)
        .layer(middleware::from_fn_with_state(guard, check_host_and_origin))
        .layer(CompressionLayer::new().quality(CompressionLevel::Fastest))
        .layer(header(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")))
        .layer(header(REFERRER_POLICY, HeaderValue::from_static("no-referrer")))
}

async fn check_host_and_origin(
    State(guard): State<AccessGuard>,
    mut request: Request,
    next: Next,
) -> Response {
    let started = Instant::now();
    let api = ApiName::of_path(request.uri().path());
    let response = match guard.reject_host_or_origin(&request) {
        Some(rejection) => rejection_response(rejection, request.uri()),
        None => {
            // On this machine, compression costs more time than it saves.
            if peer_ip(&request).is_some_and(|peer| peer.is_loopback()) {
                request.headers_mut().remove(ACCEPT_ENCODING);
            }
            next.run(request).await
        }
    };
    guard.app.metrics.record_request(api, response.status(), started.elapsed());
    response
}

async fn check_rate_and_key(State(guard): State<AccessGuard>, request: Request, next: Next) -> Response {
    match guard.reject_rate_or_key(&request) {
        Some(rejection) => rejection_response(rejection, request.uri()),
        None => next.run(request).await,
    }
}

fn peer_ip(request: &Request) -> Option<IpAddr> {
    request.extensions().get::<PeerIp>().map(|peer| peer.0)
}

/// A rejection in the format of the API that the request is for.
fn rejection_response(rejection: ErrorResponse, uri: &Uri) -> Response {
    let limited = rejection.status() == StatusCode::TOO_MANY_REQUESTS;
    let mut response = if uri.path().starts_with("/v1/") {
        let kind = match rejection.status() {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            _ => "permission_error",
        };
        let error = serde_json::json!({"error": {"message": rejection.message(), "type": kind, "param": null, "code": null}});
        (rejection.status(), axum::Json(error)).into_response()
    } else {
        rejection.into_response()
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
            let foreign_api = ["/api/v1/", "/api/latest/", "/api/extra/", "/v1/"]
                .iter()
                .any(|prefix| path.starts_with(prefix));
            if !is_origin_allowed(origin, host, foreign_api, &limits.origins) {
                let message = format!("the origin {origin} is not allowed: add it to server.origins");
                return Some(ErrorResponse::new(StatusCode::FORBIDDEN, message));
            }
        }
        None
    }

    fn reject_rate_or_key(&self, request: &Request) -> Option<ErrorResponse> {
        let (headers, path) = (request.headers(), request.uri().path());
        let limits = &self.app.limits;
        if let Some(peer) = peer_ip(request).filter(|peer| !peer.is_loopback())
            && limits.requests_per_second > 0
            && !self.rate_limiter.try_acquire(peer, f64::from(limits.requests_per_second))
        {
            return Some(ErrorResponse::new(
                StatusCode::TOO_MANY_REQUESTS,
                "too many requests: wait a second",
            ));
        }
        // The page contains no secrets, and asks the user for the key.
        let public =
            !path.starts_with("/api/") && !path.starts_with("/v1/") && !["/mcp", "/metrics"].contains(&path);
        let key = limits.api_key.as_deref().filter(|_| !public)?;
        if presented_key(headers).is_some_and(|presented| constant_time_eq(presented, key)) {
            return None;
        }
        let message = "this server needs an API key: send it as `Authorization: Bearer KEY`";
        Some(ErrorResponse::new(StatusCode::UNAUTHORIZED, message))
    }
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
    fn try_acquire(&self, address: IpAddr, rate: f64) -> bool {
        let now = Instant::now();
        let mut all = self.0.lock();
        if all.len() > 10_000 {
            all.retain(|_, (_, counted_at)| now.duration_since(*counted_at).as_secs() < 60);
        }
        let (left, counted_at) = all.entry(address).or_insert((rate * 2.0, now));
        *left = (*left + now.duration_since(*counted_at).as_secs_f64() * rate).min(rate * 2.0);
        *counted_at = now;
        let allowed = *left >= 1.0;
        *left -= f64::from(u8::from(allowed));
        allowed
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
        let (limiter, address) = (RateLimiter::default(), IpAddr::from([10, 0, 0, 1]));
        let accepted = (0..100).filter(|_| limiter.try_acquire(address, 10.0)).count();
        assert!((20..25).contains(&accepted), "a burst of twice the rate: {accepted}");
        assert!(limiter.try_acquire(IpAddr::from([10, 0, 0, 2]), 10.0), "other addresses are not limited");
    }

    #[test]
    fn api_key_is_compared_in_full() {
        assert!(constant_time_eq("abc", "abc"));
        for other in ["", "ab", "abcd", "Abc"] {
            assert!(!constant_time_eq(other, "abc"), "{other}");
        }
    }
}
