//! How messages are written for a model: the preamble with the system prompt, and the header of each turn.
//!
//! The header of a turn closes the turn before it. So the window is well formed whatever is pruned or resurrected: the end of
//! a turn is never pruned without the header of the next, and the first chunk of a turn stays as long as any other of its
//! chunks.

use halo_core::Error;
use halo_core::change::{Append, NewToken};
use halo_core::chunker::Chunker;
use halo_core::model::{ChatTemplate, Model, ModelToken, OutputConstraint, Sampling};
use halo_core::rules::ContextRules;
use halo_core::timeline::Timeline;
use halo_core::token::{ContentKind, Role, TokenSource};
use halo_core::tool_call::{ToolChoice, ToolDefinition, ToolSection};
use jiff::civil::{Date, DateTime, Time};
use std::fmt;
use xxhash_rust::xxh3::xxh3_64;

/// Writes messages with a model's chat template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatFormatter {
    pub template: ChatTemplate,
    pub system_prompt: String,
    /// Whether user messages carry their time, and the first one of a day the date.
    pub show_dates: bool,
    pub names: SpeakerNames,
}

/// When a user message was written, as its header shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageTime {
    /// The date, for the first message of a day.
    pub date: Option<Date>,
    pub time: Time,
}

impl MessageTime {
    /// `last_day` is the day of the user message before it.
    #[must_use]
    pub fn new(now: DateTime, last_day: Option<Date>) -> Self {
        Self { date: Some(now.date()).filter(|_| last_day != Some(now.date())), time: now.time() }
    }
}

impl MessageTime {
    /// Whether a header of a user message has a time behind its template text, before the name of the user.
    #[must_use]
    pub fn ends_header(header: &str) -> bool {
        let Some((before, _)) = header.rsplit_once("] ") else { return false };
        let Some((_, stamp)) = before.rsplit_once('[') else { return false };
        let (date, time) = stamp.rsplit_once(", ").unwrap_or(("", stamp));
        let year = date.rsplit(' ').next().unwrap_or_default();
        let is_digit = |byte: u8| byte.is_ascii_digit();
        let is_year = year.len() == 4 && year.bytes().all(is_digit);
        let is_time_byte = |(n, byte): (usize, u8)| if n == 2 { byte == b':' } else { is_digit(byte) };
        time.len() == 5 && time.bytes().enumerate().all(is_time_byte) && (date.is_empty() || is_year)
    }
}

impl fmt::Display for MessageTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(date) = self.date {
            write!(f, "{}, ", date.strftime("%A, %-d %B %Y"))?;
        }
        write!(f, "{}", self.time.strftime("%H:%M"))
    }
}

/// Names that are written before the messages of the user and the model; empty: none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpeakerNames {
    pub user: String,
    pub assistant: String,
}

/// Text of the chat template, and content behind it. Only the template's text can name special tokens: content is data,
/// and a name such as `<|im_end|>` in it stays text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FramedText {
    pub frame: String,
    pub content: String,
}

impl FramedText {
    #[must_use]
    pub fn text(&self) -> String {
        format!("{}{}", self.frame, self.content)
    }

    /// The tokens of both. Content without the name of a special token is tokenized together with the frame, because a
    /// vocabulary may merge a space at the end of the frame with the first word.
    pub fn tokenize(&self, model: &mut dyn Model) -> Result<Vec<ModelToken>, Error> {
        let joined = model.tokenize(&self.text(), true)?;
        if self.content.is_empty() || !self.names_special_token(&joined, model)? {
            return Ok(joined);
        }
        let mut tokens = model.tokenize(&self.frame, true)?;
        tokens.extend(model.tokenize(&self.content, false)?);
        Ok(tokens)
    }

    /// Whether the content has the name of a special token, or is the end of one that begins in the frame.
    fn names_special_token(&self, joined: &[ModelToken], model: &mut dyn Model) -> Result<bool, Error> {
        let mut end = 0;
        let across = joined.iter().find(|token| {
            let start = end;
            end += token.text.len();
            start < self.frame.len() && end > self.frame.len()
        });
        if let Some(token) = across {
            let name = token.text.trim();
            let special = model.tokenize(name, true)?;
            if special.len() == 1 && special != model.tokenize(name, false)? {
                return Ok(true);
            }
        }
        Ok(model.tokenize(&self.content, true)? != model.tokenize(&self.content, false)?)
    }
}

