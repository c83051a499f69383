//! The index follows the timeline: after any changes it equals one built from scratch.

use halo_core::change::{Append, Change, NewToken};
use halo_core::embedder::Embedder;
use halo_core::manual_edit;
use halo_core::model::StepFlow;
use halo_core::store::{Access, Durability, RecordKind, Store};
use halo_core::testing::doubles::{HashEmbedder, InMemoryStore};
use halo_core::testing::timeline_fuzz::{FuzzOp, TimelineFuzz};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Role, TokenId, TurnId};
use halo_recall::rank::{RankFeature, RankedChunk, SearchMode};
use halo_recall::recall::{Recall, SearchOptions};
use proptest::prelude::*;

const DEFAULT_OPTIONS: SearchOptions =
    SearchOptions { mode: SearchMode::Hybrid, user_boost: 1.0, diversity: 0.0, limit: 100, floor: 0.0 };

fn hash_embedder() -> Option<Box<dyn Embedder + Send>> {
    Some(Box::new(HashEmbedder))
}

fn open_recall(store: &mut InMemoryStore, timeline: &Timeline) -> Recall {
    Recall::open(store, "c", timeline, hash_embedder()).expect("the index opens")
}

fn embed_all(recall: &mut Recall, store: &mut InMemoryStore, timeline: &Timeline) -> usize {
    let mut embedded = 0;
    while recall.index().missing_vectors() > 0 {
        let progress =
            recall.embed_pending(store, timeline, 3, &mut |_| StepFlow::Continue).expect("embedded");
        assert!(progress.embedded > 0, "each call embeds a text");
        embedded += progress.embedded;
    }
    embedded
}

/// A conversation in a store.
struct RecallTestConversation {
    store: InMemoryStore,
    timeline: Timeline,
}

impl RecallTestConversation {
    fn new() -> Self {
        let mut store = InMemoryStore::default();
        let timeline = store.load("c", Access::Write).expect("a new conversation");
        Self { store, timeline }
    }

    fn commit(&mut self, change: &Change) {
        self.store
            .transact("c", &mut self.timeline, change, Durability::Immediate)
            .expect("the change is written");
    }

    /// Appends a turn; `|` starts a new chunk.
    fn append_turn(&mut self, role: Role, turn: u32, text: &str) {
        let mut tokens = Vec::new();
        for (chunk_index, part) in (0..).zip(text.split('|')) {
            for word in part.split_inclusive(' ') {
                let (id, text, brightness) = (TokenId(7), word.to_owned(), Brightness(10_000.0));
                tokens.push(NewToken { id, text, chunk_index, brightness, kind: ContentKind::Message });
            }
        }
        let at = self.timeline.next_position();
        self.commit(&Change::Append(Append { at, turn: TurnId(turn), role, tokens }));
    }

    fn edit(&mut self, plan: impl Fn(&Timeline) -> Change) {
        let change = plan(&self.timeline);
        self.commit(&change);
    }
}

fn chunk_id(name: &str) -> ChunkId {
    name.parse().expect("a chunk id")
}

fn chunk_names(hits: &[RankedChunk]) -> Vec<String> {
    hits.iter().map(|f| f.hit.chunk.to_string()).collect()
}

fn sample_conversation() -> RecallTestConversation {
    let mut conversation = RecallTestConversation::new();
    conversation.append_turn(Role::User, 0, "My sister Anna keeps bees in Lyon.");
    conversation.append_turn(Role::Assistant, 1, "How lovely!| Bees need flowers and some water near by.");
    conversation.append_turn(Role::User, 2, "Which tea is best in the morning?");
    conversation.append_turn(Role::Assistant, 3, "Assam is strong.");
    conversation
}

#[test]
fn search_finds_pruned_but_not_deleted_chunks() {
    let mut conversation = sample_conversation();
    let mut recall = open_recall(&mut conversation.store, &conversation.timeline);
    embed_all(&mut recall, &mut conversation.store, &conversation.timeline);
    let search = |recall: &mut Recall| {
        recall.search("who keeps bees", None, DEFAULT_OPTIONS).expect("the search succeeds")
    };
    assert_eq!(search(&mut recall)[0].hit.chunk, chunk_id("u0.0"));
    conversation.edit(|t| manual_edit::prune(t, chunk_id("u0.0"), None).expect("the chunk can be pruned"));
    assert_eq!(
        recall.sync(&mut conversation.store, &conversation.timeline).expect("synced"),
        0,
        "pruning changes nothing"
    );
    assert_eq!(search(&mut recall)[0].hit.chunk, chunk_id("u0.0"), "a pruned chunk is found");
    conversation.edit(|t| manual_edit::delete(t, chunk_id("u0.0")).expect("the chunk can be deleted"));
    assert!(recall.sync(&mut conversation.store, &conversation.timeline).expect("synced") > 0);
    let hits = search(&mut recall);
    assert!(hits.iter().all(|f| f.hit.chunk != chunk_id("u0.0")), "{:?}", chunk_names(&hits));
    conversation.edit(|t| manual_edit::undelete(t, chunk_id("u0.0")).expect("the chunk can be undeleted"));
    recall.sync(&mut conversation.store, &conversation.timeline).expect("synced");
    embed_all(&mut recall, &mut conversation.store, &conversation.timeline);
    assert_eq!(search(&mut recall)[0].hit.chunk, chunk_id("u0.0"), "an undeleted chunk is found again");
}

