//! The schema that constrains generated answers, so that even a small model answers correctly: a JSON schema, or the
//! same as a grammar of TOON.

use crate::hud::Hud;
use crate::world::RECENT_ACTIONS;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Items of a constrained answer.
const MAX_RESPONSES: usize = 2;
const MAX_ACTIONS: usize = 2;

/// A JSON schema for an answer of at most so many tokens. Rooms, messages and agents are enumerated from the HUD, and
/// strings are limited so that the answer ends within its tokens.
#[must_use]
pub fn answer_schema(hud: &Hud, tokens: usize) -> Value {
    let builder = AnswerSchemaBuilder::new(hud, tokens);
    let parts = [
        builder.knowledge_actions(),
        builder.message_actions(),
        builder.wake_actions(),
        builder.own_room_actions(),
        builder.movement_actions(),
        builder.management_actions(),
    ];
    let actions: Vec<Value> = parts.into_iter().flatten().collect();
    let responses = match builder.rooms.is_empty() {
        true => json!({"type": "array", "maxItems": 0}),
        false => {
            let response = object_schema(vec![
                ("room_id", enum_schema(&builder.rooms)),
                ("message", string_schema(builder.max_chars)),
            ]);
            json!({"type": "array", "maxItems": builder.rooms.len().min(MAX_RESPONSES), "items": response})
        }
    };
    let actions = json!({"type": "array", "maxItems": MAX_ACTIONS, "items": {"anyOf": actions}});
    object_schema(vec![("responses", responses), ("actions", actions)])
}

fn string_schema(most: usize) -> Value {
    json!({"type": "string", "maxLength": most})
}

fn pattern_schema(pattern: &str) -> Value {
    json!({"type": "string", "pattern": pattern})
}

fn enum_schema(values: &[impl Serialize]) -> Value {
    json!({"enum": values})
}

/// An object in which every field is required.
fn object_schema(fields: Vec<(&str, Value)>) -> Value {
    let all: Map<String, Value> =
        fields.into_iter().map(|(name, schema)| (name.to_owned(), schema)).collect();
    let names: Vec<&String> = all.keys().collect();
    json!({"type": "object", "properties": &all, "required": names, "additionalProperties": false})
}

fn action_schema(kind: &str, fields: Vec<(&str, Value)>) -> Value {
    object_schema(std::iter::once(("type", json!({"const": kind}))).chain(fields).collect())
}

fn with_optional_field(mut schema: Value, name: &str, field: Value) -> Value {
    schema["properties"][name] = field;
    schema
}

/// Excludes sentences and placeholders that small models write for a name.
fn name_schema() -> Value {
    pattern_schema("^[A-Z][a-z]{1,14}( [A-Z][a-z]{1,14})?$")
}

/// The parts of a HUD that actions refer to.
struct AnswerSchemaBuilder<'a> {
    hud: &'a Hud,
    /// Characters of a string.
    max_chars: usize,
    rooms: Vec<u64>,
    /// Room and number of each message from others.
    messages_of_others: Vec<(u64, u64)>,
    /// The members of its rooms without itself and the user.
    other_agents: Vec<u64>,
}

impl<'a> AnswerSchemaBuilder<'a> {
    fn new(hud: &'a Hud, tokens: usize) -> Self {
        let own = hud.me.identity.id;
        let messages =
            hud.rooms.iter().flat_map(|room| room.messages.iter().map(move |message| (room.id, message)));
        let messages_of_others = messages
            .filter(|(_, message)| message.sender != own.to_string() && message.kind == "text")
            .map(|(room, message)| (u64::from(room.0), message.id))
            .collect();
        let others: BTreeSet<u64> = hud
            .rooms
            .iter()
            .flat_map(|room| &room.members)
            .filter_map(|id| id.parse().ok())
            .filter(|&id| id != 0 && id != u64::from(own.0))
            .collect();
        Self {
            hud,
            max_chars: (tokens * 3 / 4).clamp(40, 1_200),
            rooms: hud.rooms.iter().map(|room| u64::from(room.id.0)).collect(),
            messages_of_others,
            other_agents: others.into_iter().collect(),
        }
    }

