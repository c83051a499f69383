//! KoboldCPP, with and without attention, as a scripted stub.

use crate::stub::{StubReply, StubRequest, StubServer};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    ChatTemplate, FinishReason, Model, ModelStep, ModelToken, OutputConstraint, Prompt, PromptMessage,
    Sampling, StepFlow, WindowToken,
};
use halo_core::token::{Position, Role, TokenId};
use halo_core::{Error, ErrorKind};
use halo_remote::{RemoteModel, RemoteOptions};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const STREAM_PATH: &str = "/api/extra/generate/stream";
const SPECIAL_TOKENS: [(&str, u32); 2] = [("<|im_start|>", 151_644), ("<|im_end|>", 151_645)];

/// Ids and texts in the fork's form: words with the space before them, special tokens without text, an emoji as three
/// tokens.
fn fake_tokenize(text: &str) -> Vec<(u32, String)> {
    let mut tokens: Vec<(u32, String)> = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        if let Some((name, id)) = SPECIAL_TOKENS.iter().find(|(name, _)| rest.starts_with(name)) {
            tokens.push((*id, String::new()));
            rest = &rest[name.len()..];
        } else if first == '😀' {
            tokens.extend([242, 243, 244].map(|id| (id, String::new())));
            rest = &rest[first.len_utf8()..];
        } else {
            let skip = first.len_utf8();
            let end = rest[skip..].find([' ', '<', '😀']).map_or(rest.len(), |at| at + skip);
            let word = &rest[..end];
            tokens.push((word.bytes().fold(1000, |id, b| id * 31 % 100_003 + u32::from(b)), word.to_owned()));
            rest = &rest[end..];
        }
    }
    tokens
}

fn is_probe(request: &StubRequest) -> bool {
    request.body["ban_eos_token"] == json!(true)
}

/// The fork with attention. The script streams the answers.
fn attention_server(script: impl Fn(&StubRequest, &mut StubReply) + Send + Sync + 'static) -> StubServer {
    StubServer::new(move |request, reply| {
        match request.path.as_str() {
        "/api/v1/model" => reply.json(&json!({
            "result": "koboldcpp/Qwen", "model_name": "Qwen", "max_context_length": 512, "eos_token_id": 151_645,
            "eot_token_id": -1, "num_layers": 2,
        })),
        "/api/v1/tokenize" => {
            let all = fake_tokenize(request.body["text"].as_str().unwrap());
            let tokens: Vec<Value> = all.iter().map(|(id, text)| json!({"token_id": id, "text": text})).collect();
            reply.json(&json!({"tokens": tokens, "token_count": tokens.len()}));
        }
        STREAM_PATH if is_probe(request) => {
            reply.begin_stream();
            reply.event(&token_event(1, "a", Value::Null));
            reply.event(&token_event(2, "b", uniform_attention(5)));
            reply.event(&done_event("length"));
        }
        _ => script(request, reply),
    }
    })
}

fn token_event(id: u32, text: &str, attention: impl Into<Value>) -> Value {
    let attention: Value = attention.into();
    json!({"type": "token", "token": {"token_id": id, "text": text}, "request_id": "r", "attention": attention})
}

fn done_event(reason: &str) -> Value {
    json!({"type": "done", "finish_reason": reason, "total_tokens": 1, "request_id": "r"})
}

fn encode_f32(values: &[f32]) -> String {
    STANDARD.encode(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

fn aggregated_attention(row: &[f32]) -> Value {
    json!({"format": "aggregated", "shape": [row.len()], "context_length": row.len(), "encoding": "base64",
           "dtype": "float32", "data": encode_f32(row)})
}

/// The same attention on each slot, padded as the fork does.
fn uniform_attention(slots: usize) -> Value {
    let mut row = vec![1.0 / slots as f32; slots];
    row.resize(slots.next_multiple_of(256), 0.0);
    aggregated_attention(&row)
}

fn connect(stub: &StubServer) -> RemoteModel {
    RemoteModel::connect(&format!("kobold+http://127.0.0.1:{}", stub.port), &RemoteOptions::default())
        .unwrap()
}

/// The steps that the listener got: tokens with their attention, and the number of waiting steps.
#[derive(Debug, Default)]
struct KoboldSteps {
    tokens: Vec<(u32, String, Option<KoboldAttentionValues>)>,
    waiting_steps: usize,
}

type KoboldAttentionValues = (Vec<f32>, Vec<f32>, Vec<f32>);

impl KoboldSteps {
    fn text(&self) -> String {
        self.tokens.iter().map(|(_, text, _)| text.as_str()).collect()
    }

    fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|(id, ..)| *id).collect()
    }

    fn row_lengths(&self) -> Vec<usize> {
        self.tokens
            .iter()
            .map(|(_, _, attention)| attention.as_ref().map_or(0, |(mean, ..)| mean.len()))
            .collect()
    }
}

