//! Random requests to every route: values of wrong types, huge and odd numbers and texts, missing and unknown fields, names
//! that look like paths. The server answers each with a status below 500 and stays usable.

use crate::all_routes::{matches_pattern, route_patterns};
use crate::chat::chat_body;
use crate::fake::FakeServer;
use crate::fixture::{PreparedServer, prepared_server};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The number of requests; `HALO_HOSTILE` overrides it.
fn request_count() -> usize {
    std::env::var("HALO_HOSTILE").ok().and_then(|n| n.parse().ok()).unwrap_or(1500)
}

/// After so many requests a new server is used: requests store messages, and a conversation without end tests nothing new.
const REQUESTS_PER_SERVER: usize = 250;

/// The most memory that three quarters of the requests may add.
const MEMORY_GROWTH_MIB: u64 = 128;

/// Memory of this process that is in RAM; 0 on a system without `/proc`.
fn resident_mib() -> u64 {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return 0 };
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line VmRSS");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number of kB") / 1024
}

/// Requests of OpenAI's API and of llama-server's routes without a version.
fn openai_requests() -> Vec<(&'static str, &'static str, Value)> {
    let message = json!({ "role": "user", "name": "Anna", "content": "Tell me about tea." });
    let tool =
        json!({ "type": "function", "function": { "name": "clock", "parameters": { "type": "object" } } });
    let call = json!({ "type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}" });
    let output = json!({ "type": "function_call_output", "call_id": "c", "output": "noon" });
    vec![
        (
            "POST",
            "/v1/responses",
            json!({ "model": "m", "input": [message, call, output], "instructions": "Be kind.", "max_output_tokens": 4,
            "stream": false, "store": true, "previous_response_id": null, "tools": [tool], "tool_choice": "auto",
            "metadata": { "a": "b" }, "truncation": "auto", "reasoning": { "effort": "low" }, "include": [],
            "text": { "format": { "type": "json_schema", "name": "s", "schema": { "type": "object" } } } }),
        ),
        ("GET", "/v1/responses/{}", Value::Null),
        ("DELETE", "/v1/responses/{}", Value::Null),
        ("GET", "/v1/responses/{}/input_items?limit={}&order=asc", Value::Null),
        (
            "POST",
            "/v1/chat/completions",
            json!({ "messages": [message, { "role": "assistant", "tool_calls": [{ "id": "c", "function": { "name": "clock",
            "arguments": "{}" } }] }, { "role": "tool", "tool_call_id": "c", "name": "clock", "content": "noon" }],
            "tools": [tool], "tool_choice": "auto", "parallel_tool_calls": false, "reasoning_effort": "low",
            "chat_template_kwargs": { "enable_thinking": true }, "modalities": ["text"], "stream_options": {} }),
        ),
        ("POST", "/chat/completions", json!({ "messages": [message], "max_tokens": 4 })),
        ("GET", "/models", Value::Null),
        ("GET", "/v1/models/{}", Value::Null),
        ("GET", "/props", Value::Null),
        ("GET", "/slots?fail_on_no_slot={}", Value::Null),
        ("POST", "/slots/{}", json!({})),
        ("GET", "/lora-adapters", Value::Null),
        (
            "POST",
            "/completions",
            json!({ "prompt": ["a", "b"], "n_predict": 4, "response_fields": ["content"] }),
        ),
        ("POST", "/embeddings", json!({ "content": ["a", "b"] })),
        ("POST", "/infill", json!({ "input_prefix": "a" })),
        ("POST", "/rerank", json!({ "query": "a" })),
        ("POST", "/reranking", json!({ "query": "a" })),
    ]
}

