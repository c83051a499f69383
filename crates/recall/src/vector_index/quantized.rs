//! 4-bit codes of a row, and an upper bound of its score.
//!
//! A search reads every row and is limited by memory bandwidth, so the codes are small: a quarter of the 16-bit values.
//! They lose about a tenth of the norm of a row. The exact norm of the loss is stored with the codes; by the inequality of
//! Cauchy and Schwarz a row scores at most the score of its codes plus that loss times the norm of the query. So a row
//! that is skipped cannot be among the best: the search is exact.
//!
//! Values are rotated first (random signs, then a Hadamard matrix over 128 values). This changes no dot product, but
//! spreads an outlier over all values, so that one step size suits them all.
//!
//! The loops are written so that the compiler vectorizes them; `multiversion` chooses the vector width at run time.

use multiversion::multiversion;
use std::num::Wrapping;

/// 16-bit lanes of one vector operation.
const LANES: usize = 32;
/// Values that are rotated together, four per lane.
const GROUP_SIZE: usize = 4 * LANES;
/// The largest code of a query value.
const QUERY_CODE_MAX: i16 = 127;
/// Groups whose products fit into a 16-bit sum.
const GROUPS_PER_SUM: usize = 4;
const _: () = assert!(GROUPS_PER_SUM * 4 * 15 * QUERY_CODE_MAX as usize <= i16::MAX as usize);
/// Rows that are read in parallel, far apart, so that several memory requests are in flight.
const READ_STREAMS: usize = 4;
/// The step size with the least loss for normally distributed values, in standard deviations.
const OPTIMAL_STEP: f32 = 0.335;
/// 2²³: adding it rounds to an integer, which is then in the lowest bits.
const ROUNDING_BIAS: f32 = 8_388_608.0;

/// The codes of one group. Lane `n` has those of the values `n`, `n + 32`, `n + 64` and `n + 96`, from the lowest bits up.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct PackedCodes([u16; LANES]);

impl PackedCodes {
    pub(super) const ZERO: Self = Self([0; LANES]);
}

pub(super) fn group_count(dimensions: usize) -> usize {
    dimensions.div_ceil(GROUP_SIZE)
}

/// The relation of a row to its codes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowQuantization {
    /// Codes 0 to 15 stand for −7.5 to 7.5 steps.
    step: f32,
    /// The norm of the difference between the row and its codes.
    error_norm: f32,
    norm: f32,
}

impl RowQuantization {
    /// A removed row: its bound is NaN, which is below no threshold and above none.
    pub(super) const REMOVED: Self = Self { step: 0.0, error_norm: f32::NAN, norm: 0.0 };

    pub(super) fn is_removed(self) -> bool {
        self.error_norm.is_nan()
    }
}

/// Writes the codes of the row `values · scale`.
pub(super) fn encode_row(values: &[i16], scale: f32, codes: &mut [PackedCodes]) -> RowQuantization {
    // With a step of 0 the codes do not matter. Rows that are filled later are pushed as zero vectors.
    if scale == 0.0 {
        return RowQuantization { step: 0.0, error_norm: 0.0, norm: 0.0 };
    }
    let RowQuantization { step, error_norm, norm } = encode_values(values, codes);
    RowQuantization { step: step * scale, error_norm: error_norm * scale, norm: norm * scale }
}

#[multiversion(targets("x86_64+avx2"))]
fn encode_values(values: &[i16], codes: &mut [PackedCodes]) -> RowQuantization {
    let squares: i64 = values.iter().map(|&x| i64::from(i32::from(x) * i32::from(x))).sum();
    let norm = (squares as f32).sqrt();
    let step = OPTIMAL_STEP * norm / ((codes.len() * GROUP_SIZE) as f32).sqrt();
    let steps = step.recip();
    let mut squared_errors = [0.0; LANES];
    for (part, codes) in values.chunks(GROUP_SIZE).zip(codes) {
        let mut group = [0.0; GROUP_SIZE];
        for (to, &from) in group.iter_mut().zip(part) {
            *to = f32::from(from);
        }
        rotate(&mut group);
        for lane in 0..LANES {
            let mut packed = 0;
            for n in 0..4 {
                let x = group[n * LANES + lane];
                let code = (x * steps + 7.5).clamp(0.0, 15.0) + ROUNDING_BIAS;
                let error = x - (code - ROUNDING_BIAS - 7.5) * step;
                packed |= (code.to_bits() & 15) << (4 * n);
                squared_errors[lane] += error * error;
            }
            codes.0[lane] = packed as u16;
        }
    }
    RowQuantization { step, error_norm: squared_errors.iter().sum::<f32>().sqrt(), norm }
}

