//! Memories on the test doubles: when they are formed, where they are placed, and the origin of every byte of the window.

use crate::common::test_rules;
use halo_core::model::{ChatTemplate, Model, Sampling, StepFlow};
use halo_core::store::{RecordKind, Store};
use halo_core::testing::doubles::{
    HashEmbedder, InMemoryStore, RecordedPrompt, ScriptedAnswer, ScriptedAttention, ScriptedModel,
};
use halo_core::testing::shared_store::SharedStore;
use halo_core::token::{ChunkId, Role, TurnId};
use halo_engine::event::Event;
use halo_engine::manual_edit::ManualEdit;
use halo_engine::memory::segment::{ContextBlock, Facet};
use halo_engine::memory::trace::{SpanKind, trace_memory};
use halo_engine::memory::{
    CarryMode, ConflictDecision, MemoryEdit, MemoryReference, MemoryRules, carry_memories,
};
use halo_engine::rules::ConversationRules;
use halo_engine::session::Session;
use halo_engine::tools::jq::JqRunner;
use jiff::civil::Date;
use std::cell::Cell;
use std::sync::Arc;

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
        overlap_tokens: 0,
        reflection: None,
    };
    rules.memory = Some(memory);
    rules.sampling.max_tokens = 40;
    rules
}

fn open_session(store: &SharedStore<InMemoryStore>, rules: ConversationRules, answers: &[&str]) -> Session {
    // Answers to the user begin with a space and are made long; memories stay short.
    let lengthened = |text: &&str| {
        format!("{text}{}", if text.starts_with(' ') { " so it goes".repeat(9) } else { String::new() })
    };
    let answers = answers.iter().map(|text| even_attention_answer(&lengthened(text))).collect();
    let model = ScriptedModel::new(4096, answers).with_template(ChatTemplate::plain());
    let (store, embedder) = (Box::new(store.clone()), Some(Box::new(HashEmbedder) as _));
    let session = Session::open(store, Box::new(model), embedder, "main", rules, &mut |_, _| {});
    session.unwrap_or_else(|error| panic!("the session does not open: {error}"))
}

fn send(session: &mut Session, message: &str) {
    let result = session.send_message(message, TODAY, &mut |_| StepFlow::Continue);
    result.unwrap_or_else(|error| panic!("{message}: {error}"));
}

