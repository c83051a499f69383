//! What agents are told about where they are: a file that anybody can change.

use crate::format::Output;
use crate::hud::ResponseFormat;
use crate::world::AgentKind;
use serde::{Deserialize, Serialize};

/// What agents are told, by what they are for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prompts {
    /// How to live together.
    pub directives: Vec<Section>,
    /// How to read and how to answer.
    pub technical: Vec<Section>,
    /// What a character needs to know.
    pub persona: Vec<Section>,
    /// What a bot needs to know.
    pub bot: Vec<Section>,
}

/// A part of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// Its title; empty: none.
    pub title: String,
    /// What it says.
    pub text: String,
    /// Whether it goes where there is too little room.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub optional: bool,
}

/// The file that the program brings along.
pub const USUAL: &str = include_str!("../data/prompts.json");

impl Default for Prompts {
    fn default() -> Self {
        Self::read(USUAL).unwrap_or_else(|why| unreachable!("the program's own file: {why}"))
    }
}

fn joined<'a>(sections: impl IntoIterator<Item = &'a Section>) -> String {
    let one = |section: &Section| match section.title.as_str() {
        "" => section.text.clone(),
        title => format!("## {title}\n{}", section.text),
    };
    sections.into_iter().map(one).collect::<Vec<_>>().join("\n\n")
}

impl Prompts {
    /// A file of somebody's own.
    ///
    /// # Errors
    /// In words, when it is none.
    pub fn read(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|why| {
            format!("{why}; it holds directives, technical, persona and bot, each a list of sections with title and text")
        })
    }

    /// How to live together.
    #[must_use]
    pub fn directives(&self) -> String {
        joined(&self.directives)
    }

    fn sections(&self, kind: AgentKind) -> impl Iterator<Item = &Section> {
        let own = match kind {
            AgentKind::Persona => &self.persona,
            AgentKind::Bot => &self.bot,
        };
        self.technical.iter().chain(own)
    }

    /// How many parts can be left out.
    #[must_use]
    pub fn optional(&self, kind: AgentKind) -> usize {
        self.sections(kind).filter(|section| section.optional).count()
    }

    /// How to read and to answer, and what an agent of that kind needs to know; without the last `less` parts that can be left
    /// out.
    #[must_use]
    pub fn instructions(&self, kind: AgentKind, less: usize) -> String {
        let stay = self.optional(kind).saturating_sub(less);
        let mut seen = 0;
        joined(self.sections(kind).filter(|section| {
            seen += usize::from(section.optional);
            !section.optional || seen <= stay
        }))
    }
}

/// How an agent is told to answer.
#[must_use]
pub fn response_format(output: Output) -> ResponseFormat {
    let (kind, description, instructions, example) = match output {
        Output::Json => (
            "json",
            "Respond using standard JSON format",
            "Format your answer as a JSON object with a 'responses' array and an 'actions' array.",
            r#"{"responses": [{"room_id": 5, "message": "Hello!"}], "actions": [{"type": "set", "path": "character.mood", "value": "curious"}]}"#,
        ),
        Output::Toon => (
            "toon",
            "Respond using TOON (Token-Oriented Object Notation) format",
            "Format your answer using TOON notation: name each list with its length and its fields, then one row for each entry.",
            "responses[1]{room_id,message}:\n  5,Hello!\nactions[1]{type,path,value}:\n  set,character.mood,curious",
        ),
    };
    ResponseFormat {
        kind: kind.to_owned(),
        description: description.to_owned(),
        instructions: instructions.to_owned(),
        example: example.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_can_be_left_out_go_from_the_last() {
        let prompts = Prompts::default();
        for kind in [AgentKind::Persona, AgentKind::Bot] {
            let whole = prompts.instructions(kind, 0);
            let less = prompts.instructions(kind, 1);
            assert!(whole.contains("## Time") && !less.contains("## Time") && less.contains("## Own Room"));
            let least = prompts.instructions(kind, usize::MAX);
            assert!(least.contains("## Memory") && !least.contains("## Silence"));
            assert_eq!(prompts.instructions(kind, prompts.optional(kind)), least);
        }
        assert!(prompts.instructions(AgentKind::Persona, 0).contains("two layers"));
        assert!(prompts.instructions(AgentKind::Bot, 0).contains("self.identity.role"));
        assert!(Prompts::read("{}").is_err());
    }
}
