//! Output constraints of remote models.

use halo_core::Error;
use halo_core::model::OutputConstraint;
use serde_json::Value;

/// The JSON schema of a constraint; none where functions may be called and an answer without a call is free. Only KoboldCPP
/// supports a grammar beside it.
pub(crate) fn parse_schema(constraint: &OutputConstraint) -> Result<Option<Value>, Error> {
    let operation = "reading the output constraint";
    let parse = |schema: &String| {
        serde_json::from_str(schema).map_err(|e| {
            Error::invalid_input(operation, format!("the schema is not valid JSON ({e}); correct it"))
        })
    };
    match constraint {
        OutputConstraint::JsonSchema(schema) => parse(schema).map(Some),
        OutputConstraint::ToolCalls(options) => options.answer_schema.as_ref().map(parse).transpose(),
        OutputConstraint::LarkGrammar(_) | OutputConstraint::GbnfGrammar(_) => {
            let why = "this remote model supports JSON schemas, but no grammars; use a JSON schema";
            Err(Error::invalid_input(operation, why))
        }
    }
}
