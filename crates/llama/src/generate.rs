//! One answer: sync the KV cache with the window, prefill the end of the window, then sample and decode token by token.
//!
//! The last token of the window is decoded alone: llama.cpp's batched kernels round differently, and the same window must
//! give the same answer, whether it is prefilled now or was cached. (In a batch with other answers the last bits differ.)

use crate::attention::{TapConfig, TapRows};
use crate::ffi::{LlamaContext, LlamaError, LlamaToken, ModelWeights, SamplerChain};
use crate::grammar::GrammarMatcher;
use crate::kv_cache::{DecodedLane, InputToken, KvCache, KvCacheError, LaneId};
use crate::logprobs::token_logprobs;
use crate::token_key::{TokenKey, token_keys};
use crate::token_text::{StopMatcher, Utf8Decoder};
use halo_core::attention::{AttentionRequest, PromptRows};
use halo_core::model::{
    AttentionRow, CacheStats, FinishReason, ModelStep, ModelToken, Sampling, StepFlow, WindowToken,
};
use halo_core::token::{Position, TokenId};

pub(crate) struct GenerateRequest {
    pub(crate) conversation: String,
    pub(crate) window: Vec<WindowToken>,
    /// The timeline position of the first generated token.
    pub(crate) next_position: Position,
    /// Generate in a fork, which leaves no trace in the KV cache.
    pub(crate) ephemeral: bool,
    pub(crate) sampling: Sampling,
    pub(crate) attention: AttentionRequest,
    /// The sampler and the grammar, which the caller's thread makes: both may take seconds, in which no answer would go on.
    pub(crate) sampler: SamplerChain,
    pub(crate) grammar: Option<GrammarMatcher>,
}

pub(crate) type StepListener<'a> = dyn FnMut(ModelStep<'_>) -> StepFlow + 'a;

/// An answer that is being generated. Its tokens are decoded in batches with those of other answers:
/// [`next_tokens`](Self::next_tokens) says what to decode next, and [`advance`](Self::advance) gets the result.
pub(crate) struct Generation {
    request: GenerateRequest,
    lane: LaneId,
    stats: CacheStats,
    answer_budget: usize,
    /// The tokens of the window that are prefilled, except for the last one.
    prefill: Vec<InputToken>,
    prefilled: usize,
    /// Where the last chunk of the prompt begins. It asks for the answer, and has new keys each time: a hybrid model keeps
    /// its state before it.
    boundary: usize,
    /// The token that is decoded alone: the last one of the window, then each one of the answer.
    next: InputToken,
    /// The tokens of the answer so far. None while the window is prefilled.
    answered: Option<usize>,
    decoder: Utf8Decoder,
    stops: StopMatcher,
}

/// How a generation goes on.
pub(crate) enum GenerationFlow {
    Continue,
    Finished(FinishReason),
}

impl Generation {
    /// Makes the cache equal to the window, except for the end that is prefilled, and reserves the lane. None if the listener
    /// stopped it.
    pub(crate) fn start(
        cache: &mut KvCache,
        request: GenerateRequest,
        listener: &mut StepListener<'_>,
    ) -> Result<Option<Self>, KvCacheError> {
        let max_tokens = request.sampling.max_tokens;
        let sync = loop {
            let synced = if request.ephemeral {
                cache.fork(&request.conversation, &request.window, max_tokens)
            } else {
                let mut progress = |done, total| listener(ModelStep::Prefill { done, total });
                cache.sync_window(&request.conversation, &request.window, max_tokens, &mut progress)
            };
            match synced {
                // Idle conversations make way.
                Err(KvCacheError::Llama(LlamaError::CacheFull)) if cache.evict_oldest_lane() => {}
                synced => break synced?,
            }
        };
        let keys = token_keys(&request.window).ok_or(KvCacheError::UnorderedWindow)?;
        let mut prefill: Vec<InputToken> = (sync.prefill_from..request.window.len())
            .map(|n| InputToken::new(keys[n], &request.window[n]))
            .collect();
        let Some(next) = prefill.pop() else { return Err(KvCacheError::EmptyWindow) };
        if listener(ModelStep::Prefill { done: 0, total: prefill.len() + 1 }) != StepFlow::Continue {
            cache.release_lane();
            return Ok(None);
        }
        cache.reserve_lane(sync.cells);
        let last_chunk = prefill.iter().rposition(|token| token.chunk_start);
        let weights = cache.context().weights();
        let decoder = decoder_for_window(weights, &request);
        let stops = StopMatcher::new(&request.sampling.stop);
        Ok(Some(Self {
            lane: cache.selected_lane(),
            stats: sync.stats,
            answer_budget: sync.answer_budget,
            prefilled: 0,
            boundary: last_chunk.filter(|_| cache.has_recurrent_state()).unwrap_or(0),
            prefill,
            next,
            answered: None,
            decoder,
            stops,
            request,
        }))
    }

