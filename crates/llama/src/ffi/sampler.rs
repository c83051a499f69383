//! What chooses the next token: llama.cpp's own samplers, in the order in which llama.cpp's own programs have them.

use super::{Token, Weights};
use halo_core::seams::Sampling;
use llama_cpp_sys_2 as sys;
use std::ptr::NonNull;

/// Chooses tokens. The same sampling and the same guesses give the same choices.
pub struct Sampler {
    chain: NonNull<sys::llama_sampler>,
    candidates: Vec<sys::llama_token_data>,
}

// SAFETY: a chain is plain memory that one thread at a time uses: it is not `Sync`.
unsafe impl Send for Sampler {}

impl Sampler {
    /// How many of the latest tokens are held against a token that comes again.
    pub const WINDOW: usize = 256;

    /// A sampler as asked for.
    ///
    /// # Panics
    /// When there is no memory left for a few bytes.
    #[must_use]
    pub fn new(weights: &Weights, sampling: &Sampling) -> Self {
        // SAFETY: the chain is new and owns what is added to it; all parameters are numbers, which llama.cpp takes as
        // they come: what would switch a sampler off is not added at all.
        let chain = unsafe {
            let chain = sys::llama_sampler_chain_init(sys::llama_sampler_chain_default_params());
            let add = |sampler: *mut sys::llama_sampler| {
                if !sampler.is_null() {
                    sys::llama_sampler_chain_add(chain, sampler);
                }
            };
            if sampling.repetition.is_finite() && sampling.repetition > 0.0 && sampling.repetition != 1.0 {
                let vocabulary = weights.vocabulary() as i32;
                let last = Self::WINDOW as i32;
                let repetition = sampling.repetition.clamp(0.01, 100.0);
                add(sys::llama_sampler_init_penalties(vocabulary, last, repetition, 0.0, 0.0));
            }
            // Colder than this is the likeliest alone, and would be divided by nearly nothing.
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
                add(sys::llama_sampler_init_dist(seed(sampling.seed)));
            } else {
                add(sys::llama_sampler_init_greedy());
            }
            chain
        };
        let chain = NonNull::new(chain).expect("a few bytes of memory");
        Self { chain, candidates: Vec::new() }
    }

    /// The next token, of those that `allowed` lets through; none where it lets none through, or there is no guess.
    #[must_use]
    pub fn choose(&mut self, logits: &[f32], allowed: impl Fn(Token) -> bool) -> Option<Token> {
        self.candidates.clear();
        let candidates = logits.iter().enumerate().map(|(id, &logit)| (id as Token, logit));
        let candidates = candidates.filter(|&(id, logit)| logit > f32::NEG_INFINITY && allowed(id));
        self.candidates.extend(candidates.map(|(id, logit)| sys::llama_token_data { id, logit, p: 0.0 }));
        if self.candidates.is_empty() {
            return None;
        }
        let mut list = sys::llama_token_data_array {
            data: self.candidates.as_mut_ptr(),
            size: self.candidates.len(),
            selected: -1,
            sorted: false,
        };
        // SAFETY: the list is as long as it says; samplers reorder it, shorten its count and mark one of it.
        unsafe { sys::llama_sampler_apply(self.chain.as_ptr(), &raw mut list) };
        let chosen = usize::try_from(list.selected).ok().filter(|&n| n < list.size)?;
        self.candidates.get(chosen).map(|c| c.id)
    }

    /// Tells it what was said, by whomever.
    pub fn said(&mut self, token: Token) {
        // SAFETY: the chain lives; samplers that keep tokens take any number.
        unsafe { sys::llama_sampler_accept(self.chain.as_ptr(), token) };
    }
}

/// A seed of 32 bits; one of them would mean "by chance".
fn seed(seed: u64) -> u32 {
    let folded = (seed ^ (seed >> 32)) as u32;
    if folded == u32::MAX { 0 } else { folded }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once, with all that was added to it.
        unsafe { sys::llama_sampler_free(self.chain.as_ptr()) };
    }
}
