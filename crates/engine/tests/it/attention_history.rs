//! The stored attention of answers: for how many, and for which.

use crate::common::test_rules;
use crate::turn::{answer_attending_to, open_session, send, shared_store};
use halo_core::store::{RecordKind, Store};
use halo_core::testing::doubles::{InMemoryStore, ScriptedAnswer, ScriptedAttention};
use halo_core::testing::shared_store::SharedStore;
use halo_core::token::{ChunkId, TurnId};
use halo_core::ttl::TtlRules;
use halo_engine::attention_history::load_answer_attention;
use halo_engine::rules::ConversationRules;
use halo_engine::session::Session;

fn attended_chunk(store: &SharedStore<InMemoryStore>, session: &Session, turn: u32) -> Option<ChunkId> {
    let attention =
        load_answer_attention(&mut store.clone(), "main", TurnId(turn)).expect("the record loads")?;
    let positions = session.timeline().turn_chunks(TurnId(turn)).flat_map(|chunk| chunk.run().positions());
    // The last token that the model has generated: those of the template have no attention.
    let last = positions.filter_map(|position| attention.get(position)).last()?;
    let (position, _) = *last.tokens.first()?;
    session.timeline().chunk_of(position).map(|chunk| chunk.id())
}

fn stored_turns(store: &SharedStore<InMemoryStore>) -> Vec<u32> {
    let records = store.clone().records("main", RecordKind::Attention).expect("the records load");
    records.iter().map(|record| record.key.parse().expect("a turn")).collect()
}

fn id(chunk: &str) -> Option<ChunkId> {
    Some(chunk.parse().expect("an id"))
}

#[test]
fn attention_of_every_answer_is_stored_and_outlives_the_session() {
    let mut store = shared_store(InMemoryStore::default());
    let answers =
        || vec![answer_attending_to(" Noted well.", "Betsy"), answer_attending_to(" Of cheese.", "cheese")];
    let mut session = open_session(&store, test_rules(0), answers());
    send(&mut session, "The gun on the wall is called Betsy");
    send(&mut session, "Now tell me something about cheese");
    drop(session);
    let mut session =
        open_session(&store, test_rules(0), vec![answer_attending_to(" It is Betsy.", "Betsy")]);
    send(&mut session, "What is the gun called");
    assert_eq!(stored_turns(&store), [1, 3, 5]);
    for (turn, chunk) in [(1, "u0.0"), (3, "u2.0"), (5, "u0.0")] {
        assert_eq!(attended_chunk(&store, &session, turn), id(chunk), "turn {turn}");
    }
    assert_eq!(load_answer_attention(&mut store, "main", TurnId(0)), Ok(None), "a message is no answer");
}

#[test]
fn attention_beyond_the_limit_is_deleted_oldest_first() {
    let talk = |store: &SharedStore<InMemoryStore>, limit: usize, messages: usize| {
        let answers = (0..messages).map(|_| answer_attending_to(" one two three four", "cheese")).collect();
        let rules = ConversationRules { attention_history_bytes: limit, ..test_rules(0) };
        let mut session = open_session(store, rules, answers);
        for _ in 0..messages {
            send(&mut session, "Tell me something about cheese");
        }
    };
    let mut unlimited = shared_store(InMemoryStore::default());
    talk(&unlimited, 1 << 20, 5);
    let records = unlimited.records("main", RecordKind::Attention).expect("the records load");
    let sizes: Vec<usize> = records.iter().map(|record| record.value.len()).collect();
    assert_eq!(sizes.len(), 5);
    let store = shared_store(InMemoryStore::default());
    let limit = sizes[3] + sizes[4];
    talk(&store, limit, 3);
    talk(&store, limit, 2);
    assert_eq!(stored_turns(&store), [7, 9]);
    talk(&store, sizes[4] / 2, 1);
    assert_eq!(stored_turns(&store), [7, 9], "an answer that exceeds the limit alone is not stored");
    talk(&store, 0, 1);
    assert_eq!(stored_turns(&store), [7, 9]);
}

#[test]
fn attention_is_stored_only_where_slots_have_positions() {
    let unseen =
        ScriptedAnswer { text: " one two".into(), attention: ScriptedAttention::Missing, fails_after: None };
    let mut ttl = test_rules(0);
    ttl.context.strategy = halo_core::brightness::ScoringStrategy::Ttl(TtlRules::default());
    for (case, rules, answer) in [
        ("a model without attention", test_rules(0), unseen),
        ("time to live", ttl, answer_attending_to(" one two", "cheese")),
    ] {
        let store = shared_store(InMemoryStore::default());
        // The strategy that prunes single tokens calls the model again after each prune.
        let mut session = open_session(&store, rules, vec![answer; 8]);
        send(&mut session, "Tell me something about cheese");
        assert_eq!(stored_turns(&store), [0; 0], "{case}");
    }
}
