//! Who is let in. Names that are not this machine's (as after DNS rebinding), pages from elsewhere, and those without the key
//! are not; whoever asks too often waits.

use crate::app::App;
use crate::error::ErrorResponse;
use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_MAX_AGE, AUTHORIZATION, HOST, HeaderValue, ORIGIN, REFERRER_POLICY, RETRY_AFTER, VARY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Who is at the other end of a connection.
#[derive(Clone, Copy)]
pub(crate) struct PeerIp(pub IpAddr);

/// How often each address has asked: tokens in a bucket, and when it was last looked at.
#[derive(Default)]
struct RateLimiter(Mutex<HashMap<IpAddr, (f64, Instant)>>);

#[derive(Clone)]
struct AccessGuard {
    app: Arc<App>,
    rate_limiter: Arc<RateLimiter>,
}

/// Puts the guard before all routes.
pub(crate) fn wrap_router(router: Router, app: &Arc<App>) -> Router {
    let guard = AccessGuard { app: Arc::clone(app), rate_limiter: Arc::default() };
    router
        .layer(DefaultBodyLimit::max(app.limits.max_body_bytes))
        .layer(middleware::from_fn_with_state(guard, check_access))
}

async fn check_access(State(guard): State<AccessGuard>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(ORIGIN).cloned();
    let preflight = request.method() == Method::OPTIONS && origin.is_some();
    let refusal = guard.find_rejection(&request, preflight);
    let mut response = match refusal {
        Some(refusal) => rejection_response(refusal, request.uri()),
        None if preflight => StatusCode::NO_CONTENT.into_response(),
        None => next.run(request).await,
    };
    guard.app.metrics.record_request(response.status().as_u16());
    let headers = response.headers_mut();
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = origin
        && response.status() != StatusCode::FORBIDDEN
    {
        let headers = response.headers_mut();
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        if preflight {
            headers.insert(
                ACCESS_CONTROL_ALLOW_METHODS,
                HeaderValue::from_static("GET, POST, PUT, DELETE, OPTIONS"),
            );
            let allowed =
                HeaderValue::from_static("authorization, content-type, x-api-key, x-halo-conversation");
            headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, allowed);
            headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        }
    }
    response
}

/// A refusal, in the shape that the clients of that API expect.
fn rejection_response(refusal: ErrorResponse, uri: &Uri) -> Response {
    let late = refusal.status() == StatusCode::TOO_MANY_REQUESTS;
    let mut response = if uri.path().starts_with("/v1/") {
        let kind = match refusal.status() {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            _ => "permission_error",
        };
        let error = serde_json::json!({"error": {"message": refusal.message(), "type": kind, "param": null, "code": null}});
        (refusal.status(), axum::Json(error)).into_response()
    } else {
        refusal.into_response()
    };
    if late {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

impl AccessGuard {
    /// Why a request is not let in, if it is not.
    fn find_rejection(&self, request: &Request, preflight: bool) -> Option<ErrorResponse> {
        let (headers, path) = (request.headers(), request.uri().path());
        let limits = &self.app.limits;
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        let host = host.or_else(|| request.uri().authority().map(|a| a.as_str())).unwrap_or_default();
        if !is_known_host(host, &limits.hosts) {
            let why =
                format!("this machine is not known as '{}': add the name to server.hosts", host_name(host));
            return Some(ErrorResponse::new(StatusCode::FORBIDDEN, why));
        }
        if let Some(origin) = headers.get(ORIGIN) {
            let origin = origin.to_str().unwrap_or("?");
            let local = ["/api/v1/", "/api/latest/", "/api/extra/", "/v1/"]
                .iter()
                .any(|start| path.starts_with(start));
            if !is_origin_allowed(origin, host, local, &limits.origins) {
                let why =
                    format!("pages of {origin} may not use this: add it to server.origins if they should");
                return Some(ErrorResponse::new(StatusCode::FORBIDDEN, why));
            }
        }
        let peer = request.extensions().get::<PeerIp>().map(|peer| peer.0);
        if let Some(peer) = peer.filter(|peer| !peer.is_loopback())
            && limits.requests_per_second > 0
            && !self.rate_limiter.try_acquire(peer, f64::from(limits.requests_per_second))
        {
            return Some(ErrorResponse::new(
                StatusCode::TOO_MANY_REQUESTS,
                "too many requests: wait a second",
            ));
        }
        // The page itself holds nothing that is secret, and asks for the key.
        let open =
            !path.starts_with("/api/") && !path.starts_with("/v1/") && !["/mcp", "/metrics"].contains(&path);
        let key = limits.api_key.as_deref().filter(|_| !open && !preflight)?;
        if presented_key(headers).is_some_and(|shown| constant_time_eq(shown, key)) {
            return None;
        }
        let why = "this needs the key of the server: send it as `Authorization: Bearer KEY`";
        Some(ErrorResponse::new(StatusCode::UNAUTHORIZED, why))
    }
}

/// The key that a request shows.
fn presented_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer =
        bearer.and_then(|value| value.strip_prefix("Bearer ").or_else(|| value.strip_prefix("bearer ")));
    bearer.or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok())).map(str::trim)
}

