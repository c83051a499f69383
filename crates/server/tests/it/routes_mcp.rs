//! The Model Context Protocol: tools, resources and prompts.

use crate::chat::chat_body;
use crate::fake::FakeServer;
use halo_server::ServerLimits;
use serde_json::{Value, json};

const MCP_HEADERS: [(&str, &str); 2] =
    [("content-type", "application/json"), ("accept", "application/json, text/event-stream")];

async fn mcp(fake: &FakeServer, method: &str, params: Value) -> Value {
    let body = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    let response = fake.request("POST", "/mcp", &MCP_HEADERS, body.to_string()).await;
    assert_eq!(response.status, 200, "{method}: {}", response.text());
    response.json()
}

/// Whether a tool failed, and its text.
async fn call_tool(fake: &FakeServer, name: &str, arguments: Value) -> (bool, String) {
    let response = mcp(fake, "tools/call", json!({ "name": name, "arguments": arguments })).await;
    let result = &response["result"];
    let text = result["content"][0]["text"].as_str();
    (result["isError"] == true, text.unwrap_or_else(|| panic!("{response}")).to_owned())
}

#[tokio::test]
async fn mcp_lists_its_tools() {
    let fake = FakeServer::in_memory();
    let client = json!({ "name": "test", "version": "1" });
    let params = json!({ "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client });
    let hello = mcp(&fake, "initialize", params).await;
    assert_eq!(hello["result"]["serverInfo"]["name"], "halo", "{hello}");
    let list = mcp(&fake, "tools/list", json!({})).await;
    let tools = list["result"]["tools"].as_array().expect("tools");
    let names: Vec<&str> = tools.iter().filter_map(|tool| tool["name"].as_str()).collect();
    assert_eq!(
        names,
        [
            "recall",
            "recall_everywhere",
            "list_conversations",
            "read_chunk",
            "remember",
            "pin",
            "resurrect",
            "notes"
        ]
    );
    assert_eq!(tools[0]["inputSchema"]["required"], json!(["query"]));
    for tool in tools {
        assert_eq!(tool["inputSchema"]["additionalProperties"], json!(false), "{tool}");
        assert_eq!(tool["outputSchema"]["type"], "object", "{tool}");
    }
    let hints = |tool: &Value| {
        ["readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint"]
            .map(|hint| tool["annotations"][hint] == true)
    };
    assert_eq!(
        tools.iter().map(hints).collect::<Vec<_>>(),
        [
            [true, false, true, false],
            [true, false, true, false],
            [true, false, true, false],
            [true, false, true, false],
            [false, false, false, false],
            [false, false, true, false],
            [false, false, true, false],
            // It replaces the notes that were there.
            [false, true, true, false],
        ]
    );
}

/// Checks a value against the parts of a schema that results have: type, properties and items. No property may be undescribed.
fn check_schema(place: &str, schema: &Value, value: &Value) {
    let kinds = schema["type"].as_array().cloned().unwrap_or_else(|| vec![schema["type"].clone()]);
    let is_kind = |kind: &Value| match kind.as_str() {
        Some("string") => value.is_string(),
        Some("null") => value.is_null(),
        Some("integer") => value.is_u64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => panic!("{place}: {kind}"),
    };
    assert!(kinds.iter().any(is_kind), "{place}: {value} is not of {kinds:?}");
    for (n, item) in value.as_array().into_iter().flatten().enumerate() {
        assert!(schema["items"].is_object(), "{place} has no items");
        check_schema(&format!("{place}[{n}]"), &schema["items"], item);
    }
    let Some(object) = value.as_object() else { return };
    for name in schema["required"].as_array().expect("a list") {
        assert!(object.contains_key(name.as_str().expect("a name")), "{place} has no {name}");
    }
    for (name, value) in object {
        let property = &schema["properties"][name];
        assert!(property["description"].is_string(), "{place}.{name} is not described");
        check_schema(&format!("{place}.{name}"), property, value);
    }
}

#[tokio::test]
async fn mcp_results_follow_their_schemas() {
    let fake = FakeServer::in_memory();
    let list = mcp(&fake, "tools/list", json!({})).await;
    let tools = list["result"]["tools"].as_array().expect("tools").clone();
    let text = "The key is under the pot.";
    let calls = [
        ("remember", json!({ "text": text })),
        ("recall", json!({ "query": "key" })),
        ("recall_everywhere", json!({ "query": "key" })),
        ("list_conversations", json!({})),
        ("read_chunk", json!({ "chunk": "u0.0" })),
        ("pin", json!({ "chunk": "u0.0" })),
        ("notes", json!({ "text": "{}" })),
    ];
    for (name, arguments) in calls {
        let tool = tools.iter().find(|tool| tool["name"] == name).expect("a tool");
        let response = mcp(&fake, "tools/call", json!({ "name": name, "arguments": arguments })).await;
        let result = &response["result"]["structuredContent"];
        check_schema(name, &tool["outputSchema"], result);
        if name.starts_with("recall") {
            assert_eq!(
                (&result["hits"][0]["text"], result["hits"].as_array().map(Vec::len)),
                (&json!(text), Some(1))
            );
            assert!(result["hits"][0]["relevance"].is_number(), "{result}");
        }
    }
    let resurrect = tools.iter().find(|tool| tool["name"] == "resurrect").expect("a tool");
    assert_eq!(resurrect["outputSchema"]["properties"]["chunks"]["items"], json!({ "type": "string" }));
}

#[tokio::test]
async fn mcp_tools_store_recall_and_edit() {
    let fake = FakeServer::in_memory();
    let (failed, text) = call_tool(&fake, "remember", json!({ "text": "The key is under the pot." })).await;
    assert_eq!((failed, text.as_str()), (false, "kept, in turn 0"));
    let (failed, text) = call_tool(&fake, "recall", json!({ "query": "where is the key", "most": 1 })).await;
    let hits: Value = serde_json::from_str(&text).expect("JSON");
    let hit = &hits["hits"][0];
    assert!(!failed && hit["text"] == "The key is under the pot.", "{hits}");
    assert_eq!((&hit["chunk"], &hit["in_window"]), (&json!("u0.0"), &json!(true)));
    assert_eq!((&hit["conversation"], &hit["said_by"]), (&json!("main"), &json!("user")));
    assert!(hit["reason"].as_str().is_some_and(|reason| reason.contains("key")), "{hits}");
    // The clock of the store in memory begins in 1970.
    assert!(hit["when"].as_str().is_some_and(|when| when.starts_with("1970-01-01T00:00:00")), "{hits}");
    assert_eq!(call_tool(&fake, "pin", json!({ "chunk": "u0.0" })).await, (false, "pinned: u0.0".to_owned()));
    let chunk = fake.halo_api("GET", "/conversations/main/chunks/u0.0", None).await.1;
    assert_eq!(chunk["chunk"]["pinned"], true);
    assert_eq!(call_tool(&fake, "notes", json!({})).await, (false, "{}".to_owned()));
    assert_eq!(call_tool(&fake, "notes", json!({ "text": "{\"a\":1}" })).await, (false, "noted".to_owned()));
    assert_eq!(call_tool(&fake, "notes", json!({})).await, (false, "{\"a\":1}".to_owned()));
    let long = json!("x".repeat(300_000)).to_string();
    let (failed, text) = call_tool(&fake, "notes", json!({ "text": long })).await;
    assert!(failed && text.contains("may have 262144 (256 KiB)"), "{text}");
    assert_eq!(call_tool(&fake, "notes", json!({})).await, (false, "{\"a\":1}".to_owned()));
    fake.chat(&chat_body(&["u Hello"]), Some("other")).await;
    let edit = json!({ "edit": "prune", "chunks": ["u0.0"] });
    fake.halo_api("POST", "/conversations/other/edits", Some(&edit)).await;
    let (failed, text) =
        call_tool(&fake, "resurrect", json!({ "chunk": "u0.0", "conversation": "other" })).await;
    assert!(!failed && text.starts_with("resurrected: u0.0"), "{text}");
}

#[tokio::test]
async fn mcp_reports_errors() {
    let fake = FakeServer::with_limits(ServerLimits { max_body_bytes: 1000, ..ServerLimits::default() });
    call_tool(&fake, "remember", json!({ "text": "Something." })).await;
    for (tool, arguments, names) in [
        ("recall", json!({ "query": " " }), "the query is empty"),
        ("recall", json!({ "query": "a", "conversation": "nowhere" }), "nowhere"),
        ("remember", json!({ "text": " " }), "the text is empty"),
        ("recall_everywhere", json!({ "query": "" }), "the query is empty"),
        ("read_chunk", json!({ "chunk": "x" }), "x"),
        ("read_chunk", json!({ "chunk": "u99.0" }), "there is no paragraph u99.0"),
        ("pin", json!({ "chunk": "x" }), "x"),
        ("pin", json!({ "chunk": "u99.0" }), "u99.0"),
        ("resurrect", json!({ "chunk": "u0.0" }), "cannot resurrect u0.0"),
        ("notes", json!({ "text": "{" }), "the notes are not valid JSON"),
        ("notes", json!({ "conversation": "nowhere" }), "nowhere"),
    ] {
        let (failed, text) = call_tool(&fake, tool, arguments.clone()).await;
        assert!(failed && text.contains(names), "{tool} {arguments}: {text}");
    }
    for (tool, arguments, names) in [
        ("fly", json!({}), "there is no tool 'fly'"),
        ("recall", json!({}), "query"),
        ("pin", json!({ "chunk": 7 }), "chunk"),
        ("recall", json!({ "query": "a", "conversation": 7 }), "'conversation' must be a string"),
        ("recall", json!({ "query": "a", "most": 1000 }), "'most' must be a whole number from 1 to 50"),
        ("recall", json!({ "query": "a", "limit": 5 }), "no argument 'limit'"),
        ("notes", json!({ "text": { "a": 2 } }), "'text' must be a string"),
    ] {
        let response = mcp(&fake, "tools/call", json!({ "name": tool, "arguments": arguments })).await;
        assert_eq!(response["error"]["code"], -32602, "{response}");
        assert!(
            response["error"]["message"].as_str().is_some_and(|message| message.contains(names)),
            "{response}"
        );
    }
    let large = fake.request("POST", "/mcp", &MCP_HEADERS, " ".repeat(1001)).await;
    assert_eq!(large.status, 413, "{}", large.text());
    let get = fake.request("GET", "/mcp", &[("accept", "text/event-stream")], "").await;
    assert_eq!(get.status, 405, "{}", get.text());
    let accept = fake.request("POST", "/mcp", &[("content-type", "application/json")], "{}").await;
    assert_eq!(accept.status, 406, "{}", accept.text());
}

/// The text of a tool's result for programs, and the result itself.
async fn structured(fake: &FakeServer, name: &str, arguments: Value) -> Value {
    let response = mcp(fake, "tools/call", json!({ "name": name, "arguments": arguments })).await;
    assert_eq!(response["result"]["isError"], false, "{response}");
    response["result"]["structuredContent"].clone()
}

#[tokio::test]
async fn mcp_results_are_structured() {
    let fake = FakeServer::in_memory();
    let kept = structured(&fake, "remember", json!({ "text": "The key is under the pot." })).await;
    assert_eq!(kept, json!({ "conversation": "main", "turn": 0, "chunks": ["u0.0"] }));
    let tea = json!({ "text": "Tea grows in China.", "conversation": "tea" });
    structured(&fake, "remember", tea).await;
    let pinned = structured(&fake, "pin", json!({ "chunk": "u0.0" })).await;
    assert_eq!(pinned, json!({ "conversation": "main", "chunks": ["u0.0"] }));
    let chunk = structured(&fake, "read_chunk", json!({ "chunk": "u0.0" })).await;
    assert_eq!(
        (&chunk["text"], &chunk["pinned"]),
        (&json!("The key is under the pot."), &json!(true)),
        "{chunk}"
    );
    assert_eq!((&chunk["message"], &chunk["said_by"]), (&json!(["u0.0"]), &json!("user")));
    let list = structured(&fake, "list_conversations", json!({ "most": 1 })).await;
    // The pin changed it last.
    assert_eq!((&list["of"], &list["conversations"][0]["name"]), (&json!(2), &json!("main")), "{list}");
    assert_eq!(list["conversations"].as_array().map(Vec::len), Some(1));
    let found = structured(&fake, "recall_everywhere", json!({ "query": "where does tea grow" })).await;
    assert_eq!(
        (&found["hits"][0]["conversation"], &found["searched"]),
        (&json!("tea"), &json!(2)),
        "{found}"
    );
    let notes = structured(&fake, "notes", json!({ "text": "{}" })).await;
    assert_eq!(notes, json!({ "conversation": "main", "notes": "{}" }));
}

/// Search always ranks every paragraph; those without any relation are no results.
#[tokio::test]
async fn mcp_recall_has_a_floor() {
    let fake = FakeServer::in_memory();
    structured(&fake, "remember", json!({ "text": "The key is under the pot." })).await;
    let nothing = structured(&fake, "recall", json!({ "query": "submarine" })).await;
    assert_eq!(nothing, json!({ "hits": [] }));
}

/// A text that is longer than the context window is cut into chunks, and all of it can be recalled.
#[tokio::test]
async fn mcp_remembers_long_texts() {
    let fake = FakeServer::in_memory();
    let mut text: String = (0..900).map(|n| format!("Line {n} is about tea.\n\n")).collect();
    text.push_str("The harpoon hangs in the shed.");
    let kept = structured(&fake, "remember", json!({ "text": text })).await;
    assert!(kept["chunks"].as_array().is_some_and(|chunks| chunks.len() > 50), "{kept}");
    let found = structured(&fake, "recall", json!({ "query": "harpoon", "most": 1 })).await;
    assert!(found["hits"][0]["text"].as_str().is_some_and(|text| text.contains("harpoon")), "{found}");
}

#[tokio::test]
async fn mcp_conversations_are_resources() {
    let fake = FakeServer::in_memory();
    fake.script_answers(&["In China."]);
    fake.chat(&chat_body(&["u Where does tea grow?"]), Some("Tea & cake")).await;
    let list = mcp(&fake, "resources/list", json!({})).await;
    let resource = &list["result"]["resources"][0];
    assert_eq!(
        (&resource["name"], &resource["mimeType"]),
        (&json!("Tea & cake"), &json!("text/plain")),
        "{list}"
    );
    let uri = "halo://conversation/Tea%20%26%20cake";
    assert_eq!(resource["uri"], uri);
    let read = mcp(&fake, "resources/read", json!({ "uri": uri })).await;
    let contents = &read["result"]["contents"][0];
    assert_eq!(contents["text"], "user: Where does tea grow?\n\nassistant: In China.", "{read}");
    let templates = mcp(&fake, "resources/templates/list", json!({})).await;
    assert_eq!(templates["result"]["resourceTemplates"][0]["uriTemplate"], "halo://conversation/{name}");
    for missing in ["halo://conversation/nowhere", "halo://conversation/%zz", "file:///etc/passwd"] {
        let response = mcp(&fake, "resources/read", json!({ "uri": missing })).await;
        assert_eq!(response["error"]["code"], -32002, "{response}");
    }
}

#[tokio::test]
async fn mcp_has_prompts() {
    let fake = FakeServer::in_memory();
    let list = mcp(&fake, "prompts/list", json!({})).await;
    let prompts = list["result"]["prompts"].as_array().expect("prompts");
    let names: Vec<&str> = prompts.iter().filter_map(|prompt| prompt["name"].as_str()).collect();
    assert_eq!(names, ["answer_from_memory", "remember_this"]);
    let get = async |name: &str, arguments: Value| {
        mcp(&fake, "prompts/get", json!({ "name": name, "arguments": arguments })).await
    };
    let prompt = get("answer_from_memory", json!({ "question": "Where is the key?" })).await;
    let text = prompt["result"]["messages"][0]["content"]["text"].as_str().unwrap_or_default();
    assert!(text.contains("Where is the key?") && text.contains("recall_everywhere"), "{prompt}");
    for (name, arguments, names) in [
        ("fly", json!({}), "there is no prompt 'fly'"),
        ("remember_this", json!({}), "needs the argument 'text'"),
        ("remember_this", json!({ "text": "a", "b": "c" }), "no argument 'b'"),
    ] {
        let response = get(name, arguments).await;
        assert_eq!(response["error"]["code"], -32602, "{response}");
        assert!(response["error"]["message"].as_str().is_some_and(|m| m.contains(names)), "{response}");
    }
}
