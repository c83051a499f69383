//! A model with scripted answers, and an embedder that hashes words.
// The core is synchronous, but a session that owns the model may run on another thread than the test.
#![allow(clippy::disallowed_types)]

use crate::Error;
use crate::attention::AttentionRequest;
use crate::embedder::{Embedder, EmbedderInfo};
use crate::model::{
    AttentionRow, ChatTemplate, FinishReason, KvEditing, Model, ModelInfo, ModelStep, ModelToken, Prompt,
    PromptMessage, Sampling, StepFlow, WindowToken,
};
use crate::token::TokenId;
use std::sync::{Arc, Mutex};

/// A model that gives scripted answers with scripted attention, in order, and an error when it has none left.
///
/// Its tokens are words, each with the white space before it; a token id is a hash of the text.
#[derive(Clone, Debug)]
pub struct ScriptedModel {
    info: ModelInfo,
    answers: std::collections::VecDeque<ScriptedAnswer>,
    /// The prompts that it was given, for assertions. Clones share them.
    pub prompts: Arc<Mutex<Vec<RecordedPrompt>>>,
}

/// One prompt of a [`ScriptedModel`], in both forms.
#[derive(Clone, Debug)]
pub struct RecordedPrompt {
    /// The window.
    pub window: Vec<WindowToken>,
    /// The messages.
    pub messages: Vec<PromptMessage>,
}

/// One scripted answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScriptedAnswer {
    /// The text of the answer.
    pub text: String,
    /// The attention of its steps.
    pub attention: ScriptedAttention,
    /// Fails after so many tokens.
    pub fails_after: Option<usize>,
}

/// The attention rows of a scripted answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ScriptedAttention {
    /// No rows.
    Missing,
    /// The same value for every slot.
    #[default]
    Uniform,
    /// 0.8 on the tokens with this word, 0.1 spread over all slots, and the rest on the first slot.
    OnWord(String),
    /// One row per step, and none once they are used up. Rows are passed on unchecked.
    Rows(Vec<Vec<f32>>),
}

impl ScriptedModel {
    /// A model with a context of `context` tokens and these answers.
    #[must_use]
    pub fn new(context: usize, answers: Vec<ScriptedAnswer>) -> Self {
        let info = ModelInfo {
            name: "scripted".into(),
            context,
            attention: true,
            kv_editing: KvEditing::Unknown,
            template: ChatTemplate::default(),
        };
        Self { info, answers: answers.into(), prompts: Arc::default() }
    }

    /// Sets the name of the model.
    #[must_use]
    pub fn with_name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.info.name);
        self
    }

    /// Sets the chat template.
    #[must_use]
    pub fn with_template(mut self, template: ChatTemplate) -> Self {
        self.info.template = template;
        self
    }

    fn attention_row(attention: &ScriptedAttention, step: usize, window: &[WindowToken]) -> Option<Vec<f32>> {
        let n = window.len();
        match attention {
            ScriptedAttention::Missing => None,
            ScriptedAttention::Uniform => Some(vec![1.0 / n as f32; n]),
            ScriptedAttention::Rows(rows) => rows.get(step).cloned(),
            ScriptedAttention::OnWord(word) => {
                let ids = ["", " ", "\n"].map(|space| token_id(&format!("{space}{word}")));
                let is_word: Vec<bool> = window.iter().map(|token| ids.contains(&token.id)).collect();
                let count = is_word.iter().filter(|is_word| **is_word).count();
                let (on, off) =
                    if count == 0 { (0.0, 0.5 / n as f32) } else { (0.8 / count as f32, 0.1 / n as f32) };
                let mut row: Vec<f32> =
                    is_word.iter().map(|&is_word| if is_word { on } else { off }).collect();
                row[0] += 1.0 - row.iter().sum::<f32>();
                Some(row)
            }
        }
    }
}

fn model_token(text: &str) -> ModelToken {
    ModelToken { id: token_id(text), text: text.to_owned() }
}

fn token_id(text: &str) -> TokenId {
    TokenId(xxhash_rust::xxh3::xxh3_64(text.as_bytes()) as u32)
}

/// Cuts a text before each space and line break.
fn split_words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let first = rest.chars().next().map_or(0, char::len_utf8);
        let end = rest[first..].find([' ', '\n']).map_or(rest.len(), |i| i + first);
        let (word, after) = rest.split_at(end);
        words.push(word);
        rest = after;
    }
    words
}

impl Model for ScriptedModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenize(&mut self, text: &str, _special: bool) -> Result<Vec<ModelToken>, Error> {
        Ok(split_words(text).into_iter().map(model_token).collect())
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        let (window, next) = (prompt.window, prompt.next_position);
        if window.len() + sampling.max_tokens > self.info.context {
            let message = format!("{} tokens and an answer do not fit {}", window.len(), self.info.context);
            return Err(Error::internal("generating", message));
        }
        let answer = self
            .answers
            .pop_front()
            .ok_or_else(|| Error::internal("generating", "the script has no more answers"))?;
        let recorded = RecordedPrompt { window: window.to_vec(), messages: (prompt.messages)() };
        self.prompts.lock().expect("the lock is not poisoned").push(recorded);
        let mut window = window.to_vec();
        let mut text = String::new();
        for (step, word) in split_words(&answer.text).into_iter().enumerate() {
            if answer.fails_after == Some(step) {
                return Err(Error::internal("generating", "the script breaks down here"));
            }
            if step == sampling.max_tokens {
                return Ok(FinishReason::Length);
            }
            let row = Self::attention_row(&answer.attention, step, &window).filter(|_| watch.answer);
            let token = model_token(word);
            window.push(WindowToken {
                position: Some(next.plus(step)),
                offset: 0,
                id: token.id,
                chunk_start: step == 0,
            });
            text.push_str(word);
            let flow = listen(ModelStep::Token(&token, row.as_deref().map(AttentionRow::from_mean)));
            if let Some(reason) = flow.finish_reason() {
                return Ok(reason);
            }
            if sampling.stop.iter().any(|s| text.ends_with(s.as_str())) {
                return Ok(FinishReason::StopSequence);
            }
        }
        Ok(FinishReason::EndOfText)
    }
}

/// An embedder that counts words in 64 hashed buckets: texts that share words have similar vectors.
#[derive(Clone, Copy, Debug, Default)]
pub struct HashEmbedder;

impl Embedder for HashEmbedder {
    fn info(&mut self) -> Result<EmbedderInfo, Error> {
        Ok(EmbedderInfo {
            name: "words in 64 buckets".into(),
            dimensions: 64,
            max_tokens: 256,
            ..EmbedderInfo::default()
        })
    }

    /// Its tokens are words.
    fn count_tokens(&mut self, texts: &[&str]) -> Result<Vec<usize>, Error> {
        Ok(texts.iter().map(|text| text.split_whitespace().count()).collect())
    }

    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, Error> {
        let embed = |text: &&str| {
            let mut vector = vec![0.0f32; 64];
            for word in text.split_whitespace() {
                let hash = xxhash_rust::xxh3::xxh3_64(word.to_lowercase().as_bytes());
                vector[(hash % 64) as usize] += 1.0;
            }
            let norm = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
            vector.iter_mut().filter(|_| norm > 0.0).for_each(|x| *x /= norm);
            vector
        };
        Ok(texts.iter().map(embed).collect())
    }
}
