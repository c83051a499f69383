//! The positional dialect: the names of an object are declared once, then its values stand one behind the other.
//!
//! ```text
//! person{name,age,active}: Alice, 25, true
//! data{users}:
//!   users[2]{id,name}:
//!     1, Alice
//!     2, Bob
//! ```
//!
//! Objects are `name{field,field}: value, value`, or one value on each line; lists are `name[count]: item, item`, and tables
//! `name[count]{field,field}:` with a row on each line. Texts are written without quotes where that leaves no doubt.
//! Lines are set in to be read by people; how deep makes no difference.

use serde_json::{Map, Value};
use std::fmt::Write as _;

/// The longest text of an object or a list that is written on one line.
const LONG: usize = 50;
/// The most fields, and the most entries.
const FIELDS: usize = 4;
const ITEMS: usize = 5;
/// How deep texts may be that are read.
const DEEPEST: usize = 128;

/// A text, in quotes where it could be taken for something else.
#[must_use]
pub(super) fn text(text: &str) -> String {
    let doubt = text.is_empty()
        || matches!(text, "true" | "false" | "null")
        || text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.'))
        || text.starts_with(char::is_whitespace)
        || text.ends_with(char::is_whitespace)
        || text.contains(|c: char| {
            matches!(c, ',' | '{' | '}' | '[' | ']' | ':' | '"' | '\\') || c.is_control()
        });
    // Some characters end a line for some who read, though not for JSON.
    let odd = text.contains(['\u{85}', '\u{2028}', '\u{2029}']);
    if doubt || odd { serde_json::to_string(text).unwrap_or_default() } else { text.to_owned() }
}

/// A value that needs no line of its own; none for those that do.
pub(super) fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::Null => Some("null".to_owned()),
        Value::Bool(yes) => Some(yes.to_string()),
        Value::Number(number) => Some(number.to_string()),
        Value::String(string) => Some(text(string)),
        Value::Array(items) if items.is_empty() => Some("[]".to_owned()),
        Value::Object(fields) if fields.is_empty() => Some("{}".to_owned()),
        _ => None,
    }
}

fn is_plain(value: &Value) -> bool {
    !value.is_array() && !value.is_object()
}

fn is_long(value: &Value) -> bool {
    value.as_str().is_some_and(|text| text.chars().count() >= LONG)
}

/// A value on one line, whatever it is.
fn flow(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(flow).collect::<Vec<_>>().join(", ")),
        Value::Object(entries) => format!("{{{}}}", fields(entries)),
        other => scalar(other).unwrap_or_default(),
    }
}

/// The fields of an object on one line.
pub(super) fn fields(fields: &Map<String, Value>) -> String {
    let one = |(name, value): (&String, &Value)| format!("{}:{}", text(name), flow(value));
    fields.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// The names of an object's fields, declared.
pub(super) fn names<'a>(fields: impl IntoIterator<Item = &'a String>) -> String {
    fields.into_iter().map(|name| text(name)).collect::<Vec<_>>().join(",")
}

/// Whether a list is a table, and its columns.
fn columns(items: &[Value]) -> Option<Vec<&String>> {
    let rows: Vec<&Map<String, Value>> = items.iter().map(Value::as_object).collect::<Option<_>>()?;
    let first: Vec<&String> = rows.first()?.keys().collect();
    let alike = |row: &&Map<String, Value>| {
        row.len() == first.len() && row.keys().eq(first.iter().copied()) && row.values().all(is_plain)
    };
    (!first.is_empty() && rows.iter().all(alike)).then_some(first)
}

/// The cells of a table's row.
pub(super) fn row(row: &Map<String, Value>) -> String {
    row.values().filter_map(scalar).collect::<Vec<_>>().join(", ")
}

/// A named value, on as many lines as it needs, each set in by `depth` levels. Simple values go without their name: their place
/// tells what they are.
pub(super) fn block(name: &str, value: &Value, depth: usize, out: &mut String) {
    let indent = "  ".repeat(depth);
    if let Some(simple) = scalar(value) {
        let _ = write!(out, "{indent}{simple}");
        return;
    }
    let _ = write!(out, "{indent}{name}");
    match value {
        Value::Object(fields) => object(fields, depth, out),
        Value::Array(items) => list(items, depth, out),
        _ => {}
    }
}