    pub(crate) fn lane(&self) -> LaneId {
        self.lane
    }

    pub(crate) fn conversation(&self) -> &str {
        &self.request.conversation
    }

    /// How many tokens from the first one on another window can share with this one, and whether they are cached by now.
    pub(crate) fn common_beginning(&self, window: &[WindowToken]) -> (usize, bool) {
        if self.request.ephemeral {
            return (0, true);
        }
        let own = &self.request.window;
        let common = own.iter().zip(window).take_while(|(own, other)| own.id == other.id).count();
        let missing = self.prefill.len() - self.prefilled + 1;
        (common, common + missing <= own.len())
    }

    /// Whether no answer is generated.
    pub(crate) fn is_prefill_only(&self) -> bool {
        self.request.sampling.max_tokens == 0
    }

    /// Whether tokens of the window are prefilled next, in a slice; otherwise a single token is decoded.
    pub(crate) fn is_prefilling(&self) -> bool {
        self.prefilled < self.prefill.len()
    }

    /// The tokens to decode next, at most `max_prefill` of the window, and what is recorded of them.
    pub(crate) fn next_tokens(&self, max_prefill: usize) -> (&[InputToken], TapConfig) {
        let attention = &self.request.attention;
        let rows = match attention.prompt {
            PromptRows::Off => TapRows::None,
            PromptRows::Last => TapRows::Last,
            PromptRows::All => TapRows::All,
        };
        if !self.is_prefilling() {
            let records = match self.answered {
                None => rows != TapRows::None,
                Some(last) => attention.answer && (last + 1).is_multiple_of(attention.stride.max(1) as usize),
            };
            let rows = if records { TapRows::Last } else { TapRows::None };
            return (std::slice::from_ref(&self.next), tap_config(attention, rows));
        }
        let until = if self.prefilled < self.boundary { self.boundary } else { self.prefill.len() };
        let end = until.min(self.prefilled + max_prefill.max(1));
        // With `Last`, the final slice has no row of its own: the last token of the window is decoded after it, and its row is
        // sent with the token that it produces.
        let is_final = end == self.prefill.len() && rows == TapRows::Last;
        let rows = if is_final { TapRows::None } else { rows };
        (&self.prefill[self.prefilled..end], tap_config(attention, rows))
    }

    /// Archives the recurrent state of a hybrid model where an answer can be regenerated from it. Call it before the tokens
    /// are decoded.
    pub(crate) fn save_state(&self, cache: &mut KvCache) {
        let before_last = !self.is_prefilling() && self.answered.is_none();
        if before_last || (self.is_prefilling() && self.prefilled == self.boundary) {
            cache.select_lane(self.lane);
            cache.save_prompt_state();
        }
    }

    /// Takes the result of a decode of `len` tokens, and samples the next token if the window is complete.
    pub(crate) fn advance(
        &mut self,
        context: &LlamaContext,
        len: usize,
        decoded: &DecodedLane,
        listener: &mut StepListener<'_>,
    ) -> Result<GenerationFlow, KvCacheError> {
        let finished = |reason| Ok(GenerationFlow::Finished(reason));
        if self.is_prefilling() {
            self.prefilled += len;
            for row in &decoded.rows {
                let row = AttentionRow { mean: &row.mean, max: &row.max, per_head: &[], probability: None };
                if let Some(reason) = listener(ModelStep::PromptAttention(row)).finish_reason() {
                    return finished(reason);
                }
            }
            let (done, total) = (self.prefilled, self.prefill.len() + 1);
            let flow = listener(ModelStep::Prefill { done, total });
            return flow.finish_reason().map_or(Ok(GenerationFlow::Continue), finished);
        }
        if self.answered.is_none()
            && let Some(reason) = listener(ModelStep::PrefillDone(self.stats)).finish_reason()
        {
            return finished(reason);
        }
        let answered = self.answered.map_or(0, |answered| answered + 1);
        self.answered = Some(answered);
        if answered >= self.answer_budget {
            return finished(FinishReason::Length);
        }
        let logits = context.logits_at(decoded.logits_index);
        self.sample_token(context.weights(), logits, decoded, answered, listener)
    }

