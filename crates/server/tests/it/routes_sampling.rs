//! Sampling parameters, choices and log-probabilities in the APIs of OpenAI, KoboldCPP and llama.cpp, and KoboldCPP's control of generations.

use crate::chat::chat_body;
use crate::fake::{FakeServer, KNOWN_TOKENS};
use halo_core::model::{OutputConstraint, SamplingParameter};
use serde_json::{Value, json};
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const GENERATE: &str = "/api/v1/generate";
const STREAM: &str = "/api/extra/generate/stream";
const LLAMA_SERVER: &str = "/completion";
const ABORT: &str = "/api/extra/abort";
const CHECK: &str = "/api/extra/generate/check";

fn with(mut body: Value, fields: Value) -> Value {
    let Value::Object(fields) = fields else { panic!("{fields} is no object") };
    for (name, value) in fields {
        body[name] = value;
    }
    body
}

/// A request of each route that generates.
fn requests() -> [(&'static str, Value); 6] {
    [
        (CHAT, chat_body(&["u Hello"])),
        (CHAT, with(chat_body(&["u Hello"]), json!({ "store": false }))),
        (COMPLETIONS, json!({ "prompt": "Once" })),
        (GENERATE, json!({ "prompt": "Once" })),
        (STREAM, json!({ "prompt": "Once" })),
        (LLAMA_SERVER, json!({ "prompt": "Once" })),
    ]
}

async fn post(fake: &FakeServer, path: &str, body: &Value) -> Value {
    let response = fake.post(path, body).await;
    assert_eq!(response.status, 200, "{path} {body}: {}", response.text());
    response.json()
}

async fn stream(fake: &FakeServer, path: &str, body: &Value) -> Vec<Value> {
    let (events, clean) = fake.stream(path, body).await;
    assert!(clean, "{events:?}");
    events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect()
}

#[tokio::test]
async fn sampling_parameters_reach_the_model_on_every_route() {
    for (path, body) in requests() {
        let fake = FakeServer::in_memory();
        let fields = json!({
            "temperature": 1.5, "top_k": 3, "typical_p": 0.5, "rep_pen": 1.8, "rep_pen_range": 64, "frequency_penalty": 0.5,
            "presence_penalty": -0.5, "dry_multiplier": 0.8, "xtc_probability": 0.5, "logit_bias": { "5": -100 },
            "banned_tokens": ["bad"], "grammar": "root ::= \"x\"", "unknown": { "a": 1 },
        });
        let response = fake.post(path, &with(body, fields)).await;
        assert_eq!(response.status, 200, "{path}: {}", response.text());
        let sampling = fake.script().samplings[0].clone();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.typical_p), (1.5, 3, 0.5), "{path}");
        assert_eq!((sampling.repetition_penalty, sampling.penalty_range), (1.8, 64), "{path}");
        assert_eq!((sampling.frequency_penalty, sampling.presence_penalty), (0.5, -0.5), "{path}");
        assert_eq!((sampling.dry.multiplier, sampling.xtc.probability), (0.8, 0.5), "{path}");
        assert_eq!((sampling.logit_bias.len(), sampling.banned_texts), (1, vec!["bad".to_owned()]), "{path}");
        assert_eq!(
            sampling.constraint,
            Some(OutputConstraint::GbnfGrammar("root ::= \"x\"".into())),
            "{path}"
        );
    }
}

#[tokio::test]
async fn nulls_and_neutral_values_are_accepted_on_every_route() {
    let names = [
        "stream",
        "stream_options",
        "echo",
        "stop",
        "stop_sequence",
        "n",
        "logprobs",
        "top_logprobs",
        "temperature",
        "seed",
        "max_tokens",
        "logit_bias",
        "response_format",
        "memory",
        "genkey",
        "trim_stop",
        "output_attentions",
    ];
    for (path, body) in requests() {
        let fake = FakeServer::in_memory();
        let nulls = names.iter().map(|name| ((*name).to_owned(), Value::Null)).collect();
        let neutral = json!({
            "stream_options": { "include_usage": null }, "tfs": 1, "top_a": 0, "typical": 1, "smoothing_factor": 0,
            "banned_strings": [], "guidance_scale": 1, "mirostat": 0, "grammar": "", "n": 1.0,
        });
        let body = with(with(body, Value::Object(nulls)), neutral);
        let response = fake.post(path, &body).await;
        assert_eq!(response.status, 200, "{path}: {}", response.text());
    }
}

