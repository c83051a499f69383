//! Memories on the test doubles: what is remembered and when, what stands where, and where every character comes from.

use crate::common::test_rules;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    ChatTemplate, FinishReason, Model, ModelInfo, ModelStep, ModelToken, Prompt, PromptMessage, Sampling,
    StepFlow, WindowToken,
};
use halo_core::store::{RecordKind, Store};
use halo_core::testing::doubles::{
    HashEmbedder, InMemoryStore, ScriptedAnswer, ScriptedAttention, ScriptedModel,
};
use halo_core::testing::shared_store::SharedStore;
use halo_core::token::{ChunkId, Role, TurnId};
use halo_engine::event::Event;
use halo_engine::manual_edit::ManualEdit;
use halo_engine::memory::segment::{ContextBlock, Facet};
use halo_engine::memory::{MemoryEdit, MemoryRules};
use halo_engine::rules::ConversationRules;
use halo_engine::session::Session;
use halo_engine::tools::jq::JqRunner;
use jiff::civil::Date;
use std::cell::Cell;
use std::sync::{Arc, Mutex};

const TODAY: Date = jiff::civil::date(2026, 11, 15);

fn even_attention_answer(text: &str) -> ScriptedAnswer {
    ScriptedAnswer { text: text.into(), attention: ScriptedAttention::Uniform, fails_after: None }
}

fn memory_test_rules(max_tokens: usize) -> ConversationRules {
    let mut rules = test_rules(max_tokens);
    let memory = MemoryRules {
        range_tokens: 60,
        max_range_tokens: 120,
        max_tokens: 12,
        delay_answers: 1,
        window_share: 0.5,
        reflection: None,
    };
    rules.memory = Some(memory);
    rules.sampling.max_tokens = 40;
    rules
}

fn open_session(store: &SharedStore<InMemoryStore>, rules: ConversationRules, answers: &[&str]) -> Session {
    // What is said to the user is long, what is remembered is not.
    let long = |text: &&str| {
        format!("{text}{}", if text.starts_with(' ') { " so it goes".repeat(9) } else { String::new() })
    };
    let answers = answers.iter().map(|text| even_attention_answer(&long(text))).collect();
    let model = ScriptedModel::new(4096, answers).with_template(ChatTemplate::plain());
    let (store, embedder) = (Box::new(store.clone()), Some(Box::new(HashEmbedder) as _));
    let session = Session::open(store, Box::new(model), embedder, "main", rules, &mut |_, _| {});
    session.unwrap_or_else(|why| panic!("it opens: {why}"))
}

fn send(session: &mut Session, message: &str) {
    let told = session.send_message(message, TODAY, &mut |_| StepFlow::Continue);
    told.unwrap_or_else(|why| panic!("{message}: {why}"));
}

