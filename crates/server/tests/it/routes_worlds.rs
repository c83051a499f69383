//! Worlds: the user's commands, the clock, heartbeats, and a world that another program runs.

use crate::fake::{ALLOWED_WORLD_MODEL, FakeOptions, FakeServer};
use crate::fixture::prepared_server;
use halo_core::row_store::RowStore;
use halo_worlds::world_store::WorldStore;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

async fn world(fake: &FakeServer) -> Value {
    let (status, world) = fake.halo_api("GET", "/worlds/village", None).await;
    assert_eq!(status, 200, "{world}");
    world
}

async fn command(fake: &FakeServer, body: Value) -> (u16, Value) {
    fake.halo_api("POST", "/worlds/village/commands", Some(&body)).await
}

async fn messages(fake: &FakeServer, query: &str) -> Vec<Value> {
    let (status, list) =
        fake.halo_api("GET", &format!("/worlds/village/rooms/1/messages{query}"), None).await;
    assert_eq!(status, 200, "{list}");
    list.as_array().expect("a list").clone()
}

/// A JSON pointer into the world after a command, and the value there.
type WorldEffect = (&'static str, Value);

#[tokio::test]
async fn world_commands_change_the_world() {
    let prepared = prepared_server();
    let fake = &prepared.fake;
    let effects: [(Value, WorldEffect); 12] = [
        (json!({ "command": "join", "room": 2 }), ("/rooms/1/members/0/id", json!(0))),
        (json!({ "command": "leave", "room": 2 }), ("/rooms/1/members/0/id", json!(2))),
        (json!({ "command": "say", "room": 1, "message": "Hello." }), ("/rooms/0/members/0/id", json!(0))),
        (json!({ "command": "pause", "agent": 1 }), ("/agents/0/paused", json!(true))),
        (json!({ "command": "resume", "agent": 1 }), ("/agents/0/paused", json!(false))),
        (json!({ "command": "wake", "agent": 1 }), ("/agents/0/next", json!(0))),
        (
            json!({ "command": "attend", "agent": 2, "room": 1, "value": "30%" }),
            ("/rooms/0/members/2/attention", json!("30%")),
        ),
        (
            json!({ "command": "create", "name": "Cleo", "prompt": "A fisher.", "room": 1 }),
            ("/agents/2/name", json!("Cleo")),
        ),
        (
            json!({ "command": "create", "name": "Dora", "prompt": "Counts boats.", "kind": "bot" }),
            ("/agents/3/kind", json!("bot")),
        ),
        (json!({ "command": "retire", "agent": 4 }), ("/agents/3", Value::Null)),
        (json!({ "command": "retire", "agent": 3 }), ("/agents/2", Value::Null)),
        (json!({ "command": "react", "message": 1, "reaction": "heart" }), ("/open", json!(true))),
    ];
    for (body, (pointer, expected)) in effects {
        let (status, world) = command(fake, body.clone()).await;
        assert_eq!(status, 200, "{body}: {world}");
        assert_eq!(
            world.pointer(pointer).cloned().unwrap_or_default(),
            expected,
            "{body}: {pointer} in {world}"
        );
    }
    let first = messages(fake, "").await[0].clone();
    assert_eq!(first["reactions"], json!({ "heart": ["The Architect"] }), "{first}");
}

/// The user creates an agent with a right, changes it, moves it between rooms, and takes the right back.
#[tokio::test]
async fn world_commands_create_change_and_retire_agents() {
    let prepared = prepared_server();
    let fake = &prepared.fake;
    assert_eq!(world(fake).await["models"], json!(["local"]));
    let effects: [(Value, WorldEffect); 10] = [
        (
            json!({ "command": "create", "name": "Cleo", "prompt": "Keeps order.", "kind": "bot",
                "model": "local", "can_create_agents": true }),
            ("/agents/2/can_create_agents", json!(true)),
        ),
        (json!({ "command": "alter", "agent": 3, "name": "Clio" }), ("/agents/2/name", json!("Clio"))),
        (
            json!({ "command": "alter", "agent": 3, "prompt": "Keeps the peace." }),
            ("/agents/2/name", json!("Clio")),
        ),
        (json!({ "command": "alter", "agent": 3, "interval": 2.5 }), ("/agents/2/interval", json!(2.5))),
        (
            json!({ "command": "alter", "agent": 3, "input_format": "toon", "output_format": "toon" }),
            ("/agents/2/input_format", json!("toon")),
        ),
        (
            json!({ "command": "alter", "agent": 3, "can_create_agents": false }),
            ("/agents/2/can_create_agents", json!(false)),
        ),
        (
            json!({ "command": "alter", "agent": 1, "can_create_agents": true }),
            ("/agents/0/can_create_agents", json!(true)),
        ),
        (json!({ "command": "invite", "agent": 3, "room": 1 }), ("/rooms/0/members/2/id", json!(3))),
        (json!({ "command": "remove", "agent": 3, "room": 1 }), ("/rooms/0/members/2", Value::Null)),
        (json!({ "command": "retire", "agent": 3 }), ("/agents/2", Value::Null)),
    ];
    for (body, (pointer, expected)) in effects {
        let (status, world) = command(fake, body.clone()).await;
        assert_eq!(status, 200, "{body}: {world}");
        assert_eq!(world.pointer(pointer).cloned().unwrap_or_default(), expected, "{body}: {world}");
    }
    for (body, status, expected) in [
        (json!({ "command": "alter", "agent": 9, "name": "X" }), 422, "there is no agent 9"),
        (json!({ "command": "alter", "agent": 1 }), 422, "nothing to alter"),
        (json!({ "command": "alter", "agent": 1, "model": "none" }), 422, "there is no model 'none'"),
        (json!({ "command": "alter", "agent": 1, "interval": 11 }), 422, "1 to 10 seconds"),
        (json!({ "command": "alter", "agent": 1, "input_format": "xml" }), 400, "xml"),
        (json!({ "command": "alter", "agent": 1, "colour": "red" }), 400, "unknown field"),
        (json!({ "command": "create", "name": "Dan", "prompt": "x", "model": "none" }), 422, "no model"),
        (json!({ "command": "remove", "agent": 1, "room": 1 }), 422, "its own room"),
    ] {
        let (actual, result) = command(fake, body.clone()).await;
        let message = result["error"].as_str().unwrap_or_default();
        assert!(actual == status && message.contains(expected), "{body}: {actual} {result}");
    }
    // The right of agent 1 is in its HUD.
    let (_, mind) = fake.halo_api("GET", "/worlds/village/agents/1/hud", None).await;
    assert!(mind["hud"]["text"].as_str().expect("a text").contains("create_agent"), "{mind}");
}

#[tokio::test]
async fn world_telemetry_has_a_history_by_section_and_format() {
    let prepared = prepared_server();
    let fake = &prepared.fake;
    let telemetry = async |query: &str| {
        let (status, body) = fake.halo_api("GET", &format!("/worlds/village/telemetry{query}"), None).await;
        assert_eq!(status, 200, "{body}");
        body
    };
    assert_eq!(telemetry("").await, json!({ "heartbeats": [], "formats": {} }));
    command(fake, json!({ "command": "pause", "agent": 2 })).await;
    for n in 0..5 {
        fake.script_answers(&[
            &json!({ "responses": [{ "room_id": 1, "message": format!("{n}.") }] }).to_string()
        ]);
        step(fake).await;
    }
    let all = telemetry("").await;
    let beats: Vec<u64> = all["heartbeats"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|beat| beat["beat"].as_u64())
        .collect();
    assert_eq!(beats, [3, 4, 5], "the server keeps three");
    let last = &all["heartbeats"][2];
    let number =
        |pointer: &str| last.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{last}"));
    let sections: u64 = ["shared", "self", "recent_actions", "rooms"]
        .iter()
        .map(|name| number(&format!("/sections/{name}")))
        .sum();
    assert!(sections <= number("/tokens") && sections + 40 > number("/tokens"), "{last}");
    assert_eq!((number("/agent"), number("/formats/json")), (1, number("/tokens")), "{last}");
    assert!(number("/rooms/1") > 0 && number("/prompt_tokens") >= number("/tokens"), "{last}");
    assert_eq!(all["formats"]["json"]["saved_percent"], json!(0.0));
    assert!(all["formats"]["toon"]["saved_percent"].as_f64() > Some(0.0), "{all}");
    let names: Vec<&String> = all["formats"].as_object().expect("an object").keys().collect();
    assert_eq!(names, ["compact_json", "json", "toon", "toon_positional"]);
    assert_eq!(telemetry("?limit=1").await["heartbeats"][0]["beat"], 5);
    assert_eq!(telemetry("?agent=2").await["heartbeats"], json!([]));
    for (path, status) in [
        ("/worlds/village/telemetry?limit=0", 400),
        ("/worlds/village/telemetry?limit=10001", 400),
        ("/worlds/none/telemetry", 404),
    ] {
        assert_eq!(fake.halo_api("GET", path, None).await.0, status, "{path}");
    }
}

#[tokio::test]
async fn world_grant_and_deny_answer_join_requests() {
    let prepared = prepared_server();
    let fake = &prepared.fake;
    command(fake, json!({ "command": "create", "name": "Cleo", "prompt": "A fisher." })).await;
    // Only Cleo has a heartbeat.
    for agent in [1, 2] {
        command(fake, json!({ "command": "pause", "agent": agent })).await;
    }
    for (answer, members) in [("deny", 2), ("grant", 3)] {
        let action = json!({ "type": "request_access", "room_id": 1, "key": "rose" });
        fake.script_answers(&[&json!({ "responses": [], "actions": [action] }).to_string()]);
        step(fake).await;
        let asked = world(fake).await;
        let request = asked["rooms"][0]["requests"][0].clone();
        assert_eq!((&request["name"], &request["key"]), (&json!("Cleo"), &json!("rose")), "{asked}");
        let body = json!({ "command": answer, "room": 1, "request": request["id"] });
        let (status, world) = command(fake, body).await;
        assert_eq!(status, 200, "{world}");
        assert_eq!(world["rooms"][0]["requests"], json!([]));
        assert_eq!(world["rooms"][0]["members"].as_array().map(Vec::len), Some(members), "{world}");
    }
    let (status, refusal) = command(fake, json!({ "command": "grant", "room": 1, "request": 99 })).await;
    assert_eq!(status, 422, "{refusal}");
}

/// Runs one heartbeat and waits for its end.
async fn step(fake: &FakeServer) {
    let beats = |world: &Value| -> u64 {
        let agents = world["agents"].as_array().into_iter().flatten();
        agents.filter_map(|agent| agent["beats"].as_u64()).sum()
    };
    let before = beats(&world(fake).await);
    let (status, result) =
        fake.halo_api("PUT", "/worlds/village/clock", Some(&json!({ "step": true }))).await;
    assert_eq!(status, 200, "{result}");
    let deadline = Instant::now() + Duration::from_secs(10);
    while beats(&world(fake).await) == before {
        assert!(Instant::now() < deadline, "no heartbeat: {result}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn world_heartbeat_sends_the_answer_of_the_model() {
    let prepared = prepared_server();
    let fake = &prepared.fake;
    command(fake, json!({ "command": "pause", "agent": 2 })).await;
    let answer = json!({
        "responses": [{ "room_id": 1, "message": "Good morning, all." }],
        "actions": [{ "type": "set", "path": "mood", "value": "glad" }],
    });
    fake.script_answers(&[&answer.to_string()]);
    step(fake).await;
    let deadline = Instant::now() + Duration::from_secs(10);
    while !messages(fake, "").await.iter().any(|message| message["text"] == "Good morning, all.") {
        assert!(Instant::now() < deadline, "the message is delivered");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let window = fake.script().windows[0].clone();
    assert!(window.contains("The roses are out.") && window.contains("A gardener"), "{window}");
    let (_, mind) = fake.halo_api("GET", "/worlds/village/agents/1/hud", None).await;
    assert_eq!(mind["knowledge"]["mood"], "glad", "{mind}");
    assert_eq!(mind["recent_actions"][0]["type"], "set", "{mind}");
}

#[tokio::test]
async fn world_clock_runs_and_pauses() {
    let prepared = prepared_server();
    let fake = &prepared.fake;
    let set = async |body: Value| fake.halo_api("PUT", "/worlds/village/clock", Some(&body)).await.1;
    let stored = world(fake).await;
    assert_eq!((&stored["open"], &stored["paused"]), (&json!(false), &json!(true)));
    for agent in [1, 2] {
        command(fake, json!({ "command": "pause", "agent": agent })).await;
    }
    let running = set(json!({ "paused": false, "speed": 100.0 })).await;
    assert_eq!((&running["paused"], &running["open"]), (&json!(false), &json!(true)));
    tokio::time::sleep(Duration::from_millis(20)).await;
    let paused = set(json!({ "paused": true })).await;
    let passed = paused["now"].as_i64().unwrap_or(0) - running["now"].as_i64().unwrap_or(0);
    assert!(passed >= 2000, "20 ms at speed 100 are 2 s in the world, not {passed} ms");
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(world(fake).await["now"], paused["now"], "a paused world has no time");
}

#[tokio::test]
async fn world_messages_come_in_pages() {
    let prepared = prepared_server();
    let fake = &prepared.fake;
    for n in 0..120 {
        let (status, _) =
            command(fake, json!({ "command": "say", "room": 1, "message": format!("line {n}") })).await;
        assert_eq!(status, 200);
    }
    let latest = messages(fake, "").await;
    assert_eq!((latest.len(), &latest[99]["text"]), (100, &json!("line 119")));
    let earlier = messages(fake, &format!("?before={}", latest[0]["id"])).await;
    assert_eq!(earlier[0]["text"], "The roses are out.");
    assert_eq!(earlier.len() + latest.len(), 122, "all messages, with the one about joining");
    assert!(messages(fake, "?before=1").await.is_empty());
}

#[tokio::test]
async fn world_that_another_program_runs_queues_commands() {
    let prepared = prepared_server();
    let fake = &prepared.fake;
    let other = WorldStore::open(Box::new(fake.store.open_database().expect("the store opens")), "village");
    let mut other = other.expect("another program opens the world");
    assert_eq!(world(fake).await["runs_elsewhere"], true);
    let body = json!({ "command": "say", "room": 1, "message": "From afar." });
    let (status, result) = command(fake, body).await;
    assert_eq!((status, &result["queued"], &result["open"]), (202, &json!(true), &json!(false)), "{result}");
    let (changes, refused) = other.apply_posted_commands(1 << 41).expect("the commands are read");
    assert!(refused.is_empty() && changes.messages.values().any(|message| message.content == "From afar."));
    other.save().expect("the world is saved");
    // Its messages can be read here meanwhile.
    assert!(messages(fake, "").await.iter().any(|message| message["text"] == "From afar."));
    drop(other);
    let (status, result) =
        fake.halo_api("PUT", "/worlds/village/clock", Some(&json!({ "paused": true }))).await;
    assert_eq!((status, &result["open"]), (200, &json!(true)), "{result}");
}

#[tokio::test]
async fn world_create_accepts_files_and_allowed_models() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = FakeServer::with_options(FakeOptions::in_folder(folder.path()));
    let file = json!({
        "agents": [{ "name": "Solo", "seed": "Alone." }],
        "models": [{ "name": "remote", "at": ALLOWED_WORLD_MODEL }],
    });
    let body = json!({ "name": "island", "file": file.to_string() });
    let (status, world) = fake.halo_api("POST", "/worlds", Some(&body)).await;
    assert_eq!((status, &world["agents"][0]["model"]), (201, &json!("remote")), "{world}");
    let mut store = fake.store.open_database().expect("the store opens");
    assert!(store.is_namespace_leased("island").expect("the lease is read"), "this server runs it");
    // Deleting closes it first.
    let (status, _) = fake.halo_api("DELETE", "/worlds/island", None).await;
    assert_eq!(status, 204);
    assert!(store.list_namespaces().expect("the worlds are listed").is_empty());
}

#[tokio::test]
async fn world_is_listed_although_it_is_damaged() {
    let prepared = prepared_server();
    let mut store = prepared.fake.store.open_database().expect("the store opens");
    let damaged = halo_core::row_store::Row {
        kind: halo_worlds::world_store::HEADER_KIND,
        key: "0".into(),
        value: "{".into(),
    };
    store.put_rows("village", &[damaged], &[]).expect("the row is written");
    let (status, list) = prepared.fake.halo_api("GET", "/worlds", None).await;
    assert_eq!((status, &list[0]["name"]), (200, &json!("village")), "{list}");
    let (status, result) = prepared.fake.halo_api("GET", "/worlds/village", None).await;
    assert_eq!(status, 500, "{result}");
    let (status, _) = prepared.fake.halo_api("DELETE", "/worlds/village", None).await;
    assert_eq!(status, 204, "it can be deleted");
}
