//! Embeddings of texts that clients send, for all APIs. No text is cut: one that is too long is refused, or embedded in pieces where
//! the client asks for it.

use crate::app::App;
use crate::cl100k;
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use axum::http::StatusCode;
use halo_core::embedder::EmbedderInfo;
use halo_core::token::TokenId;
use serde_json::{Value, json};
use std::sync::Arc;

/// A text to embed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum EmbeddingInput {
    Text(String),
    /// Tokens of the vocabulary that the API has.
    TokenIds(Vec<u32>),
}

/// What to do with a text that is longer than the embedder reads at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LongInput {
    Refuse,
    /// Embed it in pieces; its vector is the mean of theirs.
    Split,
}

/// Whose token ids an API takes in the place of texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenVocabulary {
    /// Those of OpenAI's embedding models: clients such as LangChain tokenize before they send.
    Cl100k,
    /// Those of the chat model, which the routes for tokens return.
    ChatModel,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EmbeddingOptions {
    pub dimensions: Option<u64>,
    pub long: LongInput,
    pub vocabulary: TokenVocabulary,
    /// Whether a list without texts is answered with one without vectors: SillyTavern asks so for the name of the embedder.
    pub allow_no_texts: bool,
}

pub(crate) struct EmbeddedTexts {
    /// One vector of length 1 per text, in order.
    pub vectors: Vec<Vec<f32>>,
    /// The number of tokens of each text, by the tokenizer of the embedder.
    pub tokens: Vec<usize>,
    /// The name of the embedder.
    pub model: String,
}

const MAX_INPUTS: usize = 2048;

/// The texts of a request: a text, a list of texts, the tokens of a text, or a list of such lists. `field` names them in errors.
fn parse_inputs(field: &str, value: &Value, allow_none: bool) -> ApiResult<Vec<EmbeddingInput>> {
    let refuse =
        |problem: String| Err(ErrorResponse::bad_request(format!("{field} {problem}")).with_param(field));
    let inputs = match value {
        Value::Array(items) if items.first().is_some_and(Value::is_number) => vec![parse_input(value)],
        Value::Array(items) => items.iter().map(parse_input).collect(),
        value => vec![parse_input(value)],
    };
    let Some(inputs) = inputs.into_iter().collect::<Option<Vec<EmbeddingInput>>>() else {
        return refuse(
            "must be a text, a list of texts, a list of token ids, or a list of such lists".into(),
        );
    };
    if (inputs.is_empty() && !allow_none) || inputs.len() > MAX_INPUTS {
        return refuse(format!("has {} texts; it must have 1 to {MAX_INPUTS}", inputs.len()));
    }
    match inputs.iter().position(EmbeddingInput::is_empty) {
        Some(n) => refuse(format!("has an empty text, number {}; leave it out", n + 1)),
        None => Ok(inputs),
    }
}

fn parse_input(value: &Value) -> Option<EmbeddingInput> {
    match value {
        Value::String(text) => Some(EmbeddingInput::Text(text.clone())),
        Value::Array(ids) => {
            let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
            ids.iter().map(id).collect::<Option<_>>().map(EmbeddingInput::TokenIds)
        }
        _ => None,
    }
}

impl EmbeddingInput {
    fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::TokenIds(ids) => ids.is_empty(),
        }
    }
}

