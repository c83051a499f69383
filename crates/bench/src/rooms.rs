//! What agents on a real model come to.

use serde_json::{Value, json};

pub use halo_worlds::testing::rule_violations;

/// How many failures are told of.
const MAX_FAILURES: usize = 20;

#[derive(Clone, Debug, Default)]
pub struct RoomsBenchReport {
    pub beats: u64,
    /// Answers that were understood.
    pub parsed: u64,
    /// Those that had to be put right first.
    pub repaired: u64,
    /// Those that could not be.
    pub failed: u64,
    /// The first of them: whose, why, and what was answered.
    pub failures: Vec<Value>,
    pub messages: u64,
    /// Actions that were done.
    pub actions: u64,
    /// Those that were refused.
    pub refused: u64,
    /// Tokens that were shown.
    pub prompt_tokens: u64,
    /// Those of them that had to be read.
    pub prefilled_tokens: u64,
    /// Tokens of the answers.
    pub answer_tokens: u64,
    /// How long it took.
    pub seconds: f64,
    /// How often the process was killed.
    pub kills: u64,
    /// What was told and is not there.
    pub lost: u64,
    /// Rules that are broken.
    pub rule_violations: Vec<String>,
}

impl RoomsBenchReport {
    /// Counts a heartbeat, as the program tells of it.
    pub fn record_beat(&mut self, beat: &Value) {
        let number = |name: &str| beat.get(name).and_then(Value::as_u64).unwrap_or(0);
        self.beats += 1;
        let understood = beat.get("failed").is_none_or(Value::is_null);
        *if understood { &mut self.parsed } else { &mut self.failed } += 1;
        if !understood && self.failures.len() < MAX_FAILURES {
            self.failures
                .push(json!({"agent": beat["agent"], "why": beat["failed"], "answer": beat["answer"]}));
        }
        self.repaired += u64::from(beat.get("repaired").and_then(Value::as_bool).unwrap_or(false));
        self.messages += number("said");
        self.actions += number("done");
        self.refused += beat.get("refused").and_then(Value::as_array).map_or(0, |all| all.len() as u64);
        self.prompt_tokens += number("shown");
        self.prefilled_tokens += number("read");
        self.answer_tokens += number("answered");
    }

    /// The share of what was shown that had to be read.
    #[must_use]
    pub fn prefill_share(&self) -> f64 {
        self.prefilled_tokens as f64 / self.prompt_tokens.max(1) as f64
    }
}
