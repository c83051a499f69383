//! Runs a world: an agent whose heartbeat is due is shown its HUD, its model answers, and the answer is applied. The world
//! can be read and changed meanwhile: its lock is not held while a model generates. Agents whose heartbeats fall together
//! think at the same time, as far as their models generate several answers at once.

use crate::action::ActionContext;
use crate::agent_model::{AgentGeneration, AgentModel, HeartbeatPrompt};
use crate::answer::{AgentAnswer, AnswerOutcome, schema};
use crate::error;
use crate::format::{AnswerFormat, HudFormat};
use crate::heartbeat::{HeartbeatJitter, Millis};
use crate::hud_renderer::{HudError, HudRenderer, HudRequest, RenderedHud};
use crate::prompts::WorldPrompts;
use crate::telemetry::HudMeasurement;
use crate::user_command::UserCommand;
use crate::world::{AgentId, AgentState, ParagraphSplit, RoomId, RoomMessage, WorldChanges};
use crate::world_store::{WorldStore, agent_kv_key};
use halo_core::Error;
use halo_core::model::{OutputConstraint, StepFlow};
use halo_engine::scheduler::{IdlePermit, ModelScheduler};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Returns the wall clock time in milliseconds since 1970.
pub type WallClock = Box<dyn Fn() -> Millis + Send + Sync>;

pub struct WorldRunner {
    store: Mutex<WorldStore>,
    /// The idle handles to each model.
    models: Mutex<BTreeMap<String, Vec<AgentModel>>>,
    /// The models that several agents can use at the same time.
    shared_models: BTreeSet<String>,
    /// The agents whose models are generating, in the order in which they began.
    thinking: Mutex<Vec<AgentId>>,
    /// Heartbeats that ended together with one that was returned.
    finished: Mutex<VecDeque<HeartbeatReport>>,
    /// The renderer and the HUD token limit of each model, outside the lock of `models`: a HUD can be rendered while a
    /// model generates.
    renderers: BTreeMap<String, (Arc<HudRenderer>, usize)>,
    prompts: WorldPrompts,
    options: RunnerOptions,
    wall_clock: WallClock,
    world_clock: Mutex<WorldClock>,
    /// Why posted commands were refused.
    refusals: Mutex<Vec<String>>,
    wakeup: Condvar,
    group_limit: AtomicUsize,
    stopping: AtomicBool,
    thinking_listener: OnceLock<ThinkingListener>,
    heartbeat_listener: OnceLock<HeartbeatListener>,
}

/// How agents are paced, and what is recorded of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunnerOptions {
    pub jitter: HeartbeatJitter,
    pub split: ParagraphSplit,
    /// Heartbeats of each agent whose tokens stay stored; 0: none.
    pub recorded_heartbeats: u64,
}

/// How world time runs relative to the wall clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorldClock {
    /// World time stands still, and heartbeats run only by [`WorldRunner::step`].
    pub paused: bool,
    /// Heartbeats to run although the world is paused.
    pub steps: usize,
    pub speed: f64,
    /// A wall clock time and the world time at that moment.
    anchor: (Millis, Millis),
    /// The agent whose model is generating; of several, the one that began last.
    pub thinking_agent: Option<AgentId>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct HeartbeatReport {
    pub agent: AgentId,
    pub finished_at: Millis,
    /// None if the model was not asked or failed.
    pub generation: Option<AgentGeneration>,
    pub outcome: Result<AnswerOutcome, error::Error>,
    /// Whether the answer had to be repaired before it could be parsed.
    pub repaired: bool,
    pub changes: WorldChanges,
}

#[derive(Debug)]
pub enum RunnerStep {
    Heartbeat(Box<HeartbeatReport>),
    /// A draft was delivered, or a posted command executed.
    Changed(Box<WorldChanges>),
    /// Nothing is due for this long.
    Wait(Duration),
    /// The heartbeat was skipped: a turn of a conversation needed the model, the agent was retired, or the runner stops.
    Skipped,
}

/// The longest wait between two looks for posted commands.
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(300);

/// The wait for a model that a conversation uses.
const MODEL_BUSY_RETRY: Duration = Duration::from_millis(50);