/// Generates from a window of three tokens; `stop` may end it at any step.
fn generate(
    model: &mut RemoteModel,
    sampling: &Sampling,
    watch: &AttentionRequest,
    mut stop: impl FnMut(&KoboldSteps) -> bool,
) -> (KoboldSteps, Result<FinishReason, Error>) {
    let window =
        [7, 8, 9].map(|id| WindowToken { position: None, offset: 0, id: TokenId(id), chunk_start: false });
    let messages = || {
        let message = |role, text: &str| PromptMessage { role, text: text.into() };
        vec![message(Role::User, "<|im_start|>user\nhi<|im_end|>\n"), message(Role::Assistant, "so")]
    };
    let prompt = Prompt {
        conversation: "c",
        window: &window,
        messages: &messages,
        next_position: Position(3),
        ephemeral: false,
    };
    let mut steps = KoboldSteps::default();
    let finish = model.generate(&prompt, sampling, watch, &mut |step| {
        match step {
            ModelStep::Prefill { done: 0, total: 0 } => steps.waiting_steps += 1,
            ModelStep::Token(ModelToken { id, text }, attention) => {
                let attention =
                    attention.map(|row| (row.mean.to_vec(), row.max.to_vec(), row.per_head.to_vec()));
                steps.tokens.push((id.0, text.clone(), attention));
            }
            other => panic!("{other:?} is not a step of a remote model"),
        }
        if stop(&steps) { StepFlow::Stop } else { StepFlow::Continue }
    });
    (steps, finish)
}

fn generate_all(model: &mut RemoteModel) -> (KoboldSteps, Result<FinishReason, Error>) {
    generate(model, &Sampling::default(), &AttentionRequest::default(), |_| false)
}

#[test]
fn kobold_detects_attention_fork() {
    let stub = attention_server(|_, _| {});
    let info = connect(&stub).info().clone();
    assert_eq!((info.name.as_str(), info.context, info.attention), ("Qwen", 512, true));
    assert_eq!(info.template, ChatTemplate::chatml());
    let smaller = RemoteOptions { context: Some(100), ..RemoteOptions::default() };
    let address = format!("kobold+http://localhost:{}/", stub.port);
    assert_eq!(RemoteModel::connect(&address, &smaller).unwrap().info().context, 100);
    assert!(RemoteModel::is_address(&address) && !RemoteModel::is_address("model.gguf"));
}

#[test]
fn kobold_attention_in_both_formats() {
    let stub = attention_server(|_, reply| {
        reply.begin_stream();
        reply.event(&token_event(10, "The", Value::Null));
        reply.event(&token_event(11, " cat", {
            let mut row = vec![0.1, 0.2, 0.3, 0.4];
            row.resize(256, 0.0);
            aggregated_attention(&row)
        }));
        let heads =
            [0.5, 0.5, 0., 0., 0., 0., 1., 0., 0., 0., 0., 0., 0., 0., 1., 0., 0.25, 0.25, 0., 0.25, 0.25];
        let layered = json!({"format": "per_layer", "shape": [1, 3, 7], "data": encode_f32(&heads)});
        reply.event(&token_event(12, " sat", layered));
        reply.event(&done_event("stop"));
    });
    let mut model = connect(&stub);
    let watch = AttentionRequest { max: true, per_head: true, ..AttentionRequest::default() };
    let (steps, finish) = generate(&mut model, &Sampling::default(), &watch, |_| false);
    // Heads that attend to slots after the window make the row invalid.
    assert_eq!(steps.row_lengths(), [0, 4, 0]);
    assert_eq!(finish, Ok(FinishReason::EndOfText));
    assert_eq!(steps.tokens[1].2.as_ref().unwrap(), &(vec![0.1, 0.2, 0.3, 0.4], vec![], vec![]));

    let stub = attention_server(|_, reply| {
        reply.begin_stream();
        reply.event(&token_event(10, "The", Value::Null));
        let heads = [0.5, 0.5, 0., 0., 0., 0., 0., 1., 0., 0.];
        let layered = json!({"format": "per_layer", "shape": [2, 1, 5], "encoding": "base64", "dtype": "float32",
                             "data": encode_f32(&heads)});
        reply.event(&token_event(11, " cat", layered));
        reply.event(&done_event("length"));
    });
    let mut model = connect(&stub);
    let (steps, finish) = generate(&mut model, &Sampling::default(), &watch, |_| false);
    assert_eq!(finish, Ok(FinishReason::Length));
    let expected =
        (vec![0.25, 0.25, 0.5, 0.], vec![0.25, 0.25, 0.5, 0.], vec![0.5, 0.5, 0., 0., 0., 0., 1., 0.]);
    assert_eq!(steps.tokens[1].2.as_ref().unwrap(), &expected);
}

