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

    /// The answer has ended. Returns what is to be known of the record: where it is kept, and what it holds.
    ///
    /// # Errors
    /// As above.
    fn end(&mut self) -> Result<(String, String), SeamError>;
}
