//! The budgets of a HUD: the document's numbers, words, rooms and attention.

use crate::hud::{UNLIMITED, document_world, hud_request, renderer};
use halo_agents::token_counter::{CeilTokenCounter, TokenCounter};
use halo_worlds::action::{Action, ActionContext};
use halo_worlds::heartbeat::Millis;
use halo_worlds::hud_renderer::RenderedHud;
use halo_worlds::prompts::WorldPrompts;
use halo_worlds::testing;
use halo_worlds::user_command::UserCommand;
use halo_worlds::world::{AgentId, HudBudgets, NewAgent, ParagraphSplit, World};
use serde_json::json;

/// STATIC_CONTENT_MAX, MESSAGE_CONTENT_MIN and SELF_META_MAX of the document, in a world that sets no budgets.
#[test]
fn hud_budgets_are_those_of_the_document() {
    let (mut world, now) = document_world();
    assert_eq!(
        world.header.budgets,
        HudBudgets { total: 10_000, fixed: 5_000, messages: 5_000, knowledge: 3_000 }
    );
    // An agent that knows and does as much as it may, in rooms with more messages than fit.
    let knowledge = |n: usize| json!({"notes": vec!["four letters "; n]});
    let fill = |world: &mut World, n: usize| {
        let context = ActionContext {
            now,
            counter: &CeilTokenCounter,
            knowledge_budget: world.header.budgets.knowledge,
            split: ParagraphSplit::Never,
        };
        world.perform_action(
            AgentId(5),
            Action::Set { path: "log".into(), value: knowledge(n), w: None },
            context,
        )
    };
    let fits = (1..1_000).take_while(|&n| fill(&mut world, n).is_ok()).last().expect("some knowledge fits");
    let error = fill(&mut world, fits + 1).expect_err("the knowledge is full");
    assert!(error.message.contains("3000 are all that fit"), "{error}");
    for n in 0..400 {
        for room in [AgentId(5), AgentId(8)] {
            world
                .send_message(room, room, format!("{n} {}", "word ".repeat(40)), None, now)
                .expect("the message is sent");
        }
    }
    let prompts = WorldPrompts::default();
    let rendered = renderer()
        .render(&world, AgentId(5), &hud_request(now, &prompts, UNLIMITED))
        .expect("the HUD is rendered");
    let usage = &rendered.token_usage;
    assert!((2_950..=3_000).contains(&usage.knowledge), "{usage:?}");
    assert!(usage.fixed <= 5_000 && usage.fixed > 4_000, "{usage:?}");
    let rooms: usize = usage.rooms.values().sum();
    assert!(rooms >= 4_800 && usage.total <= 10_000, "{usage:?}");
    assert_eq!(
        usage.fixed,
        usage.shared
            + usage.me
            + usage.recent_actions
            + CeilTokenCounter.count_tokens(&last_fragment(&rendered))
            + CeilTokenCounter.count_tokens(&rooms_header(&rendered)),
        "the parts of the static content"
    );
}

fn last_fragment(rendered: &RenderedHud) -> String {
    rendered.fragments.last().map(|fragment| fragment.text.to_string()).unwrap_or_default()
}

/// The text between the recent actions and the first room.
fn rooms_header(rendered: &RenderedHud) -> String {
    let first_room = rendered.fragments.iter().position(|fragment| fragment.key.section.room().is_some());
    first_room.map(|at| rendered.fragments[at - 1].text.to_string()).unwrap_or_default()
}

/// memory_used is the part of 3,000 tokens that the knowledge takes, rounded down, and never more than 100 %.
#[test]
fn hud_memory_used_is_the_share_of_3000_tokens() {
    let (mut world, now) = document_world();
    let prompts = WorldPrompts::default();
    for (tokens, shown) in [
        (30, "1%"),
        (29, "0%"),
        (1_259, "41%"),
        (1_260, "42%"),
        (1_350, "45%"),
        (2_999, "99%"),
        (3_000, "100%"),
        (3_300, "100%"),
    ] {
        let mut render = |chars: usize| {
            let context = ActionContext {
                now,
                counter: &CeilTokenCounter,
                knowledge_budget: usize::MAX,
                split: ParagraphSplit::Never,
            };
            let text = "x".repeat(chars);
            world
                .perform_action(
                    AgentId(12),
                    Action::Set { path: "a".into(), value: json!(text), w: None },
                    context,
                )
                .expect("the value fits");
            renderer()
                .render(&world, AgentId(12), &hud_request(now, &prompts, UNLIMITED))
                .expect("the HUD is rendered")
        };
        // Four characters are a token; the quotes and the name take some too.
        let around = render(400).token_usage.knowledge - 100;
        let rendered = render((tokens - around) * 4);
        assert_eq!(rendered.token_usage.knowledge, tokens);
        assert_eq!(rendered.hud.me.memory_used, shown, "{tokens} of 3,000");
    }
}