/// Runs the idle memory work; returns the memory changes as `action id`.
fn run_idle_work(session: &mut Session) -> Vec<String> {
    let mut changes = Vec::new();
    session
        .run_idle_memory_work(&|| false, &mut |event| {
            if let Event::MemoryChanged { id, action } = event {
                changes.push(format!("{} {id}", action.as_str()));
            }
        })
        .expect("the idle work succeeds");
    changes
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

/// The six steps: turns become blocks, blocks segments, segments the context window; after the turn a memory is requested
/// and formed in a fork; later it is placed where its range was. The origin of every byte is known.
#[test]
fn memory_lifecycle_from_turn_to_placement_with_byte_origins() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = open_session(&store, memory_test_rules(170), &ANSWERS);
    // Steps 1 and 2: turns become blocks, and blocks segments.
    send(&mut session, "The gun on the wall is called Betsy");
    let first = session.render_context();
    let blocks: Vec<String> = first.segments.iter().map(|s| s.block_ids[0].to_string()).collect();
    assert_eq!(blocks, ["instructions", "turn-0", "turn-1"]);
    assert_eq!(first.segments[1].source_frames, [TurnId(0)]);
    let facets: Vec<String> = first.segments[1].facet_ids().iter().map(ToString::to_string).collect();
    assert_eq!(facets, ["u0.0/frame", "u0.0"]);
    // Step 3: the concatenated segments are the context window, token for token.
    assert_eq!(first.text(), session.context_window_text());
    assert_eq!(
        (first.tokens(), session.context_window().len()),
        (session.live_tokens(), session.live_tokens())
    );
    assert_eq!(session.next_memory_range(), None, "the range is too short");
    assert_eq!(run_idle_work(&mut session), Vec::<String>::new());
    send(&mut session, "Tell me something about cheese now");
    // Step 4: after the turn, a memory is requested.
    let range = session.next_memory_range().expect("the range is long enough");
    let request = session.memory_request(range).expect("the request is built");
    assert_eq!((request.compress_from, request.compress_to), (TurnId(0), TurnId(3)));
    assert!(request.agent_response.starts_with(" Cheese is made of milk."));
    assert_eq!(request.segments, session.render_context().segments);
    assert_eq!(request.window(), session.context_window(), "the fork reads the segments of the request");
    // Step 5: the memory is formed and stored, but not placed yet.
    let before = session.context_window_text();
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    assert_eq!(session.context_window_text(), before, "the fork does not change the window");
    let mut store = store;
    let records = store.records("main", RecordKind::Memory).expect("the records are read");
    assert_eq!(records.len(), 1);
    assert_eq!(session.memories()[0].text, "I told of Betsy and cheese.");
    assert_eq!(run_idle_work(&mut session), Vec::<String>::new(), "the range of the memory is still live");
    // Step 6: after its range is pruned, the memory is placed there.
    for topic in ["trains", "winter", "music"] {
        send(&mut session, &format!("Tell me something about {topic} now"));
    }
    assert_eq!(run_idle_work(&mut session), ["formed 2"]);
    assert!(!session.context_window_text().contains("gun"), "{}", session.context_window_text());
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    let context = session.render_context();
    let text = session.context_window_text();
    let memory_text = "System: <memory from=\"0\" to=\"3\">\nThe user said: The gun on the wall is called Betsy\nThe user said: \
                  Tell me something about cheese now\nI told of Betsy and cheese.\n</memory>";
    assert!(text.contains(memory_text), "{text}");
    assert!(
        text.find("<memory").expect("placed") < text.find("music").expect("live"),
        "at the position of its range"
    );
    assert_eq!(context.tokens(), session.live_tokens());
    // From a byte to its origin, and from the origin back to the byte.
    let at = text.find("wall").expect("the message is quoted");
    let origin = context.origin_at(at).expect("every byte has an origin");
    let quote: ChunkId = "u0.0".parse().expect("a chunk id");
    assert_eq!((origin.block, origin.facet), (ContextBlock::Memory(1), Facet::Quote(1, quote)));
    assert_eq!(origin.turns, [0, 1, 2, 3].map(TurnId));
    assert!(context.ranges_of_facet(origin.facet).iter().any(|range| range.contains(&at)));
    assert_eq!(context.segments_of_turn(TurnId(0)), context.segments_of_block(ContextBlock::Memory(1)));
    let memory_origin = context
        .origin_at(text.find("I told").expect("the memory is placed"))
        .expect("every byte has an origin");
    assert_eq!(memory_origin.facet, Facet::Memory(1));
    for at in 0..text.len() {
        let origin = context.origin_at(at).expect("every byte has an origin");
        assert!(context.ranges_of_facet(origin.facet).iter().any(|range| range.contains(&at)));
        assert!(context.segments_of_block(origin.block).contains(&origin.segment));
    }
    assert_eq!(context.origin_at(text.len()), None);
}

/// A session in which memory 1 is placed for turns 0 to 3.
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
    let chunk: ChunkId = "u0.0".parse().expect("a chunk id");
    session.apply_edit(ManualEdit::Resurrect, &[chunk]).expect("the chunk is resurrected");
    assert!(!session.context_window_text().contains("<memory"), "{}", session.context_window_text());
    assert!(session.context_window_text().contains("The gun on the wall is called Betsy"));
    assert!(run_idle_work(&mut session).is_empty(), "the memory stays hidden");
    session.apply_edit(ManualEdit::Unpin, &[chunk]).expect("the chunk is unpinned");
    session.apply_edit(ManualEdit::Prune, &[chunk]).expect("the chunk is pruned");
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    assert_eq!(session.live_tokens(), live);
}

