//! What an agent answers on a heartbeat: what it says and what it does. Models answer in JSON, in JSON within a fence, in TOON, or
//! in something that ends too early; what can be understood is, and what cannot is told.

use crate::action::{Action, Bounds, KINDS};
use crate::format::Output;
use crate::hud::Hud;
use crate::world::{AgentId, RECENT, RoomId, World};
use serde_json::{Map, Value, json};

/// What an agent answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// What it says, room by room.
    pub responses: Vec<Response>,
    /// What it does, or why that is nothing that can be done: the word for it, and the reason.
    pub actions: Vec<Result<Action, (String, String)>>,
    /// Whether something had to be put right before it could be read.
    pub repaired: bool,
}

/// Something that an agent says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// Where.
    pub room: RoomId,
    /// What.
    pub message: String,
}

/// What agents write when they say nothing.
pub const SILENCE: &str = "[no response]";

/// The most that is read of an answer, in bytes.
const LONGEST: usize = 1 << 20;

/// What came of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Messages that were sent, or are being written.
    pub said: usize,
    /// Actions that were done.
    pub done: usize,
    /// What was not, and why.
    pub refused: Vec<String>,
}

impl Answer {
    /// Understands what a model wrote, as far as it came: where it was cut off, what it was about to do is not done.
    ///
    /// # Errors
    /// In words, when nothing of it can be.
    pub fn read(text: &str, output: Output, cut: bool) -> Result<Self, String> {
        if text.len() > LONGEST {
            return Err("the answer is too long to be read".to_owned());
        }
        let body = unfenced(text);
        let json = |text: &str| from_json(text);
        let toon = |text: &str| from_toon(text, cut);
        let either = |text: &str| match output {
            Output::Json => json(text).or_else(|| toon(text)),
            Output::Toon => toon(text).or_else(|| json(text)),
        };
        // A message may have a fence in it: what is understood as a whole is not looked into.
        let found = either(text.trim()).or_else(|| either(body));
        let mended = |text: &str| repaired(text).or_else(|| repaired_toon(text, cut));
        // Nor what begins as an answer does, and ends too early.
        let begins = ["{", "responses", "actions"].iter().any(|start| text.trim().starts_with(start));
        let broken = if begins { [text.trim(), body] } else { [body, text.trim()] };
        let read = found
            .or_else(|| broken.into_iter().find_map(mended))
            .ok_or("the answer is neither JSON nor TOON with 'responses' and 'actions'")?;
        Ok(Self::of(read))
    }

    fn of(Read { value, repaired, open }: Read) -> Self {
        let mut answer = Self { repaired, ..Self::default() };
        let Value::Object(mut fields) = value else { return answer };
        let open = fields.keys().next_back().filter(|_| open).cloned();
        let is_open = |name: &str| open.as_deref() == Some(name);
        let mut responses = match fields.shift_remove("responses") {
            Some(Value::Array(responses)) => responses,
            Some(one @ Value::Object(_)) if MESSAGE.iter().any(|name| one.get(name).is_some()) => vec![one],
            // Some models name the room and then what they say there.
            Some(Value::Object(by_room)) => {
                let said = |(room, message)| json!({"room_id": room, "message": message});
                by_room.into_iter().map(said).collect()
            }
            other => {
                answer.none(other, "response", "responses are a list, each with a room_id and a message");
                Vec::new()
            }
        };
        // Half a message is said; one that was not about to be said yet is not.
        let begun = |response: &Value| {
            let last = response.as_object().and_then(|response| response.keys().next_back());
            last.is_some_and(|name| MESSAGE.contains(&name.as_str()))
        };
        if is_open("responses") && responses.last().is_some_and(|last| !begun(last)) {
            responses.pop();
        }
        responses.iter().for_each(|response| answer.say(response));
        let mut actions = match fields.shift_remove("actions") {
            Some(Value::Array(actions)) => actions,
            Some(action @ Value::Object(_)) => vec![action],
            other => {
                answer.none(other, "action", "actions are a list, each with a type");
                Vec::new()
            }
        };
        let unfinished = if is_open("actions") { actions.pop() } else { None };
        for action in actions {
            if action.get("type").and_then(Value::as_str) == Some("send_message") {
                answer.say(&action);
            } else {
                answer.actions.push(act(action));
            }
        }
        if let Some(action) = unfinished {
            let kind = action.get("type").and_then(Value::as_str).filter(|kind| KINDS.contains(kind));
            answer.wrong(
                kind.unwrap_or("action"),
                "your answer was cut off before this was finished, so it was not done: answer shorter",
            );
        }
        answer
    }

