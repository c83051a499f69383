//! The parts of a session, side by side.
//!
//! Each part owns its data and knows only the parts that its methods are given. What concerns several of them is here: the
//! context window and its limits, and what follows a commit.

use crate::attention_history::AttentionHistory;
use crate::chat_model::ChatModel;
use crate::chat_options::{CHOSEN_MODEL_KEY, ChatDefaults, PERSONA_KEY, SAMPLING_KEY};
use crate::conversation::{Conversation, MESSAGE_ID_KEY};
use crate::memory::manager::MemoryManager;
use crate::memory::segment::build_window;
use crate::premise::PremiseChecker;
use crate::recorder::RecorderSlot;
use crate::rules::ConversationRules;
use crate::snapshot::{ConversationState, SnapshotPublisher};
use crate::window_size::{automatic_window, measured_speed, store_speed};
use halo_core::Error;
use halo_core::change::{Change, ChunkSelection, DeleteReason, Extent};
use halo_core::model::WindowToken;
use halo_core::prune::{PrunePlan, plan_prune};
use halo_core::store::{Access, Durability};
use halo_core::timeline::Timeline;
use halo_core::token::TurnId;
use halo_recall::recall::Recall;
use jiff::civil::Date;
use std::time::Duration;

/// How an answer begins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerBegin {
    /// Text that the client has written for the model, which continues it.
    pub text: String,
    /// Whether the client wants no reasoning, where the template has a way to leave it out.
    pub skip_reasoning: bool,
    /// Whether readers are told the text as tokens of the answer. A client that has written it has it already.
    pub is_announced: bool,
}

/// The parts of a session.
pub(crate) struct SessionParts {
    pub conversation: Conversation,
    pub model: ChatModel,
    pub recall: Recall,
    pub memories: MemoryManager,
    pub premises: PremiseChecker,
    pub recorder: RecorderSlot,
    pub attention_history: AttentionHistory,
    pub publisher: SnapshotPublisher,
    pub rules: ConversationRules,
    /// The day of the last user message.
    pub last_user_day: Option<Date>,
    /// The client's id of the next message.
    pub next_message_id: Option<String>,
    /// How the next answer begins.
    pub next_answer: AnswerBegin,
    /// Whether a client has said since the conversation was opened which functions it offers.
    pub has_set_tools: bool,
    /// A system prompt of this conversation that is stored with its first message.
    pub unsaved_system_prompt: Option<String>,
    /// Values of sampling of this conversation, as JSON, that are stored with its first message.
    pub unsaved_sampling: Option<String>,
    /// Who talks in this conversation, as JSON, which is stored with its first message.
    pub unsaved_persona: Option<String>,
    /// The model of this conversation, which is stored with its first message.
    pub unsaved_model: Option<String>,
    /// What holds where the conversation has no options of its own.
    pub defaults: ChatDefaults,
    /// The fastest prefill of this model in this conversation, in tokens per second.
    pub prefill_speed: Option<f64>,
    /// A planted bug: a message is announced before it is stored.
    #[cfg(feature = "testing")]
    pub announces_before_commit: bool,
}

impl SessionParts {
    /// Commits a change. Memories follow it, and readers see the result.
    pub fn commit(&mut self, change: &Change, durability: Durability) -> Result<Change, Error> {
        let undo = self.conversation.commit(change, durability)?;
        // These two change neither which chunks are live nor which are deleted.
        if !matches!(change, Change::Append(_) | Change::Score(_)) {
            self.memories.refresh_placement(&mut self.conversation, &self.rules);
        }
        self.publish();
        Ok(undo)
    }

    /// The next commit stores a message: what belongs to it is stored in the same transaction.
    pub fn stage_message_records(&mut self) {
        self.stage_system_prompt();
        if let Some(id) = self.next_message_id.take() {
            self.conversation.stage_setting(MESSAGE_ID_KEY, id);
        }
    }

    pub fn stage_system_prompt(&mut self) {
        if let Some(system_prompt) = self.unsaved_system_prompt.take() {
            self.conversation.stage_system_prompt(system_prompt);
        }
        if let Some(sampling) = self.unsaved_sampling.take() {
            self.conversation.stage_setting(SAMPLING_KEY, sampling);
        }
        if let Some(persona) = self.unsaved_persona.take() {
            self.conversation.stage_setting(PERSONA_KEY, persona);
        }
        if let Some(model) = self.unsaved_model.take() {
            self.conversation.stage_setting(CHOSEN_MODEL_KEY, model);
        }
    }

    /// Brings the search index in line with the timeline. Returns how many chunks are new.
    pub fn sync_index(&mut self) -> Result<usize, Error> {
        let (store, timeline) = self.conversation.store_and_timeline();
        self.recall.sync(store, timeline)
    }

    /// Brings the KV cache in line with the context window and saves it, so that the next answer does not wait for that.
    pub fn sync_kv_cache(&mut self) -> Result<(), Error> {
        let window = self.context_window();
        if window.is_empty() || self.conversation.is_new() {
            return Ok(());
        }
        self.model.model.persist_kv(self.conversation.kv_key(), &window)
    }

