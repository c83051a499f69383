//! Transcripts that people keep: Markdown or plain text in which a line says who speaks next.
//!
//! Three styles are known: headings (`## User`, `### 🤖 Claude — 2026-03-18`), bold names (`**User:** Hello`,
//! or `**User**` on a line of its own) and plain names (`User: Hello`, with a capital, at the start of a
//! line). A transcript keeps to one, the first of these in which both sides speak, so that an answer which
//! contains another style stays whole; of headings, each side keeps to the level that it uses most. What
//! stands in a code fence or a quotation never says who speaks. What goes is only the syntax: the lines that
//! name the speaker, white space around a message (but for the indent of its first line), and a rule (`---`)
//! between two of them. CRLF becomes LF.

use super::input::{MAX_RECORD_BYTES, RecordByteLimit, Utf8Reader, read_error};
use super::{
    ConversationCallback, ForeignConversation, ImportError, ImportLosses, Role, date, loss_kind, non_blank,
};
use std::collections::BTreeMap;
use std::io::{BufRead, Read};

#[derive(Clone, Copy, Debug)]
enum MarkerStyle {
    Heading(usize),
    Bold,
    Plain,
}

impl MarkerStyle {
    /// The order of preference.
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
    /// A tool, whose results are left behind.
    Tool,
}

/// The names that say who speaks, and whether the name says more than the role.
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

/// A line that says who speaks.
#[derive(Clone, Copy, Debug)]
struct SpeakerMarker<'t> {
    style: MarkerStyle,
    speaker_kind: MarkdownSpeaker,
    speaker_name: &'t str,
    /// What stands behind the name, such as a date.
    note: &'t str,
    /// What the line says after the name.
    rest: &'t str,
}

/// A marker and its place in the text: where its line begins, and where its message does.
#[derive(Clone, Copy, Debug)]
struct LocatedMarker<'t> {
    marker: SpeakerMarker<'t>,
    line: usize,
    message: usize,
}

/// Whether a text, or its beginning, names its speakers.
pub(super) fn has_speakers(text: &str) -> bool {
    !find_markers(text, 0).is_empty()
}

pub(super) fn read(input: &mut dyn BufRead, each: ConversationCallback<'_>) -> Result<(), ImportError> {
    let allowance = RecordByteLimit::new(MAX_RECORD_BYTES);
    let mut text = String::new();
    let read = Utf8Reader::open(input, &allowance)?.read_to_string(&mut text);
    read.map_err(|e| read_error(e, 1))?;
    if text.contains('\r') {
        text = text.replace("\r\n", "\n");
    }
    let mut foreign = ForeignConversation::default();
    let body = read_front_matter(&text, &mut foreign);
    let markers = find_markers(&text, body);
    let first = markers.first().ok_or(ImportError::NoSpeakers)?;
    read_preamble(&text[body..first.line], &mut foreign);
    let ends = markers.iter().skip(1).map(|next| next.line).chain([text.len()]);
    for (LocatedMarker { marker, message, .. }, end) in markers.iter().zip(ends) {
        let said = trim_message(&text[*message..end]);
        let MarkdownSpeaker::Role(role) = marker.speaker_kind else {
            foreign.losses.add(loss_kind::TOOL_RESULTS, usize::from(!said.is_empty()));
            continue;
        };
        let at = date::parse_date_text(marker.note);
        let unread = at.is_none() && !marker.note.is_empty();
        foreign.losses.add("remarks beside a speaker's name", usize::from(unread));
        foreign.push_turn(role, marker.speaker_name, at, said.to_owned());
    }
    foreign.created = foreign.created.or_else(|| foreign.turns.first()?.at);
    each(foreign)
}

