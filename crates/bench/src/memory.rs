//! What a memory is worth, and what forming one costs whoever speaks next.
//!
//! A stretch of a real conversation is read: what came before, a range, what was said after it, and what really came next.
//! The range is remembered twice: by the state that has just lived it, and by a fresh one that is shown the same words. Then
//! each memory stands where the range was, and the model tells how unlikely it finds what came next: with all of the range,
//! with nothing of it, with either memory, with the user's own words, and with those and the memory.

use crate::keep::Sum;
use crate::keep::sample::{self, Lengths};
use crate::recall::Conversation;
use halo_core::attention::Watch;
use halo_core::replay::Rules;
use halo_core::seams::{Flow, Message, Model, ModelStep, Piece, Prompt, Sampling, SeamError, Seen};
use halo_core::token::{Position, Role, TokenId};
use halo_engine::frame::Frame;
use halo_engine::memory::form::instruction;
use halo_engine::memory::range::Span;
use halo_llama::attention::Want;
use halo_llama::ffi::{Context, Item, LlamaError, Pos, Sampler, Seq, Token};
use halo_llama::model::Llama;
use std::time::{Duration, Instant};

const SEQ: Seq = Seq(0);

/// How it is measured.
pub struct Setup<'a> {
    /// The model.
    pub context: &'a mut Context,
    /// How messages are written for it.
    pub frame: Frame,
    /// How what is said becomes chunks.
    pub rules: Rules,
    /// Tokens before the range, of the range, between it and what came next, and of that.
    pub lengths: [usize; 4],
    /// Stretches of each conversation.
    pub samples: usize,
    /// The longest memory.
    pub tokens: usize,
}

/// What stands where the range was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// All of it.
    Range,
    /// Nothing.
    Nothing,
    /// A memory that a fresh prompt made of the same words.
    Fresh,
    /// A memory that the state made which had lived it.
    Lived,
    /// What the user said, word for word.
    Quotes,
    /// That, and the memory of the state that had lived it.
    QuotesAndLived,
}

impl What {
    /// All of them.
    pub const ALL: [What; 6] =
        [What::Range, What::Nothing, What::Fresh, What::Lived, What::Quotes, What::QuotesAndLived];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            What::Range => "range",
            What::Nothing => "nothing",
            What::Fresh => "fresh",
            What::Lived => "lived",
            What::Quotes => "quotes",
            What::QuotesAndLived => "quotes_and_lived",
        }
    }
}

/// What was measured.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Stretches.
    pub samples: usize,
    /// By what stands there: how unlikely what came next is, in nats a token, and how many tokens stand there.
    pub by: Vec<(What, Sum, Sum)>,
    /// How often the memory of the state that lived it did better than the fresh one.
    pub lived_wins: usize,
    /// The memories themselves, to be read: of the state that lived it, and fresh.
    pub texts: Vec<(String, String)>,
}

