//! Memories on the test doubles: what is remembered and when, what stands where, and where every character comes from.

mod common;

use common::rules;
use halo_core::attention::Watch;
use halo_core::seams::{
    Finish, Flow, Kind, Message, Model, ModelInfo, ModelStep, Piece, Prompt, Sampling, SeamError, Seen,
    Store, Template,
};
use halo_core::testing::doubles::{Attention, HashEmbedder, MemoryStore, ScriptedAnswer, ScriptedModel};
use halo_core::testing::shared::Shared;
use halo_core::token::{ChunkId, Role, TurnId};
use halo_engine::event::Event;
use halo_engine::memory::segment::{Block, Facet};
use halo_engine::memory::{MemoryRules, Order};
use halo_engine::rules::Rules;
use halo_engine::session::Session;
use halo_engine::signal::Signal;
use halo_engine::tools::jq::Runner;
use jiff::civil::Date;
use std::cell::Cell;
use std::sync::{Arc, Mutex};

const TODAY: Date = jiff::civil::date(2026, 11, 15);

fn even(text: &str) -> ScriptedAnswer {
    ScriptedAnswer { text: text.into(), attention: Attention::Even, fails_after: None }
}

fn remembering(max_tokens: usize) -> Rules {
    let mut rules = rules(max_tokens);
    let memory = MemoryRules { range: 60, most: 120, tokens: 12, delay: 1, share: 0.5, reflect: None };
    rules.memory = Some(memory);
    rules.sampling.max_tokens = 40;
    rules
}

fn open(store: &Shared<MemoryStore>, rules: Rules, answers: &[&str]) -> Session {
    // What is said to the user is long, what is remembered is not.
    let long = |text: &&str| {
        format!("{text}{}", if text.starts_with(' ') { " so it goes".repeat(9) } else { String::new() })
    };
    let answers = answers.iter().map(|text| even(&long(text))).collect();
    let model = ScriptedModel::new(4096, answers).with_template(Template::plain());
    let (store, embedder) = (Box::new(store.clone()), Some(Box::new(HashEmbedder) as _));
    let session = Session::open(store, Box::new(model), embedder, "main", rules, &mut |_, _| {});
    session.unwrap_or_else(|why| panic!("it opens: {why}"))
}

fn say(session: &mut Session, message: &str) {
    let told = session.say(message, TODAY, &mut |_| Flow::Continue);
    told.unwrap_or_else(|why| panic!("{message}: {why}"));
}

/// A quiet moment; what happened to memories in it.
fn quiet(session: &mut Session) -> Vec<String> {
    let mut heard = Vec::new();
    session
        .quiet(&|| false, &mut |event| {
            if let Event::Memory { id, what } = event {
                heard.push(format!("{what} {id}"));
            }
        })
        .expect("nothing fails");
    heard
}

const ANSWERS: [&str; 9] = [
    " Noted, a gun named Betsy.",
    " Cheese is made of milk.",
    "I told of Betsy and cheese.",
    " Trains run on long rails.",
    " Winter is cold and white.",
    " Music is made of notes.",
    "I told of trains and winter.",
    " Bread is made of flour.",
    " Ships sail on the sea.",
];

