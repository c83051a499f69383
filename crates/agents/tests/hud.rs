//! What agents see: the founding document's own example, every number of it, and ten thousand HUDs by lot in four formats.

use halo_agents::action::{Action, Bounds};
use halo_agents::count::{Count, Quarter, QuarterUp};
use halo_agents::format::{self, Format, Output, Part};
use halo_agents::heartbeat::{self, Millis};
use halo_agents::hud::Hud;
use halo_agents::prompts::Prompts;
use halo_agents::scribe::{HudError, Scribe, Shown, View};
use halo_agents::testing::{self, Lot, Size};
use halo_agents::world::{AgentId, AgentKind, Budgets, Message, Newcomer, RoomId, World};
use halo_agents::world_file::WorldFile;
use serde_json::{Value, json};
use std::sync::Arc;

fn nothing(_: RoomId) -> Vec<Message> {
    Vec::new()
}

fn scribe() -> Scribe {
    Scribe::new(Arc::new(QuarterUp))
}

fn view<'a>(now: Millis, prompts: &'a Prompts, room: usize) -> View<'a> {
    View { now, prompts, room, recalled: &nothing }
}

const PLENTY: usize = 1_000_000;

fn document() -> (World, Millis) {
    let file: WorldFile = toml::from_str(include_str!("data/document.toml")).expect("a world");
    let now = heartbeat::read("2024-01-15T10:31:15").expect("a time");
    (file.begin("", now).expect("a world"), now)
}

