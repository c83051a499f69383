//! KoboldCPP, the fork with attention and the plain one, as a script plays them.

mod stub;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use halo_core::attention::Watch;
use halo_core::seams::{
    Finish, Flow, Form, Message, Model, ModelStep, Piece, Prompt, Sampling, SeamError, Seen, Template,
};
use halo_core::token::{Position, Role, TokenId};
use halo_remote::{Options, Remote};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use stub::{Asked, Reply, Stub};

const STREAM: &str = "/api/extra/generate/stream";
const SPECIAL: [(&str, u32); 2] = [("<|im_start|>", 151_644), ("<|im_end|>", 151_645)];

/// Ids and what they say, as the fork cuts: words with the space before them, special names as one token that says
/// nothing, a face in three parts.
fn tokens(text: &str) -> Vec<(u32, String)> {
    let mut tokens: Vec<(u32, String)> = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        if let Some((name, id)) = SPECIAL.iter().find(|(name, _)| rest.starts_with(name)) {
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

fn is_trial(asked: &Asked) -> bool {
    asked.body["ban_eos_token"] == json!(true)
}

/// The fork, whose answers are the script's.
fn fork(script: impl Fn(&Asked, &mut Reply) + Send + Sync + 'static) -> Stub {
    Stub::new(move |asked, reply| {
        match asked.path.as_str() {
        "/api/v1/model" => reply.json(&json!({
            "result": "koboldcpp/Qwen", "model_name": "Qwen", "max_context_length": 512, "eos_token_id": 151_645,
            "eot_token_id": -1, "num_layers": 2,
        })),
        "/api/v1/tokenize" => {
            let all = tokens(asked.body["text"].as_str().unwrap());
            let tokens: Vec<Value> = all.iter().map(|(id, text)| json!({"token_id": id, "text": text})).collect();
            reply.json(&json!({"tokens": tokens, "token_count": tokens.len()}));
        }
        STREAM if is_trial(asked) => {
            reply.begin();
            reply.event(&token(1, "a", Value::Null));
            reply.event(&token(2, "b", even(5)));
            reply.event(&done("length"));
        }
        _ => script(asked, reply),
    }
    })
}

fn token(id: u32, text: &str, attention: impl Into<Value>) -> Value {
    let attention: Value = attention.into();
    json!({"type": "token", "token": {"token_id": id, "text": text}, "request_id": "r", "attention": attention})
}

fn done(reason: &str) -> Value {
    json!({"type": "done", "finish_reason": reason, "total_tokens": 1, "request_id": "r"})
}

fn encode(values: &[f32]) -> String {
    STANDARD.encode(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

fn aggregated(row: &[f32]) -> Value {
    json!({"format": "aggregated", "shape": [row.len()], "context_length": row.len(), "encoding": "base64",
           "dtype": "float32", "data": encode(row)})
}

/// As much on each of so many slots, padded as the fork does.
fn even(slots: usize) -> Value {
    let mut row = vec![1.0 / slots as f32; slots];
    row.resize(slots.next_multiple_of(256), 0.0);
    aggregated(&row)
}

fn connect(stub: &Stub) -> Remote {
    Remote::connect(&format!("kobold+http://127.0.0.1:{}", stub.port), &Options::default()).unwrap()
}

/// What was told: tokens with their attention, and how often there was nothing to tell.
#[derive(Debug, Default)]
struct Told {
    tokens: Vec<(u32, String, Option<Rows>)>,
    readings: usize,
}

type Rows = (Vec<f32>, Vec<f32>, Vec<f32>);

impl Told {
    fn text(&self) -> String {
        self.tokens.iter().map(|(_, text, _)| text.as_str()).collect()
    }

    fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|(id, ..)| *id).collect()
    }

    fn looks(&self) -> Vec<usize> {
        self.tokens.iter().map(|(_, _, look)| look.as_ref().map_or(0, |(mean, ..)| mean.len())).collect()
    }
}

/// Goes on from a window of three tokens; `stop` may end it at any step.
fn generate(
    model: &mut Remote,
    sampling: &Sampling,
    watch: &Watch,
    mut stop: impl FnMut(&Told) -> bool,
) -> (Told, Result<Finish, SeamError>) {
    let window = [7, 8, 9].map(|id| Seen { position: None, behind: 0, id: TokenId(id), begins: false });
    let messages = || {
        let message = |role, text: &str| Message { role, text: text.into() };
        vec![message(Role::User, "<|im_start|>user\nhi<|im_end|>\n"), message(Role::Assistant, "so")]
    };
    let prompt =
        Prompt { conversation: "c", window: &window, messages: &messages, next: Position(3), aside: false };
    let mut told = Told::default();
    let finish = model.generate(&prompt, sampling, watch, &mut |step| {
        match step {
            ModelStep::Reading { done: 0, of: 0 } => told.readings += 1,
            ModelStep::Token(Piece { id, text }, look) => {
                let look = look.map(|l| (l.mean.to_vec(), l.max.to_vec(), l.full.to_vec()));
                told.tokens.push((id.0, text.clone(), look));
            }
            other => panic!("{other:?} is not for a model behind HTTP to tell"),
        }
        if stop(&told) { Flow::Stop } else { Flow::Continue }
    });
    (told, finish)
}

fn whole(model: &mut Remote) -> (Told, Result<Finish, SeamError>) {
    generate(model, &Sampling::default(), &Watch::default(), |_| false)
}

#[test]
fn the_fork_is_known_by_what_it_shows() {
    let stub = fork(|_, _| {});
    let info = connect(&stub).info().clone();
    assert_eq!((info.name.as_str(), info.context, info.attention), ("Qwen", 512, true));
    assert_eq!(info.template, Template::chatml());
    let smaller = Options { context: Some(100), ..Options::default() };
    let address = format!("kobold+http://localhost:{}/", stub.port);
    assert_eq!(Remote::connect(&address, &smaller).unwrap().info().context, 100);
    assert!(Remote::is_address(&address) && !Remote::is_address("model.gguf"));
}

#[test]
fn attention_comes_in_both_formats() {
    let stub = fork(|_, reply| {
        reply.begin();
        reply.event(&token(10, "The", Value::Null));
        reply.event(&token(11, " cat", {
            let mut row = vec![0.1, 0.2, 0.3, 0.4];
            row.resize(256, 0.0);
            aggregated(&row)
        }));
        let heads =
            [0.5, 0.5, 0., 0., 0., 0., 1., 0., 0., 0., 0., 0., 0., 0., 1., 0., 0.25, 0.25, 0., 0.25, 0.25];
        let layered = json!({"format": "per_layer", "shape": [1, 3, 7], "data": encode(&heads)});
        reply.event(&token(12, " sat", layered));
        reply.event(&done("stop"));
    });
    let mut model = connect(&stub);
    let watch = Watch { max: true, full: true, ..Watch::default() };
    let (told, finish) = generate(&mut model, &Sampling::default(), &watch, |_| false);
    // Heads that look behind what the pass saw are not believed.
    assert_eq!(told.looks(), [0, 4, 0]);
    assert_eq!(finish, Ok(Finish::End));
    assert_eq!(told.tokens[1].2.as_ref().unwrap(), &(vec![0.1, 0.2, 0.3, 0.4], vec![], vec![]));

    let stub = fork(|_, reply| {
        reply.begin();
        reply.event(&token(10, "The", Value::Null));
        let heads = [0.5, 0.5, 0., 0., 0., 0., 0., 1., 0., 0.];
        let layered = json!({"format": "per_layer", "shape": [2, 1, 5], "encoding": "base64", "dtype": "float32",
                             "data": encode(&heads)});
        reply.event(&token(11, " cat", layered));
        reply.event(&done("length"));
    });
    let mut model = connect(&stub);
    let (told, finish) = generate(&mut model, &Sampling::default(), &watch, |_| false);
    assert_eq!(finish, Ok(Finish::Length));
    let expected =
        (vec![0.25, 0.25, 0.5, 0.], vec![0.25, 0.25, 0.5, 0.], vec![0.5, 0.5, 0., 0., 0., 0., 1., 0.]);
    assert_eq!(told.tokens[1].2.as_ref().unwrap(), &expected);
}

#[test]
fn the_request_is_as_the_protocol_says() {
    let stub = fork(|_, reply| {
        reply.begin();
        reply.event(&done("stop"));
    });
    let mut model = connect(&stub);
    let sampling = Sampling { stop: vec!["</tool>".into()], max_tokens: 20, ..Sampling::default() };
    let (_, finish) = generate(&mut model, &sampling, &Watch::default(), |_| false);
    assert_eq!(finish, Ok(Finish::End));
    let (_, _) = generate(&mut model, &sampling, &Watch::nothing(), |_| false);
    let asked = stub.asked(STREAM);
    let [_, watched, unwatched] = asked.as_slice() else { panic!("{asked:?}") };
    let body = &watched.body;
    assert_eq!(body["input_ids"], json!([7, 8, 9]));
    assert_eq!(body.get("prompt"), None);
    assert_eq!((&body["max_length"], &body["top_k"]), (&json!(20), &json!(40)));
    assert_eq!(body["stop_sequence"], json!(["</tool>"]));
    assert_eq!((&body["output_attentions"], &body["trim_stop"]), (&json!(true), &json!(false)));
    assert!(body["sampler_seed"].as_i64().unwrap() > 0, "0 and less would be drawn by chance");
    assert_eq!(body["request_id"].as_str().unwrap().len(), 36);
    assert_eq!(unwatched.body["output_attentions"], json!(false));
    assert_eq!(watched.header("accept"), "text/event-stream");
    assert_eq!(watched.header("content-type"), "application/json");
    let tokenize = &stub.asked("/api/v1/tokenize")[0];
    assert!(tokenize.header("content-type").starts_with("text/plain"));
    assert_eq!(tokenize.body["add_special_tokens"], json!(false));
}

#[test]
fn characters_may_be_cut_anywhere() {
    let stub = fork(|_, reply| {
        reply.begin();
        // Bytes cut within a character, and lines within a word.
        let event = format!("event: message\r\ndata: {}\r\n\r\n", token(10, "é😀", Value::Null));
        for part in event.as_bytes().chunks(7) {
            reply.raw(part);
            std::thread::sleep(Duration::from_millis(1));
        }
        // A character in three tokens, of which a good server tells all, and this one tells the last.
        for (id, text) in [(242, ""), (243, ""), (244, "😀"), (13, "!")] {
            reply.event(&token(id, text, even(3)));
        }
        reply.event(&token(151_645, "", Value::Null));
        reply.event(&done("stop"));
    });
    let (told, finish) = generate(&mut connect(&stub), &Sampling::default(), &Watch::nothing(), |_| false);
    assert_eq!((told.text().as_str(), finish), ("é😀😀!", Ok(Finish::End)));
    assert_eq!(told.tokens[0].1, "é😀");
    assert_eq!(told.ids().last(), Some(&13), "what ends an answer is not part of it");
}

#[test]
fn parts_of_characters_that_a_server_hides_are_found() {
    let stub = fork(|_, reply| {
        reply.begin();
        reply.event(&token(10, "a", Value::Null));
        reply.event(&token(244, "😀", even(6)));
        reply.event(&token(13, "!", even(7)));
        reply.event(&done("stop"));
    });
    let (told, _) = whole(&mut connect(&stub));
    assert_eq!(told.ids(), [10, 242, 243, 244, 13]);
    let texts: Vec<&str> = told.tokens.iter().map(|(_, text, _)| text.as_str()).collect();
    assert_eq!(texts, ["a", "", "", "😀", "!"]);
    assert_eq!(told.looks(), [0, 0, 0, 6, 7]);
}

#[test]
fn a_listener_can_stop_an_answer() {
    let stub = fork(|_, reply| {
        reply.begin();
        reply.event(&token(10, "a", Value::Null));
        reply.event(&token(11, "b", even(4)));
        reply.wait_for_close();
    });
    let begun = Instant::now();
    let mut model = connect(&stub);
    let (told, finish) =
        generate(&mut model, &Sampling::default(), &Watch::default(), |told| told.tokens.len() == 2);
    assert_eq!((told.text().as_str(), finish), ("ab", Ok(Finish::Aborted)));
    assert!(stub.saw_close(), "the server must notice at once");
    assert!(begun.elapsed() < Duration::from_secs(2));
    drop(model);
}

#[test]
fn a_listener_can_stop_before_anything_has_come() {
    for with_head in [false, true] {
        let stub = fork(move |_, reply| {
            if with_head {
                reply.begin();
            }
            reply.wait_for_close();
        });
        let mut model = connect(&stub);
        let begun = Instant::now();
        let (told, finish) =
            generate(&mut model, &Sampling::default(), &Watch::default(), |told| told.readings == 4);
        assert_eq!((told.tokens.len(), finish), (0, Ok(Finish::Aborted)));
        let took = begun.elapsed();
        assert!((Duration::from_millis(300)..Duration::from_secs(2)).contains(&took), "{took:?}");
        assert!(stub.saw_close(), "the server must notice at once");
        drop(model);
    }
}

#[test]
fn a_listener_hears_something_while_a_long_line_trickles_in() {
    let stub = fork(|_, reply| {
        reply.begin();
        for byte in b": a comment that takes its time, and more time" {
            reply.raw([*byte]);
            std::thread::sleep(Duration::from_millis(12));
        }
        reply.raw("\n");
        reply.event(&done("stop"));
    });
    let (told, _) = whole(&mut connect(&stub));
    assert!(told.readings >= 3, "{}", told.readings);
}

#[test]
fn a_listener_may_have_a_runtime_of_its_own() {
    let stub = fork(|_, reply| {
        reply.begin();
        reply.event(&token(10, "a", Value::Null));
        std::thread::sleep(Duration::from_millis(150));
        reply.event(&done("stop"));
    });
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut heard = 0;
    let (_, finish) = generate(&mut connect(&stub), &Sampling::default(), &Watch::default(), |_| {
        heard += runtime.block_on(async { 1 });
        false
    });
    assert!(finish == Ok(Finish::End) && heard >= 2, "{heard}");
}

#[test]
fn a_server_that_dies_is_an_error_and_what_was_told_stands() {
    for chunked in [false, true] {
        let stub = fork(move |_, reply| {
            if chunked {
                reply.raw("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
                let event = format!("data: {}\n\n", token(10, "a", Value::Null));
                reply.raw(format!("{:x}\r\n{event}\r\n", event.len()));
            } else {
                reply.begin();
                reply.event(&token(10, "a", Value::Null));
            }
            reply.raw("data: {\"type\": \"tok");
        });
        let (told, finish) = whole(&mut connect(&stub));
        let error = finish.unwrap_err().to_string();
        assert!(told.text() == "a" && error.contains("before the answer"), "{error}");
        assert!(error.contains("generating at http://127.0.0.1:"), "{error}");
        assert_eq!(stub.asked(STREAM).len(), 2, "what has begun is not asked again");
    }
}

#[test]
fn damaged_attention_costs_no_token() {
    let good = even(4);
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
        ("no number", aggregated(&[0.5, f32::NAN, 0.25, 0.25])),
        ("infinite", aggregated(&[0.5, f32::INFINITY, 0.25, 0.25])),
        ("negative", aggregated(&[0.5, -0.25, 0.5, 0.25])),
        ("logits", aggregated(&[12.0, 3.0, 0.5, 0.25])),
        ("sums to more than one", aggregated(&[1.0, 1.0, 1.0, 1.0])),
        ("all zero", aggregated(&[0.0; 256])),
        ("too short", aggregated(&[0.5, 0.5])),
        ("too long", aggregated(&[0.2, 0.2, 0.2, 0.2, 0.2])),
        ("empty", aggregated(&[])),
        ("no object", json!("attention")),
        ("no data", json!({"format": "aggregated"})),
        ("another type", with("dtype", json!("float16"))),
        ("layers without a shape", json!({"format": "per_layer", "data": encode(&[0.25; 4])})),
        (
            "a shape that overflows",
            with("format", json!("per_layer")).tap("shape", json!([u64::MAX, u64::MAX, 4])),
        ),
        ("missing", Value::Null),
    ];
    for (name, attention) in garbage {
        let sent = attention.clone();
        let stub = fork(move |_, reply| {
            reply.begin();
            reply.event(&token(10, "a", Value::Null));
            reply.event(&token(11, "b", sent.clone()));
            reply.event(&token(12, "c", even(5)));
            reply.event(&token(13, "d", sent.clone()));
            reply.event(&done("stop"));
        });
        let mut model = connect(&stub);
        let warnings = Warnings::default();
        let (told, finish) = tracing::subscriber::with_default(warnings.clone(), || whole(&mut model));
        assert_eq!((told.text().as_str(), finish), ("abcd", Ok(Finish::End)), "{name}");
        assert_eq!(told.looks(), [0, 0, 5, 0], "{name}: only what is whole is told");
        let said = warnings.0.lock().unwrap().clone();
        assert_eq!(said.len(), 2, "{name}: once when it begins, once when it ends: {said:?}");
        assert!(said[0].contains("token=1") && said[1].contains("count=2"), "{name}: {said:?}");
    }
}

trait Tap {
    fn tap(self, field: &str, value: Value) -> Self;
}

impl Tap for Value {
    fn tap(mut self, field: &str, value: Value) -> Self {
        self[field] = value;
        self
    }
}

/// Keeps what is warned of.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN && metadata.target().starts_with("halo_remote")
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Line(String);
        impl tracing::field::Visit for Line {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!("{}={value:?} ", field.name()));
            }
        }
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// The fork, which first refuses so many times.
fn refusing(times: usize, refuse: impl Fn(&mut Reply) + Send + Sync + 'static) -> Stub {
    let count = AtomicUsize::new(0);
    fork(move |_, reply| {
        if count.fetch_add(1, Ordering::SeqCst) < times {
            return refuse(reply);
        }
        reply.begin();
        reply.event(&token(10, "a", Value::Null));
        reply.event(&done("stop"));
    })
}

