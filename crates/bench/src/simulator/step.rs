//! The steps of a simulation: what clients ask for, and what goes wrong meanwhile.

use super::clients::PendingMessage;
use super::disk::{PlantedBug, SimulatedDisk};
use super::invariants::{BeforeRequest, check_index};
use super::model::SimulatedModel;
use super::store::SimulatedStore;
use super::{CONVERSATIONS, SimulatedProcess, Simulation, rules};
use halo_core::Error;
use halo_core::model::StepFlow;
use halo_core::store::{RecordKind, Store};
use halo_core::testing::doubles::HashEmbedder;
use halo_core::token::{ChunkId, Role, TurnId};
use halo_core::tool_call::FunctionCall;
use halo_engine::align::SentMessage;
use halo_engine::event::Event;
use halo_engine::manual_edit::ManualEdit;
use halo_engine::session::{MESSAGE_ID_KEY, SearchIndexing, Session};
use halo_engine::turn::{EditAuthor, TurnInput};
use jiff::civil::Date;
use std::collections::BTreeMap;

/// The id of a process that only reads; no other has it.
const READER: u64 = u64::MAX;

const TODAY: Date = jiff::civil::date(2026, 11, 15);

/// What happens at an event of a turn, beside what the turn does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interruption {
    PowerCut,
    /// The process is paused: its lease expires, and another process serves the conversation meanwhile.
    Takeover,
    /// The client stops the answer, or goes away.
    Stop,
}

impl Simulation {
    pub(super) fn start_process(&mut self) {
        let id = self.rng.u64(..);
        self.processes.push(SimulatedProcess { id, sessions: BTreeMap::new() });
    }

    pub(super) fn run(&mut self, steps: u64) -> Result<(), String> {
        for _ in 0..steps {
            self.counts.steps += 1;
            let rates = [0, 2, 5, 15, 60];
            self.disk.set_fault_rate(rates[self.rng.usize(..rates.len())]);
            self.step()?;
            self.replace_dead_processes();
            self.check()?;
        }
        self.finish()
    }

    /// Without faults, every client gets its answer, and the store passes its checks.
    fn finish(&mut self) -> Result<(), String> {
        self.disk.set_fault_rate(0);
        self.interrupts = false;
        for name in CONVERSATIONS {
            self.disk.expire_lease(name);
            self.processes.iter_mut().for_each(|process| drop(process.sessions.remove(name)));
            // The model may fail; the client asks again.
            let mut attempts = 0;
            while attempts < 2
                || (attempts < 20 && self.clients.get(name).is_some_and(|client| client.pending.is_some()))
            {
                self.send_message(0, name, None)?;
                attempts += 1;
            }
            if let Some(pending) = self.clients.get(name).and_then(|client| client.pending.as_ref()) {
                return Err(format!("'{name}' does not answer {} although nothing fails", pending.id));
            }
        }
        self.check()?;
        (self.counts.store_faults, self.counts.stale_writes) = self.disk.fault_counts();
        Ok(())
    }

    fn step(&mut self) -> Result<(), String> {
        let process = self.rng.usize(..self.processes.len());
        let name = CONVERSATIONS[usize::from(self.rng.u32(..5) == 0)];
        match self.rng.u32(..100) {
            0..50 => self.send_message(process, name, None),
            50..58 => self.send_message(process, name, Some(TurnInput::Regenerate(EditAuthor::User))),
            58..63 => {
                self.send_message(process, name, Some(TurnInput::EditLast(String::new(), EditAuthor::User)))
            }
            63..74 => self.edit_chunk(process, name),
            74..76 => self.send_message(process, name, Some(TurnInput::ContinueLast)),
            76..78 => self.replace_answer(process, name),
            78..81 => self.append_history(process, name),
            81 => self.work_while_idle(process, name),
            82..86 => self.branch(process, name),
            86..91 => {
                self.log(format!("process {process} is restarted"));
                self.processes[process].sessions.clear();
                Ok(())
            }
            91..95 => {
                self.log(format!("the lease of '{name}' expires"));
                self.disk.expire_lease(name);
                Ok(())
            }
            95..98 => {
                self.cut_power();
                Ok(())
            }
            _ => {
                self.log(format!("process {process} is killed"));
                self.disk.kill(self.processes[process].id);
                Ok(())
            }
        }
    }

