//! Transcripts in Markdown or plain text, in which a line names the speaker of the next message: a speaker marker.
//!
//! There are three styles: headings (`## User`, `### 🤖 Claude — 2026-03-18`), bold names (`**User:** Hello`, or
//! `**User**` on a line of its own) and plain names (`User: Hello`, with a capital, at the start of a line). A transcript
//! has one style, the first of these in which both sides speak, so that an answer that contains another style stays
//! whole; of headings, each side has the level that it uses most. A line in a code fence or a quotation is never a marker.
//! Only syntax is removed: the markers, white space around a message (except for the indent of its first line), and a
//! rule (`---`) between two messages. CRLF becomes LF.

use super::conversation::{ConversationCallback, ForeignConversation, non_blank};
use super::date;
use super::error::ImportError;
use super::input::{MAX_RECORD_BYTES, RecordByteLimit, Utf8Reader, read_error};
use super::losses::{ImportLosses, loss_kind};
use halo_core::token::Role;
use std::collections::BTreeMap;
use std::io::{BufRead, Read};

#[derive(Clone, Copy, Debug)]
enum MarkerStyle {
    Heading(usize),
    Bold,
    Plain,
}

impl MarkerStyle {
    /// The order of preference, best first.
    fn rank(self) -> usize {
        match self {
            MarkerStyle::Heading(_) => 0,
            MarkerStyle::Bold => 1,
            MarkerStyle::Plain => 2,
        }
    }

