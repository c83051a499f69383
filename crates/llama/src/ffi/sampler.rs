//! Chooses the next token with llama.cpp's own samplers and those of [`candidates`](super::candidates). By default they have the
//! order of llama.cpp's programs: penalties, DRY, the samplers that cut candidates, temperature, then a random choice by seed;
//! or greedy where the temperature is 0.

use super::candidates::{Candidates, SlopedPenalties};
use super::types::LlamaToken;
use super::weights::ModelWeights;
use halo_core::model::{LogitSmoothing, Mirostat, MirostatVersion, SamplerKind, Sampling};
use llama_cpp_sys_2 as sys;
use std::ffi::CString;
use std::ptr::NonNull;

/// Owns a `llama_sampler` of llama.cpp.
struct LlamaSampler(NonNull<sys::llama_sampler>);

// SAFETY: a sampler is plain memory without thread affinity, and it is not `Sync`, so one thread uses it at a time.
unsafe impl Send for LlamaSampler {}

impl LlamaSampler {
    /// # Panics
    /// When llama.cpp cannot allocate the sampler.
    fn new(sampler: *mut sys::llama_sampler) -> Self {
        Self(NonNull::new(sampler).expect("llama.cpp allocates a sampler"))
    }

    /// Applies it to the candidates. Returns the index of the candidate that it selects, if it does.
    fn apply(&mut self, candidates: &mut Candidates) -> Option<usize> {
        let mut array = sys::llama_token_data_array {
            data: candidates.tokens.as_mut_ptr(),
            size: candidates.tokens.len(),
            selected: -1,
            sorted: candidates.sorted,
        };
        // SAFETY: `array` describes `tokens` exactly; samplers reorder it, lower `size` and set `selected`.
        unsafe { sys::llama_sampler_apply(self.0.as_ptr(), &raw mut array) };
        candidates.sorted = array.sorted;
        candidates.tokens.truncate(array.size);
        usize::try_from(array.selected).ok().filter(|&selected| selected < array.size)
    }
}

impl Drop for LlamaSampler {
    fn drop(&mut self) {
        // SAFETY: created by llama.cpp and freed once.
        unsafe { sys::llama_sampler_free(self.0.as_ptr()) };
    }
}

/// One step of the chain.
enum SamplerStage {
    Llama(LlamaSampler),
    Penalties(SlopedPenalties),
    TopA(f32),
    TailFree(f32),
    Smoothing(LogitSmoothing),
}

/// The samplers of an answer. The same sampling parameters and the same logits give the same tokens.
pub struct SamplerChain {
    stages: Vec<SamplerStage>,
    candidates: Candidates,
    /// Added to the logits, by token; empty where no token has a bias.
    bias: Vec<f32>,
    /// Mirostat fits a curve to at least two candidates.
    needs_two_candidates: bool,
}

/// Below this temperature the logits would overflow, and the result is greedy anyway.
const MIN_TEMPERATURE: f32 = 1e-3;

/// How many candidates Mirostat 1.0 estimates its curve from, as in its paper.
const MIROSTAT_CANDIDATES: i32 = 100;

impl SamplerChain {
    /// The samplers of an answer; `max_history` is the number of tokens that the window and the answer can have.
    ///
    /// # Panics
    /// When llama.cpp cannot allocate a sampler.
    #[must_use]
    pub fn new(weights: &ModelWeights, sampling: &Sampling, max_history: usize) -> Self {
        let dynamic = sampling.dynamic_temperature.range > 0.0;
        let greedy = sampling.temperature < MIN_TEMPERATURE && !dynamic;
        let mirostat = sampling.mirostat.filter(|_| !greedy);
        let mut stages = Vec::new();
        for kind in sampling.sampler_order() {
            let applies = match kind {
                SamplerKind::Penalties | SamplerKind::Dry => true,
                SamplerKind::Temperature => !greedy,
                // Mirostat cuts the candidates itself.
                _ => !greedy && mirostat.is_none(),
            };
            if applies {
                add_stages(&mut stages, kind, weights, sampling, max_history);
            }
        }
        let seed = fold_seed(sampling.seed);
        // SAFETY: all parameters are numbers, limited to the ranges that llama.cpp accepts.
        let choice = LlamaSampler::new(unsafe {
            match mirostat {
                _ if greedy => sys::llama_sampler_init_greedy(),
                None => sys::llama_sampler_init_dist(seed),
                Some(Mirostat { version: MirostatVersion::One, tau, eta }) => {
                    let vocab_size = weights.vocab_size() as i32;
                    sys::llama_sampler_init_mirostat(vocab_size, seed, tau, eta, MIROSTAT_CANDIDATES)
                }
                Some(Mirostat { version: MirostatVersion::Two, tau, eta }) => {
                    sys::llama_sampler_init_mirostat_v2(seed, tau, eta)
                }
            }
        });
        stages.push(SamplerStage::Llama(choice));
        Self {
            stages,
            candidates: Candidates::default(),
            bias: token_biases(weights, sampling),
            needs_two_candidates: mirostat.is_some(),
        }
    }

