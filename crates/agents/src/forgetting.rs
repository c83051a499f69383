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

/// What a forgetting cycle works on: a context window, and the memories beside it.
pub trait ForgettingSubject: ActiveMemories {
    /// How full the context window is.
    fn pressure(&self) -> f64;

    /// Prunes the least salient tenth of the window. Returns how many items that were.
    ///
    /// # Errors
    /// When the store fails.
    fn prune_window(&mut self) -> impl Future<Output = Result<usize, Error>> + Send;
}

/// A sliding window with the memories of a store.
pub struct WindowWithMemories<'a, M> {
    /// The window.
    pub window: &'a mut SlidingWindow,
    /// The memories.
    pub memories: &'a mut M,
}

impl<M: ActiveMemories> ActiveMemories for WindowWithMemories<'_, M> {
    async fn list_active(&mut self) -> Result<Vec<ActiveMemory>, Error> {
        self.memories.list_active().await
    }

    async fn deactivate(&mut self, id: u64) -> Result<(), Error> {
        self.memories.deactivate(id).await
    }
}

impl<M: ActiveMemories> ForgettingSubject for WindowWithMemories<'_, M> {
    fn pressure(&self) -> f64 {
        self.window.pressure()
    }

    async fn prune_window(&mut self) -> Result<usize, Error> {
        Ok(self.window.prune().len())
    }
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
    subject: &mut impl ForgettingSubject,
    scorer: &SalienceScorer,
    lethe: &mut impl ApplyRetention,
    threshold: f64,
) -> Result<ForgettingResult, Error> {
    let initial_pressure = subject.pressure();
    let mut actions = Vec::new();
    if initial_pressure > threshold {
        actions.push(ForgettingAction::WindowPrune(subject.prune_window().await?));
        actions.push(ForgettingAction::LetheCycle(lethe.apply_retention_policy().await?));
        let active = subject.list_active().await?;
        for (n, memory) in active.iter().enumerate() {
            if scorer.score(&memory.text, recency(n, active.len())) < DEACTIVATION_SALIENCE {
                subject.deactivate(memory.id).await?;
                actions.push(ForgettingAction::MemoryDeactivate(memory.id));
            }
        }
    }
    Ok(ForgettingResult { initial_pressure, final_pressure: subject.pressure(), actions })
}

impl ForgettingResult {
    /// Whether the pressure was above the threshold.
    #[must_use]
    pub fn has_run(&self) -> bool {
        !self.actions.is_empty()
    }

    /// How many items were pruned from the window.
    #[must_use]
    pub fn pruned(&self) -> usize {
        self.sum(|action| if let ForgettingAction::WindowPrune(count) = action { count } else { 0 })
    }

    /// How many items the retention policy deleted.
    #[must_use]
    pub fn forgotten(&self) -> usize {
        self.sum(|action| if let ForgettingAction::LetheCycle(count) = action { count } else { 0 })
    }

    /// The memories that were deactivated.
    #[must_use]
    pub fn deactivated(&self) -> Vec<u64> {
        let id = |action: &ForgettingAction| match action {
            ForgettingAction::MemoryDeactivate(id) => Some(*id),
            _ => None,
        };
        self.actions.iter().filter_map(id).collect()
    }

    fn sum(&self, count: impl Fn(ForgettingAction) -> usize) -> usize {
        self.actions.iter().map(|action| count(*action)).sum()
    }
}
