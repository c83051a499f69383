//! The form that answers are held to, so that even a small model answers in it: a JSON schema, or the same as a grammar of TOON.

use crate::hud::Hud;
use crate::world::RECENT;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// The most responses and actions of an answer that is held to its form.
const RESPONSES: usize = 2;
const ACTIONS: usize = 2;

/// The form that an answer of so many tokens is held to: a JSON schema in which rooms, messages and people are those that the
/// agent sees. Texts are so long that the answer ends in time.
#[must_use]
pub fn schema(hud: &Hud, tokens: usize) -> Value {
    let seen = Seen::new(hud, tokens);
    let parts =
        [seen.to_know(), seen.to_hear(), seen.to_wake(), seen.at_home(), seen.elsewhere(), seen.to_manage()];
    let actions: Vec<Value> = parts.into_iter().flatten().collect();
    let responses = match seen.rooms.is_empty() {
        true => json!({"type": "array", "maxItems": 0}),
        false => {
            let one = object(vec![("room_id", one_of(&seen.rooms)), ("message", text(seen.most))]);
            json!({"type": "array", "maxItems": seen.rooms.len().min(RESPONSES), "items": one})
        }
    };
    let actions = json!({"type": "array", "maxItems": ACTIONS, "items": {"anyOf": actions}});
    object(vec![("responses", responses), ("actions", actions)])
}

fn text(most: usize) -> Value {
    json!({"type": "string", "maxLength": most})
}

fn pattern(pattern: &str) -> Value {
    json!({"type": "string", "pattern": pattern})
}

fn one_of(known: &[impl Serialize]) -> Value {
    json!({"enum": known})
}

/// What has all of these fields.
fn object(fields: Vec<(&str, Value)>) -> Value {
    let all: Map<String, Value> = fields.into_iter().map(|(name, form)| (name.to_owned(), form)).collect();
    let names: Vec<&String> = all.keys().collect();
    json!({"type": "object", "properties": &all, "required": names, "additionalProperties": false})
}

fn action(kind: &str, fields: Vec<(&str, Value)>) -> Value {
    object(std::iter::once(("type", json!({"const": kind}))).chain(fields).collect())
}

/// The same, with a field that need not be there.
fn optional(mut form: Value, name: &str, field: Value) -> Value {
    form["properties"][name] = field;
    form
}

/// What is asked for in other words is no name.
fn name() -> Value {
    pattern("^[A-Z][a-z]{1,14}( [A-Z][a-z]{1,14})?$")
}

/// What an agent sees and can do something about.
struct Seen<'a> {
    hud: &'a Hud,
    /// How long a text may be.
    most: usize,
    /// Its rooms.
    rooms: Vec<u64>,
    /// What others have said, and where.
    heard: Vec<(u64, u64)>,
    /// Those who are with it.
    others: Vec<u64>,
}

