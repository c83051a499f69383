//! One turn: a message in, an answer out. What matters of the past returns once, before the message; what has grown dim
//! leaves once, behind the answer. Whatever is told has been stored before.

use crate::branch::{self, BranchPoint};
use crate::event::{Event, Stage, Summary};
use crate::find;
use crate::memory::segment::Holes;
use crate::rules::ReturnLight;
use crate::session::{MESSAGE_ID, RUNNING, Session, messages};
use crate::speech::Speech;
use crate::tools;
use halo_core::attention::{AttentionStats, Watch};
use halo_core::brightness::Strategy;
use halo_core::budget::Room;
use halo_core::change::{Change, DeleteReason, Extent, Part};
use halo_core::prune::{PrunePlan, plan_prune};
use halo_core::resurrect::{Hit, ReturnsWith, plan_returns};
use halo_core::seams::{
    Durability, Finish, Flow, Kind, Look, ModelStep, Piece, Prompt, Sampling, SeamError, Seen,
};
use halo_core::token::{ChunkId, Role, TurnId, Voice};
use jiff::civil::Date;
use serde_json::json;
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// Whoever hears of a turn. Its answer counts where there is something to stop: while the window is read, and at every
/// token.
pub type Listen<'a> = dyn FnMut(Event) -> Flow + 'a;

/// What is said, and so what is to be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Say {
    /// A message.
    Message(String),
    /// Nothing: what was said last is answered as it stands.
    Nothing,
    /// The last message once more: its answer is set aside as a variant.
    Again(AskedBy),
    /// Another message in the place of the last one, which is set aside with its answer as a variant.
    Instead(String, AskedBy),
}

/// Who asked for another answer or edited a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskedBy {
    /// A person, on the page or in the terminal.
    User,
    /// A client that keeps its own history.
    Client,
}

/// What has been going on in a turn.
struct Running<'a> {
    listen: &'a mut Listen<'a>,
    stages: Vec<(Stage, Duration)>,
    returned: usize,
    left: usize,
    traces: Vec<(u64, AttentionStats)>,
    /// What the message takes for granted and must not.
    premise: Option<String>,
}

/// How long an answer took: in all, until it began, and what was done for it here.
#[derive(Default)]
struct Clock {
    all: Duration,
    read: Duration,
    own: Duration,
}

impl Session {
    /// One turn.
    ///
    /// # Errors
    /// As each of them.
    pub fn turn(&mut self, say: Say, today: Date, listen: &mut Listen<'_>) -> Result<Summary, SeamError> {
        match say {
            Say::Message(message) => self.say(&message, today, listen),
            Say::Nothing => self.answer_last(today, &mut Running::new(listen)),
            Say::Again(by) => self.say_again(by, today, listen),
            Say::Instead(message, by) => {
                check(&message)?;
                self.unsay(by)?;
                listen(TAKEN_BACK);
                self.say(&message, today, listen)
            }
        }
    }

    /// Says something, and hears the answer.
    ///
    /// # Errors
    /// When a part fails. What was told stands; a message that was not stored can be said again.
    pub fn say(&mut self, message: &str, today: Date, listen: &mut Listen<'_>) -> Result<Summary, SeamError> {
        check(message)?;
        let mut run = Running::new(listen);
        // The day is told with its first message.
        let day = (self.day != Some(today)).then_some(today);
        let written = self.written(Role::User, message, day)?;
        self.make_room(written.len(), &mut run)?;
        run.timed(Stage::Store, |run| self.store_message(Role::User, written, run))?;
        self.day = Some(today);
        self.doubt(message, &mut run);
        let preview = run.timed(Stage::Preview, |run| self.preview(message, run))?;
        run.timed(Stage::Recall, |run| self.remember(message, &preview, today, run))?;
        self.answer(&mut run)
    }

