//! KoboldCPP's tokens: what a text is cut into, and what each id says.

use crate::address::Base;
use crate::align::{align, special_name};
use crate::http::{Client, Request};
use crate::stream::{Halt, Teller};
use halo_core::seams::{Piece, SeamError};
use halo_core::token::TokenId;
use hyper::header::{self, HeaderValue};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// The id of a text that no server has told the ids of.
pub(crate) const UNKNOWN: TokenId = TokenId(u32::MAX);
/// How many short texts are remembered with their tokens.
const REMEMBERED: usize = 20_000;

/// The way to a server's tokenizer.
#[derive(Debug)]
pub(crate) struct Tokens {
    kind: Kind,
    limit: Duration,
    /// What streamed texts were cut into.
    known: BTreeMap<String, Vec<Piece>>,
}

#[derive(Debug)]
enum Kind {
    /// `/api/v1/tokenize`: ids with their texts.
    Told,
    /// `/api/extra/tokencount`: ids alone. What each says is asked once.
    Counted {
        /// What is put before every text, told to leave it or not.
        before: Vec<u32>,
        texts: BTreeMap<u32, String>,
    },
}

impl Tokens {
    /// Finds out which of the two ways a server has.
    pub fn find(
        client: &Client,
        base: &Base,
        limit: Duration,
        extended: bool,
        teller: &mut Teller<'_>,
    ) -> Result<Self, Halt> {
        let known = BTreeMap::new();
        let mut told = Self { kind: Kind::Told, limit, known };
        if extended && told.tell(client, base, "Once upon a time", teller)?.is_some() {
            return Ok(told);
        }
        told.kind = Kind::Counted { before: Vec::new(), texts: BTreeMap::new() };
        let before = told.count(client, base, "", teller)?;
        told.kind = Kind::Counted { before, texts: BTreeMap::new() };
        Ok(told)
    }

    /// Whether ids come with their texts: the server is the fork, or one like it.
    pub fn are_told(&self) -> bool {
        matches!(self.kind, Kind::Told)
    }