    /// Notes what should be a list and is none, unless it is nothing.
    fn none(&mut self, value: Option<Value>, kind: &str, why: &str) {
        let nothing =
            |value: &Value| value.is_null() || value.as_str().is_some_and(|text| text.trim().is_empty());
        if value.is_some_and(|value| !nothing(&value)) {
            self.wrong(kind, why);
        }
    }

    /// Notes something that cannot be done.
    fn wrong(&mut self, kind: &str, why: &str) {
        self.actions.push(Err((kind.to_owned(), why.to_owned())));
    }

    /// Something that is to be said.
    fn say(&mut self, item: &Value) {
        let text = |names: &[&str]| names.iter().find_map(|name| item.get(*name)).and_then(Value::as_str);
        let room = ["room_id", "room", "id"].iter().find_map(|name| item.get(*name)).and_then(number);
        let message = text(&MESSAGE);
        match (room, message) {
            (Some(room), Some(message)) => {
                let silent = message.trim().is_empty() || message.trim().eq_ignore_ascii_case(SILENCE);
                if !silent {
                    self.responses.push(Response { room, message: message.to_owned() });
                }
            }
            _ => self.wrong("response", "a response has a room_id and a message"),
        }
    }
}

/// What a response may call what it says.
const MESSAGE: [&str; 3] = ["message", "content", "text"];

/// What was understood of an answer.
struct Read {
    value: Value,
    /// Whether it had to be put right.
    repaired: bool,
    /// Whether it ends within the last thing that it names.
    open: bool,
}

fn number(value: &Value) -> Option<RoomId> {
    let number = value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())?;
    u32::try_from(number).ok().map(AgentId)
}

fn act(action: Value) -> Result<Action, (String, String)> {
    let kind = action.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    if !KINDS.contains(&kind.as_str()) {
        let why = if kind.is_empty() {
            "an action has a type".to_owned()
        } else {
            format!("there is no action '{kind}'")
        };
        return Err((if kind.is_empty() { "action".to_owned() } else { kind }, why));
    }
    serde_json::from_value(action).map_err(|why| (kind, why.to_string()))
}

/// What is within a fence of backticks, if there is one; else everything.
fn unfenced(text: &str) -> &str {
    let Some(start) = text.find("```") else { return text.trim() };
    let inner = &text[start + 3..];
    let inner = inner.split_once('\n').map_or(inner, |(word, rest)| {
        if word.trim().chars().all(char::is_alphanumeric) { rest } else { inner }
    });
    inner.split_once("```").map_or(inner, |(inside, _)| inside).trim()
}

/// Whether it is an answer at all.
fn is_answer(value: &Value) -> bool {
    value.get("responses").is_some() || value.get("actions").is_some()
}

/// How deep brackets may stand in each other: no answer needs more, and every one more costs.
const DEPTH: usize = 64;

fn from_json(text: &str) -> Option<Read> {
    let start = text.find('{')?;
    // What a model says behind its answer is not part of it.
    let mut read = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
    let value = read.next()?.ok().filter(is_answer)?;
    Some(Read { value, repaired: false, open: false })
}

fn from_toon(text: &str, cut: bool) -> Option<Read> {
    // Where a line has no end, nobody knows whether it has all of its last word.
    Some(Read { value: toon_read(toon_in(text)?, true)?, repaired: false, open: cut })
}

