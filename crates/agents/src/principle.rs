//! The principles of a judge. Each has a rule of its own, and a question for a model that judges by it.

use crate::contradiction::{ContradictionReason, find_contradiction};
use std::fmt;

/// A principle by which a judge may reject a premise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum JudgePrinciple {
    /// What a fact denies is rejected.
    Accuracy,
    /// Words that a premise puts into somebody's mouth, and that the facts contradict, are rejected: an answer would
    /// confirm what was not said.
    Honesty,
    /// Another value of the same thing is rejected too, although it may be a newer one.
    Consistency,
}

impl JudgePrinciple {
    /// All principles.
    pub const ALL: [JudgePrinciple; 3] =
        [JudgePrinciple::Accuracy, JudgePrinciple::Honesty, JudgePrinciple::Consistency];

    /// The principles of the founding document.
    pub const DEFAULT: [JudgePrinciple; 2] = [JudgePrinciple::Accuracy, JudgePrinciple::Honesty];

    /// The name of the principle.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            JudgePrinciple::Accuracy => "accuracy",
            JudgePrinciple::Honesty => "honesty",
            JudgePrinciple::Consistency => "consistency",
        }
    }

    /// The principle with a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|principle| principle.name() == name)
    }

    /// Why a premise is rejected, if it is: its rule, applied to a premise and a known fact.
    #[must_use]
    pub fn rejection(self, premise: &str, fact: &str) -> Option<ContradictionReason> {
        match self {
            JudgePrinciple::Accuracy => find_contradiction(premise, fact)
                .filter(|reason| *reason != ContradictionReason::DifferentValue),
            JudgePrinciple::Honesty => find_contradiction(attributed_statement(premise)?, fact),
            JudgePrinciple::Consistency => find_contradiction(premise, fact),
        }
    }

    /// The question to a model that judges by this principle alone.
    #[must_use]
    pub fn question(self) -> &'static str {
        match self {
            JudgePrinciple::Accuracy => {
                "Judged by accuracy: does what is known show that the claim is false?"
            }
            JudgePrinciple::Honesty => {
                "Judged by honesty: would an answer that takes the claim for granted confirm something that was not said or done?"
            }
            JudgePrinciple::Consistency => {
                "Judged by consistency: does the claim give something another value than what is known?"
            }
        }
    }
}

impl fmt::Display for JudgePrinciple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a premise says that somebody said: “you said the shop is closed” attributes “the shop is closed”.
#[must_use]
pub fn attributed_statement(premise: &str) -> Option<&str> {
    const SPEAKERS: [&str; 3] = ["i ", "you ", "we "];
    const VERBS: [&str; 14] = [
        "say",
        "said",
        "tell",
        "told",
        "claim",
        "claimed",
        "promise",
        "promised",
        "write",
        "wrote",
        "mention",
        "mentioned",
        "agree",
        "agreed",
    ];
    let rest = SPEAKERS.iter().find_map(|speaker| {
        let start = premise.get(..speaker.len())?;
        start.eq_ignore_ascii_case(speaker).then(|| &premise[speaker.len()..])
    })?;
    let (verb, mut statement) = rest.split_once(' ')?;
    if !VERBS.contains(&verb.to_lowercase().as_str()) {
        return None;
    }
    for word in ["me ", "you ", "us ", "that "] {
        statement = statement.strip_prefix(word).unwrap_or(statement);
    }
    (!statement.trim().is_empty()).then(|| statement.trim())
}
