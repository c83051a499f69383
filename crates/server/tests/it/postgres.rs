//! Conversations on a PostgreSQL server that crashes.

use crate::chat::chat_body;
use crate::fake::{FakeOptions, FakeServer, TestStore};
use crate::postgres_server::PostgresTestServer;
use halo_core::store::{Access, Store};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn start_postgres() -> PostgresTestServer {
    tokio::task::block_in_place(|| PostgresTestServer::start(&["max_connections=20"]))
}

fn server_on(postgres: &PostgresTestServer, limits: &str) -> Arc<FakeServer> {
    let database = tokio::task::block_in_place(|| postgres.new_database());
    let location = format!("{database}?{limits}").parse().expect("a valid address");
    let options = FakeOptions { store: TestStore::File(location), ..FakeOptions::default() };
    let fake = FakeServer::with_options(options);
    fake.script().token_delay = Duration::from_millis(40);
    Arc::new(fake)
}

fn long_answer() -> String {
    (0..30).map(|n| format!("word{n}")).collect::<Vec<_>>().join(" ")
}

/// All text of the conversation, from the store.
fn stored_text(fake: &FakeServer) -> String {
    let mut store = fake.store.open_database().expect("the store opens");
    let timeline = store.load("main", Access::Read).expect("the conversation loads");
    let chunks: Vec<_> = timeline.chunks().map(|chunk| chunk.id()).collect();
    store
        .chunk_texts("main", &chunks)
        .expect("the texts are read")
        .into_iter()
        .map(|chunk| chunk.text)
        .collect()
}

/// The server crashes in the middle of an answer and is back after a moment: the answer goes on, and not a word is lost.
#[tokio::test(flavor = "multi_thread")]
async fn answer_goes_on_after_a_postgres_crash() {
    let postgres = start_postgres();
    let fake = server_on(&postgres, "pool_timeout=30");
    fake.script_answers(&[&long_answer(), "Still here."]);
    let answer = tokio::spawn({
        let fake = Arc::clone(&fake);
        async move { fake.chat(&chat_body(&["u Count"]), Some("main")).await }
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    tokio::task::block_in_place(|| postgres.crash_and_restart());
    let answer = answer.await.expect("the request ends");
    assert_eq!((answer.status, answer.text()), (200, long_answer()), "{}", answer.body);
    let next = fake.chat(&chat_body(&["u Are you there?"]), Some("main")).await;
    assert_eq!((next.status, next.text().as_str()), (200, "Still here."));
}

/// The server is gone for longer than an answer waits: the answer fails, and the conversation goes on as soon as the server
/// is back, with every word that was seen.
#[tokio::test(flavor = "multi_thread")]
async fn conversation_reloads_after_postgres_was_gone() {
    let postgres = start_postgres();
    let fake = server_on(&postgres, "pool_timeout=1&statement_timeout=2");
    fake.script_answers(&["Hello.", &long_answer(), "Back again."]);
    assert_eq!(fake.chat(&chat_body(&["u Hi"]), Some("main")).await.status, 200);
    let answer = tokio::spawn({
        let fake = Arc::clone(&fake);
        async move {
            let body =
                serde_json::json!({ "messages": [{ "role": "user", "content": "Count" }], "stream": true });
            fake.stream_in("main", "/v1/chat/completions", &body).await
        }
    });
    tokio::time::sleep(Duration::from_millis(600)).await;
    tokio::task::block_in_place(|| postgres.crash());
    let (events, clean) = answer.await.expect("the request ends");
    let answer = events.concat();
    assert!(!clean && answer.contains("word3") && !answer.contains("word29"), "{answer}");
    assert!(
        answer.contains("\"error\"") && !answer.contains("[DONE]"),
        "the client sees the failure: {answer}"
    );
    let refused = fake.chat(&chat_body(&["u Anyone?"]), Some("main")).await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert_eq!(fake.get("/health").await.status, 503);
    tokio::task::block_in_place(|| postgres.launch());
    let asked = Instant::now();
    let next = fake.chat(&chat_body(&["u And now?"]), Some("main")).await;
    assert_eq!((next.status, next.text().as_str()), (200, "Back again."), "{}", next.body);
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
    let stored = tokio::task::block_in_place(|| stored_text(&fake));
    let last_seen = (0..30).rev().find(|n| answer.contains(&format!("word{n}"))).expect("some words");
    assert!(stored.contains(&format!("word{last_seen}")), "word{last_seen} was seen: {stored}");
}

/// A server that accepts connections and does not answer: readers get an error in time, and `/health` says so at once.
#[tokio::test(flavor = "multi_thread")]
async fn health_is_unavailable_while_postgres_is_frozen() {
    let postgres = start_postgres();
    let fake = server_on(&postgres, "pool_timeout=2&statement_timeout=2");
    fake.script_answers(&["Hello."]);
    assert_eq!(fake.chat(&chat_body(&["u Hi"]), Some("main")).await.status, 200);
    assert_eq!(fake.get("/health").await.status, 200);
    tokio::time::sleep(Duration::from_millis(1100)).await;
    tokio::task::block_in_place(|| postgres.freeze());
    let asked = Instant::now();
    assert_eq!(fake.get("/health").await.status, 503);
    assert!(asked.elapsed() < Duration::from_secs(4), "{:?}", asked.elapsed());
    let listed = fake.get("/api/halo/v1/conversations").await;
    assert_eq!(listed.status, 503, "{}", listed.text());
    assert!(asked.elapsed() < Duration::from_secs(15), "{:?}", asked.elapsed());
    tokio::task::block_in_place(|| postgres.thaw());
    let thawed = Instant::now();
    while fake.get("/health").await.status != 200 {
        assert!(thawed.elapsed() < Duration::from_secs(20), "not ready again");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(fake.get("/api/halo/v1/conversations").await.status, 200);
}
