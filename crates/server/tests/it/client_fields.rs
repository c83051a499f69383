//! Fields that the clients of other programs send: each has its effect, or is refused by name.

use crate::chat::chat_body;
use crate::fake::{FakeOptions, FakeServer, SPECIAL_TOKEN};
use halo_core::model::{ChatTemplate, OutputConstraint, SamplerKind};
use halo_core::token::TokenId;
use halo_core::tool_call::ReasoningFormat;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const GENERATE: &str = "/api/v1/generate";
const RESPONSES: &str = "/v1/responses";

fn with(mut body: Value, fields: Value) -> Value {
    let Value::Object(fields) = fields else { panic!("{fields} is no object") };
    for (name, value) in fields {
        body[name] = value;
    }
    body
}

fn chatml_server() -> FakeServer {
    let template = ChatTemplate { start: "<s>".into(), ..ChatTemplate::chatml() };
    FakeServer::with_options(FakeOptions { template, context: 2000, ..FakeOptions::default() })
}

fn last_window(fake: &FakeServer) -> String {
    fake.script().windows.last().cloned().unwrap_or_default()
}

fn last_prompt(fake: &FakeServer) -> Vec<TokenId> {
    fake.script().prompts.last().cloned().unwrap_or_default()
}

/// The error of a refused request.
async fn refused(fake: &FakeServer, path: &str, body: &Value) -> Value {
    let response = fake.post(path, body).await;
    assert_eq!(response.status, 400, "{path} {body}: {}", response.text());
    response.json()["error"].clone()
}

async fn ok(fake: &FakeServer, path: &str, body: &Value) -> Value {
    let response = fake.post(path, body).await;
    assert_eq!(response.status, 200, "{path} {body}: {}", response.text());
    response.json()
}

#[tokio::test]
async fn instruct_placeholders_become_the_chat_template() {
    for path in [GENERATE, "/api/extra/generate/stream", COMPLETIONS] {
        let fake = chatml_server();
        let body = json!({
            "memory": "{{[SYSTEM]}}Be kind.", "prompt": "{{[INPUT]}}Hi{{[OUTPUT]}}",
            "stop_sequence": ["{{[INPUT]}}", "END"],
        });
        assert_eq!(fake.post(path, &body).await.status, 200, "{path}");
        assert_eq!(
            last_window(&fake),
            "user: <|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\n",
            "{path}"
        );
        assert_eq!(fake.script().samplings[0].stop, ["<|im_start|>user\n", "END"], "{path}");
        let kept = with(body, json!({ "replace_instruct_placeholders": false }));
        assert_eq!(fake.post(path, &kept).await.status, 200, "{path}");
        assert_eq!(last_window(&fake), "user: {{[SYSTEM]}}Be kind.{{[INPUT]}}Hi{{[OUTPUT]}}\n", "{path}");
        assert_eq!(fake.script().samplings[1].stop, ["{{[INPUT]}}", "END"], "{path}");
    }
}

