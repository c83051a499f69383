//! When a turn writes what to the store.

use crate::common::test_rules;
use halo_core::attention::AttentionRequest;
use halo_core::brightness::ScoringStrategy;
use halo_core::model::{
    AttentionRow, FinishReason, Model, ModelInfo, ModelStep, ModelToken, Prompt, Sampling, StepFlow,
};
use halo_core::store::{Access, Store};
use halo_core::testing::doubles::{
    HashEmbedder, InMemoryStore, ScriptedAnswer, ScriptedAttention, ScriptedModel,
};
use halo_core::testing::shared_store::SharedStore;
use halo_core::token::{Brightness, ChunkId, Role};
use halo_core::{Error, ErrorKind};
use halo_engine::event::Event;
use halo_engine::rules::ConversationRules;
use halo_engine::session::Session;
use jiff::civil::{Date, date};

const TODAY: Date = date(2026, 11, 15);

/// The stored brightness of a chunk; empty before the chunk is stored.
fn stored_brightness(store: &SharedStore<InMemoryStore>, chunk: ChunkId) -> Vec<Brightness> {
    let timeline = store.clone().load("main", Access::Read).expect("the conversation loads");
    timeline.chunk(chunk).map(|chunk| chunk.brightness(chunk.run()).to_vec()).unwrap_or_default()
}

/// Brightness changes in memory with every token, and is stored once, when the answer is complete.
#[test]
fn brightness_is_stored_once_after_the_answer() {
    let store = SharedStore::new(InMemoryStore::default());
    let attention = ScriptedAttention::OnWord("Betsy".into());
    let texts = [" It is noted.", " one two three four five six seven eight", " one two three"];
    let answers = texts.map(|text| ScriptedAnswer {
        text: text.into(),
        attention: attention.clone(),
        fails_after: None,
    });
    let mut rules = test_rules(0);
    rules.sampling.max_tokens = 8;
    let ScoringStrategy::Magnitude(magnitude) = &mut rules.context.strategy else {
        panic!("the default strategy")
    };
    // Every token that is not attended to loses one point per step, from here.
    let initial = magnitude.initial;
    let model = Box::new(ScriptedModel::new(4096, answers.into()));
    let mut session = Session::open(Box::new(store.clone()), model, None, "main", rules, &mut |_, _| {})
        .unwrap_or_else(|error| panic!("the session does not open: {error}"));
    let chunk: ChunkId = "u0.0".parse().expect("a chunk");
    for (turn, message) in
        ["The gun is called Betsy", "Count to eight", "Count to three"].into_iter().enumerate()
    {
        let (mut tokens, mut before) = (0, Vec::new());
        session
            .send_message(message, TODAY, &mut |event| {
                match event {
                    Event::MessageStored { .. } => before = stored_brightness(&store, chunk),
                    Event::Token { .. } => {
                        tokens += 1;
                        let stored = stored_brightness(&store, chunk);
                        assert_eq!(stored, before, "token {tokens} of answer {turn}");
                    }
                    _ => {}
                }
                StepFlow::Continue
            })
            .unwrap_or_else(|error| panic!("{message}: {error}"));
        assert!(tokens >= 3 && !before.is_empty(), "{tokens} tokens");
        assert_ne!(stored_brightness(&store, chunk), before, "answer {turn} is scored when it is complete");
    }
    let stored = store.clone().load("main", Access::Read).expect("the conversation loads");
    let brightness = |timeline: &halo_core::timeline::Timeline| {
        let chunk = timeline.chunk(chunk).expect("the first message");
        chunk.brightness(chunk.run()).to_vec()
    };
    assert_eq!(brightness(&stored), brightness(session.timeline()));
    assert!(brightness(&stored).iter().any(|token| *token < initial), "some tokens decayed");
}

/// A model that is sure of some of its words and not of others.
struct HalfSureModel(ScriptedModel);

impl Model for HalfSureModel {
    fn info(&self) -> &ModelInfo {
        self.0.info()
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        self.0.tokenize(text, special)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        self.0.generate(prompt, sampling, watch, &mut |step| match step {
            ModelStep::Token(token, Some(row)) => {
                let probability = Some(if token.text.contains("sure") { 0.9 } else { 0.1 });
                listen(ModelStep::Token(token, Some(AttentionRow { probability, ..row })))
            }
            other => listen(other),
        })
    }
}

