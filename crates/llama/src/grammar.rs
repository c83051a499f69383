//! Constrained output: masks the tokens that a JSON schema or a Lark grammar does not allow, with llguidance.
//! GBNF is translated to Lark first.

use crate::ffi::{LlamaToken, ModelWeights};
use crate::gbnf::gbnf_to_lark;
use crate::tool_grammar::{compact_whitespace, tool_grammar};
use halo_core::model::OutputConstraint;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::Value;
use std::sync::Arc;

const MAX_SCHEMA_BYTES: usize = 1 << 18;
/// llguidance recurses once per `$ref`.
const MAX_REFERENCES: usize = 400;

/// The first line of an llguidance error; the other lines are a dump of its parser.
fn first_line(error: &dyn std::fmt::Display) -> String {
    error.to_string().lines().next().unwrap_or("llguidance gives no reason").to_owned()
}

/// Compiles constraints for the vocabulary of one model. Creating it takes time: it reads the whole vocabulary.
pub struct GrammarCompiler {
    factory: ParserFactory,
}

impl GrammarCompiler {
    pub fn new(weights: &ModelWeights) -> Result<Self, String> {
        let size = weights.vocab_size() as LlamaToken;
        let end = (0..size)
            .find(|&t| weights.is_end_of_generation(t))
            .ok_or("the vocabulary of the model has no end-of-generation token")?;
        let token_bytes: Vec<Vec<u8>> = (0..size)
            .map(|token| {
                if weights.is_control(token) {
                    // A control token is not text; llguidance marks it with a byte that UTF-8 never has.
                    [&[TokTrie::SPECIAL_TOKEN_MARKER], weights.token_bytes(token, true).as_slice()].concat()
                } else {
                    weights.token_bytes(token, false)
                }
            })
            .collect();
        let info = TokRxInfo::new(size.cast_unsigned(), end.cast_unsigned());
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &token_bytes)));
        let mut factory = ParserFactory::new_simple(&environment).map_err(|e| e.to_string())?;
        factory.quiet();
        Ok(Self { factory })
    }

    /// None where the constraint leaves the model free. `control_token` gives the number of a control token by its name.
    pub fn compile(
        &self,
        constraint: &OutputConstraint,
        control_token: &dyn Fn(&str) -> Option<LlamaToken>,
    ) -> Result<Option<GrammarMatcher>, String> {
        let tools = match constraint {
            OutputConstraint::ToolCalls(options) => match tool_grammar(options, control_token)? {
                Some(grammar) => Some(grammar),
                None => return Ok(None),
            },
            OutputConstraint::JsonSchema(_)
            | OutputConstraint::LarkGrammar(_)
            | OutputConstraint::GbnfGrammar(_) => None,
        };
        let source = match constraint {
            OutputConstraint::JsonSchema(source)
            | OutputConstraint::LarkGrammar(source)
            | OutputConstraint::GbnfGrammar(source) => source,
            OutputConstraint::ToolCalls(_) => tools.as_ref().expect("written above"),
        };
        if source.len() > MAX_SCHEMA_BYTES || source.matches("\"$ref\"").count() > MAX_REFERENCES {
            return Err(format!(
                "the schema or grammar is too large; at most {MAX_SCHEMA_BYTES} bytes and {MAX_REFERENCES} references are allowed"
            ));
        }
        let grammar = match constraint {
            OutputConstraint::JsonSchema(schema) => {
                let mut schema: Value =
                    serde_json::from_str(schema).map_err(|e| format!("the schema is not JSON: {e}"))?;
                compact_whitespace(&mut schema);
                TopLevelGrammar::from_json_schema(schema)
            }
            OutputConstraint::LarkGrammar(_) | OutputConstraint::ToolCalls(_) => {
                TopLevelGrammar::from_lark(source.clone())
            }
            OutputConstraint::GbnfGrammar(grammar) => TopLevelGrammar::from_lark(gbnf_to_lark(grammar)?),
        };
        let parser = self.factory.create_parser(grammar);
        let mut matcher = Matcher::new(parser);
        if let Some(error) = matcher.get_error() {
            return Err(first_line(&error));
        }
        let mask = matcher.compute_mask_or_eos().map_err(|e| first_line(&e))?;
        Ok(Some(GrammarMatcher { matcher, mask }))
    }
}

/// The state of the grammar after the tokens of an answer so far.
pub struct GrammarMatcher {
    matcher: Matcher,
    mask: SimpleVob,
}

impl GrammarMatcher {
    /// Whether the grammar allows a token as the next one.
    #[must_use]
    pub fn allows(&self, token: LlamaToken) -> bool {
        self.mask.is_allowed(token.cast_unsigned())
    }

    /// Advances by a sampled token; returns whether the answer is complete.
    pub fn accept(&mut self, token: LlamaToken) -> Result<bool, String> {
        self.matcher.consume_token(token.cast_unsigned()).map_err(|e| first_line(&e))?;
        if self.matcher.is_stopped() {
            return Ok(true);
        }
        self.mask = self.matcher.compute_mask_or_eos().map_err(|e| first_line(&e))?;
        Ok(false)
    }
}