impl<'a> Seen<'a> {
    fn new(hud: &'a Hud, tokens: usize) -> Self {
        let own = hud.me.identity.id;
        let messages =
            hud.rooms.iter().flat_map(|room| room.messages.iter().map(move |said| (room.id, said)));
        let heard = messages
            .filter(|(_, said)| said.sender != own.to_string() && said.kind == "text")
            .map(|(room, said)| (u64::from(room.0), said.id))
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
            most: (tokens * 3 / 4).clamp(40, 1_200),
            rooms: hud.rooms.iter().map(|room| u64::from(room.id.0)).collect(),
            heard,
            others: others.into_iter().collect(),
        }
    }

    /// What it writes down, and its name.
    fn to_know(&self) -> Vec<Value> {
        let path = pattern("^[a-z_]{1,16}(\\.[A-Za-z0-9_]{1,16}){0,3}$");
        let number = json!({"type": "integer", "minimum": -999, "maximum": 999});
        let value = json!({"anyOf": [text(self.most / 2), number, {"type": "boolean"}]});
        let weights = one_of(&[0.1, 0.3, 0.5, 0.7, 0.9, 1.0]);
        let set = action("set", vec![("path", path.clone()), ("value", value.clone())]);
        let mut all =
            vec![optional(set, "w", weights), action("append", vec![("path", path), ("value", value)])];
        // Whoever is new, or has just taken a name, keeps it for a while: a small model would take another on every heartbeat.
        let recent = &self.hud.me.recent_actions;
        let named = recent.iter().any(|action| action.get("type") == Some(&json!("set_name")));
        if recent.len() >= RECENT && !named {
            all.push(action("set_name", vec![("name", name())]));
        }
        let known = paths(&self.hud.me.knowledge);
        if !known.is_empty() {
            all.push(action("delete", vec![("path", one_of(&known))]));
        }
        all
    }

    /// What it makes of what was said: of the latest in all rooms, and in each.
    fn to_hear(&self) -> Vec<Value> {
        let mut all = Vec::new();
        let latest: Vec<u64> = self.heard.iter().rev().take(8).map(|(_, id)| *id).collect();
        if !latest.is_empty() {
            let reactions = one_of(&["thumbs_up", "thumbs_down", "brain", "heart"]);
            all.push(action("react", vec![("message_id", one_of(&latest)), ("reaction", reactions)]));
        }
        for &room in &self.rooms {
            let here = self.heard.iter().rev().filter(|(at, _)| *at == room);
            let latest: Vec<u64> = here.take(4).map(|(_, id)| *id).collect();
            if !latest.is_empty() {
                let fields = vec![
                    ("room_id", one_of(&[room])),
                    ("message_id", one_of(&latest)),
                    ("message", text(self.most)),
                ];
                all.push(action("reply", fields));
            }
        }
        all
    }

    fn to_wake(&self) -> Vec<Value> {
        let wake = || action("wake_agent", vec![("agent_id", one_of(&self.others))]);
        (!self.others.is_empty()).then(wake).into_iter().collect()
    }

    /// What it does about its own room.
    fn at_home(&self) -> Vec<Value> {
        let Some(home) = self.hud.rooms.iter().find(|room| room.is_self_room) else { return Vec::new() };
        let mut all = vec![action("set_billboard", vec![("message", text(self.most / 2))])];
        if home.billboard.is_some() {
            all.push(action("clear_billboard", Vec::new()));
        }
        let wpm = json!({"type": "integer", "minimum": 10, "maximum": 200});
        all.push(action("set_wpm", vec![("wpm", wpm)]));
        all.push(action("create_key", vec![("key", text(20))]));
        if let Some(keys) = home.my_keys.as_ref().filter(|keys| !keys.is_empty()) {
            all.push(action("revoke_key", vec![("key", one_of(keys))]));
        }
        let requests: Vec<u64> =
            home.pending_access_requests.iter().flatten().map(|request| request.id).collect();
        if !requests.is_empty() {
            all.push(action("grant_access", vec![("request_id", one_of(&requests))]));
            all.push(action("deny_access", vec![("request_id", one_of(&requests))]));
        }
        all
    }

    /// Where it goes, what it attends to, and when it rests.
    fn elsewhere(&self) -> Vec<Value> {
        let number = json!({"type": "integer", "minimum": 1, "maximum": 4094});
        let mut all = vec![action("request_access", vec![("room_id", number), ("key", text(20))])];
        let own = u64::from(self.hud.me.identity.id.0);
        let elsewhere: Vec<u64> = self.rooms.iter().copied().filter(|&room| room != own).collect();
        if !elsewhere.is_empty() {
            all.push(action("leave_room", vec![("room_id", one_of(&elsewhere))]));
        }
        if !self.rooms.is_empty() {
            let share = pattern("^([1-9]?[0-9]%|100%|%\\*)$");
            all.push(action("set_attention", vec![("room_id", one_of(&self.rooms)), ("value", share)]));
        }
        let time = pattern(
            "^20[2-9][0-9]-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]$",
        );
        all.push(action("sleep", vec![("until", time)]));
        all
    }

    /// What it does with other agents, if it may.
    fn to_manage(&self) -> Vec<Value> {
        if !self.hud.meta.available_actions.contains_key("agent_management") {
            return Vec::new();
        }
        let (prompt, kinds) = (text(self.most), one_of(&["persona", "bot"]));
        let fields = vec![("name", name()), ("background_prompt", prompt.clone()), ("agent_type", kinds)];
        let mut all = vec![optional(action("create_agent", fields), "in_room_id", one_of(&self.rooms))];
        if !self.others.is_empty() {
            let fields = vec![("agent_id", one_of(&self.others)), ("background_prompt", prompt)];
            all.push(optional(action("alter_agent", fields), "name", name()));
            all.push(action("retire_agent", vec![("agent_id", one_of(&self.others))]));
        }
        all
    }
}

