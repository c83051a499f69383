//! The positional dialect: the field names of an object are declared once, then its values follow in the same order.
//!
//! ```text
//! person{name,age,active}: Alice, 25, true
//! data{users}:
//!   users[2]{id,name}:
//!     1, Alice
//!     2, Bob
//! ```
//!
//! Objects are `name{field,field}: value, value`, or one value per line; lists are `name[count]: item, item`, and
//! tables `name[count]{field,field}:` with one row per line. Strings are unquoted where that is unambiguous. Lines are
//! indented for readers; the parser ignores the indent.

use crate::error::Error;
use serde_json::{Map, Value};
use std::fmt::Write as _;

/// Characters of a string in an object or list that is written on one line.
const INLINE_MAX_CHARS: usize = 50;
/// Fields of such an object, and items of such a list.
const INLINE_MAX_FIELDS: usize = 4;
const INLINE_MAX_ITEMS: usize = 5;
/// Nesting that the parser accepts.
const MAX_DEPTH: usize = 128;

/// Quotes a string that could be parsed as something else.
#[must_use]
pub(super) fn quote_if_needed(text: &str) -> String {
    let ambiguous = text.is_empty()
        || matches!(text, "true" | "false" | "null")
        || text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.'))
        || text.starts_with(char::is_whitespace)
        || text.ends_with(char::is_whitespace)
        || text.contains(|c: char| {
            matches!(c, ',' | '{' | '}' | '[' | ']' | ':' | '"' | '\\') || c.is_control()
        });
    // Some readers take these characters for line breaks, JSON does not.
    let line_break = text.contains(['\u{85}', '\u{2028}', '\u{2029}']);
    if ambiguous || line_break { serde_json::to_string(text).unwrap_or_default() } else { text.to_owned() }
}

/// A value without fields or items; none for other values.
pub(super) fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::Null => Some("null".to_owned()),
        Value::Bool(yes) => Some(yes.to_string()),
        Value::Number(number) => Some(number.to_string()),
        Value::String(string) => Some(quote_if_needed(string)),
        Value::Array(items) if items.is_empty() => Some("[]".to_owned()),
        Value::Object(fields) if fields.is_empty() => Some("{}".to_owned()),
        _ => None,
    }
}

fn is_plain(value: &Value) -> bool {
    !value.is_array() && !value.is_object()
}

fn is_long(value: &Value) -> bool {
    value.as_str().is_some_and(|text| text.chars().count() >= INLINE_MAX_CHARS)
}

/// Any value on one line.
fn inline_value(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(inline_value).collect::<Vec<_>>().join(", ")),
        Value::Object(entries) => format!("{{{}}}", inline_fields(entries)),
        other => scalar(other).unwrap_or_default(),
    }
}

pub(super) fn inline_fields(fields: &Map<String, Value>) -> String {
    let field =
        |(name, value): (&String, &Value)| format!("{}:{}", quote_if_needed(name), inline_value(value));
    fields.iter().map(field).collect::<Vec<_>>().join(", ")
}

/// The declaration of an object's fields.
pub(super) fn inline_names<'a>(fields: impl IntoIterator<Item = &'a String>) -> String {
    fields.into_iter().map(|name| quote_if_needed(name)).collect::<Vec<_>>().join(",")
}

/// The columns of a list that can be written as a table: objects with the same fields and plain values.
fn table_columns(items: &[Value]) -> Option<Vec<&String>> {
    let rows: Vec<&Map<String, Value>> = items.iter().map(Value::as_object).collect::<Option<_>>()?;
    let first: Vec<&String> = rows.first()?.keys().collect();
    let has_columns = |row: &&Map<String, Value>| {
        row.len() == first.len() && row.keys().eq(first.iter().copied()) && row.values().all(is_plain)
    };
    (!first.is_empty() && rows.iter().all(has_columns)).then_some(first)
}

pub(super) fn inline_row(row: &Map<String, Value>) -> String {
    row.values().filter_map(scalar).collect::<Vec<_>>().join(", ")
}

