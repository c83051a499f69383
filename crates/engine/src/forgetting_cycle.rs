//! The forgetting cycle of a conversation: under context pressure, the least attended tenth of the window is pruned, the
//! store's retention is applied, and memories of low salience are disabled. The parts that change the conversation can be
//! undone; only the retention erases, and only what its caller lets it erase.

use crate::forgetting_record::ForgettingRecord;
use crate::memory::edit::MemoryEdit;
use crate::rules::ConversationRules;
use crate::session::Session;
use crate::turn_record::TurnRecord;
use halo_agents::forgetting::{
    ActiveMemories, ActiveMemory, ApplyRetention, ForgettingResult, ForgettingSubject,
    coordinated_forgetting_cycle,
};
use halo_core::Error;
use halo_core::brightness::ScoringStrategy;
use halo_core::budget::pressure;
use halo_core::salience::SalienceScorer;
use halo_core::store::{Durability, RecordKind};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Role};

/// The share of the window that a cycle prunes at least.
const PRUNED_SHARE: f64 = 0.1;

/// Scores the memories of a conversation: the names are those of its speakers and of the user's live messages.
#[must_use]
pub fn memory_scorer(timeline: &Timeline, rules: &ConversationRules) -> SalienceScorer {
    let mut scorer = SalienceScorer::default();
    scorer.register_entity(&rules.speaker_names.user);
    scorer.register_entity(&rules.speaker_names.assistant);
    for chunk in timeline.live_chunks().filter(|chunk| chunk.id().role == Role::User) {
        scorer.register_names_in(&chunk.live_text());
    }
    scorer
}

impl Session {
    /// How full the context window is.
    #[must_use]
    pub fn pressure(&self) -> f64 {
        pressure(self.live_tokens(), self.token_limit())
    }

    /// Whether a forgetting cycle is due.
    #[must_use]
    pub fn is_under_pressure(&self) -> bool {
        let threshold = self.rules().forgetting.map(|forgetting| forgetting.threshold);
        threshold.is_some_and(|threshold| self.pressure() > threshold)
    }

    /// Runs a forgetting cycle if one is due. Returns its result; none if none was.
    pub fn run_forgetting_cycle(
        &mut self,
        lethe: &mut impl ApplyRetention,
    ) -> Result<Option<ForgettingResult>, Error> {
        let Some(rules) = self.rules().forgetting.filter(|_| self.is_under_pressure()) else {
            return Ok(None);
        };
        let scorer = memory_scorer(self.timeline(), self.rules());
        let cycle = coordinated_forgetting_cycle(self, &scorer, lethe, rules.threshold);
        let result = crate::agent::poll_ready(cycle)?;
        self.record_forgetting_cycle(&result)?;
        Ok(Some(result))
    }

    /// Stores what a cycle did.
    pub fn record_forgetting_cycle(&mut self, result: &ForgettingResult) -> Result<(), Error> {
        if !result.has_run() {
            return Ok(());
        }
        let conversation = &mut self.parts_mut().conversation;
        let (store, name, timeline) = conversation.body_loader();
        let last_turn = timeline.turns().last().map(|turn| turn.id.0.to_string());
        let before = ForgettingRecord::load(store, name)?.unwrap_or_default();
        let record = before.after(result, jiff::Timestamp::now().as_millisecond());
        record.save(conversation)?;
        let turns = conversation.records(RecordKind::Turn)?;
        let turn = turns.into_iter().find(|turn| Some(&turn.key) == last_turn.as_ref());
        let Some((key, mut turn)) =
            turn.and_then(|turn| Some((turn.key, TurnRecord::from_json(&turn.value)?)))
        else {
            return Ok(());
        };
        turn.forgetting = Some(record);
        conversation.put_record(RecordKind::Turn, &key, Some(&turn.to_json()))
    }

    /// Prunes the least attended tenth of the window, and more where the pressure stays above the threshold. Returns the
    /// pruned chunks. Nothing is pruned where the settings turn pruning off, or where single tokens are pruned.
    pub fn prune_under_pressure(&mut self) -> Result<Vec<ChunkId>, Error> {
        let parts = self.parts_mut();
        let whole_chunks = matches!(parts.rules.context.strategy, ScoringStrategy::Magnitude(_));
        let Some(rules) = parts.rules.forgetting.filter(|_| whole_chunks) else { return Ok(Vec::new()) };
        if parts.token_budget().is_none() {
            return Ok(Vec::new());
        }
        let live = parts.live_tokens() as f64;
        let budget = (parts.token_limit() as f64 * rules.threshold).min(live * (1.0 - PRUNED_SHARE));
        let current = parts.timeline().turns().last().map(|turn| turn.id);
        let plan = parts.prune_plan(parts.timeline(), budget as usize, current);
        let Some(change) = plan.change() else { return Ok(Vec::new()) };
        parts.commit(&change, Durability::Immediate)?;
        parts.sync_kv_cache()?;
        Ok(plan.pruned.iter().map(|pruned| pruned.chunk).collect())
    }
}

/// Lethe disables memories of little importance, in step with the window.
impl ActiveMemories for Session {
    async fn list_active(&mut self) -> Result<Vec<ActiveMemory>, Error> {
        let active = self.memories().iter().filter(|memory| !memory.disabled && !memory.pinned);
        Ok(active.map(|memory| ActiveMemory { id: memory.id, text: memory.text.clone() }).collect())
    }

    async fn deactivate(&mut self, id: u64) -> Result<(), Error> {
        self.edit_memory(id, MemoryEdit::Disable(true))
    }
}

impl ForgettingSubject for Session {
    fn pressure(&self) -> f64 {
        Session::pressure(self)
    }

    async fn prune_window(&mut self) -> Result<usize, Error> {
        self.prune_under_pressure().map(|pruned| pruned.len())
    }
}
