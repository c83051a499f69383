//! KoboldCPP's API.

use crate::fake::{FakeOptions, FakeServer, KNOWN_TOKENS, SPECIAL_TOKEN};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use halo_core::Error;
use serde_json::{Value, json};
use std::time::Duration;

const GENERATE: &str = "/api/v1/generate";
const STREAM: &str = "/api/extra/generate/stream";

async fn get(fake: &FakeServer, path: &str) -> Value {
    let response = fake.get(path).await;
    assert_eq!(response.status, 200, "{path}: {}", response.text());
    response.json()
}

async fn post(fake: &FakeServer, path: &str, body: Value) -> Value {
    let response = fake.post(path, &body).await;
    assert_eq!(response.status, 200, "{path} {body}: {}", response.text());
    response.json()
}

#[tokio::test]
async fn kobold_describes_model_and_limits() {
    let fake = FakeServer::in_memory();
    for version in ["/api/v1", "/api/latest"] {
        let model = get(&fake, &format!("{version}/model")).await;
        assert_eq!(
            (&model["result"], &model["model_name"]),
            (&json!("koboldcpp/scripted"), &json!("scripted"))
        );
        assert_eq!((&model["num_layers"], &model["num_attention_heads"]), (&json!(2), &json!(4)), "{model}");
        assert_eq!(
            (&model["max_context_length"], &model["max_trained_context"]),
            (&json!(8192), &json!(4096))
        );
        assert_eq!(model["eos_token_id"], 7);
        assert_eq!(get(&fake, &format!("{version}/info/version")).await, json!({ "result": "1.2.5" }));
        assert_eq!(
            get(&fake, &format!("{version}/config/max_context_length")).await,
            json!({ "value": 8192 })
        );
        assert_eq!(get(&fake, &format!("{version}/config/max_length")).await, json!({ "value": 32 }));
    }
    assert_eq!(get(&fake, "/api/extra/true_max_context_length").await, json!({ "value": 8192 }));
    let version = get(&fake, "/api/extra/version").await;
    assert_eq!((&version["result"], &version["attention"]), (&json!("KoboldCpp"), &json!(true)));
    let perf = get(&fake, "/api/extra/perf").await;
    assert_eq!((&perf["idle"], &perf["queue"]), (&json!(1), &json!(0)), "{perf}");
}

#[tokio::test]
async fn kobold_tokenizes_and_detokenizes() {
    let fake = FakeServer::in_memory();
    let ids: Vec<u32> = KNOWN_TOKENS.iter().map(|text| fake.model.token_id(text).0).collect();
    let text = KNOWN_TOKENS[..4].concat();
    for version in ["/api/v1", "/api/latest"] {
        for field in ["text", "content", "prompt"] {
            let tokens = post(&fake, &format!("{version}/tokenize"), json!({ field: text })).await;
            assert_eq!(
                (&tokens["token_count"], &tokens["token_ids"]),
                (&json!(4), &json!(ids[..4])),
                "{tokens}"
            );
            assert_eq!(tokens["tokens"][1], json!({ "token_id": ids[1], "text": " upon" }));
        }
        for field in ["token_ids", "ids"] {
            let decoded = post(&fake, &format!("{version}/detokenize"), json!({ field: ids[..4] })).await;
            assert_eq!(decoded, json!({ "text": text }));
        }
    }
    let special = post(&fake, "/api/v1/tokenize", json!({ "text": SPECIAL_TOKEN })).await;
    assert_eq!(special["tokens"][0]["text"], "", "clients do not see special tokens");
    let count = post(&fake, "/api/extra/tokencount", json!({ "prompt": text })).await;
    assert_eq!(count, json!({ "value": 4, "ids": ids[..4] }));
    let decoded = post(&fake, "/api/extra/detokenize", json!({ "ids": ids[..4] })).await;
    assert_eq!(decoded, json!({ "result": text, "success": true }));
}

