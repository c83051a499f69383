//! Colours, where the terminal supports them.

use halo_core::timeline::{ChunkRef, Timeline};

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

    /// The text of a chunk, each word shaded by its brightness between the dimmest and the brightest of the context
    /// window.
    pub fn shade_by_brightness(
        self,
        timeline: &Timeline,
        chunk: ChunkRef<'_>,
        (min, max): (f32, f32),
    ) -> String {
        if !self.colour {
            return chunk.live_text().into_owned();
        }
        let mut out = String::new();
        let mut last = None;
        for token in chunk.live_runs().flat_map(|run| run.positions()).filter_map(|p| timeline.token(p)) {
            if token.flags.kind() == halo_core::token::ContentKind::Template {
                continue;
            }
            let light = if max > min { (token.brightness.0 - min) / (max - min) } else { 1.0 };
            // The greys of 256 colours are 232 to 255; the darkest are not readable.
            let grey = 238 + (light.clamp(0.0, 1.0) * 17.0).round() as u8;
            if last != Some(grey) {
                out.push_str(&format!("\x1b[38;5;{grey}m"));
                last = Some(grey);
            }
            out.push_str(token.text);
        }
        out.push_str("\x1b[0m");
        out
    }
}

/// The lowest and the highest brightness in the context window.
pub fn brightness_range(timeline: &Timeline) -> (f32, f32) {
    let values = timeline.live_chunks().flat_map(ChunkRef::brightness_runs).flatten();
    values.fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), b| (min.min(b.0), max.max(b.0)))
}