    fn level(self) -> usize {
        match self {
            MarkerStyle::Heading(level) => level,
            MarkerStyle::Bold | MarkerStyle::Plain => 0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum MarkdownSpeaker {
    Role(Role),
    /// A tool; its results are not imported.
    Tool,
}

/// The names of speakers, and whether a name is worth keeping beside the role.
const SPEAKER_NAMES: [(&str, MarkdownSpeaker, bool); 17] = [
    ("user", MarkdownSpeaker::Role(Role::User), false),
    ("you", MarkdownSpeaker::Role(Role::User), false),
    ("human", MarkdownSpeaker::Role(Role::User), false),
    ("me", MarkdownSpeaker::Role(Role::User), false),
    ("assistant", MarkdownSpeaker::Role(Role::Assistant), false),
    ("ai", MarkdownSpeaker::Role(Role::Assistant), false),
    ("bot", MarkdownSpeaker::Role(Role::Assistant), false),
    ("model", MarkdownSpeaker::Role(Role::Assistant), false),
    ("chatgpt", MarkdownSpeaker::Role(Role::Assistant), true),
    ("gpt", MarkdownSpeaker::Role(Role::Assistant), true),
    ("claude", MarkdownSpeaker::Role(Role::Assistant), true),
    ("gemini", MarkdownSpeaker::Role(Role::Assistant), true),
    ("copilot", MarkdownSpeaker::Role(Role::Assistant), true),
    ("system", MarkdownSpeaker::Role(Role::System), false),
    ("developer", MarkdownSpeaker::Role(Role::System), false),
    ("tool", MarkdownSpeaker::Tool, false),
    ("function", MarkdownSpeaker::Tool, false),
];

/// A line that names a speaker.
#[derive(Clone, Copy, Debug)]
struct SpeakerMarker<'t> {
    style: MarkerStyle,
    speaker_kind: MarkdownSpeaker,
    speaker_name: &'t str,
    /// A remark after the name, such as a date.
    note: &'t str,
    /// The rest of the line: the beginning of the message.
    rest: &'t str,
}

/// A marker and its offsets in the text.
#[derive(Clone, Copy, Debug)]
struct LocatedMarker<'t> {
    marker: SpeakerMarker<'t>,
    line_start: usize,
    message_start: usize,
}

/// Whether a text, or the beginning of one, has speaker markers.
pub(super) fn has_speakers(text: &str) -> bool {
    !find_markers(text, 0).is_empty()
}

pub(super) fn read(input: &mut dyn BufRead, each: ConversationCallback<'_>) -> Result<(), ImportError> {
    let byte_limit = RecordByteLimit::new(MAX_RECORD_BYTES);
    let mut text = String::new();
    let read = Utf8Reader::open(input, &byte_limit)?.read_to_string(&mut text);
    read.map_err(|e| read_error(e, 1))?;
    if text.contains('\r') {
        text = text.replace("\r\n", "\n");
    }
    let mut foreign = ForeignConversation::default();
    let body = read_front_matter(&text, &mut foreign);
    let markers = find_markers(&text, body);
    let first = markers.first().ok_or(ImportError::NoSpeakers)?;
    read_preamble(&text[body..first.line_start], &mut foreign);
    let ends = markers.iter().skip(1).map(|next| next.line_start).chain([text.len()]);
    for (LocatedMarker { marker, message_start, .. }, end) in markers.iter().zip(ends) {
        let message = trim_message(&text[*message_start..end]);
        let MarkdownSpeaker::Role(role) = marker.speaker_kind else {
            foreign.losses.add(loss_kind::TOOL_RESULTS, usize::from(!message.is_empty()));
            continue;
        };
        let at = date::parse_date_text(marker.note);
        let lost_note = at.is_none() && !marker.note.is_empty();
        foreign.losses.add("remarks beside a speaker's name", usize::from(lost_note));
        foreign.push_turn(role, marker.speaker_name, at, message.to_owned());
    }
    foreign.created = foreign.created.or_else(|| foreign.turns.first()?.at);
    each(foreign)
}

/// Reads the front matter, between two `---` at the top, and returns where the text after it begins.
fn read_front_matter(text: &str, foreign: &mut ForeignConversation) -> usize {
    let Some(rest) = text.strip_prefix("---\n") else { return 0 };
    // The first line may also be a rule above the first speaker; a key begins with a small letter, a speaker does not.
    let Some(end) = rest.find("\n---\n").filter(|_| rest.starts_with(|c: char| c.is_ascii_lowercase()))
    else {
        return 0;
    };
    for line in rest[..end].lines() {
        let (key, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.trim().trim_matches(['"', '\'']);
        match key.trim() {
            "title" => foreign.name = non_blank(value),
            "model" => foreign.model = non_blank(value),
            "date" | "created" | "created_at" | "create_time" => {
                foreign.created = date::parse_date_text(value);
                foreign.losses.add(loss_kind::UNREADABLE_DATES, usize::from(foreign.created.is_none()));
            }
            _ => count_preamble_line(line, &mut foreign.losses),
        }
    }
    "---\n".len() + end + "\n---\n".len()
}

fn read_preamble(text: &str, foreign: &mut ForeignConversation) {
    for line in text.lines() {
        match line.strip_prefix("# ") {
            Some(title) if foreign.name.is_none() => foreign.name = non_blank(title.trim()),
            _ => count_preamble_line(line, &mut foreign.losses),
        }
    }
}

fn count_preamble_line(line: &str, losses: &mut ImportLosses) {
    let empty = line.trim().is_empty() || is_horizontal_rule(line);
    losses.add("lines before the first speaker", usize::from(!empty));
}

/// The speaker markers from byte `body` on, in the style of the transcript.
fn find_markers(text: &str, body: usize) -> Vec<LocatedMarker<'_>> {
    let mut markers = find_markers_of_all_styles(text, body);
    let speaks = |style: usize, role: Role| {
        markers
            .iter()
            .any(|m| m.marker.style.rank() == style && m.marker.speaker_kind == MarkdownSpeaker::Role(role))
    };
    let both = (0..3).find(|style| speaks(*style, Role::User) && speaks(*style, Role::Assistant));
    let one = || (0..3).find(|style| speaks(*style, Role::User) || speaks(*style, Role::Assistant));
    let Some(style) = both.or_else(one) else { return Vec::new() };
    markers.retain(|m| m.marker.style.rank() == style);

    // Of two levels that are used equally often, the deeper one is that of the messages: `# Claude` may be the title.
    let mut uses = BTreeMap::<(MarkdownSpeaker, usize), usize>::new();
    for m in &markers {
        *uses.entry((m.marker.speaker_kind, m.marker.style.level())).or_default() += 1;
    }
    let mut levels = BTreeMap::<MarkdownSpeaker, (usize, usize)>::new();
    for ((speaker, level), count) in uses {
        let most_used = levels.entry(speaker).or_default();
        *most_used = (*most_used).max((count, level));
    }
    markers.retain(|m| {
        levels.get(&m.marker.speaker_kind).is_some_and(|(_, level)| *level == m.marker.style.level())
    });
    markers
}

fn find_markers_of_all_styles(text: &str, body: usize) -> Vec<LocatedMarker<'_>> {
    let mut markers = Vec::new();
    let mut fence: Option<MarkdownFence> = None;
    let mut line_start = body;
    for full_line in text[body..].split_inclusive('\n') {
        let line = full_line.strip_suffix('\n').unwrap_or(full_line);
        let marker = if fence.is_none() { parse_marker(line) } else { None };
        if let Some(marker) = marker {
            let message_start = line_start + line.len() - marker.rest.len();
            markers.push(LocatedMarker { marker, line_start, message_start });
        }
        fence = match (fence, MarkdownFence::parse(marker.map_or(line, |marker| marker.rest))) {
            (None, new) => new,
            (Some(open), Some(end)) if end.bare && end.mark == open.mark && end.len >= open.len => None,
            (open, _) => open,
        };
        line_start += full_line.len();
    }
    markers
}

