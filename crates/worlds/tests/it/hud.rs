//! HUDs: the example of the founding document with all its numbers, and ten thousand random HUDs in four formats.

use halo_agents::token_counter::{ApproxTokenCounter, CeilTokenCounter, TokenCounter};
use halo_worlds::action::{Action, ActionContext};
use halo_worlds::format::{self, AnswerFormat, HudFormat};
use halo_worlds::heartbeat::{self, HeartbeatJitter, Millis};
use halo_worlds::hud::Hud;
use halo_worlds::hud_renderer::{HudError, HudRenderer, HudRequest, RenderedHud};
use halo_worlds::prompts::WorldPrompts;
use halo_worlds::testing::{self, RandomWorldSize, WorldRng};
use halo_worlds::world::{
    ARCHITECT, AgentId, AgentKind, HudBudgets, NewAgent, ParagraphSplit, RoomId, RoomMessage, World,
};
use halo_worlds::world_file::WorldFile;
use serde_json::{Value, json};
use std::sync::Arc;

fn no_recall(_: RoomId) -> Vec<RoomMessage> {
    Vec::new()
}

pub(crate) fn renderer() -> HudRenderer {
    HudRenderer::new(Arc::new(CeilTokenCounter))
}

pub(crate) fn hud_request<'a>(now: Millis, prompts: &'a WorldPrompts, token_limit: usize) -> HudRequest<'a> {
    HudRequest { now, prompts, token_limit, recalled: &no_recall }
}

pub(crate) const UNLIMITED: usize = 1_000_000;

pub(crate) fn document_world() -> (World, Millis) {
    let file: WorldFile = toml::from_str(include_str!("../data/document.toml")).expect("a valid world file");
    let now = heartbeat::parse_time("2024-01-15T10:31:15").expect("a valid time");
    (file.into_world("", now).expect("a valid world"), now)
}

/// The person is a member like others, with the number 0.
#[test]
fn hud_shows_the_architect_as_member_0() {
    let (mut world, now) = document_world();
    assert!(world.join_room(AgentId(5), ARCHITECT, now));
    let prompts = WorldPrompts::default();
    let rendered = renderer().render(&world, AgentId(5), &hud_request(now, &prompts, UNLIMITED));
    let hud = serde_json::to_value(&rendered.expect("the HUD is rendered").hud).expect("it is serialized");
    let rooms = hud["rooms"].as_array().expect("rooms");
    let own = rooms.iter().find(|room| room["id"] == 5).expect("its own room");
    let mut members: Vec<&str> =
        own["members"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    members.sort_unstable();
    assert_eq!(members, ["0", "5", "8"]);
}

/// Every field of the document's example with the default budgets, rooms in the order of the document; all categories of
/// actions are rendered.
#[test]
fn hud_renders_the_document_example() {
    let (world, now) = document_world();
    let prompts = WorldPrompts::default();
    let rendered = HudRenderer::new(Arc::new(ApproxTokenCounter))
        .render(&world, AgentId(5), &hud_request(now, &prompts, UNLIMITED))
        .expect("the HUD is rendered");
    let hud = serde_json::to_value(&rendered.hud).expect("the HUD is serialized");
    assert!(
        hud["system"]["directives"]
            .as_str()
            .expect("a text")
            .starts_with("## Rooms as Conversations\nEach room is a")
    );
    assert!(hud["system"]["directives"].as_str().expect("a text").contains("## Collaboration\n"));
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
            // The document writes 42 %, but what it shows is about 127 tokens of 3,000.
            "memory_used": "4%",
            "recent_actions": [
                {"type": "set", "timestamp": "2024-01-15T10:30:00", "path": "character.relationships.Bob.trust", "value": 0.8},
                {"type": "react", "timestamp": "2024-01-15T10:31:00", "message_id": 123, "reaction": "brain"},
            ],
        })
    );
    let meta = &hud["meta"];
    assert!(
        meta["instructions"].as_str().expect("a text").contains("## You Are an AI Playing a Character\n")
    );
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
        ])
    );
    for format in HudFormat::ALL {
        let rendered = renderer().render_as(
            &world,
            world.agent(AgentId(5)).expect("the agent exists"),
            format,
            &hud_request(now, &prompts, UNLIMITED),
        );
        let rendered = rendered.expect("the HUD is rendered");
        assert_eq!(format::parse(&rendered.text(), format).as_ref(), Ok(&rendered.hud), "{format:?}");
    }
}

