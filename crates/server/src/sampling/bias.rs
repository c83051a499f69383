//! Tokens with a bias, and tokens that are banned.

use super::fields::{whole_number, wrong_type};
use crate::error::{ApiResult, ErrorResponse};
use halo_core::token::TokenId;
use serde_json::Value;

/// The most texts whose tokens are banned.
const MAX_TEXTS: usize = 256;

fn token_id(name: &'static str, value: &Value) -> ApiResult<TokenId> {
    let number = match value {
        Value::String(text) => text.trim().parse().ok(),
        value => whole_number(value),
    };
    let id = number.and_then(|number| u32::try_from(number).ok());
    id.map(TokenId).ok_or_else(|| wrong_type(name, value, "a token id"))
}

/// The biases of tokens: OpenAI and KoboldCPP send an object, llama.cpp a list of pairs, with `false` for a ban.
pub(super) fn logit_biases(name: &'static str, value: &Value) -> ApiResult<Vec<(TokenId, f32)>> {
    let bias = |value: &Value| match value {
        Value::Bool(false) => Ok(f32::NEG_INFINITY),
        value => match value.as_f64() {
            Some(bias) if (-100.0..=100.0).contains(&bias) => Ok(bias as f32),
            _ => Err(wrong_type(name, value, "a number from -100 to 100")),
        },
    };
    match value {
        Value::Object(biases) => {
            let pair = |(id, value): (&String, &Value)| {
                Ok((token_id(name, &Value::String(id.clone()))?, bias(value)?))
            };
            biases.iter().map(pair).collect()
        }
        Value::Array(pairs) => {
            let pair = |pair: &Value| match pair.as_array().map(Vec::as_slice) {
                Some([id, value]) => Ok((token_id(name, id)?, bias(value)?)),
                _ => Err(wrong_type(name, pair, "a list of pairs of a token id and a number")),
            };
            pairs.iter().map(pair).collect()
        }
        value => Err(wrong_type(name, value, "an object of token ids and numbers")),
    }
}

/// The tokens that are banned by id, and the texts whose tokens are banned.
pub(super) fn banned_tokens(name: &'static str, value: &Value) -> ApiResult<(Vec<TokenId>, Vec<String>)> {
    let (mut tokens, mut texts) = (Vec::new(), Vec::new());
    match value {
        // A list of ids in a text.
        Value::String(ids) => {
            for id in ids.split(',').filter(|id| !id.trim().is_empty()) {
                tokens.push(token_id(name, &Value::String(id.to_owned()))?);
            }
        }
        Value::Array(values) => {
            for value in values {
                match value {
                    Value::String(text) if text.is_empty() => {}
                    Value::String(text) => texts.push(text.clone()),
                    value => tokens.push(token_id(name, value)?),
                }
            }
        }
        value => return Err(wrong_type(name, value, "a list of texts or token ids")),
    }
    if texts.len() > MAX_TEXTS {
        let message = format!("{name} has {} texts; at most {MAX_TEXTS} are allowed", texts.len());
        return Err(ErrorResponse::invalid_parameter(name, message));
    }
    Ok((tokens, texts))
}
