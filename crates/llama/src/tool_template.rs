//! Infers from a chat template how functions, their calls and their results are written.
//!
//! As for messages, the template is rendered with sentinels: two functions, calls of them, and two results. The text
//! around the sentinels is what a client's functions are written with, so that no request runs the template, and no
//! data of a client is in its reach. A template that writes functions in another way than as JSON is treated like one
//! without functions: the model gets general instructions in its system prompt.

use crate::chat_template::{ChatRenderer, split_after_end_token};
use halo_core::model::{ChatTemplate, MessageWrap};
use halo_core::tool_call::{
    CallFormat, ToolFormat, ToolSection, compact_json, indent_json, json_members, space_json,
};
use minijinja::context;
use minijinja::value::Value;

/// The names of two functions; private-use characters, which no template writes.
const FUNCTIONS: [&str; 2] = ["\u{e000}first\u{e001}", "\u{e000}second\u{e001}"];
const ARGUMENTS: &str = "{\"key\":\"\u{e000}value\u{e001}\"}";
const RESULTS: [&str; 2] = ["\u{e000}result\u{e001}", "\u{e000}other\u{e001}"];
const SYSTEM: &str = "\u{e000}zero\u{e001}";
const USER: &str = "\u{e000}one\u{e001}";
const NEXT_USER: &str = "\u{e000}three\u{e001}";
/// Mistral accepts ids of nine letters only.
const CALL_IDS: [&str; 2] = ["callAAAAA", "callBBBBB"];

/// How a template writes functions; the generic format where it writes none.
pub(crate) fn infer_tools(
    renderer: &ChatRenderer<'_>,
    template: &ChatTemplate,
    has_system: bool,
    end_tokens: &[String],
) -> ToolFormat {
    let generic = template.tools.clone();
    let section = infer_section(renderer, template, has_system);
    match infer_calls(renderer, template, end_tokens) {
        Some((call, result, result_separator)) if section.is_some() => {
            ToolFormat { section, call, result, result_separator }
        }
        // Hermes describes functions in Python. The general instructions teach its format of calls; its results have a role.
        Some((call, result, result_separator)) if call == generic.call => {
            ToolFormat { result, result_separator, ..generic }
        }
        _ => ToolFormat { section, ..generic },
    }
}

/// A template with the functions of another one: some files have one for chats and one for chats with functions. It is left as it is
/// where it writes functions itself, or where the two write messages in different ways.
pub(crate) fn with_tools_of(template: ChatTemplate, for_tools: ChatTemplate) -> ChatTemplate {
    let is_same = (&template.user, &template.assistant) == (&for_tools.user, &for_tools.assistant);
    match template.tools.section.is_none() && is_same {
        true => ChatTemplate { tools: for_tools.tools, ..template },
        false => template,
    }
}

/// The system prompt with two functions.
fn infer_section(
    renderer: &ChatRenderer<'_>,
    template: &ChatTemplate,
    has_system: bool,
) -> Option<ToolSection> {
    let tools: Vec<Value> = FUNCTIONS.iter().map(|name| parse_value(&tool_json(name))).collect();
    let messages = match has_system {
        true => vec![
            context! { role => "system", content => SYSTEM },
            context! { role => "user", content => USER },
        ],
        // The system prompt is written as a message of the user.
        false => vec![context! { role => "user", content => SYSTEM }],
    };
    let text = renderer.render(messages, Some(Value::from(tools)), None).ok()?;
    let text = text.strip_prefix(renderer.bos).unwrap_or(&text);
    let system = text.find(SYSTEM)?;
    let system_end = system + SYSTEM.len();
    let (style, [first, second]) = JsonStyle::ALL.into_iter().find_map(|style| {
        let [one, two] = FUNCTIONS.map(|name| style.write(name));
        let start = text.find(&one)?;
        let next = start + one.len() + text[start + one.len()..].find(&two)?;
        Some((style, [start..start + one.len(), next..next + two.len()]))
    })?;
    let tools_first = first.start < system;
    let (gap, last_end) = match tools_first {
        true => (text.get(second.end..system)?, system_end),
        false => (text.get(system_end..first.start)?, second.end),
    };
    let tail = match has_system {
        true => {
            let after = text.get(last_end..text.find(USER)?)?;
            after
                .strip_suffix(template.user.prefix.as_str())?
                .strip_suffix(template.system.suffix.as_str())?
        }
        false if tools_first => "",
        false => return None,
    };
    Some(ToolSection {
        tools_first,
        head: text[..first.start.min(system)].to_owned(),
        gap: gap.to_owned(),
        separator: text.get(first.end..second.start)?.to_owned(),
        tail: tail.to_owned(),
        bare_function: style.bare,
        indent: style.indent,
    })
}

