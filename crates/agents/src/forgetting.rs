//! Forgetting in step: when the window is too full, it lets go of what matters least, what is too old is forgotten for good,
//! and memories that matter little rest.

use halo_core::salience::{Salience, recency};
use halo_core::seams::SeamError;
use halo_core::window::{HIGH_PRESSURE, SlidingWindow};

/// Memories below this salience rest.
pub const RESTING_SALIENCE: f64 = 0.3;

/// Something that forgets for good, by its own rules.
pub trait Retention: Send {
    /// Forgets what is due; returns how much that was.
    ///
    /// # Errors
    /// When it cannot.
    fn apply_retention_policy(&mut self) -> impl Future<Output = Result<usize, SeamError>> + Send;
}

/// A memory that is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Active {
    /// Which one.
    pub id: u64,
    /// What it says.
    pub text: String,
}

/// Something that keeps memories.
pub trait Memories: Send {
    /// Those that are in use, the oldest first.
    ///
    /// # Errors
    /// When they cannot be told.
    fn list_active(&mut self) -> impl Future<Output = Result<Vec<Active>, SeamError>> + Send;

    /// Lets one rest; it is kept.
    ///
    /// # Errors
    /// When it cannot be done.
    fn deactivate(&mut self, id: u64) -> impl Future<Output = Result<(), SeamError>> + Send;
}

/// One thing that was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// So many pieces left the window.
    WindowPrune(usize),
    /// What was due was forgotten for good: so much.
    LetheCycle(usize),
    /// A memory rests.
    MemoryDeactivate(u64),
}

impl Action {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Action::WindowPrune(_) => "window_prune",
            Action::LetheCycle(_) => "lethe_cycle",
            Action::MemoryDeactivate(_) => "memory_deactivate",
        }
    }
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct ForgettingResult {
    /// How full the window was.
    pub initial_pressure: f64,
    /// How full it is.
    pub final_pressure: f64,
    /// What was done, in order.
    pub actions: Vec<Action>,
}

/// The pressure above which it begins, unless it is said otherwise.
pub const THRESHOLD: f64 = HIGH_PRESSURE;

/// Forgets in step, if the window is fuller than `threshold`.
///
/// # Errors
/// When one of those that forget fails; what was done before stands.
pub async fn coordinated_forgetting_cycle(
    window: &mut SlidingWindow,
    scorer: &Salience,
    lethe: &mut impl Retention,
    memories: &mut impl Memories,
    threshold: f64,
) -> Result<ForgettingResult, SeamError> {
    let initial_pressure = window.pressure();
    let mut actions = Vec::new();
    if initial_pressure > threshold {
        actions.push(Action::WindowPrune(window.prune().len()));
        actions.push(Action::LetheCycle(lethe.apply_retention_policy().await?));
        let active = memories.list_active().await?;
        for (n, memory) in active.iter().enumerate() {
            if scorer.score(&memory.text, recency(n, active.len())) < RESTING_SALIENCE {
                memories.deactivate(memory.id).await?;
                actions.push(Action::MemoryDeactivate(memory.id));
            }
        }
    }
    Ok(ForgettingResult { initial_pressure, final_pressure: window.pressure(), actions })
}
