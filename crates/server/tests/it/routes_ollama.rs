//! Ollama's API: chats in conversations, single prompts, embeddings, and what the one model is.

use crate::chat::chat_body;
use crate::fake::{FakeOptions, FakeResponse, FakeServer, KNOWN_TOKENS};
use halo_core::model::{OutputConstraint, SamplingParameter};
use serde_json::{Value, json};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

fn user(text: &str) -> Value {
    json!({ "role": "user", "content": text })
}

/// The objects of a stream.
fn lines(response: &FakeResponse) -> Vec<Value> {
    assert_eq!(
        (response.status, response.header("content-type")),
        (200, "application/x-ndjson"),
        "{}",
        response.text()
    );
    response.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn check_last_object(last: &Value, tokens: usize) {
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("stop")), "{last}");
    assert_eq!((&last["eval_count"], &last["load_duration"]), (&json!(tokens), &json!(0)), "{last}");
    for duration in ["total_duration", "prompt_eval_duration", "eval_duration"] {
        assert!(last[duration].is_u64(), "{duration}: {last}");
    }
    assert!(last["prompt_eval_count"].as_u64().is_some_and(|count| count > 0), "{last}");
}

#[tokio::test]
async fn ollama_describes_the_one_model() {
    let fake = FakeServer::in_memory();
    let tags = fake.get("/api/tags").await.json();
    let model = &tags["models"][0];
    assert_eq!(
        (&model["name"], &model["model"], &model["size"]),
        (&json!("scripted"), &json!("scripted"), &json!(1000))
    );
    assert_eq!(
        (&model["details"]["family"], &model["details"]["format"]),
        (&json!("llama"), &json!("gguf")),
        "{tags}"
    );
    assert_eq!(model["modified_at"], "2023-11-14T22:13:20Z");
    assert_eq!(model["digest"].as_str().map(str::len), Some(64), "{tags}");
    let running = fake.get("/api/ps").await.json();
    assert_eq!(
        (&running["models"][0]["context_length"], &running["models"][0]["digest"]),
        (&json!(8192), &model["digest"])
    );
    let version = fake.get("/api/version").await.json()["version"].as_str().unwrap_or_default().to_owned();
    assert_eq!(version.split('.').count(), 3, "clients compare it: {version}");
    for name in ["scripted", "scripted:latest"] {
        for field in ["model", "name"] {
            let shown = fake.post("/api/show", &json!({ field: name })).await;
            let body = shown.json();
            assert_eq!((shown.status, &body["template"]), (200, &json!("{{ messages }}")), "{body}");
            let info = &body["model_info"];
            assert_eq!(
                (&info["general.architecture"], &info["llama.context_length"]),
                (&json!("llama"), &json!(4096))
            );
            assert_eq!(
                (&info["llama.block_count"], &body["capabilities"]),
                (&json!(2), &json!(["completion", "tools"]))
            );
        }
    }
    let missing = fake.post("/api/show", &json!({ "model": "llama3" })).await;
    assert_eq!(missing.status, 404);
    assert!(
        missing.json()["error"].as_str().is_some_and(|e| e.contains("'llama3' not found")),
        "{}",
        missing.text()
    );
}

#[tokio::test]
async fn ollama_chat_streams_lines_of_json() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["Good day to you."]);
    let response = fake.post(CHAT, &json!({ "model": "scripted", "messages": [user("Hello")] })).await;
    assert_eq!(response.header("x-halo-conversation"), "Hello");
    let objects = lines(&response);
    let (last, tokens) = objects.split_last().expect("objects");
    let text: String = tokens.iter().filter_map(|object| object["message"]["content"].as_str()).collect();
    assert_eq!(text, "Good day to you.");
    for object in tokens {
        assert_eq!(
            (&object["done"], &object["message"]["role"]),
            (&json!(false), &json!("assistant")),
            "{object}"
        );
        assert!(
            object["created_at"].as_str().is_some_and(|at| at.ends_with('Z'))
                && object["model"] == "scripted"
        );
    }
    assert_eq!(last["message"], json!({ "role": "assistant", "content": "" }));
    check_last_object(last, 4);
}

/// A client that takes compressed responses gets the lines as they are written, and all of them.
#[tokio::test]
async fn ollama_streams_are_not_compressed() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["Good day to you."]);
    let headers = [("accept-encoding", "gzip, deflate, br")];
    let body = json!({ "messages": [user("Hello")] }).to_string();
    let response = fake.request("POST", CHAT, &headers, body).await;
    assert_eq!(response.header("content-encoding"), "");
    let objects = lines(&response);
    let text: String = objects.iter().filter_map(|object| object["message"]["content"].as_str()).collect();
    assert_eq!((text.as_str(), &objects[objects.len() - 1]["done"]), ("Good day to you.", &json!(true)));
}