/// The text behind functions that stand before an empty system prompt, without the beginning of its message.
fn gap_without_prompt<'a>(section: &'a ToolSection, prompt: &str, system_prefix: &str) -> Option<&'a str> {
    let is_before = section.tools_first && prompt.is_empty() && !system_prefix.is_empty();
    section.gap.strip_suffix(system_prefix).filter(|_| is_before)
}

impl ChatFormatter {
    /// The text before the timeline. It is not closed: the header of the first turn does that.
    #[must_use]
    pub fn preamble(&self) -> FramedText {
        let ChatTemplate { start, system, .. } = &self.template;
        match self.system_prompt.trim() {
            "" => FramedText { frame: start.clone(), content: String::new() },
            prompt => FramedText { frame: format!("{start}{}", system.prefix), content: prompt.to_owned() },
        }
    }

    /// The text before the timeline with the functions that a client offers. Only the template's text can name special
    /// tokens; the functions are content.
    #[must_use]
    pub fn preamble_with_tools(&self, tools: &[ToolDefinition]) -> Vec<FramedText> {
        let ChatTemplate { start, system, tools: format, .. } = &self.template;
        let (Some(first), more) = (tools.first(), tools.get(1..).unwrap_or_default()) else {
            return vec![self.preamble()];
        };
        let section = format.section.clone().unwrap_or_else(|| ToolSection::generic(&system.prefix));
        let prompt = self.system_prompt.trim();
        let framed = |frame: String, content: String| FramedText { frame, content };
        // Functions may stand before the message of the system prompt, which is not begun without a prompt.
        let bare_gap = gap_without_prompt(&section, prompt, &system.prefix);
        // Without a system prompt, the header of the first turn does not close the preamble.
        let closing = if prompt.is_empty() && bare_gap.is_none() { system.suffix.as_str() } else { "" };
        let mut texts = Vec::with_capacity(tools.len() + 2);
        let (head, gap) = (format!("{start}{}", section.head), section.gap.as_str());
        let first = |frame: String| framed(frame, section.definition(first));
        let more = more.iter().map(|tool| framed(section.separator.clone(), section.definition(tool)));
        if section.tools_first {
            texts.push(first(head));
            texts.extend(more);
            texts.push(framed(bare_gap.unwrap_or(gap).to_owned(), prompt.to_owned()));
        } else {
            texts.push(framed(head, prompt.to_owned()));
            texts.push(first(gap.to_owned()));
            texts.extend(more);
        }
        texts.push(framed(format!("{}{closing}", section.tail), String::new()));
        texts.retain(|text| !text.frame.is_empty() || !text.content.is_empty());
        texts
    }

    /// The header of a turn after one of `before`, or after the system prompt, with the time of a user message.
    #[must_use]
    pub fn turn_header(&self, role: Role, before: Option<Role>, at: Option<MessageTime>) -> FramedText {
        let system = (!self.system_prompt.trim().is_empty()).then_some(Role::System);
        let closing = before.or(system).map_or("", |role| &self.template.wrap_for(role).suffix);
        let at = at.filter(|_| self.show_dates).map_or(String::new(), |at| format!("[{at}] "));
        let name = match role {
            Role::User => self.names.user.trim(),
            Role::Assistant => self.names.assistant.trim(),
            Role::System | Role::Tool => "",
        };
        // Results that follow each other may share the turn of a user.
        let separator = self.template.tools.result_separator.as_ref();
        if let (Role::Tool, Some(Role::Tool), Some(separator)) = (role, before, separator) {
            return FramedText { frame: separator.clone(), content: String::new() };
        }
        // Tokens of words begin with a space, so the model's own header ends with the colon.
        let name = match (name, role) {
            ("", _) => String::new(),
            (name, Role::Assistant) => format!("{name}:"),
            (name, _) => format!("{name}: "),
        };
        FramedText {
            frame: format!("{closing}{}", self.template.wrap_for(role).prefix),
            content: format!("{at}{name}"),
        }
    }

    /// Differs between templates that write turns differently: then a conversation must be retokenized.
    #[must_use]
    pub fn fingerprint(template: &ChatTemplate) -> String {
        // Functions change from request to request, and reasoning is no part of a finished turn.
        let ChatTemplate { start: _, system, user, assistant, tools: _, reasoning: _ } = template;
        let parts = [system, user, assistant].map(|wrap| format!("{}\0{}", wrap.prefix, wrap.suffix));
        format!("{:016x}", xxh3_64(parts.join("\0").as_bytes()))
    }
}