/// A query, prepared for dot products with codes.
#[derive(Debug)]
pub(super) struct QuantizedQuery {
    /// The factors of the lanes of each group, shifted right by 0, 1, 2 and 3 codes.
    factors: Vec<[[u16; LANES]; 4]>,
    /// Subtracted from twice the sum of products: codes count from 0, but stand for values from −7.5 on.
    excess: i32,
    half_step: f32,
    /// The factor of a row's `error_norm`: the norm of the query plus that of its own quantization error.
    norm_bound: f32,
    /// The factor of a row's `norm`: the norm of the query's quantization error, plus a margin for rounding.
    rounding_bound: f32,
}

impl QuantizedQuery {
    pub(super) fn new(query: &[f32]) -> Self {
        let rotated_query: Vec<[f32; GROUP_SIZE]> = query.chunks(GROUP_SIZE).map(rotated).collect();
        let rotated_query = rotated_query.as_flattened();
        let largest = rotated_query.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
        let step = if largest > 0.0 { largest / f32::from(QUERY_CODE_MAX) } else { 1.0 };
        let code: Vec<i16> = rotated_query.iter().map(|x| (x / step).round() as i16).collect();
        let sum: i32 = code.iter().map(|&x| i32::from(x)).sum();
        let loss = norm(rotated_query.iter().zip(&code).map(|(x, &code)| x - f32::from(code) * step));
        let query_norm = norm(query.iter().copied());
        // Far more than the sum of all rounding errors, and far less than the quantization errors.
        let rounding = 4.0 * f32::EPSILON * rotated_query.len() as f32;
        Self {
            factors: code.as_chunks().0.iter().map(lane_factors).collect(),
            excess: 15 * sum,
            half_step: step / 2.0,
            norm_bound: query_norm + loss,
            rounding_bound: loss + rounding * query_norm,
        }
    }
}

/// Computes an upper bound of the score of each row.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
pub(super) fn upper_bounds(
    query: &QuantizedQuery,
    codes: &[PackedCodes],
    quantizations: &[RowQuantization],
    bounds: &mut [f32],
) {
    let (rows, groups) = (quantizations.len(), query.factors.len());
    let stride = rows.div_ceil(READ_STREAMS);
    for first in 0..stride {
        for row in (first..rows).step_by(stride) {
            let (codes, row_quantization) = (&codes[row * groups..][..groups], quantizations[row]);
            let RowQuantization { step, error_norm, norm } = row_quantization;
            let code_score = (2 * dot_codes(codes, &query.factors) - query.excess) as f32;
            let code_score = code_score * (step * query.half_step);
            bounds[row] = code_score + error_norm * query.norm_bound + norm * query.rounding_bound;
        }
    }
}

/// The dot product of codes and query codes. Lanes wrap around on the way, but their final sums fit.
#[inline(always)]
fn dot_codes(codes: &[PackedCodes], factors: &[[[u16; LANES]; 4]]) -> i32 {
    let mut sum = 0;
    for (codes, factors) in codes.chunks(GROUPS_PER_SUM).zip(factors.chunks(GROUPS_PER_SUM)) {
        let mut sums = [Wrapping(0); LANES];
        for (codes, factors) in codes.iter().zip(factors) {
            for (lane, sum) in sums.iter_mut().enumerate() {
                let product = |n: usize| Wrapping(codes.0[lane] >> (4 * n)) * Wrapping(factors[n][lane]);
                *sum += product(0) + product(1) + product(2) + product(3);
            }
        }
        let lane = |n: usize| i32::from(sums[n].0.cast_signed());
        sum += (0..LANES / 2).map(|n| lane(n) + lane(n + LANES / 2)).sum::<i32>();
    }
    sum
}

