//! Splits an answer into reasoning, text and calls of functions, while it streams.

use crate::tool_call::{CallFormat, FunctionCall, ReasoningFormat, json_members};

/// What a piece of an answer adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerDelta {
    /// Reasoning before the answer.
    Reasoning(String),
    /// Text of the answer.
    Text(String),
    /// A call begins.
    CallStart {
        /// Its index in the answer.
        index: usize,
        /// The name of the function.
        name: String,
    },
    /// The next piece of the arguments of a call.
    CallArguments {
        /// The index of the call in the answer.
        index: usize,
        /// The piece.
        text: String,
    },
}

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerParts {
    /// The reasoning before the answer, without its markers.
    pub reasoning: String,
    /// The text.
    pub text: String,
    /// The calls.
    pub calls: Vec<FunctionCall>,
}

impl AnswerParts {
    /// Adds a delta.
    pub fn push(&mut self, delta: AnswerDelta) {
        match delta {
            AnswerDelta::Reasoning(text) => self.reasoning.push_str(&text),
            AnswerDelta::Text(text) => self.text.push_str(&text),
            AnswerDelta::CallStart { name, .. } => {
                self.calls.push(FunctionCall { name, arguments: String::new() });
            }
            AnswerDelta::CallArguments { index, text } => {
                if let Some(call) = self.calls.get_mut(index) {
                    call.arguments.push_str(&text);
                }
            }
        }
    }
}

/// What the markers of an answer are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerMarkers {
    /// The reasoning; none where the model has none.
    pub reasoning: Option<ReasoningFormat>,
    /// Whether the answer begins inside the reasoning, because the prompt has opened it.
    pub starts_in_reasoning: bool,
    /// How calls are written; none where no function may be called.
    pub calls: Option<CallFormat>,
    /// The functions that may be called; none where any may. A call of another one is text.
    pub functions: Option<Vec<String>>,
}

impl AnswerMarkers {
    /// A whole answer, split.
    #[must_use]
    pub fn parse(&self, text: &str) -> AnswerParts {
        let mut parser = AnswerParser::new(self.clone());
        let mut answer = AnswerParts::default();
        parser.push(text).into_iter().chain(parser.finish()).for_each(|delta| answer.push(delta));
        answer
    }
}

/// Splits an answer while it streams.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    markers: AnswerMarkers,
    /// What stands before an answer without reasoning, and is no part of it.
    skip: Option<String>,
    state: ParserState,
    /// Text that is not decided yet: it may be the beginning of a marker or of a call.
    pending: String,
    /// Whether any text was given out: an object is a call only at the beginning of an answer.
    has_text: bool,
    /// Whether any reasoning was given out.
    has_reasoning: bool,
    calls: usize,
    /// Whether the calls have no marker: the answer is an object, or a list of them.
    bare_calls: bool,
    /// The text after the last complete object of a call.
    after_call: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParserState {
    /// Before the first character that is not white space.
    Start,
    Reasoning,
    Text,
    /// Between calls.
    BetweenCalls,
    /// In the object of a call, whose arguments were given out up to an offset in them.
    InCall {
        sent: usize,
        started: bool,
    },
}

impl AnswerParser {
    /// The state before the first piece.
    #[must_use]
    pub fn new(markers: AnswerMarkers) -> Self {
        let state = match markers.starts_in_reasoning {
            true => ParserState::Reasoning,
            false if markers.reasoning.is_none() && markers.calls.is_none() => ParserState::Text,
            false => ParserState::Start,
        };
        // A sign that opens and closes the reasoning is read as reasoning.
        let reasoning = markers.reasoning.as_ref();
        let skip = reasoning.and_then(|r| r.skip.clone().filter(|skip| !skip.starts_with(r.open.as_str())));
        Self {
            markers,
            skip,
            state,
            pending: String::new(),
            has_text: false,
            has_reasoning: false,
            calls: 0,
            bare_calls: false,
            after_call: String::new(),
        }
    }

    /// How many calls have begun.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Whether the last thing read is a complete call, with the marker that ends it.
    #[must_use]
    pub fn is_call_closed(&self) -> bool {
        let close = self.markers.calls.as_ref().map_or("", |calls| calls.close.trim());
        let has_object = self.state == ParserState::BetweenCalls && self.calls > 0;
        has_object && (self.bare_calls || self.after_call.trim_end().ends_with(close))
    }