    /// Cuts a text. These servers turn every special name that they meet into its token. Where that is not wanted, the
    /// text is cut within the name and both parts are asked for on their own: `<` and `|im_start|>` are no names, and
    /// their tokens in a row still say the same. Which words are names only the server knows, so it is asked first, and
    /// whatever comes back as one token in brackets is taken for one. Cutting an ordinary word does no harm.
    pub fn cut(
        &mut self,
        client: &Client,
        base: &Base,
        text: &str,
        special: bool,
        teller: &mut Teller<'_>,
    ) -> Result<Vec<Piece>, Halt> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let pieces = self.raw(client, base, text, teller)?;
        let cuts = if special { Vec::new() } else { within_names(&pieces) };
        if cuts.is_empty() {
            return Ok(pieces);
        }
        let mut whole = Vec::new();
        let mut from = 0;
        for to in cuts.into_iter().chain([text.len()]) {
            whole.extend(self.cut(client, base, &text[from..to], special, teller)?);
            from = to;
        }
        Ok(whole)
    }

    /// Cuts a text that was streamed, which mostly is one token, and mostly one that was seen before.
    pub fn streamed(
        &mut self,
        client: &Client,
        base: &Base,
        text: &str,
        teller: &mut Teller<'_>,
    ) -> Result<Vec<Piece>, Halt> {
        if let Some(pieces) = self.known.get(text) {
            return Ok(pieces.clone());
        }
        let pieces = self.raw(client, base, text, teller)?;
        if self.known.len() < REMEMBERED {
            self.known.insert(text.to_owned(), pieces.clone());
        }
        Ok(pieces)
    }

    fn raw(
        &mut self,
        client: &Client,
        base: &Base,
        text: &str,
        teller: &mut Teller<'_>,
    ) -> Result<Vec<Piece>, Halt> {
        let pieces = match &self.kind {
            Kind::Told => {
                let none = || strange(base, "there is no /api/v1/tokenize any more");
                self.tell(client, base, text, teller)?.ok_or_else(none)?
            }
            Kind::Counted { .. } => {
                let ids = self.count(client, base, text, teller)?;
                ids.into_iter().map(|id| self.say(client, base, id, teller)).collect::<Result<_, _>>()?
            }
        };
        if pieces.is_empty() {
            return Err(strange(base, "it says that the text has no tokens").into());
        }
        let (pieces, well) = align(text, pieces);
        if !well {
            tracing::warn!(tokens = pieces.len(), "what the server says of its tokens does not fit the text");
        }
        Ok(pieces)
    }

    /// Ids with their texts; none where the server cannot.
    fn tell(
        &self,
        client: &Client,
        base: &Base,
        text: &str,
        teller: &mut Teller<'_>,
    ) -> Result<Option<Vec<Piece>>, Halt> {
        let body = json!({"text": text, "add_special_tokens": false});
        // The front end that the fork was written for sends it as plain text, so that is what surely works.
        let plain = HeaderValue::from_static("text/plain;charset=UTF-8");
        let request = Request::post("asking for tokens", base, "/api/v1/tokenize", &body)
            .header(header::CONTENT_TYPE, plain)
            .within(self.limit);
        let Some(value) = client.json(&request, teller)? else { return Ok(None) };
        let Some(tokens) = value["tokens"].as_array() else {
            return Err(strange(base, "its answer has no list of tokens").into());
        };
        let piece = |token: &Value| {
            let id = id(&token["token_id"]).ok_or_else(|| strange(base, "a token has no id"))?;
            Ok(Piece { id: TokenId(id), text: token["text"].as_str().unwrap_or("").to_owned() })
        };
        Ok(Some(tokens.iter().map(piece).collect::<Result<_, SeamError>>()?))
    }

    /// Ids alone, without what is put before every text.
    fn count(
        &self,
        client: &Client,
        base: &Base,
        text: &str,
        teller: &mut Teller<'_>,
    ) -> Result<Vec<u32>, Halt> {
        let body = json!({"prompt": text, "special": false});
        let request =
            Request::post("asking for tokens", base, "/api/extra/tokencount", &body).within(self.limit);
        let value = client.must(&request, teller)?;
        let ids: Option<Vec<u32>> = value["ids"].as_array().and_then(|ids| ids.iter().map(id).collect());
        let ids = ids.ok_or_else(|| strange(base, "its answer has no list of ids; a newer version has"))?;
        let before = match &self.kind {
            Kind::Counted { before, .. } => before.len() * usize::from(ids.starts_with(before)),
            Kind::Told => 0,
        };
        Ok(ids[before..].to_vec())
    }

    fn say(&mut self, client: &Client, base: &Base, id: u32, teller: &mut Teller<'_>) -> Result<Piece, Halt> {
        let Kind::Counted { texts, .. } = &mut self.kind else {
            return Err(strange(base, "it tells the texts of its tokens itself").into());
        };
        let text = match texts.get(&id) {
            Some(text) => text.clone(),
            None => {
                let body = json!({"ids": [id]});
                let request =
                    Request::post("asking for a token's text", base, "/api/extra/detokenize", &body);
                let value = client.must(&request.within(self.limit), teller)?;
                let text = value["result"].as_str().unwrap_or("").to_owned();
                texts.insert(id, text.clone());
                text
            }
        };
        Ok(Piece { id: TokenId(id), text })
    }
}

/// An id, where it is one.
pub(crate) fn id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn strange(base: &Base, why: &str) -> SeamError {
    SeamError::new(format!("asking for tokens at {base}"), format!("{why}; is that KoboldCPP?"))
}

/// Where a text must be cut so that none of its tokens is a special name: behind the name's first character.
fn within_names(pieces: &[Piece]) -> Vec<usize> {
    let mut at = 0;
    let mut cuts = Vec::new();
    for Piece { text, .. } in pieces {
        let word = text.trim_start();
        if special_name(word).is_some_and(|name| name == word.trim_end()) {
            cuts.push(at + text.len() - word.len() + 1);
        }
        at += text.len();
    }
    cuts
}