/// Hears which agent begins to think.
pub type ThinkingListener = Box<dyn Fn(AgentId) + Send + Sync>;

/// Hears of a heartbeat when it has ended, also while other agents still think.
pub type HeartbeatListener = Box<dyn Fn(&HeartbeatReport) + Send + Sync>;

/// A handle to a model while an agent uses it.
struct HeldModel<'a> {
    runner: &'a WorldRunner,
    name: String,
    model: Option<AgentModel>,
}

impl Drop for HeldModel<'_> {
    fn drop(&mut self) {
        if let Some(model) = self.model.take() {
            self.runner.models.lock().entry(std::mem::take(&mut self.name)).or_default().push(model);
        }
    }
}

impl WorldRunner {
    /// `models` are the models of the agents by name.
    #[must_use]
    pub fn new(
        store: WorldStore,
        models: BTreeMap<String, AgentModel>,
        (prompts, options): (WorldPrompts, RunnerOptions),
        wall_clock: WallClock,
    ) -> Self {
        let now = wall_clock();
        let anchor = (now, store.world.header.clock.max(now));
        let world_clock = WorldClock { paused: false, steps: 0, speed: 1.0, anchor, thinking_agent: None };
        let renderers = models
            .iter()
            .map(|(name, model)| (name.clone(), (Arc::clone(&model.renderer), model.hud_token_limit())))
            .collect();
        let models: BTreeMap<String, Vec<AgentModel>> =
            models.into_iter().map(|(name, model)| (name, model.into_handles())).collect();
        let shared = models.iter().filter(|(_, handles)| handles.len() > 1);
        Self {
            store: Mutex::new(store),
            shared_models: shared.map(|(name, _)| name.clone()).collect(),
            models: Mutex::new(models),
            thinking: Mutex::default(),
            finished: Mutex::default(),
            renderers,
            prompts,
            options,
            wall_clock,
            world_clock: Mutex::new(world_clock),
            refusals: Mutex::default(),
            wakeup: Condvar::new(),
            group_limit: AtomicUsize::new(usize::MAX),
            stopping: AtomicBool::new(false),
            thinking_listener: OnceLock::new(),
            heartbeat_listener: OnceLock::new(),
        }
    }

    /// `listener` hears which agent begins to think. It must not block; later calls have no effect.
    pub fn set_thinking_listener(&self, listener: ThinkingListener) {
        let _ = self.thinking_listener.set(listener);
    }

    /// `listener` hears of each heartbeat that has ended. It must not block; later calls have no effect.
    pub fn set_heartbeat_listener(&self, listener: HeartbeatListener) {
        let _ = self.heartbeat_listener.set(listener);
    }

    fn announce(&self, step: &RunnerStep) {
        if let (RunnerStep::Heartbeat(report), Some(listener)) = (step, self.heartbeat_listener.get()) {
            listener(report);
        }
    }