/// A model that was trained with a BOS token gets it before every raw text, whatever its length, and never twice. Token ids are the whole
/// prompt.
#[tokio::test]
async fn raw_prompts_begin_with_the_bos_token() {
    let template = ChatTemplate { start: SPECIAL_TOKEN.into(), ..ChatTemplate::chatml() };
    let fake = FakeServer::with_options(FakeOptions { template, ..FakeOptions::default() });
    let [bos, once, upon] = [SPECIAL_TOKEN, "Once", " upon"].map(|text| fake.model.token_id(text));
    let raw = json!({ "raw": true, "stream": false });
    for (path, fields) in
        [(COMPLETIONS, json!({})), (GENERATE, json!({})), ("/completion", json!({})), ("/api/generate", raw)]
    {
        for (prompt, expected) in [("Once upon", vec![bos, once, upon]), ("<|end|> upon", vec![bos, upon])] {
            ok(&fake, path, &with(json!({ "prompt": prompt }), fields.clone())).await;
            assert_eq!(last_prompt(&fake), expected, "{path} {prompt}");
        }
    }
    for path in [COMPLETIONS, GENERATE] {
        ok(&fake, path, &json!({ "prompt": "Once upon", "add_bos_token": false })).await;
        assert_eq!(last_prompt(&fake), [once, upon], "{path}");
        ok(&fake, path, &json!({ "memory": "Once", "prompt": " upon" })).await;
        assert_eq!(last_prompt(&fake), [bos, once, upon], "{path}");
        let long = format!("word{} upon", " Once".repeat(40));
        ok(&fake, path, &json!({ "prompt": long, "max_context_length": 8, "max_tokens": 2 })).await;
        let cut = last_prompt(&fake);
        assert_eq!((cut[0], cut[5], cut.len()), (bos, upon, 6), "{path}: it stays where the rest is cut");
        let tags = json!({ "prompt": "{{[INPUT]}}Hi{{[OUTPUT]}}" });
        ok(&fake, path, &tags).await;
        assert_eq!(last_prompt(&fake)[0], bos, "{path}");
        assert!(!last_prompt(&fake)[1..].contains(&bos), "{path}");
    }
    for (path, prompt) in [(COMPLETIONS, json!([once.0, upon.0])), ("/completion", json!([once.0, " upon"]))]
    {
        ok(&fake, path, &json!({ "prompt": prompt })).await;
        assert_eq!(last_prompt(&fake), [once, upon], "{path}");
    }
    let echoed = ok(&fake, COMPLETIONS, &json!({ "prompt": "Once upon", "echo": true })).await;
    let text = echoed["choices"][0]["text"].as_str().expect("a text");
    assert!(text.starts_with("Once upon"), "the client has not sent the token: {text}");
}

/// text-generation-webui's and vLLM's switch for special tokens in the text is the opposite of KoboldCPP's.
#[tokio::test]
async fn completions_show_special_tokens_where_they_are_not_skipped() {
    let fake = FakeServer::in_memory();
    for (fields, expected) in [
        (json!({}), " one"),
        (json!({ "skip_special_tokens": true }), " one"),
        (json!({ "skip_special_tokens": false }), "<|end|> one"),
        (json!({ "skip_special_tokens": false, "render_special": false }), " one"),
    ] {
        fake.script_answers(&["<|end|> one"]);
        let answer = ok(&fake, COMPLETIONS, &with(json!({ "prompt": "Once" }), fields.clone())).await;
        assert_eq!(answer["choices"][0]["text"], expected, "{fields}");
    }
}