/// Writes a named value on as many lines as it needs, indented by `depth` levels. A scalar has no name: its place
/// identifies it.
pub(super) fn write_block(name: &str, value: &Value, depth: usize, out: &mut String) {
    let indent = "  ".repeat(depth);
    if let Some(text) = scalar(value) {
        let _ = write!(out, "{indent}{text}");
        return;
    }
    let _ = write!(out, "{indent}{name}");
    match value {
        Value::Object(fields) => write_object(fields, depth, out),
        Value::Array(items) => write_list(items, depth, out),
        _ => {}
    }
}

fn write_object(fields: &Map<String, Value>, depth: usize, out: &mut String) {
    let _ = write!(out, "{{{}}}:", inline_names(fields.keys()));
    let short =
        fields.len() <= INLINE_MAX_FIELDS && fields.values().all(|value| is_plain(value) && !is_long(value));
    if short {
        let _ = write!(out, " {}", inline_row(fields));
        return;
    }
    for (name, value) in fields {
        out.push('\n');
        write_block(&quote_if_needed(name), value, depth + 1, out);
    }
}

fn write_list(items: &[Value], depth: usize, out: &mut String) {
    let indent = "  ".repeat(depth + 1);
    if let Some(columns) = table_columns(items) {
        let _ = write!(out, "[{}]{{{}}}:", items.len(), inline_names(columns));
        for item in items.iter().filter_map(Value::as_object) {
            let _ = write!(out, "\n{indent}{}", inline_row(item));
        }
        return;
    }
    if items.iter().all(is_plain) {
        let short = items.len() <= INLINE_MAX_ITEMS && !items.iter().any(is_long);
        let between = if short { ", ".to_owned() } else { format!(",\n{indent}") };
        let before = if short { " ".to_owned() } else { format!("\n{indent}") };
        let all: Vec<String> = items.iter().filter_map(scalar).collect();
        let _ = write!(out, "[{}]:{before}{}", items.len(), all.join(&between));
        return;
    }
    let is_flat = |item: &Value| item.as_object().is_some_and(|fields| fields.values().all(is_plain));
    if items.iter().all(is_flat) {
        // The objects have different fields: each is written with its names.
        let all: Vec<String> = items.iter().map(inline_value).collect();
        let _ = write!(out, "[{}]:\n{indent}{}", items.len(), all.join(&format!(",\n{indent}")));
        return;
    }
    let _ = write!(out, "[{}]:", items.len());
    for (n, item) in items.iter().enumerate() {
        out.push('\n');
        write_block(&format!("[{n}]"), item, depth + 1, out);
    }
}

#[must_use]
pub fn encode(name: &str, value: &Value) -> String {
    let mut out = String::new();
    write_block(&quote_if_needed(name), value, 0, &mut out);
    out
}

/// Parses what [`encode`] wrote.
pub fn decode(text: &str) -> Result<Value, Error> {
    let mut lines = PositionalReader { lines: text.split('\n').collect::<Vec<_>>(), next: 0 };
    let line = lines.next_line()?;
    let value = match line.find(['{', '[', '"']) {
        // The name may be quoted.
        _ if line.starts_with('"') => {
            let mut cursor = LineCursor { rest: line, depth: 0 };
            let name = cursor.read_string()?;
            let rest = cursor.rest;
            if rest.is_empty() { Value::String(name) } else { lines.read_body(rest, 0)? }
        }
        Some(at) if at > 0 && (line[at..].starts_with('{') || line[at..].starts_with('[')) => {
            lines.read_body(&line[at..], 0)?
        }
        _ => decode_line(line)?,
    };
    lines.expect_end()?;
    Ok(value)
}

/// Parses fields that were written on one line.
pub(super) fn decode_fields(line: &str) -> Result<Map<String, Value>, Error> {
    let mut cursor = LineCursor { rest: line, depth: 0 };
    let fields = cursor.read_fields()?;
    cursor.expect_end()?;
    Ok(fields)
}

/// Parses a value that takes a whole line.
fn decode_line(line: &str) -> Result<Value, Error> {
    let mut cursor = LineCursor { rest: line, depth: 0 };
    let value = cursor.read_value()?;
    cursor.expect_end()?;
    Ok(value)
}

struct PositionalReader<'a> {
    lines: Vec<&'a str>,
    next: usize,
}

