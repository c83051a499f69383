//! KoboldCPP's tokenizer: the tokens of a text, and the text of each token id.

use crate::address::BaseUrl;
use crate::align::{align_tokens_to_text, special_token_name};
use crate::http::{RemoteClient, RemoteRequest};
use crate::stream_listener::{StreamEnd, StreamListener};
use halo_core::Error;
use halo_core::model::ModelToken;
use halo_core::token::TokenId;
use reqwest::header::{self, HeaderValue};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// The id of a streamed text whose tokens the server does not report.
pub(crate) const UNKNOWN_TOKEN: TokenId = TokenId(u32::MAX);
const MAX_CACHED_TEXTS: usize = 20_000;

#[derive(Debug)]
pub(crate) struct KoboldTokenizer {
    endpoint: TokenizeEndpoint,
    timeout: Duration,
    /// The tokens of streamed texts.
    cache: BTreeMap<String, Vec<ModelToken>>,
}

#[derive(Debug)]
enum TokenizeEndpoint {
    /// `/api/v1/tokenize`: ids with their texts.
    IdsWithText,
    /// `/api/extra/tokencount`: ids alone. The text of each id is requested once.
    IdsOnly {
        /// The ids that the server puts before every text, whether or not it is asked to.
        prefix_ids: Vec<u32>,
        token_texts: BTreeMap<u32, String>,
    },
}

impl KoboldTokenizer {
    /// Finds out which of the two endpoints a server has.
    pub fn probe(
        client: &RemoteClient,
        base: &BaseUrl,
        timeout: Duration,
        extended: bool,
        listener: &mut StreamListener<'_>,
    ) -> Result<Self, StreamEnd> {
        let mut tokenizer = Self { endpoint: TokenizeEndpoint::IdsWithText, timeout, cache: BTreeMap::new() };
        if extended && tokenizer.fetch_ids_with_text(client, base, "Once upon a time", listener)?.is_some() {
            return Ok(tokenizer);
        }
        tokenizer.endpoint =
            TokenizeEndpoint::IdsOnly { prefix_ids: Vec::new(), token_texts: BTreeMap::new() };
        let prefix_ids = tokenizer.fetch_ids(client, base, "", listener)?;
        tokenizer.endpoint = TokenizeEndpoint::IdsOnly { prefix_ids, token_texts: BTreeMap::new() };
        Ok(tokenizer)
    }

    /// Whether ids come with their texts, as the fork that streams attention sends them.
    pub fn has_token_texts(&self) -> bool {
        matches!(self.endpoint, TokenizeEndpoint::IdsWithText)
    }

