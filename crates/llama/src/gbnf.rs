//! Translates GBNF, llama.cpp's grammar notation, to the Lark notation of llguidance.
//!
//! GBNF has no lexer: a rule matches character by character. llguidance's lexer takes the longest match of each terminal, so every
//! terminal of the translation matches exactly one character. Rules get new names, because Lark gives case a meaning.

use std::collections::BTreeMap;
use std::fmt::Write;

/// The deepest nesting of groups.
const MAX_DEPTH: usize = 64;

/// The most repetitions that a grammar may count.
const MAX_REPETITIONS: u32 = 2000;

/// The rule that an answer must match.
const ROOT: &str = "root";

/// A grammar in Lark notation that matches the same texts. An error names the line.
pub fn gbnf_to_lark(source: &str) -> Result<String, String> {
    let mut parser = GbnfParser { rest: source, source, rules: BTreeMap::new(), names: Vec::new() };
    parser.parse_rules().map_err(|why| format!("GBNF grammar, line {}: {why}", parser.line()))?;
    let GbnfParser { rules, names, .. } = parser;
    if let Some(missing) = names.iter().position(|name| !rules.contains_key(name.as_str())) {
        return Err(format!("GBNF grammar: there is no rule '{}'", names[missing]));
    }
    let Some(root) = names.iter().position(|name| name == ROOT) else {
        return Err("GBNF grammar: there is no rule 'root', with which an answer begins".to_owned());
    };
    let mut lark = format!("start: r{root}\n");
    for (n, name) in names.iter().enumerate() {
        let _ = writeln!(lark, "r{n}: {}", rules[name]);
    }
    Ok(lark)
}

struct GbnfParser<'a> {
    source: &'a str,
    rest: &'a str,
    /// The expressions of the rules, in Lark notation.
    rules: BTreeMap<String, String>,
    /// The rules that are defined or used. The index of a name is its number in the translation.
    names: Vec<String>,
}