    /// Samples the next token of the answer.
    fn sample_token(
        &mut self,
        weights: &ModelWeights,
        logits: &[f32],
        decoded: &DecodedLane,
        answered: usize,
        listener: &mut StepListener<'_>,
    ) -> Result<GenerationFlow, KvCacheError> {
        let finished = |reason| Ok(GenerationFlow::Finished(reason));
        let grammar = self.request.grammar.as_ref();
        let allowed = |token: LlamaToken| grammar.is_none_or(|grammar| grammar.allows(token));
        let Some(token) = self.request.sampler.sample(logits, allowed) else {
            return finished(FinishReason::EndOfText);
        };
        if weights.is_end_of_generation(token) {
            return finished(FinishReason::EndOfText);
        }
        let attention = &self.request.attention;
        let probability = attention.probability.then(|| token_probability(logits, token)).flatten();
        if let Some(count) = self.request.sampling.logprobs {
            let logprobs = token_logprobs(weights, logits, token, count);
            if let Some(reason) = listener(ModelStep::Logprobs(&logprobs)).finish_reason() {
                return finished(reason);
            }
        }
        self.request.sampler.accept(token);
        let grammar_complete = match self.request.grammar.as_mut().map(|grammar| grammar.accept(token)) {
            None => false,
            Some(Ok(complete)) => complete,
            Some(Err(why)) => {
                return Err(LlamaError::Decode(format!("the grammar rejects a sampled token: {why}")).into());
            }
        };
        let text = self.decoder.push(&weights.token_bytes(token, true));
        let stop_matched = self.stops.push(&text);
        let model_token = ModelToken { id: TokenId(token.cast_unsigned()), text };
        let row = decoded.rows.last().filter(|_| attention.answer).map(|row| AttentionRow {
            mean: &row.mean,
            max: &row.max,
            per_head: &decoded.per_head,
            probability,
        });
        if let Some(reason) = listener(ModelStep::Token(&model_token, row)).finish_reason() {
            return finished(reason);
        }
        if stop_matched {
            return finished(FinishReason::StopSequence);
        }
        if grammar_complete {
            return finished(FinishReason::EndOfText);
        }
        if answered + 1 == self.answer_budget {
            return finished(FinishReason::Length);
        }
        let position = i64::try_from(self.request.next_position.0).unwrap_or(i64::MAX);
        let key = TokenKey::at_position(position).plus(answered);
        self.next = InputToken { key, id: token, chunk_start: answered == 0 };
        Ok(GenerationFlow::Continue)
    }
}

fn tap_config(request: &AttentionRequest, rows: TapRows) -> TapConfig {
    let full = request.per_head && rows == TapRows::Last;
    TapConfig { rows, layers: request.layers.clone(), max: request.max, full, ..TapConfig::off() }
}

/// The probability of a token: the softmax of the logits.
fn token_probability(logits: &[f32], token: LlamaToken) -> Option<f32> {
    let own = *logits.get(usize::try_from(token).ok()?)?;
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - own).exp()).sum();
    Some((1.0 / sum) as f32)
}

/// A sampler whose penalties count the end of the window.
pub(crate) fn sampler_for_window(
    weights: &ModelWeights,
    window: &[WindowToken],
    sampling: &Sampling,
    answer_budget: usize,
) -> SamplerChain {
    let mut sampler = SamplerChain::new(weights, sampling, window.len().saturating_add(answer_budget));
    let recent = window.len().saturating_sub(sampling.history_len());
    window[recent..].iter().for_each(|token| sampler.accept(token.id.0.cast_signed()));
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
