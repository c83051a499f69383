//! Which turns belong together: a question, its answer, and the tools that were called on the way.

use super::Turn;
use crate::token::Role;

/// A question and everything that follows from it, as indexes of turns.
///
/// A step is an answer, or a call of tools with their results. The turns of a step are pruned and resurrected
/// together, and no step is live without its question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Exchange {
    /// The turn of the user; none where the exchange begins with an answer.
    pub question: Option<usize>,
    /// The steps, in order, each with its turns in order.
    pub steps: Vec<Vec<usize>>,
}

impl Exchange {
    /// The exchange of a turn. Turns that `counts` refuses are skipped, except the turn itself.
    pub fn find(turns: &[Turn], turn: usize, counts: impl Fn(usize) -> bool) -> Self {
        let counts = |other: usize| other == turn || counts(other);
        let before = |t: usize| (0..t).rev().find(|&other| counts(other));
        let after = |t: usize| (t + 1..turns.len()).find(|&other| counts(other));
        let follows = |one: usize, next: usize| is_linked(turns[one].role, turns[next].role);
        let mut first = turn;
        while let Some(previous) = before(first).filter(|&previous| follows(previous, first)) {
            first = previous;
        }
        let mut exchange = Self::default();
        let mut next = Some(first);
        while let Some(t) = next {
            match (turns[t].role, exchange.steps.last_mut()) {
                (Role::System, _) => break,
                (Role::User, _) => exchange.question = Some(t),
                (Role::Tool, Some(step)) => step.push(t),
                (Role::Assistant | Role::Tool, _) => exchange.steps.push(vec![t]),
            }
            next = after(t).filter(|&next| follows(t, next));
        }
        exchange
    }

    /// The step of a turn; none for the question.
    pub fn step_of(&self, turn: usize) -> Option<&[usize]> {
        self.steps.iter().find(|step| step.contains(&turn)).map(Vec::as_slice)
    }
}

/// Whether a turn belongs to the exchange of the turn before it.
fn is_linked(role: Role, next: Role) -> bool {
    match next {
        Role::System | Role::User => false,
        // A second answer in a row answers nothing.
        Role::Assistant => matches!(role, Role::User | Role::Tool),
        Role::Tool => role != Role::System,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::TurnId;

    /// The exchange of a turn, written as its question and its steps.
    fn exchange(roles: &str, turn: usize) -> String {
        let turns: Vec<Turn> = (roles.chars().enumerate())
            .filter_map(|(n, letter)| {
                Some(Turn { id: TurnId(n as u32), role: Role::from_letter(letter)?, first_row: 0 })
            })
            .collect();
        let found = Exchange::find(&turns, turn, |_| true);
        let steps = found.steps.iter().map(|step| step.iter().map(usize::to_string).collect::<Vec<_>>());
        let steps: Vec<String> = steps.map(|step| step.join("+")).collect();
        format!("{} {}", found.question.map_or("-".to_owned(), |q| q.to_string()), steps.join(" "))
    }

    #[test]
    fn exchange_has_question_and_steps() {
        let cases = [
            ("ua", 0, "0 1"),
            ("ua", 1, "0 1"),
            ("uaa", 1, "0 1"),
            ("uaa", 2, "- 2"),
            ("uata", 3, "0 1+2 3"),
            ("uattata", 4, "0 1+2+3 4+5 6"),
            ("uatau", 2, "0 1+2 3"),
            ("uta", 2, "0 1 2"),
            ("uu", 0, "0 "),
            ("usa", 2, "- 2"),
            ("sua", 0, "- "),
            ("at", 0, "- 0+1"),
        ];
        for (roles, turn, expected) in cases {
            assert_eq!(exchange(roles, turn), expected, "{roles} {turn}");
        }
    }
}
