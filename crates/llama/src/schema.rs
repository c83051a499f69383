//! Answers in form: only tokens that a JSON schema or a grammar allows can be chosen.

use crate::ffi::{Token, Weights};
use halo_core::seams::Form as Wanted;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::sync::Arc;

/// The longest schema, and the most references in it.
const MOST_BYTES: usize = 1 << 18;
const MOST_REFERENCES: usize = 400;

/// The first line of what went wrong; the rest is for those who write such libraries.
fn brief(why: &dyn std::fmt::Display) -> String {
    why.to_string().lines().next().unwrap_or("it cannot be used").to_owned()
}

/// What turns schemas into forms, for the vocabulary of one model. Made when it is first needed.
pub struct Forms {
    factory: ParserFactory,
}

impl Forms {
    /// Learns the vocabulary.
    ///
    /// # Errors
    /// When the vocabulary has no token that ends an answer, or cannot be used.
    pub fn new(weights: &Weights) -> Result<Self, String> {
        let size = weights.vocabulary() as Token;
        let end =
            (0..size).find(|&t| weights.ends(t)).ok_or("its vocabulary has no token that ends an answer")?;
        let words: Vec<Vec<u8>> = (0..size)
            .map(|token| {
                if weights.is_mark(token) {
                    // Marks are no text: they are told apart by a byte that no text has.
                    [&[TokTrie::SPECIAL_TOKEN_MARKER], weights.bytes(token, true).as_slice()].concat()
                } else {
                    weights.bytes(token, false)
                }
            })
            .collect();
        let info = TokRxInfo::new(size.cast_unsigned(), end.cast_unsigned());
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
        let mut factory = ParserFactory::new_simple(&environment).map_err(|e| e.to_string())?;
        factory.quiet();
        Ok(Self { factory })
    }

    /// A form for one answer.
    ///
    /// # Errors
    /// When the schema is no JSON or the grammar none, or it asks for what cannot be.
    pub fn form(&self, wanted: &Wanted) -> Result<Form, String> {
        let (Wanted::Schema(schema) | Wanted::Grammar(schema)) = wanted;
        // Each reference is a step deeper when it is read.
        if schema.len() > MOST_BYTES || schema.matches("\"$ref\"").count() > MOST_REFERENCES {
            return Err(format!(
                "the schema is too large: {MOST_BYTES} bytes and {MOST_REFERENCES} references are allowed"
            ));
        }
        let grammar = match wanted {
            Wanted::Schema(schema) => {
                let mut schema: Value =
                    serde_json::from_str(schema).map_err(|e| format!("the schema is no JSON: {e}"))?;
                // Small models lose themselves in blanks: there is one behind a comma or a colon, or none.
                if let Some(fields) = schema.as_object_mut() {
                    fields.entry("x-guidance").or_insert_with(|| {
                        json!({"whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?"})
                    });
                }
                TopLevelGrammar::from_json_schema(schema)
            }
            Wanted::Grammar(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        };
        let parser = self.factory.create_parser(grammar);
        let mut matcher = Matcher::new(parser);
        if let Some(why) = matcher.get_error() {
            return Err(brief(&why));
        }
        let mask = matcher.compute_mask_or_eos().map_err(|e| brief(&e))?;
        Ok(Form { matcher, mask })
    }
}

/// A form that an answer fills.
pub struct Form {
    matcher: Matcher,
    mask: SimpleVob,
}

impl Form {
    /// Whether a token may come next.
    #[must_use]
    pub fn allows(&self, token: Token) -> bool {
        self.mask.is_allowed(token.cast_unsigned())
    }

    /// Tells it what was said; whether the form is full.
    ///
    /// # Errors
    /// When the token was not allowed.
    pub fn said(&mut self, token: Token) -> Result<bool, String> {
        self.matcher.consume_token(token.cast_unsigned()).map_err(|e| brief(&e))?;
        if self.matcher.is_stopped() {
            return Ok(true);
        }
        self.mask = self.matcher.compute_mask_or_eos().map_err(|e| brief(&e))?;
        Ok(false)
    }
}
