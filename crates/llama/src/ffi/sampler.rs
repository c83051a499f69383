//! Chooses the next token with llama.cpp's own samplers, in the order that llama.cpp's programs use: repetition penalty,
//! top-k, top-p, min-p, temperature, then a random choice by seed; or greedy where the temperature is 0.

use super::types::LlamaToken;
use super::weights::ModelWeights;
use halo_core::model::Sampling;
use llama_cpp_sys_2 as sys;
use std::ptr::NonNull;

/// A `llama_sampler` chain. The same sampling parameters and the same logits give the same tokens.
pub struct SamplerChain {
    chain: NonNull<sys::llama_sampler>,
    candidates: Vec<sys::llama_token_data>,
}

// SAFETY: a chain is plain memory without thread affinity, and it is not `Sync`, so one thread uses it at a time.
unsafe impl Send for SamplerChain {}

impl SamplerChain {
    /// The repetition penalty counts this many of the latest tokens.
    pub const PENALTY_LAST_N: usize = 256;

    /// # Panics
    /// When llama.cpp cannot allocate the chain.
    #[must_use]
    pub fn new(weights: &ModelWeights, sampling: &Sampling) -> Self {
        // SAFETY: the chain is new and takes ownership of the samplers that are added to it; all parameters are
        // numbers, limited to the ranges that llama.cpp accepts.
        let chain = unsafe {
            let chain = sys::llama_sampler_chain_init(sys::llama_sampler_chain_default_params());
            let add = |sampler: *mut sys::llama_sampler| {
                if !sampler.is_null() {
                    sys::llama_sampler_chain_add(chain, sampler);
                }
            };
            if sampling.repetition_penalty.is_finite()
                && sampling.repetition_penalty > 0.0
                && sampling.repetition_penalty != 1.0
            {
                let vocab_size = weights.vocab_size() as i32;
                let last_n = Self::PENALTY_LAST_N as i32;
                let penalty = sampling.repetition_penalty.clamp(0.01, 100.0);
                add(sys::llama_sampler_init_penalties(vocab_size, last_n, penalty, 0.0, 0.0));
            }
            // Logits are divided by the temperature: below this it would overflow, and the result is greedy anyway.
            if sampling.temperature >= 1e-3 {
                if sampling.top_k > 0 {
                    add(sys::llama_sampler_init_top_k(i32::try_from(sampling.top_k).unwrap_or(i32::MAX)));
                }
                if sampling.top_p < 1.0 {
                    add(sys::llama_sampler_init_top_p(sampling.top_p.max(0.0), 1));
                }
                if sampling.min_p > 0.0 {
                    add(sys::llama_sampler_init_min_p(sampling.min_p.min(1.0), 1));
                }
                add(sys::llama_sampler_init_temp(sampling.temperature));
                add(sys::llama_sampler_init_dist(fold_seed(sampling.seed)));
            } else {
                add(sys::llama_sampler_init_greedy());
            }
            chain
        };
        let chain = NonNull::new(chain).expect("llama.cpp allocates a sampler chain");
        Self { chain, candidates: Vec::new() }
    }

    /// Samples one of the tokens that `allowed` accepts. None where it accepts none, or there are no logits.
    #[must_use]
    pub fn sample(&mut self, logits: &[f32], allowed: impl Fn(LlamaToken) -> bool) -> Option<LlamaToken> {
        self.candidates.clear();
        let candidates = logits.iter().enumerate().map(|(id, &logit)| (id as LlamaToken, logit));
        let candidates = candidates.filter(|&(id, logit)| logit > f32::NEG_INFINITY && allowed(id));
        self.candidates.extend(candidates.map(|(id, logit)| sys::llama_token_data { id, logit, p: 0.0 }));
        if self.candidates.is_empty() {
            return None;
        }
        let mut array = sys::llama_token_data_array {
            data: self.candidates.as_mut_ptr(),
            size: self.candidates.len(),
            selected: -1,
            sorted: false,
        };
        // SAFETY: `array` describes `self.candidates` exactly; samplers reorder it, lower `size` and set `selected`.
        unsafe { sys::llama_sampler_apply(self.chain.as_ptr(), &raw mut array) };
        let selected = usize::try_from(array.selected).ok().filter(|&n| n < array.size)?;
        self.candidates.get(selected).map(|c| c.id)
    }

    /// Counts a token of the prompt or the answer for the repetition penalty.
    pub fn accept(&mut self, token: LlamaToken) {
        // SAFETY: the chain is alive; llama.cpp accepts any token id here.
        unsafe { sys::llama_sampler_accept(self.chain.as_ptr(), token) };
    }
}

/// llama.cpp's seeds have 32 bits, and `u32::MAX` (`LLAMA_DEFAULT_SEED`) means a random seed.
fn fold_seed(seed: u64) -> u32 {
    let folded = (seed ^ (seed >> 32)) as u32;
    if folded == u32::MAX { 0 } else { folded }
}

impl Drop for SamplerChain {
    fn drop(&mut self) {
        // SAFETY: created by `new` and freed once; llama.cpp frees the samplers of the chain with it.
        unsafe { sys::llama_sampler_free(self.chain.as_ptr()) };
    }
}
