//! An OpenAI-compatible server, as a scripted stub.

use crate::stub::{StubReply, StubRequest, StubServer};
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    ChatTemplate, FinishReason, Model, ModelStep, OutputConstraint, Prompt, PromptMessage, Sampling,
    SamplingParameter, StepFlow, UNLIMITED_TOKENS,
};
use halo_core::token::{Position, Role, TokenId};
use halo_core::tool_call::{CallFormat, ToolChoice, ToolDefinition, ToolOptions};
use halo_core::{Error, ErrorKind};
use halo_remote::{RemoteModel, RemoteOptions, approximate_tokens, may_send_key};
use serde_json::{Value, json};
use std::io::Write;
use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

const CHAT_PATH: &str = "/v1/chat/completions";

fn openai_server(
    models: Value,
    script: impl Fn(&StubRequest, &mut StubReply) + Send + Sync + 'static,
) -> StubServer {
    StubServer::new(move |request, reply| match request.path.as_str() {
        "/v1/models" if models.is_null() => reply.not_found(),
        "/v1/models" => reply.json(&models),
        CHAT_PATH => script(request, reply),
        _ => reply.not_found(),
    })
}

fn models_list() -> Value {
    json!({"data": [{"id": "other", "context_length": 1}, {"id": "m/1", "max_model_len": 32768}]})
}

fn connect(stub: &StubServer) -> RemoteModel {
    let address = format!("openai+http://127.0.0.1:{}/v1#m/1", stub.port);
    RemoteModel::connect(&address, &RemoteOptions::default()).unwrap()
}

fn delta_event(text: &str) -> Value {
    json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]})
}

fn finish_event(reason: &str) -> Value {
    json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
}

/// A server that streams the deltas and ends with the finish reason.
fn streaming_server(deltas: &'static [&'static str], reason: &'static str) -> StubServer {
    openai_server(models_list(), move |_, reply| {
        reply.begin_stream();
        for text in deltas {
            reply.event(&delta_event(text));
        }
        reply.event(&finish_event(reason));
        reply.write_raw("data: [DONE]\n\n");
    })
}

fn generate(
    model: &mut RemoteModel,
    sampling: &Sampling,
    last: &str,
    mut stop: impl FnMut(usize, usize) -> bool,
) -> (Vec<String>, Result<FinishReason, Error>) {
    let messages = || {
        let message = |role, text: &str| PromptMessage { role, text: text.into() };
        vec![message(Role::System, "Be brief."), message(Role::User, "Hi"), message(Role::Assistant, last)]
    };
    let prompt = Prompt {
        conversation: "c",
        window: &[],
        messages: &messages,
        next_position: Position(0),
        ephemeral: false,
    };
    let (mut texts, mut waiting_steps) = (Vec::new(), 0);
    let finish = model.generate(&prompt, sampling, &AttentionRequest::default(), &mut |step| {
        match step {
            ModelStep::Token(token, attention) => {
                assert!(attention.is_none());
                assert_eq!(approximate_tokens(&token.text)[0].id, token.id, "equal texts have equal ids");
                texts.push(token.text.clone());
            }
            _ => waiting_steps += 1,
        }
        if stop(texts.len(), waiting_steps) { StepFlow::Stop } else { StepFlow::Continue }
    });
    (texts, finish)
}

fn generate_text(stub: &StubServer, sampling: &Sampling) -> (String, Result<FinishReason, Error>) {
    let (texts, finish) = generate(&mut connect(stub), sampling, "", |_, _| false);
    (texts.concat(), finish)
}

#[test]
fn openai_answer_is_split_into_approximate_tokens() {
    let stub = streaming_server(&["Hel", "lo wor", "ld, it is 😀", " 20", "24"], "stop");
    let mut model = connect(&stub);
    let info = model.info().clone();
    assert_eq!((info.name.as_str(), info.context, info.attention), ("m/1", 32768, false));
    assert_eq!(info.template, ChatTemplate::default());
    let (texts, finish) = generate(&mut model, &Sampling::default(), "", |_, _| false);
    assert_eq!(finish, Ok(FinishReason::EndOfText));
    assert_eq!(texts, ["Hello", " world", ",", " it", " is", " 😀", " ", "202", "4"]);
    let tokens = model.tokenize("Hello world, it is 😀 2024", false).unwrap();
    assert_eq!(tokens.iter().map(|token| token.text.as_str()).collect::<Vec<_>>(), texts);
}

