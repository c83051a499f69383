//! Transcripts that people keep: Markdown or plain text in which a line says who speaks next.
//!
//! Three styles are known: headings (`## User`, `### 🤖 Claude — 2026-03-18`), bold names (`**User:** Hello`,
//! or `**User**` on a line of its own) and plain names (`User: Hello`, with a capital, at the start of a
//! line). A transcript keeps to one, the first of these in which both sides speak, so that an answer which
//! contains another style stays whole; of headings, each side keeps to the level that it uses most. What
//! stands in a code fence or a quotation never says who speaks. What goes is only the syntax: the lines that
//! name the speaker, white space around a message (but for the indent of its first line), and a rule (`---`)
//! between two of them. CRLF becomes LF.

use super::input::{Allowance, Input, RECORD_LIMIT, read_error};
use super::{Each, Foreign, Losses, ReadError, Role, date, filled, kind};
use std::collections::BTreeMap;
use std::io::{BufRead, Read};

#[derive(Clone, Copy, Debug)]
enum Style {
    Heading(usize),
    Bold,
    Plain,
}

impl Style {
    /// The order of preference.
    fn rank(self) -> usize {
        match self {
            Style::Heading(_) => 0,
            Style::Bold => 1,
            Style::Plain => 2,
        }
    }

    fn level(self) -> usize {
        match self {
            Style::Heading(level) => level,
            Style::Bold | Style::Plain => 0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Speaks(Role),
    /// A tool, whose results are left behind.
    Tool,
}

/// The names that say who speaks, and whether the name says more than the role.
const NAMES: [(&str, Who, bool); 17] = [
    ("user", Who::Speaks(Role::User), false),
    ("you", Who::Speaks(Role::User), false),
    ("human", Who::Speaks(Role::User), false),
    ("me", Who::Speaks(Role::User), false),
    ("assistant", Who::Speaks(Role::Assistant), false),
    ("ai", Who::Speaks(Role::Assistant), false),
    ("bot", Who::Speaks(Role::Assistant), false),
    ("model", Who::Speaks(Role::Assistant), false),
    ("chatgpt", Who::Speaks(Role::Assistant), true),
    ("gpt", Who::Speaks(Role::Assistant), true),
    ("claude", Who::Speaks(Role::Assistant), true),
    ("gemini", Who::Speaks(Role::Assistant), true),
    ("copilot", Who::Speaks(Role::Assistant), true),
    ("system", Who::Speaks(Role::System), false),
    ("developer", Who::Speaks(Role::System), false),
    ("tool", Who::Tool, false),
    ("function", Who::Tool, false),
];

/// A line that says who speaks.
#[derive(Clone, Copy, Debug)]
struct Marker<'t> {
    style: Style,
    who: Who,
    speaker: &'t str,
    /// What stands behind the name, such as a date.
    note: &'t str,
    /// What the line says after the name.
    rest: &'t str,
}

/// A marker and its place in the text: where its line begins, and where its message does.
#[derive(Clone, Copy, Debug)]
struct Placed<'t> {
    marker: Marker<'t>,
    line: usize,
    message: usize,
}

/// Whether a text, or its beginning, names its speakers.
pub(super) fn has_speakers(text: &str) -> bool {
    !markers(text, 0).is_empty()
}

pub(super) fn read(input: &mut dyn BufRead, each: Each<'_>) -> Result<(), ReadError> {
    let allowance = Allowance::new(RECORD_LIMIT);
    let mut text = String::new();
    let read = Input::open(input, &allowance)?.read_to_string(&mut text);
    read.map_err(|e| read_error(e, 1))?;
    if text.contains('\r') {
        text = text.replace("\r\n", "\n");
    }
    let mut foreign = Foreign::default();
    let body = front_matter(&text, &mut foreign);
    let markers = markers(&text, body);
    let first = markers.first().ok_or(ReadError::NoSpeakers)?;
    preamble(&text[body..first.line], &mut foreign);
    let ends = markers.iter().skip(1).map(|next| next.line).chain([text.len()]);
    for (Placed { marker, message, .. }, end) in markers.iter().zip(ends) {
        let said = trimmed(&text[*message..end]);
        let Who::Speaks(role) = marker.who else {
            foreign.lost.add(kind::TOOL_RESULTS, usize::from(!said.is_empty()));
            continue;
        };
        let at = date::spelled(marker.note);
        let unread = at.is_none() && !marker.note.is_empty();
        foreign.lost.add("remarks beside a speaker's name", usize::from(unread));
        foreign.say(role, marker.speaker, at, said.to_owned());
    }
    foreign.created = foreign.created.or_else(|| foreign.turns.first()?.at);
    each(foreign)
}

