//! What an import is asked to do.

use halo_core::Error;
use halo_core::chunker::ChunkSize;
use halo_core::model::Model;
use halo_core::row_store::Row;
use halo_core::token::Brightness;

pub struct ImportRequest<'a> {
    /// The name of the file, which may decide its format.
    pub file_name: &'a str,
    /// The format, if it is not to be detected.
    pub format: Option<&'a str>,
    /// The name of the conversation; without it, the name in the file.
    pub name: Option<&'a str>,
    pub chunk_size: ChunkSize,
    /// The brightness of tokens for which the file has none.
    pub initial_brightness: Brightness,
    /// The model that tokenizes the text.
    pub model: Option<&'a mut dyn Model>,
    /// Validates the rows of a namespace before they are written; without it, exports of namespaces are refused.
    pub validate_rows: Option<&'a RowValidator<'a>>,
}

/// Takes the name and the rows of a namespace, and fails if they do not belong together.
pub type RowValidator<'a> = dyn Fn(&str, &[Row]) -> Result<(), Error> + 'a;
