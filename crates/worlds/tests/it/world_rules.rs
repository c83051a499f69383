//! The rules of a world, in named cases and as invariants of random worlds.

use halo_agents::token_counter::CeilTokenCounter;
use halo_worlds::action::{ACTION_TYPES, Action, ActionContext};
use halo_worlds::answer::{AgentAnswer, RoomResponse};
use halo_worlds::format::AnswerFormat;
use halo_worlds::heartbeat::{HeartbeatJitter, Millis};
use halo_worlds::testing::{self, RandomWorldSize, START_TIME, WorldRng};
use halo_worlds::user_command::UserCommand;
use halo_worlds::world::{
    ARCHITECT, AgentId, AgentKind, MessageSender, NewAgent, ParagraphSplit, Reaction, World, WorldModelRef,
};
use halo_worlds::world_file::WorldFile;
use serde_json::json;
use std::collections::BTreeSet;

fn action_context(now: Millis) -> ActionContext<'static> {
    ActionContext { now, counter: &CeilTokenCounter, knowledge_budget: 3_000, split: ParagraphSplit::Never }
}

/// Ada, Ben and Cy share a room; Dee is alone.
fn four_agents() -> (World, [AgentId; 4]) {
    let mut world = World::default();
    world.header.models = vec![WorldModelRef::local("one"), WorldModelRef::local("two")];
    let mut new = |name: &str, manages: bool| {
        let new = NewAgent {
            name: Some(name.into()),
            model: "one".into(),
            can_create_agents: manages,
            ..NewAgent::default()
        };
        world.create_agent(new, START_TIME).expect("the agent is created")
    };
    let ids = [new("Ada", true), new("Ben", false), new("Cy", false), new("Dee", false)];
    world.join_room(ids[0], ids[1], START_TIME);
    world.join_room(ids[0], ids[2], START_TIME);
    (world, ids)
}

fn expect_refusal(world: &mut World, who: AgentId, action: Action) -> String {
    let (before, shown) = (world.clone(), format!("{action:?}"));
    let error =
        world.perform_action(who, action, action_context(START_TIME)).expect_err("the action is refused");
    let recorded =
        world.any_agent(who).and_then(|agent| agent.recent_actions.back()).expect("the action is recorded");
    assert_eq!(recorded.refused.as_ref(), Some(&error.message));
    // Nothing but the record has changed.
    let rooms = |world: &World| world.rooms().cloned().collect::<Vec<_>>();
    assert_eq!(rooms(world), rooms(&before), "{shown}");
    for agent in before.all_agents().filter(|agent| agent.id != who) {
        assert_eq!(world.any_agent(agent.id), Some(agent), "{shown}");
    }
    error.message
}

