//! The Responses API: create, stream, continue, read, delete.

use crate::chat::percent_encoded;
use crate::fake::{FakeOptions, FakeServer};
use halo_server::ServerLimits;
use serde_json::{Value, json};

const RESPONSES: &str = "/v1/responses";

async fn create(fake: &FakeServer, body: Value) -> Value {
    let response = fake.post(RESPONSES, &body).await;
    assert_eq!(response.status, 200, "{body}: {}", response.text());
    response.json()
}

/// The events of a stream, each with its type.
async fn stream(fake: &FakeServer, body: &Value) -> Vec<Value> {
    let (events, clean) = fake.stream(RESPONSES, body).await;
    assert!(clean, "{events:?}");
    events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
}

fn types(events: &[Value]) -> Vec<&str> {
    let mut types: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    types.dedup();
    types
}

fn clock() -> Value {
    json!([{ "type": "function", "name": "clock", "parameters": { "type": "object", "properties": {} } }])
}

const CALL: &str = "<tool_call>\n{\"name\": \"clock\", \"arguments\": {\"zone\": \"CET\"}}\n</tool_call>";

#[tokio::test]
async fn responses_have_output_and_usage() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["Good day to you."]);
    let body =
        json!({ "model": "any", "input": "Hello", "instructions": "Be formal.", "max_output_tokens": 9 });
    let response = create(&fake, body).await;
    assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("completed")));
    assert!(response["id"].as_str().is_some_and(|id| id.starts_with("resp_")), "{response}");
    let item = &response["output"][0];
    assert_eq!((&item["type"], &item["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(item["content"][0]["text"], "Good day to you.");
    assert_eq!(
        (&response["instructions"], &response["max_output_tokens"]),
        (&json!("Be formal."), &json!(9))
    );
    let usage = &response["usage"];
    assert_eq!(
        (&usage["output_tokens"], &usage["output_tokens_details"]["reasoning_tokens"]),
        (&json!(4), &json!(0))
    );
    assert!(usage["input_tokens_details"]["cached_tokens"].is_number(), "{usage}");
    assert!(fake.script().windows[0].contains("system: Be formal."));
    fake.script_answers(&["one two three four five six"]);
    let cut = create(&fake, json!({ "input": "Count to a hundred, please.", "max_output_tokens": 3 })).await;
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
}

#[tokio::test]
async fn responses_continue_the_previous_one_and_branch_from_an_old_one() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["The Nile.", "In Africa.", "The Amazon."]);
    let first = create(&fake, json!({ "input": "Which is the longest river?" })).await;
    let second = create(&fake, json!({ "input": "Where is it?", "previous_response_id": first["id"] })).await;
    assert_eq!(second["previous_response_id"], first["id"]);
    let window = fake.script().windows[1].clone();
    assert!(window.contains("Which is the longest river?") && window.contains("The Nile."), "{window}");
    let other = create(&fake, json!({ "input": "Another one?", "previous_response_id": first["id"] })).await;
    assert_eq!(other["output"][0]["content"][0]["text"], "The Amazon.");
    let window = fake.script().windows[2].clone();
    assert!(window.contains("The Nile.") && !window.contains("Where is it?"), "{window}");
    let (_, all) = fake.halo_api("GET", "/conversations", None).await;
    assert_eq!(all.as_array().map(Vec::len), Some(2), "the old response was continued in a branch: {all}");
    fake.script_answers(&["In Egypt."]);
    create(&fake, json!({ "input": "Which country?", "previous_response_id": second["id"] })).await;
    let window = fake.script().windows[3].clone();
    assert!(window.contains("In Africa.") && !window.contains("Another one?"), "{window}");
    let missing = fake.post(RESPONSES, &json!({ "input": "Hi", "previous_response_id": "resp_0" })).await;
    assert_eq!((missing.status, &missing.json()["error"]["code"]), (404, &json!("not_found")));
}

