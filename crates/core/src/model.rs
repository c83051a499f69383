//! The trait of language models: tokens in, tokens and attention rows out. `halo-llama` implements it on
//! llama.cpp, `halo-remote` over HTTP, and [`testing`](crate::testing) with scripted answers.

use crate::attention::AttentionRequest;
use crate::error::Error;
pub use crate::message_wrap::MessageWrap;
pub use crate::sampling::{
    DrySampling, DynamicTemperature, LogitSmoothing, Mirostat, MirostatVersion, OutputConstraint,
    SamplerKind, Sampling, SamplingParameter, TokenLogprob, TokenLogprobs, UNLIMITED_TOKENS, WHOLE_WINDOW,
    XtcSampling,
};
use crate::token::{Position, Role, TokenId};
use crate::tool_call::{ReasoningFormat, ToolFormat};

/// The properties of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// The name of the model.
    pub name: String,
    /// The context length, in tokens.
    pub context: usize,
    /// Whether its steps come with attention rows.
    pub attention: bool,
    /// What happens to its KV cells when the window changes.
    pub kv_editing: KvEditing,
    /// How messages are framed for the model.
    pub template: ChatTemplate,
}

impl ModelInfo {
    /// What the model can do beside answering.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        Capabilities {
            attention: self.attention,
            kv_editing: self.kv_editing.clone(),
            tools: self.template.tools.section.is_some(),
            reasoning: self.template.reasoning.is_some(),
        }
    }
}

/// What a model can do beside answering.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether its steps come with attention rows, which pruning by attention needs.
    pub attention: bool,
    /// What happens to its KV cells when the window changes.
    pub kv_editing: KvEditing,
    /// Whether its chat template has functions. A model without them is told in a general format.
    pub tools: bool,
    /// Whether it writes its reasoning before an answer.
    pub reasoning: bool,
}

/// What happens to the KV cells of a model when chunks are pruned and resurrected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KvEditing {
    /// The KV cache is not ours: a model on another server, or none.
    #[default]
    Unknown,
    /// The cells of the chunks are removed and restored.
    Cells,
    /// Everything behind the change is prefilled again.
    Recompute {
        /// Why single cells cannot be edited.
        reason: String,
    },
}

impl KvEditing {
    /// Whether cells are removed and restored; none if that is unknown.
    #[must_use]
    pub fn edits_cells(&self) -> Option<bool> {
        match self {
            Self::Unknown => None,
            Self::Cells => Some(true),
            Self::Recompute { .. } => Some(false),
        }
    }

    /// Why single cells cannot be edited.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Recompute { reason } => Some(reason),
            Self::Unknown | Self::Cells => None,
        }
    }
}

/// How messages are framed for a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatTemplate {
    /// The text before the first message.
    pub start: String,
    /// Around the system prompt.
    pub system: MessageWrap,
    /// Around a message of the user.
    pub user: MessageWrap,
    /// Around an answer. Generation begins behind the prefix; the suffix closes a finished answer.
    pub assistant: MessageWrap,
    /// How functions, their calls and their results are written.
    pub tools: ToolFormat,
    /// The reasoning before an answer; none where the model has none.
    pub reasoning: Option<ReasoningFormat>,
}

impl ChatTemplate {
    /// ChatML, which many models are trained on: `<|im_start|>user … <|im_end|>`.
    #[must_use]
    pub fn chatml() -> Self {
        let wrap = |role: &str| MessageWrap {
            prefix: format!("<|im_start|>{role}\n"),
            suffix: "<|im_end|>\n".into(),
        };
        Self {
            start: String::new(),
            system: wrap("system"),
            user: wrap("user"),
            assistant: wrap("assistant"),
            tools: ToolFormat::default(),
            reasoning: None,
        }
        .with_generic_results()
    }

    /// Plain text with role names, for models without a chat template.
    #[must_use]
    pub fn plain() -> Self {
        let wrap = |role: &str| MessageWrap { prefix: format!("{role}: "), suffix: "\n\n".into() };
        Self {
            start: String::new(),
            system: wrap("System"),
            user: wrap("User"),
            assistant: wrap("Assistant"),
            tools: ToolFormat::default(),
            reasoning: None,
        }
        .with_generic_results()
    }

    /// The template with results of functions as messages of the user, for templates without a role for them.
    #[must_use]
    pub fn with_generic_results(mut self) -> Self {
        self.tools.result = MessageWrap {
            prefix: format!("{}<tool_response>\n", self.user.prefix),
            suffix: format!("\n</tool_response>{}", self.user.suffix),
        };
        self.tools.result_separator = Some("\n</tool_response>\n<tool_response>\n".into());
        self
    }