#[test]
fn action_refusal_gives_reason_for_every_rule() {
    let (mut world, [ada, ben, cy, dee]) = four_agents();
    let message = world.send_message(ada, ben, "Hello", None, START_TIME).expect("the message is sent");
    let other_message = world.send_message(dee, dee, "Alone", None, START_TIME).expect("the message is sent");
    let assert_refused = |world: &mut World, who, action, expected: &str| {
        let reason = expect_refusal(world, who, action);
        assert!(reason.contains(expected), "{reason}");
    };
    let name = |name: &str| Action::SetName { name: name.into() };
    assert_refused(
        &mut world,
        ben,
        Action::React { message_id: message, reaction: Reaction::Heart },
        "your own message",
    );
    assert_refused(
        &mut world,
        cy,
        Action::React { message_id: other_message, reaction: Reaction::Heart },
        "no message",
    );
    assert_refused(&mut world, ben, Action::WakeAgent { agent_id: dee }, "share no room");
    assert_refused(&mut world, ben, Action::WakeAgent { agent_id: ben }, "to yourself");
    assert_refused(&mut world, ben, Action::WakeAgent { agent_id: cy }, "is awake");
    assert_refused(&mut world, ben, Action::WakeAgent { agent_id: ARCHITECT }, "to the Architect");
    assert_refused(
        &mut world,
        ben,
        Action::Reply { room_id: dee, message_id: other_message, message: "x".into() },
        "not in room",
    );
    assert_refused(
        &mut world,
        cy,
        Action::Reply { room_id: ada, message_id: other_message, message: "x".into() },
        "no message",
    );
    assert_refused(&mut world, ben, Action::SetWpm { wpm: 9 }, "10 to 200");
    assert_refused(&mut world, ben, Action::SetWpm { wpm: 201 }, "10 to 200");
    assert_refused(&mut world, ben, Action::ClearBillboard, "no billboard");
    assert_refused(&mut world, ben, Action::SetBillboard { message: "x".repeat(501) }, "500 characters");
    assert_refused(&mut world, ben, Action::RevokeKey { key: "none".into() }, "no such key");
    assert_refused(
        &mut world,
        ben,
        Action::RequestAccess { room_id: dee, key: "guess".into() },
        "does not open",
    );
    assert_refused(
        &mut world,
        ben,
        Action::RequestAccess { room_id: ada, key: "x".into() },
        "you are in room",
    );
    assert_refused(
        &mut world,
        ben,
        Action::RequestAccess { room_id: AgentId(99), key: "x".into() },
        "no room 99",
    );
    assert_refused(&mut world, ben, Action::GrantAccess { request_id: 1 }, "no access request 1");
    assert_refused(&mut world, ben, Action::DenyAccess { request_id: 1 }, "no access request 1");
    assert_refused(&mut world, ben, Action::LeaveRoom { room_id: ben }, "own room");
    assert_refused(&mut world, ben, Action::LeaveRoom { room_id: dee }, "not in room");
    assert_refused(&mut world, ben, Action::SetAttention { room_id: dee, value: "5%".into() }, "not in room");
    assert_refused(
        &mut world,
        ben,
        Action::SetAttention { room_id: ada, value: "most".into() },
        "not a share",
    );
    assert_refused(
        &mut world,
        ben,
        Action::SetAttention { room_id: ada, value: "101%".into() },
        "not a share",
    );
    assert_refused(&mut world, ben, name(""), "at least one");
    assert_refused(&mut world, ben, name(&"x".repeat(51)), "50 characters");
    assert_refused(&mut world, ben, name("Cy"), "is taken");
    assert_refused(&mut world, ben, name("The Architect"), "is taken");
    assert_refused(&mut world, ben, Action::Sleep { until: "later".into() }, "not a time");
    assert_refused(&mut world, ben, Action::Sleep { until: "2024-01-01T00:00:00".into() }, "has passed");
    let create = |in_room_id| Action::CreateAgent {
        name: "Eve".into(),
        background_prompt: "x".into(),
        agent_type: AgentKind::Persona,
        in_room_id,
    };
    assert_refused(&mut world, ben, create(None), "may not");
    assert_refused(&mut world, ada, create(Some(dee)), "not in room");
    let alter = |agent_id, model: Option<&str>| Action::AlterAgent {
        agent_id,
        background_prompt: None,
        name: None,
        model: model.map(str::to_owned),
    };
    assert_refused(&mut world, ben, alter(cy, Some("two")), "may not");
    assert_refused(&mut world, ada, alter(dee, Some("two")), "share no room");
    assert_refused(&mut world, ada, alter(ada, Some("two")), "to yourself");
    assert_refused(&mut world, ada, alter(cy, Some("three")), "no model");
    assert_refused(&mut world, ada, alter(cy, None), "nothing to alter");
    assert_refused(&mut world, ben, Action::RetireAgent { agent_id: cy }, "may not");
    assert_refused(&mut world, ada, Action::RetireAgent { agent_id: dee }, "share no room");
    assert_refused(&mut world, ada, Action::RetireAgent { agent_id: ada }, "to yourself");
    assert_refused(
        &mut world,
        ada,
        Action::Set { path: "a".into(), value: json!("x".repeat(20_000)), w: None },
        "delete something first",
    );
}