#[tokio::test]
async fn responses_can_be_read_and_deleted() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["Good day."]);
    let input = json!([
        { "role": "user", "content": [{ "type": "input_text", "text": "Hello" }] },
        { "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": "Hi." }] },
        { "role": "user", "content": "How are you?" },
    ]);
    let created = create(&fake, json!({ "input": input })).await;
    let path = format!("{RESPONSES}/{}", created["id"].as_str().expect("an id"));
    let read = fake.get(&path).await;
    assert_eq!(read.status, 200, "{}", read.text());
    let read = read.json();
    assert_eq!((&read["output"], &read["usage"]), (&created["output"], &created["usage"]), "{read}");
    let items = fake.get(&format!("{path}/input_items?order=asc")).await.json();
    let texts: Vec<&str> = items["data"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|i| i["content"][0]["text"].as_str())
        .collect();
    assert_eq!((texts, &items["has_more"]), (vec!["Hello", "Hi.", "How are you?"], &json!(false)));
    let newest = fake.get(&format!("{path}/input_items?limit=1")).await.json();
    assert_eq!(
        (&newest["data"][0]["content"][0]["text"], &newest["has_more"]),
        (&json!("How are you?"), &json!(true))
    );
    let deleted = fake.request("DELETE", &path, &[], "").await;
    assert_eq!((deleted.status, &deleted.json()["deleted"]), (200, &json!(true)));
    assert_eq!(fake.get(&path).await.status, 404);
    assert_eq!(fake.request("DELETE", &path, &[], "").await.status, 404);
}

#[tokio::test]
async fn responses_call_functions() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[CALL, "It is noon."]);
    let first = create(&fake, json!({ "input": "What time is it?", "tools": clock() })).await;
    let call = &first["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("clock")), "{first}");
    assert_eq!(call["arguments"], "{\"zone\": \"CET\"}");
    let output = json!([{ "type": "function_call_output", "call_id": call["call_id"], "output": "12:00" }]);
    let second =
        create(&fake, json!({ "input": output, "previous_response_id": first["id"], "tools": clock() }))
            .await;
    assert_eq!(second["output"][0]["content"][0]["text"], "It is noon.");
    let window = fake.script().windows[1].clone();
    assert!(window.contains("tool: 12:00"), "{window}");
    let items = input_items(&fake, &second).await;
    assert_eq!(items.len(), 1, "{items:?}");
    assert_eq!((&items[0]["call_id"], &items[0]["output"]), (&call["call_id"], &json!("12:00")), "{items:?}");
    // The same as a whole history, without a stored response.
    let history = json!([
        { "role": "user", "content": "What time is it?" },
        { "type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{\"zone\": \"CET\"}" },
        { "type": "function_call_output", "call_id": "c1", "output": "12:00" },
    ]);
    fake.script_answers(&["Noon."]);
    let whole = create(&fake, json!({ "input": history, "tools": clock(), "store": false })).await;
    assert_eq!(whole["output"][0]["content"][0]["text"], "Noon.");
    let read = fake.get(&format!("{RESPONSES}/{}", whole["id"].as_str().expect("an id"))).await;
    assert_eq!(read.status, 404, "it was not stored");
}

#[tokio::test]
async fn responses_stream_text_events() {
    for store in [true, false] {
        let fake = FakeServer::in_memory();
        fake.script_answers(&["Good day to you."]);
        let events = stream(&fake, &json!({ "input": "Hello", "stream": true, "store": store })).await;
        let expected = [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ];
        assert_eq!(types(&events), expected);
        let numbers: Vec<u64> = events.iter().filter_map(|event| event["sequence_number"].as_u64()).collect();
        assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
        let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
        assert_eq!(text, "Good day to you.");
        let last = &events[events.len() - 1]["response"];
        assert_eq!((&last["status"], &last["usage"]["output_tokens"]), (&json!("completed"), &json!(4)));
        assert_eq!(last["output"][0]["content"][0]["text"], "Good day to you.");
        assert_eq!(last["id"], events[0]["response"]["id"]);
    }
}

