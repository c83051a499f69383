//! Functions that clients offer: definitions, calls, results, and how a history with them is recognized.

use crate::chat::{chat_body, percent_encoded};
use crate::fake::{FakeChatResponse, FakeOptions, FakeServer};
use halo_core::model::{ChatTemplate, OutputConstraint};
use halo_core::tool_call::{CallFormat, ReasoningFormat, ToolChoice, ToolOptions};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const CALL: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": \"Lindau\"}}\n</tool_call>";

fn with(mut body: Value, mut fields: Value) -> Value {
    let (body_fields, fields) = (body.as_object_mut(), fields.as_object_mut());
    body_fields.expect("an object").append(fields.expect("an object"));
    body
}

fn tools() -> Value {
    let town =
        json!({ "type": "object", "properties": { "town": { "type": "string" } }, "required": ["town"] });
    let tool = |name: &str, parameters: &Value| json!({ "type": "function", "function": { "name": name, "description": "does it", "parameters": parameters } });
    json!([tool("weather", &town), tool("clock", &json!({ "type": "object" }))])
}

fn question() -> Value {
    with(chat_body(&["u How is the weather in Lindau today?"]), json!({ "tools": tools() }))
}

/// A server whose model has a chat template, so that functions are in its system prompt.
fn chatml_server() -> FakeServer {
    FakeServer::with_options(FakeOptions {
        template: ChatTemplate::chatml(),
        context: 2000,
        ..FakeOptions::default()
    })
}

fn assert_says(response: &FakeChatResponse, text: &str) {
    assert_eq!((response.status, response.text().as_str()), (200, text), "{}", response.body);
}

fn last_options(fake: &FakeServer) -> Option<ToolOptions> {
    match fake.script().samplings.last().and_then(|sampling| sampling.constraint.clone()) {
        Some(OutputConstraint::ToolCalls(options)) => Some(*options),
        _ => None,
    }
}

#[tokio::test]
async fn tools_call_is_returned_and_its_result_continues_the_turn() {
    for fake in [FakeServer::in_memory(), chatml_server()] {
        fake.script_answers(&[CALL, "It is sunny in Lindau."]);
        let first = fake.chat(&question(), None).await;
        assert_eq!(first.status, 200, "{}", first.body);
        let choice = &first.body["choices"][0];
        assert_eq!(
            (&choice["finish_reason"], &choice["message"]["content"]),
            (&json!("tool_calls"), &Value::Null)
        );
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!(call["type"], "function");
        assert_eq!(call["function"], json!({ "name": "weather", "arguments": "{\"town\": \"Lindau\"}" }));
        let id = call["id"].as_str().expect("an id");
        let mut second = question();
        let messages = second["messages"].as_array_mut().expect("messages");
        messages.push(choice["message"].clone());
        messages.push(json!({ "role": "tool", "tool_call_id": id, "content": "sunny, 21 degrees" }));
        let answer = fake.chat(&second, None).await;
        assert_says(&answer, "It is sunny in Lindau.");
        assert_eq!(answer.conversation, first.conversation, "the result continues the conversation");
        let window = fake.script().windows.last().cloned().unwrap_or_default();
        assert!(window.contains("tool: ") && window.contains("sunny, 21 degrees"), "{window}");
        // The client sends its history again, and nothing is stored twice.
        let messages = second["messages"].as_array_mut().expect("messages");
        messages.push(json!({ "role": "assistant", "content": answer.text() }));
        messages.push(json!({ "role": "user", "content": "And tomorrow?" }));
        let third = fake.chat(&second, None).await;
        assert_eq!(third.conversation, first.conversation);
        let path = format!("/conversations/{}", percent_encoded(&first.conversation));
        let (status, state) = fake.halo_api("GET", &path, None).await;
        assert_eq!(status, 200, "{state}");
        let ids: Vec<&str> =
            state["chunks"].as_array().expect("chunks").iter().filter_map(|c| c["id"].as_str()).collect();
        let turns: Vec<String> =
            ids.iter().map(|id| id.split('.').next().unwrap_or_default().to_owned()).collect();
        let mut turns = turns;
        turns.dedup();
        assert_eq!(turns, ["u0", "a1", "t2", "a3", "u4", "a5"], "{state}");
    }
}

