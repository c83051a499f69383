//! The model's notes: the empty document, a preview of it, and descriptions of changes.

use super::jq::MAX_DOCUMENT_BYTES;
use halo_core::Error;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

/// The file that every conversation has.
pub const NOTES_FILE: &str = "notes.json";

/// The empty notes. `now` is in milliseconds since 1970; the notes have it in ISO 8601.
#[must_use]
pub fn empty_notes(now: i64) -> Value {
    let now = iso_time(now);
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

/// Sets the time of the last change, where the document has one. A time of creation in milliseconds, as earlier versions and
/// other programs wrote it, becomes ISO 8601.
pub fn set_modified_time(notes: &mut Value, now: i64) {
    if let Some(Value::Object(about)) = notes.get_mut("_metadata") {
        about.insert("last_modified".into(), json!(iso_time(now)));
        if let Some(created) = about.get("created").and_then(Value::as_i64) {
            about.insert("created".into(), json!(iso_time(created)));
        }
    }
}

/// A time in milliseconds since 1970 as `2026-11-15T08:30:00.000Z`, as JavaScript writes it.
fn iso_time(milliseconds: i64) -> String {
    let time = Timestamp::from_millisecond(milliseconds).unwrap_or(Timestamp::UNIX_EPOCH);
    time.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

/// Refuses notes that are larger than a file may be.
pub fn check_size(text: &str) -> Result<(), Error> {
    if text.len() <= MAX_DOCUMENT_BYTES {
        return Ok(());
    }
    let message = format!(
        "the notes have {} bytes and may have {MAX_DOCUMENT_BYTES} ({} KiB); remove some of them",
        text.len(),
        MAX_DOCUMENT_BYTES / 1024
    );
    Err(Error::invalid_input("writing the notes", message))
}

/// The part of the document that the system prompt shows, in at most `max_bytes`: two levels of it, or one where two are too
/// long, or the beginning of that. Notes of any size, such as imported ones, leave room for the conversation.
#[must_use]
pub fn preview(value: &Value, max_bytes: usize) -> String {
    let fits = |text: &String| text.len() <= max_bytes;
    if let Some(whole) = Some(render_levels(value, 2)).filter(fits) {
        return whole;
    }
    let mut text = render_levels(value, 1);
    if text.len() + SHORTENED.len() > max_bytes {
        let end = max_bytes.saturating_sub(SHORTENED.len() + '…'.len_utf8());
        text.truncate(text.floor_char_boundary(end));
        text.push('…');
    }
    text + SHORTENED
}

/// Tells the model that the preview lacks something.
const SHORTENED: &str = " (shortened: jq shows the rest and deletes what is no longer needed)";

/// So many levels of the document, arrays up to three items.
fn render_levels(value: &Value, levels: usize) -> String {
    fn shorten(value: &Value, depth: usize) -> Value {
        match value {
            Value::Object(map) if depth == 0 => json!(if map.is_empty() { "{}" } else { "{...}" }),
            Value::Array(all) if depth == 0 => json!(if all.is_empty() { "[]" } else { "[...]" }),
            Value::Object(map) => {
                let entries = map.iter().filter(|(key, _)| *key != "_metadata");
                Value::Object(
                    entries
                        .map(|(key, value)| (key.clone(), shorten(value, depth - 1)))
                        .collect::<Map<_, _>>(),
                )
            }
            Value::Array(all) => {
                let mut items: Vec<Value> =
                    all.iter().take(3).map(|value| shorten(value, depth - 1)).collect();
                items.extend((all.len() > 3).then(|| json!("...")));
                Value::Array(items)
            }
            Value::String(text) => json!(truncate_text(text, 120)),
            other => other.clone(),
        }
    }
    shorten(value, levels)
        .to_string()
        .replace("\"{...}\"", "{...}")
        .replace("\"[...]\"", "[...]")
        .replace("\"{}\"", "{}")
        .replace("\"[]\"", "[]")
}

/// The most differences that are listed.
const MAX_DIFFERENCES: usize = 5;

/// The changed paths with their new values: `.context.name = "Ada"`.
#[must_use]
pub fn describe_changes(old: &Value, new: &Value) -> String {
    let mut changes = Vec::new();
    collect_changes(old, new, &mut String::new(), &mut changes);
    if changes.is_empty() {
        return "nothing changed".into();
    }
    let more = changes.len().saturating_sub(MAX_DIFFERENCES);
    changes.truncate(MAX_DIFFERENCES);
    let listed = changes.join(", ");
    if more > 0 { format!("{listed} and {more} more") } else { listed }
}

fn collect_changes(old: &Value, new: &Value, path: &mut String, changes: &mut Vec<String>) {
    if old == new || path.starts_with("._metadata") {
        return;
    }
    let length = path.len();
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            for (key, value) in new {
                push_path_key(path, key);
                match old.get(key) {
                    Some(before) => collect_changes(before, value, path, changes),
                    None => changes.push(format!("{path} = {}", format_value(value))),
                }
                path.truncate(length);
            }
            for key in old.keys().filter(|key| !new.contains_key(*key)) {
                push_path_key(path, key);
                changes.push(format!("{path} is gone"));
                path.truncate(length);
            }
        }
        (Value::Array(old), Value::Array(new)) if new.len() >= old.len() && old[..] == new[..old.len()] => {
            for (n, value) in new.iter().enumerate().skip(old.len()) {
                changes.push(format!("{path}[{n}] = {}", format_value(value)));
            }
        }
        _ => changes.push(format!("{} = {}", if path.is_empty() { "." } else { path }, format_value(new))),
    }
}

