//! The text of errors that servers report, made safe to show.

use halo_core::ErrorKind;
use reqwest::header::{self, HeaderMap};
use serde_json::Value;

/// How much of a server's error message is shown.
const MAX_SHOWN_CHARS: usize = 300;

/// The kind of an error by the code in its body: OpenAI's own, and llama.cpp's.
pub(crate) fn error_code_kind(body: &[u8]) -> ErrorKind {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let codes = [&value["error"]["code"], &value["error"]["type"]].map(Value::as_str);
    let too_long = ["context_length_exceeded", "exceed_context_size_error"];
    if codes.iter().flatten().any(|code| too_long.contains(code)) {
        ErrorKind::ContextLengthExceeded
    } else {
        ErrorKind::Unavailable
    }
}

/// Replaces a key that a server repeats in its error.
pub(crate) fn redact_key(text: String, headers: &HeaderMap) -> String {
    match headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()) {
        Some(value) => text.replace(value.strip_prefix("Bearer ").unwrap_or(value), "…"),
        None => text,
    }
}

pub(crate) fn not_json_message(body: &[u8]) -> String {
    let page = body.trim_ascii_start().starts_with(b"<");
    let hint = if page { "that is a web page: check the address" } else { "check the address" };
    format!("JSON was expected, but this came: '{}'; {hint}", sanitize(&String::from_utf8_lossy(body)))
}

/// The message of an error body, from any of the usual fields.
pub(crate) fn error_message(body: &[u8]) -> String {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let fields = ["/error/message", "/error", "/detail/msg", "/detail", "/message", "/msg"];
    let message = fields.iter().find_map(|field| value.pointer(field).and_then(Value::as_str));
    message.map_or_else(|| sanitize(&String::from_utf8_lossy(body)), sanitize)
}

/// Text of a server as one line of limited length, without control characters that a terminal would obey.
pub(crate) fn sanitize(text: &str) -> String {
    let words: Vec<&str> = text.split(|c: char| c.is_whitespace() || c.is_control()).collect();
    let line = words.iter().filter(|w| !w.is_empty()).copied().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}
