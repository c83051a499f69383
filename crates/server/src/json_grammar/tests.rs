//! Grammars are checked with a small recognizer of GBNF: which texts they accept, not how they are written.

use super::*;
use serde_json::json;
use std::collections::BTreeSet;

/// A parsed grammar, which accepts texts.
struct Recognizer {
    rules: BTreeMap<String, Expression>,
}

#[derive(Clone, Debug)]
enum Expression {
    Choice(Vec<Expression>),
    Sequence(Vec<Expression>),
    Literal(Vec<char>),
    Class { negated: bool, ranges: Vec<(char, char)> },
    Rule(String),
    Repeat(Box<Expression>, usize, usize),
}

struct RuleParser {
    chars: Vec<char>,
    at: usize,
}

impl RuleParser {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn skip_spaces(&mut self) {
        while self.peek() == Some(' ') {
            self.at += 1;
        }
    }

    fn next(&mut self) -> char {
        self.at += 1;
        self.chars[self.at - 1]
    }

    fn choice(&mut self) -> Expression {
        let mut choices = vec![self.sequence()];
        while self.peek() == Some('|') {
            self.at += 1;
            choices.push(self.sequence());
        }
        Expression::Choice(choices)
    }

    fn sequence(&mut self) -> Expression {
        let mut items = Vec::new();
        loop {
            self.skip_spaces();
            match self.peek() {
                None | Some('|' | ')') => return Expression::Sequence(items),
                _ => {
                    let item = self.item();
                    items.push(self.repeated(item));
                }
            }
        }
    }

    fn item(&mut self) -> Expression {
        match self.next() {
            '(' => {
                let inner = self.choice();
                assert_eq!(self.next(), ')');
                inner
            }
            '"' => {
                let mut text = Vec::new();
                while self.peek() != Some('"') {
                    text.push(self.escaped());
                }
                self.at += 1;
                Expression::Literal(text)
            }
            '[' => {
                let negated = self.peek() == Some('^');
                self.at += usize::from(negated);
                let mut ranges = Vec::new();
                while self.peek() != Some(']') {
                    let from = self.escaped();
                    let is_range = self.peek() == Some('-') && self.chars.get(self.at + 1) != Some(&']');
                    self.at += usize::from(is_range);
                    ranges.push((from, if is_range { self.escaped() } else { from }));
                }
                self.at += 1;
                Expression::Class { negated, ranges }
            }
            first => {
                let mut name = String::from(first);
                while self.peek().is_some_and(|c| c.is_ascii_alphanumeric() || c == '-') {
                    name.push(self.next());
                }
                assert!(first.is_ascii_alphanumeric(), "a rule begins with {first:?}");
                Expression::Rule(name)
            }
        }
    }

    fn escaped(&mut self) -> char {
        match self.next() {
            '\\' => match self.next() {
                'n' => '\n',
                't' => '\t',
                'r' => '\r',
                'x' => {
                    let digits: String = [self.next(), self.next()].iter().collect();
                    char::from(u8::from_str_radix(&digits, 16).expect("two digits"))
                }
                c => c,
            },
            c => c,
        }
    }

    fn repeated(&mut self, item: Expression) -> Expression {
        let (min, max) = match self.peek() {
            Some('*') => (0, usize::MAX),
            Some('+') => (1, usize::MAX),
            Some('?') => (0, 1),
            Some('{') => {
                let rest: String = self.chars[self.at + 1..].iter().take_while(|c| **c != '}').collect();
                self.at += rest.len() + 1;
                let number = |text: &str| text.parse().expect("a number");
                match rest.split_once(',') {
                    None => (number(&rest), number(&rest)),
                    Some((min, "")) => (number(min), usize::MAX),
                    Some((min, max)) => (number(min), number(max)),
                }
            }
            _ => return item,
        };
        self.at += 1;
        Expression::Repeat(Box::new(item), min, max)
    }
}

impl Recognizer {
    fn new(grammar: &str) -> Self {
        let parse = |line: &str| {
            let (name, rule) = line.split_once(" ::= ").unwrap_or_else(|| panic!("{line:?} is no rule"));
            let mut parser = RuleParser { chars: rule.chars().collect(), at: 0 };
            let rule = parser.choice();
            assert_eq!(parser.at, parser.chars.len(), "{line}");
            (name.to_owned(), rule)
        };
        Self { rules: grammar.lines().map(parse).collect() }
    }

