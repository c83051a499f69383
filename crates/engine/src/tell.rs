//! What was said elsewhere before a conversation came here, and the keys by which it is found again.

use crate::align::{self, SentMessage};
use crate::find;
use crate::frame;
use crate::session::Session;
use halo_core::change::{Change, Extent, Leave, WhyLeft};
use halo_core::prune::plan_prune;
use halo_core::seams::{Durability, Fault, Flow, Kind, SeamError};
use halo_core::token::{ChunkId, Role, TurnId, Voice};

impl Session {
    /// Appends messages that are not to be answered, in one commit; what does not fit the context window is pruned in the
    /// same commit. `go_on` is asked between messages and can stop it: then nothing was appended.
    ///
    /// # Errors
    /// When it was stopped, or a part fails. Nothing was appended then.
    pub fn tell(
        &mut self,
        messages: &[(Role, String)],
        go_on: &mut dyn FnMut() -> Flow,
    ) -> Result<(), SeamError> {
        self.check_held()?;
        let stopped =
            || SeamError::new("reading the history", "stopped; nothing was stored").by(Fault::Stopped);
        let mut draft = self.timeline.clone();
        let mut changes = Vec::with_capacity(messages.len() + 1);
        let mut before = self.said().next().map(|(_, role)| role);
        for (role, text) in messages.iter().filter(|(_, text)| !text.trim().is_empty()) {
            if go_on() == Flow::Stop {
                return Err(stopped());
            }
            let opening = self.frame.opening(*role, before, None);
            let framed = self.model.tokenize(&opening, true)?.into_iter().map(|piece| (piece, Voice::Frame));
            let said = self.model.tokenize(text, false)?.into_iter().map(|piece| (piece, Voice::Speaker));
            let append = frame::append(&draft, *role, framed.chain(said).collect(), &self.rules.context);
            let change = Change::Append(append);
            draft.apply(&change)?;
            changes.push(change);
            before = Some(*role);
        }
        if changes.is_empty() {
            return Ok(());
        }
        let budget = self.rules.budget().unwrap_or(usize::MAX).min(self.limit());
        let budget = budget.saturating_sub(self.standing());
        let plan = plan_prune(draft.view(self.prefix.len()), &self.rules.context.prune(budget, None));
        changes.extend(plan.change());
        if go_on() == Flow::Stop {
            return Err(stopped());
        }
        self.store.transact_all(&self.name, &mut self.timeline, &changes)?;
        self.began()?;
        self.key_messages()?;
        self.recall.follow(&mut *self.store, &self.timeline)?;
        self.timeline.release_dead();
        self.follow_memories();
        self.show();
        Ok(())
    }

    /// Prunes the system messages on the timeline that a client no longer sends: they stay there, and can come back.
    ///
    /// # Errors
    /// When the store fails.
    pub fn prune_system_messages(&mut self, still_sent: &[&str]) -> Result<(), SeamError> {
        let keys: Vec<u64> = still_sent
            .iter()
            .map(|text| align::message_key(TurnId(0), Role::System, text, 0).exact)
            .collect();
        let turns = self.timeline.live_chunks().map(|chunk| chunk.id());
        let mut turns: Vec<TurnId> = turns.filter(|id| id.role == Role::System).map(|id| id.turn).collect();
        turns.dedup();
        let mut leaves = Vec::new();
        for turn in turns {
            let text = self.text_of(turn)?;
            if keys.contains(&align::message_key(turn, Role::System, &text, 0).exact) {
                continue;
            }
            let live = self.timeline.turn_chunks(turn).filter(|chunk| chunk.is_live() && !chunk.is_pinned());
            leaves.extend(live.map(|chunk| Leave {
                chunk: chunk.id(),
                extent: Extent::Whole,
                why: WhyLeft::Client,
            }));
        }
        if !leaves.is_empty() {
            self.change(&Change::Prune(leaves), Durability::Behind)?;
        }
        Ok(())
    }

    /// Whether a chunk was pruned because a client no longer sends it: then it does not return by itself.
    pub(crate) fn is_left_out(&mut self, chunk: ChunkId) -> Result<bool, SeamError> {
        let history = self.store.history(&self.name, chunk)?;
        let last =
            history.iter().rev().flat_map(|entry| entry.change.parts()).find_map(|change| match change {
                Change::Prune(leaves) => {
                    leaves.iter().find(|l| l.chunk == chunk).map(|l| l.why == WhyLeft::Client)
                }
                Change::Resurrect(returns) => returns.iter().any(|r| r.chunk == chunk).then_some(false),
                _ => None,
            });
        Ok(last.unwrap_or(false))
    }

    /// Keeps messages that a client sent in the place of older turns: summaries, mostly. They are not on the timeline, which
    /// has what they stand for.
    ///
    /// # Errors
    /// When the store fails.
    pub fn keep_asides(&mut self, asides: &[&SentMessage]) -> Result<(), SeamError> {
        for aside in asides {
            let (key, role) = (format!("{:016x}", aside.key.exact), aside.role.name());
            let value = serde_json::json!({ "role": role, "text": aside.text }).to_string();
            self.store.put_record(&self.name, Kind::Aside, &key, Some(&value))?;
        }
        Ok(())
    }

    /// Writes the keys of messages that have none yet.
    ///
    /// # Errors
    /// When the store fails.
    pub(crate) fn key_messages(&mut self) -> Result<(), SeamError> {
        let is_new = |turn: TurnId| self.keyed.is_none_or(|keyed| turn > keyed);
        let new = self.timeline.turns().iter().rev().take_while(|turn| is_new(turn.id)).map(|turn| turn.id);
        let new: Vec<TurnId> = new.collect();
        let (Some(&newest), Some(&oldest)) = (new.first(), new.last()) else { return Ok(()) };
        let path = self.path_before(oldest)?;
        let keys = find::new_keys(&mut *self.store, &self.name, &mut self.timeline, self.keyed, path)?;
        self.store.put_message_keys(&self.name, &keys)?;
        self.keyed = Some(newest);
        Ok(())
    }

    /// Writes the key of an answer as the client has it, where that is not what was generated: stop sequences are cut off.
    ///
    /// # Errors
    /// When the store fails.
    pub fn key_answer(&mut self, turn: TurnId, text: &str) -> Result<(), SeamError> {
        if text.trim().is_empty() {
            return Ok(());
        }
        let key = align::message_key(turn, Role::Assistant, text, self.path_before(turn)?);
        self.store.put_message_keys(&self.name, &[key])
    }

    /// The hash of the path that a turn goes on from: that of the last turn before it that stands.
    fn path_before(&mut self, turn: TurnId) -> Result<u64, SeamError> {
        let Some(before) = self.said().map(|(turn, _)| turn).find(|&t| t < turn) else { return Ok(0) };
        let recent = self.store.message_keys(&self.name, RECENT)?;
        Ok(recent.iter().find(|key| key.turn == before).map_or(0, |key| key.prefix))
    }
}

/// Message keys that are read to find where a path goes on: more than were ever set aside in a row.
const RECENT: usize = 256;