#[test]
fn kobold_request_follows_the_protocol() {
    let stub = attention_server(|_, reply| {
        reply.begin_stream();
        reply.event(&done_event("stop"));
    });
    let mut model = connect(&stub);
    let sampling = Sampling { stop: vec!["</tool>".into()], max_tokens: 20, ..Sampling::default() };
    let (_, finish) = generate(&mut model, &sampling, &AttentionRequest::default(), |_| false);
    assert_eq!(finish, Ok(FinishReason::EndOfText));
    let (_, _) = generate(&mut model, &sampling, &AttentionRequest::none(), |_| false);
    let requests = stub.requests(STREAM_PATH);
    let [_, watched, unwatched] = requests.as_slice() else { panic!("{requests:?}") };
    let body = &watched.body;
    assert_eq!(body["input_ids"], json!([7, 8, 9]));
    assert_eq!(body.get("prompt"), None);
    assert_eq!((&body["max_length"], &body["top_k"]), (&json!(20), &json!(40)));
    assert_eq!(body["stop_sequence"], json!(["</tool>"]));
    assert_eq!((&body["output_attentions"], &body["trim_stop"]), (&json!(true), &json!(false)));
    assert!(body["sampler_seed"].as_i64().unwrap() > 0, "KoboldCPP replaces a seed below 1 by a random one");
    assert_eq!(body["request_id"].as_str().unwrap().len(), 36);
    assert_eq!(unwatched.body["output_attentions"], json!(false));
    assert_eq!(watched.header("accept"), "text/event-stream");
    assert_eq!(watched.header("content-type"), "application/json");
    let tokenize = &stub.requests("/api/v1/tokenize")[0];
    assert!(tokenize.header("content-type").starts_with("text/plain"));
    assert_eq!(tokenize.body["add_special_tokens"], json!(false));
}

#[test]
fn kobold_stream_may_split_characters() {
    let stub = attention_server(|_, reply| {
        reply.begin_stream();
        // The bytes are split within a character.
        let event = format!("event: message\r\ndata: {}\r\n\r\n", token_event(10, "é😀", Value::Null));
        for part in event.as_bytes().chunks(7) {
            reply.write_raw(part);
            std::thread::sleep(Duration::from_millis(1));
        }
        // A character of three tokens, all reported, of which only the last has the text.
        for (id, text) in [(242, ""), (243, ""), (244, "😀"), (13, "!")] {
            reply.event(&token_event(id, text, uniform_attention(3)));
        }
        reply.event(&token_event(151_645, "", Value::Null));
        reply.event(&done_event("stop"));
    });
    let (steps, finish) =
        generate(&mut connect(&stub), &Sampling::default(), &AttentionRequest::none(), |_| false);
    assert_eq!((steps.text().as_str(), finish), ("é😀😀!", Ok(FinishReason::EndOfText)));
    assert_eq!(steps.tokens[0].1, "é😀");
    assert_eq!(steps.ids().last(), Some(&13), "the end token is not part of the answer");
}

#[test]
fn kobold_recovers_hidden_character_fragments() {
    let stub = attention_server(|_, reply| {
        reply.begin_stream();
        reply.event(&token_event(10, "a", Value::Null));
        reply.event(&token_event(244, "😀", uniform_attention(6)));
        reply.event(&token_event(13, "!", uniform_attention(7)));
        reply.event(&done_event("stop"));
    });
    let (steps, _) = generate_all(&mut connect(&stub));
    assert_eq!(steps.ids(), [10, 242, 243, 244, 13]);
    let texts: Vec<&str> = steps.tokens.iter().map(|(_, text, _)| text.as_str()).collect();
    assert_eq!(texts, ["a", "", "", "😀", "!"]);
    assert_eq!(steps.row_lengths(), [0, 0, 0, 6, 7]);
}

#[test]
fn kobold_cancel_stops_an_answer() {
    let stub = attention_server(|_, reply| {
        reply.begin_stream();
        reply.event(&token_event(10, "a", Value::Null));
        reply.event(&token_event(11, "b", uniform_attention(4)));
        reply.wait_for_close();
    });
    let started = Instant::now();
    let mut model = connect(&stub);
    let (steps, finish) = generate(&mut model, &Sampling::default(), &AttentionRequest::default(), |steps| {
        steps.tokens.len() == 2
    });
    assert_eq!((steps.text().as_str(), finish), ("ab", Ok(FinishReason::Cancelled)));
    assert!(stub.saw_close(), "the connection is closed at once");
    assert!(started.elapsed() < Duration::from_secs(2));
    drop(model);
}

#[test]
fn kobold_cancel_before_the_first_token() {
    for with_head in [false, true] {
        let stub = attention_server(move |_, reply| {
            if with_head {
                reply.begin_stream();
            }
            reply.wait_for_close();
        });
        let mut model = connect(&stub);
        let started = Instant::now();
        let (steps, finish) =
            generate(&mut model, &Sampling::default(), &AttentionRequest::default(), |steps| {
                steps.waiting_steps == 4
            });
        assert_eq!((steps.tokens.len(), finish), (0, Ok(FinishReason::Cancelled)));
        let elapsed = started.elapsed();
        assert!((Duration::from_millis(300)..Duration::from_secs(2)).contains(&elapsed), "{elapsed:?}");
        assert!(stub.saw_close(), "the connection is closed at once");
        drop(model);
    }
}

