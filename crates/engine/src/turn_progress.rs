//! What has happened in a turn so far: its stages, its counts, and the callback that hears of its events.

use crate::event::{Event, TurnStage};
use halo_core::Error;
use halo_core::attention::AttentionStats;
use halo_core::model::StepFlow;
use halo_core::resurrect::Hit;
use halo_core::token::ChunkId;
use std::time::Duration;

/// Hears of every event of a turn. Its return value counts during prefill and at every token: it can stop the answer there.
pub type TurnCallback<'a> = dyn FnMut(Event) -> StepFlow + 'a;

/// What has happened in a turn so far.
pub(crate) struct TurnProgress<'a> {
    pub callback: &'a mut TurnCallback<'a>,
    pub stages: Vec<(TurnStage, Duration)>,
    pub resurrected: Vec<ChunkId>,
    /// For each of them, the mean attention per token that it received from the answer, in ‰; none if none was measured.
    pub resurrected_attention: Vec<Option<f64>>,
    pub pruned: usize,
    /// Earlier answers that were shortened in the prompts of this turn.
    pub cooled_messages: usize,
    pub traces: Vec<(u64, AttentionStats)>,
    /// The best hits that were not resurrected, because they are below the relevance floor.
    pub below_floor: Vec<Hit>,
    /// A premise of the message that the conversation contradicts.
    pub false_premise: Option<String>,
}

impl<'a> TurnProgress<'a> {
    pub fn new(callback: &'a mut TurnCallback<'a>) -> Self {
        Self {
            callback,
            stages: Vec::new(),
            resurrected: Vec::new(),
            resurrected_attention: Vec::new(),
            pruned: 0,
            cooled_messages: 0,
            traces: Vec::new(),
            below_floor: Vec::new(),
            false_premise: None,
        }
    }

    pub fn announce(&mut self, event: Event) {
        (self.callback)(event);
    }

    /// A recorder that fails is removed; the turn continues.
    pub fn announce_recorder_error(&mut self, error: Option<Error>) {
        if let Some(error) = error {
            self.announce(Event::Notice(format!("the recording of answers has stopped: {error}")));
        }
    }

    pub fn record_stage(&mut self, stage: TurnStage, duration: Duration) {
        self.stages.push((stage, duration));
        self.announce(Event::StageFinished(stage, duration));
    }
}
