//! Export and import: the lossless format of Halo, and the formats of other programs.

mod import;
pub mod importers;
mod native;
mod report;
mod request;
mod write_foreign;

pub use report::{ImportReport, ImportedConversation};
pub use request::{ImportRequest, RowValidator};
