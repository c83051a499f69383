//! The routes that forget text, on a store in a file.

use crate::fake::{FakeForgetting, FakeOptions, FakeServer, TestStore};
use crate::request_log::LogLines;
use halo_core::row_store::{Row, RowStore};
use halo_core::store::Store;
use halo_core::{Error, ErrorKind};
use halo_engine::rules::ForgettingRules;
use halo_server::{ListenOptions, ServerLimits, serve};
use halo_store::database::{Database, StoreLocation};
use halo_worlds::world_store::HEADER_KIND;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A word that nothing else contains.
const SECRET: &str = "Quokkatown";

fn server(folder: &Path) -> FakeServer {
    let location = StoreLocation::Sqlite(folder.join("halo.db"));
    FakeServer::new(TestStore::File(location), 400, ServerLimits::default())
}

/// A conversation of two exchanges; the first message, turn 0, has the secret.
async fn conversation_with_secret(fake: &FakeServer) {
    for text in [format!("I live in {SECRET} and tell nobody."), "Now something about tea.".to_owned()] {
        let body = json!({ "model": "any", "messages": [{ "role": "user", "content": text }] });
        let answer = fake.chat(&body, Some("main")).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
}

async fn post(fake: &FakeServer, path: &str, body: Value) -> (u16, Value) {
    fake.halo_api("POST", &format!("/conversations/main/{path}"), Some(&body)).await
}

async fn visible_text(fake: &FakeServer) -> String {
    let (status, state) = fake.halo_api("GET", "/conversations/main", None).await;
    assert_eq!(status, 200, "{state}");
    let chunks = state["chunks"].as_array().expect("chunks").clone();
    chunks.iter().filter_map(|chunk| chunk["text"].as_str().map(str::to_owned)).collect()
}

async fn pending(fake: &FakeServer) -> Vec<Value> {
    let (status, pending) = fake.halo_api("GET", "/conversations/main/forget", None).await;
    assert_eq!(status, 200, "{pending}");
    pending.as_array().expect("a list").clone()
}

/// Whether a file of the folder contains the secret.
fn is_stored(folder: &Path) -> bool {
    let files = std::fs::read_dir(folder).expect("a folder").filter_map(Result::ok);
    files.map(|file| std::fs::read(file.path()).unwrap_or_default()).any(|content| {
        content.windows(SECRET.len()).any(|bytes| bytes.eq_ignore_ascii_case(SECRET.as_bytes()))
    })
}

#[tokio::test]
async fn forget_hides_text_until_it_is_cancelled() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = server(folder.path());
    conversation_with_secret(&fake).await;
    assert!(visible_text(&fake).await.contains(SECRET));
    assert_eq!(pending(&fake).await.len(), 0);

    let (status, result) = post(&fake, "forget", json!({ "matching": "quokkatown" })).await;
    assert_eq!(status, 200, "{result}");
    assert_eq!(result["chunks"], json!(["u0.0"]), "{result}");
    assert!(result["due"].as_i64().is_some_and(|due| due > jiff::Timestamp::now().as_millisecond()));
    assert!(!visible_text(&fake).await.contains(SECRET), "the text is hidden at once");
    assert!(is_stored(folder.path()), "the text is not erased yet");
    let waiting = pending(&fake).await;
    assert_eq!(
        (waiting.len(), &waiting[0]["chunks"], &waiting[0]["due"]),
        (1, &json!(["u0.0"]), &result["due"])
    );

    let (status, result) = post(&fake, "forget/cancel", json!({})).await;
    assert_eq!((status, &result), (200, &json!({ "chunks": 1, "memories": 0 })));
    assert!(visible_text(&fake).await.contains(SECRET), "the text is visible again");
    assert_eq!(pending(&fake).await.len(), 0);
    // The conversation continues in the same session.
    let body = json!({ "model": "any", "messages": [{ "role": "user", "content": "And coffee?" }] });
    assert_eq!(fake.chat(&body, Some("main")).await.status, 200);
}

