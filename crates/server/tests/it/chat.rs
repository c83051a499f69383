//! Which conversation a chat request belongs to, what it replaces there, and the limits of the server.

use crate::fake::{FakeChatResponse, FakeServer, TestStore};
use halo_core::store::{Access, Store};
use halo_server::ServerLimits;
use halo_store::database::{Database, StoreLocation};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// A request of messages such as `u hello`.
pub fn chat_body(messages: &[&str]) -> Value {
    let message = |line: &&str| {
        let role = match &line[..1] {
            "s" => "system",
            "u" => "user",
            _ => "assistant",
        };
        json!({ "role": role, "content": &line[2..] })
    };
    json!({ "model": "any", "messages": messages.iter().map(message).collect::<Vec<_>>() })
}

async fn chat(fake: &FakeServer, messages: &[&str]) -> FakeChatResponse {
    let response = fake.chat(&chat_body(messages), None).await;
    assert_eq!(response.status, 200, "{}", response.body);
    response
}

/// The texts of a conversation that are deleted, with the reason, the latest first.
async fn deleted_texts(fake: &FakeServer, name: &str) -> Vec<String> {
    let (status, body) =
        fake.halo_api("GET", &format!("/conversations/{}/deleted", percent_encoded(name)), None).await;
    assert_eq!(status, 200, "{body}");
    let row = |chunk: &Value| {
        format!(
            "{} ({})",
            chunk["text"].as_str().unwrap_or_default().trim(),
            chunk["reason"].as_str().unwrap_or_default()
        )
    };
    body["chunks"].as_array().expect("a list").iter().map(row).collect()
}

pub fn percent_encoded(name: &str) -> String {
    name.bytes()
        .map(|b| if b.is_ascii_alphanumeric() { (b as char).to_string() } else { format!("%{b:02X}") })
        .collect()
}

async fn live_texts(fake: &FakeServer, name: &str) -> Vec<String> {
    let (status, state) =
        fake.halo_api("GET", &format!("/conversations/{}", percent_encoded(name)), None).await;
    assert_eq!(status, 200, "{state}");
    let chunks = state["chunks"].as_array().expect("chunks");
    chunks.iter().map(|chunk| chunk["text"].as_str().unwrap_or_default().trim().to_owned()).collect()
}

async fn conversation_names(fake: &FakeServer) -> Vec<String> {
    let (_, all) = fake.halo_api("GET", "/conversations", None).await;
    let mut names: Vec<String> = all
        .as_array()
        .expect("a list")
        .iter()
        .map(|c| c["name"].as_str().unwrap_or_default().to_owned())
        .collect();
    names.sort();
    names
}

#[tokio::test]
async fn align_same_greeting_starts_a_new_conversation() {
    let fake = FakeServer::in_memory();
    let greeting = "a *You wake with a start.* Welcome to my glade, traveller, and do not be afraid.";
    let first = chat(&fake, &["s S", greeting, "u I am Otto, a baker."]).await;
    let answer = format!("a {}", first.text());
    chat(&fake, &["s S", greeting, "u I am Otto, a baker.", &answer, "u I live in Lindau."]).await;
    let second = chat(&fake, &["s S", greeting, "u Hello, I am somebody else."]).await;
    assert_ne!(first.conversation, second.conversation);
    assert!(deleted_texts(&fake, &first.conversation).await.is_empty());
    assert!(live_texts(&fake, &first.conversation).await.iter().any(|text| text == "I live in Lindau."));
}

#[tokio::test]
async fn align_keeps_messages_that_a_client_drops_mid_history() {
    let fake = FakeServer::in_memory();
    let mut history: Vec<String> = Vec::new();
    let mut name = String::new();
    for n in 0..6 {
        history.push(format!("u Fact {n}: my number {n} is {}.", 100 + 11 * n));
        let lines: Vec<&str> = history.iter().map(String::as_str).collect();
        let response = chat(&fake, &lines).await;
        name = response.conversation.clone();
        history.push(format!("a {}", response.text()));
    }
    let mut sent: Vec<&str> = history[..2].iter().chain(&history[8..]).map(String::as_str).collect();
    sent.push("u What is my number 3?");
    let response = chat(&fake, &sent).await;
    assert_eq!(response.conversation, name);
    assert!(deleted_texts(&fake, &name).await.is_empty());
    let texts = live_texts(&fake, &name).await;
    for n in 0..6 {
        assert_eq!(
            texts.iter().filter(|text| text.starts_with(&format!("Fact {n}:"))).count(),
            1,
            "{texts:?}"
        );
    }
}