    fn log(&mut self, line: String) {
        self.trace.push(line);
    }

    fn cut_power(&mut self) {
        self.log("the power is cut".into());
        self.counts.power_cuts += 1;
        self.disk.cut_power(self.processes.iter().map(|process| process.id));
        self.clients.values_mut().for_each(super::clients::ClientView::lose_unsynced);
    }

    fn replace_dead_processes(&mut self) {
        for at in 0..self.processes.len() {
            if self.disk.is_dead(self.processes[at].id) {
                self.counts.crashes += 1;
                self.log(format!("process {at} is started again"));
                let id = self.rng.u64(..);
                self.processes[at] = SimulatedProcess { id, sessions: BTreeMap::new() };
            }
        }
    }

    /// The store has everything that clients were told, and nothing twice.
    fn check(&mut self) -> Result<(), String> {
        for (name, client) in &self.clients {
            self.disk.inspect(|store| client.check(name, store))?;
        }
        self.disk.inspect(check_branches)
    }

    /// The session of a conversation, opened where it is not.
    fn take_session(&mut self, process: usize, name: &str) -> Result<Session, Error> {
        let (disk, seed) = (self.disk.clone(), self.rng.u64(..));
        let process = &mut self.processes[process];
        if let Some(session) = process.sessions.remove(name) {
            return Ok(session);
        }
        let mut session = Session::open(
            Box::new(SimulatedStore::open(&disk, process.id)),
            Box::new(SimulatedModel::new(seed)),
            Some(Box::new(HashEmbedder)),
            name,
            rules(self.seed),
            &mut |_, _| {},
        )?;
        if self.bug == Some(PlantedBug::AnnounceBeforeCommit) {
            session.plant_announce_before_commit();
        }
        Ok(session)
    }

    /// Keeps a session that did not fail; after a failure, the conversation is opened again.
    fn keep_session(
        &mut self,
        process: usize,
        name: &str,
        mut session: Session,
        failed: bool,
    ) -> Result<(), String> {
        if failed || self.disk.is_dead(self.processes[process].id) {
            return Ok(());
        }
        let load = |store: &mut dyn Store| {
            let stored = store.load(name, halo_core::store::Access::Read);
            stored.map_err(|error| format!("'{name}' does not load: {error}"))
        };
        let stored = self.disk.inspect(load)?;
        let held = session.timeline();
        // Another process may have taken the conversation; then the next commit of this one fails.
        if stored.revision() <= held.revision() && stored.state_hash() != held.state_hash() {
            return Err(format!("'{name}': the store and the session of process {process} differ"));
        }
        let found = self.disk.without_faults(|| session.find_inconsistencies());
        let found = found.map_err(|error| format!("'{name}' cannot be checked: {error}"))?;
        if !found.is_empty() {
            return Err(format!("'{name}' of process {process}: {}", found.join("; ")));
        }
        if stored.revision() == session.timeline().revision() && self.rng.u32(..6) == 0 {
            self.check_search(name, &session)?;
        }
        self.processes[process].sessions.insert(name.to_owned(), session);
        Ok(())
    }

    /// The index of a session is that of a session that was opened now.
    fn check_search(&mut self, name: &str, session: &Session) -> Result<(), String> {
        let (query, seed) = (self.rng.usize(..1000), self.rng.u64(..));
        let opened = self.disk.without_faults(|| {
            Session::open_read_only(
                Box::new(SimulatedStore::open(&self.disk, READER)),
                Box::new(SimulatedModel::new(seed)),
                Some(Box::new(HashEmbedder)),
                name,
                rules(self.seed),
                SearchIndexing::Build,
            )
        });
        let fresh = opened.map_err(|error| format!("'{name}' cannot be read: {error}"))?;
        self.counts.searches += 1;
        check_index(session, &fresh, query).map_err(|why| format!("'{name}': {why}"))
    }

