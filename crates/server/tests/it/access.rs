//! Access control: the API key, hosts, origins, CORS, headers, compression, and the limits of the server.

use crate::all_routes::route_patterns;
use crate::chat::chat_body;
use crate::fake::{FakeResponse, FakeServer};
use crate::fixture::prepared_server;
use halo_server::ServerLimits;
use serde_json::{Value, json};
use std::time::Duration;

const KEY: &str = "correct horse";

fn server_with_key() -> FakeServer {
    FakeServer::with_limits(ServerLimits { api_key: Some(KEY.into()), ..ServerLimits::default() })
}

/// All routes outside of Halo's own API, with a request that each answers: method, path, body.
fn other_routes() -> Vec<(&'static str, String, String)> {
    let prompt = || json!({ "prompt": "Once" }).to_string();
    let mut routes: Vec<(&str, String, String)> = Vec::new();
    for version in ["/api/v1", "/api/latest"] {
        for path in [
            "model",
            "info/version",
            "config/max_context_length",
            "config/max_length",
            "config/soft_prompts_list",
            "config/soft_prompt",
        ] {
            routes.push(("GET", format!("{version}/{path}"), String::new()));
        }
        routes.push(("POST", format!("{version}/tokenize"), prompt()));
        routes.push(("POST", format!("{version}/detokenize"), json!({ "token_ids": [] }).to_string()));
        routes.push(("POST", format!("{version}/generate"), prompt()));
        routes.push(("POST", format!("{version}/generate/preview"), "{}".into()));
    }
    let embedding = json!({ "input": "Once" }).to_string();
    let mcp = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" }).to_string();
    for (method, path, body) in [
        ("POST", "/api/extra/detokenize", json!({ "ids": [] }).to_string()),
        ("POST", "/api/extra/tokencount", prompt()),
        ("POST", "/api/extra/generate/stream", prompt()),
        ("GET", "/api/extra/generate/check", String::new()),
        ("POST", "/api/extra/generate/check", String::new()),
        ("POST", "/api/extra/abort", String::new()),
        ("GET", "/api/extra/version", String::new()),
        ("GET", "/api/extra/true_max_context_length", String::new()),
        ("GET", "/api/extra/perf", String::new()),
        ("GET", "/api/extra/preloadstory", String::new()),
        ("POST", "/api/extra/json_to_grammar", json!({ "schema": { "type": "object" } }).to_string()),
        ("POST", "/api/extra/embeddings", embedding.clone()),
        ("GET", "/sdapi/v1/sd-models", String::new()),
        ("GET", "/api/tags", String::new()),
        ("GET", "/api/ps", String::new()),
        ("GET", "/api/version", String::new()),
        ("POST", "/api/show", json!({ "model": "scripted" }).to_string()),
        ("POST", "/api/chat", json!({ "messages": [{ "role": "user", "content": "Hello" }] }).to_string()),
        ("POST", "/api/generate", prompt()),
        ("POST", "/api/embed", embedding.clone()),
        ("POST", "/api/embeddings", prompt()),
        ("GET", "/props", String::new()),
        ("GET", "/slots", String::new()),
        ("GET", "/lora-adapters", String::new()),
        ("POST", "/tokenize", json!({ "content": "Once" }).to_string()),
        ("POST", "/detokenize", json!({ "tokens": [] }).to_string()),
        ("POST", "/apply-template", chat_body(&["u Hello"]).to_string()),
        ("POST", "/completion", prompt()),
        ("POST", "/completions", prompt()),
        ("POST", "/embedding", json!({ "content": "Once" }).to_string()),
        ("POST", "/embeddings", json!({ "content": "Once" }).to_string()),
        ("GET", "/v1/models", String::new()),
        ("GET", "/v1/models/scripted", String::new()),
        ("POST", "/v1/chat/completions", chat_body(&["u Hello"]).to_string()),
        ("POST", "/v1/completions", prompt()),
        ("POST", "/v1/embeddings", embedding),
        ("POST", "/v1/responses", json!({ "input": "Hello" }).to_string()),
        ("GET", "/models", String::new()),
        ("POST", "/chat/completions", chat_body(&["u Hello"]).to_string()),
        ("POST", "/mcp", mcp),
        ("GET", "/metrics", String::new()),
        ("GET", "/api/halo/openapi.json", String::new()),
        ("GET", "/api/halo/v1/status", String::new()),
        ("GET", "/api/halo/v1/events", String::new()),
    ] {
        routes.push((method, path.to_owned(), body));
    }
    routes
}