#[tokio::test]
async fn unsupported_parameters_are_refused_by_name_and_nothing_is_stored() {
    for (path, body) in requests() {
        let fake = FakeServer::in_memory();
        fake.script().unsupported = vec![SamplingParameter::Dry];
        for (fields, param) in [
            (json!({ "banned_strings": ["a phrase"] }), "banned_strings"),
            (json!({ "images": ["aGk="] }), "images"),
            (json!({ "top_p": 2 }), "top_p"),
            (json!({ "dry_multiplier": 0.8 }), "dry_multiplier"),
            (json!({ "json_schema": { "type": "unheard of" } }), "json_schema"),
        ] {
            let response = fake.post(path, &with(body.clone(), fields.clone())).await;
            assert_eq!(response.status, 400, "{path} {fields}: {}", response.text());
            let error = response.json()["error"].clone();
            let message = error["message"].as_str().or(error.as_str()).unwrap_or_default();
            assert!(message.contains(param), "{path}: {message}");
            if path.starts_with("/v1/") {
                assert_eq!(error["param"], param, "{path}");
            }
        }
        let neutral = fake.post(path, &with(body.clone(), json!({ "dry_multiplier": 0 }))).await;
        assert_eq!(neutral.status, 200, "a neutral value needs no support: {}", neutral.text());
        assert_eq!(fake.script().windows.len(), 1, "{path}: the model was asked once");
    }
}

/// M2: an answer without a maximum is not cut at the default of the settings, which is 32 tokens here.
#[tokio::test]
async fn openai_answers_without_a_maximum_are_not_cut() {
    let long = vec!["word"; 100].join(" ");
    for fields in [json!({}), json!({ "max_tokens": -1 }), json!({ "max_tokens": null })] {
        for (path, body) in &requests()[..3] {
            let fake = FakeServer::in_memory();
            fake.script_answers(&[&long]);
            let response = post(&fake, path, &with(body.clone(), fields.clone())).await;
            assert_eq!(response["choices"][0]["finish_reason"], "stop", "{path} {fields}");
            assert_eq!(response["usage"]["completion_tokens"], 100, "{path} {fields}");
        }
    }
    let fake = FakeServer::in_memory();
    fake.script_answers(&[&long]);
    let result = post(&fake, GENERATE, &json!({ "prompt": "Once" })).await;
    assert_eq!(result["results"][0]["completion_tokens"], 32, "KoboldCPP's default is that of the settings");
}

#[tokio::test]
async fn chat_choices_are_numbered_and_only_the_first_is_stored() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["one", "two", "three"]);
    let body = with(chat_body(&["u Hello"]), json!({ "n": 3 }));
    let response = post(&fake, CHAT, &body).await;
    let choices = response["choices"].as_array().expect("choices");
    let texts: Vec<&Value> = choices.iter().map(|choice| &choice["message"]["content"]).collect();
    assert_eq!(texts, ["one", "two", "three"]);
    assert_eq!(
        choices.iter().map(|choice| choice["index"].as_u64()).collect::<Vec<_>>(),
        [Some(0), Some(1), Some(2)]
    );
    assert_eq!(response["usage"]["completion_tokens"], 3, "{response}");
    let (_, list) = fake.halo_api("GET", "/conversations", None).await;
    let name = list[0]["name"].as_str().expect("a conversation").to_owned();
    let (_, state) = fake.halo_api("GET", &format!("/conversations/{name}"), None).await;
    let state = state["chunks"].to_string();
    assert!(state.contains("one") && !state.contains("two") && !state.contains("three"), "{state}");
    let seeds: Vec<u64> = fake.script().samplings.iter().map(|sampling| sampling.seed).collect();
    assert!(seeds[1] != seeds[2], "{seeds:?}");
}

#[tokio::test]
async fn chat_choices_are_streamed_by_index() {
    for store in [true, false] {
        let fake = FakeServer::in_memory();
        fake.script_answers(&["one", "two"]);
        let fields = json!({
            "n": 2, "stream": true, "store": store, "stream_options": { "include_usage": true }, "logprobs": true,
        });
        let events = stream(&fake, CHAT, &with(chat_body(&["u Hello"]), fields)).await;
        for (index, expected) in ["one", "two"].into_iter().enumerate() {
            let own: Vec<&Value> = events
                .iter()
                .filter_map(|event| event["choices"].get(0))
                .filter(|choice| choice["index"] == index)
                .collect();
            let text: String = own.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
            assert_eq!(text, expected, "{events:?}");
            assert!(own.iter().any(|choice| choice["finish_reason"] == "stop"), "{events:?}");
            assert!(
                own.iter().any(|choice| choice["logprobs"]["content"][0]["token"] == expected),
                "{events:?}"
            );
        }
        assert_eq!(events[events.len() - 1]["usage"]["completion_tokens"], 2, "{events:?}");
    }
}

