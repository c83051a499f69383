//! Generates one answer: sync the KV cache with the window, prefill the end of the window, then sample and decode token
//! by token.

use crate::attention::{ReducedAttention, TapConfig, TapRows};
use crate::ffi::{LlamaError, LlamaToken, ModelWeights, SamplerChain};
use crate::grammar::GrammarMatcher;
use crate::kv_cache::{KvCache, KvCacheError, WindowSync};
use crate::logprobs::token_logprobs;
use crate::token_key::{TokenKey, token_keys};
use crate::token_text::{StopMatcher, Utf8Decoder};
use halo_core::attention::{AttentionRequest, PromptRows};
use halo_core::model::{AttentionRow, FinishReason, ModelStep, ModelToken, Sampling, StepFlow, WindowToken};
use halo_core::token::{Position, TokenId};
use std::sync::Arc;

pub(crate) struct GenerateRequest {
    pub(crate) conversation: String,
    pub(crate) window: Vec<WindowToken>,
    /// The timeline position of the first generated token.
    pub(crate) next_position: Position,
    /// Generate in a fork, which leaves no trace in the KV cache.
    pub(crate) ephemeral: bool,
    pub(crate) sampling: Sampling,
    pub(crate) attention: AttentionRequest,
}

type StepListener<'a> = dyn FnMut(ModelStep<'_>) -> StepFlow + 'a;

pub(crate) fn generate(
    cache: &mut KvCache,
    request: &GenerateRequest,
    grammar: Option<GrammarMatcher>,
    listener: &mut StepListener<'_>,
) -> Result<FinishReason, KvCacheError> {
    let max_tokens = request.sampling.max_tokens;
    let synced = if request.ephemeral {
        cache.fork(&request.conversation, &request.window, max_tokens)
    } else {
        let mut progress = |done, total| listener(ModelStep::Prefill { done, total });
        cache.sync_window(&request.conversation, &request.window, max_tokens, &mut progress)
    };
    let finished = synced.and_then(|sync| {
        let prefilled = prefill_window(cache, request, &sync, listener)?;
        match (prefilled, listener(ModelStep::PrefillDone(sync.stats))) {
            (Some(attention), StepFlow::Continue) => {
                decode_answer(cache, request, sync.answer_budget, attention, grammar, listener)
            }
            _ => Ok(FinishReason::Cancelled),
        }
    });
    cache.drop_fork();
    match finished {
        Err(KvCacheError::Llama(LlamaError::Cancelled)) => Ok(FinishReason::Cancelled),
        finished => finished,
    }
}

/// The attention of one decoded token, as far as it was requested.
struct StepAttention {
    row: Option<ReducedAttention>,
    per_head: Vec<f32>,
}

impl StepAttention {
    fn collect(cache: &mut KvCache, row: Option<ReducedAttention>, request: &AttentionRequest) -> Self {
        let per_head = if request.per_head && row.is_some() { cache.head_attention() } else { Vec::new() };
        Self { row, per_head }
    }

    fn as_row(&self) -> Option<AttentionRow<'_>> {
        let (per_head, probability) = (&self.per_head, None);
        self.row.as_ref().map(|row| AttentionRow { mean: &row.mean, max: &row.max, per_head, probability })
    }
}

fn tap_config(request: &AttentionRequest, rows: TapRows) -> TapConfig {
    let full = request.per_head && rows == TapRows::Last;
    TapConfig { rows, layers: request.layers.clone(), max: request.max, full, ..TapConfig::off() }
}

/// Prefills the end of the window. Returns the attention of its last token, which is the attention that the first token
/// of the answer is sampled with. None if the listener stopped it.
fn prefill_window(
    cache: &mut KvCache,
    request: &GenerateRequest,
    sync: &WindowSync,
    listener: &mut StepListener<'_>,
) -> Result<Option<StepAttention>, KvCacheError> {
    let keys = token_keys(&request.window).ok_or(KvCacheError::UnorderedWindow)?;
    let tokens: Vec<(TokenKey, LlamaToken, bool)> = (sync.prefill_from..request.window.len())
        .map(|n| (keys[n], request.window[n].id.0.cast_signed(), request.window[n].chunk_start))
        .collect();
    let Some((&last, others)) = tokens.split_last() else { return Ok(None) };
    let batch_size = cache.context().params().batch as usize;
    let (total, mut done) = (tokens.len(), 0);
    if listener(ModelStep::Prefill { done, total }) == StepFlow::Stop {
        return Ok(None);
    }
    let rows = match request.attention.prompt {
        PromptRows::Off => TapRows::None,
        PromptRows::Last => TapRows::Last,
        PromptRows::All => TapRows::All,
    };
    for batch in others.chunks(batch_size) {
        done += batch.len();
        // With `Last`, the final batch has no row of its own: its last token is decoded below, and its row is sent with
        // the token that it produces.
        let is_final = done == others.len() && rows == TapRows::Last;
        let batch_rows = if is_final { TapRows::None } else { rows };
        for row in cache.decode(batch, tap_config(&request.attention, batch_rows))? {
            let row = AttentionRow { mean: &row.mean, max: &row.max, per_head: &[], probability: None };
            if listener(ModelStep::PromptAttention(row)) == StepFlow::Stop {
                return Ok(None);
            }
        }
        if listener(ModelStep::Prefill { done, total }) == StepFlow::Stop {
            return Ok(None);
        }
    }
    // The last token is decoded alone: llama.cpp's batched kernels round differently, and the same window must give the
    // same answer, whether it is prefilled now or was cached.
    let rows = if rows == TapRows::None { rows } else { TapRows::Last };
    let row = cache.decode(&[last], tap_config(&request.attention, rows))?.pop();
    Ok(Some(StepAttention::collect(cache, row, &request.attention)))
}

