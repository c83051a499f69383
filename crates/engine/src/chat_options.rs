//! What a conversation has of its own instead of the settings: its system prompt, values of sampling, and its model.

use crate::conversation::{Conversation, SYSTEM_PROMPT_KEY};
use halo_core::Error;
use halo_core::model::Sampling;
use halo_core::store::{Access, RecordKind, Store};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The setting of a conversation that holds its own values of sampling, as JSON.
pub const SAMPLING_KEY: &str = "sampling";

/// The setting of a conversation that names its model.
pub const CHOSEN_MODEL_KEY: &str = "chosen_model";

/// The setting of a conversation that holds the names in it, as JSON.
pub const PERSONA_KEY: &str = "persona";

/// The setting of an imported conversation that holds the names of its speakers, by turn.
pub const SPEAKERS_KEY: &str = "speakers";

/// The longest name of a persona, in bytes.
const MAX_NAME_BYTES: usize = 200;

/// The longest system prompt of a conversation, in bytes.
const MAX_PROMPT_BYTES: usize = 256 << 10;

/// Values of sampling that replace those of the settings; none: the setting counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingOverrides {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
}

/// Who talks in a conversation. What is set becomes part of the system prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Persona {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user_name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub model_name: String,
    /// What the model should know of the user.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub about_user: String,
}

/// The options of a conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatOptions {
    /// Its own system prompt; none: that of the settings.
    pub system_prompt: Option<String>,
    pub sampling: SamplingOverrides,
    pub persona: Persona,
    /// Its own model; none: the one of the program.
    pub model: Option<String>,
}

/// Stores the choice of a model for a conversation that is not open. Its text is tokenized for the model when it is opened.
///
/// # Errors
/// When another program has the conversation open, or the store cannot be written.
pub fn store_chosen_model(
    store: Box<dyn Store + Send>,
    name: &str,
    model: Option<&str>,
) -> Result<(), Error> {
    Conversation::open(store, name, Access::Write)?.put_setting(CHOSEN_MODEL_KEY, model)
}

/// The options of a conversation without any of its own.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChatDefaults {
    pub system_prompt: String,
    pub sampling: Sampling,
}

impl SamplingOverrides {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The values of a record. One that is out of its range is left out, and one that this version does not know: an imported
    /// record can have anything.
    fn from_record(record: &str) -> Self {
        let fields: Map<String, Value> = serde_json::from_str(record).unwrap_or_default();
        let values = fields.into_iter().filter_map(|field| {
            let one = serde_json::from_value::<Self>(Map::from_iter([field]).into()).ok()?;
            one.check().ok().map(|()| one)
        });
        values.fold(Self::default(), |all, one| Self {
            temperature: one.temperature.or(all.temperature),
            top_k: one.top_k.or(all.top_k),
            top_p: one.top_p.or(all.top_p),
            min_p: one.min_p.or(all.min_p),
            repetition_penalty: one.repetition_penalty.or(all.repetition_penalty),
            max_tokens: one.max_tokens.or(all.max_tokens),
        })
    }

    /// The sampling with these values in it.
    #[must_use]
    pub fn apply_to(&self, sampling: &Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(sampling.temperature),
            top_k: self.top_k.unwrap_or(sampling.top_k),
            top_p: self.top_p.unwrap_or(sampling.top_p),
            min_p: self.min_p.unwrap_or(sampling.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(sampling.repetition_penalty),
            max_tokens: self.max_tokens.unwrap_or(sampling.max_tokens),
            ..sampling.clone()
        }
    }

    /// The ranges are those of the settings `generation.*`.
    ///
    /// # Errors
    /// When a value is out of its range.
    pub fn check(&self) -> Result<(), Error> {
        let in_range = |name: &str, value: Option<f32>, min: f32, max: f32| match value {
            Some(value) if !(min..=max).contains(&value) => {
                let message = format!("{name} is {value}: it must be a number from {min} to {max}");
                Err(Error::invalid_input("reading the options", message))
            }
            _ => Ok(()),
        };
        let counts = |name: &str, value: Option<usize>, min: usize| match value {
            Some(value) if !(min..=1_000_000).contains(&value) => {
                let message = format!("{name} is {value}: it must be a whole number from {min} to 1000000");
                Err(Error::invalid_input("reading the options", message))
            }
            _ => Ok(()),
        };
        in_range("temperature", self.temperature, 0.0, 5.0)?;
        in_range("top_p", self.top_p, 0.0, 1.0)?;
        in_range("min_p", self.min_p, 0.0, 1.0)?;
        in_range("repetition_penalty", self.repetition_penalty, 1.0, 10.0)?;
        counts("top_k", self.top_k, 0)?;
        counts("max_tokens", self.max_tokens, 1)
    }
}