/// Steps in which the model gave its token a lower probability than the rules ask for are not scored.
#[test]
fn unsure_steps_are_not_scored_where_the_rules_say_so() {
    for (min_confidence, expected_steps) in [(0.0, 6), (0.1, 6), (0.5, 4), (0.95, 0)] {
        let store = SharedStore::new(InMemoryStore::default());
        let text = " sure sure maybe sure maybe sure".to_owned();
        let answer = ScriptedAnswer { text, attention: ScriptedAttention::Uniform, fails_after: None };
        let mut rules = test_rules(0);
        let ScoringStrategy::Magnitude(magnitude) = &mut rules.context.strategy else {
            panic!("the default strategy")
        };
        magnitude.min_confidence = min_confidence;
        let model = Box::new(HalfSureModel(ScriptedModel::new(4096, vec![answer])));
        let mut session = Session::open(Box::new(store), model, None, "main", rules, &mut |_, _| {})
            .unwrap_or_else(|error| panic!("the session does not open: {error}"));
        let mut scored = None;
        session
            .send_message("Are you sure?", TODAY, &mut |event| {
                if let Event::Scored { steps, .. } = event {
                    scored = Some(steps);
                }
                StepFlow::Continue
            })
            .expect("the turn ends");
        assert_eq!(scored, Some(expected_steps), "at least {min_confidence}");
    }
}

fn open_session(store: &SharedStore<InMemoryStore>, rules: ConversationRules, answers: &[&str]) -> Session {
    let answer = |text: &&str| ScriptedAnswer {
        text: (*text).to_owned(),
        attention: ScriptedAttention::Uniform,
        fails_after: None,
    };
    let model = Box::new(ScriptedModel::new(4096, answers.iter().map(answer).collect()));
    Session::open(Box::new(store.clone()), model, Some(Box::new(HashEmbedder)), "main", rules, &mut |_, _| {})
        .unwrap_or_else(|error| panic!("the session does not open: {error}"))
}

/// A message is stored, then searched for while the index does not have it, then indexed, and only then answered.
#[test]
fn message_is_stored_then_searched_for_then_indexed_then_answered() {
    let store = SharedStore::new(InMemoryStore::default());
    let topics = ["cheese", "trains", "winter", "music", "bread", "ships"];
    let answers: Vec<String> = topics.iter().map(|topic| format!(" Much is known of {topic}.")).collect();
    let mut answer_texts: Vec<&str> = vec![" Noted, a gun named Betsy."];
    answer_texts.extend(answers.iter().map(String::as_str));
    answer_texts.push(" It is Betsy.");
    let mut session = open_session(&store, test_rules(60), &answer_texts);
    let cell = session.attach_snapshot(0);
    let mut send = |message: &str| -> Vec<(&'static str, usize, usize)> {
        let mut seen = Vec::new();
        session
            .send_message(message, TODAY, &mut |event| {
                let name = match event {
                    Event::MessageStored { .. } => "stored",
                    Event::Resurrected { .. } => "resurrected",
                    Event::Token { .. } => "token",
                    _ => return StepFlow::Continue,
                };
                let stored = store.clone().load("main", Access::Read).expect("the conversation loads");
                seen.push((
                    name,
                    stored.chunks().count(),
                    cell.get().state.index.as_ref().map_or(0, |index| index.read().len()),
                ));
                StepFlow::Continue
            })
            .unwrap_or_else(|error| panic!("{message}: {error}"));
        seen
    };
    send("The gun on the wall is called Betsy");
    for topic in topics {
        send(&format!("Tell me something about {topic} now"));
    }
    let seen = send("What is the gun called");
    let first = |name: &str| {
        let found = seen.iter().enumerate().find(|(_, (event, ..))| *event == name);
        found.unwrap_or_else(|| panic!("nothing was {name}: {seen:?}"))
    };
    let (stored, resurrected, token) = (first("stored"), first("resurrected"), first("token"));
    assert!(stored.0 < resurrected.0 && resurrected.0 < token.0, "{seen:?}");
    let (chunks, indexed) = (stored.1.1, stored.1.2);
    assert_eq!(indexed, chunks - 1, "the message is stored and not indexed: {seen:?}");
    assert_eq!(resurrected.1.2, chunks - 1, "the search does not know the message: {seen:?}");
    assert_eq!(token.1.2, chunks, "the message is indexed before it is answered: {seen:?}");
}

