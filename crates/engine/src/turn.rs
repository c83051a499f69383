//! One turn: a message in, an answer out. Chunks that matter to the message are resurrected once, before the answer; the
//! dimmest chunks are pruned once, after it. Every event is announced after what it tells of is stored.

use crate::answer_edit::{last_answers, take_answer_to_continue};
use crate::answer_stream::pruned_events;
use crate::call_format::normalize_calls;
use crate::chat_format::{self, MessageTime};
use crate::client_history::{is_pruned_for_good, store_message_keys};
use crate::conversation::RUNNING_TURN_KEY;
use crate::event::{ChangeAction, Event, TurnStage, TurnSummary};
use crate::generation::{AnswerGenerator, GeneratedAnswer};
use crate::parts::{AnswerBegin, SessionParts};
use crate::reasoning::prune_reasoning;
use crate::rules::ResurrectBrightness;
pub use crate::turn_progress::TurnCallback;
use crate::turn_progress::TurnProgress;
use crate::turn_record::TurnRecord;
use crate::variant::move_to_variant;
use halo_core::Error;
use halo_core::budget::TurnBudget;
use halo_core::change::{AttentionTally, Change, DeleteReason};
use halo_core::model::{FinishReason, ModelToken, StepFlow};
use halo_core::prune::PrunePlan;
use halo_core::resurrect::{Hit, ResurrectedBrightness, plan_resurrection};
use halo_core::scorer::Scorer;
use halo_core::store::{Durability, RecordKind};
use halo_core::token::{ChunkId, ContentKind, Role, TurnId};
use jiff::civil::{Date, DateTime};
use std::time::Instant;

/// The input of a turn: what is to be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnInput {
    Message(String),
    /// A message of a client that keeps its own history. Nothing is written into it that the client did not send: no date.
    ClientMessage(String),
    /// Nothing new: the last message is answered as it is.
    AnswerLast,
    /// The last message again: its answer becomes a variant.
    Regenerate(EditAuthor),
    /// The last answer goes on: its continuation begins with its text, and it becomes a variant.
    ContinueLast,
    /// Another message instead of the last one, which becomes a variant together with its answer.
    EditLast(String, EditAuthor),
}

/// Who wrote or edited a message, or regenerated an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EditAuthor {
    /// A person, on the page or in the terminal.
    User,
    /// A client that keeps its own history.
    Client,
}

/// Readers are told that the last exchange was deleted, because another one takes its place.
const REPLACED: Event = Event::Changed { action: ChangeAction::Replaced, chunks: Vec::new() };

/// Vectors that are computed at the end of a turn. Where more are missing, as after an import, later turns compute them.
const MAX_EMBEDS_PER_TURN: usize = 64;

/// The same on a server, where others wait for the model; idle time computes the rest.
const MAX_EMBEDS_PER_HOSTED_TURN: usize = 8;

/// Hits below the relevance floor that the record of a turn names.
const MAX_BELOW_FLOOR: usize = 8;

/// The message that a turn answers.
struct AnsweredMessage {
    text: String,
    /// Whether it came with this turn.
    is_new: bool,
}

/// Runs one turn, and counts what happens in it.
pub(crate) struct TurnRunner<'a> {
    parts: &'a mut SessionParts,
    progress: TurnProgress<'a>,
}

impl<'a> TurnRunner<'a> {
    pub fn new(parts: &'a mut SessionParts, callback: &'a mut TurnCallback<'a>) -> Self {
        Self { parts, progress: TurnProgress::new(callback) }
    }

