//! What the routes of conversations do beyond one request: events, edits and their undo, settings, ids of messages, captures.

use crate::chat::chat_body;
use crate::fake::{FakeOptions, FakeServer, MAX_TOKENS_SETTING};
use crate::fixture::prepared_server;
use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

async fn get(fake: &FakeServer, path: &str) -> Value {
    let (status, body) = fake.halo_api("GET", path, None).await;
    assert_eq!(status, 200, "{path}: {body}");
    body
}

/// An open stream of events.
struct EventReader {
    body: Body,
    unread: String,
}

impl EventReader {
    async fn subscribe(fake: &FakeServer, query: &str) -> Self {
        let uri = format!("/api/halo/v1/events{query}");
        let request = Request::builder().uri(uri).header("host", "localhost").body(Body::empty());
        let response = fake.send(request.expect("a request")).await;
        assert_eq!(response.status().as_u16(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self { body: response.into_body(), unread: String::new() }
    }

    /// The next event; none at the end of the stream.
    async fn next(&mut self) -> Option<Value> {
        loop {
            while let Some((event, rest)) = self.unread.split_once("\n\n") {
                let data = event.strip_prefix("data: ").map(|data| serde_json::from_str(data).expect("JSON"));
                self.unread = rest.to_owned();
                if data.is_some() {
                    return data;
                }
            }
            let frame = tokio::time::timeout(Duration::from_secs(10), self.body.frame()).await;
            let frame = frame.expect("an event comes")?.expect("the stream does not fail");
            self.unread.push_str(&String::from_utf8_lossy(frame.data_ref().map_or(&[], |data| data)));
        }
    }

    /// All events up to the first of that type.
    async fn until(&mut self, last: &str) -> Vec<Value> {
        let mut events = Vec::new();
        loop {
            let event = self.next().await.unwrap_or_else(|| panic!("no {last} in {events:?}"));
            events.push(event);
            if events.last().is_some_and(|event| event["type"] == last) {
                return events;
            }
        }
    }
}

#[tokio::test]
async fn events_tell_a_turn_in_order() {
    let fake = FakeServer::in_memory();
    let mut reader = EventReader::subscribe(&fake, "").await;
    fake.script_answers(&["Good day to you."]);
    let (status, _) =
        fake.halo_api("POST", "/conversations/main/messages", Some(&json!({ "text": "Hello" }))).await;
    assert_eq!(status, 202);
    let events = reader.until("done").await;
    let types: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    let at = |name: &str| types.iter().position(|kind| *kind == name).unwrap_or_else(|| panic!("{types:?}"));
    assert!(at("message_stored") < at("token"), "{types:?}");
    let tokens = events.iter().filter(|event| event["type"] == "token");
    let text: String = tokens.filter_map(|event| event["text"].as_str()).collect();
    assert_eq!(text, "Good day to you.");
    let done = &events[events.len() - 1];
    assert_eq!((&done["summary"]["tokens"], &done["summary"]["finish_reason"]), (&json!(4), &json!("end")));
    assert_eq!(done["chunks"][0]["text"], "Good day to you.");
    assert!(events.iter().all(|event| event["conversation"] == "main"), "{events:?}");
    let numbers: Vec<u64> = events.iter().filter_map(|event| event["number"].as_u64()).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
    let state = get(&fake, "/conversations/main").await;
    assert!(state["last_event"].as_u64() >= numbers.last().copied(), "{state} {numbers:?}");
}

#[tokio::test]
async fn events_are_filtered_by_conversation() {
    let fake = FakeServer::in_memory();
    let mut reader = EventReader::subscribe(&fake, "?conversation=second").await;
    for name in ["first", "second"] {
        fake.chat(&chat_body(&["u Hello"]), Some(name)).await;
    }
    let events = reader.until("done").await;
    assert!(events.iter().all(|event| event["conversation"] == "second"), "{events:?}");
}

#[tokio::test]
async fn events_report_failed_turns_and_changes() {
    let fake = FakeServer::in_memory();
    let mut reader = EventReader::subscribe(&fake, "").await;
    fake.script_failure_after("Some words");
    fake.halo_api("POST", "/conversations/main/messages", Some(&json!({ "text": "Hello" }))).await;
    let events = reader.until("failed").await;
    let error = events[events.len() - 1]["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("the model broke down"), "{error}");
    let edit = json!({ "edit": "pin", "chunks": ["u0.0"] });
    fake.halo_api("POST", "/conversations/main/edits", Some(&edit)).await;
    let events = reader.until("changed").await;
    let change = &events[events.len() - 1];
    assert_eq!((&change["action"], &change["chunks"]), (&json!("pinned"), &json!(["u0.0"])));
    let setting = format!("/settings/{MAX_TOKENS_SETTING}");
    fake.halo_api("PUT", &setting, Some(&json!({ "value": "5" }))).await;
    let events = reader.until("settings_changed").await;
    assert_eq!(events[events.len() - 1]["conversation"], "");
    // The stream ends when the server does.
    fake.app.shutdown();
    while reader.next().await.is_some() {}
}

#[tokio::test]
async fn edits_change_chunks_and_can_be_undone() {
    // (edit, chunk, all changed chunks, action, live and deleted chunks afterwards)
    for (edit, chunk, changed, action, live, deleted) in [
        ("pin", "u6.0", json!(["u6.0"]), "pinned", 3, 3),
        ("prune", "u6.0", json!(["u6.0", "a8.0"]), "pruned", 1, 3),
        ("resurrect", "u0.0", json!(["u0.0", "a1.0"]), "resurrected", 5, 3),
        ("delete", "a8.0", json!(["a8.0"]), "deleted", 2, 4),
        ("undelete", "u2.0", json!(["u2.0", "a3.0"]), "undeleted", 5, 1),
    ] {
        let prepared = prepared_server();
        let fake = &prepared.fake;
        let chunks = async || {
            let state = get(fake, "/conversations/main").await;
            let ids = state["chunks"].as_array().expect("chunks").iter().map(|chunk| chunk["id"].clone());
            (ids.collect::<Vec<_>>(), get(fake, "/conversations/main/deleted").await["total"].clone())
        };
        let before = chunks().await;
        let body = json!({ "edit": edit, "chunks": [chunk] });
        let (status, result) = fake.halo_api("POST", "/conversations/main/edits", Some(&body)).await;
        assert_eq!(status, 200, "{edit}: {result}");
        assert_eq!((&result["action"], &result["chunks"]), (&json!(action), &changed), "{edit}");
        let after = chunks().await;
        assert_eq!((after.0.len(), &after.1), (live, &json!(deleted)), "{edit}: {after:?}");
        let undo = json!({ "undo": result["undo"] });
        let (status, result) = fake.halo_api("POST", "/conversations/main/undo", Some(&undo)).await;
        assert_eq!(status, 204, "{edit}: {result}");
        assert_eq!(chunks().await, before, "{edit}");
    }
}

#[tokio::test]
async fn edit_unpin_and_merge() {
    let fake = FakeServer::in_memory();
    let paragraph = |n: usize| format!("{}.", vec![format!("word{n}"); 40].join(" "));
    let text = format!("{}\n\n{}", paragraph(1), paragraph(2));
    fake.chat(&chat_body(&[&format!("u {text}")]), Some("main")).await;
    let edit = async |edit: &str, chunk: &str| {
        let body = json!({ "edit": edit, "chunks": [chunk] });
        let (status, result) = fake.halo_api("POST", "/conversations/main/edits", Some(&body)).await;
        assert_eq!(status, 200, "{edit}: {result}");
        result["action"].clone()
    };
    assert_eq!(edit("pin", "u0.1").await, "pinned");
    assert_eq!(edit("unpin", "u0.1").await, "unpinned");
    assert_eq!(get(&fake, "/conversations/main/chunks/u0.1").await["chunk"]["pinned"], false);
    assert_eq!(edit("merge", "u0.1").await, "merged");
    assert_eq!(get(&fake, "/conversations/main/chunks/u0.0").await["chunk"]["text"], text);
    assert_eq!(fake.halo_api("GET", "/conversations/main/chunks/u0.1", None).await.0, 404);
}

#[tokio::test]
async fn undo_of_a_pin_keeps_a_later_deletion() {
    let prepared = prepared_server();
    for edit in ["pin", "delete"] {
        let body = json!({ "edit": edit, "chunks": ["u6.0"] });
        let (status, result) = prepared.fake.halo_api("POST", "/conversations/main/edits", Some(&body)).await;
        assert_eq!(status, 200, "{result}");
    }
    let before = get(&prepared.fake, "/conversations/main").await["chunks"].clone();
    // The first edit pinned a chunk that is deleted now: the pin is removed, and the chunk stays deleted.
    let (status, result) =
        prepared.fake.halo_api("POST", "/conversations/main/undo", Some(&json!({ "undo": 1 }))).await;
    assert_eq!(status, 204, "{result}");
    assert_eq!(get(&prepared.fake, "/conversations/main").await["chunks"], before);
}

#[tokio::test]
async fn setting_applies_to_open_conversations() {
    let fake = FakeServer::in_memory();
    let answer = "one two three four five six";
    fake.script_answers(&[answer, answer]);
    let first = fake.chat(&chat_body(&["u Count."]), Some("main")).await;
    assert_eq!(first.text(), answer);
    let path = format!("/settings/{MAX_TOKENS_SETTING}");
    let (status, _) = fake.halo_api("PUT", &path, Some(&json!({ "value": "3" }))).await;
    assert_eq!(status, 200);
    // A client of OpenAI's API without a maximum gets as much as fits; the setting is for Halo's own messages.
    let message = json!({ "text": "Count again." });
    let (status, result) = fake.halo_api("POST", "/conversations/main/messages", Some(&message)).await;
    assert_eq!(status, 202, "{result}");
    let last_text = async || {
        let conversation = fake.halo_api("GET", "/conversations/main", None).await.1;
        let chunks = conversation["chunks"].as_array().cloned().unwrap_or_default();
        chunks.last().map(|chunk| (chunk["role"].clone(), chunk["text"].clone()))
    };
    let expected = Some((json!("assistant"), json!("one two three")));
    for _ in 0..200 {
        if last_text().await == expected {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(last_text().await, expected);
    // Null removes the value.
    let (status, settings) = fake.halo_api("PUT", &path, Some(&json!({ "value": null }))).await;
    assert_eq!(
        (status, &settings[0]["value"], &settings[0]["origin"]),
        (200, &json!("32"), &json!("default"))
    );
}

#[tokio::test]
async fn message_with_the_same_id_is_stored_once() {
    let fake = FakeServer::in_memory();
    let message = json!({ "text": "Hello", "id": "m-1" });
    for _ in 0..2 {
        let (status, body) = fake.halo_api("POST", "/conversations/main/messages", Some(&message)).await;
        assert_eq!((status, &body), (202, &json!({ "ahead": 0 })));
    }
    wait_for_turns(&fake, 2).await;
    // A refused message may be sent again with its id.
    let refused = json!({ "text": " ", "id": "m-2" });
    let (status, _) = fake.halo_api("POST", "/conversations/main/messages", Some(&refused)).await;
    assert_eq!(status, 422);
    let corrected = json!({ "text": "Hello again", "id": "m-2" });
    let (status, _) = fake.halo_api("POST", "/conversations/main/messages", Some(&corrected)).await;
    assert_eq!(status, 202);
    wait_for_turns(&fake, 4).await;
    fake.app.shutdown();
    let all = fake.store.open().expect("the store opens").list_conversations().expect("the list is read");
    assert_eq!(all[0].turns, 4, "each message was stored once");
}

async fn wait_for_turns(fake: &FakeServer, turns: u64) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let list = get(fake, "/conversations").await;
        let running = get(fake, "/conversations/main").await["running"].clone();
        if list[0]["turns"] == turns && running.is_null() {
            return;
        }
        assert!(Instant::now() < deadline, "{list} {running}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn stop_ends_the_answer_and_stores_its_tokens() {
    let fake = FakeServer::in_memory();
    fake.script().token_delay = Duration::from_millis(20);
    fake.script_answers(&[&vec!["word"; 30].join(" ")]);
    let mut reader = EventReader::subscribe(&fake, "").await;
    fake.halo_api("POST", "/conversations/main/messages", Some(&json!({ "text": "Talk." }))).await;
    reader.until("token").await;
    let running = get(&fake, "/conversations/main").await["running"].clone();
    assert_eq!(running["chunks"][0][0], "a1.0", "{running}");
    let (status, _) = fake.halo_api("POST", "/conversations/main/stop", None).await;
    assert_eq!(status, 204);
    let events = reader.until("done").await;
    assert_eq!(events[events.len() - 1]["summary"]["finish_reason"], "aborted");
    let state = get(&fake, "/conversations/main").await;
    let text = state["chunks"][1]["text"].as_str().unwrap_or_default().to_owned();
    assert!(text.starts_with("word") && text.len() < 30 * 5 - 1, "{text}");
    assert_eq!(state["finish_reasons"]["1"], "aborted", "{state}");
}

#[tokio::test]
async fn graveyard_sorts_searches_and_pages() {
    let prepared = prepared_server();
    let ids = async |query: &str| {
        let page = get(&prepared.fake, &format!("/conversations/main/graveyard{query}")).await;
        let chunks = page["chunks"].as_array().expect("chunks");
        (page["total"].as_u64(), chunks.iter().map(|chunk| chunk["id"].clone()).collect::<Vec<_>>())
    };
    assert_eq!(ids("").await, (Some(2), vec![json!("a1.0"), json!("u0.0")]), "the newest first");
    for (query, first) in [("?sort=oldest", "u0.0"), ("?sort=longest", "u0.0"), ("?q=lovely%20town", "a1.0")]
    {
        assert_eq!(ids(query).await.1[0], first, "{query}");
    }
    assert_eq!(ids("?offset=1").await, (Some(2), vec![json!("u0.0")]));
    assert_eq!(ids("?offset=9").await, (Some(2), Vec::new()));
    assert_eq!(ids("?limit=0").await, (Some(2), Vec::new()));
}

#[tokio::test]
async fn capture_hides_text_that_is_pending_deletion() {
    let prepared = prepared_server();
    let path = format!("/conversations/main/captures/{}", prepared.capture);
    let capture = get(&prepared.fake, &path).await;
    assert!(!capture.to_string().contains("4711"), "{capture}");
    assert!(capture["segments"].as_array().is_some_and(|all| all.iter().any(|one| one["chunk"] == "u4.0")));
    let (status, _) =
        prepared.fake.halo_api("POST", "/conversations/main/forget/cancel", Some(&json!({}))).await;
    assert_eq!(status, 200);
    assert!(get(&prepared.fake, &path).await.to_string().contains("4711"));
}

#[tokio::test]
async fn capture_that_cannot_be_read_is_an_error() {
    let prepared = prepared_server();
    prepared.captures.clear();
    let path = format!("/conversations/main/captures/{}", prepared.capture);
    let (status, body) = prepared.fake.halo_api("GET", &path, None).await;
    assert_eq!(status, 422, "{body}");
    assert!(body["error"].as_str().is_some_and(|message| message.contains("reading the capture")), "{body}");
}

#[tokio::test]
async fn recording_captures_new_answers() {
    let fake = FakeServer::in_memory();
    fake.chat(&chat_body(&["u Hello"]), Some("main")).await;
    for recording in [true, false] {
        let body = json!({ "recording": recording });
        let (status, _) = fake.halo_api("PUT", "/conversations/main/recording", Some(&body)).await;
        assert_eq!(status, 204);
        fake.chat(&chat_body(&["u And now?"]), Some("main")).await;
        let list = get(&fake, "/conversations/main/captures").await;
        assert_eq!(list["recording"], recording);
        assert_eq!(list["captures"].as_array().map(Vec::len), Some(1), "{list}");
        assert_eq!(list["captures"][0]["turn"], 3);
    }
}

#[tokio::test]
async fn edit_last_that_does_not_fit_keeps_the_last_message() {
    let prepared = prepared_server();
    let before = get(&prepared.fake, "/conversations/main").await["chunks"].clone();
    let text = vec!["word"; 9000].join(" ");
    let body = json!({ "text": text });
    let (status, result) = prepared.fake.halo_api("POST", "/conversations/main/edit_last", Some(&body)).await;
    assert_eq!(status, 422, "{result}");
    assert_eq!(get(&prepared.fake, "/conversations/main").await["chunks"], before);
}

#[tokio::test]
async fn regenerate_without_a_message_keeps_the_greeting() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = FakeServer::with_options(FakeOptions::in_folder(folder.path()));
    let mut store = fake.store.open_database().expect("the store opens");
    let text = "{\"messages\": [{\"role\": \"assistant\", \"content\": \"Welcome to my glade.\"}]}";
    let import = halo_store::exchange::ImportRequest {
        file_name: "chat.json",
        format: None,
        name: Some("main"),
        chunk_size: halo_core::chunker::ChunkSize { min: 2, max: 64 },
        initial_brightness: halo_core::token::Brightness(10_000.0),
        model: None,
        validate_rows: None,
    };
    store.import(&mut text.as_bytes(), import).expect("the file is imported");
    let (status, result) = fake.halo_api("POST", "/conversations/main/regenerate", None).await;
    assert_eq!(status, 409, "{result}");
    let state = get(&fake, "/conversations/main").await;
    assert_eq!(state["chunks"][0]["text"], "Welcome to my glade.", "{state}");
}

#[tokio::test]
async fn conversation_names_are_percent_encoded_in_paths() {
    let fake = FakeServer::in_memory();
    let name = "Anna/Ben · 50% \"quoted\"?";
    let encoded: String = name.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let path = format!("/conversations/{encoded}");
    let (status, _) =
        fake.halo_api("POST", &format!("{path}/messages"), Some(&json!({ "text": "Hello" }))).await;
    assert_eq!(status, 202);
    assert_eq!(get(&fake, &path).await["name"], name);
    let (status, body) = fake.halo_api("GET", "/conversations/%FF", None).await;
    assert_eq!(status, 400, "{body}");
}

/// The figures of the store are those of the timeline and the index, and grow with each turn. The extract has sentences of
/// the conversation, word for word.
#[tokio::test]
async fn store_figures_and_extract_follow_the_conversation() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = FakeOptions { attention: true, ..FakeOptions::in_folder(folder.path()) };
    let fake = FakeServer::with_options(options);
    let (status, _) = fake.halo_api("GET", "/conversations/main/stats", None).await;
    assert_eq!(status, 404);
    for (exchange, text) in
        (1..).zip(["The gun is called Betsy.", "It hangs on the wall.", "What is it called?"])
    {
        let body = json!({ "model": "any", "messages": [{ "role": "user", "content": text }] });
        assert_eq!(fake.chat(&body, Some("main")).await.status, 200);
        let figures = get(&fake, "/conversations/main/stats").await;
        let state = get(&fake, "/conversations/main").await;
        let number = |key: &str| figures[key].as_u64().unwrap_or_else(|| panic!("{key}: {figures}"));
        assert_eq!(number("next_turn"), 2 * exchange, "{figures}");
        assert_eq!(number("next_position"), state["tokens"].as_u64().expect("tokens"), "{figures}");
        assert_eq!(number("live_tokens") + number("dead_tokens"), number("next_position"), "{figures}");
        assert_eq!(number("semantic_entries"), 2 * exchange, "{figures}");
    }
    let body = json!({ "edit": "prune", "chunks": ["u0.0"] });
    let before = get(&fake, "/conversations/main/stats").await;
    let (status, result) = fake.halo_api("POST", "/conversations/main/edits", Some(&body)).await;
    assert!(status < 300, "{status}: {result}");
    let after = get(&fake, "/conversations/main/stats").await;
    assert!(after["dead_tokens"].as_u64() > before["dead_tokens"].as_u64(), "{before} {after}");
    assert_eq!(after["next_position"], before["next_position"]);

    let extract = get(&fake, "/conversations/main/extract?limit=3").await;
    let sentences = extract.as_array().expect("sentences");
    assert!((1..=3).contains(&sentences.len()), "{extract}");
    for sentence in sentences {
        let chunk = sentence["chunk"].as_str().expect("a chunk");
        let text = get(&fake, &format!("/conversations/main/chunks/{chunk}")).await.to_string();
        assert!(text.contains(sentence["text"].as_str().expect("a text")), "{sentence} is not in {text}");
    }
    let positions: Vec<u64> = sentences.iter().filter_map(|sentence| sentence["position"].as_u64()).collect();
    assert!(positions.is_sorted(), "{positions:?}");
    let (status, _) = fake.halo_api("GET", "/conversations/nowhere/extract", None).await;
    assert_eq!(status, 404);
}
