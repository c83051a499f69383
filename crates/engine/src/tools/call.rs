//! A call of a tool, as the model writes it: `<tool>jq '.context.name = "Ada"' notes.json > output</tool>`, or
//! `<tool>patch notes.json [{"op": "add", …}]</tool>`.

/// What opens and closes a call.
pub const OPEN: &str = "<tool>";
/// What closes a call: an answer stops behind it.
pub const CLOSE: &str = "</tool>";

/// What a call asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// A filter over a file; its result is read, or kept in the file.
    Jq {
        /// The filter.
        filter: String,
        /// The file.
        file: String,
        /// Whether the result is kept.
        write: bool,
    },
    /// An RFC 6902 patch of a file.
    Patch {
        /// The file.
        file: String,
        /// The patch, as JSON.
        patch: String,
    },
}

/// The command of the call that a text ends with, if it ends with one.
#[must_use]
pub fn command(text: &str) -> Option<&str> {
    let (_, command) = text.trim_end().strip_suffix(CLOSE)?.rsplit_once(OPEN)?;
    Some(command.trim())
}

/// Reads a command; an error says what is wrong with it.
///
/// # Errors
/// When it is none.
pub fn read(command: &str) -> Result<Call, String> {
    if let Some(rest) = word(command, "patch") {
        let (file, patch) = rest.split_once(char::is_whitespace).ok_or("write: patch notes.json [ … ]")?;
        return Ok(Call::Patch { file: name(file)?, patch: patch.trim().to_owned() });
    }
    let Some(rest) = word(command, "jq") else {
        return Err("there are jq and patch: jq '.topics' notes.json".into());
    };
    let (rest, write) = match rest.rsplit_once('>') {
        Some((rest, "output" | " output")) => (rest.trim_end(), true),
        _ => (rest, false),
    };
    let quoted = |quote: char| {
        let (filter, file) = rest.strip_prefix(quote)?.rsplit_once(quote)?;
        Some((filter, file.trim()))
    };
    let bare = || rest.rsplit_once(char::is_whitespace).map(|(filter, file)| (filter.trim(), file));
    let parts = quoted('\'').or_else(|| quoted('"')).or_else(bare);
    let (filter, file) =
        parts.ok_or("write: jq 'FILTER' notes.json, and > output behind it to keep the result")?;
    if filter.trim().is_empty() {
        return Err("the filter is empty: . is all of the file".into());
    }
    Ok(Call::Jq { filter: filter.to_owned(), file: name(file)?, write })
}

fn word<'a>(command: &'a str, word: &str) -> Option<&'a str> {
    let rest = command.strip_prefix(word)?;
    rest.starts_with(char::is_whitespace).then(|| rest.trim())
}

/// A file's name: no path, nothing that could be one.
fn name(file: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    match file.strip_suffix(".json") {
        Some(stem) if !stem.is_empty() && stem.len() <= 60 && stem.chars().all(plain) => Ok(file.to_owned()),
        _ => Err(format!("'{}' is no file: notes.json is one", file.chars().take(60).collect::<String>())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read() {
        let jq = |filter: &str, write| Call::Jq { filter: filter.into(), file: "notes.json".into(), write };
        let cases = [
            ("jq '.' notes.json", Ok(jq(".", false))),
            ("jq . notes.json", Ok(jq(".", false))),
            ("jq \".topics\" notes.json", Ok(jq(".topics", false))),
            ("jq '.context.name = \"Ada\"' notes.json > output", Ok(jq(".context.name = \"Ada\"", true))),
            ("jq '.a > 3' notes.json", Ok(jq(".a > 3", false))),
            ("jq '.a = \"it''s\"' notes.json >output", Ok(jq(".a = \"it''s\"", true))),
            (
                "patch notes.json [{\"op\":\"remove\",\"path\":\"/a\"}]",
                Ok(Call::Patch {
                    file: "notes.json".into(),
                    patch: "[{\"op\":\"remove\",\"path\":\"/a\"}]".into(),
                }),
            ),
            ("jq '' notes.json", Err("the filter is empty")),
            ("jq '.' /etc/passwd", Err("'/etc/passwd' is no file")),
            ("jq '.' ../notes.json", Err("'../notes.json' is no file")),
            ("jq '.'", Err("")),
            ("jqx . notes.json", Err("there are jq and patch")),
            ("rm -rf /", Err("there are jq and patch")),
            ("patch notes.json", Err("write: patch")),
            ("", Err("there are jq and patch")),
        ];
        for (command, expected) in cases {
            match (read(command), expected) {
                (Ok(call), Ok(expected)) => assert_eq!(call, expected, "{command}"),
                (Err(why), Err(begins)) => assert!(why.starts_with(begins), "{command}: {why}"),
                (read, expected) => panic!("{command}: {read:?} where {expected:?}"),
            }
        }
    }

    #[test]
    fn a_call_is_what_a_text_ends_with() {
        for (text, expected) in [
            ("Let me see. <tool>jq . notes.json</tool>", Some("jq . notes.json")),
            ("<tool>a</tool> and <tool> b </tool>\n", Some("b")),
            ("<tool><tool>x</tool>", Some("x")),
            ("<tool>a</tool> and more", None),
            ("a</tool>", None),
            ("<tool>a", None),
            ("", None),
        ] {
            assert_eq!(command(text), expected, "{text}");
        }
    }
}