#[test]
fn embed_jobs_include_question_again_once_answered() {
    let mut conversation = RecallTestConversation::new();
    conversation.append_turn(Role::User, 0, "Where is the gun?");
    let mut recall = open_recall(&mut conversation.store, &conversation.timeline);
    let jobs: Vec<_> = recall
        .index()
        .pending_embed_jobs(&conversation.timeline, 9)
        .into_iter()
        .map(|job| job.text)
        .collect();
    assert_eq!(jobs, ["Where is the gun?"], "without context both vectors have the same text");
    assert_eq!(embed_all(&mut recall, &mut conversation.store, &conversation.timeline), 2);
    conversation.append_turn(Role::Assistant, 1, "On the wall.|It is loaded.");
    recall.sync(&mut conversation.store, &conversation.timeline).expect("synced");
    let jobs: Vec<_> = recall
        .index()
        .pending_embed_jobs(&conversation.timeline, 9)
        .into_iter()
        .map(|job| (job.text, job.targets.len()))
        .collect();
    let pair = "Where is the gun?\nOn the wall.";
    let expected = [
        // The text in context of both openings is the same.
        (pair.to_owned(), 2),
        ("On the wall.".to_owned(), 1),
        ("It is loaded.".to_owned(), 1),
        (format!("{pair}\nIt is loaded."), 1),
    ];
    assert_eq!(jobs, expected);
    embed_all(&mut recall, &mut conversation.store, &conversation.timeline);
    // The two chunks of the answer are merged.
    conversation.edit(|t| manual_edit::merge(t, chunk_id("a1.1")).expect("the chunks can be merged"));
    recall.sync(&mut conversation.store, &conversation.timeline).expect("synced");
    let jobs: Vec<_> = recall
        .index()
        .pending_embed_jobs(&conversation.timeline, 9)
        .into_iter()
        .map(|job| job.text)
        .collect();
    assert_eq!(jobs, ["Where is the gun?\nOn the wall.It is loaded.", "On the wall.It is loaded."]);
    // After a restart, vectors of current texts are loaded, and no others.
    let mut reopened = open_recall(&mut conversation.store, &conversation.timeline);
    assert_eq!(reopened.index().missing_vectors(), recall.index().missing_vectors());
    let hits = reopened.search("where is the gun", None, DEFAULT_OPTIONS).expect("the search succeeds");
    let has_vectors = |name| {
        hits.iter()
            .find(|f| f.hit.chunk == chunk_id(name))
            .expect("the chunk is found")
            .similarity
            .map(|similarity| similarity.is_some())
    };
    assert_eq!(
        (has_vectors("u0.0"), has_vectors("a1.0")),
        ([true, false], [false, false]),
        "no vector of an older text"
    );
}

