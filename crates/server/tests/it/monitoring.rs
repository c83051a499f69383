//! `/health`, and the metrics in the text format of OpenMetrics.

use crate::chat::chat_body;
use crate::fake::{FakeOptions, FakeServer, ReaderFault};
use halo_server::ServerLimits;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The samples of the metrics: name with labels, and value.
async fn scrape(fake: &FakeServer) -> BTreeMap<String, f64> {
    let text = fake.get("/metrics").await.text();
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line} is no sample"));
        (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("{line} has no number")))
    };
    samples.map(sample).collect()
}

fn value(samples: &BTreeMap<String, f64>, name: &str) -> f64 {
    samples.get(name).copied().unwrap_or(0.0)
}

const STAGES: [&str; 9] =
    ["store", "preview", "recall", "prefill", "generate", "score", "prune", "index", "persist_kv"];

#[tokio::test]
async fn health_names_model_and_version() {
    let fake = FakeServer::in_memory();
    let response = fake.get("/health").await;
    let expected = json!({ "status": "ok", "model": "scripted", "version": env!("CARGO_PKG_VERSION") });
    assert_eq!((response.status, response.json()), (200, expected));
    assert_eq!(fake.get("/health/ready").await.json(), response.json());
    assert_eq!(fake.get("/health/live").await.json(), json!({ "status": "ok" }));
    for (method, path) in [
        ("POST", "/health"),
        ("POST", "/health/live"),
        ("PUT", "/health/ready"),
        ("POST", "/metrics"),
        ("DELETE", "/metrics"),
    ] {
        assert_eq!(fake.request(method, path, &[], "").await.status, 405, "{method} {path}");
    }
}

