//! The index is a mirror: whatever happens to a conversation, it finds what one built from nothing would find.

use halo_core::change::{Append, Change, NewToken};
use halo_core::seams::{Access, Durability, Embedder, Flow, Kind, Store};
use halo_core::signals;
use halo_core::testing::doubles::{HashEmbedder, MemoryStore};
use halo_core::testing::ops::{Op, World};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, Role, TokenId, TurnId, Voice};
use halo_recall::rank::{Found, Mode, Scale};
use halo_recall::recall::{Manner, Recall};
use proptest::prelude::*;

const PLAIN: Manner = Manner { mode: Mode::Hybrid, user_boost: 1.0, diversity: 0.0, most: 100 };

fn embedder() -> Option<Box<dyn Embedder + Send>> {
    Some(Box::new(HashEmbedder))
}

fn open(store: &mut MemoryStore, timeline: &Timeline) -> Recall {
    Recall::open(store, "c", timeline, embedder()).expect("it opens")
}

fn embed_all(recall: &mut Recall, store: &mut MemoryStore, timeline: &Timeline) -> usize {
    let mut made = 0;
    while recall.index().missing() > 0 {
        let left = recall.embed_some(store, timeline, 3, &mut |_| Flow::Continue).expect("embedded");
        assert!(left.made > 0, "it goes on");
        made += left.made;
    }
    made
}

/// A conversation in a store, spoken turn by turn.
struct Talk {
    store: MemoryStore,
    timeline: Timeline,
}

impl Talk {
    fn new() -> Self {
        let mut store = MemoryStore::default();
        let timeline = store.load("c", Access::Write).expect("a new one");
        Self { store, timeline }
    }

    fn change(&mut self, change: &Change) {
        self.store.transact("c", &mut self.timeline, change, Durability::Now).expect("it is written");
    }

    /// Says something; `|` begins a new chunk.
    fn say(&mut self, role: Role, turn: u32, text: &str) {
        let mut tokens = Vec::new();
        for (sentence, part) in (0..).zip(text.split('|')) {
            for word in part.split_inclusive(' ') {
                let (id, text, brightness) = (TokenId(7), word.to_owned(), Brightness(10_000.0));
                tokens.push(NewToken { id, text, sentence, brightness, voice: Voice::Speaker });
            }
        }
        let at = self.timeline.next_position();
        self.change(&Change::Append(Append { at, turn: TurnId(turn), role, tokens }));
    }

    fn signal(&mut self, signal: impl Fn(&Timeline) -> Change) {
        let change = signal(&self.timeline);
        self.change(&change);
    }
}

fn id(name: &str) -> ChunkId {
    name.parse().expect("a name")
}

fn names(found: &[Found]) -> Vec<String> {
    found.iter().map(|f| f.hit.chunk.to_string()).collect()
}

fn talk() -> Talk {
    let mut talk = Talk::new();
    talk.say(Role::User, 0, "My sister Anna keeps bees in Lyon.");
    talk.say(Role::Assistant, 1, "How lovely!| Bees need flowers and some water near by.");
    talk.say(Role::User, 2, "Which tea is best in the morning?");
    talk.say(Role::Assistant, 3, "Assam is strong.");
    talk
}

#[test]
fn pruned_is_found_and_deleted_is_not() {
    let mut talk = talk();
    let mut recall = open(&mut talk.store, &talk.timeline);
    embed_all(&mut recall, &mut talk.store, &talk.timeline);
    let ask = |recall: &mut Recall| recall.search("who keeps bees", None, PLAIN).expect("found");
    assert_eq!(ask(&mut recall)[0].hit.chunk, id("u0.0"));
    talk.signal(|t| signals::prune(t, id("u0.0"), None).expect("it can leave"));
    assert_eq!(
        recall.follow(&mut talk.store, &talk.timeline).expect("followed"),
        0,
        "leaving changes nothing"
    );
    assert_eq!(ask(&mut recall)[0].hit.chunk, id("u0.0"), "what left is found");
    talk.signal(|t| signals::delete(t, id("u0.0")).expect("it can be taken back"));
    assert!(recall.follow(&mut talk.store, &talk.timeline).expect("followed") > 0);
    let found = ask(&mut recall);
    assert!(found.iter().all(|f| f.hit.chunk != id("u0.0")), "{:?}", names(&found));
    talk.signal(|t| signals::restore(t, id("u0.0")).expect("it can come back"));
    recall.follow(&mut talk.store, &talk.timeline).expect("followed");
    embed_all(&mut recall, &mut talk.store, &talk.timeline);
    assert_eq!(ask(&mut recall)[0].hit.chunk, id("u0.0"), "and is found again");
}

