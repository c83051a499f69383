//! How messages are written for a model, learned from the template in its file.
//!
//! A window is made of messages that come and go, so what stands around each must be known by itself. The template is a
//! program that writes a whole chat; it is run on a chat of marks, and what it writes between the marks is taken.

use halo_core::seams::{Template, Wrap};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, context};

/// What stands around messages in a template's chats. `ends` are the names of tokens that end an answer, `first` what
/// every text begins with.
///
/// # Errors
/// A sentence that says why the template tells nothing.
pub fn learn(source: &str, first: &str, ends: &[String]) -> Result<Template, String> {
    check(source)?;
    let (source, first, ends) = (source.to_owned(), first.to_owned(), ends.to_vec());
    // What is read by going down into it needs room to go down.
    let work = move || learn_checked(&source, &first, &ends);
    let thread = std::thread::Builder::new().name("halo-template".into()).stack_size(64 << 20).spawn(work);
    let thread = thread.map_err(|error| error.to_string())?;
    thread.join().unwrap_or_else(|_| Err("it cannot be run".into()))
}

/// A template is a program from elsewhere: what is longer than any that people use, or goes deeper, is not run at all.
fn check(source: &str) -> Result<(), String> {
    if source.len() > LONGEST {
        return Err(format!("it is {} bytes long, and {LONGEST} are allowed", source.len()));
    }
    let tags = source.split(['{', '}']).map(str::len).max().unwrap_or(0);
    if tags > LONGEST_PART {
        return Err(format!("a part of it is {tags} bytes long, and {LONGEST_PART} are allowed"));
    }
    Ok(())
}

/// Bytes of a template, and of what stands between two braces of it.
const LONGEST: usize = 1 << 16;
const LONGEST_PART: usize = 1 << 13;

fn learn_checked(source: &str, first: &str, ends: &[String]) -> Result<Template, String> {
    let last = ends.first().map_or("", String::as_str);
    let write = |messages: &[(&str, &str)]| write(source, messages, first, last).map_err(|e| e.to_string());
    let chat = [("user", MARKS[0]), ("assistant", MARKS[1]), ("user", MARKS[2])];
    let with_system = write(&[&[("system", MARKS[3])], &chat[..]].concat());
    let with_system = with_system.ok().filter(|text| text.contains(MARKS[3]));
    let text = match &with_system {
        Some(text) => text.clone(),
        None => write(&chat)?,
    };
    let between = |a: Option<&str>, b: Option<&str>| -> Result<String, String> {
        let start = match a {
            None => 0,
            Some(mark) => text.find(mark).ok_or("it leaves messages out")? + mark.len(),
        };
        let end = match b {
            None => text.len(),
            Some(mark) => text.find(mark).ok_or("it leaves messages out")?,
        };
        text.get(start..end).map(str::to_owned).ok_or_else(|| "it changes the order of messages".into())
    };
    let head = between(None, Some(if with_system.is_some() { MARKS[3] } else { MARKS[0] }))?;
    let start = if first.is_empty() || !head.starts_with(first) { "" } else { first };
    let head = head[start.len()..].to_owned();
    let (user_after, assistant_before) = cut(&between(Some(MARKS[0]), Some(MARKS[1]))?, ends);
    let (assistant_after, user_before) = cut(&between(Some(MARKS[1]), Some(MARKS[2]))?, ends);
    // An answer is asked for in the same way in which answers are written, or in the way that the template asks.
    let asked = between(Some(MARKS[2]), None)?;
    let assistant_before = asked.strip_prefix(user_after.as_str()).map_or(assistant_before, str::to_owned);
    let system = match &with_system {
        Some(_) => {
            let (after, _) = cut(&between(Some(MARKS[3]), Some(MARKS[0]))?, ends);
            let both = between(Some(MARKS[3]), Some(MARKS[0]))?;
            let after = both.strip_suffix(user_before.as_str()).map_or(after, str::to_owned);
            Wrap { before: head, after }
        }
        // It knows no system prompt: it is said as the user would.
        None => Wrap { before: user_before.clone(), after: user_after.clone() },
    };
    Ok(Template {
        start: start.to_owned(),
        system,
        user: Wrap { before: user_before, after: user_after },
        assistant: Wrap { before: assistant_before, after: assistant_after },
    })
}

