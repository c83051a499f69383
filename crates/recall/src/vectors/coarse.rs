//! A row in four bits a number, and the most that it can score.
//!
//! A search looks at every row, and memory, not arithmetic, is what takes its time: so what it looks at is small. Four
//! bits a number are a quarter of a row of 16 bits, and lose about a tenth of its length. How much is lost of *this* row
//! is kept beside its codes, and by Cauchy and Schwarz a row cannot score more than its codes do, plus that loss times
//! the length of the query. So what is passed over is passed over for certain, and not in all likelihood.
//!
//! Numbers are turned by a fixed rotation first (signs by chance, then Hadamard's matrix, 128 numbers at a time). It
//! changes no dot product, but spreads a number that stands out over others, so that one step suits them all.
//!
//! The loops are plain, in a shape that the compiler turns into wide registers; how wide is decided when they run.

use multiversion::multiversion;
use std::num::Wrapping;

/// Numbers of 16 bits that are worked on side by side.
const LANES: usize = 32;
/// Numbers that are turned together, four of them to a lane.
const GROUP: usize = 4 * LANES;
/// The largest number in the code of a query.
const FINEST: i16 = 127;
/// How many groups are added up in 16 bits.
const AT_ONCE: usize = 4;
const _: () = assert!(AT_ONCE * 4 * 15 * FINEST as usize <= i16::MAX as usize);
/// Rows that are read at a time, far from each other: the memory is asked for more than one thing at once.
const STREAMS: usize = 4;
/// The step that loses least of numbers that are spread as by chance, in units of their usual size.
const STEP: f32 = 0.335;
/// What is added to this is rounded to a whole number, which then is in the lowest bits.
const WHOLE: f32 = 8_388_608.0;

/// The codes of one group. Lane `n` has those of the numbers `n`, `n + 32`, `n + 64` and `n + 96`, the first lowest.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Codes([u16; LANES]);

impl Codes {
    pub(super) const ZERO: Self = Self([0; LANES]);
}

/// How many groups so many numbers take.
pub(super) fn groups(dimensions: usize) -> usize {
    dimensions.div_ceil(GROUP)
}

/// How a row hangs together with its codes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    /// Codes 0 to 15 stand for −7.5 to 7.5 steps.
    step: f32,
    /// The length of what the codes lose.
    loss: f32,
    /// The length of the row.
    length: f32,
}

impl Fit {
    /// Of a row that is gone: its bound is no number, and so reaches nothing.
    pub(super) const GONE: Self = Self { step: 0.0, loss: f32::NAN, length: 0.0 };

    pub(super) fn is_gone(self) -> bool {
        self.loss.is_nan()
    }
}

/// Writes the codes of the row that is `numbers` times `scale`.
pub(super) fn encode(numbers: &[i16], scale: f32, codes: &mut [Codes]) -> Fit {
    // With a step of zero codes count for nothing, whatever they are. Rows to be filled later are pushed like that.
    if scale == 0.0 {
        return Fit { step: 0.0, loss: 0.0, length: 0.0 };
    }
    let fit = encode_whole(numbers, codes);
    Fit { step: fit.step * scale, loss: fit.loss * scale, length: fit.length * scale }
}

#[multiversion(targets("x86_64+avx2"))]
fn encode_whole(numbers: &[i16], codes: &mut [Codes]) -> Fit {
    let squares: i64 = numbers.iter().map(|&x| i64::from(i32::from(x) * i32::from(x))).sum();
    let length = (squares as f32).sqrt();
    let step = STEP * length / ((codes.len() * GROUP) as f32).sqrt();
    let steps = step.recip();
    let mut lost = [0.0; LANES];
    for (part, codes) in numbers.chunks(GROUP).zip(codes) {
        let mut group = [0.0; GROUP];
        for (to, &from) in group.iter_mut().zip(part) {
            *to = f32::from(from);
        }
        turn(&mut group);
        for lane in 0..LANES {
            let mut four = 0;
            for n in 0..4 {
                let x = group[n * LANES + lane];
                let code = (x * steps + 7.5).clamp(0.0, 15.0) + WHOLE;
                let rest = x - (code - WHOLE - 7.5) * step;
                four |= (code.to_bits() & 15) << (4 * n);
                lost[lane] += rest * rest;
            }
            codes.0[lane] = four as u16;
        }
    }
    Fit { step, loss: lost.iter().sum::<f32>().sqrt(), length }
}

/// A query, as codes are asked.
#[derive(Debug)]
pub(super) struct Question {
    /// What is multiplied with the lanes of each group, moved down by no code, by one, by two and by three.
    factors: Vec<[[u16; LANES]; 4]>,
    /// What twice the sum of all products has too much, as codes begin at 0 and what they stand for at −7.5.
    excess: i32,
    half_step: f32,
    /// Its length, and that of what its own code loses: a row's loss counts as often.
    reach: f32,
    /// The length of what its own code loses, and room for every rounding on the way: a row's length counts as often.
    blur: f32,
}

