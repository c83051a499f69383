//! Every route of Halo's own API: its success case, the requests that it refuses, and its description in the OpenAPI document.

use crate::fake::FakeServer;
use crate::fixture::{PreparedServer, prepared_server, prepared_server_with};
use halo_server::ServerLimits;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

pub const PREFIX: &str = "/api/halo/v1";

type Check = fn(&Value) -> bool;

/// A route with its success case, and the requests that it refuses. Bodies are null where none is sent.
pub struct RouteCase {
    pub method: &'static str,
    /// The path as the OpenAPI document has it, without the prefix.
    pub template: &'static str,
    pub url: &'static str,
    pub body: Value,
    /// Requests that come before it.
    before: Vec<(&'static str, &'static str, Value)>,
    status: u16,
    check: Check,
    /// What a request afterwards shows.
    effect: Option<(&'static str, Check)>,
    refusals: Vec<RefusedCase>,
}

struct RefusedCase {
    url: String,
    body: Value,
    status: u16,
    /// A part of the message, which names what is wrong.
    names: &'static str,
}

fn route(method: &'static str, template: &'static str, url: &'static str) -> RouteCase {
    RouteCase {
        method,
        template,
        url,
        body: Value::Null,
        before: Vec::new(),
        status: 200,
        check: |_| true,
        effect: None,
        refusals: Vec::new(),
    }
}

impl RouteCase {
    fn body(self, body: Value) -> Self {
        Self { body, ..self }
    }

    fn before(mut self, method: &'static str, url: &'static str, body: Value) -> Self {
        self.before.push((method, url, body));
        self
    }

    fn returns(self, status: u16, check: Check) -> Self {
        Self { status, check, ..self }
    }

    fn changes(self, url: &'static str, check: Check) -> Self {
        Self { effect: Some((url, check)), ..self }
    }

    fn refuses(mut self, url: &str, body: Value, status: u16, names: &'static str) -> Self {
        self.refusals.push(RefusedCase { url: url.to_owned(), body, status, names });
        self
    }