/// A chat of Ollama's API and one of OpenAI's are the same conversation.
#[tokio::test]
async fn ollama_chat_is_stored_as_a_conversation() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["Hi Otto.", "In Lindau.", "By the lake."]);
    let first = json!({ "messages": [user("I am Otto, a baker from Lindau.")], "stream": false });
    let first = fake.post(CHAT, &first).await;
    assert_eq!(first.status, 200, "{}", first.text());
    assert_eq!(first.json()["message"], json!({ "role": "assistant", "content": "Hi Otto." }));
    check_last_object(&first.json(), 2);
    let name = first.header("x-halo-conversation").to_owned();
    let history = ["u I am Otto, a baker from Lindau.", "a Hi Otto.", "u Where do I live?"];
    let second = fake.chat(&chat_body(&history), None).await;
    assert_eq!((second.conversation.as_str(), second.text().as_str()), (name.as_str(), "In Lindau."));
    let body = json!({ "messages": [user("And where is it?")], "stream": false });
    let headers = [("x-halo-conversation", name.as_str())];
    let third = fake.request("POST", CHAT, &headers, body.to_string()).await;
    assert_eq!((third.header("x-halo-conversation"), third.status), (name.as_str(), 200));
    assert!(fake.script().windows[2].contains("I am Otto"), "{:?}", fake.script().windows);
    assert_eq!(fake.halo_api("GET", "/conversations", None).await.1.as_array().map(Vec::len), Some(1));
    let headers = [("x-halo-conversation", "none")];
    let unstored = fake.request("POST", CHAT, &headers, body.to_string()).await;
    assert_eq!(
        (unstored.header("x-halo-conversation"), unstored.status),
        ("none", 200),
        "{}",
        unstored.text()
    );
    assert_eq!(fake.halo_api("GET", "/conversations", None).await.1.as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn ollama_options_reach_the_model() {
    let fake = FakeServer::in_memory();
    let options = json!({
        "num_predict": 2, "temperature": 0.5, "top_k": 3, "seed": 9, "stop": ["END"], "num_ctx": 512, "typical_p": 0.8,
        "repeat_last_n": 40, "repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "mirostat": 2,
        "mirostat_tau": 4, "tfs_z": 0.9, "min_p": 0.1, "num_gpu": null,
    });
    for (path, content, raw) in
        [(CHAT, json!([user("Hello")]), false), (GENERATE, Value::Null, false), (GENERATE, Value::Null, true)]
    {
        let mut body = json!({
            "messages": content, "prompt": "Hello", "stream": false, "format": "json", "keep_alive": "5m", "options": options,
        });
        if raw {
            body["raw"] = true.into();
        }
        let response = fake.post(path, &body).await;
        assert_eq!(
            (response.status, &response.json()["done_reason"]),
            (200, &json!("length")),
            "{}",
            response.text()
        );
        let sampling = fake.script().samplings.pop().expect("the model was asked");
        assert_eq!((sampling.max_tokens, sampling.temperature, sampling.top_k), (2, 0.5, 3));
        assert_eq!(sampling.stop, ["END"]);
        assert_eq!((sampling.typical_p, sampling.tail_free, sampling.min_p), (0.8, 0.9, 0.1));
        assert_eq!((sampling.repetition_penalty, sampling.penalty_range), (1.2, 40));
        assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (0.5, 0.25));
        assert_eq!(sampling.mirostat.map(|mirostat| (mirostat.tau, mirostat.eta)), Some((4.0, 0.1)));
        assert_eq!(sampling.constraint, Some(OutputConstraint::JsonSchema("{\"type\":\"object\"}".into())));
    }
}

#[tokio::test]
async fn ollama_generate_stores_nothing() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["A king.", "A queen."]);
    let body = json!({ "prompt": "Who is it?", "system": "Answer in two words.", "stream": false });
    let response = fake.post(GENERATE, &body).await;
    assert_eq!(
        (response.status, &response.json()["response"]),
        (200, &json!("A king.")),
        "{}",
        response.text()
    );
    check_last_object(&response.json(), 2);
    assert_eq!(fake.script().windows[0], "system: Answer in two words.\nuser: Who is it?\n");
    let raw = json!({ "prompt": "Once upon a time", "raw": true });
    let objects = lines(&fake.post(GENERATE, &raw).await);
    let text: String = objects.iter().filter_map(|object| object["response"].as_str()).collect();
    assert_eq!((text.as_str(), &objects[objects.len() - 1]["prompt_eval_count"]), ("A queen.", &json!(4)));
    assert_eq!(fake.halo_api("GET", "/conversations", None).await.1, json!([]));
}

