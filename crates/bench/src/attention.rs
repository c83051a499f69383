//! The cost of capturing attention in every layer of a real model during generation.

use crate::kv::median;
use crate::synthetic_text;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{Model, ModelStep, Prompt, Sampling, StepFlow, WindowToken};
use halo_core::token::Position;
use halo_llama::model::Llama;
use std::time::Instant;

/// Results for one context length.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBenchReport {
    /// Tokens in the context window.
    pub context: usize,
    /// Tokens per second without capture.
    pub tok_s_plain: f64,
    /// Tokens per second with capture: all layers, all heads, every step, delivered by slot.
    pub tok_s_capture: f64,
    /// Speed with capture as a share of that without: the median of many pairs.
    pub ratio: f64,
}

/// Pairs of answers, one with capture and one without.
const PAIRS: usize = 12;
const ANSWER_TOKENS: usize = 24;

/// Measures one context length. Answers with and without capture alternate, so that a change in the machine's speed
/// affects both.
pub fn measure(
    model: &mut Llama,
    context: usize,
    progress: &mut dyn FnMut(u64),
) -> Result<AttentionBenchReport, Error> {
    let text = synthetic_text::paragraphs(context / 50 + 1).concat();
    let pieces = model.tokenize(&text, false)?;
    let seen = |(n, piece): (usize, &halo_core::model::ModelToken)| WindowToken {
        position: Some(Position(n as u64)),
        offset: 0,
        id: piece.id,
        chunk_start: n % 64 == 0,
    };
    let window: Vec<WindowToken> = pieces.iter().take(context).enumerate().map(seen).collect();
    let prompt = Prompt {
        conversation: "bench",
        window: &window,
        messages: &Vec::new,
        next_position: Position(window.len() as u64),
        ephemeral: false,
    };
    let sampling = Sampling { max_tokens: ANSWER_TOKENS, temperature: 0.0, ..Sampling::default() };
    let mut times = |watch: &AttentionRequest| -> Result<Vec<f64>, Error> {
        let (mut times, mut before): (Vec<f64>, Option<Instant>) = (Vec::new(), None);
        model.generate(&prompt, &sampling, watch, &mut |step| {
            match step {
                ModelStep::Prefill { done, .. } => progress(done as u64),
                ModelStep::Token(..) => {
                    let now = Instant::now();
                    times.extend(before.map(|before| (now - before).as_secs_f64()));
                    before = Some(now);
                }
                _ => {}
            }
            StepFlow::Continue
        })?;
        Ok(times)
    };
    times(&AttentionRequest::none())?;
    times(&AttentionRequest::default())?;
    let (mut plain, mut capture, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        // The order within a pair alternates too.
        let first = if pair % 2 == 0 { AttentionRequest::none() } else { AttentionRequest::default() };
        let second = if pair % 2 == 0 { AttentionRequest::default() } else { AttentionRequest::none() };
        let (mut one, mut two) = (times(&first)?, times(&second)?);
        let (one, two) = (median(&mut one), median(&mut two));
        let (p, c) = if pair % 2 == 0 { (one, two) } else { (two, one) };
        plain.push(p);
        capture.push(c);
        ratios.push(p / c);
    }
    Ok(AttentionBenchReport {
        context,
        tok_s_plain: 1.0 / median(&mut plain),
        tok_s_capture: 1.0 / median(&mut capture),
        ratio: median(&mut ratios),
    })
}