/// The six steps: what was said becomes blocks, blocks segments, segments the context; after the turn a memory is asked for
/// and formed in a fork; later it stands in the place of its range; and any character can be traced back.
#[test]
fn the_six_steps_from_frame_to_memory_and_back() {
    let store = Shared::new(MemoryStore::default());
    let mut session = open(&store, remembering(170), &ANSWERS);
    // 1 and 2: frames become blocks, and blocks segments.
    say(&mut session, "The gun on the wall is called Betsy");
    let first = session.render();
    let blocks: Vec<String> = first.segments.iter().map(|s| s.block_ids[0].to_string()).collect();
    assert_eq!(blocks, ["instructions", "turn-0", "turn-1"]);
    assert_eq!(first.segments[1].source_frames, [TurnId(0)]);
    let facets: Vec<String> = first.segments[1].facet_ids().iter().map(ToString::to_string).collect();
    assert_eq!(facets, ["u0.0/frame", "u0.0"]);
    // 3: segments in a row are what the model sees, token for token.
    assert_eq!(first.text(), session.window_text());
    assert_eq!((first.tokens(), session.window().len()), (session.live(), session.live()));
    assert_eq!(session.memory_due(), None, "too little was said");
    assert_eq!(quiet(&mut session), Vec::<String>::new());
    say(&mut session, "Tell me something about cheese now");
    // 4: after the turn, a request.
    let span = session.memory_due().expect("enough was said");
    let request = session.memory_request(span).expect("nothing fails");
    assert_eq!((request.compress_from, request.compress_to), (TurnId(0), TurnId(3)));
    assert!(request.agent_response.starts_with(" Cheese is made of milk."));
    assert_eq!(request.segments, session.render().segments);
    // 5: a memory. It is stored at once, and not used.
    let before = session.window_text();
    assert_eq!(quiet(&mut session), ["formed 1"]);
    assert_eq!(session.window_text(), before, "formed in a fork");
    let mut store = store;
    let kept = store.records("main", Kind::Memory).expect("it reads");
    assert_eq!(kept.len(), 1);
    assert_eq!(session.memories()[0].text, "I told of Betsy and cheese.");
    assert_eq!(quiet(&mut session), Vec::<String>::new(), "its range is in the window");
    // 6: when its range has left, it stands there.
    for topic in ["trains", "winter", "music"] {
        say(&mut session, &format!("Tell me something about {topic} now"));
    }
    assert_eq!(quiet(&mut session), ["formed 2"]);
    assert!(!session.window_text().contains("gun"), "{}", session.window_text());
    assert_eq!(quiet(&mut session), ["stands 1"]);
    let shown = session.render();
    let text = session.window_text();
    let stands = "System: <memory from=\"0\" to=\"3\">\nThe user said: The gun on the wall is called Betsy\nThe user said: \
                  Tell me something about cheese now\nI told of Betsy and cheese.\n</memory>";
    assert!(text.contains(stands), "{text}");
    assert!(text.find("<memory").expect("there") < text.find("music").expect("there"), "in its place");
    assert_eq!(shown.tokens(), session.live());
    // And back, from a character to where it comes from, and from there to the character.
    let at = text.find("wall").expect("quoted");
    let origin = shown.origin(at).expect("everything comes from somewhere");
    let quote: ChunkId = "u0.0".parse().expect("a name");
    assert_eq!((origin.block, origin.facet), (Block::Memory(1), Facet::Quote(1, quote)));
    assert_eq!(origin.frames, [0, 1, 2, 3].map(TurnId));
    assert!(shown.of_facet(origin.facet).iter().any(|range| range.contains(&at)));
    assert_eq!(shown.of_frame(TurnId(0)), shown.of_block(Block::Memory(1)));
    let told = shown.origin(text.find("I told").expect("there")).expect("from somewhere");
    assert_eq!(told.facet, Facet::Memory(1));
    for at in 0..text.len() {
        let origin = shown.origin(at).expect("everything comes from somewhere");
        assert!(shown.of_facet(origin.facet).iter().any(|range| range.contains(&at)));
        assert!(shown.of_block(origin.block).contains(&origin.segment));
    }
    assert_eq!(shown.origin(text.len()), None);
}

/// A session in which memory 1 stands for turns 0 to 3.
fn standing(store: &Shared<MemoryStore>) -> Session {
    let mut session = open(store, remembering(170), &ANSWERS);
    say(&mut session, "The gun on the wall is called Betsy");
    say(&mut session, "Tell me something about cheese now");
    quiet(&mut session);
    for topic in ["trains", "winter", "music"] {
        say(&mut session, &format!("Tell me something about {topic} now"));
    }
    quiet(&mut session);
    assert_eq!(quiet(&mut session), ["stands 1"]);
    session
}

#[test]
fn when_anything_of_its_range_is_back_a_memory_steps_aside() {
    let store = Shared::new(MemoryStore::default());
    let mut session = standing(&store);
    let live = session.live();
    let chunk: ChunkId = "u0.0".parse().expect("a name");
    session.signal(Signal::Resurrect, &[chunk]).expect("it returns");
    assert!(!session.window_text().contains("<memory"), "{}", session.window_text());
    assert!(session.window_text().contains("The gun on the wall is called Betsy"));
    assert!(quiet(&mut session).is_empty(), "and stays aside");
    session.signal(Signal::Unpin, &[chunk]).expect("it is pinned");
    session.signal(Signal::Prune, &[chunk]).expect("it leaves");
    assert_eq!(quiet(&mut session), ["stands 1"]);
    assert_eq!(session.live(), live);
}

