//! The prompts of a world: the instructions in every HUD. Users may replace the built-in file.

use crate::error::Error;
use crate::hud::HudResponseFormat;
use crate::hud_format::AnswerFormat;
use crate::world::AgentKind;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorldPrompts {
    pub directives: Vec<PromptSection>,
    /// How to read the HUD and how to answer.
    pub technical: Vec<PromptSection>,
    /// Instructions for personas only.
    pub persona: Vec<PromptSection>,
    /// Instructions for bots only.
    pub bot: Vec<PromptSection>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptSection {
    /// Empty for a section without a heading.
    pub title: String,
    pub text: String,
    /// Dropped when the HUD exceeds its budget.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub optional: bool,
}

pub const DEFAULT_PROMPTS_JSON: &str = include_str!("../data/prompts.json");

impl Default for WorldPrompts {
    fn default() -> Self {
        Self::parse(DEFAULT_PROMPTS_JSON)
            .unwrap_or_else(|error| unreachable!("the built-in prompts: {error}"))
    }
}

fn join_sections<'a>(sections: impl IntoIterator<Item = &'a PromptSection>) -> String {
    let text = |section: &PromptSection| match section.title.as_str() {
        "" => section.text.clone(),
        title => format!("## {title}\n{}", section.text),
    };
    sections.into_iter().map(text).collect::<Vec<_>>().join("\n\n")
}

impl WorldPrompts {
    /// Parses a file in the format of [`DEFAULT_PROMPTS_JSON`].
    pub fn parse(text: &str) -> Result<Self, Error> {
        serde_json::from_str(text).map_err(|error| {
            Error::invalid_input(format!(
                "{error}; the file has directives, technical, persona and bot, each a list of sections with title and text"
            ))
        })
    }

    #[must_use]
    pub fn directives(&self) -> String {
        join_sections(&self.directives)
    }

    fn sections_for(&self, kind: AgentKind) -> impl Iterator<Item = &PromptSection> {
        let own = match kind {
            AgentKind::Persona => &self.persona,
            AgentKind::Bot => &self.bot,
        };
        self.technical.iter().chain(own)
    }

    /// Sections that may be dropped for agents of a kind.
    #[must_use]
    pub fn optional_section_count(&self, kind: AgentKind) -> usize {
        self.sections_for(kind).filter(|section| section.optional).count()
    }

    /// The instructions for agents of a kind, without the last `dropped` optional sections.
    #[must_use]
    pub fn instructions(&self, kind: AgentKind, dropped: usize) -> String {
        let remaining = self.optional_section_count(kind).saturating_sub(dropped);
        let mut optional = 0;
        join_sections(self.sections_for(kind).filter(|section| {
            optional += usize::from(section.optional);
            !section.optional || optional <= remaining
        }))
    }
}

/// The instructions for an answer format.
#[must_use]
pub fn response_format(format: AnswerFormat) -> HudResponseFormat {
    let (kind, description, instructions, example) = match format {
        AnswerFormat::Json => (
            "json",
            "Respond using standard JSON format",
            "Format your answer as a JSON object with a 'responses' array and an 'actions' array.",
            r#"{"responses": [{"room_id": 5, "message": "Hello!"}], "actions": [{"type": "set", "path": "character.mood", "value": "curious"}]}"#,
        ),
        AnswerFormat::Toon => (
            "toon",
            "Respond using TOON (Token-Oriented Object Notation) format",
            "Format your answer using TOON notation: name each list with its length and its fields, then one row for each entry.",
            "responses[1]{room_id,message}:\n  5,Hello!\nactions[1]{type,path,value}:\n  set,character.mood,curious",
        ),
    };
    HudResponseFormat {
        kind: kind.to_owned(),
        description: description.to_owned(),
        instructions: instructions.to_owned(),
        example: example.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The six sections of the document's philosophy, for personas and for bots.
    #[test]
    fn prompts_tell_every_kind_of_agent_the_philosophy() {
        let prompts = WorldPrompts::default();
        for kind in [AgentKind::Persona, AgentKind::Bot] {
            let instructions = prompts.instructions(kind, 0);
            for title in ["Identity", "Silence", "Topics", "Memory", "Own Room", "Time"] {
                assert_eq!(instructions.matches(&format!("## {title}\n")).count(), 1, "{kind:?}: {title}");
            }
        }
    }

    #[test]
    fn prompts_drop_optional_sections_from_the_end() {
        let prompts = WorldPrompts::default();
        for kind in [AgentKind::Persona, AgentKind::Bot] {
            let whole = prompts.instructions(kind, 0);
            let less = prompts.instructions(kind, 1);
            assert!(whole.contains("## Time") && !less.contains("## Time") && less.contains("## Own Room"));
            let least = prompts.instructions(kind, usize::MAX);
            assert!(least.contains("## Memory") && !least.contains("## Silence"));
            assert_eq!(prompts.instructions(kind, prompts.optional_section_count(kind)), least);
        }
        assert!(prompts.instructions(AgentKind::Persona, 0).contains("two layers"));
        assert!(prompts.instructions(AgentKind::Bot, 0).contains("self.identity.role"));
        assert!(WorldPrompts::parse("{}").is_err());
    }
}