/// A shifted lane still contains the higher codes, each 16 times as large as the one below. Masking them would cost as
/// much as a multiplication; instead the factor of the next code subtracts what they added.
fn lane_factors(code: &[i16; GROUP_SIZE]) -> [[u16; LANES]; 4] {
    let mut factors = [[0; LANES]; 4];
    for (n, &value) in code.iter().enumerate() {
        let below = n.checked_sub(LANES).map_or(0, |below| code[below]);
        factors[n / LANES][n % LANES] = (value - 16 * below).cast_unsigned();
    }
    factors
}

/// The norm of a vector, computed in 64 bits, so that squares neither overflow nor underflow.
fn norm(vector: impl Iterator<Item = f32>) -> f32 {
    vector.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt() as f32
}

/// A part of a vector, padded with zeros and rotated.
fn rotated(part: &[f32]) -> [f32; GROUP_SIZE] {
    let mut group = [0.0; GROUP_SIZE];
    group[..part.len()].copy_from_slice(part);
    rotate(&mut group);
    group
}

/// Applies the signs, then the Hadamard transform: sums and differences for each bit of the index. The upper three bits
/// are done by interleaving halves, the others in place, so that no step works within a vector register.
#[inline(always)]
fn rotate(group: &mut [f32; GROUP_SIZE]) {
    for (x, sign) in group.iter_mut().zip(&ROTATION_SIGNS) {
        *x *= sign;
    }
    for _ in 0..3 {
        let before = *group;
        for i in 0..GROUP_SIZE / 2 {
            let (a, b) = (before[i], before[i + GROUP_SIZE / 2]);
            (group[2 * i], group[2 * i + 1]) = (a + b, a - b);
        }
    }
    for half in [8, 16, 32, 64] {
        for part in group.chunks_exact_mut(2 * half) {
            let (front, back) = part.split_at_mut(half);
            for (a, b) in front.iter_mut().zip(back) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
    }
}

/// Random signs (the digits of π), divided by the square root of the group size, which makes the Hadamard matrix
/// orthogonal.
const ROTATION_SIGNS: [f32; GROUP_SIZE] = {
    let pi: [u64; 2] = [0x243F_6A88_85A3_08D3, 0x1319_8A2E_0370_7344];
    let mut signs = [0.088_388_35; GROUP_SIZE];
    let mut n = 0;
    while n < GROUP_SIZE {
        if pi[n / 64] >> (n % 64) & 1 == 1 {
            signs[n] = -signs[n];
        }
        n += 1;
    }
    signs
};

#[cfg(test)]
mod tests {
    use super::*;

    /// The vector whose rotation is `target`.
    fn inverse_rotate(target: &[f32; GROUP_SIZE]) -> Vec<f32> {
        let basis =
            |n: usize| rotated(&std::array::from_fn::<f32, GROUP_SIZE, _>(|m| f32::from(u8::from(m == n))));
        (0..GROUP_SIZE).map(|n| basis(n).iter().zip(target).map(|(a, b)| a * b).sum()).collect()
    }

    #[test]
    fn upper_bound_includes_query_quantization_error() {
        // A row with almost no quantization error: its values are half steps, and its norm fits the step size.
        let row = inverse_rotate(&std::array::from_fn(|n| if n % 9 < 4 { 3.5 } else { 2.5 }));
        let largest = row.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
        let scale = largest / f32::from(i16::MAX);
        let values: Vec<i16> = row.iter().map(|x| (x / scale).round() as i16).collect();
        let mut codes = [PackedCodes::ZERO];
        let quantization = encode_row(&values, scale, &mut codes);
        assert!(quantization.error_norm < 0.01 * quantization.norm, "{quantization:?}");
        // A query whose values are all below half a step of its code, except one.
        let query = inverse_rotate(&std::array::from_fn(|n| if n == 0 { 127.0 } else { 0.49 }));
        let score: f32 = row.iter().zip(&query).map(|(a, b)| a * b).sum();
        let mut bound = [0.0];
        upper_bounds(&QuantizedQuery::new(&query), &codes, &[quantization], &mut bound);
        assert!(bound[0] >= score, "{} < {score}", bound[0]);
    }
}