    /// Knowledge and the agent's own name.
    fn knowledge_actions(&self) -> Vec<Value> {
        let path = pattern_schema("^[a-z_]{1,16}(\\.[A-Za-z0-9_]{1,16}){0,3}$");
        let number = json!({"type": "integer", "minimum": -999, "maximum": 999});
        let value = json!({"anyOf": [string_schema(self.max_chars / 2), number, {"type": "boolean"}]});
        let weights = enum_schema(&[0.1, 0.3, 0.5, 0.7, 0.9, 1.0]);
        let set = action_schema("set", vec![("path", path.clone()), ("value", value.clone())]);
        let mut all = vec![
            with_optional_field(set, "w", weights),
            action_schema("append", vec![("path", path), ("value", value)]),
        ];
        // A small model would rename itself on every heartbeat: set_name is offered only after many actions without
        // one.
        let recent = &self.hud.me.recent_actions;
        let has_renamed = recent.iter().any(|action| action.get("type") == Some(&json!("set_name")));
        if recent.len() >= RECENT_ACTIONS && !has_renamed {
            all.push(action_schema("set_name", vec![("name", name_schema())]));
        }
        let paths = knowledge_paths(&self.hud.me.knowledge);
        if !paths.is_empty() {
            all.push(action_schema("delete", vec![("path", enum_schema(&paths))]));
        }
        all
    }

    /// Reactions to the latest messages of all rooms, and replies to the latest of each.
    fn message_actions(&self) -> Vec<Value> {
        let mut all = Vec::new();
        let latest: Vec<u64> = self.messages_of_others.iter().rev().take(8).map(|(_, id)| *id).collect();
        if !latest.is_empty() {
            let reactions = enum_schema(&["thumbs_up", "thumbs_down", "brain", "heart"]);
            all.push(action_schema(
                "react",
                vec![("message_id", enum_schema(&latest)), ("reaction", reactions)],
            ));
        }
        for &room in &self.rooms {
            let in_room = self.messages_of_others.iter().rev().filter(|(at, _)| *at == room);
            let latest: Vec<u64> = in_room.take(4).map(|(_, id)| *id).collect();
            if !latest.is_empty() {
                let fields = vec![
                    ("room_id", enum_schema(&[room])),
                    ("message_id", enum_schema(&latest)),
                    ("message", string_schema(self.max_chars)),
                ];
                all.push(action_schema("reply", fields));
            }
        }
        all
    }

    fn wake_actions(&self) -> Vec<Value> {
        let wake = || action_schema("wake_agent", vec![("agent_id", enum_schema(&self.other_agents))]);
        (!self.other_agents.is_empty()).then(wake).into_iter().collect()
    }

    fn own_room_actions(&self) -> Vec<Value> {
        let Some(home) = self.hud.rooms.iter().find(|room| room.is_self_room) else { return Vec::new() };
        let mut all =
            vec![action_schema("set_billboard", vec![("message", string_schema(self.max_chars / 2))])];
        if home.billboard.is_some() {
            all.push(action_schema("clear_billboard", Vec::new()));
        }
        let wpm = json!({"type": "integer", "minimum": 10, "maximum": 200});
        all.push(action_schema("set_wpm", vec![("wpm", wpm)]));
        all.push(action_schema("create_key", vec![("key", string_schema(20))]));
        if let Some(keys) = home.my_keys.as_ref().filter(|keys| !keys.is_empty()) {
            all.push(action_schema("revoke_key", vec![("key", enum_schema(keys))]));
        }
        let requests: Vec<u64> =
            home.pending_access_requests.iter().flatten().map(|request| request.id).collect();
        if !requests.is_empty() {
            all.push(action_schema("grant_access", vec![("request_id", enum_schema(&requests))]));
            all.push(action_schema("deny_access", vec![("request_id", enum_schema(&requests))]));
        }
        all
    }

