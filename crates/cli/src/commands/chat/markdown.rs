//! Answers while they arrive: words wrap at the width of the terminal, and Markdown is shown in styles of the terminal.

use super::style::{TerminalStyle, TextStyle};
use std::fmt::Write;
use unicode_width::UnicodeWidthChar;

/// Formats text that arrives in pieces. A word is printed when it has ended.
pub struct MarkdownStream {
    style: TerminalStyle,
    /// The columns of the terminal; 0: lines are not wrapped.
    width: usize,
    column: usize,
    /// The column in which the wrapped lines of a list item begin.
    indent: usize,
    /// A word that has not ended, and the space before it.
    word: String,
    space: String,
    line: LineKind,
    in_code_block: bool,
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
            space: String::new(),
            line: LineKind::Start,
            in_code_block: false,
            bold: false,
            italic: false,
            in_code: false,
            printed: TextStyle::PLAIN,
        }
    }

    /// What can be printed once this text has arrived.
    pub fn push(&mut self, text: &str) -> String {
        let mut out = String::new();
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
                // Scripts without spaces between words are wrapped at any character.
                _ if c.width() == Some(2) => {
                    self.end_word(&mut out);
                    self.word.push(c);
                    self.end_word(&mut out);
                }
                _ => self.word.push(c),
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
        out.push('\n');
        if self.line == LineKind::Start {
            // Emphasis ends with its paragraph.
            (self.bold, self.italic, self.in_code) = (false, false, false);
        }
        self.space.clear();
        self.line = LineKind::Start;
        (self.column, self.indent) = (0, 0);
    }

    fn end_word(&mut self, out: &mut String) {
        if self.word.is_empty() {
            return;
        }
        let word = std::mem::take(&mut self.word);
        if self.line == LineKind::Start {
            let marker = self.begin_line(&word, out);
            if marker {
                return;
            }
        }
        self.print_space(display_width(&word), out);
        match self.line {
            LineKind::Verbatim | LineKind::Fence => self.print(&word, self.base_style(), out),
            _ => self.print_inline(&word, out),
        }
    }

    /// Decides what a line is by its first word. Whether that word is a marker, which is not printed as it is.
    fn begin_line(&mut self, word: &str, out: &mut String) -> bool {
        if word.starts_with("```") || word.starts_with("~~~") {
            self.in_code_block = !self.in_code_block;
            self.line = LineKind::Fence;
            return false;
        }
        if self.in_code_block || word.starts_with('|') {
            self.line = LineKind::Verbatim;
            return false;
        }
        self.line = LineKind::Text;
        if !self.style.has_colour() {
            return false;
        }
        let is_number = |word: &str| {
            let digits = word.strip_suffix(['.', ')']).unwrap_or_default();
            (1..=3).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit())
        };
        let marker = match word {
            "#" | "##" | "###" | "####" | "#####" | "######" => {
                self.line = LineKind::Heading;
                return true;
            }
            "-" | "*" | "+" => "•",
            ">" => "│",
            number if is_number(number) => number,
            _ => return false,
        };
        self.print_space(display_width(marker), out);
        self.print(marker, TextStyle::DIM, out);
        self.indent = self.column + 1;
        true
    }

    /// The space before a word of this width, or the end of the line where the word does not fit into it.
    fn print_space(&mut self, width: usize, out: &mut String) {
        let mut space = std::mem::take(&mut self.space);
        if self.line == LineKind::Heading && self.column == 0 {
            space.clear();
        }
        let wraps = !matches!(self.line, LineKind::Verbatim | LineKind::Fence)
            && self.width > 0
            && self.column > self.indent
            && self.column + display_width(&space) + width > self.width;
        if wraps {
            let _ = write!(out, "\n{:1$}", "", self.indent);
            self.column = self.indent;
        } else {
            self.column += display_width(&space);
            out.push_str(&space);
        }
    }

    /// Prints a word without the characters that begin and end emphasis and code.
    fn print_inline(&mut self, word: &str, out: &mut String) {
        if !self.style.has_colour() {
            return self.print(word, TextStyle::PLAIN, out);
        }
        let mut before = None;
        let mut rest = word;
        while let Some(c) = rest.chars().next() {
            let marker = if rest.starts_with("**") { "**" } else { &rest[..c.len_utf8()] };
            let after = rest[marker.len()..].chars().next();
            let is_marker = match marker {
                "`" => {
                    self.in_code = !self.in_code;
                    true
                }
                _ if self.in_code => false,
                "**" => toggle(&mut self.bold, before, after),
                "*" | "_" => toggle(&mut self.italic, before, after),
                _ => false,
            };
            let length = if is_marker { marker.len() } else { c.len_utf8() };
            if !is_marker {
                self.print(&rest[..length], self.base_style(), out);
            }
            before = Some(c);
            rest = &rest[length..];
        }
    }

    fn base_style(&self) -> TextStyle {
        match self.line {
            LineKind::Fence => TextStyle::DIM,
            LineKind::Verbatim if self.in_code_block => TextStyle::CODE,
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

/// Begins or ends emphasis where a marker can do that. A marker ends it behind a word, and begins it before one.
fn toggle(on: &mut bool, before: Option<char>, after: Option<char>) -> bool {
    let is_inside = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    let changes = match *on {
        true => before.is_some() && !is_inside(after),
        false => after.is_some() && !is_inside(before),
    };
    *on ^= changes;
    changes
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
        let format = |pieces: &mut dyn Iterator<Item = &str>| {
            let mut stream = MarkdownStream::new(TerminalStyle::with_colour(colour), width);
            let mut out: String = pieces.map(|piece| stream.push(piece)).collect();
            out += &stream.finish();
            out
        };
        let whole = format(&mut std::iter::once(text));
        let mut characters = text.split("").filter(|piece| !piece.is_empty());
        assert_eq!(format(&mut characters), whole, "the same for every tokenization");
        [
            ("\x1b[0;1m", "‹b›"),
            ("\x1b[0;3m", "‹i›"),
            ("\x1b[0;36m", "‹c›"),
            ("\x1b[0;2m", "‹d›"),
            ("\x1b[0m", "‹›"),
        ]
        .iter()
        .fold(whole, |text, (code, name)| text.replace(code, name))
    }

    #[test]
    fn words_wrap_at_the_width() {
        assert_eq!(print("one two three four", 9, false), "one two\nthree\nfour");
        assert_eq!(print("one two three four", 0, false), "one two three four");
        assert_eq!(print("a verylongword b", 6, false), "a\nverylongword\nb");
        assert_eq!(print("日本語の文", 6, false), "日本語\nの文");
        assert_eq!(print("- one two three", 9, true), "‹d›• ‹›one two\n  three");
        assert_eq!(print("| a | b | c | d |\n", 6, false), "| a | b | c | d |\n");
    }

    #[test]
    fn markdown_is_shown_in_styles() {
        for (text, printed) in [
            ("a **bold word**, b", "a ‹b›bold word‹›, b"),
            ("*so* and _so_", "‹i›so ‹›and ‹i›so"),
            ("2 * 3 * 4 and snake_case_name", "2 * 3 * 4 and snake_case_name"),
            ("`a * b` c", "‹c›a * b ‹›c"),
            ("## A title\ntext", "‹b›A title‹›\ntext"),
            ("> quoted", "‹d›│ ‹›quoted"),
            ("1. one\n2. two", "‹d›1. ‹›one\n‹d›2. ‹›two"),
            ("**never closed\n\nplain", "‹b›never closed‹›\n\nplain"),
        ] {
            let ended = print(text, 80, true);
            assert_eq!(ended.trim_end_matches("‹›"), printed, "{text}");
            assert_eq!(print(text, 80, false), text, "without colour, the text stays as it is");
        }
    }

    #[test]
    fn code_blocks_keep_their_layout() {
        let text = "Run:\n```sh\nls -l    *.txt  # a long line of code\n```\ndone";
        let printed = "Run:\n‹d›```sh‹›\n‹c›ls -l    *.txt  # a long line of code‹›\n‹d›```‹›\ndone";
        assert_eq!(print(text, 20, true), printed);
        assert_eq!(print(text, 20, false), text);
    }
}
