//! OpenAI's API: chat, completions, embeddings and models, their parameters and their errors.

use crate::chat::chat_body;
use crate::fake::{FakeOptions, FakeResponse, FakeServer, KNOWN_TOKENS};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use halo_core::Error;
use halo_core::model::OutputConstraint;
use halo_server::ServerLimits;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const EMBEDDINGS: &str = "/v1/embeddings";

fn with(mut body: Value, mut fields: Value) -> Value {
    let (body_fields, fields) = (body.as_object_mut(), fields.as_object_mut());
    body_fields.expect("an object").append(fields.expect("an object"));
    body
}

fn hello() -> Value {
    chat_body(&["u Hello"])
}

/// The events of a stream that ended with `[DONE]`, as JSON.
async fn stream_events(fake: &FakeServer, path: &str, body: &Value) -> Vec<Value> {
    let (mut events, clean) = fake.stream(path, body).await;
    assert!(clean, "{events:?}");
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
}

#[tokio::test]
async fn models_list_the_one_model() {
    let fake = FakeServer::in_memory();
    let list = fake.get("/v1/models").await;
    let meta = json!({ "n_ctx": 8192, "n_ctx_train": 4096, "n_vocab": 0, "n_embd": 0, "size": 1000 });
    let model = json!({
        "id": "scripted", "object": "model", "created": 1_700_000_000, "owned_by": "halo",
        "max_model_len": 8192, "context_length": 8192, "meta": meta,
    });
    assert_eq!((list.status, list.json()), (200, json!({ "object": "list", "data": [model] })));
    let one = fake.get("/v1/models/scripted").await;
    assert_eq!((one.status, one.json()), (200, model));
    let missing = fake.get("/v1/models/gpt-4").await;
    let error = &missing.json()["error"];
    assert_eq!((missing.status, &error["code"]), (404, &json!("model_not_found")), "{error}");
    assert!(error["message"].as_str().is_some_and(|message| message.contains("gpt-4")), "{error}");
}

#[tokio::test]
async fn chat_returns_a_completion_with_usage() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["Good day to you."]);
    let response = fake.chat(&hello(), Some("Anna's chat")).await;
    assert_eq!((response.status, response.conversation.as_str()), (200, "Anna's chat"));
    let body = &response.body;
    assert_eq!((&body["object"], &body["model"]), (&json!("chat.completion"), &json!("scripted")), "{body}");
    assert!(body["id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-")), "{body}");
    assert!(body["created"].as_i64().is_some_and(|at| at > 1_700_000_000), "{body}");
    let choice = &body["choices"][0];
    let message = json!({ "role": "assistant", "content": "Good day to you.", "refusal": null });
    assert_eq!(choice["message"], message, "{body}");
    assert_eq!((&choice["finish_reason"], &choice["index"]), (&json!("stop"), &json!(0)));
    let usage = json!({
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": { "cached_tokens": 0 },
    });
    assert_eq!(body["usage"], usage, "a system prompt of two tokens, and one of the message");
    assert_eq!(
        (&body["timings"]["prompt_n"], &body["timings"]["predicted_n"]),
        (&json!(3), &json!(4)),
        "{body}"
    );
    assert!(body["system_fingerprint"].as_str().is_some_and(|print| print.starts_with("fp_")), "{body}");
}

