//! Samplers that llama.cpp does not have: top-a, tail-free, quadratic smoothing and penalties with a slope, as KoboldCPP computes them. They work on the
//! candidates between two samplers of llama.cpp.

use halo_core::model::{LogitSmoothing, Sampling};
use llama_cpp_sys_2 as sys;
use std::collections::{HashMap, VecDeque};

/// The tokens that can still be sampled.
#[derive(Default)]
pub(super) struct Candidates {
    pub tokens: Vec<sys::llama_token_data>,
    /// Whether they are sorted by their logits, the highest first.
    pub sorted: bool,
}

impl Candidates {
    /// The probabilities of the candidates, which are sorted for it.
    fn probabilities(&mut self) -> Vec<f32> {
        if !self.sorted {
            self.tokens.sort_by(|a, b| b.logit.total_cmp(&a.logit));
            self.sorted = true;
        }
        let highest = self.tokens.first().map_or(0.0, |token| token.logit);
        let weights: Vec<f32> = self.tokens.iter().map(|token| (token.logit - highest).exp()).collect();
        let sum: f32 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / sum).collect()
    }

    /// Keeps the tokens whose probability is at least `a` times the square of the highest one.
    pub fn keep_top_a(&mut self, a: f32) {
        let probabilities = self.probabilities();
        let threshold = probabilities.first().map_or(0.0, |highest| a * highest * highest);
        let kept = probabilities.iter().take_while(|&&probability| probability >= threshold).count();
        self.tokens.truncate(kept.max(1));
    }

    /// Keeps the tokens before the point where the second derivative of the sorted probabilities sums to `z`.
    pub fn keep_tail_free(&mut self, z: f32) {
        let probabilities = self.probabilities();
        if probabilities.len() <= 2 {
            return;
        }
        let first: Vec<f32> = probabilities.windows(2).map(|pair| pair[0] - pair[1]).collect();
        let second: Vec<f32> = first.windows(2).map(|pair| (pair[0] - pair[1]).abs()).collect();
        let sum: f32 = second.iter().sum();
        let mut cumulated = 0.0;
        let share = |value: f32| if sum > 1e-6 { value / sum } else { 1.0 / second.len() as f32 };
        let kept = second.iter().position(|&value| {
            cumulated += share(value);
            cumulated > z
        });
        self.tokens.truncate(kept.unwrap_or(self.tokens.len()).max(1));
    }

    /// Replaces each logit by a curve of its distance from the highest one.
    pub fn smooth(&mut self, smoothing: LogitSmoothing) {
        let highest = self.tokens.iter().map(|token| token.logit).fold(f32::NEG_INFINITY, f32::max);
        let LogitSmoothing { factor, curve } = smoothing;
        let (quadratic, cubic) = ((3.0 - curve) / 2.0, (curve - 1.0) / 2.0);
        for token in &mut self.tokens {
            let distance = token.logit - highest;
            let square = distance * distance;
            token.logit = highest - quadratic * factor * square + cubic * factor * square * distance;
        }
        // A curve below 1 or above 3 need not keep the order.
        self.sorted = false;
    }
}

/// Penalties for repeated tokens that are weaker for the older half of the range.
pub(super) struct SlopedPenalties {
    /// The latest tokens, the newest last.
    recent: VecDeque<i32>,
    range: usize,
    repetition: f32,
    /// The repetition penalty of the older half.
    reduced: f32,
    frequency: f32,
    presence: f32,
}

impl SlopedPenalties {
    pub fn new(sampling: &Sampling, range: usize) -> Self {
        let repetition = sampling.repetition_penalty;
        let reduced = 1.0 + (repetition - 1.0) * sampling.penalty_slope;
        Self {
            recent: VecDeque::new(),
            range,
            repetition,
            reduced: if repetition > 1.0 { reduced } else { repetition },
            frequency: sampling.frequency_penalty,
            presence: sampling.presence_penalty,
        }
    }

    pub fn accept(&mut self, token: i32) {
        self.recent.push_back(token);
        if self.recent.len() > self.range {
            self.recent.pop_front();
        }
    }