#[test]
fn action_has_its_effect_for_every_type() {
    let (mut world, [ada, ben, cy, dee]) = four_agents();
    let message_id = world.send_message(ada, ben, "Hello", None, START_TIME).expect("the message is sent");
    let mut recorded = BTreeSet::new();
    let mut act = |world: &mut World, who, action: Action| {
        let kind = serde_json::to_value(&action).expect("it is serialized")["type"].clone();
        world.perform_action(who, action, action_context(START_TIME)).expect("the action is allowed");
        let last =
            world.any_agent(who).and_then(|agent| agent.recent_actions.back()).expect("it is recorded");
        assert_eq!((kind.as_str(), &last.refused), (Some(last.kind.as_str()), &None));
        recorded.insert(last.kind.clone());
    };
    let interval = |world: &World, who| world.agent(who).expect("the agent exists").interval.seconds();
    act(&mut world, ada, Action::React { message_id, reaction: Reaction::ThumbsUp });
    assert_eq!(interval(&world, ben), 9.5);
    assert!(
        expect_refusal(&mut world, ada, Action::React { message_id, reaction: Reaction::ThumbsUp })
            .contains("already")
    );
    act(&mut world, cy, Action::React { message_id, reaction: Reaction::Heart });
    act(&mut world, cy, Action::React { message_id, reaction: Reaction::ThumbsDown });
    assert_eq!(interval(&world, ben), 10.0);
    act(&mut world, cy, Action::React { message_id, reaction: Reaction::Brain });
    assert_eq!(interval(&world, ben), 10.0, "it says something and changes no heartbeat");
    let reactions = &world.room(ada).expect("the room exists").messages.back().expect("a message").reactions;
    let counts: Vec<(Reaction, usize)> =
        reactions.iter().map(|(reaction, who)| (*reaction, who.len())).collect();
    let each_once =
        [Reaction::ThumbsUp, Reaction::ThumbsDown, Reaction::Brain, Reaction::Heart].map(|r| (r, 1));
    assert_eq!(counts, each_once);
    // Keys and access.
    act(&mut world, ada, Action::CreateKey { key: "sesame".into() });
    act(&mut world, dee, Action::RequestAccess { room_id: ada, key: "sesame".into() });
    assert!(
        expect_refusal(&mut world, dee, Action::RequestAccess { room_id: ada, key: "sesame".into() })
            .contains("wait")
    );
    assert_eq!(
        world.room(ada).expect("the room exists").messages.back().map(|m| m.sender),
        Some(MessageSender::System)
    );
    act(&mut world, ada, Action::GrantAccess { request_id: 1 });
    assert!(world.share_room(dee, ben));
    act(&mut world, dee, Action::LeaveRoom { room_id: ada });
    assert!(!world.share_room(dee, ben));
    act(&mut world, dee, Action::RequestAccess { room_id: ada, key: "sesame".into() });
    act(&mut world, ada, Action::DenyAccess { request_id: 2 });
    act(&mut world, ada, Action::RevokeKey { key: "sesame".into() });
    assert!(world.room(ada).expect("the room exists").keys.is_empty() && !world.share_room(dee, ben));
    // Rooms, names, sleep.
    act(&mut world, ben, Action::SetBillboard { message: "Quiet, please".into() });
    act(&mut world, ben, Action::ClearBillboard);
    act(&mut world, ben, Action::SetWpm { wpm: 120 });
    act(&mut world, ben, Action::SetName { name: "Benjamin".into() });
    assert_eq!(
        (world.room(ben).expect("the room exists").wpm, world.display_name(ben)),
        (120, "Benjamin".into())
    );
    act(&mut world, cy, Action::Sleep { until: "2024-02-01T00:00:00".into() });
    assert_eq!(world.next_heartbeat().map(|(who, _)| who), Some(ada));
    world.finish_heartbeat(cy, START_TIME, HeartbeatJitter::NONE);
    assert!(
        world.agent(cy).expect("the agent exists").sleep_until.is_some(),
        "the sleep does not end with the heartbeat in which it began"
    );
    act(&mut world, ben, Action::WakeAgent { agent_id: cy });
    assert_eq!(world.agent(cy).expect("the agent exists").sleep_until, None);
    // Other agents.
    let new = Action::CreateAgent {
        name: "Eve".into(),
        background_prompt: "You keep the log.".into(),
        agent_type: AgentKind::Bot,
        in_room_id: Some(ada),
    };
    act(&mut world, ada, new);
    let eve = AgentId(5);
    assert!(world.share_room(eve, ben) && world.room(eve).is_some());
    let alter = Action::AlterAgent {
        agent_id: eve,
        background_prompt: Some("x".into()),
        name: Some("Eva".into()),
        model: Some("two".into()),
    };
    act(&mut world, ada, alter);
    let altered = world.agent(eve).expect("the agent exists");
    assert_eq!((altered.name.as_str(), altered.prompt.as_str(), altered.model.as_str()), ("Eva", "x", "two"));
    act(&mut world, ada, Action::RetireAgent { agent_id: eve });
    assert!(world.agent(eve).is_none() && world.room(eve).is_none() && !world.share_room(ada, eve));
    assert!(world.any_agent(eve).is_some(), "a retired agent stays in the world's records");
    // Knowledge.
    act(&mut world, ben, Action::Append { path: "list".into(), value: json!(1) });
    act(&mut world, ben, Action::Delete { path: "list".into() });
    act(&mut world, ben, Action::Set { path: "name".into(), value: json!("Rufus"), w: None });
    act(&mut world, ada, Action::SetAttention { room_id: ada, value: "40%".into() });
    act(&mut world, ben, Action::Reply { room_id: ada, message_id, message: "Hello to you".into() });
    let kinds: Vec<&str> = world
        .agent(ben)
        .expect("the agent exists")
        .recent_actions
        .iter()
        .map(|one| one.kind.as_str())
        .collect();
    assert_eq!(
        kinds,
        [
            "set_billboard",
            "clear_billboard",
            "set_wpm",
            "set_name",
            "wake_agent",
            "append",
            "delete",
            "set",
            "reply"
        ]
    );
    let all: BTreeSet<String> = ACTION_TYPES.iter().map(ToString::to_string).collect();
    assert_eq!(recorded, all);
}