/// A model that reads its own code block, and then a result, writes the call again; it is trained on its template's format.
#[tokio::test]
async fn tools_call_in_a_code_block_is_rewritten_for_the_model() {
    for (call, is_rewritten) in [
        (
            "```json\n{\n  \"name\": \"weather\",\n  \"arguments\": {\n    \"town\": \"Lindau\"\n  }\n}\n```",
            true,
        ),
        ("{\"name\": \"weather\", \"arguments\": {\"town\":\"Lindau\"}}", true),
        ("I would say:\n```json\n{\"name\": \"weather\", \"arguments\": {\"town\": \"Lindau\"}}\n```", false),
    ] {
        let fake = chatml_server();
        fake.script_answers(&[call, "It is sunny in Lindau."]);
        let first = fake.chat(&question(), None).await;
        let message = first.body["choices"][0]["message"].clone();
        assert_eq!(message["tool_calls"].is_array(), is_rewritten, "{message}");
        let mut second = question();
        let messages = second["messages"].as_array_mut().expect("messages");
        messages.push(message.clone());
        let result =
            json!({ "role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny" });
        messages.push(if is_rewritten { result } else { json!({ "role": "user", "content": "sunny" }) });
        let answer = fake.chat(&second, None).await;
        assert_says(&answer, "It is sunny in Lindau.");
        assert_eq!(answer.conversation, first.conversation);
        let window = fake.script().windows.last().cloned().unwrap_or_default();
        let canonical =
            "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": \"Lindau\"}}\n</tool_call>";
        assert_eq!(window.matches(canonical).count(), usize::from(is_rewritten), "{window}");
        assert_eq!(window.matches("\"town\"").count(), 1, "{window}");
        // What the model wrote is not lost, and the reason is given.
        let path = format!("/conversations/{}/deleted", percent_encoded(&first.conversation));
        let (status, deleted) = fake.halo_api("GET", &path, None).await;
        assert_eq!(status, 200, "{deleted}");
        let reasons: Vec<&str> = deleted["chunks"]
            .as_array()
            .expect("chunks")
            .iter()
            .filter_map(|c| c["reason"].as_str())
            .collect();
        let reason = "its calls were written again in the format of the chat template";
        assert!(reasons.iter().all(|r| *r == reason), "{deleted}");
        assert_eq!(reasons.is_empty(), !is_rewritten, "{deleted}");
        // The client sends everything again, and asks for another answer.
        fake.script_answers(&["It is warm."]);
        let again = fake.chat(&second, None).await;
        assert_eq!((again.text().as_str(), again.conversation == first.conversation), ("It is warm.", true));
        let window = fake.script().windows.last().cloned().unwrap_or_default();
        assert_eq!(window.matches("\"town\"").count(), 1, "{window}");
    }
}

/// The question alone, sent again, is answered without the calls and results that followed it before.
#[tokio::test]
async fn tools_question_alone_again_has_no_earlier_calls() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[CALL, "Sunny.", "Cloudy."]);
    let first = fake.chat(&question(), None).await;
    let mut second = question();
    let messages = second["messages"].as_array_mut().expect("messages");
    messages.push(first.body["choices"][0]["message"].clone());
    messages.push(json!({ "role": "tool", "tool_call_id": "x", "content": "sunny, 21 degrees" }));
    assert_eq!(fake.chat(&second, None).await.text(), "Sunny.");
    assert_eq!(fake.chat(&question(), None).await.text(), "Cloudy.");
    let window = fake.script().windows.last().cloned().unwrap_or_default();
    assert!(window.contains("How is the weather"), "{window}");
    assert!(!window.contains("sunny, 21 degrees") && !window.contains("tool_call"), "{window}");
}

#[tokio::test]
async fn tools_same_result_again_regenerates_the_answer() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[CALL, "Sunny.", "Bright."]);
    let first = fake.chat(&question(), None).await;
    let mut second = question();
    let messages = second["messages"].as_array_mut().expect("messages");
    messages.push(first.body["choices"][0]["message"].clone());
    messages.push(json!({ "role": "tool", "tool_call_id": "x", "content": "sunny, 21 degrees" }));
    let one = fake.chat(&second, None).await;
    let two = fake.chat(&second, None).await;
    assert_eq!((one.text().as_str(), two.text().as_str()), ("Sunny.", "Bright."));
    assert_eq!((&one.conversation, &two.conversation), (&first.conversation, &first.conversation));
    let window = fake.script().windows.last().cloned().unwrap_or_default();
    assert_eq!(window.matches("sunny, 21 degrees").count(), 1, "{window}");
}