/// The paths of what an agent has written down, as far as a form has room for them.
fn paths(knowledge: &Map<String, Value>) -> Vec<String> {
    let plain = |name: &&String| name.chars().all(|c| c.is_alphanumeric() || c == '_');
    let mut paths = Vec::new();
    for (name, value) in knowledge.iter().filter(|(name, _)| plain(name)) {
        paths.push(name.clone());
        let below = value.as_object().into_iter().flatten().filter(|(name, _)| plain(name));
        paths.extend(below.map(|(below, _)| format!("{name}.{below}")));
    }
    paths.truncate(24);
    paths
}

/// The same form in TOON, as a grammar: lists with their length, texts in quotes.
#[must_use]
pub fn grammar(schema: &Value) -> String {
    let mut rules = Rules { text: String::new(), next: 0 };
    let list = |name: &str| &schema["properties"][name];
    let rooms = &list("responses")["items"]["properties"];
    let said = match rooms.is_object() {
        false => "\"responses: []\"".to_owned(),
        true => {
            let (room, message) = (rules.value(&rooms["room_id"]), rules.value(&rooms["message"]));
            rules.add("said", &format!("{room} \",\" {message}"));
            rules.counted("responses", "{room_id,message}", "said", "  ", &list("responses")["maxItems"])
        }
    };
    let kinds: Vec<String> = list("actions")["items"]["anyOf"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|action| {
            let fields = action["properties"].as_object().into_iter().flatten();
            let required = action["required"].as_array();
            let line = |(n, (name, form)): (usize, (&String, &Value))| {
                let before = if n == 0 { "- " } else { "\\n    " };
                let line = format!("\"{before}{name}: \" {}", rules.value(form));
                let needed = required.is_some_and(|names| names.iter().any(|needed| needed == name));
                if needed { line } else { format!("({line})?") }
            };
            fields.enumerate().map(line).collect::<Vec<_>>().join(" ")
        })
        .collect();
    rules.add("action", &kinds.join("\n    | "));
    let done = rules.counted("actions", "", "action", "  ", &list("actions")["maxItems"]);
    format!("start: responses \"\\n\" actions\nresponses: {said}\nactions: {done}\n{}", rules.text)
}

/// The rules of a grammar.
struct Rules {
    text: String,
    next: usize,
}

impl Rules {
    fn add(&mut self, name: &str, rule: &str) {
        self.text += &format!("{name}: {rule}\n");
    }

    /// A list of no entry, one, or as many as there may be.
    fn counted(&self, name: &str, fields: &str, entry: &str, indent: &str, most: &Value) -> String {
        let many = |n: u64| {
            let entries = vec![entry; n as usize].join(&format!(" \"\\n{indent}\" "));
            format!("\"{name}[{n}]{fields}:\\n{indent}\" {entries}")
        };
        let all = (1..=most.as_u64().unwrap_or(0)).map(many);
        std::iter::once(format!("\"{name}: []\"")).chain(all).collect::<Vec<_>>().join("\n    | ")
    }