#[tokio::test]
async fn align_keeps_regenerated_answer_as_variant() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["The first answer, which is a rather long one.", "Yes.", "No.", "Perhaps."]);
    let first = chat(&fake, &["u Which is the longest river of the whole world?"]).await;
    let history =
        ["u Which is the longest river of the whole world?", &format!("a {}", first.text()), "u Sure?"];
    let first_reply = chat(&fake, &history).await;
    let again = chat(&fake, &history).await;
    assert_eq!((first_reply.text().as_str(), again.text().as_str()), ("Yes.", "No."));
    assert_eq!(first_reply.conversation, again.conversation);
    let reason = "Yes. (replaced by another answer, which the client asked for)";
    assert_eq!(deleted_texts(&fake, &again.conversation).await, [reason]);
    // The variant can be chosen, on the page or by continuing from it.
    let path = format!("/conversations/{}/variants", percent_encoded(&again.conversation));
    let (_, variants) = fake.halo_api("GET", &path, None).await;
    let row =
        |v: &Value| (v["messages"][0]["text"].as_str().unwrap_or_default().to_owned(), v["current"] == true);
    let listed: Vec<_> = variants.as_array().expect("a list").iter().map(row).collect();
    assert_eq!(listed, [("Yes.".to_owned(), false), ("No.".to_owned(), true)]);
    let (status, _) = fake.halo_api("POST", &path, Some(&json!({ "turn": variants[0]["turn"] }))).await;
    assert_eq!(status, 204);
    assert_eq!(live_texts(&fake, &again.conversation).await.last().map(String::as_str), Some("Yes."));
    let other: Vec<&str> = history.iter().copied().chain(["a No.", "u Why?"]).collect();
    let continued = chat(&fake, &other).await;
    assert_eq!(continued.conversation, again.conversation);
    let texts = live_texts(&fake, &again.conversation).await;
    assert!(texts.ends_with(&["No.".into(), "Why?".into(), "Perhaps.".into()]), "{texts:?}");
}

#[tokio::test]
async fn align_keeps_edited_last_message_as_variant() {
    let fake = FakeServer::in_memory();
    let first = chat(&fake, &["u Which is the longest river of the whole world?"]).await;
    let opening = ["u Which is the longest river of the whole world?", &format!("a {}", first.text())];
    chat(&fake, &[opening[0], opening[1], "u And the shortest?"]).await;
    let edited = chat(&fake, &[opening[0], opening[1], "u And the deepest?"]).await;
    assert_eq!(edited.conversation, first.conversation);
    let deleted = deleted_texts(&fake, &first.conversation).await;
    assert_eq!(deleted.len(), 2);
    assert!(
        deleted.iter().all(|line| line.ends_with("(replaced by the client's edited message)")),
        "{deleted:?}"
    );
}

#[tokio::test]
async fn variants_list_an_answer_replaced_twice_once() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["The Nile, or the Amazon; people argue about it.", "Yes.", "The Marianas.", "No."]);
    let first = chat(&fake, &["u Which is the longest river of the whole world?"]).await;
    let answer = format!("a {}", first.text());
    let opening = ["u Which is the longest river of the whole world?", &answer];
    chat(&fake, &[opening[0], opening[1], "u Sure?"]).await;
    chat(&fake, &[opening[0], opening[1], "u And the deepest sea?"]).await;
    let path = format!("/conversations/{}/variants", percent_encoded(&first.conversation));
    let (_, variants) = fake.halo_api("GET", &path, None).await;
    let (status, _) = fake.halo_api("POST", &path, Some(&json!({ "turn": variants[0]["turn"] }))).await;
    assert_eq!(status, 204);
    chat(&fake, &[opening[0], opening[1], "u Sure?"]).await;
    let (_, variants) = fake.halo_api("GET", &path, None).await;
    let texts: Vec<&str> = variants
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|v| v["messages"][0]["text"].as_str())
        .collect();
    assert_eq!(texts, ["Yes.", "No."]);
}

