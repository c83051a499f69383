//! Reads the sampling parameters of a request.

use super::RequestedParameters;
use super::bias::{banned_tokens, logit_biases};
use super::constraint::parse_constraint;
use super::dialect::ApiDialect;
use super::fields::{FieldNames, RequestFields, wrong_type};
use super::order::parse_order;
use super::unsupported::refuse_unsupported;
use crate::completion::seed_or_random;
use crate::error::{ApiResult, ErrorResponse};
use halo_core::model::{
    Mirostat, MirostatVersion, OutputConstraint, SamplerKind, Sampling, SamplingParameter, UNLIMITED_TOKENS,
    WHOLE_WINDOW,
};
use serde_json::Value;

/// The sampling of a request, and which parameters it asks for.
#[derive(Clone, Debug)]
pub(crate) struct RequestedSampling {
    pub sampling: Sampling,
    pub parameters: RequestedParameters,
}

/// The most stop sequences of a request. A group chat has one for each of its members.
const MAX_STOP_SEQUENCES: usize = 64;

/// The most sequence breakers.
const MAX_BREAKERS: usize = 256;

/// The most tokens with a bias.
const MAX_BIASES: usize = 1024;

/// The most log-probabilities of a token.
const MAX_LOGPROBS: i64 = 20;

/// The most choices of a request.
const MAX_CHOICES: i64 = 16;

/// How many choices a request asks for.
pub(crate) fn parse_choice_count(fields: &RequestFields) -> ApiResult<usize> {
    let count = fields.integer(&["n"], 1..=MAX_CHOICES)?;
    Ok(count.map_or(1, |(_, count)| usize::try_from(count).unwrap_or(1)))
}

pub(crate) fn parse_sampling(
    fields: &RequestFields,
    defaults: &Sampling,
    dialect: ApiDialect,
) -> ApiResult<RequestedSampling> {
    refuse_unsupported(fields, dialect)?;
    let mut parser = SamplingParser {
        fields,
        dialect,
        sampling: defaults.clone(),
        requested: RequestedParameters::default(),
    };
    parser.parse_length_and_seed()?;
    parser.parse_temperature()?;
    parser.parse_cuts()?;
    parser.parse_penalties()?;
    parser.parse_dry()?;
    parser.parse_mirostat()?;
    parser.parse_biases()?;
    parser.parse_output()?;
    Ok(RequestedSampling { sampling: parser.sampling, parameters: parser.requested })
}

struct SamplingParser<'a> {
    fields: &'a RequestFields,
    dialect: ApiDialect,
    sampling: Sampling,
    requested: RequestedParameters,
}

