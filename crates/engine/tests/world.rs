//! Worlds that run: hearts beat by a clock that the test holds, on a real database.

use halo_agents::action::{Action, Bounds};
use halo_agents::count::{Count, QuarterUp};
use halo_agents::format::Format;
use halo_agents::heartbeat::Millis;
use halo_agents::prompts::Prompts;
use halo_agents::scribe::Scribe;
use halo_agents::testing::{self, BEGIN, Lot, Size};
use halo_agents::wish::Wish;
use halo_agents::world::{ARCHITECT, AgentId, Message, Reaction, Sender, World};
use halo_agents::world_file::WorldFile;
use halo_core::seams::{Kind, Sampling, WorldRow, Worlds};
use halo_core::testing::doubles::{ScriptedAnswer, ScriptedModel};
use halo_engine::world::admit;
use halo_engine::world::house::{Beat, House, Next};
use halo_engine::world::mind::Mind;
use halo_engine::world::realm::{self, Realm};
use halo_store::database::{Database, Location};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

const FILE: &str = r#"
    [[agents]]
    name = "Ada"
    seed = "You are Ada."
    interval = 2.0

    [[agents]]
    name = "Ben"
    seed = "You are Ben."
    interval = 3.0
    input_format = "toon"
    output_format = "toon"

    [[rooms]]
    owner = "Ada"
    members = ["Ben"]
    keys = ["open"]
"#;

fn store(folder: &Path) -> Box<dyn Worlds + Send> {
    Box::new(Database::open(&Location::Sqlite(folder.join("halo.db"))).expect("a store"))
}

fn world() -> World {
    toml::from_str::<WorldFile>(FILE).expect("a file").begin("local", BEGIN).expect("a world")
}

/// A mind that says these things, one after the other.
fn mind(answers: &[impl AsRef<str>]) -> Mind {
    let answers = answers
        .iter()
        .map(|text| ScriptedAnswer { text: text.as_ref().into(), ..ScriptedAnswer::default() })
        .collect();
    let model = Box::new(ScriptedModel::new(100_000, answers));
    let sampling = Sampling { max_tokens: 1_000, ..Sampling::default() };
    Mind::new(model, Arc::new(QuarterUp), sampling, true)
}

/// A house whose model says these things, one after the other, and the hand on its clock.
fn house(realm: Realm, answers: &[&str]) -> (House, Arc<AtomicI64>) {
    let hand = Arc::new(AtomicI64::new(BEGIN));
    let clock = Arc::clone(&hand);
    let minds = BTreeMap::from([("local".to_owned(), mind(answers))]);
    let house = House::new(realm, minds, Prompts::default(), Box::new(move || clock.load(Ordering::SeqCst)));
    (house, hand)
}

/// The next heartbeat, whenever that is.
fn beat(house: &House, hand: &AtomicI64) -> Beat {
    for _ in 0..10_000 {
        match house.next(None).expect("it goes on") {
            Next::Beat(beat) => return *beat,
            Next::Wait(time) => {
                hand.fetch_add(time.as_millis() as Millis, Ordering::SeqCst);
            }
            Next::Changed(_) | Next::Broken => {}
        }
    }
    panic!("no heart beats any more");
}

fn said(world: &World, room: u32) -> Vec<(String, String)> {
    let messages = world.room(AgentId(room)).expect("a room").messages.iter();
    messages.map(|message| (message.sender.to_string(), message.content.clone())).collect()
}