    /// Answers the last message again: the answer that was given is set aside as a variant, and what matters to the message
    /// returns once more.
    ///
    /// # Errors
    /// As above; also when there is nothing to answer.
    pub fn say_again(
        &mut self,
        by: AskedBy,
        today: Date,
        listen: &mut Listen<'_>,
    ) -> Result<Summary, SeamError> {
        let mut run = Running::new(listen);
        let answers: Vec<TurnId> =
            self.said().take_while(|(_, role)| *role == Role::Assistant).map(|(turn, _)| turn).collect();
        if !answers.is_empty() {
            let reason = match by {
                AskedBy::User => DeleteReason::UserRegenerated,
                AskedBy::Client => DeleteReason::ClientRegenerated,
            };
            self.set_aside(&answers, reason)?;
            run.tell(TAKEN_BACK);
        }
        if !matches!(self.last_said(), Some((_, Role::User))) {
            return Err(SeamError::asked("answering again", "there is no message to answer"));
        }
        self.answer_last(today, &mut run)
    }

    /// Answers what was said last. What matters to the last message of the user's returns before.
    fn answer_last(&mut self, today: Date, run: &mut Running<'_>) -> Result<Summary, SeamError> {
        let asked = self.said().find(|(_, role)| *role == Role::User).map(|(turn, _)| turn);
        let message = asked.map(|turn| self.text_of(turn)).transpose()?.unwrap_or_default();
        self.make_room(0, run)?;
        run.timed(Stage::Recall, |run| self.remember(&message, "", today, run))?;
        self.answer(run)
    }

    /// Sets the user's last message aside, with its answer, as a variant, and returns its text, to be edited.
    ///
    /// # Errors
    /// When there is none, or the store fails.
    pub fn unsay(&mut self, by: AskedBy) -> Result<String, SeamError> {
        let user = self.said().find(|(_, role)| *role == Role::User).map(|(turn, _)| turn);
        let turn = user.ok_or_else(|| SeamError::asked("editing the last message", "there is none"))?;
        let text = self.text_of(turn)?;
        let gone: Vec<TurnId> = self.said().map(|(turn, _)| turn).take_while(|&t| t >= turn).collect();
        let reason = match by {
            AskedBy::User => DeleteReason::UserEdited,
            AskedBy::Client => DeleteReason::ClientEdited,
        };
        self.set_aside(&gone, reason)?;
        Ok(text)
    }

    /// What was said in a turn, live or not.
    pub(crate) fn text_of(&mut self, turn: TurnId) -> Result<String, SeamError> {
        find::text_of(&mut *self.store, &self.name, &mut self.timeline, turn)
    }

    /// Begins another conversation that shares the past of this one, up to a turn, or all of it. Returns how many
    /// messages they share.
    ///
    /// # Errors
    /// When there is a conversation of that name, or the store fails.
    pub fn branch(&mut self, name: &str, through: Option<u32>) -> Result<usize, SeamError> {
        let known = |turn: u32| self.timeline.turns().iter().any(|t| t.id.0 == turn);
        if let Some(turn) = through.filter(|&turn| !known(turn)) {
            let last = self.timeline.turns().last().map_or(0, |turn| turn.id.0);
            return Err(SeamError::asked(
                "branching",
                format!("there is no turn {turn}: the last one is {last}"),
            ));
        }
        let through = through.map(TurnId).or_else(|| self.timeline.turns().last().map(|turn| turn.id));
        let through = through.ok_or_else(|| SeamError::asked("branching", "nothing has been said yet"))?;
        branch::create(&mut *self.store, &self.name, name, &BranchPoint { through, chosen: Vec::new() })
    }

    fn last_said(&self) -> Option<(TurnId, Role)> {
        self.said().next()
    }

    /// Deletes messages: out of the window and out of search.
    ///
    /// # Errors
    /// When the store fails.
    pub(crate) fn delete_turns(&mut self, turns: &[TurnId], reason: DeleteReason) -> Result<(), SeamError> {
        let chunks = turns.iter().flat_map(|&turn| self.timeline.turn_chunks(turn));
        let parts = chunks.filter(|chunk| !chunk.is_withdrawn());
        let parts = parts.map(|chunk| Part { chunk: chunk.id(), extent: Extent::Whole }).collect();
        self.change(&Change::Withdraw { parts, reason }, Durability::Now)?;
        self.recall.follow(&mut *self.store, &self.timeline)?;
        Ok(())
    }

