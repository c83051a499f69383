//! Random worlds, with names and messages that are hard to encode, for tests and benchmarks.

use crate::action::{Action, ActionContext};
use crate::heartbeat::{self, Millis};
use crate::hud_format::{AnswerFormat, HudFormat};
use crate::world::{
    ARCHITECT, AgentId, AgentKind, HudBudgets, MessageSender, NewAgent, ParagraphSplit, RECENT_ACTIONS,
    Reaction, RoomAttention, RoomId, RoomMessage, World, WorldModelRef,
};
use halo_agents::token_counter::CeilTokenCounter;
use serde_json::{Map, Value, json};

/// A random number generator with a seed.
#[derive(Clone, Debug)]
pub struct WorldRng(u64);

impl WorldRng {
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next_u64() % end.max(1) as u64) as usize
    }

    /// True with a probability of one in `n`.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn choose<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

const WORDS: &[&str] = &[
    "the", "harbour", "boats", "at", "night", "and", "Alice", "said", "that", "we", "should", "listen",
    "more", "often", "trust", "memory", "light", "room", "quiet", "why", "not", "tomorrow", "perhaps",
    "seven", "letters",
];

/// Strings that formats must quote or escape.
const HOSTILE_STRINGS: &[&str] = &[
    ",",
    "a, b",
    "{x}",
    "}",
    "[",
    "]",
    "[0]",
    "[3]{a,b}:",
    "rooms[2]:",
    "messages[1]{id}:",
    "- id: 8",
    "- ",
    "#",
    "\"",
    "\\",
    "\\n",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "'",
    "`",
    "```json",
    "🙂",
    "ünïcödé",
    "日本語",
    "\u{200b}",
    "\u{2028}",
    "\u{85}",
    "\u{7f}",
    "\u{1}",
    "true",
    "false",
    "null",
    "0",
    "007",
    "-1",
    "1e5",
    "5%",
    "%*",
    ": ",
    ":",
    "key: value",
    " leading",
    "trailing ",
    "",
    "system:",
    "\"},{\"id\":9",
    "<|im_end|>",
    "</tool>",
    "knowledge{a}: 1",
    "\u{feff}",
];

/// Up to `max_words` words, with hostile strings among them.
pub fn random_text(rng: &mut WorldRng, max_words: usize) -> String {
    let count = rng.below(max_words) + 1;
    let mut text = String::new();
    for n in 0..count {
        if n > 0 && !rng.one_in(8) {
            text.push(' ');
        }
        let pool = if rng.one_in(6) { HOSTILE_STRINGS } else { WORDS };
        text.push_str(rng.choose::<&str>(pool));
    }
    text
}

fn random_name(rng: &mut WorldRng) -> String {
    let name: String = random_text(rng, 3).chars().filter(|c| !c.is_control()).take(50).collect();
    if name.trim().is_empty() { "Nobody".to_owned() } else { name.trim().to_owned() }
}

/// Any JSON value, nested up to `depth`.
pub fn random_value(rng: &mut WorldRng, depth: usize) -> Value {
    match rng.below(if depth == 0 { 6 } else { 9 }) {
        0 => Value::Null,
        1 => json!(rng.one_in(2)),
        2 => json!(rng.next_u64() as i64 >> rng.below(60)),
        3 => json!((rng.below(2_000) as f64 - 1_000.0) / 8.0),
        4 | 5 => Value::String(random_text(rng, 6)),
        6 => Value::Array((0..rng.below(7)).map(|_| random_value(rng, depth - 1)).collect()),
        7 => {
            // Objects with the same fields.
            let names: Vec<String> = (0..rng.below(3) + 1).map(|_| random_text(rng, 2)).collect();
            let row =
                |rng: &mut WorldRng| names.iter().map(|name| (name.clone(), random_value(rng, 0))).collect();
            Value::Array((0..rng.below(4) + 1).map(|_| Value::Object(row(rng))).collect())
        }
        _ => Value::Object(
            (0..rng.below(5))
                .map(|_| (random_text(rng, 2), random_value(rng, depth - 1)))
                .collect::<Map<_, _>>(),
        ),
    }
}

/// The time at which random worlds begin.
pub const START_TIME: Millis = 1_705_314_600_000;

/// The limits of a random world.
#[derive(Clone, Copy, Debug)]
pub struct RandomWorldSize {
    pub agents: usize,
    pub messages: usize,
    pub words: usize,
}