#[tokio::test]
async fn chat_streams_role_text_finish_and_usage() {
    let fake = FakeServer::in_memory();
    for store in [true, false] {
        fake.script_answers(&["Good day to you."]);
        let fields = json!({ "stream": true, "stream_options": { "include_usage": true }, "store": store });
        let events = stream_events(&fake, CHAT, &with(hello(), fields)).await;
        assert_eq!(events[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
        let text: String =
            events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(text, "Good day to you.");
        let finished: Vec<&Value> = events
            .iter()
            .map(|event| &event["choices"][0]["finish_reason"])
            .filter(|f| !f.is_null())
            .collect();
        assert_eq!(finished, [&json!("stop")]);
        assert!(events.iter().all(|event| event["object"] == "chat.completion.chunk"));
        assert!(events.iter().all(|event| event["id"] == events[0]["id"]), "one id for all chunks");
        let usages: Vec<&Value> =
            events.iter().map(|event| &event["usage"]).filter(|u| !u.is_null()).collect();
        assert_eq!(usages.len(), 1, "{events:?}");
        assert_eq!(usages[0]["completion_tokens"], 4);
        assert_eq!(events.last().expect("an event")["timings"]["predicted_n"], 4, "{events:?}");
    }
    // Usage is sent only on request.
    let events = stream_events(&fake, CHAT, &with(hello(), json!({ "stream": true }))).await;
    assert!(events.iter().all(|event| event["usage"].is_null()), "{events:?}");
    let timed = events.iter().filter(|event| !event["timings"].is_null()).count();
    assert_eq!(timed, 1, "the last chunk has the timings: {events:?}");
    assert!(events.iter().all(|event| event["system_fingerprint"] == events[0]["system_fingerprint"]));
}

#[tokio::test]
async fn chat_parameters_reach_the_model() {
    let fake = FakeServer::in_memory();
    let fields = json!({
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.25, "stop": ["END", ""],
        "response_format": { "type": "json_object" },
    });
    assert_eq!(fake.chat(&with(hello(), fields), None).await.status, 200);
    let sampling = fake.script().samplings[0].clone();
    assert_eq!(sampling.max_tokens, 9);
    assert_eq!((sampling.temperature, sampling.top_p), (0.5, 0.25));
    assert_eq!(sampling.stop, ["END"], "an empty stop sequence is ignored");
    assert_eq!(sampling.constraint, Some(OutputConstraint::JsonSchema("{\"type\":\"object\"}".into())));
    let fields = json!({
        "max_completion_tokens": 3,
        "response_format": { "type": "json_schema", "json_schema": { "schema": { "type": "array" } } },
    });
    let response = fake.chat(&with(hello(), fields), None).await;
    assert_eq!(response.body["choices"][0]["finish_reason"], "length", "{}", response.body);
    let sampling = fake.script().samplings[1].clone();
    assert_eq!(sampling.constraint, Some(OutputConstraint::JsonSchema("{\"type\":\"array\"}".into())));
    assert_eq!((sampling.max_tokens, sampling.temperature), (3, 0.0), "the default of the settings");
}

/// Each turn mixes its number into the seed, so that two turns differ.
#[tokio::test]
async fn chat_seed_is_reproducible() {
    let mut seeds = Vec::new();
    for seed in [42, 42, 43] {
        let fake = FakeServer::in_memory();
        fake.chat(&with(hello(), json!({ "seed": seed })), Some("main")).await;
        seeds.push(fake.script().samplings[0].seed);
    }
    assert_eq!(seeds[0], seeds[1]);
    assert_ne!(seeds[0], seeds[2]);
}

#[tokio::test]
async fn chat_removes_stop_sequences_from_the_answer() {
    let fake = FakeServer::in_memory();
    for fields in [json!({ "stop": " END" }), json!({ "stop": [" END"], "store": false })] {
        fake.script_answers(&["The answer END and more"]);
        let response = fake.chat(&with(hello(), fields.clone()), None).await;
        assert_eq!((response.status, response.text().as_str()), (200, "The answer"), "{fields}");
    }
    fake.script_answers(&["The answer END and more"]);
    let events = stream_events(&fake, CHAT, &with(hello(), json!({ "stop": " END", "stream": true }))).await;
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "The answer");
}

#[tokio::test]
async fn chat_accepts_content_parts_and_roles() {
    let fake = FakeServer::in_memory();
    let body = json!({ "messages": [
        { "role": "developer", "content": "Be formal." },
        { "role": "user", "content": [{ "type": "text", "text": "Look " }, { "type": "text", "text": "here" }] },
        { "role": "assistant", "content": null },
        { "role": "tool", "content": "42" },
    ] });
    assert_eq!(fake.chat(&body, None).await.status, 200);
    let window = fake.script().windows[0].clone();
    assert!(window.contains("system: Be formal.") && window.contains("user: Look here"), "{window}");
    assert!(window.contains("tool: 42"), "{window}");
}

#[tokio::test]
async fn chat_rejects_invalid_requests() {
    let fake = FakeServer::in_memory();
    let user = json!({ "role": "user", "content": "Hi" });
    let cases = [
        (json!({}), "messages", ""),
        (json!({ "messages": "Hi" }), "messages", "messages"),
        (json!({ "messages": [] }), "the last message must be a user message", ""),
        (
            json!({ "messages": [{ "role": "user", "content": " " }] }),
            "the last message must be a user message",
            "",
        ),
        (json!({ "messages": [{ "content": "Hi" }] }), "role", "messages[0]"),
        (
            json!({ "messages": [user, { "role": "narrator", "content": "Hi" }] }),
            "messages[1]: unknown role 'narrator'",
            "messages",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }] }),
            "messages[0]: content of type image_url",
            "messages",
        ),
        (with(hello(), json!({ "n": 0 })), "n is 0", "n"),
        (with(hello(), json!({ "n": 17 })), "n is 17", "n"),
        (
            with(hello(), json!({ "logprobs": true, "top_logprobs": 21 })),
            "top_logprobs is 21",
            "top_logprobs",
        ),
        (with(hello(), json!({ "temperature": 5.1 })), "temperature is 5.1", "temperature"),
        (with(hello(), json!({ "temperature": -1 })), "temperature is -1", "temperature"),
        (with(hello(), json!({ "top_p": 1.5 })), "top_p is 1.5", "top_p"),
        (with(hello(), json!({ "max_tokens": 0 })), "max_tokens is 0", "max_tokens"),
        (
            with(hello(), json!({ "max_completion_tokens": -5 })),
            "max_completion_tokens is -5",
            "max_completion_tokens",
        ),
        (with(hello(), json!({ "tool_choice": "required" })), "tool_choice", "tool_choice"),
        (with(hello(), json!({ "tool_choice": { "type": "function" } })), "tool_choice", "tool_choice"),
        (
            with(hello(), json!({ "response_format": { "type": "xml" } })),
            "response_format 'xml'",
            "response_format",
        ),
        (
            with(hello(), json!({ "response_format": { "type": "json_schema" } })),
            "response_format.json_schema.schema is missing",
            "response_format",
        ),
    ];
    for (body, names, param) in cases {
        for stream in [false, true] {
            let response = fake.post(CHAT, &with(body.clone(), json!({ "stream": stream }))).await;
            let mut body = response.json();
            check_param(&mut body, param);
            check_error(&body, (response.status, 400), names, &Value::Null);
        }
    }
    let list = fake.halo_api("GET", "/conversations", None).await.1;
    assert_eq!(list, json!([]), "nothing was stored");
}