/// The word budget is 10 to 200 words at every moment, also while a message is typed.
#[test]
fn hud_word_budget_is_shown_while_a_draft_is_typed() {
    let (mut world, now) = document_world();
    let prompts = WorldPrompts::default();
    let budget = |world: &World, at: Millis| {
        let rendered = renderer()
            .render(world, AgentId(12), &hud_request(at, &prompts, UNLIMITED))
            .expect("the HUD is rendered");
        let room = rendered.hud.rooms.iter().find(|room| room.id == AgentId(8)).cloned();
        room.expect("the room is shown").word_budget
    };
    assert_eq!(budget(&world, now), 200, "the first message has the full budget");
    let submit = |world: &mut World, words: usize, at: Millis| {
        let text = vec!["word"; words].join(" ");
        world.submit_message(AgentId(8), AgentId(12), (&text, ParagraphSplit::Never), None, at)
    };
    submit(&mut world, 5, now).expect("the message is sent");
    submit(&mut world, 100, now + 1_000).expect("the draft is stored");
    // 100 words at the 20 words a minute of the room take five minutes from the last message.
    assert_eq!(world.drafts_done_at(AgentId(12)), Some(now + 300_000));
    for (seconds, words) in [(1, 10), (30, 10), (36, 12), (60, 20), (150, 50), (299, 99)] {
        assert_eq!(budget(&world, now + seconds * 1_000), words, "{seconds} s after the last message");
    }
    world.deliver_due_drafts(now + 300_000);
    assert_eq!(budget(&world, now + 300_000), 10, "it counts from the new message");
}

/// The rooms of others by number, then the agent's own, whatever attention they get.
#[test]
fn hud_rooms_are_in_the_order_of_the_document() {
    let (mut world, now) = document_world();
    let prompts = WorldPrompts::default();
    for room in [AgentId(12), AgentId(8)] {
        world.join_room(room, AgentId(5), now);
    }
    let order = |world: &World, agent: u32| -> Vec<u32> {
        let rendered = renderer()
            .render(world, AgentId(agent), &hud_request(now, &prompts, UNLIMITED))
            .expect("the HUD is rendered");
        assert!(rendered.fragments.windows(2).all(|pair| pair[0].key < pair[1].key), "keys are in order");
        rendered.hud.rooms.iter().map(|room| room.id.0).collect()
    };
    assert_eq!(order(&world, 5), [8, 12, 5]);
    assert_eq!(order(&world, 8), [5, 8]);
    let attend = UserCommand::SetAttention { agent: AgentId(5), room: AgentId(12), value: "20%".into() };
    world.execute_command(attend, now).expect("the attention is set");
    assert_eq!(order(&world, 5), [8, 12, 5], "attention does not change the order");
}

/// Fixed shares of 30 and 10 % without a dynamic room divide the whole message budget by three to one.
#[test]
fn hud_redistributes_attention_below_100_percent() {
    let mut world = World::default();
    let now = testing::START_TIME;
    let agent = |name: &str| NewAgent { name: Some(name.into()), ..NewAgent::default() };
    let ids: Vec<AgentId> = ["A", "B"]
        .iter()
        .map(|name| world.create_agent(agent(name), now).expect("the agent is created"))
        .collect();
    for &room in &ids {
        world.join_room(room, ids[0], now);
        for n in 0..200 {
            world
                .send_message(room, room, format!("{n} {}", "word ".repeat(100)), None, now)
                .expect("the message is sent");
        }
    }
    let prompts = WorldPrompts::default();
    let mut render_with = |shares: [&str; 2]| {
        for (room, share) in ids.iter().zip(shares) {
            let command = UserCommand::SetAttention { agent: ids[0], room: *room, value: share.into() };
            world.execute_command(command, now).expect("the attention is set");
        }
        let rendered = renderer()
            .render(&world, ids[0], &hud_request(now, &prompts, UNLIMITED))
            .expect("the HUD is rendered");
        let shown: Vec<f64> = rendered.hud.rooms.iter().map(|room| room.attention_pct).collect();
        (
            rendered.token_usage.total,
            ids.iter().map(|id| rendered.token_usage.rooms[id]).collect::<Vec<_>>(),
            shown,
        )
    };
    for (shares, quotient) in [(["30%", "10%"], 3.0), (["1%", "1%"], 1.0), (["20%", "60%"], 1.0 / 3.0)] {
        let (total, rooms, shown) = render_with(shares);
        assert!(total > 9_500, "{total} of 10,000 tokens are used with {shares:?}");
        let actual = rooms[0] as f64 / rooms[1] as f64;
        assert!((actual / quotient - 1.0).abs() < 0.12, "{rooms:?} with {shares:?}");
        let set: Vec<f64> =
            shares.iter().rev().map(|share| share.trim_end_matches('%').parse().expect("a number")).collect();
        assert_eq!(shown, set, "an agent sees the share that it has set");
    }
    // A share of nothing stays nothing.
    let (_, rooms, _) = render_with(["0%", "50%"]);
    assert!(rooms[0] < 200 && rooms[1] > 7_000, "{rooms:?}");
}