/// A quiet moment; what happened to memories in it.
fn run_idle_work(session: &mut Session) -> Vec<String> {
    let mut heard = Vec::new();
    session
        .run_idle_memory_work(&|| false, &mut |event| {
            if let Event::MemoryChanged { id, action } = event {
                heard.push(format!("{} {id}", action.as_str()));
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
fn memory_lifecycle_from_turn_to_placement_with_byte_origins() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = open_session(&store, memory_test_rules(170), &ANSWERS);
    // 1 and 2: frames become blocks, and blocks segments.
    send(&mut session, "The gun on the wall is called Betsy");
    let first = session.render_context();
    let blocks: Vec<String> = first.segments.iter().map(|s| s.block_ids[0].to_string()).collect();
    assert_eq!(blocks, ["instructions", "turn-0", "turn-1"]);
    assert_eq!(first.segments[1].source_frames, [TurnId(0)]);
    let facets: Vec<String> = first.segments[1].facet_ids().iter().map(ToString::to_string).collect();
    assert_eq!(facets, ["u0.0/frame", "u0.0"]);
    // 3: segments in a row are what the model sees, token for token.
    assert_eq!(first.text(), session.context_window_text());
    assert_eq!(
        (first.tokens(), session.context_window().len()),
        (session.live_tokens(), session.live_tokens())
    );
    assert_eq!(session.next_memory_range(), None, "too little was said");
    assert_eq!(run_idle_work(&mut session), Vec::<String>::new());
    send(&mut session, "Tell me something about cheese now");
    // 4: after the turn, a request.
    let span = session.next_memory_range().expect("enough was said");
    let request = session.memory_request(span).expect("nothing fails");
    assert_eq!((request.compress_from, request.compress_to), (TurnId(0), TurnId(3)));
    assert!(request.agent_response.starts_with(" Cheese is made of milk."));
    assert_eq!(request.segments, session.render_context().segments);
    // 5: a memory. It is stored at once, and not used.
    let before = session.context_window_text();
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    assert_eq!(session.context_window_text(), before, "formed in a fork");
    let mut store = store;
    let kept = store.records("main", RecordKind::Memory).expect("it reads");
    assert_eq!(kept.len(), 1);
    assert_eq!(session.memories()[0].text, "I told of Betsy and cheese.");
    assert_eq!(run_idle_work(&mut session), Vec::<String>::new(), "its range is in the window");
    // 6: when its range has left, it stands there.
    for topic in ["trains", "winter", "music"] {
        send(&mut session, &format!("Tell me something about {topic} now"));
    }
    assert_eq!(run_idle_work(&mut session), ["formed 2"]);
    assert!(!session.context_window_text().contains("gun"), "{}", session.context_window_text());
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    let shown = session.render_context();
    let text = session.context_window_text();
    let stands = "System: <memory from=\"0\" to=\"3\">\nThe user said: The gun on the wall is called Betsy\nThe user said: \
                  Tell me something about cheese now\nI told of Betsy and cheese.\n</memory>";
    assert!(text.contains(stands), "{text}");
    assert!(text.find("<memory").expect("there") < text.find("music").expect("there"), "in its place");
    assert_eq!(shown.tokens(), session.live_tokens());
    // And back, from a character to where it comes from, and from there to the character.
    let at = text.find("wall").expect("quoted");
    let origin = shown.origin_at(at).expect("everything comes from somewhere");
    let quote: ChunkId = "u0.0".parse().expect("a name");
    assert_eq!((origin.block, origin.facet), (ContextBlock::Memory(1), Facet::Quote(1, quote)));
    assert_eq!(origin.turns, [0, 1, 2, 3].map(TurnId));
    assert!(shown.ranges_of_facet(origin.facet).iter().any(|range| range.contains(&at)));
    assert_eq!(shown.segments_of_turn(TurnId(0)), shown.segments_of_block(ContextBlock::Memory(1)));
    let told = shown.origin_at(text.find("I told").expect("there")).expect("from somewhere");
    assert_eq!(told.facet, Facet::Memory(1));
    for at in 0..text.len() {
        let origin = shown.origin_at(at).expect("everything comes from somewhere");
        assert!(shown.ranges_of_facet(origin.facet).iter().any(|range| range.contains(&at)));
        assert!(shown.segments_of_block(origin.block).contains(&origin.segment));
    }
    assert_eq!(shown.origin_at(text.len()), None);
}

/// A session in which memory 1 stands for turns 0 to 3.
fn session_with_placed_memory(store: &SharedStore<InMemoryStore>) -> Session {
    let mut session = open_session(store, memory_test_rules(170), &ANSWERS);
    send(&mut session, "The gun on the wall is called Betsy");
    send(&mut session, "Tell me something about cheese now");
    run_idle_work(&mut session);
    for topic in ["trains", "winter", "music"] {
        send(&mut session, &format!("Tell me something about {topic} now"));
    }
    run_idle_work(&mut session);
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    session
}

#[test]
fn memory_is_hidden_when_its_range_is_resurrected() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = session_with_placed_memory(&store);
    let live = session.live_tokens();
    let chunk: ChunkId = "u0.0".parse().expect("a name");
    session.apply_edit(ManualEdit::Resurrect, &[chunk]).expect("it returns");
    assert!(!session.context_window_text().contains("<memory"), "{}", session.context_window_text());
    assert!(session.context_window_text().contains("The gun on the wall is called Betsy"));
    assert!(run_idle_work(&mut session).is_empty(), "and stays aside");
    session.apply_edit(ManualEdit::Unpin, &[chunk]).expect("it is pinned");
    session.apply_edit(ManualEdit::Prune, &[chunk]).expect("it leaves");
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    assert_eq!(session.live_tokens(), live);
}

#[test]
fn memory_survives_reopen_and_is_not_formed_twice() {
    let store = SharedStore::new(InMemoryStore::default());
    let window = session_with_placed_memory(&store).context_window_text();
    let mut again = open_session(&store, memory_test_rules(170), &ANSWERS[7..]);
    assert_eq!(again.context_window_text(), window, "what stood stands");
    assert_eq!(again.memories().len(), 2);
    assert_eq!(again.next_memory_range(), None);
    assert!(run_idle_work(&mut again).is_empty());
    let mut without = open_session(&store, test_rules(170), &ANSWERS[7..]);
    assert!(
        !without.context_window_text().contains("<memory"),
        "they are not used where they are turned off"
    );
    assert!(!without.run_idle_memory_work(&|| false, &mut |_| {}).expect("nothing fails"));
}

#[test]
fn memory_can_be_edited_pinned_disabled_and_deleted() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = session_with_placed_memory(&store);
    session.edit_memory(1, MemoryEdit::SetText(" The gun has a name. ".into())).expect("it is there");
    assert!(!session.context_window_text().contains("<memory"), "what it says is to be read first");
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    assert!(session.context_window_text().contains("\nThe gun has a name.\n</memory>"));
    assert!(session.memories()[0].edited);
    session.edit_memory(1, MemoryEdit::Disable(true)).expect("it is there");
    assert!(run_idle_work(&mut session).is_empty() && !session.context_window_text().contains("<memory"));
    session.edit_memory(1, MemoryEdit::Disable(false)).expect("it is there");
    session.edit_memory(1, MemoryEdit::Pin(true)).expect("it is there");
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    let found = session.search_memories("what name has the gun?").expect("it searches");
    assert_eq!(found.first().map(|(_, memory)| memory.id), Some(1));
    session.edit_memory(1, MemoryEdit::Delete).expect("it is there");
    assert!(
        session.edit_memory(1, MemoryEdit::Delete).expect_err("it is gone").message.contains("no memory 1")
    );
    assert!(session.edit_memory(2, MemoryEdit::SetText("  ".into())).is_err());
    assert_eq!(session.memories().iter().map(|m| m.id).collect::<Vec<_>>(), [2]);
    assert!(run_idle_work(&mut session).is_empty() && !session.context_window_text().contains("<memory"));
    assert_eq!(session.next_memory_range(), None, "what the user has deleted is not formed again");
}

#[test]
fn memory_conflicts_are_marked_on_both_sides() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = session_with_placed_memory(&store);
    session
        .edit_memory(1, MemoryEdit::SetText("The door is open. The gun is old.".into()))
        .expect("it is there");
    session
        .edit_memory(2, MemoryEdit::SetText("The cat sleeps. The door is closed.".into()))
        .expect("it is there");
    let marked = |session: &Session| -> Vec<Vec<u64>> {
        session.memories().iter().map(|m| m.conflicts.iter().copied().collect()).collect()
    };
    assert_eq!(marked(&session), [vec![2], vec![1]]);
    assert_eq!(
        marked(&open_session(&store, memory_test_rules(170), &[])),
        [vec![2], vec![1]],
        "and it is kept"
    );
    session.edit_memory(2, MemoryEdit::SetText("The cat sleeps.".into())).expect("it is there");
    assert_eq!(marked(&session), [Vec::<u64>::new(), vec![]]);
}

