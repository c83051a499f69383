//! A real model with a sample in its memory: what it looked at, and what it guesses when some of it is gone.

use halo_llama::attention::{Row, Want};
use halo_llama::ffi::{Context, Item, LlamaError, Pos, Seq, Token};
use std::ops::Range;

/// All of the sample.
const ALL: Seq = Seq(0);
/// What is left of it.
const REST: Seq = Seq(1);

/// Tokens that are read at once while all of them are watched.
const WATCHED: usize = 16;

/// A real model with a sample in its memory.
pub(super) struct Trial<'a> {
    context: &'a mut Context,
    len: usize,
    next: &'a [Token],
    /// What it guesses with all of it in memory, as logarithms, one row a token of what came next.
    full: Vec<f32>,
}

/// What letting some of a window go has cost.
#[derive(Clone, Debug, Default)]
pub(super) struct Cost {
    /// By token of what came next: how far the guess is from that of the full window, in nats.
    pub(super) kl: Vec<f64>,
    /// By token: how unlikely the guess thinks what really came, in nats.
    pub(super) nll: Vec<f64>,
}

/// Who hears of each row of attention: what a token looked at, one after the other.
pub(super) type Looked<'a> = dyn FnMut(&Row) + 'a;

impl<'a> Trial<'a> {
    /// Reads a window; the rows of the tokens from `watched` on are told.
    ///
    /// # Errors
    /// When llama.cpp fails.
    pub(super) fn begin(
        context: &'a mut Context,
        window: &[Token],
        watched: usize,
        next: &'a [Token],
        want: &Want,
        looked: &mut Looked<'_>,
    ) -> Result<Self, LlamaError> {
        for seq in [ALL, REST] {
            let _ = context.remove(seq, -1, -1);
        }
        let batch = context.shape().batch as usize;
        for (start, part) in parts(&window[..watched], batch) {
            context.tap().want(Want::nothing());
            context.decode(ALL, &items(part, start, false))?;
        }
        for (start, part) in parts(&window[watched..], WATCHED) {
            let start = watched + start;
            context.tap().want(Want { cells: true, ..want.clone() });
            context.decode(ALL, &items(part, start, false))?;
            let cells: Vec<i64> = (start..start + part.len()).map(|n| n as i64).collect();
            assert_eq!(context.tap().cells(), cells, "an empty memory is filled from its beginning");
            context.tap().looks().iter().for_each(&mut *looked);
        }
        let mut trial = Self { context, len: window.len(), next, full: Vec::new() };
        trial.full = trial.guesses(&[])?;
        Ok(trial)
    }

    /// What it costs to let these slots go.
    ///
    /// # Errors
    /// When llama.cpp fails.
    pub(super) fn without(&mut self, gone: &[Range<usize>]) -> Result<Cost, LlamaError> {
        let guesses = self.guesses(gone)?;
        let size = self.context.weights().vocabulary();
        let mut cost = Cost::default();
        // The guess behind a token is at the one that follows it.
        let following = self.next.iter().skip(1);
        for ((full, rest), &came) in self.full.chunks(size).zip(guesses.chunks(size)).zip(following) {
            cost.kl.push(full.iter().zip(rest).map(|(f, r)| f64::from(f.exp() * (f - r))).sum());
            cost.nll.push(-f64::from(rest[came as usize]));
        }
        Ok(cost)
    }

    /// The guesses at what came next with some slots gone: the logarithms of probabilities.
    fn guesses(&mut self, gone: &[Range<usize>]) -> Result<Vec<f32>, LlamaError> {
        let end = self.len as Pos;
        self.context.share(ALL, REST, 0, end);
        for range in gone {
            let _ = self.context.remove(REST, range.start as Pos, range.end as Pos);
        }
        let batch = self.context.shape().batch as usize;
        let mut guesses = Vec::with_capacity(self.next.len() * self.context.weights().vocabulary());
        for (start, part) in parts(self.next, batch) {
            self.context.tap().want(Want::nothing());
            self.context.decode(REST, &items(part, self.len + start, true))?;
            for n in 0..part.len() {
                let from = guesses.len();
                guesses.extend_from_slice(self.context.guess_at(n));
                logarithms(&mut guesses[from..]);
            }
        }
        let _ = self.context.remove(REST, -1, -1);
        Ok(guesses)
    }
}

fn parts(tokens: &[Token], size: usize) -> impl Iterator<Item = (usize, &[Token])> {
    tokens.chunks(size).enumerate().map(move |(n, part)| (n * size, part))
}

fn items(tokens: &[Token], start: usize, logits: bool) -> Vec<Item> {
    let item = |(n, &token): (usize, &Token)| Item { token, position: (start + n) as Pos, logits };
    tokens.iter().enumerate().map(item).collect()
}

/// Scores become logarithms of probabilities.
fn logarithms(scores: &mut [f32]) {
    let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = scores.chunks(1024).map(|part| part.iter().map(|s| (s - top).exp()).sum::<f32>()).sum();
    let less = top + sum.ln();
    scores.iter_mut().for_each(|s| *s -= less);
}
