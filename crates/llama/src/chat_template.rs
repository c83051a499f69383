//! Infers the prefix and suffix of each role's messages from the Jinja chat template of a GGUF file.
//!
//! A Jinja template renders a whole chat. The context window prunes and resurrects single messages, so the text around
//! one message must be known by itself. The template is rendered once with sentinels as messages; the text between the
//! sentinels is split into the suffix of one message and the prefix of the next.
//!
//! The template is untrusted code: its size, its nesting and its steps are limited. Its memory is not: the worker of
//! `template_runner` limits that.

use crate::tool_template::{infer_tools, prompt_after_result};
use halo_core::model::{ChatTemplate, MessageWrap};
use halo_core::tool_call::{ReasoningFormat, ToolFormat, indent_json, space_json};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use std::collections::BTreeMap;

/// Infers the wraps of all roles. `bos` is the text of the token that every prompt starts with, `end_tokens` the texts of
/// the tokens that end an answer.
pub fn infer_template(source: &str, bos: &str, end_tokens: &[String]) -> Result<ChatTemplate, String> {
    check_limits(source)?;
    let (source, bos, end_tokens) = (source.to_owned(), bos.to_owned(), end_tokens.to_vec());
    // The Jinja parser recurses, and the stack of the calling thread may be small.
    let work = move || infer_checked(&source, &bos, &end_tokens);
    let thread = std::thread::Builder::new().name("halo-template".into()).stack_size(64 << 20).spawn(work);
    let thread = thread.map_err(|error| error.to_string())?;
    thread.join().unwrap_or_else(|_| Err("rendering it panicked".into()))
}

/// Refuses a template that is longer, or has a longer expression, than any published one: the parser would recurse too
/// deeply.
fn check_limits(source: &str) -> Result<(), String> {
    if source.len() > MAX_TEMPLATE_BYTES {
        return Err(format!("it has {} bytes, more than {MAX_TEMPLATE_BYTES}", source.len()));
    }
    let longest = source.split(['{', '}']).map(str::len).max().unwrap_or(0);
    if longest > MAX_TAG_BYTES {
        return Err(format!("an expression in it has {longest} bytes, more than {MAX_TAG_BYTES}"));
    }
    Ok(())
}

const MAX_TEMPLATE_BYTES: usize = 1 << 16;
/// Bytes between two braces.
const MAX_TAG_BYTES: usize = 1 << 13;

