//! Random tool calls and random patches of the notes, as a hostile model writes them.

#![no_main]

use halo_engine::tools::call::{ToolCall, parse_command, trailing_command};
use halo_engine::tools::{notes, patch};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let document = notes::empty_notes(0);
    let _ = patch::apply_patch(&document, text);
    let command = trailing_command(text).unwrap_or(text);
    if let Ok(ToolCall::Patch { patch: text, .. }) = parse_command(command)
        && let Ok(patched) = patch::apply_patch(&document, &text)
    {
        let _ = notes::describe_changes(&document, &patched);
        let _ = notes::preview(&patched, 500);
    }
});