    /// Message → resurrect → generate → prune.
    pub fn run_turn(mut self, input: TurnInput, now: DateTime) -> Result<TurnSummary, Error> {
        let message = self.accept_input(input, now)?;
        let mut preview = String::new();
        if message.is_new {
            self.check_premise(&message.text);
            preview =
                self.time_stage(TurnStage::Preview, |turn| turn.generator().preview_answer(&message.text))?;
        }
        self.time_stage(TurnStage::Recall, |turn| {
            turn.resurrect_relevant(&message.text, &preview, now.date())?;
            // The message is searched for before it is in the index, so that it does not find itself, and is in the index
            // before it is answered. Its vector follows with its answer, which it is embedded with.
            turn.parts.sync_index()
        })?;
        let tallies = self.resurrected_tallies();
        let mut answer = self.generator().generate_answer()?;
        if answer.finish.is_ok()
            && answer.reasoning_end.is_none()
            && let Some(turn) = normalize_calls(self.parts, answer.turn)?
        {
            answer.turn = turn;
            self.progress.announce(REPLACED);
        }
        self.progress.resurrected_attention = self.attention_since(&tallies);
        if let Some((tokens, duration)) = answer.prefill {
            self.parts.record_prefill(tokens, duration)?;
        }
        let exceeded = self.time_stage(TurnStage::Prune, |turn| {
            if let Some(last) = answer.reasoning_end.filter(|_| !turn.parts.rules.keep_reasoning) {
                prune_reasoning(turn.parts, &mut turn.progress, answer.turn, last)?;
            }
            turn.prune_to_budget(answer.turn)
        })?;
        if let Some(exceeded) = exceeded {
            self.progress.announce(Event::BudgetExceeded(exceeded));
        }
        self.time_stage(TurnStage::Index, Self::update_index)?;
        store_message_keys(&mut self.parts.conversation)?;
        self.time_stage(TurnStage::PersistKv, |turn| turn.parts.sync_kv_cache())?;
        self.finish(answer)
    }

    /// Stores a new message, or finds the one that is to be answered. A regenerated answer or an edited message becomes a
    /// variant.
    fn accept_input(&mut self, input: TurnInput, now: DateTime) -> Result<AnsweredMessage, Error> {
        let (text, author) = match input {
            TurnInput::Message(text) => (text, EditAuthor::User),
            TurnInput::ClientMessage(text) => (text, EditAuthor::Client),
            TurnInput::EditLast(text, author) => {
                check_not_empty(&text)?;
                // A refused message must not replace the last one.
                self.check_message_fits(&text)?;
                retract_last_message(self.parts, author)?;
                self.progress.announce(REPLACED);
                (text, author)
            }
            TurnInput::Regenerate(author) => {
                self.retract_last_answer(author)?;
                return self.find_last_message();
            }
            TurnInput::ContinueLast => {
                let text = take_answer_to_continue(self.parts)?;
                self.progress.announce(REPLACED);
                self.parts.next_answer = AnswerBegin { text, skip_reasoning: false, is_announced: true };
                return self.find_last_message();
            }
            TurnInput::AnswerLast => return self.find_last_message(),
        };
        check_not_empty(&text)?;
        self.append_user_message(&text, author, now)?;
        Ok(AnsweredMessage { text, is_new: true })
    }

    fn append_user_message(&mut self, text: &str, author: EditAuthor, now: DateTime) -> Result<(), Error> {
        let time = match author {
            EditAuthor::User => Some(MessageTime::new(now, self.parts.last_user_day)),
            EditAuthor::Client => None,
        };
        let before = self.last_turn().map(|(_, role)| role);
        let tokens = self.parts.model.tokenize_message(Role::User, text, before, time)?;
        self.prune_to_fit(tokens.len())?;
        self.time_stage(TurnStage::Store, |turn| turn.append_message(Role::User, tokens))?;
        // A date that was not written must be written with the next message of the day.
        self.parts.last_user_day = time.map(|_| now.date()).or(self.parts.last_user_day);
        Ok(())
    }

    /// The message is on the timeline and on disk before it is announced.
    fn append_message(&mut self, role: Role, tokens: Vec<(ModelToken, ContentKind)>) -> Result<(), Error> {
        let parts = &mut *self.parts;
        let append = chat_format::plan_append(parts.timeline(), role, tokens, &parts.rules.context);
        let (turn, tokens) = (append.turn, append.tokens.len());
        parts.stage_message_records();
        #[cfg(feature = "testing")]
        if parts.announces_before_commit {
            self.progress.announce(Event::MessageStored { turn, role, tokens });
            return parts.commit(&Change::Append(append), Durability::Immediate).map(drop);
        }
        parts.commit(&Change::Append(append), Durability::Immediate)?;
        self.progress.announce(Event::MessageStored { turn, role, tokens });
        Ok(())
    }