#[tokio::test]
async fn ollama_requests_without_prompt_load_the_model() {
    let fake = FakeServer::in_memory();
    for (path, body, reason) in [
        (CHAT, json!({ "model": "scripted" }), "load"),
        (CHAT, json!({ "model": "scripted", "messages": [], "keep_alive": 0 }), "unload"),
        (GENERATE, json!({ "model": "scripted" }), "load"),
        (GENERATE, json!({ "model": "scripted", "keep_alive": "0" }), "unload"),
    ] {
        let response = fake.post(path, &body).await;
        assert_eq!((response.status, &response.json()["done_reason"]), (200, &json!(reason)), "{body}");
    }
    assert!(fake.script().windows.is_empty());
}

#[tokio::test]
async fn ollama_refuses_what_it_cannot_do() {
    let fake = FakeServer::in_memory();
    for (path, body, names) in [
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": "a", "images": ["aGk="] }] }),
            "messages[0].images",
        ),
        (CHAT, json!({ "messages": [user("a")], "template": "{{ .Prompt }}" }), "template is not supported"),
        (CHAT, json!({ "messages": [user("a")], "think": true }), "does not support thinking"),
        (CHAT, json!({ "messages": [user("a")], "think": "very" }), "think must be"),
        (CHAT, json!({ "messages": [user("a")], "top_logprobs": 2 }), "top_logprobs needs logprobs"),
        (GENERATE, json!({ "prompt": "a", "logprobs": true, "top_logprobs": 21 }), "top_logprobs is 21"),
        (GENERATE, json!({ "prompt": "a", "raw": true, "think": true }), "think has no effect with raw"),
        (
            CHAT,
            json!({ "messages": [user("a")], "format": "xml" }),
            "format is \"xml\"; it must be \"json\" or",
        ),
        (CHAT, json!({ "messages": [user("a")], "format": { "type": "unheard of" } }), "format: "),
        (GENERATE, json!({ "prompt": "a", "raw": true, "format": { "type": "unheard of" } }), "format: "),
        (
            CHAT,
            json!({ "messages": [user("a")], "options": { "temperature": -1 } }),
            "options.temperature is -1",
        ),
        (
            CHAT,
            json!({ "messages": [user("a")], "options": { "banned_strings": ["a"] } }),
            "options.banned_strings is not supported",
        ),
        (CHAT, json!({ "messages": [{ "role": "robot", "content": "a" }] }), "unknown role 'robot'"),
        (CHAT, json!({ "messages": "a" }), "messages"),
        (GENERATE, json!({ "prompt": "a", "images": ["aGk="] }), "images are not supported"),
        (GENERATE, json!({ "prompt": "a", "template": "x" }), "template is not supported"),
        (GENERATE, json!({ "prompt": "a", "suffix": "b" }), "suffix is not supported"),
        (GENERATE, json!({ "prompt": "a", "context": [1, 2] }), "context is not supported"),
        (GENERATE, json!({ "prompt": "a", "raw": true, "system": "b" }), "system has no effect with raw"),
    ] {
        let response = fake.post(path, &body).await;
        let error = response.json()["error"].as_str().unwrap_or_default().to_owned();
        assert_eq!(response.status, 400, "{body}: {error}");
        assert!(error.contains(names), "{body}: {error}");
    }
    assert_eq!(fake.halo_api("GET", "/conversations", None).await.1, json!([]), "nothing was stored");
    for (method, path) in [
        ("POST", "/api/pull"),
        ("POST", "/api/push"),
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/delete"),
        ("DELETE", "/api/delete"),
    ] {
        let response = fake.request(method, path, &[], "{}").await;
        assert_eq!(response.status, 501, "{path}");
        assert!(response.json()["error"].as_str().is_some_and(|e| e.contains("halo models")), "{path}");
    }
}

#[tokio::test]
async fn ollama_stream_reports_errors() {
    let fake = FakeServer::in_memory();
    fake.script_failure_after("");
    let early = fake.post(CHAT, &json!({ "messages": [user("Hello")] })).await;
    assert_eq!(early.status, 500, "an error before the first token has a status: {}", early.text());
    fake.script_failure_after("Good day");
    let request = json!({ "messages": [user("Hello")] });
    let (text, clean) = fake.raw_stream(CHAT, &request).await;
    let last: Value = serde_json::from_str(text.lines().last().unwrap_or_default()).expect("JSON");
    assert!(last["error"].as_str().is_some_and(|error| error.contains("broke down")) && !clean, "{text}");
}