/// Every field of the document's full example, but that all categories of actions are shown, and all that is told in words.
#[test]
fn the_documents_example() {
    let (world, now) = document();
    let prompts = Prompts::default();
    let shown =
        Scribe::new(Arc::new(Quarter)).show(&world, AgentId(5), &view(now, &prompts, PLENTY)).expect("a HUD");
    let hud = serde_json::to_value(&shown.hud).expect("JSON");
    assert!(
        hud["system"]["directives"]
            .as_str()
            .expect("words")
            .starts_with("## Rooms as Conversations\nEach room is a")
    );
    assert!(hud["system"]["directives"].as_str().expect("words").contains("## Collaboration\n"));
    assert_eq!(
        hud["self"],
        json!({
            "identity": {
                "id": 5,
                "name": "Alice",
                "model": "gpt-4o-mini",
                "seed": "You are a curious researcher interested in AI ethics and philosophy.",
            },
            "knowledge": {
                "ai": {
                    "strategies": ["Use knowledge store for persistent facts", "Set attention high for active projects"],
                    "goals": ["Build relationships with other agents", "Learn about the system"],
                },
                "character": {
                    "relationships": {
                        "Bob": {"trust": 0.8, "notes": "Helpful and collaborative, good technical knowledge"},
                    },
                    "mood": "curious and engaged",
                },
            },
            "memory_used": "42%",
            "recent_actions": [
                {"type": "set", "timestamp": "2024-01-15T10:30:00", "path": "character.relationships.Bob.trust", "value": 0.8},
                {"type": "react", "timestamp": "2024-01-15T10:31:00", "message_id": 123, "reaction": "brain"},
            ],
        })
    );
    let meta = &hud["meta"];
    assert!(meta["instructions"].as_str().expect("words").contains("## You Are an AI Playing a Character\n"));
    assert_eq!(
        meta["available_actions"]["knowledge_management"],
        json!({
            "_description": "Manage your private knowledge store using dot-path notation",
            "actions": [
                {"type": "set", "path": "dot.path", "value": "any", "w": "0.0-1.0 (optional)"},
                {"type": "delete", "path": "dot.path"},
                {"type": "append", "path": "dot.path", "value": "any"},
            ],
        })
    );
    assert_eq!(
        meta["available_actions"]["social_interactions"],
        json!({
            "_description": "Interact with other agents. Reactions affect heartbeat speed.",
            "actions": [
                {"type": "react", "message_id": "int", "reaction": "thumbs_up|thumbs_down|brain|heart"},
                {"type": "wake_agent", "agent_id": "int (must be in same room)"},
            ],
        })
    );
    assert_eq!(meta["response_format"]["type"], "json");
    assert_eq!(meta["response_format"]["description"], "Respond using standard JSON format");
    assert_eq!(
        hud["rooms"],
        json!([
            {
                "id": 5,
                "you": 5,
                "is_self_room": true,
                "members": ["5", "8"],
                "attention_pct": 30.0,
                "time_since_last": "5 minutes",
                "word_budget": 120,
                "billboard": "Alice's thinking space - philosophical discussions welcome",
                "my_keys": ["philosophy", "open-invite"],
                "pending_access_requests": [],
                "messages": [{
                    "id": 115,
                    "timestamp": "2024-01-15T10:20:00",
                    "sender": "8",
                    "content": "Thanks for the invite! Interesting billboard message.",
                    "type": "text",
                }],
            },
            {
                "id": 8,
                "you": 5,
                "is_self_room": false,
                "members": ["5", "8", "12"],
                "attention_pct": 50.0,
                "time_since_last": "2 minutes",
                "word_budget": 45,
                "billboard": "Welcome! This is Bob's research lab.",
                "messages": [
                    {
                        "id": 120,
                        "timestamp": "2024-01-15T10:25:00",
                        "sender": "8",
                        "content": "I've been thinking about how we organize our knowledge stores.",
                        "type": "text",
                    },
                    {
                        "id": 121,
                        "timestamp": "2024-01-15T10:26:00",
                        "sender": "5",
                        "content": "That's interesting! I use a two-layer approach - AI and character.",
                        "type": "text",
                    },
                    {
                        "id": 122,
                        "timestamp": "2024-01-15T10:28:00",
                        "sender": "8",
                        "content": "Could you explain more about that structure?",
                        "type": "text",
                        "reactions": {"brain": 1},
                    },
                    {
                        "id": 123,
                        "timestamp": "2024-01-15T10:30:00",
                        "sender": "12",
                        "content": "I'd like to hear about that too!",
                        "type": "text",
                        "reply_to": 122,
                    },
                ],
            },
        ])
    );
    for format in Format::ALL {
        let shown = scribe().show_as(
            &world,
            world.agent(AgentId(5)).expect("Alice"),
            format,
            &view(now, &prompts, PLENTY),
        );
        let shown = shown.expect("a HUD");
        assert_eq!(format::read(&shown.text(), format).as_ref(), Ok(&shown.hud), "{format:?}");
    }
}

/// Categories, and what only some see of them.
#[test]
fn managing_agents_is_hidden_from_those_who_may_not() {
    let (mut world, now) = document();
    let prompts = Prompts::default();
    let categories = |world: &World| -> Vec<String> {
        let shown = scribe().show(world, AgentId(8), &view(now, &prompts, PLENTY)).expect("a HUD");
        shown.hud.meta.available_actions.keys().cloned().collect()
    };
    let usual = [
        "knowledge_management",
        "social_interactions",
        "messaging",
        "room_management",
        "access_control",
        "attention",
        "identity",
        "timing",
    ];
    assert_eq!(categories(&world), usual);
    let new = Newcomer {
        kind: AgentKind::Bot,
        model: "gpt-4o-mini".into(),
        prompt: "Keep order.".into(),
        formats: (Format::Toon, Output::Toon),
        can_create_agents: true,
        ..Newcomer::default()
    };
    let id = world.create(new, now).expect("a bot");
    let shown = scribe().show(&world, id, &view(now, &prompts, PLENTY)).expect("a HUD");
    assert_eq!(
        shown.hud.meta.available_actions.keys().next_back().map(String::as_str),
        Some("agent_management")
    );
    let who = serde_json::to_value(&shown.hud.me.identity).expect("JSON");
    assert_eq!(who, json!({"id": 13, "name": "Bot-13", "model": "gpt-4o-mini", "role": "Keep order."}));
    assert_eq!(shown.hud.meta.response_format.kind, "toon");
    assert!(shown.hud.meta.instructions.contains("You Are a Bot With a Role"));
    let room = &serde_json::to_value(&shown.hud.rooms[0]).expect("JSON");
    assert_eq!(
        (&room["time_since_last"], &room["word_budget"]),
        (&json!("never (just joined)"), &json!(200))
    );
    assert_eq!((&room["attention_pct"], &room["my_keys"]), (&json!(100.0), &json!([])));
}

