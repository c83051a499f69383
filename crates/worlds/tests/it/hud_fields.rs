//! docs/hud.md lists every field of a HUD, with its type.

use crate::hud::{UNLIMITED, document_world, hud_request, renderer};
use halo_agents::token_counter::CeilTokenCounter;
use halo_worlds::action::{ACTION_TYPES, Action, ActionContext};
use halo_worlds::prompts::WorldPrompts;
use halo_worlds::world::{AgentId, AgentKind, NewAgent, ParagraphSplit, Reaction, World};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Objects whose fields are not fixed: they are one row of the table.
const OPEN_OBJECTS: [&str; 3] = ["meta.available_actions", "self.knowledge", "rooms[].messages[].reactions"];

/// The fields of a recent action that are no arguments.
const ACTION_FIELDS: [&str; 3] = ["type", "timestamp", "refused"];

fn collect_fields(path: &str, value: &Value, fields: &mut BTreeMap<String, BTreeSet<&'static str>>) {
    let mut add = |path: String, value: &Value| {
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        fields.entry(path).or_default().insert(kind);
    };
    match value {
        Value::Object(object) if OPEN_OBJECTS.contains(&path) => {
            object.values().for_each(|value| add(format!("{path}.*"), value));
        }
        Value::Object(object) => {
            for (name, value) in object {
                let is_argument = path == "self.recent_actions[]" && !ACTION_FIELDS.contains(&name.as_str());
                let name = if is_argument { "*" } else { name };
                let path = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
                collect_fields(&path, value, fields);
            }
        }
        Value::Array(items) => {
            items.iter().for_each(|item| collect_fields(&format!("{path}[]"), item, fields));
        }
        scalar => add(path.to_owned(), scalar),
    }
}

/// The document's world, with everything in it that a HUD can show.
fn world_with_every_field() -> World {
    let (mut world, now) = document_world();
    let context = ActionContext {
        now,
        counter: &CeilTokenCounter,
        knowledge_budget: 3_000,
        split: ParagraphSplit::Never,
    };
    let mut act = |agent: u32, action: Action| world.perform_action(AgentId(agent), action, context);
    act(12, Action::RequestAccess { room_id: AgentId(5), key: "philosophy".into() })
        .expect("the key is right");
    act(5, Action::React { message_id: 120, reaction: Reaction::Heart }).expect("the message is there");
    act(5, Action::ClearBillboard).expect("there is a billboard");
    act(5, Action::SetBillboard { message: "Come in".into() }).expect("the billboard is set");
    act(5, Action::Set { path: "list".into(), value: json!([1, {"a": null}]), w: None }).expect("it fits");
    act(5, Action::SetWpm { wpm: 5_000 }).expect_err("it is too fast");
    let bot = NewAgent { kind: AgentKind::Bot, can_create_agents: true, ..NewAgent::default() };
    world.create_agent(bot, now).expect("the bot is created");
    world
}

#[test]
fn hud_field_index_lists_every_field() {
    let world = world_with_every_field();
    let (_, now) = document_world();
    let prompts = WorldPrompts::default();
    let mut rendered = BTreeMap::new();
    // A persona, a bot, and a persona whose model has little room, so that it has a notice.
    for (agent, limit) in [(5, UNLIMITED), (13, UNLIMITED), (5, 4_000)] {
        let hud = renderer()
            .render(&world, AgentId(agent), &hud_request(now, &prompts, limit))
            .expect("the HUD is rendered");
        collect_fields("", &serde_json::to_value(&hud.hud).expect("JSON"), &mut rendered);
    }
    let page = include_str!("../../../../docs/hud.md");
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|line| line.starts_with("| `") || line.starts_with("| *`"))
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect();
    let mut documented = BTreeMap::new();
    for row in &rows {
        let [path, kind, source, mutable, description] = row.as_slice() else {
            panic!("{row:?} has {} cells, not 5", row.len())
        };
        let path = path.trim_matches('*').trim_matches('`');
        assert_eq!(documented.insert(path.to_owned(), *kind), None, "{path} is listed twice");
        let sources = ["static", "prompts", "world", "agent", "settings", "computed", "history"];
        assert!(sources.contains(source) && !description.is_empty(), "{path}: {source}, {description}");
        // What an agent can change names the actions that do it.
        let changes_it =
            |word: &str| word == "no" || word == "user" || ACTION_TYPES.contains(&word.trim_matches('`'));
        assert!(mutable.split(", ").all(changes_it), "{path}: {mutable}");
    }
    let paths =
        |fields: &BTreeMap<String, BTreeSet<&'static str>>| fields.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(documented.keys().cloned().collect::<BTreeSet<_>>(), paths(&rendered));
    for (path, kinds) in &rendered {
        let documented = documented[path];
        assert!(
            documented == "any" || kinds.iter().all(|kind| *kind == documented),
            "{path} is {documented} in the table and {kinds:?} in a HUD"
        );
    }
}