#[test]
fn what_nobody_has_begun_to_answer_is_asked_again() {
    type Refuse = fn(&mut Reply);
    let refusals: [Refuse; 3] = [
        |reply| reply.answer("503 Service Unavailable", "", "busy"),
        |reply| reply.answer("502 Bad Gateway", "", ""),
        // The connection is closed without a word.
        |_| {},
    ];
    std::thread::scope(|scope| {
        for refuse in refusals {
            scope.spawn(move || {
                let stub = refusing(2, refuse);
                let begun = Instant::now();
                let (told, finish) = whole(&mut connect(&stub));
                assert_eq!((told.text().as_str(), finish), ("a", Ok(Finish::End)));
                assert!(begun.elapsed() >= Duration::from_millis(750), "250 ms, then 500 ms");
                assert_eq!(stub.asked(STREAM).len(), 4);
            });
        }
    });
    let stub = refusing(3, |reply| {
        reply.answer("503 Service Unavailable", "", "{\"detail\": {\"msg\": \"Server is busy\"}}");
    });
    let error = whole(&mut connect(&stub)).1.unwrap_err().to_string();
    assert!(error.contains("503: Server is busy"), "{error}");
}

#[test]
fn nobody_is_asked_sooner_than_they_like() {
    let stub = refusing(1, |reply| reply.answer("429 Too Many Requests", "retry-after: 1\r\n", ""));
    let begun = Instant::now();
    let (told, finish) = whole(&mut connect(&stub));
    assert_eq!((told.text().as_str(), finish), ("a", Ok(Finish::End)));
    assert!(begun.elapsed() >= Duration::from_secs(1), "{:?}", begun.elapsed());
    assert!(told.readings >= 5, "the listener hears of it: {}", told.readings);

    let stub = refusing(1, |reply| reply.answer("429 Too Many Requests", "retry-after: 60\r\n", "later"));
    let begun = Instant::now();
    let error = whole(&mut connect(&stub)).1.unwrap_err().to_string();
    assert!(error.contains("429: later; it asks to wait 60 s"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn what_is_no_answer_is_an_error() {
    type Answer = fn(&mut Reply);
    let cases: [(&str, Answer, &[&str]); 8] = [
        (
            "401",
            |r| r.answer("401 Unauthorized", "", "{\"error\": \"wrong \\u001b[31mkey\"}"),
            &["401", "wrong [31mkey", "check the key"],
        ),
        ("500", |r| r.answer("500 Oops", "", &"x".repeat(5000)), &["500", "xxx…", "try again"]),
        (
            "redirect",
            |r| r.answer("302 Found", "location: http://elsewhere/\r\n", ""),
            &["points to http://elsewhere/"],
        ),
        (
            "html",
            |r| r.answer("200 OK", "content-type: text/html\r\n", "<html>hi</html>"),
            &["text/html", "<html>hi"],
        ),
        ("json", |r| r.json(&json!({"error": {"message": "no model"}})), &["application/json", "no model"]),
        (
            "no json",
            |r| {
                r.begin();
                r.raw("data: <p>\n\n");
            },
            &["JSON was expected", "<p>"],
        ),
        (
            "error within",
            |r| {
                r.begin();
                r.event(&json!({"error": "out of memory"}));
            },
            &["broke off: out of memory"],
        ),
        (
            "no http",
            |r| {
                r.raw("SSH-2.0-OpenSSH\r\n\r\n");
            },
            &["the connection broke"],
        ),
    ];
    for (name, answer, expected) in cases {
        let stub = fork(move |_, reply| answer(reply));
        let (told, finish) = whole(&mut connect(&stub));
        let error = finish.unwrap_err();
        assert_eq!(told.tokens.len(), 0, "{name}");
        for part in expected {
            assert!(error.why.contains(part), "{name}: {error}");
        }
        assert!(error.why.chars().count() < 500 && !error.why.contains('\u{1b}'), "{name}: {error}");
    }
}

#[test]
fn a_server_of_another_kind_is_told_apart() {
    type Answer = fn(&mut Reply);
    let cases: [(Answer, &str); 5] = [
        (
            |r| r.answer("200 OK", "", "<!doctype html><title>Router</title>"),
            "that is a web page: check the address",
        ),
        (|r| r.json(&json!({"models": []})), "is that KoboldCPP?"),
        (|r| r.json(&json!([1])), "is that KoboldCPP?"),
        (|r| r.not_found(), "does not know /api/v1/model"),
        (
            |r| r.raw("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{").then_some(()).unwrap(),
            "before the answer was whole",
        ),
    ];
    for (answer, expected) in cases {
        let stub = Stub::new(move |_, reply| answer(reply));
        let address = format!("kobold+http://127.0.0.1:{}", stub.port);
        let error = Remote::connect(&address, &Options::default()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = Remote::connect(&format!("kobold+http://127.0.0.1:{free}"), &Options::default()).unwrap_err();
    assert!(error.why.contains("check the address, and that the server runs"), "{error}");
}

#[test]
fn an_endless_line_is_refused() {
    let stub = fork(|_, reply| {
        reply.begin();
        let megabyte = vec![b'x'; 1 << 20];
        let fits = (0..200).take_while(|_| reply.raw(&megabyte)).count();
        reply.was_closed(fits < 200);
    });
    let error = whole(&mut connect(&stub)).1.unwrap_err().to_string();
    assert!(error.contains("a line of more than 67108864 bytes"), "{error}");
    assert!(stub.saw_close());
}

#[test]
fn silence_within_an_answer_is_an_error() {
    let stub = fork(|_, reply| {
        reply.begin();
        reply.event(&token(10, "a", Value::Null));
        reply.wait_for_close();
    });
    let options = Options { idle: Duration::from_millis(250), ..Options::default() };
    let mut model = Remote::connect(&format!("kobold+http://127.0.0.1:{}", stub.port), &options).unwrap();
    let (told, finish) = whole(&mut model);
    assert!(told.text() == "a" && finish.unwrap_err().why.contains("nothing came for"));
    assert!(stub.saw_close());
}

#[test]
fn stop_sequences_end_an_answer_whatever_the_server_does() {
    let stub = fork(|_, reply| {
        reply.begin();
        for (id, text) in [(10, "x</"), (11, "to"), (12, "ol>\n"), (13, "more")] {
            reply.event(&token(id, text, Value::Null));
        }
        reply.wait_for_close();
    });
    let sampling =
        Sampling { stop: vec![String::new(), "nothing".into(), "</tool>".into()], ..Sampling::default() };
    let (told, finish) = generate(&mut connect(&stub), &sampling, &Watch::nothing(), |_| false);
    assert_eq!((told.text().as_str(), finish), ("x</tool>\n", Ok(Finish::Stop)));
    assert!(stub.saw_close());
}

#[test]
fn an_answer_is_no_longer_than_was_asked() {
    let endless = || {
        fork(|_, reply| {
            reply.begin();
            let most = 100_000;
            let told = (0..most).take_while(|_| reply.event(&token(10, "a", Value::Null))).count();
            reply.was_closed(told < most);
        })
    };
    let stub = endless();
    let mut model = connect(&stub);
    let short = Sampling { max_tokens: 3, ..Sampling::default() };
    let (told, finish) = generate(&mut model, &short, &Watch::nothing(), |_| false);
    assert_eq!((told.text().as_str(), finish), ("aaa", Ok(Finish::Length)));
    assert!(stub.saw_close());
    let none = Sampling { max_tokens: 0, ..Sampling::default() };
    assert_eq!(generate(&mut model, &none, &Watch::nothing(), |_| false).1, Ok(Finish::Length));
    let long = Sampling { max_tokens: 510, ..Sampling::default() };
    let error = generate(&mut model, &long, &Watch::nothing(), |_| false).1.unwrap_err().to_string();
    assert!(error.contains("3 tokens and an answer of 510 do not fit the 512"), "{error}");
}

#[test]
fn special_names_are_special_only_where_they_should_be() {
    let stub = fork(|_, _| {});
    let mut model = connect(&stub);
    let text = "<|im_start|>user\nsay <|im_end|> or [INST] 😀<|im_end|>\n";
    let special = model.tokenize(text, true).unwrap();
    let plain = model.tokenize(text, false).unwrap();
    let shown = |pieces: &[Piece]| pieces.iter().map(|p| p.text.clone()).collect::<Vec<_>>().join("~");
    assert_eq!(shown(&special), "<|im_start|>~user\nsay~ ~<|im_end|>~ or~ [INST]~ ~~~😀~<|im_end|>~\n");
    assert_eq!(shown(&plain), "<~|im_start|>user\nsay~ ~<~|im_end|>~ or~ [~INST]~ ~~~😀~<~|im_end|>\n");
    let ids =
        |pieces: &[Piece]| pieces.iter().filter(|p| SPECIAL.iter().any(|(_, id)| *id == p.id.0)).count();
    assert_eq!((ids(&special), ids(&plain)), (3, 0));
    assert_eq!(special[0].id, TokenId(151_644));
    assert_eq!(model.tokenize("", false).unwrap(), []);
}

#[test]
fn a_tokenizer_that_is_silent_is_not_waited_for() {
    assert_eq!(Options::default().quick, Duration::from_secs(5));
    let silent = Arc::new(AtomicUsize::new(0));
    let asks = Arc::clone(&silent);
    let stub = Stub::new(move |asked, reply| match asked.path.as_str() {
        "/api/v1/model" => {
            reply.json(&json!({"model_name": "Qwen", "max_context_length": 512, "num_layers": 2}));
        }
        "/api/v1/tokenize" if asks.load(Ordering::SeqCst) > 0 => reply.wait_for_close(),
        "/api/v1/tokenize" => {
            reply.json(&json!({"tokens": [{"token_id": 1, "text": "a"}], "token_count": 1}));
        }
        STREAM => {
            reply.begin();
            reply.event(&token(2, "b", even(5)));
            reply.event(&done("length"));
        }
        _ => reply.not_found(),
    });
    let options = Options { quick: Duration::from_millis(300), ..Options::default() };
    let mut model = Remote::connect(&format!("kobold+http://127.0.0.1:{}", stub.port), &options).unwrap();
    silent.store(1, Ordering::SeqCst);
    let error = model.tokenize("a", true).unwrap_err();
    assert!(error.why.contains("no answer within 0.3 s"), "{error}");
}

#[test]
fn a_schema_is_translated_by_the_server() {
    let stub = fork(|asked, reply| match asked.path.as_str() {
        "/api/extra/json_to_grammar" => reply.json(&json!({"result": "root ::= \"x\"", "success": true})),
        _ => {
            reply.begin();
            reply.event(&done("stop"));
        }
    });
    let sampling =
        Sampling { form: Some(Form::Schema("{\"type\": \"object\"}".into())), ..Sampling::default() };
    let finish = generate(&mut connect(&stub), &sampling, &Watch::nothing(), |_| false).1;
    assert_eq!(finish, Ok(Finish::End));
    assert_eq!(stub.asked("/api/extra/json_to_grammar")[0].body, json!({"schema": {"type": "object"}}));
    assert_eq!(stub.asked(STREAM)[1].body["grammar"], json!("root ::= \"x\""));

    let stub = fork(|_, reply| reply.not_found());
    let error = generate(&mut connect(&stub), &sampling, &Watch::nothing(), |_| false).1.unwrap_err();
    assert!(error.why.contains("cannot keep to a schema"), "{error}");
}

/// A KoboldCPP that knows nothing of attention: ids without texts, a token put before every text, text streamed.
fn plain(script: impl Fn(&Asked, &mut Reply) + Send + Sync + 'static) -> Stub {
    Stub::new(move |asked, reply| match asked.path.as_str() {
        "/api/v1/model" => reply.json(&json!({"result": "koboldcpp/tiny"})),
        "/api/extra/true_max_context_length" => reply.json(&json!({"value": 4096})),
        "/api/extra/tokencount" => {
            let ids = tokens(asked.body["prompt"].as_str().unwrap()).into_iter().map(|(id, _)| id);
            let ids: Vec<u32> = [1].into_iter().chain(ids).collect();
            reply.json(&json!({"value": ids.len(), "ids": ids}));
        }
        "/api/extra/detokenize" => {
            let words = "so Hello you <|im_start|> 😀 Hel lo! |im_start|> <";
            let known: Vec<(u32, String)> =
                words.split(' ').flat_map(|w| [tokens(w), tokens(&format!(" {w}"))].concat()).collect();
            let id = asked.body["ids"][0].as_u64().unwrap() as u32;
            let text = known.iter().find(|(known, _)| *known == id).map_or("", |(_, text)| text);
            reply.json(&json!({"result": text, "success": true}));
        }
        STREAM => script(asked, reply),
        _ => reply.not_found(),
    })
}

#[test]
fn a_plain_server_is_spoken_to_in_text() {
    let stub = plain(|_, reply| {
        reply.begin();
        reply.event(&json!({"token": "Hello", "finish_reason": null}));
        reply.event(&json!({"token": " you 😀", "finish_reason": null}));
        reply.event(&json!({"token": "", "finish_reason": "length"}));
    });
    let mut model = connect(&stub);
    let info = model.info();
    assert_eq!((info.name.as_str(), info.context, info.attention), ("koboldcpp/tiny", 4096, false));
    let (told, finish) = whole(&mut model);
    assert_eq!((told.text().as_str(), finish), ("Hello you 😀", Ok(Finish::Length)));
    let expected: Vec<u32> = tokens("Hello").iter().chain(&tokens(" you 😀")).map(|(id, _)| *id).collect();
    assert_eq!(told.ids(), expected);
    let body = &stub.asked(STREAM)[0].body;
    assert_eq!(body["prompt"], json!("<|im_start|>user\nhi<|im_end|>\nso"));
    assert_eq!((body.get("input_ids"), body.get("output_attentions")), (None, None));
}

#[test]
fn a_plain_server_may_be_slow_stop_and_die() {
    let says = |text: &str| json!({"token": text, "finish_reason": null});
    let stub = plain(move |_, reply| {
        reply.begin();
        for byte in format!("event: message\ndata: {}\n\n", says("Hello 😀")).as_bytes().chunks(1) {
            reply.raw(byte);
        }
        reply.event(&json!({"token": "", "finish_reason": "stop"}));
    });
    let (told, finish) = whole(&mut connect(&stub));
    assert_eq!((told.text().as_str(), finish), ("Hello 😀", Ok(Finish::End)));

    let stub = plain(move |_, reply| {
        reply.begin();
        reply.event(&says("Hello"));
        reply.wait_for_close();
    });
    let enough = |told: &Told| !told.tokens.is_empty();
    let (told, finish) = generate(&mut connect(&stub), &Sampling::default(), &Watch::default(), enough);
    assert_eq!((told.text().as_str(), finish), ("Hello", Ok(Finish::Aborted)));
    assert!(stub.saw_close());

    let stub = plain(move |_, reply| {
        reply.begin();
        reply.event(&says("Hello"));
        reply.raw("data: {\"token\": \"yo");
    });
    let (told, finish) = whole(&mut connect(&stub));
    assert!(told.text() == "Hello" && finish.is_err(), "{finish:?}");
}

#[test]
fn a_plain_servers_tokens_are_laid_along_the_text() {
    let stub = plain(|_, _| {});
    let mut model = connect(&stub);
    let shown = |model: &mut Remote, text: &str, special| {
        let pieces = model.tokenize(text, special).unwrap();
        pieces.iter().map(|p| p.text.clone()).collect::<Vec<_>>().join("~")
    };
    assert_eq!(shown(&mut model, "Hello you 😀 you", true), "Hello~ you~ ~~~😀~ you");
    let asked = stub.asked("/api/extra/detokenize").len();
    assert_eq!(shown(&mut model, " you 😀Hello", true), " you~ ~~~😀~Hello");
    assert_eq!(stub.asked("/api/extra/detokenize").len(), asked, "what an id says is asked once");
    assert_eq!(shown(&mut model, "<|im_start|> you", true), "<|im_start|>~ you");
    assert_eq!(shown(&mut model, "<|im_start|> you", false), "<~|im_start|>~ you");
    // What nobody can lay anywhere is with the last token; nothing is lost.
    assert_eq!(shown(&mut model, "Hello unknown words", true), "Hello~~ unknown words");
}

#[test]
fn an_old_server_says_nothing_of_the_end() {
    let stub = plain(|_, reply| {
        reply.begin();
        reply.event(&json!({"token": "Hello"}));
    });
    let (told, finish) = whole(&mut connect(&stub));
    assert_eq!((told.text().as_str(), finish), ("Hello", Ok(Finish::End)));
    let stub = plain(|_, reply| {
        reply.begin();
        reply.event(&json!({"token": "Hello", "finish_reason": null}));
    });
    assert!(whole(&mut connect(&stub)).1.is_err(), "one that does has died");
}

#[test]
fn a_server_without_attention_is_believed_only_as_far_as_it_shows() {
    let model = json!({"model_name": "m", "max_context_length": 64});
    for (events, attention) in [
        (vec![json!({"token": "a", "finish_reason": null})], false),
        (vec![token(1, "a", Value::Null), token(2, "b", Value::Null)], false),
        (vec![token(1, "a", Value::Null), token(2, "b", even(5))], true),
        // It made one token and no more: that shows nothing.
        (vec![token(1, "a", Value::Null)], true),
    ] {
        let model = model.clone();
        let stub = Stub::new(move |asked, reply| match asked.path.as_str() {
            "/api/v1/model" => reply.json(&model),
            "/api/v1/tokenize" => {
                reply.json(&json!({"tokens": [{"token_id": 5, "text": "Once upon a time"}]}));
            }
            _ => {
                reply.begin();
                for event in &events {
                    reply.event(event);
                }
                reply.event(&done("length"));
            }
        });
        assert_eq!(connect(&stub).info().attention, attention);
    }
}