#[tokio::test]
async fn chat_choices_number_their_calls() {
    let call = |town: &str| {
        let object = json!({ "name": "weather", "arguments": { "town": town } });
        format!("<tool_call>\n{object}\n</tool_call>")
    };
    let tools = json!([{ "type": "function", "function": { "name": "weather" } }]);
    let body = with(chat_body(&["u How is the weather?"]), json!({ "n": 2, "tools": tools }));
    for streams in [false, true] {
        let fake = FakeServer::in_memory();
        fake.script_answers(&[&format!("{}\n{}", call("Lindau"), call("Bregenz")), &call("Wangen")]);
        let calls: Vec<(u64, Value)> = match streams {
            false => {
                let response = post(&fake, CHAT, &body).await;
                let choices = response["choices"].as_array().expect("choices").clone();
                let calls = choices.iter().flat_map(|choice| {
                    let calls = choice["message"]["tool_calls"].as_array().expect("calls").clone();
                    calls.into_iter().map(move |call| (choice["index"].as_u64().expect("a number"), call))
                });
                calls.collect()
            }
            true => {
                let events = stream(&fake, CHAT, &with(body.clone(), json!({ "stream": true }))).await;
                let deltas = events.iter().filter_map(|event| event["choices"].get(0));
                let calls = deltas.flat_map(|choice| {
                    let calls = choice["delta"]["tool_calls"].as_array().cloned().unwrap_or_default();
                    calls.into_iter().map(move |call| (choice["index"].as_u64().expect("a number"), call))
                });
                let calls: Vec<(u64, Value)> = calls.collect();
                let numbers: Vec<(u64, &Value)> =
                    calls.iter().map(|(choice, call)| (*choice, &call["index"])).collect();
                assert_eq!(numbers, [(0, &json!(0)), (0, &json!(1)), (1, &json!(0))], "{events:?}");
                calls
            }
        };
        let towns: Vec<(u64, &str)> = calls
            .iter()
            .map(|(choice, call)| (*choice, call["function"]["arguments"].as_str().expect("a text")))
            .collect();
        let arguments = ["Lindau", "Bregenz", "Wangen"].map(|town| json!({ "town": town }).to_string());
        assert_eq!(towns, [(0, &*arguments[0]), (0, &*arguments[1]), (1, &*arguments[2])]);
        let mut ids: Vec<&str> = calls.iter().filter_map(|(_, call)| call["id"].as_str()).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 3, "each call has its own id: {calls:?}");
    }
}