    /// Tokenizes a text. These servers turn the name of every special token into that token. Where `special` is false,
    /// the text is split inside of the name and both parts are tokenized separately: `<` and `|im_start|>` are not names,
    /// and the texts of their tokens still add up to the text. Only the server knows which words are names, so the text
    /// is tokenized once, and every single token in brackets counts as one. Splitting an ordinary word does no harm.
    pub fn tokenize(
        &mut self,
        client: &RemoteClient,
        base: &BaseUrl,
        text: &str,
        special: bool,
        listener: &mut StreamListener<'_>,
    ) -> Result<Vec<ModelToken>, StreamEnd> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let tokens = self.tokenize_raw(client, base, text, listener)?;
        let splits = if special { Vec::new() } else { special_name_splits(&tokens) };
        if splits.is_empty() {
            return Ok(tokens);
        }
        let mut tokens = Vec::new();
        let mut start = 0;
        for end in splits.into_iter().chain([text.len()]) {
            tokens.extend(self.tokenize(client, base, &text[start..end], special, listener)?);
            start = end;
        }
        Ok(tokens)
    }

    /// Tokenizes a streamed text, with a cache: most streamed texts are one token, and many repeat.
    pub fn tokenize_streamed(
        &mut self,
        client: &RemoteClient,
        base: &BaseUrl,
        text: &str,
        listener: &mut StreamListener<'_>,
    ) -> Result<Vec<ModelToken>, StreamEnd> {
        if let Some(tokens) = self.cache.get(text) {
            return Ok(tokens.clone());
        }
        let tokens = self.tokenize_raw(client, base, text, listener)?;
        if self.cache.len() < MAX_CACHED_TEXTS {
            self.cache.insert(text.to_owned(), tokens.clone());
        }
        Ok(tokens)
    }

    fn tokenize_raw(
        &mut self,
        client: &RemoteClient,
        base: &BaseUrl,
        text: &str,
        listener: &mut StreamListener<'_>,
    ) -> Result<Vec<ModelToken>, StreamEnd> {
        let tokens = match &self.endpoint {
            TokenizeEndpoint::IdsWithText => {
                let none = || protocol_error(base, "/api/v1/tokenize no longer exists");
                self.fetch_ids_with_text(client, base, text, listener)?.ok_or_else(none)?
            }
            TokenizeEndpoint::IdsOnly { .. } => {
                let ids = self.fetch_ids(client, base, text, listener)?;
                ids.into_iter()
                    .map(|id| self.fetch_token_text(client, base, id, listener))
                    .collect::<Result<_, _>>()?
            }
        };
        if tokens.is_empty() {
            return Err(protocol_error(base, "it returned no tokens for a text").into());
        }
        let (tokens, complete) = align_tokens_to_text(text, tokens);
        if !complete {
            tracing::warn!(tokens = tokens.len(), "the token texts of the server do not match the text");
        }
        Ok(tokens)
    }

    /// Ids with their texts; `None` where the server does not have the endpoint.
    fn fetch_ids_with_text(
        &self,
        client: &RemoteClient,
        base: &BaseUrl,
        text: &str,
        listener: &mut StreamListener<'_>,
    ) -> Result<Option<Vec<ModelToken>>, StreamEnd> {
        let body = json!({"text": text, "add_special_tokens": false});
        // The fork's own front end sends this content type, so every version accepts it.
        let content_type = HeaderValue::from_static("text/plain;charset=UTF-8");
        let request = RemoteRequest::post("requesting tokens", base, "/api/v1/tokenize", &body)
            .header(header::CONTENT_TYPE, content_type)
            .with_timeout(self.timeout);
        let Some(value) = client.fetch_json(&request, listener)? else { return Ok(None) };
        let Some(tokens) = value["tokens"].as_array() else {
            return Err(protocol_error(base, "its response has no list of tokens").into());
        };
        let parse = |token: &Value| {
            let id = parse_token_id(&token["token_id"])
                .ok_or_else(|| protocol_error(base, "a token has no id"))?;
            Ok(ModelToken { id: TokenId(id), text: token["text"].as_str().unwrap_or("").to_owned() })
        };
        Ok(Some(tokens.iter().map(parse).collect::<Result<_, Error>>()?))
    }

    /// Ids alone, without those that the server puts before every text.
    fn fetch_ids(
        &self,
        client: &RemoteClient,
        base: &BaseUrl,
        text: &str,
        listener: &mut StreamListener<'_>,
    ) -> Result<Vec<u32>, StreamEnd> {
        let body = json!({"prompt": text, "special": false});
        let request = RemoteRequest::post("requesting tokens", base, "/api/extra/tokencount", &body)
            .with_timeout(self.timeout);
        let value = client.require_json(&request, listener)?;
        let ids: Option<Vec<u32>> =
            value["ids"].as_array().and_then(|ids| ids.iter().map(parse_token_id).collect());
        let ids = ids
            .ok_or_else(|| protocol_error(base, "its response has no list of ids, as newer versions have"))?;
        let prefix: &[u32] = match &self.endpoint {
            TokenizeEndpoint::IdsOnly { prefix_ids, .. } => prefix_ids,
            TokenizeEndpoint::IdsWithText => &[],
        };
        Ok(ids.strip_prefix(prefix).unwrap_or(&ids).to_vec())
    }

    fn fetch_token_text(
        &mut self,
        client: &RemoteClient,
        base: &BaseUrl,
        id: u32,
        listener: &mut StreamListener<'_>,
    ) -> Result<ModelToken, StreamEnd> {
        let TokenizeEndpoint::IdsOnly { token_texts, .. } = &mut self.endpoint else {
            return Err(protocol_error(base, "it already reports the texts of its tokens").into());
        };
        let text = match token_texts.get(&id) {
            Some(text) => text.clone(),
            None => {
                let body = json!({"ids": [id]});
                let request = RemoteRequest::post(
                    "requesting the text of a token",
                    base,
                    "/api/extra/detokenize",
                    &body,
                );
                let value = client.require_json(&request.with_timeout(self.timeout), listener)?;
                let text = value["result"].as_str().unwrap_or("").to_owned();
                token_texts.insert(id, text.clone());
                text
            }
        };
        Ok(ModelToken { id: TokenId(id), text })
    }
}

pub(crate) fn parse_token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn protocol_error(base: &BaseUrl, why: &str) -> Error {
    Error::unavailable(
        format!("requesting tokens at {base}"),
        format!("{why}; check that the server is KoboldCPP"),
    )
}

/// Where a text must be split so that none of its tokens is the name of a special token: after the name's first character.
fn special_name_splits(tokens: &[ModelToken]) -> Vec<usize> {
    let mut start = 0;
    let mut splits = Vec::new();
    for ModelToken { text, .. } in tokens {
        let word = text.trim_start();
        if special_token_name(word).is_some_and(|name| name == word.trim_end()) {
            splits.push(start + text.len() - word.len() + 1);
        }
        start += text.len();
    }
    splits
}