    /// Whether it writes nothing around messages: a remote model has a template of its own.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let wraps = [&self.system, &self.user, &self.assistant];
        self.start.is_empty() && wraps.iter().all(|wrap| wrap.prefix.is_empty() && wrap.suffix.is_empty())
    }

    /// The text around a message of a role.
    #[must_use]
    pub fn wrap_for(&self, role: Role) -> &MessageWrap {
        match role {
            Role::System => &self.system,
            Role::User => &self.user,
            Role::Assistant => &self.assistant,
            Role::Tool => &self.tools.result,
        }
    }
}

/// A token as a model produces it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelToken {
    /// Its number in the vocabulary of the model.
    pub id: TokenId,
    /// The text that it adds; empty while a character is incomplete.
    pub text: String,
}

/// One token of the window that a model is given.
///
/// A model with a KV cache compares positions with those of its cells. Cells whose positions are not in the
/// window are archived and freed, archived cells whose positions are in it again are restored, and new tokens
/// are prefilled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowToken {
    /// Its position on the timeline; none for a system prompt, which is not on the timeline.
    pub position: Option<Position>,
    /// 0 for a token of the timeline. Tokens that are inserted behind a position without being on the timeline,
    /// such as a memory in place of the range that it summarizes, count from 1.
    pub offset: u16,
    /// Its number in the vocabulary of the model.
    pub id: TokenId,
    /// Whether it is the first token of a chunk. The KV archive saves and restores cells by chunk.
    pub chunk_start: bool,
}

/// What a model generates from.
#[derive(Clone, Copy)]
pub struct Prompt<'a> {
    /// Identifies the conversation in the KV cache and the KV archive. Must never be used for another
    /// conversation.
    pub conversation: &'a str,
    /// The window in order: the system prompt, then the live tokens by position.
    pub window: &'a [WindowToken],
    /// The same window as messages, for a remote model with a chat API. If the last message is the assistant's,
    /// the model continues it.
    pub messages: &'a dyn Fn() -> Vec<PromptMessage>,
    /// The position of the first generated token.
    pub next_position: Position,
    /// Whether the KV cells of this prompt are discarded afterwards: for previews and for the generation of
    /// memories.
    pub ephemeral: bool,
}

/// One message of a window as text: its tokens joined, including the chat template around them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptMessage {
    /// Who wrote it.
    pub role: Role,
    /// Its text.
    pub text: String,
}

/// The attention of one token to the slots of the window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionRow<'a> {
    /// The mean over heads. It sums to 1, unless the layers were reduced by their maximum.
    pub mean: &'a [f32],
    /// The maximum over heads, slot by slot; empty where it was not requested.
    pub max: &'a [f32],
    /// The rows of every head of every layer, one after the other, each as long as the mean; empty where they
    /// were not requested.
    pub per_head: &'a [f32],
    /// The probability that the model gave to the token of this step, before temperature and other sampling;
    /// none where it was not requested or is unknown.
    pub probability: Option<f32>,
}

impl<'a> AttentionRow<'a> {
    /// A row with the mean over heads alone.
    #[must_use]
    pub fn from_mean(mean: &'a [f32]) -> Self {
        Self { mean, max: &[], per_head: &[], probability: None }
    }
}

/// What happened to the KV cells of a window before generation, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Tokens whose cells were in the cache.
    pub reused: usize,
    /// Tokens whose cells were freed, archived then or before.
    pub pruned: usize,
    /// Tokens whose cells came from the archive.
    pub restored: usize,
    /// Tokens within the window whose cells were neither cached nor archived.
    pub recomputed: usize,
    /// New tokens at the end of the window.
    pub prefilled: usize,
    /// Tokens whose cells were moved to other positions by a K-shift.
    pub shifted: usize,
}

/// One step of a generation, as the listener gets it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ModelStep<'a> {
    /// Progress of the prefill. Reported from time to time, also without progress, so that the listener can
    /// stop it.
    Prefill {
        /// Tokens prefilled.
        done: usize,
        /// Tokens to prefill; 0 where that is unknown.
        total: usize,
    },
    /// So many of the model's earlier answers were shortened in the prompt, because it was too long.
    Cooled(usize),
    /// The attention row of a token of the prompt.
    PromptAttention(AttentionRow<'a>),
    /// The prefill is complete; generation begins.
    PrefillDone(CacheStats),
    /// The log-probabilities of the token of the next step, where they were requested.
    Logprobs(&'a TokenLogprobs),
    /// A generated token, and the attention row of the forward pass that produced it.
    Token(&'a ModelToken, Option<AttentionRow<'a>>),
}

/// Whether a listener lets the work go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepFlow {
    /// The work goes on.
    Continue,
    /// The work is cancelled; the tokens so far are valid.
    Stop,
    /// The result is complete: the work ends here as it would have ended by itself.
    Finish,
}

