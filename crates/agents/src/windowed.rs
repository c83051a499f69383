//! A context for an agent that has none: it is shown what was said before, as far as a sliding window keeps it.

use crate::agent::{Agent, Layer};
use crate::content::{Said, Whose};
use crate::count::{Count, Quarter};
use halo_core::salience::Salience;
use halo_core::seams::SeamError;
use halo_core::window::{Piece, SlidingWindow, WindowSize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What an agent is shown of what was said before.
#[derive(Clone)]
pub struct Windowing {
    /// How much.
    pub size: WindowSize,
    /// What stays when not all can; without it, what is latest.
    pub scorer: Option<Salience>,
    /// How tokens are counted.
    pub count: Arc<dyn Count>,
}

impl Default for Windowing {
    fn default() -> Self {
        let scorer = Some(Salience::default());
        Self { size: WindowSize::default(), scorer, count: Arc::new(Quarter) }
    }
}

impl<A> Layer<A> for Windowing {
    type Agent = Windowed<A>;

    fn around(self, inner: A) -> Windowed<A> {
        let window = SlidingWindow::new(self.size, self.scorer);
        let context = Arc::new(Mutex::new(Context { window, whose: BTreeMap::new() }));
        Windowed { inner, count: self.count, context }
    }
}

struct Context {
    window: SlidingWindow,
    whose: BTreeMap<u64, Whose>,
}

/// An agent that remembers what was said to it and what it said, as far as its window goes. What it is shown is what was
/// said, word for word: a window lets go of whole pieces and changes none.
#[derive(Clone)]
pub struct Windowed<A> {
    inner: A,
    count: Arc<dyn Count>,
    context: Arc<Mutex<Context>>,
}

impl<A> Windowed<A> {
    /// Something was said that it is not asked to answer. Returns what left the window for it.
    pub fn hear(&self, said: &Said) -> Vec<Piece> {
        let tokens = self.count.tokens(&said.text);
        let mut context = self.lock();
        let left = context.window.add(said.text.clone(), tokens);
        let newest = context.window.pieces().map(|piece| piece.id).max();
        if let Some(id) = newest {
            context.whose.insert(id, said.whose);
        }
        for piece in &left {
            context.whose.remove(&piece.id);
        }
        left
    }

    /// What it would be shown now.
    #[must_use]
    pub fn context(&self) -> Vec<Said> {
        let context = self.lock();
        let whose = |piece: &Piece| context.whose.get(&piece.id).copied().unwrap_or(Whose::Agent);
        context.window.pieces().map(|piece| Said { whose: whose(piece), text: piece.text.clone() }).collect()
    }

    /// How full its window is.
    #[must_use]
    pub fn pressure(&self) -> f64 {
        self.lock().window.pressure()
    }

    /// Does something with its window.
    pub fn with_window<T>(&self, work: impl FnOnce(&mut SlidingWindow) -> T) -> T {
        work(&mut self.lock().window)
    }

    fn lock(&self) -> MutexGuard<'_, Context> {
        self.context.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<A: Agent<Vec<Said>, Out = String>> Agent<Said> for Windowed<A> {
    type Out = String;

    async fn invoke(&self, input: Said) -> Result<String, SeamError> {
        self.hear(&input);
        let answer = self.inner.invoke(self.context()).await?;
        self.hear(&Said::agent(answer.clone()));
        Ok(answer)
    }
}
