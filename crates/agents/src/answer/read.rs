//! Reads what models write: JSON, TOON, either within a fence, and what is broken as far as it goes.

use crate::format::Output;
use serde_json::Value;

/// What was understood of an answer.
pub(super) struct Read {
    pub(super) value: Value,
    /// Whether it had to be put right.
    pub(super) repaired: bool,
    /// Whether it ends within the last thing that it names.
    pub(super) open: bool,
}

/// What there is of an answer in a text; `cut` where the model was stopped before it was done.
pub(super) fn read(text: &str, output: Output, cut: bool) -> Option<Read> {
    let (whole, body) = (text.trim(), unfenced(text));
    let either = |text: &str| match output {
        Output::Json => from_json(text).or_else(|| from_toon(text, cut)),
        Output::Toon => from_toon(text, cut).or_else(|| from_json(text)),
    };
    let mended = |text: &str| repaired_json(text).or_else(|| repaired_toon(text, cut));
    // A message may have a fence in it: what is understood as a whole is not looked into. Nor what begins as an answer does, and
    // ends too early.
    let begins = ["{", "responses", "actions"].iter().any(|start| whole.starts_with(start));
    let broken = if begins { [whole, body] } else { [body, whole] };
    either(whole).or_else(|| either(body)).or_else(|| broken.into_iter().find_map(mended))
}

/// What is within a fence of backticks, if there is one; else everything.
fn unfenced(text: &str) -> &str {
    let Some(start) = text.find("```") else { return text.trim() };
    let inner = &text[start + 3..];
    let inner = inner.split_once('\n').map_or(inner, |(word, rest)| {
        if word.trim().chars().all(char::is_alphanumeric) { rest } else { inner }
    });
    inner.split_once("```").map_or(inner, |(inside, _)| inside).trim()
}

/// Whether it is an answer at all.
fn is_answer(value: &Value) -> bool {
    value.get("responses").is_some() || value.get("actions").is_some()
}

/// How deep brackets may stand in each other: no answer needs more, and every one more costs.
const DEPTH: usize = 64;

fn from_json(text: &str) -> Option<Read> {
    let start = text.find('{')?;
    // What a model says behind its answer is not part of it.
    let mut read = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
    let value = read.next()?.ok().filter(is_answer)?;
    Some(Read { value, repaired: false, open: false })
}

fn from_toon(text: &str, cut: bool) -> Option<Read> {
    // Where a line has no end, nobody knows whether it has all of its last word.
    Some(Read { value: toon_read(toon_in(text)?, true)?, repaired: false, open: cut })
}

/// Where TOON begins in what was said.
fn toon_in(text: &str) -> Option<&str> {
    let start = text.find("responses").into_iter().chain(text.find("actions")).min()?;
    Some(&text[text[..start].rfind('\n').map_or(0, |at| at + 1)..])
}

fn toon_read(text: &str, strict: bool) -> Option<Value> {
    let options = toon_format::DecodeOptions::default().with_strict(strict);
    let value: Value = toon_format::decode(text, &options).ok()?;
    is_answer(&value).then(|| without_nothing(value))
}

/// TOON that ends too early, or has other entries than it says: with its last text closed, or without the last lines.
fn repaired_toon(text: &str, cut: bool) -> Option<Read> {
    let text = toon_in(text)?;
    let read = |text: &str, open| Some(Read { value: toon_read(text, false)?, repaired: true, open });
    let closed = format!("{}\"", text.trim_end_matches('\\'));
    let ends = text.char_indices().rev().filter(|&(_, c)| c == '\n').map(|(at, _)| &text[..at]);
    let mut shorter = std::iter::once(&*closed).chain(ends).take(64);
    read(text, cut).or_else(|| shorter.find_map(|text| read(text, true)))
}

/// Rows of a table are filled up with nothing where an entry lacks a field.
fn without_nothing(mut value: Value) -> Value {
    for list in ["responses", "actions"] {
        for row in value.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(fields) = row.as_object_mut() {
                fields.retain(|_, value| !value.is_null());
            }
        }
    }
    value
}

/// JSON that ends too early, has commas too many, or line breaks within its texts, put right; none where that does not help.
fn repaired_json(text: &str) -> Option<Read> {
    let start = text.find('{')?;
    let (mut out, mut closers) = (String::with_capacity(text.len()), Vec::new());
    // Where something was whole, and what was open there.
    let mut whole: Vec<(usize, Vec<char>)> = Vec::new();
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
                whole.push((out.len(), closers.clone()));
            }
            continue;
        }
        match c {
            '"' => in_string = true,
            '{' | '[' if closers.len() >= DEPTH => break,
            '{' => closers.push('}'),
            '[' => closers.push(']'),
            '}' | ']' => {
                // A comma before the end of a list is one too many.
                let kept = out.trim_end().trim_end_matches(',').len();
                out.truncate(kept);
                if closers.last() != Some(&c) {
                    break;
                }
                closers.pop();
            }
            _ => {}
        }
        out.push(c);
        if !c.is_whitespace() && !matches!(c, ',' | ':' | '"') {
            whole.push((out.len(), closers.clone()));
        }
        if closers.is_empty() {
            break;
        }
    }
    let close = |text: &str, closers: &[char]| {
        let text: String = text.chars().chain(closers.iter().rev().copied()).collect();
        let value = serde_json::from_str::<Value>(&text).ok().filter(is_answer)?;
        // The answer itself, a list in it, and an entry of that; some do without the list.
        let entry =
            value.as_object()?.values().next_back().map_or(3, |last| if last.is_object() { 2 } else { 3 });
        Some(Read { value, repaired: true, open: closers.len() >= entry })
    };
    if in_string {
        let cut = out.strip_suffix('\\').filter(|_| escaped).unwrap_or(&out);
        if let Some(value) = close(&format!("{cut}\""), &closers) {
            return Some(value);
        }
    }
    whole.iter().rev().take(64).find_map(|(at, closers)| close(&out[..*at], closers))
}
