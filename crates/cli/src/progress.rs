//! A progress bar on standard error; nothing where that is not a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::Read;
use std::time::Duration;

/// The bar disappears when this is dropped.
pub struct Progress(ProgressBar);

impl Progress {
    /// `all` steps; 0 if the number is unknown.
    pub fn new(what: &'static str, all: u64) -> Self {
        Self::styled(what, all, "{pos}/{len}")
    }

    pub fn for_bytes(what: &'static str, all: u64) -> Self {
        Self::styled(what, all, "{bytes}/{total_bytes}")
    }

    fn styled(what: &'static str, all: u64, count: &str) -> Self {
        let bar = if all == 0 { ProgressBar::no_length() } else { ProgressBar::new(all) };
        let line = if all == 0 {
            "{msg} {pos} {elapsed}".to_owned()
        } else {
            format!("{{msg}} {{wide_bar}} {count} {{eta}}")
        };
        bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        bar.set_style(ProgressStyle::with_template(&line).unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(what);
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    pub fn set_progress(&self, done: u64, all: u64) {
        self.0.set_length(all);
        self.0.set_position(done);
    }

    /// A reader that advances the bar.
    pub fn wrap_reader<R: Read>(&self, reader: R) -> impl Read + use<R> {
        self.0.wrap_read(reader)
    }

    pub fn set_position(&self, done: u64) {
        self.0.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
