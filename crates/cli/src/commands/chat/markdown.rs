//! Answers while they arrive: words wrap at the width of the terminal, and Markdown is shown in styles of the terminal. No character
//! is left out or replaced: what marks emphasis, a heading or a list is faint.

use super::style::{TerminalStyle, TextStyle};
use std::fmt::Write;
use unicode_width::UnicodeWidthChar;

/// A word that is as long as this is printed before it ends, where the width of the terminal is not known.
const DEFAULT_WIDTH: usize = 80;

/// Formats text that arrives in pieces. A word is printed when it has ended.
pub struct MarkdownStream {
    style: TerminalStyle,
    /// The columns of the terminal; 0: lines are not wrapped.
    width: usize,
    column: usize,
    /// The column in which the wrapped lines of a list item begin.
    indent: usize,
    /// The part of a word that is not printed yet, its columns, and the space before it.
    word: String,
    word_width: usize,
    space: String,
    /// The last printed character of a word whose beginning is printed.
    printed_end: Option<char>,
    line: LineKind,
    /// The characters that end the block of code, and how many they are at least.
    fence: Option<(char, usize)>,
    bold: bool,
    italic: bool,
    in_code: bool,
    printed: TextStyle,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LineKind {
    /// No word of the line is known yet.
    Start,
    Text,
    Heading,
    /// A line that keeps its layout: of code or of a table.
    Verbatim,
    /// The line that begins or ends a block of code.
    Fence,
}

impl MarkdownStream {
    pub fn new(style: TerminalStyle, width: usize) -> Self {
        Self {
            style,
            width,
            column: 0,
            indent: 0,
            word: String::new(),
            word_width: 0,
            space: String::new(),
            printed_end: None,
            line: LineKind::Start,
            fence: None,
            bold: false,
            italic: false,
            in_code: false,
            printed: TextStyle::PLAIN,
        }
    }

    /// What can be printed once this text has arrived.
    pub fn push(&mut self, text: &str) -> String {
        let mut out = String::new();
        let longest = if self.width > 0 { self.width } else { DEFAULT_WIDTH };
        for c in text.chars() {
            match c {
                '\n' => {
                    self.end_word(&mut out);
                    self.end_line(&mut out);
                }
                ' ' | '\t' => {
                    self.end_word(&mut out);
                    self.space.push(c);
                }
                _ => {
                    // Scripts without spaces between words are not held back to the end of a paragraph.
                    if self.word_width >= longest && !is_marker(c) && !self.word.ends_with(is_marker) {
                        self.print_word(&mut out);
                    }
                    self.word.push(c);
                    self.word_width += c.width().unwrap_or(0);
                }
            }
        }
        out
    }

    /// The rest of the text.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        self.end_word(&mut out);
        self.set_style(TextStyle::PLAIN, &mut out);
        out
    }

    fn end_line(&mut self, out: &mut String) {
        self.set_style(TextStyle::PLAIN, out);
        out.push_str(&std::mem::take(&mut self.space));
        out.push('\n');
        // A marker that has no counterpart has an effect on its own line only.
        (self.bold, self.italic, self.in_code) = (false, false, false);
        self.line = LineKind::Start;
        (self.column, self.indent) = (0, 0);
    }

    fn end_word(&mut self, out: &mut String) {
        self.print_word(out);
        self.printed_end = None;
    }

    /// Prints what is known of a word.
    fn print_word(&mut self, out: &mut String) {
        if self.word.is_empty() {
            return;
        }
        let word = std::mem::take(&mut self.word);
        self.word_width = 0;
        let marker = if self.line == LineKind::Start { self.begin_line(&word) } else { None };
        if self.printed_end.is_none() {
            self.print_space(unbroken_width(&word), out);
        }
        match (marker, self.line) {
            (Some(style), _) => {
                self.print(&word, style, out);
                if self.line == LineKind::Text {
                    self.indent = self.column + 1;
                }
            }
            (None, LineKind::Verbatim | LineKind::Fence) => self.print(&word, self.base_style(), out),
            (None, _) => self.print_inline(&word, out),
        }
        self.printed_end = word.chars().next_back();
    }

