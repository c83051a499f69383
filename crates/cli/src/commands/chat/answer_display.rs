//! The screen during an answer: its text, what was pruned and resurrected, and notices.

use super::markdown::MarkdownStream;
use super::style::TerminalStyle;
use super::typed_ahead::HiddenInput;
use crate::output::{pluralize, sanitize_terminal_text};
use halo_agents::mu;
use halo_core::model::StepFlow;
use halo_engine::event::Event;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

pub struct AnswerDisplay<'a> {
    style: TerminalStyle,
    interrupts: &'a AtomicUsize,
    text: MarkdownStream,
    hidden: &'a HiddenInput,
    /// Whether the last line is the progress of the prefill.
    shows_progress: bool,
    /// Whether a part of the answer is printed: a later prefill is not shown.
    has_text: bool,
}

impl<'a> AnswerDisplay<'a> {
    pub fn new(style: TerminalStyle, interrupts: &'a AtomicUsize, hidden: &'a HiddenInput) -> Self {
        let text = MarkdownStream::new(style, terminal_width());
        Self { style, interrupts, text, hidden, shows_progress: false, has_text: false }
    }

    pub fn handle_event(&mut self, event: Event) -> StepFlow {
        match event {
            Event::Resurrected { chunk, tokens, reason: why } => {
                self.clear_progress();
                let text = format!("↩ {chunk} resurrected ({}): {why}", pluralize(tokens as u64, "token"));
                println!("{}", self.style.highlight(&sanitize_terminal_text(&text)));
            }
            Event::Prefilling { done, total: of } if of > 64 && !self.has_text => {
                print!("\r{}", self.style.dim(&format!("prefill {done}/{of} ")));
                self.shows_progress = true;
            }
            Event::Token { text, .. } => {
                self.clear_progress();
                self.has_text = true;
                print!("{}", self.text.push(&message_for_terminal(&text)));
            }
            Event::BudgetExceeded(why) => {
                self.end_text();
                print!("\n{}", self.style.error(&sanitize_terminal_text(&why)));
            }
            Event::FalsePremise { premise, reason, principle, suggestion } => {
                self.end_text();
                let text = mu::premise_notice(&premise, &reason, principle, &suggestion);
                println!("{}", self.style.error(&sanitize_terminal_text(&text)));
            }
            Event::Notice(text) => {
                self.end_text();
                println!("{}", self.style.dim(&sanitize_terminal_text(&text)));
            }
            Event::Scored { errors: Some((steps, why)), .. } => {
                self.end_text();
                let text = format!("{} whose attention could not be used: {why}", pluralize(steps, "step"));
                print!("\n{}", self.style.error(&sanitize_terminal_text(&text)));
            }
            _ => {}
        }
        self.hidden.drain();
        let _ = std::io::stdout().flush();
        if self.interrupts.load(Ordering::SeqCst) > 0 { StepFlow::Stop } else { StepFlow::Continue }
    }

    /// Prints what is left of the text, and removes a line of progress.
    pub fn finish(mut self) {
        self.end_text();
    }

    fn end_text(&mut self) {
        self.clear_progress();
        print!("{}", self.text.finish());
    }

    /// The progress of the prefill is not shown after it.
    fn clear_progress(&mut self) {
        if std::mem::take(&mut self.shows_progress) {
            print!("\r\x1b[K");
        }
    }
}

/// A message as it is printed: without control characters, and indented by spaces.
pub fn message_for_terminal(text: &str) -> String {
    sanitize_terminal_text(&text.replace('\t', "    "))
}

/// The columns of the terminal; 0 where that is not known.
pub fn terminal_width() -> usize {
    #[cfg(unix)]
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout()).map(|size| size.ws_col.into());
    #[cfg(not(unix))]
    let size: Result<usize, ()> = Err(());
    size.unwrap_or_default()
}