fn infer_checked(source: &str, bos: &str, end_tokens: &[String]) -> Result<ChatTemplate, String> {
    let eos = end_tokens.first().map_or("", String::as_str);
    let renderer = ChatRenderer { source, bos, eos };
    let render = |messages: &[(&str, &str)], thinking: Option<bool>| {
        let messages = messages.iter().map(|&(role, content)| context! { role, content }).collect();
        renderer.render(messages, None, thinking).map_err(|e| e.to_string())
    };
    let [user, assistant, next_user, system] = SENTINELS;
    let chat = [("user", user), ("assistant", assistant), ("user", next_user)];
    let chat_with_system = [&[("system", system)], &chat[..]].concat();
    let with_system = render(&chat_with_system, None).ok();
    // Some templates write the system prompt into the last message: then it is written as a user message.
    let with_system = with_system
        .filter(|text| matches!((text.find(system), text.find(user)), (Some(s), Some(u)) if s < u));
    let text = match &with_system {
        Some(text) => text.clone(),
        None => render(&chat, None)?,
    };
    let between = |after: Option<&str>, before: Option<&str>| -> Result<String, String> {
        let start = match after {
            None => 0,
            Some(sentinel) => text.find(sentinel).ok_or("it drops messages")? + sentinel.len(),
        };
        let end = match before {
            None => text.len(),
            Some(sentinel) => text.find(sentinel).ok_or("it drops messages")?,
        };
        text.get(start..end).map(str::to_owned).ok_or_else(|| "it reorders messages".into())
    };
    let head = between(None, Some(if with_system.is_some() { system } else { user }))?;
    let start = if bos.is_empty() || !head.starts_with(bos) { "" } else { bos };
    let head = head[start.len()..].to_owned();
    let (user_suffix, assistant_prefix) =
        split_after_end_token(&between(Some(user), Some(assistant))?, end_tokens);
    let (assistant_suffix, user_prefix) =
        split_after_end_token(&between(Some(assistant), Some(next_user))?, end_tokens);
    // The generation prompt may differ from the prefix of a finished answer; the generation prompt counts.
    let generation_prompt = between(Some(next_user), None)?;
    let assistant_prefix =
        generation_prompt.strip_prefix(user_suffix.as_str()).map_or(assistant_prefix, str::to_owned);
    let (user_suffix, assistant_prefix) = match user_suffix.as_str() {
        "" => split_before_answer(&renderer, &user_prefix, assistant_prefix),
        _ => (user_suffix, assistant_prefix),
    };
    let without_reasoning = || {
        let messages = if with_system.is_some() { chat_with_system.as_slice() } else { &chat };
        let text = render(messages, Some(false)).ok()?;
        let prompt = &text[text.find(next_user)? + next_user.len()..];
        prompt.strip_prefix(user_suffix.as_str()).map(str::to_owned)
    };
    let (assistant_prefix, reasoning) = infer_reasoning(source, assistant_prefix, without_reasoning);
    let system = match &with_system {
        Some(_) => {
            let gap = between(Some(system), Some(user))?;
            match gap.strip_suffix(user_prefix.as_str()) {
                Some(suffix) => MessageWrap { prefix: head, suffix: suffix.to_owned() },
                // The template writes the system prompt into the first message of the user, which may be pruned: it gets a
                // message of its own.
                None => MessageWrap { prefix: user_prefix.clone(), suffix: user_suffix.clone() },
            }
        }
        // The template has no system role: the system prompt is written as a user message.
        None => MessageWrap { prefix: user_prefix.clone(), suffix: user_suffix.clone() },
    };
    let template = ChatTemplate {
        start: start.to_owned(),
        system,
        user: MessageWrap { prefix: user_prefix, suffix: user_suffix },
        assistant: MessageWrap { prefix: assistant_prefix, suffix: assistant_suffix },
        tools: ToolFormat::default(),
        reasoning,
    };
    let template = template.with_generic_results();
    let tools = infer_tools(&renderer, &template, with_system.is_some(), end_tokens);
    Ok(ChatTemplate { tools, ..template })
}

/// Splits the text between a message of the user and its answer where it has no end token. After the result of a function the
/// template writes only what begins an answer, so the rest closes the message of the user: `[/INST]` of Mistral.
fn split_before_answer(
    renderer: &ChatRenderer<'_>,
    user_prefix: &str,
    assistant_prefix: String,
) -> (String, String) {
    let answer = prompt_after_result(renderer, user_prefix);
    match answer.and_then(|answer| Some((assistant_prefix.strip_suffix(answer.as_str())?.to_owned(), answer)))
    {
        Some(parts) => parts,
        None => (String::new(), assistant_prefix),
    }
}

/// The markers of reasoning that published templates use.
const REASONING_MARKERS: [(&str, &str); 4] = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<reasoning>", "</reasoning>"),
];

/// gpt-oss (harmony) writes its reasoning as a message of the channel `analysis`, and then the answer as one of the channel
/// `final`. When the reasoning is pruned with the header of the second message, the answer stands as the template writes it.
const HARMONY_ANALYSIS: &str = "<|channel|>analysis<|message|>";
const HARMONY_FINAL: &str = "<|channel|>final<|message|>";

/// The reasoning of a template that names its markers. A marker at the end of the generation prompt belongs to the
/// reasoning and not to the prefix of answers, because the reasoning of a finished answer is pruned.
fn infer_reasoning(
    source: &str,
    assistant_prefix: String,
    without_reasoning: impl Fn() -> Option<String>,
) -> (String, Option<ReasoningFormat>) {
    if source.contains(HARMONY_ANALYSIS) && source.contains(HARMONY_FINAL) {
        let format = ReasoningFormat {
            open: HARMONY_ANALYSIS.into(),
            close: "<|end|><|start|>assistant".into(),
            prompt: String::new(),
            skip: Some(HARMONY_FINAL.into()),
        };
        return (assistant_prefix, Some(format));
    }
    let named = |(open, close): &&(&str, &str)| source.contains(open) && source.contains(close);
    let Some(&(open, close)) = REASONING_MARKERS.iter().find(named) else { return (assistant_prefix, None) };
    let is_open = assistant_prefix.trim_end().ends_with(open);
    let at = assistant_prefix.rfind(open).filter(|_| is_open).unwrap_or(assistant_prefix.len());
    let (prefix, prompt) = assistant_prefix.split_at(at);
    let skip = without_reasoning().and_then(|text| text.strip_prefix(prefix).map(str::to_owned));
    let skip = skip.filter(|skip| skip.contains(close));
    let format = ReasoningFormat { open: open.into(), close: close.into(), prompt: prompt.to_owned(), skip };
    (prefix.to_owned(), Some(format))
}

