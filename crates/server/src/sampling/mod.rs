//! The sampling parameters of requests: one mapping for the APIs of OpenAI, KoboldCPP, llama.cpp and Ollama and for the names
//! of text-generation-webui that SillyTavern sends.
//!
//! Every parameter that is accepted has an effect. One that is known and not supported is refused by name, unless its value does
//! nothing; unknown ones are ignored.

mod bias;
mod constraint;
mod dialect;
mod fields;
mod logprobs;
mod order;
mod parse;
#[cfg(test)]
mod tests;
mod unsupported;

pub(crate) use dialect::ApiDialect;
pub(crate) use fields::{RequestFields, wrong_type};
pub(crate) use logprobs::{LogprobBuffer, chat_logprobs, completion_logprobs};
pub(crate) use parse::{RequestedSampling, parse_choice_count, parse_sampling};

use crate::app::App;
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use halo_core::ErrorKind;
use halo_core::model::{Model, OutputConstraint, SamplingParameter};
use std::sync::Arc;

/// The parameters that a request sets to an effective value, with the names that it uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestedParameters {
    parameters: Vec<(SamplingParameter, &'static str)>,
    /// The name of the field with the output constraint.
    constraint: Option<&'static str>,
}

impl RequestedParameters {
    /// Adds a parameter that was read from a field of its own.
    pub fn add(&mut self, parameter: SamplingParameter, name: &'static str) {
        self.parameters.push((parameter, name));
    }

    /// The name of the field with the output constraint.
    pub fn constraint_name(&self) -> Option<&'static str> {
        self.constraint
    }
}

/// Checks that the default model supports the parameters and can follow the constraint, before anything is stored.
pub(crate) async fn check_supported(
    app: &Arc<App>,
    requested: &RequestedParameters,
    constraint: Option<&OutputConstraint>,
) -> ApiResult<()> {
    if requested.parameters.is_empty() && constraint.is_none() {
        return Ok(());
    }
    let (app, requested, constraint) = (Arc::clone(app), requested.clone(), constraint.cloned());
    spawn_blocking(move || check_model(&mut *app.backend.model()?, &requested, constraint.as_ref())).await
}

/// Checks that a model supports the parameters and can follow the constraint. Blocks.
pub(crate) fn check_model(
    model: &mut dyn Model,
    requested: &RequestedParameters,
    constraint: Option<&OutputConstraint>,
) -> ApiResult<()> {
    for &(parameter, name) in &requested.parameters {
        if !model.supports(parameter) {
            let message = format!("{name} is not supported by this remote model; leave it out");
            return Err(ErrorResponse::invalid_parameter(name, message));
        }
    }
    let Some(constraint) = constraint else { return Ok(()) };
    let name = match constraint {
        OutputConstraint::ToolCalls(_) => "tools",
        _ => requested.constraint.unwrap_or("response_format"),
    };
    model.check_constraint(constraint).map_err(|e| match e.kind {
        ErrorKind::InvalidInput => ErrorResponse::invalid_parameter(name, format!("{name}: {}", e.message)),
        _ => ErrorResponse::from(e),
    })
}