/// Where TOON begins in what was said.
fn toon_in(text: &str) -> Option<&str> {
    let start = text.find("responses").into_iter().chain(text.find("actions")).min()?;
    Some(&text[text[..start].rfind('\n').map_or(0, |at| at + 1)..])
}

fn toon_read(text: &str, strict: bool) -> Option<Value> {
    let options = toon_format::DecodeOptions::default().with_strict(strict);
    let value: Value = toon_format::decode(text, &options).ok()?;
    is_answer(&value).then(|| without_nothing(value))
}

/// TOON that ends too early, or has other entries than it says: with its last text closed, or without the last lines.
fn repaired_toon(text: &str, cut: bool) -> Option<Read> {
    let text = toon_in(text)?;
    let read = |text: &str, open| Some(Read { value: toon_read(text, false)?, repaired: true, open });
    let closed = format!("{}\"", text.trim_end_matches('\\'));
    let ends = text.char_indices().rev().filter(|&(_, c)| c == '\n').map(|(at, _)| &text[..at]);
    let mut shorter = std::iter::once(&*closed).chain(ends).take(64);
    read(text, cut).or_else(|| shorter.find_map(|text| read(text, true)))
}

/// Rows of a table are filled up with nothing where an entry lacks a field.
fn without_nothing(mut value: Value) -> Value {
    for list in ["responses", "actions"] {
        for row in value.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(fields) = row.as_object_mut() {
                fields.retain(|_, value| !value.is_null());
            }
        }
    }
    value
}

/// JSON that ends too early, has commas too many, or line breaks within its texts, put right; none where that does not help.
fn repaired(text: &str) -> Option<Read> {
    let start = text.find('{')?;
    let (mut out, mut closers) = (String::with_capacity(text.len()), Vec::new());
    // Where something was whole, and what was open there.
    let mut whole: Vec<(usize, Vec<char>)> = Vec::new();
    let (mut in_string, mut escaped) = (false, false);
    for c in text[start..].chars() {
        if in_string {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => in_string = false,
                _ => {}
            }
            match c {
                '\n' => out.push_str("\\n"),
                '\t' => out.push_str("\\t"),
                c if c < ' ' => {}
                c => out.push(c),
            }
            if !in_string {
                whole.push((out.len(), closers.clone()));
            }
            continue;
        }
        match c {
            '"' => in_string = true,
            '{' | '[' if closers.len() >= DEPTH => break,
            '{' => closers.push('}'),
            '[' => closers.push(']'),
            '}' | ']' => {
                // A comma before the end of a list is one too many.
                let kept = out.trim_end().trim_end_matches(',').len();
                out.truncate(kept);
                if closers.last() != Some(&c) {
                    break;
                }
                closers.pop();
            }
            _ => {}
        }
        out.push(c);
        if !c.is_whitespace() && !matches!(c, ',' | ':' | '"') {
            whole.push((out.len(), closers.clone()));
        }
        if closers.is_empty() {
            break;
        }
    }
    let close = |text: &str, closers: &[char]| {
        let text: String = text.chars().chain(closers.iter().rev().copied()).collect();
        let value = serde_json::from_str::<Value>(&text).ok().filter(is_answer)?;
        // The answer itself, a list in it, and an entry of that; some do without the list.
        let entry =
            value.as_object()?.values().next_back().map_or(3, |last| if last.is_object() { 2 } else { 3 });
        Some(Read { value, repaired: true, open: closers.len() >= entry })
    };
    if in_string {
        let cut = out.strip_suffix('\\').filter(|_| escaped).unwrap_or(&out);
        if let Some(value) = close(&format!("{cut}\""), &closers) {
            return Some(value);
        }
    }
    whole.iter().rev().take(64).find_map(|(at, closers)| close(&out[..*at], closers))
}