/// Maximal marginal relevance: each hit is the one with the largest λ·score − (1 − λ)·10·(largest similarity to a hit
/// before it). The expectation is computed here from the scores and the vectors; 10 scales a cosine to the range of scores.
#[test]
fn search_diversity_follows_the_mmr_formula() {
    let mut conversation = RecallTestConversation::new();
    let texts = [
        "I keep bees in Lyon with my sister Anna.",
        "I keep bees in Lyon with my sister Anna!",
        "I keep bees in Lyon with my sister Anna, too.",
        "I sold honey of the bees at the market on Sunday.",
        "I painted the hive of the bees blue last summer.",
        "I drink tea in the morning.",
    ];
    for (n, text) in (0..).zip(texts) {
        conversation.append_turn(Role::User, 2 * n, text);
    }
    let mut recall = open_recall(&mut conversation.store, &conversation.timeline);
    embed_all(&mut recall, &mut conversation.store, &conversation.timeline);
    let query = "What about my bees?";
    let plain = recall.search(query, None, DEFAULT_OPTIONS).expect("the search succeeds");
    let text_of = |hit: &RankedChunk| texts[hit.hit.chunk.turn.0 as usize / 2];
    let cosine = |a: &RankedChunk, b: &RankedChunk| -> f64 {
        let vectors = HashEmbedder.embed(&[text_of(a), text_of(b)]).expect("embedded");
        vectors[0].iter().zip(&vectors[1]).map(|(x, y)| f64::from(x * y)).sum()
    };
    let expected_order = |diversity: f64| -> Vec<String> {
        let (mut left, mut chosen) = (plain.clone(), Vec::<RankedChunk>::new());
        while !left.is_empty() {
            let value = |hit: &RankedChunk| {
                let nearest = chosen.iter().map(|other| cosine(hit, other)).fold(0.0, f64::max);
                (1.0 - diversity) * hit.hit.score - diversity * 10.0 * nearest
            };
            let best = (0..left.len()).max_by(|&a, &b| value(&left[a]).total_cmp(&value(&left[b])));
            chosen.push(left.remove(best.expect("a hit is left")));
        }
        chunk_names(&chosen)
    };
    let duplicates_in_front = |order: &[String]| {
        order.iter().take(3).filter(|name| ["u0.0", "u2.0", "u4.0"].contains(&name.as_str())).count()
    };
    assert_eq!(duplicates_in_front(&chunk_names(&plain)), 2, "{:?}", chunk_names(&plain));
    for diversity in [0.3, 0.5, 0.7] {
        let options = SearchOptions { diversity, ..DEFAULT_OPTIONS };
        let order = chunk_names(&recall.search(query, None, options).expect("the search succeeds"));
        assert_eq!(order, expected_order(diversity), "diversity {diversity}");
    }
    assert_eq!(duplicates_in_front(&expected_order(0.7)), 1, "duplicates stand behind what differs");
}

#[test]
fn search_hits_explain_their_score() {
    let mut conversation = sample_conversation();
    let names = "{\"0\":\"Marc\",\"1\":\"Halo\",\"2\":\"Marc\",\"3\":\"Halo\"}";
    conversation.store.put_record("c", RecordKind::Setting, "speakers", Some(names)).expect("stored");
    let mut recall = open_recall(&mut conversation.store, &conversation.timeline);
    embed_all(&mut recall, &mut conversation.store, &conversation.timeline);
    let hits = recall
        .search("Where does Marc's sister keep her bees?", None, DEFAULT_OPTIONS)
        .expect("the search succeeds");
    let best = &hits[0];
    assert_eq!(best.hit.chunk, chunk_id("u0.0"));
    assert_eq!(best.matched_terms, ["sister", "keep", "marc", "bee"]);
    assert_eq!(best.ranks, [Some(0), Some(0)]);
    assert!(best.similarity[0].is_some_and(|similarity| similarity > 0.0));
    let score_of =
        |feature| best.feature_scores.iter().find(|(f, _)| *f == feature).map_or(0.0, |(_, score)| *score);
    for feature in [
        RankFeature::Lexical,
        RankFeature::Semantic,
        RankFeature::Speaker,
        RankFeature::FirstPerson,
        RankFeature::MentionsName,
        RankFeature::AnswersName,
    ] {
        assert!(score_of(feature) > 0.0, "{}: {:?}", feature.name(), best.feature_scores);
    }
    let sum: f64 = best.feature_scores.iter().map(|(_, score)| f64::from(*score)).sum();
    assert_eq!(sum, best.hit.score, "the features sum to the score");
    // The boost of user chunks.
    let boosted = recall
        .search("Marc's bees", None, SearchOptions { user_boost: 1.5, ..DEFAULT_OPTIONS })
        .expect("the search succeeds");
    let plain = recall.search("Marc's bees", None, DEFAULT_OPTIONS).expect("the search succeeds");
    let score =
        |hits: &[RankedChunk]| hits.iter().find(|f| f.hit.chunk == chunk_id("u0.0")).map(|f| f.hit.score);
    assert_eq!(score(&boosted), score(&plain).map(|score| score * 1.5));
    // Diversity keeps the best hit first.
    let diverse = recall
        .search("bees", None, SearchOptions { diversity: 0.5, limit: 3, ..DEFAULT_OPTIONS })
        .expect("the search succeeds");
    assert_eq!(diverse.len(), 3);
    assert_eq!(
        diverse[0].hit.chunk,
        recall.search("bees", None, DEFAULT_OPTIONS).expect("the search succeeds")[0].hit.chunk
    );
}

