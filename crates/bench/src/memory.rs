//! The value of memories, and the delay that forming one causes for the next message.
//!
//! A stretch of a real conversation has four parts: the context before, a range, the text after it, and the
//! continuation. The range is summarised twice: in a fork of the state that has read it (in place), and from a fresh
//! prompt with the same text. Then each memory replaces the range, and the loss of the model on the continuation is
//! measured: with the whole range, with nothing, with either memory, with the user's messages, and with those and the
//! memory.

use crate::prune::MeanAccumulator;
use crate::prune::sample::{self, ConversationSample, SampleLengths};
use crate::recall::DatasetConversation;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    Model, ModelStep, ModelToken, Prompt, PromptMessage, Sampling, StepFlow, WindowToken,
};
use halo_core::rules::ContextRules;
use halo_core::token::{Position, Role, TokenId, TurnId};
use halo_engine::chat_format::ChatFormatter;
use halo_engine::memory::formation::formation_instruction;
use halo_engine::memory::range::MemoryRange;
use halo_llama::attention::TapConfig;
use halo_llama::ffi::{
    BatchToken, LlamaContext, LlamaError, LlamaPos, LlamaToken, ModelWeights, SamplerChain, SeqId,
};
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
    /// The same, but the instruction comes before the range, where the founding document places it.
    InstructionFirstMemory,
    /// The user's messages, verbatim.
    Quotes,
    /// The user's messages and the memory from the fork.
    QuotesAndInContextMemory,
}

impl RangeReplacement {
    pub const ALL: [RangeReplacement; 7] = [
        RangeReplacement::FullRange,
        RangeReplacement::Nothing,
        RangeReplacement::FreshMemory,
        RangeReplacement::InContextMemory,
        RangeReplacement::InstructionFirstMemory,
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
            RangeReplacement::InstructionFirstMemory => "instruction_first",
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
    /// How often it was better than the one whose instruction came first.
    pub instruction_last_wins: usize,
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
    let tokenizer = BenchTokenizer(std::sync::Arc::clone(setup.context.weights()));
    let [before, range, between, next] = setup.lengths;
    let max_tokens = setup.context.params().tokens as usize - next - setup.max_memory_tokens - 200;
    let lengths = SampleLengths { history: before + range, observed: between, next, max_window: max_tokens };
    let tokenize = |text: &str, special: bool| tokenizer.tokenize(text, special);
    let samples =
        sample::cut_samples(conversation, setup.samples, lengths, &setup.frame, &setup.rules, &tokenize);
    for sample in samples {
        let Some(range) = SampleRange::new(&sample, before, &tokenizer) else { continue };
        let (lived, fresh) = range.form_memories(&sample, setup, &tokenizer)?;
        let first = range.form_with_instruction_first(setup, &tokenizer)?;
        let mut results = Vec::new();
        for replacement in RangeReplacement::ALL {
            let memories = [lived.trim(), fresh.trim(), first.trim()];
            let tokens = range.replace(replacement, &setup.frame, &tokenizer, memories);
            let after = sample.observed_tokens();
            let window: Vec<LlamaToken> =
                sample.prefix.iter().chain(&tokens).chain(&after).copied().collect();
            results.push((replacement, mean_nll(setup.context, &window, &sample.next)?, tokens.len()));
        }
        report.add(&results);
        report.texts.push((lived.trim().to_owned(), fresh.trim().to_owned()));
        progress(report.samples as u64);
    }
    Ok(())
}

struct BenchTokenizer(std::sync::Arc<ModelWeights>);

impl BenchTokenizer {
    fn tokenize(&self, text: &str, special: bool) -> Vec<ModelToken> {
        halo_llama::token_text::tokenize_with_text(&self.0, text, special)
    }

    fn ids(&self, text: &str, special: bool) -> Vec<LlamaToken> {
        self.tokenize(text, special).into_iter().map(|token| token.id.0.cast_signed()).collect()
    }

    /// Text without special tokens.
    fn plain(&self, text: &str) -> Vec<LlamaToken> {
        self.ids(text, false)
    }

    /// The header of a turn of the chat template.
    fn header(&self, frame: &ChatFormatter, role: Role, previous: Option<Role>) -> Vec<LlamaToken> {
        self.ids(&frame.turn_header(role, previous, None).text(), true)
    }
}

/// The range of a sample that a memory replaces, in the forms that are compared.
struct SampleRange {
    first_turn: TurnId,
    last_turn: TurnId,
    last_role: Role,
    first_words: String,
    /// The context with the range.
    context: Vec<LlamaToken>,
    tokens: Vec<LlamaToken>,
    quotes: Vec<LlamaToken>,
    /// The range as text, for a fresh prompt.
    text: String,
}

impl SampleRange {
    /// The range begins with the first whole turn after `before` tokens; none if there is no such turn.
    fn new(sample: &ConversationSample, before: usize, tokenizer: &BenchTokenizer) -> Option<Self> {
        let (mut context, mut range_tokens) = (sample.prefix.clone(), Vec::new());
        let (mut quotes, mut range_text, mut first) = (Vec::new(), String::new(), None);
        for chunk in sample.history.chunks() {
            let tokens = chunk.ids(chunk.run()).iter().map(|id| id.0.cast_signed());
            let (text, turn) = (chunk.text().trim().to_owned(), chunk.id().turn);
            if first.is_none() && context.len() >= sample.prefix.len() + before && chunk.id().index == 0 {
                first = Some((turn, text.split_whitespace().take(8).collect::<Vec<_>>().join(" ")));
            }
            context.extend(tokens.clone());
            if first.is_some() {
                range_tokens.extend(tokens);
                let user = chunk.id().role == Role::User;
                range_text.push_str(&format!("{}: {text}\n", if user { "User" } else { "Assistant" }));
                if user {
                    quotes.extend(tokenizer.plain(&format!("The user said: {text}\n")));
                }
            }
        }
        let ((first_turn, first_words), last) = (first?, sample.history.turns().last()?);
        Some(Self {
            first_turn,
            last_turn: last.id,
            last_role: last.role,
            first_words,
            context,
            tokens: range_tokens,
            quotes,
            text: range_text,
        })
    }