    /// Whether no further call follows: calls without a marker end where something else than a separator follows an object.
    #[must_use]
    pub fn are_calls_over(&self) -> bool {
        let separator = self.markers.calls.as_ref().map_or("", |calls| calls.separator.trim());
        let after = self.after_call.trim_start();
        let may_separate = after.is_empty()
            || after.starts_with([',', ';'])
            || separator.starts_with(after)
            || (!separator.is_empty() && after.starts_with(separator));
        self.bare_calls && self.state == ParserState::BetweenCalls && !may_separate
    }

    /// Reads the next piece.
    pub fn push(&mut self, text: &str) -> Vec<AnswerDelta> {
        self.pending.push_str(text);
        let mut deltas = Vec::new();
        while self.step(&mut deltas) {}
        merge_deltas(deltas)
    }

    /// Gives out what is left at the end of the answer.
    pub fn finish(&mut self) -> Vec<AnswerDelta> {
        let mut deltas = Vec::new();
        let rest = std::mem::take(&mut self.pending);
        match self.state {
            ParserState::Reasoning => deltas.extend(non_empty(rest).map(AnswerDelta::Reasoning)),
            ParserState::Start | ParserState::Text => self.give_text(rest, &mut deltas),
            // A call that was cut off before its name is lost text: it is given out as it is.
            ParserState::InCall { started: false, .. } => self.give_text(rest, &mut deltas),
            ParserState::BetweenCalls | ParserState::InCall { .. } => {}
        }
        merge_deltas(deltas)
    }

    /// Decides about the beginning of the pending text. Returns whether there may be more to decide.
    fn step(&mut self, deltas: &mut Vec<AnswerDelta>) -> bool {
        match self.state {
            ParserState::Start => self.step_start(deltas),
            ParserState::Reasoning => self.step_reasoning(deltas),
            ParserState::Text => self.step_text(deltas),
            ParserState::BetweenCalls => self.step_between_calls(),
            ParserState::InCall { sent, started } => self.step_call(sent, started, deltas),
        }
    }

    fn step_start(&mut self, deltas: &mut Vec<AnswerDelta>) -> bool {
        let trimmed = self.pending.trim_start();
        if trimmed.is_empty() {
            return false;
        }
        if self.has_reasoning {
            // The empty lines behind the reasoning belong to it.
            let text = trimmed.to_owned();
            self.pending = text;
        }
        let trimmed = self.pending.trim_start();
        let mut is_undecided = false;
        if let Some(skip) = &self.skip {
            if let Some(rest) = trimmed.strip_prefix(skip.as_str()) {
                self.pending = rest.to_owned();
                self.skip = None;
                self.markers.reasoning = None;
                return true;
            }
            is_undecided = skip.starts_with(trimmed);
        }
        let trimmed = self.pending.trim_start();
        if let Some(open) = self.markers.reasoning.as_ref().map(|reasoning| reasoning.open.clone()) {
            if let Some(rest) = trimmed.strip_prefix(open.as_str()) {
                self.pending = rest.to_owned();
                self.state = ParserState::Reasoning;
                return true;
            }
            is_undecided |= open.starts_with(trimmed);
        }
        if is_undecided {
            return false;
        }
        // A marker can begin like a list: `[TOOL_CALLS]`.
        let marker = self.markers.calls.as_ref().map_or("", CallFormat::marker);
        let is_marker = !marker.is_empty() && trimmed.starts_with(marker);
        if !is_marker && marker.starts_with(trimmed) && trimmed.starts_with('[') {
            return false;
        }
        if self.markers.calls.is_some() && !self.has_text && !is_marker {
            match bare_value_start(trimmed) {
                BareStart::At(at) => {
                    let start = self.pending.len() - trimmed.len() + at;
                    return self.step_bare_call(start, deltas);
                }
                BareStart::Undecided => return false,
                BareStart::Text => {}
            }
        }
        self.state = ParserState::Text;
        true
    }