#[tokio::test]
async fn chat_returns_logprobs_whole_and_streamed() {
    for store in [true, false] {
        let fake = FakeServer::in_memory();
        let fields = json!({ "logprobs": true, "top_logprobs": 2, "store": store, "stop": " END" });
        let body = with(chat_body(&["u Hello"]), fields);
        fake.script_answers(&["I see END here"]);
        let response = post(&fake, CHAT, &body).await;
        let content = &response["choices"][0]["logprobs"]["content"];
        assert_eq!(content.as_array().map(Vec::len), Some(3), "{response}");
        assert_eq!(
            (&content[1]["token"], &content[1]["logprob"]),
            (&json!(" see"), &json!(-0.5)),
            "{content}"
        );
        assert_eq!(content[1]["bytes"], json!(b" see"), "{content}");
        let top = json!([
            { "token": "other1", "logprob": -1.0, "bytes": b"other1" },
            { "token": "other2", "logprob": -2.0, "bytes": b"other2" },
        ]);
        assert_eq!(content[1]["top_logprobs"], top);
        fake.script_answers(&["I see END here"]);
        let events = stream(&fake, CHAT, &with(body, json!({ "stream": true }))).await;
        let tokens: Vec<String> = events
            .iter()
            .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
            .flatten()
            .filter_map(|token| token["token"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(tokens, ["I", " see", " END"], "each token has its log-probability once: {events:?}");
        assert!(events[0]["choices"][0]["logprobs"].is_null(), "the role has no token");
    }
    let fake = FakeServer::in_memory();
    let response = post(&fake, CHAT, &chat_body(&["u Hello"])).await;
    assert!(response["choices"][0]["logprobs"].is_null(), "{response}");
}

#[tokio::test]
async fn completions_take_several_prompts_and_choices() {
    let fake = FakeServer::in_memory();
    let ids: Vec<u32> = KNOWN_TOKENS[..2].iter().map(|text| fake.model.token_id(text).0).collect();
    for prompts in [json!(["Once upon", "Once upon"]), json!([ids, ids])] {
        fake.script_answers(&[" a", " b", " c", " d"]);
        let body = json!({ "prompt": prompts, "n": 2, "echo": true });
        let response = post(&fake, COMPLETIONS, &body).await;
        let choices = response["choices"].as_array().expect("choices");
        let texts: Vec<&Value> = choices.iter().map(|choice| &choice["text"]).collect();
        assert_eq!(texts, ["Once upon a", "Once upon b", "Once upon c", "Once upon d"], "{prompts}");
        assert_eq!(choices[3]["index"], 3);
        assert_eq!(
            response["usage"],
            json!({
                "prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8,
                "prompt_tokens_details": { "cached_tokens": 0 },
            })
        );
        fake.script_answers(&[" a", " b", " c", " d"]);
        let events = stream(&fake, COMPLETIONS, &with(body, json!({ "stream": true }))).await;
        let text = |index: usize| -> String {
            let own = events.iter().filter(|event| event["choices"][0]["index"] == index);
            own.filter_map(|event| event["choices"][0]["text"].as_str()).collect()
        };
        assert_eq!(
            [text(0), text(1), text(2), text(3)],
            ["Once upon a", "Once upon b", "Once upon c", "Once upon d"]
        );
    }
}

#[tokio::test]
async fn completions_return_logprobs_in_their_own_format() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&[" there was", " there was"]);
    let body = json!({ "prompt": "Once", "logprobs": 1 });
    let expected = json!({
        "tokens": [" there", " was"], "token_logprobs": [-0.5, -0.5], "top_logprobs": [{ "other1": -1.0 }, { "other1": -1.0 }],
        "text_offset": [0, 6],
    });
    let response = post(&fake, COMPLETIONS, &body).await;
    assert_eq!(response["choices"][0]["logprobs"], expected);
    let events = stream(&fake, COMPLETIONS, &with(body, json!({ "stream": true }))).await;
    let logprobs = |n: usize| &events[n]["choices"][0]["logprobs"];
    assert_eq!((&logprobs(0)["tokens"], &logprobs(1)["text_offset"]), (&json!([" there"]), &json!([6])));
}

#[tokio::test]
async fn kobold_memory_precedes_the_prompt_and_stays_when_it_is_cut() {
    let fake = FakeServer::in_memory();
    let words: Vec<String> = (0..50).map(|n| format!(" w{n}")).collect();
    let prompt = words.concat();
    for (fields, start, tokens) in [
        (json!({}), "user: The heron. w0 w1", None),
        (json!({ "max_context_length": 20, "max_length": 6 }), "user: The heron. w", Some(14)),
    ] {
        let body = with(json!({ "memory": "The heron.", "prompt": prompt }), fields);
        let result = post(&fake, GENERATE, &body).await;
        let window = fake.script().windows.pop().expect("a window");
        assert!(window.starts_with(start) && window.contains(" w49"), "{window}");
        if let Some(tokens) = tokens {
            assert_eq!(result["results"][0]["prompt_tokens"], tokens);
            assert!(!window.contains(" w0 "), "{window}");
        }
    }
    // A limit above the model's context is that context: nothing has to be refused.
    let long = vec!["word"; 9000].join(" ");
    post(&fake, GENERATE, &json!({ "prompt": long, "max_context_length": 100_000 })).await;
}