fn object(fields: &Map<String, Value>, depth: usize, out: &mut String) {
    let _ = write!(out, "{{{}}}:", names(fields.keys()));
    let short = fields.len() <= FIELDS && fields.values().all(|value| is_plain(value) && !is_long(value));
    if short {
        let _ = write!(out, " {}", row(fields));
        return;
    }
    for (name, value) in fields {
        out.push('\n');
        block(&text(name), value, depth + 1, out);
    }
}

fn list(items: &[Value], depth: usize, out: &mut String) {
    let indent = "  ".repeat(depth + 1);
    if let Some(columns) = columns(items) {
        let _ = write!(out, "[{}]{{{}}}:", items.len(), names(columns));
        for item in items.iter().filter_map(Value::as_object) {
            let _ = write!(out, "\n{indent}{}", row(item));
        }
        return;
    }
    if items.iter().all(is_plain) {
        let short = items.len() <= ITEMS && !items.iter().any(is_long);
        let between = if short { ", ".to_owned() } else { format!(",\n{indent}") };
        let before = if short { " ".to_owned() } else { format!("\n{indent}") };
        let all: Vec<String> = items.iter().filter_map(scalar).collect();
        let _ = write!(out, "[{}]:{before}{}", items.len(), all.join(&between));
        return;
    }
    let simple = |item: &Value| item.as_object().is_some_and(|fields| fields.values().all(is_plain));
    if items.iter().all(simple) {
        // Objects that differ: each is written out.
        let all: Vec<String> = items.iter().map(flow).collect();
        let _ = write!(out, "[{}]:\n{indent}{}", items.len(), all.join(&format!(",\n{indent}")));
        return;
    }
    let _ = write!(out, "[{}]:", items.len());
    for (n, item) in items.iter().enumerate() {
        out.push('\n');
        block(&format!("[{n}]"), item, depth + 1, out);
    }
}

/// A value as text, under a name.
#[must_use]
pub fn write(name: &str, value: &Value) -> String {
    let mut out = String::new();
    block(&text(name), value, 0, &mut out);
    out
}

/// What was written.
///
/// # Errors
/// In words, when it was not written here.
pub fn read(text: &str) -> Result<Value, String> {
    let mut lines = Lines { rest: text.split('\n').collect::<Vec<_>>(), at: 0 };
    let line = lines.next()?;
    let value = match line.find(['{', '[', '"']) {
        // A name may be in quotes.
        _ if line.starts_with('"') => {
            let mut cursor = Cursor { rest: line, depth: 0 };
            let name = cursor.string()?;
            let rest = cursor.rest;
            if rest.is_empty() { Value::String(name) } else { lines.body(rest, 0)? }
        }
        Some(at) if at > 0 && (line[at..].starts_with('{') || line[at..].starts_with('[')) => {
            lines.body(&line[at..], 0)?
        }
        _ => whole(line)?,
    };
    lines.end()?;
    Ok(value)
}

/// Fields that were written on one line.
///
/// # Errors
/// As above.
pub(super) fn read_fields(line: &str) -> Result<Map<String, Value>, String> {
    let mut cursor = Cursor { rest: line, depth: 0 };
    let fields = cursor.fields()?;
    cursor.ends()?;
    Ok(fields)
}

/// A value that takes up a whole line.
fn whole(line: &str) -> Result<Value, String> {
    let mut cursor = Cursor { rest: line, depth: 0 };
    let value = cursor.value()?;
    cursor.ends()?;
    Ok(value)
}

struct Lines<'a> {
    rest: Vec<&'a str>,
    at: usize,
}

