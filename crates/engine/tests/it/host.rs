//! Many conversations and one model, on the test doubles: who waits for whom, who hears what, and what is left when something
//! breaks.

use crate::common::test_rules;
use halo_core::attention::AttentionRequest;
use halo_core::model::{FinishReason, Model, ModelInfo, ModelStep, ModelToken, Prompt, Sampling, StepFlow};
use halo_core::testing::doubles::{HashEmbedder, InMemoryStore, ScriptedModel};
use halo_core::testing::shared_store::SharedStore;
use halo_core::{Error, ErrorKind};
use halo_engine::event::{Event, TurnSummary};
use halo_engine::host::{ConversationHandle, ConversationHost, EventListener, HostLimits, TurnRequest};
use halo_engine::manual_edit::ManualEdit;
use halo_engine::memory::{MemoryRules, ReflectionRules};
use halo_engine::rules::ConversationRules;
use halo_engine::session::Session;
use halo_engine::snapshot::SnapshotCell;
use halo_engine::turn::TurnInput;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// A model that says a word each time it is let.
#[derive(Clone)]
struct SteppedModel {
    info: ModelInfo,
    tokenizer: ScriptedModel,
    /// How many words it may say, and who waits for that.
    allowed_tokens: Arc<(Mutex<usize>, Condvar)>,
}

impl SteppedModel {
    fn new() -> Self {
        let cut = ScriptedModel::new(4096, Vec::new());
        Self { info: cut.info().clone(), tokenizer: cut, allowed_tokens: Arc::default() }
    }

    /// Lets it say so many words more.
    fn allow_tokens(&self, words: usize) {
        *self.allowed_tokens.0.lock().expect("nobody broke down") += words;
        self.allowed_tokens.1.notify_all();
    }
}

impl Model for SteppedModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        self.tokenizer.tokenize(text, special)
    }

    fn generate(
        &mut self,
        _: &Prompt<'_>,
        sampling: &Sampling,
        _: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        for n in 0..sampling.max_tokens {
            let mut may = self.allowed_tokens.0.lock().expect("nobody broke down");
            while *may == 0 {
                let waited = self
                    .allowed_tokens
                    .1
                    .wait_timeout(may, Duration::from_millis(2))
                    .expect("nobody broke down");
                may = waited.0;
                // The callback may stop the answer before its first token.
                if *may == 0 && listen(ModelStep::Prefill { done: n, total: 0 }) == StepFlow::Stop {
                    return Ok(FinishReason::Cancelled);
                }
            }
            *may -= 1;
            drop(may);
            let piece = self.tokenizer.tokenize(&format!(" word{n}"), false)?.remove(0);
            if listen(ModelStep::Token(&piece, None)) == StepFlow::Stop {
                return Ok(FinishReason::Cancelled);
            }
        }
        Ok(FinishReason::Length)
    }
}

#[derive(Default)]
struct HostEventLog(Mutex<Vec<(String, u64, Event)>>);

impl EventListener for HostEventLog {
    fn on_event(&self, conversation: &str, number: u64, event: &Event, _: &SnapshotCell) {
        self.0.lock().expect("nobody broke down").push((conversation.to_owned(), number, event.clone()));
    }
}

struct HostFixture {
    host: ConversationHost,
    model: SteppedModel,
    events: Arc<HostEventLog>,
}

fn host_fixture(idle: Duration) -> HostFixture {
    host_fixture_with_rules(idle, test_rules(0))
}

fn host_fixture_with_rules(idle: Duration, rules: ConversationRules) -> HostFixture {
    let (model, heard, store) =
        (SteppedModel::new(), Arc::new(HostEventLog::default()), SharedStore::new(InMemoryStore::default()));
    let speaks = model.clone();
    let open = move |name: &str, progress: &mut dyn FnMut(usize, usize)| {
        if name == "broken" {
            panic!("a defect while opening");
        }
        let (store, model) = (Box::new(store.clone()), Box::new(speaks.clone()));
        Session::open(store, model, Some(Box::new(HashEmbedder)), name, rules.clone(), progress)
    };
    let host = ConversationHost::new(
        Box::new(open),
        Arc::clone(&heard) as Arc<dyn EventListener>,
        HostLimits { idle_timeout: idle, max_open: 8 },
    );
    HostFixture { host, model, events: heard }
}

impl HostFixture {
    fn conversation(&self, name: &str) -> Arc<ConversationHandle> {
        self.host.conversation(name).unwrap_or_else(|why| panic!("{name}: {why}"))
    }

    /// Asks, and hears of everything.
    fn ask(&self, name: &str, text: &str) -> (Receiver<Event>, Receiver<Result<TurnSummary, Error>>) {
        let (tell, told) = channel();
        let (end, ended) = channel();
        let request = TurnRequest {
            input: TurnInput::Message(text.into()),
            client: name.into(),
            sampling: None,
            message_id: None,
        };
        let asked = self
            .conversation(name)
            .submit_turn(request, forward_events(tell), move |done| drop(end.send(done)));
        asked.unwrap_or_else(|why| panic!("{why}"));
        (told, ended)
    }
}

