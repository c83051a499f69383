//! Shortens answers under context pressure. Only text of agents: text of the user is never shortened.

use crate::agent::{Agent, AgentLayer, BoxedAgent};
use crate::content::{AuthoredContent, TextAuthor};
use crate::token_counter::first_chars;
use halo_core::Error;
use halo_core::sliding_window::HIGH_PRESSURE;
use std::sync::Arc;

/// When and how much answers are shortened.
#[derive(Clone, Debug)]
pub struct SummaryConstraint {
    /// The pressure at which answers are shortened.
    pub pressure_threshold: f64,
    /// The length of a shortened answer, as a share of its characters.
    pub compression_ratio: f64,
    /// Shortens an answer; without one, answers are truncated.
    pub summarizer: Option<BoxedAgent<String, String>>,
}

impl Default for SummaryConstraint {
    fn default() -> Self {
        Self { pressure_threshold: HIGH_PRESSURE, compression_ratio: 0.2, summarizer: None }
    }
}

impl SummaryConstraint {
    /// Shortens a message if the pressure reaches the threshold.
    ///
    /// # Errors
    /// When the summarizer fails.
    pub async fn maybe_compress(&self, message: String, pressure: f64) -> Result<String, Error> {
        if pressure < self.pressure_threshold {
            return Ok(message);
        }
        let chars = message.chars().count();
        let target = (chars as f64 * self.compression_ratio) as usize;
        match &self.summarizer {
            Some(summarizer) => {
                summarizer.invoke(format!("Summarize in {target} characters: {message}")).await
            }
            None => Ok(format!("{}...", first_chars(&message, target))),
        }
    }
}

/// The configuration of a [`ConstrainedAgent`].
#[derive(Clone)]
pub struct SummaryLayer {
    /// When and how much answers are shortened.
    pub constraint: SummaryConstraint,
    /// Returns the context pressure now.
    pub pressure: Arc<dyn Fn() -> f64 + Send + Sync>,
}

impl<A> AgentLayer<A> for SummaryLayer {
    type Agent = ConstrainedAgent<A>;

    fn wrap(self, inner: A) -> ConstrainedAgent<A> {
        ConstrainedAgent { inner, summary: self }
    }
}

/// An agent whose answers are shortened under context pressure.
#[derive(Clone)]
pub struct ConstrainedAgent<A> {
    inner: A,
    summary: SummaryLayer,
}

impl<I: Send, A> Agent<I> for ConstrainedAgent<A>
where
    A: Agent<I>,
    A::Out: AuthoredContent + Send,
{
    type Out = A::Out;

    async fn invoke(&self, input: I) -> Result<A::Out, Error> {
        let answer = self.inner.invoke(input).await?;
        let pressure = (self.summary.pressure)();
        let segments: Vec<(TextAuthor, String)> =
            answer.segments().into_iter().map(|(author, text)| (author, text.to_owned())).collect();
        let mut texts = Vec::with_capacity(segments.len());
        for (author, text) in segments {
            texts.push(match author {
                TextAuthor::User => text,
                TextAuthor::Agent => self.summary.constraint.maybe_compress(text, pressure).await?,
            });
        }
        Ok(answer.with_texts(texts))
    }
}
