//! The social rules: whatever agents try, in worlds by lot, some things are always so.

use halo_agents::action::{Action, Bounds, KINDS};
use halo_agents::answer::{Answer, Response};
use halo_agents::count::QuarterUp;
use halo_agents::format::Output;
use halo_agents::heartbeat::Millis;
use halo_agents::testing::{self, BEGIN, Lot, Size};
use halo_agents::wish::Wish;
use halo_agents::world::{ARCHITECT, AgentId, Brain, Newcomer, Reaction, Sender, World};
use halo_agents::world_file::WorldFile;
use serde_json::json;
use std::collections::BTreeSet;

fn bounds(now: Millis) -> Bounds<'static> {
    Bounds { now, count: &QuarterUp, knowledge: 3_000 }
}

/// Three who know each other, and one who knows nobody.
fn four() -> (World, [AgentId; 4]) {
    let mut world = World::default();
    world.head.models = vec![Brain::here("one"), Brain::here("two")];
    let mut new = |name: &str, manages: bool| {
        let new = Newcomer {
            name: Some(name.into()),
            model: "one".into(),
            can_create_agents: manages,
            ..Newcomer::default()
        };
        world.create(new, BEGIN).expect("new")
    };
    let ids = [new("Ada", true), new("Ben", false), new("Cy", false), new("Dee", false)];
    world.join(ids[0], ids[1], BEGIN);
    world.join(ids[0], ids[2], BEGIN);
    (world, ids)
}

fn refused(world: &mut World, who: AgentId, action: Action) -> String {
    let (before, told) = (world.clone(), format!("{action:?}"));
    let why = world.act(who, action, bounds(BEGIN)).expect_err("it is not allowed");
    let noted = world.any_agent(who).and_then(|agent| agent.recent.back()).expect("it is told");
    assert_eq!(noted.refused.as_ref(), Some(&why));
    // Nothing but the note has changed.
    let rooms = |world: &World| world.rooms().cloned().collect::<Vec<_>>();
    assert_eq!(rooms(world), rooms(&before), "{told}");
    for agent in before.everybody().filter(|agent| agent.id != who) {
        assert_eq!(world.any_agent(agent.id), Some(agent), "{told}");
    }
    why
}

