//! What forgetting did that nobody asked for at that moment: text that was due, or too old.

use super::backend::ForgetBackend;
use super::erase::{ErasedText, find_leftovers};
use super::warning::ForgetWarning;
use halo_core::Error;

/// What was erased because it was due, or too old.
#[derive(Clone, Debug, Default)]
pub struct ScheduledForgetReport {
    pub chunks: usize,
    /// Conversations whose names were forgotten too: the old name and the new one.
    pub new_names: Vec<(String, String)>,
    pub warnings: Vec<ForgetWarning>,
    /// The last error. An error in one conversation does not keep the others.
    pub error: Option<Error>,
}

impl ScheduledForgetReport {
    pub(super) fn add(&mut self, conversation: &str, erased: ErasedText) {
        self.chunks += erased.chunks;
        self.new_names.extend(erased.new_name.map(|to| (conversation.to_owned(), to)));
        self.warnings.extend(erased.warnings);
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.chunks += other.chunks;
        self.new_names.extend(other.new_names);
        self.warnings.extend(other.warnings);
        self.error = other.error.or(self.error.take());
    }

    /// Adds where the erased text may still be.
    pub(super) fn complete(mut self, backend: &dyn ForgetBackend) -> Self {
        if self.chunks > 0 {
            let leftovers = find_leftovers(backend);
            self.warnings.extend(leftovers.unwrap_or_else(|error| vec![ForgetWarning::NotSearched(error)]));
        }
        self
    }
}
