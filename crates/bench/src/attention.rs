//! What it costs to watch every layer of a real model while it speaks, beside not watching.

use crate::kv::middle;
use crate::prose;
use halo_core::attention::Watch;
use halo_core::seams::{Flow, Model, ModelStep, Prompt, Sampling, SeamError, Seen};
use halo_core::token::Position;
use halo_llama::model::Llama;
use std::time::Instant;

/// What was measured at one length of the context.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Tokens in the window.
    pub context: usize,
    /// Tokens a second, not watched.
    pub tok_s_plain: f64,
    /// Tokens a second, watched: all layers, all heads, every step, by slot, as a listener gets them.
    pub tok_s_capture: f64,
    /// The share that is left, as the middle of many pairs.
    pub ratio: f64,
}

/// Pairs of answers, one watched and one not.
const PAIRS: usize = 12;
/// Tokens of an answer.
const ANSWER: usize = 24;

/// Measures at one length. Answers alternate, watched and not, so that a machine that changes its pace changes it for
/// both.
///
/// # Errors
/// When the model fails.
pub fn measure(
    model: &mut Llama,
    context: usize,
    progress: &mut dyn FnMut(u64),
) -> Result<Report, SeamError> {
    let text = prose::paragraphs(context / 50 + 1).concat();
    let pieces = model.tokenize(&text, false)?;
    let seen = |(n, piece): (usize, &halo_core::seams::Piece)| Seen {
        position: Some(Position(n as u64)),
        behind: 0,
        id: piece.id,
        begins: n % 64 == 0,
    };
    let window: Vec<Seen> = pieces.iter().take(context).enumerate().map(seen).collect();
    let prompt = Prompt {
        conversation: "bench",
        window: &window,
        messages: &Vec::new,
        next: Position(window.len() as u64),
        aside: false,
    };
    let sampling = Sampling { max_tokens: ANSWER, temperature: 0.0, ..Sampling::default() };
    let mut times = |watch: &Watch| -> Result<Vec<f64>, SeamError> {
        let (mut times, mut before): (Vec<f64>, Option<Instant>) = (Vec::new(), None);
        model.generate(&prompt, &sampling, watch, &mut |step| {
            match step {
                ModelStep::Reading { done, .. } => progress(done as u64),
                ModelStep::Token(..) => {
                    let now = Instant::now();
                    times.extend(before.map(|before| (now - before).as_secs_f64()));
                    before = Some(now);
                }
                _ => {}
            }
            Flow::Continue
        })?;
        Ok(times)
    };
    times(&Watch::nothing())?;
    times(&Watch::default())?;
    let (mut plain, mut capture, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        // Which comes first changes too.
        let first = if pair % 2 == 0 { Watch::nothing() } else { Watch::default() };
        let second = if pair % 2 == 0 { Watch::default() } else { Watch::nothing() };
        let (mut one, mut two) = (times(&first)?, times(&second)?);
        let (one, two) = (middle(&mut one), middle(&mut two));
        let (p, c) = if pair % 2 == 0 { (one, two) } else { (two, one) };
        plain.push(p);
        capture.push(c);
        ratios.push(p / c);
    }
    Ok(Report {
        context,
        tok_s_plain: 1.0 / middle(&mut plain),
        tok_s_capture: 1.0 / middle(&mut capture),
        ratio: middle(&mut ratios),
    })
}