#[test]
fn hearts_beat_and_what_they_do_is_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let realm = Realm::found(store(folder.path()), "w", world(), BEGIN).expect("a world");
    let answers = [
        r#"{"responses": [{"room_id": 1, "message": "Hello, Ben."}], "actions": [{"type": "set", "path": "mood", "value": "calm"}]}"#,
        "responses[1]{room_id,message}:\n  1,Hello to you\nactions[1]{type,message_id,reaction}:\n  react,1,thumbs_up",
        "I have nothing to say.",
        r#"{"responses": [{"room_id": 1, "message": "[no response]"}], "actions": [{"type": "fly"}]}"#,
    ];
    let (house, hand) = house(realm, &answers);
    let beats: Vec<Beat> = (0..4).map(|_| beat(&house, &hand)).collect();
    let who: Vec<u32> = beats.iter().map(|beat| beat.who.0).collect();
    assert_eq!(who, [1, 2, 1, 2], "by their own time");
    // Ada's heart beats each 2 s, a tenth later each time, half a second sooner since Ben liked what she said.
    assert_eq!(beats[2].at - beats[0].at, 2_100);
    assert_eq!(beats[3].at - beats[1].at, 3_100);
    assert!(beats[2].outcome.is_err(), "what cannot be read is told");
    let world = house.realm().world.clone();
    assert_eq!(said(&world, 1), [("1".into(), "Hello, Ben.".into()), ("2".into(), "Hello to you".into())]);
    let ada = world.agent(AgentId(1)).expect("alive");
    assert_eq!(ada.knowledge.get("mood"), Ok(Some("calm".into())));
    assert_eq!(ada.interval.seconds(), 1.7, "2.0 + 0.1 - 0.5 + 0.1");
    let refused: Vec<&str> = ada.recent.iter().filter_map(|one| one.refused.as_deref()).collect();
    assert_eq!(refused, ["the answer is neither JSON nor TOON with 'responses' and 'actions'"]);
    let ben = world.agent(AgentId(2)).expect("alive");
    assert_eq!(ben.recent.back().and_then(|one| one.refused.as_deref()), Some("there is no action 'fly'"));
    // Whoever opens it again finds it as it was; nobody else can meanwhile.
    assert!(
        Realm::open(store(folder.path()), "w").is_err_and(|why| why.to_string().contains("another Halo"))
    );
    drop(house);
    let again = Realm::open(store(folder.path()), "w").expect("it was kept");
    assert_eq!(again.world, world);
}

