//! Gives an agent without context the earlier messages in a sliding window.

use crate::agent::{Agent, AgentLayer};
use crate::content::{AuthoredMessage, TextAuthor};
use crate::token_counter::{ApproxTokenCounter, TokenCounter};
use halo_core::Error;
use halo_core::salience::SalienceScorer;
use halo_core::sliding_window::{SlidingWindow, SlidingWindowItem, WindowSize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The configuration of a [`WindowedAgent`].
#[derive(Clone)]
pub struct WindowLayer {
    /// The size of the window.
    pub size: WindowSize,
    /// Scores messages: the least salient are pruned first. Without it, the oldest.
    pub scorer: Option<SalienceScorer>,
    /// Counts tokens.
    pub counter: Arc<dyn TokenCounter>,
}

impl Default for WindowLayer {
    fn default() -> Self {
        let scorer = Some(SalienceScorer::default());
        Self { size: WindowSize::default(), scorer, counter: Arc::new(ApproxTokenCounter) }
    }
}

impl<A> AgentLayer<A> for WindowLayer {
    type Agent = WindowedAgent<A>;

    fn wrap(self, inner: A) -> WindowedAgent<A> {
        let window = SlidingWindow::new(self.size, self.scorer);
        let context = Arc::new(Mutex::new(WindowContext { window, authors: BTreeMap::new() }));
        WindowedAgent { inner, counter: self.counter, context }
    }
}

struct WindowContext {
    window: SlidingWindow,
    authors: BTreeMap<u64, TextAuthor>,
}

/// An agent that is shown its earlier inputs and answers, as far as they fit its window. The window prunes whole
/// messages and changes none.
#[derive(Clone)]
pub struct WindowedAgent<A> {
    inner: A,
    counter: Arc<dyn TokenCounter>,
    context: Arc<Mutex<WindowContext>>,
}

impl<A> WindowedAgent<A> {
    /// Adds a message without asking for an answer. Returns the messages that were pruned for it.
    pub fn add_message(&self, message: &AuthoredMessage) -> Vec<SlidingWindowItem> {
        let tokens = self.counter.count_tokens(&message.text);
        let mut context = self.lock();
        let pruned = context.window.push(message.text.clone(), tokens);
        let newest = context.window.items().map(|item| item.id).max();
        if let Some(id) = newest {
            context.authors.insert(id, message.author);
        }
        for item in &pruned {
            context.authors.remove(&item.id);
        }
        pruned
    }

    /// The messages in the window.
    #[must_use]
    pub fn context(&self) -> Vec<AuthoredMessage> {
        let context = self.lock();
        let author =
            |item: &SlidingWindowItem| context.authors.get(&item.id).copied().unwrap_or(TextAuthor::Agent);
        context
            .window
            .items()
            .map(|item| AuthoredMessage { author: author(item), text: item.text.clone() })
            .collect()
    }

    /// The pressure of the window.
    #[must_use]
    pub fn pressure(&self) -> f64 {
        self.lock().window.pressure()
    }

    /// Accesses the window.
    pub fn with_window<T>(&self, access: impl FnOnce(&mut SlidingWindow) -> T) -> T {
        access(&mut self.lock().window)
    }

    fn lock(&self) -> MutexGuard<'_, WindowContext> {
        self.context.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<A: Agent<Vec<AuthoredMessage>, Out = String>> Agent<AuthoredMessage> for WindowedAgent<A> {
    type Out = String;

    async fn invoke(&self, input: AuthoredMessage) -> Result<String, Error> {
        self.add_message(&input);
        let answer = self.inner.invoke(self.context()).await?;
        self.add_message(&AuthoredMessage::agent(answer.clone()));
        Ok(answer)
    }
}