/// Reads what stands between two `---` at the top and tells where the text behind it begins.
fn front_matter(text: &str, foreign: &mut Foreign) -> usize {
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
            "title" => foreign.name = filled(value),
            "model" => foreign.model = filled(value),
            "date" | "created" | "created_at" | "create_time" => {
                foreign.created = date::spelled(value);
                foreign.lost.add(kind::DATES, usize::from(foreign.created.is_none()));
            }
            _ => unspoken(line, &mut foreign.lost),
        }
    }
    "---\n".len() + end + "\n---\n".len()
}

fn preamble(text: &str, foreign: &mut Foreign) {
    for line in text.lines() {
        match line.strip_prefix("# ") {
            Some(title) if foreign.name.is_none() => foreign.name = filled(title.trim()),
            _ => unspoken(line, &mut foreign.lost),
        }
    }
}

fn unspoken(line: &str, lost: &mut Losses) {
    let empty = line.trim().is_empty() || is_rule(line);
    lost.add("lines before the first speaker", usize::from(!empty));
}

/// The lines from byte `body` on that say who speaks, in the style that the transcript keeps to.
fn markers(text: &str, body: usize) -> Vec<Placed<'_>> {
    let mut found = Vec::new();
    let mut fence: Option<Fence> = None;
    let mut start = body;
    for whole in text[body..].split_inclusive('\n') {
        let line = whole.strip_suffix('\n').unwrap_or(whole);
        let marker = if fence.is_none() { marker(line) } else { None };
        if let Some(marker) = marker {
            found.push(Placed { marker, line: start, message: start + line.len() - marker.rest.len() });
        }
        fence = match (fence, Fence::of(marker.map_or(line, |marker| marker.rest))) {
            (None, new) => new,
            (Some(open), Some(end)) if end.bare && end.mark == open.mark && end.len >= open.len => None,
            (open, _) => open,
        };
        start += whole.len();
    }

    let speaks = |style: usize, role: Role| {
        found.iter().any(|f| f.marker.style.rank() == style && f.marker.who == Who::Speaks(role))
    };
    let both = (0..3).find(|style| speaks(*style, Role::User) && speaks(*style, Role::Assistant));
    let one = || (0..3).find(|style| speaks(*style, Role::User) || speaks(*style, Role::Assistant));
    let Some(style) = both.or_else(one) else { return Vec::new() };
    found.retain(|f| f.marker.style.rank() == style);

    // Of two levels that are used equally often the deeper one counts: `# Claude` may well be the title.
    let mut uses = BTreeMap::<(Who, usize), usize>::new();
    for f in &found {
        *uses.entry((f.marker.who, f.marker.style.level())).or_default() += 1;
    }
    let mut levels = BTreeMap::<Who, (usize, usize)>::new();
    for ((who, level), count) in uses {
        let most = levels.entry(who).or_default();
        *most = (*most).max((count, level));
    }
    found.retain(|f| levels.get(&f.marker.who).is_some_and(|(_, level)| *level == f.marker.style.level()));
    found
}

/// A line that opens or closes a code block.
#[derive(Clone, Copy, Debug)]
struct Fence {
    mark: char,
    len: usize,
    /// Nothing follows on the line, so that it can close a block.
    bare: bool,
}

