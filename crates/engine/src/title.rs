//! Names of conversations that their users did not name: the first words of the first message. Such a name is text of the
//! conversation, so it is forgotten with that message.

use halo_core::name::is_invisible_control;

pub(crate) const MAX_TITLE_CHARS: usize = 48;
/// Leaves room for a number or the word "branch" within the length that a store allows.
const MAX_TITLE_BYTES: usize = 160;

/// The name of a conversation that begins with this message; empty where the message has no words.
#[must_use]
pub fn conversation_title(message: &str) -> String {
    let text: String = message.chars().take(400).map(|c| if c.is_control() { ' ' } else { c }).collect();
    let text = text.replace(is_invisible_control, "");
    let mut title: String = collapse_whitespace(&text).chars().take(MAX_TITLE_CHARS).collect();
    while title.len() > MAX_TITLE_BYTES {
        title.pop();
    }
    title.trim().to_owned()
}

/// Whether a name is the title of a message, also with what copies and branches have after it: `Tea 2`, `Tea · branch 2`,
/// `Tea (original)`.
pub(crate) fn is_title_of(name: &str, message: &str) -> bool {
    let title = conversation_title(message);
    let Some(rest) = name.strip_prefix(&title).filter(|_| !title.is_empty()) else { return false };
    let is_suffix =
        |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit()) || rest.starts_with(['·', '(']);
    rest.is_empty() || rest.strip_prefix(' ').is_some_and(is_suffix)
}

/// A name without words of the conversation, from the time of its creation.
pub(crate) fn wordless_name(created: i64) -> String {
    let day = jiff::Timestamp::from_millisecond(created).map(|at| at.strftime("%F").to_string());
    format!("chat {}", day.unwrap_or_default()).trim_end().to_owned()
}

/// Whether a name is one of these, also with a number after it.
pub(crate) fn is_wordless_name(name: &str, created: i64) -> bool {
    let rest = name.strip_prefix(&wordless_name(created));
    rest.is_some_and(|rest| rest.chars().all(|c| c == ' ' || c.is_ascii_digit()))
}

pub(crate) fn collapse_whitespace(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn title_is_the_first_words_of_a_message() {
        assert_eq!(conversation_title("  Hello\n\tworld\u{1b} \u{202e}"), "Hello world");
        assert_eq!(conversation_title(&"word ".repeat(100)).chars().count(), 48);
        assert!(conversation_title(&"🌱".repeat(100)).len() <= MAX_TITLE_BYTES);
        assert_eq!(conversation_title(" \n "), "");
    }

    #[test]
    fn title_is_recognized_in_names_of_copies_and_branches() {
        for name in ["Tea time", "Tea time 2", "Tea time · branch 3", "Tea time (original)", "Tea time (m) 2"]
        {
            assert!(is_title_of(name, "Tea  time"), "{name}");
        }
        for name in ["Tea", "Tea timer", "Tea time at five", "main", ""] {
            assert!(!is_title_of(name, "Tea time"), "{name}");
        }
        assert!(!is_title_of("main", ""));
        assert_eq!(wordless_name(1_763_424_000_000), "chat 2025-11-18");
        assert!(
            ["", " 2"]
                .iter()
                .all(|end| is_wordless_name(&format!("chat 2025-11-18{end}"), 1_763_424_000_000))
        );
        assert!(!is_wordless_name("chat 2025-11-18 on tea", 1_763_424_000_000));
    }
}
