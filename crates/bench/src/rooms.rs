//! Results of agents on a real model.

use serde_json::{Value, json};

pub use halo_worlds::testing::rule_violations;

/// How many failures are reported.
const MAX_FAILURES: usize = 20;

#[derive(Clone, Debug, Default)]
pub struct RoomsBenchReport {
    pub beats: u64,
    /// Answers that could be parsed.
    pub parsed: u64,
    /// Answers that had to be repaired first.
    pub repaired: u64,
    /// Answers that could not be parsed.
    pub failed: u64,
    /// The first of them: agent, reason and answer.
    pub failures: Vec<Value>,
    pub messages: u64,
    /// Actions that were executed.
    pub actions: u64,
    /// Actions that were refused.
    pub refused: u64,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens of the prompts that were prefilled.
    pub prefilled_tokens: u64,
    pub answer_tokens: u64,
    pub seconds: f64,
    pub kills: u64,
    /// Printed messages that are missing from the store.
    pub lost: u64,
    pub rule_violations: Vec<String>,
}

impl RoomsBenchReport {
    /// Counts a heartbeat from the JSON of `halo rooms run`.
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
        self.prompt_tokens += number("hud_tokens");
        self.prefilled_tokens += number("prefilled_tokens");
        self.answer_tokens += number("answered");
    }

    #[must_use]
    pub fn seconds_per_beat(&self) -> f64 {
        self.seconds / self.beats.max(1) as f64
    }

    /// The share of prompt tokens that were prefilled.
    #[must_use]
    pub fn prefill_share(&self) -> f64 {
        self.prefilled_tokens as f64 / self.prompt_tokens.max(1) as f64
    }
}