#[tokio::test]
async fn kobold_generates_text() {
    let fake = FakeServer::in_memory();
    let ids: Vec<u32> = KNOWN_TOKENS[..4].iter().map(|text| fake.model.token_id(text).0).collect();
    for (path, body, text, finish) in [
        (GENERATE, json!({ "prompt": "Once" }), " there was a STOP king", "stop"),
        ("/api/latest/generate", json!({ "prompt": "Once", "max_length": 2 }), " there was", "length"),
        (GENERATE, json!({ "input_ids": ids }), " there was a STOP king", "stop"),
        (GENERATE, json!({ "prompt": "Once", "stop_sequence": [" STOP", ""] }), " there was a", "stop"),
        (
            GENERATE,
            json!({ "prompt": "Once", "stop_sequence": [" STOP"], "trim_stop": false }),
            " there was a STOP",
            "stop",
        ),
    ] {
        fake.script_answers(&[" there was a STOP king"]);
        let result = post(&fake, path, body.clone()).await["results"][0].clone();
        assert_eq!((&result["text"], &result["finish_reason"]), (&json!(text), &json!(finish)), "{body}");
        assert!(result["completion_tokens"].as_u64().is_some_and(|tokens| tokens > 1), "{result}");
    }
    assert_eq!(fake.halo_api("GET", "/conversations", None).await.1, json!([]), "nothing is stored");
}

#[tokio::test]
async fn kobold_parameters_reach_the_model() {
    let fake = FakeServer::in_memory();
    let body = json!({
        "prompt": "Once", "max_length": 5, "temperature": 1.5, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "rep_pen": 1.2,
        "sampler_seed": 3, "unknown": true,
    });
    post(&fake, GENERATE, body).await;
    let sampling = fake.script().samplings[0].clone();
    assert_eq!((sampling.max_tokens, sampling.top_k, sampling.seed), (5, 7, 3));
    assert_eq!((sampling.temperature, sampling.top_p, sampling.min_p), (1.5, 0.5, 0.1));
    assert_eq!(sampling.repetition_penalty, 1.2);
    // Clients send values that mean `off`.
    post(&fake, GENERATE, json!({ "prompt": "Once", "top_p": -1, "rep_pen": 0, "top_k": -1 })).await;
    let sampling = fake.script().samplings[1].clone();
    assert_eq!((sampling.repetition_penalty, sampling.max_tokens), (1.0, 32));
}

#[tokio::test]
async fn kobold_rejects_invalid_requests() {
    let fake = FakeServer::with_options(FakeOptions { vocab_size: 1000, ..FakeOptions::default() });
    let long = vec!["word"; 9000].join(" ");
    for (path, body, names) in [
        (GENERATE, json!({}), "the prompt is empty"),
        (GENERATE, json!({ "prompt": 7 }), "prompt"),
        (GENERATE, json!({ "prompt": "Once", "max_length": 0 }), "max_length"),
        (GENERATE, json!({ "prompt": "Once", "max_length": "many" }), "max_length"),
        (GENERATE, json!({ "prompt": "Once", "temperature": -1 }), "temperature is -1"),
        (GENERATE, json!({ "prompt": "Once", "temperature": 101 }), "temperature is 101"),
        (GENERATE, json!({ "input_ids": [5, 1000] }), "there is no token 1000"),
        (GENERATE, json!({ "prompt": long }), "context length exceeded"),
        (STREAM, json!({ "prompt": "" }), "the prompt is empty"),
        (STREAM, json!({ "prompt": long }), "context length exceeded"),
        ("/api/v1/generate/preview", json!({}), "No cached context available"),
        ("/api/v1/tokenize", json!({}), "text"),
        ("/api/v1/detokenize", json!({ "token_ids": [1] }), "there is no token 1"),
        ("/api/v1/detokenize", json!({ "token_ids": ["x"] }), "token_ids"),
        ("/api/extra/detokenize", json!({ "ids": [1] }), "there is no token 1"),
        ("/api/extra/tokencount", json!({ "words": "a" }), "text"),
    ] {
        let response = fake.post(path, &body).await;
        assert_eq!(response.status, 400, "{path} {:.100}: {}", body.to_string(), response.text());
        let message = response.json()["error"].as_str().unwrap_or_default().to_owned();
        assert!(message.contains(names), "{path}: {names} is not in {message}");
    }
    for path in [GENERATE, STREAM, "/api/v1/tokenize", "/api/extra/tokencount", "/api/v1/generate/preview"] {
        let response = fake.request("POST", path, &[], "{").await;
        assert_eq!(response.status, 400, "{path}: {}", response.text());
        assert_eq!(fake.request("DELETE", path, &[], "").await.status, 405, "{path}");
    }
    assert_eq!(fake.get("/api/v1/nothing").await.status, 404);
    assert_eq!(fake.get("/api/v2/model").await.status, 404);
    fake.script_error_after("", Error::unavailable("reaching the model", "connection refused"));
    assert_eq!(fake.post(GENERATE, &json!({ "prompt": "Once" })).await.status, 503);
}