/// Checks that an error names its parameter, and removes the name.
fn check_param(body: &mut Value, param: &str) {
    let expected = if param.is_empty() { Value::Null } else { json!(param) };
    assert_eq!(body["error"]["param"], expected, "{body}");
    assert_eq!(body["error"]["code"].is_string(), !param.is_empty(), "{body}");
    body["error"]["param"] = Value::Null;
    body["error"]["code"] = Value::Null;
}

/// An error in the format of OpenAI.
fn check_error(body: &Value, (status, expected): (u16, u16), names: &str, code: &Value) {
    assert_eq!(status, expected, "{body}");
    let error = &body["error"];
    let kind = if status < 500 { "invalid_request_error" } else { "server_error" };
    assert!(error["message"].as_str().is_some_and(|message| message.contains(names)), "{names}: {body}");
    assert_eq!((&error["type"], &error["code"]), (&json!(kind), code), "{body}");
    // The parameter is one that the message names; null where no parameter is wrong.
    let param = error.get("param").unwrap_or_else(|| panic!("no param in {body}"));
    let is_named = |param: &str| error["message"].as_str().is_some_and(|message| message.contains(param));
    assert!(param.is_null() || param.as_str().is_some_and(is_named), "{body}");
}

#[tokio::test]
async fn openai_rejects_malformed_and_large_bodies() {
    let fake = FakeServer::with_limits(ServerLimits { max_body_bytes: 200, ..ServerLimits::default() });
    for path in [CHAT, COMPLETIONS, EMBEDDINGS] {
        for body in ["{", "", "[]", "null"] {
            let response = fake.request("POST", path, &[], body).await;
            check_error(&response.json(), (response.status, 400), "invalid JSON body", &Value::Null);
        }
        let response = fake.request("POST", path, &[], " ".repeat(201)).await;
        check_error(
            &response.json(),
            (response.status, 413),
            "the request body cannot be read",
            &Value::Null,
        );
    }
}

