//! A world whose hearts beat: whoever's time has come is shown its HUD, thinks, and acts. The world can be looked at and spoken to
//! meanwhile; nobody waits for somebody who thinks.

use super::mind::{Mind, Thought};
use super::realm::Realm;
use crate::gate::Gate;
use halo_agents::action::Bounds;
use halo_agents::answer::{Answer, Outcome, form};
use halo_agents::format::{Format, Output};
use halo_agents::heartbeat::Millis;
use halo_agents::prompts::Prompts;
use halo_agents::scribe::{HudError, Scribe, Shown, View};
use halo_agents::wish::Wish;
use halo_agents::world::{AgentId, Message, RoomId, Touched};
use halo_core::seams::{Flow, Form, SeamError};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What time it is, in milliseconds since 1970.
pub type Clock = Box<dyn Fn() -> Millis + Send + Sync>;

/// A world whose hearts beat.
pub struct House {
    realm: Mutex<Realm>,
    minds: Mutex<BTreeMap<String, Mind>>,
    /// Who writes HUDs for each model, and how many tokens they may have: nobody waits for a model that thinks to see one.
    scribes: BTreeMap<String, (Arc<Scribe>, usize)>,
    prompts: Prompts,
    clock: Clock,
    pace: Mutex<Pace>,
    /// What was asked from outside and cannot be.
    refused: Mutex<Vec<String>>,
    moved: Condvar,
    ending: AtomicBool,
}

/// How time goes by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Time stands still, and nobody's heart beats of itself.
    pub paused: bool,
    /// Heartbeats to which it goes on all the same.
    pub steps: usize,
    /// How fast time goes by.
    pub speed: f64,
    /// Since when it goes so fast, by the clock and in the world.
    since: (Millis, Millis),
    /// Who thinks now.
    pub thinking: Option<AgentId>,
}

/// One heartbeat.
#[derive(Clone, Debug, PartialEq)]
pub struct Beat {
    /// Whose.
    pub who: AgentId,
    /// When it was over.
    pub at: Millis,
    /// What it thought; none where it could not.
    pub thought: Option<Thought>,
    /// What came of it, or why nothing did.
    pub outcome: Result<Outcome, String>,
    /// Whether its answer had to be put right.
    pub repaired: bool,
    /// What changed.
    pub touched: Touched,
}

/// What comes next.
#[derive(Debug)]
pub enum Next {
    /// A heart has beaten.
    Beat(Box<Beat>),
    /// Something was said, or asked from outside.
    Changed(Box<Touched>),
    /// Nothing for so long.
    Wait(Duration),
    /// Somebody else wanted the model.
    Broken,
}

