//! The routes of llama-server: what the model is, tokens, templates, completions and embeddings.

use crate::fake::{FakeOptions, FakeServer, KNOWN_TOKENS, SPECIAL_TOKEN};
use halo_core::model::{OutputConstraint, SamplingParameter};
use serde_json::{Value, json};
use std::time::Duration;

fn check_error(status: u16, expected: u16, body: &Value, kind: &str, names: &str) {
    let error = &body["error"];
    assert_eq!(
        (status, &error["code"], &error["type"]),
        (expected, &json!(expected), &json!(kind)),
        "{body}"
    );
    assert!(error["message"].as_str().is_some_and(|message| message.contains(names)), "{names}: {body}");
}

#[tokio::test]
async fn llama_server_describes_model_and_slot() {
    let fake = FakeServer::in_memory();
    let props = fake.get("/props").await.json();
    assert_eq!(props["default_generation_settings"]["n_ctx"], 8192, "{props}");
    assert_eq!(props["default_generation_settings"]["params"]["n_predict"], 32, "{props}");
    assert_eq!((&props["total_slots"], &props["model_path"]), (&json!(1), &json!("scripted.gguf")));
    assert_eq!(props["chat_template"], "{{ messages }}");
    assert!(props["build_info"].as_str().is_some_and(|info| info.starts_with("halo-")), "{props}");
    let slots = fake.get("/slots").await.json();
    assert_eq!(slots, json!([{ "id": 0, "n_ctx": 8192, "speculative": false, "is_processing": false }]));
    assert_eq!(fake.get("/slots?fail_on_no_slot=1").await.status, 200);
    assert_eq!(fake.get("/lora-adapters").await.json(), json!([]));
    assert_eq!(fake.get("/health").await.json()["status"], "ok");
    for (method, path) in [("POST", "/slots/0?action=save"), ("POST", "/infill"), ("POST", "/rerank")] {
        let response = fake.request(method, path, &[], "{}").await;
        check_error(response.status, 501, &response.json(), "not_supported_error", "");
    }
    let wrong = fake.request("POST", "/props", &[], "{}").await;
    check_error(wrong.status, 405, &wrong.json(), "invalid_request_error", "/props does not accept POST");
}

#[tokio::test]
async fn llama_server_slots_can_fail_while_the_model_is_busy() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[&"word ".repeat(50)]);
    fake.script().token_delay = Duration::from_millis(10);
    let busy = async {
        loop {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let response = fake.get("/slots?fail_on_no_slot=1").await;
            if response.status != 200 {
                return (response, fake.get("/slots").await.json());
            }
        }
    };
    let request = json!({ "prompt": "Talk.", "n_predict": 30 });
    let (completed, (response, slots)) = tokio::join!(fake.post("/completion", &request), busy);
    assert_eq!(completed.status, 200);
    check_error(response.status, 503, &response.json(), "unavailable_error", "try again later");
    assert_eq!(slots[0]["is_processing"], true);
}

#[tokio::test]
async fn llama_server_tokenizes_and_detokenizes() {
    let fake = FakeServer::in_memory();
    let ids: Vec<u32> = KNOWN_TOKENS.iter().map(|text| fake.model.token_id(text).0).collect();
    let text = KNOWN_TOKENS[..4].concat();
    let tokens = fake.post("/tokenize", &json!({ "content": text })).await.json();
    assert_eq!(tokens, json!({ "tokens": ids[..4] }));
    let pieces = fake.post("/tokenize", &json!({ "content": text, "with_pieces": true })).await.json();
    assert_eq!(pieces["tokens"][1], json!({ "id": ids[1], "piece": " upon" }));
    let special = fake.post("/tokenize", &json!({ "content": SPECIAL_TOKEN })).await.json();
    assert_eq!(special["tokens"], json!([ids[4]]));
    let detokenized = fake.post("/detokenize", &json!({ "tokens": ids[..4] })).await.json();
    assert_eq!(detokenized, json!({ "content": text }));
    for (path, body, names) in [
        ("/tokenize", json!({}), "content"),
        ("/tokenize", json!({ "content": 7 }), "content"),
        ("/detokenize", json!({ "tokens": [12345] }), "there is no token 12345"),
        ("/detokenize", json!({ "tokens": "a" }), "tokens"),
    ] {
        let response = fake.post(path, &body).await;
        check_error(response.status, 400, &response.json(), "invalid_request_error", names);
    }
}

