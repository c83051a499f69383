//! The order of the samplers: `sampler_order` of KoboldCPP, `samplers` of llama.cpp, `sampler_priority` of text-generation-webui.

use super::fields::{RequestFields, whole_number, wrong_type};
use crate::error::{ApiResult, ErrorResponse};
use halo_core::model::SamplerKind;
use serde_json::Value;

/// The order of a request, and the name of its field; empty for the default order.
pub(super) fn parse_order(fields: &RequestFields) -> ApiResult<Option<(&'static str, Vec<SamplerKind>)>> {
    if let Some((name, value)) = fields.find(&["sampler_order"]) {
        let Value::Array(numbers) = value else { return Err(wrong_type(name, value, "a list of numbers")) };
        return Ok(Some((name, kobold_order(name, numbers)?)));
    }
    let Some((name, value)) = fields.find(&["samplers", "sampler_priority"]) else { return Ok(None) };
    let order: ApiResult<Vec<Vec<SamplerKind>>> = match value {
        Value::Array(names) => names.iter().map(|sampler| named_sampler(name, sampler)).collect(),
        Value::String(letters) => letters.chars().map(|letter| sampler_letter(name, letter)).collect(),
        value => return Err(wrong_type(name, value, "a list of samplers")),
    };
    Ok(Some((name, order?.concat())))
}

/// KoboldCPP numbers seven samplers. It applies DRY before them and XTC behind them, and the penalties first where they are not
/// in the list.
fn kobold_order(name: &'static str, numbers: &[Value]) -> ApiResult<Vec<SamplerKind>> {
    if numbers.is_empty() {
        return Ok(Vec::new());
    }
    let mut order = vec![SamplerKind::Dry, SamplerKind::TopNSigma];
    for number in numbers {
        let kinds: &[SamplerKind] = match whole_number(number) {
            Some(0) => &[SamplerKind::TopK],
            Some(1) => &[SamplerKind::TopA],
            Some(2) => &[SamplerKind::TopP, SamplerKind::MinP],
            Some(3) => &[SamplerKind::TailFree],
            Some(4) => &[SamplerKind::TypicalP],
            Some(5) => &[SamplerKind::Temperature],
            Some(6) => &[SamplerKind::Penalties],
            _ => return Err(wrong_type(name, number, "a list of the numbers 0 to 6")),
        };
        order.extend(kinds);
    }
    if !order.contains(&SamplerKind::Penalties) {
        order.insert(0, SamplerKind::Penalties);
    }
    order.push(SamplerKind::Xtc);
    Ok(order)
}

fn named_sampler(name: &'static str, sampler: &Value) -> ApiResult<Vec<SamplerKind>> {
    let kind = match sampler.as_str().unwrap_or_default() {
        "penalties" | "repetition_penalty" | "presence_penalty" | "frequency_penalty" => {
            SamplerKind::Penalties
        }
        "dry" => SamplerKind::Dry,
        "top_n_sigma" => SamplerKind::TopNSigma,
        "top_k" => SamplerKind::TopK,
        "top_a" => SamplerKind::TopA,
        "tfs" | "tfs_z" => SamplerKind::TailFree,
        "typ_p" | "typical_p" | "typical" => SamplerKind::TypicalP,
        "top_p" => SamplerKind::TopP,
        "min_p" => SamplerKind::MinP,
        "xtc" => SamplerKind::Xtc,
        "temperature" | "temp" | "dynamic_temperature" | "quadratic_sampling" => SamplerKind::Temperature,
        // These are in the lists of the clients; their own parameters are refused where they have an effect.
        "mirostat"
        | "infill"
        | "adaptive_p"
        | "epsilon_cutoff"
        | "eta_cutoff"
        | "no_repeat_ngram"
        | "encoder_repetition_penalty" => return Ok(Vec::new()),
        _ => {
            let message = format!("{name}: there is no sampler {sampler}");
            return Err(ErrorResponse::invalid_parameter(name, message));
        }
    };
    Ok(vec![kind])
}

/// llama.cpp's letters for samplers.
fn sampler_letter(name: &'static str, letter: char) -> ApiResult<Vec<SamplerKind>> {
    let kind = match letter {
        'e' => SamplerKind::Penalties,
        'd' => SamplerKind::Dry,
        's' => SamplerKind::TopNSigma,
        'k' => SamplerKind::TopK,
        'y' => SamplerKind::TypicalP,
        'p' => SamplerKind::TopP,
        'm' => SamplerKind::MinP,
        'x' => SamplerKind::Xtc,
        't' => SamplerKind::Temperature,
        letter => {
            let message = format!("{name}: there is no sampler '{letter}'");
            return Err(ErrorResponse::invalid_parameter(name, message));
        }
    };
    Ok(vec![kind])
}