/// What KoboldCPP's clients send works on the route that SillyTavern uses for it, too.
#[tokio::test]
async fn completions_share_the_prompt_fields_of_kobold() {
    let fake = FakeServer::in_memory();
    let body = json!({ "prompt": "one two three four five six", "memory": "Remember: ", "max_tokens": 4 });
    ok(&fake, COMPLETIONS, &body).await;
    assert_eq!(last_window(&fake), "user: Remember: one two three four five six\n");
    let cut = with(body, json!({ "max_context_length": 8 }));
    ok(&fake, COMPLETIONS, &cut).await;
    let window = last_window(&fake);
    assert!(window.starts_with("user: Remember:") && window.ends_with(" six\n"), "{window}");
    assert!(!window.contains("one"), "the prompt is cut from the left: {window}");
    fake.script_answers(&["yes END", "yes END"]);
    let stop = json!({ "prompt": "Once", "stop": ["END"] });
    assert_eq!(ok(&fake, COMPLETIONS, &stop).await["choices"][0]["text"], "yes ");
    let kept = with(stop, json!({ "trim_stop": false }));
    assert_eq!(ok(&fake, COMPLETIONS, &kept).await["choices"][0]["text"], "yes END");
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_are_watched_and_aborted_by_their_key() {
    let fake = FakeServer::in_memory();
    fake.script().token_delay = Duration::from_millis(30);
    fake.script_answers(&[&"word ".repeat(400)]);
    let body = json!({ "prompt": "Once", "genkey": "mine", "max_tokens": 300 });
    let started = Instant::now();
    let abort = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let other = ok(&fake, "/api/extra/abort", &json!({ "genkey": "other" })).await;
        assert_eq!(other["success"], "false");
        let text = ok(&fake, "/api/extra/generate/check", &json!({ "genkey": "mine" })).await;
        assert!(text["results"][0]["text"].as_str().is_some_and(|text| text.starts_with("word")), "{text}");
        ok(&fake, "/api/extra/abort", &json!({ "genkey": "mine" })).await
    };
    let (response, aborted) = tokio::join!(fake.post(COMPLETIONS, &body), abort);
    assert_eq!((aborted["success"].as_str(), response.status), (Some("true"), 200));
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[tokio::test]
async fn special_tokens_are_rendered_on_request_only() {
    let fake = FakeServer::in_memory();
    for (path, text) in [(GENERATE, "/results/0/text"), (COMPLETIONS, "/choices/0/text")] {
        for (render, expected) in [(false, " one"), (true, "<|end|> one")] {
            fake.script_answers(&[&format!("{SPECIAL_TOKEN} one")]);
            let answer = ok(&fake, path, &json!({ "prompt": "Once", "render_special": render })).await;
            assert_eq!(answer.pointer(text), Some(&json!(expected)), "{path} {render}");
        }
    }
}

fn tools() -> Value {
    json!([{ "type": "function", "function": { "name": "clock", "parameters": { "type": "object" } } }])
}

#[tokio::test]
async fn grammar_with_tools_is_refused_by_name() {
    let fake = FakeServer::in_memory();
    let body = with(chat_body(&["u Hello"]), json!({ "tools": tools(), "grammar": "root ::= \"x\"" }));
    let error = refused(&fake, CHAT, &body).await;
    assert_eq!(error["param"], "grammar", "{error}");
    ok(&fake, CHAT, &with(body, json!({ "tool_choice": "none" }))).await;
}

/// An answer that must follow a schema cannot begin with the reasoning that the template opens.
#[tokio::test]
async fn schema_with_tools_is_answered_without_reasoning() {
    let reasoning = ReasoningFormat {
        open: "<think>".into(),
        close: "</think>".into(),
        prompt: "<think>\n".into(),
        skip: None,
    };
    let template = ChatTemplate { reasoning: Some(reasoning), ..ChatTemplate::chatml() };
    let fake = FakeServer::with_options(FakeOptions { template, context: 2000, ..FakeOptions::default() });
    fake.script_answers(&["{\"sky\": \"blue\"}"]);
    let format =
        json!({ "type": "json_schema", "json_schema": { "name": "s", "schema": { "type": "object" } } });
    let body = with(chat_body(&["u Which colour?"]), json!({ "tools": tools(), "response_format": format }));
    let answer = ok(&fake, CHAT, &body).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], "{\"sky\": \"blue\"}", "{answer}");
    assert_eq!(message["reasoning_content"], Value::Null, "{answer}");
    let Some(OutputConstraint::ToolCalls(options)) = fake.script().samplings[0].constraint.clone() else {
        panic!("no constraint")
    };
    assert!(options.answer_schema.is_some());
}

#[tokio::test]
async fn names_of_speakers_reach_the_model() {
    let fake = FakeServer::in_memory();
    let message = |role: &str, name: &str, text: &str| json!({ "role": role, "name": name, "content": text });
    let messages = json!([
        message("system", "example_user", "Hello there."),
        message("user", "Anna", "Who is here, and who keeps the bees?"),
        message("assistant", "Bob", "I am here."),
        message("assistant", "Carol", "Carol: So am I."),
        message("user", "Anna", "Good."),
    ]);
    ok(&fake, CHAT, &json!({ "messages": messages })).await;
    let window = last_window(&fake);
    for part in [
        "system: example_user: Hello there.",
        "user: Anna: Who is here",
        "assistant: Bob: I am here.",
        "assistant: Carol: So am I.",
        "user: Anna: Good.",
    ] {
        assert!(window.contains(part), "{part}: {window}");
    }
    // A model that speaks alone gets no name: its next answer would not have it.
    let alone = json!([
        { "role": "user", "content": "Hello" }, message("assistant", "Bob", "Hi."), { "role": "user", "content": "Bye" },
    ]);
    ok(&fake, CHAT, &json!({ "messages": alone, "store": false })).await;
    assert!(last_window(&fake).contains("assistant: Hi."), "{}", last_window(&fake));
}