/// Functions, calls and results go to the server as its API has them, and calls come back as text.
#[test]
fn openai_functions_are_passed_through() {
    let stub = openai_server(models_list(), |_, reply| {
        reply.begin_stream();
        let call = |function: Value| json!({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "x", "function": function}]}}]});
        reply.event(&call(json!({"name": "clock", "arguments": ""})));
        reply.event(&call(json!({"arguments": "{\"zone\": "})));
        reply.event(&call(json!({"arguments": "\"CET\"}"})));
        reply.event(&finish_event("tool_calls"));
        reply.write_raw("data: [DONE]\n\n");
    });
    let tool = ToolDefinition {
        name: "clock".into(),
        function: "{\"name\": \"clock\", \"parameters\": {\"type\": \"object\"}}".into(),
        parameters: "{\"type\": \"object\"}".into(),
    };
    let options = ToolOptions {
        tools: vec![tool],
        choice: ToolChoice::Required,
        parallel: false,
        format: CallFormat::default(),
        answer_schema: None,
    };
    let sampling =
        Sampling { constraint: Some(OutputConstraint::ToolCalls(Box::new(options))), ..Sampling::default() };
    let (text, finish) = generate_text(&stub, &sampling);
    assert_eq!(finish, Ok(FinishReason::EndOfText));
    assert_eq!(text, "<tool_call>\n{\"name\": \"clock\", \"arguments\": {\"zone\": \"CET\"}}\n</tool_call>");
    let body = &stub.requests(CHAT_PATH)[0].body;
    let function = json!({"name": "clock", "parameters": {"type": "object"}});
    assert_eq!(body["tools"], json!([{"type": "function", "function": function}]));
    assert_eq!((&body["tool_choice"], &body["parallel_tool_calls"]), (&json!("required"), &json!(false)));
    assert_eq!(body.get("response_format"), None);
}

#[test]
fn openai_request_follows_the_api() {
    let stub = streaming_server(&["x"], "stop");
    let mut model = connect(&stub);
    let sampling = Sampling {
        stop: ["a", "", "b", "c", "d", "e"].map(str::to_owned).to_vec(),
        constraint: Some(OutputConstraint::JsonSchema("{\"type\": \"object\"}".into())),
        temperature: 0.5,
        seed: u64::MAX,
        ..Sampling::default()
    };
    generate(&mut model, &sampling, "", |_, _| false).1.unwrap();
    generate(&mut model, &Sampling::default(), "So", |_, _| false).1.unwrap();
    let requests = stub.requests(CHAT_PATH);
    let body = &requests[0].body;
    assert_eq!((&body["model"], &body["stream"]), (&json!("m/1"), &json!(true)));
    assert_eq!((&body["max_tokens"], &body["temperature"]), (&json!(50), &json!(0.5)));
    assert_eq!(body["seed"], json!(i64::MAX));
    assert_eq!(body["stop"], json!(["a", "b", "c", "d"]), "servers refuse more than four stop sequences");
    assert_eq!(body["response_format"]["type"], json!("json_schema"));
    assert_eq!(body["response_format"]["json_schema"]["schema"], json!({"type": "object"}));
    assert_eq!(body.get("top_k"), None);
    let expected = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
    assert_eq!(body["messages"], expected, "an empty answer is not sent");
    let body = &requests[1].body;
    assert_eq!(
        body["messages"][2],
        json!({"role": "assistant", "content": "So"}),
        "the server continues an answer that has begun"
    );
    assert_eq!((body.get("stop"), body.get("response_format")), (None, None));

    // An answer that may fill the context has no maximum: the server knows the exact length of the prompt.
    let unlimited = Sampling {
        max_tokens: UNLIMITED_TOKENS,
        presence_penalty: 0.5,
        logit_bias: vec![(TokenId(7), f32::NEG_INFINITY)],
        ..Sampling::default()
    };
    generate(&mut model, &unlimited, "", |_, _| false).1.unwrap();
    let requests = stub.requests(CHAT_PATH);
    let body = &requests[2].body;
    assert_eq!((body.get("max_tokens"), body.get("frequency_penalty")), (None, None));
    assert_eq!((&body["presence_penalty"], &body["logit_bias"]), (&json!(0.5), &json!({"7": -100.0})));
    assert!(model.supports(SamplingParameter::PresencePenalty) && !model.supports(SamplingParameter::TopK));

    let invalid =
        Sampling { constraint: Some(OutputConstraint::JsonSchema("{".into())), ..Sampling::default() };
    let error = generate(&mut model, &invalid, "", |_, _| false).1.unwrap_err();
    assert!(error.message.contains("not valid JSON"), "{error}");
}

