//! Comparison of two sets of logits.

/// The largest absolute difference, the Kullback-Leibler divergence of `b` from `a` in nats, and whether both have
/// the same most probable token.
#[must_use]
pub fn compare_logits(a: &[f32], b: &[f32]) -> (f32, f64, bool) {
    let max_difference = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let log_softmax = |logits: &[f32]| {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
        logits.iter().map(|&l| f64::from(l - max) - sum.ln()).collect::<Vec<f64>>()
    };
    let (p, q) = (log_softmax(a), log_softmax(b));
    let divergence = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
    let argmax = |logits: &[f32]| logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(n, _)| n);
    (max_difference, divergence, argmax(a) == argmax(b))
}