#[tokio::test]
async fn responses_stream_calls_and_cut_answers() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[&format!("I look. {CALL}"), "one two three four"]);
    let body = json!({ "input": "What time is it?", "tools": clock(), "stream": true });
    let events = stream(&fake, &body).await;
    let calls: Vec<&str> = types(&events).into_iter().filter(|name| name.contains("function_call")).collect();
    assert_eq!(calls, ["response.function_call_arguments.delta", "response.function_call_arguments.done"]);
    let done = events.iter().find(|event| event["type"] == "response.function_call_arguments.done");
    assert_eq!(done.map(|done| &done["arguments"]), Some(&json!("{\"zone\": \"CET\"}")));
    let output = &events[events.len() - 1]["response"]["output"];
    assert_eq!(
        (&output[0]["type"], &output[1]["type"]),
        (&json!("message"), &json!("function_call")),
        "{output}"
    );
    let cut =
        stream(&fake, &json!({ "input": "Count up, please.", "stream": true, "max_output_tokens": 2 })).await;
    assert_eq!(types(&cut).last(), Some(&"response.incomplete"));
}

#[tokio::test]
async fn responses_stream_failure_is_an_event() {
    let fake = FakeServer::in_memory();
    fake.script_failure_after("So far so");
    let events = stream(&fake, &json!({ "input": "Hello", "stream": true })).await;
    let last = &events[events.len() - 1];
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert!(last["response"]["error"]["message"].is_string(), "{last}");
}

#[tokio::test]
async fn responses_follow_a_schema() {
    let fake = FakeServer::in_memory();
    let schema = json!({ "type": "object" });
    let text = json!({ "format": { "type": "json_schema", "name": "x", "schema": schema } });
    create(&fake, json!({ "input": "Hello", "text": text })).await;
    let constraint = fake.script().samplings[0].constraint.clone();
    assert!(format!("{constraint:?}").contains("object"), "{constraint:?}");
}

#[tokio::test]
async fn responses_reject_invalid_requests() {
    let fake = FakeServer::in_memory();
    let cases = [
        json!({}),
        json!({ "input": "" }),
        json!({ "input": 7 }),
        json!({ "input": [{ "role": "narrator", "content": "Hi" }] }),
        json!({ "input": [{ "type": "item_reference", "id": "x" }] }),
        json!({ "input": [{ "role": "user", "content": [{ "type": "input_image" }] }] }),
        json!({ "input": "Hi", "max_output_tokens": 0 }),
        json!({ "input": "Hi", "background": true }),
        json!({ "input": "Hi", "tools": [{ "type": "web_search" }] }),
        json!({ "input": "Hi", "store": false, "previous_response_id": "resp_1" }),
        json!({ "input": [{ "type": "function_call", "call_id": "c", "name": "a b", "arguments": "{}" }] }),
    ];
    for body in cases {
        let response = fake.post(RESPONSES, &body).await;
        assert_eq!(response.status, 400, "{body}: {}", response.text());
        assert_eq!(response.json()["error"]["type"], "invalid_request_error", "{body}");
    }
    let (_, all) = fake.halo_api("GET", "/conversations", None).await;
    assert_eq!(all, json!([]));
}

/// The items of a request, the first first.
async fn input_items(fake: &FakeServer, response: &Value) -> Vec<Value> {
    let path = format!("{RESPONSES}/{}/input_items?order=asc", response["id"].as_str().expect("an id"));
    fake.get(&path).await.json()["data"].as_array().expect("a list").clone()
}