    /// Makes room for a message of that many tokens and its answer, where there is none: what is dimmest leaves early, and
    /// as much of it as at the end of a turn, so that there is room for what returns.
    fn make_room(&mut self, message: usize, run: &mut Running<'_>) -> Result<(), SeamError> {
        let opening = self.opening()?.len();
        let need = message + opening + self.rules.sampling.max_tokens;
        let (live, limit, context) = (self.live(), self.limit(), self.model.info().context);
        if live + need <= limit {
            return Ok(());
        }
        let rest = self.rules.budget().map(|budget| budget.saturating_sub(message + opening));
        let plan = self.plan(limit.saturating_sub(need).min(rest.unwrap_or(limit)), None);
        if plan.after + self.standing() + need > context {
            let why = format!(
                "the model sees {context} tokens, and {} of the message with what frames it, {} that cannot leave and up \
                 to {} of an answer are more: say it in parts, or set model.context higher",
                message + opening,
                plan.after,
                self.rules.sampling.max_tokens
            );
            return Err(SeamError::asked("making room for the message", why));
        }
        self.leave(&plan, run)
    }

    /// What of the past matters to a message returns, as far as there is room.
    fn remember(
        &mut self,
        message: &str,
        preview: &str,
        today: Date,
        run: &mut Running<'_>,
    ) -> Result<(), SeamError> {
        let room = Room {
            model_context: self.model.info().context,
            max_context: self.rules.context.max_tokens,
            live: self.live(),
            // The message is live already; what opens its answer is not.
            message: self.opening()?.len(),
            answer: self.rules.sampling.max_tokens,
        };
        if room.for_returns() == 0 || self.timeline.live_len() == self.timeline.len() {
            return Ok(());
        }
        let query = if preview.is_empty() { message.to_owned() } else { format!("{message}\n{preview}") };
        let found = self.recall.search(&query, Some(today), self.rules.recall)?;
        // What scores nothing is found only because something has to be.
        let mut hits: Vec<Hit> = found.iter().map(|found| found.hit).filter(|hit| hit.score > 0.0).collect();
        for system in hits.iter().filter(|hit| hit.chunk.role == Role::System).copied().collect::<Vec<_>>() {
            if self.is_left_out(system.chunk)? {
                hits.retain(|hit| hit.chunk != system.chunk);
            }
        }
        let full = self.rules.context.strategy.full();
        let with = match self.rules.returns {
            ReturnLight::Earned => ReturnsWith::Earned,
            ReturnLight::Full => ReturnsWith::Fixed(full),
            ReturnLight::Mean => {
                let mean = self.timeline.view(self.prefix.len()).mean_brightness(None);
                ReturnsWith::Fixed(mean.unwrap_or(full))
            }
        };
        let plan = plan_returns(&self.timeline, &hits, room.for_returns(), with);
        let Some(change) = plan.change() else { return Ok(()) };
        let tokens = |chunk: ChunkId| self.timeline.chunk(chunk).map_or(0, |chunk| chunk.dead_len());
        let told: Vec<Event> = (plan.returns.iter())
            .map(|r| Event::Returned { chunk: r.chunk, tokens: tokens(r.chunk), why: r.why.to_string() })
            .collect();
        self.change(&change, Durability::Behind)?;
        run.returned += told.len();
        told.into_iter().for_each(|event| run.tell(event));
        Ok(())
    }

    /// Tells whoever asked where their question takes something for granted that was said not to be so.
    fn doubt(&mut self, message: &str, run: &mut Running<'_>) {
        let Some(by) = self.rules.premises else { return };
        let told = match self.check_premise(message, by) {
            Ok(told) => told,
            // It only advises.
            Err(why) => {
                run.tell(Event::Notice(format!(
                    "what the question takes for granted was not looked at: {why}"
                )));
                return;
            }
        };
        if let (Some(premise), Some(reason), Some(suggestion)) =
            (told.invalid_premise, told.reason, told.suggestion)
        {
            run.premise = Some(format!("“{premise}”: {reason}"));
            run.tell(Event::Premise { premise, reason, suggestion });
        }
    }

    /// The message is on the timeline and on disk before anybody is told.
    fn store_message(
        &mut self,
        role: Role,
        written: Vec<(Piece, Voice)>,
        run: &mut Running<'_>,
    ) -> Result<(), SeamError> {
        let append = self.append(role, written);
        let (turn, tokens) = (append.turn, append.tokens.len());
        self.change(&Change::Append(append), Durability::Now)?;
        self.began()?;
        if let Some(id) = self.message_id.take() {
            self.store.put_record(&self.name, Kind::Setting, MESSAGE_ID, Some(&id))?;
        }
        run.tell(Event::Said { turn, role, tokens });
        Ok(())
    }