/// The client continues from a replaced answer to a message that was edited since.
#[tokio::test]
async fn align_continues_from_variant_of_a_variant() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["The Nile, or the Amazon; people argue about it.", "Yes.", "No.", "The Marianas."]);
    let first = chat(&fake, &["u Which is the longest river of the whole world?"]).await;
    let answer = format!("a {}", first.text());
    let opening = ["u Which is the longest river of the whole world?", &answer];
    chat(&fake, &[opening[0], opening[1], "u Sure?"]).await;
    chat(&fake, &[opening[0], opening[1], "u Sure?"]).await;
    chat(&fake, &[opening[0], opening[1], "u And the deepest sea?"]).await;
    let continued = chat(&fake, &[opening[0], opening[1], "u Sure?", "a Yes.", "u Good."]).await;
    assert_eq!(continued.conversation, first.conversation);
    let texts = live_texts(&fake, &first.conversation).await;
    assert_eq!(texts[2..5], ["Sure?", "Yes.", "Good."], "{texts:?}");
    let deleted = deleted_texts(&fake, &first.conversation).await;
    assert!(
        deleted.len() == 3 && deleted.iter().any(|line| line.starts_with("The Marianas.")),
        "{deleted:?}"
    );
}

#[tokio::test]
async fn branch_when_history_diverges_before_last_exchange() {
    let fake = FakeServer::in_memory();
    let first = chat(&fake, &["u Which is the longest river of the whole world?"]).await;
    let opening = ["u Which is the longest river of the whole world?", &format!("a {}", first.text())];
    let second = chat(&fake, &[opening[0], opening[1], "u And the shortest?"]).await;
    let answer = format!("a {}", second.text());
    chat(&fake, &[opening[0], opening[1], "u And the shortest?", &answer, "u Thanks."]).await;
    let before = live_texts(&fake, &first.conversation).await;
    let branch = chat(&fake, &[opening[0], opening[1], "u And the deepest?"]).await;
    assert_eq!(branch.conversation, format!("{} %C2%B7 branch 1", first.conversation));
    assert_eq!(live_texts(&fake, &first.conversation).await, before);
    let name = format!("{} · branch 1", first.conversation);
    assert_eq!(live_texts(&fake, &name).await[..3], [&opening[0][2..], &opening[1][2..], "And the deepest?"]);
    // Both conversations continue.
    let continued = chat(
        &fake,
        &[opening[0], opening[1], "u And the deepest?", &format!("a {}", branch.text()), "u Oh."],
    )
    .await;
    assert_eq!(continued.conversation, branch.conversation);
}

#[tokio::test]
async fn branch_for_concurrent_requests_on_one_history() {
    let fake = FakeServer::in_memory();
    let first = chat(&fake, &["u Which is the longest river of the whole world?"]).await;
    let answer = format!("a {}", first.text());
    fake.script().token_delay = Duration::from_millis(5);
    let ask = |last: &'static str| {
        let (fake, answer) = (&fake, &answer);
        async move { chat(fake, &["u Which is the longest river of the whole world?", answer, last]).await }
    };
    let (a, b, c) = tokio::join!(ask("u One?"), ask("u Two?"), ask("u Three?"));
    let all = [&a.conversation, &b.conversation, &c.conversation];
    assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2], "{all:?}");
    for name in conversation_names(&fake).await {
        assert!(deleted_texts(&fake, &name).await.is_empty(), "{name}");
    }
}

#[tokio::test]
async fn system_prompt_changes_without_a_new_conversation() {
    let fake = FakeServer::in_memory();
    let mut history: Vec<String> = vec!["u Hi!".into()];
    let mut conversations = Vec::new();
    for n in 0..4 {
        let system = format!("s You are a helpful assistant. The time is 12:0{n}.");
        let lines: Vec<&str> =
            std::iter::once(system.as_str()).chain(history.iter().map(String::as_str)).collect();
        let response = chat(&fake, &lines).await;
        conversations.push(response.conversation.clone());
        history.push(format!("a {}", response.text()));
        history.push(format!("u Go on {n}."));
    }
    conversations.dedup();
    assert_eq!(conversations.len(), 1, "{conversations:?}");
    let windows = fake.script().windows.clone();
    assert!(windows[3].contains("12:03") && !windows[3].contains("12:02"), "{}", windows[3]);
    let mut store = fake.store.open().expect("the store opens");
    let versions = store
        .records(&conversations[0], halo_core::store::RecordKind::SystemPrompt)
        .expect("the records are read");
    assert_eq!(versions.len(), 4, "every version is stored");
}