#[test]
fn memory_survives_reopen_and_is_not_formed_twice() {
    let store = SharedStore::new(InMemoryStore::default());
    let window = session_with_placed_memory(&store).context_window_text();
    let mut reopened = open_session(&store, memory_test_rules(170), &ANSWERS[7..]);
    assert_eq!(reopened.context_window_text(), window, "the memory is still placed");
    assert_eq!(reopened.memories().len(), 2);
    assert_eq!(reopened.next_memory_range(), None);
    assert!(run_idle_work(&mut reopened).is_empty());
    let mut disabled = open_session(&store, test_rules(170), &ANSWERS[7..]);
    assert!(
        !disabled.context_window_text().contains("<memory"),
        "no memory is placed where memories are disabled"
    );
    assert!(!disabled.run_idle_memory_work(&|| false, &mut |_| {}).expect("the idle work succeeds"));
}

#[test]
fn memory_can_be_edited_pinned_disabled_and_deleted() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = session_with_placed_memory(&store);
    session.edit_memory(1, MemoryEdit::SetText(" The gun has a name. ".into())).expect("the memory exists");
    assert!(
        !session.context_window_text().contains("<memory"),
        "an edited memory is placed again in idle time"
    );
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    assert!(session.context_window_text().contains("\nThe gun has a name.\n</memory>"));
    assert!(session.memories()[0].edited);
    session.edit_memory(1, MemoryEdit::Disable(true)).expect("the memory exists");
    assert!(run_idle_work(&mut session).is_empty() && !session.context_window_text().contains("<memory"));
    session.edit_memory(1, MemoryEdit::Disable(false)).expect("the memory exists");
    session.edit_memory(1, MemoryEdit::Pin(true)).expect("the memory exists");
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    let hits = session.search_memories("what name has the gun?").expect("the search succeeds");
    assert_eq!(hits.first().map(|(_, memory)| memory.id), Some(1));
    session.edit_memory(1, MemoryEdit::Delete).expect("the memory exists");
    assert!(
        session
            .edit_memory(1, MemoryEdit::Delete)
            .expect_err("the memory is deleted")
            .message
            .contains("no memory 1")
    );
    assert!(session.edit_memory(2, MemoryEdit::SetText("  ".into())).is_err());
    assert_eq!(session.memories().iter().map(|m| m.id).collect::<Vec<_>>(), [2]);
    assert!(run_idle_work(&mut session).is_empty() && !session.context_window_text().contains("<memory"));
    assert_eq!(session.next_memory_range(), None, "a deleted memory is not formed again");
}

#[test]
fn memory_conflicts_are_marked_on_both_sides() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = session_with_placed_memory(&store);
    session
        .edit_memory(1, MemoryEdit::SetText("The door is open. The gun is old.".into()))
        .expect("the memory exists");
    session
        .edit_memory(2, MemoryEdit::SetText("The cat sleeps. The door is closed.".into()))
        .expect("the memory exists");
    let conflicts = |session: &Session| -> Vec<Vec<u64>> {
        session.memories().iter().map(|m| m.conflicts.iter().copied().collect()).collect()
    };
    assert_eq!(conflicts(&session), [vec![2], vec![1]]);
    assert_eq!(
        conflicts(&open_session(&store, memory_test_rules(170), &[])),
        [vec![2], vec![1]],
        "the conflicts are stored"
    );
    session.edit_memory(2, MemoryEdit::SetText("The cat sleeps.".into())).expect("the memory exists");
    assert_eq!(conflicts(&session), [Vec::<u64>::new(), vec![]]);
}

/// A preempted memory is formed again later.
#[test]
fn memory_formation_restarts_after_preemption() {
    let store = SharedStore::new(InMemoryStore::default());
    let answers = [ANSWERS[0], ANSWERS[1], "I would have told of much", "I told of Betsy and cheese."];
    let mut session = open_session(&store, memory_test_rules(170), &answers);
    send(&mut session, "The gun on the wall is called Betsy");
    send(&mut session, "Tell me something about cheese now");
    let range = session.next_memory_range();
    let calls = Cell::new(0);
    let is_preempted = || {
        calls.set(calls.get() + 1);
        calls.get() > 3
    };
    assert!(
        session
            .run_idle_memory_work(&is_preempted, &mut |event| panic!("{event:?}"))
            .expect("the idle work succeeds")
    );
    assert_eq!((session.memories().len(), session.next_memory_range()), (0, range));
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    assert_eq!(session.memories()[0].text, "I told of Betsy and cheese.");
}

