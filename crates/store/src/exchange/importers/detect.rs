//! Detection of a file's format from its first bytes.
//!
//! The first bytes of a large file are incomplete JSON, so they are not parsed: the JSON keys are collected with their
//! depth, and a format is recognised by keys that no other has.

use super::format::ImportFormat;
use super::markdown;
use std::collections::BTreeSet;
use std::path::Path;

/// How many of the first bytes are read.
const DETECT_BYTES: usize = 64 << 10;

/// Deeper keys are data, not part of the format.
const MAX_KEY_DEPTH: usize = 3;

/// Whether a file is a zip archive. Account exports are downloaded as such, and must be unpacked first.
#[must_use]
pub fn is_zip(head: &[u8]) -> bool {
    head.starts_with(b"PK\x03\x04") || head.starts_with(b"PK\x05\x06")
}

/// The format of the file that begins with `head`, of which the first 64 KiB are enough.
#[must_use]
pub fn detect_format(head: &[u8], file_name: &str) -> Option<ImportFormat> {
    let head = &head[..head.len().min(DETECT_BYTES)];
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    if is_zip(head) || head.contains(&0) {
        return None;
    }
    detect_json_format(head).or_else(|| {
        let extension = Path::new(file_name).extension().and_then(|e| e.to_str()).unwrap_or_default();
        let is_markdown = ["md", "markdown"].iter().any(|e| extension.eq_ignore_ascii_case(e));
        (is_markdown || markdown::has_speakers(&String::from_utf8_lossy(head)))
            .then_some(ImportFormat::Markdown)
    })
}

fn detect_json_format(head: &[u8]) -> Option<ImportFormat> {
    let first = head.iter().find(|b| !b.is_ascii_whitespace())?;
    let keys = json_keys(head);
    let has = |depth: usize, key: &str| keys.contains(&(depth, key.as_bytes()));
    // The depth of the keys of a record: in an array, at the top, or in the `conversations` of an object.
    let depth = match first {
        b'[' => 2,
        b'{' if has(1, "conversations") => 3,
        b'{' => 1,
        _ => return None,
    };
    let alone = depth == 1;
    if has(depth, "mapping") {
        Some(ImportFormat::ChatGpt)
    } else if has(depth, "chat_messages") {
        Some(ImportFormat::Claude)
    } else if alone && (has(1, "tokens") || (has(1, "conversation") && has(2, "tokens"))) {
        Some(ImportFormat::Weave)
    } else if alone && (has(1, "mes") || has(1, "chat_metadata") || has(1, "character_name")) {
        Some(ImportFormat::SillyTavern)
    } else if has(depth, "messages") || (has(depth, "role") && has(depth, "content")) {
        Some(ImportFormat::OpenAi)
    } else {
        None
    }
}

/// The keys of the outer objects with their depth, as far as the text goes.
fn json_keys(text: &[u8]) -> BTreeSet<(usize, &[u8])> {
    let mut keys = BTreeSet::new();
    let mut depth = 0usize;
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        at += 1;
        match byte {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'"' => {
                let start = at;
                while text.get(at).is_some_and(|b| *b != b'"') {
                    at += if text[at] == b'\\' { 2 } else { 1 };
                }
                let string = text.get(start..at).unwrap_or_default();
                at += 1;
                let rest = text.get(at..).unwrap_or_default();
                let is_key = rest.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b':');
                if is_key && depth <= MAX_KEY_DEPTH {
                    keys.insert((depth, string));
                }
            }
            _ => {}
        }
    }
    keys
}
