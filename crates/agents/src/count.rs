//! How long a text is, in tokens: as the agent's own tokenizer has it, or where none is known, a quarter of its characters.

/// Something that counts tokens.
pub trait Count: Send + Sync {
    /// How many tokens a text has.
    fn tokens(&self, text: &str) -> usize;

    /// The longest beginning of a text that has no more tokens than these, found by halving: nearly the longest, where more
    /// text may have fewer tokens.
    fn cut<'a>(&self, text: &'a str, limit: usize) -> &'a str {
        if self.tokens(text) <= limit {
            return text;
        }
        let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        let (mut fits, mut too_long) = (0, ends.len());
        while fits + 1 < too_long {
            let middle = usize::midpoint(fits, too_long);
            if self.tokens(&text[..ends[middle]]) <= limit {
                fits = middle;
            } else {
                too_long = middle;
            }
        }
        ends.get(fits).map_or("", |&end| &text[..end])
    }
}

/// Characters divided by four: the rough guess of the documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quarter;

impl Count for Quarter {
    fn tokens(&self, text: &str) -> usize {
        text.chars().count() / 4
    }

    fn cut<'a>(&self, text: &'a str, limit: usize) -> &'a str {
        chars(text, limit.saturating_mul(4))
    }
}

impl<F: Fn(&str) -> usize + Send + Sync> Count for F {
    fn tokens(&self, text: &str) -> usize {
        self(text)
    }
}

/// The first characters of a text.
pub(crate) fn chars(text: &str, count: usize) -> &str {
    text.char_indices().nth(count).map_or(text, |(end, _)| &text[..end])
}

/// The same, and never less: what is counted piece by piece is then no less than the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuarterUp;

impl Count for QuarterUp {
    fn tokens(&self, text: &str) -> usize {
        text.chars().count().div_ceil(4)
    }
}
