//! How a conversation stands, for all who look at it: readable at any time, whoever is changing it. What changes is the whole
//! board at once, so nobody ever sees half of a change.

use crate::memory::Memory;
use crate::memory::stand::Stand;
use crate::record::Purpose;
use crate::session::Session;
use halo_core::prune::Rank;
use halo_core::seams::{ModelInfo, Piece};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, Position, TurnId};
use halo_recall::index::Index;
use halo_recall::recall::Manner;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// What the readers of a conversation see.
pub struct Board {
    inner: Mutex<Seen>,
}

/// A board as it was at one moment.
#[derive(Clone)]
pub struct Seen {
    /// The conversation.
    pub standing: Arc<Standing>,
    /// The answer that is being given.
    pub running: Option<Arc<Running>>,
    /// The number of the last event that is in this.
    pub events: u64,
}

/// A conversation as it was after a change.
pub struct Standing {
    /// Its name.
    pub name: String,
    /// What was said.
    pub timeline: Timeline,
    /// The standing instructions, as the model sees them.
    pub instructions: Vec<Piece>,
    /// How many tokens may be in the window.
    pub limit: usize,
    /// How many may stay there after a turn, so that there is room for the next one and what returns with it.
    pub stays: usize,
    /// What is known of the model.
    pub model: ModelInfo,
    /// The most that a token can shine.
    pub full: Brightness,
    /// How bright a chunk is, where it is decided who leaves.
    pub rank: Rank,
    /// The index, which can be searched at any time.
    pub index: Arc<RwLock<Index>>,
    /// How it is searched.
    pub manner: Manner,
    /// Whether its answers are recorded, to be kept.
    pub recording: bool,
    /// Whether memories are formed.
    pub remembers: bool,
    /// What the model remembers.
    pub memories: Vec<Memory>,
    /// The memories that stand in the window.
    pub stands: Vec<Stand>,
}

/// An answer as far as it has come.
#[derive(Clone, Debug, Default)]
pub struct Running {
    /// Its turn, once it has one.
    pub turn: Option<TurnId>,
    /// How many are ahead of it at the model.
    pub ahead: usize,
    /// What it says so far: chunk, birth index and text of each token.
    pub tokens: Vec<(ChunkId, Position, String)>,
}

impl Standing {
    /// A conversation as it is now.
    #[must_use]
    pub fn of(session: &Session) -> Self {
        Self {
            name: session.name.clone(),
            timeline: session.timeline.clone(),
            instructions: session.prefix.clone(),
            limit: session.limit(),
            stays: session.rules.budget().unwrap_or(usize::MAX).min(session.limit()),
            model: session.model.info().clone(),
            full: session.rules.context.strategy.full(),
            rank: session.rules.context.policy.rank(),
            index: session.recall.shared(),
            manner: session.rules.recall,
            recording: session.recorders.has(Purpose::Capture),
            remembers: session.memory_rules().is_some(),
            memories: session.memories.clone(),
            stands: session.stands.clone(),
        }
    }

    /// How many tokens the model sees.
    #[must_use]
    pub fn live(&self) -> usize {
        let standing: usize = self.stands.iter().map(Stand::len).sum();
        self.timeline.view(self.instructions.len()).len() + standing
    }
}

impl Board {
    pub(crate) fn new(standing: Standing, events: u64) -> Self {
        let seen = Seen { standing: Arc::new(standing), running: None, events };
        Self { inner: Mutex::new(seen) }
    }

    /// What there is to see.
    #[must_use]
    pub fn look(&self) -> Seen {
        self.lock().clone()
    }

    pub(crate) fn show(&self, standing: Standing) {
        let standing = Arc::new(standing);
        self.lock().standing = standing;
    }

    /// An event lets what is known of the answer change, and gets its number while nobody looks.
    pub(crate) fn count(
        &self,
        change: impl FnOnce(&mut Option<Running>),
        number: impl FnOnce() -> u64,
    ) -> u64 {
        let mut seen = self.lock();
        // Copied only where somebody looks at it this very moment.
        let mut running = seen.running.take().map(Arc::unwrap_or_clone);
        change(&mut running);
        seen.running = running.map(Arc::new);
        seen.events = number();
        seen.events
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
