//! Forgets text permanently, at the user's request or by age.

use super::backend::ForgetBackend;
use super::erase::{erase_now, find_copies};
use super::grace::{self, CancelledForget, PendingForgetItem};
use super::input_history::scrub_lines;
use super::proof_log::{ForgetProofList, read_proofs};
use super::retention::{self, RetentionPreview};
use super::scheduled_report::ScheduledForgetReport;
use super::target::{
    ForgetPlan, ForgetQuery, ForgetRequest, ForgetSelection, ForgetSubject, no_such_conversation, plan_forget,
};
use super::text_match::WholeWordMatcher;
use super::warning::ForgetWarning;
use halo_agents::lethe::RetentionPolicy;
use halo_core::Error;

/// Forgets text permanently: from the store and its log, from search, from saved KV cells, from memories and recordings, and
/// so from everything that is exported later. A proof remains that something was forgotten, and when.
pub struct ForgetService<'a> {
    backend: &'a dyn ForgetBackend,
}

/// When text is erased.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForgetTiming {
    /// At the end of the grace period.
    AfterGrace,
    Now,
}

/// What a request has forgotten, or will forget.
#[derive(Clone, Debug, Default)]
pub struct ForgetReport {
    /// When the text is erased, in milliseconds since 1970; none: it is erased already.
    pub due_at: Option<i64>,
    pub chunks: usize,
    pub memories: usize,
    /// Notes, clients' summaries, system prompts and names.
    pub other_texts: usize,
    pub tokens: usize,
    /// Conversations whose names were forgotten too: the old name and the new one.
    pub new_names: Vec<(String, String)>,
    pub warnings: Vec<ForgetWarning>,
}

impl<'a> ForgetService<'a> {
    #[must_use]
    pub fn new(backend: &'a dyn ForgetBackend) -> Self {
        Self { backend }
    }

    /// What a query would forget in a conversation.
    pub fn plan(&self, conversation: &str, query: &ForgetQuery) -> Result<ForgetPlan, Error> {
        let mut store = self.backend.open_reader()?.ok_or_else(|| no_such_conversation(conversation))?;
        plan_forget(&mut *store, conversation, query)
    }

    /// Forgets what was planned, now or at the end of the grace period.
    pub fn forget(
        &self,
        plans: &[ForgetPlan],
        timing: ForgetTiming,
        now: i64,
    ) -> Result<ForgetReport, Error> {
        let rows = || plans.iter().flat_map(|plan| &plan.rows);
        let memories = rows().filter(|row| row.subject.is_memory()).count();
        let chunks = rows().filter(|row| row.subject.is_chunk()).count();
        let grace = i64::try_from(self.backend.grace_period()?.as_millis()).unwrap_or(i64::MAX);
        let mut report = ForgetReport {
            due_at: (timing == ForgetTiming::AfterGrace && grace > 0).then(|| now.saturating_add(grace)),
            chunks,
            memories,
            other_texts: rows().count() - chunks - memories,
            tokens: rows().map(|row| row.tokens).sum(),
            new_names: Vec::new(),
            warnings: Vec::new(),
        };
        for plan in plans {
            plan.words.as_ref().map(|words| self.forget_typed_lines(words)).transpose()?;
            match report.due_at {
                Some(due_at) => grace::schedule(self.backend, &plan.target, due_at)?,
                None => {
                    let erased = erase_now(self.backend, &plan.target, &ForgetRequest::by_user(now))?;
                    report.new_names.extend(erased.new_name.map(|to| (plan.target.conversation.clone(), to)));
                    report.warnings.extend(erased.warnings);
                }
            }
        }
        if report.due_at.is_none() {
            let chunks = rows().filter(|row| matches!(row.subject, ForgetSubject::Chunk(_)));
            let texts: Vec<&str> = chunks.map(|row| row.text.as_str()).collect();
            let copies = find_copies(self.backend, &texts);
            report.warnings.extend(copies.unwrap_or_else(|error| vec![ForgetWarning::NotSearched(error)]));
        }
        Ok(report)
    }

    /// Erases the typed lines that contain words: a line need not have become a message. Returns how many.
    pub fn forget_typed_lines(&self, words: &WholeWordMatcher) -> Result<usize, Error> {
        let history = self.backend.input_history();
        history.map_or(Ok(0), |history| scrub_lines(&history, |line| words.find(line).is_some()))
    }

    /// What is hidden in a conversation until its grace period ends.
    pub fn list_pending(&self, conversation: &str) -> Result<Vec<PendingForgetItem>, Error> {
        grace::list_pending(self.backend, conversation)
    }

    /// Cancels what is pending in a conversation: what is selected or, with an empty selection, all of it.
    pub fn cancel(&self, conversation: &str, selection: &ForgetSelection) -> Result<CancelledForget, Error> {
        grace::cancel(self.backend, conversation, selection)
    }

    /// Erases what is due, in all conversations.
    pub fn erase_due(&self, now: i64) -> Result<ScheduledForgetReport, Error> {
        Ok(grace::erase_due(self.backend, now)?.complete(self.backend))
    }

    /// The conversations of the store.
    pub fn conversations(&self) -> Result<Vec<String>, Error> {
        let Some(mut store) = self.backend.open_reader()? else { return Ok(Vec::new()) };
        Ok(store.list_conversations()?.into_iter().map(|summary| summary.name).collect())
    }

    /// Whether something is due in a conversation: by request or, with a policy, by age. Writes nothing.
    pub fn has_due(
        &self,
        conversation: &str,
        policy: Option<&RetentionPolicy>,
        now: i64,
    ) -> Result<bool, Error> {
        let Some(mut store) = self.backend.open_reader()? else { return Ok(false) };
        Ok(grace::has_due(&mut *store, conversation, now)?
            || policy
                .map_or(Ok(false), |policy| retention::has_expired(&mut *store, conversation, policy, now))?)
    }

    /// Erases what is due in one conversation: by request and, with a policy, by age.
    pub fn apply_retention_to(
        &self,
        conversation: &str,
        policy: Option<&RetentionPolicy>,
        now: i64,
    ) -> Result<ScheduledForgetReport, Error> {
        let mut report = ScheduledForgetReport::default();
        let Some(mut store) = self.backend.open_reader()? else { return Ok(report) };
        let name = grace::erase_due_in(self.backend, &mut *store, conversation, now, &mut report)?;
        if let Some(policy) = policy {
            retention::forget_by_age_in(self.backend, &mut *store, &name, policy, now, &mut report)?;
        }
        Ok(report.complete(self.backend))
    }

    /// What a policy would forget, by conversation.
    pub fn preview_by_age(&self, policy: &RetentionPolicy, now: i64) -> Result<Vec<RetentionPreview>, Error> {
        retention::preview_by_age(self.backend, policy, now)
    }

    /// Forgets what is too old.
    pub fn forget_by_age(&self, policy: &RetentionPolicy, now: i64) -> Result<ScheduledForgetReport, Error> {
        Ok(retention::forget_by_age(self.backend, policy, now)?.complete(self.backend))
    }

    /// The proofs of what was forgotten.
    pub fn proofs(&self) -> Result<ForgetProofList, Error> {
        read_proofs(&self.backend.data_dir()?)
    }
}