/// Reads what stands between two `---` at the top and tells where the text behind it begins.
fn read_front_matter(text: &str, foreign: &mut ForeignConversation) -> usize {
    let Some(rest) = text.strip_prefix("---\n") else { return 0 };
    // A rule may also stand above the first speaker; a key begins with a small letter, a speaker does not.
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

fn count_preamble_line(line: &str, lost: &mut ImportLosses) {
    let empty = line.trim().is_empty() || is_horizontal_rule(line);
    lost.add("lines before the first speaker", usize::from(!empty));
}

/// The lines from byte `body` on that say who speaks, in the style that the transcript keeps to.
fn find_markers(text: &str, body: usize) -> Vec<LocatedMarker<'_>> {
    let mut found = Vec::new();
    let mut fence: Option<MarkdownFence> = None;
    let mut start = body;
    for whole in text[body..].split_inclusive('\n') {
        let line = whole.strip_suffix('\n').unwrap_or(whole);
        let marker = if fence.is_none() { parse_marker(line) } else { None };
        if let Some(marker) = marker {
            found.push(LocatedMarker {
                marker,
                line: start,
                message: start + line.len() - marker.rest.len(),
            });
        }
        fence = match (fence, MarkdownFence::parse(marker.map_or(line, |marker| marker.rest))) {
            (None, new) => new,
            (Some(open), Some(end)) if end.bare && end.mark == open.mark && end.len >= open.len => None,
            (open, _) => open,
        };
        start += whole.len();
    }

    let speaks = |style: usize, role: Role| {
        found
            .iter()
            .any(|f| f.marker.style.rank() == style && f.marker.speaker_kind == MarkdownSpeaker::Role(role))
    };
    let both = (0..3).find(|style| speaks(*style, Role::User) && speaks(*style, Role::Assistant));
    let one = || (0..3).find(|style| speaks(*style, Role::User) || speaks(*style, Role::Assistant));
    let Some(style) = both.or_else(one) else { return Vec::new() };
    found.retain(|f| f.marker.style.rank() == style);

    // Of two levels that are used equally often the deeper one counts: `# Claude` may well be the title.
    let mut uses = BTreeMap::<(MarkdownSpeaker, usize), usize>::new();
    for f in &found {
        *uses.entry((f.marker.speaker_kind, f.marker.style.level())).or_default() += 1;
    }
    let mut levels = BTreeMap::<MarkdownSpeaker, (usize, usize)>::new();
    for ((who, level), count) in uses {
        let most = levels.entry(who).or_default();
        *most = (*most).max((count, level));
    }
    found.retain(|f| {
        levels.get(&f.marker.speaker_kind).is_some_and(|(_, level)| *level == f.marker.style.level())
    });
    found
}

/// A line that opens or closes a code block.
#[derive(Clone, Copy, Debug)]
struct MarkdownFence {
    mark: char,
    len: usize,
    /// Nothing follows on the line, so that it can close a block.
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
        let (who, speaker, note) =
            parse_speaker_label(title.trim().trim_end_matches('#')).filter(|_| fits)?;
        return Some(SpeakerMarker {
            style: MarkerStyle::Heading(level),
            speaker_kind: who,
            speaker_name: speaker,
            note,
            rest: "",
        });
    }
    if let Some(bold) = line.strip_prefix("**") {
        let (name, rest) = bold.split_once("**")?;
        let (who, speaker, note) = parse_speaker_label(name)?;
        let spoken = rest.strip_prefix(':').or(name.trim_end().ends_with(':').then_some(rest));
        let rest = match spoken {
            Some(spoken) => spoken.strip_prefix(' ').unwrap_or(spoken),
            None if rest.trim().is_empty() => "",
            None => return None,
        };
        return Some(SpeakerMarker {
            style: MarkerStyle::Bold,
            speaker_kind: who,
            speaker_name: speaker,
            note,
            rest,
        });
    }
    if !line.starts_with(|c: char| c.is_ascii_uppercase()) {
        return None;
    }
    let (name, rest) = line.split_once(':')?;
    let (who, speaker, note) = parse_speaker_label(name)?;
    Some(SpeakerMarker {
        style: MarkerStyle::Plain,
        speaker_kind: who,
        speaker_name: speaker,
        note,
        rest: rest.strip_prefix(' ').unwrap_or(rest),
    })
    .filter(|_| note.is_empty())
}

/// Who speaks, by what name, and what is remarked behind it, as in `3. 🤖 **Claude** — 2026-03-18T03:54`,
/// `You said:` or `[user] [2024-12-30 10:37:31]`.
fn parse_speaker_label(text: &str) -> Option<(MarkdownSpeaker, &str, &str)> {
    let no_word = |c: char| !c.is_alphanumeric();
    let numbered = text.trim_start_matches(no_word);
    let plain = numbered.trim_start_matches(|c: char| c.is_ascii_digit());
    let numbered = if plain.starts_with(['.', ')']) { plain.trim_start_matches(no_word) } else { numbered };
    let (word, behind) = numbered.split_at(numbered.find(no_word).unwrap_or(numbered.len()));
    let (_, who, named) = SPEAKER_NAMES.iter().find(|(name, ..)| word.eq_ignore_ascii_case(name))?;
    let behind = behind.trim_start_matches(['*', ']']).trim().trim_end_matches([':', '*']).trim_end();
    let behind = behind.strip_prefix("said").unwrap_or(behind);
    let remark = behind.trim_matches(REMARK_SEPARATORS);
    let dashed = behind.starts_with(REMARK_SEPARATORS) && remark.contains(|c: char| c.is_ascii_digit());
    let fits = behind.is_empty() || behind.starts_with(['(', '[']) || dashed;
    fits.then_some((*who, if *named { word } else { "" }, remark))
}

/// What sets a remark apart from the name before it.
const REMARK_SEPARATORS: [char; 12] = ['(', ')', '[', ']', '—', '–', '-', '·', '|', ',', '@', ' '];

/// A message without the blank lines around it and without the rule that ends it.
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
