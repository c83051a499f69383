//! Counts the tokens of a text: with the tokenizer of a model, or approximately, four characters per token.

/// Counts tokens.
pub trait TokenCounter: Send + Sync {
    /// The number of tokens of a text.
    fn count_tokens(&self, text: &str) -> usize;

    /// The longest prefix of a text within a limit, found by bisection. It may be slightly shorter where a longer text
    /// has fewer tokens.
    fn truncate<'a>(&self, text: &'a str, limit: usize) -> &'a str {
        if self.count_tokens(text) <= limit {
            return text;
        }
        let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        let (mut fitting, mut too_long) = (0, ends.len());
        while fitting + 1 < too_long {
            let middle = usize::midpoint(fitting, too_long);
            if self.count_tokens(&text[..ends[middle]]) <= limit {
                fitting = middle;
            } else {
                too_long = middle;
            }
        }
        ends.get(fitting).map_or("", |&end| &text[..end])
    }
}

/// Characters divided by four, rounded down, as the founding document estimates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApproxTokenCounter;

impl TokenCounter for ApproxTokenCounter {
    fn count_tokens(&self, text: &str) -> usize {
        text.chars().count() / 4
    }

    fn truncate<'a>(&self, text: &'a str, limit: usize) -> &'a str {
        first_chars(text, limit.saturating_mul(4))
    }
}

impl<F: Fn(&str) -> usize + Send + Sync> TokenCounter for F {
    fn count_tokens(&self, text: &str) -> usize {
        self(text)
    }
}

/// The first `count` characters of a text.
pub(crate) fn first_chars(text: &str, count: usize) -> &str {
    text.char_indices().nth(count).map_or(text, |(end, _)| &text[..end])
}

/// Characters divided by four, rounded up: the sum over the parts of a text is never less than the count of the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CeilTokenCounter;

impl TokenCounter for CeilTokenCounter {
    fn count_tokens(&self, text: &str) -> usize {
        text.chars().count().div_ceil(4)
    }
}