/// A preempted memory is formed again later.
#[test]
fn memory_formation_restarts_after_preemption() {
    let store = SharedStore::new(InMemoryStore::default());
    let answers = [ANSWERS[0], ANSWERS[1], "I would have told of much", "I told of Betsy and cheese."];
    let mut session = open_session(&store, memory_test_rules(170), &answers);
    send(&mut session, "The gun on the wall is called Betsy");
    send(&mut session, "Tell me something about cheese now");
    let due = session.next_memory_range();
    let asked = Cell::new(0);
    let wanted = || {
        asked.set(asked.get() + 1);
        asked.get() > 3
    };
    assert!(session.run_idle_memory_work(&wanted, &mut |event| panic!("{event:?}")).expect("nothing fails"));
    assert_eq!((session.memories().len(), session.next_memory_range()), (0, due));
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    assert_eq!(session.memories()[0].text, "I told of Betsy and cheese.");
}

#[test]
fn reflection_forms_memory_and_stops_when_preempted() {
    let store = SharedStore::new(InMemoryStore::default());
    let answers = [ANSWERS[0], ANSWERS[1], "They like guns and cheese.", "They like more."];
    let mut session = open_session(&store, LongRangeRules::build(), &answers);
    send(&mut session, "The gun on the wall is called Betsy");
    send(&mut session, "Tell me something about cheese now");
    assert_eq!(session.messages_since_reflection(), 4);
    let id = session.reflect(&|| false).expect("nothing fails").expect("it says something");
    let memory = session.memories().iter().find(|memory| memory.id == id).expect("it is kept").clone();
    assert!(memory.reflection && memory.text == "They like guns and cheese.");
    assert_eq!((session.messages_since_reflection(), session.next_memory_range()), (0, None));
    assert_eq!(session.reflect(&|| true).expect("nothing fails"), None, "left, because somebody is there");
}