#[test]
fn every_rule_refuses_with_its_reason() {
    let (mut world, [ada, ben, cy, dee]) = four();
    let said = world.say(ada, ben, "Hello", None, BEGIN).expect("said");
    let far = world.say(dee, dee, "Alone", None, BEGIN).expect("said");
    let no = |world: &mut World, who, action, part: &str| {
        let why = refused(world, who, action);
        assert!(why.contains(part), "{why}");
    };
    let name = |name: &str| Action::SetName { name: name.into() };
    no(&mut world, ben, Action::React { message_id: said, reaction: Reaction::Heart }, "said themselves");
    no(&mut world, cy, Action::React { message_id: far, reaction: Reaction::Heart }, "no message");
    no(&mut world, ben, Action::WakeAgent { agent_id: dee }, "share no room");
    no(&mut world, ben, Action::WakeAgent { agent_id: ben }, "to themselves");
    no(&mut world, ben, Action::WakeAgent { agent_id: cy }, "is awake");
    no(&mut world, ben, Action::WakeAgent { agent_id: ARCHITECT }, "not yours");
    no(&mut world, ben, Action::Reply { room_id: dee, message_id: far, message: "x".into() }, "not in room");
    no(&mut world, cy, Action::Reply { room_id: ada, message_id: far, message: "x".into() }, "no message");
    no(&mut world, ben, Action::SetWpm { wpm: 9 }, "10 to 200");
    no(&mut world, ben, Action::SetWpm { wpm: 201 }, "10 to 200");
    no(&mut world, ben, Action::ClearBillboard, "no billboard");
    no(&mut world, ben, Action::SetBillboard { message: "x".repeat(501) }, "500 characters");
    no(&mut world, ben, Action::RevokeKey { key: "none".into() }, "no such key");
    no(&mut world, ben, Action::RequestAccess { room_id: dee, key: "guess".into() }, "does not open");
    no(&mut world, ben, Action::RequestAccess { room_id: ada, key: "x".into() }, "you are in room");
    no(&mut world, ben, Action::RequestAccess { room_id: AgentId(99), key: "x".into() }, "no room 99");
    no(&mut world, ben, Action::GrantAccess { request_id: 1 }, "nobody waits");
    no(&mut world, ben, Action::DenyAccess { request_id: 1 }, "nobody waits");
    no(&mut world, ben, Action::LeaveRoom { room_id: ben }, "own room");
    no(&mut world, ben, Action::LeaveRoom { room_id: dee }, "not in room");
    no(&mut world, ben, Action::SetAttention { room_id: dee, value: "5%".into() }, "not in room");
    no(&mut world, ben, Action::SetAttention { room_id: ada, value: "most".into() }, "no share");
    no(&mut world, ben, Action::SetAttention { room_id: ada, value: "101%".into() }, "no share");
    no(&mut world, ben, name(""), "at least one");
    no(&mut world, ben, name(&"x".repeat(51)), "50 characters");
    no(&mut world, ben, name("Cy"), "somebody else");
    no(&mut world, ben, name("The Architect"), "somebody else");
    no(&mut world, ben, Action::Sleep { until: "later".into() }, "no time");
    no(&mut world, ben, Action::Sleep { until: "2024-01-01T00:00:00".into() }, "has passed");
    let create = |in_room_id| Action::CreateAgent {
        name: "Eve".into(),
        background_prompt: "x".into(),
        agent_type: halo_agents::world::AgentKind::Persona,
        in_room_id,
    };
    no(&mut world, ben, create(None), "may not");
    no(&mut world, ada, create(Some(dee)), "not in room");
    let alter = |agent_id, model: Option<&str>| Action::AlterAgent {
        agent_id,
        background_prompt: None,
        name: None,
        model: model.map(str::to_owned),
    };
    no(&mut world, ben, alter(cy, Some("two")), "may not");
    no(&mut world, ada, alter(dee, Some("two")), "share no room");
    no(&mut world, ada, alter(ada, Some("two")), "to themselves");
    no(&mut world, ada, alter(cy, Some("three")), "no model");
    no(&mut world, ada, alter(cy, None), "nothing to alter");
    no(&mut world, ben, Action::RetireAgent { agent_id: cy }, "may not");
    no(&mut world, ada, Action::RetireAgent { agent_id: dee }, "share no room");
    no(&mut world, ada, Action::RetireAgent { agent_id: ada }, "to themselves");
    no(
        &mut world,
        ada,
        Action::Set { path: "a".into(), value: json!("x".repeat(20_000)), w: None },
        "delete something first",
    );
}