    /// Decides what a line is by its first word. Returns the style of that word if it marks the line.
    fn begin_line(&mut self, word: &str) -> Option<TextStyle> {
        if let Some(fence) = self.fence {
            let run = fence_of(word).filter(|run| run.0 == fence.0 && run.1 >= fence.1);
            let ends = run.is_some_and(|run| word.len() == run.1);
            self.line = if ends { LineKind::Fence } else { LineKind::Verbatim };
            self.fence = self.fence.filter(|_| !ends);
            return None;
        }
        self.fence = fence_of(word).filter(|(c, length)| !word[*length..].contains(*c));
        self.line = match word {
            _ if self.fence.is_some() => LineKind::Fence,
            _ if word.starts_with('|') => LineKind::Verbatim,
            "#" | "##" | "###" | "####" | "#####" | "######" => LineKind::Heading,
            _ => LineKind::Text,
        };
        let is_number = || {
            let digits = word.strip_suffix(['.', ')']).unwrap_or_default();
            (1..=3).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit())
        };
        let marks = match self.line {
            LineKind::Heading => true,
            LineKind::Text => matches!(word, "-" | "*" | "+" | ">") || is_number(),
            _ => false,
        };
        marks.then_some(TextStyle::DIM)
    }

    /// The space before a word of this width, or the end of the line where the word does not fit into it.
    fn print_space(&mut self, width: usize, out: &mut String) {
        let space = std::mem::take(&mut self.space);
        let columns = display_width(&space);
        if columns > 0 && self.is_full(columns + width) {
            self.wrap(out);
        } else {
            self.column += columns;
            out.push_str(&space);
        }
    }

    fn is_full(&self, more: usize) -> bool {
        !matches!(self.line, LineKind::Verbatim | LineKind::Fence)
            && self.width > 0
            && self.column > self.indent
            && self.column + more > self.width
    }

    fn wrap(&mut self, out: &mut String) {
        let _ = write!(out, "\n{:1$}", "", self.indent);
        self.column = self.indent;
    }

    /// Prints a word with the effect of what begins and ends emphasis and code in it.
    fn print_inline(&mut self, word: &str, out: &mut String) {
        let mut before = self.printed_end;
        let mut rest = word;
        while let Some(c) = rest.chars().next() {
            if is_marker(c) {
                let length = rest.len() - rest.trim_start_matches(c).len();
                let (run, after) = (&rest[..length], rest[length..].chars().next());
                let is_effective = self.apply_marker(c, length, before, after);
                let style = if is_effective { TextStyle::DIM } else { self.base_style() };
                self.print(run, style, out);
                rest = &rest[length..];
            } else {
                // A line ends before a wide character, but within none that is made of several.
                let joins = matches!(c, '\u{1f3fb}'..='\u{1f3ff}') || before == Some('\u{200d}');
                if c.width() == Some(2) && !joins && self.is_full(2) {
                    self.set_style(TextStyle::PLAIN, out);
                    self.wrap(out);
                }
                self.print(&rest[..c.len_utf8()], self.base_style(), out);
                rest = &rest[c.len_utf8()..];
            }
            before = Some(c);
        }
    }

    /// Whether a run of `*`, `_` or a backtick begins or ends emphasis or code.
    fn apply_marker(&mut self, c: char, length: usize, before: Option<char>, after: Option<char>) -> bool {
        if c == '`' {
            self.in_code = !self.in_code;
            return true;
        }
        if self.in_code || length > 3 {
            return false;
        }
        let is_inside = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        let (begins, ends) = (after.is_some() && !is_inside(before), before.is_some() && !is_inside(after));
        let is_on = if length == 1 { self.italic } else { self.bold };
        let changes = if is_on { ends } else { begins };
        if changes {
            self.italic = if length == 2 { self.italic } else { !is_on };
            self.bold = if length == 1 { self.bold } else { !is_on };
        }
        changes
    }

    fn base_style(&self) -> TextStyle {
        match self.line {
            LineKind::Fence => TextStyle::DIM,
            LineKind::Verbatim if self.fence.is_some() => TextStyle::CODE,
            LineKind::Verbatim => TextStyle::PLAIN,
            _ if self.in_code => TextStyle::CODE,
            LineKind::Heading => TextStyle { bold: true, ..TextStyle::PLAIN },
            _ => TextStyle { bold: self.bold, italic: self.italic, ..TextStyle::PLAIN },
        }
    }

    fn print(&mut self, text: &str, style: TextStyle, out: &mut String) {
        self.set_style(style, out);
        self.column += display_width(text);
        out.push_str(text);
    }

    fn set_style(&mut self, style: TextStyle, out: &mut String) {
        if style != self.printed {
            out.push_str(&self.style.begin(style));
            self.printed = style;
        }
    }
}

fn is_marker(c: char) -> bool {
    matches!(c, '*' | '_' | '`')
}

/// The character and the length of the run that begins or ends a block of code.
fn fence_of(word: &str) -> Option<(char, usize)> {
    let c = word.chars().next().filter(|c| matches!(c, '`' | '~'))?;
    let length = word.len() - word.trim_start_matches(c).len();
    (length >= 3).then_some((c, length))
}

/// The columns of a word up to where it can be broken: its first wide character.
fn unbroken_width(word: &str) -> usize {
    let narrow = word.find(|c: char| c.width() == Some(2)).unwrap_or(word.len());
    if narrow == 0 { 2 } else { display_width(&word[..narrow]) }
}