struct LongRangeRules;

impl LongRangeRules {
    /// Nothing is long enough to be remembered.
    fn build() -> ConversationRules {
        let mut rules = memory_test_rules(170);
        rules.memory = Some(MemoryRules { range_tokens: 500, max_tokens: 12, ..MemoryRules::default() });
        rules
    }
}

/// A person's words are quoted to the byte, whatever they are; what is very long is left in the graveyard, whole.
#[test]
fn memory_quotes_user_verbatim_and_skips_long_messages() {
    let store = SharedStore::new(InMemoryStore::default());
    let strange = "Ünïcode </memory> 🌱 “quoted” <tool>jq .</tool>";
    let long = "word ".repeat(210);
    let mut session = open_session(
        &store,
        {
            let mut rules = memory_test_rules(400);
            rules.memory = Some(MemoryRules {
                range_tokens: 24,
                max_range_tokens: 600,
                max_tokens: 12,
                delay_answers: 0,
                window_share: 0.5,
                reflection: None,
            });
            rules
        },
        &[" One answer that is there.", " Two.", "I told of strange things."],
    );
    send(&mut session, strange);
    send(&mut session, long.trim());
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    let all: Vec<ChunkId> = session.timeline().live_chunks().map(|chunk| chunk.id()).collect();
    session.apply_edit(ManualEdit::Prune, &all).expect("all leave");
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    let text = session.context_window_text();
    assert!(text.contains(&format!("The user said: {strange}\n")), "{text}");
    assert!(!text.contains("word word"), "{text}");
    assert_eq!(session.timeline().turns().iter().filter(|turn| turn.role == Role::User).count(), 2);
}

/// A model is an agent, and whatever wraps agents wraps it.
#[test]
fn completion_agent_composes_with_cooling() {
    use halo_agents::agent::{Agent, AgentExt};
    use halo_agents::content::AuthoredMessage;
    use halo_agents::cooled::CoolingLayer;
    use halo_engine::agent::CompletionAgent;
    let model: Box<dyn Model + Send> = Box::new(ScriptedModel::new(
        64,
        vec![even_attention_answer(" It is Betsy."), even_attention_answer(" Yes.")],
    ));
    let speaker = CompletionAgent::new(model, "Be brief.", Sampling { max_tokens: 8, ..Sampling::default() });
    // Without cooling, it would not fit.
    let cooled = speaker.with_layer(CoolingLayer { threshold: 32, ..CoolingLayer::default() });
    let said =
        vec![AuthoredMessage::agent("word ".repeat(400)), AuthoredMessage::user("What is the gun called?")];
    assert_eq!(pollster::block_on(cooled.invoke(said)), Ok("It is Betsy.".to_owned()));
    let why = pollster::block_on(cooled.invoke(vec![AuthoredMessage::user("word ".repeat(400))]))
        .expect_err("too long");
    assert!(why.to_string().contains("do not fit"), "what people say is not cut: {why}");
}