#[tokio::test]
async fn ollama_embeds_texts() {
    let fake = FakeServer::with_options(FakeOptions { embedder: true, ..FakeOptions::default() });
    let response = fake
        .post("/api/embed", &json!({ "input": ["red apple", "green apple pie"], "dimensions": 32 }))
        .await;
    let body = response.json();
    assert_eq!((response.status, &body["prompt_eval_count"]), (200, &json!(5)), "{body}");
    assert_eq!(body["embeddings"].as_array().map(Vec::len), Some(2));
    assert_eq!(body["embeddings"][0].as_array().map(Vec::len), Some(32));
    let ids: Vec<u32> = KNOWN_TOKENS[..2].iter().map(|text| fake.model.token_id(text).0).collect();
    assert_eq!(fake.post("/api/embed", &json!({ "input": ids })).await.status, 200);
    assert_eq!(fake.post("/api/embed", &json!({ "input": [] })).await.json()["embeddings"], json!([]));
    let one = fake.post("/api/embeddings", &json!({ "prompt": "red apple" })).await.json();
    assert_eq!(one["embedding"].as_array().map(Vec::len), Some(64));
    assert_eq!(
        fake.post("/api/embeddings", &json!({ "prompt": "" })).await.json(),
        json!({ "embedding": [] })
    );
    let long = "tea ".repeat(300);
    let refused = fake.post("/api/embed", &json!({ "input": long })).await;
    assert!(refused.status == 400 && refused.text().contains("300 tokens"), "{}", refused.text());
    assert_eq!(fake.post("/api/embed", &json!({ "input": long, "truncate": true })).await.status, 200);
    let without = FakeServer::in_memory().post("/api/embed", &json!({ "input": "a" })).await;
    assert_eq!(without.status, 501, "{}", without.text());
}

#[tokio::test]
async fn embedder_is_found_by_its_name() {
    let fake = FakeServer::with_options(FakeOptions { embedder: true, ..FakeOptions::default() });
    let name = fake.post("/api/embed", &json!({ "input": "tea" })).await.json()["model"].clone();
    let tagged = format!("{}:latest", name.as_str().expect("a name"));
    let shown = fake.post("/api/show", &json!({ "model": tagged })).await;
    assert_eq!(shown.status, 200, "{}", shown.text());
    let shown = shown.json();
    assert_eq!(shown["capabilities"], json!(["embedding"]));
    assert_eq!(shown["model_info"]["bert.embedding_length"], 64);
    let path = format!("/v1/models/{}", name.as_str().expect("a name").replace(' ', "%20"));
    let model = fake.get(&path).await;
    assert_eq!(model.status, 200, "{}", model.text());
    let model = model.json();
    assert_eq!(
        (&model["id"], &model["max_model_len"], &model["meta"]["n_embd"]),
        (&name, &json!(256), &json!(64))
    );
    // It is not offered for chats.
    assert_eq!(fake.get("/v1/models").await.json()["data"].as_array().map(Vec::len), Some(1));
    assert_eq!(FakeServer::in_memory().get(&path).await.status, 404);
}

/// A model that cannot do what an option asks for is not asked at all.
#[tokio::test]
async fn ollama_options_of_a_limited_model_are_refused() {
    let fake = FakeServer::in_memory();
    fake.script().unsupported = vec![SamplingParameter::Dry, SamplingParameter::Mirostat];
    for (name, value) in [("dry_multiplier", json!(0.8)), ("mirostat", json!(1))] {
        for (path, mut body) in [
            (CHAT, json!({ "messages": [user("a")] })),
            (GENERATE, json!({ "prompt": "a" })),
            (GENERATE, json!({ "prompt": "a", "raw": true })),
        ] {
            body["options"] = json!({ name: value });
            let response = fake.post(path, &body).await;
            let error = response.json()["error"].as_str().unwrap_or_default().to_owned();
            assert!(response.status == 400 && error.contains(name), "{body}: {error}");
        }
    }
    assert!(fake.script().windows.is_empty());
}