    /// The answer to what was said last, and what follows from it.
    fn answer(&mut self, run: &mut Running<'_>) -> Result<Summary, SeamError> {
        let opening = self.written(Role::Assistant, "", None)?;
        let append = self.append(Role::Assistant, opening);
        let turn = append.turn;
        self.store.put_record(&self.name, Kind::Setting, RUNNING, Some(&turn.0.to_string()))?;
        self.change(&Change::Append(append), Durability::Behind)?;
        let (mut spoken, mut tokens, mut done) = (Ok(Finish::End), 0, Vec::new());
        for _ in 0..=ROUNDS {
            let (finish, more, said) = self.speak(run)?;
            (spoken, tokens) = (finish, tokens + more);
            // Only what it has just said itself can call a tool, and the same call does nothing twice in a turn.
            let command = tools::call::command(&said).filter(|_| spoken == Ok(Finish::Stop));
            let Some(command) = command.filter(|c| done.len() < ROUNDS && !done.contains(&(*c).to_owned()))
            else {
                break;
            };
            self.call(command, run)?;
            done.push(command.to_owned());
        }
        if tokens == 0 && !matches!(spoken, Ok(Finish::End | Finish::Stop | Finish::Length)) {
            // Nothing was said: there is no answer, and the message waits for one.
            self.delete_turns(&[turn], DeleteReason::NoAnswer)?;
        }
        let plan = run.timed(Stage::Prune, |run| {
            let plan = self.rules.budget().map(|budget| self.plan(budget, Some(turn)));
            if let Some(plan) = &plan {
                self.leave(plan, run)?;
            }
            Ok(plan)
        })?;
        if let Some(exceeded) = plan.and_then(|plan| plan.exceeded) {
            run.tell(Event::Exceeded(exceeded.to_string()));
        }
        run.timed(Stage::Index, |_| self.index())?;
        self.key_messages()?;
        run.timed(Stage::Settle, |_| self.warm())?;
        let finish = *spoken.as_ref().unwrap_or(&Finish::Aborted);
        let summary = Summary {
            turn,
            finish,
            tokens,
            returned: run.returned,
            left: run.left,
            live: self.live(),
            stages: std::mem::take(&mut run.stages),
            traces: std::mem::take(&mut run.traces),
        };
        self.note(&summary, spoken.as_ref().err(), run.premise.as_deref())?;
        if cfg!(debug_assertions)
            && let Ok(found) = self.disagreements()
        {
            assert_eq!(found, Vec::<String>::new(), "after turn {}", turn.0);
        }
        spoken?;
        run.tell(Event::Done(summary.clone()));
        Ok(summary)
    }

    /// Calls a tool: what comes of it follows the call, as tokens of a voice of their own.
    fn call(&mut self, command: &str, run: &mut Running<'_>) -> Result<(), SeamError> {
        let Some(runner) = self.rules.tools.clone() else { return Ok(()) };
        let now = jiff::Timestamp::now().as_millisecond();
        let done = tools::run(command, &runner, now, &self.name, &mut *self.store)?;
        let pieces = self.model.tokenize(&done.told(), false)?;
        let mut speech = self.speech();
        for piece in &pieces {
            let event = speech.result(piece, &self.name, &mut self.timeline, &mut *self.store)?;
            run.tell(event);
        }
        run.tell(Event::Tool(done));
        Ok(())
    }

    /// What follows in the last turn.
    fn speech(&self) -> Speech {
        Speech::new(&self.timeline, self.prefix.len(), &self.rules.context, self.rules.watch.max)
    }

