//! The agent trait, and how agents are composed. An agent is a local or remote model, a plain function, or another
//! agent in a wrapper.

use halo_core::Error;
use std::pin::Pin;
use std::sync::Arc;

/// Takes an input and returns an answer.
pub trait Agent<I>: Send + Sync {
    /// The answer.
    type Out;

    /// Calls the agent.
    ///
    /// # Errors
    /// When the agent cannot answer.
    fn invoke(&self, input: I) -> impl Future<Output = Result<Self::Out, Error>> + Send;
}

/// The future of a boxed agent.
type AgentFuture<O> = Pin<Box<dyn Future<Output = Result<O, Error>> + Send>>;

/// An agent of which only the types of input and answer are known.
pub struct BoxedAgent<I, O>(Arc<dyn Fn(I) -> AgentFuture<O> + Send + Sync>);

impl<I, O> Clone for BoxedAgent<I, O> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<I, O> std::fmt::Debug for BoxedAgent<I, O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BoxedAgent")
    }
}

impl<I: Send, O> Agent<I> for BoxedAgent<I, O> {
    type Out = O;

    fn invoke(&self, input: I) -> impl Future<Output = Result<O, Error>> + Send {
        (self.0)(input)
    }
}

/// A function as an agent; [`agent_fn`] makes one.
#[derive(Clone, Copy, Debug)]
pub struct FunctionAgent<F>(F);

/// Makes an agent of an async function.
pub fn agent_fn<F>(f: F) -> FunctionAgent<F> {
    FunctionAgent(f)
}

impl<I, O, F, Fut> Agent<I> for FunctionAgent<F>
where
    F: Fn(I) -> Fut + Send + Sync,
    Fut: Future<Output = Result<O, Error>> + Send,
{
    type Out = O;

    fn invoke(&self, input: I) -> impl Future<Output = Result<O, Error>> + Send {
        (self.0)(input)
    }
}

impl<I, A: Agent<I>> Agent<I> for Arc<A> {
    type Out = A::Out;

    fn invoke(&self, input: I) -> impl Future<Output = Result<A::Out, Error>> + Send {
        (**self).invoke(input)
    }
}

/// Two agents in a chain: the answer of the first is the input of the second.
#[derive(Clone, Copy, Debug)]
pub struct ChainedAgent<A, B> {
    first: A,
    second: B,
}

impl<I: Send, A, B> Agent<I> for ChainedAgent<A, B>
where
    A: Agent<I>,
    A::Out: Send,
    B: Agent<A::Out>,
{
    type Out = B::Out;

    async fn invoke(&self, input: I) -> Result<B::Out, Error> {
        let answer = self.first.invoke(input).await?;
        self.second.invoke(answer).await
    }
}

/// The configuration of a wrapper, which wraps any agent.
pub trait AgentLayer<A> {
    /// The wrapped agent.
    type Agent;

    /// Wraps an agent.
    fn wrap(self, inner: A) -> Self::Agent;
}

/// Composes agents from the inside out: `agent.with_layer(CoolingLayer::default()).then(other)`.
pub trait AgentExt: Sized {
    /// Wraps this agent.
    fn with_layer<L: AgentLayer<Self>>(self, layer: L) -> L::Agent {
        layer.wrap(self)
    }

    /// Passes the answer of this agent to another.
    fn then<B>(self, second: B) -> ChainedAgent<Self, B> {
        ChainedAgent { first: self, second }
    }

    /// Hides the type of this agent.
    fn boxed<I: Send + 'static>(self) -> BoxedAgent<I, Self::Out>
    where
        Self: Agent<I> + 'static,
        Self::Out: 'static,
    {
        let this = Arc::new(self);
        BoxedAgent(Arc::new(move |input| {
            let this = Arc::clone(&this);
            Box::pin(async move { this.invoke(input).await })
        }))
    }
}

impl<A> AgentExt for A {}
