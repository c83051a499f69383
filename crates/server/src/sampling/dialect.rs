//! The programs whose APIs are served.

use super::fields::FieldNames;

/// The program whose API a request uses. The names of all programs are understood in each; what differs is how an answer is
/// limited where the request says nothing, the highest temperature, and the preferred names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ApiDialect {
    OpenAi,
    /// The Responses API of OpenAI, whose names differ.
    Responses,
    Kobold,
    /// The `options` of a request, with its `format`.
    Ollama,
    LlamaServer,
}

impl ApiDialect {
    /// The names of the length of an answer.
    pub(super) fn length_names(self) -> FieldNames {
        match self {
            Self::OpenAi => {
                &["max_completion_tokens", "max_tokens", "n_predict", "max_length", "max_new_tokens"]
            }
            Self::Responses => &["max_output_tokens"],
            Self::Kobold => &["max_length", "max_tokens", "n_predict", "max_new_tokens"],
            Self::Ollama => &["num_predict", "n_predict", "max_tokens", "max_length", "max_new_tokens"],
            Self::LlamaServer => &["n_predict", "max_tokens", "max_length", "max_new_tokens"],
        }
    }

    /// Whether an answer of this length has no limit.
    pub(super) fn is_unlimited(self, length: i64) -> bool {
        match self {
            Self::OpenAi | Self::Responses | Self::Kobold => length == -1,
            // -2 fills the context window.
            Self::Ollama | Self::LlamaServer => matches!(length, -1 | -2),
        }
    }

    /// Whether an answer without a limit fills the context window; otherwise it has the default length.
    pub(super) fn fills_window(self) -> bool {
        self != Self::Kobold
    }

    /// Whether a request without a seed is sampled with a random one; otherwise with that of the settings.
    pub(super) fn randomizes_seed(self) -> bool {
        self == Self::Kobold
    }

    /// Whether a request without a repetition penalty has none; otherwise it has that of the settings.
    pub(super) fn drops_penalty(self) -> bool {
        self == Self::Kobold
    }

    pub(super) fn max_temperature(self) -> f32 {
        match self {
            Self::OpenAi | Self::Responses => 5.0,
            Self::Kobold | Self::Ollama | Self::LlamaServer => 100.0,
        }
    }
}