/// The page and what it consists of.
fn public_paths() -> Vec<String> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../web");
    let folders = [("js", ".js"), ("css", ".css"), ("vendor", ".js")].into_iter();
    let parts = folders.flat_map(|(name, ending)| {
        let files = std::fs::read_dir(folder.join(name)).expect("a folder of the page");
        let files = files.filter_map(|file| file.ok()?.file_name().into_string().ok());
        let files = files.filter(move |file| file.ends_with(ending));
        files.map(move |file| format!("/{name}/{file}")).collect::<Vec<_>>()
    });
    let files = ["/", "/index.html", "/rooms.html", "/halo.webmanifest", "/icon.svg", "/health"];
    files.map(str::to_owned).into_iter().chain(parts).collect()
}

const MCP_ACCEPT: (&str, &str) = ("accept", "application/json, text/event-stream");
const JSON_TYPE: (&str, &str) = ("content-type", "application/json");

async fn send(
    fake: &FakeServer,
    (method, path, body): &(&str, String, String),
    headers: &[(&str, &str)],
) -> FakeResponse {
    let headers: Vec<(&str, &str)> = [MCP_ACCEPT, JSON_TYPE].iter().chain(headers).copied().collect();
    fake.request(method, path, &headers, body.clone()).await
}

#[tokio::test]
async fn routes_of_other_apis_exist() {
    let prepared = prepared_server();
    for route in other_routes() {
        let response = send(&prepared.fake, &route, &[]).await;
        let is_empty_history = route.1.ends_with("/preview");
        assert!(
            response.status == 200 || is_empty_history,
            "{route:?}: {} {}",
            response.status,
            response.text()
        );
    }
    for path in public_paths() {
        let response = prepared.fake.get(&path).await;
        assert_eq!(response.status, 200, "{path}");
        assert!(!response.bytes.is_empty(), "{path}");
    }
}

#[tokio::test]
async fn access_rejects_missing_and_wrong_keys() {
    let fake = server_with_key();
    for route in other_routes() {
        for headers in [
            vec![],
            vec![("authorization", "Bearer wrong")],
            vec![("authorization", "Bearer ")],
            vec![("authorization", KEY)],
            vec![("authorization", "Basic correct horse")],
            vec![("x-api-key", "correct hors")],
            vec![("authorization", "Bearer wrong"), ("x-api-key", KEY)],
        ] {
            let response = send(&fake, &route, &headers).await;
            let body = response.json();
            assert_eq!(response.status, 401, "{route:?} {headers:?}: {body}");
            let error = &body["error"];
            if route.1.starts_with("/v1/") || ["/models", "/chat/completions"].contains(&route.1.as_str()) {
                assert_eq!(
                    (&error["type"], &error["code"]),
                    (&json!("authentication_error"), &json!("invalid_api_key")),
                    "{route:?}: {body}"
                );
                assert!(error["message"].as_str().is_some_and(|m| m.contains("API key")), "{body}");
            } else if error.is_object() {
                assert_eq!(
                    (&error["type"], &error["code"]),
                    (&json!("authentication_error"), &json!(401)),
                    "{body}"
                );
            } else {
                assert!(
                    error.as_str().is_some_and(|message| message.contains("API key")),
                    "{route:?}: {body}"
                );
            }
        }
    }
    assert!(fake.script().windows.is_empty(), "the model was not asked");
    // Routes that do not exist do not tell.
    assert_eq!(fake.get("/api/halo/v1/nothing").await.status, 401);
    assert_eq!(fake.get("/v1/nothing").await.status, 401);
}

/// Each registered route needs the key, with every method.
#[tokio::test]
async fn access_of_every_registered_route_needs_the_key() {
    let fake = server_with_key();
    for pattern in route_patterns() {
        let path = pattern.replace("{model}", "m").replace("{id}", "1").replace("{slot}", "0");
        assert!(!path.contains('{'), "{pattern} has another parameter");
        for method in ["GET", "POST", "DELETE"] {
            let route = (method, path.clone(), "{}".to_owned());
            let response = send(&fake, &route, &[]).await;
            assert_eq!(response.status, 401, "{route:?}: {}", response.text());
        }
    }
}

