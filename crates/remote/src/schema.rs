//! Output constraints of remote models.

use halo_core::Error;
use halo_core::model::OutputConstraint;
use serde_json::Value;

/// The JSON schema of a constraint. Remote servers support no other grammar.
pub(crate) fn parse_schema(constraint: &OutputConstraint) -> Result<Value, Error> {
    let operation = "reading the output constraint";
    match constraint {
        OutputConstraint::JsonSchema(schema) => serde_json::from_str(schema).map_err(|e| {
            Error::invalid_input(operation, format!("the schema is not valid JSON ({e}); correct it"))
        }),
        OutputConstraint::LarkGrammar(_) => {
            let why = "a remote model supports JSON schemas, but not Lark grammars; use a JSON schema";
            Err(Error::invalid_input(operation, why))
        }
    }
}