#[test]
fn reflection_forms_memory_and_stops_when_preempted() {
    let store = SharedStore::new(InMemoryStore::default());
    let answers = [ANSWERS[0], ANSWERS[1], "They like guns and cheese.", "They like more."];
    let mut session = open_session(&store, long_range_rules(), &answers);
    send(&mut session, "The gun on the wall is called Betsy");
    send(&mut session, "Tell me something about cheese now");
    assert_eq!(session.messages_since_reflection(), 4);
    let id = session.reflect(&|| false).expect("the reflection succeeds").expect("a memory is formed");
    let memory =
        session.memories().iter().find(|memory| memory.id == id).expect("the memory is stored").clone();
    assert!(memory.reflection && memory.text == "They like guns and cheese.");
    assert_eq!((session.messages_since_reflection(), session.next_memory_range()), (0, None));
    assert_eq!(session.reflect(&|| true).expect("the reflection stops"), None, "preempted");
}

/// Rules under which no range of these tests is long enough for a memory.
fn long_range_rules() -> ConversationRules {
    let mut rules = memory_test_rules(170);
    rules.memory = Some(MemoryRules { range_tokens: 500, max_tokens: 12, ..MemoryRules::default() });
    rules
}

/// User messages are quoted verbatim, whatever they contain. A very long message is not quoted.
#[test]
fn memory_quotes_user_verbatim_and_skips_long_messages() {
    let store = SharedStore::new(InMemoryStore::default());
    let special = "Ünïcode </memory> 🌱 “quoted” <tool>jq .</tool>";
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
                overlap_tokens: 0,
                reflection: None,
            });
            rules
        },
        &[" One answer that is there.", " Two.", "I told of strange things."],
    );
    send(&mut session, special);
    send(&mut session, long.trim());
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    let all: Vec<ChunkId> = session.timeline().live_chunks().map(|chunk| chunk.id()).collect();
    session.apply_edit(ManualEdit::Prune, &all).expect("all chunks are pruned");
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    let text = session.context_window_text();
    assert!(text.contains(&format!("The user said: {special}\n")), "{text}");
    assert!(!text.contains("word word"), "{text}");
    assert_eq!(session.timeline().turns().iter().filter(|turn| turn.role == Role::User).count(), 2);
}

/// A completion agent works inside the cooling layer, which shortens its input.
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
    let agent = CompletionAgent::new(model, "Be brief.", Sampling { max_tokens: 8, ..Sampling::default() });
    // Without cooling, the messages would not fit.
    let cooled = agent.with_layer(CoolingLayer { threshold: 32, ..CoolingLayer::default() });
    let messages =
        vec![AuthoredMessage::agent("word ".repeat(400)), AuthoredMessage::user("What is the gun called?")];
    assert_eq!(pollster::block_on(cooled.invoke(messages)), Ok("It is Betsy.".to_owned()));
    let error = pollster::block_on(cooled.invoke(vec![AuthoredMessage::user("word ".repeat(400))]))
        .expect_err("the message is too long");
    assert!(error.to_string().contains("do not fit"), "user messages are not shortened: {error}");
}

/// The fork continues the window of the conversation with an instruction that names the start of the range. In the
/// message form of the prompt, markers enclose the range.
#[test]
fn memory_formation_prompt_ends_with_instruction_after_range() {
    let long_answer = |text: &str| even_attention_answer(&format!("{text}{}", " so it goes".repeat(9)));
    let answers = vec![long_answer(" Noted."), long_answer(" Milk."), even_attention_answer("I told of it.")];
    let model = ScriptedModel::new(4096, answers).with_template(ChatTemplate::plain());
    let prompts = Arc::clone(&model.prompts);
    let store = Box::new(SharedStore::new(InMemoryStore::default()));
    let mut session =
        Session::open(store, Box::new(model), None, "main", memory_test_rules(170), &mut |_, _| {})
            .expect("the session opens");
    send(&mut session, "The gun on the wall is called Betsy");
    send(&mut session, "Tell me something about cheese now");
    let window = session.context_window();
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    let prompts = prompts.lock().expect("the lock is not poisoned");
    let RecordedPrompt { window: prompt_window, messages } = prompts.last().expect("the model was called");
    assert_eq!(prompt_window[..window.len()], window[..], "the prompt begins with the window");
    let end = window.last().and_then(|last| last.position).expect("a timeline token").0;
    assert!(
        prompt_window[window.len()..]
            .iter()
            .zip(end + 1..)
            .all(|(s, n)| s.position.is_some_and(|p| p.0 == n))
    );
    let lines: Vec<String> =
        messages.iter().map(|m| format!("{}: {}", m.role.name(), m.text.trim())).collect();
    assert_eq!(lines[1], "system: <memory_formation_start sequence=\"0\"/>");
    assert!(lines[2].starts_with("user: The gun on the wall"), "{lines:#?}");
    let last = lines.last().expect("the prompt has messages");
    assert!(last.starts_with("user: <memory_formation_end sequence=\"3\"/> Summarize"), "{last}");
    assert!(
        last.contains("<memory_formation_start sequence=\"0\"/> (“The gun on the wall is called Betsy”)"),
        "{last}"
    );
    assert_eq!(lines.len(), 7, "system prompt, marker, four messages, instruction");
}

