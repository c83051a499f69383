//! How the next token of an answer is sampled: the samplers of llama.cpp and KoboldCPP, by their usual names. A sampler with
//! its neutral value does nothing.

use crate::token::TokenId;
use crate::tool_call::ToolOptions;

/// The value of [`Sampling::max_tokens`] for an answer as long as the context allows.
pub const UNLIMITED_TOKENS: usize = usize::MAX;

/// The range of a penalty that counts the whole context window.
pub const WHOLE_WINDOW: usize = usize::MAX;

/// How the next token is sampled, and when generation ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The maximum length of the answer, in tokens; [`UNLIMITED_TOKENS`] for as many as fit.
    pub max_tokens: usize,
    /// The length for which the context window keeps tokens free, where it differs from the maximum.
    pub expected_tokens: Option<usize>,
    /// Divides the logits; 0 always takes the most probable token.
    pub temperature: f32,
    /// Varies the temperature with the entropy of the candidates.
    pub dynamic_temperature: DynamicTemperature,
    /// Reshapes the logits behind the temperature.
    pub smoothing: LogitSmoothing,
    /// Samples among so many of the most probable tokens; 0 for all.
    pub top_k: usize,
    /// Samples among the most probable tokens whose probabilities sum to this.
    pub top_p: f32,
    /// Samples among tokens with at least this fraction of the highest probability.
    pub min_p: f32,
    /// Samples among tokens with at least this fraction of the square of the highest probability; 0 for all.
    pub top_a: f32,
    /// Tail-free sampling: cuts the tail where the curve of probabilities becomes flat; 1 for no cut.
    pub tail_free: f32,
    /// Samples among the tokens whose surprise is nearest to the expected one; 1 for all.
    pub typical_p: f32,
    /// Samples among tokens within so many standard deviations of the highest logit; 0 for all.
    pub top_n_sigma: f32,
    /// Excludes the most probable tokens at random.
    pub xtc: XtcSampling,
    /// Makes recent tokens less probable; 1 for no penalty.
    pub repetition_penalty: f32,
    /// How many of the latest tokens the penalties count; [`WHOLE_WINDOW`] for all of the window.
    pub penalty_range: usize,
    /// The share of the repetition penalty for tokens in the older half of the range; 1 for the whole penalty.
    pub penalty_slope: f32,
    /// Lowers the logit of a token by this for each time that it occurs in the range; 0 for no penalty.
    pub frequency_penalty: f32,
    /// Lowers the logit of each token that occurs in the range by this; 0 for no penalty.
    pub presence_penalty: f32,
    /// Penalizes tokens that would continue a repetition.
    pub dry: DrySampling,
    /// Keeps the surprise of the answer constant. It replaces the samplers that cut candidates.
    pub mirostat: Option<Mirostat>,
    /// Added to the logits of these tokens; minus infinity bans a token.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// No token that contains one of these texts is sampled.
    pub banned_texts: Vec<String>,
    /// Whether the tokens that end an answer are banned.
    pub ignore_end: bool,
    /// The order of the samplers; those that are not listed do nothing. Empty: [`SamplerKind::DEFAULT_ORDER`].
    pub order: Vec<SamplerKind>,
    /// The seed of the random number generator. The same seed gives the same answer.
    pub seed: u64,
    /// The answer ends behind any of these texts.
    pub stop: Vec<String>,
    /// The format that the answer must have.
    pub constraint: Option<OutputConstraint>,
    /// Reports the log-probability of each token, and those of so many of the most probable tokens.
    pub logprobs: Option<usize>,
}

/// A temperature that varies with the entropy of the candidates, from `temperature - range` to `temperature + range`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicTemperature {
    /// Half the width of the interval; 0 for a fixed temperature.
    pub range: f32,
    /// The exponent of the normalized entropy.
    pub exponent: f32,
}

/// Quadratic sampling: logits below the highest one are lowered by their squared distance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitSmoothing {
    /// The weight of the distance; 0 for no smoothing.
    pub factor: f32,
    /// 1 for a quadratic curve; a higher one adds a cubic part.
    pub curve: f32,
}

/// XTC (exclude top choices): removes all but the least probable of the tokens above a threshold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct XtcSampling {
    /// How often it is applied; 0 for never.
    pub probability: f32,
    /// Tokens with at least this probability are excluded. Above 0.5 it has no effect.
    pub threshold: f32,
}

