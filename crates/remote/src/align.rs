//! The texts of tokens, where a server reports only some of them.
//!
//! Servers decode each token alone. A token that holds part of a character is then empty or a replacement character, and
//! some servers report special tokens as empty too. The ids are right, and the whole text is known, so the text is
//! aligned to the ids. A token without text is a part of a character, whose last part gets the whole character, or a
//! special token, which gets its name. In every case the texts of the tokens, concatenated, are the text.

use halo_core::model::ModelToken;

const MAX_SPECIAL_NAME_BYTES: usize = 80;
/// The most characters and names that may be missing between two tokens with text.
const MAX_MISSING_UNITS: usize = 64;

/// What looks like the name of a special token at the start of a text: `<|im_end|>`, `</s>`, `[INST]`. The caller decides
/// whether it is one.
pub(crate) fn special_token_name(text: &str) -> Option<&str> {
    let close = match text.as_bytes().first()? {
        b'<' => '>',
        b'[' => ']',
        _ => return None,
    };
    let name = &text[..=text.find(close)?];
    let is_name = name.len() <= MAX_SPECIAL_NAME_BYTES
        && name.chars().any(char::is_alphabetic)
        && !name.chars().any(|c| c.is_whitespace() || c.is_control());
    is_name.then_some(name)
}

/// Aligns a text to its tokens. The second value is false where that fails; then the last token gets the rest.
pub(crate) fn align_tokens_to_text(text: &str, mut tokens: Vec<ModelToken>) -> (Vec<ModelToken>, bool) {
    let joined: String = tokens.iter().map(|p| p.text.as_str()).collect();
    if joined == text {
        return (tokens, true);
    }
    // Some vocabularies put a space before every text. It is removed, and with it a token that is nothing else.
    if joined.strip_prefix(' ') == Some(text)
        && let Some(first) = tokens.iter().position(|p| !p.text.is_empty())
    {
        tokens[first].text.remove(0);
        if tokens[first].text.is_empty() {
            tokens.remove(first);
        }
        return (tokens, true);
    }
    let mut rest = text;
    // The number of tokens before this one that have no text yet.
    let mut open = 0;
    for at in 0..tokens.len() {
        let mut token_text = std::mem::take(&mut tokens[at].text);
        if !rest.starts_with(&token_text) {
            token_text.retain(|c| c != '\u{fffd}');
        }
        if at == 0 && !rest.starts_with(&token_text) && token_text.starts_with(' ') {
            token_text.remove(0);
        }
        if token_text.is_empty() {
            // The text continues with ASCII, so this is not part of a character but a special token.
            match special_token_name(rest).filter(|_| open == 0) {
                Some(name) => {
                    tokens[at].text = name.to_owned();
                    rest = &rest[name.len()..];
                }
                None => open += 1,
            }
            continue;
        }
        let Some(missing) = missing_units(rest, &token_text, open) else {
            tokens[at..].iter_mut().for_each(|token| token.text.clear());
            return (append_rest_to_last(tokens, rest), false);
        };
        let gap = assign_units(&mut tokens[at - open..at], &missing);
        tokens[at].text = format!("{gap}{token_text}");
        rest = &rest[missing.iter().map(|unit| unit.len()).sum::<usize>() + token_text.len()..];
        open = 0;
    }
    let end = tokens.len();
    match textless_units(rest).take(MAX_MISSING_UNITS + open).collect::<Option<Vec<_>>>() {
        Some(missing) if open > 0 && missing.iter().map(|u| u.len()).sum::<usize>() == rest.len() => {
            assign_units(&mut tokens[end - open..], &missing);
            (tokens, true)
        }
        _ => (append_rest_to_last(tokens, rest), rest.is_empty()),
    }
}

fn append_rest_to_last(mut tokens: Vec<ModelToken>, rest: &str) -> Vec<ModelToken> {
    if let Some(last) = tokens.last_mut() {
        last.text.push_str(rest);
    }
    tokens
}

/// What tokens without text may stand for, one after the other: a non-ASCII character, or the name of a special token.
/// The last item is `None` where the text continues with neither.
fn textless_units(text: &str) -> impl Iterator<Item = Option<&str>> {
    let mut rest = Some(text).filter(|text| !text.is_empty());
    std::iter::from_fn(move || {
        let text = rest?;
        let first = text.chars().next()?;
        let unit = if first.is_ascii() { special_token_name(text) } else { Some(&text[..first.len_utf8()]) };
        rest = unit.map(|unit| &text[unit.len()..]).filter(|rest| !rest.is_empty());
        Some(unit)
    })
}

/// The units before `token_text` in the rest. Tokens without text get at least one, where possible.
fn missing_units<'a>(rest: &'a str, token_text: &str, open: usize) -> Option<Vec<&'a str>> {
    let adjacent = rest.starts_with(token_text);
    if adjacent && open == 0 {
        return Some(Vec::new());
    }
    let mut units: Vec<&str> = Vec::new();
    let mut remaining = rest;
    for unit in textless_units(rest).take(MAX_MISSING_UNITS) {
        let Some(unit) = unit else { break };
        units.push(unit);
        remaining = &remaining[unit.len()..];
        if remaining.starts_with(token_text) {
            return Some(units);
        }
    }
    adjacent.then(Vec::new)
}