#[test]
fn openai_finish_reasons_and_stop_sequences() {
    let stops = |stops: &[&str]| Sampling {
        stop: stops.iter().map(|s| (*s).to_owned()).collect(),
        ..Sampling::default()
    };
    let five = stops(&["1", "2", "3", "4", "</tool>"]);
    let cases = [
        (streaming_server(&["a b"], "length"), Sampling::default(), "a b", FinishReason::Length),
        (streaming_server(&["a b"], "content_filter"), Sampling::default(), "a b", FinishReason::EndOfText),
        // The fifth stop sequence is not sent to the server, but enforced here.
        (streaming_server(&["a</to", "ol> and more"], "stop"), five, "a</tool>", FinishReason::StopSequence),
        (
            streaming_server(&["a b c d"], "stop"),
            Sampling { max_tokens: 2, ..Sampling::default() },
            "a b",
            FinishReason::Length,
        ),
        (
            streaming_server(&["a b"], "stop"),
            Sampling { max_tokens: 2, ..Sampling::default() },
            "a b",
            FinishReason::EndOfText,
        ),
    ];
    for (stub, sampling, text, finish) in cases {
        assert_eq!(generate_text(&stub, &sampling), (text.to_owned(), Ok(finish)));
    }
    // Where the server reports the stop sequence that it has cut off, the answer gets it back.
    let stub = openai_server(models_list(), |_, reply| {
        reply.begin_stream();
        reply.event(&delta_event("a"));
        let mut end = finish_event("stop");
        end["choices"][0]["stop_reason"] = json!("</tool>");
        reply.event(&end);
    });
    assert_eq!(
        generate_text(&stub, &stops(&["</tool>"])),
        ("a</tool>".to_owned(), Ok(FinishReason::StopSequence))
    );
    assert_eq!(generate_text(&stub, &stops(&["x"])), ("a".to_owned(), Ok(FinishReason::EndOfText)));
}

#[test]
fn openai_stream_may_split_characters() {
    let stub = openai_server(models_list(), |_, reply| {
        reply.begin_stream();
        let event = format!("data: {}\r\n\r\n", delta_event("é 😀 谢"));
        for byte in event.as_bytes().chunks(1) {
            reply.write_raw(byte);
        }
        reply.event(&finish_event("stop"));
    });
    let (text, finish) = generate_text(&stub, &Sampling::default());
    assert_eq!((text.as_str(), finish), ("é 😀 谢", Ok(FinishReason::EndOfText)));
}

#[test]
fn openai_cancel_closes_the_connection() {
    let stub = openai_server(models_list(), |_, reply| {
        reply.begin_stream();
        reply.event(&delta_event("a b c"));
        reply.wait_for_close();
    });
    let (texts, finish) = generate(&mut connect(&stub), &Sampling::default(), "", |count, _| count == 2);
    assert_eq!((texts.concat().as_str(), finish), ("a b", Ok(FinishReason::Cancelled)));
    assert!(stub.saw_close());
    let stub = openai_server(models_list(), |_, reply| reply.wait_for_close());
    let (texts, finish) = generate(&mut connect(&stub), &Sampling::default(), "", |_, steps| steps == 2);
    assert_eq!((texts.len(), finish), (0, Ok(FinishReason::Cancelled)));
    assert!(stub.saw_close());
}

