//! Worlds by lot, with names and messages that no format likes: for tests and for measurements.

use crate::action::{Action, Bounds};
use crate::count::QuarterUp;
use crate::format::{Format, Output};
use crate::heartbeat::Millis;
use crate::world::{
    ARCHITECT, AgentId, AgentKind, Attention, Brain, Budgets, Newcomer, Reaction, RoomId, World,
};
use serde_json::{Map, Value, json};

/// Numbers by lot, the same for the same seed.
#[derive(Clone, Debug)]
pub struct Lot(u64);

impl Lot {
    /// From a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below another.
    pub fn below(&mut self, end: usize) -> usize {
        (self.any() % end.max(1) as u64) as usize
    }

    /// Whether it is one of so many.
    pub fn one_in(&mut self, many: usize) -> bool {
        self.below(many) == 0
    }

    /// One of these.
    pub fn of<'a, T>(&mut self, these: &'a [T]) -> &'a T {
        &these[self.below(these.len())]
    }
}

/// What texts are made of.
const WORDS: &[&str] = &[
    "the", "harbour", "boats", "at", "night", "and", "Alice", "said", "that", "we", "should", "listen",
    "more", "often", "trust", "memory", "light", "room", "quiet", "why", "not", "tomorrow", "perhaps",
    "seven", "letters",
];

/// What formats do not like.
const HOSTILE: &[&str] = &[
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

/// A few words, hostile ones among them.
pub fn words(lot: &mut Lot, most: usize) -> String {
    let count = lot.below(most) + 1;
    let mut text = String::new();
    for n in 0..count {
        if n > 0 && !lot.one_in(8) {
            text.push(' ');
        }
        let pool = if lot.one_in(6) { HOSTILE } else { WORDS };
        text.push_str(lot.of::<&str>(pool));
    }
    text
}

fn name(lot: &mut Lot) -> String {
    let name: String = words(lot, 3).chars().filter(|c| !c.is_control()).take(50).collect();
    if name.trim().is_empty() { "Nobody".to_owned() } else { name.trim().to_owned() }
}

/// Any value, so deep at most.
pub fn value(lot: &mut Lot, depth: usize) -> Value {
    match lot.below(if depth == 0 { 6 } else { 9 }) {
        0 => Value::Null,
        1 => json!(lot.one_in(2)),
        2 => json!(lot.any() as i64 >> lot.below(60)),
        3 => json!((lot.below(2_000) as f64 - 1_000.0) / 8.0),
        4 | 5 => Value::String(words(lot, 6)),
        6 => Value::Array((0..lot.below(7)).map(|_| value(lot, depth - 1)).collect()),
        7 => {
            // Rows that are alike.
            let names: Vec<String> = (0..lot.below(3) + 1).map(|_| words(lot, 2)).collect();
            let row = |lot: &mut Lot| names.iter().map(|name| (name.clone(), value(lot, 0))).collect();
            Value::Array((0..lot.below(4) + 1).map(|_| Value::Object(row(lot))).collect())
        }
        _ => Value::Object(
            (0..lot.below(5)).map(|_| (words(lot, 2), value(lot, depth - 1))).collect::<Map<_, _>>(),
        ),
    }
}

/// When worlds by lot begin.
pub const BEGIN: Millis = 1_705_314_600_000;

/// How large a world by lot is.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Agents, at most.
    pub agents: usize,
    /// Messages of a room, at most.
    pub messages: usize,
    /// Words of a message, at most.
    pub words: usize,
}

impl Default for Size {
    fn default() -> Self {
        Self { agents: 5, messages: 30, words: 25 }
    }
}