    /// A value: what may stand there, or the name of a rule for it.
    fn value(&mut self, form: &Value) -> String {
        // As the value of a field: quoted where it has to be there.
        let literal = |value: &Value| {
            let field = json!({ "x": value });
            let text =
                toon_format::encode(&field, &toon_format::EncodeOptions::default()).unwrap_or_default();
            serde_json::to_string(text.trim_start_matches("x: ")).unwrap_or_default()
        };
        let one_of =
            |all: Vec<String>| if all.len() == 1 { all.concat() } else { format!("({})", all.join(" | ")) };
        if let Some(value) = form.get("const") {
            return literal(value);
        }
        if let Some(values) = form["enum"].as_array() {
            return one_of(values.iter().map(literal).collect());
        }
        if let Some(forms) = form["anyOf"].as_array() {
            return one_of(forms.iter().map(|form| self.value(form)).collect());
        }
        let regex = match form["type"].as_str() {
            Some("integer") => {
                let sign = if form["minimum"].as_i64().is_some_and(|least| least < 0) { "-?" } else { "" };
                let digits = form["maximum"].as_i64().unwrap_or(9_999).to_string().len() - 1;
                format!("0|{sign}[1-9][0-9]{{0,{digits}}}")
            }
            Some("boolean") => "true|false".to_owned(),
            _ => match form["pattern"].as_str() {
                Some(pattern) => format!("\"({})\"", pattern.trim_start_matches('^').trim_end_matches('$')),
                None => {
                    let most = form["maxLength"].as_u64().unwrap_or(240);
                    format!("\"([^\"\\\\\\x00-\\x1f\\x7f]|\\\\[\"\\\\nrt]){{0,{most}}}\"")
                }
            },
        };
        self.next += 1;
        let name = format!("V{}", self.next);
        self.add(&name, &format!("/{regex}/"));
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::{Action, Bounds, KINDS};
    use crate::answer::Answer;
    use crate::count::QuarterUp;
    use crate::format::Output;
    use crate::prompts::Prompts;
    use crate::scribe::{Scribe, View};
    use crate::testing::{self, Lot, Size};
    use std::sync::Arc;

    /// Something that has a form.
    fn like(lot: &mut Lot, field: &str, form: &Value) -> Value {
        if let Some(value) = form.get("const") {
            return value.clone();
        }
        if let Some(one) = ["enum", "anyOf"].iter().find_map(|name| form[*name].as_array()) {
            let one = lot.of(one).clone();
            return if form.get("enum").is_some() { one } else { like(lot, field, &one) };
        }
        match (form["type"].as_str(), form["pattern"].is_string(), field) {
            (Some("integer"), ..) => form[*lot.of(&["minimum", "maximum"])].clone(),
            (Some("boolean"), ..) => json!(true),
            (Some("object"), ..) => {
                let fields = form["properties"].as_object().into_iter().flatten();
                fields.map(|(name, form)| (name.clone(), like(lot, name, form))).collect()
            }
            (_, true, "path") => json!("notes.Ada_1"),
            (_, true, "name") => json!("Ada Lovelace"),
            (_, true, "value") => json!(*lot.of(&["7%", "100%", "%*"])),
            (_, true, "until") => json!("2029-12-28T23:59:59"),
            (Some("string"), false, _) => {
                let most = form["maxLength"].as_u64().expect("texts have an end") as usize;
                json!(testing::words(lot, 9).chars().take(most).collect::<String>())
            }
            _ => panic!("{field}: {form}"),
        }
    }

    /// Whatever an agent sees: all that its form lets it do is understood, also in TOON, and nothing that there is is missing.
    #[test]
    fn what_has_its_form_is_understood() {
        let (scribe, prompts) = (Scribe::new(Arc::new(QuarterUp)), Prompts::default());
        let mut offered = BTreeSet::new();
        for seed in 0..100 {
            let mut lot = Lot::new(seed);
            let (mut world, now) = testing::world(&mut lot, Size::default());
            // Who has done much may take a name.
            let busy = world.agents().next().map(|agent| agent.id).filter(|_| lot.one_in(2));
            for who in busy.into_iter().flat_map(|who| [who; RECENT]) {
                let bounds = Bounds { now, count: &QuarterUp, knowledge: 3_000 };
                let _ = world.act(who, Action::ClearBillboard, bounds);
            }
            let view = View { now, prompts: &prompts, room: usize::MAX, recalled: &|_| Vec::new() };
            for agent in world.agents() {
                let Ok(shown) = scribe.show(&world, agent.id, &view) else { continue };
                let schema = schema(&shown.hud, 300);
                for form in schema["properties"]["actions"]["items"]["anyOf"].as_array().expect("a list") {
                    let action = like(&mut lot, "", form);
                    offered.insert(action["type"].as_str().unwrap_or_default().to_owned());
                    let json = json!({"responses": [], "actions": [action]}).to_string();
                    let fields = action.as_object().into_iter().flatten();
                    let fields: Vec<String> =
                        fields.map(|(name, value)| format!("{name}: {value}")).collect();
                    let toon = format!("responses: []\nactions[1]:\n  - {}", fields.join("\n    "));
                    let read = [(json, Output::Json), (toon, Output::Toon)].map(|(text, output)| {
                        let read = Answer::read(&text, output, false);
                        let read = read.unwrap_or_else(|why| panic!("seed {seed}: {why}: {text}"));
                        assert!(!read.repaired, "{text}");
                        assert!(
                            matches!(read.actions[..], [Ok(_)]),
                            "seed {seed}: {:?}: {text}",
                            read.actions
                        );
                        read
                    });
                    assert_eq!(read[0], read[1], "seed {seed}");
                    // What was meant is what is done.
                    let done = read[0].actions[0].as_ref().map(|done| serde_json::to_value(done).ok());
                    assert_eq!(done, Ok(Some(action)), "seed {seed}");
                }
            }
        }
        let all: BTreeSet<String> = KINDS.iter().map(|kind| (*kind).to_owned()).collect();
        assert_eq!(offered, all);
    }
}