impl World {
    /// Does what an agent answered: first what it writes down, then what it says, then the rest. Whatever is refused, it is told
    /// why.
    pub fn answer(&mut self, who: AgentId, answer: Answer, bounds: Bounds<'_>) -> Outcome {
        let mut outcome = Outcome::default();
        let learns = |action: &Result<Action, _>| {
            matches!(action, Ok(Action::Set { .. } | Action::Delete { .. } | Action::Append { .. }))
        };
        let (first, rest): (Vec<_>, Vec<_>) = answer.actions.into_iter().partition(learns);
        self.act_all(who, first, bounds, &mut outcome);
        for Response { room, message } in answer.responses {
            match self.speak(room, who, &message, None, bounds.now) {
                Ok(()) => outcome.said += 1,
                Err(why) => {
                    self.refuse(who, "response", &why, bounds.now);
                    outcome.refused.push(why);
                }
            }
        }
        self.act_all(who, rest, bounds, &mut outcome);
        outcome
    }

    fn act_all(
        &mut self,
        who: AgentId,
        actions: Vec<Result<Action, (String, String)>>,
        bounds: Bounds<'_>,
        outcome: &mut Outcome,
    ) {
        for action in actions {
            let done = match action {
                Ok(action) => self.act(who, action, bounds),
                Err((kind, why)) => {
                    self.refuse(who, &kind, &why, bounds.now);
                    Err(why)
                }
            };
            match done {
                Ok(()) => outcome.done += 1,
                Err(why) => outcome.refused.push(why),
            }
        }
    }
}

/// The most responses and actions of an answer that is held to its form.
const RESPONSES: usize = 2;
const ACTIONS: usize = 2;

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