#[test]
fn what_is_said_is_counted_before_anybody_looks() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = world();
    world.wish(Wish::Join { room: AgentId(1) }, BEGIN).expect("the person is let in");
    let realm = Realm::found(store(folder.path()), "w", world, BEGIN).expect("a world");
    let counted: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = Arc::clone(&counted);
    let count = move |text: &str| {
        log.lock().expect("one at a time").push(text.to_owned());
        QuarterUp.tokens(text)
    };
    let quiet = r#"{"responses": [], "actions": []}"#;
    let mut mind =
        mind(&[r#"{"responses": [{"room_id": 1, "message": "from an agent"}], "actions": []}"#, quiet]);
    mind.scribe = Arc::new(Scribe::new(Arc::new(count)));
    let hand = Arc::new(AtomicI64::new(BEGIN));
    let clock = Arc::clone(&hand);
    let minds = BTreeMap::from([("local".to_owned(), mind)]);
    let house = House::new(realm, minds, Prompts::default(), Box::new(move || clock.load(Ordering::SeqCst)));
    // How often a message was counted when it had been said, and how often when both had looked at it.
    let times = |what: &str| {
        let times =
            || counted.lock().expect("one at a time").iter().filter(|text| text.contains(what)).count();
        assert!(said(&house.realm().world, 1).iter().any(|(_, said)| said == what), "{what} was said");
        let before = times();
        for (who, format) in [(1, Format::Json), (2, Format::Toon)] {
            assert_eq!(house.realm().world.agent(AgentId(who)).map(|agent| agent.input), Some(format));
            let shown = house.show(AgentId(who), None).expect("it fits");
            assert!(shown.text().contains(what), "{who} sees {what}");
        }
        (before, times())
    };
    let say = |what: &str| Wish::Say { room: AgentId(1), message: what.into(), reply_to: None };
    house.wish(say("from the person")).expect("said");
    assert_eq!(times("from the person"), (2, 2), "once in each format, and never again");
    realm::post(&mut *store(folder.path()), "w", &say("from outside"), BEGIN).expect("left");
    house.catch_up().expect("it looks");
    assert_eq!(times("from outside"), (2, 2));
    beat(&house, &hand);
    hand.fetch_add(60_000, Ordering::SeqCst);
    house.catch_up().expect("it is written by now");
    assert_eq!(times("from an agent"), (2, 2));
    // What somebody feels about it is another text.
    let message =
        house.realm().world.room(AgentId(1)).and_then(|room| room.messages.back()).map(|last| last.id);
    let react = Wish::React { message: message.expect("something was said"), reaction: Reaction::ThumbsUp };
    house.wish(react).expect("felt");
    assert_eq!(times("from an agent"), (4, 4));
}

#[test]
fn the_person_takes_part_and_so_do_those_outside() {
    let folder = tempfile::tempdir().expect("a folder");
    let realm = Realm::found(store(folder.path()), "w", world(), BEGIN).expect("a world");
    // Somebody leaves a message while nobody runs the world.
    let outside = Wish::Say { room: AgentId(1), message: "Is anybody there?".into(), reply_to: None };
    realm::post(&mut *store(folder.path()), "w", &outside, BEGIN).expect("left");
    let bad = Wish::Say { room: AgentId(77), message: "x".into(), reply_to: None };
    realm::post(&mut *store(folder.path()), "w", &bad, BEGIN).expect("left");
    assert!(realm::post(&mut *store(folder.path()), "none", &outside, BEGIN).is_err());
    let (house, _) = house(realm, &[]);
    house.pause(true);
    assert!(matches!(house.next(None).expect("it looks"), Next::Changed(_)));
    assert_eq!(house.take_refused(), ["there is no room 77"]);
    assert!(matches!(house.next(None).expect("it looks"), Next::Wait(_)), "once, and nobody's heart beats");
    let heard = said(&house.realm().world, 1);
    assert_eq!(heard.last(), Some(&("The Architect".into(), "Is anybody there?".into())));
    let id = house
        .realm()
        .world
        .room(AgentId(1))
        .and_then(|room| room.messages.back())
        .map(|m| m.id)
        .expect("said");
    let own = house.wish(Wish::React { message: id, reaction: Reaction::Heart });
    assert!(own.is_err_and(|why| why.to_string().contains("themselves")));
    house.wish(Wish::Join { room: AgentId(2) }).expect("every door is open");
    assert!(house.wish(Wish::Join { room: AgentId(2) }).is_err(), "once");
    house.wish(Wish::Leave { room: AgentId(2) }).expect("and lets go");
    house.wish(Wish::Attend { agent: AgentId(2), room: AgentId(1), value: "70%".into() }).expect("turned");
    assert_eq!(
        house.realm().world.shares(AgentId(2)),
        BTreeMap::from([(AgentId(1), 70.0), (AgentId(2), 30.0)])
    );
    house
        .wish(Wish::Create {
            name: "Cy".into(),
            prompt: "x".into(),
            kind: Default::default(),
            room: Some(AgentId(1)),
        })
        .expect("made");
    house.wish(Wish::Pause { agent: AgentId(3) }).expect("paused");
    assert!(house.realm().world.agent(AgentId(3)).expect("alive").paused);
    house.wish(Wish::Retire { agent: AgentId(3) }).expect("retired");
    assert!(house.wish(Wish::Wake { agent: AgentId(3) }).is_err());
    assert!(house.realm().world.are_near(ARCHITECT, AgentId(2)));
    assert_eq!(house.show(AgentId(2), Some(Format::Toon)).expect("a HUD").hud.rooms.len(), 2);
}

#[test]
fn time_can_be_stopped_stepped_and_sped_up() {
    let folder = tempfile::tempdir().expect("a folder");
    let realm = Realm::found(store(folder.path()), "w", world(), BEGIN).expect("a world");
    let (house, hand) = house(realm, &["{\"actions\": []}"; 8]);
    house.pause(true);
    let begin = house.now();
    hand.fetch_add(60_000, Ordering::SeqCst);
    assert!(matches!(house.next(None), Ok(Next::Wait(_))));
    let beaten = |house: &House| match house.next(None) {
        Ok(Next::Beat(beat)) => beat.who.0,
        other => panic!("{other:?}"),
    };
    // Whoever's turn it is; for those whose time has not come, time goes on until it has.
    for (who, passed) in [(1, 0), (2, 0), (1, 2_100), (2, 3_100), (1, 4_300)] {
        house.step();
        assert_eq!(beaten(&house), who);
        assert_eq!(house.now() - begin, passed, "time stands still");
        assert!(matches!(house.next(None), Ok(Next::Wait(_))), "one step is one heartbeat");
    }
    // Who is woken thinks before all others.
    house.wish(Wish::Wake { agent: AgentId(1) }).expect("awake");
    house.step();
    assert_eq!((beaten(&house), house.now() - begin), (1, 4_300));
    // Where nobody can think, a step is not saved up.
    for agent in [AgentId(1), AgentId(2)] {
        house.wish(Wish::Pause { agent }).expect("paused");
    }
    house.step();
    assert!(matches!(house.next(None), Ok(Next::Wait(_))));
    for agent in [AgentId(1), AgentId(2)] {
        house.wish(Wish::Resume { agent }).expect("goes on");
    }
    assert!(matches!(house.next(None), Ok(Next::Wait(_))));
    // Nobody has missed anything when time goes on, at whatever speed.
    house.set_speed(10.0);
    assert_eq!(house.now() - begin, 4_300);
    house.pause(false);
    hand.fetch_add(200, Ordering::SeqCst);
    assert_eq!(house.now() - begin, 6_300);
    assert_eq!(beaten(&house), 2);
    assert!(matches!(house.next(None), Ok(Next::Wait(_))));
    assert!(house.realm().world.head.clock >= begin, "time never goes back");
}

/// What Ada says in three heartbeats, Ben silent between them.
fn three(long: &str) -> Vec<String> {
    let say = |text: &str| json!({"responses": [{"room_id": 1, "message": text}], "actions": []}).to_string();
    let nothing = || r#"{"actions": []}"#.to_owned();
    vec![say("First."), nothing(), say(long), nothing(), say("Last."), nothing()]
}

fn refusals(world: &World) -> Vec<String> {
    world.everybody().flat_map(|agent| agent.recent.iter().filter_map(|one| one.refused.clone())).collect()
}

#[test]
fn what_somebody_writes_in_a_step_is_said_in_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let realm = Realm::found(store(folder.path()), "w", world(), BEGIN).expect("a world");
    let long = "word ".repeat(40);
    let answers = three(&long);
    let (house, _) = house(realm, &answers.iter().map(String::as_str).collect::<Vec<_>>());
    house.pause(true);
    for _ in 0..5 {
        house.step();
        while !matches!(house.next(None).expect("it goes on"), Next::Wait(_)) {}
    }
    let words: Vec<String> = said(&house.realm().world, 1).into_iter().map(|(_, text)| text).collect();
    assert_eq!(words, ["First.", long.trim(), "Last."]);
    assert_eq!(refusals(&house.realm().world), Vec::<String>::new());
}