#[test]
fn kobold_listener_is_called_while_a_long_line_arrives() {
    let stub = attention_server(|_, reply| {
        reply.begin_stream();
        for byte in b": a comment that takes its time, and more time" {
            reply.write_raw([*byte]);
            std::thread::sleep(Duration::from_millis(12));
        }
        reply.write_raw("\n");
        reply.event(&done_event("stop"));
    });
    let (steps, _) = generate_all(&mut connect(&stub));
    assert!(steps.waiting_steps >= 3, "{}", steps.waiting_steps);
}

#[test]
fn kobold_listener_may_use_its_own_runtime() {
    let stub = attention_server(|_, reply| {
        reply.begin_stream();
        reply.event(&token_event(10, "a", Value::Null));
        std::thread::sleep(Duration::from_millis(150));
        reply.event(&done_event("stop"));
    });
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut calls = 0;
    let (_, finish) =
        generate(&mut connect(&stub), &Sampling::default(), &AttentionRequest::default(), |_| {
            calls += runtime.block_on(async { 1 });
            false
        });
    assert!(finish == Ok(FinishReason::EndOfText) && calls >= 2, "{calls}");
}

#[test]
fn kobold_broken_connection_is_an_error_and_keeps_tokens() {
    for chunked in [false, true] {
        let stub = attention_server(move |_, reply| {
            if chunked {
                reply.write_raw("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
                let event = format!("data: {}\n\n", token_event(10, "a", Value::Null));
                reply.write_raw(format!("{:x}\r\n{event}\r\n", event.len()));
            } else {
                reply.begin_stream();
                reply.event(&token_event(10, "a", Value::Null));
            }
            reply.write_raw("data: {\"type\": \"tok");
        });
        let (steps, finish) = generate_all(&mut connect(&stub));
        let error = finish.unwrap_err().to_string();
        assert!(steps.text() == "a" && error.contains("before the"), "{error}");
        assert!(error.contains("generating at http://127.0.0.1:"), "{error}");
        assert_eq!(stub.requests(STREAM_PATH).len(), 2, "a response that has begun is not retried");
    }
}

#[test]
fn kobold_damaged_attention_loses_no_token() {
    let good = uniform_attention(4);
    let with = |field: &str, value: Value| {
        let mut attention = good.clone();
        attention[field] = value;
        attention
    };
    let garbage = [
        ("no base64", with("data", json!("%%%"))),
        ("no multiple of 4", with("data", json!(STANDARD.encode([1, 2, 3, 4, 5])))),
        ("another shape", with("shape", json!([999]))),
        ("too many dimensions", with("shape", json!([1, 1, 256]))),
        ("no number", aggregated_attention(&[0.5, f32::NAN, 0.25, 0.25])),
        ("infinite", aggregated_attention(&[0.5, f32::INFINITY, 0.25, 0.25])),
        ("negative", aggregated_attention(&[0.5, -0.25, 0.5, 0.25])),
        ("logits", aggregated_attention(&[12.0, 3.0, 0.5, 0.25])),
        ("sums to more than one", aggregated_attention(&[1.0, 1.0, 1.0, 1.0])),
        ("all zero", aggregated_attention(&[0.0; 256])),
        ("too short", aggregated_attention(&[0.5, 0.5])),
        ("too long", aggregated_attention(&[0.2, 0.2, 0.2, 0.2, 0.2])),
        ("empty", aggregated_attention(&[])),
        ("no object", json!("attention")),
        ("no data", json!({"format": "aggregated"})),
        ("another type", with("dtype", json!("float16"))),
        ("layers without a shape", json!({"format": "per_layer", "data": encode_f32(&[0.25; 4])})),
        (
            "a shape that overflows",
            with("format", json!("per_layer")).with_json_field("shape", json!([u64::MAX, u64::MAX, 4])),
        ),
        ("missing", Value::Null),
    ];
    for (name, attention) in garbage {
        let sent = attention.clone();
        let stub = attention_server(move |_, reply| {
            reply.begin_stream();
            reply.event(&token_event(10, "a", Value::Null));
            reply.event(&token_event(11, "b", sent.clone()));
            reply.event(&token_event(12, "c", uniform_attention(5)));
            reply.event(&token_event(13, "d", sent.clone()));
            reply.event(&done_event("stop"));
        });
        let mut model = connect(&stub);
        let warnings = WarningCollector::default();
        let (steps, finish) =
            tracing::subscriber::with_default(warnings.clone(), || generate_all(&mut model));
        assert_eq!((steps.text().as_str(), finish), ("abcd", Ok(FinishReason::EndOfText)), "{name}");
        assert_eq!(steps.row_lengths(), [0, 0, 5, 0], "{name}: only valid rows are reported");
        let lines = warnings.0.lock().unwrap().clone();
        assert_eq!(lines.len(), 2, "{name}: the first one, and the count at the end: {lines:?}");
        assert!(lines[0].contains("token=1") && lines[1].contains("count=2"), "{name}: {lines:?}");
    }
}

trait WithJsonField {
    fn with_json_field(self, field: &str, value: Value) -> Self;
}

impl WithJsonField for Value {
    fn with_json_field(mut self, field: &str, value: Value) -> Self {
        self[field] = value;
        self
    }
}

/// A subscriber that collects warnings.
#[derive(Clone, Default)]
struct WarningCollector(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for WarningCollector {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN && metadata.target().starts_with("halo_remote")
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct WarningFields(String);
        impl tracing::field::Visit for WarningFields {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!("{}={value:?} ", field.name()));
            }
        }
        let mut line = WarningFields(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// The fork, which refuses the first `times` requests.
fn refusing_server(times: usize, refuse: impl Fn(&mut StubReply) + Send + Sync + 'static) -> StubServer {
    let count = AtomicUsize::new(0);
    attention_server(move |_, reply| {
        if count.fetch_add(1, Ordering::SeqCst) < times {
            return refuse(reply);
        }
        reply.begin_stream();
        reply.event(&token_event(10, "a", Value::Null));
        reply.event(&done_event("stop"));
    })
}

#[test]
fn kobold_retry_until_an_answer_begins() {
    type KoboldRefusal = fn(&mut StubReply);
    let refusals: [KoboldRefusal; 3] = [
        |reply| reply.respond("503 Service Unavailable", "", "busy"),
        |reply| reply.respond("502 Bad Gateway", "", ""),
        // The connection is closed without a response.
        |_| {},
    ];
    std::thread::scope(|scope| {
        for refuse in refusals {
            scope.spawn(move || {
                let stub = refusing_server(2, refuse);
                let started = Instant::now();
                let (steps, finish) = generate_all(&mut connect(&stub));
                assert_eq!((steps.text().as_str(), finish), ("a", Ok(FinishReason::EndOfText)));
                assert!(started.elapsed() >= Duration::from_millis(750), "250 ms, then 500 ms");
                assert_eq!(stub.requests(STREAM_PATH).len(), 4);
            });
        }
    });
    let stub = refusing_server(3, |reply| {
        reply.respond("503 Service Unavailable", "", "{\"detail\": {\"msg\": \"Server is busy\"}}");
    });
    let error = generate_all(&mut connect(&stub)).1.unwrap_err().to_string();
    assert!(error.contains("503: Server is busy"), "{error}");
}

#[test]
fn kobold_retry_respects_retry_after() {
    let stub = refusing_server(1, |reply| reply.respond("429 Too Many Requests", "retry-after: 1\r\n", ""));
    let started = Instant::now();
    let (steps, finish) = generate_all(&mut connect(&stub));
    assert_eq!((steps.text().as_str(), finish), ("a", Ok(FinishReason::EndOfText)));
    assert!(started.elapsed() >= Duration::from_secs(1), "{:?}", started.elapsed());
    assert!(steps.waiting_steps >= 5, "the listener is called meanwhile: {}", steps.waiting_steps);

    let stub =
        refusing_server(1, |reply| reply.respond("429 Too Many Requests", "retry-after: 60\r\n", "later"));
    let started = Instant::now();
    let error = generate_all(&mut connect(&stub)).1.unwrap_err().to_string();
    assert!(error.contains("429: later; wait 60 s"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn kobold_invalid_responses_are_errors() {
    type KoboldStreamReply = fn(&mut StubReply);
    let cases: [(&str, KoboldStreamReply, &[&str]); 8] = [
        (
            "401",
            |r| r.respond("401 Unauthorized", "", "{\"error\": \"wrong \\u001b[31mkey\"}"),
            &["401", "wrong [31mkey", "check the key"],
        ),
        ("500", |r| r.respond("500 Oops", "", &"x".repeat(5000)), &["500", "xxx…", "try again"]),
        (
            "redirect",
            |r| r.respond("302 Found", "location: http://elsewhere/\r\n", ""),
            &["redirects to http://elsewhere/"],
        ),
        (
            "html",
            |r| r.respond("200 OK", "content-type: text/html\r\n", "<html>hi</html>"),
            &["text/html", "<html>hi"],
        ),
        ("json", |r| r.json(&json!({"error": {"message": "no model"}})), &["application/json", "no model"]),
        (
            "no json",
            |r| {
                r.begin_stream();
                r.write_raw("data: <p>\n\n");
            },
            &["JSON was expected", "<p>"],
        ),
        (
            "error within",
            |r| {
                r.begin_stream();
                r.event(&json!({"error": "out of memory"}));
            },
            &["stopped with an error: out of memory"],
        ),
        (
            "no http",
            |r| {
                r.write_raw("SSH-2.0-OpenSSH\r\n\r\n");
            },
            &["the connection broke"],
        ),
    ];
    for (name, answer, expected) in cases {
        let stub = attention_server(move |_, reply| answer(reply));
        let (steps, finish) = generate_all(&mut connect(&stub));
        let error = finish.unwrap_err();
        assert_eq!(steps.tokens.len(), 0, "{name}");
        for part in expected {
            assert!(error.message.contains(part), "{name}: {error}");
        }
        assert!(error.message.chars().count() < 500 && !error.message.contains('\u{1b}'), "{name}: {error}");
    }
}

#[test]
fn kobold_connect_refuses_other_servers() {
    type KoboldConnectReply = fn(&mut StubReply);
    let cases: [(KoboldConnectReply, &str); 5] = [
        (
            |r| r.respond("200 OK", "", "<!doctype html><title>Router</title>"),
            "that is a web page: check the address",
        ),
        (|r| r.json(&json!({"models": []})), "check that the server is KoboldCPP"),
        (|r| r.json(&json!([1])), "check that the server is KoboldCPP"),
        (|r| r.not_found(), "does not know /api/v1/model"),
        (
            |r| r.write_raw("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{").then_some(()).unwrap(),
            "before the response was complete",
        ),
    ];
    for (answer, expected) in cases {
        let stub = StubServer::new(move |_, reply| answer(reply));
        let address = format!("kobold+http://127.0.0.1:{}", stub.port);
        let error = RemoteModel::connect(&address, &RemoteOptions::default()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = RemoteModel::connect(&format!("kobold+http://127.0.0.1:{free}"), &RemoteOptions::default())
        .unwrap_err();
    assert!(error.message.contains("check the address, and that the server runs"), "{error}");
}

#[test]
fn kobold_endless_line_is_refused() {
    let stub = attention_server(|_, reply| {
        reply.begin_stream();
        let megabyte = vec![b'x'; 1 << 20];
        let written = (0..200).take_while(|_| reply.write_raw(&megabyte)).count();
        reply.report_closed(written < 200);
    });
    let error = generate_all(&mut connect(&stub)).1.unwrap_err().to_string();
    assert!(error.contains("a line of more than 67108864 bytes"), "{error}");
    assert!(stub.saw_close());
}

#[test]
fn kobold_idle_timeout_within_an_answer_is_an_error() {
    let stub = attention_server(|_, reply| {
        reply.begin_stream();
        reply.event(&token_event(10, "a", Value::Null));
        reply.wait_for_close();
    });
    let options = RemoteOptions { idle_timeout: Duration::from_millis(250), ..RemoteOptions::default() };
    let mut model =
        RemoteModel::connect(&format!("kobold+http://127.0.0.1:{}", stub.port), &options).unwrap();
    let (steps, finish) = generate_all(&mut model);
    assert!(steps.text() == "a" && finish.unwrap_err().message.contains("no data for"));
    assert!(stub.saw_close());
}

#[test]
fn kobold_stop_sequence_ends_an_answer() {
    let stub = attention_server(|_, reply| {
        reply.begin_stream();
        for (id, text) in [(10, "x</"), (11, "to"), (12, "ol>\n"), (13, "more")] {
            reply.event(&token_event(id, text, Value::Null));
        }
        reply.wait_for_close();
    });
    let sampling =
        Sampling { stop: vec![String::new(), "nothing".into(), "</tool>".into()], ..Sampling::default() };
    let (steps, finish) = generate(&mut connect(&stub), &sampling, &AttentionRequest::none(), |_| false);
    assert_eq!((steps.text().as_str(), finish), ("x</tool>\n", Ok(FinishReason::StopSequence)));
    assert!(stub.saw_close());
}

#[test]
fn kobold_max_tokens_is_enforced() {
    let endless = || {
        attention_server(|_, reply| {
            reply.begin_stream();
            let limit = 100_000;
            let sent = (0..limit).take_while(|_| reply.event(&token_event(10, "a", Value::Null))).count();
            reply.report_closed(sent < limit);
        })
    };
    let stub = endless();
    let mut model = connect(&stub);
    let short = Sampling { max_tokens: 3, ..Sampling::default() };
    let (steps, finish) = generate(&mut model, &short, &AttentionRequest::none(), |_| false);
    assert_eq!((steps.text().as_str(), finish), ("aaa", Ok(FinishReason::Length)));
    assert!(stub.saw_close());
    let none = Sampling { max_tokens: 0, ..Sampling::default() };
    assert_eq!(generate(&mut model, &none, &AttentionRequest::none(), |_| false).1, Ok(FinishReason::Length));
    let long = Sampling { max_tokens: 510, ..Sampling::default() };
    let error = generate(&mut model, &long, &AttentionRequest::none(), |_| false).1.unwrap_err();
    assert_eq!(error.kind, ErrorKind::ContextLengthExceeded);
    assert!(error.message.contains("3 tokens and an answer of 510 do not fit in 512"), "{error}");
}

#[test]
fn kobold_special_tokens_only_where_allowed() {
    let stub = attention_server(|_, _| {});
    let mut model = connect(&stub);
    let text = "<|im_start|>user\nsay <|im_end|> or [INST] 😀<|im_end|>\n";
    let special = model.tokenize(text, true).unwrap();
    let plain = model.tokenize(text, false).unwrap();
    let joined_texts =
        |tokens: &[ModelToken]| tokens.iter().map(|p| p.text.clone()).collect::<Vec<_>>().join("~");
    assert_eq!(
        joined_texts(&special),
        "<|im_start|>~user\nsay~ ~<|im_end|>~ or~ [INST]~ ~~~😀~<|im_end|>~\n"
    );
    assert_eq!(
        joined_texts(&plain),
        "<~|im_start|>user\nsay~ ~<~|im_end|>~ or~ [~INST]~ ~~~😀~<~|im_end|>\n"
    );
    let special_count = |tokens: &[ModelToken]| {
        tokens.iter().filter(|p| SPECIAL_TOKENS.iter().any(|(_, id)| *id == p.id.0)).count()
    };
    assert_eq!((special_count(&special), special_count(&plain)), (3, 0));
    assert_eq!(special[0].id, TokenId(151_644));
    assert_eq!(model.tokenize("", false).unwrap(), []);
}

#[test]
fn kobold_tokenizer_request_times_out() {
    assert_eq!(RemoteOptions::default().request_timeout, Duration::from_secs(5));
    let silent = Arc::new(AtomicUsize::new(0));
    let is_silent = Arc::clone(&silent);
    let stub = StubServer::new(move |request, reply| match request.path.as_str() {
        "/api/v1/model" => {
            reply.json(&json!({"model_name": "Qwen", "max_context_length": 512, "num_layers": 2}));
        }
        "/api/v1/tokenize" if is_silent.load(Ordering::SeqCst) > 0 => reply.wait_for_close(),
        "/api/v1/tokenize" => {
            reply.json(&json!({"tokens": [{"token_id": 1, "text": "a"}], "token_count": 1}));
        }
        STREAM_PATH => {
            reply.begin_stream();
            reply.event(&token_event(2, "b", uniform_attention(5)));
            reply.event(&done_event("length"));
        }
        _ => reply.not_found(),
    });
    let options = RemoteOptions { request_timeout: Duration::from_millis(300), ..RemoteOptions::default() };
    let mut model =
        RemoteModel::connect(&format!("kobold+http://127.0.0.1:{}", stub.port), &options).unwrap();
    silent.store(1, Ordering::SeqCst);
    let error = model.tokenize("a", true).unwrap_err();
    assert!(error.message.contains("no answer within 0.3 s"), "{error}");
}

#[test]
fn kobold_schema_is_translated_by_the_server() {
    let stub = attention_server(|request, reply| match request.path.as_str() {
        "/api/extra/json_to_grammar" => reply.json(&json!({"result": "root ::= \"x\"", "success": true})),
        _ => {
            reply.begin_stream();
            reply.event(&done_event("stop"));
        }
    });
    let sampling = Sampling {
        constraint: Some(OutputConstraint::JsonSchema("{\"type\": \"object\"}".into())),
        ..Sampling::default()
    };
    let finish = generate(&mut connect(&stub), &sampling, &AttentionRequest::none(), |_| false).1;
    assert_eq!(finish, Ok(FinishReason::EndOfText));
    assert_eq!(stub.requests("/api/extra/json_to_grammar")[0].body, json!({"schema": {"type": "object"}}));
    assert_eq!(stub.requests(STREAM_PATH)[1].body["grammar"], json!("root ::= \"x\""));

    let stub = attention_server(|_, reply| reply.not_found());
    let error = generate(&mut connect(&stub), &sampling, &AttentionRequest::none(), |_| false).1.unwrap_err();
    assert!(error.message.contains("does not support schemas"), "{error}");
}

/// A KoboldCPP without attention: ids without texts, a token before every text, text in the stream.
fn plain_server(script: impl Fn(&StubRequest, &mut StubReply) + Send + Sync + 'static) -> StubServer {
    StubServer::new(move |request, reply| match request.path.as_str() {
        "/api/v1/model" => reply.json(&json!({"result": "koboldcpp/tiny"})),
        "/api/extra/true_max_context_length" => reply.json(&json!({"value": 4096})),
        "/api/extra/tokencount" => {
            let ids = fake_tokenize(request.body["prompt"].as_str().unwrap()).into_iter().map(|(id, _)| id);
            let ids: Vec<u32> = [1].into_iter().chain(ids).collect();
            reply.json(&json!({"value": ids.len(), "ids": ids}));
        }
        "/api/extra/detokenize" => {
            let words = "so Hello you <|im_start|> 😀 Hel lo! |im_start|> <";
            let tokens: Vec<(u32, String)> = words
                .split(' ')
                .flat_map(|w| [fake_tokenize(w), fake_tokenize(&format!(" {w}"))].concat())
                .collect();
            let id = request.body["ids"][0].as_u64().unwrap() as u32;
            let text = tokens.iter().find(|(token, _)| *token == id).map_or("", |(_, text)| text);
            reply.json(&json!({"result": text, "success": true}));
        }
        STREAM_PATH => script(request, reply),
        _ => reply.not_found(),
    })
}

#[test]
fn kobold_plain_server_gets_a_text_prompt() {
    let stub = plain_server(|_, reply| {
        reply.begin_stream();
        reply.event(&json!({"token": "Hello", "finish_reason": null}));
        reply.event(&json!({"token": " you 😀", "finish_reason": null}));
        reply.event(&json!({"token": "", "finish_reason": "length"}));
    });
    let mut model = connect(&stub);
    let info = model.info();
    assert_eq!((info.name.as_str(), info.context, info.attention), ("koboldcpp/tiny", 4096, false));
    let (steps, finish) = generate_all(&mut model);
    assert_eq!((steps.text().as_str(), finish), ("Hello you 😀", Ok(FinishReason::Length)));
    let expected: Vec<u32> =
        fake_tokenize("Hello").iter().chain(&fake_tokenize(" you 😀")).map(|(id, _)| *id).collect();
    assert_eq!(steps.ids(), expected);
    let body = &stub.requests(STREAM_PATH)[0].body;
    assert_eq!(body["prompt"], json!("<|im_start|>user\nhi<|im_end|>\nso"));
    assert_eq!((body.get("input_ids"), body.get("output_attentions")), (None, None));
}

#[test]
fn kobold_plain_server_slow_cancelled_and_broken() {
    let text_event = |text: &str| json!({"token": text, "finish_reason": null});
    let stub = plain_server(move |_, reply| {
        reply.begin_stream();
        for byte in format!("event: message\ndata: {}\n\n", text_event("Hello 😀")).as_bytes().chunks(1) {
            reply.write_raw(byte);
        }
        reply.event(&json!({"token": "", "finish_reason": "stop"}));
    });
    let (steps, finish) = generate_all(&mut connect(&stub));
    assert_eq!((steps.text().as_str(), finish), ("Hello 😀", Ok(FinishReason::EndOfText)));

    let stub = plain_server(move |_, reply| {
        reply.begin_stream();
        reply.event(&text_event("Hello"));
        reply.wait_for_close();
    });
    let has_token = |steps: &KoboldSteps| !steps.tokens.is_empty();
    let (steps, finish) =
        generate(&mut connect(&stub), &Sampling::default(), &AttentionRequest::default(), has_token);
    assert_eq!((steps.text().as_str(), finish), ("Hello", Ok(FinishReason::Cancelled)));
    assert!(stub.saw_close());

    let stub = plain_server(move |_, reply| {
        reply.begin_stream();
        reply.event(&text_event("Hello"));
        reply.write_raw("data: {\"token\": \"yo");
    });
    let (steps, finish) = generate_all(&mut connect(&stub));
    assert!(steps.text() == "Hello" && finish.is_err(), "{finish:?}");
}

#[test]
fn kobold_plain_server_tokens_are_aligned_to_text() {
    let stub = plain_server(|_, _| {});
    let mut model = connect(&stub);
    let joined_texts = |model: &mut RemoteModel, text: &str, special| {
        let tokens = model.tokenize(text, special).unwrap();
        tokens.iter().map(|p| p.text.clone()).collect::<Vec<_>>().join("~")
    };
    assert_eq!(joined_texts(&mut model, "Hello you 😀 you", true), "Hello~ you~ ~~~😀~ you");
    let count = stub.requests("/api/extra/detokenize").len();
    assert_eq!(joined_texts(&mut model, " you 😀Hello", true), " you~ ~~~😀~Hello");
    assert_eq!(stub.requests("/api/extra/detokenize").len(), count, "the text of an id is requested once");
    assert_eq!(joined_texts(&mut model, "<|im_start|> you", true), "<|im_start|>~ you");
    assert_eq!(joined_texts(&mut model, "<|im_start|> you", false), "<~|im_start|>~ you");
    // Text that cannot be aligned goes to the last token; nothing is lost.
    assert_eq!(joined_texts(&mut model, "Hello unknown words", true), "Hello~~ unknown words");
}

#[test]
fn kobold_old_server_without_finish_reason() {
    let stub = plain_server(|_, reply| {
        reply.begin_stream();
        reply.event(&json!({"token": "Hello"}));
    });
    let (steps, finish) = generate_all(&mut connect(&stub));
    assert_eq!((steps.text().as_str(), finish), ("Hello", Ok(FinishReason::EndOfText)));
    let stub = plain_server(|_, reply| {
        reply.begin_stream();
        reply.event(&json!({"token": "Hello", "finish_reason": null}));
    });
    assert!(generate_all(&mut connect(&stub)).1.is_err(), "a server with finish_reason must report the end");
}

#[test]
fn kobold_attention_only_where_the_probe_shows_it() {
    let model = json!({"model_name": "m", "max_context_length": 64});
    for (events, attention) in [
        (vec![json!({"token": "a", "finish_reason": null})], false),
        (vec![token_event(1, "a", Value::Null), token_event(2, "b", Value::Null)], false),
        (vec![token_event(1, "a", Value::Null), token_event(2, "b", uniform_attention(5))], true),
        // One token is inconclusive.
        (vec![token_event(1, "a", Value::Null)], true),
    ] {
        let model = model.clone();
        let stub = StubServer::new(move |request, reply| match request.path.as_str() {
            "/api/v1/model" => reply.json(&model),
            "/api/v1/tokenize" => {
                reply.json(&json!({"tokens": [{"token_id": 5, "text": "Once upon a time"}]}));
            }
            _ => {
                reply.begin_stream();
                for event in &events {
                    reply.event(event);
                }
                reply.event(&done_event("length"));
            }
        });
        assert_eq!(connect(&stub).info().attention, attention);
    }
}