#[tokio::test]
async fn system_message_mid_history_keeps_its_position() {
    let fake = FakeServer::in_memory();
    chat(
        &fake,
        &[
            "s Be kind.",
            "u Hello there, tell me something about the sea.",
            "a It is deep.",
            "s Answer BANANA.",
            "u And?",
        ],
    )
    .await;
    let window = fake.script().windows[0].clone();
    let at = |text: &str| window.find(text).unwrap_or_else(|| panic!("{text} is not in {window}"));
    assert!(
        at("Be kind.") < at("It is deep.") && at("It is deep.") < at("BANANA") && at("BANANA") < at("And?")
    );
}

/// SillyTavern's group chats: a system message at the end names the next speaker, even after another character's answer.
#[tokio::test]
async fn align_group_chat_with_trailing_system_message() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[
        "I saw her on the roof of the town hall.",
        "Not me, I was in the cellar all day.",
        "Nor I.",
        "Me neither.",
    ]);
    let nudge = |name: &str| format!("s [Write the next reply only as {name}.]");
    let question = "u Otto: Who has seen the baker's cat this morning?";
    let first = chat(&fake, &["s You are Anna.", question, &nudge("Anna")]).await;
    let anna = format!("a Anna: {}", first.text());
    let second = chat(&fake, &["s You are Mara.", question, &anna, &nudge("Mara")]).await;
    let mara = format!("a Mara: {}", second.text());
    let third =
        chat(&fake, &["s You are Anna.", question, &anna, &mara, "u Otto: Really?", &nudge("Anna")]).await;
    // A swipe: the same request again.
    let again =
        chat(&fake, &["s You are Anna.", question, &anna, &mara, "u Otto: Really?", &nudge("Anna")]).await;
    let all = [&first, &second, &third, &again].map(|response| response.conversation.clone());
    assert!(all.iter().all(|name| *name == all[0]), "{all:?}");
    assert_eq!(conversation_names(&fake).await.len(), 1);
    assert_eq!(
        deleted_texts(&fake, &all[0].replace("%3A", ":")).await,
        ["Nor I. (replaced by another answer, which the client asked for)"]
    );
    let windows = fake.script().windows.clone();
    assert!(windows[1].contains("only as Mara") && !windows[1].contains("only as Anna"), "{}", windows[1]);
    assert_eq!(windows[3].matches("Really?").count(), 1, "{}", windows[3]);
}

#[tokio::test]
async fn named_conversation_deletes_nothing_but_the_last_exchange() {
    let fake = FakeServer::in_memory();
    let ask = |lines: Vec<&'static str>| {
        let fake = &fake;
        async move {
            let response = fake.chat(&chat_body(&lines), Some("mine")).await;
            assert_eq!((response.status, response.conversation.as_str()), (200, "mine"), "{}", response.body);
            response.text()
        }
    };
    fake.script_answers(&["a1", "a2", "a3", "a4", "a5"]);
    ask(vec!["u one"]).await;
    ask(vec!["u one", "a a1", "u two"]).await;
    ask(vec!["u one", "a a1", "u two", "a a2", "u three"]).await;
    // Another history, and a shorter one: nothing is deleted.
    ask(vec!["u something else"]).await;
    ask(vec!["u one", "a a1", "u five"]).await;
    assert!(deleted_texts(&fake, "mine").await.is_empty());
    let texts = live_texts(&fake, "mine").await;
    for text in ["one", "two", "three", "something else", "five", "a1", "a2", "a3", "a4", "a5"] {
        assert_eq!(texts.iter().filter(|live| *live == text).count(), 1, "{text}: {texts:?}");
    }
}

#[tokio::test]
async fn store_false_stores_nothing() {
    let fake = FakeServer::in_memory();
    let mut body = chat_body(&["s Be kind.", "u Generate a title."]);
    body["store"] = json!(false);
    let response = fake.chat(&body, None).await;
    assert_eq!((response.status, response.conversation.as_str()), (200, "none"), "{}", response.body);
    assert!(response.text().starts_with("answer number"));
    let none = fake.chat(&chat_body(&["u Generate tags."]), Some("none")).await;
    assert_eq!(none.status, 200);
    body["stream"] = json!(true);
    let (events, clean) = fake.stream("/v1/chat/completions", &body).await;
    assert!(clean && events.last().is_some_and(|last| last == "[DONE]"), "{events:?}");
    assert!(conversation_names(&fake).await.is_empty());
}