    /// An answer that is an object, or a list of them, is a call if it names a function. The value starts at an offset.
    fn step_bare_call(&mut self, start: usize, deltas: &mut Vec<AnswerDelta>) -> bool {
        let trimmed = &self.pending[start..];
        let object = trimmed.strip_prefix('[').unwrap_or(trimmed).trim_start();
        if object.is_empty() {
            return false;
        }
        let (members, end) = json_members(object);
        let name = members.iter().find(|m| m.key == "name" && m.is_complete);
        let is_known = name.is_some_and(|name| self.is_function(name.value.trim_matches('"')));
        let has_arguments = members.iter().any(|m| self.is_arguments(m.key));
        let is_call = |key: &str| matches!(key, "name" | "id" | "type") || self.is_arguments(key);
        if is_known && members.iter().all(|m| is_call(m.key)) && (has_arguments || end.is_none()) {
            if !has_arguments {
                return false;
            }
            self.pending = object.to_owned();
            self.bare_calls = true;
            self.state = ParserState::InCall { sent: 0, started: false };
            return true;
        }
        // The key of the first member decides, as soon as it is complete.
        let undecided = members.is_empty() && "{\"name\":\"".starts_with(&compact(object));
        let naming = members.len() == 1 && members[0].key == "name" && !members[0].is_complete;
        if object.starts_with('{') && end.is_none() && (undecided || naming) {
            return false;
        }
        let text = std::mem::take(&mut self.pending);
        self.state = ParserState::Text;
        self.give_text(text, deltas);
        false
    }

    fn step_reasoning(&mut self, deltas: &mut Vec<AnswerDelta>) -> bool {
        let Some(reasoning) = &self.markers.reasoning else {
            self.state = ParserState::Text;
            return true;
        };
        let close = reasoning.close.clone();
        if !self.has_reasoning {
            self.pending = self.pending.trim_start_matches('\n').to_owned();
        }
        if let Some(at) = self.pending.find(&close) {
            let rest = self.pending[at + close.len()..].to_owned();
            let text = self.pending[..at].trim_end_matches('\n').to_owned();
            deltas.extend(non_empty(text).map(AnswerDelta::Reasoning));
            self.has_reasoning = true;
            self.pending = rest;
            self.state = ParserState::Start;
            // A second block of reasoning is text.
            self.markers.reasoning = None;
            return true;
        }
        // Line breaks before the end marker belong to it.
        let held = held_back(&self.pending, &close);
        let text: String = self.pending.drain(..self.pending.len() - held).collect();
        self.has_reasoning |= !text.is_empty();
        deltas.extend(non_empty(text).map(AnswerDelta::Reasoning));
        false
    }

    fn step_text(&mut self, deltas: &mut Vec<AnswerDelta>) -> bool {
        let marker = self.markers.calls.as_ref().map_or("", CallFormat::marker).to_owned();
        if marker.is_empty() {
            let text = std::mem::take(&mut self.pending);
            self.give_text(text, deltas);
            return false;
        }
        if let Some(at) = self.pending.find(&marker) {
            let text = self.pending[..at].trim_end().to_owned();
            self.pending = self.pending[at + marker.len()..].to_owned();
            self.give_text(text, deltas);
            self.state = ParserState::BetweenCalls;
            return true;
        }
        let held = held_back(&self.pending, &marker);
        let text: String = self.pending.drain(..self.pending.len() - held).collect();
        self.give_text(text, deltas);
        false
    }

    /// Everything between two objects is template text.
    fn step_between_calls(&mut self) -> bool {
        match self.pending.find('{') {
            Some(at) => {
                self.pending.drain(..at);
                self.after_call.clear();
                self.state = ParserState::InCall { sent: 0, started: false };
                true
            }
            None => {
                self.after_call.push_str(&self.pending);
                self.pending.clear();
                false
            }
        }
    }