/// DRY (don't repeat yourself): penalizes the token that would continue a sequence that occurred before.
#[derive(Clone, Debug, PartialEq)]
pub struct DrySampling {
    /// The weight of the penalty; 0 for none.
    pub multiplier: f32,
    /// The penalty grows by this factor with each token of the repeated sequence.
    pub base: f32,
    /// Repetitions up to this length are not penalized.
    pub allowed_length: usize,
    /// How many of the latest tokens are searched for repetitions.
    pub range: usize,
    /// Texts that end a sequence.
    pub sequence_breakers: Vec<String>,
}

/// Mirostat sampling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mirostat {
    /// The version of the algorithm.
    pub version: MirostatVersion,
    /// The target surprise.
    pub tau: f32,
    /// The learning rate.
    pub eta: f32,
}

/// The version of Mirostat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirostatVersion {
    /// Mirostat 1.0.
    One,
    /// Mirostat 2.0.
    Two,
}

/// The samplers whose order can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SamplerKind {
    /// The repetition, frequency and presence penalties.
    Penalties,
    /// [`DrySampling`].
    Dry,
    /// [`Sampling::top_n_sigma`].
    TopNSigma,
    /// [`Sampling::top_k`].
    TopK,
    /// [`Sampling::top_a`].
    TopA,
    /// [`Sampling::tail_free`].
    TailFree,
    /// [`Sampling::typical_p`].
    TypicalP,
    /// [`Sampling::top_p`].
    TopP,
    /// [`Sampling::min_p`].
    MinP,
    /// [`XtcSampling`].
    Xtc,
    /// The temperature and the smoothing.
    Temperature,
}

impl SamplerKind {
    /// The order of llama.cpp's programs, with the samplers that only KoboldCPP has behind top-k.
    pub const DEFAULT_ORDER: [Self; 11] = [
        Self::Penalties,
        Self::Dry,
        Self::TopNSigma,
        Self::TopK,
        Self::TopA,
        Self::TailFree,
        Self::TypicalP,
        Self::TopP,
        Self::MinP,
        Self::Xtc,
        Self::Temperature,
    ];
}

/// The parameters that not every model supports. Temperature, top-p, seed, stop sequences and JSON schemas are not among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SamplingParameter {
    /// [`Sampling::dynamic_temperature`].
    DynamicTemperature,
    /// [`Sampling::smoothing`].
    Smoothing,
    /// [`Sampling::top_k`].
    TopK,
    /// [`Sampling::min_p`].
    MinP,
    /// [`Sampling::top_a`].
    TopA,
    /// [`Sampling::tail_free`].
    TailFree,
    /// [`Sampling::typical_p`].
    TypicalP,
    /// [`Sampling::top_n_sigma`].
    TopNSigma,
    /// [`Sampling::xtc`].
    Xtc,
    /// [`Sampling::repetition_penalty`].
    RepetitionPenalty,
    /// [`Sampling::penalty_range`].
    PenaltyRange,
    /// [`Sampling::frequency_penalty`].
    FrequencyPenalty,
    /// [`Sampling::presence_penalty`].
    PresencePenalty,
    /// [`Sampling::dry`].
    Dry,
    /// [`Sampling::mirostat`].
    Mirostat,
    /// [`Sampling::logit_bias`].
    LogitBias,
    /// [`Sampling::banned_texts`].
    BannedTexts,
    /// [`Sampling::ignore_end`].
    IgnoreEnd,
    /// [`Sampling::order`].
    Order,
    /// [`OutputConstraint::GbnfGrammar`].
    Grammar,
    /// [`Sampling::logprobs`].
    Logprobs,
}

/// A format that the sampler enforces token by token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputConstraint {
    /// A JSON schema.
    JsonSchema(String),
    /// A grammar in Lark notation; only local models support it.
    LarkGrammar(String),
    /// A grammar in llama.cpp's notation, GBNF; its first symbol is `root`.
    GbnfGrammar(String),
    /// Calls of functions, by their schemas.
    ToolCalls(Box<ToolOptions>),
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            max_tokens: 50,
            expected_tokens: None,
            temperature: 0.7,
            dynamic_temperature: DynamicTemperature::default(),
            smoothing: LogitSmoothing::default(),
            top_k: 40,
            top_p: 0.9,
            min_p: 0.0,
            top_a: 0.0,
            tail_free: 1.0,
            typical_p: 1.0,
            top_n_sigma: 0.0,
            xtc: XtcSampling::default(),
            repetition_penalty: 1.0,
            penalty_range: 256,
            penalty_slope: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            dry: DrySampling::default(),
            mirostat: None,
            logit_bias: Vec::new(),
            banned_texts: Vec::new(),
            ignore_end: false,
            order: Vec::new(),
            seed: 0,
            stop: Vec::new(),
            constraint: None,
            logprobs: None,
        }
    }
}

