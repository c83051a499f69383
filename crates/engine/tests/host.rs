//! Many conversations and one model, on the test doubles: who waits for whom, who hears what, and what is left when something
//! breaks.

mod common;

use common::rules;
use halo_core::attention::Watch;
use halo_core::seams::{Finish, Flow, Model, ModelInfo, ModelStep, Piece, Prompt, Sampling, SeamError};
use halo_core::testing::doubles::{HashEmbedder, MemoryStore, ScriptedModel};
use halo_core::testing::shared::Shared;
use halo_engine::board::Board;
use halo_engine::event::{Event, Summary};
use halo_engine::host::{Audience, Desk, Host, HostLimits, Request};
use halo_engine::memory::{MemoryRules, Quiet};
use halo_engine::rules::Rules;
use halo_engine::session::Session;
use halo_engine::signal::Signal;
use halo_engine::turn::Say;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// A model that says a word each time it is let.
#[derive(Clone)]
struct Patient {
    info: ModelInfo,
    cut: ScriptedModel,
    /// How many words it may say, and who waits for that.
    may: Arc<(Mutex<usize>, Condvar)>,
}

impl Patient {
    fn new() -> Self {
        let cut = ScriptedModel::new(4096, Vec::new());
        Self { info: cut.info().clone(), cut, may: Arc::default() }
    }

    /// Lets it say so many words more.
    fn let_say(&self, words: usize) {
        *self.may.0.lock().expect("nobody broke down") += words;
        self.may.1.notify_all();
    }
}

impl Model for Patient {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<Piece>, SeamError> {
        self.cut.tokenize(text, special)
    }

    fn generate(
        &mut self,
        _: &Prompt<'_>,
        sampling: &Sampling,
        _: &Watch,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        for n in 0..sampling.max_tokens {
            let mut may = self.may.0.lock().expect("nobody broke down");
            while *may == 0 {
                let waited =
                    self.may.1.wait_timeout(may, Duration::from_millis(2)).expect("nobody broke down");
                may = waited.0;
                // Whoever listens may have heard enough before there is a word.
                if *may == 0 && listen(ModelStep::Reading { done: n, of: 0 }) == Flow::Stop {
                    return Ok(Finish::Aborted);
                }
            }
            *may -= 1;
            drop(may);
            let piece = self.cut.tokenize(&format!(" word{n}"), false)?.remove(0);
            if listen(ModelStep::Token(&piece, None)) == Flow::Stop {
                return Ok(Finish::Aborted);
            }
        }
        Ok(Finish::Length)
    }
}

#[derive(Default)]
struct Heard(Mutex<Vec<(String, u64, Event)>>);

impl Audience for Heard {
    fn hear(&self, conversation: &str, number: u64, event: &Event, _: &Board) {
        self.0.lock().expect("nobody broke down").push((conversation.to_owned(), number, event.clone()));
    }
}

struct House {
    host: Host,
    model: Patient,
    heard: Arc<Heard>,
}

fn house(idle: Duration) -> House {
    house_by(idle, rules(0))
}

fn house_by(idle: Duration, rules: Rules) -> House {
    let (model, heard, store) =
        (Patient::new(), Arc::new(Heard::default()), Shared::new(MemoryStore::default()));
    let speaks = model.clone();
    let open = move |name: &str, progress: &mut dyn FnMut(usize, usize)| {
        if name == "broken" {
            panic!("a mistake in opening it");
        }
        let (store, model) = (Box::new(store.clone()), Box::new(speaks.clone()));
        Session::open(store, model, Some(Box::new(HashEmbedder)), name, rules.clone(), progress)
    };
    let host =
        Host::new(Box::new(open), Arc::clone(&heard) as Arc<dyn Audience>, HostLimits { idle, open: 8 });
    House { host, model, heard }
}

impl House {
    fn desk(&self, name: &str) -> Arc<Desk> {
        self.host.desk(name).unwrap_or_else(|why| panic!("{name}: {why}"))
    }

    /// Asks, and hears of everything.
    fn ask(&self, name: &str, text: &str) -> (Receiver<Event>, Receiver<Result<Summary, SeamError>>) {
        let (tell, told) = channel();
        let (end, ended) = channel();
        let request = Request { say: Say::Message(text.into()), who: name.into(), sampling: None, id: None };
        let asked = self.desk(name).ask(request, tell_all(tell), move |done| drop(end.send(done)));
        asked.unwrap_or_else(|why| panic!("{why}"));
        (told, ended)
    }
}

