//! The prompt of a request: `memory` before `prompt`, cut from the left to `max_context_length`.

use halo_core::model::ModelToken;

/// Puts the memory before the prompt. What exceeds the limit is cut from the start of the prompt; the memory stays, unless it
/// takes more than three quarters of the room.
pub(super) fn fit_prompt(
    memory: Vec<ModelToken>,
    prompt: Vec<ModelToken>,
    limit: Option<PromptLimit>,
) -> Vec<ModelToken> {
    let Some(limit) = limit else { return [memory, prompt].concat() };
    let room = limit.context.saturating_sub(limit.answer.min(limit.context / 2)).max(1);
    if memory.len() + prompt.len() <= room {
        return [memory, prompt].concat();
    }
    let memory = last_tokens(&memory, memory.len().min(room - room / 4));
    let prompt = last_tokens(&prompt, room - memory.len());
    [memory, prompt].concat()
}

/// What a prompt must fit in.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptLimit {
    /// Tokens of the prompt and the answer.
    pub context: usize,
    /// Tokens of the answer. It takes at most half of the context from the prompt.
    pub answer: usize,
}

fn last_tokens(tokens: &[ModelToken], count: usize) -> &[ModelToken] {
    &tokens[tokens.len() - count.min(tokens.len())..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::token::TokenId;

    fn tokens(ids: std::ops::Range<u32>) -> Vec<ModelToken> {
        ids.map(|id| ModelToken { id: TokenId(id), text: String::new() }).collect()
    }

    #[test]
    fn prompt_is_cut_from_the_left_and_memory_stays() {
        // Tokens of memory and prompt, context, answer, and what is left.
        let cases: [(u32, u32, usize, usize, Vec<u32>); 5] = [
            (2, 3, 10, 5, vec![0, 1, 100, 101, 102]),
            (2, 6, 10, 5, vec![0, 1, 103, 104, 105]),
            (0, 8, 10, 4, vec![102, 103, 104, 105, 106, 107]),
            // The answer takes at most half of the context.
            (0, 8, 8, 100, vec![104, 105, 106, 107]),
            // A long memory leaves a quarter to the prompt.
            (9, 5, 16, 8, vec![3, 4, 5, 6, 7, 8, 103, 104]),
        ];
        for (memory, prompt, context, answer, expected) in cases {
            let limit = Some(PromptLimit { context, answer });
            let fitted = fit_prompt(tokens(0..memory), tokens(100..100 + prompt), limit);
            assert_eq!(fitted.iter().map(|token| token.id.0).collect::<Vec<_>>(), expected);
        }
        assert_eq!(fit_prompt(tokens(0..9), tokens(100..109), None).len(), 18);
    }
}