    /// Refuses other bodies at the URL of the success case.
    fn refuses_body(self, body: Value, status: u16, names: &'static str) -> Self {
        let url = self.url;
        self.refuses(url, body, status, names)
    }
}

/// The texts of a list of chunks.
fn texts(chunks: &Value) -> Vec<&str> {
    chunks.as_array().into_iter().flatten().filter_map(|chunk| chunk["text"].as_str()).collect()
}

fn ids(chunks: &Value) -> Vec<&str> {
    chunks.as_array().into_iter().flatten().filter_map(|chunk| chunk["id"].as_str()).collect()
}

fn last_text(state: &Value) -> String {
    texts(&state["chunks"]).last().map(|text| text.trim().to_owned()).unwrap_or_default()
}

pub fn route_cases() -> Vec<RouteCase> {
    let none = || Value::Null;
    let mut cases = vec![
        route("GET", "/status", "/status").returns(200, |status| {
            status["model"] == "scripted"
                && status["context"] == 8192
                && status["attention"] == true
                && status["busy"] == false
                && status["queued"] == 0
                && status["embedder"] == true
                && status["version"].is_string()
        }),
        route("GET", "/events", "/events?conversation=main"),
        route("GET", "/settings", "/settings").returns(200, |settings| {
            settings[0]["key"] == "generation.max_tokens"
                && settings[0]["value"] == "32"
                && settings[0]["origin"] == "default"
                && settings[1]["read_only"] == true
                && settings[0]["read_only_reason"].is_null()
                && settings[1]["read_only_reason"] == "model.context is set elsewhere"
                && settings[1]["needs_restart"] == true
        }),
        route("PUT", "/settings/{key}", "/settings/generation.max_tokens")
            .body(json!({ "value": "7" }))
            .returns(200, |settings| settings[0]["value"] == "7" && settings[0]["origin"] == "settings file")
            .changes("/settings", |settings| settings[0]["value"] == "7")
            .refuses_body(json!({ "value": "0" }), 422, "generation.max_tokens is '0'")
            .refuses_body(json!({ "value": "many" }), 422, "generation.max_tokens is 'many'")
            .refuses("/settings/model.context", json!({ "value": "1" }), 422, "model.context")
            .refuses("/settings/server.key", json!({ "value": "1" }), 403, "by hand")
            .refuses("/settings/server.key", json!({ "value": null }), 403, "by hand")
            .refuses("/settings/nothing", json!({ "value": "1" }), 404, "there is no setting nothing"),
    ];
    cases.extend(query_cases());
    cases.extend(command_cases());
    cases.extend([
        route("GET", "/conversations/{name}/forget", "/conversations/main/forget").returns(200, |pending| {
            pending.as_array().is_some_and(|list| list.len() == 1)
                && pending[0]["chunks"] == json!(["u4.0"])
                && pending[0]["due"].is_i64()
                && pending[0]["all"] == false
        }),
        route("POST", "/conversations/{name}/forget", "/conversations/main/forget")
            .body(json!({ "turns": [6], "chunks": [], "matching": "tea", "all": false, "now": true }))
            .returns(200, |result| result["chunks"] == json!(["u6.0"]) && result["due"].is_null())
            .changes("/conversations/main", |state| !texts(&state["chunks"]).contains(&"Tell me about tea."))
            .refuses_body(json!({}), 400, "select chunks, turns, matching or all")
            .refuses_body(json!({ "chunks": ["x"] }), 400, "x")
            .refuses_body(json!({ "everything": true }), 400, "everything")
            .refuses_body(json!({ "matching": " " }), 422, "word")
            .refuses_body(json!({ "turns": [99] }), 404, "there is no turn 99"),
        route("POST", "/conversations/{name}/forget/cancel", "/conversations/main/forget/cancel")
            .body(json!({ "chunks": ["u4.0"], "turns": [] }))
            .returns(200, |result| *result == json!({ "chunks": 1, "memories": 0 }))
            .changes("/conversations/main", |state| {
                texts(&state["chunks"]).contains(&"My secret number is 4711.")
            })
            .refuses_body(json!({ "chunks": ["u6.0"] }), 404, "u6.0")
            .refuses_body(json!({ "chunks": ["x"] }), 400, "x"),
        route("GET", "/forget/proofs", "/forget/proofs")
            .returns(200, |list| *list == json!({ "proofs": [], "unreadable_lines": [] })),
        route("GET", "/conversations/{name}/captures", "/conversations/main/captures").returns(200, |list| {
            list["recording"] == false
                && list["supported"] == true
                && list["captures"][0]["turn"] == 8
                && list["captures"][0]["steps"] == 4
                && list["captures"][0]["model"] == "scripted"
        }),
        route("GET", "/conversations/{name}/captures/{capture}", "/conversations/main/captures/{capture}")
            .returns(200, |capture| {
                let share = |n: usize| capture["steps"][0]["shares"][n].as_f64().unwrap_or(0.0);
                capture["segments"][0]["text"] == "Be brief."
                    && capture["segments"][1]["chunk"] == "u0.0"
                    && capture["steps"][3]["text"] == " China."
                    && (share(0) - 2.0 / 32.0).abs() < 1e-6
                    && (share(1) - 7.0 / 32.0).abs() < 1e-6
            })
            .refuses("/conversations/main/captures/0123", none(), 404, "0123"),
        route("PUT", "/conversations/{name}/recording", "/conversations/main/recording")
            .body(json!({ "recording": true }))
            .returns(204, Value::is_null)
            .changes("/conversations/main/captures", |list| list["recording"] == true)
            .refuses_body(json!({ "recording": true, "folder": "/tmp" }), 400, "folder"),
        route("GET", "/conversations/{name}/memories", "/conversations/main/memories?q=Lindau").returns(
            200,
            |list| {
                list["enabled"] == false
                    && list["memories"][0]["id"] == 1
                    && list["memories"][0]["text"] == "They live in Lindau on the lake."
                    && list["memories"][0]["first_turn"] == 0
                    && list["memories"][0]["last_turn"] == 1
                    && list["memories"][0]["at"] == 1000
            },
        ),
        route("PUT", "/conversations/{name}/memories/{memory}", "/conversations/main/memories/1")
            .body(json!({ "text": "They live in Bregenz.", "pinned": true, "disabled": true }))
            .returns(204, Value::is_null)
            .changes("/conversations/main/memories", |list| {
                let memory = &list["memories"][0];
                memory["text"] == "They live in Bregenz."
                    && memory["pinned"] == true
                    && memory["disabled"] == true
                    && memory["edited"] == true
            })
            .refuses(
                "/conversations/main/memories/99",
                json!({ "pinned": true }),
                404,
                "there is no memory 99",
            )
            .refuses("/conversations/main/memories/one", json!({ "pinned": true }), 400, "one")
            .refuses_body(json!({ "text": " " }), 422, "the text must have")
            .refuses_body(json!({ "resting": true }), 400, "resting"),
        route("DELETE", "/conversations/{name}/memories/{memory}", "/conversations/main/memories/1")
            .returns(204, Value::is_null)
            .changes("/conversations/main/memories", |list| list["memories"] == json!([]))
            .refuses("/conversations/main/memories/99", none(), 404, "there is no memory 99")
            .refuses("/conversations/main/memories/one", none(), 400, "one"),
        route(
            "GET",
            "/conversations/{name}/memories/{memory}/origins",
            "/conversations/main/memories/1/origins",
        )
        .returns(200, |origins| {
            let spans = origins["spans"].as_array().map_or(&[][..], Vec::as_slice);
            let ends: Vec<_> = spans.iter().filter_map(|span| span["end"].as_u64()).collect();
            let starts: Vec<_> = spans.iter().filter_map(|span| span["start"].as_u64()).collect();
            let len = origins["text"].as_str().map(|text| text.len() as u64);
            starts.first() == Some(&0) && starts[1..] == ends[..ends.len() - 1] && ends.last().copied() == len
        })
        .refuses("/conversations/main/memories/99/origins", none(), 404, "there is no memory 99")
        .refuses("/conversations/main/memories/one/origins", none(), 400, "one"),
        route("GET", "/conversations/{name}/memories/conflicts", "/conversations/main/memories/conflicts")
            .returns(200, |conflicts| *conflicts == json!([])),
        route("POST", "/conversations/{name}/memories/conflicts", "/conversations/main/memories/conflicts")
            .body(json!({ "first": 1, "second": 99, "keep": "first" }))
            .returns(404, |error| error.to_string().contains("there is no memory 99"))
            .refuses_body(json!({ "first": 1, "second": 2, "keep": "neither" }), 400, "keep"),
        route("POST", "/conversations/{name}/memories/carry", "/conversations/aside/memories/carry")
            .body(json!({ "memories": [{ "conversation": "main", "id": 1 }] }))
            .returns(200, |carried| *carried == json!({ "ids": [1] }))
            .refuses_body(json!({ "memories": [{ "conversation": "main", "id": 99 }] }), 404, "99")
            .refuses_body(json!({ "memories": [{ "conversation": "nowhere", "id": 1 }] }), 404, "nowhere")
            .refuses_body(json!({ "memories": "all" }), 400, "memories"),
    ]);
    cases.extend(world_cases());
    cases.extend(transcript_cases());
    cases
}

/// The transcript, search over all conversations, export and import.
fn transcript_cases() -> Vec<RouteCase> {
    let none = || Value::Null;
    let message = json!({ "author": { "role": "user" }, "content": { "parts": ["Hello there."] } });
    vec![
        route("GET", "/conversations/{name}/transcript", "/conversations/main/transcript?offset=1&limit=3")
            .returns(200, |transcript| {
                let messages = transcript["messages"].as_array().cloned().unwrap_or_default();
                let turns: Vec<_> = messages.iter().filter_map(|message| message["turn"].as_u64()).collect();
                // Without the deleted turns 2 and 3, the pending turn 4 and the variant 7.
                turns == [1, 5, 6]
                    && transcript["total"] == 5
                    && transcript["offset"] == 1
                    && messages[0]["role"] == "assistant"
                    && texts(&messages[0]["chunks"]) == ["What a lovely town."]
                    && messages[0]["chunks"][0]["live"] == false
                    && messages[2]["chunks"][0]["live"] == true
                    && messages[2]["chunks"][0]["relative_brightness"].is_number()
                    && messages[2]["at"].is_i64()
            })
            .refuses("/conversations/main/transcript?offset=-1", none(), 400, "offset")
            .refuses("/conversations/main/transcript?around=last", none(), 400, "around"),
        route("GET", "/conversations/{name}/state", "/conversations/main/state").returns(200, |state| {
            state["limit"] == 400
                && state["tokens"] == 37
                && state["live"] == 12
                && state["pruned"] == 2
                && state["running"].is_null()
                && state["chunks"].is_null()
        }),
        route("GET", "/conversations/{name}/outline", "/conversations/main/outline?parts=2")
            .returns(200, |outline| {
                outline["total"] == 5
                    && outline["parts"].as_array().is_some_and(|parts| parts.len() == 2)
                    && outline["parts"][1]["offset"] == 3
                    && outline["parts"][1]["turn"] == 6
                    && outline["parts"][1]["live"] == outline["parts"][1]["tokens"]
                    && outline["parts"][0]["live"].as_u64() < outline["parts"][0]["tokens"].as_u64()
            })
            .refuses("/conversations/main/outline?parts=few", none(), 400, "parts"),
        route("GET", "/search", "/search?q=LINDAU%20lake")
            .returns(200, |found| {
                found["next"].is_null()
                    && found["conversations"].as_array().is_some_and(|list| list.len() == 1)
                    && found["conversations"][0]["name"] == "main"
                    && found["conversations"][0]["hits"][0]["chunk"] == "u0.0"
            })
            .refuses("/search?q=%20", none(), 400, "empty"),
        route("GET", "/conversations/{name}/export", "/conversations/main/export").refuses(
            "/conversations/main/export?format=pdf",
            none(),
            400,
            "pdf",
        ),
        route("POST", "/import", "/import?file_name=chats.json")
            .body(json!([{ "title": "Greetings", "mapping": { "a": { "message": message } } }]))
            .returns(201, |result| result["conversations"] == json!(["Greetings"]))
            .changes("/conversations/Greetings/transcript", |transcript| transcript["total"] == 1)
            .refuses("/import?file_name=a.json", json!({ "no": "chat" }), 422, "format")
            .refuses("/import", none(), 400, "file_name"),
        route("GET", "/deleted_conversations", "/deleted_conversations")
            .before("DELETE", "/conversations/main?confirm=main", none())
            .returns(200, |list| list[0]["name"] == "main" && list[0]["due"].is_i64()),
    ]
}

fn query_cases() -> Vec<RouteCase> {
    let none = || Value::Null;
    vec![
        route("GET", "/conversations", "/conversations").returns(200, |list| {
            list.as_array().is_some_and(|list| list.len() == 1)
                && list[0]["name"] == "main"
                && list[0]["turns"] == 9
                && list[0]["tokens"] == 37
                && list[0]["live"] == 10
        }),
        route("GET", "/conversations/{name}", "/conversations/main").returns(200, |state| {
            ids(&state["chunks"]) == ["a5.0", "u6.0", "a8.0"]
                && texts(&state["chunks"]) == ["I see.", "Tell me about tea.", "Tea comes from China."]
                && state["limit"] == 400
                && state["tokens"] == 37
                && state["live"] == 12
                && state["pruned"] == 2
                && state["system_prompt"] == "Be brief."
                && state["running"].is_null()
                && state["times"]["8"].is_i64()
        }),
        route("GET", "/conversations/{name}/chunks/{chunk}", "/conversations/main/chunks/u0.0")
            .returns(200, |detail| {
                detail["chunk"]["text"] == "I live in Lindau on the lake."
                    && detail["chunk"]["live"] == false
                    && detail["tokens"][3]["text"] == " Lindau"
                    && detail["pair"] == "a1.0"
                    && ids(&detail["dependents"]) == ["a1.0"]
                    && detail["history"][0]["action"] == "pruned"
                    && detail["history"][0]["reason"] == "pruned by the user"
                    && detail["share"].as_f64().is_some_and(|share| share > 0.0)
            })
            .refuses("/conversations/main/chunks/nonsense", none(), 400, "nonsense")
            .refuses("/conversations/main/chunks/u99.0", none(), 404, "there is no chunk u99.0")
            .refuses("/conversations/main/chunks/u4.0", none(), 404, "u4.0 is pending deletion"),
        route("GET", "/conversations/{name}/graveyard", "/conversations/main/graveyard?sort=oldest&limit=1")
            .returns(200, |page| {
                page["total"] == 2
                    && ids(&page["chunks"]) == ["u0.0"]
                    && page["chunks"][0]["reason"] == "pruned by the user"
            })
            .refuses("/conversations/main/graveyard?sort=loudest", none(), 400, "loudest")
            .refuses("/conversations/main/graveyard?limit=many", none(), 400, "limit")
            .refuses("/conversations/main/graveyard?offset=-1", none(), 400, "offset"),
        route("GET", "/conversations/{name}/deleted", "/conversations/main/deleted?offset=1&limit=2")
            .returns(200, |page| {
                page["total"] == 3
                    && texts(&page["chunks"]) == ["A fine name.", "My cat is called Mitzi."]
                    && page["chunks"][1]["reason"] == "deleted by the user"
            })
            .refuses("/conversations/main/deleted?limit=-1", none(), 400, "limit"),
        route("GET", "/conversations/{name}/variants", "/conversations/main/variants").returns(
            200,
            |variants| {
                variants.as_array().is_some_and(|list| list.len() == 2)
                    && variants[0]["turn"] == 7
                    && variants[0]["messages"] == json!([{ "role": "assistant", "text": "Tea is brewed." }])
                    && variants[0]["current"] == false
                    && variants[1]["current"] == true
            },
        ),
        route("GET", "/conversations/{name}/search", "/conversations/main/search?q=lake&limit=1")
            .returns(200, |hits| {
                hits.as_array().is_some_and(|hits| hits.len() == 1)
                    && hits[0]["chunk"]["id"] == "u0.0"
                    && hits[0]["reason"].as_str().is_some_and(|reason| reason.contains("words: lake"))
            })
            .refuses("/conversations/main/search?q=%20", none(), 400, "the query is empty")
            .refuses("/conversations/main/search", none(), 400, "q")
            .refuses("/conversations/main/search?q=a&limit=x", none(), 400, "limit"),
        route("GET", "/conversations/{name}/stats", "/conversations/main/stats").returns(200, |figures| {
            let number = |key: &str| figures[key].as_u64().unwrap_or_default();
            number("live_tokens") > 0
                && number("dead_tokens") > 0
                && number("semantic_entries") > 0
                && number("next_position") == number("live_tokens") + number("dead_tokens")
                && number("next_turn") == 9
        }),
        route("GET", "/conversations/{name}/extract", "/conversations/main/extract?limit=2")
            .returns(200, |sentences| {
                sentences.as_array().is_some_and(|sentences| (1..=2).contains(&sentences.len()))
                    && sentences[0]["text"].as_str().is_some_and(|text| !text.is_empty())
                    && sentences[0]["chunk"].is_string()
                    && sentences[0]["brightness"].is_f64()
            })
            .refuses("/conversations/main/extract?limit=x", none(), 400, "limit"),
        route("DELETE", "/conversations/{name}", "/conversations/main?confirm=main")
            .returns(200, |result| result["due"].is_i64())
            .changes("/conversations/main/forget", |pending| {
                pending.as_array().into_iter().flatten().any(|item| item["all"] == true)
            })
            .refuses("/conversations/main", none(), 422, "?confirm=main")
            .refuses("/conversations/main?confirm=Main", none(), 422, "nothing was deleted")
            .refuses("/conversations/main?confirm=main&now=perhaps", none(), 400, "now"),
        route("GET", "/conversations/{name}/turns", "/conversations/main/turns").returns(200, |turns| {
            let numbers = turns.as_array().into_iter().flatten().filter_map(|turn| turn["turn"].as_u64());
            numbers.eq([1, 3, 5, 7, 8])
                && turns[4]["finish"] == "end"
                && turns[4]["figures"]["tokens"] == 4
                && turns[4]["figures"]["ms"]["generate"].is_f64()
                && turns[4]["figures"]["attention"][1]["step"] == 2
                && turns[4]["figures"]["attention"][1]["histogram"].as_array().map(Vec::len) == Some(16)
        }),
        route("GET", "/conversations/{name}/turns/{turn}/context", "/conversations/main/turns/5/context")
            .returns(200, |then| {
                then["turn"] == 5
                    && ids(&then["chunks"]) == ["u0.0", "a1.0", "u2.0", "a3.0", "a5.0"]
                    && then["removed_since"] == json!(["u0.0", "a1.0", "u2.0", "a3.0"])
            })
            .refuses("/conversations/main/turns/99/context", none(), 404, "there is no turn 99")
            .refuses("/conversations/main/turns/last/context", none(), 400, "last"),
        route("GET", "/conversations/{name}/attention/{position}", "/conversations/main/attention/39")
            .before("POST", "/conversations/main/messages", json!({ "text": "And coffee?" }))
            .returns(200, |attention| {
                let system_prompt = attention["system_prompt"].as_f64().unwrap_or(0.0);
                attention["turn"] == 10
                    && attention["text"] == "answer"
                    // A share of 2/25 in the one byte that is stored.
                    && (system_prompt - (72.0f64 / 255.0).powi(2)).abs() < 1e-6
                    && attention["chunks"][0][0] == "u0.0"
                    && attention["answer"] == 0.0
            })
            .refuses("/conversations/main/attention/0", none(), 404, "no attention data")
            .refuses("/conversations/main/attention/first", none(), 400, "first"),
        route("GET", "/conversations/{name}/brightness", "/conversations/main/brightness?part=1")
            // The attention of this model is uniform, so that all tokens are equally bright.
            .returns(200, |window| *window == json!({ "floor": 10000.0, "peak": 10000.0, "chunks": [] }))
            .refuses("/conversations/main/brightness?part=half", none(), 400, "part")
            .refuses("/conversations/none/brightness", none(), 404, "none"),
        route("GET", "/conversations/{name}/options", "/conversations/main/options").returns(200, |view| {
            view["own"]["system_prompt"].is_null()
                && view["defaults"]["sampling"]["temperature"].is_number()
                && view["model"].is_null()
        }),
        route("GET", "/models", "/models").returns(200, |models| models["current"] == "fake"),
        route("GET", "/conversations/{name}/notes", "/conversations/main/notes").returns(200, |notes| {
            *notes == json!([{ "file": "notes.json", "text": "{\"town\":\"Lindau\"}" }])
        }),
    ]
}

fn command_cases() -> Vec<RouteCase> {
    let too_long = || vec!["word"; 9000].join(" ");
    vec![
        route("POST", "/conversations/{name}/messages", "/conversations/main/messages")
            .body(json!({ "text": "And coffee?", "id": "m1" }))
            .returns(202, |accepted| *accepted == json!({ "ahead": 0 }))
            .changes("/conversations/main", |state| last_text(state) == "answer number 1 of this model")
            .refuses_body(json!({ "text": " " }), 422, "empty")
            .refuses_body(json!({ "text": "Hi", "id": "" }), 400, "id")
            .refuses_body(json!({ "text": "Hi", "id": "x".repeat(101) }), 400, "id")
            .refuses_body(json!({ "text": too_long() }), 422, "context length exceeded")
            .refuses("/conversations/%20/messages", json!({ "text": "Hi" }), 400, "name")
            .refuses("/conversations/a%0Ab/messages", json!({ "text": "Hi" }), 400, "name")
            .refuses(
                &format!("/conversations/{}/messages", "n".repeat(201)),
                json!({ "text": "Hi" }),
                400,
                "name",
            ),
        route("POST", "/conversations/{name}/regenerate", "/conversations/main/regenerate")
            .returns(202, |accepted| *accepted == json!({ "ahead": 0 }))
            .changes("/conversations/main/variants", |variants| {
                variants[2]["messages"][0]["text"] == "answer number 1 of this model"
                    && variants[2]["current"] == true
            }),
        route("POST", "/conversations/{name}/edit_last", "/conversations/main/edit_last")
            .body(json!({ "text": "Tell me about coffee." }))
            .returns(202, |accepted| *accepted == json!({ "ahead": 0 }))
            .changes("/conversations/main", |state| {
                let texts = texts(&state["chunks"]);
                texts.contains(&"Tell me about coffee.") && !texts.contains(&"Tell me about tea.")
            })
            .refuses_body(json!({ "text": " " }), 422, "empty")
            .refuses_body(json!({ "text": too_long() }), 422, "context length exceeded"),
        route("POST", "/conversations/{name}/continue", "/conversations/main/continue")
            .returns(202, |accepted| *accepted == json!({ "ahead": 0 }))
            .changes("/conversations/main", |state| {
                last_text(state).ends_with("answer number 1 of this model")
            })
            .refuses("/conversations/none/continue", Value::Null, 404, "none"),
        route("PUT", "/conversations/{name}/answer", "/conversations/main/answer")
            .body(json!({ "text": "Tea is a drink." }))
            .returns(204, Value::is_null)
            .changes("/conversations/main", |state| last_text(state) == "Tea is a drink.")
            .refuses_body(json!({ "text": " " }), 422, "empty")
            .refuses_body(json!({ "message": "x" }), 400, "text")
            .refuses("/conversations/none/answer", json!({ "text": "x" }), 404, "none"),
        route("PUT", "/conversations/{name}/options", "/conversations/main/options")
            .body(json!({ "system_prompt": "Be kind.", "sampling": { "top_k": 7 } }))
            .returns(200, |own| own["system_prompt"] == "Be kind." && own["sampling"]["top_k"] == 7)
            .changes("/conversations/main/options", |view| view["own"]["system_prompt"] == "Be kind.")
            .refuses_body(json!({ "sampling": { "temperature": 9 } }), 422, "temperature")
            .refuses_body(json!({ "heat": 1 }), 400, "heat"),
        route("PUT", "/conversations/{name}/model", "/conversations/main/model")
            .body(json!({ "model": "other" }))
            .returns(200, |choice| *choice == json!({ "model": "other" }))
            .changes("/conversations/main/options", |view| view["model"] == "other")
            .refuses_body(json!({ "model": "missing" }), 404, "missing")
            .refuses_body(json!({ "name": "other" }), 400, "name"),
        route("POST", "/conversations", "/conversations")
            .body(json!({
                "name": "created",
                "system_prompt": "Be kind.",
                "messages": [{ "role": "user", "text": "Hello." }],
            }))
            .returns(201, |created| created["name"] == "created")
            .changes("/conversations/created/options", |view| view["own"]["system_prompt"] == "Be kind.")
            .refuses_body(json!({}), 400, "name")
            .refuses_body(json!({ "title": "created" }), 400, "title"),
        route("POST", "/models/download", "/models/download")
            .body(json!({ "name": "far" }))
            .returns(202, |model| model["name"] == "far")
            .refuses_body(json!({ "name": "near" }), 404, "near")
            .refuses_body(json!({ "address": "far" }), 400, "address"),
        route("POST", "/models/test", "/models/test")
            .body(json!({ "address": "http://127.0.0.1:11434" }))
            .returns(200, |report| report["kind"] == "Ollama" && report["models"][0]["name"] == "tiny")
            .refuses_body(json!({ "address": "http://8.8.8.8" }), 403, "private")
            .refuses_body(json!({ "url": "http://127.0.0.1" }), 400, "address"),
        route("POST", "/conversations/{name}/stop", "/conversations/main/stop").returns(204, Value::is_null),
        route("POST", "/conversations/{name}/edits", "/conversations/main/edits")
            .body(json!({ "edit": "pin", "chunks": ["u6.0"] }))
            .returns(200, |result| *result == json!({ "action": "pinned", "chunks": ["u6.0"], "undo": 1 }))
            .changes("/conversations/main/chunks/u6.0", |detail| detail["chunk"]["pinned"] == true)
            .refuses_body(json!({ "edit": "shine", "chunks": ["u6.0"] }), 400, "there is no edit 'shine'")
            .refuses_body(json!({ "edit": "pin", "chunks": [] }), 400, "chunks is empty")
            .refuses_body(json!({ "edit": "pin", "chunks": ["six"] }), 400, "six")
            .refuses_body(json!({ "edit": "pin", "chunks": ["u99.0"] }), 422, "u99.0")
            .refuses_body(json!({ "edit": "pin", "chunks": ["u6.0", "u99.0"] }), 422, "u99.0")
            .refuses_body(json!({ "edit": "unpin", "chunks": ["u6.0"] }), 422, "cannot unpin u6.0")
            .refuses_body(json!({ "edit": "prune", "chunks": ["u0.0"] }), 422, "cannot prune u0.0")
            .refuses_body(json!({ "edit": "resurrect", "chunks": ["u6.0"] }), 422, "cannot resurrect u6.0")
            .refuses_body(json!({ "edit": "delete", "chunks": ["u2.0"] }), 422, "u2.0")
            .refuses_body(json!({ "edit": "undelete", "chunks": ["u6.0"] }), 422, "cannot undelete u6.0")
            .refuses_body(json!({ "edit": "merge", "chunks": ["u6.0"] }), 422, "cannot merge u6.0"),
        route("POST", "/conversations/{name}/undo", "/conversations/main/undo")
            .before("POST", "/conversations/main/edits", json!({ "edit": "pin", "chunks": ["u6.0"] }))
            .body(json!({ "undo": 1 }))
            .returns(204, Value::is_null)
            .changes("/conversations/main/chunks/u6.0", |detail| detail["chunk"]["pinned"] == false)
            .refuses_body(json!({ "undo": 99 }), 404, "99"),
        route("POST", "/conversations/{name}/variants", "/conversations/main/variants")
            .body(json!({ "turn": 7 }))
            .returns(204, Value::is_null)
            .changes("/conversations/main", |state| last_text(state) == "Tea is brewed.")
            .refuses_body(json!({ "turn": 6 }), 404, "turn 6")
            .refuses_body(json!({ "turn": 7, "text": "" }), 400, "text"),
        route("POST", "/conversations/{name}/branch", "/conversations/main/branch")
            .body(json!({ "name": "what if", "turn": 1 }))
            .returns(201, |result| *result == json!({ "messages": 2 }))
            .changes("/conversations/what%20if", |state| state["name"] == "what if" && state["tokens"] == 11)
            .refuses_body(json!({ "name": "main" }), 409, "'main' exists already")
            .refuses_body(json!({ "name": "" }), 400, "name")
            .refuses_body(
                json!({ "name": "world:new" }),
                400,
                "name: the name of the conversation begins with 'world:'",
            )
            .refuses_body(
                json!({ "name": "ä".repeat(150) }),
                400,
                "name: the name of the conversation has 300 bytes",
            )
            .refuses_body(json!({ "name": "new", "turn": 99 }), 422, "there is no turn 99"),
        route("POST", "/conversations/{name}/rename", "/conversations/main/rename")
            .body(json!({ "name": "other" }))
            .returns(204, Value::is_null)
            .changes("/conversations", |list| {
                list.as_array().is_some_and(|list| list.len() == 1) && list[0]["name"] == "other"
            })
            .refuses_body(json!({ "name": "main" }), 409, "'main' exists already")
            .refuses_body(json!({ "name": "a\nb" }), 400, "name")
            .refuses_body(json!({ "name": "a\u{202e}b" }), 400, "control character U+202E"),
        route("PUT", "/conversations/{name}/notes", "/conversations/main/notes")
            .body(json!({ "file": "notes.json", "text": "{\"town\":\"Bregenz\"}" }))
            .returns(204, Value::is_null)
            .changes("/conversations/main/notes", |notes| notes[0]["text"] == "{\"town\":\"Bregenz\"}")
            .refuses_body(json!({ "file": "other.json", "text": "{}" }), 404, "other.json")
            .refuses_body(json!({ "file": "notes.json", "text": "{" }), 400, "the notes are not valid JSON")
            .refuses_body(
                json!({ "file": "notes.json", "text": json!("x".repeat(300_000)).to_string() }),
                422,
                "the notes have 300002 bytes and may have 262144 (256 KiB)",
            ),
    ]
}

fn world_cases() -> Vec<RouteCase> {
    let none = || Value::Null;
    let say = |room: u32| json!({ "command": "say", "room": room, "message": "Good morning." });
    let file = |content: Value| json!({ "name": "new", "file": content.to_string() });
    vec![
        route("GET", "/worlds", "/worlds").returns(200, |list| {
            list.as_array().is_some_and(|list| list.len() == 1)
                && list[0]["name"] == "village"
                && list[0]["agents"] == 2
                && list[0]["messages"] == 1
                && list[0]["open"] == false
        }),
        route("POST", "/worlds", "/worlds")
            .body(json!({ "name": "town", "file": null }))
            .returns(201, |world| {
                world["name"] == "town"
                    && world["open"] == true
                    && world["paused"] == true
                    && world["agents"][1]["name"] == "Ben"
                    && world["rooms"][0]["billboard"] == "The garden"
            })
            .changes("/worlds", |list| list[0]["name"] == "town" && list[0]["open"] == true)
            .refuses_body(json!({ "name": "village" }), 409, "village")
            .refuses_body(json!({ "name": " town" }), 400, "name: a world's name has 1 to 60 characters")
            .refuses_body(json!({ "name": "\u{202e}town" }), 400, "name: a world's name has")
            .refuses_body(json!({ "name": "world:town" }), 400, "name: a world's name has")
            .refuses_body(json!({ "name": "new", "file": "{" }), 422, "reading the world")
            .refuses_body(file(json!({ "agents": [] })), 400, "agents")
            .refuses_body(file(json!({ "agents": [{ "name": "Ada", "interval": 99 }] })), 400, "interval")
            .refuses_body(
                file(json!({ "agents": [{ "name": "Ada" }], "models": [{ "name": "m", "at": "http://elsewhere" }] })),
                400,
                "http://elsewhere",
            )
            .refuses_body(json!({ "name": "new", "size": 3 }), 400, "size"),
        route("GET", "/worlds/{world}", "/worlds/village")
            .returns(200, |world| {
                world["open"] == false
                    && world["runs_elsewhere"] == false
                    && world["agents"][0]["name"] == "Ada"
                    && world["agents"][0]["kind"] == "persona"
                    && world["agents"][1]["kind"] == "bot"
                    && world["rooms"][0]["members"][1]["name"] == "Ben"
                    && world["rooms"][0]["keys"] == json!(["rose"])
                    && world["rooms"][0]["last_message"] == 1
            })
            .refuses("/worlds/nowhere", none(), 404, "there is no world 'nowhere'"),
        route("DELETE", "/worlds/{world}", "/worlds/village")
            .returns(204, Value::is_null)
            .changes("/worlds", |list| *list == json!([]))
            .refuses("/worlds/nowhere", none(), 404, "there is no world 'nowhere'"),
        route("GET", "/worlds/{world}/rooms/{room}/messages", "/worlds/village/rooms/1/messages?before=2")
            .returns(200, |messages| {
                messages.as_array().is_some_and(|list| list.len() == 1)
                    && messages[0]["name"] == "Ada"
                    && messages[0]["by"] == 1
                    && messages[0]["text"] == "The roses are out."
                    && messages[0]["reactions"] == json!({})
            })
            .refuses("/worlds/nowhere/rooms/1/messages", none(), 404, "there is no world 'nowhere'")
            .refuses("/worlds/village/rooms/99/messages", none(), 404, "there is no room 99")
            .refuses("/worlds/village/rooms/hall/messages", none(), 400, "hall")
            .refuses("/worlds/village/rooms/1/messages?before=x", none(), 400, "before"),
        route("GET", "/worlds/{world}/agents/{agent}/hud", "/worlds/village/agents/2/hud?format=toon")
            .returns(200, |mind| {
                mind["own_format"] == "json"
                    && mind["knowledge"] == json!({ "sky": "grey" })
                    && mind["hud"]["format"] == "toon"
                    && mind["hud"]["text"].as_str().is_some_and(|text| text.contains("The roses are out."))
                    && mind["hud"]["tokens"] == mind["tokens_by_format"]["toon"]
                    && mind["error"].is_null()
            })
            .refuses("/worlds/nowhere/agents/1/hud", none(), 404, "there is no world 'nowhere'")
            .refuses("/worlds/village/agents/99/hud", none(), 404, "there is no agent 99")
            .refuses("/worlds/village/agents/Ada/hud", none(), 400, "Ada")
            .refuses("/worlds/village/agents/1/hud?format=xml", none(), 400, "there is no format 'xml'"),
        route("GET", "/worlds/{world}/telemetry", "/worlds/village/telemetry?agent=1&limit=10")
            .returns(200, |telemetry| *telemetry == json!({ "heartbeats": [], "formats": {} }))
            .refuses("/worlds/nowhere/telemetry", none(), 404, "there is no world 'nowhere'")
            .refuses("/worlds/village/telemetry?limit=0", none(), 400, "limit")
            .refuses("/worlds/village/telemetry?agent=Ada", none(), 400, "agent"),
        route("POST", "/worlds/{world}/commands", "/worlds/village/commands")
            .body(say(1))
            .returns(200, |world| world["open"] == true && world["rooms"][0]["last_message"] == 3)
            .changes("/worlds/village/rooms/1/messages", |messages| {
                messages.as_array().is_some_and(|list| list.iter().any(|m| m["text"] == "Good morning." && m["by"] == 0))
            })
            .refuses("/worlds/nowhere/commands", say(1), 404, "there is no world 'nowhere'")
            .refuses_body(say(99), 422, "99")
            .refuses_body(json!({ "command": "say", "room": 1, "message": " " }), 422, "message")
            .refuses_body(json!({ "command": "wake", "agent": 99 }), 422, "99")
            .refuses_body(json!({ "command": "react", "message": 99, "reaction": "heart" }), 422, "message 99")
            .refuses_body(json!({ "command": "fly" }), 400, "fly")
            .refuses_body(json!({ "wish": "wake", "agent": 1 }), 400, "wish")
            .refuses_body(json!({ "agent": 1 }), 400, "command"),
        route("PUT", "/worlds/{world}/clock", "/worlds/village/clock")
            .body(json!({ "paused": true, "speed": 2.5, "step": false }))
            .returns(200, |world| world["paused"] == true && world["speed"] == 2.5)
            .changes("/worlds/village", |world| world["speed"] == 2.5)
            .refuses("/worlds/nowhere/clock", json!({ "paused": true }), 404, "there is no world 'nowhere'")
            .refuses_body(json!({ "speed": 0 }), 400, "speed")
            .refuses_body(json!({ "speed": 101 }), 400, "speed")
            .refuses_body(json!({ "hour": 3 }), 400, "hour"),
    ]
}

async fn send(prepared: &PreparedServer, method: &str, url: &str, body: &Value) -> (u16, Value) {
    let url = url.replace("{capture}", &prepared.capture);
    prepared.fake.halo_api(method, &url, Some(body).filter(|body| !body.is_null())).await
}

/// Waits until no answer is generated.
async fn wait_for_answer(fake: &FakeServer) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while fake.halo_api("GET", "/conversations/main", None).await.1["running"].is_object() {
        assert!(Instant::now() < deadline, "the answer does not end");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Sends the success case to a new server. Returns that server, the status and the body.
async fn run_case(case: &RouteCase) -> (PreparedServer, u16, Value) {
    let prepared = prepared_server();
    for (method, url, body) in &case.before {
        let (status, result) = send(&prepared, method, url, body).await;
        assert!((200..300).contains(&status), "{method} {url}: {status} {result}");
        wait_for_answer(&prepared.fake).await;
    }
    let (status, result) = send(&prepared, case.method, case.url, &case.body).await;
    (prepared, status, result)
}

#[tokio::test]
async fn halo_routes_succeed_with_their_content() {
    for case in route_cases() {
        let name = format!("{} {}", case.method, case.url);
        let (prepared, status, result) = run_case(&case).await;
        assert_eq!(status, case.status, "{name}: {result}");
        assert!((case.check)(&result), "{name}: {result}");
        let Some((url, check)) = case.effect else { continue };
        // The answer to a message comes later.
        let deadline = Instant::now() + Duration::from_secs(if status == 202 { 10 } else { 0 });
        loop {
            let (status, shown) = send(&prepared, "GET", url, &Value::Null).await;
            if status == 200 && check(&shown) {
                break;
            }
            assert!(Instant::now() < deadline, "{url} after {name}: {status} {shown}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// What a refused request must not change.
async fn stored_state(prepared: &PreparedServer) -> Value {
    let mut state = Vec::new();
    for url in [
        "/conversations",
        "/conversations/main/deleted",
        "/conversations/main/memories",
        "/conversations/main/notes",
        "/conversations/main/forget",
        "/conversations/main/variants",
        "/worlds/village/rooms/1/messages",
        "/settings",
    ] {
        let (status, shown) = send(prepared, "GET", url, &Value::Null).await;
        assert_eq!(status, 200, "{url}: {shown}");
        state.push(shown);
    }
    state.into()
}

#[tokio::test]
async fn halo_routes_refuse_invalid_requests_and_change_nothing() {
    for case in route_cases().iter().filter(|case| !case.refusals.is_empty()) {
        let prepared = prepared_server();
        let before = stored_state(&prepared).await;
        for RefusedCase { url, body, status, names } in &case.refusals {
            let (actual, result) = send(&prepared, case.method, url, body).await;
            let request = format!("{} {url} {:.200}", case.method, body.to_string());
            assert_eq!(actual, *status, "{request}: {result}");
            let message = result["error"].as_str().unwrap_or_default();
            assert!(message.contains(names), "{request}: {names} is not in {result}");
        }
        let after = stored_state(&prepared).await;
        assert_eq!(before, after, "{} {} changed something", case.method, case.template);
    }
}

/// A message and a carried memory create the conversation, and where nothing runs there is nothing to stop. The options and
/// the model of a conversation can be set before its first message.
const ACCEPTS_UNKNOWN_CONVERSATION: [&str; 5] = [
    "/conversations/{name}/messages",
    "/conversations/{name}/memories/carry",
    "/conversations/{name}/stop",
    "/conversations/{name}/options",
    "/conversations/{name}/model",
];

/// Two memories that contradict each other are written by a model; the tests of the engine have them.
const WITHOUT_SUCCESS: [(&str, &str); 1] = [("POST", "/conversations/{name}/memories/conflicts")];

#[tokio::test]
async fn halo_routes_report_unknown_conversations() {
    let prepared = prepared_server();
    let cases = route_cases();
    let of_conversation = cases.iter().filter(|case| case.template.starts_with("/conversations/{name}"));
    for case in of_conversation.filter(|case| !ACCEPTS_UNKNOWN_CONVERSATION.contains(&case.template)) {
        let url = case.url.replace("/conversations/main", "/conversations/no%20where");
        let (status, result) = send(&prepared, case.method, &url, &case.body).await;
        assert_eq!(status, 404, "{} {url}: {result}", case.method);
        let message = result["error"].as_str().unwrap_or_default();
        // An undo id belongs to one conversation, so it is looked up first.
        assert!(message.contains("no where"), "{} {url}: {result}", case.method);
    }
    let (_, list) = send(&prepared, "GET", "/conversations", &Value::Null).await;
    assert_eq!(list.as_array().map(Vec::len), Some(1), "no request created a conversation: {list}");
}

#[tokio::test]
async fn halo_routes_reject_malformed_bodies() {
    let prepared = prepared_server();
    let document = openapi_document(&prepared.fake).await;
    for case in route_cases().iter().filter(|case| case.body.is_object()) {
        let path = format!("{PREFIX}{}", case.url);
        let name = format!("{} {path}", case.method);
        for body in ["{", "", "7", "{} {}", "\u{0}"] {
            let response = prepared.fake.request(case.method, &path, &[], body).await;
            assert_eq!(response.status, 400, "{name} {body:?}: {}", response.text());
            let message = response.json()["error"].as_str().unwrap_or_default().to_owned();
            assert!(message.starts_with("invalid JSON body"), "{name} {body:?}: {message}");
        }
        let schema = &operation(&document, case)["requestBody"]["content"]["application/json"]["schema"];
        let schema = resolve(&document, schema);
        let reject = async |body: &Value, field: &str| {
            let (status, result) = send(&prepared, case.method, case.url, body).await;
            assert_eq!(status, 400, "{name} {body}: {result}");
            let message = result["error"].as_str().unwrap_or_default();
            // The commands of a world are an enum, whose fields serde does not name.
            let is_named = message.contains(field) || case.template == "/worlds/{world}/commands";
            assert!(is_named, "{name} {body}: {field} is not named in {message}");
        };
        for field in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            let mut body = case.body.clone();
            body.as_object_mut().and_then(|fields| fields.remove(field));
            reject(&body, field).await;
        }
        for (field, _) in case.body.as_object().into_iter().flatten() {
            let mut body = case.body.clone();
            body[field] = json!({ "wrong": "type" });
            reject(&body, field).await;
        }
    }
}

#[tokio::test]
async fn halo_routes_reject_large_bodies() {
    let prepared = prepared_server_with(ServerLimits { max_body_bytes: 1000, ..ServerLimits::default() });
    for case in route_cases().iter().filter(|case| case.body.is_object()) {
        let path = format!("{PREFIX}{}", case.url);
        let response = prepared.fake.request(case.method, &path, &[], " ".repeat(1001)).await;
        assert_eq!(response.status, 413, "{} {path}: {}", case.method, response.text());
        let message = response.json()["error"].as_str().unwrap_or_default().to_owned();
        assert!(message.contains("the request body cannot be read"), "{message}");
    }
}

#[tokio::test]
async fn halo_routes_reject_other_methods() {
    let prepared = prepared_server();
    let cases = route_cases();
    for case in &cases {
        let known: BTreeSet<&str> =
            cases.iter().filter(|other| other.template == case.template).map(|other| other.method).collect();
        for method in
            ["GET", "POST", "PUT", "DELETE", "PATCH"].iter().filter(|method| !known.contains(*method))
        {
            let (status, result) = send(&prepared, method, case.url, &Value::Null).await;
            assert_eq!(status, 405, "{method} {}: {result}", case.url);
            let message = result["error"].as_str().unwrap_or_default();
            assert!(message.ends_with(&format!("does not accept {method}")), "{message}");
        }
    }
    for path in ["/nothing", "/conversations/main/nothing", "/worlds/village/rooms/1"] {
        let (status, result) = send(&prepared, "GET", path, &Value::Null).await;
        assert_eq!(status, 404, "{path}: {result}");
        assert!(result["error"].as_str().is_some_and(|message| message.contains(path)), "{result}");
    }
}

async fn openapi_document(fake: &FakeServer) -> Value {
    let response = fake.get("/api/halo/openapi.json").await;
    assert_eq!((response.status, response.header("content-type")), (200, "application/json"));
    response.json()
}

fn operation<'a>(document: &'a Value, case: &RouteCase) -> &'a Value {
    &document["paths"][format!("{PREFIX}{}", case.template)][case.method.to_lowercase()]
}

fn resolve<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str().and_then(|reference| reference.strip_prefix('#')) {
        Some(pointer) => {
            document.pointer(pointer).unwrap_or_else(|| panic!("{pointer} is not in the document"))
        }
        None => schema,
    }
}

/// A new route needs a case here, and a route that was removed is removed from the document.
#[tokio::test]
async fn openapi_lists_exactly_the_tested_routes() {
    let document = openapi_document(&FakeServer::in_memory()).await;
    let mut documented = BTreeSet::new();
    for (path, operations) in document["paths"].as_object().expect("paths") {
        for method in operations.as_object().expect("operations").keys() {
            documented.insert(format!("{} {path}", method.to_uppercase()));
        }
    }
    let tested: Vec<String> =
        route_cases().iter().map(|case| format!("{} {PREFIX}{}", case.method, case.template)).collect();
    let set: BTreeSet<String> = tested.iter().cloned().collect();
    assert_eq!(documented, set);
    assert_eq!(tested.len(), set.len(), "a route has two cases");
}

#[tokio::test]
async fn openapi_documents_each_status_and_response() {
    let document = openapi_document(&FakeServer::in_memory()).await;
    for case in &route_cases() {
        let (name, responses) =
            (format!("{} {}", case.method, case.template), &operation(&document, case)["responses"]);
        let statuses = case.refusals.iter().map(|refusal| refusal.status).chain([case.status]);
        for status in statuses {
            assert!(
                responses[status.to_string()].is_object(),
                "{name} returns {status}, which is not documented"
            );
        }
        if WITHOUT_SUCCESS.contains(&(case.method, case.template)) {
            continue;
        }
        let documented = responses.as_object().into_iter().flatten().map(|(status, _)| status);
        let successes: Vec<&String> = documented.filter(|status| status.starts_with('2')).collect();
        assert!(successes.contains(&&case.status.to_string()), "{name}: {successes:?}");
        let (_, _, result) = run_case(case).await;
        let content = &responses[case.status.to_string()]["content"];
        match content["application/json"]["schema"].as_object() {
            Some(_) => {
                let schema = &content["application/json"]["schema"];
                if let Err(e) = check_schema(&document, schema, &result, "body") {
                    panic!("{name}: {e} in {result}");
                }
            }
            None => assert!(result.is_null(), "{name} returns a body that is not documented: {result}"),
        }
    }
}

/// Checks a value by a schema; the error says where it differs.
fn check_schema(document: &Value, schema: &Value, value: &Value, path: &str) -> Result<(), String> {
    let schema = resolve(document, schema);
    for key in ["oneOf", "anyOf"] {
        if let Some(options) = schema[key].as_array() {
            let results = options.iter().map(|option| check_schema(document, option, value, path));
            let errors: Vec<String> = results.filter_map(Result::err).collect();
            return if errors.len() < options.len() { Ok(()) } else { Err(errors.join("; ")) };
        }
    }
    if let Some(parts) = schema["allOf"].as_array() {
        // Each part describes some of the fields.
        let fields: Vec<(&String, &Value)> = parts
            .iter()
            .filter_map(|part| resolve(document, part)["properties"].as_object())
            .flatten()
            .collect();
        for (field, part) in value.as_object().into_iter().flatten() {
            let property = fields.iter().find(|(name, _)| *name == field);
            let (_, property) = property.ok_or_else(|| format!("{path}.{field} is not documented"))?;
            check_schema(document, property, part, &format!("{path}.{field}"))?;
        }
        return Ok(());
    }
    let has_type = |name: &Value| match name.as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        other => panic!("{other:?} is no type"),
    };
    let matches = match &schema["type"] {
        Value::Null => true,
        Value::Array(names) => names.iter().any(has_type),
        name => has_type(name),
    };
    if !matches {
        return Err(format!("{path} is {value}, not {}", schema["type"]));
    }
    for field in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if value.get(field).is_none() {
            return Err(format!("{path}.{field} is missing"));
        }
    }
    for (field, part) in value.as_object().into_iter().flatten() {
        let path = format!("{path}.{field}");
        match (&schema["properties"][field], &schema["additionalProperties"]) {
            (Value::Null, Value::Null) if schema["properties"].is_object() => {
                return Err(format!("{path} is not documented"));
            }
            (Value::Null, other) if other.is_object() => check_schema(document, other, part, &path)?,
            (Value::Null, _) => {}
            (property, _) => check_schema(document, property, part, &path)?,
        }
    }
    for (n, item) in value.as_array().into_iter().flatten().enumerate() {
        let tuple = &schema["prefixItems"][n];
        let schema = if tuple.is_object() { tuple } else { &schema["items"] };
        if schema.is_object() {
            check_schema(document, schema, item, &format!("{path}[{n}]"))?;
        }
    }
    Ok(())
}