/// A memory lists the net effect of the tool calls in its range: the last value of each path.
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

/// A branch has the memories of the turns that it shares, and no others.
#[test]
fn branch_keeps_memories_of_shared_turns() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = session_with_placed_memory(&store);
    let range_ends: Vec<u32> = session.memories().iter().map(|memory| memory.range.to.0).collect();
    assert_eq!(range_ends, [3, 8], "{:?}", session.memories().iter().map(|m| m.range).collect::<Vec<_>>());
    session.branch("aside", Some(5)).expect("the branch is created");
    let memory_count = |name: &str| {
        halo_engine::memory::load_memories(&mut store.clone(), name).expect("the memories load").len()
    };
    assert_eq!((memory_count("main"), memory_count("aside")), (2, 1));
    let model = Box::new(ScriptedModel::new(4096, vec![]).with_template(ChatTemplate::plain()));
    let branch =
        Session::open(Box::new(store.clone()), model, None, "aside", memory_test_rules(170), &mut |_, _| {});
    let next_start = branch.expect("the branch opens").next_memory_range().map(|range| range.from);
    assert!(
        next_start.is_none_or(|from| from == (4, 0)),
        "the next range starts after the shared memory: {next_start:?}"
    );
}

/// A deleted chunk is removed from the quotes at once. A chunk that is pruned later is added to the quotes.
#[test]
fn memory_quotes_pruned_but_not_deleted_chunks() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = session_with_placed_memory(&store);
    let chunk: ChunkId = "u0.0".parse().expect("a chunk id");
    session.apply_edit(ManualEdit::Delete, &[chunk]).expect("the chunk is deleted");
    assert!(!session.context_window_text().contains("gun on the wall"), "{}", session.context_window_text());
    run_idle_work(&mut session);
    assert!(!session.context_window_text().contains("gun on the wall"), "{}", session.context_window_text());
    // The range is pruned in two steps.
    let store = SharedStore::new(InMemoryStore::default());
    let mut rules = memory_test_rules(2000);
    rules.memory = Some(MemoryRules {
        range_tokens: 60,
        max_range_tokens: 400,
        max_tokens: 12,
        delay_answers: 0,
        window_share: 0.5,
        overlap_tokens: 0,
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
    session.apply_edit(ManualEdit::Prune, &chunks(0..2)).expect("the chunks are pruned");
    assert_eq!(run_idle_work(&mut session), ["placed 1"]);
    assert!(
        session.context_window_text().contains("The user said: The gun")
            && !session.context_window_text().contains("said: Tell me")
    );
    session.apply_edit(ManualEdit::Prune, &chunks(2..4)).expect("the chunks are pruned");
    run_idle_work(&mut session);
    assert!(
        session.context_window_text().contains("The user said: Tell me something about cheese now"),
        "{}",
        session.context_window_text()
    );
}

/// A reflection covers the whole conversation while a memory is placed.
#[test]
fn reflection_covers_whole_conversation_beside_placed_memories() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = session_with_placed_memory(&store);
    let id = session.reflect(&|| false).expect("the reflection succeeds");
    let memory =
        session.memories().iter().find(|memory| Some(memory.id) == id).expect("the memory is stored");
    assert!(memory.reflection && memory.range.from == (0, 0));
}

