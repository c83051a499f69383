//! The text of tokens of `cl100k_base`, the vocabulary of OpenAI's embedding models. Only ids are decoded, so a table is enough.

use std::sync::LazyLock;

/// Each token's bytes after their length, in the order of the ids. `scripts/cl100k` writes it.
const TABLE: &[u8] = include_bytes!("../data/cl100k_base.bin");

const SPECIAL_TOKENS: [(u32, &str); 5] = [
    (100_257, "<|endoftext|>"),
    (100_258, "<|fim_prefix|>"),
    (100_259, "<|fim_middle|>"),
    (100_260, "<|fim_suffix|>"),
    (100_276, "<|endofprompt|>"),
];

static TOKENS: LazyLock<Vec<&[u8]>> = LazyLock::new(|| {
    let (mut tokens, mut rest) = (Vec::with_capacity(100_256), TABLE);
    while let Some((&length, behind)) = rest.split_first() {
        let (token, behind) = behind.split_at(length.into());
        tokens.push(token);
        rest = behind;
    }
    tokens
});

/// The bytes of these tokens, one after the other, or nothing if there is no such token. They may begin or end within a character.
pub(crate) fn decode(ids: &[u32]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    for &id in ids {
        let special =
            || SPECIAL_TOKENS.iter().find(|(special, _)| *special == id).map(|(_, name)| name.as_bytes());
        bytes.extend_from_slice(TOKENS.get(id as usize).copied().or_else(special)?);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cl100k_decodes_every_id_and_no_other() {
        assert_eq!(TOKENS.len(), 100_256);
        // As tiktoken decodes them: the first and the last, a character in two tokens, and special tokens.
        for (ids, text) in [
            (&[12_805, 5_304, 264, 892][..], "Once upon a time"),
            (&[0, 100_255], "! Conveyor"),
            (&[9_468, 100, 94], "🧡"),
            (&[9_906, 100_257, 100_276], "Hello<|endoftext|><|endofprompt|>"),
            (&[], ""),
        ] {
            assert_eq!(decode(ids).as_deref(), Some(text.as_bytes()), "{ids:?}");
        }
        for id in [100_256, 100_261, 100_275, 100_277, u32::MAX] {
            assert_eq!(decode(&[9_906, id]), None, "{id}");
        }
    }
}