#[test]
fn a_question_is_embedded_again_when_it_is_answered() {
    let mut talk = Talk::new();
    talk.say(Role::User, 0, "Where is the gun?");
    let mut recall = open(&mut talk.store, &talk.timeline);
    let wanted: Vec<_> = recall.index().wanted(&talk.timeline, 9).into_iter().map(|w| w.text).collect();
    assert_eq!(wanted, ["Where is the gun?"], "alone and in place are one text, and one vector");
    assert_eq!(embed_all(&mut recall, &mut talk.store, &talk.timeline), 2);
    talk.say(Role::Assistant, 1, "On the wall.|It is loaded.");
    recall.follow(&mut talk.store, &talk.timeline).expect("followed");
    let wanted: Vec<_> =
        recall.index().wanted(&talk.timeline, 9).into_iter().map(|w| (w.text, w.targets.len())).collect();
    let pair = "Where is the gun?\nOn the wall.";
    let expected = [
        // Of the pair, which stands for both openings, one vector.
        (pair.to_owned(), 2),
        ("On the wall.".to_owned(), 1),
        ("It is loaded.".to_owned(), 1),
        (format!("{pair}\nIt is loaded."), 1),
    ];
    assert_eq!(wanted, expected);
    embed_all(&mut recall, &mut talk.store, &talk.timeline);
    // Joined, the two say one thing.
    talk.signal(|t| signals::merge(t, id("a1.1")).expect("they can be joined"));
    recall.follow(&mut talk.store, &talk.timeline).expect("followed");
    let wanted: Vec<_> = recall.index().wanted(&talk.timeline, 9).into_iter().map(|w| w.text).collect();
    assert_eq!(wanted, ["Where is the gun?\nOn the wall.It is loaded.", "On the wall.It is loaded."]);
    // Who opens it again finds the vectors that still hold, and no others.
    let mut again = open(&mut talk.store, &talk.timeline);
    assert_eq!(again.index().missing(), recall.index().missing());
    let found = again.search("where is the gun", None, PLAIN).expect("found");
    let near =
        |name| found.iter().find(|f| f.hit.chunk == id(name)).expect("it is found").near.map(|n| n.is_some());
    assert_eq!(
        (near("u0.0"), near("a1.0")),
        ([true, false], [false, false]),
        "no vector of what is no longer said"
    );
}

#[test]
fn every_hit_says_why() {
    let mut talk = talk();
    let names = "{\"0\":\"Marc\",\"1\":\"Halo\",\"2\":\"Marc\",\"3\":\"Halo\"}";
    talk.store.put_record("c", Kind::Setting, "speakers", Some(names)).expect("kept");
    let mut recall = open(&mut talk.store, &talk.timeline);
    embed_all(&mut recall, &mut talk.store, &talk.timeline);
    let found = recall.search("Where does Marc's sister keep her bees?", None, PLAIN).expect("found");
    let best = &found[0];
    assert_eq!(best.hit.chunk, id("u0.0"));
    assert_eq!(best.words, ["sister", "keep", "marc", "bee"]);
    assert_eq!(best.ranks, [Some(0), Some(0)]);
    assert!(best.near[0].is_some_and(|near| near > 0.0));
    let points = |scale| best.points.iter().find(|(s, _)| *s == scale).map_or(0.0, |(_, points)| *points);
    for scale in [Scale::Words, Scale::Meaning, Scale::Speaker, Scale::Own, Scale::Name, Scale::NameAsked] {
        assert!(points(scale) > 0.0, "{}: {:?}", scale.name(), best.points);
    }
    let sum: f64 = best.points.iter().map(|(_, points)| f64::from(*points)).sum();
    assert_eq!(sum, best.hit.score, "the points are all there is");
    // The user's own words, raised.
    let boosted = recall.search("Marc's bees", None, Manner { user_boost: 2.0, ..PLAIN }).expect("found");
    let plain = recall.search("Marc's bees", None, PLAIN).expect("found");
    let of = |found: &[Found]| found.iter().find(|f| f.hit.chunk == id("u0.0")).map(|f| f.hit.score);
    assert_eq!(of(&boosted), of(&plain).map(|score| score * 2.0));
    // What is like the first comes later.
    let diverse = recall.search("bees", None, Manner { diversity: 0.5, most: 3, ..PLAIN }).expect("found");
    assert_eq!(diverse.len(), 3);
    assert_eq!(diverse[0].hit.chunk, recall.search("bees", None, PLAIN).expect("found")[0].hit.chunk);
}