#[test]
fn memories_outlive_the_program_and_another_is_not_formed_of_the_same() {
    let store = Shared::new(MemoryStore::default());
    let window = standing(&store).window_text();
    let mut again = open(&store, remembering(170), &ANSWERS[7..]);
    assert_eq!(again.window_text(), window, "what stood stands");
    assert_eq!(again.memories().len(), 2);
    assert_eq!(again.memory_due(), None);
    assert!(quiet(&mut again).is_empty());
    let mut without = open(&store, rules(170), &ANSWERS[7..]);
    assert!(!without.window_text().contains("<memory"), "they are not used where they are turned off");
    assert!(!without.quiet(&|| false, &mut |_| {}).expect("nothing fails"));
}

#[test]
fn the_user_sees_edits_pins_and_deletes_memories() {
    let store = Shared::new(MemoryStore::default());
    let mut session = standing(&store);
    session.order_memory(1, Order::Edit(" The gun has a name. ".into())).expect("it is there");
    assert!(!session.window_text().contains("<memory"), "what it says is to be read first");
    assert_eq!(quiet(&mut session), ["stands 1"]);
    assert!(session.window_text().contains("\nThe gun has a name.\n</memory>"));
    assert!(session.memories()[0].edited);
    session.order_memory(1, Order::Rest(true)).expect("it is there");
    assert!(quiet(&mut session).is_empty() && !session.window_text().contains("<memory"));
    session.order_memory(1, Order::Rest(false)).expect("it is there");
    session.order_memory(1, Order::Pin(true)).expect("it is there");
    assert_eq!(quiet(&mut session), ["stands 1"]);
    let found = session.find_memories("what name has the gun?").expect("it searches");
    assert_eq!(found.first().map(|(_, memory)| memory.id), Some(1));
    session.order_memory(1, Order::Delete).expect("it is there");
    assert!(session.order_memory(1, Order::Delete).expect_err("it is gone").why.contains("no memory 1"));
    assert!(session.order_memory(2, Order::Edit("  ".into())).is_err());
    assert_eq!(session.memories().iter().map(|m| m.id).collect::<Vec<_>>(), [2]);
    assert!(quiet(&mut session).is_empty() && !session.window_text().contains("<memory"));
    assert_eq!(session.memory_due(), None, "what the user has deleted is not formed again");
}

#[test]
fn memories_that_contradict_each_other_are_both_marked() {
    let store = Shared::new(MemoryStore::default());
    let mut session = standing(&store);
    session.order_memory(1, Order::Edit("The door is open. The gun is old.".into())).expect("it is there");
    session.order_memory(2, Order::Edit("The cat sleeps. The door is closed.".into())).expect("it is there");
    let marked = |session: &Session| -> Vec<Vec<u64>> {
        session.memories().iter().map(|m| m.conflicts.iter().copied().collect()).collect()
    };
    assert_eq!(marked(&session), [vec![2], vec![1]]);
    assert_eq!(marked(&open(&store, remembering(170), &[])), [vec![2], vec![1]], "and it is kept");
    session.order_memory(2, Order::Edit("The cat sleeps.".into())).expect("it is there");
    assert_eq!(marked(&session), [Vec::<u64>::new(), vec![]]);
}

/// Whoever is wanted leaves what they were doing, and begins again.
#[test]
fn a_formation_that_is_left_is_begun_again() {
    let store = Shared::new(MemoryStore::default());
    let answers = [ANSWERS[0], ANSWERS[1], "I would have told of much", "I told of Betsy and cheese."];
    let mut session = open(&store, remembering(170), &answers);
    say(&mut session, "The gun on the wall is called Betsy");
    say(&mut session, "Tell me something about cheese now");
    let due = session.memory_due();
    let asked = Cell::new(0);
    let wanted = || {
        asked.set(asked.get() + 1);
        asked.get() > 3
    };
    assert!(session.quiet(&wanted, &mut |event| panic!("{event:?}")).expect("nothing fails"));
    assert_eq!((session.memories().len(), session.memory_due()), (0, due));
    assert_eq!(quiet(&mut session), ["formed 1"]);
    assert_eq!(session.memories()[0].text, "I told of Betsy and cheese.");
}

