//! The retention of a store: what is due by request and, with a policy, what is too old.

use super::scheduled_report::ScheduledForgetReport;
use super::service::ForgetService;
use halo_agents::forgetting::ApplyRetention;
use halo_agents::lethe::RetentionPolicy;
use halo_core::Error;

/// Applies retention to the conversations of a store. Without a policy nothing is erased by age: only what the user asked to
/// forget and whose grace period has ended.
pub struct StoreRetention<'a> {
    service: &'a ForgetService<'a>,
    policy: Option<RetentionPolicy>,
    now: i64,
    /// A conversation that this program has open, which is left out.
    open_conversation: Option<String>,
    /// What was erased so far.
    pub report: ScheduledForgetReport,
}

impl<'a> StoreRetention<'a> {
    #[must_use]
    pub fn new(service: &'a ForgetService<'a>, policy: Option<RetentionPolicy>, now: i64) -> Self {
        Self { service, policy, now, open_conversation: None, report: ScheduledForgetReport::default() }
    }

    /// Leaves out a conversation: the program has it open, and erases there when it opens it again.
    #[must_use]
    pub fn without(mut self, conversation: &str) -> Self {
        self.open_conversation = Some(conversation.to_owned());
        self
    }

    /// Erases in all conversations. Returns how many chunks were erased. An error in one conversation does not keep the
    /// others; the last one is in the report.
    pub fn apply(&mut self) -> Result<usize, Error> {
        let before = self.report.chunks;
        for name in self.service.conversations()? {
            if self.open_conversation.as_ref() == Some(&name) {
                continue;
            }
            match self.service.apply_retention_to(&name, self.policy.as_ref(), self.now) {
                Ok(report) => self.report.merge(report),
                Err(error) => self.report.error = Some(error),
            }
        }
        Ok(self.report.chunks - before)
    }
}

impl ApplyRetention for StoreRetention<'_> {
    async fn apply_retention_policy(&mut self) -> Result<usize, Error> {
        self.apply()
    }
}
