//! Why a file could not be imported.

use super::format::ImportFormat;
use std::io;

/// Why a file could not be read to its end. Conversations that were returned before are complete.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("the file could not be read: {0}; check that it exists and may be opened")]
    Io(#[source] io::Error),
    #[error(
        "the file is not UTF-8 text: byte {byte}, in line {line}, is invalid; save the file as UTF-8 and \
         import it again"
    )]
    NotUtf8 {
        /// The line, counted from 1.
        line: u64,
        /// The byte of the file, counted from 0.
        byte: u64,
    },
    /// One record would take more memory than an import may.
    #[error("record {record} is longer than {limit} bytes; split the file and import the parts one by one")]
    TooLong {
        /// The conversation or line, counted from 1.
        record: u64,
        limit: u64,
    },
    /// The text is not JSON, or a value in it has the wrong type.
    #[error("record {record} cannot be read: {source}; the file is damaged or cut short: export it again")]
    Json {
        /// The conversation or line, counted from 1.
        record: u64,
        /// What is wrong, with line and column.
        source: serde_json::Error,
    },
    /// The text is JSON of another format.
    #[error("record {record} is not part of {format}: {why}; choose the format that the file has")]
    WrongFormat {
        format: ImportFormat,
        /// The conversation or line, counted from 1.
        record: u64,
        why: &'static str,
    },
    /// No line of a transcript names a speaker.
    #[error(
        "no line of the transcript names a speaker; put a heading such as '## User' or '## Assistant' above \
         each message"
    )]
    NoSpeakers,
    /// The caller has ended the import, for this reason.
    #[error(transparent)]
    Aborted(Box<dyn std::error::Error + Send + Sync>),
}