#[test]
fn message_delivery_waits_for_typing_time() {
    let (mut world, [ada, ben, ..]) = four_agents();
    let words = |n: usize| vec!["word"; n].join(" ");
    let response = |message: String| AgentAnswer {
        responses: vec![RoomResponse { room: ada, message }],
        ..AgentAnswer::default()
    };
    let last_message =
        |world: &World| world.room(ada).and_then(|room| room.messages.back()).map(|m| (m.sender, m.at));
    // The first message has the full budget; then 60 words at 80 words per minute take 45 seconds.
    assert_eq!(world.apply_answer(ben, response(words(200)), action_context(START_TIME)).sent, 1);
    assert_eq!(last_message(&world), Some((MessageSender::Agent(ben), START_TIME)));
    assert_eq!(world.apply_answer(ben, response(words(60)), action_context(START_TIME + 1_000)).sent, 1);
    assert_eq!(world.next_draft_due(), Some(START_TIME + 45_000));
    let outcome = world.apply_answer(ben, response("Me again".into()), action_context(START_TIME + 2_000));
    assert_eq!(
        (outcome.sent, outcome.refused),
        (0, vec!["you are still writing in room 1, for 43 more seconds".to_owned()])
    );
    assert_eq!(
        world.agent(ben).and_then(|agent| agent.recent_actions.back()).map(|one| one.kind.as_str()),
        Some("response")
    );
    assert_eq!(world.deliver_due_drafts(START_TIME + 44_999), Vec::<u64>::new());
    assert_eq!(world.deliver_due_drafts(START_TIME + 90_000).len(), 1);
    assert_eq!(
        last_message(&world),
        Some((MessageSender::Agent(ben), START_TIME + 45_000)),
        "with the time at which the typing was complete"
    );
    let outcome = world.apply_answer(ben, response(words(201)), action_context(START_TIME + 900_000));
    assert!(outcome.refused[0].contains("200 words at most"), "{:?}", outcome.refused);
}

#[test]
fn message_length_and_rate_are_limited() {
    let (mut world, [ada, ben, ..]) = four_agents();
    let error = world
        .send_message(ada, ben, "x".repeat(2_001), None, START_TIME)
        .expect_err("the message is too long");
    assert!(error.message.contains("2000 characters at most, and this one has 2001"), "{error}");
    // Without spaces, ten characters are a word.
    let error = world
        .submit_message(ada, ben, (&"あ".repeat(2_010), ParagraphSplit::Never), None, START_TIME)
        .expect_err("the message has too many words");
    assert!(error.message.contains("200 words at most, and this one has 201"), "{error}");
    // A second message at the same moment is typed, and a third is refused.
    let message_count = |world: &World| world.room(ada).expect("the room exists").messages.len();
    let before = message_count(&world);
    world
        .submit_message(ada, ben, ("One.", ParagraphSplit::Never), None, START_TIME)
        .expect("the message is sent");
    world
        .submit_message(ada, ben, ("Two.", ParagraphSplit::Never), None, START_TIME)
        .expect("the draft is stored");
    assert_eq!(message_count(&world), before + 1);
    let error = world
        .submit_message(ada, ben, ("Three.", ParagraphSplit::Never), None, START_TIME)
        .expect_err("the draft is not delivered yet");
    assert!(error.message.contains("still writing"), "{error}");
    world.deliver_due_drafts(START_TIME + 1_000);
    assert_eq!(message_count(&world), before + 2, "a word takes less than a second at 80 a minute");
    for name in ["8", "the architect", "ADA", "system"] {
        let reason = expect_refusal(&mut world, ben, Action::SetName { name: name.into() });
        assert!(reason.contains("not be a number") || reason.contains("is taken"), "{name}: {reason}");
    }
}