impl Fence {
    fn of(line: &str) -> Option<Self> {
        let code = line.trim_start_matches(' ');
        let mark = code.chars().next().filter(|c| matches!(c, '`' | '~'))?;
        let info = code.trim_start_matches(mark);
        let len = code.len() - info.len();
        let indent = line.len() - code.len();
        let fits = indent < 4 && len >= 3 && !(mark == '`' && info.contains('`'));
        fits.then(|| Self { mark, len, bare: info.trim().is_empty() })
    }
}

fn marker(line: &str) -> Option<Marker<'_>> {
    let heading = line.trim_start_matches(' ');
    if heading.starts_with('#') {
        let title = heading.trim_start_matches('#');
        let level = heading.len() - title.len();
        let fits = level <= 6 && title.starts_with([' ', '\t']) && line.len() - heading.len() < 4;
        let (who, speaker, note) = label(title.trim().trim_end_matches('#')).filter(|_| fits)?;
        return Some(Marker { style: Style::Heading(level), who, speaker, note, rest: "" });
    }
    if let Some(bold) = line.strip_prefix("**") {
        let (name, rest) = bold.split_once("**")?;
        let (who, speaker, note) = label(name)?;
        let spoken = rest.strip_prefix(':').or(name.trim_end().ends_with(':').then_some(rest));
        let rest = match spoken {
            Some(spoken) => spoken.strip_prefix(' ').unwrap_or(spoken),
            None if rest.trim().is_empty() => "",
            None => return None,
        };
        return Some(Marker { style: Style::Bold, who, speaker, note, rest });
    }
    if !line.starts_with(|c: char| c.is_ascii_uppercase()) {
        return None;
    }
    let (name, rest) = line.split_once(':')?;
    let (who, speaker, note) = label(name)?;
    Some(Marker { style: Style::Plain, who, speaker, note, rest: rest.strip_prefix(' ').unwrap_or(rest) })
        .filter(|_| note.is_empty())
}

/// Who speaks, by what name, and what is remarked behind it, as in `3. 🤖 **Claude** — 2026-03-18T03:54`,
/// `You said:` or `[user] [2024-12-30 10:37:31]`.
fn label(text: &str) -> Option<(Who, &str, &str)> {
    let no_word = |c: char| !c.is_alphanumeric();
    let numbered = text.trim_start_matches(no_word);
    let plain = numbered.trim_start_matches(|c: char| c.is_ascii_digit());
    let numbered = if plain.starts_with(['.', ')']) { plain.trim_start_matches(no_word) } else { numbered };
    let (word, behind) = numbered.split_at(numbered.find(no_word).unwrap_or(numbered.len()));
    let (_, who, named) = NAMES.iter().find(|(name, ..)| word.eq_ignore_ascii_case(name))?;
    let behind = behind.trim_start_matches(['*', ']']).trim().trim_end_matches([':', '*']).trim_end();
    let behind = behind.strip_prefix("said").unwrap_or(behind);
    let remark = behind.trim_matches(REMARK);
    let dashed = behind.starts_with(REMARK) && remark.contains(|c: char| c.is_ascii_digit());
    let fits = behind.is_empty() || behind.starts_with(['(', '[']) || dashed;
    fits.then_some((*who, if *named { word } else { "" }, remark))
}

/// What sets a remark apart from the name before it.
const REMARK: [char; 12] = ['(', ')', '[', ']', '—', '–', '-', '·', '|', ',', '@', ' '];

/// A message without the blank lines around it and without the rule that ends it.
fn trimmed(message: &str) -> &str {
    let mut start = 0;
    for line in message.split_inclusive('\n').take_while(|line| line.trim().is_empty()) {
        start += line.len();
    }
    let message = message[start..].trim_end();
    let (before, last) = message.rsplit_once('\n').unwrap_or(("", message));
    let rule = is_rule(last) && (before.is_empty() || before.ends_with('\n'));
    if rule { before.trim_end() } else { message }
}

fn is_rule(line: &str) -> bool {
    matches!(line.trim(), "---" | "***" | "___")
}