/// The longest that nobody looks whether something was asked from outside.
const LOOK: Duration = Duration::from_millis(300);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl House {
    /// A world, and what thinks for its agents, by the names of the models.
    #[must_use]
    pub fn new(realm: Realm, minds: BTreeMap<String, Mind>, prompts: Prompts, clock: Clock) -> Self {
        let now = clock();
        let world = realm.world.head.clock.max(now);
        let pace = Pace { paused: false, steps: 0, speed: 1.0, since: (now, world), thinking: None };
        let scribes = minds
            .iter()
            .map(|(name, mind)| (name.clone(), (Arc::clone(&mind.scribe), mind.room())))
            .collect();
        Self {
            realm: Mutex::new(realm),
            minds: Mutex::new(minds),
            scribes,
            prompts,
            clock,
            pace: Mutex::new(pace),
            refused: Mutex::default(),
            moved: Condvar::new(),
            ending: AtomicBool::new(false),
        }
    }

    /// The world.
    pub fn realm(&self) -> MutexGuard<'_, Realm> {
        lock(&self.realm)
    }

    /// How time goes by.
    #[must_use]
    pub fn pace(&self) -> Pace {
        *lock(&self.pace)
    }

    /// What time it is in the world.
    #[must_use]
    pub fn now(&self) -> Millis {
        self.now_at(&self.pace())
    }

    fn now_at(&self, pace: &Pace) -> Millis {
        let passed = (self.clock)().saturating_sub(pace.since.0).max(0);
        let speed = if pace.paused { 0.0 } else { pace.speed };
        pace.since.1 + (passed as f64 * speed) as Millis
    }

    /// From now on it is that time, and time goes by as `pace` has it.
    fn begin(&self, pace: &mut Pace, at: Millis) {
        pace.since = ((self.clock)(), at);
    }

    /// Stops time, or lets it go on: whoever's heart would have beaten meanwhile has missed nothing.
    pub fn pause(&self, paused: bool) {
        let mut pace = lock(&self.pace);
        let now = self.now_at(&pace);
        self.begin(&mut pace, now);
        (pace.paused, pace.steps) = (paused, 0);
        self.moved.notify_all();
    }

    /// Lets one heart beat, whoever's is next: time goes on to when that is.
    pub fn step(&self) {
        lock(&self.pace).steps += 1;
        self.moved.notify_all();
    }

    /// Lets time go by faster, or slower.
    pub fn set_speed(&self, speed: f64) {
        let mut pace = lock(&self.pace);
        let now = self.now_at(&pace);
        self.begin(&mut pace, now);
        pace.speed = speed.clamp(0.1, 100.0);
        self.moved.notify_all();
    }

    /// Whether time stands still, and nobody thinks or is about to.
    #[must_use]
    pub fn is_still(&self) -> bool {
        let pace = self.pace();
        pace.paused && pace.steps == 0 && pace.thinking.is_none()
    }

    /// Everything is to end.
    pub fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.moved.notify_all();
    }

    /// Whether it is.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// Does what the person wants.
    ///
    /// # Errors
    /// When it cannot be done.
    pub fn wish(&self, wish: Wish) -> Result<Touched, SeamError> {
        let mut realm = self.realm();
        let now = realm.world.tick(self.now());
        let done = realm.world.wish(wish, now);
        let touched = self.keep(&mut realm)?;
        drop(realm);
        self.moved.notify_all();
        done.map(|()| touched).map_err(|why| SeamError::asked("doing that", why))
    }

    /// Keeps what has changed, and returns it.
    fn keep(&self, realm: &mut Realm) -> Result<Touched, SeamError> {
        let touched = realm.world.touched().clone();
        realm.save()?;
        self.foresee(realm, &touched);
        Ok(touched)
    }

    /// What was said is written and counted once for all who will see it, each in its own format.
    fn foresee(&self, realm: &Realm, touched: &Touched) {
        for message in touched.messages.values() {
            for (model, format) in realm.world.read_in(message.room) {
                if let Some((scribe, _)) = self.scribes.get(model) {
                    scribe.foresee(message, format);
                }
            }
        }
    }

    /// What an agent sees now; in its own format, or in another.
    ///
    /// # Errors
    /// When there is no such agent, or nothing thinks for it, or it does not fit.
    pub fn show(&self, who: AgentId, format: Option<Format>) -> Result<Shown, SeamError> {
        let now = self.now();
        self.shown(&mut self.realm(), who, format, now).map_err(|why| SeamError::asked("showing a HUD", why))
    }

    /// What an agent sees, with what matters of the past.
    fn shown(
        &self,
        realm: &mut Realm,
        who: AgentId,
        format: Option<Format>,
        now: Millis,
    ) -> Result<Shown, String> {
        let agent = realm.world.agent(who).ok_or_else(|| HudError::Nobody(who).to_string())?;
        let format = format.unwrap_or(agent.input);
        let (scribe, room) = self.scribes.get(&agent.model).ok_or_else(|| mindless(&agent.model))?;
        let rooms: Vec<RoomId> = realm.world.rooms_of(who).map(|room| room.id).collect();
        let found: BTreeMap<RoomId, Vec<Message>> =
            rooms.into_iter().map(|room| (room, realm.recalled(room))).collect();
        let recalled = |room: RoomId| found.get(&room).cloned().unwrap_or_default();
        let view = View { now, prompts: &self.prompts, room: *room, recalled: &recalled };
        let agent = realm.world.agent(who).ok_or_else(|| HudError::Nobody(who).to_string())?;
        scribe.show_as(&realm.world, agent, format, &view).map_err(|why| why.to_string())
    }

    /// Does what is to be done next, if there is anything. A heart only beats while nobody else wants the model that `gate` is the
    /// way to.
    ///
    /// # Errors
    /// When something cannot be kept, or a model fails; then its agent is asked again later.
    pub fn next(&self, gate: Option<&Gate>) -> Result<Next, SeamError> {
        let now = self.now();
        if let Some(touched) = self.changes(now)? {
            return Ok(Next::Changed(Box::new(touched)));
        }
        let (next, words) = {
            let realm = self.realm();
            (realm.world.next_beat(), realm.world.next_words())
        };
        let mut pace = lock(&self.pace);
        if next.is_none() {
            // There is nobody to step to.
            pace.steps = 0;
        }
        match next {
            Some((who, at)) if pace.steps > 0 || (!pace.paused && at <= now) => {
                if at > now {
                    self.begin(&mut pace, at);
                }
                drop(pace);
                // What is said until then is said first.
                if at > now
                    && let Some(touched) = self.changes(at)?
                {
                    return Ok(Next::Changed(Box::new(touched)));
                }
                let next = self.beat(who, gate)?;
                // Who is to be asked again has not had its step.
                if matches!(next, Next::Beat(_)) {
                    self.stepped(who);
                }
                Ok(next)
            }
            _ => {
                let beat = next.filter(|_| !pace.paused).map(|(_, at)| at);
                let wait =
                    [words, beat].into_iter().flatten().min().map_or(Millis::MAX, |at| (at - now).max(1));
                let wait = Duration::from_millis((wait as f64 / pace.speed) as u64);
                Ok(Next::Wait(wait.clamp(Duration::from_millis(1), LOOK)))
            }
        }
    }

    /// A heart has beaten. Where time stands still, it goes on until what that one writes is written.
    fn stepped(&self, who: AgentId) {
        let written = self.realm().world.written_by(who);
        let mut pace = lock(&self.pace);
        let was = pace.steps;
        pace.steps = was.saturating_sub(1);
        if let Some(written) =
            written.filter(|written| pace.paused && was > 0 && *written > self.now_at(&pace))
        {
            self.begin(&mut pace, written);
        }
    }

    fn refused(&self, why: Vec<String>) {
        lock(&self.refused).extend(why);
    }

    /// What was asked from outside since this was last asked, and cannot be.
    pub fn take_refused(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.refused))
    }

    /// Waits, or until something moves.
    pub fn wait(&self, time: Duration) {
        let pace = lock(&self.pace);
        if !self.is_ending() {
            drop(self.moved.wait_timeout(pace, time));
        }
    }

    /// Says what has been written by now, and does what was asked from outside, while no heart beats. Returns what changed.
    ///
    /// # Errors
    /// When it cannot be kept.
    pub fn catch_up(&self) -> Result<Option<Touched>, SeamError> {
        self.changes(self.now())
    }

    fn changes(&self, now: Millis) -> Result<Option<Touched>, SeamError> {
        let mut realm = self.realm();
        let (mut touched, refused) = realm.take_posts(now)?;
        self.foresee(&realm, &touched);
        self.refused(refused);
        if !realm.world.deliver(now).is_empty() {
            realm.world.tick(now);
            touched.join(self.keep(&mut realm)?);
        }
        Ok((!touched.is_empty()).then_some(touched))
    }

    /// One heartbeat: it sees, thinks and acts.
    fn beat(&self, who: AgentId, gate: Option<&Gate>) -> Result<Next, SeamError> {
        let now = self.now();
        let Some(agent) = self.realm().world.agent(who).cloned() else { return Ok(Next::Broken) };
        let mut minds = lock(&self.minds);
        let Some(mind) = minds.get_mut(&agent.model) else {
            return self.conclude(who, None, Err(mindless(&agent.model)));
        };
        // Nobody looks before there is somebody to think.
        let pass = match gate.map(|gate| gate.spare(mind.breaker())) {
            Some(None) => return Ok(Next::Wait(BUSY)),
            Some(Some(pass)) => Some(pass),
            None => None,
        };
        let mut realm = self.realm();
        let (key, shown) = (realm.key().to_owned(), self.shown(&mut realm, who, None, now));
        drop(realm);
        let shown = match shown {
            Ok(shown) => shown,
            Err(why) => return self.conclude(who, None, Err(why)),
        };
        lock(&self.pace).thinking = Some(who);
        let form = form::schema(&shown.hud, mind.sampling.max_tokens);
        let form = match agent.output {
            Output::Json => Form::Schema(form.to_string()),
            Output::Toon => Form::Grammar(form::grammar(&form)),
        };
        let wanted = || pass.as_ref().is_some_and(crate::gate::Spare::is_wanted) || self.is_ending();
        let thought = mind
            .think(&key, who, &shown, Some(form), &mut || if wanted() { Flow::Stop } else { Flow::Continue });
        drop(pass);
        drop(minds);
        lock(&self.pace).thinking = None;
        match thought {
            Ok(None) => Ok(Next::Broken),
            Ok(Some(thought)) => {
                let answer = Answer::read(&thought.text, agent.output, thought.cut);
                self.conclude(who, Some(thought), answer)
            }
            Err(why) => self.conclude(who, None, Err(why.to_string())),
        }
    }

    /// Does what was answered, and keeps what came of it.
    fn conclude(
        &self,
        who: AgentId,
        thought: Option<Thought>,
        answer: Result<Answer, String>,
    ) -> Result<Next, SeamError> {
        let now = self.now();
        let mut realm = self.realm();
        let now = realm.world.tick(now);
        // What was written while it thought has been said.
        realm.world.deliver(now);
        let repaired = answer.as_ref().is_ok_and(|answer| answer.repaired);
        let scribe = realm.world.agent(who).and_then(|agent| self.scribes.get(&agent.model));
        let outcome = answer.and_then(|answer| {
            let (scribe, room) = scribe.ok_or_else(|| mindless(""))?;
            let knowledge = realm.world.head.budgets.within(*room).knowledge;
            Ok(realm.world.answer(who, answer, Bounds { now, count: scribe.count(), knowledge }))
        });
        if let Err(why) = &outcome {
            realm.world.refuse(who, "answer", why, now);
        }
        realm.world.beaten(who, now);
        let touched = self.keep(&mut realm)?;
        Ok(Next::Beat(Box::new(Beat { who, at: now, thought, outcome, repaired, touched })))
    }
}

/// How long to wait for a model that somebody else uses.
const BUSY: Duration = Duration::from_millis(50);

fn mindless(model: &str) -> String {
    format!("no model is called '{model}' here: name it in the world's models, or alter the agent")
}