/// Requests of KoboldCPP's API.
fn kobold_requests() -> Vec<(&'static str, &'static str, Value)> {
    let prompt = json!({ "memory": "{{[SYSTEM]}}S", "prompt": "{{[INPUT]}}Once{{[OUTPUT]}}", "max_length": 4,
        "max_context_length": 64, "stop_sequence": ["{{[INPUT]}}"], "trim_stop": true, "render_special": false,
        "genkey": "k", "sampler_order": [6, 0, 1, 3, 4, 2, 5], "logprobs": true, "grammar": "", "rep_pen": 1.1 });
    let mut requests = Vec::new();
    for (version, paths) in [
        (
            "/api/v1",
            [
                "/api/v1/generate",
                "/api/v1/tokenize",
                "/api/v1/detokenize",
                "/api/v1/generate/preview",
                "/api/v1/config/soft_prompt",
            ],
        ),
        (
            "/api/latest",
            [
                "/api/latest/generate",
                "/api/latest/tokenize",
                "/api/latest/detokenize",
                "/api/latest/generate/preview",
                "/api/latest/config/soft_prompt",
            ],
        ),
    ] {
        let bodies = [
            prompt.clone(),
            json!({ "text": "Once" }),
            json!({ "token_ids": [1, 2] }),
            json!({ "append_tokens": [{ "token_id": 1 }], "max_tokens": 4 }),
            json!({ "value": "" }),
        ];
        requests.extend(paths.into_iter().zip(bodies).map(|(path, body)| ("POST", path, body)));
        for path in route_patterns().iter().filter(|path| path.starts_with(version)) {
            if !paths.contains(&path.as_str()) {
                requests.push(("GET", &*Box::leak(path.clone().into_boxed_str()), Value::Null));
            }
        }
    }
    for path in [
        "/api/extra/version",
        "/api/extra/true_max_context_length",
        "/api/extra/perf",
        "/api/extra/preloadstory",
        "/sdapi/v1/sd-models",
        "/sdapi/v1/samplers",
    ] {
        requests.push(("GET", path, Value::Null));
    }
    requests.extend([
        ("POST", "/api/extra/generate/stream", prompt),
        ("POST", "/api/extra/generate/check", json!({ "genkey": "k" })),
        ("POST", "/api/extra/last_logprobs", json!({ "genkey": "k" })),
        ("POST", "/api/extra/abort", json!({ "genkey": "k" })),
        ("POST", "/api/extra/embeddings", json!({ "input": ["a"], "truncate": true })),
        ("POST", "/api/extra/websearch", json!({ "q": "tea" })),
        ("POST", "/api/extra/transcribe", json!({ "audio_data": "" })),
        ("POST", "/api/extra/tts", json!({ "input": "a" })),
        ("GET", "/api/extra/speakers_list", Value::Null),
        ("POST", "/api/extra/music/prepare", json!({})),
        ("POST", "/api/extra/music/generate", json!({})),
        ("POST", "/api/extra/multiplayer/status", json!({})),
        ("POST", "/api/extra/multiplayer/getstory", json!({})),
        ("POST", "/api/extra/multiplayer/setstory", json!({})),
        ("POST", "/api/extra/data/list", json!({})),
        ("POST", "/api/extra/data/save", json!({})),
        ("POST", "/api/extra/data/load", json!({})),
        ("GET", "/api/admin/list_options", Value::Null),
        ("POST", "/api/admin/reload_config", json!({})),
        ("POST", "/api/admin/check_state", json!({})),
        ("POST", "/api/admin/save_state", json!({})),
        ("POST", "/api/admin/load_state", json!({})),
        ("POST", "/api/admin/clear_state", json!({})),
        ("POST", "/api/extra/shutdown", json!({})),
        ("POST", "/sdapi/v1/txt2img", json!({})),
        ("POST", "/sdapi/v1/img2img", json!({})),
        ("POST", "/sdapi/v1/interrogate", json!({})),
        ("GET", "/sdapi/v1/options", Value::Null),
        ("POST", "/sdapi/v1/upscale", json!({})),
    ]);
    requests
}

/// Requests of Ollama's API beside those that generate.
fn ollama_requests() -> Vec<(&'static str, &'static str, Value)> {
    vec![
        ("GET", "/api/tags", Value::Null),
        ("GET", "/api/ps", Value::Null),
        ("GET", "/api/version", Value::Null),
        ("POST", "/api/embeddings", json!({ "prompt": "a" })),
        ("DELETE", "/api/delete", json!({ "model": "m" })),
        ("POST", "/api/pull", json!({ "model": "m" })),
        ("POST", "/api/push", json!({ "model": "m" })),
        ("POST", "/api/create", json!({ "model": "m" })),
        ("POST", "/api/copy", json!({ "source": "m", "destination": "n" })),
    ]
}