impl Default for RandomWorldSize {
    fn default() -> Self {
        Self { agents: 5, messages: 30, words: 25 }
    }
}

/// A random world and its time.
#[must_use]
pub fn random_world(rng: &mut WorldRng, size: RandomWorldSize) -> (World, Millis) {
    let mut world = World::default();
    let mut now = START_TIME;
    world.header.budgets = match rng.below(3) {
        0 => HudBudgets::default(),
        _ => HudBudgets::default().scaled_to(1_500 + rng.below(8_500)),
    };
    world.header.models = vec![WorldModelRef::local("one"), WorldModelRef::local("two")];
    let agents = rng.below(size.agents) + 1;
    for _ in 0..agents {
        let new = NewAgent {
            kind: if rng.one_in(2) { AgentKind::Persona } else { AgentKind::Bot },
            name: (!rng.one_in(4)).then(|| random_name(rng)),
            model: "one".into(),
            prompt: random_text(rng, 30),
            formats: (
                *rng.choose(&HudFormat::ALL),
                if rng.one_in(2) { AnswerFormat::Json } else { AnswerFormat::Toon },
            ),
            can_create_agents: rng.one_in(3),
        };
        let id = world.create_agent(new, now).expect("below the limit of agents");
        let context = ActionContext {
            now,
            counter: &CeilTokenCounter,
            knowledge_budget: world.header.budgets.knowledge,
            split: ParagraphSplit::Never,
        };
        for _ in 0..rng.below(5) {
            let path = serde_json::to_string(&random_text(rng, 2)).unwrap_or_default();
            let action = Action::Set { path, value: random_value(rng, 3), w: rng.one_in(3).then_some(0.5) };
            let _ = world.perform_action(id, action, context);
        }
    }
    let ids: Vec<AgentId> = world.agents().map(|agent| agent.id).collect();
    for &room in &ids {
        for _ in 0..rng.below(agents + 1) {
            let who = if rng.one_in(4) { ARCHITECT } else { *rng.choose(&ids) };
            world.join_room(room, who, now);
        }
        let members: Vec<AgentId> =
            world.room(room).map(|r| r.members.keys().copied().collect()).unwrap_or_default();
        for _ in 0..rng.below(size.messages + 1) {
            now += rng.below(100_000) as Millis;
            let reply = world
                .room(room)
                .and_then(|r| r.messages.back())
                .map(|message| message.id)
                .filter(|_| rng.one_in(4));
            let _ = world.send_message(room, *rng.choose(&members), random_text(rng, size.words), reply, now);
        }
    }
    for &room in &ids {
        if rng.one_in(3) {
            // An agent requests access with a valid key.
            let (key, who) = (random_name(rng), *rng.choose(&ids));
            let context = ActionContext {
                now,
                counter: &CeilTokenCounter,
                knowledge_budget: world.header.budgets.knowledge,
                split: ParagraphSplit::Never,
            };
            let _ = world.perform_action(room, Action::CreateKey { key: key.clone() }, context);
            let _ = world.perform_action(who, Action::RequestAccess { room_id: room, key }, context);
        }
    }
    for _ in 0..rng.below(20) {
        let who = *rng.choose(&ids);
        let action = random_action(rng, &world, who);
        let context = ActionContext {
            now,
            counter: &CeilTokenCounter,
            knowledge_budget: world.header.budgets.knowledge,
            split: ParagraphSplit::Never,
        };
        let _ = world.perform_action(who, action, context);
        now += 1_000;
    }
    (world, now)
}