    /// Access to other rooms, attention and sleep.
    fn movement_actions(&self) -> Vec<Value> {
        let number = json!({"type": "integer", "minimum": 1, "maximum": 4094});
        let mut all =
            vec![action_schema("request_access", vec![("room_id", number), ("key", string_schema(20))])];
        let own = u64::from(self.hud.me.identity.id.0);
        let other_rooms: Vec<u64> = self.rooms.iter().copied().filter(|&room| room != own).collect();
        if !other_rooms.is_empty() {
            all.push(action_schema("leave_room", vec![("room_id", enum_schema(&other_rooms))]));
        }
        if !self.rooms.is_empty() {
            let share = pattern_schema("^([1-9]?[0-9]%|100%|%\\*)$");
            all.push(action_schema(
                "set_attention",
                vec![("room_id", enum_schema(&self.rooms)), ("value", share)],
            ));
        }
        let time = pattern_schema(
            "^20[2-9][0-9]-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]$",
        );
        all.push(action_schema("sleep", vec![("until", time)]));
        all
    }

    /// Other agents, if the HUD offers to manage them.
    fn management_actions(&self) -> Vec<Value> {
        if !self.hud.meta.available_actions.contains_key("agent_management") {
            return Vec::new();
        }
        let (prompt, kinds) = (string_schema(self.max_chars), enum_schema(&["persona", "bot"]));
        let fields =
            vec![("name", name_schema()), ("background_prompt", prompt.clone()), ("agent_type", kinds)];
        let mut all = vec![with_optional_field(
            action_schema("create_agent", fields),
            "in_room_id",
            enum_schema(&self.rooms),
        )];
        if !self.other_agents.is_empty() {
            let fields = vec![("agent_id", enum_schema(&self.other_agents)), ("background_prompt", prompt)];
            all.push(with_optional_field(action_schema("alter_agent", fields), "name", name_schema()));
            all.push(action_schema("retire_agent", vec![("agent_id", enum_schema(&self.other_agents))]));
        }
        all
    }
}

/// The first paths of an agent's knowledge, two levels deep.
fn knowledge_paths(knowledge: &Map<String, Value>) -> Vec<String> {
    let is_plain = |name: &&String| name.chars().all(|c| c.is_alphanumeric() || c == '_');
    let mut paths = Vec::new();
    for (name, value) in knowledge.iter().filter(|(name, _)| is_plain(name)) {
        paths.push(name.clone());
        let children = value.as_object().into_iter().flatten().filter(|(name, _)| is_plain(name));
        paths.extend(children.map(|(child, _)| format!("{name}.{child}")));
    }
    paths.truncate(24);
    paths
}

/// The same schema as a Lark grammar for TOON: lists with their count, strings in quotes.
#[must_use]
pub fn toon_grammar(schema: &Value) -> String {
    let mut rules = GrammarRules { text: String::new(), next_rule: 0 };
    let list = |name: &str| &schema["properties"][name];
    let rooms = &list("responses")["items"]["properties"];
    let responses = match rooms.is_object() {
        false => "\"responses: []\"".to_owned(),
        true => {
            let (room, message) = (rules.value_rule(&rooms["room_id"]), rules.value_rule(&rooms["message"]));
            rules.add("response", &format!("{room} \",\" {message}"));
            rules.list_rule(
                "responses",
                "{room_id,message}",
                "response",
                "  ",
                &list("responses")["maxItems"],
            )
        }
    };
    let kinds: Vec<String> = list("actions")["items"]["anyOf"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|action| {
            let fields = action["properties"].as_object().into_iter().flatten();
            let required = action["required"].as_array();
            let line = |(n, (name, schema)): (usize, (&String, &Value))| {
                let before = if n == 0 { "- " } else { "\\n    " };
                let line = format!("\"{before}{name}: \" {}", rules.value_rule(schema));
                let is_required = required.is_some_and(|names| names.iter().any(|required| required == name));
                if is_required { line } else { format!("({line})?") }
            };
            fields.enumerate().map(line).collect::<Vec<_>>().join(" ")
        })
        .collect();
    rules.add("action", &kinds.join("\n    | "));
    let actions = rules.list_rule("actions", "", "action", "  ", &list("actions")["maxItems"]);
    format!("start: responses \"\\n\" actions\nresponses: {responses}\nactions: {actions}\n{}", rules.text)
}