#[tokio::test]
async fn responses_return_the_call_ids_of_their_input() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["Noon, twice.", "Yes."]);
    let call = |id: &str| json!({ "type": "function_call", "call_id": id, "name": "clock", "arguments": "{\"zone\": \"CET\"}" });
    let result = |id: &str| json!({ "type": "function_call_output", "call_id": id, "output": id });
    // The results are sent in another order than the calls.
    let input = json!([
        { "role": "user", "content": "What time is it?" }, call("call_A7"), call("toolu_b"), result("toolu_b"), result("call_A7"),
    ]);
    let first = create(&fake, json!({ "input": input, "tools": clock() })).await;
    let ids = |items: &[Value]| -> Vec<String> {
        let id = |item: &Value| Some(format!("{} {}", item["type"].as_str()?, item["call_id"].as_str()?));
        items.iter().filter_map(id).collect()
    };
    let expected = [
        "function_call call_A7",
        "function_call toolu_b",
        "function_call_output call_A7",
        "function_call_output toolu_b",
    ];
    assert_eq!(ids(&input_items(&fake, &first).await), expected);
    // Only what the second request adds is its input.
    let second = json!({ "input": "Really?", "previous_response_id": first["id"], "tools": clock() });
    let second = create(&fake, second).await;
    assert_eq!(ids(&input_items(&fake, &second).await), Vec::<String>::new());
    // An id with words in it is not kept.
    fake.script_answers(&["Well."]);
    let odd = json!([{ "role": "user", "content": "And now?" }, call("two words"), result("two words")]);
    let odd = create(&fake, json!({ "input": odd, "tools": clock() })).await;
    let odd = ids(&input_items(&fake, &odd).await);
    assert!(odd.len() == 2 && !odd.iter().any(|id| id.contains("two words")), "{odd:?}");
    assert_eq!(odd[0].rsplit(' ').next(), odd[1].rsplit(' ').next(), "a result names its call");
}

/// A response is found after its conversation was renamed, and in a server that has not seen it before.
#[tokio::test]
async fn responses_are_found_without_the_index() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["Good day."]);
    let created = create(&fake, json!({ "input": "Hello there, how are you today?" })).await;
    let path = format!("{RESPONSES}/{}", created["id"].as_str().expect("an id"));
    assert_eq!(fake.get(&path).await.status, 200);
    let restarted = FakeServer::new(fake.store.clone(), 400, ServerLimits::default());
    assert_eq!(restarted.get(&path).await.status, 200, "another server finds it");
    let (_, conversations) = fake.halo_api("GET", "/conversations", None).await;
    let name = conversations[0]["name"].as_str().expect("a name").to_owned();
    let rename = format!("/conversations/{}/rename", percent_encoded(&name));
    let (status, renamed) = fake.halo_api("POST", &rename, Some(&json!({ "name": "another" }))).await;
    assert_eq!(status, 204, "{renamed}");
    assert_eq!(fake.get(&path).await.status, 200, "it is found under the new name");
}

/// What a client has chosen beside its messages is forgotten with text of the conversation, and found by its words.
#[tokio::test]
async fn response_parameters_are_forgotten() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = FakeServer::with_options(FakeOptions::in_folder(folder.path()));
    let body = json!({
        "input": "How are you today?", "instructions": "Be formal.", "metadata": { "project": "Rumpelstilzchen" },
        "conversation": "main",
    });
    let response = create(&fake, body).await;
    let path = format!("{RESPONSES}/{}", response["id"].as_str().expect("an id"));
    assert_eq!(fake.get(&path).await.json()["metadata"], json!({ "project": "Rumpelstilzchen" }));
    let now = json!({ "matching": "rumpelstilzchen", "now": true });
    let (status, forgotten) = fake.halo_api("POST", "/conversations/main/forget", Some(&now)).await;
    assert_eq!(status, 200, "{forgotten}");
    let read = fake.get(&path).await.json();
    assert_eq!((&read["metadata"], &read["instructions"]), (&json!({}), &Value::Null), "{read}");
}