/// Embeds the texts of a request; `field` names them in errors.
pub(crate) async fn embed_request(
    app: Arc<App>,
    (field, value): (&'static str, &Value),
    options: EmbeddingOptions,
) -> ApiResult<EmbeddedTexts> {
    let inputs = parse_inputs(field, value, options.allow_no_texts)?;
    spawn_blocking(move || embed_inputs(&app, field, inputs, options)).await
}

impl EmbeddedTexts {
    /// The response of OpenAI's embeddings. `encode` writes a vector.
    pub fn to_openai_json(&self, encode: impl Fn(&[f32]) -> Value) -> Value {
        let item = |(index, vector): (usize, &Vec<f32>)| json!({ "object": "embedding", "index": index, "embedding": encode(vector) });
        let data: Vec<Value> = self.vectors.iter().enumerate().map(item).collect();
        let tokens: usize = self.tokens.iter().sum();
        let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
        json!({ "object": "list", "data": data, "model": self.model, "usage": usage })
    }
}

/// The embedder, if it has this name: clients look up the model that they read in a response.
pub(crate) async fn find_embedder(app: Arc<App>, name: String) -> ApiResult<Option<EmbedderInfo>> {
    spawn_blocking(move || {
        let Some(mut embedder) = app.backend.embedder() else { return Ok(None) };
        Ok(Some(embedder.info()?).filter(|info| info.name == name))
    })
    .await
}

/// Embeds texts as passages. With `dimensions`, the vectors are cut to that length and normalized again. Blocks.
fn embed_inputs(
    app: &App,
    field: &str,
    inputs: Vec<EmbeddingInput>,
    EmbeddingOptions { dimensions, long, vocabulary, .. }: EmbeddingOptions,
) -> ApiResult<EmbeddedTexts> {
    let missing = "there is no embedder: download one, set recall.embedder and restart";
    let mut embedder =
        app.backend.embedder().ok_or_else(|| ErrorResponse::new(StatusCode::NOT_IMPLEMENTED, missing))?;
    let info = embedder.info()?;
    let dimensions = check_dimensions(dimensions, &info)?;
    if inputs.is_empty() {
        return Ok(EmbeddedTexts { vectors: Vec::new(), tokens: Vec::new(), model: info.name });
    }
    let texts = inputs.into_iter().map(|input| input_text(app, field, input, vocabulary));
    let texts = texts.collect::<ApiResult<Vec<String>>>()?;
    let passages: Vec<String> = texts.iter().map(|text| format!("{}{text}", info.passage_prefix)).collect();
    let passages: Vec<&str> = passages.iter().map(String::as_str).collect();
    let tokens = embedder.count_tokens(&passages)?;
    let too_long = tokens.iter().position(|&tokens| tokens > info.max_tokens);
    if let Some(n) = too_long.filter(|_| long == LongInput::Refuse) {
        let (number, count, max) = (n + 1, tokens[n], info.max_tokens);
        let message = format!(
            "{field}: text number {number} has {count} tokens, and the embedder {} reads {max}: split the text",
            info.name
        );
        return Err(ErrorResponse::context_length_exceeded(message).with_param(field));
    }
    let mut vectors = embedder.embed(&passages)?;
    if let Some(dimensions) = dimensions {
        vectors.iter_mut().for_each(|vector| shorten(vector, dimensions));
    }
    Ok(EmbeddedTexts { vectors, tokens, model: info.name })
}

fn check_dimensions(dimensions: Option<u64>, info: &EmbedderInfo) -> ApiResult<Option<usize>> {
    let Some(wanted) = dimensions else { return Ok(None) };
    match usize::try_from(wanted).ok().filter(|n| (1..=info.dimensions).contains(n)) {
        Some(n) => Ok(Some(n)),
        None => {
            let message = format!(
                "dimensions is {wanted}; it must be from 1 to {}, the length of the vectors of {}",
                info.dimensions, info.name
            );
            Err(ErrorResponse::bad_request(message).with_param("dimensions"))
        }
    }
}

fn input_text(
    app: &App,
    field: &str,
    input: EmbeddingInput,
    vocabulary: TokenVocabulary,
) -> ApiResult<String> {
    let ids = match input {
        EmbeddingInput::Text(text) => return Ok(text),
        EmbeddingInput::TokenIds(ids) => ids,
    };
    let refuse = |problem: &str| {
        ErrorResponse::bad_request(format!("{field}: {problem}; send texts instead")).with_param(field)
    };
    match vocabulary {
        TokenVocabulary::ChatModel => {
            let ids: Vec<TokenId> = ids.into_iter().map(TokenId).collect();
            app.backend.model()?.detokenize(&ids).map_err(|e| refuse(&e.message))
        }
        TokenVocabulary::Cl100k => {
            let bytes =
                cl100k::decode(&ids).ok_or_else(|| refuse("there is no such token in cl100k_base"))?;
            // A client that splits long texts may split a character.
            let text = String::from_utf8_lossy(&bytes).into_owned();
            if text.is_empty() { Err(refuse("the tokens have no text")) } else { Ok(text) }
        }
    }
}

/// The first values of a vector, with length 1 again. A vector whose first values are all 0 stays 0.
fn shorten(vector: &mut Vec<f32>, dimensions: usize) {
    if vector.len() <= dimensions {
        return;
    }
    vector.truncate(dimensions);
    let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    if length.is_normal() {
        vector.iter_mut().for_each(|x| *x /= length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedding_inputs_are_texts_or_token_ids() {
        let text = |text: &str| EmbeddingInput::Text(text.to_owned());
        let ids = |ids: &[u32]| EmbeddingInput::TokenIds(ids.to_vec());
        for (json, inputs) in [
            (json!("a"), vec![text("a")]),
            (json!(["a", "b"]), vec![text("a"), text("b")]),
            (json!([1, 2]), vec![ids(&[1, 2])]),
            (json!([[1], [2, 3]]), vec![ids(&[1]), ids(&[2, 3])]),
            (json!(["a", [7]]), vec![text("a"), ids(&[7])]),
        ] {
            assert_eq!(parse_inputs("input", &json, false).ok(), Some(inputs), "{json}");
        }
        for invalid in [
            json!(null),
            json!(7),
            json!([]),
            json!(""),
            json!(["a", ""]),
            json!([[]]),
            json!([-1]),
            json!([1.5]),
            json!([1, "a"]),
            json!({ "text": "a" }),
            json!([["a"]]),
            json!(vec!["a"; MAX_INPUTS + 1]),
        ] {
            let error = parse_inputs("input", &invalid, false).expect_err("refused");
            assert_eq!(
                (error.status(), error.param()),
                (StatusCode::BAD_REQUEST, Some("input")),
                "{invalid}"
            );
        }
    }

    #[test]
    fn embedding_is_normalized_after_it_is_shortened() {
        let mut vector = vec![0.6, 0.0, 0.8];
        shorten(&mut vector, 2);
        assert_eq!(vector, [1.0, 0.0]);
        let mut short = vec![0.6, 0.8];
        shorten(&mut short, 2);
        assert_eq!(short, [0.6, 0.8]);
    }
}
