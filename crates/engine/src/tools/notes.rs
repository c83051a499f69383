//! The model's notes: what they look like at first, in short, and what a change came to.

use serde_json::{Map, Value, json};

/// The file that is there from the beginning.
pub const FILE: &str = "notes.json";

/// The notes before anything is noted. Times are milliseconds since 1970.
#[must_use]
pub fn first(now: i64) -> Value {
    json!({
        "_metadata": {
            "created": now,
            "last_modified": now,
            "description": "AI assistant's persistent notes and memory",
        },
        "topics": {},
        "reminders": [],
        "context": {},
        "scratch": {},
    })
}

/// Notes that were changed say when.
pub fn touch(notes: &mut Value, now: i64) {
    if let Some(Value::Object(about)) = notes.get_mut("_metadata") {
        about.insert("last_modified".into(), json!(now));
    }
}

/// Two levels of it, arrays up to three: what the standing instructions show.
#[must_use]
pub fn preview(value: &Value) -> String {
    fn short(value: &Value, depth: usize) -> Value {
        match value {
            Value::Object(map) if depth == 0 => json!(if map.is_empty() { "{}" } else { "{...}" }),
            Value::Array(all) if depth == 0 => json!(if all.is_empty() { "[]" } else { "[...]" }),
            Value::Object(map) => {
                let told = map.iter().filter(|(key, _)| *key != "_metadata");
                Value::Object(
                    told.map(|(key, value)| (key.clone(), short(value, depth - 1))).collect::<Map<_, _>>(),
                )
            }
            Value::Array(all) => {
                let mut some: Vec<Value> = all.iter().take(3).map(|value| short(value, depth - 1)).collect();
                some.extend((all.len() > 3).then(|| json!("...")));
                Value::Array(some)
            }
            Value::String(text) => json!(cut(text, 120)),
            other => other.clone(),
        }
    }
    short(value, 2)
        .to_string()
        .replace("\"{...}\"", "{...}")
        .replace("\"[...]\"", "[...]")
        .replace("\"{}\"", "{}")
        .replace("\"[]\"", "[]")
}

/// The most differences that are told one by one.
const MOST: usize = 5;

/// What changed, each place with its new value: `.context.name = "Ada"`.
#[must_use]
pub fn difference(old: &Value, new: &Value) -> String {
    let mut found = Vec::new();
    compare(old, new, &mut String::new(), &mut found);
    if found.is_empty() {
        return "nothing changed".into();
    }
    let more = found.len().saturating_sub(MOST);
    found.truncate(MOST);
    let told = found.join(", ");
    if more > 0 { format!("{told} and {more} more") } else { told }
}

fn compare(old: &Value, new: &Value, path: &mut String, found: &mut Vec<String>) {
    if old == new || path.starts_with("._metadata") {
        return;
    }
    let length = path.len();
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            for (key, value) in new {
                step(path, key);
                match old.get(key) {
                    Some(before) => compare(before, value, path, found),
                    None => found.push(format!("{path} = {}", shown(value))),
                }
                path.truncate(length);
            }
            for key in old.keys().filter(|key| !new.contains_key(*key)) {
                step(path, key);
                found.push(format!("{path} is gone"));
                path.truncate(length);
            }
        }
        (Value::Array(old), Value::Array(new)) if new.len() >= old.len() && old[..] == new[..old.len()] => {
            for (n, value) in new.iter().enumerate().skip(old.len()) {
                found.push(format!("{path}[{n}] = {}", shown(value)));
            }
        }
        _ => found.push(format!("{} = {}", if path.is_empty() { "." } else { path }, shown(new))),
    }
}

fn step(path: &mut String, key: &str) {
    let plain =
        key.chars().all(|c| c.is_alphanumeric() || c == '_') && !key.starts_with(|c: char| c.is_numeric());
    if plain && !key.is_empty() {
        path.push('.');
        path.push_str(key);
    } else {
        path.push_str(&format!("[{}]", json!(key)));
    }
}

/// A value on one line, not too long.
#[must_use]
pub fn shown(value: &Value) -> String {
    cut(&value.to_string(), 500)
}

fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_told_in_short() {
        let old =
            json!({"_metadata": {"last_modified": 1}, "context": {"name": "Bob"}, "list": [1], "gone": 0});
        let new =
            json!({"_metadata": {"last_modified": 2}, "context": {"name": "Ada", "a b": {}}, "list": [1, 2]});
        assert_eq!(
            difference(&old, &new),
            r#".context.name = "Ada", .context["a b"] = {}, .list[1] = 2, .gone is gone"#
        );
        assert_eq!(difference(&old, &old), "nothing changed");
        assert_eq!(difference(&old, &json!(null)), ". = null");
        let many = json!({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "g": 7});
        assert_eq!(difference(&json!({}), &many), ".a = 1, .b = 2, .c = 3, .d = 4, .e = 5 and 2 more");
    }

    #[test]
    fn notes_are_shown_two_levels_deep() {
        let mut notes = first(7);
        notes["topics"]["rust"] = json!({"deep": [1]});
        notes["reminders"] = json!(["a", "b", "c", "d"]);
        notes["context"]["empty"] = json!({});
        assert_eq!(
            preview(&notes),
            r#"{"topics":{"rust":{...}},"reminders":["a","b","c","..."],"context":{"empty":{}},"scratch":{}}"#
        );
    }
}
