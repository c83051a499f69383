//! Who is let in. Names that are not this machine's (as after DNS rebinding), pages from elsewhere, and those without the key
//! are not; whoever asks too often waits.

use crate::answer::Refusal;
use crate::app::App;
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
pub(crate) struct Peer(pub IpAddr);

/// How often each address has asked: tokens in a bucket, and when it was last looked at.
#[derive(Default)]
struct Rates(Mutex<HashMap<IpAddr, (f64, Instant)>>);

#[derive(Clone)]
struct Guard {
    app: Arc<App>,
    rates: Arc<Rates>,
}

/// Puts the guard before all routes.
pub(crate) fn around(router: Router, app: &Arc<App>) -> Router {
    let guard = Guard { app: Arc::clone(app), rates: Arc::default() };
    router.layer(DefaultBodyLimit::max(app.limits.body)).layer(middleware::from_fn_with_state(guard, check))
}

async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(ORIGIN).cloned();
    let preflight = request.method() == Method::OPTIONS && origin.is_some();
    let refusal = guard.refuse(&request, preflight);
    let mut response = match refusal {
        Some(refusal) => shaped(refusal, request.uri()),
        None if preflight => StatusCode::NO_CONTENT.into_response(),
        None => next.run(request).await,
    };
    guard.app.metrics.request(response.status().as_u16());
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
fn shaped(refusal: Refusal, uri: &Uri) -> Response {
    let late = refusal.status() == StatusCode::TOO_MANY_REQUESTS;
    let mut response = if uri.path().starts_with("/v1/") {
        let kind = match refusal.status() {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            _ => "permission_error",
        };
        let error = serde_json::json!({"error": {"message": refusal.what(), "type": kind, "param": null, "code": null}});
        (refusal.status(), axum::Json(error)).into_response()
    } else {
        refusal.into_response()
    };
    if late {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

impl Guard {
    /// Why a request is not let in, if it is not.
    fn refuse(&self, request: &Request, preflight: bool) -> Option<Refusal> {
        let (headers, path) = (request.headers(), request.uri().path());
        let limits = &self.app.limits;
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        let host = host.or_else(|| request.uri().authority().map(|a| a.as_str())).unwrap_or_default();
        if !is_ours(host, &limits.hosts) {
            let why =
                format!("this machine is not known as '{}': add the name to server.hosts", name_of(host));
            return Some(Refusal::new(StatusCode::FORBIDDEN, why));
        }
        if let Some(origin) = headers.get(ORIGIN) {
            let origin = origin.to_str().unwrap_or("?");
            let local = ["/api/v1/", "/api/latest/", "/api/extra/", "/v1/"]
                .iter()
                .any(|start| path.starts_with(start));
            if !may_ask(origin, host, local, &limits.origins) {
                let why =
                    format!("pages of {origin} may not use this: add it to server.origins if they should");
                return Some(Refusal::new(StatusCode::FORBIDDEN, why));
            }
        }
        let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
        if let Some(peer) = peer.filter(|peer| !peer.is_loopback())
            && limits.rate > 0
            && !self.rates.take(peer, f64::from(limits.rate))
        {
            return Some(Refusal::new(StatusCode::TOO_MANY_REQUESTS, "too many requests: wait a second"));
        }
        // The page itself holds nothing that is secret, and asks for the key.
        let open =
            !path.starts_with("/api/") && !path.starts_with("/v1/") && !["/mcp", "/metrics"].contains(&path);
        let key = limits.key.as_deref().filter(|_| !open && !preflight)?;
        if shown(headers).is_some_and(|shown| same(shown, key)) {
            return None;
        }
        let why = "this needs the key of the server: send it as `Authorization: Bearer KEY`";
        Some(Refusal::new(StatusCode::UNAUTHORIZED, why))
    }
}

/// The key that a request shows.
fn shown(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer =
        bearer.and_then(|value| value.strip_prefix("Bearer ").or_else(|| value.strip_prefix("bearer ")));
    bearer.or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok())).map(str::trim)
}

/// Whether two are the same, in a time that tells nothing of where they differ.
fn same(shown: &str, key: &str) -> bool {
    let (shown, key) = (Sha256::digest(shown), Sha256::digest(key));
    shown.iter().zip(key.iter()).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// The name in `name:port`.
fn name_of(host: &str) -> &str {
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
fn is_ours(host: &str, hosts: &[String]) -> bool {
    let name = name_of(host);
    name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || hosts.iter().any(|known| known.eq_ignore_ascii_case(name))
}

/// Whether a page of that origin may ask: Halo's own, one that the user has named, and for the APIs that other programs speak,
/// any of this machine.
fn may_ask(origin: &str, host: &str, local: bool, origins: &[String]) -> bool {
    let Some((_, place)) = origin.split_once("://") else { return origins.iter().any(|o| o == origin) };
    let name = name_of(place);
    let loopback = name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    place.eq_ignore_ascii_case(host) || (local && loopback) || origins.iter().any(|o| o == origin || o == "*")
}

impl Rates {
    /// Whether an address may ask once more: so many a second, and twice as many at once.
    fn take(&self, who: IpAddr, rate: f64) -> bool {
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
    fn only_names_of_this_machine_are_answered() {
        let hosts = ["halo.lan".to_owned()];
        for ours in
            ["127.0.0.1:5001", "localhost", "LOCALHOST:1", "[::1]:5001", "192.168.0.7:5001", "Halo.lan:80"]
        {
            assert!(is_ours(ours, &hosts), "{ours}");
        }
        for other in
            ["", "evil.example", "evil.example:5001", "localhost.evil.example", "127.0.0.1.evil.example:1"]
        {
            assert!(!is_ours(other, &hosts), "{other}");
        }
    }

    #[test]
    fn pages_from_elsewhere_may_not_ask() {
        let named = ["https://chat.example".to_owned()];
        let may = |origin: &str, local| may_ask(origin, "127.0.0.1:5001", local, &named);
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
    fn an_address_that_asks_too_often_waits() {
        let (rates, who) = (Rates::default(), IpAddr::from([10, 0, 0, 1]));
        let let_in = (0..100).filter(|_| rates.take(who, 10.0)).count();
        assert!((20..25).contains(&let_in), "twice as many at once: {let_in}");
        assert!(rates.take(IpAddr::from([10, 0, 0, 2]), 10.0), "others do not wait for it");
    }

    #[test]
    fn keys_are_compared_whole() {
        assert!(same("abc", "abc"));
        for other in ["", "ab", "abcd", "Abc"] {
            assert!(!same(other, "abc"), "{other}");
        }
    }
}
