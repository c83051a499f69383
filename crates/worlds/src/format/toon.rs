//! The two formats made of lines: TOON as its specification defines it, and the positional dialect.

use super::writer::HudWriter;
use super::{positional, tabular};
use crate::hud::{Hud, HudMessage, HudRoom};
use serde::Serialize;
use serde_json::{Map, Value, json};

const ACTION_COLUMNS: &str = "type,timestamp,with,refused";
const MESSAGE_COLUMNS: &str = "id,timestamp,sender,content,type,reply_to,reactions";

fn room_fields_before_pace(room: &HudRoom) -> Value {
    json!({
        "id": room.id,
        "you": room.you,
        "is_self_room": room.is_self_room,
        "members": room.members,
        "attention_pct": room.attention_pct,
    })
}

fn room_fields_after_pace(room: &HudRoom) -> Map<String, Value> {
    let mut fields = Map::new();
    let mut put = |name: &str, value: Option<Value>| {
        fields.extend(value.map(|value| (name.to_owned(), value)));
    };
    put("billboard", room.billboard.as_ref().map(|text| json!(text)));
    put("my_keys", room.my_keys.as_ref().map(|keys| json!(keys)));
    put("pending_access_requests", room.pending_access_requests.as_ref().map(|requests| json!(requests)));
    fields
}

/// Indents every line and begins each with a line break.
fn indent_lines(text: &str, depth: usize) -> String {
    if text.is_empty() {
        return String::new();
    }
    let before = format!("\n{}", "  ".repeat(depth));
    format!("{before}{}", text.replace('\n', &before))
}

pub(super) struct ToonHudWriter;

fn encode_toon(value: &impl Serialize) -> String {
    toon_format::encode(value, &toon_format::EncodeOptions::default()).unwrap_or_default()
}

/// Knowledge as a table, where TOON writes it as one: all entries are objects with the same fields.
fn knowledge_table(knowledge: &Map<String, Value>) -> Option<String> {
    let all_objects = knowledge.values().all(Value::is_object) && !knowledge.is_empty();
    let text = all_objects.then(|| encode_toon(&json!({"knowledge": knowledge})))?;
    (!text.starts_with("knowledge:")).then_some(text)
}

fn toon_row(row: &Value) -> String {
    let table = encode_toon(&json!({"r": [row]}));
    table.split_once('\n').map_or_else(String::new, |(_, row)| row.trim_start_matches(' ').to_owned())
}

fn table_header(name: &str, rows: usize, columns: &str) -> String {
    if rows == 0 { format!("{name}: []") } else { format!("{name}[{rows}]{{{columns}}}:") }
}

impl HudWriter for ToonHudWriter {
    fn shared_section(&self, hud: &Hud) -> String {
        encode_toon(&json!({"system": hud.system, "meta": tabular::meta_with_rows(hud)}))
    }

    fn identity(&self, hud: &Hud) -> String {
        let identity = indent_lines(&encode_toon(&json!({"identity": hud.me.identity})), 1);
        let table = knowledge_table(&hud.me.knowledge);
        let header = table.as_ref().and_then(|table| table.split('\n').next()).unwrap_or("knowledge:");
        format!("\nself:{identity}\n  {header}")
    }

    fn knowledge_entries(&self, knowledge: &Map<String, Value>) -> Vec<String> {
        if let Some(table) = knowledge_table(knowledge) {
            return table.split('\n').skip(1).map(|row| indent_lines(row, 1)).collect();
        }
        let entry = |(name, value): (&String, &Value)| {
            let object: Map<String, Value> = [(name.clone(), value.clone())].into_iter().collect();
            indent_lines(&encode_toon(&object), 2)
        };
        knowledge.iter().map(entry).collect()
    }

    fn memory_usage(&self, hud: &Hud) -> String {
        let mut used = json!({"memory_used": hud.me.memory_used});
        if let Some(notice) = &hud.me.notice {
            used["notice"] = json!(notice);
        }
        format!(
            "{}\n  {}",
            indent_lines(&encode_toon(&used), 1),
            table_header("recent_actions", hud.me.recent_actions.len(), ACTION_COLUMNS)
        )
    }