impl<'a> PositionalReader<'a> {
    fn next_line(&mut self) -> Result<&'a str, Error> {
        let line = self.lines.get(self.next).ok_or_else(|| invalid("the text ends too early"))?;
        self.next += 1;
        Ok(line.trim_start_matches(' '))
    }

    fn expect_end(&self) -> Result<(), Error> {
        match self.lines[self.next.min(self.lines.len())..].iter().find(|line| !line.trim().is_empty()) {
            Some(line) => Err(invalid(format!("'{line}' follows the end"))),
            None => Ok(()),
        }
    }

    /// Parses what follows a name: the declaration of an object or a list, and its content.
    fn read_body(&mut self, header: &str, depth: usize) -> Result<Value, Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("the text is nested too deeply"));
        }
        let mut cursor = LineCursor { rest: header, depth: 0 };
        let count = cursor.read_count()?;
        let fields = cursor.read_field_names()?;
        cursor.expect_char(':')?;
        let inline = cursor.rest.strip_prefix(' ').unwrap_or(cursor.rest);
        match (count, fields) {
            (None, None) => Err(invalid(format!("'{header}' declares neither a list nor an object"))),
            (None, Some(fields)) if !inline.is_empty() => Ok(Value::Object(decode_row(&fields, inline)?)),
            (None, Some(fields)) => {
                let field =
                    |name: String| Ok((name.clone(), self.read_value(&quote_if_needed(&name), depth + 1)?));
                Ok(Value::Object(fields.into_iter().map(field).collect::<Result<_, Error>>()?))
            }
            (Some(count), Some(fields)) => {
                let rows = (0..count).map(|_| Ok(Value::Object(decode_row(&fields, self.next_line()?)?)));
                Ok(Value::Array(rows.collect::<Result<_, Error>>()?))
            }
            (Some(count), None) if !inline.is_empty() => {
                let mut cursor = LineCursor { rest: inline, depth: 0 };
                let items = cursor.read_values(count)?;
                cursor.expect_end()?;
                Ok(Value::Array(items))
            }
            (Some(count), None) => {
                let items = (0..count).map(|n| {
                    let item = self.read_value(&format!("[{n}]"), depth + 1);
                    item.map_err(|error| error.with_context(format!("entry {n}")))
                });
                Ok(Value::Array(items.collect::<Result<_, Error>>()?))
            }
        }
    }

    /// Parses a value on lines of its own; a comma may follow it.
    fn read_value(&mut self, name: &str, depth: usize) -> Result<Value, Error> {
        let line = self.next_line()?;
        if let Some(header) =
            line.strip_prefix(name).filter(|rest| rest.starts_with('{') || rest.starts_with('['))
        {
            return self.read_body(header, depth);
        }
        let mut cursor = LineCursor { rest: line, depth: 0 };
        let value = cursor.read_value()?;
        cursor.rest = cursor.rest.strip_prefix(',').unwrap_or(cursor.rest);
        cursor.expect_end()?;
        Ok(value)
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::invalid_input(message)
}

fn decode_row(fields: &[String], line: &str) -> Result<Map<String, Value>, Error> {
    let mut cursor = LineCursor { rest: line, depth: 0 };
    let cells = cursor.read_values(fields.len())?;
    cursor.expect_end()?;
    Ok(fields.iter().cloned().zip(cells).collect())
}

/// The unread rest of a line.
struct LineCursor<'a> {
    rest: &'a str,
    depth: usize,
}

