//! How far two guesses at the next token are from each other.

/// The largest difference of two guesses, the divergence of the second from the first in nats, and whether both think the
/// same token likeliest.
#[must_use]
pub fn differ(a: &[f32], b: &[f32]) -> (f32, f64, bool) {
    let most = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let logs = |x: &[f32]| {
        let top = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = x.iter().map(|&l| f64::from(l - top).exp()).sum();
        x.iter().map(|&l| f64::from(l - top) - sum.ln()).collect::<Vec<f64>>()
    };
    let (p, q) = (logs(a), logs(b));
    let kl = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
    let best = |x: &[f32]| x.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(n, _)| n);
    (most, kl, best(a) == best(b))
}