impl GbnfParser<'_> {
    fn line(&self) -> usize {
        let read = self.source.len() - self.rest.len();
        self.source[..read].matches('\n').count() + 1
    }

    /// Skips spaces and comments; also line ends, where they do not end a rule.
    fn skip_space(&mut self, newlines: bool) {
        loop {
            let is_space = |c: char| c == ' ' || c == '\t' || (newlines && (c == '\r' || c == '\n'));
            self.rest = self.rest.trim_start_matches(is_space);
            if !self.rest.starts_with('#') {
                return;
            }
            self.rest = self.rest.find(['\r', '\n']).map_or("", |end| &self.rest[end..]);
        }
    }

    fn take(&mut self, prefix: &str) -> bool {
        let stripped = self.rest.strip_prefix(prefix);
        self.rest = stripped.unwrap_or(self.rest);
        stripped.is_some()
    }

    fn next_char(&mut self) -> Result<char, String> {
        let c = self.rest.chars().next().ok_or("the grammar ends here too early")?;
        self.rest = &self.rest[c.len_utf8()..];
        Ok(c)
    }

    fn parse_rules(&mut self) -> Result<(), String> {
        self.skip_space(true);
        while !self.rest.is_empty() {
            let name = self.parse_name()?;
            self.rule_number(&name);
            self.skip_space(false);
            if !self.take("::=") {
                return Err(format!("'::=' is missing after '{name}'"));
            }
            self.skip_space(true);
            let expression = self.parse_alternatives(0)?;
            if !self.rest.is_empty() && !self.rest.starts_with(['\r', '\n']) {
                let found: String = self.rest.chars().take(10).collect();
                return Err(format!("'{found}' is not expected here"));
            }
            self.rules.insert(name, expression);
            self.skip_space(true);
        }
        Ok(())
    }

    fn parse_name(&mut self) -> Result<String, String> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        if end == 0 {
            return Err("the name of a rule is missing".to_owned());
        }
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        Ok(name.to_owned())
    }

    /// The number of a rule in the translation.
    fn rule_number(&mut self, name: &str) -> usize {
        self.names.iter().position(|known| known == name).unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        })
    }

    fn parse_alternatives(&mut self, depth: usize) -> Result<String, String> {
        if depth > MAX_DEPTH {
            return Err(format!("groups are nested deeper than {MAX_DEPTH}"));
        }
        let mut alternatives = self.parse_sequence(depth)?;
        while self.take("|") {
            self.skip_space(true);
            alternatives.push_str(" | ");
            alternatives.push_str(&self.parse_sequence(depth)?);
        }
        Ok(alternatives)
    }

    fn parse_sequence(&mut self, depth: usize) -> Result<String, String> {
        let mut items: Vec<String> = Vec::new();
        loop {
            let item = match self.rest.chars().next() {
                Some('"') => self.parse_literal()?,
                Some('[') => self.parse_class()?,
                Some('.') => {
                    self.rest = &self.rest[1..];
                    "/(?s:.)/".to_owned()
                }
                Some('(') => {
                    self.rest = &self.rest[1..];
                    self.skip_space(true);
                    let inner = self.parse_alternatives(depth + 1)?;
                    if !self.take(")") {
                        return Err("')' is missing".to_owned());
                    }
                    format!("({inner})")
                }
                Some(c) if c.is_ascii_alphanumeric() || c == '-' || c == '_' => {
                    let name = self.parse_name()?;
                    format!("r{}", self.rule_number(&name))
                }
                _ => break,
            };
            self.skip_space(depth > 0);
            let item = self.parse_repetition(item)?;
            items.push(item);
            self.skip_space(depth > 0);
        }
        Ok(if items.is_empty() { "\"\"".to_owned() } else { items.join(" ") })
    }

    /// The repetition behind an item, if there is one.
    fn parse_repetition(&mut self, item: String) -> Result<String, String> {
        for operator in ["*", "+", "?"] {
            if self.take(operator) {
                return Ok(format!("({item}){operator}"));
            }
        }
        if !self.take("{") {
            return Ok(item);
        }
        self.skip_space(true);
        let from = self.parse_count()?;
        self.skip_space(true);
        let to = if self.take(",") {
            self.skip_space(true);
            self.parse_count()?
        } else {
            from
        };
        self.skip_space(true);
        if !self.take("}") {
            return Err("'}' is missing".to_owned());
        }
        let min = from.unwrap_or(0);
        match to {
            None => Ok(format!("({item}){{{min},}}")),
            Some(0) => Ok("\"\"".to_owned()),
            Some(max) if min <= max => Ok(format!("({item}){{{min},{max}}}")),
            Some(max) => Err(format!("a repetition of {min} to {max} is empty")),
        }
    }

    fn parse_count(&mut self) -> Result<Option<u32>, String> {
        let end = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        self.rest = rest;
        if digits.is_empty() {
            return Ok(None);
        }
        match digits.parse() {
            Ok(count) if count <= MAX_REPETITIONS => Ok(Some(count)),
            _ => Err(format!("{digits} repetitions; at most {MAX_REPETITIONS} are allowed")),
        }
    }

    fn parse_literal(&mut self) -> Result<String, String> {
        self.next_char()?;
        let mut characters = Vec::new();
        while !self.take("\"") {
            characters.push(format!("/{}/", char_pattern(self.parse_char()?)));
        }
        // A group: a repetition behind it repeats all of its characters.
        Ok(match characters.as_slice() {
            [] => "\"\"".to_owned(),
            [one] => one.clone(),
            all => format!("({})", all.join(" ")),
        })
    }

    fn parse_class(&mut self) -> Result<String, String> {
        self.next_char()?;
        let negated = self.take("^");
        let mut ranges = String::new();
        while !self.take("]") {
            let first = self.parse_char()?;
            let last = if self.rest.starts_with('-') && !self.rest.starts_with("-]") {
                self.next_char()?;
                self.parse_char()?
            } else {
                first
            };
            if first > last {
                return Err(format!("the range from '{first}' to '{last}' is empty"));
            }
            let _ = write!(ranges, "{}-{}", char_pattern(first), char_pattern(last));
        }
        match (ranges.is_empty(), negated) {
            (true, true) => Ok("/(?s:.)/".to_owned()),
            (true, false) => Err("a character class is empty".to_owned()),
            (false, negated) => Ok(format!("/[{}{ranges}]/", if negated { "^" } else { "" })),
        }
    }

    /// One character of a literal or a class, with its escape sequence.
    fn parse_char(&mut self) -> Result<char, String> {
        let digits = match self.next_char()? {
            '\\' => match self.next_char()? {
                'n' => return Ok('\n'),
                'r' => return Ok('\r'),
                't' => return Ok('\t'),
                'x' => 2,
                'u' => 4,
                'U' => 8,
                c if "\\\"[]-^".contains(c) => return Ok(c),
                c => return Err(format!("the escape sequence '\\{c}' is unknown")),
            },
            c => return Ok(c),
        };
        let code = self.rest.get(..digits).and_then(|code| u32::from_str_radix(code, 16).ok());
        let Some(c) = code.and_then(char::from_u32) else {
            return Err(format!("{digits} hexadecimal digits of a character are missing"));
        };
        self.rest = &self.rest[digits..];
        Ok(c)
    }
}

/// A character as a regular expression.
fn char_pattern(c: char) -> String {
    format!("\\u{{{:X}}}", u32::from(c))
}

