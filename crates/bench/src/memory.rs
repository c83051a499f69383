//! The value of memories, and the delay that forming one causes for the next message.
//!
//! A stretch of a real conversation has four parts: the context before, a range, the text after it, and the
//! continuation. The range is summarised twice: in a fork of the state that has read it (in place), and from a fresh
//! prompt with the same text. Then each memory replaces the range, and the loss of the model on the continuation is
//! measured: with the whole range, with nothing, with either memory, with the user's messages, and with those and the
//! memory.

use crate::prune::MeanAccumulator;
use crate::prune::sample::{self, SampleLengths};
use crate::recall::DatasetConversation;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    Model, ModelStep, ModelToken, Prompt, PromptMessage, Sampling, StepFlow, WindowToken,
};
use halo_core::rules::ContextRules;
use halo_core::token::{Position, Role, TokenId};
use halo_engine::chat_format::ChatFormatter;
use halo_engine::memory::formation::formation_instruction;
use halo_engine::memory::range::MemoryRange;
use halo_llama::attention::TapConfig;
use halo_llama::ffi::{BatchToken, LlamaContext, LlamaError, LlamaPos, LlamaToken, SamplerChain, SeqId};
use halo_llama::model::Llama;
use std::time::{Duration, Instant};

const SEQ: SeqId = SeqId(0);

pub struct MemoryBenchSetup<'a> {
    pub context: &'a mut LlamaContext,
    /// How messages are formatted for the model.
    pub frame: ChatFormatter,
    pub rules: ContextRules,
    /// Lengths of the four parts, in tokens.
    pub lengths: [usize; 4],
    pub samples: usize,
    pub max_memory_tokens: usize,
}

/// What replaces the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeReplacement {
    FullRange,
    Nothing,
    /// A memory from a fresh prompt.
    FreshMemory,
    /// A memory from a fork of the state that has read the range.
    InContextMemory,
    /// The user's messages, verbatim.
    Quotes,
    /// The user's messages and the memory from the fork.
    QuotesAndInContextMemory,
}