/// The record of a memory names what its writer saw, and every byte of its text has an origin.
#[test]
fn memory_record_names_the_segments_of_its_request() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = open_session(&store, memory_test_rules(170), &ANSWERS);
    send(&mut session, "The gun on the wall is called Betsy");
    send(&mut session, "Tell me something about cheese now");
    let range = session.next_memory_range().expect("the range is long enough");
    let request = session.memory_request(range).expect("the request is built");
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    let memory = session.memories()[0].clone();
    assert_eq!(memory.source, Some(request.source()));
    let source = memory.source.clone().expect("a source");
    let blocks: Vec<&str> = source.segments.iter().map(|segment| segment.block.as_str()).collect();
    assert_eq!(blocks, ["instructions", "turn-0", "turn-1", "turn-2", "turn-3"]);
    assert_eq!(source.segments[1].facets, ["u0.0/frame", "u0.0"]);
    assert_eq!(source.segments.iter().map(|segment| segment.tokens).sum::<usize>(), request.tokens());
    let reopened = open_session(&store, memory_test_rules(170), &[]);
    assert_eq!(reopened.memories()[0].source, Some(source), "it is stored");
    // Written text is traced to the paragraph that it shares the most words with.
    let traced = trace_memory(&memory, None, session.timeline());
    assert_eq!(traced.text, "I told of Betsy and cheese.");
    let covered: Vec<usize> = traced.spans.iter().flat_map(|span| span.bytes.clone()).collect();
    assert_eq!(covered, (0..traced.text.len()).collect::<Vec<_>>(), "every byte has one origin");
    assert_eq!(traced.spans[0].kind, SpanKind::Model);
    let chunk = traced.spans[0].chunk.expect("it shares words with the conversation");
    assert!(["u0.0", "a1.0"].contains(&chunk.to_string().as_str()), "{chunk}");
    // Placed, it quotes the user.
    let session = session_with_placed_memory(&SharedStore::new(InMemoryStore::default()));
    let (memory, placed) = (&session.memories()[0], &session.placed_memories()[0]);
    let traced = trace_memory(memory, Some(placed), session.timeline());
    let quotes: Vec<(&str, String)> = (traced.spans.iter())
        .filter(|span| span.kind == SpanKind::Quote)
        .map(|span| (&traced.text[span.bytes.clone()], span.chunk.map(|c| c.to_string()).unwrap_or_default()))
        .collect();
    assert_eq!(
        quotes,
        [
            ("The gun on the wall is called Betsy", "u0.0".to_owned()),
            ("Tell me something about cheese now", "u2.0".to_owned())
        ]
    );
    let covered: Vec<usize> = traced.spans.iter().flat_map(|span| span.bytes.clone()).collect();
    assert_eq!(covered, (0..traced.text.len()).collect::<Vec<_>>(), "every byte has one origin");
}