/// A store that fails, and one that hangs: the process is live and not ready, and says so at once. It is ready again when
/// the store is.
#[tokio::test]
async fn health_is_unavailable_while_the_store_does_not_answer() {
    for fault in [ReaderFault::Fail, ReaderFault::Hang] {
        let options = FakeOptions::default();
        let fake = FakeServer::with_options(options.clone());
        *options.reader_fault.lock().expect("the lock is not poisoned") = Some(fault);
        let asked = Instant::now();
        for path in ["/health", "/health/ready", "/health"] {
            let response = fake.get(path).await;
            assert_eq!(
                (response.status, response.json()["status"].as_str()),
                (503, Some("unavailable")),
                "{path}"
            );
        }
        assert!(asked.elapsed() < Duration::from_secs(8), "{fault:?}: {:?}", asked.elapsed());
        assert_eq!(fake.get("/health/live").await.status, 200);
        *options.reader_fault.lock().expect("the lock is not poisoned") = None;
        let restored = Instant::now();
        while fake.get("/health").await.status != 200 {
            assert!(restored.elapsed() < Duration::from_secs(5), "{fault:?}: not ready again");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

#[tokio::test]
async fn health_tells_model_and_version_only_with_the_key() {
    let key = "a key of sixteen letters";
    let limits = ServerLimits { api_key: Some(key.into()), ..ServerLimits::default() };
    let fake = FakeServer::with_limits(limits);
    let response = fake.get("/health").await;
    assert_eq!((response.status, response.json()), (200, json!({ "status": "ok" })));
    let response = fake.request("GET", "/health", &[("x-api-key", key)], "").await;
    assert_eq!((response.status, &response.json()["model"]), (200, &json!("scripted")));
    assert_eq!(response.json()["version"], env!("CARGO_PKG_VERSION"));
    let response = fake.request("GET", "/health", &[("x-api-key", "a wrong key of mine")], "").await;
    assert_eq!(response.status, 401, "it is no way to guess keys");
}

/// What is cached of a conversation leaves memory when it is closed, renamed or forgotten.
#[tokio::test]
async fn caches_drop_conversations_that_are_closed() {
    let folder = tempfile::tempdir().expect("a folder");
    let limits = ServerLimits { idle_timeout: Duration::from_millis(300), ..ServerLimits::default() };
    let options = FakeOptions { attention: true, limits, ..FakeOptions::in_folder(folder.path()) };
    let fake = FakeServer::with_options(options);
    let cached = async || value(&scrape(&fake).await, "halo_cached_states");
    let wait_until_empty = async || {
        for _ in 0..300 {
            if cached().await == 0.0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("still cached: {:?}", cached().await);
    };
    let talk = async || {
        fake.script_answers(&["one two three"]);
        assert_eq!(fake.chat(&chat_body(&["u Hello"]), Some("main")).await.status, 200);
        assert_eq!(fake.halo_api("GET", "/conversations/main", None).await.0, 200);
        assert_eq!(cached().await, 1.0);
    };
    talk().await;
    wait_until_empty().await;
    talk().await;
    let forget = json!({ "all": true, "now": true });
    assert_eq!(fake.halo_api("POST", "/conversations/main/forget", Some(&forget)).await.0, 200);
    assert_eq!(cached().await, 0.0, "at once");
    talk().await;
    let name = json!({ "name": "other" });
    assert_eq!(fake.halo_api("POST", "/conversations/main/rename", Some(&name)).await.0, 204);
    wait_until_empty().await;
}

#[tokio::test]
async fn metrics_are_openmetrics_text() {
    let fake = FakeServer::in_memory();
    fake.chat(&chat_body(&["u Hello"]), Some("main")).await;
    let response = fake.get("/metrics").await;
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!((response.status, response.header("content-type")), (200, content_type));
    let text = response.text();
    assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1, "{text}");
    for (name, kind) in [
        ("halo_requests", "counter"),
        ("halo_request_seconds", "histogram"),
        ("halo_turns", "counter"),
        ("halo_turns_failed", "counter"),
        ("halo_tokens", "counter"),
        ("halo_chunks_resurrected", "counter"),
        ("halo_chunks_pruned", "counter"),
        ("halo_turn_seconds", "histogram"),
        ("halo_first_token_seconds", "histogram"),
        ("halo_stage_seconds", "histogram"),
        ("halo_queued_requests", "gauge"),
        ("halo_busy", "gauge"),
        ("halo_event_subscribers", "gauge"),
        ("halo_conversation_tokens", "gauge"),
    ] {
        assert_eq!(text.matches(&format!("# TYPE {name} {kind}\n")).count(), 1, "{name}: {text}");
        assert_eq!(text.matches(&format!("# HELP {name} ")).count(), 1, "{name}: {text}");
    }
}

#[tokio::test]
async fn metrics_count_requests_by_api_and_status() {
    let fake = FakeServer::in_memory();
    for path in [
        "/api/halo/v1/status",
        "/api/halo/v1/conversations",
        "/api/halo/v1/conversations/nowhere",
        "/api/v1/model",
        "/api/v1/nothing",
        "/api/tags",
        "/api/nothing",
        "/props",
        "/v1/models",
        "/v1/models/other",
        "/v1/nothing",
        "/",
        "/nothing",
        "/mcp",
    ] {
        fake.get(path).await;
    }
    let etag = fake.get("/css/tokens.css").await.header("etag").to_owned();
    fake.request("GET", "/css/tokens.css", &[("if-none-match", &etag)], "").await;
    fake.request("GET", "/v1/models", &[("host", "evil.example")], "").await;
    fake.script_failure_after("");
    fake.post("/v1/completions", &json!({ "prompt": "Once" })).await;
    let samples = scrape(&fake).await;
    for (api, status, count) in [
        ("halo", "2xx", 2.0),
        ("halo", "4xx", 1.0),
        ("kobold", "2xx", 1.0),
        ("kobold", "4xx", 1.0),
        ("ollama", "2xx", 1.0),
        ("ollama", "4xx", 1.0),
        ("llama_server", "2xx", 1.0),
        ("openai", "2xx", 1.0),
        ("openai", "4xx", 3.0),
        ("openai", "5xx", 1.0),
        ("mcp", "4xx", 1.0),
        ("page", "2xx", 2.0),
        ("page", "3xx", 1.0),
        ("page", "4xx", 1.0),
    ] {
        let name = format!("halo_requests_total{{api=\"{api}\",status=\"{status}\"}}");
        assert_eq!(value(&samples, &name), count, "{name}: {samples:?}");
    }
    for (api, count) in [("halo", 3.0), ("kobold", 2.0), ("openai", 5.0), ("mcp", 1.0), ("page", 4.0)] {
        let name = format!("halo_request_seconds_count{{api=\"{api}\"}}");
        assert_eq!(value(&samples, &name), count, "{name}: {samples:?}");
    }
    // The request for the metrics is counted when it is answered.
    assert_eq!(value(&scrape(&fake).await, "halo_requests_total{api=\"page\",status=\"2xx\"}"), 3.0);
}

#[tokio::test]
async fn metrics_count_turns_tokens_and_stages() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["one two three", "four five"]);
    fake.chat(&chat_body(&["u Hello"]), Some("main")).await;
    fake.chat(&chat_body(&["u Hello again"]), Some("main")).await;
    fake.script_answers(&["six"]);
    fake.post("/api/v1/generate", &json!({ "prompt": "Once" })).await;
    let samples = scrape(&fake).await;
    assert_eq!(value(&samples, "halo_turns_total"), 2.0);
    assert_eq!(value(&samples, "halo_turns_failed_total"), 0.0);
    assert_eq!(value(&samples, "halo_tokens_total"), 6.0, "with those of completions");
    check_histogram(&samples, "halo_turn_seconds", "", 2.0);
    check_histogram(&samples, "halo_first_token_seconds", "", 2.0);
    for stage in STAGES {
        check_histogram(&samples, "halo_stage_seconds", &format!("stage=\"{stage}\""), 2.0);
    }
    let counted = samples.keys().filter(|name| name.starts_with("halo_stage_seconds_count")).count();
    assert_eq!(counted, STAGES.len(), "each stage has its histogram");
    let stages: f64 = samples
        .iter()
        .filter(|(name, _)| name.starts_with("halo_stage_seconds_sum"))
        .map(|(_, sum)| sum)
        .sum();
    let turns = value(&samples, "halo_turn_seconds_sum");
    assert!((stages - turns).abs() < 1e-9, "the stages make up the turn: {stages} {turns}");
    assert!(value(&samples, "halo_first_token_seconds_sum") <= turns);
}

/// The buckets of a histogram never decrease, and the last one has all observations.
fn check_histogram(samples: &BTreeMap<String, f64>, name: &str, label: &str, count: f64) {
    let labels = if label.is_empty() { String::new() } else { format!("{{{label}}}") };
    assert_eq!(value(samples, &format!("{name}_count{labels}")), count, "{name} {label}: {samples:?}");
    let mut buckets: Vec<(f64, f64)> = (samples.iter())
        .filter(|(sample, _)| sample.starts_with(&format!("{name}_bucket{{")) && sample.contains(label))
        .map(|(sample, value)| {
            let bound =
                sample.split("le=\"").nth(1).and_then(|rest| rest.split('"').next()).expect("a bound");
            (if bound == "+Inf" { f64::INFINITY } else { bound.parse().expect("a number") }, *value)
        })
        .collect();
    buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    assert_eq!(buckets.len(), 19, "{name} {label}");
    assert!(buckets.is_sorted_by_key(|(_, value)| *value), "{name}: {buckets:?}");
    assert_eq!(buckets[18], (f64::INFINITY, count), "{name} {label}");
}

#[tokio::test]
async fn metrics_count_failed_turns_of_every_api() {
    let fake = FakeServer::in_memory();
    fake.script_failure_after("Some words");
    assert_eq!(fake.chat(&chat_body(&["u Hello"]), Some("main")).await.status, 500);
    assert_eq!(value(&scrape(&fake).await, "halo_turns_failed_total"), 1.0);
    let (status, _) =
        fake.halo_api("POST", "/conversations/main/messages", Some(&json!({ "text": " " }))).await;
    assert_eq!(status, 422);
    let samples = scrape(&fake).await;
    assert_eq!((value(&samples, "halo_turns_failed_total"), value(&samples, "halo_turns_total")), (2.0, 0.0));
    check_histogram(&samples, "halo_turn_seconds", "", 0.0);
}

/// The id of the only conversation.
async fn conversation_id(fake: &FakeServer) -> String {
    let (_, conversations) = fake.halo_api("GET", "/conversations", None).await;
    assert_eq!(conversations.as_array().map(Vec::len), Some(1), "{conversations}");
    conversations[0]["id"].as_str().expect("an id").to_owned()
}

/// An unnamed chat is named by its first words, and any name may be made of what was said.
#[tokio::test]
async fn metrics_name_conversations_by_their_ids() {
    for name in [None, Some("Anna's \"best\" diagnosis")] {
        let fake = FakeServer::in_memory();
        fake.script_answers(&["one two three"]);
        let answer = fake.chat(&chat_body(&["u My diagnosis is secret"]), name).await;
        assert!(answer.conversation.contains("diagnosis"), "{}", answer.conversation);
        let text = fake.get("/metrics").await.text();
        let id = conversation_id(&fake).await;
        assert!(id.len() == 12 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
        for scope in ["live", "all"] {
            let line = format!("halo_conversation_tokens{{conversation=\"{id}\",scope=\"{scope}\"}} ");
            assert_eq!(text.matches(&line).count(), 1, "{line} is not in {text}");
        }
        assert!(!text.contains("diagnosis"), "{text}");
    }
}

#[tokio::test]
async fn traces_contain_ids_and_no_words() {
    let (sender, traces) = std::sync::mpsc::channel();
    let exporter = Box::new(move |trace: &Value| {
        let _ = sender.send(trace.clone());
        Ok(())
    });
    let fake = FakeServer::with_exporter(exporter);
    fake.script_answers(&["one two three"]);
    fake.chat(&chat_body(&["u My diagnosis is secret"]), None).await;
    let id = conversation_id(&fake).await;
    fake.script_failure_after("Some words");
    let name = "My diagnosis is secret";
    assert_eq!(fake.chat(&chat_body(&["u Another diagnosis"]), Some(name)).await.status, 500);
    let second = Duration::from_secs(10);
    let [answered, failed] = [(); 2].map(|()| traces.recv_timeout(second).expect("a trace"));
    for trace in [&answered, &failed] {
        assert!(!trace.to_string().contains("diagnosis"), "{trace:#}");
        let turn = &trace["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
        let attributes = turn["attributes"].as_array().expect("attributes");
        let value = |key: &str| {
            let attribute = attributes.iter().find(|attribute| attribute["key"] == key);
            attribute.map(|attribute| attribute["value"]["stringValue"].clone())
        };
        assert_eq!(value("gen_ai.conversation.id"), Some(json!(id)), "{trace:#}");
        let is_failed = std::ptr::eq(trace, &failed);
        assert_eq!(value("error.type").is_some(), is_failed, "{trace:#}");
        assert_eq!(turn["status"], if is_failed { json!({ "code": 2 }) } else { json!({}) });
    }
}

#[tokio::test]
async fn metrics_report_pruned_chunks_and_gauges() {
    let fake = FakeServer::in_memory();
    for n in 0..4 {
        let text = vec![format!("word{n}"); 100].join(" ");
        let response = fake.chat(&chat_body(&[&format!("u {text}")]), Some("main")).await;
        assert_eq!(response.status, 200, "{}", response.body);
    }
    let samples = scrape(&fake).await;
    let (_, graveyard) = fake.halo_api("GET", "/conversations/main/graveyard", None).await;
    let resurrected = value(&samples, "halo_chunks_resurrected_total");
    assert!(graveyard["total"].as_f64().is_some_and(|total| total > 0.0), "{graveyard}");
    assert_eq!(Some(value(&samples, "halo_chunks_pruned_total") - resurrected), graveyard["total"].as_f64());
    assert_eq!((value(&samples, "halo_busy"), value(&samples, "halo_queued_requests")), (0.0, 0.0));
    assert_eq!(value(&samples, "halo_event_subscribers"), 0.0);
}

/// The statistics of the latest traced attention row are gauges.
#[tokio::test]
async fn metrics_have_the_attention_of_the_latest_traced_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = FakeOptions { attention: true, ..FakeOptions::in_folder(folder.path()) };
    let fake = FakeServer::with_options(options);
    assert!(!scrape(&fake).await.keys().any(|name| name.starts_with("halo_attention")));
    assert_eq!(fake.chat(&chat_body(&["u How is the tea?"]), Some("main")).await.status, 200);
    let samples = scrape(&fake).await;
    let statistic = |name: &str| value(&samples, &format!("halo_attention{{statistic=\"{name}\"}}"));
    let [mean, median, max, min] = ["mean", "median", "max", "min"].map(statistic);
    assert!(min <= median && median <= max && min <= mean && mean <= max && max > 0.0, "{samples:?}");
    assert!(samples.contains_key("halo_attention{statistic=\"std\"}"), "{samples:?}");
}
