//! Decides how a client's request continues a stored conversation. Such a client keeps its own history and sends it with
//! every request.
//!
//! Clients trim white space, put names in front, drop the middle, replace old turns with a summary, edit, fork and
//! regenerate. So a request is aligned with a conversation message by message, by hashes, and the verdict says how the
//! request continues it. A deletion is inferred in two cases only, [`AlignVerdict::Regenerate`] and
//! [`AlignVerdict::EditLast`]; in both the old text is kept as a variant. What a client leaves out stays in the conversation.
//!
//! Everything here is pure. The caller looks candidates up in the store's index and carries the verdict out.
//!
//! [`keys`] hashes messages, `matching` pairs them, and `aligner` decides.

mod aligner;
pub mod keys;
mod matching;
mod verdict;

pub use aligner::align;
pub use keys::{
    SentMessage, answer_text, extend_prefix, is_similar_prompt, lookup_hashes, message_key, prefix_hashes,
};
pub use verdict::{AlignCandidate, AlignScore, AlignVerdict, Alignment, KnownMessage, TurnVariant};