    /// The answer itself, token by token: stored as it comes, and scored by what it looks at. An error of the model's
    /// is returned beside what was said up to then.
    fn speak(
        &mut self,
        run: &mut Running<'_>,
    ) -> Result<(Result<Finish, SeamError>, usize, String), SeamError> {
        let mut speech = self.speech();
        let turn = self.timeline.turns().last().map_or(TurnId(0), |turn| turn.id);
        let Self { recorders, prefix, timeline, .. } = self;
        let unbegun = recorders.each(|r| r.begin(turn, prefix, timeline.view(prefix.len())));
        unrecorded(unbegun, run);
        let mut clock = Clock::default();
        let finish = match &self.rules.context.strategy {
            Strategy::Magnitude(_) => self.go_on(&self.sampling(0), &mut speech, &mut clock, run)?,
            Strategy::Ttl(_) => self.go_on_by_steps(&mut speech, &mut clock, run)?,
        };
        run.took(Stage::Read, clock.read);
        run.took(Stage::Speak, clock.all.saturating_sub(clock.read).saturating_sub(clock.own));
        run.took(Stage::Attend, clock.own);
        let mut kept = Vec::new();
        let unended = self.recorders.each(|recorder| recorder.end().map(|what| kept.extend(what)));
        unrecorded(unended, run);
        for (place, what) in kept {
            self.store.put_record(&self.name, Kind::Capture, &place, Some(&what))?;
        }
        let (tokens, said) = (speech.tokens, std::mem::take(&mut speech.said));
        run.traces.append(&mut speech.traces);
        let (score, event) = speech.end();
        self.change(&score, Durability::Behind)?;
        run.tell(event);
        Ok((finish, tokens, said))
    }