    fn retract_last_answer(&mut self, author: EditAuthor) -> Result<(), Error> {
        let answers = last_answers(self.parts, "regenerating the answer")?;
        if !answers.is_empty() {
            let reason = match author {
                EditAuthor::User => DeleteReason::UserRegenerated,
                EditAuthor::Client => DeleteReason::ClientRegenerated,
            };
            move_to_variant(self.parts, &answers, reason)?;
            self.progress.announce(REPLACED);
        }
        Ok(())
    }

    fn find_last_message(&mut self) -> Result<AnsweredMessage, Error> {
        let conversation = &mut self.parts.conversation;
        let last = conversation.turns_latest_first().find(|(_, role)| *role == Role::User);
        let text = last.map(|(turn, _)| conversation.turn_text(turn)).transpose()?.unwrap_or_default();
        self.prune_to_fit(0)?;
        Ok(AnsweredMessage { text, is_new: false })
    }

    fn last_turn(&self) -> Option<(TurnId, Role)> {
        self.parts.conversation.turns_latest_first().next()
    }

    /// Whether a message fits into the context at all, with the system prompt and its answer.
    fn check_message_fits(&mut self, text: &str) -> Result<(), Error> {
        let model = &mut self.parts.model;
        let message = model.tokenize_message(Role::User, text, None, None)?.len();
        let header = model.answer_header_tokens()?.len();
        let (context, system) = (model.info().context, model.system_tokens.len());
        let answer = self.parts.rules.answer_reserve(self.parts.rules.turn_limit(context, system));
        let needed = system + message + header + answer;
        if needed > context {
            let message = format!(
                "context length exceeded: {needed} tokens do not fit in {context}: {} of the message, {system} of the system \
                 prompt, and up to {answer} of the answer; shorten the message or raise model.context",
                message + header
            );
            return Err(Error::context_length_exceeded("editing the last message", message));
        }
        Ok(())
    }

    /// What the resurrected chunks have received so far.
    fn resurrected_tallies(&self) -> Vec<AttentionTally> {
        let timeline = self.parts.timeline();
        let tally = |id: &ChunkId| timeline.chunk(*id).map(|chunk| chunk.tally()).unwrap_or_default();
        self.progress.resurrected.iter().map(tally).collect()
    }

    /// What they have received since, per token and step, in ‰.
    fn attention_since(&self, before: &[AttentionTally]) -> Vec<Option<f64>> {
        let received = |(now, before): (AttentionTally, &AttentionTally)| {
            let since = AttentionTally {
                votes: 0,
                mass: now.mass.saturating_sub(before.mass),
                exposures: now.exposures.saturating_sub(before.exposures),
            };
            since.share().map(|share| share * 1e3)
        };
        self.resurrected_tallies().into_iter().zip(before).map(received).collect()
    }