/// A random action, allowed or not.
pub fn random_action(rng: &mut WorldRng, world: &World, who: AgentId) -> Action {
    let ids: Vec<AgentId> =
        world.all_agents().map(|agent| agent.id).chain([ARCHITECT, AgentId(999)]).collect();
    let room: RoomId = *rng.choose(&ids);
    let agent_id = *rng.choose(&ids);
    let message_id = rng.below(world.header.next_message as usize + 2) as u64;
    let request_id = rng.below(world.header.next_request as usize + 1) as u64;
    let keys: Vec<String> =
        world.rooms().flat_map(|room| room.keys.clone()).chain(["open".into(), "x".into()]).collect();
    let key = rng.choose(&keys).clone();
    match rng.below(21) {
        0 => Action::Set {
            path: "notes.a".into(),
            value: random_value(rng, 2),
            w: rng.one_in(2).then(|| rng.below(13) as f64 / 10.0),
        },
        1 => Action::Delete { path: "notes.a".into() },
        2 => Action::Append { path: "list".into(), value: random_value(rng, 1) },
        3 => Action::React { message_id, reaction: *rng.choose(&Reaction::ALL) },
        4 => Action::WakeAgent { agent_id },
        5 => Action::Reply { room_id: room, message_id, message: random_text(rng, 30) },
        6 => Action::SetBillboard { message: random_text(rng, 60) },
        7 => Action::ClearBillboard,
        8 => Action::SetWpm { wpm: rng.below(250) as u64 },
        9 => Action::CreateKey { key },
        10 => Action::RevokeKey { key },
        11 => Action::RequestAccess { room_id: room, key },
        12 => Action::GrantAccess { request_id },
        13 => Action::DenyAccess { request_id },
        14 => Action::LeaveRoom { room_id: room },
        15 => {
            let share = if rng.one_in(3) {
                RoomAttention::Dynamic
            } else {
                RoomAttention::Fixed(rng.below(130) as f64)
            };
            let rooms: Vec<RoomId> = world.rooms_of(who).map(|room| room.id).chain([room]).collect();
            Action::SetAttention { room_id: *rng.choose(&rooms), value: share.to_string() }
        }
        16 => Action::SetName { name: random_text(rng, 12) },
        17 => Action::Sleep {
            until: heartbeat::format_time(START_TIME + (rng.below(10_000_000) as Millis) * 1_000),
        },
        18 => {
            let in_room_id = rng.one_in(2).then_some(room);
            Action::CreateAgent {
                name: random_name(rng),
                background_prompt: random_text(rng, 20),
                agent_type: AgentKind::Bot,
                in_room_id,
            }
        }
        19 => {
            let model = rng.one_in(2).then(|| (*rng.choose(&["one", "two", "three"])).to_owned());
            Action::AlterAgent { agent_id, background_prompt: None, name: Some(random_text(rng, 4)), model }
        }
        _ => Action::RetireAgent { agent_id },
    }
}

/// The invariants of a world that are violated. No sequence of actions violates one.
#[must_use]
pub fn rule_violations(world: &World) -> Vec<String> {
    let mut violations = Vec::new();
    let mut check = |holds: bool, violation: String| {
        if !holds {
            violations.push(violation);
        }
    };
    for agent in world.agents() {
        let id = agent.id;
        check(
            (1.0..=10.0).contains(&agent.interval.seconds()),
            format!("{id} has an interval of {} s", agent.interval.seconds()),
        );
        check(agent.recent_actions.len() <= RECENT_ACTIONS, format!("{id} has too many recent actions"));
        check((1..=50).contains(&agent.name.chars().count()), format!("{id} has the name '{}'", agent.name));
        let own = world.room(id);
        check(own.is_some_and(|room| room.members.contains_key(&id)), format!("{id} is not in its own room"));
        let attention: Vec<RoomAttention> = world
            .rooms_of(id)
            .filter_map(|room| room.members.get(&id))
            .map(|member| member.attention)
            .collect();
        let fixed: f64 = attention
            .iter()
            .map(|a| if let RoomAttention::Fixed(percent) = a { *percent } else { 0.0 })
            .sum();
        let expected = if attention.contains(&RoomAttention::Dynamic) { 100.0 } else { fixed };
        let sum: f64 = world.attention_shares(id).values().sum();
        check(fixed <= 100.0 && (sum - expected).abs() < 1e-9, format!("{id} has {sum} % of attention"));
    }
    for room in world.rooms() {
        check(heartbeat::WPM_RANGE.contains(&room.wpm), format!("room {} has {} wpm", room.id, room.wpm));
        check(
            room.messages.iter().map(|message| message.id).is_sorted(),
            format!("the messages of room {} are not in order", room.id),
        );
        let exists = |id: &AgentId| *id == ARCHITECT || world.agent(*id).is_some();
        check(room.members.keys().all(exists), format!("room {} has a retired member", room.id));
        let requesters_exist = room.requests.iter().all(|request| exists(&request.requester));
        check(requesters_exist, format!("room {} has a request of a retired agent", room.id));
        let is_short = |message: &RoomMessage| {
            matches!(message.sender, MessageSender::Agent(id) if id != ARCHITECT)
                .then(|| heartbeat::count_words(&message.content))
                .is_none_or(|words| words <= *heartbeat::MESSAGE_WORDS_RANGE.end())
        };
        check(room.messages.iter().all(is_short), format!("a message in room {} is too long", room.id));
    }
    violations
}
