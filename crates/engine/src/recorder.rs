//! Recorders of answers: they receive the context window, the tokens and the attention rows, for captures.

use halo_core::Error;
use halo_core::context_window::ContextWindow;
use halo_core::model::ModelToken;
use halo_core::token::TurnId;

/// Receives the window, the tokens and the attention of each answer.
pub trait AnswerRecorder: Send {
    /// An answer begins: its turn, the system prompt, and the live tokens.
    fn begin_answer(
        &mut self,
        turn: TurnId,
        system_tokens: &[ModelToken],
        window: ContextWindow<'_>,
    ) -> Result<(), Error>;

    /// A token, and the attention of its step by slot.
    fn record_token(&mut self, token: &ModelToken, row: Option<&[f32]>) -> Result<(), Error>;

    /// The answer has ended. Returns where the recording is stored and its description, if it is stored.
    fn end_answer(&mut self) -> Result<Option<(String, String)>, Error>;
}

/// What a recorder is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecorderPurpose {
    /// The attention view of a running server; kept in memory.
    Live,
    Capture,
}

/// The recorders of a conversation, one for each purpose.
#[derive(Default)]
pub(crate) struct RecorderSet(Vec<(RecorderPurpose, Box<dyn AnswerRecorder>)>);

impl RecorderSet {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn contains(&self, purpose: RecorderPurpose) -> bool {
        self.0.iter().any(|(other, _)| *other == purpose)
    }

    pub fn set(&mut self, purpose: RecorderPurpose, recorder: Option<Box<dyn AnswerRecorder>>) {
        self.0.retain(|(other, _)| *other != purpose);
        self.0.extend(recorder.map(|recorder| (purpose, recorder)));
    }

    /// Calls every recorder. One that fails is removed; returns the errors.
    pub fn call_all(
        &mut self,
        mut call: impl FnMut(&mut dyn AnswerRecorder) -> Result<(), Error>,
    ) -> Vec<Error> {
        let mut errors = Vec::new();
        self.0.retain_mut(|(_, recorder)| match call(&mut **recorder) {
            Ok(()) => true,
            Err(error) => {
                errors.push(error);
                false
            }
        });
        errors
    }
}
