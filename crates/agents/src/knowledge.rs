//! What an agent has written down: the only thing that it remembers from one heartbeat to the next. A tree of values, reached
//! by paths such as `people."Dr. No".trust` or `goals[0]`.

use crate::format::{self, Format};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Number, Value};

/// How deep a tree may be.
const DEEPEST: usize = 32;

/// The longest name of an entry, in characters.
const LONGEST_NAME: usize = 200;

/// What an agent has written down.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Knowledge(Map<String, Value>);

/// One step of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// An entry of an object, or of a list where it is a number.
    Name(String),
    /// An entry of a list; negative ones count from its end.
    Index(i64),
}

/// The steps of a path.
fn steps(path: &str) -> Result<Vec<Step>, String> {
    let wrong = |why: &str| {
        format!(
            "'{path}' is no path: {why}; write one such as people.Alice.trust, people.\"Dr. No\" or goals[0]"
        )
    };
    let mut steps = Vec::new();
    let mut rest = path.trim();
    if rest.is_empty() {
        return Err(wrong("it is empty"));
    }
    loop {
        if let Some(inner) = rest.strip_prefix('[') {
            let end = inner.find(']').ok_or_else(|| wrong("a bracket is not closed"))?;
            let index =
                inner[..end].trim().parse().map_err(|_| wrong("there is no number in the brackets"))?;
            steps.push(Step::Index(index));
            rest = &inner[end + 1..];
        } else if rest.starts_with('"') {
            let mut read = serde_json::Deserializer::from_str(rest).into_iter::<String>();
            let name = read.next().and_then(Result::ok).ok_or_else(|| wrong("a quote is not closed"))?;
            rest = &rest[read.byte_offset()..];
            steps.push(Step::Name(name));
        } else {
            let end = rest.find(['.', '[', '"', ']']).unwrap_or(rest.len());
            let name = rest[..end].trim();
            if name.is_empty() {
                return Err(wrong("a step of it is empty"));
            }
            steps.push(Step::Name(name.to_owned()));
            rest = &rest[end..];
        }
        if steps.len() > DEEPEST {
            return Err(wrong("it is too deep"));
        }
        if let Some(Step::Name(name)) = steps.last()
            && name.chars().count() > LONGEST_NAME
        {
            return Err(wrong("a name in it is too long"));
        }
        match rest.chars().next() {
            None => return Ok(steps),
            Some('.') => rest = &rest[1..],
            Some('[') => {}
            Some(_) => return Err(wrong("steps are divided by dots")),
        }
        if rest.is_empty() {
            return Err(wrong("it ends with a dot"));
        }
    }
}

/// A value as every format can write it and read it back: numbers that are whole are written as such, and there is no
/// negative nothing.
pub fn canonical(value: Value) -> Value {
    match value {
        Value::Number(number) => Value::Number(plain(number)),
        Value::Array(items) => Value::Array(items.into_iter().map(canonical).collect()),
        Value::Object(fields) => {
            Value::Object(fields.into_iter().map(|(name, value)| (name, canonical(value))).collect())
        }
        other => other,
    }
}

