//! Telling a listener: tokens as they come, and every so often that there is nothing to tell, so that it can stop it.

use halo_core::seams::{Finish, Flow, Look, ModelStep, Piece, SeamError};
use std::time::{Duration, Instant};

/// How long a listener goes without hearing anything.
const PATIENCE: Duration = Duration::from_millis(100);

/// Why an answer goes no further.
#[derive(Debug)]
pub(crate) enum Halt {
    Ended(Finish),
    Failed(SeamError),
}

impl From<SeamError> for Halt {
    fn from(error: SeamError) -> Self {
        Self::Failed(error)
    }
}

impl Halt {
    /// For questions that nobody can stop.
    pub fn error(self) -> SeamError {
        match self {
            Self::Failed(error) => error,
            Self::Ended(_) => SeamError::new("asking a model", "the question was given up"),
        }
    }
}

/// A listener, and what has been said to it.
pub(crate) struct Teller<'a> {
    listen: &'a mut dyn FnMut(ModelStep<'_>) -> Flow,
    last: Instant,
    stops: &'a [String],
    most: usize,
    count: usize,
    /// The end of what was said, as much of it as a stop sequence may have begun in.
    tail: String,
}

impl<'a> Teller<'a> {
    pub fn new(listen: &'a mut dyn FnMut(ModelStep<'_>) -> Flow, stops: &'a [String], most: usize) -> Self {
        Self { listen, last: Instant::now(), stops, most, count: 0, tail: String::new() }
    }

    /// One whose listener is never asked to stop anything.
    pub fn nobody(listen: &'a mut dyn FnMut(ModelStep<'_>) -> Flow) -> Self {
        Self::new(listen, &[], usize::MAX)
    }

    /// How many tokens were told.
    pub fn count(&self) -> usize {
        self.count
    }

    /// How long nothing need be said.
    pub fn rest(&self) -> Duration {
        PATIENCE.saturating_sub(self.last.elapsed())
    }

    /// There is nothing to tell yet.
    pub fn waiting(&mut self) -> Result<(), Halt> {
        let flow = (self.listen)(ModelStep::Reading { done: 0, of: 0 });
        self.last = Instant::now();
        if flow == Flow::Stop { Err(Halt::Ended(Finish::Aborted)) } else { Ok(()) }
    }

    /// A token. Stop sequences are watched here, whatever the server does about them: the token that completes one is
    /// told, all of it, and is the last.
    pub fn token(&mut self, piece: &Piece, look: Option<Look<'_>>) -> Result<(), Halt> {
        if self.count == self.most {
            return Err(Halt::Ended(Finish::Length));
        }
        let flow = (self.listen)(ModelStep::Token(piece, look));
        self.last = Instant::now();
        self.count += 1;
        if flow == Flow::Stop {
            return Err(Halt::Ended(Finish::Aborted));
        }
        self.tail.push_str(&piece.text);
        if self.stops.iter().any(|s| !s.is_empty() && self.tail.contains(s.as_str())) {
            return Err(Halt::Ended(Finish::Stop));
        }
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let mut cut = self.tail.len().saturating_sub(longest);
        while !self.tail.is_char_boundary(cut) {
            cut -= 1;
        }
        self.tail.drain(..cut);
        Ok(())
    }

    /// What a server's own word for the end means. A stop sequence would have ended it before.
    pub fn finish(reason: &str) -> Finish {
        if reason == "length" { Finish::Length } else { Finish::End }
    }
}