/// What the template writes between the header of an answer and the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerOpening {
    Plain,
    /// The beginning of the reasoning.
    Reasoning,
    /// The sign that there is no reasoning.
    WithoutReasoning,
}

impl AnswerOpening {
    /// `skip` is the client's wish for an answer without reasoning, `continued` says that the client has begun the answer.
    #[must_use]
    pub fn new(template: &ChatTemplate, sampling: &Sampling, skip: bool, continued: bool) -> Self {
        let Some(reasoning) = template.reasoning.as_ref().filter(|_| !continued) else { return Self::Plain };
        // Such an answer follows its format from the first token.
        let is_constrained = match &sampling.constraint {
            None => false,
            Some(OutputConstraint::ToolCalls(options)) => {
                options.choice != ToolChoice::Auto || options.answer_schema.is_some()
            }
            Some(
                OutputConstraint::JsonSchema(_)
                | OutputConstraint::LarkGrammar(_)
                | OutputConstraint::GbnfGrammar(_),
            ) => true,
        };
        match () {
            () if (skip || is_constrained) && reasoning.skip.is_some() => Self::WithoutReasoning,
            () if is_constrained || reasoning.prompt.is_empty() => Self::Plain,
            () => Self::Reasoning,
        }
    }

    /// The text of it.
    #[must_use]
    pub fn text(self, template: &ChatTemplate) -> String {
        let reasoning = template.reasoning.as_ref();
        match self {
            Self::Plain => String::new(),
            Self::Reasoning => reasoning.map(|r| r.prompt.clone()).unwrap_or_default(),
            Self::WithoutReasoning => reasoning.and_then(|r| r.skip.clone()).unwrap_or_default(),
        }
    }
}

