//! Under pressure agents say it shorter. Only what an agent says: what a person says is never shortened.

use crate::agent::{Agent, Boxed, Layer};
use crate::content::{Content, Whose};
use crate::count::chars;
use halo_core::seams::SeamError;
use halo_core::window::HIGH_PRESSURE;
use std::sync::Arc;

/// When and how far what agents say is shortened.
#[derive(Clone, Debug)]
pub struct SummaryConstraint {
    /// From this pressure on.
    pub pressure_threshold: f64,
    /// To this share of its length.
    pub compression_ratio: f64,
    /// Who shortens it; without one, it is cut off.
    pub summarizer: Option<Boxed<String, String>>,
}

impl Default for SummaryConstraint {
    fn default() -> Self {
        Self { pressure_threshold: HIGH_PRESSURE, compression_ratio: 0.2, summarizer: None }
    }
}

impl SummaryConstraint {
    /// A message as it goes on at this pressure: below the threshold unchanged.
    ///
    /// # Errors
    /// When the summarizer fails.
    pub async fn maybe_compress(&self, message: String, pressure: f64) -> Result<String, SeamError> {
        if pressure < self.pressure_threshold {
            return Ok(message);
        }
        let length = message.chars().count();
        let target = (length as f64 * self.compression_ratio) as usize;
        match &self.summarizer {
            Some(summarizer) => {
                summarizer.invoke(format!("Summarize in {target} characters: {message}")).await
            }
            None => Ok(format!("{}...", chars(&message, target))),
        }
    }
}

/// A constraint that is told the pressure where it is known.
#[derive(Clone)]
pub struct Pressed {
    /// The constraint.
    pub constraint: SummaryConstraint,
    /// How full the context is now.
    pub pressure: Arc<dyn Fn() -> f64 + Send + Sync>,
}

impl<A> Layer<A> for Pressed {
    type Agent = Constrained<A>;

    fn around(self, inner: A) -> Constrained<A> {
        Constrained { inner, pressed: self }
    }
}

/// An agent whose answers grow short under pressure.
#[derive(Clone)]
pub struct Constrained<A> {
    inner: A,
    pressed: Pressed,
}

impl<I: Send, A> Agent<I> for Constrained<A>
where
    A: Agent<I>,
    A::Out: Content + Send,
{
    type Out = A::Out;

    async fn invoke(&self, input: I) -> Result<A::Out, SeamError> {
        let out = self.inner.invoke(input).await?;
        let pressure = (self.pressed.pressure)();
        let parts: Vec<(Whose, String)> = out.parts().into_iter().map(|(w, t)| (w, t.to_owned())).collect();
        let mut texts = Vec::with_capacity(parts.len());
        for (whose, text) in parts {
            texts.push(match whose {
                Whose::User => text,
                Whose::Agent => self.pressed.constraint.maybe_compress(text, pressure).await?,
            });
        }
        Ok(out.rebuilt(texts))
    }
}
