//! The knowledge of an agent: a tree of JSON values that it reads and writes by paths such as `people.'Dr. No'.trust` or
//! `goals[0]`. Nothing else of an agent's own survives a heartbeat.

use crate::error::Error;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Number, Value};

/// Levels of the tree.
const MAX_DEPTH: usize = 32;

/// Characters of an entry's name.
const MAX_NAME_CHARS: usize = 200;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AgentKnowledge(Map<String, Value>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum PathStep {
    /// A field of an object, or a number that indexes a list.
    Name(String),
    /// An index of a list; negative numbers count from its end.
    Index(i64),
}

fn parse_path(path: &str) -> Result<Vec<PathStep>, Error> {
    let invalid = |reason: &str| {
        Error::invalid_input(format!(
            "'{path}' is not a path: {reason}; write one such as people.Alice.trust, people.'Dr. No' or goals[0]"
        ))
    };
    let mut steps = Vec::new();
    let mut rest = path.trim();
    if rest.is_empty() {
        return Err(invalid("it is empty"));
    }
    loop {
        if let Some(inner) = rest.strip_prefix('[') {
            let end = inner.find(']').ok_or_else(|| invalid("a bracket is not closed"))?;
            let index =
                inner[..end].trim().parse().map_err(|_| invalid("there is no number in the brackets"))?;
            steps.push(PathStep::Index(index));
            rest = &inner[end + 1..];
        } else if rest.starts_with('"') {
            let mut read = serde_json::Deserializer::from_str(rest).into_iter::<String>();
            let name = read.next().and_then(Result::ok).ok_or_else(|| invalid("a quote is not closed"))?;
            rest = &rest[read.byte_offset()..];
            steps.push(PathStep::Name(name));
        } else if let Some(inner) = rest.strip_prefix('\'') {
            let (name, after) = split_single_quoted(inner).ok_or_else(|| invalid("a quote is not closed"))?;
            steps.push(PathStep::Name(name));
            rest = after;
        } else {
            let end = rest.find(['.', '[', '"', ']']).unwrap_or(rest.len());
            let name = rest[..end].trim();
            if name.is_empty() {
                return Err(invalid("a step of it is empty"));
            }
            steps.push(PathStep::Name(name.to_owned()));
            rest = &rest[end..];
        }
        if steps.len() > MAX_DEPTH {
            return Err(invalid("it is too deep"));
        }
        if let Some(PathStep::Name(name)) = steps.last()
            && name.chars().count() > MAX_NAME_CHARS
        {
            return Err(invalid("a name in it is too long"));
        }
        match rest.chars().next() {
            None => return Ok(steps),
            Some('.') => rest = &rest[1..],
            Some('[') => {}
            Some(_) => return Err(invalid("steps are divided by dots")),
        }
        if rest.is_empty() {
            return Err(invalid("it ends with a dot"));
        }
    }
}

/// The text up to the closing single quote, and what follows it. A backslash escapes a quote or a backslash.
fn split_single_quoted(text: &str) -> Option<(String, &str)> {
    let mut name = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\'' => return Some((name, &text[at + 1..])),
            '\\' if text[at + 1..].starts_with(['\'', '\\']) => name.extend(chars.next().map(|(_, c)| c)),
            c => name.push(c),
        }
    }
    None
}

/// Makes a value survive a round trip through every HUD format: integral floats become integers, and -0.0 becomes 0.
pub fn canonicalize(value: Value) -> Value {
    match value {
        Value::Number(number) => Value::Number(canonical_number(number)),
        Value::Array(items) => Value::Array(items.into_iter().map(canonicalize).collect()),
        Value::Object(fields) => {
            Value::Object(fields.into_iter().map(|(name, value)| (name, canonicalize(value))).collect())
        }
        other => other,
    }
}

fn canonical_number(number: Number) -> Number {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match number.as_f64() {
        Some(float)
            if !number.is_i64() && !number.is_u64() && float.fract() == 0.0 && float.abs() <= EXACT =>
        {
            Number::from(float as i64)
        }
        _ => number,
    }
}

