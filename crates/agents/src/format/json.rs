//! JSON, as everybody knows it, and with short names.

use super::Writer;
use crate::hud::{Hud, MessageView};
use serde::Serialize;
use serde_json::{Map, Value};
use std::sync::LazyLock;

/// The names of an object's fields, long and short, and what is below them.
enum Names {
    /// Nothing that has names, or names that are not ours.
    Free,
    /// An object.
    Of(&'static [(&'static str, &'static str, &'static Names)]),
    /// A list, each entry of which is so.
    Each(&'static Names),
    /// An object whose names are not ours, and what is below all of them.
    Any(&'static Names),
}

use Names::{Any, Each, Free, Of};

static HUD: Names = Of(&[
    ("system", "sys", &Of(&[("directives", "dir", &Free)])),
    ("meta", "m", &META),
    ("self", "me", &SELF),
    ("rooms", "r", &Each(&ROOM)),
]);

static META: Names = Of(&[
    ("instructions", "ins", &Free),
    // What an action is made of is what agents answer with: its names stay.
    ("available_actions", "act", &Any(&Of(&[("_description", "d", &Free), ("actions", "a", &Free)]))),
    (
        "response_format",
        "fmt",
        &Of(&[
            ("type", "t", &Free),
            ("description", "d", &Free),
            ("instructions", "ins", &Free),
            ("example", "ex", &Free),
        ]),
    ),
]);

static SELF: Names = Of(&[
    (
        "identity",
        "id",
        &Of(&[
            ("id", "id", &Free),
            ("name", "n", &Free),
            ("model", "md", &Free),
            ("seed", "sd", &Free),
            ("role", "rl", &Free),
        ]),
    ),
    // What is in there is the agent's.
    ("knowledge", "k", &Free),
    ("memory_used", "mu", &Free),
    ("notice", "no", &Free),
    ("recent_actions", "ra", &Each(&ACTION)),
]);

static ACTION: Names = Of(&[
    ("type", "t", &Free),
    ("timestamp", "ts", &Free),
    ("refused", "x", &Free),
    ("path", "p", &Free),
    ("value", "v", &Free),
    ("message_id", "mi", &Free),
    ("reaction", "rx", &Free),
    ("agent_id", "ai", &Free),
    ("room_id", "ri", &Free),
    ("message", "c", &Free),
    ("request_id", "qi", &Free),
    ("background_prompt", "bp", &Free),
    ("agent_type", "at", &Free),
    ("in_room_id", "ir", &Free),
    ("until", "u", &Free),
    ("name", "n", &Free),
    ("model", "md", &Free),
    ("key", "ky", &Free),
]);

static ROOM: Names = Of(&[
    ("id", "id", &Free),
    ("you", "y", &Free),
    ("is_self_room", "own", &Free),
    ("members", "mem", &Free),
    ("attention_pct", "att", &Free),
    ("time_since_last", "ago", &Free),
    ("word_budget", "wb", &Free),
    ("billboard", "bb", &Free),
    ("my_keys", "ky", &Free),
    (
        "pending_access_requests",
        "req",
        &Each(&Of(&[("id", "id", &Free), ("requester_id", "by", &Free), ("key_used", "ky", &Free)])),
    ),
    ("messages", "msg", &Each(&MESSAGE)),
]);

static MESSAGE: Names = Of(&[
    ("id", "id", &Free),
    ("timestamp", "ts", &Free),
    ("sender", "s", &Free),
    ("content", "c", &Free),
    ("type", "t", &Free),
    ("reply_to", "re", &Free),
    (
        "reactions",
        "rx",
        &Of(&[
            ("thumbs_up", "up", &Free),
            ("thumbs_down", "dn", &Free),
            ("brain", "br", &Free),
            ("heart", "he", &Free),
        ]),
    ),
]);

/// Gives everything its other name.
fn renamed(value: Value, names: &Names, short: bool) -> Value {
    match (value, names) {
        (Value::Object(fields), Of(known)) => {
            let other = |name: String, value: Value| {
                let found =
                    known.iter().find(|(long, brief, _)| if short { *long == name } else { *brief == name });
                match found {
                    Some((long, brief, below)) => {
                        ((if short { *brief } else { *long }).to_owned(), renamed(value, below, short))
                    }
                    None => (name, value),
                }
            };
            Value::Object(fields.into_iter().map(|(name, value)| other(name, value)).collect())
        }
        (Value::Object(fields), Any(below)) => Value::Object(
            fields.into_iter().map(|(name, value)| (name, renamed(value, below, short))).collect(),
        ),
        (Value::Array(items), Each(below)) => {
            Value::Array(items.into_iter().map(|item| renamed(item, below, short)).collect())
        }
        (value, _) => value,
    }
}

/// A HUD with its long names.
pub(super) fn long(mut value: Value) -> Value {
    if let Some(fields) = value.as_object_mut() {
        fields.remove(LEGEND);
    }
    renamed(value, &HUD, false)
}

/// Where it is told what short names stand for.
const LEGEND: &str = "names";

/// What short names stand for: instructions speak of the long ones.
static NAMES: LazyLock<String> = LazyLock::new(|| {
    fn collect(names: &Names, all: &mut Vec<String>) {
        match names {
            Free => {}
            Each(below) | Any(below) => collect(below, all),
            Of(known) => {
                for (long, short, below) in *known {
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
    collect(&HUD, &mut all);
    all.join(" ")
});

pub(super) struct Json {
    pub(super) compact: bool,
}

impl Json {
    /// A value with the names it has here, so deep in the text.
    fn value(&self, value: &impl Serialize, names: &Names, depth: usize) -> String {
        if !self.compact {
            let text = serde_json::to_string_pretty(value).unwrap_or_default();
            return text.replace('\n', &format!("\n{}", "  ".repeat(depth)));
        }
        let value = serde_json::to_value(value).unwrap_or_default();
        renamed(value, names, true).to_string()
    }

    /// A line's beginning, so deep in the text.
    fn line(&self, depth: usize) -> String {
        if self.compact { String::new() } else { format!("\n{}", "  ".repeat(depth)) }
    }

    /// A name, and what divides it from its value.
    fn name(&self, name: &str, short: &str) -> String {
        if self.compact { format!("\"{short}\":") } else { format!("\"{name}\": ") }
    }

    fn field(
        &self,
        (name, short): (&str, &str),
        value: &impl Serialize,
        names: &Names,
        depth: usize,
    ) -> String {
        format!("{}{}{}", self.line(depth), self.name(name, short), self.value(value, names, depth))
    }

    fn open(&self, (name, short): (&str, &str), bracket: char, depth: usize) -> String {
        format!("{}{}{bracket}", self.line(depth), self.name(name, short))
    }
}

impl Writer for Json {
    fn shared(&self, hud: &Hud) -> String {
        let Of(top) = &HUD else { return String::new() };
        let system = self.field(("system", "sys"), &hud.system, top[0].2, 1);
        let meta = self.field(("meta", "m"), &hud.meta, &META, 1);
        let legend = if self.compact { format!("\"{LEGEND}\":\"{}\",", *NAMES) } else { String::new() };
        format!("{{{legend}{system},{meta},")
    }

    fn identity(&self, hud: &Hud) -> String {
        let Of(own) = &SELF else { return String::new() };
        let identity = self.field(("identity", "id"), &hud.me.identity, own[0].2, 2);
        let knowledge = self.open(("knowledge", "k"), '{', 2);
        format!("{}{identity},{knowledge}", self.open(("self", "me"), '{', 1))
    }

    fn known(&self, known: &Map<String, Value>) -> Vec<String> {
        let one = |(n, (name, value)): (usize, (&String, &Value))| {
            let name = serde_json::to_string(name).unwrap_or_default();
            let gap = if self.compact { ":" } else { ": " };
            let comma = if n == 0 { "" } else { "," };
            format!("{comma}{}{name}{gap}{}", self.line(3), self.value(value, &Free, 3))
        };
        known.iter().enumerate().map(one).collect()
    }

    fn used(&self, hud: &Hud) -> String {
        let close = if hud.me.knowledge.is_empty() { String::new() } else { self.line(2) };
        let used = self.field(("memory_used", "mu"), &hud.me.memory_used, &Free, 2);
        let notice =
            hud.me.notice.as_ref().map(|notice| self.field(("notice", "no"), notice, &Free, 2) + ",");
        let recent = self.open(("recent_actions", "ra"), '[', 2);
        format!("{close}}},{used},{}{recent}", notice.unwrap_or_default())
    }

    fn did(&self, action: &Map<String, Value>) -> String {
        format!("{}{}", self.line(3), self.value(action, &ACTION, 3))
    }

    fn between_actions(&self) -> &'static str {
        ","
    }

    fn to_rooms(&self, hud: &Hud) -> String {
        let close = if hud.me.recent_actions.is_empty() { String::new() } else { self.line(2) };
        format!("{close}]{}}},{}", self.line(1), self.open(("rooms", "r"), '[', 1))
    }

    fn room(&self, hud: &Hud, number: usize) -> String {
        let room = &hud.rooms[number];
        let fields = [
            self.field(("id", "id"), &room.id, &Free, 3),
            self.field(("you", "y"), &room.you, &Free, 3),
            self.field(("is_self_room", "own"), &room.is_self_room, &Free, 3),
            self.field(("members", "mem"), &room.members, &Free, 3),
            self.field(("attention_pct", "att"), &room.attention_pct, &Free, 3),
        ];
        format!("{}{{{},", self.line(2), fields.join(","))
    }

    fn pace(&self, hud: &Hud, number: usize) -> String {
        let room = &hud.rooms[number];
        let since = self.field(("time_since_last", "ago"), &room.time_since_last, &Free, 3);
        format!("{since},{},", self.field(("word_budget", "wb"), &room.word_budget, &Free, 3))
    }

    fn board(&self, hud: &Hud, number: usize, _: usize) -> String {
        let room = &hud.rooms[number];
        let Of(names) = &ROOM else { return String::new() };
        let mut text = String::new();
        if let Some(billboard) = &room.billboard {
            text += &(self.field(("billboard", "bb"), billboard, &Free, 3) + ",");
        }
        if let Some(keys) = &room.my_keys {
            text += &(self.field(("my_keys", "ky"), keys, &Free, 3) + ",");
        }
        if let Some(requests) = &room.pending_access_requests {
            text += &(self.field(("pending_access_requests", "req"), requests, names[9].2, 3) + ",");
        }
        text + &self.open(("messages", "msg"), '[', 3)
    }

    fn message(&self, message: &MessageView) -> String {
        format!("{}{}", self.line(4), self.value(message, &MESSAGE, 4))
    }

    fn between_messages(&self) -> &'static str {
        ","
    }

    fn room_end(&self, hud: &Hud, number: usize, messages: usize) -> String {
        let close = if messages == 0 { String::new() } else { self.line(3) };
        let comma = if number + 1 < hud.rooms.len() { "," } else { "" };
        format!("{close}]{}}}{comma}", self.line(2))
    }

    fn end(&self, hud: &Hud) -> String {
        let close = if hud.rooms.is_empty() { String::new() } else { self.line(1) };
        format!("{close}]{}}}", self.line(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn look(names: &Names, count: &mut usize) {
        match names {
            Free => {}
            Of(known) => {
                let long: BTreeSet<_> = known.iter().map(|(long, _, _)| long).collect();
                let short: BTreeSet<_> = known.iter().map(|(_, short, _)| short).collect();
                assert_eq!((long.len(), short.len()), (known.len(), known.len()), "{long:?} {short:?}");
                *count += known.len();
                known.iter().for_each(|(_, _, below)| look(below, count));
            }
            Each(below) | Any(below) => look(below, count),
        }
    }

    /// Nothing can be taken for something else when it is read back.
    #[test]
    fn no_two_fields_of_an_object_share_a_name() {
        let mut count = 0;
        look(&HUD, &mut count);
        assert!(count >= 60, "{count}");
    }

    /// A short name that is somebody's long one would be read back as the other.
    #[test]
    fn an_action_has_no_field_that_is_called_as_another_is_in_short() {
        let Of(known) = &ACTION else { unreachable!() };
        let long: BTreeSet<_> = known.iter().map(|(long, _, _)| *long).collect();
        let unnamed = ["w", "wpm"];
        for (long_name, short, _) in *known {
            assert!(long_name == short || !long.contains(short), "{short}");
            assert!(!unnamed.contains(short), "{short}");
        }
    }
}
