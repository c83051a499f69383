//! Random requests to every route of Halo's own API. The valid requests are the cases of `routes_halo.rs`, which has one for
//! each route of the OpenAPI document: `openapi_lists_exactly_the_tested_routes` fails for a route without one.

use crate::fixture::{PreparedServer, prepared_server};
use crate::hostile_requests::{NAMES, assert_usable, mutate};
use crate::routes_halo::{PREFIX, RouteCase, route_cases};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Requests of each route at least; `HALO_HOSTILE` sets the number of all of them.
const REQUESTS_PER_ROUTE: usize = 20;

/// After so many requests a new server is used: some of them delete or rename the conversation that others are about.
const REQUESTS_PER_SERVER: usize = 120;

/// Values of parameters, as they are written in a URL.
const VALUES: [&str; 16] = [
    "",
    "0",
    "1",
    "-1",
    "1e308",
    "NaN",
    "true",
    "main",
    "u6.0",
    "a1.0,u6.0",
    "18446744073709551616",
    "..%2F..%2Fetc%2Fpasswd",
    "%00",
    "%FF",
    "%F0%9F%8C%B1%E2%80%AE",
    "%3Cscript%3E",
];

/// The URL of a case with other names in its path, and other parameters.
fn hostile_url(case: &RouteCase, rng: &mut fastrand::Rng) -> String {
    let (path, query) = case.url.split_once('?').unwrap_or((case.url, ""));
    let mut parts: Vec<&str> = path.split('/').collect();
    for (part, template) in parts.iter_mut().zip(case.template.split('/')) {
        if template.starts_with('{') && rng.u32(..4) == 0 {
            *part = NAMES[rng.usize(..NAMES.len())];
        }
    }
    let mut pairs: Vec<(String, String)> = query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    for (_, value) in &mut pairs {
        if rng.u32(..3) == 0 {
            *value = match rng.u32(..6) {
                0 => "x".repeat([100, 5_000][rng.usize(..2)]),
                _ => VALUES[rng.usize(..VALUES.len())].to_owned(),
            };
        }
    }
    if rng.u32(..6) == 0 {
        let keys = ["q", "last", "limit", "before", "from", "name", "confirm", "now", "unknown", "turn"];
        let value = VALUES[rng.usize(..VALUES.len())];
        pairs.push((keys[rng.usize(..keys.len())].to_owned(), value.to_owned()));
    }
    if rng.u32(..12) == 0 && !pairs.is_empty() {
        pairs.remove(rng.usize(..pairs.len()));
    }
    let query: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let separator = if query.is_empty() { "" } else { "?" };
    format!("{PREFIX}{}{separator}{}", parts.join("/"), query.join("&"))
}

fn hostile_body(case: &RouteCase, rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut body = case.body.clone();
    for _ in 0..rng.u32(..3) {
        mutate(&mut body, rng, 0);
    }
    let mut bytes = match body.as_str() {
        // Bodies that are files.
        Some(text) => text.as_bytes().to_vec(),
        None if body.is_null() && rng.u32(..4) > 0 => Vec::new(),
        None => body.to_string().into_bytes(),
    };
    if rng.u32(..12) == 0 {
        bytes.truncate(rng.usize(..=bytes.len()));
    }
    if rng.u32(..12) == 0 && !bytes.is_empty() {
        let at = rng.usize(..bytes.len());
        bytes[at] = rng.u8(..);
    }
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_halo_requests_never_fail_the_server() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<usize>().ok());
    let mut rng = fastrand::Rng::with_seed(number("HALO_HOSTILE_SEED").unwrap_or(0) as u64);
    let cases = route_cases();
    let count = number("HALO_HOSTILE").unwrap_or(0).max(cases.len() * REQUESTS_PER_ROUTE);
    let mut prepared: Option<PreparedServer> = None;
    // By route: how many requests were sent, and how many were accepted.
    let mut sent: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for n in 0..count {
        if n % REQUESTS_PER_SERVER == 0 {
            if let Some(server) = prepared.take() {
                assert_usable(&server.fake).await;
                tokio::task::block_in_place(|| server.fake.app.shutdown());
            }
            prepared = Some(prepared_server());
        }
        let fake = &prepared.as_ref().expect("a server").fake;
        let case = &cases[n % cases.len()];
        let (url, body) = (hostile_url(case, &mut rng), hostile_body(case, &mut rng));
        let shown =
            format!("request {n}: {} {url:.300} {:.300}", case.method, String::from_utf8_lossy(&body));
        let headers =
            [("content-type", "application/json"), ("accept", "application/json, text/event-stream")];
        let started = Instant::now();
        let answer = fake.request(case.method, &url, &headers, body);
        let answer = tokio::time::timeout(Duration::from_secs(20), answer).await;
        let answer = answer.unwrap_or_else(|_| panic!("no answer to {shown}"));
        let text = answer.text();
        assert!(answer.status < 500 || answer.status == 503, "{shown}: {} {text:.300}", answer.status);
        assert!(!text.contains("internal error") && !text.contains("panicked"), "{shown}: {text:.300}");
        assert!(started.elapsed() < Duration::from_secs(10), "{shown}: {:?}", started.elapsed());
        let (all, accepted) = sent.entry(format!("{} {}", case.method, case.template)).or_default();
        *all += 1;
        *accepted += usize::from(answer.status < 300);
    }
    let accepted = sent.values().filter(|(_, accepted)| *accepted > 0).count();
    println!("{count} requests to {} routes, of which {accepted} accepted some: {sent:?}", sent.len());
    assert!(
        sent.len() == cases.len() && sent.values().all(|(all, _)| *all >= REQUESTS_PER_ROUTE),
        "{sent:?}"
    );
    // Routes that need something before them, such as an undo, accept none.
    assert!(accepted * 10 > cases.len() * 8, "{sent:?}");
}