#[tokio::test]
async fn kobold_keys_separate_generations() {
    let fake = FakeServer::in_memory();
    fake.script().token_delay = Duration::from_millis(10);
    fake.script_answers(&[&vec!["word"; 400].join(" ")]);
    let watch = async {
        loop {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let own = post(&fake, CHECK, &json!({ "genkey": "mine" })).await;
            if own["results"][0]["text"] != "" {
                break;
            }
        }
        let other = post(&fake, CHECK, &json!({ "genkey": "other" })).await;
        assert_eq!(other["results"][0]["text"], "", "the text of another client");
        assert_eq!(post(&fake, CHECK, &json!({})).await["results"][0]["text"], "");
        let other = post(&fake, ABORT, &json!({ "genkey": "other" })).await;
        assert_eq!(other["success"], "false", "another client stops nothing");
        post(&fake, ABORT, &json!({ "genkey": "mine" })).await
    };
    let body = json!({ "prompt": "Talk.", "max_length": 400, "genkey": "mine" });
    let (result, aborted) = tokio::join!(post(&fake, GENERATE, &body), watch);
    assert_eq!(aborted, json!({ "success": "true", "done": "true" }));
    let text = result["results"][0]["text"].as_str().unwrap_or_default().to_owned();
    assert!(!text.is_empty() && text.len() < 1900, "{text}");
    let after = post(&fake, CHECK, &json!({ "genkey": "mine" })).await;
    assert!(after["results"][0]["text"].as_str().is_some_and(|after| after.starts_with(&text)), "{after}");
}

#[tokio::test]
async fn kobold_abort_without_a_key_stops_a_chat() {
    let fake = FakeServer::in_memory();
    fake.script().token_delay = Duration::from_millis(10);
    fake.script_answers(&[&vec!["word"; 400].join(" ")]);
    let abort = async {
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let with_key = post(&fake, ABORT, &json!({ "genkey": "mine" })).await;
            assert_eq!(with_key["success"], "false", "a chat has no key");
            if fake.script().windows.is_empty() {
                continue;
            }
            if post(&fake, ABORT, &json!({})).await["success"] == "true" {
                return;
            }
        }
    };
    let body = with(chat_body(&["u Talk."]), json!({ "max_tokens": 400 }));
    let (response, ()) = tokio::join!(post(&fake, CHAT, &body), abort);
    let tokens = response["usage"]["completion_tokens"].as_u64().expect("a number");
    assert!(tokens < 400, "{tokens} tokens: it was not stopped");
}

#[tokio::test]
async fn kobold_reports_figures_of_the_last_generation() {
    let fake = FakeServer::in_memory();
    let perf = fake.get("/api/extra/perf").await.json();
    assert_eq!(
        (&perf["total_gens"], &perf["stop_reason"], &perf["last_seed"]),
        (&json!(0), &json!(-1), &json!(-1))
    );
    fake.script().token_delay = Duration::from_millis(2);
    for (answer, fields, reason) in [
        (" there was", json!({}), 1),
        (" there was a king", json!({ "max_length": 2 }), 0),
        (" there END was", json!({ "stop_sequence": [" END"] }), 2),
    ] {
        fake.script_answers(&[answer]);
        post(&fake, GENERATE, &with(json!({ "prompt": "Once upon", "sampler_seed": 7 }), fields)).await;
        let perf = fake.get("/api/extra/perf").await.json();
        assert_eq!((&perf["last_token_count"], &perf["last_input_count"]), (&json!(2), &json!(2)), "{perf}");
        assert_eq!((&perf["last_seed"], &perf["stop_reason"]), (&json!(7), &json!(reason)), "{perf}");
        assert!(perf["last_eval"].as_f64().is_some_and(|seconds| seconds > 0.0), "{perf}");
        assert!(perf["uptime"].is_u64() && perf["queue"] == 0 && perf["idle"] == 1, "{perf}");
    }
    fake.script_answers(&["Hello you"]);
    post(&fake, CHAT, &chat_body(&["u Hi"])).await;
    let perf = fake.get("/api/extra/perf").await.json();
    assert_eq!(
        (&perf["total_gens"], &perf["last_token_count"]),
        (&json!(4), &json!(2)),
        "chats count too: {perf}"
    );
}

#[tokio::test]
async fn kobold_returns_logprobs_with_the_result_and_later() {
    let fake = FakeServer::in_memory();
    assert!(fake.get("/api/extra/last_logprobs").await.json()["logprobs"].is_null());
    fake.script_answers(&[" there was"]);
    let body = json!({ "prompt": "Once", "logprobs": 1, "genkey": "mine" });
    let result = post(&fake, GENERATE, &body).await;
    assert_eq!(result["results"][0]["logprobs"]["content"][1]["token"], " was", "{result}");
    let last = post(&fake, "/api/extra/last_logprobs", &json!({ "genkey": "mine" })).await;
    assert_eq!(last["logprobs"]["tokens"], json!([" there", " was"]));
    assert_eq!(last["logprobs"]["content"][0]["top_logprobs"][0]["token"], "other1", "{last}");
    assert!(post(&fake, "/api/extra/last_logprobs", &json!({})).await["logprobs"].is_null());
}
