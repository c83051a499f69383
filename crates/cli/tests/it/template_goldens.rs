//! Chats with functions as Halo writes them, compared with the chat templates themselves, which jinja2 has rendered
//! (`scripts/template-goldens`).

use halo_core::model::ChatTemplate;
use halo_core::token::Role;
use halo_core::tool_call::{FunctionCall, MessagePart, ToolDefinition};
use halo_engine::chat_format::{ChatFormatter, FramedText, SpeakerNames};
use halo_llama::chat_template::infer_template;
use serde_json::Value;

fn folder() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates")
}

fn tools(golden: &Value) -> Vec<ToolDefinition> {
    let tool = |tool: &Value| ToolDefinition {
        name: tool["function"]["name"].as_str().expect("a name").to_owned(),
        function: tool["function"].to_string(),
        parameters: tool["function"]["parameters"].to_string(),
    };
    golden["tools"].as_array().into_iter().flatten().map(tool).collect()
}

/// The chat as the engine and the server write it.
fn render(template: ChatTemplate, golden: &Value) -> String {
    let messages = golden["messages"].as_array().expect("messages");
    let text = |message: &Value| message["content"].as_str().unwrap_or_default().to_owned();
    let system_prompt = messages.first().filter(|first| first["role"] == "system").map(text);
    let format = ChatFormatter {
        template,
        system_prompt: system_prompt.clone().unwrap_or_default(),
        show_dates: false,
        names: SpeakerNames::default(),
    };
    let mut out: String = format.preamble_with_tools(&tools(golden)).iter().map(FramedText::text).collect();
    let mut before = None;
    for message in &messages[usize::from(system_prompt.is_some())..] {
        let role = match message["role"].as_str() {
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            _ => Role::Tool,
        };
        out.push_str(&format.turn_header(role, before, None).text());
        let call = |call: &Value| FunctionCall {
            name: call["function"]["name"].as_str().expect("a name").to_owned(),
            // As Python writes it.
            arguments: halo_core::tool_call::space_json(&call["function"]["arguments"].to_string()),
        };
        let calls: Vec<FunctionCall> =
            message["tool_calls"].as_array().into_iter().flatten().map(call).collect();
        for part in format.template.tools.call.render(&text(message), &calls) {
            match part {
                MessagePart::Frame(text) | MessagePart::Content(text) => out.push_str(&text),
            }
        }
        before = Some(role);
    }
    out.push_str(&format.turn_header(Role::Assistant, before, None).text());
    out
}

/// What Halo writes in another way on purpose: no ids of calls, results of Llama without quotes, and the end of a result of Hermes is the
/// same everywhere (its template has a line break less at the end of a chat).
fn adapt(template: &str, text: &str) -> String {
    let mut text = text.to_owned();
    match template {
        "mistral" => {
            for id in ["callNo001", "callNo002"] {
                for key in ["id", "call_id"] {
                    text = text.replace(&format!(", \"{key}\": \"{id}\""), "");
                }
            }
        }
        "llama" => text = text.replace("\"sunny\"", "sunny"),
        "hermes" => {
            let end = "<|im_end|><|im_start|>";
            text = text.replace(&format!("</tool_response>{end}"), &format!("</tool_response>\n{end}"));
        }
        _ => {}
    }
    text
}

/// The chat behind the system prompt and the functions.
fn without_preamble<'a>(text: &'a str, golden: &Value) -> &'a str {
    let messages = golden["messages"].as_array().expect("messages");
    let question = messages.iter().find(|message| message["role"] == "user").expect("a question");
    let at = text.find(question["content"].as_str().expect("a text")).expect("the question");
    &text[at..]
}

/// `generic` are the families whose functions are no JSON: they get the general instructions, and only the chat behind them is compared.
fn check_goldens(folder: &std::path::Path, least: usize, generic: &[&str]) {
    let goldens = std::fs::read_to_string(folder.join("goldens.json")).expect("the goldens");
    let goldens: Value = serde_json::from_str(&goldens).expect("JSON");
    let goldens = goldens.as_array().expect("a list");
    assert!(goldens.len() >= least, "{}", goldens.len());
    for golden in goldens {
        let field = |name: &str| golden[name].as_str().expect("a text").to_owned();
        let name = field("template");
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).expect("a template");
        let template = infer_template(&source, &field("bos"), &[field("eos")]).expect("it can be used");
        let family = field("family");
        let is_generic = generic.contains(&family.as_str());
        let has_section = golden.get("tools").is_some() && !is_generic;
        assert_eq!(template.tools.section.is_some(), has_section, "{name}");
        let (written, expected) = (render(template, golden), adapt(&family, &field("text")));
        match is_generic {
            false => assert_eq!(written, expected, "{name}"),
            true => {
                let pair = [&written, &expected].map(|text| without_preamble(text, golden));
                assert_eq!(pair[0], pair[1], "{name}");
            }
        }
    }
}

#[test]
fn chats_with_functions_are_written_as_their_templates_write_them() {
    check_goldens(&folder(), 15, &[]);
}

/// The templates of the model's own repositories, which are not in this one.
#[test]
#[ignore = "scripts/published-templates fetches the templates and runs it"]
fn chats_with_functions_are_written_as_published_templates_write_them() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/templates");
    check_goldens(&folder, 15, &["hermes"]);
}