#[test]
fn the_model_looks_back_when_it_is_quiet() {
    let store = Shared::new(MemoryStore::default());
    let answers = [ANSWERS[0], ANSWERS[1], "They like guns and cheese.", "They like more."];
    let mut session = open(&store, MemoryRulesOf::large(), &answers);
    say(&mut session, "The gun on the wall is called Betsy");
    say(&mut session, "Tell me something about cheese now");
    assert_eq!(session.unreflected(), 4);
    let id = session.reflect(&|| false).expect("nothing fails").expect("it says something");
    let memory = session.memories().iter().find(|memory| memory.id == id).expect("it is kept").clone();
    assert!(memory.reflection && memory.text == "They like guns and cheese.");
    assert_eq!((session.unreflected(), session.memory_due()), (0, None));
    assert_eq!(session.reflect(&|| true).expect("nothing fails"), None, "left, because somebody is there");
}

struct MemoryRulesOf;

impl MemoryRulesOf {
    /// Nothing is long enough to be remembered.
    fn large() -> Rules {
        let mut rules = remembering(170);
        rules.memory = Some(MemoryRules { range: 500, tokens: 12, ..MemoryRules::default() });
        rules
    }
}

/// A person's words are quoted to the byte, whatever they are; what is very long is left in the graveyard, whole.
#[test]
fn people_are_quoted_or_left_alone() {
    let store = Shared::new(MemoryStore::default());
    let strange = "Ünïcode </memory> 🌱 “quoted” <tool>jq .</tool>";
    let long = "word ".repeat(210);
    let mut session = open(
        &store,
        {
            let mut rules = remembering(400);
            rules.memory =
                Some(MemoryRules { range: 24, most: 600, tokens: 12, delay: 0, share: 0.5, reflect: None });
            rules
        },
        &[" One answer that is there.", " Two.", "I told of strange things."],
    );
    say(&mut session, strange);
    say(&mut session, long.trim());
    assert_eq!(quiet(&mut session), ["formed 1"]);
    let all: Vec<ChunkId> = session.timeline().live_chunks().map(|chunk| chunk.id()).collect();
    session.signal(Signal::Prune, &all).expect("all leave");
    assert_eq!(quiet(&mut session), ["stands 1"]);
    let text = session.window_text();
    assert!(text.contains(&format!("The user said: {strange}\n")), "{text}");
    assert!(!text.contains("word word"), "{text}");
    assert_eq!(session.timeline().turns().iter().filter(|turn| turn.role == Role::User).count(), 2);
}

/// A model is an agent, and whatever wraps agents wraps it.
#[test]
fn a_model_is_an_agent() {
    use halo_agents::agent::{Agent, Compose};
    use halo_agents::content::Said;
    use halo_agents::cooled::Cooling;
    use halo_engine::agent::Speaker;
    let model: Box<dyn Model + Send> =
        Box::new(ScriptedModel::new(64, vec![even(" It is Betsy."), even(" Yes.")]));
    let speaker = Speaker::new(model, "Be brief.", Sampling { max_tokens: 8, ..Sampling::default() });
    // Without cooling, it would not fit.
    let cooled = speaker.with(Cooling { threshold: 32, ..Cooling::default() });
    let said = vec![Said::agent("word ".repeat(400)), Said::user("What is the gun called?")];
    assert_eq!(pollster::block_on(cooled.invoke(said)), Ok("It is Betsy.".to_owned()));
    let why = pollster::block_on(cooled.invoke(vec![Said::user("word ".repeat(400))])).expect_err("too long");
    assert!(why.to_string().contains("do not fit"), "what people say is not cut: {why}");
}

/// A window, and the same as messages.
type Asked = (Vec<Seen>, Vec<Message>);