    fn recent_action(&self, action: &Map<String, Value>) -> String {
        format!("\n    {}", toon_row(&tabular::action_row(action)))
    }

    fn action_separator(&self) -> &'static str {
        ""
    }

    fn rooms_header(&self, hud: &Hud) -> String {
        match hud.rooms.len() {
            0 => "\nrooms: []".to_owned(),
            rooms => format!("\nrooms[{rooms}]:"),
        }
    }

    fn room_header(&self, hud: &Hud, index: usize) -> String {
        format!("\n  - {}", encode_toon(&room_fields_before_pace(&hud.rooms[index])).replace('\n', "\n    "))
    }

    fn room_pace(&self, hud: &Hud, index: usize) -> String {
        let room = &hud.rooms[index];
        let pace = json!({"time_since_last": room.time_since_last, "word_budget": room.word_budget});
        indent_lines(&encode_toon(&pace), 2)
    }

    fn messages_header(&self, hud: &Hud, index: usize, messages: usize) -> String {
        let room = &hud.rooms[index];
        let fields = indent_lines(&encode_toon(&room_fields_after_pace(room)), 2);
        format!("{fields}\n    {}", table_header("messages", messages, MESSAGE_COLUMNS))
    }

    fn message_row(&self, message: &HudMessage) -> String {
        format!("\n      {}", toon_row(&tabular::message_row(message)))
    }

    fn message_separator(&self) -> &'static str {
        ""
    }

    fn room_footer(&self, _: &Hud, _: usize, _: usize) -> String {
        String::new()
    }

    fn footer(&self, _: &Hud) -> String {
        String::new()
    }
}

pub(super) struct PositionalHudWriter;

fn positional_fields(fields: &Map<String, Value>, depth: usize) -> String {
    let mut out = String::new();
    for (name, value) in fields {
        out.push('\n');
        positional::write_block(&positional::quote_if_needed(name), value, depth, &mut out);
    }
    out
}

fn positional_row(row: &Value) -> String {
    row.as_object().map(positional::inline_row).unwrap_or_default()
}

fn into_fields(value: Value) -> Map<String, Value> {
    if let Value::Object(fields) = value { fields } else { Map::new() }
}

/// An empty list has no name in the positional dialect.
fn positional_table_header(name: &str, rows: usize, columns: &str) -> String {
    if rows == 0 { "[]".to_owned() } else { format!("{name}[{rows}]{{{columns}}}:") }
}

impl HudWriter for PositionalHudWriter {
    fn shared_section(&self, hud: &Hud) -> String {
        let fields = into_fields(json!({"system": hud.system, "meta": tabular::meta_with_rows(hud)}));
        format!("hud{{system,meta,self,rooms}}:{}", positional_fields(&fields, 1))
    }

    fn identity(&self, hud: &Hud) -> String {
        let notice = if hud.me.notice.is_some() { "notice," } else { "" };
        let identity = positional_fields(&into_fields(json!({"identity": hud.me.identity})), 2);
        let knowledge = &hud.me.knowledge;
        let header = if knowledge.is_empty() {
            "{}".to_owned()
        } else {
            format!("knowledge{{{}}}:", positional::inline_names(knowledge.keys()))
        };
        format!("\n  self{{identity,knowledge,memory_used,{notice}recent_actions}}:{identity}\n    {header}")
    }

    fn knowledge_entries(&self, knowledge: &Map<String, Value>) -> Vec<String> {
        let entry = |(name, value): (&String, &Value)| {
            let mut out = "\n".to_owned();
            positional::write_block(&positional::quote_if_needed(name), value, 3, &mut out);
            out
        };
        knowledge.iter().map(entry).collect()
    }

    fn memory_usage(&self, hud: &Hud) -> String {
        let mut used = into_fields(json!({"memory_used": hud.me.memory_used}));
        used.extend(hud.me.notice.as_ref().map(|notice| ("notice".to_owned(), json!(notice))));
        let table = positional_table_header("recent_actions", hud.me.recent_actions.len(), ACTION_COLUMNS);
        format!("{}\n    {table}", positional_fields(&used, 2))
    }