/// A window, and the same as messages.
type RecordedPrompt = (Vec<WindowToken>, Vec<PromptMessage>);

/// A model that keeps what it was asked.
struct PromptRecordingModel {
    inner: ScriptedModel,
    prompts: Arc<Mutex<Vec<RecordedPrompt>>>,
}

impl Model for PromptRecordingModel {
    fn info(&self) -> &ModelInfo {
        self.inner.info()
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        self.inner.tokenize(text, special)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        let asked = (prompt.window.to_vec(), (prompt.messages)());
        self.prompts.lock().expect("nobody panics").push(asked);
        self.inner.generate(prompt, sampling, watch, listen)
    }
}

/// The fork sees the state that lived the range, and behind it what it is told, which names where the range began. A model
/// that is spoken to in messages sees the marks around the range.
#[test]
fn memory_formation_prompt_ends_with_instruction_after_range() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let long = |text: &str| even_attention_answer(&format!("{text}{}", " so it goes".repeat(9)));
    let answers = vec![long(" Noted."), long(" Milk."), even_attention_answer("I told of it.")];
    let inner = ScriptedModel::new(4096, answers).with_template(ChatTemplate::plain());
    let model = Box::new(PromptRecordingModel { inner, prompts: Arc::clone(&asked) });
    let store = Box::new(SharedStore::new(InMemoryStore::default()));
    let mut session =
        Session::open(store, model, None, "main", memory_test_rules(170), &mut |_, _| {}).expect("it opens");
    send(&mut session, "The gun on the wall is called Betsy");
    send(&mut session, "Tell me something about cheese now");
    let window = session.context_window();
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
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
fn memory_keeps_net_tool_operations_of_its_range() {
    let store = SharedStore::new(InMemoryStore::default());
    let call = |name: &str| format!("<tool>jq '.name = \"{name}\"' notes.json > output</tool>");
    let (first, second) = (call("Betsy"), call("Bertha"));
    let answers = [
        first.as_str(),
        "Done so it goes and goes and goes.",
        second.as_str(),
        "Done again and again.",
        "I wrote names.",
    ];
    let mut rules = memory_test_rules(4000);
    rules.tools = Some(JqRunner::InProcess);
    let mut session = open_session(&store, rules, &answers);
    send(
        &mut session,
        "The gun on the wall is called Betsy and it was carved long ago by somebody in the old house",
    );
    send(
        &mut session,
        "No, it is called Bertha, I was wrong about that, and it was carved by somebody else altogether",
    );
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    assert_eq!(session.memories()[0].operations, [".name = \"Bertha\""]);
}

/// A full window, what is too old, and memories that matter little are let go of in one cycle, over the real memories.
#[test]
fn memory_is_disabled_by_forgetting_cycle() {
    use halo_agents::forgetting::{ApplyRetention, ForgettingAction, coordinated_forgetting_cycle};
    use halo_core::salience::SalienceScorer;
    use halo_core::sliding_window::{SlidingWindow, WindowSize};
    struct NoRetention;
    impl ApplyRetention for NoRetention {
        async fn apply_retention_policy(&mut self) -> Result<usize, Error> {
            Ok(0)
        }
    }
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = session_with_placed_memory(&store);
    let mut scorer = SalienceScorer::default();
    scorer.register_entity("winter");
    let mut window = SlidingWindow::new(WindowSize { window: 10, sink: 1, recent: 2 }, Some(scorer.clone()));
    (0..10).for_each(|n| drop(window.push(format!("w{n}"), 1)));
    let done = pollster::block_on(coordinated_forgetting_cycle(
        &mut window,
        &scorer,
        &mut NoRetention,
        &mut session,
        0.8,
    ));
    let done = done.expect("nothing fails");
    // The older of the two names nobody who is known; the other is new, and tells of winter.
    assert!(
        done.actions.contains(&ForgettingAction::MemoryDeactivate(1))
            && !done.actions.contains(&ForgettingAction::MemoryDeactivate(2))
    );
    assert!(session.memories()[0].disabled && !session.memories()[1].disabled);
    assert!(!session.context_window_text().contains("<memory from=\"0\""), "what rests does not stand");
}