    /// Samples one of the tokens that `allowed` accepts. None where it accepts none, or there are no logits.
    #[must_use]
    pub fn sample(&mut self, logits: &[f32], allowed: impl Fn(LlamaToken) -> bool) -> Option<LlamaToken> {
        let Self { stages, candidates, bias, needs_two_candidates } = self;
        candidates.tokens.clear();
        candidates.sorted = false;
        let biased = logits.iter().enumerate().map(|(id, &logit)| {
            let logit = bias.get(id).map_or(logit, |bias| logit + bias);
            sys::llama_token_data { id: id as LlamaToken, logit, p: 0.0 }
        });
        candidates.tokens.extend(biased.filter(|token| token.logit > f32::NEG_INFINITY && allowed(token.id)));
        if candidates.tokens.is_empty() {
            return None;
        }
        if *needs_two_candidates && candidates.tokens.len() == 1 {
            return Some(candidates.tokens[0].id);
        }
        let mut selected = None;
        for stage in stages {
            match stage {
                SamplerStage::Llama(sampler) => selected = sampler.apply(candidates),
                SamplerStage::Penalties(penalties) => penalties.apply(candidates),
                SamplerStage::TopA(a) => candidates.keep_top_a(*a),
                SamplerStage::TailFree(z) => candidates.keep_tail_free(*z),
                SamplerStage::Smoothing(smoothing) => candidates.smooth(*smoothing),
            }
        }
        candidates.tokens.get(selected?).map(|token| token.id)
    }

    /// Counts a token of the prompt or the answer for the penalties.
    pub fn accept(&mut self, token: LlamaToken) {
        for stage in &mut self.stages {
            match stage {
                // SAFETY: the sampler is alive; llama.cpp accepts any token id here.
                SamplerStage::Llama(sampler) => unsafe {
                    sys::llama_sampler_accept(sampler.0.as_ptr(), token);
                },
                SamplerStage::Penalties(penalties) => penalties.accept(token),
                SamplerStage::TopA(_) | SamplerStage::TailFree(_) | SamplerStage::Smoothing(_) => {}
            }
        }
    }
}

