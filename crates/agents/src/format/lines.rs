//! The two formats that are made of lines: TOON, as its specification has it, and the positional dialect.

use super::{Writer, positional, uniform};
use crate::hud::{Hud, MessageView, RoomView};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// The columns of the two tables.
const ACTION: &str = "type,timestamp,with,refused";
const MESSAGE: &str = "id,timestamp,sender,content,type,reply_to,reactions";

/// The fields of a room that come before how long ago the agent spoke there.
fn first_of(room: &RoomView) -> Value {
    json!({
        "id": room.id,
        "you": room.you,
        "is_self_room": room.is_self_room,
        "members": room.members,
        "attention_pct": room.attention_pct,
    })
}

/// Those behind, but for the messages.
fn last_of(room: &RoomView) -> Map<String, Value> {
    let mut fields = Map::new();
    let mut put = |name: &str, value: Option<Value>| {
        fields.extend(value.map(|value| (name.to_owned(), value)));
    };
    put("billboard", room.billboard.as_ref().map(|text| json!(text)));
    put("my_keys", room.my_keys.as_ref().map(|keys| json!(keys)));
    put("pending_access_requests", room.pending_access_requests.as_ref().map(|requests| json!(requests)));
    fields
}

/// Lines, each set in by so many levels and begun anew.
fn set_in(text: &str, depth: usize) -> String {
    if text.is_empty() {
        return String::new();
    }
    let before = format!("\n{}", "  ".repeat(depth));
    format!("{before}{}", text.replace('\n', &before))
}

pub(super) struct Toon;

fn toon(value: &impl Serialize) -> String {
    toon_format::encode(value, &toon_format::EncodeOptions::default()).unwrap_or_default()
}

/// What an agent has written down, where all of it is alike enough to be written as a table.
fn known_as_table(known: &Map<String, Value>) -> Option<String> {
    let rows = known.values().all(Value::is_object) && !known.is_empty();
    let text = rows.then(|| toon(&json!({"knowledge": known})))?;
    (!text.starts_with("knowledge:")).then_some(text)
}

/// One row of a table.
fn toon_row(row: &Value) -> String {
    let table = toon(&json!({"r": [row]}));
    table.split_once('\n').map_or_else(String::new, |(_, row)| row.trim_start_matches(' ').to_owned())
}

/// The head of a table that may be empty.
fn table(name: &str, rows: usize, columns: &str) -> String {
    if rows == 0 { format!("{name}: []") } else { format!("{name}[{rows}]{{{columns}}}:") }
}

impl Writer for Toon {
    fn shared(&self, hud: &Hud) -> String {
        toon(&json!({"system": hud.system, "meta": uniform::meta(hud)}))
    }

    fn identity(&self, hud: &Hud) -> String {
        let identity = set_in(&toon(&json!({"identity": hud.me.identity})), 1);
        let known = known_as_table(&hud.me.knowledge);
        let known = known.as_ref().and_then(|table| table.split('\n').next()).unwrap_or("knowledge:");
        format!("\nself:{identity}\n  {known}")
    }

    fn known(&self, known: &Map<String, Value>) -> Vec<String> {
        if let Some(table) = known_as_table(known) {
            return table.split('\n').skip(1).map(|row| set_in(row, 1)).collect();
        }
        let one = |(name, value): (&String, &Value)| {
            let one: Map<String, Value> = [(name.clone(), value.clone())].into_iter().collect();
            set_in(&toon(&one), 2)
        };
        known.iter().map(one).collect()
    }

    fn used(&self, hud: &Hud) -> String {
        let mut used = json!({"memory_used": hud.me.memory_used});
        if let Some(notice) = &hud.me.notice {
            used["notice"] = json!(notice);
        }
        format!(
            "{}\n  {}",
            set_in(&toon(&used), 1),
            table("recent_actions", hud.me.recent_actions.len(), ACTION)
        )
    }

    fn did(&self, action: &Map<String, Value>) -> String {
        format!("\n    {}", toon_row(&uniform::action(action)))
    }

    fn between_actions(&self) -> &'static str {
        ""
    }

    fn to_rooms(&self, hud: &Hud) -> String {
        match hud.rooms.len() {
            0 => "\nrooms: []".to_owned(),
            rooms => format!("\nrooms[{rooms}]:"),
        }
    }

    fn room(&self, hud: &Hud, number: usize) -> String {
        format!("\n  - {}", toon(&first_of(&hud.rooms[number])).replace('\n', "\n    "))
    }

    fn pace(&self, hud: &Hud, number: usize) -> String {
        let room = &hud.rooms[number];
        let pace = json!({"time_since_last": room.time_since_last, "word_budget": room.word_budget});
        set_in(&toon(&pace), 2)
    }

    fn board(&self, hud: &Hud, number: usize, messages: usize) -> String {
        let room = &hud.rooms[number];
        let board = set_in(&toon(&last_of(room)), 2);
        format!("{board}\n    {}", table("messages", messages, MESSAGE))
    }

    fn message(&self, message: &MessageView) -> String {
        format!("\n      {}", toon_row(&uniform::message(message)))
    }

    fn between_messages(&self) -> &'static str {
        ""
    }

    fn room_end(&self, _: &Hud, _: usize, _: usize) -> String {
        String::new()
    }

    fn end(&self, _: &Hud) -> String {
        String::new()
    }
}

pub(super) struct Positional;

