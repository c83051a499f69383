//! Ranges of the transcript, what an answer used, and export and import, beyond one request.

use crate::chat::chat_body;
use crate::fake::{FakeOptions, FakeServer};
use crate::fixture::prepared_server;
use axum::body::{Body, Bytes};
use futures_util::stream;
use halo_server::ServerLimits;
use serde_json::{Value, json};
use std::convert::Infallible;

async fn get(fake: &FakeServer, path: &str) -> Value {
    let (status, body) = fake.halo_api("GET", path, None).await;
    assert_eq!(status, 200, "{path}: {body}");
    body
}

fn turns(transcript: &Value) -> Vec<u64> {
    let messages = transcript["messages"].as_array().into_iter().flatten();
    messages.filter_map(|message| message["turn"].as_u64()).collect()
}

/// A conversation of ten messages.
async fn long_conversation(fake: &FakeServer) {
    let mut history: Vec<String> = Vec::new();
    for n in 0..5 {
        history.push(format!("u Question number {n} about the sea."));
        let request: Vec<&str> = history.iter().map(String::as_str).collect();
        let response = fake.chat(&chat_body(&request), Some("main")).await;
        assert_eq!(response.status, 200, "{}", response.body);
        history.push(format!("a {}", response.text()));
    }
}

#[tokio::test]
async fn transcript_ranges_cover_the_conversation() {
    let fake = FakeServer::in_memory();
    long_conversation(&fake).await;
    let cases = [
        ("", (0..10).collect::<Vec<u64>>(), 0),
        ("?limit=3", vec![7, 8, 9], 7),
        ("?offset=2&limit=3", vec![2, 3, 4], 2),
        ("?offset=8&limit=50", vec![8, 9], 8),
        ("?offset=99", vec![], 10),
        ("?around=5&limit=4", vec![3, 4, 5, 6], 3),
        ("?around=0&limit=2", vec![0, 1], 0),
        ("?around=99&limit=2", vec![8, 9], 8),
        ("?limit=0", vec![9], 9),
    ];
    for (query, expected, offset) in cases {
        let transcript = get(&fake, &format!("/conversations/main/transcript{query}")).await;
        assert_eq!(turns(&transcript), expected, "{query}");
        assert_eq!((&transcript["total"], &transcript["offset"]), (&10.into(), &offset.into()), "{query}");
    }
}

#[tokio::test]
async fn transcript_keeps_pruned_messages_and_answers_name_what_they_used() {
    // The window is small, so that early messages are pruned.
    let fake = FakeServer::with_options(FakeOptions { context: 90, ..FakeOptions::default() });
    let mut history = vec!["u The gun on the wall of the lodge is called Betsy.".to_owned()];
    let topics = ["cheese", "trains", "winter", "music", "bread", "ships", "stars", "tea"];
    let questions = topics.map(|topic| format!("u Please tell me something about {topic} today, and more."));
    for question in questions.into_iter().chain(["u What is the gun on the wall called?".to_owned()]) {
        let request: Vec<&str> = history.iter().map(String::as_str).collect();
        let response = fake.chat(&chat_body(&request), Some("main")).await;
        assert_eq!(response.status, 200, "{}", response.body);
        history.push(format!("a {}", response.text()));
        history.push(question);
    }
    let request: Vec<&str> = history.iter().map(String::as_str).collect();
    let pruned = get(&fake, "/conversations/main/graveyard?q=Betsy").await;
    assert_eq!(pruned["chunks"][0]["id"], "u0.0", "{pruned}");
    fake.chat(&chat_body(&request), Some("main")).await;
    let transcript = get(&fake, "/conversations/main/transcript?limit=200").await;
    assert_eq!(transcript["total"], history.len() + 1, "nothing is missing");
    let answer = &transcript["messages"][history.len()];
    let used = answer["used"].as_array().expect("used chunks");
    let betsy = used.iter().find(|chunk| chunk["id"] == "u0.0");
    assert!(
        betsy.is_some_and(|chunk| chunk["text"].as_str().is_some_and(|text| text.contains("Betsy"))),
        "{answer}"
    );
}

