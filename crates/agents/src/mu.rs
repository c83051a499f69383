//! Mu: a question with a false premise has no answer, and the user is told which premise is false.
//!
//! The premises of a question are extracted, each is checked against known facts (see [`judge`](crate::judge)), and
//! where one contradicts a fact, a judge decides whether to reject it. The result is advice: the caller decides whether
//! to answer anyway.

use crate::agent::Agent;
use crate::judge::{JudgeCase, PremiseClaim, PremiseConflict, PremiseJudgement, PremiseVerdict};
use crate::principle::JudgePrinciple;
use halo_core::Error;

/// The suggestion of every rejected question.
pub const SUGGESTION: &str = "Please verify the premise of your question.";

/// The result of a premise check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PremiseResult {
    /// Whether no premise was rejected.
    pub valid: bool,
    /// The rejected premise.
    pub invalid_premise: Option<String>,
    /// Why it was rejected.
    pub reason: Option<String>,
    /// The principle that it was rejected by.
    pub principle: Option<JudgePrinciple>,
    /// What the user should do.
    pub suggestion: Option<String>,
}

impl PremiseResult {
    /// A question without a rejected premise.
    #[must_use]
    pub fn valid() -> Self {
        Self { valid: true, ..Self::default() }
    }
}

/// Checks the premises of a question against known facts.
///
/// # Errors
/// When the detector or the judge fails.
pub async fn check_premise(
    question: &str,
    facts: &[String],
    contradict: &impl Agent<PremiseClaim, Out = Option<PremiseConflict>>,
    judge: &impl Agent<JudgeCase, Out = PremiseJudgement>,
) -> Result<PremiseResult, Error> {
    check_premises(extract_premises(question), facts, &JudgePrinciple::DEFAULT, contradict, judge).await
}

/// Checks premises that were extracted before.
///
/// # Errors
/// When the detector or the judge fails.
pub async fn check_premises(
    premises: Vec<String>,
    facts: &[String],
    principles: &[JudgePrinciple],
    contradict: &impl Agent<PremiseClaim, Out = Option<PremiseConflict>>,
    judge: &impl Agent<JudgeCase, Out = PremiseJudgement>,
) -> Result<PremiseResult, Error> {
    for premise in premises {
        let claim = PremiseClaim { premise: premise.clone(), facts: facts.to_vec() };
        let Some(conflict) = contradict.invoke(claim).await? else { continue };
        let reason = conflict.explanation.clone();
        let case = JudgeCase { premise: premise.clone(), principles: principles.to_vec(), conflict };
        let judgement = judge.invoke(case).await?;
        if judgement.verdict == PremiseVerdict::Reject {
            return Ok(PremiseResult {
                valid: false,
                invalid_premise: Some(premise),
                reason: Some(reason),
                principle: judgement.principle,
                suggestion: Some(SUGGESTION.to_owned()),
            });
        }
    }
    Ok(PremiseResult::valid())
}