    pub fn apply(&self, candidates: &mut Candidates) {
        // How often each token occurs, and whether it occurs in the newer half.
        let mut counts: HashMap<i32, (u32, bool)> = HashMap::new();
        let newer = self.recent.len() / 2;
        for (n, token) in self.recent.iter().enumerate() {
            let (count, is_newer) = counts.entry(*token).or_default();
            *count += 1;
            *is_newer |= n >= newer;
        }
        for token in &mut candidates.tokens {
            let Some((count, is_newer)) = counts.get(&token.id) else { continue };
            let penalty = if *is_newer { self.repetition } else { self.reduced };
            token.logit = if token.logit <= 0.0 { token.logit * penalty } else { token.logit / penalty };
            token.logit -= *count as f32 * self.frequency + self.presence;
        }
        candidates.sorted = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candidates with these probabilities, in this order.
    fn candidates(probabilities: &[f32]) -> Candidates {
        let token = |(id, p): (usize, &f32)| sys::llama_token_data { id: id as i32, logit: p.ln(), p: 0.0 };
        Candidates { tokens: probabilities.iter().enumerate().map(token).collect(), sorted: false }
    }

    fn ids(candidates: &Candidates) -> Vec<i32> {
        candidates.tokens.iter().map(|token| token.id).collect()
    }

    #[test]
    fn top_a_keeps_tokens_above_the_squared_maximum() {
        // The threshold is a * 0.5 * 0.5.
        for (a, kept) in [(0.0, vec![1, 0, 2]), (0.5, vec![1, 0, 2]), (0.9, vec![1, 0]), (1.9, vec![1])] {
            let mut candidates = candidates(&[0.3, 0.5, 0.2]);
            candidates.keep_top_a(a);
            assert_eq!(ids(&candidates), kept, "{a}");
        }
    }

    #[test]
    fn tail_free_cuts_where_the_curve_is_flat() {
        // Sorted: 0.6 0.2 0.1 0.06 0.04; differences 0.4 0.1 0.04 0.02; of those 0.3 0.06 0.02, in shares 0.79 0.16 0.05.
        for (z, kept) in [(0.5, 1), (0.9, 1), (0.96, 2), (1.1, 5)] {
            let mut candidates = candidates(&[0.06, 0.2, 0.6, 0.04, 0.1]);
            candidates.keep_tail_free(z);
            assert_eq!(candidates.tokens.len(), kept, "{z}");
            assert_eq!(candidates.tokens[0].id, 2);
        }
        let mut two = candidates(&[0.5, 0.5]);
        two.keep_tail_free(0.1);
        assert_eq!(two.tokens.len(), 2, "two candidates have no curve");
    }

    #[test]
    fn smoothing_widens_small_distances_and_keeps_the_order() {
        let mut smoothed = candidates(&[0.7, 0.2, 0.1]);
        let before: Vec<f32> = smoothed.tokens.iter().map(|token| token.logit).collect();
        smoothed.smooth(LogitSmoothing { factor: 0.5, curve: 1.0 });
        for (token, logit) in smoothed.tokens.iter().zip(&before) {
            let expected = before[0] - 0.5 * (logit - before[0]).powi(2);
            assert!((token.logit - expected).abs() < 1e-6, "{} {expected}", token.logit);
        }
        assert_eq!(smoothed.tokens[0].logit, before[0], "the highest logit stays");
    }

    #[test]
    fn sloped_penalties_are_weaker_for_older_tokens() {
        let sampling = Sampling {
            repetition_penalty: 2.0,
            penalty_slope: 0.5,
            frequency_penalty: 0.25,
            presence_penalty: 0.5,
            ..Sampling::default()
        };
        let mut penalties = SlopedPenalties::new(&sampling, 4);
        // Token 9 leaves the range; 0 is in the older half, 1 in both, 2 in the newer one.
        for token in [9, 0, 1, 1, 2] {
            penalties.accept(token);
        }
        let logits = [3.0, 4.0, -1.0, 5.0];
        let token =
            |(id, logit): (usize, &f32)| sys::llama_token_data { id: id as i32, logit: *logit, p: 0.0 };
        let tokens = logits.iter().enumerate().map(token).collect();
        let mut candidates = Candidates { tokens, sorted: true };
        penalties.apply(&mut candidates);
        let penalized: Vec<f32> = candidates.tokens.iter().map(|token| token.logit).collect();
        assert_eq!(penalized, [3.0 / 1.5 - 0.75, 4.0 / 2.0 - 1.0, -2.0 - 0.75, 5.0]);
        assert!(!candidates.sorted);
    }
}
