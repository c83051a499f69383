//! Context is heat: an agent that would be asked too much is asked less, and never knows.

use crate::agent::{Agent, Boxed, Layer};
use crate::content::{Content, Whose};
use crate::count::{Count, Quarter};
use halo_core::seams::SeamError;
use std::sync::Arc;

/// Tokens above which an agent is cooled, unless it is said otherwise.
pub const THRESHOLD: usize = 4096;

/// How an agent is kept cool.
#[derive(Clone)]
pub struct Cooling {
    /// It is asked no more tokens than these.
    pub threshold: usize,
    /// Makes a text shorter; without one, it is cut off.
    pub radiator: Option<Boxed<String, String>>,
    /// How tokens are counted.
    pub count: Arc<dyn Count>,
}

impl Default for Cooling {
    fn default() -> Self {
        Self { threshold: THRESHOLD, radiator: None, count: Arc::new(Quarter) }
    }
}

impl<A> Layer<A> for Cooling {
    type Agent = Cooled<A>;

    fn around(self, inner: A) -> Cooled<A> {
        Cooled { inner, how: self }
    }
}

/// An agent that is never asked more than it can bear. What a person said is passed on as it is: where that alone is more,
/// it is all that is passed on.
#[derive(Clone)]
pub struct Cooled<A> {
    inner: A,
    how: Cooling,
}

impl<A> Cooled<A> {
    async fn cool<I: Content + Send>(&self, input: I) -> Result<I, SeamError> {
        let Cooling { threshold, radiator, count } = &self.how;
        let parts = input.parts();
        let length: Vec<usize> = parts.iter().map(|(_, text)| count.tokens(text)).collect();
        if length.iter().sum::<usize>() <= *threshold {
            return Ok(input);
        }
        let agents = |n: usize| parts[n].0 == Whose::Agent;
        let theirs: usize = (0..parts.len()).filter(|&n| !agents(n)).map(|n| length[n]).sum();
        let mut texts: Vec<String> = parts.iter().map(|(_, text)| (*text).to_owned()).collect();
        let mut left = threshold.saturating_sub(theirs);
        // What is short is left alone; what is long shares the rest, in equal parts.
        let mut order: Vec<usize> = (0..parts.len()).filter(|&n| agents(n)).collect();
        order.sort_by_key(|&n| length[n]);
        for (done, &n) in order.iter().enumerate() {
            let share = left / (order.len() - done);
            if length[n] > share {
                if let Some(radiator) = radiator {
                    texts[n] = radiator.invoke(std::mem::take(&mut texts[n])).await?;
                }
                // A radiator may leave it too long, and must not be believed.
                texts[n] = count.cut(&texts[n], share).to_owned();
            }
            left = left.saturating_sub(count.tokens(&texts[n]));
        }
        Ok(input.rebuilt(texts))
    }
}

impl<I: Content + Send, A: Agent<I>> Agent<I> for Cooled<A> {
    type Out = A::Out;

    async fn invoke(&self, input: I) -> Result<A::Out, SeamError> {
        self.inner.invoke(self.cool(input).await?).await
    }
}

/// Any agent with its context managed: cooled above a window, by a summarizer if there is one.
pub fn with_context_management<A>(
    agent: A,
    window_size: usize,
    summarizer: Option<Boxed<String, String>>,
) -> Cooled<A> {
    Cooling { threshold: window_size, radiator: summarizer, ..Cooling::default() }.around(agent)
}
