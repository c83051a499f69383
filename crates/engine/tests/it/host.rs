//! Several conversations that share one model, on the test doubles: queueing, events, and failures.

use crate::common::test_rules;
use halo_core::attention::AttentionRequest;
use halo_core::model::{FinishReason, Model, ModelInfo, ModelStep, ModelToken, Prompt, Sampling, StepFlow};
use halo_core::store::{Access, Store};
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

/// A model that generates a token only when the test allows one.
#[derive(Clone)]
struct SteppedModel {
    info: ModelInfo,
    tokenizer: ScriptedModel,
    /// The number of tokens that the model may still generate, and a condition variable for its changes.
    allowed_tokens: Arc<(Mutex<usize>, Condvar)>,
}

impl SteppedModel {
    fn new() -> Self {
        let tokenizer = ScriptedModel::new(4096, Vec::new());
        Self { info: tokenizer.info().clone(), tokenizer, allowed_tokens: Arc::default() }
    }

    fn allow_tokens(&self, count: usize) {
        *self.allowed_tokens.0.lock().expect("the lock is not poisoned") += count;
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
            let mut allowed = self.allowed_tokens.0.lock().expect("the lock is not poisoned");
            while *allowed == 0 {
                let waited = self
                    .allowed_tokens
                    .1
                    .wait_timeout(allowed, Duration::from_millis(2))
                    .expect("the lock is not poisoned");
                allowed = waited.0;
                // The callback may stop the answer before its first token.
                if *allowed == 0 && listen(ModelStep::Prefill { done: n, total: 0 }) == StepFlow::Stop {
                    return Ok(FinishReason::Cancelled);
                }
            }
            *allowed -= 1;
            drop(allowed);
            let token = self.tokenizer.tokenize(&format!(" word{n}"), false)?.remove(0);
            if listen(ModelStep::Token(&token, None)) == StepFlow::Stop {
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
        self.0.lock().expect("the lock is not poisoned").push((
            conversation.to_owned(),
            number,
            event.clone(),
        ));
    }
}

struct HostFixture {
    host: ConversationHost,
    model: SteppedModel,
    events: Arc<HostEventLog>,
    store: SharedStore<InMemoryStore>,
}

fn host_fixture(idle: Duration) -> HostFixture {
    host_fixture_with_rules(idle, test_rules(0))
}

fn host_fixture_with_rules(idle: Duration, rules: ConversationRules) -> HostFixture {
    let (model, events, store) =
        (SteppedModel::new(), Arc::new(HostEventLog::default()), SharedStore::new(InMemoryStore::default()));
    let (session_model, session_store) = (model.clone(), store.clone());
    let open = move |name: &str, progress: &mut dyn FnMut(usize, usize)| {
        if name == "broken" {
            panic!("a bug while opening");
        }
        let (store, model) = (Box::new(session_store.clone()), Box::new(session_model.clone()));
        Session::open(store, model, Some(Box::new(HashEmbedder)), name, rules.clone(), progress)
    };
    let host = ConversationHost::new(
        Box::new(open),
        Arc::clone(&events) as Arc<dyn EventListener>,
        HostLimits { idle_timeout: idle, max_open: 8, parallel: 1 },
    );
    HostFixture { host, model, events, store }
}

impl HostFixture {
    fn conversation(&self, name: &str) -> Arc<ConversationHandle> {
        self.host.conversation(name).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Submits a message; returns the receivers of its events and of its result.
    fn ask(&self, name: &str, text: &str) -> (Receiver<Event>, Receiver<Result<TurnSummary, Error>>) {
        let (event_sender, events) = channel();
        let (result_sender, result) = channel();
        let request = TurnRequest {
            input: TurnInput::Message(text.into()),
            client: name.into(),
            sampling: None,
            message_id: None,
            place: None,
        };
        let submitted =
            self.conversation(name).submit_turn(request, forward_events(event_sender), move |result| {
                drop(result_sender.send(result));
            });
        submitted.unwrap_or_else(|error| panic!("{error}"));
        (events, result)
    }
}

fn forward_events(sender: Sender<Event>) -> Box<dyn FnMut(&Event) -> StepFlow + Send> {
    Box::new(move |event| {
        // A dropped receiver is a client that disconnected.
        if sender.send(event.clone()).is_ok() { StepFlow::Continue } else { StepFlow::Stop }
    })
}

fn wait_for(events: &Receiver<Event>, is_expected: impl Fn(&Event) -> bool) -> Event {
    loop {
        let event = events.recv_timeout(Duration::from_secs(20)).expect("the event arrives");
        if is_expected(&event) {
            return event;
        }
    }
}

impl HostFixture {
    fn wait_for_memories(&self, count: usize) {
        for _ in 0..4000 {
            let events = self.events.0.lock().expect("the lock is not poisoned");
            let formed = |event: &Event| {
                matches!(event, Event::MemoryChanged { action: halo_engine::event::MemoryAction::Formed, .. })
            };
            if events.iter().filter(|(_, _, event)| formed(event)).count() >= count {
                return;
            }
            drop(events);
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("fewer than {count} memories were formed");
    }
}

const NO_IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// During an answer, other requests are queued and receive their queue position. Snapshots and manual edits do not wait.
#[test]
fn scheduler_queues_answers_but_not_edits() {
    let fixture = host_fixture(NO_IDLE_TIMEOUT);
    let (first, first_done) = fixture.ask("a", "Hello there");
    wait_for(&first, |event| matches!(event, Event::MessageStored { .. }));
    let (second, second_done) = fixture.ask("b", "Hello too");
    let queued = wait_for(&second, |event| matches!(event, Event::Queued { .. }));
    assert_eq!(queued, Event::Queued { ahead: 1 });
    // The first answer has one token; the second message is not stored yet.
    fixture.model.allow_tokens(1);
    wait_for(&first, |event| matches!(event, Event::Token { .. }));
    let snapshot = fixture.conversation("a").snapshot_cell().get();
    assert_eq!(snapshot.answer.expect("an answer is being generated").tokens.len(), 1);
    assert_eq!(snapshot.state.timeline.turns().len(), 2, "the message and the start of its answer");
    assert!(fixture.conversation("b").snapshot_cell().get().state.timeline.is_empty());
    // A third conversation can be edited meanwhile.
    let (sender, edited) = channel();
    let job = fixture.conversation("c").submit(move |session, _| {
        let _ = sender.send(session.apply_edit(ManualEdit::Pin, &[]).is_ok());
    });
    job.expect("the conversation is open");
    assert_eq!(edited.recv_timeout(Duration::from_secs(20)), Ok(true));
    fixture.model.allow_tokens(15);
    let summaries =
        [first_done, second_done].map(|done| done.recv().expect("the turn ends").expect("the turn succeeds"));
    assert_eq!(summaries.map(|summary| summary.tokens), [8, 8]);
    assert!(fixture.conversation("a").snapshot_cell().get().answer.is_none());
    // The listener received all events with ascending numbers.
    let events = fixture.events.0.lock().expect("the lock is not poisoned");
    let numbers: Vec<u64> = events.iter().map(|(_, number, _)| *number).collect();
    assert!(numbers.is_sorted() && numbers.windows(2).all(|pair| pair[0] != pair[1]), "{numbers:?}");
    let done = events.iter().filter(|(_, _, event)| matches!(event, Event::Done(_)));
    assert_eq!(done.map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
}

/// The store loses commits that were not synced, as a database server does in a crash, while an answer is generated. The
/// answer fails; the next message is answered on the state that the store has, without closing the conversation.
#[test]
fn conversation_reloads_after_a_failed_commit() {
    let fixture = host_fixture(NO_IDLE_TIMEOUT);
    let (events, done) = fixture.ask("a", "Hello there");
    fixture.model.allow_tokens(3);
    for _ in 0..3 {
        wait_for(&events, |event| matches!(event, Event::Token { .. }));
    }
    fixture.store.0.lock().expect("the lock is not poisoned").simulate_crash();
    fixture.model.allow_tokens(1);
    let error = done.recv_timeout(Duration::from_secs(20)).expect("the turn ends");
    assert!(error.is_err(), "the store has lost what the next token follows");
    for message in ["And now?", "Once more"] {
        let (_events, done) = fixture.ask("a", message);
        fixture.model.allow_tokens(8);
        let summary = done.recv_timeout(Duration::from_secs(20)).expect("the turn ends");
        assert_eq!(summary.expect("the turn succeeds").tokens, 8, "{message}");
    }
    let stored = fixture.store.clone().load("a", Access::Read).expect("the conversation loads");
    let snapshot = fixture.conversation("a").snapshot_cell().get();
    assert_eq!(stored.state_hash(), snapshot.state.timeline.state_hash());
    assert!(stored.context_window(0).text().contains("Hello there"));
}

/// A stopped answer keeps its tokens. A client that disconnects in the queue leaves no trace.
#[test]
fn disconnect_stops_answer_and_leaves_queue() {
    let fixture = host_fixture(NO_IDLE_TIMEOUT);
    let (first, first_done) = fixture.ask("a", "Hello there");
    wait_for(&first, |event| matches!(event, Event::MessageStored { .. }));
    let (second, second_done) = fixture.ask("b", "Hello too");
    wait_for(&second, |event| matches!(event, Event::Queued { .. }));
    drop(second);
    let error = second_done
        .recv_timeout(Duration::from_secs(20))
        .expect("the turn ends")
        .expect_err("the client gave up");
    assert!(error.message.contains("nothing was stored"), "{error}");
    assert!(fixture.conversation("b").snapshot_cell().get().state.timeline.is_empty());
    fixture.model.allow_tokens(2);
    wait_for(&first, |event| matches!(event, Event::Token { .. }));
    wait_for(&first, |event| matches!(event, Event::Token { .. }));
    fixture.conversation("a").stop();
    let summary = first_done
        .recv_timeout(Duration::from_secs(20))
        .expect("the turn ends")
        .expect("the answer has tokens");
    assert_eq!((summary.finish, summary.tokens), (FinishReason::Cancelled, 2));
    assert!(
        fixture
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

/// The snapshot shows a manual edit and its undo.
#[test]
fn manual_edit_can_be_undone() {
    let fixture = host_fixture(NO_IDLE_TIMEOUT);
    fixture.model.allow_tokens(8);
    let (_events, done) = fixture.ask("a", "Hello there");
    done.recv().expect("the turn ends").expect("the turn succeeds");
    let conversation = fixture.conversation("a");
    let text = || conversation.snapshot_cell().get().state.timeline.context_window(0).text();
    let before = text();
    let (sender, result) = channel();
    let job = conversation.submit(move |session, _| {
        let chunk = "u0.0".parse().expect("a chunk id");
        drop(sender.send(session.apply_edit(ManualEdit::Delete, &[chunk])));
    });
    job.expect("the conversation is open");
    let edit = result.recv().expect("the job runs").expect("the chunk is deleted");
    assert_ne!(text(), before);
    let (sender, result) = channel();
    conversation
        .submit(move |session, _| drop(sender.send(session.undo(&edit.undo))))
        .expect("the conversation is open");
    result.recv().expect("the job runs").expect("the edit is undone");
    assert_eq!(text(), before);
}

/// A panic in one conversation ends neither the program nor the others, and the conversation can be opened again.
#[test]
fn panic_closes_only_its_own_conversation() {
    let fixture = host_fixture(NO_IDLE_TIMEOUT);
    assert!(fixture.host.conversation("broken").is_err_and(|error| error.kind == ErrorKind::Internal));
    fixture.model.allow_tokens(8);
    let (_events, done) = fixture.ask("a", "Hello there");
    done.recv().expect("the turn ends").expect("the turn succeeds");
    let old = fixture.conversation("a");
    old.submit(|_, _| panic!("a bug")).expect("the conversation is open");
    let reopened = loop {
        let conversation = fixture.conversation("a");
        if !Arc::ptr_eq(&conversation, &old) {
            break conversation;
        }
        std::thread::yield_now();
    };
    assert!(reopened.snapshot_cell().get().state.timeline.context_window(0).text().contains("Hello there"));
    assert!(old.submit(|_, _| {}).is_err());
}

/// An unused conversation is closed and reopens on the next request. `close_all` stops a running answer and stores it.
#[test]
fn idle_conversation_closes_and_reopens() {
    let fixture = host_fixture(Duration::from_millis(30));
    fixture.model.allow_tokens(8);
    let (_events, done) = fixture.ask("a", "Hello there");
    done.recv().expect("the turn ends").expect("the turn succeeds");
    while !fixture.host.open_conversations().is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(
        fixture
            .conversation("a")
            .snapshot_cell()
            .get()
            .state
            .timeline
            .context_window(0)
            .text()
            .contains("Hello there")
    );
    let (events, done) = fixture.ask("a", "And again");
    wait_for(&events, |event| matches!(event, Event::MessageStored { .. }));
    fixture.model.allow_tokens(3);
    for _ in 0..3 {
        wait_for(&events, |event| matches!(event, Event::Token { .. }));
    }
    fixture.host.close_all();
    let summary = done.recv().expect("the turn ends").expect("the answer has tokens");
    assert_eq!((summary.finish, summary.tokens), (FinishReason::Cancelled, 3));
    assert!(fixture.host.open_conversations().is_empty());
}

/// Memories are formed in idle time. A request in any conversation preempts the formation, which restarts later.
#[test]
fn memory_formation_is_preempted_by_requests() {
    let mut rules = test_rules(400);
    rules.memory = Some(MemoryRules { range_tokens: 8, max_tokens: 8, ..MemoryRules::default() });
    let fixture = host_fixture_with_rules(NO_IDLE_TIMEOUT, rules);
    fixture.model.allow_tokens(8);
    let (_events, done) = fixture.ask("a", "Hello there and good morning to you");
    done.recv().expect("the turn ends").expect("the turn succeeds");
    // The formation has generated three tokens.
    fixture.model.allow_tokens(3);
    while *fixture.model.allowed_tokens.0.lock().expect("the lock is not poisoned") > 0 {
        std::thread::yield_now();
    }
    let (events, done) = fixture.ask("b", "Hello too");
    wait_for(&events, |event| matches!(event, Event::MessageStored { .. }));
    assert!(
        fixture.conversation("a").snapshot_cell().get().state.memories.is_empty(),
        "the formation was preempted"
    );
    fixture.model.allow_tokens(8);
    done.recv().expect("the turn ends").expect("the turn succeeds");
    fixture.model.allow_tokens(64);
    fixture.wait_for_memories(2);
    let memories = |name: &str| fixture.conversation(name).snapshot_cell().get().state.memories.len();
    assert_eq!((memories("a"), memories("b")), (1, 1), "the formation restarts in idle time");
    // A request in the same conversation preempts too.
    let (_events, done) = fixture.ask("a", "And another thing that is long enough");
    done.recv().expect("the turn ends").expect("the turn succeeds");
    fixture.host.close_all();
}

/// After the idle time one reflection is formed.
#[test]
fn reflection_runs_once_after_idle_time() {
    let mut rules = test_rules(400);
    let reflection = ReflectionRules { idle_for: Duration::from_millis(60), min_messages: 2 };
    rules.memory = Some(MemoryRules {
        range_tokens: 5000,
        max_tokens: 8,
        reflection: Some(reflection),
        ..MemoryRules::default()
    });
    let fixture = host_fixture_with_rules(NO_IDLE_TIMEOUT, rules);
    fixture.model.allow_tokens(16);
    let (_events, done) = fixture.ask("a", "Hello there");
    done.recv().expect("the turn ends").expect("the turn succeeds");
    fixture.wait_for_memories(1);
    let memories = fixture.conversation("a").snapshot_cell().get().state.memories.clone();
    assert!(memories.len() == 1 && memories[0].reflection);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(fixture.conversation("a").snapshot_cell().get().state.memories.len(), 1);
}