impl StepFlow {
    /// Why a generation ends here; none where it goes on.
    #[must_use]
    pub fn finish_reason(self) -> Option<FinishReason> {
        match self {
            Self::Continue => None,
            Self::Stop => Some(FinishReason::Cancelled),
            Self::Finish => Some(FinishReason::EndOfText),
        }
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model produced its end-of-text token, or the answer has all that it may have.
    EndOfText,
    /// The answer ends with a stop sequence.
    StopSequence,
    /// The answer has the maximum length.
    Length,
    /// The listener stopped it.
    Cancelled,
}

impl FinishReason {
    /// The word that records and exports use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::EndOfText => "end",
            FinishReason::StopSequence => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "aborted",
        }
    }
}

/// Cancels the side task of a model when it is called.
pub type CancelHandle = std::sync::Arc<dyn Fn() + Send + Sync>;

/// A language model.
pub trait Model {
    /// The properties of the model.
    fn info(&self) -> &ModelInfo;

    /// Cuts a text into tokens. Names of special tokens become these tokens only where `special` is set. The
    /// texts of the tokens, joined, are the text.
    ///
    /// # Errors
    /// When the model cannot be reached.
    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error>;

    /// How many tokens a text has.
    ///
    /// # Errors
    /// When the model cannot be reached.
    fn count_tokens(&mut self, text: &str) -> Result<usize, Error> {
        Ok(self.tokenize(text, false)?.len())
    }

    /// The text of tokens, with special tokens by their names.
    ///
    /// # Errors
    /// When the model cannot detokenize.
    fn detokenize(&mut self, ids: &[TokenId]) -> Result<String, Error> {
        let _ = ids;
        Err(Error::internal("detokenizing", "this model does not support it"))
    }

    /// Generates an answer from a window and passes each step to `listen`.
    ///
    /// # Errors
    /// When the model fails; the tokens that `listen` already has are valid.
    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error>;

    /// Checks that [`Model::generate`] can follow a constraint, without waiting for the model.
    ///
    /// # Errors
    /// When the constraint is invalid, or cannot be followed.
    fn check_constraint(&mut self, constraint: &OutputConstraint) -> Result<(), Error> {
        let _ = constraint;
        Ok(())
    }

    /// Whether [`Model::generate`] follows a sampling parameter.
    fn supports(&self, parameter: SamplingParameter) -> bool {
        let _ = parameter;
        true
    }

    /// Computes the KV cells of a window in advance, so that the next generation from it starts sooner.
    /// `listen` can stop it. A model without a KV cache does nothing.
    ///
    /// # Errors
    /// When the model fails.
    fn prefill(
        &mut self,
        prompt: &Prompt<'_>,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        let _ = (prompt, listen);
        Ok(FinishReason::Length)
    }

    /// A handle that cancels a side task of this model at once and from any thread; none where only a listener
    /// can stop it.
    fn cancel_handle(&self) -> Option<CancelHandle> {
        None
    }

    /// Aligns the KV cache of a conversation with its window and saves it, so that the next turn need not wait
    /// for that. Called at the end of a turn; leaving it out changes no answer.
    ///
    /// # Errors
    /// When the model fails.
    fn persist_kv(&mut self, conversation: &str, window: &[WindowToken]) -> Result<(), Error> {
        let _ = (conversation, window);
        Ok(())
    }

    /// Lets `conversation`, a branch of `parent`, use the archived cells of `parent` up to the given number of
    /// positions: their tokens are the same there. A model without a KV cache does nothing.
    fn inherit_kv(&mut self, conversation: &str, parent: &str, positions: u64) {
        let _ = (conversation, parent, positions);
    }

    /// Deletes the KV cells of a conversation, in memory and on disk. A model without a KV cache does nothing.
    ///
    /// # Errors
    /// When the model fails.
    fn delete_kv(&mut self, conversation: &str) -> Result<(), Error> {
        let _ = conversation;
        Ok(())
    }

    /// Checks that the KV cells of a conversation are those of its window, as far as it is prefilled. Returns a
    /// description of the first difference. For tests and diagnosis.
    ///
    /// # Errors
    /// When the model fails.
    fn verify_kv(&mut self, conversation: &str, window: &[WindowToken]) -> Result<Option<String>, Error> {
        let _ = (conversation, window);
        Ok(None)
    }
}