/// The template frames the messages; neither a system prompt nor a date is added.
#[tokio::test]
async fn llama_server_applies_the_template() {
    let fake = FakeServer::in_memory();
    let messages = json!([{ "role": "user", "content": "Hello <there>" }]);
    let prompt = fake.post("/apply-template", &json!({ "messages": messages })).await;
    let prompt = prompt.json()["prompt"].as_str().unwrap_or_default().to_owned();
    assert!(prompt.contains("Hello <there>"), "{prompt}");
    let messages = json!([
        { "role": "system", "content": "Be brief." },
        { "role": "user", "content": "Hello" },
        { "role": "assistant", "content": "Hi." },
        { "role": "user", "content": "How are you?" },
    ]);
    let full = fake.post("/apply-template", &json!({ "messages": messages })).await.json();
    let full = full["prompt"].as_str().unwrap_or_default().to_owned();
    let at = |part: &str| full.find(part).unwrap_or_else(|| panic!("no {part} in {full}"));
    assert!(
        at("Be brief.") < at("Hello") && at("Hello") < at("Hi.") && at("Hi.") < at("How are you?"),
        "{full}"
    );
    let refused = fake.post("/apply-template", &json!({ "messages": [] })).await;
    check_error(refused.status, 400, &refused.json(), "invalid_request_error", "the last message");
    assert_eq!(fake.halo_api("GET", "/conversations", None).await.1, json!([]));
}

#[tokio::test]
async fn llama_server_completes_texts_and_tokens() {
    let fake = FakeServer::in_memory();
    let ids: Vec<u32> = KNOWN_TOKENS[..4].iter().map(|text| fake.model.token_id(text).0).collect();
    for prompt in [
        json!("Once upon a time"),
        json!(["Once upon a time"]),
        json!(ids),
        json!([ids[0], " upon a", ids[3]]),
    ] {
        fake.script_answers(&[" there was END"]);
        let body = json!({ "prompt": prompt, "n_predict": 9, "stop": ["END"], "cache_prompt": true });
        let response = fake.post("/completion", &body).await;
        let json = response.json();
        assert_eq!((response.status, &json["content"]), (200, &json!(" there was ")), "{json}");
        assert_eq!(
            (&json["stop"], &json["stop_type"], &json["stopping_word"]),
            (&json!(true), &json!("word"), &json!("END"))
        );
        assert_eq!(
            (&json["tokens_evaluated"], &json["prompt"]),
            (&json!(4), &json!("Once upon a time")),
            "{json}"
        );
        assert_eq!(json["timings"]["prompt_n"], 4, "{json}");
        assert_eq!(json["generation_settings"]["n_predict"], 9);
        assert!(json["timings"]["predicted_per_second"].is_number(), "{json}");
    }
    let limited = fake.post("/completion", &json!({ "prompt": "Once", "n_predict": 2 })).await.json();
    assert_eq!(
        (&limited["stop_type"], &limited["tokens_predicted"]),
        (&json!("limit"), &json!(2)),
        "{limited}"
    );
    let schema = json!({ "type": "array" });
    fake.post(
        "/completion",
        &json!({ "prompt": "Once", "json_schema": schema, "temperature": 0.5, "top_k": 3 }),
    )
    .await;
    let sampling = fake.script().samplings.pop().expect("the model was asked");
    assert_eq!(sampling.constraint, Some(OutputConstraint::JsonSchema(schema.to_string())));
    assert_eq!(
        (sampling.temperature, sampling.top_k, sampling.max_tokens),
        (0.5, 3, 8191),
        "as much as fits"
    );
    assert_eq!(fake.halo_api("GET", "/conversations", None).await.1, json!([]), "nothing is stored");
}

#[tokio::test]
async fn llama_server_streams_completions() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[" there was a king"]);
    let (events, clean) = fake.stream("/completion", &json!({ "prompt": "Once", "stream": true })).await;
    let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect();
    let text: String = events.iter().filter_map(|event| event["content"].as_str()).collect();
    assert_eq!((text.as_str(), clean), (" there was a king", true));
    let (last, tokens) = events.split_last().expect("events");
    assert!(tokens.iter().all(|event| event["stop"] == false), "{events:?}");
    assert_eq!(
        (&last["stop"], &last["stop_type"], &last["tokens_predicted"]),
        (&json!(true), &json!("eos"), &json!(4))
    );
    assert_eq!(last["timings"]["predicted_n"], 4, "{last}");
}