impl SamplingParser<'_> {
    fn note(&mut self, parameter: SamplingParameter, name: &'static str, has_effect: bool) {
        if has_effect {
            self.requested.parameters.push((parameter, name));
        }
    }

    fn parse_length_and_seed(&mut self) -> ApiResult<()> {
        let (default, expected) = match self.dialect.fills_window() {
            // The window keeps as much free as for an answer of the default length.
            true => (UNLIMITED_TOKENS, Some(self.sampling.max_tokens)),
            false => (self.sampling.max_tokens, None),
        };
        let length = self.fields.integer(self.dialect.length_names(), i64::MIN..=i64::MAX)?;
        self.sampling.max_tokens = match length.filter(|&(_, count)| !self.dialect.is_unlimited(count)) {
            None => {
                self.sampling.expected_tokens = expected;
                default
            }
            Some((name, count)) => {
                usize::try_from(count).ok().filter(|&count| count > 0).ok_or_else(|| {
                    let message = format!("{name} is {count}; it must be at least 1");
                    ErrorResponse::invalid_parameter(name, message)
                })?
            }
        };
        let seed = self.fields.integer(&["seed", "sampler_seed"], i64::MIN..=i64::MAX)?;
        if seed.is_some() || self.dialect.randomizes_seed() {
            self.sampling.seed = seed_or_random(seed.map(|(_, seed)| seed));
        }
        let stops = self
            .fields
            .texts(&["stop", "stop_sequence", "stop_sequences", "stopping_strings"], MAX_STOP_SEQUENCES)?;
        self.sampling.stop = stops.map(|(_, stops)| stops).unwrap_or_default();
        Ok(())
    }

    fn parse_temperature(&mut self) -> ApiResult<()> {
        let max = self.dialect.max_temperature();
        if let Some((_, temperature)) = self.fields.number(&["temperature", "temp"], 0.0..=max)? {
            self.sampling.temperature = temperature;
        }
        if let Some((name, range)) = self.fields.number(&["dynatemp_range"], 0.0..=100.0)? {
            self.sampling.dynamic_temperature.range = range;
            self.note(SamplingParameter::DynamicTemperature, name, range > 0.0);
        }
        // text-generation-webui has the ends of the range in the place of its middle and its width.
        let is_dynamic = self.fields.boolean(&["dynamic_temperature"])?.is_some_and(|(_, on)| on);
        let low = self.fields.number(&["dynatemp_low"], 0.0..=100.0)?;
        let high = self.fields.number(&["dynatemp_high"], 0.0..=100.0)?;
        if let (true, Some((name, low)), Some((_, high))) = (is_dynamic, low, high) {
            if low > high {
                let message = "dynatemp_low is above dynatemp_high";
                return Err(ErrorResponse::invalid_parameter(name, message));
            }
            self.sampling.temperature = f32::midpoint(low, high);
            self.sampling.dynamic_temperature.range = (high - low) / 2.0;
            self.note(SamplingParameter::DynamicTemperature, name, high > low);
        }
        if self.fields.boolean(&["do_sample"])?.is_some_and(|(_, samples)| !samples) {
            self.sampling.temperature = 0.0;
        }
        if let Some((_, exponent)) = self.fields.number(&["dynatemp_exponent"], 0.0..=100.0)? {
            self.sampling.dynamic_temperature.exponent = exponent;
        }
        if let Some((name, factor)) = self.fields.number(&["smoothing_factor"], 0.0..=100.0)? {
            self.sampling.smoothing.factor = factor;
            self.note(SamplingParameter::Smoothing, name, factor > 0.0);
        }
        if let Some((_, curve)) = self.fields.number(&["smoothing_curve"], 0.0..=10.0)? {
            self.sampling.smoothing.curve = curve;
        }
        Ok(())
    }

    /// The samplers that cut candidates.
    fn parse_cuts(&mut self) -> ApiResult<()> {
        if let Some((name, k)) = self.fields.integer(&["top_k"], -1..=i64::MAX)? {
            // 0 and -1 turn it off.
            self.sampling.top_k = usize::try_from(k).unwrap_or(0);
            self.note(SamplingParameter::TopK, name, k > 0);
        }
        if let Some((_, p)) = self.probability(&["top_p"])? {
            self.sampling.top_p = p;
        }
        if let Some((name, p)) = self.probability(&["min_p"])? {
            self.sampling.min_p = p;
            self.note(SamplingParameter::MinP, name, p > 0.0);
        }
        if let Some((name, a)) = self.fields.number(&["top_a"], 0.0..=100.0)? {
            self.sampling.top_a = a;
            self.note(SamplingParameter::TopA, name, a > 0.0);
        }
        if let Some((name, z)) = self.probability(&["tfs", "tfs_z"])? {
            self.sampling.tail_free = z;
            self.note(SamplingParameter::TailFree, name, z < 1.0);
        }
        if let Some((name, p)) = self.probability(&["typical_p", "typical"])? {
            self.sampling.typical_p = p;
            self.note(SamplingParameter::TypicalP, name, p < 1.0);
        }
        if let Some((name, sigma)) = self.fields.number(&["top_n_sigma", "nsigma"], -1.0..=100.0)? {
            self.sampling.top_n_sigma = sigma.max(0.0);
            self.note(SamplingParameter::TopNSigma, name, sigma > 0.0);
        }
        if let Some((name, probability)) = self.fields.number(&["xtc_probability"], 0.0..=1.0)? {
            self.sampling.xtc.probability = probability;
            self.note(SamplingParameter::Xtc, name, probability > 0.0);
        }
        if let Some((_, threshold)) = self.fields.number(&["xtc_threshold"], 0.0..=1.0)? {
            self.sampling.xtc.threshold = threshold;
        }
        if let Some((name, order)) = parse_order(self.fields)? {
            self.note(SamplingParameter::Order, name, !order.is_empty());
            self.sampling.order = order;
        }
        if let Some((name, true)) = self.fields.boolean(&["temperature_last"])? {
            let mut order = self.sampling.sampler_order();
            let was_last = order.last() == Some(&SamplerKind::Temperature);
            order.retain(|kind| *kind != SamplerKind::Temperature);
            order.push(SamplerKind::Temperature);
            if !was_last {
                self.note(SamplingParameter::Order, name, true);
                self.sampling.order = order;
            }
        }
        Ok(())
    }

    /// A number from 0 to 1. Clients send -1 for the default of the server.
    fn probability(&self, names: FieldNames) -> ApiResult<Option<(&'static str, f32)>> {
        match self.fields.find(names) {
            Some((_, value)) if value.as_f64() == Some(-1.0) => Ok(None),
            _ => self.fields.number(names, 0.0..=1.0),
        }
    }

    fn parse_penalties(&mut self) -> ApiResult<()> {
        let names: FieldNames = &["repetition_penalty", "repeat_penalty", "rep_pen"];
        match self.fields.number(names, 0.0..=100.0)? {
            Some((name, penalty)) => {
                // Clients send 0 to turn it off.
                self.sampling.repetition_penalty = if penalty == 0.0 { 1.0 } else { penalty };
                self.note(SamplingParameter::RepetitionPenalty, name, penalty != 0.0 && penalty != 1.0);
            }
            None if self.dialect.drops_penalty() => self.sampling.repetition_penalty = 1.0,
            None => {}
        }
        let names: FieldNames = &["repeat_last_n", "rep_pen_range", "repetition_penalty_range"];
        if let Some((name, range)) = self.fields.integer(names, -1..=i64::MAX)? {
            self.sampling.penalty_range = token_range(range);
            let has_effect = self.sampling.repetition_penalty != 1.0;
            self.note(SamplingParameter::PenaltyRange, name, has_effect);
        }
        if let Some((_, slope)) = self.fields.number(&["rep_pen_slope"], 0.0..=100.0)? {
            // KoboldCPP takes 0 for a penalty without a slope.
            self.sampling.penalty_slope = if slope == 0.0 { 1.0 } else { slope };
        }
        if let Some((name, penalty)) = self.fields.number(&["frequency_penalty"], -2.0..=2.0)? {
            self.sampling.frequency_penalty = penalty;
            self.note(SamplingParameter::FrequencyPenalty, name, penalty != 0.0);
        }
        if let Some((name, penalty)) = self.fields.number(&["presence_penalty"], -2.0..=2.0)? {
            self.sampling.presence_penalty = penalty;
            self.note(SamplingParameter::PresencePenalty, name, penalty != 0.0);
        }
        Ok(())
    }

    fn parse_dry(&mut self) -> ApiResult<()> {
        let mut dry = self.sampling.dry.clone();
        if let Some((name, multiplier)) = self.fields.number(&["dry_multiplier"], 0.0..=100.0)? {
            dry.multiplier = multiplier;
            self.note(SamplingParameter::Dry, name, multiplier > 0.0);
        }
        if let Some((_, base)) = self.fields.number(&["dry_base"], 0.0..=100.0)? {
            dry.base = base;
        }
        if let Some((_, length)) = self.fields.integer(&["dry_allowed_length"], 0..=100_000)? {
            dry.allowed_length = usize::try_from(length).unwrap_or(0);
        }
        if let Some((_, range)) = self.fields.integer(&["dry_penalty_last_n", "dry_range"], -1..=i64::MAX)? {
            dry.range = token_range(range);
        }
        let breakers: FieldNames = &["dry_sequence_breakers"];
        match self.fields.find(breakers) {
            // SillyTavern sends the list as JSON in a text.
            Some((name, Value::String(text))) if !text.trim().is_empty() => {
                let list: Result<Vec<String>, _> = serde_json::from_str(text);
                dry.sequence_breakers = list.map_err(|_| {
                    wrong_type(
                        name,
                        &Value::String(text.clone()),
                        "a list of texts, or one as JSON in a text",
                    )
                })?;
            }
            Some((_, Value::String(_))) => {}
            _ => {
                if let Some((_, texts)) = self.fields.texts(breakers, MAX_BREAKERS)? {
                    dry.sequence_breakers = texts;
                }
            }
        }
        self.sampling.dry = dry;
        Ok(())
    }

    fn parse_mirostat(&mut self) -> ApiResult<()> {
        let tau = self.fields.number(&["mirostat_tau"], 0.0..=100.0)?.map_or(5.0, |(_, tau)| tau);
        let eta = self.fields.number(&["mirostat_eta"], 0.0..=10.0)?.map_or(0.1, |(_, eta)| eta);
        if let Some((name, version)) = self.fields.integer(&["mirostat", "mirostat_mode"], 0..=2)? {
            let version = match version {
                1 => Some(MirostatVersion::One),
                2 => Some(MirostatVersion::Two),
                _ => None,
            };
            self.sampling.mirostat = version.map(|version| Mirostat { version, tau, eta });
            self.note(SamplingParameter::Mirostat, name, version.is_some());
        }
        Ok(())
    }

    fn parse_biases(&mut self) -> ApiResult<()> {
        let mut biases = Vec::new();
        if let Some((name, value)) = self.fields.find(&["logit_bias"]) {
            biases = logit_biases(name, value)?;
            self.note(SamplingParameter::LogitBias, name, !biases.is_empty());
        }
        if let Some((name, value)) = self.fields.find(&["banned_tokens", "custom_token_bans"]) {
            let (tokens, texts) = banned_tokens(name, value)?;
            self.note(SamplingParameter::LogitBias, name, !tokens.is_empty());
            self.note(SamplingParameter::BannedTexts, name, !texts.is_empty());
            biases.extend(tokens.into_iter().map(|token| (token, f32::NEG_INFINITY)));
            self.sampling.banned_texts = texts;
        }
        if biases.len() > MAX_BIASES {
            let message = format!("logit_bias has {} tokens; at most {MAX_BIASES} are allowed", biases.len());
            return Err(ErrorResponse::invalid_parameter("logit_bias", message));
        }
        self.sampling.logit_bias = biases;
        let names: FieldNames = &["ignore_eos", "ban_eos_token", "use_default_badwordsids"];
        if let Some((name, ignored)) = self.fields.boolean(names)? {
            self.sampling.ignore_end = ignored;
            self.note(SamplingParameter::IgnoreEnd, name, ignored);
        }
        Ok(())
    }

    fn parse_output(&mut self) -> ApiResult<()> {
        if let Some((name, constraint)) = parse_constraint(self.fields, self.dialect)? {
            let is_grammar = matches!(constraint, OutputConstraint::GbnfGrammar(_));
            self.note(SamplingParameter::Grammar, name, is_grammar);
            self.requested.constraint = Some(name);
            self.sampling.constraint = Some(constraint);
        }
        let top = self.fields.integer(&["top_logprobs", "n_probs"], 0..=MAX_LOGPROBS)?;
        let top = top.map(|(name, count)| (name, usize::try_from(count).unwrap_or(0)));
        self.sampling.logprobs = match self.fields.find(&["logprobs"]) {
            Some((_, Value::Bool(true))) => Some(top.map_or(0, |(_, count)| count)),
            Some((_, Value::Bool(false))) => None,
            Some((_, _)) => {
                let count = self.fields.integer(&["logprobs"], 0..=MAX_LOGPROBS)?;
                count.map(|(_, count)| usize::try_from(count).unwrap_or(0))
            }
            None => match top {
                Some(("n_probs", count)) => Some(count).filter(|&count| count > 0),
                Some((name, 1..)) => {
                    let message = "top_logprobs needs logprobs; set it to true";
                    return Err(ErrorResponse::invalid_parameter(name, message));
                }
                _ => None,
            },
        };
        self.note(SamplingParameter::Logprobs, "logprobs", self.sampling.logprobs.is_some());
        Ok(())
    }
}

/// A number of tokens; -1 is the whole window.
fn token_range(range: i64) -> usize {
    usize::try_from(range).unwrap_or(WHOLE_WINDOW)
}