#[test]
fn without_an_embedder_it_goes_by_words() {
    let mut talk = talk();
    let mut recall = Recall::open(&mut talk.store, "c", &talk.timeline, None).expect("it opens");
    assert!(!recall.has_meaning());
    assert_eq!(recall.index().missing(), 0);
    for mode in [Mode::Hybrid, Mode::Dense, Mode::Lexical] {
        let found = recall.search("strong tea", None, Manner { mode, ..PLAIN }).expect("found");
        let top: Vec<_> = found.iter().take(2).map(|f| f.hit.chunk).collect();
        assert!(top.contains(&id("u2.0")) && top.contains(&id("a3.0")), "{:?}", names(&found));
        assert!(found.iter().all(|f| f.near == [None; 2]));
    }
    assert_eq!(recall.search("…", None, PLAIN).expect("no words").len(), 5);
    let mut nothing = Talk::new();
    let mut recall = open(&mut nothing.store, &nothing.timeline);
    assert_eq!(recall.search("anything", None, PLAIN).expect("found"), []);
}

#[test]
fn who_stops_loses_nothing() {
    let mut talk = talk();
    let mut recall = open(&mut talk.store, &talk.timeline);
    let all = recall.index().missing();
    let left = recall.embed_some(&mut talk.store, &talk.timeline, 99, &mut |_| Flow::Stop).expect("stopped");
    assert!(left.made > 0 && left.missing == all - left.made);
    let again = open(&mut talk.store, &talk.timeline);
    assert_eq!(again.index().missing(), left.missing, "it goes on where it was");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Followed or not after each change, embedded in part, crashed and opened again: in the end it finds the same, in the
    /// same order, with the same reasons, as one that is built of what is there.
    #[test]
    fn it_is_what_would_be_built_from_nothing(
        ops in proptest::collection::vec(any::<Op>(), 1..80),
        dice in proptest::collection::vec(any::<u8>(), 80 * 3),
        query in "[a-z]{1,3} [a-z]{1,3}( I)?( you)?",
    ) {
        let world = World::live(&ops);
        let mut store = MemoryStore::default();
        let mut timeline = store.load("c", Access::Write).expect("a new one");
        let mut recall = open(&mut store, &timeline);
        for (change, dice) in world.changes.iter().zip(dice.chunks(3).cycle()) {
            let durability = if dice[0].is_multiple_of(2) { Durability::Now } else { Durability::Behind };
            if store.transact("c", &mut timeline, change, durability).is_err() {
                // After a crash, what follows may not fit any more.
                continue;
            }
            if dice[1].is_multiple_of(3) {
                recall.follow(&mut store, &timeline).expect("followed");
                recall.embed_some(&mut store, &timeline, usize::from(dice[2] % 4), &mut |_| {
                    if dice[2].is_multiple_of(5) { Flow::Stop } else { Flow::Continue }
                }).expect("embedded");
            }
            if dice[2].is_multiple_of(11) {
                store.crash();
                timeline = store.load("c", Access::Write).expect("it opens");
                recall = open(&mut store, &timeline);
            }
        }
        recall.follow(&mut store, &timeline).expect("followed");
        embed_all(&mut recall, &mut store, &timeline);

        let mut fresh = Recall::open(&mut store, "c", &timeline, Some(Box::new(Renamed(HashEmbedder)))).expect("it opens");
        let chunks = timeline.chunks().filter(|c| !c.is_withdrawn() && !recall.index().text(&timeline, c.id()).trim().is_empty());
        prop_assert_eq!(recall.index().len(), chunks.count());
        embed_all(&mut fresh, &mut store, &timeline);
        for mode in [Mode::Hybrid, Mode::Dense, Mode::Lexical] {
            let manner = Manner { mode, ..PLAIN };
            prop_assert_eq!(
                recall.search(&query, None, manner).expect("found"),
                fresh.search(&query, None, manner).expect("found")
            );
        }
    }
}

/// The same embedder under another name, so that nothing that was kept is its own.
struct Renamed(HashEmbedder);

impl Embedder for Renamed {
    fn info(&mut self) -> Result<halo_core::seams::EmbedderInfo, halo_core::seams::SeamError> {
        Ok(halo_core::seams::EmbedderInfo { name: "another".into(), ..self.0.info()? })
    }

    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, halo_core::seams::SeamError> {
        self.0.embed(texts)
    }
}