fn push_path_key(path: &mut String, key: &str) {
    let plain =
        key.chars().all(|c| c.is_alphanumeric() || c == '_') && !key.starts_with(|c: char| c.is_numeric());
    if plain && !key.is_empty() {
        path.push('.');
        path.push_str(key);
    } else {
        path.push_str(&format!("[{}]", json!(key)));
    }
}

/// The characters of one page of a result: some 250 tokens.
const PAGE_CHARS: usize = 1000;

/// One page of the results of a filter, from 1. Where there are several pages it says which characters these are, and the
/// call that gives the next page, so that a whole file can be read. `call` is the call without its page.
pub fn result_page(results: &[Value], call: &str, page: usize) -> Result<String, String> {
    if results.is_empty() {
        return Ok("nothing".into());
    }
    let text = results.iter().map(Value::to_string).collect::<Vec<_>>().join(" ");
    let chars = text.chars().count();
    let pages = chars.div_ceil(PAGE_CHARS);
    if page > pages {
        return Err(format!("the result has {pages} {}", if pages == 1 { "page" } else { "pages" }));
    }
    if pages == 1 {
        return Ok(text);
    }
    let first = (page - 1) * PAGE_CHARS;
    let shown: String = text.chars().skip(first).take(PAGE_CHARS).collect();
    let last = first + shown.chars().count();
    let next = if page < pages { format!("; next: {call} page {}", page + 1) } else { String::new() };
    Ok(format!("{shown} (characters {} to {last} of {chars}, page {page} of {pages}{next})", first + 1))
}

/// A value on one line, not too long. It describes a change: the whole value is in the file.
fn format_value(value: &Value) -> String {
    truncate_text(&value.to_string(), 500)
}

