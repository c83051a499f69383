//! Prompts that a person can choose in a client.

use rmcp::model::{GetPromptResult, JsonObject, Prompt, PromptArgument, PromptMessage, Role};
use serde_json::Value;

struct McpPrompt {
    name: &'static str,
    description: &'static str,
    /// Its one required argument, and what it is.
    argument: (&'static str, &'static str),
    /// `{}` stands for the argument.
    text: &'static str,
}

const PROMPTS: [McpPrompt; 2] = [
    McpPrompt {
        name: "answer_from_memory",
        description: "Answers a question with what was said before",
        argument: ("question", "The question"),
        text: "Answer this question: {}\n\nFirst search with the tool recall_everywhere. Quote what you use, with its date. If \
               nothing fits, say so.",
    },
    McpPrompt {
        name: "remember_this",
        description: "Stores a text so that it can be recalled later",
        argument: ("text", "The text"),
        text: "Store the following text with the tool remember, word for word, and say that it is stored:\n\n{}",
    },
];

pub(super) fn list() -> Vec<Prompt> {
    let prompt = |prompt: &McpPrompt| {
        let (name, description) = prompt.argument;
        let argument = PromptArgument::new(name).with_description(description).with_required(true);
        Prompt::new(prompt.name, Some(prompt.description), Some(vec![argument]))
    };
    PROMPTS.iter().map(prompt).collect()
}

/// A prompt with its argument; the error says what is wrong.
pub(super) fn get(name: &str, arguments: &JsonObject) -> Result<GetPromptResult, String> {
    let Some(prompt) = PROMPTS.iter().find(|prompt| prompt.name == name) else {
        let names = PROMPTS.map(|prompt| prompt.name).join(", ");
        return Err(format!("there is no prompt '{name}'; use one of {names}"));
    };
    let (argument, _) = prompt.argument;
    if let Some(unknown) = arguments.keys().find(|key| *key != argument) {
        return Err(format!("{name} has no argument '{unknown}'; it has {argument}"));
    }
    match arguments.get(argument).and_then(Value::as_str).filter(|text| !text.trim().is_empty()) {
        Some(value) => {
            let message = PromptMessage::new_text(Role::User, prompt.text.replace("{}", value));
            Ok(GetPromptResult::new(vec![message]).with_description(prompt.description))
        }
        None => Err(format!("{name} needs the argument '{argument}', a text")),
    }
}
