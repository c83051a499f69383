//! `scripted:FILE`: a model that answers with the texts of a file, in order and from the beginning again. It makes
//! conversations, worlds and clients reproducible without a model file.
//!
//! Answers are separated by lines of `---`. A token is a word with the white space before it. The attention of a step lies
//! on earlier occurrences of its word, so that scoring and pruning have something to work with.

use crate::file::read_regular_text;
use anyhow::{Context, Result, bail};
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    AttentionRow, ChatTemplate, FinishReason, KvEditing, Model, ModelInfo, ModelStep, ModelToken, Prompt,
    Sampling, StepFlow, WindowToken,
};
use halo_core::token::TokenId;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const PREFIX: &str = "scripted:";

/// The line between two answers.
const SEPARATOR: &str = "---";

const MAX_FILE_BYTES: u64 = 16 << 20;

/// The context length, if the settings name none.
const DEFAULT_CONTEXT: usize = 32_768;

/// The part of a step's attention that lies on earlier occurrences of its word.
const WORD_SHARE: f32 = 0.8;

/// Clones share their place in the script: each generation takes the next answer.
#[derive(Clone)]
pub struct ScriptFileModel {
    info: ModelInfo,
    state: Arc<Mutex<ScriptState>>,
}

struct ScriptState {
    answers: Vec<String>,
    next: usize,
    /// The texts of all tokens so far: an id is a hash and does not tell its text.
    texts: BTreeMap<TokenId, String>,
}

/// The file of a model name such as `scripted:answers.txt`.
pub fn script_file(model: &str) -> Option<&Path> {
    model.strip_prefix(PREFIX).map(Path::new)
}

impl ScriptFileModel {
    pub fn open(file: &Path, context: Option<usize>) -> Result<Self> {
        let text = read_regular_text(file, MAX_FILE_BYTES)
            .with_context(|| format!("cannot read the script {}", file.display()))?;
        let answers = split_answers(&text);
        if answers.is_empty() {
            bail!(
                "{} has no answers: write them as text, with a line of {SEPARATOR} between two",
                file.display()
            );
        }
        let info = ModelInfo {
            name: format!("{PREFIX}{}", file.file_name().unwrap_or_default().to_string_lossy()),
            context: context.unwrap_or(DEFAULT_CONTEXT),
            attention: true,
            kv_editing: KvEditing::Unknown,
            template: ChatTemplate::plain(),
        };
        let state = ScriptState { answers, next: 0, texts: BTreeMap::new() };
        Ok(Self { info, state: Arc::new(Mutex::new(state)) })
    }
}

fn split_answers(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let answers = lines.split(|line| line.trim_end() == SEPARATOR);
    answers.map(|lines| lines.join("\n").trim().to_owned()).filter(|answer| !answer.is_empty()).collect()
}

/// Cuts a text before each space and line break.
fn split_words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let from = first.len_utf8();
        let end = rest[from..].find([' ', '\n']).map_or(rest.len(), |at| at + from);
        let (word, after) = rest.split_at(end);
        words.push(word);
        rest = after;
    }
    words
}

/// FNV-1a: the same text has the same id in every process, because ids are stored.
fn token_id(text: &str) -> TokenId {
    let hash =
        text.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    TokenId(hash)
}

/// The attention of a step that generates `word`: on earlier occurrences of it, and the rest spread evenly.
fn attention_row(window: &[WindowToken], word: &str) -> Vec<f32> {
    let ids = ["", " ", "\n"].map(|space| token_id(&format!("{space}{}", word.trim())));
    let matches: Vec<bool> = window.iter().map(|token| ids.contains(&token.id)).collect();
    let count = matches.iter().filter(|is_match| **is_match).count();
    let on_word = if count == 0 { 0.0 } else { WORD_SHARE };
    let even = (1.0 - on_word) / window.len().max(1) as f32;
    let each = on_word / count.max(1) as f32;
    matches.into_iter().map(|is_match| if is_match { even + each } else { even }).collect()
}

impl ScriptState {
    fn model_token(&mut self, text: &str) -> ModelToken {
        let id = token_id(text);
        self.texts.entry(id).or_insert_with(|| text.to_owned());
        ModelToken { id, text: text.to_owned() }
    }

    fn next_answer(&mut self) -> String {
        let answer = self.answers[self.next % self.answers.len()].clone();
        self.next += 1;
        answer
    }
}

impl Model for ScriptFileModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenize(&mut self, text: &str, _special: bool) -> Result<Vec<ModelToken>, Error> {
        let mut state = self.state.lock();
        Ok(split_words(text).into_iter().map(|word| state.model_token(word)).collect())
    }

    fn detokenize(&mut self, ids: &[TokenId]) -> Result<String, Error> {
        let state = self.state.lock();
        let text =
            |id: &TokenId| {
                state.texts.get(id).map(String::as_str).ok_or_else(|| {
                    Error::invalid_input("detokenizing", format!("token {} was never seen", id.0))
                })
            };
        ids.iter().map(text).collect()
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        let context = self.info.context;
        if prompt.window.len() + sampling.max_tokens > context {
            let message = format!(
                "{} tokens and an answer of {} do not fit in {context}",
                prompt.window.len(),
                sampling.max_tokens
            );
            return Err(Error::context_length_exceeded("generating", message));
        }
        let answer = self.state.lock().next_answer();
        let mut window = prompt.window.to_vec();
        let mut text = String::new();
        for (step, word) in split_words(&answer).into_iter().enumerate() {
            if step == sampling.max_tokens {
                return Ok(FinishReason::Length);
            }
            let token = self.state.lock().model_token(word);
            let row = watch.answer.then(|| attention_row(&window, word));
            let position = Some(prompt.next_position.plus(step));
            window.push(WindowToken { position, offset: 0, id: token.id, chunk_start: step == 0 });
            text.push_str(word);
            let attention = row.as_deref().map(AttentionRow::from_mean);
            if let Some(reason) = listen(ModelStep::Token(&token, attention)).finish_reason() {
                return Ok(reason);
            }
            if sampling.stop.iter().any(|stop| text.ends_with(stop.as_str())) {
                return Ok(FinishReason::StopSequence);
            }
        }
        Ok(FinishReason::EndOfText)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_answers_are_separated_by_lines() {
        let text = "One.\n\nStill one.\n---\n\n---\nTwo --- and not three\n---   \n{\"responses\": []}\n";
        assert_eq!(
            split_answers(text),
            ["One.\n\nStill one.", "Two --- and not three", "{\"responses\": []}"]
        );
        assert!(split_answers("\n---\n \n").is_empty());
        assert_eq!(script_file("scripted:a/b.txt"), Some(Path::new("a/b.txt")));
        assert_eq!(script_file("./scripted:x"), None);
    }

    #[test]
    fn script_attention_lies_on_earlier_words() {
        let mut state = ScriptState { answers: vec!["x".into()], next: 0, texts: BTreeMap::new() };
        let window: Vec<WindowToken> = ["The", " lamp", " burns.", "\nlamp"]
            .map(|text| WindowToken {
                position: None,
                offset: 0,
                id: state.model_token(text).id,
                chunk_start: false,
            })
            .to_vec();
        let row = attention_row(&window, " lamp");
        assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{row:?}");
        assert!((row[1] - 0.45).abs() < 1e-6 && (row[3] - 0.45).abs() < 1e-6, "{row:?}");
        assert_eq!(attention_row(&window, " sea"), [0.25; 4]);
    }
}