    /// Prunes early where a message of that many tokens and its answer do not fit: to the budget that holds at the end of a
    /// turn, so that there is room for chunks to be resurrected.
    fn prune_to_fit(&mut self, message_tokens: usize) -> Result<(), Error> {
        let header_tokens = self.parts.model.answer_header_tokens()?.len();
        let parts = &*self.parts;
        let (context, system_tokens) = (parts.model.info().context, parts.model.system_tokens.len());
        let limit = parts.rules.turn_limit(context, system_tokens);
        let answer_tokens = parts.rules.answer_reserve(limit);
        let needed = message_tokens + header_tokens + answer_tokens;
        if parts.live_tokens() + needed <= limit {
            return Ok(());
        }
        let budget = parts.token_budget();
        let budget = budget.map_or(limit, |budget| budget.saturating_sub(message_tokens + header_tokens));
        let plan = parts.prune_plan(parts.timeline(), limit.saturating_sub(needed).min(budget), None);
        if plan.after + parts.memories.placed_tokens() + needed > context {
            let (message, system) = (message_tokens + header_tokens, parts.model.system_tokens.len());
            let fixed = plan.after.saturating_sub(system);
            // The advice names what is too long: another message does not help where the system prompt fills the context.
            let too_long = if system > context / 2 { "system prompt" } else { "message" };
            let message = format!(
                "context length exceeded: {} tokens do not fit in {context}: {message} of the message, {system} of the system \
                 prompt, {fixed} that cannot be pruned, and up to {answer_tokens} of the answer; shorten the {too_long} or \
                 raise model.context",
                message + plan.after + answer_tokens
            );
            return Err(Error::context_length_exceeded("making room for the message", message));
        }
        self.apply_prune(&plan)
    }

    /// Announces a premise of the message that the conversation contradicts. This only advises: an error is a notice.
    fn check_premise(&mut self, message: &str) {
        let SessionParts { premises, conversation, recall, model, .. } = &mut *self.parts;
        let Some(method) = premises.method else { return };
        let result = match premises.check(message, method, conversation, recall, model) {
            Ok(result) => result,
            Err(error) => {
                let notice = format!("the premises of the message were not checked: {error}");
                return self.progress.announce(Event::Notice(notice));
            }
        };
        if let (Some(premise), Some(reason), Some(suggestion)) =
            (result.invalid_premise, result.reason, result.suggestion)
        {
            let principle = result.principle;
            let judged = principle.map_or_else(String::new, |principle| format!(", judged by {principle}"));
            self.progress.false_premise = Some(format!("“{premise}”: {reason}{judged}"));
            self.progress.announce(Event::FalsePremise { premise, reason, principle, suggestion });
        }
    }

    /// Resurrects the pruned chunks that matter to a message, as far as they fit.
    fn resurrect_relevant(&mut self, message: &str, preview: &str, today: Date) -> Result<(), Error> {
        let header_tokens = self.parts.model.answer_header_tokens()?.len();
        let parts = &mut *self.parts;
        let (context, system_tokens) = (parts.model.info().context, parts.model.system_tokens.len());
        let limit = parts.rules.resurrection_limit(context, system_tokens);
        let budget = TurnBudget {
            model_context: context,
            max_context: limit,
            live: parts.live_tokens(),
            // The message is live already; the header of its answer is not.
            message: header_tokens,
            answer: parts.rules.answer_reserve(limit),
        };
        if budget.for_resurrection() == 0 || parts.timeline().live_len() == parts.timeline().len() {
            return Ok(());
        }
        let query = if preview.is_empty() { message.to_owned() } else { format!("{message}\n{preview}") };
        let (hits, below_floor) = find_hits(parts, &query, today)?;
        self.progress.below_floor = below_floor;
        let parts = &mut *self.parts;
        let max = parts.rules.context.strategy.max_brightness();
        let brightness = match parts.rules.resurrect_brightness {
            ResurrectBrightness::Previous => ResurrectedBrightness::Earned,
            ResurrectBrightness::Max => ResurrectedBrightness::Fixed(max),
            ResurrectBrightness::Mean => {
                let window = parts.timeline().context_window(parts.model.system_tokens.len());
                let running = parts.timeline().turns().last().map(|turn| turn.id);
                ResurrectedBrightness::Fixed(window.mean_brightness(running).unwrap_or(max))
            }
        };
        let plan = plan_resurrection(parts.timeline(), &hits, budget.for_resurrection(), brightness);
        let Some(change) = plan.change() else { return Ok(()) };
        let tokens = |chunk: ChunkId| parts.timeline().chunk(chunk).map_or(0, |chunk| chunk.pruned_len());
        let events: Vec<Event> = (plan.resurrected.iter())
            .map(|r| Event::Resurrected {
                chunk: r.chunk,
                tokens: tokens(r.chunk),
                reason: r.reason.to_string(),
            })
            .collect();
        parts.commit(&change, Durability::Deferred)?;
        self.progress.resurrected.extend(plan.resurrected.iter().map(|r| r.chunk));
        events.into_iter().for_each(|event| self.progress.announce(event));
        Ok(())
    }

