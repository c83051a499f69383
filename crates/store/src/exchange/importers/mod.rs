//! Importers for files of other programs.
//!
//! [`detect_format`] finds the format from the first bytes, [`read`] returns one [`ForeignConversation`] after the other.
//! An importer takes text as it is written, and counts in [`ImportLosses`] what Halo has no place for: images, tool
//! calls, other branches. Files are untrusted: whatever they contain, the result is a conversation or an error.
//!
//! Memory: one conversation at a time. A record (a conversation of an account export, a line of a JSONL file) may be
//! 256 MiB long, a Markdown transcript as well, a Halo Weave export 1 GiB; longer ones are rejected. In memory a record
//! takes a few times as much.

mod chatgpt;
mod claude;
mod conversation;
mod date;
mod detect;
mod error;
mod format;
mod input;
mod json;
mod losses;
mod markdown;
mod openai;
mod sillytavern;
mod weave;

pub use conversation::{ForeignContent, ForeignConversation, ForeignIndexEntry, ForeignToken, ForeignTurn};
pub use detect::{detect_format, is_zip};
pub use error::ImportError;
pub use format::ImportFormat;
pub use losses::ImportLosses;

use std::io::BufRead;

/// Reads every conversation of a file, and calls `each` with one as soon as it is complete. An error of `each` ends the
/// import.
pub fn read(
    format: ImportFormat,
    input: &mut dyn BufRead,
    each: &mut dyn FnMut(ForeignConversation) -> Result<(), ImportError>,
) -> Result<(), ImportError> {
    match format {
        ImportFormat::Weave => weave::read(input, each),
        ImportFormat::SillyTavern => sillytavern::read(input, each),
        ImportFormat::ChatGpt => chatgpt::read(input, each),
        ImportFormat::Claude => claude::read(input, each),
        ImportFormat::OpenAi => openai::read(input, each),
        ImportFormat::Markdown => markdown::read(input, each),
    }
}