#[test]
fn answer_applies_knowledge_then_messages_then_actions() {
    let (mut world, [ada, ben, ..]) = four_agents();
    let text = r#"{"responses": [{"room_id": 1, "message": "Goodbye"}, {"room_id": 2, "message": "[no response]"}],
        "actions": [{"type": "leave_room", "room_id": 1}, {"type": "set", "path": "mood", "value": "sad"}]}"#;
    let answer = AgentAnswer::parse(text, AnswerFormat::Json, false).expect("a valid answer");
    let outcome = world.apply_answer(ben, answer, action_context(START_TIME));
    assert_eq!((outcome.sent, outcome.performed, outcome.refused.len()), (1, 2, 0));
    let latest: Vec<&str> = world
        .room(ada)
        .expect("the room exists")
        .messages
        .iter()
        .rev()
        .take(2)
        .map(|m| m.content.as_str())
        .collect();
    assert_eq!(latest, ["Ben (2) has left.", "Goodbye"]);
    let kinds: Vec<&str> = world
        .agent(ben)
        .expect("the agent exists")
        .recent_actions
        .iter()
        .map(|one| one.kind.as_str())
        .collect();
    assert_eq!(kinds, ["set", "leave_room"]);
}

#[test]
fn world_rules_property_hold_for_random_actions() {
    for seed in 0..400 {
        let mut rng = WorldRng::new(seed);
        let (mut world, mut now) =
            testing::random_world(&mut rng, RandomWorldSize { agents: 6, messages: 8, words: 8 });
        for step in 0..60 {
            now += rng.below(5_000) as Millis;
            let ids: Vec<AgentId> = world.agents().map(|agent| agent.id).collect();
            let Some(&who) = ids.get(rng.below(ids.len())) else { break };
            let before = world.clone();
            let action = testing::random_action(&mut rng, &world, who);
            let result = world.perform_action(who, action.clone(), action_context(now));
            assert_action_rules(&before, &world, who, &action, result.is_ok());
            world.deliver_due_drafts(now);
            world.finish_heartbeat(who, now, HeartbeatJitter::NONE);
            assert_eq!(
                testing::rule_violations(&world),
                Vec::<String>::new(),
                "seed {seed}, step {step}: {action:?}"
            );
        }
    }
}

fn assert_action_rules(before: &World, after: &World, who: AgentId, action: &Action, succeeded: bool) {
    let others = |world: &World| -> BTreeSet<AgentId> { world.agents().map(|agent| agent.id).collect() };
    match action {
        Action::WakeAgent { agent_id } if succeeded => {
            assert!(before.share_room(who, *agent_id) && who != *agent_id);
        }
        Action::AlterAgent { agent_id, .. } | Action::RetireAgent { agent_id } if succeeded => {
            assert!(before.share_room(who, *agent_id) && who != *agent_id && *agent_id != ARCHITECT);
            assert!(before.agent(who).is_some_and(|agent| agent.can_create_agents));
        }
        Action::CreateAgent { .. } if succeeded => {
            assert!(before.agent(who).is_some_and(|agent| agent.can_create_agents));
        }
        Action::RequestAccess { room_id, key } if succeeded => {
            assert!(before.room(*room_id).is_some_and(|room| room.keys.contains(key)));
        }
        Action::LeaveRoom { room_id } if succeeded => assert_ne!(*room_id, who),
        _ => {}
    }
    if !matches!(action, Action::CreateAgent { .. } | Action::RetireAgent { .. }) || !succeeded {
        assert_eq!(others(before), others(after), "{action:?}");
    }
    // An agent joins a room only by a grant of its owner or when it is created there.
    for room in after.rooms() {
        let members_before = before.room(room.id).map(|room| room.members.clone()).unwrap_or_default();
        let new =
            room.members.keys().filter(|member| !members_before.contains_key(member) && **member != room.id);
        for member in new {
            let granted = matches!(action, Action::GrantAccess { .. }) && room.id == who;
            let created =
                matches!(action, Action::CreateAgent { in_room_id: Some(at), .. } if *at == room.id);
            assert!(succeeded && (granted || created), "{member} joined {} by {action:?}", room.id);
        }
    }
    // Agent ids are never reassigned.
    for agent in before.all_agents() {
        assert_eq!(after.any_agent(agent.id).map(|agent| agent.id), Some(agent.id));
    }
}