fn plain(number: Number) -> Number {
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

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// What kind of thing a value is, for a reason why something cannot be.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a yes or no",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Whether a value carries its weight with it: `{"v": …, "w": 0.9}`.
fn is_weighted(value: &Value) -> bool {
    value.as_object().is_some_and(|fields| {
        fields.len() == 2 && fields.contains_key("v") && fields.get("w").is_some_and(Value::is_number)
    })
}

/// What is in a value that carries its weight; others as they are.
fn inside(value: &mut Value) -> &mut Value {
    if is_weighted(value) { value.get_mut("v").unwrap_or_else(|| unreachable!("it was seen")) } else { value }
}

fn place(list: &[Value], index: i64, path: &str) -> Result<usize, String> {
    let from_end = index.checked_add(i64::try_from(list.len()).unwrap_or(i64::MAX)).unwrap_or(-1);
    let at = if index < 0 { from_end } else { index };
    usize::try_from(at)
        .ok()
        .filter(|&at| at <= list.len())
        .ok_or_else(|| format!("{path}: the list has {} entries, so there is no place {index}", list.len()))
}

impl Knowledge {
    /// Everything.
    #[must_use]
    pub fn all(&self) -> &Map<String, Value> {
        &self.0
    }

    /// What was written down elsewhere, as it can be kept here.
    #[must_use]
    pub fn of(all: Map<String, Value>) -> Self {
        Self(all.into_iter().map(|(name, value)| (name, canonical(value))).collect())
    }

    /// How long it is as an agent sees it, in its format.
    #[must_use]
    pub fn written(&self, format: Format, count: impl Fn(&str) -> usize) -> usize {
        format::writer(format).known(&self.0).iter().map(|entry| count(entry)).sum()
    }

    /// What stands at a path.
    ///
    /// # Errors
    /// When it is no path.
    pub fn get(&self, path: &str) -> Result<Option<Value>, String> {
        let mut at = Value::Object(self.0.clone());
        for step in steps(path)? {
            let inner = inside(&mut at);
            let next = match (inner, step) {
                (Value::Object(fields), Step::Name(name)) => fields.get(&name).cloned(),
                (Value::Array(list), Step::Index(index)) => {
                    place(list, index, path).ok().and_then(|at| list.get(at).cloned())
                }
                (Value::Array(list), Step::Name(name)) => {
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

    /// Writes a value at a path, with a weight if there is one; what is on the way and missing is made.
    ///
    /// # Errors
    /// In words, when it cannot be there: nothing has changed then, here and below.
    pub fn set(&mut self, path: &str, value: Value, weight: Option<f64>) -> Result<(), String> {
        // A value may carry its weight with it.
        let carried = value.get("w").filter(|_| is_weighted(&value)).and_then(Value::as_f64);
        if let Some(wrong) = weight.or(carried).filter(|weight| !(0.0..=1.0).contains(weight)) {
            return Err(format!("a weight is between 0.0 and 1.0, and {wrong} is not"));
        }
        let value = match weight {
            None => canonical(value),
            Some(weight) => {
                let weighted = [("v".to_owned(), value), ("w".to_owned(), weight.into())];
                canonical(Value::Object(weighted.into_iter().collect()))
            }
        };
        self.change(path, |place| {
            *place = value;
            Ok(())
        })
    }

    /// Writes a value at the end of the list at a path, which is made where there is none.
    ///
    /// # Errors
    /// As above.
    pub fn append(&mut self, path: &str, value: Value) -> Result<(), String> {
        self.change(path, |place| {
            let place = inside(place);
            if place.is_null() {
                *place = Value::Array(Vec::new());
            }
            let kind = kind(place);
            let list = place.as_array_mut().ok_or_else(|| {
                format!("{path} is {kind} and not a list, so nothing can be appended to it")
            })?;
            list.push(canonical(value));
            Ok(())
        })
    }

    /// Takes away what stands at a path. Returns it.
    ///
    /// # Errors
    /// As above; also when nothing is there.
    pub fn delete(&mut self, path: &str) -> Result<Value, String> {
        let nothing = || format!("there is nothing at {path}");
        let steps = steps(path)?;
        let (last, way) = steps.split_last().ok_or_else(nothing)?;
        let mut root = Value::Object(std::mem::take(&mut self.0));
        let taken = (|| {
            let mut at = &mut root;
            for step in way {
                at = match (inside(at), step) {
                    (Value::Object(fields), Step::Name(name)) => fields.get_mut(name).ok_or_else(nothing)?,
                    (Value::Array(list), Step::Index(index)) => {
                        let at = place(list, *index, path)?;
                        list.get_mut(at).ok_or_else(nothing)?
                    }
                    (Value::Array(list), Step::Name(name)) => {
                        let at: usize = name.parse().map_err(|_| nothing())?;
                        list.get_mut(at).ok_or_else(nothing)?
                    }
                    _ => return Err(nothing()),
                };
            }
            // What carries its weight goes with it.
            if is_weighted(at) && matches!(last, Step::Name(name) if name == "v" || name == "w") {
                return Err(format!("{path} is a part of a value with its weight: delete the whole of it"));
            }
            match (inside(at), last) {
                (Value::Object(fields), Step::Name(name)) => fields.shift_remove(name).ok_or_else(nothing),
                (Value::Array(list), step) => {
                    let at = match step {
                        Step::Index(index) => place(list, *index, path)?,
                        Step::Name(name) => name.parse().map_err(|_| nothing())?,
                    };
                    if at < list.len() { Ok(list.remove(at)) } else { Err(nothing()) }
                }
                _ => Err(nothing()),
            }
        })();
        if let Value::Object(fields) = root {
            self.0 = fields;
        }
        taken
    }

    /// Changes what stands at a path, or leaves everything as it was.
    fn change(
        &mut self,
        path: &str,
        change: impl FnOnce(&mut Value) -> Result<(), String>,
    ) -> Result<(), String> {
        let steps = steps(path)?;
        let mut root = Value::Object(self.0.clone());
        let mut at = &mut root;
        for (n, step) in steps.iter().enumerate() {
            let before = || if n == 0 { "it".to_owned() } else { format!("what is at step {n} of {path}") };
            let inner = inside(at);
            if inner.is_null() {
                *inner = match step {
                    Step::Name(_) => Value::Object(Map::new()),
                    Step::Index(_) => Value::Array(Vec::new()),
                };
            }
            at = match (inner, step) {
                (Value::Object(fields), Step::Name(name)) => {
                    fields.entry(name.clone()).or_insert(Value::Null)
                }
                (Value::Array(list), step) => {
                    let index = match step {
                        Step::Index(index) => *index,
                        Step::Name(name) => name.parse().map_err(|_| {
                            format!("{} is a list, and '{name}' is no number in it", before())
                        })?,
                    };
                    let at = place(list, index, path)?;
                    if at == list.len() {
                        list.push(Value::Null);
                    }
                    &mut list[at]
                }
                (other, _) => {
                    return Err(format!(
                        "{} is {}, so nothing can stand below it: delete it first",
                        before(),
                        kind(other)
                    ));
                }
            };
        }
        change(at)?;
        if depth(&root) > DEEPEST {
            return Err(format!("{path}: knowledge may be {DEEPEST} levels deep, and this would be deeper"));
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

    fn known(value: &Value) -> Knowledge {
        Knowledge::of(value.as_object().cloned().unwrap_or_default())
    }

    #[test]
    fn paths_lead_through_objects_lists_and_quotes() {
        let mut known = Knowledge::default();
        known.set("people.Bob.trust", json!(0.8), None).expect("new");
        known.set(r#"people."Dr. No".notes"#, json!("islands, \"quotes\""), None).expect("quoted");
        known.append("goals", json!("learn")).expect("a new list");
        known.append("goals", json!("teach")).expect("a list");
        known.set("goals[0]", json!("listen"), None).expect("there");
        known.set("goals[2]", json!("rest"), None).expect("its end");
        known.set("goals.-1", json!("x"), None).expect("from its end, as a name");
        assert_eq!(
            Value::Object(known.all().clone()),
            json!({
                "people": {"Bob": {"trust": 0.8}, "Dr. No": {"notes": "islands, \"quotes\""}},
                "goals": ["listen", "teach", "x"],
            })
        );
        assert_eq!(known.get("goals[-1]"), Ok(Some(json!("x"))));
        assert_eq!(known.get("goals[7]"), Ok(None));
        assert_eq!(known.delete("goals[0]"), Ok(json!("listen")));
        assert_eq!(known.delete("people.Bob"), Ok(json!({"trust": 0.8})));
        assert_eq!(known.get("goals"), Ok(Some(json!(["teach", "x"]))));
    }

    #[test]
    fn values_may_carry_their_weight() {
        let mut known = Knowledge::default();
        known.set("people.Alice.trust", json!(0.8), Some(0.9)).expect("weighted");
        assert_eq!(known.get("people.Alice.trust"), Ok(Some(json!({"v": 0.8, "w": 0.9}))));
        known.set("notes", json!({"v": {"a": 1}, "w": 0.5}), None).expect("weighted by itself");
        known.set("notes.b", json!(2), None).expect("within it");
        assert_eq!(known.get("notes"), Ok(Some(json!({"v": {"a": 1, "b": 2}, "w": 0.5}))));
        known.set("seen", json!({"v": [], "w": 1.0}), None).expect("a list with a weight");
        assert!(
            known
                .set("seen", json!({"v": 1, "w": 7}), None)
                .is_err_and(|why| why.contains("between 0.0 and 1.0"))
        );
        known.append("seen", json!("sea")).expect("within it");
        assert_eq!(known.get("seen"), Ok(Some(json!({"v": ["sea"], "w": 1}))));
        assert!(known.set("x", json!(1), Some(1.5)).is_err());
        assert!(known.delete("notes.w").is_err());
    }

    #[test]
    fn what_cannot_be_says_why_and_changes_nothing() {
        let start = json!({"mood": "calm", "goals": ["a"]});
        let mut known = known(&start);
        for (path, part) in [
            ("", "it is empty"),
            ("a..b", "a step of it is empty"),
            ("a.", "it ends with a dot"),
            ("a[", "a bracket is not closed"),
            ("a[x]", "no number in the brackets"),
            (r#""a"#, "a quote is not closed"),
            (r#"a"b""#, "divided by dots"),
            ("mood.today", "so nothing can stand below it"),
            ("goals.first", "is no number in it"),
            ("goals[5]", "there is no place 5"),
        ] {
            let why = known.set(path, json!(1), None).expect_err(path);
            assert!(why.contains(part), "{path}: {why}");
        }
        let deep = vec!["a"; 33].join(".");
        assert!(known.set(&deep, json!(1), None).is_err());
        let deep = vec!["a"; 30].join(".");
        assert!(known.set(&deep, json!([[[1]]]), None).is_err());
        assert!(known.append("mood", json!(1)).expect_err("no list").contains("not a list"));
        assert!(known.delete("nowhere").expect_err("nothing").contains("nothing at nowhere"));
        assert_eq!(Value::Object(known.all().clone()), start);
    }

    #[test]
    fn numbers_are_kept_as_every_format_can_write_them() {
        let mut known = Knowledge::default();
        known
            .set("n", json!([1.0, -0.0, 2.5, 1e300, 12_345_678_901_234_567_890_u64]), None)
            .expect("numbers");
        assert_eq!(known.get("n"), Ok(Some(json!([1, 0, 2.5, 1e300, 12_345_678_901_234_567_890_u64]))));
    }
}