#[tokio::test]
async fn access_accepts_the_key_in_both_headers() {
    let fake = server_with_key();
    let bearer = format!("Bearer {KEY}");
    let lower = format!("bearer {KEY} ");
    for headers in [("authorization", bearer.as_str()), ("authorization", lower.as_str()), ("x-api-key", KEY)]
    {
        for path in
            ["/api/halo/v1/status", "/api/v1/model", "/v1/models", "/metrics", "/api/halo/openapi.json"]
        {
            let response = fake.request("GET", path, &[headers], "").await;
            assert_eq!(response.status, 200, "{path} {headers:?}");
        }
    }
}

#[tokio::test]
async fn access_to_page_and_health_needs_no_key() {
    let fake = server_with_key();
    for path in public_paths() {
        assert_eq!(fake.get(&path).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn access_rejects_unknown_hosts() {
    let limits = ServerLimits { hosts: vec!["halo.lan".into()], ..ServerLimits::default() };
    let fake = FakeServer::with_limits(limits);
    for host in ["localhost", "localhost:5001", "127.0.0.1:5001", "[::1]:5001", "192.168.0.7", "HALO.lan:80"]
    {
        for path in ["/", "/api/halo/v1/status", "/v1/models"] {
            assert_eq!(fake.request("GET", path, &[("host", host)], "").await.status, 200, "{host} {path}");
        }
    }
    for host in ["evil.example", "evil.example:5001", "localhost.evil.example", "halo.lan.evil.example"] {
        for path in ["/", "/health", "/metrics", "/api/halo/v1/status", "/api/v1/model", "/v1/models", "/mcp"]
        {
            let response = fake.request("GET", path, &[("host", host)], "").await;
            let body = response.json();
            assert_eq!(response.status, 403, "{host} {path}: {body}");
            let message = if path.starts_with("/v1/") { &body["error"]["message"] } else { &body["error"] };
            assert!(message.as_str().is_some_and(|message| message.contains("server.hosts")), "{body}");
        }
    }
    let response = fake.request("GET", "/v1/models", &[("host", "evil.example")], "").await;
    assert_eq!(response.json()["error"]["type"], "permission_error");
}

/// Paths of Halo's own API, and of the APIs of other programs.
const OWN_PATHS: [&str; 4] = ["/api/halo/v1/status", "/api/halo/openapi.json", "/metrics", "/health"];
const FOREIGN_PATHS: [&str; 7] = [
    "/v1/models",
    "/api/v1/model",
    "/api/latest/model",
    "/api/extra/version",
    "/api/tags",
    "/props",
    "/sdapi/v1/sd-models",
];

#[tokio::test]
async fn access_checks_origins() {
    let limits = ServerLimits { origins: vec!["https://chat.example".into()], ..ServerLimits::default() };
    let fake = FakeServer::with_limits(limits);
    let status = async |path: &str, origin: &str| {
        fake.request("GET", path, &[("host", "127.0.0.1:5001"), ("origin", origin)], "").await.status
    };
    for path in OWN_PATHS.iter().chain(&FOREIGN_PATHS) {
        for allowed in ["http://127.0.0.1:5001", "https://chat.example"] {
            assert_eq!(status(path, allowed).await, 200, "{allowed} {path}");
        }
        for foreign in
            ["https://evil.example", "null", "http://127.0.0.1:5001.evil.example", "http://chat.example"]
        {
            assert_eq!(status(path, foreign).await, 403, "{foreign} {path}");
        }
    }
    // Front ends on this machine may use the APIs of other programs, but not Halo's own.
    for loopback in ["http://localhost:8000", "http://127.0.0.1:3000", "http://[::1]:8080"] {
        for path in FOREIGN_PATHS {
            assert_eq!(status(path, loopback).await, 200, "{loopback} {path}");
        }
        for path in OWN_PATHS {
            assert_eq!(status(path, loopback).await, 403, "{loopback} {path}");
        }
    }
    let rejected = fake.request("GET", "/v1/models", &[("origin", "https://evil.example")], "").await;
    let message = rejected.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("https://evil.example") && message.contains("server.origins"), "{message}");
    assert_eq!(rejected.header("access-control-allow-origin"), "", "a foreign page cannot read it");
    let any = FakeServer::with_limits(ServerLimits { origins: vec!["*".into()], ..ServerLimits::default() });
    let response = any.request("GET", "/api/halo/v1/status", &[("origin", "https://any.example")], "").await;
    assert_eq!(response.status, 200);
}

#[tokio::test]
async fn cors_preflight_needs_no_key() {
    let limits = ServerLimits {
        api_key: Some(KEY.into()),
        origins: vec!["https://chat.example".into()],
        ..ServerLimits::default()
    };
    let fake = FakeServer::with_limits(limits);
    let preflight = |origin| {
        [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "x-api-key,x-stainless-os"),
        ]
    };
    for path in ["/v1/chat/completions", "/api/halo/v1/conversations/main/edits", "/api/v1/generate"] {
        let response = fake.request("OPTIONS", path, &preflight("https://chat.example"), "").await;
        assert_eq!(response.status, 200, "{path}");
        assert_eq!(response.header("access-control-allow-origin"), "https://chat.example");
        for method in ["GET", "POST", "PUT", "DELETE"] {
            assert!(response.header("access-control-allow-methods").contains(method), "{path}");
        }
        // Libraries in a browser send headers of their own.
        assert_eq!(response.header("access-control-allow-headers"), "x-api-key,x-stainless-os", "{path}");
        assert_eq!(response.header("access-control-max-age"), "600");
        let foreign = fake.request("OPTIONS", path, &preflight("https://evil.example"), "").await;
        assert_eq!((foreign.status, foreign.header("access-control-allow-origin")), (403, ""), "{path}");
    }
}

#[tokio::test]
async fn cors_headers_are_on_errors_too() {
    let limits = ServerLimits {
        api_key: Some(KEY.into()),
        origins: vec!["https://chat.example".into()],
        ..ServerLimits::default()
    };
    let fake = FakeServer::with_limits(limits);
    let origin = ("origin", "https://chat.example");
    for (path, headers, status) in [
        ("/v1/models", vec![origin], 401),
        ("/v1/models", vec![origin, ("x-api-key", KEY)], 200),
        ("/v1/models/other", vec![origin, ("x-api-key", KEY)], 404),
        ("/v1/completions", vec![origin, ("x-api-key", KEY)], 405),
    ] {
        let response = fake.request("GET", path, &headers, "").await;
        assert_eq!(response.status, status, "{path}");
        assert_eq!(response.header("access-control-allow-origin"), "https://chat.example", "{path} {status}");
        assert_eq!(
            response.header("access-control-expose-headers"),
            "x-halo-conversation,retry-after",
            "{path} {status}"
        );
    }
}

/// A page of this machine may not use Halo's own API, but it can read that a path does not exist.
#[tokio::test]
async fn cors_headers_are_on_every_path() {
    let fake = FakeServer::in_memory();
    let origin = "http://localhost:8000";
    for path in [
        "/nothing",
        "/v1/nothing",
        "/api/nothing",
        "/sdapi/v1/nothing",
        "/api/halo/v1/nothing",
        "/v1/models/x",
    ] {
        let response = fake.request("GET", path, &[("origin", origin)], "").await;
        assert_eq!(
            (response.status, response.header("access-control-allow-origin")),
            (404, origin),
            "{path}"
        );
    }
}

#[tokio::test]
async fn headers_forbid_sniffing_and_referrers_everywhere() {
    let fake = server_with_key();
    let routes = other_routes();
    let responses = [
        fake.get("/").await,
        fake.get("/health").await,
        fake.get("/nothing").await,
        fake.get("/api/halo/v1/status").await,
        fake.request("GET", "/metrics", &[("x-api-key", KEY)], "").await,
        fake.request("DELETE", "/health", &[], "").await,
        fake.request("GET", "/", &[("host", "evil.example")], "").await,
        fake.request("GET", "/", &[("origin", "https://evil.example")], "").await,
        fake.request("GET", "/api/halo/v1/events", &[("x-api-key", KEY)], "").await,
    ];
    let statuses: Vec<u16> = responses.iter().map(|response| response.status).collect();
    assert_eq!(statuses, [200, 200, 404, 401, 200, 405, 403, 403, 200]);
    for response in &responses {
        assert_eq!(response.header("x-content-type-options"), "nosniff", "{}", response.status);
        assert_eq!(response.header("referrer-policy"), "no-referrer", "{}", response.status);
    }
    for route in routes {
        let response = send(&fake, &route, &[("x-api-key", KEY)]).await;
        assert_eq!(response.header("x-content-type-options"), "nosniff", "{route:?}");
    }
}

#[tokio::test]
async fn page_has_content_security_policy_and_types() {
    let fake = FakeServer::in_memory();
    for (path, content_type) in [
        ("/", "text/html; charset=utf-8"),
        ("/rooms.html", "text/html; charset=utf-8"),
        ("/css/tokens.css", "text/css; charset=utf-8"),
        ("/icon.svg", "image/svg+xml"),
        ("/js/main.js", "text/javascript; charset=utf-8"),
        ("/vendor/marked.js", "text/javascript; charset=utf-8"),
        ("/halo.webmanifest", "application/manifest+json"),
        ("/docs.html", "text/html; charset=utf-8"),
        ("/docs/SUMMARY.md", "text/markdown; charset=utf-8"),
        ("/docs/api/openai.md", "text/markdown; charset=utf-8"),
        ("/docs/images/context.webp", "image/webp"),
    ] {
        let response = fake.get(path).await;
        assert_eq!((response.status, response.header("content-type")), (200, content_type), "{path}");
        let policy = response.header("content-security-policy");
        for rule in
            ["default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'"]
        {
            assert!(policy.contains(rule), "{path}: {policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(response.header("cache-control"), "no-cache", "{path}");
    }
    let docs = fake.get("/docs").await;
    assert_eq!((docs.status, docs.header("location")), (307, "/docs.html"));
    let page = fake.get("/").await;
    assert_eq!(page.bytes, fake.get("/index.html").await.bytes);
    for private in [
        "/package.json",
        "/biome.json",
        "/tsconfig.json",
        "/js/",
        "/vendor/vendor.json",
        "/tests/text.test.js",
        "/../Cargo.toml",
        "/docs/../Cargo.toml",
        "/docs/nowhere.md",
    ] {
        assert_eq!(fake.get(private).await.status, 404, "{private}");
    }
}

#[tokio::test]
async fn page_is_not_sent_again_when_unchanged() {
    let fake = FakeServer::in_memory();
    let first = fake.get("/css/tokens.css").await;
    let etag = first.header("etag").to_owned();
    assert!(etag.starts_with('"') && etag.len() == 18, "{etag}");
    let again = fake.request("GET", "/css/tokens.css", &[("if-none-match", &etag)], "").await;
    assert_eq!((again.status, again.bytes.len()), (304, 0));
    assert_eq!(again.header("etag"), etag);
    let changed =
        fake.request("GET", "/css/tokens.css", &[("if-none-match", "\"0000000000000000\"")], "").await;
    assert_eq!((changed.status, changed.bytes.len()), (200, first.bytes.len()));
}

#[tokio::test]
async fn compression_on_request_and_never_for_events() {
    let fake = FakeServer::in_memory();
    let gzip = ("accept-encoding", "gzip");
    for path in ["/css/layout.css", "/api/halo/openapi.json"] {
        let plain = fake.get(path).await;
        assert_eq!(plain.header("content-encoding"), "", "{path}");
        let small = fake.request("GET", path, &[gzip], "").await;
        assert_eq!(small.header("content-encoding"), "gzip", "{path}");
        assert_eq!(small.bytes[..2], [0x1f, 0x8b], "{path}");
        assert!(small.bytes.len() < plain.bytes.len() / 2, "{path}: {} bytes", small.bytes.len());
        let other = fake.request("GET", path, &[("accept-encoding", "br")], "").await;
        assert_eq!(other.header("content-encoding"), "", "{path}");
    }
    let events = fake.request("GET", "/api/halo/v1/events", &[gzip], "").await;
    assert_eq!((events.header("content-encoding"), events.text().as_str()), ("", ": listening\n\n"));
    let mut body = chat_body(&["u Hello"]);
    body["stream"] = json!(true);
    let answer = vec!["word"; 30].join(" ");
    for (path, body) in [
        ("/v1/chat/completions", body),
        ("/v1/completions", json!({ "prompt": "Once", "stream": true })),
        ("/api/extra/generate/stream", json!({ "prompt": "Once" })),
    ] {
        fake.script_answers(&[&answer]);
        let stream = fake.request("POST", path, &[gzip], body.to_string()).await;
        assert_eq!((stream.status, stream.header("content-type")), (200, "text/event-stream"), "{path}");
        assert_eq!(stream.header("content-encoding"), "", "{path}");
        assert_eq!(stream.header("x-accel-buffering"), "no", "a proxy must not buffer it");
        assert!(stream.text().contains("data: {"), "{path}");
    }
}

#[tokio::test]
async fn limits_reject_large_bodies() {
    let fake = FakeServer::with_limits(ServerLimits { max_body_bytes: 500, ..ServerLimits::default() });
    let text = |length: usize| json!({ "text": "x".repeat(length) }).to_string();
    for path in ["/api/v1/tokenize", "/api/extra/tokencount"] {
        assert_eq!(fake.request("POST", path, &[], text(400)).await.status, 200, "{path}");
        assert_eq!(fake.request("POST", path, &[], text(500)).await.status, 413, "{path}");
    }
}

/// Requests for an answer, in each API.
fn generating_requests() -> Vec<(&'static str, Value)> {
    let chat = |store: bool, stream: bool| {
        let mut body = chat_body(&["u Hello"]);
        (body["store"], body["stream"]) = (json!(store), json!(stream));
        ("/v1/chat/completions", body)
    };
    vec![
        chat(true, false),
        chat(true, true),
        chat(false, false),
        chat(false, true),
        ("/v1/completions", json!({ "prompt": "Once" })),
        ("/v1/completions", json!({ "prompt": "Once", "stream": true })),
        ("/api/v1/generate", json!({ "prompt": "Once" })),
        ("/api/extra/generate/stream", json!({ "prompt": "Once" })),
        ("/api/halo/v1/conversations/main/messages", json!({ "text": "Hello", "id": "m1" })),
    ]
}

#[tokio::test]
async fn limits_refuse_requests_when_the_queue_is_full() {
    let fake = FakeServer::with_limits(ServerLimits { max_queued: 0, ..ServerLimits::default() });
    for (path, body) in generating_requests() {
        let response = fake.post(path, &body).await;
        let error = response.json()["error"].clone();
        assert_eq!(response.status, 503, "{path} {body}: {error}");
        let message = if path.starts_with("/v1/") { &error["message"] } else { &error };
        assert!(message.as_str().is_some_and(|message| message.contains("queued")), "{path}: {error}");
        if path.starts_with("/v1/") {
            assert_eq!(error["code"], "overloaded", "{path}: {error}");
        }
    }
    assert!(fake.script().windows.is_empty(), "the model was not asked");
}

#[tokio::test]
async fn limits_let_requests_wait_while_the_queue_has_room() {
    let fake = FakeServer::with_limits(ServerLimits { max_queued: 1, ..ServerLimits::default() });
    fake.script().token_delay = Duration::from_millis(15);
    fake.script_answers(&[&vec!["word"; 20].join(" "), "second"]);
    let ask = |name: &'static str| {
        let (fake, body) = (&fake, chat_body(&["u Hello"]));
        async move { fake.chat(&body, Some(name)).await }
    };
    let status = async || fake.halo_api("GET", "/status", None).await.1;
    let wait_until = async |field: &str, value: Value| {
        for _ in 0..1000 {
            if status().await[field] == value {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        panic!("{field} never became {value}");
    };
    let second = async {
        wait_until("busy", json!(true)).await;
        ask("second").await
    };
    let third = async {
        wait_until("queued", json!(1)).await;
        ask("third").await
    };
    let (first, second, third) = tokio::join!(ask("first"), second, third);
    assert_eq!((first.status, second.status), (200, 200));
    assert_eq!(second.text(), "second");
    assert_eq!(third.status, 503, "{}", third.body);
    assert_eq!(ask("third").await.status, 200, "later there is room");
}

/// Requests that wait for an earlier one in their conversation are queued too.
#[tokio::test]
async fn limits_count_requests_that_wait_within_a_conversation() {
    let fake = FakeServer::with_limits(ServerLimits { max_queued: 4, ..ServerLimits::default() });
    fake.script().token_delay = Duration::from_millis(15);
    fake.script_answers(&[&vec!["word"; 30].join(" ")]);
    let status = async || fake.halo_api("GET", "/status", None).await.1;
    let body = chat_body(&["u Hello"]);
    let first = fake.chat(&body, Some("main"));
    let others = async {
        while status().await["busy"] != true {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let ask = |n: usize| {
            let body = chat_body(&[&format!("u Question {n}")]);
            let fake = &fake;
            async move {
                match n % 2 {
                    0 => fake.chat(&body, Some("main")).await.status,
                    _ => {
                        let message = json!({ "text": format!("Message {n}") });
                        fake.halo_api("POST", "/conversations/main/messages", Some(&message)).await.0
                    }
                }
            }
        };
        let all = futures_util::future::join_all((0..20).map(ask));
        let queued = async {
            tokio::time::sleep(Duration::from_millis(150)).await;
            status().await["queued"].clone()
        };
        tokio::join!(all, queued)
    };
    let (first, (statuses, queued)) = tokio::join!(first, others);
    assert_eq!(first.status, 200);
    assert_eq!(queued, 4);
    let refused = statuses.iter().filter(|status| **status == 503).count();
    assert_eq!(refused, 16, "{statuses:?}");
    assert_eq!(status().await["queued"], 0);
}
