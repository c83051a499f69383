//! The formats that can be imported.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ImportFormat {
    /// An export or a database backup of Halo Weave.
    Weave,
    /// A chat file of SillyTavern.
    SillyTavern,
    /// The `conversations.json` of a ChatGPT account export.
    ChatGpt,
    /// The `conversations.json` of a Claude account export.
    Claude,
    /// Messages of an OpenAI request, or a fine-tuning file.
    OpenAi,
    /// A transcript in Markdown or plain text.
    Markdown,
}

impl ImportFormat {
    /// Every format, in the order in which help texts list them.
    pub const ALL: [ImportFormat; 6] = [
        ImportFormat::Weave,
        ImportFormat::SillyTavern,
        ImportFormat::ChatGpt,
        ImportFormat::Claude,
        ImportFormat::OpenAi,
        ImportFormat::Markdown,
    ];

    /// The word by which a user chooses the format.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ImportFormat::Weave => "halo_weave",
            ImportFormat::SillyTavern => "sillytavern",
            ImportFormat::ChatGpt => "chatgpt",
            ImportFormat::Claude => "claude",
            ImportFormat::OpenAi => "openai",
            ImportFormat::Markdown => "markdown",
        }
    }

    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }
}

impl fmt::Display for ImportFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ImportFormat::Weave => "a Halo Weave export",
            ImportFormat::SillyTavern => "a SillyTavern chat",
            ImportFormat::ChatGpt => "a ChatGPT export",
            ImportFormat::Claude => "a Claude export",
            ImportFormat::OpenAi => "a list of OpenAI messages",
            ImportFormat::Markdown => "a Markdown transcript",
        })
    }
}