    fn recent_action(&self, action: &Map<String, Value>) -> String {
        format!("\n      {}", positional_row(&tabular::action_row(action)))
    }

    fn action_separator(&self) -> &'static str {
        ""
    }

    fn rooms_header(&self, hud: &Hud) -> String {
        match hud.rooms.len() {
            0 => "\n  []".to_owned(),
            rooms => format!("\n  rooms[{rooms}]:"),
        }
    }

    fn room_header(&self, hud: &Hud, index: usize) -> String {
        let room = &hud.rooms[index];
        let first = into_fields(room_fields_before_pace(room));
        let pace = ["time_since_last".to_owned(), "word_budget".to_owned()];
        let (last, messages) = (room_fields_after_pace(room), ["messages".to_owned()]);
        let names = positional::inline_names(first.keys().chain(&pace).chain(last.keys()).chain(&messages));
        format!("\n    [{index}]{{{names}}}:{}", positional_fields(&first, 3))
    }

    fn room_pace(&self, hud: &Hud, index: usize) -> String {
        let room = &hud.rooms[index];
        let pace = json!({"time_since_last": room.time_since_last, "word_budget": room.word_budget});
        positional_fields(&into_fields(pace), 3)
    }

    fn messages_header(&self, hud: &Hud, index: usize, messages: usize) -> String {
        let room = &hud.rooms[index];
        format!(
            "{}\n      {}",
            positional_fields(&room_fields_after_pace(room), 3),
            positional_table_header("messages", messages, MESSAGE_COLUMNS)
        )
    }

    fn message_row(&self, message: &HudMessage) -> String {
        format!("\n        {}", positional_row(&tabular::message_row(message)))
    }

    fn message_separator(&self) -> &'static str {
        ""
    }

    fn room_footer(&self, _: &Hud, _: usize, _: usize) -> String {
        String::new()
    }

    fn footer(&self, _: &Hud) -> String {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::render;
    use crate::hud_format::HudFormat;
    use crate::hud_renderer::{HudRenderer, HudRequest};
    use crate::prompts::WorldPrompts;
    use crate::testing::{self, RandomWorldSize, WorldRng};
    use halo_agents::token_counter::CeilTokenCounter;
    use std::sync::Arc;

    /// The concatenated fragments equal what the TOON library writes for the whole HUD.
    #[test]
    fn toon_hud_matches_toon_format_library() {
        let prompts = WorldPrompts::default();
        for seed in 0..300 {
            let (world, now) = testing::random_world(&mut WorldRng::new(seed), RandomWorldSize::default());
            let renderer = HudRenderer::new(Arc::new(CeilTokenCounter));
            for agent in world.agents() {
                let request =
                    HudRequest { now, prompts: &prompts, token_limit: usize::MAX, recalled: &|_| Vec::new() };
                let Ok(rendered) = renderer.render_as(&world, agent, HudFormat::Toon, &request) else {
                    continue;
                };
                let hud = &rendered.hud;
                let mut whole = serde_json::to_value(hud).expect("JSON");
                whole["meta"] = tabular::meta_with_rows(hud);
                let rows = |rows: Vec<Value>| Value::Array(rows);
                whole["self"]["recent_actions"] =
                    rows(hud.me.recent_actions.iter().map(|action| tabular::action_row(action)).collect());
                for (n, room) in hud.rooms.iter().enumerate() {
                    whole["rooms"][n]["messages"] =
                        rows(room.messages.iter().map(|message| tabular::message_row(message)).collect());
                }
                let (fragments, whole) = (render(hud, HudFormat::Toon), encode_toon(&whole));
                for (ours, theirs) in fragments.lines().zip(whole.lines()) {
                    assert_eq!(ours, theirs, "seed {seed}");
                }
                assert_eq!(fragments, whole, "seed {seed}");
            }
        }
    }
}