impl Persona {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        [&self.user_name, &self.model_name, &self.about_user].iter().all(|text| text.trim().is_empty())
    }

    /// The system prompt with the names in it. `{{user}}` and `{{char}}` are the usual placeholders of character cards.
    #[must_use]
    pub fn complete_prompt(&self, system_prompt: &str) -> String {
        let (user, model, about) = (self.user_name.trim(), self.model_name.trim(), self.about_user.trim());
        let mut text = system_prompt.to_owned();
        for (placeholder, name) in [("{{user}}", user), ("{{char}}", model)] {
            if !name.is_empty() {
                text = text.replace(placeholder, name);
            }
        }
        let facts = [
            (!model.is_empty()).then(|| format!("Your name is {model}.")),
            (!user.is_empty()).then(|| format!("You talk with {user}.")),
            (!about.is_empty()).then(|| format!("About the user: {about}")),
        ];
        let facts: Vec<String> = facts.into_iter().flatten().collect();
        if facts.is_empty() {
            return text;
        }
        let before = if text.trim().is_empty() { String::new() } else { format!("{}\n\n", text.trim()) };
        format!("{before}{}", facts.join(" "))
    }

    fn check(&self) -> Result<(), Error> {
        let limits = [
            ("user_name", &self.user_name, MAX_NAME_BYTES),
            ("model_name", &self.model_name, MAX_NAME_BYTES),
            ("about_user", &self.about_user, MAX_PROMPT_BYTES),
        ];
        for (name, text, most) in limits {
            if text.len() > most {
                let message = format!("{name} has {} bytes: at most {most} are allowed", text.len());
                return Err(Error::invalid_input("reading the options", message));
            }
        }
        Ok(())
    }
}

impl ChatOptions {
    /// # Errors
    /// When a value is out of its range, or the system prompt or a name is too long.
    pub fn check(&self) -> Result<(), Error> {
        self.sampling.check()?;
        self.persona.check()?;
        match self.system_prompt.as_ref().map(String::len) {
            Some(bytes) if bytes > MAX_PROMPT_BYTES => {
                let message =
                    format!("the system prompt has {bytes} bytes: at most {MAX_PROMPT_BYTES} are allowed");
                Err(Error::invalid_input("reading the options", message))
            }
            _ => Ok(()),
        }
    }

    /// The stored options of a conversation; those of one that does not exist are empty.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn load(store: &mut dyn Store, conversation: &str) -> Result<Self, Error> {
        let mut options = Self::default();
        for record in store.records(conversation, RecordKind::Setting)? {
            match record.key.as_str() {
                SYSTEM_PROMPT_KEY => options.system_prompt = Some(record.value),
                SAMPLING_KEY => options.sampling = SamplingOverrides::from_record(&record.value),
                // A record of a later version may have values that this one does not know.
                PERSONA_KEY => options.persona = serde_json::from_str(&record.value).unwrap_or_default(),
                CHOSEN_MODEL_KEY => options.model = Some(record.value),
                _ => {}
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_sampling_out_of_range_is_left_out() {
        let none = SamplingOverrides::default();
        for (record, expected) in [
            ("", none),
            ("null", none),
            ("[1]", none),
            (r#"{"temperature": 0.5}"#, SamplingOverrides { temperature: Some(0.5), ..none }),
            (
                r#"{"temperature": 1e39, "top_k": 7, "top_p": -1}"#,
                SamplingOverrides { top_k: Some(7), ..none },
            ),
            (
                r#"{"max_tokens": 0, "min_p": 0.1, "of_later": 3}"#,
                SamplingOverrides { min_p: Some(0.1), ..none },
            ),
            (r#"{"max_tokens": 18446744073709551615, "repetition_penalty": 0, "top_k": -1}"#, none),
            (r#"{"temperature": "hot", "top_k": [1], "max_tokens": 1.5}"#, none),
        ] {
            assert_eq!(SamplingOverrides::from_record(record), expected, "{record}");
        }
    }

    #[test]
    fn persona_completes_the_system_prompt() {
        let nobody = Persona::default();
        assert_eq!(nobody.complete_prompt("Be kind to {{user}}."), "Be kind to {{user}}.");
        let text = |text: &str| text.to_owned();
        let persona = Persona {
            user_name: text("Anna"),
            model_name: text("Rufus"),
            about_user: text("She keeps bees."),
        };
        assert_eq!(
            persona.complete_prompt("{{char}} is a fox; {{user}} is his friend.\n"),
            "Rufus is a fox; Anna is his friend.\n\nYour name is Rufus. You talk with Anna. About the user: She keeps bees."
        );
        assert_eq!(Persona { user_name: text("Anna"), ..nobody }.complete_prompt(""), "You talk with Anna.");
        let long = Persona { user_name: "x".repeat(201), ..Persona::default() };
        assert!(ChatOptions { persona: long, ..ChatOptions::default() }.check().is_err());
    }

    #[test]
    fn sampling_overrides_out_of_range_are_refused() {
        let none = SamplingOverrides::default();
        let cases = [
            (SamplingOverrides { temperature: Some(5.5), ..none }, "temperature is 5.5"),
            (SamplingOverrides { temperature: Some(f32::NAN), ..none }, "temperature is NaN"),
            (SamplingOverrides { top_p: Some(-0.1), ..none }, "top_p is -0.1"),
            (SamplingOverrides { min_p: Some(2.0), ..none }, "min_p is 2"),
            (SamplingOverrides { repetition_penalty: Some(0.5), ..none }, "repetition_penalty is 0.5"),
            (SamplingOverrides { max_tokens: Some(0), ..none }, "max_tokens is 0"),
            (SamplingOverrides { top_k: Some(2_000_000), ..none }, "top_k is 2000000"),
        ];
        for (overrides, says) in cases {
            let message = overrides.check().expect_err(says).to_string();
            assert!(message.contains(says), "{message}");
        }
        let all = SamplingOverrides {
            temperature: Some(0.0),
            top_k: Some(0),
            top_p: Some(1.0),
            min_p: Some(0.05),
            repetition_penalty: Some(1.1),
            max_tokens: Some(1),
        };
        all.check().expect("all values are in range");
        let applied = all.apply_to(&Sampling { seed: 7, ..Sampling::default() });
        assert_eq!((applied.temperature, applied.top_p, applied.max_tokens, applied.seed), (0.0, 1.0, 1, 7));
    }
}