#[test]
fn wake_agent_keeps_next_heartbeat() {
    let (mut world, [ada, ben, ..]) = four_agents();
    world
        .perform_action(
            ben,
            Action::Sleep { until: "2099-01-01T00:00:00".into() },
            action_context(START_TIME),
        )
        .expect("the agent sleeps");
    world.finish_heartbeat(ben, START_TIME, HeartbeatJitter::NONE);
    let next = world.agent(ben).expect("the agent exists").next_heartbeat;
    assert!(next > START_TIME);
    world
        .perform_action(ada, Action::WakeAgent { agent_id: ben }, action_context(START_TIME))
        .expect("the agent wakes");
    let ben = world.agent(ben).expect("the agent exists");
    assert_eq!((ben.sleep_until, ben.next_heartbeat), (None, next));
}

#[test]
fn draft_refusal_is_recorded_when_room_closes() {
    let (mut world, [ada, ben, cy, _]) = four_agents();
    let last_refusal = |world: &World, who| {
        world.any_agent(who).and_then(|agent| agent.recent_actions.back()?.refused.clone())
    };
    world
        .submit_message(ada, ben, ("One.", ParagraphSplit::Never), None, START_TIME)
        .expect("the message is sent");
    // A message that is too long is refused before it is typed.
    let long = "x".repeat(2_005);
    assert!(
        world
            .submit_message(ada, ben, (&long, ParagraphSplit::Never), None, START_TIME + 1)
            .is_err_and(|error| error.message.contains("2000 characters"))
    );
    world
        .submit_message(ada, ben, (&"word ".repeat(60), ParagraphSplit::Never), None, START_TIME + 1)
        .expect("the draft is stored");
    assert_eq!(world.drafts_done_at(ben), Some(START_TIME + 45_000));
    assert!(
        world
            .submit_message(ada, ben, ("more", ParagraphSplit::Never), None, START_TIME + 2)
            .is_err_and(|error| error.message.contains("still writing"))
    );
    world.retire_agent(ada, START_TIME + 3);
    assert_eq!(last_refusal(&world, ben).as_deref(), Some("room 1 was closed before it was written"));
    assert_eq!((world.drafts_done_at(ben), last_refusal(&world, cy)), (None, None));
}

#[test]
fn refusal_reason_is_truncated() {
    let (mut world, [ada, ..]) = four_agents();
    let path = format!("a..{}", "b".repeat(5_000));
    let error = world
        .perform_action(ada, Action::Delete { path }, action_context(START_TIME))
        .expect_err("the path is invalid");
    assert!(error.message.len() > 5_000);
    let recorded = world
        .agent(ada)
        .and_then(|agent| agent.recent_actions.back()?.refused.clone())
        .expect("the action is recorded");
    assert_eq!(recorded.chars().count(), 301);
    assert!(error.message.starts_with(recorded.trim_end_matches('…')));
}

/// A refused command changes nothing, not even the user's membership.
#[test]
fn user_command_refusal_changes_nothing() {
    let (mut world, [ada, ben, ..]) = four_agents();
    let message_id = world.send_message(ada, ben, "Hello", None, START_TIME).expect("the message is sent");
    let say = |message: &str, reply_to| UserCommand::Say { room: ada, message: message.into(), reply_to };
    let react = |message| UserCommand::React { message, reaction: Reaction::Heart };
    for (command, expected) in [
        (say(&"x".repeat(2_001), None), "2000 characters"),
        (say(" ", None), "must not be empty"),
        (say("x", Some(message_id + 7)), "to reply to"),
        (react(message_id + 7), "no message"),
    ] {
        let before = world.clone();
        assert!(
            world
                .execute_command(command.clone(), START_TIME)
                .is_err_and(|error| error.message.contains(expected)),
            "{command:?}"
        );
        assert_eq!(world, before, "{command:?}");
    }
    world.execute_command(say("Well?", Some(message_id)), START_TIME).expect("the message is sent");
    world.execute_command(react(message_id), START_TIME).expect("the reaction is stored");
    assert!(
        world
            .execute_command(react(message_id), START_TIME)
            .is_err_and(|error| error.message.contains("already"))
    );
}