/// Ollama's results have the name of their function and no id.
#[tokio::test]
async fn results_without_ids_are_sorted_by_the_names_of_their_functions() {
    let fake = FakeServer::in_memory();
    let call = |name: &str| json!({ "function": { "name": name, "arguments": {} } });
    let result = |name: &str, text: &str| json!({ "role": "tool", "tool_name": name, "content": text });
    let messages = json!([
        { "role": "user", "content": "What is the time, and how is the weather?" },
        { "role": "assistant", "content": "", "tool_calls": [call("clock"), call("weather"), call("clock")] },
        result("weather", "sunny"), result("clock", "noon"), result("clock", "midnight"),
    ]);
    ok(&fake, "/api/chat", &json!({ "messages": messages, "stream": false })).await;
    let window = last_window(&fake);
    let places: Vec<usize> =
        ["tool: noon", "tool: sunny", "tool: midnight"].iter().filter_map(|text| window.find(text)).collect();
    assert!(places.len() == 3 && places.is_sorted(), "{window}");
}

#[tokio::test]
async fn known_fields_without_support_are_refused_by_name() {
    let fake = FakeServer::in_memory();
    for (field, value) in [
        ("audio", json!({ "voice": "alloy", "format": "wav" })),
        ("modalities", json!(["text", "audio"])),
        ("web_search_options", json!({})),
        ("prediction", json!({ "type": "content", "content": "x" })),
        ("chat_template_kwargs", json!({ "custom": 1 })),
        ("reasoning_effort", json!("extreme")),
        ("reasoning_format", json!("none")),
        ("reasoning_budget", json!(100)),
        ("id_slot", json!(3)),
        ("return_progress", json!(true)),
        ("timings_per_token", json!(true)),
    ] {
        let error = refused(&fake, CHAT, &with(chat_body(&["u Hello"]), json!({ field: value }))).await;
        assert_eq!(error["param"], field, "{error}");
    }
    let neutral = json!({
        "audio": null, "modalities": ["text"], "prediction": null, "reasoning_effort": "low", "id_slot": -1,
        "reasoning_format": "auto", "return_progress": false, "n_keep": 4, "user": "u", "metadata": { "a": "b" },
        "service_tier": "auto", "verbosity": "low", "prompt_cache_key": "k",
    });
    ok(&fake, CHAT, &with(chat_body(&["u Hello"]), neutral)).await;
    assert_eq!(fake.script().windows.len(), 1, "nothing was generated for refused requests");
}

#[tokio::test]
async fn samplers_of_text_generation_webui_have_their_effect() {
    let fake = FakeServer::in_memory();
    let fields = json!({
        "dynamic_temperature": true, "dynatemp_low": 0.5, "dynatemp_high": 1.5, "temperature": 0.2,
        "sampler_priority": ["temperature", "top_p"], "temperature_last": true,
    });
    ok(&fake, COMPLETIONS, &with(json!({ "prompt": "Once" }), fields)).await;
    let sampling = fake.script().samplings[0].clone();
    assert_eq!((sampling.temperature, sampling.dynamic_temperature.range), (1.0, 0.5));
    assert_eq!(sampling.order, [SamplerKind::TopP, SamplerKind::Temperature]);
    ok(&fake, COMPLETIONS, &json!({ "prompt": "Once", "do_sample": false, "temperature": 1.0 })).await;
    assert_eq!(fake.script().samplings[1].temperature, 0.0);
    let wrong =
        json!({ "prompt": "Once", "dynamic_temperature": true, "dynatemp_low": 2, "dynatemp_high": 1 });
    assert_eq!(refused(&fake, COMPLETIONS, &wrong).await["param"], "dynatemp_low");
}