#[test]
fn openai_errors_are_reported() {
    type OpenAiStreamReply = fn(&mut StubReply);
    let cases: [(OpenAiStreamReply, &str, &str); 5] = [
        (
            |r| {
                r.begin_stream();
                r.event(&delta_event("a b"));
            },
            "a b",
            "before the answer was complete",
        ),
        (
            |r| {
                r.begin_stream();
                r.event(&delta_event("a b"));
                r.event(&json!({"error": {"message": "overloaded"}}));
            },
            "a",
            "stopped with an error: overloaded",
        ),
        (
            |r| r.respond("401 Unauthorized", "", "{\"error\": {\"message\": \"No key\"}}"),
            "",
            "401: No key; check the key",
        ),
        (
            |r| r.respond("404 Not Found", "", "{\"error\": {\"message\": \"no such model\"}}"),
            "",
            "no such model; check the address, and the model's name",
        ),
        (|r| r.respond("200 OK", "content-type: text/html\r\n", "<html>"), "", "text/html came: <html>"),
    ];
    for (answer, expected_text, expected_error) in cases {
        let stub = openai_server(models_list(), move |_, reply| answer(reply));
        let (text, finish) = generate_text(&stub, &Sampling::default());
        let error = finish.unwrap_err().to_string();
        assert!(text == expected_text && error.contains(expected_error), "{text:?} {error}");
    }
}

#[test]
fn openai_error_kind_follows_status_and_code() {
    let cases = [
        ("401 Unauthorized", "", ErrorKind::Unavailable),
        ("429 Too Many Requests", "", ErrorKind::Busy),
        ("503 Service Unavailable", "", ErrorKind::Busy),
        ("500 Oops", "", ErrorKind::Unavailable),
        ("400 Bad Request", "{\"error\": {\"message\": \"too long\"}}", ErrorKind::Unavailable),
        (
            "400 Bad Request",
            "{\"error\": {\"message\": \"x\", \"code\": \"context_length_exceeded\"}}",
            ErrorKind::ContextLengthExceeded,
        ),
        (
            "400 Bad Request",
            "{\"error\": {\"code\": 400, \"message\": \"x\", \"type\": \"exceed_context_size_error\"}}",
            ErrorKind::ContextLengthExceeded,
        ),
    ];
    std::thread::scope(|scope| {
        for (status, body, kind) in cases {
            scope.spawn(move || {
                let stub = openai_server(models_list(), move |_, reply| {
                    reply.respond(status, "retry-after: 60\r\n", body);
                });
                let error = generate_text(&stub, &Sampling::default()).1.unwrap_err();
                assert_eq!(error.kind, kind, "{status} {error}");
            });
        }
    });
    let stub = openai_server(models_list(), |_, reply| {
        reply.begin_stream();
        reply.event(&json!({"error": {"message": "x", "code": "context_length_exceeded"}}));
    });
    let error = generate_text(&stub, &Sampling::default()).1.unwrap_err();
    assert_eq!(error.kind, ErrorKind::ContextLengthExceeded, "{error}");
}

#[test]
fn openai_context_from_server_or_options() {
    let context = |models: Value, options: &RemoteOptions| {
        let stub = openai_server(models, |_, _| {});
        let address = format!("openai+http://127.0.0.1:{}/v1/#m", stub.port);
        RemoteModel::connect(&address, options).unwrap().info().context
    };
    let (default, limited) =
        (RemoteOptions::default(), RemoteOptions { context: Some(100), ..RemoteOptions::default() });
    let cases = [
        (json!({"data": [{"id": "m", "context_length": 1000}]}), 1000),
        (json!({"data": [{"id": "m", "context_window": 2000}]}), 2000),
        (json!({"data": [{"id": "m"}]}), 8192),
        (json!({"data": [{"id": "x", "context_length": 1000}]}), 8192),
        (Value::Null, 8192),
    ];
    for (models, expected) in cases {
        assert_eq!(context(models.clone(), &default), expected, "{models}");
        assert_eq!(context(models, &limited), 100);
    }
}