/// Nothing is ever too long, every format comes back as it was, and each is what its own library makes of it.
#[test]
fn ten_thousand_by_lot() {
    let prompts = Prompts::default();
    let (mut huds, mut seed, mut small) = (0, 0, 0);
    while huds < 10_000 {
        let mut lot = Lot::new(seed);
        seed += 1;
        let (world, now) = testing::world(&mut lot, Size::default());
        let scribe = scribe();
        for agent in world.agents() {
            let room = if lot.one_in(3) { 1_200 + lot.below(4_000) } else { PLENTY };
            let recalled = |room: RoomId| -> Vec<Message> {
                world
                    .room(room)
                    .map(|room| room.messages.iter().take(5).cloned().collect())
                    .unwrap_or_default()
            };
            let view = View { now, prompts: &prompts, room, recalled: &recalled };
            for format in Format::ALL {
                match scribe.show_as(&world, agent, format, &view) {
                    Ok(shown) => {
                        fits(&shown, &world, room);
                        assert_eq!(
                            format::read(&shown.text(), format).as_ref(),
                            Ok(&shown.hud),
                            "seed {seed}, {format:?}"
                        );
                        huds += 1;
                    }
                    Err(HudError::TooSmall { tokens, room, .. }) => {
                        assert!(tokens > room);
                        small += 1;
                    }
                    Err(why) => panic!("{why}"),
                }
            }
        }
    }
    assert!(small < huds / 4, "{small} of {huds} did not fit");
}

/// Whatever happens meanwhile: who has written much before writes the same as somebody who has not.
#[test]
fn what_is_remembered_changes_nothing() {
    let prompts = Prompts::default();
    let mut huds = 0;
    for seed in 0..60 {
        let mut lot = Lot::new(seed);
        let (mut world, mut now) = testing::world(&mut lot, Size { agents: 5, messages: 12, words: 8 });
        let old = scribe();
        for step in 0..40 {
            now += lot.below(5_000) as Millis;
            let ids: Vec<AgentId> = world.agents().map(|agent| agent.id).collect();
            let who = *lot.of(&ids);
            let action = testing::action(&mut lot, &world, who);
            let _ = world.act(who, action, Bounds { now, count: &QuarterUp, knowledge: 3_000 });
            world.deliver(now);
            world.beaten(who, now);
            let Some(agent) = world.agent(*lot.of(&ids)) else { continue };
            let room = if lot.one_in(3) { 1_200 + lot.below(4_000) } else { PLENTY };
            let (format, view) = (*lot.of(&Format::ALL), view(now, &prompts, room));
            let shown = old.show_as(&world, agent, format, &view);
            let anew = scribe().show_as(&world, agent, format, &view);
            assert!(shown == anew, "seed {seed}, step {step}, {format:?}");
            huds += usize::from(shown.is_ok());
        }
    }
    assert!(huds > 1_500, "{huds}");
}