impl<'a> Lines<'a> {
    fn next(&mut self) -> Result<&'a str, String> {
        let line = self.rest.get(self.at).ok_or("the text ends too early")?;
        self.at += 1;
        Ok(line.trim_start_matches(' '))
    }

    fn end(&self) -> Result<(), String> {
        match self.rest[self.at.min(self.rest.len())..].iter().find(|line| !line.trim().is_empty()) {
            Some(line) => Err(format!("'{line}' stands behind the end")),
            None => Ok(()),
        }
    }

    /// What follows a name: the declaration of an object or of a list, and what is in it.
    fn body(&mut self, header: &str, depth: usize) -> Result<Value, String> {
        if depth > DEEPEST {
            return Err("it is too deep".to_owned());
        }
        let mut cursor = Cursor { rest: header, depth: 0 };
        let count = cursor.count()?;
        let fields = cursor.declared()?;
        cursor.expect(':')?;
        let inline = cursor.rest.strip_prefix(' ').unwrap_or(cursor.rest);
        match (count, fields) {
            (None, None) => Err(format!("'{header}' declares nothing")),
            (None, Some(fields)) if !inline.is_empty() => Ok(Value::Object(in_row(&fields, inline)?)),
            (None, Some(fields)) => {
                let one = |name: String| Ok((name.clone(), self.value(&text(&name), depth + 1)?));
                Ok(Value::Object(fields.into_iter().map(one).collect::<Result<_, String>>()?))
            }
            (Some(count), Some(fields)) => {
                let rows = (0..count).map(|_| Ok(Value::Object(in_row(&fields, self.next()?)?)));
                Ok(Value::Array(rows.collect::<Result<_, String>>()?))
            }
            (Some(count), None) if !inline.is_empty() => {
                let mut cursor = Cursor { rest: inline, depth: 0 };
                let items = cursor.list_of(count)?;
                cursor.ends()?;
                Ok(Value::Array(items))
            }
            (Some(count), None) => {
                let items = (0..count).map(|n| {
                    let item = self.value(&format!("[{n}]"), depth + 1);
                    item.map_err(|why| format!("entry {n}: {why}"))
                });
                Ok(Value::Array(items.collect::<Result<_, String>>()?))
            }
        }
    }

    /// A value on lines of its own; a comma may follow it.
    fn value(&mut self, name: &str, depth: usize) -> Result<Value, String> {
        let line = self.next()?;
        if let Some(header) =
            line.strip_prefix(name).filter(|rest| rest.starts_with('{') || rest.starts_with('['))
        {
            return self.body(header, depth);
        }
        let mut cursor = Cursor { rest: line, depth: 0 };
        let value = cursor.value()?;
        cursor.rest = cursor.rest.strip_prefix(',').unwrap_or(cursor.rest);
        cursor.ends()?;
        Ok(value)
    }
}

fn in_row(fields: &[String], line: &str) -> Result<Map<String, Value>, String> {
    let mut cursor = Cursor { rest: line, depth: 0 };
    let cells = cursor.list_of(fields.len())?;
    cursor.ends()?;
    Ok(fields.iter().cloned().zip(cells).collect())
}

/// A line, as far as it has not been read.
struct Cursor<'a> {
    rest: &'a str,
    depth: usize,
}