/// Values, each on lines of its own.
fn placed(fields: &Map<String, Value>, depth: usize) -> String {
    let mut out = String::new();
    for (name, value) in fields {
        out.push('\n');
        positional::block(&positional::text(name), value, depth, &mut out);
    }
    out
}

fn cells(row: &Value) -> String {
    row.as_object().map(positional::row).unwrap_or_default()
}

fn fields_of(value: Value) -> Map<String, Value> {
    if let Value::Object(fields) = value { fields } else { Map::new() }
}

/// The head of a table that may be empty; what is empty goes without its name.
fn placed_table(name: &str, rows: usize, columns: &str) -> String {
    if rows == 0 { "[]".to_owned() } else { format!("{name}[{rows}]{{{columns}}}:") }
}

impl Writer for Positional {
    fn shared(&self, hud: &Hud) -> String {
        let fields = fields_of(json!({"system": hud.system, "meta": uniform::meta(hud)}));
        format!("hud{{system,meta,self,rooms}}:{}", placed(&fields, 1))
    }

    fn identity(&self, hud: &Hud) -> String {
        let notice = if hud.me.notice.is_some() { "notice," } else { "" };
        let identity = placed(&fields_of(json!({"identity": hud.me.identity})), 2);
        let known = &hud.me.knowledge;
        let known = if known.is_empty() {
            "{}".to_owned()
        } else {
            format!("knowledge{{{}}}:", positional::names(known.keys()))
        };
        format!("\n  self{{identity,knowledge,memory_used,{notice}recent_actions}}:{identity}\n    {known}")
    }

    fn known(&self, known: &Map<String, Value>) -> Vec<String> {
        let one = |(name, value): (&String, &Value)| {
            let mut out = "\n".to_owned();
            positional::block(&positional::text(name), value, 3, &mut out);
            out
        };
        known.iter().map(one).collect()
    }

    fn used(&self, hud: &Hud) -> String {
        let mut used = fields_of(json!({"memory_used": hud.me.memory_used}));
        used.extend(hud.me.notice.as_ref().map(|notice| ("notice".to_owned(), json!(notice))));
        let table = placed_table("recent_actions", hud.me.recent_actions.len(), ACTION);
        format!("{}\n    {table}", placed(&used, 2))
    }

    fn did(&self, action: &Map<String, Value>) -> String {
        format!("\n      {}", cells(&uniform::action(action)))
    }

    fn between_actions(&self) -> &'static str {
        ""
    }

    fn to_rooms(&self, hud: &Hud) -> String {
        match hud.rooms.len() {
            0 => "\n  []".to_owned(),
            rooms => format!("\n  rooms[{rooms}]:"),
        }
    }

    fn room(&self, hud: &Hud, number: usize) -> String {
        let room = &hud.rooms[number];
        let first = fields_of(first_of(room));
        let pace = ["time_since_last".to_owned(), "word_budget".to_owned()];
        let (last, messages) = (last_of(room), ["messages".to_owned()]);
        let names = positional::names(first.keys().chain(&pace).chain(last.keys()).chain(&messages));
        format!("\n    [{number}]{{{names}}}:{}", placed(&first, 3))
    }

    fn pace(&self, hud: &Hud, number: usize) -> String {
        let room = &hud.rooms[number];
        let pace = json!({"time_since_last": room.time_since_last, "word_budget": room.word_budget});
        placed(&fields_of(pace), 3)
    }

    fn board(&self, hud: &Hud, number: usize, messages: usize) -> String {
        let room = &hud.rooms[number];
        format!("{}\n      {}", placed(&last_of(room), 3), placed_table("messages", messages, MESSAGE))
    }

    fn message(&self, message: &MessageView) -> String {
        format!("\n        {}", cells(&uniform::message(message)))
    }

    fn between_messages(&self) -> &'static str {
        ""
    }

    fn room_end(&self, _: &Hud, _: usize, _: usize) -> String {
        String::new()
    }

    fn end(&self, _: &Hud) -> String {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::count::QuarterUp;
    use crate::format::{Format, write};
    use crate::prompts::Prompts;
    use crate::scribe::{Scribe, View};
    use crate::testing::{self, Lot, Size};
    use std::sync::Arc;

    /// Written in pieces or as a whole: it is the same text that the library writes.
    #[test]
    fn toon_is_what_its_library_writes() {
        let prompts = Prompts::default();
        for seed in 0..300 {
            let (world, now) = testing::world(&mut Lot::new(seed), Size::default());
            let scribe = Scribe::new(Arc::new(QuarterUp));
            for agent in world.agents() {
                let view = View { now, prompts: &prompts, room: usize::MAX, recalled: &|_| Vec::new() };
                let Ok(shown) = scribe.show_as(&world, agent, Format::Toon, &view) else { continue };
                let hud = &shown.hud;
                let mut whole = serde_json::to_value(hud).expect("JSON");
                whole["meta"] = uniform::meta(hud);
                let rows = |rows: Vec<Value>| Value::Array(rows);
                whole["self"]["recent_actions"] =
                    rows(hud.me.recent_actions.iter().map(|action| uniform::action(action)).collect());
                for (n, room) in hud.rooms.iter().enumerate() {
                    whole["rooms"][n]["messages"] =
                        rows(room.messages.iter().map(|said| uniform::message(said)).collect());
                }
                let (pieces, whole) = (write(hud, Format::Toon), toon(&whole));
                for (ours, theirs) in pieces.lines().zip(whole.lines()) {
                    assert_eq!(ours, theirs, "seed {seed}");
                }
                assert_eq!(pieces, whole, "seed {seed}");
            }
        }
    }
}