/// However long somebody thinks: what it has written meanwhile is said before it speaks again.
#[test]
fn what_is_written_while_somebody_thinks_is_said_first() {
    let mut answers = three(&"word ".repeat(40));
    let last = answers[4].clone();
    answers.extend(std::iter::repeat_n(last, 30));
    for seconds in 1..=10 {
        let folder = tempfile::tempdir().expect("a folder");
        let realm = Realm::found(store(folder.path()), "w", world(), BEGIN).expect("a world");
        let hand = AtomicI64::new(BEGIN);
        // Whenever somebody looks at the clock, so much time has passed.
        let clock = move || hand.fetch_add(seconds * 1_000, Ordering::SeqCst);
        let minds = BTreeMap::from([("local".to_owned(), mind(&answers))]);
        let house = House::new(realm, minds, Prompts::default(), Box::new(clock));
        let mut beats = 0;
        while beats < 30 {
            beats += usize::from(matches!(house.next(None).expect("it goes on"), Next::Beat(_)));
        }
        let refused = refusals(&house.realm().world);
        assert!(!refused.iter().any(|why| why.contains("0 more seconds")), "{seconds}: {refused:?}");
    }
}

/// Older messages come back from the store, and what matters of them into the HUD.
#[test]
fn what_was_said_long_ago_returns_when_it_matters() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = world();
    world
        .say(AgentId(1), AgentId(1), "The key to the lighthouse lies under the blue stone.", None, BEGIN)
        .expect("said");
    for n in 0..2_500 {
        world
            .say(
                AgentId(1),
                AgentId(2),
                format!("Number {n}: nets, boats and the price of herring."),
                None,
                BEGIN,
            )
            .expect("said");
    }
    world
        .say(AgentId(1), AgentId(2), "Who knows where the key to the lighthouse is?", None, BEGIN)
        .expect("said");
    drop(Realm::found(store(folder.path()), "w", world, BEGIN).expect("a world"));
    let mut realm = Realm::open(store(folder.path()), "w").expect("it was kept");
    assert!(realm.world.room(AgentId(1)).expect("a room").message(1).is_none(), "it is not at hand any more");
    let older: Vec<Message> = realm.older(AgentId(1), 3, 10).expect("read");
    assert_eq!(older.iter().map(|message| message.id).collect::<Vec<_>>(), [1, 2]);
    let (house, _) = house(realm, &[]);
    let shown = house.show(AgentId(2), None).expect("a HUD");
    let first = &shown.hud.rooms[0].messages[0];
    assert_eq!((first.id, first.sender.as_str()), (1, "1"), "at its own place, before all others");
    assert!(first.content.contains("blue stone") && shown.recalled.contains(&1));
    assert!(shown.spent.total <= 10_000);
}