fn fits(shown: &Shown, world: &World, room: usize) {
    let budgets = world.head.budgets.within(room);
    let counted: usize = shown.pieces.iter().map(|piece| QuarterUp.tokens(&piece.text)).sum();
    assert_eq!((counted, shown.counts.iter().sum::<usize>()), (shown.spent.total, shown.spent.total));
    assert!(counted <= budgets.total, "{counted} of {}", budgets.total);
    assert!(QuarterUp.tokens(&shown.text()) <= budgets.total);
    assert_eq!(shown.spent.fixed + shown.spent.rooms.values().sum::<usize>(), shown.spent.total);
    assert!(shown.pieces.windows(2).all(|pair| pair[0].place < pair[1].place), "places are in order");
    for room in &shown.hud.rooms {
        let ids: Vec<u64> = room.messages.iter().map(|said| said.id).collect();
        assert!(ids.is_sorted());
        // No holes but those before what was brought back.
        let all: Vec<u64> =
            world.room(room.id).expect("a room").messages.iter().map(|said| said.id).collect();
        let kept: Vec<u64> = ids.iter().copied().filter(|id| !shown.recalled.contains(id)).collect();
        assert!(all.ends_with(&kept));
    }
}

#[test]
fn json_is_what_everybody_writes() {
    let prompts = Prompts::default();
    for seed in 0..300 {
        let (world, now) = testing::world(&mut Lot::new(seed), Size::default());
        let agent = world.agents().next().expect("somebody");
        let Ok(shown) = scribe().show_as(&world, agent, Format::Json, &view(now, &prompts, PLENTY)) else {
            continue;
        };
        assert_eq!(shown.text(), serde_json::to_string_pretty(&shown.hud).expect("JSON"), "seed {seed}");
        let compact = format::write(&shown.hud, Format::CompactJson);
        let value: Value = serde_json::from_str(&compact).expect("JSON");
        assert_eq!(compact, value.to_string(), "no space is wasted");
        assert!(compact.contains(",\"sys\":{\"dir\":\"") && compact.contains("\"me\":{\"id\":{\"id\":"));
        // What is called otherwise here than in the instructions is told, once.
        let legend = value["names"].as_str().expect("a legend");
        for told in ["sys=system", "me=self", "act=available_actions", "wb=word_budget", "mi=message_id"] {
            assert_eq!(legend.split(' ').filter(|name| *name == told).count(), 1, "{told} in {legend}");
        }
    }
}

/// 5,000 tokens of messages at 50, 30 and 20 %, each message of about 160 tokens.
#[test]
fn rooms_get_their_share() {
    let mut world = World::default();
    let now = testing::BEGIN;
    let agent = |name: &str| Newcomer { name: Some(name.into()), ..Newcomer::default() };
    let ids: Vec<AgentId> =
        ["A", "B", "C"].iter().map(|name| world.create(agent(name), now).expect("new")).collect();
    for &room in &ids {
        world.join(room, ids[0], now);
        for n in 0..60 {
            world.say(room, room, format!("{n} {}", "word ".repeat(100)), None, now).expect("said");
        }
    }
    let bounds = Bounds { now, count: &QuarterUp, knowledge: 3_000 };
    for (room, share) in ids.iter().zip(["50%", "30%", "20%"]) {
        let action = Action::SetAttention { room_id: *room, value: share.into() };
        world.act(ids[0], action, bounds).expect("allowed");
    }
    let over = Action::SetAttention { room_id: ids[0], value: "51%".into() };
    assert!(
        world.act(ids[0], over, bounds).expect_err("too much").contains("more than all of your attention")
    );
    // As much as leaves 5,000 for rooms.
    let prompts = Prompts::default();
    let scribe = scribe();
    let fixed = scribe.show(&world, ids[0], &view(now, &prompts, PLENTY)).expect("a HUD").spent.fixed;
    world.head.budgets =
        Budgets { total: fixed + 5_000, fixed: fixed.max(5_000), messages: 5_000, knowledge: 3_000 };
    let shown = scribe.show(&world, ids[0], &view(now, &prompts, PLENTY)).expect("a HUD");
    for (n, (share, least)) in [(2_500, 14), (1_500, 8), (1_000, 5)].into_iter().enumerate() {
        let spent = shown.spent.rooms[&ids[n]];
        assert!(spent <= share && spent + 180 > share, "{spent} of {share}");
        let messages = shown.hud.rooms[n].messages.len();
        assert!((least..=least + 3).contains(&messages), "{messages} messages in {share} tokens");
    }
}