/// Adds the sampler of a kind, unless its parameters are neutral.
fn add_stages(
    stages: &mut Vec<SamplerStage>,
    kind: SamplerKind,
    weights: &ModelWeights,
    sampling: &Sampling,
    max_history: usize,
) {
    let range = |wanted: usize| i32::try_from(wanted.min(max_history)).unwrap_or(i32::MAX);
    // SAFETY: all parameters are numbers, limited to the ranges that llama.cpp accepts.
    let sampler = unsafe {
        match kind {
            SamplerKind::Penalties if sampling.has_penalties() && sampling.penalty_slope != 1.0 => {
                let range = sampling.penalty_range.min(max_history);
                return stages.push(SamplerStage::Penalties(SlopedPenalties::new(sampling, range)));
            }
            SamplerKind::Penalties if sampling.has_penalties() => {
                let penalty = Some(sampling.repetition_penalty).filter(|p| p.is_finite() && *p > 0.0);
                sys::llama_sampler_init_penalties(
                    weights.vocab_size() as i32,
                    range(sampling.penalty_range),
                    penalty.unwrap_or(1.0).clamp(0.01, 100.0),
                    sampling.frequency_penalty.clamp(-100.0, 100.0),
                    sampling.presence_penalty.clamp(-100.0, 100.0),
                )
            }
            SamplerKind::Dry if sampling.dry.multiplier > 0.0 => {
                dry_sampler(weights, sampling, range(sampling.dry.range))
            }
            SamplerKind::TopNSigma if sampling.top_n_sigma > 0.0 => {
                sys::llama_sampler_init_top_n_sigma(sampling.top_n_sigma)
            }
            SamplerKind::TopK if sampling.top_k > 0 => {
                sys::llama_sampler_init_top_k(i32::try_from(sampling.top_k).unwrap_or(i32::MAX))
            }
            SamplerKind::TopA if sampling.top_a > 0.0 => {
                return stages.push(SamplerStage::TopA(sampling.top_a));
            }
            SamplerKind::TailFree if sampling.tail_free < 1.0 => {
                return stages.push(SamplerStage::TailFree(sampling.tail_free));
            }
            SamplerKind::TypicalP if sampling.typical_p < 1.0 => {
                sys::llama_sampler_init_typical(sampling.typical_p.max(0.0), 1)
            }
            SamplerKind::TopP if sampling.top_p < 1.0 => {
                sys::llama_sampler_init_top_p(sampling.top_p.max(0.0), 1)
            }
            SamplerKind::MinP if sampling.min_p > 0.0 => {
                sys::llama_sampler_init_min_p(sampling.min_p.min(1.0), 1)
            }
            SamplerKind::Xtc if sampling.xtc.probability > 0.0 => {
                let (probability, threshold) = (sampling.xtc.probability, sampling.xtc.threshold);
                sys::llama_sampler_init_xtc(probability, threshold, 1, fold_seed(sampling.seed))
            }
            SamplerKind::Temperature => {
                let dynamic = sampling.dynamic_temperature;
                let temperature = match dynamic.range > 0.0 {
                    true => sys::llama_sampler_init_temp_ext(
                        sampling.temperature,
                        dynamic.range,
                        dynamic.exponent,
                    ),
                    false => sys::llama_sampler_init_temp(sampling.temperature),
                };
                stages.push(SamplerStage::Llama(LlamaSampler::new(temperature)));
                if sampling.smoothing.factor > 0.0 {
                    stages.push(SamplerStage::Smoothing(sampling.smoothing));
                }
                return;
            }
            _ => return,
        }
    };
    stages.push(SamplerStage::Llama(LlamaSampler::new(sampler)));
}

/// The DRY sampler. A sequence breaker ends at its first zero byte, which no text has.
fn dry_sampler(weights: &ModelWeights, sampling: &Sampling, range: i32) -> *mut sys::llama_sampler {
    let dry = &sampling.dry;
    let breakers: Vec<CString> =
        dry.sequence_breakers.iter().filter_map(|text| CString::new(text.as_str()).ok()).collect();
    let mut pointers: Vec<_> = breakers.iter().map(|text| text.as_ptr()).collect();
    // SAFETY: the pointers are valid for the call, which copies the texts; the vocabulary is alive.
    unsafe {
        sys::llama_sampler_init_dry(
            weights.vocab_ptr(),
            dry.multiplier,
            dry.base.max(1.0),
            i32::try_from(dry.allowed_length).unwrap_or(i32::MAX),
            range,
            pointers.as_mut_ptr(),
            pointers.len(),
        )
    }
}

/// What is added to the logit of each token; empty where no token has a bias.
fn token_biases(weights: &ModelWeights, sampling: &Sampling) -> Vec<f32> {
    let texts: Vec<&[u8]> =
        sampling.banned_texts.iter().map(String::as_bytes).filter(|text| !text.is_empty()).collect();
    if sampling.logit_bias.is_empty() && texts.is_empty() && !sampling.ignore_end {
        return Vec::new();
    }
    let mut biases = vec![0.0_f32; weights.vocab_size()];
    for (token, bias) in &sampling.logit_bias {
        if let Some(sum) = biases.get_mut(token.0 as usize) {
            *sum += bias;
        }
    }
    for (token, sum) in biases.iter_mut().enumerate() {
        let token = token as LlamaToken;
        let is_end = weights.is_end_of_generation(token);
        let contains = |bytes: &[u8], text: &[u8]| bytes.windows(text.len()).any(|part| part == text);
        let is_banned = || {
            let bytes = weights.token_bytes(token, false);
            texts.iter().any(|text| contains(&bytes, text))
        };
        if (is_end && sampling.ignore_end) || (!is_end && !texts.is_empty() && is_banned()) {
            *sum = f32::NEG_INFINITY;
        }
    }
    biases
}

/// llama.cpp's seeds have 32 bits, and `u32::MAX` (`LLAMA_DEFAULT_SEED`) means a random seed.
fn fold_seed(seed: u64) -> u32 {
    let folded = (seed ^ (seed >> 32)) as u32;
    if folded == u32::MAX { 0 } else { folded }
}
