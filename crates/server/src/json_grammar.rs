//! JSON schemas as grammars in GBNF, the notation of llama.cpp and KoboldCPP. The usual subset is supported; a schema with anything
//! else is refused, because a grammar that ignores a constraint would accept what the schema forbids.

use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Why a schema cannot become a grammar, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SchemaError {
    /// A JSON pointer, such as `#/properties/age`.
    pub at: String,
    pub problem: String,
}

/// The grammar of a schema, one rule per line. The rule `root` is the document.
pub(crate) fn json_schema_to_gbnf(schema: &Value) -> Result<String, SchemaError> {
    let mut builder =
        GrammarBuilder { root: schema, rules: BTreeMap::new(), references: BTreeMap::new(), schemas: 0 };
    let root = builder.value_rule(schema, "root", "#")?;
    if root != "root" {
        builder.rules.insert("root".into(), root);
    }
    builder.primitive("space");
    let lines = builder.rules.iter().map(|(name, rule)| format!("{name} ::= {rule}\n"));
    Ok(lines.collect())
}

/// The rules that JSON itself needs, with the rules that they use. The names are those of llama.cpp.
const PRIMITIVES: [(&str, &str, &[&str]); 18] = [
    ("space", r#"| " " | "\n"{1,2} [ \t]{0,20}"#, &[]),
    ("boolean", r#"("true" | "false") space"#, &["space"]),
    ("null", r#""null" space"#, &["space"]),
    ("integral-part", "[0] | [1-9] [0-9]{0,15}", &[]),
    ("decimal-part", "[0-9]{1,16}", &[]),
    ("integer", r#"("-"? integral-part) space"#, &["integral-part", "space"]),
    (
        "number",
        r#"("-"? integral-part) ("." decimal-part)? ([eE] [-+]? integral-part)? space"#,
        &["integral-part", "decimal-part", "space"],
    ),
    ("char", r#"[^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})"#, &[]),
    ("string", r#""\"" char* "\"" space"#, &["char", "space"]),
    (
        "value",
        "object | array | string | number | boolean | null",
        &["object", "array", "string", "number", "boolean", "null"],
    ),
    (
        "object",
        r#""{" space ( string ":" space value ("," space string ":" space value)* )? "}" space"#,
        &["string", "value", "space"],
    ),
    ("array", r#""[" space ( value ("," space value)* )? "]" space"#, &["value", "space"]),
    ("date", r#"[0-9]{4} "-" ( "0" [1-9] | "1" [0-2] ) "-" ( "0" [1-9] | [1-2] [0-9] | "3" [0-1] )"#, &[]),
    (
        "time",
        r#"([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ( "." [0-9]{3} )? ( "Z" | ( "+" | "-" ) ( [01] [0-9] | "2" [0-3] ) ":" [0-5] [0-9] )"#,
        &[],
    ),
    ("date-string", r#""\"" date "\"" space"#, &["date", "space"]),
    ("time-string", r#""\"" time "\"" space"#, &["time", "space"]),
    ("date-time-string", r#""\"" date "T" time "\"" space"#, &["date", "time", "space"]),
    (
        "uuid-string",
        r#""\"" [0-9a-fA-F]{8} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{12} "\"" space"#,
        &["space"],
    ),
];

/// Keywords that say nothing about the values.
const ANNOTATIONS: [&str; 12] = [
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
];

/// The most repetitions of one item: a grammar with more is slow to follow.
const MAX_REPETITIONS: u64 = 2000;

/// The most schemas within a schema. A list of types repeats what is below it, so a short schema can be large.
const MAX_SCHEMAS: usize = 2000;

struct GrammarBuilder<'a> {
    root: &'a Value,
    rules: BTreeMap<String, String>,
    /// The rules of the `$ref`s so far.
    references: BTreeMap<String, String>,
    /// Schemas that were visited.
    schemas: usize,
}

impl GrammarBuilder<'_> {
    /// Adds a rule that JSON itself needs.
    fn primitive(&mut self, name: &str) -> String {
        let known = PRIMITIVES.iter().find(|(primitive, _, _)| *primitive == name);
        if let Some((_, rule, uses)) = known.filter(|_| !self.rules.contains_key(name)) {
            self.rules.insert(name.to_owned(), (*rule).to_owned());
            uses.iter().for_each(|used| drop(self.primitive(used)));
        }
        name.to_owned()
    }

    /// Adds a rule. Returns its name, which has a number if the name is taken by another rule.
    fn add(&mut self, name: &str, rule: String) -> String {
        let is_primitive = |name: &str| PRIMITIVES.iter().any(|(primitive, _, _)| *primitive == name);
        let mut unique = name.to_owned();
        for n in 1.. {
            match self.rules.get(&unique) {
                None if !is_primitive(&unique) => break,
                Some(other) if *other == rule => return unique,
                _ => unique = format!("{name}-{n}"),
            }
        }
        self.rules.insert(unique.clone(), rule);
        unique
    }

    /// Adds the rule of a schema. Returns its name.
    fn value_rule(&mut self, schema: &Value, name: &str, at: &str) -> Result<String, SchemaError> {
        self.schemas += 1;
        if self.schemas > MAX_SCHEMAS {
            return refuse(at, format!("the schema is too large: it has more than {MAX_SCHEMAS} parts"));
        }
        let fields = match schema {
            Value::Bool(true) => return Ok(self.primitive("value")),
            Value::Object(fields) => fields,
            _ => return refuse(at, "a schema must be an object or true"),
        };
        if let Some(reference) = fields.get("$ref") {
            return self.reference_rule(reference, at);
        }
        if let Some(value) = fields.get("const") {
            check_keywords(fields, &["const", "type"], at)?;
            let rule = format!("{} {}", literal(&value.to_string()), self.primitive("space"));
            return Ok(self.add(name, rule));
        }
        if let Some(values) = fields.get("enum") {
            check_keywords(fields, &["enum", "type"], at)?;
            let Some([_, ..]) = values.as_array().map(Vec::as_slice) else {
                return refuse(at, "enum must be a list with at least one value");
            };
            let literals = values.as_array().into_iter().flatten().map(|value| literal(&value.to_string()));
            let rule = format!("({}) {}", literals.collect::<Vec<_>>().join(" | "), self.primitive("space"));
            return Ok(self.add(name, rule));
        }
        for keyword in ["anyOf", "oneOf", "allOf"] {
            if let Some(alternatives) = fields.get(keyword) {
                return self.alternatives_rule(fields, keyword, alternatives, name, at);
            }
        }
        match fields.get("type") {
            Some(Value::Array(types)) => {
                let rules = types.iter().enumerate().map(|(n, kind)| {
                    let mut one = fields.clone();
                    one.insert("type".into(), kind.clone());
                    one.retain(|keyword, _| applies_to(keyword, kind));
                    self.value_rule(&Value::Object(one), &format!("{name}-{n}"), at)
                });
                let rules = rules.collect::<Result<Vec<_>, _>>()?;
                if rules.is_empty() {
                    return refuse(at, "type must name at least one type");
                }
                Ok(self.add(name, rules.join(" | ")))
            }
            Some(Value::String(kind)) => self.typed_rule(fields, kind, name, at),
            Some(_) => refuse(at, "type must be a text or a list of texts"),
            None if fields.contains_key("properties") || fields.contains_key("additionalProperties") => {
                self.object_rule(fields, name, at)
            }
            None if fields.contains_key("items") || fields.contains_key("prefixItems") => {
                self.array_rule(fields, name, at)
            }
            None => {
                check_keywords(fields, &[], at)?;
                Ok(self.primitive("value"))
            }
        }
    }

    fn typed_rule(
        &mut self,
        fields: &Map<String, Value>,
        kind: &str,
        name: &str,
        at: &str,
    ) -> Result<String, SchemaError> {
        match kind {
            "object" => self.object_rule(fields, name, at),
            "array" => self.array_rule(fields, name, at),
            "string" => self.string_rule(fields, name, at),
            "integer" | "number" | "boolean" | "null" => {
                check_keywords(fields, &["type"], at)?;
                Ok(self.primitive(kind))
            }
            other => refuse(at, format!("there is no type '{other}'")),
        }
    }

    fn reference_rule(&mut self, reference: &Value, at: &str) -> Result<String, SchemaError> {
        let Some(pointer) = reference.as_str().and_then(|reference| reference.strip_prefix('#')) else {
            return refuse(at, format!("$ref {reference} is outside of the schema; only '#/…' is supported"));
        };
        if let Some(rule) = self.references.get(pointer) {
            return Ok(rule.clone());
        }
        let root = self.root;
        let Some(target) = root.pointer(pointer) else {
            return refuse(at, format!("$ref '#{pointer}' names nothing in the schema"));
        };
        let wanted = format!("ref-{}", rule_name(pointer.rsplit('/').next().unwrap_or_default(), "schema"));
        // A recursive schema refers to the rule before it is complete.
        let name = self.add(&wanted, String::new());
        self.references.insert(pointer.to_owned(), name.clone());
        let rule = self.value_rule(target, &format!("{name}-value"), &format!("#{pointer}"))?;
        if rule == name {
            return refuse(at, format!("$ref '#{pointer}' refers to itself only"));
        }
        self.rules.insert(name.clone(), rule);
        Ok(name)
    }

    fn alternatives_rule(
        &mut self,
        fields: &Map<String, Value>,
        keyword: &str,
        alternatives: &Value,
        name: &str,
        at: &str,
    ) -> Result<String, SchemaError> {
        check_keywords(fields, &[keyword], at)?;
        let Some(alternatives) = alternatives.as_array().filter(|all| !all.is_empty()) else {
            return refuse(at, format!("{keyword} must be a list with at least one schema"));
        };
        if keyword == "allOf" && alternatives.len() > 1 {
            return refuse(at, "allOf with several schemas is not supported");
        }
        let rules = alternatives.iter().enumerate().map(|(n, alternative)| {
            self.value_rule(alternative, &format!("{name}-{n}"), &format!("{at}/{keyword}/{n}"))
        });
        let rules = rules.collect::<Result<Vec<_>, _>>()?;
        Ok(self.add(name, rules.join(" | ")))
    }

    fn string_rule(
        &mut self,
        fields: &Map<String, Value>,
        name: &str,
        at: &str,
    ) -> Result<String, SchemaError> {
        check_keywords(fields, &["type", "format", "minLength", "maxLength"], at)?;
        let (min, max) = (length(fields, "minLength", at)?, length(fields, "maxLength", at)?);
        if let Some(format) = fields.get("format") {
            let rule = match format.as_str() {
                Some("date" | "time" | "date-time" | "uuid") if min.or(max).is_none() => {
                    format!("{}-string", format.as_str().unwrap_or_default())
                }
                _ => return refuse(at, format!("format {format} is not supported here")),
            };
            return Ok(self.primitive(&rule));
        }
        if min.or(max).is_none() {
            return Ok(self.primitive("string"));
        }
        let (char, space) = (self.primitive("char"), self.primitive("space"));
        let repeated = repetition(&char, min.unwrap_or(0), max, at)?;
        Ok(self.add(name, format!(r#""\"" {repeated} "\"" {space}"#)))
    }

    fn array_rule(
        &mut self,
        fields: &Map<String, Value>,
        name: &str,
        at: &str,
    ) -> Result<String, SchemaError> {
        check_keywords(fields, &["type", "items", "prefixItems", "minItems", "maxItems"], at)?;
        let space = self.primitive("space");
        if let Some(Value::Array(items)) = fields.get("prefixItems") {
            if fields.contains_key("items")
                || fields.contains_key("minItems")
                || fields.contains_key("maxItems")
            {
                return refuse(at, "prefixItems together with items, minItems or maxItems is not supported");
            }
            let rules = items.iter().enumerate().map(|(n, item)| {
                self.value_rule(item, &format!("{name}-item-{n}"), &format!("{at}/prefixItems/{n}"))
            });
            let rules = rules.collect::<Result<Vec<_>, _>>()?.join(" \",\" space ");
            return Ok(self.add(name, format!(r#""[" {space} {rules} "]" {space}"#)));
        }
        let (min, max) = (length(fields, "minItems", at)?.unwrap_or(0), length(fields, "maxItems", at)?);
        if max == Some(0) {
            return Ok(self.add(name, format!(r#""[" {space} "]" {space}"#)));
        }
        let item = match fields.get("items") {
            Some(items) => self.value_rule(items, &format!("{name}-item"), &format!("{at}/items"))?,
            None => self.primitive("value"),
        };
        let more = format!(r#"("," {space} {item})"#);
        let more = repetition(&more, min.saturating_sub(1), max.map(|max| max - 1), at)?;
        let items = if min == 0 { format!("({item} {more})?") } else { format!("{item} {more}") };
        Ok(self.add(name, format!(r#""[" {space} {items} "]" {space}"#)))
    }

    fn object_rule(
        &mut self,
        fields: &Map<String, Value>,
        name: &str,
        at: &str,
    ) -> Result<String, SchemaError> {
        check_keywords(fields, &["type", "properties", "required", "additionalProperties"], at)?;
        let empty = Map::new();
        let properties = match fields.get("properties") {
            None => &empty,
            Some(Value::Object(properties)) => properties,
            Some(_) => return refuse(at, "properties must be an object"),
        };
        let required: Vec<&str> = match fields.get("required") {
            None => Vec::new(),
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            Some(_) => return refuse(at, "required must be a list"),
        };
        if let Some(missing) = required.iter().find(|name| !properties.contains_key(**name)) {
            return refuse(at, format!("'{missing}' is required, but it is not in properties"));
        }
        let additional = fields.get("additionalProperties");
        if properties.is_empty() && matches!(additional, None | Some(Value::Bool(true))) {
            return Ok(self.primitive("object"));
        }
        let space = self.primitive("space");
        let (mut always, mut optional) = (Vec::new(), Vec::new());
        for (key, schema) in properties {
            let base = format!("{name}-{}", rule_name(key, "key"));
            let value = self.value_rule(schema, &base, &format!("{at}/properties/{key}"))?;
            let key_text = literal(&Value::String(key.clone()).to_string());
            let pair = self.add(&format!("{base}-kv"), format!(r#"{key_text} {space} ":" {space} {value}"#));
            if required.contains(&key.as_str()) { always.push(pair) } else { optional.push((pair, false)) }
        }
        // A model that may add properties of its own rarely stops, so they are allowed only where the schema asks for them.
        match additional {
            None | Some(Value::Bool(_)) => {}
            Some(schema) => {
                let value = self.value_rule(
                    schema,
                    &format!("{name}-additional"),
                    &format!("{at}/additionalProperties"),
                )?;
                let string = self.primitive("string");
                let pair = format!(r#"{string} ":" {space} {value}"#);
                optional.push((self.add(&format!("{name}-additional-kv"), pair), true));
            }
        }
        let mut rule = format!(r#""{{" {space} {}"#, always.join(" \",\" space "));
        if !optional.is_empty() {
            let starts = self.optional_pairs(&optional, name).join(" | ");
            rule += &match always.is_empty() {
                true => format!(" ({starts})?"),
                false => format!(r#" ("," {space} ({starts}))?"#),
            };
        }
        Ok(self.add(name, format!(r#"{rule} "}}" {space}"#)))
    }

    /// The optional properties in order, each of them once or not at all: one alternative for each that can be the first. Additional
    /// properties come last, any number of them.
    fn optional_pairs(&mut self, pairs: &[(String, bool)], name: &str) -> Vec<String> {
        let mut starts = Vec::with_capacity(pairs.len());
        // The rule of all properties behind the current one.
        let mut rest = String::new();
        for (pair, repeated) in pairs.iter().rev() {
            let further = format!(r#"("," space {pair})"#);
            let first = if *repeated { format!("{pair} {further}*") } else { pair.clone() };
            starts.push(format!("{first} {rest}").trim_end().to_owned());
            let repetition = if *repeated { '*' } else { '?' };
            let rule = format!("{further}{repetition} {rest}").trim_end().to_owned();
            rest = self.add(&format!("{name}-rest-{}", starts.len()), rule);
        }
        starts.reverse();
        starts
    }
}

fn refuse<T>(at: &str, problem: impl Into<String>) -> Result<T, SchemaError> {
    Err(SchemaError { at: at.to_owned(), problem: problem.into() })
}

/// Refuses keywords that the grammar would ignore.
fn check_keywords(fields: &Map<String, Value>, known: &[&str], at: &str) -> Result<(), SchemaError> {
    let unknown = |name: &&String| !known.contains(&name.as_str()) && !ANNOTATIONS.contains(&name.as_str());
    match fields.keys().find(unknown) {
        Some(keyword) => refuse(at, format!("the keyword '{keyword}' is not supported here")),
        None => Ok(()),
    }
}

/// Whether a keyword says something about values of a type, in a schema with several types.
fn applies_to(keyword: &str, kind: &Value) -> bool {
    let of = |kinds: &[&str]| kind.as_str().is_some_and(|kind| kinds.contains(&kind));
    match keyword {
        "properties" | "required" | "additionalProperties" => of(&["object"]),
        "items" | "prefixItems" | "minItems" | "maxItems" => of(&["array"]),
        "format" | "minLength" | "maxLength" | "pattern" => of(&["string"]),
        "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
            of(&["integer", "number"])
        }
        _ => true,
    }
}

fn length(fields: &Map<String, Value>, keyword: &str, at: &str) -> Result<Option<u64>, SchemaError> {
    match fields.get(keyword) {
        None => Ok(None),
        Some(value) => match value.as_u64().filter(|&n| n <= MAX_REPETITIONS) {
            Some(n) => Ok(Some(n)),
            None => refuse(at, format!("{keyword} must be a whole number from 0 to {MAX_REPETITIONS}")),
        },
    }
}

fn repetition(item: &str, min: u64, max: Option<u64>, at: &str) -> Result<String, SchemaError> {
    match (min, max) {
        (min, Some(max)) if min > max => refuse(at, format!("the minimum {min} is above the maximum {max}")),
        (0, None) => Ok(format!("{item}*")),
        (1, None) => Ok(format!("{item}+")),
        (min, None) => Ok(format!("{item}{{{min},}}")),
        (min, Some(max)) if min == max => Ok(format!("{item}{{{min}}}")),
        (min, Some(max)) => Ok(format!("{item}{{{min},{max}}}")),
    }
}

/// A text in quotes, as GBNF writes it.
fn literal(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

/// A name that GBNF allows: letters, digits and hyphens.
fn rule_name(text: &str, fallback: &str) -> String {
    let name: String = text.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    match name.trim_matches('-') {
        "" => fallback.to_owned(),
        name => name.to_ascii_lowercase(),
    }
}

#[cfg(test)]
mod tests;