fn truncate_text(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_diff_lists_changed_paths() {
        let old =
            json!({"_metadata": {"last_modified": 1}, "context": {"name": "Bob"}, "list": [1], "gone": 0});
        let new =
            json!({"_metadata": {"last_modified": 2}, "context": {"name": "Ada", "a b": {}}, "list": [1, 2]});
        assert_eq!(
            describe_changes(&old, &new),
            r#".context.name = "Ada", .context["a b"] = {}, .list[1] = 2, .gone is gone"#
        );
        assert_eq!(describe_changes(&old, &old), "nothing changed");
        assert_eq!(describe_changes(&old, &json!(null)), ". = null");
        let many = json!({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "g": 7});
        assert_eq!(describe_changes(&json!({}), &many), ".a = 1, .b = 2, .c = 3, .d = 4, .e = 5 and 2 more");
    }

    #[test]
    fn notes_times_are_iso_8601() {
        let mut notes = empty_notes(1_763_195_400_123);
        let about = |notes: &Value| {
            (notes["_metadata"]["created"].clone(), notes["_metadata"]["last_modified"].clone())
        };
        let written = json!("2025-11-15T08:30:00.123Z");
        assert_eq!(about(&notes), (written.clone(), written.clone()));
        set_modified_time(&mut notes, 1_763_195_401_000);
        assert_eq!(about(&notes), (written.clone(), json!("2025-11-15T08:30:01.000Z")));
        let mut imported = json!({"_metadata": {"created": 1_763_195_400_123_i64}});
        set_modified_time(&mut imported, 0);
        assert_eq!(about(&imported), (written, json!("1970-01-01T00:00:00.000Z")));
    }

    /// The pages of a result, concatenated, are the result: nothing is cut away.
    #[test]
    fn notes_pages_are_the_whole_result() {
        let call = "jq '.' notes.json";
        assert_eq!(result_page(&[], call, 1), Ok("nothing".into()));
        assert_eq!(result_page(&[json!("a"), json!(2)], call, 1), Ok("\"a\" 2".into()));
        assert_eq!(result_page(&[json!(1)], call, 2), Err("the result has 1 page".into()));
        for length in [PAGE_CHARS - 2, PAGE_CHARS - 1, 2 * PAGE_CHARS, 12_345] {
            let value = json!("é".repeat(length));
            let pages = (length + 2).div_ceil(PAGE_CHARS);
            let mut read = String::new();
            for page in 1..=pages {
                let shown = result_page(std::slice::from_ref(&value), call, page).expect("a page");
                let (text, about) = shown.split_once(" (characters ").unwrap_or((&shown, ""));
                let next = format!("; next: {call} page {})", page + 1);
                assert_eq!(about.ends_with(&next), page < pages, "{about}");
                read += text;
            }
            assert_eq!(read, value.to_string());
            let behind = result_page(std::slice::from_ref(&value), call, pages + 1);
            assert!(behind.is_err_and(|error| error.starts_with(&format!("the result has {pages} page"))));
        }
    }

    #[test]
    fn notes_preview_is_two_levels_deep() {
        let mut notes = empty_notes(7);
        notes["topics"]["rust"] = json!({"deep": [1]});
        notes["reminders"] = json!(["a", "b", "c", "d"]);
        notes["context"]["empty"] = json!({});
        assert_eq!(
            preview(&notes, 1000),
            r#"{"topics":{"rust":{...}},"reminders":["a","b","c","..."],"context":{"empty":{}},"scratch":{}}"#
        );
    }

    #[test]
    fn notes_preview_is_bounded() {
        let mut notes = empty_notes(7);
        notes["topics"] = (0..100).map(|n| (format!("topic {n}"), json!(n))).collect::<Map<_, _>>().into();
        let text = preview(&notes, 400);
        assert!(
            text.starts_with(r#"{"topics":{...},"reminders":[],"#) && text.ends_with(SHORTENED),
            "{text}"
        );
        let wide: Map<_, _> = (0..70_000).map(|n| (format!("schlüssel {n}"), json!(n))).collect();
        for max in [200, 201, 202, 2048] {
            let text = preview(&json!(wide), max);
            assert!(text.len() <= max && text.ends_with(SHORTENED), "{max}: {text}");
        }
        assert!(check_size(&"x".repeat(MAX_DOCUMENT_BYTES)).is_ok());
        let error = check_size(&"x".repeat(MAX_DOCUMENT_BYTES + 1)).expect_err("too large");
        assert!(error.to_string().contains("262145 bytes and may have 262144 (256 KiB)"), "{error}");
    }
}