#[test]
fn hud_hides_agent_management_without_permission() {
    let (mut world, now) = document_world();
    let prompts = WorldPrompts::default();
    let categories = |world: &World| -> Vec<String> {
        let rendered = renderer()
            .render(world, AgentId(8), &hud_request(now, &prompts, UNLIMITED))
            .expect("the HUD is rendered");
        rendered.hud.meta.available_actions.keys().cloned().collect()
    };
    let without_permission = [
        "knowledge_management",
        "social_interactions",
        "messaging",
        "room_management",
        "access_control",
        "attention",
        "identity",
        "timing",
    ];
    assert_eq!(categories(&world), without_permission);
    let new = NewAgent {
        kind: AgentKind::Bot,
        model: "gpt-4o-mini".into(),
        prompt: "Keep order.".into(),
        formats: (HudFormat::Toon, AnswerFormat::Toon),
        can_create_agents: true,
        ..NewAgent::default()
    };
    let id = world.create_agent(new, now).expect("the agent is created");
    let rendered =
        renderer().render(&world, id, &hud_request(now, &prompts, UNLIMITED)).expect("the HUD is rendered");
    assert_eq!(
        rendered.hud.meta.available_actions.keys().next_back().map(String::as_str),
        Some("agent_management")
    );
    let identity = serde_json::to_value(&rendered.hud.me.identity).expect("the HUD is serialized");
    assert_eq!(identity, json!({"id": 13, "name": "Bot-13", "model": "gpt-4o-mini", "role": "Keep order."}));
    assert_eq!(rendered.hud.meta.response_format.kind, "toon");
    assert!(rendered.hud.meta.instructions.contains("You Are a Bot With a Role"));
    let room = &serde_json::to_value(&rendered.hud.rooms[0]).expect("the HUD is serialized");
    assert_eq!(
        (&room["time_since_last"], &room["word_budget"]),
        (&json!("never (just joined)"), &json!(200))
    );
    assert_eq!((&room["attention_pct"], &room["my_keys"]), (&json!(100.0), &json!([])));
}