/// A branch has the memories of what it shares, and none of what was never said there.
#[test]
fn branch_keeps_memories_of_shared_turns() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = session_with_placed_memory(&store);
    let spans: Vec<u32> = session.memories().iter().map(|memory| memory.range.to.0).collect();
    assert_eq!(spans, [3, 9]);
    session.branch("aside", Some(5)).expect("it branches");
    let of = |name: &str| {
        halo_engine::memory::load_memories(&mut store.clone(), name).expect("they are read").len()
    };
    assert_eq!((of("main"), of("aside")), (2, 1));
    let model = Box::new(ScriptedModel::new(4096, vec![]).with_template(ChatTemplate::plain()));
    let branch =
        Session::open(Box::new(store.clone()), model, None, "aside", memory_test_rules(170), &mut |_, _| {});
    let due = branch.expect("it opens").next_memory_range().map(|span| span.from);
    assert!(due.is_none_or(|from| from == (4, 0)), "the rest of the range is due again: {due:?}");
}

/// What is taken back is not quoted any more, at once; what leaves later is quoted too.
#[test]
fn memory_quotes_pruned_but_not_deleted_chunks() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = session_with_placed_memory(&store);
    let chunk: ChunkId = "u0.0".parse().expect("a name");
    session.apply_edit(ManualEdit::Delete, &[chunk]).expect("it is deleted");
    assert!(!session.context_window_text().contains("gun on the wall"), "{}", session.context_window_text());
    run_idle_work(&mut session);
    assert!(!session.context_window_text().contains("gun on the wall"), "{}", session.context_window_text());
    // A range that leaves piece by piece.
    let store = SharedStore::new(InMemoryStore::default());
    let mut rules = memory_test_rules(2000);
    rules.memory = Some(MemoryRules {
        range_tokens: 60,
        max_range_tokens: 400,
        max_tokens: 12,
        delay_answers: 0,
        window_share: 0.5,
        reflection: None,
    });
    let mut session = open_session(&store, rules, &[ANSWERS[0], ANSWERS[1], ANSWERS[3], "I told of much."]);
    for text in ["The gun on the wall is called Betsy", "Tell me something about cheese now", "And trains"] {
        send(&mut session, text);
    }
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    let chunks = |turns: std::ops::Range<u32>| -> Vec<ChunkId> {
        turns
            .map(|n| ChunkId::new(if n % 2 == 0 { Role::User } else { Role::Assistant }, TurnId(n), 0))
            .collect()
    };
    session.apply_edit(ManualEdit::Prune, &chunks(0..2)).expect("they leave");
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    assert!(
        session.context_window_text().contains("The user said: The gun")
            && !session.context_window_text().contains("said: Tell me")
    );
    session.apply_edit(ManualEdit::Prune, &chunks(2..4)).expect("they leave");
    run_idle_work(&mut session);
    assert!(
        session.context_window_text().contains("The user said: Tell me something about cheese now"),
        "{}",
        session.context_window_text()
    );
}

/// Looking back works beside memories that stand.
#[test]
fn reflection_covers_whole_conversation_beside_placed_memories() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = session_with_placed_memory(&store);
    let id = session.reflect(&|| false).expect("nothing fails");
    let memory = session.memories().iter().find(|memory| Some(memory.id) == id).expect("it is kept");
    assert!(memory.reflection && memory.range.from == (0, 0));
}