/// Paths and methods that do not exist below /v1 answer in OpenAI's format; all others in Halo's.
#[tokio::test]
async fn openai_unknown_paths_answer_in_its_format() {
    let fake = FakeServer::in_memory();
    let openai_error = |response: FakeResponse, status: u16, code: Value, part: &str| {
        let error = response.json()["error"].clone();
        assert_eq!(
            (response.status, &error["type"], &error["param"], &error["code"]),
            (status, &json!("invalid_request_error"), &Value::Null, &code),
            "{error}"
        );
        assert!(error["message"].as_str().is_some_and(|message| message.contains(part)), "{part}: {error}");
    };
    for path in ["/v1/nothing", "/v1/chat", "/v1", "/v1/audio/speech", "/v1/chat/completions/x"] {
        openai_error(fake.get(path).await, 404, json!("not_found"), &format!("no route GET {path}"));
        let posted = fake.request("POST", path, &[], "{}").await;
        openai_error(posted, 404, json!("not_found"), &format!("no route POST {path}"));
    }
    for path in [CHAT, COMPLETIONS, EMBEDDINGS] {
        for method in ["GET", "PUT", "DELETE"] {
            let response = fake.request(method, path, &[], "").await;
            openai_error(response, 405, Value::Null, &format!("{path} does not accept {method}"));
        }
    }
    openai_error(fake.request("POST", "/v1/models", &[], "").await, 405, Value::Null, "does not accept POST");
    for path in ["/v2/models", "/v1x", "/api/halo/nothing"] {
        let response = fake.get(path).await;
        let error = response.json()["error"].clone();
        assert!(response.status == 404 && error.as_str().is_some_and(|text| text.contains(path)), "{error}");
    }
}

#[tokio::test]
async fn openai_reports_context_length_exceeded() {
    let fake = FakeServer::in_memory();
    let text = vec!["word"; 9000].join(" ");
    let chat = chat_body(&[&format!("u {text}")]);
    let code = json!("context_length_exceeded");
    for fields in [
        json!({}),
        json!({ "stream": true }),
        json!({ "store": false }),
        json!({ "store": false, "stream": true }),
    ] {
        let response = fake.post(CHAT, &with(chat.clone(), fields)).await;
        check_error(&response.json(), (response.status, 400), "context length exceeded", &code);
    }
    for stream in [false, true] {
        let response = fake.post(COMPLETIONS, &json!({ "prompt": text, "stream": stream })).await;
        check_error(&response.json(), (response.status, 400), "9000 tokens do not fit in 8192", &code);
    }
}

/// An edited message that does not fit is refused, and the message that it would replace stays.
#[tokio::test]
async fn chat_edit_that_does_not_fit_replaces_nothing() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["The Nile, or the Amazon; people argue about it.", "Yes."]);
    let question = "u Which is the longest river of the whole world?";
    let answer = "a The Nile, or the Amazon; people argue about it.";
    fake.chat(&chat_body(&[question]), Some("main")).await;
    fake.chat(&chat_body(&[question, answer, "u Sure?"]), Some("main")).await;
    let before = fake.halo_api("GET", "/conversations/main", None).await.1["chunks"].clone();
    let edited = format!("u {}", vec!["word"; 9000].join(" "));
    let response = fake.chat(&chat_body(&[question, answer, &edited]), Some("main")).await;
    assert_eq!(response.status, 400, "{}", response.body);
    assert_eq!(fake.halo_api("GET", "/conversations/main", None).await.1["chunks"], before);
}

#[tokio::test]
async fn openai_reports_errors_of_the_model_by_their_kind() {
    let fake = FakeServer::in_memory();
    let errors = [
        (Error::internal("generating", "the model broke down"), 500, Value::Null),
        (Error::invalid_input("compiling the schema", "the schema is no object"), 400, Value::Null),
        (Error::unavailable("reaching the model", "connection refused"), 503, json!("overloaded")),
        (
            Error::context_length_exceeded("decoding", "no cells are free"),
            400,
            json!("context_length_exceeded"),
        ),
    ];
    for (error, status, code) in errors {
        for (path, body) in [
            (CHAT, hello()),
            (CHAT, with(hello(), json!({ "store": false }))),
            (COMPLETIONS, json!({ "prompt": "Once" })),
            (COMPLETIONS, json!({ "prompt": "Once", "stream": true })),
        ] {
            fake.script_error_after("", error.clone());
            let response = fake.post(path, &body).await;
            check_error(&response.json(), (response.status, status), &error.message, &code);
        }
    }
}