#[tokio::test]
async fn exported_conversation_can_be_imported() {
    let prepared = prepared_server();
    let export = prepared.fake.get("/api/halo/v1/conversations/main/export").await;
    assert_eq!((export.status, export.header("content-type")), (200, "application/x-ndjson"));
    assert!(export.header("content-disposition").starts_with("attachment"));
    let folder = tempfile::tempdir().expect("a folder");
    let other = FakeServer::with_options(FakeOptions::in_folder(folder.path()));
    let path = "/api/halo/v1/import?file_name=main.jsonl";
    for (query, status) in [("", 201), ("", 409), ("&name=copy", 201), ("&name=%20", 400)] {
        let imported = other.request("POST", &format!("{path}{query}"), &[], export.text()).await;
        assert_eq!(imported.status, status, "{query}: {}", imported.text());
    }
    let names = get(&other, "/conversations").await;
    let names: Vec<&str> =
        names.as_array().into_iter().flatten().filter_map(|chat| chat["name"].as_str()).collect();
    assert!(names.len() == 2 && names.contains(&"main") && names.contains(&"copy"), "{names:?}");
    let texts = |transcript: &Value| -> Vec<Value> {
        let messages = transcript["messages"].as_array().cloned().unwrap_or_default();
        messages.iter().map(|message| message["chunks"][0]["text"].clone()).collect()
    };
    let here = get(&prepared.fake, "/conversations/main/transcript").await;
    let there = get(&other, "/conversations/main/transcript").await;
    assert_eq!(texts(&here), texts(&there));
    other.app.shutdown();
}

#[tokio::test]
async fn markdown_export_has_every_message_that_is_not_deleted() {
    let prepared = prepared_server();
    let export = prepared.fake.get("/api/halo/v1/conversations/main/export?format=markdown").await;
    assert_eq!((export.status, export.header("content-type")), (200, "text/markdown; charset=utf-8"));
    let text = export.text();
    assert!(text.starts_with("# main\n\n## You\n\nI live in Lindau on the lake.\n"), "{text}");
    assert!(text.ends_with("## Model\n\nTea comes from China.\n"), "{text}");
    assert!(!text.contains("Mitzi") && !text.contains("4711"), "{text}");
}

#[tokio::test]
async fn import_that_fails_stores_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = FakeServer::with_options(FakeOptions::in_folder(folder.path()));
    for (file, content) in
        [("a.json", "{"), ("a.zip", "PK\u{3}\u{4}"), ("a.txt", ""), ("a.jsonl", "{\"halo\":")]
    {
        let path = format!("/api/halo/v1/import?file_name={file}");
        let response = fake.request("POST", &path, &[], content).await;
        assert_eq!(response.status, 422, "{file}: {}", response.text());
        assert!(!response.json()["error"].as_str().unwrap_or_default().is_empty());
    }
    assert_eq!(get(&fake, "/conversations").await, serde_json::json!([]));
}