#[test]
fn every_action_does_what_it_says() {
    let (mut world, [ada, ben, cy, dee]) = four();
    let said = world.say(ada, ben, "Hello", None, BEGIN).expect("said");
    let act = |world: &mut World, who, action| world.act(who, action, bounds(BEGIN)).expect("it is allowed");
    let interval = |world: &World, who| world.agent(who).expect("alive").interval.seconds();
    act(&mut world, ada, Action::React { message_id: said, reaction: Reaction::ThumbsUp });
    assert_eq!(interval(&world, ben), 9.5);
    assert!(
        refused(&mut world, ada, Action::React { message_id: said, reaction: Reaction::ThumbsUp })
            .contains("before")
    );
    act(&mut world, cy, Action::React { message_id: said, reaction: Reaction::Heart });
    act(&mut world, cy, Action::React { message_id: said, reaction: Reaction::ThumbsDown });
    assert_eq!(interval(&world, ben), 10.0);
    // Keys and doors.
    act(&mut world, ada, Action::CreateKey { key: "sesame".into() });
    act(&mut world, dee, Action::RequestAccess { room_id: ada, key: "sesame".into() });
    assert!(
        refused(&mut world, dee, Action::RequestAccess { room_id: ada, key: "sesame".into() })
            .contains("wait")
    );
    assert_eq!(world.room(ada).expect("open").messages.back().map(|m| m.sender), Some(Sender::System));
    act(&mut world, ada, Action::GrantAccess { request_id: 1 });
    assert!(world.are_near(dee, ben));
    act(&mut world, dee, Action::LeaveRoom { room_id: ada });
    assert!(!world.are_near(dee, ben));
    act(&mut world, dee, Action::RequestAccess { room_id: ada, key: "sesame".into() });
    act(&mut world, ada, Action::DenyAccess { request_id: 2 });
    act(&mut world, ada, Action::RevokeKey { key: "sesame".into() });
    assert!(world.room(ada).expect("open").keys.is_empty() && !world.are_near(dee, ben));
    // Rooms, names, sleep.
    act(&mut world, ben, Action::SetBillboard { message: "Quiet, please".into() });
    act(&mut world, ben, Action::ClearBillboard);
    act(&mut world, ben, Action::SetWpm { wpm: 120 });
    act(&mut world, ben, Action::SetName { name: "Benjamin".into() });
    assert_eq!((world.room(ben).expect("open").wpm, world.name(ben)), (120, "Benjamin".into()));
    act(&mut world, cy, Action::Sleep { until: "2024-02-01T00:00:00".into() });
    assert_eq!(world.next_beat().map(|(who, _)| who), Some(ada));
    world.beaten(cy, BEGIN);
    assert!(world.agent(cy).expect("alive").asleep.is_some(), "who has just gone to sleep sleeps");
    act(&mut world, ben, Action::WakeAgent { agent_id: cy });
    assert_eq!(world.agent(cy).expect("alive").asleep, None);
    // Others.
    let new = Action::CreateAgent {
        name: "Eve".into(),
        background_prompt: "You keep the log.".into(),
        agent_type: halo_agents::world::AgentKind::Bot,
        in_room_id: Some(ada),
    };
    act(&mut world, ada, new);
    let eve = AgentId(5);
    assert!(world.are_near(eve, ben) && world.room(eve).is_some());
    let alter = Action::AlterAgent {
        agent_id: eve,
        background_prompt: Some("x".into()),
        name: Some("Eva".into()),
        model: Some("two".into()),
    };
    act(&mut world, ada, alter);
    let altered = world.agent(eve).expect("alive");
    assert_eq!((altered.name.as_str(), altered.prompt.as_str(), altered.model.as_str()), ("Eva", "x", "two"));
    act(&mut world, ada, Action::RetireAgent { agent_id: eve });
    assert!(world.agent(eve).is_none() && world.room(eve).is_none() && !world.are_near(ada, eve));
    assert!(world.any_agent(eve).is_some(), "it was there");
    // What agents write down.
    act(&mut world, ben, Action::Append { path: "list".into(), value: json!(1) });
    act(&mut world, ben, Action::Delete { path: "list".into() });
    let kinds: Vec<&str> =
        world.agent(ben).expect("alive").recent.iter().map(|one| one.kind.as_str()).collect();
    assert_eq!(
        kinds,
        ["set_billboard", "clear_billboard", "set_wpm", "set_name", "wake_agent", "append", "delete"]
    );
    assert!(kinds.iter().all(|kind| KINDS.contains(kind)));
}