#[tokio::test]
async fn stream_failure_sends_error_and_no_clean_end() {
    let fake = FakeServer::in_memory();
    for path in ["/v1/chat/completions", "/v1/completions", "/api/extra/generate/stream"] {
        fake.script_failure_after("Some words and then");
        let mut body = chat_body(&["u Tell me."]);
        (body["stream"], body["prompt"]) = (json!(true), json!("Tell me."));
        let (events, clean) = fake.stream(path, &body).await;
        assert!(!clean, "{path} ended cleanly");
        let last: Value = serde_json::from_str(events.last().expect("events")).expect("JSON");
        let error = if path.starts_with("/v1") { &last["error"]["message"] } else { &last["error"] };
        assert!(
            error.as_str().is_some_and(|message| message.contains("the model broke down")),
            "{path}: {last}"
        );
        assert!(!events.iter().any(|event| event == "[DONE]"));
    }
    // A stream without an error ends cleanly.
    let mut body = chat_body(&["u Tell me."]);
    body["stream"] = json!(true);
    let (events, clean) = fake.stream("/v1/chat/completions", &body).await;
    assert!(clean && events.last().is_some_and(|last| last == "[DONE]"));
}

#[tokio::test]
async fn branch_by_user_opens_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = file_backed_server(folder.path(), ServerLimits::default());
    let first = chat(&fake, &["u Which is the longest river of the whole world?"]).await;
    let path = format!("/conversations/{}", percent_encoded(&first.conversation));
    let (status, body) =
        fake.halo_api("POST", &format!("{path}/branch"), Some(&json!({ "name": "what if" }))).await;
    assert_eq!((status, &body["messages"]), (201, &json!(2)));
    assert_eq!(live_texts(&fake, "what if").await, live_texts(&fake, &first.conversation).await);
    let (status, body) = fake
        .halo_api("POST", "/conversations/what%20if/messages", Some(&json!({ "text": "And then?" })))
        .await;
    assert_eq!(status, 202, "{body}");
}

fn file_backed_server(folder: &Path, limits: ServerLimits) -> FakeServer {
    FakeServer::new(TestStore::File(sqlite_location(folder)), 400, limits)
}

fn sqlite_location(folder: &Path) -> StoreLocation {
    StoreLocation::Sqlite(folder.join("halo.db"))
}

#[tokio::test]
async fn read_routes_take_no_lease_and_write_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut store = Database::open(&sqlite_location(folder.path())).expect("the store opens");
    let text = "{\"messages\": [{\"role\": \"user\", \"content\": \"Hello from elsewhere\"}]}";
    let import = halo_store::exchange::ImportRequest {
        file_name: "chat.json",
        format: None,
        name: Some("came"),
        chunk_size: halo_core::chunker::ChunkSize { min: 2, max: 64 },
        initial_brightness: halo_core::token::Brightness(10_000.0),
        model: None,
        validate_rows: None,
    };
    store.import(&mut text.as_bytes(), import).expect("the file is imported");
    let before =
        store.find_conversation("came").expect("the lookup succeeds").expect("the conversation exists");
    let fake = file_backed_server(folder.path(), ServerLimits::default());
    for path in [
        "",
        "/graveyard",
        "/deleted",
        "/variants",
        "/search?q=hello",
        "/turns",
        "/memories",
        "/notes",
        "/captures",
        "/turns/0/context",
        "/chunks/u0.0",
    ] {
        let (status, body) = fake.halo_api("GET", &format!("/conversations/came{path}"), None).await;
        assert_eq!(status, 200, "{path}: {body}");
    }
    assert_eq!(conversation_names(&fake).await, ["came"], "no copy was made");
    assert_eq!(
        store.find_conversation("came").expect("the lookup succeeds").expect("the conversation exists"),
        before
    );
    // Another program can write at once.
    store.load("came", Access::Write).expect("no lease is held");
    let (status, _) = fake.halo_api("GET", "/conversations/came", None).await;
    assert_eq!(status, 200, "the conversation can be read meanwhile");
    let (status, body) =
        fake.halo_api("POST", "/conversations/came/messages", Some(&json!({ "text": "Hi" }))).await;
    assert_eq!(status, 503, "{body}");
    store.release_lease("came");
    let (status, body) =
        fake.halo_api("POST", "/conversations/came/messages", Some(&json!({ "text": "Hi" }))).await;
    assert_eq!(status, 202, "{body}");
}