impl Default for DynamicTemperature {
    fn default() -> Self {
        Self { range: 0.0, exponent: 1.0 }
    }
}

impl Default for LogitSmoothing {
    fn default() -> Self {
        Self { factor: 0.0, curve: 1.0 }
    }
}

impl Default for XtcSampling {
    fn default() -> Self {
        Self { probability: 0.0, threshold: 0.1 }
    }
}

impl Default for DrySampling {
    fn default() -> Self {
        Self {
            multiplier: 0.0,
            base: 1.75,
            allowed_length: 2,
            range: WHOLE_WINDOW,
            sequence_breakers: ["\n", ":", "\"", "*"].map(str::to_owned).to_vec(),
        }
    }
}

impl Sampling {
    /// The samplers in the order in which they are applied, each once.
    #[must_use]
    pub fn sampler_order(&self) -> Vec<SamplerKind> {
        if self.order.is_empty() {
            return SamplerKind::DEFAULT_ORDER.to_vec();
        }
        let mut order: Vec<SamplerKind> = Vec::new();
        for kind in &self.order {
            if !order.contains(kind) {
                order.push(*kind);
            }
        }
        order
    }

    /// Whether a penalty for repeated tokens has an effect.
    #[must_use]
    pub fn has_penalties(&self) -> bool {
        self.penalty_range > 0
            && (self.repetition_penalty != 1.0
                || self.frequency_penalty != 0.0
                || self.presence_penalty != 0.0)
    }

    /// How many of the latest tokens a sampler must know: the longest range of the penalties and of DRY.
    #[must_use]
    pub fn history_len(&self) -> usize {
        let penalties = if self.has_penalties() { self.penalty_range } else { 0 };
        let dry = if self.dry.multiplier > 0.0 { self.dry.range } else { 0 };
        penalties.max(dry)
    }
}

/// The log-probability of a token, before temperature and other sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Its number in the vocabulary of the model.
    pub id: TokenId,
    /// Its bytes, which need not be whole characters.
    pub bytes: Vec<u8>,
    /// The natural logarithm of its probability.
    pub logprob: f32,
}

impl TokenLogprob {
    /// Its text, with the replacement character for incomplete characters.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// The log-probability of a generated token and of the most probable tokens of its step.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token that was sampled.
    pub token: TokenLogprob,
    /// The most probable tokens, the first one is the most probable.
    pub top: Vec<TokenLogprob>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampler_order_lists_each_sampler_once() {
        assert_eq!(Sampling::default().sampler_order(), SamplerKind::DEFAULT_ORDER);
        let order = vec![SamplerKind::Temperature, SamplerKind::TopK, SamplerKind::Temperature];
        let sampling = Sampling { order, ..Sampling::default() };
        assert_eq!(sampling.sampler_order(), [SamplerKind::Temperature, SamplerKind::TopK]);
    }

    #[test]
    fn sampler_history_covers_the_longest_active_range() {
        let dry = |multiplier| DrySampling { multiplier, range: 900, ..DrySampling::default() };
        // Repetition penalty, presence penalty, range, DRY multiplier, tokens.
        for (repetition_penalty, presence_penalty, penalty_range, multiplier, expected) in [
            (1.0, 0.0, 256, 0.0, 0),
            (1.1, 0.0, 256, 0.0, 256),
            (1.0, 0.5, 64, 0.0, 64),
            (1.1, 0.0, 64, 0.8, 900),
            (1.1, 0.0, WHOLE_WINDOW, 0.8, WHOLE_WINDOW),
            (1.1, 0.5, 0, 0.0, 0),
        ] {
            let sampling = Sampling {
                repetition_penalty,
                presence_penalty,
                penalty_range,
                dry: dry(multiplier),
                ..Sampling::default()
            };
            assert_eq!(sampling.history_len(), expected);
        }
    }
}