/// Nothing is pruned while an answer is generated. Before it, something is pruned only where the message and its answer
/// would not fit.
#[test]
fn pruning_follows_the_answer() {
    let store = SharedStore::new(InMemoryStore::default());
    let answers = vec![" Much is known of it, and more is not known."; 8];
    let mut session = open_session(&store, test_rules(80), &answers);
    let mut pruned_after_answer = 0;
    for n in 0..8 {
        let live = session.live_tokens();
        let mut seen = Vec::new();
        session
            .send_message(&format!("Tell me of number {n}"), TODAY, &mut |event| {
                match event {
                    Event::MessageStored { tokens, .. } => seen.push(("stored", tokens)),
                    Event::Pruned { tokens, .. } => seen.push(("pruned", tokens)),
                    Event::Token { .. } => seen.push(("token", 1)),
                    _ => {}
                }
                StepFlow::Continue
            })
            .expect("the turn ends");
        let at = |name: &str| seen.iter().position(|(event, _)| *event == name);
        let last_token = seen.iter().rposition(|(event, _)| *event == "token").expect("an answer");
        let (stored, first_token) = (at("stored").expect("a message"), at("token").expect("an answer"));
        assert!(seen[first_token..last_token].iter().all(|(event, _)| *event == "token"), "{n}: {seen:?}");
        if seen[..stored].iter().any(|(event, _)| *event == "pruned") {
            // The message, the header of the answer and 8 tokens of the answer.
            assert!(live + seen[stored].1 + 8 >= 80 - 2, "{n}: {live} live, {seen:?}");
        }
        pruned_after_answer += seen[last_token..].iter().filter(|(event, _)| *event == "pruned").count();
    }
    assert!(pruned_after_answer > 0, "the budget is exceeded after some answers");
}

/// Every new token begins at 10,000: the message's, the answer's, and those of the chat template.
#[test]
fn new_tokens_begin_with_full_brightness() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = open_session(&store, test_rules(0), &[" It is noted."]);
    session
        .send_message("The gun is called Betsy", TODAY, &mut |_| StepFlow::Continue)
        .expect("the turn ends");
    let brightness: Vec<f32> = session
        .timeline()
        .chunks()
        .flat_map(|chunk| chunk.brightness(chunk.run()).iter().map(|brightness| brightness.0))
        .collect();
    assert!(
        brightness.len() >= 8 && brightness.iter().all(|brightness| *brightness == 10_000.0),
        "{brightness:?}"
    );
}

/// A long history is several commits, so that other conversations can write between them. A client that was cut off sends it
/// again, and what is stored is not appended twice.
#[test]
fn long_history_is_stored_in_several_commits() {
    let store = SharedStore::new(InMemoryStore::default());
    let mut session = open_session(&store, test_rules(200), &[]);
    let role = |n: usize| if n.is_multiple_of(2) { Role::User } else { Role::Assistant };
    let history: Vec<(Role, String)> = (0..4_500).map(|n| (role(n), format!("message {n}"))).collect();
    let stored_turns = || {
        let timeline = store.clone().load("main", Access::Read).expect("the conversation loads");
        timeline.turns().len()
    };
    let (mut asked, mut seen) = (0, Vec::new());
    let result = session.append_messages(&history, &mut || {
        asked += 1;
        seen.push(stored_turns());
        if asked == 3_000 { StepFlow::Stop } else { StepFlow::Continue }
    });
    seen.dedup();
    assert_eq!(result.expect_err("it was stopped").kind, ErrorKind::Cancelled);
    assert_eq!((seen, stored_turns()), (vec![0, 2_000], 2_000));
    session.append_messages(&history[2_000..], &mut || StepFlow::Continue).expect("the rest is appended");
    assert_eq!(stored_turns(), 4_500);
    assert!(session.live_tokens() <= 200, "{} live tokens", session.live_tokens());
    assert_eq!(session.find_inconsistencies().expect("the check runs"), Vec::<String>::new());
}