#[tokio::test]
async fn kobold_streams_tokens() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[" there was END here"]);
    let body = json!({ "prompt": "Once", "stop_sequence": [" END"] });
    let (events, clean) = fake.stream(STREAM, &body).await;
    let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect();
    let text: String = events.iter().filter_map(|event| event["token"].as_str()).collect();
    assert!(clean);
    assert_eq!(text, " there was");
    assert_eq!(events[events.len() - 1]["finish_reason"], "stop");
    let response = fake.request("POST", STREAM, &[], json!({ "prompt": "Once" }).to_string()).await;
    assert_eq!(response.header("content-type"), "text/event-stream");
    assert!(response.text().starts_with("event: message\ndata: {"), "{}", response.text());
}

#[tokio::test]
async fn kobold_streams_attention() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[" there was"]);
    let body = json!({ "prompt": "Once upon a time", "output_attentions": true, "request_id": "r1" });
    let (events, _) = fake.stream(STREAM, &body).await;
    let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect();
    assert_eq!(events.len(), 3);
    for (n, text) in [" there", " was"].into_iter().enumerate() {
        let event = &events[n];
        assert_eq!((&event["type"], &event["token"]["text"]), (&json!("token"), &json!(text)), "{event}");
        assert_eq!((&event["attention"]["shape"], &event["request_id"]), (&json!([4 + n]), &json!("r1")));
        let data = event["attention"]["data"].as_str().unwrap_or_default();
        let bytes = BASE64_STANDARD.decode(data).expect("base64");
        let row: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        assert!(row.len() == 4 + n && (row.iter().sum::<f32>() - 1.0).abs() < 1e-5, "{row:?}");
    }
    let done = json!({ "type": "done", "finish_reason": "stop", "total_tokens": 6, "request_id": "r1" });
    assert_eq!(events[2], done);
}

#[tokio::test]
async fn kobold_preview_continues_the_last_completion() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[" there was", " a king", " a queen"]);
    post(&fake, GENERATE, json!({ "prompt": "Once" })).await;
    assert_eq!(
        get(&fake, "/api/extra/generate/check").await,
        json!({ "results": [{ "text": " there was" }] })
    );
    let body = json!({ "append_tokens": [{ "token_id": 5 }], "max_tokens": 1 });
    let preview = post(&fake, "/api/latest/generate/preview", body).await;
    assert_eq!((&preview["text"], &preview["token_count"]), (&json!(" a"), &json!(1)), "{preview}");
    assert_eq!(preview["stopped_reason"], "max_tokens");
    let preview = post(&fake, "/api/v1/generate/preview", json!({})).await;
    assert_eq!((&preview["text"], &preview["stopped_reason"]), (&json!(" a queen"), &json!("stop")));
}

#[tokio::test]
async fn kobold_preview_rejects_unknown_tokens() {
    let fake = FakeServer::with_options(FakeOptions { vocab_size: 1 << 31, ..FakeOptions::default() });
    post(&fake, GENERATE, json!({ "prompt": "Once" })).await;
    for id in [1_u32 << 31, u32::MAX] {
        let body = json!({ "append_tokens": [{ "token_id": 5 }, { "token_id": id }] });
        let response = fake.post("/api/v1/generate/preview", &body).await;
        let message = response.json()["error"].as_str().unwrap_or_default().to_owned();
        assert_eq!(response.status, 400, "{message}");
        assert!(message.contains(&format!("append_tokens: there is no token {id}")), "{message}");
    }
}

#[tokio::test]
async fn kobold_abort_stops_the_completion() {
    let fake = FakeServer::in_memory();
    assert_eq!(
        post(&fake, "/api/extra/abort", json!({})).await,
        json!({ "success": "false", "done": "true" })
    );
    fake.script().token_delay = Duration::from_millis(10);
    fake.script_answers(&[&vec!["word"; 400].join(" ")]);
    let abort = async {
        loop {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let progress = post(&fake, "/api/extra/generate/check", json!({})).await;
            if progress["results"][0]["text"] != "" {
                return post(&fake, "/api/extra/abort", json!({})).await;
            }
        }
    };
    let body = json!({ "prompt": "Talk.", "max_length": 400 });
    let (result, aborted) = tokio::join!(post(&fake, GENERATE, body), abort);
    assert_eq!(aborted["success"], "true");
    let text = result["results"][0]["text"].as_str().unwrap_or_default();
    assert!(text.starts_with("word") && text.len() < 400, "{text}");
}
