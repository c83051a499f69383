//! The formats of HUDs and answers. Each agent has one of each.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HudFormat {
    /// JSON with an indent of two spaces.
    #[default]
    Json,
    /// JSON without white space and with short field names.
    CompactJson,
    /// Token-Oriented Object Notation, as its public specification defines it.
    Toon,
    /// Field names declared once, then values by position.
    ToonPositional,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerFormat {
    #[default]
    Json,
    Toon,
}

impl HudFormat {
    pub const ALL: [HudFormat; 4] =
        [HudFormat::Json, HudFormat::CompactJson, HudFormat::Toon, HudFormat::ToonPositional];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            HudFormat::Json => "json",
            HudFormat::CompactJson => "compact_json",
            HudFormat::Toon => "toon",
            HudFormat::ToonPositional => "toon_positional",
        }
    }

    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }
}

impl AnswerFormat {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            AnswerFormat::Json => "json",
            AnswerFormat::Toon => "toon",
        }
    }
}