    /// How the answer is drawn, `step` tokens into it. The same seed draws another answer in every turn, and the same one
    /// each time it is run.
    fn sampling(&self, step: usize) -> Sampling {
        let turn = u64::from(self.timeline.next_turn().0).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let step = (step as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
        let mut sampling =
            Sampling { seed: self.rules.sampling.seed ^ turn ^ step, ..self.rules.sampling.clone() };
        sampling.stop.extend(self.rules.tools.is_some().then(|| tools::call::CLOSE.to_owned()));
        sampling
    }

    /// v0: tokens leave while others come, so the model is shown its window anew for each.
    fn go_on_by_steps(
        &mut self,
        speech: &mut Speech,
        clock: &mut Clock,
        run: &mut Running<'_>,
    ) -> Result<Result<Finish, SeamError>, SeamError> {
        for step in 0..self.rules.sampling.max_tokens {
            let sampling = self.sampling(step);
            let stops = sampling.stop.clone();
            let finish = self.go_on(&Sampling { max_tokens: 1, ..sampling }, speech, clock, run)?;
            if finish != Ok(Finish::Length) || speech.tokens == step {
                return Ok(finish);
            }
            if stops.iter().any(|stop| speech.said.ends_with(stop.as_str())) {
                return Ok(Ok(Finish::Stop));
            }
        }
        Ok(Ok(Finish::Length))
    }

    fn go_on(
        &mut self,
        sampling: &Sampling,
        speech: &mut Speech,
        clock: &mut Clock,
        run: &mut Running<'_>,
    ) -> Result<Result<Finish, SeamError>, SeamError> {
        let (window, next) = (self.window(), self.timeline.next_position());
        let holes = Holes::of(&window);
        let Self { model, store, timeline, rules, frame, name, key, recorders, stands, .. } = self;
        let timeline = RefCell::new(timeline);
        let told = || messages(&frame.system, &timeline.borrow(), stands);
        let prompt = Prompt { conversation: key, window: &window, messages: &told, next, aside: false };
        let (mut failed, mut lost) = (None, Vec::new());
        let first = clock.all.is_zero();
        let begin = Instant::now();
        let finish = model.generate(&prompt, sampling, &rules.watch, &mut |step| {
            let since = Instant::now();
            let closed = closed(&step, &holes);
            let step = closed.as_ref().map_or(step, |closed| closed.step(step));
            let flow = match step {
                ModelStep::Reading { done, of } => (run.listen)(Event::Reading { done, of }),
                ModelStep::Prompt(look) => {
                    speech.prompt(look);
                    Flow::Continue
                }
                ModelStep::Ready(upkeep) if first => {
                    clock.read = begin.elapsed();
                    (run.listen)(Event::Ready(upkeep))
                }
                ModelStep::Ready(_) => Flow::Continue,
                ModelStep::Token(piece, look) => {
                    let row = look.filter(|_| !recorders.is_empty()).map(|look| speech.row(look));
                    lost.extend(recorders.each(|recorder| recorder.step(piece, row)));
                    match speech.token(piece, look, name, &mut timeline.borrow_mut(), &mut **store) {
                        Ok(events) => {
                            clock.own += since.elapsed();
                            run.left += events.len() - 1;
                            // Whether it goes on is asked with the token itself.
                            let mut told = events.into_iter().map(|event| (run.listen)(event));
                            let flow = told.next().unwrap_or(Flow::Continue);
                            told.for_each(drop);
                            return flow;
                        }
                        Err(why) => {
                            failed = Some(why);
                            Flow::Stop
                        }
                    }
                }
            };
            clock.own += since.elapsed();
            flow
        });
        clock.all += begin.elapsed();
        unrecorded(lost, run);
        failed.map_or(Ok(finish), Err)
    }

    /// In a fork, the model begins to answer: what it would speak of is worth searching for.
    fn preview(&mut self, message: &str, run: &mut Running<'_>) -> Result<String, SeamError> {
        let nothing_away = self.timeline.live_len() == self.timeline.len();
        if self.rules.preview == 0 || nothing_away {
            return Ok(String::new());
        }
        let opening = self.opening()?;
        let (mut window, next) = (self.window(), self.timeline.next_position());
        for (n, piece) in opening.iter().enumerate() {
            window.push(Seen { position: Some(next.plus(n)), behind: 0, id: piece.id, begins: n == 0 });
        }
        let sampling = Sampling {
            max_tokens: self.rules.preview,
            temperature: 0.0,
            form: None,
            ..self.rules.sampling.clone()
        };
        let Self { model, timeline, frame, key, stands, .. } = self;
        let told = || messages(&frame.system, timeline, stands);
        let next = next.plus(opening.len());
        let prompt = Prompt { conversation: key, window: &window, messages: &told, next, aside: true };
        let (mut text, mut stopped) = (String::new(), false);
        model.generate(&prompt, &sampling, &Watch::nothing(), &mut |step| match step {
            ModelStep::Token(piece, _) => {
                text.push_str(&piece.text);
                Flow::Continue
            }
            ModelStep::Reading { done, of } => {
                let flow = (run.listen)(Event::Reading { done, of });
                stopped |= flow == Flow::Stop;
                flow
            }
            _ => Flow::Continue,
        })?;
        // What the model repeats of the message is searched for anyway.
        let text = if stopped || message.contains(text.trim()) { String::new() } else { text };
        run.tell(Event::Previewed { text: text.clone() });
        Ok(text)
    }

    /// What leaves so that the window holds no more than `budget`.
    fn plan(&self, budget: usize, current: Option<TurnId>) -> PrunePlan {
        let budget = budget.saturating_sub(self.standing());
        plan_prune(self.timeline.view(self.prefix.len()), &self.rules.context.prune(budget, current))
    }

    fn leave(&mut self, plan: &PrunePlan, run: &mut Running<'_>) -> Result<(), SeamError> {
        let tokens = |chunk: ChunkId| self.timeline.chunk(chunk).map_or(0, |chunk| chunk.live_len());
        let told: Vec<Event> = (plan.leaves.iter())
            .map(|l| Event::Left { chunk: l.chunk, tokens: tokens(l.chunk), why: l.why.to_string() })
            .collect();
        if let Some(change) = plan.change() {
            self.change(&change, Durability::Now)?;
        }
        run.left += told.len();
        told.into_iter().for_each(|event| run.tell(event));
        Ok(())
    }

    /// The index follows, and what is new gets its vectors.
    fn index(&mut self) -> Result<(), SeamError> {
        self.recall.follow(&mut *self.store, &self.timeline)?;
        // A host goes on with the rest while nobody waits.
        let at_once = if self.is_watched() { NEW_WHILE_WAITED_FOR } else { NEW_AT_ONCE };
        let most = self.recall.index().missing().min(at_once);
        self.recall.embed_some(&mut *self.store, &self.timeline, most, &mut |_| Flow::Continue)?;
        self.timeline.release_dead();
        self.show();
        Ok(())
    }

    /// Makes some of the vectors that are missing. Returns whether there are more to make.
    ///
    /// # Errors
    /// When the embedder or the store fails.
    pub(crate) fn embed_some(&mut self, most: usize) -> Result<bool, SeamError> {
        if self.recall.index().missing() == 0 || !self.recall.has_meaning() {
            return Ok(false);
        }
        let left = self.recall.embed_some(&mut *self.store, &self.timeline, most, &mut |_| Flow::Continue)?;
        self.timeline.release_dead();
        Ok(left.made > 0 && left.missing > 0)
    }

    /// How the turn went, for the record.
    fn note(
        &mut self,
        summary: &Summary,
        failed: Option<&SeamError>,
        premise: Option<&str>,
    ) -> Result<(), SeamError> {
        let finish = if failed.is_some() { "failed" } else { summary.finish.name() };
        let ms = |took: Duration| (took.as_secs_f64() * 1e4).round() / 10.0;
        let stages: serde_json::Map<String, serde_json::Value> =
            summary.stages.iter().map(|(stage, took)| (stage.name().to_owned(), json!(ms(*took)))).collect();
        let told = json!({
            "finish": finish,
            "why": failed.map(ToString::to_string),
            "tokens": summary.tokens,
            "returned": summary.returned,
            "left": summary.left,
            "live": summary.live,
            "ms": stages,
            "attention": summary.traces.iter().map(trace).collect::<Vec<_>>(),
            "premise": premise,
        });
        let turn = summary.turn.0.to_string();
        self.store.put_record(&self.name, Kind::Turn, &turn, Some(&told.to_string()))?;
        self.store.put_record(&self.name, Kind::Setting, RUNNING, None)
    }
}

/// Rows of attention without the slots that memories stand in.
struct Closed {
    mean: Vec<f32>,
    max: Vec<f32>,
    full: Vec<f32>,
}

impl Closed {
    fn step<'a>(&'a self, step: ModelStep<'a>) -> ModelStep<'a> {
        let look = Look { mean: &self.mean, max: &self.max, full: &self.full };
        match step {
            ModelStep::Prompt(_) => ModelStep::Prompt(look),
            ModelStep::Token(piece, Some(_)) => ModelStep::Token(piece, Some(look)),
            other => other,
        }
    }
}

/// What a step looked at, as if no memory stood in the window; none where none does.
fn closed(step: &ModelStep<'_>, holes: &Holes) -> Option<Closed> {
    let (ModelStep::Prompt(look) | ModelStep::Token(_, Some(look))) = step else { return None };
    if holes.is_empty() {
        return None;
    }
    let rows = look.full.chunks(look.mean.len().max(1));
    Some(Closed {
        mean: holes.close(look.mean),
        max: holes.close(look.max),
        full: rows.flat_map(|row| holes.close(row)).collect(),
    })
}

/// What cannot be recorded is told: the conversation goes on.
fn unrecorded(why: Vec<SeamError>, run: &mut Running<'_>) {
    why.into_iter().for_each(|why| run.tell(Event::Notice(format!("nothing more is recorded: {why}"))));
}

fn check(message: &str) -> Result<(), SeamError> {
    if message.trim().is_empty() {
        return Err(SeamError::asked("reading the message", "it is empty: say something"));
    }
    Ok(())
}

/// The shape of what a token of the answer looked at.
fn trace((step, stats): &(u64, AttentionStats)) -> serde_json::Value {
    let AttentionStats { mean, median, max, min, std } = stats;
    json!({ "step": step, "mean": mean, "median": median, "max": max, "min": min, "std": std })
}

/// What was said last has been taken back.
const TAKEN_BACK: Event = Event::Changed { what: "taken back", chunks: Vec::new() };

/// The most calls of tools in a turn.
const ROUNDS: usize = 5;

/// Vectors that are made at the end of a turn; where more are missing, as after an import, they come turn by turn.
const NEW_AT_ONCE: usize = 64;

/// The same where others wait for the model meanwhile.
const NEW_WHILE_WAITED_FOR: usize = 8;

impl<'a> Running<'a> {
    fn new(listen: &'a mut Listen<'a>) -> Self {
        Self { listen, stages: Vec::new(), returned: 0, left: 0, traces: Vec::new(), premise: None }
    }

    fn tell(&mut self, event: Event) {
        (self.listen)(event);
    }

    fn took(&mut self, stage: Stage, took: Duration) {
        self.stages.push((stage, took));
        self.tell(Event::Stage(stage, took));
    }

    fn timed<T>(
        &mut self,
        stage: Stage,
        work: impl FnOnce(&mut Self) -> Result<T, SeamError>,
    ) -> Result<T, SeamError> {
        let begin = Instant::now();
        let done = work(self)?;
        self.took(stage, begin.elapsed());
        Ok(done)
    }
}