/// How many columns a text takes.
fn display_width(text: &str) -> usize {
    text.chars().map(|c| c.width().unwrap_or(0)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text as it is printed, however it is cut into pieces; styles are written `‹b›`, `‹i›`, `‹c›`, `‹d›`, `‹›`.
    fn print(text: &str, width: usize, colour: bool) -> String {
        let format = |pieces: &mut dyn Iterator<Item = &str>, colour: bool, width: usize| {
            let mut stream = MarkdownStream::new(TerminalStyle::with_colour(colour), width);
            let mut out: String = pieces.map(|piece| stream.push(piece)).collect();
            out += &stream.finish();
            out
        };
        let whole = format(&mut std::iter::once(text), colour, width);
        let mut characters = text.split("").filter(|piece| !piece.is_empty());
        assert_eq!(format(&mut characters, colour, width), whole, "the same for every tokenization");
        let plain = format(&mut std::iter::once(text), false, 0);
        assert_eq!(plain, text, "no character is left out");
        [
            ("\x1b[0;1m", "‹b›"),
            ("\x1b[0;3m", "‹i›"),
            ("\x1b[0;1;3m", "‹bi›"),
            ("\x1b[0;36m", "‹c›"),
            ("\x1b[0;2m", "‹d›"),
            ("\x1b[0m", "‹›"),
        ]
        .iter()
        .fold(whole, |text, (code, name)| text.replace(code, name))
    }

    #[test]
    fn words_wrap_at_the_width() {
        for (text, width, printed) in [
            ("one two three four", 9, "one two\nthree\nfour"),
            ("one two three four", 0, "one two three four"),
            ("a verylongword b", 6, "a\nverylongword\nb"),
            ("日本語の文", 6, "日本語\nの文"),
            ("ab 日本", 6, "ab 日\n本"),
            ("👩🏽‍🚀👩🏽‍🚀", 4, "👩🏽‍🚀\n👩🏽‍🚀"),
            ("- one two three", 9, "- one two\n  three"),
            ("| a | b | c | d |\n", 6, "| a | b | c | d |\n"),
        ] {
            assert_eq!(print(text, width, false), printed, "{text}");
        }
    }

    #[test]
    fn markdown_is_shown_in_styles() {
        for (text, printed) in [
            ("a **bold word**, b", "a ‹d›**‹b›bold word‹d›**‹›, b"),
            ("*so* and _so_", "‹d›*‹i›so‹d›* ‹›and ‹d›_‹i›so‹d›_"),
            ("***both*** x", "‹d›***‹bi›both‹d›*** ‹›x"),
            ("**✅ Done** and **日本語**", "‹d›**‹b›✅ Done‹d›** ‹›and ‹d›**‹b›日本語‹d›**"),
            ("2 * 3, 2**3, a__b, snake_case_name", "2 * 3, 2**3, a__b, snake_case_name"),
            ("`a * b` c", "‹d›`‹c›a * b‹d›` ‹›c"),
            ("## A title\ntext", "‹d›## ‹b›A title‹›\ntext"),
            ("> quoted", "‹d›> ‹›quoted"),
            ("1. one\n2. two", "‹d›1. ‹›one\n‹d›2. ‹›two"),
            ("#日本 -👍 *.txt", "#日本 -👍 ‹d›*‹i›.txt"),
            ("**never closed\nplain", "‹d›**‹b›never closed‹›\nplain"),
            ("***\nplain", "***\nplain"),
        ] {
            assert_eq!(print(text, 80, true).trim_end_matches("‹›"), printed, "{text}");
            assert_eq!(print(text, 80, false), text, "{text}");
        }
    }

    #[test]
    fn code_blocks_keep_their_layout() {
        let text = "Run:\n```sh\nls -l    *.txt  # a long line of code\n    ~~~\n```\ndone";
        let printed =
            "Run:\n‹d›```sh‹›\n‹c›ls -l    *.txt  # a long line of code‹›\n    ‹c›~~~‹›\n‹d›```‹›\ndone";
        assert_eq!(print(text, 20, true), printed);
        assert_eq!(print(text, 20, false), text);
        let nested = "````\n```\ncode\n````\ntext";
        assert_eq!(print(nested, 20, true), "‹d›````‹›\n‹c›```‹›\n‹c›code‹›\n‹d›````‹›\ntext");
        assert_eq!(print("```one``` line", 20, true), "‹d›```‹c›one‹d›``` ‹›line");
    }

    #[test]
    fn long_words_are_not_held_back() {
        let mut stream = MarkdownStream::new(TerminalStyle::with_colour(false), 20);
        let out = stream.push(&"文".repeat(40));
        assert!(out.chars().filter(|c| *c == '文').count() >= 20, "{out}");
    }
}
