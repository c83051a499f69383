//! Limits the input of an agent to a number of tokens. The inner agent does not know that its input was shortened.

use crate::agent::{Agent, AgentLayer, BoxedAgent};
use crate::content::{AuthoredContent, TextAuthor};
use crate::token_counter::{ApproxTokenCounter, TokenCounter};
use halo_core::Error;
use std::sync::Arc;

/// The default limit, in tokens.
pub const TOKEN_THRESHOLD: usize = 4096;

/// The configuration of a [`CooledAgent`].
#[derive(Clone)]
pub struct CoolingLayer {
    /// The most tokens of an input.
    pub threshold: usize,
    /// Shortens a text; without one, texts are truncated.
    pub summarizer: Option<BoxedAgent<String, String>>,
    /// Counts tokens.
    pub counter: Arc<dyn TokenCounter>,
}

impl Default for CoolingLayer {
    fn default() -> Self {
        Self { threshold: TOKEN_THRESHOLD, summarizer: None, counter: Arc::new(ApproxTokenCounter) }
    }
}

impl<A> AgentLayer<A> for CoolingLayer {
    type Agent = CooledAgent<A>;

    fn wrap(self, inner: A) -> CooledAgent<A> {
        CooledAgent { inner, settings: self }
    }
}

/// An agent whose input never exceeds a limit. Text of the user is never shortened: if it alone exceeds the limit, all
/// text of agents is dropped.
#[derive(Clone)]
pub struct CooledAgent<A> {
    inner: A,
    settings: CoolingLayer,
}

impl<A> CooledAgent<A> {
    async fn fit_to_threshold<I: AuthoredContent + Send>(&self, input: I) -> Result<I, Error> {
        let CoolingLayer { threshold, summarizer, counter } = &self.settings;
        let segments = input.segments();
        let tokens: Vec<usize> = segments.iter().map(|(_, text)| counter.count_tokens(text)).collect();
        if tokens.iter().sum::<usize>() <= *threshold {
            return Ok(input);
        }
        let is_agents = |n: usize| segments[n].0 == TextAuthor::Agent;
        let user_tokens: usize = (0..segments.len()).filter(|&n| !is_agents(n)).map(|n| tokens[n]).sum();
        let mut texts: Vec<String> = segments.iter().map(|(_, text)| (*text).to_owned()).collect();
        let mut remaining = threshold.saturating_sub(user_tokens);
        // Shorter texts come first, so that what they leave of their share goes to longer ones.
        let mut order: Vec<usize> = (0..segments.len()).filter(|&n| is_agents(n)).collect();
        order.sort_by_key(|&n| tokens[n]);
        for (done, &n) in order.iter().enumerate() {
            let share = remaining / (order.len() - done);
            if tokens[n] > share {
                if let Some(summarizer) = summarizer {
                    texts[n] = summarizer.invoke(std::mem::take(&mut texts[n])).await?;
                }
                // A summarizer may return too much.
                texts[n] = counter.truncate(&texts[n], share).to_owned();
            }
            remaining = remaining.saturating_sub(counter.count_tokens(&texts[n]));
        }
        Ok(input.with_texts(texts))
    }
}

impl<I: AuthoredContent + Send, A: Agent<I>> Agent<I> for CooledAgent<A> {
    type Out = A::Out;

    async fn invoke(&self, input: I) -> Result<A::Out, Error> {
        self.inner.invoke(self.fit_to_threshold(input).await?).await
    }
}

/// Limits the input of an agent to a window, with a summarizer if there is one.
pub fn with_context_management<A>(
    agent: A,
    window_size: usize,
    summarizer: Option<BoxedAgent<String, String>>,
) -> CooledAgent<A> {
    CoolingLayer { threshold: window_size, summarizer, ..CoolingLayer::default() }.wrap(agent)
}