#[tokio::test]
async fn tools_are_streamed_as_deltas() {
    for store in [true, false] {
        let fake = chatml_server();
        fake.script_answers(&["I look. <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": \"Lindau\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>"]);
        let (mut events, clean) =
            fake.stream(CHAT, &with(question(), json!({ "stream": true, "store": store }))).await;
        assert!(clean && events.pop().as_deref() == Some("[DONE]"));
        let events: Vec<Value> =
            events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect();
        let deltas: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["delta"]).collect();
        let text: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
        assert_eq!(text.trim(), "I look.");
        let calls: Vec<&Value> = deltas.iter().filter_map(|delta| delta["tool_calls"].get(0)).collect();
        let starts: Vec<&&Value> = calls.iter().filter(|call| call["id"].is_string()).collect();
        assert_eq!(starts.len(), 2, "{calls:?}");
        assert_eq!(
            (&starts[0]["function"]["name"], &starts[1]["function"]["name"]),
            (&json!("weather"), &json!("clock"))
        );
        assert_ne!(starts[0]["id"], starts[1]["id"]);
        let arguments = |index: u64| -> String {
            let own = calls.iter().filter(|call| call["index"] == index);
            own.filter_map(|call| call["function"]["arguments"].as_str()).collect()
        };
        assert_eq!((arguments(0).as_str(), arguments(1).as_str()), ("{\"town\": \"Lindau\"}", "{}"));
        let finish = events.last().map(|event| event["choices"][0]["finish_reason"].clone());
        assert_eq!(finish, Some(json!("tool_calls")));
    }
}

#[tokio::test]
async fn tools_choice_and_definitions_reach_the_model() {
    let fake = chatml_server();
    fake.chat(&with(question(), json!({ "tool_choice": "required", "parallel_tool_calls": false })), None)
        .await;
    let options = last_options(&fake).expect("functions");
    assert_eq!((options.choice.clone(), options.parallel), (ToolChoice::Required, false));
    let names: Vec<&str> = options.tools.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(names, ["weather", "clock"]);
    let named = json!({ "type": "function", "function": { "name": "clock" } });
    fake.chat(&with(question(), json!({ "tool_choice": named })), None).await;
    assert_eq!(last_options(&fake).map(|options| options.choice), Some(ToolChoice::Named("clock".into())));
    fake.chat(&with(question(), json!({ "tool_choice": "none" })), None).await;
    assert_eq!(last_options(&fake), None);
    let format = json!({ "response_format": { "type": "json_object" } });
    fake.chat(&with(question(), format), None).await;
    assert!(last_options(&fake).is_some_and(|options| options.answer_schema.is_some()));
}

/// The stored finish reasons of the only conversation, by turn.
async fn finish_reasons(fake: &FakeServer) -> Value {
    let (_, all) = fake.halo_api("GET", "/conversations", None).await;
    let name = percent_encoded(all[0]["name"].as_str().expect("a conversation"));
    let (_, turns) = fake.halo_api("GET", &format!("/conversations/{name}/turns"), None).await;
    turns.as_array().expect("a list").iter().map(|turn| turn["finish"].clone()).collect()
}

#[tokio::test]
async fn tools_answer_ends_after_its_only_call() {
    let second = CALL.replace("Lindau", "Bregenz");
    for stream in [false, true] {
        let fake = chatml_server();
        fake.script_answers(&[&format!("{CALL}\n{second}\nand much more")]);
        let body = with(question(), json!({ "parallel_tool_calls": false, "stream": stream }));
        match stream {
            false => {
                let response = fake.chat(&body, None).await;
                let choice = &response.body["choices"][0];
                assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
                assert_eq!(choice["message"]["tool_calls"].as_array().map(Vec::len), Some(1), "{choice}");
            }
            true => {
                let (events, complete) = fake.stream(CHAT, &body).await;
                assert!(
                    complete && events.iter().any(|event| event.contains("\"tool_calls\"")),
                    "{events:?}"
                );
                assert!(!events.iter().any(|event| event.contains("Bregenz")), "{events:?}");
            }
        }
        assert_eq!(finish_reasons(&fake).await, json!(["end"]), "the turn is complete");
    }
}