#[tokio::test]
async fn llama_server_returns_probabilities_whole_and_streamed() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[" there was"; 3]);
    let body = json!({ "prompt": "Once", "n_probs": 2 });
    let whole = fake.post("/completion", &body).await.json();
    let tokens = whole["completion_probabilities"].as_array().cloned().unwrap_or_default();
    let texts: Vec<&str> = tokens.iter().filter_map(|token| token["token"].as_str()).collect();
    assert_eq!(texts, [" there", " was"], "{whole}");
    assert!(tokens.iter().all(|token| token["id"].is_u64() && token["logprob"] == -0.5), "{whole}");
    assert_eq!(tokens[0]["top_logprobs"].as_array().map(Vec::len), Some(2), "{whole}");
    assert_eq!(whole["generation_settings"]["n_probs"], 2);
    let (events, _) =
        fake.stream("/completion", &json!({ "prompt": "Once", "n_probs": 2, "stream": true })).await;
    let streamed: Vec<Value> = (events.iter())
        .map(|event| serde_json::from_str::<Value>(event).expect("JSON"))
        .filter_map(|event| event["completion_probabilities"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(streamed, tokens);
    let without = fake.post("/completion", &json!({ "prompt": "Once" })).await.json();
    assert_eq!(without.get("completion_probabilities"), None);
    assert_eq!(without["generation_settings"]["n_predict"], -1, "as much as fits");
}

#[tokio::test]
async fn llama_server_refuses_what_it_cannot_do() {
    let fake = FakeServer::in_memory();
    fake.script().unsupported = vec![SamplingParameter::Dry];
    for (fields, names) in [
        (json!({}), "prompt is missing"),
        (json!({ "prompt": "" }), "the prompt is empty"),
        (json!({ "prompt": [[1], 2] }), "prompt must be"),
        (json!({ "prompt": { "prompt_string": "a" } }), "prompt must be"),
        (json!({ "prompt": [12345] }), "there is no token 12345"),
        (json!({ "prompt": "a", "n_predict": -5 }), "n_predict is -5"),
        (json!({ "prompt": "a", "temperature": -1 }), "temperature is -1"),
        (json!({ "prompt": "a", "top_p": "x" }), "top_p"),
        (
            json!({ "prompt": "a", "grammar": "root ::= \"a\"", "json_schema": { "type": "array" } }),
            "both set",
        ),
        (json!({ "prompt": "a", "n_probs": 50 }), "n_probs is 50"),
        (json!({ "prompt": "a", "mirostat": 7 }), "mirostat is 7"),
        (json!({ "prompt": "a", "logit_bias": [[1, "x"]] }), "logit_bias is"),
        (json!({ "prompt": "a", "image_data": [{}] }), "image_data is not supported"),
        (json!({ "prompt": "a", "lora": [{ "id": 0 }] }), "lora is not supported"),
        (json!({ "prompt": "a", "return_tokens": true }), "return_tokens is not supported"),
        (
            json!({ "prompt": "a", "dry_multiplier": 0.5 }),
            "dry_multiplier is not supported by this remote model",
        ),
        (json!({ "prompt": "a", "json_schema": { "type": "unheard of" } }), "json_schema"),
    ] {
        let response = fake.post("/completion", &fields).await;
        check_error(response.status, 400, &response.json(), "invalid_request_error", names);
    }
    let neutral = json!({ "prompt": "a", "grammar": "", "n_probs": 0, "logit_bias": [], "mirostat": null, "typical_p": 1.0 });
    assert_eq!(fake.post("/completion", &neutral).await.status, 200);
    let long = fake.post("/completion", &json!({ "prompt": "word ".repeat(9000) })).await;
    check_error(long.status, 400, &long.json(), "exceed_context_size_error", "do not fit in 8192");
}

#[tokio::test]
async fn llama_server_embeds_texts() {
    let fake = FakeServer::with_options(FakeOptions { embedder: true, ..FakeOptions::default() });
    for path in ["/embedding", "/embeddings"] {
        let list = fake.post(path, &json!({ "content": ["red apple", "pie"] })).await.json();
        assert_eq!((list.as_array().map(Vec::len), &list[1]["index"]), (Some(2), &json!(1)), "{list}");
        assert_eq!(list[0]["embedding"][0].as_array().map(Vec::len), Some(64));
        let one = fake.post(path, &json!({ "input": "red apple" })).await.json();
        assert_eq!(one[0]["embedding"], list[0]["embedding"]);
    }
    let empty = fake.post("/embedding", &json!({ "content": "" })).await;
    check_error(empty.status, 400, &empty.json(), "invalid_request_error", "content has an empty text");
}

#[tokio::test]
async fn query_that_cannot_be_read_is_refused_in_llama_server_format() {
    let fake = FakeServer::in_memory();
    let refused = fake.get("/slots?fail_on_no_slot=perhaps").await;
    let error = refused.json()["error"].clone();
    assert_eq!((refused.status, &error["code"]), (400, &json!(400)), "{error}");
    assert_eq!(error["type"], "invalid_request_error", "{error}");
    assert!(error["message"].as_str().is_some_and(|text| text.contains("fail_on_no_slot")), "{error}");
}