/// How the JSON of a function is written.
#[derive(Clone, Copy)]
struct JsonStyle {
    /// Only the function, without the type of the tool.
    bare: bool,
    /// With the type before the function; maps are rendered in the order of their keys otherwise.
    type_first: bool,
    indent: Option<usize>,
}

impl JsonStyle {
    /// The whole object before the function in it, because the one contains the other.
    const ALL: [JsonStyle; 7] = [
        JsonStyle { bare: false, type_first: false, indent: None },
        JsonStyle { bare: false, type_first: true, indent: None },
        JsonStyle { bare: false, type_first: false, indent: Some(4) },
        JsonStyle { bare: false, type_first: false, indent: Some(2) },
        JsonStyle { bare: true, type_first: false, indent: None },
        JsonStyle { bare: true, type_first: false, indent: Some(4) },
        JsonStyle { bare: true, type_first: false, indent: Some(2) },
    ];

    fn write(self, name: &str) -> String {
        let json = match (self.bare, self.type_first) {
            (true, _) => function_json(name),
            (false, false) => tool_json(name),
            (false, true) => format!("{{\"type\":\"function\",\"function\":{}}}", function_json(name)),
        };
        self.indent.map_or_else(|| space_json(&json), |indent| indent_json(&json, indent))
    }
}

/// A function with its keys in the order in which maps are rendered.
fn function_json(name: &str) -> String {
    format!(
        "{{\"description\":\"does {name}\",\"name\":\"{name}\",\"parameters\":{{\"properties\":{{}},\"type\":\"object\"}}}}"
    )
}

fn tool_json(name: &str) -> String {
    format!("{{\"function\":{},\"type\":\"function\"}}", function_json(name))
}

fn parse_value(json: &str) -> Value {
    serde_json::from_str(json).unwrap_or(Value::UNDEFINED)
}

/// How calls and results are written: the format of calls, the text around a result, and that between two results.
fn infer_calls(
    renderer: &ChatRenderer<'_>,
    template: &ChatTemplate,
    end_tokens: &[String],
) -> Option<(CallFormat, MessageWrap, Option<String>)> {
    let one = render_calls(renderer, 1)?;
    let (object, arguments_key) = find_object(&one, FUNCTIONS[0])?;
    let user_end = one.find(USER)? + USER.len();
    let before = one.get(user_end..object.start)?.strip_prefix(template.user.suffix.as_str())?;
    let open = before.strip_prefix(template.assistant.prefix.as_str())?;
    let result = one.find(RESULTS[0])?;
    let (closing, prefix) = split_after_end_token(one.get(object.end..result)?, end_tokens);
    let close = closing.strip_suffix(template.assistant.suffix.as_str())?;
    let after_result = &one[result + RESULTS[0].len()..];
    let suffix = match after_result.split_once(NEXT_USER) {
        Some((suffix, _)) => suffix.strip_suffix(template.user.prefix.as_str())?,
        None => after_result.strip_suffix(template.assistant.prefix.as_str())?,
    };
    // Llama writes a result as a JSON string; its text is written without the quotes.
    let (prefix, suffix) = match (prefix.strip_suffix('"'), suffix.strip_prefix('"')) {
        (Some(prefix), Some(suffix)) => (prefix.to_owned(), suffix.to_owned()),
        _ => (prefix, suffix.to_owned()),
    };
    // Some templates refuse two calls.
    let two = render_calls(renderer, 2);
    let separator = two.as_deref().and_then(|two| {
        let (first, _) = find_object(two, FUNCTIONS[0])?;
        let (second, _) = find_object(two, FUNCTIONS[1])?;
        two.get(first.end..second.start).map(str::to_owned)
    });
    let result_separator = two.as_deref().and_then(|two| {
        let first = two.find(RESULTS[0])? + RESULTS[0].len();
        two.get(first..two.find(RESULTS[1])?).map(str::to_owned)
    });
    let call = CallFormat {
        open: without_call_ids(open)?,
        separator: without_call_ids(&separator.unwrap_or_else(|| "\n".to_owned()))?,
        close: without_call_ids(close)?,
        arguments_key,
    };
    let result = MessageWrap { prefix: without_call_ids(&prefix)?, suffix: without_call_ids(&suffix)? };
    let result_separator = result_separator.and_then(|text| without_call_ids(&text));
    Some((call, result, result_separator.filter(|text| !text.contains('"'))))
}

