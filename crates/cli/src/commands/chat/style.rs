//! Colours, where the terminal has them and the user wants them.

use halo_core::timeline::{ChunkRef, Timeline};

/// Whether and how text is painted.
#[derive(Clone, Copy, Debug)]
pub struct TerminalStyle {
    colour: bool,
}

impl TerminalStyle {
    /// As the environment says: `NO_COLOR`, or a terminal that has none, turns colours off.
    pub fn from_environment() -> Self {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self { colour: !plain }
    }

    /// What is said beside the conversation.
    pub fn dim(self, text: &str) -> String {
        self.ansi("2", text)
    }

    /// What came back.
    pub fn highlight(self, text: &str) -> String {
        self.ansi("33", text)
    }

    /// What went wrong.
    pub fn error(self, text: &str) -> String {
        self.ansi("31", text)
    }

    fn ansi(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// What a chunk says, each word as bright as the model's attention has left it, between the dimmest and the
    /// brightest of the window.
    pub fn shade_by_brightness(
        self,
        timeline: &Timeline,
        chunk: ChunkRef<'_>,
        (least, most): (f32, f32),
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
            let light = if most > least { (token.brightness.0 - least) / (most - least) } else { 1.0 };
            // The greys of 256 colours are 232 to 255; the darkest cannot be read.
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

/// The least and the greatest brightness of what is in the window.
pub fn brightness_range(timeline: &Timeline) -> (f32, f32) {
    let lights = timeline.live_chunks().flat_map(ChunkRef::brightness_runs).flatten();
    lights.fold((f32::INFINITY, f32::NEG_INFINITY), |(least, most), b| (least.min(b.0), most.max(b.0)))
}