/// The messages that are rendered: user, assistant, next user, system. Private-use characters, which no template writes.
const SENTINELS: [&str; 4] =
    ["\u{e000}one\u{e001}", "\u{e000}two\u{e001}", "\u{e000}three\u{e001}", "\u{e000}zero\u{e001}"];

/// Splits the text between two messages after the first end token and its line breaks: suffix of the one, prefix of the
/// other.
pub(crate) fn split_after_end_token(text: &str, end_tokens: &[String]) -> (String, String) {
    let end_tokens = end_tokens.iter().filter(|token| !token.is_empty());
    let end = end_tokens.filter_map(|token| Some(text.find(token.as_str())? + token.len())).min();
    let Some(end) = end else { return (String::new(), text.to_owned()) };
    let breaks = text[end..].len() - text[end..].trim_start_matches('\n').len();
    let (suffix, prefix) = text.split_at(end + breaks);
    (suffix.to_owned(), prefix.to_owned())
}

/// The most steps of one rendering; templates need a few hundred for four messages.
const FUEL: u64 = 100_000;

/// The longest rendered chat; published templates write a few thousand bytes.
const MAX_RENDERED_BYTES: usize = 1 << 17;

/// Renders chats with one template.
pub(crate) struct ChatRenderer<'a> {
    source: &'a str,
    pub bos: &'a str,
    eos: &'a str,
}

impl ChatRenderer<'_> {
    /// Whether the template writes what begins an answer.
    pub fn has_generation_prompt(&self) -> bool {
        self.source.contains("add_generation_prompt")
    }

    /// A chat as the template writes it. `thinking` is the switch that many templates have for reasoning.
    pub fn render(
        &self,
        messages: Vec<Value>,
        tools: Option<Value>,
        thinking: Option<bool>,
    ) -> Result<String, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        // These filters can allocate without limit.
        ["indent", "format", "center"].into_iter().for_each(|filter| environment.remove_filter(filter));
        environment.add_filter("tojson", |value: Value, options: Kwargs| python_json(&value, &options));
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        // The inferred template must not depend on the date.
        environment.add_function("strftime_now", |_format: String| "1 January 2000");
        let mut chat = BTreeMap::from([
            ("messages", Value::from(messages)),
            ("add_generation_prompt", Value::from(true)),
            ("bos_token", Value::from(self.bos)),
            ("eos_token", Value::from(self.eos)),
            // Llama writes functions into the first message of the user otherwise, which may be pruned.
            ("tools_in_user_message", Value::from(false)),
        ]);
        chat.extend(tools.map(|tools| ("tools", tools)));
        chat.extend(thinking.map(|thinking| ("enable_thinking", Value::from(thinking))));
        let text = environment.render_str(self.source, Value::from(chat))?;
        if text.len() > MAX_RENDERED_BYTES {
            let message = format!("it writes {} bytes for a few short messages", text.len());
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        Ok(text)
    }
}

/// JSON with the white space of Python's `json.dumps`, which templates are written for.
fn python_json(value: &Value, options: &Kwargs) -> Result<String, Error> {
    let json = serde_json::to_string(value)
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("no JSON: {e}")))?;
    let indent: Option<usize> = options.get("indent").unwrap_or(None);
    let _: Option<Value> = options.get("ensure_ascii").unwrap_or(None);
    Ok(match indent.filter(|&indent| indent <= MAX_INDENT) {
        None => space_json(&json),
        Some(indent) => indent_json(&json, indent),
    })
}