    fn step_call(&mut self, sent: usize, started: bool, deltas: &mut Vec<AnswerDelta>) -> bool {
        let (members, end) = json_members(&self.pending);
        let arguments = members.iter().find(|m| self.is_arguments(m.key));
        let name = members.iter().find(|m| m.key == "name" && m.is_complete);
        let name = name.map(|name| name.value.trim_matches('"').to_owned());
        let is_known = name.as_deref().is_some_and(|name| self.is_function(name));
        let mut state = (sent, started);
        if let (Some(name), true, false) = (&name, is_known, started) {
            deltas.push(AnswerDelta::CallStart { index: self.calls, name: name.clone() });
            self.calls += 1;
            state.1 = true;
        }
        if state.1 {
            let text = arguments.map_or("", |m| m.value);
            // White space at the end may be behind the value.
            let text = if end.is_some() { text } else { text.trim_end() };
            let new = text.get(sent..).unwrap_or_default();
            let index = self.calls - 1;
            deltas.extend(non_empty(new.to_owned()).map(|text| AnswerDelta::CallArguments { index, text }));
            state.0 = sent.max(text.len());
            if end.is_some() && arguments.is_none() {
                deltas.push(AnswerDelta::CallArguments { index, text: "{}".into() });
            }
        }
        let Some(end) = end else {
            self.state = ParserState::InCall { sent: state.0, started: state.1 };
            return false;
        };
        if !state.1 {
            // No function has this name.
            let text = self.pending[..end].to_owned();
            self.give_text(text, deltas);
        }
        self.pending.drain(..end);
        self.state = ParserState::BetweenCalls;
        true
    }

    /// Whether a key is that of arguments; models confuse the two usual ones.
    fn is_arguments(&self, key: &str) -> bool {
        let own = self.markers.calls.as_ref().map_or("", |calls| calls.arguments_key.as_str());
        key == own || matches!(key, "arguments" | "parameters")
    }

    fn is_function(&self, name: &str) -> bool {
        self.markers.functions.as_ref().is_none_or(|functions| functions.iter().any(|known| known == name))
    }

    fn give_text(&mut self, text: String, deltas: &mut Vec<AnswerDelta>) {
        self.has_text |= !text.trim().is_empty();
        deltas.extend(non_empty(text).map(AnswerDelta::Text));
    }
}

/// Where an answer may be an object or a list of objects.
enum BareStart {
    At(usize),
    /// The answer is a code block whose first lines are not complete.
    Undecided,
    Text,
}

/// Where the value of an answer without a marker starts. Models that were trained on code write it as a code block.
fn bare_value_start(answer: &str) -> BareStart {
    const FENCE: &str = "```";
    if answer.starts_with(['{', '[']) {
        return BareStart::At(0);
    }
    let Some(block) = answer.strip_prefix(FENCE) else {
        return if FENCE.starts_with(answer) { BareStart::Undecided } else { BareStart::Text };
    };
    let Some((language, value)) = block.split_once('\n') else {
        return if "json".starts_with(block.trim_end()) { BareStart::Undecided } else { BareStart::Text };
    };
    let value = value.trim_start();
    match (matches!(language.trim(), "" | "json"), value.chars().next()) {
        (true, None) => BareStart::Undecided,
        (true, Some('{' | '[')) => BareStart::At(answer.len() - value.len()),
        _ => BareStart::Text,
    }
}

/// An object without white space before its first key.
fn compact(object: &str) -> String {
    object.chars().filter(|c| !c.is_whitespace()).collect()
}