#[cfg(test)]
mod tests {
    use super::*;
    use llguidance::api::TopLevelGrammar;
    use llguidance::toktrie::ApproximateTokEnv;
    use llguidance::{Matcher, ParserFactory};

    /// Whether a grammar matches a whole text, and whether it matches the start of one.
    fn matches(gbnf: &str, text: &str) -> (bool, bool) {
        let lark = gbnf_to_lark(gbnf).unwrap_or_else(|why| panic!("{gbnf}: {why}"));
        let environment = ApproximateTokEnv::single_byte_env();
        let mut factory = ParserFactory::new_simple(&environment).expect("a factory");
        factory.quiet();
        let mut matcher = Matcher::new(factory.create_parser(TopLevelGrammar::from_lark(lark.clone())));
        assert!(matcher.get_error().is_none(), "{lark}: {:?}", matcher.get_error());
        for byte in text.bytes() {
            let mask = matcher.compute_mask_or_eos().expect("a mask");
            if !mask.is_allowed(u32::from(byte)) || matcher.consume_token(u32::from(byte)).is_err() {
                return (false, false);
            }
        }
        (matcher.is_accepting().unwrap_or(false), true)
    }

    #[test]
    fn gbnf_grammars_match_the_same_texts_as_in_llama_cpp() {
        let list = "root ::= item+\n# one line each\nitem ::= \"- \" [^\\n]+ \"\\n\"";
        let json = "root ::= \"{\" ws pair (\",\" ws pair)* \"}\"\npair ::= string \":\" ws value\n\
                    value ::= string | number\nstring ::= \"\\\"\" [^\"\\\\]* \"\\\"\"\nnumber ::= [0-9]{1,3}\nws ::= \" \"?";
        // Grammar, text, whether it is complete, whether it is a start.
        for (gbnf, text, complete, start) in [
            ("root ::= \"yes\" | \"no\"", "yes", true, true),
            ("root ::= \"yes\" | \"no\"", "no", true, true),
            ("root ::= \"yes\" | \"no\"", "ye", false, true),
            ("root ::= \"yes\" | \"no\"", "maybe", false, false),
            ("root ::= (\"a\"\n | \"b\")+ # end", "abba", true, true),
            ("root ::= [a-z]* \"abc\"", "abx", false, true),
            ("root ::= [a-z]* \"abc\"", "ababc", true, true),
            ("root ::= \"ab\"{2,3}", "abab", true, true),
            ("root ::= \"ab\"{2,3}", "ab", false, true),
            ("root ::= \"ab\"{2}", "ababab", false, false),
            ("root ::= \"x\"{2,}", "xxxxx", true, true),
            ("root ::= \"\\x41\\u00e9\" .", "Aé€", true, true),
            ("root ::= [^é]", "é", false, false),
            ("root ::= [a\\-\\]]+", "a-]", true, true),
            ("root ::= Sub-Rule\nSub-Rule ::= \"ok\"", "ok", true, true),
            ("root ::= \"(\" root \")\" | \"\"", "((", false, true),
            ("root ::= \"(\" root \")\" | \"\"", "(())", true, true),
            (list, "- one\n- two\n", true, true),
            (list, "* one", false, false),
            (json, "{\"a\": 12, \"b\":\"c/\"}", true, true),
            (json, "{\"a\": 1234", false, false),
        ] {
            assert_eq!(matches(gbnf, text), (complete, start), "{gbnf} on {text}");
        }
    }

    #[test]
    fn invalid_gbnf_is_refused_with_its_line() {
        let deep = format!("root ::= {}", "(".repeat(1000));
        for (gbnf, problem) in [
            ("", "there is no rule 'root'"),
            ("a ::= \"x\"", "there is no rule 'root'"),
            ("root ::= missing", "there is no rule 'missing'"),
            ("root ::= \"x", "line 1: the grammar ends here too early"),
            ("root = \"x\"", "line 1: '::=' is missing after 'root'"),
            ("root ::= \"x\"\nb ::= (\"x\"", "line 2: ')' is missing"),
            ("root ::= [z-a]", "the range from 'z' to 'a' is empty"),
            ("root ::= []", "a character class is empty"),
            ("root ::= \"\\q\"", "the escape sequence '\\q' is unknown"),
            ("root ::= \"\\u12\"", "4 hexadecimal digits"),
            ("root ::= \"x\"{5000}", "5000 repetitions"),
            ("root ::= \"x\"{3,2}", "a repetition of 3 to 2 is empty"),
            ("root ::= \"x\" )", "')' is not expected here"),
            (deep.as_str(), "nested deeper"),
        ] {
            let why = gbnf_to_lark(gbnf).expect_err(gbnf);
            assert!(why.contains(problem), "{gbnf:.40}: {why}");
        }
    }
}