impl LineCursor<'_> {
    fn skip_spaces(&mut self) {
        self.rest = self.rest.trim_start_matches(' ');
    }

    fn expect_char(&mut self, expected: char) -> Result<(), Error> {
        self.rest = self
            .rest
            .strip_prefix(expected)
            .ok_or_else(|| invalid(format!("'{expected}' is missing before '{}'", self.rest)))?;
        Ok(())
    }

    fn expect_end(&self) -> Result<(), Error> {
        if self.rest.is_empty() { Ok(()) } else { Err(invalid(format!("'{}' is not expected", self.rest))) }
    }

    /// Parses `[3]` if it is there.
    fn read_count(&mut self) -> Result<Option<usize>, Error> {
        let Some(inner) = self.rest.strip_prefix('[') else { return Ok(None) };
        let end = inner.find(']').ok_or_else(|| invalid("a bracket is not closed"))?;
        let count =
            inner[..end].parse().map_err(|_| invalid(format!("'{}' is not a count", &inner[..end])))?;
        self.rest = &inner[end + 1..];
        Ok(Some(count))
    }

    /// Parses `{a,b}` if it is there.
    fn read_field_names(&mut self) -> Result<Option<Vec<String>>, Error> {
        if !self.rest.starts_with('{') {
            return Ok(None);
        }
        self.expect_char('{')?;
        let mut names = Vec::new();
        loop {
            names.push(self.read_string()?);
            if self.rest.starts_with('}') {
                self.expect_char('}')?;
                return Ok(Some(names));
            }
            self.expect_char(',')?;
        }
    }

    /// Parses values that are separated by commas.
    fn read_values(&mut self, count: usize) -> Result<Vec<Value>, Error> {
        let mut items = Vec::with_capacity(count.min(1024));
        for n in 0..count {
            if n > 0 {
                self.expect_char(',')?;
                self.skip_spaces();
            }
            items.push(self.read_value()?);
        }
        Ok(items)
    }

    /// Parses a quoted string, or one up to the next delimiter.
    fn read_string(&mut self) -> Result<String, Error> {
        if self.rest.starts_with('"') {
            let mut read = serde_json::Deserializer::from_str(self.rest).into_iter::<String>();
            let string = read.next().and_then(Result::ok).ok_or_else(|| invalid("a quote is not closed"))?;
            self.rest = &self.rest[read.byte_offset()..];
            return Ok(string);
        }
        let end = self.rest.find([',', '{', '}', '[', ']', ':', '"']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        if word.is_empty() {
            return Err(invalid(format!("a value is missing before '{}'", self.rest)));
        }
        self.rest = rest;
        Ok(word.to_owned())
    }

    fn read_value(&mut self) -> Result<Value, Error> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(invalid("the text is nested too deeply"));
        }
        let value = match self.rest.chars().next() {
            Some('"') => Value::String(self.read_string()?),
            Some('[') => self.read_list()?,
            Some('{') => {
                self.expect_char('{')?;
                let fields = if self.rest.starts_with('}') { Map::new() } else { self.read_fields()? };
                self.expect_char('}')?;
                Value::Object(fields)
            }
            _ => parse_bare_word(&self.read_string()?)?,
        };
        self.depth -= 1;
        Ok(value)
    }

    fn read_list(&mut self) -> Result<Value, Error> {
        self.expect_char('[')?;
        let mut items = Vec::new();
        while !self.rest.starts_with(']') {
            if !items.is_empty() {
                self.expect_char(',')?;
                self.skip_spaces();
            }
            items.push(self.read_value()?);
        }
        self.expect_char(']')?;
        Ok(Value::Array(items))
    }

    fn read_fields(&mut self) -> Result<Map<String, Value>, Error> {
        let mut fields = Map::new();
        loop {
            let name = self.read_string()?;
            self.expect_char(':')?;
            fields.insert(name, self.read_value()?);
            if !self.rest.starts_with(',') {
                return Ok(fields);
            }
            self.expect_char(',')?;
            self.skip_spaces();
        }
    }
}