    fn generator(&mut self) -> AnswerGenerator<'_, 'a> {
        AnswerGenerator { parts: self.parts, progress: &mut self.progress }
    }

    /// Prunes to the budget that holds after a turn. Returns why the window exceeds it, where nothing more can be pruned.
    fn prune_to_budget(&mut self, current: TurnId) -> Result<Option<String>, Error> {
        let Some(budget) = self.parts.token_budget() else {
            self.cull_to_target()?;
            return Ok(None);
        };
        let plan = self.parts.prune_plan(self.parts.timeline(), budget, Some(current));
        self.apply_prune(&plan)?;
        Ok(plan.exceeded.map(|exceeded| exceeded.to_string()))
    }

    /// TTL scoring culls two tokens per step; a message longer than twice its answer leaves more than the target.
    fn cull_to_target(&mut self) -> Result<(), Error> {
        let parts = &mut *self.parts;
        let system_len = parts.model.system_tokens.len();
        let (timeline, rules) = (parts.conversation.timeline(), &parts.rules.context);
        let mut scorer = Scorer::new(rules.strategy.clone(), timeline.context_window(system_len), None);
        let may_cull = |position| rules.may_cull(timeline, system_len, position);
        let Some(culled) = scorer.cull_to_target(may_cull) else { return Ok(()) };
        parts.commit(&culled, Durability::Immediate)?;
        let events = pruned_events(&culled);
        self.progress.pruned += events.len();
        events.into_iter().for_each(|event| self.progress.announce(event));
        Ok(())
    }

    fn apply_prune(&mut self, plan: &PrunePlan) -> Result<(), Error> {
        let timeline = self.parts.timeline();
        let tokens = |chunk: ChunkId| timeline.chunk(chunk).map_or(0, |chunk| chunk.live_len());
        let events: Vec<Event> = (plan.pruned.iter())
            .map(|p| Event::Pruned { chunk: p.chunk, tokens: tokens(p.chunk), reason: p.reason.to_string() })
            .collect();
        if let Some(change) = plan.change() {
            self.parts.commit(&change, Durability::Immediate)?;
        }
        self.progress.pruned += events.len();
        events.into_iter().for_each(|event| self.progress.announce(event));
        Ok(())
    }

    /// Adds new chunks to the search index, and computes some of the vectors that are missing.
    fn update_index(&mut self) -> Result<(), Error> {
        let parts = &mut *self.parts;
        parts.sync_index()?;
        let hosted = parts.publisher.is_attached();
        let max = if hosted { MAX_EMBEDS_PER_HOSTED_TURN } else { MAX_EMBEDS_PER_TURN };
        let count = parts.recall.index().missing_vectors().min(max);
        let (store, timeline) = parts.conversation.store_and_timeline();
        parts.recall.embed_pending(store, timeline, count, &mut |_| StepFlow::Continue)?;
        parts.conversation.unload_pruned();
        parts.publish();
        Ok(())
    }

    /// Records how the turn went and announces its end. Returns the model's error, if it failed.
    fn finish(mut self, answer: GeneratedAnswer) -> Result<TurnSummary, Error> {
        let GeneratedAnswer { turn, tokens, finish, .. } = answer;
        let summary = TurnSummary {
            turn,
            finish: *finish.as_ref().unwrap_or(&FinishReason::Cancelled),
            tokens,
            resurrected: self.progress.resurrected.len(),
            resurrected_chunks: std::mem::take(&mut self.progress.resurrected),
            resurrected_attention: std::mem::take(&mut self.progress.resurrected_attention),
            pruned: self.progress.pruned,
            cooled_messages: self.progress.cooled_messages,
            live_tokens: self.parts.live_tokens(),
            token_limit: self.parts.token_limit(),
            stages: std::mem::take(&mut self.progress.stages),
            traces: std::mem::take(&mut self.progress.traces),
            below_floor: std::mem::take(&mut self.progress.below_floor),
        };
        self.store_turn_record(&summary, finish.as_ref().err())?;
        self.parts.memories.mark_answered(turn);
        if cfg!(debug_assertions)
            && let Ok(found) = self.parts.find_inconsistencies()
        {
            assert_eq!(found, Vec::<String>::new(), "after turn {}", turn.0);
        }
        finish?;
        self.progress.announce(Event::Done(summary.clone()));
        Ok(summary)
    }