/// Samples and decodes until the answer ends. `attention` is that of the last token of the window.
fn decode_answer(
    cache: &mut KvCache,
    request: &GenerateRequest,
    answer_budget: usize,
    mut attention: StepAttention,
    mut grammar: Option<GrammarMatcher>,
    listener: &mut StepListener<'_>,
) -> Result<FinishReason, KvCacheError> {
    let weights = Arc::clone(cache.context().weights());
    let mut sampler = sampler_for_window(&weights, request, answer_budget);
    let mut decoder = decoder_for_window(&weights, request);
    let mut stops = StopMatcher::new(&request.sampling.stop);
    for n in 0..answer_budget {
        let allowed = |token: LlamaToken| grammar.as_ref().is_none_or(|grammar| grammar.allows(token));
        let Some(token) = sampler.sample(cache.context().logits(), allowed) else {
            return Ok(FinishReason::EndOfText);
        };
        if weights.is_end_of_generation(token) {
            return Ok(FinishReason::EndOfText);
        }
        let probability = request
            .attention
            .probability
            .then(|| token_probability(cache.context().logits(), token))
            .flatten();
        if let Some(count) = request.sampling.logprobs {
            let logprobs = token_logprobs(&weights, cache.context().logits(), token, count);
            if listener(ModelStep::Logprobs(&logprobs)) == StepFlow::Stop {
                return Ok(FinishReason::Cancelled);
            }
        }
        sampler.accept(token);
        let grammar_complete = match grammar.as_mut().map(|grammar| grammar.accept(token)) {
            None => false,
            Some(Ok(complete)) => complete,
            Some(Err(why)) => {
                return Err(LlamaError::Decode(format!("the grammar rejects a sampled token: {why}")).into());
            }
        };
        let text = decoder.push(&weights.token_bytes(token, true));
        let stop_matched = stops.push(&text);
        let model_token = ModelToken { id: TokenId(token.cast_unsigned()), text };
        let row = attention.as_row().filter(|_| request.attention.answer);
        let row = row.map(|row| AttentionRow { probability, ..row });
        if listener(ModelStep::Token(&model_token, row)) == StepFlow::Stop {
            return Ok(FinishReason::Cancelled);
        }
        if stop_matched {
            return Ok(FinishReason::StopSequence);
        }
        if grammar_complete {
            return Ok(FinishReason::EndOfText);
        }
        if n + 1 == answer_budget {
            break;
        }
        let position = i64::try_from(request.next_position.0).unwrap_or(i64::MAX);
        let key = TokenKey::at_position(position).plus(n);
        let rows = if request.attention.answer { TapRows::Last } else { TapRows::None };
        let row = cache.decode(&[(key, token, n == 0)], tap_config(&request.attention, rows))?.pop();
        attention = StepAttention::collect(cache, row, &request.attention);
    }
    Ok(FinishReason::Length)
}

/// The probability of a token: the softmax of the logits.
fn token_probability(logits: &[f32], token: LlamaToken) -> Option<f32> {
    let own = *logits.get(usize::try_from(token).ok()?)?;
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - own).exp()).sum();
    Some((1.0 / sum) as f32)
}

/// A sampler whose penalties count the end of the window.
fn sampler_for_window(
    weights: &ModelWeights,
    request: &GenerateRequest,
    answer_budget: usize,
) -> SamplerChain {
    let window = request.window.len();
    let mut sampler = SamplerChain::new(weights, &request.sampling, window.saturating_add(answer_budget));
    let recent = window.saturating_sub(request.sampling.history_len());
    request.window[recent..].iter().for_each(|token| sampler.accept(token.id.0.cast_signed()));
    sampler
}

/// A decoder that has seen the end of the window: a character of up to four bytes may have started there.
fn decoder_for_window(weights: &ModelWeights, request: &GenerateRequest) -> Utf8Decoder {
    let mut decoder = Utf8Decoder::default();
    let recent = request.window.iter().rev().take(4).rev();
    let bytes: Vec<u8> =
        recent.flat_map(|token| weights.token_bytes(token.id.0.cast_signed(), true)).collect();
    decoder.push(&bytes);
    decoder
}