#[tokio::test]
async fn errors_have_codes_and_no_names_of_types() {
    let fake = FakeServer::in_memory();
    let message = |content: Value| json!({ "messages": [{ "role": "user", "content": content }] });
    for (path, body, param, code) in [
        (CHAT, message(json!(7)), "messages[0].content", "invalid_value"),
        (CHAT, json!({ "messages": [7] }), "messages[0]", "invalid_value"),
        (
            CHAT,
            json!({ "messages": [{ "role": "assistant", "tool_calls": [1] }] }),
            "messages[0].tool_calls[0]",
            "invalid_value",
        ),
        (CHAT, with(chat_body(&["u x"]), json!({ "stream": "yes" })), "stream", "invalid_type"),
        (CHAT, with(chat_body(&["u x"]), json!({ "stream_options": 3 })), "stream_options", "invalid_type"),
        (CHAT, with(chat_body(&["u x"]), json!({ "tools": "all" })), "tools", "invalid_type"),
        (
            CHAT,
            with(chat_body(&["u x"]), json!({ "parallel_tool_calls": "no" })),
            "parallel_tool_calls",
            "invalid_type",
        ),
        (CHAT, with(chat_body(&["u x"]), json!({ "temperature": 99 })), "temperature", "invalid_value"),
        (
            CHAT,
            with(chat_body(&["u x"]), json!({ "prediction": { "a": 1 } })),
            "prediction",
            "unsupported_parameter",
        ),
        (CHAT, json!({ "messages": [{ "role": "narrator", "content": "x" }] }), "messages", "invalid_value"),
        (COMPLETIONS, json!({ "prompt": { "text": "x" } }), "prompt", "invalid_value"),
        (RESPONSES, json!({ "input": "x", "top_logprobs": 3 }), "top_logprobs", "unsupported_parameter"),
    ] {
        let error = refused(&fake, path, &body).await;
        assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!(code)), "{body}: {error}");
        let text = error["message"].as_str().expect("a message");
        for word in ["untagged", "enum", "struct", "variant", "OpenAi"] {
            assert!(!text.contains(word), "{body}: {text}");
        }
    }
    let model = fake.get("/v1/models/gpt-4o").await.json();
    assert_eq!(model["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn responses_repeat_their_parameters_when_they_are_read() {
    let fake = FakeServer::in_memory();
    let body = json!({
        "input": "Which is the longest river of all?", "instructions": "Be brief.", "temperature": 0.25, "top_p": 0.5,
        "metadata": { "project": "rivers" }, "truncation": "auto", "max_output_tokens": 40, "user": "anna",
        "tools": [{ "type": "function", "name": "clock", "parameters": { "type": "object" } }],
        "reasoning": { "effort": "low", "summary": "auto" }, "include": ["reasoning.encrypted_content"],
        "max_tool_calls": 3, "text": { "format": { "type": "text" }, "verbosity": "low" },
        "frequency_penalty": 0.5, "stop": ["END"], "top_k": 7,
    });
    let created = ok(&fake, RESPONSES, &body).await;
    let sampling = fake.script().samplings[0].clone();
    assert_eq!(
        (sampling.top_k, sampling.frequency_penalty, sampling.stop.as_slice()),
        (7, 0.5, &["END".to_owned()][..])
    );
    let id = created["id"].as_str().expect("an id");
    let read = fake.get(&format!("{RESPONSES}/{id}")).await.json();
    for (field, expected) in [
        ("instructions", json!("Be brief.")),
        ("temperature", json!(0.25)),
        ("top_p", json!(0.5)),
        ("metadata", json!({ "project": "rivers" })),
        ("truncation", json!("auto")),
        ("max_output_tokens", json!(40)),
        ("user", json!("anna")),
        ("reasoning", json!({ "effort": "low", "summary": "auto" })),
        ("max_tool_calls", json!(3)),
    ] {
        assert_eq!((&created[field], &read[field]), (&expected, &expected), "{field}");
    }
    assert_eq!((&created["tools"], created["tools"][0]["name"].as_str()), (&read["tools"], Some("clock")));
    // Text of the conversation is forgotten, and with it what the client has chosen.
    let (_, all) = fake.halo_api("GET", "/conversations", None).await;
    assert_eq!(all.as_array().map(Vec::len), Some(1), "{all}");
}

#[tokio::test]
async fn responses_refuse_what_they_cannot_do() {
    let fake = FakeServer::in_memory();
    let many: serde_json::Map<String, Value> = (0..17).map(|n| (format!("k{n}"), json!("v"))).collect();
    for (field, value) in [
        ("prompt", json!({ "id": "pmpt_1" })),
        ("background", json!(true)),
        ("truncation", json!("middle")),
        ("include", json!(["message.output_text.logprobs"])),
        ("n", json!(2)),
        ("top_logprobs", json!(2)),
        ("metadata", json!(many)),
        ("metadata", json!({ "k": 7 })),
        ("conversation", json!({ "name": "x" })),
        ("max_output_tokens", json!(0)),
        ("temperature", json!(9)),
        ("no_such_field", json!(1)),
    ] {
        let error = refused(&fake, RESPONSES, &json!({ "input": "Hello", field: value })).await;
        assert_eq!(error["param"], field, "{error}");
    }
    let stored = json!({ "input": "Hello", "conversation": "rivers", "store": false });
    assert_eq!(refused(&fake, RESPONSES, &stored).await["param"], "conversation");
    assert!(fake.script().windows.is_empty());
    let named = fake.post(RESPONSES, &json!({ "input": "Hello", "conversation": "rivers" })).await;
    assert_eq!((named.status, named.header("x-halo-conversation")), (200, "rivers"));
    ok(
        &fake,
        RESPONSES,
        &json!({ "input": "Hello", "n": 1, "top_logprobs": 0, "prompt": null, "model": "m" }),
    )
    .await;
}

#[tokio::test]
async fn apply_template_has_functions_calls_and_the_begun_answer() {
    let fake = chatml_server();
    let body = json!({
        "messages": [
            { "role": "user", "content": "What is the time?" },
            { "role": "assistant", "tool_calls": [{ "id": "c", "function": { "name": "clock", "arguments": "{}" } }] },
            { "role": "tool", "tool_call_id": "c", "content": "noon" },
            { "role": "assistant", "content": "It is" },
        ],
        "tools": tools(),
    });
    let prompt = ok(&fake, "/apply-template", &body).await["prompt"].as_str().expect("a text").to_owned();
    assert!(
        prompt.starts_with("<s><|im_start|>system\n") && prompt.contains("\"name\": \"clock\""),
        "{prompt}"
    );
    assert!(
        prompt.contains("<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call><|im_end|>"),
        "{prompt}"
    );
    assert!(prompt.contains("<tool_response>\nnoon\n</tool_response>"), "{prompt}");
    assert!(prompt.ends_with("<|im_start|>assistant\nIt is"), "{prompt}");
}

#[tokio::test]
async fn llama_server_completes_several_prompts() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["first", "second", "third", "fourth"]);
    let body = json!({ "prompt": ["Once", "upon"], "response_fields": ["content", "generation_settings/top_k", "index"], "top_k": 5 });
    let list = ok(&fake, "/completion", &body).await;
    assert_eq!(
        list,
        json!([{ "content": "first", "top_k": 5, "index": 0 }, { "content": "second", "top_k": 5, "index": 1 }])
    );
    let (events, clean) =
        fake.stream("/completion", &json!({ "prompt": ["Once", "upon"], "stream": true })).await;
    assert!(clean, "{events:?}");
    let events: Vec<Value> = events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
    let text = |index: u64| -> String {
        let of_prompt = events.iter().filter(|event| event["index"] == index);
        of_prompt.filter_map(|event| event["content"].as_str()).collect()
    };
    assert_eq!((text(0), text(1)), ("third".to_owned(), "fourth".to_owned()), "{events:?}");
}