/// A generated client sends parameters where the document says.
#[tokio::test]
async fn openapi_places_parameters_in_path_or_query() {
    let document = openapi_document(&FakeServer::in_memory()).await;
    for case in &route_cases() {
        let parameters = operation(&document, case)["parameters"].as_array().cloned().unwrap_or_default();
        let in_path: BTreeSet<&str> =
            case.template.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')).collect();
        let names_in = |place: &str| -> BTreeSet<&str> {
            let placed = parameters.iter().filter(|parameter| parameter["in"] == place);
            placed.filter_map(|parameter| parameter["name"].as_str()).collect()
        };
        let name = format!("{} {}", case.method, case.template);
        assert_eq!(names_in("path"), in_path, "{name}");
        assert_eq!(names_in("path").len() + names_in("query").len(), parameters.len(), "{name}");
        let query = case.url.split_once('?').map_or("", |(_, query)| query);
        for sent in query.split('&').filter_map(|pair| pair.split_once('=')) {
            assert!(names_in("query").contains(sent.0), "{name}: {} is not documented", sent.0);
        }
        for parameter in parameters.iter().filter(|parameter| parameter["in"] == "query") {
            // All others have a default.
            let required = [("/search", "q"), ("POST /import", "file_name")];
            let is_required =
                required.iter().any(|(route, known)| name.ends_with(route) && parameter["name"] == *known);
            assert_eq!(parameter["required"] == true, is_required, "{name}: {parameter}");
        }
    }
}
