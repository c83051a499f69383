//! Something that is asked and answers: a model here or far away, a plain function, or another agent in a wrapper.

use halo_core::seams::SeamError;
use std::pin::Pin;
use std::sync::Arc;

/// Something that is asked and answers.
pub trait Agent<I>: Send + Sync {
    /// What it answers with.
    type Out;

    /// Asks it.
    ///
    /// # Errors
    /// When it cannot answer.
    fn invoke(&self, input: I) -> impl Future<Output = Result<Self::Out, SeamError>> + Send;
}

/// What is told later, by somebody unknown.
type Later<O> = Pin<Box<dyn Future<Output = Result<O, SeamError>> + Send>>;

/// An agent of which only the question and the answer are known.
pub struct Boxed<I, O>(Arc<dyn Fn(I) -> Later<O> + Send + Sync>);

impl<I, O> Clone for Boxed<I, O> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<I, O> std::fmt::Debug for Boxed<I, O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Boxed")
    }
}

impl<I: Send, O> Agent<I> for Boxed<I, O> {
    type Out = O;

    fn invoke(&self, input: I) -> impl Future<Output = Result<O, SeamError>> + Send {
        (self.0)(input)
    }
}

/// A function that is an agent.
#[derive(Clone, Copy, Debug)]
pub struct Function<F>(F);

/// A function as an agent.
pub fn function<F>(f: F) -> Function<F> {
    Function(f)
}

impl<I, O, F, Fut> Agent<I> for Function<F>
where
    F: Fn(I) -> Fut + Send + Sync,
    Fut: Future<Output = Result<O, SeamError>> + Send,
{
    type Out = O;

    fn invoke(&self, input: I) -> impl Future<Output = Result<O, SeamError>> + Send {
        (self.0)(input)
    }
}

impl<I, A: Agent<I>> Agent<I> for Arc<A> {
    type Out = A::Out;

    fn invoke(&self, input: I) -> impl Future<Output = Result<A::Out, SeamError>> + Send {
        (**self).invoke(input)
    }
}

/// One agent behind another: what the first answers is what the second is asked.
#[derive(Clone, Copy, Debug)]
pub struct Then<A, B> {
    first: A,
    second: B,
}

impl<I: Send, A, B> Agent<I> for Then<A, B>
where
    A: Agent<I>,
    A::Out: Send,
    B: Agent<A::Out>,
{
    type Out = B::Out;

    async fn invoke(&self, input: I) -> Result<B::Out, SeamError> {
        let between = self.first.invoke(input).await?;
        self.second.invoke(between).await
    }
}

/// A wrapper that is not around anything yet.
pub trait Layer<A> {
    /// What it makes of an agent.
    type Agent;

    /// Puts it around one.
    fn around(self, inner: A) -> Self::Agent;
}

/// Agents are put together from the inside out: `agent.with(Cooling::default()).then(other)`.
pub trait Compose: Sized {
    /// This agent within a wrapper.
    fn with<L: Layer<Self>>(self, layer: L) -> L::Agent {
        layer.around(self)
    }

    /// This agent, and another that is asked what it answers.
    fn then<B>(self, second: B) -> Then<Self, B> {
        Then { first: self, second }
    }

    /// This agent as one of which only question and answer are known.
    fn boxed<I: Send + 'static>(self) -> Boxed<I, Self::Out>
    where
        Self: Agent<I> + 'static,
        Self::Out: 'static,
    {
        let this = Arc::new(self);
        Boxed(Arc::new(move |input| {
            let this = Arc::clone(&this);
            Box::pin(async move { this.invoke(input).await })
        }))
    }
}

impl<A> Compose for A {}