fn tell_all(tell: Sender<Event>) -> Box<dyn FnMut(&Event) -> Flow + Send> {
    Box::new(move |event| {
        // Who does not listen any more has heard enough.
        if tell.send(event.clone()).is_ok() { Flow::Continue } else { Flow::Stop }
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

impl House {
    /// Waits until memories were formed so many times.
    fn formed(&self, times: usize) {
        for _ in 0..4000 {
            let heard = self.heard.0.lock().expect("nobody broke down");
            let formed = |event: &Event| matches!(event, Event::Memory { what: "formed", .. });
            if heard.iter().filter(|(_, _, event)| formed(event)).count() >= times {
                return;
            }
            drop(heard);
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("no memory was formed");
    }
}

const LONG: Duration = Duration::from_secs(600);

/// While one answers, others wait in line and hear their place; looking and the user's hand elsewhere wait for nobody.
#[test]
fn only_answers_wait_for_the_model() {
    let house = house(LONG);
    let (first, first_done) = house.ask("a", "Hello there");
    wait_for(&first, |event| matches!(event, Event::Said { .. }));
    let (second, second_done) = house.ask("b", "Hello too");
    let place = wait_for(&second, |event| matches!(event, Event::Waiting { .. }));
    assert_eq!(place, Event::Waiting { ahead: 1 });
    // A word of the first is out; the second has not even been stored.
    house.model.let_say(1);
    wait_for(&first, |event| matches!(event, Event::Token { .. }));
    let seen = house.desk("a").board().look();
    assert_eq!(seen.running.expect("it is answering").tokens.len(), 1);
    assert_eq!(
        seen.standing.timeline.turns().len(),
        2,
        "the message and the opening of its answer are there"
    );
    assert!(house.desk("b").board().look().standing.timeline.is_empty());
    // A third conversation can be changed meanwhile.
    let (done, changed) = channel();
    let job = house.desk("c").send(move |session, _| {
        let _ = done.send(session.signal(Signal::Pin, &[]).is_ok());
    });
    job.expect("it is open");
    assert_eq!(changed.recv_timeout(Duration::from_secs(20)), Ok(true));
    house.model.let_say(15);
    let ended = [first_done, second_done].map(|done| done.recv().expect("it ends").expect("it is answered"));
    assert_eq!(ended.map(|summary| summary.tokens), [8, 8]);
    assert!(house.desk("a").board().look().running.is_none());
    // Everybody heard of everything, in one order.
    let heard = house.heard.0.lock().expect("nobody broke down");
    let numbers: Vec<u64> = heard.iter().map(|(_, number, _)| *number).collect();
    assert!(numbers.is_sorted() && numbers.windows(2).all(|two| two[0] != two[1]), "{numbers:?}");
    let done = heard.iter().filter(|(_, _, event)| matches!(event, Event::Done(_)));
    assert_eq!(done.map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
}

/// Whoever goes away stops their answer; what was said of it stays. Whoever waits in line goes without a trace.
#[test]
fn whoever_goes_away_is_not_answered() {
    let house = house(LONG);
    let (first, first_done) = house.ask("a", "Hello there");
    wait_for(&first, |event| matches!(event, Event::Said { .. }));
    let (second, second_done) = house.ask("b", "Hello too");
    wait_for(&second, |event| matches!(event, Event::Waiting { .. }));
    drop(second);
    let refused =
        second_done.recv_timeout(Duration::from_secs(20)).expect("it ends").expect_err("it gave up");
    assert!(refused.why.contains("nothing was stored"), "{refused}");
    assert!(house.desk("b").board().look().standing.timeline.is_empty());
    house.model.let_say(2);
    wait_for(&first, |event| matches!(event, Event::Token { .. }));
    wait_for(&first, |event| matches!(event, Event::Token { .. }));
    house.desk("a").stop();
    let summary = first_done.recv_timeout(Duration::from_secs(20)).expect("it ends").expect("it was begun");
    assert_eq!((summary.finish, summary.tokens), (Finish::Aborted, 2));
    assert!(house.desk("a").board().look().standing.timeline.view(0).text().ends_with(" word0 word1"));
}

/// What is done by hand can be taken back, and who looks sees both.
#[test]
fn what_is_done_by_hand_can_be_taken_back() {
    let house = house(LONG);
    house.model.let_say(8);
    let (_told, done) = house.ask("a", "Hello there");
    done.recv().expect("it ends").expect("it is answered");
    let desk = house.desk("a");
    let text = || desk.board().look().standing.timeline.view(0).text();
    let before = text();
    let (tell, told) = channel();
    let job = desk.send(move |session, _| {
        let chunk = "u0.0".parse().expect("a name");
        drop(tell.send(session.signal(Signal::Delete, &[chunk])));
    });
    job.expect("it is open");
    let sent = told.recv().expect("it is done").expect("it can be");
    assert_ne!(text(), before);
    let (tell, told) = channel();
    desk.send(move |session, _| drop(tell.send(session.undo(&sent.undo)))).expect("it is open");
    told.recv().expect("it is done").expect("it can be");
    assert_eq!(text(), before);
}

/// A mistake in one conversation ends neither the program nor the others, and it can be opened again.
#[test]
fn a_mistake_costs_one_conversation_its_memory_and_nothing_else() {
    let house = house(LONG);
    assert!(house.host.desk("broken").is_err_and(|why| why.why.contains("mistake")));
    house.model.let_say(8);
    let (_told, done) = house.ask("a", "Hello there");
    done.recv().expect("it ends").expect("it is answered");
    let old = house.desk("a");
    old.send(|_, _| panic!("a mistake")).expect("it is open");
    let again = loop {
        let desk = house.desk("a");
        if !Arc::ptr_eq(&desk, &old) {
            break desk;
        }
        std::thread::yield_now();
    };
    assert!(again.board().look().standing.timeline.view(0).text().contains("Hello there"));
    assert!(old.send(|_, _| {}).is_err());
}

/// What nobody uses is closed, and opens again when somebody does; at the end everything is stored.
#[test]
fn conversations_close_and_open_again() {
    let house = house(Duration::from_millis(30));
    house.model.let_say(8);
    let (_told, done) = house.ask("a", "Hello there");
    done.recv().expect("it ends").expect("it is answered");
    while !house.host.open_now().is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(house.desk("a").board().look().standing.timeline.view(0).text().contains("Hello there"));
    let (told, done) = house.ask("a", "And again");
    wait_for(&told, |event| matches!(event, Event::Said { .. }));
    house.model.let_say(3);
    for _ in 0..3 {
        wait_for(&told, |event| matches!(event, Event::Token { .. }));
    }
    house.host.close_all();
    let summary = done.recv().expect("it ends").expect("it was begun");
    assert_eq!((summary.finish, summary.tokens), (Finish::Aborted, 3));
    assert!(house.host.open_now().is_empty());
}

/// Memories are formed when nobody wants anything. Whoever does, in whichever conversation, does not wait for that: it is left
/// and begun again.
#[test]
fn memories_are_formed_when_nobody_wants_anything() {
    let mut rules = rules(400);
    rules.memory = Some(MemoryRules { range: 8, tokens: 8, ..MemoryRules::default() });
    let house = house_by(LONG, rules);
    house.model.let_say(8);
    let (_told, done) = house.ask("a", "Hello there and good morning to you");
    done.recv().expect("it ends").expect("it is answered");
    // It is being formed, and has said three words.
    house.model.let_say(3);
    while *house.model.may.0.lock().expect("nobody broke down") > 0 {
        std::thread::yield_now();
    }
    let (told, done) = house.ask("b", "Hello too");
    wait_for(&told, |event| matches!(event, Event::Said { .. }));
    assert!(house.desk("a").board().look().standing.memories.is_empty(), "it was left");
    house.model.let_say(8);
    done.recv().expect("it ends").expect("it is answered");
    house.model.let_say(64);
    house.formed(2);
    let memories = |name: &str| house.desk(name).board().look().standing.memories.len();
    assert_eq!((memories("a"), memories("b")), (1, 1), "and begun again, where nobody waits");
    // So is what the same conversation is asked.
    let (_told, done) = house.ask("a", "And another thing that is long enough");
    done.recv().expect("it ends").expect("it is answered");
    house.host.close_all();
}

/// After a while of quiet the model looks back, once.
#[test]
fn the_model_looks_back_after_a_while_of_quiet() {
    let mut rules = rules(400);
    let quiet = Quiet { after: Duration::from_millis(60), messages: 2 };
    rules.memory =
        Some(MemoryRules { range: 5000, tokens: 8, reflect: Some(quiet), ..MemoryRules::default() });
    let house = house_by(LONG, rules);
    house.model.let_say(16);
    let (_told, done) = house.ask("a", "Hello there");
    done.recv().expect("it ends").expect("it is answered");
    house.formed(1);
    let memories = house.desk("a").board().look().standing.memories.clone();
    assert!(memories.len() == 1 && memories[0].reflection);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(house.desk("a").board().look().standing.memories.len(), 1);
}
