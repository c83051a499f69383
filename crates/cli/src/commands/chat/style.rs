//! Colours, where the terminal supports them.

use crate::output::sanitize_terminal_text;
use halo_core::timeline::{ChunkRef, Timeline};

/// How a piece of text looks, in the terminal's own colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextStyle {
    pub bold: bool,
    pub italic: bool,
    pub dim: bool,
    pub code: bool,
}

impl TextStyle {
    pub const PLAIN: Self = Self { bold: false, italic: false, dim: false, code: false };
    pub const DIM: Self = Self { dim: true, ..Self::PLAIN };
    pub const CODE: Self = Self { code: true, ..Self::PLAIN };
}

#[derive(Clone, Copy, Debug)]
pub struct TerminalStyle {
    colour: bool,
}

impl TerminalStyle {
    /// `NO_COLOR` and a dumb terminal turn colours off.
    pub fn from_environment() -> Self {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self { colour: !plain }
    }

    #[cfg(test)]
    pub fn with_colour(colour: bool) -> Self {
        Self { colour }
    }

    /// The escape sequence that begins a style and ends the one before.
    pub fn begin(self, style: TextStyle) -> String {
        if !self.colour {
            return String::new();
        }
        let codes = [(style.bold, ";1"), (style.dim, ";2"), (style.italic, ";3"), (style.code, ";36")];
        let codes: String = codes.iter().filter(|(on, _)| *on).map(|(_, code)| *code).collect();
        format!("\x1b[0{codes}m")
    }

    /// For text beside the conversation.
    pub fn dim(self, text: &str) -> String {
        self.ansi("2", text)
    }

    /// For notices of resurrected chunks.
    pub fn highlight(self, text: &str) -> String {
        self.ansi("33", text)
    }

    /// For messages about errors.
    pub fn error(self, text: &str) -> String {
        self.ansi("31", text)
    }

    fn ansi(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// The text of a chunk, each token by its brightness between the dimmest and the brightest of the context window:
    /// faint, as usual or bold, which can be read on every ground.
    pub fn shade_by_brightness(
        self,
        timeline: &Timeline,
        chunk: ChunkRef<'_>,
        (min, max): (f32, f32),
    ) -> String {
        if !self.colour {
            return sanitize_terminal_text(&chunk.live_text());
        }
        let mut out = String::new();
        let mut last = None;
        for token in chunk.live_runs().flat_map(|run| run.positions()).filter_map(|p| timeline.token(p)) {
            if token.flags.kind() == halo_core::token::ContentKind::Template {
                continue;
            }
            let level = if max > min { (token.brightness.0 - min) / (max - min) } else { 0.5 };
            let style = match (level * 3.0) as u8 {
                0 => TextStyle::DIM,
                1 => TextStyle::PLAIN,
                _ => TextStyle { bold: true, ..TextStyle::PLAIN },
            };
            if last != Some(style) {
                out.push_str(&self.begin(style));
                last = Some(style);
            }
            out.push_str(&sanitize_terminal_text(token.text));
        }
        out.push_str(&self.begin(TextStyle::PLAIN));
        out
    }
}

/// The lowest and the highest brightness in the context window.
pub fn brightness_range(timeline: &Timeline) -> (f32, f32) {
    let values = timeline.live_chunks().flat_map(ChunkRef::brightness_runs).flatten();
    values.fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), b| (min.min(b.0), max.max(b.0)))
}