const MAX_INDENT: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn wrap(prefix: &str, suffix: &str) -> MessageWrap {
        MessageWrap { prefix: prefix.into(), suffix: suffix.into() }
    }

    #[test]
    fn chat_template_inferred_for_many_model_families() {
        let cases = [
            (
                "ChatML with a default system prompt",
                "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
                ("", "<|im_end|>"),
                ChatTemplate::chatml(),
            ),
            (
                "Llama 3",
                "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
                ("<|begin_of_text|>", "<|eot_id|>"),
                ChatTemplate {
                    start: "<|begin_of_text|>".into(),
                    system: wrap("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
                    user: wrap("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
                    assistant: wrap("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
                    ..ChatTemplate::default()
                },
            ),
            (
                "Mistral, which refuses a system prompt",
                "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
                ("<s>", "</s>"),
                ChatTemplate {
                    start: "<s>".into(),
                    system: wrap("[INST] ", ""),
                    user: wrap("[INST] ", ""),
                    assistant: wrap(" [/INST]", "</s>"),
                    ..ChatTemplate::default()
                },
            ),
            (
                "Gemma",
                "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
                ("<bos>", "<end_of_turn>"),
                ChatTemplate {
                    start: "<bos>".into(),
                    system: wrap("<start_of_turn>user\n", "<end_of_turn>\n"),
                    user: wrap("<start_of_turn>user\n", "<end_of_turn>\n"),
                    assistant: wrap("<start_of_turn>model\n", "<end_of_turn>\n"),
                    ..ChatTemplate::default()
                },
            ),
            (
                "with Python's methods",
                "{%- for m in messages -%}{{- '<|' + m.role.upper() + '|>' + m.content.strip() + '</s>\n' -}}{%- endfor -%}<|ASSISTANT|>",
                ("", "</s>"),
                ChatTemplate {
                    start: String::new(),
                    system: wrap("<|SYSTEM|>", "</s>\n"),
                    user: wrap("<|USER|>", "</s>\n"),
                    assistant: wrap("<|ASSISTANT|>", "</s>\n"),
                    ..ChatTemplate::default()
                },
            ),
        ];
        for (name, source, (bos, end), expected) in cases {
            // The formats of functions have tests of their own.
            let inferred = infer_template(source, bos, &[end.to_owned()]);
            let inferred =
                inferred.map(|inferred| ChatTemplate { tools: expected.tools.clone(), ..inferred });
            assert_eq!(inferred, Ok(expected), "{name}");
        }
    }

    #[test]
    fn chat_template_reasoning_is_no_part_of_the_answer_prefix() {
        let messages = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}";
        let named = "{# <think> and </think> #}";
        let prompt = "{{ '<|im_start|>assistant\n' }}";
        let format = |prompt: &str, skip: Option<&str>| ReasoningFormat {
            open: "<think>".into(),
            close: "</think>".into(),
            prompt: prompt.into(),
            skip: skip.map(str::to_owned),
        };
        let cases = [
            (format!("{messages}{prompt}"), None),
            (format!("{messages}{named}{prompt}"), Some(format("", None))),
            (format!("{messages}{named}{prompt}{{{{ '<think>\n' }}}}"), Some(format("<think>\n", None))),
            (
                format!(
                    "{messages}{prompt}{{% if enable_thinking is defined and enable_thinking is false %}}{{{{ '<think>\n\n</think>\n\n' }}}}{{% endif %}}"
                ),
                Some(format("", Some("<think>\n\n</think>\n\n"))),
            ),
        ];
        for (source, expected) in cases {
            let template = infer_template(&source, "", &["<|im_end|>".to_owned()]).expect("it can be used");
            assert_eq!(template.assistant.prefix, "<|im_start|>assistant\n", "{source}");
            assert_eq!(template.reasoning, expected, "{source}");
        }
    }

    #[test]
    fn chat_template_hostile_source_is_refused() {
        let deep = |part: &str, n: usize| format!("{{{{ {}1 }}}}", part.repeat(n));
        let mut bad = vec![
            deep("-", 100_000),
            deep("not ", 2_000),
            deep("1 + ", 2_000),
            format!("{{{{ messages{} }}}}", "[0]".repeat(2_500)),
            "{% if 1 %}".repeat(6_000),
            "{{ 'x'|indent(100000000000) }}".to_owned(),
            "{{ '%0999999999d'|format(1) }}".to_owned(),
        ];
        bad.push("x".repeat(1 << 17));
        for source in bad {
            assert!(infer_template(&source, "", &["</s>".to_owned()]).is_err());
        }
    }

    #[test]
    fn chat_template_without_messages_is_an_error() {
        let bad = [
            "{% for",
            "{{ raise_exception('no') }}",
            "the same always",
            "{{ messages[0].content }}",
            "{{ nothing.at.all() }}",
            "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}",
        ];
        for source in bad {
            assert!(infer_template(source, "", &["</s>".to_owned()]).is_err(), "{source}");
        }
    }
}
