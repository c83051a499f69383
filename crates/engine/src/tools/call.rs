//! A call of a tool, as the model writes it: `<tool>jq '.context.name = "Ada"' notes.json > output</tool>`,
//! `<tool>jq '.' notes.json page 2</tool>`, or `<tool>patch notes.json [{"op": "add", …}]</tool>`.

/// The tag before a call.
pub const OPEN_TAG: &str = "<tool>";
/// The tag after a call: generation stops there.
pub const CLOSE_TAG: &str = "</tool>";

/// A parsed tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolCall {
    /// A filter over a file; its result is returned, or written to the file.
    Jq {
        filter: String,
        file: String,
        /// Whether the result is written to the file.
        write: bool,
        /// The page of the result that is returned, from 1.
        page: usize,
    },
    /// An RFC 6902 patch of a file.
    Patch {
        file: String,
        /// The patch as JSON text.
        patch: String,
    },
}

/// The command of the call at the end of a text, if there is one.
#[must_use]
pub fn trailing_command(text: &str) -> Option<&str> {
    let (_, command) = text.trim_end().strip_suffix(CLOSE_TAG)?.rsplit_once(OPEN_TAG)?;
    Some(command.trim())
}

/// Parses a command; the error is for the model.
pub fn parse_command(command: &str) -> Result<ToolCall, String> {
    if let Some(rest) = strip_command_word(command, "patch") {
        let (file, patch) = rest.split_once(char::is_whitespace).ok_or("write: patch notes.json [ … ]")?;
        return Ok(ToolCall::Patch { file: check_file_name(file)?, patch: patch.trim().to_owned() });
    }
    let Some(rest) = strip_command_word(command, "jq") else {
        return Err("there are jq and patch: jq '.topics' notes.json".into());
    };
    let (rest, write) = match rest.rsplit_once('>') {
        Some((rest, "output" | " output")) => (rest.trim_end(), true),
        _ => (rest, false),
    };
    let (rest, page) = strip_page(rest, write)?;
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
    Ok(ToolCall::Jq { filter: filter.to_owned(), file: check_file_name(file)?, write, page })
}

/// A command without its page.
#[must_use]
pub fn without_page(command: &str) -> &str {
    strip_page(command, false).map_or(command, |(call, _)| call)
}

/// A call without its page, and the page: 1 where it names none.
fn strip_page(call: &str, write: bool) -> Result<(&str, usize), String> {
    let page = call.rsplit_once(".json page ").and_then(|(before, page)| {
        let page: usize = page.trim().parse().ok()?;
        Some((&call[..before.len() + ".json".len()], page))
    });
    match page {
        Some((_, 0)) => Err("pages begin with 1".into()),
        Some(_) if write => Err("a result that is written has no pages".into()),
        Some(page) => Ok(page),
        None => Ok((call, 1)),
    }
}

fn strip_command_word<'a>(command: &'a str, word: &str) -> Option<&'a str> {
    let rest = command.strip_prefix(word)?;
    rest.starts_with(char::is_whitespace).then(|| rest.trim())
}

/// A file name that is no path.
fn check_file_name(file: &str) -> Result<String, String> {
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
    fn tool_call_parses_jq_and_patch_commands() {
        let read = |filter: &str, write, page| ToolCall::Jq {
            filter: filter.into(),
            file: "notes.json".into(),
            write,
            page,
        };
        let jq = |filter: &str, write| read(filter, write, 1);
        let cases = [
            ("jq '.' notes.json", Ok(jq(".", false))),
            ("jq . notes.json", Ok(jq(".", false))),
            ("jq \".topics\" notes.json", Ok(jq(".topics", false))),
            ("jq '.context.name = \"Ada\"' notes.json > output", Ok(jq(".context.name = \"Ada\"", true))),
            ("jq '.a > 3' notes.json", Ok(jq(".a > 3", false))),
            ("jq '.a = \"it''s\"' notes.json >output", Ok(jq(".a = \"it''s\"", true))),
            (
                "patch notes.json [{\"op\":\"remove\",\"path\":\"/a\"}]",
                Ok(ToolCall::Patch {
                    file: "notes.json".into(),
                    patch: "[{\"op\":\"remove\",\"path\":\"/a\"}]".into(),
                }),
            ),
            ("jq '.' notes.json page 2", Ok(read(".", false, 2))),
            ("jq . notes.json page 12", Ok(read(".", false, 12))),
            ("jq '.a = \"x.json page 3\"' notes.json > output", Ok(jq(".a = \"x.json page 3\"", true))),
            ("jq '.' notes.json page 0", Err("pages begin with 1")),
            ("jq '.a = 1' notes.json page 2 > output", Err("a result that is written has no pages")),
            ("jq '.' notes.json page two", Err("'notes.json page two' is no file")),
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
            match (parse_command(command), expected) {
                (Ok(call), Ok(expected)) => assert_eq!(call, expected, "{command}"),
                (Err(error), Err(prefix)) => assert!(error.starts_with(prefix), "{command}: {error}"),
                (actual, expected) => panic!("{command}: {actual:?}, expected {expected:?}"),
            }
        }
    }

    #[test]
    fn tool_call_is_found_only_at_end_of_text() {
        for (text, expected) in [
            ("Let me see. <tool>jq . notes.json</tool>", Some("jq . notes.json")),
            ("<tool>a</tool> and <tool> b </tool>\n", Some("b")),
            ("<tool><tool>x</tool>", Some("x")),
            ("<tool>a</tool> and more", None),
            ("a</tool>", None),
            ("<tool>a", None),
            ("", None),
        ] {
            assert_eq!(trailing_command(text), expected, "{text}");
        }
    }
}
