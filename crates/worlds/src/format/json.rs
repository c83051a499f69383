//! JSON, indented with full field names or compact with short ones.

use super::writer::HudWriter;
use crate::hud::{Hud, HudMessage};
use serde::Serialize;
use serde_json::{Map, Value};
use std::sync::LazyLock;

/// The field names of a value, long and short, and those of its children.
enum HudFieldNames {
    /// A scalar, or an object whose field names are kept.
    Opaque,
    Object(&'static [(&'static str, &'static str, &'static HudFieldNames)]),
    List(&'static HudFieldNames),
    /// An object whose own field names are kept, unlike those of its children.
    AnyKey(&'static HudFieldNames),
}

use HudFieldNames::{AnyKey, List, Object, Opaque};

static HUD_NAMES: HudFieldNames = Object(&[
    ("system", "sys", &Object(&[("directives", "dir", &Opaque)])),
    ("meta", "m", &META_NAMES),
    ("self", "me", &SELF_NAMES),
    ("rooms", "r", &List(&ROOM_NAMES)),
]);

static META_NAMES: HudFieldNames = Object(&[
    ("instructions", "ins", &Opaque),
    // Agents answer with the fields of an action, so their names are kept.
    (
        "available_actions",
        "act",
        &AnyKey(&Object(&[("_description", "d", &Opaque), ("actions", "a", &Opaque)])),
    ),
    (
        "response_format",
        "fmt",
        &Object(&[
            ("type", "t", &Opaque),
            ("description", "d", &Opaque),
            ("instructions", "ins", &Opaque),
            ("example", "ex", &Opaque),
        ]),
    ),
]);

static SELF_NAMES: HudFieldNames = Object(&[
    (
        "identity",
        "id",
        &Object(&[
            ("id", "id", &Opaque),
            ("name", "n", &Opaque),
            ("model", "md", &Opaque),
            ("seed", "sd", &Opaque),
            ("role", "rl", &Opaque),
        ]),
    ),
    // The agent chose these names.
    ("knowledge", "k", &Opaque),
    ("memory_used", "mu", &Opaque),
    ("notice", "no", &Opaque),
    ("recent_actions", "ra", &List(&ACTION_NAMES)),
]);

static ACTION_NAMES: HudFieldNames = Object(&[
    ("type", "t", &Opaque),
    ("timestamp", "ts", &Opaque),
    ("refused", "x", &Opaque),
    ("path", "p", &Opaque),
    ("value", "v", &Opaque),
    ("message_id", "mi", &Opaque),
    ("reaction", "rx", &Opaque),
    ("agent_id", "ai", &Opaque),
    ("room_id", "ri", &Opaque),
    ("message", "c", &Opaque),
    ("request_id", "qi", &Opaque),
    ("background_prompt", "bp", &Opaque),
    ("agent_type", "at", &Opaque),
    ("in_room_id", "ir", &Opaque),
    ("until", "u", &Opaque),
    ("name", "n", &Opaque),
    ("model", "md", &Opaque),
    ("key", "ky", &Opaque),
]);

static ROOM_NAMES: HudFieldNames = Object(&[
    ("id", "id", &Opaque),
    ("you", "y", &Opaque),
    ("is_self_room", "own", &Opaque),
    ("members", "mem", &Opaque),
    ("attention_pct", "att", &Opaque),
    ("time_since_last", "ago", &Opaque),
    ("word_budget", "wb", &Opaque),
    ("billboard", "bb", &Opaque),
    ("my_keys", "ky", &Opaque),
    (
        "pending_access_requests",
        "req",
        &List(&Object(&[
            ("id", "id", &Opaque),
            ("requester_id", "by", &Opaque),
            ("key_used", "ky", &Opaque),
        ])),
    ),
    ("messages", "msg", &List(&MESSAGE_NAMES)),
]);

static MESSAGE_NAMES: HudFieldNames = Object(&[
    ("id", "id", &Opaque),
    ("timestamp", "ts", &Opaque),
    ("sender", "s", &Opaque),
    ("content", "c", &Opaque),
    ("type", "t", &Opaque),
    ("reply_to", "re", &Opaque),
    (
        "reactions",
        "rx",
        &Object(&[
            ("thumbs_up", "up", &Opaque),
            ("thumbs_down", "dn", &Opaque),
            ("brain", "br", &Opaque),
            ("heart", "he", &Opaque),
        ]),
    ),
]);

/// Replaces long field names by short ones, or short ones by long ones.
fn rename_fields(value: Value, names: &HudFieldNames, short: bool) -> Value {
    match (value, names) {
        (Value::Object(fields), Object(entries)) => {
            let rename = |name: String, value: Value| {
                let entry = entries
                    .iter()
                    .find(|(long, brief, _)| if short { *long == name } else { *brief == name });
                match entry {
                    Some((long, brief, below)) => {
                        ((if short { *brief } else { *long }).to_owned(), rename_fields(value, below, short))
                    }
                    None => (name, value),
                }
            };
            Value::Object(fields.into_iter().map(|(name, value)| rename(name, value)).collect())
        }
        (Value::Object(fields), AnyKey(below)) => Value::Object(
            fields.into_iter().map(|(name, value)| (name, rename_fields(value, below, short))).collect(),
        ),
        (Value::Array(items), List(below)) => {
            Value::Array(items.into_iter().map(|item| rename_fields(item, below, short)).collect())
        }
        (value, _) => value,
    }
}

pub(super) fn expand_names(mut value: Value) -> Value {
    if let Some(fields) = value.as_object_mut() {
        fields.remove(LEGEND_KEY);
    }
    rename_fields(value, &HUD_NAMES, false)
}

/// The field that explains the short names.
const LEGEND_KEY: &str = "names";

/// The instructions use long names, so a compact HUD explains the short ones.
static LEGEND_TEXT: LazyLock<String> = LazyLock::new(|| {
    fn collect(names: &HudFieldNames, all: &mut Vec<String>) {
        match names {
            Opaque => {}
            List(below) | AnyKey(below) => collect(below, all),
            Object(entries) => {
                for (long, short, below) in *entries {
                    let pair = format!("{short}={}", long.trim_start_matches('_'));
                    if long != short && !all.contains(&pair) {
                        all.push(pair);
                    }
                    collect(below, all);
                }
            }
        }
    }
    let mut all = Vec::new();
    collect(&HUD_NAMES, &mut all);
    all.join(" ")
});

pub(super) struct JsonHudWriter {
    pub(super) compact: bool,
}

impl JsonHudWriter {
    fn render_value(&self, value: &impl Serialize, names: &HudFieldNames, depth: usize) -> String {
        if !self.compact {
            let text = serde_json::to_string_pretty(value).unwrap_or_default();
            return text.replace('\n', &format!("\n{}", "  ".repeat(depth)));
        }
        let value = serde_json::to_value(value).unwrap_or_default();
        rename_fields(value, names, true).to_string()
    }

    fn line_start(&self, depth: usize) -> String {
        if self.compact { String::new() } else { format!("\n{}", "  ".repeat(depth)) }
    }

    fn field_name(&self, name: &str, short: &str) -> String {
        if self.compact { format!("\"{short}\":") } else { format!("\"{name}\": ") }
    }

    fn render_field(
        &self,
        (name, short): (&str, &str),
        value: &impl Serialize,
        names: &HudFieldNames,
        depth: usize,
    ) -> String {
        format!(
            "{}{}{}",
            self.line_start(depth),
            self.field_name(name, short),
            self.render_value(value, names, depth)
        )
    }

    fn open_field(&self, (name, short): (&str, &str), bracket: char, depth: usize) -> String {
        format!("{}{}{bracket}", self.line_start(depth), self.field_name(name, short))
    }
}

impl HudWriter for JsonHudWriter {
    fn shared_section(&self, hud: &Hud) -> String {
        let Object(top) = &HUD_NAMES else { return String::new() };
        let system = self.render_field(("system", "sys"), &hud.system, top[0].2, 1);
        let meta = self.render_field(("meta", "m"), &hud.meta, &META_NAMES, 1);
        let legend =
            if self.compact { format!("\"{LEGEND_KEY}\":\"{}\",", *LEGEND_TEXT) } else { String::new() };
        format!("{{{legend}{system},{meta},")
    }

    fn identity(&self, hud: &Hud) -> String {
        let Object(own) = &SELF_NAMES else { return String::new() };
        let identity = self.render_field(("identity", "id"), &hud.me.identity, own[0].2, 2);
        let knowledge = self.open_field(("knowledge", "k"), '{', 2);
        format!("{}{identity},{knowledge}", self.open_field(("self", "me"), '{', 1))
    }

    fn knowledge_entries(&self, knowledge: &Map<String, Value>) -> Vec<String> {
        let entry = |(n, (name, value)): (usize, (&String, &Value))| {
            let name = serde_json::to_string(name).unwrap_or_default();
            let gap = if self.compact { ":" } else { ": " };
            let comma = if n == 0 { "" } else { "," };
            format!("{comma}{}{name}{gap}{}", self.line_start(3), self.render_value(value, &Opaque, 3))
        };
        knowledge.iter().enumerate().map(entry).collect()
    }

    fn memory_usage(&self, hud: &Hud) -> String {
        let close = if hud.me.knowledge.is_empty() { String::new() } else { self.line_start(2) };
        let used = self.render_field(("memory_used", "mu"), &hud.me.memory_used, &Opaque, 2);
        let notice = hud
            .me
            .notice
            .as_ref()
            .map(|notice| self.render_field(("notice", "no"), notice, &Opaque, 2) + ",");
        let recent = self.open_field(("recent_actions", "ra"), '[', 2);
        format!("{close}}},{used},{}{recent}", notice.unwrap_or_default())
    }

    fn recent_action(&self, action: &Map<String, Value>) -> String {
        format!("{}{}", self.line_start(3), self.render_value(action, &ACTION_NAMES, 3))
    }

    fn action_separator(&self) -> &'static str {
        ","
    }

    fn rooms_header(&self, hud: &Hud) -> String {
        let close = if hud.me.recent_actions.is_empty() { String::new() } else { self.line_start(2) };
        format!("{close}]{}}},{}", self.line_start(1), self.open_field(("rooms", "r"), '[', 1))
    }

    fn room_header(&self, hud: &Hud, index: usize) -> String {
        let room = &hud.rooms[index];
        let fields = [
            self.render_field(("id", "id"), &room.id, &Opaque, 3),
            self.render_field(("you", "y"), &room.you, &Opaque, 3),
            self.render_field(("is_self_room", "own"), &room.is_self_room, &Opaque, 3),
            self.render_field(("members", "mem"), &room.members, &Opaque, 3),
            self.render_field(("attention_pct", "att"), &room.attention_pct, &Opaque, 3),
        ];
        format!("{}{{{},", self.line_start(2), fields.join(","))
    }

    fn room_pace(&self, hud: &Hud, index: usize) -> String {
        let room = &hud.rooms[index];
        let since = self.render_field(("time_since_last", "ago"), &room.time_since_last, &Opaque, 3);
        format!("{since},{},", self.render_field(("word_budget", "wb"), &room.word_budget, &Opaque, 3))
    }

    fn messages_header(&self, hud: &Hud, index: usize, _: usize) -> String {
        let room = &hud.rooms[index];
        let Object(names) = &ROOM_NAMES else { return String::new() };
        let mut text = String::new();
        if let Some(billboard) = &room.billboard {
            text += &(self.render_field(("billboard", "bb"), billboard, &Opaque, 3) + ",");
        }
        if let Some(keys) = &room.my_keys {
            text += &(self.render_field(("my_keys", "ky"), keys, &Opaque, 3) + ",");
        }
        if let Some(requests) = &room.pending_access_requests {
            text += &(self.render_field(("pending_access_requests", "req"), requests, names[9].2, 3) + ",");
        }
        text + &self.open_field(("messages", "msg"), '[', 3)
    }

    fn message_row(&self, message: &HudMessage) -> String {
        format!("{}{}", self.line_start(4), self.render_value(message, &MESSAGE_NAMES, 4))
    }

    fn message_separator(&self) -> &'static str {
        ","
    }

    fn room_footer(&self, hud: &Hud, index: usize, messages: usize) -> String {
        let close = if messages == 0 { String::new() } else { self.line_start(3) };
        let comma = if index + 1 < hud.rooms.len() { "," } else { "" };
        format!("{close}]{}}}{comma}", self.line_start(2))
    }

    fn footer(&self, hud: &Hud) -> String {
        let close = if hud.rooms.is_empty() { String::new() } else { self.line_start(1) };
        format!("{close}]{}}}", self.line_start(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn check_unique_names(names: &HudFieldNames, count: &mut usize) {
        match names {
            Opaque => {}
            Object(entries) => {
                let long: BTreeSet<_> = entries.iter().map(|(long, _, _)| long).collect();
                let short: BTreeSet<_> = entries.iter().map(|(_, short, _)| short).collect();
                assert_eq!((long.len(), short.len()), (entries.len(), entries.len()), "{long:?} {short:?}");
                *count += entries.len();
                entries.iter().for_each(|(_, _, below)| check_unique_names(below, count));
            }
            List(below) | AnyKey(below) => check_unique_names(below, count),
        }
    }

    #[test]
    fn compact_json_names_are_unique_in_each_object() {
        let mut count = 0;
        check_unique_names(&HUD_NAMES, &mut count);
        assert!(count >= 60, "{count}");
    }

    /// A short name that is the long name of another field would be expanded wrongly.
    #[test]
    fn compact_json_action_names_are_unambiguous() {
        let Object(entries) = &ACTION_NAMES else { unreachable!() };
        let long: BTreeSet<_> = entries.iter().map(|(long, _, _)| *long).collect();
        let unnamed = ["w", "wpm"];
        for (long_name, short, _) in *entries {
            assert!(long_name == short || !long.contains(short), "{short}");
            assert!(!unnamed.contains(short), "{short}");
        }
    }
}
