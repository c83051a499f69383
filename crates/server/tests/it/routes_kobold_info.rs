//! The routes of KoboldCPP that clients ask for when they connect.

use crate::fake::{FakeOptions, FakeServer};
use serde_json::json;

#[tokio::test]
async fn kobold_info_routes_answer() {
    let fake = FakeServer::in_memory();
    for (path, body) in [
        ("/api/v1/config/soft_prompts_list", json!({ "values": [] })),
        ("/api/latest/config/soft_prompts_list", json!({ "values": [] })),
        ("/api/v1/config/soft_prompt", json!({ "value": "" })),
        ("/api/extra/preloadstory", json!({})),
        ("/sdapi/v1/sd-models", json!([])),
        ("/sdapi/v1/samplers", json!([])),
    ] {
        let response = fake.get(path).await;
        assert_eq!((response.status, response.json()), (200, body), "{path}");
    }
    let path = "/api/v1/config/soft_prompt";
    for method in ["PUT", "POST"] {
        assert_eq!(fake.request(method, path, &[], r#"{"value": ""}"#).await.status, 200);
        let refused = fake.request(method, path, &[], r#"{"value": "mtstory.zip"}"#).await;
        assert!(refused.status == 400 && refused.text().contains("soft prompts are not supported"));
    }
    for (method, path) in [
        ("POST", "/api/extra/websearch"),
        ("POST", "/api/extra/transcribe"),
        ("POST", "/api/extra/tts"),
        ("POST", "/api/extra/multiplayer/status"),
        ("GET", "/api/admin/list_options"),
        ("POST", "/api/admin/save_state"),
        ("POST", "/api/extra/shutdown"),
        ("POST", "/sdapi/v1/txt2img"),
        ("GET", "/sdapi/v1/options"),
    ] {
        let response = fake.request(method, path, &[], "{}").await;
        assert_eq!(response.status, 501, "{path}");
        assert!(
            response.json()["error"].as_str().is_some_and(|e| e.contains("this server has no ")),
            "{path}"
        );
    }
}

#[tokio::test]
async fn kobold_version_says_whether_there_are_embeddings() {
    for embedder in [true, false] {
        let fake = FakeServer::with_options(FakeOptions { embedder, ..FakeOptions::default() });
        assert_eq!(fake.get("/api/extra/version").await.json()["embeddings"], json!(embedder));
        let response = fake.post("/api/extra/embeddings", &json!({ "input": ["red apple", "pie"] })).await;
        assert_eq!(response.status, if embedder { 200 } else { 501 }, "{}", response.text());
        // SillyTavern asks so for the name of the embedder, before it has a text.
        let none = fake.post("/api/extra/embeddings", &json!({ "input": [] })).await;
        assert_eq!(none.status, response.status, "{}", none.text());
        if embedder {
            assert_eq!(
                (&none.json()["data"], &none.json()["model"]),
                (&json!([]), &response.json()["model"])
            );
        }
    }
}

#[tokio::test]
async fn kobold_embeds_texts() {
    let fake = FakeServer::with_options(FakeOptions { embedder: true, ..FakeOptions::default() });
    let body = fake.post("/api/extra/embeddings", &json!({ "input": ["red apple", "pie"] })).await.json();
    assert_eq!((&body["object"], &body["data"][1]["index"]), (&json!("list"), &json!(1)), "{body}");
    assert_eq!(body["usage"]["total_tokens"], 3);
    let long = "tea ".repeat(300);
    assert_eq!(fake.post("/api/extra/embeddings", &json!({ "input": long })).await.status, 400);
    let split = fake.post("/api/extra/embeddings", &json!({ "input": long, "truncate": true })).await;
    assert_eq!(split.status, 200, "{}", split.text());
}

#[tokio::test]
async fn kobold_converts_schemas_to_grammars() {
    let fake = FakeServer::in_memory();
    let schema =
        json!({ "type": "object", "properties": { "age": { "type": "integer" } }, "required": ["age"] });
    let response = fake.post("/api/extra/json_to_grammar", &json!({ "schema": schema })).await;
    let body = response.json();
    assert_eq!((response.status, &body["success"]), (200, &json!(true)), "{body}");
    let grammar = body["result"].as_str().unwrap_or_default();
    assert!(grammar.contains("root ::= \"{\" space root-age-kv \"}\" space\n"), "{grammar}");
    let refused = json!({ "schema": { "type": "object", "properties": { "a": { "type": "string", "pattern": "^a" } } } });
    let refused = fake.post("/api/extra/json_to_grammar", &refused).await;
    let error = refused.json()["error"].as_str().unwrap_or_default().to_owned();
    assert_eq!(refused.status, 400);
    assert!(error.contains("'pattern' is not supported") && error.contains("#/properties/a"), "{error}");
}