#[tokio::test]
async fn forget_now_erases_text_from_the_store() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = server(folder.path());
    conversation_with_secret(&fake).await;
    let (status, result) = post(&fake, "forget", json!({ "turns": [0], "now": true })).await;
    assert_eq!(
        (status, &result["due"], &result["chunks"]),
        (200, &Value::Null, &json!(["u0.0"])),
        "{result}"
    );
    assert!(!visible_text(&fake).await.contains(SECRET));
    assert!(visible_text(&fake).await.contains("something about tea"));
    let (status, result) = post(&fake, "forget/cancel", json!({ "chunks": ["u0.0"] })).await;
    assert_eq!(status, 404, "an erasure cannot be cancelled: {result}");
    let (status, result) = post(&fake, "undo", json!({ "undo": 1 })).await;
    assert_eq!(status, 404, "{result}");
    assert!(!is_stored(folder.path()));
    let (_, conversations) = fake.halo_api("GET", "/conversations", None).await;
    let id = conversations[0]["id"].as_str().expect("an id").to_owned();
    let (status, list) = fake.halo_api("GET", "/forget/proofs", None).await;
    assert_eq!((status, &list["unreadable_lines"]), (200, &json!([])), "{list}");
    assert_eq!(list["proofs"][0]["subject"], format!("conversation {id} u0.0"));
    assert_eq!(list["proofs"][0]["valid"], true);
    fake.app.shutdown();
}

#[tokio::test]
async fn forget_all_now_removes_the_conversation() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = server(folder.path());
    conversation_with_secret(&fake).await;
    let (status, result) = post(&fake, "forget", json!({ "all": true, "now": true })).await;
    assert_eq!(status, 200, "{result}");
    let (_, conversations) = fake.halo_api("GET", "/conversations", None).await;
    assert_eq!(conversations.as_array().map(Vec::len), Some(0), "{conversations}");
    fake.app.shutdown();
    assert!(!is_stored(folder.path()));
}

/// A conversation is deleted only by a request that repeats its name; it can be kept after all within the grace period.
#[tokio::test]
async fn delete_conversation_needs_its_name_twice() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = server(folder.path());
    conversation_with_secret(&fake).await;
    for (path, expected) in [
        ("/conversations/main", 422),
        ("/conversations/main?confirm=", 422),
        ("/conversations/main?confirm=Main", 422),
        ("/conversations/main?confirm=true&now=true", 422),
        ("/conversations/other?confirm=other", 404),
    ] {
        let (status, result) = fake.halo_api("DELETE", path, None).await;
        assert_eq!(status, expected, "{path}: {result}");
    }
    assert!(visible_text(&fake).await.contains(SECRET), "nothing was deleted");

    let (status, result) = fake.halo_api("DELETE", "/conversations/main?confirm=main", None).await;
    assert_eq!(status, 200, "{result}");
    assert!(
        result["due"].as_i64().is_some_and(|due| due > jiff::Timestamp::now().as_millisecond()),
        "{result}"
    );
    assert!(!visible_text(&fake).await.contains(SECRET), "it is hidden");
    assert_eq!(pending(&fake).await[0]["all"], true);
    let (status, result) = post(&fake, "forget/cancel", json!({})).await;
    assert_eq!(status, 200, "{result}");
    assert!(visible_text(&fake).await.contains(SECRET), "it is kept after all");

    let (status, result) = fake.halo_api("DELETE", "/conversations/main?confirm=main&now=true", None).await;
    assert_eq!((status, &result["due"]), (200, &Value::Null), "{result}");
    let (_, conversations) = fake.halo_api("GET", "/conversations", None).await;
    assert_eq!(conversations.as_array().map(Vec::len), Some(0), "{conversations}");
    fake.app.shutdown();
    assert!(!is_stored(folder.path()));
}

