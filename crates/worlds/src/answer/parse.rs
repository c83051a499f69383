//! Parses the text of models: JSON or TOON, bare or in a code fence, and repairs what is broken.

use crate::hud_format::AnswerFormat;
use serde_json::Value;

pub(super) struct ParsedAnswer {
    pub(super) value: Value,
    pub(super) repaired: bool,
    /// Whether the text ends within its last response or action.
    pub(super) last_item_open: bool,
}

/// The answer in a text. `truncated`: the model reached its token limit.
pub(super) fn parse_answer(text: &str, format: AnswerFormat, truncated: bool) -> Option<ParsedAnswer> {
    let (whole, body) = (text.trim(), strip_code_fence(text));
    let parse = |text: &str| match format {
        AnswerFormat::Json => parse_json(text).or_else(|| parse_toon(text, truncated)),
        AnswerFormat::Toon => parse_toon(text, truncated).or_else(|| parse_json(text)),
    };
    let repair = |text: &str| repair_json(text).or_else(|| repair_toon(text, truncated));
    // A message may contain a code fence: the whole text is tried before the content of a fence. A broken text that
    // begins like an answer is repaired as a whole first.
    let begins_as_answer = whole.starts_with('{') || ANSWER_LISTS.iter().any(|name| whole.starts_with(name));
    let broken = if begins_as_answer { [whole, body] } else { [body, whole] };
    parse(whole).or_else(|| parse(body)).or_else(|| broken.into_iter().find_map(repair))
}

/// The content of the first code fence; without one, the whole text.
fn strip_code_fence(text: &str) -> &str {
    let Some(start) = text.find("```") else { return text.trim() };
    let inner = &text[start + 3..];
    let inner = inner.split_once('\n').map_or(inner, |(word, rest)| {
        if word.trim().chars().all(char::is_alphanumeric) { rest } else { inner }
    });
    inner.split_once("```").map_or(inner, |(inside, _)| inside).trim()
}

/// The lists of an answer. Some models write `messages` for `responses`.
const ANSWER_LISTS: [&str; 3] = ["responses", "messages", "actions"];

fn is_answer(value: &Value) -> bool {
    ANSWER_LISTS.iter().any(|name| value.get(name).is_some())
}

/// Nesting of brackets. No answer needs more, and the repair copies the stack at every step.
const MAX_DEPTH: usize = 64;

fn parse_json(text: &str) -> Option<ParsedAnswer> {
    let start = text.find('{')?;
    // Text after the answer is ignored.
    let mut read = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
    let value = read.next()?.ok().filter(is_answer)?;
    Some(ParsedAnswer { value, repaired: false, last_item_open: false })
}

fn parse_toon(text: &str, truncated: bool) -> Option<ParsedAnswer> {
    // TOON has no closing bracket: a truncated text may end in the middle of its last value.
    Some(ParsedAnswer {
        value: decode_toon(find_toon(text)?, true)?,
        repaired: false,
        last_item_open: truncated,
    })
}

fn find_toon(text: &str) -> Option<&str> {
    let start = ANSWER_LISTS.iter().filter_map(|name| text.find(name)).min()?;
    Some(&text[text[..start].rfind('\n').map_or(0, |at| at + 1)..])
}

fn decode_toon(text: &str, strict: bool) -> Option<Value> {
    let options = toon_format::DecodeOptions::default().with_strict(strict);
    let value: Value = toon_format::decode(text, &options).ok()?;
    is_answer(&value).then(|| drop_nulls(value))
}

/// Repairs TOON that is cut off or has a wrong count: closes its last string, or drops lines from the end.
fn repair_toon(text: &str, truncated: bool) -> Option<ParsedAnswer> {
    let text = find_toon(text)?;
    let decode = |text: &str, last_item_open| {
        Some(ParsedAnswer { value: decode_toon(text, false)?, repaired: true, last_item_open })
    };
    let closed = format!("{}\"", text.trim_end_matches('\\'));
    let ends = text.char_indices().rev().filter(|&(_, c)| c == '\n').map(|(at, _)| &text[..at]);
    let mut shorter = std::iter::once(&*closed).chain(ends).take(64);
    decode(text, truncated).or_else(|| shorter.find_map(|text| decode(text, true)))
}

/// A table has null where a row lacks a field.
fn drop_nulls(mut value: Value) -> Value {
    for list in ANSWER_LISTS {
        for row in value.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(fields) = row.as_object_mut() {
                fields.retain(|_, value| !value.is_null());
            }
        }
    }
    value
}

/// Repairs JSON that is cut off, has trailing commas, or has line breaks within strings.
fn repair_json(text: &str) -> Option<ParsedAnswer> {
    let start = text.find('{')?;
    let (mut out, mut closers) = (String::with_capacity(text.len()), Vec::new());
    // Ends of complete values, and the brackets that were open there.
    let mut complete: Vec<(usize, Vec<char>)> = Vec::new();
    let (mut in_string, mut escaped) = (false, false);
    for c in text[start..].chars() {
        if in_string {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => in_string = false,
                _ => {}
            }
            match c {
                '\n' => out.push_str("\\n"),
                '\t' => out.push_str("\\t"),
                c if c < ' ' => {}
                c => out.push(c),
            }
            if !in_string {
                complete.push((out.len(), closers.clone()));
            }
            continue;
        }
        match c {
            '"' => in_string = true,
            '{' | '[' if closers.len() >= MAX_DEPTH => break,
            '{' => closers.push('}'),
            '[' => closers.push(']'),
            '}' | ']' => {
                // Drops a trailing comma.
                let end = out.trim_end().trim_end_matches(',').len();
                out.truncate(end);
                if closers.last() != Some(&c) {
                    break;
                }
                closers.pop();
            }
            _ => {}
        }
        out.push(c);
        if !c.is_whitespace() && !matches!(c, ',' | ':' | '"') {
            complete.push((out.len(), closers.clone()));
        }
        if closers.is_empty() {
            break;
        }
    }
    let close = |text: &str, closers: &[char]| {
        let text: String = text.chars().chain(closers.iter().rev().copied()).collect();
        let value = serde_json::from_str::<Value>(&text).ok().filter(is_answer)?;
        // Open brackets within an entry: the answer, a list in it, and the entry. Some models write one entry without
        // the list.
        let entry_depth =
            value.as_object()?.values().next_back().map_or(3, |last| if last.is_object() { 2 } else { 3 });
        Some(ParsedAnswer { value, repaired: true, last_item_open: closers.len() >= entry_depth })
    };
    if in_string {
        let string = out.strip_suffix('\\').filter(|_| escaped).unwrap_or(&out);
        if let Some(answer) = close(&format!("{string}\""), &closers) {
            return Some(answer);
        }
    }
    complete.iter().rev().take(64).find_map(|(at, closers)| close(&out[..*at], closers))
}