    fn store_turn_record(&mut self, summary: &TurnSummary, error: Option<&Error>) -> Result<(), Error> {
        let record = TurnRecord::new(summary, error, self.progress.false_premise.clone());
        let conversation = &mut self.parts.conversation;
        let turn = summary.turn.0.to_string();
        conversation.put_record(RecordKind::Turn, &turn, Some(&record.to_json()))?;
        conversation.put_setting(RUNNING_TURN_KEY, None)
    }

    fn time_stage<T>(
        &mut self,
        stage: TurnStage,
        work: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let start = Instant::now();
        let result = work(self)?;
        self.progress.record_stage(stage, start.elapsed());
        Ok(result)
    }
}

/// The user's last message and its answer become a variant. Returns the text of the message, to be edited.
pub(crate) fn retract_last_message(parts: &mut SessionParts, author: EditAuthor) -> Result<String, Error> {
    let last = parts.conversation.turns_latest_first().find(|(_, role)| *role == Role::User);
    let (message, _) = last.ok_or_else(|| Error::conflict("editing the last message", "there is none"))?;
    let text = parts.conversation.turn_text(message)?;
    let turns = parts.conversation.turns_latest_first().map(|(turn, _)| turn);
    let replaced: Vec<TurnId> = turns.take_while(|&turn| turn >= message).collect();
    let reason = match author {
        EditAuthor::User => DeleteReason::UserEdited,
        EditAuthor::Client => DeleteReason::ClientEdited,
    };
    move_to_variant(parts, &replaced, reason)?;
    Ok(text)
}

/// The hits of a search for chunks to resurrect, without reasoning and without those that a client no longer sends. Then
/// the best hits that are pruned and stay so, because their relevance is below the floor.
fn find_hits(parts: &mut SessionParts, query: &str, today: Date) -> Result<(Vec<Hit>, Vec<Hit>), Error> {
    let options = parts.rules.recall;
    let found = parts.recall.search(query, Some(today), options)?;
    let hits_where = |is_relevant: bool| -> Vec<Hit> {
        found
            .iter()
            .filter(|found| options.is_relevant(found) == is_relevant)
            .map(|found| found.hit)
            .collect()
    };
    let (mut hits, rest) = (hits_where(true), hits_where(false));
    let is_pruned = |hit: &Hit| parts.timeline().chunk(hit.chunk).is_some_and(|chunk| chunk.pruned_len() > 0);
    let below_floor = rest.into_iter().filter(|hit| hit.score > 0.0 && is_pruned(hit));
    let below_floor: Vec<Hit> = below_floor.take(MAX_BELOW_FLOOR).collect();
    let reasons = parts.model.format.template.reasoning.is_some();
    let may_stay = |chunk: &ChunkId| match chunk.role {
        Role::System => true,
        Role::Assistant => reasons && !chunk.is_anchor(),
        Role::User | Role::Tool => false,
    };
    let candidates: Vec<ChunkId> = hits.iter().map(|hit| hit.chunk).filter(may_stay).collect();
    for chunk in candidates {
        if is_pruned_for_good(&mut parts.conversation, chunk)? {
            hits.retain(|hit| hit.chunk != chunk);
        }
    }
    Ok((hits, below_floor))
}

fn check_not_empty(message: &str) -> Result<(), Error> {
    if message.trim().is_empty() {
        return Err(Error::invalid_input("reading the message", "the message is empty"));
    }
    Ok(())
}