/// Vercel's AI SDK sends the answers of its history as references.
#[tokio::test]
async fn responses_resolve_references_to_items() {
    let fake = FakeServer::in_memory();
    let answer = format!("I look. {CALL}");
    fake.script_answers(&[&answer, "It is noon.", "You are welcome."]);
    let question = json!({ "role": "user", "content": "What time is it?" });
    let first = create(&fake, json!({ "input": [question], "tools": clock() })).await;
    let (message, call) = (&first["output"][0], &first["output"][1]);
    assert_eq!((&message["type"], &call["type"]), (&json!("message"), &json!("function_call")), "{first}");
    let reference = |item: &Value| json!({ "type": "item_reference", "id": item["id"] });
    let output = json!({ "type": "function_call_output", "call_id": call["call_id"], "output": "12:00" });
    let history = [question, reference(message), json!({ "id": call["id"] }), output];
    let second = create(&fake, json!({ "input": history, "tools": clock() })).await;
    assert_eq!(second["output"][0]["content"][0]["text"], "It is noon.");
    let window = fake.script().windows[1].clone();
    assert!(window.contains("I look.") && window.contains("tool: 12:00"), "{window}");
    assert_eq!(window.matches("\"name\": \"clock\"").count(), 1, "{window}");
    let (_, all) = fake.halo_api("GET", "/conversations", None).await;
    assert_eq!(all.as_array().map(Vec::len), Some(1), "the history is known: {all}");
    // The message of an input, and an answer that the previous response continues already.
    let thanks = json!({ "role": "user", "content": "Thanks." });
    let input = json!([reference(&second["output"][0]), thanks]);
    create(&fake, json!({ "input": input, "previous_response_id": second["id"] })).await;
    let window = fake.script().windows[2].clone();
    assert_eq!(window.matches("It is noon.").count(), 1, "{window}");
    let item = input_items(&fake, &first).await.remove(0);
    fake.script_answers(&["Noon, as I said."]);
    let again = create(&fake, json!({ "input": [reference(&item)], "store": false })).await;
    assert_eq!(again["status"], "completed", "{again}");
    let window = fake.script().windows[3].clone();
    assert!(window.ends_with("user: What time is it?\n"), "{window}");
}

#[tokio::test]
async fn responses_name_references_to_unknown_items() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["Good day."]);
    let response = create(&fake, json!({ "input": "Hello" })).await;
    let id = response["output"][0]["id"].as_str().expect("an id").to_owned();
    let ask = async |id: &str| {
        let input = json!([{ "role": "user", "content": "Hi" }, { "type": "item_reference", "id": id }]);
        let response = fake.post(RESPONSES, &json!({ "input": input })).await;
        let error = response.json()["error"].clone();
        (response.status, error["param"].clone(), error["message"].as_str().unwrap_or_default().to_owned())
    };
    for unknown in ["msg_0_0", "fc_12_3", "rs_7_0", &id.replace("msg_", "fc_"), &format!("{id}x")] {
        let (status, param, message) = ask(unknown).await;
        assert_eq!((status, param), (404, json!("input")), "{unknown}: {message}");
        assert!(message.contains("input[1]") && message.contains(unknown), "{message}");
    }
    let (status, param, message) = ask("x").await;
    assert_eq!((status, param), (400, json!("input")), "{message}");
    assert!(message.contains("input[1]"), "{message}");
    let path = format!("{RESPONSES}/{}", response["id"].as_str().expect("an id"));
    assert_eq!(fake.request("DELETE", &path, &[], "").await.status, 200);
    assert_eq!(ask(&id).await.0, 404, "the response was deleted");
}

#[tokio::test]
async fn responses_items_have_unique_ids() {
    let fake = FakeServer::in_memory();
    let unknown = CALL.replace("clock", "rm");
    fake.script_answers(&[
        &format!("I look. {CALL}\n{CALL}"),
        "Well.",
        &format!("I look. {CALL}\n{unknown}"),
    ]);
    let first = create(&fake, json!({ "input": "What time is it?", "tools": clock() })).await;
    let second = json!({ "input": [
        { "role": "user", "content": "What time is it?" },
        { "type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}" },
        { "type": "function_call_output", "call_id": "c1", "output": "12:00" },
    ], "tools": clock(), "conversation": "other" });
    let second = create(&fake, second).await;
    let body = json!({ "input": "And what time is it now?", "tools": clock(), "stream": true });
    let events = stream(&fake, &body).await;
    let streamed = events[events.len() - 1]["response"].clone();
    assert_eq!(streamed["output"].as_array().map(Vec::len), Some(3), "text, a call, and text: {streamed}");
    let mut ids = Vec::new();
    for response in [&first, &second, &streamed] {
        let output = response["output"].as_array().expect("a list").clone();
        for item in output.into_iter().chain(input_items(&fake, response).await) {
            ids.push(item["id"].as_str().expect("an id").to_owned());
        }
    }
    let count = ids.len();
    ids.sort();
    ids.dedup();
    assert_eq!((ids.len(), count), (count, 12), "{ids:?}");
    // The events of an item have its id, and its own text.
    let done = events.iter().filter(|event| event["type"] == "response.output_text.done");
    let texts: Vec<(&Value, &Value)> = done.map(|event| (&event["item_id"], &event["text"])).collect();
    let expected = [0, 2].map(|n| {
        let item = &streamed["output"][n];
        (&item["id"], &item["content"][0]["text"])
    });
    assert_eq!(texts, expected);
}