#[tokio::test]
async fn chat_names_conversations_by_header() {
    let fake = FakeServer::in_memory();
    for (sent, stored) in [("plain name", "plain name"), ("caf%C3%A9", "café"), ("50%", "50%")] {
        let response = fake.chat(&hello(), Some(sent)).await;
        assert_eq!(response.status, 200, "{sent}: {}", response.body);
        let encoded: String = stored.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let state = fake.halo_api("GET", &format!("/conversations/{encoded}"), None).await.1;
        assert_eq!(state["name"], stored, "{sent}");
    }
    let long = "n".repeat(201);
    for invalid in ["%0A", "%20", long.as_str()] {
        let response = fake.chat(&hello(), Some(invalid)).await;
        check_error(&response.body, (response.status, 400), "the name of the conversation", &Value::Null);
    }
    let response = fake.request("POST", CHAT, &[("x-halo-conversation", "é")], hello().to_string()).await;
    check_error(&response.json(), (response.status, 400), "x-halo-conversation must be ASCII", &Value::Null);
}

#[tokio::test]
async fn completions_return_text_and_usage() {
    let fake = FakeServer::in_memory();
    let tokens: Vec<u32> = KNOWN_TOKENS[..4].iter().map(|text| fake.model.token_id(text).0).collect();
    for (prompt, echoed) in [
        (json!("Once upon a time"), "Once upon a time there was"),
        (json!(["Once upon a time"]), "Once upon a time there was"),
        (json!(tokens), "Once upon a time there was"),
        (json!([tokens]), "Once upon a time there was"),
    ] {
        for (echo, expected) in [(false, " there was"), (true, echoed)] {
            fake.script_answers(&[" there was"]);
            let response = fake.post(COMPLETIONS, &json!({ "prompt": prompt, "echo": echo })).await;
            let body = response.json();
            assert_eq!((response.status, &body["object"]), (200, &json!("text_completion")), "{body}");
            assert_eq!(body["choices"][0]["text"], expected, "{prompt}");
            assert_eq!(body["choices"][0]["finish_reason"], "stop");
            assert_eq!(
                body["usage"],
                json!({
                    "prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6,
                    "prompt_tokens_details": { "cached_tokens": 0 },
                })
            );
            assert_eq!(body["timings"]["predicted_n"], 2, "{body}");
            assert!(body["id"].as_str().is_some_and(|id| id.starts_with("cmpl-")), "{body}");
        }
    }
    assert_eq!(fake.halo_api("GET", "/conversations", None).await.1, json!([]), "nothing is stored");
}

#[tokio::test]
async fn completions_stream_text() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[" there was a king"]);
    let body = json!({
        "prompt": "Once", "stream": true, "echo": true, "max_tokens": 3, "stream_options": { "include_usage": true },
    });
    let events = stream_events(&fake, COMPLETIONS, &body).await;
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "Once there was a");
    let [.., end, last] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!((&end["choices"][0]["finish_reason"], &end["usage"]), (&json!("length"), &Value::Null));
    assert_eq!((&last["choices"], &last["usage"]["total_tokens"]), (&json!([]), &json!(4)));
}

#[tokio::test]
async fn completions_reject_invalid_requests() {
    let fake = FakeServer::in_memory();
    for (body, names, param) in [
        (json!({}), "prompt", ""),
        (json!({ "prompt": 7 }), "prompt", "prompt"),
        (json!({ "prompt": "" }), "the prompt is empty", "prompt"),
        (json!({ "prompt": ["a", ""] }), "the prompt is empty", "prompt"),
        (json!({ "prompt": [] }), "the prompt is empty", "prompt"),
        (json!({ "prompt": vec!["a"; 65] }), "65 prompts", "prompt"),
        (json!({ "prompt": vec![[1]; 65] }), "65 prompts", "prompt"),
        (json!({ "prompt": "Once", "echo": true, "logprobs": 1 }), "echo with logprobs", "echo"),
        (json!({ "prompt": "Once", "suffix": "end" }), "suffix is not supported", "suffix"),
        (json!({ "prompt": "Once", "best_of": 2 }), "best_of is not supported", "best_of"),
        (json!({ "prompt": [12345] }), "there is no token 12345", "prompt"),
        (json!({ "prompt": "Once", "top_p": 2 }), "top_p is 2", "top_p"),
        (json!({ "prompt": "Once", "n": 0 }), "n is 0", "n"),
    ] {
        let response = fake.post(COMPLETIONS, &body).await;
        let mut body = response.json();
        check_param(&mut body, param);
        check_error(&body, (response.status, 400), names, &Value::Null);
    }
}