/// Calls of all tools of MCP.
fn mcp_requests() -> Vec<(&'static str, &'static str, Value)> {
    let call = |method: &str, params: Value| {
        ("POST", "/mcp", json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params }))
    };
    let tool =
        |name: &str, arguments: Value| call("tools/call", json!({ "name": name, "arguments": arguments }));
    vec![
        tool("recall", json!({ "conversation": "main", "query": "tea", "most": 3 })),
        tool("recall_everywhere", json!({ "query": "tea", "most": 3, "offset": 0 })),
        tool("list_conversations", json!({ "most": 3 })),
        tool("read_chunk", json!({ "conversation": "main", "chunk": "u6.0" })),
        tool("remember", json!({ "conversation": "main", "text": "Tea is hot." })),
        tool("pin", json!({ "conversation": "main", "chunk": "u6.0" })),
        tool("resurrect", json!({ "conversation": "main", "chunk": "u0.0" })),
        tool("notes", json!({ "conversation": "main", "text": "{}" })),
        call("resources/read", json!({ "uri": "halo://conversation/main" })),
        call("prompts/get", json!({ "name": "recall", "arguments": {} })),
    ]
}

#[tokio::test]
async fn every_route_has_a_hostile_request() {
    let requests = valid_requests();
    let missing = |pattern: &String| !requests.iter().any(|(_, path, _)| matches_pattern(path, pattern));
    let missing: Vec<String> = route_patterns().into_iter().filter(missing).collect();
    assert!(missing.is_empty(), "write a request for {missing:?}");
    let fake = prepared_server().fake;
    let headers = [("content-type", "application/json"), ("accept", "application/json, text/event-stream")];
    let list = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" });
    let tools = fake.request("POST", "/mcp", &headers, list.to_string()).await.json();
    for tool in tools["result"]["tools"].as_array().expect("tools") {
        let is_called = mcp_requests().iter().any(|(_, _, body)| body["params"]["name"] == tool["name"]);
        assert!(is_called, "write a request for {}", tool["name"]);
    }
}

/// Method, path and body of requests that are valid; `{}` is a name, a chunk or a number.
fn valid_requests() -> Vec<(&'static str, &'static str, Value)> {
    let message = json!({ "role": "user", "content": "Tell me about tea." });
    let mut requests = [openai_requests(), kobold_requests(), ollama_requests(), mcp_requests()].concat();
    requests.extend(vec![
        (
            "POST",
            "/v1/chat/completions",
            json!({ "model": "m", "messages": [message], "max_tokens": 4, "temperature": 0.5,
            "top_p": 0.9, "stop": ["x"], "seed": 3, "stream": false, "store": true, "n": 1,
            "response_format": { "type": "json_schema", "json_schema": { "name": "s", "schema": { "type": "object" } } } }),
        ),
        (
            "POST",
            "/v1/completions",
            json!({ "model": "m", "prompt": "Once", "max_tokens": 4, "stop": "x", "echo": false }),
        ),
        (
            "POST",
            "/v1/embeddings",
            json!({ "model": "m", "input": ["a", "b"], "dimensions": 8, "encoding_format": "float" }),
        ),
        ("GET", "/v1/models", Value::Null),
        (
            "POST",
            "/api/chat",
            json!({ "model": "m", "messages": [message], "stream": false, "format": "json", "keep_alive": "5m",
            "options": { "num_predict": 4, "temperature": 0.5, "top_k": 3, "stop": ["x"], "seed": 3 } }),
        ),
        (
            "POST",
            "/api/generate",
            json!({ "model": "m", "prompt": "Once", "system": "S", "stream": true, "raw": false,
            "options": { "num_predict": 4 } }),
        ),
        (
            "POST",
            "/api/embed",
            json!({ "model": "m", "input": ["a", "b"], "truncate": true, "dimensions": 8 }),
        ),
        ("POST", "/api/show", json!({ "model": "scripted" })),
        (
            "POST",
            "/completion",
            json!({ "prompt": ["Once", 7], "n_predict": 4, "stream": false, "cache_prompt": true, "stop": ["x"],
            "json_schema": { "type": "object" }, "temperature": 0.5, "top_k": 3, "seed": 3 }),
        ),
        ("POST", "/tokenize", json!({ "content": "Once", "add_special": true, "with_pieces": true })),
        ("POST", "/detokenize", json!({ "tokens": [1, 2] })),
        ("POST", "/apply-template", json!({ "messages": [message] })),
        ("POST", "/embedding", json!({ "content": "Once" })),
        (
            "POST",
            "/api/extra/json_to_grammar",
            json!({ "schema": { "type": "object", "properties": { "a": { "type": "array", "items": { "enum": [1, "b"] },
            "minItems": 2 } }, "required": ["a"] } }),
        ),
        ("GET", "/api/halo/v1/conversations", Value::Null),
        ("GET", "/api/halo/v1/conversations/{}", Value::Null),
        ("POST", "/api/halo/v1/conversations/{}/messages", json!({ "text": "Hi", "id": "1" })),
        ("POST", "/api/halo/v1/conversations/{}/regenerate", json!({})),
        ("POST", "/api/halo/v1/conversations/{}/edit_last", json!({ "text": "Hi" })),
        ("POST", "/api/halo/v1/conversations/{}/stop", json!({})),
        ("POST", "/api/halo/v1/conversations/{}/edits", json!({ "edit": "pin", "chunks": ["u6.0"] })),
        ("POST", "/api/halo/v1/conversations/{}/branch", json!({ "name": "b", "turn": 1 })),
        ("POST", "/api/halo/v1/conversations/{}/rename", json!({ "name": "other" })),
        ("GET", "/api/halo/v1/conversations/{}/search?q={}", Value::Null),
        ("GET", "/api/halo/v1/conversations/{}/turns?last={}", Value::Null),
        ("GET", "/api/halo/v1/conversations/{}/chunks/{}", Value::Null),
        ("GET", "/api/halo/v1/conversations/{}/variants", Value::Null),
        ("GET", "/api/halo/v1/conversations/{}/notes", Value::Null),
        ("PUT", "/api/halo/v1/conversations/{}/notes", json!({ "topics": { "tea": 1 } })),
        ("GET", "/api/halo/v1/conversations/{}/memories?q={}", Value::Null),
        ("GET", "/api/halo/v1/conversations/{}/forget", Value::Null),
        ("POST", "/api/halo/v1/conversations/{}/forget", json!({ "matching": "tea", "dry_run": true })),
        ("PUT", "/api/halo/v1/settings/{}", json!({ "value": "1" })),
        ("GET", "/api/halo/v1/worlds/{}", Value::Null),
        ("POST", "/api/halo/v1/worlds", json!({ "name": "w", "file": "" })),
        ("POST", "/api/halo/v1/worlds/{}/commands", json!({ "command": "say", "room": 1, "text": "Hi" })),
        (
            "POST",
            "/api/v1/generate",
            json!({ "prompt": "Once", "max_length": 4, "temperature": 0.5, "stop_sequence": ["x"] }),
        ),
        ("POST", "/api/extra/tokencount", json!({ "prompt": "Once upon a time" })),
        ("POST", "/api/extra/detokenize", json!({ "ids": [1, 2] })),
    ]);
    requests
}