fn forward_events(tell: Sender<Event>) -> Box<dyn FnMut(&Event) -> StepFlow + Send> {
    Box::new(move |event| {
        // Who does not listen any more has heard enough.
        if tell.send(event.clone()).is_ok() { StepFlow::Continue } else { StepFlow::Stop }
    })
}

fn wait_for(told: &Receiver<Event>, what: impl Fn(&Event) -> bool) -> Event {
    loop {
        let event = told.recv_timeout(Duration::from_secs(20)).expect("it comes");
        if what(&event) {
            return event;
        }
    }
}

impl HostFixture {
    /// Waits until memories were formed so many times.
    fn wait_for_memories(&self, times: usize) {
        for _ in 0..4000 {
            let heard = self.events.0.lock().expect("nobody broke down");
            let formed = |event: &Event| {
                matches!(event, Event::MemoryChanged { action: halo_engine::event::MemoryAction::Formed, .. })
            };
            if heard.iter().filter(|(_, _, event)| formed(event)).count() >= times {
                return;
            }
            drop(heard);
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("no memory was formed");
    }
}

const NO_IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// While one answers, others wait in line and hear their place; looking and the user's hand elsewhere wait for nobody.
#[test]
fn scheduler_queues_answers_but_not_edits() {
    let house = host_fixture(NO_IDLE_TIMEOUT);
    let (first, first_done) = house.ask("a", "Hello there");
    wait_for(&first, |event| matches!(event, Event::MessageStored { .. }));
    let (second, second_done) = house.ask("b", "Hello too");
    let place = wait_for(&second, |event| matches!(event, Event::Queued { .. }));
    assert_eq!(place, Event::Queued { ahead: 1 });
    // A word of the first is out; the second has not even been stored.
    house.model.allow_tokens(1);
    wait_for(&first, |event| matches!(event, Event::Token { .. }));
    let seen = house.conversation("a").snapshot_cell().get();
    assert_eq!(seen.answer.expect("it is answering").tokens.len(), 1);
    assert_eq!(seen.state.timeline.turns().len(), 2, "the message and the opening of its answer are there");
    assert!(house.conversation("b").snapshot_cell().get().state.timeline.is_empty());
    // A third conversation can be changed meanwhile.
    let (done, changed) = channel();
    let job = house.conversation("c").submit(move |session, _| {
        let _ = done.send(session.apply_edit(ManualEdit::Pin, &[]).is_ok());
    });
    job.expect("it is open");
    assert_eq!(changed.recv_timeout(Duration::from_secs(20)), Ok(true));
    house.model.allow_tokens(15);
    let ended = [first_done, second_done].map(|done| done.recv().expect("it ends").expect("it is answered"));
    assert_eq!(ended.map(|summary| summary.tokens), [8, 8]);
    assert!(house.conversation("a").snapshot_cell().get().answer.is_none());
    // Everybody heard of everything, in one order.
    let heard = house.events.0.lock().expect("nobody broke down");
    let numbers: Vec<u64> = heard.iter().map(|(_, number, _)| *number).collect();
    assert!(numbers.is_sorted() && numbers.windows(2).all(|two| two[0] != two[1]), "{numbers:?}");
    let done = heard.iter().filter(|(_, _, event)| matches!(event, Event::Done(_)));
    assert_eq!(done.map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
}

/// A client that disconnects stops its answer; the tokens so far stay. A client in the queue leaves no trace.
#[test]
fn disconnect_stops_answer_and_leaves_queue() {
    let house = host_fixture(NO_IDLE_TIMEOUT);
    let (first, first_done) = house.ask("a", "Hello there");
    wait_for(&first, |event| matches!(event, Event::MessageStored { .. }));
    let (second, second_done) = house.ask("b", "Hello too");
    wait_for(&second, |event| matches!(event, Event::Queued { .. }));
    drop(second);
    let refused =
        second_done.recv_timeout(Duration::from_secs(20)).expect("it ends").expect_err("it gave up");
    assert!(refused.message.contains("nothing was stored"), "{refused}");
    assert!(house.conversation("b").snapshot_cell().get().state.timeline.is_empty());
    house.model.allow_tokens(2);
    wait_for(&first, |event| matches!(event, Event::Token { .. }));
    wait_for(&first, |event| matches!(event, Event::Token { .. }));
    house.conversation("a").stop();
    let summary = first_done.recv_timeout(Duration::from_secs(20)).expect("it ends").expect("it was begun");
    assert_eq!((summary.finish, summary.tokens), (FinishReason::Cancelled, 2));
    assert!(
        house
            .conversation("a")
            .snapshot_cell()
            .get()
            .state
            .timeline
            .context_window(0)
            .text()
            .ends_with(" word0 word1")
    );
}

/// What is done by hand can be taken back, and who looks sees both.
#[test]
fn manual_edit_can_be_undone() {
    let house = host_fixture(NO_IDLE_TIMEOUT);
    house.model.allow_tokens(8);
    let (_told, done) = house.ask("a", "Hello there");
    done.recv().expect("it ends").expect("it is answered");
    let desk = house.conversation("a");
    let text = || desk.snapshot_cell().get().state.timeline.context_window(0).text();
    let before = text();
    let (tell, told) = channel();
    let job = desk.submit(move |session, _| {
        let chunk = "u0.0".parse().expect("a name");
        drop(tell.send(session.apply_edit(ManualEdit::Delete, &[chunk])));
    });
    job.expect("it is open");
    let sent = told.recv().expect("it is done").expect("it can be");
    assert_ne!(text(), before);
    let (tell, told) = channel();
    desk.submit(move |session, _| drop(tell.send(session.undo(&sent.undo)))).expect("it is open");
    told.recv().expect("it is done").expect("it can be");
    assert_eq!(text(), before);
}

/// A panic in one conversation ends neither the program nor the others, and the conversation can be opened again.
#[test]
fn panic_closes_only_its_own_conversation() {
    let house = host_fixture(NO_IDLE_TIMEOUT);
    assert!(house.host.conversation("broken").is_err_and(|why| why.kind == ErrorKind::Internal));
    house.model.allow_tokens(8);
    let (_told, done) = house.ask("a", "Hello there");
    done.recv().expect("it ends").expect("it is answered");
    let old = house.conversation("a");
    old.submit(|_, _| panic!("a defect")).expect("it is open");
    let again = loop {
        let desk = house.conversation("a");
        if !Arc::ptr_eq(&desk, &old) {
            break desk;
        }
        std::thread::yield_now();
    };
    assert!(again.snapshot_cell().get().state.timeline.context_window(0).text().contains("Hello there"));
    assert!(old.submit(|_, _| {}).is_err());
}

/// What nobody uses is closed, and opens again when somebody does; at the end everything is stored.
#[test]
fn idle_conversation_closes_and_reopens() {
    let house = host_fixture(Duration::from_millis(30));
    house.model.allow_tokens(8);
    let (_told, done) = house.ask("a", "Hello there");
    done.recv().expect("it ends").expect("it is answered");
    while !house.host.open_conversations().is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(
        house
            .conversation("a")
            .snapshot_cell()
            .get()
            .state
            .timeline
            .context_window(0)
            .text()
            .contains("Hello there")
    );
    let (told, done) = house.ask("a", "And again");
    wait_for(&told, |event| matches!(event, Event::MessageStored { .. }));
    house.model.allow_tokens(3);
    for _ in 0..3 {
        wait_for(&told, |event| matches!(event, Event::Token { .. }));
    }
    house.host.close_all();
    let summary = done.recv().expect("it ends").expect("it was begun");
    assert_eq!((summary.finish, summary.tokens), (FinishReason::Cancelled, 3));
    assert!(house.host.open_conversations().is_empty());
}

/// Memories are formed in idle time. A request in any conversation preempts that, and it begins again later.
#[test]
fn memory_formation_is_preempted_by_requests() {
    let mut rules = test_rules(400);
    rules.memory = Some(MemoryRules { range_tokens: 8, max_tokens: 8, ..MemoryRules::default() });
    let house = host_fixture_with_rules(NO_IDLE_TIMEOUT, rules);
    house.model.allow_tokens(8);
    let (_told, done) = house.ask("a", "Hello there and good morning to you");
    done.recv().expect("it ends").expect("it is answered");
    // It is being formed, and has said three words.
    house.model.allow_tokens(3);
    while *house.model.allowed_tokens.0.lock().expect("nobody broke down") > 0 {
        std::thread::yield_now();
    }
    let (told, done) = house.ask("b", "Hello too");
    wait_for(&told, |event| matches!(event, Event::MessageStored { .. }));
    assert!(house.conversation("a").snapshot_cell().get().state.memories.is_empty(), "it was left");
    house.model.allow_tokens(8);
    done.recv().expect("it ends").expect("it is answered");
    house.model.allow_tokens(64);
    house.wait_for_memories(2);
    let memories = |name: &str| house.conversation(name).snapshot_cell().get().state.memories.len();
    assert_eq!((memories("a"), memories("b")), (1, 1), "and begun again, where nobody waits");
    // So is what the same conversation is asked.
    let (_told, done) = house.ask("a", "And another thing that is long enough");
    done.recv().expect("it ends").expect("it is answered");
    house.host.close_all();
}

/// After a while of quiet the model looks back, once.
#[test]
fn reflection_runs_once_after_idle_time() {
    let mut rules = test_rules(400);
    let quiet = ReflectionRules { idle_for: Duration::from_millis(60), min_messages: 2 };
    rules.memory = Some(MemoryRules {
        range_tokens: 5000,
        max_tokens: 8,
        reflection: Some(quiet),
        ..MemoryRules::default()
    });
    let house = host_fixture_with_rules(NO_IDLE_TIMEOUT, rules);
    house.model.allow_tokens(16);
    let (_told, done) = house.ask("a", "Hello there");
    done.recv().expect("it ends").expect("it is answered");
    house.wait_for_memories(1);
    let memories = house.conversation("a").snapshot_cell().get().state.memories.clone();
    assert!(memories.len() == 1 && memories[0].reflection);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(house.conversation("a").snapshot_cell().get().state.memories.len(), 1);
}