#[tokio::test]
async fn embeddings_return_vectors_as_floats_or_base64() {
    let fake = FakeServer::with_options(FakeOptions { embedder: true, ..FakeOptions::default() });
    let response = fake.post(EMBEDDINGS, &json!({ "input": ["red apple", "green apple pie"] })).await;
    let body = response.json();
    assert_eq!((response.status, &body["object"]), (200, &json!("list")), "{body}");
    assert_eq!(body["model"], "words in 64 buckets");
    assert_eq!(body["usage"], json!({ "prompt_tokens": 5, "total_tokens": 5 }));
    assert_eq!(body["data"].as_array().map(Vec::len), Some(2));
    assert_eq!((&body["data"][1]["index"], &body["data"][1]["object"]), (&json!(1), &json!("embedding")));
    let floats: Vec<f32> = serde_json::from_value(body["data"][0]["embedding"].clone()).expect("floats");
    let norm: f32 = floats.iter().map(|x| x * x).sum();
    assert!(floats.len() == 64 && (norm - 1.0).abs() < 1e-5, "{floats:?}");
    let encoded = fake.post(EMBEDDINGS, &json!({ "input": "red apple", "encoding_format": "base64" })).await;
    let encoded = encoded.json()["data"][0]["embedding"].as_str().unwrap_or_default().to_owned();
    let bytes = BASE64_STANDARD.decode(encoded).expect("base64");
    let decoded: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    assert_eq!(decoded, floats);
}

#[tokio::test]
async fn embeddings_reject_invalid_requests() {
    let fake = FakeServer::with_options(FakeOptions { embedder: true, ..FakeOptions::default() });
    for (body, names) in [
        (json!({}), "input"),
        (json!({ "input": 5 }), "input"),
        (json!({ "input": [] }), "input has 0 texts; it must have 1 to 2048"),
        (json!({ "input": "" }), "input has an empty text, number 1"),
        (json!({ "input": ["a", ""] }), "input has an empty text, number 2"),
        (json!({ "input": vec!["a"; 2049] }), "input has 2049 texts; it must have 1 to 2048"),
        (json!({ "input": [4_000_000_000_u32] }), "input: there is no such token in cl100k_base"),
        (json!({ "input": "a", "dimensions": 65 }), "dimensions is 65; it must be from 1 to 64"),
        (json!({ "input": "a", "dimensions": 0 }), "dimensions is 0"),
        (json!({ "input": "a", "encoding_format": "hex" }), "encoding_format 'hex'"),
    ] {
        let response = fake.post(EMBEDDINGS, &body).await;
        check_error(&response.json(), (response.status, 400), names, &json!("invalid_value"));
    }
    let without = FakeServer::in_memory().post(EMBEDDINGS, &json!({ "input": "a" })).await;
    check_error(&without.json(), (without.status, 501), "there is no embedder", &Value::Null);
}

#[tokio::test]
async fn embeddings_take_token_ids_and_dimensions() {
    let fake = FakeServer::with_options(FakeOptions { embedder: true, ..FakeOptions::default() });
    let embed = async |body: Value| {
        let response = fake.post(EMBEDDINGS, &body).await;
        assert_eq!(response.status, 200, "{body}: {}", response.text());
        response.json()["data"].clone()
    };
    // Token ids are those of cl100k_base, which OpenAI's clients tokenize with.
    let ids = [12805, 5304, 264, 892];
    let text = embed(json!({ "input": "Once upon a time" })).await;
    assert_eq!(embed(json!({ "input": ids })).await, text);
    let both = embed(json!({ "input": [ids, ids[..1]] })).await;
    assert_eq!((&both[0]["embedding"], both.as_array().map(Vec::len)), (&text[0]["embedding"], Some(2)));
    let short =
        embed(json!({ "input": "Once upon a time there was a king who liked tea", "dimensions": 16 })).await;
    let short: Vec<f32> = serde_json::from_value(short[0]["embedding"].clone()).expect("floats");
    let norm: f32 = short.iter().map(|x| x * x).sum();
    assert!(short.len() == 16 && (norm - 1.0).abs() < 1e-5, "{short:?}");
}