/// The form that an answer of so many tokens is held to: a JSON schema in which rooms, messages and people are those that the
/// agent sees. Texts are so long that the answer ends in time.
#[must_use]
pub fn schema(hud: &Hud, tokens: usize) -> Value {
    let most = (tokens * 3 / 4).clamp(40, 1_200);
    let text = |most: usize| json!({"type": "string", "maxLength": most});
    let one_of = |known: Vec<u64>| json!({"enum": known});
    let object = |kind: Option<&str>, fields: Vec<(&str, Value)>| {
        let kind = kind.map(|kind| ("type", json!({"const": kind})));
        let all: Vec<(&str, Value)> = kind.into_iter().chain(fields).collect();
        let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        let fields: Map<String, Value> =
            all.iter().map(|(name, form)| ((*name).to_owned(), form.clone())).collect();
        json!({"type": "object", "properties": fields, "required": names, "additionalProperties": false})
    };
    let rooms: Vec<u64> = hud.rooms.iter().map(|room| u64::from(room.id.0)).collect();
    let own = hud.me.identity.id;
    let optional = |mut form: Value, name: &str, field: Value| {
        form["properties"][name] = field;
        form
    };
    let path = json!({"type": "string", "pattern": "^[a-z_]{1,16}(\\.[A-Za-z0-9_]{1,16}){0,3}$"});
    let name = json!({"type": "string", "pattern": "^[A-Z][a-z]{1,14}( [A-Z][a-z]{1,14})?$"});
    let value = json!({"anyOf": [text(most / 2), {"type": "integer", "minimum": -999, "maximum": 999}, {"type": "boolean"}]});
    let mut actions = vec![
        optional(
            object(Some("set"), vec![("path", path.clone()), ("value", value.clone())]),
            "w",
            json!({"enum": [0.1, 0.3, 0.5, 0.7, 0.9, 1.0]}),
        ),
        object(Some("append"), vec![("path", path), ("value", value)]),
    ];
    // Whoever is new, or has just taken a name, keeps it for a while: a small model would take another on every heartbeat.
    let named = |action: &std::sync::Arc<Map<String, Value>>| action.get("type") == Some(&json!("set_name"));
    if hud.me.recent_actions.len() >= RECENT && !hud.me.recent_actions.iter().any(named) {
        // What is asked for in other words is no name.
        actions.push(object(Some("set_name"), vec![("name", name.clone())]));
    }
    let known = paths(&hud.me.knowledge);
    if !known.is_empty() {
        actions.push(object(Some("delete"), vec![("path", json!({"enum": known}))]));
    }
    let heard: Vec<(u64, u64)> = hud
        .rooms
        .iter()
        .flat_map(|room| room.messages.iter().map(move |said| (u64::from(room.id.0), said)))
        .filter(|(_, said)| said.sender != own.to_string() && said.kind == "text")
        .map(|(room, said)| (room, said.id))
        .collect();
    if !heard.is_empty() {
        let messages: Vec<u64> = heard.iter().rev().take(8).map(|(_, id)| *id).collect();
        let reactions = json!({"enum": ["thumbs_up", "thumbs_down", "brain", "heart"]});
        actions.push(object(Some("react"), vec![("message_id", one_of(messages)), ("reaction", reactions)]));
    }
    for &room in &rooms {
        let messages: Vec<u64> =
            heard.iter().rev().filter(|(at, _)| *at == room).take(4).map(|(_, id)| *id).collect();
        if !messages.is_empty() {
            let fields = vec![
                ("room_id", one_of(vec![room])),
                ("message_id", one_of(messages)),
                ("message", text(most)),
            ];
            actions.push(object(Some("reply"), fields));
        }
    }
    let others: Vec<u64> = hud
        .rooms
        .iter()
        .flat_map(|room| &room.members)
        .filter_map(|id| id.parse::<u64>().ok())
        .filter(|&id| id != 0 && id != u64::from(own.0))
        .collect::<std::collections::BTreeSet<_>>()
        .into_iter()
        .collect();
    if !others.is_empty() {
        actions.push(object(Some("wake_agent"), vec![("agent_id", one_of(others.clone()))]));
    }
    if let Some(room) = hud.rooms.iter().find(|room| room.is_self_room) {
        actions.push(object(Some("set_billboard"), vec![("message", text(most / 2))]));
        if room.billboard.is_some() {
            actions.push(object(Some("clear_billboard"), vec![]));
        }
        actions.push(object(
            Some("set_wpm"),
            vec![("wpm", json!({"type": "integer", "minimum": 10, "maximum": 200}))],
        ));
        actions.push(object(Some("create_key"), vec![("key", text(20))]));
        let keys = room.my_keys.clone().unwrap_or_default();
        if !keys.is_empty() {
            actions.push(object(Some("revoke_key"), vec![("key", json!({"enum": keys}))]));
        }
        let requests: Vec<u64> =
            room.pending_access_requests.iter().flatten().map(|request| request.id).collect();
        if !requests.is_empty() {
            actions.push(object(Some("grant_access"), vec![("request_id", one_of(requests.clone()))]));
            actions.push(object(Some("deny_access"), vec![("request_id", one_of(requests))]));
        }
    }
    let number = json!({"type": "integer", "minimum": 1, "maximum": 4094});
    actions.push(object(Some("request_access"), vec![("room_id", number), ("key", text(20))]));
    let elsewhere: Vec<u64> = rooms.iter().copied().filter(|&room| room != u64::from(own.0)).collect();
    if !elsewhere.is_empty() {
        actions.push(object(Some("leave_room"), vec![("room_id", one_of(elsewhere))]));
    }
    if !rooms.is_empty() {
        let share = json!({"type": "string", "pattern": "^([1-9]?[0-9]%|100%|%\\*)$"});
        actions
            .push(object(Some("set_attention"), vec![("room_id", one_of(rooms.clone())), ("value", share)]));
    }
    let time =
        "^20[2-9][0-9]-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]$";
    actions.push(object(Some("sleep"), vec![("until", json!({"type": "string", "pattern": time}))]));
    if hud.meta.available_actions.contains_key("agent_management") {
        let kinds = json!({"enum": ["persona", "bot"]});
        let fields = vec![("name", name.clone()), ("background_prompt", text(most)), ("agent_type", kinds)];
        let form = object(Some("create_agent"), fields);
        actions.push(optional(form, "in_room_id", one_of(rooms.clone())));
        if !others.is_empty() {
            let fields = vec![("agent_id", one_of(others.clone())), ("background_prompt", text(most))];
            actions.push(optional(object(Some("alter_agent"), fields), "name", name));
            actions.push(object(Some("retire_agent"), vec![("agent_id", one_of(others))]));
        }
    }
    let response = match rooms.is_empty() {
        true => json!({"type": "array", "maxItems": 0}),
        false => {
            let one = object(None, vec![("room_id", one_of(rooms.clone())), ("message", text(most))]);
            json!({"type": "array", "maxItems": rooms.len().min(RESPONSES), "items": one})
        }
    };
    let actions = json!({"type": "array", "maxItems": ACTIONS, "items": {"anyOf": actions}});
    object(None, vec![("responses", response), ("actions", actions)])
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
    use crate::testing::{self, Lot};

    fn read(text: &str) -> Answer {
        Answer::read(text, Output::Json, false).unwrap_or_else(|why| panic!("{text}: {why}"))
    }

    #[test]
    fn answers_come_in_many_shapes() {
        let expected = Answer {
            responses: vec![Response { room: AgentId(8), message: "Hello, you!".into() }],
            actions: vec![Ok(Action::Set {
                path: "character.mood".into(),
                value: json!("curious"),
                w: None,
            })],
            repaired: false,
        };
        let json = r#"{"responses": [{"room_id": 8, "message": "Hello, you!"}, {"room_id": 5, "message": "[no response]"}],
            "actions": [{"type": "set", "path": "character.mood", "value": "curious"}]}"#;
        assert_eq!(read(json), expected);
        assert_eq!(read(&format!("Here is my answer:\n```json\n{json}\n```\nI hope it helps.")), expected);
        assert_eq!(read(&format!("{json} and so on")), expected);
        let toon = "responses[1]{room_id,message}:\n  8,\"Hello, you!\"\nactions[1]{type,path,value}:\n  set,character.mood,curious";
        assert_eq!(read(toon), expected);
        assert_eq!(Answer::read(toon, Output::Toon, false).as_ref(), Ok(&expected));
        assert_eq!(Answer::read(json, Output::Toon, false).as_ref(), Ok(&expected));
        let words = r#"{"responses": {"8": "Hello, you!"}, "actions": {"type": "set", "path": "character.mood", "value": "curious"}}"#;
        assert_eq!(read(words), expected);
        let sent = r#"{"actions": [{"type": "send_message", "room_id": "8", "content": "Hello, you!"}]}"#;
        assert_eq!(read(sent).responses, expected.responses);
    }

    #[test]
    fn what_is_broken_is_put_right_as_far_as_it_can_be() {
        let whole = r#"{"responses": [{"room_id": 8, "message": "Hello"}], "actions": [{"type": "delete", "path": "a"}]}"#;
        for end in 15..whole.len() {
            let Ok(answer) = Answer::read(&whole[..end], Output::Json, true) else {
                panic!("{}", &whole[..end])
            };
            assert!(answer.repaired, "{}", &whole[..end]);
            if end > 49 {
                assert_eq!(answer.responses[0].message, "Hello", "{}", &whole[..end]);
            }
        }
        assert_eq!(
            read("{\"responses\": [{\"room_id\": 1, \"message\": \"two\nlines\"},], \"actions\": [],}")
                .responses[0]
                .message,
            "two\nlines"
        );
        assert_eq!(
            read(r#"{"responses": [{"room_id": 1, "message": "cut off in the mid"#).responses[0].message,
            "cut off in the mid"
        );
        for nothing in ["", "I do not know.", "{}", "[1, 2]", "{\"a\": 1}", "```\n```"] {
            assert!(Answer::read(nothing, Output::Json, false).is_err(), "{nothing}");
        }
    }

    #[test]
    fn what_was_cut_off_is_not_done() {
        let cut = "cut off before this was finished";
        let cases = [
            (r#"{"responses":[],"actions":[{"type":"delete","path":"people"#, "delete"),
            (r#"{"actions":[{"type":"retire_agent","agent_id":1"#, "retire_agent"),
            (r#"{"actions":[{"type":"set_attention","room_id":2,"value":"3"#, "set_attention"),
            (r#"{"actions":{"type":"retire_agent","agent_id":1"#, "retire_agent"),
            (r#"{"actions":[{"type":"retire_ag"#, "action"),
            ("responses: []\nactions[1]{type,path}:\n  delete,people", "delete"),
            ("actions[1]:\n  - type: retire_agent\n    agent_id: 1", "retire_agent"),
        ];
        for (text, kind) in cases {
            let answer = Answer::read(text, Output::Json, true).unwrap_or_else(|why| panic!("{text}: {why}"));
            let [Err((what, why))] = &answer.actions[..] else { panic!("{text}: {:?}", answer.actions) };
            assert!(what == kind && why.contains(cut), "{text}: {what}: {why}");
        }
        // What came before it is done, and so is what only looks like it.
        let two = r#"{"actions":[{"type":"delete","path":"a"},{"type":"delete","path":"b"#;
        assert_eq!(read(two).actions[0], Ok(Action::Delete { path: "a".into() }));
        for whole in
            ["actions[1]{type,path}:\n  delete,people", r#"{"actions":[{"type":"delete","path":"people"},]}"#]
        {
            assert_eq!(read(whole).actions, [Ok(Action::Delete { path: "people".into() })], "{whole}");
        }
        // Nobody speaks in a room whose number may be longer.
        let none = r#"{"responses":[{"room_id":3,"message":"a"},{"message":"to whom?","room_id":1"#;
        assert_eq!(read(none).responses, [Response { room: AgentId(3), message: "a".into() }]);
    }

    /// What should be a list and is none is told.
    #[test]
    fn what_is_no_list_says_so() {
        for (text, wrong) in [
            (r#"{"responses":"Hello all","actions":[]}"#, Some("responses are a list")),
            (r#"{"responses":[],"actions":"set a to b"}"#, Some("actions are a list")),
            ("responses: Hello\nactions: []", Some("responses are a list")),
            (r#"{"responses":null,"actions":""}"#, None),
        ] {
            let answer = read(text);
            let why =
                answer.actions.first().and_then(|action| action.as_ref().err()).map(|(_, why)| why.as_str());
            assert_eq!(why.is_some(), wrong.is_some(), "{text}: {why:?}");
            assert!(wrong.is_none_or(|part| why.is_some_and(|why| why.starts_with(part))), "{text}: {why:?}");
        }
    }

    /// Wherever it ends: as much of it as was said.
    #[test]
    fn toon_that_is_cut_off_is_put_right() {
        let whole = "responses[1]{room_id,message}:\n  1,\"She said: \\\"no\\\", and left\"\nactions[2]:\n  - type: reply\n    room_id: 1\n    message_id: 101\n    message: \"Is it so?\"\n  - type: delete\n    path: a.b";
        let [said, last] = ["actions", "- type: d"].map(|word| whole.find(word).expect("there"));
        for end in 30..whole.len() {
            let text = &whole[..end];
            let answer = Answer::read(text, Output::Toon, true).unwrap_or_else(|why| panic!("{text}: {why}"));
            if end >= said {
                assert_eq!(answer.responses[0].message, "She said: \"no\", and left", "{text}");
            }
            assert!(answer.repaired || !(said + 1..last).contains(&end), "{text}");
        }
        let cut = Answer::read(&whole[..said + 90], Output::Toon, true).expect("an answer");
        assert_eq!((cut.responses.len(), cut.actions.len(), cut.repaired), (1, 1, true));
        let whole = Answer::read(whole, Output::Toon, false).expect("an answer");
        assert!(!whole.repaired && whole.actions.iter().all(Result::is_ok) && whole.actions.len() == 2);
        // More than it says, and less.
        for count in [0, 1, 3, 9] {
            let text = format!("responses[{count}]{{room_id,message}}:\n  1,one\n  1,two\nactions: []");
            assert_eq!(
                Answer::read(&text, Output::Toon, false).map(|answer| answer.responses.len()),
                Ok(2),
                "{text}"
            );
        }
    }

    /// Whatever is said, in whatever form, wherever it ends: it is understood, and nobody says what was not said.
    #[test]
    fn what_is_cut_off_by_lot_is_understood() {
        for seed in 0..200 {
            let mut lot = Lot::new(seed);
            let said: Vec<String> = (0..=lot.below(2)).map(|_| testing::words(&mut lot, 8)).collect();
            let response = |message: &String| json!({"room_id": 1, "message": message});
            let whole = json!({
                "responses": said.iter().map(response).collect::<Vec<_>>(),
                "actions": [
                    {"type": "reply", "room_id": 1, "message_id": 7, "message": testing::words(&mut lot, 6)},
                    {"type": "set", "path": "a.b", "value": testing::words(&mut lot, 4)},
                    {"type": "retire_agent", "agent_id": 12},
                ],
            });
            let meant: Vec<Action> = read(&whole.to_string()).actions.into_iter().flatten().collect();
            assert_eq!(meant.len(), 3);
            let toon = toon_format::encode(&whole, &toon_format::EncodeOptions::default()).expect("TOON");
            let pretty = serde_json::to_string_pretty(&whole).expect("JSON");
            for (text, output) in
                [(whole.to_string(), Output::Json), (pretty, Output::Json), (toon, Output::Toon)]
            {
                let end = if output == Output::Toon { '\n' } else { '[' };
                let head = text.find(end).expect("a list") + 1;
                for end in (head..=text.len()).filter(|&end| text.is_char_boundary(end)) {
                    let text = &text[..end];
                    let answer = Answer::read(text, output, true)
                        .unwrap_or_else(|why| panic!("seed {seed}: {why}: {text}"));
                    for action in answer.actions.into_iter().flatten() {
                        assert!(meant.contains(&action), "seed {seed}: {action:?}: {text}");
                    }
                    for Response { message, .. } in answer.responses {
                        assert!(
                            said.iter().any(|whole| whole.starts_with(&message)),
                            "seed {seed}: {message:?}: {text}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_fence_within_a_message_is_no_answer() {
        let text = r#"{"responses": [{"room_id": 8, "message": "Try ```ls``` first"}], "actions": []}"#;
        for text in [text.to_owned(), format!("```json\n{text}\n```"), format!("Well:\n{text}\nThat is it.")]
        {
            assert_eq!(
                read(&text).responses,
                [Response { room: AgentId(8), message: "Try ```ls``` first".into() }]
            );
        }
        // However deep it goes, it is soon given up.
        assert!(Answer::read(&"[{".repeat(30_000), Output::Json, true).is_err());
    }

    #[test]
    fn what_is_no_action_says_why() {
        let answer = read(
            r#"{"actions": [{"type": "fly"}, {"type": "react", "message_id": 1, "reaction": "fire"}, {"path": "x"},
            {"type": "react", "message_id": "12", "reaction": "heart"}], "responses": [{"message": "where?"}]}"#,
        );
        let why: Vec<&str> =
            answer.actions.iter().filter_map(|a| a.as_ref().err()).map(|(_, why)| why.as_str()).collect();
        assert_eq!(why[0], "a response has a room_id and a message");
        assert_eq!(why[1], "there is no action 'fly'");
        assert!(why[2].contains("fire"), "{}", why[2]);
        assert_eq!(why[3], "an action has a type");
        assert!(
            answer.actions.iter().any(|action| matches!(action, Ok(Action::React { message_id: 12, .. })))
        );
    }
}