/// A world by lot, and what time it is there.
#[must_use]
pub fn world(lot: &mut Lot, size: Size) -> (World, Millis) {
    let mut world = World::default();
    let mut now = BEGIN;
    world.head.budgets = match lot.below(3) {
        0 => Budgets::default(),
        _ => Budgets::default().within(1_500 + lot.below(8_500)),
    };
    world.head.models = vec![Brain::here("one"), Brain::here("two")];
    let agents = lot.below(size.agents) + 1;
    for _ in 0..agents {
        let new = Newcomer {
            kind: if lot.one_in(2) { AgentKind::Persona } else { AgentKind::Bot },
            name: (!lot.one_in(4)).then(|| name(lot)),
            model: "one".into(),
            prompt: words(lot, 30),
            formats: (*lot.of(&Format::ALL), if lot.one_in(2) { Output::Json } else { Output::Toon }),
            can_create_agents: lot.one_in(3),
        };
        let id = world.create(new, now).expect("there is room for a few");
        let bounds = Bounds { now, count: &QuarterUp, knowledge: world.head.budgets.knowledge };
        for _ in 0..lot.below(5) {
            let path = serde_json::to_string(&words(lot, 2)).unwrap_or_default();
            let action = Action::Set { path, value: value(lot, 3), w: lot.one_in(3).then_some(0.5) };
            let _ = world.act(id, action, bounds);
        }
    }
    let ids: Vec<AgentId> = world.agents().map(|agent| agent.id).collect();
    for &room in &ids {
        for _ in 0..lot.below(agents + 1) {
            let who = if lot.one_in(4) { ARCHITECT } else { *lot.of(&ids) };
            world.join(room, who, now);
        }
        let members: Vec<AgentId> =
            world.room(room).map(|r| r.members.keys().copied().collect()).unwrap_or_default();
        for _ in 0..lot.below(size.messages + 1) {
            now += lot.below(100_000) as Millis;
            let reply = world
                .room(room)
                .and_then(|r| r.messages.back())
                .map(|said| said.id)
                .filter(|_| lot.one_in(4));
            let _ = world.say(room, *lot.of(&members), words(lot, size.words), reply, now);
        }
    }
    for &room in &ids {
        if lot.one_in(3) {
            // Somebody stands before the door.
            let (key, who) = (name(lot), *lot.of(&ids));
            let bounds = Bounds { now, count: &QuarterUp, knowledge: world.head.budgets.knowledge };
            let _ = world.act(room, Action::CreateKey { key: key.clone() }, bounds);
            let _ = world.act(who, Action::RequestAccess { room_id: room, key }, bounds);
        }
    }
    for _ in 0..lot.below(20) {
        let who = *lot.of(&ids);
        let action = action(lot, &world, who);
        let bounds = Bounds { now, count: &QuarterUp, knowledge: world.head.budgets.knowledge };
        let _ = world.act(who, action, bounds);
        now += 1_000;
    }
    (world, now)
}