/// A line that opens or closes a code block.
#[derive(Clone, Copy, Debug)]
struct MarkdownFence {
    mark: char,
    len: usize,
    /// Whether nothing follows on the line, so that it can close a block.
    bare: bool,
}

impl MarkdownFence {
    fn parse(line: &str) -> Option<Self> {
        let code = line.trim_start_matches(' ');
        let mark = code.chars().next().filter(|c| matches!(c, '`' | '~'))?;
        let info = code.trim_start_matches(mark);
        let len = code.len() - info.len();
        let indent = line.len() - code.len();
        let fits = indent < 4 && len >= 3 && !(mark == '`' && info.contains('`'));
        fits.then(|| Self { mark, len, bare: info.trim().is_empty() })
    }
}

fn parse_marker(line: &str) -> Option<SpeakerMarker<'_>> {
    let heading = line.trim_start_matches(' ');
    if heading.starts_with('#') {
        let title = heading.trim_start_matches('#');
        let level = heading.len() - title.len();
        let fits = level <= 6 && title.starts_with([' ', '\t']) && line.len() - heading.len() < 4;
        let label = parse_speaker_label(title.trim().trim_end_matches('#')).filter(|_| fits)?;
        return Some(label.into_marker(MarkerStyle::Heading(level), ""));
    }
    if let Some(bold) = line.strip_prefix("**") {
        let (name, rest) = bold.split_once("**")?;
        let label = parse_speaker_label(name)?;
        let after_colon = rest.strip_prefix(':').or(name.trim_end().ends_with(':').then_some(rest));
        let rest = match after_colon {
            Some(text) => text.strip_prefix(' ').unwrap_or(text),
            None if rest.trim().is_empty() => "",
            None => return None,
        };
        return Some(label.into_marker(MarkerStyle::Bold, rest));
    }
    if !line.starts_with(|c: char| c.is_ascii_uppercase()) {
        return None;
    }
    let (name, rest) = line.split_once(':')?;
    let label = parse_speaker_label(name).filter(|label| label.note.is_empty())?;
    Some(label.into_marker(MarkerStyle::Plain, rest.strip_prefix(' ').unwrap_or(rest)))
}

/// A speaker, the name if it is worth keeping, and a remark after it.
struct SpeakerLabel<'t> {
    kind: MarkdownSpeaker,
    name: &'t str,
    note: &'t str,
}

impl<'t> SpeakerLabel<'t> {
    fn into_marker(self, style: MarkerStyle, rest: &'t str) -> SpeakerMarker<'t> {
        SpeakerMarker { style, speaker_kind: self.kind, speaker_name: self.name, note: self.note, rest }
    }
}

/// Parses a label such as `3. 🤖 **Claude** — 2026-03-18T03:54`, `You said:` or `[user] [2024-12-30 10:37:31]`.
fn parse_speaker_label(text: &str) -> Option<SpeakerLabel<'_>> {
    let no_word = |c: char| !c.is_alphanumeric();
    let numbered = text.trim_start_matches(no_word);
    let plain = numbered.trim_start_matches(|c: char| c.is_ascii_digit());
    let numbered = if plain.starts_with(['.', ')']) { plain.trim_start_matches(no_word) } else { numbered };
    let (word, after) = numbered.split_at(numbered.find(no_word).unwrap_or(numbered.len()));
    let (_, kind, keep_name) = SPEAKER_NAMES.iter().find(|(name, ..)| word.eq_ignore_ascii_case(name))?;
    let after = after.trim_start_matches(['*', ']']).trim().trim_end_matches([':', '*']).trim_end();
    let after = after.strip_prefix("said").unwrap_or(after);
    let note = after.trim_matches(REMARK_SEPARATORS);
    let dashed = after.starts_with(REMARK_SEPARATORS) && note.contains(|c: char| c.is_ascii_digit());
    let fits = after.is_empty() || after.starts_with(['(', '[']) || dashed;
    fits.then_some(SpeakerLabel { kind: *kind, name: if *keep_name { word } else { "" }, note })
}

/// Characters between a name and a remark after it.
const REMARK_SEPARATORS: [char; 12] = ['(', ')', '[', ']', '—', '–', '-', '·', '|', ',', '@', ' '];

/// A message without the blank lines around it and without a rule at its end.
fn trim_message(message: &str) -> &str {
    let mut start = 0;
    for line in message.split_inclusive('\n').take_while(|line| line.trim().is_empty()) {
        start += line.len();
    }
    let message = message[start..].trim_end();
    let (before, last) = message.rsplit_once('\n').unwrap_or(("", message));
    let rule = is_horizontal_rule(last) && (before.is_empty() || before.ends_with('\n'));
    if rule { before.trim_end() } else { message }
}

fn is_horizontal_rule(line: &str) -> bool {
    matches!(line.trim(), "---" | "***" | "___")
}
