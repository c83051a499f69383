//! What it costs to let a chunk leave a real model's memory and to bring it back, beside reading the context again.

use crate::prose;
use halo_core::seams::{Flow, Seen};
use halo_core::testing::guesses::differ;
use halo_core::token::{Position, TokenId};
use halo_llama::attention::Want;
use halo_llama::ffi::{Context, Shape, Weights};
use halo_llama::graveyard::{Graveyard, Room};
use halo_llama::key::keys;
use halo_llama::mirror::{Mirror, MirrorError, Mode, SEQUENCES};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// What was measured at one length of the context.
#[derive(Clone, Debug)]
pub struct Report {
    /// Tokens in the window.
    pub context: usize,
    /// Reading all of it, to the guess at the next token.
    pub reread_first_token_ms: f64,
    /// A chunk leaves and returns while the program runs.
    pub running: Figures,
    /// The same after closing and opening: the chunk comes from disk.
    pub after_restart: Figures,
    /// Opening the conversation: all that is live, from disk, to the guess at the next token.
    pub open_ms: f64,
    /// A chunk returns after all holes were closed: it and what stands behind it are turned to new positions.
    pub after_compaction: Figures,
    /// The model's own noise: the largest difference and the divergence of guesses after the last sixteen tokens were
    /// read one by one and all at once.
    pub noise: (f32, f64),
    /// Bytes that a token's cells take on disk.
    pub bytes_per_token: f64,
}

/// What leaving, returning and the next token took, and how far the guess is from that of one who never left.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Leaves: saved, if it was not yet, and freed.
    pub prune_ms: f64,
    /// Returns.
    pub resurrect_ms: f64,
    /// The guess at the next token.
    pub first_token_ms: f64,
    /// The largest difference of any token's score.
    pub max_logit_diff: f32,
    /// The divergence of the guess, in nats.
    pub kl: f64,
    /// Whether the likeliest token is the same.
    pub top1: bool,
}

impl Figures {
    /// How many times faster than reading again.
    #[must_use]
    pub fn speedup(&self, reread_ms: f64) -> f64 {
        reread_ms / (self.prune_ms + self.resurrect_ms + self.first_token_ms)
    }
}

/// How many chunks leave and return, one after the other; the middle of their times counts.
const ROUNDS: usize = 9;
/// Tokens of a chunk.
const CHUNK: usize = 64;

/// Measures at one length.
///
/// # Errors
/// When the model fails, or the context is too long for it.
pub fn measure(
    weights: &Arc<Weights>,
    context: usize,
    threads: u32,
    progress: &mut dyn FnMut(u64),
) -> Result<Report, MirrorError> {
    let folder = tempfile::tempdir().map_err(|_| MirrorError::Disorder)?;
    let trained = weights.trained_context();
    let shape = Shape {
        tokens: (context as u32 + 1024).min(trained).max(context as u32 + 1),
        batch: 256,
        threads: threads.cast_signed(),
        sequences: SEQUENCES,
    };
    let open = |folder: &Path| -> Result<Mirror, MirrorError> {
        let room = Room { ram: 4 << 30, disk: 16 << 30, folder: Some(folder.to_owned()) };
        Ok(Mirror::new(Context::new(weights, shape)?, Graveyard::open(room, 1), Mode::Keep))
    };
    let window = window(weights, context);
    let mut mirror = open(folder.path())?;
    let (reread, expected) = timed(|| first_token(&mut mirror, &window, progress))?;
    let leaving: Vec<usize> = (0..ROUNDS).map(|n| 1 + n * (context / CHUNK - 3) / ROUNDS).collect();

    let (mut prune, mut back, mut next, mut last) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for &n in &leaving {
        let without = without(&window, &[n]);
        prune.push(timed(|| mirror.adapt("bench", &without))?.0);
        back.push(timed(|| mirror.adapt("bench", &window))?.0);
        let (ms, guess) = timed(|| first_token(&mut mirror, &window, progress))?;
        next.push(ms);
        last = guess;
    }
    let running = figures(&mut prune, &mut back, &mut next, &expected, &last);

    // All that leave are gone when the program ends; after the start they return one by one, from disk.
    let rest = without(&window, &leaving);
    mirror.settle("bench", &rest)?;
    mirror.clear();
    let bytes_per_token = mirror.graveyard().size().1 as f64 / context as f64;
    drop(mirror);
    let mut mirror = open(folder.path())?;
    let (open_ms, _) = timed(|| first_token(&mut mirror, &rest, progress))?;
    let (mut prune, mut back, mut next) = (Vec::new(), Vec::new(), Vec::new());
    for &n in &leaving {
        let others: Vec<usize> = leaving.iter().copied().filter(|&o| o != n).collect();
        let with = without(&window, &others);
        back.push(timed(|| mirror.adapt("bench", &with))?.0);
        next.push(timed(|| first_token(&mut mirror, &with, progress))?.0);
        prune.push(timed(|| mirror.adapt("bench", &rest))?.0);
    }
    mirror.adapt("bench", &window)?;
    let last = first_token(&mut mirror, &window, progress)?;
    let after_restart = figures(&mut prune, &mut back, &mut next, &expected, &last);

    let (mut prune, mut back, mut next, mut last) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for &n in leaving.iter().step_by(4) {
        let gone = without(&window, &[n]);
        prune.push(timed(|| mirror.adapt("bench", &gone))?.0);
        mirror.compact()?;
        back.push(timed(|| mirror.adapt("bench", &window))?.0);
        let (ms, guess) = timed(|| first_token(&mut mirror, &window, progress))?;
        next.push(ms);
        last = guess;
    }
    let after_compaction = figures(&mut prune, &mut back, &mut next, &expected, &last);
    let noise = noise(&mut open(folder.path())?, &window)?;
    Ok(Report {
        context,
        reread_first_token_ms: reread,
        running,
        after_restart,
        open_ms,
        after_compaction,
        noise,
        bytes_per_token,
    })
}