/// Worlds by lot come back as they were, whatever was done in them.
#[test]
fn worlds_by_lot_are_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    for seed in 0..40 {
        let mut lot = Lot::new(seed);
        let (world, now) = testing::world(&mut lot, Size { agents: 4, messages: 6, words: 10 });
        let name = format!("w{seed}");
        let mut realm = Realm::found(store(folder.path()), &name, world, now).expect("a world");
        for _ in 0..15 {
            let ids: Vec<AgentId> = realm.world.agents().map(|agent| agent.id).collect();
            let Some(&who) = ids.get(lot.below(ids.len())) else { break };
            let action = testing::action(&mut lot, &realm.world, who);
            let bounds = Bounds { now, count: &QuarterUp, knowledge: 3_000 };
            let _ = realm.world.act(who, action, bounds);
            realm.world.beaten(who, now);
            realm.save().expect("kept");
        }
        let before = realm.world.clone();
        drop(realm);
        let again = Realm::open(store(folder.path()), &name).expect("it was kept");
        assert_eq!(again.world, before, "seed {seed}");
        assert!(
            again
                .world
                .rooms()
                .all(|room| room.messages.iter().all(|m| m.sender != Sender::Agent(AgentId(999))))
        );
    }
    let mut store = store(folder.path());
    assert_eq!(store.worlds().expect("listed").len(), 40);
    store.end_world("w7").expect("ended");
    assert_eq!(store.worlds().expect("listed").len(), 39);
    assert!(store.end_world("w7").is_err());
}

