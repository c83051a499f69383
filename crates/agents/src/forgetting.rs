//! One cycle of forgetting under context pressure: prune the window, apply the retention policy, and deactivate
//! memories of low salience.

use halo_core::Error;
use halo_core::salience::{SalienceScorer, recency};
use halo_core::sliding_window::{HIGH_PRESSURE, SlidingWindow};

/// Memories below this salience are deactivated.
pub const DEACTIVATION_SALIENCE: f64 = 0.3;

/// A store with a retention policy.
pub trait ApplyRetention: Send {
    /// Deletes what is due. Returns how many items that were.
    ///
    /// # Errors
    /// When the store fails.
    fn apply_retention_policy(&mut self) -> impl Future<Output = Result<usize, Error>> + Send;
}

/// An active memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveMemory {
    /// Its number.
    pub id: u64,
    /// Its text.
    pub text: String,
}

/// A store of memories.
pub trait ActiveMemories: Send {
    /// The active memories, oldest first.
    ///
    /// # Errors
    /// When the store fails.
    fn list_active(&mut self) -> impl Future<Output = Result<Vec<ActiveMemory>, Error>> + Send;

    /// Deactivates a memory. It stays in the store.
    ///
    /// # Errors
    /// When the store fails.
    fn deactivate(&mut self, id: u64) -> impl Future<Output = Result<(), Error>> + Send;
}

/// A step of a forgetting cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForgettingAction {
    /// The number of items that were pruned from the window.
    WindowPrune(usize),
    /// The number of items that the retention policy deleted.
    LetheCycle(usize),
    /// The number of a memory that was deactivated.
    MemoryDeactivate(u64),
}

impl ForgettingAction {
    /// The name of the step.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ForgettingAction::WindowPrune(_) => "window_prune",
            ForgettingAction::LetheCycle(_) => "lethe_cycle",
            ForgettingAction::MemoryDeactivate(_) => "memory_deactivate",
        }
    }
}

/// The result of a forgetting cycle.
#[derive(Clone, Debug, PartialEq)]
pub struct ForgettingResult {
    /// The context pressure before.
    pub initial_pressure: f64,
    /// The context pressure after.
    pub final_pressure: f64,
    /// The steps, in order.
    pub actions: Vec<ForgettingAction>,
}

/// The default pressure above which a cycle runs.
pub const PRESSURE_THRESHOLD: f64 = HIGH_PRESSURE;

/// Runs a cycle if the context pressure exceeds `threshold`.
///
/// # Errors
/// When a store fails; steps that were done before stay done.
pub async fn coordinated_forgetting_cycle(
    window: &mut SlidingWindow,
    scorer: &SalienceScorer,
    lethe: &mut impl ApplyRetention,
    memories: &mut impl ActiveMemories,
    threshold: f64,
) -> Result<ForgettingResult, Error> {
    let initial_pressure = window.pressure();
    let mut actions = Vec::new();
    if initial_pressure > threshold {
        actions.push(ForgettingAction::WindowPrune(window.prune().len()));
        actions.push(ForgettingAction::LetheCycle(lethe.apply_retention_policy().await?));
        let active = memories.list_active().await?;
        for (n, memory) in active.iter().enumerate() {
            if scorer.score(&memory.text, recency(n, active.len())) < DEACTIVATION_SALIENCE {
                memories.deactivate(memory.id).await?;
                actions.push(ForgettingAction::MemoryDeactivate(memory.id));
            }
        }
    }
    Ok(ForgettingResult { initial_pressure, final_pressure: window.pressure(), actions })
}
