//! Ranges of the transcript, what an answer used, and export and import, beyond one request.

use crate::chat::chat_body;
use crate::fake::{FakeOptions, FakeServer};
use crate::fixture::prepared_server;
use serde_json::Value;

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