/// Measures one conversation. `progress` hears how many stretches are done.
///
/// # Errors
/// When llama.cpp fails.
pub fn measure(
    conversation: &Conversation,
    setup: &mut Setup<'_>,
    report: &mut Report,
    progress: &mut dyn FnMut(u64),
) -> Result<(), LlamaError> {
    let weights = std::sync::Arc::clone(setup.context.weights());
    let tokenize =
        |text: &str, special: bool| -> Vec<Piece> { halo_llama::text::pieces(&weights, text, special) };
    let [before, range, between, next] = setup.lengths;
    let most = setup.context.shape().tokens as usize - next - setup.tokens - 200;
    let lengths = Lengths { history: before + range, watched: between, next, most };
    let samples = sample::cut(conversation, setup.samples, lengths, &setup.frame, &setup.rules, &tokenize);
    for sample in samples {
        let ids =
            |pieces: Vec<Piece>| pieces.into_iter().map(|p| p.id.0.cast_signed()).collect::<Vec<Token>>();
        let (said, special) =
            (|text: &str| ids(tokenize(text, false)), |text: &str| ids(tokenize(text, true)));
        // The range begins with the first whole turn behind what came before.
        let (mut lived, mut of_range) = (sample.prefix.clone(), Vec::new());
        let (mut quotes, mut words, mut first) = (Vec::new(), String::new(), None);
        for chunk in sample.history.chunks() {
            let tokens = chunk.ids(chunk.run()).iter().map(|id| id.0.cast_signed());
            let (text, turn) = (chunk.text().trim().to_owned(), chunk.id().turn);
            if first.is_none() && lived.len() >= sample.prefix.len() + before && chunk.id().sentence == 0 {
                first = Some((turn, text.split_whitespace().take(8).collect::<Vec<_>>().join(" ")));
            }
            lived.extend(tokens.clone());
            if first.is_some() {
                of_range.extend(tokens);
                let user = chunk.id().role == Role::User;
                words.push_str(&format!("{}: {text}\n", if user { "User" } else { "Assistant" }));
                if user {
                    quotes.extend(said(&format!("The user said: {text}\n")));
                }
            }
        }
        let (Some((from, first)), Some(to)) = (first, sample.history.turns().last()) else { continue };
        let told = instruction(Span { from: (from.0, 0), to: (to.id.0, 0) }, &first, setup.tokens);
        let asks = |frame: &Frame, before: Option<Role>, text: &str| {
            let mut tokens = special(&frame.opening(Role::User, before, None));
            tokens.extend(said(text));
            tokens.extend(special(&frame.opening(Role::Assistant, Some(Role::User), None)));
            tokens
        };
        lived.extend(asks(&setup.frame, Some(to.role), &told));
        let mut fresh = sample.prefix.clone();
        fresh.extend(asks(&setup.frame, None, &format!("{words}\n{told}")));
        let lived = speak(setup, &lived)?;
        let fresh = speak(setup, &fresh)?;
        let after: Vec<Token> = sample.said();
        let stands = |inside: &[&[Token]]| {
            let mut tokens = special(&setup.frame.opening(Role::System, Some(Role::Assistant), None));
            tokens.extend(said(&format!("<memory from=\"{}\" to=\"{}\">\n", from.0, to.id.0)));
            inside.iter().for_each(|part| tokens.extend_from_slice(part));
            tokens.extend(said("\n</memory>"));
            tokens
        };
        let (lived_tokens, fresh_tokens) = (said(lived.trim()), said(fresh.trim()));
        let mut told = Vec::new();
        for what in What::ALL {
            let stood = match what {
                What::Range => of_range.clone(),
                What::Nothing => Vec::new(),
                What::Fresh => stands(&[&fresh_tokens]),
                What::Lived => stands(&[&lived_tokens]),
                What::Quotes => stands(&[&quotes]),
                What::QuotesAndLived => stands(&[&quotes, &lived_tokens]),
            };
            let window: Vec<Token> = sample.prefix.iter().chain(&stood).chain(&after).copied().collect();
            told.push((what, nll(setup.context, &window, &sample.next)?, stood.len()));
        }
        if report.by.is_empty() {
            report.by = What::ALL.map(|what| (what, Sum::default(), Sum::default())).to_vec();
        }
        for ((_, nats, tokens), (_, nll, len)) in report.by.iter_mut().zip(&told) {
            nats.add(*nll);
            tokens.add(*len as f64);
        }
        let of =
            |wanted: What| told.iter().find(|(what, ..)| *what == wanted).map_or(0.0, |(_, nll, _)| *nll);
        report.lived_wins += usize::from(of(What::Lived) < of(What::Fresh));
        report.texts.push((lived.trim().to_owned(), fresh.trim().to_owned()));
        report.samples += 1;
        progress(report.samples as u64);
    }
    Ok(())
}

fn items(tokens: &[Token], start: usize, logits: impl Fn(usize) -> bool) -> Vec<Item> {
    let item = |(n, &token): (usize, &Token)| Item { token, position: (start + n) as Pos, logits: logits(n) };
    tokens.iter().enumerate().map(item).collect()
}

/// Reads a window from nothing; the guess behind it is known then.
fn read(context: &mut Context, window: &[Token]) -> Result<(), LlamaError> {
    let _ = context.remove(SEQ, -1, -1);
    let batch = context.shape().batch as usize;
    for (n, part) in window.chunks(batch).enumerate() {
        let (start, end) = (n * batch, window.len());
        context.tap().want(Want::nothing());
        context.decode(SEQ, &items(part, start, |i| start + i + 1 == end))?;
    }
    Ok(())
}