#[test]
fn long_messages_take_their_time() {
    let (mut world, [ada, ben, ..]) = four();
    let words = |n: usize| vec!["word"; n].join(" ");
    let response =
        |message: String| Answer { responses: vec![Response { room: ada, message }], ..Answer::default() };
    let last =
        |world: &World| world.room(ada).and_then(|room| room.messages.back()).map(|m| (m.sender, m.at));
    // The first may be long; then sixty words at eighty a minute take three quarters of one.
    assert_eq!(world.answer(ben, response(words(200)), bounds(BEGIN)).said, 1);
    assert_eq!(last(&world), Some((Sender::Agent(ben), BEGIN)));
    assert_eq!(world.answer(ben, response(words(60)), bounds(BEGIN + 1_000)).said, 1);
    assert_eq!(world.next_words(), Some(BEGIN + 45_000));
    let outcome = world.answer(ben, response("Me again".into()), bounds(BEGIN + 2_000));
    assert_eq!(
        (outcome.said, outcome.refused),
        (0, vec!["you are still writing in room 1, for 43 more seconds".to_owned()])
    );
    assert_eq!(
        world.agent(ben).and_then(|agent| agent.recent.back()).map(|one| one.kind.as_str()),
        Some("response")
    );
    assert_eq!(world.deliver(BEGIN + 44_999), Vec::<u64>::new());
    assert_eq!(world.deliver(BEGIN + 90_000).len(), 1);
    assert_eq!(last(&world), Some((Sender::Agent(ben), BEGIN + 45_000)), "as if somebody had looked in time");
    let outcome = world.answer(ben, response(words(201)), bounds(BEGIN + 900_000));
    assert!(outcome.refused[0].contains("200 words at most"), "{:?}", outcome.refused);
}

/// What is learned comes first, then what is said, then the rest: whoever says goodbye and leaves is heard.
/// Nobody can flood a room, however it is written.
#[test]
fn messages_have_bounds() {
    let (mut world, [ada, ben, ..]) = four();
    let why = world.say(ada, ben, "x".repeat(2_001), None, BEGIN).expect_err("too long");
    assert!(why.contains("2000 characters at most, and this one has 2001"), "{why}");
    // Without spaces, ten characters are a word.
    let why = world.speak(ada, ben, &"あ".repeat(2_010), None, BEGIN).expect_err("too many words");
    assert!(why.contains("200 words at most, and this one has 201"), "{why}");
    // The second thing in one breath is still to be written, and the third is refused.
    let heard = |world: &World| world.room(ada).expect("a room").messages.len();
    let before = heard(&world);
    world.speak(ada, ben, "One.", None, BEGIN).expect("said");
    world.speak(ada, ben, "Two.", None, BEGIN).expect("begun");
    assert_eq!(heard(&world), before + 1);
    let why = world.speak(ada, ben, "Three.", None, BEGIN).expect_err("still writing");
    assert!(why.contains("still writing"), "{why}");
    world.deliver(BEGIN + 1_000);
    assert_eq!(heard(&world), before + 2, "a word takes less than a second at 80 a minute");
    for name in ["8", "the architect", "ADA", "system"] {
        let why = refused(&mut world, ben, Action::SetName { name: name.into() });
        assert!(why.contains("no number") || why.contains("somebody else is called"), "{name}: {why}");
    }
}

#[test]
fn answers_are_done_in_order() {
    let (mut world, [ada, ben, ..]) = four();
    let text = r#"{"responses": [{"room_id": 1, "message": "Goodbye"}, {"room_id": 2, "message": "[no response]"}],
        "actions": [{"type": "leave_room", "room_id": 1}, {"type": "set", "path": "mood", "value": "sad"}]}"#;
    let answer = Answer::read(text, Output::Json, false).expect("an answer");
    let outcome = world.answer(ben, answer, bounds(BEGIN));
    assert_eq!((outcome.said, outcome.done, outcome.refused.len()), (1, 2, 0));
    let said: Vec<&str> =
        world.room(ada).expect("open").messages.iter().rev().take(2).map(|m| m.content.as_str()).collect();
    assert_eq!(said, ["Ben (2) has left.", "Goodbye"]);
    let kinds: Vec<&str> =
        world.agent(ben).expect("alive").recent.iter().map(|one| one.kind.as_str()).collect();
    assert_eq!(kinds, ["set", "leave_room"]);
}

/// Whatever is done, in whatever order.
#[test]
fn the_rules_hold_in_worlds_by_lot() {
    for seed in 0..400 {
        let mut lot = Lot::new(seed);
        let (mut world, mut now) = testing::world(&mut lot, Size { agents: 6, messages: 8, words: 8 });
        for step in 0..60 {
            now += lot.below(5_000) as Millis;
            let ids: Vec<AgentId> = world.agents().map(|agent| agent.id).collect();
            let Some(&who) = ids.get(lot.below(ids.len())) else { break };
            let before = world.clone();
            let action = testing::action(&mut lot, &world, who);
            let done = world.act(who, action.clone(), bounds(now));
            check(&before, &world, who, &action, done.is_ok());
            world.deliver(now);
            world.beaten(who, now);
            assert_eq!(testing::faults(&world), Vec::<String>::new(), "seed {seed}, step {step}: {action:?}");
        }
    }
}