    /// A client sends a message, or one again whose answer it did not get. `other` is a request without a new message.
    fn send_message(&mut self, process: usize, name: &str, other: Option<TurnInput>) -> Result<(), String> {
        let mut session = match self.take_session(process, name) {
            Ok(session) => session,
            Err(error) => {
                self.log(format!("process {process} cannot open '{name}': {error}"));
                return Ok(());
            }
        };
        let Some(input) = self.choose_input(process, name, &mut session, other) else {
            return self.keep_session(process, name, session, false);
        };
        let (seed, id) = (self.rng.u64(..), self.processes[process].id);
        let before = BeforeRequest::new(session.timeline());
        let stored_before = self.stored_before(name)?;
        let mut turn = TurnObserver {
            simulation: self,
            rng: fastrand::Rng::with_seed(seed),
            process,
            name,
            before: &before,
            current: None,
            exceeded: false,
            violation: None,
        };
        let result = session.run_turn(input, TODAY, &mut |event| turn.on_event(&event));
        if let Some(violation) = turn.violation {
            return Err(violation);
        }
        self.disk.inspect(|store| stored_before.check_deletions(name, store))?;
        if result.is_ok() && !self.disk.is_dead(id) {
            before.check_anchors(session.timeline()).map_err(|why| format!("'{name}': {why}"))?;
        }
        match &result {
            Ok(_) => {
                self.log(format!("process {process} has answered in '{name}'"));
                if let Some(client) = self.clients.get_mut(name) {
                    client.pending = None;
                }
            }
            Err(error) => self.log(format!("process {process} has failed in '{name}': {error}")),
        }
        self.keep_session(process, name, session, result.is_err())
    }

    /// What the server makes of a client's request. A message whose id is stored is not stored again.
    fn choose_input(
        &mut self,
        process: usize,
        name: &str,
        session: &mut Session,
        other: Option<TurnInput>,
    ) -> Option<TurnInput> {
        let pending = self.clients.get(name).and_then(|client| client.pending.clone());
        if let Some(pending) = pending {
            self.counts.duplicates += 1;
            let settings = session.store().records(name, RecordKind::Setting).ok()?;
            let known =
                settings.iter().any(|record| record.key == MESSAGE_ID_KEY && record.value == pending.id);
            self.log(format!("process {process}: {} is sent again in '{name}' (known: {known})", pending.id));
            if let Some(client) = self.clients.get_mut(name).and_then(|client| client.pending.as_mut()) {
                client.attempts += 1;
            }
            if !known {
                session.set_next_message_id(Some(pending.id.clone()));
                return Some(TurnInput::Message(pending.text));
            }
            let waits = session.timeline().turns().last().is_some_and(|turn| turn.role == Role::User);
            if waits {
                return Some(TurnInput::AnswerLast);
            }
            // The answer was stored, and its end was lost.
            if let Some(client) = self.clients.get_mut(name) {
                client.pending = None;
            }
            return None;
        }
        if let Some(TurnInput::Regenerate(_) | TurnInput::ContinueLast) = other {
            self.log(format!("process {process}: {other:?} in '{name}'"));
            return other;
        }
        self.next_message += 1;
        let id = format!("#{}#", self.next_message);
        let words =
            ["the gun", "my sister Anna", "a lamp\n\nand a wall", "bees", "hello there, how are you today"];
        let text = format!("{id} {}", words[self.rng.usize(..words.len())]);
        self.log(format!("process {process}: {id} is sent in '{name}'"));
        let pending = PendingMessage { id: id.clone(), text: text.clone(), stored: false, attempts: 1 };
        self.clients.entry(name.to_owned()).or_default().pending = Some(pending);
        session.set_next_message_id(Some(id));
        Some(match other {
            Some(TurnInput::EditLast(_, author)) if !session.timeline().is_empty() => {
                TurnInput::EditLast(text, author)
            }
            _ => TurnInput::Message(text),
        })
    }

    fn random_chunks(&mut self, session: &Session) -> Vec<ChunkId> {
        let chunks: Vec<ChunkId> = session.timeline().chunks().map(|chunk| chunk.id()).collect();
        if chunks.is_empty() { Vec::new() } else { vec![chunks[self.rng.usize(..chunks.len())]] }
    }