/// Assigns the missing units to the tokens without text. Returns the units where there are no such tokens.
fn assign_units(open: &mut [ModelToken], missing: &[&str]) -> String {
    let (mut tokens, mut units) = (open, missing);
    if tokens.is_empty() {
        return units.concat();
    }
    // A name is one token. The characters share the other tokens evenly: their real numbers are unknown.
    while let Some((name, before)) = units.split_last().filter(|(u, _)| u.starts_with(['<', '['])) {
        if tokens.len() <= before.len() {
            break;
        }
        let (last, fewer) =
            std::mem::take(&mut tokens).split_last_mut().expect("the list is longer than another");
        last.text = (*name).to_owned();
        (tokens, units) = (fewer, before);
    }
    for (j, unit) in units.iter().enumerate() {
        let at = ((j + 1) * tokens.len()).div_ceil(units.len()) - 1;
        tokens[at].text.push_str(unit);
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::token::TokenId;
    use proptest::prelude::*;

    fn aligned(text: &str, token_texts: &str) -> String {
        let tokens = token_texts.split('|').map(|s| ModelToken { id: TokenId(0), text: s.into() }).collect();
        let (tokens, complete) = align_tokens_to_text(text, tokens);
        let texts: Vec<&str> = tokens.iter().map(|p| p.text.as_str()).collect();
        assert_eq!(texts.concat(), text);
        format!("{}{}", texts.join("|"), if complete { "" } else { " !" })
    }

    #[test]
    fn align_assigns_text_to_tokens() {
        let cases = [
            ("Hello you", "Hello| you", "Hello| you"),
            // A character of three tokens, which servers report as empty or as replacement characters.
            ("a😀b", "a||||b", "a|||😀|b"),
            ("a😀b", "a|\u{fffd}|\u{fffd}|b", "a||😀|b"),
            ("😀", "|||", "|||😀"),
            ("😀😁!", "||||||!", "||😀|||😁|!"),
            // A token with a space and part of a character; one with part of a character and more.
            ("a 😀b", "a| ||b", "a| |😀|b"),
            ("a 😀! b", "a| |! b", "a| |😀! b"),
            // A text with a replacement character of its own.
            ("a\u{fffd}b", "a|\u{fffd}|b", "a|\u{fffd}|b"),
            // Special tokens without text, also before text that is part of their names.
            ("<Xim>im", "|im", "<Xim>|im"),
            ("é<X>\n", "|||\n", "|é|<X>|\n"),
            ("<X>é<Y>", "||", "<X>|é|<Y>"),
            ("[INST] hi</s>", "| hi|", "[INST]| hi|</s>"),
            // A space that the vocabulary puts first.
            ("Hello you", " Hello| you", "Hello| you"),
            (" Hello", " | Hello", " Hello"),
            ("é", " ||", "||é"),
            // The same character as two tokens and as one.
            ("éé", "||é", "|é|é"),
            // Text that cannot be aligned.
            ("Hello you", "Hello| them|!", "Hello|| you !"),
            ("Hello you", "Hello", "Hello you !"),
            ("a b", "a||b", "a|| b !"),
        ];
        for (text, token_texts, expected) in cases {
            assert_eq!(aligned(text, token_texts), expected, "{text:?} aligned to {token_texts:?}");
        }
    }

    proptest! {
        #[test]
        fn align_preserves_the_whole_text(text in "[ab<>|é😀 ]{1,12}", token_texts in prop::collection::vec("[ab<>|é😀 \u{fffd}]{0,3}", 1..8)) {
            let tokens = token_texts.into_iter().map(|text| ModelToken { id: TokenId(0), text }).collect();
            let (tokens, _) = align_tokens_to_text(&text, tokens);
            prop_assert!(!tokens.is_empty());
            prop_assert_eq!(tokens.iter().map(|p| p.text.as_str()).collect::<String>(), text);
        }

        #[test]
        fn align_handles_bytes_split_anywhere(text in "[a-c é😀\n]{1,12}", cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..10)) {
            let mut at: Vec<usize> = cuts.iter().map(|c| c.index(text.len())).filter(|&c| c > 0).collect();
            at.push(text.len());
            at.sort_unstable();
            at.dedup();
            let mut from = 0;
            let mut tokens = Vec::new();
            for to in at {
                let token_text = String::from_utf8_lossy(&text.as_bytes()[from..to]).into_owned();
                tokens.push(ModelToken { id: TokenId(to as u32), text: token_text });
                from = to;
            }
            let (tokens, _) = align_tokens_to_text(&text, tokens);
            prop_assert_eq!(tokens.iter().map(|p| p.text.as_str()).collect::<String>(), text);
        }
    }
}