#[tokio::test]
async fn forget_rejects_invalid_requests() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = server(folder.path());
    conversation_with_secret(&fake).await;
    for (path, body, expected) in [
        ("forget", json!({}), 400),
        ("forget", json!({ "all": true, "turns": [0] }), 400),
        ("forget", json!({ "chunks": ["nonsense"] }), 400),
        ("forget", json!({ "everything": true }), 400),
        ("forget", json!({ "matching": "  " }), 422),
        ("forget", json!({ "matching": "zebra" }), 404),
        ("forget", json!({ "turns": [99] }), 404),
        ("forget", json!({ "chunks": ["u99.0"], "now": true }), 404),
        ("forget/cancel", json!({ "chunks": ["u0.0"] }), 404),
        ("forget/cancel", json!({ "turns": "all" }), 400),
    ] {
        let (status, result) = post(&fake, path, body.clone()).await;
        assert_eq!(status, expected, "{path} {body}: {result}");
        assert!(result["error"].as_str().is_some_and(|error| !error.contains("halo ")), "{result}");
    }
    let (status, _) = fake.halo_api("GET", "/conversations/nowhere/forget", None).await;
    assert_eq!(status, 404);
    assert!(visible_text(&fake).await.contains(SECRET), "nothing was forgotten");
}

/// A chat that its client did not name has the first words of its first message as its name.
#[tokio::test]
async fn forget_renames_a_chat_that_is_named_after_the_text() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = server(folder.path());
    let question = format!("My diagnosis is {SECRET} syndrome, tell nobody.");
    let mut messages = vec![json!({ "role": "user", "content": question })];
    let answer = fake.chat(&json!({ "model": "any", "messages": messages }), None).await;
    assert!(answer.conversation.contains(SECRET), "{}", answer.conversation);
    messages.push(json!({ "role": "assistant", "content": answer.text() }));
    let name = answer.conversation.replace(' ', "%20").replace(',', "%2C");
    let path = format!("/conversations/{name}/forget");
    let (status, result) =
        fake.halo_api("POST", &path, Some(&json!({ "matching": SECRET, "now": true }))).await;
    assert_eq!(status, 200, "{result}");
    let new_name = result["new_name"].as_str().expect("a new name").to_owned();
    assert!(new_name.starts_with("chat 20"), "{new_name}");
    assert_eq!(result["other_texts"], 1, "the name: {result}");
    let (_, conversations) = fake.halo_api("GET", "/conversations", None).await;
    assert_eq!(
        (conversations.as_array().map(Vec::len), &conversations[0]["name"]),
        (Some(1), &json!(new_name))
    );
    // The conversation goes on under its new name.
    let body = json!({ "model": "any", "messages": [{ "role": "user", "content": "And tea?" }] });
    assert_eq!(fake.chat(&body, Some(&new_name)).await.status, 200);
    let (_, conversations) = fake.halo_api("GET", "/conversations", None).await;
    assert_eq!(conversations.as_array().map(Vec::len), Some(1), "{conversations}");
    fake.app.shutdown();
    assert!(!is_stored(folder.path()));
}

#[tokio::test]
async fn forget_proofs_report_torn_lines() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = server(folder.path());
    conversation_with_secret(&fake).await;
    std::fs::write(folder.path().join("forgotten.jsonl"), "{\"subject").expect("the file is written");
    let (status, result) = post(&fake, "forget", json!({ "turns": [0], "now": true })).await;
    assert_eq!(status, 200, "{result}");
    let (status, list) = fake.halo_api("GET", "/forget/proofs", None).await;
    assert_eq!((status, &list["unreadable_lines"]), (200, &json!([1])), "{list}");
    assert_eq!(list["proofs"].as_array().map(Vec::len), Some(1), "{list}");
}