struct GrammarRules {
    text: String,
    next_rule: usize,
}

impl GrammarRules {
    fn add(&mut self, name: &str, rule: &str) {
        self.text += &format!("{name}: {rule}\n");
    }

    /// A list of zero up to `most` entries.
    fn list_rule(&self, name: &str, fields: &str, entry: &str, indent: &str, most: &Value) -> String {
        let list_of = |n: u64| {
            let entries = vec![entry; n as usize].join(&format!(" \"\\n{indent}\" "));
            format!("\"{name}[{n}]{fields}:\\n{indent}\" {entries}")
        };
        let all = (1..=most.as_u64().unwrap_or(0)).map(list_of);
        std::iter::once(format!("\"{name}: []\"")).chain(all).collect::<Vec<_>>().join("\n    | ")
    }

    /// A literal or the name of a new rule for a value.
    fn value_rule(&mut self, schema: &Value) -> String {
        // TOON decides whether a literal is quoted.
        let literal = |value: &Value| {
            let field = json!({ "x": value });
            let text =
                toon_format::encode(&field, &toon_format::EncodeOptions::default()).unwrap_or_default();
            serde_json::to_string(text.trim_start_matches("x: ")).unwrap_or_default()
        };
        let one_of =
            |all: Vec<String>| if all.len() == 1 { all.concat() } else { format!("({})", all.join(" | ")) };
        if let Some(value) = schema.get("const") {
            return literal(value);
        }
        if let Some(values) = schema["enum"].as_array() {
            return one_of(values.iter().map(literal).collect());
        }
        if let Some(schemas) = schema["anyOf"].as_array() {
            return one_of(schemas.iter().map(|schema| self.value_rule(schema)).collect());
        }
        let regex = match schema["type"].as_str() {
            Some("integer") => {
                let sign = if schema["minimum"].as_i64().is_some_and(|least| least < 0) { "-?" } else { "" };
                let digits = schema["maximum"].as_i64().unwrap_or(9_999).to_string().len() - 1;
                format!("0|{sign}[1-9][0-9]{{0,{digits}}}")
            }
            Some("boolean") => "true|false".to_owned(),
            _ => match schema["pattern"].as_str() {
                Some(pattern) => format!("\"({})\"", pattern.trim_start_matches('^').trim_end_matches('$')),
                None => {
                    let most = schema["maxLength"].as_u64().unwrap_or(240);
                    format!("\"([^\"\\\\\\x00-\\x1f\\x7f]|\\\\[\"\\\\nrt]){{0,{most}}}\"")
                }
            },
        };
        self.next_rule += 1;
        let name = format!("V{}", self.next_rule);
        self.add(&name, &format!("/{regex}/"));
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::{ACTION_TYPES, Action, ActionContext};
    use crate::answer::AgentAnswer;
    use crate::hud_format::AnswerFormat;
    use crate::hud_renderer::{HudRenderer, HudRequest};
    use crate::prompts::WorldPrompts;
    use crate::testing::{self, RandomWorldSize, WorldRng};
    use crate::world::ParagraphSplit;
    use halo_agents::token_counter::CeilTokenCounter;
    use std::sync::Arc;

    /// A random value that matches a schema.
    fn sample_value(rng: &mut WorldRng, field: &str, schema: &Value) -> Value {
        if let Some(value) = schema.get("const") {
            return value.clone();
        }
        if let Some(one) = ["enum", "anyOf"].iter().find_map(|name| schema[*name].as_array()) {
            let one = rng.choose(one).clone();
            return if schema.get("enum").is_some() { one } else { sample_value(rng, field, &one) };
        }
        match (schema["type"].as_str(), schema["pattern"].is_string(), field) {
            (Some("integer"), ..) => schema[*rng.choose(&["minimum", "maximum"])].clone(),
            (Some("boolean"), ..) => json!(true),
            (Some("object"), ..) => {
                let fields = schema["properties"].as_object().into_iter().flatten();
                fields.map(|(name, schema)| (name.clone(), sample_value(rng, name, schema))).collect()
            }
            (_, true, "path") => json!("notes.Ada_1"),
            (_, true, "name") => json!("Ada Lovelace"),
            (_, true, "value") => json!(*rng.choose(&["7%", "100%", "%*"])),
            (_, true, "until") => json!("2029-12-28T23:59:59"),
            (Some("string"), false, _) => {
                let most = schema["maxLength"].as_u64().expect("strings have a limit") as usize;
                json!(testing::random_text(rng, 9).chars().take(most).collect::<String>())
            }
            _ => panic!("{field}: {schema}"),
        }
    }

    /// Every action that the schema allows is parsed, in JSON and TOON, and every type of action is offered by some
    /// HUD.
    #[test]
    fn answer_schema_samples_parse_in_json_and_toon() {
        let (renderer, prompts) = (HudRenderer::new(Arc::new(CeilTokenCounter)), WorldPrompts::default());
        let mut offered = BTreeSet::new();
        for seed in 0..100 {
            let mut rng = WorldRng::new(seed);
            let (mut world, now) = testing::random_world(&mut rng, RandomWorldSize::default());
            // An agent with many actions may rename itself.
            let busy = world.agents().next().map(|agent| agent.id).filter(|_| rng.one_in(2));
            for agent in busy.into_iter().flat_map(|agent| [agent; RECENT_ACTIONS]) {
                let context = ActionContext {
                    now,
                    counter: &CeilTokenCounter,
                    knowledge_budget: 3_000,
                    split: ParagraphSplit::Never,
                };
                let _ = world.perform_action(agent, Action::ClearBillboard, context);
            }
            let request =
                HudRequest { now, prompts: &prompts, token_limit: usize::MAX, recalled: &|_| Vec::new() };
            for agent in world.agents() {
                let Ok(rendered) = renderer.render(&world, agent.id, &request) else { continue };
                let schema = answer_schema(&rendered.hud, 300);
                for schema in schema["properties"]["actions"]["items"]["anyOf"].as_array().expect("a list") {
                    let action = sample_value(&mut rng, "", schema);
                    offered.insert(action["type"].as_str().unwrap_or_default().to_owned());
                    let json = json!({"responses": [], "actions": [action]}).to_string();
                    let fields = action.as_object().into_iter().flatten();
                    let fields: Vec<String> =
                        fields.map(|(name, value)| format!("{name}: {value}")).collect();
                    let toon = format!("responses: []\nactions[1]:\n  - {}", fields.join("\n    "));
                    let parsed =
                        [(json, AnswerFormat::Json), (toon, AnswerFormat::Toon)].map(|(text, format)| {
                            let parsed = AgentAnswer::parse(&text, format, false);
                            let parsed =
                                parsed.unwrap_or_else(|error| panic!("seed {seed}: {error}: {text}"));
                            assert!(!parsed.repaired, "{text}");
                            assert!(
                                matches!(parsed.actions[..], [Ok(_)]),
                                "seed {seed}: {:?}: {text}",
                                parsed.actions
                            );
                            parsed
                        });
                    assert_eq!(parsed[0], parsed[1], "seed {seed}");
                    // The parsed action equals the sample.
                    let parsed =
                        parsed[0].actions[0].as_ref().map(|parsed| serde_json::to_value(parsed).ok());
                    assert_eq!(parsed, Ok(Some(action)), "seed {seed}");
                }
            }
        }
        let all: BTreeSet<String> = ACTION_TYPES.iter().map(|kind| (*kind).to_owned()).collect();
        assert_eq!(offered, all);
    }
}