/// How much a guess depends on whether the last sixteen tokens are read one by one or all at once: what is nearer than
/// that is as near as this model can tell.
fn noise(mirror: &mut Mirror, window: &[Seen]) -> Result<(f32, f64), MirrorError> {
    let names = keys(window).ok_or(MirrorError::Disorder)?;
    let token = |n: usize| (names[n], window[n].id.0.cast_signed(), window[n].begins);
    let (n, mut guesses) = (window.len(), Vec::new());
    let last: Vec<_> = (n - 16..n).map(token).collect();
    for at_once in [1, 16] {
        first_token(mirror, &window[..n - 16], &mut |_| {})?;
        for part in last.chunks(at_once) {
            mirror.read(part, Want::nothing())?;
        }
        guesses.push(mirror.context().guess().to_vec());
    }
    let (most, kl, _) = differ(&guesses[0], &guesses[1]);
    Ok((most, kl))
}

/// A window of so many tokens, in chunks.
fn window(weights: &Weights, len: usize) -> Vec<Seen> {
    let text = prose::paragraphs(len / 50 + 1).concat();
    let tokens = weights.tokenize(&text, false);
    let seen = |(n, &token): (usize, &i32)| Seen {
        position: Some(Position(n as u64)),
        behind: 0,
        id: TokenId(token.cast_unsigned()),
        begins: n % CHUNK == 0,
    };
    tokens.iter().take(len).enumerate().map(seen).collect()
}

/// The window without some of its chunks.
fn without(window: &[Seen], chunks: &[usize]) -> Vec<Seen> {
    let stays = |(n, _): &(usize, &Seen)| !chunks.contains(&(n / CHUNK));
    window.iter().enumerate().filter(stays).map(|(_, seen)| *seen).collect()
}

/// Reads what is to be read of a window; the guess at the next token.
fn first_token(
    mirror: &mut Mirror,
    window: &[Seen],
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<f32>, MirrorError> {
    let ready = mirror.follow("bench", window, 1, &mut |_, _| Flow::Continue)?;
    let names = keys(window).ok_or(MirrorError::Disorder)?;
    let token = |n: usize| (names[n], window[n].id.0.cast_signed(), window[n].begins);
    let tokens: Vec<_> = (ready.from..window.len() - 1).map(token).collect();
    for part in tokens.chunks(256) {
        mirror.read(part, Want::nothing())?;
        progress(part.len() as u64);
    }
    mirror.read(&[token(window.len() - 1)], Want::nothing())?;
    Ok(mirror.context().guess().to_vec())
}

fn timed<T>(work: impl FnOnce() -> Result<T, MirrorError>) -> Result<(f64, T), MirrorError> {
    let begin = Instant::now();
    let done = work()?;
    Ok((begin.elapsed().as_secs_f64() * 1000.0, done))
}

fn figures(prune: &mut [f64], back: &mut [f64], next: &mut [f64], expected: &[f32], got: &[f32]) -> Figures {
    let (max_logit_diff, kl, top1) = differ(expected, got);
    Figures {
        prune_ms: middle(prune),
        resurrect_ms: middle(back),
        first_token_ms: middle(next),
        max_logit_diff,
        kl,
        top1,
    }
}

/// The middle of some numbers.
pub(crate) fn middle(numbers: &mut [f64]) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}