/// Llama writes calls without a marker: what follows the object is no part of the call.
#[tokio::test]
async fn tools_bare_call_ends_the_answer() {
    let call = r#"{"name": "weather", "parameters": {"town": "Lindau"}}"#;
    for (answer, calls) in
        [(format!("{call}\nNow I wait for the result"), 1), (format!("{call}; {call} Now I wait"), 2)]
    {
        let mut template = ChatTemplate::chatml();
        template.tools.call = CallFormat {
            open: String::new(),
            separator: "; ".into(),
            close: String::new(),
            arguments_key: "parameters".into(),
        };
        let fake =
            FakeServer::with_options(FakeOptions { template, context: 2000, ..FakeOptions::default() });
        fake.script_answers(&[&answer]);
        let response = fake.chat(&question(), None).await;
        let choice = &response.body["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        assert_eq!(choice["message"]["tool_calls"].as_array().map(Vec::len), Some(calls), "{choice}");
        assert_eq!(finish_reasons(&fake).await, json!(["end"]), "{answer}");
        let tokens = response.body["usage"]["completion_tokens"].as_u64().expect("a number");
        let call_tokens = call.split([' ', '\n']).count() as u64;
        assert_eq!(tokens, call_tokens * calls as u64 + 1, "one token showed that the calls are over");
    }
}

#[tokio::test]
async fn tools_old_functions_have_old_responses() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[CALL]);
    let body = with(
        chat_body(&["u How is the weather?"]),
        json!({ "functions": [{ "name": "weather" }], "function_call": "auto" }),
    );
    let response = fake.chat(&body, None).await;
    let choice = &response.body["choices"][0];
    assert_eq!(choice["finish_reason"], "function_call", "{}", response.body);
    assert_eq!(choice["message"]["function_call"]["name"], "weather");
    let mut next = body.clone();
    let messages = next["messages"].as_array_mut().expect("messages");
    messages.push(choice["message"].clone());
    messages.push(json!({ "role": "function", "name": "weather", "content": "sunny" }));
    let answer = fake.chat(&next, None).await;
    assert_eq!((answer.status, &answer.conversation), (200, &response.conversation));
}

#[tokio::test]
async fn tools_calls_without_offered_functions_are_text() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[CALL, "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>"]);
    let response = fake.chat(&chat_body(&["u Hello"]), None).await;
    assert_eq!(response.text(), CALL, "no function was offered");
    let response = fake.chat(&question(), None).await;
    assert_eq!(response.body["choices"][0]["finish_reason"], "stop", "{}", response.body);
    assert!(response.text().contains("rm"), "no such function was offered");
}

/// A model that writes calls on its own may write them wrong: the client gets text, and the conversation goes on with it.
#[tokio::test]
async fn tools_calls_that_break_their_schema_are_text() {
    for (arguments, names) in [("{\"town\": 7}", "7"), ("{}", "weather"), ("{\"town\": \"Lin", "Lin")] {
        let broken = format!("<tool_call>\n{{\"name\": \"weather\", \"arguments\": {arguments}");
        for stream in [false, true] {
            let fake = chatml_server();
            fake.script_answers(&[&broken, "Well."]);
            let body = with(question(), json!({ "stream": stream }));
            let (text, finish) = match stream {
                false => {
                    let response = fake.chat(&body, None).await;
                    let choice = response.body["choices"][0].clone();
                    assert!(choice["message"].get("tool_calls").is_none(), "{choice}");
                    (response.text(), choice["finish_reason"].clone())
                }
                true => {
                    let (events, _) = fake.stream(CHAT, &body).await;
                    let events: Vec<Value> =
                        events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
                    let deltas = || events.iter().map(|event| &event["choices"][0]["delta"]);
                    assert!(deltas().all(|delta| delta.get("tool_calls").is_none()), "{events:?}");
                    let text: String = deltas().filter_map(|delta| delta["content"].as_str()).collect();
                    (text, events.last().expect("events")["choices"][0]["finish_reason"].clone())
                }
            };
            assert!(text.contains("weather") && text.contains(names), "{arguments}: {text}");
            assert_eq!(finish, "stop", "{arguments}");
            let mut next = question();
            let messages = next["messages"].as_array_mut().expect("messages");
            messages.push(json!({ "role": "assistant", "content": text }));
            messages.push(json!({ "role": "user", "content": "And now?" }));
            let answer = fake.chat(&next, None).await;
            assert_eq!(answer.text(), "Well.");
            let (_, conversations) = fake.halo_api("GET", "/conversations", None).await;
            assert_eq!(conversations.as_array().map(Vec::len), Some(1), "{arguments}: {conversations}");
        }
    }
}