#[test]
fn openai_model_name_is_required_unless_single() {
    let connect = |models: Value| {
        let stub = openai_server(models, |_, _| {});
        RemoteModel::connect(&format!("openai+http://127.0.0.1:{}/v1", stub.port), &RemoteOptions::default())
    };
    let only = connect(json!({"data": [{"id": "only"}]})).unwrap();
    assert_eq!(only.info().name, "only");
    let error = connect(models_list()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidInput);
    assert!(error.message.contains("the server has other, m/1"), "{error}");
    assert!(connect(Value::Null).unwrap_err().message.contains("behind a #"));
}

#[test]
fn openai_key_is_sent_only_over_https_or_loopback() {
    for (https, host, allowed) in [
        (true, "api.example.org", true),
        (true, "192.0.2.1", true),
        (false, "localhost", true),
        (false, "LOCALHOST", true),
        (false, "127.0.0.1", true),
        (false, "127.1.2.3", true),
        (false, "::1", true),
        (false, "[::1]", true),
        (false, "192.168.1.5", false),
        (false, "0.0.0.0", false),
        (false, "localhost.example.org", false),
        (false, "127.0.0.1.example.org", false),
        (false, "api.example.org", false),
        (false, "", false),
    ] {
        assert_eq!(may_send_key(https, host), allowed, "{https} {host}");
    }
}

/// A running program cannot change its environment, so the test runs itself as a child process.
#[test]
fn openai_key_from_env_is_never_shown() {
    const KEY: &str = "sk-secret-0123456789";
    if let Ok(port) = std::env::var("HALO_TEST_PORT") {
        let error =
            RemoteModel::connect("openai+http://192.0.2.1:9/v1#m", &RemoteOptions::default()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidInput);
        let error = error.to_string();
        assert!(error.contains("use https") && !error.contains("secret"), "{error}");
        let address = format!("openai+http://localhost:{port}/v1#m/1");
        let mut model = RemoteModel::connect(&address, &RemoteOptions::default()).unwrap();
        let error = generate(&mut model, &Sampling::default(), "", |_, _| false).1.unwrap_err().to_string();
        assert!(error.contains("no such key: …") && !error.contains("secret"), "{error}");
        assert!(!format!("{model:?} {:?}", halo_remote::openai_key_from_env()).contains("secret"));
        return;
    }
    let stub = openai_server(models_list(), |_, reply| {
        reply.respond(
            "401 Unauthorized",
            "",
            &format!("{{\"error\": {{\"message\": \"no such key: {KEY}\"}}}}"),
        );
    });
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "openai::openai_key_from_env_is_never_shown"])
        .env("HALO_TEST_PORT", stub.port.to_string())
        .env("HALO_OPENAI_KEY", KEY)
        .env("OPENAI_API_KEY", "another")
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    assert_eq!(stub.requests(CHAT_PATH)[0].header("authorization"), format!("Bearer {KEY}"));
    assert_eq!(stub.requests("/v1/models")[0].header("authorization"), format!("Bearer {KEY}"));
}

#[test]
fn openai_https_failure_is_not_retried() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("openai+https://{}/v1#m", listener.local_addr().unwrap());
    let connections = std::thread::spawn(move || {
        let mut count = 0;
        listener.set_nonblocking(true).unwrap();
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(1500) {
            match listener.accept() {
                Ok((mut stream, _)) => {
                    count += 1;
                    stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        count
    });
    let error = RemoteModel::connect(&address, &RemoteOptions::default()).unwrap_err();
    let connections = connections.join().unwrap();
    if error.message.contains("no root certificates") {
        return; // This system cannot use https at all.
    }
    assert!(error.message.contains("no secure connection"), "{error}");
    assert_eq!((error.kind, connections), (ErrorKind::Unavailable, 1));
}

#[test]
fn openai_model_list_request_times_out() {
    let stub = StubServer::new(|_, reply| reply.wait_for_close());
    let options = RemoteOptions { request_timeout: Duration::from_millis(200), ..RemoteOptions::default() };
    let error =
        RemoteModel::connect(&format!("openai+http://127.0.0.1:{}/v1#m", stub.port), &options).unwrap_err();
    assert!(error.message.contains("no answer within 0.2 s"), "{error}");
    assert!(stub.saw_close());
}
