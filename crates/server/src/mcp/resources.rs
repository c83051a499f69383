//! Conversations as resources: `halo://conversation/NAME`, with the name percent-encoded.

use super::calls::{latest_conversations, timestamp};
use crate::app::App;
use crate::error::{ApiResult, ErrorResponse};
use crate::search::load_bodies;
use halo_core::token::ChunkId;
use rmcp::model::{Resource, ResourceContents, ResourceTemplate};
use std::fmt::Write;

const SCHEME: &str = "halo://conversation/";

/// The most conversations in the list; `list_conversations` counts all.
const MAX_LISTED: usize = 1000;

/// The most text of a conversation, from its end.
const MAX_TEXT_BYTES: usize = 1 << 20;

pub(super) fn list(app: &App) -> ApiResult<Vec<Resource>> {
    let conversations = latest_conversations(app)?;
    let resource = |conversation: &halo_core::store::ConversationSummary| {
        let (turns, updated) = (conversation.turns, timestamp(conversation.updated));
        Resource::new(uri_of(&conversation.name), conversation.name.clone())
            .with_description(format!("A conversation with {turns} messages, changed at {updated}"))
            .with_mime_type("text/plain")
    };
    Ok(conversations.iter().take(MAX_LISTED).map(resource).collect())
}

pub(super) fn template() -> ResourceTemplate {
    ResourceTemplate::new(format!("{SCHEME}{{name}}"), "conversation")
        .with_description("A conversation by its name: all its messages in order, pruned ones too")
        .with_mime_type("text/plain")
}

/// The messages of a conversation in order, in or out of the context window, without deleted ones.
pub(super) fn read(app: &App, uri: &str) -> ApiResult<ResourceContents> {
    let unknown =
        || ErrorResponse::not_found(format!("there is no resource '{uri}'; they begin with {SCHEME}"));
    let name = uri.strip_prefix(SCHEME).and_then(percent_decode).ok_or_else(unknown)?;
    let state = app.view_nonempty_conversation(&name)?.snapshot.state;
    let mut timeline = state.timeline.clone();
    let chunks: Vec<ChunkId> =
        timeline.chunks().filter(|chunk| !chunk.is_deleted()).map(|chunk| chunk.id()).collect();
    app.with_reader(|store| load_bodies(store, &name, &mut timeline, &chunks))?;
    let mut text = String::new();
    let mut last_turn = None;
    for chunk in chunks.iter().filter_map(|&id| timeline.chunk(id)) {
        let id = chunk.id();
        if last_turn.replace(id.turn) != Some(id.turn) {
            let _ = write!(text, "\n\n{}: ", id.role.name());
        }
        text.push_str(&chunk.text());
    }
    let text = text.trim_start();
    if text.len() <= MAX_TEXT_BYTES {
        return Ok(ResourceContents::text(text, uri));
    }
    let start = text.ceil_char_boundary(text.len() - MAX_TEXT_BYTES);
    let shown = &text[start..];
    let note = format!("[{start} bytes before this are left out: search them with recall]\n\n{shown}");
    Ok(ResourceContents::text(note, uri))
}

fn uri_of(name: &str) -> String {
    let encode = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    name.bytes().map(encode).fold(SCHEME.to_owned(), |uri, part| uri + &part)
}

/// None if a `%` is not followed by two hexadecimal digits, or the result is not UTF-8.
fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, more @ ..] = rest {
        rest = more;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = more.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))?;
        bytes.push(u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?);
        rest = &more[2..];
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mcp_resource_uris_hold_any_name() {
        for name in ["main", "Tea & cake / 100%", "Größe", "a b"] {
            let uri = uri_of(name);
            assert!(uri.is_ascii() && !uri.contains(' '), "{uri}");
            assert_eq!(uri.strip_prefix(SCHEME).and_then(percent_decode).as_deref(), Some(name));
        }
        for invalid in ["%", "%4", "%zz", "%+1", "%ff"] {
            assert_eq!(percent_decode(invalid), None, "{invalid}");
        }
    }
}
