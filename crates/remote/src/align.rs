//! The text of tokens, where a server tells less than all of it.
//!
//! Servers show a token by decoding its bytes alone. A token that holds part of a character is then empty, or has a
//! mark in its place, and some servers leave special tokens empty as well. The ids are right all the same, and the text
//! is known as a whole: so it is laid along the ids. What has no text of its own is a part of a character, of which the
//! last part gets the whole, or a special name. Whatever happens, the texts in a row are the text.

use halo_core::seams::Piece;

/// The longest name that a special token is taken to have, in bytes.
const LONGEST_NAME: usize = 80;
/// How many characters may be missing between two tokens that have their text.
const MOST_MISSING: usize = 64;

/// The name of a special token that a text may begin with: `<|im_end|>`, `</s>`, `[INST]`. Not every such word is a
/// special token; whoever asks knows more.
pub(crate) fn special_name(text: &str) -> Option<&str> {
    let close = match text.as_bytes().first()? {
        b'<' => '>',
        b'[' => ']',
        _ => return None,
    };
    let name = &text[..=text.find(close)?];
    let is_name = name.len() <= LONGEST_NAME
        && name.chars().any(char::is_alphabetic)
        && !name.chars().any(|c| c.is_whitespace() || c.is_control());
    is_name.then_some(name)
}

/// Lays a text along its tokens. Returns also whether that went well; if not, the last token has all the rest.
pub(crate) fn align(text: &str, mut pieces: Vec<Piece>) -> (Vec<Piece>, bool) {
    let joined: String = pieces.iter().map(|p| p.text.as_str()).collect();
    if joined == text {
        return (pieces, true);
    }
    // Some vocabularies begin every text with a space. A token that is nothing else is not ours.
    if joined.strip_prefix(' ') == Some(text)
        && let Some(first) = pieces.iter().position(|p| !p.text.is_empty())
    {
        pieces[first].text.remove(0);
        if pieces[first].text.is_empty() {
            pieces.remove(first);
        }
        return (pieces, true);
    }
    let mut rest = text;
    // How many tokens before this one have no text yet.
    let mut open = 0;
    for at in 0..pieces.len() {
        let mut said = std::mem::take(&mut pieces[at].text);
        if !rest.starts_with(&said) {
            said.retain(|c| c != '\u{fffd}');
        }
        if at == 0 && !rest.starts_with(&said) && said.starts_with(' ') {
            said.remove(0);
        }
        if said.is_empty() {
            // A part of a character cannot stand where something plain comes next, so this is a name.
            match special_name(rest).filter(|_| open == 0) {
                Some(name) => {
                    pieces[at].text = name.to_owned();
                    rest = &rest[name.len()..];
                }
                None => open += 1,
            }
            continue;
        }
        let Some(missing) = missing(rest, &said, open) else {
            pieces[at..].iter_mut().for_each(|piece| piece.text.clear());
            return (give_rest(pieces, rest), false);
        };
        let gap = place(&mut pieces[at - open..at], &missing);
        pieces[at].text = format!("{gap}{said}");
        rest = &rest[missing.iter().map(|unit| unit.len()).sum::<usize>() + said.len()..];
        open = 0;
    }
    let end = pieces.len();
    match units(rest).take(MOST_MISSING + open).collect::<Option<Vec<_>>>() {
        Some(missing) if open > 0 && missing.iter().map(|u| u.len()).sum::<usize>() == rest.len() => {
            place(&mut pieces[end - open..], &missing);
            (pieces, true)
        }
        _ => (give_rest(pieces, rest), rest.is_empty()),
    }
}

fn give_rest(mut pieces: Vec<Piece>, rest: &str) -> Vec<Piece> {
    if let Some(last) = pieces.last_mut() {
        last.text.push_str(rest);
    }
    pieces
}

/// What a token without text may stand for, one after the other: a character that is not one byte, or a name. A last
/// none where neither comes next.
fn units(text: &str) -> impl Iterator<Item = Option<&str>> {
    let mut rest = Some(text).filter(|text| !text.is_empty());
    std::iter::from_fn(move || {
        let text = rest?;
        let first = text.chars().next()?;
        let unit = if first.is_ascii() { special_name(text) } else { Some(&text[..first.len_utf8()]) };
        rest = unit.map(|unit| &text[unit.len()..]).filter(|rest| !rest.is_empty());
        Some(unit)
    })
}

/// What stands before `said` in the rest. Tokens without text must stand for something, if that is possible.
fn missing<'a>(rest: &'a str, said: &str, open: usize) -> Option<Vec<&'a str>> {
    let none = rest.starts_with(said);
    if none && open == 0 {
        return Some(Vec::new());
    }
    let mut found: Vec<&str> = Vec::new();
    let mut behind = rest;
    for unit in units(rest).take(MOST_MISSING) {
        let Some(unit) = unit else { break };
        found.push(unit);
        behind = &behind[unit.len()..];
        if behind.starts_with(said) {
            return Some(found);
        }
    }
    none.then(Vec::new)
}