    /// Where the expression can end, from a position.
    fn ends(&self, expression: &Expression, text: &[char], at: usize) -> BTreeSet<usize> {
        match expression {
            Expression::Choice(all) => all.iter().flat_map(|one| self.ends(one, text, at)).collect(),
            Expression::Sequence(items) => items.iter().fold(BTreeSet::from([at]), |starts, item| {
                starts.into_iter().flat_map(|at| self.ends(item, text, at)).collect()
            }),
            Expression::Literal(literal) if text[at..].starts_with(literal) => {
                BTreeSet::from([at + literal.len()])
            }
            Expression::Class { negated, ranges } => {
                let inside = |c: char| ranges.iter().any(|(from, to)| (*from..=*to).contains(&c));
                let found = text.get(at).is_some_and(|&c| inside(c) != *negated);
                found.then_some(at + 1).into_iter().collect()
            }
            Expression::Literal(_) => BTreeSet::new(),
            Expression::Rule(name) => {
                let rule = self.rules.get(name).unwrap_or_else(|| panic!("there is no rule {name}"));
                self.ends(rule, text, at)
            }
            Expression::Repeat(item, min, max) => {
                let mut all = if *min == 0 { BTreeSet::from([at]) } else { BTreeSet::new() };
                let mut starts = BTreeSet::from([at]);
                for n in 1..=*max {
                    starts = starts.into_iter().flat_map(|at| self.ends(item, text, at)).collect();
                    starts.retain(|end| n < *min || !all.contains(end));
                    if starts.is_empty() {
                        break;
                    }
                    if n >= *min {
                        all.extend(&starts);
                    }
                }
                all
            }
        }
    }

    fn accepts(&self, text: &str) -> bool {
        let chars: Vec<char> = text.chars().collect();
        self.ends(&Expression::Rule("root".into()), &chars, 0).contains(&chars.len())
    }
}

fn check(schema: &Value, accepted: &[&str], refused: &[&str]) {
    let grammar = json_schema_to_gbnf(schema).unwrap_or_else(|e| panic!("{schema}: {e:?}"));
    let recognizer = Recognizer::new(&grammar);
    for text in accepted {
        assert!(recognizer.accepts(text), "{schema} does not accept {text}:\n{grammar}");
    }
    for text in refused {
        assert!(!recognizer.accepts(text), "{schema} accepts {text}:\n{grammar}");
    }
}

#[test]
fn grammar_of_simple_types() {
    check(&json!({ "type": "integer" }), &["0", "-12", "7 "], &["01", "1.5", "", "\"1\""]);
    check(&json!({ "type": "number" }), &["1", "-0.5", "1e3", "2E-4"], &[".5", "1.", "x"]);
    check(&json!({ "type": "boolean" }), &["true", "false"], &["True", "1"]);
    check(&json!({ "type": "null" }), &["null"], &["nil"]);
    check(
        &json!({ "type": "string" }),
        &["\"\"", "\"a\\n\\u00e9é\"", "\"\\\"\""],
        &["a", "\"", "\"\n\"", "\"\\x\""],
    );
    check(&json!({ "type": ["string", "null"] }), &["\"a\"", "null"], &["1"]);
    check(
        &json!({ "type": ["array", "null"], "items": { "type": "integer" } }),
        &["[1]", "null"],
        &["[\"a\"]"],
    );
    let any = ["{\"a\": [1, null, {\"b\": true}]}", "[]", "3"];
    check(&json!({}), &any, &["{a: 1}"]);
    check(&json!(true), &any, &["[1,]"]);
    check(&json!({ "type": "object", "title": "T", "description": "D" }), &["{}", any[0]], &["[]"]);
}

#[test]
fn grammar_of_enums_and_strings() {
    check(&json!({ "enum": ["a \"b\"", 2, null] }), &["\"a \\\"b\\\"\"", "2", "null"], &["\"a\"", "3"]);
    check(&json!({ "const": { "a": [1] } }), &["{\"a\":[1]}"], &["{}"]);
    check(
        &json!({ "type": "string", "minLength": 2, "maxLength": 3 }),
        &["\"ab\"", "\"abc\""],
        &["\"a\"", "\"abcd\""],
    );
    check(&json!({ "type": "string", "minLength": 1 }), &["\"a\""], &["\"\""]);
    check(&json!({ "type": "string", "format": "date" }), &["\"2026-11-18\""], &["\"2026-13-01\"", "\"x\""]);
    check(
        &json!({ "type": "string", "format": "date-time" }),
        &["\"2026-11-18T10:20:30Z\""],
        &["\"2026-11-18\""],
    );
    check(
        &json!({ "type": "string", "format": "uuid" }),
        &["\"12345678-1234-1234-1234-123456789abc\""],
        &["\"12345678\""],
    );
}

#[test]
fn grammar_of_arrays() {
    let items = json!({ "type": "integer" });
    check(&json!({ "type": "array", "items": items }), &["[]", "[1]", "[1, 2,3]"], &["[1,]", "[\"a\"]"]);
    check(
        &json!({ "type": "array", "items": items, "minItems": 2, "maxItems": 3 }),
        &["[1,2]", "[1,2,3]"],
        &["[]", "[1]", "[1,2,3,4]"],
    );
    check(&json!({ "type": "array", "items": items, "minItems": 1 }), &["[1]", "[1,2]"], &["[]"]);
    check(&json!({ "type": "array", "maxItems": 0 }), &["[]"], &["[1]"]);
    check(
        &json!({ "prefixItems": [{ "type": "integer" }, { "type": "string" }] }),
        &["[1, \"a\"]"],
        &["[1]", "[\"a\", 1]"],
    );
}