fn non_empty(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

/// How many bytes at the end of a text may be the beginning of a marker, with the line breaks before them.
fn held_back(text: &str, marker: &str) -> usize {
    let starts = text.char_indices().map(|(at, _)| at).filter(|at| text.len() - at < marker.len());
    let held = starts.map(|at| &text[at..]).find(|end| marker.starts_with(end)).map_or(0, str::len);
    text.len() - text[..text.len() - held].trim_end_matches('\n').len()
}

/// Joins pieces of the same kind.
fn merge_deltas(deltas: Vec<AnswerDelta>) -> Vec<AnswerDelta> {
    let mut merged: Vec<AnswerDelta> = Vec::with_capacity(deltas.len());
    for delta in deltas {
        match (merged.last_mut(), delta) {
            (Some(AnswerDelta::Reasoning(before)), AnswerDelta::Reasoning(text))
            | (Some(AnswerDelta::Text(before)), AnswerDelta::Text(text)) => before.push_str(&text),
            (_, delta) => merged.push(delta),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hermes() -> AnswerMarkers {
        let reasoning = ReasoningFormat {
            open: "<think>".into(),
            close: "</think>".into(),
            prompt: String::new(),
            skip: None,
        };
        AnswerMarkers {
            reasoning: Some(reasoning),
            starts_in_reasoning: false,
            calls: Some(CallFormat::default()),
            functions: Some(vec!["weather".into(), "clock".into()]),
        }
    }

    /// The answer as `reasoning | text | name arguments; …`.
    fn describe(answer: &AnswerParts) -> String {
        let calls: Vec<String> =
            answer.calls.iter().map(|call| format!("{} {}", call.name, call.arguments)).collect();
        format!("{}|{}|{}", answer.reasoning, answer.text, calls.join("; "))
    }

    #[test]
    fn answer_parser_reads_channels_of_harmony() {
        let reasoning = ReasoningFormat {
            open: "<|channel|>analysis<|message|>".into(),
            close: "<|end|><|start|>assistant".into(),
            prompt: String::new(),
            skip: Some("<|channel|>final<|message|>".into()),
        };
        let markers = AnswerMarkers { reasoning: Some(reasoning), ..AnswerMarkers::default() };
        let cases = [
            (
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
                "Hm.|Yes.|",
            ),
            ("<|channel|>final<|message|>Yes.", "|Yes.|"),
            ("<|channel|>analysis<|message|>Hm.", "Hm.||"),
            ("Yes.", "|Yes.|"),
            ("<|channel|>other", "|<|channel|>other|"),
        ];
        for (answer, expected) in cases {
            assert_eq!(describe(&markers.parse(answer)), expected, "{answer}");
            // A character at a time.
            let mut parser = AnswerParser::new(markers.clone());
            let mut parts = AnswerParts::default();
            for c in answer.chars() {
                parser.push(&c.to_string()).into_iter().for_each(|delta| parts.push(delta));
            }
            parser.finish().into_iter().for_each(|delta| parts.push(delta));
            assert_eq!(describe(&parts), expected, "{answer}");
        }
    }

    #[test]
    fn answer_parser_says_when_calls_are_over() {
        let object = "{\"name\": \"clock\", \"parameters\": {}}";
        let bare = CallFormat {
            open: String::new(),
            separator: "; ".into(),
            close: String::new(),
            arguments_key: "parameters".into(),
        };
        let bare = AnswerMarkers { calls: Some(bare), ..AnswerMarkers::default() };
        // The answer, whether its last call is closed, and whether no other one follows.
        let cases = [
            (&bare, object.to_owned(), true, false),
            (&bare, object.trim_end_matches('}').to_owned(), false, false),
            (&bare, format!("{object}\n"), true, false),
            (&bare, format!("{object}; "), true, false),
            (&bare, format!("{object}, {object}"), true, false),
            (&bare, format!("{object}; {object}\nThe"), true, true),
            (&bare, format!("{object}The"), true, true),
            (&bare, format!("[{object}]"), true, true),
            (&hermes(), object.to_owned(), true, false),
            (&hermes(), format!("```json\n{object}"), true, false),
            (&hermes(), format!("```json\n{object}\n```"), true, true),
            (&hermes(), format!("<tool_call>\n{object}"), false, false),
            (&hermes(), format!("<tool_call>\n{object}\n</tool_call>"), true, false),
            (&hermes(), format!("<tool_call>\n{object}\n</tool_call>\nThe"), false, false),
            (&hermes(), "<tool_call>\n".to_owned(), false, false),
            (&hermes(), "The clock.".to_owned(), false, false),
        ];
        for (markers, answer, closed, over) in cases {
            let mut parser = AnswerParser::new(markers.clone());
            for c in answer.chars() {
                parser.push(&c.to_string());
            }
            assert_eq!((parser.is_call_closed(), parser.are_calls_over()), (closed, over), "{answer}");
        }
    }

    #[test]
    fn answer_parser_splits_reasoning_text_and_calls() {
        let cases = [
            ("Just text.", "|Just text.|"),
            ("<think>\nHm.\n</think>\n\nYes.", "Hm.|Yes.|"),
            ("<think>cut off", "cut off||"),
            (
                "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": \"Lindau\"}}\n</tool_call>",
                "|I look.|weather {\"town\": \"Lindau\"}",
            ),
            (
                "<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {\"a\": \"}\"}}\n</tool_call>",
                "||weather {}; clock {\"a\": \"}\"}",
            ),
            ("<think>x</think><tool_call>{\"name\":\"clock\"}</tool_call>", "x||clock {}"),
            ("{\"name\": \"clock\", \"parameters\": {\"zone\": 1}}", "||clock {\"zone\": 1}"),
            (
                "[{\"name\": \"clock\", \"arguments\": {}}, {\"name\": \"weather\", \"arguments\": {}}]",
                "||clock {}; weather {}",
            ),
            (
                "```json\n{\n  \"name\": \"clock\",\n  \"arguments\": {\n    \"zone\": 1\n  }\n}\n```",
                "||clock {\n    \"zone\": 1\n  }",
            ),
            ("```\n[{\"name\": \"clock\", \"arguments\": {}}]\n```", "||clock {}"),
            ("```json\n{\"name\": \"Otto\"}\n```", "|```json\n{\"name\": \"Otto\"}\n```|"),
            ("```rust\nfn main() {}\n```", "|```rust\nfn main() {}\n```|"),
            ("```js\n{}\n```", "|```js\n{}\n```|"),
            ("``` is a fence", "|``` is a fence|"),
            ("`clock` is a function", "|`clock` is a function|"),
            ("```json\n", "|```json\n|"),
            (
                "Call:\n```json\n{\"name\": \"clock\", \"arguments\": {}}\n```",
                "|Call:\n```json\n{\"name\": \"clock\", \"arguments\": {}}\n```|",
            ),
            ("{\"name\": \"Otto\", \"age\": 7}", "|{\"name\": \"Otto\", \"age\": 7}|"),
            ("{\"town\": \"Lindau\"}", "|{\"town\": \"Lindau\"}|"),
            ("[1, 2]", "|[1, 2]|"),
            ("{\"name\": \"clock\", \"age\": 7}", "|{\"name\": \"clock\", \"age\": 7}|"),
            ("a <tool of b\n\n", "|a <tool of b\n\n|"),
            (
                "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>",
                "|{\"name\": \"rm\", \"arguments\": {}}|",
            ),
            ("<tool_call>\n{\"name\": \"clock\", \"arguments\": {\"a\": 1", "||clock {\"a\": 1"),
            (
                "Text {\"name\": \"clock\", \"arguments\": {}}",
                "|Text {\"name\": \"clock\", \"arguments\": {}}|",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(describe(&hermes().parse(text)), expected, "{text}");
            // The same in pieces of every size.
            for size in 1..8 {
                let (mut parser, mut answer) = (AnswerParser::new(hermes()), AnswerParts::default());
                let characters: Vec<char> = text.chars().collect();
                for piece in characters.chunks(size) {
                    parser.push(&piece.iter().collect::<String>()).into_iter().for_each(|d| answer.push(d));
                }
                parser.finish().into_iter().for_each(|d| answer.push(d));
                assert_eq!(describe(&answer), expected, "{text} in pieces of {size}");
            }
        }
    }

    #[test]
    fn answer_parser_begins_in_reasoning_that_the_prompt_opened() {
        let markers = AnswerMarkers { starts_in_reasoning: true, ..hermes() };
        assert_eq!(describe(&markers.parse("Hm.\n</think>\n\nYes.")), "Hm.|Yes.|");
    }

    #[test]
    fn answer_parser_without_functions_leaves_text_alone() {
        let text = "<tool_call>{\"name\": \"clock\"}</tool_call>";
        let markers = AnswerMarkers::default();
        assert_eq!(describe(&markers.parse(text)), format!("|{text}|"));
    }

    #[test]
    fn answer_parser_streams_arguments() {
        let mut parser = AnswerParser::new(hermes());
        assert_eq!(parser.push("<tool_call>\n{\"name\": \"clo"), []);
        assert_eq!(parser.push("ck\", \"arg"), [AnswerDelta::CallStart { index: 0, name: "clock".into() }]);
        let arguments = |text: &str| AnswerDelta::CallArguments { index: 0, text: text.into() };
        assert_eq!(parser.push("uments\": {\"a\""), [arguments("{\"a\"")]);
        assert_eq!(parser.push(": 1}}\n</tool"), [arguments(": 1}")]);
        assert_eq!((parser.push("_call>"), parser.finish(), parser.calls()), (vec![], vec![], 1));
    }
}
