//! Raw prompts, as `/v1/completions` and KoboldCPP's routes take them: the BOS token, KoboldCPP's placeholders for the chat template,
//! its `memory` before the prompt, and its `max_context_length`.

mod fit;
mod instruct_tags;

use crate::completion::TextOptions;
use crate::error::ApiResult;
use crate::sampling::RequestFields;
use fit::{PromptLimit, fit_prompt};
use halo_core::Error;
use halo_core::model::{ChatTemplate, Model, ModelToken, Sampling};
use halo_core::token::TokenId;
use instruct_tags::InstructTags;

/// How the prompts of a request are read.
pub(crate) struct RawPromptOptions {
    /// Text before each prompt, which is never cut.
    memory: String,
    max_context: Option<usize>,
    replaces_tags: bool,
    /// Whether a text gets the BOS token of the model.
    adds_start: bool,
    pub text: TextOptions,
    /// The client's key of the generation: it can be watched and aborted by it.
    pub generation_key: Option<String>,
}

impl RawPromptOptions {
    pub fn parse(fields: &RequestFields) -> ApiResult<Self> {
        let flag = |names: &'static [&'static str], default: bool| -> ApiResult<bool> {
            Ok(fields.boolean(names)?.map_or(default, |(_, on)| on))
        };
        let max_context = fields.integer(&["max_context_length"], 1..=i64::MAX)?;
        let key = fields.text(&["genkey"])?.map(|(_, key)| key.to_owned());
        Ok(Self {
            memory: fields.text(&["memory"])?.map_or_else(String::new, |(_, text)| text.to_owned()),
            max_context: max_context.map(|(_, limit)| usize::try_from(limit).unwrap_or(usize::MAX)),
            replaces_tags: flag(&["replace_instruct_placeholders"], true)?,
            adds_start: flag(&["add_bos_token"], true)?,
            text: TextOptions {
                trims_stop: flag(&["trim_stop"], true)?,
                renders_special: flag(&["render_special"], !flag(&["skip_special_tokens"], true)?)?,
            },
            generation_key: key.filter(|key| !key.is_empty()),
        })
    }

    /// Replaces placeholders in stop sequences.
    pub fn replace_stop_tags(&self, template: &ChatTemplate, sampling: &mut Sampling) {
        if !self.replaces_tags {
            return;
        }
        for stop in &mut sampling.stop {
            if let Some(text) = InstructTags::stop_sequence(template, stop) {
                *stop = text;
            }
        }
        sampling.stop.retain(|stop| !stop.is_empty());
    }

    /// The tokens of a prompt and its text. Names of special tokens in it are special tokens: clients write the chat template as text.
    /// Blocks.
    pub fn tokenize(
        &self,
        model: &mut dyn Model,
        prompt: &str,
        sampling: &Sampling,
    ) -> Result<(Vec<TokenId>, String), Error> {
        let template = model.info().template.clone();
        let tags = InstructTags::find(&template, &[&self.memory, prompt]).filter(|_| self.replaces_tags);
        let (memory, prompt) = match tags {
            None => (self.memory.clone(), prompt.to_owned()),
            Some(mut tags) => (tags.replace(&self.memory), tags.replace(prompt)),
        };
        let first = if memory.is_empty() { &prompt } else { &memory };
        let start = if self.adds_start { start_tokens(model, first)? } else { Vec::new() };
        let memory_tokens = if memory.is_empty() { Vec::new() } else { model.tokenize(&memory, true)? };
        let prompt_tokens = model.tokenize(&prompt, true)?;
        let count = memory_tokens.len() + prompt_tokens.len();
        let tokens = fit_prompt(memory_tokens, prompt_tokens, self.limit(model, sampling, start.len()));
        let text = match tokens.len() == count {
            true => format!("{memory}{prompt}"),
            false => tokens.iter().map(|token| token.text.as_str()).collect(),
        };
        Ok((start.iter().chain(&tokens).map(|token| token.id).collect(), text))
    }

    fn limit(&self, model: &dyn Model, sampling: &Sampling, start_tokens: usize) -> Option<PromptLimit> {
        let context = model.info().context.min(self.max_context?).saturating_sub(start_tokens);
        // An answer without a limit fills what the prompt leaves.
        let answer = sampling.expected_tokens.unwrap_or(sampling.max_tokens);
        Some(PromptLimit { context, answer })
    }
}

/// The BOS token, where the model was trained with one and the text does not begin with it: without it, some models write nonsense.
pub(crate) fn start_tokens(model: &mut dyn Model, text: &str) -> Result<Vec<ModelToken>, Error> {
    let start = model.info().template.start.clone();
    if start.is_empty() || text.is_empty() || text.starts_with(&start) {
        return Ok(Vec::new());
    }
    model.tokenize(&start, true)
}