/// Texts that no template writes by itself.
const MARKS: [&str; 4] =
    ["\u{e000}one\u{e001}", "\u{e000}two\u{e001}", "\u{e000}three\u{e001}", "\u{e000}zero\u{e001}"];

/// What ends one message and what begins the next: cut behind the token that ends an answer, and the line break there.
fn cut(text: &str, ends: &[String]) -> (String, String) {
    let end =
        ends.iter().filter(|e| !e.is_empty()).filter_map(|e| Some(text.find(e.as_str())? + e.len())).min();
    let Some(end) = end else { return (String::new(), text.to_owned()) };
    let breaks = text[end..].len() - text[end..].trim_start_matches('\n').len();
    let (after, before) = text.split_at(end + breaks);
    (after.to_owned(), before.to_owned())
}

/// Far more steps than any template needs for four messages.
const FUEL: u64 = 100_000;

fn write(source: &str, messages: &[(&str, &str)], first: &str, last: &str) -> Result<String, Error> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    // A template is a program from elsewhere: it gets so much to do, and no more.
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    // These make much of little.
    ["indent", "format", "center"].into_iter().for_each(|filter| environment.remove_filter(filter));
    environment.add_function("raise_exception", |why: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, why))
    });
    // The same chat is written the same way on every day.
    environment.add_function("strftime_now", |_format: String| "1 January 2000");
    let messages: Vec<Value> =
        messages.iter().map(|&(role, content)| context! { role => role, content => content }).collect();
    let chat = context! {
        messages => messages,
        add_generation_prompt => true,
        bos_token => first,
        eos_token => last,
    };
    environment.render_str(source, chat)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrap(before: &str, after: &str) -> Wrap {
        Wrap { before: before.into(), after: after.into() }
    }

    #[test]
    fn templates_of_many_families() {
        let cases = [
            (
                "ChatML with a default system prompt",
                "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
                ("", "<|im_end|>"),
                Template::chatml(),
            ),
            (
                "Llama 3",
                "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
                ("<|begin_of_text|>", "<|eot_id|>"),
                Template {
                    start: "<|begin_of_text|>".into(),
                    system: wrap("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
                    user: wrap("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
                    assistant: wrap("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
                },
            ),
            (
                "Mistral, which refuses a system prompt",
                "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
                ("<s>", "</s>"),
                Template {
                    start: "<s>".into(),
                    system: wrap("[INST] ", ""),
                    user: wrap("[INST] ", ""),
                    assistant: wrap(" [/INST]", "</s>"),
                },
            ),
            (
                "Gemma",
                "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
                ("<bos>", "<end_of_turn>"),
                Template {
                    start: "<bos>".into(),
                    system: wrap("<start_of_turn>user\n", "<end_of_turn>\n"),
                    user: wrap("<start_of_turn>user\n", "<end_of_turn>\n"),
                    assistant: wrap("<start_of_turn>model\n", "<end_of_turn>\n"),
                },
            ),
            (
                "with Python's methods",
                "{%- for m in messages -%}{{- '<|' + m.role.upper() + '|>' + m.content.strip() + '</s>\n' -}}{%- endfor -%}<|ASSISTANT|>",
                ("", "</s>"),
                Template {
                    start: String::new(),
                    system: wrap("<|SYSTEM|>", "</s>\n"),
                    user: wrap("<|USER|>", "</s>\n"),
                    assistant: wrap("<|ASSISTANT|>", "</s>\n"),
                },
            ),
        ];
        for (name, source, (first, end), expected) in cases {
            assert_eq!(learn(source, first, &[end.to_owned()]).as_ref(), Ok(&expected), "{name}");
        }
    }

    #[test]
    fn hostile_templates_end() {
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
            assert!(learn(&source, "", &["</s>".to_owned()]).is_err());
        }
    }

    #[test]
    fn templates_that_tell_nothing() {
        let bad = [
            "{% for",
            "{{ raise_exception('no') }}",
            "the same always",
            "{{ messages[0].content }}",
            "{{ nothing.at.all() }}",
            "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}",
        ];
        for source in bad {
            assert!(learn(source, "", &["</s>".to_owned()]).is_err(), "{source}");
        }
    }
}