#[tokio::test]
async fn routes_without_version_are_those_of_openai() {
    let fake = FakeServer::in_memory();
    let models = fake.get("/models").await;
    assert_eq!((models.status, &models.json()["object"]), (200, &json!("list")));
    assert_eq!(ok(&fake, "/chat/completions", &chat_body(&["u Hello"])).await["object"], "chat.completion");
    assert_eq!(
        refused(&fake, "/chat/completions", &json!({ "messages": [] })).await["type"],
        "invalid_request_error"
    );
}

/// The first choice takes longer than two seconds: the headers come before it.
#[tokio::test(flavor = "multi_thread")]
async fn chat_choices_of_a_stream_have_early_headers() {
    let fake = FakeServer::in_memory();
    fake.script().token_delay = Duration::from_millis(250);
    fake.script_answers(&["one two three four five six seven eight nine ten eleven twelve", "other"]);
    let body = with(chat_body(&["u Count, please."]), json!({ "n": 2, "stream": true }));
    let (text, clean) = fake.raw_stream(CHAT, &body).await;
    assert!(clean && text.starts_with(": waiting\n\n"), "{text}");
    assert!(
        text.contains("twelve") && text.contains("other") && text.ends_with("data: [DONE]\n\n"),
        "{text}"
    );
}

#[tokio::test]
async fn responses_have_the_reasoning_apart() {
    let reasoning = ReasoningFormat {
        open: "<think>".into(),
        close: "</think>".into(),
        prompt: String::new(),
        skip: None,
    };
    let template = ChatTemplate { reasoning: Some(reasoning), ..ChatTemplate::chatml() };
    let fake = FakeServer::with_options(FakeOptions { template, context: 2000, ..FakeOptions::default() });
    let answer = "<think>Hm, well.</think>Yes.";
    fake.script_answers(&[answer, answer]);
    let whole = ok(&fake, RESPONSES, &json!({ "input": "Is it so, or is it not?" })).await;
    let kinds: Vec<&str> =
        whole["output"].as_array().expect("items").iter().filter_map(|item| item["type"].as_str()).collect();
    assert_eq!(kinds, ["reasoning", "message"], "{whole}");
    assert_eq!(whole["output"][0]["content"][0]["text"], "Hm, well.");
    assert_eq!(whole["output"][1]["content"][0]["text"], "Yes.");
    assert!(whole["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64() > Some(0), "{whole}");
    let read = fake.get(&format!("{RESPONSES}/{}", whole["id"].as_str().expect("an id"))).await.json();
    assert_eq!(read["output"][0]["content"][0]["text"], "Hm, well.", "{read}");
    let body = json!({ "input": "And now, is it so?", "stream": true, "store": false });
    let (events, clean) = fake.stream(RESPONSES, &body).await;
    assert!(clean, "{events:?}");
    let events: Vec<Value> = events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
    let deltas = |kind: &str| -> String {
        let of_kind = events.iter().filter(|event| event["type"] == kind);
        of_kind.filter_map(|event| event["delta"].as_str()).collect()
    };
    assert_eq!(deltas("response.reasoning_text.delta"), "Hm, well.");
    assert_eq!(deltas("response.output_text.delta"), "Yes.");
}

/// The model writes two calls; the client gets one, in all APIs that have the parameter.
#[tokio::test]
async fn parallel_calls_can_be_forbidden() {
    let fake = FakeServer::in_memory();
    let call = "<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>";
    let two = format!("{call}\n{call}");
    for (parallel, expected) in [(true, 2), (false, 1)] {
        fake.script_answers(&[&two, &two, &two]);
        let fields = json!({ "tools": tools(), "parallel_tool_calls": parallel, "store": false });
        let chat = ok(&fake, CHAT, &with(chat_body(&["u What is the time?"]), fields.clone())).await;
        let calls = chat["choices"][0]["message"]["tool_calls"].as_array().map(Vec::len);
        assert_eq!(calls, Some(expected), "{chat}");
        let streamed =
            with(with(chat_body(&["u What is the time?"]), fields.clone()), json!({ "stream": true }));
        let (events, _) = fake.stream(CHAT, &streamed).await;
        let ids = events
            .iter()
            .filter_map(|event| serde_json::from_str::<Value>(event).ok())
            .filter(|event| event["choices"][0]["delta"]["tool_calls"][0]["id"].is_string());
        assert_eq!(ids.count(), expected, "{events:?}");
        let response = ok(&fake, RESPONSES, &with(json!({ "input": "What is the time?" }), fields)).await;
        let calls = response["output"].as_array().expect("items").iter();
        assert_eq!(calls.filter(|item| item["type"] == "function_call").count(), expected, "{response}");
    }
}

#[tokio::test]
async fn ollama_returns_logprobs_whole_and_streamed() {
    let fake = FakeServer::in_memory();
    let message = json!([{ "role": "user", "content": "Hello" }]);
    for (path, fields) in [
        ("/api/chat", json!({ "messages": message })),
        ("/api/generate", json!({ "prompt": "Hello" })),
        ("/api/generate", json!({ "prompt": "Hello", "raw": true })),
    ] {
        fake.script_answers(&["one two three", "one two three"]);
        let body = with(fields, json!({ "logprobs": true, "top_logprobs": 2, "stream": false }));
        let whole = ok(&fake, path, &body).await;
        let tokens = whole["logprobs"].as_array().unwrap_or_else(|| panic!("{path}: {whole}"));
        assert_eq!(tokens.len(), 3, "{path}: {whole}");
        assert_eq!(
            (&tokens[0]["logprob"], tokens[0]["top_logprobs"].as_array().map(Vec::len)),
            (&json!(-0.5), Some(2))
        );
        let streamed = fake.post(path, &with(body, json!({ "stream": true }))).await.text();
        let objects: Vec<Value> =
            streamed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let count: usize =
            objects.iter().filter_map(|object| object["logprobs"].as_array()).map(Vec::len).sum();
        assert_eq!(count, 3, "{path}: {streamed}");
    }
}
