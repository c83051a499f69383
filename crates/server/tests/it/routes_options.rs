//! Options of a conversation, edits and continuations of the last answer, and the list of models.

use crate::chat::chat_body;
use crate::fake::{FakeOptions, FakeServer};
use halo_core::model::{ChatTemplate, SamplingParameter};
use halo_core::tool_call::CallFormat;
use serde_json::{Value, json};

async fn call(fake: &FakeServer, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
    fake.halo_api(method, path, body.as_ref()).await
}

#[tokio::test]
async fn chat_options_are_validated_and_stored() {
    let fake = FakeServer::with_options(FakeOptions::default());
    let path = "/conversations/main/options";
    let (status, view) = call(&fake, "GET", path, None).await;
    assert_eq!((status, &view["own"]["system_prompt"]), (200, &Value::Null), "{view}");
    assert!(view["defaults"]["sampling"]["temperature"].is_number(), "{view}");
    for (body, expected) in [
        (json!({ "sampling": { "temperature": 9 } }), 422),
        (json!({ "sampling": { "heat": 1 } }), 400),
        (json!({ "prompt": "x" }), 400),
        (json!({ "system_prompt": "Be kind.", "sampling": { "temperature": 1.5 } }), 200),
    ] {
        let (status, result) = call(&fake, "PUT", path, Some(body.clone())).await;
        assert_eq!(status, expected, "{body}: {result}");
    }
    fake.halo_api("POST", "/conversations/main/messages", Some(&json!({ "text": "Hello." }))).await;
    let (_, view) = call(&fake, "GET", path, None).await;
    assert_eq!(view["own"]["system_prompt"], "Be kind.", "{view}");
    assert_eq!(view["own"]["sampling"]["temperature"], 1.5, "{view}");
    let (status, _) = call(&fake, "PUT", path, Some(json!({}))).await;
    assert_eq!(status, 200);
    let (_, view) = call(&fake, "GET", path, None).await;
    assert_eq!(view["own"]["sampling"]["temperature"], Value::Null, "{view}");
}

#[tokio::test]
async fn answer_routes_need_a_conversation() {
    let fake = FakeServer::in_memory();
    let (status, _) = call(&fake, "POST", "/conversations/none/continue", None).await;
    assert_eq!(status, 404);
    let (status, _) = call(&fake, "PUT", "/conversations/none/answer", Some(json!({ "text": "x" }))).await;
    assert_eq!(status, 404);
}

#[tokio::test]
async fn models_are_listed_and_public_addresses_are_refused() {
    let fake = FakeServer::in_memory();
    let (status, models) = call(&fake, "GET", "/models", None).await;
    assert_eq!((status, &models["current"]), (200, &json!("fake")), "{models}");
    let (status, result) =
        call(&fake, "POST", "/models/test", Some(json!({ "address": "http://8.8.8.8" }))).await;
    assert_eq!(status, 403, "{result}");
}

#[tokio::test]
async fn only_models_of_the_catalogue_are_downloaded() {
    let fake = FakeServer::in_memory();
    for (body, expected) in [
        (json!({ "name": "far" }), 202),
        (json!({ "name": "near" }), 404),
        (json!({ "name": "../far" }), 404),
        (json!({ "name": "https://example.com/far.gguf" }), 404),
        (json!({ "address": "far" }), 400),
    ] {
        let (status, result) = call(&fake, "POST", "/models/download", Some(body.clone())).await;
        assert_eq!(status, expected, "{body}: {result}");
    }
}

#[tokio::test]
async fn model_that_is_not_installed_any_more_is_named() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["Hello."]);
    fake.chat(&chat_body(&["u Hello."]), Some("main")).await;
    let (_, state) = call(&fake, "GET", "/conversations/main/state", None).await;
    assert_eq!((&state["missing_model"], &state["in_use_by"]), (&Value::Null, &Value::Null), "{state}");
    call(&fake, "PUT", "/conversations/main/model", Some(json!({ "model": "other" }))).await;
    let (_, state) = call(&fake, "GET", "/conversations/main/state", None).await;
    assert_eq!(state["missing_model"], "other", "the fake has no installed model: {state}");
}

#[tokio::test]
async fn persona_is_stored_with_the_options() {
    let fake = FakeServer::in_memory();
    let persona = json!({ "user_name": "Anna", "model_name": "Rufus", "about_user": "" });
    let long = json!({ "persona": { "user_name": "x".repeat(201) } });
    for (body, expected) in
        [(json!({ "persona": { "nick": "A" } }), 400), (long, 422), (json!({ "persona": persona }), 200)]
    {
        let (status, result) = call(&fake, "PUT", "/conversations/main/options", Some(body)).await;
        assert_eq!(status, expected, "{result}");
    }
    fake.halo_api("POST", "/conversations/main/messages", Some(&json!({ "text": "Hello." }))).await;
    let (_, view) = call(&fake, "GET", "/conversations/main/options", None).await;
    assert_eq!(view["own"]["persona"], persona, "{view}");
    let (_, state) = call(&fake, "GET", "/conversations/main/state", None).await;
    assert_eq!(state["persona"], persona, "{state}");
}