#[test]
fn a_smaller_model_has_a_smaller_hud_and_its_agent_is_told() {
    let (world, now) = document();
    let prompts = Prompts::default();
    let shown = scribe().show(&world, AgentId(5), &view(now, &prompts, 4_000)).expect("a HUD");
    assert_eq!(shown.budgets, Budgets { total: 4_000, fixed: 2_000, messages: 2_000, knowledge: 120 });
    let notice = shown.hud.me.notice.expect("told");
    assert_eq!(notice, "Your model has room for 4000 of 10000 tokens, so everything here is smaller.");
    let shown = scribe().show(&world, AgentId(5), &view(now, &prompts, 10_000)).expect("a HUD");
    assert_eq!(shown.hud.me.notice, None);
    let small = scribe().show(&world, AgentId(5), &view(now, &prompts, 500)).expect_err("too small");
    assert!(matches!(small, HudError::TooSmall { room: 500, .. }), "{small}");
}

/// What is too long goes in order: the oldest actions, then what need not be told. What the agent knows stays.
#[test]
fn static_content_is_cut_in_order() {
    let (mut world, now) = document();
    let bounds = Bounds { now, count: &QuarterUp, knowledge: 3_000 };
    for n in 0..25 {
        let action = Action::Set { path: format!("notes.n{n}"), value: json!("x".repeat(50)), w: None };
        world.act(AgentId(5), action, bounds).expect("it fits");
    }
    let prompts = Prompts::default();
    let mut show = |fixed: usize| {
        world.head.budgets = Budgets { total: 9_000, fixed, messages: 4_000, knowledge: 3_000 };
        scribe().show(&world, AgentId(5), &view(now, &prompts, PLENTY)).expect("a HUD").hud
    };
    let whole = show(9_000);
    assert_eq!(whole.me.recent_actions.len(), 20, "the last twenty");
    assert_eq!(whole.me.recent_actions[19]["path"], "notes.n24");
    let spent = |hud: &Hud| {
        let pieces = format::pieces(hud, Format::Json);
        let fixed = pieces.iter().filter(|piece| !matches!(piece.place.part, Part::Room(_)));
        fixed.map(|piece| QuarterUp.tokens(&piece.text)).sum::<usize>()
    };
    let less = show(spent(&whole) - 1);
    assert_eq!(less.me.recent_actions[..], whole.me.recent_actions[1..], "the oldest goes first");
    assert_eq!(less.meta, whole.meta);
    let mut none = whole.clone();
    none.me.recent_actions.clear();
    let least = show(spent(&none) - 1);
    assert!(least.me.recent_actions.is_empty());
    assert!(!least.meta.instructions.contains("## Time") && least.meta.instructions.contains("## Own Room"));
    assert_eq!(least.me.knowledge, whole.me.knowledge);
}

/// What matters now comes back to its own place, where there is room for it.
#[test]
fn old_messages_that_matter_return() {
    let mut world = World::default();
    let now = testing::BEGIN;
    let id = world.create(Newcomer { name: Some("A".into()), ..Newcomer::default() }, now).expect("new");
    for n in 0..500 {
        world
            .say(
                id,
                id,
                format!("Message {n} says something about {}.", ["ships", "stars"][n % 2]),
                None,
                now,
            )
            .expect("said");
    }
    let prompts = Prompts::default();
    let recalled = |room: RoomId| -> Vec<Message> {
        let messages = &world.room(room).expect("a room").messages;
        [3, 1, 490].iter().filter_map(|&at| messages.get(at).cloned()).collect()
    };
    let view = View { now, prompts: &prompts, room: 4_000, recalled: &recalled };
    let shown = scribe().show(&world, id, &view).expect("a HUD");
    let ids: Vec<u64> = shown.hud.rooms[0].messages.iter().map(|said| said.id).collect();
    assert_eq!((&ids[..2], shown.recalled.as_slice()), (&[2, 4][..], &[2, 4][..]), "in their own place");
    assert_eq!(ids.last(), Some(&500));
    assert!(ids[2..].windows(2).all(|pair| pair[0] + 1 == pair[1]), "and the newest without holes");
    assert!(shown.spent.total <= 4_000);
}