/// Nothing comes in that is not where it says, or was never counted.
#[test]
fn only_worlds_are_let_in() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = world();
    let ask = Action::RequestAccess { room_id: AgentId(1), key: "open".into() };
    let bounds = Bounds { now: BEGIN, count: &QuarterUp, knowledge: 3_000 };
    world.say(AgentId(1), AgentId(1), "Hello.", None, BEGIN).expect("said");
    world.act(AgentId(2), Action::LeaveRoom { room_id: AgentId(1) }, bounds).expect("gone");
    world.act(AgentId(2), ask, bounds).expect("asked");
    let realm = Realm::found(store(folder.path()), "w", world, BEGIN).expect("a world");
    let expected = realm.world.clone();
    drop(realm);
    let wish = Wish::Say { room: AgentId(1), message: "Hello?".into(), reply_to: None };
    realm::post(&mut *store(folder.path()), "w", &wish, BEGIN).expect("left");
    let mut from = store(folder.path());
    let kinds = [Kind::World, Kind::Agent, Kind::Room, Kind::Said, Kind::Post];
    let rows: Vec<WorldRow> = kinds
        .into_iter()
        .flat_map(|kind| {
            let found = from.world_rows("w", kind, "0".."9".repeat(22).as_str(), 100).expect("rows");
            found.into_iter().map(move |row| WorldRow { kind, key: row.key, value: Some(row.value) })
        })
        .collect();
    let let_in = admit::admit("w", &rows).expect("it is one");
    assert_eq!((&let_in.head, let_in.agents().count()), (&expected.head, 2));
    assert_eq!(let_in.room(AgentId(1)).map(|room| &room.requests).map(Vec::len), Some(1));
    // One thing is other than it was, of the first row of a kind: its key, or something that it says.
    let cases = [
        (Kind::World, None, "\"next_message\":4", "\"next_message\":0", "counts more than there can be"),
        (Kind::World, None, "\"next_message\":4", "\"next_message\":3", "message 3 is not where it says"),
        (
            Kind::World,
            None,
            "\"next_message\":4",
            "\"next_message\":99999999",
            "counts more than there can be",
        ),
        (Kind::World, None, "\"next_agent\":3", "\"next_agent\":2", "agent 2 is not where it says"),
        (Kind::World, None, "\"next_request\":2", "\"next_request\":1", "request 1 was never counted"),
        (Kind::World, Some("1"), "", "", "a world has one"),
        (Kind::Agent, Some("0003"), "", "", "agent 1 is not where it says"),
        (Kind::Agent, None, "\"id\":1", "\"id\":7", "agent 7 is not where it says"),
        (Kind::Agent, None, "{", "{{", "it may have been written by a newer Halo"),
        (Kind::Room, Some("0002"), "", "", "room 1 is not where it says"),
        (Kind::Room, None, "\"requester\":2", "\"requester\":9", "there is no agent 9"),
        (Kind::Said, Some("000100000009"), "", "", "is not where it says"),
        (Kind::Said, None, "\"room\":1", "\"room\":2", "is not where it says"),
        (Kind::Post, Some("x"), "", "", "not where it should be"),
        (Kind::Post, None, "say", "fly", "what was left for it"),
    ];
    for (kind, key, from, to, why) in cases {
        let mut rows = rows.clone();
        let row = rows.iter_mut().find(|row| row.kind == kind).expect("there is one");
        row.key = key.map_or_else(|| row.key.clone(), str::to_owned);
        let value = row.value.as_mut().expect("it says something");
        assert!(value.contains(from), "{kind:?} has {from}: {value}");
        *value = value.replacen(from, to, 1);
        let told = admit::admit("w", &rows).expect_err(why).to_string();
        assert!(told.contains(why), "{kind:?} {from} {to}: {told}");
    }
    let more = WorldRow { kind: Kind::Setting, key: "0".into(), value: Some("{}".into()) };
    let told = admit::admit("w", &[rows.as_slice(), &[more]].concat()).expect_err("more").to_string();
    assert!(told.contains("no records of the kind 'setting'"), "{told}");
}