    /// The memory from a fork of the state that has read the range, and the one from a fresh prompt.
    fn form_memories(
        &self,
        sample: &ConversationSample,
        setup: &mut MemoryBenchSetup<'_>,
        tokenizer: &BenchTokenizer,
    ) -> Result<(String, String), LlamaError> {
        let range = MemoryRange { from: (self.first_turn.0, 0), to: (self.last_turn.0, 0) };
        let instruction = formation_instruction(range, &self.first_words, setup.max_memory_tokens);
        let request = |previous: Option<Role>, text: &str| {
            let mut tokens = tokenizer.header(&setup.frame, Role::User, previous);
            tokens.extend(tokenizer.plain(text));
            tokens.extend(tokenizer.header(&setup.frame, Role::Assistant, Some(Role::User)));
            tokens
        };
        let lived = [self.context.clone(), request(Some(self.last_role), &instruction)].concat();
        let fresh = [sample.prefix.clone(), request(None, &format!("{}\n{instruction}", self.text))].concat();
        Ok((generate_memory(setup, &lived)?, generate_memory(setup, &fresh)?))
    }

    /// The memory where the instruction comes before the range: the range is read again after it.
    fn form_with_instruction_first(
        &self,
        setup: &mut MemoryBenchSetup<'_>,
        tokenizer: &BenchTokenizer,
    ) -> Result<String, LlamaError> {
        let (from, to, words) = (self.first_turn.0, self.last_turn.0, setup.max_memory_tokens * 2 / 3);
        let instruction = format!(
            "<memory_formation_start sequence=\"{from}\"/> Summarize what we say from here to <memory_formation_end \
             sequence=\"{to}\"/>: names, numbers, what was decided, what is still open, in at most {words} words."
        );
        let before = &self.context[..self.context.len() - self.tokens.len()];
        let window = [
            before.to_vec(),
            tokenizer.header(&setup.frame, Role::User, Some(Role::Assistant)),
            tokenizer.plain(&instruction),
            self.tokens.clone(),
            tokenizer.header(&setup.frame, Role::User, Some(self.last_role)),
            tokenizer.plain(&format!("<memory_formation_end sequence=\"{to}\"/>")),
            tokenizer.header(&setup.frame, Role::Assistant, Some(Role::User)),
        ];
        generate_memory(setup, &window.concat())
    }

    fn replace(
        &self,
        replacement: RangeReplacement,
        frame: &ChatFormatter,
        tokenizer: &BenchTokenizer,
        [lived, fresh, instruction_first]: [&str; 3],
    ) -> Vec<LlamaToken> {
        let memory = |parts: &[&[LlamaToken]]| {
            let mut tokens = tokenizer.header(frame, Role::System, Some(Role::Assistant));
            let (from, to) = (self.first_turn.0, self.last_turn.0);
            tokens.extend(tokenizer.plain(&format!("<memory from=\"{from}\" to=\"{to}\">\n")));
            parts.iter().for_each(|part| tokens.extend_from_slice(part));
            tokens.extend(tokenizer.plain("\n</memory>"));
            tokens
        };
        match replacement {
            RangeReplacement::FullRange => self.tokens.clone(),
            RangeReplacement::Nothing => Vec::new(),
            RangeReplacement::FreshMemory => memory(&[&tokenizer.plain(fresh)]),
            RangeReplacement::InContextMemory => memory(&[&tokenizer.plain(lived)]),
            RangeReplacement::InstructionFirstMemory => memory(&[&tokenizer.plain(instruction_first)]),
            RangeReplacement::Quotes => memory(&[&self.quotes]),
            RangeReplacement::QuotesAndInContextMemory => memory(&[&self.quotes, &tokenizer.plain(lived)]),
        }
    }
}

impl MemoryBenchReport {
    /// Adds the results of a sample: loss and tokens by replacement, in the order of [`RangeReplacement::ALL`].
    fn add(&mut self, results: &[(RangeReplacement, f64, usize)]) {
        if self.by_replacement.is_empty() {
            self.by_replacement = RangeReplacement::ALL
                .map(|replacement| (replacement, MeanAccumulator::default(), MeanAccumulator::default()))
                .to_vec();
        }
        for ((_, nats, tokens), (_, nll, len)) in self.by_replacement.iter_mut().zip(results) {
            nats.add(*nll);
            tokens.add(*len as f64);
        }
        let loss = |wanted: RangeReplacement| {
            results.iter().find(|(replacement, ..)| *replacement == wanted).map_or(0.0, |(_, nll, _)| *nll)
        };
        self.in_context_wins +=
            usize::from(loss(RangeReplacement::InContextMemory) < loss(RangeReplacement::FreshMemory));
        self.instruction_last_wins += usize::from(
            loss(RangeReplacement::InContextMemory) < loss(RangeReplacement::InstructionFirstMemory),
        );
        self.samples += 1;
    }
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
    let mut sampler = SamplerChain::new(&weights, &sampling, window.len() + setup.max_memory_tokens);
    window[window.len().saturating_sub(sampling.history_len())..]
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
            let mut forming = model.clone();
            let breaker = forming.cancel_handle();
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