/// A chat that OpenAI's API could have been sent, in parts: as large as asked for.
fn large_upload(bytes: usize) -> Body {
    let mut parts = vec![r#"{"messages":[{"role":"user","content":"Where do I live?"}"#.to_owned()];
    let mut size = parts[0].len() + 2;
    while size < bytes {
        let part = format!(
            r#",{{"role":"user","content":"{}"}}"#,
            "Lindau ".repeat((bytes - size).clamp(40, 70_000) / 7 - 5)
        );
        size += part.len();
        parts.push(part);
    }
    parts.push("]}".to_owned());
    let parts: Vec<_> = parts.into_iter().map(|part| Ok::<_, Infallible>(Bytes::from(part))).collect();
    Body::from_stream(stream::iter(parts))
}

#[tokio::test]
async fn import_is_limited_by_its_own_setting_and_not_by_that_of_other_requests() {
    let folder = tempfile::tempdir().expect("a folder");
    let limits =
        ServerLimits { max_body_bytes: 1000, max_import_bytes: 3_000_000, ..ServerLimits::default() };
    let fake = FakeServer::with_options(FakeOptions { limits, ..FakeOptions::in_folder(folder.path()) });
    assert_eq!(get(&fake, "/status").await["max_import_bytes"], 3_000_000);
    let path = "/api/halo/v1/import?file_name=large.json&name=large";
    let response = fake.request("POST", path, &[], large_upload(2_900_000)).await;
    assert_eq!((response.status, response.json()["conversations"].clone()), (201, json!(["large"])));
    let transcript = get(&fake, "/conversations/large/transcript?limit=200").await;
    let characters: usize = (transcript["messages"].as_array().into_iter().flatten())
        .flat_map(|message| message["chunks"].as_array().into_iter().flatten())
        .map(|chunk| chunk["text"].as_str().map_or(0, str::len))
        .sum();
    assert!(characters > 2_800_000, "{characters}");
    // Without a length, the limit is noticed when it is exceeded; with one, nothing is received.
    let refused = |response: &crate::fake::FakeResponse| {
        let error = response.json()["error"].as_str().unwrap_or_default().to_owned();
        assert!(
            response.status == 413 && error.contains("server.max_import"),
            "{}: {error}",
            response.status
        );
    };
    refused(&fake.request("POST", path, &[], large_upload(3_100_000)).await);
    let never = Body::from_stream(stream::pending::<Result<Bytes, Infallible>>());
    refused(&fake.request("POST", path, &[("content-length", "3000001")], never).await);
    assert_eq!(
        get(&fake, "/conversations").await.as_array().map(Vec::len),
        Some(1),
        "nothing else is stored"
    );
    fake.app.shutdown();
}

/// Uploads take a file and a thread each, so only a few are received at once.
#[tokio::test]
async fn only_a_few_files_are_imported_at_once() {
    let fake = FakeServer::with_options(FakeOptions::default());
    let path = "/api/halo/v1/import?file_name=slow.txt";
    let (sender, mut slow) = (0..2).fold((Vec::new(), Vec::new()), |(mut senders, mut bodies), _| {
        let (sender, parts) = tokio::sync::mpsc::unbounded_channel::<Result<Bytes, Infallible>>();
        senders.push(sender);
        bodies.push(parts);
        (senders, bodies)
    });
    let uploads = slow.drain(..).map(|mut parts| {
        let body = Body::from_stream(stream::poll_fn(move |context| parts.poll_recv(context)));
        fake.request("POST", path, &[], body)
    });
    let uploads = futures_util::future::join_all(uploads);
    let refused = async {
        loop {
            let response = fake.request("POST", path, &[], Body::from("You: Hello")).await;
            if response.status == 503 {
                break response;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let refusal = async {
        let response = refused.await;
        drop(sender);
        response
    };
    let (_, response) = tokio::join!(uploads, refusal);
    let error = response.json()["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("imported already"), "{error}");
    let response = fake.request("POST", path, &[], Body::from("You: Hello")).await;
    assert_ne!(response.status, 503, "they have ended");
    fake.app.shutdown();
}

/// Each word of each answer has what it attended to, also after a restart, until its text is forgotten.
#[tokio::test]
async fn attention_of_older_answers_is_stored() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = || FakeOptions { attention: true, context: 4000, ..FakeOptions::in_folder(folder.path()) };
    let fake = FakeServer::with_options(options());
    long_conversation(&fake).await;
    fake.app.shutdown();
    drop(fake);
    let fake = FakeServer::with_options(options());
    let transcript = get(&fake, "/conversations/main/transcript").await;
    let answers = transcript["messages"].as_array().expect("messages");
    let flags: Vec<bool> = answers.iter().map(|message| message["has_attention"] == true).collect();
    assert_eq!(flags, [false, true].repeat(5));
    let attention = |at: u64| format!("/conversations/main/attention/{at}");
    // The last token of an answer that the model has generated: those of the template have no attention.
    let mut positions = Vec::new();
    for turn in [1usize, 3, 9] {
        let chunk = &answers[turn]["chunks"][0];
        let start = chunk["position"].as_u64().expect("a position");
        for at in (start..start + chunk["tokens"].as_u64().expect("a count")).rev() {
            if fake.halo_api("GET", &attention(at), None).await.0 == 200 {
                positions.push((turn, at));
                break;
            }
        }
    }
    let position = |turn: usize| {
        let found = positions.iter().find(|(other, _)| *other == turn);
        found.map(|(_, at)| *at).expect("a token with attention")
    };
    for turn in [1, 3, 9] {
        let found = get(&fake, &attention(position(turn))).await;
        assert_eq!(found["turn"], turn, "{found}");
        // The attention of this model is uniform: of equal shares, the first are kept.
        let tokens = found["tokens"].as_array().expect("tokens");
        let positions: Vec<u64> = tokens.iter().filter_map(|token| token["position"].as_u64()).collect();
        assert!(positions.len() > 4 && positions.is_sorted() && tokens[0]["chunk"] == "u0.0", "{found}");
        assert!(tokens.iter().any(|token| token["range"].is_array()), "{found}");
        assert!(found["chunks"].to_string().contains("u0.0"), "{found}");
    }
    let forget = json!({ "turns": [0], "now": true });
    let (status, result) = fake.halo_api("POST", "/conversations/main/forget", Some(&forget)).await;
    assert_eq!(status, 200, "{result}");
    for turn in [1, 9] {
        let found = get(&fake, &attention(position(turn))).await;
        assert!(found["turn"] == turn && !found.to_string().contains("u0.0"), "{found}");
    }
    let forget = json!({ "turns": [9], "now": true });
    assert_eq!(fake.halo_api("POST", "/conversations/main/forget", Some(&forget)).await.0, 200);
    assert_eq!(fake.halo_api("GET", &attention(position(9)), None).await.0, 404);
    assert_eq!(get(&fake, &attention(position(3))).await["turn"], 3);
    fake.app.shutdown();
}
