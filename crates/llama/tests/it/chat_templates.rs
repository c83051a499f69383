//! Inferred chat templates, compared with whole chats that Python's jinja2 rendered (`tests/templates/render.py`).

use halo_core::model::ChatTemplate;
use halo_core::token::Role;
use halo_llama::chat_template::infer_template;
use serde_json::Value;
use std::path::{Path, PathBuf};

const CHAT: [(Role, &str); 4] = [
    (Role::System, "You are a playwright."),
    (Role::User, "Is there a gun?"),
    (Role::Assistant, "Above the fireplace."),
    (Role::User, "Who fires it?"),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates")
}

/// The template of a family, and what jinja2 rendered with it.
fn load(name: &str) -> (ChatTemplate, Value) {
    let renderings = std::fs::read_to_string(folder().join("renderings.json")).expect("the renderings");
    let mut renderings: Value = serde_json::from_str(&renderings).expect("JSON");
    let rendered = renderings[name].take();
    let source = std::fs::read_to_string(folder().join(format!("{name}.jinja"))).expect("the template");
    let end_tokens = rendered["end_tokens"].as_array().expect("a list");
    let end_tokens: Vec<String> = end_tokens.iter().filter_map(Value::as_str).map(str::to_owned).collect();
    let bos = rendered["bos"].as_str().expect("a text");
    (infer_template(&source, bos, &end_tokens).expect("it can be used"), rendered)
}

/// A chat as Halo writes it into the window, up to where the answer begins.
fn write_chat(template: &ChatTemplate, chat: &[(Role, &str)], answer_header: &str) -> String {
    let mut text = template.start.clone();
    for (role, content) in chat {
        let wrap = template.wrap_for(*role);
        let header = if *role == Role::Assistant { answer_header } else { "" };
        text += &format!("{}{header}{content}{}", wrap.prefix, wrap.suffix);
    }
    text + &template.assistant.prefix
}

#[test]
fn chat_template_writes_chats_as_jinja2_renders_them() {
    for name in ["chatml", "llama3", "mistral", "phi", "deepseek", "qwen3", "gpt_oss", "command_r"] {
        let (template, rendered) = load(name);
        let reasoning = template.reasoning.clone();
        let prompt = reasoning.as_ref().map_or("", |reasoning| reasoning.prompt.as_str());
        // An answer of gpt-oss begins with its channel, which the model writes.
        let answer_header = if name == "gpt_oss" { "<|channel|>final<|message|>" } else { "" };
        let chat = write_chat(&template, &CHAT, answer_header);
        assert_eq!(format!("{chat}{prompt}"), rendered["chat"].as_str().expect("a text"), "{name}");
        if let Some(skip) = reasoning.and_then(|reasoning| reasoning.skip).filter(|_| name != "gpt_oss") {
            assert_eq!(format!("{chat}{skip}"), rendered["without_thinking"], "{name}");
        }
    }
}

/// Templates whose beginning does not depend on a system prompt: a chat without one is written as they render it.
#[test]
fn chat_template_without_system_prompt_is_as_jinja2_renders_it() {
    for name in ["chatml", "mistral", "phi", "deepseek", "qwen3", "command_r", "gemma"] {
        let (template, rendered) = load(name);
        let prompt = template.reasoning.as_ref().map_or("", |reasoning| reasoning.prompt.as_str());
        let chat = write_chat(&template, &CHAT[1..], "");
        assert_eq!(format!("{chat}{prompt}"), rendered["without_system"].as_str().expect("a text"), "{name}");
    }
}

/// Gemma writes the system prompt into the first message of the user. That message may be pruned, so the system prompt is a
/// message of its own, with complete markers.
#[test]
fn chat_template_gives_system_prompt_of_gemma_its_own_message() {
    let (template, _) = load("gemma");
    let turn = |role: &str, text: &str| format!("<start_of_turn>{role}\n{text}<end_of_turn>\n");
    let expected = [
        "<bos>".to_owned(),
        turn("user", CHAT[0].1),
        turn("user", CHAT[1].1),
        turn("model", CHAT[2].1),
        turn("user", CHAT[3].1),
        "<start_of_turn>model\n".to_owned(),
    ];
    assert_eq!(write_chat(&template, &CHAT, ""), expected.concat());
}

#[test]
fn chat_template_knows_reasoning_of_each_family() {
    let reasoning = |name: &str| load(name).0.reasoning;
    for name in ["chatml", "llama3", "gemma", "mistral", "phi", "command_r"] {
        assert_eq!(reasoning(name), None, "{name}");
    }
    let markers = |name: &str| reasoning(name).map(|format| (format.open, format.close, format.prompt));
    let expected =
        |open: &str, close: &str, prompt: &str| Some((open.to_owned(), close.to_owned(), prompt.to_owned()));
    assert_eq!(markers("deepseek"), expected("<think>", "</think>", "<think>\n"));
    assert_eq!(markers("qwen3"), expected("<think>", "</think>", ""));
    let analysis = "<|channel|>analysis<|message|>";
    assert_eq!(markers("gpt_oss"), expected(analysis, "<|end|><|start|>assistant", ""));
}