impl Question {
    pub(super) fn new(query: &[f32]) -> Self {
        let turned: Vec<[f32; GROUP]> = query.chunks(GROUP).map(turned).collect();
        let turned = turned.as_flattened();
        let largest = turned.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
        let step = if largest > 0.0 { largest / f32::from(FINEST) } else { 1.0 };
        let code: Vec<i16> = turned.iter().map(|x| (x / step).round() as i16).collect();
        let sum: i32 = code.iter().map(|&x| i32::from(x)).sum();
        let loss = length(turned.iter().zip(&code).map(|(x, &code)| x - f32::from(code) * step));
        let length = length(query.iter().copied());
        // Far more than what all roundings come to; beside what codes lose it is nothing.
        let rounding = 4.0 * f32::EPSILON * turned.len() as f32;
        Self {
            factors: code.as_chunks().0.iter().map(factors).collect(),
            excess: 15 * sum,
            half_step: step / 2.0,
            reach: length + loss,
            blur: loss + rounding * length,
        }
    }
}

/// For each row the most that it can score.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
pub(super) fn bounds(question: &Question, codes: &[Codes], fits: &[Fit], bounds: &mut [f32]) {
    let (rows, groups) = (fits.len(), question.factors.len());
    let apart = rows.div_ceil(STREAMS);
    for first in 0..apart {
        for row in (first..rows).step_by(apart) {
            let (codes, fit) = (&codes[row * groups..][..groups], fits[row]);
            let near = (2 * dot(codes, &question.factors) - question.excess) as f32;
            let near = near * (fit.step * question.half_step);
            bounds[row] = near + fit.loss * question.reach + fit.length * question.blur;
        }
    }
}

/// The sum of each code times the query's. On the way lanes run over, but what they hold at the end fits.
#[inline(always)]
fn dot(codes: &[Codes], factors: &[[[u16; LANES]; 4]]) -> i32 {
    let mut sum = 0;
    for (codes, factors) in codes.chunks(AT_ONCE).zip(factors.chunks(AT_ONCE)) {
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

/// A lane that is moved down still has the codes above, sixteen times as large for each code that they are higher. To
/// mask them out would take as long as to multiply; instead the next factor takes off what they added.
fn factors(code: &[i16; GROUP]) -> [[u16; LANES]; 4] {
    let mut factors = [[0; LANES]; 4];
    for (n, &own) in code.iter().enumerate() {
        let below = n.checked_sub(LANES).map_or(0, |below| code[below]);
        factors[n / LANES][n % LANES] = (own - 16 * below).cast_unsigned();
    }
    factors
}

/// The length of a vector; no number grows too large or too small on the way.
fn length(vector: impl Iterator<Item = f32>) -> f32 {
    vector.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt() as f32
}

/// A part of a vector, turned. What is missing at its end is zero.
fn turned(part: &[f32]) -> [f32; GROUP] {
    let mut group = [0.0; GROUP];
    group[..part.len()].copy_from_slice(part);
    turn(&mut group);
    group
}

/// Signs, then sums and differences by each bit of a number's place: the upper three bits by moving them down to where
/// neighbours are, the others where they are. So no step has to work within a register.
#[inline(always)]
fn turn(group: &mut [f32; GROUP]) {
    for (x, sign) in group.iter_mut().zip(&SIGNS) {
        *x *= sign;
    }
    for _ in 0..3 {
        let before = *group;
        for i in 0..GROUP / 2 {
            let (a, b) = (before[i], before[i + GROUP / 2]);
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

/// Signs by chance (they are the digits of π), over the root of how many there are: with that, Hadamard's matrix is a
/// rotation.
const SIGNS: [f32; GROUP] = {
    let pi: [u64; 2] = [0x243F_6A88_85A3_08D3, 0x1319_8A2E_0370_7344];
    let mut signs = [0.088_388_35; GROUP];
    let mut n = 0;
    while n < GROUP {
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

    /// The vector that turns into this one.
    fn back(turned_to: &[f32; GROUP]) -> Vec<f32> {
        let one = |n: usize| turned(&std::array::from_fn::<f32, GROUP, _>(|m| f32::from(u8::from(m == n))));
        (0..GROUP).map(|n| one(n).iter().zip(turned_to).map(|(a, b)| a * b).sum()).collect()
    }

    #[test]
    fn what_the_code_of_a_query_loses_counts_too() {
        // A row that loses next to nothing: its numbers are half steps, and as long as the step wants them to be.
        let row = back(&std::array::from_fn(|n| if n % 9 < 4 { 3.5 } else { 2.5 }));
        let largest = row.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
        let scale = largest / f32::from(i16::MAX);
        let numbers: Vec<i16> = row.iter().map(|x| (x / scale).round() as i16).collect();
        let mut codes = [Codes::ZERO];
        let fit = encode(&numbers, scale, &mut codes);
        assert!(fit.loss < 0.01 * fit.length, "{fit:?}");
        // A query of which all but one number are less than half a step of its code.
        let query = back(&std::array::from_fn(|n| if n == 0 { 127.0 } else { 0.49 }));
        let score: f32 = row.iter().zip(&query).map(|(a, b)| a * b).sum();
        let mut bound = [0.0];
        bounds(&Question::new(&query), &codes, &[fit], &mut bound);
        assert!(bound[0] >= score, "{} < {score}", bound[0]);
    }
}