fn check(before: &World, after: &World, who: AgentId, action: &Action, done: bool) {
    let others = |world: &World| -> BTreeSet<AgentId> { world.agents().map(|agent| agent.id).collect() };
    match action {
        Action::WakeAgent { agent_id } if done => {
            assert!(before.are_near(who, *agent_id) && who != *agent_id);
        }
        Action::AlterAgent { agent_id, .. } | Action::RetireAgent { agent_id } if done => {
            assert!(before.are_near(who, *agent_id) && who != *agent_id && *agent_id != ARCHITECT);
            assert!(before.agent(who).is_some_and(|agent| agent.can_create_agents));
        }
        Action::CreateAgent { .. } if done => {
            assert!(before.agent(who).is_some_and(|agent| agent.can_create_agents));
        }
        Action::RequestAccess { room_id, key } if done => {
            assert!(before.room(*room_id).is_some_and(|room| room.keys.contains(key)));
        }
        Action::LeaveRoom { room_id } if done => assert_ne!(*room_id, who),
        _ => {}
    }
    if !matches!(action, Action::CreateAgent { .. } | Action::RetireAgent { .. }) || !done {
        assert_eq!(others(before), others(after), "{action:?}");
    }
    // Nobody gets into a room but by its owner's hand.
    for room in after.rooms() {
        let was = before.room(room.id).map(|room| room.members.clone()).unwrap_or_default();
        let new = room.members.keys().filter(|member| !was.contains_key(member) && **member != room.id);
        for member in new {
            let granted = matches!(action, Action::GrantAccess { .. }) && room.id == who;
            let made = matches!(action, Action::CreateAgent { in_room_id: Some(at), .. } if *at == room.id);
            assert!(done && (granted || made), "{member} came into {} by {action:?}", room.id);
        }
    }
    // Numbers never change hands.
    for agent in before.everybody() {
        assert_eq!(after.any_agent(agent.id).map(|now| now.id), Some(agent.id));
    }
}

/// Who is woken thinks when its heart beats, and no sooner: two who wake each other do not race.
#[test]
fn waking_leaves_the_pulse_alone() {
    let (mut world, [ada, ben, ..]) = four();
    world.act(ben, Action::Sleep { until: "2099-01-01T00:00:00".into() }, bounds(BEGIN)).expect("asleep");
    world.beaten(ben, BEGIN);
    let next = world.agent(ben).expect("alive").next;
    assert!(next > BEGIN);
    world.act(ada, Action::WakeAgent { agent_id: ben }, bounds(BEGIN)).expect("awake");
    let ben = world.agent(ben).expect("alive");
    assert_eq!((ben.asleep, ben.next), (None, next));
}

/// What is written and never said is not passed over in silence.
#[test]
fn who_does_not_get_to_say_it_is_told() {
    let (mut world, [ada, ben, cy, _]) = four();
    let why =
        |world: &World, who| world.any_agent(who).and_then(|agent| agent.recent.back()?.refused.clone());
    world.speak(ada, ben, "One.", None, BEGIN).expect("said");
    // Too long to be said is too long to be written.
    let long = "x".repeat(2_005);
    assert!(world.speak(ada, ben, &long, None, BEGIN + 1).is_err_and(|why| why.contains("2000 characters")));
    world.speak(ada, ben, &"word ".repeat(60), None, BEGIN + 1).expect("it is written");
    assert_eq!(world.written_by(ben), Some(BEGIN + 45_000));
    assert!(world.speak(ada, ben, "more", None, BEGIN + 2).is_err_and(|why| why.contains("still writing")));
    world.retire(ada, BEGIN + 3);
    assert_eq!(why(&world, ben).as_deref(), Some("room 1 was closed before it was written"));
    assert_eq!((world.written_by(ben), why(&world, cy)), (None, None));
}