/// The premises of a question by its form, in lower case.
#[must_use]
pub fn extract_premises(question: &str) -> Vec<String> {
    let question = question.to_lowercase();
    let mut premises: Vec<String> = Vec::new();
    let mut add = |premise: String| {
        if !premise.trim().is_empty() && !premises.contains(&premise) {
            premises.push(premise);
        }
    };
    // "Why did X?" presupposes X; so do when, where, how and how long.
    for words in [
        "why did ",
        "when did ",
        "where did ",
        "how did ",
        "how long did ",
        "how often did ",
        "how often do ",
        "how long have ",
        "how long has ",
        "since when do ",
        "since when have ",
    ] {
        if let Some(rest) = text_after(&question, words) {
            add(rest.to_owned());
        }
    }
    if let Some(rest) = text_after(&question, "how do i fix ") {
        add(format!("there is a problem with {rest}"));
    }
    for (words, verb) in [
        ("why is ", "is"),
        ("why are ", "are"),
        ("why was ", "was"),
        ("why were ", "were"),
        ("why am ", "am"),
        ("when was ", "was"),
        ("when were ", "were"),
        ("since when am ", "am"),
        ("since when is ", "is"),
    ] {
        if let Some((subject, rest)) = text_after(&question, words).and_then(split_subject) {
            add(format!("{subject} {verb} {rest}"));
        }
    }
    for words in ["why does ", "why do "] {
        if let Some(rest) = text_after(&question, words) {
            add(rest.to_owned());
        }
    }
    // "The capital of X" presupposes that X exists.
    for words in [
        "what is the ",
        "what's the ",
        "who is the ",
        "who's the ",
        "where is the ",
        "what was the ",
        "who was the ",
    ] {
        let owner = text_after(&question, words).and_then(|rest| rest.rsplit_once(" of "));
        if let Some((_, owner)) = owner {
            add(format!("{} exists", owner.trim()));
        }
    }
    // "What is my sister called?" presupposes a sister.
    let question_words = ["who", "what", "where", "when", "why", "how", "which"];
    if question_words.iter().any(|word| text_after(&question, &format!("{word} ")).is_some()) {
        let owned =
            text_after(&question, "my ").and_then(|rest| rest.split([' ', '\'', '’', ',', '.']).next());
        if let Some(owned) = owned.filter(|owned| owned.chars().count() > 1) {
            add(format!("my {owned} exists"));
        }
    }
    premises
}

/// The notice for the user, in one line.
#[must_use]
pub fn premise_notice(
    premise: &str,
    reason: &str,
    principle: Option<JudgePrinciple>,
    suggestion: &str,
) -> String {
    let premise = premise.split(' ').map(|word| match word {
        "i" => "I".to_owned(),
        word => word.to_owned(),
    });
    let premise = premise.collect::<Vec<_>>().join(" ");
    let judged = principle.map_or_else(String::new, |principle| format!(", judged by {principle}"));
    format!(
        "無 (mu: not to be answered as it is asked) you take for granted: “{premise}”. But {reason}{judged}. {suggestion}"
    )
}

/// Extracts premises with a model, besides those that follow from the form of the question.
#[derive(Clone, Debug)]
pub struct ModelPremiseExtractor<A>(pub A);

impl<A: Agent<String, Out = String>> Agent<String> for ModelPremiseExtractor<A> {
    type Out = Vec<String>;

    async fn invoke(&self, question: String) -> Result<Vec<String>, Error> {
        let mut premises = extract_premises(&question);
        let prompt = format!(
            "Question: {question}\nList what the question takes for granted, one short statement a line, at most three."
        );
        let answer = self.0.invoke(prompt).await?;
        let lines = answer.lines().map(|line| line.trim_start_matches(|c: char| !c.is_alphabetic()).trim());
        for line in lines.filter(|line| !line.is_empty() && line.len() <= 200).take(3) {
            if !premises.iter().any(|premise| premise.eq_ignore_ascii_case(line)) {
                premises.push(line.to_owned());
            }
        }
        Ok(premises)
    }
}

/// The text after some words, up to the end of the question.
fn text_after<'a>(question: &'a str, words: &str) -> Option<&'a str> {
    let at = question
        .match_indices(words)
        .find(|(at, _)| question[..*at].chars().next_back().is_none_or(|before| !before.is_alphanumeric()));
    let rest = &question[at?.0 + words.len()..];
    let end = rest.find(['?', '\n']).unwrap_or(rest.len());
    let rest = rest[..end].trim();
    (!rest.is_empty()).then_some(rest)
}

/// Splits a clause without its verb into subject and rest. The subject is the first word with its determiner.
fn split_subject(clause: &str) -> Option<(&str, &str)> {
    const DETERMINERS: [&str; 14] = [
        "the", "a", "an", "my", "your", "his", "her", "its", "our", "their", "this", "that", "these", "those",
    ];
    let first = clause.split(' ').next()?;
    let skip = if DETERMINERS.contains(&first) { first.len() + 1 } else { 0 };
    let end = clause.get(skip..)?.find(' ')? + skip;
    Some((&clause[..end], clause[end..].trim()))
}