#[test]
fn search_without_embedder_is_lexical() {
    let mut conversation = sample_conversation();
    let mut recall =
        Recall::open(&mut conversation.store, "c", &conversation.timeline, None).expect("the index opens");
    assert!(!recall.has_embedder());
    assert_eq!(recall.index().missing_vectors(), 0);
    for mode in [SearchMode::Hybrid, SearchMode::Dense, SearchMode::Lexical] {
        let hits = recall
            .search("strong tea", None, SearchOptions { mode, ..DEFAULT_OPTIONS })
            .expect("the search succeeds");
        let top: Vec<_> = hits.iter().take(2).map(|f| f.hit.chunk).collect();
        assert!(
            top.contains(&chunk_id("u2.0")) && top.contains(&chunk_id("a3.0")),
            "{:?}",
            chunk_names(&hits)
        );
        assert!(hits.iter().all(|f| f.similarity == [None; 2]));
    }
    assert_eq!(recall.search("…", None, DEFAULT_OPTIONS).expect("a query without words succeeds").len(), 5);
    let mut empty = RecallTestConversation::new();
    let mut recall = open_recall(&mut empty.store, &empty.timeline);
    assert_eq!(recall.search("anything", None, DEFAULT_OPTIONS).expect("the search succeeds"), []);
}

#[test]
fn embed_keeps_finished_vectors_when_stopped() {
    let mut conversation = sample_conversation();
    let mut recall = open_recall(&mut conversation.store, &conversation.timeline);
    let all = recall.index().missing_vectors();
    let progress = recall
        .embed_pending(&mut conversation.store, &conversation.timeline, 99, &mut |_| StepFlow::Stop)
        .expect("stopped");
    assert!(progress.embedded > 0 && progress.missing == all - progress.embedded);
    let reopened = open_recall(&mut conversation.store, &conversation.timeline);
    assert_eq!(reopened.index().missing_vectors(), progress.missing, "stored vectors are loaded");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Random changes, syncs, partial embeddings, crashes and restarts: in the end every search gives the same hits, in the
    /// same order and with the same explanations, as an index built from scratch.
    #[test]
    fn index_equals_one_built_from_scratch(
        ops in proptest::collection::vec(any::<FuzzOp>(), 1..80),
        random in proptest::collection::vec(any::<u8>(), 80 * 3),
        query in "[a-z]{1,3} [a-z]{1,3}( I)?( you)?",
    ) {
        let fuzz = TimelineFuzz::run(&ops);
        let mut store = InMemoryStore::default();
        let mut timeline = store.load("c", Access::Write).expect("a new conversation");
        let mut recall = open_recall(&mut store, &timeline);
        for (change, random) in fuzz.changes.iter().zip(random.chunks(3).cycle()) {
            let durability = if random[0].is_multiple_of(2) { Durability::Immediate } else { Durability::Deferred };
            if store.transact("c", &mut timeline, change, durability).is_err() {
                // After a crash, later changes may not apply.
                continue;
            }
            if random[1].is_multiple_of(3) {
                recall.sync(&mut store, &timeline).expect("synced");
                recall.embed_pending(&mut store, &timeline, usize::from(random[2] % 4), &mut |_| {
                    if random[2].is_multiple_of(5) { StepFlow::Stop } else { StepFlow::Continue }
                }).expect("embedded");
            }
            if random[2].is_multiple_of(11) {
                store.simulate_crash();
                timeline = store.load("c", Access::Write).expect("the conversation loads");
                recall = open_recall(&mut store, &timeline);
            }
        }
        recall.sync(&mut store, &timeline).expect("synced");
        embed_all(&mut recall, &mut store, &timeline);

        let mut fresh = Recall::open(&mut store, "c", &timeline, Some(Box::new(RenamedEmbedder(HashEmbedder)))).expect("the index opens");
        let chunks = timeline.chunks().filter(|c| !c.is_deleted() && !recall.index().text(&timeline, c.id()).trim().is_empty());
        prop_assert_eq!(recall.index().len(), chunks.count());
        embed_all(&mut fresh, &mut store, &timeline);
        for mode in [SearchMode::Hybrid, SearchMode::Dense, SearchMode::Lexical] {
            let options = SearchOptions { mode, ..DEFAULT_OPTIONS };
            prop_assert_eq!(
                recall.search(&query, None, options).expect("the search succeeds"),
                fresh.search(&query, None, options).expect("the search succeeds")
            );
        }
    }
}

/// The same embedder under another name, so that no stored vector is used.
struct RenamedEmbedder(HashEmbedder);

impl Embedder for RenamedEmbedder {
    fn info(&mut self) -> Result<halo_core::embedder::EmbedderInfo, halo_core::Error> {
        Ok(halo_core::embedder::EmbedderInfo { name: "another".into(), ..self.0.info()? })
    }

    fn count_tokens(&mut self, texts: &[&str]) -> Result<Vec<usize>, halo_core::Error> {
        self.0.count_tokens(texts)
    }

    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, halo_core::Error> {
        self.0.embed(texts)
    }
}
