//! Lethe: forgets text permanently. Everything else only hides it: what is pruned or deleted is still in the store.
//!
//! [`ForgetService`] is the interface. `target` selects what is forgotten, `grace` hides it until its grace period ends,
//! `erase` removes it from everything that holds it, `retention` forgets by age, and `store_retention` applies both to every
//! conversation of a store.

mod backend;
mod erase;
mod grace;
mod input_history;
pub mod pending;
mod private_file;
mod proof_log;
mod record_text;
mod rename;
mod retention;
mod scheduled_report;
mod service;
mod store_retention;
mod target;
mod text_match;
mod warning;

pub use backend::{CaptureDeletion, ForgetBackend};
pub use grace::{CancelledForget, PendingForgetItem};
pub use proof_log::{ForgetProofList, subject_item};
pub use record_text::{RESPONSE_CALL_IDS, RESPONSE_PARAMETERS, RecordText};
pub use retention::RetentionPreview;
pub use scheduled_report::ScheduledForgetReport;
pub use service::{ForgetReport, ForgetService, ForgetTiming};
pub use store_retention::StoreRetention;
pub use target::{
    ForgetItems, ForgetPlan, ForgetPreviewRow, ForgetQuery, ForgetScope, ForgetSelection, ForgetSubject,
    ForgetTarget,
};
pub use text_match::WholeWordMatcher;
pub use warning::ForgetWarning;