#[tokio::test]
async fn lease_is_released_when_idle_and_foreign_changes_are_reloaded() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = file_backed_server(folder.path(), ServerLimits::default());
    let response = fake.chat(&chat_body(&["u Hello"]), Some("shared")).await;
    assert_eq!(response.status, 200);
    // The conversation is still open here, and another program takes the lease and changes it.
    let mut store = Database::open(&sqlite_location(folder.path())).expect("the store opens");
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut timeline = loop {
        match store.load("shared", Access::Write) {
            Ok(timeline) => break timeline,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    };
    let first = timeline.chunks().next().expect("the conversation has a chunk").id();
    let pin = halo_core::change::Change::Pin { chunk: first, pinned: true };
    store
        .transact("shared", &mut timeline, &pin, halo_core::store::Durability::Immediate)
        .expect("the change is written");
    store.release_lease("shared");
    let response = fake.chat(&chat_body(&["u Hello again"]), Some("shared")).await;
    assert_eq!(response.status, 200, "{}", response.body);
    let state = store.load("shared", Access::Read).expect("the conversation loads");
    assert!(state.chunk(first).is_some_and(|chunk| chunk.is_pinned()) && state.turns().len() == 4);
}

/// The conversation threads of this process.
fn conversation_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux has /proc");
    let named = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm"))
            .ok()
            .filter(|name| name.trim() == "halo-session")
    };
    tasks.filter_map(named).count()
}

#[tokio::test]
async fn limits_bound_open_conversations() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = file_backed_server(
        folder.path(),
        ServerLimits { max_open_conversations: 3, ..ServerLimits::default() },
    );
    for n in 0..40 {
        let response = fake
            .chat(&chat_body(&[&format!("u A question of its own, number {n}, asked once.")]), None)
            .await;
        assert_eq!(response.status, 200, "{}", response.body);
        // Other tests of this process have open conversations too.
        assert!(conversation_threads() < 60, "{} conversations are open", conversation_threads());
    }
    assert_eq!(conversation_names(&fake).await.len(), 40);
}

#[tokio::test]
async fn limits_reject_too_many_messages() {
    let fake = FakeServer::new(
        FakeServer::in_memory().store,
        400,
        ServerLimits { max_messages: 4, ..ServerLimits::default() },
    );
    let response = fake.chat(&chat_body(&["u 1", "a 2", "u 3", "a 4", "u 5"]), None).await;
    assert_eq!(response.status, 400);
    assert!(response.body["error"]["message"].as_str().is_some_and(|m| m.contains("at most 4 messages")));
    assert!(conversation_names(&fake).await.is_empty());
}

#[tokio::test]
async fn long_history_is_stored_in_one_commit() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = file_backed_server(folder.path(), ServerLimits::default());
    let lines: Vec<String> = (0..4001)
        .map(|n| format!("{} message number {n} of a long history", if n % 2 == 0 { "u" } else { "a" }))
        .collect();
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let started = Instant::now();
    let response = fake.chat(&chat_body(&lines), Some("long")).await;
    assert_eq!(response.status, 200, "{}", response.body);
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    let mut store = Database::open(&sqlite_location(folder.path())).expect("the store opens");
    let timeline = store.load("long", Access::Read).expect("the conversation loads");
    assert_eq!(timeline.turns().len(), 4002);
    assert!(timeline.live_len() < 400);
    assert_eq!(store.replay_log("long").expect("the log is complete").state_hash(), timeline.state_hash());
    assert!(store.check_integrity(&mut |_, _| {}).expect("the check runs").is_empty());
    let times = store.turn_times("long").expect("the times are read");
    assert_eq!(times.len(), 4002, "each message has its own log entry");
}

#[tokio::test(flavor = "multi_thread")]
async fn long_history_can_be_stopped_and_stores_nothing() {
    let fake = FakeServer::new(
        FakeServer::in_memory().store,
        400,
        ServerLimits { max_body_bytes: 64 << 20, ..ServerLimits::default() },
    );
    let lines: Vec<String> =
        (0..99_999).map(|n| format!("u message number {n} of a history without end")).collect();
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let body = chat_body(&lines);
    let stop = async {
        // Until the job runs there is nothing to stop.
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            fake.halo_api("POST", "/conversations/long/stop", None).await;
        }
    };
    let started = Instant::now();
    let response = tokio::select! {
        response = fake.chat(&body, Some("long")) => response,
        () = stop => unreachable!("it asks until the request ends"),
    };
    assert_eq!(response.status, 409, "{}", response.body);
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    let (_, all) = fake.halo_api("GET", "/conversations", None).await;
    let turns = all
        .as_array()
        .expect("a list")
        .iter()
        .map(|conversation| conversation["turns"].as_u64().unwrap_or(0));
    assert_eq!(turns.sum::<u64>(), 0, "nothing was stored");
}