    fn edit_chunk(&mut self, process: usize, name: &str) -> Result<(), String> {
        let Ok(mut session) = self.take_session(process, name) else { return Ok(()) };
        let edit = ManualEdit::ALL[self.rng.usize(..ManualEdit::ALL.len())];
        let chunks = self.random_chunks(&session);
        let before = session.timeline().state_hash();
        let result = session.apply_edit(edit, &chunks);
        self.log(format!("process {process}: edit of {chunks:?} in '{name}': {}", result.is_ok()));
        let mut failed = result.is_err();
        if let Ok(done) = result
            && self.rng.bool()
        {
            failed = session.undo(&done.undo).is_err();
            self.log(format!("process {process}: undone: {}", !failed));
            if !failed && session.timeline().state_hash() != before {
                return Err(format!(
                    "'{name}': the inverse of {edit:?} of {chunks:?} does not restore the state"
                ));
            }
            self.counts.undone += u64::from(!failed);
        }
        self.keep_session(process, name, session, failed)
    }

    /// What is stored: the session of a process may not know what another one has written since.
    fn stored_before(&self, name: &str) -> Result<BeforeRequest, String> {
        self.disk.inspect(|store| {
            let stored = store.load(name, halo_core::store::Access::Read);
            stored.map(|timeline| BeforeRequest::new(&timeline)).map_err(|error| error.to_string())
        })
    }

    /// The user edits the last answer.
    fn replace_answer(&mut self, process: usize, name: &str) -> Result<(), String> {
        let Ok(mut session) = self.take_session(process, name) else { return Ok(()) };
        let before = self.stored_before(name)?;
        let result = session.replace_answer("The lamp, and nothing else.");
        self.log(format!("process {process}: the answer in '{name}' is edited: {}", result.is_ok()));
        self.disk.inspect(|store| before.check_deletions(name, store))?;
        self.keep_session(process, name, session, result.is_err())
    }

    /// Memories are formed and placed while no client waits.
    fn work_while_idle(&mut self, process: usize, name: &str) -> Result<(), String> {
        let Ok(mut session) = self.take_session(process, name) else { return Ok(()) };
        let result = session.run_idle_memory_work(&|| false, &mut |_| {});
        self.log(format!("process {process}: idle work in '{name}': {result:?}"));
        self.counts.idle_work += u64::from(result == Ok(true));
        self.keep_session(process, name, session, result.is_err())
    }

    /// A client brings a history of its own, sometimes with a call of a function.
    fn append_history(&mut self, process: usize, name: &str) -> Result<(), String> {
        let Ok(mut session) = self.take_session(process, name) else { return Ok(()) };
        let call = FunctionCall { name: "look".into(), arguments: "{\"at\":\"wall\"}".into() };
        let mut messages = vec![SentMessage::new(Role::User, "What was it again?".into())];
        if self.rng.bool() {
            messages.push(SentMessage::with_calls(String::new(), vec![call]));
            messages.push(SentMessage::new(Role::Tool, "a lamp".into()));
        }
        messages.push(SentMessage::new(Role::Assistant, "A lamp on the wall.".into()));
        let result = session.append_sent_messages(&messages, &mut || StepFlow::Continue);
        self.log(format!("process {process}: a history for '{name}': {}", result.is_ok()));
        self.keep_session(process, name, session, result.is_err())
    }

    fn branch(&mut self, process: usize, name: &str) -> Result<(), String> {
        let Ok(mut session) = self.take_session(process, name) else { return Ok(()) };
        let branch = format!("branch {}", self.rng.u32(..3));
        let result = session.branch(&branch, None);
        self.log(format!("process {process}: '{name}' is branched as '{branch}': {}", result.is_ok()));
        self.keep_session(process, name, session, result.is_err())
    }
}