/// Gives what was missing to the tokens that had no text. What cannot be given to any is returned.
fn place(open: &mut [Piece], missing: &[&str]) -> String {
    let (mut pieces, mut units) = (open, missing);
    if pieces.is_empty() {
        return units.concat();
    }
    // A name is one token. A character is as many as any other, as far as can be known.
    while let Some((name, before)) = units.split_last().filter(|(u, _)| u.starts_with(['<', '['])) {
        if pieces.len() <= before.len() {
            break;
        }
        let (last, fewer) =
            std::mem::take(&mut pieces).split_last_mut().expect("it is longer than something");
        last.text = (*name).to_owned();
        (pieces, units) = (fewer, before);
    }
    for (j, unit) in units.iter().enumerate() {
        let at = ((j + 1) * pieces.len()).div_ceil(units.len()) - 1;
        pieces[at].text.push_str(unit);
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::token::TokenId;
    use proptest::prelude::*;

    /// `|` between tokens.
    fn aligned(text: &str, said: &str) -> String {
        let pieces = said.split('|').map(|s| Piece { id: TokenId(0), text: s.into() }).collect();
        let (pieces, well) = align(text, pieces);
        let shown: Vec<&str> = pieces.iter().map(|p| p.text.as_str()).collect();
        assert_eq!(shown.concat(), text);
        format!("{}{}", shown.join("|"), if well { "" } else { " !" })
    }

    #[test]
    fn texts_are_laid_along_their_tokens() {
        let cases = [
            ("Hello you", "Hello| you", "Hello| you"),
            // A character in three parts, of which servers show nothing, or a mark.
            ("a😀b", "a||||b", "a|||😀|b"),
            ("a😀b", "a|\u{fffd}|\u{fffd}|b", "a||😀|b"),
            ("😀", "|||", "|||😀"),
            ("😀😁!", "||||||!", "||😀|||😁|!"),
            // A token with a space and a part; one with a part and more.
            ("a 😀b", "a| ||b", "a| |😀|b"),
            ("a 😀! b", "a| |! b", "a| |😀! b"),
            // A text that has the mark itself.
            ("a\u{fffd}b", "a|\u{fffd}|b", "a|\u{fffd}|b"),
            // Special tokens without text, also before words that are part of their names.
            ("<Xim>im", "|im", "<Xim>|im"),
            ("é<X>\n", "|||\n", "|é|<X>|\n"),
            ("<X>é<Y>", "||", "<X>|é|<Y>"),
            ("[INST] hi</s>", "| hi|", "[INST]| hi|</s>"),
            // A space that the vocabulary put first.
            ("Hello you", " Hello| you", "Hello| you"),
            (" Hello", " | Hello", " Hello"),
            ("é", " ||", "||é"),
            // The same character whole and in parts.
            ("éé", "||é", "|é|é"),
            // What cannot be laid anywhere.
            ("Hello you", "Hello| them|!", "Hello|| you !"),
            ("Hello you", "Hello", "Hello you !"),
            ("a b", "a||b", "a|| b !"),
        ];
        for (text, said, expected) in cases {
            assert_eq!(aligned(text, said), expected, "{text:?} along {said:?}");
        }
    }

    proptest! {
        #[test]
        fn texts_in_a_row_are_the_text(text in "[ab<>|é😀 ]{1,12}", said in prop::collection::vec("[ab<>|é😀 \u{fffd}]{0,3}", 1..8)) {
            let pieces = said.into_iter().map(|text| Piece { id: TokenId(0), text }).collect();
            let (pieces, _) = align(&text, pieces);
            prop_assert!(!pieces.is_empty());
            prop_assert_eq!(pieces.iter().map(|p| p.text.as_str()).collect::<String>(), text);
        }

        #[test]
        fn bytes_cut_anywhere_are_laid_well(text in "[a-c é😀\n]{1,12}", cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..10)) {
            let mut at: Vec<usize> = cuts.iter().map(|c| c.index(text.len())).filter(|&c| c > 0).collect();
            at.push(text.len());
            at.sort_unstable();
            at.dedup();
            let mut from = 0;
            let mut pieces = Vec::new();
            for to in at {
                let said = String::from_utf8_lossy(&text.as_bytes()[from..to]).into_owned();
                pieces.push(Piece { id: TokenId(to as u32), text: said });
                from = to;
            }
            let (pieces, _) = align(&text, pieces);
            prop_assert_eq!(pieces.iter().map(|p| p.text.as_str()).collect::<String>(), text);
        }
    }
}