/// What the model says behind a window, as memories are said: the likeliest, and not the same again.
fn speak(setup: &mut Setup<'_>, window: &[Token]) -> Result<String, LlamaError> {
    let weights = std::sync::Arc::clone(setup.context.weights());
    read(setup.context, window)?;
    let sampling = Sampling { temperature: 0.0, repetition: 1.1, ..Sampling::default() };
    let mut sampler = Sampler::new(&weights, &sampling);
    window[window.len().saturating_sub(Sampler::WINDOW)..].iter().for_each(|&token| sampler.said(token));
    let (mut bytes, mut at) = (Vec::new(), window.len());
    for _ in 0..setup.tokens {
        let Some(token) = sampler.choose(setup.context.guess(), |_| true).filter(|&t| !weights.ends(t))
        else {
            break;
        };
        sampler.said(token);
        bytes.extend(weights.bytes(token, true));
        setup.context.tap().want(Want::nothing());
        setup.context.decode(SEQ, &items(&[token], at, |_| true))?;
        at += 1;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// How unlikely the model finds what came next, in nats a token.
fn nll(context: &mut Context, window: &[Token], next: &[Token]) -> Result<f64, LlamaError> {
    read(context, window)?;
    let unlikely = |guess: &[f32], came: Token| {
        let top = guess.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = guess.iter().map(|s| f64::from(s - top).exp()).sum();
        sum.ln() - f64::from(guess[came as usize] - top)
    };
    let Some((&first, rest)) = next.split_first() else { return Ok(0.0) };
    let mut all = vec![unlikely(context.guess(), first)];
    let batch = context.shape().batch as usize;
    let mut done = 0;
    for part in next[..next.len() - 1].chunks(batch) {
        context.tap().want(Want::nothing());
        context.decode(SEQ, &items(part, window.len() + done, |_| true))?;
        all.extend((0..part.len()).map(|n| unlikely(context.guess_at(n), rest[done + n])));
        done += part.len();
    }
    Ok(all.iter().sum::<f64>() / all.len() as f64)
}

/// From the wish to speak to the first token, with nothing else going on and with a memory being formed, in turn.
#[derive(Clone, Debug, Default)]
pub struct FirstToken {
    /// With nothing else going on.
    pub alone: Vec<Duration>,
    /// While a memory is being formed: whoever speaks ends that first.
    pub forming: Vec<Duration>,
    /// Of that, until the model was free.
    pub broken_off: Vec<Duration>,
}

/// Measures how long whoever speaks next waits.
///
/// # Errors
/// When the model fails.
pub fn first_token(model: &mut Llama, text: &str, rounds: usize) -> Result<FirstToken, SeamError> {
    let pieces = model.tokenize(text, false)?;
    let seen =
        |n: usize, id: TokenId| Seen { position: Some(Position(n as u64)), behind: 0, id, begins: n == 0 };
    let window: Vec<Seen> = pieces.iter().enumerate().map(|(n, piece)| seen(n, piece.id)).collect();
    let nothing = || Vec::<Message>::new();
    let (mut measured, mut broken_off) = (FirstToken::default(), Vec::new());
    let answer = |model: &mut Llama, n: usize| -> Result<Duration, SeamError> {
        let mut window = window.clone();
        // As long as people write, and never the same: nothing of it is in memory.
        let message = format!(
            "\n{n} is what I am thinking of now. Tell me something else, please, about the town where my sister {n} lives and \
             what one can do there in the evening, when it rains and everything is closed."
        );
        for piece in model.tokenize(&message, false)? {
            window.push(seen(window.len(), piece.id));
        }
        let next = Position(window.len() as u64);
        let prompt =
            Prompt { conversation: "bench", window: &window, messages: &nothing, next, aside: false };
        let sampling = Sampling { max_tokens: 8, temperature: 0.0, ..Sampling::default() };
        let (begin, mut first) = (Instant::now(), None);
        model.generate(&prompt, &sampling, &Watch::default(), &mut |step| {
            // The window has been read, and the first token is known.
            if matches!(step, ModelStep::Ready(_)) {
                first.get_or_insert_with(|| begin.elapsed());
            }
            Flow::Continue
        })?;
        Ok(first.unwrap_or_default())
    };
    answer(model, 0)?;
    for round in 0..rounds {
        // One way, then the other, then the other way round: what drifts, drifts for both.
        for forms in if round.is_multiple_of(2) { [false, true] } else { [true, false] } {
            if !forms {
                measured.alone.push(answer(model, 1000 + round)?);
                continue;
            }
            let (mut forming, breaker) = (model.clone(), model.breaker());
            let aside = window.clone();
            let took = std::thread::scope(|scope| -> Result<Duration, SeamError> {
                let formed = scope.spawn(move || {
                    let next = Position(aside.len() as u64);
                    let messages = || Vec::<Message>::new();
                    let prompt = Prompt {
                        conversation: "bench",
                        window: &aside,
                        messages: &messages,
                        next,
                        aside: true,
                    };
                    let sampling = Sampling { max_tokens: 200, temperature: 0.0, ..Sampling::default() };
                    forming.generate(&prompt, &sampling, &Watch::nothing(), &mut |_| Flow::Continue)
                });
                // Some are met while they read, some while they write.
                std::thread::sleep(Duration::from_millis(40 + 35 * round as u64));
                let begin = Instant::now();
                breaker.iter().for_each(|breaks| breaks());
                formed.join().map_err(|_| SeamError::new("forming", "it broke down"))??;
                let left = begin.elapsed();
                broken_off.push(left);
                Ok(left + answer(model, 2000 + round)?)
            })?;
            measured.forming.push(took);
        }
    }
    Ok(FirstToken { broken_off, ..measured })
}