#[test]
fn hud_property_random_huds_fit_and_roundtrip() {
    let prompts = WorldPrompts::default();
    let (mut huds, mut seed, mut small) = (0, 0, 0);
    while huds < 10_000 {
        let mut rng = WorldRng::new(seed);
        seed += 1;
        let (world, now) = testing::random_world(&mut rng, RandomWorldSize::default());
        let hud_renderer = renderer();
        for agent in world.agents() {
            let limit = if rng.one_in(3) { 1_200 + rng.below(4_000) } else { UNLIMITED };
            let recalled = |room: RoomId| -> Vec<RoomMessage> {
                world
                    .room(room)
                    .map(|room| room.messages.iter().take(5).cloned().collect())
                    .unwrap_or_default()
            };
            let request = HudRequest { now, prompts: &prompts, token_limit: limit, recalled: &recalled };
            for format in HudFormat::ALL {
                match hud_renderer.render_as(&world, agent, format, &request) {
                    Ok(rendered) => {
                        assert_fits(&rendered, &world, limit);
                        assert_eq!(
                            format::parse(&rendered.text(), format).as_ref(),
                            Ok(&rendered.hud),
                            "seed {seed}, {format:?}"
                        );
                        huds += 1;
                    }
                    Err(HudError::BudgetTooSmall { tokens, limit, .. }) => {
                        assert!(tokens > limit);
                        small += 1;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
    assert!(small < huds / 4, "{small} of {huds} did not fit");
}

#[test]
fn hud_render_cache_does_not_change_output() {
    let prompts = WorldPrompts::default();
    let mut huds = 0;
    for seed in 0..60 {
        let mut rng = WorldRng::new(seed);
        let (mut world, mut now) =
            testing::random_world(&mut rng, RandomWorldSize { agents: 5, messages: 12, words: 8 });
        let cached = renderer();
        for step in 0..40 {
            now += rng.below(5_000) as Millis;
            let ids: Vec<AgentId> = world.agents().map(|agent| agent.id).collect();
            let who = *rng.choose(&ids);
            let action = testing::random_action(&mut rng, &world, who);
            let _ = world.perform_action(
                who,
                action,
                ActionContext {
                    now,
                    counter: &CeilTokenCounter,
                    knowledge_budget: 3_000,
                    split: ParagraphSplit::Never,
                },
            );
            world.deliver_due_drafts(now);
            world.finish_heartbeat(who, now, HeartbeatJitter::NONE);
            let Some(agent) = world.agent(*rng.choose(&ids)) else { continue };
            let limit = if rng.one_in(3) { 1_200 + rng.below(4_000) } else { UNLIMITED };
            let (format, request) = (*rng.choose(&HudFormat::ALL), hud_request(now, &prompts, limit));
            let rendered = cached.render_as(&world, agent, format, &request);
            let uncached = renderer().render_as(&world, agent, format, &request);
            assert!(rendered == uncached, "seed {seed}, step {step}, {format:?}");
            huds += usize::from(rendered.is_ok());
        }
    }
    assert!(huds > 1_500, "{huds}");
}

fn assert_fits(rendered: &RenderedHud, world: &World, limit: usize) {
    let budgets = world.header.budgets.scaled_to(limit);
    let counted: usize =
        rendered.fragments.iter().map(|fragment| CeilTokenCounter.count_tokens(&fragment.text)).sum();
    assert_eq!(
        (counted, rendered.token_counts.iter().sum::<usize>()),
        (rendered.token_usage.total, rendered.token_usage.total)
    );
    assert!(counted <= budgets.total, "{counted} of {}", budgets.total);
    assert!(CeilTokenCounter.count_tokens(&rendered.text()) <= budgets.total);
    assert_eq!(
        rendered.token_usage.fixed + rendered.token_usage.rooms.values().sum::<usize>(),
        rendered.token_usage.total
    );
    assert!(rendered.fragments.windows(2).all(|pair| pair[0].key < pair[1].key), "keys are in order");
    for room in &rendered.hud.rooms {
        let ids: Vec<u64> = room.messages.iter().map(|message| message.id).collect();
        assert!(ids.is_sorted());
        // Without recalled messages there are no gaps.
        let all: Vec<u64> =
            world.room(room.id).expect("the room exists").messages.iter().map(|message| message.id).collect();
        let newest: Vec<u64> = ids.iter().copied().filter(|id| !rendered.recalled.contains(id)).collect();
        assert!(all.ends_with(&newest));
    }
}

#[test]
fn hud_json_matches_serde_json() {
    let prompts = WorldPrompts::default();
    for seed in 0..300 {
        let (world, now) = testing::random_world(&mut WorldRng::new(seed), RandomWorldSize::default());
        let agent = world.agents().next().expect("the world has an agent");
        let Ok(rendered) =
            renderer().render_as(&world, agent, HudFormat::Json, &hud_request(now, &prompts, UNLIMITED))
        else {
            continue;
        };
        assert_eq!(
            rendered.text(),
            serde_json::to_string_pretty(&rendered.hud).expect("the HUD is serialized"),
            "seed {seed}"
        );
        let compact = format::render(&rendered.hud, HudFormat::CompactJson);
        let value: Value = serde_json::from_str(&compact).expect("valid JSON");
        assert_eq!(compact, value.to_string(), "compact JSON has no white space");
        assert!(compact.contains(",\"sys\":{\"dir\":\"") && compact.contains("\"me\":{\"id\":{\"id\":"));
        // Each short name is explained once.
        let legend = value["names"].as_str().expect("the legend is a text");
        for pair in ["sys=system", "me=self", "act=available_actions", "wb=word_budget", "mi=message_id"] {
            assert_eq!(legend.split(' ').filter(|name| *name == pair).count(), 1, "{pair} in {legend}");
        }
    }
}

/// 5,000 tokens of messages at 50, 30 and 20 %, each message of about 160 tokens.
#[test]
fn hud_rooms_get_their_attention_share() {
    let mut world = World::default();
    let now = testing::START_TIME;
    let agent = |name: &str| NewAgent { name: Some(name.into()), ..NewAgent::default() };
    let ids: Vec<AgentId> = ["A", "B", "C"]
        .iter()
        .map(|name| world.create_agent(agent(name), now).expect("the agent is created"))
        .collect();
    for &room in &ids {
        world.join_room(room, ids[0], now);
        for n in 0..60 {
            world
                .send_message(room, room, format!("{n} {}", "word ".repeat(100)), None, now)
                .expect("the message is sent");
        }
    }
    let context = ActionContext {
        now,
        counter: &CeilTokenCounter,
        knowledge_budget: 3_000,
        split: ParagraphSplit::Never,
    };
    for (room, share) in ids.iter().zip(["50%", "30%", "20%"]) {
        let action = Action::SetAttention { room_id: *room, value: share.into() };
        world.perform_action(ids[0], action, context).expect("the action is allowed");
    }
    let too_much = Action::SetAttention { room_id: ids[0], value: "51%".into() };
    assert!(
        world
            .perform_action(ids[0], too_much, context)
            .expect_err("the value exceeds the budget")
            .message
            .contains("more than all of your attention")
    );
    // A total budget that leaves 5,000 tokens for rooms.
    let prompts = WorldPrompts::default();
    let hud_renderer = renderer();
    let fixed = hud_renderer
        .render(&world, ids[0], &hud_request(now, &prompts, UNLIMITED))
        .expect("the HUD is rendered")
        .token_usage
        .fixed;
    world.header.budgets =
        HudBudgets { total: fixed + 5_000, fixed: fixed.max(5_000), messages: 5_000, knowledge: 3_000 };
    let rendered = hud_renderer
        .render(&world, ids[0], &hud_request(now, &prompts, UNLIMITED))
        .expect("the HUD is rendered");
    for (n, (share, min_messages)) in [(2_500, 14), (1_500, 8), (1_000, 5)].into_iter().enumerate() {
        let spent = rendered.token_usage.rooms[&ids[n]];
        assert!(spent <= share && spent + 180 > share, "{spent} of {share}");
        let room = rendered.hud.rooms.iter().find(|room| room.id == ids[n]).expect("the room is shown");
        let messages = room.messages.len();
        assert!(
            (min_messages..=min_messages + 3).contains(&messages),
            "{messages} messages in {share} tokens"
        );
    }
}

#[test]
fn hud_scales_to_small_context_with_notice() {
    let (world, now) = document_world();
    let prompts = WorldPrompts::default();
    let rendered = renderer()
        .render(&world, AgentId(5), &hud_request(now, &prompts, 4_000))
        .expect("the HUD is rendered");
    assert_eq!(
        rendered.budgets,
        HudBudgets { total: 4_000, fixed: 2_000, messages: 2_000, knowledge: 1_200 }
    );
    let notice = rendered.hud.me.notice.expect("the HUD has a notice");
    assert_eq!(notice, "Your model has room for 4000 of 10000 tokens, so everything here is smaller.");
    let rendered = renderer()
        .render(&world, AgentId(5), &hud_request(now, &prompts, 10_000))
        .expect("the HUD is rendered");
    assert_eq!(rendered.hud.me.notice, None);
    let small = renderer()
        .render(&world, AgentId(5), &hud_request(now, &prompts, 500))
        .expect_err("the budget is too small");
    assert!(matches!(small, HudError::BudgetTooSmall { limit: 500, .. }), "{small}");
}

/// The oldest actions are trimmed first, then optional sections; knowledge is not trimmed.
#[test]
fn hud_static_content_is_trimmed_in_order() {
    let (mut world, now) = document_world();
    let context = ActionContext {
        now,
        counter: &CeilTokenCounter,
        knowledge_budget: 3_000,
        split: ParagraphSplit::Never,
    };
    for n in 0..25 {
        let action = Action::Set { path: format!("notes.n{n}"), value: json!("x".repeat(50)), w: None };
        world.perform_action(AgentId(5), action, context).expect("the action is allowed");
    }
    let prompts = WorldPrompts::default();
    let mut render_with = |fixed: usize| {
        world.header.budgets = HudBudgets { total: 9_000, fixed, messages: 4_000, knowledge: 3_000 };
        renderer()
            .render(&world, AgentId(5), &hud_request(now, &prompts, UNLIMITED))
            .expect("the HUD is rendered")
            .hud
    };
    let full = render_with(9_000);
    assert_eq!(full.me.recent_actions.len(), 20, "the last twenty actions");
    assert_eq!(full.me.recent_actions[19]["path"], "notes.n24");
    let fixed_tokens = |hud: &Hud| {
        let fragments = format::render_fragments(hud, HudFormat::Json);
        let fixed = fragments.iter().filter(|fragment| fragment.key.section.room().is_none());
        fixed.map(|fragment| CeilTokenCounter.count_tokens(&fragment.text)).sum::<usize>()
    };
    let one_token_less = render_with(fixed_tokens(&full) - 1);
    assert_eq!(
        one_token_less.me.recent_actions[..],
        full.me.recent_actions[1..],
        "the oldest action is trimmed first"
    );
    assert_eq!(one_token_less.meta, full.meta);
    let mut without_actions = full.clone();
    without_actions.me.recent_actions.clear();
    let trimmed = render_with(fixed_tokens(&without_actions) - 1);
    assert!(trimmed.me.recent_actions.is_empty());
    assert!(
        !trimmed.meta.instructions.contains("## Time") && trimmed.meta.instructions.contains("## Own Room")
    );
    assert_eq!(trimmed.me.knowledge, full.me.knowledge);
}

/// Recalled messages are rendered in order, before the newest.
#[test]
fn hud_recalls_relevant_old_messages() {
    let mut world = World::default();
    let now = testing::START_TIME;
    let id = world
        .create_agent(NewAgent { name: Some("A".into()), ..NewAgent::default() }, now)
        .expect("the agent is created");
    for n in 0..500 {
        world
            .send_message(
                id,
                id,
                format!("Message {n} says something about {}.", ["ships", "stars"][n % 2]),
                None,
                now,
            )
            .expect("the message is sent");
    }
    let prompts = WorldPrompts::default();
    let recalled = |room: RoomId| -> Vec<RoomMessage> {
        let messages = &world.room(room).expect("the room exists").messages;
        [3, 1, 490].iter().filter_map(|&at| messages.get(at).cloned()).collect()
    };
    let request = HudRequest { now, prompts: &prompts, token_limit: 4_000, recalled: &recalled };
    let rendered = renderer().render(&world, id, &request).expect("the HUD is rendered");
    let ids: Vec<u64> = rendered.hud.rooms[0].messages.iter().map(|message| message.id).collect();
    assert_eq!((&ids[..2], rendered.recalled.as_slice()), (&[2, 4][..], &[2, 4][..]), "in order");
    assert_eq!(ids.last(), Some(&500));
    assert!(ids[2..].windows(2).all(|pair| pair[0] + 1 == pair[1]), "the newest without gaps");
    assert!(rendered.token_usage.total <= 4_000);
}

#[test]
fn hud_notice_when_knowledge_does_not_fit() {
    let (prompts, now) = (WorldPrompts::default(), testing::START_TIME);
    let mut world = World::default();
    let who = world
        .create_agent(NewAgent { name: Some("A".into()), ..NewAgent::default() }, now)
        .expect("the agent is created");
    let context = ActionContext {
        now,
        counter: &CeilTokenCounter,
        knowledge_budget: 3_000,
        split: ParagraphSplit::Never,
    };
    let set = |path: &str, value: Value| Action::Set { path: path.into(), value, w: None };
    world.perform_action(who, set("mood", json!("calm")), context).expect("the value fits");
    // JSON with an indent writes one line per number, and all of them count.
    let long_list = json!((0..2_000).map(|n| n % 10).collect::<Vec<_>>());
    let error = world
        .perform_action(who, set("log", long_list.clone()), context)
        .expect_err("the value exceeds the budget");
    assert!(error.message.contains("3000 are all that fit"), "{error}");
    let large_budget = ActionContext { knowledge_budget: 100_000, ..context };
    world.perform_action(who, set("log", long_list), large_budget).expect("the value fits the larger budget");
    for format in HudFormat::ALL {
        let agent = world.agent(who).expect("the agent exists").clone();
        let rendered = renderer()
            .render_as(&world, &agent, format, &hud_request(now, &prompts, 4_000))
            .expect("the HUD is rendered");
        let me = &rendered.hud.me;
        assert_eq!(me.knowledge.keys().collect::<Vec<_>>(), ["mood"], "{format:?}");
        assert!(me.notice.as_deref().is_some_and(|notice| notice.contains("log is not shown")), "{me:?}");
        assert_eq!(format::parse(&rendered.text(), format).expect("the HUD is parsed"), rendered.hud);
    }
    // The newest message is rendered, truncated if needed.
    let long = "word ".repeat(380);
    world.send_message(who, who, long.trim(), None, now).expect("the message is sent");
    world.perform_action(who, Action::Delete { path: "log".into() }, context).expect("the path exists");
    let rendered =
        renderer().render(&world, who, &hud_request(now, &prompts, 2_000)).expect("the HUD is rendered");
    let message = &rendered.hud.rooms[0].messages;
    assert!(message.len() == 1 && message[0].content.ends_with(" […]"), "{message:?}");
    let rendered =
        renderer().render(&world, who, &hud_request(now, &prompts, 9_000)).expect("the HUD is rendered");
    assert_eq!(rendered.hud.rooms[0].messages[0].content, long.trim());
}

#[test]
fn world_file_rejects_duplicate_and_invalid_messages() {
    let world_error = |text: &str| {
        let file: WorldFile = toml::from_str(text).expect("a valid world file");
        file.into_world("", testing::START_TIME).map(drop).expect_err("the world is refused").message
    };
    let world = |second: &str| {
        format!(
            "[[agents]]\nname='A'\n[[agents]]\nname='B'\n[[rooms]]\nowner='A'\n[[rooms.messages]]\nid=7\nsender='A'\ncontent='x'\n\
             [[rooms]]\nowner='B'\n[[rooms.messages]]\n{second}\nsender='B'\n"
        )
    };
    assert!(world_error(&world("id=7\ncontent='y'")).contains("message 7 is in another room too"));
    assert!(world_error(&world("id=99999999\ncontent='y'")).contains("numbers are 1 to"));
    assert!(
        world_error(&world(&format!("content='{}'", "y".repeat(2_001))))
            .contains("more than 2000 characters")
    );
}
