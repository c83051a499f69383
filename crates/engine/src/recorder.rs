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

/// The recorder of a conversation, if its answers are recorded.
#[derive(Default)]
pub(crate) struct RecorderSlot(Option<Box<dyn AnswerRecorder>>);

impl RecorderSlot {
    pub fn is_recording(&self) -> bool {
        self.0.is_some()
    }

    pub fn set(&mut self, recorder: Option<Box<dyn AnswerRecorder>>) {
        self.0 = recorder;
    }

    /// Calls the recorder. One that fails is removed; returns the error.
    pub fn call(&mut self, call: impl FnOnce(&mut dyn AnswerRecorder) -> Result<(), Error>) -> Option<Error> {
        let error = call(&mut **self.0.as_mut()?).err();
        if error.is_some() {
            self.0 = None;
        }
        error
    }
}