#[test]
fn grammar_of_objects() {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string" },
            "age": { "type": "integer" },
            "Größe": { "type": "number" },
            "done": { "type": "boolean" },
        },
        "required": ["name", "Größe"],
    });
    check(
        &schema,
        &[
            r#"{"name": "a", "Größe": 1.5}"#,
            r#"{ "name": "a", "Größe": 1, "age": 3, "done": true }"#,
            r#"{"name":"a","Größe":1,"done":true}"#,
        ],
        &["{}", r#"{"name": "a"}"#, r#"{"name": "a", "Größe": 1,}"#, r#"{"name": "a", "Größe": 1, "x": 1}"#],
    );
    let optional = json!({ "properties": { "a": { "const": 1 }, "b": { "const": 2 }, "c": { "const": 3 } } });
    check(
        &optional,
        &["{}", r#"{"a":1}"#, r#"{"b":2}"#, r#"{"c":3}"#, r#"{"a":1,"c":3}"#, r#"{"a":1,"b":2,"c":3}"#],
        &[r#"{"b":2,"a":1}"#, r#"{,"a":1}"#, r#"{"a":1 "b":2}"#],
    );
    let map = json!({ "type": "object", "additionalProperties": { "type": "integer" } });
    check(&map, &["{}", r#"{"x":1}"#, r#"{"x":1, "y":2}"#], &[r#"{"x":"a"}"#]);
}

#[test]
fn grammar_of_references_and_alternatives() {
    let tree = json!({
        "$ref": "#/$defs/node",
        "$defs": { "node": {
            "type": "object",
            "properties": { "value": { "type": "integer" }, "next": { "anyOf": [{ "$ref": "#/$defs/node" }, { "type": "null" }] } },
            "required": ["value", "next"],
        } },
    });
    check(
        &tree,
        &[r#"{"value":1,"next":{"value":2,"next":null}}"#],
        &[r#"{"value":1}"#, r#"{"value":1,"next":2}"#],
    );
    let shapes = json!({ "oneOf": [{ "type": "integer" }, { "allOf": [{ "type": "string" }] }] });
    check(&shapes, &["1", "\"a\""], &["true"]);
    // A property may have the name of a rule of JSON itself.
    let clash = json!({ "properties": { "string": { "const": 1 }, "root": { "const": 2 } }, "required": ["string", "root"] });
    check(&clash, &[r#"{"string":1,"root":2}"#], &["{}"]);
}

#[test]
fn grammar_refuses_what_it_would_ignore() {
    for (schema, at) in [
        (json!({ "type": "string", "pattern": "^a" }), "#"),
        (json!({ "type": "integer", "minimum": 3 }), "#"),
        (json!({ "type": "nonsense" }), "#"),
        (json!({ "type": "object", "properties": { "a": { "not": {} } } }), "#/properties/a"),
        (json!({ "$ref": "https://example.com/schema" }), "#"),
        (json!({ "$ref": "#/$defs/missing" }), "#"),
        (json!({ "allOf": [{ "type": "string" }, { "type": "integer" }] }), "#"),
        (json!({ "enum": [] }), "#"),
        (json!({ "type": "array", "items": { "type": "string", "format": "email" } }), "#/items"),
        (json!({ "type": "array", "minItems": 3, "maxItems": 2 }), "#"),
        (json!({ "type": "string", "maxLength": 100_000 }), "#"),
        (json!({ "required": ["a"], "properties": {} }), "#"),
        (json!({ "$ref": "#" }), "#"),
        (json!(false), "#"),
        (json!({ "anyOf": vec![json!({ "type": "integer" }); 3000] }), "#/anyOf/1999"),
        (json!("string"), "#"),
    ] {
        let error = json_schema_to_gbnf(&schema).expect_err("refused");
        assert_eq!(error.at, at, "{schema}: {}", error.problem);
    }
}

/// Each list of types doubles what is below it.
#[test]
fn grammar_refuses_schemas_that_grow_without_limit() {
    let mut schema = json!({ "type": "integer" });
    for _ in 0..60 {
        schema = json!({ "type": ["array", "array"], "items": schema });
    }
    let error = json_schema_to_gbnf(&schema).expect_err("refused");
    assert!(error.problem.contains("too large"), "{error:?}");
    let many: Map<String, Value> =
        (0..1500).map(|n| (format!("p{n}"), json!({ "type": "integer" }))).collect();
    let grammar = json_schema_to_gbnf(&json!({ "type": "object", "properties": many })).expect("a grammar");
    assert!(grammar.len() < 1_000_000, "{}", grammar.len());
}