fn value_depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(value_depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(value_depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// The type of a value, for error messages.
fn value_kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Whether a value has the form `{"v": …, "w": 0.9}`.
fn is_weighted(value: &Value) -> bool {
    value.as_object().is_some_and(|fields| {
        fields.len() == 2 && fields.contains_key("v") && fields.get("w").is_some_and(Value::is_number)
    })
}

/// The inner value of a weighted value; any other value itself.
fn unwrap_weighted(value: &mut Value) -> &mut Value {
    if is_weighted(value) {
        value.get_mut("v").unwrap_or_else(|| unreachable!("a weighted value has a 'v'"))
    } else {
        value
    }
}

/// Resolves an index of a list; one past the end is allowed, to append.
fn list_index(list: &[Value], index: i64, path: &str) -> Result<usize, Error> {
    let from_end = index.checked_add(i64::try_from(list.len()).unwrap_or(i64::MAX)).unwrap_or(-1);
    let at = if index < 0 { from_end } else { index };
    usize::try_from(at).ok().filter(|&at| at <= list.len()).ok_or_else(|| {
        Error::not_found(format!(
            "{path}: index {index} is out of range, the list has {} entries",
            list.len()
        ))
    })
}

impl AgentKnowledge {
    #[must_use]
    pub fn entries(&self) -> &Map<String, Value> {
        &self.0
    }

    #[must_use]
    pub fn from_entries(all: Map<String, Value>) -> Self {
        Self(all.into_iter().map(|(name, value)| (name, canonicalize(value))).collect())
    }

    /// The value at a path. Fails only if the path cannot be parsed.
    pub fn get(&self, path: &str) -> Result<Option<Value>, Error> {
        let mut at = Value::Object(self.0.clone());
        for step in parse_path(path)? {
            let inner = unwrap_weighted(&mut at);
            let next = match (inner, step) {
                (Value::Object(fields), PathStep::Name(name)) => fields.get(&name).cloned(),
                (Value::Array(list), PathStep::Index(index)) => {
                    list_index(list, index, path).ok().and_then(|at| list.get(at).cloned())
                }
                (Value::Array(list), PathStep::Name(name)) => {
                    name.parse().ok().and_then(|at: usize| list.get(at).cloned())
                }
                _ => None,
            };
            match next {
                Some(value) => at = value,
                None => return Ok(None),
            }
        }
        Ok(Some(at))
    }

    /// Sets the value at a path, with a weight if one is given, and creates the objects and lists on the way. On an error
    /// nothing has changed.
    pub fn set(&mut self, path: &str, value: Value, weight: Option<f64>) -> Result<(), Error> {
        let inline_weight = value.get("w").filter(|_| is_weighted(&value)).and_then(Value::as_f64);
        if let Some(invalid) = weight.or(inline_weight).filter(|weight| !(0.0..=1.0).contains(weight)) {
            return Err(Error::invalid_input(format!("a weight is between 0.0 and 1.0, not {invalid}")));
        }
        let value = match weight {
            None => canonicalize(value),
            Some(weight) => {
                let weighted = [("v".to_owned(), value), ("w".to_owned(), weight.into())];
                canonicalize(Value::Object(weighted.into_iter().collect()))
            }
        };
        self.update_at(path, |target| {
            *target = value;
            Ok(())
        })
    }

    /// Appends a value to the list at a path, which is created if it is missing. On an error nothing has changed.
    pub fn append(&mut self, path: &str, value: Value) -> Result<(), Error> {
        self.update_at(path, |target| {
            let target = unwrap_weighted(target);
            if target.is_null() {
                *target = Value::Array(Vec::new());
            }
            let kind = value_kind(target);
            let list = target.as_array_mut().ok_or_else(|| {
                Error::invalid_input(format!("{path} is {kind}, not a list: only a list can be appended to"))
            })?;
            list.push(canonicalize(value));
            Ok(())
        })
    }

    /// Deletes and returns the value at a path.
    pub fn delete(&mut self, path: &str) -> Result<Value, Error> {
        let nothing = || Error::not_found(format!("there is nothing at {path}"));
        let steps = parse_path(path)?;
        let (last, parents) = steps.split_last().ok_or_else(nothing)?;
        let mut root = Value::Object(std::mem::take(&mut self.0));
        let deleted = (|| {
            let mut at = &mut root;
            for step in parents {
                at = match (unwrap_weighted(at), step) {
                    (Value::Object(fields), PathStep::Name(name)) => {
                        fields.get_mut(name).ok_or_else(nothing)?
                    }
                    (Value::Array(list), PathStep::Index(index)) => {
                        let at = list_index(list, *index, path)?;
                        list.get_mut(at).ok_or_else(nothing)?
                    }
                    (Value::Array(list), PathStep::Name(name)) => {
                        let at: usize = name.parse().map_err(|_| nothing())?;
                        list.get_mut(at).ok_or_else(nothing)?
                    }
                    _ => return Err(nothing()),
                };
            }
            // A weighted value is deleted with its weight.
            if is_weighted(at) && matches!(last, PathStep::Name(name) if name == "v" || name == "w") {
                return Err(Error::invalid_input(format!(
                    "{path} is part of a weighted value: delete the whole value"
                )));
            }
            match (unwrap_weighted(at), last) {
                (Value::Object(fields), PathStep::Name(name)) => {
                    fields.shift_remove(name).ok_or_else(nothing)
                }
                (Value::Array(list), step) => {
                    let at = match step {
                        PathStep::Index(index) => list_index(list, *index, path)?,
                        PathStep::Name(name) => name.parse().map_err(|_| nothing())?,
                    };
                    if at < list.len() { Ok(list.remove(at)) } else { Err(nothing()) }
                }
                _ => Err(nothing()),
            }
        })();
        if let Value::Object(fields) = root {
            self.0 = fields;
        }
        deleted
    }

    /// Changes the value at a path, creating the way to it; on an error the tree is unchanged.
    fn update_at(
        &mut self,
        path: &str,
        change: impl FnOnce(&mut Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let steps = parse_path(path)?;
        let mut root = Value::Object(self.0.clone());
        let mut at = &mut root;
        for (n, step) in steps.iter().enumerate() {
            let parent =
                || if n == 0 { "the root".to_owned() } else { format!("the value at step {n} of {path}") };
            let inner = unwrap_weighted(at);
            if inner.is_null() {
                *inner = match step {
                    PathStep::Name(_) => Value::Object(Map::new()),
                    PathStep::Index(_) => Value::Array(Vec::new()),
                };
            }
            at = match (inner, step) {
                (Value::Object(fields), PathStep::Name(name)) => {
                    fields.entry(name.clone()).or_insert(Value::Null)
                }
                (Value::Array(list), step) => {
                    let index = match step {
                        PathStep::Index(index) => *index,
                        PathStep::Name(name) => name.parse().map_err(|_| {
                            Error::invalid_input(format!(
                                "{} is a list, and '{name}' is not an index",
                                parent()
                            ))
                        })?,
                    };
                    let at = list_index(list, index, path)?;
                    if at == list.len() {
                        list.push(Value::Null);
                    }
                    &mut list[at]
                }
                (other, _) => {
                    return Err(Error::invalid_input(format!(
                        "{} is {} and has no fields: delete it first",
                        parent(),
                        value_kind(other)
                    )));
                }
            };
        }
        change(at)?;
        if value_depth(&root) > MAX_DEPTH {
            return Err(Error::invalid_input(format!("{path}: knowledge has {MAX_DEPTH} levels at most")));
        }
        if let Value::Object(fields) = root {
            self.0 = fields;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn from_json(value: &Value) -> AgentKnowledge {
        AgentKnowledge::from_entries(value.as_object().cloned().unwrap_or_default())
    }

    #[test]
    fn knowledge_paths_reach_objects_lists_and_quoted_names() {
        let mut knowledge = AgentKnowledge::default();
        knowledge.set("people.Bob.trust", json!(0.8), None).expect("new");
        knowledge.set(r#"people."Dr. No".notes"#, json!("islands, \"quotes\""), None).expect("quoted");
        knowledge.append("goals", json!("learn")).expect("a new list");
        knowledge.append("goals", json!("teach")).expect("a list");
        knowledge.set("goals[0]", json!("listen"), None).expect("there");
        knowledge.set("goals[2]", json!("rest"), None).expect("its end");
        knowledge.set("goals.-1", json!("x"), None).expect("from its end, as a name");
        assert_eq!(
            Value::Object(knowledge.entries().clone()),
            json!({
                "people": {"Bob": {"trust": 0.8}, "Dr. No": {"notes": "islands, \"quotes\""}},
                "goals": ["listen", "teach", "x"],
            })
        );
        assert_eq!(knowledge.get("goals[-1]"), Ok(Some(json!("x"))));
        assert_eq!(knowledge.get("goals[7]"), Ok(None));
        assert_eq!(knowledge.delete("goals[0]"), Ok(json!("listen")));
        assert_eq!(knowledge.delete("people.Bob"), Ok(json!({"trust": 0.8})));
        assert_eq!(knowledge.get("goals"), Ok(Some(json!(["teach", "x"]))));
    }

    /// Agents write either kind of quotes; an apostrophe within a name is no quote.
    #[test]
    fn knowledge_paths_take_both_kinds_of_quotes() {
        let cases = [
            ("people.'Dr. No'.trust", json!({"people": {"Dr. No": {"trust": 1}}})),
            (r#"people."Dr. No".trust"#, json!({"people": {"Dr. No": {"trust": 1}}})),
            ("'a.b'", json!({"a.b": 1})),
            ("'a.b'[0]", json!({"a.b": [1]})),
            (r"'it\'s'.x", json!({"it's": {"x": 1}})),
            (r"'a\\'.x", json!({"a\\": {"x": 1}})),
            (r"'a\n'", json!({"a\\n": 1})),
            ("'say \"no\"'.x", json!({"say \"no\"": {"x": 1}})),
            (r#""it's".x"#, json!({"it's": {"x": 1}})),
            ("people.Bob's.trust", json!({"people": {"Bob's": {"trust": 1}}})),
            ("''.x", json!({"": {"x": 1}})),
        ];
        for (path, expected) in cases {
            let mut knowledge = AgentKnowledge::default();
            knowledge.set(path, json!(1), None).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert_eq!(Value::Object(knowledge.entries().clone()), expected, "{path}");
            assert_eq!(knowledge.get(path), Ok(Some(json!(1))), "{path}");
            assert_eq!(knowledge.delete(path), Ok(json!(1)), "{path}");
        }
    }

    #[test]
    fn knowledge_values_carry_weights() {
        let mut knowledge = AgentKnowledge::default();
        knowledge.set("people.Alice.trust", json!(0.8), Some(0.9)).expect("weighted");
        assert_eq!(knowledge.get("people.Alice.trust"), Ok(Some(json!({"v": 0.8, "w": 0.9}))));
        knowledge.set("notes", json!({"v": {"a": 1}, "w": 0.5}), None).expect("weighted by itself");
        knowledge.set("notes.b", json!(2), None).expect("within it");
        assert_eq!(knowledge.get("notes"), Ok(Some(json!({"v": {"a": 1, "b": 2}, "w": 0.5}))));
        knowledge.set("seen", json!({"v": [], "w": 1.0}), None).expect("a list with a weight");
        assert!(
            knowledge
                .set("seen", json!({"v": 1, "w": 7}), None)
                .is_err_and(|error| error.message.contains("between 0.0 and 1.0"))
        );
        knowledge.append("seen", json!("sea")).expect("within it");
        assert_eq!(knowledge.get("seen"), Ok(Some(json!({"v": ["sea"], "w": 1}))));
        assert!(knowledge.set("x", json!(1), Some(1.5)).is_err());
        assert!(knowledge.delete("notes.w").is_err());
    }

    #[test]
    fn knowledge_rejects_invalid_paths_unchanged() {
        let start = json!({"mood": "calm", "goals": ["a"]});
        let mut knowledge = from_json(&start);
        for (path, part) in [
            ("", "it is empty"),
            ("a..b", "a step of it is empty"),
            ("a.", "it ends with a dot"),
            ("a[", "a bracket is not closed"),
            ("a[x]", "no number in the brackets"),
            (r#""a"#, "a quote is not closed"),
            ("'a.b", "a quote is not closed"),
            (r"'a\'", "a quote is not closed"),
            ("'a'b", "divided by dots"),
            (r#"a"b""#, "divided by dots"),
            ("mood.today", "has no fields"),
            ("goals.first", "is not an index"),
            ("goals[5]", "index 5 is out of range"),
        ] {
            let error = knowledge.set(path, json!(1), None).expect_err(path);
            assert!(error.message.contains(part), "{path}: {error}");
        }
        let deep = vec!["a"; 33].join(".");
        assert!(knowledge.set(&deep, json!(1), None).is_err());
        let deep = vec!["a"; 30].join(".");
        assert!(knowledge.set(&deep, json!([[[1]]]), None).is_err());
        assert!(knowledge.append("mood", json!(1)).expect_err("no list").message.contains("not a list"));
        assert!(knowledge.delete("nowhere").expect_err("nothing").message.contains("nothing at nowhere"));
        assert_eq!(Value::Object(knowledge.entries().clone()), start);
    }

    #[test]
    fn knowledge_numbers_are_canonical() {
        let mut knowledge = AgentKnowledge::default();
        knowledge
            .set("n", json!([1.0, -0.0, 2.5, 1e300, 12_345_678_901_234_567_890_u64]), None)
            .expect("numbers");
        assert_eq!(knowledge.get("n"), Ok(Some(json!([1, 0, 2.5, 1e300, 12_345_678_901_234_567_890_u64]))));
    }
}