pub const NAMES: [&str; 14] = [
    "main",
    "village",
    "u6.0",
    "0",
    "4294967296",
    "-1",
    "..%2F..%2Fetc%2Fpasswd",
    "%00",
    "a%0Ab",
    "world:x",
    "%F0%9F%8C%B1",
    "%E2%80%AE",
    "generation.temperature",
    "%FF",
];

fn hostile_value(rng: &mut fastrand::Rng, depth: usize) -> Value {
    match rng.u32(..if depth > 3 { 9 } else { 12 }) {
        0 => Value::Null,
        1 => json!(rng.bool()),
        2 => json!([0, 1, -1, i64::MAX, i64::MIN, 1 << 31, 1 << 53][rng.usize(..7)]),
        3 => json!([0.0, -0.5, 1e308, -1e308, 1e-308, 0.1][rng.usize(..6)]),
        4 => json!(u64::MAX),
        5 => json!(""),
        6 => json!("a\u{0}b\u{202e}\n\u{1b}[31m<|im_end|>\u{fffd}"),
        7 => json!("x".repeat([1, 100, 5000][rng.usize(..3)])),
        8 => json!("../../etc/passwd"),
        9 => Value::Array((0..rng.usize(..4)).map(|_| hostile_value(rng, depth + 1)).collect()),
        10 => json!({ "role": "system", "content": hostile_value(rng, depth + 1) }),
        _ => json!({ "type": hostile_value(rng, depth + 1), "": hostile_value(rng, depth + 1) }),
    }
}

