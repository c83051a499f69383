//! A model behind a chat API whose prompts are limited: the model's own earlier answers are shortened, messages of the user
//! never. Such a model gets messages and no tokens, so the shortening changes no KV cache.

use crate::agent::poll_ready;
use halo_agents::agent::{Agent, AgentExt, agent_fn};
use halo_agents::content::{AuthoredMessage, TextAuthor};
use halo_agents::cooled::CoolingLayer;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    CancelHandle, FinishReason, Model, ModelInfo, ModelStep, ModelToken, OutputConstraint, Prompt,
    PromptMessage, Sampling, SamplingParameter, StepFlow, WindowToken,
};
use halo_core::token::{Role, TokenId};

/// A model whose prompts have at most so many tokens, as far as messages of the user allow.
pub struct CooledModel {
    inner: Box<dyn Model + Send>,
    threshold: usize,
}

impl CooledModel {
    #[must_use]
    pub fn new(inner: Box<dyn Model + Send>, threshold: usize) -> Self {
        Self { inner, threshold }
    }
}

/// The messages as a cooled agent gets them, and how many were shortened. The system prompt counts as text of the user.
fn cool_messages(
    messages: Vec<PromptMessage>,
    threshold: usize,
) -> Result<(Vec<PromptMessage>, usize), Error> {
    let author = |role: Role| if role == Role::Assistant { TextAuthor::Agent } else { TextAuthor::User };
    let input: Vec<AuthoredMessage> = messages
        .iter()
        .map(|message| AuthoredMessage { author: author(message.role), text: message.text.clone() })
        .collect();
    let echo = agent_fn(|input: Vec<AuthoredMessage>| async { Ok(input) });
    let cooled = echo.with_layer(CoolingLayer { threshold, ..CoolingLayer::default() });
    let cooled = poll_ready(cooled.invoke(input))?;
    let shortened =
        messages.iter().zip(&cooled).filter(|(message, cooled)| message.text != cooled.text).count();
    let text =
        |(message, cooled): (PromptMessage, AuthoredMessage)| PromptMessage { text: cooled.text, ..message };
    Ok((messages.into_iter().zip(cooled).map(text).collect(), shortened))
}

impl Model for CooledModel {
    fn info(&self) -> &ModelInfo {
        self.inner.info()
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        self.inner.tokenize(text, special)
    }

    fn count_tokens(&mut self, text: &str) -> Result<usize, Error> {
        self.inner.count_tokens(text)
    }

    fn detokenize(&mut self, ids: &[TokenId]) -> Result<String, Error> {
        self.inner.detokenize(ids)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        let (messages, shortened) = cool_messages((prompt.messages)(), self.threshold)?;
        if shortened > 0
            && let Some(reason) = listen(ModelStep::Cooled(shortened)).finish_reason()
        {
            return Ok(reason);
        }
        let cooled = || messages.clone();
        let prompt = Prompt {
            conversation: prompt.conversation,
            window: prompt.window,
            messages: &cooled,
            next_position: prompt.next_position,
            ephemeral: prompt.ephemeral,
        };
        self.inner.generate(&prompt, sampling, watch, listen)
    }

    fn check_constraint(&mut self, constraint: &OutputConstraint) -> Result<(), Error> {
        self.inner.check_constraint(constraint)
    }

    fn supports(&self, parameter: SamplingParameter) -> bool {
        self.inner.supports(parameter)
    }

    fn prefill(
        &mut self,
        prompt: &Prompt<'_>,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        self.inner.prefill(prompt, listen)
    }

    fn cancel_handle(&self) -> Option<CancelHandle> {
        self.inner.cancel_handle()
    }

    fn persist_kv(&mut self, conversation: &str, window: &[WindowToken]) -> Result<(), Error> {
        self.inner.persist_kv(conversation, window)
    }

    fn inherit_kv(&mut self, conversation: &str, parent: &str, positions: u64) {
        self.inner.inherit_kv(conversation, parent, positions);
    }

    fn delete_kv(&mut self, conversation: &str) -> Result<(), Error> {
        self.inner.delete_kv(conversation)
    }

    fn verify_kv(&mut self, conversation: &str, window: &[WindowToken]) -> Result<Option<String>, Error> {
        self.inner.verify_kv(conversation, window)
    }
}