impl Cursor<'_> {
    fn skip(&mut self) {
        self.rest = self.rest.trim_start_matches(' ');
    }

    fn expect(&mut self, wanted: char) -> Result<(), String> {
        self.rest = self
            .rest
            .strip_prefix(wanted)
            .ok_or_else(|| format!("'{wanted}' is missing before '{}'", self.rest))?;
        Ok(())
    }

    fn ends(&self) -> Result<(), String> {
        if self.rest.is_empty() { Ok(()) } else { Err(format!("'{}' is too much", self.rest)) }
    }

    /// `[3]`, if it is there.
    fn count(&mut self) -> Result<Option<usize>, String> {
        let Some(inner) = self.rest.strip_prefix('[') else { return Ok(None) };
        let end = inner.find(']').ok_or("a bracket is not closed")?;
        let count =
            inner[..end].parse().map_err(|_| format!("'{}' is no number of entries", &inner[..end]))?;
        self.rest = &inner[end + 1..];
        Ok(Some(count))
    }

    /// `{a,b}`, if it is there.
    fn declared(&mut self) -> Result<Option<Vec<String>>, String> {
        if !self.rest.starts_with('{') {
            return Ok(None);
        }
        self.expect('{')?;
        let mut names = Vec::new();
        loop {
            names.push(self.string()?);
            if self.rest.starts_with('}') {
                self.expect('}')?;
                return Ok(Some(names));
            }
            self.expect(',')?;
        }
    }

    /// So many values, divided by commas.
    fn list_of(&mut self, count: usize) -> Result<Vec<Value>, String> {
        let mut items = Vec::with_capacity(count.min(1024));
        for n in 0..count {
            if n > 0 {
                self.expect(',')?;
                self.skip();
            }
            items.push(self.value()?);
        }
        Ok(items)
    }

    /// A text in quotes, or up to the next mark.
    fn string(&mut self) -> Result<String, String> {
        if self.rest.starts_with('"') {
            let mut read = serde_json::Deserializer::from_str(self.rest).into_iter::<String>();
            let string = read.next().and_then(Result::ok).ok_or("a quote is not closed")?;
            self.rest = &self.rest[read.byte_offset()..];
            return Ok(string);
        }
        let end = self.rest.find([',', '{', '}', '[', ']', ':', '"']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        if word.is_empty() {
            return Err(format!("something is missing before '{}'", self.rest));
        }
        self.rest = rest;
        Ok(word.to_owned())
    }

    fn value(&mut self) -> Result<Value, String> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err("it is too deep".to_owned());
        }
        let value = match self.rest.chars().next() {
            Some('"') => Value::String(self.string()?),
            Some('[') => self.items()?,
            Some('{') => {
                self.expect('{')?;
                let fields = if self.rest.starts_with('}') { Map::new() } else { self.fields()? };
                self.expect('}')?;
                Value::Object(fields)
            }
            _ => bare(&self.string()?)?,
        };
        self.depth -= 1;
        Ok(value)
    }

    fn items(&mut self) -> Result<Value, String> {
        self.expect('[')?;
        let mut items = Vec::new();
        while !self.rest.starts_with(']') {
            if !items.is_empty() {
                self.expect(',')?;
                self.skip();
            }
            items.push(self.value()?);
        }
        self.expect(']')?;
        Ok(Value::Array(items))
    }

    fn fields(&mut self) -> Result<Map<String, Value>, String> {
        let mut fields = Map::new();
        loop {
            let name = self.string()?;
            self.expect(':')?;
            fields.insert(name, self.value()?);
            if !self.rest.starts_with(',') {
                return Ok(fields);
            }
            self.expect(',')?;
            self.skip();
        }
    }
}

/// What a word without quotes stands for.
fn bare(word: &str) -> Result<Value, String> {
    let word = word.trim_end_matches(' ');
    match word {
        "true" => Ok(Value::Bool(true)),
        "false" => Ok(Value::Bool(false)),
        "null" => Ok(Value::Null),
        _ if word.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.')) => {
            serde_json::from_str(word).map_err(|_| format!("'{word}' is neither a number nor in quotes"))
        }
        _ => Ok(Value::String(word.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn round(name: &str, value: &Value) -> String {
        let text = write(name, value);
        assert_eq!(read(&text).as_ref(), Ok(value), "{text}");
        text
    }

    /// The vectors of the original.
    #[test]
    fn golden() {
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
            assert_eq!(round(name, &value), expected);
        }
        let actions = json!({"actions": [
            {"type": "set", "path": "memory.last_seen", "value": "Alice"},
            {"type": "react", "message_id": 1, "reaction": "brain"},
        ]});
        assert!(round("data", &actions).contains("{type:set, path:memory.last_seen, value:Alice}"));
        let rooms = json!({"rooms": [{"id": 8, "you": 5, "members": ["5", "8"], "messages": [{"id": 1, "content": "x"}]}]});
        let text = round("data", &rooms);
        assert!(text.contains("rooms[1]:\n    [0]{id,you,members,messages}:\n      8\n      5\n      members[2]: \"5\", \"8\""), "{text}");
    }

    #[test]
    fn whatever_it_is_comes_back() {
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
            round("data", &value);
            round("a b", &value);
        }
    }

    #[test]
    fn what_is_broken_says_so() {
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
            assert!(read(text).is_err(), "{text}");
        }
        let deep = format!("a[1]: {}{}", "[".repeat(10_000), "]".repeat(10_000));
        assert!(read(&deep).expect_err("too deep").contains("deep"));
    }
}