/// Replaces, removes or adds some values, at any depth.
pub fn mutate(value: &mut Value, rng: &mut fastrand::Rng, depth: usize) {
    if rng.u32(..6) == 0 {
        *value = hostile_value(rng, depth);
        return;
    }
    match value {
        Value::Object(fields) => {
            let keys: Vec<String> = fields.keys().cloned().collect();
            for key in keys {
                match rng.u32(..8) {
                    0 => drop(fields.remove(&key)),
                    1..4 => fields.get_mut(&key).into_iter().for_each(|field| mutate(field, rng, depth + 1)),
                    _ => {}
                }
            }
            if rng.u32(..5) == 0 {
                fields.insert(
                    ["unknown", "n", "tools", "logprobs", "stream_options"][rng.usize(..5)].into(),
                    hostile_value(rng, depth),
                );
            }
        }
        Value::Array(items) => {
            items.iter_mut().for_each(|item| mutate(item, rng, depth + 1));
            if rng.u32(..4) == 0 {
                items.push(hostile_value(rng, depth));
            }
        }
        _ => {}
    }
}

fn hostile_request(rng: &mut fastrand::Rng) -> (&'static str, String, String) {
    let requests = valid_requests();
    let (method, path, mut body) = requests[rng.usize(..requests.len())].clone();
    let mut filled = String::new();
    for (n, part) in path.split("{}").enumerate() {
        if n > 0 {
            filled.push_str(if rng.bool() { "main" } else { NAMES[rng.usize(..NAMES.len())] });
        }
        filled.push_str(part);
    }
    let method =
        if rng.u32(..20) == 0 { ["GET", "POST", "PUT", "DELETE", "PATCH"][rng.usize(..5)] } else { method };
    for _ in 0..rng.u32(..3) {
        mutate(&mut body, rng, 0);
    }
    let mut body = body.to_string();
    if rng.u32(..15) == 0 {
        let cut = (0..=body.len())
            .rev()
            .filter(|at| body.is_char_boundary(*at))
            .nth(rng.usize(..body.len().max(1)));
        body.truncate(cut.unwrap_or(0));
    }
    (method, filled, body)
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_requests_never_fail_the_server() {
    let seed = std::env::var("HALO_HOSTILE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut prepared: Option<PreparedServer> = None;
    let mut by_status: BTreeMap<u16, usize> = BTreeMap::new();
    let mut warm_memory = 0;
    for n in 0..request_count() {
        if n == request_count() / 4 {
            warm_memory = resident_mib();
        }
        if n % REQUESTS_PER_SERVER == 0 {
            if let Some(server) = prepared.take() {
                assert_usable(&server.fake).await;
                tokio::task::block_in_place(|| server.fake.app.shutdown());
            }
            prepared = Some(prepared_server());
        }
        let fake = &prepared.as_ref().expect("a server").fake;
        let (method, path, body) = hostile_request(&mut rng);
        let headers = [
            ("content-type", "application/json"),
            ("accept", "application/json, text/event-stream"),
            ("x-halo-conversation", if rng.bool() { "main" } else { "new" }),
        ];
        let started = Instant::now();
        let answer = tokio::time::timeout(
            Duration::from_secs(20),
            fake.request(method, &path, &headers, body.clone()),
        );
        let answer =
            answer.await.unwrap_or_else(|_| panic!("request {n}: no answer to {method} {path} {body}"));
        *by_status.entry(answer.status).or_default() += 1;
        let text = answer.text();
        assert!(
            // Parts of other programs that the server does not have are 501.
            answer.status < 500 || matches!(answer.status, 501 | 503),
            "request {n}: {method} {path} {body}: {} {text}",
            answer.status
        );
        assert!(
            !text.contains("internal error") && !text.contains("panicked"),
            "request {n}: {method} {path} {body}: {text}"
        );
        assert!(
            started.elapsed() < Duration::from_secs(10),
            "request {n}: {method} {path}: {:?}",
            started.elapsed()
        );
    }
    let memory = resident_mib();
    println!("{by_status:?}, {warm_memory} MiB after a quarter, {memory} MiB at the end");
    assert!(memory < warm_memory + MEMORY_GROWTH_MIB, "memory grew from {warm_memory} to {memory} MiB");
    let share = |statuses: std::ops::Range<u16>| {
        by_status.range(statuses).map(|(_, count)| count).sum::<usize>() * 10
    };
    assert!(share(200..300) > request_count() && share(400..500) > request_count(), "{by_status:?}");
}

pub async fn assert_usable(fake: &FakeServer) {
    assert_eq!(fake.get("/health").await.status, 200);
    fake.script_answers(&["Still here."]);
    let answer = fake.chat(&chat_body(&["u Are you there?"]), Some("fresh")).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
}