#[tokio::test]
async fn responses_list_input_items_in_pages() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["Good day."]);
    let user = |text: &str| json!({ "role": "user", "content": text });
    let assistant = json!({ "role": "assistant", "content": "Two." });
    let input = json!([user("One."), assistant, user("Three.")]);
    let response = create(&fake, json!({ "input": input })).await;
    let path = format!("{RESPONSES}/{}/input_items", response["id"].as_str().expect("an id"));
    let (mut texts, mut after) = (Vec::new(), String::new());
    loop {
        let page = fake.get(&format!("{path}?order=asc&limit=1{after}")).await.json();
        texts.push(page["data"][0]["content"][0]["text"].as_str().expect("a text").to_owned());
        after = format!("&after={}", page["last_id"].as_str().expect("an id"));
        if page["has_more"] == false {
            break;
        }
    }
    assert_eq!(texts, ["One.", "Two.", "Three."]);
    // Bad parameters are named, in OpenAI's format.
    for (query, param) in
        [("limit=many", "limit"), ("limit=-1", "limit"), ("order=up", "order"), ("after=msg_0_0", "after")]
    {
        let refused = fake.get(&format!("{path}?{query}")).await;
        let error = refused.json()["error"].clone();
        assert_eq!((refused.status, &error["param"]), (400, &json!(param)), "{query}: {error}");
        assert_eq!(error["code"], "invalid_value", "{query}: {error}");
    }
}

#[tokio::test]
async fn paths_that_cannot_be_read_are_refused_in_openai_format() {
    let fake = FakeServer::in_memory();
    for (path, param) in [
        ("/v1/models/%ff", "model"),
        ("/v1/responses/%ff", "id"),
        ("/v1/responses/%ff/input_items", "id"),
        ("/v1/responses/resp_1/input_items?limit=1&limit=2", ""),
    ] {
        let refused = fake.get(path).await;
        let error = refused.json()["error"].clone();
        assert_eq!((refused.status, &error["type"]), (400, &json!("invalid_request_error")), "{path}");
        assert_eq!(error["param"].as_str().unwrap_or_default(), param, "{path}: {error}");
        assert!(error["message"].is_string() && error.get("code").is_some(), "{path}: {error}");
    }
}

/// An answer that quotes the marker of calls has no call where no function was offered, also when it is read again.
#[tokio::test]
async fn responses_that_quote_a_call_have_none() {
    let fake = FakeServer::in_memory();
    let quote = format!("A call looks so: {CALL}");
    fake.script_answers(&[&quote, &format!("I look. {CALL}")]);
    for (body, types) in [
        (json!({ "input": "How does a call look?" }), vec!["message"]),
        (json!({ "input": "What time is it?", "tools": clock() }), vec!["message", "function_call"]),
    ] {
        let created = create(&fake, body).await;
        let path = format!("{RESPONSES}/{}", created["id"].as_str().expect("an id"));
        let read = fake.get(&path).await.json();
        assert_eq!(read["output"], created["output"], "{read}");
        let output = read["output"].as_array().expect("a list");
        assert_eq!(output.iter().filter_map(|item| item["type"].as_str()).collect::<Vec<_>>(), types);
    }
}