/// Turns that were pruned before they were remembered are remembered too: the fork has them in its window. Imported turns
/// are not.
#[test]
fn memory_covers_turns_that_were_pruned_before() {
    let store = SharedStore::new(InMemoryStore::default());
    let answers = [ANSWERS[0], ANSWERS[1], ANSWERS[3], ANSWERS[4], "I told of Betsy.", "I told of trains."];
    let mut rules = memory_test_rules(120);
    rules.memory = rules.memory.map(|memory| MemoryRules { range_tokens: 30, ..memory });
    let mut session = open_session(&store, rules.clone(), &answers);
    for text in
        ["The gun on the wall is called Betsy", "Cheese please now", "Trains please now", "Winter too"]
    {
        send(&mut session, text);
    }
    let first = session.timeline().chunk("u0.0".parse().expect("a chunk id")).expect("the chunk exists");
    assert!(!first.is_live(), "the first turn was pruned before any memory");
    let range = session.next_memory_range().expect("it is due");
    assert_eq!(range.from, (0, 0));
    let request = session.memory_request(range).expect("the request is built");
    let text: String = request.segments.iter().map(|segment| segment.content.as_str()).collect();
    assert!(text.contains("The gun on the wall is called Betsy"), "{text}");
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    assert_eq!(session.memories()[0].range.from, (0, 0));
    drop(session);
    // After a restart the answered turns are known from their records.
    let mut session = open_session(&store, rules, &answers[5..]);
    let next = session.next_memory_range().expect("the rest is due");
    assert_eq!(next.from.0, session.memories()[0].range.to.0 + 1);
    assert!(session.run_idle_memory_work(&|| false, &mut |_| {}).expect("the idle work succeeds"));
    // Messages that nobody answered here are not remembered once they are out of the window.
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = open_session(&store, memory_test_rules(120), &[ANSWERS[0]]);
    let imported: Vec<(Role, String)> = (0..8)
        .map(|n| {
            let role = if n % 2 == 0 { Role::User } else { Role::Assistant };
            (role, format!("Imported message number {n} with some more words in it for length"))
        })
        .collect();
    session.append_messages(&imported, &mut || StepFlow::Continue).expect("the messages are appended");
    send(&mut session, "Hello");
    let live = session.timeline().live_chunks().map(|chunk| chunk.id());
    let all: Vec<ChunkId> = live.filter(|chunk| chunk.turn.0 < 8).collect();
    session.apply_edit(ManualEdit::Prune, &all).expect("the chunks are pruned");
    assert!(
        session.next_memory_range().is_none_or(|range| range.from.0 >= 8),
        "{:?}",
        session.next_memory_range()
    );
}

/// A memory overlaps with the messages before its range: its writer summarizes those too, and they are quoted once.
#[test]
fn memory_overlaps_with_the_text_before_its_range() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut rules = memory_test_rules(4000);
    rules.memory = rules.memory.map(|memory| MemoryRules { overlap_tokens: 50, delay_answers: 0, ..memory });
    let answers = [ANSWERS[0], ANSWERS[1], "I told of Betsy.", ANSWERS[3], ANSWERS[4], "I told of trains."];
    let mut session = open_session(&store, rules, &answers);
    send(&mut session, "The gun on the wall is called Betsy");
    send(&mut session, "Tell me something about cheese now");
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    assert_eq!(session.memories()[0].overlap_from, None, "there is nothing before the first range");
    send(&mut session, "Tell me something about trains now");
    send(&mut session, "Tell me something about winter now");
    assert_eq!(run_idle_work(&mut session), ["formed 2"]);
    let memory = &session.memories()[1];
    let overlap = memory.overlap_from.expect("an overlap");
    assert!(overlap < memory.range.from && overlap >= (2, 0), "{overlap:?} before {:?}", memory.range);
    let all: Vec<ChunkId> = session.timeline().live_chunks().map(|chunk| chunk.id()).collect();
    session.apply_edit(ManualEdit::Prune, &all).expect("all chunks are pruned");
    while !run_idle_work(&mut session).is_empty() {}
    let text = session.context_window_text();
    assert_eq!(text.matches("<memory from=").count(), 2, "{text}");
    assert_eq!(text.matches("The user said: Tell me something about cheese now").count(), 1, "{text}");
}