/// The fake embedder reads 256 words. No text is cut in silence.
#[tokio::test]
async fn embeddings_refuse_texts_that_are_too_long() {
    let fake = FakeServer::with_options(FakeOptions { embedder: true, ..FakeOptions::default() });
    let response = fake.post(EMBEDDINGS, &json!({ "input": ["a", "tea ".repeat(257)] })).await;
    check_error(
        &response.json(),
        (response.status, 400),
        "input: text number 2 has 257 tokens, and the embedder words in 64 buckets reads 256",
        &json!("context_length_exceeded"),
    );
    assert_eq!(fake.post(EMBEDDINGS, &json!({ "input": "tea ".repeat(256) })).await.status, 200);
}

#[tokio::test]
async fn trailing_slashes_are_accepted() {
    let fake = FakeServer::with_options(FakeOptions { embedder: true, ..FakeOptions::default() });
    for path in
        ["/v1/models/", "/v1/models/scripted/", "/api/tags/", "/api/v1/model//", "/api/halo/v1/status/"]
    {
        assert_eq!(fake.get(path).await.status, 200, "{path}");
    }
    assert_eq!(fake.post("/v1/chat/completions/", &hello()).await.status, 200);
    let conversation = fake.halo_api("GET", "/conversations", None).await.1[0]["name"].clone();
    let path =
        format!("/api/halo/v1/conversations/{}/search/?q=Hello", conversation.as_str().unwrap_or_default());
    assert_eq!(fake.get(&path).await.status, 200, "the query is kept");
    assert_eq!(fake.get("/v1/").await.status, 404);
}

/// A refused request stores nothing: OpenAI's clients send it again.
#[tokio::test]
async fn chat_checks_names_and_schemas_before_anything_is_stored() {
    let fake = FakeServer::in_memory();
    let conversations = async || fake.halo_api("GET", "/conversations", None).await.1;
    let send = async |name: &str, body: &Value| {
        let headers = [("x-halo-conversation", name), ("content-type", "application/json")];
        let response = fake.request("POST", CHAT, &headers, body.to_string()).await;
        (response.status, response.json())
    };
    let long = "%C3%A4".repeat(150);
    for (name, problem) in [
        ("", "is empty"),
        ("%20", "is empty"),
        ("%20x", "begins or ends with a space"),
        ("a%0Ab", "U+000A"),
        ("a%E2%80%AEb", "U+202E"),
        ("a%E2%81%A6b", "U+2066"),
        ("world:village", "begins with 'world:'"),
        (long.as_str(), "has 300 bytes; at most 200 are allowed"),
    ] {
        let (status, body) = send(name, &chat_body(&["u Hello"])).await;
        check_error(&body, (status, 400), problem, &Value::Null);
        check_error(&body, (status, 400), "x-halo-conversation", &Value::Null);
    }
    for schema in [json!("text"), json!([1]), json!({ "type": "unheard of" })] {
        let mut body = chat_body(&["u Hello"]);
        body["response_format"] = json!({ "type": "json_schema", "json_schema": { "schema": schema } });
        for name in ["main", "none"] {
            let (status, mut body) = send(name, &body).await;
            assert_eq!(body["error"]["param"].take(), "response_format");
            check_error(&body, (status, 400), "response_format: ", &json!("invalid_value"));
        }
    }
    assert_eq!(conversations().await, json!([]), "nothing was stored");
    assert!(fake.script().windows.is_empty(), "the model was not asked");
    let mut body = chat_body(&["u \u{200f}שלום\u{202e} world"]);
    body["response_format"] = json!({ "type": "json_object" });
    let response = fake.post(CHAT, &body).await;
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(conversations().await[0]["name"], "שלום world", "a title has no invisible characters");
}