/// A model that keeps what it was asked.
struct Witness {
    inner: ScriptedModel,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Model for Witness {
    fn info(&self) -> &ModelInfo {
        self.inner.info()
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<Piece>, SeamError> {
        self.inner.tokenize(text, special)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &Watch,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        let asked = (prompt.window.to_vec(), (prompt.messages)());
        self.asked.lock().expect("nobody panics").push(asked);
        self.inner.generate(prompt, sampling, watch, listen)
    }
}

/// The fork sees the state that lived the range, and behind it what it is told, which names where the range began. A model
/// that is spoken to in messages sees the marks around the range.
#[test]
fn the_instruction_stands_at_the_end_and_names_the_beginning() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let long = |text: &str| even(&format!("{text}{}", " so it goes".repeat(9)));
    let answers = vec![long(" Noted."), long(" Milk."), even("I told of it.")];
    let inner = ScriptedModel::new(4096, answers).with_template(Template::plain());
    let model = Box::new(Witness { inner, asked: Arc::clone(&asked) });
    let store = Box::new(Shared::new(MemoryStore::default()));
    let mut session =
        Session::open(store, model, None, "main", remembering(170), &mut |_, _| {}).expect("it opens");
    say(&mut session, "The gun on the wall is called Betsy");
    say(&mut session, "Tell me something about cheese now");
    let window = session.window();
    assert_eq!(quiet(&mut session), ["formed 1"]);
    let asked = asked.lock().expect("nobody panics");
    let (seen, messages) = asked.last().expect("it was asked");
    assert_eq!(seen[..window.len()], window[..], "the very state that lived it");
    let end = window.last().and_then(|last| last.position).expect("said").0;
    assert!(seen[window.len()..].iter().zip(end + 1..).all(|(s, n)| s.position.is_some_and(|p| p.0 == n)));
    let told: Vec<String> =
        messages.iter().map(|m| format!("{}: {}", m.role.name(), m.text.trim())).collect();
    assert_eq!(told[1], "system: <memory_formation_start sequence=\"0\"/>");
    assert!(told[2].starts_with("user: The gun on the wall"), "{told:#?}");
    let last = told.last().expect("there is one");
    assert!(last.starts_with("user: <memory_formation_end sequence=\"3\"/> Summarize"), "{last}");
    assert!(
        last.contains("<memory_formation_start sequence=\"0\"/> (“The gun on the wall is called Betsy”)"),
        "{last}"
    );
    assert_eq!(told.len(), 7, "instructions, mark, four messages, what it is told");
}

/// What tools did in a range is so still, whatever became of the words: each thing as it was left.
#[test]
fn the_net_state_of_a_range_is_kept() {
    let store = Shared::new(MemoryStore::default());
    let call = |name: &str| format!("<tool>jq '.name = \"{name}\"' notes.json > output</tool>");
    let (first, second) = (call("Betsy"), call("Bertha"));
    let answers = [
        first.as_str(),
        "Done so it goes and goes and goes.",
        second.as_str(),
        "Done again and again.",
        "I wrote names.",
    ];
    let mut rules = remembering(4000);
    rules.tools = Some(Runner::Here);
    let mut session = open(&store, rules, &answers);
    say(
        &mut session,
        "The gun on the wall is called Betsy and it was carved long ago by somebody in the old house",
    );
    say(
        &mut session,
        "No, it is called Bertha, I was wrong about that, and it was carved by somebody else altogether",
    );
    assert_eq!(quiet(&mut session), ["formed 1"]);
    assert_eq!(session.memories()[0].operations, [".name = \"Bertha\""]);
}

/// A full window, what is too old, and memories that matter little are let go of in one cycle, over the real memories.
#[test]
fn memories_rest_in_step_with_a_full_window() {
    use halo_agents::forgetting::{Action, Retention, coordinated_forgetting_cycle};
    use halo_core::salience::Salience;
    use halo_core::window::{SlidingWindow, WindowSize};
    struct Nothing;
    impl Retention for Nothing {
        async fn apply_retention_policy(&mut self) -> Result<usize, SeamError> {
            Ok(0)
        }
    }
    let store = Shared::new(MemoryStore::default());
    let mut session = standing(&store);
    let mut scorer = Salience::default();
    scorer.register_entity("winter");
    let mut window = SlidingWindow::new(WindowSize { window: 10, sink: 1, recent: 2 }, Some(scorer.clone()));
    (0..10).for_each(|n| drop(window.add(format!("w{n}"), 1)));
    let done = pollster::block_on(coordinated_forgetting_cycle(
        &mut window,
        &scorer,
        &mut Nothing,
        &mut session,
        0.8,
    ));
    let done = done.expect("nothing fails");
    // The older of the two names nobody who is known; the other is new, and tells of winter.
    assert!(
        done.actions.contains(&Action::MemoryDeactivate(1))
            && !done.actions.contains(&Action::MemoryDeactivate(2))
    );
    assert!(session.memories()[0].resting && !session.memories()[1].resting);
    assert!(!session.window_text().contains("<memory from=\"0\""), "what rests does not stand");
}

/// A branch has the memories of what it shares, and none of what was never said there.
#[test]
fn a_branch_remembers_what_it_shares() {
    let store = Shared::new(MemoryStore::default());
    let mut session = standing(&store);
    let spans: Vec<u32> = session.memories().iter().map(|memory| memory.span.to.0).collect();
    assert_eq!(spans, [3, 9]);
    session.branch("aside", Some(5)).expect("it branches");
    let of =
        |name: &str| halo_engine::memory::memories(&mut store.clone(), name).expect("they are read").len();
    assert_eq!((of("main"), of("aside")), (2, 1));
    let model = Box::new(ScriptedModel::new(4096, vec![]).with_template(Template::plain()));
    let branch =
        Session::open(Box::new(store.clone()), model, None, "aside", remembering(170), &mut |_, _| {});
    let due = branch.expect("it opens").memory_due().map(|span| span.from);
    assert!(due.is_none_or(|from| from == (4, 0)), "what it has of the rest is remembered anew: {due:?}");
}

/// What is taken back is not quoted any more, at once; what leaves later is quoted too.
#[test]
fn a_memory_quotes_what_has_left_and_nothing_that_was_taken_back() {
    let store = Shared::new(MemoryStore::default());
    let mut session = standing(&store);
    let chunk: ChunkId = "u0.0".parse().expect("a name");
    session.signal(Signal::Delete, &[chunk]).expect("it is deleted");
    assert!(!session.window_text().contains("gun on the wall"), "{}", session.window_text());
    quiet(&mut session);
    assert!(!session.window_text().contains("gun on the wall"), "{}", session.window_text());
    // A range that leaves piece by piece.
    let store = Shared::new(MemoryStore::default());
    let mut rules = remembering(2000);
    rules.memory =
        Some(MemoryRules { range: 60, most: 400, tokens: 12, delay: 0, share: 0.5, reflect: None });
    let mut session = open(&store, rules, &[ANSWERS[0], ANSWERS[1], ANSWERS[3], "I told of much."]);
    for text in ["The gun on the wall is called Betsy", "Tell me something about cheese now", "And trains"] {
        say(&mut session, text);
    }
    assert_eq!(quiet(&mut session), ["formed 1"]);
    let chunks = |turns: std::ops::Range<u32>| -> Vec<ChunkId> {
        turns
            .map(|n| ChunkId::new(if n % 2 == 0 { Role::User } else { Role::Assistant }, TurnId(n), 0))
            .collect()
    };
    session.signal(Signal::Prune, &chunks(0..2)).expect("they leave");
    assert_eq!(quiet(&mut session), ["stands 1"]);
    assert!(
        session.window_text().contains("The user said: The gun")
            && !session.window_text().contains("said: Tell me")
    );
    session.signal(Signal::Prune, &chunks(2..4)).expect("they leave");
    quiet(&mut session);
    assert!(
        session.window_text().contains("The user said: Tell me something about cheese now"),
        "{}",
        session.window_text()
    );
}

/// Looking back works beside memories that stand.
#[test]
fn the_model_looks_back_over_what_it_sees() {
    let store = Shared::new(MemoryStore::default());
    let mut session = standing(&store);
    let id = session.reflect(&|| false).expect("nothing fails");
    let memory = session.memories().iter().find(|memory| Some(memory.id) == id).expect("it is kept");
    assert!(memory.reflection && memory.span.from == (0, 0));
}
