//! Limits of texts.

use crate::error::Error;

/// The first `limit` characters of a text, with an ellipsis where it is longer.
pub(crate) fn truncate_chars(text: &str, limit: usize) -> String {
    match text.char_indices().nth(limit) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Fails if a text is longer than `limit` characters. `what` names it with its article: "a billboard".
pub(crate) fn check_length(what: &str, text: &str, limit: usize) -> Result<(), Error> {
    let chars = text.chars().count();
    if chars > limit {
        return Err(Error::invalid_input(format!(
            "{what} has {limit} characters at most, and this one has {chars}"
        )));
    }
    Ok(())
}