/// A branch is there whole or not at all: its link to its parent is written with it.
fn check_branches(store: &mut dyn Store) -> Result<(), String> {
    let failed = |error: Error| format!("the branches cannot be read: {error}");
    let conversations = store.list_conversations().map_err(failed)?;
    for branch in conversations.iter().filter(|summary| summary.name.starts_with("branch ")) {
        let settings = store.records(&branch.name, RecordKind::Setting).map_err(failed)?;
        if !settings.iter().any(|record| record.key == "branch.parent") {
            return Err(format!("'{}' is half a branch", branch.name));
        }
    }
    Ok(())
}

/// Sees the events of a turn as its client does, and interrupts it.
struct TurnObserver<'a> {
    simulation: &'a mut Simulation,
    rng: fastrand::Rng,
    process: usize,
    name: &'a str,
    before: &'a BeforeRequest,
    /// The message that is being answered.
    current: Option<TurnId>,
    /// Whether it was announced that the window exceeds its budget.
    exceeded: bool,
    violation: Option<String>,
}

impl TurnObserver<'_> {
    fn disk(&self) -> &SimulatedDisk {
        &self.simulation.disk
    }

    fn on_event(&mut self, event: &Event) -> StepFlow {
        // The clock decides when attention is announced, and one seed must always give the same run.
        if matches!(event, Event::Attention { .. }) {
            return StepFlow::Continue;
        }
        // A process that is gone announces nothing.
        if self.violation.is_some() || self.disk().is_dead(self.simulation.processes[self.process].id) {
            return StepFlow::Continue;
        }
        if let Err(violation) = self.see(event) {
            self.violation = Some(violation);
            return StepFlow::Stop;
        }
        self.interrupt()
    }

    fn see(&mut self, event: &Event) -> Result<(), String> {
        let stored = self.disk().stored_tokens(self.name);
        let simulation = &mut *self.simulation;
        let Some(client) = simulation.clients.get_mut(self.name) else { return Ok(()) };
        match event {
            Event::MessageStored { turn, .. } => {
                self.current = Some(*turn);
                simulation.counts.messages += 1;
                if let Some(pending) = &mut client.pending {
                    pending.stored = true;
                    let id = pending.id.clone();
                    client.see_message(&id);
                }
            }
            Event::Token { position, text, .. } => {
                simulation.counts.tokens += 1;
                if position.0 >= stored {
                    return Err(format!(
                        "'{}': the token at {} was announced, and {stored} tokens are stored",
                        self.name, position.0
                    ));
                }
                client.see_token(*position, text)?;
            }
            Event::Pruned { chunk, .. } => {
                let checked = self.before.check_pruned(*chunk, self.current);
                checked.map_err(|why| format!("'{}': {why}", self.name))?;
            }
            Event::BudgetExceeded(_) => self.exceeded = true,
            Event::Done(summary) => {
                client.see_end();
                // 8: no budget is exceeded silently.
                if summary.live_tokens > summary.token_limit && !self.exceeded {
                    return Err(format!(
                        "'{}': {} tokens are in a window of {}, and nobody was told",
                        self.name, summary.live_tokens, summary.token_limit
                    ));
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn interrupt(&mut self) -> StepFlow {
        if !self.simulation.interrupts {
            return StepFlow::Continue;
        }
        let interruption = match self.rng.u32(..400) {
            0 => Interruption::PowerCut,
            1..4 => Interruption::Takeover,
            4..8 => Interruption::Stop,
            _ => return StepFlow::Continue,
        };
        let (process, name) = (self.process, self.name);
        match interruption {
            Interruption::Stop => {
                self.simulation.log(format!("the client of process {process} stops the answer"));
                return StepFlow::Stop;
            }
            Interruption::PowerCut => self.simulation.cut_power(),
            Interruption::Takeover => {
                let other = 1 - process;
                self.simulation
                    .log(format!("process {process} is paused, and '{name}' goes to process {other}"));
                self.simulation.disk.expire_lease(name);
                self.simulation.processes[other].sessions.remove(name);
                // What the other process does is a turn of its own, with events of its own.
                if let Err(violation) = self.simulation.send_message(other, name, None) {
                    self.violation = Some(violation);
                    return StepFlow::Stop;
                }
                self.simulation.log(format!("process {process} goes on"));
            }
        }
        StepFlow::Continue
    }
}