impl RangeReplacement {
    pub const ALL: [RangeReplacement; 6] = [
        RangeReplacement::FullRange,
        RangeReplacement::Nothing,
        RangeReplacement::FreshMemory,
        RangeReplacement::InContextMemory,
        RangeReplacement::Quotes,
        RangeReplacement::QuotesAndInContextMemory,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RangeReplacement::FullRange => "range",
            RangeReplacement::Nothing => "nothing",
            RangeReplacement::FreshMemory => "fresh",
            RangeReplacement::InContextMemory => "lived",
            RangeReplacement::Quotes => "quotes",
            RangeReplacement::QuotesAndInContextMemory => "quotes_and_lived",
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct MemoryBenchReport {
    pub samples: usize,
    /// By replacement: the loss on the continuation in nats per token, and the tokens of the replacement.
    pub by_replacement: Vec<(RangeReplacement, MeanAccumulator, MeanAccumulator)>,
    /// How often the memory from the fork was better than the fresh one.
    pub in_context_wins: usize,
    /// The memories themselves: from the fork, and fresh.
    pub texts: Vec<(String, String)>,
}

/// Measures one conversation. `progress` gets the number of finished stretches.
pub fn measure(
    conversation: &DatasetConversation,
    setup: &mut MemoryBenchSetup<'_>,
    report: &mut MemoryBenchReport,
    progress: &mut dyn FnMut(u64),
) -> Result<(), LlamaError> {
    let weights = std::sync::Arc::clone(setup.context.weights());
    let tokenize = |text: &str, special: bool| -> Vec<ModelToken> {
        halo_llama::token_text::tokenize_with_text(&weights, text, special)
    };
    let [before, range, between, next] = setup.lengths;
    let max_tokens = setup.context.params().tokens as usize - next - setup.max_memory_tokens - 200;
    let lengths = SampleLengths { history: before + range, observed: between, next, max_window: max_tokens };
    let samples =
        sample::cut_samples(conversation, setup.samples, lengths, &setup.frame, &setup.rules, &tokenize);
    for sample in samples {
        let ids = |pieces: Vec<ModelToken>| {
            pieces.into_iter().map(|p| p.id.0.cast_signed()).collect::<Vec<LlamaToken>>()
        };
        let (plain, special) =
            (|text: &str| ids(tokenize(text, false)), |text: &str| ids(tokenize(text, true)));
        // The range begins with the first whole turn after the context before it.
        let (mut lived, mut of_range) = (sample.prefix.clone(), Vec::new());
        let (mut quotes, mut words, mut first) = (Vec::new(), String::new(), None);
        for chunk in sample.history.chunks() {
            let tokens = chunk.ids(chunk.run()).iter().map(|id| id.0.cast_signed());
            let (text, turn) = (chunk.text().trim().to_owned(), chunk.id().turn);
            if first.is_none() && lived.len() >= sample.prefix.len() + before && chunk.id().index == 0 {
                first = Some((turn, text.split_whitespace().take(8).collect::<Vec<_>>().join(" ")));
            }
            lived.extend(tokens.clone());
            if first.is_some() {
                of_range.extend(tokens);
                let user = chunk.id().role == Role::User;
                words.push_str(&format!("{}: {text}\n", if user { "User" } else { "Assistant" }));
                if user {
                    quotes.extend(plain(&format!("The user said: {text}\n")));
                }
            }
        }
        let (Some((from, first)), Some(to)) = (first, sample.history.turns().last()) else { continue };
        let instruction = formation_instruction(
            MemoryRange { from: (from.0, 0), to: (to.id.0, 0) },
            &first,
            setup.max_memory_tokens,
        );
        let asks = |frame: &ChatFormatter, before: Option<Role>, text: &str| {
            let mut tokens = special(&frame.turn_header(Role::User, before, None));
            tokens.extend(plain(text));
            tokens.extend(special(&frame.turn_header(Role::Assistant, Some(Role::User), None)));
            tokens
        };
        lived.extend(asks(&setup.frame, Some(to.role), &instruction));
        let mut fresh = sample.prefix.clone();
        fresh.extend(asks(&setup.frame, None, &format!("{words}\n{instruction}")));
        let lived = generate_memory(setup, &lived)?;
        let fresh = generate_memory(setup, &fresh)?;
        let after: Vec<LlamaToken> = sample.observed_tokens();
        let stands = |inside: &[&[LlamaToken]]| {
            let mut tokens = special(&setup.frame.turn_header(Role::System, Some(Role::Assistant), None));
            tokens.extend(plain(&format!("<memory from=\"{}\" to=\"{}\">\n", from.0, to.id.0)));
            inside.iter().for_each(|part| tokens.extend_from_slice(part));
            tokens.extend(plain("\n</memory>"));
            tokens
        };
        let (lived_tokens, fresh_tokens) = (plain(lived.trim()), plain(fresh.trim()));
        let mut results = Vec::new();
        for what in RangeReplacement::ALL {
            let replacement = match what {
                RangeReplacement::FullRange => of_range.clone(),
                RangeReplacement::Nothing => Vec::new(),
                RangeReplacement::FreshMemory => stands(&[&fresh_tokens]),
                RangeReplacement::InContextMemory => stands(&[&lived_tokens]),
                RangeReplacement::Quotes => stands(&[&quotes]),
                RangeReplacement::QuotesAndInContextMemory => stands(&[&quotes, &lived_tokens]),
            };
            let window: Vec<LlamaToken> =
                sample.prefix.iter().chain(&replacement).chain(&after).copied().collect();
            results.push((what, mean_nll(setup.context, &window, &sample.next)?, replacement.len()));
        }
        if report.by_replacement.is_empty() {
            report.by_replacement = RangeReplacement::ALL
                .map(|what| (what, MeanAccumulator::default(), MeanAccumulator::default()))
                .to_vec();
        }
        for ((_, nats, tokens), (_, nll, len)) in report.by_replacement.iter_mut().zip(&results) {
            nats.add(*nll);
            tokens.add(*len as f64);
        }
        let of = |wanted: RangeReplacement| {
            results.iter().find(|(what, ..)| *what == wanted).map_or(0.0, |(_, nll, _)| *nll)
        };
        report.in_context_wins +=
            usize::from(of(RangeReplacement::InContextMemory) < of(RangeReplacement::FreshMemory));
        report.texts.push((lived.trim().to_owned(), fresh.trim().to_owned()));
        report.samples += 1;
        progress(report.samples as u64);
    }
    Ok(())
}

fn batch_items(tokens: &[LlamaToken], start: usize, logits: impl Fn(usize) -> bool) -> Vec<BatchToken> {
    let item = |(n, &token): (usize, &LlamaToken)| BatchToken {
        token,
        position: (start + n) as LlamaPos,
        logits: logits(n),
    };
    tokens.iter().enumerate().map(item).collect()
}

/// Prefills a window from an empty cache.
fn prefill(context: &mut LlamaContext, window: &[LlamaToken]) -> Result<(), LlamaError> {
    let _ = context.seq_rm(SEQ, -1, -1);
    let batch = context.params().batch as usize;
    for (n, part) in window.chunks(batch).enumerate() {
        let (start, end) = (n * batch, window.len());
        context.tap().configure(TapConfig::off());
        context.decode(SEQ, &batch_items(part, start, |i| start + i + 1 == end))?;
    }
    Ok(())
}

/// Generates after a window as for memories: greedily, with a repetition penalty.
fn generate_memory(setup: &mut MemoryBenchSetup<'_>, window: &[LlamaToken]) -> Result<String, LlamaError> {
    let weights = std::sync::Arc::clone(setup.context.weights());
    prefill(setup.context, window)?;
    let sampling = Sampling { temperature: 0.0, repetition_penalty: 1.1, ..Sampling::default() };
    let mut sampler = SamplerChain::new(&weights, &sampling);
    window[window.len().saturating_sub(SamplerChain::PENALTY_LAST_N)..]
        .iter()
        .for_each(|&token| sampler.accept(token));
    let (mut bytes, mut at) = (Vec::new(), window.len());
    for _ in 0..setup.max_memory_tokens {
        let Some(token) =
            sampler.sample(setup.context.logits(), |_| true).filter(|&t| !weights.is_end_of_generation(t))
        else {
            break;
        };
        sampler.accept(token);
        bytes.extend(weights.token_bytes(token, true));
        setup.context.tap().configure(TapConfig::off());
        setup.context.decode(SEQ, &batch_items(&[token], at, |_| true))?;
        at += 1;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The loss of the model on the continuation, in nats per token.
fn mean_nll(
    context: &mut LlamaContext,
    window: &[LlamaToken],
    next: &[LlamaToken],
) -> Result<f64, LlamaError> {
    prefill(context, window)?;
    let unlikely = |guess: &[f32], came: LlamaToken| {
        let top = guess.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = guess.iter().map(|s| f64::from(s - top).exp()).sum();
        sum.ln() - f64::from(guess[came as usize] - top)
    };
    let Some((&first, rest)) = next.split_first() else { return Ok(0.0) };
    let mut all = vec![unlikely(context.logits(), first)];
    let batch = context.params().batch as usize;
    let mut done = 0;
    for part in next[..next.len() - 1].chunks(batch) {
        context.tap().configure(TapConfig::off());
        context.decode(SEQ, &batch_items(part, window.len() + done, |_| true))?;
        all.extend((0..part.len()).map(|n| unlikely(context.logits_at(n), rest[done + n])));
        done += part.len();
    }
    Ok(all.iter().sum::<f64>() / all.len() as f64)
}

/// Time to the first token, with an idle model and while a memory is being formed, alternating.
#[derive(Clone, Debug, Default)]
pub struct FirstTokenTimes {
    /// With an idle model.
    pub alone: Vec<Duration>,
    /// While a memory is being formed, which the message cancels.
    pub while_forming: Vec<Duration>,
    /// The part of that until the model was free.
    pub preempt_wait: Vec<Duration>,
}

/// Measures how long the next message waits.
pub fn measure_first_token(model: &mut Llama, text: &str, rounds: usize) -> Result<FirstTokenTimes, Error> {
    let pieces = model.tokenize(text, false)?;
    let window_token = |n: usize, id: TokenId| WindowToken {
        position: Some(Position(n as u64)),
        offset: 0,
        id,
        chunk_start: n == 0,
    };
    let window: Vec<WindowToken> =
        pieces.iter().enumerate().map(|(n, piece)| window_token(n, piece.id)).collect();
    let nothing = || Vec::<PromptMessage>::new();
    let (mut measured, mut cancelled) = (FirstTokenTimes::default(), Vec::new());
    let answer = |model: &mut Llama, n: usize| -> Result<Duration, Error> {
        let mut window = window.clone();
        // As long as usual messages, and always different: nothing of it is in the KV cache.
        let message = format!(
            "\n{n} is what I am thinking of now. Tell me something else, please, about the town where my sister {n} lives and \
             what one can do there in the evening, when it rains and everything is closed."
        );
        for piece in model.tokenize(&message, false)? {
            window.push(window_token(window.len(), piece.id));
        }
        let next = Position(window.len() as u64);
        let prompt = Prompt {
            conversation: "bench",
            window: &window,
            messages: &nothing,
            next_position: next,
            ephemeral: false,
        };
        let sampling = Sampling { max_tokens: 8, temperature: 0.0, ..Sampling::default() };
        let (begin, mut first) = (Instant::now(), None);
        model.generate(&prompt, &sampling, &AttentionRequest::default(), &mut |step| {
            // The window is prefilled, and the first token is known.
            if matches!(step, ModelStep::PrefillDone(_)) {
                first.get_or_insert_with(|| begin.elapsed());
            }
            StepFlow::Continue
        })?;
        Ok(first.unwrap_or_default())
    };
    answer(model, 0)?;
    for round in 0..rounds {
        // In alternating order: drift affects both.
        for forms in if round.is_multiple_of(2) { [false, true] } else { [true, false] } {
            if !forms {
                measured.alone.push(answer(model, 1000 + round)?);
                continue;
            }
            let (mut forming, breaker) = (model.clone(), model.cancel_handle());
            let aside = window.clone();
            let took = std::thread::scope(|scope| -> Result<Duration, Error> {
                let formed = scope.spawn(move || {
                    let next = Position(aside.len() as u64);
                    let messages = || Vec::<PromptMessage>::new();
                    let prompt = Prompt {
                        conversation: "bench",
                        window: &aside,
                        messages: &messages,
                        next_position: next,
                        ephemeral: true,
                    };
                    let sampling = Sampling { max_tokens: 200, temperature: 0.0, ..Sampling::default() };
                    forming
                        .generate(&prompt, &sampling, &AttentionRequest::none(), &mut |_| StepFlow::Continue)
                });
                // Some memories are cancelled during prefill, some during generation.
                std::thread::sleep(Duration::from_millis(40 + 35 * round as u64));
                let begin = Instant::now();
                breaker.iter().for_each(|breaks| breaks());
                formed.join().map_err(|_| Error::internal("forming a memory", "the thread panicked"))??;
                let until_free = begin.elapsed();
                cancelled.push(until_free);
                Ok(until_free + answer(model, 2000 + round)?)
            })?;
            measured.while_forming.push(took);
        }
    }
    Ok(FirstTokenTimes { preempt_wait: cancelled, ..measured })
}