#[tokio::test]
async fn model_of_a_conversation_is_stored() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["Hello."]);
    fake.chat(&chat_body(&["u Hello."]), Some("main")).await;
    for (body, expected) in [
        (json!({ "model": "missing" }), 404),
        (json!({ "name": "other" }), 400),
        (json!({ "model": "other" }), 200),
    ] {
        let (status, result) = call(&fake, "PUT", "/conversations/main/model", Some(body.clone())).await;
        assert_eq!(status, expected, "{body}: {result}");
    }
    let (_, view) = call(&fake, "GET", "/conversations/main/options", None).await;
    assert_eq!(view["model"], "other", "{view}");
    let (status, _) = call(&fake, "PUT", "/conversations/main/model", Some(json!({ "model": null }))).await;
    let (_, view) = call(&fake, "GET", "/conversations/main/options", None).await;
    assert_eq!((status, &view["model"]), (200, &Value::Null), "{view}");
}

/// A server whose second model writes its calls between other marks than the first one.
fn server_with_two_call_formats() -> FakeServer {
    let mut other_template = ChatTemplate::chatml();
    other_template.tools.call = CallFormat {
        open: "[CALLS]".into(),
        separator: ", ".into(),
        close: "[/CALLS]".into(),
        arguments_key: "arguments".into(),
    };
    FakeServer::with_options(FakeOptions { other_template, context: 2000, ..FakeOptions::default() })
}

/// A request is checked with the model of the conversation that it goes to, whether its header names it or its history.
#[tokio::test]
async fn requests_are_checked_with_the_model_of_their_conversation() {
    let fake = server_with_two_call_formats();
    fake.script().unsupported = vec![SamplingParameter::Dry];
    fake.script().unsupported_by_other = vec![SamplingParameter::TopK];
    fake.script_answers(&["Hello to you."]);
    fake.chat(&chat_body(&["u Hello there, how are you?"]), Some("main")).await;
    call(&fake, "PUT", "/conversations/main/model", Some(json!({ "model": "other" }))).await;
    let dry = json!({ "dry_multiplier": 0.8 });
    let top_k = json!({ "top_k": 7 });
    let body = |fields: &Value| {
        let mut body = chat_body(&["u Hello there, how are you?", "a Hello to you.", "u And now?"]);
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        body
    };
    for name in [None, Some("main")] {
        let refused = fake.chat(&body(&top_k), name).await;
        let error = &refused.body["error"];
        assert_eq!((refused.status, &error["param"]), (400, &json!("top_k")), "{name:?}: {error}");
        let answered = fake.chat(&body(&dry), name).await;
        assert_eq!((answered.status, answered.conversation.as_str()), (200, "main"), "{}", answered.body);
    }
    // Another conversation has the default model.
    for (fields, param, status) in [(&dry, json!("dry_multiplier"), 400), (&top_k, Value::Null, 200)] {
        for name in [Some("new"), None] {
            let mut body = body(fields);
            body["messages"] = json!([{ "role": "user", "content": format!("Something else: {name:?}") }]);
            let response = fake.chat(&body, name).await;
            assert_eq!((response.status, &response.body["error"]["param"]), (status, &param), "{name:?}");
        }
    }
    // Calls are read as the model of the conversation writes them.
    let tools = json!({ "tools": [{ "type": "function", "function": { "name": "clock" } }] });
    fake.script_answers(&["[CALLS]{\"name\": \"clock\", \"arguments\": {}}[/CALLS]"]);
    let called = fake.chat(&body(&tools), Some("main")).await;
    assert_eq!((called.status, called.conversation.as_str()), (200, "main"), "{}", called.body);
    let function = &called.body["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(function["name"], "clock", "{}", called.body);
}

/// The further choices of a request have the model, the system prompt and the format of calls of the first one.
#[tokio::test]
async fn all_choices_are_those_of_the_model_of_the_conversation() {
    let fake = server_with_two_call_formats();
    fake.script_answers(&["Hello to you."]);
    fake.chat(&chat_body(&["u Hello there, how are you?"]), Some("main")).await;
    call(&fake, "PUT", "/conversations/main/model", Some(json!({ "model": "other" }))).await;
    let persona = json!({ "user_name": "Anna" });
    let options = json!({ "system_prompt": "Speak to {{user}} in verse.", "persona": persona });
    call(&fake, "PUT", "/conversations/main/options", Some(options)).await;
    fake.script().windows.clear();
    fake.script().models.clear();
    let calls = ["[CALLS]{\"name\": \"clock\", \"arguments\": {}}[/CALLS]"; 2];
    fake.script_answers(&calls);
    let mut body = chat_body(&["u Hello there, how are you?", "a Hello to you.", "u And now?"]);
    body["n"] = json!(2);
    body["tools"] = json!([{ "type": "function", "function": { "name": "clock" } }]);
    let response = fake.chat(&body, Some("main")).await;
    assert_eq!((response.status, response.conversation.as_str()), (200, "main"), "{}", response.body);
    for choice in 0..2 {
        let function = &response.body["choices"][choice]["message"]["tool_calls"][0]["function"];
        assert_eq!(function["name"], "clock", "choice {choice}: {}", response.body);
    }
    assert_eq!(fake.script().models, ["other", "other"]);
    let windows = fake.script().windows.clone();
    let system = |window: &String| window.lines().next().unwrap_or_default().to_owned();
    assert!(system(&windows[0]).contains("Speak to Anna in verse."), "{windows:?}");
    assert_eq!(system(&windows[1]), system(&windows[0]), "{windows:?}");
}
