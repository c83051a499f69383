//! The listener of a generation: it gets each token, and a step every 100 ms while there is none, so that it can cancel.

use halo_core::Error;
use halo_core::model::{AttentionRow, FinishReason, ModelStep, ModelToken, StepFlow};
use std::time::{Duration, Instant};

/// The longest time between two calls of the listener.
const LISTENER_INTERVAL: Duration = Duration::from_millis(100);

/// Why a stream ended early.
#[derive(Debug)]
pub(crate) enum StreamEnd {
    Finished(FinishReason),
    Failed(Error),
}

impl From<Error> for StreamEnd {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl StreamEnd {
    /// The error of a request that has no listener to cancel it.
    pub fn into_error(self) -> Error {
        match self {
            Self::Failed(error) => error,
            Self::Finished(_) => Error::cancelled("waiting for a remote server", "the request was cancelled"),
        }
    }
}

/// Calls the listener, counts its tokens and finds stop sequences in their text.
pub(crate) struct StreamListener<'a> {
    listen: &'a mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    last_call: Instant,
    stop_sequences: &'a [String],
    max_tokens: usize,
    token_count: usize,
    /// The end of the answer, as long as the longest stop sequence.
    tail: String,
}

impl<'a> StreamListener<'a> {
    pub fn new(
        listen: &'a mut dyn FnMut(ModelStep<'_>) -> StepFlow,
        stop_sequences: &'a [String],
        max_tokens: usize,
    ) -> Self {
        let (last_call, tail) = (Instant::now(), String::new());
        Self { listen, last_call, stop_sequences, max_tokens, token_count: 0, tail }
    }

    /// For requests that generate nothing: `listen` must never stop.
    pub fn without_listener(listen: &'a mut dyn FnMut(ModelStep<'_>) -> StepFlow) -> Self {
        Self::new(listen, &[], usize::MAX)
    }

    pub fn token_count(&self) -> usize {
        self.token_count
    }

    /// The time until the listener must be called again.
    pub fn until_next_call(&self) -> Duration {
        LISTENER_INTERVAL.saturating_sub(self.last_call.elapsed())
    }

    /// Tells the listener that there is no token yet.
    pub fn report_waiting(&mut self) -> Result<(), StreamEnd> {
        let flow = (self.listen)(ModelStep::Prefill { done: 0, total: 0 });
        self.last_call = Instant::now();
        flow.finish_reason().map_or(Ok(()), |reason| Err(StreamEnd::Finished(reason)))
    }

    /// Reports a token. Stop sequences are enforced here, because servers differ in how many they accept and whether
    /// they cut them off. The token that completes a stop sequence is reported in full, and is the last one.
    pub fn report_token(
        &mut self,
        token: &ModelToken,
        attention: Option<AttentionRow<'_>>,
    ) -> Result<(), StreamEnd> {
        if self.token_count == self.max_tokens {
            return Err(StreamEnd::Finished(FinishReason::Length));
        }
        let flow = (self.listen)(ModelStep::Token(token, attention));
        self.last_call = Instant::now();
        self.token_count += 1;
        if let Some(reason) = flow.finish_reason() {
            return Err(StreamEnd::Finished(reason));
        }
        self.tail.push_str(&token.text);
        if self.stop_sequences.iter().any(|s| !s.is_empty() && self.tail.contains(s.as_str())) {
            return Err(StreamEnd::Finished(FinishReason::StopSequence));
        }
        let longest = self.stop_sequences.iter().map(String::len).max().unwrap_or(0);
        let mut cut = self.tail.len().saturating_sub(longest);
        while !self.tail.is_char_boundary(cut) {
            cut -= 1;
        }
        self.tail.drain(..cut);
        Ok(())
    }

    /// The meaning of a server's `finish_reason`. A stop sequence has ended the stream before.
    pub fn finish_from_reason(reason: &str) -> FinishReason {
        if reason == "length" { FinishReason::Length } else { FinishReason::EndOfText }
    }
}