/// Something that an agent might do, allowed or not.
pub fn action(lot: &mut Lot, world: &World, who: AgentId) -> Action {
    let ids: Vec<AgentId> =
        world.everybody().map(|agent| agent.id).chain([ARCHITECT, AgentId(999)]).collect();
    let room: RoomId = *lot.of(&ids);
    let agent_id = *lot.of(&ids);
    let message_id = lot.below(world.head.next_message as usize + 2) as u64;
    let request_id = lot.below(world.head.next_request as usize + 1) as u64;
    let keys: Vec<String> =
        world.rooms().flat_map(|room| room.keys.clone()).chain(["open".into(), "x".into()]).collect();
    let key = lot.of(&keys).clone();
    match lot.below(21) {
        0 => Action::Set {
            path: "notes.a".into(),
            value: value(lot, 2),
            w: lot.one_in(2).then(|| lot.below(13) as f64 / 10.0),
        },
        1 => Action::Delete { path: "notes.a".into() },
        2 => Action::Append { path: "list".into(), value: value(lot, 1) },
        3 => Action::React { message_id, reaction: *lot.of(&Reaction::ALL) },
        4 => Action::WakeAgent { agent_id },
        5 => Action::Reply { room_id: room, message_id, message: words(lot, 30) },
        6 => Action::SetBillboard { message: words(lot, 60) },
        7 => Action::ClearBillboard,
        8 => Action::SetWpm { wpm: lot.below(250) as u64 },
        9 => Action::CreateKey { key },
        10 => Action::RevokeKey { key },
        11 => Action::RequestAccess { room_id: room, key },
        12 => Action::GrantAccess { request_id },
        13 => Action::DenyAccess { request_id },
        14 => Action::LeaveRoom { room_id: room },
        15 => {
            let share =
                if lot.one_in(3) { Attention::Dynamic } else { Attention::Fixed(lot.below(130) as f64) };
            let rooms: Vec<RoomId> = world.rooms_of(who).map(|room| room.id).chain([room]).collect();
            Action::SetAttention { room_id: *lot.of(&rooms), value: share.to_string() }
        }
        16 => Action::SetName { name: words(lot, 12) },
        17 => Action::Sleep {
            until: crate::heartbeat::shown(BEGIN + (lot.below(10_000_000) as Millis) * 1_000),
        },
        18 => {
            let in_room_id = lot.one_in(2).then_some(room);
            Action::CreateAgent {
                name: name(lot),
                background_prompt: words(lot, 20),
                agent_type: AgentKind::Bot,
                in_room_id,
            }
        }
        19 => {
            let model = lot.one_in(2).then(|| (*lot.of(&["one", "two", "three"])).to_owned());
            Action::AlterAgent { agent_id, background_prompt: None, name: Some(words(lot, 4)), model }
        }
        _ => Action::RetireAgent { agent_id },
    }
}

/// What is wrong with a world: rules that are broken, in words. Whatever agents do, there is nothing.
#[must_use]
pub fn faults(world: &World) -> Vec<String> {
    let mut faults = Vec::new();
    let mut must = |holds: bool, what: String| {
        if !holds {
            faults.push(what);
        }
    };
    for agent in world.agents() {
        let who = agent.id;
        must(
            (1.0..=10.0).contains(&agent.interval.seconds()),
            format!("{who} beats each {} s", agent.interval.seconds()),
        );
        must(agent.recent.len() <= crate::world::RECENT, format!("{who} remembers too many actions"));
        must((1..=50).contains(&agent.name.chars().count()), format!("{who} is called '{}'", agent.name));
        let own = world.room(who);
        must(
            own.is_some_and(|room| room.members.contains_key(&who)),
            format!("{who} is not in its own room"),
        );
        let attention: Vec<Attention> = world
            .rooms_of(who)
            .filter_map(|room| room.members.get(&who))
            .map(|member| member.attention)
            .collect();
        let fixed: f64 =
            attention.iter().map(|a| if let Attention::Fixed(percent) = a { *percent } else { 0.0 }).sum();
        let expected = if attention.contains(&Attention::Dynamic) { 100.0 } else { fixed };
        let sum: f64 = world.shares(who).values().sum();
        must(
            fixed <= 100.0 && (sum - expected).abs() < 1e-9,
            format!("{who} gives {sum} % of its attention"),
        );
    }
    for room in world.rooms() {
        must(crate::heartbeat::WPM.contains(&room.wpm), format!("room {} has {} wpm", room.id, room.wpm));
        must(
            room.messages.iter().map(|message| message.id).is_sorted(),
            format!("room {} is not in order", room.id),
        );
        let alive = |id: &AgentId| *id == ARCHITECT || world.agent(*id).is_some();
        must(room.members.keys().all(alive), format!("somebody is in room {} who is no more", room.id));
        let asking = room.requests.iter().all(|request| alive(&request.requester));
        must(asking, format!("somebody asks for room {} who is no more", room.id));
        let short = |message: &crate::world::Message| {
            matches!(message.sender, crate::world::Sender::Agent(id) if id != ARCHITECT)
                .then(|| crate::heartbeat::words(&message.content))
                .is_none_or(|words| words <= *crate::heartbeat::WORDS.end())
        };
        must(room.messages.iter().all(short), format!("a message in room {} is too long", room.id));
    }
    faults
}