/// A new turn of a timeline: its header and its message, split into chunks.
#[must_use]
pub fn plan_append(
    timeline: &Timeline,
    role: Role,
    turn_tokens: Vec<(ModelToken, ContentKind)>,
    rules: &ContextRules,
) -> Append {
    let mut chunker = Chunker::new(rules.chunks);
    let brightness = rules.strategy.initial_brightness(TokenSource::from_role(role, false));
    let mut tokens: Vec<NewToken> = Vec::with_capacity(turn_tokens.len());
    for (ModelToken { id, text }, kind) in turn_tokens {
        let chunk_index = match kind {
            ContentKind::Template => 0,
            _ => {
                let assignment = chunker.push(&text);
                let moved = assignment.moved_tokens.map_or(0, |n| n as usize - 1);
                let from = tokens.len() - moved;
                tokens[from..].iter_mut().for_each(|token| token.chunk_index = assignment.chunk_index);
                assignment.chunk_index
            }
        };
        tokens.push(NewToken { id, text, chunk_index, brightness, kind });
    }
    Append { at: timeline.next_position(), turn: timeline.next_turn(), role, tokens }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::civil::date;

    /// A message at five past two on 5 November 2026.
    #[test]
    fn message_time_is_found_in_a_header() {
        let user = "<|im_start|>user\n";
        for time in [message_time(None), message_time(message_time(None).and_then(|time| time.date))] {
            let stamp = time.expect("a time").to_string();
            assert!(MessageTime::ends_header(&format!("{user}[{stamp}] ")), "{stamp}");
            assert!(MessageTime::ends_header(&format!("{user}[{stamp}] Otto: ")), "{stamp}");
        }
        for header in ["", user, "[INST] ", "[/INST][INST] ", "[12:5] ", "[noon] ", "[5, 12:05] ", "[12:05]"]
        {
            assert!(!MessageTime::ends_header(header), "{header}");
        }
    }

    fn message_time(last_day: Option<Date>) -> Option<MessageTime> {
        Some(MessageTime::new(date(2026, 11, 5).at(14, 5, 59, 0), last_day))
    }

    #[test]
    fn chat_format_turn_header_closes_previous_turn() {
        let frame = ChatFormatter {
            template: ChatTemplate::chatml(),
            system_prompt: " Be kind.\n".into(),
            show_dates: true,
            names: SpeakerNames::default(),
        };
        assert_eq!(frame.preamble().text(), "<|im_start|>system\nBe kind.");
        let first = frame.turn_header(Role::User, None, message_time(None));
        assert_eq!(first.text(), "<|im_end|>\n<|im_start|>user\n[Thursday, 5 November 2026, 14:05] ");
        let later =
            frame.turn_header(Role::User, Some(Role::Assistant), message_time(Some(date(2026, 11, 5))));
        assert_eq!(later.text(), "<|im_end|>\n<|im_start|>user\n[14:05] ");
        let next_day = frame.turn_header(Role::User, None, message_time(Some(date(2026, 11, 4))));
        assert_eq!(next_day, first);
        let answer = frame.turn_header(Role::Assistant, Some(Role::User), None);
        assert_eq!(answer.text(), "<|im_end|>\n<|im_start|>assistant\n");
        let names = SpeakerNames { user: "Ada".into(), assistant: "Halo".into() };
        let named = ChatFormatter { names, ..frame.clone() };
        let first = named.turn_header(Role::User, None, message_time(Some(date(2026, 11, 5))));
        assert_eq!(first.text(), "<|im_end|>\n<|im_start|>user\n[14:05] Ada: ");
        let answer = named.turn_header(Role::Assistant, Some(Role::User), None);
        assert_eq!(answer.text(), "<|im_end|>\n<|im_start|>assistant\nHalo:");
        let bare = ChatFormatter { system_prompt: String::new(), show_dates: false, ..frame };
        assert_eq!(bare.preamble().text(), "");
        assert_eq!(bare.turn_header(Role::User, None, message_time(None)).text(), "<|im_start|>user\n");
    }

    #[test]
    fn chat_format_preamble_has_functions() {
        let tool = |name: &str| ToolDefinition {
            name: name.into(),
            function: format!("{{\"name\": \"{name}\"}}"),
            parameters: "{}".into(),
        };
        let text = |format: &ChatFormatter, tools: &[ToolDefinition]| -> String {
            format.preamble_with_tools(tools).iter().map(FramedText::text).collect()
        };
        let mut template = ChatTemplate::chatml();
        let mut format = ChatFormatter {
            template: template.clone(),
            system_prompt: "Be kind.".into(),
            show_dates: false,
            names: SpeakerNames::default(),
        };
        assert_eq!(text(&format, &[]), "<|im_start|>system\nBe kind.");
        let generic = text(&format, &[tool("f"), tool("g")]);
        assert!(generic.starts_with("<|im_start|>system\nBe kind.\n\n# Tools\n"), "{generic}");
        let both = "{\"type\": \"function\", \"function\": {\"name\": \"f\"}}\n{\"type\": \"function\", \"function\": {\"name\": \"g\"}}\n</tools>";
        assert!(generic.contains(both) && generic.ends_with("</tool_call>"), "{generic}");
        template.tools.section = Some(ToolSection {
            tools_first: true,
            head: "<|im_start|>system\n[".into(),
            gap: "]\n".into(),
            separator: ", ".into(),
            tail: "!".into(),
            bare_function: true,
            indent: None,
        });
        format.template = template;
        let first = "<|im_start|>system\n[{\"name\": \"f\"}, {\"name\": \"g\"}]\nBe kind.!";
        assert_eq!(text(&format, &[tool("f"), tool("g")]), first);
        format.system_prompt.clear();
        assert_eq!(text(&format, &[tool("f")]), "<|im_start|>system\n[{\"name\": \"f\"}]\n!<|im_end|>\n");
        let results = format.turn_header(Role::Tool, Some(Role::Assistant), None).text();
        assert_eq!(results, "<|im_end|>\n<|im_start|>user\n<tool_response>\n");
        let next = format.turn_header(Role::Tool, Some(Role::Tool), None).text();
        assert_eq!(next, "\n</tool_response>\n<tool_response>\n");
    }

    #[test]
    fn chat_format_fingerprint_differs_between_templates() {
        let [chatml, plain] =
            [ChatTemplate::chatml(), ChatTemplate::plain()].map(|t| ChatFormatter::fingerprint(&t));
        assert_ne!(chatml, plain);
        let started = ChatTemplate { start: "<s>".into(), ..ChatTemplate::chatml() };
        assert_eq!(
            chatml,
            ChatFormatter::fingerprint(&started),
            "the start of the template does not change its turns"
        );
    }
}