/// What the template writes behind the result of a function to begin the answer; none where it writes no results.
pub(crate) fn prompt_after_result(renderer: &ChatRenderer<'_>, user_prefix: &str) -> Option<String> {
    let text = render_calls(renderer, 1)?;
    let (_, after_result) = text.split_once(RESULTS[0])?;
    let Some((closing, _)) = after_result.split_once(NEXT_USER) else {
        // What closes the result and what begins the answer are one text here. Without a generation prompt nothing begins it.
        return (!renderer.has_generation_prompt()).then(String::new);
    };
    let closing = closing.strip_suffix(user_prefix)?;
    let before_answer = renderer.render(call_messages(1), None, None).ok()?;
    let (_, after_result) = before_answer.split_once(RESULTS[0])?;
    after_result.strip_prefix(closing).map(str::to_owned)
}

/// A text of the template without the ids of calls. A result is stored without an id and follows its call, so a member with an id is
/// left out: `{"content": …, "call_id": "…"}`. None where an id is anything but a member of a JSON object.
fn without_call_ids(text: &str) -> Option<String> {
    let mut text = text.to_owned();
    for id in CALL_IDS {
        let member_value = format!("\"{id}\"");
        while let Some(at) = text.find(id) {
            let start = text.find(&member_value).filter(|start| start + 1 == at)?;
            let end = start + member_value.len();
            let before = text[..start].trim_end().strip_suffix(':')?.trim_end().strip_suffix('"')?;
            let key = before.rfind('"')?;
            let head = before[..key].trim_end();
            text = match (head.strip_suffix(','), text[end..].trim_start().strip_prefix(',')) {
                (Some(head), _) => format!("{head}{}", &text[end..]),
                (None, Some(rest)) => format!("{}{}", &text[..key], rest.trim_start()),
                (None, None) => format!("{}{}", &text[..key], &text[end..]),
            };
        }
    }
    Some(text)
}

/// A chat in which the model calls `count` functions, and the user goes on. Some templates refuse a message of the user right behind a
/// result (Mistral): there the chat ends before the answer.
fn render_calls(renderer: &ChatRenderer<'_>, count: usize) -> Option<String> {
    let mut messages = call_messages(count);
    messages.push(context! { role => "user", content => NEXT_USER });
    let text = renderer.render(messages, None, None);
    text.or_else(|_| renderer.render(call_messages(count), None, None)).ok()
}

/// A chat in which the model calls `count` functions and gets their results.
fn call_messages(count: usize) -> Vec<Value> {
    let arguments = parse_value(ARGUMENTS);
    let calls: Vec<Value> = (0..count)
        .map(|n| {
            let function = context! { name => FUNCTIONS[n], arguments => arguments.clone() };
            context! { id => CALL_IDS[n], type => "function", function }
        })
        .collect();
    let mut messages = vec![
        context! { role => "user", content => USER },
        context! { role => "assistant", content => "", tool_calls => calls },
    ];
    messages.extend((0..count).map(|n| {
        context! { role => "tool", content => RESULTS[n], tool_call_id => CALL_IDS[n], name => FUNCTIONS[n] }
    }));
    messages
}

