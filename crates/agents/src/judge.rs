//! Detectors of contradictions and judges of premises. Both are agents and can be replaced. There is one of each by
//! rules, which is precise but finds little, and one of each that asks a model.

use crate::agent::Agent;
use crate::contradiction::{find_contradiction, sentences};
use crate::principle::{JudgePrinciple, attributed_statement};
use halo_core::Error;

/// A premise with the facts to check it against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PremiseClaim {
    /// The premise.
    pub premise: String,
    /// The known facts.
    pub facts: Vec<String>,
}

/// A fact that contradicts a premise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PremiseConflict {
    /// The fact.
    pub fact: String,
    /// The reason.
    pub explanation: String,
}

/// The question to a judge: whether a conflict makes a premise untenable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JudgeCase {
    /// The premise.
    pub premise: String,
    /// The principles to judge by.
    pub principles: Vec<JudgePrinciple>,
    /// The conflict.
    pub conflict: PremiseConflict,
}

/// The answer of a judge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PremiseJudgement {
    /// The verdict.
    pub verdict: PremiseVerdict,
    /// The principle that the premise is rejected by.
    pub principle: Option<JudgePrinciple>,
    /// The reason.
    pub reason: String,
}

/// Whether a premise is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PremiseVerdict {
    /// The premise is accepted.
    Accept,
    /// The premise is rejected.
    Reject,
}

/// Finds contradictions by words: negation, antonyms, and two values of one subject.
#[derive(Clone, Copy, Debug, Default)]
pub struct RuleContradictionDetector;

impl Agent<PremiseClaim> for RuleContradictionDetector {
    type Out = Option<PremiseConflict>;

    async fn invoke(&self, claim: PremiseClaim) -> Result<Option<PremiseConflict>, Error> {
        let conflict = claim.facts.iter().flat_map(|fact| sentences(fact)).find_map(|fact| {
            let reason = find_contradiction(&claim.premise, fact).or_else(|| {
                attributed_statement(&claim.premise).and_then(|said| find_contradiction(said, fact))
            })?;
            Some(PremiseConflict {
                fact: fact.to_owned(),
                explanation: format!(
                    "it was said: “{}” ({})",
                    fact.trim_end_matches(';'),
                    reason.description()
                ),
            })
        });
        Ok(conflict)
    }
}

/// Applies the rule of each principle; the first one that rejects the premise is named.
#[derive(Clone, Copy, Debug, Default)]
pub struct RuleJudge;

impl Agent<JudgeCase> for RuleJudge {
    type Out = PremiseJudgement;

    async fn invoke(&self, case: JudgeCase) -> Result<PremiseJudgement, Error> {
        let rejection = case.principles.iter().find_map(|principle| {
            Some((*principle, principle.rejection(&case.premise, &case.conflict.fact)?))
        });
        Ok(match rejection {
            Some((principle, reason)) => PremiseJudgement {
                verdict: PremiseVerdict::Reject,
                principle: Some(principle),
                reason: format!("by {principle}: {}", reason.description()),
            },
            None => PremiseJudgement {
                verdict: PremiseVerdict::Accept,
                principle: None,
                reason: "no principle rejects it".to_owned(),
            },
        })
    }
}

/// Asks a model whether a fact contradicts a claim.
#[derive(Clone, Debug)]
pub struct ModelContradictionDetector<A>(pub A);

impl<A: Agent<String, Out = String>> Agent<PremiseClaim> for ModelContradictionDetector<A> {
    type Out = Option<PremiseConflict>;

    async fn invoke(&self, claim: PremiseClaim) -> Result<Option<PremiseConflict>, Error> {
        for fact in &claim.facts {
            let prompt = format!(
                "Fact: {fact}\nClaim: {}\nDoes the fact contradict the claim? Answer with one word, yes or no.",
                claim.premise
            );
            if says_yes(&self.0.invoke(prompt).await?) {
                let explanation = format!("it was said: “{}”", fact.trim());
                return Ok(Some(PremiseConflict { fact: fact.clone(), explanation }));
            }
        }
        Ok(None)
    }
}

/// Asks a model about each principle; the first one that rejects the claim is named.
#[derive(Clone, Debug)]
pub struct ModelJudge<A>(pub A);

impl<A: Agent<String, Out = String>> Agent<JudgeCase> for ModelJudge<A> {
    type Out = PremiseJudgement;

    async fn invoke(&self, case: JudgeCase) -> Result<PremiseJudgement, Error> {
        let JudgeCase { premise, principles, conflict } = case;
        let mut reason = String::new();
        for principle in principles {
            let prompt = format!(
                "Claim: {premise}\nKnown: {}\n{} Answer with one word, yes or no.",
                conflict.fact,
                principle.question()
            );
            let answer = self.0.invoke(prompt).await?;
            answer.trim().clone_into(&mut reason);
            if says_yes(&answer) {
                return Ok(PremiseJudgement {
                    verdict: PremiseVerdict::Reject,
                    principle: Some(principle),
                    reason,
                });
            }
        }
        Ok(PremiseJudgement { verdict: PremiseVerdict::Accept, principle: None, reason })
    }
}

fn says_yes(answer: &str) -> bool {
    let first = answer.split(|c: char| !c.is_alphabetic()).find(|word| !word.is_empty());
    first.is_some_and(|word| word.eq_ignore_ascii_case("yes"))
}
