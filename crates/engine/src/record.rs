//! What a model was given and what each of its steps looked at, as it happens: for captures.

use halo_core::live::LiveView;
use halo_core::seams::{Piece, SeamError};
use halo_core::token::TurnId;

/// Who keeps a record of answers.
pub trait Recorder: Send {
    /// An answer begins: its turn, the standing instructions, and what is live.
    ///
    /// # Errors
    /// Here and below: when it cannot be kept. Nothing more is recorded then, and the conversation goes on.
    fn begin(&mut self, turn: TurnId, prefix: &[Piece], view: LiveView<'_>) -> Result<(), SeamError>;

    /// A token, and what the pass that made it looked at, by slot.
    ///
    /// # Errors
    /// As above.
    fn step(&mut self, piece: &Piece, row: Option<&[f32]>) -> Result<(), SeamError>;

    /// The answer has ended. Returns what is to be known of the record, where it is kept for good: where, and what it holds.
    ///
    /// # Errors
    /// As above.
    fn end(&mut self) -> Result<Option<(String, String)>, SeamError>;
}

/// What a record is kept for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be looked at while the program runs.
    Look,
    /// To be kept.
    Capture,
}

/// Who keeps records of a conversation's answers: one for each purpose.
#[derive(Default)]
pub(crate) struct Recorders(Vec<(Purpose, Box<dyn Recorder>)>);

impl Recorders {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn has(&self, purpose: Purpose) -> bool {
        self.0.iter().any(|(other, _)| *other == purpose)
    }

    pub fn set(&mut self, purpose: Purpose, recorder: Option<Box<dyn Recorder>>) {
        self.0.retain(|(other, _)| *other != purpose);
        self.0.extend(recorder.map(|recorder| (purpose, recorder)));
    }

    /// Asks each for something. Those who cannot are asked no more; returns why.
    pub fn each(
        &mut self,
        mut ask: impl FnMut(&mut dyn Recorder) -> Result<(), SeamError>,
    ) -> Vec<SeamError> {
        let mut failed = Vec::new();
        self.0.retain_mut(|(_, recorder)| match ask(&mut **recorder) {
            Ok(()) => true,
            Err(why) => {
                failed.push(why);
                false
            }
        });
        failed
    }
}