/// However long a reason is, it leaves room for others.
#[test]
fn reasons_are_short() {
    let (mut world, [ada, ..]) = four();
    let path = format!("a..{}", "b".repeat(5_000));
    let why = world.act(ada, Action::Delete { path }, bounds(BEGIN)).expect_err("no path");
    assert!(why.len() > 5_000);
    let noted = world.agent(ada).and_then(|agent| agent.recent.back()?.refused.clone()).expect("told");
    assert_eq!(noted.chars().count(), 301);
    assert!(why.starts_with(noted.trim_end_matches('…')));
}

/// What the person cannot do changes nothing, not even where he is.
#[test]
fn a_wish_that_is_refused_changes_nothing() {
    let (mut world, [ada, ben, ..]) = four();
    let said = world.say(ada, ben, "Hello", None, BEGIN).expect("said");
    let say = |message: &str, reply_to| Wish::Say { room: ada, message: message.into(), reply_to };
    let react = |message| Wish::React { message, reaction: Reaction::Heart };
    for (wish, part) in [
        (say(&"x".repeat(2_001), None), "2000 characters"),
        (say(" ", None), "says something"),
        (say("x", Some(said + 7)), "could be answered"),
        (react(said + 7), "no message"),
    ] {
        let before = world.clone();
        assert!(world.wish(wish.clone(), BEGIN).is_err_and(|why| why.contains(part)), "{wish:?}");
        assert_eq!(world, before, "{wish:?}");
    }
    world.wish(say("Well?", Some(said)), BEGIN).expect("said");
    world.wish(react(said), BEGIN).expect("felt");
    assert!(world.wish(react(said), BEGIN).is_err_and(|why| why.contains("before")));
}

/// What somebody writes down obeys the rules that agents obey.
#[test]
fn world_files_obey_the_rules() {
    let ada = "[[agents]]\nname = \"Ada\"\nseed = \"x\"\n\n[[agents]]\nname = \"Ben\"\nseed = \"x\"\n";
    let room = |owner: &str, more: &str| format!("\n[[rooms]]\nowner = \"{owner}\"\n{more}\n");
    let name = |name: &str| format!("[[agents]]\nname = \"{name}\"\nseed = \"x\"\n");
    let cases = [
        (name("System"), "somebody else is called"),
        (name("the architect"), "somebody else is called"),
        (name("17"), "no number"),
        (name(&"x".repeat(51)), "50 characters"),
        (name("a\\nb"), "line breaks"),
        (format!("{ada}{}", name("ADA")), "somebody else is called"),
        (format!("[[agents]]\nseed = \"{}\"\n", "x".repeat(2_001)), "2000 characters"),
        (ada.to_owned() + &room("Ada", &format!("billboard = \"{}\"", "x".repeat(501))), "500 characters"),
        (ada.to_owned() + &room("Ada", "keys = [\" \"]"), "none of them is empty"),
        (ada.to_owned() + &room("Ada", &format!("keys = [\"{}\"]", "x".repeat(65))), "64 characters"),
        (
            ada.to_owned()
                + &room("Ada", "attention = { Ada = \"80%\" }")
                + &room("Ben", "members = [\"Ada\"]\nattention = { Ada = \"30%\" }"),
            "more than all of your attention",
        ),
    ];
    for (file, part) in cases {
        let read: WorldFile = toml::from_str(&file).expect("TOML");
        let why = read.begin("local", BEGIN).expect_err(&file);
        assert!(why.contains(part), "{why}: {file}");
    }
    let trimmed: WorldFile =
        toml::from_str(&(ada.to_owned() + &room("Ada", "keys = [\" open \"]"))).expect("TOML");
    let mut world = trimmed.begin("local", BEGIN).expect("a world");
    world
        .act(AgentId(2), Action::RequestAccess { room_id: AgentId(1), key: "open".into() }, bounds(BEGIN))
        .expect("the key fits");
}