/// A later value of the same thing replaces the earlier one; other contradictions wait for the user.
#[test]
fn memory_conflicts_are_resolved_by_rule_or_by_the_user() {
    let store = SharedStore::new(InMemoryStore::default());
    let answers = [
        ANSWERS[0],
        ANSWERS[1],
        "The meeting is on Monday. The door is open. Tea is good.",
        ANSWERS[3],
        ANSWERS[4],
        "The meeting is on Friday. The door is closed.",
    ];
    let mut rules = memory_test_rules(4000);
    rules.memory = rules.memory.map(|memory| MemoryRules { max_tokens: 40, ..memory });
    let mut session = open_session(&store, rules.clone(), &answers);
    for topic in ["guns", "cheese"] {
        send(&mut session, &format!("Tell me something about {topic} now"));
    }
    assert_eq!(run_idle_work(&mut session), ["formed 1"]);
    for topic in ["trains", "winter"] {
        send(&mut session, &format!("Tell me something about {topic} now"));
    }
    assert_eq!(run_idle_work(&mut session), ["formed 2"]);
    assert_eq!(session.memories()[0].current_text(), "The door is open. Tea is good.", "Monday is over");
    let open = session.open_memory_conflicts();
    let [conflict] = &open[..] else { panic!("{open:?}") };
    assert_eq!((conflict.first, conflict.second), (1, 2));
    assert_eq!(conflict.first_sentence, "The door is open.");
    assert_eq!(conflict.second_sentence, "The door is closed.");
    let none = session.resolve_memory_conflict(1, 9, ConflictDecision::KeepBoth).expect_err("no memory 9");
    assert_eq!(none.kind, halo_core::ErrorKind::NotFound);
    session.resolve_memory_conflict(2, 1, ConflictDecision::KeepSecond).expect("the conflict is open");
    let texts: Vec<String> = session.memories().iter().map(|memory| memory.current_text()).collect();
    assert_eq!(texts, ["The door is open. Tea is good.", "The meeting is on Friday."]);
    assert_eq!(session.open_memory_conflicts(), []);
    assert!(session.resolve_memory_conflict(1, 2, ConflictDecision::KeepBoth).is_err(), "it is resolved");
    let reopened = open_session(&store, rules, &[]);
    assert_eq!(reopened.memories()[1].current_text(), "The meeting is on Friday.", "the decision is stored");
    // Both may stay; they are not asked about again.
    session.edit_memory(2, MemoryEdit::SetText("The door is closed.".into())).expect("the memory exists");
    session.resolve_memory_conflict(1, 2, ConflictDecision::KeepBoth).expect("the conflict is open");
    session.edit_memory(1, MemoryEdit::Pin(true)).expect("the memory exists");
    assert_eq!(session.open_memory_conflicts(), []);
}

/// Memories are carried into a new conversation and into an existing one; one memory may span several conversations.
#[test]
fn memories_are_carried_into_other_conversations() {
    let mut store = SharedStore::new(InMemoryStore::default());
    drop(session_with_placed_memory(&store));
    let open = |store: &SharedStore<InMemoryStore>, name: &str| {
        let answers = vec![even_attention_answer(" Hello."), even_attention_answer(" Again.")];
        let model = Box::new(ScriptedModel::new(4096, answers).with_template(ChatTemplate::plain()));
        let rules = test_rules(400);
        let session = Session::open(Box::new(store.clone()), model, None, name, rules, &mut |_, _| {});
        session.unwrap_or_else(|error| panic!("the session does not open: {error}"))
    };
    let reference =
        |conversation: &str, memory| MemoryReference { conversation: conversation.into(), memory };
    let mut new = open(&store, "new");
    let missing = new.carry_memories(&[reference("main", 9)], CarryMode::Separate).expect_err("no memory 9");
    assert!(missing.message.contains("no memory 9"), "{missing}");
    let ids = new.carry_memories(&[reference("main", 1), reference("main", 2)], CarryMode::Separate);
    assert_eq!(ids.expect("both exist"), [1, 2]);
    assert!(new.context_window_text().contains("I told of Betsy and cheese."), "before the first message");
    send(&mut new, "Hello");
    assert!(
        new.context_window_text().contains("Be brief.\n\nWhat you remember of earlier"),
        "{}",
        new.context_window_text()
    );
    drop(new);
    let mut new = open(&store, "new");
    assert!(new.context_window_text().contains("I told of Betsy and cheese."), "after a restart");
    assert!(new.memories().iter().all(|memory| memory.is_carried() && memory.carried_from.len() == 1));
    new.edit_memory(1, MemoryEdit::Disable(true)).expect("the memory exists");
    assert!(!new.context_window_text().contains("Betsy"), "{}", new.context_window_text());
    drop(new);
    // One memory of two conversations, in an existing conversation.
    let mut third = open(&store, "third");
    send(&mut third, "Hi");
    drop(third);
    let references = [reference("main", 1), reference("new", 2)];
    let carried = carry_memories(&mut store, "third", &references, CarryMode::Joined).expect("both exist");
    assert_eq!(carried.len(), 1);
    assert_eq!(carried[0].text, "I told of Betsy and cheese.\nI told of trains and winter.");
    assert_eq!(carried[0].carried_from.len(), 2);
    assert!(open(&store, "third").context_window_text().contains("trains and winter"));
}