/// The limits of actions hold for world files too.
#[test]
fn world_file_rejects_invalid_agents_and_rooms() {
    let ada = "[[agents]]\nname = \"Ada\"\nseed = \"x\"\n\n[[agents]]\nname = \"Ben\"\nseed = \"x\"\n";
    let room = |owner: &str, more: &str| format!("\n[[rooms]]\nowner = \"{owner}\"\n{more}\n");
    let name = |name: &str| format!("[[agents]]\nname = \"{name}\"\nseed = \"x\"\n");
    let cases = [
        (name("System"), "is taken"),
        (name("the architect"), "is taken"),
        (name("17"), "not be a number"),
        (name(&"x".repeat(51)), "50 characters"),
        (name("a\\nb"), "line breaks"),
        (format!("{ada}{}", name("ADA")), "is taken"),
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
    for (file, expected) in cases {
        let parsed: WorldFile = toml::from_str(&file).expect("a valid world file");
        let error = parsed.into_world("local", START_TIME).expect_err(&file);
        assert!(error.message.contains(expected), "{error}: {file}");
    }
    let trimmed: WorldFile =
        toml::from_str(&(ada.to_owned() + &room("Ada", "keys = [\" open \"]"))).expect("a valid world file");
    let mut world = trimmed.into_world("local", START_TIME).expect("a valid world");
    world
        .perform_action(
            AgentId(2),
            Action::RequestAccess { room_id: AgentId(1), key: "open".into() },
            action_context(START_TIME),
        )
        .expect("the key fits");
}

/// An agent that the user creates, changes and gives rights. A refused command changes nothing.
#[test]
fn user_creates_changes_and_retires_agents() {
    let (mut world, [ada, ben, cy, dee]) = four_agents();
    let create = |name: &str, model: Option<&str>| UserCommand::Create {
        name: name.into(),
        prompt: "Keeps the log.".into(),
        kind: AgentKind::Bot,
        room: Some(ada),
        model: model.map(str::to_owned),
        can_create_agents: true,
    };
    world.execute_command(create("Eve", Some("two")), START_TIME).expect("the agent is created");
    let eve = AgentId(5);
    let state = world.agent(eve).expect("the agent exists");
    assert_eq!((state.model.as_str(), state.kind, state.can_create_agents), ("two", AgentKind::Bot, true));
    assert!(world.share_room(eve, ben));
    let change = |agent: AgentId| UserCommand::ChangeAgent {
        agent,
        name: None,
        prompt: None,
        model: None,
        can_create_agents: None,
        input_format: None,
        output_format: None,
        interval: None,
    };
    let change_json =
        |command: serde_json::Value| -> UserCommand { serde_json::from_value(command).expect("a command") };
    let alter = change_json(json!({
        "wish": "alter", "agent": 2, "name": "Benno", "prompt": "Listens.", "model": "two",
        "can_create_agents": true, "input_format": "toon", "output_format": "toon", "interval": 2.5,
    }));
    world.execute_command(alter, START_TIME).expect("the agent is changed");
    let state = world.agent(ben).expect("the agent exists").clone();
    assert_eq!(
        (state.name.as_str(), state.prompt.as_str(), state.model.as_str()),
        ("Benno", "Listens.", "two")
    );
    assert_eq!((state.hud_format.name(), state.answer_format.name()), ("toon", "toon"));
    assert_eq!((state.interval.seconds(), state.can_create_agents), (2.5, true));
    // The right works at once, and ends when the user revokes it.
    let new = |name: &str| Action::CreateAgent {
        name: name.into(),
        background_prompt: "x".into(),
        agent_type: AgentKind::Persona,
        in_room_id: None,
    };
    world.perform_action(ben, new("Flo"), action_context(START_TIME)).expect("Ben may create agents");
    let revoke = change_json(json!({ "wish": "alter", "agent": 2, "can_create_agents": false }));
    world.execute_command(revoke, START_TIME).expect("the right is revoked");
    assert!(expect_refusal(&mut world, ben, new("Gil")).contains("may not"));
    assert_eq!(world.agent(ben).map(|agent| agent.name.as_str()), Some("Benno"), "nothing else has changed");
    // Rooms.
    world.execute_command(UserCommand::Invite { agent: dee, room: ada }, START_TIME).expect("Dee is invited");
    assert!(world.share_room(dee, ben));
    world.execute_command(UserCommand::Remove { agent: dee, room: ada }, START_TIME).expect("Dee is removed");
    assert!(!world.share_room(dee, ben));
    let before = world.clone();
    for (command, expected) in [
        (create("eve", None), "is taken"),
        (create("Hal", Some("three")), "there is no model 'three'"),
        (change(cy), "nothing to alter"),
        (change(AgentId(99)), "there is no agent 99"),
        (change_json(json!({ "wish": "alter", "agent": 3, "name": "Ada" })), "is taken"),
        (
            change_json(json!({ "wish": "alter", "agent": 3, "name": "Cyd", "interval": 0.5 })),
            "1 to 10 seconds",
        ),
        (change_json(json!({ "wish": "alter", "agent": 3, "name": "Cyd", "model": "none" })), "no model"),
        (change_json(json!({ "wish": "alter", "agent": 3, "prompt": "x".repeat(2_001) })), "2000 characters"),
        (UserCommand::Invite { agent: ben, room: ada }, "in room 1 already"),
        (UserCommand::Invite { agent: ben, room: AgentId(77) }, "no room 77"),
        (UserCommand::Remove { agent: dee, room: ada }, "is not in room 1"),
        (UserCommand::Remove { agent: dee, room: dee }, "its own room"),
    ] {
        let shown = format!("{command:?}");
        let error = world.execute_command(command, START_TIME).expect_err(expected);
        assert!(error.message.contains(expected), "{shown}: {error}");
        assert_eq!(world, before, "{shown}");
    }
    world.execute_command(UserCommand::Retire { agent: eve }, START_TIME).expect("the agent is retired");
    assert!(world.agent(eve).is_none());
}

/// Each paragraph is a message of its own: the first within the word budget, the next when it is typed.
#[test]
fn answer_paragraphs_are_sent_one_after_the_other() {
    let (mut world, [ada, ben, ..]) = four_agents();
    let words = |n: usize| vec!["word"; n].join(" ");
    let text = format!("First.\n\n{}\n  \n\n{}", words(8), words(4));
    let answer = |message: &str| AgentAnswer {
        responses: vec![RoomResponse { room: ada, message: message.into() }],
        ..AgentAnswer::default()
    };
    let split = ActionContext { split: ParagraphSplit::BlankLines, ..action_context(START_TIME) };
    assert_eq!(world.apply_answer(ben, answer(&text), split).sent, 1, "it is one response");
    let sent = |world: &World| -> Vec<(Millis, String)> {
        let messages = world.room(ada).expect("the room exists").messages.iter();
        let by_ben = messages.filter(|message| message.sender == MessageSender::Agent(ben));
        by_ben.map(|message| (message.at - START_TIME, message.content.clone())).collect()
    };
    assert_eq!(sent(&world), [(0, "First.".to_owned())]);
    // At 80 words a minute a word takes 750 ms.
    assert_eq!(
        (world.next_draft_due(), world.drafts_done_at(ben)),
        (Some(START_TIME + 6_000), Some(START_TIME + 9_000))
    );
    let again = ActionContext { now: START_TIME + 7_000, ..split };
    world.deliver_due_drafts(START_TIME + 7_000);
    assert_eq!(sent(&world).last(), Some(&(6_000, words(8))));
    assert!(world.apply_answer(ben, answer("More."), again).refused[0].contains("still writing"));
    // A world that comes late delivers all that is due, each with its own time.
    let mut late = world.clone();
    assert_eq!(late.deliver_due_drafts(START_TIME + 60_000).len(), 1);
    assert_eq!(sent(&late), [(0, "First.".to_owned()), (6_000, words(8)), (9_000, words(4))]);
    assert_eq!((late.next_draft_due(), late.drafts_done_at(ben)), (None, None));
    // A reply links its first paragraph only.
    let first = late.room(ada).and_then(|room| room.messages.back()).map(|message| message.id);
    let message_id = first.expect("the room has a message");
    let reply = Action::Reply { room_id: ada, message_id, message: "One.\n\nTwo.\r\n\r\nThree.".into() };
    late.perform_action(ada, reply, ActionContext { now: START_TIME + 60_000, ..split })
        .expect("Ada replies");
    late.deliver_due_drafts(START_TIME + 120_000);
    let replies: Vec<(String, Option<u64>)> = late
        .room(ada)
        .expect("the room exists")
        .messages
        .iter()
        .filter(|message| message.sender == MessageSender::Agent(ada))
        .map(|message| (message.content.clone(), message.reply_to))
        .collect();
    assert_eq!(
        replies,
        [("One.".to_owned(), Some(message_id)), ("Two.".to_owned(), None), ("Three.".to_owned(), None)]
    );
    // Without the option an answer is one message, and 200 words are the limit of a whole answer.
    let whole = ActionContext { split: ParagraphSplit::Never, now: START_TIME + 300_000, ..split };
    assert_eq!(late.apply_answer(ben, answer("A.\n\nB."), whole).sent, 1);
    assert_eq!(sent(&late).last().map(|(_, text)| text.as_str()), Some("A.\n\nB."));
    let long = format!("{}\n\n{}", words(150), words(51));
    let late_split = ActionContext { now: START_TIME + 900_000, ..split };
    assert!(late.apply_answer(ben, answer(&long), late_split).refused[0].contains("200 words at most"));
}
