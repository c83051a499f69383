//! Mu: a question that takes something false for granted has no answer, and who asks is told so, and why.
//!
//! A question's premises are drawn out of it, each is held against what is known ([`Contradict`](crate::judge)), and where
//! one conflicts, a judge decides whether that is fatal. It only ever advises: whether the question is answered all the
//! same is for whoever asked.

use crate::agent::Agent;
use crate::judge::{Case, Claim, Conflict, Judgement, Verdict};
use halo_core::seams::SeamError;

/// What is said to whoever asked.
pub const SUGGESTION: &str = "Please verify the premise of your question.";

/// What a judge goes by.
pub const PRINCIPLES: [&str; 2] = ["accuracy", "honesty"];

/// Whether a question takes only for granted what may be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PremiseResult {
    /// Whether it does.
    pub valid: bool,
    /// What it takes for granted and must not.
    pub invalid_premise: Option<String>,
    /// Why not.
    pub reason: Option<String>,
    /// What to do.
    pub suggestion: Option<String>,
}

impl PremiseResult {
    /// Nothing is wrong with the question.
    #[must_use]
    pub fn valid() -> Self {
        Self { valid: true, ..Self::default() }
    }
}

/// Holds a question against what is known.
///
/// # Errors
/// When one of those that are asked fails.
pub async fn check_premise(
    question: &str,
    facts: &[String],
    contradict: &impl Agent<Claim, Out = Option<Conflict>>,
    judge: &impl Agent<Case, Out = Judgement>,
) -> Result<PremiseResult, SeamError> {
    check_premises(premises(question), facts, contradict, judge).await
}

/// The same for premises that were drawn out of a question by somebody else.
///
/// # Errors
/// As above.
pub async fn check_premises(
    premises: Vec<String>,
    facts: &[String],
    contradict: &impl Agent<Claim, Out = Option<Conflict>>,
    judge: &impl Agent<Case, Out = Judgement>,
) -> Result<PremiseResult, SeamError> {
    for premise in premises {
        let claim = Claim { premise: premise.clone(), facts: facts.to_vec() };
        let Some(conflict) = contradict.invoke(claim).await? else { continue };
        let reason = conflict.explanation.clone();
        let principles = PRINCIPLES.map(str::to_owned).to_vec();
        let case = Case { premise: premise.clone(), principles, conflict };
        if judge.invoke(case).await?.verdict == Verdict::Reject {
            return Ok(PremiseResult {
                valid: false,
                invalid_premise: Some(premise),
                reason: Some(reason),
                suggestion: Some(SUGGESTION.to_owned()),
            });
        }
    }
    Ok(PremiseResult::valid())
}

/// What a question takes for granted, by its form, in lower case.
#[must_use]
pub fn premises(question: &str) -> Vec<String> {
    let question = question.to_lowercase();
    let mut premises: Vec<String> = Vec::new();
    let mut add = |premise: String| {
        if !premise.trim().is_empty() && !premises.contains(&premise) {
            premises.push(premise);
        }
    };
    // "Why did X?" takes X for granted; so does when, where, how it came about, and for how long.
    for asks in [
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
        if let Some(rest) = after(&question, asks) {
            add(rest.to_owned());
        }
    }
    if let Some(rest) = after(&question, "how do i fix ") {
        add(format!("there is a problem with {rest}"));
    }
    for (asks, verb) in [
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
        if let Some((subject, rest)) = after(&question, asks).and_then(subject) {
            add(format!("{subject} {verb} {rest}"));
        }
    }
    for asks in ["why does ", "why do "] {
        if let Some(rest) = after(&question, asks) {
            add(rest.to_owned());
        }
    }
    // "The capital of X" is there only if X is.
    for asks in [
        "what is the ",
        "what's the ",
        "who is the ",
        "who's the ",
        "where is the ",
        "what was the ",
        "who was the ",
    ] {
        let owner = after(&question, asks).and_then(|rest| rest.rsplit_once(" of "));
        if let Some((_, owner)) = owner {
            add(format!("{} exists", owner.trim()));
        }
    }
    // "What is my sister called?" takes a sister for granted.
    let asks = ["who", "what", "where", "when", "why", "how", "which"];
    if asks.iter().any(|asks| after(&question, &format!("{asks} ")).is_some()) {
        let mine = after(&question, "my ").and_then(|rest| rest.split([' ', '\'', '’', ',', '.']).next());
        if let Some(mine) = mine.filter(|mine| mine.chars().count() > 1) {
            add(format!("my {mine} exists"));
        }
    }
    premises
}

/// What is said to whoever asked, in one line.
#[must_use]
pub fn told(premise: &str, reason: &str, suggestion: &str) -> String {
    let premise = premise.split(' ').map(|word| match word {
        "i" => "I".to_owned(),
        word => word.to_owned(),
    });
    let premise = premise.collect::<Vec<_>>().join(" ");
    format!(
        "無 (mu: not to be answered as it is asked) you take for granted: “{premise}”. But {reason}. {suggestion}"
    )
}

/// Asks a model what a question takes for granted, beside what its form tells.
#[derive(Clone, Debug)]
pub struct ModelPremises<A>(pub A);

impl<A: Agent<String, Out = String>> Agent<String> for ModelPremises<A> {
    type Out = Vec<String>;

    async fn invoke(&self, question: String) -> Result<Vec<String>, SeamError> {
        let mut drawn = premises(&question);
        let asked = format!(
            "Question: {question}\nList what the question takes for granted, one short statement a line, at most three."
        );
        let said = self.0.invoke(asked).await?;
        let lines = said.lines().map(|line| line.trim_start_matches(|c: char| !c.is_alphabetic()).trim());
        for line in lines.filter(|line| !line.is_empty() && line.len() <= 200).take(3) {
            if !drawn.iter().any(|known| known.eq_ignore_ascii_case(line)) {
                drawn.push(line.to_owned());
            }
        }
        Ok(drawn)
    }
}

/// What follows some words, up to the end of the question.
fn after<'a>(question: &'a str, words: &str) -> Option<&'a str> {
    let at = question
        .match_indices(words)
        .find(|(at, _)| question[..*at].chars().next_back().is_none_or(|before| !before.is_alphanumeric()));
    let rest = &question[at?.0 + words.len()..];
    let end = rest.find(['?', '\n']).unwrap_or(rest.len());
    let rest = rest[..end].trim();
    (!rest.is_empty()).then_some(rest)
}

/// The subject of a clause without its verb, and the rest: the first word, with what introduces it.
fn subject(clause: &str) -> Option<(&str, &str)> {
    const INTRODUCE: [&str; 14] = [
        "the", "a", "an", "my", "your", "his", "her", "its", "our", "their", "this", "that", "these", "those",
    ];
    let first = clause.split(' ').next()?;
    let skip = if INTRODUCE.contains(&first) { first.len() + 1 } else { 0 };
    let end = clause.get(skip..)?.find(' ')? + skip;
    Some((&clause[..end], clause[end..].trim()))
}