#[tokio::test]
async fn tools_results_are_sorted_by_their_calls() {
    let fake = FakeServer::in_memory();
    let call = |id: &str, name: &str| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": "{}" } });
    let body = json!({ "tools": tools(), "messages": [
        { "role": "user", "content": "Both, please." },
        { "role": "assistant", "content": null, "tool_calls": [call("c1", "weather"), call("c2", "clock")] },
        { "role": "tool", "tool_call_id": "c2", "content": "noon" },
        { "role": "tool", "tool_call_id": "c1", "content": "sunny" },
    ] });
    assert_eq!(fake.chat(&body, None).await.status, 200);
    let window = fake.script().windows[0].clone();
    assert!(window.find("sunny") < window.find("noon"), "{window}");
    assert!(window.contains("\"name\": \"weather\""), "{window}");
}

#[tokio::test]
async fn tools_bad_requests_store_nothing() {
    let fake = FakeServer::in_memory();
    let calling = json!({ "role": "assistant", "tool_calls": [{ "function": { "name": "weather" } }] });
    let bad_name = json!({ "role": "assistant", "tool_calls": [{ "function": { "name": "a b" } }] });
    let user = json!({ "role": "user", "content": "Hi" });
    let cases = [
        with(chat_body(&["u Hi"]), json!({ "tools": [{ "type": "retrieval" }] })),
        with(
            chat_body(&["u Hi"]),
            json!({ "tools": [{ "type": "function", "function": { "name": "a b" } }] }),
        ),
        with(
            chat_body(&["u Hi"]),
            json!({ "tools": tools(), "tool_choice": { "function": { "name": "rm" } } }),
        ),
        json!({ "messages": [user, calling] }),
        json!({ "messages": [user, bad_name, user] }),
    ];
    for body in cases {
        let response = fake.chat(&body, None).await;
        assert_eq!(response.status, 400, "{body}: {}", response.body);
        assert!(response.body["error"]["message"].is_string(), "{}", response.body);
    }
    let (_, all) = fake.halo_api("GET", "/conversations", None).await;
    assert_eq!(all, json!([]));
}

#[tokio::test]
async fn chat_continues_a_prefilled_answer() {
    for store in [true, false] {
        let fake = chatml_server();
        fake.script_answers(&[" blue."]);
        let body = with(
            chat_body(&["u Which colour is the sky at noon in the summer?", "a The colour is"]),
            json!({ "store": store }),
        );
        let response = fake.chat(&body, None).await;
        assert_eq!((response.status, response.text().as_str()), (200, " blue."), "{}", response.body);
        let window = fake.script().windows[0].clone();
        assert!(window.trim_end().ends_with("The colour is"), "{window}");
        if store {
            // The client keeps both parts as one message.
            let next = chat_body(&[
                "u Which colour is the sky at noon in the summer?",
                "a The colour is blue.",
                "u Why?",
            ]);
            assert_eq!(fake.chat(&next, None).await.conversation, response.conversation);
        }
    }
}

#[tokio::test]
async fn chat_accepts_system_messages_anywhere() {
    let fake = chatml_server();
    let cases: [&[&str]; 5] = [
        &["s Greet the user."],
        &["s Be kind.", "u Hello there, my friend.", "s Answer in one word."],
        &["u Hello there, my friend.", "a Hi.", "s Speak as a pirate."],
        &["u Hello there, my friend.", "s From now on answer in French.", "u And now?"],
        &["s Be kind.", "a Welcome, traveller."],
    ];
    for messages in cases {
        for store in [true, false] {
            let body = with(chat_body(messages), json!({ "store": store }));
            let response = fake.chat(&body, None).await;
            assert_eq!(response.status, 200, "{body}: {}", response.body);
            let window = fake.script().windows.last().cloned().unwrap_or_default();
            for message in messages {
                assert!(window.contains(&message[2..]), "{message} is missing in {window}");
            }
        }
    }
}

fn thinking_server(prompt: &str) -> FakeServer {
    let reasoning = ReasoningFormat {
        open: "<think>".into(),
        close: "</think>".into(),
        prompt: prompt.into(),
        skip: Some("<think>\n\n</think>\n\n".into()),
    };
    let template = ChatTemplate { reasoning: Some(reasoning), ..ChatTemplate::chatml() };
    FakeServer::with_options(FakeOptions { template, context: 2000, ..FakeOptions::default() })
}