/// The object of a call in a rendered chat, and the key of its arguments.
fn find_object(text: &str, name: &str) -> Option<(std::ops::Range<usize>, String)> {
    let at = text.find(name)?;
    text[..at].rmatch_indices('{').find_map(|(start, _)| {
        let (members, end) = json_members(&text[start..]);
        let is_name = |value: &str| value.trim_matches('"') == name;
        members.iter().find(|member| member.key == "name" && is_name(member.value))?;
        let arguments = members.iter().find(|member| compact_json(member.value) == ARGUMENTS)?;
        Some((start..start + end?, arguments.key.to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::with_tools_of;
    use crate::chat_template::infer_template;
    use halo_core::model::{ChatTemplate, MessageWrap};
    use halo_core::tool_call::{CallFormat, ToolDefinition};

    /// The templates of these models, shortened to what concerns messages and functions.
    const QWEN: &str = r#"{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions.\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nReturn calls within <tool_call></tool_call>.<|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"#;

    const LLAMA: &str = r#"{{- bos_token }}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\n\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "You have access to the following functions. To call a function, please respond with JSON for a function call.\n\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"#;

    const MISTRAL: &str = r#"{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is defined and tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "tool_calls" or message.tool_calls is defined %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"#;

    fn tool() -> ToolDefinition {
        ToolDefinition {
            name: "clock".into(),
            function: r#"{"name":"clock","parameters":{"type":"object"}}"#.into(),
            parameters: r#"{"type":"object"}"#.into(),
        }
    }

    fn infer(source: &str, bos: &str, end: &str) -> ChatTemplate {
        infer_template(source, bos, &[end.to_owned()]).expect("the template can be used")
    }

    fn wrap(prefix: &str, suffix: &str) -> MessageWrap {
        MessageWrap { prefix: prefix.into(), suffix: suffix.into() }
    }

    #[test]
    fn tool_template_of_qwen_is_hermes() {
        let template = infer(QWEN, "", "<|im_end|>");
        let section = template.tools.section.expect("it writes functions");
        assert_eq!(section.head, "<|im_start|>system\n");
        assert!(section.gap.starts_with("\n\n# Tools") && section.gap.ends_with("<tools>\n"), "{section:?}");
        assert!(
            section.tail.starts_with("\n</tools>") && section.tail.ends_with("</tool_call>."),
            "{section:?}"
        );
        assert_eq!((section.tools_first, section.separator.as_str()), (false, "\n"));
        let json = r#"{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}"#;
        assert_eq!(section.definition(&tool()), json);
        let call = template.tools.call;
        assert_eq!(call.marker(), "<tool_call>");
        assert_eq!(
            (call.separator.as_str(), call.close.as_str()),
            ("\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
        );
        assert_eq!(call.arguments_key, "arguments");
        let expected = wrap("<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n");
        assert_eq!(template.tools.result, expected);
        assert_eq!(template.tools.result_separator.as_deref(), Some("\n</tool_response>\n<tool_response>\n"));
    }

    #[test]
    fn tool_template_of_llama_writes_functions_before_the_system_prompt() {
        let template = infer(LLAMA, "<|begin_of_text|>", "<|eot_id|>");
        let section = template.tools.section.expect("it writes functions");
        assert!(section.tools_first && section.head.contains("Environment: ipython"), "{section:?}");
        assert_eq!(
            (section.separator.as_str(), section.gap.as_str(), section.tail.as_str()),
            ("\n\n", "\n\n", "")
        );
        assert!(section.definition(&tool()).starts_with("{\n    \"type\": \"function\""));
        let call = CallFormat {
            open: String::new(),
            separator: "\n".into(),
            close: String::new(),
            arguments_key: "parameters".into(),
        };
        assert_eq!(template.tools.call, call);
        assert_eq!(
            template.tools.result,
            wrap("<|start_header_id|>ipython<|end_header_id|>\n\n", "<|eot_id|>")
        );
    }

    #[test]
    fn tool_template_of_mistral_has_lists() {
        let template = infer(MISTRAL, "<s>", "</s>");
        // The template does not write `[/INST]` between a result and the answer.
        assert_eq!(template.user, wrap("[INST] ", "[/INST]"));
        assert_eq!(template.assistant, wrap("", "</s>"));
        let section = template.tools.section.expect("it writes functions");
        assert_eq!((section.head.as_str(), section.separator.as_str()), ("[AVAILABLE_TOOLS] [", ", "));
        assert_eq!((section.tools_first, section.gap.as_str()), (true, "][/AVAILABLE_TOOLS][INST] "));
        let call = template.tools.call;
        assert_eq!(
            (call.marker(), call.separator.as_str(), call.close.as_str()),
            ("[TOOL_CALLS]", ", ", "]")
        );
        assert_eq!(template.tools.result, wrap("[TOOL_RESULTS] {\"content\": ", "}[/TOOL_RESULTS]"));
    }

    /// The published template of Mistral Nemo checks that the roles alternate, so no message of the user follows a result.
    #[test]
    fn tool_template_that_refuses_a_message_behind_a_result_is_inferred() {
        let check = r#"{%- for message in loop_messages %}
    {%- if message.role == "user" and loop.previtem is defined and loop.previtem.role == "tool" %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
{%- endfor %}
{{- bos_token }}"#;
        let checked = MISTRAL.replace("{{- bos_token }}", check);
        assert_eq!(infer(&checked, "<s>", "</s>"), infer(MISTRAL, "<s>", "</s>"));
    }

    /// As Hermes 3 has it: functions are described in Python, the last result of a chat ends in another way.
    const HERMES: &str = r#"{{- bos_token }}{{- '<|im_start|>system\nYou call functions: <tools> ' }}
{%- for tool in tools %}
    {{- '{"name": "' + tool.function.name + '", "description": "' + tool.function.name + '() - ' + tool.function.description + '"}\n' }}
{%- endfor %}
{{- ' </tools>Call them in <tool_call></tool_call>.<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls is defined %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments|tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}
            {{- '<|im_start|>tool\n' }}
        {%- endif %}
        {{- '<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- else %}
            {{- '\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"#;

    const PLAIN: &str = "{{bos_token}}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] \
        + '<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}";

    #[test]
    fn tool_template_of_hermes_has_results_of_their_own_role() {
        let template = infer(HERMES, "<s>", "<|im_end|>");
        let generic = infer(PLAIN, "<s>", "<|im_end|>");
        assert_eq!(template.tools.section, None, "its functions are no JSON");
        assert_eq!(template.tools.call, generic.tools.call);
        let expected = wrap("<|im_start|>tool\n<tool_response>\n", "\n</tool_response><|im_end|>\n");
        assert_eq!(template.tools.result, expected);
        assert_eq!(template.tools.result_separator.as_deref(), Some("\n</tool_response>\n<tool_response>\n"));
        assert_ne!(generic.tools.result, expected);
    }

    #[test]
    fn second_template_gives_its_functions_to_the_first() {
        let [plain, hermes, qwen] = [PLAIN, HERMES, QWEN].map(|source| infer(source, "<s>", "<|im_end|>"));
        let joined = with_tools_of(plain.clone(), hermes.clone());
        assert_eq!(joined, ChatTemplate { tools: hermes.tools.clone(), ..plain.clone() });
        assert_eq!(with_tools_of(qwen.clone(), hermes), qwen, "it writes functions itself");
        let llama = infer(LLAMA, "<|begin_of_text|>", "<|eot_id|>");
        assert_eq!(with_tools_of(plain.clone(), llama), plain, "messages are written in another way");
    }

    #[test]
    fn tool_template_has_no_ids_of_calls() {
        for (text, expected) in [
            (r#", "call_id": "callAAAAA"}"#, Some("}")),
            (r#"{"call_id": "callAAAAA", "content": "#, Some(r#"{"content": "#)),
            (r#"{"id": "callBBBBB"}"#, Some("{}")),
            (r#", "a": 1, "id":"callAAAAA"}, {"id": "callBBBBB", "#, Some(r#", "a": 1}, {"#)),
            ("no id", Some("no id")),
            ("<call callAAAAA>", None),
            (r#"["callAAAAA"]"#, None),
        ] {
            assert_eq!(super::without_call_ids(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn tool_template_without_functions_is_generic() {
        let chatml = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}";
        // One drops functions, one refuses them, and one does not write them as JSON.
        let refusing =
            format!("{{% if tools %}}{{{{ raise_exception('no functions') }}}}{{% endif %}}{chatml}");
        let naming =
            format!("{{% if tools %}}{{{{ '# ' + tools[0].function.name + '\n' }}}}{{% endif %}}{chatml}");
        for source in [chatml, &refusing, &naming] {
            let template = infer(source, "", "<|im_end|>");
            assert_eq!(template.tools, ChatTemplate::chatml().tools, "{source}");
            assert_eq!(template.tools.section, None, "{source}");
            assert_eq!((template.user, template.assistant), {
                let chatml = ChatTemplate::chatml();
                (chatml.user, chatml.assistant)
            });
        }
    }
}