    /// Deletes turns: they leave the context window and are not found by search.
    pub fn delete_turns(&mut self, turns: &[TurnId], reason: DeleteReason) -> Result<(), Error> {
        let chunks = turns.iter().flat_map(|&turn| self.timeline().turn_chunks(turn));
        let chunks = chunks.filter(|chunk| !chunk.is_deleted());
        let chunks =
            chunks.map(|chunk| ChunkSelection { chunk: chunk.id(), extent: Extent::Whole }).collect();
        self.commit(&Change::Delete { chunks, reason }, Durability::Immediate)?;
        self.sync_index()?;
        Ok(())
    }

    pub fn timeline(&self) -> &Timeline {
        self.conversation.timeline()
    }

    /// The context window as tokens: the system prompt, the live chunks, and the placed memories between them.
    pub fn context_window(&self) -> Vec<WindowToken> {
        build_window(&self.model.system_tokens, self.timeline(), self.memories.placed())
    }

    /// Tokens in the context window.
    pub fn live_tokens(&self) -> usize {
        self.timeline().context_window(self.model.system_tokens.len()).len() + self.memories.placed_tokens()
    }

    /// The most tokens in the context window.
    pub fn token_limit(&self) -> usize {
        self.rules.token_limit(self.model.info().context, self.model.system_tokens.len())
    }

    /// Tokens that the window may hold after a turn; none: pruning whole chunks is off.
    pub fn token_budget(&self) -> Option<usize> {
        self.rules.token_budget(self.model.info().context)
    }

    /// A prefill of so many tokens took so long: the automatic window grows with the speed.
    pub fn record_prefill(&mut self, tokens: usize, duration: Duration) -> Result<(), Error> {
        let fastest = self.prefill_speed;
        let Some(speed) = measured_speed(tokens, duration).filter(|&s| fastest.is_none_or(|f| s > f)) else {
            return Ok(());
        };
        self.prefill_speed = Some(speed);
        let info = self.model.info();
        let window = automatic_window(info.context, Some(speed));
        if self.rules.auto_sizes.window && (fastest.is_none() || window > self.rules.context.max_tokens) {
            store_speed(&mut self.conversation, info, speed)?;
            self.rules.set_auto_sizes(window);
        }
        Ok(())
    }

    /// Which chunks to prune from a timeline so that the window, placed memories included, has at most `budget` tokens.
    pub fn prune_plan(&self, timeline: &Timeline, budget: usize, current: Option<TurnId>) -> PrunePlan {
        let budget = budget.saturating_sub(self.memories.placed_tokens());
        let window = timeline.context_window(self.model.system_tokens.len());
        plan_prune(window, &self.rules.context.prune_rules(budget, current))
    }

    /// Where the store, the KV cache or the search index disagree with the timeline. Between turns they never do.
    pub fn find_inconsistencies(&mut self) -> Result<Vec<String>, Error> {
        let mut found = Vec::new();
        found.extend(self.timeline().check_invariants().err().map(|why| format!("timeline: {why}")));
        let (store, name, timeline) = self.conversation.body_loader();
        let stored = store.load(name, Access::Read)?;
        if stored.revision() > timeline.revision() {
            // Another process has taken the lease and has written since; the next commit of this one fails.
            return Ok(found);
        }
        if stored.state_hash() != timeline.state_hash() {
            found.push("the store has another state than the timeline".to_owned());
        } else if stored.context_window(0).text() != timeline.context_window(0).text() {
            found.push("the store has other text in the context window than the timeline".to_owned());
        }
        let window = self.context_window();
        if !self.conversation.is_new() && !window.is_empty() {
            let difference = self.model.model.verify_kv(self.conversation.kv_key(), &window)?;
            found.extend(difference.map(|difference| format!("KV cache: {difference}")));
        }
        let new = self.sync_index()?;
        if new > 0 {
            found.push(format!("{new} chunks were not in the search index"));
        }
        Ok(found)
    }

    pub fn publish(&self) {
        self.publisher.publish(|| self.state());
    }

    pub fn state(&self) -> ConversationState {
        let token_limit = self.token_limit();
        ConversationState {
            id: self.conversation.id().to_owned(),
            name: self.conversation.name().to_owned(),
            timeline: self.timeline().clone(),
            system_tokens: self.model.system_tokens.clone(),
            token_limit,
            budget_after_turn: self.token_budget().unwrap_or(usize::MAX).min(token_limit),
            model: self.model.info().clone(),
            max_brightness: self.rules.context.strategy.max_brightness(),
            rank: self.rules.context.policy.rank(),
            index: self.recall.shared_index(),
            search_options: self.rules.recall,
            recording: self.recorder.is_recording(),
            forms_memories: self.rules.active_memory_rules().is_some(),
            memories: self.memories.memories().to_vec(),
            placed_memories: self.memories.placed().to_vec(),
            forgetting: self.rules.forgetting,
        }
    }
}