#[tokio::test]
async fn reasoning_is_returned_apart_and_pruned_after_the_turn() {
    let whole = "<think>\nThe user greets me, so I greet back.\n</think>\n\nHello!";
    let opened = "The user greets me, so I greet back.\n</think>\n\nHello!";
    for (prompt, answer) in [("", whole), ("<think>\n", opened)] {
        let fake = thinking_server(prompt);
        fake.script_answers(&[answer, "Bye!"]);
        let response =
            fake.chat(&chat_body(&["u Hello, who are you and what do you do all day?"]), None).await;
        let message = &response.body["choices"][0]["message"];
        assert_eq!(message["content"], "Hello!", "{}", response.body);
        assert_eq!(message["reasoning_content"], "The user greets me, so I greet back.");
        let next = chat_body(&["u Hello, who are you and what do you do all day?", "a Hello!", "u Bye."]);
        let second = fake.chat(&next, None).await;
        assert_eq!(second.conversation, response.conversation, "the client does not send the reasoning");
        let window = fake.script().windows.last().cloned().unwrap_or_default();
        assert!(!window.contains("greets me") && window.contains("Hello!"), "{window}");
        let name = percent_encoded(&response.conversation);
        let (status, graveyard) =
            fake.halo_api("GET", &format!("/conversations/{name}/graveyard"), None).await;
        assert_eq!(status, 200, "{graveyard}");
        let text = graveyard.to_string();
        assert!(text.contains("greets me") && text.contains("reasoning of a finished answer"), "{text}");
    }
}

#[tokio::test]
async fn reasoning_is_streamed_and_can_be_left_out() {
    let fake = thinking_server("");
    fake.script_answers(&["<think>Hm, well.</think>Yes.", "No."]);
    let body = with(chat_body(&["u Is it?"]), json!({ "stream": true }));
    let (events, clean) = fake.stream(CHAT, &body).await;
    assert!(clean);
    let events: Vec<Value> = events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
    let join = |key: &str| -> String {
        events.iter().filter_map(|event| event["choices"][0]["delta"][key].as_str()).collect()
    };
    assert_eq!((join("reasoning_content").as_str(), join("content").as_str()), ("Hm, well.", "Yes."));
    let fields = json!({ "chat_template_kwargs": { "enable_thinking": false } });
    let response = fake.chat(&with(chat_body(&["u Is it so?"]), fields), None).await;
    assert_eq!(response.text(), "No.");
}

/// Ollama's `think` is `enable_thinking` of the chat template.
#[tokio::test]
async fn ollama_think_sets_the_reasoning_of_the_template() {
    let answer = "<think>Hm, well.</think>Yes.";
    for (path, text) in [("/api/chat", "/message/content"), ("/api/generate", "/response")] {
        let thinking = text.replace("content", "thinking").replace("response", "thinking");
        let mut prompt_tokens = None;
        for (think, expected) in [
            (json!(null), Some("Hm, well.")),
            (json!(true), Some("Hm, well.")),
            (json!("high"), Some("Hm, well.")),
            (json!(false), None),
        ] {
            let fake = thinking_server("");
            fake.script_answers(&[if expected.is_some() { answer } else { "Yes." }; 2]);
            let mut body = json!({
                "prompt": "Is it?", "messages": [{ "role": "user", "content": "Is it?" }], "think": think, "stream": false,
            });
            let whole = fake.post(path, &body).await.json();
            assert_eq!(whole.pointer(text), Some(&json!("Yes.")), "{path} {think}: {whole}");
            assert_eq!(whole.pointer(&thinking).and_then(Value::as_str), expected, "{path} {think}: {whole}");
            // Without reasoning, the template writes its end into the prompt.
            let count = whole["prompt_eval_count"].as_u64().expect("a count");
            let with_reasoning = *prompt_tokens.get_or_insert(count);
            assert_eq!(
                count > with_reasoning,
                expected.is_none(),
                "{path} {think}: {count} {with_reasoning}"
            );
            body["stream"] = true.into();
            let streamed = fake.post(path, &body).await;
            let lines: Vec<Value> =
                streamed.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
            let join = |at: &str| -> String {
                lines.iter().filter_map(|line| line.pointer(at).and_then(Value::as_str)).collect()
            };
            assert_eq!(join(text), "Yes.", "{path} {think}: {lines:?}");
            assert_eq!(join(&thinking), expected.unwrap_or_default(), "{path} {think}: {lines:?}");
        }
        let show = thinking_server("").post("/api/show", &json!({ "model": "scripted" })).await.json();
        assert_eq!(show["capabilities"], json!(["completion", "tools", "thinking"]));
    }
}