/// The log says which conversation and what kind of failure; the error quotes the name, and the name is what the user said.
#[tokio::test]
async fn failed_erasure_is_logged_without_a_word_of_the_conversation() {
    let lines = LogLines::of_process();
    for (word, kind, opened) in
        [("Failquux", ErrorKind::Unavailable, true), ("Tornquux", ErrorKind::Damaged, false)]
    {
        let folder = tempfile::tempdir().expect("a folder");
        let name = format!("My secret is {word}");
        let error = Error::new(kind, format!("erasing text of '{name}'"), format!("{word} is on a bad disk"));
        let interval = Some(Duration::from_millis(100));
        let grace_period = Duration::from_millis(1);
        let forgetting = FakeForgetting { grace_period, ..FakeForgetting::default() };
        let options = FakeOptions { forgetting, ..FakeOptions::in_folder(folder.path()) };
        let fake = FakeServer::with_options(options.clone());
        let body =
            json!({ "model": "any", "messages": [{ "role": "user", "content": format!("{word} again") }] });
        assert_eq!(fake.chat(&body, Some(&name)).await.status, 200);
        let (_, conversations) = fake.halo_api("GET", "/conversations", None).await;
        let id = conversations[0]["id"].as_str().expect("an id").to_owned();
        let path = format!("/conversations/{}/forget", name.replace(' ', "%20"));
        let (status, result) = fake.halo_api("POST", &path, Some(&json!({ "matching": word }))).await;
        assert_eq!(status, 200, "{result}");
        fake.app.shutdown();

        // The erasure is due, and the next server tries.
        let forgetting = FakeForgetting { grace_period, interval, error: Some(error), rules: None };
        let fake = FakeServer::with_options(FakeOptions { forgetting, ..options });
        let app = Arc::clone(&fake.app);
        std::thread::spawn(move || {
            let address = SocketAddr::from(([127, 0, 0, 1], 0));
            serve(&app, ListenOptions { address, tls: None, on_ready: Box::new(|_| {}) })
        });
        if opened {
            let path = format!("/conversations/{}/edits", name.replace(' ', "%20"));
            let edit = json!({ "edit": "pin", "chunks": ["a1.0"] });
            assert_eq!(fake.halo_api("POST", &path, Some(&edit)).await.0, 200);
        }
        let expected = format!("text that is due in the conversation {id} was not erased: {kind:?}");
        let started = Instant::now();
        while !lines.lines().contains(&expected) {
            assert!(started.elapsed() < Duration::from_secs(30), "{expected}: {:?}", lines.lines());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        fake.app.shutdown();
        let quoted: Vec<String> = lines.lines().into_iter().filter(|line| line.contains(word)).collect();
        assert_eq!(quoted, Vec::<String>::new());
    }
}

/// A conversation that is only open gets its forgetting cycle on the timer; after a turn, another path starts it.
#[tokio::test]
async fn forgetting_cycle_runs_on_the_timer() {
    let log = LogLines::of_process();
    let folder = tempfile::tempdir().expect("a folder");
    let fake = FakeServer::with_options(FakeOptions::in_folder(folder.path()));
    for topic in ["tea", "bread", "trains", "winter"] {
        let text = format!("Tell me all that you know of {topic}, and how it is made.");
        let body = json!({ "model": "any", "messages": [{ "role": "user", "content": text }] });
        assert_eq!(fake.chat(&body, Some("main")).await.status, 200);
    }
    fake.app.shutdown();

    let rules = Some(ForgettingRules { threshold: 0.01 });
    let interval = Some(Duration::from_millis(100));
    let forgetting = FakeForgetting { interval, rules, ..FakeForgetting::default() };
    let fake = FakeServer::with_options(FakeOptions { forgetting, ..FakeOptions::in_folder(folder.path()) });
    let app = Arc::clone(&fake.app);
    std::thread::spawn(move || {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        serve(&app, ListenOptions { address, tls: None, on_ready: Box::new(|_| {}) })
    });
    let (status, edited) = post(&fake, "edits", json!({ "edit": "pin", "chunks": ["a7.0"] })).await;
    assert_eq!(status, 200, "an edit opens the conversation: {edited}");
    let started = Instant::now();
    let state = loop {
        let (status, state) = fake.halo_api("GET", "/conversations/main", None).await;
        assert_eq!(status, 200, "{state}");
        if !state["forgetting"].is_null() {
            break state;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "no cycle has run: {state}\n{:?}", log.lines());
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(state["pruned"].as_u64().is_some_and(|pruned| pruned > 0), "{state}");
    let metrics = fake.get("/metrics").await.text();
    assert!(!metrics.contains("halo_forgetting_cycles_total 0\n"), "{metrics}");
    fake.app.shutdown();
}

#[tokio::test]
async fn damaged_world_is_logged_without_its_name() {
    let lines = LogLines::of_process();
    let folder = tempfile::tempdir().expect("a folder");
    let fake = FakeServer::with_options(FakeOptions::in_folder(folder.path()));
    let (status, world) = fake.halo_api("POST", "/worlds", Some(&json!({ "name": "Harborquux" }))).await;
    assert_eq!(status, 201, "{world}");
    fake.app.shutdown();
    let database = Database::open(&StoreLocation::Sqlite(folder.path().join("halo.db")));
    let row = Row { kind: HEADER_KIND, key: "0".into(), value: "\"Harborquux\"".into() };
    database.expect("a store").put_rows("Harborquux", &[row], &[]).expect("the header is damaged");
    let fake = FakeServer::with_options(FakeOptions::in_folder(folder.path()));
    let (status, worlds) = fake.halo_api("GET", "/worlds", None).await;
    assert_eq!((status, &worlds[0]["name"]), (200, &json!("Harborquux")));
    let created = worlds[0]["created"].as_i64().expect("a time");
    let expected = format!("the world created at {created} cannot be read: Damaged");
    assert!(lines.lines().contains(&expected), "{:?}", lines.lines());
    assert!(lines.lines().iter().all(|line| !line.contains("Harborquux")), "{:?}", lines.lines());
}

/// A client can make the id of a message of its words.
#[tokio::test]
async fn forget_erases_the_id_of_a_message() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = server(folder.path());
    let message = json!({ "text": "Where is it?", "id": format!("draft: {SECRET} at nine") });
    let (status, result) = post(&fake, "messages", message).await;
    assert_eq!(status, 202, "{result}");
    let started = Instant::now();
    while !is_stored(folder.path()) || fake.halo_api("GET", "/status", None).await.1["busy"] == true {
        assert!(started.elapsed() < Duration::from_secs(30), "the id is stored with the message");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (status, result) = post(&fake, "forget", json!({ "matching": SECRET, "now": true })).await;
    assert_eq!((status, &result["other_texts"]), (200, &json!(1)), "{result}");
    fake.app.shutdown();
    assert!(!is_stored(folder.path()));
}

/// What was kept when a conversation was retokenized belongs to it, whatever their names: it is listed as its original, hidden
/// and restored with it, and erased with it.
#[tokio::test]
async fn originals_are_deleted_and_restored_with_their_conversation() {
    let folder = tempfile::tempdir().expect("a folder");
    let location = StoreLocation::Sqlite(folder.path().join("halo.db"));
    let fake = server(folder.path());
    conversation_with_secret(&fake).await;
    fake.app.shutdown();
    drop(fake);
    let mut store = Database::open(&location).expect("the store opens");
    let model = store.find_conversation("main").expect("it is read").expect("it is stored").model;
    for (kept, model) in [("first", "another model"), ("before", &*model)] {
        store
            .replace_by_copy("main", kept, model, &[], &mut |turn| Ok(Some(turn)))
            .expect("the conversation is replaced");
    }
    store.rename("main", "Lindau").expect("it is renamed");
    drop(store);

    let fake = server(folder.path());
    let listed = async || {
        let (status, list) = fake.halo_api("GET", "/conversations", None).await;
        assert_eq!(status, 200, "{list}");
        let rows = list.as_array().expect("a list").clone();
        let mut rows: Vec<(String, Value)> = rows
            .iter()
            .map(|row| (row["name"].as_str().unwrap_or_default().to_owned(), row["original_of"].clone()))
            .collect();
        rows.sort_by(|a, b| a.0.cmp(&b.0));
        rows
    };
    let deleted = async || {
        let (status, list) = fake.halo_api("GET", "/deleted_conversations", None).await;
        assert_eq!(status, 200, "{list}");
        list.as_array().expect("a list").iter().map(|row| row["name"].clone()).collect::<Vec<_>>()
    };
    let texts = async || {
        let mut texts = Vec::new();
        for name in ["Lindau", "before", "first"] {
            let (status, state) = fake.halo_api("GET", &format!("/conversations/{name}"), None).await;
            assert_eq!(status, 200, "{state}");
            texts.push(state["chunks"].to_string().contains(SECRET));
        }
        texts
    };
    let all = [("Lindau", Value::Null), ("before", "Lindau".into()), ("first", "before".into())];
    let all = all.map(|(name, of)| (name.to_owned(), of));
    assert_eq!(listed().await, all);
    assert_eq!(texts().await, [true; 3]);
    let (status, result) = fake.halo_api("GET", &format!("/search?q={SECRET}"), None).await;
    assert_eq!(status, 200, "{result}");
    assert!(result.to_string().contains("Lindau") && !result.to_string().contains("before"), "{result}");

    let (status, result) = fake.halo_api("DELETE", "/conversations/Lindau?confirm=Lindau", None).await;
    assert_eq!(status, 200, "{result}");
    assert_eq!(texts().await, [false; 3], "all are hidden");
    assert_eq!(deleted().await, ["Lindau"], "the original is not a row of its own");
    let (status, result) =
        fake.halo_api("POST", "/conversations/Lindau/forget/cancel", Some(&json!({}))).await;
    assert_eq!(status, 200, "{result}");
    assert_eq!(texts().await, [true; 3], "all are restored");
    assert_eq!(listed().await, all, "none was tokenized again for the present model");

    // A client that sends its history goes on with the one in their place.
    let (status, transcript) = fake.halo_api("GET", "/conversations/Lindau/transcript", None).await;
    assert_eq!(status, 200, "{transcript}");
    let said = transcript["messages"].as_array().expect("messages").iter().map(|message| {
        let chunks = message["chunks"].as_array().expect("chunks").iter();
        let text: String = chunks.filter_map(|chunk| chunk["text"].as_str()).collect();
        json!({ "role": message["role"], "content": text.trim() })
    });
    let next = json!({ "role": "user", "content": "And what about coffee?" });
    let messages: Vec<Value> = said.chain([next]).collect();
    let answer = fake.chat(&json!({ "model": "any", "messages": messages }), None).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let (_, list) = fake.halo_api("GET", "/conversations", None).await;
    let rows = list.as_array().expect("a list").iter();
    let turns: BTreeMap<&str, u64> = rows
        .map(|row| (row["name"].as_str().unwrap_or_default(), row["turns"].as_u64().unwrap_or(0)))
        .collect();
    assert_eq!(turns, BTreeMap::from([("Lindau", 6), ("before", 4), ("first", 4)]));

    let (status, result) =
        fake.halo_api("DELETE", "/conversations/Lindau?confirm=Lindau&now=true", None).await;
    assert_eq!((status, &result["warnings"]), (200, &json!([])), "{result}");
    assert_eq!(listed().await, []);
    fake.app.shutdown();
    drop(fake);
    assert!(!is_stored(folder.path()));
}

/// A name like that of an original is a guess: the conversation is not deleted with the other one.
#[tokio::test]
async fn conversations_with_the_name_of_an_original_are_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = server(folder.path());
    conversation_with_secret(&fake).await;
    let body = json!({ "model": "any", "messages": [{ "role": "user", "content": "I also like tea." }] });
    let answer = fake.chat(&body, Some("main (original)")).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let (status, result) = fake.halo_api("DELETE", "/conversations/main?confirm=main&now=true", None).await;
    assert_eq!(status, 200, "{result}");
    let (_, list) = fake.halo_api("GET", "/conversations", None).await;
    assert_eq!(list[0]["name"], "main (original)", "{list}");
    let (status, state) = fake.halo_api("GET", "/conversations/main%20(original)", None).await;
    assert!(status == 200 && state["chunks"].to_string().contains("I also like tea."), "{state}");
    fake.app.shutdown();
}