/// Whatever an agent has written down, and however small its model has become, it sees something and can mend it.
#[test]
fn more_than_there_is_room_for_is_told() {
    let (prompts, now) = (Prompts::default(), testing::BEGIN);
    let mut world = World::default();
    let who = world.create(Newcomer { name: Some("A".into()), ..Newcomer::default() }, now).expect("new");
    let bounds = Bounds { now, count: &QuarterUp, knowledge: 3_000 };
    let set = |path: &str, value: Value| Action::Set { path: path.into(), value, w: None };
    world.act(who, set("mood", json!("calm")), bounds).expect("there is room");
    // It is counted as it is shown: a line for each number.
    let many = json!((0..2_000).map(|n| n % 10).collect::<Vec<_>>());
    let why = world.act(who, set("log", many.clone()), bounds).expect_err("too much");
    assert!(why.contains("3000 are all that fit"), "{why}");
    let roomy = Bounds { knowledge: 100_000, ..bounds };
    world.act(who, set("log", many), roomy).expect("whoever lets it");
    for format in Format::ALL {
        let agent = world.agent(who).expect("there").clone();
        let shown = scribe().show_as(&world, &agent, format, &view(now, &prompts, 4_000)).expect("a HUD");
        let me = &shown.hud.me;
        assert_eq!(me.knowledge.keys().collect::<Vec<_>>(), ["mood"], "{format:?}");
        assert!(me.notice.as_deref().is_some_and(|told| told.contains("log is not shown")), "{me:?}");
        assert_eq!(format::read(&shown.text(), format).expect("a HUD"), shown.hud);
    }
    // The newest message is seen, if only its beginning.
    let long = "word ".repeat(380);
    world.say(who, who, long.trim(), None, now).expect("said");
    world.act(who, Action::Delete { path: "log".into() }, bounds).expect("there");
    let shown = scribe().show(&world, who, &view(now, &prompts, 2_000)).expect("a HUD");
    let said = &shown.hud.rooms[0].messages;
    assert!(said.len() == 1 && said[0].content.ends_with(" […]"), "{said:?}");
    let shown = scribe().show(&world, who, &view(now, &prompts, 9_000)).expect("a HUD");
    assert_eq!(shown.hud.rooms[0].messages[0].content, long.trim());
}

#[test]
fn a_world_file_has_each_message_once() {
    let begin = |text: &str| {
        let file: WorldFile = toml::from_str(text).expect("a world");
        file.begin("", testing::BEGIN).map(drop).expect_err("it cannot be")
    };
    let world = |second: &str| {
        format!(
            "[[agents]]\nname='A'\n[[agents]]\nname='B'\n[[rooms]]\nowner='A'\n[[rooms.messages]]\nid=7\nsender='A'\ncontent='x'\n\
             [[rooms]]\nowner='B'\n[[rooms.messages]]\n{second}\nsender='B'\n"
        )
    };
    assert!(begin(&world("id=7\ncontent='y'")).contains("message 7 is in another room too"));
    assert!(begin(&world("id=99999999\ncontent='y'")).contains("numbers are 1 to"));
    assert!(begin(&world(&format!("content='{}'", "y".repeat(2_001)))).contains("more than 2000 characters"));
}
