//! Log-probabilities of tokens, from the logits of a step.

use crate::ffi::{LlamaToken, ModelWeights};
use halo_core::model::{TokenLogprob, TokenLogprobs};
use halo_core::token::TokenId;

/// The log-probability of a token that is impossible, as OpenAI reports it: JSON has no infinity.
const MIN_LOGPROB: f32 = -9999.0;

/// The log-probabilities of a sampled token and of the `count` most probable tokens, before any sampling.
pub(crate) fn token_logprobs(
    weights: &ModelWeights,
    logits: &[f32],
    token: LlamaToken,
    count: usize,
) -> TokenLogprobs {
    let normalizer = log_sum_exp(logits);
    let logprob = |id: LlamaToken| TokenLogprob {
        id: TokenId(id.cast_unsigned()),
        bytes: weights.token_bytes(id, true),
        logprob: logits.get(id as usize).map_or(MIN_LOGPROB, |logit| (logit - normalizer).max(MIN_LOGPROB)),
    };
    TokenLogprobs { token: logprob(token), top: top_tokens(logits, count).into_iter().map(logprob).collect() }
}

fn log_sum_exp(logits: &[f32]) -> f32 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - highest).exp()).sum();
    highest + sum.ln() as f32
}

/// The tokens with the highest logits, the highest first; among equal ones the lower token first.
fn top_tokens(logits: &[f32], count: usize) -> Vec<LlamaToken> {
    let mut tokens: Vec<usize> = (0..logits.len()).filter(|&token| !logits[token].is_nan()).collect();
    let order = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    if count < tokens.len() {
        tokens.select_nth_unstable_by(count, order);
        tokens.truncate(count);
    }
    tokens.sort_unstable_by(order);
    tokens.into_iter().map(|token| token as LlamaToken).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn top_tokens_are_sorted_by_their_logits() {
        let logits = [0.5, 3.0, f32::NAN, -1.0, 3.0, f32::NEG_INFINITY];
        for (count, expected) in
            [(0, vec![]), (1, vec![1]), (2, vec![1, 4]), (3, vec![1, 4, 0]), (9, vec![1, 4, 0, 3, 5])]
        {
            assert_eq!(top_tokens(&logits, count), expected, "{count}");
        }
    }

    #[test]
    fn log_sum_exp_normalizes_without_overflow() {
        assert!((log_sum_exp(&[1000.0, 1000.0]) - (1000.0 + 2.0_f32.ln())).abs() < 1e-3);
        assert!((log_sum_exp(&[0.0]) - 0.0).abs() < 1e-6);
    }
}