/// Whether two are the same, in a time that tells nothing of where they differ.
fn constant_time_eq(shown: &str, key: &str) -> bool {
    let (shown, key) = (Sha256::digest(shown), Sha256::digest(key));
    shown.iter().zip(key.iter()).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
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

/// Whether a host is this machine: an address (which no name server can turn into another), localhost, or a name that the
/// user has given it.
fn is_known_host(host: &str, hosts: &[String]) -> bool {
    let name = host_name(host);
    name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || hosts.iter().any(|known| known.eq_ignore_ascii_case(name))
}

/// Whether a page of that origin may ask: Halo's own, one that the user has named, and for the APIs that other programs speak,
/// any of this machine.
fn is_origin_allowed(origin: &str, host: &str, local: bool, origins: &[String]) -> bool {
    let Some((_, place)) = origin.split_once("://") else { return origins.iter().any(|o| o == origin) };
    let name = host_name(place);
    let loopback = name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    place.eq_ignore_ascii_case(host) || (local && loopback) || origins.iter().any(|o| o == origin || o == "*")
}

impl RateLimiter {
    /// Whether an address may ask once more: so many a second, and twice as many at once.
    fn try_acquire(&self, who: IpAddr, rate: f64) -> bool {
        let now = Instant::now();
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() > 10_000 {
            all.retain(|_, (_, last)| now.duration_since(*last).as_secs() < 60);
        }
        let (left, last) = all.entry(who).or_insert((rate * 2.0, now));
        *left = (*left + now.duration_since(*last).as_secs_f64() * rate).min(rate * 2.0);
        *last = now;
        let may = *left >= 1.0;
        *left -= f64::from(u8::from(may));
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_rejects_unknown_host_names() {
        let hosts = ["halo.lan".to_owned()];
        for ours in
            ["127.0.0.1:5001", "localhost", "LOCALHOST:1", "[::1]:5001", "192.168.0.7:5001", "Halo.lan:80"]
        {
            assert!(is_known_host(ours, &hosts), "{ours}");
        }
        for other in
            ["", "evil.example", "evil.example:5001", "localhost.evil.example", "127.0.0.1.evil.example:1"]
        {
            assert!(!is_known_host(other, &hosts), "{other}");
        }
    }

    #[test]
    fn access_rejects_foreign_origins() {
        let named = ["https://chat.example".to_owned()];
        let may = |origin: &str, local| is_origin_allowed(origin, "127.0.0.1:5001", local, &named);
        assert!(may("http://127.0.0.1:5001", false), "its own page");
        assert!(may("https://chat.example", false), "one that was named");
        assert!(
            may("http://localhost:8080", true),
            "a front end on this machine, for the API that it speaks"
        );
        assert!(!may("http://localhost:8080", false), "but not Halo's own");
        for other in [
            "https://evil.example",
            "null",
            "http://127.0.0.1:5001.evil.example",
            "https://chat.example.evil",
        ] {
            assert!(!may(other, true), "{other}");
        }
    }

    #[test]
    fn rate_limit_counts_each_address_alone() {
        let (rates, who) = (RateLimiter::default(), IpAddr::from([10, 0, 0, 1]));
        let let_in = (0..100).filter(|_| rates.try_acquire(who, 10.0)).count();
        assert!((20..25).contains(&let_in), "twice as many at once: {let_in}");
        assert!(rates.try_acquire(IpAddr::from([10, 0, 0, 2]), 10.0), "others do not wait for it");
    }

    #[test]
    fn api_key_is_compared_in_full() {
        assert!(constant_time_eq("abc", "abc"));
        for other in ["", "ab", "abcd", "Abc"] {
            assert!(!constant_time_eq(other, "abc"), "{other}");
        }
    }
}
