//! Log-probabilities in OpenAI's two formats, of chats and of completions, and in llama-server's.

use halo_core::model::{TokenLogprob, TokenLogprobs};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The log-probabilities of tokens that were generated and not yet sent. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct LogprobBuffer {
    /// None where they were not requested.
    tokens: Option<Arc<Mutex<Vec<TokenLogprobs>>>>,
}

impl LogprobBuffer {
    pub fn new(requested: bool) -> Self {
        Self { tokens: requested.then(Arc::default) }
    }

    pub fn push(&self, logprobs: &TokenLogprobs) {
        if let Some(tokens) = &self.tokens {
            tokens.lock().push(logprobs.clone());
        }
    }

    /// Takes the tokens out, in the format of chats; null where there are none.
    pub fn take_chat(&self) -> Value {
        match &self.tokens {
            None => Value::Null,
            Some(tokens) => chat_logprobs(&std::mem::take(&mut *tokens.lock())),
        }
    }

    /// Takes the tokens out, in the format of llama-server; none where they were not requested.
    pub fn take_llama_server(&self) -> Option<Vec<Value>> {
        let tokens = std::mem::take(&mut *self.tokens.as_ref()?.lock());
        Some(tokens.iter().map(llama_server_logprobs).collect())
    }
}

fn llama_server_logprobs(token: &TokenLogprobs) -> Value {
    let mut json = logprob_entry(&token.token);
    json["top_logprobs"] = token.top.iter().map(logprob_entry).collect();
    json
}

fn logprob_entry(token: &TokenLogprob) -> Value {
    json!({ "id": token.id.0, "token": token.text(), "bytes": token.bytes, "logprob": token.logprob })
}

/// The format of chats; null without tokens.
pub(crate) fn chat_logprobs(tokens: &[TokenLogprobs]) -> Value {
    let entry = |token: &TokenLogprob| json!({ "token": token.text(), "logprob": token.logprob, "bytes": token.bytes });
    let content = |token: &TokenLogprobs| {
        let mut json = entry(&token.token);
        json["top_logprobs"] = token.top.iter().map(entry).collect();
        json
    };
    match tokens.is_empty() {
        true => Value::Null,
        false => json!({ "content": tokens.iter().map(content).collect::<Vec<Value>>(), "refusal": null }),
    }
}

/// The format of completions; null without tokens. `offset` is the number of characters before the first token.
pub(crate) fn completion_logprobs(tokens: &[TokenLogprobs], offset: usize) -> Value {
    if tokens.is_empty() {
        return Value::Null;
    }
    let mut end = offset;
    let mut offsets = Vec::with_capacity(tokens.len());
    for token in tokens {
        offsets.push(end);
        end += token.token.text().chars().count();
    }
    let top = |token: &TokenLogprobs| -> Map<String, Value> {
        token.top.iter().map(|top| (top.text(), json!(top.logprob))).collect()
    };
    json!({
        "tokens": tokens.iter().map(|token| token.token.text()).collect::<Vec<String>>(),
        "token_logprobs": tokens.iter().map(|token| token.token.logprob).collect::<Vec<f32>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<Map<String, Value>>>(),
        "text_offset": offsets,
    })
}