/// Clients in Go, Python and JavaScript send null for what is not set.
#[tokio::test]
async fn ollama_reads_null_as_not_sent() {
    let fake = FakeServer::with_options(FakeOptions { embedder: true, ..FakeOptions::default() });
    let message = json!({
        "role": "user", "content": "Hello", "images": null, "tool_calls": null, "tool_name": null, "name": null,
        "tool_call_id": null, "thinking": null,
    });
    let options =
        json!({ "temperature": null, "stop": null, "seed": null, "num_ctx": null, "num_predict": null });
    let chat = json!({
        "model": null, "messages": [message], "stream": false, "format": null, "options": options, "keep_alive": null,
        "tools": null, "think": null, "logprobs": null, "top_logprobs": null, "template": null,
    });
    let answer = fake.post(CHAT, &chat).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["message"]["content"], "answer number 1 of this model");
    let generate = json!({
        "model": null, "prompt": "Hello", "system": null, "suffix": null, "images": null, "format": null,
        "options": null, "template": null, "context": null, "stream": false, "raw": null, "keep_alive": null,
        "think": null, "logprobs": null, "top_logprobs": null,
    });
    let answer = fake.post(GENERATE, &generate).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["response"], "answer number 2 of this model");
    // Nothing to answer: the model is loaded. Fields of every route, each null.
    for (path, body) in [
        (CHAT, json!({ "messages": null, "stream": null, "options": null })),
        (GENERATE, json!({ "prompt": null, "stream": null })),
    ] {
        let loaded = fake.post(path, &body).await;
        assert_eq!((loaded.status, &loaded.json()["done_reason"]), (200, &json!("load")), "{path}");
    }
    let called = json!({ "messages": [
        { "role": "user", "content": "How is it?" },
        { "role": "assistant", "content": null, "tool_calls": [{ "function": { "name": "f", "arguments": {} } }] },
        { "role": "tool", "content": "sunny", "tool_name": "f", "name": "f" },
    ], "stream": false });
    let answer = fake.post(CHAT, &called).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(fake.script().windows[2].contains("tool: sunny"), "{:?}", fake.script().windows[2]);
    let embed =
        json!({ "model": null, "input": "Hello", "truncate": null, "dimensions": null, "keep_alive": null });
    assert_eq!(fake.post("/api/embed", &embed).await.status, 200);
    let empty = fake.post("/api/embeddings", &json!({ "model": "x", "prompt": null })).await;
    assert_eq!((empty.status, empty.json()), (200, json!({ "embedding": [] })));
    let both = json!({ "model": "scripted", "name": "scripted", "verbose": null });
    assert_eq!(fake.post("/api/show", &both).await.status, 200);
    let none = fake.post("/api/show", &json!({ "model": null })).await;
    assert_eq!((none.status, none.json()["error"].is_string()), (400, true), "{}", none.text());
}

#[tokio::test]
async fn ollama_calls_functions() {
    let call =
        "I look. <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": \"Lindau\"}}\n</tool_call>";
    let tools = json!([{ "type": "function", "function": { "name": "weather", "parameters": { "type": "object" } } }]);
    for streams in [false, true] {
        let fake = FakeServer::in_memory();
        fake.script_answers(&[call, "It is sunny."]);
        let question = user("How is the weather in Lindau?");
        let body = json!({ "messages": [question], "tools": tools, "stream": streams });
        let response = fake.post(CHAT, &body).await;
        let objects = if streams { lines(&response) } else { vec![response.json()] };
        let messages = || objects.iter().map(|object| &object["message"]);
        let text: String = messages().filter_map(|message| message["content"].as_str()).collect();
        assert_eq!(text.trim_end(), "I look.", "{objects:?}");
        let calls: Vec<&Value> =
            messages().filter_map(|message| message["tool_calls"].as_array()).flatten().collect();
        assert_eq!(calls.len(), 1, "{objects:?}");
        let function = &calls[0]["function"];
        assert_eq!(
            (&function["name"], &function["arguments"]),
            (&json!("weather"), &json!({ "town": "Lindau" }))
        );
        assert_eq!(objects[objects.len() - 1]["done_reason"], "stop", "{objects:?}");
        let asked = json!({ "role": "assistant", "content": text, "tool_calls": calls });
        let result = json!({ "role": "tool", "content": "sunny", "tool_name": "weather" });
        let body = json!({ "messages": [question, asked, result], "tools": tools, "stream": false });
        let answer = fake.post(CHAT, &body).await;
        assert_eq!(answer.json()["message"]["content"], "It is sunny.", "{}", answer.text());
        assert!(fake.script().windows[1].contains("tool: sunny"));
        let (_, all) = fake.halo_api("GET", "/conversations", None).await;
        assert_eq!(all.as_array().map(Vec::len), Some(1), "the history is recognized: {all}");
    }
}