/// The value of a word without quotes.
fn parse_bare_word(word: &str) -> Result<Value, Error> {
    let word = word.trim_end_matches(' ');
    match word {
        "true" => Ok(Value::Bool(true)),
        "false" => Ok(Value::Bool(false)),
        "null" => Ok(Value::Null),
        _ if word.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.')) => {
            serde_json::from_str(word)
                .map_err(|_| invalid(format!("'{word}' is neither a number nor in quotes")))
        }
        _ => Ok(Value::String(word.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn assert_roundtrip(name: &str, value: &Value) -> String {
        let text = encode(name, value);
        assert_eq!(decode(&text).as_ref(), Ok(value), "{text}");
        text
    }

    #[test]
    fn positional_matches_golden_vectors() {
        for (name, value, expected) in [
            (
                "person",
                json!({"name": "Alice", "age": 25, "active": true}),
                "person{name,age,active}: Alice, 25, true",
            ),
            (
                "data",
                json!({"user": {"name": "Bob", "active": true}, "count": 42}),
                "data{user,count}:\n  user{name,active}: Bob, true\n  42",
            ),
            (
                "data",
                json!({"users": [{"id": 1, "name": "Alice"}, {"id": 2, "name": "Bob"}]}),
                "data{users}:\n  users[2]{id,name}:\n    1, Alice\n    2, Bob",
            ),
            ("data", json!({"message": "Hello, world!"}), "data{message}: \"Hello, world!\""),
            ("data", json!({}), "{}"),
            ("data", json!({"items": []}), "data{items}:\n  []"),
            (
                "data",
                json!({"status": "true", "flag": "false", "value": "null"}),
                "data{status,flag,value}: \"true\", \"false\", \"null\"",
            ),
            ("data", json!({"code": "12345"}), "data{code}: \"12345\""),
            (
                "data",
                json!({"level1": {"level2": {"level3": {"x": 1}}}}),
                "data{level1}:\n  level1{level2}:\n    level2{level3}:\n      level3{x}: 1",
            ),
            ("d", json!({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}), "d{a,b,c,d,e}:\n  1\n  2\n  3\n  4\n  5"),
            ("d", json!({"a": "x".repeat(50)}), &format!("d{{a}}:\n  {}", "x".repeat(50))),
            (
                "d",
                json!({"l": ["a", "b", "c", "d", "e", "f"]}),
                "d{l}:\n  l[6]:\n    a,\n    b,\n    c,\n    d,\n    e,\n    f",
            ),
        ] {
            assert_eq!(assert_roundtrip(name, &value), expected);
        }
        let actions = json!({"actions": [
            {"type": "set", "path": "memory.last_seen", "value": "Alice"},
            {"type": "react", "message_id": 1, "reaction": "brain"},
        ]});
        assert!(
            assert_roundtrip("data", &actions).contains("{type:set, path:memory.last_seen, value:Alice}")
        );
        let rooms = json!({"rooms": [{"id": 8, "you": 5, "members": ["5", "8"], "messages": [{"id": 1, "content": "x"}]}]});
        let text = assert_roundtrip("data", &rooms);
        assert!(text.contains("rooms[1]:\n    [0]{id,you,members,messages}:\n      8\n      5\n      members[2]: \"5\", \"8\""), "{text}");
    }

    #[test]
    fn positional_roundtrips_any_value() {
        for value in [
            json!({"a": "x{b}: 1", "b": "a{c}:", "c": "[0]{x}: 1", "d": "line\nline", "e": " x ", "f": "", "g": "-", "h": "3x"}),
            json!({"a": [[], {}, [[1]], [{"x": []}], null, "[0]"], "b": {"c": {}}}),
            json!({"": {"": [""]}, "a,b": {"c:d": 1, "e}": "f"}, "\"": "\\", "a b": {"c": [1, {"d": 2}]}}),
            json!({"l": [{"a": 1}, {"b": 2}], "m": [{"a": 1}, {"a": [1]}], "n": [{"a": "x", "b": null}]}),
            json!({"n": [-1, 2.5, 1e300, 12_345_678_901_234_567_890_u64]}),
            json!(["a", 1]),
            json!([{"a": 1}]),
            json!("text"),
            json!(null),
            json!({"a": "ünï 🙂, ok", "b": "\u{2028}", "c": "\r"}),
        ] {
            assert_roundtrip("data", &value);
            assert_roundtrip("a b", &value);
        }
    }

    #[test]
    fn positional_rejects_malformed_text() {
        for text in [
            "",
            "a{b",
            "a{b}:",
            "a[2]: 1",
            "a[x]: 1",
            "a{b}: 1, 2",
            "a{b,c}: 1",
            "a{b}: 1\nx",
            "a{b}: 3x",
            "a[1]{b}:",
            "a: 1",
        ] {
            assert!(decode(text).is_err(), "{text}");
        }
        let deep = format!("a[1]: {}{}", "[".repeat(10_000), "]".repeat(10_000));
        assert!(decode(&deep).expect_err("too deep").message.contains("deep"));
    }
}