    pub fn store(&self) -> MutexGuard<'_, WorldStore> {
        self.store.lock()
    }

    #[must_use]
    pub fn world_clock(&self) -> WorldClock {
        *self.world_clock.lock()
    }

    /// The current world time.
    #[must_use]
    pub fn now(&self) -> Millis {
        self.world_time(&self.world_clock())
    }

    fn world_time(&self, clock: &WorldClock) -> Millis {
        let (wall, world) = clock.anchor;
        let elapsed = (self.wall_clock)().saturating_sub(wall).max(0);
        let speed = if clock.paused { 0.0 } else { clock.speed };
        world + (elapsed as f64 * speed) as Millis
    }

    /// Sets world time to `at`.
    fn set_anchor(&self, clock: &mut WorldClock, at: Millis) {
        clock.anchor = ((self.wall_clock)(), at);
    }

    /// Stops world time or lets it run on. No heartbeat is missed: heartbeats are due in world time.
    pub fn set_paused(&self, paused: bool) {
        let mut clock = self.world_clock.lock();
        let now = self.world_time(&clock);
        self.set_anchor(&mut clock, now);
        (clock.paused, clock.steps) = (paused, 0);
        self.wakeup.notify_all();
    }

    /// Runs one heartbeat, whichever is next. World time jumps to it.
    pub fn step(&self) {
        self.world_clock.lock().steps += 1;
        self.wakeup.notify_all();
    }

    /// Sets the speed of world time, between 0.1 and 100.
    pub fn set_speed(&self, speed: f64) {
        let mut clock = self.world_clock.lock();
        let now = self.world_time(&clock);
        self.set_anchor(&mut clock, now);
        clock.speed = speed.clamp(0.1, 100.0);
        self.wakeup.notify_all();
    }

    /// Whether the world is paused, no step is pending and no model is generating.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let clock = self.world_clock();
        let finished = self.finished.lock().is_empty();
        clock.paused && clock.steps == 0 && clock.thinking_agent.is_none() && finished
    }

    /// Cancels a running generation and ends [`WorldRunner::wait`].
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.wakeup.notify_all();
    }

    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    pub fn execute_command(&self, command: UserCommand) -> Result<WorldChanges, Error> {
        let mut store = self.store();
        let now = store.world.advance_clock(self.now());
        let result = store.world.execute_command(command, now);
        let changes = self.save_changes(&mut store)?;
        drop(store);
        self.wakeup.notify_all();
        result.map(|()| changes).map_err(|error| error.in_operation("executing the command"))
    }

    /// A world that another process has taken over is not run any further: its state here is old. It must be opened again.
    fn end_if_lease_lost<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        if result.as_ref().is_err_and(Error::is_lease_lost) {
            self.stop();
        }
        result
    }

    /// Saves all changes and returns them.
    fn save_changes(&self, store: &mut WorldStore) -> Result<WorldChanges, Error> {
        let changes = store.world.unsaved_changes().clone();
        self.end_if_lease_lost(store.save())?;
        self.prerender_messages(store, &changes);
        Ok(changes)
    }

    /// Renders new messages once for each format in which a member reads them.
    fn prerender_messages(&self, store: &WorldStore, changes: &WorldChanges) {
        for message in changes.messages.values() {
            for (model, format) in store.world.room_formats(message.room) {
                if let Some((renderer, _)) = self.renderers.get(model) {
                    renderer.prerender_message(message, format);
                }
            }
        }
    }

    /// The HUD of an agent now, in its own format or another.
    pub fn render_hud(&self, agent: AgentId, format: Option<HudFormat>) -> Result<RenderedHud, Error> {
        let now = self.now();
        self.render_hud_at(&mut self.store(), agent, format, now)
            .map_err(|error| error.in_operation(format!("rendering the HUD of agent {agent}")))
    }

    fn render_hud_at(
        &self,
        store: &mut WorldStore,
        agent: AgentId,
        format: Option<HudFormat>,
        now: Millis,
    ) -> Result<RenderedHud, error::Error> {
        let state = store.world.agent(agent).ok_or(HudError::UnknownAgent(agent))?;
        let (renderer, token_limit) =
            self.renderers.get(&state.model).ok_or_else(|| unknown_model(&state.model))?;
        let rooms: Vec<RoomId> = store.world.rooms_of(agent).map(|room| room.id).collect();
        let messages: BTreeMap<RoomId, Vec<RoomMessage>> =
            rooms.into_iter().map(|room| (room, store.recall_messages(room))).collect();
        let recalled = |room: RoomId| messages.get(&room).cloned().unwrap_or_default();
        let request =
            HudRequest { now, prompts: &self.prompts, token_limit: *token_limit, recalled: &recalled };
        let state = store.world.agent(agent).ok_or(HudError::UnknownAgent(agent))?;
        let format = format.unwrap_or(state.hud_format);
        Ok(renderer.render_as(&store.world, state, format, &request)?)
    }

    /// Does what is due next: drafts and posted commands, then the heartbeats that are due, of which each is one step. A
    /// heartbeat runs only while no conversation needs the model of `scheduler`.
    pub fn run_next(&self, scheduler: Option<&ModelScheduler>) -> Result<RunnerStep, Error> {
        if let Some(report) = self.finished.lock().pop_front() {
            return Ok(RunnerStep::Heartbeat(Box::new(report)));
        }
        let now = self.now();
        if let Some(changes) = self.apply_pending_at(now)? {
            return Ok(RunnerStep::Changed(Box::new(changes)));
        }
        let (heartbeat, draft_due) = {
            let store = self.store();
            (store.world.next_heartbeat(), store.world.next_draft_due())
        };
        let mut clock = self.world_clock.lock();
        if heartbeat.is_none() {
            // A step is not saved up for an agent that comes later.
            clock.steps = 0;
        }
        match heartbeat {
            Some((agent, at)) if clock.steps > 0 || (!clock.paused && at <= now) => {
                let is_step = clock.steps > 0;
                if at > now {
                    self.set_anchor(&mut clock, at);
                }
                drop(clock);
                let group = if is_step { Vec::new() } else { self.due_group(now) };
                // An agent that cannot think with others has its turn too.
                if group.len() > 1 && group.first() == Some(&agent) {
                    return self.run_heartbeats(&group, scheduler);
                }
                // World time has jumped: drafts that are due by then come before the heartbeat.
                if at > now
                    && let Some(changes) = self.apply_pending_at(at)?
                {
                    return Ok(RunnerStep::Changed(Box::new(changes)));
                }
                let step = self.run_heartbeat(agent, scheduler)?;
                // A heartbeat that was preempted is tried again and keeps its step.
                if matches!(step, RunnerStep::Heartbeat(_)) {
                    self.finish_step(agent);
                }
                self.announce(&step);
                Ok(step)
            }
            _ => {
                let heartbeat_due = heartbeat.filter(|_| !clock.paused).map(|(_, at)| at);
                let next = [draft_due, heartbeat_due].into_iter().flatten().min();
                let wait = next.map_or(Millis::MAX, |at| (at - now).max(1));
                let wait = Duration::from_millis((wait as f64 / clock.speed) as u64);
                Ok(RunnerStep::Wait(wait.clamp(Duration::from_millis(1), MAX_POLL_INTERVAL)))
            }
        }
    }

    /// The agents that can think at the same time now, in the order of their heartbeats. One alone, or none that shares its
    /// model, is no group.
    fn due_group(&self, now: Millis) -> Vec<AgentId> {
        let store = self.store();
        let mut free: BTreeMap<String, usize> = {
            let models = self.models.lock();
            self.shared_models
                .iter()
                .map(|name| (name.clone(), models.get(name).map_or(0, Vec::len)))
                .collect()
        };
        let mut takes_handle = |agent: &AgentId| {
            let model = store.world.agent(*agent).map(|agent| agent.model.as_str()).unwrap_or_default();
            let handles = free.get_mut(model).filter(|handles| **handles > 0);
            handles.is_some_and(|handles| {
                *handles -= 1;
                true
            })
        };
        let due = store.world.due_heartbeats(now).into_iter();
        due.filter(|agent| takes_handle(agent)).take(self.group_limit.load(Ordering::SeqCst)).collect()
    }

    /// Limits how many agents think at the same time.
    pub fn set_group_limit(&self, agents: usize) {
        self.group_limit.store(agents.max(1), Ordering::SeqCst);
    }

    /// Runs the heartbeats of several agents at the same time. Each answer is applied and announced when it is complete.
    fn run_heartbeats(
        &self,
        group: &[AgentId],
        scheduler: Option<&ModelScheduler>,
    ) -> Result<RunnerStep, Error> {
        let mut waiting = RunnerStep::Skipped;
        let mut failed = None;
        std::thread::scope(|scope| {
            let start = |&agent: &AgentId| {
                let builder = std::thread::Builder::new().name("halo-agent".into());
                builder.spawn_scoped(scope, move || {
                    self.run_heartbeat(agent, scheduler).inspect(|step| self.announce(step))
                })
            };
            let threads: Vec<_> = group.iter().map(start).collect();
            for thread in threads {
                let step = match thread.map(std::thread::ScopedJoinHandle::join) {
                    Ok(Ok(step)) => step,
                    Ok(Err(panic)) => std::panic::resume_unwind(panic),
                    Err(error) => Err(Error::internal("starting the thread of an agent", error.to_string())),
                };
                match step {
                    Ok(RunnerStep::Heartbeat(report)) => self.finished.lock().push_back(*report),
                    Ok(step) => waiting = step,
                    Err(error) => failed = Some(error),
                }
            }
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let first = self.finished.lock().pop_front();
        Ok(first.map_or(waiting, |report| RunnerStep::Heartbeat(Box::new(report))))
    }

    /// Counts a step after its heartbeat. In a paused world, time jumps to the moment when the agent's drafts are finished, so that the
    /// step includes their delivery.
    fn finish_step(&self, agent: AgentId) {
        let drafts_done = self.store().world.drafts_done_at(agent);
        let mut clock = self.world_clock.lock();
        let steps = clock.steps;
        clock.steps = steps.saturating_sub(1);
        if let Some(at) = drafts_done.filter(|at| clock.paused && steps > 0 && *at > self.world_time(&clock))
        {
            self.set_anchor(&mut clock, at);
        }
    }

    /// Takes the reasons why posted commands were refused since the last call.
    pub fn take_refusals(&self) -> Vec<String> {
        std::mem::take(&mut self.refusals.lock())
    }

    /// Waits for a time, or until a command, a clock change or [`WorldRunner::stop`].
    pub fn wait(&self, time: Duration) {
        let mut clock = self.world_clock.lock();
        if !self.is_stopping() {
            self.wakeup.wait_for(&mut clock, time);
        }
    }

    /// Executes posted commands and delivers due drafts without running a heartbeat. Returns what changed.
    pub fn apply_pending(&self) -> Result<Option<WorldChanges>, Error> {
        self.apply_pending_at(self.now())
    }

    fn apply_pending_at(&self, now: Millis) -> Result<Option<WorldChanges>, Error> {
        let mut store = self.store();
        let (mut changes, refused) = self.end_if_lease_lost(store.apply_posted_commands(now))?;
        self.prerender_messages(&store, &changes);
        self.refusals.lock().extend(refused);
        if !store.world.deliver_due_drafts(now).is_empty() {
            store.world.advance_clock(now);
            changes.merge(self.save_changes(&mut store)?);
        }
        Ok((!changes.is_empty()).then_some(changes))
    }

    fn run_heartbeat(&self, agent: AgentId, scheduler: Option<&ModelScheduler>) -> Result<RunnerStep, Error> {
        let now = self.now();
        let Some(state) = self.store().world.agent(agent).cloned() else { return Ok(RunnerStep::Skipped) };
        let mut held = match self.take_handle(&state.model) {
            Ok(held) => held,
            Err(error) => return self.finish_heartbeat(agent, None, Err(error)),
        };
        let Some(model) = held.as_mut().and_then(|held| held.model.as_mut()) else {
            return Ok(RunnerStep::Wait(MODEL_BUSY_RETRY));
        };
        // The permit comes first: a HUD that waits for the model would be out of date.
        let permit = match scheduler.map(|scheduler| scheduler.try_acquire_background(model.cancel_handle()))
        {
            Some(None) => return Ok(RunnerStep::Wait(MODEL_BUSY_RETRY)),
            Some(Some(permit)) => Some(permit),
            None => None,
        };
        let mut store = self.store();
        let kv_key = self.kv_key(&store, &state);
        let hud = self.render_hud_at(&mut store, agent, None, now);
        drop(store);
        let hud = match hud {
            Ok(hud) => hud,
            Err(error) => return self.finish_heartbeat(agent, None, Err(error)),
        };
        self.begin_thinking(agent);
        if let Some(listener) = self.thinking_listener.get() {
            listener(agent);
        }
        let schema = schema::answer_schema(&hud.hud, model.sampling.max_tokens);
        let constraint = match state.answer_format {
            AnswerFormat::Json => OutputConstraint::JsonSchema(schema.to_string()),
            AnswerFormat::Toon => OutputConstraint::LarkGrammar(schema::toon_grammar(&schema)),
        };
        let must_stop = || permit.as_ref().is_some_and(IdlePermit::is_preempted) || self.is_stopping();
        let measurement = self.measure_hud(&state, &hud);
        let prompt = HeartbeatPrompt {
            kv_key: &kv_key,
            agent,
            hud,
            formats: (state.hud_format, state.answer_format),
            constraint: Some(constraint),
        };
        let generation = model.run_heartbeat(prompt, &mut || {
            if must_stop() { StepFlow::Stop } else { StepFlow::Continue }
        });
        drop(permit);
        drop(held);
        self.end_thinking(agent);
        match generation {
            Ok(None) => Ok(RunnerStep::Skipped),
            Ok(Some((generation, answer))) => {
                self.finish_heartbeat(agent, Some((generation, measurement)), answer)
            }
            Err(error) => self.finish_heartbeat(agent, None, Err(error.into())),
        }
    }

    /// Takes an idle handle to a model. None if all are in use.
    fn take_handle(&self, model: &str) -> Result<Option<HeldModel<'_>>, error::Error> {
        let mut models = self.models.lock();
        let idle = models.get_mut(model).ok_or_else(|| unknown_model(model))?;
        Ok(idle.pop().map(|handle| HeldModel { runner: self, name: model.to_owned(), model: Some(handle) }))
    }

    /// Where the cells of an agent are cached. Agents that never think at the same time share a cache, and with it the cells
    /// of the fragments that all of them are shown.
    fn kv_key(&self, store: &WorldStore, agent: &AgentState) -> String {
        let world = store.kv_key();
        match self.shared_models.contains(&agent.model) {
            true => agent_kv_key(world, agent.id),
            false => world.to_owned(),
        }
    }

    fn begin_thinking(&self, agent: AgentId) {
        let mut thinking = self.thinking.lock();
        thinking.push(agent);
        self.world_clock.lock().thinking_agent = Some(agent);
    }

    fn end_thinking(&self, agent: AgentId) {
        let mut thinking = self.thinking.lock();
        thinking.retain(|other| *other != agent);
        self.world_clock.lock().thinking_agent = thinking.last().copied();
    }

    /// The tokens of a HUD in every format; none if they are not recorded.
    fn measure_hud(&self, agent: &AgentState, hud: &RenderedHud) -> Option<HudMeasurement> {
        let (renderer, _) =
            self.renderers.get(&agent.model).filter(|_| self.options.recorded_heartbeats > 0)?;
        Some(HudMeasurement::new(renderer, agent.hud_format, hud))
    }

    /// Applies an answer and saves the world.
    fn finish_heartbeat(
        &self,
        agent: AgentId,
        generation: Option<(AgentGeneration, Option<HudMeasurement>)>,
        answer: Result<AgentAnswer, error::Error>,
    ) -> Result<RunnerStep, Error> {
        let now = self.now();
        let mut store = self.store();
        let now = store.world.advance_clock(now);
        // Drafts that were typed while the model generated come before the answer.
        store.world.deliver_due_drafts(now);
        let repaired = answer.as_ref().is_ok_and(|answer| answer.repaired);
        let renderer = store.world.agent(agent).and_then(|agent| self.renderers.get(&agent.model));
        let outcome = answer.and_then(|answer| {
            let (renderer, token_limit) = renderer.ok_or_else(|| unknown_model(""))?;
            let knowledge_budget = store.world.header.budgets.scaled_to(*token_limit).knowledge;
            let split = self.options.split;
            let context = ActionContext { now, counter: renderer.counter(), knowledge_budget, split };
            Ok(store.world.apply_answer(agent, answer, context))
        });
        if let Err(error) = &outcome {
            store.world.record_refusal(agent, "answer", &error.message, now);
        }
        store.world.finish_heartbeat(agent, now, self.options.jitter);
        let (generation, measurement) = generation.unzip();
        if let (Some(generation), Some(Some(measurement))) = (&generation, measurement) {
            // The agent may have retired meanwhile; its heartbeats stay on record.
            let beat = store.world.any_agent(agent).map_or(0, |agent| agent.heartbeat_count);
            let record = measurement.into_record(agent, (beat, now), generation);
            store.record_heartbeat(&record, self.options.recorded_heartbeats)?;
        }
        let changes = self.save_changes(&mut store)?;
        let report = HeartbeatReport { agent, finished_at: now, generation, outcome, repaired, changes };
        Ok(RunnerStep::Heartbeat(Box::new(report)))
    }
}

fn unknown_model(model: &str) -> error::Error {
    error::Error::not_found(format!(
        "there is no model '{model}': add it to the world's models, or alter the agent"
    ))
}
